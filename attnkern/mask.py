"""`Mask`: what a mask is once it has been looked at. At most two ranges of keys per query, or else bits.

`attnkern.masks` makes them. Intervals of keys per row as a description of masks: G. Wang et al., "FlashMask",
ICLR 2025; a map of skipped, partial and full blocks: J. Dong et al., "Flex Attention", 2024.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from .arguments import check_not_traced
from .bits import WORD, bools
from .params import within_ranges
from .shapes import broadcast

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCK = WORD
"""Rows and keys of a block of `Mask.blocks`, and keys of a word of `Mask.bits`."""
SKIPPED, PARTIAL, FULL = 0, 1, 2
"""What a block is: no score in it counts, some do, all do."""

_TILE = 2**20
"""Scores that are held at a time, as bools and a few times over, while a mask is made or combined."""
_MAX_DRAWN = 64
_COLOURS = {"skipped": "#f2f2f2", "partial": "#9ecae1", "full": "#2171b5"}  # in the order of the three numbers


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Which keys each query attends to: made once by `attnkern.masks`, and used in any number of calls.

    Attributes:
        ranges: int32 (B|1, Hq|1, L|1, 1|2, 2), contiguous. Query i attends to key j iff begin <= j < end for one of its
            ranges (begin, end). 0 <= begin <= end <= S; two ranges don't overlap or touch, and the first is the left
            one. A range that is not needed is empty, and stands where the one before it ends. None: `bits` it is.
        bits: int64 (B|1, Hq|1, L|1, ceil(S / 64)), contiguous: bit j % 64 of word j // 64 is set iff key j is attended
            to. Those beyond S are 0. None: `ranges` it is.
        blocks: uint8 (B|1, Hq|1, ceil(L / 64), ceil(S / 64)), beside `bits`: of 64 queries and 64 keys, 0 where no
            score counts, 1 where some do, 2 where all do.
        seqlen_q, seqlen_k: L and S.

    A dimension of size 1 is the same for all. A Mask can't be changed. It is a pytree node (its tensors are the leaves,
    L and S belong to the structure), so that torch.compile, torch.export and checkpointing take it as an argument.
    torch.load takes it, and a DataLoader's default_collate makes one of a batch of them, sample after sample.

    `&`, `|` and `~` are exact. The result is ranges where two per row suffice, and bits otherwise. Of ranges they take
    time and memory for L rows, not L * S. Whether two suffice is seen from the data, for which a GPU is waited, and
    which no graph holds; not so for `&`, `|` and `~` of masks with one range per row, whose results have at most two.
    Dynamo doesn't trace `~`, which ends a graph where it stands. Masks of other sizes or devices: RuntimeError.
    """

    ranges: Tensor | None
    bits: Tensor | None
    blocks: Tensor | None
    seqlen_q: int
    seqlen_k: int

    @classmethod
    def of_ranges(cls, ranges: Tensor, seqlen_q: int, seqlen_k: int) -> Mask:
        """The union of any n >= 1 ranges per row, (B|1, Hq|1, L|1, n, 2) of int32 or int64, in any order; one whose end
        is not above its begin is empty. Ends are clamped to 0 and S. Looks at the data if n > 2."""
        ranges = union_of_ranges(ranges, seqlen_k)
        if ranges.shape[-2] > 2:
            keys = slice(0, seqlen_k)
            return cls._packed(lambda rows: within_ranges(_rows_of(ranges, rows), keys), ranges, seqlen_q, seqlen_k)
        return cls(ranges.to(torch.int32).contiguous(), None, None, seqlen_q, seqlen_k)

    @classmethod
    def of_tiles(cls, tile: Callable[[slice], Tensor], like: Tensor, seqlen_q: int, seqlen_k: int) -> Mask:
        """The mask whose `rows` are `tile(rows)`, bool, to be broadcast to (B|1, Hq|1, rows, S).

        `like` is any tensor whose first sizes are (B|1, Hq|1, L|1) and that has the device. Tiles are made from the
        first row to the last, twice if they come to bits, with _TILE scores at a time (but at least one row).
        Dimensions in which all is the same become 1.
        """
        check_not_traced(like)
        edges = torch.full((*like.shape[:3], 2, 2), seqlen_k, device=like.device)
        for rows in _tiles(like, seqlen_k):
            found = _runs(tile(rows).expand(*like.shape[:2], -1, seqlen_k))
            if found is None:
                return cls._packed(tile, like, seqlen_q, seqlen_k)
            edges[:, :, rows] = found
        most = 2 if bool((edges[..., 1, 0] < seqlen_k).any()) else 1
        return cls.of_ranges(_collapsed(edges[..., :most, :]), seqlen_q, seqlen_k)

    @classmethod
    def _packed(cls, tile: Callable[[slice], Tensor], like: Tensor, seqlen_q: int, seqlen_k: int) -> Mask:
        """`of_tiles`, by bits."""
        words = math.ceil(seqlen_k / BLOCK)
        bits = torch.empty((*like.shape[:3], words), dtype=torch.int64, device=like.device)
        weights = 2 ** torch.arange(8, dtype=torch.uint8, device=like.device)
        for rows in _tiles(like, seqlen_k):
            octets = F.pad(tile(rows).expand(*like.shape[:2], -1, seqlen_k), (0, words * BLOCK - seqlen_k))
            octets = octets.contiguous().view(torch.uint8).unflatten(-1, (-1, 8))
            bits[:, :, rows] = (octets * weights).sum(-1, dtype=torch.uint8).view(torch.int64)
        bits = _collapsed(bits).contiguous()

        whole = torch.full((words,), -1, device=bits.device)
        if tail := seqlen_k % BLOCK:
            whole[-1] = 2**tail - 1
        n = bits.shape[2]
        lives, lacks = (
            F.pad(x, (0, 0, 0, -n % BLOCK)).unflatten(2, (-1, BLOCK)).any(3) for x in (bits != 0, bits != whole)
        )
        blocks = lives.to(torch.uint8) * (FULL - lacks.to(torch.uint8))
        if n == 1:
            blocks = blocks.expand(-1, -1, math.ceil(seqlen_q / BLOCK), -1)
        return cls(None, bits, blocks.contiguous(), seqlen_q, seqlen_k)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B|1, Hq|1, L, S)."""
        batch, heads = self._stored.shape[:2]
        return batch, heads, self.seqlen_q, self.seqlen_k

    @property
    def device(self) -> torch.device:
        return self._stored.device

    def to(self, device: torch.device | str | int) -> Mask:
        """This mask on another device. Raises TypeError for what is none: a Mask has no dtype to change."""
        if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
            raise TypeError(
                f"attnkern: argument 'device' must be torch.device, str or int, not {type(device).__name__}"
            )
        return pytree.tree_map(lambda x: x.to(device), self)

    def to_dense(self) -> Tensor:
        """bool (B|1, Hq|1, L, S), True = attend; not to be written to, since rows may share memory."""
        return self._rows(slice(None)).expand(self.shape)

    @property
    def octets(self) -> Tensor:
        """`bits` as operators take them: uint8 (B|1, Hq|1, L|1, 8 * ceil(S / 64))."""
        if torch._C._are_functorch_transforms_active():  # torch 2.11 has no vmap of a view(dtype)
            places = torch.arange(0, 64, 8, device=self._stored.device)
            return (self._stored.unsqueeze(-1) >> places).to(torch.uint8).flatten(-2)
        return self._stored.contiguous().view(torch.uint8)

    def as_arguments(self, index: tuple[int, ...], key_ranges: Any) -> tuple[Tensor | None, Tensor | None]:
        """attn_mask and key_ranges that say the same as the mask, at an index of its first dimensions, and key_ranges.

        Bits as `octets`. Of ranges, ranges where two per row suffice without a look at data, else the mask as bools. So
        it is beside key_ranges that aren't what they must be, which is said later."""
        if self.ranges is None:
            return self.octets[index], key_ranges
        ranges = self.ranges[index]
        if key_ranges is None:
            return None, ranges
        if (
            type(key_ranges) is Tensor
            and key_ranges.dim() >= 2
            and key_ranges.shape[-1] == 2
            and key_ranges.shape[-2] * ranges.shape[-2] <= 2
            and key_ranges.dtype in (torch.int32, torch.int64)
            and key_ranges.device == ranges.device
            and broadcast(key_ranges.shape[:-2], ranges.shape[:-2])
        ):
            return None, intersection_of_ranges(ranges, key_ranges)
        return self.to_dense()[index], key_ranges

    @property
    def live(self) -> Tensor:
        """How many of the B|1 * Hq|1 * L * S scores count: int64, on the mask's device, which is not waited for."""
        counts = self.live_of_queries
        return counts.sum() * (self.seqlen_q if counts.shape[2] == 1 else 1)

    @property
    def live_of_queries(self) -> Tensor:
        """How many keys each query attends to: int64 (B|1, Hq|1, L|1)."""
        if self.ranges is not None:
            return (self.ranges[..., 1] - self.ranges[..., 0]).sum(-1)
        # Sums of 2, 4 and 8 bits within each word; the product's highest byte is the sum of all bytes.
        x = self._stored
        x = x - ((x >> 1) & 0x5555555555555555)
        x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
        return ((((x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F) * 0x0101010101010101) >> 56).sum(-1)

    @property
    def sparsity(self) -> float:
        """The share of scores that are excluded, from 0 to 1. Waits for the device."""
        scores = math.prod(self.shape)
        return 1 - int(self.live) / scores if scores else 0.0

    def plot(
        self, batch: int = 0, head: int = 0, *, block: int | None = None, title: str | None = None, ax: Any = None
    ) -> Axes:
        """A picture of the blocks that attention skips, masks in part and computes in full.

        Args:
            batch, head: which of the B and of the Hq; any where they are all the same.
            block: rows and keys of a block; None: the least that makes at most 64 of them.
            title: over the picture. ax: matplotlib Axes to draw into; None makes a figure.

        Returns:
            The matplotlib Axes; `axes.figure.savefig("mask.png")` keeps the picture.

        Raises:
            ImportError: matplotlib is missing. IndexError: no such batch or head. ValueError: the mask is empty, or
            block < 1.
        """
        longest = max(self.seqlen_q, self.seqlen_k)
        if block is None:
            block = math.ceil(longest / _MAX_DRAWN)
        elif block < 1:
            raise ValueError(f"attnkern: block must be >= 1, got {block}")
        if 0 in self.shape:
            raise ValueError(f"attnkern: a mask to be drawn must not be empty, got {self}")
        try:
            import matplotlib.pyplot as plt
            from matplotlib.colors import ListedColormap
            from matplotlib.patches import Patch
        except ImportError:
            raise ImportError('attnkern: Mask.plot needs matplotlib: pip install "attnkern[plot]"') from None

        of_one = [0 if n == 1 else i for n, i in zip(self.shape, (batch, head), strict=False)]
        one = pytree.tree_map(lambda x: x[of_one[0], of_one[1]][None, None], self)
        kinds = []
        for at in range(0, self.seqlen_q, block):
            tile = one._rows(slice(at, at + block))[0, 0]
            lives, fills = (
                F.pad(x, (0, -self.seqlen_k % block), value=by_default).unflatten(0, (-1, block))
                for x, by_default in ((tile.any(0), False), (tile.all(0), True))
            )
            kinds.append(lives.any(-1).int() + fills.all(-1).int())
        image = torch.stack(kinds).cpu()

        if ax is None:
            _, ax = plt.subplots(figsize=(5.0, 4.2), layout="constrained")
        colours = ListedColormap(list(_COLOURS.values()))
        down, across = (n * block for n in image.shape)
        ax.imshow(image.numpy(), cmap=colours, vmin=SKIPPED, vmax=FULL, extent=(0, across, down, 0), aspect="auto")
        ax.set(xlim=(0, self.seqlen_k), ylim=(self.seqlen_q, 0), xlabel="key", ylabel="query", title=title or "")
        patches = [Patch(facecolor=colour, edgecolor="grey", label=name) for name, colour in _COLOURS.items()]
        ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return ax

    def __and__(self, other: Mask) -> Mask:
        _check_is_mask(other)
        like = self._like(other)
        if self.ranges is None or other.ranges is None:
            return Mask.of_tiles(lambda rows: self._rows(rows) & other._rows(rows), like, self.seqlen_q, self.seqlen_k)
        return Mask.of_ranges(intersection_of_ranges(self.ranges, other.ranges), self.seqlen_q, self.seqlen_k)

    def __or__(self, other: Mask) -> Mask:
        _check_is_mask(other)
        like = self._like(other)
        if self.ranges is None or other.ranges is None:
            return Mask.of_tiles(lambda rows: self._rows(rows) | other._rows(rows), like, self.seqlen_q, self.seqlen_k)
        both = [x.expand(*like.shape[:3], -1, -1) for x in (self.ranges, other.ranges)]
        return Mask.of_ranges(torch.cat(both, -2), self.seqlen_q, self.seqlen_k)

    def __rand__(self, other: object) -> Mask:
        raise _no_mask(other)

    __ror__ = __rand__

    def __getitem__(self, index: object) -> Mask:
        raise TypeError(
            "attnkern: a Mask can't be indexed: index its ranges, and give them to masks.from_ranges, or its to_dense()"
        )

    def __invert__(self) -> Mask:
        if self.ranges is None:
            return Mask.of_tiles(lambda rows: ~self._rows(rows), self._stored, self.seqlen_q, self.seqlen_k)
        begin, end = self.ranges.unbind(-1)
        gaps = torch.stack([F.pad(end, (1, 0)), F.pad(begin, (0, 1), value=self.seqlen_k)], -1)
        return Mask.of_ranges(gaps, self.seqlen_q, self.seqlen_k)

    def __bool__(self) -> bool:
        raise TypeError(
            "attnkern: a Mask is neither true nor false; masks are combined by &, | and ~, not by and, or, not"
        )

    def __repr__(self) -> str:
        n = sum(x.nbytes for x in (self.ranges, self.bits, self.blocks) if x is not None)
        kind = "bits" if self.ranges is None else ("one range", "two ranges")[self.ranges.shape[3] - 1] + " per row"
        return f"Mask({', '.join(map(str, self.shape))}: {kind}, {n:,} bytes, {self.device})"

    @property
    def _stored(self) -> Tensor:
        stored, name, dtype = (
            (self.bits, "bits", torch.int64) if self.ranges is None else (self.ranges, "ranges", torch.int32)
        )
        if stored is None:
            raise TypeError("attnkern: a Mask must have ranges or bits, got neither (attnkern.masks makes Masks)")
        if stored.dtype != dtype:  # mapped over as a pytree: converted, they would be another mask
            raise RuntimeError(f"attnkern: the {name} of a Mask must be {dtype}, got {stored.dtype}")
        return stored

    def _rows(self, rows: slice) -> Tensor:
        """bool (B|1, Hq|1, rows|1, S) of some rows."""
        stored = _rows_of(self._stored, rows)
        if self.ranges is not None:
            return within_ranges(stored, slice(0, self.seqlen_k))
        return bools(stored.contiguous().view(torch.uint8), self.seqlen_k)

    def _like(self, other: Mask) -> Tensor:
        """A tensor of the first three sizes of this mask and another together, without memory of its own."""
        mine, theirs = self._stored, other._stored
        fits = all(1 in (a, b) or a == b for a, b in zip(mine.shape[:2], theirs.shape[:2], strict=True))
        if not fits or self.shape[2:] != other.shape[2:] or mine.device != theirs.device:
            raise RuntimeError(f"attnkern: masks to be combined must be of one size and device, got {self} and {other}")
        return mine.new_empty(()).expand(torch.broadcast_shapes(mine.shape[:3], theirs.shape[:3]))


def _check_is_mask(x: object) -> None:
    if not isinstance(x, Mask):
        raise _no_mask(x)


def _no_mask(x: object) -> TypeError:
    hint = " (masks.from_bool makes one of a bool tensor)" if isinstance(x, Tensor) else ""
    return TypeError(f"attnkern: a Mask must be combined with a Mask, not {type(x).__name__}{hint}")


def check_sizes(mask: Mask, *tensors: Tensor) -> None:
    """Raises where a Mask has other numbers of sequences or heads than query, key and value (B, H, ..., size)."""
    for what, n, dim in (("sequences", mask.shape[0], 4), ("heads", mask.shape[1], 3)):
        sizes = [x.shape[-dim] for x in tensors if x.dim() >= dim]
        if n != 1 and n not in sizes:
            raise RuntimeError(
                f"attnkern: attn_mask is a Mask of {n} {what}, query, key and value have {max(sizes, default=1)}"
            )


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The mask of two dense masks together: each bool (True = attended) or floating point (added)."""
    if a is None or b is None:
        return b if a is None else a
    if b.dtype == torch.bool:
        return a & b if a.dtype == torch.bool else a.masked_fill(~b, -math.inf)
    return b.masked_fill(~a, -math.inf) if a.dtype == torch.bool else a + b


def intersection_of_ranges(these: Tensor, those: Tensor) -> Tensor:
    """(..., n * m, 2) of (..., n, 2) and (..., m, 2): every range with every other. One may end before it begins."""
    mine, theirs = these.unsqueeze(-2), those.unsqueeze(-3)
    begin, end = mine[..., 0].maximum(theirs[..., 0]), mine[..., 1].minimum(theirs[..., 1])
    return torch.stack([begin, end], -1).flatten(-3, -2)


def union_of_ranges(ranges: Tensor, seqlen_k: int) -> Tensor:
    """(..., m, 2): the union of the n ranges (..., n, 2) of each row, as ranges that don't overlap or touch.

    They go from left to right, the empty ones last. m is n where n <= 2. Else it is the most that a row needs, and at
    least 1, which is seen from the data.
    """
    ranges = ranges.clamp(0, seqlen_k)
    begin, end = ranges.unbind(-1)
    if ranges.shape[-2] == 1:
        return torch.stack([begin, end.maximum(begin)], -1)
    check_not_traced()
    # Empty ones go to the right end, so that they come last.
    begin, end = (x.where(begin < end, seqlen_k) for x in (begin, end))
    order = begin.argsort(-1)
    begin, reach = begin.gather(-1, order), end.gather(-1, order).cummax(-1).values
    # A range that begins beyond all before it opens a merged one; the one before it closes another.
    opens = F.pad(begin[..., 1:] > reach[..., :-1], (1, 0), value=True)
    closes = F.pad(opens[..., 1:], (0, 1), value=True)
    begin = begin.where(opens, seqlen_k).sort(-1).values
    end = reach.where(closes, seqlen_k).sort(-1).values
    live = begin < end
    end = end.where(live, 0).cummax(-1).values
    merged = torch.stack([begin.where(live, end), end], -1)
    if ranges.shape[-2] == 2:
        return merged
    check_not_traced(live)
    most = int(live.flatten(0, -2).any(0).sum())
    return merged[..., : max(1, most), :]


def span(keys: Tensor) -> tuple[Tensor, Tensor]:
    """From the first True of a bool (..., S) to behind the last, (...) int64 each; 0 and 0 where there is none."""
    seqlen_k = keys.shape[-1]
    if seqlen_k == 0:
        begin = keys.sum(-1)
        return begin, begin
    found = keys.to(torch.uint8)
    begin, end = found.argmax(-1), seqlen_k - found.flip(-1).argmax(-1)
    return begin, end.where(keys.any(-1), 0)


def _rows_of(x: Tensor, rows: slice) -> Tensor:
    return x if x.shape[2] == 1 else x[:, :, rows]


def _tiles(like: Tensor, seqlen_k: int) -> list[slice]:
    batch, heads, n = like.shape[:3]
    step = max(1, _TILE // max(1, batch * heads * seqlen_k))
    return [slice(at, min(at + step, n)) for at in range(0, n, step)]


def _runs(tile: Tensor) -> Tensor | None:
    """The runs of True of a bool (..., S), int64 (..., 2, 2), S where there is none; None: a row has more than two."""
    padded = F.pad(tile, (1, 1))
    changes = (padded[..., 1:] != padded[..., :-1]).flatten(0, -2)
    counts = changes.sum(-1)
    if bool((counts > 4).any()):
        return None
    row, key = changes.nonzero(as_tuple=True)
    edges = torch.full((changes.shape[0], 4), tile.shape[-1], device=tile.device)
    edges[row, torch.arange(len(row), device=tile.device) - (counts.cumsum(0) - counts)[row]] = key
    return edges.view(*tile.shape[:-1], 2, 2)


def _collapsed(x: Tensor) -> Tensor:
    """Batch, heads and rows of size 1 where all of them are equal."""
    for dim in range(3):
        first = x.narrow(dim, 0, 1) if x.shape[dim] > 1 else x
        if x.shape[dim] > 1 and bool((x == first).all()):
            x = first
    return x


def _flatten(mask: Mask) -> tuple[list[Any], tuple[int, int]]:
    leaves = [mask.bits, mask.blocks] if mask.ranges is None else [mask.ranges]
    return leaves, (mask.seqlen_q, mask.seqlen_k)


def _flatten_with_keys(mask: Mask) -> tuple[list[tuple[Any, Any]], tuple[int, int]]:
    leaves, sizes = _flatten(mask)
    names = ("bits", "blocks") if mask.ranges is None else ("ranges",)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], sizes


def _unflatten(leaves: Any, sizes: Any) -> Mask:
    first, *blocks = leaves
    return Mask(None, first, blocks[0], *sizes) if blocks else Mask(first, None, None, *sizes)


pytree.register_pytree_node(
    Mask,
    _flatten,
    _unflatten,
    serialized_type_name="attnkern.Mask",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
# torch.load takes what holds one, by default (weights_only=True) and so in torch.export.load.
torch.serialization.add_safe_globals([Mask])


def _collated(samples: Sequence[Mask], *, collate_fn_map: Any = None) -> Mask:
    """The mask of a batch, of its samples' masks one after the other: what a DataLoader makes of them."""
    first, batch = samples[0], sum(mask.shape[0] for mask in samples)
    for mask in samples[1:]:
        first._like(mask)  # raises where they don't go together
    heads, rows = (max(mask._stored.shape[dim] for mask in samples) for dim in (1, 2))
    if all(mask.ranges is not None for mask in samples):
        n = max(mask._stored.shape[3] for mask in samples)
        ranges = (F.pad(mask._stored, (0, 0, 0, n - mask._stored.shape[3])) for mask in samples)
        together = torch.cat([x.expand(-1, heads, rows, -1, -1) for x in ranges])
        return Mask.of_ranges(together, first.seqlen_q, first.seqlen_k)

    def tile(part: slice) -> Tensor:
        length = min(rows, part.stop - part.start)
        return torch.cat([mask._rows(part).expand(-1, heads, length, -1) for mask in samples])

    like = first._stored.new_empty(()).expand(batch, heads, rows)
    return Mask.of_tiles(tile, like, first.seqlen_q, first.seqlen_k)


default_collate_fn_map[Mask] = _collated
