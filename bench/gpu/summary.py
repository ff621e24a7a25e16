"""The results of `make gpu` on a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
BAD = ("wrong", "error", "fault", "hung")


def read(path: Path) -> list[Record]:
    """The records of a file; a line that was torn is passed over."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def rows_of(records: Iterable[Record], stage: str) -> list[Record]:
    return [r for r in records if r.get("type") == "row" and r["stage"] == stage]


def page(records: Sequence[Record]) -> str:
    """What ran where, how fast, what is wrong: markdown."""
    begin: Record = next((r for r in records if r["type"] == "begin"), {})
    about: Record = next((r for r in records if r["type"] == "run"), {})
    chip = begin.get("chip", "unknown chip")
    parts = [f"# {chip}"]
    if about.get("rehearsed") or "rehearsal" in chip:
        parts.append("**A rehearsal: tiny problems in the simulator, launches counted, not timed. No figure is one.**")
    versions = {
        "date": begin.get("date"),
        "torch": about.get("torch"),
        "Triton": about.get("triton"),
        "cuDNN": begin.get("cudnn"),
        "driver": begin.get("driver_version", begin.get("unknown")),
        "attnkern": about.get("git"),
        "SM clock at the start (MHz)": begin.get("clocks.sm"),
    }
    parts.append(", ".join(f"{name} {value}" for name, value in versions.items() if value is not None))
    parts.append(_stages(records))
    bad = [r for r in records if r.get("type") == "row" and r["status"] in BAD]
    if bad:
        lines = [f"- {r['stage']}, {r['row']}{_mode(r)}: **{r['status']}**: {_first_line(r)}" for r in bad[:40]]
        more = [f"- and {len(bad) - 40} more"] if len(bad) > 40 else []
        parts.append("\n".join(["## What failed", "", *lines, *more]))
    speed = "flops_per_second", 1e12
    for title, text in (
        ("Against cuDNN and FlashAttention-2, TFLOP/s", _table(rows_of(records, "table"))),
        ("Schedules of Hopper's forward, TFLOP/s", _schedules(rows_of(records, "orders"))),
        ("Decoding, GB/s", _rivals(rows_of(records, "decode"), "bytes_per_second", 1e9)),
        ("Key ranges, TFLOP/s (cuda-plain: the call without them)", _rivals(rows_of(records, "ranges"), *speed)),
        ("Features, TFLOP/s", _rivals(rows_of(records, "features"), *speed)),
        ("Tiles of the Triton kernels", _tiles(rows_of(records, "tuning"))),
        ("Which backend first", _choice(rows_of(records, "choice"))),
    ):
        if text:
            parts.append(f"## {title}\n\n{text}")
    return "\n\n".join(parts) + "\n"


def _first_line(row: Record) -> str:
    return (str(row.get("message") or "").splitlines() or [""])[0][:200]


def _mode(row: Record) -> str:
    return f" ({row['mode']})" if "mode" in row else ""


def _stages(records: Sequence[Record]) -> str:
    lines = []
    for stage in (r for r in records if r["type"] == "stage"):
        clocks = [stage[when].get("clocks.sm") for when in ("before", "after")]
        measured = "" if None in clocks else f"{clocks[0]} / {clocks[1]}"
        lines.append((stage["name"], stage["told"], f"{stage['seconds']:.0f}", measured))
    return markdown(("stage", "rows", "s", "SM clock before / after"), lines)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; nothing where it has no line."""
    found = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *found]) if found else ""


def _figure(row: Record | None, field: str, unit: float) -> str:
    if row is None:
        return ""
    if row["status"] != "ok":
        return f"**{row['status']}**" if row["status"] in BAD else row["status"]
    value = row[field] / unit
    return f"{value:.0f}" if value >= 10 or row["clock"] == "counted" else f"{value:.2g}"


def _cells(rows: Iterable[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """Rows of bench.sweep by case and pass, then by rival."""
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for row in rows:
        case, pass_name, rival = row["row"].split()
        cells.setdefault((case, pass_name), {})[rival] = row
    return cells


def _table(rows: Sequence[Record]) -> str:
    lines = []
    for (case, pass_name), by_rival in _cells(rows).items():
        ours = by_rival.get("cuda", {})
        ratio = []
        for rival in ("sdpa-cudnn", "sdpa-flash"):
            theirs = by_rival.get(rival, {})
            known = ours.get("seconds") and theirs.get("seconds")
            ratio.append(f"{theirs['seconds'] / ours['seconds']:.2f}" if known else "")
        chosen = by_rival.get("sdpa", {}).get("kernel", "")
        figures = [_figure(by_rival.get(r), "flops_per_second", 1e12) for r in ("cuda", "sdpa-cudnn", "sdpa-flash")]
        error = f"{ours['allowed_share']:.2f}" if ours.get("allowed_share") is not None else ""
        lines.append((case.removeprefix("gpu-bf16-"), pass_name, *figures, *ratio, error, chosen))
    head = ("problem", "pass", "attnkern", "cuDNN", "FA-2", "x cuDNN", "x FA-2", "error / allowed", "torch chose")
    return markdown(head, lines)


def _rivals(rows: Sequence[Record], field: str, unit: float) -> str:
    cells = _cells(rows)
    rivals = list(dict.fromkeys(rival for by_rival in cells.values() for rival in by_rival))
    lines = []
    for (case, pass_name), by_rival in cells.items():
        share = by_rival.get("cuda", {}).get("bandwidth_share" if field.startswith("bytes") else "peak_share")
        told = "" if share is None else f"{share:.0%}"
        lines.append((case, pass_name, *(_figure(by_rival.get(r), field, unit) for r in rivals), told))
    return markdown(("case", "pass", *rivals, "cuda, of what was measured as the limit"), lines)


def best_schedules(rows: Iterable[Record]) -> dict[tuple[int, int], str]:
    """Of each class of head sizes the schedule with the largest geometric mean of its speeds."""
    logs: dict[tuple[int, int], Counter[str]] = {}
    for row in rows:
        if row["status"] == "ok":
            sums = logs.setdefault((row["head_dim"], row["head_dim_v"]), Counter())
            sums.update({schedule: math.log(speed) for schedule, speed in row["tflops"].items()})
    return {sizes: max(sums, key=lambda schedule: sums[schedule]) for sizes, sums in logs.items()}


def _schedules(rows: Sequence[Record]) -> str:
    best = best_schedules(rows)
    lines = []
    for row in rows:
        if row["status"] == "ok":
            speeds = [f"{speed:.0f}" for speed in row["tflops"].values()]
            lines.append((row["row"], *speeds, row["best"], best[row["head_dim"], row["head_dim_v"]]))
    return markdown(("problem", "serial", "overlap", "ping-pong", "best", "best of the class"), lines)


def _tiles(rows: Sequence[Record]) -> str:
    lines = []
    for row in rows:
        if row["status"] == "ok":
            gain = "" if row["gain"] is None else f"{row['gain']:.2f}"
            config = str(tuple(row["config"]))
            lines.append((row["row"], config, gain, f"{row['timed']} of {row['candidates']}"))
    skipped = [f"Skipped: {r['row']} ({_first_line(r)})." for r in rows if r["status"] == "skipped"]
    found = markdown(("row", "best tile, warps, stages", "x the table's", "candidates timed"), lines)
    return "\n\n".join(filter(None, (found, *skipped)))


def _choice(rows: Sequence[Record]) -> str:
    lines = []
    for row in rows:
        if row["status"] == "ok":
            order = sorted(row["seconds"], key=lambda name: row["seconds"][name])
            lines.append((row["row"], ", ".join(f"{name} {row['seconds'][name] * 1e6:.0f} us" for name in order)))
    return markdown(("call", "fastest first"), lines)
