"""Tangents and second derivatives of every feature, held to the rule; their memory's shape is in test_memory.py."""

import dataclasses
import math

import pytest
import torch

from attnkern import rng, second_order, testing, tiles
from matrix import tagged

contract = pytest.mark.contract
NAMES = ("query", "key", "value", "attn_mask")


def check(target, inputs, **options):
    """jvp and double backward of out and lse along tangents of all inputs, by either way to get there."""
    keep = None
    if "dropout_p" in options:
        torch.manual_seed(3)  # as in `call`
        seed, sizes = rng.draw_seed(torch.device(target.device)), (*inputs.query.shape[:3], inputs.key.shape[2])
        keep = testing.philox_keep(seed, *sizes, options["dropout_p"], device=target.device)
    leaves = {n: x.detach() for n, x in inputs.tensors.items()}
    differentiable = {n: x for n, x in leaves.items() if x.is_floating_point()}
    tangents = {n: torch.randn_like(x, memory_format=torch.contiguous_format) for n, x in differentiable.items()}

    def call(*values):
        torch.manual_seed(3)
        return target.attention(**leaves | dict(zip(differentiable, values, strict=True)), **options, return_lse=True)

    (out, lse), results_tangents = torch.func.jvp(call, tuple(differentiable.values()), tuple(tangents.values()))
    grad_out = (0.25 * torch.randn(out.shape, dtype=torch.float64)).to(out)
    grad_lse = torch.where(lse == -math.inf, 0.0, torch.randn_like(lse))
    want = testing.expected_second_order(
        **leaves, tangents=tangents, grad_out=grad_out, grad_lse=grad_lse, keep=keep, **options
    )

    differentiated = [x.detach().requires_grad_() for x in (*differentiable.values(), grad_out, grad_lse)]
    *values, g_out, g_lse = differentiated
    first = torch.autograd.grad(call(*values), values, (g_out, g_lse), create_graph=True)
    second = torch.autograd.grad(first, differentiated, list(tangents.values()))

    def gradients(*values):  # of out and lse with constant weights: its tangent is the same second derivative
        return torch.func.vjp(call, *values)[1]((grad_out, grad_lse))

    _, along = torch.func.jvp(gradients, tuple(differentiable.values()), tuple(tangents.values()))
    results = {
        "jvp": dict(zip(("tout", "tlse"), results_tangents, strict=True)),
        "double backward": dict(zip((*differentiable, "tout", "tlse"), second, strict=True)),
        "forward over reverse": dict(zip(differentiable, along, strict=True)),
    }
    for way, found in results.items():
        for name, got in found.items():
            w = want[name]
            assert got.dtype == w.baseline.dtype
            name = f"{way}: {name}"
            recipe = f"{inputs.recipe}  {options}  backend={target.backend!r}"
            w.check(got, gradient=True, name=name, recipe=recipe)


CALLS = tagged("second-order")


@contract(49, 50)
@pytest.mark.parametrize("name", CALLS)
def test_second_order(target, name, dtype):
    check(target, CALLS[name].inputs(target.device, dtype=dtype), **CALLS[name].options)


@contract(49, 50)
@pytest.mark.parametrize("name", ["plain", "other value heads", "softcap"])
def test_dropout_is_replayed(target, name, dtype):
    inputs = CALLS[name].inputs(target.device, dtype=dtype)
    check(target, inputs, dropout_p=0.4, **CALLS[name].options)


@contract(49, 50)
@pytest.mark.parametrize("scores", [2**6, 2**9, 2**12, 2**14], ids=["rows", "a head", "heads", "batches"])
@pytest.mark.parametrize("name", ["causal", "window", "softcap", "bias, one column", "other value heads"])
def test_tiles_of_any_size_add_up(target, name, scores, monkeypatch):
    """A tile of a few rows, of a head, of several, and of several batch elements; with dropout."""
    monkeypatch.setitem(tiles.TILE, target.device, scores)
    monkeypatch.setattr(second_order, "_FEWEST_ROWS", 4)
    this = dataclasses.replace(CALLS[name], batch=5, seqlen_q=13, seqlen_k=33)
    inputs = this.inputs(target.device, dtype=torch.float64)
    check(target, inputs, dropout_p=0.2, **this.options)
