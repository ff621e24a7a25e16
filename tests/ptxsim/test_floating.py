"""Floating-point instructions and conversions run as PTX: operand order, types and modifiers. (What the operations
compute on all kinds of values is tested in test_numerics.py.)"""

import math

import numpy as np
import pytest

from ptxsim import UnsupportedInstruction, snippets

INF, NAN = math.inf, math.nan
TINY = 2.0**-140  # subnormal
THIRD, EPS = 1 / 3, 2.0**-23


def f4(*values):
    return ("f4", list(values))


def f2(*values):
    """float16 values in 16-bit registers"""
    return ("f2", list(values))


def b2(*patterns):
    return ("u2", list(patterns))


def b4(*patterns):
    return ("u4", list(patterns))


ONE_AND_A_BIT = 1 + EPS
CASES = [
    ("add.f32 %out, %a, %b", "f4", [f4(1, 2), f4(EPS / 2, 3)], [1, 5]),
    ("add.rp.f32 %out, %a, %b", "f4", [f4(1), f4(EPS / 8)], [ONE_AND_A_BIT]),
    ("add.ftz.f32 %out, %a, %b", "f4", [f4(TINY, 1), f4(TINY, TINY)], [0, 1]),
    ("add.sat.f32 %out, %a, %b", "f4", [f4(1, -1, INF), f4(2, 0.5, -INF)], [1, 0, 0]),
    ("add.rz.ftz.sat.f32 %out, %a, 0f3F000000", "f4", [f4(0.25, TINY)], [0.75, 0.5]),
    ("sub.f32 %out, %a, %b", "f4", [f4(1), f4(3)], [-2]),
    ("sub.rm.f32 %out, %a, %b", "f4", [f4(1), f4(EPS / 8)], [1 - EPS / 2]),
    ("mul.f32 %out, %a, %b", "f4", [f4(3), f4(-2)], [-6]),
    ("mul.rp.f32 %out, %a, %b", "f4", [f4(ONE_AND_A_BIT), f4(ONE_AND_A_BIT)], [1 + 3 * EPS]),
    ("fma.rn.f32 %out, %a, %b, %c", "f4", [f4(ONE_AND_A_BIT), f4(ONE_AND_A_BIT), f4(-1)], [2 * EPS + EPS * EPS]),
    ("fma.rn.ftz.f32 %out, %a, %b, %c", "f4", [f4(TINY), f4(2.0**100), f4(1)], [1]),
    ("mad.rn.f32 %out, %a, %b, %c", "f4", [f4(2), f4(3), f4(4)], [10]),
    ("fma.rz.f64 %out, %a, %b, %c", "f8", [("f8", [2]), ("f8", [3]), ("f8", [0.5])], [6.5]),
    ("mad.rn.f64 %out, %a, %b, %c", "f8", [("f8", [2]), ("f8", [3]), ("f8", [0.5])], [6.5]),
    ("add.f64 %out, %a, 0d3FF0000000000000", "f8", [("f8", [0.5])], [1.5]),
    ("div.rn.f32 %out, %a, %b", "f4", [f4(1), f4(3)], [np.float32(1) / np.float32(3)]),
    ("div.rz.f32 %out, %a, %b", "f4", [f4(1), f4(-3)], [-float.fromhex("0x1.555554p-2")]),
    ("div.full.f32 %out, %a, %b", "f4", [f4(1, 2.0**127), f4(4, 2.0**127)], [0.25, 1]),
    ("div.approx.f32 %out, %a, %b", "f4", [f4(1, 2.0**100), f4(4, 2.0**127)], [0.25, 0]),
    ("div.approx.ftz.f32 %out, %a, %b", "f4", [f4(1), f4(TINY)], [INF]),
    ("div.full.ftz.f32 %out, %a, %b", "f4", [f4(TINY), f4(1)], [0]),
    ("div.rp.f64 %out, %a, %b", "f8", [("f8", [1]), ("f8", [3])], [np.nextafter(1 / 3, 1)]),
    ("rcp.approx.ftz.f32 %out, %a", "f4", [f4(4, -TINY)], [0.25, -INF]),
    ("rcp.rn.f32 %out, %a", "f4", [f4(3)], [np.float32(1) / np.float32(3)]),
    ("rcp.rn.f64 %out, %a", "f8", [("f8", [3])], [1 / 3]),
    ("rcp.approx.ftz.f64 %out, %a", "f8", [("f8", [-4])], [-0.25]),
    ("sqrt.rn.f32 %out, %a", "f4", [f4(9, -1)], [3, NAN]),
    ("sqrt.approx.ftz.f32 %out, %a", "f4", [f4(9, TINY)], [3, 0]),
    ("sqrt.rp.f64 %out, %a", "f8", [("f8", [3])], [np.nextafter(math.sqrt(3), 2)]),
    ("rsqrt.approx.f32 %out, %a", "f4", [f4(4, 0)], [0.5, INF]),
    ("rsqrt.approx.ftz.f64 %out, %a", "f8", [("f8", [4])], [0.5]),
    ("sin.approx.f32 %out, %a", "f4", [f4(0, 0.5)], [0, np.float32(math.sin(0.5))]),
    ("cos.approx.ftz.f32 %out, %a", "f4", [f4(0, 0.5)], [1, np.float32(math.cos(0.5))]),
    ("lg2.approx.f32 %out, %a", "f4", [f4(8, TINY)], [3, -140]),
    ("lg2.approx.ftz.f32 %out, %a", "f4", [f4(8, TINY)], [3, -INF]),
    ("ex2.approx.f32 %out, %a", "f4", [f4(3, -140)], [8, TINY]),
    ("ex2.approx.ftz.f32 %out, %a", "f4", [f4(3, -140, -INF)], [8, 0, 0]),
    ("tanh.approx.f32 %out, %a", "f4", [f4(0.5)], [np.float32(math.tanh(0.5))]),
    ("neg.f32 %out, %a", "f4", [f4(1.5, TINY)], [-1.5, -TINY]),
    ("neg.ftz.f32 %out, %a", "f4", [f4(TINY)], [-0.0]),
    ("abs.f64 %out, %a", "f8", [("f8", [-1.5])], [1.5]),
    ("neg.f16x2 %out, %a", "u4", [b4(0x3C00BC00)], [0xBC003C00]),
    ("abs.bf16 %out, %a", "u2", [b2(0xBF80)], [0x3F80]),
    ("copysign.f32 %out, %a, %b", "f4", [f4(-1), f4(5)], [-5]),
    ("min.f32 %out, %a, %b", "f4", [f4(1, NAN, 0.0), f4(2, 3, -0.0)], [1, 3, -0.0]),
    ("max.NaN.f32 %out, %a, %b", "f4", [f4(1, NAN), f4(2, 3)], [2, NAN]),
    ("max.ftz.f32 %out, %a, %b", "f4", [f4(TINY), f4(-1)], [0]),
    ("max.xorsign.abs.f32 %out, %a, %b", "f4", [f4(-1), f4(2)], [-2]),
    ("min.NaN.xorsign.abs.f32 %out, %a, %b", "f4", [f4(-1), f4(-2)], [1]),
    ("max.f32 %out, %a, %b, %c", "f4", [f4(1), f4(2), f4(3)], [3]),
    ("min.NaN.abs.f32 %out, %a, %b, %c", "f4", [f4(-4), f4(-5), f4(6)], [4]),
    ("min.f64 %out, %a, %b", "f8", [("f8", [1]), ("f8", [-1])], [-1]),
    ("max.bf16x2 %out, %a, %b", "u4", [b4(0x3F80BF80), b4(0x40000000)], [0x40000000]),
    ("add.f16 %out, %a, %b", "f2", [f2(1), f2(2.0**-11)], [1]),
    ("sub.rn.f16 %out, %a, %b", "f2", [f2(1), f2(3)], [-2]),
    ("mul.sat.f16 %out, %a, %b", "f2", [f2(3), f2(3)], [1]),
    ("add.ftz.f16 %out, %a, %b", "f2", [f2(2.0**-24), f2(2.0**-24)], [0]),
    ("fma.rn.relu.f16 %out, %a, %b, %c", "f2", [f2(-3, 3), f2(3, 3), f2(1, 1)], [0, 10]),
    ("add.f16x2 %out, %a, %b", "u4", [b4(0x3C004000), b4(0x3C003C00)], [0x40004200]),
    ("fma.rn.f16x2 %out, %a, %b, %c", "u4", [b4(0x3C004000), b4(0x40004000), b4(0x3C000000)], [0x42004400]),
    ("add.rn.bf16x2 %out, %a, %b", "u4", [b4(0x3F804000), b4(0x3F803F80)], [0x40004040]),
    ("sub.bf16 %out, %a, %b", "u2", [b2(0x3F80), b2(0x4000)], [0xBF80]),
    ("mul.bf16x2 %out, %a, %b", "u4", [b4(0x40004000), b4(0x3F80C000)], [0x4000C080]),
    ("fma.rn.relu.bf16x2 %out, %a, %b, %c", "u4", [b4(0x40003F80), b4(0x40003F80), b4(0xC1003F80)], [0x00004000]),
    ("ex2.approx.f16 %out, %a", "f2", [f2(3, -0.5)], [8, np.float16(2**-0.5)]),
    ("ex2.approx.f16x2 %out, %a", "u4", [b4(0x3C004000)], [0x40004400]),
    ("ex2.approx.ftz.bf16x2 %out, %a", "u4", [b4(0x3F804000)], [0x40004080]),
    ("tanh.approx.bf16 %out, %a", "u2", [b2(0x0000, 0x7F80)], [0x0000, 0x3F80]),
    ("tanh.approx.f16x2 %out, %a", "u4", [b4(0x7C00FC00)], [0x3C00BC00]),
    ("add.f32.f16 %out, %a, %b", "f4", [f2(1.5), f4(EPS)], [1.5 + EPS]),
    ("sub.rz.sat.f32.bf16 %out, %a, %b", "f4", [b2(0x3F80), f4(0.25)], [0.75]),
    ("fma.rn.f32.bf16 %out, %a, %b, %c", "f4", [b2(0x3F81), b2(0x3F81), f4(1)], [1 + (1 + 2.0**-7) ** 2]),
]  # fmt: skip


def same(got, expected):
    got, expected = np.asarray(got), np.asarray(expected).astype(np.asarray(got).dtype)
    if got.dtype.kind == "f":
        nan = np.isnan(expected)
        assert (np.isnan(got) == nan).all(), (got, expected)
        assert (np.signbit(got) == np.signbit(expected))[~nan].all(), (got, expected)
        got, expected = got[~nan], expected[~nan]
    assert got.tolist() == expected.tolist()


def names(cases):
    return [f"{case[0].split(' ')[0]}-{n}" for n, case in enumerate(cases)]


def evaluate(text, out, inputs, **options):
    return snippets.each(f"{text};", out, *(np.array(values, kind) for kind, values in inputs), **options)


@pytest.mark.parametrize(("text", "out", "inputs", "expected"), CASES, ids=names(CASES))
def test_instruction(text, out, inputs, expected):
    same(evaluate(text, out, inputs, target=100), expected)


def test_packed_f32(fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    a, b, c = (rng.normal(size=64).astype("f4") for _ in range(3))
    a[0], b[0], c[:2] = TINY, 1, [-0.0, 3]
    wide = [x.view("u8") for x in (a, b, c)]
    got = snippets.each("fma.rn.ftz.f32x2 %out, %a, %b, %c;", "u8", *wide, target=100).view("f4")
    scalar = snippets.each("fma.rn.ftz.f32 %out, %a, %b, %c;", "f4", a, b, c)
    same(got, scalar)
    same(snippets.each("add.rz.f32x2 %out, %a, %b;", "u8", *wide[:2], target=100).view("f4")[1:], _cut(a, b)[1:])
    same(snippets.each("mul.f32x2 %out, %a, %b;", "u8", *wide[:2], target=100).view("f4"), a * b)
    same(snippets.each("sub.f32x2 %out, %a, %b;", "u8", *wide[:2], target=100).view("f4"), a - b)


def _cut(a, b):
    exact = a.astype("f8") + b
    near = exact.astype("f4")
    return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)


PREDICATES = [
    ("setp.lt.f32 %q, %a, %b", [f4(1, 2, NAN), f4(2, 1, 1)], [1, 0, 0]),
    ("setp.geu.f32 %q, %a, %b", [f4(1, 2, NAN), f4(2, 1, 1)], [0, 1, 1]),
    ("setp.eq.ftz.f32 %q, %a, %b", [f4(TINY), f4(-TINY)], [1]),
    ("setp.neu.f64 %q, %a, %b", [("f8", [1, NAN]), ("f8", [1, 1])], [0, 1]),
    ("setp.num.f32 %q, %a, %a", [f4(1, NAN)], [1, 0]),
    ("setp.gt.f16 %q, %a, %b", [f2(2, NAN), f2(1, 1)], [1, 0]),
    ("setp.le.bf16 %q, %a, %b", [b2(0xBF80), b2(0x3F80)], [1]),
    ("setp.lt.s32 %q, %a, %b", [("i4", [-1]), ("i4", [1])], [1]),
    ("setp.lt.u32 %q, %a, %b", [b4(0xFFFFFFFF), b4(1)], [0]),
    ("setp.hs.u64 %q, %a, 5", [("u8", [5, 4])], [1, 0]),
    ("setp.ne.b16 %q, %a, %b", [b2(1, 2), b2(1, 1)], [0, 1]),
    ("setp.gt.s16 %q, %a, -1", [("i2", [0, -2])], [1, 0]),
    ("setp.ge.u32 %p0, %a, 2; setp.lt.and.u32 %q, %a, 4, %p0", [b4(1, 2, 3, 4)], [0, 1, 1, 0]),
    ("setp.ge.u32 %p0, %a, 2; setp.lt.or.u32 %q, %a, 2, !%p0", [b4(1, 2)], [1, 0]),
    ("setp.ge.u32 %p0, %a, 2; setp.lt.xor.u32 %q|_, %a, 4, %p0", [b4(1, 2, 3, 4)], [1, 0, 0, 1]),
    ("setp.lt.u32 %p0|%q, %a, 2", [b4(1, 2)], [0, 1]),
    ("setp.ge.u32 %p0, %a, 2; setp.lt.and.u32 %p1|%q, %a, 4, %p0", [b4(1, 2, 3, 4)], [0, 0, 0, 1]),
    ("setp.lt.f16x2 %q|%p1, %a, %b", [b4(0x40003C00, 0x3C004000), b4(0x3C004000, 0x40003C00)], [1, 0]),
    ("setp.lt.f16x2 %q, %a, %b", [b4(0x40003C00, 0x3C004000), b4(0x3C004000, 0x40003C00)], [1, 0]),
    ("setp.lt.f16x2 %p1|%q, %a, %b", [b4(0x40003C00, 0x3C004000), b4(0x3C004000, 0x40003C00)], [0, 1]),
    ("setp.eq.u32 %p0, %a, 0; setp.gt.and.bf16x2 %q|%p1, %a, %b, !%p0", [b4(0x3F804000), b4(0x3F803F80)], [1]),
    ("testp.subnormal.f32 %q, %a", [f4(TINY, 1, 0, INF, NAN)], [1, 0, 0, 0, 0]),
    ("testp.normal.f32 %q, %a", [f4(TINY, 1, 0, INF, NAN)], [0, 1, 1, 0, 0]),
    ("testp.notanumber.f64 %q, %a", [("f8", [NAN, INF])], [1, 0]),
    ("testp.infinite.f64 %q, %a", [("f8", [NAN, INF])], [0, 1]),
    ("testp.finite.f32 %q, %a", [f4(NAN, INF, 1)], [0, 0, 1]),
    ("testp.number.f32 %q, %a", [f4(NAN, INF, 1)], [0, 1, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "inputs", "expected"), PREDICATES, ids=names(PREDICATES))
def test_predicates(text, inputs, expected):
    assert evaluate(text, "u1", inputs, pred=True, target=90).tolist() == expected


ONES = 0xFFFFFFFF
SETS = [
    ("set.lt.u32.f32 %out, %a, %b", "u4", [f4(1, 2), f4(2, 1)], [ONES, 0]),
    ("set.gt.f32.s32 %out, %a, %b", "f4", [("i4", [1, -2]), ("i4", [0, 1])], [1, 0]),
    ("setp.eq.u32 %p0, %a, 1; set.lt.and.s32.u32 %out, %a, %b, %p0", "i4", [b4(1, 2), b4(5, 5)], [-1, 0]),
    ("set.eq.f16.f32 %out, %a, %b", "u2", [f4(1, 2), f4(1, 1)], [0x3C00, 0]),
    ("set.ne.bf16.u32 %out, %a, %b", "u2", [b4(1, 2), b4(1, 1)], [0, 0x3F80]),
    ("set.lt.u16.f16 %out, %a, %b", "u2", [f2(1), f2(2)], [0xFFFF]),
    ("set.lt.f16x2.f16x2 %out, %a, %b", "u4", [b4(0x3C004000), b4(0x40003C00)], [0x3C000000]),
    ("set.gtu.u32.bf16x2 %out, %a, %b", "u4", [b4(0x7FFF4000), b4(0x40003F80)], [ONES]),
    (
        "setp.eq.u32 %p0, %a, 0; set.lt.or.f16x2.f16x2 %out, %a, %b, %p0",
        "u4",
        [b4(0, 0x3C004000), b4(0, 0x3C004200)],
        [0x3C003C00, 0x3C00],
    ),
    ("selp.f32 %out, %a, %b, %p0", "f4", [f4(1, 2), f4(3, 4)], [1, 4]),
    ("slct.f32.s32 %out, %a, %b, %c", "f4", [f4(1, 2), f4(3, 4), ("i4", [0, -1])], [1, 4]),
    ("slct.ftz.u32.f32 %out, %a, %b, %c", "u4", [b4(1, 2, 3), b4(5, 6, 7), f4(-TINY, NAN, -1)], [1, 6, 7]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "out", "inputs", "expected"), SETS, ids=names(SETS))
def test_set_and_selection(text, out, inputs, expected):
    if "selp" in text:
        text = f"setp.lt.f32 %p0, %a, 0f3FC00000; {text}"
    same(evaluate(text, out, inputs, target=90), expected)


CONVERSIONS = [
    ("cvt.rn.f32.s32 %out, %a", "f4", [("i4", [-5, (1 << 24) + 1])], [-5, 1 << 24]),
    ("cvt.rp.f32.u32 %out, %a", "f4", [("u4", [(1 << 24) + 1])], [(1 << 24) + 2]),
    ("cvt.rn.f64.u64 %out, %a", "f8", [("u8", [(1 << 64) - 1])], [2.0**64]),
    ("cvt.rzi.s32.f32 %out, %a", "i4", [f4(-1.9, 1e20, NAN)], [-1, (1 << 31) - 1, 0]),
    ("cvt.rni.u32.f32 %out, %a", "u4", [f4(2.5, 3.5, -4)], [2, 4, 0]),
    ("cvt.rpi.ftz.s32.f32 %out, %a", "i4", [f4(TINY, 1.2)], [0, 2]),
    ("cvt.rmi.s64.f64 %out, %a", "i8", [("f8", [-1.5, NAN])], [-2, -(1 << 63)]),
    ("cvt.rzi.s32.f64 %out, %a", "i4", [("f8", [NAN, 7.9])], [-(1 << 31), 7]),
    ("cvt.rzi.u8.f32 %out, %a", "u2", [f4(300, 7)], [255, 7]),
    ("cvt.rmi.f32.f32 %out, %a", "f4", [f4(1.7, -1.2)], [1, -2]),
    ("cvt.rzi.f64.f64 %out, %a", "f8", [("f8", [-1.7])], [-1]),
    ("cvt.sat.f32.f32 %out, %a", "f4", [f4(1.7, -1.2, NAN)], [1, 0, 0]),
    ("cvt.ftz.f32.f32 %out, %a", "f4", [f4(-TINY)], [-0.0]),
    ("cvt.f64.f32 %out, %a", "f8", [f4(THIRD)], [float(np.float32(THIRD))]),
    ("cvt.rn.f32.f64 %out, %a", "f4", [("f8", [THIRD])], [np.float32(THIRD)]),
    ("cvt.rz.f32.f64 %out, %a", "f4", [("f8", [2 / 3])], [float.fromhex("0x1.555554p-1")]),
    ("cvt.rn.f16.f32 %out, %a", "f2", [f4(1 + 2.0**-11, 1e9)], [1, INF]),
    ("cvt.rz.f16.f32 %out, %a", "f2", [f4(1e9)], [65504]),
    ("cvt.f32.f16 %out, %a", "f4", [f2(1.5)], [1.5]),
    ("cvt.rn.bf16.f32 %out, %a", "u2", [f4(1 + 2.0**-8, NAN)], [0x3F80, 0x7FFF]),
    ("cvt.f32.bf16 %out, %a", "f4", [b2(0xC040)], [-3]),
    ("cvt.rn.bf16.f16 %out, %a", "u2", [f2(1 + 2.0**-10)], [0x3F80]),
    ("cvt.rn.relu.bf16.f32 %out, %a", "u2", [f4(-1, 1)], [0, 0x3F80]),
    ("cvt.rn.satfinite.f16.f32 %out, %a", "f2", [f4(1e9, -INF)], [65504, -65504]),
    ("cvt.rna.tf32.f32 %out, %a", "u4", [f4(1 + 2.0**-11)], [0x3F802000]),
    ("cvt.rz.tf32.f32 %out, %a", "u4", [f4(1 + 2.0**-11)], [0x3F800000]),
    ("cvt.rn.f16.u16 %out, %a", "f2", [("u2", [2049])], [2048]),
    ("cvt.u32.u16 %out, %a", "u4", [b2(0xFFFF)], [0xFFFF]),
    ("cvt.s32.s16 %out, %a", "i4", [("i2", [-3])], [-3]),
    ("cvt.s64.s32 %out, %a", "i8", [("i4", [-3])], [-3]),
    ("cvt.u64.u32 %out, %a", "u8", [b4(ONES)], [ONES]),
    ("cvt.u16.u32 %out, %a", "u2", [b4(0x12345678)], [0x5678]),
    ("cvt.s8.s32 %out, %a", "i4", [("i4", [0x180])], [-128]),
    ("cvt.u8.u32 %out, %a", "u4", [b4(0x1FF)], [0xFF]),
    ("cvt.s32.s8 %out, %a", "i4", [b4(0x1FF)], [-1]),
    ("cvt.sat.u8.s32 %out, %a", "u2", [("i4", [-5, 300, 7])], [0, 255, 7]),
    ("cvt.sat.s16.s32 %out, %a", "i2", [("i4", [-70000, 70000])], [-32768, 32767]),
    ("cvt.rn.f16x2.f32 %out, %a, %b", "u4", [f4(1), f4(2)], [0x3C004000]),
    ("cvt.rn.bf16x2.f32 %out, %a, %b", "u4", [f4(1), f4(2)], [0x3F804000]),
    ("cvt.rz.relu.bf16x2.f32 %out, %a, %b", "u4", [f4(-1), f4(2)], [0x00004000]),
    ("cvt.rn.satfinite.e4m3x2.f32 %out, %a, %b", "u2", [f4(1), f4(1e9)], [0x387E]),
    ("cvt.rn.satfinite.relu.e5m2x2.f32 %out, %a, %b", "u2", [f4(-1), f4(1)], [0x003C]),
    ("cvt.rn.satfinite.e4m3x2.f16x2 %out, %a", "u2", [b4(0x3C004000)], [0x3840]),
    ("cvt.rn.f16x2.e4m3x2 %out, %a", "u4", [b2(0x3840)], [0x3C004000]),
    ("cvt.rn.relu.f16x2.e5m2x2 %out, %a", "u4", [b2(0xBC40)], [0x00004000]),
    ("cvt.rn.satfinite.e2m3x2.f32 %out, %a, %b", "u2", [f4(1), f4(-9)], [0x083F]),
    ("cvt.rn.f16x2.e3m2x2 %out, %a", "u4", [b2(0x0C2C)], [0x3C00BC00]),
    ("cvt.pack.sat.s16.s32 %out, %a, %b", "u4", [("i4", [-70000]), ("i4", [5])], [0x80000005]),
    ("cvt.pack.sat.u8.s32.b32 %out, %a, %b, %c", "u4", [("i4", [300]), ("i4", [-1]), b4(0xABCD)], [0xABCDFF00]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "out", "inputs", "expected"), CONVERSIONS, ids=names(CONVERSIONS))
def test_conversions(text, out, inputs, expected):
    same(evaluate(text, out, inputs, target=100), expected)


def test_constants_of_both_kinds():
    x = np.float32([1, 2])
    same(snippets.each("fma.rn.f32 %out, %a, 0f40000000, 0fBF800000;", "f4", x), [1, 3])
    same(snippets.each("cvt.rn.bf16x2.f32 %out, 0f3F800000, %a;", "u4", x), [0x3F803F80, 0x3F804000])
    same(snippets.each("fma.rn.f16x2 %out, %a, 0x40004000, %a;", "u4", np.array([0x3C004000], "u4")), [0x42004600])
    same(snippets.each("max.f32 %out, 0fFF800000, 0f3F800000;", "f4", x), [1, 1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("add.rna.f32 %out, %a, %a;", "unknown modifier .rna"),
        ("add.relu.f32 %out, %a, %a;", "relu"),
        ("fma.f32 %out, %a, %a, %a;", "rounding modifier is missing"),
        ("fma.rn.oob.f16x2 %out, %a, %a, %a;", "unknown modifier .oob"),
        ("mul.wide.f32 %out, %a, %a;", "unknown modifier .wide"),
        ("mad.rn.f16x2 %out, %a, %a, %a;", "mad does not exist"),
        ("add.rz.f16x2 %out, %a, %a;", "rz"),
        ("add.sat.bf16x2 %out, %a, %a;", "sat"),
        ("add.sat.f32x2 %rd0, %rd1, %rd2;", "sat"),
        ("div.f32 %out, %a, %a;", "missing"),
        ("div.approx.f64 %d0, %d1, %d2;", "div.approx"),
        ("rcp.f32 %out, %a;", "missing"),
        ("ex2.f32 %out, %a;", ".approx is missing"),
        ("ex2.approx.f64 %d0, %d1;", "ex2.approx"),
        ("lg2.approx.sat.f32 %out, %a;", "unknown modifier .sat"),
        ("tanh.approx.ftz.f32 %out, %a;", "ftz"),
        ("min.abs.f32 %out, %a, %a;", "xorsign"),
        ("min.xorsign.abs.f32 %out, %a, %a, %a;", "three operands"),
        ("setp.f32 %p0, %a, %a;", "which comparison"),
        ("setp.lo.f32 %p0, %a, %a;", ".lo"),
        ("setp.lt.b32 %p0, %a, %a;", ".lt"),
        ("setp.lt.u32 %out, %a, %a;", "can't hold"),
        ("set.lt.f16x2.f32 %out, %a, %a;", "can't give"),
        ("cvt.f32.s32 %out, %a;", "rounding none"),
        ("cvt.rs.f16x2.f32 %out, %a, %a;", "rs"),
        ("cvt.rn.s32.f32 %out, %a;", "rounding .rn"),
        ("cvt.rn.bf16x2.f16 %out, %a, %a;", "from .f32"),
        ("cvt.rn.e4m3x2.f32 %h0, %a, %a;", "satfinite"),
        ("cvt.rz.satfinite.ue8m0x2.f32 %h0, %a, %a;", "two types"),
        ("cvt.u32.u32.u32 %out, %a;", "two types"),
        ("cvt.sat.u32.u16 %out, %h0;", "always fits"),
        ("testp.odd.f32 %p0, %a;", "which property"),
        ("copysign.f16 %h0, %h1, %h2;", "type .f16"),
    ],
)
def test_forms_that_do_not_exist_stop_with_name_and_line(text, words):
    with pytest.raises(UnsupportedInstruction) as stopped:
        snippets.each(f"\n\n{text}", "u4", np.zeros(1, "u4"))
    message = str(stopped.value)
    assert words in message
    assert message.startswith("PTX line ")
    assert f" {text.split()[0]}: " in message
