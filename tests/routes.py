"""CPU tensors on a GPU that isn't there: within these, a backend's launches run in the simulator of one GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import launches
import ptxsim
from attnkern import ops

table = importlib.import_module("attnkern.backends")  # as an attribute of the package it is the public function

# What each Triton kernel writes: nobody may read it before that. (dbias is not among them: it may come as zeros.)
RESULTS = {
    "forward_kernel": ("out", "lse"),
    "decode_kernel": ("part_out", "part_lse"),
    "combine_kernel": ("out", "lse"),
    "delta_kernel": ("delta",),
    "dkdv_kernel": ("grads.dk", "grads.dv"),
    "dq_kernel": ("grads.dq",),
    "tangent_kernel": ("tangents.tout", "tangents.tlse", "tangents.nu"),
}


@contextlib.contextmanager
def _routed(backend: Any, replaced: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """`backend` takes CPU tensors, first of all."""
    with contextlib.ExitStack() as stack:
        for (where, name), value in replaced.items():
            stack.enter_context(patch.object(where, name, value))
        stack.enter_context(patch.object(backend, "unavailable", lambda: None))
        stack.enter_context(patch.dict(table.TABLE, {"cpu": (backend, *table.TABLE["cpu"])}))
        stack.enter_context(patch.object(ops, "forward", ops.route_forward))
        stack.enter_context(patch.object(ops, "backward", ops.route_backward))
        yield


@contextlib.contextmanager
def cuda(capability: int = 80, launched: Callable[[Any], object] = lambda launch: None) -> Iterator[Any]:
    """`backend="cuda"` with its shipped host code; gives the recorder of its launches."""
    backend = table.cuda
    recorder = launches.Recorder(capability, launched=launched)
    run = functools.partial(recorder.run, backend._run)

    def chip(index: int):
        shared = launches.SHARED_LIMIT[recorder.target]
        return backend.Chip(recorder.target, recorder.multiprocessors, shared + 1024, shared)

    replaced = {(backend, "capability"): lambda index: recorder.target, (backend, "_run"): run, (backend, "chip"): chip}
    with _routed(backend, replaced):
        yield recorder


def _names(name, tree):
    """Of each argument, or field of one that is a named tuple."""
    if not isinstance(tree, tuple):
        return [name]
    return [
        leaf for field, branch in zip(tree._fields, tree, strict=True) for leaf in _names(f"{name}.{field}", branch)
    ]


def simulate(kernel, grid, args, capability):
    """In place of `launch.run` of the Triton kernels."""
    from attnkern.triton_kernels import launch

    names = [leaf for name, tree in kernel.signature.items() for leaf in _names(name, tree)]
    signature = dict(zip(names, (kind for _, kind in launch.leaves(tuple(kernel.signature.values()))), strict=True))
    given = dict(zip(names, (value for _, value in launch.leaves(args)), strict=True))
    compiled = ptxsim.of_triton(kernel.compile(capability), signature, capability)
    undefined = [given[name] for name in RESULTS.get(kernel.function.__name__, ()) if given[name] is not None]
    ptxsim.run(compiled, (grid,), [given[name] for name in compiled.arguments], undefined=undefined)


@contextlib.contextmanager
def triton(capability: int = 80, launched: Callable[[Any], object] = lambda kernel: None) -> Iterator[None]:
    """`backend="triton"` by kernels compiled for the GPU; `launched` is told of each before it runs."""
    from attnkern.triton_kernels import launch

    def run(kernel, grid, args, index):
        launched(kernel)
        simulate(kernel, grid, args, capability)

    replaced = {
        (launch, "capability"): lambda index: capability,
        (launch, "processors"): lambda index: 4,
        (launch, "run"): run,
    }
    with _routed(table.triton, replaced):
        yield
