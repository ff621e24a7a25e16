"""The Triton kernels compile with the oldest and the newest Triton that the package supports, and are launched. (All
other tests run with one between these: the one that their torch requires.)"""

import fcntl
import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import triton

import triton_variants
from matrix import in_turn
from tiers import ROOT

TRITONS = re.search(r"^TRITONS := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()


@functools.cache
def installed(version):
    """The folder that holds a Triton, and what make said where it couldn't put it there."""
    folder = f".venv-triton-{version}"
    (ROOT / folder).mkdir(exist_ok=True)
    with open(ROOT / folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ["make", "-s", f"PYTHON={sys.executable}", f"{folder}/.installed"], cwd=ROOT, capture_output=True, text=True
        )
    return ROOT / folder, done.stderr if done.returncode else ""


def lines_of(version, cache, module, *arguments):
    """What a module of this folder prints with a Triton. One that isn't there is a failure: what wasn't tried must not
    look like what was."""
    folder, why_not = (None, "") if version == triton.__version__ else installed(version)
    assert not why_not, f"no Triton {version} beside the environment's own: {why_not}"
    paths = map(str, filter(None, (folder, ROOT, ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *lines = map(json.loads, done.stdout.splitlines())
    assert first == {"triton": version}
    return lines


@pytest.mark.parametrize(**in_turn(version=TRITONS, capability=list(triton_variants.PROBLEMS)))
def test_kernels_compile(version, capability, tmp_path):
    lines = lines_of(version, tmp_path, "triton_variants", capability)
    assert {x["variant"]: x["said"] for x in lines if x["said"]} == {}
    assert len(lines) == sum(len(problem.kernels.split()) for problem in triton_variants.PROBLEMS[capability])


@pytest.mark.parametrize("version", sorted({*TRITONS, triton.__version__}))
def test_launchers_pass_what_the_kernels_take(version, tmp_path):
    """Triton's C code takes our arguments apart: named tuples within each other, None, tensor descriptors."""
    lines = lines_of(version, tmp_path, "triton_launches", 90, tmp_path)
    assert {x["kernel"]: x["said"] for x in lines if x["said"]} == {}
    kernels = Counter(x["kernel"].removeprefix("Triton's ").removesuffix("_kernel") for x in lines)
    once = dict.fromkeys(("bias_gradient", "table_gradient", "visits"), 1)
    twice = dict.fromkeys(("decode", "combine"), 2)
    assert kernels == {**dict.fromkeys(("forward", "delta", "dkdv", "dq"), 4), **once, **twice}
    assert min(x["parameters"] for x in lines) > 10


def test_the_versions_are_those_that_the_package_asks_for():
    """The oldest of pyproject.toml; and every kernel is among what is compiled."""
    assert f"triton>={TRITONS[0].rsplit('.', 1)[0]};" in (ROOT / "pyproject.toml").read_text()
    compiled = {name for problems in triton_variants.PROBLEMS.values() for p in problems for name in p.kernels.split()}
    assert compiled == set(triton_variants.steps(triton_variants.Problem(64, ""), 80))
