"""How ranks share a sequence under a mask: the tokens that each holds, the keys that it needs, the calls that it makes.

All of it is decided once per mask, on the host. `distributed` has the attention that follows it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..arguments import type_error
from ..mask import BLOCK, Mask, union_of_ranges

Run = tuple[int, int]
"""Tokens that stand together: the first, and the one after the last."""
Shards = Sequence[Sequence[Run]]
"""Of each rank the runs of tokens that it holds, in the order in which it holds them."""

_MOST_CHUNKS = 16  # of a rank
_BALANCED = 1.05  # the largest share of live scores over the mean one that is good enough
_ALIGNED = 64  # queries of a tile: chunks of at least 16 of them begin where a tile does
_GAP = 64  # so few keys between two needed ones travel with them


def even_shards(seqlen: int, ranks: int) -> Shards:
    """Each rank gets one run of tokens, as many as the others or one more. Raises TypeError, ValueError."""
    _check_count("seqlen", seqlen, 0)
    _check_count("ranks", ranks, 1)
    return _shards(_edges(seqlen, ranks), [[rank] for rank in range(ranks)])


def balanced_shards(mask: Mask, ranks: int, chunks: int | None = None) -> Shards:
    """Which tokens each rank shall hold: equally many, that make equally many live scores.

    The sequence is cut into ranks * chunks chunks of about equal length. Each rank gets `chunks` of them, the heaviest
    first, always the rank with the fewest live scores so far; then chunks are swapped while that lightens the heaviest
    rank. Of a causal mask and 2 chunks this makes zig-zag.

    Args:
        mask: of L queries. Its live scores are counted, which waits for the device.
        ranks: how many.
        chunks: how many for each rank; None: the fewest of 1, 2, 4, 8 and 16 whose heaviest rank has at most 1.05 times
            the mean, or else the best of them. More chunks balance better, and let each rank need more others' keys.

    Returns:
        Of each rank its runs of queries, from left to right.

    Raises:
        TypeError: arguments of the wrong type. ValueError: ranks or chunks below 1.

    Source: R. Graham, "Bounds on multiprocessing timing anomalies", 1969, of the order; zig-zag: Z. Zhu,
    ring-flash-attention, 2024.
    """
    _check_mask(mask)
    _check_count("ranks", ranks, 1)
    if chunks is not None:
        _check_count("chunks", chunks, 1)
    totals = [0, *_live_of_queries(mask).cumsum(0).tolist()]
    best, least = None, math.inf
    for each in [2**n for n in range(_MOST_CHUNKS.bit_length())] if chunks is None else [chunks]:
        if best is not None and ranks * each > mask.seqlen_q:
            break
        edges = _edges(mask.seqlen_q, ranks * each)
        shares = [totals[end] - totals[begin] for begin, end in itertools.pairwise(edges)]
        assigned = [[rank] for rank in range(ranks)] if each == 1 else _assigned(shares, ranks, each)
        heaviest = max(sum(shares[n] for n in own) for own in assigned)
        if heaviest < least:
            best, least = _shards(edges, assigned), heaviest
        if heaviest * ranks <= _BALANCED * totals[-1]:
            break
    assert best is not None
    return best


def live_scores(mask: Mask, shards: Shards) -> list[int]:
    """How many scores count among the queries of each rank, over all batch elements and heads that the mask tells
    apart. Waits for the device."""
    totals = [0, *_live_of_queries(mask).cumsum(0).tolist()]
    return [sum(totals[end] - totals[begin] for begin, end in runs) for runs in shards]


def _live_of_queries(mask: Mask) -> Tensor:
    return mask.live_of_queries.sum((0, 1)).expand(mask.seqlen_q).cpu()


def _edges(seqlen: int, chunks: int) -> list[int]:
    unit = _ALIGNED if seqlen >= 16 * _ALIGNED * chunks else 1
    return [min(seqlen, round(seqlen * n / chunks / unit) * unit) for n in range(chunks)] + [seqlen]


def _assigned(shares: list[int], ranks: int, each: int) -> list[list[int]]:
    """Of every rank `each` chunks, so that the sums of their shares differ little."""
    own: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for n in sorted(range(len(shares)), key=lambda n: -shares[n]):
        rank = min((r for r in range(ranks) if len(own[r]) < each), key=lambda r: sums[r])
        own[rank].append(n)
        sums[rank] += shares[n]
    for _ in range(len(shares)):
        heaviest = max(range(ranks), key=lambda r: sums[r])
        # The swap that leaves the larger of the two sums least.
        swaps = (
            (max(sums[heaviest] - shares[a] + shares[b], sums[r] + shares[a] - shares[b]), r, i, j)
            for r in range(ranks)
            for i, a in enumerate(own[heaviest])
            for j, b in enumerate(own[r])
            if shares[a] > shares[b]
        )
        larger, r, i, j = min(swaps, default=(sums[heaviest], 0, 0, 0))
        if larger >= sums[heaviest]:
            break
        moved = shares[own[heaviest][i]] - shares[own[r][j]]
        own[heaviest][i], own[r][j] = own[r][j], own[heaviest][i]
        sums[heaviest] -= moved
        sums[r] += moved
    return sorted(sorted(chunks) for chunks in own)


def _shards(edges: list[int], assigned: list[list[int]]) -> Shards:
    """The runs of chunks; those that touch become one."""
    return tuple(_joined([(edges[n], edges[n + 1]) for n in chunks], 0) for chunks in assigned)


def _joined(runs: Iterable[Run], gap: int) -> tuple[Run, ...]:
    """Runs, from left to right, with so small gaps between them closed, and without the empty ones."""
    joined: list[Run] = []
    for begin, end in runs:
        if joined and begin - joined[-1][1] <= gap:
            joined[-1] = joined[-1][0], end
        elif begin < end:
            joined.append((begin, end))
    return tuple(joined)


class Part(NamedTuple):
    """One call: some of the own queries over some of the keys that have come from a rank."""

    rows: slice
    keys: slice
    mask: Mask | None  # None: all of these scores count


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedMask:
    """A mask and how the ranks of a process group share its queries and keys: made once by `shard_mask`.

    Attributes:
        mask: the whole one.
        group: the process group.
        queries, keys: of each rank the runs of tokens that it holds, in its order.
        needed: needed[reader][owner], the runs of the owner's keys that travel to the reader: all that its queries
            attend to, and little else. Where there are none, nothing is sent.
        parts: of each owner, the calls that this rank makes with its keys.
    """

    mask: Mask
    group: Any
    queries: Shards
    keys: Shards
    needed: tuple[tuple[tuple[Run, ...], ...], ...]
    parts: tuple[tuple[Part, ...], ...]

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def shard(self, x: Tensor, dim: int, keys: bool = False) -> Tensor:
        """This rank's tokens of x, whose dimension `dim` is the whole sequence of queries (or of keys). Differentiable.
        Raises RuntimeError where it has another length, IndexError where there is no such dimension."""
        shards, length = (self.keys, self.mask.seqlen_k) if keys else (self.queries, self.mask.seqlen_q)
        check_dim("x", x, "dim", dim)
        if x.shape[dim] != length:
            raise RuntimeError(
                f"attnkern: x must have {length} {'keys' if keys else 'queries'} in dimension {dim}, as the mask, "
                f"got {tuple(x.shape)}"
            )
        return taken(x, shards[self.rank], dim)

    def unshard(self, x: Tensor, dim: int, keys: bool = False) -> Tensor:
        """The whole of the ranks' x, whose dimension `dim` is tokens as `shard` gives them. All ranks must call it; not
        differentiable. Raises RuntimeError where it has another length."""
        shards = self.keys if keys else self.queries
        counts = [length_of(runs) for runs in shards]
        check_dim("x", x, "dim", dim)
        if x.shape[dim] != counts[self.rank]:
            raise RuntimeError(
                f"attnkern: x must have {counts[self.rank]} tokens in dimension {dim} on rank {self.rank}, "
                f"got {tuple(x.shape)}"
            )
        x = x.detach().movedim(dim, 0)
        padded = x.new_zeros(max(counts), *x.shape[1:])  # an all-gather is of equal sizes
        padded[: len(x)] = x
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, self.group)
        gathered = torch.cat([part[:n] for part, n in zip(received, counts, strict=True)])
        return in_order(gathered, shards, 0).movedim(0, dim)

    def __repr__(self) -> str:
        share, mean = max(live := live_scores(self.mask, self.queries)), sum(live) / len(live)
        balance = f"{share / mean:.2f} of the mean at most" if mean else "none"
        return f"ShardedMask({self.mask!r}, {len(live)} ranks, live scores: {balance})"


def shard_mask(mask: Mask, group: Any = None, shards: Shards | None = None) -> ShardedMask:
    """Cuts a mask for the ranks of a process group, once for all layers: every rank must call it, with the same mask.

    It looks at the mask's data and compares its SHA-256 over the ranks. `sharded_attention` does neither.

    Args:
        mask: a Mask (`masks.causal`, `document`, `packed`, `from_ranges` of key_ranges, ...), on the device of the
            queries, which the group must serve.
        group: a process group; None: all processes.
        shards: of each rank the runs (begin, end) of tokens that it shall hold; None: `balanced_shards`. Keys are held
            as queries are where there are as many, and else evenly.

    Returns:
        What `sharded_attention` and `context_parallel` take as attn_mask.

    Raises:
        TypeError: mask is no Mask. ValueError: shards don't hold every token once, for each rank of the group.
        RuntimeError: torch.distributed is not initialised, the process isn't in the group, or its ranks have brought
        different masks or shards.
    """
    _check_mask(mask)
    check_initialised("shard_mask")
    group = dist.group.WORLD if group is None else group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise RuntimeError("attnkern: shard_mask needs a group that this process is in")
    queries = balanced_shards(mask, size) if shards is None else _checked_shards(shards, mask.seqlen_q, size)
    keys = queries if mask.seqlen_k == mask.seqlen_q else even_shards(mask.seqlen_k, size)
    _check_same(mask, queries, group)

    of_ranks = [_of_queries(mask, runs) for runs in queries]
    needed = tuple(tuple(_needed(of_rank, runs) for runs in keys) for of_rank in map(_attended, of_ranks))
    parts = tuple(tuple(_parts(of_ranks[rank], runs)) for runs in needed[rank])
    return ShardedMask(mask, group, queries, keys, needed, parts)


def _of_queries(mask: Mask, runs: Sequence[Run]) -> Mask:
    """The mask of some queries. (Bits of some have no map of blocks.)"""
    count = length_of(runs)
    if count == mask.seqlen_q and len(runs) == 1:
        return mask
    if mask._stored.shape[2] == 1:
        return dataclasses.replace(mask, seqlen_q=count)
    ranges, bits = (None if x is None else taken(x, runs, 2).contiguous() for x in (mask.ranges, mask.bits))
    return Mask(ranges, bits, None, count, mask.seqlen_k)


def _attended(mask: Mask) -> Tensor:
    """bool (S,) on the CPU: the keys that some query attends to (of bits: or one of the same word)."""
    if mask.ranges is None:
        assert mask.bits is not None
        return (mask.bits != 0).flatten(0, 2).any(0).repeat_interleave(BLOCK)[: mask.seqlen_k].cpu()
    begin, end = mask.ranges.flatten(0, -2).unbind(-1)
    ones = torch.ones_like(begin, dtype=torch.int64)
    covering = ones.new_zeros(mask.seqlen_k + 1).index_add_(0, begin, ones).index_add_(0, end, -ones)
    return (covering.cumsum(0)[:-1] > 0).cpu()


def _needed(attended: Tensor, runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs of an owner's keys that are attended to."""
    needed: list[Run] = []
    for begin, end in runs:
        inside = F.pad(attended[begin:end], (1, 1))
        changes = ((inside[1:] != inside[:-1]).nonzero().flatten() + begin).tolist()
        needed += _joined(zip(changes[::2], changes[1::2], strict=True), _GAP)
    return tuple(needed)


def _parts(own: Mask, runs: Sequence[Run]) -> Iterator[Part]:
    """The calls over an owner's keys, of which these runs have come: as few as ranges of two per row can describe."""
    first = 0
    while runs:
        n = len(runs)
        if own.ranges is None:
            keys_come = torch.cat([torch.arange(*run, device=own.device) for run in runs])

            def tile(rows: slice, columns: Tensor = keys_come) -> Tensor:
                return own._rows(rows)[..., columns]

            mask = Mask.of_tiles(tile, own.live_of_queries, own.seqlen_q, len(keys_come))
        else:
            n = next(k for k in range(n, 0, -1) if _clipped(own.ranges, runs[:k]).shape[-2] <= 2)
            mask = Mask.of_ranges(_clipped(own.ranges, runs[:n]), own.seqlen_q, length_of(runs[:n]))
        keys = slice(first, first + mask.seqlen_k)
        first, runs = keys.stop, runs[n:]
        live, scores = int(mask.live), math.prod(mask.shape)
        if live == scores > 0:
            yield Part(slice(0, own.seqlen_q), keys, None)
        elif live > 0:
            rows = _live_rows(mask)
            yield Part(rows, keys, _of_queries(mask, [(rows.start, rows.stop)]))


def _clipped(ranges: Tensor, runs: Sequence[Run]) -> Tensor:
    """Ranges of the whole sequence as ranges of these runs of keys, one after the other."""
    first, clipped = 0, []
    for begin, end in runs:
        clipped.append(ranges.clamp(begin, end) + (first - begin))
        first += end - begin
    return union_of_ranges(torch.cat(clipped, -2), first)


def _live_rows(mask: Mask) -> slice:
    """From the first to the last query that attends to a key. (All of them where there is a map of blocks.)"""
    alive = (mask.live_of_queries > 0).flatten(0, 1).any(0)
    if mask.ranges is None or len(alive) == 1:
        return slice(0, mask.seqlen_q)
    rows = alive.nonzero()
    return slice(int(rows[0]), int(rows[-1]) + 1)


def _check_same(mask: Mask, shards: Shards, group: Any) -> None:
    """Raises unless all ranks have brought the same."""
    stored = mask._stored.cpu().contiguous()
    sizes = mask.seqlen_q, mask.seqlen_k, tuple(stored.shape), mask.ranges is None, shards
    digest = hashlib.sha256(repr(sizes).encode())
    digest.update(ctypes.string_at(stored.data_ptr(), stored.nbytes))
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=mask.device)
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, mine, group)
    others = [rank for rank, theirs in enumerate(received) if not torch.equal(theirs, received[0])]
    if others:
        raise RuntimeError(
            "attnkern: every rank of the group must bring the same mask and shards, "
            f"those of {'ranks' if len(others) > 1 else 'rank'} {_shortened(others)} are not rank 0's"
        )


def _checked_shards(shards: Any, seqlen: int, ranks: int) -> Shards:
    try:
        runs = tuple(tuple((operator.index(a), operator.index(b)) for a, b in own) for own in shards)
    except (TypeError, ValueError):
        raise TypeError(
            "attnkern: argument 'shards' must be sequences of runs (begin, end), one for each rank"
        ) from None
    if len(runs) != ranks:
        raise ValueError(f"attnkern: shards must be {ranks}, one for each rank of the group, got {len(runs)}")
    filled = sorted(run for own in runs for run in own if run[0] != run[1])
    at = [0, *(end for _, end in filled)]
    if [begin for begin, _ in filled] != at[:-1] or at[-1] != seqlen or any(a > b for a, b in filled):
        raise ValueError(f"attnkern: shards must hold each of {seqlen} tokens once, got the runs {_shortened(filled)}")
    return tuple(tuple(run for run in own if run[0] != run[1]) for own in runs)


def _shortened(items: list[Any]) -> str:
    return ", ".join(map(str, items if len(items) <= 8 else [*items[:4], "...", *items[-3:]]))


def length_of(runs: Sequence[Run]) -> int:
    return sum(end - begin for begin, end in runs)


def taken(x: Tensor, runs: Sequence[Run], dim: int) -> Tensor:
    """The entries of these runs, one after the other; of a single run a view."""
    parts = [x.narrow(dim, begin, end - begin) for begin, end in runs]
    if not parts:
        return x.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def in_order(x: Tensor, shards: Shards, dim: int) -> Tensor:
    """The sequence of what stands in `x` rank after rank."""
    runs = [run for own in shards for run in own]
    parts = x.split([end - begin for begin, end in runs], dim)
    placed = [parts[n] for n in sorted(range(len(runs)), key=runs.__getitem__)]
    return torch.cat(placed, dim) if len(placed) > 1 else x


def place_of(run: Run, runs: Sequence[Run]) -> Run:
    """Where a run of tokens stands among those of a rank."""
    first = 0
    for begin, end in runs:
        if begin <= run[0] and run[1] <= end:
            return run[0] - begin + first, run[1] - begin + first
        first += end - begin
    raise AssertionError(f"{run} is not in {runs}")


def check_initialised(what: str) -> None:
    """Raises unless there are processes to talk to."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"attnkern: {what} needs torch.distributed.init_process_group to be called first")


def check_dim(name: str, x: Any, dim_name: str, dim: Any) -> None:
    """Raises unless x is a tensor that has the dimension."""
    if not isinstance(x, Tensor):
        raise type_error(name, "Tensor", x)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise type_error(dim_name, "int", dim)
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"attnkern: {dim_name} must be a dimension of {name} {tuple(x.shape)}, got {dim}")


def _check_mask(mask: Any) -> None:
    if not isinstance(mask, Mask):
        raise TypeError(
            f"attnkern: argument 'mask' must be Mask, not {type(mask).__name__} (attnkern.masks makes them)"
        )


def _check_count(name: str, n: Any, least: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"attnkern: argument '{name}' must be int, not {type(n).__name__}")
    if n < least:
        raise ValueError(f"attnkern: {name} must be >= {least}, got {n}")
