"""Peak memory that one call adds to what is already allocated, and pages that it touches."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


def peak_growth(call: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """Runs ``call``; gives its result and the most bytes it held at once, results included. None where unknown.

    On a CPU this is the kernel's own peak counter of resident memory, after free memory went back to the system: what
    the C++ heap hides from torch's allocator statistics (a kernel's scratch) is in it.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # peak := current
    except (AttributeError, OSError):
        return call(), None
    before = _status("VmRSS")
    result = call()
    return result, _status("VmHWM") - before


def page_faults() -> int:
    """How many pages this process has touched for the first time: each cost a trip to the system's kernel."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def size_of(returned: object) -> int:
    """Bytes of the tensors that a call returned."""
    tensors = returned if isinstance(returned, tuple) else (returned,)
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
