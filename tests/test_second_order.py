"""Tangents and second derivatives of every feature, held to the rule; their memory's shape is in test_memory.py."""

import math

import pytest
import torch

from attnkern import rng, second_order, testing, tiles

contract = pytest.mark.contract
NAMES = ("query", "key", "value", "attn_mask")


def check(target, inputs, keep=None, **options):
    """jvp and double backward of out and lse along tangents of all inputs, by either way to get there."""
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
            testing.assert_within_rule(got, w.exact, w.baseline, gradient=True, unit=w.unit, name=name, recipe=recipe)


CASES = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal bottom right": ({}, {"is_causal": True, "alignment": "bottom_right"}),
    "more queries than keys": ({"seqlen_q": 53, "seqlen_k": 9}, {"is_causal": True, "alignment": "bottom_right"}),
    "window": ({}, {"window": (3, 2)}),
    "window beyond the keys": ({"seqlen_q": 53, "seqlen_k": 9}, {"window": (2, 1)}),
    "bias": ({"mask": ("float", "BHLS")}, {}),
    "bias with holes, one row": ({"mask": ("holes", "1H1S")}, {}),
    "bias, one column": ({"mask": ("float", "B1L1")}, {"is_causal": True}),
    "bias, one number": ({"mask": ("float", "11")}, {}),
    "bool mask": ({"mask": ("bool", "BHLS")}, {}),
    "gqa": ({"heads": 4, "heads_k": 2}, {"enable_gqa": True}),
    "other value heads": ({"heads": 4, "heads_k": 2, "heads_v": 1}, {"enable_gqa": True, "is_causal": True}),
    "one key head": ({"heads": 4, "heads_k": 1, "heads_v": 4}, {"enable_gqa": True}),
    "value size": ({"head_dim_v": 2}, {}),
    "softcap": ({"mask": ("holes", "1HLS")}, {"softcap": 1.5}),
    "negative scale": ({}, {"scale": -0.8, "is_causal": True}),
    "strided": ({"layout": ("blhd", "e_major", "stepped")}, {}),
    "one query": ({"seqlen_q": 1}, {}),
    "no keys": ({"seqlen_k": 0}, {}),
    "no queries": ({"seqlen_q": 0}, {}),
    "no batch": ({"batch": 0}, {}),
}
SIZES = {"batch": 2, "heads": 2, "seqlen_q": 9, "seqlen_k": 53, "head_dim": 8}


@contract(49, 50)
@pytest.mark.parametrize("name", CASES)
def test_second_order(target, name, dtype):
    sizes, options = CASES[name]
    check(target, target.inputs(**SIZES | sizes, dtype=dtype), **options)


@contract(49, 50)
@pytest.mark.parametrize("name", ["plain", "other value heads", "softcap"])
def test_dropout_is_replayed(target, name, dtype):
    sizes, options = CASES[name]
    inputs = target.inputs(**SIZES | sizes, dtype=dtype)
    torch.manual_seed(3)
    seed = rng.draw_seed(torch.device(target.device))
    keep = testing.philox_keep(seed, *inputs.query.shape[:3], inputs.key.shape[2], 0.4, device=target.device)
    check(target, inputs, keep=keep, dropout_p=0.4, **options)


@contract(49, 50)
@pytest.mark.parametrize("scores", [2**6, 2**9, 2**12, 2**14], ids=["rows", "a head", "heads", "batches"])
@pytest.mark.parametrize("name", ["causal", "window", "softcap", "bias, one column", "other value heads"])
def test_tiles_of_any_size_add_up(target, name, scores, monkeypatch):
    """A tile of a few rows, of a head, of several, and of several batch elements; with dropout."""
    monkeypatch.setitem(tiles.TILE, target.device, scores)
    monkeypatch.setattr(second_order, "_FEWEST_ROWS", 4)
    sizes, options = CASES[name]
    inputs = target.inputs(**SIZES | sizes | {"batch": 5, "seqlen_q": 13, "seqlen_k": 33}, dtype=torch.float64)
    torch.manual_seed(3)
    seed = rng.draw_seed(torch.device(target.device))
    keep = testing.philox_keep(seed, *inputs.query.shape[:3], inputs.key.shape[2], 0.2, device=target.device)
    check(target, inputs, keep=keep, dropout_p=0.2, **options)
