"""Puts the CPU kernels against their targets, bench/results/cpu-goals*.jsonl, between the markers of two pages.

python docs/make_share_pages.py      writes docs/shares.md and README.md, and docs/images/<run>.svg of each run; the
                                     run's own table too, which shows what its rows are held to now
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import plots, record, targets
from bench.record import Row
from bench.targets import Target

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "bench" / "results", ROOT / "docs" / "images"
BEGIN, END = "<!-- shares:begin -->", "<!-- shares:end -->"
NONE = "No run is stored yet: `make bench-goals` measures one.\n"
SHORT = 197  # the longest of the short rows
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Measured(NamedTuple):
    """A stored run: the file's stem, all rows, those that have a target, and where it ran."""

    name: str
    rows: list[Row]
    found: dict[Target, Row]
    run: dict[str, Any]


def stored(folder: Path = RESULTS) -> list[Measured]:
    """The runs of this folder, those of AVX2 on other machines last."""
    made = []
    for path in sorted(folder.glob("cpu-goals*.jsonl")):
        rows, runs = record.read(path)
        made.append(Measured(path.stem, [*rows.values()], targets.rows_by_target([*rows.values()]), runs[-1]))
    return sorted(made, key=lambda run: "cpu-goals-avx2" in run.name)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def _cell(target: Target, row: Row | None) -> str:
    if row is None:
        return ""
    if row.get("seconds") is None:
        return f"**{row['status']}**"
    share, others = f"{row[target.field]:.0%}", [x for x in targets.missed(target, row).split(", ") if x]
    if target.limit in others:
        share = f"**{share}**"
        others.remove(target.limit)
    ratio = "" if row.get("ratio") is None else f", {row['ratio']:.1f}×"
    return share + ratio + "".join(f", **{name}**" for name in others)


def whole(runs: Sequence[Measured]) -> str:
    """Every target, the runs side by side, and their pictures."""
    lines = []
    for target in targets.TABLE:
        wanted = (f"{target.wanted(isa):.0%}" for isa in ("avx512", "avx2"))
        limit = " of reads" * target.reads
        cells = [_cell(target, run.found.get(target)) for run in runs]
        lines.append([f"{target.label}{limit}", " / ".join(wanted), *cells])
    parts = []
    for run in runs:
        parts.append(
            f"- {targets.where(run.run)} (F.sdpa: {run.run['torch_isa']}): {targets.counts(run.found)}. torch "
            f"{run.run['torch']}, {run.run['date'][:10]}, `{run.run['command']}`\n"
            f"  ([rows with error, memory and faults](../bench/results/{run.name}.md))\n"
        )
    table = _table(["Row", "Target", *(targets.where(run.run) for run in runs)], lines)
    pictures = "".join(
        f"\n### {targets.where(run.run)}\n\n![Shares of the peak by row, their targets, and F.sdpa's shares]"
        f"(images/{run.name}.svg)\n"
        for run in runs
    )
    return f"{''.join(parts)}\n{table}{pictures}"


def brief(runs: Sequence[Measured]) -> str:
    """From the least to the largest share of a kind of row, the runs side by side."""

    def spread(run: Measured, dtype: str, pass_name: str, short: bool) -> str:
        shares = [
            row[target.field]
            for target, row in run.found.items()
            if (target.case.dtype, target.pass_name) == (dtype, pass_name)
            and target.case.seqlen_q == target.case.seqlen_k
            and target.case.mask == "none"
            and (target.case.seqlen_q <= SHORT) == short
            and row.get("seconds") is not None
        ]
        return f"{min(shares):.0%} to {max(shares):.0%}" if shares else ""

    lines = [
        [f"{DTYPES[dtype]} {pass_name}, {length}", *(spread(run, dtype, pass_name, short) for run in runs)]
        for dtype, pass_name in targets.SHARES
        for short, length in ((True, f"49 to {SHORT} long"), (False, "512 and longer"))
    ]
    return _table(["", *(f"{targets.where(run.run)} ([rows](bench/results/{run.name}.md))" for run in runs)], lines)


PAGES = {"docs/shares.md": whole, "README.md": brief}


def replace(page: str, text: str, folder: Path = RESULTS) -> str:
    """The page with the runs of this folder between its markers."""
    runs = stored(folder)
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + (PAGES[page](runs) if runs else NONE) + END + rest.partition(END)[2]


def picture(run: Measured) -> str:
    """Its targets and shares, as SVG."""
    [drawn] = plots.pictures(run.rows)
    return plots.themed(drawn, narrow=False, dark=False)


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(replace(page, path.read_text()))
    for run in stored():
        (IMAGES / f"{run.name}.svg").write_text(picture(run))
        (RESULTS / f"{run.name}.md").write_text(targets.page(run.found, run.run))


if __name__ == "__main__":
    main()
