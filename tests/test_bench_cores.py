"""What calls would take on many cores: tasks timed one by one and replayed through the kernels' queue."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import attnkern
from bench import cores, machine, record
from bench.__main__ import app

TINY = cores.Problem("backward", "fp32", 1, 4, 2, 96, 160, 16, "causal")


@pytest.fixture(scope="module")
def program():
    """Built from the library's objects, which are there where the library was built."""
    objects = machine.ROOT / "build" / "ninja" / "release" / "csrc" / "cpu" / "dispatch.cpp.o"
    if not objects.exists():
        pytest.skip("the library was built elsewhere")
    environment = os.environ | {"ATTNKERN_CPU_ISAS": attnkern.build_info()["cpu_isa"]}
    subprocess.run([sys.executable, "setup.py", "-q", "build_cores"], cwd=machine.ROOT, env=environment, check=True)
    program = cores.Cores()
    yield program
    program.close()


def test_tasks_are_dealt_out(program):
    seconds, alone, phases, tasks, scratch = program.ask(TINY, 3)
    assert 0 < alone < seconds
    assert phases > 1
    assert tasks >= 3
    assert scratch > 0
    one, alone, phases, tasks, _ = program.ask(TINY, 1)
    assert (alone, phases, tasks) == (one, 0, 0)


@pytest.mark.parametrize("mask", ["all", "causal", "packed", "prefix"])
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_a_row(program, pass_name, mask):
    row = cores.measure(program, cores.Problem(pass_name, "bf16", 1, 2, 2, 900, 900, 16, mask), (4, 64), 1, 0.01)
    assert all(0 < share < 1.5 for share in row["efficiency"])  # of the time that as many threads could do it in
    assert row["tasks"][1] >= row["tasks"][0] > 0
    row |= {"enough": [False, True], "efficiency": [0.33, 0.44]}
    text = cores.table([row], {row["key"]: row | {"efficiency": [0.11, 0.22]}})
    assert text.endswith("| (11 % → 33 %) | 22 % → 44 % |\n")


def test_the_command_writes_its_rows(program, tmp_path):
    path = tmp_path / "rows.jsonl"
    options = ["cores", "--threads", "4", "--longest", "128", "--turns", "1", "--budget", "0.01", "--out", str(path)]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows, runs = record.read(path)
    assert {row["pass"] for row in rows.values()} == {"forward", "backward"}
    assert path.with_suffix(".md").read_text() == cores.markdown(list(rows.values()), runs)


@pytest.mark.parametrize("options", [("--threads", "1"), ("--threads", "many"), ("--pass", "sideways")])
def test_what_no_run_can_do_is_said(options):
    result = CliRunner().invoke(app, ["cores", *options])
    assert result.exit_code == 2
    assert options[0] in result.output
