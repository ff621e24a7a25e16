"""Whether the tensors of a call fit it. Each error is one sentence that names the argument, what was got and what is
expected, of the type that torch raises."""

from __future__ import annotations

import torch

from .arguments import show
from .params import DTYPES
from .shapes import Kind, Sizes, equal, fit


def check_kind(name: str, kind: Kind, query: Kind) -> None:
    shape, dtype, device, layout = kind
    if layout != torch.strided:
        raise RuntimeError(f"attnkern: {name} must be a dense (strided) tensor, got layout {layout}")
    if len(shape) < 2:
        raise RuntimeError(f"attnkern: {name} must have at least 2 dimensions (..., length, size), got {show(shape)}")
    if device != query.device:
        raise RuntimeError(f"attnkern: {name} must be on query's device {query.device}, got {device}")
    if dtype != query.dtype:
        raise RuntimeError(f"attnkern: {name} must have query's dtype {show(query.dtype)}, got {show(dtype)}")
    if dtype not in DTYPES:
        # As torch: a dtype without kernels is NotImplementedError (a RuntimeError), one without the maths RuntimeError.
        error = NotImplementedError if dtype.is_floating_point or dtype.is_complex else RuntimeError
        raise error(f"attnkern: {name} must be float32, float64, bfloat16 or float16, got {show(dtype)}")


def check_place(name: str, kind: Kind, query: Kind) -> None:
    _, _, device, layout = kind
    if layout != torch.strided:
        raise RuntimeError(f"attnkern: {name} must be a dense (strided) tensor, got layout {layout}")
    if device != query.device:
        raise RuntimeError(f"attnkern: {name} must be on query's device {query.device}, got {device}")


def check_added(name: str, dtype: torch.dtype, of_query: torch.dtype) -> None:
    """The dtype of what is floating point and counts beside the scores."""
    if dtype not in (torch.float32, of_query):
        allowed = "float32" if of_query == torch.float32 else f"float32 or query's dtype {show(of_query)}"
        raise RuntimeError(f"attnkern: {name} must be {allowed}, got {show(dtype)}")


def check_mask_dtype(name: str, dtype: torch.dtype, of_query: torch.dtype, hint: str = "") -> None:
    if dtype not in (torch.bool, torch.float32, of_query):
        allowed = "bool or query's dtype float32"
        if of_query != torch.float32:
            allowed = f"bool, float32 or query's dtype {show(of_query)}"
        raise RuntimeError(f"attnkern: {name} must be {allowed}, got {show(dtype)}{hint}")


def check_mask(mask: Kind, query: Kind, scores: Sizes) -> None:
    shape, dtype, *_ = mask
    check_place("attn_mask", mask, query)
    hint = ""
    if not dtype.is_floating_point and not dtype.is_complex:
        hint = " (masks.padding makes a Mask of lengths)"
        if len(shape) > 1:
            hint = " (attn_mask.bool() attends where it is not 0)"
    check_mask_dtype("attn_mask", dtype, query.dtype, hint)
    if len(shape) > len(scores) or not fit(shape, scores):
        raise RuntimeError(
            f"attnkern: attn_mask must broadcast to the scores' shape {show(scores)}, got {show(shape)}"
            f"{_batched_hint(shape, scores)}"
        )


def _batched_hint(shape: Sizes, scores: Sizes) -> str:
    """What makes a mask of the batch, which lacks dimensions of the scores (B, Hq, L, S), one for all heads."""
    if len(scores) == 4:
        for kept, index in (((0, 3), "[:, None, None]"), ((0, 2, 3), "[:, None]")):
            if equal(shape, tuple(scores[dim] for dim in kept)):
                return f" (attn_mask{index} is for all heads{' and queries' * (len(kept) == 2)})"
    return ""


def check_sinks(sinks: Kind, query: Kind, heads: Sizes) -> None:
    shape, dtype, *_ = sinks
    check_place("sinks", sinks, query)
    check_added("sinks", dtype, query.dtype)
    if not 0 < len(shape) <= len(heads) or not fit(shape, heads):
        shapes = show(heads) if len(heads) == 1 else f"{show(heads[-1:])} or {show(heads)}"
        raise RuntimeError(
            f"attnkern: sinks must have one number for each of query's heads, {shapes}, got {show(shape)}"
        )


def check_ranges(ranges: Kind, query: Kind, rows: Sizes) -> None:
    shape, dtype, *_ = ranges
    check_place("key_ranges", ranges, query)
    if dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"attnkern: key_ranges must be int32 or int64, got {show(dtype)}")
    if len(shape) < 2 or shape[-1] != 2 or shape[-2] not in (1, 2):
        raise RuntimeError(
            f"attnkern: key_ranges must have the shape (..., 1 or 2 ranges, 2: begin and end), got {show(shape)}"
        )
    given = shape[:-2]
    if len(given) > len(rows) or not fit(given, rows):
        raise RuntimeError(
            f"attnkern: key_ranges, less its last two dimensions, must broadcast to the rows of scores {show(rows)}, "
            f"got {show(shape)}"
        )
