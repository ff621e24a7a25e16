"""Key ranges: each row attends to one or two intervals of keys, beside every other mask and feature."""

from itertools import chain, product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attnkern
from attnkern import testing
from bad_calls import bad, check_refused, refused
from matrix import FLOATS, KINDS, anything, documents, in_turn, window_and_sinks

LENGTHS = [(1, 1), (1, 300), (3, 97), (70, 64), (65, 130), (200, 190), (130, 385)]


@pytest.mark.parametrize(**in_turn(**{"kind, lengths": list(product(KINDS, LENGTHS))}, dtype=FLOATS), ids=str)
def test_output_lse_and_gradients(target, kind, lengths, dtype):
    ranges = KINDS[kind](*lengths).to(target.device)
    inputs = target.inputs(2, 4, *lengths, 16, heads_k=2, dtype=dtype)
    target.check(inputs, key_ranges=ranges, enable_gqa=True)


FEATURES = {
    "is_causal": {"is_causal": True},
    "window": {"window": (30, 4), "alignment": "bottom_right"},
    "softcap": {"softcap": 3.0},
    "negative scale": {"scale": -0.3},
    "all": {"is_causal": True, "alignment": "bottom_right", "window": (50, None), "softcap": 2.0, "scale": 0.4},
}


MASKS = [None, ("bool", "BHLS"), ("bool", "11LS"), ("float", "1HLS"), ("float", "B11S")]
MANY = ["whole documents", "window and sinks", "anything"]


@pytest.mark.parametrize(
    **in_turn(**{"feature, mask, kind": list(product(FEATURES, MASKS, MANY))}, dtype=FLOATS), ids=str
)
def test_beside_other_masks_and_features(target, kind, feature, mask, dtype):
    for lengths in ((130, 150), (2, 150)):
        inputs = target.inputs(2, 4, *lengths, 24, heads_k=2, dtype=dtype, mask=mask)
        target.check(inputs, key_ranges=KINDS[kind](*lengths).to(target.device), enable_gqa=True, **FEATURES[feature])


def sequences(lengths_q, lengths_k, *, gap=0, right=None, left=None):
    """Ranges of sequences, `gap` keys before each; `left`, `right`: of a window, whose last tokens are level."""
    rows, first = [], 0
    for queries, keys in zip(lengths_q, lengths_k, strict=True):
        first += gap
        level = first + keys - queries + torch.arange(queries)
        begin, end = torch.full_like(level, first), torch.full_like(level, first + keys)
        if right is not None:
            end = end.minimum(level + right + 1)
        if left is not None:
            begin = begin.maximum(level - left)
        rows.append(torch.stack([begin, end], -1))
        first += keys
    return torch.cat(rows).view(1, 1, -1, 1, 2)


QUERIES, KEYS = [3, 1, 70, 20, 33], [40, 0, 65, 7, 90]
IN_SEQUENCES = {
    "whole": sequences(QUERIES, KEYS),
    "causal": sequences(QUERIES, KEYS, right=0),
    "window, and keys of none between": sequences(QUERIES, KEYS, gap=5, right=3, left=20),
    "one query each": sequences([1] * 127, [2] * 100 + [1] * 27),
    "few and many queries": sequences([1, 1, 120, 2, 1, 1, 1], [60, 1, 120, 30, 4, 4, 5]),
    "of each entry its own": torch.cat([sequences([127], [200], right=0), sequences(QUERIES, KEYS)]),
    "the last first": sequences(QUERIES, KEYS).flip(2),
    "keys of two sequences": sequences(QUERIES, KEYS) - torch.tensor([3, 0]),
    "a window": sequences([127], [227], right=0, left=9),
    "queries of none": torch.cat([sequences([60, 40], [100, 100]), torch.zeros(1, 1, 27, 1, 2, dtype=torch.int64)], 2),
}


@pytest.mark.parametrize("band", [{}, {"is_causal": True}, {"window": (30, 50), "alignment": "bottom_right"}], ids=str)
@pytest.mark.parametrize("kind", IN_SEQUENCES)
def test_sequences(target, kind, band, dtype):
    """Rows that fall apart into sequences: kernels may take each as a call of its own."""
    inputs = target.inputs(2, 4, 127, 230, 16, heads_k=2, dtype=dtype)
    target.check(inputs, key_ranges=IN_SEQUENCES[kind].to(target.device), enable_gqa=True, **band)


@pytest.mark.parametrize("row", [0, 1, 63, 64, 65, 127, 128, 198, 199])
@pytest.mark.parametrize("end", [0, 1])
def test_one_row_unlike_its_sequence(target, row, end):
    """Sequences are found many rows at a time: one row may begin one, or keep one from being a band."""
    ranges = sequences([64, 1, 63, 72], [64, 2, 63, 80], right=0)
    ranges[0, 0, row, 0, end] -= 2
    inputs = target.inputs(1, 2, 200, 209, 16)
    target.check(inputs, key_ranges=ranges.to(target.device))


@pytest.mark.parametrize("threads", [1, 3])
def test_sinks_of_each_entry_beside_sequences(target, threads):
    """The gradient of a sink is the sum of what the sequences make of it, whoever computes them."""
    torch.set_num_threads(threads)
    ranges = sequences([3, 70, 20], [9, 80, 20], right=0)
    inputs = target.inputs(2, 4, 93, 109, 16, heads_k=2).with_sinks("BH", torch.float32, 1)
    target.check(inputs, key_ranges=ranges.to(target.device), enable_gqa=True)


@pytest.mark.parametrize("lengths", [(130, 150), (2, 150)], ids=str)
@pytest.mark.parametrize("kind", ["documents", "window and sinks", "anything"])
def test_with_dropout(target, kind, lengths, dtype):
    inputs = target.inputs(2, 4, *lengths, 16, dtype=dtype)
    target.check_dropout(inputs, key_ranges=KINDS[kind](*lengths).to(target.device), dropout_p=0.3)


@pytest.mark.parametrize(
    **in_turn(**{"dtype, size": list(product(FLOATS, [64, 80, 128, 192, 256]))}, heads_k=[1, 2, 4]), ids=str
)
def test_few_queries_of_every_kernel(target, size, heads_k, dtype):
    """Decoding: one key range for each sequence, as a cache of static size has; and one for each query. Every kernel
    has all kinds: the head sizes and the numbers of heads take turns."""
    kinds = "padding", "window and sinks", "anything"
    for turn, seqlen_q in enumerate((1, 4), start=size // 16 + heads_k // 2):
        kind = kinds[turn % 3]
        inputs = target.inputs(2, 4, seqlen_q, 1100, size, heads_k=heads_k, dtype=dtype)
        ranges = KINDS[kind](seqlen_q, 1100).to(target.device)
        target.check(inputs, key_ranges=ranges, enable_gqa=True, gradients=False)


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [
        (torch.int32, -(2**31), 2**31 - 1),
        (torch.int64, -(2**31), 2**31 - 1),
        (torch.int64, -(2**40), 2**40),
    ],
)
def test_ends_are_clamped(target, dtype, least, most):
    inputs = target.inputs(1, 2, 70, 90, 8)
    ranges = [[[5, most]], [[most, 40]], [[5, least]], [[least, 40]], [[least, most]]]
    ranges = torch.tensor(ranges, dtype=dtype, device=target.device).repeat(14, 1, 1)
    target.check(inputs, key_ranges=ranges)


def test_what_lies_outside_is_never_read(dtype):
    """NaN in keys and values in front of all ranges and behind them leaves no trace in the output."""
    q, k, v = testing.make_inputs(1, 2, 200, 400, 16, dtype=dtype).tensors.values()
    ranges = torch.tensor([[100, 290]], dtype=torch.int32)
    outside = ~testing.ranges_mask(ranges, 400).view(400, 1)
    for rows in (slice(200), slice(2)):
        clean = attnkern.attention(q[:, :, rows], k, v, key_ranges=ranges, backend="cpu")
        poisoned = (x.masked_fill(outside, torch.nan) for x in (k, v))
        assert torch.equal(attnkern.attention(q[:, :, rows], *poisoned, key_ranges=ranges, backend="cpu"), clean)


def test_strides_and_shapes_broadcast(target):
    inputs = target.inputs(2, 4, 60, 70, 8)
    ranges = anything(2, 4, 60, 2, 70).to(target.device, torch.int32)
    whole = target.attention(*inputs.tensors.values(), key_ranges=ranges)
    for view in (
        ranges.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0),
        ranges.repeat(1, 1, 1, 1, 2)[..., :2],
        torch.stack([ranges, ranges], 2)[:, :, 1],
    ):
        with testing.unmodified(view):
            assert torch.equal(target.attention(*inputs.tensors.values(), key_ranges=view), whole)
    q, k, v = inputs.tensors.values()
    for n in range(4):
        one = target.attention(q[0, n], k[0, n], v[0, n], key_ranges=ranges[0, n])
        torch.testing.assert_close(one, whole[0, n])
    rows = ranges[0, 0]
    torch.testing.assert_close(
        target.attention(q, k, v, key_ranges=rows), target.attention(q, k, v, key_ranges=rows.expand(2, 4, 60, 2, 2))
    )


def test_derivatives_of_any_order(target):
    q, k, v = (x.double() for x in target.inputs(1, 2, 7, 9, 4).tensors.values())
    ranges = window_and_sinks(7, 9, left=2, sinks=1).to(target.device)

    def f(*inputs):
        return target.attention(*inputs, key_ranges=ranges, return_lse=True, softcap=2.0)

    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_weights(target, kind):
    """Those of the mask that the ranges stand for, of all rows and heads and of some, and their gradients."""
    ranges = KINDS[kind](60, 70).to(target.device)
    q, k, v = (x.requires_grad_() for x in target.inputs(2, 4, 60, 70, 8).tensors.values())
    mask = testing.ranges_mask(ranges, 70)
    _, lse = target.attention(q, k, v, mask, return_lse=True)
    for options in ({}, {"lse": lse}, {"rows": [3, -1], "heads": [2, 0]}, {"average_heads": True, "is_causal": True}):
        got = attnkern.attention_weights(q, k, key_ranges=ranges, **options)
        want = attnkern.attention_weights(q, k, mask, **options)
        torch.testing.assert_close(got, want)
        grads = (torch.autograd.grad(x.square().sum(), (q, k)) for x in (got, want))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_of_a_part(target, kind):
    ranges = KINDS[kind](60, 70).to(target.device)
    q, k, v = target.inputs(2, 4, 60, 70, 8).tensors.values()
    mask = testing.ranges_mask(ranges, 70)
    out, lse = target.attention(q, k, v, return_lse=True)
    given = torch.randn_like(out), q, k, v, out, lse
    got = attnkern.attention_backward(*given, key_ranges=ranges, backend=target.backend)
    torch.testing.assert_close(got, attnkern.attention_backward(*given, mask, backend=target.backend))


def test_vmap(target):
    q, k, v = (target.randn(3, 2, 4, 30, 8) for _ in range(3))
    ranges = anything(6, 1, 30, 2, 30).unflatten(0, (3, 2)).to(target.device)
    for given, dim in ((ranges, 0), (ranges[0], None)):
        got = torch.vmap(lambda q, k, v, r: target.attention(q, k, v, key_ranges=r), in_dims=(0, 0, 0, dim))(
            q, k, v, given
        )
        for n in range(3):
            want = target.attention(q[n], k[n], v[n], key_ranges=given if dim is None else given[n])
            torch.testing.assert_close(got[n], want)


def test_compiles_once_for_all_lengths(target):
    def f(q, k, v, ranges):
        return target.attention(q, k, v, key_ranges=ranges, is_causal=True)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    for length in (40, 56, 77):
        inputs = [target.randn(1, 2, length, 8).requires_grad_() for _ in range(3)]
        ranges = documents(length, length).to(target.device, torch.int32)
        results = []
        for function in (compiled, f):
            out = function(*inputs, ranges)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


Q = torch.zeros(2, 4, 5, 8)
FUNCTIONS = {
    attnkern.attention: (Q, Q, Q),
    attnkern.explain: (Q, Q, Q),
    attnkern.attention_weights: (Q, Q),
    attnkern.attention_backward: (Q, Q, Q, Q, Q, Q[..., 0]),
}


def bad_ranges(message, ranges, error=RuntimeError):
    """Rows: every function that takes ranges refuses these."""
    return [bad(message, lambda f=f: f(*FUNCTIONS[f], key_ranges=ranges), error) for f in FUNCTIONS]


def ranges_of(*shape, device="cpu"):
    return torch.zeros(shape, dtype=torch.int32, device=device)


BAD = [
    bad_ranges("key_ranges must be int32 or int64, got float32", torch.zeros(5, 1, 2)),
    bad_ranges("argument 'key_ranges' must be Tensor or None, not list", [(0, 5)], TypeError),
    bad_ranges("must have the shape (..., 1 or 2 ranges, 2", ranges_of(2)),
    bad_ranges("1 or 2 ranges", ranges_of(5, 3, 2)),
    bad_ranges("2: begin and end", ranges_of(5, 1, 1)),
    bad_ranges("rows of scores (2, 4, 5), got (4, 1, 2)", ranges_of(4, 1, 2)),
    bad_ranges("rows of scores (2, 4, 5)", ranges_of(2, 5, 1, 2)),
    bad_ranges("must be on query's device cpu, got meta", ranges_of(5, 1, 2, device="meta")),
]


@refused(chain(*BAD))
def test_bad_calls(call, error, message):
    check_refused(call, error, message)


def test_explain_names_them():
    text = str(attnkern.explain(Q, Q, Q, key_ranges=torch.zeros(5, 1, 2, dtype=torch.int32)))
    assert "key_ranges (1, 1, 5, 1, 2) int32 cpu" in text
