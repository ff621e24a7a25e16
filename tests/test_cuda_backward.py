"""Gradients of the CUDA C++ kernels (csrc/cuda/backward*.cu) with their host code, run by the
simulator of one GPU with hazards checked, against float64 by the one tolerance rule."""

import re

import pytest
import torch

from attnkern import testing
from attnkern.backends import cuda
from attnkern.problem import Problem
from attnkern.signatures import Inputs
from gate import cuda_backward as gate_cases
from matrix import call, tagged
from ptxsim import SHARED_LIMIT
from simulated import BF16, FP16, FP32, simulated  # noqa: F401

SMALL, LARGE = 86, 80  # GPUs with 99 and 163 KiB of shared memory for a block


# The variant for bands alone has wide tiles where there is shared memory for them; the one for everything has not.
@pytest.mark.parametrize(
    ("simulated", "generic"),
    [(SMALL, False), (LARGE, False), (SMALL, True)],
    indirect=["simulated"],
    ids=["sm_86", "sm_80", "generic"],
)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_head_sizes(simulated, head_dim, generic):  # noqa: F811
    """Every width of tile, with more queries and keys than a block has rows; no bank conflict."""
    more = {"softcap": 5.0} if generic else {}
    simulated.check(simulated.inputs(1, 1, 150, 140, head_dim, head_dim - 8, dtype=BF16), is_causal=True, **more)
    claimed = {case.name: case.source.shared for case in gate_cases.cases()}
    last = list(zip(simulated.recorder.launches, simulated.recorder.reports, strict=True))[-2:]
    for (launch, report), kernel in zip(last, ("dkdv_kernel", "dq_kernel"), strict=True):
        assert f"{kernel}I13__nv_bfloat16Li{head_dim}ELb{int(not generic)}E" in launch.name
        wide = simulated.recorder.target == LARGE and head_dim >= 128
        name = f"{kernel.split('_')[0]} d{head_dim}{' generic' * generic}{' wide' * wide}"
        assert launch.shared == claimed[f"backward {name}"]
        assert report.bank_conflicts == 0


def chunked(simulated):  # noqa: F811
    """Of every launch of the kernels that go by chunks: what it makes, its bytes of shared memory, and the report."""
    both = zip(simulated.recorder.launches, simulated.recorder.reports, strict=True)
    made = {"Lb1": "dkdv", "Lb0": "dq"}
    return [
        (made[re.search(r"chunked_kernelI.*(Lb\d)EEEv", launch.name)[1]], launch.shared, report)
        for launch, report in both
        if "chunked_kernel" in launch.name
    ]


@pytest.mark.parametrize(
    ("simulated", "dtype", "head_dim", "kinds"),
    [
        (86, "fp32", 8, ["dkdv", "dq"]),
        (90, "fp32", 128, ["dkdv", "dq"]),
        (120, "fp32", 200, ["dkdv", "dq"]),
        (80, "fp32", 512, ["dkdv", "dkdv", "dq"]),
        (86, "bf16", 384, ["dkdv", "dkdv", "dq"]),
        (90, "fp16", 512, ["dkdv", "dkdv", "dq"]),
    ],
    indirect=["simulated"],
)
def test_head_sizes_by_chunks(simulated, dtype, head_dim, kinds, record_property):  # noqa: F811
    """dV and dK apart where both don't fit; chunks of the rows in shared memory, or not all of them; no conflict."""
    this = call("head sizes", "", (1, 1, 70, 66, head_dim, max(head_dim - 60, 8)), dtype=dtype, causal=True)
    simulated.check_call(this)
    assert [kind for kind, _, _ in chunked(simulated)] == kinds
    assert all(report.bank_conflicts == 0 for _, _, report in chunked(simulated))
    record_property("cuda", (f"head sizes by chunks: {this.shape}", f"sm_{simulated.recorder.target} {dtype}"))


def planned(chip, *sizes, kinds=None, wanted=("query", "key", "value", "attn_mask"), **options):
    """plan_backward for a chip of this compute capability: rows, columns, threads, bytes, blocks, variant."""
    inputs = testing.make_inputs(*sizes, **{"dtype": BF16, **(kinds or {})}).tensors
    problem = Problem.from_sdpa(*(x.requires_grad_(n in wanted) for n, x in inputs.items()), **options)
    limit = SHARED_LIMIT[chip]
    found = cuda.plan(problem, on=cuda.Chip(chip, 8, limit + 1024, limit))
    pattern = r"backward ([a-z ]+), sm_80: (\d+) x (\d+) .*, (\d+) threads, (\d+) bytes .*, (\d+) blocks(?:, )?(.*)"
    matches = [match for line in found if (match := re.match(pattern, line))]
    return {match[1]: (*map(int, match.groups()[1:6]), match[7]) for match in matches}


LAYOUTS = {
    "contiguous": lambda x: x,
    "(B, L, H, D)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "unaligned": lambda x: torch.nn.functional.pad(x, (1, 0))[..., 1:],
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_delta_is_the_row_sum_of_grad_out_times_out_less_grad_lse(simulated, layout, dtype):  # noqa: F811
    for head_dim, with_lse in ((1, False), (24, True), (257, False)):
        sizes = 2, 3, 37, head_dim
        q, k, v = (torch.randn(sizes).to(dtype) for _ in range(3))
        grad_out, out = (LAYOUTS[layout](torch.randn(sizes).to(dtype)) for _ in range(2))
        lse, grad_lse = torch.zeros(sizes[:3]), torch.randn(2, 37, 3).transpose(1, 2)
        exact = (grad_out.double() * out.double()).sum(-1) - (grad_lse if with_lse else 0)
        params = Problem.from_sdpa(q, k, v).params
        cuda.backward(grad_out, grad_lse if with_lse else None, Inputs(q, k, v), out, lse, params, 1)
        (delta,) = (x for x in simulated.recorder.tensors if x.shape == (exact.numel(),))
        # The sum of head_dim products, each rounded, in any order: head_dim * eps of their magnitudes' sum at most.
        bound = (grad_out.double() * out.double()).abs().sum(-1) + exact.abs()
        error = (delta.view(exact.shape).double() - exact).abs()
        assert (error <= 2 * (head_dim + 2) * torch.finfo(torch.float32).eps * bound).all()


def test_plan():
    """Tiles by the shared memory of the chip, chunks by dtype and head size, blocks by rows and heads; pure."""
    wide, narrow = (planned(chip, 1, 2, 70, 300, 128) for chip in (80, 86))
    assert wide == {
        "dk dv": (128, 64, 256, 2 * (128 + 2 * 64) * 256 + 1024 + 2 * 128 * 64 * 2, 3 * 2, "fast path, wide"),
        "dq": (128, 64, 256, 2 * (128 + 2 * 64) * 256 + 128 * 64 * 2, 1 * 2, "fast path, wide"),
    }
    assert narrow == {
        "dk dv": (128, 32, 256, 2 * (128 + 2 * 32) * 256 + 512, 3 * 2, "fast path, narrow"),
        "dq": (128, 32, 256, 2 * (128 + 2 * 32) * 256, 1 * 2, "fast path, narrow"),
    }
    bias = planned(80, 2, 2, 70, 300, 64, kinds={"mask": ("float", "1H1S")})
    assert list(bias) == ["dk dv", "dq", "bias"]
    assert bias["bias"][4] == 5 * 2
    assert bias["dq"][5] == "generic, narrow"
    full = planned(80, 2, 2, 70, 300, 64, kinds={"mask": ("float", "BHLS")}, wanted=("attn_mask",))
    assert list(full) == ["dq"]  # which writes the gradient of a bias with an entry per score in passing


def test_plan_by_chunks():
    """Shared memory holds two tiles of columns of 16 KiB, the scores handed over, 1 KiB of row constants, and tiles of
    rows: one per chunk of both head sizes, or as many as fit."""
    kib, beside = 1024, {FP32: 32 + 16 + 1, BF16: 32 + 8 + 1}
    variant = "generic, head size by chunks"

    def made(chip, dtype, head_dim, **more):
        return planned(chip, 1, 4, 70, 300, head_dim, kinds={"dtype": dtype}, **more)

    both = {"dk dv": (64, 64, 256, (beside[FP32] + 2 * 16) * kib, 5 * 4, variant)}
    both["dq"] = (64, 64, 256, (beside[FP32] + 2 * 16) * kib, 2 * 4, variant)
    assert made(86, FP32, 64) == both
    assert [made(chip, FP32, 256)["dq"][3] // kib for chip in (86, 80, 90)] == [49 + 3 * 16, 49 + 7 * 16, 49 + 8 * 16]
    apart = made(80, BF16, 512)
    assert list(apart) == ["dv", "dk", "dq"]
    assert [apart[name][3] // kib for name in apart] == [41 + 4 * 16, 41 + 7 * 16, 41 + 7 * 16]
    assert [apart[name][4] for name in apart] == [5 * 4, 5 * 4, 2 * 4]
    assert list(made(80, BF16, 512, wanted=("key",))) == ["dk dv"]
    assert made(80, BF16, 513) == made(80, FP32, 513) == {}


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


def test_only_what_is_asked_for_by_chunks(simulated):  # noqa: F811
    """The same where dV and dK don't fit into one launch; a gradient is the same with the others and without."""
    inputs = simulated.inputs(1, 1, 20, 66, 264, dtype=FP32)
    grads = []
    for names, kinds in [
        (("query", "key", "value"), ["dkdv", "dkdv", "dq"]),
        (("query",), ["dq"]),
        (("key",), ["dkdv"]),
        (("value",), ["dkdv"]),
    ]:
        leaves = {n: x.detach().requires_grad_(n in names) for n, x in inputs.tensors.items()}
        before = len(chunked(simulated))
        out = simulated.attention(**leaves)
        found = torch.autograd.grad(out, [leaves[n] for n in names], torch.ones_like(out))
        grads.append(dict(zip(names, found, strict=True)))
        assert [kind for kind, _, _ in chunked(simulated)[before:]] == kinds
    for single in grads[1:]:
        for name, grad in single.items():
            assert torch.equal(grad, grads[0][name])


@pytest.mark.parametrize("name", tagged("tf32"))
def test_tf32(simulated, name, set_precision, record_property):  # noqa: F811
    """Where torch allows it. A tf32 has float16's significand, so float16's rule holds: for inputs that are float16
    numbers, and results rounded to it."""
    this = tagged("tf32")[name]
    inputs, options = this.inputs(dtype=FP16), this.options

    def function(**given):
        wide = {n: x.float() if x.is_floating_point() else x for n, x in given.items() if isinstance(x, torch.Tensor)}
        return simulated.attention(**{**given, **wide}).half()

    set_precision("tf32")
    testing.check_attention(inputs, function=function, **options)
    arithmetics = {found[0] for x in simulated.recorder.launches if (found := re.search(r"6SingleILb\d", x.name))}
    assert arithmetics == {"6SingleILb0"}
    record_property("cuda", (f"gradients in tf32: {name}", "sm_80"))
