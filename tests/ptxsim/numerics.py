"""What PTX floating-point instructions and conversions compute, as functions of numpy arrays.

`arithmetic`, `approximate`, `extremum`, `comparison`, `conversion` and their like resolve the modifiers of an
instruction once and return a function of arrays, so that nothing is decided while a kernel runs and the plain cases
are one numpy call. Section numbers are those of the PTX ISA 9.0.

Values: f32 and f64 are numpy floats. f16 and bf16 are uint16 bit patterns, tf32 is the uint32 pattern of an f32.
Packed types are one integer with element 0 in its low bits: f16x2 and bf16x2 in uint32, f32x2 in uint64. Functions
broadcast, take numpy scalars too, and expect to run under `np.errstate(all="ignore")`.

Every arithmetic result and conversion is the exact result rounded once. Two facts carry this:

* A product of two f32 is exact in f64, and rounding an f64 to 24 bits or fewer is right in every mode when the f64 is
  itself either exact or rounded to odd (Boldo and Melquiond, "When double rounding is odd", 2005).
* The quotient of two f32, or the root of one, is never so close to an f32, or to the middle of two, that rounding it to
  f64 first reaches it.

NaN payloads are unspecified in f32, f16 and bf16 (9.7.3, 9.7.4), except where the ISA says canonical: all bits but the
sign are then set.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

F16, F32, F64 = np.float16, np.float32, np.float64
U16, U32, U64, I64 = np.uint16, np.uint32, np.uint64, np.int64

TINY32 = F32(2.0**-126)  # the smallest normal f32
NAN16, NAN32, NAN64 = U16(0x7FFF), U32(0x7FFFFFFF), U64(0x7FFFFFFF_FFFFFFFF)
_SIGN = {2: U16(1 << 15), 4: U32(1 << 31), 8: U64(1 << 63)}
_UINT = {2: U16, 4: U32, 8: U64}
_EXPONENT16 = {"f16": U16(0x7C00), "bf16": U16(0x7F80)}
_MAX16 = {"f16": U16(0x7BFF), "bf16": U16(0x7F7F)}
_LOW28 = I64((1 << 28) - 1)

PACKED = {"f16x2": ("f16", U16, U32), "bf16x2": ("bf16", U16, U32), "f32x2": ("f32", F32, U64)}
ROUNDINGS = ("rn", "rz", "rm", "rp")
INTEGER_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


# -- packed registers


def unpack(x, part) -> np.ndarray:
    """The elements of packed registers: shape (...) to (..., k), element 0 from the low bits."""
    x = np.asarray(x)
    return np.ascontiguousarray(x).view(part).reshape((*x.shape, -1))


def pack(parts, whole) -> np.ndarray:
    """The reverse of `unpack`."""
    return np.ascontiguousarray(parts).view(whole).reshape(parts.shape[:-1])


def packed(function: Callable, part, whole) -> Callable:
    """The function of packed registers that does `function` to each element."""
    return lambda *operands: pack(function(*(unpack(x, part) for x in operands)), whole)


# -- rounding


def _sum_error(a, b, s):
    """a + b - s exactly, for s = a + b rounded to nearest (Knuth's TwoSum); NaN where s isn't finite."""
    t = s - a
    return (a - (s - t)) + (b - t)


def _odd_sum(a, b):
    """a + b in f64, such that a later rounding to 24 bits or fewer rounds the exact sum, in every mode.

    Only a sum whose low 28 bits are zero can be an f32, or lie in the middle of two (normal or not), when it isn't
    exact; those are moved to the odd neighbour on the side of the exact sum.
    """
    s = a + b
    bits = s.view(I64)
    risky = (bits & _LOW28) == 0
    if not risky.any():
        return s
    error = _sum_error(a, b, s)
    risky &= (error != 0) & np.isfinite(error)
    if not risky.any():
        return s
    step = np.where((error > 0) == (s > 0), I64(1), I64(-1))  # the pattern of a larger or smaller magnitude
    return np.where(risky, bits + step, bits).view(F64)


def _round_float(x, dtype, rnd: str):
    """f64 (exact, or rounded to odd) or f32 to a narrower numpy float."""
    r = x.astype(dtype)
    if rnd == "rn":
        return r
    if rnd == "rz":
        return np.where(np.abs(r) > np.abs(x), np.nextafter(r, dtype(0)), r)
    if rnd == "rm":
        return np.where(r > x, np.nextafter(r, dtype(-np.inf)), r)
    return np.where(r < x, np.nextafter(r, dtype(np.inf)), r)


def _odd_f32(x):
    """f64 to the pattern of an f32, rounded to odd."""
    r = x.astype(F32)
    bits = r.view(U32)
    inexact = r != x
    if not inexact.any():
        return bits
    return (bits - (np.abs(r) > np.abs(x))) | inexact


def _drop(bits, count: int, rnd: str):
    """Rounds a sign-magnitude pattern to a multiple of 2**count; an overflow carries into infinity."""
    kind = bits.dtype.type
    unit = 1 << count
    if rnd == "rn":
        bits = bits + (((bits >> kind(count)) & kind(1)) + kind(unit // 2 - 1))
    elif rnd == "rna":
        bits = bits + kind(unit // 2)
    elif rnd != "rz":
        negative = (bits & _SIGN[bits.itemsize]) != 0
        bits = bits + kind(unit - 1) * (negative if rnd == "rm" else ~negative)
    return bits & ~kind(unit - 1)


def _rounded_up_to_bf16(bits):
    """An f32 pattern whose upper half is the nearest bf16 (ties to even), unless it is NaN."""
    t = bits >> U32(16)
    t &= U32(1)
    t += U32(0x7FFF)
    t += bits
    return t


def _bf16_of_bits(bits, rnd: str):
    """The pattern of an f32 (exact, or rounded to odd) to bf16; any NaN becomes the canonical one."""
    out = _rounded_up_to_bf16(bits) if rnd == "rn" else _drop(bits, 16, rnd)
    out = (out >> U32(16)).astype(U16)
    nan = np.isnan(bits.view(F32))
    return np.where(nan, NAN16, out) if nan.any() else out


def f32_to_bf16(x, rnd: str = "rn"):
    """f32 to bf16 patterns."""
    return _bf16_of_bits(x.view(U32), rnd)


def bf16_to_f32(x):
    """bf16 patterns to f32, exactly."""
    return (x.astype(U32) << U32(16)).view(F32)


def _to_f32_or_f64(kind: str) -> Callable:
    """An exact widening of this kind's representation to a numpy float."""
    return {"f16": lambda x: x.view(F16).astype(F32), "bf16": bf16_to_f32}.get(kind, lambda x: x)


# -- modifiers


def flush(x):
    """.ftz of f32: subnormals to zero of the same sign."""
    return x * (np.abs(x) >= TINY32)


def _flush16(bits, exponent):
    return np.where((bits & exponent) == 0, bits & U16(0x8000), bits)


def saturate(x):
    """.sat of f32, f64 and numpy f16: to [+0, 1], NaN to +0."""
    one = x.dtype.type(1)
    return np.where(x > 0, np.minimum(x, one), x.dtype.type(0))


def _saturate16(bits):
    return saturate(bits.view(F16)).view(U16)


def _relu16(kind: str) -> Callable:
    infinity = _EXPONENT16[kind]

    def relu(bits):
        nan = (bits & U16(0x7FFF)) > infinity
        return np.where(nan, NAN16, bits * (bits < U16(0x8000)))

    return relu


def _modified(core: Callable, kind: str, ftz: bool, sat: bool, relu: bool) -> Callable:
    """`core` with .ftz of its operands and result, .sat and .relu."""
    if ftz:
        if kind == "f32":
            zero = flush
        elif kind == "f16":

            def zero(bits):
                return _flush16(bits, _EXPONENT16["f16"])
        else:
            raise ValueError(f".ftz does not apply to .{kind}")
        inner = core

        def core(*operands):
            return zero(inner(*map(zero, operands)))

    if sat and relu:
        raise ValueError(".sat and .relu exclude each other")
    if sat:
        if kind not in ("f16", "f32"):
            raise ValueError(f".sat does not apply to .{kind}")
        limit = saturate if kind == "f32" else _saturate16
        unlimited = core

        def core(*operands):
            return limit(unlimited(*operands))

    if relu:
        if kind not in ("f16", "bf16"):
            raise ValueError(f".relu does not apply to .{kind}")
        clamp = _relu16(kind)
        unclamped = core

        def core(*operands):
            return clamp(unclamped(*operands))

    return core


# -- arithmetic: add, sub, mul, fma, div, rcp, sqrt with a rounding mode


def fma_f32(a, b, c):
    """fma.rn.f32 (9.7.3.6)."""
    s = np.multiply(a, b, dtype=F64) + c
    r = s.astype(F32)
    low = s.view(I64) & _LOW28
    if low.all():
        return r
    # Rounding s again differs from rounding the exact sum only if s is in the middle of two f32. (NaN is no such case,
    # but a common one: registers that a thread has never written hold it.)
    doubtful = (low == 0) & (s != r)
    if not doubtful.any() or not (doubtful & (s == s)).any():
        return r
    return _odd_sum(np.multiply(a, b, dtype=F64), np.asarray(c, F64)).astype(F32)


def _exact_in_f64(op: str) -> Callable:
    """The operation on f32 (or narrower) operands in f64, exact or such that rounding it again is right."""

    def wide(x):
        return x.astype(F64)

    return {
        "add": lambda a, b: _odd_sum(wide(a), wide(b)),
        "sub": lambda a, b: _odd_sum(wide(a), -wide(b)),
        "mul": lambda a, b: np.multiply(a, b, dtype=F64),
        "fma": lambda a, b, c: _odd_sum(np.multiply(a, b, dtype=F64), wide(c)),
        "div": lambda a, b: np.divide(a, b, dtype=F64),
        "rcp": lambda a: np.divide(1.0, a, dtype=F64),
        "sqrt": lambda a: np.sqrt(a, dtype=F64),
    }[op]


def _zero_sums_down(op: str, function: Callable) -> Callable:
    """IEEE 754 6.3: under .rm a sum that is exactly zero is -0, unless both addends are +0."""
    if op not in ("add", "sub", "fma"):
        return function

    def signed(*operands):
        r = function(*operands)
        zero = r == 0
        if not zero.any():
            return r
        if op == "fma":
            a, b, c = operands
            negative = (np.signbit(a) != np.signbit(b)) | np.signbit(c)
        else:
            a, b = operands
            negative = np.signbit(a) | (np.signbit(b) != (op == "sub"))
        return np.where(zero & negative, r.dtype.type(-0.0), r)

    return signed


_NEAREST = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt}
OPERANDS = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "div": 2, "rcp": 1, "sqrt": 1}


def _f32_core(op: str, rnd: str) -> Callable:
    if rnd == "rn":
        if op == "fma":
            return fma_f32
        return _NEAREST.get(op) or (lambda a: np.divide(F32(1), a))
    exact = _exact_in_f64(op)
    if rnd == "rm":
        exact = _zero_sums_down(op, exact)
    return lambda *operands: _round_float(exact(*operands), F32, rnd)


def _f64_core(op: str, rnd: str) -> Callable:
    if rnd == "rn" and op != "fma":
        return _NEAREST.get(op) or (lambda a: np.divide(1.0, a))

    def each(*operands):
        arrays = np.broadcast_arrays(*operands)
        values = [_exact_f64(op, rnd, *v) for v in zip(*(a.ravel().tolist() for a in arrays), strict=True)]
        return np.array(values, F64).reshape(arrays[0].shape)

    return each


def _f16_core(op: str) -> Callable:
    # numpy's float16 sums and products are made in f32, whose 24 bits are enough for rounding twice (2 * 11 + 2).
    if op == "fma":
        exact = _exact_in_f64("fma")
        return lambda a, b, c: exact(a.view(F16), b.view(F16), c.view(F16)).astype(F16).view(U16)
    plain = _NEAREST[op]
    return lambda a, b: plain(a.view(F16), b.view(F16)).view(U16)


def _bf16_core(op: str) -> Callable:
    if op != "fma":
        # 24 bits are enough for rounding twice, below the normal range too: sums lose nothing there, and of the 16
        # bits of a product none is lost unless it is less than 2^-134, which rounds to zero either way.
        plain = _NEAREST[op]
        return lambda a, b: f32_to_bf16(plain(bf16_to_f32(a), bf16_to_f32(b)))
    exact = _exact_in_f64("fma")
    return lambda *operands: _bf16_of_bits(_odd_f32(exact(*map(bf16_to_f32, operands))), "rn")


def arithmetic(
    op: str, kind: str, *, rnd: str = "rn", ftz: bool = False, sat: bool = False, relu: bool = False
) -> Callable:
    """add, sub, mul, fma, div, rcp or sqrt, rounded once (9.7.3.3 to 9.7.3.15, 9.7.4.1 to 9.7.4.4).

    Args:
        op: `add`, `sub`, `mul` or `fma`; for f32 and f64 also `div`, `rcp` and `sqrt`.
        kind: f32, f64, f32x2, f16, bf16, f16x2 or bf16x2.
        rnd: rn, rz, rm or rp; the 16-bit types have rn alone.
        ftz: subnormal operands and results to zero of their sign (f32, f32x2, f16, f16x2).
        sat: the result to [0, 1], NaN to +0 (f32, f16, f16x2).
        relu: a negative result to +0, NaN to the canonical one (fma of the 16-bit types).

    Returns:
        A function of as many arrays as the instruction has sources.

    Raises:
        ValueError: the instruction has no such form.
    """
    if kind in PACKED:
        if sat and kind == "f32x2":
            raise ValueError(".sat does not apply to .f32x2")
        kind, part, whole = PACKED[kind]
        return packed(arithmetic(op, kind, rnd=rnd, ftz=ftz, sat=sat, relu=relu), part, whole)
    if op not in OPERANDS or (op in ("div", "rcp", "sqrt") and kind not in ("f32", "f64")):
        raise ValueError(f"{op} does not exist for .{kind}")
    if rnd not in (ROUNDINGS if kind in ("f32", "f64") else ("rn",)):
        raise ValueError(f".{rnd} does not apply to {op}.{kind}")
    if relu and op != "fma":
        raise ValueError(f".relu does not apply to {op}")
    core = {
        "f32": lambda: _f32_core(op, rnd),
        "f64": lambda: _f64_core(op, rnd),
        "f16": lambda: _f16_core(op),
        "bf16": lambda: _bf16_core(op),
    }[kind]()
    return _modified(core, kind, ftz, sat, relu)


def _exact_f64(op: str, rnd: str, *values: float) -> float:
    """One f64 operation in Python integers: every finite value is n * 2**e."""
    if not all(map(math.isfinite, values)) or op in ("div", "rcp", "sqrt"):
        special = _special_f64(op, *values)
        if special is not None:
            return special
    if op == "rcp":
        op, values = "div", (1.0, *values)
    (a, ea), *rest = map(_integer, values)
    if op == "sqrt":
        a, ea = a << 120 + ea % 2, ea - ea % 2 - 120  # an even exponent, and bits to spare
        root = math.isqrt(a)
        return _rounded_f64(2 * root + (root * root != a), ea // 2 - 1, rnd)
    b, eb = rest[0]
    if op == "div":
        if not a:
            return math.copysign(0.0, values[0]) * math.copysign(1.0, values[1])
        quotient, remainder = divmod(abs(a) << 120, abs(b))
        n = 2 * quotient + (remainder != 0)
        return _rounded_f64(-n if (a < 0) != (b < 0) else n, ea - eb - 121, rnd)
    if op == "mul":
        if not a * b:
            return values[0] * values[1]
        return _rounded_f64(a * b, ea + eb, rnd)
    addends = [values[0], -values[1] if op == "sub" else values[1]]
    if op == "fma":
        product_sign = math.copysign(1.0, values[0]) * math.copysign(1.0, values[1])
        addends = [product_sign, values[2]]
        a, ea = a * b, ea + eb
        b, eb = rest[1]
    elif op == "sub":
        b = -b
    e = min(ea, eb)
    n = (a << ea - e) + (b << eb - e)
    if n:
        return _rounded_f64(n, e, rnd)
    signs = {math.copysign(1.0, v) for v in addends}
    return -0.0 if signs == {-1.0} or (rnd == "rm" and len(signs) == 2) else 0.0


def _special_f64(op: str, *values: float) -> float | None:
    """The result with an infinite or NaN operand, a zero divisor or a root's odd argument; None if there's none."""
    if op == "fma":
        a, b, c = values
        if math.isfinite(a) and math.isfinite(b):
            return c
        return a * b + c
    if op == "sqrt":
        (a,) = values
        return a if a in (0.0, math.inf) or math.isnan(a) else math.nan if a < 0 else None
    if op == "rcp":
        op, values = "div", (1.0, *values)
    a, b = values
    if op == "div":
        return float(np.divide(F64(a), F64(b))) if b == 0 or not (math.isfinite(a) and math.isfinite(b)) else None
    return {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b}[op]()


def _integer(x: float) -> tuple[int, int]:
    fraction, exponent = math.frexp(x)
    return int(math.ldexp(fraction, 53)), exponent - 53


def _rounded_f64(n: int, e: int, rnd: str) -> float:
    """n * 2**e as an f64; n isn't zero."""
    negative, n = n < 0, abs(n)
    quantum = max(n.bit_length() + e - 53, -1074)
    shift = quantum - e
    if shift > 0:
        kept, lost = n >> shift, n & (1 << shift) - 1
        half = 1 << shift - 1
        away = {
            "rn": lost > half or (lost == half and kept & 1 == 1),
            "rz": False,
            "rm": negative and lost > 0,
            "rp": not negative and lost > 0,
        }[rnd]
        kept += away
    else:
        kept = n << -shift
    if kept.bit_length() + quantum > 1024:
        finite = rnd == "rz" or rnd == ("rp" if negative else "rm")
        value = float.fromhex("0x1.fffffffffffffp1023") if finite else math.inf
    else:
        value = math.ldexp(kept, quantum)
    return -value if negative else value


# -- approximate functions

# Made in f64 and rounded once, which is well within what the ISA allows the hardware. Its bounds:
#   div.approx, div.full, ex2: 2 ulp; rcp: 1 ulp; sqrt: 2^-23 relative; rsqrt: 2^-22.9 relative; lg2: 2^-22 relative,
#   absolute within (0.5, 2); sin, cos: 2^-20.5 absolute within ±2π, 2^-14.7 within ±100π; tanh: 2^-11 relative;
#   ex2.f16: 2^-9.9 and ex2.bf16: 2^-7 relative; tanh.f16: 2^-10.987 and tanh.bf16: 2^-8 absolute.
_IN_F64 = {
    "rcp": lambda x: np.divide(1.0, x, dtype=F64),
    "sqrt": lambda x: np.sqrt(x, dtype=F64),
    "rsqrt": lambda x: np.divide(1.0, np.sqrt(x, dtype=F64)),
    "ex2": lambda x: np.exp2(x, dtype=F64),
    "lg2": lambda x: np.log2(x, dtype=F64),
    "sin": lambda x: np.sin(x, dtype=F64),
    "cos": lambda x: np.cos(x, dtype=F64),
    "tanh": lambda x: np.tanh(x, dtype=F64),
}


def _ex2_ftz_f32(a):
    # A subnormal operand gives 1 either way, and a result is subnormal just where a < -126.
    return np.exp2(a, dtype=F64).astype(F32) * (a >= F32(-126))


def _div_approx(a, b):
    big = np.abs(b) > F32(2.0**126)
    r = np.divide(a, b)
    if not big.any():
        return r
    return np.where(big & np.isfinite(b), a * np.copysign(F32(0), b), r)


def _gross(function: Callable) -> Callable:
    """rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 (9.7.3.14, 9.7.3.17): of the upper words, to an upper word."""
    high = U64(0xFFFFFFFF_00000000)
    tiny = F64(2.0**-1022)

    def gross(a):
        x = (a.view(U64) & high).view(F64)
        r = function(x * (np.abs(x) >= tiny))
        r = r * (np.abs(r) >= tiny)
        return np.where(np.isnan(r), U64(0x7FFFFFFF_00000000), r.view(U64) & high).view(F64)

    return gross


def approximate(op: str, kind: str, *, ftz: bool = False) -> Callable:
    """The .approx (and div.full) instructions, correctly rounded (9.7.3.8, 9.7.3.13 to 9.7.3.22, 9.7.4.9, 9.7.4.10).

    Args:
        op: for f32 rcp, sqrt, rsqrt, ex2, lg2, sin, cos, tanh, `div` (div.approx) or `full` (div.full); for the 16-bit
            types ex2 or tanh; for f64 rsqrt, or with ftz rcp or rsqrt (the gross approximations of upper words).
        kind: f32, f64, f16, bf16, f16x2 or bf16x2.
        ftz: subnormal operands and results to zero of their sign. ex2 of bf16 has no other form.

    Raises:
        ValueError: the instruction has no such form.
    """
    if kind in PACKED and kind != "f32x2":
        kind, part, whole = PACKED[kind]
        return packed(approximate(op, kind, ftz=ftz), part, whole)
    allowed = {"f32": {*_IN_F64, "div", "full"}, "f64": {"rsqrt", *(("rcp",) if ftz else ())}}
    allowed |= {"f16": {"ex2", "tanh"}, "bf16": {"ex2", "tanh"}}
    if op not in allowed.get(kind, ()):
        raise ValueError(f"{op}.approx does not exist for .{kind}")
    if kind == "f64":
        return _gross(_IN_F64[op]) if ftz else _IN_F64[op]
    always = (op, kind) == ("ex2", "bf16")
    if ftz and not always and (kind != "f32" or op == "tanh"):
        raise ValueError(f".ftz does not apply to {op}.approx.{kind}")
    if always and not ftz:
        raise ValueError("ex2.approx.bf16 exists with .ftz only")
    if kind == "f32":
        if op == "div":
            return _modified(_div_approx, kind, ftz, False, False)
        if op == "full":
            return _modified(np.divide, kind, ftz, False, False)
        if op == "ex2" and ftz:
            return _ex2_ftz_f32
        function = _IN_F64[op]
        return _modified(lambda a: function(a).astype(F32), kind, ftz, False, False)
    function = _IN_F64[op]
    if kind == "f16":
        return lambda a: function(a.view(F16)).astype(F16).view(U16)

    def bf16(a):
        r = _bf16_of_bits(_odd_f32(function(bf16_to_f32(a))), "rn")
        return _flush16(r, _EXPONENT16["bf16"]) if ftz else r

    return bf16


# -- sign and selection


def _signs(kind: str) -> tuple:
    uint = {"f32": U32, "f64": U64, "f16": U16, "bf16": U16, "f16x2": U32, "bf16x2": U32}[kind]
    return uint, uint(0x80008000) if kind.endswith("x2") else _SIGN[np.dtype(uint).itemsize]


def _flusher(kind: str) -> Callable:
    if kind == "f32":
        return flush
    if kind == "f16":
        return lambda x: _flush16(x, _EXPONENT16["f16"])
    if kind == "f16x2":
        return packed(lambda x: _flush16(x, _EXPONENT16["f16"]), U16, U32)
    raise ValueError(f".ftz does not apply to .{kind}")


def negate(kind: str, *, ftz: bool = False) -> Callable:
    """neg (9.7.3.10, 9.7.4.5): the sign bit turned, of a NaN too."""
    uint, sign = _signs(kind)
    zero = _flusher(kind) if ftz else (lambda x: x)
    return lambda a: (zero(a).view(uint) ^ sign).view(a.dtype)


def absolute(kind: str, *, ftz: bool = False) -> Callable:
    """abs (9.7.3.9, 9.7.4.6): the sign bit cleared; abs.f64 passes a NaN through unchanged."""
    uint, sign = _signs(kind)
    zero = _flusher(kind) if ftz else (lambda x: x)
    if kind == "f64":
        return lambda a: np.where(np.isnan(a), a, np.abs(a))
    return lambda a: (zero(a).view(uint) & ~sign).view(a.dtype)


def copysign(a, b):
    """copysign (9.7.3.2): b with the sign of a, for f32 and f64."""
    return np.copysign(b, a)


def testp(op: str, kind: str) -> Callable:
    """testp (9.7.3.1) to bool; zero counts as normal. `kind` is f32 or f64."""
    tiny = np.finfo({"f32": F32, "f64": F64}[kind]).smallest_normal
    return {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: a == a,
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= tiny) | (a == 0)),
        "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
    }[op]


def extremum(
    op: str, kind: str, *, ftz: bool = False, nan: bool = False, xorsign: bool = False, absolute: bool = False
) -> Callable:
    """min and max of two or three operands (9.7.3.11, 9.7.3.12, 9.7.4.7, 9.7.4.8); -0 is less than +0.

    Args:
        op: `min` or `max`.
        kind: f32, f64, f16, bf16, f16x2 or bf16x2.
        ftz: subnormal operands to zero of their sign.
        nan: the canonical NaN if any operand is NaN; otherwise a NaN gives way to the other operand.
        xorsign: with `absolute`: the result's sign is the product of the operands' signs.
        absolute: compare the magnitudes.

    Raises:
        ValueError: the instruction has no such form.
    """
    if kind in ("f16x2", "bf16x2"):
        kind, part, whole = PACKED[kind]
        return packed(extremum(op, kind, ftz=ftz, nan=nan, xorsign=xorsign, absolute=absolute), part, whole)
    if kind not in ("f32", "f64", "f16", "bf16"):
        raise ValueError(f"{op} does not exist for .{kind}")
    if kind == "f64" and (ftz or nan or xorsign or absolute):
        raise ValueError(f"{op}.f64 has no modifiers")
    if xorsign and not absolute:
        raise ValueError(".xorsign needs .abs")
    if kind == "bf16":
        if ftz:
            raise ValueError(".ftz does not apply to .bf16")
        wide = extremum(op, "f32", nan=nan, xorsign=xorsign, absolute=absolute)

        def bf16(*operands):
            bits = wide(*map(bf16_to_f32, operands)).view(U32)
            return (bits >> U32(16)).astype(U16)

        return bf16
    dtype = {"f32": F32, "f64": F64, "f16": F16}[kind]
    uint = _UINT[np.dtype(dtype).itemsize]
    sign = _SIGN[np.dtype(dtype).itemsize]
    canonical = {"f32": NAN32, "f64": NAN64, "f16": NAN16}[kind].view(dtype)
    ignoring = np.fmin if op == "min" else np.fmax
    keeping = np.minimum if op == "min" else np.maximum
    of_zeros = np.bitwise_or if op == "min" else np.bitwise_and

    def two(a, b):
        r = keeping(a, b) if nan else ignoring(a, b)
        if (np.abs(r) > 0).all():
            return r
        zeros = (a == 0) & (b == 0)
        if zeros.any():
            r = np.where(zeros, of_zeros(a.view(uint), b.view(uint)).view(dtype), r)
        bad = np.isnan(r)
        if not bad.any():
            return r
        if nan:
            return np.where(bad, canonical, r)
        # numpy's fmin and fmax may let a signalling NaN win over a number.
        return np.where(bad, np.where(np.isnan(a), b, a), r)

    def function(*operands):
        if kind == "f16":
            operands = [x.view(F16) for x in operands]
        if ftz:
            operands = [x * (np.abs(x) >= np.finfo(dtype).smallest_normal) for x in operands]
        if absolute:
            magnitudes = [np.abs(x) for x in operands]
        else:
            magnitudes = operands
        r = two(*magnitudes[:2])
        if len(operands) == 3:
            r = two(r, magnitudes[2])
        if xorsign:
            turned = (operands[0].view(uint) ^ operands[1].view(uint)) & sign
            r = np.where(np.isnan(r), r.view(uint), r.view(uint) | turned).view(dtype)
        return r.view(U16) if kind == "f16" else r

    return function


_COMPARE = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}
_COMPARE_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}


def comparison(op: str, kind: str, *, ftz: bool = False) -> Callable:
    """The CmpOp of set and setp (9.7.6.1, 9.7.6.2, 9.7.7) to bool; of packed types to bool of shape (..., 2).

    Raises:
        ValueError: there's no such comparison of this type.
    """
    if kind in ("f16x2", "bf16x2"):
        inner = comparison(op, kind[:-2], ftz=ftz)
        return lambda a, b: inner(unpack(a, U16), unpack(b, U16))
    if kind not in ("f16", "bf16", "f32", "f64", *(f"{t}{w}" for t in "bus" for w in (16, 32, 64))):
        raise ValueError(f"there is no comparison of .{kind}")
    if kind[0] in "bus" and kind != "bf16":
        table = {"eq": np.equal, "ne": np.not_equal}
        if kind[0] != "b":
            table |= {name: _COMPARE[name] for name in ("lt", "le", "gt", "ge")}
        if kind[0] == "u":
            table |= _COMPARE_UNSIGNED
        if op not in table:
            raise ValueError(f"comparison .{op} does not apply to .{kind}")
        if ftz:
            raise ValueError(f".ftz does not apply to .{kind}")
        return table[op]
    if op not in _COMPARE:
        raise ValueError(f"comparison .{op} does not apply to .{kind}")
    compare = _COMPARE[op]
    if ftz:
        zero = _flusher(kind)
        if kind == "f32":
            return lambda a, b: compare(zero(a), zero(b))
        return lambda a, b: compare(zero(a).view(F16), zero(b).view(F16))
    if kind == "f16":
        return lambda a, b: compare(a.view(F16), b.view(F16))
    if kind == "bf16":
        return lambda a, b: compare(bf16_to_f32(a), bf16_to_f32(b))
    return compare


# -- cvt (9.7.9.21)

INTEGERS = {f"{s}{8 * w}": np.dtype(f"{'i' if s == 's' else 'u'}{w}") for s in "us" for w in (1, 2, 4, 8)}
FLOATS = ("f16", "bf16", "tf32", "f32", "f64")
_BITS = {"f16": 11, "bf16": 8, "tf32": 11, "f32": 24, "f64": 53}  # of the significand


def conversion(
    dst: str,
    src: str,
    rnd: str | None = None,
    *,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
    satfinite: bool = False,
) -> Callable:
    """cvt of one value: a function of an array in `src`'s representation to one in `dst`'s.

    A float that is turned into an integer is rounded by `rnd`, then clamped to the integer's range. NaN becomes zero,
    or, from f64 or to a 64-bit integer, a one in the top bit alone.

    Args:
        dst: u8 to u64, s8 to s64, f16, bf16, tf32, f32 or f64.
        src: the same without tf32.
        rnd: rni, rzi, rmi or rpi for a float rounded to an integer (of the same float type, or an integer type); rn,
            rz, rm or rp where a value may not fit `dst` exactly; rna for tf32; None where nothing is rounded.
        ftz: subnormal f32 operands and results to zero of their sign.
        sat: integers are clamped to the range of `dst`; floats to [0, 1], NaN to +0.
        relu: a negative result to +0, NaN to the canonical one (from f32 to f16, bf16, tf32).
        satfinite: infinities and overflows to the largest finite value, NaN to the canonical one (likewise).

    Raises:
        ValueError: cvt has no such form.
    """
    known = (dst in INTEGERS or dst in FLOATS) and (src in INTEGERS or src in FLOATS)
    if not known or src == "tf32" or (dst == "tf32" and src != "f32"):
        raise ValueError(f"cvt.{dst}.{src} does not exist")
    if ftz and "f32" not in (dst, src):
        raise ValueError(".ftz needs an .f32 operand or result")
    if (relu or satfinite) and not (src == "f32" and dst in ("f16", "bf16", "tf32") and rnd in ("rn", "rz", "rna")):
        raise ValueError(f".{'relu' if relu else 'satfinite'} does not apply to cvt.{rnd}.{dst}.{src}")
    if sat and dst in ("bf16", "tf32"):
        raise ValueError(f".sat does not apply to .{dst}")
    _check_rounding(dst, src, rnd)
    if dst in INTEGERS:
        if src in INTEGERS:
            return _int_to_int(dst, src, sat)
        return _float_to_int(dst, src, INTEGER_ROUNDINGS[rnd], ftz)
    core = _int_to_float(dst, src, rnd) if src in INTEGERS else _float_to_float(dst, src, rnd)
    return _converted(core, dst, src, ftz, sat, relu, satfinite)


def _check_rounding(dst: str, src: str, rnd: str | None):
    if src in INTEGERS and dst in INTEGERS:
        allowed = (None,)
    elif dst in INTEGERS:
        allowed = tuple(INTEGER_ROUNDINGS)
    elif src in INTEGERS:
        allowed = ROUNDINGS
    elif dst == "tf32":
        allowed = ("rna", "rn", "rz")
    elif dst == src:
        allowed = (None, *INTEGER_ROUNDINGS)
    elif _BITS[dst] < _BITS[src] or (dst, src) == ("f16", "bf16"):
        allowed = ROUNDINGS
    else:
        allowed = (None,)
    if rnd not in allowed:
        one_of = ", ".join("none" if a is None else f".{a}" for a in allowed) or "nothing"
        raise ValueError(f"rounding {f'.{rnd}' if rnd else 'none'} of cvt.{dst}.{src}: expected {one_of}")


def _int_to_int(dst: str, src: str, sat: bool) -> Callable:
    to, of = INTEGERS[dst], INTEGERS[src]
    if not sat:
        return (lambda x: x) if to == of else (lambda x: x.astype(to))
    low = max(np.iinfo(to).min, np.iinfo(of).min)
    high = min(np.iinfo(to).max, np.iinfo(of).max)
    if (low, high) == (np.iinfo(of).min, np.iinfo(of).max):
        raise ValueError(f".sat does not apply to cvt.{dst}.{src}, which always fits")
    low, high = of.type(low), of.type(high)
    return lambda x: np.minimum(np.maximum(x, low), high).astype(to)


def _float_to_int(dst: str, src: str, rounded: Callable, ftz: bool) -> Callable:
    to, wide = INTEGERS[dst], _to_f32_or_f64(src)
    bounds = np.iinfo(to)
    if bounds.bits < 64:
        of_nan = to.type(0) if src != "f64" else _top_bit(to)
        low, high = F64(bounds.min), F64(bounds.max)
    else:
        of_nan = _top_bit(to)
        low, high = F64(bounds.min), np.nextafter(F64(bounds.max), 0)  # F64(max) is one too large

    def convert(x):
        x = wide(x)
        if ftz:
            x = flush(x)
        x = rounded(x).astype(F64)
        r = np.minimum(np.maximum(x, low), high).astype(to)
        if bounds.bits == 64:
            over = x > high
            if over.any():
                r = np.where(over, to.type(bounds.max), r)
        nan = np.isnan(x)
        return np.where(nan, of_nan, r) if nan.any() else r

    return convert


def _top_bit(to: np.dtype):
    return np.array(1 << 8 * to.itemsize - 1, f"u{to.itemsize}").view(to)[()]


def _int_to_float(dst: str, src: str, rnd: str) -> Callable:
    of = INTEGERS[src]
    if rnd == "rn" and dst in ("f32", "f64"):
        to = F32 if dst == "f32" else F64
        return lambda x: x.astype(to)
    if of.itemsize < 8:
        finish = _from_f64(dst, rnd)
        return lambda x: finish(x.astype(F64))
    if dst == "f64":

        def each(x):
            x = np.asarray(x)
            values = [_rounded_f64(v, 0, rnd) if v else 0.0 for v in x.ravel().tolist()]
            return np.array(values, F64).reshape(x.shape)

        return each
    finish = _from_f64(dst, rnd)

    def odd(x):
        # Magnitudes of 54 bits and more lose 11, of which one sticky bit is kept: as good as rounding to odd.
        negative = x < 0
        n = np.where(negative, -x, x).astype(U64)
        large = n >= U64(1 << 53)
        short = (n >> U64(11)) | ((n & U64(0x7FF)) != 0)
        value = np.where(large, short.astype(F64) * 2048.0, n.astype(F64))
        return finish(np.where(negative, -value, value))

    return odd


def _from_f64(dst: str, rnd: str) -> Callable:
    """From an f64, exact or rounded to odd, to `dst`'s representation."""
    if dst == "f64":
        return lambda x: x
    if dst == "f32":
        return lambda x: _round_float(x, F32, rnd)
    if dst == "f16":
        return lambda x: _round_float(x, F16, rnd).view(U16)
    return lambda x: _bf16_of_bits(_odd_f32(x), rnd)


def _float_to_float(dst: str, src: str, rnd: str | None) -> Callable:
    wide = _to_f32_or_f64(src)
    if dst == src:
        if rnd is None:
            return lambda x: x
        rounded = INTEGER_ROUNDINGS[rnd]
        # A bf16 rounded to an integer fits bf16, unless it's NaN, whose payload may be cut.
        back = {"f16": lambda x: x.astype(F16).view(U16), "bf16": f32_to_bf16}.get(dst, lambda x: x)
        return lambda x: back(rounded(wide(x)))
    if dst == "tf32":

        def tf32(x):
            bits = x.view(U32)
            nan = np.isnan(x)
            r = _drop(bits, 13, rnd)
            return np.where(nan, NAN32, r) if nan.any() else r

        return tf32
    if dst == "bf16" and src != "f64":
        return lambda x: f32_to_bf16(wide(x), rnd)
    if dst in ("f32", "f64") and rnd is None:
        to = F32 if dst == "f32" else F64
        return (lambda x: wide(x).astype(to)) if dst == "f64" else wide
    finish = _from_f64(dst, rnd)
    return lambda x: finish(wide(x))


def _converted(core, dst: str, src: str, ftz: bool, sat: bool, relu: bool, satfinite: bool) -> Callable:
    """The modifiers of a conversion to a float."""
    steps = [core]
    if ftz and src == "f32":
        steps.insert(0, flush)
    if ftz and dst == "f32":
        steps.append(flush)
    if sat:
        steps.append(_saturate16 if dst == "f16" else saturate)
    if satfinite:
        steps.append(_finite(dst))
    if relu:
        steps.append(_relu32 if dst == "tf32" else _relu16(dst))
    if len(steps) == 1:
        return core

    def convert(x):
        for step in steps:
            x = step(x)
        return x

    return convert


def _relu32(bits):
    nan = (bits & NAN32) > U32(0x7F800000)
    return np.where(nan, NAN32, bits * (bits < U32(0x80000000)))


def _finite(dst: str) -> Callable:
    if dst == "tf32":
        infinity, largest, sign, canonical = U32(0x7F800000), U32(0x7F7FE000), U32(1 << 31), NAN32
    else:
        infinity, largest, sign, canonical = _EXPONENT16[dst], _MAX16[dst], U16(1 << 15), NAN16

    def finite(bits):
        magnitude = bits & ~sign
        bits = np.where(magnitude == infinity, largest | (bits & sign), bits)
        return np.where(magnitude > infinity, canonical, bits)

    return finite


def pack_pair(dst: str, rnd: str, *, relu: bool = False, satfinite: bool = False) -> Callable:
    """cvt.rnd.f16x2.f32 and cvt.rnd.bf16x2.f32 d, a, b: a goes to the upper half of d, b to the lower one."""
    if dst not in ("f16x2", "bf16x2"):
        raise ValueError(f"cvt.{dst}.f32 does not pack two values")
    convert = conversion(dst[:-2], "f32", rnd, relu=relu, satfinite=satfinite)
    if relu or satfinite or rnd != "rn":
        return lambda a, b: (convert(a).astype(U32) << U32(16)) | convert(b)
    if dst == "f16x2":

        def f16x2(a, b):
            both = np.empty((*np.broadcast(a, b).shape, 2), F16)
            both[..., 0] = b
            both[..., 1] = a
            return pack(both, U32)

        return f16x2

    def bf16x2(a, b):
        if np.isnan(a + b).any():
            return (convert(a).astype(U32) << U32(16)) | convert(b)
        return (_rounded_up_to_bf16(a.view(U32)) & U32(0xFFFF0000)) | (_rounded_up_to_bf16(b.view(U32)) >> U32(16))

    return bf16x2


# -- formats of 8 bits and fewer: exponent bits, mantissa bits, bias, code of the largest finite value, code of NaN

_MINI = {
    "e4m3": (4, 3, 7, 0x7E, 0x7F),
    "e5m2": (5, 2, 15, 0x7B, 0x7F),
    "e2m1": (2, 1, 1, 0x07, None),
    "e2m3": (2, 3, 1, 0x1F, None),
    "e3m2": (3, 2, 3, 0x1F, None),
}


def _mini_values(form: str) -> np.ndarray:
    """The magnitudes of the finite codes, ascending, in f64."""
    _, mantissa_bits, bias, largest, _ = _MINI[form]
    code = np.arange(largest + 1)
    exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits))
    return np.ldexp(significand.astype(F64), np.maximum(exponent, 1) - bias - mantissa_bits)


def mini_encode(form: str, *, relu: bool = False) -> Callable:
    """cvt.rn.satfinite to one element of e4m3, e5m2, e2m1, e2m3 or e3m2, from an f32 array to uint8 codes.

    Rounds to nearest, ties to even; clamps to the largest finite value. NaN becomes the format's NaN, or the positive
    largest value in a format without one.
    """
    exponent_bits, mantissa_bits, _, largest, of_nan = _MINI[form]
    values = _mini_values(form)
    middles = (values[:-1] + values[1:]) / 2
    sign_bit = np.uint8(1 << exponent_bits + mantissa_bits)
    special = np.uint8(largest if of_nan is None else of_nan)

    def encode(x):
        magnitude = np.abs(x).astype(F64)
        code = np.searchsorted(middles, magnitude)  # how many middles lie below: a tie is rounded down
        tie = middles[np.minimum(code, len(middles) - 1)] == magnitude
        code = (code + (tie & (code % 2 == 1))).astype(np.uint8)
        negative = np.signbit(x)
        code = np.where(negative, np.uint8(0) if relu else code | sign_bit, code)
        return np.where(np.isnan(x), special, code)

    return encode


def mini_decode(form: str, *, relu: bool = False) -> Callable:
    """cvt.rn.f16x2 from one element of a format of `mini_encode`: uint8 codes to f16 patterns, exactly."""
    exponent_bits, mantissa_bits, _, largest, _ = _MINI[form]
    count = 1 << exponent_bits + mantissa_bits
    magnitudes = np.full(count, np.nan)
    magnitudes[: largest + 1] = _mini_values(form)
    if form == "e5m2":
        magnitudes[0x7C] = np.inf
    table = np.concatenate([magnitudes, np.where(np.isnan(magnitudes), np.nan, -magnitudes)]).astype(F16).view(U16)
    table[np.isnan(table.view(F16))] = NAN16
    if relu:
        table = _relu16("f16")(table)
    return lambda codes: table[codes & np.uint8(2 * count - 1)]
