"""Forward-mode derivative: the tangents of out and lse for given tangents of q, k, v and the bias.

With the saved lse no online softmax is needed. Per block of keys:

    T = scale (tq k^T + q tk^T) (1 - tanh^2 with a softcap) + tbias
    mu = rowsum(P T)        tlse = mu        tout = (P T) v + P tv - mu out

in which dropout drops and scales the P of both products, not that of mu. Five products, one accumulator. (The
formulas are those of a derivative of the softmax; that one pass with the saved lse is enough is its use here.)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import Masks, Numbers, Queries, Strides
from .backward import BackwardStrides
from .ranges import next_keys, row_ends
from .score import (
    afresh,
    clearing,
    dropout_keep,
    has_nan,
    held_columns,
    load_row_base,
    probabilities,
    program_rows,
    score_tangent,
    scores,
    visited_keys,
    weighted,
)
from .tiles import add_rows, head_of, load_tile, load_tiles, masks_of, operand, products, store_tile, zeros


class TangentStrides(NamedTuple):
    inputs: BackwardStrides
    out: Strides
    tout: Strides


class Saved(NamedTuple):
    """Of the forward pass."""

    out: Any
    lse: Any


class Tangents(NamedTuple):
    tout: Any
    tlse: Any
    nu: Any


@triton.jit
def _tangent_blocks(
    acc, mu, total, q, base, k, v, masks, strides, philox, first_row, begin, end, call, C: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The sums over the keys [begin, end)."""
    rows = first_row + tl.arange(0, C.BLOCK_M)
    ends = None
    if MASKED and C.RANGES > 0:
        ends = row_ends(masks, strides, rows, call, C)
    for first_col in range(begin, end, C.BLOCK_N):
        cols = first_col + tl.arange(0, C.BLOCK_N)
        qk, x, _ = products(q, k, first_col, C.QK, C.BLOCK_M, C.BLOCK_N, C, C.TMA, MASKED, C.TQ, C.TK)
        s, t = scores(qk, rows[:, None], cols[None, :], first_col, masks.bias, strides.bias, ends, call, C, MASKED)
        p = probabilities(s, base[:, None], C.NATURAL)
        ts, _ = score_tangent(x, t, rows[:, None], cols[None, :], masks.tbias, strides.tbias, call, C)
        weights = weighted(p, p * ts, C, MASKED)
        held = held_columns(s, C, MASKED)
        mu += tl.sum(weights, 1)
        total += tl.sum(p, 1)
        if C.DROPOUT:
            keep = dropout_keep(philox[0], philox[1], rows, first_col, call.dropout_threshold, C.BLOCK_M, C.BLOCK_N)
            p = tl.where(keep, p * call.dropout_scale, 0.0)
            weights = tl.where(keep, weights * call.dropout_scale, 0.0)
        acc = add_rows(acc, None, weights, v, first_col, C.V, C.BLOCK_N, C, C.TMA, MASKED, False, None, held)
        if C.TV:
            acc = add_rows(acc, None, p, v, first_col, C.V, C.BLOCK_N, C, C.TMA, MASKED, True, None, held)
    return acc, mu, total


@triton.jit
def _tangent_rows(
    k0, k1, v0, v1, tk0, tk1, tv0, tv1, queries, masks, lse, philox, strides, first_row, b, h, call, C: tl.constexpr
):
    """The sums over all keys that a block of queries attends to."""
    hk, hv = h // call.group_k, h // call.group_v
    q = operand(queries.q, queries.q, queries.tq, queries.tq, b, h, strides.q, strides.tq, call, False, C.TQ, False)
    k = operand(k0, k1, tk0, tk1, b, hk, strides.k, strides.tk, call, True, C.TK, C.TMA)
    v = operand(v0, v1, tv0, tv1, b, hv, strides.v, strides.tv, call, True, C.TV, C.TMA)
    masks = masks_of(masks, b, h, strides, C)
    q_tiles = load_tiles(q, first_row, C.QK, C.BLOCK_M, C, C.TQ, False, True)
    rows = first_row + tl.arange(0, C.BLOCK_M)
    base = load_row_base(lse, rows, call.seqlen_q, C.NATURAL)
    acc = zeros(C.BLOCK_M, C.V)
    mu = tl.zeros([C.BLOCK_M], tl.float32)
    total = tl.zeros([C.BLOCK_M], tl.float32)
    if C.RANGES > 0:
        at = 0
        while at < call.seqlen_k:
            begin, middle, end = next_keys(masks, strides, first_row, at, call, C)
            acc, mu, total = _tangent_blocks(
                acc, mu, total, q_tiles, base, k, v, masks, strides, philox, first_row, begin, middle, call, C, True
            )
            acc, mu, total = _tangent_blocks(
                acc, mu, total, q_tiles, base, k, v, masks, strides, philox, first_row, middle, end, call, C, False
            )
            at = end
    else:
        bounds = visited_keys(first_row, call, C)
        for part in tl.static_range(0 if C.HAS_LOW else 1, 3):
            acc, mu, total = _tangent_blocks(
                acc, mu, total, q_tiles, base, k, v, masks, strides, philox, first_row, bounds[part],
                bounds[part + 1], call, C, part != 1,
            )  # fmt: skip
    return acc, mu, total


@triton.jit
def _finish(
    acc, sums, factor, mu, out, grad_out, tout, strides, first_row, seqlen_q, first_dim, dims, C: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """Stores DIMS columns of tout; gives `sums` and, with NU, the row sums of its product with grad_out."""
    o = load_tile(out, 0, 0, first_row, strides.out.row, seqlen_q, first_dim, dims, C.BLOCK_M, DIMS, False, True)
    acc = acc * factor[:, None] - mu[:, None] * o.to(tl.float32)
    store_tile(tout, acc, first_row, strides.tout.row, seqlen_q, first_dim, dims, C.BLOCK_M, DIMS)
    if C.NU:
        stride = strides.inputs.grad_out.row
        g = load_tile(grad_out, 0, 0, first_row, stride, seqlen_q, first_dim, dims, C.BLOCK_M, DIMS, False, True)
        sums += tl.sum(g.to(tl.float32) * acc, 1)
    return sums


@triton.jit
def tangent_kernel(
    k0, k1, v0, v1, tk0, tk1, tv0, tv1, queries: Queries, masks: Masks, seed, saved: Saved, tangents: Tangents,
    strides: TangentStrides, call: Numbers, C: tl.constexpr,
):  # fmt: skip
    """tout (like out) and tlse (batch, heads, seqlen_q, contiguous fp32) of one block of queries of one head; with NU,
    for which grad_out is given, also nu = rowsum(grad_out * tout), like tlse.

    tq, tk, tv have the shapes of what they are tangents of, tbias broadcasts to the scores; each may be None for zero.
    Pointers and descriptors as in forward_kernel. Grid: blocks of queries * batch * heads.
    """
    first_row, batch_head, b, h, philox = program_rows(seed, call, C)
    given = strides.inputs
    rows = first_row + tl.arange(0, C.BLOCK_M)
    inside = rows < call.seqlen_q
    first_of_head = batch_head.to(tl.int64) * call.seqlen_q
    lse = saved.lse + first_of_head
    acc, mu, total = _tangent_rows(
        k0, k1, v0, v1, tk0, tk1, tv0, tv1, queries, masks, lse, philox, given, first_row, b, h, call, C
    )
    if C.UNATTENDED and has_nan(acc, C):
        acc, mu, total = _tangent_rows(
            k0, k1, v0, v1, tk0, tk1, tv0, tv1, queries, masks, lse, philox, given, afresh(first_row),
            afresh(b), afresh(h), call, clearing(C),
        )  # fmt: skip

    # The probabilities add up to 1 but for the rounding of lse, which is thus taken out again.
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    mu *= factor
    tl.store(tangents.tlse + first_of_head + rows, mu, mask=inside)
    out = head_of(saved.out, b, h, strides.out)
    tout = head_of(tangents.tout, b, h, strides.tout)
    grad_out = queries.grad_out
    if C.NU:
        grad_out = head_of(grad_out, b, h, given.grad_out)
    sums = tl.zeros([C.BLOCK_M], tl.float32)
    sums = _finish(
        acc[0], sums, factor, mu, out, grad_out, tout, strides, first_row, call.seqlen_q, 0, C.V.dims, C, C.V.first
    )
    if C.V.rest > 0:
        sums = _finish(
            acc[1], sums, factor, mu, out, grad_out, tout, strides, first_row, call.seqlen_q, C.V.first, C.V.dims, C,
            C.V.rest,
        )  # fmt: skip
    if C.NU:
        # Whatever came as the gradient of a row without a key.
        tl.store(tangents.nu + first_of_head + rows, tl.where(total == 0.0, 0.0, sums), mask=inside)
