"""Triton kernels that the simulator is proven with: forward passes by pointers and by tensor descriptors, one with
every extra, and small ones for what those don't use. triton_cases.py launches them and knows the results.

Plain Triton 3.6 to 3.9: no block pointers, no libdevice.
"""

import triton
import triton.language as tl


@triton.jit
def _softmax_step(scores, row_max, row_sum, acc):
    """One block of the online softmax, scores in units of log2: probabilities and the new row_max, row_sum, acc."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # -inf - -inf would be NaN where a row has seen no key yet
    offset = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores - offset[:, None])
    factor = tl.exp2(row_max - offset)
    return p, new_max, row_sum * factor + tl.sum(p, 1), acc * factor[:, None]


@triton.jit
def _visible(rows, cols, seqlen_k, CAUSAL: tl.constexpr):
    keep = cols[None, :] < seqlen_k
    if CAUSAL:
        keep = keep & (cols[None, :] <= rows[:, None])
    return keep


@triton.jit
def _finish(row_max, row_sum, acc):
    """The normalised output and the natural log-sum-exp; a row without keys gives 0 and -inf."""
    empty = row_sum == 0.0
    safe = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(safe)) * 0.6931471805599453)
    return acc / safe[:, None], lse


@triton.jit
def forward_pointers(
    q, k, v, out, lse, scale_log2, seqlen_q, seqlen_k, group,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q, out: (heads, seqlen_q, HEAD_DIM); k, v: (heads / group, seqlen_k, HEAD_DIM); lse: (heads, seqlen_q).

    All contiguous. Grid: (ceil(seqlen_q / BLOCK_M), heads).
    """
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    q_rows = q + head * seqlen_q * HEAD_DIM + rows[:, None] * HEAD_DIM + dims[None, :]
    k_base = k + head // group * seqlen_k * HEAD_DIM
    v_base = v + head // group * seqlen_k * HEAD_DIM
    q_tile = tl.load(q_rows, mask=rows[:, None] < seqlen_q, other=0.0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(seqlen_k, (tl.program_id(0) + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        kv_offset = cols[:, None] * HEAD_DIM + dims[None, :]
        k_tile = tl.load(k_base + kv_offset, mask=cols[:, None] < seqlen_k, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale_log2
        scores = tl.where(_visible(rows, cols, seqlen_k, CAUSAL), scores, float("-inf"))
        p, row_max, row_sum, acc = _softmax_step(scores, row_max, row_sum, acc)
        v_tile = tl.load(v_base + kv_offset, mask=cols[:, None] < seqlen_k, other=0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)

    result, row_lse = _finish(row_max, row_sum, acc)
    out_rows = out + head * seqlen_q * HEAD_DIM + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_rows, result.to(out.dtype.element_ty), mask=rows[:, None] < seqlen_q)
    tl.store(lse + head * seqlen_q + rows, row_lse, mask=rows < seqlen_q)


@triton.jit
def _by_descriptors(
    q, k, v, out, lse, head, scale_log2, seqlen_q, seqlen_k, group,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The forward pass with descriptors of three dimensions: what lies outside reads as zero and isn't written."""
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    q_tile = q.load([head, first, 0]).reshape(BLOCK_M, HEAD_DIM)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(seqlen_k, first + BLOCK_M)
    for start in range(0, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k_tile = k.load([head // group, start, 0]).reshape(BLOCK_N, HEAD_DIM)
        scores = tl.dot(q_tile, tl.trans(k_tile)) * scale_log2
        scores = tl.where(_visible(rows, cols, seqlen_k, CAUSAL), scores, float("-inf"))
        p, row_max, row_sum, acc = _softmax_step(scores, row_max, row_sum, acc)
        v_tile = v.load([head // group, start, 0]).reshape(BLOCK_N, HEAD_DIM)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)
    result, row_lse = _finish(row_max, row_sum, acc)
    out.store([head, first, 0], result.to(out.dtype).reshape(1, BLOCK_M, HEAD_DIM))
    tl.store(lse + head.to(tl.int64) * seqlen_q + rows, row_lse, mask=rows < seqlen_q)


@triton.jit
def forward_host_descriptors(
    q, k, v, out, lse, scale_log2, seqlen_q, seqlen_k, group,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """As `forward_pointers`, but q, k, v and out are TensorDescriptors: blocks [1, BLOCK_M or BLOCK_N, HEAD_DIM]."""
    _by_descriptors(
        q, k, v, out, lse, tl.program_id(1), scale_log2, seqlen_q, seqlen_k, group, HEAD_DIM, BLOCK_M, BLOCK_N, CAUSAL
    )


@triton.jit
def forward_device_descriptors(
    q, k, v, out, lse, heads, scale_log2, seqlen_q, seqlen_k, group,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """As `forward_pointers`; the kernel makes its descriptors itself, in global scratch memory."""
    k_heads = heads // group
    q_desc = tl.make_tensor_descriptor(
        q, [heads, seqlen_q, HEAD_DIM], [seqlen_q * HEAD_DIM, HEAD_DIM, 1], [1, BLOCK_M, HEAD_DIM]
    )
    k_desc = tl.make_tensor_descriptor(
        k, [k_heads, seqlen_k, HEAD_DIM], [seqlen_k * HEAD_DIM, HEAD_DIM, 1], [1, BLOCK_N, HEAD_DIM]
    )
    v_desc = tl.make_tensor_descriptor(
        v, [k_heads, seqlen_k, HEAD_DIM], [seqlen_k * HEAD_DIM, HEAD_DIM, 1], [1, BLOCK_N, HEAD_DIM]
    )
    out_desc = tl.make_tensor_descriptor(
        out, [heads, seqlen_q, HEAD_DIM], [seqlen_q * HEAD_DIM, HEAD_DIM, 1], [1, BLOCK_M, HEAD_DIM]
    )
    _by_descriptors(
        q_desc, k_desc, v_desc, out_desc, lse, tl.program_id(1), scale_log2, seqlen_q, seqlen_k, group,
        HEAD_DIM, BLOCK_M, BLOCK_N, CAUSAL,
    )  # fmt: skip


@triton.jit
def forward_rich(
    q, k, v, bias, out, lse, kept, scale_log2, seqlen_q, seqlen_k, head_dim, dropout_p, seed,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Causal, with a bias, dropout and any head_dim <= BLOCK_D.

    q, out: (heads, seqlen_q, head_dim); k, v: (heads, seqlen_k, head_dim); bias: (seqlen_q, seqlen_k), in natural
    units, for all heads; kept: (heads, 2) int32, to which the number of entries that dropout kept in even and odd rows
    is added. Entry (i, j) of a head is dropped iff tl.rand(seed, (head * seqlen_q + i) * seqlen_k + j) < dropout_p.
    """
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_mask = (rows[:, None] < seqlen_q) & (dims[None, :] < head_dim)
    q_offset = head * seqlen_q * head_dim + rows[:, None] * head_dim + dims[None, :]
    q_tile = tl.load(q + q_offset, mask=q_mask, other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_M], tl.int32)
    for start in range(0, tl.minimum(seqlen_k, (tl.program_id(0) + 1) * BLOCK_M), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        kv_mask = (cols[:, None] < seqlen_k) & (dims[None, :] < head_dim)
        kv_offset = head * seqlen_k * head_dim + cols[:, None] * head_dim + dims[None, :]
        k_tile = tl.load(k + kv_offset, mask=kv_mask, other=0.0)
        inside = (rows[:, None] < seqlen_q) & (cols[None, :] < seqlen_k)
        bias_tile = tl.load(bias + rows[:, None] * seqlen_k + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale_log2
        scores += bias_tile * 1.4426950408889634
        visible = inside & (cols[None, :] <= rows[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        p, row_max, row_sum, acc = _softmax_step(scores, row_max, row_sum, acc)
        entry = (head * seqlen_q + rows[:, None]) * seqlen_k + cols[None, :]
        keep = tl.rand(seed, entry.to(tl.int32)) >= dropout_p
        count += tl.sum((keep & visible).to(tl.int32), 1)
        p = tl.where(keep, p / (1.0 - dropout_p), 0.0)
        v_tile = tl.load(v + kv_offset, mask=kv_mask, other=0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    result, row_lse = _finish(row_max, row_sum, acc)
    tl.store(out + q_offset, result.to(out.dtype.element_ty), mask=q_mask)
    tl.store(lse + head * seqlen_q + rows, row_lse, mask=rows < seqlen_q)
    tl.atomic_add(kept + head * 2 + rows % 2, count, mask=rows < seqlen_q)


@triton.jit
def philox_words(out, seed, first, count, BLOCK: tl.constexpr):
    """out: (4, count) int32, the four words of tl.philox with counter (first + i, 1, i // 3, 7)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c0 = (first + i).to(tl.uint32)
    c1 = tl.full([BLOCK], 1, tl.uint32)
    a, b, c, d = tl.philox(seed, c0, c1, (i // 3).to(tl.uint32), c1 * 7)
    live = i < count
    tl.store(out + i, a.to(tl.int32, bitcast=True), mask=live)
    tl.store(out + count + i, b.to(tl.int32, bitcast=True), mask=live)
    tl.store(out + 2 * count + i, c.to(tl.int32, bitcast=True), mask=live)
    tl.store(out + 3 * count + i, d.to(tl.int32, bitcast=True), mask=live)


@triton.jit
def row_reductions(x, sums, extremes, places, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """x: (rows, cols) fp32 -> sums (2, rows): sum and sum of squares; extremes (2, rows): max and min; places (2, rows)
    int32: argmax and argmin."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    live = (i[:, None] < rows) & (j[None, :] < cols)
    tile = tl.load(x + i[:, None] * cols + j[None, :], mask=live, other=0.0)
    low = tl.where(live, tile, float("-inf"))
    high = tl.where(live, tile, float("inf"))
    keep = i < rows
    tl.store(sums + i, tl.sum(tile, 1), mask=keep)
    tl.store(sums + rows + i, tl.sum(tile * tile, 1), mask=keep)
    tl.store(extremes + i, tl.max(low, 1), mask=keep)
    tl.store(extremes + rows + i, tl.min(high, 1), mask=keep)
    tl.store(places + i, tl.argmax(low, 1), mask=keep)
    tl.store(places + rows + i, tl.argmin(high, 1), mask=keep)


@triton.jit
def _affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def scans(x, y, sums, products, states, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """x, y: (BLOCK_M, BLOCK_N) int32 -> cumulative sums along rows, reversed cumulative sums along columns, and the
    second component of the scan with (a, b)(c, d) = (a c, b c + d)."""
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(sums + at, tl.cumsum(a, 1))
    tl.store(products + at, tl.cumsum(a, 0, reverse=True))
    _, state = tl.associative_scan((a, b), 1, _affine)
    tl.store(states + at, state)


@triton.jit
def atomic_updates(x, cells, wide, floats, old, count, BLOCK: tl.constexpr):
    """cells (6) int32: sum, max, min, and, or, xor of x; wide (2) int64: sum of x << 20, and by compare and swap how
    many are odd; floats (2): sum and max of x; old: what the sum was before, in some order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    value = tl.load(x + i, mask=live, other=0)
    before = tl.atomic_add(cells + i * 0, value, mask=live)
    tl.store(old + i, before, mask=live)
    tl.atomic_max(cells + 1 + i * 0, value, mask=live)
    tl.atomic_min(cells + 2 + i * 0, value, mask=live)
    tl.atomic_and(cells + 3 + i * 0, value, mask=live)
    tl.atomic_or(cells + 4 + i * 0, value, mask=live)
    tl.atomic_xor(cells + 5 + i * 0, value, mask=live)
    tl.atomic_add(wide + i * 0, value.to(tl.int64) << 20, mask=live)
    tl.atomic_add(floats + i * 0, value.to(tl.float32), mask=live)
    tl.atomic_max(floats + 1 + i * 0, value.to(tl.float32), mask=live)
    odd = tl.sum((live & (value % 2 != 0)).to(tl.int64), 0)
    seen = tl.atomic_add(wide + 1, odd * 0)
    expected = seen - 1
    while seen != expected:
        expected = seen
        seen = tl.atomic_cas(wide + 1, expected, expected + odd)


@triton.jit
def integer_mix(a, b, narrow, wide, count, BLOCK: tl.constexpr):
    """a: int8, b: int64, nonzero -> narrow (8, count) int32, wide (8, count) int64: see triton_cases.py."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    x = tl.load(a + i, mask=live, other=1)
    y = tl.load(b + i, mask=live, other=1)
    word = y.to(tl.int32)
    divisor = tl.where(word == 0, 1, word)
    tl.store(narrow + i, (x * x).to(tl.int32), mask=live)  # wraps in eight bits
    tl.store(narrow + count + i, (x >> 2).to(tl.int32), mask=live)
    tl.store(narrow + 2 * count + i, (x.to(tl.uint8, bitcast=True) >> 2).to(tl.int32), mask=live)
    tl.store(narrow + 3 * count + i, x.to(tl.int32) // divisor, mask=live)
    tl.store(narrow + 4 * count + i, x.to(tl.int32) % divisor, mask=live)
    tl.store(narrow + 5 * count + i, tl.where(x > 0, word, -word), mask=live)
    high = tl.umulhi(word.to(tl.uint32, bitcast=True), 0x9E3779B9)
    tl.store(narrow + 6 * count + i, high.to(tl.int32, bitcast=True), mask=live)
    tl.store(narrow + 7 * count + i, tl.abs(x.to(tl.int32)) ^ (word | 5), mask=live)
    long = x.to(tl.int64)
    tl.store(wide + i, long * y, mask=live)
    tl.store(wide + count + i, y // (long * 2 + 1), mask=live)
    tl.store(wide + 2 * count + i, y % (long * 2 + 1), mask=live)
    tl.store(wide + 3 * count + i, y << (long & 63), mask=live)
    tl.store(wide + 4 * count + i, y >> (long & 63), mask=live)
    tl.store(wide + 5 * count + i, tl.minimum(long << 40, y), mask=live)
    tl.store(wide + 6 * count + i, (y & ~long) | (long ^ 3), mask=live)
    tl.store(wide + 7 * count + i, tl.umulhi(y.to(tl.uint64, bitcast=True), 0x9E3779B97F4A7C15), mask=live)


@triton.jit
def float_conversions(x, half, brain, fp8, ints, back, count, BLOCK: tl.constexpr):
    """x: fp32 -> fp16, bf16, fp8 (e5m2), int32 towards zero, and bf16 -> fp32 -> fp16 -> fp32."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    value = tl.load(x + i, mask=live, other=0.0)
    tl.store(half + i, value.to(tl.float16), mask=live)
    tl.store(brain + i, value.to(tl.bfloat16), mask=live)
    tl.store(fp8 + i, value.to(tl.float8e5).to(tl.uint8, bitcast=True), mask=live)
    tl.store(ints + i, value.to(tl.int32), mask=live)
    tl.store(back + i, value.to(tl.bfloat16).to(tl.float32).to(tl.float16).to(tl.float32), mask=live)


@triton.jit
def elementwise(x, y, out, count, BLOCK: tl.constexpr):
    """x, y: fp32 -> out (6, count): fma, division, square root, exp2, comparisons by where, clamp."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    a = tl.load(x + i, mask=live, other=1.0)
    b = tl.load(y + i, mask=live, other=1.0)
    tl.store(out + i, tl.fma(a, b, a), mask=live)
    tl.store(out + count + i, tl.div_rn(a, b), mask=live)
    tl.store(out + 2 * count + i, tl.sqrt_rn(tl.abs(a)), mask=live)
    tl.store(out + 3 * count + i, tl.exp2(a), mask=live)
    tl.store(out + 4 * count + i, tl.where((a > b) & (a < 3.0), a - b, tl.where(a == b, 7.0, b)), mask=live)
    tl.store(out + 5 * count + i, tl.clamp(a, -1.0, 1.0), mask=live)
