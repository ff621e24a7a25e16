"""``python -m bench.gpu --apply RESULTS.jsonl``: what a GPU measured, put to use.

Three places in the sources are written anew from the rows of the stages orders, tuning and choice; what wasn't measured
stays as it is. `git diff` shows what changed, and the tests and the gate check it.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from attnkern.triton_kernels import configs

from attnkern.backends import choice

from . import choose, summary
from .summary import Record

ROOT = Path(__file__).resolve().parents[2]
FORWARD, CONFIGS = Path("csrc/cuda/forward_sm90.cuh"), Path("triton_kernels/configs.py")
CHOICE = Path("attnkern/backends/choice.py")
NAMES = {"serial": "kSerial", "overlap": "kOverlap", "ping-pong": "kPingPong"}
WIDTH = 120


def main(path: Path, root: Path = ROOT) -> int:
    """Applies a campaign's results; 1 where there is nothing in them."""
    records = summary.read(path)
    begin: Record = next((r for r in records if r["type"] == "begin"), {})
    rehearsed = any(r.get("rehearsed") for r in records)
    if rehearsed and root == ROOT:
        print(f"{path}: a rehearsal measures nothing: nothing was changed")
        return 1
    changed = [
        *_schedules(summary.rows_of(records, "orders"), root / FORWARD),
        *_tiles(summary.rows_of(records, "tuning"), root / CONFIGS),
        *_rules(summary.rows_of(records, "choice"), root / CHOICE, str(begin.get("chip", "an unknown chip"))),
    ]
    print("\n".join(changed) or f"{path}: no schedule, tile or choice was measured: nothing was changed")
    return 0 if changed else 1


def _schedules(rows: Sequence[Record], path: Path) -> list[str]:
    """kSchedule of Hopper's tiles, as one expression of the head sizes."""
    best = summary.best_schedules(rows)
    known = {(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)}
    if not best:
        return []
    if missing := known - set(best):
        return [f"{path}: schedules were measured, but not of head sizes {min(missing)}: left as it is"]
    text = path.read_text()
    pattern = re.compile(r"(static constexpr Schedule kSchedule =\s)[^;]+;")
    # by_tile has no other classes; these comparisons tell them apart.
    tests = {(64, 64): "kHeadDim <= 64", (96, 96): "kHeadDim <= 96", (128, 128): "kHeadDim <= 128"}
    tests |= {(192, 128): "kHeadDimV <= 128", (192, 192): "kHeadDim <= 192"}
    terms = [(tests.get(sizes, ""), f"Schedule::{NAMES[best[sizes]]}") for sizes in sorted(known)]
    merged = [list(group)[-1] for _, group in itertools.groupby(terms, key=lambda term: term[1])]
    expression = "".join(f"{test} ? {schedule} : " for test, schedule in merged[:-1]) + merged[-1][1]
    written, count = pattern.subn(lambda found: f"{found[1]}{expression};", text)
    if count != 1:
        raise SystemExit(f"{path}: there is no kSchedule to write (or more than one)")
    path.write_text(written)
    return [f"{path}: kSchedule = {expression}"]


def _tiles(rows: Sequence[Record], path: Path) -> list[str]:
    """Rows of _ROWS: the fastest configuration where it is 3 % faster than the table's."""
    found, told = dict(configs._ROWS), []
    for row in rows:
        if row["status"] == "ok" and row["config"] != row["own"] and (row["gain"] is None or row["gain"] >= 1.03):
            key = (row["arch"], row["kernel"], row["itemsize"], row["feature"])
            sizes = {**found.get(key, {}), row["head_dim"]: tuple(row["config"])}
            found[key] = dict(sorted(sizes.items()))
            told.append(f"{path}: {key}, head size {row['head_dim']}: {tuple(row['config'])}")
    if told:
        lines = ["_ROWS: dict[tuple[int, str, int, str], dict[int, tuple[int, int, int, int]]] = {"]
        for key, by_size in found.items():
            line = f"    {_python(key)}: {_python(by_size)},"
            if len(line) <= WIDTH:
                lines.append(line)
            else:
                entries = [f"        {size}: {config}," for size, config in by_size.items()]
                lines += [f"    {_python(key)}: {{", *entries, "    },"]
        _replace(path, "_ROWS", [*lines, "}"])
    return told


def _rules(rows: Sequence[Record], path: Path, chip: str) -> list[str]:
    """choice.MEASURED: this chip's rules anew, other chips' as they are."""
    fields = choose.Trial._fields
    good = [row for row in rows if row["status"] == "ok"]
    rules = [
        choose.rule_of(
            choose.Trial(*(row[name] for name in fields)), row["capability"], row["hopper"], row["seconds"], chip
        )
        for row in good
    ]
    if not rules:
        return []
    capabilities = {row["capability"] for row in good}
    kept = [rule for rule in choice.MEASURED if not set(rule.capabilities) & capabilities]
    lines = ["MEASURED: tuple[Rule, ...] = ("]
    for rule in (*kept, *rules):
        *arguments, because = map(_python, rule)
        line = f"    Rule({', '.join(arguments)}, {because}),"
        if len(line) <= WIDTH:
            lines.append(line)
        else:
            lines += ["    Rule(", *(f"        {argument}," for argument in (*arguments, because)), "    ),"]
    _replace(path, "MEASURED", [*lines, ")"])
    return [f"{path}: {rule.passes[0]} {rule.kinds[0]} {rule.head_dims}: {rule.because}" for rule in rules]


def _python(value: object) -> str:
    return repr(value).replace("'", '"')


def _replace(path: Path, name: str, lines: Sequence[str]) -> None:
    """Writes the assignment to a module's variable anew."""
    text = path.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            old = text.splitlines()
            assert node.end_lineno is not None
            new = [*old[: node.lineno - 1], *lines, *old[node.end_lineno :]]
            path.write_text("\n".join(new) + "\n")
            return
    raise SystemExit(f"{path} has no {name}")
