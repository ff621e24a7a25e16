"""Matrices held by a warp: mma (PTX ISA 9.7.14.5.1-14), ldmatrix (9.7.14.5.15), stmatrix (.16), movmatrix (.17).

One scheme covers every supported fragment. With g = lane / 4, t = lane % 4, and n elements in a register:

  A (M x K, by rows)     register 2 c + h (M = 8: c): row g + 8 h, columns (4 c + t) n + 0 .. n - 1
  B (K x 8, by columns)  register c: column g, rows (4 c + t) n + 0 .. n - 1
  C, D (M x 8)           element 2 h + e: row g + 8 h, column 2 t + e

A product of two elements of 16 bits or fewer, or of two tf32, is exact in f32; sums are made in f32 in an order of the
library's choosing and rounded as it pleases, which the ISA leaves open (9.7.14.5.14, "Precision and rounding").
"""

from __future__ import annotations

import functools

import numpy as np

from .. import numerics
from ..decode import STOP, UINT, Decoder, instruction
from ..errors import Fault
from ..ptx import Reg

BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "f64": 8, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1}
_LANE = np.arange(32)
_G, _T = _LANE // 4, _LANE % 4


# -- elements


@functools.cache
def _table(kind: str) -> np.ndarray:
    """f32 of every f16, e4m3 or e5m2."""
    if kind == "f16":
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return numerics.mini_decode(kind)(np.arange(256, dtype=np.uint8)).view(np.float16).astype(np.float32)


def values(kind: str, raw: np.ndarray) -> np.ndarray:
    """Elements, as unsigned integers of their width, to f32 (f64 to f64), exactly. tf32: the upper 19 bits count."""
    if kind == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    if kind == "s8":
        return raw.view(np.int8).astype(np.float32)
    if kind == "u8":
        return raw.astype(np.float32)
    if kind == "f64":
        return raw.view(np.float64)
    return _table(kind).take(raw)


# -- fragments


def warps_of(m) -> np.ndarray:
    """The active warps, all of whose 32 threads must be there."""
    warps = m.whole_warps
    if m.threads % 32:
        lacking = ~m.exists.reshape(-1, 32)[warps].all(1)
        if lacking.any():
            raise Fault(
                f"{m.instruction.name} needs warps of 32 threads, but {m.name_warp(int(warps[lacking][0]))} has fewer"
            )
    return warps


@functools.lru_cache(maxsize=256)
def _places(n: int, rows: int, chunks: int, fixed: bool) -> np.ndarray:
    """Where the register of each place lies among concatenated registers of n lanes: [1, 8 rows, 4 chunks] for warp 0,
    or [warps, ...] for all of them if `fixed`."""
    places = np.empty((8 * rows, 4 * chunks), np.int64)
    for c in range(chunks):
        for h in range(rows):
            places[_G + 8 * h, 4 * c + _T] = (c * rows + h) * n + _LANE
    return places + np.arange(0, n, 32)[:, None, None] if fixed else places[None]


def gather(m, registers: tuple[int, ...], rows: int, kind: str, warps: np.ndarray) -> np.ndarray:
    """An A fragment (rows = 2; 1 where M = 8) as [warps, M, K]; or a B fragment (rows = 1) transposed, [warps, 8, K].

    Register arrays are never changed in place, so that a fragment used by several instructions is converted once.
    """
    arrays = [m.regs[i] for i in registers]
    kept = m.state.setdefault("fragments", {})
    entry = kept.get((registers, kind))
    if entry is not None:
        before, of, matrix = entry
        same = all(a is b for a, b in zip(arrays, before, strict=True))
        if same and (of is warps or np.array_equal(of, warps)):
            return matrix
    whole = UINT[max(BYTES[kind], 4)]
    joined = np.concatenate([a if a.dtype == whole else a.view(whole) for a in arrays])
    places = _places(m.n, rows, len(registers) // rows, m.full)
    if not m.full:
        places = places + 32 * warps[:, None, None]
    matrix = values(kind, joined.take(places).view(UINT[BYTES[kind]]))
    kept[registers, kind] = (arrays, warps, matrix)
    return matrix


@functools.lru_cache(maxsize=64)
def _results(warps: int, rows: int) -> np.ndarray:
    """Where element [2 h + e, lane] of a fragment of D lies in [warps, 8 rows, 8] flattened."""
    places = np.empty((2 * rows, 32), np.int64)
    for h in range(rows):
        for e in range(2):
            places[2 * h + e] = (_G + 8 * h) * 8 + 2 * _T + e
    return (places[:, None] + np.arange(warps)[:, None] * (64 * rows)).reshape(2 * rows, -1)


# -- mma

_F16, _TF32, _INTEGER, _FP8 = ("f16", "bf16"), ("tf32",), ("s8", "u8"), ("e4m3", "e5m2")
# shape -> the types of A and B that it exists for
_SHAPES = {
    "m16n8k16": (*_F16, *_INTEGER, "f64"),
    "m16n8k8": (*_F16, *_TF32, "f64"),
    "m16n8k4": (*_TF32, "f64"),
    "m16n8k32": (*_INTEGER, *_FP8),
    "m8n8k4": ("f64",),
}


def element_type(d: Decoder, *allowed: str) -> str:
    """The next type among the modifiers, those of 8-bit floats included."""
    for name in d.left:
        if name in allowed:
            d.left.remove(name)
            return name
    d.fail(f"expected a type: {', '.join('.' + name for name in allowed)}")


def registers(d: Decoder, which: int, count: int, size: int) -> tuple[int, ...]:
    """The indices of a vector operand's registers."""
    items = d.items(which)
    if len(items) != count or not all(isinstance(item, Reg) and item.bytes == size for item in items):
        d.fail(f"operand {which}: expected {count} registers of {8 * size} bits")
    return tuple(item.index for item in items)


@instruction("mma", control=True)
def mma(d: Decoder):
    if not (d.flag("sync") and d.flag("aligned")):
        d.fail("expected .sync.aligned")
    shape = d.choice(*_SHAPES)
    if shape is None:
        d.fail(f"the shapes known are {', '.join('.' + s for s in _SHAPES)}")
    if not (d.flag("row") and d.flag("col")):
        d.fail("expected .row.col")
    saturate = d.flag("satfinite")
    to = element_type(d, "f16", "f32", "f64", "s32")
    kind_a = element_type(d, *_SHAPES[shape])
    kind_b = element_type(d, *_SHAPES[shape])
    of = element_type(d, "f16", "f32", "f64", "s32")
    _check_types(d, shape, to, kind_a, kind_b, of)
    if saturate and to != "s32":
        d.fail(".satfinite needs .s32")
    rows = 1 if shape == "m8n8k4" else 2
    size = max(BYTES[kind_a], 4)
    k = int(shape.rpartition("k")[2])
    chunks = k * BYTES[kind_a] // (4 * size)
    a, b = registers(d, 1, rows * chunks, size), registers(d, 2, chunks, size)
    sources, puts = _accumulators(d, of, rows, sources=True), _accumulators(d, to, rows, sources=False)
    following = d.next

    def step(m):
        if not m.gather_warps():
            return STOP
        warps = warps_of(m)
        m.statistics["products"] += len(warps)
        product = np.matmul(gather(m, a, rows, kind_a, warps), gather(m, b, 1, kind_b, warps).transpose(0, 2, 1))
        fragment = product.take(_results(len(warps), rows))
        for index, row in puts(_sum(fragment, sources(m), to, saturate)):
            if m.full:
                m.regs[index] = row
            else:
                m.put_lanes(index, row)
        return following

    return step


def _check_types(d: Decoder, shape, to, a, b, of):
    """The combinations of 9.7.14.5.14."""
    if a in ("s8", "u8"):
        good = b in _INTEGER and (to, of) == ("s32", "s32")
    elif a in _FP8:
        good = b in _FP8 and to == of and of in ("f16", "f32")
    elif a == "f16":
        good = b == "f16" and to in ("f16", "f32") and of in ("f16", "f32") and (shape == "m16n8k16" or to == of)
    else:
        good = a == b and to == of == {"bf16": "f32", "tf32": "f32", "f64": "f64"}[a]
    if not good:
        d.fail(f"types .{to}.{a}.{b}.{of} don't go together")


def _sum(product: np.ndarray, c: np.ndarray, to: str, saturate: bool) -> np.ndarray:
    if to == "s32":
        total = product.astype(np.int64) + c
        if saturate:
            total = np.clip(total, -(2**31), 2**31 - 1)
        return total.astype(np.int32)
    total = product + c
    return total.astype(np.float16) if to == "f16" else total


def _accumulators(d: Decoder, kind: str, rows: int, *, sources: bool):
    """Of C: m -> [2 rows, lanes]. Of D: such an array -> (register, its lanes) of each register."""
    which = 3 if sources else 0
    pairs = kind == "f16"
    count = rows if pairs else 2 * rows
    dtype = np.dtype({"f16": "u4", "f32": "f4", "f64": "f8", "s32": "i4"}[kind])
    if sources:
        items = d.items(3)
        if len(items) != count:
            d.fail(f"operand 3: expected {count} registers")
        gets = [d.get(item, dtype) for item in items]

        def read(m):
            parts = [get(m) for get in gets]
            parts = [np.broadcast_to(p, m.n) if p.ndim == 0 else p for p in parts]
            c = np.concatenate(parts).reshape(count, m.n)
            if not m.full:
                c = c[:, m.lanes]
            if pairs:
                halves = np.ascontiguousarray(c).view(np.uint16).reshape(rows, -1, 2).transpose(0, 2, 1)
                return _table("f16").take(halves).reshape(2 * rows, -1)
            return c

        return read
    indices = registers(d, which, count, dtype.itemsize)

    def split(values):
        if pairs:
            values = np.ascontiguousarray(values.reshape(rows, 2, -1).transpose(0, 2, 1)).view(np.uint32)[:, :, 0]
        return zip(indices, values, strict=True)

    return split


# -- ldmatrix, stmatrix, movmatrix


def _matrix_shape(d: Decoder) -> tuple[int, bool, str]:
    if not (d.flag("sync") and d.flag("aligned")):
        d.fail("expected .sync.aligned")
    if not d.flag("m8n8"):
        d.fail("only the shape .m8n8 is supported")
    count = d.choice("x1", "x2", "x4")
    if count is None:
        d.fail("expected .x1, .x2 or .x4")
    transpose = d.flag("trans")
    space = d.choice("shared", "shared::cta") or "generic"
    d.type("b16")
    return int(count[1:]), transpose, space.split("::")[0]


def _row_lanes(m, warps: np.ndarray, count: int) -> np.ndarray | None:
    """Positions in `lanes` of those that give the rows' addresses: lanes 8 i .. 8 i + 7 for matrix i; None: all."""
    if count == 4:
        return None
    return (np.arange(0, 32 * len(warps), 32)[:, None] + np.arange(8 * count)).reshape(-1)


def _transposed(words: np.ndarray) -> np.ndarray:
    """[..., 8, 4] words of 8x8 matrices of 16-bit elements to those of the transposes."""
    swapped = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape[:-2], 8, 8).swapaxes(-1, -2)
    return np.ascontiguousarray(swapped).view(np.uint32)


@instruction("ldmatrix", control=True)
def ldmatrix(d: Decoder):
    count, transpose, space = _matrix_shape(d)
    address = d.address(1)
    targets = registers(d, 0, count, 4)
    following = d.next

    def step(m):
        if not m.gather_warps():
            return STOP
        warps = warps_of(m)
        chosen = _row_lanes(m, warps, count)
        where = address(m)
        if not m.full:
            where = where[m.lanes]
        rows = m.load_rows(space, where if chosen is None else where[chosen], chosen)
        words = rows.reshape(len(warps), count, 8, 4)
        if transpose:
            words = _transposed(words)
        # lane 4 r + w holds word w of row r
        fragments = np.ascontiguousarray(words.transpose(1, 0, 2, 3)).reshape(count, -1)
        for index, row in zip(targets, fragments, strict=True):
            if m.full:
                m.regs[index] = row
            else:
                m.put_lanes(index, row)
        return following

    return step


@instruction("stmatrix", control=True)
def stmatrix(d: Decoder):
    count, transpose, space = _matrix_shape(d)
    address = d.address(0)
    sources = registers(d, 1, count, 4)
    following = d.next

    def step(m):
        if not m.gather_warps():
            return STOP
        warps = warps_of(m)
        chosen = _row_lanes(m, warps, count)
        where, lanes = address(m)[m.lanes], m.lanes
        words = np.stack([m.regs[i].view(np.uint32)[lanes] for i in sources]).reshape(count, -1, 8, 4)
        words = words.transpose(1, 0, 2, 3)
        if transpose:
            words = _transposed(words)
        m.store_rows(space, where if chosen is None else where[chosen], words.reshape(-1, 4), chosen)
        return following

    return step


@instruction("movmatrix", control=True)
def movmatrix(d: Decoder):
    if not (d.flag("sync") and d.flag("aligned") and d.flag("m8n8") and d.flag("trans")):
        d.fail("expected .sync.aligned.m8n8.trans")
    d.type("b16")
    put, source, following = d.put(0), d.get(1, "b32"), d.next

    def step(m):
        if not m.gather_warps():
            return STOP
        warps_of(m)
        words = np.broadcast_to(source(m), m.n).reshape(-1, 8, 4)
        put(m, _transposed(words).reshape(-1))
        return following

    return step
