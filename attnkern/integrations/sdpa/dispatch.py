"""Registers kernels for aten ops on torch's dispatcher, in front of those that are there, and removes them again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.backends.mha

from ... import flops, ops
from .aten_ops import FULL, PROVIDER, AtenOps, Refused, Result
from .counter import count

# Another thread may have read a kernel from the dispatcher and wait for the GIL to enter it while we remove it.
_recently_installed: deque[Any] = deque(maxlen=1000)


def _install(aten_ops: AtenOps, undo: contextlib.ExitStack) -> None:
    """Puts kernels on the dispatcher, in front of those that are there."""
    # All kernels before any is registered: one for a device changes what torch computes for its autograd key.
    kernels = [(name, key, _kernel(name, key, function)) for name, (keys, function) in aten_ops.items() for key in keys]
    libraries: dict[str, torch.library.Library] = {}
    undo.callback(_forget_kernels, kernels)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
        # Autograd keys come first and go last: between the two, other threads would find no gradients.
        for name, key, kernel in sorted(kernels, key=lambda x: not x[1].startswith("Autograd")):
            if key not in libraries:
                libraries[key] = torch.library.Library("aten", "IMPL")
                undo.callback(libraries[key]._destroy)
            libraries[key].impl(name, kernel, key, with_keyset=True)
            _recently_installed.append(torch.library.get_kernel(f"aten::{name}", key))
    _forget_kernels(kernels)


def _forget_kernels(kernels: list[tuple[str, str, Callable[..., Any]]]) -> None:
    """Torch's tracers remember which kernel an operator has for a key."""
    for name, key, _ in kernels:
        getattr(torch.ops.aten, name).default._uncache_dispatch(getattr(torch._C.DispatchKey, key))


def _kernel(name: str, key: str, function: Callable[..., Result]) -> Callable[..., Any]:
    operator = f"aten::{name}"
    try:
        previous = torch.library.get_kernel(operator, key)
    except RuntimeError:  # no kernel for this device
        previous = None

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        ours = functools.partial(function, *args, **kwargs)
        other = None if previous is None else functools.partial(previous.call_boxed, keyset, *args, **kwargs)
        return _call(operator, key, ours, other)

    return kernel


def _call(operator: str, key: str, ours: Callable[[], Result], previous: Callable[[], Any] | None) -> Any:
    """What our kernel gives, or where it refuses the one that was there before; counted."""
    try:
        backend, result = ours()
    except Refused as refused:
        reason = str(refused)
    else:
        count(operator, f"attnkern {backend}")
        return result
    if previous is None:
        raise RuntimeError(f"attnkern: torch has no {operator} for {key}, and attnkern refuses: {reason}")
    count(operator, "torch", reason)
    return previous()


class Switch:
    """What is switched on; `remove` switches it off. The provider's is the handle that torch's registry keeps."""

    def __init__(self, *parts: Callable[[contextlib.ExitStack], None]) -> None:
        with contextlib.ExitStack() as undo:
            for part in parts:
                part(undo)
            self._undo = undo.pop_all()

    def remove(self) -> None:
        self._undo.close()


def provider() -> Switch:
    return Switch(lambda undo: _install(PROVIDER, undo), _turn_off_fast_path, _count_flops)


def full_switch() -> Switch:
    return Switch(lambda undo: _install(FULL, undo), _take_jagged, _separate_cache)


def _take_jagged(undo: contextlib.ExitStack) -> None:
    """A jagged tensor's __torch_function__ calls this one for F.sdpa, and the dispatcher never hears of it."""
    from torch.nested._internal import ops as of_nested

    name, operator = "jagged_scaled_dot_product_attention", "aten::scaled_dot_product_attention"
    torchs = getattr(of_nested, name)
    _, whole = FULL["scaled_dot_product_attention"]

    def attend(*args: Any, **kwargs: Any) -> Any:
        ours, other = (functools.partial(f, *args, **kwargs) for f in (whole, torchs))
        return _call(operator, "NestedTensor", ours, other)

    setattr(of_nested, name, attend)
    undo.callback(setattr, of_nested, name, torchs)


def _turn_off_fast_path(undo: contextlib.ExitStack) -> None:
    """Inference of nn.MultiheadAttention and nn.TransformerEncoder has kernels of its own that bypass F.sdpa."""
    if torch.backends.mha.get_fastpath_enabled():
        torch.backends.mha.set_fastpath_enabled(False)
        undo.callback(torch.backends.mha.set_fastpath_enabled, True)


def _separate_cache(undo: contextlib.ExitStack) -> None:
    """Torch's cache of compiled graphs knows them by the call of F.sdpa, not by what that was traced to.

    A graph holds our operators: the cache outlives the process, and perhaps the version that it was made with.
    """
    schemas = f"{ops.forward._schema} {ops.backward._schema}"
    config, tag = torch.compiler.config, f"+attnkern_full_{hashlib.sha256(schemas.encode()).hexdigest()[:16]}"
    config.cache_key_tag += tag
    undo.callback(lambda: setattr(config, "cache_key_tag", config.cache_key_tag.replace(tag, "")))


def _count_flops(undo: contextlib.ExitStack) -> None:
    """Gives the CPU's aten ops torch's own FLOP formulas, which it has for all others."""
    given = contextlib.ExitStack()

    def give(flop_counter: Any) -> None:
        aten = torch.ops.aten
        formulas: dict[Any, Any] = {
            aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.sdpa_flop,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.sdpa_backward_flop,
        }
        for target, formula in formulas.items():
            if target not in flop_counter.flop_registry:
                flop_counter.register_flop_formula(target, get_raw=True)(formula)  # it takes tensors, as torch's has
                given.callback(flop_counter.flop_registry.pop, target, None)

    undo.push(given)
    undo.callback(flops.with_flop_counter(give))
