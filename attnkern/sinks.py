"""Sinks: a logit of each head that takes part in the softmax of its rows and has no value.

Source: G. Xiao et al., "Efficient streaming language models with attention sinks", 2023; as a parameter of each head,
OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025.

With lse0 the log-sum-exp of a row's scores and s its head's sink:

    lse = log(exp(lse0) + exp(s)),   ps = exp(s - lse),   out = (1 - ps) * (out without the sink)

The backward pass computes P = exp(x - lse) with this lse: its kernels need not know of the sink, whose value is 0.
Neither need those of the second derivatives, whose results for P of the sum 1 these functions carry over. With
delta = rowsum(grad_out out) - grad_lse:

    gradient of s = -sum over rows of ps delta
    tlse = (1 - ps) * (of the scores' tangents) + ps ts
    tout = (1 - ps) * (of the scores' tangents and tv) - ps ts out

Here lse and delta are (B, H, L), sinks (B|1, H), all of one dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def probability(lse: Tensor, sinks: Tensor) -> Tensor:
    """ps, of the log-sum-exp with the sink."""
    sinks = sinks.unsqueeze(-1)
    return (sinks - lse).masked_fill(sinks == -math.inf, -math.inf).exp()


def gradient(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """That of the sinks."""
    return -(probability(lse, sinks) * delta).sum(-1).sum_to_size(sinks.shape)


def share(lse: Tensor, sinks: Tensor) -> Tensor:
    """1 - ps, of the log-sum-exp with the sink."""
    sinks = sinks.unsqueeze(-1)
    return -torch.expm1((sinks - lse).masked_fill(sinks == -math.inf, -math.inf))


def count_in_tangent(
    lse: Tensor, out: Tensor, sinks: Tensor, tsinks: Tensor | None, tout: Tensor, tlse: Tensor
) -> Tensor | None:
    """Makes tout and tlse of the scores' alone those with the sink; gives ps ts, None where it is zero."""
    left = share(lse, sinks)
    tlse.mul_(left)
    tout.mul_(left.unsqueeze(-1))
    if tsinks is None:
        return None
    moved = probability(lse, sinks) * tsinks.unsqueeze(-1)
    tlse.add_(moved)
    tout.sub_(moved.unsqueeze(-1) * out)
    return moved


def second_gradient(
    lse: Tensor, delta: Tensor, tlse: Tensor, nu: Tensor, sinks: Tensor, tsinks: Tensor | None
) -> Tensor:
    """The gradient's derivative along the tangents, of which tlse and nu = rowsum(grad_out tout) are given."""
    apart = -tlse if tsinks is None else tsinks.unsqueeze(-1) - tlse
    return -(probability(lse, sinks) * (apart * delta + nu)).sum(-1).sum_to_size(sinks.shape)
