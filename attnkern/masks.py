"""The field's masks by name, each as an `attnkern.Mask`: made once, outside the layers that use it.

Making one may look at the tensors it is made of, and then waits for a GPU. Values are checked where they can be looked
at for nothing, on the CPU outside of graphs and transforms, and on other devices where ATTNKERN_CHECK=1 asks for it. A
length that is not given for the keys is that of the queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import (
    Window,
    check_bool,
    check_not_traced,
    index_of,
    integer,
    may_look,
    show,
    type_error,
    type_name,
)
from .mask import Mask
from .packed import packed_ranges
from .params import UNBOUNDED, check_alignment, shown
from .varlen import check_packed_window

Integers = int | Sequence[int] | Tensor
_LONGEST = torch.iinfo(torch.int32).max


def padding(
    lengths: Sequence[int] | Tensor, seqlen_q: int | None = None, seqlen_k: int | None = None, left: bool = False
) -> Mask:
    """Of each sequence of a batch, the keys that are no padding. All queries see them, those of the padding as well.

    Args:
        lengths: B ints, or an integer tensor (B,), whose device the mask has: how many keys of each sequence count.
        seqlen_q: L; None: S. seqlen_k: S; None: the longest of lengths, which then is looked at.
        left: the padding stands to the left of the sequence, not to its right.

    Returns:
        One range per sequence, (B, 1, 1, 1, 2).

    Raises:
        TypeError: arguments of the wrong type. RuntimeError: lengths of another shape or dtype. ValueError: lengths
        below 0 or above S (unchecked on a GPU, where they count as 0 and S).
    """
    check_bool("left", left)
    lengths = _integers("lengths", lengths, dims=(1,))
    if seqlen_k is None:
        check_not_traced(lengths)
        seqlen_k = int(lengths.max()) if len(lengths) else 0
    seqlen_k = _length("seqlen_k", seqlen_k)
    seqlen_q = seqlen_k if seqlen_q is None else _length("seqlen_q", seqlen_q)
    _check_counts("lengths", lengths, seqlen_k)
    ends = (seqlen_k - lengths, torch.full_like(lengths, seqlen_k)) if left else (torch.zeros_like(lengths), lengths)
    return Mask.of_ranges(torch.stack(ends, -1)[:, None, None, None], seqlen_q, seqlen_k)


def document(
    ids: Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    seqlen: int | None = None,
    is_causal: bool = False,
) -> Mask:
    """Sequences packed into one: a token attends to those of its own document.

    Args:
        ids: integer (L,) or (B, L): each token's document. Tokens of equal ids attend to each other. Where those of an
            id don't all stand together, two ranges may not suffice, and the mask is bits.
        cu_seqlens: instead, n + 1 ints or an integer tensor (n + 1,), where documents begin, and where the last one
            ends: 0, ..., L or less. Tokens behind it are of no document and attend to nothing.
        seqlen: L, beside cu_seqlens; None: its last entry, which then is looked at.
        is_causal: a token attends to those before it and itself only. (For a window, `& sliding_window(...)`.)

    Returns:
        One range per token, (B|1, 1, L, 1, 2).

    Raises:
        TypeError: arguments of the wrong type. RuntimeError: tensors of another shape or dtype. ValueError: both or
        neither of ids and cu_seqlens; cu_seqlens that doesn't begin with 0, falls, or exceeds L (unchecked on a GPU).
    """
    check_bool("is_causal", is_causal)
    if (ids is None) == (cu_seqlens is None):
        raise ValueError(f"attnkern: document takes ids or cu_seqlens, got {'neither' if ids is None else 'both'}")
    if ids is not None:
        if seqlen is not None:
            raise ValueError(f"attnkern: seqlen goes with cu_seqlens, ids have their own length; got {seqlen}")
        mask = _of_ids(_integers("ids", ids, dims=(1, 2)))
    else:
        starts = _integers("cu_seqlens", cu_seqlens, dims=(1,))
        if len(starts) == 0:
            raise RuntimeError("attnkern: cu_seqlens must have at least one entry, 0, got none")
        if seqlen is None:
            check_not_traced(starts)
            seqlen = int(starts[-1])
        seqlen = _length("seqlen", seqlen)
        if may_look(starts):
            if starts[0] != 0:
                raise ValueError(f"attnkern: cu_seqlens must begin with 0, got {int(starts[0])}")
            if falls := (starts.diff() < 0).nonzero().flatten().tolist():
                first, second = starts[falls[0] : falls[0] + 2].tolist()
                raise ValueError(f"attnkern: cu_seqlens must not fall, got {second} after {first}")
            if starts[-1] > seqlen:
                raise ValueError(f"attnkern: cu_seqlens must not exceed the length {seqlen}, got {int(starts[-1])}")
        last = torch.searchsorted(starts, torch.arange(seqlen, device=starts.device), right=True)
        ranges = torch.stack([starts[last - 1], starts[last.clamp(max=len(starts) - 1)]], -1)
        mask = Mask.of_ranges(ranges[None, None, :, None], seqlen, seqlen)
    return mask & causal(mask.seqlen_q, device=mask.device) if is_causal else mask


def packed(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    is_causal: bool = False,
    window: Window = None,
    alignment: str = "bottom_right",
) -> Mask:
    """What `attnkern.varlen_attention` lets packed queries attend to, from the same arguments.

    Of queries (T, Hq, E) and keys (Tk, Hk, E) it is the attn_mask of (1, Hq, T, E) and (1, Hk, Tk, E), or, as
    `shard_mask` cuts it, of packed sequences that are sharded over ranks. T and Tk are the last entries of
    cu_seqlens_q and cu_seqlens_k, which are looked at.

    Returns:
        One range per token, (1, 1, T, 1, 2), on the device of cu_seqlens_q.

    Raises:
        As `varlen_attention`.
    """
    left, right = check_packed_window(is_causal, window, alignment)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    lengths = []
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_tensor(name, ends, has_values=True)
        check_not_traced(ends)
        lengths.append(max(0, int(ends.flatten()[-1])) if ends.numel() else 0)
    q, k = (cu_seqlens_q.new_empty(()).expand(n) for n in lengths)  # for their number and device; they take no memory
    ranges = packed_ranges(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, left, right, alignment)
    return Mask.of_ranges(ranges[None, None], *lengths)


def _of_ids(ids: Tensor) -> Mask:
    """`document` of ids (L,) or (B, L)."""
    check_not_traced(ids)
    ids = torch.atleast_2d(ids)
    seqlen = ids.shape[1]
    i = torch.arange(seqlen, device=ids.device)
    new, new_if_sorted = (
        torch.cat([torch.ones_like(x[:, :1], dtype=torch.bool), x[:, 1:] != x[:, :-1]], -1)
        for x in (ids, ids.sort(-1).values)
    )
    if bool((new.sum(-1) != new_if_sorted.sum(-1)).any()):  # more runs than ids
        like = ids[:, None]
        return Mask.of_tiles(lambda rows: (ids[:, rows, None] == ids[:, None])[:, None], like, seqlen, seqlen)
    begin = torch.where(new, i, 0).cummax(-1).values
    closes = torch.cat([new[:, 1:], torch.ones_like(new[:, :1])], -1)
    end = torch.where(closes, i + 1, seqlen).flip(-1).cummin(-1).values.flip(-1)
    return Mask.of_ranges(torch.stack([begin, end], -1)[:, None, :, None], seqlen, seqlen)


def prefix_lm(
    prefix: Integers, seqlen_q: int, seqlen_k: int | None = None, *, device: torch.device | str | None = None
) -> Mask:
    """All queries see the keys of a prefix, and beyond it each those up to its own place (aligned to the top left).

    Args:
        prefix: how many keys; an int for all, or B ints or an integer tensor (B,), whose device the mask has.
        seqlen_q, seqlen_k: L and S. device: the mask's, where prefix is no tensor; None: torch's default.

    Returns:
        One range per query, (B|1, 1, L, 1, 2).

    Raises:
        TypeError: arguments of the wrong type. RuntimeError: prefix of another shape or dtype. ValueError: prefix below
        0 or above S (unchecked on a GPU, where it counts as 0 and S).

    Source: C. Raffel et al., "Exploring the limits of transfer learning", JMLR 2020.
    """
    seqlen_q = _length("seqlen_q", seqlen_q)
    seqlen_k = seqlen_q if seqlen_k is None else _length("seqlen_k", seqlen_k)
    lengths = _integers("prefix", prefix, dims=(0, 1), device=device).reshape(-1, 1)
    _check_counts("prefix", lengths, seqlen_k)
    end = (torch.arange(seqlen_q, device=lengths.device) + 1).maximum(lengths)
    return Mask.of_ranges(torch.stack([torch.zeros_like(end), end], -1)[:, None, :, None], seqlen_q, seqlen_k)


def causal(
    seqlen_q: int,
    seqlen_k: int | None = None,
    alignment: str = "top_left",
    *,
    device: torch.device | str | None = None,
) -> Mask:
    """Each query sees the keys up to its own place: `sliding_window(None, 0, ...)`. Alone, is_causal says the same."""
    return sliding_window(None, 0, seqlen_q, seqlen_k, alignment=alignment, device=device)


def sliding_window(
    left: int | None,
    right: int | None,
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    sinks: int = 0,
    alignment: str = "top_left",
    device: torch.device | str | None = None,
) -> Mask:
    """Each query sees the keys around its own place, and the first ones of all.

    Args:
        left, right, alignment: as `window` and `alignment` of `attnkern.attention`: query i attends to keys j with
            -left <= j - i - offset <= right; None is unbounded, offset is 0 or, for "bottom_right", S - L.
        seqlen_q, seqlen_k: L and S.
        sinks: so many keys at the beginning are exempt from the left bound. The right one holds for them too.
        device: the mask's; None: torch's default.

    Returns:
        One or, with sinks, two ranges per query, (1, 1, L, 1|2, 2).

    Raises:
        TypeError: arguments of the wrong type. ValueError: negative ones, an unknown alignment.

    Source of windows: I. Beltagy et al., "Longformer", 2020; of sinks: G. Xiao et al., "Efficient streaming language
    models with attention sinks", ICLR 2024.
    """
    seqlen_q = _length("seqlen_q", seqlen_q)
    seqlen_k = seqlen_q if seqlen_k is None else _length("seqlen_k", seqlen_k)
    sinks = min(_size("sinks", sinks), seqlen_k)
    check_alignment(alignment)
    left = UNBOUNDED if left is None else min(_size("left", left), UNBOUNDED)
    right = UNBOUNDED if right is None else min(_size("right", right), UNBOUNDED)
    i = torch.arange(seqlen_q, device=device)
    if alignment == "bottom_right":
        i += seqlen_k - seqlen_q
    ranges = [torch.stack([i - left, i + 1 + right], -1)]
    if sinks:
        ranges.insert(0, torch.stack([torch.zeros_like(i), (i + 1 + right).clamp(max=sinks)], -1))
    return Mask.of_ranges(torch.stack(ranges, -2)[None, None], seqlen_q, seqlen_k)


def from_mask_mod(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> Mask:
    """The mask of a mask_mod of FlexAttention, unchanged; the arguments are those of its `create_block_mask`.

    Args:
        mask_mod: f(b, h, q_idx, kv_idx), of 0-dim integer tensors, gives a 0-dim bool tensor, True = attend. It is run
            under torch.vmap, as FlexAttention does, on a tile of rows at a time: all scores are never in memory.
        B, H: for how many batch elements and heads; None: for one, which stands for all.
        Q_LEN, KV_LEN: L and S.
        device: where the mask is made, and its own; None: torch's default. Tensors that mask_mod uses must be there.

    Returns:
        Two ranges per row or less where they suffice, else bits. A size is 1 where the mask is the same for all batch
        elements, heads or rows.

    Raises:
        TypeError: arguments of the wrong type, mask_mod gives no tensor. RuntimeError: it gives another dtype than
        bool. ValueError: negative sizes. What mask_mod raises.

    Source of the function's form: J. Dong et al., "Flex Attention", 2024.
    """
    from torch.nn.attention.flex_attention import create_mask  # imports Dynamo

    if not callable(mask_mod):
        hint = " (its mask_mod is one)" if hasattr(mask_mod, "mask_mod") else ""
        raise TypeError(f"{type_error('mask_mod', 'a function', mask_mod)}{hint}")
    batch, heads = (1 if n is None else _size(name, n) for name, n in (("B", B), ("H", H)))
    seqlen_q, seqlen_k = _length("Q_LEN", Q_LEN), _length("KV_LEN", KV_LEN)
    device = torch.get_default_device() if device is None else torch.device(device)
    if 0 in (batch, heads, seqlen_q, seqlen_k):
        return Mask.of_ranges(torch.zeros(batch, heads, seqlen_q, 1, 2, device=device).int(), seqlen_q, seqlen_k)

    def tile(rows: slice) -> Tensor:
        def moved(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            allowed = mask_mod(b, h, i + rows.start, j)
            if not isinstance(allowed, Tensor):
                raise TypeError(f"attnkern: mask_mod must give a bool tensor, not {type_name(allowed)}")
            if allowed.dtype != torch.bool or allowed.dim() != 0:
                raise RuntimeError(
                    "attnkern: mask_mod must give a bool tensor of shape (), "
                    f"got {show(allowed.dtype)} of shape {show(allowed.shape)}"
                )
            return allowed

        return _as_stored(create_mask(moved, batch, heads, rows.stop - rows.start, seqlen_k, device))

    # What mask_mod doesn't use, vmap leaves without memory of its own: two rows show it.
    first = tile(slice(0, min(2, seqlen_q)))
    sizes = *first.shape[:2], 1 if first.shape[2] == 1 else seqlen_q
    return Mask.of_tiles(tile, first.new_empty(()).expand(sizes), seqlen_q, seqlen_k)


def from_bool(mask: Tensor) -> Mask:
    """The mask of a bool tensor, True = attend.

    Args:
        mask: (..., L, S) of 2 to 4 dimensions; batch and heads may be 1. Expanded dimensions cost nothing.

    Returns:
        Two ranges per row or less where they suffice, else bits. A size is 1 where the mask is the same for all batch
        elements, heads or rows.

    Raises:
        TypeError: mask is no tensor. RuntimeError: another dtype or number of dimensions.
    """
    _check_tensor("mask", mask, has_values=True)
    if mask.dtype != torch.bool or not 2 <= mask.dim() <= 4:
        raise RuntimeError(
            f"attnkern: mask must be bool of 2 to 4 dimensions (..., L, S), got {show(mask.dtype)} of shape "
            f"{show(mask.shape)}"
        )
    seqlen_q, seqlen_k = mask.shape[-2:]
    mask = _as_stored(mask[(None,) * (4 - mask.dim())])
    return Mask.of_tiles(lambda rows: mask[:, :, rows], mask, seqlen_q, seqlen_k)


def from_ranges(ranges: Tensor, seqlen_q: int, seqlen_k: int) -> Mask:
    """The mask whose row i attends to the keys of its ranges.

    Args:
        ranges: int32 or int64 (B|1, Hq|1, L|1, n, 2), n >= 1: begin and end, which is not in the range. Ends are
            clamped to 0 and S. Ranges may overlap and come in any order; one whose end is not above its begin is empty.
        seqlen_q, seqlen_k: L and S.

    Returns:
        Their union: ranges, or bits where two per row don't suffice.

    Raises:
        TypeError: arguments of the wrong type. RuntimeError: ranges of another shape or dtype. ValueError: negative
        sizes.
    """
    _check_tensor("ranges", ranges)
    seqlen_q, seqlen_k = _length("seqlen_q", seqlen_q), _length("seqlen_k", seqlen_k)
    if ranges.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"attnkern: ranges must be int32 or int64, got {show(ranges.dtype)}")
    shape = tuple(ranges.shape)
    if len(shape) != 5 or shape[2] not in (1, seqlen_q) or shape[3] == 0 or shape[4] != 2:
        raise RuntimeError(
            f"attnkern: ranges must have the shape (B|1, heads|1, L|1, n, 2) with n >= 1 and L {seqlen_q}, got {shape}"
        )
    return Mask.of_ranges(ranges, seqlen_q, seqlen_k)


def _check_tensor(name: str, x: object, *, has_values: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise type_error(name, "Tensor", x)
    got = f"layout {x.layout}" if x.layout != torch.strided else None
    if x.is_nested:
        got = "a nested tensor"
    elif x.is_meta and has_values:
        got = "a meta tensor, which has no values"
    if got is not None:
        raise RuntimeError(f"attnkern: {name} must be a dense (strided) tensor, got {got}")


def _size(name: str, x: Any) -> int:
    if (x := integer(name, x)) < 0:
        raise ValueError(f"attnkern: {name} must be >= 0, got {x}")
    return x


def _length(name: str, x: Any) -> int:
    x = _size(name, x)
    # Ranges are int32. (Of a graph's sizes this would be a guard, which torch.export takes for a bound of the user's.)
    if not torch.compiler.is_compiling() and x > _LONGEST:
        raise ValueError(f"attnkern: {name} must be at most {_LONGEST}, got {x}")
    return x


def _integers(name: str, x: Any, dims: tuple[int, ...], device: torch.device | str | None = None) -> Tensor:
    """int64 of so many dimensions, of an int, a sequence of ints or a tensor."""
    if not isinstance(x, Tensor):
        numbers = [index_of(n) for n in (x if isinstance(x, Sequence) else [x])]
        # (Dynamo can't ask a number that a graph has as a symbol for an attribute.)
        if not isinstance(x, (int, torch.SymInt, Sequence)) and hasattr(x, "__array__"):  # numpy's
            x = torch.tensor(x, device=device)
        elif None in numbers:
            raise TypeError(f"attnkern: {name} must be integers or an integer tensor, got {shown(x)}")
        elif not torch.compiler.is_compiling() and any(not -(2**63) <= n < 2**63 for n in numbers if n is not None):
            raise ValueError(f"attnkern: {name} must be within int64, got {shown(x)}")
        else:
            x = torch.tensor(x, dtype=torch.int64, device=device)
    _check_tensor(name, x)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        hint = " (masks.from_bool makes a Mask of a bool tensor)" if x.dtype == torch.bool else ""
        raise RuntimeError(f"attnkern: {name} must have an integer dtype, got {show(x.dtype)}{hint}")
    if x.dim() not in dims:
        wanted = " or ".join(map(str, dims))
        plural = "" if wanted == "1" else "s"
        raise RuntimeError(f"attnkern: {name} must have {wanted} dimension{plural}, got the shape {tuple(x.shape)}")
    return x.to(torch.int64)


def _check_counts(name: str, counts: Tensor, seqlen_k: int) -> None:
    if may_look(counts) and bool((wrong := (counts < 0) | (counts > seqlen_k)).any()):
        found = int(counts[wrong][0])
        raise ValueError(f"attnkern: {name} must be from 0 to the number of keys, {seqlen_k}, got {found}")


def _as_stored(mask: Tensor) -> Tensor:
    """Of a bool (B, H, L, S), one of each dimension before the last that is expanded from one."""
    for dim in range(3):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask
