"""Gradients of the CUDA C++ kernels (csrc/cuda/backward*.cu) with their host code, run by the
simulator of one GPU with hazards checked, against float64 by the one tolerance rule."""

import re

import pytest
import torch

from attnkern import cases, rng, testing
from attnkern.problem import Problem
from gate import cuda_backward as gate_cases
from ptxsim import SHARED_LIMIT
from test_cuda_kernels import BF16, FP16, FP32, cuda, simulated  # noqa: F401

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


# What the kernels that go by chunks are run with beside float32, whose products tell most about their order.
FEW = [
    "float16, causal, shared keys",
    "softcap, bias, window",
    "bias of queries",
    "rows not aligned",
    "rows without keys",
]
FAMILIES = {  # dtype, head size, cases
    "bfloat16 or float16": (None, None, list(CASES)),
    "float32": (FP32, 40, list(CASES)),
    "bfloat16 by chunks": (BF16, 264, [*FEW, "key and value heads that share otherwise", "window", "one query"]),
    "float16 by chunks": (FP16, 264, FEW[:3]),
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in FAMILIES for name in FAMILIES[family][2]])
def test_gradients(simulated, family, name, record_property):  # noqa: F811
    sizes, kinds, options = CASES[name]
    dtype, head_dim, _ = FAMILIES[family]
    if dtype is not None:
        assert head_dim is not None
        more = sizes[5] - sizes[4] if len(sizes) == 6 else 0
        lengths = [min(n, 100) for n in sizes[2:4]]  # two tiles
        sizes, kinds = (*sizes[:2], *lengths, head_dim, max(head_dim + more, 8)), {**kinds, "dtype": dtype}
    simulated.check(simulated.inputs(*sizes, **kinds), **options)
    assert bool(chunked(simulated)) == (dtype is not None)
    record_property("cuda", row(family, name, sizes))


EXTREMES = [(BF16, each) for each in (*cases.NUMBERS, *cases.FEW_MASKED_BANDS)]
EXTREMES += [(dtype, each) for dtype in (FP16, FP32) for each in cases.NUMBERS[:12:2]]


@pytest.mark.parametrize(("dtype", "extreme"), EXTREMES, ids=lambda x: getattr(x, "name", str(x)))
def test_extremes(simulated, dtype, extreme):  # noqa: F811
    """Scores far from 0 and from each other, scale 0 and below, masks of every shape beside a band; sizes at which the
    last tiles are ragged."""
    simulated.check(extreme.inputs(dtype), **extreme.options)


def row(family, name, sizes, target=80):
    batch, heads, queries, keys, *widths = sizes
    shape = f"{batch} x {heads}, {queries} x {keys}, {'/'.join(map(str, dict.fromkeys(widths)))}"
    return f"backward  sm_{target:<4}{family:<22}{name:<44}{shape}"


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
    simulated.check(simulated.inputs(1, 1, 150, 140, head_dim, head_dim - 8, dtype=BF16), **CAUSAL, **more)
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
        (86, FP32, 8, ["dkdv", "dq"]),
        (90, FP32, 128, ["dkdv", "dq"]),
        (120, FP32, 200, ["dkdv", "dq"]),
        (80, FP32, 512, ["dkdv", "dkdv", "dq"]),
        (86, BF16, 384, ["dkdv", "dkdv", "dq"]),
        (90, FP16, 512, ["dkdv", "dkdv", "dq"]),
    ],
    indirect=["simulated"],
)
def test_head_sizes_by_chunks(simulated, dtype, head_dim, kinds, record_property):  # noqa: F811
    """dV and dK apart where both don't fit; chunks of the rows in shared memory, or not all of them; no conflict."""
    sizes = (1, 1, 70, 66, head_dim, max(head_dim - 60, 8))
    simulated.check(simulated.inputs(*sizes, dtype=dtype), **CAUSAL)
    assert [kind for kind, _, _ in chunked(simulated)] == kinds
    assert all(report.bank_conflicts == 0 for _, _, report in chunked(simulated))
    record_property("cuda", row(str(dtype)[6:], "head sizes", sizes, simulated.recorder.target))


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
        cuda.backward(grad_out, grad_lse if with_lse else None, q, k, v, None, None, out, lse, params, 1)
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


@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 64), (BF16, 96), (BF16, 256), (BF16, 264), (FP32, 40)])
def test_dropout(simulated, dtype, head_dim):  # noqa: F811
    """Bit for bit the entries of `rng.keep_mask`, for row tiles of 16 and of 32 keys, of whole and of half blocks."""
    options = {"dropout_p": 0.3, "enable_gqa": True}
    inputs = simulated.inputs(2, 2, 40, 100, head_dim, heads_k=1, dtype=dtype)
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


@pytest.mark.parametrize("name", ["bfloat16", "window", "bias", "bias shared by the heads", "head sizes 8 and 17"])
def test_tf32(simulated, name, record_property):  # noqa: F811
    """Where torch allows it. A tf32 has float16's significand, so float16's rule holds: for inputs that are float16
    numbers, and results rounded to it."""
    sizes, kinds, options = CASES[name]
    inputs = simulated.inputs(*sizes, **{**kinds, "dtype": FP16})

    def function(**given):
        wide = {n: x.float() if x.is_floating_point() else x for n, x in given.items() if isinstance(x, torch.Tensor)}
        return simulated.attention(**{**given, **wide}).half()

    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        testing.check_attention(inputs, function=function, **options)
    finally:
        matmul.fp32_precision = before
    arithmetics = {found[0] for x in simulated.recorder.launches if (found := re.search(r"6SingleILb\d", x.name))}
    assert arithmetics == {"6SingleILb0"}
    record_property("cuda", row("tf32", name, sizes))
