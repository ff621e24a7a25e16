"""What a benchmark asks of a device: its name, sizes that suit it, a timer, random inputs, a graph, clocks.

``of`` gives the one behind a torch.device: a CPU, a GPU, or, within ``rehearsal``, a Hopper that isn't there: its
tensors are a CPU's, its launches go to the simulator (tests/ptxsim), and its timer counts them. Everything else in
bench/ is the same code for all three.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnkern.cases import BLOCKS, Case
from attnkern.testing import Inputs

T = TypeVar("T")
Block = Callable[[Callable[[], object], int], float]  # (call, how often): seconds for each
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,driver_version"


@functools.cache
def cpu_info() -> dict[str, Any]:
    """What py-cpuinfo2 (the extra `bench`) knows; empty where it isn't installed."""
    try:
        import cpuinfo
    except ImportError:
        return {}
    return cpuinfo.get_cpu_info()


class Device:
    """A CPU. Its subclasses say what is otherwise elsewhere."""

    kind = "cpu"
    rehearsed = False
    watched = True  # whether rounds that other processes disturbed are dropped
    clock = "wall"
    matmuls: Sequence[int] = (1024, 2048)  # sizes of which the best counts as the peak
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
        mask = None
        if case.mask in BLOCKS:
            mask = case.block_mask().to(self.torch)
        elif case.mask != "none":
            mask = draw(1, case.heads_q if case.mask == "bias" else 1, case.seqlen_q, case.seqlen_k)
            if case.mask == "bool":
                mask = mask > -0.43  # a third is hidden
                mask[..., 0] = True
        return Inputs(query, key, value, mask, f"{case.name}, drawn on {self.torch} with seed {seed}")

    def free_memory(self) -> int | None:
        return torch.cuda.mem_get_info(self.torch)[0]

    # What the stages of `make gpu` need beside.

    def environment(self) -> dict[str, str]:
        """How to build for this chip alone, the fastest way; what is set already stays."""
        # A binary runs on later chips of its generation: that for 10.0 on 10.3, that for 12.0 on 12.1.
        arch = {9: "90a", 10: "100", 12: "120"}.get(self.capability() // 10, "80")
        return {"ATTNKERN_CUDA": "1", "ATTNKERN_CUDA_ARCHS": arch, "ATTNKERN_CPU_ISAS": "generic"}

    def watch(self, tool: str) -> list[str] | None:
        """What a command is started with to be watched by compute-sanitizer; None where that isn't installed."""
        home = os.environ.get("CUDA_HOME")
        found = (shutil.which("compute-sanitizer", path=f"{home}/bin") if home else None) or shutil.which(
            "compute-sanitizer"
        )
        if found is None:
            return None
        return [found, "--tool", tool, "--kernel-regex", "kns=attnkern", "--error-exitcode", "9", "--print-limit", "20"]

    def chip(self) -> dict[str, Any]:
        """What results are worth nothing without."""
        found: Any = torch.cuda.get_device_properties(self.torch)
        return {
            "chip": self.name(),
            "capability": self.capability(),
            "multiprocessors": found.multi_processor_count,
            "memory": found.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }

    def clocks(self) -> dict[str, Any]:
        """Clocks in MHz, temperature, power and the driver now, or why they aren't known."""
        uuid = getattr(torch.cuda.get_device_properties(self.torch), "uuid", None)
        return _asked_of_nvidia_smi([] if uuid is None else ["-i", f"GPU-{uuid}"])

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While several processes compile, one at a time measures."""
        with open(Path(tempfile.gettempdir()) / f"attnkern-bench-{os.getuid()}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def shrunk(self, case: Case) -> Case:
        """The case to be measured in place of a full-sized one: itself."""
        return case

    def few(self, count: int) -> int:
        """Repetitions of one kind."""
        return count

    def while_time(self, items: Iterable[T], seconds: float) -> Iterator[T]:
        """The first item, and more until the time is over."""
        start = time.monotonic()
        for n, item in enumerate(items):
            if n and time.monotonic() - start > seconds:
                return
            yield item

    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """`call` in a CUDA graph: what it returns, and a replay that writes there again."""
        side = torch.cuda.Stream(self.torch)
        side.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(side):
            call()  # loads what can't be loaded while a graph is made
        torch.cuda.current_stream(self.torch).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        return results, graph.replay


class Rehearsed(Cuda):
    """A Hopper of four multiprocessors that isn't there. Its "seconds" are counted launches, and mean nothing."""

    rehearsed = True
    clock = "counted"
    matmuls = (64,)
    stream = 1 << 10

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.launches = 0

    def name(self) -> str:
        return "rehearsal (no GPU)"

    def capability(self) -> int:
        return 90

    def block(self, cpu_time: bool = False) -> Block:
        """One call, however many are asked for: a microsecond for it and for each of its launches."""

        def run(call: Callable[[], object], calls: int) -> float:
            before = self.launches
            call()
            return (1 + self.launches - before) * 1e-6

        return run

    def synchronize(self) -> None: ...

    def free_memory(self) -> int | None:
        return Device.free_memory(self)

    def environment(self) -> dict[str, str]:
        return {}

    def watch(self, tool: str) -> list[str] | None:
        return ["env"]

    def chip(self) -> dict[str, Any]:
        return {"chip": self.name(), "capability": self.capability(), "cudnn": torch.backends.cudnn.version()}

    def clocks(self) -> dict[str, Any]:
        return _asked_of_nvidia_smi([])

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        yield

    def shrunk(self, case: Case) -> Case:
        group = case.heads_q // case.heads_k

        def short(length: int) -> int:
            return length if length <= 8 else 40 + 8 * int(math.log2(length))  # longer stays longer

        lengths = short(case.seqlen_q), short(case.seqlen_k)
        return replace(case, batch=1, heads_q=group, heads_k=1, seqlen_q=lengths[0], seqlen_k=lengths[1])

    def few(self, count: int) -> int:
        return 1

    def while_time(self, items: Iterable[T], seconds: float) -> Iterator[T]:
        for _, item in zip(range(2), items, strict=False):
            yield item

    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        results = call()

        def replay() -> None:
            for old, new in zip(results, call(), strict=True):
                old.detach().copy_(new.detach())

        return results, replay


def _asked_of_nvidia_smi(which: Sequence[str]) -> dict[str, Any]:
    command = ["nvidia-smi", *which, f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"unknown": f"nvidia-smi: {error}"}
    values = [x.strip() for x in done.stdout.splitlines()[0].split(",")]
    return dict(zip(CLOCKS.split(","), values, strict=False))


_rehearsed: Rehearsed | None = None


def of(device: torch.device) -> Device:
    """The device behind torch's; within a rehearsal there is only the rehearsed one."""
    if _rehearsed is not None:
        return _rehearsed
    return (Cuda if device.type == "cuda" else Device)(device)


def rehearsing() -> bool:
    return _rehearsed is not None


def gpu() -> Cuda:
    """The GPU to be measured: the current one, or the rehearsed one."""
    return _rehearsed or Cuda(torch.device("cuda", torch.cuda.current_device()))


@contextlib.contextmanager
def rehearsal() -> Iterator[Rehearsed]:
    """Within it ``gpu`` and ``of`` give a rehearsed device, whose CUDA and Triton kernels run in the simulator."""
    global _rehearsed
    importlib.import_module("bench.gpu.stages")  # which puts tests/ on the path
    import launches
    import routes

    from . import machine

    device = Rehearsed()
    if launches.parts()[1]:  # the build is the campaign's first row, but nothing is simulated without it: minutes, once
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=launches.ROOT, env={**device.environment(), **os.environ}, check=True)
    launches.build()

    def count(*_: object) -> None:
        device.launches += 1
        recorder.launches.clear()  # they and their reports add up to gigabytes
        recorder.reports.clear()

    with routes.cuda(90, count) as recorder, routes.triton(90, count):
        _rehearsed = device
        try:
            yield device
        finally:
            _rehearsed = None
            for measured in (machine.peak, machine.read_bandwidth):  # nothing counted may pass for measured
                measured.cache_clear()
