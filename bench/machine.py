"""What ran the benchmark: provenance, and the peaks of this machine, measured."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import cpuinfo
import torch

import attnkern
from attnkern.cases import DTYPES

ROOT = Path(__file__).resolve().parent.parent
# What bears on the speed of a kernel here.
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = cpuinfo.get_cpu_info()
    name = info.get("brand_raw") or info.get("arch") or platform.machine()
    family = "-".join(str(info[k]) for k in ("family", "model") if k in info)
    return f"{name} (family {family})" if family else str(name)


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def code_fingerprint() -> str:
    """A hash of the code that is measured (Python, kernels, compiled libraries): rows of other code are measured anew."""
    package = Path(attnkern.__file__).parent
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in (package, package.parent / "triton_kernels"):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".so", ".json")):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def provenance(device: torch.device) -> dict[str, Any]:
    """A flat record of device, versions, code, threads and command."""
    flags = set(cpuinfo.get_cpu_info().get("flags", []))
    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m bench " + shlex.join(sys.argv[1:]),
        "device": device_name(device),
        "cpu_count": os.cpu_count(),
        "cpu_flags": [f for f in CPU_FLAGS if f in flags],
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "git": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "code": code_fingerprint(),
        "isa_forced": os.environ.get("ATTNKERN_CPU_ISA"),
        **attnkern.build_info(),
    }
    if device.type == "cuda":
        record |= {"cuda": torch.version.cuda, "capability": list(torch.cuda.get_device_capability(device))}
    return record


@functools.cache
def peaks(device: torch.device, threads: int) -> dict[str, Any]:
    """Measured peaks: FLOP/s by dtype, bytes/s of reading and copying, and ``label``, how the FLOP/s were got.

    The best of several large torch matmuls is a lower bound of what the machine can do. Where attnkern's library has
    a register-only peak loop, that is the peak.
    """
    found: dict[str, Any] = {"label": "best matmul"}
    for name, dtype in DTYPES.items():
        if name == "fp16" and device.type == "cpu":
            continue  # computed in float32: no other peak applies, and torch's own is a hundred times below it
        found[name] = _best_matmul(dtype, device)
    if device.type == "cpu":
        op = getattr(torch.ops.attnkern, "cpu_peak", None)
        for name in ("fp32", "bf16"):
            measured = 1e9 * op(name) if op is not None else 0.0
            if measured > found[name]:
                found |= {name: measured, "label": "register-only loop"}
        found["fp16"] = found["fp32"]
        found["bf16"] = max(found["bf16"], found["fp32"])
    found |= _bandwidth(device)
    return found


def _best_matmul(dtype: torch.dtype, device: torch.device) -> float:
    best = 0.0
    for n in (1024, 2048) if device.type == "cpu" else (4096, 8192):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        calls: list[Callable[[], object]] = [lambda a=a, b=b: a @ b]
        linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
        if device.type == "cpu" and dtype == torch.float32 and linear is not None:
            # oneDNN uses AVX-512 where MKL keeps to AVX2.
            calls.append(lambda a=a, b=b: linear(a, b, None, "none", [], ""))
        for call in calls:
            try:
                best = max(best, 2 * n**3 / _fastest(call, device))
            except RuntimeError:  # a dtype that this device's matmul lacks
                continue
    return best


def _bandwidth(device: torch.device) -> dict[str, float]:
    n = (1 << 26) if device.type == "cpu" else (1 << 28)  # floats: far beyond any cache
    x, y = torch.ones(n, device=device), torch.empty(n, device=device)
    read = max(x.nbytes / _fastest(x.sum, device), 2 * x.nbytes / _fastest(lambda: torch.dot(x, y), device))
    return {"read": read, "copy": 2 * x.nbytes / _fastest(lambda: y.copy_(x), device)}


def _fastest(call: Callable[[], object], device: torch.device, repeats: int = 4) -> float:
    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(repeats))
