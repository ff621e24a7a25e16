"""The CPU kernels' targets, row by row, and the run that holds them to it.

A row is held to its share of a limit that is measured beside it, in the same process and with as many threads: of the
multiply-adds (bfloat16: dot products) that a loop on registers reaches, or, in decoding, of a read of as many bytes.
So a target depends neither on torch nor on the machine's clock. The error against float64, memory and page faults have
bounds. The ratio to F.sdpa is information, with one rule: none is below 1.

The sets and their results keep the word goal in their names, by which commands and stored rows know them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import attnkern
from bench.cases import Case, case

from . import providers, report
from .provider import BASELINE
from .record import Log, Row
from .sweep import Runner

OURS = "cpu"
NARROWER = 0.05  # how much less than AVX-512's share is asked of kernels with shorter vectors
MEMORY = 1 << 20  # bytes for each thread that a call may hold beside as much as its results: no scores of whole rows
FAULTS = 64  # pages that a call may touch for the first time, when it has run before
STATUSES = ("reached", "missed", "wrong", "error")


@dataclass(frozen=True)
class Target:
    """What a case and pass has to reach, with AVX-512: ``share`` of the peak, or of reading (``reads``); ``converted``
    where bfloat16 has no instructions and becomes float32, by whose peak it is measured: that of float32's row."""

    case: Case
    pass_name: str
    share: float
    reads: bool = False
    converted: float | None = None

    @property
    def label(self) -> str:
        return f"{self.case.name}, {self.pass_name}"

    @property
    def limit(self) -> str:
        """What the share is of, in a word."""
        return "reads" if self.reads else "peak"

    @property
    def field(self) -> str:
        """Where a row has its share."""
        return "bandwidth_share" if self.reads else "peak_share"

    def wanted(self, isa: str) -> float:
        """The share that is asked of the kernels of this instruction set.

        None of the matrix unit's peak: how much of it exponentials leave isn't known.
        """
        share = self.share if self.converted is None or isa in ("zen5", "avx512bf16") else self.converted
        if isa == "amx":
            return 0.0 if self.case.dtype == "bf16" and not self.reads else share
        return share if isa.startswith(("zen5", "avx512")) else share - NARROWER


# --- the table --------------------------------------------------------------------------------------------------------

# Percent of the peak, full and causal, by (length, head size). Heads: batch and heads that leave the call itself, some
# microseconds, little to say.
SIZES = {(49, 32): (64, 8), (64, 64): (8, 12), (128, 64): (4, 12), (197, 64): (4, 12), (512, 64): (2, 8)}
SIZES |= {(1024, 64): (1, 8), (1024, 128): (1, 8), (4096, 64): (1, 2)}
SHARES: dict[tuple[str, str], list[tuple[int, int]]] = {
    ("fp32", "forward"): [(60, 45), (82, 66), (86, 76), (78, 68), (88, 83), (90, 86), (90, 86), (90, 89)],
    ("fp32", "backward"): [(55, 40), (82, 66), (86, 74), (80, 68), (86, 78), (88, 83), (89, 84), (90, 88)],
    ("bf16", "forward"): [(50, 33), (75, 56), (79, 68), (74, 66), (79, 72), (80, 76), (85, 81), (83, 82)],
    ("bf16", "backward"): [(42, 28), (76, 57), (82, 68), (76, 62), (80, 72), (84, 79), (86, 81), (86, 83)],
}


def _squares() -> Iterator[Target]:
    for (dtype, pass_name), shares in SHARES.items():
        for ((length, dim), (batch, heads)), pair in zip(SIZES.items(), shares, strict=True):
            for causal, percent in zip((False, True), pair, strict=True):
                more: dict[str, Any] = {"batch": batch, "heads": heads, "dim": dim, "dtype": dtype, "causal": causal}
                kind = "causal" if causal else "full"
                yield Target(case(f"{dtype} D{dim} L{length} {kind}", length, **more), pass_name, percent / 100)


def _others() -> Iterator[Target]:
    for dtype, longest in (("fp32", 0.90), ("bf16", 0.83)):
        wide = case(f"{dtype} D64 L16384 causal", 16384, heads=1, dtype=dtype, causal=True)
        yield Target(wide, "forward", longest)
    masked = {("fp32", "forward"): (78, 45), ("fp32", "backward"): (76, 40)}
    masked |= {("bf16", "forward"): (70, 28), ("bf16", "backward"): (70, 26)}
    for (dtype, pass_name), (window, packed) in masked.items():
        more: dict[str, Any] = {"causal": True, "window": (255, 0), "dtype": dtype}
        yield Target(case(f"{dtype} D64 L4096 window 256", 4096, **more), pass_name, window / 100)
        more = {"mask": "packed:20-50", "layout": "blhd", "dtype": dtype}
        yield Target(case(f"{dtype} D64 packed 20-50", 14000, **more), pass_name, packed / 100)
    for dtype, cached, several in (("fp32", 0.80, 0.50), ("bf16", 0.65, 0.40)):
        more = {"heads": (32, 8), "dim": 128, "dtype": dtype}
        for keys, share in ((4096, cached), (16384, 0.85)):
            yield Target(case(f"{dtype} decode 1 query, {keys} keys", 1, keys, **more), "forward", share, reads=True)
        more |= {"causal": True, "alignment": "bottom_right"}
        yield Target(case(f"{dtype} decode 8 queries, 4096 keys", 8, 4096, **more), "forward", several)


def _with_converted(targets: Sequence[Target]) -> tuple[Target, ...]:
    shares = {target.label: target.share for target in targets}
    return tuple(
        target if target.reads else replace(target, converted=shares[target.label.replace("bf16", "fp32")])
        for target in targets
    )


TABLE = _with_converted([*_squares(), *_others()])
# A set: the environment that its process needs. Libraries read it once, when they start.
SETS: dict[str, dict[str, str]] = {
    "cpu-goals": {},
    "cpu-goals-avx2": {
        "ATTNKERN_CPU_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}


def named(pattern: str) -> tuple[Target, ...] | None:
    """The targets of a set, None where the pattern names ordinary cases. ``cpu-goals:TEXT`` keeps labels with TEXT."""
    name, _, text = pattern.partition(":")
    return tuple(target for target in TABLE if text in target.label) if name in SETS else None


def environment(pattern: str) -> dict[str, str]:
    """What of its set's environment this process lacks."""
    wanted = SETS[pattern.partition(":")[0]]
    return {name: value for name, value in wanted.items() if os.environ.get(name) != value}


# --- running ----------------------------------------------------------------------------------------------------------


def verdict(target: Target, row: Row) -> dict[str, tuple[float, float, bool]]:
    """{what: (got, its bound, is it kept?)} of a timed row: shares and the ratio at least, the rest at most."""
    least = {target.limit: (row[target.field], target.wanted(row["isa"])), "ratio": (row.get("ratio"), 1.0)}
    most = {
        "error": (row.get("allowed_share"), 1.0),
        "memory": (beyond_results(row), row["result_bytes"] + MEMORY * row["threads"]),
        "faults": (row["faults"], FAULTS),
    }
    found = {name: (got, bound, got >= bound) for name, (got, bound) in least.items() if got is not None}
    return found | {name: (got, bound, got <= bound) for name, (got, bound) in most.items() if got is not None}


def beyond_results(row: Row) -> float | None:
    """Bytes that a call held at once beside what it returned; None where nobody counted."""
    return None if row.get("memory") is None else max(0, row["memory"] - row["result_bytes"])


def status_of(target: Target, row: Row) -> str:
    """One of STATUSES."""
    if row["status"] != "ok":
        return "wrong" if row["status"] == "wrong" else "error"
    return "reached" if all(kept for _, _, kept in verdict(target, row).values()) else "missed"


def _measure(target: Target, runner: Runner) -> list[Row]:
    rows = runner.run(target.case, target.pass_name, providers.choose(f"{OURS},{BASELINE}", runner.device))
    for row in rows:
        row["isa"] = attnkern.build_info()["cpu_isa"]
    return rows


def run(targets: Sequence[Target], runner: Runner, log: Log, console: Console) -> tuple[list[Row], bool, bool]:
    """Measures every target the log lacks, prints and writes the table: (rows, did one fail?, interrupted?).

    What was missed is measured once more.
    """
    found: dict[Target, Row] = {}
    others: list[Row] = []
    interrupted = False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(targets))
        try:
            for target in targets:
                progress.update(task, description=target.label)
                key = runner.key(target.case, target.pass_name, OURS)
                if not log.finished(key):
                    rows = _measure(target, runner)
                    if status_of(target, rows[0]) == "missed":
                        rows = _measure(target, runner)
                    for row in rows:
                        log.add(row)
                    progress.console.print(_line(target, rows[0]))
                found[target] = log.rows[key]
                rival = runner.key(target.case, target.pass_name, BASELINE)
                others += [log.rows[rival]] if rival in log.rows else []
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    console.print(_table(found))
    console.print(counts(found))
    log.path.with_suffix(".md").write_text(page(found, log.runs[-1]), encoding="utf-8")
    missing = len(found) < len(targets) and not interrupted
    failed = missing or any(status_of(target, row) != "reached" for target, row in found.items())
    return [*found.values(), *others], failed, interrupted


# --- the report -------------------------------------------------------------------------------------------------------

HEAD = ("row", "limit", "target", "got", "times F.sdpa", "error, of allowed", "beyond results", "faults", "")


def rows_by_target(rows: Sequence[Row]) -> dict[Target, Row]:
    """The stored rows of our kernels that have a target, in the table's order."""
    ours = {(row["case"], row["pass"]): row for row in rows if row["provider"] == OURS}
    found = {target: ours.get((target.case.name, target.pass_name)) for target in TABLE}
    return {target: row for target, row in found.items() if row is not None}


def counts(found: dict[Target, Row]) -> str:
    """``70 of 78 targets reached, 8 missed``; rows that have none for their share are counted apart."""
    with_target = {target: row for target, row in found.items() if target.wanted(row["isa"])}
    statuses = [status_of(target, row) for target, row in with_target.items()]
    others = [f"{statuses.count(name)} {name}" for name in STATUSES[1:] if name in statuses]
    if without := len(found) - len(with_target):
        others.append(f"{without} rows without a target")
    return ", ".join((f"{statuses.count('reached')} of {len(with_target)} targets reached", *others))


def missed(target: Target, row: Row) -> str:
    """Which of a row's bounds aren't kept, by name."""
    if row["status"] != "ok":
        return row.get("message") or row["status"]
    return ", ".join(name for name, (_, _, kept) in verdict(target, row).items() if not kept)


def _cells(target: Target, row: Row) -> tuple[str, ...]:
    limit, text = target.limit, status_of(target, row)
    wanted = f"{target.wanted(row['isa']):.0%}"
    if row.get("seconds") is None:
        return (target.label, limit, wanted, *[""] * 5, f"{text}: {missed(target, row)}")
    got, kept = verdict(target, row), missed(target, row)
    values = {name: value for name, (value, _, _) in got.items()}
    shown = (
        f"{values[limit]:.1%}",
        f"{values['ratio']:.2f}" if "ratio" in values else "",
        f"{values['error']:.2f}" if "error" in values else "",
        report.size(values["memory"]) if "memory" in values else "",
        f"{values['faults']:.0f}" if "faults" in values else "",
    )
    note = " (noisy)" * report.noisy(row)
    return (target.label, limit, wanted, *shown, (text if not kept else f"{text}: {kept}") + note)


def _line(target: Target, row: Row) -> str:
    label, limit, wanted, got, ratio, *_, text = _cells(target, row)
    colour = "green" if status_of(target, row) == "reached" else "red"
    return f"[{colour}]{escape(text)}[/] {escape(label)}: {got} of {limit} (target {wanted}), {ratio}x"


def _table(found: dict[Target, Row]) -> Table:
    result = Table(title="targets of the CPU kernels")
    for column in HEAD:
        result.add_column(column, overflow="fold")
    for target, row in found.items():
        *cells, text = map(escape, _cells(target, row))
        result.add_row(*cells, f"[{'green' if status_of(target, row) == 'reached' else 'red'}]{text}[/]")
    return result


def plan(targets: Sequence[Target]) -> Table:
    """What a run would measure."""
    result = Table(title=f"{len(targets)} targets of the CPU kernels")
    for column in ("row", "batch x heads x length x head_dim", "limit", "target with AVX-512", "otherwise"):
        result.add_column(column)
    for target in targets:
        shares = (f"{target.wanted(isa):.0%}" for isa in ("avx512", "avx2"))
        result.add_row(escape(target.label), target.case.shape, target.limit, *shares)
    return result


def where(run: dict[str, Any]) -> str:
    """The machine of a run, its instruction set and threads."""
    return f"{run['device']}, {run['cpu_isa']}, {run['threads']} thread{'s' * (run['threads'] > 1)}"


def page(found: dict[Target, Row], run: dict[str, Any]) -> str:
    """The table of a run that a file keeps beside its rows."""
    code = f"code {run['code']} (git {run['git']}{', with changes' if run['dirty'] else ''})"
    place = f"{where(run)}, torch {run['torch']} ({run['torch_isa']}), {code}"
    lines = [
        "# Targets of the CPU kernels",
        "",
        f"{counts(found)}. {place}, {run['date']}: `{run['command']}`",
        "",
        "A share is of the peak of a loop on registers, or of a read of as many bytes, in the same rounds. Beyond its",
        f"results a call may hold as much again and {report.size(MEMORY)} for each thread, and touch {FAULTS} pages",
        "for the first time. No row may be slower than F.sdpa.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---" * len(HEAD) + "|",
    ]
    lines += ["| " + " | ".join(_cells(target, row)) + " |" for target, row in found.items()]
    return "\n".join(lines) + "\n"
