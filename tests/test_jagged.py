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
from bad_calls import bad, check_refused, refused
from sequences import LENGTHS, ends, flat, jagged, nested, one_by_one, packed

ATTENDS = {"attention": attnkern.attention, "sdpa": attnkern.scaled_dot_product_attention}


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
    offsets = ends([4, 7, 2], torch.int64)
    q, k, v = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in tensors)
    out = attnkern.attention(q, k, v, window=(1, 0))
    torch.testing.assert_close(out.values(), attnkern.attention(*tensors, window=(1, 0)))
    with attnkern.use_as_sdpa(full=True) as calls:
        out = F.scaled_dot_product_attention(q, k, v)
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
    values = torch.randn(1000, 4, 16, requires_grad=True)
    q = jagged(values, lengths).transpose(1, 2)
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
    lengths = LENGTHS[lengths]
    tensors = packed(torch, *lengths)
    before = torchs_ops.jagged_scaled_dot_product_attention
    with attnkern.use_as_sdpa(full=True) as calls:
        out = F.scaled_dot_product_attention(*nested(*tensors, *lengths), is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(flat(out).sum(), tensors)
    assert calls.lines == {("aten::scaled_dot_product_attention", "attnkern cpu", ""): 1}
    assert torchs_ops.jagged_scaled_dot_product_attention is before
    want, _ = one_by_one(attnkern.attention, *tensors, *lengths, is_causal=True)
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
POOL = torch.zeros(4, 2, 16, 8)
STRIDED = torch.nested.nested_tensor([torch.zeros(3, 4, 8), torch.zeros(3, 7, 8)])
BAD = [
    bad(
        "attn_mask must be None beside jagged",
        lambda: attnkern.attention(X, X, X, attn_mask=torch.zeros(7, 7)),
        ValueError,
    ),
    bad(
        "key_ranges must be None beside",
        lambda: attnkern.attention(X, X, X, key_ranges=torch.zeros(1, 1, 2).int()),
        ValueError,
    ),
    bad(
        "attn_mask must be None beside jagged",
        lambda: attnkern.attention(X, X, X, attn_mask=attnkern.masks.causal(7)),
        ValueError,
    ),
    bad(
        "must all be nested tensors of the jagged layout ... got key",
        lambda: attnkern.attention(X, DENSE, DENSE),
        ValueError,
    ),
    bad(
        "must all be nested tensors of the jagged layout ... got query",
        lambda: attnkern.attention(DENSE, X, X),
        ValueError,
    ),
    bad("supported in the jagged layout only", lambda: attnkern.attention(STRIDED, STRIDED, STRIDED)),
    bad("supported in the jagged layout only", lambda: attnkern.attention(X, STRIDED, STRIDED)),
    bad(
        "query must be dense beside a block_table, got a nested tensor",
        lambda: attnkern.attention(X, POOL, POOL, block_table=torch.zeros(2, 1, dtype=torch.int32)),
        ValueError,
    ),
    bad(
        "key must have query's batch size (number of sequences) 2, got 3",
        lambda: attnkern.attention(X, *[jagged(torch.zeros(11, 3, 8), [4, 4, 3]).transpose(1, 2)] * 2),
    ),
    bad(
        "value's sequences must have the lengths of key's",
        lambda: attnkern.attention(X, X, jagged(torch.zeros(11, 3, 8), [5, 6]).transpose(1, 2)),
    ),
    bad("key must have ... (dimension 2 of 4), got", lambda: attnkern.attention(X, X.transpose(1, 2), X), ValueError),
    bad("last dimension must not be the ragged one", lambda: attnkern.attention(*(X.transpose(2, 3),) * 3), ValueError),
    bad(
        "key's last size must be query's, 8",
        lambda: attnkern.attention(X, jagged(torch.zeros(11, 3, 4), [4, 7]).transpose(1, 2), X),
    ),
    bad(
        "alignment must be 'top_left' or 'bottom_right'",
        lambda: attnkern.attention(X, X, X, alignment="left"),
        ValueError,
    ),
    bad("'is_causal' must be bool", lambda: attnkern.attention(X, X, X, is_causal=1), TypeError),
]


@refused(BAD)
def test_bad_calls(call, error, message):
    check_refused(call, error, message)


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
