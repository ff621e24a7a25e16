"""Memory layouts: the same numbers behind other strides. The memory between the numbers is NaN, so that a kernel that
reads it is caught."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _poison(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)


def _contiguous(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _blhd(x: Tensor) -> Tensor:
    return _contiguous(x.transpose(-2, -3)).transpose(-2, -3)


def _sequence_first(x: Tensor) -> Tensor:
    return _contiguous(x.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)


def _packed(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    buffer = _poison(b, n, 3, h, d, like=x)
    buffer[:, :, 1] = x.transpose(1, 2)
    return buffer[:, :, 1].transpose(1, 2)


def _stepped(x: Tensor) -> Tensor:
    buffer = _poison(*x.shape[:-1], 2 * x.size(-1), like=x)
    buffer[..., ::2] = x
    return buffer[..., ::2]


def _stepped_rows(x: Tensor) -> Tensor:
    buffer = _poison(*x.shape[:-2], 3 * x.size(-2), x.size(-1), like=x)
    buffer[..., ::3, :] = x
    return buffer[..., ::3, :]


def _e_major(x: Tensor) -> Tensor:
    return _contiguous(x.mT).mT


def _offset(x: Tensor) -> Tensor:
    buffer = _poison(x.numel() + 3, like=x)
    buffer[3:] = x.reshape(-1)
    return buffer[3:].view(x.shape)


def _padded(x: Tensor) -> Tensor:
    buffer = _poison(*x.shape[:-1], x.size(-1) + 3, like=x)
    buffer[..., : x.size(-1)] = x
    return buffer[..., : x.size(-1)]


def _heads_last(x: Tensor) -> Tensor:
    return _contiguous(x.permute(3, 0, 2, 1)).permute(1, 3, 2, 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": _contiguous,
    "blhd": _blhd,
    "sequence_first": _sequence_first,
    "packed": _packed,
    "stepped": _stepped,
    "stepped_rows": _stepped_rows,
    "e_major": _e_major,
    "offset": _offset,
    "padded": _padded,
    "heads_last": _heads_last,
}


def with_layout(x: Tensor, layout: str) -> Tensor:
    """A view with the values of the 4-D tensor `x` and the strides of that layout (one of `LAYOUTS`)."""
    view = LAYOUTS[layout](x.detach())
    assert view.shape == x.shape
    return view


def packed_qkv(
    batch: int, heads: int, seqlen: int, head_dim: int, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A random (B, L, 3, H, E) projection and its three (B, H, L, E) views: (qkv, query, key, value)."""
    qkv = torch.randn(batch, seqlen, 3, heads, head_dim, dtype=dtype, device=device)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return qkv, q, k, v


def odd_strides_on_size_one(x: Tensor) -> Tensor:
    """`x` with senseless strides on its dimensions of size 1, which torch allows and no kernel may use."""
    return x.as_strided(x.shape, [s if n != 1 else 12345 for n, s in zip(x.shape, x.stride(), strict=True)])
