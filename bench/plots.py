"""PNG and SVG pictures of a run: speed and memory over sequence length, bars for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from .providers import BASELINE, PASSES
from .record import Row
from .report import Family, Sizes, costs, curves, is_ours

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


MAX_BARS = 150
TALL = 3.0  # times our call without the mask: what costs more is named at the top of the picture


def draw(rows: Sequence[Row], runs: Sequence[dict[str, Any]], stem: Path) -> list[Path]:
    """Writes ``<stem>-speed``, ``-memory``, ``-live`` and ``-bars`` (.png and .svg) as the rows allow."""
    footer = _footer(runs)
    written: list[Path] = []
    found = curves(rows)
    if found:
        written += _save(_curves(found, footer, "speed"), stem, "speed")
        if any(row.get("memory") for byname in found.values() for curve in byname.values() for row in curve):
            written += _save(_curves(found, footer, "memory"), stem, "memory")
    shares = {sizes: lines for sizes, lines in costs(rows).items() if any(len(line) > 1 for line in lines.values())}
    if shares:
        written += _save(_live(shares, footer), stem, "live")
    drawn = {id(row) for byname in found.values() for curve in byname.values() for row in curve}
    rest = [row for row in rows if id(row) not in drawn and row.get("ratio") is not None and "goal" not in row]
    if 0 < len(rest) <= MAX_BARS:
        written += _save(_bars(rest, footer), stem, "bars")
    return written


def _footer(runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return ""
    run = runs[-1]
    isa = f", {run['cpu_isa']}" if run.get("cpu_isa") else ""
    code = f"code {run.get('code')}"
    if run.get("git"):
        code = f"git {run['git']}{' + changes' * bool(run.get('dirty'))}"
    return (
        f"{run.get('device')}{isa}, {run.get('threads')} threads | torch {run.get('torch')}, "
        f"attnkern {run.get('attnkern')}, {code} | {run.get('date')}\n{run.get('command')}"
    )


def _save(figure: Figure, stem: Path, kind: str) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}-{kind}.{suffix}") for suffix in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=130)
    plt.close(figure)
    return paths


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


def _curves(found: dict[Family, dict[str, list[Row]]], footer: str, kind: str) -> Figure:
    """A grid: a line of panels for each dtype and pass, a column for each head_dim and mask."""
    lines = sorted({key[:2] for key in found}, key=lambda k: (k[0], PASSES.index(k[1])))
    columns = sorted({key[2:] for key in found})
    by_place = {(key[:2], key[2:]): byname for key, byname in found.items()}
    width, height = max(6.5, 3.7 * len(columns) + 0.6), 2.75 * len(lines) + 1.7
    figure = plt.figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(len(lines), len(columns), sharex=True, sharey="row", squeeze=False)
    for axes_line, line in zip(grid, lines, strict=True):
        for axes, column in zip(axes_line, columns, strict=True):
            byname = by_place.get((line, column))
            if byname is None:
                axes.set_axis_off()
                continue
            _panel(axes, byname, kind)
            dim, causal, extras = column
            parts = filter(None, (*line, f"head_dim {dim}", "causal" if causal else "full", extras))
            axes.set_title(", ".join(parts), fontsize=9.5)
        if kind == "speed":  # the line shares its scale
            axes_line[0].set_ylim(0, axes_line[0].get_ylim()[1])
        axes_line[0].set_ylabel("FLOP/s" if kind == "speed" else "peak memory growth", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("sequence length", fontsize=9)
    handles = {str(h.get_label()): h for axes in figure.axes for h in axes.get_legend_handles_labels()[0]}
    legend: dict[str, Any] = {
        "loc": "outside upper center",
        "ncols": min(6, len(handles)),
        "fontsize": 9,
        "frameon": False,
    }
    figure.legend(list(handles.values()), list(handles), **legend)
    figure.supxlabel(footer, fontsize=7.5, color="#555555")
    return figure


def _panel(axes: Axes, byname: dict[str, list[Row]], kind: str) -> None:
    for name, curve in byname.items():
        points = [(row["seqlen_q"], row.get("flops_per_second" if kind == "speed" else "memory")) for row in curve]
        points = [(n, v) for n, v in points if v]
        if points:
            axes.plot(*zip(*points, strict=True), **_style(name))
    axes.set_xscale("log", base=2)
    lengths = sorted({row["seqlen_q"] for curve in byname.values() for row in curve})
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    if kind == "speed":
        sample = next(row for curve in byname.values() for row in curve)
        if sample.get("peak_share"):
            peak = sample["flops_per_second"] / sample["peak_share"]
            axes.axhline(peak, color="#333333", linewidth=1, linestyle="--", label=f"measured peak ({sample['peak']})")
        axes.yaxis.set_major_formatter(FuncFormatter(_flops))
    else:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(_bytes))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _flops(value: float, _position: object = None) -> str:
    return f"{value / 1e12:g} T" if value >= 1e12 else f"{value / 1e9:g} G"


def _bytes(value: float, _position: object = None) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value / 2**10:g} KiB"


def _live(found: dict[Sizes, dict[str, list[tuple[float, float]]]], footer: str) -> Figure:
    """Time over the share of scores that is live: a line of panels for each pass, a column for each size and dtype."""
    columns = list(dict.fromkeys(sizes[:-1] for sizes in found))
    lines = sorted({sizes.pass_name for sizes in found}, key=PASSES.index)
    figure = plt.figure(figsize=(max(6.5, 4.2 * len(columns) + 0.6), 3.2 * len(lines) + 1.7), layout="constrained")
    grid = figure.subplots(len(lines), len(columns), sharex=True, squeeze=False)
    for axes_line, pass_name in zip(grid, lines, strict=True):
        for axes, column in zip(axes_line, columns, strict=True):
            byname = found.get(Sizes(*column, pass_name))
            if byname is None:
                axes.set_axis_off()
                continue
            axes.plot([0, 1], [0, 1], color="#333333", linewidth=1, linestyle="--", label="what is live, and no more")
            beyond = []
            top = 1.0
            for name, points in byname.items():
                style, times = _style(name), [live * cost for live, cost in points]
                lives = [live for live, _ in points]
                axes.plot(lives, times, **{**style, "linewidth": 0.6 * style["linewidth"]})
                if max(times) > TALL:
                    beyond.append(f"{LABELS.get(name, name)}: up to {max(times):.1f}")
                top = max(top, *times)
            axes.set_ylim(0, 1.05 * min(top, TALL))
            axes.set_xlim(0, 1.04)
            if beyond:
                axes.text(0.02, 0.98, "\n".join(beyond), transform=axes.transAxes, va="top", fontsize=7.5)
            tags, *sizes = column
            axes.set_title(", ".join((*tags, *sizes, _pass_label(pass_name))), fontsize=9.5)
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        axes_line[0].set_ylabel("time, ours without the mask = 1", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("share of scores that is live", fontsize=9)
    handles = {str(h.get_label()): h for axes in figure.axes for h in axes.get_legend_handles_labels()[0]}
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.supxlabel(footer, fontsize=7.5, color="#555555")
    return figure


def _pass_label(pass_name: str) -> str:
    return "training" if pass_name == "both" else pass_name


def _bars(rows: Sequence[Row], footer: str) -> Figure:
    """Times faster than the baseline, a bar for every case, pass and provider."""
    groups = list(dict.fromkeys((row["case"], row["pass"]) for row in rows))
    names = [n for n in dict.fromkeys(row["provider"] for row in rows) if n != BASELINE]
    ratios = {(row["case"], row["pass"], row["provider"]): row["ratio"] for row in rows}
    figure, axes = plt.subplots(figsize=(9, 0.24 * len(groups) * max(1, len(names)) + 1.8), layout="constrained")
    thickness = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        positions = [g + (i - (len(names) - 1) / 2) * thickness for g in range(len(groups))]
        values = [ratios.get((*group, name), 0.0) for group in groups]
        style = _style(name)
        bars = axes.barh(positions, values, height=thickness * 0.9, color=style["color"], label=style["label"])
        axes.bar_label(bars, [f"{v:.2f}" if v else "" for v in values], padding=2, fontsize=7)
    axes.axvline(1.0, color=STYLES[BASELINE][0], linewidth=1.4, linestyle="--", label=LABELS[BASELINE])
    axes.set_yticks(range(len(groups)), [f"{case}, {pass_name}" for case, pass_name in groups], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than F.sdpa", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    figure.supxlabel(footer, fontsize=7.5, color="#555555")
    return figure
