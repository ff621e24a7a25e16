"""What `make test`, `make test-changed`, `.ci/run` and `make prove` run: tests/tiers.py, tests/proofs.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import proofs
import tiers
from matrix import in_turn

BF16, FP16 = torch.bfloat16, torch.float16
SOME = ["tests/test_tiers.py", "tests/test_band.py", "tests/test_rng.py"]


@pytest.fixture
def costs():
    return tiers.Costs(
        {"a.py::long[x]": 5.0, "a.py::long[y]": 4.0, "b.py::once": 8.0, "b.py::whole": 60.0}, {"a.py": 0.05}
    )


def grid(function, *sizes):
    """The cases of a function with so many values of each parameter."""
    cases = [((), {})]
    for n, size in enumerate(sizes):
        cases = [((*name, str(i)), {**values, f"p{n}": i}) for name, values in cases for i in range(size)]
    return [(f"{function}[{'-'.join(name)}]", values) for name, values in cases]


COLLECT = """
import json, sys, pytest
for options in json.loads(sys.argv[1]):
    status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *options])
    print("status", int(status), flush=True)
"""


def collected(*runs):
    """The cases that pytest finds with these options of each run, one run after the other in a process."""
    command = [sys.executable, "-c", COLLECT, json.dumps(runs)]
    done = subprocess.run(command, cwd=tiers.ROOT, capture_output=True, text=True)
    *found, rest = done.stdout.split("status 0\n")
    assert (len(found), rest) == (len(runs), ""), done.stdout + done.stderr
    return [{line for line in lines.splitlines() if "::" in line} for lines in found]


def test_every_function_is_in_the_quick_tier_and_every_case_in_it_or_in_one_shard(costs):
    cases = [*grid("a.py::wide", 9, 8, 7), *grid("a.py::single", 40), ("b.py::once", {}), ("b.py::whole", {})]
    cases += [("a.py::long[x]", {"p": 0}), ("a.py::long[y]", {"p": 1})]
    everything = {case for case, _ in cases}
    assert tiers.choose(cases, 1e6, costs) == everything
    for seconds in (15.0, 25.0):
        chosen = tiers.choose(cases, seconds, costs)
        assert {tiers.function_of(case) for case in chosen} == {
            "a.py::wide",
            "a.py::single",
            "a.py::long",
            "b.py::once",
        }
        assert sum(map(costs, chosen)) <= seconds + 1e-9
        parts = tiers.shards(everything - chosen, costs, 2.0)
        assert len(parts) > 5
        assert sorted(case for part in parts for case in part) == sorted(everything - chosen)


def test_cases_that_show_something_new_come_first(costs):
    cases = grid("a.py::wide", 4, 5)
    order = tiers.in_order(cases, costs)
    assert sorted(order) == sorted(case for case, _ in cases)
    values = dict(cases)
    shown = {item for case in order[:8] for item in values[case].items()}
    assert len(shown) == 9
    three = tiers.in_order(grid("a.py::wide", 4, 4, 4), costs)
    values = dict(grid("a.py::wide", 4, 4, 4))
    pairs = {(x, y) for case in three[:40] for x in values[case].items() for y in values[case].items() if x < y}
    assert len(pairs) == 3 * 16  # and 24 cases are left


def test_a_function_of_proofs_has_its_seconds_and_a_case_at_least(costs, monkeypatch):
    cases = [*grid("a.py::wide", 4, 5), ("a.py::long[x]", {"p": 0}), ("a.py::long[y]", {"p": 1}), ("b.py::whole", {})]
    monkeypatch.setattr(tiers, "PROVEN", 0.4)
    chosen = tiers.part_of_proofs(cases, costs)
    wide = chosen - {"a.py::long[y]", "b.py::whole"}
    assert len(wide) == 8
    assert {place for case in wide for place in enumerate(case.removesuffix("]").split("[")[1].split("-"))} == {
        (n, str(i)) for n, size in enumerate((4, 5)) for i in range(size)
    }
    assert chosen - wide == {"a.py::long[y]", "b.py::whole"}


def test_values_take_turns():
    """Each is met, and of two short parameters all pairs."""
    values = {"a": "ABCDEF", "b": [1, 2], "c": [BF16, FP16]}
    given = in_turn(**values)
    assert given["argnames"] == ("a", "b", "c")
    assert len(given["argvalues"]) == 6 * 2 * 2
    landing = [each.values for each in given["argvalues"] if not each.marks]
    assert len(landing) == 6
    assert all({x[n] for x in landing} == set(values[name]) for n, name in enumerate(values))
    assert len({x[1:] for x in landing}) == 4
    given = in_turn(**{"a, b": [("A", 1), ("B", 2), ("C", 3)]}, c=[BF16, FP16])
    assert given["argnames"] == ("a", "b", "c")
    assert [each.values for each in given["argvalues"] if not each.marks] == [
        ("A", 1, BF16),
        ("B", 2, FP16),
        ("C", 3, FP16),
    ]


def test_the_tiers_hold_what_they_say(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNKERN_CACHE", str(tmp_path))  # in which nothing is proven
    everything, quick, landing = collected(SOME, [*SOME, "--tier", "quick"], [*SOME, "--tier", "landing"])
    assert everything
    assert quick <= everything
    assert landing == everything  # none is a GPU proof, and no other stands


def test_what_is_proven_is_left_out_of_all_tests_if_asked_for():
    items = [SimpleNamespace(nodeid=f"tests/test_rng.py::{name}") for name in ("stands", "other")]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config = SimpleNamespace(getoption=lambda _: "all", proven={items[0].nodeid}, hook=hook)
    tiers.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == ["tests/test_rng.py::other"]


def test_every_file_touches_tests_that_exist():
    folders = ("attnkern", "bench", "csrc", "docs", "tests", "triton_kernels", ".ci")
    kinds = {".py", ".cpp", ".cu", ".cuh", ".h", ".map", ".md", ".json", ".jsonl", ""}
    found = [path for folder in folders for path in (tiers.ROOT / folder).rglob("*")]
    found += list(tiers.ROOT.glob("*"))
    listed = [str(path.relative_to(tiers.ROOT)) for path in found if path.is_file() and path.suffix in kinds]
    assert len(listed) > 100
    assert all(tiers.touched([path]) for path in listed if not path.startswith("."))
    names = {name for _, names in tiers.TOUCHES for name in names.split()} - {"ptxsim"}
    assert [name for name in names if not tiers.exists(tiers.path_of(name))] == []
    ours = {path for path in listed if path.startswith("tests/test_")}
    others = [file for file in listed if not file.startswith("tests/test_")]
    reached = {path.split("::")[0] for file in others for path in tiers.touched([file])}
    assert ours - reached == set()  # some other file's change runs each


def test_every_file_has_its_times():
    """Else a tier isn't what it says. Makefile's target `prove` tells how they are written."""
    cost = tiers.costs()
    found = [*tiers.ROOT.glob("tests/test_*.py"), *tiers.ROOT.glob("tests/ptxsim/test_*.py")]
    names = {str(path.relative_to(tiers.ROOT)) for path in found}
    assert names - cost.brief.keys() - {case.split("::")[0] for case in cost.long} == set()


def test_times_are_merged(tmp_path):
    path = tmp_path / "durations.json"
    timed = [f"tests/test_rng.py::{name}" for name in ("slow", "quick", "gone")]
    for seconds in ({timed[0]: 3.0, timed[1]: 0.01, timed[2]: 2.0}, {timed[0]: 4.0}, {timed[2]: 0.02}):
        plugin = tiers.Timed(path)
        plugin.seconds.update(seconds)
        plugin.pytest_sessionfinish()
    assert json.loads(path.read_text())["brief"] == {"tests/test_rng.py": 0.02}
    assert json.loads(path.read_text())["long"] == {timed[0]: 4.0}


def test_what_an_earlier_run_has_compiled_is_counted_as_then(tmp_path):
    path, case = tmp_path / "durations.json", "tests/test_rng.py::slow"
    for seconds, found, counted in ((3.0, False, 3.0), (0.2, True, 3.0), (5.0, True, 5.0), (0.2, False, 0.2)):
        report = SimpleNamespace(nodeid=case, cpu_seconds=seconds, at_least=found)
        plugin = tiers.Timed(path)
        plugin.pytest_runtest_logreport(report)
        plugin.pytest_sessionfinish()
        assert tiers.costs(path).long == {case: counted}


def test_times_of_a_file_without_a_brief_case_are_kept(tmp_path):
    plugin = tiers.Timed(tmp_path / "durations.json")
    plugin.seconds |= {"tests/test_rng.py::slow": 3.0, "tests/test_no_more.py::slow": 3.0}
    plugin.pytest_sessionfinish()
    assert tiers.costs(plugin.path).long == {"tests/test_rng.py::slow": 3.0}


TIMED = """import subprocess, sys, time

BURNS = "import time; end = time.process_time() + 0.4\\nwhile time.process_time() < end: pass"

def test_waits():
    time.sleep(0.6)

def test_works():
    exec(BURNS)

def test_has_a_child_that_works():
    subprocess.run([sys.executable, "-c", BURNS], check=True)
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["in one process", "by a worker"])
def test_times_are_of_the_cpu(workers, tmp_path):
    """Of the case and its children, so that what else the machine does and what a case waits for is not in them."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/tiers.py").write_bytes(Path(tiers.__file__).read_bytes())
    (tmp_path / "tests/test_timed.py").write_text(TIMED)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    command = [sys.executable, "-m", "pytest", "-p", "tiers", "--time-into", "times.json", *workers, "tests"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path / "tests")}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = tiers.costs(tmp_path / "times.json")
    assert found("tests/test_timed.py::test_waits") < 0.1
    assert 0.35 < found("tests/test_timed.py::test_works") < 0.6
    assert 0.35 < found("tests/test_timed.py::test_has_a_child_that_works") < 1


# ---------------------------------------------------------------------------------------------------- proofs that stand


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Two kernels, some of the package, a helper of the tests and tests of a GPU's and a CPU's kernel, in a folder of
    their own."""
    files = {
        "csrc/cuda/forward.cu": "kernel",
        "csrc/cpu/forward.h": "kernel",
        "attnkern/_build.json": '{"cuda": {"archs": ["80"]}, "flags": "-O3"}',
        "attnkern/__init__.py": "from .mask import Mask",
        "attnkern/mask.py": "def later():\n    from . import bits",
        "attnkern/bits.py": "",
        "attnkern/params.py": "",
        "attnkern/integrations/__init__.py": "",
        "attnkern/integrations/distributed.py": "",
        "attnkern/integrations/shards.py": "",
        "docs/masks.md": "",
        "requirements-dev.txt": "",
        "tests/conftest.py": "import attnkern\n\ndef simulator():\n    import ptxsim",
        "tests/matrix.py": "import ptxsim",
        "tests/ptxsim/__init__.py": "",
        "tests/ptxsim/machine.py": "",
        "tests/test_cuda_kernels.py": "from matrix import call\n\ndef test_it(): ...",
        "tests/test_band.py": 'CODE = """\nfrom attnkern.integrations import shards\n"""\n\ndef test_it(): ...',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    monkeypatch.setattr(proofs.cache, "ROOT", tmp_path)
    monkeypatch.setattr(proofs, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(proofs, "PROOFS", {"band", "cuda_kernels"})
    monkeypatch.setattr(proofs, "listed", lambda: tuple(files))
    monkeypatch.setenv("ATTNKERN_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    forget()


def forget():
    for function in (proofs.key_of, proofs.imported, proofs.sources):
        function.cache_clear()


@pytest.mark.parametrize(
    ("changed", "standing"),
    [
        ("attnkern/mask.py", "cuda_kernels"),
        ("attnkern/bits.py", "cuda_kernels"),  # by way of mask, within a function
        ("attnkern/params.py", ""),
        ("attnkern/_build.json", ""),
        ("attnkern/integrations/distributed.py", "cuda_kernels band"),
        ("attnkern/integrations/shards.py", "cuda_kernels"),  # imported by code in a string
        ("csrc/cpu/forward.h", "cuda_kernels"),
        ("csrc/cuda/forward.cu", "band"),
        ("docs/masks.md", "cuda_kernels band"),
        ("requirements-dev.txt", "cuda_kernels"),
        ("tests/conftest.py", ""),
        ("tests/test_band.py", "cuda_kernels"),
        ("tests/test_cuda_kernels.py", "band"),
        ("tests/ptxsim/machine.py", "band"),  # by way of matrix; conftest imports it within a function alone
    ],
)
def test_a_proof_stands_until_what_it_depends_on_changes(checkout, changed, standing):
    cases = {name: f"tests/test_{name}.py::test_it" for name in ("band", "cuda_kernels")}
    assert proofs.proven() == set()
    proofs.write({*cases.values(), "tests/test_docs.py::test_it"})
    assert proofs.proven() == set(cases.values())  # no other is a proof
    text = (checkout / changed).read_text()
    other = text.replace("80", "90") if text.startswith("{") else text + "\n"
    (checkout / changed).write_text(other)
    forget()
    assert proofs.proven() == {cases[name] for name in standing.split()}
    (checkout / changed).write_text(text)
    forget()
    assert proofs.proven() == set(cases.values())


def test_a_proof_goes_by_every_page_that_it_reads():
    for name in proofs.CPU_PROOFS:
        for page in re.findall(r'"docs"(?: / "\w+")* / "[\w.]+"', (tiers.ROOT / tiers.path_of(name)).read_text()):
            assert name in tiers.names_touched(page.replace('"', "").replace(" / ", "/")), (name, page)


def test_only_what_passed_as_a_whole_is_proven(checkout):
    class Report:
        def __init__(self, case, when, outcome, *keywords):
            self.nodeid, self.when, self.outcome = f"tests/test_cuda_kernels.py::{case}", when, outcome
            self.keywords = keywords

    for writes in (False, True):
        passes = proofs.Passes(writes)
        for report in (
            Report("passes", "call", "passed"),
            Report("passes", "teardown", "passed"),
            Report("fails", "call", "failed"),
            Report("fails", "teardown", "passed"),
            Report("runs_on_a_gpu", "call", "passed", "gpu"),
            Report("runs_on_a_gpu", "teardown", "passed", "gpu"),
            Report("skipped", "setup", "skipped"),
            Report("is_not_torn_down", "call", "passed"),
            Report("is_not_torn_down", "teardown", "failed"),
        ):
            passes.pytest_runtest_logreport(report)
        passes.pytest_sessionfinish()
        assert proofs.proven() == ({"tests/test_cuda_kernels.py::passes"} if writes else set())


def test_a_run_that_is_stopped_leaves_what_has_passed(checkout):
    passes, many = proofs.Passes(True), proofs.AT_ONCE + 1
    for n in range(many):
        for when in ("setup", "call", "teardown"):
            case = f"tests/test_cuda_kernels.py::test_it[{n}]"
            passes.pytest_runtest_logreport(SimpleNamespace(nodeid=case, when=when, outcome="passed", keywords={}))
    assert len(proofs.proven()) == many - 1


def test_a_change_touches_its_tests():
    assert tiers.touched(["README.md"]) == ["tests/test_docs.py", "tests/test_readme.py"]
    assert tiers.touched(["tests/test_rng.py"]) == ["tests/test_rng.py"]
    assert "tests/test_cuda_sm90.py" in tiers.touched(["csrc/cuda/forward_sm90.cu"])
    with pytest.raises(LookupError, match="nothing: no line of TOUCHES"):
        tiers.touched(["nothing"])
