"""Sizes of dimensions: which fit together, and the views that bring tensors to 4-D. They may be symbolic."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .arguments import show
from .params import holds

Sizes = tuple[int, ...]


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
