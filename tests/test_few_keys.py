"""At most eight keys: packed sequences of some tokens and a cache's first tokens, which the CPU runs by a kernel of its
own for up to 16 queries."""

import functools
import random
from itertools import product

import pytest
import torch

import attnkern
from attnkern import testing
from excluding import problem
from matrix import FLOATS
from sequences import one_by_one, packed

SIZES = [(1, 1), (3, 5), (16, 16), (24, 40), (64, 64), (100, 33), (128, 128), (257, 130)]
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, last level": {"is_causal": True, "alignment": "bottom_right"},
    "window": {"window": (2, 1), "alignment": "bottom_right"},
    "own": {"window": (0, 0)},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.7, "is_causal": True},
    "no scale": {"scale": 0.0},
    "sinks": {"sinks": "BH", "is_causal": True},
    "dropout": {"dropout_p": 0.4},
    "causal with dropout and sinks": {"dropout_p": 0.3, "is_causal": True, "sinks": "H"},
}


DRAW = random.Random(0)
CASES = [
    (*lengths, DRAW.choice(SIZES), DRAW.choice([(1, 1), (4, 2), (6, 1)]), DRAW.choice(list(OPTIONS)), dtype)
    for lengths in product([1, 2, 3, 4, 5, 8, 9, 16, 17], [1, 2, 3, 5, 7, 8, 9])
    for dtype in DRAW.sample(FLOATS, 2)
]


@pytest.mark.parametrize(("queries", "keys", "sizes", "heads", "kind", "dtype"), CASES, ids=str)
def test_output_lse_and_gradients(target, queries, keys, sizes, heads, kind, dtype):
    inputs, options = problem(target, OPTIONS[kind], (queries, keys), sizes, (2, *heads), dtype)
    check = target.check_dropout if "dropout_p" in options else target.check
    check(inputs, **options)


MASKS = ["bool B11S", "bool BHLS", "bool 1H1S", "float BHLS", "float LS", "holes B1LS", "holes B11S", "relative"]
MASKED = [
    (queries, keys, DRAW.choice(SIZES), DRAW.choice([(1, 1), (4, 2)]), DRAW.choice(["full", "causal", "sinks"]), mask)
    for mask in MASKS
    for queries, keys in DRAW.sample(list(product([1, 2, 4, 7, 8, 10, 13, 16], [1, 2, 3, 4, 7, 8])), 6)
]


@pytest.mark.parametrize("poison", [None, torch.nan, torch.inf])
@pytest.mark.parametrize(("queries", "keys", "sizes", "heads", "kind", "mask"), MASKED, ids=str)
def test_masks(target, queries, keys, sizes, heads, kind, mask, dtype, poison):
    inputs, options = problem(target, OPTIONS[kind], (queries, keys), sizes, (2, *heads), dtype, mask)
    target.check(inputs if poison is None else inputs.with_poison(poison), **options)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "blhd"])
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 6])
def test_heads_together_have_the_bits_of_each(queries, layout, dtype, threads):
    """Of seven heads in lanes of one vector, one has a key that its bias excludes, and each a sink of its own."""
    torch.set_num_threads(threads)
    inputs = testing.make_inputs(2, 7, queries, 6, 24, dtype=dtype, layout=layout)
    q, k, v = (x.detach() for x in inputs.tensors.values())
    bias = torch.randn(1, 7, queries, 6).to(dtype)
    bias[:, 4, :, 2] = -torch.inf
    v[:, 4, 2] = torch.nan
    sinks = torch.randn(7, dtype=torch.promote_types(dtype, torch.float32))

    def attend(heads):
        of_heads = [x[:, heads] for x in (q, k, v, bias)]
        return attnkern.attention(*of_heads, sinks=sinks[heads], return_lse=True, backend="cpu")

    together = attend(slice(7))
    assert not together[0].isnan().any()
    for h in range(7):
        for got, want in zip(together, attend(slice(h, h + 1)), strict=True):
            assert torch.equal(got[:, h : h + 1], want)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_strides(target, layout, dtype):
    target.check(target.inputs(2, 3, 5, 6, 24, dtype=dtype, layout=layout), is_causal=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_meets_its_own_keys_alone(bad, dtype):
    q, k, v = (x.detach() for x in testing.make_inputs(2, 2, 6, 8, 24, dtype=dtype).tensors.values())
    want, want_lse = attnkern.attention(q, k, v, is_causal=True, return_lse=True, backend="cpu")
    k[:, :, 4:] = v[:, :, 4:] = bad
    out, lse = attnkern.attention(q, k, v, is_causal=True, return_lse=True, backend="cpu")
    assert torch.equal(out[:, :, :4], want[:, :, :4])
    assert torch.equal(lse[:, :, :4], want_lse[:, :, :4])
    assert out[:, :, 4:].isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_gradient_of_a_query_meets_its_own_keys_alone(bad, dtype):
    q, *keys_and_values = (x.detach() for x in testing.make_inputs(2, 2, 2, 6, 24, dtype=dtype).tensors.values())
    q.requires_grad_()
    grad = torch.randn(2, 2, 2, 24, dtype=dtype)

    def grad_of_query():
        return torch.autograd.grad(attnkern.attention(q, *keys_and_values, is_causal=True, backend="cpu"), q, grad)[0]

    want = grad_of_query()
    for x in keys_and_values:
        x[:, :, 1:] = bad
    found = grad_of_query()
    assert torch.equal(found[:, :, 0], want[:, :, 0])
    assert found[:, :, 1].isnan().all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["full", "causal", "window", "sinks", "softcap"])
def test_packed_sequences(target, kind, threads, dtype):
    """In one buffer with others of a tile and more, against a call for each."""
    torch.set_num_threads(threads)
    lengths = [3, 1, 8, 0, 2, 9, 5, 40, 4, 4, 1, 17, 6, 7]
    tensors = packed(target, lengths, lengths, dtype, size=24, size_v=16)
    options = {"alignment": "bottom_right", **OPTIONS[kind], "enable_gqa": True}
    if "sinks" in options:
        options["sinks"] = target.randn(tensors[0].shape[-2]).to(torch.promote_types(dtype, torch.float32))
    ends = target.ends(lengths)
    found = target.varlen_attention(*tensors, ends, ends, return_lse=True, **options)
    del options["enable_gqa"]
    reference = functools.partial(attnkern.attention, backend="reference")
    want = one_by_one(reference, *tensors, lengths, lengths, **options)
    grads = [target.randn(*x.shape).to(x.dtype) for x in found]
    allowed = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected, atol=allowed, rtol=allowed)
    for got, expected in zip(*(torch.autograd.grad(x, tensors, grads) for x in (found, want)), strict=True):
        # Sums of terms of either sign: their rounding is that of the largest.
        scale = max(1, float(expected.abs().max()))
        torch.testing.assert_close(got, expected, atol=allowed * scale, rtol=allowed)
