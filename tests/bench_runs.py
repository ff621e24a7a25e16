"""Commands of the benchmark that have a page of their own, run in the tests' process."""

import re

import pytest
from typer.testing import CliRunner

from bench import machine, record
from bench.__main__ import app


@pytest.fixture(autouse=True)
def no_peak(monkeypatch):
    """The machine's peak, which tells how long a run will take, is not measured."""
    monkeypatch.setattr(machine, "peak", lambda *_: machine.Peak(1e11, "assumed"))


def run(command, quick, path, *arguments, code=0):
    """Runs the command, with the options `quick` and rows in `path`, and gives what it printed."""
    options = [*quick, "--out", path, *arguments]
    result = CliRunner().invoke(app, [command, *map(str, options)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return re.sub(r"[\s│]+", " ", result.output)


def rows_of(path):
    return list(record.read(path)[0].values())
