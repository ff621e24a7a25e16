"""Gradients: the only module that knows about them.

    forward op --backward--> backward op --backward--> the reference, differentiated

The first derivative is a kernel (`attnkern::backward`). Derivatives beyond it, and forward-mode ones, are those of the
plain-torch reference, which is right to any order. vmap flattens the mapped dimension into the batch: no loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops
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
    if _transformed():
        if torch.compiler.is_compiling():
            # Dynamo takes no Function with a jvp, and a bare operator would have no derivative at all.
            torch._dynamo.graph_break(msg="attnkern under a torch.func transform runs outside the graph")
        return _AttentionJVP.apply(q, k, v, bias, seed, *score, backend)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    ):
        if not torch.compiler.is_compiling():
            return _apply_forward(q, k, v, bias, seed, *score, backend)
        # Dynamo takes no tensor twice, as in attention(x, x, x).
        k, v = k.view_as(k), v.view_as(v)
        return _Attention.apply(q, k, v, bias, seed, *score, backend)
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
        needed = ctx.needs_input_grad[:4]
        grads: tuple[Tensor | None, ...] = (None,) * 4
        if grad_out is not None or grad_lse is not None:
            q, k, v, bias, seed, out, lse = ctx.saved_tensors
            if grad_out is None:
                grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
            mask = needed[0] * ops.GRAD_Q + needed[1] * ops.GRAD_K + needed[2] * ops.GRAD_V + needed[3] * ops.GRAD_BIAS
            grads = _backward(grad_out, grad_lse, q, k, v, bias, seed, out, lse, *ctx.score, mask, ctx.backend)
        return *(g if need else None for g, need in zip(grads, needed, strict=True)), *(None,) * (_NUM_SCORE + 2)

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
    primals = [None if p is None else forward_ad.unpack_dual(p).primal for p in primals]
    fn, active = _restricted(fn, primals, [t is not None for t in tangents])
    # Torch calls us with forward mode off, which would cut off the levels outside this one (jvp of jvp).
    with forward_ad._set_fwd_grad_enabled(True):
        zeros = tuple(torch.zeros_like(o) for o in fn(*active))
        _, pushforward, *_ = torch.func.vjp(lambda cotangents: torch.func.vjp(fn, *active)[1](cotangents), zeros)
        return pushforward(tuple(t for t in tangents if t is not None))[0]


def _restricted(fn: Callable, primals: Sequence[Any], chosen: Sequence[bool]) -> tuple[Callable, tuple]:
    """fn as a function of the chosen primals alone, and these."""

    def restricted(*active: Tensor) -> Any:
        values = iter(active)
        return fn(*(next(values) if c else p for p, c in zip(primals, chosen, strict=True)))

    return restricted, tuple(p for p, c in zip(primals, chosen, strict=True) if c)


# In eager mode, without transforms: Function.apply less 10-20 us of torch's Python for argument binding.
_apply_forward = super(torch.autograd.Function, _AttentionJVP).apply
_apply_backward = super(torch.autograd.Function, _AttentionBackward).apply
