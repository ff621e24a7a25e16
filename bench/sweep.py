"""One group: a case and a pass, all providers checked against float64, then timed against each other."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from attnkern import testing
from bench.cases import Case

from . import device as devices
from . import machine
from .check import Checker, Error
from .memory import peak_growth, size_of
from .provider import BASELINE, Provider, Refused, results
from .record import Row, row_key
from .rivals import Seen
from .timing import Sampling, Timing, Work, measure, quantile

PEAK, READS = "the machine's peak", "the machine's memory"  # as competitors
USUAL_SHARE = 0.3  # of the peak, that a competitor reaches
CALLS_BEFORE = 4  # of each competitor, checked and counted, before the rounds
PREPARED = 0.7  # seconds for the tensors of a group and their float64 results
NO_KERNEL = ("No available kernel", "No viable backend")  # how torch's selection refuses


@dataclass
class Runner:
    """Runs groups on one device under one sampling; keeps the tensors and the float64 results of the last case.

    ``registers``: the peak is what the CPU kernels' own instructions reach, whatever other units a matmul has.
    """

    device: torch.device
    sampling: Sampling
    seed: int = 0
    baseline: str = BASELINE
    registers: bool = False
    _warm: set[tuple[str, ...]] = field(default_factory=set)
    _last: tuple[Case, testing.Inputs, Checker] | None = None

    def __post_init__(self) -> None:
        gc.collect()
        gc.freeze()  # the collections before each measurement of memory then cost nothing
        self._code = machine.code_fingerprint()
        self._device = devices.of(self.device).name()

    @property
    def clock(self) -> str:
        return "cpu time" if self.sampling.cpu_time else devices.of(self.device).clock

    def key(self, case: Any, pass_name: str, provider: str) -> str:
        setting = (self._code, self._device, torch.get_num_threads(), self.clock, os.environ.get("ATTNKERN_CPU_ISA"))
        return row_key(case, pass_name, provider, repr(setting))

    def expected_seconds(self, groups: Iterable[tuple[Case, str]], competitors: int) -> float:
        """About how long the groups take while nothing else runs, from their FLOPs and this machine's peak."""
        sampling, total = self.sampling, 0.0
        for case, pass_name in groups:
            peak = machine.peak(self.device, case.dtype, torch.get_num_threads(), sampling.cpu_time)
            call = case.flops(pass_name) / (USUAL_SHARE * peak.rate)
            rounds = max(
                sampling.min_rounds * call, min(sampling.rounds * sampling.block, sampling.budget / competitors)
            )
            total += PREPARED + competitors * (CALLS_BEFORE * call + rounds)
        return total

    def run(self, case: Case, pass_name: str, providers: Sequence[Provider]) -> list[Row]:
        """One row for every provider, in order. Never raises for what a provider does."""
        rows: dict[str, Row] = {p.name: self._row(case, pass_name, p) for p in providers}
        try:
            inputs, checker = self._prepare(case)
        except (RuntimeError, MemoryError) as error:
            for row in rows.values():
                row |= {"status": "error", "message": f"inputs: {_one_line(error)}"}
            return list(rows.values())
        works: dict[str, Work] = {}
        for provider in providers:
            row = rows[provider.name]
            try:
                works[provider.name] = self._check(case, pass_name, provider, inputs, checker, row)
            except Refused as refusal:
                row |= {"status": "refused", "message": str(refusal)}
            except Exception as error:  # whatever a provider raises is a result to record
                refused = isinstance(error, RuntimeError) and str(error).startswith(NO_KERNEL)
                row |= {"status": "refused" if refused else "error", "message": _one_line(error)}
        if works:
            setting = (torch.get_num_threads(), self.sampling.cpu_time)
            peak, reads = machine.register_peak if self.registers else machine.peak, bound_by_reading(case, pass_name)
            limits = {PEAK: peak(self.device, case.dtype, *setting)}
            # Where reading is the limit, a read of as much: what caches hold is faster than memory.
            size = int(case.bytes_moved(pass_name)) if reads and self.device.type == "cpu" else None
            limits[READS] = machine.read_bandwidth(self.device, *setting, size)
            timed = limits if reads else [PEAK]
            beside = {name: Work(loop, nullcontext) for name in timed if (loop := limits[name].loop) is not None}
            try:
                timings = measure(works | beside, self.sampling, self.device)
            except Exception as error:
                for name in works:
                    rows[name] |= {"status": "error", "message": f"while timed: {_one_line(error)}"}
            else:
                baseline = timings.get(self.baseline)
                run = {p.name: p.instead(case) if p.instead else case for p in providers if p.name in works}
                plain = next((p.name for p in providers if p.instead and p.name in works), None)
                for name in works:
                    rows[name] |= _speed(run[name], pass_name, timings[name], timings, limits)
                    rows[name]["ratio"] = None if baseline is None else timings[name].ratio(baseline)
                    if baseline is not None:
                        ratios = timings[name].ratios(baseline)
                        rows[name] |= {"ratio_p20": quantile(ratios, 0.2), "ratio_p80": quantile(ratios, 0.8)}
                    rows[name]["live"] = run[name].live_share
                    if plain is not None:
                        per_score = run[plain].live_share / run[name].live_share
                        rows[name]["cost"] = per_score / timings[name].ratio(timings[plain])
        base = rows.get(self.baseline, {}).get("rms")
        for row in rows.values():
            if base and row.get("rms"):
                row["rms_ratio"] = max((row["rms"][n] / base[n] for n in row["rms"] if base.get(n)), default=None)
        return list(rows.values())

    def _prepare(self, case: Case) -> tuple[testing.Inputs, Checker]:
        if self._last is None or self._last[0] != case:
            self._last = None  # frees the tensors first
            inputs = devices.of(self.device).inputs(case, self.seed)
            self._last = (case, inputs, Checker(case, inputs, self.seed))
        return self._last[1:]

    def _row(self, case: Case, pass_name: str, provider: Provider) -> Row:
        return {
            "key": self.key(case, pass_name, provider.name),
            **{("case" if k == "name" else k): v for k, v in asdict(case).items()},
            "live": case.live_share,
            "pass": pass_name,
            "provider": provider.name,
            "device": self._device,
            "threads": torch.get_num_threads(),
            "clock": self.clock,
            "status": "ok",
        }

    def _check(self, case: Case, pass_name: str, provider: Provider, inputs: Any, checker: Checker, row: Row) -> Work:
        """Memory and error of one call; gives the call to be timed."""
        if provider.quadratic or (case.sinks and provider.name.startswith(BASELINE)):  # which holds a mask of them
            _refuse_without_memory(case, pass_name, self.device)
        checker.seed_call()
        work = provider.work(case, inputs, checker.grad_out, pass_name)
        # The first call of a kind loads code and sizes caches that stay.
        kind = (provider.name, pass_name, case.dtype, str(case.head_dim), case.mask)
        with work.context():
            if provider.name == BASELINE:
                with Seen() as seen:
                    work.call()
                row["kernel"] = seen.kernel
            elif kind not in self._warm:
                work.call()
            self._warm.add(kind)
            checker.seed_call()
            returned, row["memory"] = peak_growth(work.call, self.device)
        row["result_bytes"] = size_of(returned)
        if not provider.checked:
            return work
        if checker.grad_timed is not checker.grad_out and pass_name in ("backward", "both"):
            # Zeros draw less power, and the clock goes up.
            work = provider.work(case, inputs, checker.grad_timed, pass_name)
        with _one_thread():  # many small operations, which two threads on a busy machine spend waiting
            error: Error = checker.error(results(case, pass_name, returned, work.restore), provider.name)
        row |= {"error": error.max_abs, "allowed_share": error.allowed_share, "worst": error.worst, "rms": error.rms}
        if not error.ok:
            row |= {
                "status": "wrong",
                "message": f"{error.worst}: error is {error.allowed_share:.3g} times the allowed",
            }
        return work


def bound_by_reading(case: Case, pass_name: str) -> bool:
    """Whether memory is the limit, as in decoding: much data, and little to do with it."""
    moved = case.bytes_moved(pass_name)
    return moved >= 2**23 and case.flops(pass_name) < 8 * moved


def _speed(
    case: Case, pass_name: str, timing: Timing, timings: Mapping[str, Timing], limits: Mapping[str, machine.Peak]
) -> Row:
    def share(amount: float, limit: str) -> float:
        if limit not in timings:
            return amount / timing.median / limits[limit].rate
        # Round by round, as a ratio to a rival: neither the clock of a core nor its way to memory is always the same.
        return amount / limits[limit].work * timing.ratio(timings[limit])

    flops, moved = case.flops(pass_name), case.bytes_moved(pass_name)
    return {
        **timing.row(),
        "flops_per_second": flops / timing.median,
        "peak_share": share(flops, PEAK),
        "peak": limits[PEAK].label,
        "bytes_per_second": moved / timing.median,
        "bandwidth_share": share(moved, READS),
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _refuse_without_memory(case: Case, pass_name: str, device: torch.device) -> None:
    """On a CPU an allocation that doesn't fit ends in a killed process, which could record nothing."""
    copies = 4 if pass_name.startswith("forward") else 8
    needed = copies * 4 * case.batch * case.heads_q * case.seqlen_q * case.seqlen_k
    available = devices.of(device).free_memory()
    if available is not None and needed > 0.8 * available:
        raise Refused(f"its score matrices need about {needed / 2**30:.0f} GiB, {available / 2**30:.0f} GiB are free")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
