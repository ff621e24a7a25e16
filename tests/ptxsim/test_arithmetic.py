"""Arithmetic that nvcc compiled, run in the simulator: the library's functions within the accuracy CUDA documents for
them, everything else against Python's integers and fractions, bit for bit."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import ptxsim
from ptxsim.exact import exact, number, patterns, rounded, same

SOURCE = "tests/ptxsim/kernels/arithmetic.cu"
COUNT = 256
# The CUDA C++ Programming Guide's table of maximum errors gives none of the functions used here more (powf).
LIBRARY_ULPS = 4


@pytest.fixture(params=[80, 90, 100])
def target(request):
    return request.param


@pytest.fixture
def rng(fresh_seed):
    return np.random.default_rng(fresh_seed)


def run(name, target, x, y, rows):
    """The rows that a kernel computes from COUNT elements of x and y, in their type (int64 for `integer`)."""
    out = np.zeros((rows, COUNT), np.int64 if name == "integer" else x.dtype)
    kernel = ptxsim.cuda(SOURCE, name, target=target)
    tensors = [torch.from_numpy(t.view(f"i{t.itemsize}")) for t in (x, y, out)]
    ptxsim.launch(kernel, COUNT // 128, *tensors, COUNT, block=128)
    return out


def floats(rng):
    x = rng.normal(size=COUNT) * np.exp(1.5 * rng.normal(size=COUNT))
    return x.astype(np.float32), rng.normal(size=COUNT).astype(np.float32)


def power(a, b):
    return abs(a) ** b


def quotient(a, b):
    return a / b


LIBRARY = [math.exp, lambda a: math.log(abs(a)), math.sin, math.cos, math.tanh, math.erf, power, lambda a: 2.0**a]
LIBRARY += [lambda a: math.log2(abs(a)), math.expm1, lambda a: math.log1p(abs(a))]
LIBRARY += [
    lambda a: math.copysign(abs(a) ** (1 / 3), a),
    math.atan2,
    lambda a: 1 / math.sqrt(abs(a)),
    quotient,
    math.exp,
]


def test_the_library_is_as_accurate_as_documented(target, rng):
    x, y = floats(rng)
    x = np.clip(x, -40, 40)
    out = run("float_library", target, x, y, len(LIBRARY))
    for row, function in zip(out.tolist(), LIBRARY, strict=True):
        takes = 2 if function in (power, math.atan2, quotient) else 1
        for a, b, got in zip(x.tolist(), y.tolist(), row, strict=True):
            expected = function(*(a, b)[:takes])
            ulp = float(np.spacing(np.float32(abs(expected))))
            assert abs(got - expected) <= LIBRARY_ULPS * ulp, (function, a, b)


def test_rounded_operations_are_exact(target, rng):
    x, y = floats(rng)
    y[:4], x[:4] = [1, -0.0, 3, np.inf], [0.0, 2, -np.inf, 5]
    out = run("float_exact", target, x, y, 21).view(np.uint32)
    one = rounded("f32", 1, "rn")

    def of(op, rnd, *last):
        return lambda a, b: exact(op, "f32", rnd, *((a, b, *last) if op != "rcp" else (a,)))

    def whole(function):
        return lambda a, b: a if not finite(a) else rounded("f32", Fraction(function(number("f32", a))), "rn", a >> 31)

    def finite(a):
        return isinstance(number("f32", a), Fraction)

    def root(a, b):
        return int(np.sqrt(np.abs(np.uint32(a).view("f4"))).view("u4"))  # correctly rounded by IEEE 754

    def fmod(a, b):
        v, w = number("f32", a), number("f32", b)
        if not finite(a) or w == 0:
            return None
        rest = v - w * math.trunc(v / w) if finite(b) else v
        return rounded("f32", rest, "rn", a >> 31)

    def saturated(a, b):
        v = number("f32", a)
        return 0 if v <= 0 else min(a, one)

    def least(a, b):
        return min((number("f32", v), -(v >> 31), v) for v in (a, b))[2]

    def greatest(a, b):
        return max((number("f32", v), -(v >> 31), v) for v in (a, b))[2]

    def by_way_of_f64(a, b):
        v, w = (float(np.uint32(t).view("f4")) for t in (a, b))
        r = np.float32(np.divide(v, w))
        return None if np.isnan(r) else int(r.view("u4"))

    def to_integer(a, b):
        v = number("f32", exact("mul", "f32", "rn", a, rounded("f32", 1 << 20, "rn")))
        whole = math.trunc(v) if isinstance(v, Fraction) else v
        return rounded("f32", min(max(whole, -(1 << 63)), (1 << 63) - 1), "rn")

    def through(kind):
        def convert(a, b):
            v = number("f32", a)
            return rounded("f32", number(kind, rounded(kind, v, "rn", a >> 31)), "rn", a >> 31)

        return convert

    def signs(a, b):
        return rounded("f32", (number("f32", a) < number("f32", b)) + 2 * (a >> 31), "rn")

    rows = [of("div", "rn"), root, of("fma", "rn", one), of("add", "rz"), of("mul", "rp"), of("fma", "rm", one)]
    rows += [
        of("rcp", "rn"),
        of("div", "rz"),
        of("sub", "rm"),
        fmod,
        whole(math.floor),
        whole(round),
        whole(math.trunc),
    ]
    rows += [saturated, least, greatest, by_way_of_f64, to_integer, through("f16"), through("bf16"), signs]
    with np.errstate(all="ignore"):
        for n, (row, expect) in enumerate(zip(out, rows, strict=True)):
            expected = [expect(a, b) for a, b in zip(x.view("u4").tolist(), y.view("u4").tolist(), strict=True)]
            try:
                same("f32", row, expected)
            except AssertionError as error:
                raise AssertionError(f"row {n}: {error}") from None


def wrapped(value, bits=32, signed=True):
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> bits - 1 else value


def integer_rows(a, b):
    m32, m64 = (1 << 32) - 1, (1 << 64) - 1
    ua, ub = a & m32, b & m32
    la, lb = (a << 20) ^ b, b | 1
    ula, ulb = la & m64, lb & m64

    def cut(p, q):
        return abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1)

    def parts(v, size, signed):
        return [wrapped(v >> size * i, size, signed) for i in range(32 // size)]

    def dot(p, q, signed):
        return sum(v * w for v, w in zip(parts(p, 8, signed), parts(q, 8, signed), strict=True))

    def permuted(select):
        source = (ub << 32 | ua).to_bytes(8, "little")
        return int.from_bytes(bytes(source[select >> 4 * i & 7] for i in range(4)), "little")

    def lowest(v):
        return (v & -v).bit_length()

    both = ub << 32 | ua
    yield from (wrapped(cut(a, b | 1)), a - (b | 1) * cut(a, b | 1), ua // (ub | 1), ua % (ub | 1))
    yield from (cut(la, lb), la - lb * cut(la, lb), ula // ulb, ula % ulb)
    yield from (cut(a, 7), ua % 10, cut(la, 1000003))
    yield from (a * b >> 32, ua * ub >> 32, la * lb >> 64, ula * ulb >> 64, la * lb >> 64, ula * ulb + ula >> 40)
    yield from (ua.bit_count(), ula.bit_count(), 32 - ua.bit_length(), 64 - ula.bit_length(), lowest(ua), lowest(ula))
    yield from (int(f"{ua:032b}"[::-1], 2), int(f"{ula:064b}"[::-1], 2), permuted(0x5410), permuted(ub & 0x7777))
    yield from ((both << (ub & 31) >> 32) & m32, both >> 5 & m32, (both << min(ub, 32) >> 32) & m32)
    yield from (ua + abs(a - b) & m32, wrapped(5 + dot(ua, ub, True)), 5 + dot(ua, ub, False) & m32)
    h, y = parts(ua, 16, True), parts(ub, 8, True)
    yield wrapped(5 + h[0] * y[2] + h[1] * y[3])
    yield from (wrapped((a & b) | ((~a & 0x55) ^ (b << 3))), a >> 3, ua >> 3, la >> 33, ula << 7)
    yield from (wrapped(a, 16) * wrapped(b, 16), wrapped(a, 8), b & 0xFF, la if a > b else lb)
    yield from (wrapped(wrapped(a, 24) * wrapped(b, 24)), min(a, b), max(ua, ub), wrapped(abs(a)))
    yield wrapped(rounded("f32", Fraction(la), "rn"))
    yield rounded("f64", Fraction(ula), "rn")


def test_integers_and_bits(target, rng):
    def draw():
        v = rng.integers(-(1 << 31), 1 << 31, COUNT) >> rng.integers(0, 31, COUNT)
        return v.astype(np.int32)

    x, y = draw(), draw()
    extreme = [0, -1, 1, (1 << 31) - 1, -(1 << 31)]
    x[:25], y[:25] = np.repeat(extreme, 5), np.tile(extreme, 5)
    expected = [[wrapped(v, 64) for v in integer_rows(a, b)] for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    out = run("integer", target, x, y, len(expected[0]))
    for n, row in enumerate(out.tolist()):
        assert row == [e[n] for e in expected], f"row {n}"


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_halves(kind, target, rng):
    x, y = (np.concatenate([patterns(rng, kind, COUNT) for _ in range(2)])[: 2 * COUNT] for _ in range(2))
    y[:COUNT] = x[:COUNT] ^ rng.choice([0, 1, 0x8000], COUNT).astype("u2")  # near each other, or opposite
    name = "half_pairs" if kind == "f16" else "bfloat16_pairs"
    out = run(name, target, x.view("u4"), y.view("u4"), 11).view("u2")

    def order(op, nan):
        def choose(a, b):
            v, w = number(kind, a), number(kind, b)
            if v != v or w != w:
                return None if nan or (v != v and w != w) else a if w != w else b
            return op((v, -(a >> 15), a), (w, -(b >> 15), b))[2]

        return choose

    def relu(a, b):
        e = exact("fma", kind, "rn", a, b, a)
        return e if e is None or not e >> 15 else 0

    def greater_or_unordered(a, b):
        return 0 if number(kind, a) <= number(kind, b) else one

    one = rounded(kind, 1, "rn")
    rows = [lambda a, b, op=op: exact(op, kind, "rn", a, b) for op in ("add", "sub", "mul")]
    rows += [
        lambda a, b: exact("fma", kind, "rn", a, b, a),
        relu,
        order(max, False),
        order(min, False),
        order(max, True),
    ]
    rows += [lambda a, b: None if number(kind, a) != number(kind, a) else a ^ 0x8000]
    rows += [lambda a, b: None if number(kind, a) != number(kind, a) else a & 0x7FFF, greater_or_unordered]
    for n, (row, expect) in enumerate(zip(out, rows, strict=True)):
        try:
            same(kind, row, [expect(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)])
        except AssertionError as error:
            raise AssertionError(f"row {n}: {error}") from None
