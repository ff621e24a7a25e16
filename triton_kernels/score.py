"""What happens between Q K^T and P V, once for every kernel: band, bias, softcap, dropout, and their derivatives.

Scores are kept in units of log2: exp(x) = exp2(x * log2(e)), and the factor goes into the scale. A feature is a
constexpr flag: what a kernel doesn't use isn't there.

    BIAS      0 none, 1 added (floating point), 2 bool (nonzero = attend); a bias whose rows are all the same one
              (stride_m == 0) has 2 added to these: it is loaded as a vector of columns
    SOFTCAP   s = softcap * tanh(s / softcap)
    DROPOUT   Philox bits by position, as attnkern/rng.py lays them out
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_BIAS = tl.constexpr(0)


@triton.jit
def reached(
    first, count, size, low, high, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
):  # fmt: skip
    """The columns that the rows [first, first + ROWS) (of `count`) reach among `size`, in whole blocks: [begin, end),
    of which every row reaches all of [clean_begin, clean_end). Row i reaches column j iff i + low <= j <= i + high.

    The same band with queries and keys exchanged is (-high, -low): so the backward pass walks over queries.
    """
    begin = 0
    end = size
    clean_begin = 0
    clean_end = size
    last = tl.minimum(first + ROWS, count) - 1
    if HAS_LOW:
        begin = tl.minimum(tl.maximum(first + low, 0), size) // BLOCK * BLOCK
        clean_begin = tl.maximum(last + low, 0)
    if HAS_HIGH:
        end = tl.minimum(tl.maximum(last + 1 + high, 0), size)
        clean_end = tl.minimum(tl.maximum(first + high + 1, 0), size)
    clean_begin = tl.minimum((clean_begin + BLOCK - 1) // BLOCK * BLOCK, tl.maximum(end, begin))
    clean_end = tl.maximum(clean_end // BLOCK * BLOCK, clean_begin)
    return begin, clean_begin, clean_end, end


@triton.jit
def tanh(x):
    """By exp2 of a negative number: no overflow, and no library. Near 0, where 1 - e cancels, by an odd polynomial, as
    in csrc/cuda/score.cuh. Relative error below 2^-21."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    square = x * x
    p = ((0.017256994 * square - 0.05305295) * square + 0.13325988) * square - 0.3333315
    return tl.where(square < 0.25, x + x * (p * square), tl.where(x < 0, -t, t))


@triton.jit
def load_bias(bias, rows, cols, stride_m, stride_n, seqlen_q, seqlen_k, BIAS: tl.constexpr):
    """The bias of a tile, 0 in columns past the end. `bias` points to the tile's batch and head. Rows past the end read
    the last one: their scores are masked or never stored. (A minimum of the columns would hide that they are
    consecutive.)"""
    pointers = bias + cols.to(tl.int64) * stride_n
    if BIAS < 3:
        pointers = pointers + tl.minimum(rows, seqlen_q - 1).to(tl.int64) * stride_m
    return tl.load(pointers, mask=cols < seqlen_k, other=0)


@triton.jit
def scores(
    qk, rows, cols, bias, bias_stride_m, bias_stride_n, score_scale, softcap, seqlen_q, seqlen_k, band_low, band_high,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, MASKED: tl.constexpr,
    NATURAL: tl.constexpr = False,
):  # fmt: skip
    """Products q k^T to scores, -inf where a query doesn't attend; and tanh, for the derivative.

    In units of log2, or NATURAL ones: with an added bias, where a row of finfo.min times log2(e) would be one of -inf,
    and lse beside a large bias not what it was made of.

    rows and cols are the tile's indices, shaped to broadcast to it: [M, 1] and [1, N], or [1, M] and [N, 1] of a
    transposed tile. score_scale is softmax_scale * log2(e), or softmax_scale / softcap with a softcap.
    """
    s = qk * score_scale
    t = s
    if SOFTCAP:
        t = tanh(s)
        s = t * (softcap if NATURAL else softcap * LOG2E)
    elif NATURAL:
        s = qk * (score_scale * LN2)
    if BIAS > 0:
        b = load_bias(bias, rows, cols, bias_stride_m, bias_stride_n, seqlen_q, seqlen_k, BIAS)
        if BIAS % 2 == 1:
            s += b.to(tl.float32) * (1.0 if NATURAL else LOG2E)
        else:
            s = tl.where(b != 0, s, float("-inf"))
    if MASKED:
        keep = (cols < seqlen_k) & (rows < seqlen_q)
        if HAS_LOW:
            keep = keep & (cols >= rows + band_low)
        if HAS_HIGH:
            keep = keep & (cols <= rows + band_high)
        s = tl.where(keep, s, float("-inf"))
    return s, t


@triton.jit
def weights(s, base, NATURAL: tl.constexpr):
    """exp(s - base), of scores in either unit."""
    return tl.exp2((s - base) * LOG2E if NATURAL else s - base)


@triton.jit
def log_sum_exp(row_max, row_sum, NATURAL: tl.constexpr):
    """The natural logarithm of a row's sum, whose weights are relative to row_max (in either unit)."""
    return row_max + tl.log2(row_sum) * LN2 if NATURAL else (row_max + tl.log2(row_sum)) * LN2


@triton.jit
def softmax_step(s, row_max, row_sum, MAY_BE_EMPTY: tl.constexpr, NATURAL: tl.constexpr = False):
    """One block of the online softmax: weights relative to the new maximum, the factor for what was summed before, and
    the new maximum and sum. A row that has seen no key yet keeps -inf and 0. Units as in `scores`."""
    new_max = tl.maximum(row_max, tl.max(s, 1))
    base = new_max
    if MAY_BE_EMPTY:
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = weights(s, base[:, None], NATURAL)
    factor = weights(row_max, base, NATURAL)
    return p, factor, new_max, row_sum * factor + tl.sum(p, 1)


@triton.jit
def dropout_keep(seed, batch_head, rows, first_col, threshold, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which entries of the tile survive: [ROWS, COLS], COLS 16 or a multiple of 32 and first_col a multiple of it.

    Call t of a block of 32 columns yields the halves of columns 8 w + 2 t and 8 w + 2 t + 1 in its word w.
    """
    CALLS: tl.constexpr = COLS // 8 if COLS >= 32 else 4
    WORDS: tl.constexpr = 4 if COLS >= 32 else 2  # of each call
    calls = first_col // 32 * 4 + tl.arange(0, CALLS)
    c0 = (calls[None, :] + tl.zeros([ROWS, 1], tl.int32)).to(tl.uint32)
    c1 = (rows[:, None] + tl.zeros([1, CALLS], tl.int32)).to(tl.uint32)
    zero = tl.zeros([ROWS, CALLS], tl.uint32)
    low = zero + (batch_head & 0xFFFFFFFF).to(tl.uint32)
    high = zero + (batch_head >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, low, high)
    if WORDS == 4:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS, calls, w // 2, w % 2]
    else:
        second = first_col % 32 >= 16
        words = tl.join(tl.where(second, w2, w0), tl.where(second, w3, w1))
    halves = tl.join(words & 0xFFFF, words >> 16)
    halves = tl.reshape(halves, [ROWS, CALLS // 4, 4, WORDS, 2])  # block, t, w, half
    halves = tl.reshape(tl.permute(halves, [0, 1, 3, 2, 4]), [ROWS, COLS])
    return halves >= threshold.to(tl.uint32)


@triton.jit
def load_row_base(lse, rows, seqlen_q, NATURAL: tl.constexpr):
    """lse of these rows in the unit of the scores. A row without keys (lse -inf) and one past the end get +inf: its
    weights are exp2(s - inf) = 0."""
    base = tl.load(lse + rows, mask=rows < seqlen_q, other=float("-inf"))
    if not NATURAL:
        base *= LOG2E
    return tl.where(base == float("-inf"), float("inf"), base)


@triton.jit
def load_row_constants(lse, delta, rows, seqlen_q, NATURAL: tl.constexpr = False):
    """`load_row_base`, and delta (0 past the end), of these rows."""
    base = load_row_base(lse, rows, seqlen_q, NATURAL)
    return base, tl.load(delta + rows, mask=rows < seqlen_q, other=0.0)


@triton.jit
def score_gradient(p, dp, delta, t, keep, dropout_scale, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr):
    """dS = P (dP - delta) of the scores after bias and before the softmax; and of the scaled products, before softcap.

    p: weights before dropout; dp: dO V^T; delta: broadcast along its rows; t: tanh from `scores`.
    """
    if DROPOUT:
        dp = tl.where(keep, dp * dropout_scale, 0.0)
    ds = p * (dp - delta)
    raw = ds
    if SOFTCAP:
        raw = ds * (1.0 - t * t)
    return ds, raw


@triton.jit
def program_rows(
    seed, batch, heads, seeded_batch, seqlen_q, BLOCK_M: tl.constexpr, HAS_HIGH: tl.constexpr, DROPOUT: tl.constexpr
):
    """What a program of a grid of blocks of queries * batch * heads works on: its first query, its head counted over
    the batch, its batch element, its head; and the Philox key and count of those.

    Longest rows first, over all heads: with a causal band the last blocks of queries reach the most keys.
    """
    block = tl.program_id(0) // (batch * heads)
    if HAS_HIGH:
        block = (seqlen_q + BLOCK_M - 1) // BLOCK_M - 1 - block
    batch_head = tl.program_id(0) % (batch * heads)
    b, h = batch_head // heads, batch_head % heads
    key = 0
    counted = 0
    if DROPOUT:
        key = tl.load(seed + b // seeded_batch)
        counted = (b % seeded_batch).to(tl.int64) * heads + h
    return block * BLOCK_M, batch_head, b, h, key, counted


@triton.jit
def score_tangent(
    x, t, rows, cols, tbias, tbias_stride_m, tbias_stride_n, softmax_scale, seqlen_q, seqlen_k, TBIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Tangent of the scores, and the part of it that isn't the bias'. x: that of the products q k^T (None: zero);
    t: tanh from `scores`."""
    product = tl.zeros_like(t)
    if x is not None:
        product = x * softmax_scale
        if SOFTCAP:
            product *= 1.0 - t * t
    ts = product
    if TBIAS > 0:
        ts += load_bias(tbias, rows, cols, tbias_stride_m, tbias_stride_n, seqlen_q, seqlen_k, TBIAS).to(tl.float32)
    return ts, product


@triton.jit
def second_gradient(
    p, ts, product, dp, u, delta, mu, nu, t, keep, dropout_scale, softcap, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr
):
    """Derivatives of rowsum(dS T) + rowsum(P U), which is what the gradients weigh in the direction T of the scores:

        c = T - mu    dS = P (dP - delta)    W = dS c + P (U - nu)

    of the scores after bias (W), of the scaled products before softcap, of the tangent of these (dS likewise), and of
    dP without dropout (P c with dropout, for the gradient of v).

    p: weights before dropout; ts, product: from `score_tangent`; dp: dO V^T; u: dO tV^T (None: zero); delta, mu, nu:
    broadcast along their rows; t: tanh from `scores`.
    """
    centred = ts - mu
    kept = p * centred
    if DROPOUT:
        dp = tl.where(keep, dp * dropout_scale, 0.0)
        kept = tl.where(keep, kept * dropout_scale, 0.0)
    ds = p * (dp - delta)
    if u is None:
        w = ds * centred - p * nu
    else:
        if DROPOUT:
            u = tl.where(keep, u * dropout_scale, 0.0)
        w = ds * centred + p * (u - nu)
    raw = w
    if SOFTCAP:
        # Of the slope 1 - tanh^2, by which `product` has been multiplied already.
        slope = 1.0 - t * t
        raw = w * slope - ds * product * t * (2.0 / softcap)
        ds = ds * slope
    return w, raw, ds, kept
