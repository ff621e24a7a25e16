"""Gradients of the softmax weights (attnkern.attention_weights), a few heads at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import bits, ops, tiles
from ..arguments import exporting
from ..params import AttentionParams, within_ranges
from ..problem import Problem
from .shared import (
    WHOLE,
    flatten,
    flatten_shared,
    goes_into_graph,
    in_programs,
    padded,
    primals_of,
    pull_back,
    push_forward_here,
    savable,
    stack,
    transformed,
)


def weights(
    problem: Problem, lse: Tensor | None, philox_seed: Tensor | None, rows: Tensor | None, average: bool
) -> Tensor:
    """`tiles.weights` of `problem` (its v is not read), differentiable in q, k, bias and sinks; not in lse.

    That loses nothing: backward differentiates the softmax, of which lse is an intermediate result.
    """
    q, k, _, bias, sinks, ranges, *_ = problem.inputs()
    params = problem.params
    # (The weights are as large as any mask.)
    if bias is not None and bits.in_bits(bias):
        bias = bits.bools(bias, k.shape[2])
    if ranges is not None:
        keep = within_ranges(ranges, slice(0, k.shape[2]))
        bias = keep if bias is None else bias & keep if bias.dtype == torch.bool else bias.where(keep, -math.inf)
    lse = None if lse is None else lse.detach()
    return _weights(q, k, bias, sinks, lse, philox_seed, rows, *params, average)


def _weights(*args: Any) -> Tensor:
    """Of the arguments of `attnkern::weights`, in the way that is active."""
    return ops.weights(*args) if exporting() else _in_active_way(*args)


@in_programs("weights")
def _in_active_way(*args: Any) -> Tensor:
    q, k, bias, sinks, lse, seed, rows, *params, average = args
    if transformed():
        function = _weights_jvp if goes_into_graph() else _WeightsJVP.apply
        return function(q, k, savable(bias), sinks, lse, seed, rows, *params, average)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, bias, sinks)):
        if not torch.compiler.is_compiling():
            return _WeightsJVP.apply(q, k, savable(bias), sinks, lse, seed, rows, *params, average)
        return _Weights.apply(q, k.view_as(k), bias, sinks, lse, seed, rows, *params, average)
    return tiles.weights(q, k, bias, sinks, lse, seed, rows, AttentionParams(*params), average)


class _Weights(torch.autograd.Function):
    """(q, k, bias, sinks, lse, philox_seed, rows, *params, average) -> weights.

    Backward makes those of a few heads again.
    """

    @staticmethod
    def forward(*args: Any) -> Tensor:
        q, k, bias, sinks, lse, seed, rows, *params, average = args
        return tiles.weights(q, k, bias, sinks, lse, seed, rows, AttentionParams(*params), average)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        q, k, bias, sinks, _, seed, rows, *params, average = inputs
        ctx.save_for_backward(q, k, bias, sinks, seed, rows)
        ctx.save_for_forward(q, k, bias, sinks, seed, rows)
        ctx.params = params
        ctx.average = average

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        q, k, bias, sinks, seed, rows = ctx.saved_tensors
        given, needed = (q, k, bias, sinks), ctx.needs_input_grad[:4]
        num_heads, count = q.shape[1], 1
        if num_heads == 0:
            nothing = [torch.zeros_like(x) if need else None for x, need in zip(given, needed, strict=True)]
            return padded(nothing, len(ctx.needs_input_grad))
        if ctx.average:
            grad = grad.unsqueeze(1) / num_heads
        if not torch.compiler.is_compiling():
            count = tiles.at_a_time(grad[:, :1].numel(), q.device)
        parts = []
        for heads in tiles.slices(num_heads, count):
            primals = [None if x is None else tiles.heads_of(x, heads, num_heads) for x in given]
            function = _reference_weights(seed, rows, ctx.params, num_heads, heads)
            tile = grad.expand(-1, heads.stop - heads.start, -1, -1) if ctx.average else grad[:, heads]
            parts.append(pull_back(function, primals, (tile,), needed))
        inputs = zip(given, zip(*parts, strict=True), needed, strict=True)
        grads = [_gather_heads(pieces, x, num_heads) if need else None for x, pieces, need in inputs]
        return padded(grads, len(ctx.needs_input_grad))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, q, k, bias, sinks, lse, seed, rows, *params_and_average):
        n = info.batch_size
        *params, average = params_and_average
        q, k = (stack(x, dim, n) for x, dim in zip((q, k), in_dims[:2], strict=True))
        batch = q.shape[1]
        bias, sinks = (flatten_shared(x, dim, n, batch) for x, dim in zip((bias, sinks), in_dims[2:4], strict=True))
        if lse is not None:
            lse = flatten(stack(lse, in_dims[4], n))
        if seed is not None:
            seed = stack(seed, in_dims[5], n).reshape(-1).contiguous()
        out = _weights(flatten(q), flatten(k), bias, sinks, lse, seed, rows, *params, average)
        return out.unflatten(0, (n, batch)), 0


class _WeightsJVP(_Weights):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        q, k, bias, sinks, seed, rows = primals_of(ctx)
        num_heads = q.shape[1]
        heads = slice(0, num_heads)
        function = _reference_weights(seed, rows, ctx.params, num_heads, heads)

        def all_heads(*primals: Tensor | None) -> tuple[Tensor]:
            (p,) = function(*(None if x is None else tiles.heads_of(x, heads, num_heads) for x in primals))
            return (p.mean(1) if ctx.average else p,)

        return push_forward_here(all_heads, (q, k, bias, sinks), tangents[:4])[0]


def _reference_weights(
    seed: Tensor | None, rows: Tensor | None, params: Sequence[Any], num_heads: int, heads: slice
) -> Callable:
    """(q, k, bias, sinks) of some heads -> their weights in q's dtype, in plain torch."""

    def weights(q: Tensor, k: Tensor, bias: Tensor | None, sinks: Tensor | None) -> tuple[Tensor]:
        options = seed, rows, AttentionParams(*params), num_heads, heads
        return (tiles.weights_of_heads(q, k, bias, sinks, *options).to(q.dtype),)

    return weights


def _gather_heads(pieces: Sequence[Tensor], x: Tensor, num_heads: int) -> Tensor:
    """The gradient of x from the gradients of the parts that `tiles.heads_of` took."""
    if x.shape[1] == 1 != num_heads:
        return torch.stack(list(pieces)).sum(0)
    grad = torch.cat(list(pieces), 1)
    return grad if x.shape[1] == num_heads else grad.unflatten(1, (x.shape[1], -1)).sum(2)


def _weights_jvp(*args: Any) -> Tensor:
    return _WeightsJVP.apply(*args)


WHOLE.append(_weights_jvp)
