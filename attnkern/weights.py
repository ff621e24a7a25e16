"""The weights of an attention call, softmax(query key^T * scale + mask): as much of them as is asked for."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import autograd
from .arguments import is_causal_bias, may_look, show, type_name
from .checks import check_place
from .dtensor import replicated
from .mask import Mask
from .packed import Jagged
from .params import shown
from .problem import Problem
from .shapes import Kind

Selection = int | slice | Sequence[int] | Tensor | None
"""Which rows or heads: None is all, an int is one (its dimension stays), negative ones count from the end."""


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | Mask | None = None,
    *,
    lse: Tensor | None = None,
    rows: Selection = None,
    heads: Selection = None,
    average_heads: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "top_left",
    softcap: float | None = None,
    key_ranges: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The weights that `attention` gives the values, for chosen queries and heads; to be looked at, or trained on.

    Attention itself never has them in memory. They are made here tile by tile, so that the memory taken is the
    result's, L' * S entries for each batch element and head, and a few MiB.

    Args:
        query, key, attn_mask, is_causal, scale, enable_gqa, window, alignment, softcap, key_ranges, sinks: as in
            `attention`.
        lse: what `attention(..., return_lse=True)` gave for the same arguments, (..., L). The weights are then
            exp(score - lse), and no softmax is computed again. From a call over more keys (`merge_attention`) it
            gives these keys' share. The gradient is that of the softmax over these keys and `sinks`: give the sinks of
            the call beside its lse.
        rows: which queries (an int, a slice, a sequence of ints or a 1-D integer tensor); None: all L. Their order is
            kept, negative ones count from the end. The masks see each at its own place.
        heads: which of query's heads, likewise.
        average_heads: the mean over the (chosen) heads, whose dimension goes.

    Returns:
        (..., H', L', S), with average_heads (..., L', S), in query's dtype. A row sums to 1, with sinks to 1 less the
        sink's own weight; one with no key to attend to is 0. Differentiable in query, key, attn_mask and sinks, any
        number of times.

    Raises:
        As `attention`; IndexError: rows or heads out of range; TypeError: rows or heads of another type;
        RuntimeError: lse of another shape or device, heads without a head dimension.

    Source of the weights from the saved log-sum-exp: the backward pass of T. Dao et al., "FlashAttention", 2022.
    """
    relevant = (query, key, None if is_causal_bias(attn_mask) else attn_mask, lse, key_ranges, sinks)
    if has_torch_function(relevant):
        return handle_torch_function(
            attention_weights,
            relevant,
            query,
            key,
            attn_mask,
            lse=lse,
            rows=rows,
            heads=heads,
            average_heads=average_heads,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            window=window,
            alignment=alignment,
            softcap=softcap,
            key_ranges=key_ranges,
            sinks=sinks,
        )
    options = 0, is_causal, scale, enable_gqa, window, alignment, softcap, key_ranges, sinks
    problem = Problem.from_sdpa(query, key, key, attn_mask, *options)
    q, k, v, bias, _, ranges, params, lead, _ = problem
    sinks = problem.inputs().sinks
    if isinstance(lead, Jagged):
        raise ValueError("attnkern: attention_weights takes dense tensors: give it one sequence of query.unbind()")
    batch, num_heads, seqlen_q, _ = q.shape
    if lse is not None:
        shape = (*(q.shape[:2] if lead is None else lead), seqlen_q)
        lse = _checked_lse(lse, shape, query).reshape(batch, num_heads, seqlen_q)
    positions = None
    if rows is not None:
        index = _index("rows", rows, seqlen_q, q.device)
        positions = torch.arange(seqlen_q, dtype=torch.int64, device=q.device)[index]
        index = replicated(index, q)
        q = q[:, :, index]
        bias, ranges = (x if x is None or x.shape[2] == 1 else x[:, :, index] for x in (bias, ranges))
        lse = None if lse is None else lse[:, :, index]
    if heads is not None:
        if lead == ():
            raise RuntimeError("attnkern: heads needs a head dimension (-3) in query, got 2 dimensions")
        index = _index("heads", heads, num_heads, q.device)
        of_head, index = torch.arange(num_heads, device=q.device)[index], replicated(index, q)
        q = q[:, index]
        if k.shape[1] != 1:
            group = num_heads // k.shape[1] if num_heads else 1
            k = k[:, replicated(of_head // group, k)]
        bias, ranges = (x if x is None or x.shape[1] == 1 else x[:, index] for x in (bias, ranges))
        sinks, lse = (x if x is None else x[:, index] for x in (sinks, lse))
    chosen = Problem(q, k, v, bias, sinks, ranges, params, None)
    weights = autograd.weights(chosen, lse, None, positions, average_heads)
    if lead is None:
        return weights
    lead = lead[:-1] if average_heads or not lead else (*lead[:-1], q.shape[1])
    return weights.reshape(*lead, *weights.shape[-2:])


def _checked_lse(lse: Any, shape: tuple[int, ...], query: Tensor) -> Tensor:
    if not isinstance(lse, Tensor) or not lse.is_floating_point():
        kind = show(lse.dtype) if isinstance(lse, Tensor) else type_name(lse)
        raise TypeError(f"attnkern: lse must be a floating-point tensor or None, got {kind}")
    check_place("lse", Kind.of(lse), Kind.of(query))
    if tuple(lse.shape) != shape:
        raise RuntimeError(f"attnkern: lse must have the shape {shape} of the queries, got {tuple(lse.shape)}")
    return lse


def _index(name: str, selection: Any, n: int, device: torch.device) -> slice | Tensor:
    """`selection` of n things as an index that keeps the dimension."""
    if isinstance(selection, slice):
        if (selection.step or 1) > 0:
            return selection
        selection = list(range(*selection.indices(n)))
    if isinstance(selection, Tensor):
        kind = selection.dtype
        if selection.dim() != 1 or kind.is_floating_point or kind.is_complex or kind == torch.bool:
            raise TypeError(
                f"attnkern: {name} must be a 1-D integer tensor, got {show(kind)} of shape {show(selection.shape)}"
            )
        index = selection.to(device, torch.int64)
        if may_look(index):  # elsewhere torch's indexing says it
            _check_within(name, index.tolist(), n)
        return index
    try:
        numbers = [selection] if not isinstance(selection, Sequence) else selection
        if any(isinstance(x, bool) for x in numbers):  # which an index takes for a mask, not for 0 and 1
            raise TypeError
        wanted = [operator.index(x) for x in numbers]
    except TypeError:
        raise TypeError(
            f"attnkern: {name} must be None, an int, a slice, a sequence of ints or a 1-D integer tensor, "
            f"got {shown(selection)}"
        ) from None
    _check_within(name, wanted, n)
    return torch.tensor(wanted, dtype=torch.int64, device=device)


def _check_within(name: str, wanted: list[int], n: int) -> None:
    for x in wanted:
        if not -n <= x < n:
            raise IndexError(f"attnkern: {name} must be in [{-n}, {n}), got {x}")
