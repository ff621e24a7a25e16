"""The gradient of a bias that several scores share: broadcast over batch elements, heads, queries or keys.

A program owns one tile of the gradient and adds up the score gradients of everything that shares it, which it makes
again from q, k, v, grad_out and lse: no atomics, and memory for the gradient alone. (The gradient of a bias with an
entry per score falls off dq_kernel.)
"""

import triton
import triton.language as tl

from .forward import load_tile, product
from .score import dropout_keep, load_row_constants, score_gradient, scores, weights


@triton.jit
def shared_tile(
    batch, heads, bias_batch, bias_heads, seqlen_q, seqlen_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS_SHARED: tl.constexpr, COLS_SHARED: tl.constexpr,
):  # fmt: skip
    """The scores that this program adds up, [row_begin, row_end) x [col_begin, col_end) of b_count batch elements and
    h_count heads from own_b and own_h on; `own` counts the gradient's batch elements and heads."""
    blocks_m = 1
    blocks_n = 1
    if not ROWS_SHARED:
        blocks_m = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    if not COLS_SHARED:
        blocks_n = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    row_begin = pid // blocks_n % blocks_m * BLOCK_M
    col_begin = pid % blocks_n * BLOCK_N
    own = pid // (blocks_n * blocks_m)
    own_b, own_h = own // bias_heads, own % bias_heads
    row_end = row_begin + BLOCK_M
    col_end = col_begin + BLOCK_N
    if ROWS_SHARED:
        row_end = seqlen_q
    if COLS_SHARED:
        col_end = seqlen_k
    b_count = 1
    h_count = 1
    if bias_batch == 1:
        b_count = batch
    if bias_heads == 1:
        h_count = heads
    return row_begin, row_end, col_begin, col_end, own, own_b, own_h, b_count, h_count


@triton.jit
def store_shared(
    dbias, acc, own, row_begin, col_begin, seqlen_q, seqlen_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS_SHARED: tl.constexpr, COLS_SHARED: tl.constexpr,
):  # fmt: skip
    """Stores the sums of a `shared_tile`."""
    rows = row_begin + tl.arange(0, BLOCK_M)
    cols = col_begin + tl.arange(0, BLOCK_N)
    dtype = dbias.dtype.element_ty
    if ROWS_SHARED:
        if COLS_SHARED:
            tl.store(dbias + own, tl.sum(tl.sum(acc, 1), 0).to(dtype))
        else:
            tl.store(dbias + own.to(tl.int64) * seqlen_k + cols, tl.sum(acc, 0).to(dtype), mask=cols < seqlen_k)
    else:
        at = own.to(tl.int64) * seqlen_q + rows
        if COLS_SHARED:
            tl.store(dbias + at, tl.sum(acc, 1).to(dtype), mask=rows < seqlen_q)
        else:
            inside = (rows[:, None] < seqlen_q) & (cols[None, :] < seqlen_k)
            tl.store(dbias + at[:, None] * seqlen_k + cols[None, :], acc.to(dtype), mask=inside)


@triton.jit
def bias_gradient_kernel(
    q, k, v, grad_out, lse, delta, bias, seed, dbias,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    grad_stride_b, grad_stride_h, grad_stride_m, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    score_scale, softcap, dropout_threshold, dropout_scale,
    batch, heads, bias_batch, bias_heads, group_k, group_v, seeded_batch, seqlen_q, seqlen_k, head_dim, head_dim_v,
    band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, ROWS_SHARED: tl.constexpr, COLS_SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias (bias_batch, bias_heads, seqlen_q or 1, seqlen_k or 1), contiguous; bias_batch, bias_heads are 1 or batch
    and heads. ROWS_SHARED, COLS_SHARED: the third, the fourth size is 1.

    Grid: blocks of keys (1 if COLS_SHARED) * blocks of queries (1 if ROWS_SHARED) * bias_batch * bias_heads.
    """
    row_begin, row_end, col_begin, col_end, own, own_b, own_h, b_count, h_count = shared_tile(
        batch, heads, bias_batch, bias_heads, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, ROWS_SHARED, COLS_SHARED
    )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in range(b_count * h_count):
        b = own_b + n // h_count
        h = own_h + n % h_count
        b64, h64 = b.to(tl.int64), h.to(tl.int64)
        q_here = q + b64 * q_stride_b + h64 * q_stride_h
        g_here = grad_out + b64 * grad_stride_b + h64 * grad_stride_h
        k_here = k + b64 * k_stride_b + (h // group_k).to(tl.int64) * k_stride_h
        v_here = v + b64 * v_stride_b + (h // group_v).to(tl.int64) * v_stride_h
        bias_here = bias + b64 * bias_stride_b + h64 * bias_stride_h
        row_constants = (b64 * heads + h64) * seqlen_q
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
                q0, g0 = q_here, g_here
                if CHUNK == 0:
                    q0 = load_tile(q_here, 0, 0, first_row, q_stride_m, seqlen_q, 0, head_dim, BLOCK_M, D0, False, True)
                    g0 = load_tile(
                        g_here, 0, 0, first_row, grad_stride_m, seqlen_q, 0, head_dim_v, BLOCK_M, V0, False, True
                    )
                q1, g1 = q0, g0
                if D1 > 0 and CHUNK == 0:
                    q1 = load_tile(
                        q_here, 0, 0, first_row, q_stride_m, seqlen_q, D0, head_dim, BLOCK_M, D1, False, True
                    )
                if V1 > 0 and CHUNK == 0:
                    g1 = load_tile(
                        g_here, 0, 0, first_row, grad_stride_m, seqlen_q, V0, head_dim_v, BLOCK_M, V1, False, True
                    )
                base, row_delta = load_row_constants(lse + row_constants, delta + row_constants, rows, seqlen_q, True)
                for first_col in range(begin, end, BLOCK_N):
                    cols = first_col + tl.arange(0, BLOCK_N)
                    if CHUNK > 0:
                        qk = product(
                            q_here, first_row, q_stride_m, seqlen_q, k_here, first_col, k_stride_n, seqlen_k, head_dim,
                            BLOCK_M, BLOCK_N, CHUNK, PRECISION,
                        )  # fmt: skip
                        dp = product(
                            g_here, first_row, grad_stride_m, seqlen_q, v_here, first_col, v_stride_n, seqlen_k,
                            head_dim_v, BLOCK_M, BLOCK_N, CHUNK, PRECISION,
                        )  # fmt: skip
                    else:
                        tile = load_tile(
                            k_here, 0, 0, first_col, k_stride_n, seqlen_k, 0, head_dim, BLOCK_N, D0, False, True
                        )
                        qk = tl.dot(q0, tl.trans(tile), input_precision=PRECISION)
                        if D1 > 0:
                            tile = load_tile(
                                k_here, 0, 0, first_col, k_stride_n, seqlen_k, D0, head_dim, BLOCK_N, D1, False, True
                            )
                            qk = tl.dot(q1, tl.trans(tile), qk, input_precision=PRECISION)
                        tile = load_tile(
                            v_here, 0, 0, first_col, v_stride_n, seqlen_k, 0, head_dim_v, BLOCK_N, V0, False, True
                        )
                        dp = tl.dot(g0, tl.trans(tile), input_precision=PRECISION)
                        if V1 > 0:
                            tile = load_tile(
                                v_here, 0, 0, first_col, v_stride_n, seqlen_k, V0, head_dim_v, BLOCK_N, V1, False, True
                            )
                            dp = tl.dot(g1, tl.trans(tile), dp, input_precision=PRECISION)
                    s, t = scores(
                        qk, rows[:, None], cols[None, :], bias_here, bias_stride_m, bias_stride_n, score_scale, softcap,
                        seqlen_q, seqlen_k, band_low, band_high, BIAS, SOFTCAP, HAS_LOW, HAS_HIGH, True, True,
                    )  # fmt: skip
                    p = weights(s, base[:, None], True)
                    keep = p > 0.0
                    if DROPOUT:
                        keep = dropout_keep(key, counted, rows, first_col, dropout_threshold, BLOCK_M, BLOCK_N)
                    ds, _ = score_gradient(p, dp, row_delta[:, None], t, keep, dropout_scale, SOFTCAP, DROPOUT)
                    acc += ds
    store_shared(dbias, acc, own, row_begin, col_begin, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, ROWS_SHARED, COLS_SHARED)
