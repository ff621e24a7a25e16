"""return_lse and merge_attention: values, dead rows, attention over split keys, gradients through the merge."""

import itertools
import math

import pytest
import torch

import attnkern
from attnkern import testing

INF = math.inf


def split(inputs, cuts, target, **options):
    """Attention over consecutive pieces of the keys: [(out, lse), ...]."""
    edges = [0, *cuts, inputs.key.size(-2)]
    parts = []
    for a, b in itertools.pairwise(edges):
        mask = inputs.attn_mask
        if mask is not None and mask.size(-1) > 1:
            mask = mask[..., a:b]
        parts.append(
            target.attention(
                inputs.query, inputs.key[..., a:b, :], inputs.value[..., a:b, :], mask, return_lse=True, **options
            )
        )
    return parts


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"softcap": 3.0}, {"scale": -1.0}, {"window": (2, 1)}], ids=str
)
def test_lse_is_the_natural_logarithm_of_the_sum(target, options, dtype):
    results = target.check(target.inputs(2, 4, 33, 70, 8, heads_k=2, dtype=dtype), enable_gqa=True, **options)
    assert results["lse"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert results["lse"].shape == (2, 4, 33)
    assert results["lse"].is_contiguous()


def test_lse_of_equal_scores(target):
    q = torch.zeros(1, 1, 2, 4, device=target.device)
    k = v = target.randn(1, 1, 1000, 4)
    _, lse = target.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(1000)))


def test_without_return_lse_there_is_one_tensor(target):
    q, k, v = target.inputs(1, 2, 5, 7, 8).tensors.values()
    out, lse = target.attention(q, k, v, return_lse=True)
    alone = target.attention(q, k, v)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, out)
    assert lse.shape == (1, 2, 5)


@pytest.mark.parametrize("leading", [(), (3,), (2, 1, 3)], ids=lambda x: f"{len(x) + 2}d")
def test_lse_in_every_rank(target, leading):
    results = target.check(target.random((*leading, 9, 8), (*leading, 7, 8), (*leading, 7, 5)))
    assert results["lse"].shape == (*leading, 9)


@pytest.mark.parametrize(
    "mask", [None, ("bool", "BHLS"), ("holes", "1HLS"), ("float", "B11S"), ("float", "L1")], ids=str
)
@pytest.mark.parametrize("cuts", [(1,), (10, 11), (5, 20, 64)], ids=str)
def test_attention_over_split_keys_merges_to_the_whole(target, cuts, mask, dtype):
    """Output, lse and all gradients of the merge hold to the rule as the undivided call does."""
    inputs = target.inputs(2, 2, 9, 70, 8, dtype=dtype, mask=mask)
    leaves = {n: x.requires_grad_(x.is_floating_point()) for n, x in inputs.tensors.items()}
    out, lse = attnkern.merge_attention(*split(inputs, cuts, target))
    assert out.dtype == dtype
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grad_lse = torch.where(lse.detach() == -INF, 0.0, grad_lse)
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad((out, lse), list(wanted.values()), (grad_out, grad_lse))
    want = testing.expected(**{n: x.detach() for n, x in leaves.items()}, grad_out=grad_out, grad_lse=grad_lse)
    for name, got in {"out": out, "lse": lse, **dict(zip(wanted, grads, strict=True))}.items():
        x = want[name]
        # Each part is rounded once on its own: the parts' roundings are the merge's to carry.
        testing.assert_within_rule(
            got,
            x.exact,
            x.baseline,
            gradient=name not in ("out", "lse"),
            unit=len(cuts) * x.unit,
            name=name,
            recipe=inputs.recipe,
        )


def test_merge_with_a_part_without_keys(target, dtype):
    """A part that saw no key (lse -inf) changes nothing; of two such parts the merge is again one."""
    q, k, v = target.inputs(2, 2, 9, 20, 8, dtype=dtype).tensors.values()
    out, lse = target.attention(q, k, v, return_lse=True)
    nothing = torch.zeros_like(out), torch.full_like(lse, -INF)
    for parts in [((out, lse), nothing), (nothing, (out, lse)), (nothing, (out, lse), nothing)]:
        merged, merged_lse = attnkern.merge_attention(*parts)
        torch.testing.assert_close(merged, out)
        torch.testing.assert_close(merged_lse, lse)
    merged, merged_lse = attnkern.merge_attention(nothing, nothing)
    assert not merged.any()
    assert (merged_lse == -INF).all()


def test_gradients_through_parts_without_keys(target):
    inputs = target.inputs(1, 2, 6, 12, 8)
    keep = torch.ones(6, 12, dtype=torch.bool, device=target.device)
    keep[0, :6] = keep[1, 6:] = keep[2] = False
    inputs = testing.Inputs(inputs.query, inputs.key, inputs.value, keep, inputs.recipe)
    leaves = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    out, lse = attnkern.merge_attention(*split(inputs, (6,), target))
    assert (lse[..., 2] == -INF).all()
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, grad_out)
    want = testing.expected(*(x.detach() for x in leaves), keep, grad_out=grad_out)
    for name, got in zip(("query", "key", "value"), grads, strict=True):
        testing.assert_within_rule(
            got, want[name].exact, want[name].baseline, gradient=True, unit=want[name].unit, name=name
        )


def test_merge_does_not_depend_on_order(target):
    inputs = target.inputs(2, 2, 9, 70, 8, dtype=torch.float64)
    parts = split(inputs, (7, 30), target)
    a, a_lse = attnkern.merge_attention(*parts)
    b, b_lse = attnkern.merge_attention(*reversed(parts))
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a_lse, b_lse)
    c, c_lse = attnkern.merge_attention(attnkern.merge_attention(*parts[:2]), parts[2])
    torch.testing.assert_close(a, c)
    torch.testing.assert_close(a_lse, c_lse)


def test_merge_of_one_part_is_that_part(target):
    q, k, v = target.inputs(1, 2, 5, 7, 8).tensors.values()
    out, lse = target.attention(q, k, v, return_lse=True)
    merged, merged_lse = attnkern.merge_attention((out, lse))
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)


def test_merge_of_far_apart_parts_is_stable(target):
    out_a, out_b = torch.randn(2, 1, 1, 4, 8, device=target.device).unbind()
    lse_a = torch.tensor([[[1e4, -1e4, 0.0, 88.0]]], device=target.device)
    lse_b = torch.tensor([[[-1e4, 1e4, 0.0, 90.0]]], device=target.device)
    for x in (out_a, out_b, lse_a, lse_b):
        x.requires_grad_()
    out, lse = attnkern.merge_attention((out_a, lse_a), (out_b, lse_b))
    exact_lse = torch.logaddexp(lse_a.double(), lse_b.double())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=0)
    torch.testing.assert_close(out[0, 0, 0], out_a[0, 0, 0])
    torch.testing.assert_close(out[0, 0, 1], out_b[0, 0, 1])
    for grad in torch.autograd.grad((out.sum(), lse.sum()), (out_a, out_b, lse_a, lse_b)):
        assert grad.isfinite().all()


def test_merge_gradcheck():
    parts = [torch.randn(1, 2, 3, 2, dtype=torch.float64), torch.randn(1, 2, 3, dtype=torch.float64)] * 3
    parts = [x.clone().requires_grad_() for x in parts]

    def call(*flat):
        return attnkern.merge_attention(*zip(flat[::2], flat[1::2], strict=True))

    assert torch.autograd.gradcheck(call, parts)


def test_bottom_right_causal_over_a_cache_is_a_merge(target):
    """A prefix that every query sees, and the causal part after it: the building block of prefix caching."""
    q, k, v = target.inputs(1, 2, 10, 50, 8).tensors.values()
    whole = target.attention(q, k, v, is_causal=True, alignment="bottom_right")
    prefix = target.attention(q, k[:, :, :40], v[:, :, :40], return_lse=True)
    rest = target.attention(q, k[:, :, 40:], v[:, :, 40:], is_causal=True, return_lse=True)
    torch.testing.assert_close(attnkern.merge_attention(prefix, rest)[0], whole)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "part"),
        (((torch.zeros(1, 2, 3, 4),),), "out"),
        ((torch.zeros(1, 2, 3, 4),), "out"),
        (((torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4)),), "lse"),
        (
            ((torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)), (torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5))),
            "part 1.*match",
        ),
    ],
    ids=["no parts", "no lse", "no pair", "other lse shape", "other part shape"],
)
def test_merge_refuses_what_it_cannot_merge(parts, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        attnkern.merge_attention(*parts)
