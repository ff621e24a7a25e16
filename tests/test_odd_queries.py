"""A few queries beyond whole vectors of them, which the CPU decodes after the tiles of their head."""

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
    "window": {"window": (9, 4), "alignment": "bottom_right"},
    "own": {"window": (0, 0)},
    "softcap": {"softcap": 1.5, "is_causal": True},
    "negative scale": {"scale": -0.7, "is_causal": True},
    "no scale": {"scale": 0.0},
    "sinks": {"sinks": "BH", "is_causal": True},
}
EXCLUDING = ["bool B11S", "bool BHLS", "float BHLS", "holes 1H1S", "relative"]
EXCLUDING += ["anything B11 1", "near 11L 1", "few BHL 1"]

DRAW = random.Random(0)
# One to eight beyond vectors of 4, 8 or 16, after one vector or tiles; 1025 keys are too many for this way.
QUERIES = [5, 9, 10, 17, 18, 20, 33, 36, 39, 40, 49, 50, 65, 67, 71, 130, 257]
SIZES = [(1, 1), (3, 5), (16, 16), (24, 40), (32, 32), (64, 64), (80, 72), (130, 128)]
HEADS = [(1, 1, 1), (2, 3, 3), (2, 4, 2), (1, 6, 1)]
CASES = [
    (queries, keys or queries, DRAW.choice(SIZES), DRAW.choice(HEADS), DRAW.choice(list(OPTIONS)), excluding, dtype)
    for queries, keys in [*product(QUERIES, [0, 30, 100]), (33, 1024), (49, 1025)]
    for excluding in ["", DRAW.choice(EXCLUDING)]
    for dtype in DRAW.sample(FLOATS, 2)
]


@pytest.mark.parametrize(("queries", "keys", "sizes", "heads", "kind", "excluding", "dtype"), CASES, ids=str)
def test_output_lse_and_gradients(target, queries, keys, sizes, heads, kind, excluding, dtype):
    inputs, options = problem(target, OPTIONS[kind], (queries, keys), sizes, heads, dtype, excluding)
    target.check(inputs, **options)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("excluding", ["bool B11S", "bool BHLS", "anything B11 1", "few BHL 1"])
@pytest.mark.parametrize("queries", [17, 50, 65])
def test_what_a_mask_or_range_excludes(target, queries, excluding, poison, dtype):
    inputs, options = problem(target, {}, (queries, queries), (24, 40), (2, 3, 3), dtype, excluding)
    target.check(inputs.with_poison(poison), **options)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("queries", [33, 66])
def test_a_row_meets_its_own_keys_alone(queries, bad, dtype):
    q, k, v = (x.detach() for x in testing.make_inputs(2, 2, queries, queries, 24, dtype=dtype).tensors.values())
    want, want_lse = attnkern.attention(q, k, v, is_causal=True, return_lse=True, backend="cpu")
    last = queries - 1
    k[:, :, last:] = v[:, :, last:] = bad
    out, lse = attnkern.attention(q, k, v, is_causal=True, return_lse=True, backend="cpu")
    assert torch.equal(out[:, :, :last], want[:, :, :last])
    assert torch.equal(lse[:, :, :last], want_lse[:, :, :last])
    assert out[:, :, last:].isnan().all()


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_strides(target, layout, dtype):
    target.check(target.inputs(2, 3, 34, 34, 24, dtype=dtype, layout=layout), is_causal=True)


@pytest.mark.parametrize("length", [20.0, 90.0])
def test_large_scores(target, length, dtype):
    inputs = target.inputs(1, 2, 49, 49, 16, dtype=dtype)
    with torch.no_grad():
        inputs.query.mul_(length / 4)
        inputs.key.mul_(length / 20)
    target.check(inputs)


@pytest.mark.parametrize("queries", [50, 257])
def test_the_last_row_has_the_bits_of_any_threads(queries, dtype):
    """However the other queries are cut into tiles, which changes theirs."""
    tensors = [x.detach() for x in testing.make_inputs(1, 3, queries, queries, 32, dtype=dtype).tensors.values()]
    found = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        found.append(attnkern.attention(*tensors, is_causal=True, return_lse=True, backend="cpu"))
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert torch.equal(got[:, :, -1], want[:, :, -1])
