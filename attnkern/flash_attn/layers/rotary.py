"""Rotary position embeddings, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...arguments import check_bool, may_look, show
from ...packed import check_ends, places
from ...params import int_of_numpy
from ..arguments import check_dims, check_vector


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turns pairs of x's elements by the angles of their token's position; elements from rotary_dim on stay.

    Args:
        x: (batch_size, seqlen, nheads, headdim), or with cu_seqlens (total, nheads, headdim); floating point.
        cos, sin: (positions, rotary_dim / 2), rotary_dim <= headdim, of any floating dtype. They get no gradient.
        interleaved: a pair is two neighbours, not one element of each half of rotary_dim.
        inplace: x itself is changed, and returned.
        seqlen_offsets: an int or int32 or int64 (batch_size,): the position of each sequence's first token.
        cu_seqlens: int32 or int64 (batch_size + 1,), where packed sequences begin; tokens behind the last stay.
        max_seqlen: not read.

    Returns:
        x's shape and dtype; computed in float32, of float64 in float64.

    Raises:
        TypeError: arguments of the wrong type. RuntimeError: shapes, dtypes or devices that don't fit, and positions
        beyond cos, where they are looked at (as `attnkern.varlen_attention` looks at values).

    Source: J. Su et al., "RoFormer", 2021.
    """
    check_bool("interleaved", interleaved)
    check_bool("inplace", inplace)
    check_dims("x", x, "total, nheads, headdim" if cu_seqlens is not None else "batch_size, seqlen, nheads, headdim")
    return turn(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)


def turn(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    names: tuple[str, str] = ("cos", "sin"),
) -> Tensor:
    """`apply_rotary_emb` of an x that fits; `names` are the caller's of cos and sin."""
    check_angles(cos, sin, x, *names)
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    if may_look(positions) and positions.numel():
        least, most = int(positions.min()), int(positions.max())
        if least < 0 or most >= cos.shape[0]:
            raise RuntimeError(
                f"attnkern: {' and '.join(names)} must have a row for each position, of which these are {least} to "
                f"{most}, got {cos.shape[0]} rows"
            )
    turned = _turned(x, cos[positions], sin[positions], interleaved)
    if cu_seqlens is not None:
        behind = torch.arange(x.shape[0], device=x.device) >= cu_seqlens[-1]
        turned = torch.where(behind[:, None, None], x[..., : turned.shape[-1]], turned)
    if inplace:
        x[..., : turned.shape[-1]].copy_(turned)
        return x
    return torch.cat([turned, x[..., turned.shape[-1] :]], -1)


def check_angles(cos: Tensor, sin: Tensor, x: Tensor, of_cos: str, of_sin: str) -> None:
    """Raises unless they are tables of angles for x; `of_cos` and `of_sin` are the caller's names of them."""
    for name, table in ((of_cos, cos), (of_sin, sin)):
        check_dims(name, table, "positions, rotary_dim / 2")
        if not table.is_floating_point() or table.device != x.device:
            raise RuntimeError(
                f"attnkern: {name} must be floating point on {x.device}, got {show(table.dtype)} on {table.device}"
            )
    if cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise RuntimeError(
            f"attnkern: {of_cos} and {of_sin} must have one shape (positions, rotary_dim / 2) with rotary_dim at most "
            f"{x.shape[-1]}, got {show(cos.shape)} and {show(sin.shape)}"
        )


def _positions(x: Tensor, offsets: int | Tensor, ends: Tensor | None) -> Tensor:
    """Of each token: (seqlen,), (batch_size, seqlen) or (total,); 0 behind the last packed sequence."""
    offsets = int_of_numpy(offsets)
    if ends is not None:
        check_ends("cu_seqlens", ends, x)
    if isinstance(offsets, Tensor):
        check_vector("seqlen_offsets", offsets, x.shape[0] if ends is None else ends.shape[0] - 1, x.device)
    elif isinstance(offsets, bool) or not isinstance(offsets, (int, torch.SymInt)):
        raise TypeError(f"attnkern: argument 'seqlen_offsets' must be int or Tensor, not {type(offsets).__name__}")
    if ends is None:
        token = torch.arange(x.shape[1], device=x.device)
        return token + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    sequence, place = places(x.shape[0], ends)
    place = place + (torch.nn.functional.pad(offsets, (0, 1))[sequence] if isinstance(offsets, Tensor) else offsets)
    return place.masked_fill(sequence == ends.shape[0] - 1, 0)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first rotary_dim elements of x (..., tokens, heads, headdim), by angles (..., tokens, rotary_dim / 2)."""
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table.detach().to(exact).unsqueeze(-2) for table in (cos, sin))
    pairs = x[..., : 2 * cos.shape[-1]].to(exact)
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).mT
    a, b = pairs.unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1 if interleaved else -2)
    return turned.flatten(-2).to(x.dtype)
