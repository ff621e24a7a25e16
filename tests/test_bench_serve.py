"""A server's stream in the benchmark, with a tiny model: the schedule, equal tokens, rows, options."""

import functools
import importlib.util
import re
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import attnkern
import bench_runs
from attnkern.backends.failed import FallbackWarning
from bench import plots, record, serve, timing
from bench.stream import TINY, Stream, requests, schedule
from bench_runs import no_peak, rows_of  # noqa: F401 (no_peak runs by itself)

pytestmark = pytest.mark.real_memory

SMALL = Stream("fp32", 10, 4, 24, 20, 6, 37, 0.5, 0.8, 2, sizes=TINY)
QUICK = [
    *("--tiny", "--threads", "1", "--no-plot", "--requests", "8", "--running", "4", "--tokens", "24", "--prompt", "20"),
    *("--output", "6", "--prefix", "37", "--layers", "2"),
]
WAYS = ["sdpa", "sdpa-gqa", "attnkern-64", "attnkern-16"]


def changed(**others):
    return Stream(**{**{n: getattr(SMALL, n) for n in asdict(SMALL)}, **others})


run = functools.partial(bench_runs.run, "serve", QUICK)


# --- the schedule -----------------------------------------------------------------------------------------------------


def test_the_schedule_depends_on_the_stream_alone():
    steps = schedule(SMALL)
    assert schedule(SMALL) == steps == schedule(changed(dtype="bf16"))
    assert schedule(changed(seed=1)) != steps


@pytest.mark.parametrize("others", [{}, {"arrivals": 0.05}, {"shared": 1.0}, {"prefix": 0}, {"tokens": 4}], ids=str)
def test_every_token_of_every_request_has_its_step(others):
    stream = changed(**others)
    wanted, done, first = requests(stream), {}, {}
    slots, arrived, mixed = {}, set(), 0
    for step in schedule(stream):
        arrived.update(step.arrived)
        for slot, _ in step.admitted:
            assert slot not in slots
            slots[slot] = None
        assert 0 < sum(part.tokens for part in step.parts) <= stream.tokens
        assert len({part.slot for part in step.parts}) == len(step.parts)
        assert len(slots) <= stream.running
        mixed += 0 < step.decoding < len(step.parts)
        for n, part in enumerate(step.parts):
            request = wanted[part.request]
            assert part.request in arrived
            if slots[part.slot] is None:
                slots[part.slot] = part.request
                done[part.request] = request.prefix
                first[part.request] = (part.slot, request.prefix > 0) in step.admitted
            assert slots[part.slot] == part.request
            assert part.begin == done[part.request]
            done[part.request] += part.tokens
            whole = request.prefix + request.prompt
            assert (part.begin >= whole) == (n < step.decoding)
            assert part.tokens == 1 or n >= step.decoding
            assert part.chooses == (done[part.request] >= whole)
        assert step.live == stream.prefix + sum(done[r] - wanted[r].prefix for r in slots.values() if r is not None)
        for slot in step.ended:
            del slots[slot]
    assert done == {n: request.length for n, request in enumerate(wanted)}
    assert all(first.values())
    assert mixed or stream.arrivals < 0.1
    assert not slots


def test_lengths_and_arrivals_are_those_that_were_asked_for():
    found = requests(changed(requests=4000, prompt=200, output=80, shared=0.25, arrivals=0.5))
    prompts, outputs = (sorted(getattr(r, name) for r in found) for name in ("prompt", "output"))
    assert prompts[2000] == pytest.approx(200, rel=0.05)
    assert outputs[2000] == pytest.approx(80, rel=0.05)
    assert prompts[-1] == 6 * 200
    assert found[-1].arrival == pytest.approx(4000 / 0.5, rel=0.05)
    assert sum(r.prefix == 37 for r in found) == pytest.approx(1000, rel=0.1)
    assert {r.prefix for r in found} == {0, 37}


# --- the ways ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [{}, {"shared": 1.0}, {"prefix": 0}, {"dtype": "bf16"}], ids=str)
def test_all_ways_choose_the_same_tokens_as_whole_sequences(others):
    stream = changed(**others)
    server = serve.Server(stream, WAYS)
    server.run()  # compares in float32
    for name in WAYS[1:]:
        assert server.error(name) < (1e-5 if stream.dtype == "fp32" else 3e-2) <= serve.ALLOWED[stream.dtype]
    assert server.error("attnkern-64") > 0  # the same mathematics in another order
    if stream.dtype != "fp32":
        return
    for number, request in enumerate(requests(stream)):
        chosen = server.chosen[number]
        assert len(chosen) == request.output
        tokens = torch.tensor(server.given[number] + chosen[:-1])
        places = torch.arange(len(tokens))

        def attend(_, query, key, value):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        logits = server.model(tokens, places, places[-request.output :], attend)
        assert logits.argmax(-1).tolist() == chosen


def test_the_pages_are_as_many_as_the_stream_needs():
    steps = schedule(SMALL)
    for size in (16, 64):
        server = serve.Server(SMALL, ["sdpa", f"attnkern-{size}"])
        server.run()
        way = server.ways[f"attnkern-{size}"]
        pages = way.cache.keys.shape[1]
        assert way.most == pages == serve.pages_needed(SMALL, steps, size)
        assert way.cache.free_pages == pages - -(-37 // size)  # the prefix stays
        assert way.nbytes == pages * size * SMALL.token_bytes
        assert way.nbytes >= max(step.live for step in steps) * SMALL.token_bytes
    longest = max(request.length for request in requests(SMALL))
    assert server.ways["sdpa"].nbytes == (4 * longest + 37) * SMALL.token_bytes


def test_latencies_are_counted_from_the_arrival():
    server = serve.Server(SMALL, ["sdpa"])
    server.seconds["sdpa"] = [1.0] * len(server.steps)
    first, between = server.latencies("sdpa")
    wanted = requests(SMALL)
    assert len(first) == len(wanted)
    assert len(between) == sum(request.output - 1 for request in wanted)
    arrived = {r: n for n, step in enumerate(server.steps) for r in step.arrived}
    chosen = {}
    for n, step in enumerate(server.steps):
        for part in step.parts:
            if part.chooses:
                chosen.setdefault(part.request, n)
    assert sorted(first) == sorted(chosen[r] + 1 - arrived[r] for r in chosen)
    assert max(first) > 1  # some have to wait
    assert set(between) == {1.0}


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_has_all_rows_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    run(path, "--dtypes", "fp32")
    measured = []
    real = serve.ServeRunner.run
    monkeypatch.setattr(serve.ServeRunner, "run", lambda self, *w: measured.append(w[0].dtype) or real(self, *w))
    run(path)
    assert measured == ["bf16"]
    rows = rows_of(path)
    assert [(row["dtype"], row["provider"]) for row in rows] == [(d, way) for d in ("fp32", "bf16") for way in WAYS]
    for row in rows:
        assert row["status"] == "ok", row.get("message")
        assert 0 < row["attention_seconds"] < row["seconds"]
        assert 0 < row["first_p50"] <= row["first_p99"]
        assert 0 < row["between_p50"] <= row["between_p99"]
        assert row["live_bytes"] <= row["cache_bytes"]
        assert row["generated_per_second"] * row["seconds"] == pytest.approx(row["generated_tokens"])
        assert ("pages" in row) == row["provider"].startswith("attnkern")
    table = path.with_suffix(".md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {len(serve.HEAD) + 1}
    assert path.with_suffix(".csv").read_text().count("\n") == 1 + len(rows)


def test_another_token_is_an_error(tmp_path, monkeypatch):
    real = serve.Paged.attend

    def attend(self, layer, query, *others):
        return real(self, layer, query.flip(1), *others)

    monkeypatch.setattr(serve.Paged, "attend", attend)
    path = tmp_path / "rows.jsonl"
    printed = run(path, "--dtypes", "fp32", code=1)
    assert re.search(r"wrong: token \d+ of request \d+ is \d+, with sdpa \d+", printed)
    assert [row["status"] for row in rows_of(path)] == ["error", "error", "wrong", "error"]
    assert "seconds" not in rows_of(path)[0]
    assert "| wrong |" in path.with_suffix(".md").read_text()
    printed = run(path, "--dtypes", "bf16", code=1)
    assert "logits differ from sdpa's by" in printed


def test_a_call_on_other_kernels_is_an_error(tmp_path, monkeypatch):
    real = attnkern.PagedCache.step

    def step(self, *arguments):
        warnings.warn("attnkern: computed elsewhere", FallbackWarning, stacklevel=2)
        return real(self, *arguments)

    monkeypatch.setattr(attnkern.PagedCache, "step", step)
    printed = run(tmp_path / "rows.jsonl", "--dtypes", "fp32", code=1)
    assert "error: FallbackWarning: attnkern: computed elsewhere" in printed


def test_a_run_says_how_long_it_takes():
    runner = serve.ServeRunner(torch.device("cpu"), timing.Sampling())
    wanted = requests(SMALL)
    tokens = sum(request.length - request.prefix for request in wanted)
    sizes = TINY
    weights = sizes.vocabulary * 64 + 2 * (64 * 64 + 2 * 64 * 64 + 64 * 64 * 2)
    expected = 3 * tokens * 2 * weights / (serve.USUAL_SHARE * 1e11)
    assert runner.expected_seconds([(SMALL, "serve")], 3) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "option", "words"),
    [
        (["--dtypes", "fp16"], "--dtypes", "'fp16' is none of float32, bfloat16, fp32, bf16"),
        (["--pages", "64,48"], "--pages", "'48' is no power of two from 16 on"),
        (["--pages", "8"], "--pages", "'8' is no power of two from 16 on"),
        (["--pages", ","], "--pages", "nothing is named"),
        (["--tokens", "3"], "--tokens", "3 is less than a token for each of 4 sequences that run at once"),
        (["--threads", "2", "--cpu-time"], "--cpu-time", "CPU time compares on one CPU thread only: add --threads 1"),
    ],
    ids=["dtype", "no power of two", "too small", "no page size", "too few tokens", "threads"],
)
def test_bad_options_are_named(arguments, option, words, tmp_path):
    printed = run(tmp_path / "rows.jsonl", *arguments, code=2)
    assert f"Invalid value for {option}: {words}" in printed
    assert not list(tmp_path.iterdir())


# --- the page ---------------------------------------------------------------------------------------------------------


def _page():
    path = Path(__file__).parent.parent / "docs" / "make_run_pages.py"
    spec = importlib.util.spec_from_file_location("make_run_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PAGES["serving"]


page = _page()


def test_the_page_shows_the_stored_runs():
    text = page.path.read_text()
    assert page.replace(text) == text, "run `python docs/make_run_pages.py`"


def test_a_run_becomes_a_section_and_a_picture(tmp_path):
    path = tmp_path / "serve-cpu-1-threads.jsonl"
    run(path, "--cpu-time", "--plot", "--dtypes", "fp32")
    assert "<svg" in (tmp_path / f"{path.stem}-serve.svg").read_text()
    begin, end = "<!-- serving:begin -->", "<!-- serving:end -->"
    text = page.replace(f"# Title\n\n{begin}\nan older table\n{end}\n", tmp_path)
    assert text.startswith(f"# Title\n\n{begin}\n## ")
    assert text.endswith(f"|\n{end}\n")
    assert "an older table" not in text
    assert "8 requests, 50% of them behind a prefix of 37 tokens, in " in text
    assert "CPU time in place of the clock's" in text
    assert [text.count(f"| {plots.cache_label(way)} | fp32 |") for way in WAYS] == [1] * 4
    rows, runs = record.read(path)
    assert [picture.kind for picture in plots.pictures(list(rows.values()))] == ["serve"]
    assert runs[-1]["date"][:10] in text
