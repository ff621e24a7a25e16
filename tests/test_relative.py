"""Relative bias: a number for each distance from a query to a key, in O(L) memory."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import attnkern
from attnkern import relative, testing
from matrix import tagged

CALLS = tagged("relative")


@pytest.mark.parametrize("name", CALLS)
def test_output_lse_and_gradients(target, name, dtype):
    target.check_call(CALLS[name], dtype)


@pytest.mark.parametrize("center", [0, 4, 8])
@pytest.mark.parametrize("shape", [(9,), (1, 9), (4, 9), (2, 1, 9), (2, 4, 9)])
def test_the_ends_count_for_what_is_beyond_them(target, shape, center):
    q, k, v = target.inputs(2, 4, 30, 40, 8).tensors.values()
    table = target.randn(*shape)
    table.requires_grad_()
    bias = testing.by_distance(table, center, 30, 40)
    got = target.attention(q, k, v, relative_bias=table, relative_bias_center=center)
    want = target.attention(q, k, v, bias)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for x, y in zip(*(torch.autograd.grad(out.square().sum(), table) for out in (got, want)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_dropout(target):
    call = CALLS["table"]
    target.check_dropout(call.inputs(target.device, dtype=torch.float32), dropout_p=0.3)


@pytest.mark.parametrize("threads", [1, 2, 5, 16])
def test_a_gradient_of_many_tasks(threads):
    """Tasks that share a head, or whose heads share a table, add up in the same order whatever the threads do."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for heads in (1, 3):
            inputs = testing.make_inputs(1, heads, 300, 500, 16).with_relative_bias(1, 799, torch.float32, 1)
            results = [testing.check_attention(inputs, backend="cpu")["relative_bias"] for _ in range(2)]
            first = testing.make_inputs(1, heads, 300, 500, 16, seed=3)
            leaves = [x.requires_grad_() for x in (first.query, first.key, first.value, inputs.relative_bias)]
            out = attnkern.attention(*leaves[:3], relative_bias=leaves[3])
            once, again = (torch.autograd.grad(out.sum(), leaves[3], retain_graph=True)[0] for _ in range(2))
            assert torch.equal(once, again)
            assert results[0].shape == results[1].shape == once.shape
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("only", ["query", "relative_bias", "value"])
def test_a_gradient_alone(target, only):
    inputs = target.inputs(2, 2, 33, 40, 8).with_relative_bias(2, 72, torch.float32, 1)
    tensors = {n: x.detach().requires_grad_(n == only) for n, x in inputs.tensors.items()}
    out = target.attention(**tensors)
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[only])
    every = {n: x.detach().requires_grad_() for n, x in inputs.tensors.items()}
    want = torch.autograd.grad(target.attention(**every).square().sum(), every[only])[0]
    torch.testing.assert_close(grad, want)


def test_memory_is_that_of_the_table():
    """Neither pass holds an L x S."""
    code = """
import resource, torch, attnkern
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 2, 4096, 16).requires_grad_() for _ in range(3))
table = torch.randn(2, 8191).requires_grad_()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small = [x[:, :, :64].detach().requires_grad_() for x in (q, k, v)]
attnkern.attention(*small, relative_bias=table.detach()[:, :127].requires_grad_()).sum().backward()
before = peak()
attnkern.attention(q, k, v, relative_bias=table).sum().backward()
print(peak() - before)
"""
    used = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert used < 16e6  # 2 x 4096 x 4096 numbers are 134e6 bytes


def test_packed_sequences(target):
    lengths = [20, 1, 33, 0, 7]
    ends = torch.tensor([0, *lengths], device=target.device).cumsum(0).to(torch.int32)
    leaves = [target.randn(61, heads, 16).requires_grad_() for heads in (4, 2, 2)] + [
        target.randn(4, 41).requires_grad_()
    ]
    q, k, v, table = leaves
    options = {"enable_gqa": True, "relative_bias": table}
    packed = attnkern.varlen_attention(q, k, v, ends, is_causal=True, backend=target.backend, **options)
    parts = []
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        sequence = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        alone = target.attention(*sequence, is_causal=True, relative_bias_center=20, **options)
        parts.append(alone[0].transpose(0, 1))
    alone, grad = torch.cat(parts), torch.randn_like(packed)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    for x, y in zip(*(torch.autograd.grad(out, leaves, grad) for out in (packed, alone)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="relative_bias needs cu_seqlens_k=None"):
        attnkern.varlen_attention(q, k, v, ends, ends, **options)


def test_a_center_of_numpy():
    q, table = torch.randn(1, 2, 5, 8), torch.randn(2, 7)
    got, want = (attnkern.attention(q, q, q, relative_bias=table, relative_bias_center=n) for n in (np.int64(2), 2))
    assert torch.equal(got, want)


def test_jagged_sequences():
    sequences = [torch.randn(n, 2, 8) for n in (5, 9, 2)]
    x = torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)
    table = torch.randn(2, 17)
    out = attnkern.attention(x, x, x, relative_bias=table, relative_bias_center=8)
    for got, one in zip(out.unbind(), sequences, strict=True):
        y = one.transpose(0, 1)[None]
        want = attnkern.attention(y, y, y, relative_bias=table, relative_bias_center=8)
        torch.testing.assert_close(got, want[0])
    other = torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="relative_bias must be None beside jagged nested tensors of other offsets"):
        attnkern.attention(x, other, other, relative_bias=table, relative_bias_center=8)


def test_transforms():
    shape = (2, 4, 3, 3), (2, 2, 5, 3), (2, 2, 5, 2)
    q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shape)
    for sizes, center in (((4, 7), None), ((1, 4), 2)):
        table = torch.randn(sizes, dtype=torch.float64, requires_grad=True)
        options = {"relative_bias_center": center, "enable_gqa": True, "is_causal": True}

        def call(q, k, v, table, options=options):
            return attnkern.attention(q, k, v, relative_bias=table, return_lse=True, **options)

        batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
        assert torch.autograd.gradcheck(call, (q, k, v, table), check_forward_ad=True, **batched)
        assert torch.autograd.gradgradcheck(call, (q, k, v, table), check_fwd_over_rev=True)

        def of_table(table, options=options):
            out = attnkern.attention(q.detach(), k.detach(), v.detach(), relative_bias=table, **options)
            return out.sin().sum()

        three = torch.randn(3, *sizes, dtype=torch.float64)
        for function in (of_table, torch.func.grad(of_table)):
            torch.testing.assert_close(torch.func.vmap(function)(three), torch.stack([function(x) for x in three]))


def test_compiled():
    leaves = [torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3)] + [torch.randn(4, 17, requires_grad=True)]

    def call(q, k, v, table):
        return attnkern.attention(q, k, v, relative_bias=table, is_causal=True)

    out, want = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves), call(*leaves)
    assert torch.equal(out, want)
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), leaves) for o in (out, want)), strict=True):
        assert torch.equal(x, y)


def test_one_graph_for_all_lengths():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q, k, v, table):
        return attnkern.attention(q, k, v, relative_bias=table, relative_bias_center=8)

    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    table = torch.randn(4, 17)
    for length in (5, 9, 33):
        q, k, v = (torch.randn(2, 4, length, 8) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v, table), call(q, k, v, table))
    assert counter.frame_count == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_at_the_edge(target, value):
    """As a dense bias has them."""
    q, k, v = target.inputs(1, 2, 40, 50, 8).tensors.values()
    table = target.randn(2, 89)
    table[0, 30] = value
    dense = testing.by_distance(table, None, 40, 50)
    for got, want in zip(
        target.attention(q, k, v, relative_bias=table, return_lse=True),
        target.attention(q, k, v, dense, return_lse=True),
        strict=True,
    ):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_alibi():
    slopes = torch.tensor([0.5, 0.25])
    i, j = torch.arange(5)[:, None] + 3, torch.arange(8)
    want = -slopes[:, None, None] * (j - i).abs()
    assert torch.equal(relative.dense(attnkern.alibi(slopes, 5, 8), 5, 8), want)
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 8, 4)
    table = attnkern.alibi(slopes, 5, 8)
    torch.testing.assert_close(
        attnkern.attention(q, k, k, relative_bias=table), F.scaled_dot_product_attention(q, k, k, want)
    )


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("lengths", [(40, 40), (1, 300), (7, 200)])
def test_t5_relative_bias(bidirectional, lengths):
    """The buckets of transformers' T5."""
    from transformers.models.t5 import modeling_t5 as t5

    weight = torch.randn(32, 4)
    seqlen_q, seqlen_k = lengths
    i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    buckets = t5.T5Attention._relative_position_bucket(j - i, bidirectional, 32, 128)
    table = attnkern.t5_relative_bias(weight, 32, 128, bidirectional, *lengths)
    assert torch.equal(relative.dense(table, *lengths), weight[buckets].permute(2, 0, 1))


X = torch.zeros(1, 2, 4, 8)
BAD = {
    "a list": ({"relative_bias": [0.0]}, TypeError, "argument 'relative_bias' must be Tensor or None, not list"),
    "no number": ({"relative_bias": torch.zeros(2, 0)}, RuntimeError, r"relative_bias .* got \(2, 0\)"),
    "three heads": (
        {"relative_bias": torch.zeros(3, 7)},
        RuntimeError,
        r"relative_bias .* with 2 heads in a batch of 1, got \(3, 7\)",
    ),
    "another batch": ({"relative_bias": torch.zeros(2, 2, 7)}, RuntimeError, r"relative_bias .* got \(2, 2, 7\)"),
    "four dimensions": ({"relative_bias": torch.zeros(1, 1, 2, 7)}, RuntimeError, r"got \(1, 1, 2, 7\)"),
    "another dtype": (
        {"relative_bias": torch.zeros(7).double()},
        RuntimeError,
        "relative_bias must be float32, got float64",
    ),
    "bools": ({"relative_bias": torch.zeros(7) > 0}, RuntimeError, "relative_bias must be float32, got bool"),
    "a sparse one": ({"relative_bias": torch.zeros(7).to_sparse()}, RuntimeError, "relative_bias must be a dense"),
    "another device": ({"relative_bias": torch.zeros(7, device="meta")}, RuntimeError, "must be on query's device cpu"),
    "a center outside": (
        {"relative_bias": torch.zeros(7), "relative_bias_center": 7},
        ValueError,
        "relative_bias_center must be an index into the 7 numbers of relative_bias, got 7",
    ),
    "a center below": ({"relative_bias": torch.zeros(7), "relative_bias_center": -1}, ValueError, "got -1"),
    "no center": ({"relative_bias": torch.zeros(7), "relative_bias_center": 1.0}, TypeError, "'relative_bias_center'"),
    "a center alone": ({"relative_bias_center": 1}, ValueError, "relative_bias_center needs relative_bias"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    options, error, message = BAD[case]
    with pytest.raises(error, match=f"attnkern: .*{message}"):
        attnkern.attention(X, X, X, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attnkern.alibi([0.5], 2, 2), TypeError, "argument 'slopes' must be Tensor, not list"),
        (
            lambda: attnkern.alibi(torch.zeros(2, 1), 2, 2),
            RuntimeError,
            r"slopes must have the shape \(H,\), got \(2, 1\)",
        ),
        (
            lambda: attnkern.alibi(torch.zeros(2).long(), 2, 2),
            TypeError,
            "slopes must be a floating-point tensor, got int64",
        ),
        (lambda: attnkern.alibi(torch.zeros(2), -1, 2), ValueError, "seqlen_q must be at least 0, got -1"),
        (
            lambda: attnkern.t5_relative_bias(torch.zeros(8, 2), 32, 128, True, 2, 2),
            RuntimeError,
            "weight must have 32 rows",
        ),
        (
            lambda: attnkern.t5_relative_bias(torch.zeros(8, 2), 8, 2, True, 2, 2),
            ValueError,
            "num_buckets must be at least 4 and max_distance above 2, got 8 and 2",
        ),
        (lambda: attnkern.alibi(torch.zeros(2), 2, 2.0), TypeError, "argument 'seqlen_k' must be int, not float"),
        (
            lambda: attnkern.t5_relative_bias(torch.zeros(8, 2), 8.0, 32, True, 2, 2),
            TypeError,
            "argument 'num_buckets' must be int, not float",
        ),
        (
            lambda: attnkern.t5_relative_bias(torch.zeros(8, 2), 8, 32, "decoder", 2, 2),
            TypeError,
            "argument 'bidirectional' must be bool, not str",
        ),
    ],
)
def test_bad_arguments_of_the_makers(call, error, message):
    with pytest.raises(error, match=f"attnkern: {message}"):
        call()
