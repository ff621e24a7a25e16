"""attnkern.nn against torch's modules, attention_weights against float64, the pictures and the worked examples."""

import copy
import functools
import inspect
import itertools
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

import attnkern
from attnkern import masks, testing, tiles
from attnkern.nn import CrossAttention, MultiheadAttention
from matrix import in_turn
from random_problems import random_problem

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")  # torch's module, of two masks


class Operators(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# --- MultiheadAttention against torch's

N, L, S, E, H = 3, 5, 7, 16, 4
BUILDS = [
    {"batch_first": batch_first, "add_bias_kv": bias_kv, "add_zero_attn": zero, "bias": bias}
    | ({"kdim": 6, "vdim": 10} if widths else {})
    for batch_first, bias_kv, zero, bias, widths in itertools.product([False, True], repeat=5)
]
# Inputs (of a batch, one query for several keys, unbatched), masks, and what is returned.
CALLS = [
    {"kind": kind, "padding": padding, "mask": mask, "causal": causal, "need": need, "average": average}
    for kind, padding, mask, causal, (need, average) in itertools.product(
        ["batch", "unbatched", "same", "same key"],
        [None, "bool", "float"],
        [None, "bool", "float", "bool 3-D", "float 3-D"],
        [False, True],
        [(False, True), (True, True), (True, False)],
    )
    if mask is not None or not causal
]


def named(build):
    return ",".join(k if v is True else f"{k}={v}" for k, v in build.items() if v) or "plain"


def pair(dtype=torch.float32, more=None, **build):
    """torch's module and attnkern's with the same parameters. `more`: attnkern's options that torch lacks."""
    theirs = torch.nn.MultiheadAttention(E, H, **build, dtype=dtype)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p))  # biases start at 0
    ours = MultiheadAttention(E, H, **build, dtype=dtype, **(more or {}))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def draw(call, build):
    """query, key, value and the keywords of forward."""
    kind, kdim, vdim = call["kind"], build.get("kdim", E), build.get("vdim", E)
    same = kind == "same" and kdim == vdim == E
    length = S if call["causal"] or same else L
    n = 1 if kind == "unbatched" else N

    def tensor(sequence, width):
        if kind == "unbatched":
            return torch.randn(sequence, width)
        return torch.randn((N, sequence, width) if build["batch_first"] else (sequence, N, width))

    query, key, value = tensor(length, E), tensor(S, kdim), tensor(S, vdim)
    if same:
        key = value = query
    if kind == "same key" and kdim == vdim:
        value = key
    padding = mask = None
    if call["padding"] is not None:
        padding = torch.arange(S) >= torch.tensor([[S], [S - 2], [3]])[:n]
        padding = torch.randn(n, S) if call["padding"] == "float" else padding
        padding = padding[0] if kind == "unbatched" else padding
    if call["mask"] is not None:
        lead = (n * H,) if "3-D" in call["mask"] else ()
        if call["causal"]:
            hidden = torch.ones(length, S, dtype=torch.bool).triu(1).expand(*lead, length, S)
        else:
            hidden = torch.rand(*lead, length, S) < 0.3
            hidden[..., 0] = False
        # Random numbers where a mask is free to be what it is; else exactly the causal mask.
        added = torch.zeros(hidden.shape) if call["causal"] else torch.randn(hidden.shape)
        mask = added.masked_fill(hidden, -math.inf) if "float" in call["mask"] else hidden
    options = {"key_padding_mask": padding, "attn_mask": mask, "is_causal": call["causal"]}
    return (query, key, value), options | {"need_weights": call["need"], "average_attn_weights": call["average"]}


def cast(x, dtype):
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def run(module, tensors, options, dtype, seeds):
    """Output, weights and all gradients, by name. The same tensor passed twice stays the same one."""
    leaves = {id(x): cast(x, dtype).detach().clone().requires_grad_() for x in tensors}
    query, key, value = (leaves[id(x)] for x in tensors)
    options = {name: cast(x, dtype) for name, x in options.items()}
    out, weights = module(query, key, value, **options)
    results = {"output": out} if weights is None else {"output": out, "weights": weights}
    wanted = dict(module.named_parameters()) | {f"input {n}": x for n, x in enumerate(leaves.values())}
    targets = [x for x in results.values() if x.requires_grad]
    for name, x in results.items():
        seeds.setdefault(name, torch.randn(x.shape, dtype=torch.float64))
    grads = torch.autograd.grad(targets, list(wanted.values()), [seeds[n].to(dtype) for n in results])
    results = {n: x.detach() for n, x in results.items()}
    return results | {f"gradient of {n}": g for n, g in zip(wanted, grads, strict=True)}


class Inexact(TorchDispatchMode):
    """Puts onto every operator's result one rounding of size eps, at random.

    On a softmax goes what a log-sum-exp and scores rounded to that many digits do to a row, as in `attnkern.testing`.
    """

    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def off(self, like):
        return self.eps * (2 * torch.rand(like.shape, dtype=torch.float64) - 1)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or func._schema.returns[0].alias_info:
            return out
        if func._schema.name in ("aten::_softmax", "aten::_safe_softmax"):
            x = args[0]
            condition = 2 * (1 + x.nan_to_num(0, 0, 0).abs() + x.logsumexp(-1, keepdim=True).abs())
            return out * (1 + condition * self.off(x[..., :1]))
        return out * (1 + self.off(out))


def hold_to_the_rule(actual, double, baseline, dtype, recipe=""):
    """`actual` against what the function `double` gives in float64, with torch's `baseline` as the yardstick.

    The rule's unit is what one rounding can do; in a module, one of every intermediate result.
    """
    with sdpa_kernel(SDPBackend.MATH):
        exact = double()
        with Inexact(torch.finfo(dtype).eps):
            moved = [double() for _ in range(2)]
    assert actual.keys() == exact.keys()
    for name, x in actual.items():
        assert x.dtype == baseline[name].dtype
        unit = testing.rounding_unit(exact[name], dtype) + max((m[name] - exact[name]).abs().amax() for m in moved)
        testing.assert_within_rule(
            x, exact[name], baseline[name], gradient="gradient" in name, unit=unit, name=name, recipe=recipe
        )


def compare(theirs, ours, call, build, dtype=torch.float32):
    tensors, options = draw(call, build)
    seeds, module = {}, copy.deepcopy(theirs).double()
    actual, baseline = (run(m, tensors, options, dtype, seeds) for m in (ours, theirs))
    recipe = f"{named(build)} {call}"
    hold_to_the_rule(actual, lambda: run(module, tensors, options, torch.float64, seeds), baseline, dtype, recipe)


def in_dtypes(calls):
    """All in float32, and every third one in another dtype as well."""
    others = zip((torch.bfloat16, torch.float16, torch.float64), calls[::3], strict=False)
    return [(torch.float32, call) for call in calls] + [*others]


def hint_is_obeyed(call, build):
    """torch's hint without weights hides what add_bias_kv and add_zero_attn append (and with weights it does not)."""
    appended = build["add_bias_kv"] or build["add_zero_attn"]
    return not (appended and call["causal"] and not call["need"] and call["padding"] is None)


@pytest.mark.parametrize("build", BUILDS, ids=named)
def test_multihead_attention(build):
    """Every combination of forward's options once, dealt out over every combination of the constructor's; and some of
    them in other dtypes."""
    calls = [call for call in CALLS[BUILDS.index(build) :: len(BUILDS)] if hint_is_obeyed(call, build)]
    for dtype, call in in_dtypes(calls):
        compare(*pair(dtype, **build), call, build, dtype)


def test_the_constructor_is_torchs():
    """Names, order and defaults, those of forward as well, and the same parameters from the same seed."""
    classes = torch.nn.MultiheadAttention, MultiheadAttention
    for functions in (classes, [cls.forward for cls in classes]):
        theirs, ours = (
            [(p.name, p.default) for p in inspect.signature(f).parameters.values() if p.kind is not p.KEYWORD_ONLY]
            for f in functions
        )
        assert ours == theirs
    for build in BUILDS:
        states = []
        for cls in classes:
            torch.manual_seed(7)
            states.append(cls(E, H, **build).state_dict())
        assert list(states[0]) == list(states[1])
        assert all(torch.equal(states[0][name], x) for name, x in states[1].items())


class WithSinks(torch.nn.MultiheadAttention):
    """torch's module, without a bias, and a key of zeros more, onto whose scores a mask adds the sinks."""

    def __init__(self, *sizes, **build):
        super().__init__(*sizes, **build)
        self.sinks = torch.nn.Parameter(torch.randn(H, dtype=build.get("dtype")))

    def forward(self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal):
        batch, sequence = (0, 1) if self.batch_first and query.dim() == 3 else (1, 0)
        n, length, keys = (query.size(batch) if query.dim() == 3 else 1), query.size(sequence), key.size(sequence)
        key, value = (torch.cat([x, torch.zeros_like(x.narrow(sequence, 0, 1))], sequence) for x in (key, value))
        if key_padding_mask is not None:
            key_padding_mask = torch.cat([key_padding_mask, torch.zeros_like(key_padding_mask[..., :1])], -1)
        if attn_mask is None:
            attn_mask = query.new_zeros(length, keys)
        elif attn_mask.dtype == torch.bool:
            attn_mask = query.new_zeros(attn_mask.shape).masked_fill(attn_mask, -math.inf)
        column = self.sinks.repeat(n)[:, None, None].expand(-1, length, 1)
        mask = torch.cat([attn_mask.expand(n * H, -1, -1), column], -1)
        given = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
        out, weights = super().forward(query, key, value, key_padding_mask, attn_mask=mask, **given)
        if weights is not None:
            weights = torch.cat([weights[..., :keys], weights[..., keys + 1 :]], -1)
        return out, weights


WITHOUT_BIAS = [build for build in BUILDS if not build["bias"]]


@pytest.mark.parametrize("build", WITHOUT_BIAS, ids=named)
def test_sinks(build):
    """Output, weights and gradients, the sinks' too, for forward's options, dealt out over the constructor's."""
    for dtype, call in in_dtypes(CALLS[WITHOUT_BIAS.index(build) :: len(WITHOUT_BIAS)]):
        theirs = WithSinks(E, H, **build, dtype=dtype)
        ours = MultiheadAttention(E, H, **build, dtype=dtype, sinks=True)
        ours.load_state_dict(theirs.state_dict())
        compare(theirs, ours, call, build, dtype)


MODULES = {
    "plain": lambda **more: MultiheadAttention(E, H, **more),
    "widths": lambda **more: MultiheadAttention(E, H, kdim=6, vdim=10, add_bias_kv=True, **more),
    "cross": lambda **more: CrossAttention(E, num_heads=H, **more),
}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("kind", MODULES)
def test_states_go_both_ways(kind, sinks):
    """To copies, pickles and torch's module; sinks start at 0, and are there only where asked for."""
    module = MODULES[kind](sinks=sinks)
    state = module.state_dict()
    assert ("sinks" in state) == sinks
    assert module.sinks is None or torch.equal(module.sinks, torch.zeros(H))
    if sinks:
        torch.nn.init.normal_(module.sinks)
    inputs = [torch.randn(L, N, E)] * (1 if kind == "cross" else 3)
    if kind == "widths":
        inputs[1:] = torch.randn(S, N, 6), torch.randn(S, N, 10)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(x, state[name]) for name, x in other.state_dict().items())
        torch.testing.assert_close(other(*inputs), module(*inputs), rtol=0, atol=0)
    if kind == "cross":
        return
    assert isinstance(module, torch.nn.MultiheadAttention)
    if sinks:
        module._reset_parameters()
        assert not module.sinks.any()
    else:
        build = {"kdim": 6, "vdim": 10, "add_bias_kv": True} if kind == "widths" else {}
        torch.nn.MultiheadAttention(E, H, **build).load_state_dict(state)


def test_no_second_softmax():
    """The weights come from the log-sum-exp of the forward kernel."""
    module, x = MultiheadAttention(E, H, batch_first=True), torch.randn(2, 6, E)
    for mask in (None, torch.randn(6, 6)):
        with Operators() as operators:
            module(x, x, x, attn_mask=mask)
        assert "attnkern.forward.default" in operators.names
        assert not [name for name in operators.names if "softmax" in name or "logsumexp" in name]


@pytest.mark.parametrize("extras", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=named)
@pytest.mark.parametrize("need", [False, True])
@pytest.mark.parametrize("window", [None, (2, 1)], ids=str)
def test_bands(extras, need, window):
    """As the masks that they stand for, also with appended keys, which every query sees; is_causal needs no mask, and
    is torch's hint beside one."""
    theirs, ours = pair(batch_first=True, more={"window": window}, **extras)
    query, key = torch.randn(2, 6, E), torch.randn(2, 9, E)
    with pytest.raises(RuntimeError):
        theirs(query, key, key, is_causal=True, need_weights=need)
    causal = torch.ones(6, 9, dtype=torch.bool).triu(1)
    padding = torch.arange(9) >= torch.tensor([[9], [7]])
    for padded, is_causal, mask in itertools.product((None, padding), (False, True), (None, causal)):
        hidden = ~testing.band_mask(6, 9, window=window or (None, None), is_causal=is_causal or mask is not None)
        want = theirs(query, key, key, padded, attn_mask=hidden, need_weights=need)
        got = ours(query, key, key, padded, need, mask, is_causal=is_causal)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("need", [False, True])
def test_a_query_without_keys_gives_zeros(need):
    """torch gives NaN with need_weights, zeros without."""
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 4, E, requires_grad=True)
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[1] = True
    for mask in (padding, torch.zeros(2, 4).masked_fill(padding, -math.inf)):
        out, weights = ours(x, x, x, mask, need_weights=need)
        assert torch.equal(out[1], ours.out_proj.bias.expand(4, E))
        (grad,) = torch.autograd.grad(out.sum() + (weights[1].square().sum() if need else 0), x)
        assert torch.equal(grad[1], torch.zeros(4, E))
        assert not need or torch.equal(weights[1], torch.zeros(4, 4))


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e9])
def test_a_row_of_large_negative_masks_is_a_mean(lowest):
    """Beside such a number a log-sum-exp has no room for the logarithm of the number of keys."""
    theirs, ours = pair(batch_first=True)
    x, mask = torch.randn(1, 5, E), torch.zeros(5, 5)
    mask[1], mask[2, 3:] = lowest, lowest
    want = theirs(x, x, x, attn_mask=mask)
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask), want)
    torch.testing.assert_close(want[1][0, 1], torch.full((5,), 0.2))


@pytest.mark.parametrize("need", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_padding_of_16_bits_beside_a_bool_mask(dtype, need):
    """As torch takes it. (It warns of two masks of different types.)"""
    theirs, ours = pair(batch_first=True)
    x = torch.randn(2, 5, E)
    padding = torch.zeros(2, 5, dtype=dtype)
    padding[0, 3:], padding[1, 1] = -math.inf, 0.5
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    options = {"key_padding_mask": padding, "attn_mask": causal, "need_weights": need}
    with pytest.warns(UserWarning, match="mismatched"):
        expected = theirs(x, x, x, **options)
    torch.testing.assert_close(ours(x, x, x, **options), expected)


def test_dropout_in_training_only():
    module = MultiheadAttention(E, H, dropout=0.4, batch_first=True, dtype=torch.float64)
    x, value = torch.randn(2, 2, 33, E, dtype=torch.float64)
    value.requires_grad_()
    torch.manual_seed(3)
    out, weights = module(x, x, value, average_attn_weights=False)
    torch.manual_seed(3)
    again, mean = module(x, x, value)
    assert torch.equal(again, out)
    torch.testing.assert_close(mean, weights.mean(1))
    assert 0.3 < (weights == 0).float().mean() < 0.5  # 19 standard deviations either way
    # The weights are those that were used: multiplied with the values they give the output, and its gradient.
    v = torch.nn.functional.linear(value, module.in_proj_weight[2 * E :], module.in_proj_bias[2 * E :])
    want = module.out_proj((weights @ v.unflatten(-1, (H, -1)).transpose(1, 2)).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(out, want)
    seed = torch.randn_like(out)
    for wanted in (value, module.in_proj_weight):
        torch.testing.assert_close(*(torch.autograd.grad(y, wanted, seed, retain_graph=True) for y in (out, want)))
    still = module.eval()(x, x, value)
    module.dropout = 0.0
    torch.testing.assert_close(still, module.train()(x, x, value), rtol=0, atol=0)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(dtype, sinks):
    """Sinks of a module in bfloat16 are so in float16 as well."""
    theirs, ours = pair()
    if sinks:
        build = {"bias": False, "dtype": torch.bfloat16}
        theirs, ours = WithSinks(E, H, **build), MultiheadAttention(E, H, **build, sinks=True)
        ours.load_state_dict(theirs.state_dict())
    exact = copy.deepcopy(theirs).double()
    x = torch.randn(S, N, E)

    def results(module, x):
        outs = *module(x, x, x, None, True, None, True, False), module(x, x, x, None, False, None, True, False)[0]
        return {name: y.detach() for name, y in zip(("output", "weights", "output alone"), outs, strict=True)}

    with torch.autocast("cpu", dtype):
        baseline, actual = results(theirs, x), results(ours, x)
    assert all(y.dtype == dtype for y in actual.values())
    hold_to_the_rule(actual, lambda: results(exact, x.double()), baseline, dtype)


# --- inside torch's layers and under torch.compile


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_inside_transformer_layers(norm_first, training):
    """The same results as with torch's module; in evaluation too it is this module that runs, not torch's fast path."""
    options = {"batch_first": True, "dropout": 0.0, "norm_first": norm_first, "dtype": torch.float64}
    options["activation"] = "gelu"  # a relu whose input rounds to the other side of 0 has another gradient
    source, goal = torch.randn(2, 9, E, dtype=torch.float64), torch.randn(2, 6, E, dtype=torch.float64)
    padding = torch.arange(9) >= torch.tensor([[9], [5]])
    added = torch.zeros(2, 9, dtype=torch.float64).masked_fill(padding, -math.inf)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    tgt = {"tgt_mask": causal[:6, :6], "tgt_is_causal": True}
    calls = [
        ((source,), {}),
        ((source,), {"src_key_padding_mask": padding}),
        ((source,), {"src_mask": causal, "is_causal": True}),
        ((source,), {"src_mask": causal, "src_key_padding_mask": added}),
        ((goal, source), tgt),
        ((goal, source), {**tgt, "memory_key_padding_mask": padding}),
    ]
    for args, keywords in calls:
        decodes = len(args) == 2
        layer = torch.nn.TransformerDecoderLayer if decodes else torch.nn.TransformerEncoderLayer
        theirs = layer(E, H, 32, **options).train(training)
        ours = copy.deepcopy(theirs)
        for name in ("self_attn", "multihead_attn") if decodes else ("self_attn",):
            setattr(ours, name, MultiheadAttention(E, H, batch_first=True, dtype=torch.float64).train(training))
        ours.load_state_dict(theirs.state_dict())
        with torch.set_grad_enabled(training):
            want = theirs(*args, **keywords)
            with Operators() as operators:
                got = ours(*args, **keywords)
        assert operators.names.count("attnkern.forward.default") == 1 + decodes
        # torch's fast path leaves out padded queries.
        real = ~padding if "src_key_padding_mask" in keywords else slice(None)
        torch.testing.assert_close(got[real], want[real])
        if training:
            results = ((got, ours), (want, theirs))
            torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), [*m.parameters()]) for y, m in results))


def test_nested_tensors_are_refused_in_one_sentence():
    layer = torch.nn.TransformerEncoderLayer(E, H, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1).eval()  # plans to nest what is padded, from its first layer
    encoder.layers[0].self_attn = MultiheadAttention(E, H, batch_first=True).eval()
    x, padding = torch.randn(2, 9, E), torch.arange(9) >= torch.tensor([[9], [5]])
    with torch.no_grad(), pytest.raises(AssertionError, match="enable_nested_tensor=False"):
        encoder(x, src_key_padding_mask=padding)
    encoder.use_nested_tensor = False  # as the error says
    with torch.no_grad():
        assert encoder(x, src_key_padding_mask=padding).isfinite().all()
    layer.self_attn = MultiheadAttention(E, H, batch_first=True)
    with torch.no_grad(), pytest.warns(UserWarning, match="enable_nested_tensor is True"):
        later = torch.nn.TransformerEncoder(layer, 1).eval()
    with torch.no_grad():
        assert later(x, src_key_padding_mask=padding).isfinite().all()


EAGER = in_turn(backend=["aot_eager"], average=[False, True], sinks=[False, True])


@pytest.mark.parametrize(EAGER["argnames"], [*EAGER["argvalues"], ("inductor", True, False)])
def test_compiled(backend, average, sinks):
    """One graph, outputs, weights and gradients, also for sizes that change. Each input is one tensor in several roles.

    In evaluation by AOTAutograd, in training by Inductor.
    """
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    module = MultiheadAttention(E, H, batch_first=True, sinks=sinks).train(backend == "inductor")
    dynamic = average and backend != "inductor"

    def call(x, padding):
        out, weights = module(x, x, x, padding, average_attn_weights=average)
        return out, weights + attnkern.attention_weights(x, x, average_heads=average).mean()

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=dynamic)
    for length in (7, 12) if dynamic else (7,):
        x = torch.randn(2, length, E, requires_grad=True)
        padding = torch.arange(length) >= torch.tensor([[7], [4]])
        results = []
        for function in (compiled, call):
            out, weights = function(x, padding)
            loss = out.square().sum() + weights.square().sum()
            results.append((out, weights, *torch.autograd.grad(loss, [x, *module.parameters()])))
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


# --- masks that know what they are


MASKS = {
    "one range": lambda: masks.sliding_window(2, 1, L, S),
    "two ranges": lambda: masks.sliding_window(1, 0, L, S, sinks=2, alignment="bottom_right"),
    "of a batch": lambda: masks.padding([3, 7, 0], L, S),
    "of heads": lambda: masks.from_bool(torch.arange(S) > torch.arange(H)[:, None, None].expand(1, H, L, 1)),
    "bits": lambda: masks.from_mask_mod(lambda b, h, i, j: (i + j + b) % 2 == 0, N, None, L, S),
}
PADDINGS = {
    "none": None,
    "right": torch.arange(S) >= torch.tensor([[7], [4], [6]]),
    "left": torch.arange(S) < torch.tensor([[0], [3], [6]]),
    "all of one": torch.arange(S) >= torch.tensor([[7], [4], [0]]),
    "holes": torch.arange(S) % 3 == torch.tensor([[0], [1], [2]]),
    "float": torch.linspace(-2, 0, N * S).view(N, S),
}
BESIDE = [({}, *x) for x in itertools.product((False, True), repeat=2)] + [
    (build, False, True) for build in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"window": (2, 1)})
]
"""The constructor's options, is_causal and need_weights."""


def same_results(function, reference, leaves):
    """Outputs, weights where there are any, and gradients."""
    results = []
    for f in (function, reference):
        outs = [x for x in f() if x is not None]
        results.append((*outs, *torch.autograd.grad(sum(x.square().sum() for x in outs), leaves)))
    torch.testing.assert_close(*results)


def masked(kind, padding):
    """A query, a key, a mask and where it is True for all heads of a batch, and the padding."""
    q, k = torch.randn(N, L, E, requires_grad=True), torch.randn(N, S, E, requires_grad=True)
    mask = MASKS[kind]()
    return q, k, mask, mask.to_dense().expand(N, H, L, S), PADDINGS[padding]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_object(kind, padding):
    """A key must pass it and is_causal, which is no hint here, and the padding."""
    q, k, mask, allowed, padding = masked(kind, padding)
    hidden = padding if padding is not None and padding.dtype == torch.bool else torch.zeros(N, S, dtype=torch.bool)
    added = torch.zeros(N, S) if padding is None or padding.dtype == torch.bool else padding
    for build, is_causal, need in BESIDE:
        module = pair(batch_first=True)[1] if not build else MultiheadAttention(E, H, batch_first=True, **build)
        seen = allowed & ~hidden[:, None, None] & testing.band_mask(L, S, window=(None, None), is_causal=is_causal)
        dense = added[:, None, None].expand(N, H, L, S).masked_fill(~seen, -math.inf).flatten(0, 1)
        function = functools.partial(module, q, k, k, padding, need, mask, is_causal=is_causal)
        same_results(function, functools.partial(module, q, k, k, None, need, dense), [q, k, *module.parameters()])
        if mask.shape[:2] == (1, 1) and not is_causal:
            alone = [module(q[0], k[0], k[0], None, need, m) for m in (mask, ~allowed[0, 0])]
            torch.testing.assert_close(*alone)


@pytest.mark.parametrize("padding", ["none", "right", "holes"])
@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_object_in_cross_attention(kind, padding):
    module = CrossAttention(E, num_heads=H)
    x, context, mask, allowed, padding = masked(kind, padding)
    real = None if padding is None else ~padding
    for is_causal, need in itertools.product((False, True), repeat=2):
        options = {"is_causal": is_causal, "need_weights": need}

        def call(attn_mask, options=options):
            found = module(x, context, attn_mask=attn_mask, padding_mask=real, **options)
            return found if options["need_weights"] else (found,)

        same_results(lambda: call(mask), lambda: call(allowed), [x, context, *module.parameters()])
        if mask.shape[:2] == (1, 1):
            alone = [module(x[0], context[0], attn_mask=m, **options) for m in (mask, allowed[0, 0])]
            torch.testing.assert_close(*alone)


@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_on_one_side_is_ranges(padding, monkeypatch):
    """Of both modules alike, as the arguments of `attention` show."""
    asked, right = [], attnkern.api.attention

    def spy(q, k, v, mask, dropout_p, is_causal, **options):
        asked.append((mask, options["key_ranges"]))
        return right(q, k, v, mask, dropout_p, is_causal, **options)

    monkeypatch.setattr(attnkern.api, "attention", spy)
    together, padding = padding in ("right", "left", "all of one"), PADDINGS[padding]
    q, k = torch.randn(N, L, E), torch.randn(N, S, E)
    MultiheadAttention(E, H, batch_first=True)(q, k, k, padding, need_weights=False)
    if padding is None or padding.dtype == torch.bool:
        CrossAttention(E, num_heads=H)(q, k, padding_mask=None if padding is None else ~padding)
    for mask, ranges in asked:
        assert (mask is None) == (together or padding is None)
        assert (ranges is not None) == together
        if together:
            assert torch.equal(testing.ranges_mask(ranges, S), ~padding[:, None, None])


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
@pytest.mark.parametrize("kind", ["two ranges", "bits"])
def test_a_mask_object_compiled_and_checkpointed(kind, how):
    module = pair(batch_first=True)[1]
    q, k, mask, _, padding = masked(kind, "left")

    def call(q, k, mask, padding):
        return module(q, k, k, padding, True, mask)

    torch._dynamo.reset()
    function = functools.partial(torch.utils.checkpoint.checkpoint, call, use_reentrant=False)
    if how == "compiled":
        function = torch.compile(call, backend="aot_eager", fullgraph=True)
    leaves = [q, k, *module.parameters()]
    same_results(lambda: function(q, k, mask, padding), lambda: call(q, k, mask, padding), leaves)


# --- errors, in type as torch's


def bad(**changes):
    """Good arguments of forward (batch_first) but for the changes."""
    good = {"query": torch.randn(N, L, E), "key": torch.randn(N, S, E), "value": torch.randn(N, S, E)}
    return good | changes


def bad_unbatched(**changes):
    return {name: x[0] for name, x in bad().items()} | changes


BAD_CALLS = {
    "query of 4 dimensions": bad(query=torch.randn(1, N, L, E)),
    "key unbatched": bad(key=torch.randn(S, E)),
    "value unbatched": bad(value=torch.randn(S, E)),
    "width of query": bad(query=torch.randn(N, L, E + 1)),
    "lengths of key and value": bad(value=torch.randn(N, S + 1, E)),
    "width of value": bad(value=torch.randn(N, S, E + 1)),
    "batch of key and value": bad(key=torch.randn(N + 1, S, E), value=torch.randn(N + 1, S, E)),
    "key_padding_mask of 1 dimension": bad(key_padding_mask=torch.zeros(S, dtype=torch.bool)),
    "key_padding_mask of another length": bad(key_padding_mask=torch.zeros(N, S + 1, dtype=torch.bool)),
    "key_padding_mask of another batch": bad(key_padding_mask=torch.zeros(N + 1, S, dtype=torch.bool)),
    "key_padding_mask of integers": bad(key_padding_mask=torch.zeros(N, S, dtype=torch.int64)),
    "attn_mask of integers": bad(attn_mask=torch.zeros(L, S, dtype=torch.uint8)),
    "attn_mask of 1 dimension": bad(attn_mask=torch.zeros(S)),
    "attn_mask of 4 dimensions": bad(attn_mask=torch.zeros(N, H, L, S)),
    "attn_mask of another length": bad(attn_mask=torch.zeros(L, S + 1)),
    "attn_mask of another batch": bad(attn_mask=torch.zeros(N, L, S)),
    "attn_mask unbatched, of another number of heads": bad_unbatched(attn_mask=torch.zeros(H + 1, L, S)),
    "attn_mask unbatched, of another length": bad_unbatched(attn_mask=torch.zeros(L, S + 1)),
    "key_padding_mask unbatched, of 2 dimensions": bad_unbatched(key_padding_mask=torch.zeros(1, S, dtype=torch.bool)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
@pytest.mark.parametrize("need", [False, True])
def test_bad_calls_raise_what_torch_raises(case, need):
    theirs, ours = pair(batch_first=True)
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        theirs(**BAD_CALLS[case], need_weights=need)
    with pytest.raises(wanted.type, match=r"\Aattnkern: .*got") as got:
        ours(**BAD_CALLS[case], need_weights=need)
    assert got.type is wanted.type
    assert "\n" not in str(got.value)


@pytest.mark.parametrize("arguments", [(0, 1), (8, 0), (8, 3), (-8, 2)], ids=str)
def test_bad_constructors_raise_what_torch_raises(arguments):
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        torch.nn.MultiheadAttention(*arguments)
    with pytest.raises(wanted.type):
        MultiheadAttention(*arguments)


OPTIONS = [  # of both constructors, and of CrossAttention's
    ({"dropout": 1.5}, ValueError, "dropout must be between 0 and 1, got 1.5"),
    ({"dropout": float("nan")}, ValueError, "dropout must be between 0 and 1, got nan"),
    ({"dropout": "0.1"}, TypeError, "argument 'dropout' must be float, not str"),
    ({"sinks": torch.zeros(H)}, TypeError, "argument 'sinks' must be bool, not Tensor"),
    ({"window": 3}, TypeError, r"argument 'window' must be \(left, right\) or None, not 3"),
    ({"window": (-1, 0)}, ValueError, r"window's bounds must be >= 0 \(None: unbounded\), got \(-1, 0\)"),
]
CROSS_OPTIONS = [
    ({"alignment": "left"}, ValueError, "alignment must be 'top_left' or 'bottom_right', got 'left'"),
    ({"context_dim": 0}, ValueError, "context_dim must be at least 1, got 0"),
    ({"num_heads": 3}, ValueError, "k_dim must be a multiple of num_heads=3, got 8"),
    ({"v_dim": 6}, ValueError, "v_dim must be a multiple of num_heads=4, got 6"),
]
MASKS_OF_OTHER_SIZES = [
    ({"attn_mask": mask}, RuntimeError, r"attn_mask must be a Mask for \(3, 4, 5, 7\) scores, got one for")
    for mask in (masks.causal(L, S + 1), masks.causal(L + 1, S), masks.padding([3, 7], L, S))
]
CAUSAL_BIASES = [
    (
        {"attn_mask": bias(L, S)},
        TypeError,
        r"argument 'attn_mask' must be Tensor or None, not CausalBias \(masks.causal",
    )
    for bias in (causal_lower_right, causal_upper_left)
]
A_MASK_AS_PADDING = r"argument '{}' must be Tensor or None \(attn_mask takes a Mask\), not Mask"
SELF_CALLS = [
    *MASKS_OF_OTHER_SIZES,
    *CAUSAL_BIASES,
    ({"key_padding_mask": masks.causal(L)}, TypeError, A_MASK_AS_PADDING.format("key_padding_mask")),
    ({"key": None}, TypeError, "argument 'key' must be Tensor, not NoneType"),
    *(
        ({name: torch.zeros(n, S).double()}, RuntimeError, f"{name} must be bool or query's dtype float32, got float64")
        for name, n in (("attn_mask", L), ("key_padding_mask", N))
    ),
]
CROSS_CALLS = [
    *MASKS_OF_OTHER_SIZES,
    *CAUSAL_BIASES,
    ({"padding_mask": masks.causal(L)}, TypeError, A_MASK_AS_PADDING.format("padding_mask")),
    ({"x": torch.randn(N, L, 12).numpy()}, TypeError, "argument 'x' must be Tensor, not numpy.ndarray"),
    ({"context": [1.0]}, TypeError, "argument 'context' must be Tensor, not list"),
    ({"x": torch.nested.as_nested_tensor([torch.randn(L, 12)] * N)}, RuntimeError, "x must not be a nested tensor but"),
    ({"x": torch.randn(L)}, RuntimeError, "x must have 2"),
    ({"context": torch.randn(S, 20)}, RuntimeError, "context must have x's rank and batch size"),
    ({"context": torch.randn(N + 1, S, 20)}, RuntimeError, "context must have x's rank and batch size"),
    ({"x": torch.randn(N, L, 11)}, RuntimeError, "x's last size must be 12, got"),
    ({"context": torch.randn(N, S, 12)}, RuntimeError, "context's last size must be 20, got"),
    ({"padding_mask": torch.ones(N, S)}, TypeError, "padding_mask must be bool or an integer type"),
    ({"padding_mask": torch.ones(S).bool()}, RuntimeError, r"padding_mask must have shape \(3, 7\)"),
    ({"attn_mask": torch.zeros(L, S)}, TypeError, "attn_mask must be bool or an integer type"),
    ({"attn_mask": torch.ones(S, L).int()}, RuntimeError, r"attn_mask must have shape \(5, 7\) or "),
]


@pytest.mark.parametrize(
    ("cls", "options", "error", "match"),
    [(MultiheadAttention, *row) for row in OPTIONS] + [(CrossAttention, *row) for row in OPTIONS + CROSS_OPTIONS],
)
def test_bad_constructors(cls, options, error, match):
    with pytest.raises(error, match=rf"\Aattnkern: {match}"):
        cls(8, **({"num_heads": 4} | options))


@pytest.mark.parametrize(
    ("cls", "changes", "error", "match"),
    [(MultiheadAttention, *row) for row in SELF_CALLS] + [(CrossAttention, *row) for row in CROSS_CALLS],
)
def test_bad_calls(cls, changes, error, match):
    module, good = CrossAttention(12, 20, H), {"x": torch.randn(N, L, 12), "context": torch.randn(N, S, 20)}
    if cls is MultiheadAttention:
        module, good = MultiheadAttention(E, H, batch_first=True), bad()
    with pytest.raises(error, match=rf"\Aattnkern: {match}") as got:
        module(**(good | changes))
    assert "\n" not in str(got.value)


def test_bad_dropout():
    """One that was set later, which the constructor hasn't seen."""
    module, x = MultiheadAttention(E, H), torch.randn(N, L, E)
    module.dropout = 1.5
    with pytest.raises(RuntimeError, match=r"dropout_p must be between 0 and 1, got 1\.5"):
        module(x, x, x)


# --- CrossAttention


def naive_cross(module, x, context, allowed=None):
    """What the module says it is, in plain torch: output and weights per head."""
    q, k, v = (
        layer(tensor).unflatten(-1, (module.num_heads, -1)).transpose(-2, -3)
        for layer, tensor in ((module.q_proj, x), (module.k_proj, context), (module.v_proj, context))
    )
    band = testing.band_mask(x.size(-2), context.size(-2), window=module.window, alignment=module.alignment)
    scores = q @ k.mT / math.sqrt(q.size(-1))
    for mask in (allowed, band):
        scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    if module.sinks is not None:
        scores = torch.cat([scores, module.sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : context.size(-2)]
    return module.out_proj((weights @ v).transpose(-2, -3).flatten(-2)), weights


CROSS = {  # the constructor's options, the dtype of padding_mask, and attn_mask's sizes
    "two widths": ({}, None, None),
    "padding of integers": ({}, torch.int64, None),
    "padding": ({}, torch.bool, None),
    "edges": ({}, None, "LS"),
    "edges of each sample": ({}, None, "NLS"),
    "edges of each head": ({}, None, "NHLS"),
    "padding and edges": ({}, torch.bool, "NLS"),
    "window": ({"window": (2, 1)}, None, None),
    "sinks": ({"sinks": True}, None, None),
    "sinks, padding and edges of each head": ({"sinks": True}, torch.bool, "NHLS"),
    "window at the end": ({"window": (1, 0), "alignment": "bottom_right"}, torch.int64, None),
}


@pytest.mark.parametrize("case", CROSS)
@pytest.mark.parametrize("batched", [True, False])
def test_cross_attention(case, batched):
    """Output, weights and gradients as those of the formula in float64; 1 or True in a mask is attended to."""
    options, padding, letters = CROSS[case]
    module = CrossAttention(12, 20, H, k_dim=8, v_dim=24, out_dim=5, **options)
    if module.sinks is not None:
        torch.nn.init.normal_(module.sinks)
    exact = copy.deepcopy(module).double()
    lead = (N,) if batched else ()
    x, context = torch.randn(*lead, L, 12, requires_grad=True), torch.randn(*lead, S, 20, requires_grad=True)
    given, allowed = {}, torch.ones(S, dtype=torch.bool)
    if padding is not None:
        real = torch.arange(S) < torch.tensor([[S], [4], [1]])
        real = real if batched else real[0]
        given["padding_mask"] = real.to(padding)
        allowed = real[..., None, None, :]
    if letters is not None:
        sizes = {"N": N, "H": H, "L": L, "S": S}
        letters = letters if batched else letters.replace("N", "")
        edges = torch.rand([sizes[c] for c in letters]) < 0.6
        given["attn_mask"] = edges.to(torch.uint8)
        allowed = allowed & (edges[:, None] if letters == "NLS" else edges)
    out, weights = module(x, context, **given, need_weights=True, average_attn_weights=False)
    assert out.shape == (*lead, L, 5)
    torch.testing.assert_close(module(x, context, **given, need_weights=True), (out, weights.mean(-3)))
    torch.testing.assert_close(module(x, context, **given), out)
    seeds = torch.randn(out.shape, dtype=torch.float64), torch.randn(weights.shape, dtype=torch.float64)

    def named_results(out, weights, *leaves):
        grads = torch.autograd.grad((out, weights), leaves, [seed.to(out.dtype) for seed in seeds])
        gradients = {f"gradient {n}": g for n, g in enumerate(grads)}
        return {"output": out.detach(), "weights": weights.detach()} | gradients

    def naive(module, dtype):
        leaves = [y.detach().to(dtype).requires_grad_() for y in (x, context)]
        return named_results(*naive_cross(module, *leaves, allowed), *leaves, *module.parameters())

    actual = named_results(out, weights, x, context, *module.parameters())
    hold_to_the_rule(actual, lambda: naive(exact, torch.float64), naive(module, torch.float32), torch.float32)
    assert torch.equal(weights == 0, naive_cross(module, x, context, allowed)[1] == 0)


def test_cross_attention_defaults():
    """One input attends to itself; every size follows query_dim."""
    module, x = CrossAttention(8, num_heads=2), torch.randn(2, 5, 8)
    assert torch.equal(module(x), module(x, x))
    assert module.k_proj.weight.shape == module.v_proj.weight.shape == module.out_proj.weight.shape == (8, 8)
    causal = module(x, is_causal=True)
    torch.testing.assert_close(causal[:, :3], module(x[:, :3], is_causal=True))
    assert "num_heads=2" in repr(module)
    assert "sinks=True" in repr(CrossAttention(8, sinks=True))
    dropping = CrossAttention(8, num_heads=2, dropout=0.5)
    assert not torch.equal(dropping(x), dropping(x))
    assert torch.equal(dropping.eval()(x), dropping(x))


def test_other_modules_in_place_of_the_projections():
    """As what adapts a model puts there: without the attributes of nn.Linear."""
    module, x, context = CrossAttention(8, 6, num_heads=2), torch.randn(2, 5, 8), torch.randn(2, 7, 6)
    expected = module(x, context)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(module, name, torch.nn.Sequential(getattr(module, name)))
    assert torch.equal(module(x, context), expected)
    with pytest.raises(RuntimeError, match="context's last size must be 6, got"):
        module(x, x)


# --- attention_weights


@pytest.mark.parametrize("number", range(30))
def test_weights_of_random_problems(target, number, fresh_seed):
    """Attention to the identity matrix has the weights as its output: so the rule's reference knows what is right.

    Where lse is given, its own rounding is a relative error of every weight. Every third problem has sinks.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    inputs, options = random_problem(
        fresh_seed + number, device=target.device, dtypes=dtypes, ranges=False, biases=False
    )
    if number % 3 == 0:
        dtype = torch.promote_types(inputs.query.dtype, torch.float32)
        inputs = inputs.with_sinks(["H", "BH"][number % 2], dtype, fresh_seed + number)
    q, k, mask = inputs.query, inputs.key, inputs.attn_mask
    identity = torch.eye(k.size(-2), dtype=q.dtype, device=q.device).expand(*k.shape[:-1], -1)
    tensors = {n: x for n, x in inputs.tensors.items() if n != "value"}
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items() if x.is_floating_point()}
    call = {**tensors, **leaves}
    options["sinks"] = inputs.sinks
    _, lse = target.attention(q, k, inputs.value, mask, **options, return_lse=True)
    of_lse = testing.expected(q, k, inputs.value, mask, **options)["lse"].unit.unsqueeze(-1)
    want = None
    for given in (lse, None):
        weights = attnkern.attention_weights(lse=given, **{**options, **call})
        grad = torch.randn(weights.shape, dtype=torch.float64).to(weights)
        grads = torch.autograd.grad(weights, list(leaves.values()), grad)
        want = testing.expected(q, k, identity, mask, grad_out=grad, **options)
        for name, x in zip(["out", *leaves], (weights, *grads), strict=True):
            assert x.dtype == (q if name == "out" else leaves[name]).dtype
            e = want[name]
            unit = e.unit if name != "out" or given is None else e.unit + e.exact * of_lse
            testing.assert_within_rule(
                x.detach(), e.exact, e.baseline, gradient=name != "out", unit=unit, name=name, recipe=inputs.recipe
            )
    if not q.size(1):  # no head has no mean
        assert attnkern.attention_weights(q, k, mask, heads=slice(None), **options).shape == want["out"].exact.shape
        return
    heads = max(1, q.size(1) - 1)
    mean = attnkern.attention_weights(q, k, mask, lse=lse, heads=slice(heads), average_heads=True, **options)
    exact = want["out"].exact[:, :heads].mean(1)
    unit = (want["out"].unit + want["out"].exact * of_lse)[:, :heads].mean(1) + testing.rounding_unit(exact, q.dtype)
    testing.assert_within_rule(mean, exact, want["out"].baseline[:, :heads].mean(1), unit=unit, recipe=inputs.recipe)


ROWS = {
    "one": (2, [2]),
    "the last": (-1, [8]),
    "some": ([5, 0, -2], [5, 0, 7]),
    "a slice": (slice(1, 7, 3), [1, 4]),
    "backwards": (slice(None, None, -4), [8, 4, 0]),
    "a tensor": (torch.tensor([3, 3]), [3, 3]),
    "a range": (range(2, 5), [2, 3, 4]),
    "none": ([], []),
    "all": (None, list(range(9))),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", [None, 1, [3, 0], slice(1, None)], ids=str)
def test_chosen_rows_and_heads(rows, heads):
    """Each is masked at its own place: by the band, by a mask with rows and by one without heads."""
    wanted, index = ROWS[rows]
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 11, 8)
    options = {"enable_gqa": True, "window": (3, 1), "alignment": "bottom_right"}
    of_heads = torch.arange(4)[slice(None) if heads is None else [1] if heads == 1 else heads]
    for shape, sinks in (((2, 1, 9, 11), None), ((4, 1, 11), torch.randn(4)), ((1, 11), torch.randn(2, 4))):
        mask, options["sinks"] = torch.randn(shape), sinks
        _, lse = attnkern.attention(q, k, k, mask, **options, return_lse=True)
        full = attnkern.attention_weights(q, k, mask, **options)[:, of_heads][:, :, index]
        for given, average in itertools.product((lse, None), (False, True)):
            chosen = {"rows": wanted, "heads": heads, "average_heads": average}
            got = attnkern.attention_weights(q, k, mask, lse=given, **chosen, **options)
            torch.testing.assert_close(got, full.mean(1) if average else full)


def test_weights_of_other_ranks():
    """The shape of the output of attention, with S in place of Ev."""
    q, k, v = torch.randn(3, 1, 4, 5, 8), torch.randn(2, 1, 7, 8), torch.randn(2, 1, 7, 3)
    for lead in ((slice(None), slice(None)), (0, slice(None)), (0, 0), (0, 0, 0)):
        query = q[lead]
        key, value = (k, v) if query.dim() > 3 else (k[0], v[0]) if query.dim() == 3 else (k[0, 0], v[0, 0])
        out, lse = attnkern.attention(query, key, value, return_lse=True)
        weights = attnkern.attention_weights(query, key, lse=lse)
        torch.testing.assert_close(weights @ value, out)
        if query.dim() > 2:
            average = attnkern.attention_weights(query, key, lse=lse, average_heads=True)
            torch.testing.assert_close(average, weights.mean(-3))


def test_a_share_of_merged_keys():
    """With the log-sum-exp over all keys, the weights of some of them sum to their share."""
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 20, 8)
    parts = [attnkern.attention(q, x, x, return_lse=True) for x in (k[:, :, :12], k[:, :, 12:])]
    _, lse = attnkern.merge_attention(*parts)
    share = attnkern.attention_weights(q, k[:, :, 12:], lse=lse)
    torch.testing.assert_close(share, attnkern.attention_weights(q, k)[..., 12:])


def test_rows_without_keys_have_no_weights_and_no_gradient():
    q, k = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 3, 8, requires_grad=True)
    mask = torch.ones(5, 3, dtype=torch.bool)
    mask[2] = False
    for allowed in (mask, torch.zeros(5, 3).masked_fill(~mask, -math.inf)):
        for sinks, with_lse in itertools.product((None, torch.randn(2)), (True, False)):
            _, lse = attnkern.attention(q, k, k, allowed, sinks=sinks, return_lse=True)
            weights = attnkern.attention_weights(q, k, allowed, lse=lse if with_lse else None, sinks=sinks)
            assert torch.equal(weights[:, :, 2], torch.zeros(1, 2, 3))
            grads = torch.autograd.grad(weights.square().sum(), (q, k))
            assert torch.equal(grads[0][:, :, 2], torch.zeros(1, 2, 8))
            assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("average", [False, True])
def test_derivatives_of_weights(average):
    """First and second ones, forward mode; with fewer key heads, a mask for all heads, soft-capping and sinks."""
    q = torch.randn(2, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(2, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    options = {"enable_gqa": True, "softcap": 2.0, "window": (0, 2), "average_heads": average}

    def call(q, k, mask, sinks=None, lse=None):
        return attnkern.attention_weights(q, k, mask, sinks=sinks, lse=lse, **options)

    def loss(*inputs):
        return call(*inputs).square().sum()

    for inputs in ((q, k, mask), (q, k, mask, sinks), (q, k, mask, sinks[0].detach().requires_grad_())):
        assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, inputs)
    for inputs in ((q, k, mask), (q, k, mask, sinks)):
        per_sample = [call(*sample) for sample in zip(*inputs, strict=True)]
        torch.testing.assert_close(torch.vmap(call)(*inputs), torch.stack(per_sample))
        one, dims = [x[0] for x in inputs[1:]], [0] + [None] * (len(inputs) - 1)
        torch.testing.assert_close(torch.vmap(call, tuple(dims))(q, *one), torch.stack([call(a, *one) for a in q]))
        of_samples = torch.vmap(torch.func.grad(loss, argnums=tuple(range(len(inputs)))))(*inputs)
        torch.testing.assert_close(of_samples, torch.autograd.grad(loss(*inputs), inputs))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_weights_have_gradients(strict):
    """Of the module, with dropout and averaged, and of the function, whose lse is of more keys: a share of 1."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = MultiheadAttention(E, H, dropout=0.3, batch_first=True)

        def forward(self, x, lse):
            chosen = attnkern.attention_weights(x, x, lse=lse, rows=[1, 3], window=(2, None))
            return *self.attention(x, x, x), chosen

    model, x = Model(), torch.randn(2, 5, E)
    _, lse = attnkern.attention(x, torch.cat((x, x), 1), torch.cat((x, x), 1), return_lse=True)
    program = torch.export.export(model, (x, lse), strict=strict).module()
    results = []
    for run in (model, program):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(3)
        outs = run(leaf, lse)
        loss = sum(each.square().sum() for each in outs)
        results.append((*outs, *torch.autograd.grad(loss, [leaf, *run.parameters()])))
    torch.testing.assert_close(*results)


def test_heads_in_several_tiles(monkeypatch):
    """Tiles of a few rows or of one head, forward and backward, dropout included, are those of one large tile."""
    q, k = torch.randn(2, 4, 9, 8, requires_grad=True), torch.randn(2, 2, 11, 8, requires_grad=True)
    mask, sinks = torch.randn(4, 9, 11, requires_grad=True), torch.randn(4, requires_grad=True)
    options = {"enable_gqa": True, "window": (3, 3), "sinks": sinks}
    module = MultiheadAttention(E, H, dropout=0.3, batch_first=True)
    x = torch.randn(2, 9, E)
    results = []
    for size in (2**18, 1, 3 * 22, 2 * 9 * 22):
        monkeypatch.setattr(tiles, "TILE", {"cpu": size})
        for average in (False, True):
            _, lse = attnkern.attention(q, k, k, mask, **options, return_lse=True)
            weights = attnkern.attention_weights(q, k, mask, lse=lse, **options, average_heads=average)
            grads = torch.autograd.grad(weights.square().sum(), (q, k, mask, sinks))
            torch.manual_seed(1)
            results.append([weights, *grads, *module(x, x, x, average_attn_weights=average)])
    for other in range(2, len(results)):
        for a, b in zip(results[other], results[other % 2], strict=True):
            torch.testing.assert_close(a, b)


MEASURE = """
import json, sys
import torch
import attnkern
assert "matplotlib" not in sys.modules
torch.set_num_threads(1)
heads, length = 8, 4096
q, k = torch.randn(2, 1, heads, length, 16).unbind()
_, lse = attnkern.attention(q, k, k, return_lse=True)
attnkern.attention_weights(q[:, :, :64], k[:, :, :64], average_heads=True)
def status(name):
    return next(int(x.split()[1]) / 1024 for x in open("/proc/self/status") if x.startswith(name))
growth = {}
for name, options in {"some rows": {"rows": range(0, length, 64)}, "a mean": {"average_heads": True}}.items():
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    weights = attnkern.attention_weights(q, k, lse=lse, **options)
    growth[name] = status("VmHWM") - before, weights.numel() * 4 / 2**20
    del weights
print(json.dumps(growth))
"""


def test_memory_is_that_of_the_result():
    """And matplotlib is not imported with the package. All weights would be 512 MiB."""
    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    for name, (growth, result_size) in json.loads(result.stdout).items():
        assert growth < result_size + 24, name


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"rows": 5}, IndexError, r"rows must be in \[-5, 5\), got 5"),
        ({"heads": [0, -3]}, IndexError, r"heads must be in \[-2, 2\), got -3"),
        ({"rows": torch.tensor([0, 5])}, IndexError, r"rows must be in \[-5, 5\), got 5"),
        ({"rows": 1.0}, TypeError, "rows must be None, an int, a slice, a sequence of ints or a 1-D integer tensor"),
        ({"rows": torch.ones(5).bool()}, TypeError, r"rows must be a 1-D integer tensor, got bool of shape \(5,\)"),
        ({"rows": [True, False]}, TypeError, r"rows must be None, an int, .*, got \[True, False\]"),
        ({"heads": True}, TypeError, "heads must be None, an int, .*, got True"),
        ({"rows": torch.tensor(1)}, TypeError, r"rows must be a 1-D integer tensor, got int64 of shape \(\)"),
        ({"heads": ["a"] * 99}, TypeError, r"heads must be None, an int, .*, got \['a', .*\.\.\.$"),
        ({"lse": torch.randn(1, 2, 4)}, RuntimeError, r"lse must have the shape \(1, 2, 5\) of the queries, got"),
        ({"lse": torch.randn(1, 2, 5).to("meta")}, RuntimeError, "lse must be on query's device cpu, got meta"),
        ({"lse": torch.randn(1, 2, 5).to_sparse()}, RuntimeError, r"lse must be a dense \(strided\) tensor, got"),
        ({"heads": torch.zeros(1, dtype=torch.complex128)}, TypeError, "heads must be a 1-D integer tensor"),
        ({"lse": torch.zeros(1, 2, 5).long()}, TypeError, "lse must be a floating-point tensor or None"),
        ({"key": torch.randn(1, 2, 7, 9)}, RuntimeError, "key's last size must be query's, 8"),
        ({"window": (-1, 0)}, ValueError, "window's bounds must be >= 0"),
        ({"sinks": torch.zeros(3)}, RuntimeError, r"sinks must have one number for each of query's heads, \(2,\) or"),
        ({"query": torch.randn(5, 8), "key": torch.randn(7, 8), "heads": 0}, RuntimeError, "heads needs a head dim"),
    ],
)
def test_bad_weights_calls(options, error, match):
    arguments = {"query": torch.randn(1, 2, 5, 8), "key": torch.randn(1, 2, 7, 8)} | options
    with pytest.raises(error, match=rf"\Aattnkern: {match}") as got:
        attnkern.attention_weights(**arguments)
    assert "\n" not in str(got.value)


def test_subclasses_and_modes_see_the_call():
    class Duck:
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func.__name__, len(args), set(kwargs)

    name, positional, keywords = attnkern.attention_weights(Duck(), torch.randn(5, 8), rows=1)
    assert (name, positional) == ("attention_weights", 3)
    assert {"rows", "lse", "window"} <= keywords


# --- pictures


@pytest.fixture
def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_a_picture_shows_the_weights(pyplot, tmp_path):
    weights = torch.tensor([[0.25, 0.75, 0.0], [0.1, 0.2, 0.7]], dtype=torch.bfloat16, requires_grad=True)
    figure = attnkern.plot_attention(weights, ["a", "b"], ["x", "y", "long"], title="all of it")
    (axis, colours) = figure.axes
    assert torch.equal(torch.from_numpy(axis.images[0].get_array().filled()), weights.detach().float())
    assert axis.images[0].get_clim() == (0.0, 0.75)
    assert [t.get_text() for t in axis.get_yticklabels()] == ["a", "b"]
    assert [t.get_text() for t in axis.get_xticklabels()] == ["x", "y", "long"]
    assert [t.get_text() for t in axis.texts] == ["0.25", "0.75", "0", "0.10", "0.20", "0.70"]
    assert figure.get_suptitle() == "all of it"
    assert colours.get_ylabel() == "weight"
    figure.savefig(tmp_path / "weights.png")
    assert (tmp_path / "weights.png").stat().st_size > 1000


def test_a_picture_of_heads_and_of_many_keys(pyplot):
    figure = attnkern.plot_attention(torch.rand(5, 2, 100), key_labels=range(100))
    maps = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in maps] == [f"head {h}" for h in range(5)]
    assert [t.get_text() for t in maps[0].get_xticklabels()] == [str(n) for n in range(0, 100, 4)]
    assert not maps[0].texts
    assert maps[0].get_ylabel() == "query"
    own, axis = pyplot.subplots()
    assert attnkern.plot_attention(torch.eye(3), ax=axis, title="mine") is own
    assert axis.get_title() == "mine"


def test_bad_pictures(pyplot, monkeypatch):
    axis = pyplot.gca()
    for arguments, error, match in (
        (([[1.0]],), TypeError, "argument 'weights' must be Tensor, not list"),
        ((torch.rand(1, 2, 3, 4),), ValueError, r"weights must be \(L, S\) or \(heads, L, S\).*got \(1, 2, 3, 4\)"),
        (
            (torch.rand(3, 4), "abc", "abc"),
            ValueError,
            r"key_labels must hold 4 labels for weights \(3, 4\), got 3",
        ),
    ):
        with pytest.raises(error, match=f"attnkern: {match}"):
            attnkern.plot_attention(*arguments)
    with pytest.raises(ValueError, match=r"attnkern: ax takes one map \(L, S\), got \(1, 3, 4\)"):
        attnkern.plot_attention(torch.rand(1, 3, 4), ax=axis)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'needs matplotlib: pip install "attnkern\[plot\]"'):
        attnkern.plot_attention(torch.rand(3, 4))
