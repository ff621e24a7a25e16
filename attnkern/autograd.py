"""Gradients: the only module that knows about them.

    forward --backward--> backward          forward --jvp--> tangent
    backward --backward--> second_backward  backward --jvp--> second_backward + backward
    tangent --backward--> second_backward + backward

Each name is an operator (ops.py), whose memory is linear in the sequence. Derivatives beyond these (of second_backward,
and the jvp of tangent) are those of the plain-torch reference, which is right to any order and holds all scores. vmap
flattens the mapped dimension into the batch: no loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops, sharding, tiles
from .backends import cpu, reference
from .params import (
    GRAD_BIAS,
    GRAD_GRAD_LSE,
    GRAD_GRAD_OUT,
    GRAD_K,
    GRAD_Q,
    GRAD_V,
    AttentionParams,
)
from .problem import Problem

_NUM_PARAMS = len(AttentionParams._fields)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    params: Sequence[Any],
    need_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """out and lse of a Problem by its operator, attached to whatever kind of differentiation is active.

    lse has shape (0,), or is None, where neither the caller nor a derivative needs it.
    """
    if type(q) is not Tensor:
        sharding.register()
    if _transformed():
        function = _attention_jvp if _goes_into_graph() else _AttentionJVP.apply
        return function(q, k, v, bias, seed, *params, backend)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    ):
        if not torch.compiler.is_compiling():
            return _apply_eagerly(q, k, v, bias, seed, params, backend)
        # Dynamo takes no tensor twice, as in attention(x, x, x).
        k, v = k.view_as(k), v.view_as(v)
        function = _Attention if need_lse else _AttentionOutOnly
        return function.apply(q, k, v, bias, seed, *params, backend)
    return _forward(q, k, v, bias, seed, *params, need_lse, backend)


def _forward(*args: Any) -> Any:
    """`attnkern::forward`, past the dispatcher where nobody can tell."""
    results = None if torch.compiler.is_compiling() else cpu.forward(*args)
    return ops.forward(*args) if results is None else results


def _backward(*args: Any) -> Any:
    if _transformed():
        return _AttentionBackward.apply(*args)
    if torch.compiler.is_compiling():
        return ops.backward(*args)
    if torch.is_grad_enabled():
        return _apply_backward(*args)
    results = cpu.backward(*args)
    return ops.backward(*args) if results is None else results


def _transformed() -> bool:
    """Whether a torch.func transform or a forward-mode level is active: inputs may be wrapped or carry tangents."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _attention_jvp(*args: Any) -> tuple[Tensor, Tensor]:
    return _AttentionJVP.apply(*args)


def _weights_jvp(*args: Any) -> Tensor:
    return _WeightsJVP.apply(*args)


def _goes_into_graph() -> bool:
    """Whether this call, under a transform, goes as a whole into a graph that is being traced.

    Dual numbers do not: no compiled graph carries them, and Inductor's drop them in silence. (Dynamo answers the error
    by running the caller without a graph, or shows it where fullgraph=True.)
    """
    if not torch.compiler.is_compiling():
        return False
    if not torch._C._are_functorch_transforms_active():
        raise RuntimeError("attnkern: dual numbers (torch.autograd.forward_ad) cannot be compiled; torch.func.jvp can")
    _put_in_graph_whole()
    return True


def _put_in_graph_whole() -> None:
    """Dynamo looks into no Function that has a jvp: it is to leave these calls to what traces its graph afterwards.

    That runs the transforms for real, as in eager mode. (A decorator would import all of Dynamo with this module.)
    """
    torch._dynamo.allow_in_graph([_attention_jvp, _weights_jvp])


_put_in_graph_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called while Dynamo traces


def part_backward(
    problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a problem whose keys are a part of those that `out` and `lse` are the results of."""
    q, k, v, bias, params, _ = problem
    grad_mask = GRAD_Q | GRAD_K | GRAD_V
    if backend != reference.NAME:
        if type(q) is not Tensor:
            sharding.register()
        dq, dk, dv, _ = ops.backward(grad_out, grad_lse, q, k, v, bias, None, out, lse, *params, grad_mask, backend)
        return dq, dk, dv
    # The reference normalises by the part's own sum. In the whole, by which it is merged, the part has this share:
    dtype = q.dtype
    grad_out, q, k, v, out = (x.to(lse.dtype) for x in (grad_out, q, k, v, out))
    part_out, part_lse = reference.attention(q, k, v, bias, None, params)
    share = (part_lse - lse).exp().masked_fill(part_lse == -math.inf, 0.0)
    grad_share = (grad_out * (part_out - out)).sum(-1)
    if grad_lse is not None:
        grad_share = grad_share + grad_lse
    pull_back = _reference_backward(None, params, grad_mask)
    dq, dk, dv, _ = pull_back(share.unsqueeze(-1) * grad_out, share * grad_share, q, k, v, bias)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class _Attention(torch.autograd.Function):
    """(q, k, v, bias, philox_seed, *params, backend) -> (out, lse)"""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _forward(*args[:-1], True, args[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, seed, *params, backend = inputs
        ctx.save_for_backward(q, k, v, bias, seed, *output)
        ctx.save_for_forward(q, k, v, bias, seed, *output)
        ctx.params = params
        ctx.backend = backend
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        return *_input_grads(ctx, grad_out, grad_lse), *(None,) * (_NUM_PARAMS + 2)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, q, k, v, bias, seed, *params_and_backend):
        n = info.batch_size
        *params, backend = params_and_backend
        q, k, v = (_stack(x, dim, n) for x, dim in zip((q, k, v), in_dims[:3], strict=True))
        batch = q.shape[1]
        # A mask shared by all samples and batch elements stays shared.
        if bias is not None and (in_dims[3] is not None or bias.shape[0] != 1):
            bias = _flatten(_stack(bias, in_dims[3], n), batch)
        if seed is not None:
            seed = _stack(seed, in_dims[4], n).reshape(-1).contiguous()
        out, lse = attention(_flatten(q), _flatten(k), _flatten(v), bias, seed, params, True, backend)
        return _unflatten((out, lse), n, batch)


class _EagerAttention(torch.autograd.Function):
    """(q, k, v, bias, seed, params, backend) -> (out, lse) without transforms: `_Attention`, with less of torch's
    Python around it."""

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, seed, params, backend):
        out, lse = _forward(q, k, v, bias, seed, *params, True, backend)
        ctx.save_for_backward(q, k, v, bias, seed, out, lse)
        ctx.params = params
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        return *_input_grads(ctx, grad_out, grad_lse), None, None, None


class _AttentionOutOnly(_Attention):
    """For compiled graphs, where an lse that nobody uses has a gradient: zeros, and never a DTensor."""

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        return *_input_grads(ctx, grad_out, None), *(None,) * (_NUM_PARAMS + 2)


def _input_grads(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Sequence[Tensor | None]:
    """Gradients of q, k, v and bias, as far as they are needed."""
    needed = ctx.needs_input_grad[:4]
    grads: tuple[Tensor | None, ...] = (None,) * 4
    if grad_out is not None or grad_lse is not None:
        q, k, v, bias, seed, out, lse = ctx.saved_tensors
        cotangents = _materialized(grad_out, grad_lse, out)
        mask = needed[0] * GRAD_Q + needed[1] * GRAD_K + needed[2] * GRAD_V + needed[3] * GRAD_BIAS
        grads = _backward(*cotangents, q, k, v, bias, seed, out, lse, *ctx.params, mask, ctx.backend)
    return [g if need else None for g, need in zip(grads, needed, strict=True)]


class _AttentionJVP(_Attention):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        q, k, v, bias, seed, out, lse = _primals(ctx)
        # Detached: the tangents become part of out and lse, and would hold what they are part of.
        results = out.detach(), lse.detach()
        with _outer_levels():
            return _Tangent.apply(q, k, v, bias, seed, *tangents[:4], *results, *ctx.params, ctx.backend)


class _AttentionBackward(torch.autograd.Function):
    """The arguments of `attnkern::backward` -> (dq, dk, dv, dbias), as a function of grad_out, grad_lse, q, k, v, bias.

    out and lse are the forward's results for those inputs, not independent ones: they get no gradient.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return ops.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:9])
        ctx.save_for_forward(*inputs[:9])
        *ctx.params, ctx.grad_mask, ctx.backend = inputs[9:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None):
        needed = ctx.needs_input_grad[:6]
        grads: Sequence[Tensor | None] = (None,) * 6
        if any(c is not None for c in cotangents):
            mask = _mask_of(needed, _SECOND_ORDER_BITS)
            results = _SecondBackward.apply(*cotangents, *ctx.saved_tensors, *ctx.params, mask, ctx.backend)
            grads = [g if need else None for g, need in zip(results, needed, strict=True)]
        return *grads, *(None,) * (len(ctx.needs_input_grad) - 6)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        """By the symmetry of second derivatives, what second_backward makes of the inputs' tangents as cotangents.

        And backward is linear in grad_out and grad_lse.
        """
        grad_out, grad_lse, *given = _primals(ctx)
        t_grad_out, t_grad_lse, *moved = tangents[:6]
        rest = *given, *ctx.params, ctx.grad_mask, ctx.backend
        with _outer_levels():
            parts = []
            if any(t is not None for t in moved):
                parts.append(_SecondBackward.apply(*moved, grad_out, grad_lse, *rest)[2:])
            if t_grad_out is not None or t_grad_lse is not None:
                parts.append(_backward(*_materialized(t_grad_out, t_grad_lse, given[-2]), *rest))
            if len(parts) == 2:
                return tuple(a + b for a, b in zip(*parts, strict=True))
            return tuple(parts[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad_out, grad_lse, q, k, v, bias, seed, out, lse, *rest):
        n, batch = info.batch_size, _batch_of(q, in_dims[2])
        tensors = (grad_out, grad_lse, q, k, v, bias, seed, out, lse)
        grads = _backward(*_flatten_all(tensors, in_dims, n, batch), *rest)
        (dq, dk, dv, dbias), dims = _unflatten(grads, n, batch)
        return (dq, dk, dv, _of_bias(dbias, bias, in_dims[5], batch)), dims


class _Tangent(torch.autograd.Function):
    """The arguments of `attnkern::tangent` -> (tout, tlse), as a function of q, k, v, bias and their tangents."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return ops.tangent(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:11])
        ctx.save_for_forward(*inputs[:11])
        *ctx.params, ctx.backend = inputs[11:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_tout: Tensor | None, grad_tlse: Tensor | None):
        """<grad, tangent> is what second_backward differentiates; of the tangents, it is linear: that is backward."""
        *inputs, seed, tq, tk, tv, tbias, out, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4], ctx.needs_input_grad[5:9]
        grads: list[tuple[Tensor | None, ...]] = [(None,) * 4, (None,) * 4]
        if grad_tout is not None or grad_tlse is not None:
            rest = *_materialized(grad_tout, grad_tlse, out), *inputs, seed, out, lse, *ctx.params
            if any(needed[0]):
                mask = _mask_of((False, False, *needed[0]), _SECOND_ORDER_BITS)
                grads[0] = _SecondBackward.apply(tq, tk, tv, tbias, *rest, mask, ctx.backend)[2:]
            if any(needed[1]):
                grads[1] = _backward(*rest, _mask_of(needed[1], _SECOND_ORDER_BITS[2:]), ctx.backend)
        (q, k, v, bias), tangents = (
            (g if need else None for g, need in zip(*pair, strict=True)) for pair in zip(grads, needed, strict=True)
        )
        return q, k, v, bias, None, *tangents, *(None,) * (_NUM_PARAMS + 3)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        *inputs, seed, tq, tk, tv, tbias, _out, _lse = _primals(ctx)
        moves = tangents[:4], tangents[5:9]
        function = _reference_tangent(seed, ctx.params)
        return _jvp(function, (*inputs, tq, tk, tv, tbias), (*moves[0], *moves[1]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, q, k, v, bias, seed, tq, tk, tv, tbias, out, lse, *rest):
        n, batch = info.batch_size, _batch_of(q, in_dims[0])
        tensors = (q, k, v, bias, seed, tq, tk, tv, tbias, out, lse)
        return _unflatten(_Tangent.apply(*_flatten_all(tensors, in_dims, n, batch), *rest), n, batch)


class _SecondBackward(torch.autograd.Function):
    """The arguments of `attnkern::second_backward` -> its results, as a function of all tensors up to bias."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return ops.second_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:11])
        ctx.save_for_forward(*inputs[:11])
        *ctx.params, ctx.grad_mask, _ = inputs[13:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None):
        *primals, seed = ctx.saved_tensors
        function = _reference_second_backward(seed, ctx.params, ctx.grad_mask)
        grads = _vjp(function, primals, cotangents, ctx.needs_input_grad[:10])
        return *grads, *(None,) * (len(ctx.needs_input_grad) - 10)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        *primals, seed = _primals(ctx)
        return _jvp(_reference_second_backward(seed, ctx.params, ctx.grad_mask), primals, tangents[:10])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any):
        tensors, rest = args[:13], args[13:]
        n, batch = info.batch_size, _batch_of(args[6], in_dims[6])
        grads = _SecondBackward.apply(*_flatten_all(tensors, in_dims, n, batch), *rest)
        (*others, gbias), dims = _unflatten(grads, n, batch)
        return (*others, _of_bias(gbias, args[9], in_dims[9], batch)), dims


_SECOND_ORDER_BITS = (
    GRAD_GRAD_OUT,
    GRAD_GRAD_LSE,
    GRAD_Q,
    GRAD_K,
    GRAD_V,
    GRAD_BIAS,
)


def _mask_of(needed: Sequence[bool], bits: Sequence[int]) -> int:
    return sum(bit for bit, need in zip(bits, needed, strict=True) if need)


def _materialized(grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of out and lse as the operators take them: that of out is never None."""
    if grad_out is None:
        grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
    return grad_out, grad_lse


def _primals(ctx: Any) -> list[Any]:
    """What a Function saved, without the tangents of the level whose jvp it computes."""
    return [None if x is None else forward_ad.unpack_dual(x, level=0).primal for x in ctx.saved_tensors]


def _outer_levels() -> Any:
    """Forward mode on: torch calls a jvp with it off, which would cut off the levels outside this one (jvp of jvp)."""
    return forward_ad._set_fwd_grad_enabled(True)


def weights(
    problem: Problem, lse: Tensor | None, philox_seed: Tensor | None, rows: Tensor | None, average: bool
) -> Tensor:
    """`tiles.weights` of `problem` (its v is not read), differentiable in q, k and bias; not in lse.

    That loses nothing: backward differentiates the softmax, of which lse is an intermediate result.
    """
    q, k, _, bias, params, _ = problem
    return _weights(q, k, bias, None if lse is None else lse.detach(), philox_seed, rows, params, average)


def _weights(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    lse: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    params: Sequence[Any],
    average: bool,
) -> Tensor:
    if _transformed():
        function = _weights_jvp if _goes_into_graph() else _WeightsJVP.apply
        return function(q, k, bias, lse, seed, rows, *params, average)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or (bias is not None and bias.requires_grad)):
        if not torch.compiler.is_compiling():
            return _WeightsJVP.apply(q, k, bias, lse, seed, rows, *params, average)
        return _Weights.apply(q, k.view_as(k), bias, lse, seed, rows, *params, average)
    return tiles.weights(q, k, bias, lse, seed, rows, AttentionParams(*params), average)


class _Weights(torch.autograd.Function):
    """(q, k, bias, lse, philox_seed, rows, *params, average) -> weights; backward makes a few heads' weights again."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        q, k, bias, lse, seed, rows, *params, average = args
        return tiles.weights(q, k, bias, lse, seed, rows, AttentionParams(*params), average)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        q, k, bias, _, seed, rows, *params, average = inputs
        ctx.save_for_backward(q, k, bias, seed, rows)
        ctx.save_for_forward(q, k, bias, seed, rows)
        ctx.params = params
        ctx.average = average

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        q, k, bias, seed, rows = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        num_heads, count = q.shape[1], 1
        if num_heads == 0:
            nothing = (torch.zeros_like(x) if need else None for x, need in zip((q, k, bias), needed, strict=True))
            return *nothing, *(None,) * (_NUM_PARAMS + 4)
        if ctx.average:
            grad = grad.unsqueeze(1) / num_heads
        if not torch.compiler.is_compiling():
            count = tiles.at_a_time(grad[:, :1].numel(), q.device)
        parts = []
        for heads in tiles.slices(num_heads, count):
            primals = [None if x is None else tiles.heads_of(x, heads, num_heads) for x in (q, k, bias)]
            function = _reference_weights(seed, rows, ctx.params, num_heads, heads)
            tile = grad.expand(-1, heads.stop - heads.start, -1, -1) if ctx.average else grad[:, heads]
            parts.append(_vjp(function, primals, (tile,), needed))
        inputs = zip((q, k, bias), zip(*parts, strict=True), needed, strict=True)
        grads = (_gather_heads(pieces, x, num_heads) if need else None for x, pieces, need in inputs)
        return *grads, *(None,) * (_NUM_PARAMS + 4)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, q, k, bias, lse, seed, rows, *params_and_average):
        n = info.batch_size
        *params, average = params_and_average
        q, k = (_stack(x, dim, n) for x, dim in zip((q, k), in_dims[:2], strict=True))
        batch = q.shape[1]
        if bias is not None and (in_dims[2] is not None or bias.shape[0] != 1):
            bias = _flatten(_stack(bias, in_dims[2], n), batch)
        if lse is not None:
            lse = _flatten(_stack(lse, in_dims[3], n))
        if seed is not None:
            seed = _stack(seed, in_dims[4], n).reshape(-1).contiguous()
        out = _weights(_flatten(q), _flatten(k), bias, lse, seed, rows, params, average)
        return out.unflatten(0, (n, batch)), 0


class _WeightsJVP(_Weights):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        q, k, bias, seed, rows = _primals(ctx)
        num_heads = q.shape[1]
        heads = slice(0, num_heads)
        function = _reference_weights(seed, rows, ctx.params, num_heads, heads)

        def all_heads(*primals: Tensor | None) -> tuple[Tensor]:
            (p,) = function(*(None if x is None else tiles.heads_of(x, heads, num_heads) for x in primals))
            return (p.mean(1) if ctx.average else p,)

        return _jvp(all_heads, (q, k, bias), tangents[:3])[0]


def _reference_weights(
    seed: Tensor | None, rows: Tensor | None, params: Sequence[Any], num_heads: int, heads: slice
) -> Callable:
    """(q, k, bias) of some heads -> their weights in q's dtype, in plain torch."""

    def weights(q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        return (tiles.weights_of_heads(q, k, bias, seed, rows, AttentionParams(*params), num_heads, heads).to(q.dtype),)

    return weights


def _gather_heads(pieces: Sequence[Tensor], x: Tensor, num_heads: int) -> Tensor:
    """The gradient of x from those of what `tiles.heads_of` took of it."""
    if x.shape[1] == 1 != num_heads:
        return torch.stack(list(pieces)).sum(0)
    grad = torch.cat(list(pieces), 1)
    return grad if x.shape[1] == num_heads else grad.unflatten(1, (x.shape[1], -1)).sum(2)


def _stack(x: Tensor, dim: int | None, n: int) -> Tensor:
    """x with the mapped dimension first; a tensor that has none is repeated by stride 0."""
    return x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


def _flatten(x: Tensor, batch: int | None = None) -> Tensor:
    """(n, B, ...) -> (n * B, ...), a view where strides allow; `batch` broadcasts B first."""
    if batch is not None:
        x = x.expand(x.shape[0], batch, *x.shape[2:])
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _batch_of(q: Tensor, dim: int | None) -> int:
    """The size of q's batch under vmap, which maps the dimension `dim`."""
    return q.shape[0] if dim != 0 else q.shape[1]


def _flatten_all(tensors: Sequence[Any], in_dims: Sequence[int | None], n: int, batch: int) -> list[Tensor | None]:
    """An operator's tensors with the samples in the batch; a seed becomes one for each.

    So does a bias, for its gradient and its tangent are each sample's own.
    """

    def flat(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        x = _stack(x, dim, n)
        return x.reshape(-1).contiguous() if x.ndim == 2 else _flatten(x, batch)

    return [flat(x, dim) for x, dim in zip(tensors, in_dims, strict=False)]


def _of_bias(grad: Tensor, bias: Tensor | None, dim: int | None, batch: int) -> Tensor:
    """The gradient of a bias from that of each batch element, under vmap, where the batch shared it."""
    if grad.ndim == 1 or bias is None or _batch_of(bias, dim) == batch:
        return grad
    return grad.sum(1, keepdim=True)


def _unflatten(results: Sequence[Tensor], n: int, batch: int) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """(n * B, ...) -> (n, B, ...) and the mapped dimensions; results that were not asked for (1-D) pass through."""
    unflattened = tuple(x.unflatten(0, (n, batch)) if x.ndim > 1 else x for x in results)
    return unflattened, tuple(0 if x.ndim > 1 else None for x in results)


def _reference_forward(seed: Tensor | None, params: Sequence[Any]) -> Callable:
    """(q, k, v, bias) -> (out, lse) in plain torch."""
    return lambda q, k, v, bias: reference.attention(q, k, v, bias, seed, AttentionParams(*params))


def _reference_backward(seed: Tensor | None, params: Sequence[Any], grad_mask: int) -> Callable:
    """(grad_out, grad_lse, q, k, v, bias) -> (dq, dk, dv, dbias) in plain torch, as `attnkern::backward`."""
    needed = [bool(grad_mask & bit) for bit in (GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS)]

    def backward(grad_out: Tensor, grad_lse: Tensor | None, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        grads = _vjp(_reference_forward(seed, params), inputs, (grad_out, grad_lse), needed)
        return tuple(grad_out.new_empty(0) if g is None else g for g in grads)

    return backward


def _reference_tangent(seed: Tensor | None, params: Sequence[Any]) -> Callable:
    """(q, k, v, bias, tq, tk, tv, tbias) -> (tout, tlse) in plain torch, as `attnkern::tangent`."""
    forward = _reference_forward(seed, params)
    return lambda *inputs: _push_forward(forward, inputs[:4], inputs[4:])


def _reference_second_backward(seed: Tensor | None, params: Sequence[Any], grad_mask: int) -> Callable:
    """(cot_dq, ..., cot_dbias, grad_out, grad_lse, q, k, v, bias) -> as `attnkern::second_backward`, in plain torch."""
    needed = [bool(grad_mask & bit) for bit in _SECOND_ORDER_BITS]

    def second_backward(*inputs: Any) -> tuple[Tensor, ...]:
        cotangents, primals = inputs[:4], inputs[4:]
        bits = (GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS)
        backward = _reference_backward(seed, params, _mask_of([c is not None for c in cotangents], bits))
        grads = _vjp(backward, primals, cotangents, needed)
        return tuple(primals[0].new_empty(0) if g is None else g for g in grads)

    return second_backward


def _vjp(fn: Callable, primals: Sequence[Any], cotangents: Sequence[Tensor | None], needed: Sequence[bool]) -> list:
    """Cotangents of fn's outputs pulled back to the primals that are `needed`, None for the others."""
    fn, active = _restricted(fn, primals, needed)
    outputs, pullback, *_ = torch.func.vjp(fn, *active)
    filled = tuple(torch.zeros_like(o) if c is None else c for o, c in zip(outputs, cotangents, strict=True))
    grads = iter(pullback(filled))
    return [next(grads) if need else None for need in needed]


def _jvp(fn: Callable, primals: Sequence[Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Tangents of fn's outputs at primals without any of this level."""
    with _outer_levels():
        return _push_forward(fn, primals, tangents)


def _push_forward(fn: Callable, primals: Sequence[Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Tangents of fn's outputs, by reverse mode alone: the pull-back is linear, so its own pull-back pushes forward.

    Forward mode in torch does not nest in every combination of levels; reverse mode does.
    """
    fn, active = _restricted(fn, primals, [t is not None for t in tangents])
    zeros = tuple(torch.zeros_like(o) for o in fn(*active))
    _, pushforward, *_ = torch.func.vjp(lambda cotangents: torch.func.vjp(fn, *active)[1](cotangents), zeros)
    # Contiguous, as the primal results mostly are: torch copies others, and cannot with symbolic sizes.
    results = pushforward(tuple(t for t in tangents if t is not None))[0]
    return tuple(x.contiguous() for x in results)


def _restricted(fn: Callable, primals: Sequence[Any], chosen: Sequence[bool]) -> tuple[Callable, tuple]:
    """fn as a function of the chosen primals alone, and these."""

    def restricted(*active: Tensor) -> Any:
        values = iter(active)
        return fn(*(next(values) if c else p for p, c in zip(primals, chosen, strict=True)))

    return restricted, tuple(p for p, c in zip(primals, chosen, strict=True) if c)


# In eager mode, without transforms: Function.apply less 10-20 us of torch's Python for argument binding.
_apply_eagerly = super(torch.autograd.Function, _EagerAttention).apply
_apply_backward = super(torch.autograd.Function, _AttentionBackward).apply
