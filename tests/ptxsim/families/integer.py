"""Integer, logic and bit instructions (PTX ISA 9.7.1, 9.7.2, 9.7.8, prmt: 9.7.9.7), over `ptxsim.integers`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import integers
from ..decode import DTYPES, Decoder, instruction
from ..errors import Fault
from ..ptx import Imm, Pair, Reg

_ARITHMETIC = ("u16", "u32", "u64", "s16", "s32", "s64")
_WIDE = {"u16": "u32", "u32": "u64", "s16": "s32", "s32": "s64"}
_BITS = {"b16": "u16", "b32": "u32", "b64": "u64"}


def destination(d: Decoder, which, kind: str) -> Callable:
    """`d.put` of a result of this type, which must have the register's width (PTX ISA 9.4.1)."""
    operand = d.operand(which)
    if isinstance(operand, Reg) and (operand.type == "pred") != (kind == "pred"):
        d.fail(f"register {operand.name} (.{operand.type}) can't hold a .{kind}")
    if isinstance(operand, Reg) and kind != "pred" and operand.bytes != DTYPES[kind].itemsize:
        d.fail(f"register {operand.name} (.{operand.type}) is not as wide as .{kind}")
    return d.put(which)


def apply(d: Decoder, function: Callable, result: str, *kinds) -> Callable:
    """The step that writes function(sources) to operand 0; `kinds` are the types or numpy dtypes of operands 1, ..."""
    expect(d, len(kinds) + 1)
    put = destination(d, 0, result)
    sources = [d.get(n, kind) for n, kind in enumerate(kinds, 1)]
    if len(sources) == 1:
        (a,) = sources
        return lambda m: put(m, function(a(m)))
    if len(sources) == 2:
        a, b = sources
        return lambda m: put(m, function(a(m), b(m)))
    if len(sources) == 3:
        a, b, c = sources
        return lambda m: put(m, function(a(m), b(m), c(m)))
    return lambda m: put(m, function(*(source(m) for source in sources)))


def expect(d: Decoder, count: int):
    if len(d.ins.operands) != count:
        d.fail(f"{count} operands expected, got {len(d.ins.operands)}")


# -- the carry flag CC.CF (9.7.2)


def _carry_in(m):
    carry = m.state.get("carry")
    if carry is None:
        raise Fault("it reads the carry flag, which no instruction has written")
    return carry


def _carry_out(m, carry):
    old = m.state.get("carry")
    m.state["carry"] = np.where(m.mask, carry, False if old is None else old)


def _with_carry(d: Decoder, function: Callable, *, reads: bool, writes: bool) -> Callable:
    kind = d.type("u32", "s32", "u64", "s64")
    put = destination(d, 0, kind)
    expect(d, 4 if d.ins.opcode.startswith("mad") else 3)
    sources = [d.get(n, kind) for n in range(1, len(d.ins.operands))]

    def step(m):
        operands = [source(m) for source in sources]
        value, out = function(*operands, _carry_in(m)) if reads else function(*operands)
        put(m, value)
        if writes:
            _carry_out(m, out)

    return step


@instruction("addc")
def addc(d: Decoder):
    return _with_carry(d, integers.add_carry, reads=True, writes=d.flag("cc"))


@instruction("subc")
def subc(d: Decoder):
    return _with_carry(d, integers.sub_carry, reads=True, writes=d.flag("cc"))


def _mad_carry(mode: str) -> Callable:
    return lambda a, b, c, carry=None: integers.mad_carry(a, b, c, mode, carry)


@instruction("madc")
def madc(d: Decoder):
    mode = d.choice("lo", "hi") or d.fail(".lo or .hi expected")
    return _with_carry(d, _mad_carry(mode), reads=True, writes=d.flag("cc"))


# -- 9.7.1; opcodes that floats have as well are registered by `floating`, which comes here for integer types


def add(d: Decoder):
    if d.flag("cc"):
        return _with_carry(d, integers.add_carry, reads=False, writes=True)
    if d.flag("sat"):
        return apply(d, integers.add_sat, d.type("s32"), "s32", "s32")
    kind = d.type(*_ARITHMETIC, "u16x2", "s16x2")
    return apply(d, integers.halves(np.add, kind) if kind.endswith("x2") else np.add, kind, kind, kind)


def sub(d: Decoder):
    if d.flag("cc"):
        return _with_carry(d, integers.sub_carry, reads=False, writes=True)
    if d.flag("sat"):
        return apply(d, integers.sub_sat, d.type("s32"), "s32", "s32")
    kind = d.type(*_ARITHMETIC)
    return apply(d, np.subtract, kind, kind, kind)


def mul(d: Decoder):
    mode, kind = _mode_and_kind(d)
    function = {"lo": np.multiply, "hi": integers.mul_hi, "wide": integers.mul_wide}[mode]
    return apply(d, function, _WIDE[kind] if mode == "wide" else kind, kind, kind)


def mad(d: Decoder):
    if d.flag("cc"):
        mode = d.choice("lo", "hi") or d.fail(".lo or .hi expected")
        return _with_carry(d, _mad_carry(mode), reads=False, writes=True)
    sat = d.flag("sat")
    mode, kind = _mode_and_kind(d)
    if sat:
        if (mode, kind) != ("hi", "s32"):
            d.fail(".sat applies to mad.hi.s32 only")
        return apply(d, integers.mad_hi_sat, kind, kind, kind, kind)
    product = {"lo": np.multiply, "hi": integers.mul_hi, "wide": integers.mul_wide}[mode]
    result = _WIDE[kind] if mode == "wide" else kind
    return apply(d, lambda a, b, c: product(a, b) + c, result, kind, kind, result)


def _mode_and_kind(d: Decoder) -> tuple[str, str]:
    mode = d.choice("lo", "hi", "wide") or d.fail(".lo, .hi or .wide expected")
    return mode, d.type(*(_WIDE if mode == "wide" else _ARITHMETIC))


@instruction("mul24")
def mul24(d: Decoder):
    mode = d.choice("lo", "hi") or d.fail(".lo or .hi expected")
    kind = d.type("u32", "s32")
    return apply(d, lambda a, b: integers.mul24(a, b, mode), kind, kind, kind)


@instruction("mad24")
def mad24(d: Decoder):
    mode = d.choice("lo", "hi") or d.fail(".lo or .hi expected")
    sat = d.flag("sat")
    kind = d.type("u32", "s32")
    if sat and (mode, kind) != ("hi", "s32"):
        d.fail(".sat applies to mad24.hi.s32 only")
    plus = integers.add_sat if sat else np.add
    return apply(d, lambda a, b, c: plus(integers.mul24(a, b, mode), c), kind, kind, kind, kind)


@instruction("sad")
def sad(d: Decoder):
    kind = d.type(*_ARITHMETIC)
    return apply(d, integers.sad, kind, kind, kind, kind)


def div(d: Decoder):
    kind = d.type(*_ARITHMETIC)
    return apply(d, integers.div, kind, kind, kind)


@instruction("rem")
def rem(d: Decoder):
    kind = d.type(*_ARITHMETIC)
    return apply(d, integers.rem, kind, kind, kind)


def abs_(d: Decoder):
    kind = d.type("s16", "s32", "s64")
    return apply(d, np.abs, kind, kind)


def neg(d: Decoder):
    kind = d.type("s16", "s32", "s64")
    return apply(d, np.negative, kind, kind)


def min_max(d: Decoder):
    plain = np.minimum if d.ins.opcode == "min" else np.maximum
    relu = d.flag("relu")
    kind = d.type(*(("s32", "s16x2") if relu else (*_ARITHMETIC, "u16x2", "s16x2")))

    def clamped(a, b):
        return integers.relu(plain(a, b))

    function = clamped if relu else plain
    return apply(d, integers.halves(function, kind) if kind.endswith("x2") else function, kind, kind, kind)


SHARED = {"add": add, "sub": sub, "mul": mul, "mad": mad, "div": div, "abs": abs_, "neg": neg}
SHARED |= {"min": min_max, "max": min_max}


@instruction("popc", "clz")
def count(d: Decoder):
    kind = d.type("b32", "b64")
    return apply(d, {"popc": integers.popc, "clz": integers.clz}[d.ins.opcode], "u32", kind)


@instruction("bfind")
def bfind(d: Decoder):
    shiftamt = d.flag("shiftamt")
    kind = d.type("u32", "s32", "u64", "s64")
    return apply(d, lambda a: integers.bfind(a, shiftamt=shiftamt), "u32", kind)


@instruction("fns")
def fns(d: Decoder):
    d.type("b32")
    return apply(d, integers.fns, "u32", "u32", "u32", "s32")


@instruction("brev")
def brev(d: Decoder):
    kind = d.type("b32", "b64")
    return apply(d, integers.brev, kind, kind)


@instruction("bfe")
def bfe(d: Decoder):
    kind = d.type("u32", "s32", "u64", "s64")
    return apply(d, integers.bfe, kind, kind, "u32", "u32")


@instruction("bfi")
def bfi(d: Decoder):
    kind = d.type("b32", "b64")
    return apply(d, integers.bfi, kind, kind, kind, "u32", "u32")


@instruction("szext")
def szext(d: Decoder):
    mode = d.choice("clamp", "wrap") or d.fail(".clamp or .wrap expected")
    kind = d.type("u32", "s32")
    return apply(d, lambda a, b: integers.szext(a, b, mode), kind, kind, "u32")


@instruction("bmsk")
def bmsk(d: Decoder):
    mode = d.choice("clamp", "wrap") or d.fail(".clamp or .wrap expected")
    d.type("b32")
    return apply(d, lambda a, b: integers.bmsk(a, b, mode), "u32", "u32", "u32")


@instruction("dp4a", "dp2a")
def dot(d: Decoder):
    mode = None
    if d.ins.opcode == "dp2a":
        mode = d.choice("lo", "hi") or d.fail(".lo or .hi expected")
    a, b = d.type("u32", "s32"), d.type("u32", "s32")
    c = "u32" if a == b == "u32" else "s32"
    if mode is None:
        return apply(d, integers.dp4a, c, a, b, c)
    return apply(d, lambda x, y, z: integers.dp2a(x, y, z, mode), c, a, b, c)


# -- 9.7.8


@instruction("and", "or", "xor")
def logic(d: Decoder):
    kind = d.type("pred", *_BITS)
    return apply(d, getattr(np, f"bitwise_{d.ins.opcode}"), kind, kind, kind)


@instruction("not")
def not_(d: Decoder):
    kind = d.type("pred", *_BITS)
    return apply(d, np.invert, kind, kind)


@instruction("cnot")
def cnot(d: Decoder):
    kind = d.type(*_BITS)
    return apply(d, lambda a: (a == 0).astype(a.dtype), kind, kind)


@instruction("lop3")
def lop3(d: Decoder):
    combine = d.choice("or", "and")
    d.type("b32")
    table = d.constant(4)
    if not 0 <= table <= 255:
        d.fail(f"immLut is {table}, expected 0 to 255")
    function = integers.lop3(table)
    a, b, c = (d.get(n, "u32") for n in (1, 2, 3))
    if combine is None:
        expect(d, 5)
        put = destination(d, 0, "u32")
        return lambda m: put(m, function(a(m), b(m), c(m)))
    expect(d, 6)
    both = d.operand(0)
    if not isinstance(both, Pair):
        d.fail("destinations d|p expected")
    put, put_p, q = destination(d, both.first, "u32"), destination(d, both.second, "pred"), d.get(5, "pred")
    join = np.bitwise_or if combine == "or" else np.bitwise_and

    def step(m):
        value, other = function(a(m), b(m), c(m)), q(m)
        put(m, value)
        put_p(m, join(value != 0, other))

    return step


@instruction("shf")
def shf(d: Decoder):
    direction = d.choice("l", "r") or d.fail(".l or .r expected")
    mode = d.choice("clamp", "wrap") or d.fail(".clamp or .wrap expected")
    d.type("b32")
    return apply(d, lambda a, b, c: integers.shf(direction, mode, a, b, c), "u32", "u32", "u32", "u32")


@instruction("shl", "shr")
def shift(d: Decoder):
    left = d.ins.opcode == "shl"
    kind = d.type(*(_BITS if left else (*_BITS, *_ARITHMETIC)))
    amount = d.operand(2)
    if not isinstance(amount, Imm):
        return apply(d, integers.shl if left else integers.shr, kind, kind, "u32")
    # numpy shifts by the width and more as PTX does: nothing but the fill is left.
    n = DTYPES[kind].type(min(int(d.immediate(amount, DTYPES["u32"])), 8 * DTYPES[kind].itemsize))
    put, a = destination(d, 0, kind), d.get(1, kind)
    expect(d, 3)
    plain = np.left_shift if left else np.right_shift
    return lambda m: put(m, plain(a(m), n))


@instruction("prmt")
def prmt(d: Decoder):
    d.type("b32")
    mode = d.choice("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    control = d.operand(3)
    if not isinstance(control, Imm):
        return apply(d, lambda a, b, c: integers.prmt(a, b, c, mode), "u32", "u32", "u32", "u32")
    function = integers.prmt_constant(int(d.immediate(control, DTYPES["u32"])), mode)
    expect(d, 4)
    put, a, b = destination(d, 0, "u32"), d.get(1, "u32"), d.get(2, "u32")
    return lambda m: put(m, function(a(m), b(m)))
