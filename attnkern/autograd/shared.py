"""What the Functions share: the reference's derivatives to any order, by torch.func, and the batch under vmap."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import ops
from ..arguments import PLAIN, listeners
from ..backends import reference
from ..params import AttentionParams
from ..signatures import GRAD_BITS, NUM_DERIVATIVES, SECOND_ORDER_BITS, Inputs

WHOLE: list[Callable] = []
"""Functions that go into a graph as a whole, for what traces it afterwards: those with a jvp."""


def transformed() -> bool:
    """Whether a torch.func transform or a forward-mode level is active: inputs may be wrapped or carry tangents."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# Of tensors that look ordinary, and for which the dispatcher does something before an operator's kernel.
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)  # x.conj().imag is -x, unsaid
for _key in (torch._C.DispatchKey.ZeroTensor, torch._C.DispatchKey.Functionalize):
    _KEYS |= torch._C.DispatchKeySet(_key)
_NOT_PLAIN = _KEYS.raw_repr()


def observed(tensors: Sequence[Any]) -> bool:
    """Whether an eager call must go by its operator: something listens to operators, or a tensor isn't plain.

    Calls past the dispatcher ask this themselves (csrc/common/direct.h).
    """
    if listeners is None or torch._C._len_torch_function_stack():
        return True
    for listens in listeners:  # in every call: half as long as any() takes
        if listens():
            return True
    for x in tensors:
        if x is not None and (type(x) not in PLAIN or torch._C._dispatch_keys(x).raw_repr() & _NOT_PLAIN):
            return True
    return False


def goes_into_graph() -> bool:
    """Whether this call, under a transform, goes as a whole into a graph that is being traced.

    Dual numbers do not: no compiled graph carries them, and Inductor drops them silently. (Dynamo answers the error
    by running the caller without a graph, or shows it where fullgraph=True.)
    """
    if not torch.compiler.is_compiling():
        return False
    if not torch._C._are_functorch_transforms_active():
        raise RuntimeError("attnkern: dual numbers (torch.autograd.forward_ad) cannot be compiled; torch.func.jvp can")
    _put_in_graph_whole()
    return True


def _put_in_graph_whole() -> None:
    """Dynamo doesn't trace a Function that has a jvp: it leaves these calls to what traces its graph afterwards.

    That runs the transforms for real, as in eager mode. (A decorator would import all of Dynamo with this module.)
    """
    torch._dynamo.allow_in_graph(WHOLE)


_put_in_graph_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called while Dynamo traces


def in_programs(operator: str) -> Callable[[Callable], Callable]:
    """A program of torch.export holds an operator, not what it called: which way is active, it knows when it is run."""

    def register(function: Callable) -> Callable:
        ops.library.impl(operator, function, "CompositeImplicitAutograd")
        # Before a transform unwraps the tensors of its level: the Functions have rules for it.
        ops.library.impl(operator, function, "FuncTorchDynamicLayerFrontMode")
        return function

    return register


def savable(x: Tensor | None) -> Tensor | None:
    """A mask or key ranges as autograd can save them: a copy of what was made in inference mode.

    Only of what has no gradient, bool and integers: of floating point, torch says that it can't be saved.
    """
    if x is None or torch.compiler.is_compiling() or not x.is_inference() or x.is_floating_point():
        return x
    return x.clone()


def mask_of(needed: Sequence[bool], bits: Sequence[int]) -> int:
    return sum(map(operator.mul, bits, needed))


def padded(grads: Sequence[Tensor | None], length: int) -> tuple[Tensor | None, ...]:
    """A Function's gradients: None for the arguments after those that have any."""
    return *grads, *(None,) * (length - len(grads))


def materialized(grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of out and lse as the operators take them: that of out is never None."""
    if grad_out is None:
        grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
    return grad_out, grad_lse


def primals_of(ctx: Any) -> list[Any]:
    """What a Function saved, without the tangents of the level whose jvp it computes."""
    return [None if x is None else forward_ad.unpack_dual(x, level=0).primal for x in ctx.saved_tensors]


def outer_levels() -> Any:
    """Forward mode on: torch calls a jvp with it off, which would cut off the levels outside this one (jvp of jvp)."""
    return forward_ad._set_fwd_grad_enabled(True)


def stack(x: Tensor, dim: int | None, n: int) -> Tensor:
    """x with the mapped dimension first; a tensor that has none is repeated by stride 0."""
    return x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


def flatten(x: Tensor, batch: int | None = None) -> Tensor:
    """(n, B, ...) -> (n * B, ...), a view where strides allow; `batch` broadcasts B first."""
    if batch is not None:
        x = x.expand(x.shape[0], batch, *x.shape[2:])
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def flatten_shared(x: Tensor | None, dim: int | None, n: int, batch: int) -> Tensor | None:
    """A mask with the samples in the batch; one that all samples and batch elements share stays shared."""
    if x is None or (dim is None and x.shape[0] == 1):
        return x
    return flatten(stack(x, dim, n), batch)


def flatten_pages(given: Inputs, dims: Any, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pools and a block_table with the samples in the batch. Pools of each sample's own lie one after the other."""
    assert given.block_table is not None
    table = stack(given.block_table, dims.block_table, n)
    if dims.k is None and dims.v is None:
        return given.k, given.v, flatten(table).contiguous()
    k, v = stack(given.k, dims.k, n), stack(given.v, dims.v, n)
    count = k.shape[1]
    first = count * torch.arange(n, dtype=table.dtype, device=table.device).view(n, 1, 1)
    table = torch.where((table >= 0) & (table < count), table + first, -1)
    return flatten(k), flatten(v), flatten(table)


def batch_of(q: Tensor, dim: int | None) -> int:
    """The size of q's batch under vmap, which maps the dimension `dim`."""
    return q.shape[0] if dim != 0 else q.shape[1]


def flatten_all(tensors: Sequence[Any], in_dims: Sequence[int | None], n: int, batch: int) -> list[Tensor | None]:
    """An operator's tensors with the samples in the batch; a seed becomes one for each.

    So do a bias and sinks, for their gradients and their tangents are each sample's own.
    """

    def flat(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        x = stack(x, dim, n)
        return x.reshape(-1).contiguous() if x.ndim == 2 else flatten(x, batch)

    return [flat(x, dim) for x, dim in zip(tensors, in_dims, strict=False)]


def of_masks(results: tuple[tuple[Tensor, ...], Any], given: Inputs, dims: Any, batch: int) -> tuple:
    """Results under vmap, the last ones the gradients of Inputs: those of a bias or sinks that the batch shares are
    added up over its elements."""

    def whole(grad: Tensor, x: Tensor | None, dim: int | None) -> Tensor:
        if grad.ndim == 1 or x is None or batch_of(x, dim) == batch:
            return grad
        return grad.sum(1, keepdim=True)

    grads, result_dims = results
    *others, dbias, dsinks = grads
    return (*others, whole(dbias, given.bias, dims.bias), whole(dsinks, given.sinks, dims.sinks)), result_dims


def unflatten(results: Sequence[Tensor], n: int, batch: int) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """(n * B, ...) -> (n, B, ...) and the mapped dimensions; results that were not asked for (1-D) pass through."""
    unflattened = tuple(x.unflatten(0, (n, batch)) if x.ndim > 1 else x for x in results)
    return unflattened, tuple(0 if x.ndim > 1 else None for x in results)


# `primals` are the differentiable inputs of a call, `constants` its others: together its Inputs.


def reference_forward(constants: Sequence[Tensor | None], params: Sequence[Any]) -> Callable:
    """(*primals) -> (out, lse) in plain torch."""
    return lambda *primals: reference.attention(Inputs(*primals, *constants), AttentionParams(*params))


def reference_backward(constants: Sequence[Tensor | None], params: Sequence[Any], grad_mask: int) -> Callable:
    """(grad_out, grad_lse, *primals) -> their gradients in plain torch, as `attnkern::backward`."""
    needed = [bool(grad_mask & bit) for bit in GRAD_BITS]

    def backward(grad_out: Tensor, grad_lse: Tensor | None, *primals: Tensor | None) -> tuple[Tensor, ...]:
        grads = pull_back(reference_forward(constants, params), primals, (grad_out, grad_lse), needed)
        return tuple(grad_out.new_empty(0) if g is None else g for g in grads)

    return backward


def reference_tangent(constants: Sequence[Tensor | None], params: Sequence[Any]) -> Callable:
    """(*primals, *their tangents) -> (tout, tlse) in plain torch, as `attnkern::tangent`."""
    forward = reference_forward(constants, params)
    return lambda *given: push_forward(forward, given[:NUM_DERIVATIVES], given[NUM_DERIVATIVES:])


def reference_second_backward(constants: Sequence[Tensor | None], params: Sequence[Any], grad_mask: int) -> Callable:
    """(*cotangents, grad_out, grad_lse, *primals) -> as `attnkern::second_backward`, in plain torch."""
    needed = [bool(grad_mask & bit) for bit in SECOND_ORDER_BITS]

    def second_backward(*given: Any) -> tuple[Tensor, ...]:
        cotangents, of_backward = given[:NUM_DERIVATIVES], given[NUM_DERIVATIVES:]
        backward = reference_backward(constants, params, mask_of([c is not None for c in cotangents], GRAD_BITS))
        grads = pull_back(backward, of_backward, cotangents, needed)
        return tuple(of_backward[0].new_empty(0) if g is None else g for g in grads)

    return second_backward


def pull_back(
    fn: Callable, primals: Sequence[Any], cotangents: Sequence[Tensor | None], needed: Sequence[bool]
) -> list:
    """Cotangents of fn's outputs pulled back to the primals that are `needed`, None for the others."""
    fn, active = _restricted(fn, primals, needed)
    outputs, pullback, *_ = torch.func.vjp(fn, *active)
    filled = tuple(torch.zeros_like(o) if c is None else c for o, c in zip(outputs, cotangents, strict=True))
    grads = iter(pullback(filled))
    return [next(grads) if need else None for need in needed]


def push_forward_here(fn: Callable, primals: Sequence[Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Tangents of fn's outputs at primals without any of this level."""
    with outer_levels():
        return push_forward(fn, primals, tangents)


def push_forward(fn: Callable, primals: Sequence[Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
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
