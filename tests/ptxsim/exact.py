"""Number formats and rounding stated with fractions, for tests: independent of how the simulator computes."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

# Of a format: bits of the significand, smallest normal exponent, largest exponent, pattern type, value type. A tf32 is
# an f32 of which `rounded` keeps 11 bits.
FORMATS = {
    "f16": (11, -14, 15, np.uint16, np.uint16),
    "bf16": (8, -126, 127, np.uint16, np.uint16),
    "tf32": (24, -126, 127, np.uint32, np.uint32),
    "f32": (24, -126, 127, np.uint32, np.float32),
    "f64": (53, -1022, 1023, np.uint64, np.float64),
}


def width(kind):
    return 8 * np.dtype(FORMATS[kind][3]).itemsize


def fields(kind, bits):
    p = FORMATS[kind][0]
    total = width(kind)
    return bits >> (total - 1), bits >> (p - 1) & (1 << total - p) - 1, bits & (1 << p - 1) - 1


def number(kind, bits):
    """A pattern as a Fraction, or as a float that is infinite or NaN; the sign of a zero is in the pattern only."""
    p, low, high, _, _ = FORMATS[kind]
    sign, exponent, mantissa = fields(kind, bits)
    if exponent == high - low + 2:
        return math.nan if mantissa else -math.inf if sign else math.inf
    significand = mantissa + (1 << p - 1 if exponent else 0)
    value = Fraction(significand) * Fraction(2) ** (max(exponent, 1) - 1 + low - (p - 1))
    return -value if sign else value


def is_infinite(x):
    return isinstance(x, float) and math.isinf(x)


def is_negative(kind, bits):
    return bool(fields(kind, bits)[0])


def rounded(kind, value, rnd, negative=False):
    """The pattern of an exact value (or infinity) in this format; `negative` is the sign of a zero."""
    p, low, high, _, _ = FORMATS[kind]
    if kind == "tf32":
        p = 11
    shift = 13 if kind == "tf32" else 0
    sign = (1 << width(kind) - 1) if (value < 0 or (value == 0 and negative)) else 0
    infinity = (high - low + 2) << p - 1
    if value == 0:
        return sign
    if is_infinite(value):
        return sign | infinity << shift
    magnitude = abs(Fraction(value))
    e = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** e > magnitude:
        e -= 1
    assert Fraction(2) ** e <= magnitude < Fraction(2) ** (e + 1)
    e = max(e, low)
    ulp = Fraction(2) ** (e - p + 1)
    n, rest = divmod(magnitude, ulp)
    up = {
        "rn": rest > ulp / 2 or (rest == ulp / 2 and n % 2 == 1),
        "rna": rest >= ulp / 2,
        "rz": False,
        "rm": rest > 0 and sign != 0,
        "rp": rest > 0 and sign == 0,
    }[rnd]
    n += up
    if n * ulp >= Fraction(2) ** (high + 1):
        stays = rnd == "rz" or rnd == ("rp" if sign else "rm")
        return sign | (infinity - 1 if stays else infinity) << shift
    # With the hidden bit added to the exponent field, n counts the numbers of the binade.
    return sign | (((e - low) << p - 1) + int(n)) << shift


def exact(op, kind, rnd, *bits):
    """The pattern that add, sub, mul, fma, div or rcp must give, None for NaN."""
    v = [number(kind, b) for b in bits]
    s = [is_negative(kind, b) for b in bits]
    if op == "rcp":
        op, v, s = "div", [Fraction(1), *v], [False, *s]
    if any(isinstance(x, float) and math.isnan(x) for x in v):
        return None
    infinite = [isinstance(x, float) for x in v]
    if op in ("mul", "div"):
        negative = s[0] != s[1]
        if op == "div":
            if (infinite[0] and infinite[1]) or (not infinite[0] and not infinite[1] and v[0] == 0 and v[1] == 0):
                return None
            if infinite[0] or (v[1] == 0 and not infinite[1]):
                return rounded(kind, -math.inf if negative else math.inf, rnd)
            if infinite[1]:
                return rounded(kind, 0, rnd, negative)
            return rounded(kind, v[0] / v[1], rnd, negative)
        if any(infinite):
            if any(not i and x == 0 for i, x in zip(infinite, v, strict=True)):
                return None
            return rounded(kind, -math.inf if negative else math.inf, rnd)
        return rounded(kind, v[0] * v[1], rnd, negative)
    if op == "sub":
        v[1], s[1] = -v[1], not s[1]
    if op == "fma":
        negative = s[0] != s[1]
        if infinite[0] or infinite[1]:
            if (not infinite[0] and v[0] == 0) or (not infinite[1] and v[1] == 0):
                return None
            product = -math.inf if negative else math.inf
        else:
            product = v[0] * v[1]
        v, s = [product, v[2]], [negative, s[2]]
        infinite = [isinstance(x, float) for x in v]
    if any(infinite):
        total = sum(x for x, i in zip(v, infinite, strict=True) if i)
        return None if math.isnan(total) else rounded(kind, total, rnd)
    total = v[0] + v[1]
    return rounded(kind, total, rnd, s[0] if s[0] == s[1] else rnd == "rm")


def same(kind, got, expected):
    """Equal patterns, or both NaN."""
    for g, e in zip(np.asarray(got).ravel().tolist(), expected, strict=True):
        if e is None:
            assert math.isnan(number(kind, g)), f"{g:#x} instead of a NaN"
        else:
            assert g == e, f"{g:#x} ({number(kind, g)}) instead of {e:#x} ({number(kind, e)})"


def patterns(rng, kind, count):
    """Bit patterns of a format: any, sparse ones, neighbours of powers of two and integers, and the special ones."""
    p, low, high, uint, _ = FORMATS[kind]
    total = width(kind)
    top = high - low + 2
    any_ = rng.integers(0, 2**total, count, dtype=np.uint64).tolist()
    sparse = []
    for _ in range(count):
        exponent = int(rng.choice([rng.integers(0, top), rng.integers(0, 4), top - 1, -low + rng.integers(-3, 70)]))
        mantissa = 0
        for bit in rng.integers(0, p - 1, rng.integers(0, 4)):
            mantissa ^= 1 << int(bit)
        if rng.integers(3) == 0:
            mantissa ^= (1 << p - 1) - 1
        sparse.append(min(max(exponent, 0), top) << p - 1 | mantissa | int(rng.integers(2)) << total - 1)
    special = [0, 1, (1 << p - 1) - 1, 1 << p - 1, top << p - 1, (top << p - 1) - 1, (top << p - 1) + 1]
    special += [(top << p - 1) | (1 << p - 1) - 1, -low << p - 1, (-low + 1) << p - 1]
    special += [s | 1 << total - 1 for s in special]
    chosen = any_ + sparse + special
    order = rng.permutation(len(chosen))
    return np.array([chosen[i] for i in order], np.uint64).astype(uint)
