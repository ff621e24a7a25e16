"""The CUDA C++ kernels (csrc/cuda) with their host code, compiled for a GPU and run on the CPU (tests/launches)."""

import re

import pytest
import torch

import ptxsim
from attnkern import testing
from attnkern.backends import cuda
from attnkern.problem import Problem
from attnkern.signatures import Inputs
from matrix import call
from ptxsim import SHARED_LIMIT
from simulated import BF16, FP16, FP32, simulated  # noqa: F401


@pytest.mark.parametrize("size", [40, 200, 300])
def test_tf32(simulated, size, set_precision, record_property):  # noqa: F811
    """Where torch allows it. A tf32 has float16's significand, so float16's rule holds: for inputs that are float16
    numbers, and results rounded to it. Without, the same inputs are multiplied exactly."""
    this = call("plain", "", (1, 2, 40, 70, size), dtype="fp16")
    inputs, outs = this.inputs(), []

    def function(**given):
        wide = {n: x.float() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        outs.append(simulated.attention(**wide))
        return outs[-1].half()

    for precision in ("tf32", "ieee"):
        set_precision(precision)
        testing.check_attention(inputs, function=function, gradients=False)
    assert not torch.equal(*outs)
    record_property("cuda", (f"tf32: {this.shape}", "sm_80"))


def test_split_products_keep_what_rounded_ones_lose(simulated):  # noqa: F811
    """Values that a tf32 can't hold come back as they are from rows with one key, and probabilities add up to one."""
    torch.manual_seed(1)
    for size in (64, 300):
        value = torch.randn(1, 1, 33, size)
        x = torch.randn(1, 1, 33, size)
        band = {"window": (0, 0)}
        assert (simulated.attention(x, x, value, **band) - value).abs().max() < 2**-21
        ones = simulated.attention(x, x[:, :, :20], torch.ones(1, 1, 20, size))
        assert (ones - 1).abs().max() < 2**-21


@pytest.mark.parametrize(("dtype", "size"), [(BF16, 64), (FP32, 64), (FP32, 200), (BF16, 300), (FP32, 300)])
def test_splits_change_nothing_but_rounding(simulated, dtype, size):  # noqa: F811
    """Any number of splits is right, those that find no keys included; also the most that there are."""
    inputs = simulated.inputs(1, 1, 2, 200, size, dtype=dtype)
    q, k, v = inputs.tensors.values()
    want = testing.expected(q, k, v)
    params = Problem.from_sdpa(q, k, v, None, 0.0).params
    for splits in (1, 3, 128 if size == 64 else 20):
        out, lse = cuda.forward(Inputs(q, k, v), params, True, splits=splits)
        for name, actual in (("out", out), ("lse", lse)):
            want[name].check(actual, name=f"{name} of {splits} splits")


def test_operators_without_a_head(simulated):  # noqa: F811
    """Heads are divided by: what has none of queries is answered first, by every operator. Gradients are zeros."""
    q, k = torch.ones(2, 0, 5, 8, dtype=BF16), torch.ones(2, 2, 7, 8, dtype=BF16)
    bias, rows = torch.ones(1, 1, 5, 7, dtype=BF16), torch.ones(2, 0, 5)
    params = Problem.from_sdpa(q, q, q, None, 0.0).params
    for splits in (None, 0, 3):
        out, lse = cuda.forward(Inputs(q, k, k, bias), params, True, splits=splits)
        assert (out.shape, lse.shape) == (q.shape, rows.shape)
    grads = cuda.backward(q, None, Inputs(q, k, k, bias), q, rows, params, 15)
    for grad, x in zip(grads, (q, k, k, bias, torch.empty(0)), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()
    assert not simulated.recorder.launches


def test_bits_are_read_by_words(simulated):  # noqa: F811
    """A Mask has its rows where words begin; who calls the operators with others is told."""
    q, k = torch.zeros(1, 1, 5, 8, dtype=BF16), torch.zeros(1, 1, 100, 8, dtype=BF16)
    params = Problem.from_sdpa(q, k, k, None, 0.0).params
    wide = torch.zeros(1, 1, 5, 24, dtype=torch.uint8)
    for bits in (wide[..., 1:17], torch.zeros(1, 1, 5, 20, dtype=torch.uint8)[..., :16]):
        with pytest.raises(RuntimeError, match="bias of bits must have its rows at multiples of 8 bytes"):
            cuda.forward(Inputs(q, k, k, bits), params, True)
    assert not simulated.recorder.launches
    cuda.forward(Inputs(q, k, k, wide[..., :16]), params, True)


def test_a_chip_that_no_binary_fits(simulated):  # noqa: F811
    """One sentence that says what to do."""
    simulated.recorder.target, simulated.recorder.launch_error = 120, 209
    q = torch.zeros(1, 1, 70, 64, dtype=BF16)
    expected = "no binary for compute capability 12.0, .* build with ATTNKERN_CUDA_ARCHS=120, or update the driver"
    with pytest.raises(RuntimeError, match=expected):
        simulated.sdpa(q, q, q)


SUBSETS = [("query",), ("key",), ("value",), ("attn_mask",), ("query", "attn_mask"), ("key", "value")]


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_only_what_is_asked_for(simulated, subset):  # noqa: F811
    """A gradient is the same, whatever else is asked for."""
    inputs = simulated.inputs(1, 2, 70, 70, 32, dtype=BF16, mask=("float", "1HLS"))
    grads = []
    for wanted in (subset, tuple(inputs.tensors)):
        leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.tensors.items()}
        out = simulated.sdpa(*leaves.values())
        grads.append(torch.autograd.grad(out, [leaves[name] for name in subset], torch.ones_like(out)))
    assert all(map(torch.equal, *grads))


def test_rows_of_heads_are_dealt_out_longest_first(simulated):  # noqa: F811
    """With a causal band the first blocks of the grid are the last rows of all heads."""
    q = torch.zeros(2, 3, 300, 64, dtype=BF16)
    simulated.recorder.simulate = False
    simulated.sdpa(q, q, q, is_causal=True)
    simulated.sdpa(q, q, q)
    causal, plain = simulated.recorder.launches
    assert causal.grid == plain.grid == (3 * 2 * 3, 1, 1)
    assert [causal.parameters[0][-7], plain.parameters[0][-7]] == [1, 0]  # the last member, heads_first


def test_no_bank_conflicts(simulated):  # noqa: F811
    """Swizzled tiles: neither ldmatrix nor cp.async makes lanes wait for each other, in any class of tile."""
    for size in (32, 64, 96, 128, 192, 256):
        simulated.check(simulated.inputs(1, 1, 128, 128, size, dtype=BF16), gradients=False)
    assert [report.bank_conflicts for report in simulated.recorder.reports] == [0] * 6


@pytest.mark.parametrize(
    ("batch", "heads", "heads_k", "queries", "keys", "kernel"),
    [
        (2, 4, 4, 49, 49, "forward"),  # four tiles of rows for each head
        (2, 4, 4, 49, 5000, "forward"),
        (7, 1, 1, 49, 49, "decode"),  # the forward kernel's blocks wouldn't fill eight multiprocessors
        (8, 1, 1, 16, 49, "decode"),
        (2, 16, 2, 4, 500, "decode"),  # two tiles for eight heads
    ],
)
def test_keys_are_read_as_seldom_as_can_be(simulated, batch, heads, heads_k, queries, keys, kernel):  # noqa: F811
    """A tile of 16 rows reads them anew: many small windows go to the kernel that reads them once for a head."""
    simulated.recorder.simulate = False
    q, k = torch.zeros(batch, heads, queries, 64, dtype=BF16), torch.zeros(batch, heads_k, keys, 64, dtype=BF16)
    simulated.sdpa(q, k, k, enable_gqa=True)
    assert simulated.kernels()[0] == kernel


def planned(chip, *sizes, multiprocessors=100, **options):
    """The first line of a plan: kind, rows, keys, head class, threads, bytes of shared memory, blocks, the rest."""
    kinds = {key: options.pop(key) for key in ("dtype", "mask", "heads_k", "layout") if key in options}
    inputs = testing.make_inputs(*sizes, **kinds).tensors
    limit = SHARED_LIMIT[chip]
    line = cuda.plan(
        Problem.from_sdpa(*inputs.values(), **options), on=cuda.Chip(chip, multiprocessors, limit + 1024, limit)
    )[0]
    pattern = r"(\w+), sm_80: (\d+) x (\d+) .*head size up to (\d+), (\d+) threads, (\d+) bytes .*?, (\d+) blocks(.*)"
    found = re.match(pattern, line)
    return (found[1], *map(int, found.groups()[1:7]), found[8])


KIB = 1024
# dtype, head size -> rows, keys, head class, threads, KiB of shared memory; variant
TILES = {
    (BF16, 64): (128, 64, 64, 128, 32, "fast path"),
    (FP16, 104): (128, 64, 128, 128, 64, "fast path"),
    (FP16, 100): (64, 64, 128, 128, 48, "generic"),  # rows of 200 bytes aren't whole 16-byte chunks
    (BF16, 160): (64, 64, 192, 128, 72, "fast path"),
    (BF16, 256): (64, 64, 256, 128, 96, "fast path"),
    (BF16, 257): (64, 64, 512, 256, 99, "generic"),
    (FP32, 8): (128, 16, 32, 128, 20, "generic"),
    (FP32, 64): (128, 16, 64, 128, 40, "generic"),
    (FP32, 128): (64, 32, 128, 128, 64, "generic"),
    (FP32, 192): (64, 32, 192, 128, 96, "generic"),
    (FP32, 256): (64, 16, 256, 128, 96, "generic"),
    (FP32, 512): (32, 64, 512, 256, 97.5, "generic"),
}


@pytest.mark.parametrize(("dtype", "size"), TILES, ids=str)
def test_plan_of_forward(dtype, size):
    """Tiles by dtype and head size, within 99 KiB and so the same on every chip; blocks by rows, heads and batch."""
    *tile, kib, variant = TILES[dtype, size]
    for chip in (80, 86, 120):
        found = planned(chip, 2, 3, 300, 70, size, dtype=dtype)
        assert found == ("forward", *tile, kib * KIB, -(-300 // tile[0]) * 6, f", {variant}")
    causal = planned(80, 2, 3, 300, 70, size, dtype=dtype, is_causal=True)
    assert causal[-1] == f", {variant}, longest rows first"


# dtype, head size -> packed rows, keys, head class, threads, KiB of shared memory
DECODE_TILES = {
    (BF16, 128): (16, 64, 128, 128, 68),
    (BF16, 256): (16, 64, 256, 128, 72),
    (BF16, 512): (64, 64, 512, 256, 99),
    (FP32, 64): (16, 64, 64, 128, 68),
    (FP32, 128): (16, 64, 128, 128, 72),
    (FP32, 256): (16, 32, 256, 128, 80),
    (FP32, 300): (32, 64, 512, 256, 97.5),
}


@pytest.mark.parametrize(("dtype", "size"), DECODE_TILES, ids=str)
def test_plan_of_decode(dtype, size):
    *tile, kib = DECODE_TILES[dtype, size]
    long = {"heads_k": 2, "enable_gqa": True, "dtype": dtype}
    found = planned(80, 1, 8, 4, 5000, size, **long)
    splits = int(re.search(r"keys in (\d+) splits", found[-1])[1])
    assert found[:-1] == ("decode", *tile, kib * KIB, 2 * splits)
    assert splits > 1
    # More heads than the chip can hold need no splits; more queries than are packed, and dropout, no decode.
    assert "keys not split" in planned(80, 1, 8, 4, 5000, size, **long, multiprocessors=1)[-1]
    assert planned(80, 1, 8, 17, 5000, size, **long)[0] == "forward"
    assert planned(80, 1, 8, 4, 5000, size, **long, dropout_p=0.5)[0] == "forward"


REFUSED = {
    "query is float64": {"dtype": torch.float64},
    "head size 520 is above 512": {"size": 520},
}


@pytest.mark.parametrize("why", REFUSED)
def test_refusals(simulated, why):  # noqa: F811
    given = {"dtype": BF16, "size": 32, **REFUSED[why]}
    x = torch.zeros(1, 1, 3, given["size"], dtype=given["dtype"])
    with pytest.raises(RuntimeError, match=why):
        simulated.sdpa(x, x, x)


def test_notes_say_what_is_slow(simulated):  # noqa: F811
    x = torch.zeros(1, 2, 70, 24, dtype=BF16)
    problem = Problem.from_sdpa(x, testing.with_layout(x, "offset"), x)
    assert [note.split(",")[0] for note in cuda.notes(problem)] == ["reads key element by element"]


# Above 256, in order: between the rows' key ranges and who looks for blocks in them, before a chunk of K, between the
# maxima and who reads them, before chunks of V's first half.
@pytest.mark.parametrize(
    ("dtype", "size", "barrier"),
    [(BF16, 64, n) for n in range(3)] + [(FP32, 64, n) for n in range(3)] + [(BF16, 264, n) for n in range(4)],
)
def test_a_missing_barrier_is_found(simulated, dtype, size, barrier):  # noqa: F811
    """Each of the forward loop's barriers is needed, and these tests would see it go."""
    q = torch.randn(1, 1, 65, size, dtype=dtype)
    ranges = torch.tensor([[0, 60]], dtype=torch.int32).view(1, 1, 1, 1, 2) if size > 256 else None
    simulated.recorder.simulate = False
    out = simulated.attention(q, q, q, key_ranges=ranges)
    (launch,) = simulated.recorder.launches
    start = launch.kernel.text.index(f".entry {launch.name}(")
    body = launch.kernel.text[start:]
    found = [match.span() for match in re.finditer(r"bar(rier)?\.sync\s+0;", body)]
    first, last = found[barrier]
    broken = launch.kernel.with_text(launch.kernel.text[:start] + body[:first] + body[last:])
    with pytest.raises(ptxsim.Hazard):
        ptxsim.launch(
            broken,
            launch.grid,
            *launch.parameters,
            block=launch.block,
            shared=launch.shared,
            tensors=[q, out, *([] if ranges is None else [ranges])],
        )
