"""Models written against flash_attn's names run unchanged under install(), and equal F.sdpa; the docs' page runs."""

import copy
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from attnkern import flash_attn

PAGE = Path(__file__).parent.parent / "docs" / "coming_from_flash_attn.md"


@pytest.fixture
def installed():
    """attnkern's flash_attn under that name."""
    flash_attn.install()
    yield
    flash_attn.uninstall()
    assert "flash_attn" not in sys.modules


GPT = """
import torch
import torch.nn as nn
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x, cos, sin, cache, seqlen):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (8, 8)).split([4, 2, 2], 2)
        if cache is not None:
            out = flash_attn_with_kvcache(
                q, *cache, k, v, cos, sin, cache_seqlens=seqlen, causal=True, rotary_interleaved=False
            )
        else:
            q, k = (apply_rotary_emb(y, cos, sin) for y in (q, k))
            out = flash_attn_func(q, k, v, causal=True)
        return x + self.out(out.flatten(2))
"""

ENCODER = """
import torch.nn as nn
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, mask):
        tokens, indices, cu_seqlens, longest, _ = unpad_input(x, mask)
        qkv = self.qkv(self.norm(tokens)).unflatten(-1, (3, 4, 8))
        out = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, longest)
        return pad_input(tokens + self.out(out.flatten(1)), indices, *mask.shape)
"""


def layers_of(code):
    """Two layers of a model's own code, and two of the weights for F.sdpa."""
    names = {}
    exec(code, names)
    torch.manual_seed(0)
    model = torch.nn.ModuleList(names["Layer"]().double() for _ in range(2))
    return model, copy.deepcopy(model)


def by_sdpa(layer, x, heads_k, mask=None, tables=None):
    """What such a layer computes, by F.sdpa."""
    q, k, v = layer.qkv(layer.norm(x)).unflatten(-1, (-1, 8)).split([4, heads_k, heads_k], 2)
    if tables:
        cos, sin = (y.repeat(1, 2)[: x.shape[1], None] for y in tables)
        q, k = (y * cos + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin for y in (q, k))
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    mask = None if mask is None else mask[:, None, None]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=tables is not None, enable_gqa=True)
    return x + layer.out(out.transpose(1, 2).flatten(2))


def trained(model, forward, batches):
    """Losses of a few steps, and the last output."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for x in batches:
        out = forward(model, x)
        loss = out.sin().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_decoder_trains_and_decodes_as_by_sdpa(installed):
    ours, theirs = layers_of(GPT)
    x = torch.rand(12, 4, dtype=torch.float64)
    tables = x.cos(), x.sin()

    def forward(model, x):
        for layer in model:
            x = layer(x, *tables, None, 0)
        return x

    def want(model, x):
        for layer in model:
            x = by_sdpa(layer, x, 2, tables=tables)
        return x

    batches = torch.randn(1, 3, 12, 32, dtype=torch.float64).expand(4, -1, -1, -1)
    losses = trained(ours, forward, batches)
    torch.testing.assert_close(losses, trained(theirs, want, batches), rtol=1e-9, atol=1e-9)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        x, caches = batches[0], torch.zeros(2, 2, 3, 12, 2, 8, dtype=torch.float64)
        steps, seqlen = [], 0
        for n in (5, 1, 1, 1, 4):
            y = x[:, seqlen : seqlen + n]
            for layer, cache in zip(ours, caches, strict=True):
                y = layer(y, *tables, cache, torch.full((3,), seqlen, dtype=torch.int32) if n == 1 else seqlen)
            steps.append(y)
            seqlen += n
        torch.testing.assert_close(torch.cat(steps, 1), want(theirs, x), rtol=1e-7, atol=1e-7)


def test_an_encoder_trains_as_by_sdpa(installed):
    ours, theirs = layers_of(ENCODER)
    mask = torch.arange(9) < torch.tensor([9, 1, 4, 6])[:, None]

    def forward(model, x):
        for layer in model:
            x = layer(x, mask)
        return x

    def want(model, x):
        for layer in model:
            x = by_sdpa(layer, x, 4, mask) * mask[..., None]
        return x

    batches = torch.randn(4, 4, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(trained(ours, forward, batches), trained(theirs, want, batches), rtol=1e-9, atol=1e-9)


def test_install_gives_modules_under_their_names(installed):
    flash_attn.install()  # once is enough
    for name in ("", ".bert_padding", ".flash_attn_interface", ".layers.rotary"):
        module = importlib.import_module(f"flash_attn{name}")
        assert module is importlib.import_module(f"attnkern.flash_attn{name}")
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.ops"):
        importlib.import_module("flash_attn.ops")


def test_install_leaves_the_real_package(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("from . import layers\n")
    (tmp_path / "flash_attn" / "layers.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(ImportError, match=r"^attnkern: flash_attn is installed"):
            flash_attn.install()
        real = importlib.import_module("flash_attn")
        with pytest.raises(ImportError, match=r"^attnkern: flash_attn is installed"):
            flash_attn.install()
        flash_attn.install(replace=True)
        assert importlib.import_module("flash_attn") is flash_attn
        assert importlib.import_module("flash_attn.layers").__package__ == "attnkern.flash_attn.layers"
        flash_attn.uninstall()
        assert importlib.import_module("flash_attn") is real
        assert importlib.import_module("flash_attn.layers") is real.layers
        flash_attn.uninstall()
        assert importlib.import_module("flash_attn") is real
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
            del sys.modules[name]


def test_attnkern_does_not_import_it():
    package = Path(flash_attn.__file__).parent
    for file in package.parent.rglob("*.py"):
        if package not in file.parents:
            assert not re.search(r"^\s*(from|import) .*flash_attn", file.read_text(), re.MULTILINE), file


def test_the_page_runs():
    """Its blocks, one after the other, print what stands behind the lines."""
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names, printed = {"print": lambda *x: printed.append(" ".join(map(str, x)))}, []
    before, after, *others = blocks
    assert before.splitlines()[1:] == after.splitlines()[1:]  # another import is all
    try:
        flash_attn.install()
        outs = []
        for code in (before, after):
            torch.manual_seed(0)
            exec(code, names)
            outs.append(names["out"])
        assert torch.equal(*outs)
        for code in others:
            printed.clear()
            exec(code, names)
            assert printed == re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    finally:
        flash_attn.uninstall()


def test_the_page_names_every_argument():
    text = PAGE.read_text()
    for name in flash_attn.__all__:
        if name.startswith("flash"):
            assert f"`{name}`" in text
            for argument in inspect.signature(getattr(flash_attn, name)).parameters:
                assert f"`{argument}`" in text, argument
