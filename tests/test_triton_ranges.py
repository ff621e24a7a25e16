"""Key ranges in the Triton kernels, in the simulator: ranges of other strides and of other places than those of
test_gpu_calls.py; and the blocks that are visited, one by one, against those that hold a live score."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from attnkern.triton_kernels import configs, plan
from attnkern.triton_kernels.arguments import Masks, Numbers
from attnkern.triton_kernels.backward import BackwardStrides
from attnkern.triton_kernels.ranges import LOOK, next_keys, next_queries, visiting

import attnkern
import routes
import simulated
import test_triton_second_order as second_order
from attnkern import ops, rng, testing
from attnkern.problem import Problem
from attnkern.signatures import Derivatives, Inputs
from matrix import KINDS, anything, documents, padding, window_and_sinks
from routes import table
from simulated import BF16

GPUS = (80, 90)
GQA = {"enable_gqa": True}


@pytest.mark.parametrize("mapped", [True, False])
def test_vmap(mapped):
    """Of samples with ranges of their own, or with the same; each has its own dropout."""
    q, k, v = (x.detach() for x in testing.make_inputs(3, 2, 40, 64, 64, dtype=BF16).tensors.values())
    ranges = anything(3 if mapped else 1, 1, 40, 2, 64).to(torch.int32)
    with simulated.triton():
        torch.manual_seed(3)
        together = torch.vmap(
            lambda q, k, v, r: attnkern.attention(q, k, v, key_ranges=r, dropout_p=0.4, backend="triton"),
            in_dims=(0, 0, 0, 0 if mapped else None),
            randomness="different",
        )(*(x[:, None] for x in (q, k, v)), ranges[:, None] if mapped else ranges)
        torch.manual_seed(3)
        seeds = torch.vmap(lambda _: rng.draw_seed(torch.device("cpu")), randomness="different")(torch.zeros(3))
        params = Problem.from_sdpa(q, k, v, None, 0.4).params
        for n in range(3):
            one = slice(n, n + 1)
            own = ranges[one] if mapped else ranges
            alone, _ = ops.forward(
                *Inputs(q[one], k[one], v[one], key_ranges=own, philox_seed=seeds[n]), *params, False, "triton"
            )
            assert torch.equal(together[n], alone)


def test_rows_without_keys_are_zero():
    """The output and all gradients of it, in a block with other rows and in one without."""
    inputs = testing.make_inputs(1, 2, 300, 100, 64, dtype=BF16)
    ranges = torch.tensor([3, 90]).repeat(300, 1, 1)
    ranges[:200] = ranges[250:260] = 50
    with simulated.triton() as target:
        results = target.check(inputs, key_ranges=ranges)
    empty = (ranges[:, 0, 1] <= ranges[:, 0, 0]).expand(1, 2, 300)
    assert (results["lse"] == -math.inf).equal(empty)
    assert not results["out"][empty].any()
    assert not results["query"][empty].any()
    assert not results["key"][:, :, [0, 1, 2, *range(90, 100)]].any()


STRIDED = {
    "rows of all heads": lambda x: x[:, :1],
    "one row for all": lambda x: x[:, :, :1],
    "rows apart": lambda x: x.repeat(1, 1, 1, 3, 1)[:, :, :, 2:4],
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("view", STRIDED)
def test_strides(view):
    ranges = STRIDED[view](anything(2, 4, 70, 2, 90).to(torch.int32))
    inputs = testing.make_inputs(2, 4, 70, 90, 64, heads_k=2, dtype=BF16)
    with testing.unmodified(ranges), simulated.triton() as target:
        target.check(inputs, key_ranges=ranges, **GQA)


def test_decode_with_a_range_for_each_head():
    """The heads that share a key head, and so a tile, have ranges far apart."""
    ranges = torch.tensor([[0, 40], [1000, 1100], [500, 500], [300, 700]], dtype=torch.int32).view(1, 4, 1, 1, 2)
    inputs = testing.make_inputs(2, 4, 3, 1100, 64, heads_k=1, dtype=BF16)
    with simulated.triton() as target:
        target.check(inputs, key_ranges=ranges, gradients=False, **GQA)
    assert target.kernels() == ["decode_kernel", "combine_kernel"]


# --- forward-mode and second derivatives


SECOND = {
    "documents": (80, None, {"is_causal": True}),
    "window and sinks": (90, ("float", "BHLS"), {"softcap": 3.0}),
    "anything": (80, ("float", "B11S"), {"dropout_p": 0.3, "window": (60, 9)}),
    "one range of a head": (90, ("bool", "BHLS"), {}),
}


@pytest.mark.parametrize("kind", SECOND)
def test_second_order(kind):
    gpu, mask, options = SECOND[kind]
    inputs = testing.make_inputs(2, 4, 70, 90, 64, heads_k=2, dtype=BF16, mask=mask)
    ranges = KINDS[kind](70, 90).to(torch.int32)
    names = second_order.check(gpu, inputs, key_ranges=ranges, enable_gqa=True, **options)
    assert {"tangent_kernel", "visits_kernel", "second_dkdv_kernel", "second_dq_kernel"} <= set(names)


# --- which blocks are visited


def jumping(seqlen_q, seqlen_k):
    """Neighbouring rows attend to documents far apart, of which the last keys are padding."""
    document = torch.arange(seqlen_q) * 7 % 5
    begin = document * (seqlen_k // 5)
    return torch.stack([begin, begin + seqlen_k // 7], -1).view(seqlen_q, 1, 2)


def few_and_far(seqlen_q, seqlen_k):
    """One row in 50 attends to anything, and that to two ranges of a few keys."""
    begin = torch.randint(seqlen_k, (seqlen_q, 2))
    end = begin + (torch.arange(seqlen_q) % 50 == 7).view(-1, 1) * torch.randint(1, 9, (seqlen_q, 2))
    return torch.stack([begin, end], -1)


def full_after_a_range(seqlen_q, seqlen_k):
    """Rows whose second ranges hold whole blocks where others' first ones do."""
    row = torch.arange(seqlen_q)
    first = torch.stack([torch.zeros_like(row), 20 + 480 * (row % 2)], -1)
    second = torch.stack([torch.where(row % 2 == 0, 90, 600), torch.full_like(row, 700)], -1)
    return torch.stack([first, second], -2)


PLACES = KINDS | {
    "documents of 200": lambda lq, lk: documents(lq, lk, size=200),
    "long window and sinks": lambda lq, lk: window_and_sinks(lq, lk, left=150, sinks=4),
    "jumping": jumping,
    "few and far": few_and_far,
    "full after a range": full_after_a_range,
}
BANDS = [{}, {"is_causal": True}, {"window": (100, 30), "alignment": "bottom_right"}]


def live(ranges, seqlen_q, seqlen_k, **band):
    """The scores that count, (batch, heads, seqlen_q, seqlen_k) as the ranges broadcast."""
    ranges = ranges.reshape((1,) * (5 - ranges.ndim) + ranges.shape)
    mask = testing.ranges_mask(ranges, seqlen_k).expand(*ranges.shape[:2], seqlen_q, seqlen_k)
    of_band = testing.band_mask(seqlen_q, seqlen_k, **band)
    return mask if of_band is None else mask & of_band


def in_tiles(mask, rows, cols):
    """A mask (..., L, S) in tiles (..., L / rows, S / cols, rows, cols), and which of their entries there are."""
    *lead, m, n = mask.shape
    padded = mask.new_zeros(2, *lead, -(-m // rows) * rows, -(-n // cols) * cols)
    padded[0, ..., :m, :n] = mask
    padded[1, ..., :m, :n] = True
    return padded.unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows)).transpose(-3, -2)


@triton.jit
def walk_keys(masks: Masks, found, steps, strides: BackwardStrides, columns, call: Numbers, C: tl.constexpr):
    """Adds 1 to `found` (tiles of rows, columns) for each block visited with a mask, 256 for each without one; and 1 to
    `steps` for each run."""
    tile = tl.program_id(0)
    at = 0
    while at < call.seqlen_k:
        begin, middle, end = next_keys(masks, strides, tile * C.BLOCK_M, at, call, C)
        for col in range(begin, end, C.BLOCK_N):
            tl.atomic_add(found + tile * columns + col // C.BLOCK_N, tl.where(col < middle, 1, 256), sem="relaxed")
        tl.atomic_add(steps + tile, 1, sem="relaxed")
        at = end


@triton.jit
def walk_queries(masks: Masks, found, steps, strides: BackwardStrides, columns, call: Numbers, C: tl.constexpr):
    """The same by blocks of keys."""
    tile = tl.program_id(0)
    at, last = visiting(masks.visits, tile * 0, tile * 0, strides.visits, tile * C.BLOCK_N, call, C)
    while at < last:
        begin, middle, end = next_queries(masks, strides, tile * C.BLOCK_N, at, call, C)
        for row in range(begin, end, C.BLOCK_M):
            tl.atomic_add(found + row // C.BLOCK_M * columns + tile, tl.where(row < middle, 1, 256), sem="relaxed")
        tl.atomic_add(steps + tile, 1, sem="relaxed")
        at = end


def walked(function, ranges, seqlen_q, seqlen_k, block_m, block_n, band):
    """found and steps of a walk over one head."""
    q, k = (torch.zeros(1, 1, n, 64, dtype=BF16) for n in (seqlen_q, seqlen_k))
    q, k, v, _, _, ranges, params, *_ = Problem.from_sdpa(q, k, k, key_ranges=ranges, **band)
    rows, cols = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    found = torch.zeros(rows, cols, dtype=torch.int32)
    steps = torch.zeros(rows if function is walk_keys else cols, dtype=torch.int32)
    with simulated.triton():
        build = plan._Builder(table.triton._problem(plan, Inputs(q, k, v, key_ranges=ranges), params))
        visits = None
        if function is walk_queries:
            step, shape = build.visits()
            visits = torch.zeros(shape, dtype=torch.int32)
            routes.simulate(step.kernel, step.grid, (ranges, visits, *step.rest), 80)
        build.tensors |= dict.fromkeys(("found", "steps"), plan.Leaf("*i32"))
        build.numbers["columns"] = cols
        constants = {name: build.constants[name] for name in ("RANGES", "HAS_LOW", "HAS_HIGH")}
        constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "TMA": False}
        kernel, rest = build.variant(function, configs.Config(block_m, block_n, 4, 1), constants)
        routes.simulate(kernel, len(steps), ((None, None, ranges, visits), found, steps, *rest), 80)
    return found, steps


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("kind", PLACES)
def test_blocks_visited_are_those_with_a_live_score(kind, band):
    """Each once; without a mask where every row of a block attends to every key. A run of keys holds a block at least,
    so that what lies between costs nothing; runs of queries may hold none, one for each LOOK rows."""
    for seqlen_q, seqlen_k, block_m, block_n in ((300, 800, 64, 32), (190, 700, 16, 64)):
        ranges = PLACES[kind](seqlen_q, seqlen_k)
        mask = live(ranges, seqlen_q, seqlen_k, **band)
        ranges = ranges.reshape((1,) * (5 - ranges.ndim) + ranges.shape)[:1, :1]
        tiles, there = in_tiles(mask[0, 0], block_m, block_n)
        some, every = tiles.any((-1, -2)), (tiles | ~there).all((-1, -2))
        found, steps = walked(walk_keys, ranges, seqlen_q, seqlen_k, block_m, block_n, band)
        whole = every & there[..., 0, :].all(-1)  # keys past the end want a mask
        assert found.equal(torch.where(some, torch.where(whole, 256, 1), 0).int())
        assert (steps <= some.sum(1) + 1).all()
        found, steps = walked(walk_queries, ranges, seqlen_q, seqlen_k, block_m, block_n, band)
        assert found.equal(torch.where(some, torch.where(every, 256, 1), 0).int())
        assert (steps <= some.sum(0) + -(-seqlen_q // LOOK.value)).all()


def test_work_is_linear_in_the_length():
    """A window and sinks: as many runs and blocks for each block of queries, however many there are."""
    ranges = window_and_sinks(4096, 4096, left=255, sinks=4)
    found, steps = walked(walk_keys, ranges, 4096, 4096, 128, 64, {})
    assert steps.max() == 5  # sinks; up to the full blocks' end; the blocks where rows end, in two; nothing more
    assert (found > 0).sum(1).max() == 1 + (255 + 128 + 63) // 64
    found, steps = walked(walk_queries, ranges, 4096, 4096, 64, 128, {})
    assert steps[1:].max() <= 3
    assert (found > 0).sum(0)[1:].max() == (255 + 128 + 63) // 64


def marked(shape, size):
    """Numbers of which the n-th `size` rows have NaN in column n: a sum over rows shows in its columns which blocks of
    rows it went over, though it multiplied them by 0."""
    x = torch.randn(shape, dtype=BF16)
    for n in range(-(-shape[2] // size)):
        x[:, :, n * size : (n + 1) * size, n] = math.nan
    return x


def assert_visited(nan, mask, rows, cols):
    """nan (..., L, D): of each row, whether its column n is NaN."""
    tiles, _ = in_tiles(mask, rows, cols)
    least = tiles.any((-1, -2))
    found = nan[..., : least.size(-1)]
    assert not nan[..., least.size(-1) :].any()
    assert found.equal(least.repeat_interleave(rows, -2)[..., : nan.size(-2), :])


READ = ["whole documents", "window and sinks", "padding", "jumping", "few and far"]


@pytest.mark.parametrize("kind", READ)
def test_no_other_block_is_read(kind):
    """As the kernels that ship visit them: by NaN in values, of which 0 times is NaN still, and in grad_out."""
    gpu = GPUS[READ.index(kind) % 2]
    ranges = PLACES[kind](300, 700).to(torch.int32)
    batch = ranges.size(0) if ranges.ndim == 5 else 1
    q, k = torch.randn(batch, 1, 300, 64, dtype=BF16), torch.randn(batch, 1, 700, 64, dtype=BF16)
    q, k, _, _, _, ranges, params, *_ = Problem.from_sdpa(q, k, k, key_ranges=ranges)
    mask = live(ranges, 300, 700)
    with simulated.triton(gpu) as target:
        v = torch.randn_like(k)
        out, lse = ops.forward(*Inputs(q, k, v, key_ranges=ranges), *params, True, "triton")
        rows, cols = (target.launched[-1].constants[name] for name in ("BLOCK_M", "BLOCK_N"))
        poisoned, _ = ops.forward(*Inputs(q, k, marked(k.shape, cols), key_ranges=ranges), *params, False, "triton")
        assert_visited(poisoned.isnan(), mask, rows, cols)

        tangents = Derivatives(torch.randn_like(q))
        ops.tangent(*Inputs(q, k, v, key_ranges=ranges), *tangents, out, lse, *params, "triton")
        rows, cols = (target.launched[-1].constants[name] for name in ("BLOCK_M", "BLOCK_N"))
        bad = marked(k.shape, cols)
        tout, _ = ops.tangent(*Inputs(q, k, bad, key_ranges=ranges), *tangents, out, lse, *params, "triton")
        assert_visited(tout.isnan(), mask, rows, cols)

        def backward(grad_out, v, which):
            found = ops.backward(
                grad_out, None, *Inputs(q, k, v, key_ranges=ranges), out, lse, *params, which, "triton"
            )
            return found[which // 2], target.launched[-1].constants  # dq of 1, dv of 4

        _, constants = backward(out, v, 4)
        dv, _ = backward(marked(q.shape, constants["BLOCK_M"]), v, 4)
        assert_visited(dv.isnan(), mask.mT, constants["BLOCK_N"], constants["BLOCK_M"])

        # A score gradient is 0 wherever the weight is: what shows is the rows that attend, not their tiles.
        _, constants = backward(out, v, 1)
        block = constants["BLOCK_N"]
        for first in range(0, 700, 3 * block):
            bad = v.clone()
            bad[:, :, first : first + block] = math.nan
            dq, _ = backward(out, bad, 1)
            assert dq.isnan().all(-1).equal(mask[..., first : first + block].any(-1))
            assert dq.isnan().any(-1).equal(dq.isnan().all(-1))


@pytest.mark.parametrize("shape", ["111S", "1HL1", "BHLS"])
def test_the_bias_gradient_holds_no_other_score(shape):
    """A bias' gradient is NaN where a row attends to a value that is NaN, and nowhere else in its block."""
    inputs = testing.make_inputs(1, 2, 300, 700, 64, dtype=BF16, mask=("float", shape))
    ranges = PLACES["documents of 200" if shape == "1HL1" else "jumping"](300, 700).to(torch.int32)
    tensors = (x.detach() for x in inputs.tensors.values())
    q, k, v, bias, _, ranges, params, *_ = Problem.from_sdpa(*tensors, key_ranges=ranges)
    mask = live(ranges, 300, 700).expand(1, 2, 300, 700)
    with simulated.triton() as target:
        out, lse = ops.forward(*Inputs(q, k, v, bias, key_ranges=ranges), *params, True, "triton")
        bad = v.clone()
        bad[:, :, 210:320] = math.nan  # a document and no other; where they jump, two of them
        given = Inputs(q, k, bad, bias, key_ranges=ranges)
        dbias = ops.backward(out, None, *given, out, lse, *params, 8, "triton")[3]
    assert target.launched
    keys = torch.zeros(700, dtype=torch.bool)
    keys[210:320] = True
    read = mask & keys
    for dim, n in enumerate(bias.shape):
        read = read.any(dim, keepdim=True) if n == 1 else read
    assert dbias.isnan().equal(read)
    assert read.any()
    assert not read.all()


@pytest.mark.parametrize("kind", ["padding", "window and sinks", "anything"])
def test_decode_reads_no_other_block(kind):
    ranges = PLACES[kind](2, 1100).to(torch.int32)
    q, k = torch.randn(2, 4, 2, 64, dtype=BF16), torch.randn(2, 2, 1100, 64, dtype=BF16)
    q, k, _, _, _, ranges, params, *_ = Problem.from_sdpa(q, k, k, key_ranges=ranges, enable_gqa=True)
    with simulated.triton() as target:
        ops.forward(*Inputs(q, k, torch.randn_like(k), key_ranges=ranges), *params, False, "triton")
        block = target.launched[0].constants["BLOCK_N"]
        out, _ = ops.forward(*Inputs(q, k, marked(k.shape, block), key_ranges=ranges), *params, False, "triton")
    assert target.launched[0].function.__name__ == "decode_kernel"
    rows = live(ranges, 2, 1100).expand(2, 4, 2, 1100).unflatten(1, (2, 2)).flatten(2, 3)  # of a key head: one tile
    tiles, _ = in_tiles(rows, 4, block)
    least = tiles.any((-1, -2)).expand(2, 2, 4, -1).unflatten(2, (2, 2)).flatten(1, 2)
    assert out.isnan()[..., : least.size(-1)].equal(least)


# --- what needs no kernel to run


def test_explain_tells_what_is_launched():
    q, k, v = testing.make_inputs(1, 2, 40, 70, 64, dtype=BF16).tensors.values()
    q.requires_grad_()
    k.requires_grad_()
    with simulated.triton():
        lines = attnkern.explain(q, k, v, key_ranges=padding([50]), backend="triton").plan
    assert [line.split(":")[0] for line in lines] == ["forward", "visits", "delta", "dkdv", "dq"]


def test_lengths_and_ranges_make_no_new_kernel():
    kernels = set()
    for length, count in itertools.product((1, 17, 512), (1, 2)):
        x = torch.zeros(1, 1, length, 64, dtype=BF16)
        ranges = torch.zeros(1, 1, 1, count, 2, dtype=torch.int32)
        with simulated.triton():
            key = table.triton._problem(plan, Inputs(x, x, x, key_ranges=ranges), Problem.from_sdpa(x, x, x).params)
            kernels.add(plan.forward_plan(key, True).step.kernel)
    assert len(kernels) == 2  # for one range and for two
