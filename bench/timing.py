"""How long calls take, measured so that the figures can be compared on a machine that isn't quiet.

All competitors are timed in one process, in rounds: every round runs each of them once (a block of calls), in rotating
order, and a ratio is the median over rounds of the ratio within a round. So a drift of the clock or of a
neighbour's load reaches both sides. On a CPU a round in which other processes took CPU time is dropped.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import device as devices
from .memory import page_faults

# Run-queue delay is exact (ns) and means another process had a core of ours; /proc/stat counts whole ticks of 10 ms.
MAX_QUEUED_SHARE = 0.02
MAX_FOREIGN_SHARE = 0.10
TICK = 0.01


@dataclass(frozen=True)
class Work:
    """A call to be timed, and the context (a choice of backend, say) to be entered around a block of calls.

    `restore` brings the tensors that it returns, by name, to the case's layout, off the clock.
    """

    call: Callable[[], object]
    context: Callable[[], AbstractContextManager]
    restore: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None


@dataclass(frozen=True)
class Sampling:
    """How much to measure. ``budget`` is the wall-clock seconds for one group of competitors."""

    block: float = 0.02
    rounds: int = 11
    min_rounds: int = 3
    budget: float = 2.0
    cpu_time: bool = False


@dataclass
class Timing:
    """Seconds per call of one competitor in every kept round (None: it sat out), how much was thrown away, and page
    faults per call in the same rounds."""

    seconds: list[float | None] = field(default_factory=list)
    dropped: int = 0
    clean: bool = True
    faults: list[float] = field(default_factory=list)

    @property
    def kept(self) -> list[float]:
        return [s for s in self.seconds if s is not None]

    @property
    def median(self) -> float:
        return statistics.median(self.kept)

    def quantile(self, q: float) -> float:
        return quantile(self.kept, q)

    def row(self) -> dict[str, Any]:
        """What every row of a run says of its times."""
        return {
            "seconds": self.median,
            "p20": self.quantile(0.2),
            "p80": self.quantile(0.8),
            "rounds": len(self.kept),
            "dropped": self.dropped,
            "clean": self.clean,
            "faults": statistics.median(self.faults) if self.faults else None,
        }

    def ratios(self, baseline: Timing) -> list[float]:
        """Times faster than the baseline in each round that both took part in."""
        pairs = zip(baseline.seconds, self.seconds, strict=True)
        return [b / s for b, s in pairs if b is not None and s is not None]

    def ratio(self, baseline: Timing) -> float:
        """Times faster than the baseline: the median over the rounds."""
        ratios = self.ratios(baseline)
        return statistics.median(ratios) if ratios else math.nan


def quantile(values: Sequence[float], q: float) -> float:
    """The value at a share q of the sorted ones; nan of none."""
    return sorted(values)[round(q * (len(values) - 1))] if values else math.nan


@dataclass(frozen=True)
class Load:
    """What others have taken so far: seconds that our threads waited for a core, seconds used or stolen elsewhere."""

    wall: float
    queued: float | None
    foreign: float | None

    @classmethod
    def now(cls) -> Load:
        own = time.process_time()
        return cls(time.perf_counter(), _queued_seconds(), None if (busy := _busy_seconds()) is None else busy - own)

    def disturbed_since(self, before: Load) -> bool:
        wall = self.wall - before.wall
        queued = _difference(self.queued, before.queued)
        # Two ticks of every core may be rounding of the counters.
        slack = max(2 * TICK * torch.get_num_threads(), MAX_FOREIGN_SHARE * wall)
        return queued > MAX_QUEUED_SHARE * wall or _difference(self.foreign, before.foreign) > slack


def _difference(now: float | None, before: float | None) -> float:
    return 0.0 if now is None or before is None else now - before


def _queued_seconds() -> float | None:
    """Seconds that this process's threads were ready to run but had no core (Linux)."""
    try:
        return sum(int(p.read_text().split()[1]) for p in Path("/proc/self/task").glob("*/schedstat")) * 1e-9
    except (OSError, IndexError, ValueError):
        return None


def _busy_seconds() -> float | None:
    """Seconds that the machine's cores were busy for anyone, time stolen by the hypervisor included (Linux)."""
    try:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) * TICK


def measure(works: Mapping[str, Work], sampling: Sampling, device: torch.device) -> dict[str, Timing]:
    """Times every work in interleaved rounds; all must have run once before.

    A competitor much slower than the others takes part in ``min_rounds`` rounds only.
    """
    where = devices.of(device)
    block = where.block(sampling.cpu_time)
    watched = where.watched and not sampling.cpu_time  # which doesn't run while others have the core
    enabled = gc.isenabled()
    gc.disable()
    try:
        single = {name: _run(block, work, 1) for name, work in works.items()}
        calls = {name: max(1, math.ceil(sampling.block / s)) for name, s in single.items()}
        # One call again where it is short: the first one above paid for cold caches.
        for name, work in works.items():
            if calls[name] > 1:
                calls[name] = max(1, math.ceil(sampling.block / _run(block, work, min(calls[name], 10))))
        cost = {name: single[name] * calls[name] if calls[name] == 1 else sampling.block for name in works}
        fastest = min(cost.values())
        slow = {name for name in works if cost[name] > max(4 * fastest, sampling.budget / sampling.rounds)}
        return _rounds(works, sampling, block, calls, slow, watched)
    finally:
        if enabled:
            gc.enable()


def _run(block: Callable[[Callable, int], float], work: Work, calls: int) -> float:
    with work.context():
        return block(work.call, calls)


def _rounds(works, sampling, block, calls, slow, watched) -> dict[str, Timing]:
    names = list(works)
    kept: list[dict[str, tuple[float, float]]] = []  # seconds and faults of a call
    disturbed: list[dict[str, tuple[float, float]]] = []

    def once(name: str) -> tuple[float, float]:
        before = page_faults()
        seconds = _run(block, works[name], calls[name])
        return seconds, (page_faults() - before) / calls[name]

    start = time.perf_counter()
    while len(kept) < sampling.rounds:
        attempts = len(kept) + len(disturbed)
        spent = time.perf_counter() - start
        # Disturbed rounds may double the time, not more.
        if attempts >= sampling.min_rounds and spent > sampling.budget * (1 if len(kept) >= sampling.min_rounds else 2):
            break
        shift = attempts % len(names)
        order = names[shift:] + names[:shift]
        before = Load.now()
        # A slow one sits out once it has its rounds, so that the others get the rest of the budget.
        round_ = {n: once(n) for n in order if n not in slow or len(kept) < sampling.min_rounds}
        (disturbed if watched and Load.now().disturbed_since(before) else kept).append(round_)
    # With too few quiet rounds the disturbed ones are all there is: shown, but marked.
    clean = len(kept) >= min(sampling.min_rounds, sampling.rounds)
    used = kept if clean else kept + disturbed
    dropped = len(disturbed) if clean else 0

    def timing(name: str) -> Timing:
        pairs = [r.get(name) for r in used]
        faults = [pair[1] for pair in pairs if pair is not None]
        return Timing([None if pair is None else pair[0] for pair in pairs], dropped, clean, faults)

    return {name: timing(name) for name in names}
