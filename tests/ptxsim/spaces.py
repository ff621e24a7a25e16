"""The memories of a launch: global segments, and one pool each for shared, local, parameter and constant memory.

Every pool is a flat array of bytes with typed views of it. A lane's address is first checked (bounds, alignment) and
turned into a byte offset of the pool; then everything is numpy indexing.
"""

from __future__ import annotations

import numpy as np

from .decode import UINT

# Generic addresses (PTX ISA 6.4.1): a window for each space; global addresses are the tensors' own.
SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW, CONST_WINDOW = (n << 56 for n in (1, 2, 3, 4))
WINDOW_MASK = (1 << 56) - 1


class Pool:
    """Flat bytes. `stride` is each block's share of shared memory or each thread's of local memory; 0: one for all."""

    def __init__(self, name: str, size: int, *, stride: int = 0, limit: int = 0, data: np.ndarray | None = None):
        self.name, self.stride, self.limit = name, stride, limit or size
        if data is None:
            padded = -(-size // 32) * 32
            store = np.full(padded + 64, 0xAB, np.uint8)  # nonsense: what nobody wrote shouldn't look like zero
            start = -store.ctypes.data % 64
            data = store[start : start + padded]
        self.data = data
        usable = data.size
        self.views = {w: data[: usable // w * w].view(UINT[w]) for w in (1, 2, 4, 8)}
        self.shadow = None

    def load(self, offset: np.ndarray, count: int, width: int) -> np.ndarray:
        """[count, lanes] elements of `width` bytes at these byte offsets."""
        view = self.views[width]
        index = offset // width if width > 1 else offset
        if count == 1:
            return view[index][None]
        return view[index + np.arange(count)[:, None]]

    def store(self, offset: np.ndarray, values: np.ndarray, width: int):
        """[count, lanes] elements; where lanes collide, the last one's value stays."""
        view = self.views[width]
        index = offset // width if width > 1 else offset
        if len(values) == 1:
            view[index] = values[0]
        else:
            view[index + np.arange(len(values))[:, None]] = values

    def describe(self, offset: int) -> str:
        if self.stride:
            owner, at = divmod(offset, self.stride)
            return f"{self.name} memory at {at:#x} of {'block' if self.name == 'shared' else 'thread'} {owner}"
        return f"{self.name} memory at {offset:#x}"


class Segment(Pool):
    """One piece of global memory: the storage behind a tensor, or a module's .global variable."""

    def __init__(self, name: str, base: int, data: np.ndarray, *, undefined: bool = False, element: int = 1):
        super().__init__(name, data.size, data=data)
        self.base, self.end, self.undefined, self.element = base, base + data.size, undefined, element

    def describe(self, offset: int) -> str:
        return f"{self.name}, byte {offset} (element {offset // self.element})"


class GlobalMemory:
    """Segments by address."""

    def __init__(self):
        self.segments: list[Segment] = []
        self.bases = np.zeros(0, np.uint64)

    def add(self, segment: Segment):
        for other in self.segments:
            if segment.base < other.end and other.base < segment.end:
                raise AssertionError("global segments overlap")
        self.segments.append(segment)
        self.segments.sort(key=lambda s: s.base)
        self.bases = np.array([s.base for s in self.segments], np.uint64)

    def find(self, address: int) -> Segment | None:
        at = int(np.searchsorted(self.bases, np.uint64(address), side="right")) - 1
        if at >= 0 and address < self.segments[at].end:
            return self.segments[at]
        return None

    def nearest(self, address: int) -> str:
        """Words for a bad address: by how much it misses what."""
        best, distance = None, None
        for s in self.segments:
            d = s.base - address if address < s.base else address - s.end
            if distance is None or d < distance:
                best, distance = s, d
        if best is None:
            return "no global memory was passed"
        where = "before" if address < best.base else "past the end of" if distance >= 0 else "before the end of"
        return f"{abs(distance)} bytes {where} {best.name} ({best.end - best.base} bytes)"
