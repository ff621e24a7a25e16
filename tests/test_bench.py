"""The benchmark's command line, its records, its error column and its targets, on problems of a millisecond."""

import base64
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import mmap
import os
import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from typer.testing import CliRunner

import attnkern
from attnkern import testing
from bench import (
    check,
    machine,
    memory,
    options,
    page,
    plots,
    provider,
    providers,
    record,
    report,
    rivals,
    sweep,
    targets,
    timing,
)
from bench.__main__ import app
from bench.cases import CASES, RANGES, Case, case, override, select

pytestmark = pytest.mark.real_memory

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
QUICK = ["--threads", "1", "--rounds", "1", "--block", "0.0001", "--budget", "0"]


def bench(*arguments, code=0):
    """Runs the command line in this process and gives what it printed."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def run(path, *arguments, code=0, cases="smoke-fp32", passes="forward"):
    return bench("run", "--cases", cases, "--passes", passes, "--out", path, *QUICK, *arguments, code=code)


def rows_of(path):
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["type"] == "row"]


def fake(name, attend):
    """A provider whose call is `attend(query, key, value, mask)`."""
    return provider.Provider(name, "a test's", ("cpu",), lambda case, inputs: attend)


def with_provider(monkeypatch, *more):
    real = providers.all_providers
    monkeypatch.setattr(providers, "all_providers", lambda device: [*real(device), *more])


# --- running ----------------------------------------------------------------------------------------------------------


def test_a_run_records_every_row_with_its_error_and_provenance(tmp_path):
    path = tmp_path / "rows.jsonl"
    printed = run(path, passes="forward,backward,both")
    rows = rows_of(path)
    assert {row["pass"] for row in rows} == {"forward", "backward", "both"}
    assert {"cpu", "sdpa", "sdpa-math"} <= {row["provider"] for row in rows}
    for row in rows:
        assert row["status"] == "ok"
        assert row["seconds"] > 0
        assert 0 <= row["allowed_share"] <= 1
        assert row["peak_share"] > 0
        assert row["flops_per_second"] > 0
    assert {row["kernel"] for row in rows if row["provider"] == "sdpa"} == {"flash"}
    header = json.loads(path.read_text().splitlines()[0])
    assert header["type"] == "run"
    assert {"device", "torch", "threads", "git", "dirty", "command", "date", "code"} <= header.keys()
    assert str(path.with_suffix(".csv")) in printed.replace(" ", "") or path.with_suffix(".csv").exists()
    assert path.with_suffix(".csv").read_text().startswith("case,pass,provider")
    assert (tmp_path / "rows-bars.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "rows-bars.svg").read_text()


def test_a_run_says_first_how_long_it_takes(tmp_path, monkeypatch):
    def stop(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep.Runner, "run", stop)
    monkeypatch.setattr(machine, "peak", lambda *_: machine.Peak(1e9, "register-only loop"))
    printed = run(tmp_path / "rows.jsonl", "--no-plot", "--set", "seqlen=4096", code=130)
    assert "1 groups, about 6 seconds while nothing else runs" in printed
    small, large = select("smoke-fp32")[0], override(select("smoke-fp32")[0], seqlen_q=4096)
    runner = sweep.Runner(CPU, timing.Sampling(block=0.02, rounds=7, budget=0.6))
    share = sweep.PREPARED + 2 * 7 * 0.02  # a short call's rounds are blocks
    assert runner.expected_seconds([(small, "forward")], 2) == pytest.approx(share, rel=0.2)
    call = large.flops("forward") / (sweep.USUAL_SHARE * 1e9)
    assert runner.expected_seconds([(large, "forward")] * 2, 3) == pytest.approx(2 * (sweep.PREPARED + 3 * 7 * call))
    assert [report.minutes(s) for s in (0.2, 59, 150)] == ["1 seconds", "59 seconds", "2.5 minutes"]


def test_a_second_run_measures_only_what_is_missing(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    run(path, "--no-plot")
    measured = []
    real = sweep.Runner.run
    monkeypatch.setattr(
        sweep.Runner, "run", lambda self, case, *rest: measured.append(case.name) or real(self, case, *rest)
    )
    run(path, "--no-plot")
    assert measured == []
    run(path, "--no-plot", cases="smoke")
    assert measured == ["smoke-bf16"]
    run(path, "--no-plot", "--fresh")
    assert measured == ["smoke-bf16", "smoke-fp32"]
    monkeypatch.setattr("bench.machine.code_fingerprint", lambda: "other code")
    run(path, "--no-plot")
    assert measured == ["smoke-bf16", "smoke-fp32", "smoke-fp32"]


def test_an_interrupted_run_keeps_its_rows_and_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    real = sweep.Runner.run

    def stop_at_second(self, case, *rest):
        if case.name == "smoke-bf16":
            raise KeyboardInterrupt
        return real(self, case, *rest)

    monkeypatch.setattr(sweep.Runner, "run", stop_at_second)
    printed = run(path, cases="smoke", code=130)
    assert "interrupted" in printed
    assert {row["case"] for row in rows_of(path)} == {"smoke-fp32"}
    assert path.with_suffix(".csv").exists()
    assert (tmp_path / "rows-bars.png").exists()
    monkeypatch.setattr(sweep.Runner, "run", real)
    run(path, "--no-plot", cases="smoke")
    assert {row["case"] for row in rows_of(path)} == {"smoke-fp32", "smoke-bf16"}


@pytest.mark.parametrize(
    "spoil", [lambda x: x + 0.01, lambda x: x * math.nan, lambda x: x.index_fill(2, torch.tensor([5]), 0.0)]
)
def test_a_wrong_row_is_recorded_and_fails_the_run(tmp_path, monkeypatch, spoil):
    sdpa = rivals._sdpa(select("smoke-fp32")[0], select("smoke-fp32")[0].inputs())
    with_provider(monkeypatch, fake("spoilt", lambda *tensors: spoil(sdpa(*tensors))))
    path = tmp_path / "rows.jsonl"
    printed = run(path, "--no-plot", code=1)
    rows = {row["provider"]: row for row in rows_of(path)}
    assert rows["spoilt"]["status"] == "wrong"
    assert rows["spoilt"]["allowed_share"] > 1
    assert rows["sdpa"]["status"] == "ok"
    assert "times the allowed" in printed


def test_a_wrong_gradient_is_caught(tmp_path, monkeypatch):
    sdpa = rivals._sdpa(select("smoke-fp32")[0], select("smoke-fp32")[0].inputs())
    with_provider(monkeypatch, fake("no dk", lambda q, k, v, m: sdpa(q, k.detach() + 0 * k, v, m)))
    path = tmp_path / "rows.jsonl"
    run(path, "--no-plot", passes="backward", code=1)
    rows = {row["provider"]: row for row in rows_of(path)}
    assert (rows["no dk"]["status"], rows["no dk"]["worst"]) == ("wrong", "key")


def test_a_provider_that_raises_or_refuses_stops_nobody_else(tmp_path, monkeypatch):
    def out_of_memory(*tensors):
        raise torch.OutOfMemoryError("out of memory")

    def refuse(case, inputs):
        raise provider.Refused("odd sizes")

    refusing = provider.Provider("refusing", "", ("cpu",), refuse)
    with_provider(monkeypatch, fake("raising", out_of_memory), refusing)
    path = tmp_path / "rows.jsonl"
    run(path, "--no-plot", code=1)
    rows = {row["provider"]: row for row in rows_of(path)}
    assert rows["raising"]["status"] == "error"
    assert rows["raising"]["message"] == "OutOfMemoryError: out of memory"
    assert (rows["refusing"]["status"], rows["refusing"]["message"]) == ("refused", "odd sizes")
    assert rows["cpu"]["status"] == rows["sdpa"]["status"] == "ok"
    run(path, "--no-plot", "--providers", "cpu,sdpa,refusing", code=0)


def test_dry_run_measures_nothing(tmp_path):
    printed = run(tmp_path / "rows.jsonl", "--dry-run", "--set", "seqlen=64:256:x2", "--set", "dtype=bf16,float16")
    assert "6 groups" in printed
    assert not (tmp_path / "rows.jsonl").exists()


def test_list_names_sets_cases_and_providers():
    printed = bench("list")
    assert all(word in printed for word in ("quick-sweep", "cpu-goals", "llama3-8b", "sdpa-math", "cpu*"))


@pytest.mark.parametrize(
    ("arguments", "option", "words"),
    [
        (["--cases", "llama9"], "--cases", "'llama9' is no case, tag or matching glob"),
        (["--cases", ""], "--cases", "no case is named"),
        (["--providers", ""], "--providers", "no provider is named"),
        (["--providers", "flashinfer"], "--providers", "'flashinfer' is no provider on cpu"),
        (["--passes", "sideways"], "--passes", "'sideways' is none of fwd, bwd"),
        (["--set", "dtype=fp8"], "--set", "'fp8' is none of"),
        (["--set", "seqlen"], "--set", "must be field=values"),
        (["--set", "seqlen=512:64k:x1"], "--set", "never gets to its end"),
        (["--set", "seqlen=512:16:x2"], "--set", "ends before it begins"),
        (["--set", "seqlen=-5"], "--set", "no positive number"),
        (["--set", "window=7"], "--set", "no window"),
        (["--set", "heads_k=3"], "--set", "no multiple"),
        (["--set", "mask=nothing"], "--set", "mask='nothing' is not one of"),
        (["--cpu-time"], "--cpu-time", "--threads 1"),
        (["--device", "tpu"], "--device", "neither cpu nor cuda"),
        (["--threads", "0"], "--threads", "equal to 1"),
        (["--cases", "cpu-goals", "--set", "dtype=fp32"], "--cases", "fixes --passes"),
    ],
)
def test_bad_options_are_named(arguments, option, words):
    printed = bench("run", "--dry-run", *arguments, code=2)
    printed = re.sub(r"[│╭╮╰╯─ ]+", " ", printed)
    assert option in printed
    assert words in printed


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    """A folder, and a file in what is none."""
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "rows.jsonl"):
        assert "--out" in bench("run", "--cases", "llama3-8b", "--out", path, code=2)


# --- comparing, reading, drawing --------------------------------------------------------------------------------------


def row(length=128, provider="cpu", ratio=2.0, seconds=1e-3, **more):
    problem = case(f"curve-{length}", length, tags=("growth",))
    fields = {("case" if k == "name" else k): v for k, v in dataclasses.asdict(problem).items()}
    measured = {
        "key": f"{length}-{provider}",
        "pass": "forward",
        "provider": provider,
        "status": "ok",
        "seconds": seconds,
        "ratio": ratio,
        "flops_per_second": problem.flops("forward") / seconds,
        "peak_share": 0.5,
        "peak": "best matmul",
        "memory": 1024 * length,
        "clean": True,
        "bytes_per_second": 1e9,
        "error": 1e-7,
        "allowed_share": 0.5,
    }
    return {**fields, **measured, **more}


def write(path, rows):
    log = record.Log(path, fresh=True)
    log.start_run(
        {
            "device": "a machine",
            "threads": 2,
            "torch": "2",
            "attnkern": "0",
            "command": "bench run",
            "date": "2026-11-22T00:45:52+00:00",
        }
    )
    for each in rows:
        log.add(each)
    log.close()
    return path


def test_compare_fails_below_the_bound_only(tmp_path):
    base = write(tmp_path / "base.jsonl", [row(64), row(128), row(128, "sdpa", 1.0)])
    slower = write(tmp_path / "slower.jsonl", [row(64), row(128, ratio=1.9), row(128, "sdpa", 1.0, seconds=9.0)])
    assert "2 rows in common, 0 below" in bench("compare", base, base)
    assert "2 rows in common, 1 below" in bench("compare", base, slower, code=1)
    bench("compare", base, slower, "--fail-below", "0.9")
    bench("compare", base, slower, "--by", "time")
    bench("compare", base, slower, "--by", "time", "--providers", "sdpa", code=1)


def test_compare_fails_for_a_row_that_became_wrong(tmp_path):
    base = write(tmp_path / "base.jsonl", [row(64), row(128)])
    wrong = write(tmp_path / "wrong.jsonl", [row(64), row(128, status="wrong", message="out: far off")])
    assert "out: far off" in bench("compare", base, wrong, code=1)


def test_compare_refuses_files_that_are_no_runs(tmp_path):
    base = write(tmp_path / "base.jsonl", [row(64)])
    other = write(tmp_path / "other.jsonl", [row(256)])
    text = tmp_path / "notes.txt"
    text.write_text("hello\n[1, 2]\n")
    assert "no row in common" in re.sub(r"[│ ]+", " ", bench("compare", base, other, code=2))
    assert "holds no benchmark rows" in re.sub(r"[│ ]+", " ", bench("compare", base, text, code=2))
    bench("compare", base, tmp_path / "missing.jsonl", code=2)
    bench("compare", base, base, "--by", "colour", code=2)


def test_plot_refuses_rows_that_it_cannot_draw(tmp_path):
    """No rows, and rows of other commands: no page without anything, and no traceback."""
    empty = write(tmp_path / "empty.jsonl", [])
    results = Path(record.__file__).parent / "results"
    for path in (empty, results / "cores-cpu.jsonl", results / "training-memory-cpu.jsonl"):
        printed = bench("plot", path, "--out", tmp_path / "drawn" / "x", code=2)
        assert "must hold rows of run, models or serve" in re.sub(r"[│\s]+", " ", printed), path
    assert not (tmp_path / "drawn").exists()
    assert "--out" in bench("plot", write(tmp_path / "rows.jsonl", [row(64)]), "--out", empty / "x", code=2)


def test_a_torn_last_line_is_passed_over(tmp_path):
    path = write(tmp_path / "rows.jsonl", [row(64)])
    with path.open("a") as file:
        file.write('{"type": "row", "key": "ha')
    log = record.Log(path)
    log.add(row(128, allowed_share=math.inf, error=math.nan))
    log.close()
    rows, runs = record.read(path)
    assert list(rows) == ["64-cpu", "128-cpu"]
    assert (rows["128-cpu"]["allowed_share"], rows["128-cpu"]["error"]) == (math.inf, None)
    assert len(runs) == 1


def test_plot_draws_curves_over_length(tmp_path):
    rows = [
        row(n, p, s, seconds=1e-8 * n * n / s) for n in (64, 128, 256, 512) for p, s in (("cpu", 2.0), ("sdpa", 1.0))
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    bench("plot", path, "--out", tmp_path / "pictures" / "sweep")
    drawn = sorted(p.name for p in (tmp_path / "pictures").iterdir())
    pictures = [f"sweep-{kind}.{suffix}" for kind in ("memory", "share", "speedup") for suffix in ("png", "svg")]
    assert drawn == sorted([*pictures, "sweep-report.html"])
    table = report.sweep_table(rows, "cpu")
    assert [str(c.header) for c in table.columns] == [
        "dtype",
        "pass",
        "head_dim",
        "mask",
        "64",
        "128",
        "256",
        "512",
        "of peak",
    ]
    assert [picture.kind for picture in plots.pictures(rows)] == ["speedup", "share", "memory"]
    assert plots._footer([{"device": "a machine", "command": "bench run"}]).startswith("a machine")


@pytest.mark.parametrize(
    ("more", "noisy"),
    [
        ({"ratio_p20": 1.8, "ratio_p80": 2.1}, False),
        ({"ratio_p20": 1.7, "ratio_p80": 2.1}, True),
        ({"ratio_p20": 2.0, "ratio_p80": 2.0, "clean": False}, True),
        ({}, False),  # a row of an older run
        ({"clean": False}, True),
    ],
)
def test_noisy_rows_are_hollow(more, noisy):
    rows = [row(n, p, 2.0) for n in (64, 128, 256) for p in ("cpu", "sdpa")]
    rows[2] |= more
    assert [report.noisy(x) for x in rows] == [n == 2 and noisy for n in range(6)]
    for picture in plots.pictures(rows)[:2]:  # of time
        figure = picture.make(False, "")
        (axes,) = figure.axes
        points = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
        hollow = [line.get_markerfacecolor() == axes.get_facecolor() for line in points]
        lengths = [[*line.get_xdata()] for line in points]
        assert dict(zip(hollow, lengths, strict=True)) == (
            {False: [64, 256], True: [128]} if noisy else {False: [64, 128, 256]}
        )
        assert report.NOISY in picture.caption
        plots.plt.close(figure)


def test_the_picture_shows_medians_of_ratios_within_rounds(monkeypatch):
    """Whatever the times were: the second round took ten times as long for both, the third for one."""
    ours, theirs = timing.Timing([1.0, 10.0, 1.0]), timing.Timing([2.0, 20.0, 25.0])
    timings = {"cpu": ours, "sdpa": theirs, sweep.PEAK: timing.Timing([0.5, 5.0, 0.5])}
    monkeypatch.setattr(sweep, "measure", lambda *_: timings)
    loop = machine.Peak(1.0, "register-only loop", int, 1e6)
    monkeypatch.setattr(machine, "peak", lambda *_: loop)
    monkeypatch.setattr(machine, "read_bandwidth", lambda *_: loop)
    problem = case("c", 8, heads=1)
    runner = sweep.Runner(CPU, timing.Sampling())
    got, _ = runner.run(problem, "forward", providers.choose("cpu,sdpa", CPU))
    assert (got["ratio"], got["ratio_p20"], got["ratio_p80"]) == (2.0, 2.0, 25.0)
    assert got["peak_share"] == 0.5 * problem.flops("forward") / 1e6
    figure = plots.pictures(
        [{**got, "seqlen_q": n, "seqlen_k": n, "provider": p} for n in (8, 16, 32) for p in timings]
    )
    lines = figure[0].make(False, "").axes[0].lines
    assert [*lines[0].get_ydata()] == [2.0] * 3


def test_the_page_holds_the_whole_run_and_fetches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "CURVES", {"speedup": plots.CURVES["speedup"]})
    rows = [row(n, p, 2.0, clean=n > 64) for n in (64, 128, 256) for p in ("cpu", "sdpa")]
    rows.append(row(64, "sdpa-math", None, status="refused", message="<no> memory") | {"seconds": None})
    found, runs = record.read(write(tmp_path / "rows.jsonl", rows))
    text = page.write(tmp_path / "rows-report.html", [*found.values()], runs).read_text()
    assert text.count("2.00~") == 1
    for shown in (" | 2026-11-22 00:45:52 UTC<", "pass, head size, mask", "fp32 forward, 64, full"):
        assert shown in text
    for shown in ("a machine", "2 threads", "bench run", "curve-128, forward, cpu"):
        assert shown in text
    assert "refused: &lt;no&gt; memory" in text
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    assert len(sources) == 4  # wide and narrow, light and dark
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "prefers-color-scheme: dark" in text
    assert "http" not in re.sub(r'"data:[^"]*"', "", text)
    for source in sources:
        svg = base64.b64decode(source.partition(",")[2]).decode()
        assert "<image" not in svg
        assert not re.search(r'href="(?!#)', svg)


def test_the_cost_of_live_scores(tmp_path):
    """Ours lies on the line through 0; a rival computes all scores."""

    def masked(live, name, cost):
        return row(provider=name, live=live, cost=cost, tags=("documents",), case=f"d-{live}", key=f"{live}-{name}")

    rows = [
        masked(live, name, cost)
        for live in (0.5, 0.125)
        for name, cost in (("cpu", 1.0), ("cpu-plain", 1.0), ("sdpa", 4 / live))
    ]
    lines = {"cpu": [(0.125, 1.0), (0.5, 1.0)], "sdpa": [(0.125, 32.0), (0.5, 8.0)]}
    found = report.costs([*rows, row()])
    assert found == {report.Sizes(("documents",), "1x8x128x64", "fp32", "forward"): lines}
    table = report.cost_table([*rows, row()])
    assert [list(column.cells) for column in table.columns[-3:]] == [
        ["12%", "50%"],
        ["1.00", "1.00"],
        ["32.00", "8.00"],
    ]
    assert report.cost_table([row()]) is None
    bench("plot", write(tmp_path / "rows.jsonl", rows))
    assert {p.name for p in tmp_path.glob("*.png")} == {"rows-live.png", "rows-bars.png"}
    figure = plots._live(found, False, "")
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0, 1], [0.125, 0.5], [4.0, 4.0]]
    assert [text.get_text() for text in axes.texts] == ["F.sdpa (torch's choice): up to 4.0"]
    assert axes.get_ylim() == (0, 1.05 * plots.TALL)


def test_growth_exponent():
    lengths = [2**n for n in range(6, 13)]
    assert report.exponent(lengths, [3e-9 * n**2 for n in lengths]) == pytest.approx(2.0)
    assert report.exponent(lengths, [7.0 * n for n in lengths]) == pytest.approx(1.0)
    assert report.exponent(lengths[:2], [1.0, 2.0]) is None


# --- cases and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("window", [None, (3, 2), (None, 1), (0, None)])
@pytest.mark.parametrize("sizes", [(5, 5), (4, 9), (9, 4)])
def test_a_cases_band_is_that_of_the_reference(causal, alignment, window, sizes):
    problem = case("c", *sizes, causal=causal, window=window, alignment=alignment)
    want = testing.band_mask(*sizes, is_causal=causal, window=window, alignment=alignment)
    keep = problem.keep_mask()
    assert (keep is None) == (want is None)
    if want is None:
        want = torch.ones(sizes, dtype=torch.bool)
    else:
        assert torch.equal(keep, want)
        assert torch.equal(problem.keep_mask(torch.tensor([1, 3])), want[[1, 3]])
    assert problem.attended_entries() == int(want.sum())


def test_flops_and_bytes():
    problem = case("c", 64, 32, batch=2, heads=(4, 2), dim=16, head_dim_v=8, dtype="bf16")
    scores = 2 * 4 * 64 * 32
    assert problem.flops("forward") == 2 * scores * (16 + 8)
    assert problem.flops("backward") == 2 * scores * (3 * 16 + 2 * 8)
    assert problem.flops("both") == problem.flops("forward") + problem.flops("backward")
    inputs = problem.inputs()
    tensors = (inputs.query, inputs.key, inputs.value)
    assert problem.bytes_moved("forward") == sum(t.nbytes for t in tensors) + 2 * 4 * 64 * 8 * 2


@pytest.mark.parametrize("mask", ["padding", "packed", "cache"])
def test_what_a_mask_leaves_out_is_not_counted(mask):
    problem = case("c", 64, 96, batch=2, heads=2, dim=16, mask=mask)
    keep = problem.inputs().attn_mask.expand(2, 1, 64, 96)
    assert 0 < keep.sum() < keep.numel()
    assert problem.flops("forward") == 4 * 2 * keep.sum() * 16
    keys = keep.any(-2).sum()
    assert problem.bytes_moved("forward") == 4 * 2 * (2 * 64 + keys) * 2 * 16


MASKED = {
    "documents:5": lambda b, i, j: i // 5 == j // 5,
    "prefix:9": lambda b, i, j: (j < 9) | (j <= i),
    "prefix:0": lambda b, i, j: j <= i,
    "padding:50": lambda b, i, j: j < torch.tensor([6, 18])[b],
    "padding:75": lambda b, i, j: j < torch.tensor([15, 21])[b],
    "padding:100": lambda b, i, j: j < 24,
    "streaming:4+2": lambda b, i, j: (j <= i) & ((i - j < 4) | (j < 2)),
    "packed:3-7": None,
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKED)
def test_a_mask_with_numbers_is_ranges(mask, causal):
    problem = case("c", 24, batch=1 if "packed" in mask else 2, heads=2, dim=8, mask=mask, causal=causal)
    assert problem.inputs().attn_mask is None
    b, i, j = torch.arange(problem.batch)[:, None, None, None], torch.arange(24)[:, None], torch.arange(24)
    if "packed" in mask:
        lengths = problem.lengths
        assert sum(lengths) == 24
        assert all(3 <= n <= 7 for n in lengths[:-1])
        assert 0 < lengths[-1] <= 7
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        want = ids[i] == ids[j]
    else:
        want = MASKED[mask](b, i, j)
    want = (want & (j <= i) if causal else want).expand(problem.batch, 1, 24, 24)
    assert torch.equal(problem.keep_mask().expand(want.shape), want)
    assert torch.equal(
        problem.keep_mask(torch.tensor([3, 20])).expand(-1, 1, 2, 24), problem.keep_mask()[:, :, [3, 20]]
    )
    assert problem.attended_entries() * problem.batch == want.sum()
    assert problem.flops("forward") == 4 * 2 * want.sum() * 8
    if mask.startswith("padding"):
        assert problem.bytes_moved("forward") == 4 * 2 * (2 * 2 * 24 + 2 * sum(problem.lengths)) * 8
    mask_mod = rivals._mask_mod(problem, CPU)
    assert torch.equal(create_mask(mask_mod, problem.batch, 1, 24, 24, "cpu"), want)
    testing.check_attention(problem.inputs(), **problem.options)


def test_masks_with_wrong_numbers_are_refused():
    for mask in ("documents", "documents:0", "documents:", "streaming:4", "packed:0-3", "prefix:-1", "padding:x"):
        with pytest.raises(ValueError, match=f"mask='{mask}' is not one of none, bool.*streaming:..."):
            case("c", 24, mask=mask)
    with pytest.raises(ValueError, match="needs as many keys as queries, and no window"):
        case("c", 24, 30, mask="prefix:3")
    with pytest.raises(ValueError, match="and no window"):
        case("c", 24, mask="prefix:3", window=(3, 3))
    assert case("c", 24, mask="padding").ranged is case("c", 24).ranged is None


@pytest.mark.parametrize("kind", RANGES)
def test_the_sets_of_masks_run(tmp_path, kind):
    """Every case, at a small size, forward and as training: every provider's result is held to the rule."""
    path = tmp_path / "rows.jsonl"
    sizes = ["--set", "seqlen=70"] + (["--set", "heads=2"] if kind != "streaming" else [])
    names = "cpu,cpu-plain,cpu-bool,sdpa,sdpa-flash"
    run(path, *sizes, "--no-plot", "--providers", names, cases=kind, passes="forward,both")
    rows = rows_of(path)
    masked = [row for row in rows if ":" in row["mask"]]
    assert len(masked) >= 4 * 2 * 2
    plain = [row for row in masked if row["provider"] == "cpu-plain"]
    assert {row["status"] for row in plain} == {"refused" if kind == "packed" else "ok"}
    assert all(row["status"] == "ok" for row in masked if row not in plain)
    assert {row["provider"] for row in masked} == set(names.split(","))
    for row in masked:
        assert 0 < row["live"] <= 1
        assert (row.get("cost") is None) == (kind == "packed")
    if kind in ("documents", "prefix", "padding"):
        assert all(row["live"] == row["cost"] == 1 for row in plain)
    others = [row for row in rows if ":" not in row["mask"]]
    assert len(others) == (2 * 2 * 5 if kind in ("documents", "prefix") else 0)
    assert all((row["status"] == "refused") == (row["provider"] == "cpu-bool") for row in others)
    assert "mask,live,dropout" in path.with_suffix(".csv").read_text().splitlines()[0]
    defaults = bench("run", "--dry-run", "--cases", kind, "--device", "cpu")
    assert "each: cpu, cpu-plain, cpu-bool, sdpa, flex" in defaults
    assert "both" in defaults


def test_the_set_of_relative_biases_runs(tmp_path):
    """Every case, at a small size, forward and as training, with the table's gradient where it is learned."""
    path = tmp_path / "rows.jsonl"
    names = "cpu,cpu-plain,cpu-bool,cpu-op,sdpa,sdpa-math"
    sizes = "--set", "seqlen=70", "--set", "heads=2"
    run(path, *sizes, "--no-plot", "--providers", names, cases="relative", passes="forward,both")
    rows = rows_of(path)
    assert len(rows) == 4 * 2 * 6
    assert all((row["status"] == "refused") == (row["provider"] in ("cpu-bool", "cpu-op")) for row in rows)
    rows = [row for row in rows if row["status"] != "refused"]
    assert all(row["status"] == "ok" and row["cost"] > 0 for row in rows)
    for row in rows:
        if row["provider"] != "cpu-plain":
            assert ("relative_bias" in row["rms"]) == (row["mask"] == "relative" and row["pass"] == "both")
    defaults = bench("run", "--dry-run", "--cases", "relative", "--device", "cpu")
    assert "each: cpu, cpu-plain, sdpa, flex" in defaults


def test_the_set_of_sinks_runs(tmp_path):
    """Every case, at a small size: outputs and gradients, those of the sinks too, are held to the rule."""
    path = tmp_path / "rows.jsonl"
    sizes = [x for size in ("seqlen_q=70", "seqlen_k=80", "heads_q=8", "heads_k=2") for x in ("--set", size)]
    names = "cpu,cpu-plain,reference,sdpa,flex,cpu-op,sdpa-op"
    run(path, *sizes, "--no-plot", "--providers", names, cases="sinks", passes="forward,both")
    rows = rows_of(path)
    able = [row for row in rows if row["provider"] in ("cpu", "cpu-plain", "reference", "sdpa")]
    assert {row["status"] for row in able} == {"ok"}
    assert {row["status"] for row in rows if row not in able} == {"refused"}
    assert len(able) == 4 * 2 * len(select("sinks"))
    assert all(row["sinks"] and row["cost"] for row in able)
    measured = [row for row in able if row["pass"] == "both" and row["provider"] != "cpu-plain"]
    assert all("sinks" in row["rms"] for row in measured)
    assert "each: cpu, cpu-plain, sdpa" in bench("run", "--dry-run", "--cases", "sinks", "--device", "cpu")
    with pytest.raises(ValueError, match="sinks need mask='none', got 'bias'"):
        case("c", 24, sinks=True, mask="bias")


@pytest.mark.parametrize("entries", [1 << 19, 3000])
def test_a_wrong_gradient_of_sinks_is_caught(monkeypatch, entries):
    """Also where the check sees some of the heads and rows only."""
    monkeypatch.setattr(check, "MAX_ENTRIES", entries)
    problem = case("c", 60, batch=2, heads=(8, 4), causal=True, sinks=True)
    inputs = problem.inputs()
    checker = check.Checker(problem, inputs)
    (cpu,) = providers.choose("cpu", torch.device("cpu"))
    results = provider.results(problem, "both", cpu.work(problem, inputs, checker.grad_out, "both").call())
    assert checker.error(results, "cpu").ok
    error = checker.error({**results, "sinks": results["sinks"] * 1.001}, "cpu")
    assert (error.ok, error.worst) == (False, "sinks")


def test_what_a_mask_is_held_against():
    biased = case("c", 24, mask="alibi", causal=True)
    assert providers._without_mask(biased) == case("c", 24, causal=True)
    alone = providers._without_mask(case("c", 24, mask="streaming:4+2"))
    assert (alone.mask, alone.band) == ("none", (3, 0, 0))
    whole = providers._without_mask(case("c", 24, mask="documents:5", causal=True))
    assert (whole.mask, whole.band, whole.live_share) == ("none", None, 1)
    assert providers._without_mask(case("c", 24, window=(3, 3))) == case("c", 24)
    assert providers._without_mask(case("c", 24, window=(3, 3), sinks=True)) == case("c", 24, window=(3, 3))
    for problem in (case("c", 24), case("c", 24, mask="packed:3-5")):
        with pytest.raises(provider.Refused, match="no call of these sizes without the mask"):
            providers._without_mask(problem)


@pytest.mark.parametrize("name", ["documents-256-fp32", "padding-50-fp32", "relative-t5-fp32", "relative-alibi-fp32"])
def test_flex_attention_is_a_rival(name):
    problem = override(select(name)[0], seqlen_q=130, heads_q=1, batch=2)
    inputs = problem.inputs()
    checker = check.Checker(problem, inputs)
    (flex,) = providers.choose("flex", CPU)
    work = flex.work(problem, inputs, checker.grad_out, "forward")
    assert checker.error(provider.results(problem, "forward", work.call()), "flex").ok
    with pytest.raises(provider.Refused, match="no backward pass on a CPU"):
        flex.work(problem, inputs, checker.grad_out, "both")
    with pytest.raises(provider.Refused, match="masks that it can be told as functions"):
        flex.work(case("c", 8, mask="bool"), inputs, checker.grad_out, "forward")


@pytest.mark.parametrize("name", ["documents-256-fp32", "packed-20-50-fp32"])
def test_torchs_varlen_is_a_rival(name):
    """Where the device has it. On a CPU it runs while attnkern is torch's provider."""
    problem = override(select(name)[0], seqlen_q=130, heads_q=2)
    inputs = problem.inputs()
    checker = check.Checker(problem, inputs)
    with attnkern.use_as_sdpa():
        out = rivals._torch_varlen(problem, inputs)(*provider.tensors_of(inputs))
    assert checker.error({"out": out}, "torch-varlen").ok
    with pytest.raises(provider.Refused, match="documents and packed"):
        rivals._torch_varlen(override(problem, mask="prefix:3"), inputs)
    with pytest.raises(ValueError, match="'torch-varlen' is no provider on cpu"):
        providers.choose("torch-varlen", CPU)


def test_a_rival_that_is_not_installed_is_a_line(tmp_path, monkeypatch):
    found = rivals.importlib.util.find_spec
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None if name == "zentorch" else found(name))
    path = tmp_path / "rows.jsonl"
    run(path, "--no-plot", "--providers", "cpu,zentorch")
    rows = [row for row in rows_of(path) if row["provider"] == "zentorch"]
    assert [row["status"] for row in rows] == ["refused"] * len(rows) != []
    assert rows[0]["message"].startswith("zentorch isn't installed: pip install zentorch")


@pytest.fixture
def zentorch(monkeypatch):
    """A stand-in: zentorch 2.13's schema, and what it refuses."""
    schema = "zentorch_sdpa(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
    schema += "Tensor? attn_mask=None, float? scale=None, str zentorch_op_name='') -> (Tensor, Tensor)"

    def zentorch_sdpa(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, **_name):
        assert attn_mask is None or (attn_mask.dtype == query.dtype and attn_mask.dim() in (2, 4))
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return op(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)

    module = types.ModuleType("zentorch")
    module.__spec__ = ModuleSpec("zentorch", None)
    monkeypatch.setitem(sys.modules, "zentorch", module)
    monkeypatch.setattr(rivals.devices, "cpu_info", lambda: {"flags": ["avx512f"]})
    with torch.library._scoped_library("zentorch", "FRAGMENT") as library:
        library.define(schema)
        library.impl("zentorch_sdpa", zentorch_sdpa, "CPU")
        yield


@pytest.mark.parametrize(
    "features",
    [
        {"causal": True, "scale": 0.3},
        {"mask": "bool"},
        {"mask": "float", "heads_k": 1},
        {"mask": "padding:5", "causal": True},
        {"window": (5, 2)},
        {"seqlen_k": 50, "causal": True, "alignment": "bottom_right"},
    ],
    ids=str,
)
def test_zentorch_is_a_rival(zentorch, features):
    problem = override(case("c", 40, heads=2, dim=16, batch=2), **features)
    inputs = problem.inputs()
    checker = check.Checker(problem, inputs)
    (rival,) = providers.choose("zentorch", CPU)
    work = rival.work(problem, inputs, checker.grad_out, "forward")
    assert checker.error(provider.results(problem, "forward", work.call()), "zentorch").ok


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"softcap": 5.0}, "knows causal and a mask only"),
        ({"dropout": 0.5}, "knows causal and a mask only"),
        ({"dtype": "bf16"}, "calls torch's operator for bf16 on this CPU"),
    ],
)
def test_zentorch_refuses(zentorch, features, message):
    problem = override(case("c", 8), **features)
    with pytest.raises(provider.Refused, match=message):
        rivals._zentorch(problem, problem.inputs())
    with pytest.raises(provider.Refused, match="no backward pass"):
        providers.choose("zentorch", CPU)[0].work(problem, problem.inputs(), torch.empty(0), "backward")


def test_case_names_are_unique_and_selectable():
    assert len({c.name for c in CASES}) == len(CASES)
    assert [c.name for c in select("gpt2,llama*")] == ["llama3-8b", "gpt2"]
    assert {c.name for c in select("smoke")} == {"smoke-fp32", "smoke-bf16"}
    with pytest.raises(ValueError, match="no case, tag or matching glob"):
        select("gpt2,gpt3")
    with pytest.raises(ValueError, match="at least 1"):
        case("c", 0)
    with pytest.raises(ValueError, match="dropout must be from 0 to 1, got 2"):
        case("c", 1, dropout=2)
    with pytest.raises(ValueError, match="softcap must be from 0 to inf, got nan"):
        case("c", 1, softcap=math.nan)


def test_the_quick_sweep_covers_what_it_promises():
    found = {(c.dtype, c.head_dim, c.causal, c.seqlen_q) for c in select("quick-sweep")}
    lengths = (128, 256, 512, 1024, 2048, 4096)
    assert found == {(t, d, c, n) for t in ("fp32", "bf16") for d in (64, 128) for c in (False, True) for n in lengths}


def test_overrides():
    assert options.integers("64,512:2k:x2,3:9:+3") == [64, 512, 1024, 2048, 3, 6, 9]
    changes = options.overrides(["seqlen=64,128", "causal=true", "window=16/0,none"])
    assert len(changes) == 4
    changed = options.apply(select("gpt2"), changes)
    assert {(c.seqlen_q, c.seqlen_k, c.window) for c in changed} == {
        (n, n, w) for n in (64, 128) for w in ((16, 0), None)
    }
    assert override(changed[0], seqlen_q=64) is changed[0]
    assert override(select("sd15-cross")[0], seqlen_q=64).seqlen_k == 77


# --- error, memory, time ----------------------------------------------------------------------------------------------


RELATIVE = ["relative-t5-fp32", "relative-alibi-bf16"]


@pytest.mark.parametrize(
    "name", ["smoke-fp32", "swin-window", "bert-base-dropout", "whisper-cross", "gemma2-softcap", *RELATIVE]
)
@pytest.mark.parametrize("entries", [1 << 19, 3000])
def test_the_error_holds_on_a_sample_of_a_problem(monkeypatch, name, entries):
    monkeypatch.setattr(check, "MAX_ENTRIES", entries)
    sizes = {"batch": 2, "heads_q": 4, "heads_k": 2, "seqlen_q": 60, "seqlen_k": 70}
    problem = override(select(name)[0], **sizes)
    inputs = problem.inputs()
    checker = check.Checker(problem, inputs)
    (cpu,) = providers.choose("cpu", CPU)
    checker.seed_call()
    results = provider.results(problem, "both", cpu.work(problem, inputs, checker.grad_out, "both").call())
    assert ("attn_mask" in results, "relative_bias" in results) == (problem.mask == "bias", problem.mask == "relative")
    error = checker.error(results, "cpu")
    assert error.ok
    assert set(error.rms) == set(results)
    for tensor in results:
        spoilt = {n: x.clone() for n, x in results.items()}
        spoilt[tensor][(0,) * spoilt[tensor].dim()] += 0.5  # the first is always in the sample
        assert not checker.error(spoilt, "cpu").ok, tensor


def test_a_row_outside_the_sample_must_be_finite(monkeypatch):
    monkeypatch.setattr(check, "MAX_ENTRIES", 3000)
    problem = case("c", 200, heads=1)
    checker = check.Checker(problem, problem.inputs())
    assert len(checker.rows) < 200
    out = rivals._sdpa(problem, problem.inputs())(*provider.tensors_of(problem.inputs()))
    outside = next(i for i in range(200) if i not in checker.rows)
    assert checker.error({"out": out}, "sdpa").ok
    out[0, 0, outside, 0] = math.nan
    assert not checker.error({"out": out}, "sdpa").ok


def test_dropout_of_torch_is_replayed():
    problem = override(select("bert-base-dropout")[0], batch=1, heads_q=2, seqlen_q=32)
    (sdpa,) = providers.choose("sdpa", CPU)
    inputs = problem.inputs()
    checker = check.Checker(problem, inputs)
    checker.seed_call()
    out = sdpa.work(problem, inputs, checker.grad_out, "forward").call()
    assert checker.error({"out": out}, "sdpa").ok
    assert not checker.error({"out": out}, "cpu").ok


def mapped(size):
    """``size`` bytes of the system's own, touched. The C library may hand out what an earlier test has freed."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)


def test_memory_growth_counts_what_a_call_holds_at_once():
    """Linux counts resident pages for each core apart, and adds a core's up when they are a batch. So each of the two
    readings may be off by a batch of every core, and no more: right code passes always."""
    cores = os.cpu_count() or 1
    lag = 2 * cores * max(32, 2 * cores) * mmap.PAGESIZE
    size = (32 << 20) + 4 * lag

    def call():
        scratch = mapped(size)  # gone at the end
        return scratch[: 1 << 18].clone()

    call()
    result, grown = memory.peak_growth(call, CPU)
    assert result.numel() == 1 << 18
    assert grown is not None
    assert size - lag <= grown <= size + (8 << 20)


def test_math_is_refused_where_its_scores_do_not_fit():
    with pytest.raises(provider.Refused, match="score matrices need"):
        sweep._refuse_without_memory(case("c", 1 << 20), "forward", CPU)


def work(call):
    return timing.Work(call, contextlib.nullcontext)


def test_ratios_are_medians_of_rounds_and_order_rotates(monkeypatch):
    monkeypatch.setattr(timing.Load, "disturbed_since", lambda self, before: False)
    a = timing.Timing([1.0, 2.0, 4.0])
    b = timing.Timing([2.0, 2.0, 2.0])
    assert a.ratio(b) == 1.0
    assert timing.Timing([1.0, None, None]).ratio(b) == 2.0
    calls = []
    works = {"a": work(lambda: calls.append("a")), "b": work(lambda: calls.append("b"))}
    sampling = timing.Sampling(block=1e-9, rounds=2, min_rounds=2, budget=9.0)
    found = timing.measure(works, sampling, CPU)
    assert [len(t.kept) for t in found.values()] == [2, 2]
    assert calls[-4:] == ["a", "b", "b", "a"]


def test_disturbed_rounds_are_dropped_and_too_many_are_confessed(monkeypatch):
    sampling = timing.Sampling(block=1e-5, rounds=3, min_rounds=3, budget=9.0)
    answers = iter([True, False, True, False, False])
    monkeypatch.setattr(timing.Load, "disturbed_since", lambda self, before: next(answers))
    found = timing.measure({"a": work(lambda: None)}, sampling, CPU)["a"]
    assert (len(found.kept), found.dropped, found.clean) == (3, 2, True)
    monkeypatch.setattr(timing.Load, "disturbed_since", lambda self, before: True)
    found = timing.measure({"a": work(lambda: None)}, dataclasses.replace(sampling, budget=0.0), CPU)["a"]
    assert (len(found.kept), found.dropped, found.clean) == (3, 0, False)


def test_waiting_for_a_core_disturbs():
    quiet = timing.Load(wall=0.0, queued=0.0, foreign=0.0)
    assert not timing.Load(1.0, 0.01, 0.01).disturbed_since(quiet)
    assert timing.Load(1.0, 0.10, 0.01).disturbed_since(quiet)
    assert timing.Load(1.0, 0.01, 0.50).disturbed_since(quiet)
    assert not timing.Load(1.0, None, None).disturbed_since(quiet)


@pytest.mark.parametrize(("gain", "label"), [(1.1, "register-only loop"), (2.0, "best matmul")])
def test_the_peak_is_that_of_the_loop_unless_a_matmul_has_more_units(monkeypatch, gain, label):
    """However slow the loop looked at its own moment."""
    race = {"first": timing.Timing([gain] * 3), "other": timing.Timing([1.0] * 3)}
    monkeypatch.setattr(machine, "measure", lambda works, *_: race)
    loop, other = machine.Peak(1.0, "register-only loop", int, 1.0), machine.Peak(1e9, "best matmul", int, 1.0)
    assert machine._faster(loop, other, CPU, False).label == label


def test_no_matmul_takes_minutes(monkeypatch):
    sizes = []
    monkeypatch.setattr(machine, "_fastest", lambda call, *_: sizes.append(len(call.args[0])) or 0.05)
    found = machine._best_matmul(torch.bfloat16, CPU, False)
    assert found.work == 2 * 256**3
    assert found.loop is not None  # to be timed beside each row
    assert sizes == [256]  # at whose rate 1024 would take three seconds


# --- targets ----------------------------------------------------------------------------------------------------------


def test_targets_are_distinct_and_complete():
    found = targets.TABLE
    assert len({(g.case.name, g.pass_name) for g in found}) == len(found)
    squares = {(g.case.dtype, g.pass_name, g.case.seqlen_q, g.case.causal) for g in found if g.case.name.count(" L")}
    for length in (49, 64, 128, 197, 512, 1024, 4096):
        for kind in itertools.product(("fp32", "bf16"), ("forward", "backward"), (length,), (False, True)):
            assert kind in squares
    assert {g.case.mask for g in found} == {"none", "packed:20-50"}
    assert {g.case.seqlen_q for g in found if g.reads} == {1}
    assert all(0.2 < g.wanted("avx512bf16") < 1 for g in found)
    assert all(g.wanted("avx2") == g.wanted("avx512") - targets.NARROWER for g in found)
    wanted = {(g.label, isa): g.wanted(isa) for g in found if not g.reads for isa in ("avx512", "avx2")}
    # What is converted computes in float32.
    assert all(share == wanted[label.replace("bf16", "fp32"), isa] for (label, isa), share in wanted.items())
    short = next(g for g in found if g.label == "fp32 D64 L128 causal, forward")
    assert [short.wanted(isa) for isa in ("avx512", "avx2", "generic")] == pytest.approx([0.76, 0.71, 0.71])


def test_a_set_is_chosen_in_whole_or_part():
    assert targets.named("gpt2") is None
    assert targets.named("cpu-goals") == targets.named("cpu-goals-avx2") == targets.TABLE
    assert {g.case.seqlen_q for g in targets.named("cpu-goals-avx2:L49 ")} == {49}


class FakeRunner:
    """Shares of the peak from a list, one for each measurement."""

    device = CPU

    def __init__(self, *shares):
        self.shares = list(shares)

    def key(self, case, pass_name, provider):
        return f"{case.name} {pass_name} {provider}"

    def run(self, case, pass_name, rivals):
        share = self.shares.pop(0)
        return [
            {**timed(case, pass_name, peak_share=share, provider=p.name), "key": self.key(case, pass_name, p.name)}
            for p in rivals
        ]


def timed(problem, pass_name="forward", **more):
    fields = {("case" if k == "name" else k): v for k, v in dataclasses.asdict(problem).items()}
    measured = {"pass": pass_name, "provider": "cpu", "isa": "avx512bf16", "threads": 1, "bandwidth_share": 0.9}
    counted = {"memory": 1 << 20, "result_bytes": 1 << 20, "faults": 0.0, "clock": "cpu time"}
    return {**row(problem.seqlen_q), **fields, **measured, **counted, **more}


PROVENANCE = {
    "device": "m",
    "cpu_isa": "avx512bf16",
    "threads": 1,
    "torch": "2",
    "torch_isa": "AVX512",
    "code": "c",
    "git": None,
    "dirty": False,
    "date": "2026-11-26T00:00:00+00:00",
    "command": "c",
}


@pytest.mark.parametrize(
    ("shares", "status", "fails"),
    [([0.5], "reached", False), ([0.4, 0.6], "reached", False), ([0.4, 0.44], "missed: peak", True)],
)
def test_what_misses_twice_fails(tmp_path, shares, status, fails):
    target = targets.Target(case("x", 128), "forward", 0.5)
    log = record.Log(tmp_path / "targets.jsonl")
    log.start_run(PROVENANCE)
    runner = FakeRunner(*shares)
    rows, failed, interrupted = targets.run([target], runner, log, report.Console(quiet=True))
    assert (targets.status_of(target, rows[0]), failed, interrupted) == (status.partition(":")[0], fails, False)
    assert runner.shares == []
    assert rows[0]["isa"] == attnkern.build_info()["cpu_isa"]
    page = (tmp_path / "targets.md").read_text()
    assert f"| {rows[0]['peak_share']:.1%} |" in page
    assert f"| {status} |" in page
    again, _, _ = targets.run([target], runner, log, report.Console(quiet=True))  # from the log: no share is left
    assert again[0]["peak_share"] == rows[0]["peak_share"]


@pytest.mark.parametrize(
    ("got", "missed"),
    [
        ({}, ""),
        ({"peak_share": 0.499}, "peak"),
        ({"isa": "avx2", "peak_share": 0.451}, ""),
        ({"isa": "avx2", "peak_share": 0.449}, "peak"),
        ({"ratio": 0.999}, "ratio"),
        ({"ratio": None}, ""),
        ({"allowed_share": 1.01}, "error"),
        ({"memory": 4 << 20}, "memory"),  # beside 1 MiB of results
        ({"memory": 4 << 20, "threads": 2}, ""),
        ({"memory": None}, ""),
        ({"faults": 64.0}, ""),
        ({"faults": 65.0}, "faults"),
        ({"status": "wrong", "message": "out: error"}, "out: error"),
    ],
)
def test_every_bound_of_a_row_counts(got, missed):
    target = targets.Target(case("x", 128), "forward", 0.5)
    found = timed(target.case, **got)
    assert targets.missed(target, found) == missed
    kind = "wrong" if "status" in got else "missed" if missed else "reached"
    assert targets.status_of(target, found) == kind
    assert kind in targets._line(target, found)


def test_a_decode_is_held_to_what_it_reads():
    target = targets.Target(case("x", 1, 128), "forward", 0.8, reads=True)
    assert targets.status_of(target, timed(target.case, bandwidth_share=0.8, peak_share=0.1)) == "reached"
    assert targets.missed(target, timed(target.case, bandwidth_share=0.7, peak_share=0.9)) == "reads"


def test_a_run_of_targets_is_one_thread_against_registers(tmp_path):
    """The whole way, on rows that take a millisecond, with a real peak beside them."""
    out = tmp_path / "rows.jsonl"
    one = ["--device", "cpu", "--cases", "cpu-goals:fp32 D64 L64 full, forward", "--budget", "0.1", "--rounds", "3"]
    printed = CliRunner().invoke(app, ["run", *one, "--out", str(out)])
    assert printed.exit_code in (0, 1), printed.output
    ours, sdpa = rows_of(out)
    assert (ours["provider"], sdpa["provider"], ours["status"]) == ("cpu", "sdpa", "ok")
    assert {ours["threads"], ours["clock"], ours["peak"]} == {1, "cpu time", "register-only loop"}
    assert 0.1 < ours["peak_share"] < 1.2
    assert ours["result_bytes"] == 8 * 12 * 64 * 64 * 4
    assert ours["faults"] >= 0
    assert "of 1 targets reached" in printed.output


def test_avx2_is_measured_in_a_process_of_its_own(monkeypatch):
    started = []

    def execve(path, command, environment):
        started.append((command, environment))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(sys, "argv", ["bench", "run", "--cases", "cpu-goals-avx2"])
    for name in targets.SETS["cpu-goals-avx2"]:
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["run", "--device", "cpu", "--cases", "cpu-goals-avx2"])
    assert result.exit_code == 0, result.output
    [(command, environment)] = started
    assert command == [sys.executable, "-m", "bench", "run", "--cases", "cpu-goals-avx2"]
    assert environment.items() >= targets.SETS["cpu-goals-avx2"].items()
    for name, value in targets.SETS["cpu-goals-avx2"].items():
        monkeypatch.setenv(name, value)
    assert targets.environment("cpu-goals-avx2:L64") == {}


def test_targets_are_the_cpus_on_a_machine_with_a_gpu_too(monkeypatch):
    """Where other cases go to the GPU, unless something else is asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kernels = types.SimpleNamespace(name="cuda", device_types=("cuda",), available=True)
    monkeypatch.setattr(attnkern, "backends", lambda: (kernels,))
    for name in targets.SETS:
        assert "targets" in bench("run", "--dry-run", "--cases", name)
    refused = bench("run", "--dry-run", "--cases", "cpu-goals", "--device", "cuda", code=2)
    assert "cpu-goals are targets for a CPU" in refused
    assert "gpu-" in bench("run", "--dry-run")


def test_reads_are_of_the_cases_size():
    peak = machine.read_bandwidth(CPU, 1, True, 1 << 20)
    assert peak.work == 1 << 20
    assert peak.loop is not None
    assert sweep.bound_by_reading(next(g.case for g in targets.TABLE if g.reads), "forward")


@pytest.mark.real_memory
def test_page_faults_are_those_of_a_call():
    sampling = timing.Sampling(block=1e-9, rounds=3, min_rounds=3, budget=9.0, cpu_time=True)
    found = timing.measure({"touch": work(lambda: mapped(64 << 20)), "nothing": work(lambda: None)}, sampling, CPU)
    assert len(found["touch"].faults) == len(found["touch"].kept) == 3
    assert found["touch"].row()["faults"] > 16  # huge pages of 2 MiB at most
    assert found["nothing"].row()["faults"] < 8


# --- pages of targets -------------------------------------------------------------------------------------------------


def _share_pages():
    path = ROOT / "docs" / "make_share_pages.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


share_pages = _share_pages()


@pytest.mark.parametrize("page", share_pages.PAGES)
def test_the_pages_show_the_stored_runs(page):
    text = (ROOT / page).read_text()
    assert share_pages.replace(page, text) == text, "run `python docs/make_share_pages.py`"


@pytest.mark.parametrize("stored", share_pages.stored(), ids=lambda run: run.name)
def test_stored_runs_are_whole_and_drawn(stored):
    assert set(stored.found) == set(targets.TABLE)
    drawn = (ROOT / "docs" / "images" / f"{stored.name}.svg").read_text()
    table = (ROOT / "bench" / "results" / f"{stored.name}.md").read_text()
    assert drawn == share_pages.picture(stored), "run `python docs/make_share_pages.py`"
    assert table == targets.page(stored.found, stored.run), "run `python docs/make_share_pages.py`"


def test_runs_stand_side_by_side(tmp_path):
    target, other = targets.TABLE[0], next(g for g in targets.TABLE if g.reads)
    rows = {"cpu-goals-x": timed(target.case, peak_share=0.7), "cpu-goals-y": timed(target.case, peak_share=0.1)}
    for name, found in rows.items():
        log = record.Log(tmp_path / f"{name}.jsonl")
        log.start_run({**PROVENANCE, "device": name[-1]})
        log.add(found)
        log.add({**timed(other.case, ratio=0.5, faults=900.0), "key": "other"})
        log.close()
    markers = f"{share_pages.BEGIN}\n{share_pages.END}"
    text = share_pages.replace("docs/shares.md", markers, tmp_path)
    assert f"| {target.label} | 60% / 55% | 70%, 2.0× | **10%**, 2.0× |" in text
    assert f"| {other.label} of reads | 80% / 75% | 90%, 0.5×, **ratio**, **faults** |" in text
    assert "x, avx512bf16, 1 thread (F.sdpa: AVX512): 1 of 2 targets reached, 1 missed" in text
    brief = share_pages.replace("README.md", markers, tmp_path)
    assert "| float32 forward, 49 to 197 long | 70% to 70% | 10% to 10% |" in brief
    figure = plots.pictures(share_pages.stored(tmp_path)[0].rows)[0].make(True, "machine")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["float32"]
    plots.plt.close(figure)
    assert share_pages.NONE in share_pages.replace("README.md", markers, tmp_path / "none")


def test_case_is_hashable_data():
    assert isinstance(hash(CASES[0]), int)
    assert isinstance(CASES[0], Case)
