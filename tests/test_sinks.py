"""Sinks: logits of the heads that take part in the softmax and have no value."""

import math

import pytest
import torch

import attnkern
from attnkern import ops, testing
from attnkern.params import GRAD_SINKS
from attnkern.problem import Problem
from attnkern.signatures import SINKS
from matrix import tagged

CALLS = tagged("sinks")


@pytest.mark.parametrize("name", CALLS)
def test_output_lse_and_gradients(target, name, dtype):
    target.check_call(CALLS[name], dtype)


@pytest.mark.parametrize("name", ["full", "bias", "one query"])
def test_dropout(target, name):
    """Drops weights of keys; the sink's share of a row stays."""
    call = CALLS[name]
    target.check_dropout(call.inputs(target.device, dtype=torch.float32), dropout_p=0.3, **call.options)


def test_many_threads_split_keys_and_heads():
    """Parts of a row meet its sink once."""
    inputs = testing.make_inputs(1, 1, 1, 5000, 64).with_sinks("H", torch.float32, 1)
    for threads in (1, 2, 8):
        torch.set_num_threads(threads)
        testing.check_attention(inputs, backend="cpu")


def with_column(q, k, v, sinks):
    """Attention with a key more, whose score is the sink and whose value is 0."""
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    column = sinks.double()[..., None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., :-1] @ v.double(), scores.logsumexp(-1)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("sink", [math.inf, -math.inf, math.nan, 1e30, -1e30, 3e38])
def test_values_at_the_edge(target, sink, queries):
    q, k, v = (x.requires_grad_() for x in target.inputs(1, 2, queries, 50, 8).tensors.values())
    sinks = target.randn(2).index_fill(0, torch.tensor(1, device=target.device), sink).requires_grad_()
    out, lse = target.attention(q, k, v, sinks=sinks, return_lse=True)
    exact, exact_lse = with_column(q, k, v, sinks)
    numbers = ~exact.isnan()
    assert torch.equal(out.isnan(), ~numbers)
    torch.testing.assert_close(out[numbers].double(), exact[numbers], rtol=1e-5, atol=1e-6)
    if math.isfinite(sink):
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    got = torch.autograd.grad(out.sum(), (q, k, v, sinks))
    want = torch.autograd.grad(exact.sum(), (q, k, v, sinks))
    for x, y in zip(got, want, strict=True):  # of the head whose sink is ordinary; of the other where it is a number
        numbers = y.isfinite()
        torch.testing.assert_close(x[numbers], y[numbers], rtol=1e-4, atol=1e-5)


def test_without_keys(target):
    q, k = target.randn(2, 3, 5, 8), target.randn(2, 3, 0, 8)
    sinks = target.randn(2, 3).requires_grad_()
    out, lse = target.attention(q, k, k, sinks=sinks, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, sinks[..., None].expand(lse.shape))
    (grad,) = torch.autograd.grad(lse.sum(), sinks)
    assert torch.equal(grad, torch.full_like(grad, 5.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_heads_without_keys(dtype):
    """So many that the backward pass would prefetch the next head's rows, spread over work that there isn't."""
    q, k = (torch.randn(2, 128, n, 64, dtype=dtype, requires_grad=True) for n in (200, 0))
    sinks = torch.randn(128, requires_grad=True)
    out = attnkern.attention(q, k, k, sinks=sinks, backend="cpu")
    assert not out.any()
    for x, grad in zip((q, k, sinks), torch.autograd.grad(out.sum(), (q, k, sinks)), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_shapes(target, ranks):
    """(Hq,) and whatever broadcasts to the output's leading dimensions."""
    lead = (2, 3, 4)[5 - ranks :] if ranks > 2 else ()
    q, k, v = (target.randn(*lead, n, 8) for n in (5, 7, 7))
    full = target.randn(*(lead or (1,)))
    shapes = [full.shape[n:] for n in range(full.dim())] + [(1,)]
    for shape in shapes:
        sinks = full[tuple(0 for _ in range(full.dim() - len(shape)))][tuple(slice(n) for n in shape)]
        assert sinks.shape == shape
        got = target.attention(q, k, v, sinks=sinks, return_lse=True)
        column = sinks if lead else sinks[0]
        for x, y in zip(got, with_column(q, k, v, column.expand(lead)), strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def test_sinks_of_the_query_dtype(target):
    """A parameter of bfloat16 is read as its float32; its gradient has its dtype."""
    inputs = target.inputs(2, 4, 33, 33, 16, dtype=torch.bfloat16)
    sinks = target.randn(4, dtype=torch.bfloat16).requires_grad_()
    wide = sinks.detach().float().requires_grad_()
    grads = []
    for given in (sinks, wide):
        out = target.attention(inputs.query, inputs.key, inputs.value, sinks=given)
        grads.append(torch.autograd.grad(out.float().square().sum(), given)[0])
    assert grads[0].dtype == torch.bfloat16
    assert torch.equal(grads[0], grads[1].bfloat16())


def test_parts_of_which_one_has_the_sinks(target):
    """merge_attention of them is the whole: the log-sum-exp holds the sink."""
    q, k, v = target.inputs(2, 4, 40, 90, 16).tensors.values()
    sinks = target.randn(4)
    first = target.attention(q, k[:, :, :30], v[:, :, :30], sinks=sinks, return_lse=True)
    rest = target.attention(q, k[:, :, 30:], v[:, :, 30:], return_lse=True)
    whole = target.attention(q, k, v, sinks=sinks, return_lse=True)
    for x, y in zip(attnkern.merge_attention(first, rest), whole, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [None, [2, 0]], ids=str)
@pytest.mark.parametrize("ranges", [False, True], ids=["", "ranges"])
def test_weights_sum_to_less_than_one(target, heads, ranges):
    """By what the sink takes; times the values they are the output, with and without the call's log-sum-exp."""
    inputs = target.inputs(2, 4, 33, 50, 16, heads_k=2)
    inputs = inputs.with_ranges("anything", "B1L", 2, torch.int32, 1) if ranges else inputs
    q, k, v = inputs.query, inputs.key, inputs.value
    sinks = target.randn(2, 4)
    options = {"enable_gqa": True, "is_causal": not ranges, "key_ranges": inputs.key_ranges, "sinks": sinks}
    out, lse = target.attention(q, k, v, return_lse=True, **options)
    chosen = slice(None) if heads is None else heads
    out, left = out[:, chosen], 1.0 - (sinks.unsqueeze(-1) - lse).exp()[:, chosen]
    values = v.repeat_interleave(2, 1)[:, chosen]
    for given in (lse, None):
        weights = attnkern.attention_weights(q, k, lse=given, heads=heads, **options)
        torch.testing.assert_close(weights @ values, out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights.sum(-1), left, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_lse", [False, True], ids=["", "lse"])
def test_gradients_through_weights_are_those_of_the_call(target, with_lse):
    leaves = [x.requires_grad_() for x in (*target.inputs(2, 4, 20, 31, 16).tensors.values(), target.randn(4))]
    q, k, v, sinks = leaves
    out, lse = target.attention(q, k, v, sinks=sinks, return_lse=True)
    weights = attnkern.attention_weights(q, k, sinks=sinks, lse=lse if with_lse else None)
    grad = torch.randn_like(out)
    for x, y in zip(*(torch.autograd.grad(o, leaves, grad) for o in (weights @ v, out)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("sink", [-math.inf, LOWEST, -1e30, 2e4, 3e38])
@pytest.mark.parametrize("level", [LOWEST, 2e4])
def test_weights_beside_large_numbers(level, sink):
    """A row whose scores are all one large number, beside which its log-sum-exp has no room for their mean."""
    q, k, bias = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 7, 8), torch.randn(5, 7)
    q[:, :, 2], bias[2] = 0.0, level
    sinks = torch.tensor([sink])
    scores = q.double() @ k.double().mT / math.sqrt(8) + bias
    exact = torch.cat([scores, sinks.double().expand(1, 1, 5, 1)], -1).softmax(-1)[..., :-1]
    _, lse = attnkern.attention(q, k, k, bias, sinks=sinks, return_lse=True)
    for given in (lse, None):
        weights = attnkern.attention_weights(q, k, bias, lse=given, sinks=sinks)
        torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (9, 0)}], ids=str)
def test_packed_sequences(target, options):
    lengths = [20, 1, 33, 0, 7]
    ends = torch.tensor([0, *lengths], device=target.device).cumsum(0).to(torch.int32)
    q, k, v = (target.randn(61, heads, 16) for heads in (4, 2, 2))
    leaves = [x.requires_grad_() for x in (q, k, v, target.randn(4))]
    *_, sinks = leaves
    packed = attnkern.varlen_attention(q, k, v, ends, sinks=sinks, enable_gqa=True, backend=target.backend, **options)
    parts = []
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        sequence = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(target.attention(*sequence, sinks=sinks, enable_gqa=True, **options)[0].transpose(0, 1))
    alone = torch.cat(parts)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(packed)
    for x, y in zip(*(torch.autograd.grad(out, leaves, grad) for out in (packed, alone)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", [None, (2, 3, 600, 300), (1, 3, 1, 300)], ids=str)
def test_gradient_is_the_same_beside_any_others_and_for_any_threads(mask):
    """To the bit: of sinks alone, with that of q, of a mask, or all of them."""
    q, k, v = testing.make_inputs(2, 3, 600, 300, 16).tensors.values()
    bias = None if mask is None else torch.randn(mask)
    sinks, grad, results = torch.nn.Parameter(torch.randn(3)), torch.randn(2, 3, 600, 16), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        for chosen in ((), (q,), (bias,), (q, k, v, bias)):
            others = [x.requires_grad_() for x in chosen if x is not None]
            out = attnkern.attention(q, k, v, bias, sinks=sinks, backend="cpu")
            results.append(torch.autograd.grad(out, [sinks, *others], grad)[0])
            for x in others:
                x.requires_grad_(False)
    assert results[0].any()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_gradient_over_sequences_is_the_same_for_any_threads(shape):
    """To the bit, whether a thread has whole sequences or all share one."""
    q, k, v = testing.make_inputs(2, 4, 1100, 200, 16, heads_k=2).tensors.values()
    begins = torch.arange(1100, dtype=torch.int32) // 275 * 50
    ranges = torch.stack([begins, begins + 50], -1)[None, None, :, None]
    problem = Problem.from_sdpa(q, k, v, enable_gqa=True, sinks=torch.randn(shape), key_ranges=ranges)
    inputs, params, grads = problem.inputs(), problem.params, []
    out, lse = ops.forward(*inputs, *params, True, "cpu")
    cotangents = torch.randn_like(out), torch.randn_like(lse)
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        grads.append(ops.backward(*cotangents, *inputs, out, lse, *params, GRAD_SINKS, "cpu")[SINKS])
    assert all(torch.equal(grad, grads[0]) for grad in grads)


@pytest.mark.parametrize("shared", [False, True], ids=["ranges of each entry", "shared ranges"])
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_ranges_that_fall_apart(target, shape, shared):
    """Each sequence has a share of the gradient, one without keys too: there the log-sum-exp is the sink."""
    q, k, v = target.inputs(2, 4, 60, 50, 16, heads_k=2).tensors.values()
    leaves = [x.requires_grad_() for x in (q, k, v, target.randn(*shape))]
    *_, sinks = leaves
    ends = [(0, 0)] * 5 + [(3, 20)] * 15 + [(20, 41)] * 40, [(0, 7)] * 31 + [(9, 50)] * 29
    ranges = torch.tensor(ends[: 1 if shared else 2], device=target.device)[:, None, :, None]
    keys = torch.arange(50, device=target.device)
    mask = (keys >= ranges[..., 0]) & (keys < ranges[..., 1])
    grads = []
    for given in ({"key_ranges": ranges}, {"attn_mask": mask}):
        results = target.attention(q, k, v, sinks=sinks, enable_gqa=True, return_lse=True, **given)
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(results, leaves, [torch.randn_like(x) for x in results]))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_transforms():
    """Of sinks alone and of all inputs, by every way to get there."""
    q, k, v = (x.requires_grad_() for x in testing.make_inputs(2, 2, 4, 5, 3, dtype=torch.float64).tensors.values())
    for shape in ((2,), (2, 2)):
        sinks = torch.randn(shape, dtype=torch.float64, requires_grad=True)

        def call(q, k, v, sinks):
            return attnkern.attention(q, k, v, sinks=sinks, is_causal=True, return_lse=True)

        arguments = (q, k, v, sinks)
        batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
        assert torch.autograd.gradcheck(call, arguments, check_forward_ad=True, **batched)
        assert torch.autograd.gradgradcheck(call, arguments, check_fwd_over_rev=True)

        def of_sinks(sinks):
            return attnkern.attention(q.detach(), k.detach(), v.detach(), sinks=sinks).sum((0, 2, 3)).sin().sum()

        three = torch.randn(3, *shape, dtype=torch.float64)
        for function in (of_sinks, torch.func.grad(of_sinks)):
            want = torch.stack([function(x) for x in three])
            torch.testing.assert_close(torch.func.vmap(function)(three), want)
        hessian = torch.func.jacrev(torch.func.jacrev(of_sinks))(sinks.detach())
        torch.testing.assert_close(torch.func.hessian(of_sinks)(sinks.detach()), hessian)


def test_compiled():
    q, k, v = (x.requires_grad_() for x in testing.make_inputs(2, 4, 9, 9, 8, heads_k=2).tensors.values())
    sinks = torch.randn(4, requires_grad=True)

    def call(q, k, v, sinks):
        return attnkern.attention(q, k, v, sinks=sinks, is_causal=True, enable_gqa=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, want = compiled(q, k, v, sinks), call(q, k, v, sinks)
    assert torch.equal(out, want)
    leaves = (q, k, v, sinks)
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), leaves) for o in (out, want)), strict=True):
        assert torch.equal(x, y)


def test_a_float_parameter_needs_no_copy_and_no_detour():
    """A decoding step with sinks goes past the dispatcher, as one without."""
    from attnkern.backends import cpu

    q, k = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 100, 64)
    options = 0, False, None, False, None, "top_left", None, None
    for sinks in (torch.randn(4), torch.randn(1, 4), torch.nn.Parameter(torch.randn(4), requires_grad=False)):
        out = cpu.call(q, k, k, None, *options, sinks, None, False, None)
        assert out is not None
        assert torch.equal(out, attnkern.attention(q, k, k, sinks=sinks))
    assert cpu.call(q, k, k, None, *options, torch.randn(4).requires_grad_(), None, False, None) is None
    assert cpu.call(q, k, k, None, *options, torch.randn(3), None, False, None) is None


def test_training_takes_a_parameter_as_it_is():
    """Past the dispatcher, and without a view that autograd would go back through."""
    from attnkern.backends import cpu

    q, k, v = testing.make_inputs(2, 4, 9, 9, 8).tensors.values()
    sinks = torch.nn.Parameter(torch.randn(4))
    out = attnkern.attention(q, k, v, sinks=sinks)  # kept: in torch 2.11 a Function's node ends with its outputs
    assert [edge.variable is sinks for edge, _ in out.grad_fn.next_functions if edge is not None] == [True]

    problem = Problem.from_sdpa(q, k, v, sinks=sinks.detach())
    given, inputs, params = problem.given(), problem.inputs(), problem.params
    assert [tuple(x.sinks.shape) for x in (given, inputs)] == [(4,), (1, 4)]
    grads = []
    with torch.no_grad():
        for tensors in (given._replace(sinks=sinks), inputs):
            out, lse = cpu.forward(*tensors, *params, True, "cpu")
            saved, needed = (*tensors, out, lse), (False, False, False, False, True)
            grads.append(cpu.backward(torch.ones_like(out), None, saved, params, needed)[-1])
        grads.append(ops.backward(torch.ones_like(out), None, *saved, *params, GRAD_SINKS, "cpu")[-1])
    assert [tuple(x.shape) for x in grads] == [(4,), (1, 4), (1, 4)]
    assert torch.equal(grads[0], grads[1][0])
    assert torch.equal(grads[1], grads[2])


BAD = {
    "a list": ([0.0, 1.0], TypeError, r"argument 'sinks' must be Tensor or None, not list"),
    "a head too many": (
        torch.zeros(3),
        RuntimeError,
        r"sinks .* one number for each .*heads, \(2,\) or \(1, 2\), got \(3,\)",
    ),
    "a number": (torch.zeros(()), RuntimeError, r"sinks .* got \(\)"),
    "a row for each query": (torch.zeros(1, 2, 4), RuntimeError, r"sinks .* got \(1, 2, 4\)"),
    "another batch": (torch.zeros(3, 2), RuntimeError, r"sinks .* got \(3, 2\)"),
    "another dtype": (torch.zeros(2, dtype=torch.float64), RuntimeError, r"sinks must be float32, got float64"),
    "integers": (torch.zeros(2, dtype=torch.int64), RuntimeError, r"sinks must be float32, got int64"),
    "another device": (torch.zeros(2, device="meta"), RuntimeError, r"sinks must be on query's device cpu, got meta"),
    "a sparse one": (torch.zeros(2).to_sparse(), RuntimeError, r"sinks must be a dense \(strided\) tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sinks(case):
    sinks, error, message = BAD[case]
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(error, match=f"attnkern: {message}"):
        attnkern.attention(x, x, x, sinks=sinks)
