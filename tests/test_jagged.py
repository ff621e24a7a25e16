"""Jagged nested tensors on packed sequences: attnkern's functions, its module, and F.sdpa with `full=True`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nested._internal import ops as torchs_ops
from torch.utils._python_dispatch import TorchDispatchMode

import attnkern
from attnkern import testing

LENGTHS = {
    "alike": ([32, 32, 32], [32, 32, 32]),
    "short": ([3, 20, 1, 47, 33, 5], [3, 20, 1, 47, 33, 5]),
    "empty ones": ([0, 20, 0, 30], [0, 20, 0, 30]),
    "crossed": ([5, 70, 1, 130], [90, 12, 33, 250]),
    "no keys": ([5, 70, 3], [90, 0, 33]),
}
OPTIONS = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "alignment": "bottom_right"},
    "window": {"window": (20, 3), "scale": 0.4, "softcap": 3.0},
}
ATTENDS = {"attention": attnkern.attention, "sdpa": attnkern.scaled_dot_product_attention}


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def jagged(values, lengths, ends=None):
    """(B, n, heads, size) of (T, heads, size)."""
    return torch.nested.nested_tensor_from_jagged(values, offsets(lengths) if ends is None else ends)


def packed(target, lengths_q, lengths_k, dtype=torch.float32, heads=4, heads_k=2, size=16, size_v=24):
    shapes = (sum(lengths_q), heads, size), (sum(lengths_k), heads_k, size), (sum(lengths_k), heads_k, size_v)
    return [target.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def nested(q, k, v, lengths_q, lengths_k):
    """(B, heads, n, size), keys and values with offsets of their own."""
    parts = (q, lengths_q), (k, lengths_k), (v, lengths_k)
    return [jagged(x, lengths).transpose(1, 2) for x, lengths in parts]


def flat(x):
    """(T, heads, size) of (B, heads, n, size)."""
    return x.transpose(1, 2).values()


def one_by_one(attention, q, k, v, lengths_q, lengths_k, **options):
    """out (T, heads, size) and lse (heads, T) by a call for each sequence."""
    outs, lses = [], []
    for tensors in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
        out, lse = attention(*(x.transpose(0, 1) for x in tensors), return_lse=True, **options)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_sequence_is_a_call_of_its_own(target, lengths, options, dtype):
    lengths_q, lengths_k = LENGTHS[lengths]
    given = {"enable_gqa": True, **OPTIONS[options]}
    tensors = packed(target, lengths_q, lengths_k, dtype)
    query, *others = nested(*tensors, lengths_q, lengths_k)
    out, lse = attnkern.attention(query, *others, return_lse=True, backend=target.backend, **given)
    assert out.shape == (len(lengths_q), 4, query.shape[2], 24)
    assert lse.shape == (len(lengths_q), 4, query.shape[2])
    assert out.offsets() is lse.offsets() is query.offsets()
    want, want_lse = one_by_one(target.attention, *tensors, lengths_q, lengths_k, **given)
    rule = {"float64": (1e-12, 1e-12), "float32": (2e-5, 1e-5)}.get(str(dtype)[6:], (4e-2, 3e-2))
    for got, expected in ((flat(out), want), (lse.values(), want_lse)):
        torch.testing.assert_close(got, expected, atol=rule[0], rtol=rule[1])
    grad = torch.randn_like(want)
    grads = torch.autograd.grad(flat(out), tensors, grad)
    for got, expected in zip(grads, torch.autograd.grad(want, tensors, grad), strict=True):
        torch.testing.assert_close(got, expected, atol=4 * rule[0], rtol=4 * rule[1])


def test_the_rule_holds_for_each_sequence(target, dtype):
    """The project's own rule, for the middle one of three."""
    lengths = [40, 90, 30]
    tensors = [x.detach() for x in packed(target, lengths, lengths, dtype, heads_k=4)]
    out = attnkern.attention(*nested(*tensors, lengths, lengths), is_causal=True, backend=target.backend)
    a, b, c = (x[40:130].transpose(0, 1)[None] for x in tensors)
    testing.expected(a, b, c, is_causal=True)["out"].check(flat(out)[40:130].transpose(0, 1)[None])


@pytest.mark.parametrize("attend", ATTENDS)
def test_without_heads(attend):
    lengths = [4, 7, 2]
    tensors = [torch.randn(13, 8) for _ in range(3)]
    out = ATTENDS[attend](*(jagged(x, lengths) for x in tensors), is_causal=True)
    alone = zip(*(x.split(lengths) for x in tensors), strict=True)
    want = [F.scaled_dot_product_attention(*x, is_causal=True) for x in alone]
    torch.testing.assert_close(out.values(), torch.cat(want))


def test_where_a_batch_dimension_is_ragged():
    """(B, n, L, E): every one of the n is a sequence of L, as in torch."""
    tensors = [torch.randn(13, 5, 8) for _ in range(3)]
    ends = offsets([4, 7, 2])
    out = attnkern.attention(*(jagged(x, None, ends) for x in tensors), window=(1, 0))
    torch.testing.assert_close(out.values(), attnkern.attention(*tensors, window=(1, 0)))
    with attnkern.use_as_sdpa(full=True) as calls:
        out = F.scaled_dot_product_attention(*(jagged(x, None, ends) for x in tensors))
    assert calls.attnkern == 1
    torch.testing.assert_close(out.values(), F.scaled_dot_product_attention(*tensors))


@pytest.mark.parametrize("is_causal", [False, True])
def test_sequences_with_holes_between_them(is_causal):
    """As torch.nested.narrow makes them, of a padded batch."""
    starts, lengths = torch.tensor([1, 0, 2]), torch.tensor([4, 7, 2])
    padded = [torch.randn(3, 10, 4, 16, requires_grad=True) for _ in range(3)]
    q, k, v = (torch.nested.narrow(x, 1, starts, lengths, layout=torch.jagged).transpose(1, 2) for x in padded)
    assert q.lengths() is not None
    options = {"is_causal": is_causal, "alignment": "bottom_right"}
    out = attnkern.attention(q, k, v, **options)
    assert out.offsets() is q.offsets()
    assert out.lengths() is q.lengths()
    got, want = [], []
    for i, (start, n) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        parts = [x[i, start : start + n].transpose(0, 1) for x in padded]
        got.append(out.unbind()[i].flatten())
        want.append(attnkern.attention(*parts, **options).flatten())
    torch.testing.assert_close(torch.cat(got), torch.cat(want))
    grads = torch.autograd.grad(out.values().square().sum(), padded)
    for g, w in zip(grads, torch.autograd.grad(torch.cat(want).square().sum(), padded), strict=True):
        torch.testing.assert_close(g, w)


def test_dropout_comes_again(target):
    lengths = [64, 30]
    tensors = nested(*packed(target, lengths, lengths, heads_k=4, size_v=16), lengths, lengths)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(flat(attnkern.attention(*tensors, dropout_p=0.5, backend=target.backend)))
    assert torch.equal(*results)
    assert not torch.allclose(results[0], flat(attnkern.attention(*tensors, backend=target.backend)))


def test_autocast(target):
    lengths = [20, 30]
    tensors = nested(*packed(target, lengths, lengths, heads_k=4), lengths, lengths)
    with torch.autocast(target.device, torch.bfloat16):
        out = attnkern.attention(*tensors, backend=target.backend)
    low = [x.detach().to(torch.bfloat16) for x in tensors]
    assert out.dtype == torch.bfloat16
    assert torch.equal(flat(out), flat(attnkern.attention(*low, backend=target.backend)))


class Watched(TorchDispatchMode):
    """Every operator that runs."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func._overloadpacket.__name__)
        if isinstance(out, torch.Tensor) and not out.is_nested:
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("full", [False, True], ids=["", "F.sdpa"])
def test_nothing_is_waited_for_nor_padded(full):
    """One sequence of 500 among 50 of 10: padded to the longest, the batch would hold 25 times its tokens."""
    lengths = [10] * 50 + [500]
    values, ends = torch.randn(1000, 4, 16), offsets(lengths)
    q = jagged(values.requires_grad_(), None, ends).transpose(1, 2)
    with attnkern.use_as_sdpa(full=full), Watched() as watched:
        attend = F.scaled_dot_product_attention if full else attnkern.scaled_dot_product_attention
        attend(q, q, q, is_causal=True).values().sum().backward()
    assert "forward" in watched.names
    assert "backward" in watched.names
    assert not watched.names & {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "to_padded_tensor"}
    assert watched.largest <= values.numel()


def graphs(attend):
    """Compiled with fullgraph: how many graphs batches of several lengths take, and whether they are right."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for lengths in ([20, 31, 9], [7, 50, 3], [64, 9, 12]):
        x = torch.nested.nested_tensor(
            [torch.randn(n, 4, 16) for n in lengths], layout=torch.jagged, requires_grad=True
        )
        results = []
        for function in (compiled, attend):
            out = function(x)
            results.append((out.values(), torch.autograd.grad(out.values().square().sum(), x)[0].values()))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    return counter.frame_count


def test_one_graph_serves_all_lengths():
    def attend(x):
        y = x.transpose(1, 2)
        return attnkern.attention(y, y, y, is_causal=True, window=(9, None)).transpose(1, 2)

    assert graphs(attend) == 1


def test_one_graph_of_torchs_function_serves_all_lengths():
    def attend(x):
        y = x.transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2)

    with attnkern.use_as_sdpa(full=True) as calls:
        assert graphs(attend) == 1
    assert calls.torch == 0


@pytest.mark.parametrize("lengths", LENGTHS)
def test_torchs_function(lengths):
    lengths_q, lengths_k = LENGTHS[lengths]
    tensors = packed(torch, lengths_q, lengths_k)
    before = torchs_ops.jagged_scaled_dot_product_attention
    with attnkern.use_as_sdpa(full=True) as calls:
        out = F.scaled_dot_product_attention(*nested(*tensors, lengths_q, lengths_k), is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(flat(out).sum(), tensors)
    assert calls.lines == {("aten::scaled_dot_product_attention", "attnkern cpu", ""): 1}
    assert torchs_ops.jagged_scaled_dot_product_attention is before
    want, _ = one_by_one(attnkern.attention, *tensors, lengths_q, lengths_k, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(flat(out), want)
    for got, expected in zip(grads, torch.autograd.grad(want.sum(), tensors), strict=True):
        torch.testing.assert_close(got, expected)


def test_what_goes_to_torch():
    lengths = [4, 7]
    x = jagged(torch.randn(11, 3, 8), lengths).transpose(1, 2)
    with attnkern.use_as_sdpa() as calls:  # without full=True all of them
        F.scaled_dot_product_attention(x, x, x)
    assert calls.attnkern == 0
    with attnkern.use_as_sdpa(full=True) as calls, pytest.raises(ValueError, match="Masks are not yet supported"):
        F.scaled_dot_product_attention(x, x, x, torch.zeros(7, 7))
    ((_, kernel, reason),) = calls.lines
    assert kernel == "torch"
    assert "attn_mask must be None beside jagged nested tensors" in reason


def test_explain():
    x = jagged(torch.randn(11, 3, 8), [4, 7]).transpose(1, 2)
    assert attnkern.explain(x, x, x, is_causal=True).chosen == "cpu"


X = jagged(torch.zeros(11, 3, 8), [4, 7]).transpose(1, 2)
DENSE = torch.zeros(2, 3, 7, 8)
STRIDED = torch.nested.nested_tensor([torch.zeros(3, 4, 8), torch.zeros(3, 7, 8)])
BAD = {
    "attn_mask": ((X, X, X), {"attn_mask": torch.zeros(7, 7)}, ValueError, "attn_mask must be None beside jagged"),
    "key_ranges": ((X, X, X), {"key_ranges": torch.zeros(1, 1, 2).int()}, ValueError, "key_ranges must be None beside"),
    "Mask": ((X, X, X), {"attn_mask": attnkern.masks.causal(7)}, ValueError, "attn_mask must be None beside jagged"),
    "dense key": ((X, DENSE, DENSE), {}, ValueError, "must all be nested tensors of the jagged layout .* got key"),
    "dense query": ((DENSE, X, X), {}, ValueError, "must all be nested tensors of the jagged layout .* got query"),
    "strided": ((STRIDED, STRIDED, STRIDED), {}, RuntimeError, "supported in the jagged layout only"),
    "strided key": ((X, STRIDED, STRIDED), {}, RuntimeError, "supported in the jagged layout only"),
    "batch": (
        (X, *[jagged(torch.zeros(11, 3, 8), [4, 4, 3]).transpose(1, 2)] * 2),
        {},
        RuntimeError,
        r"key must have query's batch size \(number of sequences\) 2, got 3",
    ),
    "other lengths": (
        (X, X, jagged(torch.zeros(11, 3, 8), [5, 6]).transpose(1, 2)),
        {},
        RuntimeError,
        "value's sequences must have the lengths of key's",
    ),
    "ragged elsewhere": ((X, X.transpose(1, 2), X), {}, ValueError, r"key must have .* \(dimension 2 of 4\), got"),
    "ragged size": ((X.transpose(2, 3),) * 3, {}, ValueError, "last dimension must not be the ragged one"),
    "size": (
        (X, jagged(torch.zeros(11, 3, 4), [4, 7]).transpose(1, 2), X),
        {},
        RuntimeError,
        "key's last size must be query's, 8",
    ),
    "alignment": ((X, X, X), {"alignment": "left"}, ValueError, "alignment must be 'top_left' or 'bottom_right'"),
    "is_causal": ((X, X, X), {"is_causal": 1}, TypeError, "'is_causal' must be bool"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    tensors, options, error, message = BAD[what]
    with pytest.raises(error, match=message):
        attnkern.attention(*tensors, **options)


def test_functions_that_take_dense_tensors_say_so():
    with pytest.raises(ValueError, match="attention_weights takes dense tensors"):
        attnkern.attention_weights(X, X)


# --------------------------------------------------------------------------------------------------------- modules

E, H = 32, 4
SEQUENCES = [9, 17, 4, 12, 17, 6]


class Block(nn.Module):
    """A layer of torch's functions, which takes padded batches and jagged ones."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.norm1, self.norm2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.wide, self.narrow = nn.Linear(E, 2 * E), nn.Linear(2 * E, E)

    def forward(self, x, mask=None):
        q, k, v = (y.unflatten(-1, (H, E // H)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


def torchs_encoder():
    layer = nn.TransformerEncoderLayer(E, H, 2 * E, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def with_our_module(encoder):
    """The same encoder, of torch's layers around attnkern's attention."""
    encoder = copy.deepcopy(encoder)
    for layer in encoder.layers:
        ours = attnkern.nn.MultiheadAttention(E, H, batch_first=True)
        ours.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = ours
    return encoder


def losses(model, dtype, step):
    """Of 20 steps of training on sequences of several lengths."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(n, E, generator=generator, dtype=torch.float64).to(dtype) for n in SEQUENCES]
    wanted = torch.randn(sum(SEQUENCES), E, generator=generator, dtype=torch.float64).to(dtype)
    model = model.to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(20):
        loss = (step(model, inputs) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def of_jagged(model, inputs):
    return model(torch.nested.nested_tensor(inputs, layout=torch.jagged)).values()


def padded(inputs):
    x = nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    return x, torch.arange(x.shape[1]) < torch.tensor(SEQUENCES)[:, None]


def of_padded(model, inputs):
    x, real = padded(inputs)
    return model(x, src_key_padding_mask=~real)[real]


def of_padded_blocks(model, inputs):
    x, real = padded(inputs)
    for block in model:
        x = block(x, real[:, None, None])
    return x[real]


def check_training(build, with_padding, with_jagged):
    """Losses equal to rounding in float64, and by the rule in float32, where torch's padded batch is the yardstick."""
    torch.manual_seed(0)
    model = build()
    results = {}
    for dtype in (torch.float64, torch.float32):
        results[dtype] = [
            losses(copy.deepcopy(model), dtype, with_padding),
            losses(with_jagged(model), dtype, of_jagged),
        ]
    exact, found = results[torch.float64]
    assert exact[-1] < 0.9 * exact[0]
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)
    baseline, found = results[torch.float32]
    testing.assert_within_rule(found, exact, baseline, name="losses")


def test_torchs_encoder_trains_on_jagged_tensors():
    check_training(torchs_encoder, of_padded, with_our_module)


def test_blocks_of_torchs_functions_train_on_jagged_tensors():
    with attnkern.use_as_sdpa(full=True) as calls:
        check_training(lambda: nn.Sequential(Block(), Block()), of_padded_blocks, copy.deepcopy)
    assert calls.torch == 0


def test_torchs_encoder_compiles():
    torch._dynamo.reset()
    model = with_our_module(torchs_encoder()).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = [torch.randn(n, E) for n in SEQUENCES]
    results = []
    for function in (compiled, model):
        out = of_jagged(function, inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_the_module_attends_across():
    """Queries and keys of different lengths and widths, causal, in a window, with sinks."""
    module = attnkern.nn.MultiheadAttention(E, H, batch_first=True, kdim=24, vdim=40, window=(5, None), sinks=True)
    nn.init.normal_(module.sinks)
    lengths_q, lengths_k = [3, 8], [6, 2]
    q, k, v = torch.randn(11, E), torch.randn(8, 24), torch.randn(8, 40)
    parts = (q, lengths_q), (k, lengths_k), (v, lengths_k)
    out, weights = module(*(jagged(x, n) for x, n in parts), need_weights=False, is_causal=True)
    assert weights is None
    alone = zip(*(x.split(n) for x, n in parts), strict=True)
    want = [module(*x, need_weights=False, is_causal=True)[0] for x in alone]
    torch.testing.assert_close(out.values(), torch.cat(want))


@pytest.mark.parametrize(
    ("made", "called", "message"),
    [
        ({}, {"need_weights": True}, "don't go with need_weights"),
        ({}, {"attn_mask": torch.zeros(7, 7)}, "don't go with attn_mask"),
        ({}, {"key_padding_mask": torch.zeros(2, 7)}, "don't go with key_padding_mask"),
        ({"add_bias_kv": True}, {}, "don't go with add_bias_kv"),
        ({"add_zero_attn": True}, {}, "don't go with add_zero_attn"),
        ({"batch_first": False}, {}, "don't go with batch_first=False"),
        ({}, {"key": torch.zeros(2, 7, E)}, "key must be a jagged nested tensor"),
    ],
)
def test_what_the_module_refuses(made, called, message):
    module = attnkern.nn.MultiheadAttention(E, H, **{"batch_first": True, **made})
    x = jagged(torch.zeros(11, E), [4, 7])
    with pytest.raises(AssertionError, match=message):
        module(**{"query": x, "key": x, "value": x, "need_weights": False, **called})
