"""attnkern.scaled_dot_product_attention behaves as torch's: signature, shapes, scale, dtypes, numerics, layout."""

import copy
import functools
import inspect
import math
import pickle
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnkern
from attnkern import testing
from bench import cases
from matrix import FLOATS, in_turn

contract = pytest.mark.contract


# --- signature and argument types


@contract(1)
def test_signature_is_torchs_plus_backend():
    ours = inspect.signature(attnkern.scaled_dot_product_attention).parameters
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    assert [a.name for a in schema.arguments] == [n for n in ours if n != "backend"]
    assert [a.name for a in schema.arguments if not a.kwarg_only] == [
        n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    for argument in schema.arguments[3:]:
        assert ours[argument.name].default == argument.default_value
    assert ours["backend"].kind is inspect.Parameter.KEYWORD_ONLY


@contract(1)
def test_calls_by_position_and_by_keyword_agree(target):
    q, k, v = target.random((2, 3, 5, 8)).tensors.values()
    mask = target.randn(5, 5)
    by_position = target.sdpa(q, k, v, mask, 0.0, False)
    by_keyword = target.sdpa(
        is_causal=False, dropout_p=0.0, attn_mask=mask, value=v, key=k, query=q, scale=None, enable_gqa=False
    )
    assert type(by_position) is torch.Tensor
    assert torch.equal(by_position, by_keyword)


@contract(1)
@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (7, {}, "positional argument"),
        (2, {}, "value"),
        (3, {"out": None}, "out"),
        (3, {"need_weights": True}, "need_weights"),
    ],
)
def test_calls_that_do_not_fit_the_signature(arguments, keywords, message):
    x = torch.randn(2, 5, 8)
    positional = [x, x, x, None, 0.0, False, 0.5][:arguments]
    with pytest.raises(TypeError, match=message):
        attnkern.scaled_dot_product_attention(*positional, **keywords)


NUMBERS = [1, 0.5, True, np.float32(0.5), np.float64(0.5), np.int64(1), torch.tensor(0.5), torch.tensor(1)]


@contract(3)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: f"{type(x).__name__}-{x}")
def test_numbers_of_every_kind(target, number):
    q, k, v = target.random((2, 3, 5, 8)).tensors.values()
    assert torch.equal(target.sdpa(q, k, v, scale=number), target.sdpa(q, k, v, scale=float(number)))
    torch.manual_seed(0)
    got = target.sdpa(q, k, v, dropout_p=number)
    torch.manual_seed(0)
    assert torch.equal(got, target.sdpa(q, k, v, dropout_p=float(number)))


@contract(4)
def test_the_function_is_an_ordinary_object(target):
    function = attnkern.scaled_dot_product_attention
    assert function.__name__ == "scaled_dot_product_attention"
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function
    q, k, v = target.random((2, 3, 5, 8)).tensors.values()
    partial = functools.partial(function, is_causal=True, backend=target.backend)
    assert torch.equal(partial(q, k, v), target.sdpa(q, k, v, is_causal=True))


# --- shapes


@contract(5, 6)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (2, 1, 2, 3)], ids=lambda x: f"{len(x) + 2}d")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": True}], ids=["full", "causal", "mask"])
def test_every_rank(target, leading, options):
    mask = target.randn(7, 11) if options else None
    options = {n: x for n, x in options.items() if n != "mask"}
    if "is_causal" in options:
        mask = None
    target.check(target.random((*leading, 7, 8), (*leading, 11, 8), (*leading, 11, 5), mask=mask), **options)


@contract(6)
@pytest.mark.parametrize("head_dim_v", [1, 3, 8, 40, 130])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 9), (9, 1), (70, 33), (33, 70)])
def test_value_head_size_and_lengths(target, head_dim_v, seqlen_q, seqlen_k):
    target.check(target.inputs(2, 2, seqlen_q, seqlen_k, 8, head_dim_v))


BROADCASTS = [
    ((5, 8), (3, 7, 8), (3, 7, 8)),
    ((3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ((2, 3, 5, 8), (3, 7, 8), (3, 7, 8)),
    ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
    ((1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),  # multi-query without enable_gqa
    ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 7, 6)),
    ((2, 3, 5, 8), (2, 1, 7, 8), (2, 3, 7, 6)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (7, 6)),
    ((3, 5, 8), (3, 7, 8), (2, 3, 7, 6)),
    ((5, 8), (7, 8), (2, 3, 7, 6)),
    ((1, 3, 5, 8), (1, 3, 7, 8), (4, 3, 7, 6)),
    ((2, 1, 3, 5, 8), (1, 4, 1, 7, 8), (2, 4, 3, 7, 6)),
    ((2, 1, 1, 3, 5, 8), (4, 3, 7, 8), (2, 1, 1, 7, 6)),
    ((4, 5, 8), (1, 7, 8), (1, 7, 8)),
]


@contract(7)
@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_leading_dimensions_broadcast(target, shapes, is_causal):
    inputs = target.random(*shapes)
    results = target.check(inputs, is_causal=is_causal)
    assert results["out"].shape == F.scaled_dot_product_attention(*inputs.tensors.values()).shape
    for name, x in inputs.tensors.items():
        assert results[name].shape == x.shape


EMPTY = [
    ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    ((2, 3, 0, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
    ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 8)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
    ((2, 3, 5, 0), (2, 3, 7, 0), (2, 3, 7, 8)),
    ((2, 3, 5, 0), (2, 3, 7, 0), (2, 3, 7, 0)),
    ((5, 8), (0, 8), (0, 8)),
    ((0, 8), (7, 8), (7, 8)),
    ((3, 5, 0), (3, 7, 0), (3, 7, 8)),
    ((2, 0, 3, 5, 8), (2, 0, 3, 7, 8), (2, 0, 3, 7, 8)),
]


@contract(10)
@pytest.mark.parametrize(
    **in_turn(**{"kind, shapes": list(product(["none", "causal", "bool", "float"], EMPTY))}, dtype=FLOATS), ids=str
)
def test_empty_dimensions(target, shapes, kind, dtype):
    mask = None
    if kind in ("bool", "float"):
        mask = target.randn(shapes[0][-2], shapes[1][-2], dtype=dtype)
        mask = mask > -5 if kind == "bool" else mask
    results = target.check(target.random(*shapes, dtype=dtype, mask=mask), is_causal=kind == "causal")
    if shapes[1][-2] == 0:
        assert not results["out"].any()


@contract(10)
def test_head_size_zero_is_the_mean_of_value(target, dtype):
    inputs = target.random((2, 3, 5, 0), (2, 3, 7, 0), (2, 3, 7, 8), dtype=dtype)
    out = target.check(inputs)["out"]
    mean = inputs.value.double().mean(-2, keepdim=True).expand(2, 3, 5, 8)
    torch.testing.assert_close(out, mean.to(dtype))


@contract(11)
@pytest.mark.parametrize("sizes", [(70000, 1), (1, 70000), (350, 200)], ids=str)
def test_many_batches_and_heads(target, sizes):
    q, k, v = target.random((*sizes, 2, 4), (*sizes, 3, 4), (*sizes, 3, 4)).tensors.values()
    for x in (q, k, v):
        x.requires_grad_()
    out = target.sdpa(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    # The first and the last problem, and one past 2**16, alone.
    flat = [x.detach().reshape(-1, *x.shape[-2:]) for x in (q, k, v, out, dq, dk, dv)]
    pick = [0, 65535, 65536, flat[0].size(0) - 1]
    q, k, v, out, dq, dk, dv = (x[pick] for x in flat)
    want = testing.expected(q, k, v, grad_out=torch.ones_like(out))
    for name, got in {"out": out, "query": dq, "key": dk, "value": dv}.items():
        x = want[name]
        x.check(got, gradient=name != "out", name=name)


@contract(11)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 70001), (70001, 3)])
def test_long_sequences(target, seqlen_q, seqlen_k):
    # The reference leaves sums to the BLAS, which adds 70001 products one after the other: by float32's rule, which has
    # no term for that, one run in ten or so is beyond it.
    dtype = torch.bfloat16 if target.backend == "reference" else torch.float32
    target.check(target.inputs(1, 1, seqlen_q, seqlen_k, 4, dtype=dtype))


@contract(11)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("seqlen_q", "heads_k", "causal"), [(4200, 2, False), (4201, 2, True), (4201, 1, False)])
def test_long_sequences_of_16_bits(target, dtype, seqlen_q, heads_k, causal):
    # The CPU kernels sum so many rows of dQ half in the output itself.
    inputs = target.inputs(1, 2, seqlen_q, 100, 64, dtype=dtype, heads_k=heads_k)
    target.check(inputs, is_causal=causal, enable_gqa=heads_k == 1)


@contract(11)
@pytest.mark.real_memory
def test_element_offsets_above_two_to_the_31(target):
    # Pages that are never touched take no memory.
    storage = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=target.device)
    far = [storage.as_strided((2, 2, 5, 16), (2**31, 80, 16, 1), 512 * i).normal_() for i in range(3)]
    near = [x.contiguous() for x in far]
    grad_out = target.randn(2, 2, 5, 16, dtype=torch.bfloat16)
    for tensors in (far, [far[0], *near[1:]], [near[0], far[1], near[2]]):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = target.sdpa(*leaves)
        got = (out, *torch.autograd.grad(out, leaves, grad_out))
        want = testing.expected(*near, grad_out=grad_out)
        for name, x in zip(("out", "query", "key", "value"), got, strict=True):
            w = want[name]
            w.check(x, gradient=name != "out", name=name)


@contract(12)
@pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 63, 65, 96, 127, 129, 192, 257, 384, 512])
def test_any_head_size(target, head_dim, dtype):
    target.check(target.inputs(1, 2, 9, 19, head_dim, dtype=dtype), is_causal=head_dim % 2 == 0)


@contract(12)
@pytest.mark.parametrize("seqlen_q", [9, 33])
def test_long_products_keep_their_digits(target, seqlen_q, dtype):
    """A query's only key weighs 1, whatever both passes make of 512 terms: rounding has nowhere to hide."""
    target.check(target.inputs(20, 2, seqlen_q, 40, 512, dtype=dtype), is_causal=True)


# --- scale


@contract(31)
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.5, 1e-30, 0.3, 1.0, 7.0, 1e4, -1e4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_scale(target, scale, is_causal, dtype):
    target.check(target.inputs(1, 2, 9, 19, 8, dtype=dtype), scale=scale, is_causal=is_causal)


@contract(31)
def test_default_scale_uses_the_head_size_of_query(target):
    q, k, v = target.random((2, 2, 9, 20), (2, 2, 19, 20), (2, 2, 19, 3)).tensors.values()
    assert torch.equal(target.sdpa(q, k, v), target.sdpa(q, k, v, scale=1 / math.sqrt(20)))


@pytest.mark.parametrize("softcap", [0.01, 1.0, 5.0, 50.0, 3e3])
@pytest.mark.parametrize("seqlen_q", [1, 33])
def test_softcap(target, softcap, seqlen_q, dtype):
    """Far below, around and far above the scores: a cap that is never reached changes nothing, to rounding."""
    results = target.check(target.inputs(1, 2, seqlen_q, 70, 24, dtype=dtype, mask=("holes", "LS")), softcap=softcap)
    assert results["lse"].isfinite().any()


def test_softcap_off(target):
    q, k, v = target.random((2, 2, 9, 20)).tensors.values()
    for off in (None, 0, 0.0):
        assert torch.equal(target.attention(q, k, v, softcap=off), target.attention(q, k, v))


# --- dtypes and numerics


@contract(36)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 4), (2, 3, 16, 16, 16), (1, 2, 65, 130, 64), (1, 1, 200, 77, 33)], ids=str
)
def test_every_dtype_forward_and_backward(target, dtype, sizes, is_causal):
    results = target.check(target.inputs(*sizes, dtype=dtype), is_causal=is_causal)
    assert {results[n].dtype for n in ("out", "query", "key", "value")} == {dtype}


@contract(36)
def test_the_yardstick_is_torchs_own_maths(dtype):
    """`testing.expected` measures with what F.scaled_dot_product_attention's MATH backend computes."""
    inputs = testing.make_inputs(2, 2, 33, 65, 16, dtype=dtype)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*inputs.tensors.values())
    want = testing.expected(*inputs.tensors.values())["out"]
    assert testing.errors(out, want.exact, want.baseline, unit=want.unit).ratio < 1


@contract(36)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_accumulates_in_float32(target, dtype):
    # 4096 weights of 1/4096 times 1: a running sum kept in 16 bits stops growing long before 1.
    q, k = target.randn(1, 1, 3, 8, dtype=dtype) * 0, target.randn(1, 1, 4096, 8, dtype=dtype)
    out = target.sdpa(q, k, torch.ones(1, 1, 4096, 8, dtype=dtype, device=target.device))
    assert torch.equal(out, torch.ones_like(out))


@contract(39)
def test_scores_beyond_the_float16_range(target):
    q = target.randn(1, 2, 9, 64, dtype=torch.float16) * 200
    # The row that meets itself. Its products differ: equal ones are rounded in one direction, all 64 of them, and the
    # rule's unit is of roundings in either.
    q[..., 4, :] = 200 + q[..., 4, :] / 4
    inputs = testing.Inputs(q, q.flip(-2) + 1, target.randn(1, 2, 9, 64, dtype=torch.float16), None, "200 * randn")
    assert (q.float() @ inputs.key.float().mT).abs().max() > 1e6
    target.check(inputs, gradients=False)
    target.check(inputs, gradients=False, scale=1.0)


@contract(39)
def test_large_float16_values_stay_finite(target):
    q, k, _ = target.inputs(1, 2, 9, 300, 16, dtype=torch.float16).tensors.values()
    value = torch.full((1, 2, 300, 16), 60000.0, dtype=torch.float16, device=target.device)
    assert torch.equal(target.sdpa(q, k, value), value[:, :, :9])


@contract(40)
@pytest.mark.parametrize("shape", ["rising", "falling", "equal", "huge", "hugely negative", "one above the rest"])
def test_rows_of_scores_of_every_shape(target, shape, dtype):
    s = 300
    ramp = torch.linspace(-1.0, 1.0, s, dtype=torch.float64)
    scores = {
        "rising": 90 * ramp,
        "falling": -90 * ramp,
        "equal": torch.full((s,), 7.0, dtype=torch.float64),
        "huge": 2e4 + ramp,
        "hugely negative": -2e4 + ramp,
        "one above the rest": torch.where(torch.arange(s) == s - 1, 500.0, -500.0).double(),
    }[shape]
    query = torch.ones(1, 1, 5, 1, dtype=dtype, device=target.device)
    key = scores.to(target.device, dtype).view(1, 1, s, 1)
    value = target.randn(1, 1, s, 8, dtype=dtype)
    target.check(testing.Inputs(query, key, value, None, f"{shape} scores"), scale=1.0)
    # The weights of a row sum to 1.
    target.check(testing.Inputs(query, key, torch.ones_like(value), None, f"{shape} scores"), scale=1.0)


@contract(42)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3}], ids=str)
@pytest.mark.threads
def test_bitwise_repeatable(target, dtype, options):
    inputs = target.inputs(2, 4, 130, 200, 24, dtype=dtype, mask=None)
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]
    grad_out = target.randn(2, 4, 130, 24, dtype=dtype)
    runs = []
    for _ in range(4):
        torch.manual_seed(1)
        out = target.sdpa(*leaves, **options)
        runs.append((out, *torch.autograd.grad(out, leaves, grad_out)))
    assert torch.are_deterministic_algorithms_enabled()
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@contract(43)
def test_independent_of_default_dtype_and_device(target):
    inputs = target.inputs(1, 2, 9, 17, 8, mask=("float", "BHLS"))
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]
    grad_out = target.randn(1, 2, 9, 8)

    def run():
        torch.manual_seed(3)
        out = target.sdpa(*leaves, dropout_p=0.2)
        return (out, *torch.autograd.grad(out, leaves, grad_out))

    want = run()
    try:
        torch.set_default_dtype(torch.float64)
        in_float64 = run()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        on_meta = run()
    for got in (in_float64, on_meta):
        assert all(torch.equal(a, b) and a.device == b.device for a, b in zip(want, got, strict=True))


# --- memory layout


@contract(44)
@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize(("heads", "head_dim", "is_causal"), [(3, 24, False), (3, 24, True), (2, 21, False)])
def test_any_strides(target, layout, dtype, heads, head_dim, is_causal):
    """Also odd head sizes in rows of even strides, where 16-bit elements cannot be read in pairs up to the end."""
    target.check(target.inputs(2, heads, 19, 37, head_dim, dtype=dtype, layout=layout), is_causal=is_causal)


@contract(44)
@pytest.mark.parametrize("position", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("layout", ["blhd", "e_major", "stepped", "padded"])
def test_one_input_strided_otherwise(target, layout, position):
    layouts = ["contiguous"] * 3
    layouts[position] = layout
    target.check(target.inputs(2, 3, 19, 37, 24, layout=tuple(layouts)))


@contract(44)
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_expanded_inputs(target, dim, name):
    inputs = target.inputs(2, 3, 5, 7, 8).tensors
    inputs[name] = inputs[name].narrow(dim, 0, 1).expand_as(inputs[name])
    assert inputs[name].stride(dim) == 0
    target.check(testing.Inputs(**inputs, attn_mask=None, recipe=f"{name} expanded in dim {dim}"))


@contract(44)
def test_overlapping_windows(target):
    base = target.randn(2, 3, 40)
    windows = base.unfold(-1, 8, 1)  # (2, 3, 33, 8), a step of one element from row to row
    target.check(testing.Inputs(windows[:, :, :9], windows, windows, None, "unfold"))


@contract(44)
def test_odd_strides_on_dimensions_of_size_one(target, dtype):
    q, k, v = target.random((1, 1, 5, 8), (1, 1, 1, 8), (1, 1, 1, 1), dtype=dtype).tensors.values()
    odd = [testing.odd_strides_on_size_one(x) for x in (q, k, v)]
    assert all(12345 in x.stride() for x in odd)
    target.check(testing.Inputs(*odd, None, "odd strides"))
    assert torch.equal(target.sdpa(*odd), target.sdpa(q, k, v))


@contract(44)
def test_one_tensor_as_query_key_and_value(target):
    x = target.randn(2, 3, 9, 8, requires_grad=True)
    leaves = [x.detach().clone().requires_grad_() for _ in range(3)]
    grad_out = target.randn(2, 3, 9, 8)
    (got,) = torch.autograd.grad(target.sdpa(x, x, x), x, grad_out)
    grads = torch.autograd.grad(target.sdpa(*leaves), leaves, grad_out)
    torch.testing.assert_close(got, sum(grads))


@contract(45)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_output_layout_follows_query(target, layout, options):
    inputs = target.inputs(2, 3, 5, 7, 8, layout=layout)
    out = target.sdpa(*inputs.tensors.values(), **options)
    if layout in ("blhd", "packed"):
        assert out.transpose(1, 2).is_contiguous()
    elif layout in ("contiguous", "offset", "padded", "stepped"):
        assert out.is_contiguous()
    assert out.stride(-1) == 1
    by_stride = sorted(range(4), key=out.stride, reverse=True)
    assert out.permute(by_stride).is_contiguous()  # dense: no gaps, no overlap


@contract(45)
def test_output_of_one_key_is_no_view_of_value(target):
    q, k, v = target.random((1, 1, 1, 8)).tensors.values()
    out = target.sdpa(q, k, v)
    assert out.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
    out.zero_()
    assert v.all()


@contract(46)
def test_lazily_negated_views(target):
    x = torch.randn(2, 3, 9, 8, dtype=torch.complex64, device=target.device)
    negated = x.conj().imag
    assert negated.is_neg()
    plain = negated.resolve_neg()
    assert torch.equal(target.sdpa(negated, negated, negated), target.sdpa(plain, plain, plain))
    q, k, v = (target.randn(2, 3, 9, 8, requires_grad=True) for _ in range(3))
    out = target.sdpa(q, k, v)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), negated, retain_graph=True),
        torch.autograd.grad(out, (q, k, v), plain),
        strict=True,
    ):
        assert torch.equal(a, b)


# --- named cases

SMALL_CASES = [
    pytest.param(c, marks=[] if c.dtype == "fp32" else pytest.mark.prove)
    for c in cases.CASES
    if c.batch * c.heads_q * c.seqlen_q * c.seqlen_k * c.head_dim <= 2**22
]


@contract(65)
@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda c: c.name)
def test_named_cases(target, case):
    """The small ones of the cases that the benchmark measures, through the benchmark's own description of them."""
    target.check(case.inputs(target.device, seed=int(torch.randint(2**31, ()))), **case.options)


# --- scores whose size changes along the keys: kernels that work from a first guess of a row's maximum


def stepped_inputs(target, sizes, step, at, dtype):
    """Random inputs whose scores are larger by `step` from key `at` on, in every other query, smaller in the others."""
    inputs = target.inputs(*sizes, dtype=dtype)
    direction = torch.zeros(sizes[-1], dtype=dtype, device=target.device)
    direction[0] = 1
    sign = 1 - 2 * (torch.arange(sizes[2], device=target.device) % 2)
    query = inputs.query * (1 - direction) + sign[:, None] * direction
    key = inputs.key * (1 - direction)
    key[..., at:, :] += (step * math.sqrt(sizes[-1])) * direction
    return testing.Inputs(query, key, inputs.value, None, inputs.recipe)


GROWING = [{}, {"is_causal": True}, {"window": (90, 0)}, {"scale": -0.25}]


@pytest.mark.parametrize(
    **in_turn(**{"step, at, options": list(product([10.0, 30.0, 200.0], [1, 7, 100, 250], GROWING))}, dtype=FLOATS),
    ids=str,
)
def test_scores_that_grow_along_the_keys(target, step, at, options, dtype):
    target.check(stepped_inputs(target, (1, 2, 260, 260, 16), step, at, dtype), **options)


@pytest.mark.parametrize("step", [30.0, 200.0])
def test_a_row_does_not_depend_on_its_neighbours_scores(target, step, dtype):
    q, k, v = stepped_inputs(target, (1, 2, 260, 260, 16), step, 100, dtype).tensors.values()
    together = target.attention(q, k, v)
    falling = q.clone()
    falling[..., ::2, :] = falling[..., 1::2, :]  # without those whose maximum comes late
    assert torch.equal(target.attention(falling, k, v)[..., 1::2, :], together[..., 1::2, :])
