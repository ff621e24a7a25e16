"""The C++ kernels (csrc/cpu). The operators reach them directly: they register themselves for CPU tensors.

Ordinary calls go past torch's dispatcher (csrc/common/direct.h) where nothing observes operators: `call`, `forward` and
`backward` here. Each returns None for calls that must go by the operators, and for calls that fail, so that errors have
one source. A program that Dynamo traces must not come here.
"""

from __future__ import annotations

from .._library import NOTHING_DIRECT, load_error, past_the_dispatcher, path_of
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


_loaded = unavailable() is None
call, forward, backward = past_the_dispatcher(path_of("_C"), NAME) if _loaded else NOTHING_DIRECT
