"""Few queries, many keys (decoding with a cache): the keys are split over programs, and the query heads that share a
key head are packed into the rows of one tile, so that keys and values are read once. Each split leaves its part of the
output and the logarithm of its sum; `combine_kernel` puts the parts together (Dao, Haziza, Massa and Sizov,
"Flash-Decoding", 2023).
"""

import triton
import triton.language as tl

from .forward import load_tile
from .score import log_sum_exp, scores, softmax_step


@triton.jit
def _load_rows(pointers, live, first_dim, dims, DIMS: tl.constexpr):
    """DIMS columns of the rows that the pointers (rows, 1) are of, zero past the end."""
    d = first_dim + tl.arange(0, DIMS)[None, :]
    return tl.load(pointers + d, mask=live[:, None] & (d < dims), other=0.0)


@triton.jit
def decode_kernel(
    q, k, v, bias, part_out, part_lse,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    score_scale, softcap, heads_k, group, splits, seqlen_q, seqlen_k, head_dim, head_dim_v, band_low, band_high,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of the keys for BLOCK_M rows of one key head; row r is query r // group of query head r % group.

    part_out (batch, heads, seqlen_q, splits, head_dim_v) and part_lse (batch, heads, seqlen_q, splits), contiguous
    fp32: each split's own normalised output, and its lse in natural units. Grid: (splits, tiles of rows, batch *
    heads_k).
    """
    tiles = (group * seqlen_q + BLOCK_M - 1) // BLOCK_M
    split = tl.program_id(0) % splits
    row_tile = tl.program_id(0) // splits % tiles
    batch_head = tl.program_id(0) // splits // tiles
    r = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    b, hk = (batch_head // heads_k).to(tl.int64), (batch_head % heads_k).to(tl.int64)
    live = r < group * seqlen_q
    rows = tl.where(live, r // group, 0)
    heads = hk * group + r % group
    q += b * q_stride_b + heads[:, None] * q_stride_h + rows[:, None].to(tl.int64) * q_stride_m
    k += b * k_stride_b + hk * k_stride_h
    v += b * v_stride_b + hk * v_stride_h
    q0 = q
    if CHUNK == 0:
        q0 = _load_rows(q, live, 0, head_dim, D0)
    q1 = q0
    if D1 > 0 and CHUNK == 0:
        q1 = _load_rows(q, live, D0, head_dim, D1)
    bias_rows = bias
    if BIAS > 0:
        bias_rows = bias + b * bias_stride_b + heads[:, None] * bias_stride_h

    # The keys that some row reaches, in whole blocks, dealt out evenly.
    first_row = row_tile * BLOCK_M // group
    last_row = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // group, seqlen_q - 1)
    begin = 0
    end = seqlen_k
    if HAS_LOW:
        begin = tl.minimum(tl.maximum(first_row + band_low, 0), seqlen_k) // BLOCK_N * BLOCK_N
    if HAS_HIGH:
        end = tl.minimum(tl.maximum(last_row + 1 + band_high, 0), seqlen_k)
    blocks = (tl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N
    each = (blocks + splits - 1) // splits
    begin += split * each * BLOCK_N
    end = tl.minimum(end, begin + each * BLOCK_N)

    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1 if V1 > 0 else 16], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for first_col in range(begin, end, BLOCK_N):
        cols = first_col + tl.arange(0, BLOCK_N)
        if CHUNK > 0:
            qk = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for dim in range(0, head_dim, CHUNK):
                x = _load_rows(q, live, dim, head_dim, CHUNK)
                tile = load_tile(k, 0, 0, first_col, k_stride_n, seqlen_k, dim, head_dim, BLOCK_N, CHUNK, False, True)
                qk = tl.dot(x, tl.trans(tile), qk, input_precision=PRECISION)
        else:
            tile = load_tile(k, 0, 0, first_col, k_stride_n, seqlen_k, 0, head_dim, BLOCK_N, D0, False, True)
            qk = tl.dot(q0, tl.trans(tile), input_precision=PRECISION)
            if D1 > 0:
                tile = load_tile(k, 0, 0, first_col, k_stride_n, seqlen_k, D0, head_dim, BLOCK_N, D1, False, True)
                qk = tl.dot(q1, tl.trans(tile), qk, input_precision=PRECISION)
        s, _ = scores(
            qk, rows[:, None], cols[None, :], bias_rows, bias_stride_m, bias_stride_n, score_scale, softcap, seqlen_q,
            seqlen_k, band_low, band_high, BIAS, SOFTCAP, HAS_LOW, HAS_HIGH, True, BIAS % 2 == 1,
        )  # fmt: skip
        p, factor, row_max, row_sum = softmax_step(s, row_max, row_sum, True, BIAS % 2 == 1)
        tile = load_tile(v, 0, 0, first_col, v_stride_n, seqlen_k, 0, head_dim_v, BLOCK_N, V0, False, True)
        p = p.to(tile.dtype)
        acc0 = tl.dot(p, tile, acc0 * factor[:, None], input_precision=PRECISION)
        if V1 > 0:
            tile = load_tile(v, 0, 0, first_col, v_stride_n, seqlen_k, V0, head_dim_v, BLOCK_N, V1, False, True)
            acc1 = tl.dot(p, tile, acc1 * factor[:, None], input_precision=PRECISION)

    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    part = ((b * heads_k * group + heads) * seqlen_q + rows) * splits + split
    tl.store(part_lse + part, tl.where(empty, float("-inf"), log_sum_exp(row_max, row_sum, BIAS % 2 == 1)), mask=live)
    out = part_out + part[:, None] * head_dim_v
    d = tl.arange(0, V0)[None, :]
    tl.store(out + d, acc0 / row_sum[:, None], mask=live[:, None] & (d < head_dim_v))
    if V1 > 0:
        d = V0 + tl.arange(0, V1)[None, :]
        tl.store(out + d, acc1 / row_sum[:, None], mask=live[:, None] & (d < head_dim_v))


@triton.jit
def combine_kernel(
    part_out, part_lse, out, lse, out_stride_b, out_stride_h, out_stride_m, heads, seqlen_q, splits, head_dim_v,
    SPLITS: tl.constexpr, DIMS: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """out and lse of one query of one head from its parts: weights exp(lse of the part - their common lse).

    SPLITS and DIMS: powers of two, at least splits and head_dim_v. Grid: seqlen_q * batch * heads.
    """
    at = tl.program_id(0).to(tl.int64)
    row = at % seqlen_q
    b, h = at // seqlen_q // heads, at // seqlen_q % heads
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DIMS)
    parts = tl.load(part_lse + at * splits + s, mask=s < splits, other=float("-inf"))
    most = tl.max(parts, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp(parts - base)
    total = tl.sum(weights, 0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tile = part_out + (at * splits + s[:, None]) * head_dim_v + d[None, :]
    tile = tl.load(tile, mask=(s[:, None] < splits) & (d[None, :] < head_dim_v), other=0.0)
    result = tl.sum(tile * (weights / total)[:, None], 0)
    pointer = out + b * out_stride_b + h * out_stride_h + row * out_stride_m + d
    tl.store(pointer, result.to(out.dtype.element_ty), mask=d < head_dim_v)
    if WRITE_LSE:
        tl.store(lse + at, tl.where(empty, float("-inf"), base + tl.log(total)))
