"""``python -m bench.gpu`` (`make gpu`): everything that wants a GPU, in stages (stages.py), within ten minutes.

Rows run in processes of their own (workers.py, serve.py), and each line of the results is on the disk before the next
row starts. The results are bench/results/gpu-<chip>-<time>.jsonl, a page about them .md, what was printed .log.

--rehearse runs all of it without a GPU, on tiny problems in the simulator, into build/rehearsal/: its figures mean
nothing. --dry-run builds, and lists what would run.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import serve, summary
from .summary import BAD
from .workers import END, ROOT, SLOWER, Log, Run, Worker

TOTAL = 560  # seconds; with the start and the page under ten minutes


def campaign(device: Any, stages: Sequence[Any], log: Log, options: argparse.Namespace, total: float = TOTAL) -> int:
    """Runs the stages; 1 if a row failed."""
    start = time.monotonic()
    slower = SLOWER if device.rehearsed else 1
    spare: list[Worker] = []
    for stage in stages:
        left = total * slower - (time.monotonic() - start)
        limit = min(stage.seconds * slower, left)
        if device.rehearsed:
            print(f"== {stage.name}: {stage.about}", flush=True)
        else:
            print(f"== {stage.name}: {stage.about} (at most {max(limit, 0):.0f} s)", flush=True)
        before, began = device.clocks(), time.monotonic()
        try:
            rows, failure = list(stage.rows(device)), None
            if options.rehearse == "1":
                rows = stage.sample(rows)
            if stage.tool is not None and device.watch(stage.tool) is None:
                rows, failure = [], "left out: compute-sanitizer is not on this machine"
        except Exception as error:
            rows, failure = [], f"failed: {type(error).__name__}: {error}"
        run = Run(stage, rows, device, log, began + limit, options, spare)
        if limit >= 1 and rows:
            run.all()
        told = ", ".join(f"{n} {status}" for status, n in run.counts.items())
        if run.waiting:
            told = ", ".join(filter(None, (told, f"{len(run.waiting)} left out for want of time")))
        told = failure or told or "no rows for this chip"
        took, clocks = round(time.monotonic() - began, 1), {"before": before, "after": device.clocks()}
        log.add("stage", name=stage.name, told=told, seconds=took, left_out=run.waiting, **clocks)
        print(f"== {stage.name}: {told}; {took:.0f} s, {time.monotonic() - start:.0f} s in all", flush=True)
        if stage.needed and any(run.counts[status] for status in (*BAD, "stopped")):
            break
    for worker in spare:
        worker.end(END)
        worker.close()
    outcomes = [(record.get("status"), record.get("told", "")) for record in log.records]
    return 1 if any(status in BAD or text.startswith("failed") for status, text in outcomes) else 0


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="STAGES", help="comma-separated names of stages")
    parser.add_argument("--list", action="store_true", help="the stages")
    parser.add_argument("--dry-run", action="store_true", help="build, then list the rows of every stage")
    parser.add_argument(
        "--rehearse", nargs="?", const="1", choices=("1", "all"), help="without a GPU; all: every row, in an hour"
    )
    parser.add_argument("--out", type=Path, help="the results' path, .jsonl")
    parser.add_argument("--apply", type=Path, metavar="RESULTS", help="put measured schedules, tiles, choices to use")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    for hidden in ("--worker", "--row"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--stages", default="bench.gpu.stages", help=argparse.SUPPRESS)  # tests have their own
    parser.add_argument("--about", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        serve.serve(options)
        return 0
    if options.apply is not None:
        from . import apply

        return apply.main(options.apply)
    stages = importlib.import_module(options.stages)
    everything: Sequence[Any] = stages.STAGES
    unknown = set(filter(None, options.only.split(","))) - {stage.name for stage in everything}
    if unknown:
        parser.error(f"--only: {min(unknown)!r} is none of {', '.join(stage.name for stage in everything)}")
    chosen = [stage for stage in everything if not options.only or stage.name in options.only.split(",")]
    if options.list:
        for stage in everything:
            print(f"{stage.name:12} at most {stage.seconds:3} s  {stage.about}")
        return 0
    device = stages.device(rehearsed=options.rehearse is not None or options.dry_run)
    if device is None:
        print(f"make gpu: torch of {sys.executable} sees no CUDA device: nothing was run")
        return 1
    if options.dry_run:
        return _dry(device, chosen)
    folder = ROOT / ("bench/results" if options.rehearse is None else "build/rehearsal")
    path = options.out or folder / f"gpu-{_slug(device.name())}-{datetime.now():%Y%m%d-%H%M%S}.jsonl"
    log = Log(path)
    log.add("begin", date=datetime.now(timezone.utc).isoformat(timespec="seconds"), **device.chip(), **device.clocks())
    print(f"{device.name()}; results: {path}", flush=True)
    try:
        status = campaign(device, chosen, log, options)
    finally:
        log.add("end", **device.clocks())
        page = summary.page(log.records)
        path.with_suffix(".md").write_text(page)
        print(page, flush=True)
    print(f"{path}\n{path.with_suffix('.md')}", flush=True)
    return status


def _dry(device: Any, stages: Sequence[Any]) -> int:
    """What would run on a Hopper, after the build."""
    status = 0
    for stage in stages:
        rows = list(stage.rows(device))
        print(f"== {stage.name}: {stage.about}; {len(rows)} rows, at most {stage.seconds} s", flush=True)
        for row in rows:
            print(f"   {row}")
        if stage.name == "build":
            (found,) = stage.measure(device, "build")
            status = int(found["status"] != "ok")
            print(f"== build: {found['status']} {found['message']}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
