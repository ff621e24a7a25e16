"""Tensor maps: 128 bytes that describe a tensor, a box of it and how the box lies in shared memory.

A GPU's tensor map is opaque, so this one has a layout of its own (`_FIELDS`), with a magic word: bytes that aren't a
tensor map are told from one. The rules are those of cuTensorMapEncodeTiled (CUDA driver API, "Tensor Map Object
Management") and of the PTX ISA 5.5: tiled mode (5.5.3), swizzling modes (5.5.7).

`encode` makes one, as the driver does. A kernel may make one itself: it zeroes 128 bytes and fills every field by
`tensormap.replace` (`replace` here), where nothing is checked until a copy decodes the map (`decode`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from .errors import LaunchError

BYTES = 128
# In the order of the operand of tensormap.replace .elemtype (PTX ISA 9.7.9.28, table of new_val); likewise below.
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz")
ELEMENT_BYTES = dict(zip(ELEMENTS, (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4), strict=True))
FLOATS = ("f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz")
INTERLEAVES = (0, 16, 32)
SWIZZLES = (0, 32, 64, 128)
ATOMS = (16, 32, 32, 64)  # bytes that a swizzle moves as one; FLIP also exchanges the halves of 16 bytes
FLIP = 2
MAGIC = 0x9A17

_FIELDS = np.dtype(
    [
        ("magic", "<u2"),
        ("written", "<u2"),  # bit per field that has a value
        ("rank", "u1"),  # less one
        ("elemtype", "u1"),
        ("interleave_layout", "u1"),
        ("swizzle_mode", "u1"),
        ("swizzle_atomicity", "u1"),
        ("fill_mode", "u1"),
        ("element_stride", "u1", 5),
        ("unused", "u1"),
        ("global_address", "<u8"),
        ("global_dim", "<u8", 5),
        ("global_stride", "<u8", 4),
        ("box_dim", "<u2", 5),
        ("padding", "u1", 22),
    ]
)
assert _FIELDS.itemsize == BYTES
# Every field that `tensormap.replace` can write; those with an ordinal have one value per dimension.
ORDINAL = {"box_dim": 5, "global_dim": 5, "global_stride": 4, "element_stride": 5}
SCALAR = ("global_address", "rank", "elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode")
# The rest may stay zero, as Triton 3.9 leaves them: u8, rank 1, nothing interleaved, swizzled or filled with NaN.
_MUST = ("global_address", *ORDINAL)
_BIT = {name: 1 << i for i, name in enumerate((*SCALAR, *ORDINAL))}


class TensorMapError(LaunchError):
    """A tensor map that the driver or the hardware would refuse, or bytes that are none."""


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map. Dimension 0 is the innermost; `strides` are bytes of the dimensions 1 and up."""

    address: int
    element: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: int = 0
    atom: int = 0  # index into ATOMS
    fill_nan: bool = False

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.element]

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Elements from one of the box to the next. Dimension 0 takes no other step than 1 (PTX ISA 5.5.3.2)."""
        return (1, *self.element_strides[1:])

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements that one copy moves along each dimension."""
        return tuple(-(-count // step) for count, step in zip(self.box, self.steps, strict=True))

    @cached_property
    def bytes(self) -> int:
        """What one copy moves, elements out of bounds included: the number that completes on the mbarrier."""
        return int(np.prod(self.counts)) * self.element_bytes

    def inside(self, coordinates: tuple[int, ...]) -> list[slice] | None:
        """The part of the box at these coordinates that is in bounds: a slice per dimension; None if nothing is."""
        parts = []
        for start, count, step, size in zip(coordinates, self.counts, self.steps, self.sizes, strict=True):
            first = max(0, -(start // step)) if start < 0 else 0
            end = min(count, -((start - size) // step)) if start < size else 0
            if first >= end:
                return None
            parts.append(slice(first, end))
        return parts

    def rows(self, coordinates: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, int]:
        """The box's rows that lie in the tensor.

        Returns:
            offsets: int64[n], of each row's first element in bounds, in bytes from the tensor's address.
            rows: int64[n], which row of the box (the dimensions 1 and up, dimension 1 fastest) each one is.
            bytes: how many of each row's bytes are in bounds; they start at `inside(coordinates)[0].start` elements.
        """
        parts = self.inside(coordinates)
        if parts is None:
            nothing = np.zeros(0, np.int64)
            return nothing, nothing, 0
        offsets = np.array([(coordinates[0] + parts[0].start) * self.element_bytes], np.int64)
        rows = np.zeros(1, np.int64)
        pitch = 1
        for d in range(1, self.rank):
            index = np.arange(parts[d].start, parts[d].stop)
            where = (coordinates[d] + index * self.steps[d]) * self.strides[d - 1]
            offsets = (where[:, None] + offsets).reshape(-1)
            rows = (index[:, None] * pitch + rows).reshape(-1)
            pitch *= self.counts[d]
        return offsets, rows, (parts[0].stop - parts[0].start) * self.element_bytes

    def window(
        self, data: np.ndarray, start: int, coordinates: tuple[int, ...], parts: list[slice], dtype
    ) -> np.ndarray:
        """The elements in bounds, as a view [outermost .. innermost] of bytes in which the tensor begins at `start`."""
        pitches = (self.element_bytes, *self.strides)
        for d, part in enumerate(parts):
            start += (coordinates[d] + part.start * self.steps[d]) * pitches[d]
        shape = [part.stop - part.start for part in parts]
        strides = [step * pitch for step, pitch in zip(self.steps, pitches, strict=True)]
        return np.ndarray(shape[::-1], dtype, data, start, strides[::-1])

    def shared_units(self, address: int) -> np.ndarray:
        """Where the box's 16-byte units go: their offsets from `address` in shared memory, in units of 16 bytes."""
        return _swizzled(self.swizzle, ATOMS[self.atom], address % 1024, self.bytes // 16)


@lru_cache(maxsize=256)
def _swizzled(swizzle: int, atom: int, phase: int, count: int) -> np.ndarray:
    units = (swizzle_address(phase + 16 * np.arange(count, dtype=np.int64), swizzle, atom) - phase) >> 4
    units.setflags(write=False)
    return units


def swizzle_address(address, swizzle: int, atom: int = 16):
    """Where the byte goes that would lie at this shared address without swizzling (PTX ISA 5.5.7).

    A span of `swizzle` bytes is cut into atoms, and an atom's number in its span is XORed with the number of its
    128-byte line: bits of the address itself, as "swizzle base offset" there says, not of the offset in the tile.
    """
    if not swizzle:
        return address
    return address ^ ((address >> 7 & (swizzle // atom - 1)) << (atom.bit_length() - 1))


def encode(
    address: int,
    element: str,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    element_strides: tuple[int, ...] | None = None,
    interleave: int = 0,
    swizzle: int = 0,
    fill_nan: bool = False,
    atom: int = 0,
) -> bytes:
    """What cuTensorMapEncodeTiled makes: 128 bytes.

    Args:
        address: of the tensor in global memory.
        element: one of ELEMENTS.
        sizes: elements per dimension, the innermost first.
        strides: bytes from one element to the next, for every dimension but the innermost.
        box: elements per dimension of the part that one copy moves.
        element_strides: steps within the box; ones if None.
        interleave: only 0 is modelled.
        swizzle: bytes of the swizzle's span, 0 for none.
        fill_nan: elements out of bounds are read as NaN instead of zero.
        atom: index into ATOMS.

    Raises:
        TensorMapError: what the driver would refuse.
    """
    if element not in ELEMENT_BYTES:
        raise TensorMapError(f"tensor map: element {element!r}, expected one of {', '.join(ELEMENTS)}")
    if swizzle not in SWIZZLES or interleave not in INTERLEAVES or atom not in range(len(ATOMS)):
        raise TensorMapError(
            f"tensor map: swizzle {swizzle}, interleave {interleave}, atom {atom}; expected one of {SWIZZLES}, "
            f"one of {INTERLEAVES}, 0 to {len(ATOMS) - 1}"
        )
    if element_strides is None:
        element_strides = (1,) * len(sizes)
    made = TensorMap(
        int(address),
        element,
        _ints(sizes),
        _ints(strides),
        _ints(box),
        _ints(element_strides),
        interleave,
        swizzle,
        atom,
        bool(fill_nan),
    )
    _check(made)
    data = np.zeros(BYTES, np.uint8)
    replace(data, "global_address", None, made.address)
    replace(data, "rank", None, made.rank - 1)
    replace(data, "elemtype", None, ELEMENTS.index(element))
    replace(data, "interleave_layout", None, INTERLEAVES.index(interleave))
    replace(data, "swizzle_mode", None, SWIZZLES.index(swizzle))
    replace(data, "swizzle_atomicity", None, atom)
    replace(data, "fill_mode", None, int(fill_nan))
    for name, values in (("global_dim", made.sizes), ("global_stride", made.strides), ("box_dim", made.box)):
        for d, value in enumerate(values):
            replace(data, name, d, value)
    for d, value in enumerate(made.element_strides):
        replace(data, "element_stride", d, value)
    return data.tobytes()


def _ints(values) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _check(m: TensorMap):
    """The requirements of cuTensorMapEncodeTiled."""

    def need(condition, words):
        if not condition:
            raise TensorMapError(f"tensor map: {words}")

    rank = len(m.sizes)
    need(1 <= rank <= 5, f"rank {rank}, expected 1 to 5")
    for name, values, count in (
        ("strides", m.strides, rank - 1),
        ("box", m.box, rank),
        ("element strides", m.element_strides, rank),
    ):
        need(len(values) == count, f"{len(values)} {name} for a tensor of rank {rank}, expected {count}")
    need(not m.interleave or rank >= 3, f"rank {rank}, but an interleaved layout needs 3 or more")
    grain = 32 if m.interleave == 32 else 16
    need(m.address % grain == 0, f"global address {m.address:#x}, expected a multiple of {grain}")
    for d, size in enumerate(m.sizes):
        need(1 <= size <= 1 << 32, f"size {size} of dimension {d}, expected 1 to 2^32")
    for d, stride in enumerate(m.strides):
        need(
            stride % grain == 0 and 0 <= stride < 1 << 40,
            f"stride {stride} of dimension {d + 1}, expected a multiple of {grain} bytes below 2^40",
        )
    for d, count in enumerate(m.box):
        need(1 <= count <= 256, f"box size {count} of dimension {d}, expected 1 to 256")
    for d, step in enumerate(m.element_strides):
        need(1 <= step <= 8, f"element stride {step} of dimension {d}, expected 1 to 8")
    inner = m.box[0] * ELEMENT_BYTES[m.element]
    if not m.interleave:
        need(inner % 16 == 0, f"the box is {inner} bytes wide, expected a multiple of 16")
        need(
            not m.swizzle or inner <= m.swizzle,
            f"the box is {inner} bytes wide, expected at most the {m.swizzle} bytes of the swizzle",
        )
    need(
        m.interleave != 32 or m.swizzle == 32,
        f"swizzle {m.swizzle} with 32-byte interleaving, which takes swizzle 32 only",
    )
    need(
        not m.atom or m.swizzle == 128, f"atoms of {ATOMS[m.atom]} bytes with swizzle {m.swizzle}, expected swizzle 128"
    )
    need(
        not m.fill_nan or m.element in FLOATS, f"NaN for what is out of bounds of {m.element} elements, which have none"
    )


def replace(data: np.ndarray, name: str, ordinal: int | None, value: int):
    """tensormap.replace: writes one field into the 128 bytes.

    Raises:
        TensorMapError: the value doesn't fit the field, or the ordinal isn't one of its dimensions.
    """
    fields = data.view(_FIELDS)[0]
    if fields["magic"] != MAGIC and data.any():
        raise TensorMapError("tensormap.replace: the bytes are neither a tensor map nor zero")
    if name in ORDINAL:
        if ordinal is None or not 0 <= ordinal < ORDINAL[name]:
            raise TensorMapError(f"tensormap.replace: ordinal {ordinal} of .{name}, expected 0 to {ORDINAL[name] - 1}")
        limit = {"element_stride": 8, "box_dim": 256, "global_dim": 1 << 32, "global_stride": (1 << 40) - 1}[name]
        if not 0 <= value <= limit:
            raise TensorMapError(f"tensormap.replace: {value} as .{name} {ordinal}, expected at most {limit}")
        fields[name][ordinal] = value
    else:
        limits = {"rank": 4, "elemtype": len(ELEMENTS) - 1, "interleave_layout": 2, "swizzle_mode": 3}
        limits |= {"swizzle_atomicity": 3, "fill_mode": 1, "global_address": (1 << 64) - 1}
        if not 0 <= value <= limits[name]:
            raise TensorMapError(f"tensormap.replace: {value} as .{name}, expected at most {limits[name]}")
        fields[name] = value
    fields["magic"] = MAGIC
    fields["written"] |= _BIT[name]


@lru_cache(maxsize=1024)
def decode(data: bytes) -> TensorMap:
    """The tensor map that these 128 bytes are.

    Raises:
        TensorMapError: they are none, a field was never written, or the driver would refuse it.
    """
    fields = np.frombuffer(data, _FIELDS)[0]
    if len(data) != BYTES or fields["magic"] != MAGIC:
        raise TensorMapError("these bytes are no tensor map")
    missing = [name for name in _MUST if not fields["written"] & _BIT[name]]
    rank = int(fields["rank"]) + 1
    if rank == 1 and "global_stride" in missing:
        missing.remove("global_stride")
    if missing:
        raise TensorMapError(f"tensor map: {', '.join('.' + name for name in missing)} was never written")
    made = TensorMap(
        int(fields["global_address"]),
        ELEMENTS[fields["elemtype"]],
        _ints(fields["global_dim"][:rank]),
        _ints(fields["global_stride"][: rank - 1]),
        _ints(fields["box_dim"][:rank]),
        _ints(fields["element_stride"][:rank]),
        INTERLEAVES[fields["interleave_layout"]],
        SWIZZLES[fields["swizzle_mode"]],
        int(fields["swizzle_atomicity"]),
        bool(fields["fill_mode"]),
    )
    _check(made)
    return made
