"""What calls would take on many cores: tasks timed one by one and replayed through the kernels' queue."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import attnkern
from bench import cores, machine, record, training_memory
from bench.__main__ import app

PAGE = machine.ROOT / "docs" / "cpu_kernels.md"
TINY = cores.Problem("backward", "fp32", 1, 4, 2, 96, 160, 16, "causal")


@pytest.fixture(scope="module")
def program():
    """Built from the library's objects, where they are still there."""
    environment = os.environ | {"ATTNKERN_CPU_ISAS": attnkern.build_info()["cpu_isa"]}
    subprocess.run([sys.executable, "setup.py", "-q", "build_cores"], cwd=machine.ROOT, env=environment, check=True)
    program = cores.Cores()
    yield program
    program.close()


def test_tasks_are_dealt_out(program):
    shared, plain = program.ask(TINY, 3), program.ask(TINY, 1)
    assert 0 < shared.alone < shared.seconds
    assert shared.phases > 1
    assert shared.tasks >= 3
    assert shared.scratch > 0
    assert shared.one > 0
    assert (plain.alone, plain.phases, plain.tasks) == (plain.seconds, 0, 0)


def test_calls_are_cut_so_that_threads_end_together(program):
    """32 tiles of 64 queries in each of 8 heads would leave a third of 96 threads without a task in the last round."""
    plain = cores.Problem("forward", "fp32", 1, 8, 8, 2048, 64, 16, "all")
    assert program.ask(plain, 96).tasks == 3 * 96
    assert program.ask(plain, 1).tasks == 0
    assert program.ask(replace(plain, pass_name="backward", seqlen_k=2048), 96).tasks >= 8 * 96
    assert program.ask(replace(plain, pass_name="backward", seqlen_k=2048, mask="causal"), 96).tasks >= 16 * 96


@pytest.mark.parametrize("mask", ["all", "causal", "packed", "prefix"])
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_a_row(program, pass_name, mask):
    row = cores.measure(program, cores.Problem(pass_name, "bf16", 1, 2, 2, 900, 900, 16, mask), (4, 64), 1, 0.01)
    assert all(0 < share < 1.5 for share in row["efficiency"])  # of the time that as many threads could do it in
    assert row["tasks"][1] >= row["tasks"][0] > 0
    row |= {"enough": [False, True], "efficiency": [0.33, 0.44]}
    text = cores.table([row], {row["key"]: row | {"efficiency": [0.11, 0.22]}})
    assert text.endswith("| (11 % → 33 %) | 22 % → 44 % |\n")


def test_scratch_is_what_the_page_says_and_no_longer_call_takes_more(program):
    found = cores.scratch(program)
    table = cores.scratch_table(found)
    page = PAGE.read_text()
    head, *lines = table.splitlines()
    begin = page.index(head)
    assert [line.split("|")[1:3] for line in page[begin:].splitlines()[1 : len(lines) + 1]] == [
        line.split("|")[1:3] for line in lines
    ]
    if attnkern.build_info()["cpu_isa"] in ("zen5", "avx512bf16"):  # the page's
        assert table in page
    for (pass_name, dtype), sizes in found.items():
        problem = cores.scratch_problems(pass_name, dtype)[-1]
        longer = replace(problem, seqlen_k=2 * problem.seqlen_k, seqlen_q=min(problem.seqlen_q * 2 - 1, 2047))
        more_heads = replace(problem, heads_q=4 * problem.heads_q, heads_k=4 * problem.heads_k)
        for other in (longer, more_heads):
            assert program.ask(other, 2).scratch <= sizes[-1] * 1024


def test_the_page_has_the_tables_of_the_stored_rows():
    page, results = PAGE.read_text(), machine.ROOT / "bench" / "results"
    rows, _ = record.read(results / "cores-cpu.jsonl")
    before, _ = record.read(results / "cores-cpu-before.jsonl")
    assert rows.keys() == {problem.key for problem in cores.problems()}
    assert cores.table(cores.in_order(rows), before) in page
    assert cores.summary(cores.in_order(rows)) in page
    memory, _ = record.read(results / "training-memory-cpu.jsonl")
    assert {row["case"] for row in memory.values()} == set(training_memory.ROWS)
    assert training_memory.table(memory.values()) in page


def test_some_rows_are_measured_again(program, tmp_path):
    path = tmp_path / "rows.jsonl"
    options = ["cores", "--threads", "4", "--turns", "1", "--budget", "0.01", "--out", str(path)]
    for only in ("forward bf16 '1 x 64 x 128 x 64' all", "forward bf16 '1 x 8 x 512 x 64' all"):
        result = CliRunner().invoke(app, [*options, "--only", only], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert len(record.read(path)[0]) == 2
    table = path.with_suffix(".md").read_text()
    assert table.index("1 x 8 x 512 x 64") < table.index("1 x 64 x 128 x 64")  # as problems() has them


def test_the_command_writes_its_rows(program, tmp_path):
    path = tmp_path / "rows.jsonl"
    options = ["cores", "--threads", "4", "--longest", "128", "--turns", "1", "--budget", "0.01", "--out", str(path)]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows, runs = record.read(path)
    assert {row["pass"] for row in rows.values()} == {"forward", "backward"}
    assert path.with_suffix(".md").read_text() == cores.markdown(list(rows.values()), runs)


@pytest.mark.parametrize(
    "options",
    [("--threads", "1"), ("--threads", "many"), ("--threads", "²"), ("--pass", "sideways"), ("--only", "none")],
)
def test_what_no_run_can_do_is_said(options):
    result = CliRunner().invoke(app, ["cores", *options])
    assert result.exit_code == 2
    assert options[0] in result.output


def test_a_file_to_compare_with_that_holds_no_rows_is_said_before_anything_is_measured(tmp_path):
    before, out = tmp_path / "notes.txt", tmp_path / "rows.jsonl"
    before.write_text("hello\n")
    result = CliRunner().invoke(app, ["cores", "--before", str(before), "--out", str(out)])
    assert result.exit_code == 2
    assert "--before" in result.output
    assert not out.exists()
