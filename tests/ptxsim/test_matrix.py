"""mma, ldmatrix, stmatrix and movmatrix against the fragment layouts of the PTX ISA, written out element by element."""

import numpy as np
import pytest
import torch

from ptxsim import Fault, Hazard, UnsupportedInstruction, snippets

RNG = np.random.default_rng(9)

# -- the manual's layouts: (register, bits from, lane) of an element, each function from its own section. `i` numbers a
# lane's elements as the manual does; g = groupID = lane >> 2, t = threadID_in_group = lane % 4.


def a_f16_k16(lane, i):  # 9.7.14.5.8, m16n8k16 .f16/.bf16, matrix A
    g, t = lane >> 2, lane % 4
    row = g if 0 <= i < 2 or 4 <= i < 6 else g + 8
    col = t * 2 + (i & 1) if i < 4 else t * 2 + (i & 1) + 8
    return row, col


def b_f16_k16(lane, i):
    g, t = lane >> 2, lane % 4
    return t * 2 + (i & 1) if i < 2 else t * 2 + (i & 1) + 8, g


def a_f16_k8(lane, i):  # 9.7.14.5.7, m16n8k8 .f16/.bf16
    g, t = lane >> 2, lane % 4
    return g if i < 2 else g + 8, t * 2 + (i & 1)


def b_f16_k8(lane, i):
    g, t = lane >> 2, lane % 4
    return t * 2 + i, g


def a_tf32_k8(lane, i):  # 9.7.14.5.7, m16n8k8 .tf32
    g, t = lane >> 2, lane % 4
    return {0: (g, t), 1: (g + 8, t), 2: (g, t + 4), 3: (g + 8, t + 4)}[i]


def b_tf32_k8(lane, i):
    g, t = lane >> 2, lane % 4
    return t if i == 0 else t + 4, g


def a_tf32_k4(lane, i):  # 9.7.14.5.6, m16n8k4 .tf32
    g, t = lane >> 2, lane % 4
    return g if i == 0 else g + 8, t


def b_k4(lane, i):
    return lane % 4, lane >> 2


def a_f64_k8(lane, i):  # 9.7.14.5.7, m16n8k8 .f64
    g, t = lane >> 2, lane % 4
    return g if i in (0, 2) else g + 8, t if i < 2 else t + 4


def a_f64_k16(lane, i):  # 9.7.14.5.8, m16n8k16 .f64
    g, t = lane >> 2, lane % 4
    return g if i % 2 == 0 else g + 8, i * 2 + t if i % 2 == 0 else i * 2 - 2 + t


def b_f64_k16(lane, i):
    return lane % 4 + i * 4, lane >> 2


def a_f64_m8(lane, i):  # 9.7.14.5.2, m8n8k4 .f64
    return lane >> 2, lane % 4


def a_s8_k16(lane, i):  # 9.7.14.5.9, m16n8k16 .u8/.s8
    g, t = lane >> 2, lane % 4
    return g if i < 4 else g + 8, t * 4 + (i & 3)


def b_s8_k16(lane, i):
    return lane % 4 * 4 + i, lane >> 2


def a_s8_k32(lane, i):  # 9.7.14.5.10, m16n8k32 .s8/.u8/.e4m3/.e5m2
    g, t = lane >> 2, lane % 4
    row = g if 0 <= i < 4 or 8 <= i < 12 else g + 8
    return row, t * 4 + (i & 3) if i < 8 else t * 4 + (i & 3) + 16


def b_s8_k32(lane, i):
    g, t = lane >> 2, lane % 4
    return t * 4 + (i & 3) if i < 4 else t * 4 + (i & 3) + 16, g


def c_m16(lane, i):  # all m16n8 shapes
    g, t = lane >> 2, lane % 4
    return g if i < 2 else g + 8, t * 2 + (i & 1)


def c_m8(lane, i):
    return lane >> 2, lane % 4 * 2 + (i & 1)


SHAPES = {
    ("m16n8k16", 2): (a_f16_k16, 8, b_f16_k16, 4),
    ("m16n8k8", 2): (a_f16_k8, 4, b_f16_k8, 2),
    ("m16n8k8", 4): (a_tf32_k8, 4, b_tf32_k8, 2),
    ("m16n8k4", 4): (a_tf32_k4, 2, b_k4, 1),
    ("m16n8k4", 8): (a_tf32_k4, 2, b_k4, 1),
    ("m16n8k8", 8): (a_f64_k8, 4, b_tf32_k8, 2),
    ("m16n8k16", 8): (a_f64_k16, 8, b_f64_k16, 4),
    ("m8n8k4", 8): (a_f64_m8, 1, b_k4, 1),
    ("m16n8k16", 1): (a_s8_k16, 8, b_s8_k16, 4),
    ("m16n8k32", 1): (a_s8_k32, 16, b_s8_k32, 8),
}
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "f64": 8, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1, "f32": 4, "s32": 4}
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def random_elements(kind: str, shape) -> tuple[np.ndarray, np.ndarray]:
    """Raw bits and values in f64."""
    if kind in ("s8", "u8"):
        raw = RNG.integers(0, 256, shape, dtype=np.uint8)
        return raw, (raw.view(np.int8) if kind == "s8" else raw).astype(np.float64)
    x = RNG.standard_normal(shape)
    if kind == "f64":
        return x.view(np.uint64), x
    if kind == "tf32":  # the low 13 bits of the register don't count
        raw = x.astype(np.float32).view(np.uint32)
        return raw, (raw >> 13 << 13).view(np.float32).astype(np.float64)
    t = torch.from_numpy(x).to(TORCH[kind])
    raw = t.view(torch.uint8 if BYTES[kind] == 1 else torch.int16).numpy()
    return raw.view(np.uint8 if BYTES[kind] == 1 else np.uint16), t.double().numpy()


def to_registers(matrices: np.ndarray, layout, count: int) -> np.ndarray:
    """[warps, rows, columns] of raw elements to [lanes, bytes of the lane's registers]."""
    warps = len(matrices)
    out = np.empty((warps * 32, count), matrices.dtype)
    for lane in range(warps * 32):
        for i in range(count):
            out[lane, i] = matrices[lane // 32][layout(lane % 32, i)]
    return out.view(np.uint8).reshape(warps * 32, -1)


def from_registers(raw: np.ndarray, dtype, layout, count: int, rows: int) -> np.ndarray:
    elements = np.ascontiguousarray(raw).view(dtype)
    out = np.empty((len(raw) // 32, rows, 8), dtype)
    for lane in range(len(raw)):
        for i in range(count):
            out[lane // 32][layout(lane % 32, i)] = elements[lane, i]
    return out


def run_mma(name: str, a, b, c, d_bytes: int, *, wide=False, threads=None, guard="", **options) -> np.ndarray:
    """`a`, `b`, `c`: [lanes, bytes]; returns [lanes, d_bytes]."""
    lanes = len(a)
    size = 8 if wide else 4
    kind, letter = ("b64", "rd") if wide else ("b32", "r")
    body, vectors, number = ["mov.u32 %r120, %gid;"], [], 10
    for n, x in enumerate((a, b, c)):
        body += [f"mul.wide.u32 %rd0, %gid, {x.shape[1]};", f"add.u64 %rd1, %arg{n}, %rd0;"]
        bits = 4 if n == 2 and not wide else size
        names = [f"%{letter}{number + i}" for i in range(x.shape[1] // bits)]
        body += [f"ld.global.{kind} {reg}, [%rd1+{bits * i}];" for i, reg in enumerate(names)]
        vectors.append("{" + ", ".join(names) + "}")
        number += len(names)
    names = [f"%{letter}{number + i}" for i in range(d_bytes // size)]
    body += [f"mov.{kind} {reg}, 0;" for reg in names]
    body += [f"{guard}{name} {{{', '.join(names)}}}, {', '.join(vectors)};"]
    body += [f"mul.wide.u32 %rd0, %gid, {d_bytes};", "add.u64 %rd1, %arg3, %rd0;"]
    body += [f"st.global.{kind} [%rd1+{size * i}], {reg};" for i, reg in enumerate(names)]
    out = np.zeros((lanes, d_bytes), np.uint8)
    threads = threads or min(lanes, 128)
    arrays = [np.ascontiguousarray(x) for x in (a, b, c)]
    snippets.run("\n".join(body), *arrays, out, threads=threads, blocks=lanes // threads, **options)
    return out


CASES = [
    ("m16n8k16", "f32", "f16", "f16", "f32"),
    ("m16n8k16", "f32", "bf16", "bf16", "f32"),
    ("m16n8k16", "f16", "f16", "f16", "f16"),
    ("m16n8k16", "f32", "f16", "f16", "f16"),
    ("m16n8k16", "f16", "f16", "f16", "f32"),
    ("m16n8k8", "f32", "f16", "f16", "f32"),
    ("m16n8k8", "f16", "f16", "f16", "f16"),
    ("m16n8k8", "f32", "bf16", "bf16", "f32"),
    ("m16n8k8", "f32", "tf32", "tf32", "f32"),
    ("m16n8k4", "f32", "tf32", "tf32", "f32"),
    ("m16n8k32", "f32", "e4m3", "e5m2", "f32"),
    ("m16n8k32", "f16", "e5m2", "e4m3", "f16"),
    ("m16n8k16", "s32", "s8", "u8", "s32"),
    ("m16n8k32", "s32", "u8", "s8", "s32"),
    ("m16n8k32", "s32", "s8", "s8", "s32"),
    ("m8n8k4", "f64", "f64", "f64", "f64"),
    ("m16n8k4", "f64", "f64", "f64", "f64"),
    ("m16n8k8", "f64", "f64", "f64", "f64"),
    ("m16n8k16", "f64", "f64", "f64", "f64"),
]


@pytest.mark.parametrize("case", CASES, ids=".".join)
def test_mma(case):
    shape, to, kind_a, kind_b, of = case
    layout_a, count_a, layout_b, count_b = SHAPES[shape, BYTES[kind_a]]
    rows, k, warps = (8 if shape.startswith("m8") else 16), int(shape.rpartition("k")[2]), 4
    raw_a, a = random_elements(kind_a, (warps, rows, k))
    raw_b, b = random_elements(kind_b, (warps, k, 8))
    dtypes = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "s32": np.int32}
    if of == "s32":
        c = RNG.integers(-(2**31), 2**31, (warps, rows, 8), dtype=np.int64).astype(np.int32)
        c[:, :4], c[:, 4:8] = 2**31 - 1, -(2**31)
    else:
        c = RNG.standard_normal((warps, rows, 8)).astype(dtypes[of])
    layout_c, count_c = (c_m8, 2) if rows == 8 else (c_m16, 4)
    name = f"mma.sync.aligned.{shape}.row.col.{to}.{kind_a}.{kind_b}.{of}"
    fragments = (
        to_registers(raw_a, layout_a, count_a),
        to_registers(raw_b, layout_b, count_b),
        to_registers(c, layout_c, count_c),
    )
    out = run_mma(name, *fragments, count_c * np.dtype(dtypes[to]).itemsize, wide=to == "f64", target=90)
    got = from_registers(out, dtypes[to], layout_c, count_c, rows)
    exact = a @ b + c.astype(np.float64)
    if to == "s32":
        assert (got == (a @ b).astype(np.int64).astype(np.int32) + c).all()  # wraps
        saturated = run_mma(name.replace("col.", "col.satfinite."), *fragments, count_c * 4, target=90)
        clipped = np.clip(exact, -(2**31), 2**31 - 1)
        assert (from_registers(saturated, np.int32, layout_c, count_c, rows) == clipped).all()
        assert (clipped != exact).any()
        return
    # Sums of k + 1 terms, each rounded at most once in the type of the sum, and once in that of the result.
    scale = np.abs(a) @ np.abs(b) + np.abs(c.astype(np.float64))
    epsilon = np.finfo(np.float64 if to == "f64" else np.float32).eps
    bound = scale * (k + 1) * epsilon + (np.abs(exact) * 2.0**-11 + 2.0**-25) * (to == "f16")
    assert (np.abs(got.astype(np.float64) - exact) <= bound).all()


def test_mma_of_small_integers_is_exact():
    """Every element of every operand matters, and lands where it should: no rounding can hide a swap."""
    for shape, kind in (("m16n8k16", "bf16"), ("m16n8k16", "f16"), ("m16n8k8", "tf32")):
        layout_a, count_a, layout_b, count_b = SHAPES[shape, BYTES[kind]]
        k = int(shape.rpartition("k")[2])
        a, b = (
            RNG.integers(-8, 9, (2, 8, 16, k)).astype(np.float64)[0],
            RNG.integers(-8, 9, (8, k, 8)).astype(np.float64),
        )
        c = RNG.integers(-99, 99, (8, 16, 8)).astype(np.float32)

        def raw(x, kind=kind):
            if kind == "tf32":
                return x.astype(np.float32).view(np.uint32)
            return torch.from_numpy(x).to(TORCH[kind]).view(torch.int16).numpy()

        out = run_mma(
            f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32",
            to_registers(raw(a), layout_a, count_a),
            to_registers(raw(b), layout_b, count_b),
            to_registers(c, c_m16, 4),
            16,
        )
        assert (from_registers(out, np.float32, c_m16, 4, 16) == a @ b + c).all()


def test_mma_of_infinities_and_nans():
    a = np.zeros((1, 16, 16))
    b = RNG.standard_normal((1, 16, 8)).astype(np.float16).astype(np.float64)
    a[0, 3, 5], a[0, 4, 2], a[0, 6] = np.inf, np.nan, 65504
    b[0, 5, 1], b[0, 7, 2], b[0, :, 3] = 0, -np.inf, 32768
    fragments = [
        to_registers(x.astype(np.float16).view(np.uint16), layout, n)
        for x, layout, n in ((a, a_f16_k16, 8), (b, b_f16_k16, 4))
    ]
    c = to_registers(np.zeros((1, 16, 8), np.float32), c_m16, 4)
    out = run_mma("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", *fragments, c, 16)
    got = from_registers(out, np.float32, c_m16, 4, 16)[0]
    with np.errstate(invalid="ignore"):
        want = (a @ b)[0]
    assert np.isnan(got[3, 1])
    assert np.isnan(got[4]).all()
    assert got[6, 3] == 16 * 65504.0 * 32768  # beyond f16, not beyond the accumulator
    assert (np.isnan(got) == np.isnan(want)).all()
    assert (np.isinf(got) == np.isinf(want)).all()
    assert (np.sign(got[np.isinf(got)]) == np.sign(want[np.isinf(want)])).all()


def test_mma_under_a_mask_of_warps():
    a, b, c = (RNG.integers(0, 2**14, (128, n), dtype=np.uint32).view(np.uint8) for n in (4, 2, 4))
    name = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    every = run_mma(name, a, b, c, 16)
    some = run_mma("shr.u32 %r1, %tid, 5; and.b32 %r1, %r1, 1; setp.eq.u32 %p1, %r1, 1;\n@%p1 " + name, a, b, c, 16)
    chosen = np.arange(128) // 32 % 2 == 1
    assert (some[chosen] == every[chosen]).all()
    assert (some[~chosen] == 0).all()


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_fragments_are_not_remembered_wrongly(seed):
    """A register of A changes between two mma, in some warps; two halves of the warps take turns."""
    a, b, c = (RNG.integers(0, 2**14, (128, n), dtype=np.uint32).view(np.uint8) for n in (4, 2, 4))
    name = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    step = "{%r60, %r61, %r62, %r63}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r16, %r17, %r18, %r19};"
    changed = f"{name} {step} setp.ge.u32 %p1, %tid, 64; @%p1 xor.b32 %r12, %r12, 1023; {name}"
    got = run_mma(changed, a, b, c, 16, seed=seed)
    want = a.copy().view(np.uint32)
    want[64:, 2] ^= 1023
    assert (got == run_mma(name, want.view(np.uint8), b, c, 16)).all()
    assert (got != run_mma(name, a, b, c, 16)).any()
    halves = f"shr.u32 %r1, %tid, 5; and.b32 %r1, %r1, 1; setp.eq.u32 %p1, %r1, 1; @!%p1 {name} {step} @%p1 {name}"
    odd = np.arange(128) // 32 % 2 == 1
    assert (run_mma(halves, a, b, c, 16, seed=seed)[odd] == run_mma(name, a, b, c, 16)[odd]).all()


def test_mma_needs_whole_warps():
    fragments = [np.zeros((64, n), np.uint8) for n in (16, 8, 16)]
    name = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    with pytest.raises(Fault, match=r"divergent collective: thread 7 .* has exited"):
        run_mma("setp.eq.u32 %p1, %tid, 7; @%p1 exit; " + name, *fragments, 16)
    with pytest.raises(Fault, match="needs warps of 32 threads, but warp 1 of block"):
        run_mma(name, *(f[:48] for f in fragments), 16)


@pytest.mark.parametrize(
    "name",
    [
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32",
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.kind.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    ],
)
def test_other_mma_is_refused(name):
    fragments = [np.zeros((32, n), np.uint8) for n in (16, 8, 16)]
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+: mma\."):
        run_mma(name, *fragments, 16)


# -- ldmatrix (9.7.14.5.15)


def load_matrices(count: int, trans: str, offsets: np.ndarray, *, space=".shared", setup=None, **options) -> np.ndarray:
    """ldmatrix from a buffer of 4096 bytes of shared memory that holds the numbers 0, 1, ... in 16 bits; `offsets`: one
    per lane. Returns [count, lanes, 2]."""
    lanes = len(offsets)
    names = ", ".join(f"%r{20 + i}" for i in range(count))
    init = """
      mov.u32 %r0, %tid;
    FILL:
      shl.b32 %r2, %r0, 1; add.u32 %r3, %r2, 1; shl.b32 %r3, %r3, 16; or.b32 %r2, %r2, %r3;
      shl.b32 %r4, %r0, 2; add.u32 %r4, %r4, %r1;
      st.shared.b32 [%r4], %r2;
      add.u32 %r0, %r0, %ntid;
      setp.lt.u32 %p1, %r0, 1024;
      @%p1 bra FILL;
      bar.sync 0;
    """
    address, register = ("add.u32 %r6, %r1, %r5;", "%r6")
    if space == "":
        address += "cvt.u64.u32 %rd5, %r6; cvta.shared.u64 %rd5, %rd5;"
        register = "%rd5"
    body = f"""
      .shared .align 128 .b8 box[4096];
      mov.u32 %r1, box;
      {init.replace("%ntid", str(lanes)) if setup is None else setup}
      mul.wide.u32 %rd0, %tid, 4; add.u64 %rd1, %arg0, %rd0; ld.global.b32 %r5, [%rd1];
      {address}
      ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16 {{{names}}}, [{register}];
    """
    for i in range(count):
        body += f"add.u64 %rd1, %arg1, %rd0; st.global.b32 [%rd1+{4 * lanes * i}], %r{20 + i};\n"
    out = np.zeros((count, lanes), np.uint32)
    report = snippets.run(body, np.ascontiguousarray(offsets, np.uint32), out, threads=lanes, **options)
    return out.view(np.uint16).reshape(count, lanes, 2), report


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("space", [".shared", ".shared::cta", ""])
def test_ldmatrix(count, trans, space):
    offsets = RNG.permutation(256)[:96] * 16
    # Lanes beyond the matrices' rows may hold anything.
    used = np.arange(96) % 32 < 8 * count
    got, _ = load_matrices(count, trans, np.where(used, offsets, 0xFFFF1), space=space)
    for warp in range(3):
        for i in range(count):
            matrix = np.empty((8, 8), np.uint16)
            for r in range(8):
                matrix[r] = offsets[warp * 32 + 8 * i + r] // 2 + np.arange(8)
            if trans:
                matrix = matrix.T
            for lane in range(32):
                assert (got[i, warp * 32 + lane] == matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]).all()


def test_ldmatrix_checks_its_rows():
    good = np.arange(32) * 16
    with pytest.raises(Fault, match=r"misaligned access: address 0x8 [^\n]*\n[^\n]*thread 5 "):
        load_matrices(4, "", np.where(np.arange(32) == 5, 8, good))
    with pytest.raises(Fault, match="16-byte access at 0x1000 of shared memory, which has 4096 bytes"):
        load_matrices(2, "", np.where(np.arange(32) == 15, 4096, good))
    with pytest.raises(Fault, match="is not in shared memory"):
        snippets.run("ldmatrix.sync.aligned.m8n8.x1.b16 {%r1}, [%arg0];", np.zeros(64, np.uint32))
    with pytest.raises(Hazard, match=r"reads shared memory at 0x30 .* which was never written"):
        load_matrices(
            1,
            "",
            good,
            setup="setp.lt.u32 %p1, %tid, 3; shl.b32 %r2, %tid, 4; add.u32 %r3, %r1, %r2;"
            "@%p1 st.shared.v4.b32 [%r3], {%r2, %r2, %r2, %r2}; bar.sync 0;",
        )
    with pytest.raises(Hazard, match="nothing orders it after a store by thread"):
        load_matrices(
            4,
            "",
            good,
            setup="shl.b32 %r2, %tid, 4; xor.b32 %r2, %r2, 16; add.u32 %r3, %r1, %r2;"
            "st.shared.v4.b32 [%r3], {%r2, %r2, %r2, %r2};",
        )


def test_ldmatrix_counts_bank_conflicts():
    """8 rows of 16 bytes go in one turn if their banks differ: rows 16 bytes apart, or swizzled rows of 128."""
    lane = np.arange(32)
    fill = load_matrices(4, "", lane * 16)[1].bank_conflicts
    assert fill == 0
    row, chunk = lane % 8, lane // 8
    assert load_matrices(4, "", row * 128 + chunk * 16)[1].bank_conflicts == 4 * 7
    assert load_matrices(4, "", (7 - row) * 128 + chunk * 16)[1].bank_conflicts == 4 * 7
    assert load_matrices(4, "", row * 128 + (chunk ^ row) * 16)[1].bank_conflicts == 0
    assert load_matrices(2, "", row * 64 + chunk % 2 * 16)[1].bank_conflicts == 2 * 3
    assert load_matrices(4, "", chunk * 16)[1].bank_conflicts == 0  # one row for all
    warps = np.arange(128)
    report = load_matrices(4, "", warps // 32 * 1024 + warps % 8 * 128 + warps % 32 // 8 * 16)[1]
    assert report.bank_conflicts == 4 * 4 * 7
    backwards = 4095 - 15 - (warps // 32 * 1024 + warps % 8 * 128 + warps % 32 // 8 * 16)
    for seed in range(4):
        assert load_matrices(4, "", backwards, seed=seed)[1].bank_conflicts == 4 * 4 * 7


# -- stmatrix (9.7.14.5.16), movmatrix (9.7.14.5.17)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix(count, trans):
    value = RNG.integers(0, 2**32, (count, 64), dtype=np.uint32)
    offsets = RNG.permutation(256)[:64] * 16
    offsets = np.where(np.arange(64) % 32 < 8 * count, offsets, 0xFFFF1).astype(np.uint32)
    names = ", ".join(f"%r{20 + i}" for i in range(count))
    loads = "\n".join(f"ld.global.b32 %r{20 + i}, [%rd2+{256 * i}];" for i in range(count))
    body = f"""
      .shared .align 128 .b8 box[4096];
      mov.u32 %r1, box;
      mul.wide.u32 %rd0, %tid, 4;
      add.u64 %rd1, %arg0, %rd0; ld.global.b32 %r5, [%rd1]; add.u32 %r6, %r1, %r5;
      add.u64 %rd2, %arg1, %rd0;
      {loads}
      mov.u32 %r0, %tid;
      mov.u32 %r3, 0;
    FILL:
      shl.b32 %r4, %r0, 2; add.u32 %r4, %r4, %r1; st.shared.b32 [%r4], %r3;
      add.u32 %r0, %r0, 64; setp.lt.u32 %p1, %r0, 1024; @%p1 bra FILL;
      bar.sync 0;
      stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r6], {{{names}}};
      bar.sync 0;
      mov.u32 %r0, %tid;
    COPY:
      shl.b32 %r4, %r0, 2; cvt.u64.u32 %rd3, %r4; add.u64 %rd3, %rd3, %arg2; add.u32 %r4, %r4, %r1;
      ld.shared.b32 %r7, [%r4]; st.global.b32 [%rd3], %r7;
      add.u32 %r0, %r0, 64; setp.lt.u32 %p1, %r0, 1024; @%p1 bra COPY;
    """
    out = np.zeros(1024, np.uint32)
    snippets.run(body, offsets, value, out, threads=64, target=90)
    halves = value.view(np.uint16).reshape(count, 64, 2)
    want = np.zeros(2048, np.uint16)
    for warp in range(2):
        for i in range(count):
            matrix = np.empty((8, 8), np.uint16)
            for lane in range(32):
                for e in range(2):
                    matrix[lane // 4, 2 * (lane % 4) + e] = halves[i, warp * 32 + lane, e]
            if trans:
                matrix = matrix.T
            for r in range(8):
                at = offsets[warp * 32 + 8 * i + r] // 2
                want[at : at + 8] = matrix[r]
    assert (out.view(np.uint16) == want).all()


def test_stmatrix_is_a_store_for_the_checker():
    body = """
      .shared .align 128 .b8 box[512];
      mov.u32 %r1, box; shl.b32 %r2, %tid, 4; add.u32 %r2, %r2, %r1;
      stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%tid, %tid, %tid, %tid};
      SYNC
      xor.b32 %r2, %r2, 16;
      ld.shared.b32 %r3, [%r2];
    """
    snippets.run(body.replace("SYNC", "bar.warp.sync -1;"), target=90)
    with pytest.raises(Hazard, match="nothing orders it after a store by thread 1 "):
        snippets.run(body.replace("SYNC", ""), target=90)
    with pytest.raises(Hazard, match="two threads write different values"):
        snippets.run(body.replace("SYNC", "").replace("%tid, 4", "%tid, 0").replace("shl", "and"), target=90)


def test_movmatrix():
    value = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    got = snippets.each("movmatrix.sync.aligned.m8n8.trans.b16 %out, %a;", "u4", value)
    for warp in range(2):
        part = slice(warp * 32, warp * 32 + 32)
        matrix = value[part].view(np.uint16).reshape(8, 8)
        assert (got[part].view(np.uint16).reshape(8, 8) == matrix.T).all()


@pytest.mark.parametrize(
    "code",
    [
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b6x16_p32 {%r1}, [%r2];",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%r2];",
        "ldmatrix.sync.aligned.m8n8.x1.global.b16 {%r1}, [%r2];",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r2], {%r1};",
        "movmatrix.sync.aligned.m8n8.b16 %r1, %r2;",
    ],
)
def test_other_forms_are_refused(code):
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+: " + code.split(".")[0]):
        snippets.run(code, target=100)
