"""`make gpu` on a machine without a GPU: its stages, their limits, and what it says of each."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import attnkern
import gpu_kernels
from attnkern.backends import choice
from bench import choose, gpu
from bench.gpu import Stage

ROOT = Path(__file__).parents[1]
PY = (sys.executable, "-S", "-c")
FINE, FAILS, HANGS = (*PY, "pass"), (*PY, "raise SystemExit(3)"), (*PY, "import time; time.sleep(60)")


def outcome(capfd, *plan, total=60, dry=False):
    """The status, and what the summary says of each stage."""
    status = gpu.run(plan, total, dry, dict(os.environ))
    lines = capfd.readouterr().out.splitlines()
    return status, [line.split(": ", 1)[1] for line in lines if line.startswith("   ")]


def test_a_stage_that_hangs_is_ended_at_its_limit_and_the_next_one_runs(capfd):
    start = time.perf_counter()
    plan = (
        Stage("hangs", 1, HANGS, FINE),
        Stage("measures", 1, HANGS, FINE, may_stop=True),
        Stage("fine", 9, FINE, FINE),
    )
    assert outcome(capfd, *plan) == (1, ["failed: stopped at its limit", "stopped at its limit", "passed"])
    assert time.perf_counter() - start < 20
    assert outcome(capfd, *plan[1:]) == (0, ["stopped at its limit", "passed"])


def test_what_a_stage_started_ends_with_it(capfd, tmp_path):
    """A stage that doesn't end when asked is killed with its children."""
    script = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "child.wait()\n"
    )
    grace, gpu.GRACE = gpu.GRACE, 1
    try:
        outcome(capfd, Stage("stubborn", 2, (*PY, script), FINE))
    finally:
        gpu.GRACE = grace
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child still runs")


def test_no_stage_outlasts_what_is_left_of_the_whole(capfd):
    plan = (
        Stage("hangs", 50, HANGS, FINE, may_stop=True),
        Stage("test", 9, FINE, FINE),
        Stage("sweep", 9, FINE, FINE, True),
    )
    start = time.perf_counter()
    said = ["stopped at its limit", "failed: no time is left", "left out: no time is left"]
    assert outcome(capfd, *plan, total=1.5) == (1, said)
    assert time.perf_counter() - start < 15


def test_a_missing_tool_is_said_and_fails_nothing(capfd):
    plan = Stage("memcheck", 9, FAILS, FINE, tool="no-such-tool"), Stage("fine", 9, FINE, FINE)
    assert outcome(capfd, *plan) == (0, ["left out: no-such-tool is not on this machine", "passed"])
    assert outcome(capfd, *plan, dry=True) == (0, ["left out: no-such-tool is not on this machine", "ready"])


def test_a_failure_is_the_result_and_a_failed_build_ends_the_run(capfd):
    assert outcome(capfd, Stage("fails", 9, FAILS, FINE), Stage("fine", 9, FINE, FINE)) == (1, ["failed (3)", "passed"])
    assert outcome(capfd, Stage("build", 9, FAILS, FINE, needed=True), Stage("fine", 9, FINE, FINE))[1] == [
        "failed (3)"
    ]
    assert outcome(capfd, Stage("dry", 9, FINE, FAILS), dry=True) == (1, ["failed (3)"])


def test_the_stages_fit_in_nine_minutes_and_what_must_be_known_comes_first():
    plan = gpu.stages("python", "compute-sanitizer", ("make",))
    assert gpu.TOTAL <= 540
    names = [stage.name for stage in plan]
    assert names[0] == "build"
    assert plan[0].needed
    assert names.index("memcheck") < names.index("racecheck") < names.index("sweep against F.sdpa's backends")
    assert sum(stage.seconds for stage in plan if not stage.may_stop) < gpu.TOTAL  # none is squeezed by the others
    assert [stage.tool for stage in plan if stage.tool] == ["compute-sanitizer"] * 2


def test_a_device_is_built_for_alone():
    found = [gpu.arch_of(capability) for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0))]
    assert found == ["80", "80", "80", "90a", "100a", "120", "80"]


def test_without_a_device_nothing_is_run(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert "sees no CUDA device: nothing was run" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["gpu_kernels --list", "bench.choose --dry-run", "bench.orders --dry-run"])
def test_what_the_stages_call_is_there(module):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-m", *module.split()], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 20


def test_the_calls_reach_every_class_of_head_size_and_make_valid_problems():
    names = list(gpu_kernels.CALLS)
    for size in (32, 64, 96, 128, 192, 256, 512):
        assert {f"d{size} {kind}" for kind in ("causal", "softcap", "mask", "few queries")} <= set(names)
    small = [call for call in gpu_kernels.CALLS.values() if call.sizes[-1] <= 64]
    for call in small:
        attnkern.explain(**call.make("cpu").tensors, **call.options)  # raises what the call would
    assert len(small) > 10


def test_measured_rules_put_the_fastest_first():
    trial = choose.Trial(True, "plain", 128)
    rule = choose.rule_of(trial, 90, {"triton": 3e-4, "cuda": 2e-4})
    assert rule == ((90,), ("training",), ("plain",), (65, 128), ("cuda", "triton"), "cuda 200 us, 1.50x triton")
    choice.use_rules([rule])
    try:
        assert choice.rule_for(choice.Call(90, True, "plain", 100)) == rule
        assert choice.rule_for(choice.Call(90, True, "plain", 64)) != rule
    finally:
        choice.use_rules(())
