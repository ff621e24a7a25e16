"""The longer scripts of docs/examples run, with fewer steps, and what they print and draw is right."""

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

from attnkern import masks

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Runs a script of docs/examples that draws a picture; gives its variables and what it printed."""

    def run(name, *arguments):
        picture = tmp_path / "picture.png"
        monkeypatch.setattr(sys, "argv", [name, str(picture), *arguments])
        variables = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert picture.read_bytes().startswith(b"\x89PNG")
        return variables, capsys.readouterr().out

    plt.switch_backend("Agg")
    yield run
    plt.close("all")


@pytest.mark.slow
def test_packed_gpt(example):
    variables, printed = example("packed_gpt", "20")
    assert len(variables["losses"]) == 20
    assert variables["losses"][0] - variables["losses"][-1] > 0.5
    assert max(variables["differences"]) < 1e-5  # of losses near 3: packed and padded see the same
    assert min(map(len, variables["rates"].values())) == 5
    assert printed.count("tokens a second") == 2


@pytest.mark.slow
def test_shapes_vit(example):
    variables, printed = example("shapes_vit", "30")
    assert variables["losses"][0] - min(variables["losses"]) > 0.2
    weights = variables["weights"]
    torch.testing.assert_close(weights.sum(-1), torch.ones(500, 65))
    assert variables["maps"].shape == (500, 8, 8)
    assert "500 new images" in printed


@pytest.mark.slow
def test_long_stream(example):
    variables, printed = example("long_stream")
    assert variables["difference"] < 1e-5
    assert variables["most"] == 4 + 511 + 256
    assert f"at most {variables['most']} keys" in printed
    mask = masks.sliding_window(511, 0, 2048, sinks=4).to_dense()[0, 0]
    at = torch.arange(2048)
    seen = (at <= at[:, None]) & ((at > at[:, None] - 512) | (at < 4))
    assert torch.equal(mask, seen)


@pytest.mark.slow
def test_ring_attention(tmp_path):
    """Four processes: in a process of its own, that they may import the script."""
    picture = tmp_path / "picture.png"
    command = [sys.executable, EXAMPLES / "ring_attention.py", picture]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert float(first.rpartition(" ")[2]) < 1e-5
    assert rows[2] == "rank 2: causal of 2, all of 1, all of 0, nothing of 3"
    assert len(rows) == 4
    assert picture.exists()


@pytest.mark.slow
def test_heads(example):
    variables, printed = example("heads")
    model, probe = variables["model"], variables["probe"]
    q, k, _ = (x.double() for x in model.queries_keys_values(probe))
    hidden = torch.ones(32, 32, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    bits = -torch.xlogy(weights, weights).sum(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(variables["weights"].double(), weights.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(variables["entropy"].double(), bits.mean(0), rtol=1e-3, atol=1e-4)
    found = re.findall(r"position before (\S+), first position (\S+),", printed)
    assert max(float(before) for before, _ in found) > 0.5
    assert max(float(first) for _, first in found) > 0.5


def test_the_notebook_is_the_script():
    spec = importlib.util.spec_from_file_location("make_notebook", ROOT / "docs" / "make_notebook.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    made = json.loads((EXAMPLES / "heads.ipynb").read_text())
    wanted = maker.notebook(maker.SCRIPT.read_text(), lambda code: [])
    outputs = [cell.pop("outputs") for cell in made["cells"] if cell["cell_type"] == "code"]
    for cell in wanted["cells"]:
        cell.pop("outputs", None)
    assert made == wanted, "run `python docs/make_notebook.py`"
    assert [x["output_type"] for x in outputs[-1]] == ["display_data"]
