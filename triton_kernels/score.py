"""What happens between Q K^T and P V, once for every kernel: band, bias, softcap, dropout, and their derivatives.

Scores are kept in the log2 domain: exp(x) = exp2(x * log2(e)), and the factor goes into the scale. A feature is a
constant of the kernel's variant (`C`): what a kernel doesn't use isn't there.

    BIAS      0 none, 1 added (floating point), 2 bool (nonzero = attend), 4 bits (attnkern/bits.py); a bias whose rows
              are all the same one (stride_m == 0) has 8 added to these: it is loaded as a vector of columns
    SOFTCAP   s = softcap * tanh(s / softcap)
    RANGES    how many key ranges a row has, 0 to 2
    DROPOUT   Philox bits by position, as attnkern/rng.py lays them out
    TANGENT   the kernel is one of second order; TQ, TK, TV, TBIAS: which tangents there are (TBIAS as BIAS)
"""

import triton
import triton.language as tl

from .ranges import fenced, inside

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _visited(
    first, count, size, low, high, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr, PARTIAL_END: tl.constexpr,
):  # fmt: skip
    """The columns that the rows [first, first + ROWS) (of `count`) attend to among `size`, in whole blocks, as the four
    bounds of three parts: partial blocks (none without a lower bound), full ones, of which every row attends to all,
    and partial ones again (without PARTIAL_END none: the full ones go on to the end).

    Row i attends to column j iff i + low <= j <= i + high.
    """
    begin = 0
    end = size
    full_begin = 0
    full_end = size
    last = tl.minimum(first + ROWS, count) - 1
    if HAS_LOW:
        begin = tl.minimum(tl.maximum(first + low, 0), size) // BLOCK * BLOCK
        full_begin = tl.maximum(last + low, 0)
    if HAS_HIGH:
        end = tl.minimum(tl.maximum(last + 1 + high, 0), size)
        full_end = tl.minimum(tl.maximum(first + high + 1, 0), size)
    full_begin = tl.minimum((full_begin + BLOCK - 1) // BLOCK * BLOCK, tl.maximum(end, begin))
    full_end = tl.maximum(full_end // BLOCK * BLOCK, full_begin)
    if not PARTIAL_END:
        full_end = end
    return begin, full_begin, full_end, end


@triton.jit
def visited_keys(first_row, call, C: tl.constexpr):
    """The blocks of keys that a block of queries visits."""
    return _visited(
        first_row, call.seqlen_q, call.seqlen_k, call.band_low, call.band_high, C.BLOCK_M, C.BLOCK_N, C.HAS_LOW,
        C.HAS_HIGH, True,
    )  # fmt: skip


@triton.jit
def visited_queries(first_col, call, C: tl.constexpr):
    """The blocks of queries that a block of keys visits: the same band with queries and keys exchanged. Queries past
    the end need no mask (`load_row_terms`): without a lower bound the last block is a full one."""
    return _visited(
        first_col, call.seqlen_k, call.seqlen_q, -call.band_high, -call.band_low, C.BLOCK_N, C.BLOCK_M, C.HAS_HIGH,
        C.HAS_LOW, C.HAS_LOW,
    )  # fmt: skip


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
def load_bias(bias, rows, cols, strides, call, BIAS: tl.constexpr):
    """The bias of a tile, 0 in columns past the end. `bias` points to the tile's batch and head. Rows past the end read
    the last one: their scores are masked or never stored. (A minimum of the columns would hide that they are
    consecutive.)"""
    pointers = bias + cols.to(tl.int64) * strides.column
    if BIAS < 8:
        pointers = pointers + tl.minimum(rows, call.seqlen_q - 1).to(tl.int64) * strides.row
    return tl.load(pointers, mask=cols < call.seqlen_k, other=0)


@triton.jit
def load_bits(bits, rows, cols, first_col, strides, call, BIAS: tl.constexpr):
    """`load_bias` of a mask of bits, not 0 where a row attends to a column; first_col is the tile's first column. A
    thread has words of 64 keys of its rows, and takes its entries from these."""
    COLS: tl.constexpr = cols.shape[0] * cols.shape[1]
    pointers = bits + first_col // 64 * 8
    if BIAS < 8:
        pointers += tl.minimum(rows, call.seqlen_q - 1).to(tl.int64) * strides.row
    pointers = pointers.to(tl.pointer_type(tl.int64))
    at = cols - first_col
    kept = 0
    for n in tl.static_range(0, COLS, 64):
        word = tl.load(pointers + n // 64, mask=first_col + n < call.seqlen_k, other=0)
        if COLS < 64:
            word >>= first_col % 64
        half = word.to(tl.int32)
        if COLS >= 64:
            half = tl.where(at % 64 < 32, half, (word >> 32).to(tl.int32))
        kept = half if n == 0 else tl.where(at < n, kept, half)
    bit = tl.full(cols.shape, 1, tl.int32) << (at % 32)
    if cols.shape[1] == 1:  # Else a tile with columns past the end has a mask of its own.
        bit = tl.where(cols < call.seqlen_k, bit, 0)
    return kept & bit


@triton.jit
def scores(qk, rows, cols, first_col, bias, strides, ends, call, C: tl.constexpr, MASKED: tl.constexpr):
    """Products q k^T to scores, -inf where a query doesn't attend; and tanh, for the derivative.

    In the log2 domain, or C.NATURAL, the natural-log domain: with an added bias, where a row of finfo.min times log2(e)
    would be one of -inf, and lse beside a large bias not what it was made of.

    rows and cols are the tile's indices, shaped to broadcast to it: [M, 1] and [1, N], or [1, M] and [N, 1] of a
    transposed tile, first_col its first column; strides are the bias'; ends the `Ends` of the rows, 1-D, which a MASKED
    tile with key ranges takes.
    call.score_scale is softmax_scale * log2(e), or softmax_scale / softcap with a softcap.
    """
    s = qk * call.score_scale
    t = s
    if C.SOFTCAP:
        t = tanh(s)
        s = t * (call.softcap if C.NATURAL else call.softcap * LOG2E)
    elif C.NATURAL:
        s = qk * (call.score_scale * LN2)
    if C.BIAS > 0:
        if C.BIAS & 4:
            b = load_bits(bias, rows, cols, first_col, strides, call, C.BIAS)
        else:
            b = load_bias(bias, rows, cols, strides, call, C.BIAS)
        if C.NATURAL:
            s += b.to(tl.float32)
        else:
            s = tl.where(b != 0, s, float("-inf"))
    if MASKED:
        if C.RANGES > 0:
            keep = inside(ends, rows, cols, C)
        else:
            keep = (cols < call.seqlen_k) & (rows < call.seqlen_q)
            if C.HAS_LOW:
                keep = keep & (cols >= rows + call.band_low)
            if C.HAS_HIGH:
                keep = keep & (cols <= rows + call.band_high)
        s = tl.where(keep, s, float("-inf"))
    return s, t


@triton.constexpr_function
def clearing(C):
    """The variant of a second walk, which clears what nobody attends to.

    A weight of 0 times NaN or infinity is NaN. So keys and queries that a band, key ranges or a bool mask leave out
    (UNATTENDED: there may be some) must not meet a weight, whatever they hold: slots of a cache may never have been
    written. But to find and clear them costs registers and, where products read shared memory, a way back to it. They
    hold numbers as a rule: the first walk takes them as they are. Only where its sums hold a NaN, it is done again.
    """
    return type(C)(**{**C.__dict__, "CLEAR": True})


@triton.jit
def afresh(x):
    """x, an integer, of which the compiler doesn't know that it is x: what a second walk computes from it isn't kept in
    registers from the first walk on."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=False, pack=1)


@triton.jit
def has_nan(sums, C: tl.constexpr):
    """Whether the two tiles of sums (`tiles.zeros`) hold one."""
    found = tl.max((sums[0] != sums[0]).to(tl.int32)) | tl.max((sums[1] != sums[1]).to(tl.int32))
    return fenced(found, C) > 0


@triton.constexpr_function
def clears(C, MASKED):
    """Whether entries of a tile may be left out, and must be cleared."""
    return bool(C.CLEAR and (MASKED or (C.BIAS > 0 and not C.NATURAL)))


@triton.jit
def held_columns(s, C: tl.constexpr, MASKED: tl.constexpr):
    """Which columns of a tile of scores some row attends to; None where none is cleared."""
    held = None
    if clears(C, MASKED):
        held = tl.max(s, 0) > float("-inf")
    return held


@triton.jit
def weighted(p, x, C: tl.constexpr, MASKED: tl.constexpr):
    """x, which is a multiple of the weights p; 0 where these are, whatever else x is made of, if that is cleared."""
    if clears(C, MASKED):
        x = tl.where(p == 0.0, 0.0, x)
    return x


@triton.jit
def probabilities(s, base, NATURAL: tl.constexpr):
    """exp(s - base), of scores in either domain."""
    return tl.exp2((s - base) * LOG2E if NATURAL else s - base)


@triton.jit
def log_sum_exp(row_max, row_sum, NATURAL: tl.constexpr):
    """The natural logarithm of a row's sum, whose probabilities are relative to row_max (in either domain)."""
    return row_max + tl.log2(row_sum) * LN2 if NATURAL else (row_max + tl.log2(row_sum)) * LN2


@triton.jit
def with_sink(lse, sink):
    """The log-sum-exp of rows with their sink, and the share that is left for their keys."""
    most = tl.maximum(lse, sink)
    base = tl.where(most == float("-inf"), 0.0, most)
    keys = tl.exp(lse - base)
    total = keys + tl.exp(sink - base)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    return tl.where(empty, float("-inf"), base + tl.log(total)), keys / total


@triton.jit
def softmax_step(s, row_max, row_sum, MAY_BE_EMPTY: tl.constexpr, NATURAL: tl.constexpr):
    """One block of the online softmax: probabilities relative to the new maximum, the factor for what was summed
    before, and the new maximum and sum. A row that has seen no key yet keeps -inf and 0. Domains as in `scores`."""
    new_max = tl.maximum(row_max, tl.max(s, 1))
    base = new_max
    if MAY_BE_EMPTY:
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = probabilities(s, base[:, None], NATURAL)
    factor = probabilities(row_max, base, NATURAL)
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
    """lse of these rows in the domain of the scores. A row without keys (lse -inf) and one past the end get +inf: its
    probabilities are exp2(s - inf) = 0."""
    base = tl.load(lse + rows, mask=rows < seqlen_q, other=float("-inf"))
    if not NATURAL:
        base *= LOG2E
    return tl.where(base == float("-inf"), float("inf"), base)


@triton.jit
def load_row_terms(terms, offset, rows, seqlen_q, C: tl.constexpr):
    """`load_row_base`, delta, and with a TANGENT mu and nu (0 past the end), of these rows of a head, whose terms are
    `offset` from the first."""
    base = load_row_base(terms.lse + offset, rows, seqlen_q, C.NATURAL)
    delta = tl.load(terms.delta + offset + rows, mask=rows < seqlen_q, other=0.0)
    mu = delta
    nu = delta
    if C.TANGENT:
        mu = tl.load(terms.mu + offset + rows, mask=rows < seqlen_q, other=0.0)
        nu = tl.load(terms.nu + offset + rows, mask=rows < seqlen_q, other=0.0)
    return base, delta, mu, nu


@triton.jit
def score_gradient(p, dp, delta, t, keep, call, C: tl.constexpr, MASKED: tl.constexpr):
    """dS = P (dP - delta) of the scores after bias and before the softmax; and of the scaled products, before softcap.

    p: probabilities before dropout; dp: dO V^T; delta: broadcast along its rows; t: tanh from `scores`.
    """
    if C.DROPOUT:
        dp = tl.where(keep, dp * call.dropout_scale, 0.0)
    ds = weighted(p, p * (dp - delta), C, MASKED)
    raw = ds
    if C.SOFTCAP:
        raw = weighted(p, ds * (1.0 - t * t), C, MASKED)
    return ds, raw


@triton.jit
def philox_of(seed, call, b, h, C: tl.constexpr):
    """The Philox key and count of a head: what `dropout_keep` takes."""
    key = 0
    counted = 0
    if C.DROPOUT:
        key = tl.load(seed + b // call.seeded_batch)
        counted = (b % call.seeded_batch).to(tl.int64) * call.heads + h
    return key, counted


@triton.jit
def program_rows(seed, call, C: tl.constexpr):
    """What a program of a grid of blocks of queries * batch * heads works on: its first query, its head counted over
    the batch, its batch element, its head; and the Philox key and count of those.

    Longest rows first, over all heads: with a causal band the last blocks of queries reach the most keys.
    """
    block = tl.program_id(0) // (call.batch * call.heads)
    if C.HAS_HIGH:
        block = (call.seqlen_q + C.BLOCK_M - 1) // C.BLOCK_M - 1 - block
    batch_head = tl.program_id(0) % (call.batch * call.heads)
    b, h = batch_head // call.heads, batch_head % call.heads
    return block * C.BLOCK_M, batch_head, b, h, philox_of(seed, call, b, h, C)


@triton.jit
def score_tangent(x, t, rows, cols, tbias, strides, call, C: tl.constexpr):
    """Tangent of the scores, and the part of it that isn't the bias'. x: that of the products q k^T; t: tanh from
    `scores`; strides: tbias'."""
    product = tl.zeros_like(t)
    if C.TQ or C.TK:
        product = x * call.softmax_scale
        if C.SOFTCAP:
            product *= 1.0 - t * t
    ts = product
    if C.TBIAS > 0:
        ts += load_bias(tbias, rows, cols, strides, call, C.TBIAS).to(tl.float32)
    return ts, product


@triton.jit
def second_gradient(p, ts, product, dp, u, delta, mu, nu, t, keep, call, C: tl.constexpr, MASKED: tl.constexpr):
    """Derivatives of rowsum(dS T) + rowsum(P U), which is what the gradients weigh in the direction T of the scores:

        c = T - mu    dS = P (dP - delta)    W = dS c + P (U - nu)

    of the scores after bias (W), of the scaled products before softcap, of the tangent of these (dS likewise), and of
    dP without dropout (P c with dropout, for the gradient of v).

    p: probabilities before dropout; ts, product: from `score_tangent`; dp: dO V^T; u: dO tV^T; delta, mu, nu: broadcast
    along their rows; t: tanh from `scores`.
    """
    centred = ts - mu
    kept = p * centred
    if C.DROPOUT:
        dp = tl.where(keep, dp * call.dropout_scale, 0.0)
        kept = tl.where(keep, kept * call.dropout_scale, 0.0)
    ds = p * (dp - delta)
    if C.TV:
        if C.DROPOUT:
            u = tl.where(keep, u * call.dropout_scale, 0.0)
        w = ds * centred + p * (u - nu)
    else:
        w = ds * centred - p * nu
    raw = w
    if C.SOFTCAP:
        # Of the slope 1 - tanh^2, by which `product` has been multiplied already.
        slope = 1.0 - t * t
        raw = w * slope - ds * product * t * (2.0 / call.softcap)
        ds = ds * slope
    return (
        weighted(p, w, C, MASKED),
        weighted(p, raw, C, MASKED),
        weighted(p, ds, C, MASKED),
        weighted(p, kept, C, MASKED),
    )
