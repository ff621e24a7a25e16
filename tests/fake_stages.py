"""Stages without a GPU, for tests/test_gpu_stages.py: `python -m bench.gpu --stages fake_stages`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu.stages import Stage


class Fake:
    rehearsed = False
    torch = None

    def name(self):
        return "a chip"

    def capability(self):
        return 90

    def chip(self):
        return {"chip": "a chip", "capability": 90, "cudnn": 91900}

    def clocks(self):
        return {"clocks.sm": "1980"}

    def synchronize(self):
        if os.environ.get("FAKE_STICKY") == str(os.getpid()):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def watch(self, tool):
        return ["env"] if tool == "present" else None


def device(rehearsed=False):
    return Fake()


def about(device):
    return {"torch": "2", "triton": "3", "git": "abc"}


def _sticky(device):
    os.environ["FAKE_STICKY"] = str(os.getpid())
    yield {"status": "error", "message": "CUDA error"}


def _measure(device, row):
    print("a library's chatter @row on standard output", flush=True)
    print(f"pid {os.getpid()} runs {row}", file=sys.stderr, flush=True)
    if row == "faults":
        os.kill(os.getpid(), signal.SIGSEGV)
    if row == "hangs":
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        Path(os.environ["FAKE_CHILD"]).write_text(str(child.pid))
        time.sleep(60)
    if row == "raises":
        raise ValueError("row raises")
    if row == "out of memory":
        raise MemoryError("CUDA out of memory")
    if row == "sticky":
        yield from _sticky(device)
        return
    if row == "slow":
        time.sleep(1.2)
    if row == "ends badly":
        import atexit

        atexit.register(os._exit, 9)
    yield {"pid": os.getpid()}


def _rows(*names):
    return lambda device: names


def _broken(device):
    raise LookupError("no such table")


BAD = ("faults", "hangs", "raises", "out of memory", "sticky")
STAGES = (
    Stage("build", "passes", 20, 10, _rows("builds"), _measure, needed=True),
    Stage("shared", "rows in one process", 60, 2, _rows("first", *BAD, "last"), _measure),
    Stage("apart", "a process each", 60, 5, _rows("one", "two", "ends badly"), _measure, jobs=2, alone=True),
    Stage("short", "ends at its limit", 2, 5, _rows("slow", "slow 2", "hangs", "never"), _measure),
    Stage("watched", "by a tool that isn't here", 9, 5, _rows("one"), _measure, alone=True, tool="absent"),
    Stage("unlisted", "its rows can't be named", 9, 5, _broken, _measure),
    Stage("broken build", "fails", 9, 5, _rows("raises"), _measure, needed=True),
    Stage("after", "never runs", 9, 5, _rows("one"), _measure),
)
