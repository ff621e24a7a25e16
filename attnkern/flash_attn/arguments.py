"""flash_attn's arguments: what is taken, and errors in its own names."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..arguments import autocasts, number, show, type_error
from ..pages import is_page_size
from ..params import DTYPES, LEAST_PAGE, int_of_numpy, shown

_BATCH = "batch_size, seqlen"
_PACKED = "total"
_UNBOUNDED = (-1, -1)


def check_tensors(q: Any, k: Any, v: Any, packed: bool = False, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Raises unless they are q (batch, Lq, H, D), k (batch, Lk, Hk, D) and v (batch, Lk, Hk, Dv), or packed ones
    (total, H, D): of one dtype and device, Hk a divisor of H. `names` are those of the caller's tensors."""
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        of_q, of_k, of_v = q.shape, k.shape, v.shape
        if (
            len(of_q) == len(of_k) == (3 if packed else 4)
            and (packed or of_q[0] == of_k[0])
            and of_q[-1] == of_k[-1]
            and (of_k == of_v or (len(of_k) == len(of_v) and of_k[:-1] == of_v[:-1]))
            and (of_q[-2] == of_k[-2] or (of_k[-2] > 0 and of_q[-2] % of_k[-2] == 0))
            and (q.dtype == k.dtype == v.dtype or autocasts(q.device))
            and q.dtype in DTYPES
            and q.device == k.device == v.device
        ):
            return
    _refuse(q, k, v, packed, names)


def _refuse(q: Any, k: Any, v: Any, packed: bool, names: tuple[str, str, str]) -> NoReturn:
    """The first thing that doesn't fit, in one sentence."""
    of_q, of_k, of_v = names
    lead = _PACKED if packed else _BATCH
    for name, x, heads in ((of_q, q, "nheads"), (of_k, k, "nheads_k"), (of_v, v, "nheads_k")):
        check_dims(name, x, lead, heads, "headdim")
    if q.dtype not in DTYPES:
        raise RuntimeError(f"attnkern: {of_q} must be {', '.join(map(show, DTYPES))}, got {show(q.dtype)}")
    for name, x in ((of_k, k), (of_v, v)):
        if (x.dtype != q.dtype and not autocasts(q.device)) or x.device != q.device:
            raise RuntimeError(
                f"attnkern: {name} must have {of_q}'s dtype and device, {show(q.dtype)} and {q.device}, "
                f"got {show(x.dtype)} and {x.device}"
            )
    if not packed and k.shape[0] != q.shape[0]:
        raise RuntimeError(f"attnkern: {of_k} must have {of_q}'s batch_size {q.shape[0]}, got {k.shape[0]}")
    if k.shape[-1] != q.shape[-1]:
        raise RuntimeError(f"attnkern: {of_k} must have {of_q}'s headdim {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise RuntimeError(
            f"attnkern: {of_v} must have {of_k}'s shape {show(k.shape)} but for headdim, got {show(v.shape)}"
        )
    raise RuntimeError(f"attnkern: {of_k}'s nheads_k must divide {of_q}'s nheads {q.shape[-2]}, got {k.shape[-2]}")


def check_dims(name: str, x: Any, *sizes: str | int) -> None:
    """Raises unless x is a tensor of these sizes: numbers, which must be met, and names of others, one by one or
    several in a string."""
    if not isinstance(x, Tensor):
        raise type_error(name, "Tensor", x)
    wanted = [part for size in sizes for part in (size.split(", ") if isinstance(size, str) else [size])]
    if len(x.shape) != len(wanted) or any(
        not isinstance(m, str) and n != m for n, m in zip(x.shape, wanted, strict=True)
    ):
        # (Only now as text: in a graph, sizes that become text are constants.)
        shape = ", ".join(map(str, wanted))
        raise RuntimeError(
            f"attnkern: {name} must have the shape ({shape}{',' * (len(wanted) == 1)}), got {show(x.shape)}"
        )


def check_vector(name: str, x: Any, size: int, device: torch.device) -> None:
    """Raises unless x is an int32 or int64 tensor (batch_size,) on the device."""
    check_dims(name, x, size)
    if x.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"attnkern: {name} must be int32 or int64, got {show(x.dtype)}")
    check_device(name, x, device)


def check_device(name: str, x: Any, device: torch.device) -> None:
    if isinstance(x, Tensor) and x.device != device:
        raise RuntimeError(f"attnkern: {name} must be on q's device {device}, got {x.device}")


def bounds(causal: Any, window_size: Any) -> tuple[int | None, int | None]:
    """How many keys to the left and to the right of its own place a query sees; None: all."""
    if type(causal) is not bool:
        raise type_error("causal", "bool", causal)
    if window_size == _UNBOUNDED:
        return None, 0 if causal else None
    sizes = [int_of_numpy(x) for x in window_size] if isinstance(window_size, (tuple, list)) else []
    if len(sizes) != 2 or any(isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)) for x in sizes):
        raise TypeError(
            f"attnkern: argument 'window_size' must be two ints (left, right), -1 for unbounded, "
            f"not {shown(window_size)}"
        )
    left, right = (None if x < 0 else x for x in sizes)
    return left, 0 if causal else right


def scale_of(softmax_scale: Any) -> float | None:
    if softmax_scale is None or (type(softmax_scale) is float and math.isfinite(softmax_scale)):
        return softmax_scale
    scale = number("softmax_scale", softmax_scale)
    if not math.isfinite(scale):
        raise ValueError(f"attnkern: softmax_scale must be a finite number, got {scale}")
    return scale


def cap_of(softcap: Any) -> float:
    """0: off."""
    if type(softcap) not in (int, float):
        softcap = number("softcap", softcap)
    return 0.0 if softcap < 0 else softcap


def check_slopes(slopes: Any, batch: int, heads: int, device: torch.device) -> None:
    if not isinstance(slopes, Tensor):
        raise type_error("alibi_slopes", "Tensor", slopes)
    if slopes.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(f"attnkern: alibi_slopes must be float32, got {show(slopes.dtype)}")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise RuntimeError(
            f"attnkern: alibi_slopes must have the shape (nheads,) or (batch_size, nheads), here ({heads},) or "
            f"({batch}, {heads}), got {show(slopes.shape)}"
        )
    check_device("alibi_slopes", slopes, device)


def check_same_sizes(name: str, x: Tensor, other_name: str, other: Tensor, *sizes: str) -> None:
    """Raises unless the first sizes of x, which are called so, are the other tensor's."""
    for what, found, expected in zip(sizes, x.shape, other.shape, strict=False):
        if found != expected:
            raise RuntimeError(f"attnkern: {name} must have {other_name}'s {what} {expected}, got {found}")


def check_pages(q: Any, k: Any, v: Any, block_table: Any, names: tuple[str, str], packed: bool, batch: int) -> None:
    """Raises unless k and v, by their `names`, are pools (num_pages, page_size, nheads_k, headdim) for the queries q,
    and block_table is int32 or int64 (batch_size, pages of a sequence)."""
    for name, x in zip(names, (k, v), strict=True):
        check_dims(name, x, "num_pages, page_size, nheads_k, headdim")
    check_dims("block_table", block_table, batch, "pages of a sequence")
    (count, size), (name_k, name_v) = k.shape[:2], names
    if not is_page_size(size):
        raise RuntimeError(f"attnkern: {name_k}'s page_size must be a power of two from {LEAST_PAGE} on, got {size}")
    check_same_sizes(name_v, v, name_k, k, "num_pages", "page_size", "nheads_k")
    if count == 0 and block_table.numel() > 0:
        raise RuntimeError(f"attnkern: {name_k} must have a page or more beside a block_table that isn't empty")
    of_one = [x.new_empty(()).expand(x.shape[1:] if packed else (batch, *x.shape[1:])) for x in (k, v)]
    check_tensors(q, of_one[0], of_one[1], packed, names=("q", *names))
