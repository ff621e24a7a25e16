"""Attention over several processes (gloo, CPU): sharded batches, heads and rows, rings, Ulysses; and what is refused.

One test per number of processes spawns them once; every rank runs all checks, in the same order.
"""

import contextlib
import datetime
import functools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import traceback
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.fx.experimental.proxy_tensor import make_fx

import attnkern
from attnkern import masks, testing
from attnkern.integrations.distributed import (
    balanced_shards,
    check_no_dropout,
    context_parallel,
    even_shards,
    live_scores,
    shard_mask,
    sharded_attention,
    sharded_varlen_attention,
)

ROOT = Path(__file__).parent.parent
TIMEOUT = 240  # s, for all checks of one number of processes; a collective waits 30 s
PAGE = ROOT / "docs" / "distributed.md"
EXAMPLE = runpy.run_path(str(ROOT / "docs" / "examples" / "sharded_documents.py"))

# --------------------------------------------------------------------------------------------------------------------
# The checks, which run on every rank. All ranks draw the same numbers.
# --------------------------------------------------------------------------------------------------------------------

CHECKS = {}


def check(*sizes, **parameters):
    """Makes a function a check for these numbers of processes, once for every combination of parameters."""

    def add(function):
        cases = [{}]
        for name, values in parameters.items():
            cases = [{**case, name: value} for case in cases for value in values]
        for case in cases:
            shown = ", ".join(f"{n}={x}" for n, x in case.items())
            CHECKS[f"{function.__name__.replace('_', ' ')}{f' ({shown})' if shown else ''}"] = sizes, function, case
        return function

    return add


@functools.cache
def mesh_of(*shape):
    """One mesh for all checks: torch 2.13 may fail to compile on another that is equal (docs/limits.md)."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("first", "second")[: len(shape)])


def problem(batch=4, heads=8, seqlen=16, heads_k=None, dtype=torch.float32, seqlen_k=None, mask=None):
    inputs = testing.make_inputs(batch, heads, seqlen, seqlen_k, 8, heads_k=heads_k, dtype=dtype, mask=mask)
    grad_out = (0.25 * torch.randn(inputs.query.shape, dtype=torch.float64)).to(dtype)
    grad_lse = 0.25 * torch.randn(inputs.query.shape[:3])
    return inputs, grad_out, grad_lse.double() if dtype == torch.float64 else grad_lse


def hold_to_rule(actual, inputs, grad_out, grad_lse=None, *, parts=1, **options):
    """Whole results against one process. `parts` of a result, each rounded on its own, add up their roundings."""
    want = testing.expected(*inputs.tensors.values(), grad_out=grad_out, grad_lse=grad_lse, enable_gqa=True, **options)
    for name, x in actual.items():
        e = want[name]
        testing.assert_within_rule(
            x,
            e.exact,
            e.baseline,
            gradient=name not in ("out", "lse"),
            unit=parts * e.unit,
            name=name,
            recipe=inputs.recipe,
        )


def attend_sharded(mesh, placements, inputs, grad_out, grad_lse, mask_placements=None, **options):
    """attnkern.attention of DTensors: its results and gradients, as DTensors, and the communication of the forward."""
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    tensors = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    where = dict.fromkeys(tensors, placements)
    if inputs.attn_mask is not None:
        tensors["attn_mask"], where["attn_mask"] = inputs.attn_mask, mask_placements
    leaves = {n: distribute_tensor(x.clone(), mesh, where[n]) for n, x in tensors.items()}
    leaves = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in leaves.items()}
    with CommDebugMode() as communication:
        out, lse = attnkern.attention(**leaves, enable_gqa=True, return_lse=True, **options)
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    seeds = distribute_tensor(grad_out, mesh, placements), distribute_tensor(grad_lse, mesh, placements)
    grads = torch.autograd.grad((out, lse), list(wanted.values()), seeds)
    results = {"out": out, "lse": lse, **dict(zip(wanted, grads, strict=True))}
    return results, communication.get_total_counts()


def whole(results):
    return {n: x.full_tensor() for n, x in results.items()}


@check(2, 4, dim=[0, 1], is_causal=[False, True])
def batch_and_heads_run_where_they_are(dim, is_causal):
    from torch.distributed.tensor import Shard

    inputs, *grads = problem(heads_k=4)
    results, communication = attend_sharded(mesh_of(SIZE), [Shard(dim)], inputs, *grads, is_causal=is_causal)
    assert communication == 0
    assert all(x.placements == (Shard(dim),) for x in results.values()), results
    assert results["out"].to_local().shape[dim] == inputs.query.shape[dim] // SIZE
    hold_to_rule(whole(results), inputs, *grads, is_causal=is_causal)


@check(2, 4, placement=["batch", "heads", "rows"], shape=[(4, 8, 16), (1, 8, 1), (4, 1, 16), (1, 1, 16)])
def key_ranges_are_cut_along_or_shared(placement, shape):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs, *grads = problem()
    begin = torch.randint(4, (*shape, 1), dtype=torch.int32)
    ranges = torch.stack([begin, begin + 11], -1)
    dim = ("batch", "heads", "rows").index(placement)
    where = Shard(dim) if shape[dim] > 1 else Replicate()
    cut = distribute_tensor(ranges, mesh_of(SIZE), [where])
    results, communication = attend_sharded(mesh_of(SIZE), [Shard(dim)], inputs, *grads, key_ranges=cut)
    assert results["out"].placements == (Shard(dim),)
    assert communication == (2 if placement == "rows" else 0)  # key and value are gathered
    hold_to_rule(whole(results), inputs, *grads, parts=SIZE, key_ranges=ranges)


@check(2, 4, placement=["batch", "heads", "nothing"], table=["cut", "whole", "no DTensor"])
def pages_of_a_pool(placement, table):
    """Pools are whole where sequences are apart, for any of them may have any page; heads take theirs along."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(SIZE)
    q, pools = torch.randn(4, 8, 3, 16), torch.randn(2, 9, 4, 16, 16)
    pages = torch.randint(9, (4, 8), dtype=torch.int32)  # as many as there are heads
    ranges = torch.tensor([[0, 128], [5, 40], [0, 1], [90, 128]], dtype=torch.int32)[:, None, None, None]
    options = {"enable_gqa": True, "return_lse": True, "key_ranges": ranges}
    want = attnkern.attention(q, *pools, block_table=pages, **options)
    where = {"batch": Shard(0), "heads": Shard(1), "nothing": Replicate()}[placement]
    of_pool = where if placement == "heads" else Replicate()
    query, key, value = (
        distribute_tensor(x, mesh, [on]) for x, on in zip((q, *pools), (where, of_pool, of_pool), strict=True)
    )
    if table != "no DTensor":
        pages = distribute_tensor(pages, mesh, [Shard(0) if table == "cut" else Replicate()])
    got = attnkern.attention(query, key, value, block_table=pages, **options)
    if (placement, table) == ("nothing", "cut"):  # less work for each
        where = Shard(0)
    assert all(x.placements == (where,) for x in got), [x.placements for x in got]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.full_tensor(), y)


MASKS_FOR_ALL = {
    "one range": masks.padding([16, 3, 9, 0], 16, 16),
    "two ranges": masks.sliding_window(3, 0, 16, 16, sinks=2),
    "bits": masks.from_bool(torch.arange(4 * 8 * 256).view(4, 8, 16, 16) % 3 == 0),
}


@check(2, 4, placement=["batch", "heads", "rows", "one"], kind=[*MASKS_FOR_ALL, "key_ranges"])
def a_mask_that_all_ranks_have_needs_no_placement(placement, kind):
    from torch.distributed.tensor import Replicate, Shard

    inputs, *grads = problem()
    where = Replicate() if placement == "one" else Shard(("batch", "heads", "rows").index(placement))
    mask = MASKS_FOR_ALL["one range" if kind == "key_ranges" else kind]
    given = {"key_ranges": mask.ranges} if kind == "key_ranges" else {"attn_mask": mask}
    results, communication = attend_sharded(mesh_of(SIZE), [where], inputs, *grads, **given)
    assert results["out"].placements == (where,)
    assert communication == (2 if placement == "rows" else 0)  # key and value are gathered
    plain = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    out, lse = attnkern.attention(*plain, return_lse=True, **given)
    wanted = dict(zip(("query", "key", "value"), torch.autograd.grad((out, lse), plain, grads), strict=True))
    for name, x in whole(results).items():
        torch.testing.assert_close(x, {"out": out, "lse": lse, **wanted}[name], rtol=1e-4, atol=1e-5)


@check(2, 4, placement=["batch", "heads", "rows"], mask=["1HLS", "BHLS", "B1LS", "LS"])
def a_mask_is_cut_along_or_shared(placement, mask):
    """The gradient of what is shared is the sum over the ranks."""
    from torch.distributed.tensor import Replicate, Shard

    inputs, *grads = problem(mask=("holes", mask))
    dim = ("batch", "heads", "rows").index(placement)
    own = dim - (4 - inputs.attn_mask.dim())
    where = Shard(own) if own >= 0 and inputs.attn_mask.shape[own] > 1 else Replicate()
    results, communication = attend_sharded(mesh_of(SIZE), [Shard(dim)], inputs, *grads, mask_placements=[where])
    assert results["out"].placements == (Shard(dim),)
    assert communication == (2 if placement == "rows" else 0)  # key and value are gathered
    hold_to_rule(whole(results), inputs, *grads, parts=SIZE)


@check(2, 4)
def one_key_head_for_all_is_shared():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs, grad_out, _ = problem(heads_k=1)
    mesh = mesh_of(SIZE)
    where = {"query": Shard(1), "key": Replicate(), "value": Replicate()}
    leaves = {n: distribute_tensor(x, mesh, [where[n]]).requires_grad_() for n, x in inputs.tensors.items()}
    out = attnkern.attention(**leaves, enable_gqa=True, is_causal=True)
    assert out.placements == (Shard(1),)
    grads = torch.autograd.grad(out, list(leaves.values()), distribute_tensor(grad_out, mesh, [Shard(1)]))
    results = {"out": out, **dict(zip(leaves, grads, strict=True))}
    hold_to_rule(whole(results), inputs, grad_out, parts=SIZE, is_causal=True)


@check(2, placement=["batch", "heads", "rows"], mask=[None, "1HLS"])
def second_derivatives_are_cut_as_the_first(placement, mask):
    """Double backward, of out and lse. (Torch makes no dual numbers of DTensors.)"""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs, grad_out, grad_lse = problem(heads_k=4, dtype=torch.float64, mask=mask and ("float", mask))
    mesh, dim = mesh_of(SIZE), ("batch", "heads", "rows").index(placement)
    where = {n: Shard(dim) if n != "attn_mask" or dim else Replicate() for n in inputs.tensors}
    tangents = {n: torch.randn_like(x) for n, x in inputs.tensors.items()}
    leaves = {n: distribute_tensor(x, mesh, [where[n]]).requires_grad_() for n, x in inputs.tensors.items()}
    along = [distribute_tensor(x, mesh, [where[n]]) for n, x in tangents.items()]
    seeds = [distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in (grad_out, grad_lse)]

    def call(*tensors):
        return attnkern.attention(*tensors, enable_gqa=True, return_lse=True)

    first = torch.autograd.grad(call(*leaves.values()), list(leaves.values()), seeds, create_graph=True)
    second = torch.autograd.grad(first, [*leaves.values(), *seeds], along)
    want = testing.expected_second_order(
        *inputs.tensors.values(), tangents=tangents, grad_out=grad_out, grad_lse=grad_lse, enable_gqa=True
    )
    for name, x in zip([*leaves, "tout", "tlse"], second, strict=True):
        e = want[name]
        testing.assert_within_rule(
            x.full_tensor(), e.exact, e.baseline, gradient=True, unit=SIZE * e.unit, name=name, recipe=inputs.recipe
        )


@check(2, 4, heads_k=[3, 6])
def heads_that_do_not_divide_are_gathered_or_uneven(heads_k):
    from torch.distributed.tensor import Shard

    inputs, *grads = problem(batch=1, heads=6, heads_k=heads_k)
    results, _ = attend_sharded(mesh_of(SIZE), [Shard(1)], inputs, *grads, is_causal=True)
    hold_to_rule(whole(results), inputs, *grads, is_causal=True)


@check(4, heads_k=[2, 4, 8])
def batch_and_heads_at_once(heads_k):
    from torch.distributed.tensor import Shard

    inputs, *grads = problem(heads_k=heads_k)
    results, communication = attend_sharded(mesh_of(2, 2), [Shard(0), Shard(1)], inputs, *grads, is_causal=True)
    assert communication == 0
    assert all(x.placements == (Shard(0), Shard(1)) for x in results.values())
    hold_to_rule(whole(results), inputs, *grads, is_causal=True)


@check(2, options=[{"is_causal": True}, {"window": (3, 1)}, {"is_causal": True, "window": (4, None)}])
def rows_under_a_band_are_gathered(options):
    from torch.distributed.tensor import Shard

    inputs, *grads = problem()
    results, communication = attend_sharded(mesh_of(SIZE), [Shard(2)], inputs, *grads, **options)
    assert communication == 3
    hold_to_rule(whole(results), inputs, *grads, **options)


@check(2, 4, sharded=[True, False])
def dropout_does_not_depend_on_the_sharding(sharded):
    """Every batch element has a key of its own, from the first rank, whatever the others' generators say."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs, grad_out, _ = problem(heads_k=2)
    placement = [Shard(0) if sharded else Replicate()]
    mesh = mesh_of(SIZE)
    leaves = {n: distribute_tensor(x, mesh, placement).requires_grad_() for n, x in inputs.tensors.items()}
    with torch.random.fork_rng():
        torch.manual_seed(11 + RANK)
        out = attnkern.attention(**leaves, dropout_p=0.4, enable_gqa=True)
        torch.manual_seed(11)
        seeds = torch.randint(2**63 - 1, (4,), dtype=torch.int64)
    assert out.placements == tuple(placement)
    grads = torch.autograd.grad(out, list(leaves.values()), distribute_tensor(grad_out, mesh, placement))
    keep = torch.cat([testing.philox_keep(seed, 1, 8, 16, 16, 0.4) for seed in seeds])
    results = {"out": out, **dict(zip(leaves, grads, strict=True))}
    hold_to_rule(whole(results), inputs, grad_out, keep=keep, dropout_p=0.4)


@check(2)
def heads_under_dropout_are_gathered():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs, _, _ = problem()
    tensors = [distribute_tensor(x, mesh_of(SIZE), [Shard(1)]) for x in inputs.tensors.values()]
    assert attnkern.attention(*tensors, dropout_p=0.4).placements == (Replicate(),)


@check(2, dim=[0, 1])
def sharded_weights(dim):
    """attention_weights of DTensors where query heads share key heads, and its gradients."""
    from torch.distributed.tensor import Shard, distribute_tensor

    full = [torch.randn(2, heads, 5, 8).requires_grad_() for heads in (4, 2)]
    placed = [distribute_tensor(x.detach(), mesh_of(SIZE), [Shard(dim)]).requires_grad_() for x in full]
    got, want = (attnkern.attention_weights(*x, enable_gqa=True) for x in (placed, full))
    torch.testing.assert_close(got.full_tensor(), want)
    grads, expected = (torch.autograd.grad(w.square().sum(), x) for w, x in ((got, placed), (want, full)))
    for g, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(g.full_tensor(), e)


@check(2, mesh=["the same", "made anew"])
def sharded_attention_compiles(mesh):
    """After eager calls, on the mesh that they had; on another that is equal, once torch has forgotten them."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    inputs, grad_out, _ = problem(heads_k=4)
    placed = [distribute_tensor(x, mesh_of(SIZE), [Shard(1)]).requires_grad_() for x in inputs.tensors.values()]
    attnkern.attention(*placed, is_causal=True, enable_gqa=True).detach()
    is_new, mesh = mesh == "made anew", mesh_of(SIZE)
    if is_new:
        mesh = mesh_of.__wrapped__(SIZE)
        _clear_sharding_prop_cache()
    leaves = {n: distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for n, x in inputs.tensors.items()}

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(query, key, value):
        return attnkern.attention(query, key, value, is_causal=True, enable_gqa=True)

    torch._dynamo.reset()
    out = attend(**leaves)
    assert out.placements == (Shard(1),)
    grads = torch.autograd.grad(out, list(leaves.values()), distribute_tensor(grad_out, mesh, [Shard(1)]))
    results = {"out": out, **dict(zip(leaves, grads, strict=True))}
    hold_to_rule(whole(results), inputs, grad_out, is_causal=True)
    if is_new:
        _clear_sharding_prop_cache()


@check(2, kind=["relative_bias", "relative_bias with its center", "sinks"], compiled=[False, True])
def biases_of_heads_are_cut(kind, compiled):
    from torch.distributed.tensor import Shard, distribute_tensor

    inputs, grad_out, _ = problem()
    tensors = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    options = {"relative_bias_center": 2} if "center" in kind else {}
    entries = 5 if options else 31
    name = kind.split()[0]
    tensors[name] = torch.randn(8) if name == "sinks" else torch.randn(8, entries)
    plain = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    want = attnkern.attention(**plain, **options)
    grads = torch.autograd.grad(want, list(plain.values()), grad_out)
    mesh = mesh_of(SIZE)
    dims = {n: int(n != "sinks" and "bias" not in n) for n in tensors}
    leaves = {n: distribute_tensor(x, mesh, [Shard(dims[n])]).requires_grad_() for n, x in tensors.items()}
    torch._dynamo.reset()
    call = torch.compile(attnkern.attention, backend="aot_eager", fullgraph=True) if compiled else attnkern.attention
    out = call(**leaves, **options)
    assert out.placements == (Shard(1),)
    got = torch.autograd.grad(out, list(leaves.values()), distribute_tensor(grad_out, mesh, [Shard(1)]))
    for x, y in zip((out, *got), (want, *grads), strict=True):
        torch.testing.assert_close(x.full_tensor(), y, rtol=1e-4, atol=1e-5)


def third_derivative(query):
    grad = attnkern.attention(query, query, query, is_causal=True)
    for _ in range(3):
        (grad,) = torch.autograd.grad(grad.square().sum(), query, create_graph=True)
    return grad


BITS = masks.from_bool(torch.arange(256).view(16, 16) % 5 < 3)
IN_PLAIN_TORCH = {
    "bits beside a table": lambda x: attnkern.attention(x, x, x, BITS, relative_bias=x[0, :, 0]),
    "reference, causal": lambda x: attnkern.attention(x, x, x, is_causal=True, backend="reference"),
    "reference, ranges": lambda x: attnkern.attention(x, x, x, masks.causal(16), backend="reference"),
    "reference, bits": lambda x: attnkern.attention(x, x, x, BITS, backend="reference"),
    "reference, all dropped": lambda x: attnkern.attention(x, x, x, dropout_p=1.0, backend="reference"),
    "weights, causal": lambda x: attnkern.attention_weights(x, x, is_causal=True),
    "weights, ranges": lambda x: attnkern.attention_weights(x, x, masks.causal(16)),
    "weights, some": lambda x: attnkern.attention_weights(x, x, window=(3, 1), rows=[1, 7, 4], heads=[6, 0]),
    "third derivative": third_derivative,
}


@check(2, placement=["batch", "heads", "nothing"], call=list(IN_PLAIN_TORCH))
def plain_torch_takes_dtensors(placement, call):
    """Masks, ranges and random numbers that it makes are beside them."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs, *_ = problem()
    x = inputs.query.clone().requires_grad_()
    where = {"batch": Shard(0), "heads": Shard(1), "nothing": Replicate()}[placement]
    of_ranks = distribute_tensor(inputs.query, mesh_of(SIZE), [where]).requires_grad_()
    want, got = (IN_PLAIN_TORCH[call](leaf) for leaf in (x, of_ranks))
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-5)
    (want,), (got,) = (torch.autograd.grad(y.square().sum(), leaf) for y, leaf in ((want, x), (got, of_ranks)))
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-3, atol=1e-4)


@check(2)
def what_is_no_dtensor_is_named():
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    x = torch.randn(2, 2, 4, 8)
    on = distribute_tensor(x, mesh_of(SIZE), [Replicate()])
    for name, others in {
        "attn_mask": {"attn_mask": torch.ones(4, 4, dtype=torch.bool)},
        "sinks": {"sinks": torch.zeros(2)},
        "relative_bias": {"relative_bias": torch.zeros(2, 7)},
    }.items():
        with refused(RuntimeError, f"{name} must be a DTensor, as query is: distribute_tensor makes one"):
            attnkern.attention(on, on, on, **others)
        with implicit_replication():
            got = attnkern.attention(on, on, on, **others)
        torch.testing.assert_close(got.full_tensor(), attnkern.attention(x, x, x, **others))
    with refused(RuntimeError, "value must be a DTensor, as query is"):
        attnkern.attention(on, on, x)
    with refused(RuntimeError, "query must be a DTensor, as key is"):
        attnkern.attention(x, on, on)


LENGTH = 77  # tokens, which no number of processes divides
CU = torch.tensor([0, 1, 1, 38, 60, 77])  # packed sequences: of one token, of none, ...
BEGINS = torch.arange(LENGTH).sub(9).clamp(min=0)

MASKS = {
    "none": lambda: masks.sliding_window(None, None, LENGTH),
    "causal": lambda: masks.causal(LENGTH),
    "documents": lambda: masks.document(cu_seqlens=CU, is_causal=True),
    "documents of two sequences": lambda: masks.document(torch.arange(LENGTH) // torch.tensor([[13], [50]])),
    "padding": lambda: masks.padding([40, 66], LENGTH, LENGTH),
    "left padding, causal": lambda: masks.padding([40, 66], LENGTH, LENGTH, left=True) & masks.causal(LENGTH),
    "window and sinks": lambda: masks.sliding_window(12, 0, LENGTH, sinks=3),
    "prefix": lambda: masks.prefix_lm([30, 8], LENGTH),
    "of heads": lambda: masks.from_ranges(
        torch.stack([BEGINS, BEGINS], -1)[None, None, :, None]
        + torch.tensor([[0, 5], [0, 30], [0, 1], [0, 0]])[:, None, None],
        LENGTH,
        LENGTH,
    ),
    "bits": lambda: masks.from_mask_mod(lambda b, h, i, j: (i >= j) & (i % 3 == j % 3), None, None, LENGTH, LENGTH),
    "fewer keys": lambda: masks.sliding_window(20, 3, LENGTH, 31, alignment="bottom_right"),
    "hardly any": lambda: masks.from_ranges(torch.tensor([[[[[70, 71]]]]]), LENGTH, LENGTH),
}


def hold_sharded(mask, *, dtype=torch.float32, shards=None, heads_k=4, group=None, **options):
    """`sharded_attention` of every rank's tokens, its gradients too, against one process."""
    inputs, grad_out, grad_lse = problem(
        batch=2, heads=4, heads_k=heads_k, seqlen=mask.seqlen_q, seqlen_k=mask.seqlen_k, dtype=dtype
    )
    dense = mask.to_dense()
    grad_lse = torch.where(dense.any(-1), grad_lse, 0)  # a row without keys has none
    sharded = shard_mask(mask, group, shards)
    leaves = {n: sharded.shard(x, 2, n != "query").clone().requires_grad_() for n, x in inputs.tensors.items()}
    with testing.unmodified(*leaves.values()):
        out, lse = sharded_attention(*leaves.values(), sharded, enable_gqa=True, return_lse=True, **options)
        seeds = [sharded.shard(x, 2) for x in (grad_out, grad_lse)]
        grads = torch.autograd.grad((out, lse), list(leaves.values()), seeds)
    assert out.dtype == dtype
    results = {"out": out, "lse": lse, **dict(zip(leaves, grads, strict=True))}
    whole = {n: sharded.unshard(x, 2, n in ("key", "value")) for n, x in results.items()}
    options = {n: x for n, x in options.items() if n not in ("exchange", "backend")}
    hold_to_rule(whole, inputs, grad_out, grad_lse, parts=2 * SIZE, attn_mask=dense, **options)
    return sharded


@check(2, 4, name=list(MASKS), balanced=[True, False])
def a_ring_under_a_mask(name, balanced):
    mask = MASKS[name]()
    hold_sharded(mask, shards=None if balanced else even_shards(LENGTH, SIZE))


@check(2, 4, name=["documents of two sequences", "left padding, causal", "of heads", "bits", "fewer keys"])
def ulysses_under_a_mask(name):
    hold_sharded(MASKS[name](), exchange="all_to_all")


@check(2, 4, exchange=["ring", "all_to_all"])
def shards_in_any_order(exchange):
    """A row's keys of one owner come in more than two ranges: several calls, merged."""
    order = torch.randperm(26, generator=torch.Generator().manual_seed(1)).tolist()
    runs = [(3 * n, min(3 * n + 3, LENGTH)) for n in order]
    shards = [runs[rank::SIZE] for rank in range(SIZE)]
    sharded = hold_sharded(masks.sliding_window(40, 9, LENGTH, sinks=2), shards=shards, exchange=exchange)
    assert max(map(len, sharded.parts)) > 1


@check(2, 4, dtype=[torch.bfloat16, torch.float64], options=[{}, {"softcap": 3.0}, {"scale": 0.5}])
def a_ring_of_other_dtypes_and_options(dtype, options):
    hold_sharded(MASKS["documents"](), dtype=dtype, heads_k=2, **options)


@check(4)
def groups_are_apart():
    """Each of two groups has a mask and a sequence of its own."""
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    mask = MASKS["documents" if RANK % 2 else "prefix"]()
    group = groups[RANK % 2 == 0]
    hold_sharded(mask, group=group)
    hold_sharded(mask, group=group, exchange="all_to_all")


@check(4)
def fewer_tokens_than_ranks():
    hold_sharded(masks.causal(3))
    hold_sharded(masks.causal(3), exchange="all_to_all")


@check(2, 4, exchange=["ring", "all_to_all"])
def packed_sequences(exchange):
    """The keys of another number per sequence, not all of them used; the queries of T don't divide."""
    ends_k, used = torch.tensor([0, 4, 9, 40, 51, 53]), torch.tensor([2, 5, 31, 0, 1])
    inputs, grad_out, _ = problem(batch=1, heads=4, heads_k=4, seqlen=LENGTH, seqlen_k=53)
    options = {"seqused_k": used, "window": (10, 2)}
    mask = masks.packed(CU, ends_k, **options)
    sharded = shard_mask(mask)
    q, k, v = (x[0].transpose(0, 1) for x in inputs.tensors.values())
    own = [sharded.shard(x, 0, keys).clone().requires_grad_() for x, keys in ((q, False), (k, True), (v, True))]
    out, lse = sharded_varlen_attention(*own, sharded, return_lse=True, exchange=exchange)
    grads = torch.autograd.grad(out, own, sharded.shard(grad_out[0].transpose(0, 1), 0))
    named = zip(("query", "key", "value"), grads, strict=True)
    results = {n: sharded.unshard(x, 0, n != "query").transpose(0, 1)[None] for n, x in named}
    results |= {"out": sharded.unshard(out, 0).transpose(0, 1)[None], "lse": sharded.unshard(lse, 1)[None]}
    hold_to_rule(results, inputs, grad_out, parts=2 * SIZE, attn_mask=mask.to_dense())


@check(2, 4)
def what_nobody_needs_is_not_sent():
    """A window over 1000 tokens: a rank gets what its first queries see of the one before it, and calls no more."""
    sharded = shard_mask(masks.sliding_window(9, 0, 1000), shards=even_shards(1000, SIZE))
    for reader, of_owners in enumerate(sharded.needed):
        begin, end = sharded.queries[reader][0]
        expected = {reader: ((begin, end),)} | ({reader - 1: ((begin - 9, begin),)} if reader else {})
        assert of_owners == tuple(expected.get(owner, ()) for owner in range(SIZE))
    calls = [len(parts) for parts in sharded.parts]
    assert calls == [int(owner in (RANK, RANK - 1)) for owner in range(SIZE)]
    if RANK:
        assert sharded.parts[RANK - 1][0].rows == slice(0, 9)
    x = torch.randn(1, 1, len(range(*sharded.queries[RANK][0])), 8)
    sent, start = [], dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: (sent.extend(op for op in ops if op.op is dist.isend), start(ops))[1]
    try:
        sharded_attention(x, x, x, sharded)
    finally:
        dist.batch_isend_irecv = start
    assert [op.tensor.numel() for op in sent] == ([9 * 8] * 2 if RANK < SIZE - 1 else [])


@check(2)
def autocast_holds_for_the_ring():
    mask = MASKS["documents"]()
    sharded = shard_mask(mask)
    inputs, *_ = problem(batch=2, heads=4, heads_k=2, seqlen=LENGTH)
    own = [sharded.shard(x, 2).clone().requires_grad_() for x in inputs.tensors.values()]
    with torch.autocast("cpu", torch.bfloat16):
        out = sharded_attention(*own, sharded, enable_gqa=True)
    low = [sharded.shard(x, 2).bfloat16().requires_grad_() for x in inputs.tensors.values()]
    expected = sharded_attention(*low, sharded, enable_gqa=True)
    assert torch.equal(out, expected)
    for a, b in zip(*(torch.autograd.grad(x.sum(), of) for x, of in ((out, own), (expected, low))), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


@check(2)
def compiled_and_checkpointed():
    sharded = shard_mask(MASKS["documents"]())
    inputs, *_ = problem(batch=2, heads=4, heads_k=2, seqlen=LENGTH)
    own = [sharded.shard(x, 2).clone().requires_grad_() for x in inputs.tensors.values()]

    def attend(*x):
        return sharded_attention(2 * x[0], *x[1:], sharded, enable_gqa=True)

    expected = attend(*own)
    grads = torch.autograd.grad(expected.sum(), own)
    for call in (
        torch.compile(attend, backend="aot_eager"),
        functools.partial(torch.utils.checkpoint.checkpoint, attend, use_reentrant=False),
    ):
        out = call(*own)
        assert torch.equal(out, expected)
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), own), grads))


@check(2, exchange=["ring", "all_to_all"], with_gradients=[False, True], ranks=[1, 2])
def a_whole_graph_does_not_hold_sharded_attention(exchange, with_gradients, ranks):
    """On one rank neither, which has no messages, so that a model that compiles there compiles on many."""
    groups = [dist.new_group([rank]) for rank in range(SIZE)] if ranks == 1 else [None] * SIZE
    sharded = shard_mask(MASKS["documents"](), group=groups[RANK])
    torch._dynamo.reset()  # a call that was compiled in parts, as the last one, is not compiled again
    own = sharded.shard(torch.randn(2, 4, LENGTH, 8), 2).requires_grad_(with_gradients)

    def attend(x):
        return sharded_attention(2 * x, x, x, sharded, exchange=exchange)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="exchanges messages between ranks, which no graph holds"):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(own)
    assert torch.equal(torch.compile(attend, backend="aot_eager")(own), attend(own))


@check(2, checkpointed=[False, True])
def a_ring_has_no_second_derivatives(checkpointed):
    """An error for each input, not None or 0, and none for those who only might have wanted some."""
    sharded = shard_mask(MASKS["documents"]())
    own = [sharded.shard(torch.randn(2, 4, LENGTH, 8), 2).requires_grad_() for _ in range(3)]
    attend = functools.partial(sharded_attention, attn_mask=sharded)
    if checkpointed:
        attend = functools.partial(torch.utils.checkpoint.checkpoint, attend, use_reentrant=False)
    out = attend(*own)
    seed = torch.randn_like(out).requires_grad_()
    want = torch.autograd.grad(out, own, seed, retain_graph=True)
    grads = torch.autograd.grad(out, own, seed, create_graph=True)
    assert all(map(torch.equal, grads, want))
    for x in (*own, seed):
        with refused(RuntimeError, "ring has no derivatives of second order: exchange='all_to_all' has them"):
            torch.autograd.grad(sum(x.sum() for x in grads), x, retain_graph=True, materialize_grads=True)


@check(2, exchange=["ring", "all_to_all", "context_parallel", "context_parallel under a mask"])
def transforms_are_refused(exchange):
    x = torch.randn(2, 4, 8 * SIZE, 8)
    mask = masks.causal(8 * SIZE)
    if exchange in ("ring", "all_to_all"):
        sharded = shard_mask(mask)
        x, place = sharded.shard(x, 2), contextlib.nullcontext()

        def attend(x):
            return sharded_attention(x, x, x, sharded, exchange=exchange).sum()
    else:
        given = mask if exchange.endswith("mask") else None
        place = context_parallel(mesh_of(SIZE), buffers=[x], buffer_seq_dims=[2], attn_mask=given)

        def attend(x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True).sum()

    with place:
        for call in (
            lambda: torch.func.grad(attend)(x),
            lambda: torch.func.vmap(attend)(x[None]),
            lambda: torch.func.jvp(attend, (x,), (x,)),
        ):
            with refused(RuntimeError, "exchanges messages between ranks, which torch.func's transforms can't follow"):
                call()


class Attends(torch.nn.Module):
    """x + a call of `attend`, of 4 heads, as a program of torch.export holds it."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, x):
        return x + self.attend(x, 2 * x, x)


@check(2, exchange=["ring", "all_to_all"])
def sharded_attention_does_not_go_into_programs(exchange):
    sharded = shard_mask(MASKS["documents"]())
    own = sharded.shard(torch.randn(2, 4, LENGTH, 8), 2)
    refuses_tracers(Attends(lambda *x: sharded_attention(*x, sharded, exchange=exchange)), own, "sharded_attention")


@check(2, masked=[False, True])
def context_parallel_compiles(masked):
    x = torch.randn(2, 4, 32, 8)
    mask = masks.causal(32) if masked else None
    model = Attends(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
    with context_parallel(mesh_of(SIZE), buffers=[x], buffer_seq_dims=[2], attn_mask=mask):
        assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"  # Dynamo's first call reads it
        leaf = x.clone().requires_grad_()
        expected, out = model(leaf), compiled(leaf)
        assert torch.equal(out, expected)
        assert torch.equal(*(torch.autograd.grad(y.square().sum(), leaf)[0] for y in (out, expected)))
        refuses_tracers(model, leaf, "context_parallel")
    assert torch.equal(compiled(x), model(x))


def refuses_tracers(model, x, name):
    """A program would hold no messages; where there is one rank, its gradients may be those of a constant."""
    for trace in (
        functools.partial(torch.export.export, strict=False),
        functools.partial(torch.jit.trace, check_trace=False),
        lambda model, args: make_fx(model)(*args),
    ):
        with refused(RuntimeError, f"{name} exchanges messages between ranks"):
            trace(model, (x,))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="exchanges messages"):
        torch.export.export(model, (x,), strict=True)


@check(2, 4, is_causal=[False, True], load_balance=[False, True])
def context_parallel_under_a_mask(is_causal, load_balance):
    mask = masks.document(cu_seqlens=CU)
    inputs, grad_out, _ = problem(batch=2, heads=4, heads_k=2, seqlen=LENGTH)
    buffers = [x.clone() for x in (*inputs.tensors.values(), grad_out)]
    original = F.scaled_dot_product_attention
    parts = {"buffers": buffers, "buffer_seq_dims": [2] * 4, "no_restore_buffers": {buffers[3]}}
    with context_parallel(mesh_of(SIZE), **parts, load_balance=load_balance, attn_mask=mask) as unshard:
        leaves = [x.clone().requires_grad_() for x in buffers[:3]]
        out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, buffers[3])
        results = dict(zip(("out", "query", "key", "value"), unshard([out, *grads], [2] * 4), strict=True))
        with refused(RuntimeError, "attn_mask must be None under context_parallel"):
            F.scaled_dot_product_attention(*leaves, attn_mask=torch.zeros(1))
    assert F.scaled_dot_product_attention is original
    for x, buffer in zip(inputs.tensors.values(), buffers[:3], strict=True):
        assert torch.equal(x, buffer)
    assert buffers[3].shape[2] < LENGTH
    hold_to_rule(results, inputs, grad_out, parts=2 * SIZE, attn_mask=mask.to_dense(), is_causal=is_causal)


@check(2, masked=[False, True])
def buffers_may_be_views_of_one_tensor(masked):
    text = torch.arange(2.0 * (4 * SIZE + 1)).view(2, -1)
    before, (tokens, labels) = text.clone(), (text[:, :-1], text[:, 1:])
    mask = masks.causal(4 * SIZE) if masked else None
    with context_parallel(mesh_of(SIZE), buffers=[tokens, labels], buffer_seq_dims=[1, 1], attn_mask=mask) as unshard:
        assert tokens.shape == (2, 4)
        assert torch.equal(labels, tokens + 1)
        whole = unshard([tokens, labels], [1, 1])
    for part, want in zip([text, tokens, labels, *whole], [before, *[before[:, :-1], before[:, 1:]] * 2], strict=True):
        assert torch.equal(part, want)
    assert tokens.data_ptr() == text.data_ptr()


@check(2, 4)
def sharding_says_what_it_needs():
    mask = masks.causal(LENGTH)
    with refused(RuntimeError, "the same mask and shards, those of rank 1 are not rank 0's"):
        shard_mask(masks.sliding_window(None, int(RANK == 1), LENGTH))
    with refused(RuntimeError, "the same mask and shards, those of rank 1 are not rank 0's"):
        shard_mask(
            masks.from_ranges(torch.tensor([[9, 19] if RANK == 1 else [0, 20]])[None, None, None], LENGTH, LENGTH)
        )
    with refused(RuntimeError, "the same mask and shards, those of rank 1 are not rank 0's"):
        shard_mask(mask, shards=even_shards(LENGTH, SIZE)[:: -1 if RANK == 1 else 1])
    with refused(TypeError, "argument 'mask' must be Mask, not Tensor"):
        shard_mask(mask.to_dense())
    with refused(TypeError, "argument 'shards' must be sequences of runs (begin, end)"):
        shard_mask(mask, shards=[3] * SIZE)
    with refused(ValueError, f"shards must be {SIZE}, one for each rank of the group, got 1"):
        shard_mask(mask, shards=[[(0, LENGTH)]])
    with refused(ValueError, f"each of {LENGTH} tokens once, got the runs (0, 5), (4, {LENGTH})"):
        shard_mask(mask, shards=[[(0, 5)], [(4, LENGTH)], *[[]] * (SIZE - 2)])
    sharded = shard_mask(mask)
    x = sharded.shard(torch.randn(2, 4, LENGTH, 8), 2)
    count = x.shape[2]
    with refused(RuntimeError, f"x must have {LENGTH} queries in dimension 2, as the mask, got (2, 4, {count}, 8)"):
        sharded.shard(x, 2)
    with refused(RuntimeError, f"x must have {count} tokens in dimension 2 on rank {RANK}, got (2, 4, 1, 8)"):
        sharded.unshard(x[:, :, :1], 2)
    with refused(TypeError, "argument 'x' must be Tensor, not list"):
        sharded.shard([1], 0)
    with refused(TypeError, "argument 'dim' must be int, not str"):
        sharded.unshard(x, "tokens")
    with refused(IndexError, f"dim must be a dimension of x (2, 4, {count}, 8), got 9"):
        sharded.unshard(x, 9)
    with refused(TypeError, "argument 'return_lse' must be bool, not str"):
        sharded_attention(x, x, x, sharded, return_lse="yes")
    for backend, error in (("none", ValueError), ("cuda", RuntimeError)):
        with refused(error, "backend"):
            sharded_attention(x, x, x, sharded, backend=backend)
    sharded_attention(x, x, x, sharded)  # no message of those calls is under way
    with refused(TypeError, "argument 'attn_mask' must be ShardedMask, not Mask"):
        sharded_attention(x, x, x, mask)
    with refused(ValueError, "exchange must be 'ring' or 'all_to_all', got 'allgather'"):
        sharded_attention(x, x, x, sharded, exchange="allgather")
    with refused(RuntimeError, "dropout_p must be 0 where the sequence is sharded, got 0.1"):
        sharded_attention(x, x, x, sharded, dropout_p=0.1)
    with refused(RuntimeError, f"key must have the shape (batch, heads, {count}, size) on rank {RANK}"):
        sharded_attention(x, x[:, :, 1:], x[:, :, 1:], sharded)
    with refused(RuntimeError, f"query must have the shape (batch, heads, {count}, size) on rank {RANK}"):
        sharded_attention(x[0], x[0], x[0], sharded)
    with refused(RuntimeError, "attn_mask is a mask of 3 sequences and 1 heads, query is (2,"):
        sharded_attention(x, x, x, shard_mask(masks.padding([5] * 3, LENGTH, LENGTH), shards=sharded.queries))
    with refused(ValueError, f"numbers of heads must be divisible by the {SIZE} ranks, got 4, 1, 1"):
        sharded_attention(x, x[:, :1], x[:, :1], sharded, enable_gqa=True, exchange="all_to_all")
    with refused(RuntimeError, "query must have the shape (tokens, Hq, E), got (2, 4,"):
        sharded_varlen_attention(x, x, x, sharded)
    with (
        refused(TypeError, "argument 'attn_mask' must be Mask or ShardedMask, not Tensor"),
        context_parallel(mesh_of(SIZE), buffers=[], buffer_seq_dims=[], attn_mask=torch.zeros(1)),
    ):
        pass
    with (
        refused(RuntimeError, f"buffers[1] must have {LENGTH} tokens in dimension 2, as attn_mask, got (1, 1, 5, 8)"),
        context_parallel(
            mesh_of(SIZE),
            buffers=[torch.zeros(1, 1, LENGTH, 8), torch.zeros(1, 1, 5, 8)],
            buffer_seq_dims=[2, 2],
            attn_mask=sharded,
        ),
    ):
        pass
    alone = [dist.new_group([rank]) for rank in range(SIZE)]
    with refused(RuntimeError, "shard_mask needs a group that this process is in"):
        shard_mask(mask, alone[RANK - 1])
    with (
        refused(RuntimeError, f"sharded over the mesh's ranks {list(range(SIZE))}, got [{RANK}]"),
        context_parallel(mesh_of(SIZE), buffers=[], buffer_seq_dims=[], attn_mask=shard_mask(mask, alone[RANK])),
    ):
        pass


@check(2, 4)
def the_example_is_right():
    assert EXAMPLE["compare"](dist.group.WORLD) < 1e-4


@check(2)
def what_the_page_shows_runs():
    """Its blocks, on the ranks' CPU tensors, against attention of one process."""
    ring, under_a_mask = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    tokens, positions, embedding = torch.randint(10, (1, 64)), torch.arange(64)[None], torch.randn(74, 2, 16)

    def model(tokens, positions):
        x = (embedding[tokens] + embedding[10 + positions]).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)

    names = {"tokens": tokens, "positions": positions, "model": model, "world_size": SIZE}
    expected = model(tokens, positions)
    exec(ring, names | {"init_device_mesh": lambda device, shape: mesh_of(*shape)}, found := {})
    assert found["logits"].shape[1] == 64 // SIZE
    torch.testing.assert_close(found["whole"], expected)

    q, (k, v) = torch.randn(1, 4, 64, 16), torch.randn(2, 1, 2, 64, 16)
    names = {"q": q, "k": k, "v": v, "ends": torch.tensor([0, 20, 37, 64])}
    expected = attnkern.attention(q, k, v, masks.document(cu_seqlens=names["ends"], is_causal=True), enable_gqa=True)
    exec(under_a_mask, names)
    assert names["out"].shape[2] == 64 // SIZE
    torch.testing.assert_close(names["whole"], expected)


@check(2, 4, load_balance=[False, True], is_causal=[False, True], rotation=["allgather", "alltoall"])
def torchs_context_parallel(load_balance, is_causal, rotation):
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    if load_balance and not is_causal:
        return torchs_load_balancing_is_for_causal_masks()
    set_rotate_method(rotation)
    inputs, grad_out, _ = problem(batch=2, heads=4, heads_k=2, seqlen=64)
    buffers = [x.clone() for x in (*inputs.tensors.values(), grad_out)]
    original = F.scaled_dot_product_attention
    mesh = mesh_of(SIZE)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, load_balance=load_balance) as unshard:
        assert buffers[0].shape[2] == 64 // SIZE
        leaves = [x.clone().requires_grad_() for x in buffers[:3]]
        out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, buffers[3])
        results = dict(zip(("out", "query", "key", "value"), unshard([out, *grads], [2] * 4), strict=True))
    assert F.scaled_dot_product_attention is original
    assert torch.nn.attention.current_flash_attention_impl() is None
    for x, buffer in zip((*inputs.tensors.values(), grad_out), buffers, strict=True):
        assert torch.equal(x, buffer)
    hold_to_rule(results, inputs, grad_out, parts=2 * SIZE, is_causal=is_causal)


def torchs_load_balancing_is_for_causal_masks():
    x = torch.randn(1, 2, 32, 8)
    with (
        pytest.raises(RuntimeError, match="is_causal=True"),
        context_parallel(mesh_of(SIZE), buffers=[x], buffer_seq_dims=[2]),
    ):
        F.scaled_dot_product_attention(x, x, x)


@check(2)
def the_provider_alone_carries_torchs_context_parallel():
    """What attnkern's wrapper adds is checks and the choice of F.sdpa's operator."""
    from torch.distributed.tensor.experimental import context_parallel as torchs

    inputs, *_ = problem(heads=4, seqlen=32)
    tensors = [x.clone() for x in inputs.tensors.values()]
    expected = attnkern.attention(*tensors, is_causal=True)

    def sdpa(query, key, value, is_causal):
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]

    sdpa.__name__ = "scaled_dot_product_attention"
    original = F.scaled_dot_product_attention
    torch.nn.attention.activate_flash_attention_impl("ATTNKERN")
    F.scaled_dot_product_attention = sdpa
    try:
        with torchs(mesh_of(SIZE), buffers=tensors, buffer_seq_dims=[2, 2, 2]):
            out = F.scaled_dot_product_attention(*tensors, True)
    finally:
        F.scaled_dot_product_attention = original
        torch.nn.attention.restore_flash_attention_impl()
    zigzag = shard_mask(masks.causal(32), shards=balanced_shards(masks.causal(32), SIZE, chunks=2))
    torch.testing.assert_close(zigzag.unshard(out, 2), expected)


@contextlib.contextmanager
def refused(kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        yield


@check(2, 4)
def context_parallel_says_what_it_needs():
    mesh, x = mesh_of(SIZE), torch.randn(1, 2, 12 * SIZE, 8)

    def enter(mesh, *buffers, **options):
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers), **options):
            raise AssertionError("it was let in")

    with refused(TypeError, "argument 'mesh' must be a DeviceMesh, not ProcessGroup"):
        enter(dist.group.WORLD, x)
    with refused(RuntimeError, f"mesh must have one dimension, got 2 of sizes (1, {SIZE})"):
        enter(mesh_of(1, SIZE), x)
    for options in ({}, {"attn_mask": masks.causal(12 * SIZE)}):
        unequal = context_parallel(mesh, buffers=[x], buffer_seq_dims=[2, 2], **options)
        with refused(ValueError, "buffer_seq_dims must have one dimension for each of buffers, got 2 for 1"), unequal:
            raise AssertionError("it was let in")
        with (
            refused(IndexError, "buffer_seq_dims[0] must be a dimension of buffers[0] (1, 2,"),
            context_parallel(mesh, buffers=[x], buffer_seq_dims=[9], **options),
        ):
            raise AssertionError("it was let in")
    with refused(RuntimeError, "buffers[1] must not require a gradient"):
        enter(mesh, x, x.clone().requires_grad_())
    with refused(TypeError, "argument 'buffers[1]' must be Tensor, not NoneType"):
        enter(mesh, x, None)
    with refused(RuntimeError, "buffers[1] must be on the mesh's device cpu, got meta"):
        enter(mesh, x, x.to("meta"))
    odd = x[:, :, :-1]
    with refused(
        ValueError, f"buffers[1]'s sequence length must be divisible by {2 * SIZE}, for {SIZE} ranks in 2 parts"
    ):
        enter(mesh, x, odd)
    with refused(ValueError, f"must be divisible by {SIZE}, for {SIZE} ranks, got {12 * SIZE - 1}"):
        enter(mesh, odd, load_balance=False)
    assert x.shape[2] == 12 * SIZE

    dist.barrier()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        with refused(RuntimeError, "attn_mask must be None under context_parallel"):
            F.scaled_dot_product_attention(x, x, x, torch.zeros(x.shape[2], x.shape[2]))
        with refused(RuntimeError, "dropout_p must be 0 under context_parallel, got 0.1"):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        with refused(RuntimeError, "as many heads as each other without enable_gqa, got 2, 1, 2"):
            F.scaled_dot_product_attention(x, x[:, :1], x)


@check(2)
def a_group_that_does_not_serve_the_device_is_named():
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group(backend="cuda:gloo")
    mesh = DeviceMesh.from_group(group, "cpu")
    x = torch.randn(1, 2, 8, 8)
    with (
        refused(RuntimeError, "the mesh's process group must serve cpu tensors, got one for cuda:gloo"),
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]),
    ):
        pass


# --------------------------------------------------------------------------------------------------------------------
# The processes
# --------------------------------------------------------------------------------------------------------------------


def main(rank, size, folder, seed):
    global RANK, SIZE
    RANK, SIZE = rank, size
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=30),
    )
    report = {}
    for n, (name, (sizes, function, case)) in enumerate(CHECKS.items()):
        if size not in sizes:
            continue
        report[name] = "did not end"
        Path(folder, f"{rank}.json").write_text(json.dumps(report))
        torch.manual_seed(seed + n)
        try:
            with testing.poisoned_memory():
                function(**case)
            report[name] = ""
        except BaseException:
            report[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(report))
        if report[name]:
            break  # the ranks are out of step
        dist.barrier()
    dist.destroy_process_group()


def fork_ranks(size, folder, seed):
    """A process for each rank, from this one, which has imported all."""
    with testing.poisoned_memory():  # which imports more of torch when it is first used
        pass
    children = []
    for rank in range(size):
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        child = os.fork()
        if child == 0:
            os.dup2(log, 1)
            os.dup2(log, 2)
            return main(rank, size, folder, seed)
        children.append((child, log))
    for child, log in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(log, f"exit status {status}\n".encode())


def spawn(size, folder, seed):
    """{name: what went wrong, by rank}, of all checks for this number of processes."""
    command = [sys.executable, __file__, *map(str, (size, folder, seed))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    failures = {name: "" for name, (sizes, _, _) in CHECKS.items() if size in sizes}
    for rank in range(size):
        path = folder / f"{rank}.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        for name in failures:
            if problem := report.get(name, "was not reached"):
                failures[name] += f"rank {rank} of {size}: {problem}\n"
    if any(failures.values()):
        failures |= {f"rank {rank} printed": (folder / f"{rank}.log").read_text()[-2000:] for rank in range(size)}
    return failures


@pytest.mark.parametrize("size", [2, 4])
def test_on_several_processes(size, tmp_path, fresh_seed):
    failures = {name: text for name, text in spawn(size, tmp_path, fresh_seed).items() if text}
    assert not failures, "\n\n".join(f"{name}\n{text}" for name, text in failures.items())


@pytest.mark.parametrize("dropout_p", [0.1, -0.5, float("nan")])
def test_no_dropout_of_any_kind(dropout_p):
    with pytest.raises(RuntimeError, match=f"dropout_p must be 0 under x, got {dropout_p}"):
        check_no_dropout(dropout_p, "under x")


def test_without_processes(fresh_seed):
    x = torch.randn(1, 2, 8, 8)
    with (
        refused(RuntimeError, "context_parallel needs torch.distributed.init_process_group to be called first"),
        context_parallel(None, buffers=[x], buffer_seq_dims=[2]),
    ):
        pass
    with refused(RuntimeError, "shard_mask needs torch.distributed.init_process_group to be called first"):
        shard_mask(masks.causal(8))


SKEWED = masks.document(cu_seqlens=[0, 8192, *range(8192 + 256, 16384 + 1, 256)], is_causal=True)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shards_are_balanced(ranks):
    """Half of the tokens are one document, of nearly all scores. A rank has as many tokens as the others."""
    shards = balanced_shards(SKEWED, ranks)
    live = live_scores(SKEWED, shards)
    assert sum(live) == int(SKEWED.live)
    assert max(live) <= 1.05 * sum(live) / ranks
    even = live_scores(SKEWED, even_shards(16384, ranks))
    assert max(even) > 1.9 * sum(even) / ranks
    assert {sum(end - begin for begin, end in runs) for runs in shards} == {16384 // ranks}
    covered = sorted(run for runs in shards for run in runs)
    assert [begin for begin, _ in covered] == [0, *(end for _, end in covered[:-1])]
    assert covered[-1][1] == 16384


def test_shards_of_a_causal_mask_are_zigzag():
    expected = tuple(((16 * n, 16 * n + 16), (16 * (7 - n), 16 * (8 - n))) for n in range(3))
    assert balanced_shards(masks.causal(128), 4) == (*expected, ((48, 80),))  # which stand together


def test_shards_of_even_masks_stay_whole():
    for mask in (masks.padding([5, 90], 1001, 1001), masks.sliding_window(2, 2, 1001)):
        assert (
            balanced_shards(mask, 4)
            == even_shards(1001, 4)
            == tuple(((a, b),) for a, b in pairwise((0, 250, 500, 751, 1001)))
        )


def test_long_chunks_begin_where_a_tile_does():
    edges = [begin for runs in even_shards(5000, 3) for begin, _ in runs]
    assert edges == [0, 1664, 3328]


@pytest.mark.parametrize(("mask", "shards"), [(SKEWED, 3), (masks.causal(5), 8), (masks.causal(0), 2)])
def test_shards_of_any_length_hold_every_token_once(mask, shards):
    runs = [run for own in balanced_shards(mask, shards, chunks=3) for run in own]
    assert sorted(n for run in runs for n in range(*run)) == list(range(mask.seqlen_q))


def test_bad_shards_are_refused():
    with refused(TypeError, "argument 'mask' must be Mask, not Tensor"):
        balanced_shards(torch.ones(3, 3), 2)
    with refused(TypeError, "argument 'ranks' must be int, not float"):
        even_shards(8, 2.0)
    with refused(ValueError, "ranks must be >= 1, got 0"):
        balanced_shards(masks.causal(8), 0)
    with refused(ValueError, "chunks must be >= 1, got 0"):
        balanced_shards(masks.causal(8), 2, 0)
    with refused(ValueError, "seqlen must be >= 0, got -1"):
        even_shards(-1, 2)


if __name__ == "__main__":
    fork_ranks(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
