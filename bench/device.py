"""What a benchmark asks of a device: its name, a timer, random inputs, free memory.

``of`` gives the one behind a torch.device, a CPU or a GPU; within ``standing_in`` it gives another in its place, as a
rehearsal of the GPU campaign needs (bench/gpu/device.py).
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnkern.testing import Inputs
from bench.cases import BLOCKS, BY_DISTANCE, Case

Block = Callable[[Callable[[], object], int], float]  # (call, how often): seconds for each


@functools.cache
def cpu_info() -> dict[str, Any]:
    """What py-cpuinfo2 (the extra `bench`) knows; empty where it isn't installed."""
    try:
        import cpuinfo
    except ImportError:
        return {}
    return cpuinfo.get_cpu_info()


class Device:
    """A CPU. Subclasses are other devices."""

    kind = "cpu"
    rehearsed = False
    watched = True  # whether rounds that other processes disturbed are dropped
    clock = "wall"
    matmuls: Sequence[int] = (256, 1024, 2048)  # sizes of which the best counts as the peak
    stream = 1 << 26  # floats that are read to measure the memory

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    def name(self) -> str:
        info = cpu_info()
        name = info.get("brand_raw") or info.get("arch") or platform.machine()
        family = "-".join(str(info[k]) for k in ("family", "model") if k in info)
        return f"{name} (family {family})" if family else str(name)

    def block(self, cpu_time: bool = False) -> Block:
        """A timer: it runs a call so often and gives the seconds of one."""
        clock = time.process_time if cpu_time else time.perf_counter

        def run(call: Callable[[], object], calls: int) -> float:
            repeats = range(calls)
            start = clock()
            for _ in repeats:
                call()
            return (clock() - start) / calls

        return run

    def synchronize(self) -> None:
        """Returns when all launches have ended; raises what they did wrong."""

    def inputs(self, case: Case, seed: int = 0) -> Inputs:
        """A case's tensors."""
        return case.inputs(self.torch, seed)

    def free_memory(self) -> int | None:
        """Bytes that an allocation may take; None where nobody knows."""
        try:
            text = Path("/proc/meminfo").read_text()
        except OSError:
            return None
        found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.M)
        return int(found[1]) * 1024 if found else None


class Cuda(Device):
    """A GPU, as torch and nvidia-smi see it."""

    kind = "cuda"
    watched = False
    clock = "gpu"
    matmuls: Sequence[int] = (4096, 8192)
    stream = 1 << 28

    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def capability(self) -> int:
        """Compute capability times 10."""
        major, minor = torch.cuda.get_device_capability(self.torch)
        return 10 * major + minor

    def block(self, cpu_time: bool = False) -> Block:
        """Events around every call, with the L2 cache overwritten before it, as triton.testing.do_bench does."""
        size = 2 * torch.cuda.get_device_properties(self.torch).L2_cache_size
        scratch = torch.empty(max(size, 1 << 20), dtype=torch.int8, device=self.torch)

        def run(call: Callable[[], object], calls: int) -> float:
            starts = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
            for start, end in zip(starts, ends, strict=True):
                scratch.zero_()
                start.record()
                call()
                end.record()
            torch.cuda.synchronize(self.torch)
            return statistics.median(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True)) * 1e-3

        return run

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def inputs(self, case: Case, seed: int = 0) -> Inputs:
        """A case's tensors, drawn on the device: from a CPU's float64, 16k tokens would take seconds."""
        generator = torch.Generator(self.torch).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=case.torch_dtype, device=self.torch, generator=generator)

        def rows(heads: int, length: int, size: int) -> Tensor:
            if case.layout == "blhd":
                return draw(case.batch, length, heads, size).transpose(1, 2)
            return draw(case.batch, heads, length, size)

        query = rows(case.heads_q, case.seqlen_q, case.head_dim)
        key = rows(case.heads_k, case.seqlen_k, case.head_dim)
        value = rows(case.heads_k, case.seqlen_k, case.head_dim_v)
        mask = table = None
        if case.mask in BY_DISTANCE:
            table = draw(case.heads_q, case.distances) if case.learned else case.alibi_table(self.torch)
        elif case.mask in BLOCKS:
            mask = case.block_mask().to(self.torch)
        elif case.mask != "none" and not case.ranged_kind:
            mask = draw(1, case.heads_q if case.mask == "bias" else 1, case.seqlen_q, case.seqlen_k)
            if case.mask == "bool":
                mask = mask > -0.43  # a third is hidden
                mask[..., 0] = True
        recipe = f"{case.name}, drawn on {self.torch} with seed {seed}"
        return Inputs(query, key, value, mask, recipe, relative_bias=table)

    def free_memory(self) -> int | None:
        return torch.cuda.mem_get_info(self.torch)[0]

    def chip(self) -> dict[str, Any]:
        """The facts about the chip that belong to every result."""
        found: Any = torch.cuda.get_device_properties(self.torch)
        return {
            "chip": self.name(),
            "capability": self.capability(),
            "multiprocessors": found.multi_processor_count,
            "memory": found.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }


stand_in: Device | None = None  # within `standing_in`


def of(device: torch.device) -> Device:
    """The device behind torch's."""
    if stand_in is not None:
        return stand_in
    return (Cuda if device.type == "cuda" else Device)(device)


@contextlib.contextmanager
def standing_in(device: Device) -> Iterator[None]:
    """Within it ``of`` gives this device, whatever it is asked for."""
    global stand_in
    stand_in = device
    try:
        yield
    finally:
        stand_in = None
