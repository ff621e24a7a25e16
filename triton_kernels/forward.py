"""The forward pass: one program per block of queries walks over the keys that its rows reach.

The softmax is online (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) and the tiling
FlashAttention's (Dao et al., 2022; Dao, 2023): the scores of one block at a time exist, in registers. A head size
that is no power of two is split, D = D0 + D1, so that nothing is multiplied by padding but the end of D1.
"""

import triton
import triton.language as tl

from .score import dropout_keep, log_sum_exp, program_rows, reached, scores, softmax_step


@triton.constexpr_function
def reaches(first, count, size):
    """Whether first + count <= size is certain at compile time."""
    return isinstance(first, int) and isinstance(size, int) and first + count <= size


@triton.jit
def load_tile(source, b, h, first, stride, length, first_dim, dims, ROWS: tl.constexpr, DIMS: tl.constexpr,
              TMA: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Rows [first, first + ROWS) and DIMS columns of one head's (length, dims) matrix, zero past its ends.

    `source` is a descriptor of (batch, heads, length, dims) if TMA, else a pointer to the head's first row, with
    `stride` elements from row to row. TAIL: the rows may run past the end. `dims` known at compile time spares the mask
    of columns where there is nothing to mask.
    """
    if TMA:
        return tl.reshape(source.load([b, h, first, first_dim]), [ROWS, DIMS])
    else:
        rows = tl.arange(0, ROWS)
        d = first_dim + tl.arange(0, DIMS)
        pointers = source + first.to(tl.int64) * stride + (rows[:, None] * stride + d[None, :])
        mask = d[None, :] < dims
        if TAIL:
            mask = mask & (first + rows[:, None] < length)
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def product(
    a, a_first, a_stride, a_length, b, b_first, b_stride, b_length, dims, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a b^T of ROWS rows of two matrices as load_tile reads them by pointers, CHUNK columns at a time: where registers
    can't hold the whole rows."""
    total = tl.zeros([A_ROWS, B_ROWS], tl.float32)
    for dim in range(0, dims, CHUNK):
        x = load_tile(a, 0, 0, a_first, a_stride, a_length, dim, dims, A_ROWS, CHUNK, False, True)
        y = load_tile(b, 0, 0, b_first, b_stride, b_length, dim, dims, B_ROWS, CHUNK, False, True)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION)
    return total


@triton.jit
def store_tile(pointer, tile, first, stride, length, first_dim, dims, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """The reverse of load_tile by pointer, within the ends; converts to the pointer's dtype."""
    rows = tl.arange(0, ROWS)
    d = first_dim + tl.arange(0, DIMS)
    pointers = pointer + first.to(tl.int64) * stride + (rows[:, None] * stride + d[None, :])
    mask = first + rows[:, None] < length
    if not reaches(first_dim, DIMS, dims):
        mask = mask & (d[None, :] < dims)
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _forward_blocks(
    acc0, acc1, row_max, row_sum,
    q0, q1, k0, k1, v0, v1, bias, seed,
    b, hk, hv, batch_head, first_row, begin, end,
    q_stride, k_stride, v_stride, bias_stride_m, bias_stride_n,
    score_scale, softcap, dropout_threshold, seqlen_q, seqlen_k, head_dim: tl.constexpr, head_dim_v: tl.constexpr,
    band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over the columns [begin, end)."""
    rows = first_row + tl.arange(0, BLOCK_M)
    for first_col in range(begin, end, BLOCK_N):
        cols = first_col + tl.arange(0, BLOCK_N)
        if CHUNK > 0:
            qk = product(
                q0, first_row, q_stride, seqlen_q, k0, first_col, k_stride, seqlen_k, head_dim, BLOCK_M, BLOCK_N,
                CHUNK, PRECISION,
            )  # fmt: skip
        else:
            k = load_tile(k0, b, hk, first_col, k_stride, seqlen_k, 0, head_dim, BLOCK_N, D0, TMA, MASKED)
            qk = tl.dot(q0, tl.trans(k), input_precision=PRECISION)
            if D1 > 0:
                k = load_tile(k1, b, hk, first_col, k_stride, seqlen_k, D0, head_dim, BLOCK_N, D1, TMA, MASKED)
                qk = tl.dot(q1, tl.trans(k), qk, input_precision=PRECISION)
        s, _ = scores(
            qk, rows[:, None], cols[None, :], bias, bias_stride_m, bias_stride_n, score_scale, softcap, seqlen_q,
            seqlen_k, band_low, band_high, BIAS, SOFTCAP, HAS_LOW, HAS_HIGH, MASKED, BIAS % 2 == 1,
        )  # fmt: skip
        p, factor, row_max, row_sum = softmax_step(s, row_max, row_sum, MASKED or BIAS > 0, BIAS % 2 == 1)
        if DROPOUT:
            keep = dropout_keep(seed, batch_head, rows, first_col, dropout_threshold, BLOCK_M, BLOCK_N)
            p = tl.where(keep, p, 0.0)
        v = load_tile(v0, b, hv, first_col, v_stride, seqlen_k, 0, head_dim_v, BLOCK_N, V0, TMA, MASKED)
        p = p.to(v.dtype)
        acc0 = tl.dot(p, v, acc0 * factor[:, None], input_precision=PRECISION)
        if V1 > 0:
            v = load_tile(v1, b, hv, first_col, v_stride, seqlen_k, V0, head_dim_v, BLOCK_N, V1, TMA, MASKED)
            acc1 = tl.dot(p, v, acc1 * factor[:, None], input_precision=PRECISION)
    return acc0, acc1, row_max, row_sum


@triton.jit
def forward_kernel(
    q, k0, k1, v0, v1, bias, seed, out, lse,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n, out_stride_b, out_stride_h, out_stride_m,
    score_scale, softcap, dropout_threshold, dropout_scale,
    batch, heads, group_k, group_v, seeded_batch, seqlen_q, seqlen_k, head_dim: tl.constexpr,
    head_dim_v: tl.constexpr, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """out = softmax(scores) v and lse for one block of BLOCK_M queries of one head.

    q (batch, heads, seqlen_q, head_dim), k, v: pointers, or descriptors if TMA (k0, v0 for the first D0, V0 columns,
    k1, v1 for the rest); bias: a pointer with broadcast strides 0; seed: int64 Philox keys, one per seeded_batch batch
    elements; out like q; lse (batch, heads, seqlen_q) contiguous, fp32, natural logarithm.
    Grid: blocks of queries * batch * heads.
    """
    first_row, batch_head, b, h, key, counted = program_rows(
        seed, batch, heads, seeded_batch, seqlen_q, BLOCK_M, HAS_HIGH, DROPOUT
    )
    hk, hv = h // group_k, h // group_v
    b64, h64 = b.to(tl.int64), h.to(tl.int64)

    q += b64 * q_stride_b + h64 * q_stride_h
    if not TMA:
        k0 += b64 * k_stride_b + hk.to(tl.int64) * k_stride_h
        v0 += b64 * v_stride_b + hv.to(tl.int64) * v_stride_h
        k1 = k0
        v1 = v0
    if BIAS > 0:
        bias += b64 * bias_stride_b + h64 * bias_stride_h
    q0 = q
    if CHUNK == 0:
        q0 = load_tile(q, 0, 0, first_row, q_stride_m, seqlen_q, 0, head_dim, BLOCK_M, D0, False, True)
    q1 = q0
    if D1 > 0 and CHUNK == 0:
        q1 = load_tile(q, 0, 0, first_row, q_stride_m, seqlen_q, D0, head_dim, BLOCK_M, D1, False, True)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1 if V1 > 0 else 16], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    begin, clean_begin, clean_end, end = reached(
        first_row, seqlen_q, seqlen_k, band_low, band_high, BLOCK_M, BLOCK_N, HAS_LOW, HAS_HIGH
    )
    # Masked blocks (if there is a lower bound), clean ones, masked ones again.
    for part in tl.static_range(3):
        if HAS_LOW or part > 0:
            first = begin if part == 0 else (clean_begin if part == 1 else clean_end)
            last = clean_begin if part == 0 else (clean_end if part == 1 else end)
            acc0, acc1, row_max, row_sum = _forward_blocks(
                acc0, acc1, row_max, row_sum, q0, q1, k0, k1, v0, v1, bias, key,
                b, hk, hv, counted, first_row, first, last,
                q_stride_m, k_stride_n, v_stride_n, bias_stride_m, bias_stride_n,
                score_scale, softcap, dropout_threshold, seqlen_q, seqlen_k, head_dim, head_dim_v, band_low, band_high,
                BLOCK_M, BLOCK_N, D0, D1, V0, V1, CHUNK, BIAS, SOFTCAP, DROPOUT, HAS_LOW, HAS_HIGH, part != 1, TMA,
                PRECISION,
            )  # fmt: skip

    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    if WRITE_LSE:
        rows = first_row + tl.arange(0, BLOCK_M)
        value = tl.where(empty, float("-inf"), log_sum_exp(row_max, row_sum, BIAS % 2 == 1))
        tl.store(lse + batch_head.to(tl.int64) * seqlen_q + rows, value, mask=rows < seqlen_q)
    factor = 1.0 / row_sum
    if DROPOUT:
        factor *= dropout_scale
    out += b64 * out_stride_b + h64 * out_stride_h
    store_tile(out, acc0 * factor[:, None], first_row, out_stride_m, seqlen_q, 0, head_dim_v, BLOCK_M, V0)
    if V1 > 0:
        store_tile(out, acc1 * factor[:, None], first_row, out_stride_m, seqlen_q, V0, head_dim_v, BLOCK_M, V1)
