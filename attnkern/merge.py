"""Attention over a union of key sets, from the attention over each: split keys, rings, shared prefixes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_attention(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention outputs of the same queries over disjoint sets of keys.

    Args:
        parts: pairs (out, lse) as `attention(..., return_lse=True)` gives them: out (..., L, Ev) in any floating dtype,
            lse (..., L) the natural logarithm of the sum of exponentiated scores, -inf where no key was attended.

    Returns:
        (out, lse) as if all keys had been attended in one call; dtypes as in the first part. Where every part's lse is
        -inf, out is 0 and lse is -inf. Differentiable any number of times in every out and lse.

    Raises:
        TypeError: a part is not a pair of tensors. ValueError: no parts. RuntimeError: shapes, dtypes, devices differ.

    The weights are softmax(lse) over the parts, computed by subtraction of the largest: no exponential overflows.
    """
    if not parts:
        raise ValueError("attnkern: merge_attention needs at least one (out, lse) part, got none")
    for n, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2 or not all(isinstance(x, Tensor) for x in part):
            raise TypeError(f"attnkern: part {n} must be a pair of tensors (out, lse), not {type(part).__name__}")
        out, lse = part
        if not (out.is_floating_point() and lse.is_floating_point()):
            raise RuntimeError(f"attnkern: part {n} must be floating point, got out {out.dtype} and lse {lse.dtype}")
        if out.shape[:-1] != lse.shape:
            raise RuntimeError(
                f"attnkern: part {n}'s lse must have out's shape without its last dimension, "
                f"got out {tuple(out.shape)} and lse {tuple(lse.shape)}"
            )
        for name, x, first in zip(("out", "lse"), part, parts[0], strict=True):
            if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
                raise RuntimeError(
                    f"attnkern: part {n}'s {name} must match part 0's, {tuple(first.shape)} {first.dtype} "
                    f"{first.device}, got {tuple(x.shape)} {x.dtype} {x.device}"
                )

    outs, lses = zip(*parts, strict=True)
    stacked = torch.stack(lses)
    dead = (stacked == -math.inf).all(0)
    stacked = stacked.masked_fill(dead, 0.0)
    weights = stacked.softmax(0).masked_fill(dead, 0.0)
    dtype = torch.promote_types(outs[0].dtype, lses[0].dtype)
    out = sum(w.unsqueeze(-1) * o.to(dtype) for w, o in zip(weights, outs, strict=True))
    return out.to(outs[0].dtype), stacked.logsumexp(0).masked_fill(dead, -math.inf)
