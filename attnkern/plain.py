"""The operators in plain torch, on any device: for calls that no kernel takes. They hold all scores in memory, but for
the second derivatives (second_order.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import relative, rng, sinks
from .backends import reference
from .params import GRAD_BIAS, GRAD_K, GRAD_Q, GRAD_SINKS, GRAD_V, AttentionParams, empty_like_heads
from .problem import Problem, autocasts
from .second_order import second_backward, tangent
from .signatures import Inputs

__all__ = ["backward", "forward", "second_backward", "tangent"]


def forward(inputs: Inputs, params: AttentionParams, need_lse: bool) -> tuple[Tensor, Tensor]:
    """`attnkern::forward` (ops.py)."""
    out, lse = reference.forward(Problem.of_inputs(inputs, params), inputs.philox_seed)
    return out, lse if need_lse else lse.new_empty(0)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    params: AttentionParams,
    grad_mask: int,
) -> tuple[Tensor, ...]:
    """`attnkern::backward` (ops.py). Keys and values may be a part of those that `out` and `lse` are the results of."""
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    if autocasts(q.device):
        with torch.autocast(q.device.type, enabled=False):
            return backward(grad_out, grad_lse, inputs, out, lse, params, grad_mask)
    batch, heads, seqlen_q, _ = q.shape
    exact, seqlen_k = lse.dtype, k.shape[2]
    none = (lse == -math.inf).unsqueeze(-1)
    queries = [x.to(exact).masked_fill(none, 0.0) for x in (q, grad_out, out)]
    keys = [reference.per_query_head(x, heads).to(exact) for x in (k, v)]
    live = reference.may_attend(q, seqlen_k, bias, inputs.key_ranges, params)
    query, grad, result, key, value = reference.attended(live, queries, keys)
    capped = reference.products(query, key, params)
    scores, dead = reference.alive(reference.masked(capped, bias, live))
    # Not exp(scores - lse), which rounds the sum away beside large scores: see `reference.alive`.
    share = (scores.logsumexp(-1, keepdim=True) - lse.masked_fill(none.squeeze(-1), 0.0).unsqueeze(-1)).exp()
    p = scores.softmax(-1).mul(share).masked_fill(dead | none, 0.0)
    dropped, dp = p, grad @ value.mT
    if inputs.philox_seed is not None:
        keep = rng.keep_mask(inputs.philox_seed, params.dropout_p, batch, heads, seqlen_q, seqlen_k)
        dropped, dp = (reference.drop(x, keep, params.dropout_p) for x in (p, dp))
    dv = dropped.mT @ grad
    rest = -(grad * result).sum(-1, keepdim=True)
    if grad_lse is not None:
        rest = rest + grad_lse.unsqueeze(-1).masked_fill(none, 0.0)
    dx = p * (dp + rest)
    dz = params.softmax_scale * (dx * (1 - (capped / params.softcap).square()) if params.softcap else dx)
    grads: list[Any] = [
        empty_like_heads(x, x.shape[-1]).copy_(made.unflatten(1, (x.shape[1], -1)).sum(2))
        if grad_mask & bit
        else x.new_empty(0)
        for x, made, bit in ((q, dz @ key, GRAD_Q), (k, dz.mT @ query, GRAD_K), (v, dv, GRAD_V))
    ]
    if bias is not None and grad_mask & GRAD_BIAS:
        if relative.by_distance(bias):
            total = dx.new_zeros(bias.shape)
            relative.add_diagonals(total, dx.sum_to_size(*bias.shape[:2], seqlen_q, seqlen_k), 0, 0, seqlen_q)
        else:
            total = dx.sum_to_size(bias.shape)
        grads.append(total.to(bias.dtype))
    else:
        grads.append(q.new_empty(0))
    if inputs.sinks is not None and grad_mask & GRAD_SINKS:
        grads.append(sinks.gradient(lse, -rest.squeeze(-1), inputs.sinks))
    else:
        grads.append(lse.new_empty(0))
    return tuple(grads)
