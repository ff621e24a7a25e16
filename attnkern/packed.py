"""Sequences that lie one after the other: cu_seqlens and jagged nested tensors, and the keys that each query has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import listeners, may_look, show, type_error
from .params import UNBOUNDED, holds


class _Recent(NamedTuple):
    """The ranges of the last call on the CPU, for the next: the layers of a model have the same sequences."""

    call: tuple[Any, ...]
    numbers: tuple[Tensor | None, ...]  # copies
    ranges: Tensor


_recent: _Recent | None = None
_MOST_TOKENS = 1 << 17  # of ranges that are kept: 1 MiB


_P = ParamSpec("_P")


def heads_first(*packed: Tensor, batch: bool = False) -> list[Tensor]:
    """(tokens, H, E) as (H, tokens, E): a view more, for a batch, costs a twentieth of a short call. With `batch`, and
    for gradients, which short calls have in four dimensions alone, as (1, H, tokens, E)."""
    views = [x.transpose(0, 1) for x in packed]
    batch = batch or (torch.is_grad_enabled() and any(x.requires_grad for x in packed))
    return [x.unsqueeze(0) for x in views] if batch else views


def tokens_first(out: Tensor) -> Tensor:
    """(tokens, H, Ev) of a result for `heads_first`."""
    return (out.squeeze(0) if out.dim() == 4 else out).transpose(0, 1)


def _kept(*by_value: int) -> Callable[[Callable[_P, Tensor]], Callable[_P, Tensor]]:
    """A decorator for a function of ranges, which then returns those of its last call if this one has the same
    arguments: tensors at the places `by_value` of the same values, others of the same shape.

    On the CPU, in eager calls without keywords. Nobody may modify the result: others may have it, too.
    """

    def decorated(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
        @functools.wraps(function)
        def of_call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
            global _recent
            if torch.compiler.is_compiling() or kwargs or listeners is None or any(listens() for listens in listeners):
                return function(*args, **kwargs)
            numbers: Any = tuple(args[i] for i in by_value)
            if not all(x is None or (type(x) is Tensor and x.is_cpu) for x in numbers):
                return function(*args, **kwargs)
            others = (
                (x.shape, x.device) if isinstance(x, Tensor) else x for i, x in enumerate(args) if i not in by_value
            )
            # (Autograd takes no tensors of inference mode.)
            call = function, *others, torch.is_inference_mode_enabled()
            last = _recent
            if last is not None and last.call == call and all(map(_equal, last.numbers, numbers)):
                return last.ranges
            ranges = function(*args, **kwargs)
            if ranges.shape[0] <= _MOST_TOKENS:
                _recent = _Recent(call, tuple(None if x is None else x.clone() for x in numbers), ranges)
            return ranges

        return of_call

    return decorated


def _equal(x: Tensor | None, y: Tensor | None) -> bool:
    return x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y)


@_kept(2, 3, 4)
def packed_ranges(
    query: Tensor,
    key: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    used: Tensor | None,
    left: int | None,
    right: int | None,
    alignment: str,
) -> Tensor:
    """The keys of each query, int32 (T, 1, 2): those of its sequence within the window.

    Takes and checks cu_seqlens_q, cu_seqlens_k and seqused_k of `varlen_attention`; left and right None: unbounded.
    """
    check_ends("cu_seqlens_q", ends_q, query)
    check_ends("cu_seqlens_k", ends_k, query, key.shape[0])
    if ends_k.shape != ends_q.shape:
        raise RuntimeError(
            f"attnkern: cu_seqlens_k must have the shape of cu_seqlens_q {tuple(ends_q.shape)}, "
            f"got {tuple(ends_k.shape)}"
        )
    if used is not None:
        used = _checked_used(used, query, ends_k)
    return _ranges(query.shape[0], (ends_q, None), (ends_k, used), left, right, alignment)


@_kept(3, 4)
def paged_ranges(
    query: Tensor,
    block_table: Tensor,
    size: int,
    ends_q: Tensor,
    used: Tensor,
    left: int | None,
    right: int | None,
    alignment: str,
) -> Tensor:
    """`packed_ranges` of keys in pages of `size` rows, counted through block_table (sequences, pages of each)."""
    check_ends("cu_seqlens_q", ends_q, query)
    sequences, each = block_table.shape
    if holds(sequences != ends_q.shape[0] - 1, False):
        raise RuntimeError(
            f"attnkern: block_table must have a row for each of the {ends_q.shape[0] - 1} sequences of cu_seqlens_q, "
            f"got {show(block_table.shape)}"
        )
    if holds(sequences * each * size >= 2**31, False):
        raise RuntimeError(
            f"attnkern: block_table must have room for less than 2**31 keys in all, got {sequences} x {each} pages of "
            f"{size}"
        )
    ends_k = torch.arange(sequences + 1, device=query.device) * (each * size)
    used = _checked_used(used, query, ends_k)
    return _ranges(query.shape[0], (ends_q, None), (ends_k, used), left, right, alignment)


def _ranges(
    tokens: int,
    of_queries: tuple[Tensor, Tensor | None],
    of_keys: tuple[Tensor, Tensor | None],
    left: int | None,
    right: int | None,
    alignment: str,
) -> Tensor:
    """`packed_ranges` of (where sequences begin and end, how many of each there are), for queries and for keys.

    A token of no sequence, and one that is none of its sequence, has no keys.
    """
    # In int64, where no bound and no length wraps around.
    (ends_q, used_q), (ends_k, used_k) = (
        (ends.to(torch.int64), None if used is None else used.to(torch.int64)) for ends, used in (of_queries, of_keys)
    )
    # Before the first sequence and behind the last stands one more, without keys, for the tokens of none.
    first_q, first_k = (F.pad(ends, (1, 0)) for ends in (ends_q, ends_k))
    lengths_q, lengths_k = (
        _lengths(ends) if used is None else F.pad(used, (1, 1)) for ends, used in ((ends_q, used_q), (ends_k, used_k))
    )
    token = torch.arange(tokens, device=ends_q.device)
    # (Not out of bounds where ends are wrong and weren't looked at.)
    sequence = torch.searchsorted(ends_q, token, right=True)
    # The key that a query is level with.
    level = first_k - first_q
    if alignment == "bottom_right":
        level = level + lengths_k - lengths_q
    level, begin, end = token + level[sequence], first_k[sequence], (first_k + lengths_k)[sequence]
    begin, end = _within_window(begin, end, level, left, right)
    if used_q is not None:
        end = end.where(token - first_q[sequence] < lengths_q[sequence], begin)
    return torch.stack([begin, end], -1).to(torch.int32).unsqueeze(1)


def _lengths(ends: Tensor) -> Tensor:
    """The lengths of sequences, and of the empty ones around them.

    (Of two tensors as long as the result: `diff` has a size of n - 1, which export would hold to be other than 1, and
    its program would then refuse a single sequence.)
    """
    return torch.cat([ends, ends[-1:]]) - torch.cat([ends[:1], ends])


def ranges_within_window(begin: Tensor, end: Tensor, level: Tensor, left: int | None, right: int | None) -> Tensor:
    """key_ranges (B, 1, L, 1, 2) in int64 of a batch: the keys [begin, end) (B, 1) of a sequence that lie within the
    window around a query's `level` (B, L)."""
    inside = torch.broadcast_tensors(*_within_window(begin, end, level, left, right))
    return torch.stack(inside, -1)[:, None, :, None]


def _within_window(
    begin: Tensor, end: Tensor, level: Tensor, left: int | None, right: int | None
) -> tuple[Tensor, Tensor]:
    """What of the keys [begin, end) of int64 lies within the window around `level`; left and right None: unbounded."""
    if left is not None:
        begin = torch.maximum(begin, level - min(left, UNBOUNDED))
    if right is not None:
        end = torch.minimum(end, level + (min(right, UNBOUNDED) + 1))
    return begin, end


def places(tokens: int, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token its sequence (those behind the last: the number of sequences), and its place in that one."""
    token = torch.arange(tokens, device=ends.device)
    sequence = torch.searchsorted(ends[1:].to(torch.int64), token, right=True)
    return sequence, token - ends[sequence]


@_kept(1, 2, 3, 4)
def _jagged_ranges(
    tokens: int, ends_q: Tensor, used_q: Tensor | None, ends_k: Tensor, used_k: Tensor | None, *window: Any
) -> Tensor:
    return _ranges(tokens, (ends_q, used_q), (ends_k, used_k), *window)


class Jagged(NamedTuple):
    """What makes a jagged nested tensor of a dense one."""

    query: Tensor  # whose sequences, and shape before and after them, the result has
    lead: tuple[int, ...] | None

    def of(self, x: Tensor) -> Tensor:
        # (torch.nested.nested_tensor_from_jagged is this, but refuses where AOTAutograd traces.)
        from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

        query: Any = self.query
        return nested_view_from_values_offsets_lengths(
            x,
            query.offsets(),
            query.lengths(),
            ragged_idx=query._ragged_idx,
            min_seqlen=query._maybe_min_seqlen,
            max_seqlen=query._maybe_max_seqlen,
        )


def is_jagged(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged


def of_jagged(
    query: Any, key: Any, value: Any, left: int | None, right: int | None, alignment: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Dense (..., T, E), (..., Tk, E) and (..., Tk, Ev) of jagged nested tensors, and the keys of each query.

    Those are None where it is not the length that is ragged but a batch dimension, which then is one like others.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not is_jagged(x):
            raise ValueError(
                "attnkern: query, key and value must all be nested tensors of the jagged layout (torch.jagged) if one "
                f"is, got {name} {x.layout}"
            )
        if x._ragged_idx != query._ragged_idx or x.dim() != query.dim() or x.dim() < 3:
            raise ValueError(
                f"attnkern: {name} must have at least 3 dimensions, as many as query and ragged where query is "
                f"(dimension {query._ragged_idx} of {query.dim()}), got dimension {x._ragged_idx} of {x.dim()}"
            )
        if x.shape[0] != query.shape[0]:
            raise RuntimeError(
                f"attnkern: {name} must have query's batch size (number of sequences) {query.shape[0]}, "
                f"got {x.shape[0]}"
            )
    from_end = query.dim() - query._ragged_idx
    if from_end == 1:
        raise ValueError("attnkern: a jagged nested tensor's last dimension must not be the ragged one")
    _check_alike("value", value, "key", key)
    values = [x.values() for x in tensors.values()]
    if from_end > 2:
        _check_alike("key", key, "query", query)
        return *values, None
    of_queries, of_keys = ((x.offsets(), x.lengths()) for x in (query, key))
    return *values, _jagged_ranges(values[0].shape[-2], *of_queries, *of_keys, left, right, alignment)


def _check_alike(name: str, x: Any, of: str, other: Any) -> None:
    """Two jagged tensors have the same sequences: where that is seen for nothing, or is asked for."""
    for mine, theirs in ((x.offsets(), other.offsets()), (x.lengths(), other.lengths())):
        if mine is theirs or (
            mine is not None and theirs is not None and (not may_look(mine, theirs) or torch.equal(mine, theirs))
        ):
            continue
        raise RuntimeError(f"attnkern: {name}'s sequences must have the lengths of {of}'s")


def _check_integers(name: str, x: Any, like: Tensor, size: int | None) -> None:
    if not isinstance(x, Tensor):
        raise type_error(name, "Tensor", x)
    if x.dtype not in (torch.int32, torch.int64) or x.dim() != 1 or (size is not None and x.shape[0] != size):
        expected = "(sequences + 1,)" if size is None else f"({size},)"
        raise RuntimeError(
            f"attnkern: {name} must be int32 or int64 with shape {expected}, got {show(x.dtype)} with shape "
            f"{show(x.shape)}"
        )
    if x.device != like.device:
        raise RuntimeError(f"attnkern: {name} must be on query's device {like.device}, got {x.device}")


def _checked_used(used: Any, query: Tensor, ends_k: Tensor) -> Tensor:
    """seqused_k as numbers of keys that each sequence has."""
    _check_integers("seqused_k", used, query, ends_k.shape[0] - 1)
    lengths = ends_k.to(torch.int64).diff()
    clamped = used.to(torch.int64).minimum(lengths).clamp(min=0)
    if may_look(used, ends_k) and not torch.equal(clamped, used.to(torch.int64)):
        wrong = int((clamped != used).nonzero()[0])
        raise ValueError(
            f"attnkern: seqused_k must be from 0 to the number of each sequence's keys, "
            f"got {int(used[wrong])} for sequence {wrong}, which has {int(lengths[wrong])}"
        )
    return clamped


def check_ends(name: str, ends: Any, packed: Tensor, tokens: int | None = None) -> None:
    """`tokens`: None: those of `packed`."""
    tokens = packed.shape[0] if tokens is None else tokens
    _check_integers(name, ends, packed, None)
    if ends.shape[0] == 0:
        raise RuntimeError(f"attnkern: {name} must have the shape (sequences + 1,), got (0,)")
    if may_look(ends):
        found = ends.tolist()
        if found[0] != 0 or found[-1] > tokens or found != sorted(found):
            shown = str(found if len(found) <= 8 else [*found[:4], "...", *found[-3:]]).replace("'", "")
            raise RuntimeError(
                f"attnkern: {name} must begin with 0, never fall and not exceed the number of tokens, "
                f"{tokens}, got {shown}"
            )
