"""The gradient of a bias that several scores share: broadcast over batch elements, heads, queries or keys, or a table
by distance.

A program owns one tile of the gradient and adds up the score gradients of everything that shares it, which it makes
again from q, k, v, grad_out and lse: no atomics, and memory for the gradient alone. (The gradient of a bias with an
entry per score falls off dq_kernel.) Second order as in backward.py.

Of a table a program owns a band: tiles that follow each other by BLOCK_M queries and as many keys, so that an entry of
the tile is at the same distance in all of them. It adds these up as they lie, and sums the tile's diagonals once.
Bands overlap by BLOCK_M - 1 distances: `attnkern.relative.add_bands` puts them together.
"""

import triton
import triton.language as tl

from .arguments import Keys, Masks, Numbers, Queries, RowTerms
from .backward import BackwardStrides, score_gradients
from .ranges import next_keys, row_ends, visiting
from .score import clearing, has_nan, load_row_terms, philox_of
from .tiles import load_tiles, masks_of, operand


@triton.jit
def _shared_tile(call, bias_batch, bias_heads, C: tl.constexpr):
    """The scores that this program adds up, [row_begin, row_end) x [col_begin, col_end) of b_count batch elements and
    h_count heads from own_b and own_h on; `own` counts the gradient's batch elements and heads."""
    blocks_m = 1
    blocks_n = 1
    if not C.ROWS_SHARED:
        blocks_m = (call.seqlen_q + C.BLOCK_M - 1) // C.BLOCK_M
    if not C.COLS_SHARED:
        blocks_n = (call.seqlen_k + C.BLOCK_N - 1) // C.BLOCK_N
    pid = tl.program_id(0)
    row_begin = pid // blocks_n % blocks_m * C.BLOCK_M
    col_begin = pid % blocks_n * C.BLOCK_N
    own = pid // (blocks_n * blocks_m)
    own_b, own_h = own // bias_heads, own % bias_heads
    row_end = row_begin + C.BLOCK_M
    col_end = col_begin + C.BLOCK_N
    if C.ROWS_SHARED:
        row_end = call.seqlen_q
    if C.COLS_SHARED:
        col_end = call.seqlen_k
    b_count = 1
    h_count = 1
    if bias_batch == 1:
        b_count = call.batch
    if bias_heads == 1:
        h_count = call.heads
    return row_begin, row_end, col_begin, col_end, own, own_b, own_h, b_count, h_count


@triton.jit
def _store_shared(dbias, acc, own, row_begin, col_begin, call, C: tl.constexpr):
    """Stores the sums of a `_shared_tile`."""
    rows = row_begin + tl.arange(0, C.BLOCK_M)
    cols = col_begin + tl.arange(0, C.BLOCK_N)
    dtype = dbias.dtype.element_ty
    if C.ROWS_SHARED:
        if C.COLS_SHARED:
            tl.store(dbias + own, tl.sum(tl.sum(acc, 1), 0).to(dtype))
        else:
            tl.store(
                dbias + own.to(tl.int64) * call.seqlen_k + cols, tl.sum(acc, 0).to(dtype), mask=cols < call.seqlen_k
            )
    else:
        at = own.to(tl.int64) * call.seqlen_q + rows
        if C.COLS_SHARED:
            tl.store(dbias + at, tl.sum(acc, 1).to(dtype), mask=rows < call.seqlen_q)
        else:
            inside = (rows[:, None] < call.seqlen_q) & (cols[None, :] < call.seqlen_k)
            tl.store(dbias + at[:, None] * call.seqlen_k + cols[None, :], acc.to(dtype), mask=inside)


@triton.jit
def _add_blocks(acc, q, grad_out, terms, k, v, masks, strides, philox, first_row, begin, end, call, C: tl.constexpr):
    """acc + the score gradients of the columns [begin, end)."""
    rows = first_row + tl.arange(0, C.BLOCK_M)
    ends = None
    if C.RANGES > 0:
        ends = row_ends(masks, strides, rows, call, C)
    for first_col in range(begin, end, C.BLOCK_N):
        ds, _, _, _, _ = score_gradients(
            q, grad_out, terms, k, v, masks, strides, philox, rows, ends, first_col, call, C, True
        )
        acc += ds
    return acc


@triton.jit
def _head(queries, keys, masks, seed, strides, b, h, call, C: tl.constexpr):
    """Of a head: the `Operand`s of q, grad_out, k and v, its masks, where its rows' terms begin, and its Philox key."""
    hk, hv = h // call.group_k, h // call.group_v
    q = queries.q
    q = operand(q, q, queries.tq, queries.tq, b, h, strides.q, strides.tq, call, False, C.TQ, False)
    g = queries.grad_out
    g = operand(g, g, g, g, b, h, strides.grad_out, strides.grad_out, call, False, False, False)
    k = operand(keys.k, keys.k, keys.tk, keys.tk, b, hk, strides.k, strides.tk, call, True, C.TK, False)
    v = operand(keys.v, keys.v, keys.tv, keys.tv, b, hv, strides.v, strides.tv, call, True, C.TV, False)
    row_offset = (b.to(tl.int64) * call.heads + h) * call.seqlen_q
    return q, g, k, v, masks_of(masks, b, h, strides, C), row_offset, philox_of(seed, call, b, h, C)


@triton.jit
def _shared_sums(queries, keys, masks, seed, terms, strides, tile, call, C: tl.constexpr):
    """The sums of a `_shared_tile`."""
    row_begin, row_end, col_begin, col_end, own_b, own_h, b_count, h_count = tile
    acc = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
    for n in range(b_count * h_count):
        b = own_b + n // h_count
        h = own_h + n % h_count
        q, g, k, v, head_masks, row_offset, philox = _head(queries, keys, masks, seed, strides, b, h, call, C)
        reached_begin = row_begin
        reached_end = row_end
        if C.RANGES > 0 and C.ROWS_SHARED and not C.COLS_SHARED:
            reached_begin, reached_end = visiting(masks.visits, b, h, strides.visits, col_begin, call, C)
        for first_row in range(reached_begin, reached_end, C.BLOCK_M):
            rows = first_row + tl.arange(0, C.BLOCK_M)
            # Of these columns, those that some row reaches.
            begin = col_begin
            end = tl.minimum(col_end, call.seqlen_k)
            if C.HAS_LOW:
                begin = tl.maximum(begin, (first_row + call.band_low) // C.BLOCK_N * C.BLOCK_N)
            if C.HAS_HIGH:
                end = tl.minimum(end, tl.minimum(first_row + C.BLOCK_M, call.seqlen_q) + call.band_high)
            run_end = end
            if C.RANGES > 0:
                begin, _, run_end = next_keys(head_masks, strides, first_row, begin, call, C)
            if begin < end:
                q_tiles = load_tiles(q, first_row, C.QK, C.BLOCK_M, C, C.TQ, False, True)
                g_tiles = load_tiles(g, first_row, C.V, C.BLOCK_M, C, False, False, True)
                row_terms = load_row_terms(terms, row_offset, rows, call.seqlen_q, C)
                if C.RANGES > 0:
                    while begin < end:
                        run_end = tl.minimum(run_end, end)
                        acc = _add_blocks(
                            acc, q_tiles, g_tiles, row_terms, k, v, head_masks, strides, philox, first_row, begin,
                            run_end, call, C,
                        )  # fmt: skip
                        begin, _, run_end = next_keys(head_masks, strides, first_row, run_end, call, C)
                else:
                    acc = _add_blocks(
                        acc, q_tiles, g_tiles, row_terms, k, v, head_masks, strides, philox, first_row, begin, end,
                        call, C,
                    )  # fmt: skip
    return acc


@triton.jit
def bias_gradient_kernel(
    queries: Queries, keys: Keys, masks: Masks, seed, terms: RowTerms, dbias, strides: BackwardStrides, bias_batch,
    bias_heads, call: Numbers, C: tl.constexpr,
):  # fmt: skip
    """dbias (bias_batch, bias_heads, seqlen_q or 1, seqlen_k or 1), contiguous; bias_batch, bias_heads are 1 or batch
    and heads. ROWS_SHARED, COLS_SHARED: the third, the fourth size is 1. With a TANGENT gbias.

    Grid: blocks of keys (1 if COLS_SHARED) * blocks of queries (1 if ROWS_SHARED) * bias_batch * bias_heads.
    """
    row_begin, row_end, col_begin, col_end, own, own_b, own_h, b_count, h_count = _shared_tile(
        call, bias_batch, bias_heads, C
    )
    tile = row_begin, row_end, col_begin, col_end, own_b, own_h, b_count, h_count
    acc = _shared_sums(queries, keys, masks, seed, terms, strides, tile, call, C)
    if C.UNATTENDED and has_nan((acc, acc), C):
        acc = _shared_sums(queries, keys, masks, seed, terms, strides, tile, call, clearing(C))
    _store_shared(dbias, acc, own, row_begin, col_begin, call, C)


@triton.jit
def _add_tile(
    acc, q, grad_out, terms, row_offset, k, v, masks, strides, philox, first_row, first_col, call, C: tl.constexpr
):  # fmt: skip
    """acc + the score gradients of a tile."""
    rows = first_row + tl.arange(0, C.BLOCK_M)
    q_tiles = load_tiles(q, first_row, C.QK, C.BLOCK_M, C, C.TQ, False, True)
    g_tiles = load_tiles(grad_out, first_row, C.V, C.BLOCK_M, C, False, False, True)
    row_terms = load_row_terms(terms, row_offset, rows, call.seqlen_q, C)
    ends = None
    if C.RANGES > 0:
        ends = row_ends(masks, strides, rows, call, C)
    ds, _, _, _, _ = score_gradients(
        q_tiles, g_tiles, row_terms, k, v, masks, strides, philox, rows, ends, first_col, call, C, True
    )
    return acc + ds


@triton.jit
def _store_diagonals(part, acc, C: tl.constexpr):
    """Stores the sums of the diagonals of acc, from its lower left corner on; the last of BLOCK_M + BLOCK_N is 0."""
    cols = tl.arange(0, C.BLOCK_N)
    # What each row has of BLOCK_N diagonals at a time: the row below has it one column further left.
    of_first = cols[None, :] + tl.arange(0, C.BLOCK_M)[:, None] - (C.BLOCK_M - 1)
    for n in tl.static_range(C.BLOCK_M // C.BLOCK_N + 1):
        at = of_first + n * C.BLOCK_N
        there = (at >= 0) & (at < C.BLOCK_N)
        moved = tl.gather(acc, tl.where(there, at, 0), 1)
        tl.store(part + n * C.BLOCK_N + cols, tl.sum(tl.where(there, moved, 0.0), 0))


@triton.jit
def _band_sums(queries, keys, masks, seed, terms, strides, walk, walks, band, first_band, b, h, call, C: tl.constexpr):
    """The score gradients of one walk's tiles of a band, added up."""
    q, g, k, v, head_masks, row_offset, philox = _head(queries, keys, masks, seed, strides, b, h, call, C)
    ahead = (first_band + band) * C.BLOCK_N
    begin = (tl.maximum(-ahead, 0) + C.BLOCK_M - 1) // C.BLOCK_M
    end = (tl.minimum(call.seqlen_q, tl.maximum(call.seqlen_k - ahead, 0)) + C.BLOCK_M - 1) // C.BLOCK_M
    acc = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
    for block in range(begin + walk, end, walks):
        first_row = block * C.BLOCK_M
        first_col = first_row + ahead
        if C.RANGES > 0:
            visited, _, _ = next_keys(head_masks, strides, first_row, first_col, call, C)
            if visited == first_col:
                acc = _add_tile(
                    acc, q, g, terms, row_offset, k, v, head_masks, strides, philox, first_row, first_col, call, C
                )
        else:
            acc = _add_tile(
                acc, q, g, terms, row_offset, k, v, head_masks, strides, philox, first_row, first_col, call, C
            )
    return acc


@triton.jit
def table_gradient_kernel(
    queries: Queries, keys: Keys, masks: Masks, seed, terms: RowTerms, parts, strides: BackwardStrides, first_band,
    bands, walks, call: Numbers, C: tl.constexpr,
):  # fmt: skip
    """parts (batch, heads, walks, bands, BLOCK_M + BLOCK_N), contiguous in fp32: of each band the sums by distance.
    Band n has the tiles whose first key is (first_band + n) * BLOCK_N keys ahead of their first query; BLOCK_N divides
    BLOCK_M; its tiles are dealt out to so many walks.

    Grid: walks * heads * batch * bands.
    """
    # Longest first, over all heads: with a causal band the last bands have the most tiles.
    heads = call.batch * call.heads
    walk = tl.program_id(0) % walks
    batch_head = tl.program_id(0) // walks % heads
    band = bands - 1 - tl.program_id(0) // (walks * heads)
    b, h = batch_head // call.heads, batch_head % call.heads
    acc = _band_sums(queries, keys, masks, seed, terms, strides, walk, walks, band, first_band, b, h, call, C)
    if C.UNATTENDED and has_nan((acc, acc), C):
        acc = _band_sums(
            queries, keys, masks, seed, terms, strides, walk, walks, band, first_band, b, h, call, clearing(C)
        )
    part = parts + ((batch_head.to(tl.int64) * walks + walk) * bands + band) * (C.BLOCK_M + C.BLOCK_N)
    _store_diagonals(part, acc, C)
