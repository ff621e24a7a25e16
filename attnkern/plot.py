"""Pictures of attention weights. matplotlib (the extra `plot`) is imported when the first one is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .arguments import show, type_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_TICKS = 32
_MAX_NUMBERED = 12


def plot_attention(
    weights: Tensor,
    query_labels: Sequence[Any] | None = None,
    key_labels: Sequence[Any] | None = None,
    *,
    title: str | None = None,
    head_labels: Sequence[Any] | None = None,
    ax: Any = None,
) -> Figure:
    """A heat map of attention weights: a row for each query, a column for each key, dark where much is attended.

    Args:
        weights: (L, S), or (H, L, S) for one map per head; of any floating dtype and device, as `attention_weights` and
            the modules of `attnkern.nn` give them for one batch element.
        query_labels, key_labels: the L and the S names, tokens for example; None: numbers. Of many, some are shown.
        title: over the figure. head_labels: the H names over the maps; None: "head 0", ...
        ax: matplotlib Axes to draw an (L, S) map into; None makes a figure.

    Returns:
        The matplotlib Figure; `figure.savefig("attention.png")` keeps it.

    Raises:
        ImportError: matplotlib is missing. TypeError: weights is no tensor. ValueError: weights of another rank, labels
        of another number.

    All maps share the scale of colours, from 0 to the largest weight. Up to 12 x 12 cells show their number too, an
    exact 0 as "0".
    """
    if not isinstance(weights, Tensor):
        raise type_error("weights", "Tensor", weights)
    if weights.dim() not in (2, 3) or weights.numel() == 0:
        raise ValueError(
            "attnkern: weights must be (L, S) or (heads, L, S) and not empty (take one batch element), "
            f"got {tuple(weights.shape)}"
        )
    if ax is not None and weights.dim() == 3:
        raise ValueError(f"attnkern: ax takes one map (L, S), got {tuple(weights.shape)}")
    maps = weights.detach().float().cpu().reshape(-1, *weights.shape[-2:])
    heads, rows, columns = maps.shape
    if head_labels is None and weights.dim() == 3:
        head_labels = [f"head {h}" for h in range(heads)]
    for name, labels, n in (
        ("query_labels", query_labels, rows),
        ("key_labels", key_labels, columns),
        ("head_labels", head_labels, heads),
    ):
        if labels is not None and len(labels) != n:
            raise ValueError(
                f"attnkern: {name} must hold {n} labels for weights {show(weights.shape)}, got {len(labels)}"
            )
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError('attnkern: plot_attention needs matplotlib: pip install "attnkern[plot]"') from None

    if ax is None:
        across = min(heads, 4)
        down = math.ceil(heads / across)
        width = min(7.0, max(2.6, 0.45 * columns + 1.4))
        height = min(7.0, max(2.4, 0.45 * rows + 1.2))
        figure, grid = plt.subplots(
            down, across, figsize=(width * across, height * down), squeeze=False, layout="constrained"
        )
        axes = list(grid.flat)
    else:
        figure, axes = ax.figure, [ax]
    largest = float(maps.nan_to_num().amax()) or 1.0
    image: Any = None
    for n, axis in enumerate(axes):
        if n >= heads:
            axis.set_axis_off()
            continue
        image = axis.imshow(maps[n].numpy(), cmap="Blues", vmin=0.0, vmax=largest, aspect="auto", interpolation="none")
        _label(axis.xaxis, key_labels, columns, "key")
        _label(axis.yaxis, query_labels, rows, "query")
        if key_labels is not None:
            axis.tick_params(axis="x", rotation=90 if any(len(str(x)) > 2 for x in key_labels) else 0)
        if head_labels is not None:
            axis.set_title(str(head_labels[n]), fontsize=10)
        if max(rows, columns) <= _MAX_NUMBERED:
            for i, row in enumerate(maps[n].tolist()):
                for j, x in enumerate(row):
                    colour = "white" if x > 0.6 * largest else "black"
                    axis.text(j, i, f"{x:.2f}" if x else "0", ha="center", va="center", color=colour, fontsize=7)
    figure.colorbar(image, ax=axes, label="weight")
    if title is not None:
        if ax is None:
            figure.suptitle(title)
        else:
            ax.set_title(title)
    return figure


def _label(axis: Any, labels: Sequence[Any] | None, n: int, otherwise: str) -> None:
    """Names at the cells of an axis, at every k-th one where there are too many."""
    if labels is None:
        axis.set_label_text(otherwise)
        if n <= _MAX_NUMBERED:
            axis.set_ticks(range(n))
        return
    step = math.ceil(n / _MAX_TICKS)
    axis.set_ticks(range(0, n, step), [str(labels[i]) for i in range(0, n, step)])
