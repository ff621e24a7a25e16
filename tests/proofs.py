"""What has been proven: which cases passed, by the content of all that can break them.

GPU_PROOFS take long and depend on little: kernels, what compiles and launches them, the simulator, the cases
themselves. CPU_PROOFS depend on the libraries and on what they import of the package, on the machine's instructions
and on the packages that are installed. The hash of that is a file's key. A case that passed under a key is left out
by `.ci/run` as long as the key stays, but for a part that changes from commit to commit (tiers.py); `make prove` leaves
out none, or with --unproven all that passed.

The record is kept outside the checkout, in attnkern/proofs of the user's cache folder; ATTNKERN_CACHE names another
folder. With --proofs, which the Makefile gives after it has built, passes are written into it: pytest alone doesn't
know whether the libraries are those of the sources. They are written while the run goes on, so that one that is
stopped goes on later: `make prove PYTEST_ARGS=--unproven`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import tiers
from gate import cache

# As in tiers.TOUCHES. What runs commands or reads the checkout's other files isn't among them.
GPU_PROOFS = {"ptxsim", *tiers.CUDA.split(), *tiers.TRITON.split()} - {"choice", "fuzz"}
CPU_PROOFS = {"isa", *tiers.CALLS.split(), *tiers.TORCH.split()}
PROOFS = GPU_PROOFS | CPU_PROOFS
KEPT = 6  # keys of a file, the newest
AT_ONCE = 50  # cases that pass before they are written down
TESTS = Path(__file__).parent
TEXT_IMPORTS = r"(?m)^\s*(?:from|import) (\w[\w.]*)(?: import ([\w, ]+))?"


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
    """What a Python file of the checkout imports of it, in code that it holds as text, too. Of a package of tests/ that
    is every source."""
    found: set[Path] = set()
    for folder, name in names_imported(ast.parse(file.read_text()), file):
        parts = name.split(".")
        if folder == TESTS and sources(parts[0]):
            found |= set(sources(parts[0]))
        else:
            for count in range(1, len(parts) + 1):
                module = folder.joinpath(*parts[:count])
                found |= {path for path in (module.with_suffix(".py"), module / "__init__.py") if path.exists()}
    return tuple(found)


def names_imported(code: ast.AST, file: Path) -> Iterator[tuple[Path, str]]:
    """Modules, or names of modules, and the folders that they may be in."""
    for node in ast.walk(code):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        folders = [TESTS, tiers.ROOT]
        if isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            if node.level:
                folders = [file.parents[node.level - 1]]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, attributes in re.findall(TEXT_IMPORTS, node.value):
                names += [module, *(f"{module}.{name.strip()}" for name in attributes.split(","))]
        yield from itertools.product(folders, names)


@functools.cache
def sources(package: str) -> tuple[Path, ...]:
    return tuple(path for path in (TESTS / package).rglob("*.*") if path.suffix in (".py", ".cu", ".cpp"))


def with_imported(files: Iterable[Path], within: Path) -> set[Path]:
    """These files and all that they need of a folder."""
    seen: set[Path] = set()
    waiting, folder = list(files), f"{within}/"
    while waiting:
        if (file := waiting.pop()) in seen or not str(file).startswith(folder):
            continue
        seen.add(file)
        waiting += imported(file) if file.suffix == ".py" else ()
    return seen


@functools.cache
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
    within = tiers.ROOT if name in CPU_PROOFS else TESTS
    seen, of_all = with_imported(tests, within), with_imported([TESTS / "conftest.py"], within)
    tools = [platform.python_version(), *map(release_of, ("torch", "triton", "numpy"))]
    flags = json.loads(built.read_text())
    if name in GPU_PROOFS:
        seen |= of_all
        tools.append(json.dumps(flags["cuda"]))
    else:
        launches = TESTS / "ptxsim/__init__.py" in seen
        # conftest.py imports the simulator only where a test has done so.
        seen |= {path for path in of_all if path.parent == TESTS or TESTS not in path.parents}
        files |= {path for path in listed() if path.startswith("csrc/") and (launches or "/cuda/" not in path)}
        files |= {"requirements-dev.txt", "pyproject.toml"}
        tools += [json.dumps(flags), instructions()]
    files |= {str(path.relative_to(tiers.ROOT)) for path in seen}
    return cache.key_of(name, *tools, *(f"{path} {cache.digest(path)}" for path in sorted(files)))


@functools.cache
def instructions() -> str:
    """What this machine's processors have, and how many there are."""
    about = Path("/proc/cpuinfo")
    flags = re.search("^(flags|Features).*", about.read_text() if about.exists() else "", re.MULTILINE)
    return f"{platform.machine()} {os.cpu_count()} {flags.group() if flags else platform.processor()}"


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
    parser.addoption("--proofs", action="store_true", help="write down what passes of the proofs: tests/proofs.py")
    parser.addoption("--unproven", action="store_true", help="all tests but the proofs that stand")


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.proven = set(config.workerinput["proven"])
    else:
        config.proven = proven() if _leaves_out(config) else set()
        config.pluginmanager.register(Passes(config.getoption("--proofs")))
    config.is_gpu_proof = lambda case: name_of(case) in GPU_PROOFS


def _leaves_out(config) -> bool:
    return config.getoption("--tier") == "landing" or config.getoption("--unproven")


def pytest_report_header(config) -> Iterator[str]:
    if _leaves_out(config):
        yield f"{len(config.proven)} cases of proofs passed before, under the same content"
