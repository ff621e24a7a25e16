"""`make gpu` on a machine without a GPU: that a row costs only itself, what is written down, what is made of it, and a
rehearsal of the whole."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from attnkern.triton_kernels import configs, launch

import attnkern
import gpu_kernels
import matrix
from attnkern.backends import choice, cuda
from attnkern.problem import Problem
from bench import providers, sweep, timing
from bench.cases import select
from bench.gpu import __main__ as gpu
from bench.gpu import apply, choose, device, orders, stages, summary, tune, whole, workers

ROOT = Path(__file__).parents[1]
# Extras of the distribution, and what pip may have brought along: a GPU machine may have none of them.
OPTIONAL = ("cpuinfo", "matplotlib", "pytest_benchmark", "rich", "typer", "xdist")
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def campaign(tmp_path, *arguments, status=1):
    """What a run of the fake stages wrote down and printed."""
    env = {**os.environ, "PYTHONPATH": PATHS, "FAKE_CHILD": str(tmp_path / "child")}
    out = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "bench.gpu", "--stages", "fake_stages", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return read(out), done.stdout


def rows(records, stage):
    return {r["row"]: r for r in records if r["type"] == "row" and r["stage"] == stage}


def ends(pid):
    """Whether a process is gone, or soon is."""
    for _ in range(200):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


# --- a row costs itself -----------------------------------------------------------------------------------------------


def test_a_row_that_faults_hangs_or_raises_costs_itself(tmp_path):
    records, printed = campaign(tmp_path, "--only", "shared")
    found = rows(records, "shared")
    status = {row: record["status"] for row, record in found.items()}
    assert status == {
        "first": "ok",
        "faults": "fault",
        "hangs": "hung",
        "raises": "error",
        "out of memory": "error",
        "sticky": "fault",
        "last": "ok",
    }
    assert "signal 11" in found["faults"]["message"]
    assert re.search(r"pid \d+ runs faults", found["faults"]["message"])  # what it printed is with it
    assert found["raises"]["message"] == "ValueError: row raises"
    assert "illegal memory access" in found["sticky"]["message"]
    assert found["last"]["pid"] != found["first"]["pid"]
    assert "== shared: 2 ok" in printed
    assert ends(int((tmp_path / "child").read_text()))  # what a row started ends with it


def test_rows_that_are_apart_have_processes_of_their_own_and_must_end_well(tmp_path):
    records, _ = campaign(tmp_path, "--only", "apart")
    written = [r for r in records if r["type"] == "row"]
    pids = [r["pid"] for r in written if "pid" in r]
    assert len(set(pids)) == len(pids) == 3
    assert {r["row"]: r["status"] for r in written} == {"one": "ok", "two": "ok", "ends badly": "wrong"}
    assert "exit status 9" in rows(records, "apart")["ends badly"]["message"]


def test_no_stage_outlasts_its_limit_and_what_was_left_out_is_said(tmp_path):
    start = time.perf_counter()
    records, printed = campaign(tmp_path, "--only", "short", status=0)
    assert time.perf_counter() - start < 30
    (stage,) = (r for r in records if r["type"] == "stage")
    assert {row: r["status"] for row, r in rows(records, "short").items()}["hangs"] == "stopped"
    assert stage["left_out"] == ["never"]
    assert "1 left out for want of time" in printed


def test_a_missing_tool_and_rows_that_cannot_be_named_are_said(tmp_path):
    records, _printed = campaign(tmp_path, "--only", "watched,unlisted")
    told = {r["name"]: r["told"] for r in records if r["type"] == "stage"}
    assert told["watched"] == "left out: compute-sanitizer is not on this machine"
    assert told["unlisted"] == "failed: LookupError: no such table"
    assert campaign(tmp_path, "--only", "watched", status=0)


def test_a_failed_build_ends_the_run(tmp_path):
    records, _printed = campaign(tmp_path, "--only", "build,broken build,after")
    assert [r["name"] for r in records if r["type"] == "stage"] == ["build", "broken build"]
    assert not rows(records, "after")


def test_every_line_is_on_the_disk_before_the_next_row_runs(tmp_path):
    """A campaign that is killed leaves what it had found."""
    env = {**os.environ, "PYTHONPATH": PATHS, "FAKE_CHILD": str(tmp_path / "child")}
    out = tmp_path / "killed.jsonl"
    command = [sys.executable, "-m", "bench.gpu", "--stages", "fake_stages", "--only", "shared", "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if (tmp_path / "child").exists():  # the third row runs
                break
            time.sleep(0.05)
        process.kill()
    finally:
        process.kill()
        process.wait()
    assert list(rows(read(out), "shared")) == ["first", "faults"]
    assert ends(int((tmp_path / "child").read_text()))  # nothing is left behind that would keep a device
    log = workers.Log(tmp_path / "log.jsonl")
    for n in range(3):
        log.add("row", n=n, kind="plain")  # a field may have any name
        assert [r["n"] for r in read(tmp_path / "log.jsonl")] == list(range(n + 1))


def test_provenance_stands_at_the_head_and_the_clocks_around_every_stage(tmp_path):
    records, _ = campaign(tmp_path, "--only", "apart,short")
    assert records[0]["type"] == "begin"
    assert (records[0]["chip"], records[0]["cudnn"], records[0]["clocks.sm"]) == ("a chip", 91900, "1980")
    assert [r["torch"] for r in records if r["type"] == "run"] == ["2"]
    assert all(
        r[when] == {"clocks.sm": "1980"} for r in records if r["type"] == "stage" for when in ("before", "after")
    )
    assert records[-1]["type"] == "end"
    assert (tmp_path / "results.md").read_text().startswith("# a chip\n")


def test_a_device_without_nvidia_smi_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "nvidia-smi" in device.Rehearsed().clocks()["unknown"]


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_stages_come_in_the_order_in_which_their_answers_matter():
    names = [stage.name for stage in stages.STAGES]
    assert names[:6] == ["build", "orders", "table", "correctness", "whole", "decode"]
    assert names[6:] == ["ranges", "tests", "choice", "memcheck", "racecheck", "features", "tuning"]
    assert gpu.TOTAL <= 570
    assert sum(stage.seconds for stage in stages.STAGES[1:3]) <= 120
    assert stages.STAGES[0].needed


def test_the_rows_that_matter_most_come_first_and_every_sample_has_one():
    rehearsed = device.Rehearsed()
    for stage in stages.STAGES:
        listed = list(stage.rows(rehearsed))
        assert len(set(listed)) == len(listed) > 0
        assert set(stage.sample(listed)) <= set(listed)
        assert stage.sample(listed), stage.name
    table = stages._table_rows(rehearsed)
    assert len(table) == 24 * 4
    assert table[0] == "gpu-bf16-d128-causal-16384 forward cuda"
    assert next(iter(tune.rows(rehearsed))) == "forward 16-bit plain head size 128"
    for row, size in tune.table_rows(90).values():
        assert tune.candidates(row, size)[0] == configs.choose(row, size, size)


def test_full_sized_problems_are_valid():
    """A rehearsal shrinks them: here they are, without memory."""
    problems = [*orders.trials(), *(trial.case() for trial in choose.trials())]
    problems += [tune.problem(row, size) for row, size in tune.table_rows(90).values()]
    problems += select(",".join({row.split()[0] for row in stages._table_rows(device.Rehearsed())}))
    for case in problems:
        shapes = (case.heads_q, case.seqlen_q, case.head_dim), (case.heads_k, case.seqlen_k, case.head_dim)
        shapes = (*shapes, (case.heads_k, case.seqlen_k, case.head_dim_v))
        q, k, v = (torch.empty(case.batch, *s, dtype=case.torch_dtype, device="meta") for s in shapes)
        options = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in case.options.items()}
        assert Problem.from_sdpa(q, k, v, **options)
        assert 0 < case.flops("forward") < 1e14
    for trial in choose.trials():
        case = trial.case()
        q, k, v = (
            torch.empty(1, case.heads_q, n, case.head_dim, dtype=torch.bfloat16, device="meta")
            for n in (case.seqlen_q, case.seqlen_k, case.seqlen_k)
        )
        q.requires_grad_(trial.training)
        problem = Problem.from_sdpa(q, k, v, **case.options)
        call = choice.kind_of(problem, cuda.plan_of(problem, cuda.Chip(90, 132, 228 * 1024, 227 * 1024)), 90)
        assert (call.training, call.kind, call.head_dim) == trial


def test_the_calls_reach_every_class_of_head_size_and_make_valid_problems():
    names = list(gpu_kernels.CALLS)
    for size in (32, 64, 96, 128, 192, 256, 512):
        assert {f"d{size} {kind}" for kind in ("causal", "softcap", "mask", "few queries")} <= set(names)
    small = [call for call in gpu_kernels.CALLS.values() if call.head_dim_v <= 64]
    for call in small:
        attnkern.explain(**call.inputs().tensors, **call.options)  # raises what the call would
    assert len(small) > 10


def test_a_device_is_built_for_alone(monkeypatch):
    found = []
    for capability in (80, 86, 89, 90, 100, 103, 120, 121, 130):
        monkeypatch.setattr(device.Gpu, "capability", lambda self, value=capability: value)
        found.append(device.Gpu(torch.device("cuda")).environment())
    archs = ["80", "80", "80", "90a", "100", "100", "120", "120", "80"]
    assert [environment["ATTNKERN_CUDA_ARCHS"] for environment in found] == archs
    assert [arch for arch, built in zip(archs, found, strict=True) if "ATTNKERN_SCHEDULES" in built] == ["90a"]


def test_without_a_device_nothing_is_run(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert "sees no CUDA device: nothing was run" in capsys.readouterr().out


def test_a_dry_run_lists_the_rows_of_every_stage(capsys):
    """In a process that has nothing but the checkout on its path."""
    everything = ",".join(stage.name for stage in stages.STAGES if stage.name != "build")
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--only", everything]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    assert all(f"== {stage.name}: {stage.about}" in printed for stage in stages.STAGES[1:])
    assert len(printed.splitlines()) > 400
    with pytest.raises(SystemExit):
        gpu.main(["--only", "tabel"])
    assert "'tabel' is none of build, orders" in capsys.readouterr().err


# --- what rows find ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """A call of which the default mode has a kernel of its own, in the simulator."""
    monkeypatch.setitem(gpu_kernels.CALLS, "tiny", matrix.call("tiny", "", (1, 1, 33, 40, 128)))
    with device.rehearsal() as rehearsed:
        yield rehearsed


def spoilt(monkeypatch, wrong):
    """The backward operator's dq is off where `wrong(deterministic)`."""
    run = cuda._run

    def spoil(operator, *arguments):
        returned = run(operator, *arguments)
        if operator == torch.ops.attnkern.cuda_backward and wrong(arguments[-1]):
            returned[0].mul_(1.25)
        return returned

    monkeypatch.setattr(cuda, "_run", spoil)


def modes(rehearsed):
    return {found["mode"]: found["status"] for found in stages._correctness(rehearsed, "tiny")}


def test_each_mode_is_checked_for_right_results(tiny, monkeypatch):
    """What only the default mode's backward kernel does wrong is seen there, and only there; likewise the other way."""
    fine = {mode: "ok" for name in gpu_kernels.MODES for mode in (name, f"{name}, graph")}
    again = {"deterministic, again": "ok"}
    assert modes(tiny) == {**fine, **again}
    del fine["default, graph"]
    with monkeypatch.context() as patched:
        spoilt(patched, lambda deterministic: not deterministic)
        assert modes(tiny) == {**fine, **again, "default": "wrong"}


PAGED = [call for call in gpu_kernels.CALLS.values() if isinstance(call, gpu_kernels.InPages)]


def test_calls_in_pages_reach_every_class_of_head_size():
    assert {call.head_dim for call in PAGED if call.seqlen_q == 2} >= {32, 64, 96, 128, 192, 256}
    assert {call.head_dim for call in PAGED if call.seqlen_q > 2} >= {32, 64, 96, 128, 192, 256, 320}
    assert {call.page_size for call in PAGED} == {16, 64}
    assert all(call.seqlen_k % call.page_size == 0 for call in PAGED)


@pytest.mark.parametrize("name", ["pages of 16, d64 one query, sinks", "pages of 64, d32 documents"])
def test_calls_in_pages_are_checked(name, monkeypatch):
    """Also from a graph, whose replay finds other pages in the same table."""
    with device.rehearsal() as rehearsed:
        found = list(stages._correctness(rehearsed, name))
        assert [(each["mode"], each["status"]) for each in found] == [
            (mode, "ok")
            for mode in ("default", "default, graph", "deterministic", "deterministic, graph", "deterministic, again")
        ]
        tables = [gpu_kernels.leaves_of(gpu_kernels.CALLS[name], "cpu", seed)["block_table"] for seed in (1, 2)]
        assert not torch.equal(*tables)
        with monkeypatch.context() as patched:  # the pages of the sequence before
            in_pages = gpu_kernels.in_pages

            def rolled(*arguments):
                pools, table = in_pages(*arguments)
                return pools, table.roll(1, 1)

            patched.setattr(gpu_kernels, "in_pages", rolled)
            assert next(iter(stages._correctness(rehearsed, name)))["status"] == "wrong"


def test_caches_in_pages_are_timed_beside_contiguous_ones():
    rows = stages._decode_rows(device.Rehearsed())
    for case in ("gpu-decode-d64-4k", "gpu-decode-d128-64k"):
        for backend in ("cuda", "triton"):
            rivals = [f"{case} forward {backend}{of}" for of in ("", "-pages-16", "-pages-64")]
            assert set(rivals) <= set(rows)
    with device.rehearsal() as rehearsed:
        for rival in ("cuda", "cuda-pages-16", "triton-pages-64"):
            (row,) = stages._speed(rehearsed, f"gpu-decode-d64-4k forward {rival}")
            assert row["status"] == "ok", row["message"]
        (row,) = stages._speed(rehearsed, "decode-speculative-4k-bf16 forward cuda-pages-16")
        assert row["status"] == "refused"
        assert "pages are timed with padding alone" in row["message"]


def test_every_row_of_every_head_is_held_against_flash_attention(tiny, monkeypatch):
    """Also the last ones, which no sample of the float64 check need hold."""
    (row,) = whole.measure(tiny, "gpu-bf16-d64-causal-4096")
    assert row["status"] == "ok"
    assert set(row["shares"]) == {"out", "query", "key", "value"}
    run = cuda._run

    def spoil(operator, *arguments):
        returned = run(operator, *arguments)
        if operator == torch.ops.attnkern.cuda_forward:
            returned[0][:, -1, -1].add_(0.1)
        return returned

    with monkeypatch.context() as patched:  # undone before `tiny` is, whose own is restored then
        patched.setattr(cuda, "_run", spoil)
        (row,) = whole.measure(tiny, "gpu-bf16-d64-causal-4096")
    assert row["status"] == "wrong"


def test_a_replayed_graph_must_give_what_a_call_gives(tiny, monkeypatch):
    def stale(call):
        return call(), lambda: None

    monkeypatch.setattr(tiny, "capture", stale)
    with gpu_kernels.mode("default"):
        found = stages._checked(lambda: stages._captured(tiny, gpu_kernels.CALLS["tiny"]))
    assert found == {"status": "wrong", "message": "result 0 of a replayed graph is not what a call gives"}


def test_ranges_are_timed_and_checked_as_ranges():
    """No dense mask is drawn for them."""
    with device.rehearsal() as rehearsed:
        runner = sweep.Runner(rehearsed.torch, timing.Sampling(rounds=1, min_rounds=1, budget=0.0))
        case = rehearsed.shrunk(select("gpu-streaming-1024")[0])
        assert rehearsed.inputs(case).attn_mask is None
        assert 0 < case.live_share < 0.3
        (row,) = runner.run(case, "forward", providers.choose("cuda", rehearsed.torch))
    assert row["status"] == "ok", row["message"]


def test_torchs_own_maths_is_measured_only_where_its_scores_fit(monkeypatch):
    with device.rehearsal() as rehearsed:
        runner = sweep.Runner(rehearsed.torch, timing.Sampling(rounds=1, min_rounds=1, budget=0.0))
        case = rehearsed.shrunk(select("gpu-bf16-d64-full-4096")[0])
        (math,) = providers.choose("sdpa-math", rehearsed.torch)
        assert runner.run(case, "forward", [math])[0]["status"] == "ok"
        monkeypatch.setattr(rehearsed, "free_memory", lambda: 1000)
        (row,) = runner.run(case, "forward", [math])
        assert (row["status"], row["message"][:19]) == ("refused", "its score matrices ")


def test_what_triton_cannot_compile_is_skipped_and_named(monkeypatch):
    rehearsed = device.Rehearsed()

    def fails(self, capability):
        raise RuntimeError("ptxas is unhappy")

    monkeypatch.setattr(launch.Kernel, "compile", fails)
    monkeypatch.setattr(launch, "capability", lambda index: 90)
    monkeypatch.setattr(launch, "processors", lambda index: 4)
    (row,) = tune.measure(rehearsed, "forward 16-bit plain head size 64")
    assert row["status"] == "skipped"
    assert row["message"].endswith("none of 2 candidates runs: RuntimeError: ptxas is unhappy")


def test_a_backend_that_raises_does_not_end_a_trial(monkeypatch):
    """Its message is kept, and the other one is timed."""

    def fails(self, capability):
        raise RuntimeError("ptxas is unhappy")

    with device.rehearsal() as rehearsed:
        monkeypatch.setattr(launch.Kernel, "compile", fails)
        (row,) = choose.measure(rehearsed, "forward fast path head size 64")
    assert list(row["seconds"]) == ["cuda"]
    assert row["refused"]["triton"].endswith("ptxas is unhappy")


def test_key_ranges_meet_the_hardware_first():
    """In every variant of the kernels, and with blocks that go from one tile to the next."""
    named = stages._kernels(device.Rehearsed())
    ranged = [name for name, call in gpu_kernels.CALLS.items() if call.ranges]
    paged = [name for name in gpu_kernels.CALLS if name.startswith("pages")]
    first = {
        *ranged,
        *paged,
        *(f"{name}{band}" for name in ("many tiles", "three consumers") for band in ("", ", causal")),
    }
    assert set(named[: len(first)]) == first
    found = [gpu_kernels.CALLS[name] for name in ranged]
    assert {64, 128, 256, 320} <= {call.head_dim for call in found}
    assert {call.ranges.split()[0] for call in found} == {"documents", "anything", "near", "few"}
    assert any(call.causal for call in found)
    assert any(call.mask != "none" for call in found)
    assert any(call.seqlen_q == 2 for call in found)
    many = gpu_kernels.CALLS["many tiles"]
    assert many.batch * many.heads_q * -(-many.seqlen_q // 128) > 264
    assert {"key_ranges", "mask", "varlen", "jagged", "pages"} <= set(stages.BEHAVIOUR)


def test_a_group_of_the_sanitizers_holds_every_kernel():
    groups = stages._watched_groups(device.Rehearsed())
    held = [name for group in groups for name in gpu_kernels.CALLS if name.split()[0].rstrip(",") == group]
    assert sorted(held) == sorted(gpu_kernels.CALLS)


# --- what is made of it -----------------------------------------------------------------------------------------------


def row_of(stage, row, **found):
    return {"type": "row", "stage": stage, "row": row, "status": "ok", **found}


def synthetic(best="overlap"):
    """A campaign's records, with figures made up."""
    timed = {"clock": "gpu", "allowed_share": 0.5, "peak_share": 0.8, "bandwidth_share": 0.9}
    records = [{"type": "begin", "chip": "Chip X", "cudnn": 1, "date": "today"}, {"type": "run", "torch": "2.11"}]
    for size, values in orders.SIZES:
        for causal in ("causal", "full"):
            speeds = {"serial": 400.0, "overlap": 500.0, "ping-pong": 450.0}
            speeds["ping-pong"] = 600.0 if size <= 96 else speeds["ping-pong"]
            fields = {"head_dim": size, "head_dim_v": values, "tflops": speeds, "best": best}
            records.append(row_of("orders", f"d{size}/{values} {causal}", **fields))
    for rival, seconds in (("cuda", 1e-3), ("sdpa-cudnn", 9e-4), ("sdpa-flash", 2e-3), ("sdpa", 9e-4)):
        fields = {"seconds": seconds, "flops_per_second": 5e11 / seconds, "kernel": "cudnn", **timed}
        records.append(row_of("table", f"gpu-bf16-d128-causal-16384 forward {rival}", **fields))
    records.append(row_of("table", "gpu-bf16-d64-full-4096 forward cuda", status="hung", message="ended at its limit"))
    for rival, flops in (("cuda", 4e14), ("cuda-plain", 5e14)):
        found = {"seconds": 1e-3, "flops_per_second": flops, **timed}
        records.append(row_of("ranges", f"gpu-documents-1024 forward {rival}", **found))
    table = {"arch": 90, "kernel": "forward", "itemsize": 2, "feature": "plain"}
    own = list(configs.TABLE[configs.Row(90, "forward", 2, "plain")][128])
    tuned = {**table, "candidates": 40, "timed": 9, "seconds": 1e-3, "own": own, "failures": {}}
    records.append(row_of("tuning", "a", head_dim=128, config=[64, 128, 4, 3], gain=1.2, **tuned))
    records.append(row_of("tuning", "b", head_dim=64, config=[64, 64, 4, 1], gain=1.01, **tuned))
    records.append(row_of("tuning", "c", status="skipped", message="Triton 3.6.0 can't compile tangent"))
    trial = {"training": True, "kind": "fast path", "size": 128, "capability": 90, "hopper": True}
    records.append(row_of("choice", "d", seconds={"triton": 3e-4, "cuda": 2e-4}, refused={}, **trial))
    clocks = {"before": {"clocks.sm": "1980"}, "after": {"clocks.sm": "1755"}}
    records.append(
        {"type": "stage", "name": "table", "told": "4 ok, 1 hung", "seconds": 40.0, "left_out": [], **clocks}
    )
    return records


def test_the_page_says_what_was_measured_and_what_failed():
    text = summary.page(synthetic())
    assert "| d128-causal-16384 | forward | 500 | 556 | 250 | 0.90 | 2.00 | 0.50 | cudnn |" in text
    assert "| gpu-documents-1024 | forward | 400 | 500 | 80% |" in text
    assert "- table, gpu-bf16-d64-full-4096 forward cuda: **hung**: ended at its limit" in text
    assert "| table | 4 ok, 1 hung | 40 | 1980 / 1755 |" in text
    assert "Skipped: c (Triton 3.6.0 can't compile tangent)." in text
    assert "cuda 200 us, triton 300 us" in text
    assert "ehearsal" not in text
    assert len(text.splitlines()) < 90
    assert "A rehearsal" in summary.page([{"type": "begin", "chip": device.Rehearsed().name()}])


def test_results_are_applied_to_the_three_tables(tmp_path, capsys):
    for path in (apply.FORWARD, apply.CONFIGS, apply.CHOICE):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(map(json.dumps, synthetic())) + '\n{"type": "row", "torn')
    for _ in range(2):  # the second time it finds its own lines
        assert apply.main(results, tmp_path) == 0
    text = (tmp_path / apply.FORWARD).read_text()
    expression = re.search(r"static constexpr Schedule kSchedule =\s([^;]+);", text)[1]
    assert expression == "kHeadDim <= 96 ? Schedule::kPingPong : Schedule::kOverlap"
    tiles = assigned(tmp_path / apply.CONFIGS, "_ROWS")
    changed = {key: by_size for key, by_size in tiles.items() if by_size != configs._ROWS[key]}
    old = configs._ROWS[90, "forward", 2, "plain"]
    assert changed == {(90, "forward", 2, "plain"): {**old, 128: (64, 128, 4, 3)}}
    spec = importlib.util.spec_from_file_location("attnkern.backends.applied", tmp_path / apply.CHOICE)
    applied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(applied)
    (rule,) = applied.MEASURED
    because = "cuda 200 us, 1.50x triton on Chip X"
    assert rule == ((90,), ("training",), ("fast path",), (65, 128), ("cuda-sm90", "triton"), because)
    assert applied.rule_for(applied.CallKind(90, True, "fast path", 100)) == rule
    assert applied.told(rule) == f"as measured ({because})"
    assert len(applied.RULES) == 1 + len(choice.RULES) - len(choice.MEASURED)
    assert all(len(line.rstrip()) <= 120 for path in (apply.CONFIGS, apply.CHOICE) for line in (tmp_path / path).open())
    results.write_text(json.dumps({"type": "begin"}) + "\n")
    assert apply.main(results, tmp_path) == 1
    assert "nothing was changed" in capsys.readouterr().out


def assigned(path, name):
    nodes = ast.parse(path.read_text()).body
    found = next(n.value for n in nodes if isinstance(n, ast.AnnAssign) and n.target.id == name)
    return ast.literal_eval(found)


def test_no_rehearsal_is_applied(tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(map(json.dumps, [{"type": "run", "rehearsed": True}, *synthetic()])))
    before = (ROOT / apply.CHOICE).read_text()
    assert apply.main(results) == 1
    assert (ROOT / apply.CHOICE).read_text() == before
    assert "a rehearsal measures nothing" in capsys.readouterr().out


# --- the rehearsal ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute on two free cores
def test_a_rehearsal_runs_to_its_last_line_with_nothing_optional_installed(tmp_path):
    for name in OPTIONAL:
        (tmp_path / "absent").mkdir(exist_ok=True)
        (tmp_path / "absent" / f"{name}.py").write_text(f'raise ImportError("{name} is not to be had")')
    out = tmp_path / "rehearsal.jsonl"
    path = os.pathsep.join([str(tmp_path / "absent"), str(ROOT)])  # as `make gpu PYTHON=...` sets it: without tests/
    env = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    records = read(out)
    assert (records[0]["type"], records[-1]["type"]) == ("begin", "end")
    ran = [r for r in records if r["type"] == "stage"]
    assert [r["name"] for r in ran] == [stage.name for stage in stages.STAGES]
    found = {stage["name"]: [r for r in records if r["type"] == "row" and r["stage"] == stage["name"]] for stage in ran}
    assert all(found.values())
    assert all(not stage["left_out"] for stage in ran)
    assert {r["status"] for rows in found.values() for r in rows} <= {"ok", "refused", "skipped"}
    for name in ("table", "decode", "ranges", "features"):
        ours = [r for r in found[name] if r["row"].endswith((" cuda", " triton"))]
        assert ours
        assert all(r["status"] == "ok" and r["allowed_share"] <= 1 and r["clock"] == "counted" for r in ours)
    assert {r["mode"] for r in found["correctness"]} >= {
        "default",
        "default, graph",
        "deterministic",
        "deterministic, again",
    }
    assert [r["rehearsed"] for r in records if r["type"] == "run"] == [True]
    assert "**A rehearsal:" in out.with_suffix(".md").read_text()


def test_no_module_of_the_stages_needs_an_extra():
    """Imported in a process in which the extras can't be."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        "from bench import machine, providers, sweep\n"
        "from bench.gpu import __main__, apply, choose, device, orders, stages, summary, tune, workers\n"
        "import gpu_kernels, routes\n"
        "machine.provenance(device.torch.device('cpu'))\n"
        "print('imported')"
    )
    env = {**os.environ, "PYTHONPATH": PATHS}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr


def test_timings_run_without_the_benchmark_plugin():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:xdist", "-k", "short"]
    done = subprocess.run([*command, "tests/test_bench_regression.py"], cwd=ROOT, capture_output=True, text=True)
    assert re.search(r"^\d+ passed", done.stdout, re.M), done.stdout
