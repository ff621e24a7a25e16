"""Calls past torch's dispatcher (csrc/common/direct.h): the operators' results to the bit, where nobody can tell."""

import contextlib
import functools
import gc
import inspect
import itertools
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attnkern
import routes
from attnkern import _library, ops, plain, testing
from attnkern.backends import choice, cpu
from attnkern.backends.failed import CannotBuild
from attnkern.params import DTYPES, MAX_HEAD_DIM, UNBOUNDED, AttentionParams
from attnkern.problem import Problem
from attnkern.signatures import GRAD_BITS, Inputs
from random_problems import random_problem

sdpa = attnkern.scaled_dot_product_attention


PARAMETERS = [x for x in inspect.signature(attnkern.attention).parameters.values() if "relative" not in x.name]


def call(*given, **options):
    """`cpu.call`: the arguments of `attention` in their order, but for a relative bias, with its defaults."""
    rest = PARAMETERS[len(given) :]
    assert options.keys() <= {x.name for x in rest}
    return cpu.call(*given, *(options.get(x.name, x.default) for x in rest))


@pytest.fixture
def operators(monkeypatch):
    """Makes every call go by the operators, inside the context that it returns."""

    @contextlib.contextmanager
    def only():
        with monkeypatch.context() as patch:
            for name in ("call", "forward", "backward"):
                patch.setattr(cpu, name, lambda *arguments: None)
            yield

    return only


def assert_same(direct, by_operator):
    for mine, theirs in zip(direct, by_operator, strict=True):
        if mine is None:
            assert theirs.shape == (0,)
        else:
            assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
            assert mine.untyped_storage().resizable()
            bits = [x.unsqueeze(-1).view(torch.uint8) for x in (mine, theirs)]
            assert torch.equal(*bits)  # a NaN is itself


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("part", range(8))
def test_forward_and_backward_are_the_operators_to_the_bit(part, dropout_p):
    for _ in range(25):
        inputs, options = random_problem(int(torch.randint(2**31, ())), dtypes=DTYPES)
        problem = Problem.from_sdpa(**inputs.tensors, dropout_p=dropout_p, **options)
        params, given = problem.params, problem.inputs(torch.randint(2**62, (1,)) if dropout_p else None)
        with testing.unmodified(*(x for x in given if x is not None)):
            for need_lse in (False, True):
                results = cpu.forward(*given, *params, need_lse, "cpu")
                assert results is not None, inputs.recipe
                assert_same(results, ops.forward(*given, *params, need_lse, "cpu"))
            out, lse = results
            grad_out = torch.randn(out.shape).to(out.dtype)
            grad_lse = torch.randn_like(lse) if part % 2 else None
            mask = int(torch.randint(8, ()))
            if given.bias is not None and given.bias.is_floating_point():
                mask += ops.GRAD_BIAS
            if given.sinks is not None:
                mask += ops.GRAD_SINKS
            needed = [bool(mask & bit) for bit in GRAD_BITS]
            with torch.no_grad():
                grads = cpu.backward(grad_out, grad_lse, (*given, out, lse), params, (*needed, False))
            assert grads is not None, inputs.recipe
            assert [x is not None for x in grads] == [*needed, False], inputs.recipe
            assert_same(grads[:-1], ops.backward(grad_out, grad_lse, *given, out, lse, *params, mask, "cpu"))


def _first(x, dims, full):
    """Of a tensor that is broadcast to `full` dimensions where a call has four: what a call of `dims` has of it, the
    first entry of the dimensions that it lacks."""
    for _ in range(0 if x is None else max(0, x.dim() - (full - 4 + dims))):
        x = x[0]
    return x


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("part", "dims"), [*((part, 4) for part in range(8)), (0, 3), (1, 3), (2, 3), (0, 2), (1, 2)])
def test_a_direct_call_is_the_call(part, dims, return_lse, operators):
    """The chance that half of the problems are without a query or a head is below 1e-9, were one of ten so."""
    taken = 0
    for _ in range(40):
        inputs, options = random_problem(int(torch.randint(2**31, ())), dtypes=DTYPES, biases=False)
        if "window" in options:  # larger ones are not C's integers
            options["window"] = tuple(None if x is None else min(x, 2**63 - 1) for x in options["window"])
        if dims == 2:  # without heads
            if inputs.query.shape[1] == 0:
                continue
            options = {name: x for name, x in options.items() if name not in ("enable_gqa", "sinks")}
        tensors = [_first(x, dims, 4) for x in (inputs.query, inputs.key, inputs.value, inputs.attn_mask)]
        ranges = _first(inputs.key_ranges, dims, 5)
        options |= {"return_lse": return_lse, "key_ranges": ranges if ranges is None else ranges.int()}
        results = call(*tensors, **options)
        with operators():
            expected = attnkern.attention(*tensors, **options)
        if results is None:
            assert inputs.query.numel() == 0, inputs.recipe
        else:
            taken += 1
            assert_same(*((results, expected) if return_lse else ([results], [expected])))
            assert_same(*([r[0]] if return_lse else [r] for r in (results, attnkern.attention(*tensors, **options))))
    assert taken > 20


PLAIN = {
    "nothing given": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "scale of type int": {"scale": 2},
    "dropout_p 0.0": {"dropout_p": 0.0},
    "backend": {"backend": "cpu"},
    "gqa": {"enable_gqa": True},
    "window": {"window": (2, None)},
    "a window beyond int64's half": {"window": (2**62 + 1, 0)},
    "window and causal": {"window": (None, 3), "is_causal": True},
    "bottom right": {"alignment": "bottom_right", "is_causal": True},
    "softcap": {"softcap": 3},
    "softcap 0": {"softcap": 0.0},
    "lse": {"return_lse": True},
    "mask and causal": {"attn_mask": torch.zeros(2, 2, 1, 5), "is_causal": True},
    "bool mask": {"attn_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)},
    "float mask": {"attn_mask": torch.zeros(2, 2, 1, 5)},
    "mask of 3 dimensions": {"attn_mask": torch.linspace(-1, 1, 50).view(5, 5, 2).permute(2, 0, 1)},
    "mask of 2 dimensions": {"attn_mask": torch.linspace(-1, 1, 25).view(5, 5).T},
    "bool mask of 2 dimensions": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
    "mask of 1 dimension": {"attn_mask": torch.linspace(-1, 1, 5)},
    "mask of 0 dimensions": {"attn_mask": torch.tensor(0.5)},
    "key ranges": {"key_ranges": torch.tensor([[1, 4], [3, 5]], dtype=torch.int32).view(2, 1, 1, 1, 2)},
    "key ranges of all rows": {"key_ranges": torch.tensor([[1, 4]], dtype=torch.int32)},
    "key ranges of each row": {"key_ranges": torch.tensor([1, 4], dtype=torch.int32).repeat(5, 1, 1)},
}


@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_plain_calls_are_direct(options, operators):
    q, k, v = testing.make_inputs(2, 2, 5).tensors.values()
    results = call(q, k, v, **options)
    with operators():
        expected = attnkern.attention(q, k, v, **options)
    assert_same(*((results, expected) if "return_lse" in options else ([results], [expected])))


@pytest.mark.parametrize("wanted", [(0, 1, 2), (1,), "mask"], ids=str)
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_plain_calls_with_gradients_are_direct(options, wanted, operators, monkeypatch):
    """None of the rules in Python is asked, and results are the operators' to the bit."""
    q, k, v = testing.make_inputs(2, 2, 5).tensors.values()
    mask = options.get("attn_mask")
    if wanted == "mask":
        if mask is None or not mask.is_floating_point():
            mask = torch.zeros(2, 2, 5, 5)
        options = options | {"attn_mask": mask.clone().requires_grad_()}
        leaves = [options["attn_mask"]]
    else:
        leaves = [(q, k, v)[i].requires_grad_() for i in wanted]

    def results():
        given = attnkern.attention(q, k, v, **options)
        outs = given if isinstance(given, tuple) else (given,)
        seeds = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in outs]
        return [*outs, *torch.autograd.grad(outs, leaves, seeds)]

    with operators():
        expected = results()
    monkeypatch.setattr(Problem, "from_sdpa", None)
    assert_same(results(), expected)


def test_what_is_raised_while_tensors_are_saved_comes_through():
    """A checkpoint ends its second forward pass by an exception."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)

    def refuse(x):
        raise KeyError("not this")

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda x: x), pytest.raises(KeyError, match="not this"):
        sdpa(q, q, q)
    (grad,) = torch.autograd.grad(checkpoint(lambda x: sdpa(x, x, x).sum(), q, use_reentrant=False), q)
    assert torch.equal(grad, torch.autograd.grad(sdpa(q, q, q).sum(), q)[0])


def test_masks_of_inference_mode_beside_gradients():
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    with torch.inference_mode():
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
    out = sdpa(q, q, q, mask)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(grad, torch.autograd.grad(sdpa(q, q, q, mask.clone()).sum(), q)[0])


@pytest.mark.parametrize(
    "mask", [torch.linspace(-1, 1, 25).view(5, 5).T, torch.ones(5, 5).tril() > 0], ids=["float", "bool"]
)
def test_a_mask_of_two_dimensions_has_every_derivative(mask, operators):
    """A plain call saves it as it is given; whatever then goes by an operator takes four dimensions."""
    leaves = [x.double().requires_grad_() for x in testing.make_inputs(2, 2, 5).tensors.values()]
    seed = torch.linspace(-1, 1, leaves[0].numel()).view(leaves[0].shape).double()
    mask = mask.double() if mask.is_floating_point() else mask

    def derivatives(mask):
        first = torch.autograd.grad(sdpa(*leaves, mask), leaves, seed, create_graph=True)
        second = torch.autograd.grad(first, leaves, [x.detach() for x in leaves])
        out = sdpa(*leaves, mask)
        many = torch.autograd.grad(out, leaves, torch.stack([seed, -seed]), is_grads_batched=True, retain_graph=True)
        with operators():
            return *first, *second, *many, *torch.autograd.grad(out, leaves, seed)

    assert_same(derivatives(mask), derivatives(mask[None, None]))


def test_masks_and_sinks_with_gradients_are_direct(operators, monkeypatch):
    q, k, v = (torch.randn(2, 2, n, 8, requires_grad=True) for n in (9, 12, 12))
    sinks = torch.randn(2, requires_grad=True)

    def results():
        out = attnkern.attention(q, k, v, BITS, sinks=sinks)
        return [out, *torch.autograd.grad(out, (q, k, v, sinks), torch.ones_like(out))]

    with operators():
        expected = results()
    monkeypatch.setattr(Problem, "from_sdpa", None)
    assert_same(results(), expected)


@pytest.mark.parametrize("shape", [(4,), (2, 4), (1, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sinks_of_16_bits_are_direct(dtype, shape, operators):
    """As models hold them. With a stride, too."""
    q, k, v = (x.to(dtype) for x in testing.make_inputs(2, 4, 5).tensors.values())
    for sinks in (torch.randn(shape).to(dtype), torch.randn(*shape, 2).to(dtype)[..., 1]):
        results = call(q, k, v, sinks=sinks)
        with operators():
            assert_same([results], [attnkern.attention(q, k, v, sinks=sinks)])


BITS = attnkern.masks.from_mask_mod(lambda b, h, q, k: (q + k) % 3 != 0, None, None, 9, 12)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (attnkern.masks.causal(9, 12), {}),
        (attnkern.masks.padding([5, 12], seqlen_q=9, seqlen_k=12), {}),
        (attnkern.masks.padding([5, 12], seqlen_q=9, seqlen_k=12), {"is_causal": True}),
        (BITS, {}),
        (BITS, {"is_causal": True}),
        (BITS, {"key_ranges": torch.tensor([2, 11], dtype=torch.int32).view(1, 1, 1, 1, 2)}),
    ],
)
def test_a_mask_is_direct_and_to_the_bit(mask, options, monkeypatch, operators):
    q, k, v = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    with operators():
        want = attnkern.attention(q, k, v, mask, **options)
    monkeypatch.setattr(Problem, "from_sdpa", None)
    assert torch.equal(attnkern.attention(q, k, v, mask, **options), want)
    if not options:
        assert torch.equal(sdpa(q, k, v, mask), want)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((2, 2, 8, 12), "attn_mask is a Mask for 9 queries and 12 keys"),
        ((2, 2, 9, 11), "attn_mask is a Mask for 9 queries and 12 keys"),
        ((3, 2, 9, 12), "attn_mask is a Mask of 2 sequences"),
    ],
)
def test_a_mask_for_other_sizes_is_an_error(sizes, said):
    batch, heads, seqlen_q, seqlen_k = sizes
    mask = attnkern.masks.padding([5, 12], seqlen_q=9, seqlen_k=12)
    q, k = torch.randn(batch, heads, seqlen_q, 8), torch.randn(batch, heads, seqlen_k, 8)
    with pytest.raises((RuntimeError, ValueError), match=said):
        attnkern.attention(q, k, k, mask)


def test_calls_are_direct_under_grad_mode_and_inference_mode():
    q, k, v = testing.make_inputs(2, 2, 5).tensors.values()
    assert torch.is_grad_enabled()
    assert not call(q, k, v).requires_grad
    q.requires_grad_()
    assert call(q, k, v) is None
    with torch.no_grad():
        assert not call(q, k, v).requires_grad
    with torch.inference_mode():
        assert call(q, k, v).is_inference()


def changed(position, change):
    tensors = list(testing.make_inputs(2, 4, 5, 7).tensors.values())
    tensors[position] = change(tensors[position])
    return tensors


DEFAULTS = None, 0, False, None, False, None, "top_left", None, None  # from attn_mask to key_ranges
NOT_PLAIN = {
    "not a tensor": changed(0, lambda x: x.tolist()),
    "key not a tensor": changed(1, lambda x: x.tolist()),
    "mask not a tensor": [*changed(0, torch.clone), 1.0],
    "parameter": changed(0, torch.nn.Parameter),
    "subclass": changed(1, lambda x: x.as_subclass(type("Subclass", (torch.Tensor,), {}))),
    "3-D and a mask of 4 dimensions": [*(x[0] for x in changed(0, torch.clone)), torch.zeros(2, 1, 5, 7)],
    "3-D beside 4-D": changed(1, lambda x: x[0]),
    "3-D with a gradient": [x[0].requires_grad_() for x in changed(0, torch.clone)],
    "3-D and sinks of a batch": [*(x[0] for x in changed(0, torch.clone)), *DEFAULTS, torch.zeros(1, 4)],
    "2-D and sinks": [*(x[0, 0] for x in changed(0, torch.clone)), *DEFAULTS, torch.zeros(1)],
    "2-D and enable_gqa": [*(x[0, 0] for x in changed(0, torch.clone)), None, 0, False, None, True],
    "5-D": [x[None] for x in changed(0, torch.clone)],
    "1-D": [x[0, 0, 0] for x in changed(0, torch.clone)],
    "batch broadcast": changed(1, lambda x: x[:1]),
    "heads that do not fit": changed(1, lambda x: x[:, :2]),
    "another dtype": changed(1, torch.Tensor.double),
    "no dtype of ours": [x.int() for x in changed(0, torch.clone)],
    "complex": [x.cfloat() for x in changed(0, torch.clone)],
    "meta": [x.to("meta") for x in changed(0, torch.clone)],
    "sparse": changed(2, torch.Tensor.to_sparse),
    "lengths that do not fit": changed(1, lambda x: x[:, :, :3]),
    "no element": [x[:0] for x in changed(0, torch.clone)],
    "a mask of 5 dimensions": [*changed(0, torch.clone), torch.zeros(1, 2, 4, 5, 7)],
    "a mask of 3 dimensions that does not fit": [*changed(0, torch.clone), torch.zeros(2, 5, 7)],
    "a mask that does not fit": [*changed(0, torch.clone), torch.zeros(2, 4, 5, 3)],
    "a mask of bytes": [*changed(0, torch.clone), torch.zeros(2, 4, 5, 8, dtype=torch.uint8)],
    "a mask of int64": [*changed(0, torch.clone), torch.zeros(2, 4, 5, 7, dtype=torch.int64)],
    "dropout": [*changed(0, torch.clone), None, 0.5],
    "dropout no number": [*changed(0, torch.clone), None, "0"],
    "dropout of type bool": [*changed(0, torch.clone), None, False],
    "is_causal no bool": [*changed(0, torch.clone), None, 0, 1],
    "scale not finite": [*changed(0, torch.clone), None, 0, False, float("nan")],
    "scale too large": [*changed(0, torch.clone), None, 0, False, 10**400],
    "enable_gqa no bool": [*changed(0, torch.clone), None, 0, False, None, None],
    "another backend": [*changed(0, torch.clone), *DEFAULTS, None, False, "triton"],
    "a backend no string": [*changed(0, torch.clone), *DEFAULTS, None, False, 3],
    **{
        f"window {window}": [*changed(0, torch.clone), None, 0, False, None, False, window]
        for window in [(1,), (1, 2, 3), [1, 2], (-1, 0), (0, 1.0), (True, 0), (2**70, 0), 3]
    },
    "another alignment": [*changed(0, torch.clone), None, 0, False, None, False, None, "top"],
    "alignment no string": [*changed(0, torch.clone), None, 0, False, None, False, None, None],
    "negative softcap": [*changed(0, torch.clone), None, 0, False, None, False, None, "top_left", -1.0],
    "infinite softcap": [*changed(0, torch.clone), None, 0, False, None, False, None, "top_left", float("inf")],
    "return_lse no bool": [*changed(0, torch.clone), *DEFAULTS, None, 1],
    "sinks of another size": [*changed(0, torch.clone), *DEFAULTS, torch.zeros(3)],
    "sinks of another dtype": [*changed(0, torch.clone), *DEFAULTS, torch.zeros(4).half()],
    "sinks no tensor": [*changed(0, torch.clone), *DEFAULTS, 0.0],
    "negative by a bit": changed(0, torch._neg_view),
    "functional": changed(0, torch._to_functional_tensor),
    "zeros without memory": changed(0, lambda x: torch._efficientzerotensor(x.shape)),
}


@pytest.mark.parametrize("arguments", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_other_calls_are_not(arguments):
    assert call(*arguments) is None
    assert call(*changed(0, torch.clone)) is not None  # no error is left behind


def test_wrong_numbers_of_arguments_are_not():
    tensors = changed(0, torch.clone)
    for function in (cpu.call, cpu.forward, cpu.backward):
        assert function() is function(*tensors) is function(*tensors * 9) is None


def test_negative_views_are_seen():
    x = torch.randn(2, 3, 5, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert torch.equal(sdpa(x, x, x), sdpa(*[x.resolve_neg()] * 3))


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


LISTENERS = {
    "dispatch mode": SeesOperators,
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "FLOP counter": lambda: FlopCounterMode(display=False),
    "profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
    "autograd profiler": torch.autograd.profiler.profile,
}


@pytest.mark.parametrize("listener", LISTENERS.values(), ids=LISTENERS)
def test_nothing_is_direct_where_operators_are_seen(listener):
    q, k, v = changed(0, torch.clone)
    params = (0.3, 0.0, UNBOUNDED, UNBOUNDED, 0, 0.0)
    out, lse = cpu.forward(*Inputs(q, k, v), *params, True, "cpu")
    with listener():
        assert call(q, k, v) is None
        assert cpu.forward(*Inputs(q, k, v), *params, True, "cpu") is None
        with torch.no_grad():
            assert cpu.backward(out, None, (*Inputs(q, k, v), out, lse), params, (True,) * 5) is None


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_nothing_is_direct_while_tracing_or_transformed():
    q, k, v = changed(0, torch.clone)
    taken = []

    def f(q):
        taken.append(call(q, k, v))
        return sdpa(q, k, v).sum()

    torch.jit.trace(f, (q,), check_trace=False)
    torch.vmap(f)(q[None])
    torch.func.grad(f)(q)
    torch.func.jvp(f, (q,), (q,))
    with forward_ad.dual_level():
        f(forward_ad.make_dual(q, q))
    assert taken == [None] * 5


def test_autocast_is_heeded():
    q, k, v = changed(0, torch.clone)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(q, k, v) is None
        assert sdpa(q, k, v).dtype == torch.bfloat16


def test_a_default_device_is_not_that_of_results():
    q, k, v = changed(0, torch.clone)
    with torch.device("meta"):
        assert sdpa(q, k, v).device.type == "cpu"
    torch.set_default_dtype(torch.float64)
    try:
        assert sdpa(q, k, v).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_profiler_sees_the_operators_of_a_training_step():
    tensors = [x.requires_grad_() for x in changed(0, torch.clone)]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        sdpa(*tensors).sum().backward()
    names = {event.key for event in seen.key_averages()}
    assert {"attnkern::forward", "attnkern::backward"} <= names


def test_gradients_are_the_operators_to_the_bit(operators):
    tensors = [x.requires_grad_() for x in changed(0, torch.clone)]
    seed = torch.randn(2, 4, 5, 8)
    direct = torch.autograd.grad(sdpa(*tensors), tensors, seed)
    with operators():
        by_operator = torch.autograd.grad(sdpa(*tensors), tensors, seed)
    assert_same(direct, by_operator)


def test_references_are_kept_right():
    tensors = changed(0, torch.clone)
    params = (0.3, 0.0, UNBOUNDED, UNBOUNDED, 0, 0.0)
    leaves = [x.clone().requires_grad_() for x in tensors]

    def all_of_them():
        call(*tensors, 1.0)
        call(*tensors)
        out, lse = cpu.forward(*Inputs(*tensors), *params, True, "cpu")
        cpu.forward(*Inputs(*tensors), *params, False, "cuda")
        with torch.no_grad():
            cpu.backward(out, lse, (*Inputs(*tensors), out, lse), params, (True, False, True, False, False))
        sdpa(*leaves).sum().backward()

    def counts():
        gc.collect()
        singletons = (None, True, False, torch.Tensor, torch.float32, "cpu", float, int, str)
        return [sys.getrefcount(x) for x in (*tensors, *params[:2], *singletons)] + [sys.getallocatedblocks()]

    for _ in range(3):
        all_of_them()
    rounds, changes = 400, []
    for _ in range(3):
        before = counts()
        for _ in range(rounds):
            all_of_them()
        changes.append([b - a for a, b in zip(before, counts(), strict=True)])
    # What calls lose, they lose each time; what other tests left behind may go at any time, but once.
    least = [min(change, key=abs) for change in zip(*changes, strict=True)]
    assert all(abs(change) < rounds / 2 for change in least), changes


def test_other_threads_run_meanwhile():
    """The kernels let go of the interpreter's lock."""
    x = torch.randn(1, 4, 2048, 64)
    stop, counted = threading.Event(), [0]

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    sys.setswitchinterval(1000)  # the lock changes hands only where it is let go
    try:
        thread.start()
        before, deadline = counted[0], time.monotonic() + 60  # a busy machine may take its time to run the thread
        while counted[0] == before:
            assert call(x, x, x) is not None
            assert time.monotonic() < deadline, "no other thread ran during the calls of a minute"
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()


class OfPlainTorch:
    """The forward and backward of a GPU's backend, in plain torch; and what each was called by."""

    def __init__(self, monkeypatch, backend):
        self.by_operator, self.calls, self.fails = False, [], 0
        for name in ("forward", "backward"):
            monkeypatch.setattr(backend, name, functools.partial(self.run, getattr(plain, name)))
            monkeypatch.setattr(ops, name, functools.partial(self.operator, getattr(ops, f"route_{name}")))
            monkeypatch.setattr(cpu, name, lambda *arguments: pytest.fail("asks the CPU's kernels"))

    def operator(self, route, *flat):
        self.by_operator = True
        try:
            return route(*flat)
        finally:
            self.by_operator = False

    def run(self, function, *arguments):
        assert isinstance(arguments[-2], AttentionParams)
        self.calls.append("operator" if self.by_operator else "direct")
        if self.fails > 0:
            self.fails -= 1
            raise CannotBuild("no compiler")
        return function(*arguments)


@pytest.fixture
def gpu(monkeypatch):
    """`backend="cuda"` takes CPU tensors, by plain torch."""
    with routes.cuda(), monkeypatch.context() as patch:
        yield OfPlainTorch(patch, routes.table.cuda)


OBSERVERS = {
    "a mode": lambda: FlopCounterMode(display=False),
    "a profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
}


def _both_passes(q, k, v):
    """out, lse and the gradients."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    results = attnkern.attention(*leaves, return_lse=True, is_causal=True, backend="cuda")
    return (*results, *torch.autograd.grad(sum(x.sum() for x in results), leaves))


def test_a_gpus_call_goes_past_the_operators(gpu):
    given = changed(0, torch.clone)
    results = _both_passes(*given)
    assert gpu.calls == ["direct"] * 2
    expected = attnkern.attention(*given, is_causal=True, return_lse=True, backend="cuda")
    assert gpu.calls == ["direct"] * 3
    for x, y in zip(results, expected, strict=False):
        assert torch.equal(x, y)
    for name, observer in OBSERVERS.items():
        del gpu.calls[:]
        with observer():
            for x, y in zip(_both_passes(*given), results, strict=True):
                assert torch.equal(x, y)
        assert gpu.calls == ["operator"] * 2, name


def test_a_gpus_call_goes_by_the_operators_for_tensors_that_only_look_plain(gpu):
    q, k, v = changed(0, torch.clone)
    found = sdpa(torch._neg_view(q), k, v, backend="cuda")
    assert gpu.calls == ["operator"]
    assert torch.equal(found, sdpa(-q, k, v, backend="cuda"))
    assert gpu.calls == ["operator", "direct"]


def test_the_operator_finds_another_backend_for_kernels_that_cannot_be_built(gpu):
    given = changed(0, torch.clone)
    results = _both_passes(*given)
    for fails in (1, 2):
        for with_grad in (False, True):
            del gpu.calls[:]
            gpu.fails = fails
            if fails == 2:
                with pytest.raises(RuntimeError, match="backend 'cuda' cannot run this call: no compiler"):
                    _both_passes(*given) if with_grad else sdpa(*given, backend="cuda")
                assert gpu.calls == ["direct", "operator"]
            elif with_grad:
                for x, y in zip(_both_passes(*given), results, strict=True):
                    assert torch.equal(x, y)
                assert gpu.calls == ["direct", "operator", "direct"]
            else:
                assert torch.equal(sdpa(*given, is_causal=True, backend="cuda"), results[0])
                assert gpu.calls == ["direct", "operator"]


def test_without_what_it_stands_on_everything_goes_by_the_operators(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    assert _library.past_the_dispatcher(_library.path_of("_C"), "cpu") is _library.NOTHING_DIRECT


RANGES = torch.tensor([[[[[5, 90]]]], [[[[0, 71]]]]], dtype=torch.int32)
OF_A_GPU = {  # the kind of kernel, head sizes of a call, what else it has
    "fast path": ("fast path", 70, 90, {"is_causal": True, "enable_gqa": True}),
    "tiles that are counted": ("fast path", 150, 90, {"is_causal": True, "enable_gqa": True}),
    "ranges": ("fast path", 70, 90, {"key_ranges": RANGES, "enable_gqa": True}),
    "sinks": ("fast path", 70, 90, {"sinks": torch.randn(2, 2), "enable_gqa": True}),
    "softcap": ("generic", 40, 50, {"softcap": 2.0, "scale": 0.3, "enable_gqa": True}),
    "bias": ("generic", 40, 50, {"attn_mask": torch.randn(2, 1, 40, 50), "enable_gqa": True}),
    "decoding": ("decode", 2, 300, {"enable_gqa": True, "alignment": "bottom_right", "is_causal": True}),
}


@pytest.mark.parametrize("name", OF_A_GPU)
def test_the_cuda_kernels_directly(name):
    """`cuda.call` and `cuda.forward_directly`, in the simulator: to the bit, and by nobody's order but the rules'."""
    kind, length, keys, options = OF_A_GPU[name]
    q, k, v = (torch.randn(2, h, n, 64, dtype=torch.bfloat16) for h, n in ((2, length), (1, keys), (1, keys)))
    backend, given = routes.table.cuda, [options.get(x.name, x.default) for x in PARAMETERS[3:]]
    at = [x.name for x in PARAMETERS[3:]].index
    with routes.cuda(90) as recorder:
        recorder.multiprocessors = 2
        problem = Problem.from_sdpa(q, k, v, **options)
        assert backend.plan_of(problem).kind == kind
        for need_lse in (False, True):
            arguments = (*problem.inputs(), *problem.params, need_lse)
            want = recorder.run(torch.ops.attnkern.cuda_forward, *arguments, False, None, None)
            assert_same(recorder.directly("forward", *arguments, "cuda"), want)
            given[at("return_lse")], given[at("backend")] = need_lse, "cuda"
            found = recorder.directly("call", q, k, v, *given)
            assert_same(*((found, want) if need_lse else ([found], want[:1])))
        assert recorder.directly("forward", *problem.inputs(), *problem.params, False, "triton") is None
        given[at("backend")] = None
        for is_first in ({}, {kind}, set(choice.KINDS) - {kind}, set(choice.KINDS)):
            calls = itertools.product(choice.KINDS, range(2 * (MAX_HEAD_DIM + 1)))
            recorder.directly("stands_first", 0, bytes(x in is_first for x, _ in calls) if is_first else None)
            found = recorder.directly("call", q, k, v, *given)
            assert (found is not None) == (kind in is_first)
        recorder.directly("stands_first", 0, None)
        given[at("backend")], recorder.refusal = "cuda", 1  # the driver takes no tensor map: the operator warns of that
        has_maps = "sm90" in recorder.launches[-1].name
        assert (recorder.directly("call", q, k, v, *given) is None) == has_maps
        recorder.refusal = 0
        wide = [x.float() if x.is_floating_point() else x for x in (q, k, v)]
        assert recorder.directly("call", *wide, *given) is None


def test_compiled_programs_hold_the_operator():
    q, k, v = changed(0, torch.clone)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    out = torch.compile(lambda *x: sdpa(*x), backend=backend, fullgraph=True)(q, k, v)
    assert torch.equal(out, sdpa(q, k, v))
    assert any(node.target is ops.forward for node in graphs[0].graph.nodes)


def test_a_mask_and_is_causal_are_still_an_error():
    with pytest.raises(RuntimeError, match="attn_mask must be None when is_causal=True"):
        sdpa(*changed(0, torch.clone), torch.zeros(1, 1, 5, 7), is_causal=True)


def test_traced_programs_hold_the_operator():
    traced = make_fx(lambda q, k, v: sdpa(q, k, v))(*changed(0, torch.clone))
    assert any(node.target is ops.forward for node in traced.graph.nodes)


def test_it_agrees_with_torch():
    q, k, v = changed(0, torch.clone)
    torch.testing.assert_close(call(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True))
