"""The numbers of a call, and the facts that all backends share: each has its one place in Python here.

csrc/common/params.h says the same to the compiled libraries; tests/test_params.py holds the two together.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from . import rng
from .dtensor import replicated

UNBOUNDED = 2**62
"""A bound of a band that excludes nothing. (Far from the int64 limits: i + offset + UNBOUNDED cannot overflow.)"""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # in the order of csrc/common/params.h

GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS, GRAD_SINKS, GRAD_GRAD_OUT, GRAD_GRAD_LSE = 1, 2, 4, 8, 16, 32, 64
"""The bits of an operator's grad_mask: which gradients are asked for. (The last two: of the second backward pass.)"""

MAX_HEAD_DIM = 512
"""The largest head size that GPU kernels take,"""
MAX_LENGTH = 2**30 - 1
"""the longest sequence (a row and a bound of the band add up within 32 bits),"""
LEAST_PAGE = 16
"""the least rows of a page of keys and values,"""
DECODE_MAX_ROWS = 64
"""and the most rows of queries, over the query heads that share a key head, that are decoding: kernels of its own."""
SHARED_MAX_ROWS, SHARED_MAX_QUERIES = 256, 16
"""More rows are decoding, too, up to the first, where several heads have no more than the second each."""


def shares_rows(heads: int, queries: int) -> bool:
    """The function of csrc/common/params.h."""
    return heads > 1 and queries <= SHARED_MAX_QUERIES and heads * queries <= SHARED_MAX_ROWS


def shown(x: object) -> str:
    """What an error message says of any value: its repr, as a part of a line."""
    text = " ".join(repr(x).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


def untraced(x: Any) -> Any:
    """A scalar of numpy, which Dynamo takes for an array without dimensions, as a number; anything else as it is."""
    # To ask a number that a graph has as a symbol for an attribute would make it a constant.
    if not torch.compiler.is_compiling() or isinstance(x, (float, int, torch.SymFloat, torch.SymInt, Tensor)):
        return x
    return x.item() if getattr(x, "ndim", None) == 0 else x


def int_of_numpy(x: Any) -> Any:
    """An integer of numpy's as int; anything else as it is."""
    x = untraced(x)
    return int(x) if isinstance(x, numbers.Integral) and not isinstance(x, int) else x


class Band(NamedTuple):
    """Every structured mask: query i attends to key j iff -left <= j - i - offset <= right.

    Causal (torch's top-left) is right = 0, offset = 0; bottom-right alignment is offset = seqlen_k - seqlen_q; a
    sliding window is a finite left.
    """

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    offset: int = 0

    @classmethod
    def of(cls, left: int, right: int, offset: int) -> Band:
        """The band of any three int64, by numbers that add up within int64; as `band_of` in csrc/common/unpack.h."""
        if abs(offset) > UNBOUNDED // 4:
            left = UNBOUNDED if left >= UNBOUNDED else left - offset
            right = UNBOUNDED if right >= UNBOUNDED else right + offset
            offset = 0
        return cls(max(-UNBOUNDED, min(left, UNBOUNDED)), max(-UNBOUNDED, min(right, UNBOUNDED)), offset)

    def mask(self, seqlen_q: int, seqlen_k: int, device: torch.device, rows: Tensor | None = None) -> Tensor | None:
        """bool (seqlen_q, seqlen_k), True = attend; None if the band excludes nothing anywhere.

        `rows`, int64 (seqlen_q,), says which queries of the sequence are meant; None: 0, 1, ...
        """
        if self.left == UNBOUNDED and self.right == UNBOUNDED:
            return None
        i = (torch.arange(seqlen_q, dtype=torch.int64, device=device) if rows is None else rows).unsqueeze(-1)
        j = torch.arange(seqlen_k, dtype=torch.int64, device=device)
        distance = j - i - self.offset
        return (distance >= -self.left) & (distance <= self.right)


def ends_are_dense(key_ranges: Tensor) -> bool:
    """Whether the ends of a row's ranges lie side by side, as kernels read them."""
    *_, between_ranges, between_ends = key_ranges.stride()
    return between_ends == 1 and (between_ranges == 2 or key_ranges.shape[-2] == 1)


def within_ranges(key_ranges: Tensor, keys: slice) -> Tensor:
    """bool (B|1, Hq|1, L|1, number of `keys`), True = attend: the meaning of key_ranges (B|1, Hq|1, L|1, R, 2).

    A row attends to key j iff begin <= j < end for one of its R ranges (begin, end).
    """
    j = replicated(torch.arange(keys.start, keys.stop, dtype=torch.int32, device=key_ranges.device), key_ranges)
    first, *others = ((x[..., :1] <= j) & (j < x[..., 1:]) for x in key_ranges.unbind(-2))
    for other in others:
        first = first | other
    return first


class AttentionParams(NamedTuple):
    """The numbers that turn products into probabilities, as every operator takes them, in this order.

    A new field becomes an argument of every operator (`SCHEMA`), and goes into ATTNKERN_PARAMS in csrc/common/params.h.
    """

    softmax_scale: float
    softcap: float = 0.0  # 0: off
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    band_offset: int = 0
    dropout_p: float = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype, params: Sequence[Any]) -> AttentionParams:
        """Those of an operator's arguments on tensors of `dtype`, which may be any: checked, and in the range in which
        everything below can count on."""
        given = cls(*params)
        given.check(dtype)
        left, right, offset = Band.of(*given.band)
        return given._replace(
            window_left=left,
            window_right=right,
            band_offset=offset,
            dropout_p=rng.drawn_probability(given.dropout_p),
        )

    def check(self, dtype: torch.dtype) -> None:
        """Raises where tensors of `dtype` have no such attention."""
        check_dropout(self.dropout_p)
        check_scale(self.softmax_scale)
        check_softcap(self.softcap, dtype)

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right, self.band_offset)


_IN_SCHEMAS = {float: "float", int: "SymInt"}
SCHEMA = ", ".join(f"{_IN_SCHEMAS[kind]} {name}" for name, kind in get_type_hints(AttentionParams).items())
"""The fields as arguments of an operator."""


def check_dropout(dropout_p: float) -> None:
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"attnkern: dropout_p must be between 0 and 1, got {dropout_p}")


def check_scale(scale: float | None) -> None:
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"attnkern: scale must be a finite number, got {scale}")


def check_alignment(alignment: str) -> None:
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"attnkern: alignment must be 'top_left' or 'bottom_right', got {shown(alignment)}")


# In this range a softcap has all its digits, and a score divided by it is a number.
_CAPS = {dtype: (torch.finfo(dtype).tiny, torch.finfo(dtype).max) for dtype in (torch.float32, torch.float64)}


def check_softcap(softcap: float | None, dtype: torch.dtype) -> None:
    if softcap is not None and softcap != 0:
        computed = dtype if dtype == torch.float64 else torch.float32
        least, most = _CAPS[computed]
        if not least <= softcap <= most:
            raise ValueError(
                f"attnkern: softcap must be from {least:.4g} to {most:.4g}, {str(computed).removeprefix('torch.')}'s "
                f"range (0 or None: off), got {softcap}"
            )


def holds(condition: Any, unknown: bool) -> bool:
    """A condition on sizes; `unknown` where it depends on data, as a trace that holds sizes of data can't tell."""
    if torch.compiler.is_compiling() or isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

        return guard_or_true(condition) if unknown else guard_or_false(condition)
    return bool(condition)


def is_length_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor (B, H, L, D) lies in memory as (B, L, H, D). Outputs and gradients take their input's order.

    Sizes that depend on data count as larger than 1: below that, both orders are the same memory.
    """
    apart = holds(shape[1] > 1, True) and holds(shape[2] > 1, True)
    return apart and not holds(stride[1] >= stride[2], False)


def empty_like_heads(x: Tensor, head_dim: int) -> Tensor:
    """Empty (B, H, L, head_dim) in the memory order of x (B, H, L, D). As csrc/common/operators.h."""
    batch, heads, length, _ = x.shape
    if is_length_major(x.shape, x.stride()):
        return x.new_empty(batch, length, heads, head_dim).transpose(1, 2)
    return x.new_empty(batch, heads, length, head_dim)
