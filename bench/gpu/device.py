"""The GPU that the campaign measures, and the simulated Hopper that stands for it in a rehearsal.

A rehearsed device's tensors are a CPU's, its launches go to the simulator (tests/ptxsim), and its timer counts them.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import shutil
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

from bench.cases import Case

from .. import device as devices
from .. import machine
from ..device import Block, Cuda, Device

T = TypeVar("T")
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,driver_version"


class Gpu(Cuda):
    """A GPU, with what the stages need beside a timer."""

    def environment(self) -> dict[str, str]:
        """How to build for this chip alone, the fastest way, with what is to be timed; what is set already stays."""
        # A binary runs on later chips of its generation: that for 10.0 on 10.3, that for 12.0 on 12.1.
        arch = {9: "90a", 10: "100", 12: "120"}.get(self.capability() // 10, "80")
        found = {"ATTNKERN_CUDA": "1", "ATTNKERN_CUDA_ARCHS": arch, "ATTNKERN_CPU_ISAS": "generic"}
        return {**found, "ATTNKERN_SCHEDULES": "all"} if arch == "90a" else found

    def watch(self, tool: str) -> list[str] | None:
        """What a command is started with to be watched by compute-sanitizer; None where that isn't installed."""
        home = os.environ.get("CUDA_HOME")
        found = (shutil.which("compute-sanitizer", path=f"{home}/bin") if home else None) or shutil.which(
            "compute-sanitizer"
        )
        if found is None:
            return None
        which = ["--kernel-regex", "kns=attnkern"]
        if tool == "racecheck":
            # Where a lane arrives at an mbarrier for its warp, after __syncwarp, it doesn't count what the other lanes
            # did before: in Hopper's kernels it reports that alone.
            which += ["--kernel-regex-exclude", "kns=sm90"]
        return [found, "--tool", tool, *which, "--error-exitcode", "9", "--print-limit", "20"]

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


class Rehearsed(Gpu):
    """A simulated Hopper of four multiprocessors. Its "seconds" are counted launches, and mean nothing."""

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
        mask = re.sub(r"\d{3,}", "32", case.mask)  # of a document or a window
        return replace(case, batch=1, heads_q=group, heads_k=1, seqlen_q=lengths[0], seqlen_k=lengths[1], mask=mask)

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


def gpu() -> Gpu | None:
    """The GPU to be measured, or within a rehearsal the one that stands for it; None where there is none."""
    if isinstance(devices.stand_in, Rehearsed):
        return devices.stand_in
    return Gpu(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None


@contextlib.contextmanager
def rehearsal() -> Iterator[Rehearsed]:
    """Within it all is measured on a rehearsed device, whose CUDA and Triton kernels run in the simulator."""
    import launches
    import routes

    device = Rehearsed()
    if launches.parts()[1]:  # the build is the campaign's first row, but nothing is simulated without it: minutes, once
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=launches.ROOT, env={**device.environment(), **os.environ}, check=True)
    launches.build()

    def count(*_: object) -> None:
        device.launches += 1
        recorder.launches.clear()  # they and their reports add up to gigabytes
        recorder.reports.clear()

    with routes.cuda(90, count) as recorder, routes.triton(90, count), devices.standing_in(device):
        try:
            yield device
        finally:
            for measured in (
                machine.peak,
                machine.read_bandwidth,
            ):  # of counted launches
                measured.cache_clear()
