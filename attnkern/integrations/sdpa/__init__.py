"""attnkern under `torch.nn.functional.scaled_dot_product_attention` (F.sdpa) itself.

F.sdpa chooses one of a few aten operators (flash, efficient, cuDNN, the CPU's flash) and calls its forward and
backward. The provider "ATTNKERN" registers our kernels for these aten ops on the dispatcher, when torch's own registry
of flash attention implementations asks for it. Everything above an aten op stays torch's: autograd, autocast, tracing,
DTensor. A compiled graph holds calls of aten ops, so it follows every switch.

    F.sdpa --torch chooses--> aten op --_problem--> a backend's kernel
                              |  '-- Refused -> the kernel that was registered before
                              '-- or torch's composed maths, where no aten op takes the call; counted, with the reason

`use_as_sdpa(full=True)` also takes the place of F.sdpa's own operator, above that choice: then dropout, masks with
gradients, inputs that are not 4-D and values of another head size are ours as well, through attnkern's own autograd.

The results of an aten op have exactly the strides of torch's meta functions, because compiled graphs rely on them. A
forward pass of one kernel and a backward pass of another fit together: out and the log-sum-exp mean the same in all.
That is why aten ops refuse dropout, the one thing that a backward pass of another kernel could not repeat.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch.nn.attention

from .counter import SdpaCalls, sdpa_calls
from .dispatch import Switch, full_switch, provider

__all__ = ["NAME", "SdpaCalls", "register", "sdpa_calls", "use_as_sdpa"]

NAME = "ATTNKERN"
"""The provider's name in torch's registry: `torch.nn.attention.activate_flash_attention_impl("ATTNKERN")`."""


def register() -> None:
    """Makes the provider's name known to torch's registry, without activating it. Importing attnkern does it."""
    if _missing_registry() is None:
        torch.nn.attention.register_flash_attention_impl(NAME, register_fn=provider)


def _missing_registry() -> str | None:
    if hasattr(torch.nn.attention, "restore_flash_attention_impl") and hasattr(torch.library, "get_kernel"):
        return None
    return f"torch >= 2.11 (torch.nn.attention's registry of flash attention implementations), got {torch.__version__}"


class _Active:
    """What all open `use_as_sdpa` have in common: the switches are the process's."""

    lock = threading.RLock()
    depth = 0
    depth_full = 0
    previous: str | None = None  # the implementation to restore
    full: Switch | None = None


@contextlib.contextmanager
def use_as_sdpa(full: bool = False) -> Iterator[SdpaCalls]:
    """While this context is open, F.scaled_dot_product_attention runs on attnkern's kernels, in the whole process.

    Args:
        full: False activates the provider "ATTNKERN", as `torch.nn.attention.activate_flash_attention_impl` does: every
            call that torch gives to a fused kernel is ours if a backend takes it, and compiled graphs follow. True
            also replaces the operator of F.sdpa itself, so that dropout, masks with gradients, inputs that are not 4-D
            and values of another head size are ours too; a graph compiled meanwhile keeps attnkern's operators.

    Yields:
        A `SdpaCalls`: how many calls ran on which kernel and why others did not. It stops counting at the end.

    What no backend takes goes to the kernel that was there before. Contexts nest and may overlap in any order between
    threads; when the last one ends, by an exception too, the implementation that was active before the first one is
    active again. Also works as a decorator. Not to be entered inside a compiled function.

    Raises:
        TypeError: full is not a bool. RuntimeError: torch is older than 2.11.
    """
    if not isinstance(full, bool):
        raise TypeError(f"attnkern: argument 'full' must be bool, not {type(full).__name__}")
    if (missing := _missing_registry()) is not None:
        raise RuntimeError(f"attnkern: use_as_sdpa needs {missing}")
    with contextlib.ExitStack() as stack:
        with _Active.lock:
            _enter_provider()
            stack.callback(_leave_provider)
            if full:
                _enter_full()
                stack.callback(_leave_full)
        calls = SdpaCalls()
        stack.callback(calls._stop)
        yield calls


def _enter_provider() -> None:
    if _Active.depth == 0:
        _Active.previous = torch.nn.attention.current_flash_attention_impl()
        if _Active.previous != NAME:
            torch.nn.attention.activate_flash_attention_impl(NAME)
    _Active.depth += 1


def _leave_provider() -> None:
    with _Active.lock:
        _Active.depth -= 1
        if _Active.depth > 0 or torch.nn.attention.current_flash_attention_impl() == _Active.previous:
            return
        if _Active.previous is None:
            torch.nn.attention.restore_flash_attention_impl()
        else:
            torch.nn.attention.activate_flash_attention_impl(_Active.previous)


def _enter_full() -> None:
    if _Active.depth_full == 0:
        _Active.full = full_switch()
    _Active.depth_full += 1


def _leave_full() -> None:
    with _Active.lock:
        _Active.depth_full -= 1
        if _Active.depth_full == 0 and _Active.full is not None:
            _Active.full.remove()
            _Active.full = None
