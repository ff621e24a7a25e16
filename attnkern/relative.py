"""Relative bias: a table of what the distance from a query to a key adds to their score, in O(L) memory.

A table (H|1, R) with its center c gives query i and key j the entry j - i + c; beyond its ends the last one counts.
Below the API a table has one entry for each distance that the scores have, L + S - 1, with c = L - 1. So it is a bias
whose rows are L - 1 - i entries into it: no (L, S) of it exists.

Sources: P. Shaw et al., "Self-attention with relative position representations", 2018; C. Raffel et al., "Exploring the
limits of transfer learning with a unified text-to-text transformer" (T5), 2020; O. Press et al., "Train short, test
long" (ALiBi), 2022.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import check_bool, integer, show, type_error
from .dtensor import replicated
from .params import AttentionParams


def alibi(slopes: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """ALiBi's bias, -slope * |distance|, as a table for `attention(..., relative_bias=)`.

    The last query is level with the last key.

    Args:
        slopes: (H,), floating point, on the device of the call.
        seqlen_q, seqlen_k: L and S of the call.

    Returns:
        (H, L + S - 1) in the dtype of slopes. Differentiable.

    Raises:
        TypeError: slopes is no floating-point tensor, a length no integer. RuntimeError: slopes of another shape.
        ValueError: a length below 0.

    Source: O. Press et al., "Train short, test long", 2022.
    """
    _check("slopes", slopes, "(H,)", 1)
    return slopes.unsqueeze(-1) * -_distances(seqlen_q, seqlen_k, slopes.device).abs()


def t5_relative_bias(
    weight: Tensor,
    num_buckets: int,
    max_distance: int,
    bidirectional: bool,
    seqlen_q: int,
    seqlen_k: int,
) -> Tensor:
    """T5's bias as a table for `attention(..., relative_bias=)`: the weight of each distance's bucket.

    The last query is level with the last key.

    Args:
        weight: (num_buckets, H), floating point: of `relative_attention_bias`, an nn.Embedding.
        num_buckets, max_distance: as in T5's configuration: half of the buckets hold one distance each, the others
            distances that grow by a factor, up to max_distance.
        bidirectional: True in an encoder: half of the buckets are for keys behind the query. False in a decoder.
        seqlen_q, seqlen_k: L and S of the call.

    Returns:
        (H, L + S - 1) in the dtype of weight. Differentiable.

    Raises:
        TypeError: weight is no floating-point tensor, bidirectional no bool, another argument no integer. RuntimeError:
        weight of another shape. ValueError: a length below 0, too few buckets, or a max_distance within those of one
        distance each.

    Source: C. Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer", 2020.
    """
    _check("weight", weight, "(num_buckets, H)", 2)
    integer("num_buckets", num_buckets), integer("max_distance", max_distance)
    check_bool("bidirectional", bidirectional)
    if weight.shape[0] != num_buckets:
        raise RuntimeError(f"attnkern: weight must have {num_buckets} rows (num_buckets), got {show(weight.shape)}")
    distance = _distances(seqlen_q, seqlen_k, weight.device)
    buckets = num_buckets // 2 if bidirectional else num_buckets
    near = buckets // 2
    if near < 1 or max_distance <= near:
        raise ValueError(
            f"attnkern: num_buckets must be at least {4 if bidirectional else 2} and max_distance above "
            f"{max(near, 1)}, got {num_buckets} and {max_distance}"
        )
    ahead = torch.where(distance > 0, buckets, 0) if bidirectional else torch.zeros_like(distance)
    apart = distance.abs() if bidirectional else (-distance).clamp(min=0)
    growth = (apart.clamp(min=1).float() / near).log() / math.log(max_distance / near) * (buckets - near)
    far = (near + growth.long()).clamp(max=buckets - 1)
    return weight[ahead + torch.where(apart < near, apart, far)].mT


def _distances(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Of a table's entries, j - i where the last query is level with the last key."""
    for name, n in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if integer(name, n) < 0:
            raise ValueError(f"attnkern: {name} must be at least 0, got {n}")
    return torch.arange(max(0, seqlen_q + seqlen_k - 1), device=device) - (seqlen_k - 1)


def _check(name: str, x: object, shape: str, dims: int) -> None:
    if not isinstance(x, Tensor):
        raise type_error(name, "Tensor", x)
    if not x.is_floating_point():
        raise TypeError(f"attnkern: {name} must be a floating-point tensor, got {show(x.dtype)}")
    if x.dim() != dims:
        raise RuntimeError(f"attnkern: {name} must have the shape {shape}, got {show(x.shape)}")


def by_distance(bias: Tensor | None) -> bool:
    """Whether the bias of an operator is a table, not (B|1, Hq|1, L|1, S|1)."""
    return bias is not None and bias.ndim == 3


def table(given: Tensor, center: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(B|1, H|1, L + S - 1) of a table (R,), (H|1, R) or (B|1, H|1, R) and its center."""
    entries = seqlen_q + seqlen_k - 1  # (No graph of torch 2.11 takes torch.sym_max of plain numbers.)
    entries = max(0, entries) if isinstance(entries, int) else torch.sym_max(entries, 0)
    # (Whether it is the table already is a question that would tie a graph to its lengths.)
    if torch.compiler.is_compiling() or given.shape[-1] != entries or center != seqlen_q - 1:
        at = torch.arange(entries, device=given.device) + (center - (seqlen_q - 1))
        at = replicated(at.clamp(0, given.shape[-1] - 1), given)
        if type(given).__name__ == "DTensor":  # for which torch 2.11 has no derivative of index_select
            given = given.gather(-1, at.expand(*given.shape[:-1], -1))
        else:
            given = given.index_select(-1, at)
    return given.contiguous()[(None,) * (3 - given.dim())]


def as_scores(table: Tensor, seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides by which kernels read a table, from the entry L - 1 on: each row begins one entry before the
    row above."""
    return (*table.shape[:2], seqlen_q, seqlen_k), (*table.stride()[:2], -1, 1)


def dense(bias: Tensor, seqlen_q: int, seqlen_k: int, rows: slice | None = None) -> Tensor:
    """(..., L, S) of a table (..., L + S - 1), or some rows of it."""
    if seqlen_q == 0 or seqlen_k == 0:
        return bias.sum(-1)[..., None, None].expand(*bias.shape[:-1], seqlen_q, seqlen_k)  # a function of it, too
    first, last = (0, seqlen_q) if rows is None else (rows.start, rows.stop)
    part, n = bias[..., seqlen_q - last : seqlen_q - first + seqlen_k - 1], last - first
    # Copies of `part`, one after the other, in rows that are longer by one: each begins one entry after the row above.
    # (Not unfold, whose derivative has no rule under vmap.)
    entries = part.shape[-1]
    copies = part.unsqueeze(-2).expand(*part.shape[:-1], n + 1, entries).flatten(-2)
    return copies[..., : n * (entries + 1)].unflatten(-1, (n, entries + 1))[..., :seqlen_k].flip(-2)


def add_diagonals(total: Tensor, part: Tensor, first_row: int, first_key: int, seqlen_q: int) -> None:
    """Adds `part` (..., n, m) of an (..., L, S), from a row and a key on, to the table `total` (..., L + S - 1)."""
    *_, n, m = part.shape
    # Each row is moved by one entry against the one before, by making rows of n + m entries to such of n + m - 1.
    moved = F.pad(part.flip(-2), (0, n)).flatten(-2)[..., : n * (n + m - 1)].unflatten(-1, (n, n + m - 1))
    begin = first_key - (first_row + n - 1) + seqlen_q - 1
    total[..., begin : begin + n + m - 1] += moved.sum(-2)


def add_bands(total: Tensor, parts: Tensor, apart: int, first: int, seqlen_q: int, params: AttentionParams) -> None:
    """Adds to the table `total` (B|1, H|1, L + S - 1) what a GPU kernel leaves of its gradient: `parts` (B, H, walks,
    bands, n) in float32, of which each band has the sums at n distances (j - i) in a row, the first one from `first`
    on, each of the others from `apart` after the one before; n is a multiple of `apart`. In a fixed order."""
    shared = [i for i, n in enumerate(total.shape[:2]) if n == 1]
    parts = parts.sum([*shared, 2], keepdim=True).squeeze(2).unflatten(-1, (-1, apart))
    bands, pieces = parts.shape[2:4]
    sums = parts.new_zeros(*total.shape[:2], (bands + pieces - 1) * apart)
    for n in range(pieces):
        sums[..., n * apart : (n + bands) * apart] += parts[..., n, :].flatten(2)
    # A band's tiles have distances that no score has, or that the window leaves out.
    seqlen_k = total.shape[2] - seqlen_q + 1
    begin = max(1 - seqlen_q, params.band_offset - params.window_left)
    end = min(seqlen_k, params.band_offset + params.window_right + 1)
    total[..., begin + seqlen_q - 1 : end + seqlen_q - 1] += sums[..., begin - first : end - first]
