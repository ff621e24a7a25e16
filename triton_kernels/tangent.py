"""Forward-mode derivative: the tangents of out and lse for given tangents of q, k, v and the bias.

With the saved lse no online softmax is needed. Per block of keys:

    T = scale (tq k^T + q tk^T) (1 - tanh^2 with a softcap) + tbias
    mu = rowsum(P T)        tlse = mu        tout = (P T) v + P tv - mu out

in which dropout drops and scales the P of both products, not that of mu. Five products, one accumulator. (The
formulas are those of a derivative of the softmax; that one pass with the saved lse is enough is its use here.)
"""

import triton
import triton.language as tl

from .forward import load_tile, store_tile
from .score import dropout_keep, load_row_base, program_rows, reached, score_tangent, scores, weights


@triton.jit
def load_pair(
    source0, source1, b, h, first, stride, length, dims, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    TMA: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """`load_tile` of the first D0 columns and of the D1 after them; None of a tensor that isn't given."""
    if source0 is None:
        return None, None
    else:
        x0 = load_tile(source0, b, h, first, stride, length, 0, dims, ROWS, D0, TMA, TAIL)
        x1 = x0
        if D1 > 0:
            x1 = load_tile(source1, b, h, first, stride, length, D0, dims, ROWS, D1, TMA, TAIL)
        return x0, x1


@triton.jit
def load_factor(
    source0, source1, b, h, first, stride, length, dims, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    TMA: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What `products` takes of some rows: `load_pair`, or with a CHUNK the pointers themselves."""
    if CHUNK == 0:
        return load_pair(source0, source1, b, h, first, stride, length, dims, ROWS, D0, D1, TMA, TAIL)
    else:
        return source0, source1


@triton.jit
def head_of(pointer, b, h, stride_b, stride_h):
    """The pointer to a head's first row; None of a tensor that isn't given."""
    if pointer is None:
        return None
    else:
        return pointer + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h


@triton.jit
def times_transposed(acc, a0, a1, b0, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b^T, of which each may be None for zero."""
    if (a0 is None) or (b0 is None):
        return acc
    else:
        acc = tl.dot(a0, tl.trans(b0), acc, input_precision=PRECISION)
        if D1 > 0:
            acc = tl.dot(a1, tl.trans(b1), acc, input_precision=PRECISION)
        return acc


@triton.jit
def products(
    a0, a1, ta0, ta1, b0, b1, tb0, tb1, a_first, a_stride, ta_stride, a_length, b_first, b_stride, tb_stride, b_length,
    dims, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, D1: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a b^T and its tangent, ta b^T + a tb^T. ta and tb may be None for zero, and so is the tangent if both are.

    Of tiles in two parts; with a CHUNK, of pointers to heads, so many columns at a time.
    """
    if CHUNK == 0:
        total = times_transposed(None, a0, a1, b0, b1, D1, PRECISION)
        tangent = times_transposed(None, ta0, ta1, b0, b1, D1, PRECISION)
        tangent = times_transposed(tangent, a0, a1, tb0, tb1, D1, PRECISION)
    else:
        total = tl.zeros([A_ROWS, B_ROWS], tl.float32)
        tangent = tl.zeros([A_ROWS, B_ROWS], tl.float32)
        for dim in range(0, dims, CHUNK):
            a = load_tile(a0, 0, 0, a_first, a_stride, a_length, dim, dims, A_ROWS, CHUNK, False, True)
            b = load_tile(b0, 0, 0, b_first, b_stride, b_length, dim, dims, B_ROWS, CHUNK, False, True)
            total = times_transposed(total, a, a, b, b, 0, PRECISION)
            if ta0 is not None:
                ta = load_tile(ta0, 0, 0, a_first, ta_stride, a_length, dim, dims, A_ROWS, CHUNK, False, True)
                tangent = times_transposed(tangent, ta, ta, b, b, 0, PRECISION)
            if tb0 is not None:
                tb = load_tile(tb0, 0, 0, b_first, tb_stride, b_length, dim, dims, B_ROWS, CHUNK, False, True)
                tangent = times_transposed(tangent, a, a, tb, tb, 0, PRECISION)
    if (ta0 is None) and (tb0 is None):
        return total, None
    else:
        return total, tangent


@triton.jit
def add_product(
    acc0, acc1, a, b0, b1, first, stride, length, dims, ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + a b in two parts, with a in b's dtype. b is what `load_factor` gave, loaded here part by part if that is a
    pointer; None is zero."""
    if b0 is None:
        return acc0, acc1
    else:
        if CHUNK > 0:
            b0 = load_tile(b0, 0, 0, first, stride, length, 0, dims, ROWS, D0, False, True)
        acc0 = tl.dot(a.to(b0.dtype), b0, acc0, input_precision=PRECISION)
        if D1 > 0:
            if CHUNK > 0:
                b1 = load_tile(b1, 0, 0, first, stride, length, D0, dims, ROWS, D1, False, True)
            acc1 = tl.dot(a.to(b1.dtype), b1, acc1, input_precision=PRECISION)
        return acc0, acc1


@triton.jit
def _tangent_blocks(
    acc0, acc1, mu, total, q0, q1, tq0, tq1, base,
    k0, k1, v0, v1, tk0, tk1, tv0, tv1, bias, tbias, key,
    b, hk, hv, counted, first_row, begin, end,
    q_stride, tq_stride, k_stride, v_stride, tk_stride, tv_stride,
    bias_stride_m, bias_stride_n, tbias_stride_m, tbias_stride_n,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, TBIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums over the keys [begin, end)."""
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
        ts, _ = score_tangent(
            x, t, rows[:, None], cols[None, :], tbias, tbias_stride_m, tbias_stride_n, softmax_scale, seqlen_q,
            seqlen_k, TBIAS, SOFTCAP,
        )  # fmt: skip
        weighted = p * ts
        mu += tl.sum(weighted, 1)
        total += tl.sum(p, 1)
        if DROPOUT:
            keep = dropout_keep(key, counted, rows, first_col, dropout_threshold, BLOCK_M, BLOCK_N)
            p = tl.where(keep, p * dropout_scale, 0.0)
            weighted = tl.where(keep, weighted * dropout_scale, 0.0)
        va, vb = load_factor(
            v0, v1, b, hv, first_col, v_stride, seqlen_k, head_dim_v, BLOCK_N, V0, V1, TMA, MASKED, CHUNK
        )
        wa, wb = load_factor(
            tv0, tv1, b, hv, first_col, tv_stride, seqlen_k, head_dim_v, BLOCK_N, V0, V1, TMA, MASKED, CHUNK
        )
        acc0, acc1 = add_product(
            acc0, acc1, weighted, va, vb, first_col, v_stride, seqlen_k, head_dim_v, BLOCK_N, V0, V1, CHUNK, PRECISION
        )
        acc0, acc1 = add_product(
            acc0, acc1, p, wa, wb, first_col, tv_stride, seqlen_k, head_dim_v, BLOCK_N, V0, V1, CHUNK, PRECISION
        )
    return acc0, acc1, mu, total


@triton.jit
def _finish(
    acc, product, factor, mu, out, grad_out, tout, first_row, out_stride, grad_stride, tout_stride, seqlen_q, first_dim,
    dims, ROWS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Stores DIMS columns of tout; gives `product` and, where grad_out is given, the row sums of their products."""
    o = load_tile(out, 0, 0, first_row, out_stride, seqlen_q, first_dim, dims, ROWS, DIMS, False, True)
    acc = acc * factor[:, None] - mu[:, None] * o.to(tl.float32)
    store_tile(tout, acc, first_row, tout_stride, seqlen_q, first_dim, dims, ROWS, DIMS)
    if grad_out is not None:
        g = load_tile(grad_out, 0, 0, first_row, grad_stride, seqlen_q, first_dim, dims, ROWS, DIMS, False, True)
        product += tl.sum(g.to(tl.float32) * acc, 1)
    return product


@triton.jit
def tangent_kernel(
    q, k0, k1, v0, v1, bias, seed, tq, tk0, tk1, tv0, tv1, tbias, grad_out, out, lse, tout, tlse, nu,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    tq_stride_b, tq_stride_h, tq_stride_m, tk_stride_b, tk_stride_h, tk_stride_n, tv_stride_b, tv_stride_h,
    tv_stride_n, tbias_stride_b, tbias_stride_h, tbias_stride_m, tbias_stride_n,
    grad_stride_b, grad_stride_h, grad_stride_m, out_stride_b, out_stride_h, out_stride_m,
    tout_stride_b, tout_stride_h, tout_stride_m,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale,
    batch, heads, group_k, group_v, seeded_batch, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, TBIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """tout (like out) and tlse (batch, heads, seqlen_q, contiguous fp32) of one block of queries of one head; with
    grad_out also nu = rowsum(grad_out * tout), like tlse.

    tq, tk, tv have the shapes of what they are tangents of, tbias broadcasts to the scores; each may be None for zero.
    Pointers and descriptors as in forward_kernel. Grid: blocks of queries * batch * heads.
    """
    first_row, batch_head, b, h, key, counted = program_rows(
        seed, batch, heads, seeded_batch, seqlen_q, BLOCK_M, HAS_HIGH, DROPOUT
    )
    hk, hv = h // group_k, h // group_v
    q = head_of(q, b, h, q_stride_b, q_stride_h)
    tq = head_of(tq, b, h, tq_stride_b, tq_stride_h)
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

    q0, q1 = load_factor(q, q, 0, 0, first_row, q_stride_m, seqlen_q, head_dim, BLOCK_M, D0, D1, False, True, CHUNK)
    tq0, tq1 = load_factor(
        tq, tq, 0, 0, first_row, tq_stride_m, seqlen_q, head_dim, BLOCK_M, D0, D1, False, True, CHUNK
    )
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < seqlen_q
    at = batch_head.to(tl.int64) * seqlen_q + rows
    base = load_row_base(lse + batch_head.to(tl.int64) * seqlen_q, rows, seqlen_q, BIAS % 2 == 1)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1 if V1 > 0 else 16], tl.float32)
    mu = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    begin, clean_begin, clean_end, end = reached(
        first_row, seqlen_q, seqlen_k, band_low, band_high, BLOCK_M, BLOCK_N, HAS_LOW, HAS_HIGH
    )
    # Masked blocks (if there is a lower bound), clean ones, masked ones again.
    for part in tl.static_range(3):
        if HAS_LOW or part > 0:
            first = begin if part == 0 else (clean_begin if part == 1 else clean_end)
            last = clean_begin if part == 0 else (clean_end if part == 1 else end)
            acc0, acc1, mu, total = _tangent_blocks(
                acc0, acc1, mu, total, q0, q1, tq0, tq1, base,
                k0, k1, v0, v1, tk0, tk1, tv0, tv1, bias, tbias, key,
                b, hk, hv, counted, first_row, first, last,
                q_stride_m, tq_stride_m, k_stride_n, v_stride_n, tk_stride_n, tv_stride_n,
                bias_stride_m, bias_stride_n, tbias_stride_m, tbias_stride_n,
                softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim,
                head_dim_v, band_low, band_high,
                BLOCK_M, BLOCK_N, D0, D1, V0, V1, CHUNK, BIAS, TBIAS, SOFTCAP, DROPOUT, HAS_LOW, HAS_HIGH, part != 1,
                TMA, PRECISION,
            )  # fmt: skip

    # The weights add up to 1 but for the rounding of lse, which is thus taken out again.
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    mu *= factor
    tl.store(tlse + at, mu, mask=inside)
    out = head_of(out, b, h, out_stride_b, out_stride_h)
    tout = head_of(tout, b, h, tout_stride_b, tout_stride_h)
    grad_out = head_of(grad_out, b, h, grad_stride_b, grad_stride_h)
    product = _finish(
        acc0, tl.zeros([BLOCK_M], tl.float32), factor, mu, out, grad_out, tout, first_row, out_stride_m, grad_stride_m,
        tout_stride_m, seqlen_q, 0, head_dim_v, BLOCK_M, V0,
    )  # fmt: skip
    if V1 > 0:
        product = _finish(
            acc1, product, factor, mu, out, grad_out, tout, first_row, out_stride_m, grad_stride_m, tout_stride_m,
            seqlen_q, V0, head_dim_v, BLOCK_M, V1,
        )  # fmt: skip
    if grad_out is not None:
        tl.store(nu + at, product, mask=inside)
