"""Any shapes, strides, masks and options that chance thinks of, against the float64 reference."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from attnkern import testing
from random_problems import random_packed, random_problem

contract = pytest.mark.contract

# Examples follow from the test's seed (tests/conftest.py); a failure prints its example, which names a seed of its own.
ANEW = hypothesis.settings(
    deadline=None,
    database=None,
    max_examples=40,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)

seeds = st.integers(0, 2**31 - 1)
lengths = st.one_of(st.integers(0, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 257]))
head_dims = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 64, 65, 80, 97]))
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
layouts = st.sampled_from(list(testing.LAYOUTS))
bounds = st.one_of(st.none(), st.integers(0, 40))


@st.composite
def masks(draw):
    kind = draw(st.sampled_from([None, "bool", "float", "holes"]))
    if kind is None:
        return None
    shape = "".join(draw(st.sampled_from([c, "1"])) for c in "BHLS")
    return kind, shape[draw(st.integers(0, 2)) if shape[:2] == "11" else 0 :]


@st.composite
def bands(draw):
    options = {}
    if draw(st.booleans()):
        options["is_causal"] = draw(st.booleans())
    if draw(st.booleans()):
        options["window"] = draw(bounds), draw(bounds)
    if options:
        options["alignment"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    return options


@ANEW
@hypothesis.given(
    batch=st.integers(0, 3),
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 1, 2, 3]),
    seqlen_q=lengths,
    seqlen_k=lengths,
    head_dim=head_dims,
    head_dim_v=head_dims,
    dtype=dtypes,
    layout=st.tuples(layouts, layouts, layouts),
    mask=masks(),
    own_mask_dtype=st.booleans(),
    band=bands(),
    scale=st.one_of(st.none(), st.floats(-2, 2, width=32)),
    softcap=st.sampled_from([None, None, 1.0, 10.0]),
    seed=seeds,
)
@contract(6, 10, 12, 15, 16, 19, 25, 28, 31, 36, 44)
def test_any_call(target, heads, group, dtype, own_mask_dtype, band, scale, softcap, **sizes):
    inputs = target.inputs(
        heads=heads * group, heads_k=heads, dtype=dtype, mask_dtype=dtype if own_mask_dtype else torch.float32, **sizes
    )
    target.check(inputs, enable_gqa=group > 1, scale=scale, softcap=softcap, **band)


def leading_dimensions(draw, rank):
    """Three tuples of leading dimensions that broadcast, of different lengths."""
    full = [draw(st.integers(1, 3)) for _ in range(rank)]
    return [tuple(n if draw(st.booleans()) else 1 for n in full[rank - draw(st.integers(0, rank)) :]) for _ in range(3)]


@ANEW
@hypothesis.given(data=st.data(), rank=st.integers(0, 4), seqlen_q=st.integers(0, 9), seqlen_k=st.integers(0, 9))
@contract(5, 7, 10, 16)
def test_any_broadcast(target, data, rank, seqlen_q, seqlen_k):
    q, k, v = leading_dimensions(data.draw, rank)
    scores = (*torch.broadcast_shapes(q, k), seqlen_q, seqlen_k)
    mask = None
    if data.draw(st.booleans()):
        shape = [n if data.draw(st.booleans()) else 1 for n in scores]
        mask = target.randn(*shape[data.draw(st.integers(0, len(shape) - 2)) :])
    target.check(target.random((*q, seqlen_q, 4), (*k, seqlen_k, 4), (*v, seqlen_k, 3), mask=mask))


@contract(44)
@pytest.mark.parametrize("round", range(4))
def test_random_problems(target, round):
    """A wider net than hypothesis casts in the same time; the message names the problem's seed."""
    for _ in range(25):
        inputs, options = random_problem(
            int(torch.randint(2**31, ())),
            device=target.device,
            dtypes=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
            poison=True,
        )
        target.check(inputs, **options)


@pytest.mark.parametrize("round", range(2))
def test_random_packed_sequences(target, round):
    for _ in range(25):
        inputs, options, packed = random_packed(int(torch.randint(2**31, ())), device=target.device, poison=True)
        testing.check_packed(inputs, packed, backend=target.backend_for(inputs.query), **options)


@ANEW
@hypothesis.given(seqlen_k=st.integers(1, 150), shift=st.floats(-50, 50, width=32), seed=seeds, dtype=dtypes)
def test_a_constant_added_to_every_score_changes_nothing(target, seqlen_k, shift, seed, dtype):
    inputs = target.inputs(1, 2, 7, seqlen_k, 8, dtype=torch.float64, seed=seed)
    bias = torch.full((1, 1), shift, dtype=torch.float64, device=target.device)
    out, lse = target.attention(*inputs.tensors.values(), return_lse=True)
    moved, moved_lse = target.attention(*inputs.tensors.values(), bias, return_lse=True)
    torch.testing.assert_close(moved, out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(moved_lse, lse + shift, rtol=1e-10, atol=1e-10)


@ANEW
@hypothesis.given(seqlen_q=st.integers(1, 40), seqlen_k=st.integers(1, 150), seed=seeds)
def test_the_order_of_keys_does_not_matter(target, seqlen_q, seqlen_k, seed):
    q, k, v = target.inputs(1, 2, seqlen_q, seqlen_k, 8, dtype=torch.float64, seed=seed).tensors.values()
    order = torch.randperm(seqlen_k, device=target.device)
    torch.testing.assert_close(target.sdpa(q, k[:, :, order], v[:, :, order]), target.sdpa(q, k, v))


@ANEW
@hypothesis.given(seqlen_q=st.integers(1, 70), seqlen_k=st.integers(1, 70), left=bounds, right=bounds, seed=seeds)
def test_a_band_equals_its_mask_bit_for_bit_in_what_it_excludes(target, seqlen_q, seqlen_k, left, right, seed):
    """What stands outside the band does not matter at all: replaced, the output stays the same to the last bit."""
    q, k, v = target.inputs(1, 1, seqlen_q, seqlen_k, 8, seed=seed).tensors.values()
    options = {"window": (left, right), "alignment": "bottom_right"}
    out = target.attention(q, k, v, **options)
    keep = testing.band_mask(seqlen_q, seqlen_k, **options, device=target.device)
    row = seqlen_q // 2
    unseen = ~keep[row]
    k, v = k.clone(), v.clone()
    k[0, 0, unseen] += 3
    v[0, 0, unseen] -= 5
    assert torch.equal(target.attention(q, k, v, **options)[0, 0, row], out[0, 0, row])
