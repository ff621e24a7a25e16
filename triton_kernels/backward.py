"""The backward pass and its derivative, without atomics and so the same in every run: delta, then dK and dV by blocks
of keys, and dQ by blocks of queries with the gradient of a bias of full shape; both make the probabilities again from
the saved lse.

    P = exp(S - lse)    dV = P^T dO    dS = P (dO V^T - delta)    dQ = scale dS K    dK = scale dS^T Q    dbias = dS

The two loops over the scores cost seven products where one loop with atomic additions to dQ would cost five.

Second order (a variant with TANGENT), for double backward: with cotangents tq, tk, tv, tbias of dq, dk, dv, dbias, what
is differentiated is L = rowsum(dS T) + rowsum(P U), summed over all rows: T is the tangent of the scores in the
direction (tq, tk, tbias) and U = dO tv^T. So the first pass is `tangent_kernel` in the direction of the cotangents; it
leaves mu = rowsum(P T), the gradient of grad_lse, tout, that of grad_out, and nu = rowsum(dO tout). The second, by the
kernels of this file, needs of each row but these:

    c = T - mu     dS = P (dP - delta)     W = dS c + P (U - nu)     gv = (P c)^T dO     gbias = W
    gq = scale (W k + dS tk)               gk = scale (W^T q + dS^T tq)

where dropout drops and scales dP, U and the P of gv, and a softcap multiplies W and dS of the last line by the slope
1 - tanh^2 and W by that slope's own derivative. (Derived by hand for this package; checked against float64 autograd.)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import Keys, Masks, Numbers, Queries, RowTerms, Strides
from .ranges import next_keys, next_queries, row_ends, visiting
from .score import (
    afresh,
    clearing,
    clears,
    dropout_keep,
    has_nan,
    held_columns,
    load_row_terms,
    philox_of,
    probabilities,
    program_rows,
    score_gradient,
    score_tangent,
    scores,
    second_gradient,
    visited_keys,
    visited_queries,
)
from .tiles import (
    add_product,
    add_rows_and_products,
    head_of,
    load_tile,
    load_tiles,
    masks_of,
    operand,
    products,
    store_tiles,
    zeros,
)


class DeltaStrides(NamedTuple):
    grad_out: Strides
    out: Strides


class BackwardStrides(NamedTuple):
    q: Strides
    k: Strides
    v: Strides
    grad_out: Strides
    bias: Strides
    ranges: Strides
    visits: Strides
    tq: Strides
    tk: Strides
    tv: Strides
    tbias: Strides


class DkdvStrides(NamedTuple):
    inputs: BackwardStrides
    dk: Strides
    dv: Strides


class DqStrides(NamedTuple):
    inputs: BackwardStrides
    dq: Strides
    dbias: Strides


class KeyGrads(NamedTuple):
    dk: Any
    dv: Any


class QueryGrads(NamedTuple):
    dq: Any
    dbias: Any


@triton.jit
def delta_kernel(grad_out, out, lse, grad_lse, delta, strides: DeltaStrides, heads, seqlen_q, C: tl.constexpr):
    """delta = rowsum(grad_out * out) - grad_lse, (batch, heads, seqlen_q) contiguous in fp32 like lse and grad_lse; 0
    of a row without a key, whatever its gradients hold.

    Grid: (blocks of queries * batch * heads).
    """
    blocks = (seqlen_q + C.BLOCK_M - 1) // C.BLOCK_M
    first_row = tl.program_id(0) % blocks * C.BLOCK_M
    batch_head = tl.program_id(0) // blocks
    b, h = batch_head // heads, batch_head % heads
    grad_out = head_of(grad_out, b, h, strides.grad_out)
    out = head_of(out, b, h, strides.out)
    rows = first_row + tl.arange(0, C.BLOCK_M)
    at = batch_head.to(tl.int64) * seqlen_q + rows
    live = tl.load(lse + at, mask=rows < seqlen_q, other=float("-inf")) != float("-inf")
    # Lanes add up sums, not products: fused with the first addition between lanes, a product gives each of them another
    # last bit, and the lanes of a row store what should be one value.
    products = tl.zeros([C.BLOCK_M, C.DIMS], tl.float32)
    for dim in range(0, C.V.dims, C.DIMS):
        g = load_tile(
            grad_out, 0, 0, first_row, strides.grad_out.row, seqlen_q, dim, C.V.dims, C.BLOCK_M, C.DIMS, False, False,
            live,
        )  # fmt: skip
        o = load_tile(out, 0, 0, first_row, strides.out.row, seqlen_q, dim, C.V.dims, C.BLOCK_M, C.DIMS, False, True)
        # A 0 counts for nothing, whatever lies beside it: it may be the output of a row without keys.
        products += tl.where(o == 0, 0.0, g.to(tl.float32)) * o.to(tl.float32)
    total = tl.sum(products, 1)
    if C.HAS_GRAD_LSE:
        total -= tl.load(grad_lse + at, mask=live, other=0.0)
    tl.store(delta + at, total, mask=rows < seqlen_q)


@triton.jit
def _dkdv_blocks(
    grads, k, v, q, grad_out, terms, row_offset, masks, strides, philox, first_col, begin, end, call,
    C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums over the queries [begin, end) of one head. Tiles are transposed, [keys, queries], so that probabilities
    and score gradients are the left operands of their products as they stand."""
    TAIL: tl.constexpr = MASKED or not C.HAS_LOW or C.RANGES > 0
    dk, dv = grads
    cols = first_col + tl.arange(0, C.BLOCK_N)
    for first_row in range(begin, end, C.BLOCK_M):
        rows = first_row + tl.arange(0, C.BLOCK_M)
        qk, x, q_tiles = products(k, q, first_row, C.QK, C.BLOCK_N, C.BLOCK_M, C, C.TMA, TAIL, C.TK, C.TQ)
        base, delta, mu, nu = load_row_terms(terms, row_offset, rows, call.seqlen_q, C)
        ends = None
        if MASKED and C.RANGES > 0:
            ends = row_ends(masks, strides, rows, call, C)
        s, t = scores(qk, rows[None, :], cols[:, None], first_col, masks.bias, strides.bias, ends, call, C, MASKED)
        p = probabilities(s, base[None, :], C.NATURAL)
        held = held_columns(s, C, MASKED)
        keep = p > 0.0
        kept = p
        if C.DROPOUT:
            keep = dropout_keep(philox[0], philox[1], rows, first_col, call.dropout_threshold, C.BLOCK_M, C.BLOCK_N)
            keep = tl.trans(keep)
            kept = tl.where(keep, p * call.dropout_scale, 0.0)
        if C.TANGENT:
            dp, u, g_tiles = products(v, grad_out, first_row, C.V, C.BLOCK_N, C.BLOCK_M, C, C.TMA, TAIL, C.TV)
            ts, product = score_tangent(x, t, rows[None, :], cols[:, None], masks.tbias, strides.tbias, call, C)
            _, ds, tangent, kept = second_gradient(
                p, ts, product, dp, u, delta[None, :], mu[None, :], nu[None, :], t, keep, call, C, MASKED
            )
            dv = add_product(dv, kept, g_tiles, C.V, C.BLOCK_M, C, TAIL, False, held)
        else:
            dv, dp = add_rows_and_products(
                dv, kept, v, grad_out, first_row, C.V, C.BLOCK_N, C.BLOCK_M, C, C.TMA, TAIL, held
            )
            _, ds = score_gradient(p, dp, delta[None, :], t, keep, call, C, MASKED)
        dk = add_product(dk, ds, q_tiles, C.QK, C.BLOCK_M, C, TAIL, False, held)
        if C.TQ:
            dk = add_product(dk, tangent, q_tiles, C.QK, C.BLOCK_M, C, TAIL, True, held)
    return dk, dv


@triton.jit
def _dkdv_columns(
    q0, q1, tq0, tq1, grad_out0, grad_out1, keys, masks, seed, terms, given, first_col, b, first_head, kv_group, call,
    C: tl.constexpr,
):  # fmt: skip
    """The sums over all queries that attend to a block of keys, of kv_group heads from `first_head` on."""
    hk, hv = first_head // call.group_k, first_head // call.group_v
    k = operand(keys.k, keys.k, keys.tk, keys.tk, b, hk, given.k, given.tk, call, True, C.TK, False)
    v = operand(keys.v, keys.v, keys.tv, keys.tv, b, hv, given.v, given.tv, call, True, C.TV, False)
    k_tiles = load_tiles(k, first_col, C.QK, C.BLOCK_N, C, C.TK, False, True)
    v_tiles = load_tiles(v, first_col, C.V, C.BLOCK_N, C, C.TV, False, True)
    sums = zeros(C.BLOCK_N, C.QK), zeros(C.BLOCK_N, C.V)
    bounds = visited_queries(first_col, call, C)
    # Keys past the end need no mask: each adds to its own row of dk and dv alone, which isn't stored.
    for h in range(first_head, first_head + kv_group):
        philox = philox_of(seed, call, b, h, C)
        q = operand(q0, q1, tq0, tq1, b, h, given.q, given.tq, call, False, C.TQ, C.TMA)
        g = operand(grad_out0, grad_out1, None, None, b, h, given.grad_out, given.grad_out, call, False, False, C.TMA)
        head_masks = masks_of(masks, b, h, given, C)
        row_offset = (b.to(tl.int64) * call.heads + h) * call.seqlen_q
        if C.RANGES > 0:
            at, last = visiting(masks.visits, b, h, given.visits, first_col, call, C)
            while at < last:
                begin, middle, end = next_queries(head_masks, given, first_col, at, call, C)
                sums = _dkdv_blocks(
                    sums, k_tiles, v_tiles, q, g, terms, row_offset, head_masks, given, philox, first_col, begin,
                    middle, call, C, True,
                )  # fmt: skip
                sums = _dkdv_blocks(
                    sums, k_tiles, v_tiles, q, g, terms, row_offset, head_masks, given, philox, first_col, middle,
                    end, call, C, False,
                )  # fmt: skip
                at = end
        else:
            for part in tl.static_range(0 if C.HAS_HIGH else 1, 3 if C.HAS_LOW else 2):
                sums = _dkdv_blocks(
                    sums, k_tiles, v_tiles, q, g, terms, row_offset, head_masks, given, philox, first_col,
                    bounds[part], bounds[part + 1], call, C, part != 1,
                )  # fmt: skip
    return sums


@triton.jit
def dkdv_kernel(
    q0, q1, tq0, tq1, grad_out0, grad_out1, keys: Keys, masks: Masks, seed, terms: RowTerms, grads: KeyGrads,
    strides: DkdvStrides, heads_out, kv_group, call: Numbers, C: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of BLOCK_N keys of one head of `heads_out`, summed over the kv_group query heads that
    share it (heads_out * kv_group = heads; kv_group divides group_k and group_v). With a TANGENT gk and gv in place
    of dk and dv.

    q, tq and grad_out: pointers, or descriptors if TMA. Grid: blocks of keys * batch * heads_out.
    """
    # Longest first, over all heads: with a causal band the first keys are reached by the most queries.
    first_col = tl.program_id(0) // (call.batch * heads_out) * C.BLOCK_N
    batch_head = tl.program_id(0) % (call.batch * heads_out)
    b, ho = batch_head // heads_out, batch_head % heads_out
    first_head = ho * kv_group
    given = strides.inputs
    dk, dv = _dkdv_columns(
        q0, q1, tq0, tq1, grad_out0, grad_out1, keys, masks, seed, terms, given, first_col, b, first_head, kv_group,
        call, C,
    )  # fmt: skip
    if C.UNATTENDED and has_nan(dk, C) | has_nan(dv, C):
        dk, dv = _dkdv_columns(
            q0, q1, tq0, tq1, grad_out0, grad_out1, keys, masks, seed, terms, given, afresh(first_col), afresh(b),
            afresh(first_head), kv_group, call, clearing(C),
        )  # fmt: skip
    to_dk = head_of(grads.dk, b, ho, strides.dk)
    to_dv = head_of(grads.dv, b, ho, strides.dv)
    store_tiles(to_dk, dk, call.softmax_scale, first_col, strides.dk.row, call.seqlen_k, C.QK, C.BLOCK_N)
    store_tiles(to_dv, dv, 1.0, first_col, strides.dv.row, call.seqlen_k, C.V, C.BLOCK_N)


@triton.jit
def score_gradients(
    q, grad_out, terms, k, v, masks, strides, philox, rows, ends, first_col, call, C: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Of one tile of scores: the gradients of the scores, of the products q k^T before scale, with a TANGENT of these
    products' tangent; the tiles of k; and which of these some row attends to, where others are cleared. terms: of
    `load_row_terms`; ends as in `scores`."""
    base, delta, mu, nu = terms
    cols = first_col + tl.arange(0, C.BLOCK_N)
    qk, x, k_tiles = products(q, k, first_col, C.QK, C.BLOCK_M, C.BLOCK_N, C, C.TMA, MASKED, C.TQ, C.TK)
    s, t = scores(qk, rows[:, None], cols[None, :], first_col, masks.bias, strides.bias, ends, call, C, MASKED)
    held = 0  # (No None: see `masks_of`.)
    if clears(C, MASKED):
        held = held_columns(s, C, MASKED)
    p = probabilities(s, base[:, None], C.NATURAL)
    dp, u, _ = products(grad_out, v, first_col, C.V, C.BLOCK_M, C.BLOCK_N, C, C.TMA, MASKED, False, C.TV)
    keep = p > 0.0
    if C.DROPOUT:
        keep = dropout_keep(philox[0], philox[1], rows, first_col, call.dropout_threshold, C.BLOCK_M, C.BLOCK_N)
    if C.TANGENT:
        ts, product = score_tangent(x, t, rows[:, None], cols[None, :], masks.tbias, strides.tbias, call, C)
        ds, raw, tangent, _ = second_gradient(
            p, ts, product, dp, u, delta[:, None], mu[:, None], nu[:, None], t, keep, call, C, MASKED
        )
        return ds, raw, tangent, k_tiles, held
    else:
        ds, raw = score_gradient(p, dp, delta[:, None], t, keep, call, C, MASKED)
        return ds, raw, raw, k_tiles, held


@triton.jit
def _dq_blocks(
    dq, q, grad_out, terms, k, v, masks, dbias, strides, philox, first_row, begin, end, call, C: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The sum over the keys [begin, end); with DBIAS also stores the gradients of the scores."""
    rows = first_row + tl.arange(0, C.BLOCK_M)
    ends = None
    if MASKED and C.RANGES > 0:
        ends = row_ends(masks, strides.inputs, rows, call, C)
    for first_col in range(begin, end, C.BLOCK_N):
        ds, raw, tangent, k_tiles, held = score_gradients(
            q, grad_out, terms, k, v, masks, strides.inputs, philox, rows, ends, first_col, call, C, MASKED
        )
        if not clears(C, MASKED):
            held = None
        if C.DBIAS:
            cols = first_col + tl.arange(0, C.BLOCK_N)
            at = rows[:, None].to(tl.int64) * strides.dbias.row + cols[None, :]
            inside = (rows[:, None] < call.seqlen_q) & (cols[None, :] < call.seqlen_k)
            tl.store(dbias + at, ds.to(dbias.dtype.element_ty), mask=inside)
        dq = add_product(dq, raw, k_tiles, C.QK, C.BLOCK_N, C, MASKED, False, held)
        if C.TK:
            dq = add_product(dq, tangent, k_tiles, C.QK, C.BLOCK_N, C, MASKED, True, held)
    return dq


@triton.jit
def _dq_rows(
    k0, k1, v0, v1, tk0, tk1, tv0, tv1, queries, masks, dbias, terms, philox, strides, first_row, b, h, call,
    C: tl.constexpr,
):  # fmt: skip
    """The sum over all keys that a block of queries attends to; with DBIAS also stores the gradients of the scores."""
    hk, hv = h // call.group_k, h // call.group_v
    given = strides.inputs
    q = operand(queries.q, queries.q, queries.tq, queries.tq, b, h, given.q, given.tq, call, False, C.TQ, False)
    g = queries.grad_out
    g = operand(g, g, g, g, b, h, given.grad_out, given.grad_out, call, False, False, False)
    k = operand(k0, k1, tk0, tk1, b, hk, given.k, given.tk, call, True, C.TK, C.TMA)
    v = operand(v0, v1, tv0, tv1, b, hv, given.v, given.tv, call, True, C.TV, C.TMA)
    masks = masks_of(masks, b, h, given, C)
    if C.DBIAS:
        dbias = head_of(dbias, b, h, strides.dbias)
    q_tiles = load_tiles(q, first_row, C.QK, C.BLOCK_M, C, C.TQ, False, True)
    g_tiles = load_tiles(g, first_row, C.V, C.BLOCK_M, C, False, False, True)
    rows = first_row + tl.arange(0, C.BLOCK_M)
    row_terms = load_row_terms(terms, (b * call.heads + h).to(tl.int64) * call.seqlen_q, rows, call.seqlen_q, C)
    dq = zeros(C.BLOCK_M, C.QK)
    if C.RANGES > 0:
        at = 0
        while at < call.seqlen_k:
            begin, middle, end = next_keys(masks, given, first_row, at, call, C)
            dq = _dq_blocks(
                dq, q_tiles, g_tiles, row_terms, k, v, masks, dbias, strides, philox, first_row, begin, middle,
                call, C, True,
            )  # fmt: skip
            dq = _dq_blocks(
                dq, q_tiles, g_tiles, row_terms, k, v, masks, dbias, strides, philox, first_row, middle, end,
                call, C, False,
            )  # fmt: skip
            at = end
    else:
        bounds = visited_keys(first_row, call, C)
        for part in tl.static_range(0 if C.HAS_LOW else 1, 3):
            dq = _dq_blocks(
                dq, q_tiles, g_tiles, row_terms, k, v, masks, dbias, strides, philox, first_row,
                bounds[part], bounds[part + 1], call, C, part != 1,
            )  # fmt: skip
    return dq


@triton.jit
def dq_kernel(
    k0, k1, v0, v1, tk0, tk1, tv0, tv1, queries: Queries, masks: Masks, seed, terms: RowTerms, grads: QueryGrads,
    strides: DqStrides, call: Numbers, C: tl.constexpr,
):  # fmt: skip
    """dq of one block of BLOCK_M queries of one head; with a TANGENT gq. With DBIAS (a bias with an entry per score)
    also the bias' gradient: every entry of a block that a query attends to is stored; the caller zeroes the rest.

    tq, tk, tv have the shapes of q, k, v, tbias broadcasts to the scores; each may be None for zero. Pointers and
    descriptors as in forward_kernel. Grid: blocks of queries * batch * heads.
    """
    first_row, _, b, h, philox = program_rows(seed, call, C)
    dq = _dq_rows(
        k0, k1, v0, v1, tk0, tk1, tv0, tv1, queries, masks, grads.dbias, terms, philox, strides, first_row, b, h, call,
        C,
    )  # fmt: skip
    if C.UNATTENDED and has_nan(dq, C):
        dq = _dq_rows(
            k0, k1, v0, v1, tk0, tk1, tv0, tv1, queries, masks, grads.dbias, terms, philox, strides,
            afresh(first_row), afresh(b), afresh(h), call, clearing(C),
        )  # fmt: skip
    to_dq = head_of(grads.dq, b, h, strides.dq)
    store_tiles(to_dq, dq, call.softmax_scale, first_row, strides.dq.row, call.seqlen_q, C.QK, C.BLOCK_M)
