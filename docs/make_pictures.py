"""Draws docs/images/*.svg and speed-light.png and speed-dark.png: python docs/make_pictures.py (needs matplotlib).

With a folder as argument it writes PNG files there instead, to look at. The pictures of speed show bench/results, and
hold a checksum of what they show.
"""

import csv
import hashlib
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from attnkern import masks as make

INK, MUTED = "#222222", "#777777"
FULL, PARTIAL, SKIPPED, MARK = "#9CC9E3", "#F2B872", "#F1F1F1", "#C0392B"
plt.rcParams.update({"font.size": 10, "svg.hashsalt": "attnkern", "axes.edgecolor": MUTED, "text.color": INK})

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
SWEEPS = {"Zen 5": "quick-sweep-cpu-2-threads", "Zen 4": "quick-sweep-cpu-2-threads-zen4"}
MASKED = "models-masks-decode-cpu-2-threads"
LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "muted": "#818b98", "ours": "#c2410c", "other": "#0969da"}
DARK = {"paper": "#0d1117", "ink": "#e6edf3", "muted": "#8b949e", "ours": "#ff9b5e", "other": "#6cb6ff"}

TILE, BLOCK, LENGTH = 64, 96, 384
SEED = 34


def blocks(row, rows, left, right):
    """(begin, end, full?) along the keys for queries [row, row + rows): csrc/common/band.h with offset 0."""

    def clip(begin, end):
        return max(begin, 0), max(0, min(end, LENGTH))

    visited = clip(row - left, row + rows + right)
    all_attend = clip(row + rows - 1 - left, row + 1 + right)
    if all_attend[1] <= all_attend[0]:
        all_attend = visited[1], visited[1]
    at, found = visited[0], []
    while at < visited[1]:
        full = all_attend[0] <= at < all_attend[1]
        end = all_attend[0] if at < all_attend[0] else all_attend[1] if full else visited[1]
        parts = -(-(end - at) // BLOCK)
        size = min(end - at, -(-(end - at) // parts // 2) * 2) if full else min(end - at, BLOCK)
        found.append((at, at + size, full))
        at += size
    return found


def matrix(ax, title, left, right, marked=None):
    ax.add_patch(Rectangle((0, 0), LENGTH, LENGTH, facecolor=SKIPPED, edgecolor="none"))
    for row in range(0, LENGTH, TILE):
        for begin, end, full in blocks(row, TILE, left, right):
            color = FULL if full else PARTIAL
            ax.add_patch(Rectangle((begin, row), end - begin, TILE, facecolor=color, edgecolor="white", linewidth=1.2))
    i = np.array([0, LENGTH])
    for edge in (i - left, i + right + 1):
        ax.plot(edge, i, color=INK, linewidth=1.4, clip_on=True)
    if marked is not None:
        ax.add_patch(Rectangle((0, marked), LENGTH, TILE, facecolor="none", edgecolor=MARK, linewidth=2, zorder=3))
    ax.set(xlim=(0, LENGTH), ylim=(LENGTH, 0), aspect="equal", xlabel="key j", ylabel="query i")
    ax.set_title(title, fontsize=10.5)
    ax.set_xticks(range(0, LENGTH + 1, 128))
    ax.set_yticks(range(0, LENGTH + 1, TILE))


def tiles():
    figure, (causal, window, state) = plt.subplots(1, 3, figsize=(13, 4.6), width_ratios=[1, 1, 1.45])
    row = 256
    matrix(causal, "causal: left = ∞, right = 0", 10**6, 0, marked=row)
    matrix(window, "sliding window: left = 150, right = 0", 150, 0)
    swatches = [
        Rectangle((0, 0), 1, 1, facecolor=color, edgecolor=MUTED, linewidth=0.5) for color in (FULL, PARTIAL, SKIPPED)
    ]
    names = ["full: no mask applied", "partial: masked entry by entry", "skipped: never computed"]
    figure.legend(swatches, names, loc="lower left", bbox_to_anchor=(0.05, 0.0), ncols=3, frameon=False, fontsize=9.5)

    # One query of the marked tile, walked block by block.
    trend = np.linspace(-1.2, 1.0, row + 63)
    scores = trend + 1.1 * np.random.default_rng(SEED).normal(size=len(trend))
    m, total, steps = -np.inf, 0.0, []
    for begin, end, _ in blocks(row, TILE, 10**6, 0):
        part = scores[begin:end]
        new = max(m, part.max())
        correction = np.exp(m - new)
        total = total * correction + np.exp(part - new).sum()
        m = new
        steps.append((begin, min(end, len(scores)), m, total, correction))
    assert np.isclose(m + np.log(total), np.log(np.exp(scores).sum()))

    state.scatter(range(len(scores)), scores, s=5, color="#4C86A8")
    for n, (begin, end, m, total, correction) in enumerate(steps):
        state.plot([begin, end], [m, m], color=MARK, linewidth=2.2)
        if n:
            state.axvline(begin, color=MUTED, linewidth=0.8, linestyle=":")
        lines = [f"m = {m:.2f}", f"l = {total:.1f}", f"O, l × {correction:.2f}" if n else "O, l from 0"]
        state.text((begin + end) / 2, 6.05, "\n".join(lines), ha="center", va="bottom", fontsize=8.8, linespacing=1.35)
    state.set(xlim=(0, len(scores)), ylim=(-4.6, 8.6), xlabel="key j")
    state.set_ylabel("score", labelpad=2)
    state.set_yticks([-4, -2, 0, 2, 4])
    state.set_title(f"running state of query {len(scores) - 1}, one column per block", fontsize=10.5)
    state.text(6, steps[0][2] + 0.2, "m", color=MARK, fontsize=11, fontweight="bold")
    for side in ("top", "right"):
        state.spines[side].set_visible(False)
    figure.tight_layout(rect=(0, 0.06, 1, 1), w_pad=2.0)
    return figure


def lanes():
    figure, ax = plt.subplots(figsize=(10.5, 6.4))
    cell, vectors, per_vector, depth, rows, keys = 0.26, 4, 8, 7, 6, 12
    colors = ["#9CC9E3", "#B7DDB0", "#F2D388", "#D9BBE3"]

    def box(x, y, width, height, color="white", edge=MUTED, line=0.7, z=1):
        ax.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=line, zorder=z))

    def grid(x, y, columns, rows, edge=MUTED):
        right, top = x + columns * cell, y + rows * cell
        style = {"colors": edge, "linewidth": 0.7, "zorder": 2}
        ax.vlines([x + n * cell for n in range(columns + 1)], y, top, **style)
        ax.hlines([y + n * cell for n in range(rows + 1)], x, right, **style)

    def label(x, y, text, size=10, **kwargs):
        ax.text(x, y, text, fontsize=size, **{"ha": "center", "va": "center", **kwargs})

    width = vectors * per_vector * cell
    x_q, y_q = 3.6, 4.4  # Q^T: above
    x_k, y_k = 0.6, 0.6  # K: left
    y_s, used = y_k, 3  # the column of K and row of Q^T that meet
    top = y_s + keys * cell
    first = 3  # first row of the register tile

    lane_count = vectors * per_vector
    grid(x_q, y_q, lane_count, depth)
    for v, color in enumerate(colors):
        x = x_q + v * per_vector * cell
        box(x, y_q + (depth - 1 - used) * cell, per_vector * cell, cell, color, INK, 1.4)
        box(x, top - (first + rows) * cell, per_vector * cell, rows * cell, color, INK, 1.4)
    label(x_q + width / 2, y_q + depth * cell + 0.42, "Qᵀ of the tile: one query per lane, transposed once", 11)
    label(x_q + width / 2, y_q + depth * cell + 0.15, "queries →", 9, color=MUTED)
    label(x_q + width + 0.12, y_q + (depth - 0.5 - used) * cell, "row d: 4 vectors", 9, ha="left")

    box(x_k + used * cell, top - (first + rows) * cell, cell, rows * cell, "#E98B7D")
    grid(x_k, y_k, depth, keys)
    label(x_k + depth * cell / 2, top + 0.42, "K, as it lies in memory", 11)
    label(x_k + depth * cell / 2, top + 0.15, "d →", 9, color=MUTED)
    label(x_k - 0.2, y_k + keys * cell / 2, "keys →", 9, rotation=270, color=MUTED)

    grid(x_q, y_s, lane_count, keys)
    lines = "register tile:\n6 keys × 4 vectors\n= 24 accumulators\n(drawn with 8 lanes)"
    label(x_q + width + 0.12, top - (first + rows / 2) * cell, lines, 9, ha="left")
    label(x_q + width / 2, top + 0.3, "Sᵀ = K Qᵀ: one column per query", 11)

    for key in range(first, first + rows):
        y = top - (key + 0.5) * cell
        style = {"arrowstyle": "-|>", "mutation_scale": 8, "color": "#C0392B", "linewidth": 0.9, "zorder": 5}
        ax.add_patch(FancyArrowPatch((x_k + (used + 1) * cell, y), (x_q - 0.03, y), **style))
    label(
        (x_k + depth * cell + x_q) / 2, top - first * cell + 0.2, "one scalar,\nall lanes", 9, va="bottom", color=MARK
    )

    for v in range(vectors):
        x = x_q + (v + 0.5) * per_vector * cell
        style = {"arrowstyle": "-|>", "mutation_scale": 13, "color": INK, "linewidth": 1.4}
        ax.add_patch(FancyArrowPatch((x, y_k - 0.06), (x, y_k - 0.5), **style))
    label(x_q + width / 2, y_k - 0.72, "maximum m, sum l, rescaling: down the columns, lane by lane", 10.5)
    ax.set(xlim=(0.1, x_q + width + 1.75), ylim=(-0.35, y_q + depth * cell + 0.7), aspect="equal")
    ax.axis("off")
    figure.tight_layout()
    return figure


def masks():
    """Which blocks six of the field's masks skip, mask and compute in full."""
    length = 2048
    drawn = {
        "causal": make.causal(length),
        "padding(left=True)": make.padding([1300], length, length, left=True),
        "prefix_lm": make.prefix_lm(600, length),
        "document, is_causal": make.document(cu_seqlens=[0, 700, 900, 1600, length], is_causal=True),
        "sliding_window, sinks": make.sliding_window(300, 0, length, sinks=64),
        "from_mask_mod: dilated": make.from_mask_mod(
            lambda b, h, q, k: (q >= k) & (q // 128 % 3 == k // 128 % 3), None, None, length, length
        ),
    }
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.4), layout="constrained")
    for n, (ax, (title, mask)) in enumerate(zip(axes.flat, drawn.items(), strict=True)):
        mask.plot(ax=ax, title=f"{title}: {mask.sparsity:.0%} excluded")
        if n != 2:
            ax.get_legend().remove()
    return figure


def rows_of(name):
    with (RESULTS / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def checksum():
    """Of what the pictures of speed show."""
    return hashlib.sha256(
        b"".join((RESULTS / f"{name}.csv").read_bytes() for name in (*SWEEPS.values(), MASKED))
    ).hexdigest()


def speed(colors):
    """Four panels: how many times as fast as F.sdpa, forward and backward; memory; masks."""
    paper, ink, muted = colors["paper"], colors["ink"], colors["muted"]
    style = {"text.color": ink, "axes.edgecolor": muted, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    with plt.rc_context({**style, "axes.facecolor": paper, "figure.facecolor": paper, "savefig.facecolor": paper}):
        figure = plt.figure(figsize=(8, 6.3), layout="constrained")
        axes = np.stack([part.subplots(1, 2) for part in figure.subfigures(2, 1)])  # each row has margins of its own
        for ax, direction in zip(axes[0], ("forward", "backward"), strict=True):
            speedups(ax, direction, colors)
        memory(axes[1][0], colors)
        masked(axes[1][1], colors)
        for ax in axes.flat:
            ax.spines[["top", "right"]].set_visible(False)
        for ax in (*axes[0], axes[1][0]):
            ax.grid(color=muted, alpha=0.25, linewidth=0.6)
            ax.set_xscale("log", base=2)
            ax.set_xticks([128, 256, 512, 1024, 2048, 4096], ["128", "256", "512", "1k", "2k", "4k"])
            ax.minorticks_off()
            ax.set_xlabel("sequence length")
    return figure


def speedups(ax, direction, colors):
    """A line for each machine and dtype: the geometric mean of head sizes 64 and 128, full and causal."""
    for machine, name in SWEEPS.items():
        for dtype, color in (("bf16", colors["ours"]), ("fp32", colors["other"])):
            found = {}
            for row in rows_of(name):
                if (row["provider"], row["dtype"], row["pass"]) == ("cpu", dtype, direction):
                    found.setdefault(int(row["seqlen_q"]), []).append(float(row["ratio"]))
            means = [statistics.geometric_mean(found[n]) for n in sorted(found)]
            look = {"linestyle": "-", "marker": "o"} if machine == "Zen 5" else {"linestyle": "--", "marker": "s"}
            label = f"{machine}, {'bfloat16' if dtype == 'bf16' else 'float32'}"
            ax.plot(sorted(found), means, color=color, markersize=4.5, linewidth=2, label=label, **look)
    ax.axhline(1, color=colors["muted"], linewidth=1.4)
    ax.text(4096, 1.06, "F.sdpa", ha="right", va="bottom", color=colors["muted"], fontsize=9.5)
    ax.set_yscale("log", base=2)
    ax.set_yticks([1, 2, 4, 8], ["1×", "2×", "4×", "8×"])
    ax.set_ylim(0.9, 16)
    ax.set_title(f"{direction}: times as fast as F.sdpa", fontsize=11)
    if direction == "backward":
        ax.legend(frameon=False, fontsize=9.5, loc="upper right", handlelength=2.6)


def memory(ax, colors):
    """What a backward call adds at most, of which the gradients are a part."""
    names = {
        "cpu": ("attnkern", colors["ours"], "o"),
        "sdpa": ("F.sdpa", colors["other"], "s"),
        "sdpa-math": ("F.sdpa, math kernel", colors["muted"], "^"),
    }
    for provider, (label, color, marker) in names.items():
        points = sorted(
            (int(row["seqlen_q"]), float(row["memory"]) / (int(row["batch"]) * int(row["heads_q"])))
            for row in rows_of(SWEEPS["Zen 5"])
            if (row["provider"], row["pass"]) == (provider, "backward")
            and row["case"].startswith("sweep-bf16-d64-causal")
        )
        ax.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4.5, linewidth=2, label=label)
    ax.set_yscale("log", base=2)
    ax.set_yticks([2**16, 2**20, 2**24, 2**28], ["64 KiB", "1 MiB", "16 MiB", "256 MiB"])
    ax.set_title("peak memory of backward, per head", fontsize=11)
    ax.legend(frameon=False, fontsize=9, loc="upper left")


def masked(ax, colors):
    """Bars: what a mask excludes is skipped."""
    names = {
        "window-256": "window of 256, L 4096",
        "mask-packed": "4 documents, L 1024",
        "bottom-right": "512 new of 1024",
        "mask-padding": "padding, L 1024",
        "mask-bool": "bool mask, L 1024",
        "mask-bias": "learnt bias, L 1024",
    }
    ratios = {
        (r["case"], r["pass"]): float(r["ratio"]) for r in rows_of(MASKED) if r["provider"] == "cpu" and r["ratio"]
    }
    for n, direction in enumerate(("forward", "backward")):
        values = [ratios[f"{case}-bf16", direction] for case in names]
        at = [i + (n - 0.5) * 0.38 for i in range(len(names))]
        bars = ax.barh(at, values, height=0.36, color=colors["ours"], alpha=1 - 0.45 * n, label=direction)
        ax.bar_label(bars, [f"{x:.0f}" if x >= 10 else f"{x:.1f}" for x in values], padding=2, fontsize=8.5)
    ax.set_xscale("log")
    ax.set_xlim(1, 160)
    ax.set_xticks([1, 10, 100], ["1×", "10×", "100×"])
    ax.minorticks_off()
    ax.set_yticks(range(len(names)), list(names.values()), fontsize=9.5)
    ax.invert_yaxis()
    ax.set_title("masks: times as fast (bfloat16, Zen 5)", fontsize=11, loc="right")
    ax.legend(frameon=False, fontsize=9, loc="lower right")


def main():
    folder, kind = (Path(sys.argv[1]), "png") if len(sys.argv) > 1 else (Path(__file__).parent / "images", "svg")
    folder.mkdir(exist_ok=True)
    for picture in (tiles, lanes, masks):
        metadata = {"Date": None} if kind == "svg" else None  # the same bytes every time
        picture().savefig(folder / f"{picture.__name__}.{kind}", dpi=110, metadata=metadata, bbox_inches="tight")
    for name, colors in (("light", LIGHT), ("dark", DARK)):
        speed(colors).savefig(folder / f"speed-{name}.png", dpi=200, metadata={"Source": checksum()})


if __name__ == "__main__":
    main()
