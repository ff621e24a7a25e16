"""The operators `attnkern::forward`, `backward`, `tangent` and `second_backward`: schemas, shapes and strides, FLOP
counts. No arithmetic.

They are what torch.compile, export, the profiler, the FLOP counter, DTensor and selective checkpointing see. Autograd
is outside (autograd.py) and so is autocast (problem.py). The CPU implementation registers itself from C++
(csrc/ops.cpp), because a Python hop costs more than a short attention; devices with several backends route the
argument `backend` in Python, here.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .problem import UNBOUNDED, is_length_major

library = torch.library.Library("attnkern", "DEF")

_SCORE = (
    "float softmax_scale, float softcap, SymInt window_left, SymInt window_right, SymInt band_offset, float dropout_p"
)
# Any strides are right, but the output's follow the inputs': Inductor must not change them behind the fakes' back.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

# lse has shape (0,) unless need_lse.
library.define(
    f"forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, {_SCORE}, bool need_lse, str backend)"
    " -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
# grad_mask: 1 q, 2 k, 4 v, 8 bias. A gradient not asked for has shape (0,).
library.define(
    "backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed,"
    f" Tensor out, Tensor lse, {_SCORE}, int grad_mask, str backend)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    tags=_TAGS,
)

# What `forward` adds to out and lse where the inputs move by tangents. A tangent that is None is zero.
library.define(
    "tangent(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, Tensor? tq, Tensor? tk, Tensor? tv,"
    f" Tensor? tbias, Tensor out, Tensor lse, {_SCORE}, str backend) -> (Tensor tout, Tensor tlse)",
    tags=_TAGS,
)
# The gradient of <cot_dq, dq> + <cot_dk, dk> + <cot_dv, dv> + <cot_dbias, dbias>, with dq, dk, dv, dbias of `backward`.
# A cotangent that is None is zero. grad_mask as in `backward`, and 16 grad_out, 32 grad_lse.
library.define(
    "second_backward(Tensor? cot_dq, Tensor? cot_dk, Tensor? cot_dv, Tensor? cot_dbias, Tensor grad_out,"
    " Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, Tensor out, Tensor lse,"
    f" {_SCORE}, int grad_mask, str backend)"
    " -> (Tensor g_grad_out, Tensor g_grad_lse, Tensor gq, Tensor gk, Tensor gv, Tensor gbias)",
    tags=_TAGS,
)

forward = torch.ops.attnkern.forward.default
backward = torch.ops.attnkern.backward.default
tangent = torch.ops.attnkern.tangent.default
second_backward = torch.ops.attnkern.second_backward.default

GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS, GRAD_GRAD_OUT, GRAD_GRAD_LSE = 1, 2, 4, 8, 16, 32


def empty_like_heads(x: Tensor, head_dim: int) -> Tensor:
    """Empty (B, H, L, head_dim) in the memory order of x (B, H, L, D)."""
    batch, heads, length, _ = x.shape
    if is_length_major(x):
        return x.new_empty(batch, length, heads, head_dim).transpose(1, 2)
    return x.new_empty(batch, heads, length, head_dim)


def add_up_heads(grads: Sequence[Tensor | None], parts: Sequence[Tensor | None]) -> None:
    """Fills dk and dv from the parts that a kernel wrote, where it wrote more heads than they have: neighbouring heads
    share one. Does nothing for a gradient that is its own part, and for one not asked for (None, or of shape (0,))."""
    for grad, part in zip(grads, parts, strict=True):
        if grad is not None and part is not None and part is not grad and grad.ndim == 4:
            grad.copy_(part.unflatten(1, (grad.shape[1], -1)).sum(2))


@torch.library.register_fake("attnkern::forward", lib=library)
def _forward_fake(
    q, k, v, bias, philox_seed, softmax_scale, softcap, left, right, offset, dropout_p, need_lse, backend
):
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(q.shape[:3] if need_lse else (0,), dtype=lse_dtype)
    return empty_like_heads(q, v.shape[-1]), lse


@torch.library.register_fake("attnkern::backward", lib=library)
def _backward_fake(
    grad_out,
    grad_lse,
    q,
    k,
    v,
    bias,
    philox_seed,
    out,
    lse,
    softmax_scale,
    softcap,
    left,
    right,
    offset,
    dropout_p,
    grad_mask,
    backend,
):
    return _empty_grads(q, k, v, bias, grad_mask)


def _empty_grads(q, k, v, bias, grad_mask):
    grads = [
        empty_like_heads(x, x.shape[-1]) if grad_mask & bit else x.new_empty(0)
        for x, bit in ((q, GRAD_Q), (k, GRAD_K), (v, GRAD_V))
    ]
    dbias = bias.new_empty(bias.shape) if grad_mask & GRAD_BIAS else q.new_empty(0)
    return *grads, dbias


@torch.library.register_fake("attnkern::tangent", lib=library)
def _tangent_fake(q, k, v, bias, philox_seed, tq, tk, tv, tbias, out, lse, *score_and_backend):
    return empty_like_heads(q, v.shape[-1]), lse.new_empty(q.shape[:3])


@torch.library.register_fake("attnkern::second_backward", lib=library)
def _second_backward_fake(
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_out, grad_lse, q, k, v, bias, philox_seed, out, lse, *others
):
    grad_mask = others[-2]
    g_grad_out = empty_like_heads(q, v.shape[-1]) if grad_mask & GRAD_GRAD_OUT else q.new_empty(0)
    g_grad_lse = lse.new_empty(q.shape[:3] if grad_mask & GRAD_GRAD_LSE else 0)
    return g_grad_out, g_grad_lse, *_empty_grads(q, k, v, bias, grad_mask)


# CUDA devices have several backends: the operator's last argument says which. (A backend's module holds no kernels yet:
# it fetches them when it is first called.)


def route_forward(*arguments):
    """`attnkern::forward` by the backend that is its last argument."""
    return _with_kernels(arguments[-1]).forward(*arguments[:-1])


def route_backward(*arguments):
    """`attnkern::backward` by the backend that is its last argument."""
    return _with_kernels(arguments[-1]).backward(*arguments[:-1])


@functools.cache
def _with_kernels(backend: str):
    from .backends import cuda, triton

    modules = {module.NAME: module for module in (triton, cuda)}
    if backend not in modules:
        raise ValueError(f"attnkern: backend must be one of {', '.join(map(repr, modules))} here, got {backend!r}")
    return modules[backend]


library.impl("forward", route_forward, "CUDA")
library.impl("backward", route_backward, "CUDA")


# The other two have kernels in some backends only. Plain torch, in tiles, serves the rest.


def route_tangent(*arguments):
    """`attnkern::tangent` by the backend that is its last argument."""
    return _with_second_order(arguments[-1]).tangent(*arguments[:-1])


def route_second_backward(*arguments):
    """`attnkern::second_backward` by the backend that is its last argument."""
    return _with_second_order(arguments[-1]).second_backward(*arguments[:-1])


def _with_second_order(backend: str):
    from . import second_order
    from .backends import triton

    return triton if backend == triton.NAME and triton.has_second_order() else second_order


library.impl("tangent", route_tangent, "CompositeExplicitAutograd")
library.impl("second_backward", route_second_backward, "CompositeExplicitAutograd")


# FLOPs, as torch counts its own attention: 2 per multiply-add of each matrix product, masked entries included.


def _pairs(q_shape) -> int:
    batch, heads, seqlen_q, _ = q_shape
    return batch * heads * seqlen_q


@register_flop_formula(torch.ops.attnkern.forward)
def _forward_flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Q K^T and P V."""
    return 2 * _pairs(q_shape) * k_shape[2] * (q_shape[3] + v_shape[3])


@register_flop_formula(torch.ops.attnkern.backward)
def _backward_flops(grad_shape, grad_lse_shape, q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Q K^T again, dO V^T, P^T dO, dS K, dS^T Q."""
    return 2 * _pairs(q_shape) * k_shape[2] * (3 * q_shape[3] + 2 * v_shape[3])


@register_flop_formula(torch.ops.attnkern.tangent)
def _tangent_flops(q_shape, k_shape, v_shape, bias, seed, tq, tk, tv, tbias, *args, out_shape=None, **kwargs) -> int:
    """Q K^T again, the scores' tangents by those of Q and K, the output's by those of the scores and of V."""
    head_dim, head_dim_v = q_shape[3], v_shape[3]
    scores_move = not tq is tk is tbias is None
    size = head_dim * (1 + _given(tq, tk)) + head_dim_v * (scores_move + _given(tv))
    return 2 * _pairs(q_shape) * k_shape[2] * size


@register_flop_formula(torch.ops.attnkern.second_backward)
def _second_backward_flops(
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_shape, grad_lse_shape, q_shape, k_shape, v_shape, *args, **kwargs
) -> int:
    """The tangent with its products, dO V^T, dO cot_dv^T, P'^T dO, dS' K, dS'^T Q, dS cot_dk, dS^T cot_dq."""
    head_dim, head_dim_v = q_shape[3], v_shape[3]
    first = _tangent_flops(q_shape, k_shape, v_shape, None, None, cot_dq, cot_dk, cot_dv, cot_dbias)
    scores_move = not cot_dq is cot_dk is cot_dbias is None
    size = head_dim * (2 + _given(cot_dq, cot_dk)) + head_dim_v * (1 + scores_move + _given(cot_dv))
    return first + 2 * _pairs(q_shape) * k_shape[2] * size


def _given(*shapes) -> int:
    return sum(shape is not None for shape in shapes)


# Sharding rules (DTensor). Batch elements, heads and, without a band, rows of queries are independent of each other:
# each of the three may be split over ranks, whatever else is sharded is gathered first. What a split cuts has a
# gradient cut the same way; what every rank holds as a whole (one key head for all, a mask for the whole batch) has one
# that is the sum over the ranks.

_sharding_is_registered = False


def register_sharding() -> None:
    """Teach DTensor the operators. To be called where a DTensor may arrive; does nothing before DTensor is imported.

    (All but `tangent`: torch makes no dual numbers of DTensors. Importing DTensor takes half as long as torch itself,
    so attnkern does not.)
    """
    global _sharding_is_registered
    if not _sharding_is_registered and "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.experimental import register_sharding

        _sharding_is_registered = True
        register_sharding(forward)(_forward_sharding)
        register_sharding(backward)(_backward_sharding)
        register_sharding(second_backward)(_second_backward_sharding)


register_sharding._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a trace calls it, and has nothing to see


def _splits(q, k, v, bias, philox_seed, window_left, window_right) -> list[list]:
    """Every way to run on one mesh dimension: the placements of q, k, v, bias, philox_seed and of out and lse."""
    from torch.distributed.tensor import Replicate, Shard

    def split(dim, seed=None):
        cut, whole = Shard(dim), Replicate()
        keys = [whole if dim == 2 or x.shape[dim] == 1 else cut for x in (k, v)]
        mask = None if bias is None else cut if bias.shape[dim] == q.shape[dim] else whole
        return [cut, *keys, mask, seed, cut]

    splits = [[None if x is None else Replicate() for x in (q, k, v, bias, philox_seed, q)]]
    # One key for all counts batch elements and heads from the first of all; one per batch element goes with it.
    if philox_seed is None:
        splits.append(split(0))
        if _heads_divide(q, k, v):
            splits.append(split(1))
        if window_left == window_right == UNBOUNDED:
            splits.append(split(2))
    elif philox_seed.shape[0] == q.shape[0]:
        splits.append(split(0, Shard(0)))
    return splits


def _heads_divide(q, k, v) -> bool:
    """Whether every rank's query heads find their key and value heads on that rank."""
    fewer = {x.shape[1] for x in (k, v)} - {1, q.shape[1]}
    sizes = [math.prod(c) for n in range(q.mesh.ndim + 1) for c in itertools.combinations(q.mesh.shape, n)]
    # DTensor itself does not cut a dimension into more parts than it has entries.
    return all(heads % size == 0 or size > heads for heads in fewer for size in sizes)


def _forward_sharding(q, k, v, bias, seed, scale, softcap, left, right, offset, dropout_p, need_lse, backend):
    from torch.distributed.tensor import Replicate

    others = [None] * 8
    return [
        ([out, out if need_lse else Replicate()], [*inputs, *others])
        for *inputs, out in _splits(q, k, v, bias, seed, left, right)
    ]


def _backward_sharding(grad_out, grad_lse, q, k, v, bias, seed, out, lse, *others):
    score, grad_mask = others[:6], others[6]
    rules = []
    for *inputs, rows in _splits(q, k, v, bias, seed, *score[2:4]):
        given = [rows, None if grad_lse is None else rows, *inputs, rows, rows]
        rules.append((_placed_grads(inputs, rows, grad_mask), [*given, *[None] * len(others)]))
    return rules


def _placed_grads(inputs, rows, grad_mask) -> list:
    """The placements of the gradients of q, k, v, bias (their own are `inputs`): cut alike, or sums over the ranks."""
    from torch.distributed.tensor import Partial, Replicate

    def gradient(x, bit):
        if not grad_mask & bit or not rows.is_shard():
            return Replicate()
        return Partial() if x.is_replicate() else x

    return [gradient(x, bit) for x, bit in zip(inputs[:4], (GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS), strict=True)]


def _second_backward_sharding(
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_out, grad_lse, q, k, v, bias, seed, out, lse, *others
):
    from torch.distributed.tensor import Replicate

    grad_mask = others[6]
    rules = []
    for *inputs, rows in _splits(q, k, v, bias, seed, *others[2:4]):
        cotangents = zip((cot_dq, cot_dk, cot_dv, cot_dbias), inputs[:4], strict=True)
        moved = [None if x is None else placement for x, placement in cotangents]
        given = [*moved, rows, None if grad_lse is None else rows, *inputs, rows, rows]
        of_rows = [rows if grad_mask & bit else Replicate() for bit in (GRAD_GRAD_OUT, GRAD_GRAD_LSE)]
        rules.append(([*of_rows, *_placed_grads(inputs, rows, grad_mask)], [*given, *[None] * len(others)]))
    return rules


register_sharding()
