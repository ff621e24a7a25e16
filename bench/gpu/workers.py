"""Rows of a stage of `make gpu`, run in processes of their own, and the results, each on the disk before the next row.

A row that faults, hangs or runs out of memory is a line that says so; the next row runs in a new process. Each stage
has new processes, but for those of a rehearsal, which go on with the next stage: there is no device to be spoilt.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .serve import MARK

ROOT = Path(__file__).resolve().parents[2]
READY = 60  # seconds for a process to import torch and find the device
END = 10  # for a process to end after its last row
SLOWER = 40  # how many times as long a rehearsal may take


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
    """A process that runs rows, named to it one by one with their stages (or the one in its command line)."""

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

    def send(self, stage: str, row: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `receive` will find
            self.process.stdin.write(f"{stage}\t{row}\n".encode())
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
    """One stage: its rows, shared out among its processes. A rehearsal takes those from `spare`, and leaves them there
    for the next stage."""

    def __init__(
        self, stage: Any, rows: Sequence[str], device: Any, log: Log, until: float, options: Any, spare: list[Worker]
    ) -> None:
        self.stage, self.device, self.log, self.until, self.spare = stage, device, log, until, spare
        self.waiting, self.options, self.rehearse = list(rows), options, options.rehearse is not None
        self.slower = SLOWER if self.rehearse else 1
        self.shares = self.rehearse and not (stage.alone or stage.tool or stage.needed)
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
        with self.lock:
            worker = self.spare.pop() if self.shares and self.spare else None
        while (row := self._next()) is not None:
            try:
                worker = self._row(row, worker)
            except Exception as error:  # a mistake of this module's: the other rows go on
                self._found(row, status="error", message=f"bench.gpu: {type(error).__name__}: {error}")
                worker = None
        if worker is not None and self.shares:
            self.spare.append(worker)
        elif worker is not None:
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
            worker.send(self.stage.name, row)
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
