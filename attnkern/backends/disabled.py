"""ATTNKERN_DISABLE: kernels to leave out, by names separated by commas, as "triton-decode,cuda-sm90". Read once, here.

A family that is left out refuses every call with that reason (`attnkern.explain`), and the next one runs it. Meant for
kernels that are wrong, or fault, on some machine: `python -m attnkern check` says which.
"""

from __future__ import annotations

import os
from collections.abc import Collection

FAMILIES = {
    "cpu": "the C++ kernels",
    "triton": "the Triton kernels",
    "triton-decode": "the Triton kernels for few queries",
    "triton-second-order": "the Triton kernels of forward mode and of second derivatives",
    "cuda": "the CUDA C++ kernels",
    "cuda-decode": "the CUDA C++ kernels for few queries",
    "cuda-sm90": "Hopper's forward kernels",
    "cuda-sm90-backward": "Hopper's backward kernels",
    "cuda-sm90-fused": "Hopper's backward kernel that makes all gradients, in any order",
}
"""What can be left out. A name that begins with another one's and a hyphen is a part of it."""

VARIABLE = "ATTNKERN_DISABLE"
REASON = f"{VARIABLE} leaves it out"


def parse(text: str) -> frozenset[str]:
    """The families that the variable's value names. Raises ValueError, with the choices, for a name that isn't one."""
    names = frozenset(filter(None, (name.strip() for name in text.split(","))))
    if unknown := sorted(names - FAMILIES.keys()):
        raise ValueError(
            f"attnkern: {VARIABLE} must hold names of {', '.join(FAMILIES)}, separated by commas, "
            f"got {', '.join(map(repr, unknown))}"
        )
    return names


left_out: Collection[str] = parse(os.environ.get(VARIABLE, ""))


def reason(family: str) -> str | None:
    """Why a family is refused, if it is left out."""
    return REASON if family in left_out else None


def parts(backend: str) -> list[str]:
    """The families of a backend, less itself, that are left out."""
    return [name for name in FAMILIES if name.startswith(f"{backend}-") and name in left_out]
