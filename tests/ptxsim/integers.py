"""What PTX integer, logic and bit instructions compute, as functions of numpy arrays.

The arrays' dtype says the type of the instruction where it matters (int32 for .s32, uint32 for .u32 and .b32).
Functions broadcast and take numpy scalars too; they expect to run under `np.errstate(all="ignore")`. Section numbers
are those of the PTX ISA 9.0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .numerics import INTEGERS, pack, unpack

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
_WIDER = {"u2": U32, "i2": np.int32, "u4": U64, "i4": np.int64}
_UNSIGNED = {1: U8, 2: U16, 4: U32, 8: U64}
_NOT_FOUND = U32(0xFFFFFFFF)


def _code(x) -> str:
    return f"{x.dtype.kind}{x.dtype.itemsize}"


def _limits(dtype) -> tuple:
    info = np.iinfo(dtype)
    return info.min, info.max


def _clamped(x, dtype):
    """A wider integer's value clamped to this type."""
    low, high = _limits(dtype)
    return np.minimum(np.maximum(x, x.dtype.type(low)), x.dtype.type(high)).astype(dtype)


# -- arithmetic (9.7.1)


def add_sat(a, b):
    """add.sat.s32 (9.7.1.1)."""
    return _clamped(np.add(a, b, dtype=np.int64), np.int32)


def sub_sat(a, b):
    """sub.sat.s32 (9.7.1.2)."""
    return _clamped(np.subtract(a, b, dtype=np.int64), np.int32)


def mul_wide(a, b):
    """mul.wide (9.7.1.3): 16-bit operands give 32 bits, 32-bit ones 64."""
    return np.multiply(a, b, dtype=_WIDER[_code(a)])


def mul_hi(a, b):
    """mul.hi (9.7.1.3): the upper half of the product."""
    if a.dtype.itemsize < 8:
        wide = _WIDER[_code(a)]
        return (np.multiply(a, b, dtype=wide) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)
    x, y = a.view(U64), b.view(U64)
    low, half = U64(0xFFFFFFFF), U64(32)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + (x0 * y0 >> half)
    middle_2 = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> half) + (middle_2 >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, U64(0)) - np.where(b < 0, x, U64(0))
    return high.view(a.dtype)


def mad_hi_sat(a, b, c):
    """mad.hi.sat.s32 (9.7.1.4)."""
    return add_sat(mul_hi(a, b), c)


def mul24(a, b, mode: str):
    """mul24.hi and .lo (9.7.1.5): bits 47..16, or 31..0, of the product of the operands' low 24 bits."""
    wide = _WIDER[_code(a)]
    shift = a.dtype.type(8)
    t = np.multiply(a << shift >> shift, b << shift >> shift, dtype=wide)
    return (t >> wide(16) if mode == "hi" else t).astype(a.dtype)


def sad(a, b, c):
    """sad (9.7.1.7): c + |a - b|."""
    return c + np.where(a < b, b - a, a - b)


def div(a, b):
    """div (9.7.1.8), towards zero. By zero the ISA leaves the value open: here all bits are set."""
    zero = b == 0
    some = zero.any()
    if some:
        b = np.where(zero, b.dtype.type(1), b)
    q = np.floor_divide(a - np.fmod(a, b), b)
    return np.where(zero, a.dtype.type(0) - a.dtype.type(1), q) if some else q


def rem(a, b):
    """rem (9.7.1.9), of the sign of a. By zero the ISA leaves the value open: here it is a."""
    r = np.fmod(a, b)
    zero = b == 0
    return np.where(zero, a, r) if zero.any() else r


def popc(a):
    """popc (9.7.1.14) to uint32."""
    return _POPCOUNT[unpack(a, U16)].sum(-1, dtype=U32)


_POPCOUNT = np.array([0], U8)
for _ in range(16):
    _POPCOUNT = np.concatenate([_POPCOUNT, _POPCOUNT + U8(1)])


def _bit_length(a):
    """How many bits an unsigned integer needs, as int32."""
    if a.dtype.itemsize == 4:
        return np.frexp(a.astype(np.float64))[1]
    high = (a >> U64(32)).astype(U32)
    low = a.astype(U32)
    return np.where(high != 0, _bit_length(high) + np.int32(32), _bit_length(low))


def clz(a):
    """clz (9.7.1.15) of uint32 or uint64, to uint32."""
    return (np.int32(8 * a.dtype.itemsize) - _bit_length(a)).astype(U32)


def bfind(a, *, shiftamt: bool = False):
    """bfind (9.7.1.16) to uint32: the highest bit that isn't a copy of the sign; all ones if there's none."""
    bits = a.view(_UNSIGNED[a.dtype.itemsize])
    if a.dtype.kind == "i":
        bits = np.where(a < 0, ~bits, bits)
    length = _bit_length(bits)
    found = (np.int32(8 * a.dtype.itemsize) - length if shiftamt else length - np.int32(1)).astype(U32)
    return np.where(length == 0, _NOT_FOUND, found)


def fns(mask, base, offset):
    """fns (9.7.1.17): mask and base uint32, offset int32."""
    mask, base, offset = np.broadcast_arrays(mask, base, offset)
    position = base.astype(np.int32)
    step = np.where(offset < 0, np.int32(-1), np.int32(1))
    count = np.abs(offset.astype(np.int64)) - 1
    found = np.full(mask.shape, _NOT_FOUND)
    at_base = (offset == 0) & ((mask >> (base & U32(31))) & U32(1) == 1)
    open_ = offset != 0
    for _ in range(32):
        inside = (position >= 0) & (position < 32)
        bit = (mask >> (position & np.int32(31)).astype(U32)) & U32(1) == 1
        here = open_ & inside & bit
        hit = here & (count == 0)
        found = np.where(hit, position.astype(U32), found)
        open_ = open_ & ~hit
        count = count - here
        position = position + step
    return np.where(at_base, base, found)


def brev(a):
    """brev (9.7.1.18) of uint32 or uint64."""
    kind = a.dtype.type
    for shift, mask in ((1, 0x55), (2, 0x33), (4, 0x0F)):
        m = kind(int.from_bytes(bytes([mask]) * a.dtype.itemsize, "little"))
        a = ((a >> kind(shift)) & m) | ((a & m) << kind(shift))
    return a.byteswap()


def _amount(b, dtype):
    """Shift amounts in the type of what is shifted; what is too large stays too large."""
    if b.dtype.itemsize > dtype.itemsize or dtype.kind == "i":
        b = np.minimum(b, b.dtype.type(8 * dtype.itemsize))
    return b.astype(dtype, copy=False)


def shl(a, b):
    """shl (9.7.8.8): amounts of the width or more give zero, as numpy's shifts do."""
    return np.left_shift(a, _amount(b, a.dtype))


def shr(a, b):
    """shr (9.7.8.9), by the sign for signed types; amounts of the width or more leave nothing but the sign."""
    return np.right_shift(a, _amount(b, a.dtype))


def shf(direction: str, mode: str, a, b, c):
    """shf.l and shf.r (9.7.8.7) of uint32, .clamp or .wrap."""
    n = (np.minimum(c, U32(32)) if mode == "clamp" else c & U32(31)).astype(U64)
    both = b.astype(U64) << U64(32) | a
    if direction == "l":
        return (both << n >> U64(32)).astype(U32)
    return (both >> n).astype(U32)


def bfe(a, b, c):
    """bfe (9.7.1.19): the field of c bits from bit b; b and c uint32."""
    kind = a.dtype.type
    width = U32(8 * a.dtype.itemsize)
    start, length = b & U32(255), c & U32(255)
    if a.dtype.kind == "u":
        ones = ~np.left_shift(kind(0) - kind(1), length.astype(a.dtype))
        return (a >> start.astype(a.dtype)) & ones
    end = np.minimum(start + length, width)  # the field's top bit goes to the top, then all the way down
    r = a << (width - end).astype(a.dtype) >> (width - end + start).astype(a.dtype)
    return np.where(length == 0, kind(0), r)


def bfi(a, b, c, d):
    """bfi (9.7.1.20): the low d bits of a put into b at bit c; a, b unsigned, c and d uint32."""
    kind = a.dtype.type
    start, length = (c & U32(255)).astype(a.dtype), (d & U32(255)).astype(a.dtype)
    field = ~np.left_shift(kind(0) - kind(1), length) << start
    return (b & ~field) | ((a << start) & field)


def szext(a, b, mode: str):
    """szext (9.7.1.21): the low b bits of a, extended by the type's rule; b uint32."""
    width = b & U32(31) if mode == "wrap" else np.minimum(b, U32(32))
    shift = (U32(32) - width).astype(a.dtype)
    return a << shift >> shift if a.dtype.kind == "u" else np.where(width == 0, np.int32(0), a << shift >> shift)


def bmsk(a, b, mode: str):
    """bmsk (9.7.1.22): b ones from bit a, in uint32."""
    start, width = (a & U32(31), b & U32(31)) if mode == "wrap" else (a, np.minimum(b, U32(32)))
    return ~np.left_shift(_NOT_FOUND, width) << start


def dp4a(a, b, c):
    """dp4a (9.7.1.23): a and b are int32 or uint32 of four bytes each; the result has c's type."""
    x, y = (unpack(v, np.dtype(f"{v.dtype.kind}1")).astype(np.int32) for v in (a, b))
    return c + (x * y).sum(-1, dtype=np.int32).view(c.dtype)


def dp2a(a, b, c, mode: str):
    """dp2a (9.7.1.24): two halfwords of a by the lower or upper two bytes of b; the result has c's type."""
    x = unpack(a, np.dtype(f"{a.dtype.kind}2")).astype(np.int32)
    y = unpack(b, np.dtype(f"{b.dtype.kind}1")).astype(np.int32)
    y = y[..., 2:] if mode == "hi" else y[..., :2]
    return c + (x * y).sum(-1, dtype=np.int32).view(c.dtype)


# -- extended precision (9.7.2): the carry is a bool array


def add_carry(a, b, carry=None):
    """add.cc and addc.cc (9.7.2.1, 9.7.2.2): the sum with the carry, and the carry out."""
    kind = _UNSIGNED[a.dtype.itemsize]
    x = a.view(kind)
    t = x + b.view(kind)
    out = t < x
    if carry is None:
        return t.view(a.dtype), out
    r = t + carry
    return r.view(a.dtype), out | (r < t)


def sub_carry(a, b, borrow=None):
    """sub.cc and subc.cc (9.7.2.3, 9.7.2.4): the difference with the borrow, and the borrow out."""
    kind = _UNSIGNED[a.dtype.itemsize]
    x, y = a.view(kind), b.view(kind)
    out = x < y
    if borrow is None:
        return (x - y).view(a.dtype), out
    return (x - y - borrow).view(a.dtype), out | ((x == y) & borrow)


def mad_carry(a, b, c, mode: str, carry=None):
    """mad.cc and madc.cc (9.7.2.5, 9.7.2.6): the low or high half of a * b plus c, and the carry of that sum."""
    return add_carry(mul_hi(a, b) if mode == "hi" else a * b, c, carry)


# -- logic (9.7.8) and bytes


def lop3(table: int) -> Callable:
    """lop3.b32 (9.7.8.6) with this immLut, as a function of three unsigned arrays.

    Bit 4a + 2b + c of the table is the result for bits a, b and c. With f the row for c = 0 and g what c turns, the
    result is f(a, b) ^ (g(a, b) & c).
    """
    if not 0 <= table <= 255:
        raise ValueError(f"immLut is {table}, expected 0 to 255")
    rows = [[table >> 2 * i + c & 1 for i in range(4)] for c in (0, 1)]
    f = sum(bit << i for i, bit in enumerate(rows[0]))
    g = sum((x ^ y) << i for i, (x, y) in enumerate(zip(*rows, strict=True)))
    base, turned = _OF_TWO[f], _OF_TWO[g]
    if g == 0:
        return lambda a, b, c: base(a, b) ^ (c ^ c)
    if g == 15:
        return lambda a, b, c: base(a, b) ^ c
    if f == 0:
        return lambda a, b, c: turned(a, b) & c
    return lambda a, b, c: base(a, b) ^ (turned(a, b) & c)


# The functions of two bits: bit 2a + b of the index is the result.
_OF_TWO: list[Callable] = [
    lambda a, b: a ^ a,
    lambda a, b: ~(a | b),
    lambda a, b: ~a & b,
    lambda a, b: ~a,
    lambda a, b: a & ~b,
    lambda a, b: ~b,
    lambda a, b: a ^ b,
    lambda a, b: ~(a & b),
    lambda a, b: a & b,
    lambda a, b: ~(a ^ b),
    lambda a, b: b,
    lambda a, b: ~a | b,
    lambda a, b: a,
    lambda a, b: a | ~b,
    lambda a, b: a | b,
    lambda a, b: ~(a ^ a),
]

# For each mode and value of the two control bits, the source byte of d's bytes 0 to 3.
_PRMT_MODES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def prmt(a, b, c, mode: str | None = None):
    """prmt.b32 (9.7.9.7) of uint32: bytes picked from b:a. `mode` is None or f4e, b4e, rc8, ecl, ecr, rc16."""
    source = unpack(np.asarray(b.astype(U64) << U64(32) | a), U8)
    if mode is not None:
        chosen = np.array(_PRMT_MODES[mode], np.intp)[c & U32(3)]
        return pack(_bytes_at(source, chosen), U32)
    control = np.asarray(c)[..., None] >> np.array([0, 4, 8, 12], U32)
    picked = _bytes_at(source, (control & U32(7)).astype(np.intp))
    signs = (control & U32(8)) != 0
    if signs.any():
        picked = np.where(signs, (picked.view(np.int8) >> np.int8(7)).view(U8), picked)
    return pack(picked, U32)


def prmt_constant(control: int, mode: str | None = None) -> Callable:
    """prmt.b32 with a constant control, as a function of two uint32 arrays: shifts and masks instead of byte moves."""
    if mode is None:
        select = [control >> 4 * i & 0xF for i in range(4)]
        if any(s & 8 for s in select):
            return lambda a, b: prmt(a, b, U32(control & 0xFFFF))
    else:
        select = list(_PRMT_MODES[mode][control & 3])
    masks: dict[tuple[int, int], int] = {}  # (which operand, shift to the left in bits) -> bytes of the result
    for i, s in enumerate(select):
        key = (s >> 2, 8 * (i - (s & 3)))
        masks[key] = masks.get(key, 0) | 0xFF << 8 * i
    terms = []
    for (which, shift), mask in masks.items():
        shifted_in = 0xFFFFFFFF << shift & 0xFFFFFFFF if shift > 0 else 0xFFFFFFFF >> -shift
        terms.append((which, shift, U32(mask), mask != shifted_in))

    def permute(a, b):
        result = None
        for which, shift, mask, cut in terms:
            x = b if which else a
            if shift:
                x = x << U32(shift) if shift > 0 else x >> U32(-shift)
            if cut:
                x = x & mask
            result = x if result is None else result | x
        return result

    return permute


def _bytes_at(source, index):
    if index.ndim == 1:  # the same for all lanes
        return source[..., index]
    return np.take_along_axis(np.broadcast_to(source, (*index.shape[:-1], 8)), index, -1)


# -- halfwords (9.7.1.1, 9.7.1.12, 9.7.1.13)


def halves(function: Callable, kind: str) -> Callable:
    """The .u16x2 or .s16x2 form of a function of 16-bit integers, on uint32."""
    part = INTEGERS[kind[:3]]
    return lambda *operands: pack(function(*(unpack(x, part) for x in operands)), U32)


def relu(x):
    """.relu of signed integers."""
    return np.maximum(x, x.dtype.type(0))


# -- cvt.pack (9.7.9.22)


def cvt_pack(kind: str) -> Callable:
    """cvt.pack.sat.kind.s32(.b32): a and b (int32) clamped to `kind`, b in the low bits; below 16 bits, c (uint32)
    fills what is left above."""
    if kind[0] not in "us" or kind[1:] not in ("2", "4", "8", "16"):
        raise ValueError(f"cvt.pack to .{kind}: expected u2, s2, u4, s4, u8, s8, u16 or s16")
    size = int(kind[1:])
    low, high = (0, (1 << size) - 1) if kind[0] == "u" else (-(1 << size - 1), (1 << size - 1) - 1)
    mask = U32((1 << size) - 1)

    def convert(x):
        return np.minimum(np.maximum(x, np.int32(low)), np.int32(high)).view(U32) & mask

    if size == 16:
        return lambda a, b: convert(a) << U32(16) | convert(b)
    return lambda a, b, c: c << U32(2 * size) | convert(a) << U32(size) | convert(b)
