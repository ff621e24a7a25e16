"""enable_gqa: groups of consecutive query heads share a key head; masks and dropout stay per query head."""

import pytest
import torch

from attnkern import testing

contract = pytest.mark.contract
HEADS = [
    (4, 4, 4),
    (4, 2, 2),
    (4, 1, 1),
    (6, 2, 2),
    (6, 3, 3),
    (8, 1, 1),
    (12, 4, 4),
    (4, 2, 1),
    (4, 1, 2),
    (6, 2, 3),
    (6, 3, 1),
]


@contract(27, 28)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_every_grouping(target, heads, options, dtype):
    inputs = target.inputs(2, heads[0], 19, 37, 8, 24, heads_k=heads[1], heads_v=heads[2], dtype=dtype)
    target.check(inputs, enable_gqa=True, **options)


@contract(28)
def test_groups_are_consecutive(target):
    q, k, v = target.inputs(1, 4, 1, 1, 8, heads_k=2).tensors.values()
    out = target.sdpa(q, k, v, enable_gqa=True)  # one key: the output is the value of the head's own group
    torch.testing.assert_close(out[0, :, 0], v[0, [0, 0, 1, 1], 0])


@contract(30)
@pytest.mark.parametrize("mask", [("bool", "BHLS"), ("holes", "1HLS"), ("float", "B11S"), ("float", "BHLS")], ids=str)
def test_the_mask_is_per_query_head(target, mask, dtype):
    target.check(target.inputs(2, 6, 9, 17, 8, heads_k=2, dtype=dtype, mask=mask), enable_gqa=True)


@contract(30)
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)], ids=lambda x: f"{len(x) + 3}d")
def test_every_rank_with_heads(target, leading):
    target.check(target.random((*leading, 6, 9, 8), (*leading, 2, 7, 8), (*leading, 2, 7, 5)), enable_gqa=True)


@contract(29)
def test_batch_still_broadcasts(target):
    target.check(target.random((3, 4, 9, 8), (1, 2, 7, 8), (1, 2, 7, 8)), enable_gqa=True)
    target.check(target.random((1, 4, 9, 8), (3, 2, 7, 8), (3, 2, 7, 8)), enable_gqa=True)


@contract(29)
def test_equal_heads_change_nothing(target):
    q, k, v = target.inputs(2, 3, 9, 17, 8).tensors.values()
    assert torch.equal(target.sdpa(q, k, v, enable_gqa=True), target.sdpa(q, k, v))


@contract(30)
def test_gradients_sum_over_the_group(target):
    inputs = target.inputs(2, 6, 19, 37, 8, heads_k=2)
    q, k, v = (x.requires_grad_() for x in inputs.tensors.values())
    repeated = [
        k.detach().repeat_interleave(3, 1).requires_grad_(),
        v.detach().repeat_interleave(3, 1).requires_grad_(),
    ]
    grad_out = target.randn(2, 6, 19, 8)
    grouped = torch.autograd.grad(target.sdpa(q, k, v, enable_gqa=True), (k, v), grad_out)
    apart = torch.autograd.grad(target.sdpa(q, *repeated), repeated, grad_out)
    for a, b in zip(grouped, apart, strict=True):
        torch.testing.assert_close(a, b.unflatten(1, (2, 3)).sum(2))


@contract(30, 35)
def test_with_dropout(target):
    """Every query head draws its own bits, also where heads share a key."""
    q, k, _ = target.inputs(2, 4, 9, 16, 8, heads_k=2).tensors.values()
    value = torch.eye(16, device=target.device).expand(2, 2, 16, 16)
    torch.manual_seed(0)
    keep = target.sdpa(q, k, value, dropout_p=0.5, enable_gqa=True) != 0
    assert not torch.equal(keep[:, 0], keep[:, 1])
    inputs = testing.Inputs(q, k, target.randn(2, 2, 16, 16), None, "gqa with dropout")
    torch.manual_seed(0)
    target.check(inputs, enable_gqa=True, dropout_p=0.5, keep=keep)


@contract(27)
def test_grouped_decode_of_long_keys(target, dtype):
    target.check(target.inputs(2, 8, 1, 700, 16, heads_k=2, dtype=dtype), enable_gqa=True)
