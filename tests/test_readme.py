"""The tables of support are the generated ones, and true; README's figures and pictures are those of the results."""

import csv
import hashlib
import importlib.util
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = ["README.md", "docs/support.md"]
MAKE_TABLE = "docs/make_support_table.py"


def _support():
    spec = importlib.util.spec_from_file_location("make_support_table", ROOT / MAKE_TABLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


support = _support()


@pytest.mark.parametrize("page", PAGES)
def test_the_support_table_is_the_generated_one(page):
    text = (ROOT / page).read_text()
    assert support.replace(text) == text, f"run `python docs/make_support_table.py {' '.join(PAGES)}`"


def test_the_readme_is_one_to_read():
    assert len(README.splitlines()) <= 150


MACHINES = re.findall(r"^\| AMD EPYC, (Zen \d), .*?results/(\S+)\.csv\)\) \| (.*) \|$", README, re.MULTILINE)


def test_the_readme_names_every_machine_of_the_sweep():
    assert {name for _, name, _ in MACHINES} == {x.stem for x in (ROOT / "bench" / "results").glob("quick-sweep-*.csv")}


@pytest.mark.parametrize(("name", "cells"), [x[1:] for x in MACHINES], ids=[name for _, name, _ in MACHINES])
def test_the_speed_is_that_of_the_results(name, cells):
    """F.sdpa's time over ours: the least, the geometric mean, the most."""
    with (ROOT / "bench" / "results" / f"{name}.csv").open() as file:
        ratios = [float(row["ratio"]) for row in csv.DictReader(file) if row["provider"] == "cpu"]
    assert f"{len(ratios)} calls" in README
    assert cells.split(" | ") == [f"{x:.1f}" for x in (min(ratios), statistics.geometric_mean(ratios), max(ratios))]


@pytest.mark.parametrize("shade", ["light", "dark"])
def test_the_pictures_show_the_results(shade):
    """The checksum that docs/make_pictures.py writes into them."""
    found = re.findall(r'(?:srcset|src)="([^"]*)"', README)
    [name] = [x for x in found if x.endswith(f"-{shade}.png")]
    names = ["quick-sweep-cpu-2-threads", "quick-sweep-cpu-2-threads-zen4", "models-masks-decode-cpu-2-threads"]
    data = b"".join((ROOT / "bench" / "results" / f"{x}.csv").read_bytes() for x in names)
    assert hashlib.sha256(data).hexdigest().encode() in (ROOT / name).read_bytes(), "run `python docs/make_pictures.py`"


@pytest.mark.parametrize(
    "feature",
    [*support.features(), *support.features_in_pages()],
    ids=lambda f: f"{f.name}, in pages" if f.in_pages else f.name,
)
def test_the_support_table_holds(target, feature):
    """What the tables say of a backend that can run here, by running it."""
    cell = support.cell(feature, target.device, target.backend)
    leaves = {name: x.detach().to(target.device) for name, x in feature.inputs.tensors.items()}
    if cell.startswith("no: "):
        with pytest.raises(RuntimeError, match=re.escape(cell.removeprefix("no: "))):
            target.attention(**leaves, **feature.options)
        return
    differentiable = cell == "yes" and not feature.in_pages
    if differentiable:
        leaves = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in leaves.items()}
    results = target.attention(**leaves, **feature.options)
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == 1 + feature.options.get("return_lse", False)
    assert all(x.isfinite().all() for x in results)
    if differentiable:
        wanted = [x for x in leaves.values() if x.requires_grad]
        for x, grad in zip(wanted, torch.autograd.grad([x.sum() for x in results], wanted), strict=True):
            assert grad.shape == x.shape
            assert grad.isfinite().all()


def test_the_command_writes_the_tables(tmp_path):
    pages = [tmp_path / f"{name}.md" for name in support.MARKERS]
    for page, (begin, end) in zip(pages, support.MARKERS.values(), strict=True):
        page.write_text(f"above\n{begin}\nstale\n{end}\nbelow\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, MAKE_TABLE, *pages], check=True, cwd=ROOT, env=env)
    for page, (begin, end) in zip(pages, support.MARKERS.values(), strict=True):
        of = support.features_in_pages() if page.stem == "pages" else support.features()
        table = support.table(of, exceptions=page.stem == "exceptions")
        assert page.read_text() == f"above\n{begin}\n{table}\n{end}\nbelow\n"
    whole, _, exceptions = (page.read_text().splitlines() for page in pages)
    features = [line for line in whole if line.endswith("| yes |") and "no: " not in line]
    assert [line for line in whole[2:-2] if line not in features] == exceptions[2:-2]
    with pytest.raises(ValueError, match="support:begin"):
        support.replace("a page without markers")


def test_a_refusal_shows_in_the_table(monkeypatch):
    """Only reasons against the problem: a missing library is the machine's matter."""
    cpu = support.TABLE["cpu"][0]
    monkeypatch.setattr(cpu, "unavailable", lambda: "nothing is compiled")

    def refusals(problem):
        reasons = ["no dropout"] if problem.params.dropout_p else []
        reasons += ["no gradient"] if problem.params.softcap and problem.q.requires_grad else []
        return [cpu.unavailable(), *reasons]

    monkeypatch.setattr(cpu, "refusals", refusals)
    cells = {f.name: support.cell(f, "cpu", "cpu") for f in support.features()}
    assert cells.pop("`dropout_p`") == "no: no dropout"
    assert cells.pop("`softcap`") == "forward only: no gradient"
    assert set(cells.values()) == {"yes"}
