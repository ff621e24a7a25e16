"""`python -m attnkern check`: what it says of kernels that are right, wrong, crash, hang or are left out."""

import functools
import importlib
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import attnkern
import attnkern.__main__ as command
import routes
from attnkern import check
from attnkern.arguments import asked_to_look
from attnkern.backends import disabled

table = importlib.import_module("attnkern.backends")  # as an attribute of the package it is the public function
cuda = table.cuda


def test_on_this_machine():
    # A busy machine, on which spinning threads stand in each other's way, isn't one that hangs.
    command = [sys.executable, "-m", "attnkern", "check", "--seconds", "1000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"attnkern {attnkern.__version__}, torch {torch.__version__}, triton ")
    assert lines[-1].split(maxsplit=1) == ["status", "right: all that can run here"]
    found = {name: text.strip() for name, _, text in (line.partition(" ") for line in lines)}
    assert found["cpu"].startswith(f"right: {len(check.FAMILIES['cpu'].calls)} calls in ")
    assert found["reference"].startswith("right: ")
    assert "F.sdpa" in found["speed"]
    assert " times as fast" in found["speed"]
    for name in check.FAMILIES:
        assert found[name].startswith(("right: ", "not run: "))


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_time_that_is_none(seconds, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["check", "--seconds", seconds])
    assert f"argument --seconds: must be a number of seconds, more than 0, got {seconds}" in capsys.readouterr().err


def test_every_family_that_can_be_left_out_is_checked():
    assert check.FAMILIES.keys() == {*disabled.FAMILIES, "reference"}
    for name, family in check.FAMILIES.items():
        assert set(family.without) <= disabled.FAMILIES.keys() - {name}
        assert name.split("-")[0] == family.backend


# What a family's process does after it has said what it begins, and what is to be said of it.
TROUBLE = {
    "cuda": (
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "DIED of SIGSEGV in the second; ATTNKERN_DISABLE=cuda leaves it out",
    ),
    "cuda-decode": (
        "time.sleep(1000)",
        "HUNG in the second: no answer in 5 s; ATTNKERN_DISABLE=cuda-decode leaves it out",
    ),
    "cuda-sm90": (
        "tell(wrong='the second', why='output[0]: got 1, expected 2'); tell(done=True)",
        "WRONG in the second: output[0]: got 1, expected 2; ATTNKERN_DISABLE=cuda-sm90 leaves it out",
    ),
    "cuda-sm90-backward": (
        "raise RuntimeError('attnkern: CUDA error: an illegal memory access was encountered')",
        "FAILED in the second: RuntimeError: attnkern: CUDA error: an illegal memory access was encountered; "
        "ATTNKERN_DISABLE=cuda-sm90-backward leaves it out",
    ),
    "cuda-sm90-fused": (
        "os._exit(0)",
        "STOPPED in the second without a word; ATTNKERN_DISABLE=cuda-sm90-fused leaves it out",
    ),
    "triton": ("os._exit(3)", "FAILED in the second: exit status 3; ATTNKERN_DISABLE=triton leaves it out"),
    "reference": ("print('noise'); sys.exit('no memory')", "FAILED in the second: no memory"),
    "cpu": ("tell(right='the second'); tell(done=True)", "right: 2 calls in "),
    "speed-cpu": ("tell(speed=['cpu: a call', 2.0, 5.0])", ""),
}
PROCESS = """
import json, os, signal, sys, time

def tell(**line):
    print(json.dumps(line), flush=True)

tell(begins="the first")
tell(right="the first")
tell(begins="the second")
"""


def test_trouble_is_told_and_the_others_go_on(monkeypatch, capsys):
    monkeypatch.setattr(check, "command", lambda name: [sys.executable, "-c", PROCESS + TROUBLE[name][0]])
    monkeypatch.setattr(check, "families", lambda: dict.fromkeys(name for name in TROUBLE if name in check.FAMILIES))
    assert check.main(seconds=5.0) == 1
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    for name, (_, text) in TROUBLE.items():
        if name in check.FAMILIES:
            assert found[name] == text or (text.startswith("right") and found[name].startswith(text)), name
    # Only devices of which nothing is wrong are timed, and the reference is none.
    assert found["speed"] == "cpu: a call, forward and backward: attnkern 2 ms, F.sdpa 5 ms: 2.50 times as fast"
    wrong = [name for name, (_, text) in TROUBLE.items() if name in check.FAMILIES and not text.startswith("right")]
    assert found["status"].startswith(f"NOT RIGHT: {', '.join(wrong)}. ")


def test_what_is_slow_does_not_hang(monkeypatch):
    """The time is that of a call, not of all: a busy machine takes minutes for them, and is right."""
    slow = "for _ in range(12): time.sleep(0.5); tell(right='another')\ntell(done=True)"
    monkeypatch.setattr(check, "command", lambda name: [sys.executable, "-c", PROCESS + slow])
    assert check.run("cpu", seconds=5.0).text.startswith("right: 13 calls in ")


def test_nothing_but_plain_torch_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(check, "command", lambda name: [sys.executable, "-c", PROCESS + TROUBLE["cpu"][0]])
    monkeypatch.setattr(check, "families", lambda: {"cpu": "the compiled library is not loaded", "reference": None})
    assert check.main() == 1
    out = capsys.readouterr().out
    assert "cpu                  not run: the compiled library is not loaded" in out
    assert "no kernels here: plain torch computes everything" in out


def test_a_process_leaves_out_what_would_take_its_calls(monkeypatch):
    environment = (
        f"import os; print(__import__('json').dumps({{'wrong': 'x', 'why': os.environ['{disabled.VARIABLE}']}}))"
    )
    monkeypatch.setattr(check, "command", lambda name: [sys.executable, "-c", environment])
    monkeypatch.setattr(disabled, "left_out", frozenset({"triton"}))
    assert "cuda-decode,cuda-sm90,cuda-sm90-backward,triton;" in check.run("cuda").text
    assert "WRONG in x: triton;" in check.run("cuda-sm90").text


def test_wrong_numbers_are_found(monkeypatch, capsys):
    """The forward pass and the gradients, of every call."""
    real = attnkern.attention
    before = torch.are_deterministic_algorithms_enabled()

    def slightly_wrong(*tensors, **options):
        out, lse = real(*tensors, **options)
        return out * 1.1, lse

    monkeypatch.setattr(attnkern, "attention", slightly_wrong)
    check.run_one("cpu")
    torch.use_deterministic_algorithms(before)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["wrong"] for line in lines if "wrong" in line] == [call.name for call in check.FAMILIES["cpu"].calls]
    assert all("times what is allowed" in line["why"] for line in lines if "wrong" in line)
    assert not any("right" in line for line in lines)
    assert lines[-1] == {"done": True}


def test_second_derivatives_that_are_wrong_are_found(monkeypatch):
    (call,) = check.FAMILIES["triton-second-order"].calls
    family = check.FAMILIES["cpu"]
    check.check_call(family, call, "cpu")
    real = attnkern.plain.tangent
    monkeypatch.setattr(attnkern.plain, "tangent", lambda *args: tuple(1.01 * x for x in real(*args)))
    with pytest.raises(AssertionError, match="second order: tout"):
        check.check_call(family, call, "cpu")


# The families of a GPU, with the CUDA kernels' own host code and the simulator of one.

HOPPER = cuda.Chip(90, 8, 228 * 1024, 227 * 1024)


@pytest.fixture
def leave_out(monkeypatch):
    """As ATTNKERN_DISABLE does where it is set before attnkern is imported."""

    def leave_out(*families):
        monkeypatch.setattr(disabled, "left_out", frozenset(families))
        mask = sum(cuda.LEFT_OUT[name] for name in families if name in cuda.LEFT_OUT)
        torch.ops.attnkern.cuda_leave_out(mask)
        cuda._plan.cache_clear()  # plans are made once
        return mask

    yield leave_out
    torch.ops.attnkern.cuda_leave_out(0)
    cuda._plan.cache_clear()


@pytest.fixture
def on_hopper(monkeypatch):
    """Makes `backend="cuda"` take CPU tensors for those of a Hopper."""
    for attribute, value in (
        ("unavailable", lambda: None),
        ("capability", lambda index: 90),
        ("chip", lambda index: HOPPER),
    ):
        monkeypatch.setattr(cuda, attribute, value)
    monkeypatch.setitem(table.TABLE, "cpu", (cuda, *table.TABLE["cpu"]))


def lines_of(family, call):
    return check.plan_of(family, call, call.made("cpu"))


def test_every_family_has_calls_with_key_ranges():
    families = {name: family for name, family in check.FAMILIES.items() if family.backend != "reference"}
    del families["triton-second-order"]
    for family in families.values():
        assert any(call.ranges is not None for call in family.calls)
        assert all("key_ranges" in call.made("cpu").tensors for call in family.calls if call.ranges is not None)


@pytest.mark.parametrize("name", [name for name in check.FAMILIES if name.startswith("cuda")])
def test_every_call_of_a_family_is_planned_for_its_kernels(name, leave_out, on_hopper):
    family = check.FAMILIES[name]
    leave_out(*family.without)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(family.deterministic)
    try:
        for call in family.calls:
            assert any(line.startswith(family.kernel) for line in lines_of(family, call)), call.name
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", cuda.LEFT_OUT)
def test_what_is_left_out_is_in_no_plan(name, leave_out, on_hopper):
    """And the plan says why, where there is something to say it of."""
    family = check.FAMILIES[name]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(family.deterministic)
    try:
        leave_out(name)
        for call in family.calls:
            lines = lines_of(family, call)
            assert not any(line.startswith(family.kernel) for line in lines)
            if name in ("cuda-sm90", "cuda-sm90-backward"):
                assert any(f"(not sm_90a: {disabled.REASON})" in line for line in lines)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("cuda", "forward_kernel"),
        ("cuda-decode", "decode_kernel"),
        ("cuda-sm90", "forward_sm90_kernel"),
        ("cuda-sm90-backward", "dkdv_sm90_kernel"),
        ("cuda-sm90-fused", "fused_sm90_kernel"),
    ],
)
def test_a_family_in_the_simulator(name, kernel, leave_out):
    """A call of each, as its process would run it on a Hopper, with what it leaves out."""
    family = check.FAMILIES[name]
    left_out = leave_out(*family.without)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(family.deterministic)
    try:
        call = family.calls[min(1, len(family.calls) - 1)]
        sizes = *call.sizes[:2], min(call.sizes[2], 70), 100, call.sizes[4]
        with routes.cuda(90) as recorder:
            recorder.left_out = left_out
            check.check_call(family, call._replace(sizes=sizes), "cpu")
    finally:
        torch.use_deterministic_algorithms(before)
    assert any(kernel in launch.name for launch in recorder.launches), {launch.name for launch in recorder.launches}


# ATTNKERN_DISABLE


@functools.cache
def with_variable(value, code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, disabled.VARIABLE: value},
        capture_output=True,
        text=True,
    )


def test_a_backend_that_is_left_out_is_refused_with_that_reason():
    done = with_variable(
        " cpu, triton-decode",
        """
        import warnings
        import torch, attnkern
        x = torch.randn(1, 2, 5, 8)
        print(attnkern.explain(x, x, x).refusals["cpu"], attnkern.explain(x, x, x).chosen)
        print([b.why_not for b in attnkern.backends() if b.name == "cpu"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attnkern.attention(x, x, x)
        print([str(w.message) for w in caught])
        try:
            attnkern.attention(x, x, x, backend="cpu")
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        """,
    )
    assert done.stdout.splitlines() == [
        "['ATTNKERN_DISABLE leaves it out'] reference",
        "['ATTNKERN_DISABLE leaves it out']",
        "['attnkern: plain torch runs this attention, slowly and with memory for all scores "
        "(cpu: ATTNKERN_DISABLE leaves it out)']",
        "attnkern: backend 'cpu' cannot run this call",
    ], done.stderr


def test_a_part_that_is_left_out_is_among_the_refusals(monkeypatch):
    monkeypatch.setattr(disabled, "left_out", frozenset({"cuda-sm90", "triton-decode"}))
    monkeypatch.setitem(table.TABLE, "cpu", (*table.TABLE["cpu"], table.triton, cuda))
    x = torch.randn(1, 2, 5, 8)
    explanation = attnkern.explain(x, x, x)
    assert explanation.refusals["cuda-sm90"] == explanation.refusals["triton-decode"] == [disabled.REASON]
    assert f"cuda-sm90: {disabled.REASON}" in str(explanation)
    assert explanation.chosen == "cpu"


def test_an_unknown_family_is_an_error_with_the_choices():
    done = with_variable("cpu,cuda-sm91", "import attnkern")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ValueError: attnkern: ATTNKERN_DISABLE must hold names of {', '.join(disabled.FAMILIES)}, "
        "separated by commas, got 'cuda-sm91'"
    )


def test_an_unknown_wish_to_look_at_values_is_an_error_with_the_choices(monkeypatch):
    """As ATTNKERN_DISABLE's: when attnkern is imported, on machines too where nothing reads it later."""
    env = {**os.environ, "ATTNKERN_CHECK": "yes"}
    done = subprocess.run([sys.executable, "-c", "import attnkern"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: attnkern: ATTNKERN_CHECK must be 0 or 1, got 'yes'"
    for value, asked in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("ATTNKERN_CHECK", value)
        assert asked_to_look() == asked


def test_the_variable_reaches_the_cuda_library():
    code = """
        import torch
        from attnkern.backends import cuda
        from attnkern.problem import Problem
        x = torch.empty(1, 1, 256, 64, dtype=torch.float16)
        print(cuda.plan(Problem.from_sdpa(x, x, x), on=cuda.Chip(90, 132, 228 << 10, 227 << 10))[0][:16])
    """
    assert with_variable("", code).stdout == "forward, sm_90a:\n"
    assert with_variable("cuda-sm90", code).stdout == "forward, sm_80: \n"


def test_triton_does_without_what_is_left_out(monkeypatch):
    plans = type("Plans", (), {"launch": type("Launch", (), {"processors": staticmethod(lambda index: 100)})})
    assert table.triton._processors(plans, 0) == 100
    monkeypatch.setattr(disabled, "left_out", frozenset({"triton-decode", "triton-second-order"}))
    assert table.triton._processors(plans, 0) == 0
    assert not table.triton.has_second_order()
