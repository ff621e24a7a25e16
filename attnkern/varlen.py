"""Attention of packed sequences: one row of tokens, sequence after sequence, without padding."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .api import attention
from .params import check_alignment
from .problem import Window, checked_window


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    is_causal: bool = False,
    window: Window = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of n sequences that are packed one after the other.

    No length has to be known on the host: nothing waits for a GPU, and one compiled graph serves all lengths.

    Args:
        query: (T, Hq, E), the queries of all sequences; dtypes and strides as in `attention`.
        key: (Tk, Hk, E), value: (Tk, Hk, Ev).
        cu_seqlens_q: (n + 1,), int32 or int64: sequence s has the queries cu_seqlens_q[s] to cu_seqlens_q[s + 1]; the
            first is 0, the last T.
        cu_seqlens_k: the same for keys, the last is Tk; None: cu_seqlens_q.
        seqused_k: (n,), int32 or int64: how many keys of each sequence there are, from its first on; None: all.
        is_causal, window, alignment: as in `attention`, within each sequence; by default its last query is level with
            the last of its keys that there are.
        scale, softcap, dropout_p, enable_gqa, backend: as in `attention`.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        (T, Hq, Ev) in query's dtype; with return_lse also lse (Hq, T), as in `attention`. Both are differentiable.

    Raises:
        As `attention`; RuntimeError also for cu_seqlens of another shape or dtype, or (checked on the CPU, and on other
        devices where ATTNKERN_CHECK=1 is in the environment) that don't start at 0, fall, or don't end at T.

    Source: packed sequences are those of T. Dao's flash_attn_varlen_func (FlashAttention-2, 2023).
    """
    check_packed(query, key, value)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    left, right = check_packed_window(is_causal, window, alignment)
    ranges = packed_ranges(query, key, cu_seqlens_q, cu_seqlens_k, seqused_k, left, right, alignment)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    results: Any = attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        key_ranges=ranges,
        return_lse=return_lse,
        backend=backend,
    )
    if not return_lse:
        return results.squeeze(0).transpose(0, 1)
    out, lse = results
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0)


def check_packed(query: Any, key: Any, value: Any) -> None:
    """Raises unless they are tensors of packed tokens."""
    for name, x, size in (("query", query, "Hq, E"), ("key", key, "Hk, E"), ("value", value, "Hk, Ev")):
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise RuntimeError(f"attnkern: {name} must have the shape (tokens, {size}), got {got}")


def check_packed_window(is_causal: Any, window: Any, alignment: Any) -> tuple[int | None, int | None]:
    """The window's bounds, causal or not, after checks."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"attnkern: argument 'is_causal' must be bool, not {type(is_causal).__name__}")
    check_alignment(alignment)
    left, right = checked_window(window) or (None, None)
    return left, 0 if is_causal else right


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
    _check_ends("cu_seqlens_q", ends_q, query)
    _check_ends("cu_seqlens_k", ends_k, key)
    if ends_k.shape != ends_q.shape:
        raise RuntimeError(
            f"attnkern: cu_seqlens_k must have the shape of cu_seqlens_q {tuple(ends_q.shape)}, "
            f"got {tuple(ends_k.shape)}"
        )
    if used is not None:
        _check_integers("seqused_k", used, query, ends_q.shape[0] - 1)
    token = torch.arange(query.shape[0], dtype=ends_q.dtype, device=ends_q.device)
    sequence = torch.searchsorted(ends_q[1:], token, right=True)
    first_q, first_k = ends_q[:-1], ends_k[:-1]
    lengths_k = ends_k.diff() if used is None else used.to(ends_k.dtype)
    # The key that a query is level with.
    level = first_k - first_q
    if alignment == "bottom_right":
        level = level + lengths_k - ends_q.diff()
    level, begin, end = token + level[sequence], first_k[sequence], (first_k + lengths_k)[sequence]
    if left is not None:
        begin = torch.maximum(begin, level - left)
    if right is not None:
        end = torch.minimum(end, level + right + 1)
    return torch.stack([begin, end], -1).to(torch.int32).unsqueeze(1)


def _check_integers(name: str, x: Any, like: Tensor, size: int | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"attnkern: argument '{name}' must be Tensor, not {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64) or x.dim() != 1 or (size is not None and x.shape[0] != size):
        expected = "(sequences + 1,)" if size is None else f"({size},)"
        dtype = str(x.dtype).removeprefix("torch.")
        raise RuntimeError(
            f"attnkern: {name} must be int32 or int64 with shape {expected}, got {dtype} with shape {tuple(x.shape)}"
        )
    if x.device != like.device:
        raise RuntimeError(f"attnkern: {name} must be on query's device {like.device}, got {x.device}")


def _check_ends(name: str, ends: Any, packed: Tensor) -> None:
    _check_integers(name, ends, packed, None)
    if ends.shape[0] == 0:
        raise RuntimeError(f"attnkern: {name} must have the shape (sequences + 1,), got (0,)")
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    if ends.is_cpu or os.environ.get("ATTNKERN_CHECK") == "1":
        found = ends.tolist()
        if found[0] != 0 or found[-1] != packed.shape[0] or any(a > b for a, b in pairwise(found)):
            shown = str(found if len(found) <= 8 else [*found[:4], "...", *found[-3:]]).replace("'", "")
            raise RuntimeError(
                f"attnkern: {name} must begin with 0, never fall and end with the number of tokens, {packed.shape[0]}, "
                f"got {shown}"
            )
