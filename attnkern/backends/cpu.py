"""The C++ kernels (csrc/cpu). The operators reach them directly: they register themselves for CPU tensors."""

from __future__ import annotations

from .._library import load_error
from ..problem import Problem

NAME = "cpu"


def unavailable() -> str | None:
    """Why this backend cannot run at all here, or None."""
    error = load_error()
    return None if error is None else f"the compiled library is not loaded ({error})"


def refusals(problem: Problem) -> list[str]:
    """Why this backend cannot run `problem`; empty if it can. Whatever Problem admits, the kernels do."""
    reason = unavailable()
    return [] if reason is None else [reason]
