"""Gradients: the only module that knows about them.

    forward op --backward--> backward op --backward--> the reference, differentiated

The first derivative is a kernel (`attnkern::backward`). Derivatives beyond it, and forward-mode ones, are those of the
plain-torch reference, which is right to any order. vmap flattens the mapped dimension into the batch: no loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops, tiles
from .backends import reference
from .problem import Problem, Score

_NUM_SCORE = len(Score._fields)


def attention(problem: Problem, philox_seed: Tensor | None, need_lse: bool, backend: str) -> tuple[Tensor, Tensor]:
    """out and lse of `problem` by its operator, attached to whatever kind of differentiation is active.

    lse has shape (0,) where neither the caller nor a derivative needs it.
    """
    q, k, v, bias, score, _ = problem
    return _forward(q, k, v, bias, philox_seed, score, need_lse, backend)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    score: Sequence[Any],
    need_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if type(q) is not Tensor:
        ops.register_sharding()
    if _transformed():
        function = _attention_jvp if _goes_into_graph() else _AttentionJVP.apply
        return function(q, k, v, bias, seed, *score, backend)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    ):
        if not torch.compiler.is_compiling():
            return _apply_forward(q, k, v, bias, seed, *score, backend)
        # Dynamo takes no tensor twice, as in attention(x, x, x).
        k, v = k.view_as(k), v.view_as(v)
        function = _Attention if need_lse else _AttentionOutOnly
        return function.apply(q, k, v, bias, seed, *score, backend)
    return ops.forward(q, k, v, bias, seed, *score, need_lse, backend)


def _backward(*args: Any) -> Any:
    if _transformed():
        return _AttentionBackward.apply(*args)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _apply_backward(*args)
    return ops.backward(*args)


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
    q, k, v, bias, score, _ = problem
    grad_mask = ops.GRAD_Q | ops.GRAD_K | ops.GRAD_V
    if backend != reference.NAME:
        if type(q) is not Tensor:
            ops.register_sharding()
        dq, dk, dv, _ = ops.backward(
            grad_out, grad_lse, q, k, v, bias, None, out, lse, *score, grad_mask=grad_mask, backend=backend
        )
        return dq, dk, dv
    # The reference normalises by the part's own sum. In the whole, by which it is merged, the part has this share:
    dtype = q.dtype
    grad_out, q, k, v, out = (x.to(lse.dtype) for x in (grad_out, q, k, v, out))
    part_out, part_lse = reference.attention(q, k, v, bias, None, score)
    share = (part_lse - lse).exp().masked_fill(part_lse == -math.inf, 0.0)
    grad_share = (grad_out * (part_out - out)).sum(-1)
    if grad_lse is not None:
        grad_share = grad_share + grad_lse
    pull_back = _reference_backward(None, score, grad_mask)
    dq, dk, dv, _ = pull_back(share.unsqueeze(-1) * grad_out, share * grad_share, q, k, v, bias)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class _Attention(torch.autograd.Function):
    """(q, k, v, bias, philox_seed, *score, backend) -> (out, lse)"""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return ops.forward(*args[:-1], True, args[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, seed, *score, backend = inputs
        ctx.save_for_backward(q, k, v, bias, seed, *output)
        ctx.save_for_forward(q, k, v, bias, seed)
        ctx.score = score
        ctx.backend = backend
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        return _input_grads(ctx, grad_out, grad_lse)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, q, k, v, bias, seed, *score_and_backend):
        n = info.batch_size
        *score, backend = score_and_backend
        q, k, v = (_stack(x, dim, n) for x, dim in zip((q, k, v), in_dims[:3], strict=True))
        batch = q.shape[1]
        # A mask shared by all samples and batch elements stays shared.
        if bias is not None and (in_dims[3] is not None or bias.shape[0] != 1):
            bias = _flatten(_stack(bias, in_dims[3], n), batch)
        if seed is not None:
            seed = _stack(seed, in_dims[4], n).reshape(-1).contiguous()
        out, lse = _forward(_flatten(q), _flatten(k), _flatten(v), bias, seed, score, True, backend)
        return _unflatten((out, lse), n, batch)


class _AttentionOutOnly(_Attention):
    """For compiled graphs, where an lse that nobody uses has a gradient: zeros, and never a DTensor."""

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        return _input_grads(ctx, grad_out, None)


def _input_grads(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """What `_Attention.backward` returns."""
    needed = ctx.needs_input_grad[:4]
    grads: tuple[Tensor | None, ...] = (None,) * 4
    if grad_out is not None or grad_lse is not None:
        q, k, v, bias, seed, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
        mask = needed[0] * ops.GRAD_Q + needed[1] * ops.GRAD_K + needed[2] * ops.GRAD_V + needed[3] * ops.GRAD_BIAS
        grads = _backward(grad_out, grad_lse, q, k, v, bias, seed, out, lse, *ctx.score, mask, ctx.backend)
    return *(g if need else None for g, need in zip(grads, needed, strict=True)), *(None,) * (_NUM_SCORE + 2)


class _AttentionJVP(_Attention):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        q, k, v, bias, seed = ctx.saved_tensors
        return _jvp(_reference_forward(seed, ctx.score), (q, k, v, bias), tangents[:4])


class _AttentionBackward(torch.autograd.Function):
    """The arguments of `attnkern::backward` -> (dq, dk, dv, dbias), as a function of grad_out, grad_lse, q, k, v, bias.

    out and lse are the forward's results for those inputs, not independent ones: they get no gradient.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return ops.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *primals, seed, _out, _lse = inputs[:9]
        ctx.save_for_backward(*primals, seed)
        ctx.save_for_forward(*primals, seed)
        *ctx.score, ctx.grad_mask, _ = inputs[9:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None):
        *primals, seed = ctx.saved_tensors
        function = _reference_backward(seed, ctx.score, ctx.grad_mask)
        grads = _vjp(function, primals, cotangents, ctx.needs_input_grad[:6])
        return *grads, *(None,) * (len(ctx.needs_input_grad) - 6)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        *primals, seed = ctx.saved_tensors
        return _jvp(_reference_backward(seed, ctx.score, ctx.grad_mask), primals, tangents[:6])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad_out, grad_lse, q, k, v, bias, seed, out, lse, *rest):
        n = info.batch_size
        grad_mask = rest[_NUM_SCORE]
        tensors = (grad_out, grad_lse, q, k, v, bias, seed, out, lse)
        grad_out, grad_lse, q, k, v, bias, seed, out, lse = (
            None if x is None else _stack(x, dim, n) for x, dim in zip(tensors, in_dims[:9], strict=True)
        )
        batch = q.shape[1]
        grads = _backward(
            _flatten(grad_out),
            None if grad_lse is None else _flatten(grad_lse),
            _flatten(q),
            _flatten(k),
            _flatten(v),
            None if bias is None else _flatten(bias, batch),  # one per sample: its gradient must not sum over samples
            None if seed is None else seed.reshape(-1).contiguous(),
            _flatten(out),
            _flatten(lse),
            *rest,
        )
        (dq, dk, dv, dbias), dims = _unflatten(grads, n, batch)
        if bias is not None and bias.shape[1] != batch and grad_mask & ops.GRAD_BIAS:
            dbias = dbias.sum(1, keepdim=True)
        return (dq, dk, dv, dbias), dims


def weights(
    problem: Problem, lse: Tensor | None, philox_seed: Tensor | None, rows: Tensor | None, average: bool
) -> Tensor:
    """`tiles.weights` of `problem` (its v is not read), differentiable in q, k and bias; not in lse.

    That loses nothing: backward differentiates the softmax, of which lse is an intermediate result.
    """
    q, k, _, bias, score, _ = problem
    return _weights(q, k, bias, None if lse is None else lse.detach(), philox_seed, rows, score, average)


def _weights(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    lse: Tensor | None,
    seed: Tensor | None,
    rows: Tensor | None,
    score: Sequence[Any],
    average: bool,
) -> Tensor:
    if _transformed():
        function = _weights_jvp if _goes_into_graph() else _WeightsJVP.apply
        return function(q, k, bias, lse, seed, rows, *score, average)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or (bias is not None and bias.requires_grad)):
        if not torch.compiler.is_compiling():
            return _WeightsJVP.apply(q, k, bias, lse, seed, rows, *score, average)
        return _Weights.apply(q, k.view_as(k), bias, lse, seed, rows, *score, average)
    return tiles.weights(q, k, bias, lse, seed, rows, Score(*score), average)


class _Weights(torch.autograd.Function):
    """(q, k, bias, lse, philox_seed, rows, *score, average) -> weights; backward makes a few heads' weights again."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        q, k, bias, lse, seed, rows, *score, average = args
        return tiles.weights(q, k, bias, lse, seed, rows, Score(*score), average)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        q, k, bias, _, seed, rows, *score, average = inputs
        ctx.save_for_backward(q, k, bias, seed, rows)
        ctx.save_for_forward(q, k, bias, seed, rows)
        ctx.score = score
        ctx.average = average

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        q, k, bias, seed, rows = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        num_heads, count = q.shape[1], 1
        if ctx.average:
            grad = grad.unsqueeze(1) / num_heads
        if not torch.compiler.is_compiling():
            count = tiles.at_a_time(grad[:, :1].numel(), q.device)
        parts = []
        for heads in tiles.slices(num_heads, count):
            primals = [None if x is None else tiles.heads_of(x, heads, num_heads) for x in (q, k, bias)]
            function = _reference_weights(seed, rows, ctx.score, num_heads, heads)
            tile = grad.expand(-1, heads.stop - heads.start, -1, -1) if ctx.average else grad[:, heads]
            parts.append(_vjp(function, primals, (tile,), needed))
        inputs = zip((q, k, bias), zip(*parts, strict=True), needed, strict=True)
        grads = (_gather_heads(pieces, x, num_heads) if need else None for x, pieces, need in inputs)
        return *grads, *(None,) * (_NUM_SCORE + 4)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, q, k, bias, lse, seed, rows, *score_and_average):
        n = info.batch_size
        *score, average = score_and_average
        q, k = (_stack(x, dim, n) for x, dim in zip((q, k), in_dims[:2], strict=True))
        batch = q.shape[1]
        if bias is not None and (in_dims[2] is not None or bias.shape[0] != 1):
            bias = _flatten(_stack(bias, in_dims[2], n), batch)
        if lse is not None:
            lse = _flatten(_stack(lse, in_dims[3], n))
        if seed is not None:
            seed = _stack(seed, in_dims[4], n).reshape(-1).contiguous()
        out = _weights(_flatten(q), _flatten(k), bias, lse, seed, rows, score, average)
        return out.unflatten(0, (n, batch)), 0


class _WeightsJVP(_Weights):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        q, k, bias, seed, rows = ctx.saved_tensors
        num_heads = q.shape[1]
        heads = slice(0, num_heads)
        function = _reference_weights(seed, rows, ctx.score, num_heads, heads)

        def all_heads(*primals: Tensor | None) -> tuple[Tensor]:
            (p,) = function(*(None if x is None else tiles.heads_of(x, heads, num_heads) for x in primals))
            return (p.mean(1) if ctx.average else p,)

        return _jvp(all_heads, (q, k, bias), tangents[:3])[0]


def _reference_weights(
    seed: Tensor | None, rows: Tensor | None, score: Sequence[Any], num_heads: int, heads: slice
) -> Callable:
    """(q, k, bias) of some heads -> their weights in q's dtype, in plain torch."""

    def weights(q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        return (tiles.weights_of_heads(q, k, bias, seed, rows, Score(*score), num_heads, heads).to(q.dtype),)

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


def _unflatten(results: Sequence[Tensor], n: int, batch: int) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """(n * B, ...) -> (n, B, ...) and the mapped dimensions; results that were not asked for (1-D) pass through."""
    unflattened = tuple(x.unflatten(0, (n, batch)) if x.ndim > 1 else x for x in results)
    return unflattened, tuple(0 if x.ndim > 1 else None for x in results)


def _reference_forward(seed: Tensor | None, score: Sequence[Any]) -> Callable:
    """(q, k, v, bias) -> (out, lse) in plain torch."""
    return lambda q, k, v, bias: reference.attention(q, k, v, bias, seed, Score(*score))


def _reference_backward(seed: Tensor | None, score: Sequence[Any], grad_mask: int) -> Callable:
    """(grad_out, grad_lse, q, k, v, bias) -> (dq, dk, dv, dbias) in plain torch, as `attnkern::backward`."""
    needed = [bool(grad_mask & bit) for bit in (ops.GRAD_Q, ops.GRAD_K, ops.GRAD_V, ops.GRAD_BIAS)]

    def backward(grad_out: Tensor, grad_lse: Tensor | None, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        grads = _vjp(_reference_forward(seed, score), inputs, (grad_out, grad_lse), needed)
        return tuple(grad_out.new_empty(0) if g is None else g for g in grads)

    return backward


def _vjp(fn: Callable, primals: Sequence[Any], cotangents: Sequence[Tensor | None], needed: Sequence[bool]) -> list:
    """Cotangents of fn's outputs pulled back to the primals that are `needed`, None for the others."""
    fn, active = _restricted(fn, primals, needed)
    outputs, pullback, *_ = torch.func.vjp(fn, *active)
    filled = tuple(torch.zeros_like(o) if c is None else c for o, c in zip(outputs, cotangents, strict=True))
    grads = iter(pullback(filled))
    return [next(grads) if need else None for need in needed]


def _jvp(fn: Callable, primals: Sequence[Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Tangents of fn's outputs, by reverse mode alone: the pull-back is linear, so its own pull-back pushes forward.

    Forward mode in torch does not nest in every combination of levels; reverse mode does.
    """
    primals = [None if p is None else forward_ad.unpack_dual(p, level=0).primal for p in primals]
    fn, active = _restricted(fn, primals, [t is not None for t in tangents])
    # Torch calls us with forward mode off, which would cut off the levels outside this one (jvp of jvp).
    with forward_ad._set_fwd_grad_enabled(True):
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
_apply_forward = super(torch.autograd.Function, _AttentionJVP).apply
_apply_backward = super(torch.autograd.Function, _AttentionBackward).apply
