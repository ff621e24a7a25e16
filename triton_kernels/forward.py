"""The forward pass: one program per block of queries walks over the keys that its rows attend to.

The softmax is online (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) and the tiling
FlashAttention's (Dao et al., 2022; Dao, 2023): the scores of one block at a time exist, in registers.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arguments import Masks, Numbers, Strides
from .ranges import next_keys, row_ends
from .score import (
    afresh,
    clearing,
    dropout_keep,
    has_nan,
    held_columns,
    log_sum_exp,
    program_rows,
    scores,
    softmax_step,
    visited_keys,
    with_sink,
)
from .tiles import add_rows, head_of, load_tiles, masks_of, operand, products, store_tiles, zeros


class ForwardStrides(NamedTuple):
    q: Strides
    k: Strides
    v: Strides
    bias: Strides
    ranges: Strides
    out: Strides


@triton.jit
def _forward_blocks(
    acc, row_max, row_sum, q, k, v, masks, strides, philox, first_row, begin, end, call, C: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over the columns [begin, end)."""
    rows = first_row + tl.arange(0, C.BLOCK_M)
    ends = None
    if MASKED and C.RANGES > 0:
        ends = row_ends(masks, strides, rows, call, C)
    for first_col in range(begin, end, C.BLOCK_N):
        cols = first_col + tl.arange(0, C.BLOCK_N)
        qk, _, _ = products(q, k, first_col, C.QK, C.BLOCK_M, C.BLOCK_N, C, C.TMA, MASKED)
        s, _ = scores(qk, rows[:, None], cols[None, :], first_col, masks.bias, strides.bias, ends, call, C, MASKED)
        held = held_columns(s, C, MASKED)
        reached = None
        if C.CHUNK > 32:  # of 16 bits: v isn't under way yet
            reached = held
            held = None
        p, factor, row_max, row_sum = softmax_step(s, row_max, row_sum, MASKED or C.BIAS > 0, C.NATURAL)
        if C.DROPOUT:
            keep = dropout_keep(philox[0], philox[1], rows, first_col, call.dropout_threshold, C.BLOCK_M, C.BLOCK_N)
            p = tl.where(keep, p, 0.0)
        acc = add_rows(acc, factor, p, v, first_col, C.V, C.BLOCK_N, C, C.TMA, MASKED, False, reached, held)
    return acc, row_max, row_sum


@triton.jit
def _forward_rows(q, k0, k1, v0, v1, masks, table, strides, philox, first_row, b, h, call, C: tl.constexpr):
    """The online softmax over all keys that a block of queries attends to."""
    hk, hv = h // call.group_k, h // call.group_v
    q = operand(q, q, q, q, b, h, strides.q, strides.q, call, False, False, False)
    k = operand(k0, k1, k0, k1, b, hk, strides.k, strides.k, call, True, False, C.TMA, table)
    v = operand(v0, v1, v0, v1, b, hv, strides.v, strides.v, call, True, False, C.TMA, table)
    masks = masks_of(masks, b, h, strides, C)
    q_tiles = load_tiles(q, first_row, C.QK, C.BLOCK_M, C, False, False, True)
    acc = zeros(C.BLOCK_M, C.V)
    row_max = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([C.BLOCK_M], tl.float32)

    if C.RANGES > 0:
        at = 0
        while at < call.seqlen_k:
            begin, middle, end = next_keys(masks, strides, first_row, at, call, C)
            acc, row_max, row_sum = _forward_blocks(
                acc, row_max, row_sum, q_tiles, k, v, masks, strides, philox, first_row, begin, middle, call, C,
                True,
            )  # fmt: skip
            acc, row_max, row_sum = _forward_blocks(
                acc, row_max, row_sum, q_tiles, k, v, masks, strides, philox, first_row, middle, end, call, C,
                False,
            )  # fmt: skip
            at = end
    else:
        bounds = visited_keys(first_row, call, C)
        for part in tl.static_range(0 if C.HAS_LOW else 1, 3):
            acc, row_max, row_sum = _forward_blocks(
                acc, row_max, row_sum, q_tiles, k, v, masks, strides, philox, first_row, bounds[part],
                bounds[part + 1], call, C, part != 1,
            )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def forward_kernel(
    q, k0, k1, v0, v1, masks: Masks, table, seed, sinks, out, lse,
    strides: ForwardStrides, call: Numbers, C: tl.constexpr,
):  # fmt: skip
    """out = softmax(scores) v and lse for one block of BLOCK_M queries of one head.

    q (batch, heads, seqlen_q, head_dim), k, v: pointers, or descriptors if TMA (k0, v0 for the columns of the first
    tile, k1, v1 for the rest); masks: pointers with broadcast strides 0; table (batch, pages of a sequence) of int32,
    where k and v are (pages, heads, rows of a page, head_dim); seed: int64 Philox keys, one per seeded_batch
    batch elements; sinks (batch, heads) and lse (batch, heads, seqlen_q) contiguous, fp32, natural logarithms; out like
    q.
    Grid: blocks of queries * batch * heads.
    """
    first_row, batch_head, b, h, philox = program_rows(seed, call, C)
    acc, row_max, row_sum = _forward_rows(q, k0, k1, v0, v1, masks, table, strides, philox, first_row, b, h, call, C)
    if C.UNATTENDED and has_nan(acc, C):
        acc, row_max, row_sum = _forward_rows(
            q, k0, k1, v0, v1, masks, table, strides, philox, afresh(first_row), afresh(b), afresh(h), call, clearing(C)
        )

    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    if C.WRITE_LSE or sinks is not None:
        value = tl.where(empty, float("-inf"), log_sum_exp(row_max, row_sum, C.NATURAL))
        if sinks is not None:
            value, share = with_sink(value, tl.load(sinks + batch_head))
        if C.WRITE_LSE:
            rows = first_row + tl.arange(0, C.BLOCK_M)
            tl.store(lse + batch_head.to(tl.int64) * call.seqlen_q + rows, value, mask=rows < call.seqlen_q)
    factor = 1.0 / row_sum
    if sinks is not None:
        factor *= share
    if C.DROPOUT:
        factor *= call.dropout_scale
    out = head_of(out, b, h, strides.out)
    store_tiles(out, acc, factor[:, None], first_row, strides.out.row, call.seqlen_q, C.V, C.BLOCK_M)
