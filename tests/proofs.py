"""What has been proven of the GPU kernels: which cases passed, by the content of all that can break them.

The files of PROOFS take long and depend on little: kernels, what compiles and launches them, the simulator, the cases
themselves. The hash of that is a file's key. A case that passed under a key is left out by `.ci/run` as long as the key
stays, but for a part that changes from commit to commit (tiers.py); `make prove` leaves out none, or with --unproven
all that passed.

The record is kept outside the checkout, in attnkern/proofs of the user's cache folder; ATTNKERN_CACHE names another
folder. With --proofs, which the Makefile gives after it has built, passes are written into it: pytest alone doesn't
know whether the libraries are those of the sources. They are written while the run goes on, so that one that is
stopped goes on later: `make prove PYTEST_ARGS=--unproven`.
"""

from __future__ import annotations

import ast
import functools
import json
import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import tiers
from gate import cache

# As in tiers.TOUCHES. What depends on the whole package isn't among them.
PROOFS = {"ptxsim", *tiers.CUDA.split(), *tiers.TRITON.split()} - {"choice", "fuzz"}
KEPT = 6  # keys of a file, the newest
AT_ONCE = 50  # cases that pass before they are written down
TESTS = Path(__file__).parent


def name_of(case: str) -> str:
    """A case's file as TOUCHES names it, or its class."""
    file, *within = case.removeprefix("tests/").split("::")
    name = "ptxsim" if file.startswith("ptxsim/") else file.removeprefix("test_").removesuffix(".py")
    return of_class if (of_class := f"{name}::{within[0]}") in PROOFS else name


@functools.cache
def listed() -> tuple[str, ...]:
    """The files of the checkout, none where it isn't git's."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=tiers.ROOT, capture_output=True, text=True)
    return tuple(done.stdout.splitlines())


@functools.cache
def imported(file: Path) -> tuple[Path, ...]:
    """What a Python file of tests/ imports of tests/, of a package every source."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in {module.split(".")[0] for module in modules} - {""}:
            found |= {path for path in [TESTS / f"{name}.py"] if path.exists()} | set(sources(name))
    return tuple(found)


@functools.cache
def sources(package: str) -> tuple[Path, ...]:
    return tuple(path for path in (TESTS / package).rglob("*.*") if path.suffix in (".py", ".cu", ".cpp"))


def with_helpers(file: Path, seen: set[Path]) -> set[Path]:
    """A file of tests/ and all of tests/ that it needs."""
    if file not in seen:
        seen.add(file)
        for helper in imported(file) if file.suffix == ".py" else ():
            with_helpers(helper, seen)
    return seen


def release_of(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


@functools.cache
def key_of(name: str) -> str | None:
    """None where files can't be listed, or nothing was built."""
    built = tiers.ROOT / "attnkern/_build.json"
    if not listed() or not built.exists():
        return None
    files = {path for path in listed() if name in tiers.names_touched(path)}
    tests = TESTS.glob("ptxsim/*.py") if name == "ptxsim" else [tiers.ROOT / tiers.path_of(name).split("::")[0]]
    seen: set[Path] = set()
    for test in [TESTS / "conftest.py", *tests]:
        with_helpers(test, seen)
    files |= {str(path.relative_to(tiers.ROOT)) for path in seen}
    tools = [platform.python_version(), *map(release_of, ("torch", "triton", "numpy"))]
    tools.append(json.dumps(json.loads(built.read_text())["cuda"]))
    return cache.key_of(name, *tools, *(f"{path} {cache.digest(path)}" for path in sorted(files)))


def record_of(name: str) -> Path:
    return cache.product().user_folder() / "proofs" / f"{name.replace('::', '.')}-{key_of(name)}.json"


def proven() -> set[str]:
    """The cases that need no other proof."""
    found = set()
    for name in sorted(PROOFS):
        if key_of(name) is not None and (record := record_of(name)).exists():
            found |= set(json.loads(record.read_text()))
    return found


def write(passed: set[str]) -> None:
    by_name = defaultdict(set)
    for case in passed:
        by_name[name_of(case)].add(case)
    for name in PROOFS & by_name.keys():
        if key_of(name) is None:
            continue
        record = record_of(name)
        record.parent.mkdir(parents=True, exist_ok=True)
        before = set(json.loads(record.read_text())) if record.exists() else set()
        unfinished = record.with_suffix(".tmp")
        unfinished.write_text(json.dumps(sorted(before | by_name[name]), indent=0))
        unfinished.replace(record)
        for old in sorted(
            record.parent.glob(f"{name.replace('::', '.')}-*.json"), key=lambda path: -path.stat().st_mtime
        )[KEPT:]:
            old.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------ pytest's hooks


class Passes:
    """What passes, in the process that hears from all workers, which all leave out the same."""

    def __init__(self, writes: bool):
        self.writes, self.called, self.passed = writes, set(), set()
        if writes:
            list(map(key_of, PROOFS))  # of what is run, whatever is edited before it ends

    def pytest_runtest_logreport(self, report):
        if report.outcome != "passed":
            self.called.discard(report.nodeid)
        elif report.when == "call" and "gpu" not in report.keywords:  # the key doesn't know which GPU
            self.called.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid in self.called:
            self.passed.add(report.nodeid)
        if len(self.passed) >= AT_ONCE:
            self.write_down()

    def pytest_sessionfinish(self):
        self.write_down()

    def write_down(self):
        if self.writes:
            write(self.passed)
        self.passed = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["proven"] = sorted(node.config.proven)


def pytest_addoption(parser):
    parser.addoption("--proofs", action="store_true", help="write down what passes of the GPU proofs: tests/proofs.py")
    parser.addoption("--unproven", action="store_true", help="all tests but the GPU proofs that stand")


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.proven = set(config.workerinput["proven"])
    else:
        config.proven = proven() if _leaves_out(config) else set()
        config.pluginmanager.register(Passes(config.getoption("--proofs")))
    config.is_proof = lambda case: name_of(case) in PROOFS


def _leaves_out(config) -> bool:
    return config.getoption("--tier") == "landing" or config.getoption("--unproven")


def pytest_report_header(config) -> Iterator[str]:
    if _leaves_out(config):
        yield f"{len(config.proven)} cases of GPU proofs passed before, under the same content"
