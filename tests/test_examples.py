"""The scripts of docs/examples run, the longer ones with fewer steps, and what they print and draw is right."""

import copy
import importlib.util
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

from attnkern import masks, testing

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Runs a script of docs/examples that draws a picture; gives its variables and what it printed."""

    def run(name, *arguments):
        picture = tmp_path / "picture.png"
        monkeypatch.setattr(sys, "argv", [name, str(picture), *arguments])
        options = copy.copy(torch._tensor_str.PRINT_OPTS)
        try:
            variables = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            torch.set_printoptions(options.precision, options.threshold, options.edgeitems, options.linewidth)
        drawn = picture.read_bytes()
        assert drawn.startswith(b"\x89PNG")
        assert len(drawn) > 5000
        return variables, capsys.readouterr().out

    plt.switch_backend("Agg")
    yield run
    plt.close("all")


def numbers(printed, label):
    """Those on the label's line and on the indented lines below it."""
    block = re.match(r"[^\n]*(?:\n [^\n]*)*", printed[printed.index(label) + len(label) :])[0]
    return torch.tensor([float(x) for x in re.findall(r"-?\d+(?:\.\d*)?", block)], dtype=torch.float64)


def close(shown, exact, decimals):
    assert shown.numel() == exact.numel()
    assert (shown - exact.flatten()).abs().max() <= 0.5 * 10.0**-decimals + 1e-5


def weights_of(module, x, context, allowed):
    """Those of a CrossAttention, per head, in float64; of what sees nothing they are 0."""
    module = copy.deepcopy(module).double()
    projected = module.q_proj(x), module.k_proj(context)
    q, k = (y.unflatten(-1, (module.num_heads, -1)).transpose(-2, -3) for y in projected)
    return (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num(0.0).detach()


def test_three_tokens(example):
    variables, printed = example("three_tokens")
    x, w_q, w_k, w_v = (variables[n].double() for n in ("x", "w_q", "w_k", "w_v"))
    assert x.shape == (3, 4)
    scores = (x @ w_q) @ (x @ w_k).T / math.sqrt(3)
    weights = scores.exp() / scores.exp().sum(1, keepdim=True)
    close(numbers(printed, "queries, x W_q"), x @ w_q, 4)
    close(numbers(printed, "keys, x W_k"), x @ w_k, 4)
    close(numbers(printed, "values, x W_v"), x @ w_v, 4)
    close(numbers(printed, "scores, q k^T / sqrt(3)"), scores, 4)
    close(numbers(printed, "log-sum-exp of each row of scores"), scores.exp().sum(1).log(), 4)
    close(numbers(printed, "every row sums to 1"), weights, 4)
    close(numbers(printed, "output, weights v"), weights @ (x @ w_v), 4)
    close(numbers(printed, "output of the module"), weights @ (x @ w_v), 4)


def test_masks(example):
    variables, printed = example("masks")
    head = variables["x"].double()[..., :4]
    scores = head @ head.mT / 2
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()[:, None]
    causal = torch.ones(5, 5, dtype=torch.bool).tril()

    def weights(allowed):
        return scores.masked_fill(~allowed, -math.inf).softmax(-1)

    close(numbers(printed, "second sentence, padding masked"), weights(real.expand(2, 5, 5))[1], 3)
    close(numbers(printed, "token i sees tokens 0..i"), weights(causal)[0], 3)
    close(numbers(printed, "second sentence, both"), weights(real & causal)[1], 3)
    assert numbers(printed, "a module's weights on padding:") == numbers(printed, "and on later tokens:") == 0


def test_cross_attention(example):
    variables, printed = example("cross_attention")
    x, noisy = variables["x"].double(), variables["noisy"].double()
    weights = weights_of(variables["module"], x, noisy, variables["real"].bool())[0]
    found = re.findall(r"(\w+) -> (\w+) ", printed)
    assert found == [("gestern", "yesterday"), ("sah", "saw"), ("ich", "I"), ("den", "the"), ("Hund", "dog")]
    largest = torch.stack([weights.amax(-1), weights[:, 5]], -1).detach()
    close(numbers(printed, "gestern -> "), largest, 3)
    assert (weights[:, 5] == 0).all()


def test_speech_frames(example):
    variables, printed = example("speech_frames")
    noisy, clean = variables["noisy"].double(), variables["clean"].double()
    band = testing.band_mask(2000, 2000, window=(6, 6))
    weights = (noisy @ noisy.T * 0.25).masked_fill(~band, -math.inf).softmax(-1)
    assert numbers(printed, "pairs of frames:")[0] == band.sum()
    close(numbers(printed, "error of the noisy frames:"), (noisy - clean).square().mean().sqrt(), 4)
    close(numbers(printed, "neighbours:"), (weights @ noisy - clean).square().mean().sqrt(), 4)
    assert numbers(printed, "neighbours:") < numbers(printed, "error of the noisy frames:") / 2
    assert numbers(printed, "frame 1000 sees frames").tolist() == [994, 1006]
    close(numbers(printed, "their weights:"), weights[1000, 994:1007], 3)


def test_image_patches(example):
    variables, printed = example("image_patches")
    x = variables["x"].double()
    patches = variables["image"].reshape(3, 8, 4, 8, 4).permute(1, 3, 0, 2, 4).reshape(64, 48)
    torch.testing.assert_close(variables["patches"], patches)
    weights = (x[[18, 52, 0]] @ x.T * 0.25).softmax(-1)
    for name, row in zip(["disc", "bar", "ground"], weights, strict=True):
        shares = variables["parts"].double() @ row
        close(numbers(printed, f"a patch of the {name} attends to:"), shares, 3)
        assert shares[["disc", "bar", "ground"].index(name)] > 0.9


def test_graph_edges(example):
    variables, printed = example("graph_edges")
    x, adjacency = variables["x"].double(), variables["adjacency"].bool()
    weights = weights_of(variables["module"], x, x, adjacency).mean(0)
    assert torch.equal(weights > 0, adjacency)
    close(numbers(printed, "weights, the mean of two heads"), weights, 3)
    close(numbers(printed, "sums of the rows"), weights.sum(-1), 3)
    assert numbers(printed, "F has no neighbour and gathers") == 0
    assert printed.endswith("a change of E has reached C D E\n")


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


def test_examples_are_all_tested():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert path.stem in tests, f"no test runs {path.name}"


def test_an_example_runs_as_the_docs_say():
    command = [sys.executable, "docs/examples/three_tokens.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("tensor(") == 8
