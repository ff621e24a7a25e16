"""Gradients of every subset of inputs, of lse, against finite differences, for any strides; autograd's manners."""

import itertools

import pytest
import torch

from attnkern import testing
from conftest import seed_torch
from matrix import tagged

contract = pytest.mark.contract
NAMES = ("query", "key", "value", "attn_mask")
SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(NAMES, n)]


@contract(20)
@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "enable_gqa": True}], ids=["plain", "causal gqa"])
def test_any_subset_of_inputs_may_require_grad(target, subset, options):
    inputs = target.inputs(2, 4, 9, 37, 8, 6, heads_k=2 if options else 4, mask=("holes", "1HLS"))
    tensors = {n: x.requires_grad_(n in subset) for n, x in inputs.tensors.items()}
    out = target.attention(**tensors, **options)
    grad_out = target.randn(*out.shape)
    out.backward(grad_out)
    want = testing.expected(**{n: x.detach() for n, x in tensors.items()}, grad_out=grad_out, **options)
    for name, x in tensors.items():
        if name in subset:
            want[name].check(x.grad, gradient=True, name=name, recipe=inputs.recipe)
        else:
            assert x.grad is None


@pytest.mark.parametrize("use", ["out", "lse", "both"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 2)}, {"softcap": 2.0}], ids=str)
def test_gradients_of_out_and_lse(target, use, options, dtype):
    """Through either output alone and through both; the log-sum-exp does not depend on value."""
    inputs = target.inputs(2, 2, 19, 37, 8, dtype=dtype, mask=("holes", "1HLS"))
    leaves = {n: x.requires_grad_() for n, x in inputs.tensors.items()}
    out, lse = target.attention(**leaves, **options, return_lse=True)
    grad_out = torch.randn_like(out) if use != "lse" else torch.zeros_like(out)
    grad_lse = torch.randn_like(lse) if use != "out" else torch.zeros_like(lse)
    outputs = {"out": [out], "lse": [lse], "both": [out, lse]}[use]
    seeds = {"out": [grad_out], "lse": [grad_lse], "both": [grad_out, grad_lse]}[use]
    got = torch.autograd.grad(outputs, list(leaves.values()), seeds, allow_unused=use == "lse")
    want = testing.expected(
        **{n: x.detach() for n, x in leaves.items()}, grad_out=grad_out, grad_lse=grad_lse, **options
    )
    for (name, x), grad in zip(leaves.items(), got, strict=True):
        if name == "value" and use == "lse":
            assert grad is None or not grad.any()
            continue
        want[name].check(grad, gradient=True, name=name, recipe=inputs.recipe)
        assert grad.dtype == x.dtype


@contract(20)
@pytest.mark.parametrize("shape", ["BHLS", "1HLS", "LS", "1HL1", "L1", "1S", "11", "B1LS"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "enable_gqa": True}], ids=["plain", "causal gqa"])
def test_mask_gradient_over_many_blocks(target, shape, options, dtype):
    """Long enough that the sum over a broadcast dimension crosses blocks and tasks."""
    heads = 4 if options else 2
    inputs = target.inputs(2, heads, 390, 130, 8, heads_k=2, dtype=dtype, mask=("float", shape))
    target.check(inputs, **options)


@pytest.mark.parametrize("layout", ["contiguous", "blhd"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "alignment": "bottom_right"}], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(1100, 20), (20, 1100)], ids=["queries", "keys"])
def test_heads_that_caches_do_not_hold(kernel_target, lengths, options, layout, dtype):
    """4 MiB and more a head: what the next block needs is fetched while this one is computed."""
    heads = 1 if layout == "contiguous" else 2
    kernel_target.check(kernel_target.inputs(1, heads, *lengths, 512, dtype=dtype, layout=layout), **options)


@contract(20)
@pytest.mark.parametrize("batch", [1, 2], ids=["own", "shared"])
def test_masks_that_caches_do_not_hold(kernel_target, batch, dtype):
    """1 MiB and more a head, which is fetched; 8 MiB and more, which no task adds to for every head in turn."""
    length = 1040 if batch == 1 else 1500
    inputs = kernel_target.inputs(batch, 1, length, length, 8, dtype=dtype, mask=("float", "LS"))
    kernel_target.check(inputs, is_causal=True)


@contract(20, 36)
@pytest.mark.parametrize("name", tagged("gradcheck"))
def test_gradcheck(target, name):
    """The kernel's own backward against finite differences in float64, through out and lse."""
    options = tagged("gradcheck")[name].options
    tensors = tagged("gradcheck")[name].inputs(target.device, dtype=torch.float64).tensors
    leaves = {n: x.requires_grad_() for n, x in tensors.items() if x.is_floating_point()}
    if "attn_mask" in tensors:  # a finite difference of -inf, in the mask or as lse of a dead row, is none
        with torch.no_grad():
            tensors["attn_mask"][..., 0] = True if tensors["attn_mask"].dtype == torch.bool else 0.0
            if "attn_mask" in leaves:
                leaves["attn_mask"].clamp_(min=-30)

    def call(*values):
        seed_torch(0)
        return target.attention(**(tensors | dict(zip(leaves, values, strict=True))), **options, return_lse=True)

    assert torch.autograd.gradcheck(call, tuple(leaves.values()), fast_mode=False)


# --- strides of what comes in and goes out


def grad_outs(shape, target, dtype):
    b, h, n, e = shape
    full = target.randn(b, h, n, e, dtype=dtype)
    return {
        "expanded scalar": target.randn((), dtype=dtype).expand(shape),
        "expanded rows": target.randn(b, h, 1, e, dtype=dtype).expand(shape),
        "expanded batch": target.randn(1, 1, n, e, dtype=dtype).expand(shape),
        **{layout: testing.with_layout(full, layout) for layout in testing.LAYOUTS},
    }


@contract(46)
@pytest.mark.parametrize("layout", ["expanded scalar", "expanded rows", "expanded batch", *testing.LAYOUTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grad_out_of_any_stride(target, layout, dtype):
    inputs = target.inputs(2, 3, 19, 37, 24, dtype=dtype)
    leaves = {n: x.requires_grad_() for n, x in inputs.tensors.items()}
    out = target.sdpa(**leaves)
    grad_out = grad_outs(out.shape, target, dtype)[layout]
    with testing.unmodified(grad_out):
        got = torch.autograd.grad(out, list(leaves.values()), grad_out)
    want = testing.expected(**{n: x.detach() for n, x in leaves.items()}, grad_out=grad_out)
    for (name, w), x in zip(list(want.items())[2:], got, strict=True):
        w.check(x, gradient=True, name=name, recipe=inputs.recipe)


@contract(46)
def test_sum_backward(target):
    inputs = target.inputs(2, 3, 19, 37, 24)
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]
    target.sdpa(*leaves).sum().backward()
    want = testing.expected(*(x.detach() for x in leaves), grad_out=torch.ones(2, 3, 19, 24, device=target.device))
    for name, x in zip(NAMES, leaves, strict=False):
        w = want[name]
        w.check(x.grad, gradient=True, name=name, recipe=inputs.recipe)


@contract(47)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_projection(target, is_causal, dtype):
    qkv, q, k, v = testing.packed_qkv(2, 3, 19, 8, dtype, target.device)
    qkv.requires_grad_()
    out = target.sdpa(*qkv.permute(2, 0, 3, 1, 4), is_causal=is_causal)
    assert out.transpose(1, 2).is_contiguous()
    grad_out = target.randn(*out.shape, dtype=dtype)
    out.backward(grad_out)
    want = testing.expected(q, k, v, grad_out=grad_out, is_causal=is_causal)
    for i, name in enumerate(("query", "key", "value")):
        got = qkv.grad[:, :, i].transpose(1, 2)
        want[name].check(got, gradient=True, name=name)


@contract(47)
def test_chunked_projection(target):
    leaf = target.randn(2, 9, 24, requires_grad=True)
    separate = [x.detach().clone().requires_grad_() for x in leaf.chunk(3, -1)]
    grad_out = target.randn(2, 9, 8)
    (got,) = torch.autograd.grad(target.sdpa(*leaf.chunk(3, -1)), leaf, grad_out)
    want = torch.autograd.grad(target.sdpa(*separate), separate, grad_out)
    torch.testing.assert_close(got, torch.cat(want, -1))


@contract(10)
def test_gradients_of_empty_calls_exist(target):
    for shapes in [((2, 0, 8), (2, 5, 8)), ((2, 5, 8), (2, 0, 8)), ((0, 5, 8), (0, 5, 8))]:
        q, k = (target.randn(*s, requires_grad=True) for s in shapes)
        v = target.randn(*shapes[1], requires_grad=True)
        target.sdpa(q, k, v).sum().backward()
        for x in (q, k, v):
            assert x.grad.shape == x.shape
            assert not x.grad.any()


# --- manners of an autograd function


@contract(48)
def test_requires_grad_of_the_output(target):
    x, y = target.randn(2, 3, 5, 8), target.randn(2, 3, 5, 8, requires_grad=True)
    assert not target.sdpa(x, x, x).requires_grad
    for arguments in ((y, x, x), (x, y, x), (x, x, y)):
        assert target.sdpa(*arguments).requires_grad
    assert target.sdpa(x, x, x, target.randn(5, 5, requires_grad=True)).requires_grad
    with torch.no_grad():
        assert not target.sdpa(y, y, y).requires_grad
        with torch.enable_grad():
            assert target.sdpa(y, y, y).requires_grad
    with torch.inference_mode():
        out = target.sdpa(y, y, y)
        assert out.is_inference()
        assert not out.requires_grad
        made_here = target.randn(2, 3, 5, 8)
    assert made_here.is_inference()
    assert not target.sdpa(made_here, made_here, made_here).requires_grad


@contract(48)
def test_backward_twice(target):
    leaves = [x.requires_grad_() for x in target.inputs(2, 3, 9, 17, 8).tensors.values()]
    out = target.sdpa(*leaves)
    out.sum().backward(retain_graph=True)
    first = [x.grad.clone() for x in leaves]
    out.sum().backward()
    for x, y in zip(leaves, first, strict=True):
        assert torch.equal(x.grad, 2 * y)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@contract(48)
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_in_place_changes_of_saved_inputs_are_noticed(target, which):
    leaves = [x.requires_grad_() for x in target.inputs(2, 3, 9, 17, 8).tensors.values()]
    inputs = [x * 1 for x in leaves]
    out = target.sdpa(*inputs)
    inputs[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@contract(48)
def test_saved_tensors_hooks_see_what_is_saved(target):
    leaves = [x.requires_grad_() for x in target.inputs(2, 3, 9, 17, 8).tensors.values()]
    want = torch.autograd.grad(target.sdpa(*leaves).square().sum(), leaves)
    packed, unpacked = [], []

    def pack(x):
        packed.append(x.shape)
        return x.clone()

    def unpack(x):
        unpacked.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = target.sdpa(*leaves)
    assert packed
    if target.backend != "reference":  # plain torch keeps its own intermediate results
        assert {x.shape for x in leaves} <= set(packed)
    got = torch.autograd.grad(out.square().sum(), leaves)
    assert unpacked
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@contract(48)
def test_gradients_accumulate_in_several_calls(target):
    x = target.randn(2, 3, 9, 8, requires_grad=True)
    y = target.randn(2, 3, 9, 8)
    a, b = target.sdpa(x, y, y), target.sdpa(y, x, y)
    (together,) = torch.autograd.grad(a.sum() + 2 * b.sum(), x, retain_graph=True)
    (first,) = torch.autograd.grad(a.sum(), x)
    (second,) = torch.autograd.grad(b.sum(), x)
    torch.testing.assert_close(together, first + 2 * second)
