"""The Triton kernels compile with the oldest and the newest Triton that the package supports. (All other tests run with
one between these: the one that their torch requires.)"""

import fcntl
import functools
import json
import os
import re
import subprocess
import sys

import pytest

import triton_variants
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


@pytest.mark.parametrize("capability", triton_variants.PROBLEMS)
@pytest.mark.parametrize("version", TRITONS)
def test_kernels_compile(version, capability, tmp_path):
    """A Triton that isn't there is a failure: what wasn't tried must not look like what was."""
    folder, why_not = installed(version)
    assert not why_not, f"no Triton {version} beside the environment's own: {why_not}"
    paths = map(str, (folder, ROOT, ROOT / "tests"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "triton_variants", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *lines = map(json.loads, done.stdout.splitlines())
    assert first == {"triton": version}
    assert {x["variant"]: x["said"] for x in lines if x["said"]} == {}
    assert len(lines) == sum(len(problem.kernels.split()) for problem in triton_variants.PROBLEMS[capability])


def test_the_versions_are_those_that_the_package_asks_for():
    """The oldest of pyproject.toml; and every kernel is among what is compiled."""
    assert f"triton>={TRITONS[0].rsplit('.', 1)[0]};" in (ROOT / "pyproject.toml").read_text()
    compiled = {name for problems in triton_variants.PROBLEMS.values() for p in problems for name in p.kernels.split()}
    assert compiled == set(triton_variants.steps(triton_variants.Problem(64, ""), 80))
