"""Whole models in the benchmark, with two small layers each: rows, what is compared, what attention's share is."""

import functools
import importlib.metadata
import importlib.util
import os
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import AttentionInterface

import bench_runs
from attnkern.backends.failed import FallbackWarning
from attnkern.integrations import transformers as integration
from bench import models, plots, record, timing
from bench_runs import no_peak, rows_of  # noqa: F401 (no_peak runs by itself)
from matrix import in_turn

pytestmark = pytest.mark.real_memory

ROOT = Path(__file__).parent.parent
QUICK = ["--tiny", "--threads", "1", "--rounds", "1", "--seconds", "0", "--no-plot"]
PASSES = {model.name: list(model.passes) for model in models.MODELS}


@pytest.fixture
def ours(monkeypatch):
    """Puts another function in the place of attnkern's attention."""

    def put(function):
        AttentionInterface.register(integration.NAME, function)

    monkeypatch.setattr(integration, "register", lambda: None)
    yield put
    AttentionInterface.register(integration.NAME, integration.attention_forward)


@pytest.fixture(autouse=True, scope="module")
def registered():
    integration.register()


run = functools.partial(bench_runs.run, "models", QUICK)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(**in_turn(name=list(PASSES), dtype=["fp32", "bf16"]))
def test_every_model_has_its_rows_and_both_sides_agree(name, dtype, tmp_path):
    path = tmp_path / "rows.jsonl"
    run(path, "--models", name, "--dtypes", dtype)
    rows = rows_of(path)
    assert [(row["pass"], row["provider"]) for row in rows] == [
        (pass_name, side) for pass_name in PASSES[name] for side in ("sdpa", "attnkern")
    ]
    for row in rows:
        assert (row["status"], row["dtype"]) == ("ok", dtype), row.get("message")
        assert row["seconds"] > 0
        assert row["rest_seconds"] > 0
        assert row["memory"] >= 0
        assert row["transformers"] == importlib.metadata.version("transformers")
    # The same mathematics in another order: not the same numbers, and not another result.
    for row in rows[1::2]:
        assert row["error"] < (1e-5 if dtype == "fp32" else 3e-2) <= models.ALLOWED[dtype]
    assert rows[1]["pass"] == "training"
    assert rows[1]["error"] > 0
    table = path.with_suffix(".md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(PASSES[name])
    assert {line.count("|") for line in lines} == {len(models.HEAD) + 1}


def test_a_run_draws_its_picture_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    few = ["--models", "vit", "--dtypes", "fp32", "--plot"]
    run(path, *few, "--passes", "prefill")
    assert (tmp_path / "rows-models.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "rows-models.svg").read_text()
    assert not list(tmp_path.glob("*bars*"))
    assert path.with_suffix(".csv").read_text().startswith("case,model,size,pass,provider")
    measured = []
    real = models.ModelRunner.run
    monkeypatch.setattr(models.ModelRunner, "run", lambda self, *words: measured.append(words[1]) or real(self, *words))
    run(path, *few)
    assert measured == ["training"]
    assert len(rows_of(path)) == 4


def _wrong_output(module, query, key, value, mask, **others):
    out, weights = integration.attention_forward(module, query, key, value, mask, **others)
    return out * 1.01, weights


def _wrong_gradient(module, query, key, value, mask, **others):
    return integration.attention_forward(module, query.detach(), key, value, mask, **others)


@pytest.mark.parametrize(
    ("wrong", "pass_name"), [(_wrong_output, "prefill"), (_wrong_output, "decode"), (_wrong_gradient, "training")]
)
def test_a_side_that_computes_something_else_is_wrong(wrong, pass_name, ours, tmp_path):
    ours(wrong)
    path = tmp_path / "rows.jsonl"
    printed = run(path, "--models", "gpt2", "--dtypes", "fp32", "--passes", pass_name, code=1)
    assert "wrong: differs from sdpa by" in printed
    [_, row] = rows_of(path)
    assert row["status"] == "wrong"
    assert "seconds" not in row
    assert "| wrong |" in path.with_suffix(".md").read_text()


def test_a_call_on_other_kernels_is_an_error(ours, tmp_path):
    def falls_back(module, *tensors, **others):
        warnings.warn("attnkern: computed elsewhere", FallbackWarning, stacklevel=2)
        return integration.attention_forward(module, *tensors, **others)

    ours(falls_back)
    path = tmp_path / "rows.jsonl"
    printed = run(path, "--models", "gpt2", "--dtypes", "fp32", "--passes", "prefill", code=1)
    assert "error: FallbackWarning: attnkern: computed elsewhere" in printed


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "option", "words"),
    [
        (["--models", "gpt9"], "--models", "'gpt9' is none of bert, gpt2, vit, whisper, t5, llama"),
        (["--dtypes", "fp16"], "--dtypes", "'fp16' is none of float32, bfloat16, fp32, bf16"),
        (["--passes", "forward"], "--passes", "'forward' is none of training, prefill, decode"),
        (["--models", "bert,vit", "--passes", "decode"], "--passes", "bert,vit has none of decode"),
    ],
    ids=["model", "dtype", "pass", "a pass that no model has"],
)
def test_bad_options_are_named(arguments, option, words, tmp_path):
    printed = run(tmp_path / "rows.jsonl", *arguments, code=2)
    assert f"Invalid value for {option}: {words}" in printed
    assert not list(tmp_path.iterdir())


def test_without_transformers_one_sentence_says_so(tmp_path, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    printed = run(tmp_path / "rows.jsonl", code=2).strip()
    assert printed == (
        "attnkern: register() needs transformers >= 5.0, which is not installed (pip install -U transformers)"
    )


# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"),
    [("bert", 109.5), ("gpt2", 124.4), ("vit", 86.9), ("whisper", 241.7), ("t5", 60.5), ("llama", 1100.0)],
)
def test_the_models_have_their_published_sizes(name, millions):
    version = importlib.metadata.version("transformers")
    model = next(m for m in models.MODELS if m.name == name)
    shape = models.Shape(1, 1)
    workload = models.Workload(name, "prefill", "fp32", shape, False, version)
    assert workload.weights / 1e6 == pytest.approx(millions, rel=2e-3)
    if name == "vit":
        config = model.configuration(shape, False)
        tokens = (config.image_size // config.patch_size) ** 2 + 1
        assert {s.length for s in model.passes.values()} == {tokens}


def test_a_run_says_how_long_it_takes():
    workloads = models.workloads(["llama", "whisper"], ["bf16"], models.PASSES, False)
    sizes = {(w.model, w.pass_name): w.size for w in workloads}
    assert sizes["llama", "training"] == "1 x 1024, 2 of 22 layers"
    assert sizes["whisper", "decode"] == "4 x 1500 to 1 after 200"
    runner = models.ModelRunner(torch.device("cpu"), timing.Sampling(0.2, 7, 3, 8))
    prefill = next(w for w in workloads if (w.model, w.pass_name) == ("llama", "prefill"))
    assert prefill.flops("prefill") == 2 * prefill.weights * 2048
    call = prefill.flops("prefill") / (models.USUAL_SHARE * 1e11)
    expected = prefill.weights / models.MADE + 3 * (models.CALLS_BEFORE + 3) * call
    assert runner.expected_seconds([(prefill, "prefill")], 2) == pytest.approx(expected)


def test_what_stands_for_attention_gives_every_gradient_and_reads_one_key():
    query, key, value = (torch.randn(2, heads, n, 8, requires_grad=True) for heads, n in ((4, 3), (2, 5), (2, 5)))
    bias = torch.randn(1, 4, 3, 5, requires_grad=True)
    out, weights = models._left_out(None, query, key, value, None, scaling=1.0, position_bias=bias)
    assert weights is None
    assert out.shape == (2, 3, 4, 8)
    grads = torch.autograd.grad(out.sum(), (query, key, value, bias))
    assert all(grad.abs().sum() > 0 for grad in grads)
    with torch.no_grad():
        key[:, :, :-1] = torch.nan
        value[:, :, :-1] = torch.nan
    assert models._left_out(None, query, key, value, None)[0].isfinite().all()


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_without_attention_all_weights_still_get_gradients(name):
    [workload] = models.workloads([name], ["fp32"], ["training"], True)
    runner = models.ModelRunner(torch.device("cpu"), timing.Sampling(rounds=1))
    step, works = runner._works(workload)
    counts = {}
    for side, work in works.items():
        with work.context():
            counts[side] = len(step())
    assert counts["sdpa"] == counts["attnkern"] == counts[models.LEFT_OUT] > 20


def fake_times(monkeypatch, **seconds):
    """Rounds in which the three sides take so long: sdpa, attnkern, rest."""
    names = {"sdpa": "sdpa", "attnkern": "attnkern", "rest": models.LEFT_OUT}
    found = {names[side]: timing.Timing(list(times)) for side, times in seconds.items()}
    monkeypatch.setattr(models, "measure", lambda works, *_: {name: found[name] for name in works})


def test_attentions_share_is_what_leaving_it_out_saves(monkeypatch, tmp_path):
    # The machine is half as fast in the second round: all that is told is a ratio within a round.
    fake_times(monkeypatch, sdpa=[4.0, 8.0, 4.0], attnkern=[2.5, 5.0, 2.5], rest=[2.0, 4.0, 2.0])
    path = tmp_path / "rows.jsonl"
    run(path, "--models", "bert", "--dtypes", "fp32", "--passes", "prefill")
    theirs, ours = rows_of(path)
    assert (theirs["attention_share"], theirs["limit"], theirs["ratio"]) == (0.5, 2.0, 1.0)
    assert (ours["attention_share"], ours["ratio"]) == (pytest.approx(0.2), 1.6)
    assert ours["attention_ratio"] == pytest.approx(4.0)
    share, alone = theirs["attention_share"], ours["attention_ratio"]
    assert ours["ratio"] == pytest.approx(1 / (1 - share + share / alone))  # Amdahl's law
    [cells] = models.lines([theirs, ours])
    assert cells[:10] == [
        *("BERT-base", "prefill", "2 x 20, tiny", "fp32", "4 s", "2.5 s", "1.60", "50%", "2.00", "4.0"),
    ]


def test_attention_that_is_lost_in_the_noise_has_no_ratio(monkeypatch, tmp_path):
    fake_times(monkeypatch, sdpa=[2.1], attnkern=[2.0], rest=[2.0])
    path = tmp_path / "rows.jsonl"
    run(path, "--models", "bert", "--dtypes", "fp32", "--passes", "prefill")
    assert rows_of(path)[1]["attention_ratio"] is None


def test_a_difference_is_of_all_numbers_and_nan_is_none():
    expected = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    assert models.difference(expected, expected) == 0
    assert models.difference([torch.tensor([3.0, 0.5]), torch.tensor([4.0])], expected) == pytest.approx(0.1)
    assert not models.difference([torch.tensor([torch.nan, 0.0]), torch.tensor([4.0])], expected) <= 1


# --- the page ---------------------------------------------------------------------------------------------------------


def _pages():
    spec = importlib.util.spec_from_file_location("make_run_pages", ROOT / "docs" / "make_run_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = _pages().PAGES["models"]
BEGIN, END = "<!-- models:begin -->", "<!-- models:end -->"


def test_the_page_shows_the_stored_runs():
    text = page.path.read_text()
    assert page.replace(text) == text, "run `python docs/make_run_pages.py`"


def test_a_run_becomes_a_section(monkeypatch, tmp_path):
    fake_times(monkeypatch, sdpa=[4.0], attnkern=[2.5], rest=[2.0])
    run(tmp_path / "whole-models-cpu-1-threads.jsonl", "--models", "bert", "--dtypes", "fp32")
    text = page.replace(f"# Title\n\n{BEGIN}\nan older table\n{END}\n", tmp_path)
    assert text.startswith(f"# Title\n\n{BEGIN}\n## ")
    assert text.endswith(f"|\n{END}\n")
    assert "an older table" not in text
    assert "2 rows against F.sdpa: 1.60x to 1.60x" in text
    assert text.count("| BERT-base | ") == 2
    rows, runs = record.read(tmp_path / "whole-models-cpu-1-threads.jsonl")
    assert [picture.kind for picture in plots.pictures(list(rows.values()))] == ["models"]
    assert runs[-1]["date"][:10] in text
