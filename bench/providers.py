"""Who competes: attnkern's backends, and the rivals that the device offers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnkern
from attnkern import signatures
from attnkern.params import AttentionParams
from attnkern.problem import Problem
from attnkern.testing import Inputs
from bench.cases import BY_DISTANCE, Case

from . import device as devices
from . import rivals
from .provider import Attend, OperatorProvider, Provider, Refused, extended_options_of, options_of, tensors_of


def _attnkern(backend: str, case: Case, inputs: Inputs) -> Attend:
    if case.ranged_kind:
        return _attnkern_with_ranges(backend, case, inputs)
    query, key, value, _ = tensors_of(inputs)
    options = {**extended_options_of(case), "sinks": inputs.sinks, "backend": backend}
    given: dict[str, Any] = {"attn_mask": inputs.attn_mask, "relative_bias": inputs.relative_bias}
    explanation = attnkern.explain(query, key, value, **given, **options)
    if explanation.chosen != backend:
        raise Refused("; ".join(explanation.refusals[backend]))
    if case.mask in BY_DISTANCE:

        def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor | None) -> Any:
            return attnkern.attention(query, key, value, relative_bias=table, **options)

        return attend
    drop_in = inputs.sinks is None and case.window is None and case.alignment == "top_left" and not case.softcap
    if drop_in and not (case.causal and case.mask != "none"):
        return partial(attnkern.scaled_dot_product_attention, **options_of(case), backend=backend)
    function: Callable[..., Any] = attnkern.attention  # gives the output alone unless asked for more
    return partial(function, **options)


def _attnkern_with_ranges(backend: str, case: Case, inputs: Inputs, dense: bool = False) -> Attend:
    """Told as a Mask, made before the clock starts, or as cu_seqlens; ``dense``: as the bool tensor of the same."""
    if case.ranged is None:
        raise Refused("there are no ranges that a dense mask could take the place of")
    query, key, value, _ = tensors_of(inputs)
    whole = case.ranged.to(query.device)
    mask = whole.to_dense() if dense else whole
    options: dict[str, Any] = {**extended_options_of(case), "is_causal": False, "backend": backend}
    explanation = attnkern.explain(query, key, value, mask, **options)
    if explanation.chosen != backend:
        raise Refused("; ".join(explanation.refusals[backend]))

    def attend(query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None) -> Any:
        return attnkern.attention(query, key, value, mask, **options)

    if dense or case.ranged_kind != "packed":
        return attend
    ends, options["is_causal"] = case.ends.to(query.device), case.causal
    options.pop("alignment")

    def attend_packed(query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None) -> Any:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        out: Any = attnkern.varlen_attention(q, k, v, ends, **options)
        return out.transpose(0, 1).unsqueeze(0)

    return attend_packed


def _attnkern_in_pages(backend: str, page_size: int, case: Case, inputs: Inputs) -> Attend:
    """Keys and values, as far as there are any, lie in the pages of a PagedCache before the clock starts."""
    padded = case.ranged_kind == "padding"
    if case.causal or case.band is not None or case.sinks or not (padded or case.mask == "none"):
        raise Refused("pages are timed with padding alone")
    query, key, value, _ = tensors_of(inputs)
    lengths = [min(n, case.seqlen_k) for n in case.lengths] if padded else [case.seqlen_k] * case.batch
    pages = sum(-(-n // page_size) for n in lengths)
    kind: dict[str, Any] = {"page_size": page_size, "dtype": query.dtype, "device": query.device}
    cache = attnkern.PagedCache(pages, case.heads_k, case.head_dim, case.head_dim_v, **kind)
    places = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
    cache._free[:] = places  # as after a day's work
    step = cache.step([cache.add() for _ in lengths], lengths)
    step.write(0, *(torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]) for x in (key, value)))
    ranges = torch.stack([torch.zeros_like(step.seqused_k), step.seqused_k], -1)[:, None, None, None]
    options: dict[str, Any] = {**extended_options_of(case), "is_causal": False, "backend": backend}
    options |= {"key_ranges": ranges, "block_table": step.block_table}
    explanation = attnkern.explain(query, cache.keys[0], cache.values[0], **options)
    if explanation.chosen != backend:
        raise Refused("; ".join(explanation.refusals[backend]))

    def attend(query: Tensor, _key: Tensor, _value: Tensor, _mask: Tensor | None) -> Any:
        return attnkern.attention(query, cache.keys[0], cache.values[0], **options)

    return attend


def _without_mask(case: Case) -> Case:
    """The same sizes, all scores; of a window and the first keys, the window alone; of learned sinks and of a bias by
    distance, all but them."""
    if case.sinks:
        return replace(case, sinks=False)
    if case.mask in BY_DISTANCE:
        return replace(case, mask="none")
    if case.ranged_kind == "packed" or (case.mask == "none" and case.band is None):
        raise Refused("there is no call of these sizes without the mask")
    plain = replace(case, mask="none", causal=False, window=None, alignment="top_left")
    if case.ranged_kind == "streaming":
        width = int(case.mask.removeprefix("streaming:").partition("+")[0])
        return replace(plain, causal=True, window=(width - 1, 0))
    return plain


def _params(case: Case, inputs: Inputs) -> AttentionParams:
    """The operator's arguments from softmax_scale to dropout_p."""
    if case.ranged_kind:
        raise Refused("the bare operator is timed without ranges only")
    if case.dropout or case.sinks or case.mask in BY_DISTANCE:
        raise Refused("the bare operator is timed without dropout, sinks and relative biases only")
    query, key, value, mask = tensors_of(inputs)
    return Problem.from_sdpa(query, key, value, mask, **extended_options_of(case)).params


def _attnkern_op(case: Case, inputs: Inputs) -> Attend:
    op, params = torch.ops.attnkern.forward.default, _params(case, inputs)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return op(*signatures.Inputs(query, key, value, mask), *params, False, "cpu")[0]

    return attend


class _AttnkernOperator(OperatorProvider):
    """The operator without the Python above it: what a short call costs at least."""

    def backward(self, case: Case, inputs: Inputs, grad_out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        q, k, v, mask = tensors_of(inputs)
        params = _params(case, inputs)
        out, lse = torch.ops.attnkern.forward.default(*signatures.Inputs(q, k, v, mask), *params, True, "cpu")
        wanted = 7 + 8 * (case.mask == "bias")
        op = torch.ops.attnkern.backward.default
        return partial(op, grad_out, None, *signatures.Inputs(q, k, v, mask), out, lse, *params, wanted, "cpu")


class _TritonOperator(OperatorProvider):
    """The Triton backend's Python with a driver that does nothing, on CPU tensors: what a launch costs the host."""

    def backward(self, case: Case, inputs: Inputs, grad_out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        raise Refused("the forward pass alone is one launch")


def _triton_operator(case: Case, inputs: Inputs) -> Attend:
    """The whole operator: looks up the plan, allocates the results, launches."""
    from attnkern.backends import triton

    _refuse_other_than_launches(case)
    params = _params(case, inputs)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return triton.forward(signatures.Inputs(query, key, value, mask), params, False)[0]

    return attend


def _triton_launch(case: Case, inputs: Inputs) -> Attend:
    """A launch alone, with the arguments at hand."""
    from attnkern.triton_kernels import launch

    from attnkern.backends import triton

    _refuse_other_than_launches(case)
    launched: list[tuple[Any, ...]] = []
    arguments = signatures.Inputs(*tensors_of(inputs)), _params(case, inputs), False
    with _without_driver():
        run, launch.run = launch.run, lambda *arguments: launched.append(arguments)
        try:
            triton.forward(*arguments)
        finally:
            launch.run = run
    call = partial(run, *launched[0])

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        call()
        return query

    return attend


def _refuse_other_than_launches(case: Case) -> None:
    if "launch-overhead" not in case.tags:
        raise Refused("it computes nothing: for the cases of launch-overhead")


@contextmanager
def _without_driver() -> Iterator[None]:
    from attnkern.triton_kernels import launch

    def nothing(*arguments: Any) -> None: ...

    replaced = {
        "capability": lambda index: 80,
        "processors": lambda index: 108,
        "_load": lambda kernel, index: (nothing, None, None),
        "_stream": lambda index: 0,
        "_current_device": lambda: -1,  # the index of CPU tensors
    }
    before = {name: getattr(launch, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(launch, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(launch, name, function)


def all_providers(device: torch.device) -> list[Provider]:
    """Every provider of the device, attnkern's available backends first."""
    kind = devices.of(device).kind
    found: list[Provider] = []
    for info in attnkern.backends():
        if info.available and (kind in info.device_types or "any" in info.device_types):
            about = f"attnkern.scaled_dot_product_attention(backend={info.name!r})"
            whole = info.name == "reference"  # builds the whole matrix, in Python
            bind = partial(_attnkern, info.name)
            found.append(Provider(info.name, about, (kind,), bind, default=not whole, quadratic=whole))
            if not whole:
                about = "the same with a dense bool mask where the case's is ranges"
                bind = partial(_attnkern_with_ranges, info.name, dense=True)
                found.append(Provider(f"{info.name}-bool", about, (kind,), bind, default=False))
                bind, about = (
                    partial(_attnkern, info.name),
                    "the same without the case's mask (of a window with its first keys, with the window) or its sinks",
                )
                plain: dict[str, Any] = {"default": False, "checked": False, "instead": _without_mask}
                found.append(Provider(f"{info.name}-plain", about, (kind,), bind, **plain))
                for size in (16, 64):
                    about = f"attnkern.attention with keys and values in pages of {size}, in any order"
                    bind = partial(_attnkern_in_pages, info.name, size)
                    found.append(Provider(f"{info.name}-pages-{size}", about, (kind,), bind, default=False))
            if info.name == "cpu":
                about = "torch.ops.attnkern.forward and .backward, bare"
                found.append(_AttnkernOperator("cpu-op", about, (kind,), _attnkern_op, default=False))
    if importlib.util.find_spec("triton") is not None:
        more: dict[str, Any] = {"context": _without_driver, "default": False, "checked": False}
        about = "the Triton backend's operator, the driver stubbed"
        found.append(_TritonOperator("triton-host", about, ("cpu",), _triton_operator, **more))
        about = "a launch of the Triton backend alone, the driver stubbed"
        found.append(_TritonOperator("triton-launch", about, ("cpu",), _triton_launch, **more))
    found += rivals.all_rivals()
    return [p for p in found if kind in p.device_types]


def choose(names: str | None, device: torch.device) -> list[Provider]:
    """The named providers (comma-separated; ``all``; None: the default ones). Raises ValueError naming a wrong one."""
    offered = all_providers(device)
    if names is None:
        return [p for p in offered if p.default]
    if names == "all":
        return offered
    by_name = {p.name: p for p in offered}
    chosen = []
    for name in filter(None, (n.strip() for n in names.split(","))):
        if name not in by_name:
            raise ValueError(f"{name!r} is no provider on {devices.of(device).kind}: {', '.join(by_name)}")
        chosen.append(by_name[name])
    if not chosen:
        raise ValueError("no provider is named")
    return chosen
