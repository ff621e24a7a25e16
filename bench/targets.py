"""The CPU kernels' targets, row by row, and the run that holds them to it.

Ratios are F.sdpa's time over ours, set for torch 2.13 on a two-core AVX-512 machine (Zen 5), where they ask for at most
0.89 of the peak. The share of the measured peak is the more stable target: it depends neither on torch nor on the
machine. A row fails when it falls under 0.93 of a target twice in a row. Where F.sdpa is so close to the peak that the
ratio alone would take more than the peak, the row is called above roofline.

The sets, their results and the cases keep the word goal in their names, by which commands and stored rows know them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from attnkern.testing import Inputs
from bench.cases import Case, case

from . import machine, providers, record, report
from .provider import BASELINE, Provider
from .record import Log, Row
from .sweep import Runner, bound_by_reading
from .timing import Work

FALLS = 0.93
FALLEN = ("missed", "above roofline")  # statuses
SPEED = ("ratio", "share", "bandwidth", "above")
SCATTER = 0.02  # of an rms error between samples
EVEN = 0.97  # "no slower", given what a ratio of equals scatters


@dataclass(frozen=True)
class Target:
    """What a case and pass has to reach; None: nothing asked. Times are the provider's against the rival's.

    ``rival_case``: the rival is our own provider on another case, per FLOP. ``rms`` and ``memory``: at most so many
    times the rival's. ``above`` is in seconds: how much slower than the rival the call may be.
    """

    case: Case
    pass_name: str
    ratio: float | None = None
    share: float | None = None
    bandwidth: float | None = None
    rms: float | None = None
    memory: float | None = None
    above: float | None = None
    provider: str = "cpu"
    rival: str = BASELINE
    rival_case: Case | None = None
    isa: str | None = None
    stretch_ratio: float | None = None
    stretch_share: float | None = None

    @property
    def label(self) -> str:
        return f"{self.case.name.removeprefix('target ')}, {self.pass_name}"

    def wishes(self) -> str:
        texts = {
            "ratio": "{:g}x",
            "share": "{:.0%} of peak",
            "bandwidth": "{:.0%} of reads",
            "above": "+{:g} us",
            "rms": "rms {:g}x",
            "memory": "memory {:g}x",
        }
        wanted = {what: getattr(self, what) for what in texts}
        wanted["above"] = None if self.above is None else self.above * 1e6
        return ", ".join(text.format(wanted[what]) for what, text in texts.items() if wanted[what] is not None)


# --- the table --------------------------------------------------------------------------------------------------------

LENGTHS = {64: 8, 128: 8, 256: 8, 512: 4, 2048: 2, 8192: 2}  # length: heads
# Full and causal, by length.
RATIOS: dict[tuple[str, str], list[tuple[float, float] | None]] = {
    ("fp32", "forward"): [(2.25, 2.8), (2.4, 3.9), (2.4, 3.9), (2.4, 4.5), (2.3, 2.8), (2.3, 2.5)],
    ("bf16", "forward"): [(4.6, 5.4), (4.6, 7.2), (4.6, 7.2), (4.7, 8.4), (4.4, 5.4), (4.4, 4.7)],
    ("fp16", "forward"): [(5.9, 8.0), (4.6, 7.8), (4.6, 7.8), (4.5, 8.2), (3.1, 3.8), (3.0, 3.2)],
    ("fp32", "backward"): [(2.3, 3.2), (2.35, 3.9), (2.35, 3.9), (2.4, 4.4), (2.35, 2.85), (2.25, 2.5)],
    ("bf16", "backward"): [(8.0, 10.0), (3.6, 6.0), (3.6, 6.0), (3.2, 5.8), (2.65, 3.15), (2.65, 2.8)],
    ("fp16", "backward"): [(18.0, 24.0), (20.0, 30.0), (20.0, 30.0), (20.0, 36.0), (20.0, 28.0), None],
}
SHARES = {
    ("fp32", "forward"): 0.90,
    ("bf16", "forward"): 0.85,
    ("fp16", "forward"): 0.85,
    ("fp32", "backward"): 0.92,
    ("bf16", "backward"): 0.88,
    ("fp16", "backward"): 0.88,
}
RMS = {("fp32", "forward"): 1.1, ("fp32", "backward"): 1.3}


def _ratio(dtype: str, pass_name: str, length: int, causal: bool) -> float | None:
    pair = RATIOS[dtype, pass_name][list(LENGTHS).index(length)]
    return None if pair is None else pair[causal]


def _square(dtype: str, length: int, dim: int, causal: bool, **more: Any) -> Case:
    kind = "causal" if causal else "full"
    more = {"heads": LENGTHS.get(length, 8), "causal": causal, "dtype": dtype, **more}
    return case(f"goal {dtype} D{dim} L{length} {kind}", length, dim=dim, **more)


def _main() -> Iterator[Target]:
    for dtype, pass_name in RATIOS:
        for dim in (64, 128):
            for length in LENGTHS:
                for causal in (False, True):
                    ratio = _ratio(dtype, pass_name, length, causal)
                    if ratio is None:
                        continue
                    short, long = length < 128, length >= 2048
                    forward_bf16 = dtype == "bf16" and pass_name == "forward" and dim == 64
                    yield Target(
                        _square(dtype, length, dim, causal),
                        pass_name,
                        ratio,
                        share=SHARES[dtype, pass_name] if long else None,
                        rms=RMS.get((dtype, pass_name), 1.0),
                        memory=1.0 if long else None,
                        provider="cpu-op" if short else "cpu",
                        rival="sdpa-op" if short else BASELINE,
                        stretch_ratio=1.15 * ratio if causal and length <= 128 else None,
                        stretch_share=0.90 if long and forward_bf16 else None,
                    )


def _other_dims() -> Iterator[Target]:
    for dims, length_choice in (((32, 80, 96, 256), (128, 2048)), ((48, 72, 160, 65), (256,))):
        for dtype, pass_name in RATIOS:
            factor = 0.75 if length_choice == (256,) else 0.95 if dtype == "fp32" else 0.88
            for dim in dims:
                for length in length_choice:
                    for causal in (False, True):
                        ratio = _ratio(dtype, pass_name, length, causal)
                        assert ratio is not None
                        yield Target(_square(dtype, length, dim, causal), pass_name, round(factor * ratio, 3))


def _decode() -> Iterator[Target]:
    def decode(name: str, dtype: str, queries: int, keys: int, heads: Any, ratio: float, **more: Any) -> Target:
        problem = case(f"goal decode {name} {dtype}", queries, keys, heads=heads, dim=128, dtype=dtype)
        return Target(problem, "forward", ratio, **more)

    for dtype, cached, dram in (("fp32", 1.65, 1.65), ("bf16", 14.0, 7.0), ("fp16", 22.0, 10.0)):
        yield decode("8 heads, 4k", dtype, 1, 4096, 8, cached)
        yield decode("8 heads, 64k (memory)", dtype, 1, 65536, 8, dram, bandwidth=0.85)
    yield decode("1 head, 64k", "fp32", 1, 65536, 1, 5.0)
    for dtype, ratio in (("fp32", 2.2), ("bf16", 4.5)):
        for queries in (2, 8, 16):
            yield decode(f"{queries} queries, 16k", dtype, queries, 16384, 8, ratio)
        yield decode("GQA 32/8, 4k", dtype, 1, 4096, (32, 8), ratio)


def _features() -> Iterator[Target]:
    for dtype, floating, boolean in (("fp32", 2.2, 2.5), ("bf16", 3.6, 4.3)):
        more: dict[str, Any] = {"heads": 4, "dtype": dtype}
        yield Target(case(f"goal float mask {dtype}", 1024, mask="float", **more), "forward", floating)
        yield Target(case(f"goal bool mask {dtype}", 1024, mask="bool", **more), "forward", boolean)
        yield Target(case(f"goal learned mask {dtype}", 1024, mask="bias", **more), "backward", 2.0)
        window: dict[str, Any] = {"heads": 1, "dtype": dtype, "causal": True, "window": (255, 0)}
        yield Target(case(f"goal window 256 {dtype}", 16384, **window), "forward", 20.0)
        shorter = case(f"L4096 window 256 {dtype}", 4096, **{**window, "heads": 4})
        linear = case(f"goal window 256 linear in L {dtype}", 16384, **window)
        yield Target(linear, "forward", EVEN, rival="cpu at L=4096", rival_case=shorter)
        for pass_name in ("forward", "backward"):
            gqa = case(f"goal GQA 32/8 per FLOP {dtype}", 1024, heads=(32, 8), dim=128, dtype=dtype, causal=True)
            mha = replace(gqa, name=f"MHA 32 {dtype}", heads_k=32)
            yield Target(gqa, pass_name, EVEN, rival="cpu, MHA", rival_case=mha)
        for dim in (64, 128):
            strided = case(f"goal [B, L, H, D] D{dim} {dtype}", 1024, heads=8, dim=dim, dtype=dtype, layout="blhd")
            dense = replace(strided, name=f"contiguous D{dim} {dtype}", layout="bhld")
            bound = 0.90 if dtype == "bf16" and dim == 64 else 0.95
            yield Target(strided, "forward", bound, rival="cpu, contiguous", rival_case=dense)


def _overhead() -> Iterator[Target]:
    yield Target(case("goal short call", 64, heads=1), "forward", 1.4)
    yield Target(case("goal short call", 64, heads=1), "both", 1.0)
    yield Target(case("goal short call above the operator", 64, heads=1), "forward", rival="cpu-op", above=4e-6)


def _avx2() -> Iterator[Target]:
    for dim in (64, 128):
        for causal in (False, True):
            target = _square("fp32", 2048, dim, causal)
            yield Target(replace(target, name=f"{target.name} AVX2"), "forward", 1.5 if causal else 1.2, isa="avx2")


_AVX2 = tuple(_avx2())
SETS: dict[str, tuple[Target, ...]] = {
    "cpu-goals": (*_main(), *_other_dims(), *_decode(), *_features(), *_overhead(), *_AVX2),
    "cpu-goals-avx2": _AVX2,
}


def named(pattern: str) -> tuple[Target, ...] | None:
    """The targets of a set, None where the pattern names ordinary cases. ``cpu-goals:TEXT`` keeps labels with TEXT."""
    name, _, text = pattern.partition(":")
    if name not in SETS:
        return None
    return tuple(target for target in SETS[name] if text in target.label)


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OtherCase(Provider):
    """Our provider on another case: the rival of a target like "strided no slower than contiguous"."""

    inner: Provider | None = None
    case: Case | None = None

    def work(self, case: Case, inputs: Inputs, grad_out: Tensor, pass_name: str) -> Work:
        assert self.inner is not None
        assert self.case is not None
        other = self.case.inputs(inputs.query.device)
        sizes = (self.case.batch, self.case.heads_q, self.case.seqlen_q, self.case.head_dim_v)
        return self.inner.work(self.case, other, torch.randn(sizes).to(grad_out), pass_name)


def _competitors(target: Target, device: torch.device) -> list[Provider]:
    if target.rival_case is None:
        return providers.choose(f"{target.provider},{target.rival}", device)
    (ours,) = providers.choose(target.provider, device)
    more: dict[str, Any] = {"checked": False, "inner": ours, "case": target.rival_case}
    return [ours, _OtherCase(target.rival, "", ours.device_types, ours.bind, **more)]


def above_roofline(target: Target, row: Row) -> bool:
    """Whether the ratio would take more than the machine's peak."""
    got, share = row["goal"].get("ratio"), row.get("peak_share")
    if target.ratio is None or got is None or share is None:
        return False
    return share * target.ratio > got


def scores(target: Target, row: Row) -> dict[str, tuple[float, float, float]]:
    """{what: (wanted, got, got as a share of wanted; at least 1 meets it)} for every possible part of the target."""
    found: dict[str, tuple[float, float, float]] = {}
    for what in ("ratio", "share", "bandwidth", "above", "rms", "memory"):
        wanted, got = getattr(target, what), row["goal"].get(what)
        if wanted is None or (what == "ratio" and above_roofline(target, row)):
            continue
        if got is None:
            found[what] = (wanted, float("nan"), 0.0)
        elif what in ("ratio", "share", "bandwidth"):
            found[what] = (wanted, got, got / wanted)
        else:
            slack = 1 + SCATTER if what == "rms" else 1
            found[what] = (wanted, got, wanted / got if got > wanted * slack else 1.0)
    return found


def _measure(target: Target, runner: Runner) -> tuple[Row, list[Row]]:
    runner.baseline = target.rival
    ours, rival = runner.run(target.case, target.pass_name, _competitors(target, runner.device))
    got: dict[str, float | None] = {}
    if ours.get("seconds") and rival.get("seconds"):
        ratio = ours["ratio"]
        if target.rival_case is not None:
            ratio *= target.case.flops(target.pass_name) / target.rival_case.flops(target.pass_name)
        got = {
            "ratio": ratio,
            "share": ours["peak_share"],
            "bandwidth": ours["bandwidth_share"],
            "above": ours["seconds"] - rival["seconds"],
            "rms": ours.get("rms_ratio"),
        }
        if ours.get("memory") is not None and rival.get("memory"):
            # The counter of resident memory is exact to some pages of every core.
            got["memory"] = max(0.0, ours["memory"] - 2**18) / rival["memory"]
    ours["goal"] = got
    return ours, [ours, rival]


def _worst(target: Target, row: Row) -> float:
    return min((score for what, (_, _, score) in scores(target, row).items() if what in SPEED), default=1.0)


def _run_one(target: Target, runner: Runner) -> list[Row]:
    ours, rows = _measure(target, runner)
    if status_of(target, ours) in FALLEN:
        first = ours["goal"]
        ours, rows = _measure(target, runner)
        ours["goal"]["first"] = first
        if status_of(target, ours) == "missed" and runner.clock == "wall":
            ours["goal"]["one_thread"] = _second_opinion(target, runner)
    return rows


def _second_opinion(target: Target, runner: Runner) -> float | None:
    """The ratio by CPU time on one thread, which other processes disturb least. Shown, but no target is held to it."""
    threads, sampling = torch.get_num_threads(), runner.sampling
    torch.set_num_threads(1)
    runner.sampling = replace(sampling, cpu_time=True)
    try:
        ours, _ = _measure(target, runner)
        return ours["goal"].get("ratio")
    finally:
        torch.set_num_threads(threads)
        runner.sampling = sampling


def status_of(target: Target, row: Row) -> str:
    """met, near (over 0.93 of every target of speed), missed, above roofline; of a row that is wrong or failed its own.

    above roofline: the ratio would take more than the machine's peak, and nothing else is missed.
    """
    if row["status"] != "ok":
        return row["status"]
    if _worst(target, row) < FALLS:
        return "missed"
    if above_roofline(target, row):
        return "above roofline"
    return "met" if all(score >= 1.0 for _, _, score in scores(target, row).values()) else "near"


def failed(target: Target, row: Row) -> bool:
    return row["status"] != "ok" or status_of(target, row) in FALLEN


def run(
    targets: Sequence[Target], runner: Runner, log: Log, console: Console, child_options: Sequence[str] = ()
) -> tuple[list[Row], bool, bool]:
    """Measures every target the log lacks, prints and writes the table: (rows, did one fail?, interrupted?)."""
    isa = os.environ.get("ATTNKERN_CPU_ISA")
    here = [g for g in targets if g.isa is None or g.isa == isa]
    elsewhere = [g for g in targets if g not in here]
    found: dict[Target, Row] = {}
    others: list[Row] = []
    interrupted = False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(here))
        try:
            for target in here:
                progress.update(task, description=target.label)
                key = runner.key(target.case, target.pass_name, target.provider)
                if not log.finished(key):
                    rows = _run_one(target, runner)
                    for row in rows:
                        log.add(row)
                    progress.console.print(_line(target, rows[0]))
                found[target] = log.rows[key]
                rival = runner.key(target.case, target.pass_name, target.rival)
                others += [log.rows[rival]] if rival in log.rows else []
                progress.advance(task)
            if elsewhere:
                found |= _in_child(elsewhere, log.path, console, child_options)
        except KeyboardInterrupt:
            interrupted = True
    console.print(table(targets, found))
    kinds = ("met", "near", "missed", "above roofline", "wrong", "error")
    counts = {v: sum(status_of(g, r) == v for g, r in found.items()) for v in kinds}
    text = ", ".join(f"{n} {v}" for v, n in counts.items() if n)
    console.print(f"{len(found)} of {len(targets)} targets measured: {text}")
    log.path.with_suffix(".md").write_text(_markdown(targets, found, log.runs, text), encoding="utf-8")
    missing = len(found) < len(targets) and not interrupted
    # Rows of another instruction set have files of their own, and are no part of this one's curves.
    ours = [found[target] for target in here if target in found]
    return [*ours, *others], missing or any(failed(g, r) for g, r in found.items()), interrupted


def _in_child(targets: Sequence[Target], path: Path, console: Console, options: Sequence[str]) -> dict[Target, Row]:
    """The instruction set is chosen when the library loads: targets for another one run in a process of their own."""
    isa = targets[0].isa
    assert isa is not None
    out = path.with_name(f"{path.stem}-{isa}.jsonl")
    # Relative to where it runs: the command is kept with its rows.
    relative = os.path.relpath(out, machine.ROOT)
    command = [sys.executable, "-m", "bench", "run", "--cases", f"cpu-goals-{isa}", "--no-plot", "--out", relative]
    console.print(f"{len(targets)} targets with ATTNKERN_CPU_ISA={isa} in a process of their own")
    environment = {**os.environ, "ATTNKERN_CPU_ISA": isa}
    quiet = subprocess.DEVNULL
    subprocess.run([*command, *options], cwd=machine.ROOT, env=environment, check=False, stdout=quiet)
    by_name = {(r["case"], r["pass"], r["provider"]): r for r in record.read(out)[0].values()} if out.exists() else {}
    wanted = {g: (g.case.name, g.pass_name, g.provider) for g in targets}
    return {g: by_name[name] for g, name in wanted.items() if name in by_name}


# --- the report -------------------------------------------------------------------------------------------------------

COLOURS = {"met": "green", "near": "yellow", "above roofline": "blue"}


def _got(target: Target, row: Row) -> str:
    shown = []
    show = {
        "ratio": "{:.2f}x",
        "share": "{:.0%} of peak",
        "bandwidth": "{:.0%} of reads",
        "rms": "rms {:.2f}x",
        "memory": "memory {:.2f}x",
    }
    found = scores(target, row)
    if above_roofline(target, row):
        got, share = row["goal"]["ratio"], row["peak_share"]
        shown.append(f"{got:.2f}x (the peak: {got / share:.2f}x)")
    for what, (_, got, _) in found.items():
        shown.append(f"{got * 1e6:+.1f} us" if what == "above" else show[what].format(got))
    if "share" not in found and row.get("peak_share") and target.above is None:
        shown.append(f"({row['peak_share']:.0%} of peak)")
    if "bandwidth" not in found and row.get("bandwidth_share") and bound_by_reading(target.case, target.pass_name):
        shown.append(f"({row['bandwidth_share']:.0%} of reads)")
    if (one := row["goal"].get("one_thread")) is not None:
        shown.append(f"one thread, CPU time: {one:.2f}x")
    return ", ".join(shown)


def _status_text(target: Target, row: Row) -> str:
    text = status_of(target, row)
    reached = target.stretch_ratio is not None and (row["goal"].get("ratio") or 0) >= target.stretch_ratio
    reached |= target.stretch_share is not None and (row["goal"].get("share") or 0) >= target.stretch_share
    return text + " (stretch too)" * reached + " (noisy)" * (not row.get("clean", True))


def _line(target: Target, row: Row) -> str:
    text = status_of(target, row)
    got = _got(target, row) if row["status"] == "ok" else report.status(row)
    return f"[{COLOURS.get(text, 'red')}]{text:6}[/] {escape(target.label)}: target {target.wishes()}; got {got}"


def table(targets: Sequence[Target], found: dict[Target, Row] | None = None) -> Table:
    found = found or {}
    result = Table(title="targets of the CPU kernels (rms: error against float64, times the rival's)")
    for column in ("row", "against", "target", "got", "error of allowed", ""):
        result.add_column(column, overflow="fold")
    for target in targets:
        row = found.get(target)
        cells = ["", "", ""]
        if row is not None:
            text = _status_text(target, row)
            got = _got(target, row) if row["status"] == "ok" else escape(row.get("message") or "")
            allowed = "" if row.get("allowed_share") is None else f"{row['allowed_share']:.2f}"
            cells = [got, allowed, f"[{COLOURS.get(status_of(target, row), 'red')}]{text}[/]"]
        result.add_row(escape(target.label), target.rival, target.wishes(), *cells)
    return result


def _markdown(targets: Sequence[Target], found: dict[Target, Row], runs: Sequence[dict[str, Any]], counts: str) -> str:
    run = runs[-1]
    code = f"code {run['code']} (git {run['git']}{', with changes' if run['dirty'] else ''})"
    where = f"{run['device']}, {run['cpu_isa']}, {run['threads']} threads, torch {run['torch']}, {code}"
    lines = [
        "# Targets of the CPU kernels",
        "",
        f"{counts}. {where}, {run['date']}: `{run['command']}`",
        "",
        "Ratios are the rival's time over ours; rms is the error against float64 and memory the peak growth, times",
        "the rival's. A share of peak in brackets is information, not a target. above roofline: the ratio would take",
        "more than the machine's peak, and nothing else is missed.",
        "",
        "| row | against | target | got | error, of allowed | |",
        "|---|---|---|---|---|---|",
    ]
    for target in targets:
        row = found.get(target)
        cells = ["not measured", "", ""]
        if row is not None:
            got = _got(target, row) if row["status"] == "ok" else row.get("message") or ""
            allowed = "" if row.get("allowed_share") is None else f"{row['allowed_share']:.2f}"
            cells = [got, allowed, _status_text(target, row)]
        lines.append("| " + " | ".join([target.label, target.rival, target.wishes(), *cells]) + " |")
    return "\n".join(lines) + "\n"
