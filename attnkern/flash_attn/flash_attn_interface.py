"""flash_attn's functions (version 2.8), by `attnkern.attention`; that of caches is in kvcache.py.

docs/coming_from_flash_attn.md says of each argument what becomes of it. (dropout_p's and softcap's defaults are
integers, which Dynamo takes for constants.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import attention
from ..arguments import may_look, type_error
from ..packed import check_ends, heads_first, packed_ranges, paged_ranges, places, tokens_first
from ..params import int_of_numpy
from .arguments import (
    bounds,
    cap_of,
    check_device,
    check_dims,
    check_pages,
    check_slopes,
    check_tensors,
    scale_of,
)
from .calls import Alibi, attend
from .kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Results = Any  # a tensor, or three with return_attn_probs


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of sequences of one length, masks aligned to the bottom right.

    Args:
        q: (batch_size, Lq, nheads, headdim); float32, float64, bfloat16 or float16.
        k: (batch_size, Lk, nheads_k, headdim), nheads_k a divisor of nheads; v: the same, of any headdim.
        dropout_p: probability with which a weight is dropped.
        softmax_scale: default 1 / sqrt(headdim).
        causal: query i sees keys up to i + Lk - Lq; one that sees none gives 0.
        window_size: (left, right): query i sees keys from i + Lk - Lq - left to i + Lk - Lq + right; -1: unbounded.
            causal makes right 0.
        softcap: c > 0 replaces the scaled scores x by c * tanh(x / c).
        alibi_slopes: float32 (nheads,) or (batch_size, nheads): -slope * |i + Lk - Lq - j| is added to the score of
            query i and key j. They get no gradient. A call holds 4 * nheads * (Lq + Lk) bytes for it, for each batch
            element if there are slopes of each.
        deterministic: not read: torch.use_deterministic_algorithms rules this.
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out (batch_size, Lq, nheads, headdim of v) in q's dtype; with return_attn_probs (out, softmax_lse, S_dmask):
        softmax_lse (batch_size, nheads, Lq) in float32 (float64 for float64), the natural logarithm of the sum of
        exponentiated scores, -inf where there is no key, differentiable; S_dmask (batch_size, nheads, Lq, Lk) in q's
        dtype, the weights, negative where dropped, and empty (0,) without dropout.

    Raises:
        TypeError: an argument of the wrong type. RuntimeError: shapes, dtypes or devices that do not fit, dropout_p
        outside [0, 1]. ValueError: softmax_scale that is not finite, softcap out of range.

    Source of signature and meaning: T. Dao, "FlashAttention-2", 2023, and its package flash_attn.
    """
    check_tensors(q, k, v)
    return _of_batch(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` of keys and values in one tensor kv (batch_size, Lk, 2, nheads_k, headdim)."""
    check_dims("kv", kv, "batch_size, seqlen", 2, "nheads_k, headdim")
    k, v = kv.unbind(2)
    check_tensors(q, k, v, names=("q", "kv", "kv"))
    return _of_batch(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` of one tensor qkv (batch_size, L, 3, nheads, headdim)."""
    check_dims("qkv", qkv, "batch_size, seqlen", 3, "nheads, headdim")
    q, k, v = qkv.unbind(2)
    check_tensors(q, k, v, names=("qkv", "qkv", "qkv"))
    return _of_batch(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)


def _of_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
) -> Results:
    """`flash_attn_func` of tensors that fit."""
    left, right = bounds(causal, window_size)
    window = None if left is right is None else (left, right)
    scale, softcap = scale_of(softmax_scale), cap_of(softcap)
    alibi = None
    if alibi_slopes is not None:
        (batch, seqlen_q, heads, _), seqlen_k = q.shape, k.shape[1]
        check_slopes(alibi_slopes, batch, heads, q.device)
        alibi = Alibi.by_distance(alibi_slopes, seqlen_q, seqlen_k, q.dtype)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if return_attn_probs:
        out, lse, s_dmask = attend(q, k, v, dropout_p, scale, window, softcap, None, alibi)
        return out.transpose(1, 2), lse, s_dmask
    result: Any = attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        **({} if alibi is None else alibi.options),
        scale=scale,
        enable_gqa=True,
        window=window,
        alignment="bottom_right",
        softcap=softcap,
    )
    return result.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Results:
    """Attention within each of batch_size sequences that are packed one after the other.

    Nothing waits for a GPU, and one compiled graph serves all lengths.

    Args:
        q: (total_q, nheads, headdim), the queries of all sequences. k: (total_k, nheads_k, headdim), v likewise.
        cu_seqlens_q: (batch_size + 1,), int32 or int64: sequence s has the queries cu_seqlens_q[s] to
            cu_seqlens_q[s + 1]; the first is 0, the last total_q or less. Queries behind the last attend to nothing.
        cu_seqlens_k: the same of the keys.
        max_seqlen_q, max_seqlen_k: ints, not read but as the sizes of S_dmask.
        alibi_slopes: float32 (nheads,) or (batch_size, nheads). Of (nheads,), where cu_seqlens_k is cu_seqlens_q, one
            tensor, a call holds 4 * nheads * (total_q + total_k) bytes for it; elsewhere, unless causal and of 16 bits,
            4 * nheads * total_q * total_k.
        block_table: int32 or int64 (batch_size, pages of a sequence): k and v are pools of pages then, (num_pages,
            page_size, nheads_k, headdim), page_size a power of two from 16 on: token i of sequence s is row
            i % page_size of page block_table[s, i // page_size], and cu_seqlens_k says how many tokens each has. There
            is no gradient and no dropout then.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as in
            `flash_attn_func`, within each sequence.

    Returns:
        out (total_q, nheads, headdim of v); with return_attn_probs (out, softmax_lse, S_dmask): softmax_lse
        (nheads, total_q), S_dmask (batch_size, nheads, max_seqlen_q, max_seqlen_k), 0 beyond a sequence's length, and
        empty (0,) without dropout.

    Raises:
        As `flash_attn_func`; RuntimeError also for cu_seqlens of another shape, dtype or device; and, as far as values
        are looked at (on the CPU outside of graphs, elsewhere where ATTNKERN_CHECK=1 is in the environment), for
        cu_seqlens that don't start at 0, fall, or exceed the tokens, and numbers in block_table that no page has.
    """
    if block_table is not None:
        options: Any = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
        return _of_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, *options)
    check_tensors(q, k, v, packed=True)
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    lengths = cu_seqlens_q, cu_seqlens_k, longest
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    return _of_packed(q, k, v, *lengths, *options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` of keys and values in one tensor kv (total_k, 2, nheads_k, headdim)."""
    check_dims("kv", kv, "total_k", 2, "nheads_k, headdim")
    k, v = kv.unbind(1)
    check_tensors(q, k, v, packed=True, names=("q", "kv", "kv"))
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    lengths = cu_seqlens_q, cu_seqlens_k, longest
    options: Any = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    return _of_packed(q, k, v, *lengths, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` of one tensor qkv (total, 3, nheads, headdim)."""
    check_dims("qkv", qkv, "total", 3, "nheads, headdim")
    check_device("cu_seqlens", cu_seqlens, qkv.device)
    check_ends("cu_seqlens", cu_seqlens, qkv)
    q, k, v = qkv.unbind(1)
    check_tensors(q, k, v, packed=True, names=("qkv", "qkv", "qkv"))
    lengths = cu_seqlens, cu_seqlens, {"max_seqlen": max_seqlen}
    options: Any = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    return _of_packed(q, k, v, *lengths, *options)


def _of_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest: dict[str, Any],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
) -> Results:
    """`flash_attn_varlen_func` of tensors that fit; `longest` has the caller's sizes of S_dmask by name, that of the
    queries first and that of the keys last."""
    if return_attn_probs and dropout_p != 0:
        _check_longest(longest)
    check_device("cu_seqlens_q", cu_seqlens_q, q.device)
    check_device("cu_seqlens_k", cu_seqlens_k, q.device)
    left, right = bounds(causal, window_size)
    scale, softcap = scale_of(softmax_scale), cap_of(softcap)
    ranges = packed_ranges(q, k, cu_seqlens_q, cu_seqlens_k, None, left, right, "bottom_right")
    alibi = None
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, cu_seqlens_q.shape[0] - 1, q.shape[1], q.device)
        alibi = _packed_alibi(alibi_slopes, q, k, cu_seqlens_q, cu_seqlens_k, right)
    q, k, v = heads_first(q, k, v, batch=return_attn_probs)
    if return_attn_probs:
        out, lse, s_dmask = attend(q, k, v, dropout_p, scale, None, softcap, ranges, alibi)
        if s_dmask.dim() > 1:
            sizes = [*longest.values()]
            s_dmask = _unpacked(s_dmask[0], cu_seqlens_q, cu_seqlens_k, sizes[0], sizes[-1])
        return tokens_first(out), lse.squeeze(0), s_dmask
    result: Any = attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        **({} if alibi is None else alibi.options),
        scale=scale,
        enable_gqa=True,
        softcap=softcap,
        key_ranges=ranges,
    )
    return tokens_first(result)


def _of_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
) -> Results:
    """`flash_attn_varlen_func` of keys and values in pages, which are counted through from sequence to sequence."""
    check_dims("cu_seqlens_q", cu_seqlens_q, "batch_size + 1")
    check_dims("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape[0])
    sequences = cu_seqlens_q.shape[0] - 1
    check_pages(q, k, v, block_table, ("k", "v"), True, sequences)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("block_table", block_table)):
        check_device(name, x, q.device)
    if dropout_p != 0:
        raise RuntimeError(f"attnkern: dropout_p must be 0 beside a block_table, got {dropout_p}")
    left, right = bounds(causal, window_size)
    scale, softcap = scale_of(softmax_scale), cap_of(softcap)
    room = block_table.shape[1] * k.shape[1]
    check_ends("cu_seqlens_k", cu_seqlens_k, q, sequences * room)
    lengths = cu_seqlens_k.to(torch.int64).diff()
    if may_look(lengths) and bool((lengths > room).any()):
        raise RuntimeError(
            f"attnkern: cu_seqlens_k must give a sequence at most the {room} keys that block_table has room for, got "
            f"{int(lengths.max())}"
        )
    ranges = paged_ranges(q, block_table, k.shape[1], cu_seqlens_q, lengths, left, right, "bottom_right")
    alibi = None
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, sequences, q.shape[1], q.device)
        row, place = places(q.shape[0], cu_seqlens_q)
        place = place + F.pad(lengths - cu_seqlens_q.diff(), (0, 1))[row]
        slopes_q = slopes_k = alibi_slopes[:, None]
        if alibi_slopes.dim() == 2:
            slopes_q = F.pad(alibi_slopes, (0, 0, 0, 1))[row].mT
            slopes_k = alibi_slopes.mT.repeat_interleave(room, 1)
        keys = torch.arange(room, device=q.device).repeat(sequences)
        alibi = Alibi.of(slopes_q[None], slopes_k[None], place, keys, right, q.dtype)
    [q] = heads_first(q, batch=True)
    k, v, table = k.transpose(1, 2), v.transpose(1, 2), block_table.reshape(1, -1)
    out, lse, s_dmask = attend(q, k, v, 0, scale, None, softcap, ranges, alibi, table)
    out = tokens_first(out)
    return (out, lse.squeeze(0), s_dmask) if return_attn_probs else out


def _packed_alibi(
    slopes: Tensor, q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, right: int | None
) -> Alibi | None:
    """Places are counted from the first key of each sequence."""
    if slopes.dim() == 1 and cu_seqlens_q is cu_seqlens_k and q.shape[0] == k.shape[0]:
        return Alibi.by_distance(slopes, q.shape[0], k.shape[0], q.dtype)
    lengths_q, lengths_k = (F.pad(ends.to(torch.int64).diff(), (0, 1)) for ends in (cu_seqlens_q, cu_seqlens_k))
    (of_q, places_q), (of_k, places_k) = (
        places(x.shape[0], ends) for x, ends in ((q, cu_seqlens_q), (k, cu_seqlens_k))
    )
    places_q = places_q + (lengths_k - lengths_q)[of_q]
    if slopes.dim() == 1:
        slopes_q = slopes_k = slopes[:, None]
    else:
        slopes_q, slopes_k = (F.pad(slopes, (0, 0, 0, 1))[sequence].mT for sequence in (of_q, of_k))
    return Alibi.of(slopes_q[None], slopes_k[None], places_q, places_k, right, q.dtype)


def _check_longest(longest: dict[str, Any]) -> None:
    """Raises unless they can be sizes of S_dmask: integers, in 0-d tensors as well, that are no less than 0."""
    for name, n in longest.items():
        n = int_of_numpy(n)
        if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt, Tensor)):
            raise type_error(name, "int", n)
        if not isinstance(n, Tensor) and n < 0:
            raise RuntimeError(f"attnkern: {name} must be 0 or more, got {n}")


def _unpacked(weights: Tensor, ends_q: Tensor, ends_k: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(batch_size, nheads, seqlen_q, seqlen_k) of weights (nheads, total_q, total_k) between packed tokens."""
    tokens, inside = [], []
    for ends, seqlen, total in ((ends_q, seqlen_q, weights.shape[1]), (ends_k, seqlen_k, weights.shape[2])):
        place = torch.arange(seqlen, device=ends.device)
        inside.append(place < ends.diff()[:, None])
        tokens.append((ends[:-1, None] + place).clamp(max=max(total - 1, 0)).to(torch.int64))
    found = weights[:, tokens[0][:, :, None], tokens[1][:, None, :]].transpose(0, 1)
    return found.where((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)
