"""The Triton kernels in Triton's interpreter, on CPU tensors: calls of matrix.py at tiny sizes, by the one tolerance
rule. A third opinion on what the kernels say: neither Triton's compiler nor the simulator of a GPU has a part in it."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkern
import interpreted
from attnkern.backends import triton_interpreted
from attnkern.problem import Problem
from tiers import ROOT

PAGE = (ROOT / "docs" / "triton_on_a_cpu.md").read_text()
ENVIRONMENT = {
    **os.environ,
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
}


@pytest.fixture(scope="module")
def interpreter():
    """Runs cases of interpreted.py, all in one process: Triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "interpreted"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:

        def run(name):
            child.stdin.write(f"{name}\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())

        yield run
        child.stdin.close()


@pytest.mark.parametrize("name", interpreted.CASES)
def test_call(interpreter, name):
    """Output, log-sum-exp and all gradients; of decoding the first two."""
    said = interpreter(name)
    assert not said, said


@pytest.mark.parametrize("value", ["1", "true", "On", "y", "YES", "0", "2", "", "off", " 1"])
def test_the_variable_is_read_as_triton_reads_it(monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    spec = importlib.util.find_spec("attnkern.backends.triton_interpreted")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.asked == triton.knobs.runtime.interpret


def test_without_it_an_error_says_what_to_set():
    x = torch.zeros(1, 2, 9, 16)
    hint = "triton: query is on cpu, where TRITON_INTERPRET=1, set before Python starts, has its kernels interpreted\n"
    with pytest.raises(RuntimeError, match=hint):
        attnkern.attention(x, x, x, backend="triton")


def test_a_triton_that_was_there_before_the_variable():
    said = "TRITON_INTERPRET was set after triton was imported: set it before Python starts"
    assert triton_interpreted.unavailable() == said


def test_numpy_is_needed(monkeypatch):
    monkeypatch.setattr(triton_interpreted.importlib.util, "find_spec", lambda name: None)
    assert triton_interpreted.unavailable() == "Triton's interpreter needs numpy, which is not installed"


def test_one_of_a_gpu_is_refused():
    with FakeTensorMode():
        x = torch.empty(1, 2, 9, 16, device="cuda")
    reasons = triton_interpreted.refusals(Problem.from_sdpa(x, x, x))
    assert reasons == ["TRITON_INTERPRET has its kernels interpreted, which takes CPU tensors"]


def test_the_page():
    """Its program, with the commands typed at the prompt, shows what stands below it, but for where it stops."""
    code, session = re.search(r"^```py\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE).groups()
    typed = re.findall(r"^\(Pdb\) (.*)$", session, re.MULTILINE)
    shown = [line for line in session.splitlines() if not line.startswith("(Pdb)")]
    command, given = [sys.executable, "-c", code], "\n".join(typed)
    done = subprocess.run(command, env=ENVIRONMENT, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = done.stdout.replace("(Pdb) ", "").splitlines()
    assert [line for line in told if not line.startswith((">", "->"))] == shown
    assert len(PAGE.splitlines()) <= 40
