"""What no query attends to never enters a sum, whatever it holds: caches' unused slots, padding, gaps."""

import functools
import math
from itertools import product

import pytest
import torch

import attnkern
from attnkern import testing
from matrix import FLOATS, in_turn
from random_problems import attention_in_bits

MASKS = {
    "bool": {"mask": ("bool", "BHLS")},
    "bool of keys": {"mask": ("bool", "B11S")},
    "bits": {"mask": ("bool", "BHLS"), "function": attention_in_bits},
    "bits of keys and ranges": {"mask": ("bool", "B11S"), "ranges": ("near", "1HL", 1), "function": attention_in_bits},
    "ranges": {"ranges": ("few", "BHL", 2)},
    "ranges of a batch": {"ranges": ("anything", "B11", 1)},
    "bool and ranges": {"mask": ("bool", "11LS"), "ranges": ("near", "1HL", 1)},
    "float and ranges": {"mask": ("float", "BHLS"), "ranges": ("near", "B1L", 2)},
    "causal": {"is_causal": True},
    "window and bool": {"mask": ("bool", "BH1S"), "window": (9, 5), "alignment": "bottom_right"},
    "softcap": {"mask": ("bool", "BH1S"), "ranges": ("near", "BHL", 1), "softcap": 2.0},
    "negative scale": {"mask": ("bool", "BH1S"), "ranges": ("near", "BHL", 1), "scale": -0.7},
}
# More keys than queries, decoding, odd sizes; heads that share keys.
SIZES = [(70, 109, 24, 2), (3, 300, 64, 2), (1, 700, 64, 1), (46, 209, 130, 1), (5, 90, 7, 4)]


def make(target, sizes, dtype, *, poison, mask=None, ranges=None, **options):
    seqlen_q, seqlen_k, size, heads_k = sizes
    inputs = target.inputs(2, 4, seqlen_q, seqlen_k, size, heads_k=heads_k, dtype=dtype, mask=mask)
    if ranges is not None:
        inputs = inputs.with_ranges(*ranges, torch.int32, int(torch.randint(2**31, ())))
    return inputs.with_poison(poison), {"enable_gqa": True, **options}


def on(target, inputs, options):
    """The options of a check, for a function of its own on the backend that the target has for these inputs."""
    if (function := options.get("function")) is None:
        return options
    return {**options, "function": functools.partial(function, backend=target.backend_for(inputs.query))}


@pytest.mark.parametrize(**in_turn(**{"sizes, kind": list(product(SIZES, MASKS))}, dtype=FLOATS), ids=str)
def test_output_lse_and_gradients(target, kind, sizes, dtype):
    for poison in (math.nan, math.inf):
        inputs, options = make(target, sizes, dtype, poison=poison, **MASKS[kind])
        target.check(inputs, **on(target, inputs, options))


def test_unused_slots_of_a_cache(target, dtype):
    """Keys beyond seqused_k, in prefill and decoding: what torch.empty left there."""
    for lengths_q in ([20, 33], [1, 1], [1, 3]):
        inputs = target.inputs(1, 4, sum(lengths_q), 200, 16, heads_k=2, dtype=dtype).with_poison(math.nan)
        packed = testing.Packed([0, lengths_q[0], sum(lengths_q)], [0, 80, 200], [33, 64])
        for options in ({}, {"is_causal": True, "alignment": "bottom_right"}):
            options |= {"looks": True, "enable_gqa": True, "backend": target.backend_for(inputs.query)}
            testing.check_packed(inputs, packed, **options)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_gaps_between_jagged_sequences(poison):
    lengths = torch.tensor([20, 33, 10])
    x = torch.randn(3, 50, 2, 8)
    gaps = torch.arange(50) >= lengths[:, None]
    clean = torch.nested.narrow(x, 1, torch.zeros(3, dtype=torch.int64), lengths, layout=torch.jagged)
    x = x.masked_fill(gaps[..., None, None], poison).requires_grad_()
    holes = torch.nested.narrow(x, 1, torch.zeros(3, dtype=torch.int64), lengths, layout=torch.jagged)
    want, out = (
        attnkern.attention(*[n.transpose(1, 2)] * 3, is_causal=True).values().transpose(-2, -3) for n in (clean, holes)
    )
    live = ~gaps.flatten()
    torch.testing.assert_close(out.reshape(150, -1)[live], want.reshape(150, -1)[live])
    assert out.isfinite().all()


def derivatives(target, inputs, poison, options):
    """Of `inputs` and a direction, both with `poison` where no query attends (None: as they are): the tangent of the
    output and, twice differentiated, the gradients of query, key and value."""
    function = options.get("function", attnkern.attention)
    options = {name: x for name, x in options.items() if name != "function"}
    clean = {n: x for n, x in inputs.tensors.items() if n in ("query", "key", "value")}
    masks = {n: x for n, x in inputs.tensors.items() if n not in clean}
    backend = target.backend_for(inputs.query)
    dead = testing.unattended(**inputs.tensors, **options)
    generator = torch.Generator().manual_seed(5)

    def poisoned(x, name):
        return x if poison is None else x.masked_fill(dead[name], poison)

    def random_like(x, name):
        return poisoned(torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device), name)

    def call(q, k, v):
        return function(query=q, key=k, value=v, **masks, **options, backend=backend)

    values = [poisoned(x, name) for name, x in clean.items()]
    moved = [random_like(x, name) for name, x in clean.items()]
    seed = random_like(inputs.query[..., :1].expand(*inputs.query.shape[:3], inputs.value.shape[3]), "query")
    _, tangent = torch.func.jvp(call, tuple(values), tuple(moved))
    leaves = [x.requires_grad_() for x in values]
    first = torch.autograd.grad(call(*leaves), leaves, seed, create_graph=True)
    return tangent, *torch.autograd.grad(first, leaves, moved)


@pytest.mark.parametrize("kind", ["bool", "bool of keys", "bits", "ranges", "causal", "softcap"])
def test_derivatives_of_second_order_and_forward_mode(target, kind):
    inputs, options = make(target, (9, 40, 8, 2), torch.float64, poison=math.nan, **MASKS[kind])
    got, want = (derivatives(target, inputs, poison, options) for poison in (math.nan, None))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
