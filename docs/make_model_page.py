"""Puts the runs of whole models, bench/results/whole-models-*.jsonl, between the markers of docs/models.md.

python docs/make_model_page.py      writes docs/models.md, and docs/images/<run>.svg of each run
"""

from __future__ import annotations

from pathlib import Path

from bench import models, plots, record, report

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS, IMAGES = (ROOT / path for path in ("docs/models.md", "bench/results", "docs/images"))
BEGIN, END = "<!-- models:begin -->", "<!-- models:end -->"
NONE = "No run is stored yet. The command above writes the table, the rows and the picture to `bench/runs/`."


def section(path: Path) -> str:
    """A run as a part of the page."""
    found, runs = record.read(path)
    rows, run = list(found.values()), runs[-1]
    version = next(row["transformers"] for row in rows)
    return (
        f"## {run['device']}, {run['cpu_isa']}, {run['threads']} threads\n\n"
        f"torch {run['torch']}, transformers {version}, {run['date'][:10]}: `{run['command']}`\n"
        f"([rows](../bench/results/{path.stem}.csv)). {report.verdict(rows)}.\n\n"
        f"![Time of whole models with attnkern and with F.sdpa, attention apart](images/{path.stem}.svg)\n\n"
        f"{models.table(rows)}"
    )


def replace(text: str, results: Path = RESULTS) -> str:
    """The page with the runs of this folder between its markers."""
    sections = [section(path) for path in sorted(results.glob("whole-models-*.jsonl"))]
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + ("\n".join(sections) or f"{NONE}\n") + END + rest.partition(END)[2]


def main() -> None:
    PAGE.write_text(replace(PAGE.read_text()))
    for path in RESULTS.glob("whole-models-*.jsonl"):
        found, _ = record.read(path)
        [picture] = plots.pictures(list(found.values()))
        (IMAGES / f"{path.stem}.svg").write_text(plots.themed(picture, narrow=False, dark=False))


if __name__ == "__main__":
    main()
