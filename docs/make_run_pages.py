"""Puts runs of bench/results between the markers of the pages that show them: whole models, a server's stream.

python docs/make_run_pages.py       writes docs/models.md and docs/serving.md, and docs/images/<run>.svg of each run
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench import models, plots, record, report, serve
from bench.record import Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = (ROOT / path for path in ("bench/results", "docs/images"))
NONE = "No run is stored yet. The command above writes the table, the rows and the picture to `bench/runs/`."


def _models(rows: list[Row], run: dict[str, Any]) -> tuple[str, str]:
    version = next(row["transformers"] for row in rows)
    return f", transformers {version}", f"{report.verdict(rows)}."


def _serving(rows: list[Row], run: dict[str, Any]) -> tuple[str, str]:
    clock = ", CPU time in place of the clock's" if rows[0]["clock"] == "cpu time" else ""
    return clock, f"{serve.summary(rows)}."


class Page(NamedTuple):
    """`words`: what a run's heading line says beside the machine, and the sentence above its picture."""

    path: Path
    marker: str
    runs: str
    alt: str
    words: Callable[[list[Row], dict[str, Any]], tuple[str, str]]
    table: Callable[[list[Row]], str]

    def section(self, path: Path) -> str:
        """A run as a part of the page."""
        found, runs = record.read(path)
        rows, run = list(found.values()), runs[-1]
        beside, sentence = self.words(rows, run)
        threads = f"{run['threads']} thread{'s' * (run['threads'] > 1)}"
        return (
            f"## {run['device']}, {run['cpu_isa']}, {threads}\n\n"
            f"torch {run['torch']}{beside}, {run['date'][:10]}: `{run['command']}`\n"
            f"([rows](../bench/results/{path.stem}.csv)). {sentence}\n\n"
            f"![{self.alt}](images/{path.stem}.svg)\n\n"
            f"{self.table(rows)}"
        )

    def replace(self, text: str, results: Path = RESULTS) -> str:
        """The page with the runs of this folder between its markers."""
        begin, end = (f"<!-- {self.marker}:{side} -->" for side in ("begin", "end"))
        sections = [self.section(path) for path in sorted(results.glob(self.runs))]
        before, _, rest = text.partition(begin)
        return before + begin + "\n" + ("\n".join(sections) or f"{NONE}\n") + end + rest.partition(end)[2]


PAGES = {
    "models": Page(
        ROOT / "docs" / "models.md",
        "models",
        "whole-models-*.jsonl",
        "Time of whole models with attnkern and with F.sdpa, attention apart",
        _models,
        models.table,
    ),
    "serving": Page(
        ROOT / "docs" / "serving.md",
        "serving",
        "serve-*.jsonl",
        "Time, latencies and memory of a server's stream, with pages and with padded caches",
        _serving,
        serve.table,
    ),
}


def main() -> None:
    for page in PAGES.values():
        page.path.write_text(page.replace(page.path.read_text()))
        for path in RESULTS.glob(page.runs):
            found, _ = record.read(path)
            [picture] = plots.pictures(list(found.values()))
            (IMAGES / f"{path.stem}.svg").write_text(plots.themed(picture, narrow=False, dark=False))


if __name__ == "__main__":
    main()
