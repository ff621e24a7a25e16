"""Key ranges: which blocks of keys a block of queries visits, and which blocks of queries a block of keys.

A row's one or two ranges, cut to the keys that there are and to its band, become at most two that neither overlap nor
touch, in order. From these a kernel plans its way: it asks for the next run of blocks from a place on, first some that
need a mask and then some of which every row attends to every key, works on both, and asks again from where they end.
What lies between two runs is never looked at, and a block without a live score is in none.

Blocks of queries have no such order. `visits_kernel` leaves for every few keys the first and the last row that attends
to one of them; between these, blocks of queries are tested many at a time.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import Numbers, Strides
from .tiles import head_of

FAR = tl.constexpr(2**30)  # behind every key (params.MAX_LENGTH), and a multiple of every block
VISIT = tl.constexpr(64)  # keys that share an entry of `visits`, and rows of a program of its kernel
LOOK = tl.constexpr(256)  # rows that are tested at a time


class Ends(NamedTuple):
    """The ranges of some rows: [begin0, end0) before [begin1, end1), empty ones at FAR. With one range the second is
    the first again."""

    begin0: Any
    end0: Any
    begin1: Any
    end1: Any


class VisitStrides(NamedTuple):
    ranges: Strides
    visits: Strides


@triton.jit
def _load_range(pointers, live, low, high):
    """Begin and end within [low, high); both FAR where nothing is left."""
    begin = tl.maximum(tl.load(pointers, mask=live, other=0), low)
    end = tl.minimum(tl.load(pointers + 1, mask=live, other=0), high)
    empty = end <= begin
    return tl.where(empty, FAR, begin), tl.where(empty, FAR, end)


@triton.jit
def load_ends(ranges, rows, live, stride, call, C: tl.constexpr):
    """The `Ends` of rows of any shape, empty where they aren't live. `ranges`: the head's pointer, or one of each row;
    stride: from row to row."""
    pointers = ranges + rows.to(tl.int64) * stride
    low = 0
    high = call.seqlen_k
    if C.HAS_LOW:
        low = tl.maximum(rows + call.band_low, 0)
    if C.HAS_HIGH:
        high = tl.minimum(rows + call.band_high + 1, high)
    begin0, end0 = _load_range(pointers, live, low, high)
    begin1 = begin0
    end1 = end0
    if C.RANGES == 2:
        begin, end = _load_range(pointers + 2, live, low, high)
        turned = begin < begin0
        begin1 = tl.where(turned, begin0, begin)
        end1 = tl.where(turned, end0, end)
        begin0 = tl.where(turned, begin, begin0)
        end0 = tl.where(turned, end, end0)
        meet = begin1 <= end0
        end0 = tl.where(meet, tl.maximum(end0, end1), end0)
        begin1 = tl.where(meet, FAR, begin1)
        end1 = tl.where(meet, FAR, end1)
    return Ends(begin0, end0, begin1, end1)


@triton.jit
def row_ends(masks, strides, rows, call, C: tl.constexpr):
    """`load_ends` of rows of the head that `masks` is of."""
    return load_ends(masks.ranges, rows, rows < call.seqlen_q, strides.ranges.row, call, C)


@triton.jit
def inside(ends, rows, cols, C: tl.constexpr):
    """Which of the rows, [M, 1] or [1, M], attend to which of the columns, [1, N] or [N, 1]."""
    AXIS: tl.constexpr = 1 if rows.shape[1] == 1 else 0
    keep = (cols >= tl.expand_dims(ends.begin0, AXIS)) & (cols < tl.expand_dims(ends.end0, AXIS))
    if C.RANGES == 2:
        keep = keep | ((cols >= tl.expand_dims(ends.begin1, AXIS)) & (cols < tl.expand_dims(ends.end1, AXIS)))
    return keep


@triton.jit
def _whole(keys, C: tl.constexpr):
    """`keys` in whole blocks."""
    return (keys + C.BLOCK_N - 1) // C.BLOCK_N * C.BLOCK_N


@triton.jit
def span_of_keys(ends, live, at, C: tl.constexpr):
    """The next run of blocks of keys from `at` on, a multiple of BLOCK_N, that rows with these `Ends` visit: [begin,
    middle) of blocks that need a mask, and [middle, end) of those of which every live row attends to every key. Either
    may be empty; without any block left all are FAR."""
    # Of each row the first range that reaches beyond `at`.
    begin = ends.begin0
    end = ends.end0
    if C.RANGES == 2:
        over = end <= at
        begin = tl.where(over, ends.begin1, begin)
        end = tl.where(over, ends.end1, end)
    over = end <= at
    begin = tl.where(over, FAR, begin)
    end = tl.where(over, FAR, end)
    first = tl.maximum(tl.min(begin), at) // C.BLOCK_N * C.BLOCK_N
    # Ranges that begin in the first block: every block up to their last end is visited.
    stop = _whole(tl.max(tl.where(begin < first + C.BLOCK_N, end, 0)), C)
    last_begin = tl.max(tl.where(live, begin, 0))
    first_end = tl.min(tl.where(live, end, FAR))
    full_begin = tl.maximum(_whole(last_begin, C), first)
    full_end = first_end // C.BLOCK_N * C.BLOCK_N
    full = (full_begin < full_end) & (full_begin <= stop)
    # Where a row's range ends its next one may begin, and with it full blocks; not if a row has none left.
    partial_end = tl.where(last_begin < FAR, _whole(first_end, C), FAR)
    middle = tl.minimum(stop, tl.where(full, full_begin, partial_end))
    return first, middle, tl.where(full, full_end, middle)


@triton.jit
def fenced(at, C: tl.constexpr):
    """`at`, an integer, after which TMA may write where reductions have left their numbers. Triton gives both the same
    shared memory and puts a barrier between them, but no fence between the threads' writes and TMA's."""
    if C.TMA:
        at = tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, $1;", "=r,r", [at], tl.int32, is_pure=False, pack=1
        )
    return at


@triton.jit
def next_keys(masks, strides, first_row, at, call, C: tl.constexpr):
    """`span_of_keys` for a block of queries of the head that `masks` is of. (Loaded each time, not kept: registers.)"""
    rows = first_row + tl.arange(0, C.BLOCK_M)
    begin, middle, end = span_of_keys(row_ends(masks, strides, rows, call, C), rows < call.seqlen_q, at, C)
    return begin, middle, fenced(end, C)


@triton.jit
def next_queries(masks, strides, first_col, at, call, C: tl.constexpr):
    """`next_keys` with queries and keys exchanged: the next run of blocks of queries, from `at` on, that the block of
    keys visits. Of LOOK rows; if none of them attends to one of the keys, the run is empty and at their end."""
    BLOCKS: tl.constexpr = LOOK // C.BLOCK_M
    block = tl.arange(0, BLOCKS)
    rows = at + block[:, None] * C.BLOCK_M + tl.arange(0, C.BLOCK_M)[None, :]
    ends = row_ends(masks, strides, rows, call, C)
    last_col = tl.minimum(first_col + C.BLOCK_N, call.seqlen_k)
    meets = (ends.begin0 < last_col) & (ends.end0 > first_col)
    holds = (ends.begin0 <= first_col) & (ends.end0 >= last_col)
    if C.RANGES == 2:
        meets = meets | ((ends.begin1 < last_col) & (ends.end1 > first_col))
        holds = holds | ((ends.begin1 <= first_col) & (ends.end1 >= last_col))
    visited = tl.max(meets.to(tl.int32), 1) > 0
    full = visited & (tl.min((holds | (rows >= call.seqlen_q)).to(tl.int32), 1) > 0)
    begin = tl.min(tl.where(visited, block, BLOCKS))
    middle = tl.min(tl.where((block >= begin) & (full | (visited == 0)), block, BLOCKS))
    end = tl.min(tl.where((block >= middle) & (full == 0), block, BLOCKS))
    return at + begin * C.BLOCK_M, at + middle * C.BLOCK_M, fenced(at + end * C.BLOCK_M, C)


@triton.jit
def visiting(visits, b, h, strides, first_col, call, C: tl.constexpr):
    """The rows between which all lie that attend to a key of a block, from a block of queries on."""
    ENTRIES: tl.constexpr = C.BLOCK_N // VISIT if C.BLOCK_N > VISIT else 1
    entries = first_col // VISIT + tl.arange(0, ENTRIES)
    pointers = head_of(visits, b, h, strides) + entries * 2
    there = entries * VISIT < call.seqlen_k
    begin = call.seqlen_q - tl.max(tl.load(pointers, mask=there, other=0))
    end = tl.max(tl.load(pointers + 1, mask=there, other=0))
    return begin // C.BLOCK_M * C.BLOCK_M, end


@triton.jit
def visits_kernel(ranges, visits, strides: VisitStrides, ranges_heads, call: Numbers, C: tl.constexpr):
    """visits (batch, heads, tiles, 2) of int32, zeros before, batch and heads being those of the ranges: for each VISIT
    keys how far the first row that attends to one of them lies before the end, and the end of such rows, in whole tiles
    of VISIT rows. (Two maxima: whichever program comes first, they are the same.)

    Grid: tiles of rows * batch * heads of the ranges.
    """
    tiles = (call.seqlen_q + C.BLOCK_M - 1) // C.BLOCK_M
    first_row = tl.program_id(0) % tiles * C.BLOCK_M
    head = tl.program_id(0) // tiles
    b, h = head // ranges_heads, head % ranges_heads
    rows = first_row + tl.arange(0, C.BLOCK_M)
    live = rows < call.seqlen_q
    ends = load_ends(head_of(ranges, b, h, strides.ranges), rows, live, strides.ranges.row, call, C)
    visits = head_of(visits, b, h, strides.visits)
    before = tl.zeros([C.BLOCK_M], tl.int32) + (call.seqlen_q - first_row)
    after = tl.zeros([C.BLOCK_M], tl.int32) + tl.minimum(first_row + C.BLOCK_M, call.seqlen_q)
    at = 0
    while at < call.seqlen_k:
        begin, _, end = span_of_keys(ends, live, at, C)
        for first in range(begin // C.BLOCK_N, end // C.BLOCK_N, C.BLOCK_M):
            entries = first + tl.arange(0, C.BLOCK_M)
            visited = entries < end // C.BLOCK_N
            tl.atomic_max(visits + entries * 2, before, mask=visited, sem="relaxed")
            tl.atomic_max(visits + entries * 2 + 1, after, mask=visited, sem="relaxed")
        at = end
