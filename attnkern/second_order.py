"""Forward-mode and second derivatives in plain torch, a tile of whole rows of scores at a time.

With the definition of `backends.reference` (x the scores, p the probabilities, D their dropout, z = softmax_scale *
q k^T):

    T     = x'(z) * softmax_scale * (tq k^T + q tk^T) + tbias     the scores' tangent; x'(z) = 1 - tanh^2(z / softcap)
    tlse  = rowsum(p T)
    tau   = T - tlse
    tout  = D(p tau) v + D(p) tv

`backward` gives the gradient of f = <grad_out, out> + <grad_lse, lse>. Where its results are differentiated, with the
cotangents cot_dq, ..., that is the gradient of f's derivative along (cot_dq, ...), by the symmetry of second
derivatives. With the cotangents as tangents, dp = D(grad_out v^T) and d = dp - rowsum(p dp):

    dx         = p (d + grad_lse)
    w          = p (g - rowsum(p g)),  g = tau (d + grad_lse) + D(grad_out tv^T)
    g_grad_out = tout,  g_grad_lse = tlse,  gv = D(p tau)^T grad_out,  gbias = w
    gz         = x'(z) w + x''(z) (x's tangent before x') dx
    gq         = softmax_scale * (gz k + x'(z) dx tk),  gk = softmax_scale * (gz^T q + (x'(z) dx)^T tq)

With sinks, p and its row sums include the sink, an entry with x = the sink, T = tsinks and dp = 0, whose w is gsinks.
(tau and d have mean zero under p: what all entries of a row share cancels before it is rounded.) A row without keys has
p = 0 everywhere, and so every derivative. Rows are independent, so a tile that holds whole rows needs no saved lse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import bits, relative, rng, tiles
from .arguments import autocasts
from .backends import reference
from .params import (
    GRAD_BIAS,
    GRAD_GRAD_LSE,
    GRAD_GRAD_OUT,
    GRAD_K,
    GRAD_Q,
    GRAD_SINKS,
    GRAD_V,
    UNBOUNDED,
    AttentionParams,
    empty_like_heads,
)
from .signatures import Derivatives, Inputs

_FEWEST_ROWS = 32
"""Rows of a tile, were there ever so many keys: for fewer, reading the keys takes longer than the products."""


def tangent(
    inputs: Inputs,
    tangents: Derivatives,
    out: Tensor,
    lse: Tensor,
    params: AttentionParams,
) -> tuple[Tensor, Tensor]:
    """`attnkern::tangent` (ops.py) on any device."""
    q, v = inputs.q, inputs.v
    if autocasts(q.device):
        with torch.autocast(q.device.type, enabled=False):
            return tangent(inputs, tangents, out, lse, params)
    tout = empty_like_heads(q, v.shape[-1])
    tlse = lse.new_empty(q.shape[:3])
    for tile in _tiles(inputs, tangents, params, lse.dtype):
        tout[tile.at] = tile.tout()
        tlse[tile.at] = tile.tlse
        del tile  # before the next one is made
    return tout, tlse


def second_backward(
    cotangents: Derivatives,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    params: AttentionParams,
    grad_mask: int,
) -> tuple[Tensor, ...]:
    """`attnkern::second_backward` (ops.py) on any device."""
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    if autocasts(q.device):
        with torch.autocast(q.device.type, enabled=False):
            return second_backward(cotangents, grad_out, grad_lse, inputs, out, lse, params, grad_mask)
    dtype = lse.dtype

    def wanted(bit: int) -> bool:
        return bool(grad_mask & bit)

    g_grad_out = empty_like_heads(q, v.shape[-1]) if wanted(GRAD_GRAD_OUT) else q.new_empty(0)
    g_grad_lse = lse.new_empty(q.shape[:3] if wanted(GRAD_GRAD_LSE) else (0,))
    gq = empty_like_heads(q, q.shape[-1]) if wanted(GRAD_Q) else q.new_empty(0)
    # What several tiles add to is rounded to its own dtype at the end.
    gk, gv = (
        torch.zeros_like(empty_like_heads(x, x.shape[-1]), dtype=dtype) if wanted(bit) else x.new_empty(0)
        for x, bit in ((k, GRAD_K), (v, GRAD_V))
    )
    gbias = bias.new_zeros(bias.shape, dtype=dtype) if bias is not None and wanted(GRAD_BIAS) else None
    gsinks = lse.new_empty(0)
    if inputs.sinks is not None and wanted(GRAD_SINKS):
        gsinks = torch.zeros_like(inputs.sinks)
    for tile in _tiles(inputs, cotangents, params, dtype):
        rows_grad = grad_out[tile.at].to(dtype).masked_fill(tile.dead, 0.0)
        if wanted(GRAD_GRAD_OUT):
            g_grad_out[tile.at] = tile.tout()
        if wanted(GRAD_GRAD_LSE):
            g_grad_lse[tile.at] = tile.tlse
        if wanted(GRAD_V) and tile.tau is not None:
            _add_to_heads(gv, tile, tile.drop(tile.p * tile.tau).mT @ rows_grad)
        if wanted(GRAD_Q | GRAD_K | GRAD_BIAS | GRAD_SINKS):
            rows_grad_lse = None if grad_lse is None else grad_lse[tile.at].to(dtype)
            w, dx, of_sink = tile.second_derivatives(rows_grad, rows_grad_lse)
            if gsinks.numel():
                at = _of_heads(tile.at, gsinks)
                gsinks[at] += of_sink.sum(-1).sum_to_size(gsinks[at].shape)
            if gbias is not None:
                _add_to_bias(gbias, tile, w, q.shape[2])
            w, dx = tile.of_products(w, dx)
            if wanted(GRAD_Q):
                gq[tile.at] = w @ tile.k if tile.tk is None else w @ tile.k + dx @ tile.tk
            if wanted(GRAD_K):
                _add_to_heads(gk, tile, w.mT @ tile.q if tile.tq is None else w.mT @ tile.q + dx.mT @ tile.tq)
            del w, dx
        del tile  # before the next one is made
    if gbias is not None:
        assert bias is not None
        gbias = gbias.to(bias.dtype)
    gbias = q.new_empty(0) if gbias is None else gbias
    return g_grad_out, g_grad_lse, gq, gk.to(k.dtype), gv.to(v.dtype), gbias, gsinks


class _Tile(NamedTuple):
    """A range of rows with all the keys that they attend to, of some heads of some batch elements."""

    at: tuple[slice, slice, slice]  # batch elements, query heads, rows
    keys: slice
    num_heads: int  # of the problem
    params: AttentionParams
    q: Tensor  # the tile's rows, in the dtype of computation, as all that follows
    k: Tensor  # the tile's keys for each of its query heads
    v: Tensor
    tq: Tensor | None
    tk: Tensor | None
    tv: Tensor | None
    keep: Tensor | None  # what dropout leaves
    tanh: Tensor | None  # tanh(z / softcap); None: no softcap
    slope: Tensor | None  # x'(z), likewise
    tz: Tensor | None  # z's tangent
    p: Tensor
    dead: Tensor  # rows without keys
    tau: Tensor | None  # None: 0
    tlse: Tensor
    p_sink: Tensor | None  # as tlse
    t_sink: Tensor | None  # without rows

    def drop(self, x: Tensor) -> Tensor:
        return x if self.keep is None else reference.drop(x, self.keep, self.params.dropout_p)

    def tout(self) -> Tensor:
        moved = self.q.new_zeros(()) if self.tau is None else self.drop(self.p * self.tau) @ self.v
        return moved if self.tv is None else moved + self.drop(self.p) @ self.tv

    def second_derivatives(self, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """w and dx; the sink's w (0 without one)."""
        p = self.p
        d = self.drop(grad_out @ self.v.mT)
        rest = -(p * d).sum(-1, keepdim=True)
        if grad_lse is not None:
            rest += grad_lse.unsqueeze(-1)
        d.add_(rest)
        g = torch.zeros_like(d) if self.tau is None else self.tau * d
        if self.tv is not None:
            g.add_(self.drop(grad_out @ self.tv.mT))
        mean = (p * g).sum(-1, keepdim=True)
        of_sink = p.new_zeros(())
        if self.p_sink is not None:
            moved = -self.tlse if self.t_sink is None else self.t_sink.unsqueeze(-1) - self.tlse
            of_sink = self.p_sink * (moved * rest.squeeze(-1))
            mean += of_sink.unsqueeze(-1)
            of_sink = of_sink - self.p_sink * mean.squeeze(-1)
        return g.sub_(mean).mul_(p), d.mul_(p), of_sink

    def of_products(self, w: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of gq and gk beside k and q, and beside tk and tq, from w and dx (which it overwrites)."""
        if self.slope is not None:
            w.mul_(self.slope)
            dx.mul_(self.slope)
            if self.tz is not None and self.tanh is not None:  # x'' = -2 / softcap * tanh * x'
                w.add_(self.tanh * dx * self.tz, alpha=-2.0 / self.params.softcap)
        return w.mul_(self.params.softmax_scale), dx.mul_(self.params.softmax_scale)


def _tiles(inputs: Inputs, tangents: Derivatives, params: AttentionParams, dtype: torch.dtype) -> Iterator[_Tile]:
    """Every row of every head once."""
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    batch, num_heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[-2]
    sizes = seqlen_q, seqlen_k
    tq, tk, tv, tbias, tsinks = tangents
    rows_at_a_time = max(_FEWEST_ROWS, tiles.at_a_time(seqlen_k, q.device))
    heads_at_a_time = tiles.at_a_time(seqlen_q * seqlen_k, q.device)
    batches_at_a_time = tiles.at_a_time(num_heads * seqlen_q * seqlen_k, q.device)
    for batches in tiles.slices(batch, batches_at_a_time):
        for heads in tiles.slices(num_heads, heads_at_a_time):

            def of_heads(x: Any) -> Any:
                if x is None:
                    return None
                return tiles.heads_of(x if x.shape[0] == 1 else x[batches], heads, num_heads)  # noqa: B023

            block = [None if x is None else of_heads(x).to(dtype) for x in (q, k, v, tq, tk, tv)]
            masks = of_heads(bias), of_heads(tbias), of_heads(inputs.key_ranges)
            of_sinks = [None if x is None else x[_of_heads((batches, heads), x)] for x in (inputs.sinks, tsinks)]
            for rows in tiles.slices(seqlen_q, rows_at_a_time):
                keys = _seen(rows, seqlen_k, params)
                keep = None
                if inputs.philox_seed is not None:
                    of_all = batch, num_heads, *sizes
                    keep = rng.keep_mask(inputs.philox_seed, params.dropout_p, *of_all, heads, rows, batches)[..., keys]
                yield _tile((batches, heads, rows), keys, num_heads, sizes, block, masks, of_sinks, keep, params)


def _tile(
    at: tuple[slice, slice, slice],
    keys: slice,
    num_heads: int,
    sizes: tuple[int, int],
    block: list[Any],
    masks: tuple[Tensor | None, Tensor | None, Tensor | None],
    of_sinks: list[Tensor | None],
    keep: Tensor | None,
    params: AttentionParams,
) -> _Tile:
    """A tile of the heads whose q, k, v, tq, tk, tv are `block`, bias, tbias and key_ranges `masks`, and sinks and
    tsinks `of_sinks`."""
    rows = at[2]
    parts: list[Any] = [None if x is None else x[:, :, rows] for x in block[::3]]
    q, tq = parts
    parts = [None if x is None else x[:, :, keys] for x in (*block[1:3], *block[4:])]
    k, v, tk, tv = parts
    bias, tbias = (None if x is None else _of_tile(x, rows, keys, sizes) for x in masks[:2])
    if (ranges := masks[2]) is not None:
        ranges = (ranges if ranges.shape[2] == 1 else ranges[:, :, rows]) - keys.start
    positions = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=q.device)
    shifted = params._replace(band_offset=params.band_offset - keys.start)
    live = reference.may_attend(q, k.shape[2], bias, ranges, shifted, positions)
    q, tq, k, v, tk, tv = reference.attended(live, [q, tq], [k, v, tk, tv])
    x = (q @ k.mT).mul_(params.softmax_scale)
    tz = _sum(None if tq is None else tq @ k.mT, None if tk is None else q @ tk.mT)
    moved = tz = None if tz is None else tz.mul_(params.softmax_scale)
    tanh = slope = None
    if params.softcap:
        tanh = x.div_(params.softcap).tanh_()
        slope = 1.0 - tanh.square()
        x = params.softcap * tanh
        moved = None if tz is None else tz * slope
    sinks, t_sink = of_sinks
    x, dead = reference.alive(reference.with_sinks(reference.masked(x, bias, live), sinks))
    p, p_sink = x.softmax(-1).masked_fill_(dead, 0.0), None
    if sinks is not None:
        p, p_sink = p[..., :-1], p[..., -1]

    moved = _sum(moved, None if tbias is None else tbias.to(p.dtype).expand(p.shape))
    tau, tlse = None, p.new_zeros(p.shape[:-1])
    if moved is not None:
        tlse = (p * moved).sum(-1)
    if p_sink is not None and t_sink is not None:
        tlse = tlse + p_sink * t_sink.unsqueeze(-1)
        moved = p.new_zeros(p.shape) if moved is None else moved
    if moved is not None:
        tau = moved - tlse.unsqueeze(-1)
    moves = tq, tk, tv, keep, tanh, slope, tz, p, dead, tau, tlse, p_sink, t_sink
    return _Tile(at, keys, num_heads, params, q, k, v, *moves)


def _of_tile(x: Tensor, rows: slice, keys: slice, sizes: tuple[int, int]) -> Tensor:
    """The part of a bias, or of its tangent, of a tile of `sizes` scores."""
    if relative.by_distance(x):
        return relative.dense(x, *sizes, rows)[..., keys]
    if bits.in_bits(x):
        return bits.bools(x if x.shape[2] == 1 else x[:, :, rows], sizes[1])[..., keys]
    return x[:, :, rows if x.shape[2] != 1 else slice(1), keys if x.shape[3] != 1 else slice(1)]


def _of_heads(at: tuple[slice, ...], x: Tensor) -> tuple[slice, slice]:
    """Where in x (B|1, H) the batch elements and heads of a tile are."""
    return at[0] if x.shape[0] != 1 else slice(1), at[1]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, in a's memory, of which either may be None."""
    return b if a is None else a if b is None else a.add_(b)


def _seen(rows: slice, seqlen_k: int, params: AttentionParams) -> slice:
    """The keys between the first and the last that the band lets any of the rows attend to."""
    begin, end = 0, seqlen_k
    if params.window_left != UNBOUNDED:
        begin = min(max(begin, rows.start + params.band_offset - params.window_left), seqlen_k)
    if params.window_right != UNBOUNDED:
        end = min(end, rows.stop + params.band_offset + params.window_right)
    return slice(begin, max(begin, end))


def _add_to_heads(grad: Tensor, tile: _Tile, part: Tensor) -> None:
    """Adds what each query head of the tile gives its key or value head. (One by one: in a fixed order.)"""
    batches, heads, _ = tile.at
    if grad.shape[1] == tile.num_heads:
        grad[batches, heads, tile.keys] += part
        return
    group = tile.num_heads // grad.shape[1]
    for i, head in enumerate(range(heads.start, heads.stop)):
        grad[batches, head // group, tile.keys] += part[:, i]


def _add_to_bias(grad: Tensor, tile: _Tile, part: Tensor, seqlen_q: int) -> None:
    """Adds a tile of the gradient of the scores to that of the bias, summed where the bias was broadcast."""
    table = relative.by_distance(grad)
    sizes = grad.shape[:2] if table else grad.shape
    at = tuple(slice(None) if n == 1 else index for n, index in zip(sizes, (*tile.at, tile.keys), strict=False))
    if 1 in sizes:
        part = part.sum([i for i, n in enumerate(sizes) if n == 1], keepdim=True)
    if table:
        relative.add_diagonals(grad[at], part, tile.at[2].start, tile.keys.start, seqlen_q)
    else:
        grad[at] += part
