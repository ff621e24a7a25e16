"""`Problem`: one attention call, validated and brought to 4-D. Nothing below this module checks a shape again.

What a call asks for is a function of shapes, dtypes, devices and flags alone, not of the tensors' contents. `_plan` is
that function: it holds every rule and error message, and is memoised for plain tensors, so that a repeated call costs
one dictionary look-up. `Problem.from_sdpa` describes the tensors, asks for the plan and takes the views it names.

Layout below this module: q (B, Hq, L, E), k (B, Hk, S, E), v (B, Hv, S, Ev). Query head h uses key head h // (Hq // Hk)
and value head h // (Hq // Hv); one shared key or value head is the same index map. The batch is broadcast by stride 0.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNBOUNDED = 2**62
"""A bound of a band that excludes nothing. (Far from the int64 limits: i + offset + UNBOUNDED cannot overflow.)"""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Band(NamedTuple):
    """Every structured mask: query i attends to key j iff -left <= j - i - offset <= right.

    Causal (torch's top-left) is right = 0, offset = 0; bottom-right alignment is offset = seqlen_k - seqlen_q; a sliding
    window is a finite left.
    """

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    offset: int = 0

    def mask(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor | None:
        """bool (seqlen_q, seqlen_k), True = attend; None if the band excludes nothing anywhere."""
        if self.left == UNBOUNDED and self.right == UNBOUNDED:
            return None
        i = torch.arange(seqlen_q, dtype=torch.int64, device=device).unsqueeze(-1)
        j = torch.arange(seqlen_k, dtype=torch.int64, device=device)
        distance = j - i - self.offset
        return (distance >= -self.left) & (distance <= self.right)


class Score(NamedTuple):
    """How a score becomes a weight; the order is that of the operators' arguments (ops.py)."""

    softmax_scale: float
    softcap: float = 0.0  # 0 = off
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    band_offset: int = 0
    dropout_p: float = 0.0

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right, self.band_offset)


class Problem(NamedTuple):
    """A validated attention call. (A tuple, not a dataclass: 0.2 us instead of 0.5 us to make, in every call.)"""

    q: Tensor  # (B, Hq, L, E)
    k: Tensor  # (B, Hk, S, E)
    v: Tensor  # (B, Hv, S, Ev)
    bias: Tensor | None  # (B|1, Hq|1, L|1, S|1): bool (True = attend) or floating point (added to the scaled scores)
    score: Score
    lead: tuple[int, ...] | None  # leading dimensions of the caller's output; None: (B, Hq), as here

    @classmethod
    def from_sdpa(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        window: tuple[int | None, int | None] | None = None,
        alignment: str = "top_left",
        softcap: float | None = None,
    ) -> Problem:
        """Validate and normalise the arguments of `attnkern.attention`. Raises what torch raises, naming the argument."""
        compiling = torch.compiler.is_compiling()
        plain = (
            not compiling
            and type(query) is type(key) is type(value) is Tensor
            and (attn_mask is None or type(attn_mask) is Tensor)
            and (scale is None or type(scale) is float)
            and type(dropout_p) is float
            # Under a transform a plain-looking tensor may wrap one with symbolic sizes.
            and not torch._C._are_functorch_transforms_active()
        )
        if not plain:
            for name, x in (("query", query), ("key", key), ("value", value)):
                if not isinstance(x, Tensor):
                    raise _type_error(name, "Tensor", x)
            if attn_mask is not None and not isinstance(attn_mask, Tensor):
                raise _type_error("attn_mask", "Tensor", attn_mask)
            dropout_p = _number("dropout_p", dropout_p)
            scale = None if scale is None else _number("scale", scale)
        mask, causal_sizes = attn_mask, None
        if not plain and is_causal_bias(mask):
            if is_causal or window is not None or alignment != "top_left":
                raise ValueError("attnkern: attn_mask is a CausalBias: is_causal, window and alignment must not be set")
            if mask.variant.name == "LOWER_RIGHT":
                causal_sizes, alignment = (mask.seq_len_q, mask.seq_len_kv), "bottom_right"
            mask, is_causal = None, True
        if query.is_nested or key.is_nested or value.is_nested or (mask is not None and mask.is_nested):
            raise RuntimeError("attnkern: nested tensors are supported in the jagged layout only (layout=torch.jagged)")
        if autocasts(query.device.type):
            query, key, value, mask = _autocast(query.device.type, query, key, value, mask)
        if window is None:
            window_left = window_right = None
        elif isinstance(window, (tuple, list)) and len(window) == 2:
            window_left, window_right = window
        else:
            raise TypeError(f"attnkern: argument 'window' must be (left, right) or None, not {window!r}")

        plan = (_memoised_plan if plain else _plan)(
            query.shape,
            key.shape,
            value.shape,
            None if mask is None else mask.shape,
            query.dtype,
            key.dtype,
            value.dtype,
            None if mask is None else mask.dtype,
            query.device,
            key.device,
            value.device,
            None if mask is None else mask.device,
            query.layout,
            key.layout,
            value.layout,
            None if mask is None else mask.layout,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            window_left,
            window_right,
            alignment,
            softcap,
        )
        if causal_sizes is not None and causal_sizes != (query.shape[-2], key.shape[-2]):
            raise RuntimeError(
                f"attnkern: attn_mask is a bottom-right CausalBias for {causal_sizes} scores, "
                f"query and key give {(query.shape[-2], key.shape[-2])}"
            )
        if plan.query is not None:
            query = query.expand(plan.query[0]).reshape(plan.query[1])
        if plan.key is not None:
            key = key.expand(plan.key[0]).reshape(plan.key[1])
        if plan.value is not None:
            value = value.expand(plan.value[0]).reshape(plan.value[1])
        if mask is not None and plan.mask is not None:
            mask = mask.expand(plan.mask[0]).reshape(plan.mask[1])
        return cls(query, key, value, mask, plan.score, plan.lead)

    def restore(self, x: Tensor) -> Tensor:
        """The caller's shape for `x` (B, Hq, ...): leading dimensions as the inputs' broadcast."""
        return x if self.lead is None else x.reshape(*self.lead, *x.shape[2:])

    def __str__(self) -> str:
        """One line that says what was asked for: used by `explain` and in errors."""
        parts = [_describe(name, x) for name, x in (("query", self.q), ("key", self.k), ("value", self.v))]
        if self.bias is not None:
            parts.append(_describe("mask", self.bias))
        score = self.score
        if score.window_left != UNBOUNDED or score.window_right != UNBOUNDED:
            left, right = ("unbounded" if x == UNBOUNDED else str(x) for x in (score.window_left, score.window_right))
            parts.append(f"band left {left}, right {right}, offset {score.band_offset}")
        parts.append(f"scale {score.softmax_scale:.6g}")
        if score.softcap:
            parts.append(f"softcap {score.softcap:.6g}")
        if score.dropout_p:
            parts.append(f"dropout {score.dropout_p:.6g}")
        return "; ".join(parts)


_View = (
    tuple[tuple[int, ...], tuple[int, ...]] | None
)  # expand to the first shape, reshape to the second; None: as it is


class _Plan(NamedTuple):
    query: _View
    key: _View
    value: _View
    mask: _View
    score: Score
    lead: tuple[int, ...] | None


def _plan(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    mask: torch.Size | None,
    query_dtype: torch.dtype,
    key_dtype: torch.dtype,
    value_dtype: torch.dtype,
    mask_dtype: torch.dtype | None,
    query_device: torch.device,
    key_device: torch.device,
    value_device: torch.device,
    mask_device: torch.device | None,
    query_layout: torch.layout,
    key_layout: torch.layout,
    value_layout: torch.layout,
    mask_layout: torch.layout | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    window_left: int | None,
    window_right: int | None,
    alignment: str,
    softcap: float | None,
) -> _Plan:
    """All rules: shapes, dtypes, devices, layouts and flags in, views and parameters out."""
    # Flags.
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise _type_error(name, "bool", flag)
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"attnkern: dropout_p must be between 0 and 1, got {dropout_p}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"attnkern: scale must be a finite number, got {scale}")
    if softcap is not None:
        softcap = _number("softcap", softcap)
        if not 0.0 <= softcap < math.inf:
            raise ValueError(f"attnkern: softcap must be a positive finite number (0 or None: off), got {softcap}")
    for name, bound in (("left", window_left), ("right", window_right)):
        if bound is not None:
            if isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt)):
                raise TypeError(f"attnkern: the {name} bound of 'window' must be int or None, not {_type_name(bound)}")
            if bound < 0:
                raise ValueError(f"attnkern: the {name} bound of 'window' must be >= 0 (None: unbounded), got {bound}")
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"attnkern: alignment must be 'top_left' or 'bottom_right', got {alignment!r}")

    # Kinds of tensors.
    for name, shape, dtype, device, layout in (
        ("query", query, query_dtype, query_device, query_layout),
        ("key", key, key_dtype, key_device, key_layout),
        ("value", value, value_dtype, value_device, value_layout),
    ):
        if layout != torch.strided:
            raise RuntimeError(f"attnkern: {name} must be a dense (strided) tensor, got layout {layout}")
        if len(shape) < 2:
            raise RuntimeError(
                f"attnkern: {name} must have at least 2 dimensions (..., length, head size), got {_show(shape)}"
            )
        if device != query_device:
            raise RuntimeError(f"attnkern: {name} must be on query's device {query_device}, got {device}")
        if dtype != query_dtype:
            raise RuntimeError(f"attnkern: {name} must have query's dtype {_show(query_dtype)}, got {_show(dtype)}")
        if dtype not in DTYPES:
            # As torch: a dtype nobody implements is NotImplementedError (a RuntimeError), a non-float is RuntimeError.
            error = NotImplementedError if dtype.is_floating_point or dtype.is_complex else RuntimeError
            raise error(f"attnkern: {name} must be float32, float64, bfloat16 or float16, got {_show(dtype)}")

    # Sizes.
    seqlen_q, head_dim = query[-2:]
    seqlen_k, head_dim_v = value[-2:]
    if key[-1] != head_dim:
        raise RuntimeError(f"attnkern: key's last size must be query's, {head_dim}, got {_show(key)}")
    if key[-2] != seqlen_k:
        raise RuntimeError(
            f"attnkern: key and value must have the same length (dimension -2), got {_show(key)} and {_show(value)}"
        )
    rank = max(len(query), len(key), len(value))
    if enable_gqa:
        heads, heads_k, heads_v = (
            _gqa_heads(name, x) for name, x in (("query", query), ("key", key), ("value", value))
        )
        heads_qk = heads
        for name, n in (("key", heads_k), ("value", heads_v)):
            if heads != n and (n == 0 or heads % n != 0):
                raise RuntimeError(
                    f"attnkern: number of heads of {name} (dimension -3) must divide query's {heads} with enable_gqa, got {n}"
                )
    else:
        heads_q, heads_k, heads_v = (x[-3] if len(x) > 2 else 1 for x in (query, key, value))
        heads_qk = _broadcast("key", "number of heads (dimension -3)", (heads_q,), (heads_k,))[0]
        heads = _broadcast("value", "number of heads (dimension -3)", (heads_qk,), (heads_v,))[0]
    batch_qk = _broadcast("key", "batch dimensions", query[:-3], key[:-3])
    batch = _broadcast("value", "batch dimensions", batch_qk, value[:-3])
    # Mask.
    mask_view: _View = None
    if mask is not None:
        if mask_layout != torch.strided:
            raise RuntimeError(f"attnkern: attn_mask must be a dense (strided) tensor, got layout {mask_layout}")
        if mask_device != query_device:
            raise RuntimeError(f"attnkern: attn_mask must be on query's device {query_device}, got {mask_device}")
        if mask_dtype not in (torch.bool, torch.float32, query_dtype):
            raise RuntimeError(
                f"attnkern: attn_mask must be bool, float32 or query's dtype {_show(query_dtype)}, got {_show(mask_dtype)}"
            )
        scores = (seqlen_q, seqlen_k)
        if max(len(query), len(key)) > 2:
            scores = (*batch_qk, heads_qk, *scores)
        if len(mask) > len(scores) or any(m != 1 and m != s for m, s in zip(reversed(mask), reversed(scores))):
            raise RuntimeError(
                f"attnkern: attn_mask must broadcast to the scores' shape {_show(scores)}, got {_show(mask)}"
            )
        padded = (1,) * (len(batch) + 3 - len(mask)) + tuple(mask)
        shared = all(n == 1 for n in padded[:-3])
        mask_view = _view(mask, padded[:-3] if shared else batch, padded[-3:])

    # Band.
    band = Band()
    if is_causal or window_left is not None or window_right is not None:
        offset = seqlen_k - seqlen_q if alignment == "bottom_right" else 0
        right = 0 if is_causal else window_right  # bounds are >= 0, so the causal one is the tighter
        band = Band(UNBOUNDED if window_left is None else window_left, UNBOUNDED if right is None else right, offset)

    if scale is None:
        # With no features every score is 0 whatever the scale: any finite one gives the plain mean.
        scale = 1.0 / math.sqrt(head_dim) if head_dim != 0 else 1.0
    return _Plan(
        query=_view(query, batch, (heads, seqlen_q, head_dim)),
        key=_view(key, batch, (heads_k, seqlen_k, head_dim)),
        value=_view(value, batch, (heads_v, seqlen_k, head_dim_v)),
        mask=mask_view,
        score=Score(scale, softcap or 0.0, *band, dropout_p),
        lead=None if rank == 4 else () if rank == 2 else (*batch, heads),
    )


# typed: True and 1 are equal as keys, but is_causal=1 is an error.
_memoised_plan = functools.lru_cache(maxsize=4096, typed=True)(_plan)


def _view(shape: torch.Size, batch: tuple[int, ...], tail: tuple[int, int, int]) -> _View:
    """How `shape` becomes (product of batch, *tail)."""
    flat = 1
    for n in batch:
        flat = flat * n
    return None if shape == (flat, *tail) else ((*batch, *tail), (flat, *tail))


def is_length_major(x: Tensor) -> bool:
    """Whether x (B, H, L, D) lies in memory as (B, L, H, D). Outputs and gradients take their input's order."""
    return bool(x.shape[1] > 1 and x.shape[2] > 1 and x.stride(1) < x.stride(2))


def is_causal_bias(x: object) -> bool:
    """Whether `x` is one of torch.nn.attention.bias' causal masks, which hold their sizes instead of elements."""
    return type(x).__name__ == "CausalBias" and type(x).__module__ == "torch.nn.attention.bias"


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a device type. (The first test alone is made in nearly all calls: 0.1 us, not 0.5.)"""
    return (
        torch._C._is_any_autocast_enabled()
        and torch.amp.is_autocast_available(device_type)
        and torch.is_autocast_enabled(device_type)
    )


def _autocast(device_type: str, *tensors: Tensor | None) -> list[Tensor | None]:
    """torch's rule for its lower-precision list: floating point goes to autocast's dtype, float64 stays."""
    dtype = torch.get_autocast_dtype(device_type)
    return [x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def _broadcast(name: str, what: str, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """a and b broadcast as torch does; `name` and `what` say in the error whose sizes b are."""
    rank = max(len(a), len(b))
    out = []
    for x, y in zip((1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b)):
        if x != y and x != 1 and y != 1:
            raise RuntimeError(f"attnkern: {name}'s {what} must broadcast with {_show(a)}, got {_show(b)}")
        out.append(y if x == 1 else x)
    return tuple(out)


def _gqa_heads(name: str, shape: tuple[int, ...]) -> int:
    if len(shape) < 3:
        raise RuntimeError(f"attnkern: {name} must have a head dimension (-3) with enable_gqa, got {_show(shape)}")
    return shape[-3]


def _number(name: str, x: Any) -> float:
    """What torch takes for a float: Python and numpy scalars, and 0-dim tensors outside the graph."""
    if isinstance(x, (torch.SymFloat, torch.SymInt)):
        return x  # type: ignore[return-value]  # stays symbolic in a trace
    if isinstance(x, Tensor):
        if x.ndim == 0 and not x.requires_grad and not x.is_complex():
            return float(x.item())
    elif isinstance(x, numbers.Real) or type(x).__name__ in ("bool", "bool_") and type(x).__module__ == "numpy":
        return float(x)
    raise _type_error(name, "float", x)


def _type_error(name: str, expected: str, x: object) -> TypeError:
    return TypeError(f"attnkern: argument '{name}' must be {expected}, not {_type_name(x)}")


def _type_name(x: object) -> str:
    if isinstance(x, Tensor):
        return f"{type(x).__name__} of shape {_show(x.shape)}{' that requires grad' if x.requires_grad else ''}"
    return type(x).__name__


def _show(x: object) -> str:
    """Shapes as plain tuples, dtypes without their module."""
    return str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else str(tuple(x))  # type: ignore[arg-type]


def _describe(name: str, x: Tensor) -> str:
    return f"{name} {_show(x.shape)} {_show(x.dtype)} {x.device}"
