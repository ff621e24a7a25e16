"""The C++ kernels (csrc/cpu). The operators reach them directly: they register themselves for CPU tensors.

Ordinary calls go past torch's dispatcher (csrc/direct.cpp) where nothing observes operators: `call`, `forward` and
`backward` here. Each returns None for calls that must go by the operators, and for calls that fail, so that errors have
one source. A program that Dynamo traces must not come here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from .._library import load_error, python_functions
from ..arguments import listeners
from ..params import DTYPES
from ..problem import Problem
from . import disabled

NAME = "cpu"


def unavailable() -> str | None:
    """Why this backend cannot run at all here, or None."""
    if (reason := disabled.reason(NAME)) is not None:
        return reason
    error = load_error()
    return None if error is None else f"the compiled library is not loaded ({error})"


def refusals(problem: Problem) -> list[str]:
    """Why this backend cannot run `problem`; empty if it can. Whatever Problem admits, the kernels do."""
    reason = unavailable()
    return [] if reason is None else [reason]


def _by_the_operators(*arguments: Any) -> None:
    return None


def _direct() -> tuple[Callable[..., Any], ...]:
    """call, forward, backward; without effect where torch lacks what they need."""
    try:
        capsule = torch.Tensor.__dlpack_c_exchange_api__
        empty_strided = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
        # Problem and autograd/ have handled those before an operator is called.
        for_the_caller = (torch._C._is_any_autocast_enabled, lambda: forward_ad._current_level >= 0)
    except AttributeError:
        return (_by_the_operators,) * 3
    if listeners is None or unavailable():
        return (_by_the_operators,) * 3
    connect, *functions = python_functions()
    connect(
        capsule,
        torch.Tensor,
        torch.Tensor.is_neg,
        empty_strided,
        DTYPES,
        listeners,
        for_the_caller,
        torch.is_grad_enabled,
    )
    return tuple(functions)


call, forward, backward = _direct()
