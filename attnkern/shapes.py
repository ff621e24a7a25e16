"""What is known of tensors without their elements: kinds, sizes that fit together (maybe symbolic), the views that
bring them to 4-D, and how they lie in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import show
from .params import holds, is_length_major

Sizes = tuple[int, ...]


class Kind(NamedTuple):
    """What decides whether a tensor fits a call."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @classmethod
    def of(cls, x: Tensor) -> Kind:
        return tuple.__new__(cls, (x.shape, x.dtype, x.device, x.layout))


class View(NamedTuple):
    """How a tensor becomes 4-D: broadcast to one shape (None: not needed), then reshaped to another."""

    broadcast: Sizes | None
    shape: Sizes

    @classmethod
    def to(cls, batch: Sizes, tail: Sizes, shape: Sizes) -> View | None:
        """The view of a tensor of `shape` as (product of batch, *tail); None: it is that already."""
        flat = 1
        for n in batch:
            flat = flat * n
        if equal(shape, (flat, *tail)):
            return None
        broadcast = (*batch, *tail)
        padded = (1,) * (len(broadcast) - len(shape)) + tuple(shape)
        return cls(None if equal(padded, broadcast) else broadcast, (flat, *tail))

    @classmethod
    def of_mask(cls, shape: Sizes, kept: int, batch: Sizes, tail: Sizes | None = None) -> View | None:
        """`to` for a mask, whose last `kept` dimensions stay (or become `tail`), whose batch may be 1, and which
        may lack the first dimensions."""
        padded = (1,) * (len(batch) + kept - len(shape)) + tuple(shape)
        shared = all(holds(n == 1, False) for n in padded[:-kept])
        return cls.to(padded[:-kept] if shared else batch, padded[-kept:] if tail is None else tail, shape)

    def of(self, x: Tensor) -> Tensor:
        if self.broadcast is not None:
            x = x.expand(self.broadcast)
        return x.reshape(self.shape)

    def of_bits(self, x: Tensor) -> Tensor:
        """`of` for a mask in bits, whose last dimension stays, where the view is that of the bools."""
        broadcast = None if self.broadcast is None else (*self.broadcast[:-1], x.shape[-1])
        return View(broadcast, (*self.shape[:-1], x.shape[-1])).of(x)


def shared_heads(rule: str, a: int, b: int) -> int:
    """Numbers of heads a and b broadcast as torch does; `rule` says in the error what b must be."""
    if holds(a == 1, False):
        return b
    if not fit((b,), (a,)):
        shared = holds(b != 0, True) and holds(a % b == 0, False)
        hint = f" (enable_gqa=True has {a} share {b})" if shared else ""
        raise RuntimeError(f"attnkern: {rule} {a}, got {b}{hint}")
    return a


def broadcast_sizes(rule: str, a: Sizes, b: Sizes) -> Sizes:
    """a and b broadcast as torch does; `rule` says in the error what b must do."""
    rank = max(len(a), len(b))
    sizes = []
    for x, y in zip((1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b), strict=True):
        if not fit((y,), (x,)) and holds(x != 1, False):
            raise RuntimeError(f"attnkern: {rule} {show(a)}, got {show(b)}")
        sizes.append(y if holds(x == 1, False) else x)
    return tuple(sizes)


def fit(sizes: Sizes, full: Sizes) -> bool:
    """Whether sizes, from the last on, are 1 or those of `full`. What depends on data does: kernels look again."""
    return not any(holds(m != 1, False) and holds(m != n, False) for m, n in zip(sizes[::-1], full[::-1], strict=False))


def broadcast(sizes: Sizes, others: Sizes) -> bool:
    """Whether sizes and others, from the last on, are equal or 1, and this is known."""
    pairs = zip(sizes[::-1], others[::-1], strict=False)
    return all(any(holds(x, False) for x in (m == 1, n == 1, m == n)) for m, n in pairs)


def equal(sizes: Sizes, others: Sizes) -> bool:
    """Whether sizes are the others, and this is known."""
    return len(sizes) == len(others) and all(holds(m == n, False) for m, n in zip(sizes, others, strict=True))


def lies(x: Tensor) -> tuple[Sizes, Sizes, bool]:
    """The fields of a `TensorSpec`, without the address, which a fake tensor has none of: storages start at multiples
    of 16 bytes."""
    return x.shape, x.stride(), int(x.storage_offset()) * x.element_size() % 16 == 0


class TensorSpec(NamedTuple):
    """How a tensor (batch, heads, length, size) lies in memory, or key ranges, (batch, heads, length, 1 or 2, 2) of
    which the first three may be 1: what a GPU's plans know of it."""

    shape: Sizes
    stride: Sizes
    aligned: bool  # its address is a multiple of 16 bytes

    @classmethod
    def of(cls, x: Tensor) -> TensorSpec:
        return cls(*lies(x))

    def strides(self) -> Sizes:
        """0 where a dimension has one entry: whatever torch says there means nothing."""
        return tuple(0 if n <= 1 else s for n, s in zip(self.shape, self.stride, strict=True))

    def is_table(self) -> bool:
        """Whether it is a bias by distance (attnkern.relative.as_scores)."""
        return self.stride[2] < 0

    def vectors(self, unit: int) -> bool:
        """Whether 16 bytes, `unit` elements, can be loaded at a time."""
        return self.aligned and all(s % unit == 0 for s in self.strides()[:3])

    def describable(self, unit: int) -> bool:
        """Whether a tensor descriptor can stand for it: as `vectors`, and no dimension is empty or broadcast."""
        steps = zip(self.shape, self.strides(), strict=True)
        return self.vectors(unit) and all(n == 1 or (n > 1 and s > 0) for n, s in steps)

    def padded(self, unit: int) -> TensorSpec:
        """What `padded` makes of it: describable in any case."""
        _, heads, length, size = self.shape
        pitch = -(-size // unit) * unit
        return TensorSpec(self.shape, (heads * length * pitch, length * pitch, pitch, 1), True)

    def like(self, size: int) -> Layout:
        """The layout of a result (B, H, L, size) in this memory order, as ops.py's fakes have it."""
        batch, heads, length, _ = self.shape
        h, m, d = (max(n, 1) for n in (heads, length, size))
        if is_length_major(self.shape, self.stride):
            return Layout((batch, heads, length, size), (m * h * d, d, h * d, 1))
        return Layout((batch, heads, length, size), (h * m * d, m * d, d, 1))


class Layout(NamedTuple):
    shape: Sizes
    stride: Sizes

    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, self.stride, True)
