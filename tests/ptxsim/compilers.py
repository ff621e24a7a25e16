"""From CUDA C++ to PTX: by nvcc as it is, or by whatever a program passes in, which may keep what it has compiled."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import LaunchError

KIB = 1024
# By compute capability: the most shared memory of one block, the KiB that the driver keeps left out (CUDA C++
# Programming Guide, "Compute Capabilities", table of technical specifications).
SHARED_LIMIT = {80: 163 * KIB, 86: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}

Compiler = Callable[[Path, str, Sequence[str]], str]
"""(source, architecture as in "90a", flags) -> PTX. Raises `LaunchError` with what is wrong with the source."""


def check_target(target: int) -> None:
    if target not in SHARED_LIMIT:
        raise LaunchError(f"target: expected one of {sorted(SHARED_LIMIT)}, got {target!r}")


def nvcc(source: Path, arch: str, flags: Sequence[str] = ()) -> str:
    """The default: the nvcc of CUDA_HOME or PATH."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if found is None:
        raise LaunchError("nvcc was not found: install the CUDA toolkit, or set CUDA_HOME to it")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "ptx")
        command = [found, "-O3", "-std=c++20", *flags, f"-arch=compute_{arch}", "-ptx", str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise LaunchError(f"{source} doesn't compile for compute_{arch}:\n{done.stderr or done.stdout}")
        return out.read_text()


_compiler: Compiler = nvcc


def use_compiler(compiler: Compiler) -> None:
    """Makes `compiler` the one of `ptxsim.cuda` in this process."""
    global _compiler
    _compiler = compiler
    ptx_of.cache_clear()


@functools.lru_cache(maxsize=64)
def ptx_of(source: Path, target: int, flags: tuple[str, ...]) -> str:
    """The PTX of a file, with the lines of its source."""
    arch = str(target) + ("a" if target in (90, 100, 103, 120) else "")
    return _compiler(source, arch, ("-lineinfo", *flags))
