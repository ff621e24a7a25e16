"""Keys and values in the pages of a pool, as serving keeps them: key j of a sequence is row j % size of page
block_table[sequence, j // size].

W. Kwon et al., "Efficient memory management for large language model serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import show, type_error
from .params import LEAST_PAGE, holds


class Pages(NamedTuple):
    """What a call of `Problem` has in place of keys and values, which are views that have the right sizes alone."""

    key: Tensor  # (pages, Hk, size, E)
    value: Tensor  # (pages, Hv, size, Ev)
    table: Tensor  # int32 (B, pages of a sequence)

    def views(self) -> tuple[Tensor, Tensor]:
        """(B, Hk, S, E) and (B, Hv, S, Ev) of the pool's memory, for S = pages of a sequence * size; not to be read."""
        batch, each = self.table.shape
        return tuple(x[:1, :, :1].expand(batch, -1, each * x.shape[2], -1) for x in (self.key, self.value))  # type: ignore[return-value]

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hk, S, E) and (B, Hv, S, Ev). A number that isn't one of a page counts as 0."""
        count = self.key.shape[0]
        table = torch.where((self.table >= 0) & (self.table < count), self.table, 0)
        return tuple(x[table].transpose(1, 2).flatten(2, 3) for x in (self.key, self.value))  # type: ignore[return-value]


def is_page_size(rows: int) -> bool:
    """Whether pages may have so many rows."""
    return rows >= LEAST_PAGE and rows & (rows - 1) == 0


def pages_of(query: Any, key: Any, value: Any, block_table: Any) -> Pages:
    """The arguments of a call with a block_table. Raises where they make no pages."""
    for name, x in (("query", query), ("key", key), ("value", value), ("block_table", block_table)):
        if not isinstance(x, Tensor):
            raise type_error(name, "Tensor", x)
        if x.is_nested:
            raise ValueError(f"attnkern: {name} must be dense beside a block_table, got a nested tensor")
    for name, x in (("key", key), ("value", value)):
        if x.dim() != 4:
            raise RuntimeError(
                f"attnkern: {name} must have the shape (pages, heads, rows of a page, size) beside a block_table, got "
                f"{show(x.shape)}"
            )
    if query.dim() != 4:
        raise RuntimeError(f"attnkern: query must be (B, Hq, L, E) beside a block_table, got {show(query.shape)}")
    count, _, size, _ = key.shape
    if holds(value.shape[0] != count, False) or holds(value.shape[2] != size, False):
        raise RuntimeError(
            f"attnkern: value must have key's {count} pages of {size} rows, got {value.shape[0]} of {value.shape[2]}"
        )
    if not is_page_size(size):
        raise RuntimeError(
            f"attnkern: the rows of a page (key's dimension 2) must be a power of two from {LEAST_PAGE} on, got {size}"
        )
    if block_table.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"attnkern: block_table must be int32 or int64, got {show(block_table.dtype)}")
    if block_table.dim() != 2 or holds(block_table.shape[0] != query.shape[0], False):
        raise RuntimeError(
            f"attnkern: block_table must have the shape ({query.shape[0]}, pages of a sequence), got "
            f"{show(block_table.shape)}"
        )
    if block_table.device != query.device:
        raise RuntimeError(f"attnkern: block_table must be on query's device {query.device}, got {block_table.device}")
    if holds(count == 0, False) and holds(block_table.shape[1] > 0, False):
        raise RuntimeError("attnkern: key must have a page or more beside a block_table that isn't empty, got none")
    check_no_gradient(query=query, key=key, value=value)
    if block_table.dtype == torch.int64:
        block_table = block_table.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    return Pages(key, value, block_table if block_table.stride(1) == 1 else block_table.contiguous())


def check_no_gradient(**given: Any) -> None:
    """Raises where an argument beside a block_table requires a gradient."""
    names = [name for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad]
    if names and torch.is_grad_enabled():
        raise RuntimeError(
            f"attnkern: keys and values in pages have no gradient, and {' and '.join(names)} "
            f"require{'s' if len(names) == 1 else ''} one: call it under torch.no_grad()"
        )


def check_table(pages: Pages, used: Tensor | None) -> None:
    """Raises for a number that isn't one of a page where keys are attended to: those of `used`, bool, to be broadcast
    to (B, Hq, L, S); None: all. It waits for the device."""
    (_, each), (count, _, size, _) = pages.table.shape, pages.key.shape
    bad = (pages.table < 0) | (pages.table >= count)
    if used is not None:
        bad = bad & used.expand(-1, -1, -1, each * size).unflatten(-1, (each, size)).any(-1).flatten(1, 2).any(1)
    if found := bad.nonzero()[:1].tolist():
        sequence, i = found[0]
        raise RuntimeError(
            f"attnkern: block_table must hold numbers of pages from 0 to {count - 1} wherever key_ranges, is_causal "
            f"and window leave keys, got {int(pages.table[sequence, i])} at [{sequence}, {i}]"
        )
