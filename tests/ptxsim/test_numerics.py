"""Floating point and conversions of the simulator against exact fractions, rounded here in the ISA's words."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ptxsim import numerics as nx
from ptxsim.exact import FORMATS, exact, fields, is_infinite, is_negative, number, patterns, rounded, same, width

SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=6, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def quiet():
    with np.errstate(all="ignore"):
        yield


def values(kind, bits):
    return bits.view(FORMATS[kind][4])


def bits_of(kind, result):
    return np.asarray(result).view(FORMATS[kind][3])


def operands(rng, kind, count):
    """`count` arrays of one length, of which some are near each other in magnitude, or each other's negation."""
    first = patterns(rng, kind, 40)
    others = []
    for _ in range(count - 1):
        other = patterns(rng, kind, 40)
        close = first.astype(np.int64) + rng.integers(-3, 4, len(first))
        close = np.where(
            rng.integers(2, size=len(first)), close, close ^ (1 << width(kind) - 1 if width(kind) < 64 else 0)
        )
        other = np.where(rng.integers(3, size=len(first)) == 0, close.astype(np.uint64).astype(other.dtype), other)
        others.append(other)
    return [first, *others]


# -- add, sub, mul, fma, div, rcp, sqrt


@pytest.mark.parametrize("rnd", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma", "div", "rcp"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
@given(seed=SEEDS)
@few
def test_arithmetic_rounds_the_exact_result_once(kind, op, rnd, seed):
    bits = operands(np.random.default_rng(seed), kind, nx.OPERANDS[op])
    got = nx.arithmetic(op, kind, rnd=rnd)(*(values(kind, b) for b in bits))
    expected = [exact(op, kind, rnd, *b) for b in zip(*(b.tolist() for b in bits), strict=True)]
    same(kind, bits_of(kind, got), expected)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
@given(seed=SEEDS)
@few
def test_arithmetic_of_16_bits_rounds_the_exact_result_once(kind, op, seed):
    bits = operands(np.random.default_rng(seed), kind, nx.OPERANDS[op])
    got = nx.arithmetic(op, kind)(*bits)
    expected = [exact(op, kind, "rn", *b) for b in zip(*(b.tolist() for b in bits), strict=True)]
    same(kind, got, expected)


@pytest.mark.parametrize("rnd", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
@given(seed=SEEDS)
@few
def test_sqrt_lies_on_the_right_side_of_its_neighbours(kind, rnd, seed):
    bits = patterns(np.random.default_rng(seed), kind, 60)
    got = bits_of(kind, nx.arithmetic("sqrt", kind, rnd=rnd)(values(kind, bits))).tolist()
    for b, g in zip(bits.tolist(), got, strict=True):
        x = number(kind, b)
        if x == 0:
            assert g == b
        elif x != x or x < 0:
            assert math.isnan(number(kind, g))
        elif x == math.inf:
            assert g == b
        else:
            root, below, above = (number(kind, g + step) for step in (0, -1, 1))
            if rnd == "rn":
                assert ((below + root) / 2) ** 2 <= x <= ((root + above) / 2) ** 2
            elif rnd == "rp":
                assert below**2 < x <= root**2
            else:
                assert root**2 <= x < above**2


def _words(*arrays):
    return zip(*(a.view(np.uint32).tolist() for a in arrays), strict=True)


def test_fma_is_right_where_rounding_by_way_of_f64_is_not():
    # (1 + 2^-23) + 2^-24 - 2^-70: just below the middle of two f32, which the f64 sum hits exactly.
    a, b, c = np.float32(2**-24 * (1 + 2**-23)), np.float32(1 - 2**-23), np.float32(1 + 2**-23)
    a, c = np.array([a, -a, a, -a]), np.array([c, c, -c, -c])
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    once = nx.arithmetic("fma", "f32")(a, b, c)
    expected = [exact("fma", "f32", "rn", *x) for x in _words(a, np.full(4, b), c)]
    same("f32", once.view(np.uint32), expected)
    assert (twice != once).any()


def test_fma_into_the_subnormals_rounds_once():
    # c + 2^-150 is the middle of two subnormals; the product is less than 2^-150 by 2^-196.
    a = np.array([2.0**-75 * (1 + 2**-23)] * 2, np.float32)
    b = np.array([2.0**-75 * (1 - 2**-23)] * 2, np.float32)
    c = np.array([2.0**-127 + 2.0**-149, 2.0**-128 + 2.0**-149], np.float32)
    expected = [exact("fma", "f32", "rn", *x) for x in _words(a, b, c)]
    same("f32", nx.arithmetic("fma", "f32")(a, b, c).view(np.uint32), expected)
    assert ((a.astype(np.float64) * b + c).astype(np.float32) != nx.arithmetic("fma", "f32")(a, b, c)).any()


@given(seed=SEEDS)
@few
def test_bf16_products_below_the_normal_range_are_rounded_once(seed):
    rng = np.random.default_rng(seed)
    x, y = (np.uint16((127 - 67 + rng.integers(-4, 5, 300) << 7) + rng.integers(0, 128, 300)) for _ in range(2))
    expected = [exact("mul", "bf16", "rn", a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    same("bf16", nx.arithmetic("mul", "bf16")(x, y), expected)


@pytest.mark.parametrize("op", ["add", "mul", "fma", "sub"])
@pytest.mark.parametrize("kind", ["f32", "f16"])
@given(seed=SEEDS)
@few
def test_ftz_flushes_operands_and_results(kind, op, seed):
    bits = operands(np.random.default_rng(seed), kind, nx.OPERANDS[op])

    def flushed(b):
        sign, exponent, _ = fields(kind, b)
        return sign << width(kind) - 1 if exponent == 0 else b

    got = nx.arithmetic(op, kind, ftz=True)(*(values(kind, b) for b in bits))
    expected = [exact(op, kind, "rn", *map(flushed, b)) for b in zip(*(b.tolist() for b in bits), strict=True)]
    expected = [None if e is None else flushed(e) for e in expected]
    same(kind, bits_of(kind, got), expected)


@pytest.mark.parametrize("kind", ["f32", "f16"])
@given(seed=SEEDS)
@few
def test_sat_clamps_to_the_unit_interval_and_nan_to_zero(kind, seed):
    bits = operands(np.random.default_rng(seed), kind, 3)
    got = nx.arithmetic("fma", kind, sat=True)(*(values(kind, b) for b in bits))
    one = rounded(kind, 1, "rn")
    expected = []
    for b in zip(*(b.tolist() for b in bits), strict=True):
        e = exact("fma", kind, "rn", *b)
        expected.append(0 if e is None or number(kind, e) <= 0 else min(e, one))
    same(kind, bits_of(kind, got), expected)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@given(seed=SEEDS)
@few
def test_relu_clamps_below_and_makes_nan_canonical(kind, seed):
    bits = operands(np.random.default_rng(seed), kind, 3)
    got = nx.arithmetic("fma", kind, relu=True)(*bits)
    expected = []
    for b in zip(*(b.tolist() for b in bits), strict=True):
        e = exact("fma", kind, "rn", *b)
        expected.append(0x7FFF if e is None else 0 if is_negative(kind, e) else e)
    assert got.tolist() == expected


@pytest.mark.parametrize(("kind", "part", "whole"), [("f16x2", 2, 4), ("bf16x2", 2, 4), ("f32x2", 4, 8)])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
@given(seed=SEEDS)
@few
def test_packed_operations_work_on_each_element(kind, part, whole, op, seed):
    rng = np.random.default_rng(seed)
    element = kind[:-2]
    bits = [b[: len(b) // 2 * 2] for b in operands(rng, element, nx.OPERANDS[op])]
    wide = [b[0::2].astype(np.uint64) | b[1::2].astype(np.uint64) << np.uint64(8 * part) for b in bits]
    got = nx.arithmetic(op, kind)(*(w.astype(f"u{whole}") for w in wide))
    assert got.dtype == np.dtype(f"u{whole}")
    expected = [exact(op, element, "rn", *b) for b in zip(*(b.tolist() for b in bits), strict=True)]
    same(element, np.stack([got & (1 << 8 * part) - 1, got >> (8 * part)], -1).astype(f"u{part}"), expected)


def test_operations_take_scalars_and_broadcast():
    assert nx.arithmetic("fma", "f32")(np.float32(2), np.float32(3), np.float32(4)) == 10
    assert nx.arithmetic("add", "f32", rnd="rm", ftz=True, sat=True)(np.float32(0.25), np.float32(0.5)) == 0.75
    ones = np.full(5, 0x3C003C00, np.uint32)
    assert nx.arithmetic("add", "f16x2")(ones, np.uint32(0x40003C00)).tolist() == [0x42004000] * 5
    assert nx.arithmetic("mul", "bf16")(np.uint16(0x3F80), np.uint16(0x4000)) == 0x4000
    assert nx.pack_pair("bf16x2", "rn")(np.ones(3, np.float32), np.float32(2)).tolist() == [0x3F804000] * 3
    assert nx.pack_pair("f16x2", "rn")(np.float32(1), np.float32(2)) == 0x3C004000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nx.arithmetic("div", "f16"), "div does not exist"),
        (lambda: nx.arithmetic("add", "f16", rnd="rz"), "rz"),
        (lambda: nx.arithmetic("add", "f64", ftz=True), "ftz"),
        (lambda: nx.arithmetic("add", "f64", sat=True), "sat"),
        (lambda: nx.arithmetic("add", "bf16", sat=True), "sat"),
        (lambda: nx.arithmetic("fma", "f32", relu=True), "relu"),
        (lambda: nx.arithmetic("add", "f16", relu=True), "relu"),
        (lambda: nx.approximate("sin", "f16"), "sin"),
        (lambda: nx.approximate("ex2", "bf16"), "ftz"),
        (lambda: nx.approximate("tanh", "f32", ftz=True), "ftz"),
        (lambda: nx.approximate("ex2", "f16", ftz=True), "ftz"),
        (lambda: nx.extremum("min", "f64", nan=True), "modifiers"),
        (lambda: nx.extremum("min", "f32", xorsign=True), "abs"),
        (lambda: nx.extremum("min", "bf16", ftz=True), "ftz"),
        (lambda: nx.comparison("lo", "s32"), "lo"),
        (lambda: nx.comparison("lt", "b32"), "lt"),
        (lambda: nx.comparison("equ", "u32"), "equ"),
        (lambda: nx.comparison("hi", "f32"), "hi"),
        (lambda: nx.comparison("eq", "u16x2"), "u16x2"),
        (lambda: nx.comparison("eq", "pred"), "pred"),
        (lambda: nx.conversion("f32", "f16", "rn"), "rounding"),
        (lambda: nx.conversion("f16", "f32"), "rounding"),
        (lambda: nx.conversion("s32", "f32", "rn"), "rounding"),
        (lambda: nx.conversion("f32", "s32"), "rounding"),
        (lambda: nx.conversion("tf32", "f32", "rp"), "rounding"),
        (lambda: nx.conversion("u32", "u8", sat=True), "sat"),
        (lambda: nx.conversion("f64", "f16", ftz=True), "ftz"),
        (lambda: nx.conversion("f16", "f64", "rn", relu=True), "relu"),
        (lambda: nx.conversion("f64", "f32", satfinite=True), "satfinite"),
        (lambda: nx.conversion("bf16", "f32", "rn", sat=True), "sat"),
    ],
)
def test_forms_that_do_not_exist_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# -- approximate functions


def ulps(kind, got, expected):
    """The distance of a pattern's value from a real one, in units of the format's last place at the latter."""
    p, low, _, _, _ = FORMATS[kind]
    exponent = max(math.frexp(expected)[1] - 1, low) if expected else low
    return abs(number(kind, got) - Fraction(expected)) / Fraction(2) ** (exponent - p + 1)


REFERENCE = {
    "rcp": lambda x: 1 / x,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "ex2": lambda x: 2.0**x,
    "lg2": math.log2,
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
}
DOMAIN = {
    "rcp": (-3e38, 3e38),
    "sqrt": (1e-45, 3e38),
    "rsqrt": (1e-45, 3e38),
    "ex2": (-149, 127.9),
    "lg2": (1e-45, 3e38),
    "sin": (-300, 300),
    "cos": (-300, 300),
    "tanh": (-12, 12),
}


@pytest.mark.parametrize("op", list(REFERENCE))
@given(data=st.data())
@few
def test_approximations_are_within_an_ulp_of_the_real_function(op, data):
    low, high = np.float32(DOMAIN[op]).tolist()
    xs = data.draw(st.lists(st.floats(low, high, width=32), min_size=30, max_size=30))
    xs = [x for x in xs if x or op not in ("rcp", "rsqrt", "lg2", "sqrt")] or [1.0]
    got = nx.approximate(op, "f32")(np.array(xs, np.float32)).view(np.uint32).tolist()
    for x, g in zip(xs, got, strict=True):
        expected = REFERENCE[op](x)
        if abs(expected) >= 2.0**128:
            assert is_infinite(number("f32", g))
        else:
            assert ulps("f32", g, expected) <= 0.5001


INF, NAN, NORMAL, TINY = math.inf, math.nan, 1.5, 2.0**-140
SPECIAL = {  # the ISA's tables, and for .ftz what a flushed operand or result gives
    ("rcp", False): [(-INF, -0.0), (-0.0, -INF), (0.0, INF), (INF, 0.0)],
    ("rcp", True): [(-TINY, -INF), (TINY, INF), (2.0**127, 0.0), (-(2.0**127), -0.0)],
    ("sqrt", False): [(-INF, NAN), (-NORMAL, NAN), (-0.0, -0.0), (0.0, 0.0), (INF, INF), (-TINY, NAN)],
    ("sqrt", True): [(-TINY, -0.0), (TINY, 0.0)],
    ("rsqrt", False): [(-INF, NAN), (-NORMAL, NAN), (-0.0, -INF), (0.0, INF), (INF, 0.0)],
    ("rsqrt", True): [(-TINY, -INF), (TINY, INF)],
    ("sin", False): [(-INF, NAN), (-0.0, -0.0), (0.0, 0.0), (INF, NAN), (TINY, TINY)],
    ("sin", True): [(TINY, 0.0), (-TINY, -0.0)],
    ("cos", False): [(-INF, NAN), (-0.0, 1.0), (0.0, 1.0), (INF, NAN)],
    ("cos", True): [(TINY, 1.0)],
    ("lg2", False): [(-INF, NAN), (-NORMAL, NAN), (-0.0, -INF), (0.0, -INF), (INF, INF), (2.0**-140, -140.0)],
    ("lg2", True): [(TINY, -INF), (-TINY, -INF)],
    ("ex2", False): [
        (-INF, 0.0),
        (-0.0, 1.0),
        (0.0, 1.0),
        (INF, INF),
        (128.0, INF),
        (-140.0, 2.0**-140),
        (-151.0, 0.0),
    ],
    ("ex2", True): [(-INF, 0.0), (INF, INF), (TINY, 1.0), (-TINY, 1.0), (-126.0, 2.0**-126), (-127.0, 0.0), (3.0, 8.0)],
    ("tanh", False): [(-INF, -1.0), (-0.0, -0.0), (0.0, 0.0), (INF, 1.0), (TINY, TINY)],
}


@pytest.mark.parametrize(("op", "ftz"), list(SPECIAL))
def test_approximations_of_special_values(op, ftz):
    table = [*SPECIAL[op, ftz], (NAN, NAN)]
    got = nx.approximate(op, "f32", ftz=ftz)(np.array([x for x, _ in table], np.float32))
    for (x, expected), g in zip(table, got.tolist(), strict=True):
        if math.isnan(expected):
            assert math.isnan(g), (x, g)
        else:
            assert (g, math.copysign(1, g)) == (expected, math.copysign(1, expected)), (x, g)


def test_ex2_of_whole_numbers_is_exact():
    x = np.arange(-149, 128, dtype=np.float32)
    assert (nx.approximate("ex2", "f32")(x) == np.ldexp(np.float32(1), x.astype(int))).all()
    assert (nx.approximate("ex2", "f32", ftz=True)(x) == np.where(x < -126, 0, np.ldexp(1.0, x.astype(int)))).all()


def test_div_approx_of_huge_divisors():
    b = np.array([2.0**126, 2.0**126 * 1.5, -(2.0**127), 2.0**127, 2.0**127, INF, NAN, 3], np.float32)
    a = np.array([2.0**100, 2.0**100, 2.0**100, INF, NAN, 2, 1, 6], np.float32)
    got = nx.approximate("div", "f32")(a, b)
    expected = np.array([2.0**-26, 0.0, -0.0, NAN, NAN, 0, NAN, 2], np.float32)
    assert np.array_equal(got, expected, equal_nan=True)
    assert np.signbit(got[2])
    full = nx.approximate("full", "f32")(a, b)
    assert full[1] == np.float32(2.0**100 / (2.0**126 * 1.5))
    tiny = np.array([2.0**-130], np.float32)
    assert nx.approximate("div", "f32", ftz=True)(np.ones(1, np.float32), -tiny)[0] == -INF
    assert np.isnan(nx.approximate("full", "f32", ftz=True)(tiny, tiny))[0]


@pytest.mark.parametrize(("kind", "relative"), [("f16", 2.0**-9.9), ("bf16", 2.0**-7)])
def test_ex2_and_tanh_of_16_bits(kind, relative):
    every = np.arange(1 << 16, dtype=np.uint16)
    ftz = kind == "bf16"
    ex2 = nx.approximate("ex2", kind, ftz=ftz)(every).tolist()
    tanh = nx.approximate("tanh", kind)(every).tolist()
    half = Fraction(1, 2) + Fraction(1, 1000)
    for bits in range(0, 1 << 16, 7):
        x = number(kind, bits)
        if x != x:
            assert math.isnan(number(kind, ex2[bits]))
            assert math.isnan(number(kind, tanh[bits]))
            continue
        power = INF if x == INF or x > 128 else 2.0 ** float(x) if x > -200 else 0.0
        if power >= 2.0 ** (FORMATS[kind][2] + 1):
            assert number(kind, ex2[bits]) == INF
        elif not (ftz and power < 2.0**-126):
            assert ulps(kind, ex2[bits], power) <= half
            if power >= 2.0 ** FORMATS[kind][1]:
                assert abs(number(kind, ex2[bits]) / Fraction(power) - 1) < relative
        else:
            assert ex2[bits] == 0
        assert ulps(kind, tanh[bits], math.tanh(float(x))) <= half


def test_gross_approximations_of_f64_keep_the_upper_word():
    x = np.array([3.0, -0.7, 1e300, 2.0**-1030, -(2.0**-1030), 0.0, -0.0, INF, -INF, NAN])
    got = nx.approximate("rcp", "f64", ftz=True)(x)
    assert not (got.view(np.uint64) & np.uint64(0xFFFFFFFF)).any()
    assert np.allclose(got[:3], 1 / x[:3], rtol=2.0**-19, atol=0)
    assert got[3:9].tolist() == [INF, -INF, INF, -INF, 0, 0]
    assert np.signbit(got[8])
    assert got.view(np.uint64)[9] == 0x7FFFFFFF00000000
    root = nx.approximate("rsqrt", "f64", ftz=True)(x)
    assert np.allclose(root[[0, 2]], x[[0, 2]] ** -0.5, rtol=2.0**-19, atol=0)
    assert root.view(np.uint64)[1] == 0x7FFFFFFF00000000
    assert root[3:8].tolist() == [INF, -INF, INF, -INF, 0]
    assert nx.approximate("rsqrt", "f64")(np.array([4.0, 0.25])).tolist() == [0.5, 2.0]


# -- sign, selection and comparison


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@given(seed=SEEDS)
@few
def test_neg_and_abs_touch_the_sign_only(kind, seed):
    bits = patterns(np.random.default_rng(seed), kind, 30)
    x = values(kind, bits)
    sign = 1 << width(kind) - 1
    assert bits_of(kind, nx.negate(kind)(x)).tolist() == [b ^ sign for b in bits.tolist()]
    positive = bits_of(kind, nx.absolute(kind)(x)).tolist()
    for b, p in zip(bits.tolist(), positive, strict=True):
        unchanged = kind == "f64" and math.isnan(number(kind, b))
        assert p == (b if unchanged else b & ~sign)


def test_neg_and_abs_of_packed_halves_and_of_subnormals():
    x = np.array([0x80003C00, 0x00018001], np.uint32)
    assert nx.negate("f16x2")(x).tolist() == [0x0000BC00, 0x80010001]
    assert nx.absolute("bf16x2")(x).tolist() == [0x00003C00, 0x00010001]
    assert nx.negate("f16x2", ftz=True)(x).tolist() == [0x0000BC00, 0x80000000]
    tiny = np.array([-TINY, TINY], np.float32)
    assert nx.negate("f32", ftz=True)(tiny).view(np.uint32).tolist() == [0, 0x80000000]
    assert nx.absolute("f32", ftz=True)(tiny).view(np.uint32).tolist() == [0, 0]
    assert nx.copysign(np.float32([-0.0, 2]), np.float32([3, -INF])).tolist() == [-3, INF]


@pytest.mark.parametrize("kind", ["f32", "f64"])
@given(seed=SEEDS)
@few
def test_testp(kind, seed):
    bits = patterns(np.random.default_rng(seed), kind, 30)
    x = values(kind, bits)
    got = {op: nx.testp(op, kind)(x).tolist() for op in ("finite", "infinite", "number", "notanumber")}
    got |= {op: nx.testp(op, kind)(x).tolist() for op in ("normal", "subnormal")}
    for i, b in enumerate(bits.tolist()):
        v = number(kind, b)
        _, exponent, mantissa = fields(kind, b)
        nan = v != v
        assert got["notanumber"][i] == nan == (not got["number"][i])
        assert got["infinite"][i] == (v in (INF, -INF))
        assert got["finite"][i] == isinstance(v, Fraction)
        assert got["subnormal"][i] == (exponent == 0 and mantissa != 0)
        assert got["normal"][i] == (isinstance(v, Fraction) and not (exponent == 0 and mantissa))


def chosen(op, kind, a, b, nan):
    """min or max of two patterns by the order of their values, -0 below +0; None for NaN."""
    x, y = number(kind, a), number(kind, b)
    if x != x or y != y:
        if nan or (x != x and y != y):
            return None
        return b if x != x else a
    key = {False: (y, not is_negative(kind, b)), True: (x, not is_negative(kind, a))}
    first_is_greater = key[True] > key[False]
    return a if first_is_greater == (op == "max") else b


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("form", ["", "nan", "xorsign", "nan xorsign", "three", "three nan", "three abs"])
@given(seed=SEEDS)
@few
def test_min_and_max(op, kind, form, seed):
    if (kind == "f64" and form) or (kind in ("f16", "bf16") and "three" in form):
        return
    bits = operands(np.random.default_rng(seed), kind, 3 if "three" in form else 2)
    zeros = np.array([0, 1 << width(kind) - 1] * 2, bits[0].dtype)
    bits = [np.concatenate([b, np.roll(zeros, i) if i == 1 else np.sort(zeros)]) for i, b in enumerate(bits)]
    absolute, xorsign, nan = "abs" in form or "xorsign" in form, "xorsign" in form, "nan" in form
    got = nx.extremum(op, kind, nan=nan, xorsign=xorsign, absolute=absolute)(*(values(kind, b) for b in bits))
    sign = 1 << width(kind) - 1
    expected = []
    for given_bits in zip(*(b.tolist() for b in bits), strict=True):
        magnitudes = [b & ~sign if absolute else b for b in given_bits]
        e = chosen(op, kind, *magnitudes[:2], nan)
        if len(magnitudes) == 3:
            e = chosen(op, kind, rounded(kind, INF, "rn") + 1 if e is None else e, magnitudes[2], nan)
        if e is not None and xorsign:
            e |= (given_bits[0] ^ given_bits[1]) & sign
        expected.append(e)
    got = bits_of(kind, got)
    same(kind, got, expected)
    if nan:
        canonical = sign - 1
        assert all(g == canonical for g, e in zip(got.tolist(), expected, strict=True) if e is None)


def test_min_flushes_and_packs():
    x, y = np.float32([TINY, -TINY]), np.float32([-0.0, -1])
    assert nx.extremum("max", "f32", ftz=True)(x, y).view(np.uint32).tolist() == [0, 0x80000000]
    assert nx.extremum("min", "f16x2")(np.array([0x3C00BC00], "u4"), np.array([0x00007E00], "u4")).tolist() == [0xBC00]
    assert (
        nx.extremum("max", "bf16x2", nan=True)(np.array([0x3F80FF81], "u4"), np.array([0x40000000], "u4")) == 0x40007FFF
    )


COMPARISONS = {  # (less, equal, greater, unordered)
    "eq": (0, 1, 0, 0), "ne": (1, 0, 1, 0), "lt": (1, 0, 0, 0), "le": (1, 1, 0, 0), "gt": (0, 0, 1, 0),
    "ge": (0, 1, 1, 0), "equ": (0, 1, 0, 1), "neu": (1, 0, 1, 1), "ltu": (1, 0, 0, 1), "leu": (1, 1, 0, 1),
    "gtu": (0, 0, 1, 1), "geu": (0, 1, 1, 1), "num": (1, 1, 1, 0), "nan": (0, 0, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("op", list(COMPARISONS))
@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@given(seed=SEEDS)
@few
def test_comparisons_of_floats(op, kind, seed):
    a, b = operands(np.random.default_rng(seed), kind, 2)
    got = nx.comparison(op, kind)(values(kind, a), values(kind, b))
    assert got.dtype == bool
    for x, y, g in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        x, y = number(kind, x), number(kind, y)
        case = 3 if x != x or y != y else 0 if x < y else 1 if x == y else 2
        assert g == bool(COMPARISONS[op][case])


def test_comparisons_of_integers_packed_and_flushed_operands():
    a, b = np.array([0xFFFFFFFF, 1, 5], "u4"), np.array([1, 1, 7], "u4")
    assert nx.comparison("hi", "u32")(a, b).tolist() == [True, False, False]
    assert nx.comparison("ls", "u32")(a, b).tolist() == [False, True, True]
    assert (
        nx.comparison("lo", "u32")(a, b).tolist() == nx.comparison("lt", "u32")(a, b).tolist() == [False, False, True]
    )
    assert nx.comparison("hs", "u32")(a, b).tolist() == [True, True, False]
    assert nx.comparison("gt", "s32")(a.view("i4"), b.view("i4")).tolist() == [False, False, False]
    assert nx.comparison("ne", "b32")(a, b).tolist() == [True, False, True]
    halves = nx.comparison("lt", "f16x2")(np.array([0x3C000000], "u4"), np.array([0x40000000], "u4"))
    assert halves.tolist() == [[False, True]]
    tiny, zero = np.float32([TINY]), np.float32([-0.0])
    assert nx.comparison("eq", "f32", ftz=True)(tiny, zero).all()
    assert not nx.comparison("eq", "f32")(tiny, zero).any()
    assert nx.comparison("eq", "f16", ftz=True)(np.array([1], "u2"), np.array([0x8000], "u2")).all()


# -- conversions


def integers(rng, kind, count):
    dtype = nx.INTEGERS[kind]
    total = 8 * dtype.itemsize
    drawn = rng.integers(0, 2**64, count, dtype=np.uint64) >> rng.integers(0, 64, count, dtype=np.uint64)
    powers = [(1 << int(rng.integers(0, total))) + int(rng.integers(-2, 3)) for _ in range(count)]
    long = [(1 << total - 1) + (1 << int(rng.integers(0, total))) + int(rng.integers(-1, 2)) for _ in range(count)]
    all_ = [*drawn.tolist(), *powers, *long, 0, 1, (1 << total - 1) - 1, 1 << total - 1, (1 << total) - 1]
    return np.array([v % (1 << total) for v in all_], np.uint64).astype(f"u{dtype.itemsize}").view(dtype)


def legal_roundings(dst, src):
    every = (None, "rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")
    found = []
    for rnd in every:
        try:
            nx.conversion(dst, src, rnd)
        except ValueError:
            continue
        found.append(rnd)
    return found


TO_INTEGER = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def converted(dst, src, rnd, x):
    """The integer, or the pattern (None for NaN), that a source integer or pattern must become."""
    if src in nx.INTEGERS:
        value, nan, negative = x, False, False
    else:
        value = number(src, x)
        nan, negative = value != value, is_negative(src, x)
    if dst in nx.INTEGERS:
        info = np.iinfo(nx.INTEGERS[dst])
        if src in nx.INTEGERS:
            low = value % (1 << info.bits)
            return low - (1 << info.bits) if low > info.max else low
        if nan:
            if src != "f64" and info.bits < 64:
                return 0
            return 1 << info.bits - 1 if info.min == 0 else info.min
        if is_infinite(value):
            return info.max if value > 0 else info.min
        return min(max(TO_INTEGER[rnd](value), info.min), info.max)
    if nan:
        return None
    if rnd in TO_INTEGER and not is_infinite(value):
        value = Fraction(TO_INTEGER[rnd](value))
    return rounded(dst, value, rnd if rnd in ("rn", "rz", "rm", "rp", "rna") else "rn", negative)


@pytest.mark.parametrize("src", [*nx.INTEGERS, "f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("dst", [*nx.INTEGERS, *nx.FLOATS])
@given(seed=SEEDS)
@settings(max_examples=3, deadline=None)
def test_conversions_of_every_pair_of_types(dst, src, seed):
    rng = np.random.default_rng(seed)
    roundings = legal_roundings(dst, src)
    assert bool(roundings) == (dst != "tf32" or src == "f32")
    for rnd in roundings:
        if src in nx.INTEGERS:
            source = integers(rng, src, 12)
            given_ = source.tolist()
        else:
            bits = patterns(rng, src, 15)
            source, given_ = values(src, bits), bits.tolist()
        got = nx.conversion(dst, src, rnd)(source)
        expected = [converted(dst, src, rnd, x) for x in given_]
        if dst in nx.INTEGERS:
            assert got.dtype == nx.INTEGERS[dst]
            assert got.tolist() == expected, (rnd, given_)
        else:
            assert got.dtype == FORMATS[dst][4]
            same(dst, bits_of(dst, got), expected)


@pytest.mark.parametrize("src", ["bf16", "f32", "f64"])
@pytest.mark.parametrize("dst", list(nx.INTEGERS))
def test_floats_at_the_ends_of_the_integers(dst, src):
    powers = [rounded(src, s * 2**k, "rn") for k in (7, 8, 15, 16, 31, 32, 63, 64) for s in (1, -1)]
    given_ = [p + step for p in powers for step in (-1, 0, 1)]
    bits = np.array(given_, np.uint64).astype(FORMATS[src][3])
    for rnd in TO_INTEGER:
        got = nx.conversion(dst, src, rnd)(values(src, bits))
        assert got.tolist() == [converted(dst, src, rnd, b) for b in given_]


def test_f64_to_f16_does_not_pass_through_f32():
    # 1 + 2^-11 + 2^-40 is above the middle of two f16; an f32 in between would put it there.
    x = np.array([1 + 2.0**-11 + 2.0**-40, -(1 + 2.0**-11 + 2.0**-40), 1 + 2.0**-11])
    assert nx.conversion("f16", "f64", "rn")(x).tolist() == [0x3C01, 0xBC01, 0x3C00]
    assert nx.conversion("bf16", "f64", "rn")(np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8])).tolist() == [
        0x3F81,
        0x3F80,
    ]


@pytest.mark.parametrize("src", list(nx.INTEGERS))
@pytest.mark.parametrize("dst", list(nx.INTEGERS))
@given(seed=SEEDS)
@settings(max_examples=3, deadline=None)
def test_sat_clamps_integers(dst, src, seed):
    to, of = np.iinfo(nx.INTEGERS[dst]), np.iinfo(nx.INTEGERS[src])
    if to.min <= of.min and of.max <= to.max:
        with pytest.raises(ValueError, match="sat"):
            nx.conversion(dst, src, sat=True)
        return
    source = integers(np.random.default_rng(seed), src, 20)
    got = nx.conversion(dst, src, sat=True)(source)
    assert got.dtype == nx.INTEGERS[dst]
    assert got.tolist() == [min(max(x, to.min), to.max) for x in source.tolist()]


def test_conversions_flush_and_saturate():
    tiny = np.float32([TINY, -TINY, 2.0**-126])
    assert nx.conversion("s32", "f32", "rpi", ftz=True)(tiny).tolist() == [0, 0, 1]
    assert nx.conversion("s32", "f32", "rmi")(tiny).tolist() == [0, -1, 0]
    assert nx.conversion("f32", "f32", "rpi", ftz=True)(tiny).view("u4").tolist() == [0, 1 << 31, 0x3F800000]
    assert nx.conversion("f32", "f32", ftz=True)(tiny).view("u4").tolist() == [0, 1 << 31, 0x00800000]
    assert nx.conversion("f64", "f32", ftz=True)(tiny).tolist() == [0, 0, 2.0**-126]
    assert nx.conversion("f32", "bf16", ftz=True)(np.array([1, 0x8001, 0x80], "u2")).view("u4").tolist() == [
        0, 1 << 31, 0x00800000,
    ]  # fmt: skip
    below = np.array([2.0**-126 * (1 - 2.0**-30), 2.0**-127])
    assert nx.conversion("f32", "f64", "rn", ftz=True)(below).tolist() == [2.0**-126, 0]
    x = np.float32([NAN, -1, 0.25, 3, INF, -0.0])
    assert nx.conversion("f32", "f32", sat=True)(x).view("u4").tolist() == [0, 0, 0x3E800000, 0x3F800000, 0x3F800000, 0]
    assert nx.conversion("f16", "f32", "rn", sat=True)(x).tolist() == [0, 0, 0x3400, 0x3C00, 0x3C00, 0]
    assert nx.conversion("f32", "s32", "rn", sat=True)(np.array([-5, 0, 7], "i4")).tolist() == [0, 0, 1]


@pytest.mark.parametrize("dst", ["f16", "bf16", "tf32"])
@pytest.mark.parametrize("rnd", ["rn", "rz", "rna"])
@given(seed=SEEDS)
@few
def test_relu_and_satfinite_conversions(dst, rnd, seed):
    if (rnd == "rna") != (dst == "tf32") and rnd == "rna":
        return
    bits = patterns(np.random.default_rng(seed), "f32", 40)
    x = bits.view(np.float32)
    total = width(dst)
    sign, largest = 1 << total - 1, {"f16": 0x7BFF, "bf16": 0x7F7F, "tf32": 0x7F7FE000}[dst]
    plain = [converted(dst, "f32", rnd, b) for b in bits.tolist()]
    canonical = sign - 1

    def clamp(e):
        return canonical if e is None else e & sign | min(e & ~sign, largest)

    def relu(e):
        return canonical if e is None else 0 if e & sign else e

    make = nx.conversion
    assert bits_of(dst, make(dst, "f32", rnd, relu=True)(x)).tolist() == [relu(e) for e in plain]
    assert bits_of(dst, make(dst, "f32", rnd, satfinite=True)(x)).tolist() == [clamp(e) for e in plain]
    both = make(dst, "f32", rnd, relu=True, satfinite=True)(x)
    assert bits_of(dst, both).tolist() == [relu(None if e is None else clamp(e)) for e in plain]


@pytest.mark.parametrize("dst", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("rnd", ["rn", "rz"])
@pytest.mark.parametrize("clean", [False, True])
@given(seed=SEEDS)
@few
def test_pack_pair_puts_its_first_operand_above(dst, rnd, clean, seed):
    a, b = operands(np.random.default_rng(seed), "f32", 2)
    if clean:  # without NaN the quick way is taken
        fine = ~(np.isnan(a.view("f4")) | np.isnan(b.view("f4")))
        a, b = a[fine], b[fine]
    got = nx.pack_pair(dst, rnd)(a.view(np.float32), b.view(np.float32))
    assert got.dtype == np.uint32
    for half, source in ((got >> 16, a), (got & 0xFFFF, b)):
        same(dst[:-2], half.astype("u2"), [converted(dst[:-2], "f32", rnd, x) for x in source.tolist()])


def test_pack_pair_modifiers():
    a, b = np.float32([-2, NAN]), np.float32([1e30, 1])
    assert nx.pack_pair("f16x2", "rn", relu=True, satfinite=True)(a, b).tolist() == [0x00007BFF, 0x7FFF3C00]


# -- 8 bits and fewer

MINI = {  # exponent bits, mantissa bits, bias, largest
    "e4m3": (4, 3, 7, 448),
    "e5m2": (5, 2, 15, 57344),
    "e2m1": (2, 1, 1, 6),
    "e2m3": (2, 3, 1, 7.5),
    "e3m2": (3, 2, 3, 28),
}


@pytest.mark.parametrize("form", list(MINI))
def test_small_formats_decode_to_their_values(form):
    e, m, bias, largest = MINI[form]
    codes = np.arange(1 << 1 + e + m, dtype=np.uint8)
    got = nx.mini_decode(form)(codes).tolist()
    for code, g in zip(codes.tolist(), got, strict=True):
        sign, exponent, mantissa = code >> e + m, code >> m & (1 << e) - 1, code & (1 << m) - 1
        value = Fraction(mantissa + ((1 << m) if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - bias - m)
        if value > largest:
            infinite = form == "e5m2" and mantissa == 0
            assert number("f16", g) == (-INF if sign else INF) if infinite else math.isnan(number("f16", g))
        else:
            assert number("f16", g) == (-value if sign else value)
            assert is_negative("f16", g) == bool(sign)
    assert nx.mini_decode(form, relu=True)(codes[-1 << e + m :])[0] == 0


@pytest.mark.parametrize("form", list(MINI))
@given(seed=SEEDS)
@few
def test_small_formats_take_the_nearest_value(form, seed):
    e, m, _, largest = MINI[form]
    rng = np.random.default_rng(seed)
    codes = np.arange(1 << e + m, dtype=np.uint8)
    decoded = [number("f16", d) for d in nx.mini_decode(form)(codes).tolist()]
    finite = [d for d in decoded if isinstance(d, Fraction)]
    middles = [float((x + y) / 2) for x, y in itertools.pairwise(finite)]
    near = np.nextafter(np.float32(middles), np.float32(rng.choice([-1e9, 1e9], len(middles))))
    x = np.concatenate([patterns(rng, "f32", 30).view("f4"), np.float32(middles), near, rng.normal(0, 9, 40)])
    x = x.astype(np.float32)
    got = nx.mini_encode(form)(x).tolist()
    positive = nx.mini_encode(form, relu=True)(x).tolist()
    for v, g, p in zip(x.tolist(), got, positive, strict=True):
        if math.isnan(v):
            assert g == p == {"e4m3": 0x7F, "e5m2": 0x7F}.get(form, len(finite) - 1)
            continue
        target = Fraction(min(abs(v), largest))
        best = min(range(len(finite)), key=lambda c: (abs(finite[c] - target), c % 2))
        negative = math.copysign(1, v) < 0
        assert g == best + ((1 << e + m) if negative else 0), v
        assert p == (0 if negative else best)


@given(bits=st.integers(0, 2**32 - 1))
@example(bits=0x7FFFFFFF)
@example(bits=0xFFFFFFFF)
def test_nan_never_becomes_a_number_in_bf16(bits):
    x = np.array([bits], np.uint32).view(np.float32)
    for rnd in ("rn", "rz", "rm", "rp"):
        assert np.isnan(nx.bf16_to_f32(nx.f32_to_bf16(x, rnd)))[0] == np.isnan(x)[0]
