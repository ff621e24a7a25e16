"""Forward-mode derivative: the tangents of out and lse for given tangents of q, k, v and the bias.

With the saved lse no online softmax is needed. Per block of keys:

    tS = scale (tq k^T + q tk^T) (1 - tanh^2 with a softcap) + tbias
    mu = rowsum(P tS)        tlse = mu        tout = (P tS) v + P tv - mu out

in which dropout scales and drops the P of both products, not that of mu. Five products, one accumulator.
"""

import triton
import triton.language as tl

from .forward import load_tile, store_tile
from .score import dropout_keep, load_bias, reached, scores


@triton.jit
def _tangent_blocks(
    acc0, acc1, mu, total, q0, q1, tq0, tq1, base, k, v, tk, tv, bias, tbias, seed,
    counted, first_row, begin, end,
    k_stride, v_stride, tk_stride, tv_stride, bias_stride_m, bias_stride_n, tbias_stride_m, tbias_stride_n,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, BIAS: tl.constexpr, TBIAS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_M)
    for first_col in range(begin, end, BLOCK_N):
        cols = first_col + tl.arange(0, BLOCK_N)
        tile = load_tile(k, 0, 0, first_col, k_stride, seqlen_k, 0, head_dim, BLOCK_N, D0, False, MASKED)
        tangent = load_tile(tk, 0, 0, first_col, tk_stride, seqlen_k, 0, head_dim, BLOCK_N, D0, False, MASKED)
        qk = tl.dot(q0, tl.trans(tile), input_precision=PRECISION)
        ts = tl.dot(tq0, tl.trans(tile), input_precision=PRECISION)
        ts = tl.dot(q0, tl.trans(tangent), ts, input_precision=PRECISION)
        if D1 > 0:
            tile = load_tile(k, 0, 0, first_col, k_stride, seqlen_k, D0, head_dim, BLOCK_N, D1, False, MASKED)
            tangent = load_tile(tk, 0, 0, first_col, tk_stride, seqlen_k, D0, head_dim, BLOCK_N, D1, False, MASKED)
            qk = tl.dot(q1, tl.trans(tile), qk, input_precision=PRECISION)
            ts = tl.dot(tq1, tl.trans(tile), ts, input_precision=PRECISION)
            ts = tl.dot(q1, tl.trans(tangent), ts, input_precision=PRECISION)
        s, t = scores(
            qk, rows[:, None], cols[None, :], bias, bias_stride_m, bias_stride_n, score_scale, softcap, seqlen_q,
            seqlen_k, band_low, band_high, BIAS, SOFTCAP, HAS_LOW, HAS_HIGH, MASKED,
        )  # fmt: skip
        p = tl.exp2(s - base[:, None])
        ts *= softmax_scale
        if SOFTCAP:
            ts *= 1.0 - t * t
        if TBIAS > 0:
            ts += load_bias(
                tbias, rows[:, None], cols[None, :], tbias_stride_m, tbias_stride_n, seqlen_q, seqlen_k, TBIAS
            ).to(tl.float32)
        weighted = p * ts
        mu += tl.sum(weighted, 1)
        total += tl.sum(p, 1)
        if DROPOUT:
            keep = dropout_keep(seed, counted, rows, first_col, dropout_threshold, BLOCK_M, BLOCK_N)
            p = tl.where(keep, p * dropout_scale, 0.0)
            weighted = tl.where(keep, weighted * dropout_scale, 0.0)
        tile = load_tile(v, 0, 0, first_col, v_stride, seqlen_k, 0, head_dim_v, BLOCK_N, V0, False, MASKED)
        tangent = load_tile(tv, 0, 0, first_col, tv_stride, seqlen_k, 0, head_dim_v, BLOCK_N, V0, False, MASKED)
        p = p.to(tile.dtype)
        weighted = weighted.to(tile.dtype)
        acc0 = tl.dot(weighted, tile, acc0, input_precision=PRECISION)
        acc0 = tl.dot(p, tangent, acc0, input_precision=PRECISION)
        if V1 > 0:
            tile = load_tile(v, 0, 0, first_col, v_stride, seqlen_k, V0, head_dim_v, BLOCK_N, V1, False, MASKED)
            tangent = load_tile(tv, 0, 0, first_col, tv_stride, seqlen_k, V0, head_dim_v, BLOCK_N, V1, False, MASKED)
            acc1 = tl.dot(weighted, tile, acc1, input_precision=PRECISION)
            acc1 = tl.dot(p, tangent, acc1, input_precision=PRECISION)
    return acc0, acc1, mu, total


@triton.jit
def tangent_kernel(
    q, k, v, bias, seed, tq, tk, tv, tbias, out, lse, tout, tlse,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    tq_stride_b, tq_stride_h, tq_stride_m, tk_stride_b, tk_stride_h, tk_stride_n, tv_stride_b, tv_stride_h, tv_stride_n,
    tbias_stride_b, tbias_stride_h, tbias_stride_m, tbias_stride_n,
    out_stride_b, out_stride_h, out_stride_m, tout_stride_b, tout_stride_h, tout_stride_m,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale,
    batch, heads, group_k, group_v, seeded_batch, seqlen_q, seqlen_k, head_dim, head_dim_v, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, BIAS: tl.constexpr, TBIAS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """tout (like out) and tlse (batch, heads, seqlen_q, contiguous fp32) of one block of queries of one head.

    Tangents have the shapes of what they are tangents of; one that is zero is passed as an expanded zero (strides 0 but
    the last). Grid: blocks of queries * batch * heads.
    """
    block = tl.program_id(0) // (batch * heads)
    if HAS_HIGH:
        block = (seqlen_q + BLOCK_M - 1) // BLOCK_M - 1 - block
    batch_head = tl.program_id(0) % (batch * heads)
    b, h = batch_head // heads, batch_head % heads
    first_row = block * BLOCK_M
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    hk, hv = (h // group_k).to(tl.int64), (h // group_v).to(tl.int64)
    q += b64 * q_stride_b + h64 * q_stride_h
    tq += b64 * tq_stride_b + h64 * tq_stride_h
    k += b64 * k_stride_b + hk * k_stride_h
    tk += b64 * tk_stride_b + hk * tk_stride_h
    v += b64 * v_stride_b + hv * v_stride_h
    tv += b64 * tv_stride_b + hv * tv_stride_h
    if BIAS > 0:
        bias += b64 * bias_stride_b + h64 * bias_stride_h
    if TBIAS > 0:
        tbias += b64 * tbias_stride_b + h64 * tbias_stride_h
    key = 0
    counted = 0
    if DROPOUT:
        key = tl.load(seed + b // seeded_batch)
        counted = (b % seeded_batch).to(tl.int64) * heads + h

    q0 = load_tile(q, 0, 0, first_row, q_stride_m, seqlen_q, 0, head_dim, BLOCK_M, D0, False, True)
    tq0 = load_tile(tq, 0, 0, first_row, tq_stride_m, seqlen_q, 0, head_dim, BLOCK_M, D0, False, True)
    q1, tq1 = q0, tq0
    if D1 > 0:
        q1 = load_tile(q, 0, 0, first_row, q_stride_m, seqlen_q, D0, head_dim, BLOCK_M, D1, False, True)
        tq1 = load_tile(tq, 0, 0, first_row, tq_stride_m, seqlen_q, D0, head_dim, BLOCK_M, D1, False, True)
    rows = first_row + tl.arange(0, BLOCK_M)
    constants = batch_head.to(tl.int64) * seqlen_q + rows
    base = tl.load(lse + constants, mask=rows < seqlen_q, other=float("-inf")) * 1.4426950408889634
    base = tl.where(base == float("-inf"), float("inf"), base)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1 if V1 > 0 else 16], tl.float32)
    mu = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    begin, clean_begin, clean_end, end = reached(
        first_row, seqlen_q, seqlen_k, band_low, band_high, BLOCK_M, BLOCK_N, HAS_LOW, HAS_HIGH
    )
    if HAS_LOW:
        acc0, acc1, mu, total = _tangent_blocks(
            acc0, acc1, mu, total, q0, q1, tq0, tq1, base, k, v, tk, tv, bias, tbias, key,
            counted, first_row, begin, clean_begin, k_stride_n, v_stride_n, tk_stride_n, tv_stride_n,
            bias_stride_m, bias_stride_n, tbias_stride_m, tbias_stride_n, softmax_scale, score_scale, softcap,
            dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim, head_dim_v, band_low, band_high,
            BLOCK_M, BLOCK_N, D0, D1, V0, V1, BIAS, TBIAS, SOFTCAP, DROPOUT, HAS_LOW, HAS_HIGH, True, PRECISION,
        )  # fmt: skip
    acc0, acc1, mu, total = _tangent_blocks(
        acc0, acc1, mu, total, q0, q1, tq0, tq1, base, k, v, tk, tv, bias, tbias, key,
        counted, first_row, clean_begin, clean_end, k_stride_n, v_stride_n, tk_stride_n, tv_stride_n,
        bias_stride_m, bias_stride_n, tbias_stride_m, tbias_stride_n, softmax_scale, score_scale, softcap,
        dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim, head_dim_v, band_low, band_high,
        BLOCK_M, BLOCK_N, D0, D1, V0, V1, BIAS, TBIAS, SOFTCAP, DROPOUT, HAS_LOW, HAS_HIGH, False, PRECISION,
    )  # fmt: skip
    acc0, acc1, mu, total = _tangent_blocks(
        acc0, acc1, mu, total, q0, q1, tq0, tq1, base, k, v, tk, tv, bias, tbias, key,
        counted, first_row, clean_end, end, k_stride_n, v_stride_n, tk_stride_n, tv_stride_n,
        bias_stride_m, bias_stride_n, tbias_stride_m, tbias_stride_n, softmax_scale, score_scale, softcap,
        dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim, head_dim_v, band_low, band_high,
        BLOCK_M, BLOCK_N, D0, D1, V0, V1, BIAS, TBIAS, SOFTCAP, DROPOUT, HAS_LOW, HAS_HIGH, True, PRECISION,
    )  # fmt: skip

    # The weights add up to 1 but for the rounding of lse, which is thus taken out again.
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    mu *= factor
    tl.store(tlse + constants, mu, mask=rows < seqlen_q)
    out += b64 * out_stride_b + h64 * out_stride_h
    tout += b64 * tout_stride_b + h64 * tout_stride_h
    o = load_tile(out, 0, 0, first_row, out_stride_m, seqlen_q, 0, head_dim_v, BLOCK_M, V0, False, True)
    acc0 = acc0 * factor[:, None] - mu[:, None] * o.to(tl.float32)
    store_tile(tout, acc0, first_row, tout_stride_m, seqlen_q, 0, head_dim_v, BLOCK_M, V0)
    if V1 > 0:
        o = load_tile(out, 0, 0, first_row, out_stride_m, seqlen_q, V0, head_dim_v, BLOCK_M, V1, False, True)
        acc1 = acc1 * factor[:, None] - mu[:, None] * o.to(tl.float32)
        store_tile(tout, acc1, first_row, tout_stride_m, seqlen_q, V0, head_dim_v, BLOCK_M, V1)
