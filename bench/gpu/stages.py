"""What `make gpu` does, in order: stages of rows, each a line of the results. Rows run in processes of their own
(workers.py), so that a row that faults or hangs costs itself.

What a row needs is imported when it runs: the build comes first, and nothing of attnkern is imported before it.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .device import Gpu

ROOT = Path(__file__).resolve().parents[2]
Found = Iterator[dict[str, Any]]


def device(rehearsed: bool = False) -> Gpu | None:
    """The GPU, or what stands for it in a rehearsal; None where there is none."""
    from . import device as devices

    return devices.Rehearsed() if rehearsed else devices.gpu()


def about(device: Gpu) -> dict[str, Any]:
    """Versions, chip and code."""
    import triton

    from .. import machine

    return {**machine.provenance(device.torch), "triton": triton.__version__}


class Stage(NamedTuple):
    """`rows(device)` names the rows, in order of importance; `measure(device, row)` gives what to write down of one."""

    name: str
    about: str
    seconds: int  # of the whole stage
    each: int  # of a row, once its process is ready
    rows: Callable[[Gpu], Sequence[str]]
    measure: Callable[[Gpu, str], Found]
    jobs: int = 1  # processes at a time
    alone: bool = False  # a process for each row, which must also end well
    tool: str | None = None  # of compute-sanitizer, to watch the processes
    needed: bool = False  # nothing after it makes sense if it fails
    rehearsed: str = "*"  # globs, separated by |: the rows of a short rehearsal

    def sample(self, rows: Sequence[str]) -> list[str]:
        return [row for row in rows if any(fnmatch.fnmatchcase(row, glob) for glob in self.rehearsed.split("|"))]


# --- the build --------------------------------------------------------------------------------------------------------


def _build(device: Gpu, row: str) -> Found:
    environment = {**device.environment(), **os.environ}
    done = _command([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], environment)
    chosen = {name: environment[name] for name in environment if name.startswith(("ATTNKERN_C", "ATTNKERN_SCHEDULES"))}
    yield {"status": "ok" if done.returncode == 0 else "error", "message": _last_line(done.stdout), "with": chosen}


def _command(command: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Its output also goes to this process's log. It shares the process group: whoever ends that, ends it."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    print(done.stdout, file=sys.stderr, flush=True)
    return done


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# --- speed ------------------------------------------------------------------------------------------------------------

TABLE_DIMS, TABLE_LENGTHS = (128, 64, 256), (16384, 4096)
TABLE_RIVALS = ("cuda", "sdpa-cudnn", "sdpa-flash", "sdpa")


def _table_rows(device: Gpu) -> list[str]:
    cells = [
        (f"gpu-bf16-d{dim}-{kind}-{length}", pass_name)
        for length in TABLE_LENGTHS
        for dim in TABLE_DIMS
        for kind in ("causal", "full")
        for pass_name in ("forward", "backward")
    ]
    return [f"{name} {pass_name} {rival}" for name, pass_name in cells for rival in TABLE_RIVALS]


def _speed_rows(pattern: str, rivals: Sequence[str]) -> Callable[[Gpu], list[str]]:
    """A row for each case, pass and rival; a rival that refuses a case says so in its row."""

    def rows(device: Gpu) -> list[str]:
        from bench.cases import select

        passes = [(c, p) for c in select(pattern) for p in ("forward", "backward")[: 1 if c.forward_only else 2]]
        return [f"{case.name} {pass_name} {rival}" for case, pass_name in passes for rival in rivals]

    return rows


def _decode_rows(device: Gpu) -> list[str]:
    """Caches that are contiguous, then the same in pages."""
    of_caches = _speed_rows("gpu-decode-*,decode-*-bf16", ("cuda", "triton", "sdpa", "sdpa-flash"))
    pages = [f"{backend}-pages-{size}" for backend in ("cuda", "triton") for size in (16, 64)]
    return [*of_caches(device), *_speed_rows("gpu-decode-d128-*,gpu-decode-d64-4k", pages)(device)]


_runner: Any = None  # of this process: it keeps the last case's tensors and float64 results


def _speed(device: Gpu, row: str) -> Found:
    """One rival's time, error and memory for one case and pass (bench.sweep)."""
    from bench.cases import select

    from .. import providers
    from ..sweep import Runner
    from ..timing import Sampling

    global _runner
    if _runner is None:
        _runner = Runner(device.torch, Sampling(block=0.02, rounds=device.few(5), min_rounds=1, budget=0.3))
    name, pass_name, rival = row.split()
    (found,) = _runner.run(device.shrunk(select(name)[0]), pass_name, providers.choose(rival, device.torch))
    yield {name: x for name, x in found.items() if name not in ("key", "tags", "clean", "dropped", "threads")}


# --- correctness ------------------------------------------------------------------------------------------------------

RUNS = 200  # that must give the same bits


def _kernels(device: Gpu) -> list[str]:
    from gpu_kernels import CALLS

    first = [name for name, call in CALLS.items() if call.ranges or name.startswith(("many tiles", "three", "pages"))]
    first += ["d128 causal", "d64 causal", "full", "grouped, d128", "d128 few queries", "d256 causal"]
    return [*first, *(name for name in CALLS if name not in first)]


def _correctness(device: Gpu, row: str) -> Found:
    """Every result against float64, as it is and from a CUDA graph, in both modes; then bits that repeat."""
    import gpu_kernels

    call = gpu_kernels.CALLS[row]
    for mode in gpu_kernels.MODES:
        with gpu_kernels.mode(mode):
            found = {"mode": mode, **_checked(lambda: gpu_kernels.check(call, device.torch))}
            yield found
            # A replay draws other entries to drop, as it should.
            if found["status"] == "ok" and not call.dropout:
                yield {"mode": f"{mode}, graph", **_checked(lambda: _captured(device, call))}
    differing = gpu_kernels.differing_runs(call, 1 + device.few(RUNS), device.torch)
    message = f"{differing} of {RUNS} runs differ from the first" if differing else ""
    yield {"mode": "deterministic, again", "status": "wrong" if differing else "ok", "message": message}


def _checked(check: Callable[[], None]) -> dict[str, Any]:
    try:
        check()
    except AssertionError as error:
        return {"status": "wrong", "message": str(error)}
    return {"status": "ok"}


def _captured(device: Gpu, call: Any) -> None:
    """A replay with other inputs in the same memory gives what a call with them gives: to the bit in deterministic
    mode, else within what two orders of addition may differ by."""
    import torch

    import gpu_kernels

    leaves = gpu_kernels.leaves_of(call, device.torch)
    captured, replay = device.capture(lambda: gpu_kernels.run(call, leaves))
    other = gpu_kernels.leaves_of(call, device.torch, seed=2)
    with torch.no_grad():
        for name, x in leaves.items():
            x.copy_(other[name])
    replay()
    device.synchronize()
    for n, (replayed, again) in enumerate(zip(captured, gpu_kernels.run(call, leaves), strict=True)):
        if torch.are_deterministic_algorithms_enabled():
            same = torch.equal(replayed.nan_to_num(), again.nan_to_num())
        else:
            difference = (replayed - again).double().nan_to_num().abs().max()
            same = bool(difference <= 4 * torch.finfo(again.dtype).eps * again.double().nan_to_num(0, 0, 0).abs().max())
        assert same, f"result {n} of a replayed graph is not what a call gives"


def _watched_groups(device: Gpu) -> list[str]:
    """Kernels by the first word of their names: a dozen processes under the sanitizer."""
    return list(dict.fromkeys(name.split()[0].rstrip(",") for name in _kernels(device)))


def _watched(device: Gpu, row: str) -> Found:
    import gpu_kernels

    names = [name for name in gpu_kernels.CALLS if name.split()[0].rstrip(",") == row]
    for name in names:
        for mode in gpu_kernels.MODES:
            with gpu_kernels.mode(mode):
                gpu_kernels.run(gpu_kernels.CALLS[name], gpu_kernels.leaves_of(gpu_kernels.CALLS[name], device.torch))
        device.synchronize()
    yield {"status": "ok", "kernels": names}


# --- tests ------------------------------------------------------------------------------------------------------------

BEHAVIOUR = (
    *("key_ranges", "mask", "varlen", "jagged", "pages"),
    *("sdpa_parity", "masks", "gradients", "gqa", "lse_merge", "dropout", "transforms", "nn", "memory", "errors"),
)
TESTS: dict[str, list[str]] = {
    "streams, graphs, devices": ["tests/test_gpu.py", "-k", "not every_cuda_kernel and not triton_table"],
    "Triton: graphs, dropout, size": ["tests/test_triton_gpu.py", "-k", "captured or drops or elements"],
    "Triton: decode": ["tests/test_triton_gpu.py", "-k", "test_decode"],
    "Triton: features": ["tests/test_triton_gpu.py", "-k", "test_feature"],
    "the simulator's kernels": ["tests/ptxsim/test_hardware_gpu.py"],
    **{f"behaviour: {name}": [f"tests/test_{name}.py", "-k", "cuda"] for name in BEHAVIOUR},
    "Triton: its table": ["tests/test_gpu.py", "-k", "triton_table"],
    "Triton: behaviour": ["tests/test_triton_gpu.py", "-k", "test_behaviour"],
}
NO_TESTS = 5  # pytest's exit status where nothing was selected


def _tests(device: Gpu, row: str) -> Found:
    """A bounded part of the test suite. tests/test_transformers.py isn't in it: its models run on a CPU, and T5's need
    transformers 5.20 (before, T5 calls no attention function)."""
    if importlib.util.find_spec("pytest") is None:
        yield {"status": "skipped", "message": "pytest isn't installed"}
        return
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=5", *TESTS[row]]
    done = _command(pytest, {**os.environ, "PYTHONUNBUFFERED": "1"})
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    status = {0: "ok", NO_TESTS: "skipped"}.get(done.returncode, "wrong")
    yield {"status": status, "message": _last_line(done.stdout).strip("= "), "failed": failed}


# --- all of it --------------------------------------------------------------------------------------------------------


def _of(module: str, function: str) -> Callable[..., Any]:
    """bench.gpu.<module>.<function>, imported when it is called."""

    def call(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f"bench.gpu.{module}"), function)(*arguments)

    return call


def _one(name: str) -> Callable[[Gpu], list[str]]:
    return lambda device: [name]


_RIVALS = ("cuda", "triton", "sdpa", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa-math")
STAGES = (
    Stage("build", "the libraries, for this chip alone", 200, 195, _one("build"), _build, needed=True),
    Stage(
        "orders",
        "which schedule is fastest for Hopper's forward kernel",
        20,
        10,
        _of("orders", "rows"),
        _of("orders", "measure"),
        rehearsed="d128 causal 512",
    ),
    Stage(
        "table",
        "forward and backward against cuDNN and FlashAttention-2",
        90,
        15,
        _table_rows,
        _speed,
        rehearsed="*d128-causal-16384 backward cuda|*d64-causal-4096 forward *",
    ),
    Stage(
        "correctness",
        "every CUDA kernel against float64",
        130,
        30,
        _kernels,
        _correctness,
        jobs=3,
        rehearsed="one head|pages of 16, d64 one query, sinks",
    ),
    Stage(
        "whole",
        "whole outputs and gradients beside FlashAttention-2's",
        25,
        15,
        lambda device: list(dict.fromkeys(row.split()[0] for row in _table_rows(device))),
        _of("whole", "measure"),
        rehearsed="gpu-bf16-d64-causal-4096",
    ),
    Stage(
        "decode",
        "one query against long caches, in pages too: bandwidth",
        45,
        15,
        _decode_rows,
        _speed,
        rehearsed="gpu-decode-d64-4k *",
    ),
    Stage(
        "ranges",
        "what key ranges leave out must not cost: against all scores",
        30,
        15,
        _speed_rows("gpu-ranges", ("cuda", "cuda-plain", "triton", "sdpa")),
        _speed,
        rehearsed="gpu-documents-1024 backward cuda|gpu-streaming-1024 forward *",
    ),
    Stage(
        "tests",
        "the test suite's part for a GPU",
        120,
        110,
        lambda device: list(TESTS),
        _tests,
        jobs=8,
        rehearsed="streams*",
    ),
    Stage(
        "choice",
        "which backend is first for which call",
        45,
        40,
        _of("choose", "rows"),
        _of("choose", "measure"),
        jobs=8,
        rehearsed="forward decode head size 64",
    ),
    *(
        Stage(
            tool,
            f"compute-sanitizer's {tool} on {kernels}",
            45,
            40,
            _watched_groups,
            _watched,
            jobs=6,
            alone=True,
            tool=tool,
            rehearsed="dropout",
        )
        for tool, kernels in (("memcheck", "every CUDA kernel"), ("racecheck", "every CUDA kernel but Hopper's"))
    ),
    Stage(
        "features",
        "windows, bias, float32, head size 512",
        45,
        20,
        _speed_rows("gpu-window-1024,gpu-bias,gpu-d512,gpu-fp32", _RIVALS),
        _speed,
        rehearsed="gpu-window-1024 forward *|gpu-bias backward cuda",
    ),
    Stage(
        "tuning",
        "tiles of the Triton kernels",
        60,
        30,
        _of("tune", "rows"),
        _of("tune", "measure"),
        jobs=12,
        rehearsed="forward 16-bit plain head size 64",
    ),
)
