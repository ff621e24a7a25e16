"""Sharding rules (DTensor) of the operators.

Batch elements, heads and, without a band, rows of queries are independent of each other: each of the three may be split
over ranks, all other shardings are gathered first. A tensor that is split has a gradient split the same way; the
gradient of a tensor that every rank holds as a whole (one key head for all, a mask for the whole batch) is a sum over
the ranks.
"""

from __future__ import annotations

import itertools
import math
import sys

from . import ops
from .params import GRAD_BIAS, GRAD_GRAD_LSE, GRAD_GRAD_OUT, GRAD_K, GRAD_Q, GRAD_V, UNBOUNDED, AttentionParams

_is_registered = False


def register() -> None:
    """Teach DTensor the operators. To be called where a DTensor may arrive; does nothing before DTensor is imported.

    (All but `tangent`: torch makes no dual numbers of DTensors. Importing DTensor takes half as long as torch itself,
    so attnkern does not.)
    """
    global _is_registered
    if not _is_registered and "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.experimental import register_sharding

        _is_registered = True
        register_sharding(ops.forward)(_forward_sharding)
        register_sharding(ops.backward)(_backward_sharding)
        register_sharding(ops.second_backward)(_second_backward_sharding)


register._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a trace calls it, and has nothing to see


def _params_and_mask(numbers) -> tuple[AttentionParams, int]:
    """Of the arguments after the tensors: AttentionParams, grad_mask, backend."""
    *params, grad_mask, _ = numbers
    return AttentionParams(*params), grad_mask


def _splits(q, k, v, bias, key_ranges, philox_seed, params) -> list[list]:
    """Every way to run on one mesh dimension: the placements of the inputs, in this order, and of out and lse."""
    from torch.distributed.tensor import Replicate, Shard

    def split(dim, seed=None):
        cut, whole = Shard(dim), Replicate()
        keys = [whole if dim == 2 or x.shape[dim] == 1 else cut for x in (k, v)]
        masks = [None if x is None else cut if x.shape[dim] == q.shape[dim] else whole for x in (bias, key_ranges)]
        return [cut, *keys, *masks, seed, cut]

    splits = [[None if x is None else Replicate() for x in (q, k, v, bias, key_ranges, philox_seed, q)]]
    # A single key counts batch elements and heads from the first one; a key for each batch element goes with it.
    if philox_seed is None:
        splits.append(split(0))
        if _heads_divide(q, k, v):
            splits.append(split(1))
        if params.window_left == params.window_right == UNBOUNDED:
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


def _forward_sharding(q, k, v, bias, ranges, seed, *others):
    from torch.distributed.tensor import Replicate

    *params, need_lse, _ = others
    return [
        ([out, out if need_lse else Replicate()], [*inputs, *[None] * len(others)])
        for *inputs, out in _splits(q, k, v, bias, ranges, seed, AttentionParams(*params))
    ]


def _backward_sharding(grad_out, grad_lse, q, k, v, bias, ranges, seed, out, lse, *others):
    params, grad_mask = _params_and_mask(others)
    rules = []
    for *inputs, rows in _splits(q, k, v, bias, ranges, seed, params):
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
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_out, grad_lse, q, k, v, bias, ranges, seed, out, lse, *others
):
    from torch.distributed.tensor import Replicate

    params, grad_mask = _params_and_mask(others)
    rules = []
    for *inputs, rows in _splits(q, k, v, bias, ranges, seed, params):
        cotangents = zip((cot_dq, cot_dk, cot_dv, cot_dbias), inputs[:4], strict=True)
        moved = [None if x is None else placement for x, placement in cotangents]
        given = [*moved, rows, None if grad_lse is None else rows, *inputs, rows, rows]
        of_rows = [rows if grad_mask & bit else Replicate() for bit in (GRAD_GRAD_OUT, GRAD_GRAD_LSE)]
        rules.append(([*of_rows, *_placed_grads(inputs, rows, grad_mask)], [*given, *[None] * len(others)]))
    return rules


register()
