"""Kernels that cannot be built on this machine, which only the first call of them shows."""

from __future__ import annotations


class CannotBuild(RuntimeError):
    """A kernel does not compile here, or needs more than the chip has, so nothing of it ran: another backend may.

    A backend raises it from an operator, and from then on refuses the calls that need the kernel. What CUDA reports of
    a launch is never one: after such an error no call of the process can be trusted.
    """
