"""The derivative of the backward pass, for double backward, in two passes over the scores and without atomics.

With cotangents tq, tk, tv, tbias of dq, dk, dv, dbias, what is differentiated is L = rowsum(dS T) + rowsum(P U), summed
over all rows: T is the tangent of the scores in the direction (tq, tk, tbias) and U = dO tv^T. So the first pass is
`tangent_kernel` in the direction of the cotangents; it leaves mu = rowsum(P T), the gradient of grad_lse, tout, that of
grad_out, and nu = rowsum(dO tout). The second, by blocks of queries (q, bias) and by blocks of keys (k, v), needs of
each row but these:

    c = T - mu     dS = P (dP - delta)     W = dS c + P (U - nu)     gv = (P c)^T dO     gbias = W
    gq = scale (W k + dS tk)               gk = scale (W^T q + dS^T tq)

where dropout drops and scales dP, U and the P of gv, and a softcap multiplies W and dS of the last line by the slope
1 - tanh^2 and W by that slope's own derivative. (Derived by hand for this package; checked against float64 autograd.)
"""

import triton
import triton.language as tl

from .bias_gradient import shared_tile, store_shared
from .forward import store_tile
from .score import (
    dropout_keep,
    load_row_constants,
    program_rows,
    reached,
    score_tangent,
    scores,
    second_gradient,
    weights,
)
from .tangent import add_product, head_of, load_factor, products


@triton.jit
def load_second_constants(lse, delta, mu, nu, rows, seqlen_q, NATURAL: tl.constexpr):
    """`load_row_constants`, mu and nu of these rows (0 past the end). They point to the head's first row."""
    base, row_delta = load_row_constants(lse, delta, rows, seqlen_q, NATURAL)
    inside = rows < seqlen_q
    return base, row_delta, tl.load(mu + rows, mask=inside, other=0.0), tl.load(nu + rows, mask=inside, other=0.0)


@triton.jit
def _second_dq_blocks(
    dq0, dq1, q0, q1, tq0, tq1, g0, g1, base, row_delta, row_mu, row_nu,
    k0, k1, v0, v1, tk0, tk1, tv0, tv1, bias, tbias, dbias, key,
    b, hk, hv, counted, first_row, begin, end,
    q_stride, tq_stride, grad_stride, k_stride, v_stride, tk_stride, tv_stride,
    bias_stride_m, bias_stride_n, tbias_stride_m, tbias_stride_n,
    dbias_stride_m,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, TBIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum over the keys [begin, end); where dbias is given also stores W."""
    rows = first_row + tl.arange(0, BLOCK_M)
    for first_col in range(begin, end, BLOCK_N):
        cols = first_col + tl.arange(0, BLOCK_N)
        ka, kb = load_factor(
            k0, k1, b, hk, first_col, k_stride, seqlen_k, head_dim, BLOCK_N, D0, D1, TMA, MASKED, CHUNK
        )
        ta, tb = load_factor(
            tk0, tk1, b, hk, first_col, tk_stride, seqlen_k, head_dim, BLOCK_N, D0, D1, TMA, MASKED, CHUNK
        )
        qk, x = products(
            q0, q1, tq0, tq1, ka, kb, ta, tb, first_row, q_stride, tq_stride, seqlen_q, first_col, k_stride, tk_stride,
            seqlen_k, head_dim, BLOCK_M, BLOCK_N, D1, CHUNK, PRECISION,
        )  # fmt: skip
        s, t = scores(
            qk, rows[:, None], cols[None, :], bias, bias_stride_m, bias_stride_n, score_scale, softcap, seqlen_q,
            seqlen_k, band_low, band_high, BIAS, SOFTCAP, HAS_LOW, HAS_HIGH, MASKED, BIAS % 2 == 1,
        )  # fmt: skip
        p = weights(s, base[:, None], BIAS % 2 == 1)
        ts, product = score_tangent(
            x, t, rows[:, None], cols[None, :], tbias, tbias_stride_m, tbias_stride_n, softmax_scale, seqlen_q,
            seqlen_k, TBIAS, SOFTCAP,
        )  # fmt: skip
        va, vb = load_factor(
            v0, v1, b, hv, first_col, v_stride, seqlen_k, head_dim_v, BLOCK_N, V0, V1, TMA, MASKED, CHUNK
        )
        wa, wb = load_factor(
            tv0, tv1, b, hv, first_col, tv_stride, seqlen_k, head_dim_v, BLOCK_N, V0, V1, TMA, MASKED, CHUNK
        )
        dp, u = products(
            g0, g1, None, None, va, vb, wa, wb, first_row, grad_stride, 0, seqlen_q, first_col, v_stride, tv_stride,
            seqlen_k, head_dim_v, BLOCK_M, BLOCK_N, V1, CHUNK, PRECISION,
        )  # fmt: skip
        keep = p > 0.0
        if DROPOUT:
            keep = dropout_keep(key, counted, rows, first_col, dropout_threshold, BLOCK_M, BLOCK_N)
        w, raw, ds, _ = second_gradient(
            p, ts, product, dp, u, row_delta[:, None], row_mu[:, None], row_nu[:, None], t, keep, dropout_scale,
            softcap, SOFTCAP, DROPOUT,
        )  # fmt: skip
        if dbias is not None:
            at = rows[:, None].to(tl.int64) * dbias_stride_m + cols[None, :]
            inside = (rows[:, None] < seqlen_q) & (cols[None, :] < seqlen_k)
            tl.store(dbias + at, w.to(dbias.dtype.element_ty), mask=inside)
        dq0, dq1 = add_product(
            dq0, dq1, raw, ka, kb, first_col, k_stride, seqlen_k, head_dim, BLOCK_N, D0, D1, CHUNK, PRECISION
        )
        dq0, dq1 = add_product(
            dq0, dq1, ds, ta, tb, first_col, tk_stride, seqlen_k, head_dim, BLOCK_N, D0, D1, CHUNK, PRECISION
        )
    return dq0, dq1


@triton.jit
def second_dq_kernel(
    q, k0, k1, v0, v1, grad_out, lse, delta, bias, seed, tq, tk0, tk1, tv0, tv1, tbias, mu, nu, dq, dbias,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    grad_stride_b, grad_stride_h, grad_stride_m, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    tq_stride_b, tq_stride_h, tq_stride_m, tk_stride_b, tk_stride_h, tk_stride_n, tv_stride_b, tv_stride_h,
    tv_stride_n, tbias_stride_b, tbias_stride_h, tbias_stride_m, tbias_stride_n,
    dq_stride_b, dq_stride_h, dq_stride_m, dbias_stride_b, dbias_stride_h, dbias_stride_m,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale,
    batch, heads, group_k, group_v, seeded_batch, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, TBIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gq (as dq) of one block of BLOCK_M queries of one head. With dbias (a bias with an entry per score) also its
    gradient: every entry within the band is stored; the caller zeroes the rest.

    tq, tk, tv have the shapes of q, k, v, tbias broadcasts to the scores; each may be None for zero. lse, delta, mu
    and nu are (batch, heads, seqlen_q), contiguous, fp32. Pointers and descriptors as in forward_kernel. Grid: blocks
    of queries * batch * heads.
    """
    first_row, batch_head, b, h, key, counted = program_rows(
        seed, batch, heads, seeded_batch, seqlen_q, BLOCK_M, HAS_HIGH, DROPOUT
    )
    hk, hv = h // group_k, h // group_v
    q = head_of(q, b, h, q_stride_b, q_stride_h)
    tq = head_of(tq, b, h, tq_stride_b, tq_stride_h)
    grad_out = head_of(grad_out, b, h, grad_stride_b, grad_stride_h)
    if not TMA:
        k0 = head_of(k0, b, hk, k_stride_b, k_stride_h)
        v0 = head_of(v0, b, hv, v_stride_b, v_stride_h)
        tk0 = head_of(tk0, b, hk, tk_stride_b, tk_stride_h)
        tv0 = head_of(tv0, b, hv, tv_stride_b, tv_stride_h)
        k1 = k0
        v1 = v0
        tk1 = tk0
        tv1 = tv0
    bias = head_of(bias, b, h, bias_stride_b, bias_stride_h)
    tbias = head_of(tbias, b, h, tbias_stride_b, tbias_stride_h)
    dbias = head_of(dbias, b, h, dbias_stride_b, dbias_stride_h)

    q0, q1 = load_factor(q, q, 0, 0, first_row, q_stride_m, seqlen_q, head_dim, BLOCK_M, D0, D1, False, True, CHUNK)
    tq0, tq1 = load_factor(
        tq, tq, 0, 0, first_row, tq_stride_m, seqlen_q, head_dim, BLOCK_M, D0, D1, False, True, CHUNK
    )
    g0, g1 = load_factor(
        grad_out, grad_out, 0, 0, first_row, grad_stride_m, seqlen_q, head_dim_v, BLOCK_M, V0, V1, False, True, CHUNK
    )
    rows = first_row + tl.arange(0, BLOCK_M)
    constants = batch_head.to(tl.int64) * seqlen_q
    base, row_delta, row_mu, row_nu = load_second_constants(
        lse + constants, delta + constants, mu + constants, nu + constants, rows, seqlen_q, BIAS % 2 == 1
    )
    dq0 = tl.zeros([BLOCK_M, D0], tl.float32)
    dq1 = tl.zeros([BLOCK_M, D1 if D1 > 0 else 16], tl.float32)

    begin, clean_begin, clean_end, end = reached(
        first_row, seqlen_q, seqlen_k, band_low, band_high, BLOCK_M, BLOCK_N, HAS_LOW, HAS_HIGH
    )
    # Masked blocks (if there is a lower bound), clean ones, masked ones again.
    for part in tl.static_range(3):
        if HAS_LOW or part > 0:
            first = begin if part == 0 else (clean_begin if part == 1 else clean_end)
            last = clean_begin if part == 0 else (clean_end if part == 1 else end)
            dq0, dq1 = _second_dq_blocks(
                dq0, dq1, q0, q1, tq0, tq1, g0, g1, base, row_delta, row_mu, row_nu,
                k0, k1, v0, v1, tk0, tk1, tv0, tv1, bias, tbias, dbias, key,
                b, hk, hv, counted, first_row, first, last,
                q_stride_m, tq_stride_m, grad_stride_m, k_stride_n, v_stride_n, tk_stride_n, tv_stride_n,
                bias_stride_m, bias_stride_n, tbias_stride_m, tbias_stride_n, dbias_stride_m,
                softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim,
                head_dim_v, band_low, band_high,
                BLOCK_M, BLOCK_N, D0, D1, V0, V1, CHUNK, BIAS, TBIAS, SOFTCAP, DROPOUT, HAS_LOW, HAS_HIGH, part != 1,
                TMA, PRECISION,
            )  # fmt: skip
    dq = head_of(dq, b, h, dq_stride_b, dq_stride_h)
    store_tile(dq, dq0 * softmax_scale, first_row, dq_stride_m, seqlen_q, 0, head_dim, BLOCK_M, D0)
    if D1 > 0:
        store_tile(dq, dq1 * softmax_scale, first_row, dq_stride_m, seqlen_q, D0, head_dim, BLOCK_M, D1)


@triton.jit
def _second_dkdv_blocks(
    dk0, dk1, dv0, dv1, k0, k1, v0, v1, tk0, tk1, tv0, tv1, q0, q1, tq0, tq1, grad_out0, grad_out1,
    lse, delta, mu, nu, bias, tbias, key,
    b, h, counted, first_col, begin, end,
    q_stride, tq_stride, grad_stride, k_stride, tk_stride, v_stride, tv_stride,
    bias_stride_m, bias_stride_n, tbias_stride_m, tbias_stride_n,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, TBIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums over the queries [begin, end) of one head. Tiles are transposed, [keys, queries]."""
    cols = first_col + tl.arange(0, BLOCK_N)
    for first_row in range(begin, end, BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)
        qa, qb = load_factor(q0, q1, b, h, first_row, q_stride, seqlen_q, head_dim, BLOCK_M, D0, D1, TMA, TAIL, CHUNK)
        ta, tb = load_factor(
            tq0, tq1, b, h, first_row, tq_stride, seqlen_q, head_dim, BLOCK_M, D0, D1, TMA, TAIL, CHUNK
        )
        qk, x = products(
            k0, k1, tk0, tk1, qa, qb, ta, tb, first_col, k_stride, tk_stride, seqlen_k, first_row, q_stride, tq_stride,
            seqlen_q, head_dim, BLOCK_N, BLOCK_M, D1, CHUNK, PRECISION,
        )  # fmt: skip
        base, row_delta, row_mu, row_nu = load_second_constants(lse, delta, mu, nu, rows, seqlen_q, BIAS % 2 == 1)
        s, t = scores(
            qk, rows[None, :], cols[:, None], bias, bias_stride_m, bias_stride_n, score_scale, softcap, seqlen_q,
            seqlen_k, band_low, band_high, BIAS, SOFTCAP, HAS_LOW, HAS_HIGH, MASKED, BIAS % 2 == 1,
        )  # fmt: skip
        p = weights(s, base[None, :], BIAS % 2 == 1)
        ts, product = score_tangent(
            x, t, rows[None, :], cols[:, None], tbias, tbias_stride_m, tbias_stride_n, softmax_scale, seqlen_q,
            seqlen_k, TBIAS, SOFTCAP,
        )  # fmt: skip
        ga, gb = load_factor(
            grad_out0, grad_out1, b, h, first_row, grad_stride, seqlen_q, head_dim_v, BLOCK_M, V0, V1, TMA, TAIL, CHUNK
        )
        dp, u = products(
            v0, v1, tv0, tv1, ga, gb, None, None, first_col, v_stride, tv_stride, seqlen_k, first_row, grad_stride, 0,
            seqlen_q, head_dim_v, BLOCK_N, BLOCK_M, V1, CHUNK, PRECISION,
        )  # fmt: skip
        keep = p > 0.0
        if DROPOUT:
            keep = tl.trans(dropout_keep(key, counted, rows, first_col, dropout_threshold, BLOCK_M, BLOCK_N))
        _, raw, ds, kept = second_gradient(
            p, ts, product, dp, u, row_delta[None, :], row_mu[None, :], row_nu[None, :], t, keep, dropout_scale,
            softcap, SOFTCAP, DROPOUT,
        )  # fmt: skip
        dv0, dv1 = add_product(
            dv0, dv1, kept, ga, gb, first_row, grad_stride, seqlen_q, head_dim_v, BLOCK_M, V0, V1, CHUNK, PRECISION
        )
        dk0, dk1 = add_product(
            dk0, dk1, raw, qa, qb, first_row, q_stride, seqlen_q, head_dim, BLOCK_M, D0, D1, CHUNK, PRECISION
        )
        dk0, dk1 = add_product(
            dk0, dk1, ds, ta, tb, first_row, tq_stride, seqlen_q, head_dim, BLOCK_M, D0, D1, CHUNK, PRECISION
        )
    return dk0, dk1, dv0, dv1


@triton.jit
def second_dkdv_kernel(
    q0, q1, k, v, grad_out0, grad_out1, lse, delta, bias, seed, tq0, tq1, tk, tv, tbias, mu, nu, dk, dv,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    grad_stride_b, grad_stride_h, grad_stride_m, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    tq_stride_b, tq_stride_h, tq_stride_m, tk_stride_b, tk_stride_h, tk_stride_n, tv_stride_b, tv_stride_h,
    tv_stride_n, tbias_stride_b, tbias_stride_h, tbias_stride_m, tbias_stride_n,
    dk_stride_b, dk_stride_h, dk_stride_n, dv_stride_b, dv_stride_h, dv_stride_n,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale,
    batch, heads, heads_out, group_k, group_v, group_out, seeded_batch, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, TBIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gk and gv (as dk and dv) of one block of BLOCK_N keys of one head of `heads_out`, summed over the group_out query
    heads that share it (heads_out * group_out = heads; group_out divides group_k and group_v).

    Arguments as in second_dq_kernel, loaded by descriptors (if TMA): q, tq, grad_out. Grid: blocks of keys * batch *
    heads_out.
    """
    # Longest first, over all heads: with a causal band the first keys are reached by the most queries.
    first_col = tl.program_id(0) // (batch * heads_out) * BLOCK_N
    batch_head = tl.program_id(0) % (batch * heads_out)
    b, ho = batch_head // heads_out, batch_head % heads_out
    first_head = ho * group_out
    hk, hv = first_head // group_k, first_head // group_v
    k = head_of(k, b, hk, k_stride_b, k_stride_h)
    v = head_of(v, b, hv, v_stride_b, v_stride_h)
    tk = head_of(tk, b, hk, tk_stride_b, tk_stride_h)
    tv = head_of(tv, b, hv, tv_stride_b, tv_stride_h)
    k0, k1 = load_factor(k, k, 0, 0, first_col, k_stride_n, seqlen_k, head_dim, BLOCK_N, D0, D1, False, True, CHUNK)
    v0, v1 = load_factor(v, v, 0, 0, first_col, v_stride_n, seqlen_k, head_dim_v, BLOCK_N, V0, V1, False, True, CHUNK)
    tk0, tk1 = load_factor(
        tk, tk, 0, 0, first_col, tk_stride_n, seqlen_k, head_dim, BLOCK_N, D0, D1, False, True, CHUNK
    )
    tv0, tv1 = load_factor(
        tv, tv, 0, 0, first_col, tv_stride_n, seqlen_k, head_dim_v, BLOCK_N, V0, V1, False, True, CHUNK
    )
    dk0 = tl.zeros([BLOCK_N, D0], tl.float32)
    dk1 = tl.zeros([BLOCK_N, D1 if D1 > 0 else 16], tl.float32)
    dv0 = tl.zeros([BLOCK_N, V0], tl.float32)
    dv1 = tl.zeros([BLOCK_N, V1 if V1 > 0 else 16], tl.float32)
    key = 0
    if DROPOUT:
        key = tl.load(seed + b // seeded_batch)

    begin, clean_begin, clean_end, end = reached(
        first_col, seqlen_k, seqlen_q, -band_high, -band_low, BLOCK_N, BLOCK_M, HAS_HIGH, HAS_LOW
    )
    # Keys past the end need no mask: each adds to its own row of dk and dv alone, which isn't stored.
    for h in range(first_head, first_head + group_out):
        constants = (b.to(tl.int64) * heads + h) * seqlen_q
        counted = (b % seeded_batch).to(tl.int64) * heads + h
        qa, qb, ga, gb = q0, q1, grad_out0, grad_out1
        ta = tq0
        tb = tq1
        if not TMA:
            qa = head_of(q0, b, h, q_stride_b, q_stride_h)
            ta = head_of(tq0, b, h, tq_stride_b, tq_stride_h)
            ga = head_of(grad_out0, b, h, grad_stride_b, grad_stride_h)
            qb = qa
            tb = ta
            gb = ga
        bias_here = head_of(bias, b, h, bias_stride_b, bias_stride_h)
        tbias_here = head_of(tbias, b, h, tbias_stride_b, tbias_stride_h)
        # Masked blocks where the band's upper bound cuts them, clean ones, masked ones where the lower bound does. Rows
        # past the end weigh nothing (load_row_constants): without a lower bound the last block is a clean one.
        for part in tl.static_range(3):
            if part == 1 or (HAS_HIGH if part == 0 else HAS_LOW):
                first = begin if part == 0 else (clean_begin if part == 1 else clean_end)
                last = clean_begin if part == 0 else (clean_end if HAS_LOW and part == 1 else end)
                dk0, dk1, dv0, dv1 = _second_dkdv_blocks(
                    dk0, dk1, dv0, dv1, k0, k1, v0, v1, tk0, tk1, tv0, tv1, qa, qb, ta, tb, ga, gb,
                    lse + constants, delta + constants, mu + constants, nu + constants, bias_here, tbias_here, key,
                    b, h, counted, first_col, first, last,
                    q_stride_m, tq_stride_m, grad_stride_m, k_stride_n, tk_stride_n, v_stride_n, tv_stride_n,
                    bias_stride_m, bias_stride_n, tbias_stride_m, tbias_stride_n,
                    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k,
                    head_dim, head_dim_v, band_low, band_high,
                    BLOCK_M, BLOCK_N, D0, D1, V0, V1, CHUNK, BIAS, TBIAS, SOFTCAP, DROPOUT, HAS_LOW, HAS_HIGH,
                    part != 1, part != 1 or not HAS_LOW, TMA, PRECISION,
                )  # fmt: skip

    dk = head_of(dk, b, ho, dk_stride_b, dk_stride_h)
    dv = head_of(dv, b, ho, dv_stride_b, dv_stride_h)
    store_tile(dk, dk0 * softmax_scale, first_col, dk_stride_n, seqlen_k, 0, head_dim, BLOCK_N, D0)
    if D1 > 0:
        store_tile(dk, dk1 * softmax_scale, first_col, dk_stride_n, seqlen_k, D0, head_dim, BLOCK_N, D1)
    store_tile(dv, dv0, first_col, dv_stride_n, seqlen_k, 0, head_dim_v, BLOCK_N, V0)
    if V1 > 0:
        store_tile(dv, dv1, first_col, dv_stride_n, seqlen_k, V0, head_dim_v, BLOCK_N, V1)


@triton.jit
def second_bias_gradient_kernel(
    q, k, v, grad_out, lse, delta, bias, seed, tq, tk, tv, tbias, mu, nu, dbias,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    grad_stride_b, grad_stride_h, grad_stride_m, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    tq_stride_b, tq_stride_h, tq_stride_m, tk_stride_b, tk_stride_h, tk_stride_n, tv_stride_b, tv_stride_h,
    tv_stride_n, tbias_stride_b, tbias_stride_h, tbias_stride_m, tbias_stride_n,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale,
    batch, heads, bias_batch, bias_heads, group_k, group_v, seeded_batch, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, TBIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, ROWS_SHARED: tl.constexpr,
    COLS_SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gbias (as dbias) of a bias that several scores share; shapes, tiles and grid as in bias_gradient_kernel."""
    row_begin, row_end, col_begin, col_end, own, own_b, own_h, b_count, h_count = shared_tile(
        batch, heads, bias_batch, bias_heads, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, ROWS_SHARED, COLS_SHARED
    )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in range(b_count * h_count):
        b = own_b + n // h_count
        h = own_h + n % h_count
        hk, hv = h // group_k, h // group_v
        q_here = head_of(q, b, h, q_stride_b, q_stride_h)
        tq_here = head_of(tq, b, h, tq_stride_b, tq_stride_h)
        g_here = head_of(grad_out, b, h, grad_stride_b, grad_stride_h)
        k_here = head_of(k, b, hk, k_stride_b, k_stride_h)
        tk_here = head_of(tk, b, hk, tk_stride_b, tk_stride_h)
        v_here = head_of(v, b, hv, v_stride_b, v_stride_h)
        tv_here = head_of(tv, b, hv, tv_stride_b, tv_stride_h)
        bias_here = head_of(bias, b, h, bias_stride_b, bias_stride_h)
        tbias_here = head_of(tbias, b, h, tbias_stride_b, tbias_stride_h)
        constants = (b.to(tl.int64) * heads + h) * seqlen_q
        key = 0
        counted = 0
        if DROPOUT:
            key = tl.load(seed + b // seeded_batch)
            counted = (b % seeded_batch).to(tl.int64) * heads + h
        for first_row in range(row_begin, row_end, BLOCK_M):
            rows = first_row + tl.arange(0, BLOCK_M)
            # Of these columns, those that some row reaches.
            begin = col_begin
            end = tl.minimum(col_end, seqlen_k)
            if HAS_LOW:
                begin = tl.maximum(begin, (first_row + band_low) // BLOCK_N * BLOCK_N)
            if HAS_HIGH:
                end = tl.minimum(end, tl.minimum(first_row + BLOCK_M, seqlen_q) + band_high)
            if begin < end:
                q0, q1 = load_factor(
                    q_here, q_here, 0, 0, first_row, q_stride_m, seqlen_q, head_dim, BLOCK_M, D0, D1, False, True, CHUNK
                )
                tq0, tq1 = load_factor(
                    tq_here, tq_here, 0, 0, first_row, tq_stride_m, seqlen_q, head_dim, BLOCK_M, D0, D1, False, True,
                    CHUNK,
                )  # fmt: skip
                g0, g1 = load_factor(
                    g_here, g_here, 0, 0, first_row, grad_stride_m, seqlen_q, head_dim_v, BLOCK_M, V0, V1, False, True,
                    CHUNK,
                )  # fmt: skip
                base, row_delta, row_mu, row_nu = load_second_constants(
                    lse + constants, delta + constants, mu + constants, nu + constants, rows, seqlen_q, True
                )
                for first_col in range(begin, end, BLOCK_N):
                    cols = first_col + tl.arange(0, BLOCK_N)
                    ka, kb = load_factor(
                        k_here, k_here, 0, 0, first_col, k_stride_n, seqlen_k, head_dim, BLOCK_N, D0, D1, False,
                        True, CHUNK,
                    )  # fmt: skip
                    ta, tb = load_factor(
                        tk_here, tk_here, 0, 0, first_col, tk_stride_n, seqlen_k, head_dim, BLOCK_N, D0, D1, False,
                        True, CHUNK,
                    )  # fmt: skip
                    qk, x = products(
                        q0, q1, tq0, tq1, ka, kb, ta, tb, first_row, q_stride_m, tq_stride_m, seqlen_q, first_col,
                        k_stride_n, tk_stride_n, seqlen_k, head_dim, BLOCK_M, BLOCK_N, D1, CHUNK, PRECISION,
                    )  # fmt: skip
                    va, vb = load_factor(
                        v_here, v_here, 0, 0, first_col, v_stride_n, seqlen_k, head_dim_v, BLOCK_N, V0, V1, False,
                        True, CHUNK,
                    )  # fmt: skip
                    wa, wb = load_factor(
                        tv_here, tv_here, 0, 0, first_col, tv_stride_n, seqlen_k, head_dim_v, BLOCK_N, V0, V1, False,
                        True, CHUNK,
                    )  # fmt: skip
                    dp, u = products(
                        g0, g1, None, None, va, vb, wa, wb, first_row, grad_stride_m, 0, seqlen_q, first_col,
                        v_stride_n, tv_stride_n, seqlen_k, head_dim_v, BLOCK_M, BLOCK_N, V1, CHUNK, PRECISION,
                    )  # fmt: skip
                    s, t = scores(
                        qk, rows[:, None], cols[None, :], bias_here, bias_stride_m, bias_stride_n, score_scale, softcap,
                        seqlen_q, seqlen_k, band_low, band_high, BIAS, SOFTCAP, HAS_LOW, HAS_HIGH, True, True,
                    )  # fmt: skip
                    p = weights(s, base[:, None], True)
                    ts, product = score_tangent(
                        x, t, rows[:, None], cols[None, :], tbias_here, tbias_stride_m, tbias_stride_n, softmax_scale,
                        seqlen_q, seqlen_k, TBIAS, SOFTCAP,
                    )  # fmt: skip
                    keep = p > 0.0
                    if DROPOUT:
                        keep = dropout_keep(key, counted, rows, first_col, dropout_threshold, BLOCK_M, BLOCK_N)
                    w, _, _, _ = second_gradient(
                        p, ts, product, dp, u, row_delta[:, None], row_mu[:, None], row_nu[:, None], t, keep,
                        dropout_scale, softcap, SOFTCAP, DROPOUT,
                    )  # fmt: skip
                    acc += w
    store_shared(dbias, acc, own, row_begin, col_begin, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, ROWS_SHARED, COLS_SHARED)
