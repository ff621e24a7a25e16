"""Gradients of the CUDA C++ kernels (csrc/cuda/backward.cu) with their host code, run by the simulator of one GPU with
hazards checked, against float64 by the one tolerance rule."""

import re

import pytest
import torch

from attnkern import rng
from gate import cuda_backward as gate_cases
from test_cuda_kernels import BF16, FP16, FP32, simulated  # noqa: F401

SMALL, LARGE = 86, 80  # GPUs with 99 and 163 KiB of shared memory for a block

CAUSAL = {"is_causal": True}
LAST = {"is_causal": True, "alignment": "bottom_right"}


def case(*sizes, kinds=None, **options):
    """Sizes (batch, heads, seqlen_q, seqlen_k, head_dim[, head_dim_v]), kinds of inputs, options of the call."""
    return sizes, {"dtype": BF16, **(kinds or {})}, options


CASES = {
    "bfloat16": case(1, 2, 100, 170, 64),
    "float16, causal, shared keys": case(
        1, 4, 150, 130, 64, **CAUSAL, enable_gqa=True, kinds={"dtype": FP16, "heads_k": 2}
    ),
    "one key head for all": case(2, 3, 70, 40, 32, **LAST, enable_gqa=True, kinds={"heads_k": 1}),
    "key and value heads that share otherwise": case(
        1, 6, 33, 70, 64, enable_gqa=True, kinds={"heads_k": 2, "heads_v": 3}
    ),
    "more value heads than key heads": case(1, 4, 33, 70, 64, enable_gqa=True, kinds={"heads_k": 1, "heads_v": 2}),
    "window": case(1, 1, 170, 150, 64, window=(40, 3), alignment="bottom_right"),
    "window to the left": case(1, 1, 160, 150, 64, window=(30, None)),
    "rows without keys": case(1, 2, 150, 50, 64, **LAST),
    "keys that no query reaches": case(1, 1, 20, 170, 32, **CAUSAL),
    "one query": case(2, 2, 1, 150, 64, **LAST),
    "one key": case(1, 2, 40, 1, 64),
    "softcap, head sizes 80 and 96": case(1, 1, 90, 70, 80, 96, softcap=3.0, kinds={"dtype": FP16}),
    "softcap, bias, window": case(1, 1, 70, 80, 64, softcap=2.0, window=(30, 20), kinds={"mask": ("float", "BHLS")}),
    "scale 0": case(1, 1, 40, 40, 64, scale=0.0),
    "scale below 0": case(1, 1, 40, 40, 64, scale=-0.5),
    "bias": case(2, 2, 70, 80, 64, **CAUSAL, kinds={"mask": ("float", "BHLS")}),
    "bias, shared keys": case(
        1, 4, 40, 70, 32, enable_gqa=True, kinds={"mask": ("float", "BHLS"), "heads_k": 2, "dtype": FP16}
    ),
    "float32 bias of full size with holes": case(
        1, 2, 70, 140, 64, window=(20, 20), kinds={"mask": ("holes", "BHLS"), "mask_dtype": FP32}
    ),
    "float32 bias shared by the batch": case(2, 2, 70, 70, 64, kinds={"mask": ("holes", "1HLS"), "mask_dtype": FP32}),
    "bias shared by the heads": case(2, 2, 70, 70, 80, 24, **CAUSAL, kinds={"mask": ("float", "B1LS")}),
    "bias of keys": case(2, 2, 70, 90, 64, **CAUSAL, kinds={"mask": ("float", "B11S")}),
    "bias of queries": case(2, 2, 70, 90, 64, kinds={"mask": ("float", "1HL1")}),
    "bias of everything": case(1, 2, 70, 90, 64, window=(20, None), kinds={"mask": ("float", "11")}),
    "bool mask": case(1, 2, 70, 96, 64, kinds={"mask": ("bool", "BHLS")}),
    "bool mask of keys, window": case(2, 1, 70, 70, 64, window=(20, 20), kinds={"mask": ("bool", "B11S")}),
    "length-major": case(2, 3, 40, 70, 64, kinds={"layout": "blhd"}),
    "rows not aligned": case(1, 2, 40, 70, 24, kinds={"layout": "offset"}),
    "last stride 2, padding between rows": case(1, 2, 40, 70, 24, kinds={"layout": ("stepped", "padded", "e_major")}),
    "head sizes 8 and 17": case(1, 2, 40, 70, 8, 17),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(simulated, name):  # noqa: F811
    sizes, kinds, options = CASES[name]
    simulated.check(simulated.inputs(*sizes, **kinds), **options)


# The variant for bands alone has wide tiles where there is shared memory for them; the one for everything has not.
@pytest.mark.parametrize(
    ("simulated", "general"),
    [(SMALL, False), (LARGE, False), (SMALL, True)],
    indirect=["simulated"],
    ids=["sm_86", "sm_80", "general"],
)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_head_sizes(simulated, head_dim, general):  # noqa: F811
    """Every width of tile, with more queries and keys than a block has rows; no bank conflict."""
    more = {"softcap": 5.0} if general else {}
    simulated.check(simulated.inputs(1, 1, 150, 140, head_dim, head_dim - 8, dtype=BF16), **CAUSAL, **more)
    claimed = {case.name: case.source.shared for case in gate_cases.cases()}
    last = list(zip(simulated.recorder.launches, simulated.recorder.reports, strict=True))[-2:]
    for (launch, report), kernel in zip(last, ("dkdv_kernel", "dq_kernel"), strict=True):
        assert f"{kernel}I13__nv_bfloat16Li{head_dim}ELb{int(not general)}E" in launch.name
        wide = simulated.recorder.target == LARGE and head_dim >= 128
        name = f"{kernel.split('_')[0]} d{head_dim}{' general' * general}{' wide' * wide}"
        assert launch.shared == claimed[f"backward {name}"]
        assert report.bank_conflicts == 0


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_dropout(simulated, head_dim):  # noqa: F811
    """Bit for bit the entries of `rng.keep_mask`, for row tiles of 16 and of 32 keys, of whole and of half blocks."""
    options = {"dropout_p": 0.3, "enable_gqa": True}
    inputs = simulated.inputs(2, 2, 40, 100, head_dim, heads_k=1, dtype=BF16)
    torch.manual_seed(11)
    keep = rng.keep_mask(rng.draw_seed(torch.device("cpu")), 0.3, 2, 2, 40, 100)
    torch.manual_seed(11)
    simulated.check(inputs, **options, keep=keep)


@pytest.mark.parametrize("shape", ["BHLS", "1HLS"])
def test_dropout_with_a_bias_and_a_band(simulated, shape):  # noqa: F811
    inputs = simulated.inputs(2, 1, 70, 70, 64, dtype=BF16, mask=("float", shape))
    torch.manual_seed(7)
    keep = rng.keep_mask(rng.draw_seed(torch.device("cpu")), 0.5, 2, 1, 70, 70)
    torch.manual_seed(7)
    simulated.check(inputs, dropout_p=0.5, window=(50, 10), keep=keep)


def test_only_what_is_asked_for_is_launched(simulated):  # noqa: F811
    """dQ alone, dK and dV alone, the gradient of a bias alone."""
    for names, kernels in [
        (("query",), ["dq_kernel"]),
        (("key",), ["dkdv_kernel"]),
        (("value",), ["dkdv_kernel"]),
        (("attn_mask",), ["bias_gradient_kernel"]),
    ]:
        inputs = simulated.inputs(1, 1, 33, 40, 32, dtype=BF16, mask=("float", "11"))
        leaves = {n: x.detach().requires_grad_(n in names) for n, x in inputs.tensors.items()}
        out = simulated.attention(**leaves)
        before = len(simulated.recorder.launches)
        (grad,) = torch.autograd.grad(out.sum(), [leaves[n] for n in names])
        assert torch.isfinite(grad).all()
        launched = [launch.name for launch in simulated.recorder.launches[before:]]
        assert [re.search(r"[a-z_]*_kernel", name)[0].lstrip("_") for name in launched] == ["delta_kernel", *kernels]
