"""Kernels that cannot be built on this machine, which only the first call of them shows; and the warning that something
slower runs in their place."""

from __future__ import annotations

import warnings

_warned: set[str] = set()


class FallbackWarning(UserWarning):
    """Another backend than the best runs a call: plain torch where there is no kernel for it, right, but slow, and
    holding all scores in memory; or the next one where a kernel cannot be built on this machine."""


def warn_once(reasons: str, message: str) -> None:
    """A FallbackWarning, once for the same reasons."""
    if reasons not in _warned:
        _warned.add(reasons)
        warnings.warn(message, FallbackWarning, stacklevel=6)


class CannotBuild(RuntimeError):
    """A kernel does not compile here, or needs more than the chip has, so nothing of it ran: another backend may.

    A backend raises it from an operator, and from then on refuses the calls that need the kernel. What CUDA reports of
    a launch is never one: after such an error no call of the process can be trusted.
    """
