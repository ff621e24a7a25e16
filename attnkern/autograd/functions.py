"""Gradients of attention, of its gradients and of its tangents.

    forward --backward--> backward          forward --jvp--> tangent
    backward --backward--> second_backward  backward --jvp--> second_backward + backward
    tangent --backward--> second_backward + backward

Each name is an operator (ops.py), whose memory is linear in the sequence. Derivatives beyond these (of second_backward,
and the jvp of tangent) are those of the plain-torch reference, which is right to any order and holds all scores. vmap
flattens the mapped dimension into the batch: no loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops, sharding
from ..backends import cpu, reference
from ..params import GRAD_BIAS, GRAD_K, GRAD_Q, GRAD_V
from ..problem import Problem
from .shared import (
    NUM_PARAMS,
    SECOND_ORDER_BITS,
    WHOLE,
    batch_of,
    flatten,
    flatten_all,
    goes_into_graph,
    mask_of,
    materialized,
    of_bias,
    outer_levels,
    primals_of,
    pull_back,
    push_forward_here,
    reference_backward,
    reference_second_backward,
    reference_tangent,
    savable,
    stack,
    transformed,
    unflatten,
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    ranges: Tensor | None,
    seed: Tensor | None,
    params: Sequence[Any],
    need_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """out and lse of a Problem, differentiable in the way that is active: autograd, forward mode or a transform.

    lse has shape (0,), or is None, where neither the caller nor a derivative needs it.
    """
    if type(q) is not Tensor:
        sharding.register()
    if transformed():
        function = _attention_jvp if goes_into_graph() else _AttentionJVP.apply
        return function(q, k, v, savable(bias), savable(ranges), seed, *params, backend)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    ):
        if not torch.compiler.is_compiling():
            if bias is not None or ranges is not None:
                bias, ranges = savable(bias), savable(ranges)
            return _apply_eagerly(q, k, v, bias, ranges, seed, params, backend)
        # Dynamo takes no tensor twice, as in attention(x, x, x).
        k, v = k.view_as(k), v.view_as(v)
        function = _Attention if need_lse else _AttentionOutOnly
        return function.apply(q, k, v, bias, ranges, seed, *params, backend)
    return _forward(q, k, v, bias, ranges, seed, *params, need_lse, backend)


def _forward(*args: Any) -> Any:
    """`attnkern::forward`; past the dispatcher where that makes no difference."""
    results = None if torch.compiler.is_compiling() else cpu.forward(*args)
    return ops.forward(*args) if results is None else results


def _backward(*args: Any) -> Any:
    if transformed():
        return _AttentionBackward.apply(*args)
    if torch.compiler.is_compiling():
        return ops.backward(*args)
    if torch.is_grad_enabled():
        return _apply_backward(*args)
    results = cpu.backward(*args)
    return ops.backward(*args) if results is None else results


def _attention_jvp(*args: Any) -> tuple[Tensor, Tensor]:
    return _AttentionJVP.apply(*args)


WHOLE.append(_attention_jvp)


def part_backward(
    problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a problem that holds a part of the keys; `out` and `lse` are the results over all keys."""
    q, k, v, bias, ranges, params, _ = problem
    grad_mask = GRAD_Q | GRAD_K | GRAD_V
    if backend != reference.NAME:
        if type(q) is not Tensor:
            sharding.register()
        given = grad_out, grad_lse, q, k, v, bias, ranges, None, out, lse
        dq, dk, dv, _ = ops.backward(*given, *params, grad_mask, backend)
        return dq, dk, dv
    # The reference normalises by the part's own sum. In the whole, by which it is merged, the part has this share:
    dtype = q.dtype
    grad_out, q, k, v, out = (x.to(lse.dtype) for x in (grad_out, q, k, v, out))
    part_out, part_lse = reference.attention(q, k, v, bias, ranges, None, params)
    share = (part_lse - lse).exp().masked_fill(part_lse == -math.inf, 0.0)
    grad_share = (grad_out * (part_out - out)).sum(-1)
    if grad_lse is not None:
        grad_share = grad_share + grad_lse
    of_part = reference_backward(ranges, None, params, grad_mask)
    dq, dk, dv, _ = of_part(share.unsqueeze(-1) * grad_out, share * grad_share, q, k, v, bias)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class _Attention(torch.autograd.Function):
    """(q, k, v, bias, key_ranges, philox_seed, *params, backend) -> (out, lse)"""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _forward(*args[:-1], True, args[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, ranges, seed, *params, backend = inputs
        ctx.save_for_backward(q, k, v, bias, ranges, seed, *output)
        ctx.save_for_forward(q, k, v, bias, ranges, seed, *output)
        ctx.params = params
        ctx.backend = backend
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        return *_input_grads(ctx, grad_out, grad_lse), *(None,) * (NUM_PARAMS + 3)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, q, k, v, bias, ranges, seed, *params_and_backend):
        n = info.batch_size
        *params, backend = params_and_backend
        q, k, v = (stack(x, dim, n) for x, dim in zip((q, k, v), in_dims[:3], strict=True))
        batch = q.shape[1]
        # A mask shared by all samples and batch elements stays shared.
        if bias is not None and (in_dims[3] is not None or bias.shape[0] != 1):
            bias = flatten(stack(bias, in_dims[3], n), batch)
        if ranges is not None and (in_dims[4] is not None or ranges.shape[0] != 1):
            ranges = flatten(stack(ranges, in_dims[4], n), batch)
        if seed is not None:
            seed = stack(seed, in_dims[5], n).reshape(-1).contiguous()
        out, lse = attention(flatten(q), flatten(k), flatten(v), bias, ranges, seed, params, True, backend)
        return unflatten((out, lse), n, batch)


class _EagerAttention(torch.autograd.Function):
    """(q, k, v, bias, ranges, seed, params, backend) -> (out, lse) without transforms: `_Attention`, with less of
    torch's Python around it."""

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, ranges, seed, params, backend):
        out, lse = _forward(q, k, v, bias, ranges, seed, *params, True, backend)
        ctx.save_for_backward(q, k, v, bias, ranges, seed, out, lse)
        ctx.params = params
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        return *_input_grads(ctx, grad_out, grad_lse), None, None, None, None


class _AttentionOutOnly(_Attention):
    """For compiled graphs: there an unused lse has a gradient of zeros, which is never a DTensor."""

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        return *_input_grads(ctx, grad_out, None), *(None,) * (NUM_PARAMS + 3)


def _input_grads(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Sequence[Tensor | None]:
    """Gradients of q, k, v and bias, as far as they are needed."""
    needed = ctx.needs_input_grad[:4]
    grads: tuple[Tensor | None, ...] = (None,) * 4
    if grad_out is not None or grad_lse is not None:
        q, k, v, bias, ranges, seed, out, lse = ctx.saved_tensors
        cotangents = materialized(grad_out, grad_lse, out)
        mask = needed[0] * GRAD_Q + needed[1] * GRAD_K + needed[2] * GRAD_V + needed[3] * GRAD_BIAS
        grads = _backward(*cotangents, q, k, v, bias, ranges, seed, out, lse, *ctx.params, mask, ctx.backend)
    return [g if need else None for g, need in zip(grads, needed, strict=True)]


class _AttentionJVP(_Attention):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        q, k, v, bias, ranges, seed, out, lse = primals_of(ctx)
        # Detached: the tangents become part of out and lse, and would hold what they are part of.
        results = out.detach(), lse.detach()
        with outer_levels():
            return _Tangent.apply(q, k, v, bias, ranges, seed, *tangents[:4], *results, *ctx.params, ctx.backend)


class _AttentionBackward(torch.autograd.Function):
    """The arguments of `attnkern::backward` -> (dq, dk, dv, dbias), as a function of grad_out, grad_lse, q, k, v, bias.

    out and lse are the forward's results for those inputs, not independent ones: they get no gradient.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return ops.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:10])
        ctx.save_for_forward(*inputs[:10])
        *ctx.params, ctx.grad_mask, ctx.backend = inputs[10:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None):
        needed = ctx.needs_input_grad[:6]
        grads: Sequence[Tensor | None] = (None,) * 6
        if any(c is not None for c in cotangents):
            mask = mask_of(needed, SECOND_ORDER_BITS)
            results = _SecondBackward.apply(*cotangents, *ctx.saved_tensors, *ctx.params, mask, ctx.backend)
            grads = [g if need else None for g, need in zip(results, needed, strict=True)]
        return *grads, *(None,) * (len(ctx.needs_input_grad) - 6)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        """second_backward with the inputs' tangents as cotangents, by the symmetry of second derivatives.

        And backward is linear in grad_out and grad_lse.
        """
        grad_out, grad_lse, *given = primals_of(ctx)
        t_grad_out, t_grad_lse, *moved = tangents[:6]
        rest = *given, *ctx.params, ctx.grad_mask, ctx.backend
        with outer_levels():
            parts = []
            if any(t is not None for t in moved):
                parts.append(_SecondBackward.apply(*moved, grad_out, grad_lse, *rest)[2:])
            if t_grad_out is not None or t_grad_lse is not None:
                parts.append(_backward(*materialized(t_grad_out, t_grad_lse, given[-2]), *rest))
            if len(parts) == 2:
                return tuple(a + b for a, b in zip(*parts, strict=True))
            return tuple(parts[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad_out, grad_lse, q, k, v, bias, ranges, seed, out, lse, *rest):
        n, batch = info.batch_size, batch_of(q, in_dims[2])
        tensors = (grad_out, grad_lse, q, k, v, bias, ranges, seed, out, lse)
        grads = _backward(*flatten_all(tensors, in_dims, n, batch), *rest)
        (dq, dk, dv, dbias), dims = unflatten(grads, n, batch)
        return (dq, dk, dv, of_bias(dbias, bias, in_dims[5], batch)), dims


class _Tangent(torch.autograd.Function):
    """The arguments of `attnkern::tangent` -> (tout, tlse), as a function of q, k, v, bias and their tangents."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return ops.tangent(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:12])
        ctx.save_for_forward(*inputs[:12])
        *ctx.params, ctx.backend = inputs[12:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_tout: Tensor | None, grad_tlse: Tensor | None):
        """second_backward differentiates <grad, tangent>. It is linear in the tangents: their gradient is backward."""
        *inputs, ranges, seed, tq, tk, tv, tbias, out, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4], ctx.needs_input_grad[6:10]
        grads: list[tuple[Tensor | None, ...]] = [(None,) * 4, (None,) * 4]
        if grad_tout is not None or grad_tlse is not None:
            rest = *materialized(grad_tout, grad_tlse, out), *inputs, ranges, seed, out, lse, *ctx.params
            if any(needed[0]):
                mask = mask_of((False, False, *needed[0]), SECOND_ORDER_BITS)
                grads[0] = _SecondBackward.apply(tq, tk, tv, tbias, *rest, mask, ctx.backend)[2:]
            if any(needed[1]):
                grads[1] = _backward(*rest, mask_of(needed[1], SECOND_ORDER_BITS[2:]), ctx.backend)
        (q, k, v, bias), tangents = (
            (g if need else None for g, need in zip(*pair, strict=True)) for pair in zip(grads, needed, strict=True)
        )
        return q, k, v, bias, None, None, *tangents, *(None,) * (NUM_PARAMS + 3)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        *inputs, ranges, seed, tq, tk, tv, tbias, _out, _lse = primals_of(ctx)
        function = reference_tangent(ranges, seed, ctx.params)
        return push_forward_here(function, (*inputs, tq, tk, tv, tbias), (*tangents[:4], *tangents[6:10]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, q, k, v, bias, ranges, seed, tq, tk, tv, tbias, out, lse, *rest):
        n, batch = info.batch_size, batch_of(q, in_dims[0])
        tensors = (q, k, v, bias, ranges, seed, tq, tk, tv, tbias, out, lse)
        return unflatten(_Tangent.apply(*flatten_all(tensors, in_dims, n, batch), *rest), n, batch)


class _SecondBackward(torch.autograd.Function):
    """The arguments of `attnkern::second_backward` -> its results, as a function of all tensors up to bias."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return ops.second_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:12])
        ctx.save_for_forward(*inputs[:12])
        *ctx.params, ctx.grad_mask, _ = inputs[14:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None):
        *primals, ranges, seed = ctx.saved_tensors
        function = reference_second_backward(ranges, seed, ctx.params, ctx.grad_mask)
        grads = pull_back(function, primals, cotangents, ctx.needs_input_grad[:10])
        return *grads, *(None,) * (len(ctx.needs_input_grad) - 10)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        *primals, ranges, seed = primals_of(ctx)
        function = reference_second_backward(ranges, seed, ctx.params, ctx.grad_mask)
        return push_forward_here(function, primals, tangents[:10])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any):
        tensors, rest = args[:14], args[14:]
        n, batch = info.batch_size, batch_of(args[6], in_dims[6])
        grads = _SecondBackward.apply(*flatten_all(tensors, in_dims, n, batch), *rest)
        (*others, gbias), dims = unflatten(grads, n, batch)
        return (*others, of_bias(gbias, args[9], in_dims[9], batch)), dims


# In eager mode, without transforms: Function.apply less 10-20 us of torch's Python for argument binding.
_apply_eagerly = super(torch.autograd.Function, _EagerAttention).apply
_apply_backward = super(torch.autograd.Function, _AttentionBackward).apply
