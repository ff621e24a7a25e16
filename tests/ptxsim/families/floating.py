"""Floating point and conversions (PTX ISA 9.7.3, 9.7.4, 9.7.5, cvt: 9.7.9.21, cvt.pack: 9.7.9.22) over
`ptxsim.numerics`, and the opcodes that floats share with integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import integers, numerics
from ..decode import DTYPES, UINT, Decoder, instruction
from ..ptx import Reg, Sink
from . import integer
from .integer import apply, destination, expect

# f16 is a numpy type for the decoder, but a bit pattern for numerics.
_OF = DTYPES | {"f16": DTYPES["b16"]}
_FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
_ROUNDINGS = ("rn", "rz", "rm", "rp")


def resolve(d: Decoder, make: Callable, *args, **modifiers) -> Callable:
    """make(...), whose refusal stops the decoding."""
    try:
        return make(*args, **modifiers)
    except ValueError as error:
        return d.fail(str(error))


def _float_type(d: Decoder) -> str | None:
    """The first type among the modifiers if it is a float's."""
    first = next((name for name in d.left if name in DTYPES), None)
    return first if first in _FLOATS else None


@instruction("add", "sub", "mul", "mad", "fma", "div")
def arithmetic(d: Decoder):
    op = d.ins.opcode
    kind = _float_type(d)
    if kind is None and op in integer.SHARED:
        return integer.SHARED[op](d)
    d.type(*_FLOATS)
    if op == "div":
        return _div(d, kind)
    if op == "mad":
        op = "fma" if kind in ("f32", "f64") else d.fail(f"mad does not exist for .{kind}")
    rnd = d.choice(*_ROUNDINGS)
    if op == "fma" and rnd is None:
        d.fail("a rounding modifier is missing")
    ftz, sat, relu = d.flag("ftz"), d.flag("sat"), d.flag("relu")
    function = resolve(d, numerics.arithmetic, op, kind, rnd=rnd or "rn", ftz=ftz, sat=sat, relu=relu)
    count = numerics.OPERANDS[op]
    second = d.choice("f16", "bf16") if kind == "f32" else None
    if second is None:
        return apply(d, function, kind, *[_OF[kind]] * count)
    # Mixed precision (9.7.5): all but the last operand are converted to f32 first, which is exact.
    if op == "mul" or ftz:
        d.fail(f"{'.ftz' if ftz else 'mul'} does not apply to mixed precision")
    widen = numerics.conversion("f32", second)
    if op == "fma":
        return apply(d, lambda a, b, c: function(widen(a), widen(b), c), kind, _OF[second], _OF[second], "f32")
    return apply(d, lambda a, c: function(widen(a), c), kind, _OF[second], "f32")


def _div(d: Decoder, kind: str):
    how = d.choice("approx", "full", *_ROUNDINGS) or d.fail(".approx, .full or a rounding modifier is missing")
    ftz = d.flag("ftz")
    if how in _ROUNDINGS:
        function = resolve(d, numerics.arithmetic, "div", kind, rnd=how, ftz=ftz)
    else:
        function = resolve(d, numerics.approximate, {"approx": "div", "full": "full"}[how], kind, ftz=ftz)
    return apply(d, function, kind, _OF[kind], _OF[kind])


@instruction("rcp", "sqrt")
def root(d: Decoder):
    op = d.ins.opcode
    kind = d.type("f32", "f64")
    how = d.choice("approx", *_ROUNDINGS) or d.fail(".approx or a rounding modifier is missing")
    ftz = d.flag("ftz")
    if how == "approx":
        function = resolve(d, numerics.approximate, op, kind, ftz=ftz)
    else:
        function = resolve(d, numerics.arithmetic, op, kind, rnd=how, ftz=ftz)
    return apply(d, function, kind, _OF[kind])


@instruction("rsqrt", "sin", "cos", "lg2", "ex2", "tanh")
def approximation(d: Decoder):
    kind = d.type(*_FLOATS)
    if not d.flag("approx"):
        d.fail(".approx is missing")
    function = resolve(d, numerics.approximate, d.ins.opcode, kind, ftz=d.flag("ftz"))
    return apply(d, function, kind, _OF[kind])


@instruction("neg", "abs")
def sign(d: Decoder):
    kind = _float_type(d)
    if kind is None:
        return integer.SHARED[d.ins.opcode](d)
    d.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    make = numerics.negate if d.ins.opcode == "neg" else numerics.absolute
    return apply(d, resolve(d, make, kind, ftz=d.flag("ftz")), kind, _OF[kind])


@instruction("copysign")
def copysign(d: Decoder):
    kind = d.type("f32", "f64")
    return apply(d, numerics.copysign, kind, kind, kind)


@instruction("testp")
def testp(d: Decoder):
    op = d.choice("finite", "infinite", "number", "notanumber", "normal", "subnormal") or d.fail("which property?")
    kind = d.type("f32", "f64")
    return apply(d, numerics.testp(op, kind), "pred", kind)


@instruction("min", "max")
def min_max(d: Decoder):
    kind = _float_type(d)
    if kind is None:
        return integer.SHARED[d.ins.opcode](d)
    d.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    ftz, nan, xorsign, absolute = d.flag("ftz"), d.flag("NaN"), d.flag("xorsign"), d.flag("abs")
    three = d.has(3)
    if three and (kind != "f32" or xorsign):
        d.fail("three operands are for .f32 without .xorsign only")
    if absolute and not xorsign and not three:
        d.fail(".abs of two operands needs .xorsign")
    function = resolve(d, numerics.extremum, d.ins.opcode, kind, ftz=ftz, nan=nan, xorsign=xorsign, absolute=absolute)
    return apply(d, function, kind, *[_OF[kind]] * (3 if three else 2))


# -- set and setp (9.7.6, 9.7.7)

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs")
_COMPARISONS += ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_JOIN = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _compared(d: Decoder, kind: str, first: int):
    """The comparison's function of the machine, and (how, predicate) of what joins it, if anything does."""
    op = d.choice(*_COMPARISONS) or d.fail("which comparison?")
    join = d.choice(*_JOIN)
    compare = resolve(d, numerics.comparison, op, kind, ftz=d.flag("ftz"))
    a, b = d.get(first, _OF[kind]), d.get(first + 1, _OF[kind])
    expect(d, first + (3 if join else 2))
    other = (_JOIN[join], d.get(first + 2, "pred")) if join else None
    return (lambda m: compare(a(m), b(m))), other


@instruction("setp")
def setp(d: Decoder):
    kind = d.type()
    compare, other = _compared(d, kind, 1)
    target = d.operand(0)
    first, second = (target.first, target.second) if hasattr(target, "second") else (target, None)
    put = destination(d, first, "pred")
    if kind.endswith("x2"):
        put_2 = destination(d, Sink() if second is None else second, "pred")

        def packed(m):
            t = compare(m)
            p, q = np.ascontiguousarray(t[..., 0]), np.ascontiguousarray(t[..., 1])
            if other is not None:
                c = other[1](m)
                p, q = other[0](p, c), other[0](q, c)
            put(m, p)
            put_2(m, q)

        return packed
    if second is None and other is None:
        return lambda m: put(m, compare(m))
    put_2 = destination(d, second, "pred") if second is not None else None

    def step(m):
        t = compare(m)
        no = ~t
        if other is not None:
            c = other[1](m)
            t, no = other[0](t, c), other[0](no, c)
        put(m, t)
        if put_2 is not None:
            put_2(m, no)

    return step


_TRUE = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "u16": 0xFFFF, "s16": 0xFFFF, "f32": 0x3F800000}
_TRUE |= {"f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}


@instruction("set")
def set_(d: Decoder):
    result = d.type(*_TRUE)
    kind = d.type()
    half = kind.endswith("x2")
    if half and result not in (kind, "u32", "s32"):
        d.fail(f"a comparison of .{kind} can't give .{result}")
    if not half and result.endswith("x2"):
        d.fail(f"a comparison of .{kind} can't give .{result}")
    compare, other = _compared(d, kind, 1)
    put = destination(d, 0, result)
    part = UINT[2 if half else DTYPES[result].itemsize]
    true = part.type(_TRUE[result] & (0xFFFF if half else 0xFFFFFFFF))

    def step(m):
        t = compare(m)
        if other is not None:
            c = other[1](m)
            t = other[0](t, c[..., None] if half and c.ndim else c)
        value = np.where(t, true, part.type(0))
        put(m, numerics.pack(value, np.uint32) if half else value)

    return step


# -- cvt

_SMALL = {"e4m3x2": 8, "e5m2x2": 8, "e2m3x2": 8, "e3m2x2": 8, "e2m1x2": 4}  # bits between the two elements


@instruction("cvt")
def cvt(d: Decoder):
    if d.flag("pack"):
        return _cvt_pack(d)
    rnd = d.choice(*_ROUNDINGS, "rna", "rni", "rzi", "rmi", "rpi")
    ftz, sat, relu, satfinite = d.flag("ftz"), d.flag("sat"), d.flag("relu"), d.flag("satfinite")
    kinds = [name for name in d.left if name in DTYPES or name in _SMALL]
    if len(kinds) != 2:
        d.fail(f"two types expected, got {len(kinds)}")
    dst, src = kinds
    d.left.remove(dst)
    d.left.remove(src)
    if dst in _SMALL or src in _SMALL:
        if ftz or sat or rnd != "rn" or satfinite != (dst in _SMALL):
            d.fail("only .rn, .relu, and .satfinite where it packs, are for these types")
        return _pack_small(d, dst, src, relu) if dst in _SMALL else _unpack_small(d, dst, src, relu)
    if dst in ("f16x2", "bf16x2"):
        if src != "f32" or ftz or sat or rnd not in ("rn", "rz"):
            d.fail("only .rn and .rz, .relu and .satfinite, from .f32")
        function = resolve(d, numerics.pack_pair, dst, rnd, relu=relu, satfinite=satfinite)
        return apply(d, function, dst, "f32", "f32")
    function = resolve(d, numerics.conversion, dst, src, rnd, ftz=ftz, sat=sat, relu=relu, satfinite=satfinite)
    return _converted(d, function, dst, src)


def _converted(d: Decoder, function: Callable, dst: str, src: str):
    """The step of a conversion; a wider register takes the result extended by the type's sign (9.4.1)."""
    expect(d, 2)
    target, a = d.operand(0), d.get(1, _OF[src])
    if isinstance(target, Reg) and target.bytes > DTYPES[dst].itemsize and dst not in ("bf16", "tf32"):
        put = d.put(0)
        wide = np.dtype(f"{'i' if dst[0] == 's' else 'u'}{target.bytes}")
        narrow = _OF[dst] if dst[0] in "us" else UINT[DTYPES[dst].itemsize]
        return lambda m: put(m, function(a(m)).view(narrow).astype(wide))
    put = destination(d, 0, dst)
    return lambda m: put(m, function(a(m)))


def _pack_small(d: Decoder, dst: str, src: str, relu: bool):
    shift = _SMALL[dst]
    encode = numerics.mini_encode(dst[:-2], relu=relu)
    result = "b8" if shift == 4 else "b16"

    def join(a, b):
        wide = DTYPES[result].type
        return encode(a).astype(wide) << wide(shift) | encode(b).astype(wide)

    if src == "f32":
        return apply(d, join, result, "f32", "f32")
    if src != "f16x2" or shift == 4 or dst not in ("e4m3x2", "e5m2x2"):
        d.fail(f"cvt to .{dst} is from .f32, for 8-bit types from .f16x2 too")
    widen = numerics.conversion("f32", "f16")

    def join_halves(x):
        halves = widen(numerics.unpack(x, np.uint16))
        return join(halves[..., 1], halves[..., 0])

    return apply(d, join_halves, result, "f16x2")


def _unpack_small(d: Decoder, dst: str, src: str, relu: bool):
    if dst != "f16x2":
        d.fail(f"cvt from .{src} is to .f16x2")
    shift = _SMALL[src]
    decode = numerics.mini_decode(src[:-2], relu=relu)
    kind = "b8" if shift == 4 else "b16"

    def split(x):
        low, high = x.astype(np.uint8), (x >> x.dtype.type(shift)).astype(np.uint8)
        return decode(high).astype(np.uint32) << np.uint32(16) | decode(low)

    return apply(d, split, "f16x2", kind)


def _cvt_pack(d: Decoder):
    if not d.flag("sat"):
        d.fail(".sat is missing")
    kind = d.choice("u16", "s16", "u2", "s2", "u4", "s4", "u8", "s8") or d.fail("which type?")
    d.type("s32")
    function = integers.cvt_pack(kind)
    if kind in ("u16", "s16"):
        return apply(d, function, "u32", "s32", "s32")
    d.type("b32")
    return apply(d, function, "u32", "s32", "s32", "u32")
