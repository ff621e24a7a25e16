"""The weights of a call in plain torch, a tile at a time: memory holds only those that nn.py and weights.py return.

The definition is that of `backends.reference`: p = exp(x - lse), with the lse of a forward kernel, or a softmax where
there is none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import rng
from .backends.reference import alive, drop, scores, with_sinks
from .params import AttentionParams
from .sinks import probability

TILE = {"cpu": 2**18, "cuda": 2**22}
"""Scores that `weights` holds at a time, a few times over: a cache's worth, or enough to keep a GPU busy."""

_LARGE_LSE = 1e4


def weights(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    lse: Tensor | None,
    philox_seed: Tensor | None,
    rows: Tensor | None,
    params: AttentionParams,
    average: bool,
) -> Tensor:
    """p (B, Hq, L, S), or its mean over the heads (B, L, S), in q's dtype: made in tiles, the result is all it holds.

    `lse` (B, Hq, L) is that of `forward`, which spares the softmax; None computes it. `rows` (L,) says which queries of
    the sequence q holds, None: all of them. Not differentiable: autograd/ is.
    """
    batch, num_heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[-2]
    out = q.new_zeros((batch, seqlen_q, seqlen_k) if average else (batch, num_heads, seqlen_q, seqlen_k))
    if torch.compiler.is_compiling():
        # Symbolic sizes: a loop over rows would fix them.
        row_tiles = [slice(None)]
        head_tiles = slices(num_heads, 1) if average else [slice(0, num_heads)]
    else:
        row_size = max(1, batch * seqlen_k)
        row_tiles = slices(seqlen_q, at_a_time(row_size, q.device))
        head_tiles = slices(num_heads, at_a_time(row_size * seqlen_q, q.device))
    for part in row_tiles:
        total: Tensor | None = None
        for heads in head_tiles:
            tile = _tile(q, k, bias, sinks, lse, philox_seed, rows, params, heads, part)
            if not average:
                out[:, heads, part] = tile
            else:
                tile = tile.sum(1)
                total = tile if total is None else total.add_(tile)
        if total is not None:
            out[:, part] = total.div_(num_heads)
    return out


def weights_of_heads(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    philox_seed: Tensor | None,
    rows: Tensor | None,
    params: AttentionParams,
    num_heads: int,
    heads: slice,
) -> Tensor:
    """p of some of `num_heads` heads as one differentiable expression of the tensors that `heads_of` has taken."""
    x, dead = alive(with_sinks(scores(q, k, bias, None, params, rows), sinks))
    p = x.softmax(-1)[..., : k.shape[-2]].masked_fill(dead, 0.0)
    if philox_seed is not None:
        batch, _, seqlen_q, seqlen_k = p.shape
        keep = rng.keep_mask(philox_seed, params.dropout_p, batch, num_heads, seqlen_q, seqlen_k, heads)
        p = drop(p, keep, params.dropout_p)
    return p


def _tile(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    lse: Tensor | None,
    philox_seed: Tensor | None,
    rows: Tensor | None,
    params: AttentionParams,
    heads: slice,
    part: slice,
) -> Tensor:
    """p of a range of heads and of rows, in the dtype of computation."""
    batch, num_heads, seqlen_q, _ = q.shape
    if part != slice(None) and rows is None:
        rows = torch.arange(seqlen_q, dtype=torch.int64, device=q.device)
    tile_bias = None if bias is None else heads_of(bias, heads, num_heads)
    if tile_bias is not None and tile_bias.shape[2] != 1:
        tile_bias = tile_bias[:, :, part]
    x = scores(
        q[:, heads, part],
        heads_of(k, heads, num_heads),
        tile_bias,
        None,
        params,
        None if rows is None else rows[part],
    )
    tile_sinks = None if sinks is None else sinks[:, heads]
    if lse is None:
        x, dead = alive(with_sinks(x, tile_sinks))
        p = x.softmax(-1)[..., : k.shape[-2]].masked_fill_(dead, 0.0)
    else:
        tile_lse = lse[:, heads, part, None].to(x.dtype)
        p = x.sub_(tile_lse.masked_fill(tile_lse == -math.inf, 0.0)).exp_()
        if bias is not None and bias.dtype != torch.bool:
            # Beside a large number (finfo.min, -1e9 in a whole row) lse has no room for log S: the row's sum has.
            total = p.sum(-1, keepdim=True)
            if tile_sinks is not None:
                total = total + probability(tile_lse.squeeze(-1), tile_sinks).unsqueeze(-1)
            p /= torch.where((tile_lse.abs() > _LARGE_LSE) & (total > 0), total, 1.0)
    if philox_seed is not None:
        keep = rng.keep_mask(philox_seed, params.dropout_p, batch, num_heads, seqlen_q, k.shape[-2], heads, part)
        p = drop(p, keep, params.dropout_p)
    return p


def heads_of(x: Tensor, heads: slice, num_heads: int) -> Tensor:
    """What the query heads `heads` of `num_heads` see of x, whose heads are as many, fewer (shared) or one."""
    if x.shape[1] == num_heads:
        return x[:, heads]
    if x.shape[1] == 1:
        return x
    group = num_heads // x.shape[1]
    first, end = heads.start // group, -(-heads.stop // group)
    shared = x[:, first:end].repeat_interleave(group, 1)  # no index: a DTensor takes none
    return shared[:, heads.start - first * group : heads.stop - first * group]


def at_a_time(size: int, device: torch.device) -> int:
    """How many rows or heads of so many scores make a tile: at least one."""
    return max(1, TILE.get(device.type, 2**18) // max(1, size))


def slices(n: int, size: int) -> list[slice]:
    """0..n in slices of at most `size`."""
    return [slice(at, min(at + size, n)) for at in range(0, n, size)]
