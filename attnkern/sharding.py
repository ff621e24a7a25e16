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
from .params import GRAD_GRAD_LSE, GRAD_GRAD_OUT, UNBOUNDED, AttentionParams
from .relative import by_distance
from .signatures import BACKWARD, FORWARD, GRAD_BITS, SECOND_BACKWARD, Inputs

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


def _splits(inputs, params) -> list[tuple]:
    """Every way to run on one mesh dimension: the placements of the inputs, and that of out and lse."""
    from torch.distributed.tensor import Replicate, Shard

    q, k, v, seed = inputs.q, inputs.k, inputs.v, inputs.philox_seed
    in_pages = inputs.block_table is not None

    def split(dim, of_seed=None):
        cut, whole = Shard(dim), Replicate()

        def placed(name, x):
            if name == "philox_seed":
                return of_seed
            if x is None:
                return None
            if name == "block_table":
                return cut if dim == 0 else whole
            if name in ("k", "v"):
                if in_pages and dim == 0:  # any sequence may have any page
                    return whole
                return whole if dim == 2 or x.shape[dim] == 1 else cut
            return cut if dim < x.ndim and x.shape[dim] == q.shape[dim] else whole

        return Inputs(*(placed(name, x) for name, x in inputs._asdict().items())), cut

    everywhere: list = [None if x is None else Replicate() for x in inputs]
    splits = [(Inputs(*everywhere), Replicate())]
    # A single key counts batch elements and heads from the first one; a key for each batch element goes with it.
    if seed is None:
        splits.append(split(0))
        if _heads_divide(q, k, v):
            splits.append(split(1))
        if params.window_left == params.window_right == UNBOUNDED and not by_distance(inputs.bias):
            splits.append(split(2))
    elif seed.shape[0] == q.shape[0]:
        splits.append(split(0, Shard(0)))
    return splits


def _heads_divide(q, k, v) -> bool:
    """Whether every rank's query heads find their key and value heads on that rank."""
    fewer = {x.shape[1] for x in (k, v)} - {1, q.shape[1]}
    sizes = [math.prod(c) for n in range(q.mesh.ndim + 1) for c in itertools.combinations(q.mesh.shape, n)]
    # DTensor itself does not cut a dimension into more parts than it has entries.
    return all(heads % size == 0 or size > heads for heads in fewer for size in sizes)


def _rest(flat, signature) -> list[None]:
    """The placements of what comes after the tensors."""
    return [None] * (len(flat) - signature.num_tensors)


def _forward_sharding(*flat):
    from torch.distributed.tensor import Replicate

    call = FORWARD.of(flat)
    return [
        ([rows, rows if call.need_lse else Replicate()], [*inputs, *_rest(flat, FORWARD)])
        for inputs, rows in _splits(call.inputs, AttentionParams(*call.params))
    ]


def _backward_sharding(*flat):
    call = BACKWARD.of(flat)
    rules = []
    for inputs, rows in _splits(call.inputs, AttentionParams(*call.params)):
        given = [rows, None if call.grad_lse is None else rows, *inputs, rows, rows]
        rules.append((_placed_grads(inputs, rows, call.grad_mask), [*given, *_rest(flat, BACKWARD)]))
    return rules


def _placed_grads(inputs, rows, grad_mask) -> list:
    """The placements of the gradients of inputs (whose own are `inputs`): cut alike, or sums over the ranks."""
    from torch.distributed.tensor import Partial, Replicate

    def gradient(x, bit):
        if not grad_mask & bit or not rows.is_shard():
            return Replicate()
        return Partial() if x.is_replicate() else x

    return [gradient(x, bit) for x, bit in zip(inputs.differentiable, GRAD_BITS, strict=True)]


def _second_backward_sharding(*flat):
    from torch.distributed.tensor import Replicate

    call = SECOND_BACKWARD.of(flat)
    rules = []
    for inputs, rows in _splits(call.inputs, AttentionParams(*call.params)):
        cotangents = zip(call.cotangents, inputs.differentiable, strict=True)
        moved = [None if x is None else placement for x, placement in cotangents]
        given = [*moved, rows, None if call.grad_lse is None else rows, *inputs, rows, rows]
        of_rows = [rows if call.grad_mask & bit else Replicate() for bit in (GRAD_GRAD_OUT, GRAD_GRAD_LSE)]
        grads = _placed_grads(inputs, rows, call.grad_mask)
        rules.append(([*of_rows, *grads], [*given, *_rest(flat, SECOND_BACKWARD)]))
    return rules


register()
