"""Few queries, many keys (decoding with a cache): the keys are split over programs, and the query heads that share a
key head are packed into the rows of one tile, so that keys and values are read once. Each split leaves its part of the
output and the logarithm of its sum; `combine_kernel` puts the parts together (Dao, Haziza, Massa and Sizov,
"Flash-Decoding", 2023).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arguments import Masks, Numbers, Strides
from .ranges import load_ends, span_of_keys
from .score import log_sum_exp, scores, softmax_step, with_sink
from .tiles import Tiles, add_rows, head_of, load_tile, operand, products, zeros


class DecodeStrides(NamedTuple):
    q: Strides
    k: Strides
    v: Strides
    bias: Strides
    ranges: Strides


class CombineStrides(NamedTuple):
    out: Strides


@triton.jit
def _load_rows(pointers, live, first_dim, dims, DIMS: tl.constexpr):
    """DIMS columns of the rows that the pointers (rows, 1) are of, zero past the end."""
    d = first_dim + tl.arange(0, DIMS)[None, :]
    return tl.load(pointers + d, mask=live[:, None] & (d < dims), other=0.0)


@triton.jit
def _store_rows(pointers, tile, live, first_dim, dims, DIMS: tl.constexpr):
    """The reverse."""
    d = first_dim + tl.arange(0, DIMS)[None, :]
    tl.store(pointers + d, tile, mask=live[:, None] & (d < dims))


@triton.jit
def _share(row_tile, group, split, splits, call, C: tl.constexpr):
    """A split's part of the keys that some row of a tile reaches, in whole blocks, dealt out evenly; and the first of
    these keys."""
    seqlen_q = call.seqlen_q
    seqlen_k = call.seqlen_k
    first_row = row_tile * C.BLOCK_M // group
    last_row = tl.minimum((row_tile * C.BLOCK_M + C.BLOCK_M - 1) // group, seqlen_q - 1)
    first_live = 0
    begin = 0
    end = seqlen_k
    if C.HAS_LOW:
        first_live = tl.minimum(tl.maximum(first_row + call.band_low, 0), seqlen_k)
        begin = first_live // C.BLOCK_N * C.BLOCK_N
    if C.HAS_HIGH:
        end = tl.minimum(tl.maximum(last_row + 1 + call.band_high, 0), seqlen_k)
    blocks = (tl.maximum(end - begin, 0) + C.BLOCK_N - 1) // C.BLOCK_N
    each = (blocks + splits - 1) // splits
    begin += split * each * C.BLOCK_N
    end = tl.minimum(end, begin + each * C.BLOCK_N)
    return begin, end, first_live


@triton.jit
def _visited_blocks(ends, live, call, C: tl.constexpr):
    """How many blocks rows with these `Ends` visit."""
    count = 0
    at = 0
    while at < call.seqlen_k:
        begin, _, end = span_of_keys(ends, live, at, C)
        count += (end - begin) // C.BLOCK_N
        at = end
    return count


@triton.jit
def _decode_blocks(
    acc, row_max, row_sum, q, live, k, v, bias, bias_strides, rows, ends, first_live, begin, end, call, C: tl.constexpr
):
    """The online softmax over the columns [begin, end). q: pointers to the rows, and their two tiles. Without ranges no
    row reaches a column before first_live."""
    for first_col in range(begin, end, C.BLOCK_N):
        cols = first_col + tl.arange(0, C.BLOCK_N)
        if C.CHUNK > 0:
            qk = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
            for dim in range(0, C.QK.dims, C.CHUNK):
                x = _load_rows(q[0], live, dim, C.QK.dims, C.CHUNK)
                tile = load_tile(
                    k.x0, 0, 0, first_col, k.stride, call.seqlen_k, dim, C.QK.dims, C.BLOCK_N, C.CHUNK, False, True,
                    None, k.pages, C.PAGES,
                )  # fmt: skip
                qk = tl.dot(x, tl.trans(tile), qk, input_precision=C.PRECISION)
        else:
            q_tiles = Tiles(q[1], q[2], q[1], q[2], 0, 0, 0, 0)
            qk, _, _ = products(q_tiles, k, first_col, C.QK, C.BLOCK_M, C.BLOCK_N, C, False, True)
        s, _ = scores(qk, rows[:, None], cols[None, :], first_col, bias, bias_strides, ends, call, C, True)
        p, factor, row_max, row_sum = softmax_step(s, row_max, row_sum, True, C.NATURAL)
        # Slots of a cache that no row attends to may never have been written.
        reached = None
        held = None
        if C.RANGES > 0 or (C.BIAS > 0 and not C.NATURAL):
            live_cols = tl.max(s, 0) > float("-inf")
            if C.CHUNK > 0:  # v is loaded now
                reached = live_cols
            else:  # v is under way
                held = live_cols
        elif C.HAS_LOW or C.HAS_HIGH:
            reached = (cols >= first_live) & (cols < end)
        acc = add_rows(acc, factor, p, v, first_col, C.V, C.BLOCK_N, C, False, True, False, reached, held)
    return acc, row_max, row_sum


@triton.jit
def decode_kernel(
    q, k, v, masks: Masks, table, part_out, part_lse, strides: DecodeStrides, heads_k, group, splits, call: Numbers,
    C: tl.constexpr,
):  # fmt: skip
    """One split of the keys for BLOCK_M rows of one key head; row r is query r // group of query head r % group.

    k, v, masks and table as in forward_kernel. part_out (batch, heads, seqlen_q, splits, head_dim_v) and part_lse
    (batch, heads, seqlen_q, splits), contiguous fp32: each split's own normalised output, and its lse in the
    natural-log domain. Grid: splits * tiles of rows * batch * heads_k.
    """
    seqlen_q = call.seqlen_q
    seqlen_k = call.seqlen_k
    tiles = (group * seqlen_q + C.BLOCK_M - 1) // C.BLOCK_M
    split = tl.program_id(0) % splits
    row_tile = tl.program_id(0) // splits % tiles
    batch_head = tl.program_id(0) // splits // tiles
    r = row_tile * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    b, hk = (batch_head // heads_k).to(tl.int64), (batch_head % heads_k).to(tl.int64)
    live = r < group * seqlen_q
    rows = tl.where(live, r // group, 0)
    heads = hk * group + r % group
    q += b * strides.q.b + heads[:, None] * strides.q.h + rows[:, None].to(tl.int64) * strides.q.row
    k = operand(k, k, k, k, b, hk, strides.k, strides.k, call, True, False, False, table)
    v = operand(v, v, v, v, b, hk, strides.v, strides.v, call, True, False, False, table)
    q0 = q
    if C.CHUNK == 0:
        q0 = _load_rows(q, live, 0, C.QK.dims, C.QK.first)
    q1 = q0
    if C.QK.rest > 0 and C.CHUNK == 0:
        q1 = _load_rows(q, live, C.QK.first, C.QK.dims, C.QK.rest)
    bias = masks.bias
    if C.BIAS > 0:
        bias += b * strides.bias.b + heads[:, None] * strides.bias.h

    acc = zeros(C.BLOCK_M, C.V)
    row_max = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([C.BLOCK_M], tl.float32)
    q_tiles = q, q0, q1
    if C.RANGES > 0:
        ranges = masks.ranges + b * strides.ranges.b + heads * strides.ranges.h
        ends = load_ends(ranges, rows, live, strides.ranges.row, call, C)
        each = (_visited_blocks(ends, live, call, C) + splits - 1) // splits
        passed = split * each  # blocks that are others'
        left = each
        at = 0
        while (at < seqlen_k) & (left > 0):
            begin, _, end = span_of_keys(ends, live, at, C)
            at = end
            blocks = (end - begin) // C.BLOCK_N
            skipped = tl.minimum(blocks, passed)
            passed -= skipped
            taken = tl.minimum(blocks - skipped, left)
            left -= taken
            begin += skipped * C.BLOCK_N
            acc, row_max, row_sum = _decode_blocks(
                acc, row_max, row_sum, q_tiles, live, k, v, bias, strides.bias, rows, ends, 0, begin,
                begin + taken * C.BLOCK_N, call, C,
            )  # fmt: skip
    else:
        begin, end, first_live = _share(row_tile, group, split, splits, call, C)
        acc, row_max, row_sum = _decode_blocks(
            acc, row_max, row_sum, q_tiles, live, k, v, bias, strides.bias, rows, None, first_live, begin, end, call, C
        )

    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    part = ((b * heads_k * group + heads) * seqlen_q + rows) * splits + split
    tl.store(part_lse + part, tl.where(empty, float("-inf"), log_sum_exp(row_max, row_sum, C.NATURAL)), mask=live)
    out = part_out + part[:, None] * C.V.dims
    _store_rows(out, acc[0] / row_sum[:, None], live, 0, C.V.dims, C.V.first)
    if C.V.rest > 0:
        _store_rows(out, acc[1] / row_sum[:, None], live, C.V.first, C.V.dims, C.V.rest)


@triton.jit
def combine_kernel(
    part_out, part_lse, sinks, out, lse, strides: CombineStrides, heads, seqlen_q, splits, C: tl.constexpr
):
    """out and lse of one query of one head from its parts: weights exp(lse of the part - their common lse), in
    which the sink of the head counts, if sinks (batch, heads) are given.

    SPLITS and DIMS: powers of two, at least splits and head_dim_v. Grid: seqlen_q * batch * heads.
    """
    at = tl.program_id(0).to(tl.int64)
    row = at % seqlen_q
    b, h = at // seqlen_q // heads, at // seqlen_q % heads
    s = tl.arange(0, C.SPLITS)
    d = tl.arange(0, C.DIMS)
    parts = tl.load(part_lse + at * splits + s, mask=s < splits, other=float("-inf"))
    most = tl.max(parts, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp(parts - base)
    total = tl.sum(weights, 0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tile = part_out + (at * splits + s[:, None]) * C.V.dims + d[None, :]
    tile = tl.load(tile, mask=(s[:, None] < splits) & (d[None, :] < C.V.dims), other=0.0)
    value = tl.where(empty, float("-inf"), base + tl.log(total))
    share = 1.0
    if sinks is not None:
        value, share = with_sink(value, tl.load(sinks + at // seqlen_q))
    result = tl.sum(tile * (weights / total)[:, None], 0) * share
    pointer = head_of(out, b, h, strides.out) + row * strides.out.row + d
    tl.store(pointer, result.to(out.dtype.element_ty), mask=d < C.V.dims)
    if C.WRITE_LSE:
        tl.store(lse + at, value)
