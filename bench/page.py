"""A run as one HTML file, which needs nothing beside it: pictures, table, machine, command."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from . import plots, report
from .record import Row

NARROW, DARK = "(max-width: 40em)", "(prefers-color-scheme: dark)"
FACTS = {
    "device": "device",
    "cpu_isa": "kernels for",
    "threads": "threads",
    "system": "system",
    "torch": "torch",
    "attnkern": "attnkern",
    "python": "Python",
    "git": "commit",
    "date": "date",
}


def write(path: Path, rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> Path:
    """Writes the page of these rows and of the last of the runs; gives its path."""
    run = runs[-1] if runs else {}
    found = report.curves(rows)
    ours = dict.fromkeys(row["provider"] for row in rows if report.is_ours(row["provider"]))
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    templates.filters |= {"duration": report.duration, "size": report.size}
    templates.tests["noisy"] = report.noisy
    blank = dict.fromkeys(("seconds", "ratio", "peak_share", "memory", "allowed_share", "message"))
    text = templates.get_template("page.html").render(
        title=path.stem,
        machine=plots.machine_line(run),
        dark_page=plots.DARK_PAGE,
        command=run.get("command", ""),
        facts=[(label, run[name]) for name, label in FACTS.items() if run.get(name) is not None],
        verdict=report.verdict(rows),
        noisy=sum(map(report.noisy, rows)),
        rule=report.NOISY,
        rows=[{**blank, **row} for row in rows],
        sweeps=[_sweep(lines, name) for name in ours if (lines := report.sweep_lines(found, name))],
        pictures=[_picture(picture) for picture in plots.pictures(rows)],
    )
    path.write_text(text, encoding="utf-8")
    return path


def _sweep(lines: list[report.SweepLine], provider: str) -> dict[str, Any]:
    lengths = sorted({length for line in lines for length in line.rows})
    return {
        "provider": provider,
        "lengths": lengths,
        "lines": [
            {
                "label": f"{line.key.dtype} {line.key.pass_name}, {line.key.head_dim}, {line.mask}",
                "rows": [line.rows.get(length) for length in lengths],
                "best": f"{line.best:.0%}",
            }
            for line in lines
        ],
    }


def _picture(picture: plots.Picture) -> dict[str, Any]:
    def source(narrow: bool, dark: bool) -> str:
        svg = plots.themed(picture, narrow=narrow, dark=dark).encode()
        return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"

    sources = [(f"{NARROW} and {DARK}", source(True, True)), (NARROW, source(True, False)), (DARK, source(False, True))]
    return {"title": picture.title, "caption": picture.caption, "sources": sources, "image": source(False, False)}
