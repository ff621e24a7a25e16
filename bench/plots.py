"""Pictures of a run: first the speed-up over F.sdpa, which noise moves least, then the share of the peak, memory.
Of a run of targets the shares alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MultipleLocator, NullLocator

from . import targets
from .provider import BASELINE, PASSES
from .record import Row
from .report import NOISY, Family, Sizes, costs, curves, is_ours, noisy

# Colour-blind safe (Okabe and Ito); ours strong, torch's muted.
STYLES: dict[str, tuple[str, str]] = {
    "cpu": ("#D55E00", "o"),
    "cuda": ("#D55E00", "o"),
    "triton": ("#CC79A7", "D"),
    "cpu-op": ("#E69F00", "v"),
    "cpu-bool": ("#E69F00", "P"),
    "cuda-bool": ("#E69F00", "P"),
    "triton-bool": ("#F0A3D0", "P"),
    "cpu-plain": ("#888888", "*"),
    "cuda-plain": ("#888888", "*"),
    "flex": ("#009E73", "X"),
    "torch-varlen": ("#56B4E9", "^"),
    "reference": ("#8C6D5A", "x"),
    "attnkern": ("#D55E00", "o"),
    BASELINE: ("#0072B2", "s"),
    "sdpa-flash": ("#56B4E9", "^"),
    "sdpa-efficient": ("#009E73", "<"),
    "sdpa-cudnn": ("#6A51A3", ">"),
    "sdpa-math": ("#999999", "."),
    "sdpa-op": ("#56B4E9", "v"),
}
LABELS = {
    BASELINE: "F.sdpa (torch's choice)",
    "cpu": "attnkern cpu",
    "cuda": "attnkern cuda",
    "triton": "attnkern triton",
    "cpu-bool": "attnkern cpu, dense bool mask",
    "cuda-bool": "attnkern cuda, dense bool mask",
    "triton-bool": "attnkern triton, dense bool mask",
    "cpu-plain": "attnkern cpu, without the mask",
    "cuda-plain": "attnkern cuda, without the mask",
    "flex": "FlexAttention, compiled",
    "torch-varlen": "torch's varlen_attn",
}
CACHES = {BASELINE: "padded, F.sdpa", f"{BASELINE}-gqa": "padded, F.sdpa with enable_gqa"}
DISTURBED = 0.1  # of the steps of a stream, in which other processes may take CPU time before a row is marked
DISTURBED_ROW = f"a row in which other processes took CPU time in more than {DISTURBED:.0%} of the steps."


MAX_BARS = 150
TALL = 3.0  # times our call without the mask: what costs more is named at the top of the picture
SHAPES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # a colour for each head size
RIVAL = "#8A8A8A"
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DARK_PAGE = "#16181c"
_DARK: dict[Any, Any] = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#dddddd"
)
_DARK |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), DARK_PAGE)


class Picture(NamedTuple):
    """``make(narrow, footer)`` draws it: narrow is one column of panels, for a telephone."""

    kind: str
    title: str
    caption: str
    make: Callable[[bool, str], Figure]


class Panel(NamedTuple):
    title: str
    draw: Callable[[Axes], None]


def pictures(rows: Sequence[Row]) -> list[Picture]:
    """Those that the rows allow, in the order in which to look at them."""
    if goals := targets.rows_by_target(rows):
        caption = f"Of the peak of a loop on registers, decoding of a read. {targets.counts(goals)}."
        rivals = {(row["case"], row["pass"]): row for row in rows if row["provider"] == BASELINE}
        return [Picture("goals", "Shares and targets", caption, partial(_goals, goals, rivals))]
    found = curves(rows)
    made = []
    for kind, (field, title, caption) in CURVES.items():
        if any(row.get(field) for byname in found.values() for curve in byname.values() for row in curve):
            made.append(Picture(kind, title, caption, partial(_curves, found, kind)))
    shares = {sizes: lines for sizes, lines in costs(rows).items() if any(len(line) > 1 for line in lines.values())}
    if shares:
        title = "Time over the share of the scores that the mask leaves"
        made.append(
            Picture("live", title, "On the dashed line a call costs what is live and no more.", partial(_live, shares))
        )
    served = [row for row in rows if row.get("cache_bytes") is not None]
    if served:
        title, caption = "A server's stream", "Latency: the mark is the median, the line ends at the 99th percentile."
        made.append(Picture("serve", title, f"{caption} Hollow: {DISTURBED_ROW}", partial(_serve, served)))
    whole = [row for row in rows if row.get("attention_share") is not None and row not in served]
    if whole:
        title, caption = "What a model gains", "At the right: times faster, and how much it would be without attention."
        made.append(Picture("models", title, f"{caption} Hollow: {NOISY}", partial(_models, whole)))
    drawn = {id(row) for byname in found.values() for curve in byname.values() for row in curve}
    drawn |= {id(row) for row in (*whole, *served)}
    rest = [row for row in rows if id(row) not in drawn and row.get("ratio") is not None]
    if 0 < len(rest) <= MAX_BARS:
        made.append(Picture("bars", "Times faster than F.sdpa", f"Hollow: {NOISY}", partial(_bars, rest)))
    return made


def draw(rows: Sequence[Row], runs: Sequence[dict[str, Any]], stem: Path) -> list[Path]:
    """Writes ``<stem>-<kind>`` (.png and .svg) for each picture."""
    written: list[Path] = []
    for picture in pictures(rows):
        figure = picture.make(False, f"{picture.caption}\n{_footer(runs)}")
        for suffix in ("png", "svg"):
            written.append(stem.with_name(f"{stem.name}-{picture.kind}.{suffix}"))
            figure.savefig(written[-1], dpi=130)
        plt.close(figure)
    return written


def themed(picture: Picture, *, narrow: bool, dark: bool) -> str:
    """The picture as SVG for a page that has its caption and its machine as text."""
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "attnkern", **(_DARK if dark else {})}):
        figure, text = picture.make(narrow, ""), io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
    return text.getvalue()


def _footer(runs: Sequence[dict[str, Any]]) -> str:
    return "\n".join((machine_line(runs[-1]), str(runs[-1].get("command")))) if runs else ""


def machine_line(run: dict[str, Any]) -> str:
    """What ran it, on one line."""
    isa = f", {run['cpu_isa']}" if run.get("cpu_isa") else ""
    code = f"code {run.get('code')}"
    if run.get("git"):
        code = f"git {run['git']}{' + changes' * bool(run.get('dirty'))}"
    return (
        f"{run.get('device')}{isa}, {run.get('threads')} threads | torch {run.get('torch')}, "
        f"attnkern {run.get('attnkern')}, {code} | {str(run.get('date')).replace('T', ' ').replace('+00:00', ' UTC')}"
    )


def _style(name: str) -> dict[str, Any]:
    colour, marker = STYLES.get(name, ("#000000", "+"))
    ours = is_ours(name)
    return {
        "color": colour,
        "marker": marker,
        "markersize": 5 if ours else 4,
        "linewidth": 2.2 if ours else 1.4,
        "zorder": 3 if ours else 2,
        "label": LABELS.get(name, name),
    }


def _grid(panels: Sequence[Panel], columns: int, narrow: bool, footer: str, *, x: str, y: str, share_y: bool) -> Figure:
    """The panels line by line, a legend above them, the footer below."""
    columns = 1 if narrow else columns
    lines = -(-len(panels) // columns)
    width, height = (4.2, 2.6) if narrow else (max(4.6 * columns, 7.0), 2.9)
    figure = plt.figure(figsize=(width, height * lines + 1.2), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=share_y, squeeze=False)
    for n, axes in enumerate(grid.flat):
        if n >= len(panels):
            axes.set_axis_off()
            continue
        panels[n].draw(axes)
        axes.set_title(panels[n].title, fontsize=10, fontweight="bold", loc="left")
        axes.tick_params(labelsize=8.5)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if n % columns == 0:
            axes.set_ylabel(y, fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel(x, fontsize=9)
    handles = {str(h.get_label()): h for axes in figure.axes for h in axes.get_legend_handles_labels()[0]}
    ncols = min(2 if narrow else 3, len(handles))
    style: dict[str, Any] = {"loc": "outside upper left", "ncols": ncols, "fontsize": 8.5, "frameon": False}
    figure.legend(list(handles.values()), list(handles), **style)
    if footer:
        figure.supxlabel(footer, fontsize=7, color="#555555", x=0.01, ha="left", wrap=True)
    return figure


# kind: (field of a row, title, caption)
CURVES = {
    "speedup": (
        "ratio",
        "Times faster than F.sdpa",
        f"Each point is the median of the ratios within rounds, in which both were timed in turn; its bar spans the "
        f"middle 60% of the rounds.\nHollow: {NOISY}",
    ),
    "share": (
        "peak_share",
        "Share of the machine's peak",
        f"The peak is timed in the rounds of each row, not at another moment; grey is F.sdpa.\nHollow: {NOISY}",
    ),
    "memory": ("memory", "Memory that a call adds at its peak", "Results included; grey is F.sdpa."),
}


def _curves(found: dict[Family, dict[str, list[Row]]], kind: str, narrow: bool, footer: str) -> Figure:
    """Over sequence length, a panel for each of our providers, pass and dtype, a line for each head size and mask."""
    names = {name for byname in found.values() for name in byname} - {BASELINE}
    names = {name for name in names if is_ours(name)} or names
    places = {(name, key.pass_name, key.dtype) for key, byname in found.items() for name in byname if name in names}
    order = sorted(places, key=lambda p: (p[0], PASSES.index(p[1]), list(DTYPES).index(p[2])))
    shapes = sorted({(key.head_dim, key.extras) for key in found})
    colours = {shape: SHAPES[n % len(SHAPES)] for n, shape in enumerate(shapes)}
    panels = []
    for name, pass_name, dtype in order:
        parts = (LABELS.get(name, name) if len(names) > 1 else "", DTYPES[dtype], _pass_label(pass_name))
        lines = {key: by for key, by in found.items() if key[:2] == (dtype, pass_name) and name in by}
        panels.append(Panel(", ".join(filter(None, parts)), partial(_panel, lines, name, kind, colours)))
    columns = len({dtype for *_, dtype in order})
    labels = {"speedup": "times faster than F.sdpa", "share": f"share of {_peak(found)}", "memory": "memory"}
    return _grid(panels, columns, narrow, footer, x="sequence length", y=labels[kind], share_y=True)


def _peak(found: dict[Family, dict[str, list[Row]]]) -> str:
    kinds = {row.get("peak") for byname in found.values() for curve in byname.values() for row in curve} - {None}
    return f"the peak ({', '.join(sorted(map(str, kinds)))})" if kinds else "the peak"


def _panel(
    lines: dict[Family, dict[str, list[Row]]], name: str, kind: str, colours: dict[Any, str], axes: Axes
) -> None:
    field = CURVES[kind][0]
    for key, byname in lines.items():
        dash, colour = ("--" if key.causal else "-"), colours[key.head_dim, key.extras]
        if kind != "speedup" and BASELINE in byname:
            points = [(row["seqlen_q"], row[field]) for row in byname[BASELINE] if row.get(field)]
            axes.plot(*zip(*points, strict=True), color=RIVAL, linestyle=dash, linewidth=1.1, zorder=2)
        curve = [row for row in byname[name] if row.get(field)]
        if not curve:
            continue
        lengths, values = [row["seqlen_q"] for row in curve], [row[field] for row in curve]
        parts = (f"head size {key.head_dim}", "causal" if key.causal else "full", key.extras)
        label = ", ".join(filter(None, parts))
        marker = "s" if key.causal else "o"
        axes.plot(lengths, values, color=colour, linestyle=dash, linewidth=1.7, zorder=3)
        axes.plot([], [], color=colour, linestyle=dash, marker=marker, markersize=5, label=label)
        for hollow in (False, True):
            points = [(row["seqlen_q"], row[field]) for row in curve if (kind != "memory" and noisy(row)) == hollow]
            if points:  # memory is counted, not timed
                face = axes.get_facecolor() if hollow else colour
                x, y = zip(*points, strict=True)
                axes.plot(x, y, marker, markersize=5.5, zorder=4, color=colour, markerfacecolor=face)
        bars = [(row["seqlen_q"], row["ratio_p20"], row["ratio_p80"]) for row in curve if row.get("ratio_p20")]
        if kind == "speedup" and bars:
            axes.vlines(*zip(*bars, strict=True), color=colour, linewidth=1)
    lengths = sorted({row["seqlen_q"] for byname in lines.values() for row in byname[name]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    if kind == "share":
        axes.axhline(1.0, color=RIVAL, linewidth=1.2, linestyle=":", label="the peak")
        axes.yaxis.set_major_locator(MultipleLocator(0.25))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_ylim(0, max(1.05, axes.get_ylim()[1]))
        axes.plot([], [], color=RIVAL, linewidth=1.1, label="F.sdpa")
    elif kind == "speedup":
        axes.axhline(1.0, color=RIVAL, linewidth=1.6, label="F.sdpa = 1")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    else:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(_bytes))
        axes.plot([], [], color=RIVAL, linewidth=1.1, label="F.sdpa")


def _bytes(value: float, _position: object = None) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value / 2**10:g} KiB"


def _live(found: dict[Sizes, dict[str, list[tuple[float, float]]]], narrow: bool, footer: str) -> Figure:
    """Time over the share of scores that is live: a panel for each pass, size and dtype."""
    columns = list(dict.fromkeys(sizes[:-1] for sizes in found))
    order = sorted(found, key=lambda sizes: (PASSES.index(sizes.pass_name), columns.index(sizes[:-1])))
    panels = []
    for sizes in order:
        title = ", ".join((*sizes.tags, *sizes[1:-1], _pass_label(sizes.pass_name)))
        panels.append(Panel(title, partial(_live_panel, found[sizes])))
    x, y = "share of scores that is live", "time, ours without the mask = 1"
    return _grid(panels, len(columns), narrow, footer, x=x, y=y, share_y=False)


def _live_panel(byname: dict[str, list[tuple[float, float]]], axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color=RIVAL, linewidth=1, linestyle="--", label="what is live, and no more")
    beyond, top = [], 1.0
    for name, points in byname.items():
        style, times = _style(name), [live * cost for live, cost in points]
        axes.plot([live for live, _ in points], times, **{**style, "linewidth": 0.6 * style["linewidth"]})
        if max(times) > TALL:
            beyond.append(f"{LABELS.get(name, name)}: up to {max(times):.1f}")
        top = max(top, *times)
    axes.set_ylim(0, 1.05 * min(top, TALL))
    axes.set_xlim(0, 1.04)
    if beyond:
        axes.text(0.02, 0.98, "\n".join(beyond), transform=axes.transAxes, va="top", fontsize=7.5)


def _pass_label(pass_name: str) -> str:
    return "training" if pass_name == "both" else pass_name


def _bars(rows: Sequence[Row], narrow: bool, footer: str) -> Figure:
    """Times faster than the baseline, a bar for every case, pass and provider."""
    groups = list(dict.fromkeys((row["case"], row["pass"]) for row in rows))
    names = [n for n in dict.fromkeys(row["provider"] for row in rows) if n != BASELINE]
    by_place = {(row["case"], row["pass"], row["provider"]): row for row in rows}
    figure, axes = plt.subplots(
        figsize=(5.2 if narrow else 9, 0.24 * len(groups) * max(1, len(names)) + 1.8), layout="constrained"
    )
    thickness = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        positions = [g + (i - (len(names) - 1) / 2) * thickness for g in range(len(groups))]
        placed = [by_place.get((*group, name)) for group in groups]
        values = [row["ratio"] if row else 0.0 for row in placed]
        style = _style(name)
        bars = axes.barh(positions, values, height=thickness * 0.9, color=style["color"], label=style["label"])
        for bar, row in zip(bars, placed, strict=True):
            if row and noisy(row):
                bar.set(facecolor="none", edgecolor=style["color"])
        axes.bar_label(bars, [f"{v:.2f}" if v else "" for v in values], padding=2, fontsize=7)
    axes.axvline(1.0, color=STYLES[BASELINE][0], linewidth=1.4, linestyle="--", label=LABELS[BASELINE])
    axes.set_yticks(range(len(groups)), [f"{case}, {pass_name}" for case, pass_name in groups], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than F.sdpa", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=2 if narrow else 4, fontsize=9, frameon=False)
    if footer:
        figure.supxlabel(footer, fontsize=7, color="#555555", x=0.01, ha="left", wrap=True)
    return figure


def _goals(found: dict[targets.Target, Row], rivals: dict[tuple[str, str], Row], narrow: bool, footer: str) -> Figure:
    """The share of each row with a target, its target and F.sdpa's share: a panel for each dtype."""
    dtypes = [dtype for dtype in DTYPES if any(target.case.dtype == dtype for target in found)]
    labels = list(dict.fromkeys(target.label.partition(" ")[2] for target in found))
    lines = len(dtypes) if narrow else 1
    height = 0.21 * len(labels) * lines + 1.6
    figure = plt.figure(figsize=(5.2 if narrow else 3.4 * len(dtypes) + 2.6, height), layout="constrained")
    grid = figure.subplots(lines, len(dtypes) // lines, sharex=True, sharey=True, squeeze=False)
    colour, grey = STYLES[targets.OURS][0], RIVAL
    for axes, dtype in zip(grid.flat, dtypes, strict=True):
        for target, row in found.items():
            if target.case.dtype != dtype or row.get("seconds") is None:
                continue
            y, reached = labels.index(target.label.partition(" ")[2]), targets.status_of(target, row) == "reached"
            rival = rivals.get((row["case"], row["pass"]), {}).get(target.field)
            if rival is not None:
                axes.plot(rival, y, ".", color=grey, markersize=6)
            if wanted := target.wanted(row["isa"]):
                axes.plot(wanted, y, "|", color=STYLES[BASELINE][0], markersize=10, markeredgewidth=1.6)
            axes.plot(row[target.field], y, "o", color=colour, markerfacecolor=colour if reached else "none")
        axes.set_title(DTYPES[dtype], fontsize=10, fontweight="bold", loc="left")
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_xlim(0, 1.02)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel("share of the measured peak (one query: of a read)", fontsize=8)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].invert_yaxis()
    handles = [
        Line2D([], [], linestyle="", marker="o", color=colour, label="attnkern, target reached"),
        Line2D([], [], linestyle="", marker="o", color=colour, markerfacecolor="none", label="missed"),
        Line2D([], [], linestyle="", marker="|", color=STYLES[BASELINE][0], markeredgewidth=1.6, label="target"),
        Line2D([], [], linestyle="", marker=".", color=grey, label="F.sdpa"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2 if narrow else 4, fontsize=9, frameon=False)
    if footer:
        figure.supxlabel(footer, fontsize=7, color="#555555", x=0.01, ha="left", wrap=True)
    return figure


def _models(rows: Sequence[Row], narrow: bool, footer: str) -> Figure:
    """The time of whole models, F.sdpa's = 1: all the rest, then attention in colour. A panel for each dtype."""
    by_place = {(row["dtype"], row["model"], row["pass"], row["provider"]): row for row in rows}
    groups = list(dict.fromkeys((row["model"], row["pass"]) for row in rows))
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    height = 0.42 * len(groups) * (len(dtypes) if narrow else 1) + 1.8
    figure = plt.figure(figsize=(5.2 if narrow else 4.9 * len(dtypes) + 1.6, height), layout="constrained")
    lines = len(dtypes) if narrow else 1
    grid = figure.subplots(lines, len(dtypes) // lines, sharex=True, sharey=True, squeeze=False)
    for axes, dtype in zip(grid.flat, dtypes, strict=True):
        for n, (model, pass_name) in enumerate(groups):
            for offset, name in ((-0.2, BASELINE), (0.2, "attnkern")):
                row = by_place.get((dtype, model, pass_name, name))
                if row is None:
                    continue
                whole, colour = 1 / row["ratio"], _style(name)["color"]
                share = max(0.0, row["attention_share"]) * whole
                face = "none" if noisy(row) else colour
                axes.barh(n + offset, whole - share, height=0.36, facecolor=RIVAL, alpha=0.35)
                axes.barh(n + offset, share, left=whole - share, height=0.36, facecolor=face, edgecolor=colour)
                if name != BASELINE:
                    most = by_place[dtype, model, pass_name, BASELINE]["limit"]
                    axes.text(max(1, whole) + 0.02, n, f"{row['ratio']:.2f} of {most:.2f}", va="center", fontsize=7.5)
        axes.set_title(DTYPES[dtype], fontsize=10, fontweight="bold", loc="left")
        axes.set_yticks(range(len(groups)), [f"{model}, {pass_name}" for model, pass_name in groups], fontsize=8)
        axes.set_xlim(0, max(1.0, *(1 / row["ratio"] for row in rows)) + 0.28)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].invert_yaxis()
    for axes in grid[-1]:
        axes.set_xlabel("time, F.sdpa = 1", fontsize=9)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=RIVAL, alpha=0.35, label="all but attention"),
        *(
            Rectangle((0, 0), 1, 1, facecolor=_style(name)["color"], label=f"attention, {label}")
            for name, label in ((BASELINE, "F.sdpa"), ("attnkern", "attnkern"))
        ),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    if footer:
        figure.supxlabel(footer, fontsize=7, color="#555555", x=0.01, ha="left", wrap=True)
    return figure


def cache_label(provider: str) -> str:
    """Of a stream's row: how it keeps keys and values."""
    return CACHES.get(provider, f"pages of {provider.rpartition('-')[2]}, attnkern")


def _serve(rows: Sequence[Row], narrow: bool, footer: str) -> Figure:
    """The time of a stream, attention in colour; latencies; the cache's memory. A line of panels for each dtype."""
    names = list(dict.fromkeys(row["provider"] for row in rows))
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    draws = (_stream_time, _stream_latency, _stream_memory)
    shape = (3 * len(dtypes), 1) if narrow else (len(dtypes), 3)
    height = (0.36 * len(names) + 0.75) * shape[0] + 0.9
    figure = plt.figure(figsize=(5.2 if narrow else 11.5, height), layout="constrained")
    grid = figure.subplots(*shape, sharey=True, squeeze=False)
    places = ((dtype, draw) for dtype in dtypes for draw in draws)
    for axes, (dtype, draw) in zip(grid.flat, places, strict=True):
        for row in rows:
            if row["dtype"] == dtype:
                mine = is_ours(row["provider"])
                draw(axes, names.index(row["provider"]), row, STYLES["attnkern" if mine else BASELINE][0])
        axes.set_title(f"{DTYPES[dtype]}: {axes.get_title()}", fontsize=10, fontweight="bold", loc="left")
        axes.set_title("")
        axes.set_yticks(range(len(names)), [cache_label(name) for name in names], fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].invert_yaxis()
    ours, theirs = (STYLES[name][0] for name in ("attnkern", BASELINE))
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=theirs, label="F.sdpa's attention; live tokens"),
        Rectangle((0, 0), 1, 1, facecolor=ours, label="attnkern's attention; live tokens"),
        Rectangle((0, 0), 1, 1, facecolor=RIVAL, alpha=0.35, label="other time; memory without live tokens"),
        Line2D([], [], linestyle="", marker="o", color=RIVAL, label="between tokens"),
        Line2D([], [], linestyle="", marker="s", color=RIVAL, label="to the first token"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=1 if narrow else 3, fontsize=8.5, frameon=False)
    if footer:
        figure.supxlabel(footer, fontsize=7, color="#555555", x=0.01, ha="left", wrap=True)
    return figure


def _stacked(axes: Axes, y: int, rest: float, coloured: float, colour: str, row: Row) -> None:
    face = "none" if noisy(row) else colour
    axes.barh(y, rest, height=0.6, facecolor=RIVAL, alpha=0.35)
    axes.barh(y, coloured, left=rest, height=0.6, facecolor=face, edgecolor=colour)


def _stream_time(axes: Axes, y: int, row: Row, colour: str) -> None:
    spent = row["attention_seconds"]
    _stacked(axes, y, row["seconds"] - spent, spent, colour, row)
    axes.set_title("time, s")


def _stream_latency(axes: Axes, y: int, row: Row, colour: str) -> None:
    for marker, kind, offset in (("o", "between", -0.15), ("s", "first", 0.15)):
        low, high = row[f"{kind}_p50"], row[f"{kind}_p99"]
        axes.plot([low, high], [y + offset] * 2, color=colour, linewidth=1.4)
        face = "none" if noisy(row) else colour
        axes.plot(low, y + offset, marker, color=colour, markerfacecolor=face, markersize=5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("latency, s")


def _stream_memory(axes: Axes, y: int, row: Row, colour: str) -> None:
    live = row["live_bytes"] / 2**20
    axes.barh(y, live, height=0.6, facecolor=colour)
    axes.barh(y, row["cache_bytes"] / 2**20 - live, left=live, height=0.6, facecolor=RIVAL, alpha=0.35)
    axes.set_title("cache, MiB")
