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


def test_merge_does_not_look_at_rows_without_keys(target):
    """They may hold NaN, as those of other libraries do, or what was in memory."""
    out, lse = target.randn(1, 2, 5, 8), target.randn(1, 2, 5)
    nothing = torch.full_like(out, math.nan).requires_grad_(), torch.full_like(lse, -INF).requires_grad_()
    merged = attnkern.merge_attention(nothing, (out, lse), nothing)
    torch.testing.assert_close(merged, (out, lse))
    assert all((grad == 0).all() for grad in torch.autograd.grad(merged[0].sum() + merged[1].sum(), nothing))
    merged, merged_lse = attnkern.merge_attention(nothing, nothing)
    assert (merged == 0).all()
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
        want[name].check(got, gradient=True, name=name)


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
        ((torch.zeros(1, 2, 3, 4),), r"out, lse\), not Tensor of shape \(1, 2, 3, 4\)$"),
        (((torch.zeros(1, 2, 3, 4), None),), r"part 0 must be a pair .*, not \(Tensor, NoneType\)$"),
        (
            ([(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3))] * 4,),
            r"not \(tuple, .*\.\.\.\) .*\(\*parts\)",
        ),
        (((torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4)),), "lse"),
        (
            ((torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)), (torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5))),
            "part 1.*match",
        ),
    ],
    ids=["no parts", "no lse", "no pair", "no tensor", "a list", "other lse shape", "other part shape"],
)
def test_merge_refuses_what_it_cannot_merge(parts, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        attnkern.merge_attention(*parts)


def backward_of_parts(target, grad_out, q, k, v, out, lse, keep=None, **options):
    """The gradients of 70 keys, of which 30 are one part and 40 the other."""
    parts = [
        attnkern.attention_backward(
            grad_out,
            q,
            k[:, :, a:b],
            v[:, :, a:b],
            out,
            lse,
            None if keep is None else keep[..., a:b],
            enable_gqa=True,
            backend=target.backend_for(q),
            **options,
        )
        for a, b in ((0, 30), (30, 70))
    ]
    (dq_a, dk_a, dv_a), (dq_b, dk_b, dv_b) = parts
    return {
        "query": dq_a.to(lse) + dq_b.to(lse),
        "key": torch.cat([dk_a, dk_b], 2),
        "value": torch.cat([dv_a, dv_b], 2),
    }


def assert_gradients(got, want, inputs):
    """Results that are sums of two rounded parts may be off by two units of rounding."""
    for name, x in got.items():
        e = want[name]
        x = x.to(inputs.query.dtype)
        testing.assert_within_rule(
            x, e.exact, e.baseline, gradient=True, unit=2 * e.unit, name=name, recipe=inputs.recipe
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 3.0}, {"scale": -1.0}, {"is_causal": True, "alignment": "bottom_right"}, {"window": (20, 5)}],
    ids=str,
)
@pytest.mark.parametrize("mask", [None, ("bool", "BHLS"), ("holes", "1HLS"), ("float", "B11S")], ids=str)
def test_backward_of_parts_adds_up_to_the_whole(target, options, mask, dtype):
    """With the merged out and lse, as a ring has them when a part of the keys comes by again."""
    inputs = target.inputs(2, 4, 33, 70, 8, heads_k=2, dtype=dtype, mask=mask)
    out, lse = target.attention(**inputs.tensors, **options, enable_gqa=True, return_lse=True)
    grad_out = (0.25 * torch.randn(out.shape, dtype=torch.float64)).to(out)
    grad_lse = torch.where(lse == -INF, 0.0, (0.25 * torch.randn(lse.shape, dtype=torch.float64)).to(lse))
    # A part's band is not level with the whole's: here it comes as a mask.
    shape = {n: x for n, x in options.items() if n in ("is_causal", "window", "alignment")}
    band = testing.band_mask(33, 70, **shape, device=target.device)
    keep = inputs.attn_mask
    if band is not None:
        keep = band if keep is None else keep & band if keep.dtype == torch.bool else keep.masked_fill(~band, -INF)
    want = testing.expected(**inputs.tensors, grad_out=grad_out, grad_lse=grad_lse, enable_gqa=True, **options)
    options = {n: x for n, x in options.items() if n not in shape}
    q, k, v = inputs.query, inputs.key, inputs.value
    got = backward_of_parts(target, grad_out, q, k, v, out, lse, keep, grad_lse=grad_lse, **options)
    assert_gradients(got, want, inputs)


@pytest.mark.parametrize("queries", [3, 33])  # of one head of keys, after decoding and after the tiled forward pass
@pytest.mark.parametrize("score", [100.0, -100.0, 2000.0])
def test_backward_of_parts_of_large_scores(target, score, queries, dtype):
    """A part's weights don't sum up to 1, however far the rounding of a large log-sum-exp may be from its own sum."""
    inputs = target.inputs(2, 4, queries, 70, 16, heads_k=2, dtype=dtype)
    q, k, v = (x.detach().clone() for x in inputs.tensors.values())
    q[..., 0], k[..., 0] = 4 * score, 1  # all scores are near this one
    out, lse = target.attention(q, k, v, enable_gqa=True, return_lse=True)
    grad_out = (0.25 * torch.randn(out.shape, dtype=torch.float64)).to(out)
    got = backward_of_parts(target, grad_out, q, k, v, out, lse)
    assert_gradients(got, testing.expected(q, k, v, grad_out=grad_out, enable_gqa=True), inputs)


def test_backward_of_the_whole_is_the_gradient(target, dtype):
    inputs = target.inputs(2, 2, 9, 20, 8, 12, dtype=dtype)
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]
    out, lse = target.attention(*leaves, return_lse=True)
    grad_out = (0.25 * torch.randn(out.shape, dtype=torch.float64)).to(out)
    grads = attnkern.attention_backward(grad_out, *leaves, out, lse, backend=target.backend_for(*leaves))
    want = testing.expected(*leaves, grad_out=grad_out)
    for (name, x), got in zip(inputs.tensors.items(), grads, strict=True):
        assert (got.shape, got.dtype, got.requires_grad) == (x.shape, dtype, False)
        e = want[name]
        e.check(got, gradient=True, name=name, recipe=inputs.recipe)


def test_backward_under_autocast(target):
    """It takes what `attention` gives there; gradients have the dtypes of the arguments."""
    q, k, v = target.inputs(1, 2, 9, 12, 8).tensors.values()
    rounded = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    with torch.autocast(target.device, torch.bfloat16):
        out, lse = target.attention(q, k, v, return_lse=True)
        grads = attnkern.attention_backward(out, q, k, v, out, lse, backend=target.backend)
    want = torch.autograd.grad(target.attention(*rounded), rounded, out)
    for x, y in zip(grads, want, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y.float(), rtol=1e-2, atol=1e-2)


def test_backward_of_a_part_without_keys(target):
    """Rows that see nothing of a part get nothing from it; rows that see nothing at all are 0."""
    inputs = target.inputs(1, 2, 6, 12, 8)
    keep = torch.ones(6, 12, dtype=torch.bool, device=target.device)
    keep[0, :6] = keep[1] = False
    q, k, v = inputs.query, inputs.key, inputs.value
    out, lse = target.attention(q, k, v, keep, return_lse=True)
    dq, dk, dv = attnkern.attention_backward(
        torch.ones_like(out), q, k[:, :, :6], v[:, :, :6], out, lse, keep[:, :6], backend=target.backend
    )
    assert not dq[:, :, :2].any()
    assert dq[:, :, 2:].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"grad_out": torch.zeros(2, 2, 5, 9)},
            RuntimeError,
            r"grad_out must be \(2, 2, 5, 8\) float32 cpu.*got",
        ),
        ({"out": torch.zeros(2, 2, 5, 8, dtype=torch.float64)}, RuntimeError, "out must be .* float32 cpu"),
        ({"lse": torch.zeros(2, 2, 5, 1)}, RuntimeError, r"lse must be \(2, 2, 5\) float32"),
        ({"grad_lse": torch.zeros(2, 5)}, RuntimeError, "grad_lse must be"),
        ({"lse": None}, TypeError, "'lse' must be Tensor, not NoneType"),
        ({"query": torch.zeros(2, 5, 8)}, RuntimeError, r"takes 4-D tensors .*, got query \(2, 5, 8\)$"),
        ({"key": torch.zeros(1, 2, 7, 8)}, RuntimeError, r"4-D tensors of one batch size, got key \(1, 2, 7, 8\)"),
        ({"key": torch.zeros(2, 2, 6, 8)}, RuntimeError, "key and value must have the same length"),
    ],
    ids=lambda x: str(next(iter(x))) if isinstance(x, dict) else "",
)
def test_backward_of_parts_says_what_it_needs(change, error, message):
    arguments = {
        "grad_out": torch.zeros(2, 2, 5, 8),
        "query": torch.zeros(2, 2, 5, 8),
        "key": torch.zeros(2, 2, 7, 8),
        "value": torch.zeros(2, 2, 7, 8),
        "out": torch.zeros(2, 2, 5, 8),
        "lse": torch.zeros(2, 2, 5),
    }
    attnkern.attention_backward(**arguments)
    with pytest.raises(error, match=message):
        attnkern.attention_backward(**{**arguments, **change})
