"""The backward pass of up to 16 rows of a key head, which the CPU runs by the products of decoding."""

import math
import random
from itertools import product

import pytest
import torch

import attnkern
from attnkern import testing
from excluding import problem
from matrix import FLOATS

OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, last level": {"is_causal": True, "alignment": "bottom_right"},
    "window": {"window": (40, 3), "alignment": "bottom_right"},
    "window of one": {"window": (0, 0), "alignment": "bottom_right"},
    "negative scale": {"scale": -0.7, "is_causal": True, "alignment": "bottom_right"},
    "no scale": {"scale": 0.0},
    "sinks": {"sinks": "BH"},
}
DRAW = random.Random(0)
SIZES = [(1, 1), (3, 5), (16, 16), (24, 40), (64, 64), (80, 80), (100, 33), (128, 128), (257, 130)]
# Of one head, so that the threads share its keys; and of several.
HEADS = [(1, 1, 1), (2, 3, 3), (2, 4, 2), (1, 8, 2), (1, 6, 1), (1, 16, 1)]
CASES = [
    (queries, keys, DRAW.choice(SIZES), DRAW.choice(HEADS), DRAW.choice(list(OPTIONS)), DRAW.choice([1, 3]), dtype)
    for queries, keys in product([1, 2, 3, 4, 5, 7, 8, 12, 16], [7, 9, 64, 255, 257, 700])
    for dtype in DRAW.sample(FLOATS, 2)
]


@pytest.mark.parametrize(("queries", "keys", "sizes", "heads", "kind", "threads", "dtype"), CASES, ids=str)
def test_output_lse_and_gradients(target, queries, keys, sizes, heads, kind, threads, dtype):
    torch.set_num_threads(threads)
    inputs, options = problem(target, OPTIONS[kind], (queries, keys), sizes, heads, dtype)
    target.check(inputs, **options)


# Keys, sizes and heads as above; a mask as of make_mask, or ranges as of with_ranges.
EXCLUDING = ["bool B11S", "bool BHLS", "bool 1H1S", "anything B11 1", "few BHL 1", "near 11L 1", "anything B1L 2"]
MASKED = [
    (queries, keys, DRAW.choice(SIZES[:6]), DRAW.choice(HEADS), kind, DRAW.choice(["full", "causal", "sinks"]), dtype)
    for kind in EXCLUDING
    for queries, keys in DRAW.sample(list(product([1, 2, 3, 5, 8, 14], [20, 64, 257, 700])), 4)
    for dtype in DRAW.sample(FLOATS, 2)
]


@pytest.mark.parametrize("poison", [None, math.nan])
@pytest.mark.parametrize(("queries", "keys", "sizes", "heads", "excluding", "kind", "dtype"), MASKED, ids=str)
def test_masks(target, queries, keys, sizes, heads, excluding, kind, dtype, poison):
    """What a mask or ranges exclude from all queries has gradients of 0, whatever it holds."""
    inputs, options = problem(target, OPTIONS[kind], (queries, keys), sizes, heads, dtype, excluding)
    target.check(inputs if poison is None else inputs.with_poison(poison), **options)


@pytest.mark.parametrize("mask", ["float BHLS", "holes B1LS", "float LS", "holes 1H1S fp32", "float B11S", "relative"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 300), (3, 64), (8, 520), (16, 300)])
def test_a_bias_without_gradient(kernel_target, mask, queries, keys, dtype):
    """It gives the gradients that tiles give where the bias has one, too.

    In 1,800 problems of each dtype the two were at most a fifth of the tolerance apart: one rounding of 16 bits;
    in float32 0.09 of it, 60 standard deviations from 1. A right kernel fails with a chance far below 1e-9.
    """
    given = {}
    if mask != "relative":
        kind, shape, *wide = mask.split()
        given = {"mask": (kind, shape), "mask_dtype": torch.promote_types(dtype, torch.float32) if wide else dtype}
    inputs = kernel_target.inputs(2, 4, queries, keys, 48, heads_k=2, dtype=dtype, **given)
    if mask == "relative":
        inputs = inputs.with_relative_bias(4, queries + keys - 1, dtype, 0)
    found = []
    for with_gradient in (False, True):
        tensors = {
            n: x.detach().requires_grad_(with_gradient or n in ("query", "key", "value"))
            for n, x in inputs.tensors.items()
        }
        out = kernel_target.attention(**tensors, enable_gqa=True)
        leaves = [tensors[n] for n in ("query", "key", "value")] + [x for x in tensors.values() if with_gradient][3:]
        found.append(torch.autograd.grad(out, leaves, torch.ones_like(out))[:3])
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12 if dtype == torch.float64 else 2e-2
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=tolerance * want.abs().max().item(), rtol=0)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_strides(target, layout, dtype):
    target.check(target.inputs(2, 3, 2, 300, 24, dtype=dtype, layout=layout))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (30, 0), "alignment": "bottom_right"}], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(3, 300), (8, 5), (15, 80)])
def test_what_no_query_attends_to_and_rows_without_keys(target, queries, keys, options, poison, dtype):
    options = options | {"alignment": "bottom_right" if queries > keys else options.get("alignment", "top_left")}
    target.check(target.inputs(1, 2, queries, keys, 16, dtype=dtype).with_poison(poison), **options)


@pytest.mark.parametrize("length", [20.0, 90.0])
def test_large_scores(target, length, dtype):
    """The log-sum-exp of some has no digits left for P."""
    inputs = target.inputs(1, 2, 4, 300, 16, dtype=dtype)
    with torch.no_grad():
        inputs.query.mul_(length / 4)
        inputs.key.mul_(length / 20)
    target.check(inputs)


@pytest.mark.parametrize("wanted", ["query", "key", "value", "key and value"])
def test_some_gradients(wanted):
    tensors = testing.make_inputs(1, 4, 2, 600, 32, heads_k=2).tensors
    found = []
    for backend in ("cpu", "reference"):
        inputs = [x.detach().requires_grad_(name in wanted) for name, x in tensors.items()]
        out = attnkern.attention(*inputs, enable_gqa=True, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), [x for x in inputs if x.requires_grad]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [(1, 1), (2, 6)])
def test_bits_are_those_of_any_threads_and_of_heads_alone(heads, dtype):
    batch, count = heads
    q, k, v = (x.detach() for x in testing.make_inputs(batch, count, 4, 1100, 48, dtype=dtype).tensors.values())

    def gradients(threads, *inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        torch.set_num_threads(1)  # a forward pass of few queries is cut for its threads
        out = attnkern.attention(*leaves, backend="cpu")
        torch.set_num_threads(threads)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    whole = gradients(1, q, k, v)
    for threads in (1, 2, 3):
        for got, want in zip(gradients(threads, q, k, v), whole, strict=True):
            torch.testing.assert_close(got, want, atol=0, rtol=0)
    alone = gradients(3, q[-1:, -1:], k[-1:, -1:], v[-1:, -1:])
    for got, want in zip(alone, whole, strict=True):
        torch.testing.assert_close(got, want[-1:, -1:], atol=0, rtol=0)
