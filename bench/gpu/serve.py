"""The process in which rows of `make gpu` run: it reads their stages' and their own names, and writes down what they
find."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any, TextIO

MARK = "@row "  # before a record in the process's output, where libraries print too


def serve(options: argparse.Namespace) -> None:
    """Stages and rows from the standard input (or what is given), records to the standard output. What others print
    goes to the standard error."""
    threading.Thread(target=_end_with, args=(options.parent,), daemon=True).start()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if options.rehearse is None:
        _serve_rows(options, out)
        return
    from . import device as devices

    with devices.rehearsal():
        _serve_rows(options, out)


def _end_with(parent: int) -> None:
    """Ends this process, and what it started, once the campaign's is gone.

    Killing the campaign doesn't reach this process, which has a session of its own and would keep the device.
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

    by_name = {stage.name: stage for stage in stages.STAGES}
    device = stages.device()
    send(ready=stages.about(device) if options.about else {})
    asked = (line.strip().split("\t") for line in sys.stdin)
    for name, row in asked if options.row is None else [(options.worker, options.row)]:
        stage, broken = by_name[name], False
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
