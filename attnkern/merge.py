"""Attention over a union of key sets, from the attention over each: split keys, rings, shared prefixes.

`merge_attention` joins the forward results of the parts. It is differentiable, so `backward()` through it is right as
it is. A ring, which does not keep the parts' keys until then, calls `attention_backward` on each part as it passes by.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import autograd
from .arguments import show, type_error, type_name
from .backends import name_for_operators, select
from .mask import Mask
from .problem import Problem


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
    # A part may be one thing itself, such as torch.fx's stand-in for what `attention` gives.
    relevant = [x for part in parts for x in (part if isinstance(part, (tuple, list)) else (part,))]
    if not torch.compiler.is_compiling() and has_torch_function(relevant):
        return handle_torch_function(merge_attention, relevant, *parts)
    for n, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2 or not all(isinstance(x, Tensor) for x in part):
            got, hint = type_name(part), ""
            if isinstance(part, (tuple, list)):
                got = f"({', '.join(type(x).__name__ for x in part[:3])}{', ...' * (len(part) > 3)})"
                if all(isinstance(x, (tuple, list)) for x in part):
                    hint = " (a list's parts are given as merge_attention(*parts))"
            raise TypeError(f"attnkern: part {n} must be a pair of tensors (out, lse), not {got}{hint}")
        out, lse = part
        if not (out.is_floating_point() and lse.is_floating_point()):
            raise RuntimeError(
                f"attnkern: part {n} must be floating point, got out {show(out.dtype)} and lse {show(lse.dtype)}"
            )
        if out.shape[:-1] != lse.shape:
            raise RuntimeError(
                f"attnkern: part {n}'s lse must have out's shape without its last dimension, "
                f"got out {tuple(out.shape)} and lse {tuple(lse.shape)}"
            )
        for name, x, first in zip(("out", "lse"), part, parts[0], strict=True):
            if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
                raise RuntimeError(
                    f"attnkern: part {n}'s {name} must match part 0's, {show(first.shape)} {show(first.dtype)} "
                    f"{first.device}, got {show(x.shape)} {show(x.dtype)} {x.device}"
                )

    outs, lses = zip(*parts, strict=True)
    stacked = torch.stack(lses)
    empty = stacked == -math.inf
    dead = empty.all(0)
    stacked = stacked.masked_fill(dead, 0.0)
    weights = stacked.softmax(0).masked_fill(dead, 0.0)
    dtype = torch.promote_types(outs[0].dtype, lses[0].dtype)
    # What a row without keys holds counts for nothing, NaN either.
    out = sum(
        w.unsqueeze(-1) * o.to(dtype).masked_fill(e.unsqueeze(-1), 0.0)
        for w, o, e in zip(weights, outs, empty, strict=True)
    )
    return out.to(outs[0].dtype), stacked.logsumexp(0).masked_fill(dead, -math.inf)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | Mask | None = None,
    is_causal: bool = False,
    *,
    grad_lse: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "top_left",
    softcap: float | None = None,
    key_ranges: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one part of the keys contributes to the gradients of attention over all keys.

    The gradient of the whole is the sum over the parts for query, and the parts' own for key and value.

    Args:
        grad_out, grad_lse: the gradients of the merged out and lse; grad_lse None: lse is not used further.
        query: (B, H, L, E). key: (B, Hk, S, E) and value: (B, Hk, S, Ev), the part's.
        out, lse: the merged results (B, H, L, Ev) and (B, H, L), over all keys and not this part's alone: the part's
            weights are exp(score - lse).
        attn_mask, is_causal, scale, enable_gqa, window, alignment, softcap, key_ranges, backend: as in `attention`, for
            this part, whose first key is key 0. There is no dropout, whose pattern depends on where a key is among all
            keys, and no gradient of attn_mask.

    Returns:
        Contributions to the gradients of (query, key, value), in their shapes and dtypes. Not differentiable.

    Raises:
        As `attention`; RuntimeError also where a tensor is not 4-D or the batch would have to be broadcast, and where
        grad_out, out or lse does not have the shape of the result.
    """
    with torch.no_grad():
        options = 0, is_causal, scale, enable_gqa, window, alignment, softcap, key_ranges
        problem = Problem.from_sdpa(query, key, value, attn_mask, *options)
        batch, num_heads, seqlen_q, _ = problem.q.shape
        for name, x, found in (("query", query, problem.q), ("key", key, problem.k), ("value", value, problem.v)):
            if x.shape != found.shape:
                beside = "" if x is query else f" beside query {tuple(query.shape)}"
                raise RuntimeError(
                    f"attnkern: attention_backward takes 4-D tensors of one batch size, got {name} {tuple(x.shape)}"
                    f"{beside}"
                )
        of_out = problem.q.dtype  # under autocast not query's
        rows, exact = (batch, num_heads, seqlen_q), torch.promote_types(of_out, torch.float32)
        given: Any
        for name, given, shape, dtype in (
            ("grad_out", grad_out, (*rows, value.shape[-1]), of_out),
            ("out", out, (*rows, value.shape[-1]), of_out),
            ("lse", lse, rows, exact),
            ("grad_lse", grad_lse, rows, exact),
        ):
            if given is None and name == "grad_lse":
                continue
            if not isinstance(given, Tensor):
                raise type_error(name, "Tensor", given)
            if given.shape != shape or given.dtype != dtype or given.device != query.device:
                raise RuntimeError(
                    f"attnkern: {name} must be {shape} {show(dtype)} {query.device}, as attention() gives it for this "
                    f"query and value, got {show(given.shape)} {show(given.dtype)} {given.device}"
                )
        # A backend without a backward pass refuses tensors that need gradients: a ring's own do not say so.
        q, k, v = (x.detach().requires_grad_() for x in problem[:3])
        chosen = select(problem._replace(q=q, k=k, v=v), backend)
        name = name_for_operators(chosen, problem, backend)
        grads = autograd.part_backward(problem, grad_out, grad_lse, out, lse, name)
        return tuple(grad.to(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True))  # type: ignore[return-value]
