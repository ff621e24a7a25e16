"""The backward pass, without atomics and so the same in every run: delta, then dK and dV by blocks of keys, and dQ by
blocks of queries with the gradient of a bias of full shape; both make the weights again from the saved lse.

    P = exp(S - lse)    dV = P^T dO    dS = P (dO V^T - delta)    dQ = scale dS K    dK = scale dS^T Q    dbias = dS

The two loops over the scores cost seven products where one loop with atomic additions to dQ would cost five.
"""

import triton
import triton.language as tl

from .forward import load_tile, product, store_tile
from .score import dropout_keep, load_row_constants, program_rows, reached, score_gradient, scores, weights


@triton.jit
def delta_kernel(
    grad_out, out, grad_lse, delta,
    grad_stride_b, grad_stride_h, grad_stride_m, out_stride_b, out_stride_h, out_stride_m,
    heads, seqlen_q, head_dim_v: tl.constexpr, BLOCK_M: tl.constexpr, DIMS: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(grad_out * out) - grad_lse, (batch, heads, seqlen_q) contiguous in fp32 like grad_lse.

    Grid: (blocks of queries * batch * heads).
    """
    blocks = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    first_row = tl.program_id(0) % blocks * BLOCK_M
    batch_head = tl.program_id(0) // blocks
    b, h = (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)
    grad_out += b * grad_stride_b + h * grad_stride_h
    out += b * out_stride_b + h * out_stride_h
    # Lanes add up sums, not products: fused with the first addition between lanes, a product gives each of them another
    # last bit, and the lanes of a row store what should be one value.
    products = tl.zeros([BLOCK_M, DIMS], tl.float32)
    for dim in range(0, head_dim_v, DIMS):
        g = load_tile(grad_out, 0, 0, first_row, grad_stride_m, seqlen_q, dim, head_dim_v, BLOCK_M, DIMS, False, True)
        o = load_tile(out, 0, 0, first_row, out_stride_m, seqlen_q, dim, head_dim_v, BLOCK_M, DIMS, False, True)
        products += g.to(tl.float32) * o.to(tl.float32)
    total = tl.sum(products, 1)
    rows = first_row + tl.arange(0, BLOCK_M)
    at = batch_head.to(tl.int64) * seqlen_q + rows
    if HAS_GRAD_LSE:
        total -= tl.load(grad_lse + at, mask=rows < seqlen_q, other=0.0)
    tl.store(delta + at, total, mask=rows < seqlen_q)


@triton.jit
def _dkdv_blocks(
    dk0, dk1, dv0, dv1, k0, k1, v0, v1, q, q1, grad_out, grad_out1, lse, delta, bias, seed,
    b, h, counted, first_col, begin, end,
    q_stride_m, k_stride_n, v_stride_n, grad_stride_m, bias_stride_m, bias_stride_n,
    score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums over the queries [begin, end) of one head. Tiles are transposed, [keys, queries], so that weights and
    score gradients are the left operands of their products as they stand."""
    cols = first_col + tl.arange(0, BLOCK_N)
    for first_row in range(begin, end, BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)
        if CHUNK > 0:
            qk = product(
                k0, first_col, k_stride_n, seqlen_k, q, first_row, q_stride_m, seqlen_q, head_dim, BLOCK_N, BLOCK_M,
                CHUNK, PRECISION,
            )  # fmt: skip
        else:
            qa = load_tile(q, b, h, first_row, q_stride_m, seqlen_q, 0, head_dim, BLOCK_M, D0, TMA, TAIL)
            qk = tl.dot(k0, tl.trans(qa), input_precision=PRECISION)
            if D1 > 0:
                qb = load_tile(q1, b, h, first_row, q_stride_m, seqlen_q, D0, head_dim, BLOCK_M, D1, TMA, TAIL)
                qk = tl.dot(k1, tl.trans(qb), qk, input_precision=PRECISION)
        base, row_delta = load_row_constants(lse, delta, rows, seqlen_q, BIAS % 2 == 1)
        s, t = scores(
            qk, rows[None, :], cols[:, None], bias, bias_stride_m, bias_stride_n, score_scale, softcap, seqlen_q,
            seqlen_k, band_low, band_high, BIAS, SOFTCAP, HAS_LOW, HAS_HIGH, MASKED, BIAS % 2 == 1,
        )  # fmt: skip
        p = weights(s, base[None, :], BIAS % 2 == 1)
        keep = p > 0.0
        kept = p
        if DROPOUT:
            keep = tl.trans(dropout_keep(seed, counted, rows, first_col, dropout_threshold, BLOCK_M, BLOCK_N))
            kept = tl.where(keep, p * dropout_scale, 0.0)
        ga = load_tile(grad_out, b, h, first_row, grad_stride_m, seqlen_q, 0, head_dim_v, BLOCK_M, V0, TMA, TAIL)
        dv0 = tl.dot(kept.to(ga.dtype), ga, dv0, input_precision=PRECISION)
        if CHUNK == 0:
            dp = tl.dot(v0, tl.trans(ga), input_precision=PRECISION)
        if V1 > 0:
            gb = load_tile(grad_out1, b, h, first_row, grad_stride_m, seqlen_q, V0, head_dim_v, BLOCK_M, V1, TMA, TAIL)
            dv1 = tl.dot(kept.to(gb.dtype), gb, dv1, input_precision=PRECISION)
            if CHUNK == 0:
                dp = tl.dot(v1, tl.trans(gb), dp, input_precision=PRECISION)
        if CHUNK > 0:
            dp = product(
                v0, first_col, v_stride_n, seqlen_k, grad_out, first_row, grad_stride_m, seqlen_q, head_dim_v, BLOCK_N,
                BLOCK_M, CHUNK, PRECISION,
            )  # fmt: skip
        _, ds = score_gradient(p, dp, row_delta[None, :], t, keep, dropout_scale, SOFTCAP, DROPOUT)
        if CHUNK > 0:
            qa = load_tile(q, b, h, first_row, q_stride_m, seqlen_q, 0, head_dim, BLOCK_M, D0, TMA, TAIL)
            if D1 > 0:
                qb = load_tile(q1, b, h, first_row, q_stride_m, seqlen_q, D0, head_dim, BLOCK_M, D1, TMA, TAIL)
        ds = ds.to(qa.dtype)
        dk0 = tl.dot(ds, qa, dk0, input_precision=PRECISION)
        if D1 > 0:
            dk1 = tl.dot(ds, qb, dk1, input_precision=PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit
def dkdv_kernel(
    q0, q1, k, v, grad_out0, grad_out1, lse, delta, bias, seed, dk, dv,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    grad_stride_b, grad_stride_h, grad_stride_m, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    dk_stride_b, dk_stride_h, dk_stride_n, dv_stride_b, dv_stride_h, dv_stride_n,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale,
    batch, heads, heads_out, group_k, group_v, group_out, seeded_batch, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of BLOCK_N keys of one head of `heads_out`, summed over the group_out query heads that
    share it (heads_out * group_out = heads; group_out divides group_k and group_v).

    q0, q1 and grad_out0, grad_out1: pointers, or descriptors if TMA. Grid: blocks of keys * batch * heads_out.
    """
    # Longest first, over all heads: with a causal band the first keys are reached by the most queries.
    first_col = tl.program_id(0) // (batch * heads_out) * BLOCK_N
    batch_head = tl.program_id(0) % (batch * heads_out)
    b, ho = batch_head // heads_out, batch_head % heads_out
    b64 = b.to(tl.int64)
    first_head = ho * group_out
    hk, hv = (first_head // group_k).to(tl.int64), (first_head // group_v).to(tl.int64)
    k += b64 * k_stride_b + hk * k_stride_h
    v += b64 * v_stride_b + hv * v_stride_h
    k0, v0 = k, v
    if CHUNK == 0:
        k0 = load_tile(k, 0, 0, first_col, k_stride_n, seqlen_k, 0, head_dim, BLOCK_N, D0, False, True)
        v0 = load_tile(v, 0, 0, first_col, v_stride_n, seqlen_k, 0, head_dim_v, BLOCK_N, V0, False, True)
    k1, v1 = k0, v0
    if D1 > 0 and CHUNK == 0:
        k1 = load_tile(k, 0, 0, first_col, k_stride_n, seqlen_k, D0, head_dim, BLOCK_N, D1, False, True)
    if V1 > 0 and CHUNK == 0:
        v1 = load_tile(v, 0, 0, first_col, v_stride_n, seqlen_k, V0, head_dim_v, BLOCK_N, V1, False, True)
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
        h64 = h.to(tl.int64)
        row_constants = (b64 * heads + h64) * seqlen_q
        counted = (b % seeded_batch).to(tl.int64) * heads + h64
        q, qr, g, gr, bias_here = q0, q1, grad_out0, grad_out1, bias
        if not TMA:
            q = q0 + b64 * q_stride_b + h64 * q_stride_h
            qr = q
            g = grad_out0 + b64 * grad_stride_b + h64 * grad_stride_h
            gr = g
        if BIAS > 0:
            bias_here = bias + b64 * bias_stride_b + h64 * bias_stride_h
        # Masked blocks (if there is an upper bound), clean ones, masked ones again (if there is a lower one). Rows past
        # the end weigh nothing (load_row_constants): without a lower bound the last block is a clean one.
        for part in tl.static_range(3):
            if (HAS_HIGH or part > 0) and (HAS_LOW or part < 2):
                first = begin if part == 0 else (clean_begin if part == 1 else clean_end)
                last = clean_begin if part == 0 else (clean_end if HAS_LOW and part == 1 else end)
                dk0, dk1, dv0, dv1 = _dkdv_blocks(
                    dk0, dk1, dv0, dv1, k0, k1, v0, v1, q, qr, g, gr, lse + row_constants, delta + row_constants,
                    bias_here, key, b, h, counted, first_col, first, last,
                    q_stride_m, k_stride_n, v_stride_n, grad_stride_m, bias_stride_m, bias_stride_n,
                    score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim, head_dim_v,
                    band_low, band_high,
                    BLOCK_M, BLOCK_N, D0, D1, V0, V1, CHUNK, BIAS, SOFTCAP, DROPOUT, HAS_LOW, HAS_HIGH, part != 1,
                    part != 1 or not HAS_LOW, TMA, PRECISION,
                )  # fmt: skip

    dk += b64 * dk_stride_b + ho.to(tl.int64) * dk_stride_h
    dv += b64 * dv_stride_b + ho.to(tl.int64) * dv_stride_h
    store_tile(dk, dk0 * softmax_scale, first_col, dk_stride_n, seqlen_k, 0, head_dim, BLOCK_N, D0)
    if D1 > 0:
        store_tile(dk, dk1 * softmax_scale, first_col, dk_stride_n, seqlen_k, D0, head_dim, BLOCK_N, D1)
    store_tile(dv, dv0, first_col, dv_stride_n, seqlen_k, 0, head_dim_v, BLOCK_N, V0)
    if V1 > 0:
        store_tile(dv, dv1, first_col, dv_stride_n, seqlen_k, V0, head_dim_v, BLOCK_N, V1)


@triton.jit
def _dq_blocks(
    dq0, dq1, q0, q1, grad_out0, grad_out1, base, row_delta, k, k1, v, v1, bias, dbias, seed,
    b, hk, hv, counted, first_row, begin, end,
    q_stride_m, k_stride_n, v_stride_n, grad_stride_m, bias_stride_m, bias_stride_n, dbias_stride_m,
    score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr, DBIAS: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum over the keys [begin, end); with DBIAS also stores the score gradients."""
    rows = first_row + tl.arange(0, BLOCK_M)
    for first_col in range(begin, end, BLOCK_N):
        cols = first_col + tl.arange(0, BLOCK_N)
        if CHUNK > 0:
            qk = product(
                q0, first_row, q_stride_m, seqlen_q, k, first_col, k_stride_n, seqlen_k, head_dim, BLOCK_M, BLOCK_N,
                CHUNK, PRECISION,
            )  # fmt: skip
        else:
            ka = load_tile(k, b, hk, first_col, k_stride_n, seqlen_k, 0, head_dim, BLOCK_N, D0, TMA, MASKED)
            qk = tl.dot(q0, tl.trans(ka), input_precision=PRECISION)
            if D1 > 0:
                kb = load_tile(k1, b, hk, first_col, k_stride_n, seqlen_k, D0, head_dim, BLOCK_N, D1, TMA, MASKED)
                qk = tl.dot(q1, tl.trans(kb), qk, input_precision=PRECISION)
        s, t = scores(
            qk, rows[:, None], cols[None, :], bias, bias_stride_m, bias_stride_n, score_scale, softcap, seqlen_q,
            seqlen_k, band_low, band_high, BIAS, SOFTCAP, HAS_LOW, HAS_HIGH, MASKED, BIAS % 2 == 1,
        )  # fmt: skip
        p = weights(s, base[:, None], BIAS % 2 == 1)
        if CHUNK > 0:
            dp = product(
                grad_out0, first_row, grad_stride_m, seqlen_q, v, first_col, v_stride_n, seqlen_k, head_dim_v, BLOCK_M,
                BLOCK_N, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            va = load_tile(v, b, hv, first_col, v_stride_n, seqlen_k, 0, head_dim_v, BLOCK_N, V0, TMA, MASKED)
            dp = tl.dot(grad_out0, tl.trans(va), input_precision=PRECISION)
            if V1 > 0:
                vb = load_tile(v1, b, hv, first_col, v_stride_n, seqlen_k, V0, head_dim_v, BLOCK_N, V1, TMA, MASKED)
                dp = tl.dot(grad_out1, tl.trans(vb), dp, input_precision=PRECISION)
        keep = p > 0.0
        if DROPOUT:
            keep = dropout_keep(seed, counted, rows, first_col, dropout_threshold, BLOCK_M, BLOCK_N)
        ds_bias, ds = score_gradient(p, dp, row_delta[:, None], t, keep, dropout_scale, SOFTCAP, DROPOUT)
        if DBIAS:
            at = rows[:, None].to(tl.int64) * dbias_stride_m + cols[None, :]
            inside = (rows[:, None] < seqlen_q) & (cols[None, :] < seqlen_k)
            tl.store(dbias + at, ds_bias.to(dbias.dtype.element_ty), mask=inside)
        if CHUNK > 0:
            ka = load_tile(k, b, hk, first_col, k_stride_n, seqlen_k, 0, head_dim, BLOCK_N, D0, TMA, MASKED)
            if D1 > 0:
                kb = load_tile(k1, b, hk, first_col, k_stride_n, seqlen_k, D0, head_dim, BLOCK_N, D1, TMA, MASKED)
        ds = ds.to(ka.dtype)
        dq0 = tl.dot(ds, ka, dq0, input_precision=PRECISION)
        if D1 > 0:
            dq1 = tl.dot(ds, kb, dq1, input_precision=PRECISION)
    return dq0, dq1


@triton.jit
def dq_kernel(
    q, k0, k1, v0, v1, grad_out, lse, delta, bias, seed, dq, dbias,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    grad_stride_b, grad_stride_h, grad_stride_m, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    dq_stride_b, dq_stride_h, dq_stride_m, dbias_stride_b, dbias_stride_h, dbias_stride_m,
    softmax_scale, score_scale, softcap, dropout_threshold, dropout_scale,
    batch, heads, group_k, group_v, seeded_batch, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, DBIAS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one block of BLOCK_M queries of one head. With DBIAS (a bias with an entry per score) also its gradient:
    every entry within the band is stored; the caller zeroes the rest.

    Pointers and descriptors as in forward_kernel. Grid: blocks of queries * batch * heads.
    """
    first_row, batch_head, b, h, key, counted = program_rows(
        seed, batch, heads, seeded_batch, seqlen_q, BLOCK_M, HAS_HIGH, DROPOUT
    )
    hk, hv = h // group_k, h // group_v
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    q += b64 * q_stride_b + h64 * q_stride_h
    grad_out += b64 * grad_stride_b + h64 * grad_stride_h
    if not TMA:
        k0 += b64 * k_stride_b + hk.to(tl.int64) * k_stride_h
        v0 += b64 * v_stride_b + hv.to(tl.int64) * v_stride_h
        k1 = k0
        v1 = v0
    if BIAS > 0:
        bias += b64 * bias_stride_b + h64 * bias_stride_h
    if DBIAS:
        dbias += b64 * dbias_stride_b + h64 * dbias_stride_h
    q0, g0 = q, grad_out
    if CHUNK == 0:
        q0 = load_tile(q, 0, 0, first_row, q_stride_m, seqlen_q, 0, head_dim, BLOCK_M, D0, False, True)
        g0 = load_tile(grad_out, 0, 0, first_row, grad_stride_m, seqlen_q, 0, head_dim_v, BLOCK_M, V0, False, True)
    q1, g1 = q0, g0
    if D1 > 0 and CHUNK == 0:
        q1 = load_tile(q, 0, 0, first_row, q_stride_m, seqlen_q, D0, head_dim, BLOCK_M, D1, False, True)
    if V1 > 0 and CHUNK == 0:
        g1 = load_tile(grad_out, 0, 0, first_row, grad_stride_m, seqlen_q, V0, head_dim_v, BLOCK_M, V1, False, True)
    row_constants = batch_head.to(tl.int64) * seqlen_q
    rows = first_row + tl.arange(0, BLOCK_M)
    base, row_delta = load_row_constants(
        lse + row_constants, delta + row_constants, rows, seqlen_q, BIAS % 2 == 1
    )  # fmt: skip
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
            dq0, dq1 = _dq_blocks(
                dq0, dq1, q0, q1, g0, g1, base, row_delta, k0, k1, v0, v1, bias, dbias, key,
                b, hk, hv, counted, first_row, first, last,
                q_stride_m, k_stride_n, v_stride_n, grad_stride_m, bias_stride_m, bias_stride_n, dbias_stride_m,
                score_scale, softcap, dropout_threshold, dropout_scale, seqlen_q, seqlen_k, head_dim, head_dim_v,
                band_low, band_high,
                BLOCK_M, BLOCK_N, D0, D1, V0, V1, CHUNK, BIAS, SOFTCAP, DROPOUT, HAS_LOW, HAS_HIGH, part != 1, DBIAS,
                TMA, PRECISION,
            )  # fmt: skip
    dq += b64 * dq_stride_b + h64 * dq_stride_h
    store_tile(dq, dq0 * softmax_scale, first_row, dq_stride_m, seqlen_q, 0, head_dim, BLOCK_M, D0)
    if D1 > 0:
        store_tile(dq, dq1 * softmax_scale, first_row, dq_stride_m, seqlen_q, D0, head_dim, BLOCK_M, D1)
