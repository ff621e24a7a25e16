"""What ran the benchmark: provenance, and the peaks of this machine, measured."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

import attnkern
from bench.cases import DTYPES

from . import device as devices
from .timing import Sampling, Work, measure

LONGEST = 0.5  # seconds of one product that is tried for the peak
CHANCE = 1.15  # how much faster one of two peaks may look within the same rounds though it isn't
ROOT = Path(__file__).resolve().parent.parent
# What bears on the speed of a kernel here.
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def code_fingerprint() -> str:
    """A hash of what is measured (Python, kernels, compiled libraries): rows of other code are measured anew."""
    package = Path(attnkern.__file__).parent
    digest = hashlib.sha256(torch.__version__.encode())
    for folder, pattern in (
        (package, "*"),
        (package.parent / "triton_kernels", "*"),
        (Path(__file__).parent, "cases.py"),
    ):
        for path in sorted(p for p in folder.rglob(pattern) if p.suffix in (".py", ".so", ".json")):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def provenance(device: torch.device) -> dict[str, Any]:
    """A flat record of device, versions, code, threads and command."""
    flags = set(devices.cpu_info().get("flags", []))
    where = devices.of(device)
    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m bench " + shlex.join(sys.argv[1:]),
        "device": where.name(),
        "cpu_count": os.cpu_count(),
        "cpu_features": [f for f in CPU_FLAGS if f in flags],
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "git": _git("rev-parse", "--short=12", "HEAD"),
        # Rows that are measured anew change nothing that is measured.
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")),
        "code": code_fingerprint(),
        "isa_forced": os.environ.get("ATTNKERN_CPU_ISA"),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        **{k: v for k, v in attnkern.build_info().items() if k not in ("cpu_library", "cuda_library")},  # paths
    }
    if isinstance(where, devices.Cuda):
        record |= {**where.chip(), "rehearsed": where.rehearsed}
    return record


@dataclass(frozen=True)
class Peak:
    """A measured limit of the machine, in operations or bytes per second, and how it was got.

    ``loop``: a call that does nothing but reach it, ``work`` operations each time. Timed beside a kernel it shows what
    the clock allowed just then.
    """

    rate: float
    label: str
    loop: Callable[[], object] | None = None
    work: float = 0.0


@functools.cache
def peak(device: torch.device, dtype: str, threads: int, cpu_time: bool = False) -> Peak:
    """FLOP/s in a dtype, with the threads that torch uses now, by the wall clock or by CPU time.

    It is that of attnkern's register-only loop. A large torch matmul is a lower bound of what the machine can do, and
    takes the loop's place where there is none, or where it uses units that the loop doesn't (AMX).
    """
    if devices.of(device).kind == "cuda":
        return _best_matmul(DTYPES[dtype], device, False)
    if dtype == "fp16":
        return peak(device, "fp32", threads, cpu_time)
    matmul = _best_matmul(DTYPES[dtype], device, cpu_time)
    if not hasattr(torch.ops.attnkern, "cpu_peak_work") or dtype not in ("fp32", "bf16"):
        return matmul
    best = _faster(register_peak(device, dtype, threads, cpu_time), matmul, device, cpu_time)
    if dtype == "bf16":  # without instructions for it, bfloat16 is computed in float32
        best = _faster(best, peak(device, "fp32", threads, cpu_time), device, cpu_time)
    return best


@functools.cache
def register_peak(device: torch.device, dtype: str, threads: int, cpu_time: bool = False) -> Peak:
    """FLOP/s of the multiply-adds, or dot products of pairs, that the CPU kernels in use are made of.

    A loop that touches registers alone. float16 has no arithmetic of its own on most CPUs: float32's counts, and so it
    does for bfloat16 where that has no instructions.
    """
    loop = partial(torch.ops.attnkern.cpu_peak_work, "fp32" if dtype == "fp16" else dtype)
    work = loop()
    return Peak(work / _fastest(loop, device, cpu_time), "register-only loop", loop, work)


def _faster(first: Peak, other: Peak, device: torch.device, cpu_time: bool) -> Peak:
    """The first, or the other where it is faster by more than chance. They race in the same rounds: on a busy machine
    two rates of different moments tell nothing."""
    assert first.loop is not None
    assert other.loop is not None
    race = {"first": Work(first.loop, nullcontext), "other": Work(other.loop, nullcontext)}
    times = measure(race, Sampling(rounds=7, budget=0.5, cpu_time=cpu_time), device)
    return other if other.work / first.work * times["other"].ratio(times["first"]) > CHANCE else first


@functools.lru_cache(maxsize=4)  # which hold their buffers
def read_bandwidth(device: torch.device, threads: int, cpu_time: bool = False, nbytes: int | None = None) -> Peak:
    """Bytes/s of reading: the better of a sum and a dot product.

    ``nbytes``: read in all, as two buffers; by default far more than any cache holds.
    """
    where = devices.of(device)
    n = where.stream if nbytes is None else -(-nbytes // 8)
    x, y = torch.ones(n, device=device), torch.ones(n, device=device)
    ways: list[tuple[str, Callable[[], object], int]] = [
        ("sum", lambda: (x.sum(), y.sum()), 2 * x.nbytes),
        ("dot", partial(torch.dot, x, y), 2 * x.nbytes),
    ]
    on_cpu = where.kind == "cpu"  # whose way to memory may change with the core that a hypervisor chooses
    peaks = [
        Peak(size / _fastest(read, device, cpu_time), name, read if on_cpu else None, size) for name, read, size in ways
    ]
    return max(peaks, key=lambda peak: peak.rate)


def _best_matmul(dtype: torch.dtype, device: torch.device, cpu_time: bool) -> Peak:
    """The fastest of several large ones. Only on a CPU is it timed beside each row as well."""
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    where = devices.of(device)
    on_cpu = where.kind == "cpu"
    peaks: list[Peak] = []
    for n in where.matmuls:
        if peaks and 2 * n**3 > LONGEST * max(peak.rate for peak in peaks):
            break  # bfloat16 without instructions for it: a product of this size takes a minute
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        ways: list[Callable[[], object]] = [partial(torch.mm, a, b)]
        if on_cpu and dtype == torch.float32 and linear is not None:
            # oneDNN uses AVX-512 where MKL keeps to AVX2.
            ways.append(partial(linear, a, b, None, "none", [], ""))
        for way in ways:
            rate = 2 * n**3 / _fastest(way, device, cpu_time)
            peaks.append(Peak(rate, "best matmul", way if on_cpu else None, 2 * n**3))
    return max(peaks, key=lambda peak: peak.rate)


def _fastest(call: Callable[[], object], device: torch.device, cpu_time: bool) -> float:
    """Seconds of the fastest of several calls: a peak is what an undisturbed call reaches."""
    block, start = devices.of(device).block(cpu_time), time.perf_counter()
    block(call, 1)  # sets things up
    best = math.inf
    for attempt in range(50):
        best = min(best, block(call, 1))
        if attempt >= 3 and time.perf_counter() - start > 0.25:
            break
    return best
