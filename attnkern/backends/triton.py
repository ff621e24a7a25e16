"""The Triton kernels (triton_kernels/): tensors in, launches out. What can be known without the tensors is a plan."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from .. import sinks
from ..arguments import rounds_to_tf32
from ..bits import WORD, in_bits
from ..params import (
    GRAD_BIAS,
    GRAD_GRAD_LSE,
    GRAD_GRAD_OUT,
    GRAD_SINKS,
    MAX_HEAD_DIM,
    MAX_LENGTH,
    AttentionParams,
)
from ..problem import Problem
from ..relative import add_bands, as_scores, by_distance
from ..shapes import TensorSpec
from ..signatures import Derivatives, Inputs
from . import disabled, triton_interpreted
from .reference import check_pages

NAME = "triton"
NOT_INSTALLED = 'Triton is not installed: pip install "attnkern[triton]"'
_INSTALLED = importlib.util.find_spec("triton") is not None  # found out here: Dynamo traces `unavailable`
MAX_ROW_STRIDE = 2**22  # the rows of a tile add up within 32 bits
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def unavailable() -> str | None:
    """Why this backend cannot run at all here, or None."""
    if (reason := disabled.reason(NAME)) is not None:
        return reason
    if not _INSTALLED:
        return NOT_INSTALLED
    if triton_interpreted.asked:
        return triton_interpreted.unavailable()
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def refusals(problem: Problem) -> list[str]:
    """Why this backend cannot run `problem`; empty if it can."""
    q, k, v = problem.q, problem.k, problem.v
    reasons = []
    if (reason := unavailable()) is not None:
        reasons.append(reason)
    elif (capability := _capability(q.get_device())) < 80:
        reasons.append(f"compute capability {capability / 10}, and 8.0 is needed")
    if q.dtype not in _DTYPES:
        reasons.append(f"query is {str(q.dtype).removeprefix('torch.')}")
    if (size := max(q.shape[3], v.shape[3])) > MAX_HEAD_DIM:
        reasons.append(f"head size {size} is above {MAX_HEAD_DIM}")
    if (length := max(q.shape[2], k.shape[2])) > MAX_LENGTH:
        reasons.append(f"length {length} is above {MAX_LENGTH}")
    if triton_interpreted.asked:
        reasons += triton_interpreted.refusals(problem)
    # (A graph's calls meet what failed when they run.)
    if not reasons and not torch.compiler.is_compiling() and (launch := _plans().launch).failures:
        target, (steps, _) = launch.capability(q.get_device()), _launches(problem)
        found = (launch.why_not(step.kernel, target) for _, step in steps)
        reasons += dict.fromkeys(reason for reason in found if reason is not None)
    return reasons


def notes(problem: Problem) -> list[str]:
    """What a call costs beyond its kernels: the inputs that must be copied."""
    tensors = {"query": problem.q, "key": problem.k, "value": problem.v}
    if problem.pages is not None:
        tensors |= {"key": problem.pages.key, "value": problem.pages.value}
    copied = {name for name, x in tensors.items() if not _has_rows(x)}
    later = set()
    for name, step in _launches(problem)[0]:
        loaded = {"forward": ("key", "value"), "dq": ("key", "value"), "dkdv": ("query", "grad_out")}.get(name, ())
        padded = {x for x, unit in zip(loaded, step.pads, strict=False) if unit}
        if name == "forward":
            copied |= padded
        else:
            later |= padded & set(tensors)
    told = [f"copies {name} (strides {tuple(x.stride())})" for name, x in tensors.items() if name in copied]
    if triton_interpreted.asked:
        told.insert(0, triton_interpreted.NOTE)
    again = [name for name in tensors if name in later]
    return [*told, f"copies {' and '.join(again)} in the backward pass"] if again else told


def plan(problem: Problem) -> list[str]:
    """How the call is cut, a line for each kernel; the backward pass is in them where an input requires a gradient."""
    steps, splits = _launches(problem)
    lines = [_line(name, step, splits) for name, step in steps] or ["no kernel: nothing to add up"]
    return [*lines, "dsinks: of delta, in plain torch"] if problem.wanted() & GRAD_SINKS else lines


def _launches(problem: Problem) -> tuple[list[tuple[str, Any]], int]:
    """Name and `Step` of the launches of a call, in order; and how many splits of the keys there are, if any."""
    plans = _plans()
    q, k, v, bias, of_heads, ranges, params, _, pages = problem
    seqlen_k = k.shape[2]
    if pages is not None:
        k, v = pages.key, pages.value
    index = q.get_device()

    def spec(x: Tensor, as_it_is: bool) -> TensorSpec:
        # As kernels get it: where it lies, or its copy.
        return TensorSpec.of(x if as_it_is else torch.empty(x.shape, dtype=x.dtype, device="meta"))

    specs = [spec(x, _has_rows(x)) for x in map(_widened, (q, k, v))]
    if pages is not None:
        specs[1:] = (_of_logical_keys(x, seqlen_k) for x in specs[1:])
    key = plans.PlanKey(
        plans.launch.capability(index),
        q.dtype,
        *specs,
        None if bias is None else _table_spec(bias, q, seqlen_k) or spec(bias, _reads_bias(bias)),
        None if bias is None else bias.dtype,
        int(params.dropout_p > 0),
        params,
        rounds_to_tf32(q.dtype),
        None if ranges is None else spec(ranges, True),
        of_heads is not None,
        None if pages is None else plans.Pages(pages.key.shape[2], pages.table.stride(0)),
    )
    grad_mask = problem.wanted()
    forward = plans.forward_plan(key, grad_mask > 0, _processors(plans, index))
    steps = [("forward" if forward.combine is None else "decode", forward.step), ("combine", forward.combine)]
    if grad_mask:
        out = forward.out.spec()
        backward = plans.backward_plan(key, out, out, False, grad_mask)
        steps += [(name, getattr(backward, name)) for name in ("visits", "delta", "dkdv", "dq", "dbias")]
    splits = forward.parts[3] if forward.parts else 0
    return [(name, step) for name, step in steps if step is not None], splits


def _line(name: str, step: Any, splits: int) -> str:
    constants, options = step.kernel.constants, step.kernel.options
    tile = []
    if "CHUNK" in constants:
        rows = "queries of the heads that share their keys" if name == "decode" else "queries"
        tile.append(f"tiles of {constants['BLOCK_M']} {rows} x {constants['BLOCK_N']} keys")
        if chunk := constants["CHUNK"]:
            tile.append(f"{chunk} columns at a time")
        tile.append("TMA" if step.descriptors else "pointers")
        tile.append(f"{options['num_stages']} stage{'s' * (options['num_stages'] > 1)}")
    if name == "decode":
        tile.insert(0, f"keys in {splits} split{'s' * (splits > 1)}")
    tile += [f"{options['num_warps']} warps", f"{step.grid} programs"]
    return f"{name}: {', '.join(tile)}"


def forward(inputs: Inputs, params: AttentionParams, need_lse: bool) -> tuple[Tensor, Tensor]:
    """`attnkern::forward` (ops.py) on a CUDA device."""
    if _lacks_columns(inputs):
        out, lse = forward(_with_columns(inputs), params, need_lse)
        return _narrowed(out, inputs.v), lse
    plans, inputs = _plans(), _as_read(inputs)
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    index, run = q.get_device(), plans.launch.run
    problem = _problem(plans, inputs, params)
    plan = plans.forward_plan(problem, need_lse, _processors(plans, index))
    masks, table = (bias, None, inputs.key_ranges, None), inputs.block_table
    check_pages(inputs, params)
    of_heads = None if inputs.sinks is None else inputs.sinks.expand(q.shape[:2]).contiguous()
    out = torch.empty_strided(*plan.out, dtype=q.dtype, device=q.device)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device)
    if (step := plan.step) is not None and (combine := plan.combine) is not None:
        part_out = torch.empty(plan.parts, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(plan.parts[:-1], dtype=torch.float32, device=q.device)
        run(step.kernel, step.grid, (q, k, v, masks, table, part_out, part_lse, *step.rest), index)
        run(
            combine.kernel,
            combine.grid,
            (part_out, part_lse, of_heads, out, lse if need_lse else None, *combine.rest),
            index,
        )
    elif step is not None:
        tiles = step.tiles(k, v)
        args = (q, *tiles, masks, table, inputs.philox_seed, of_heads, out, lse if need_lse else None, *step.rest)
        run(step.kernel, step.grid, args, index)
    else:
        out.zero_()
        if need_lse:
            lse.copy_(torch.full_like(lse, -math.inf) if of_heads is None else of_heads.unsqueeze(-1).expand(lse.shape))
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    params: AttentionParams,
    grad_mask: int,
) -> tuple[Tensor, ...]:
    """`attnkern::backward` (ops.py) on a CUDA device."""
    if _lacks_columns(inputs):
        wide = _with_columns(inputs)
        dq, dk, dv, *rest = backward(_widened(grad_out), grad_lse, wide, _widened(out), lse, params, grad_mask)
        return _narrowed(dq, inputs.q), _narrowed(dk, inputs.k), _narrowed(dv, inputs.v), *rest
    plans, bias, inputs = _plans(), inputs.bias, _as_read(inputs)
    q = inputs.q
    grad_out, out, lse = _rows(grad_out), _rows(out), lse.contiguous()
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    problem = _problem(plans, inputs, params)
    plan = plans.backward_plan(problem, _spec(grad_out), _spec(out), grad_lse is not None, grad_mask)
    grads, dbias = _empty_grads(plan, q, bias if grad_mask & GRAD_BIAS else None)
    if plan.delta is None:
        delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse
        return *grads, dbias, _sinks_gradient(inputs, lse, delta, grad_mask)
    delta = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    index, run = q.get_device(), plans.launch.run
    run(plan.delta.kernel, plan.delta.grid, (grad_out, out, lse, grad_lse, delta, *plan.delta.rest), index)
    _gradients(plans, plan, inputs, grad_out, Derivatives(), (lse, delta, None, None), grads, dbias, params)
    return *grads, dbias, _sinks_gradient(inputs, lse, delta, grad_mask)


def _sinks_gradient(inputs: Inputs, lse: Tensor, delta: Tensor, grad_mask: int) -> Tensor:
    if inputs.sinks is None or not grad_mask & GRAD_SINKS:
        return lse.new_empty(0)
    return sinks.gradient(lse, delta, inputs.sinks)


def has_second_order() -> bool:
    """Whether `tangent` and `second_backward` are not switched off."""
    return disabled.reason("triton-second-order") is None


def tangent(
    inputs: Inputs, tangents: Derivatives, out: Tensor, lse: Tensor, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """`attnkern::tangent` (ops.py) on a CUDA device."""
    if _lacks_columns(inputs):
        tout, tlse = tangent(_with_columns(inputs), _with_columns(tangents), _widened(out), lse, params)
        return _narrowed(tout, inputs.v), tlse
    plans, inputs = _plans(), _as_read(inputs)
    q, out, lse = inputs.q, _rows(out), lse.contiguous()
    read, specs = _tangents_as_read(plans, tangents, inputs)
    problem = _problem(plans, inputs, params)
    plan = plans.tangent_plan(problem, specs, _spec(out))
    tout = torch.empty_strided(*plan.tout, dtype=q.dtype, device=q.device)
    tlse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if (step := plan.step) is not None:
        _launch_tangent(plans, step, inputs, None, read, (out, lse), (tout, tlse, None))
    else:
        tout.zero_()
        tlse.zero_()
    if inputs.sinks is not None:
        sinks.count_in_tangent(lse, out, inputs.sinks, tangents.sinks, tout, tlse)
    return tout, tlse


def second_backward(
    cotangents: Derivatives,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    params: AttentionParams,
    grad_mask: int,
) -> tuple[Tensor, ...]:
    """`attnkern::second_backward` (ops.py) on a CUDA device."""
    if _lacks_columns(inputs):
        of_queries = _widened(grad_out), grad_lse, _with_columns(inputs), _widened(out), lse
        results = second_backward(_with_columns(cotangents), *of_queries, params, grad_mask)
        g_grad_out, g_grad_lse, dq, dk, dv, *rest = results
        narrow = _narrowed(dq, inputs.q), _narrowed(dk, inputs.k), _narrowed(dv, inputs.v)
        return _narrowed(g_grad_out, inputs.v), g_grad_lse, *narrow, *rest
    plans, bias, inputs = _plans(), inputs.bias, _as_read(inputs)
    q = inputs.q
    grad_out, out, lse = _rows(grad_out), _rows(out), lse.contiguous()
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    # The first pass is the tangent along the cotangents: see triton_kernels/backward.py.
    read, specs = _tangents_as_read(plans, cotangents, inputs)
    problem = _problem(plans, inputs, params)
    first, plan = plans.second_backward_plan(
        problem, specs, _spec(grad_out), _spec(out), grad_lse is not None, grad_mask
    )
    device, index, run = q.device, q.get_device(), plans.launch.run
    grads, dbias = _empty_grads(plan, q, bias if grad_mask & GRAD_BIAS else None)
    tout = torch.empty_strided(*first.tout, dtype=q.dtype, device=device)
    mu, nu, delta = torch.empty((3, *q.shape[:3]), dtype=torch.float32, device=device)
    if (step := first.step) is not None:
        _launch_tangent(plans, step, inputs, grad_out, read, (out, lse), (tout, mu, nu))
        run(plan.delta.kernel, plan.delta.grid, (grad_out, out, lse, grad_lse, delta, *plan.delta.rest), index)
    else:
        for x in (tout, mu, nu, delta):
            x.zero_()
        if grad_lse is not None:
            delta.sub_(grad_lse)
    gsinks = lse.new_empty(0)
    if inputs.sinks is not None:
        moved = sinks.count_in_tangent(lse, out, inputs.sinks, cotangents.sinks, tout, mu)
        nu.mul_(sinks.share(lse, inputs.sinks))
        if moved is not None:
            nu.sub_(moved * (delta if grad_lse is None else delta + grad_lse))
        if grad_mask & GRAD_SINKS:
            gsinks = sinks.second_gradient(lse, delta, mu, nu, inputs.sinks, cotangents.sinks)
    _gradients(plans, plan, inputs, grad_out, read, (lse, delta, mu, nu), grads, dbias, params)
    g_grad_out = tout if grad_mask & GRAD_GRAD_OUT else q.new_empty(0)
    g_grad_lse = mu if grad_mask & GRAD_GRAD_LSE else lse.new_empty(0)
    return g_grad_out, g_grad_lse, *grads, dbias, gsinks


def _lacks_columns(inputs: Inputs) -> bool:
    return inputs.q.shape[3] == 0 or inputs.v.shape[3] == 0


def _with_columns(tensors: Any) -> Any:
    """`Inputs` or `Derivatives`, those of head size 0 `_widened`."""
    q, k, v = (None if x is None else _widened(x) for x in tensors[:3])
    return tensors._replace(q=q, k=k, v=v)


def _widened(x: Tensor) -> Tensor:
    """x; of head size 0 one column of zeros, which adds nothing to any sum. (Kernels have a column at least.)"""
    if x.shape[3]:
        return x
    return torch.empty_strided(*_spec(x).like(1), dtype=x.dtype, device=x.device).zero_()


def _narrowed(x: Tensor, of: Tensor) -> Tensor:
    """A result x as wide as `of`, if that was `_widened`, without its column. x may be of shape (0,), not asked for."""
    if of.shape[3] or x.ndim != 4:
        return x
    return torch.empty_strided(*_spec(x).like(0), dtype=x.dtype, device=x.device)


def _as_read(inputs: Inputs) -> Inputs:
    """The inputs as kernels read them."""
    q, k, v = (_rows(x) for x in (inputs.q, inputs.k, inputs.v))
    return inputs._replace(q=q, k=k, v=v, bias=_bias_as_read(inputs.bias, q))


def _tangents_as_read(plans: Any, tangents: Derivatives, inputs: Inputs) -> tuple[Derivatives, Any]:
    """The tangents as kernels read them, and what a plan knows of them."""
    tq, tk, tv = (None if x is None else _rows(x) for x in (tangents.q, tangents.k, tangents.v))
    q = inputs.q
    tbias = _bias_as_read(tangents.bias, q)
    of_bias = None if tbias is None else _table_spec(tbias, q, inputs.seqlen_k) or _spec(tbias)
    specs = (None if x is None else _spec(x) for x in (tq, tk, tv))
    return Derivatives(tq, tk, tv, tbias), plans.TangentSpecs(*specs, of_bias)


def _launch_tangent(
    plans: Any, step: Any, inputs: Inputs, grad_out: Tensor | None, tangents: Derivatives, saved: tuple, results: tuple
) -> None:
    """Launches the tangent kernel. saved: out, lse; results: tout, tlse, and nu or None."""
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    tq, tk, tv, tbias, _ = tangents
    masks = (bias, tbias, inputs.key_ranges, None)
    args = (*step.tiles(k, v, tk, tv), (q, tq, grad_out), masks, inputs.philox_seed, saved, results, *step.rest)
    plans.launch.run(step.kernel, step.grid, args, q.get_device())


def _gradients(
    plans: Any,
    plan: Any,
    inputs: Inputs,
    grad_out: Tensor,
    tangents: Derivatives,
    terms: tuple,
    grads: tuple[Tensor, Tensor, Tensor],
    dbias: Tensor,
    params: AttentionParams,
) -> None:
    """Launches the kernels of a `Backward` after delta. terms: lse, delta, mu, nu."""
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    tq, tk, tv, tbias, _ = tangents
    queries, keys = (q, tq, grad_out), (k, v, tk, tv)
    index, run = q.get_device(), plans.launch.run
    visits = None
    if (step := plan.visits) is not None:
        visits = torch.zeros(plan.visits_shape, dtype=torch.int32, device=q.device)
        run(step.kernel, step.grid, (inputs.key_ranges, visits, *step.rest), index)
    masks = (bias, tbias, inputs.key_ranges, visits)
    if (step := plan.dkdv) is not None:
        parts = _parts(plan, grads, q)
        tiles = step.tiles(q, tq, grad_out)
        run(step.kernel, step.grid, (*tiles, keys, masks, inputs.philox_seed, terms, parts, *step.rest), index)
        _reduce_kv_grads(grads[1:], parts)
    if (step := plan.dq) is not None:
        targets = _targets(plan, grads, dbias, q)
        tiles = step.tiles(k, v, tk, tv)
        run(step.kernel, step.grid, (*tiles, queries, masks, inputs.philox_seed, terms, targets, *step.rest), index)
    if (step := plan.dbias) is not None:
        to = dbias if plan.bands is None else torch.empty(plan.bands.shape, dtype=torch.float32, device=q.device)
        run(step.kernel, step.grid, (queries, keys, masks, inputs.philox_seed, terms, to, *step.rest), index)
        if plan.bands is not None:
            add_bands(dbias, to, plan.bands.apart, plan.bands.first, q.shape[2], params)


def _empty(layout: Any, q: Tensor, dtype: torch.dtype) -> Tensor:
    if layout is None:
        return torch.empty(0, dtype=dtype, device=q.device)
    return torch.empty_strided(*layout, dtype=dtype, device=q.device)


def _empty_grads(plan: Any, q: Tensor, bias: Tensor | None) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """dq, dk, dv of a `Backward`, zero where no kernel is launched, and dbias for `bias`; of shape (0,) if not asked
    for."""
    dq, dk, dv = (_empty(layout, q, q.dtype) for layout in plan.grads)
    if plan.delta is None:
        for grad in (dq, dk, dv):
            grad.zero_()
    if bias is None:
        return (dq, dk, dv), _empty(None, q, q.dtype)
    make = torch.zeros if plan.zero_bias else torch.empty
    return (dq, dk, dv), make(bias.shape, dtype=bias.dtype, device=q.device)


def _parts(plan: Any, grads: tuple[Tensor, Tensor, Tensor], q: Tensor) -> tuple[Tensor, ...]:
    """What the one kernel of dk and dv writes: the result itself where that has as many heads, and was asked for."""
    return tuple(
        grad if grad.ndim == 4 and grad.shape == layout.shape else _empty(layout, q, dtype)
        for grad, (layout, dtype) in zip(grads[1:], plan.parts, strict=True)
    )


def _reduce_kv_grads(grads: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> None:
    """Fills dk and dv from what the kernel wrote, where that has more heads than they: neighbouring heads share one.
    Does nothing for a gradient that is its own part, and for one not asked for (of shape (0,))."""
    for grad, part in zip(grads, parts, strict=True):
        if part is not grad and grad.ndim == 4:
            grad.copy_(part.unflatten(1, (grad.shape[1], -1)).sum(2))


def _targets(plan: Any, grads: tuple[Tensor, Tensor, Tensor], dbias: Tensor, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the kernel of dq writes: dq, asked for or not, and dbias where that falls off."""
    dq = grads[0]
    return dq if dq.ndim == 4 else _empty(plan.dq_layout, q, q.dtype), dbias if plan.bias_falls_off else None


@functools.cache
def _plans() -> Any:
    """triton_kernels/plan.py, imported when first needed: Triton takes half a second."""
    plans = importlib.import_module("attnkern.triton_kernels.plan")
    if triton_interpreted.asked:
        triton_interpreted.use(plans)
    return plans


def _capability(index: int) -> int:
    """Compute capability of a device, e.g. 90."""
    return _plans().launch.capability(index)


# A constant to a trace: Dynamo looks through the cache of `_plans`, and traces no import by name. (As in __init__.py.)
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _processors(plans: Any, index: int) -> int:
    """Over how many multiprocessors keys may be split; 0: they aren't."""
    return 0 if disabled.reason("triton-decode") is not None else plans.launch.processors(index)


def _problem(plans: Any, inputs: Inputs, params: AttentionParams) -> Any:
    """The key of a plan. (A tuple by position: names would cost a third of a short launch.)"""
    q, k, v, bias, ranges, seed = inputs.q, inputs.k, inputs.v, inputs.bias, inputs.key_ranges, inputs.philox_seed
    of_keys, of_values, table, pages = _spec(k), _spec(v), inputs.block_table, None
    if table is not None:
        of_keys, of_values = (_of_logical_keys(x, inputs.seqlen_k) for x in (of_keys, of_values))
        pages = plans.Pages(k.shape[2], table.stride(0))
    return plans.PlanKey(
        plans.launch.capability(q.get_device()),
        q.dtype,
        _spec(q),
        of_keys,
        of_values,
        None if bias is None else _table_spec(bias, q, inputs.seqlen_k) or _spec(bias),
        None if bias is None else bias.dtype,
        0 if seed is None else seed.shape[0],
        params,
        rounds_to_tf32(q.dtype),
        None if ranges is None else TensorSpec(ranges.shape, ranges.stride(), True),
        inputs.sinks is not None,
        pages,
    )


def _table_spec(bias: Tensor, q: Tensor, seqlen_k: int) -> TensorSpec | None:
    """Of a table of distances; None for any other bias."""
    return TensorSpec(*as_scores(bias, q.shape[2], seqlen_k), False) if by_distance(bias) else None


def _of_logical_keys(pool: Any, seqlen_k: int) -> Any:
    """The spec of a pool (pages, heads, rows of a page, size) as a plan has it, (pages, heads, seqlen_k, size)."""
    pages, heads, _, size = pool.shape
    return pool._replace(shape=(pages, heads, seqlen_k, size))


def _spec(x: Tensor) -> TensorSpec:
    return TensorSpec(x.shape, x.stride(), x.data_ptr() % 16 == 0)


def _rows(x: Tensor) -> Tensor:
    """x itself if its rows are dense and not too far apart, as kernels read them; else a copy."""
    return x if _has_rows(x) else x.contiguous()


def _has_rows(x: Tensor) -> bool:
    _, _, row, last = x.stride()
    _, _, length, size = x.shape
    return (last == 1 or size <= 1) and (row <= MAX_ROW_STRIDE or length <= 1)


def _bias_as_read(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """The bias, copied if kernels don't read it where it lies; a table from the entry of the first query and key on."""
    if bias is not None and by_distance(bias):
        return bias[..., max(0, q.shape[2] - 1) :]
    return bias if bias is None or _reads_bias(bias) else bias.clone(memory_format=torch.contiguous_format)


def _reads_bias(bias: Tensor) -> bool:
    """Whether the strides of its rows and columns have 32 bits; of bits, whether its rows begin with words."""
    if in_bits(bias):
        return all(step % (WORD // 8) == 0 for step in (bias.storage_offset(), *bias.stride()[:3]))
    return max(bias.stride()[2:]) < 2**31
