"""wgmma against the shared memory layouts and register fragments of the PTX ISA, written out byte by byte."""

import numpy as np
import pytest
import torch

import ptxsim
from ptxsim import Deadlock, Fault, Hazard, UnsupportedInstruction, snippets

RNG = np.random.default_rng(3)
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1}
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MODE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
WIDTH = {"none": 16, "32B": 32, "64B": 64, "128B": 128}


def integers(kind: str, shape) -> tuple[np.ndarray, np.ndarray]:
    """Raw elements and their values: integers so small that sums are exact."""
    low = 0 if kind == "u8" else -4
    x = RNG.integers(low, 5, shape).astype(np.float64)
    if kind in ("s8", "u8"):
        return x.astype(np.int8).view(np.uint8), x
    if kind == "tf32":
        return x.astype(np.float32).view(np.uint32) | np.uint32(0x1FFF), x  # the low 13 bits don't count
    raw = torch.from_numpy(x).to(TORCH[kind])
    return raw.view(torch.uint8 if BYTES[kind] == 1 else torch.int16).numpy().view(f"u{BYTES[kind]}"), x


def swizzled(row: int, piece: int, swizzle: str) -> int:
    """Which piece of 16 bytes of a row of the pattern holds piece number `piece` (figures of 9.7.15.5.1.2): the pieces
    of 128 bytes are permuted by the number of the 128 bytes, of which one row fills all, a half or a quarter."""
    if swizzle == "128B":
        return piece ^ row % 8
    if swizzle == "64B":
        return piece ^ row // 2 % 4
    if swizzle == "32B":
        return piece ^ row // 4 % 2
    return piece


class Image:
    """The bytes of shared memory, filled element by element."""

    def __init__(self, size: int):
        self.bytes = np.zeros(size, np.uint8)

    def put(self, at: int, element: np.ndarray):
        self.bytes[at : at + element.itemsize] = np.frombuffer(element.tobytes(), np.uint8)

    def k_major(self, start: int, matrix: np.ndarray, swizzle: str, leading: int, stride: int, k0: int = 0):
        """`matrix`: [rows, k]; its first column is column k0 of a tile that starts at `start`."""
        size = matrix.itemsize
        for row in range(matrix.shape[0]):
            for k in range(matrix.shape[1]):
                piece, within = divmod((k0 + k) * size, 16)
                at = start + row // 8 * stride + within
                if swizzle == "none":  # core matrices: 8 rows of 16 bytes, one after the other
                    at += row % 8 * 16 + piece * leading
                else:
                    at += row % 8 * WIDTH[swizzle] + swizzled(row, piece, swizzle) * 16
                self.put(at, matrix[row, k])

    def mn_major(self, start: int, matrix: np.ndarray, swizzle: str, leading: int, stride: int, k0: int = 0):
        """`matrix`: [k, mn] of 16 bits."""
        per_row = WIDTH[swizzle] // 2  # elements along m or n in a row of the pattern
        for k in range(matrix.shape[0]):
            for n in range(matrix.shape[1]):
                at = start + n % 8 * 2
                kk = k0 + k
                if swizzle == "none":  # core matrices: 8 columns of k, each with 16 bytes along m or n
                    at += n // 8 * stride + kk % 8 * 16 + kk // 8 * leading
                else:
                    at += n // per_row * leading + kk // 8 * stride
                    at += kk % 8 * WIDTH[swizzle] + swizzled(kk, n % per_row // 8, swizzle) * 16
                self.put(at, matrix[k, n])


def descriptor(start: int, leading: int, stride: int, swizzle: str, base: int = 0) -> int:
    """9.7.15.5.1.2.2"""
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | base << 49 | MODE[swizzle] << 62


def d_place(thread: int, i: int) -> tuple[int, int]:
    """9.7.15.5.1.1: row and column of element i of the accumulators of a thread of the warpgroup."""
    group, within = thread % 32 >> 2, thread % 4
    row = group + 16 * (thread // 32) + (0 if i % 4 < 2 else 8)
    return row, i // 4 * 8 + within * 2 + (i & 1)


def a_place(thread: int, i: int, size: int) -> tuple[int, int]:
    """9.7.15.5.1.1: row and column of element i of a thread's A fragment."""
    group, within = thread % 32 >> 2, thread % 4
    if size == 2:  # m64k16
        row = group if i in (0, 1, 4, 5) else group + 8
        col = within * 2 + (i & 1) + (0 if i < 4 else 8)
    elif size == 4:  # m64k8
        row = group if i in (0, 2) else group + 8
        col = within + (0 if i < 2 else 4)
    else:  # m64k32
        row = group if i < 4 or 8 <= i < 12 else group + 8
        col = within * 4 + (i & 3) + (0 if i < 8 else 16)
    return row + 16 * (thread // 32), col


def fragments(matrix: np.ndarray, place, count: int) -> np.ndarray:
    """[128, bytes] of each thread's registers."""
    out = np.empty((128, count), matrix.dtype)
    for thread in range(128):
        for i in range(count):
            out[thread, i] = matrix[place(thread, i)]
    return out.view(np.uint8)


def matrix_of(raw: np.ndarray, dtype, n: int) -> np.ndarray:
    """The reverse, for the accumulators: [128, bytes] to [64, n]."""
    elements = np.ascontiguousarray(raw).view(dtype)
    out = np.empty((64, n), dtype)
    for thread in range(128):
        for i in range(n // 2):
            out[d_place(thread, i)] = elements[thread, i]
    return out


FILL = """
  .shared .align 1024 .b8 box[{size}];
  mov.u32 %r1, box;
  shl.b32 %r2, %tid, 4;
FILL:
  cvt.u64.u32 %rd1, %r2;
  add.u64 %rd1, %rd1, %arg0;
  ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd1];
  add.u32 %r7, %r1, %r2;
  st.shared.v4.b32 [%r7], {{%r3, %r4, %r5, %r6}};
  add.u32 %r2, %r2, {step};
  setp.lt.u32 %p1, %r2, {size};
  @%p1 bra FILL;
  {proxy}
  bar.sync 0;
"""
PROXY = "fence.proxy.async.shared::cta;"
MMA = "wgmma.mma_async.sync.aligned."
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def acc(count: int) -> str:
    return "{" + ", ".join(f"%acc{i}" for i in range(count)) + "}"


def run(
    code: str,
    image: np.ndarray,
    *,
    accumulators: int,
    start: np.ndarray | None = None,
    a: np.ndarray | None = None,
    threads: int = 128,
    blocks: int = 1,
    proxy: str = PROXY,
    finish: str = COMMIT + WAIT,
    **options,
) -> np.ndarray:
    """Fills shared memory, loads the accumulators (%acc0 ...) and a fragment (%a0 ..), runs the code, returns [threads,
    bytes] of the accumulators."""
    total = threads * blocks
    if start is None:
        start = np.zeros((128, 4 * accumulators), np.uint8)
    start = np.ascontiguousarray(np.tile(start, (total // 128, 1)) if len(start) < total else start)
    a = np.zeros((128, 16), np.uint8) if a is None else a
    a = np.ascontiguousarray(np.tile(a, (total // 128, 1)) if len(a) < total else a)
    out = np.zeros_like(start)
    body = [FILL.format(size=len(image), step=threads * 16, proxy=proxy)]
    body += [f"mul.wide.u32 %rd0, %gid, {4 * accumulators}; add.u64 %rd1, %arg1, %rd0;"]
    body += [f"ld.global.b32 %acc{i}, [%rd1+{4 * i}];" for i in range(accumulators)]
    body += ["mul.wide.u32 %rd2, %gid, 16; add.u64 %rd3, %arg2, %rd2;"]
    body += [f"ld.global.b32 %a{i}, [%rd3+{4 * i}];" for i in range(4)]
    body += ["setp.eq.u32 %p30, %tid, %tid; setp.ne.u32 %p31, %tid, %tid;", code, finish]
    body += ["add.u64 %rd1, %arg3, %rd0;"]
    body += [f"st.global.b32 [%rd1+{4 * i}], %acc{i};" for i in range(accumulators)]
    declarations = f".reg .b32 %acc<{accumulators}>; .reg .b32 %a<4>;"
    snippets.run(
        "\n".join(body),
        image,
        start,
        a,
        out,
        threads=threads,
        blocks=blocks,
        target=90,
        declarations=declarations,
        **options,
    )
    return out


def k_layout(swizzle: str, rows: int, size: int) -> tuple[int, int, int]:
    """(leading, stride, bytes) of a K-major tile of `rows` rows: one row of the pattern wide (two without swizzle)."""
    if swizzle == "none":
        return rows * 16 + 32 * 16, 128, 2 * (rows * 16 + 32 * 16)
    return 0, 8 * WIDTH[swizzle], rows * WIDTH[swizzle]


def mn_layout(swizzle: str, extent: int, k: int = 16) -> tuple[int, int, int]:
    if swizzle == "none":
        return extent * 16, 128, k // 8 * extent * 16
    rows = -(-extent * 2 // WIDTH[swizzle])
    return k * WIDTH[swizzle], 8 * WIDTH[swizzle], rows * k * WIDTH[swizzle]


def align(x: int) -> int:
    return -(-x // 1024) * 1024


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("swizzle", MODE)
@pytest.mark.parametrize("n", [8, 64, 256])
def test_k_major_operands_of_shared_memory(kind, swizzle, n):
    """All the k positions that fit into the pattern's row: the start address moves within it."""
    size = BYTES[kind]
    k = 32 // size
    other = {"s8": "u8", "u8": "s8", "e4m3": "e5m2", "e5m2": "e4m3"}.get(kind, kind)
    to = "s32" if kind in ("s8", "u8") else "f32"
    steps = max(WIDTH[swizzle] // 32, 1)
    raw_a, a = integers(kind, (64, k * steps))
    raw_b, b = integers(other, (n, k * steps))
    lead_a, stride_a, bytes_a = k_layout(swizzle, 64, size)
    lead_b, stride_b, bytes_b = k_layout(swizzle, n, size)
    at_b = align(bytes_a)
    image = Image(align(at_b + bytes_b))
    image.k_major(0, raw_a, swizzle, lead_a, stride_a)
    image.k_major(at_b, raw_b, swizzle, lead_b, stride_b)
    immediates = {"f16": ", 1, 1, 0, 0", "bf16": ", 1, 1, 0, 0", "s8": "", "u8": ""}.get(kind, ", 1, 1")
    code = [FENCE]
    for step in range(steps):
        da = descriptor(32 * step, lead_a, stride_a, swizzle)
        db = descriptor(at_b + 32 * step, lead_b, stride_b, swizzle)
        scale = "%p30" if step else "%p31"
        code += [f"mov.b64 %rd10, {da}; mov.b64 %rd11, {db};"]
        code += [f"{MMA}m64n{n}k{k}.{to}.{kind}.{other} {acc(n // 2)}, %rd10, %rd11, {scale}{immediates};"]
    out = run("\n".join(code), image.bytes, accumulators=n // 2)
    assert (matrix_of(out, np.int32 if to == "s32" else np.float32, n) == a @ b.T).all()


@pytest.mark.parametrize("major_a", ["k", "mn"])
@pytest.mark.parametrize("swizzle", MODE)
@pytest.mark.parametrize("n", [8, 72, 128])
def test_mn_major_operands_of_shared_memory(major_a, swizzle, n):
    """32 of k in two steps: 16 rows of the pattern further on, or in the other half of the pieces."""
    raw_a, a = integers("bf16", (64, 32))
    raw_b, b = integers("bf16", (32, n))
    lead_b, stride_b, bytes_b = mn_layout(swizzle, n, 32)
    if major_a == "mn":
        lead_a, stride_a, bytes_a = mn_layout(swizzle, 64, 32)
    else:
        lead_a, stride_a, bytes_a = k_layout("64B", 64, 2)
    at_b = align(bytes_a)
    image = Image(align(at_b + bytes_b))
    if major_a == "mn":
        image.mn_major(0, raw_a.T, swizzle, lead_a, stride_a)
    else:
        image.k_major(0, raw_a, "64B", lead_a, stride_a)
    image.mn_major(at_b, raw_b, swizzle, lead_b, stride_b)
    code = [FENCE]
    for step in range(2):
        advance = 2 * lead_b if swizzle == "none" else 2 * stride_b
        db = descriptor(at_b + step * advance, lead_b, stride_b, swizzle)
        if major_a == "mn":
            advance = 2 * lead_a if swizzle == "none" else 2 * stride_a
            da = descriptor(step * advance, lead_a, stride_a, swizzle)
        else:
            da = descriptor(step * 32, lead_a, stride_a, "64B")
        code += [f"mov.b64 %rd10, {da}; mov.b64 %rd11, {db};"]
        transposes = f"{int(major_a == 'mn')}, 1"
        code += [f"{MMA}m64n{n}k16.f32.bf16.bf16 {acc(n // 2)}, %rd10, %rd11, %p30, 1, 1, {transposes};"]
    out = run("\n".join(code), image.bytes, accumulators=n // 2)
    assert (matrix_of(out, np.float32, n) == a @ b).all()


def simple(kind="f16", n=16, k=None):
    """B in shared memory, K-major, 128-byte swizzle; A there too. (image, a, b, raw a, descriptor a, descriptor b)"""
    k = k or 32 // BYTES[kind]
    raw_a, a = integers(kind, (64, k))
    raw_b, b = integers(kind, (n, k))
    image = Image(8192 + align(n * 128))
    image.k_major(0, raw_a, "128B", 0, 1024)
    image.k_major(8192, raw_b, "128B", 0, 1024)
    return image.bytes, a, b, raw_a, descriptor(0, 0, 1024, "128B"), descriptor(8192, 0, 1024, "128B")


@pytest.mark.parametrize("kind", BYTES)
def test_a_from_registers(kind):
    size = BYTES[kind]
    n, k = 32, 32 // size
    image, a, b, raw_a, _, db = simple(kind, n)
    to = "s32" if kind in ("s8", "u8") else "f32"
    immediates = {2: ", 1, 1, 0", 4: ", 1, 1", 1: "" if to == "s32" else ", 1, 1"}[size]
    code = f"""{FENCE} mov.b64 %rd11, {db};
    {MMA}m64n{n}k{k}.{to}.{kind}.{kind} {acc(n // 2)}, {{%a0, %a1, %a2, %a3}}, %rd11, %p31{immediates};"""
    fragment = fragments(raw_a, lambda t, i: a_place(t, i, size), 16 // size)
    image[:8192] = 0
    out = run(code, image, accumulators=n // 2, a=fragment)
    assert (matrix_of(out, np.int32 if to == "s32" else np.float32, n) == a @ b.T).all()


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width(n):
    """N of every multiple of 8, with accumulators that hold something, f32 and f16."""
    image, a, b, _, da, db = simple("f16", n)
    c = RNG.integers(-9, 10, (64, n)).astype(np.float64)
    for to, dtype in (("f32", np.float32), ("f16", np.float16)):
        count = n // 2 if to == "f32" else n // 4
        code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
        {MMA}m64n{n}k16.{to}.f16.f16 {acc(count)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"""
        out = run(code, image, accumulators=count, start=fragments(c.astype(dtype), d_place, n // 2))
        assert (matrix_of(out, dtype, n) == a @ b.T + c).all()


@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_signs_and_scale_d(signs):
    image, a, b, _, da, db = simple("bf16", 16)
    c = RNG.integers(-9, 10, (64, 16)).astype(np.float32)
    for scale, kept in (("%p30", 1), ("%p31", 0), ("1", 1), ("0", 0)):
        code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
        {MMA}m64n16k16.f32.bf16.bf16 {acc(8)}, %rd10, %rd11, {scale}, {signs[0]}, {signs[1]}, 0, 0;"""
        out = run(code, image, accumulators=8, start=fragments(c, d_place, 8))
        assert (matrix_of(out, np.float32, 16) == signs[0] * signs[1] * (a @ b.T) + kept * c).all()


def test_integer_sums_wrap_or_saturate():
    image, a, b, _, da, db = simple("s8", 16)
    c = np.full((64, 16), 2**31 - 3, np.int64)
    c[32:] = -(2**31) + 3
    for flag in ("", ".satfinite"):
        code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
        {MMA}m64n16k32{flag}.s32.s8.s8 {acc(8)}, %rd10, %rd11, %p30;"""
        out = matrix_of(run(code, image, accumulators=8, start=fragments(c.astype(np.int32), d_place, 8)), np.int32, 16)
        exact = (a @ b.T).astype(np.int64) + c
        assert (out == (exact.astype(np.int32) if not flag else np.clip(exact, -(2**31), 2**31 - 1))).all()
        assert (exact != exact.astype(np.int32)).any()


def test_f16_accumulators_round_once_per_instruction():
    image, a, b, _, da, db = simple("f16", 16)
    c = RNG.uniform(-2048, 2048, (64, 16)).astype(np.float16)
    code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
    {MMA}m64n16k16.f16.f16.f16 {acc(4)}, %rd10, %rd11, %p30, 1, 1, 0, 0;
    {MMA}m64n16k16.f16.f16.f16 {acc(4)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"""
    out = matrix_of(run(code, image, accumulators=4, start=fragments(c, d_place, 8)), np.float16, 16)
    once = ((a @ b.T) + c.astype(np.float64)).astype(np.float16)
    assert (out == ((a @ b.T) + once.astype(np.float64)).astype(np.float16)).all()


def test_infinities_and_nans():
    image = Image(8192 + 2048)
    a, b = RNG.standard_normal((64, 16)).astype(np.float16), RNG.standard_normal((16, 16)).astype(np.float16)
    a[3, 5], a[40, 2], b[7, 9] = np.inf, np.nan, -np.inf
    b[0, 5] = 0
    image.k_major(0, a.view(np.uint16), "128B", 0, 1024)
    image.k_major(8192, b.view(np.uint16), "128B", 0, 1024)
    da, db = descriptor(0, 0, 1024, "128B"), descriptor(8192, 0, 1024, "128B")
    code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
    {MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"""
    got = matrix_of(run(code, image.bytes, accumulators=8), np.float32, 16)
    with np.errstate(invalid="ignore"):
        want = a.astype(np.float64) @ b.T.astype(np.float64)
    assert np.isnan(got[3, 0])
    assert np.isnan(got[40]).all()
    assert (np.isnan(got) == np.isnan(want)).all()
    assert (got[np.isinf(want)] == want[np.isinf(want)]).all()


def test_a_pattern_that_starts_elsewhere():
    """Base offset: the pattern of B starts 384 bytes after a multiple of 1024, and the descriptor says so."""
    raw_a, a = integers("f16", (64, 16))
    raw_b, b = integers("f16", (8, 16))
    image = Image(12288)
    image.k_major(0, raw_a, "128B", 0, 1024)
    image.k_major(8192 + 384, raw_b, "128B", 0, 1024)
    results = []
    for base in (0, 3):
        da, db = descriptor(0, 0, 1024, "128B"), descriptor(8192 + 384, 0, 1024, "128B", base)
        code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
        {MMA}m64n8k16.f32.f16.f16 {acc(4)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"""
        results.append(matrix_of(run(code, image.bytes, accumulators=4), np.float32, 8))
    assert (results[1] == a @ b.T).all()
    assert (results[0] != a @ b.T).any()


def pipeline(da: int, db: int, *, other: str = "", between: str = "", last: str = "", after: str = "") -> str:
    """a b into %acc, and - 2 a b, in two steps and a second group, into `other`."""
    other = other or OTHER
    return f"""
      {FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
      {MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, %p31, 1, 1, 0, 0;
      {COMMIT}
      {MMA}m64n16k16.f32.f16.f16 {other}, %rd10, %rd11, %p31, -1, 1, 0, 0;
      {MMA}m64n16k16.f32.f16.f16 {other}, %rd10, %rd11, %p30, -1, 1, 0, 0;
      {COMMIT}
      wgmma.wait_group.sync.aligned 1;
      {between}
      {last}
      {after}
    """


OTHER = "{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}"
ADD = "\n".join(f"add.f32 %acc{i}, %acc{i}, %f{i};" for i in range(8))


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_groups_complete_in_order(seed):
    """Two groups; the first one's results may be used while the second is in flight, the second's after its wait."""
    image, a, b, _, da, db = simple("f16", 16)
    double = "\n".join(f"add.f32 %acc{i}, %acc{i}, %acc{i};" for i in range(8))
    code = pipeline(da, db, between=double, last=WAIT, after=ADD)
    out = run(code, image, accumulators=8, finish="", threads=256, blocks=3, seed=seed)
    for group in range(6):
        result = matrix_of(out[128 * group : 128 * group + 128], np.float32, 16)
        assert (result == 0).all()  # 2 ab - ab - ab
    code = pipeline(da, db, last=WAIT, after=ADD)
    out = run(code, image, accumulators=8, finish="", threads=256, blocks=3, seed=seed)
    for group in range(6):
        assert (matrix_of(out[128 * group : 128 * group + 128], np.float32, 16) == -(a @ b.T)).all()


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_registers_in_flight_may_not_be_touched(seed):
    image, _, _, _, da, db = simple("f16", 16)

    def attempt(match, **parts):
        parts = {"last": WAIT} | parts
        with pytest.raises(Fault, match=match):
            run(pipeline(da, db, **parts), image, accumulators=8, finish="", seed=seed)

    attempt(r"accumulator %f3 is read while the wgmma of PTX line \d+ is in flight", between="add.f32 %f9, %f3, %f8;")
    attempt("accumulator %f5 is written while", between="mov.f32 %f5, 0f00000000;")
    attempt("accumulator %f0 is read while", last="", after="mov.b32 %r9, %f0;")
    attempt("accumulator %f2 is read while", last="wgmma.wait_group.sync.aligned 1;", after="mov.b32 %r9, %f2;")
    attempt(
        "accumulator %f7 is read while", last="", after="st.global.v2.f32 [%arg0], {%f6, %f7};".replace("%f6", "%f9")
    )
    attempt(
        "accumulator %f0 is used by another wgmma in another way while",
        between=f"{MMA}m64n8k16.f32.f16.f16 {{%f0, %f1, %f2, %f3}}, %rd10, %rd11, %p31, 1, 1, 0, 0;",
    )
    attempt(
        "accumulator %f0 is used by another wgmma in another way while",
        between=f"{MMA}m64n8k16.f32.f16.f16 {{%f9, %f10, %f11, %f12}}, {{%f0, %f1, %f2, %f3}}, %rd11, %p31, 1, 1, 0;",
    )
    # what the same instruction does in threads of another warpgroup is their own affair
    body = pipeline(da, db, last=WAIT, after=ADD)
    alone = "setp.ge.u32 %p3, %tid, 128; @%p3 bra AWAY;" + body + "AWAY: mov.f32 %f3, %f4;"
    run(alone, image, accumulators=8, finish="", threads=256, seed=seed)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_fragment_in_flight(seed):
    image, a, b, raw_a, _, db = simple("f16", 16)
    mma = f"{MMA}m64n16k16.f32.f16.f16 {acc(8)}, {{%a0, %a1, %a2, %a3}}, %rd11, %p30, 1, 1, 0;"
    start = f"{FENCE} mov.b64 %rd11, {db};"
    fragment = fragments(raw_a, lambda t, i: a_place(t, i, 2), 8)
    out = run(start + mma + mma, image, accumulators=8, a=fragment, seed=seed)
    assert (matrix_of(out, np.float32, 16) == 2 * (a @ b.T)).all()
    with pytest.raises(Fault, match="A fragment %a2 is written while the wgmma of PTX line"):
        run(start + mma + "mov.b32 %a2, 0;" + COMMIT + WAIT, image, accumulators=8, a=fragment, seed=seed)
    out = run(start + mma + COMMIT + WAIT + "mov.b32 %a2, 0;", image, accumulators=8, a=fragment, seed=seed, finish="")
    assert (matrix_of(out, np.float32, 16) == a @ b.T).all()


def test_wgmma_fence():
    image, _, _, _, da, db = simple("f16", 16)
    descriptors = f"mov.b64 %rd10, {da}; mov.b64 %rd11, {db};"
    mma = f"{MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"
    first = f"{MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, %p31, 1, 1, 0, 0;"
    narrow = f"{MMA}m64n8k16.f32.f16.f16 {acc(4)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"
    rs = f"{MMA}m64n16k16.f32.f16.f16 {acc(8)}, {{%a0, %a1, %a2, %a3}}, %rd11, %p30, 1, 1, 0;"
    done = COMMIT + WAIT

    def attempt(match, code):
        with pytest.raises(Hazard, match=match):
            run(descriptors + code, image, accumulators=8)

    attempt(r"warpgroup 0 of block \(0, 0, 0\) has executed no wgmma.fence before its first", mma)
    attempt(
        r"wgmma of shape m64n16k16 uses accumulator %acc3, accessed by PTX line \d+ `mul.f32 %acc3, %f1, %f2`, without",
        FENCE + "mul.f32 %acc3, %f1, %f2;" + mma,
    )
    attempt("uses accumulator %acc3, accessed by", FENCE + "neg.f32 %f9, %acc3;" + mma)
    attempt("uses accumulator %acc3, accessed by", FENCE + "mul.f32 %acc3, %f1, %f2;" + first)
    attempt("uses accumulator %acc1, accessed by", FENCE + mma + done + "neg.f32 %f9, %acc1;" + mma)
    attempt("uses A fragment %a1, accessed by", FENCE + "xor.b32 %a1, %a1, 1;" + rs)
    # What a mov brings was made before the fence, or after it.
    attempt(
        "uses accumulator %acc3, accessed by",
        FENCE + "mul.f32 %f3, %f1, %f2; mov.f32 %f4, %f3; mov.f32 %acc3, %f4;" + mma,
    )
    attempt("uses A fragment %a1, accessed by", FENCE + "add.u32 %r9, %r8, 1; mov.b32 %a1, %r9;" + rs)
    attempt(
        "m64n8k16 uses accumulator %acc0, %acc1, %acc2, %acc3, accessed by a wgmma of shape m64n16k16",
        FENCE + mma + done + narrow,
    )
    reused = f"{MMA}m64n16k16.f32.f16.f16 {OTHER}, {{%acc0, %acc1, %acc2, %acc3}}, %rd11, %p31, 1, 1, 0;"
    attempt(r"uses A fragment %acc0, .* accessed by a wgmma of shape m64n16k16", FENCE + mma + done + reused)
    for good in (
        FENCE + mma + done + FENCE + reused,
        FENCE + mma + mma,
        FENCE + mma + done + mma,
        FENCE + mma + done + "neg.f32 %f9, %acc1;" + FENCE + mma,
        FENCE + mma + done + FENCE + narrow,
        FENCE + rs + "mov.b32 %r9, 1;" + rs,
        "xor.b32 %a1, %a1, 1; mul.f32 %acc3, %f1, %f2;" + FENCE + rs,
        "mul.f32 %f3, %f1, %f2;" + FENCE + "mov.f32 %acc3, %f3; mov.b32 %acc2, 0;" + mma,
        "mul.f32 %f3, %f1, %f2; mov.f32 %f4, %f3;" + FENCE + "mov.b32 %acc3, %f4;" + mma,
    ):
        run(descriptors + good, image, accumulators=8)


def test_generic_stores_need_a_proxy_fence():
    image, _, _, _, da, db = simple("f16", 16)
    code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
    {MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"""
    with pytest.raises(Hazard, match=r"through the asynchronous proxy \(TMA, wgmma\) reads .* no fence.proxy.async"):
        run(code, image, accumulators=8, proxy="")
    # one warp's fence does nothing for the others' stores
    with pytest.raises(Hazard, match=r"no fence\.proxy\.async"):
        run(code, image, accumulators=8, proxy="setp.lt.u32 %p5, %tid, 32; @%p5 fence.proxy.async;")
    # a fence of the reader after the barrier holds as well
    run("fence.proxy.async;" + code, image, accumulators=8, proxy="")
    # all four warps must know of the stores
    late = "setp.lt.u32 %p5, %tid, 96; @%p5 fence.proxy.async;"
    with pytest.raises(Hazard, match=r"no fence\.proxy\.async"):
        run(late + code, image, accumulators=8, proxy="")


@pytest.mark.parametrize(("operand", "seed"), [(0, None), (0, 4), *((8192, seed) for seed in (None, 0, 1, 2, 3))])
def test_shared_memory_belongs_to_wgmma_until_the_wait(operand, seed):
    image, a, b, _, da, db = simple("f16", 16)
    code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
    {MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, %p30, 1, 1, 0, 0;
    {COMMIT}"""
    overwrite = f"st.shared.b32 [%r1+{operand}], %r1;"
    one = "setp.eq.u32 %p5, %tid, 0; @%p5 " + overwrite
    with pytest.raises(Hazard, match=r"writes shared memory .* the read by wgmma of warpgroup 0"):
        run(code + one + WAIT, image, accumulators=8, finish="", seed=seed)
    out = run(code + WAIT + one, image, accumulators=8, finish="", seed=seed)
    assert (matrix_of(out, np.float32, 16) == a @ b.T).all()
    # Another warpgroup learns of it through a barrier.
    other = "setp.eq.u32 %p5, %tid, 128; @%p5 " + overwrite
    with pytest.raises(Hazard, match=r"writes shared memory .* the read by wgmma of warpgroup [01]"):
        run(code + WAIT + other, image, accumulators=8, finish="", threads=256, seed=seed)
    run(code + WAIT + "bar.sync 0;" + other, image, accumulators=8, finish="", threads=256, seed=seed)
    with pytest.raises(Hazard, match=r"writes shared memory .* the read by wgmma of warpgroup [01]"):
        run(code + "bar.sync 0;" + other + WAIT, image, accumulators=8, finish="", threads=256, seed=seed)


def test_shared_memory_never_written_or_not_there():
    image, _, _, _, da, db = simple("f16", 16)
    code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, B;
    {MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"""
    beyond = descriptor(8192, 0, 2048, "128B")
    with pytest.raises(
        Fault, match=r"matrix descriptor 0x\w+ reaches address 0x2[0-9a-f]+ of .* which has 10240 bytes"
    ):
        run(code.replace("B;", f"{beyond};"), image, accumulators=8)
    body = f".shared .align 1024 .b8 box[10240]; mov.u32 %r1, box; setp.eq.u32 %p30, %tid, %tid; {code}"
    with pytest.raises(Hazard, match="reads shared memory at 0x2000 of block 0 which was never written"):
        snippets.run(body.replace("B;", f"{db};"), threads=128, target=90, declarations=".reg .b32 %acc<8>;")


def test_the_warpgroup_comes_as_a_whole():
    image, _, _, _, da, db = simple("f16", 16)
    code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
    {MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"""
    with pytest.raises(Deadlock, match=r"a warpgroup executes it together; not there: warps 3"):
        run("setp.ge.u32 %p5, %tid, 96; @%p5 bra SKIP;" + code + "SKIP: bar.sync 0;", image, accumulators=8, finish="")
    with pytest.raises(Fault, match=r"divergent collective: thread 5 .* has exited"):
        run("setp.eq.u32 %p5, %tid, 5; @%p5 exit;" + code, image, accumulators=8)
    with pytest.raises(Fault, match="needs a warpgroup of four whole warps"):
        run(
            code,
            image,
            accumulators=8,
            threads=192,
            start=np.zeros((192, 32), np.uint8),
            a=np.zeros((192, 16), np.uint8),
        )
    # A block of five warps whose first four are the warpgroup.
    zero = {"start": np.zeros((160, 32), np.uint8), "a": np.zeros((160, 16), np.uint8)}
    alone = "setp.ge.u32 %p5, %tid, 128; @%p5 bra SKIP;" + code + COMMIT + WAIT + "SKIP:"
    for seed in (None, 1, 2):
        run(alone, image, accumulators=8, threads=160, finish="", seed=seed, **zero)


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_warps_that_come_one_after_another(seed):
    image, a, b, _, da, db = simple("f16", 16)
    wander = """
      shr.u32 %r8, %tid, 5;
    AGAIN:
      setp.eq.u32 %p6, %r8, 0;
      @%p6 bra THERE;
      sub.u32 %r8, %r8, 1;
      bra AGAIN;
    THERE:
    """
    code = f"""{wander} {FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
    {MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"""
    out = run(code, image, accumulators=8, threads=256, blocks=2, seed=seed)
    for group in range(4):
        assert (matrix_of(out[128 * group : 128 * group + 128], np.float32, 16) == a @ b.T).all()


@pytest.mark.parametrize("seed", [None, *range(4)])
def test_warpgroups_in_different_states_meet(seed):
    """The second warpgroup of each block skips the first product; the blocks differ in scale-d."""
    image, a, b, _, da, db = simple("f16", 16)
    c = RNG.integers(-9, 10, (64, 16)).astype(np.float32)
    mma = f"{MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, SCALE, 1, 1, 0, 0;"
    code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
      setp.ge.u32 %p5, %tid, 128;
      @%p5 bra SKIP;
      {mma.replace("SCALE", "%p31")}
    SKIP:
      mov.u32 %r8, %ctaid.x; setp.ne.u32 %p6, %r8, 1;
      {mma.replace("SCALE", "%p6")}"""
    start = fragments(c, d_place, 8)
    out = run(code, image, accumulators=8, threads=256, blocks=3, start=start, seed=seed)
    product = a @ b.T
    for group in range(6):
        result = matrix_of(out[128 * group : 128 * group + 128], np.float32, 16)
        before = 0 if group // 2 == 1 else c if group % 2 else product
        assert (result == product + before).all()


def test_operands_must_be_the_same_in_all_threads():
    image, _, _, _, da, db = simple("f16", 16)
    code = f"""{FENCE} mov.b64 %rd10, {da}; mov.b64 %rd11, {db}; setp.ne.u32 %p5, %tid, 77; CHANGE
    {MMA}m64n16k16.f32.f16.f16 {acc(8)}, %rd10, %rd11, %p30, 1, 1, 0, 0;"""
    for change, match in (
        ("@!%p5 add.u64 %rd10, %rd10, 2;", "A's matrix descriptor differs between"),
        ("@!%p5 add.u64 %rd11, %rd11, 2;", "B's matrix descriptor differs between"),
        ("mov.pred %p30, %p5;", "scale-d differs between"),
    ):
        with pytest.raises(Fault, match=match) as error:
            run(code.replace("CHANGE", change), image, accumulators=8)
        assert "thread 77 " in str(error.value)
    with pytest.raises(Fault, match="has reserved bits set"):
        run(code.replace("CHANGE", "or.b64 %rd11, %rd11, 0x8000;"), image, accumulators=8)


@pytest.mark.parametrize(
    "form",
    [
        "m64n16k16.f32.f16.bf16 D8, %rd10, %rd11, %p30, 1, 1, 0, 0",
        "m64n16k8.f32.f16.f16 D8, %rd10, %rd11, %p30, 1, 1, 0, 0",
        "m64n12k16.f32.f16.f16 D6, %rd10, %rd11, %p30, 1, 1, 0, 0",
        "m64n264k16.f32.f16.f16 D132, %rd10, %rd11, %p30, 1, 1, 0, 0",
        "m64n40k32.s32.s8.s8 D20, %rd10, %rd11, %p30",
        "m64n16k16.f16.bf16.bf16 D4, %rd10, %rd11, %p30, 1, 1, 0, 0",
        "m64n16k16.f32.f16.f16 D8, %rd10, %rd11, %p30, 1, 2, 0, 0",
        "m64n16k16.f32.f16.f16 D8, %rd10, %rd11, %p30, 1, 1, 0, 2",
        "m64n16k16.f32.f16.f16 D8, %rd10, %rd11, %p30, 1, 1, 0",
        "m64n16k8.f32.tf32.tf32 D8, %rd10, %rd11, %p30, 1, 1, 0, 0",
        "m64n16k16.f32.f16.f16 D4, %rd10, %rd11, %p30, 1, 1, 0, 0",
        "m64n16k16.satfinite.f32.f16.f16 D8, %rd10, %rd11, %p30, 1, 1, 0, 0",
        "sp.m64n16k32.f32.f16.f16 D8, %rd10, %rd11, %p30, 1, 1, 0, 0",
    ],
)
def test_other_forms_are_refused(form):
    shape, d, rest = form.split(" ", 2)
    code = f"{MMA}{shape} {acc(int(d.strip('D,')))}, {rest};"
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+: wgmma\.mma_async"):
        snippets.run(code, threads=128, target=90, declarations=".reg .b32 %acc<132>;")


def test_without_the_checker_results_are_the_same():
    image, a, b, _, da, db = simple("f16", 64)
    code = f"""mov.b64 %rd10, {da}; mov.b64 %rd11, {db};
    {MMA}m64n64k16.f32.f16.f16 {acc(32)}, %rd10, %rd11, %p31, 1, 1, 0, 0;"""
    out = run(code, image, accumulators=32, check=False)
    assert (matrix_of(out, np.float32, 64) == a @ b.T).all()
    with pytest.raises(ptxsim.Fault, match="in flight"):
        run(code + "mov.b32 %r9, %acc1;", image, accumulators=32, check=False)
