"""``python -m bench.gpu`` (`make gpu`): everything that wants a GPU, in stages, within ten minutes.

The stages are in bench/gpu/stages.py. Their rows run in processes of their own, and each line of the results is on the disk
before the next row starts: a row that faults, hangs or runs out of memory is a line that says so, and the next row runs
in a new process. The results are bench/results/gpu-<chip>-<time>.jsonl, a page about them .md, what was printed .log.

--rehearse runs all of it without a GPU, on tiny problems in the simulator, into build/rehearsal/: no figure in there is
one. --dry-run builds, and lists what would run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
TOTAL = 560  # seconds; with the start and the page under ten minutes
READY = 60  # seconds for a process to import torch and find the device
END = 10  # for a process to end after its last row
SLOWER = 40  # how many times as long a rehearsal may take
MARK = "@row "  # before a record in a process's output, where libraries print too
BAD = ("wrong", "error", "fault", "hung")


class Log:
    """The results, a JSON object a line, each written through to the disk."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._file = path.open("w", encoding="utf-8")
        self._text = path.with_suffix(".log").open("wb")
        self._lock = threading.Lock()

    def add(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        record = {"type": kind, **fields}
        with self._lock:
            self.records.append(record)
            self._file.write(json.dumps(record, default=str) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        return record

    def text(self, printed: bytes) -> None:
        with self._lock:
            self._text.write(printed)
            self._text.flush()


class Worker:
    """A process that runs rows of one stage, named to it one by one (or the one in its command line)."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Log) -> None:
        self.log, self.printed = log, tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self.buffer = b""
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            start_new_session=True,
        )

    def send(self, row: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `receive` will find
            self.process.stdin.write(row.encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, until: float) -> dict[str, Any] | None:
        """The next record; {} at the end of the output, None when the time is over."""
        assert self.process.stdout is not None
        while True:
            line, newline, rest = self.buffer.partition(b"\n")
            if newline:
                self.buffer = rest
                if line.startswith(MARK.encode()):
                    return json.loads(line[len(MARK) :])
                self.printed.write(line + newline)
                continue
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            got = os.read(self.process.stdout.fileno(), 1 << 16)
            if not got:
                return {}
            self.buffer += got

    def end(self, seconds: float = 0) -> int | None:
        """Its exit status, or None if it had to be ended, with all that it started."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def tail(self) -> str:
        """The last lines that it printed."""
        self.printed.seek(0)
        text = self.printed.read()
        return "\n".join(text.decode(errors="replace").strip().splitlines()[-15:])

    def close(self) -> None:
        self.end()
        self.printed.seek(0)
        self.log.text(self.printed.read())
        self.printed.close()


class Run:
    """One stage: its rows, shared out among its processes."""

    def __init__(self, stage: Any, rows: Sequence[str], device: Any, log: Log, until: float, options: Any) -> None:
        self.stage, self.device, self.log, self.until = stage, device, log, until
        self.waiting, self.options, self.rehearse = list(rows), options, options.rehearse is not None
        self.slower = SLOWER if self.rehearse else 1
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def all(self) -> None:
        jobs = max(1, min(self.stage.jobs, os.cpu_count() or 1, len(self.waiting)))
        threads = [threading.Thread(target=self._rows, daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _next(self) -> str | None:
        with self.lock:
            late = time.monotonic() >= self.until
            return None if late or not self.waiting else self.waiting.pop(0)

    def _rows(self) -> None:
        worker: Worker | None = None
        while (row := self._next()) is not None:
            try:
                worker = self._row(row, worker)
            except Exception as error:  # a mistake of this module's: the other rows go on
                self._found(row, status="error", message=f"bench.gpu: {type(error).__name__}: {error}")
                worker = None
        if worker is not None:
            worker.end(END)
            worker.close()

    def _row(self, row: str, worker: Worker | None) -> Worker | None:
        """Runs a row; gives the process for the next one, None where that has to be a new one."""
        start = time.monotonic()
        if worker is None:
            worker = self._start(row)
            first = worker.receive(min(self.until, start + READY * self.slower))
            if not first or "ready" not in first:
                self._lost(row, worker, first, "it wasn't ready")
                return None
            with self.lock:
                if first["ready"] and not self._known():
                    self.log.add("run", **first["ready"])
        if not self.stage.alone:
            worker.send(row)
        until = min(self.until, time.monotonic() + self.stage.each * self.slower)
        while (record := worker.receive(until)) and "found" in record:
            self._found(row, **record["found"], seconds_in_all=round(time.monotonic() - start, 2))
        if not record:
            self._lost(row, worker, record, f"{self.stage.each * self.slower} s")
            return None
        if not self.stage.alone and not record.get("broken"):
            return worker
        status = worker.end(END * self.slower)
        if self.stage.alone and status != 0:
            self._found(row, status="wrong", message=f"exit status {status}\n{worker.tail()}")
        worker.close()
        return None

    def _start(self, row: str) -> Worker:
        prefix = [] if self.stage.tool is None else self.device.watch(self.stage.tool)
        command = [*prefix, sys.executable, "-m", "bench.gpu", "--worker", self.stage.name]
        command += ["--parent", str(os.getpid()), "--stages", self.options.stages, *["--rehearse"] * self.rehearse]
        if self.stage.alone:
            command += ["--row", row]
        if not self.stage.needed and not self._known():
            command.append("--about")
        paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(path for path in paths if path)
        return Worker(command, {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}, self.log)

    def _known(self) -> bool:
        return any(record["type"] == "run" for record in self.log.records)

    def _lost(self, row: str, worker: Worker, record: dict | None, limit: str) -> None:
        if record is None and time.monotonic() >= self.until:
            status, message = "stopped", "no time is left for this stage"
        elif record is None:
            status, message = "hung", f"ended at its limit: {limit}"
        else:
            ended = worker.end(END)
            told = f"signal {-ended}" if ended is not None and ended < 0 else f"exit status {ended}"
            status, message = "fault", f"its process ended with {told}"
        self._found(row, status=status, message=f"{message}\n{worker.tail()}".strip())
        worker.close()

    def _found(self, row: str, **found: Any) -> None:
        record = self.log.add("row", stage=self.stage.name, row=row, **{"status": "ok", **found})
        with self.lock:
            self.counts[record["status"]] += 1
        note = record.get("message") if record["status"] != "ok" else ""
        print(f"   {row}: {_told(record)}" + (f": {note.splitlines()[0]}" if note else ""), flush=True)


def _told(record: dict[str, Any]) -> str:
    """A row on one line."""
    parts = [record["mode"]] if "mode" in record else []
    parts.append(record["status"])
    if record.get("flops_per_second") and record["clock"] != "counted":
        parts.append(f"{record['flops_per_second'] / 1e12:.0f} TFLOP/s, {record['bytes_per_second'] / 1e9:.0f} GB/s")
    if record.get("allowed_share") is not None:
        parts.append(f"error {record['allowed_share']:.2f} of the allowed")
    if "best" in record:
        parts.append(record["best"])
    if "config" in record:
        parts.append(f"{tuple(record['config'])} of {record['timed']}")
    return ", ".join(parts)


# --- a process of a stage ---------------------------------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> None:
    """Rows from the standard input (or the one given), records to the standard output. What others print goes to the
    standard error."""
    threading.Thread(target=_end_with, args=(options.parent,), daemon=True).start()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if options.rehearse is None:
        _serve_rows(options, out)
        return
    from .. import device as devices

    with devices.rehearsal():
        _serve_rows(options, out)


def _end_with(parent: int) -> None:
    """Ends this process, and what it started, once the campaign's is gone.

    Whoever kills that doesn't reach a session of its own, which would keep the device.
    """
    while True:
        time.sleep(0.5)
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os.killpg(0, signal.SIGKILL)


def _serve_rows(options: argparse.Namespace, out: TextIO) -> None:
    stages = importlib.import_module(options.stages)

    def send(**record: Any) -> None:
        out.write(MARK + json.dumps(record, default=str) + "\n")
        out.flush()

    stage = next(stage for stage in stages.STAGES if stage.name == options.worker)
    device = stages.device()
    send(ready=stages.about(device) if options.about else {})
    for row in [options.row] if options.row is not None else map(str.strip, sys.stdin):
        broken = False
        try:
            for found in stage.measure(device, row):
                send(found=found)
        except Exception as error:  # whatever a row raises is its result
            send(found={"status": "error", "message": f"{type(error).__name__}: {error}"})
        try:
            if not stage.needed:  # the build, before which a device may not be touched
                device.synchronize()
        except Exception as error:  # nothing runs in this process any more
            send(found={"status": "fault", "message": f"{type(error).__name__}: {error}"})
            broken = True
        send(done=row, broken=broken)
        if broken:
            sys.exit(1)


# --- the campaign -----------------------------------------------------------------------------------------------------


def campaign(device: Any, plan: Sequence[Any], log: Log, options: argparse.Namespace, total: float = TOTAL) -> int:
    """Runs the stages; 1 if a row failed."""
    start = time.monotonic()
    slower = SLOWER if device.rehearsed else 1
    for stage in plan:
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
        run = Run(stage, rows, device, log, began + limit, options)
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
    parser.add_argument("--apply", type=Path, metavar="RESULTS", help="put measured orders, tiles, choices to use")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    for hidden in ("--worker", "--row"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--stages", default="bench.gpu.stages", help=argparse.SUPPRESS)  # tests have their own
    parser.add_argument("--about", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        _serve(options)
        return 0
    if options.apply is not None:
        from . import apply

        return apply.main(options.apply)
    from . import summary

    stages = importlib.import_module(options.stages)
    everything: Sequence[Any] = stages.STAGES
    unknown = set(filter(None, options.only.split(","))) - {stage.name for stage in everything}
    if unknown:
        parser.error(f"--only: {min(unknown)!r} is none of {', '.join(stage.name for stage in everything)}")
    plan = [stage for stage in everything if not options.only or stage.name in options.only.split(",")]
    if options.list:
        for stage in everything:
            print(f"{stage.name:12} at most {stage.seconds:3} s  {stage.about}")
        return 0
    device = stages.device(rehearsed=options.rehearse is not None or options.dry_run)
    if device is None:
        print(f"make gpu: torch of {sys.executable} sees no CUDA device: nothing was run")
        return 1
    if options.dry_run:
        return _dry(device, plan)
    folder = ROOT / ("bench/results" if options.rehearse is None else "build/rehearsal")
    path = options.out or folder / f"gpu-{_slug(device.name())}-{datetime.now():%Y%m%d-%H%M%S}.jsonl"
    log = Log(path)
    log.add("begin", date=datetime.now(timezone.utc).isoformat(timespec="seconds"), **device.chip(), **device.clocks())
    print(f"{device.name()}; results: {path}", flush=True)
    try:
        status = campaign(device, plan, log, options)
    finally:
        log.add("end", **device.clocks())
        page = summary.page(log.records)
        path.with_suffix(".md").write_text(page)
        print(page, flush=True)
    print(f"{path}\n{path.with_suffix('.md')}", flush=True)
    return status


def _dry(device: Any, plan: Sequence[Any]) -> int:
    """What would run on a Hopper, after the build."""
    status = 0
    for stage in plan:
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
