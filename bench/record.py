"""Rows on disk: JSON Lines, appended as they finish, so that an interrupted run can go on; CSV for spreadsheets."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FINISHED = ("ok", "refused")  # what a resumed run needn't measure again


def row_key(case: Any, pass_name: str, provider: str, setting: str) -> str:
    """What makes two measurements the same: problem, pass, provider and ``setting`` (code, device, threads, clock).

    ``case``: a Case, or another dataclass."""
    problem = {k: v for k, v in asdict(case).items() if k != "tags"}
    text = json.dumps([problem, pass_name, provider, setting], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _jsonable(x: Any) -> Any:
    if isinstance(x, float) and not math.isfinite(x):
        return None if math.isnan(x) else math.copysign(1e999, x)
    if isinstance(x, dict):
        return {k: _jsonable(v) for k, v in x.items()}
    return x


class Log:
    """A JSONL file of rows (``type: row``) and of the runs that made them (``type: run``, provenance)."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        self.rows, self.runs = (read(path)) if path.exists() else ({}, [])
        self._file = path.open("a", encoding="utf-8")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")  # a run was killed within a line

    def start_run(self, provenance: dict[str, Any]) -> int:
        run = len(self.runs)
        self._append({"type": "run", "run": run, **provenance})
        self.runs.append(provenance)
        return run

    def add(self, row: Row) -> None:
        self._append({"type": "row", **row})
        self.rows[row["key"]] = row

    def finished(self, key: str) -> bool:
        return key in self.rows and self.rows[key]["status"] in FINISHED

    def close(self) -> None:
        self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(_jsonable(record)) + "\n")
        self._file.flush()


def read(path: Path) -> tuple[dict[str, Row], list[dict[str, Any]]]:
    """(rows by key, the last of each; runs). A broken line is passed over. Raises ValueError where none is a record."""
    rows: dict[str, Row] = {}
    runs: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        try:
            record = json.loads(line)
            kind = record.pop("type")
            if kind == "run":
                runs.append(record)
            elif kind == "row":
                rows.pop(record["key"], None)  # the latest measurement also has the latest place
                rows[record["key"]] = record
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
    if lines and not rows and not runs:
        raise ValueError(f"{path} holds no benchmark rows")
    return rows, runs


def drawable(row: Row) -> bool:
    """Whether a row says what pictures and pages name it by; those of `cores` and of training's memory don't."""
    return {"case", "pass", "provider", "dtype", "status"} <= row.keys()


COLUMNS = (
    *("case", "pass", "provider", "dtype", "batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim"),
    *("head_dim_v", "causal", "window", "mask", "live", "dropout", "softcap", "layout", "status", "kernel", "seconds"),
    *("p20", "p80", "rounds", "dropped", "clean", "ratio", "cost", "flops_per_second", "peak_share", "peak"),
    *("bytes_per_second", "bandwidth_share", "memory", "error", "allowed_share", "worst", "rms_ratio"),
    *("threads", "clock", "message", "ratio_p20", "ratio_p80", "result_bytes", "faults"),
)


def write_csv(path: Path, rows: Iterable[Row], columns: Sequence[str] = COLUMNS) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
