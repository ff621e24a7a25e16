"""README's table of what each backend supports is the generated one, and true (test_docs.py has the rest)."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKE_TABLE = "docs/make_support_table.py"


def _support():
    spec = importlib.util.spec_from_file_location("make_support_table", ROOT / MAKE_TABLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


support = _support()


def test_the_support_table_is_the_generated_one():
    assert support.replace(README) == README, "README.md: run `python docs/make_support_table.py README.md`"


@pytest.mark.parametrize("feature", support.features(), ids=lambda f: f.name)
def test_the_support_table_holds(target, feature):
    """What the table says of a backend that can run here, by running it."""
    cell = support.cell(feature, target.device, target.backend)
    leaves = {name: x.detach().to(target.device) for name, x in feature.inputs.tensors.items()}
    if cell.startswith("no: "):
        with pytest.raises(RuntimeError, match=re.escape(cell.removeprefix("no: "))):
            target.attention(**leaves, **feature.options)
        return
    if cell == "yes":
        leaves = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in leaves.items()}
    results = target.attention(**leaves, **feature.options)
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == 1 + feature.options.get("return_lse", False)
    assert all(x.isfinite().all() for x in results)
    if cell == "yes":
        wanted = [x for x in leaves.values() if x.requires_grad]
        for x, grad in zip(wanted, torch.autograd.grad([x.sum() for x in results], wanted), strict=True):
            assert grad.shape == x.shape
            assert grad.isfinite().all()


def test_the_command_writes_the_table(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"above\n{support.BEGIN}\nstale\n{support.END}\nbelow\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, MAKE_TABLE, page], check=True, cwd=ROOT, env=env)
    assert page.read_text() == f"above\n{support.BEGIN}\n{support.table()}\n{support.END}\nbelow\n"
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
