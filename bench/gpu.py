"""``python -m bench.gpu`` (`make gpu`): everything that wants a GPU, in stages, within nine minutes.

Each stage is a process with a limit of its own, and no stage outlasts what is left of the whole. Its lines come as they
are printed, so whatever ends the run early, what had been found is there. A stage that may stop early (measurements
keep what they have) isn't failed by its limit; tests are. --dry-run goes up to the device on any machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TOTAL = 530  # seconds; with the start of processes under nine minutes
GRACE = 5  # between asking a stage to end and ending it


class Stage(NamedTuple):
    """`command` on a GPU, `dry` without one. `tool` must be found, or the stage is left out, and that is said."""

    name: str
    seconds: int
    command: Sequence[str]
    dry: Sequence[str]
    may_stop: bool = False
    tool: str | None = None
    needed: bool = False  # nothing after it makes sense if it fails


def stages(python: str, sanitizer: str, make: Sequence[str]) -> list[Stage]:
    """In order: what must be known first, first."""
    test = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    collect = [*test, "--collect-only", "-qq"]
    kernels = [python, "-m", "gpu_kernels"]
    watch = [sanitizer, "--kernel-regex", "kns=attnkern", "--error-exitcode", "9", "--print-limit", "20"]
    sweep = [python, "-m", "bench", "run", "--device", "cuda"]
    own = ["tests/test_gpu.py", "tests/ptxsim/test_hardware_gpu.py"]
    return [
        Stage("build", 200, make, make, needed=True),
        Stage("tests of the kernels", 110, [*test, "--maxfail=30", *own], [*collect, *own]),
        Stage("1,000 runs, bit for bit", 60, [*kernels, "--repeat", "1000"], [*kernels, "--list"]),
        *(
            Stage(tool, 60, [*watch, "--tool", tool, *kernels], [*kernels, "--list"], tool=sanitizer)
            for tool in ("memcheck", "racecheck")
        ),
        Stage(
            "sweep against F.sdpa's backends",
            120,
            [*sweep, "--cases", "gpu-sweep", "--budget", "0.4", "--rounds", "5", "--no-plot", "--fresh"],
            [*sweep, "--cases", "gpu-sweep", "--dry-run"],
            may_stop=True,
        ),
        Stage(
            "choice of backends",
            60,
            [python, "-m", "bench.choose"],
            [python, "-m", "bench.choose", "--dry-run"],
            may_stop=True,
        ),
        Stage(
            "orders of Hopper's forward",
            60,
            [python, "-m", "bench.orders"],
            [python, "-m", "bench.orders", "--dry-run"],
            may_stop=True,
        ),
        Stage(
            "features",
            60,
            [*sweep, "--cases", "gpu-features", "--budget", "0.4", "--rounds", "5", "--no-plot", "--fresh"],
            [*sweep, "--cases", "gpu-features", "--dry-run"],
            may_stop=True,
        ),
        Stage(
            "behaviour on CUDA tensors",
            120,
            [*test, "--maxfail=30", "-k", "cuda and not (test_cuda or test_gpu or test_gate or ptxsim)"],
            collect,
            may_stop=True,
        ),
        Stage(
            "Triton kernels",
            120,
            [*test, "--maxfail=30", "tests/test_triton_gpu.py"],
            [*collect, "tests/test_triton_gpu.py"],
            may_stop=True,
        ),
        Stage(
            "tuning of tiles",
            120,
            [python, "-m", "bench.tune"],
            [python, "-m", "bench.tune", "--dry-run", "90"],
            may_stop=True,
        ),
    ]


def run(plan: Sequence[Stage], total: float, dry: bool, environment: dict[str, str]) -> int:
    """Runs the stages; 1 if one failed, or a test was stopped by its limit."""
    start, results = time.perf_counter(), []
    for stage in plan:
        left = total - (time.perf_counter() - start)
        limit = min(stage.seconds, left)
        print(f"== {stage.name} (at most {max(limit, 0):.0f} s)", flush=True)
        if stage.tool is not None and shutil.which(stage.tool) is None:
            result = f"left out: {stage.tool} is not on this machine"
            if dry:
                _call(stage.dry, None, environment)
        elif dry:
            status = _call(stage.dry, None, environment)
            result = "ready" if status == 0 else f"failed ({status})"
        elif limit < 1:
            result = "left out: no time is left" if stage.may_stop else "failed: no time is left"
        else:
            status = _call(stage.command, limit, environment)
            if status is None:
                result = "stopped at its limit" if stage.may_stop else "failed: stopped at its limit"
            else:
                result = "passed" if status == 0 else f"failed ({status})"
        results.append((stage.name, result))
        print(f"== {stage.name}: {result}, {time.perf_counter() - start:.0f} s in all", flush=True)
        if stage.needed and result.startswith("failed"):
            break
    print("\n".join(f"   {name}: {result}" for name, result in results), flush=True)
    return 1 if any(result.startswith("failed") for _, result in results) else 0


def _call(command: Sequence[str], limit: float | None, environment: dict[str, str]) -> int | None:
    """The exit status, or None for a process that was ended at its limit, with all that it started."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: a benchmark writes what it has
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def arch_of(capability: tuple[int, int]) -> str:
    """What setup.py should compile for a device: a build for one architecture takes a quarter of the time."""
    known = {(9, 0): "90a", (10, 0): "100a", (12, 0): "120"}
    return known.get(capability, "80")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="every stage up to the device")
    dry = parser.parse_args(arguments).dry_run
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if not dry:
        import torch

        if not torch.cuda.is_available():
            print(f"make gpu: torch {torch.__version__} of {sys.executable} sees no CUDA device: nothing was run")
            return 1
        environment.setdefault("ATTNKERN_CUDA_ARCHS", arch_of(torch.cuda.get_device_capability()))
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    home = os.environ.get("CUDA_HOME")
    sanitizer = shutil.which("compute-sanitizer", path=f"{home}/bin") if home else None
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    return run(stages(sys.executable, sanitizer or "compute-sanitizer", build), TOTAL, dry, environment)


if __name__ == "__main__":
    sys.exit(main())
