"""is_causal, window and alignment against the explicit mask that they stand for."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from attnkern import testing
from matrix import FLOATS, in_turn

contract = pytest.mark.contract
LENGTHS = [(1, 1), (1, 7), (7, 1), (5, 9), (9, 5), (33, 33), (64, 130), (130, 64), (257, 300)]
WINDOWS = [None, (None, None), (0, 0), (1, 0), (0, 2), (3, None), (None, 2), (40, 10), (1000, 1000)]


@contract(25)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_is_causal_is_top_left(target, lengths, dtype):
    inputs = target.inputs(2, 2, *lengths, 8, dtype=dtype)
    out = target.sdpa(*inputs.tensors.values(), is_causal=True)
    explicit = torch.ones(lengths, dtype=torch.bool, device=target.device).tril()
    want = testing.expected(*inputs.tensors.values(), explicit)["out"]
    want.check(out, recipe=inputs.recipe)


@contract(25)
def test_one_query_sees_only_the_first_key(target):
    q, k, v = target.inputs(2, 2, 1, 7, 8).tensors.values()
    torch.testing.assert_close(target.sdpa(q, k, v, is_causal=True), v[:, :, :1])


@contract(25)
@pytest.mark.parametrize("leading", [(), (3,), (2, 1, 3)], ids=lambda x: f"{len(x) + 2}d")
def test_causal_in_every_rank(target, leading):
    target.check(target.random((*leading, 9, 8), (*leading, 6, 8), (*leading, 6, 8)), is_causal=True)


@contract(26)
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_causal_with_a_scale_of_zero_or_below(target, scale, dtype):
    target.check(target.inputs(2, 2, 40, 40, 8, dtype=dtype), scale=scale, is_causal=True)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_band(target, lengths, window, is_causal, alignment):
    """Output, log-sum-exp and gradients; rows that the window leaves without a key are zero."""
    target.check(target.inputs(1, 2, *lengths, 8), window=window, is_causal=is_causal, alignment=alignment)


EDGES = [None, (None, 0), (63, 0), (150, 1), (64, 64), (260, None)]
AROUND_BLOCKS = [(70, 191), (64, 193), (130, 258), (67, 389), (300, 577)]


@pytest.mark.parametrize(
    **in_turn(**{"window, lengths": list(itertools.product(EDGES, AROUND_BLOCKS))}, dtype=FLOATS), ids=str
)
def test_edges_of_a_band_share_blocks_with_whole_rows(target, lengths, window, dtype):
    """Lengths around one, two and three blocks of keys, edges that begin at odd keys."""
    target.check(target.inputs(1, 1, *lengths, 8, dtype=dtype), window=window, alignment="bottom_right")


@pytest.mark.parametrize("lengths", [(65, 97), (97, 65)], ids=str)
@pytest.mark.parametrize("window", [(5, 3), (0, 0), (70, None)], ids=str)
def test_bands_in_every_dtype(target, lengths, window, dtype):
    for is_causal, alignment in itertools.product((False, True), ("top_left", "bottom_right")):
        inputs = target.inputs(1, 4, *lengths, 24, heads_k=2, dtype=dtype, layout="blhd")
        target.check(inputs, window=window, is_causal=is_causal, alignment=alignment, enable_gqa=True)


@pytest.mark.parametrize("mask", [("bool", "BHLS"), ("holes", "1HLS"), ("float", "B11S"), ("holes", "LS")], ids=str)
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (4, 2)}], ids=str)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_a_band_with_a_mask_is_the_intersection(target, mask, options, alignment, dtype):
    target.check(target.inputs(2, 2, 40, 70, 8, dtype=dtype, mask=mask), alignment=alignment, **options)


@contract(25)
def test_causal_agrees_with_torch(target):
    inputs = target.inputs(2, 3, 20, 31, 16)
    ours = target.sdpa(*inputs.tensors.values(), is_causal=True)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*inputs.tensors.values(), is_causal=True))


def test_bottom_right_lets_the_last_query_see_every_key(target):
    q, k, v = target.inputs(1, 2, 3, 10, 8).tensors.values()
    out = target.attention(q, k, v, is_causal=True, alignment="bottom_right")
    assert torch.equal(out[:, :, -1:], target.attention(q[:, :, -1:], k, v)) or torch.allclose(
        out[:, :, -1:], target.attention(q[:, :, -1:], k, v)
    )
    # With more queries than keys the first rows see none.
    q, k, v = target.inputs(1, 2, 10, 3, 8).tensors.values()
    out = target.attention(q, k, v, is_causal=True, alignment="bottom_right")
    assert not out[:, :, :7].any()
    torch.testing.assert_close(out[:, :, 7], v[:, :, 0])


@pytest.mark.parametrize("far", [10**6, 2**40, 2**62, 2**63 - 1, 10**30])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_bounds_beyond_every_length(target, far, alignment):
    """As good as unbounded, however large: no overflow on the way to the kernel."""
    inputs = target.inputs(1, 2, 40, 70, 8)
    for window, same in [((far, far), (None, None)), ((far, 2), (None, 2)), ((3, far), (3, None))]:
        got = target.attention(*inputs.tensors.values(), window=window, alignment=alignment)
        want = target.attention(*inputs.tensors.values(), window=same, alignment=alignment)
        torch.testing.assert_close(got, want)
