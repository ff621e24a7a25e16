"""Tables on the terminal, and the comparison of two runs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .provider import BASELINE
from .record import Row

FAILED = ("wrong", "error")
SCATTER = 0.2
NOISY = (
    "a noisy row. Other processes took CPU time in nearly all of its rounds, "
    f"or its ratio to F.sdpa differs by more than {SCATTER:.0%} among the middle 60% of them."
)


def noisy(row: Row) -> bool:
    """Whether a row's figures are to be doubted, by the rule that `NOISY` states."""
    low, high = row.get("ratio_p20"), row.get("ratio_p80")  # which rows of older runs lack
    return not row.get("clean", True) or bool(low and high and high > (1 + SCATTER) * low)


def is_ours(provider: str) -> bool:
    """Whether it is attnkern, on the case itself."""
    return not provider.startswith(("sdpa", "flex", "torch")) and not provider.endswith("-plain")


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def minutes(seconds: float) -> str:
    """As one tells it beforehand: ``20 seconds``, ``2.5 minutes``."""
    return f"{max(1, round(seconds))} seconds" if seconds < 60 else f"{seconds / 60:.1f} minutes"


def rate(per_second: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9)):
        if per_second >= size:
            return f"{per_second / size:.3g} {prefix}{unit}"
    return f"{per_second / 1e6:.3g} M{unit}"


def size(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"


def share(x: float) -> str:
    """Of all scores: ``17%``, ``0.82%``."""
    return f"{x:.0%}" if x >= 0.1 else f"{100 * x:.2g}%"


def ratio(x: float | None, is_baseline: bool = False) -> str:
    if x is None or is_baseline:
        return ""
    colour = "green" if x >= 1.0 else "yellow" if x >= 0.95 else "red"
    return f"[{colour}]{x:.2f}x[/]"


def status(row: Row) -> str:
    """ok, with what to know about it, or why not."""
    if row["status"] == "ok":
        return "[yellow]noisy[/]" if noisy(row) else ""
    colour = {"refused": "dim", "wrong": "bold red"}.get(row["status"], "red")
    return f"[{colour}]{row['status']}: {escape(row.get('message') or '')}[/]"


def group_line(rows: Sequence[Row]) -> str:
    """A finished group on one line."""
    parts = []
    for row in rows:
        name = row["provider"] + (f" ({row['kernel']})" if row.get("kernel") else "")
        if row.get("seconds") is not None:
            speed = ratio(row["ratio"], row["provider"] == BASELINE)
            note = "" if row["status"] == "ok" else status(row)
            parts.append(" ".join(filter(None, (name, duration(row["seconds"]), speed, note))))
        else:
            parts.append(f"{name} {status(row)}" if row["status"] in FAILED else f"[dim]{name} refused[/]")
    return (
        f"[bold]{escape(rows[0]['case'])}[/] {rows[0]['pass']}  "
        + "  ".join(parts)
        + "  [yellow]~[/]" * any(map(noisy, rows))
    )


def row_table(rows: Iterable[Row], title: str = "") -> Table:
    """One line for every row."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("case", overflow="fold")
    for column in ("pass", "provider"):
        table.add_column(column)
    for column in (
        "live",
        "time",
        f"vs {BASELINE}",
        "FLOP/s",
        "of peak",
        "bytes/s",
        "memory",
        "max error",
        "of allowed",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    previous = None
    for row in rows:
        group = (row["case"], row["pass"])
        if previous is not None and group != previous:
            table.add_section()
        first = previous != group
        previous = group
        timed = row.get("seconds") is not None
        name = row["provider"] + (f" ({row['kernel']})" if row.get("kernel") else "")
        table.add_row(
            escape(row["case"]) if first else "",
            row["pass"] if first else "",
            name,
            share(row["live"]) if row.get("live") is not None else "",
            duration(row["seconds"]) if timed else "",
            ratio(row.get("ratio"), row["provider"] == BASELINE),
            rate(row["flops_per_second"], "F/s") if timed else "",
            f"{row['peak_share']:.0%}" if timed else "",
            rate(row["bytes_per_second"], "B/s") if timed else "",
            size(row["memory"]) if row.get("memory") is not None else "",
            f"{row['error']:.1e}" if row.get("error") is not None else "",
            f"{row['allowed_share']:.2f}" if row.get("allowed_share") is not None else "",
            status(row),
        )
    return table


class Family(NamedTuple):
    """What rows of one curve over sequence length share."""

    dtype: str
    pass_name: str
    head_dim: int
    causal: bool
    extras: str  # everything else that sets the problem apart, "" where it is plain attention


def family(row: Row) -> Family:
    extras = []
    if row["heads_q"] != row["heads_k"]:
        extras.append(f"GQA {row['heads_q'] // row['heads_k']}:1")
    if row["head_dim_v"] != row["head_dim"]:
        extras.append(f"head_dim_v {row['head_dim_v']}")
    if row["window"]:
        extras.append("window " + "/".join("" if x is None else str(x) for x in row["window"]))
    if row["mask"] != "none":
        extras.append(f"{row['mask']} mask")
    if row["dropout"]:
        extras.append(f"dropout {row['dropout']:g}")
    if row["softcap"]:
        extras.append(f"softcap {row['softcap']:g}")
    if row["layout"] != "bhld":
        extras.append("[B, L, H, D]")
    return Family(row["dtype"], row["pass"], row["head_dim"], row["causal"], ", ".join(extras))


def curves(rows: Iterable[Row]) -> dict[Family, dict[str, list[Row]]]:
    """Self-attention rows that differ in length: {family: {provider: rows by length}}, three lengths at least."""
    found: dict[Family, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        # Rows of whole models are no points of a curve.
        if row.get("seconds") is not None and "seqlen_q" in row and row["seqlen_q"] == row["seqlen_k"]:
            found[family(row)][row["provider"]].append(row)
    kept = {}
    for key, providers in found.items():
        # Rows of one length and provider differ in something else: that length is no point of these curves.
        times = Counter((name, row["seqlen_q"]) for name, curve in providers.items() for row in curve)
        doubtful = {length for (_, length), n in times.items() if n > 1}
        long = {}
        for name, curve in providers.items():
            points = [row for row in curve if row["seqlen_q"] not in doubtful]
            if len(points) >= 3:
                long[name] = sorted(points, key=lambda row: row["seqlen_q"])
        if long:
            kept[key] = long
    return kept


class SweepLine(NamedTuple):
    """One provider's rows of a curve, by sequence length."""

    key: Family
    rows: dict[int, Row]

    @property
    def mask(self) -> str:
        return ", ".join(filter(None, ("causal" if self.key.causal else "full", self.key.extras)))

    @property
    def best(self) -> float:
        """The largest share of the peak."""
        return max(row["peak_share"] for row in self.rows.values())


def sweep_lines(found: dict[Family, dict[str, list[Row]]], provider: str) -> list[SweepLine]:
    """Of the curves (see :func:`curves`) that the baseline has too."""
    kept = [(key, byname[provider]) for key, byname in found.items() if provider in byname and BASELINE in byname]
    kept.sort(key=lambda item: str(item[0]))
    return [SweepLine(key, {row["seqlen_q"]: row for row in rows}) for key, rows in kept]


def sweep_table(rows: Sequence[Row], provider: str) -> Table | None:
    """The provider's ratio to the baseline over sequence length, one line a curve."""
    lines = sweep_lines(curves(rows), provider)
    if not lines:
        return None
    lengths = sorted({length for line in lines for length in line.rows})
    table = Table(title=f"{provider}: times faster than F.sdpa, by sequence length", title_justify="left")
    for column in ("dtype", "pass", "head_dim", "mask"):
        table.add_column(column)
    for length in lengths:
        table.add_column(str(length), justify="right")
    table.add_column("of peak", justify="right")
    for line in lines:
        points = [line.rows.get(n) for n in lengths]
        cells = ["" if row is None else ratio(row.get("ratio")) + "[yellow]~[/]" * noisy(row) for row in points]
        table.add_row(line.key.dtype, line.key.pass_name, str(line.key.head_dim), line.mask, *cells, f"{line.best:.0%}")
    return table


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """The power of the length that the values grow with: slope of the log-log line through the upper half."""
    points = [(n, v) for n, v in zip(lengths, values, strict=True) if v > 0]
    points = points[len(points) // 2 :]
    if len(points) < 3:
        return None
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])


class Sizes(NamedTuple):
    """What rows of one set share that differ in their mask alone."""

    tags: tuple[str, ...]
    shape: str
    dtype: str
    pass_name: str


def costs(rows: Iterable[Row]) -> dict[Sizes, dict[str, list[tuple[float, float]]]]:
    """{sizes: {provider: (share of the scores that are live, cost of a live score)}}, by share.

    The cost is relative to our call without the mask, in the same rounds: 1 where a mask costs what it leaves.
    """
    found: dict[Sizes, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.get("cost") is not None and not row["provider"].endswith("-plain"):
            heads = "/".join(dict.fromkeys((str(row["heads_q"]), str(row["heads_k"]))))
            shape = f"{row['batch']}x{heads}x{row['seqlen_q']}x{row['head_dim']}"
            found[Sizes(tuple(row["tags"]), shape, row["dtype"], row["pass"])][row["provider"]].append(
                (row["live"], row["cost"])
            )
    return {sizes: {name: sorted(line) for name, line in lines.items()} for sizes, lines in found.items()}


def cost_table(rows: Iterable[Row]) -> Table | None:
    """Time for each live score, against that of our call without the mask."""
    found = costs(rows)
    if not found:
        return None
    names = list(dict.fromkeys(name for lines in found.values() for name in lines))
    title = "time per live score, ours without the mask = 1 (streaming: the window alone)"
    table = Table(title=title, title_justify="left")
    for column in ("set", "batch x heads x length x head_dim", "dtype", "pass"):
        table.add_column(column)
    for column in ("live", *names):
        table.add_column(column, justify="right")
    for sizes, lines in found.items():
        for live in sorted({live for line in lines.values() for live, _ in line}):
            cells = [next((f"{cost:.2f}" for x, cost in lines.get(n, []) if x == live), "") for n in names]
            table.add_row(", ".join(sizes.tags), *sizes[1:], share(live), *cells)
        table.add_section()
    return table


def growth_table(rows: Sequence[Row]) -> Table:
    """Fitted exponents of time and memory for curves of one fixed batch and head count."""
    table = Table(title="growth with the sequence length L (fit over the longer half)", title_justify="left")
    for column in ("curve", "provider", "time", "memory"):
        table.add_column(column)
    for key, byname in curves(rows).items():
        for name, curve in byname.items():
            if len({row["batch"] * row["heads_q"] for row in curve}) > 1:
                continue
            lengths = [row["seqlen_q"] for row in curve]
            fits = [exponent(lengths, [row.get(f) or 0.0 for row in curve]) for f in ("seconds", "memory")]
            cells = ["" if e is None else f"L^{e:.2f}" for e in fits]
            table.add_row(
                f"{key.dtype} {key.pass_name} D{key.head_dim}{' causal' * key.causal} {key.extras}".rstrip(),
                name,
                *cells,
            )
    return table


def overhead_table(rows: Sequence[Row]) -> Table:
    """Short calls: what the Python above the operator costs."""
    table = Table(title="a short call", title_justify="left")
    for column in ("pass", "provider", "time", f"vs {BASELINE}", "above its operator"):
        table.add_column(column, justify="right" if column not in ("pass", "provider") else "left")
    times = {(row["pass"], row["provider"]): row["seconds"] for row in rows if row.get("seconds") is not None}
    for row in rows:
        if row.get("seconds") is None:
            continue
        bare = times.get((row["pass"], f"{row['provider']}-op"))
        above = "" if bare is None else f"{(row['seconds'] - bare) * 1e6:+.1f} us"
        faster = ratio(row["ratio"], row["provider"] == BASELINE)
        table.add_row(row["pass"], row["provider"], duration(row["seconds"]), faster, above)
    return table


def summary(console: Console, rows: Sequence[Row], full: bool = False) -> None:
    """The tables that suit the rows: short ones for curves, line by line for the rest, then what failed."""
    in_curve = {id(row) for byname in curves(rows).values() for curve in byname.values() for row in curve}
    rest = [row for row in rows if id(row) not in in_curve]
    for provider in dict.fromkeys(row["provider"] for row in rows if is_ours(row["provider"])):
        if (table := sweep_table(rows, provider)) is not None:
            console.print(table)
    if (table := cost_table(rows)) is not None:
        console.print(table)
    growing = [
        row for row in rows if {"growth", "streaming"} & {*row["tags"]} and not row["provider"].endswith("-plain")
    ]
    if curves(growing):
        console.print(growth_table(growing))
    if any("launch-overhead" in row["tags"] for row in rows):
        console.print(overhead_table([row for row in rows if "launch-overhead" in row["tags"]]))
    shown = rows if full else [row for row in rest if row["status"] != "refused"]
    if shown:
        console.print(row_table(shown))
    refused = sum(row["status"] == "refused" for row in rows)
    if refused and not full:
        console.print(f"{refused} rows were refused by their provider (--full shows why)")
    if text := verdict(rows):
        console.print(text)
    doubtful = sum(row["status"] == "ok" and noisy(row) for row in rows)
    if doubtful:
        console.print(f"[yellow]{doubtful} rows have a ~: {NOISY}[/]")
    for row in rows:
        if row["status"] in FAILED:
            console.print(f"{escape(row['case'])} {row['pass']} {row['provider']}: {status(row)}")


def verdict(rows: Iterable[Row]) -> str:
    """Our rows against F.sdpa in a sentence; empty where none has a ratio."""
    ratios = sorted(row["ratio"] for row in rows if row.get("ratio") is not None and is_ours(row["provider"]))
    if not ratios:
        return ""
    middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return (
        f"{len(ratios)} rows against F.sdpa: {ratios[0]:.2f}x to {ratios[-1]:.2f}x, geometric mean {middle:.2f}x, "
        f"{sum(r < 1.0 for r in ratios)} slower than it"
    )


@dataclass(frozen=True)
class Change:
    """One measurement in two runs. ``factor`` > 1: faster in the new one."""

    label: str
    base: float
    new: float
    factor: float


def comparison(
    base: Iterable[Row], new: Iterable[Row], by: str, providers: Sequence[str] | None = None
) -> list[Change]:
    """Rows of both runs, matched by problem, pass and provider; ``by`` "ratio" (to F.sdpa in the same run) or "time".

    The ratio is the sounder measure: both sides of it met the same noise. Without ``providers``: attnkern's.
    """

    def index(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
        fields = (
            "case",
            "seqlen_q",
            "seqlen_k",
            "batch",
            "heads_q",
            "heads_k",
            "head_dim",
            "dtype",
            "pass",
            "provider",
        )
        return {tuple(row.get(f) for f in fields): row for row in rows if row.get("seconds") is not None}

    old, changes = index(base), []
    for key, row in index(new).items():
        name = row["provider"]
        if key not in old or (name not in providers if providers else not is_ours(name)):
            continue
        if by == "ratio":
            before, after = old[key].get("ratio"), row.get("ratio")
            if before is None or after is None:
                continue
            factor = after / before
        else:
            before, after = old[key]["seconds"], row["seconds"]
            factor = before / after
        changes.append(Change(f"{row['case']} {row['pass']} {name}", before, after, factor))
    return changes
