"""flash_attn's attention to a cache of keys and values, which it extends."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_bool, may_look, show
from ..packed import ranges_within_window
from ..params import check_softcap, int_of_numpy
from .arguments import (
    bounds,
    cap_of,
    check_device,
    check_dims,
    check_pages,
    check_same_sizes,
    check_slopes,
    check_tensors,
    check_vector,
    scale_of,
)
from .calls import Alibi, attend
from .layers.rotary import check_angles, turn


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Writes new keys and values into a cache, and attends to all that it then holds. There is no gradient.

    An int for cache_seqlens is the quickest: the call then takes a slice of the cache. A tensor costs no wait for a
    GPU, and one compiled graph serves all lengths.

    Args:
        q: (batch_size, Lq, nheads, headdim).
        k_cache: (batch_cache, seqlen_cache, nheads_k, headdim), v_cache likewise; changed where k and v are given.
        k, v: (batch_size, Lnew, nheads_k, headdim), written behind the cache_seqlens tokens that each sequence has.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), positions >= seqlen_cache, beside k and v: these are turned
            before they are written, from position cache_seqlens on, and so is q if causal or with a window (more
            queries than new keys may then need more positions); else all of q is turned as at position cache_seqlens.
        cache_seqlens: how many tokens of the cache there are, for all or, int32 or int64 (batch_size,), for each
            sequence; None: all.
        cache_batch_idx: int32 or int64 (batch_size,): which row of the cache is each sequence's; None: the first ones.
            The chosen rows are copied in each call.
        cache_leftpad: int32 or int64 (batch_size,): where each sequence begins in its row; None: 0.
        block_table: int32 or int64 (batch_size, pages of a sequence): k_cache and v_cache are pools of pages then,
            (num_pages, page_size, nheads_k, headdim), page_size a power of two from 16 on, and seqlen_cache is pages of
            a sequence * page_size: token i of sequence b is row i % page_size of page block_table[b, i // page_size].
            cache_batch_idx must be None.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`, the last query level with
            the last key that the cache then holds. Where cache_seqlens is a tensor, slopes make a bias of
            4 * batch_size * nheads * Lq * seqlen_cache bytes, unless causal and of 16 bits: then one of 4 * nheads *
            seqlen_cache bytes, which rounds by more than float16 does where slope * place of a key is above 8192.
        rotary_interleaved: as in `attnkern.flash_attn.layers.rotary.apply_rotary_emb`.
        num_splits: not read.
        return_softmax_lse: also return the log-sum-exp.

    Returns:
        out (batch_size, Lq, nheads, headdim of v_cache); with return_softmax_lse (out, softmax_lse (batch_size, nheads,
        Lq)), as in `flash_attn_func`.

    Raises:
        As `flash_attn_func`; RuntimeError also for arguments that contradict each other, and, as far as values are
        looked at (on the CPU outside of graphs, elsewhere where ATTNKERN_CHECK=1 is in the environment), for lengths
        and rows that the cache doesn't have, and numbers in block_table that no page has.
    """
    seqlens = int_of_numpy(cache_seqlens)
    _check(q, k_cache, v_cache, k, v, seqlens, cache_batch_idx, cache_leftpad, block_table)
    left, right = bounds(causal, window_size)
    scale, softcap = scale_of(softmax_scale), cap_of(softcap)
    check_softcap(softcap, q.dtype)  # before anything is written
    (batch, seqlen_q, heads, _), seqlen_cache = q.shape, _room(k_cache, block_table)
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, batch, heads, q.device)
    check_bool("rotary_interleaved", rotary_interleaved)
    if rotary_cos is not None or rotary_sin is not None:
        _check_rotary(q, k, rotary_cos, rotary_sin, seqlen_cache)
        turned: Any = functools.partial(
            turn, interleaved=rotary_interleaved, seqlen_offsets=seqlens, names=("rotary_cos", "rotary_sin")
        )
        each = left is not None or right is not None
        asked = q if each else q.flatten(1, 2).unsqueeze(1)  # all its tokens as heads of one
        q = turned(asked, rotary_cos, rotary_sin).reshape(q.shape)
        k = turned(k, rotary_cos, rotary_sin)
    total: Any = seqlen_cache if seqlens is None else seqlens
    if k is not None and v is not None:
        _append(k_cache, v_cache, k, v, total, cache_batch_idx, block_table)
        total = total + k.shape[1]

    # Of one length, the keys are a slice; of several, ranges say how many of each sequence there are.
    of_one = not isinstance(total, Tensor) and block_table is None
    seqlen_k = total if of_one else seqlen_cache
    keys, values = (x[:, :seqlen_k] if of_one else x for x in (k_cache, v_cache))
    if block_table is not None:
        total = total if isinstance(total, Tensor) else torch.full((batch,), total, device=q.device)
    elif cache_batch_idx is None:
        keys, values = keys[:batch], values[:batch]
    else:
        keys, values = keys[cache_batch_idx], values[cache_batch_idx]
    ends = torch.full((1, 1), total, device=q.device) if of_one else total.to(torch.int64)[:, None]
    level = ends - seqlen_q + torch.arange(seqlen_q, device=q.device)
    window, ranges = (None if left is right is None else (left, right)), None
    if not of_one or cache_leftpad is not None:
        begin = torch.zeros_like(ends) if cache_leftpad is None else cache_leftpad.to(torch.int64)[:, None]
        ranges = ranges_within_window(begin, ends, level, left, right)
        window = None
    alibi = None
    if alibi_slopes is not None and of_one:
        alibi = Alibi.by_distance(alibi_slopes, seqlen_q, seqlen_k, q.dtype)
    elif alibi_slopes is not None:
        slopes = alibi_slopes.reshape(-1, heads, 1)
        places = torch.arange(seqlen_k, device=q.device)
        alibi = Alibi.of(slopes, slopes, level[:, None], places, right, q.dtype)
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
    out, lse, _ = attend(q, keys, values, 0, scale, window, softcap, ranges, alibi, block_table)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _room(cache: Tensor, block_table: Tensor | None) -> int:
    """How many keys of a sequence there can be."""
    return cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens: int | Tensor,
    rows: Tensor | None,
    block_table: Tensor | None,
) -> None:
    batch, new = k.shape[:2]
    if block_table is not None:
        size = k_cache.shape[1]
        places = torch.arange(new, device=k.device) + (seqlens[:, None] if isinstance(seqlens, Tensor) else seqlens)
        pages, count = block_table.to(torch.int64).gather(1, (places // size).expand(batch, -1)), k_cache.shape[0]
        if may_look(pages) and bool(((pages < 0) | (pages >= count)).any()):
            wrong = int(pages[(pages < 0) | (pages >= count)][0])
            raise RuntimeError(
                f"attnkern: block_table must hold numbers of pages from 0 to {count - 1} where k and v are written, "
                f"got {wrong}"
            )
        pages = pages.where(pages >= 0, count)  # of which torch says that there is no such row, instead of the last
        for cache, x in ((k_cache, k), (v_cache, v)):
            cache[pages, places % size] = x
        return
    for cache, x in ((k_cache, k), (v_cache, v)):
        if rows is None and not isinstance(seqlens, Tensor):
            cache[:batch, seqlens : seqlens + new] = x
            continue
        row = torch.arange(batch, device=x.device) if rows is None else rows
        places = torch.arange(new, device=x.device) + (seqlens[:, None] if isinstance(seqlens, Tensor) else seqlens)
        cache[row[:, None], places] = x


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    seqlens: Any,
    rows: Tensor | None,
    leftpad: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Raises where tensors and lengths don't fit each other."""
    if block_table is not None:
        if rows is not None:
            raise RuntimeError("attnkern: cache_batch_idx must be None beside a block_table, whose rows say the same")
        check_dims("q", q, "batch_size, seqlen, nheads, headdim")
        check_pages(q, k_cache, v_cache, block_table, ("k_cache", "v_cache"), False, q.shape[0])
        check_device("block_table", block_table, q.device)
    else:
        _check_caches(q, k_cache, v_cache, rows)
    batch, caches, seqlen_cache = q.shape[0], k_cache.shape[0], _room(k_cache, block_table)
    if (k is None) != (v is None):
        raise RuntimeError(f"attnkern: k and v must be given together, got {'v' if k is None else 'k'} alone")
    new = 0
    if k is not None and v is not None:
        check_tensors(q, k, v)
        for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
            if x.shape[2:] != cache.shape[2:] or x.dtype != cache.dtype:
                raise RuntimeError(
                    f"attnkern: {name} must have {name}_cache's nheads_k, headdim and dtype, "
                    f"{show(cache.shape[2:])} {show(cache.dtype)}, got {show(x.shape[2:])} {show(x.dtype)}"
                )
            if any(size > 1 and step == 0 for size, step in zip(cache.shape, cache.stride(), strict=True)):
                raise RuntimeError(
                    f"attnkern: {name}_cache must have an element of its own for each place that {name} is written to, "
                    f"got an expanded tensor of strides {tuple(cache.stride())}"
                )
        if seqlens is None:
            raise RuntimeError("attnkern: cache_seqlens must be given beside k and v, which are written behind it")
        new = k.shape[1]
    for name, given in (("cache_seqlens", seqlens), ("cache_batch_idx", rows), ("cache_leftpad", leftpad)):
        if isinstance(given, Tensor) or (given is not None and name != "cache_seqlens"):
            check_vector(name, given, batch, q.device)
    if not (seqlens is None or isinstance(seqlens, (Tensor, torch.SymInt)) or type(seqlens) is int):
        raise TypeError(f"attnkern: argument 'cache_seqlens' must be int or Tensor, not {type(seqlens).__name__}")
    room = seqlen_cache - new
    _check_values("cache_batch_idx", rows, caches - 1, "k_cache's last row, {most}")
    _check_values("cache_seqlens", seqlens, room, "what k_cache has room for beside {new} new tokens, {most}", new=new)
    _check_values("cache_leftpad", leftpad, room if seqlens is None else seqlens, "cache_seqlens")


def _check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor | None) -> None:
    for name, x, heads in (("q", q, "nheads"), ("k_cache", k_cache, "nheads_k"), ("v_cache", v_cache, "nheads_k")):
        check_dims(name, x, "batch_size, seqlen", heads, "headdim")
    batch, caches = q.shape[0], k_cache.shape[0]
    if rows is None and caches < batch:
        raise RuntimeError(f"attnkern: k_cache must have q's batch_size {batch} or more, got {caches}")
    check_same_sizes("v_cache", v_cache, "k_cache", k_cache, "batch_size", "seqlen", "nheads_k")
    of_each = [x[:1].expand(batch, -1, -1, -1) for x in (k_cache, v_cache)]
    check_tensors(q, of_each[0], of_each[1], names=("q", "k_cache", "v_cache"))


def _check_values(name: str, x: Any, most: Any, which: str, **sizes: Any) -> None:
    """Raises where x is below 0 or above `most`, as far as values are looked at. `which` says what that is; {most} and
    {names of sizes} stand for numbers, which in a graph are constants from when they become text."""
    if x is None or any(isinstance(n, Tensor) and not may_look(n) for n in (x, most)):
        return
    if not isinstance(x, Tensor):
        found = [x] if x < 0 or x > most else []
    else:
        found = x[(x < 0) | (x > most)].tolist()
    if found:
        raise RuntimeError(f"attnkern: {name} must be from 0 to {which.format(most=most, **sizes)}, got {found[0]}")


def _check_rotary(q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None, seqlen_cache: int) -> None:
    if cos is None or sin is None:
        alone = "rotary_sin" if cos is None else "rotary_cos"
        raise RuntimeError(f"attnkern: rotary_cos and rotary_sin must be given together, got {alone} alone")
    if k is None:
        raise RuntimeError("attnkern: rotary_cos and rotary_sin must come with k and v, which they turn")
    check_angles(cos, sin, q, "rotary_cos", "rotary_sin")
    if cos.shape[0] < seqlen_cache:
        raise RuntimeError(
            f"attnkern: rotary_cos must have a row for each of k_cache's {seqlen_cache} tokens, got {cos.shape[0]}"
        )
