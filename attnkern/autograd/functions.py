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
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import backends, ops, rng, sharding
from ..arguments import exporting
from ..backends import cpu, reference
from ..backends.failed import CannotBuild
from ..params import GRAD_K, GRAD_Q, GRAD_V, AttentionParams
from ..problem import Problem
from ..signatures import (
    ATTENTION,
    BACKWARD,
    GRAD_BITS,
    NUM_DERIVATIVES,
    NUM_INPUTS,
    SECOND_BACKWARD,
    SECOND_ORDER_BITS,
    SINKS,
    TANGENT,
    Inputs,
    for_operators,
)
from .shared import (
    WHOLE,
    batch_of,
    flatten,
    flatten_all,
    flatten_pages,
    flatten_shared,
    goes_into_graph,
    in_programs,
    mask_of,
    materialized,
    observed,
    of_masks,
    outer_levels,
    padded,
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
    problem: Problem, backend: str | None, return_lse: bool, seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of `problem`, in the caller's shapes, by the backend that is asked for, or the best one.

    They are differentiable in the way that is active: autograd, forward mode or a transform. lse has shape (0,), or is
    None, unless return_lse. A caller that replays the dropout brings its seed; None draws one where it is needed.
    """
    chosen = backends.select(problem, backend)
    params = problem.params
    if seed is None and params.dropout_p > 0:
        seed = rng.seed_for(problem.q)
    if chosen is reference:
        out, lse = reference.forward(problem, seed)
        return problem.restore(out), problem.restore(lse) if return_lse else lse
    inputs, name = problem.given(seed), backends.name_for_operators(chosen, problem, backend)
    if type(inputs.q) is not Tensor:
        sharding.register()
    results = None
    # Past the dispatcher, where that makes no difference.
    if not torch.compiler.is_compiling() and not transformed():
        needs_grad = _needs_grad(inputs)
        need_lse = return_lse or needs_grad
        kernels: Any = None
        if chosen is cpu:
            kernels = cpu.forward
        elif not observed(inputs):
            kernels = partial(_forward_by_backend, chosen)
        if kernels is not None:
            try:
                if needs_grad:
                    results = _apply_by(kernels, inputs, params, name)
                else:
                    results = kernels(*inputs, *params, need_lse, name)
            except CannotBuild:
                results = None  # the operator finds another backend
    out, lse = results or _by_operators(inputs, params, return_lse, name)
    return problem.restore(out), problem.restore(lse) if return_lse else lse


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    key_ranges: Tensor | None,
    params: Any,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """out and lse, with gradients, of a call of the CPU's kernels to which no rule of Problem applies
    (csrc/common/direct.h)."""
    if bias is not None:
        # A mask (L, S) without gradient stays as it is: a view takes time that is felt in a short call. (With three
        # dimensions it would be a table of distances.)
        if bias.dim() < 4 and (bias.dim() != 2 or bias.requires_grad):
            bias = bias[(None,) * (4 - bias.dim())]
        bias = savable(bias)
    if key_ranges is not None and key_ranges.dim() < 5:
        key_ranges = key_ranges[(None,) * (5 - key_ranges.dim())]
    return _apply_eagerly(q, k, v, bias, sinks, savable(key_ranges), None, None, (params, cpu.NAME, lambda: (out, lse)))


def _forward_by_backend(backend: Any, *args: Any) -> Any:
    """The same as `_forward_by_operator`, past the dispatcher, by a backend's kernels."""
    *params, need_lse, _ = args[NUM_INPUTS:]
    return backend.forward(Inputs(*for_operators(args[:NUM_INPUTS])), AttentionParams(*params), need_lse)


def _needs_grad(inputs: Inputs) -> bool:
    if torch.is_grad_enabled():
        for x in inputs:  # in every call: half as long as any() takes
            if x is not None and x.requires_grad:
                return True
    return False


def _by_operators(inputs: Inputs, params: Sequence[Any], need_lse: bool, backend: str) -> tuple[Tensor, Tensor]:
    """out and lse of what `Problem.given` gives, in the way that is active, by `attnkern::forward`. A program of
    torch.export doesn't know yet which way that will be."""
    if exporting():
        return ops.attention(*for_operators(inputs), *params, need_lse, backend)
    return _in_active_way(inputs, params, need_lse, backend)


def _in_active_way(inputs: Inputs, params: Sequence[Any], need_lse: bool, backend: str) -> tuple[Tensor, Tensor]:
    if transformed():
        function = _attention_jvp if goes_into_graph() else _AttentionJVP.apply
        return function(*for_operators(_savable(inputs)), *params, backend)
    if not _needs_grad(inputs):
        return _forward_by_operator(*inputs, *params, need_lse, backend)
    if not torch.compiler.is_compiling():
        return _apply_by(_forward_by_operator, inputs, params, backend)
    # Dynamo takes no tensor twice, as in attention(x, x, x).
    inputs = inputs._replace(k=inputs.k.view_as(inputs.k), v=inputs.v.view_as(inputs.v))
    function = _Attention if need_lse else _AttentionOutOnly
    return function.apply(*for_operators(inputs), *params, backend)


@in_programs("attention")
def _attention_operator(*flat: Any) -> tuple[Tensor, Tensor]:
    call = ATTENTION.of(flat)
    out, lse = _in_active_way(call.inputs, call.params, call.need_lse, call.backend)
    return out, lse if call.need_lse else lse.new_empty(0)


_BACKWARD_INPUTS = 2  # of the arguments of `attnkern::backward`: after grad_out and grad_lse


def _savable(inputs: Inputs) -> Inputs:
    if not torch.compiler.is_compiling():
        for x in inputs.masks:
            if x is not None and x.is_inference():
                return Inputs(inputs.q, inputs.k, inputs.v, *map(savable, inputs.masks))
    return inputs


def _backward(*args: Any) -> Any:
    """`attnkern::backward`, in the way that is active; past the dispatcher where that makes no difference."""
    if transformed():
        return _AttentionBackward.apply(*for_operators(args, _BACKWARD_INPUTS))
    if torch.compiler.is_compiling():
        return ops.backward(*for_operators(args, _BACKWARD_INPUTS))
    if torch.is_grad_enabled():
        return _apply_backward(*for_operators(args, _BACKWARD_INPUTS))
    if (chosen := backends.KERNELS.get(args[-1])) is not None and not observed(args[: BACKWARD.num_tensors]):
        call = BACKWARD.of(for_operators(args, _BACKWARD_INPUTS))
        given = call.grad_out, call.grad_lse, call.inputs, call.out, call.lse
        with suppress(CannotBuild):  # the operator finds another backend
            return chosen.backward(*given, AttentionParams(*call.params), call.grad_mask)
    return ops.backward(*for_operators(args, _BACKWARD_INPUTS))


def _attention_jvp(*args: Any) -> tuple[Tensor, Tensor]:
    return _AttentionJVP.apply(*args)


WHOLE.append(_attention_jvp)


def part_backward(
    problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a problem that holds a part of the keys; `out` and `lse` are the results over all keys."""
    inputs, params = problem.inputs(), problem.params
    grad_mask = GRAD_Q | GRAD_K | GRAD_V
    if backend != reference.NAME:
        if type(inputs.q) is not Tensor:
            sharding.register()
        dq, dk, dv, *_ = ops.backward(grad_out, grad_lse, *inputs, out, lse, *params, grad_mask, backend)
        return dq, dk, dv
    # The reference normalises by the part's own sum. In the whole, by which it is merged, the part has this share:
    dtype = inputs.q.dtype
    grad_out, q, k, v, out = (x.to(lse.dtype) for x in (grad_out, inputs.q, inputs.k, inputs.v, out))
    inputs = inputs._replace(q=q, k=k, v=v)
    part_out, part_lse = reference.attention(inputs, params)
    share = (part_lse - lse).exp().masked_fill(part_lse == -math.inf, 0.0)
    grad_share = (grad_out * (part_out - out)).sum(-1)
    if grad_lse is not None:
        grad_share = grad_share + grad_lse
    of_part = reference_backward(inputs.constant, params, grad_mask)
    dq, dk, dv, *_ = of_part(share.unsqueeze(-1) * grad_out, share * grad_share, *inputs.differentiable)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


# A Function's arguments are those of its operator (signatures.py), flat, since autograd sees tensors only there.


class _Attention(torch.autograd.Function):
    """(*inputs, *params, backend) -> (out, lse)"""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return ops.forward(*args[:-1], True, args[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        tensors = inputs[:NUM_INPUTS]
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        *ctx.params, ctx.backend = inputs[NUM_INPUTS:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        return padded(_input_grads(ctx, grad_out, grad_lse), len(ctx.needs_input_grad))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any):
        n = info.batch_size
        dims: Any = Inputs(*in_dims[:NUM_INPUTS])
        given, (*params, backend) = Inputs(*args[:NUM_INPUTS]), args[NUM_INPUTS:]
        q, table = stack(given.q, dims.q, n), None
        batch = q.shape[1]
        if given.block_table is None:
            k, v = flatten(stack(given.k, dims.k, n)), flatten(stack(given.v, dims.v, n))
        else:
            k, v, table = flatten_pages(given, dims, n)
        seed = given.philox_seed
        if seed is not None:
            seed = stack(seed, dims.philox_seed, n).reshape(-1).contiguous()
        bias = flatten_shared(given.bias, dims.bias, n, batch)
        sinks = flatten_shared(given.sinks, dims.sinks, n, batch)
        ranges = flatten_shared(given.key_ranges, dims.key_ranges, n, batch)
        inputs = Inputs(flatten(q), k, v, bias, sinks, ranges, seed, table)
        out, lse = _by_operators(inputs, params, True, backend)
        return unflatten((out, lse), n, batch)


def _apply_by(kernels: Any, inputs: Inputs, params: Sequence[Any], backend: str) -> tuple[Tensor, Tensor]:
    """`kernels` takes the arguments of `attnkern::forward`; its answer may be None: by the operator, then."""
    given = _savable(inputs)
    call = *given, *params, True, backend
    return _apply_eagerly(*given, (params, backend, lambda: kernels(*call) or _forward_by_operator(*call)))


def _forward_by_operator(*args: Any) -> tuple[Tensor, Tensor]:
    """The arguments of `attnkern::forward` -> its results, for inputs as `for_operators` takes them."""
    return ops.forward(*for_operators(args))


class _EagerAttention(torch.autograd.Function):
    """(*inputs, (params, backend, results)) -> (out, lse), which results() gives: `_Attention` without transforms, and
    with less of torch's Python around it. (What computes them here has its warnings made Python's.)"""

    @staticmethod
    def forward(ctx: Any, *args: Any):
        *inputs, (ctx.params, ctx.backend, results) = args
        out, lse = results()
        ctx.save_for_backward(*inputs, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        saved = None
        if ctx.backend == cpu.NAME and not torch.compiler.is_compiling():
            saved = ctx.saved_tensors  # once: a checkpoint computes them anew
            grads = cpu.backward(grad_out, grad_lse, saved, ctx.params, ctx.needs_input_grad)
            if grads is not None:
                return grads
        return padded(_input_grads(ctx, grad_out, grad_lse, saved), len(ctx.needs_input_grad))


class _AttentionOutOnly(_Attention):
    """For compiled graphs: there an unused lse has a gradient of zeros, which is never a DTensor."""

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        return padded(_input_grads(ctx, grad_out, None), len(ctx.needs_input_grad))


def _asked_for(grads: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    return [g if need else None for g, need in zip(grads, needed, strict=True)]


def _input_grads(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, saved: Sequence[Any] | None = None
) -> Sequence[Tensor | None]:
    """Gradients of the differentiable inputs, as far as they are needed. saved: ctx.saved_tensors, if known."""
    needed = ctx.needs_input_grad[:NUM_DERIVATIVES]
    if grad_out is None and grad_lse is None:
        return [None] * NUM_DERIVATIVES
    *inputs, out, lse = ctx.saved_tensors if saved is None else saved
    cotangents = materialized(grad_out, grad_lse, out)
    grads = _backward(*cotangents, *inputs, out, lse, *ctx.params, mask_of(needed, GRAD_BITS), ctx.backend)
    grads = _asked_for(grads, needed)
    if (dsinks := grads[SINKS]) is not None and inputs[SINKS].dim() < dsinks.dim():  # an operator's
        grads[SINKS] = dsinks.squeeze(0)
    return grads


class _AttentionJVP(_Attention):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        *inputs, out, lse = primals_of(ctx)
        # Detached: the tangents become part of out and lse, and would hold what they are part of.
        results = out.detach(), lse.detach()
        with outer_levels():
            return _Tangent.apply(*inputs, *tangents[:NUM_DERIVATIVES], *results, *ctx.params, ctx.backend)


class _AttentionBackward(torch.autograd.Function):
    """The arguments of `attnkern::backward` -> its results, as a function of grad_out, grad_lse and the inputs.

    out and lse are the forward's results for those inputs, not independent ones: they get no gradient.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return ops.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        tensors = inputs[: BACKWARD.num_tensors]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        *ctx.params, ctx.grad_mask, ctx.backend = inputs[BACKWARD.num_tensors :]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None):
        needed = ctx.needs_input_grad[: len(SECOND_ORDER_BITS)]
        grads: Sequence[Tensor | None] = []
        if any(c is not None for c in cotangents):
            mask = mask_of(needed, SECOND_ORDER_BITS)
            results = _SecondBackward.apply(*cotangents, *ctx.saved_tensors, *ctx.params, mask, ctx.backend)
            grads = _asked_for(results, needed)
        return padded(grads, len(ctx.needs_input_grad))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        """second_backward with the inputs' tangents as cotangents, by the symmetry of second derivatives.

        And backward is linear in grad_out and grad_lse.
        """
        grad_out, grad_lse, *given = primals_of(ctx)
        t_grad_out, t_grad_lse, *moved = tangents[: len(SECOND_ORDER_BITS)]
        rest = *given, *ctx.params, ctx.grad_mask, ctx.backend
        with outer_levels():
            parts = []
            if any(t is not None for t in moved):
                parts.append(_SecondBackward.apply(*moved, grad_out, grad_lse, *rest)[-NUM_DERIVATIVES:])
            if t_grad_out is not None or t_grad_lse is not None:
                *_, out, _lse = given
                parts.append(_backward(*materialized(t_grad_out, t_grad_lse, out), *rest))
            if len(parts) == 2:
                return tuple(a + b for a, b in zip(*parts, strict=True))
            return tuple(parts[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any):
        given, dims = BACKWARD.of(args).inputs, BACKWARD.of(in_dims).inputs
        tensors, rest = args[: BACKWARD.num_tensors], args[BACKWARD.num_tensors :]
        n, batch = info.batch_size, batch_of(given.q, dims.q)
        grads = _backward(*flatten_all(tensors, in_dims, n, batch), *rest)
        return of_masks(unflatten(grads, n, batch), given, dims, batch)


class _Tangent(torch.autograd.Function):
    """The arguments of `attnkern::tangent` -> (tout, tlse), as a function of the inputs and their tangents."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return ops.tangent(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        tensors = inputs[: TANGENT.num_tensors]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        *ctx.params, ctx.backend = inputs[TANGENT.num_tensors :]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_tout: Tensor | None, grad_tlse: Tensor | None):
        """second_backward differentiates <grad, tangent>. It is linear in the tangents: their gradient is backward."""
        call, needed = TANGENT.of((*ctx.saved_tensors, *ctx.params, ctx.backend)), TANGENT.of(ctx.needs_input_grad)
        of_inputs: list[Tensor | None] = [None] * NUM_DERIVATIVES
        of_tangents = of_inputs
        if grad_tout is not None or grad_tlse is not None:
            cotangents = materialized(grad_tout, grad_tlse, call.out)
            rest = *cotangents, *call.inputs, call.out, call.lse, *call.params
            if any(needed.inputs.differentiable):
                mask = mask_of(needed.inputs.differentiable, GRAD_BITS)
                results = _SecondBackward.apply(*call.tangents, *rest, mask, ctx.backend)[-NUM_DERIVATIVES:]
                of_inputs = _asked_for(results, needed.inputs.differentiable)
            if any(needed.tangents):
                grads = _backward(*rest, mask_of(needed.tangents, GRAD_BITS), ctx.backend)
                of_tangents = _asked_for(grads, needed.tangents)
        return padded([*padded(of_inputs, NUM_INPUTS), *of_tangents], len(ctx.needs_input_grad))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        call, moved = TANGENT.of((*primals_of(ctx), *ctx.params, ctx.backend)), TANGENT.of(tangents)
        function = reference_tangent(call.inputs.constant, ctx.params)
        primals = *call.inputs.differentiable, *call.tangents
        return push_forward_here(function, primals, (*moved.inputs.differentiable, *moved.tangents))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any):
        tensors, rest = args[: TANGENT.num_tensors], args[TANGENT.num_tensors :]
        n, batch = info.batch_size, batch_of(TANGENT.of(args).inputs.q, TANGENT.of(in_dims).inputs.q)
        return unflatten(_Tangent.apply(*flatten_all(tensors, in_dims, n, batch), *rest), n, batch)


class _SecondBackward(torch.autograd.Function):
    """The arguments of `attnkern::second_backward` -> its results, as a function of all tensors up to the inputs."""

    _PRIMALS = SECOND_BACKWARD.num_tensors - 2 - (NUM_INPUTS - NUM_DERIVATIVES)  # not out, lse, nor what is constant
    _SAVED = SECOND_BACKWARD.num_tensors - 2

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return ops.second_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        tensors = inputs[: _SecondBackward._SAVED]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        *ctx.params, ctx.grad_mask, _ = inputs[SECOND_BACKWARD.num_tensors :]
        ctx.set_materialize_grads(False)

    @staticmethod
    def _of(ctx: Any, saved: Sequence[Tensor | None]) -> tuple[Any, Sequence[Tensor | None]]:
        """The function in plain torch, and where."""
        primals, constants = saved[: _SecondBackward._PRIMALS], saved[_SecondBackward._PRIMALS :]
        return reference_second_backward(constants, ctx.params, ctx.grad_mask), primals

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None):
        function, primals = _SecondBackward._of(ctx, ctx.saved_tensors)
        grads = pull_back(function, primals, cotangents, ctx.needs_input_grad[: len(primals)])
        return padded(grads, len(ctx.needs_input_grad))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None):
        function, primals = _SecondBackward._of(ctx, primals_of(ctx))
        return push_forward_here(function, primals, tangents[: len(primals)])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any):
        given, dims = SECOND_BACKWARD.of(args).inputs, SECOND_BACKWARD.of(in_dims).inputs
        tensors, rest = args[: SECOND_BACKWARD.num_tensors], args[SECOND_BACKWARD.num_tensors :]
        n, batch = info.batch_size, batch_of(given.q, dims.q)
        grads = _SecondBackward.apply(*flatten_all(tensors, in_dims, n, batch), *rest)
        return of_masks(unflatten(grads, n, batch), given, dims, batch)


# In eager mode, without transforms: Function.apply less 10-20 us of torch's Python for argument binding.
_apply_eagerly = super(torch.autograd.Function, _EagerAttention).apply
_apply_backward = super(torch.autograd.Function, _AttentionBackward).apply
