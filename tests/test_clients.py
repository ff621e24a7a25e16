"""What the main callers of F.scaled_dot_product_attention pass, with attnkern in its place."""

import math

import pytest
import torch
import torch.nn.functional as F

import attnkern
from attnkern import testing

contract = pytest.mark.contract


@pytest.fixture
def installed(monkeypatch, target):
    """F.scaled_dot_product_attention is attnkern's (of this backend); calls are recorded."""
    torchs = F.scaled_dot_product_attention
    calls = []

    def replacement(*args, **kwargs):
        calls.append((args, kwargs))
        return attnkern.scaled_dot_product_attention(*args, **kwargs, backend=target.backend)

    def install(on):
        monkeypatch.setattr(F, "scaled_dot_product_attention", replacement if on else torchs)
        return calls

    return install


def both(installed, function, parameters):
    """Results and gradients of `function` with attnkern and with torch inside."""
    results = []
    for on in (True, False):
        calls = installed(on)
        out = function()
        grads = torch.autograd.grad(out.square().sum(), list(parameters), allow_unused=True)
        results.append((out.detach(), grads))
    assert calls, "attention was never reached"
    torch.testing.assert_close(*(r[0] for r in results), rtol=1e-4, atol=1e-5)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    return calls


MHA = {
    "plain": {},
    "causal mask": {"attn_mask": "causal"},
    "is_causal": {"attn_mask": "causal", "is_causal": True},
    "bool mask": {"attn_mask": "bool"},
    "mask per head": {"attn_mask": "per head"},
    "padding": {"key_padding_mask": True},
    "padding and mask": {"key_padding_mask": True, "attn_mask": "bool"},
    "unbatched": {"unbatched": True},
}


@contract(63)
@pytest.mark.parametrize("case", MHA)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("extras", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["", "bias_kv"])
def test_multihead_attention(target, installed, case, batch_first, extras):
    case = dict(MHA[case])
    batch, length, keys, width, heads = 3, 6, 6, 16, 4
    mha = torch.nn.MultiheadAttention(width, heads, batch_first=batch_first, **extras, device=target.device)
    x = target.randn(batch, length, width) if batch_first else target.randn(length, batch, width)
    if case.pop("unbatched", False):
        x = target.randn(length, width)
    x.requires_grad_()
    mask = {
        "causal": torch.nn.Transformer.generate_square_subsequent_mask(length, device=target.device),
        "bool": torch.rand(length, keys, device=target.device) < 0.3,  # True = NOT attend here
        "per head": torch.rand(batch * heads, length, keys, device=target.device) < 0.3,
    }.get(case.pop("attn_mask", None))
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0] = False
    if case.pop("key_padding_mask", False):
        case["key_padding_mask"] = torch.arange(keys, device=target.device) >= torch.tensor(
            [[6], [4], [2]], device=target.device
        )
    calls = both(
        installed,
        lambda: mha(x, x, x, attn_mask=mask, need_weights=False, **case)[0],
        [x, *mha.parameters()],
    )
    assert len(calls[0][0]) == 6, "called by position"


@contract(63, 24)
def test_a_fully_padded_sample(target, installed):
    """torch relies on a zero row here: no NaN in the output or in any gradient."""
    mha = torch.nn.MultiheadAttention(16, 4, batch_first=True, device=target.device)
    x = target.randn(2, 6, 16, requires_grad=True)
    padding = torch.zeros(2, 6, dtype=torch.bool, device=target.device)
    padding[1] = True
    both(
        installed,
        lambda: mha(x, x, x, key_padding_mask=padding, need_weights=False)[0],
        [x, *mha.parameters()],
    )


@contract(63)
def test_multihead_dropout_acts_in_training_only(target, installed):
    mha = torch.nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True, device=target.device)
    x = target.randn(2, 6, 16, requires_grad=True)
    installed(True)
    training = [mha(x, x, x, need_weights=False)[0] for _ in range(2)]
    assert not torch.allclose(*training)
    mha.eval()
    still = [mha(x, x, x, need_weights=False)[0] for _ in range(2)]
    assert torch.equal(*still)


@contract(64)
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers(target, installed, norm_first):
    # Not relu: where its input rounds to the other side of 0, the gradient is another.
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": norm_first}
    options["device"] = target.device
    encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, **options)
    decoder = torch.nn.TransformerDecoderLayer(16, 4, 32, **options)
    source, goal = target.randn(2, 9, 16), target.randn(2, 5, 16)
    padding = torch.arange(9, device=target.device) >= torch.tensor([[9], [6]], device=target.device)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5, device=target.device)

    def run():
        memory = encoder(source, src_key_padding_mask=padding.float().masked_fill(padding, -math.inf))
        return decoder(goal, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)

    both(installed, run, [*encoder.parameters(), *decoder.parameters()])


# --- the shapes and strides of transformers' "sdpa" integration

B, H, HK, L, D = 2, 8, 2, 12, 16


def hidden(target, heads, length=L, dim=D):
    """(B, heads, length, dim) in (B, length, heads, dim) memory, as a projection leaves it."""
    return target.randn(B, length, heads * dim).view(B, length, heads, dim).transpose(1, 2)


def check_client(target, q, k, v, mask=None, **options):
    results = target.check(testing.Inputs(q, k, v, mask, "a client's call"), **options)
    return results["out"].transpose(1, 2).contiguous().reshape(q.size(0), q.size(2), -1)


@contract(65)
def test_llama_prefill_with_unrepeated_heads(target):
    q, k, v = hidden(target, H), hidden(target, HK), hidden(target, HK)
    check_client(target, q, k, v, scale=D**-0.5, is_causal=True, enable_gqa=True)
    assert target.sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).is_contiguous()


@contract(65)
@pytest.mark.parametrize("padding", ["left", "right", "one whole sample"])
def test_padding_and_sliding_window_masks(target, padding):
    """A bool mask (B, 1, L, S) with repeated heads; left padding leaves rows without a key."""
    q, k, v = (hidden(target, H) for _ in range(3))
    position = torch.arange(L, device=target.device)
    band = (position[:, None] >= position) & (position[:, None] - position < 5)
    real = {
        "left": position >= torch.tensor([[4], [0]], device=target.device),
        "right": position < torch.tensor([[8], [12]], device=target.device),
        "one whole sample": position < torch.tensor([[0], [12]], device=target.device),
    }[padding]
    mask = band & real[:, None, None, :]
    check_client(target, q, k, v, mask, scale=0.2887)
    shared = band.expand(B, 1, L, L)
    assert shared.stride(0) == 0
    check_client(target, q, k, v, shared, scale=0.2887)


@contract(65)
def test_decoding_with_packed_groups(target):
    q, k, v = target.randn(B, HK, H // HK, D), hidden(target, HK, 30), hidden(target, HK, 30)
    mask = torch.ones(B, 1, 1, 30, dtype=torch.bool, device=target.device)
    mask[0, ..., :9] = False
    check_client(target, q, k, v, mask, scale=1.0)
    check_client(target, hidden(target, H, 1), k, v, enable_gqa=True)


@contract(65)
def test_t5_relative_bias(target):
    """Scale 1, a learned bias (1, H, L, S) plus a padding mask of finfo.min."""
    table = target.randn(32, H, requires_grad=True)
    buckets = torch.randint(32, (L, L), device=target.device)
    padding = torch.zeros(B, 1, 1, L, device=target.device)
    padding[1, ..., 9:] = torch.finfo(torch.float32).min
    q, k, v = (hidden(target, H) for _ in range(3))
    bias = table[buckets].permute(2, 0, 1)[None] + padding
    check_client(target, q, k, v, bias.detach(), scale=1.0)
    grad_out = torch.randn_like(v)
    (got,) = torch.autograd.grad(target.sdpa(q, k, v, bias, scale=1.0), table, grad_out, retain_graph=True)
    (want,) = torch.autograd.grad(testing.naive_attention(q, k, v, bias, scale=1.0)[0], table, grad_out)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@contract(65)
def test_latent_attention_and_multi_query(target):
    q, k = hidden(target, H, dim=20), hidden(target, H, dim=20)
    check_client(target, q, k, hidden(target, H, dim=10), is_causal=True)
    check_client(target, hidden(target, H), hidden(target, 1), hidden(target, 1), is_causal=True)  # Falcon


@contract(65)
def test_vision_windows_with_bias(target):
    windows, heads, n = 6, 3, 49
    q, k, v = (target.randn(windows, heads, n, 8) for _ in range(3))
    bias = target.randn(1, heads, n, n) + target.randn(windows, 1, n, n)
    check_client(target, q, k, v, bias)


@contract(66)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 3, 8), (4, 6, 8)),
        ((4, 4, 3, 8), (4, 4, 6, 8)),
        ((4, 3, 8), (4, 4, 6, 8)),
        ((4, 4, 6, 8), (4, 4, 6, 8)),
    ],
    ids=str,
)
def test_samples_of_torchs_own_tests(target, shapes, is_causal, dropout_p, dtype):
    """Values up to 9: softmax saturates and the gradient of a score is a difference of nearly equal numbers."""
    q, k = (((torch.rand(s, dtype=torch.float64) * 18) - 9).to(target.device, dtype) for s in shapes)
    v = ((torch.rand(shapes[1], dtype=torch.float64) * 18) - 9).to(target.device, dtype)
    inputs = testing.Inputs(q, k, v, None, "uniform in (-9, 9)")
    if not dropout_p:
        target.check(inputs, is_causal=is_causal)
        return
    torch.manual_seed(0)
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    seed = attnkern.rng.draw_seed(torch.device(target.device))
    batch, heads = math.prod(leading[:-1]), leading[-1]
    keep = testing.philox_keep(seed, batch, heads, q.size(-2), k.size(-2), dropout_p, target.device)
    torch.manual_seed(0)
    target.check(inputs, is_causal=is_causal, dropout_p=dropout_p, keep=keep.view(*leading, q.size(-2), k.size(-2)))


@contract(66)
@pytest.mark.parametrize("spread", [9, 30])
def test_saturated_softmax(target, spread, dtype):
    inputs = target.inputs(1, 2, 33, 65, 16, dtype=dtype, mask=("float", "LS"))
    inputs.query.mul_(spread / 3)
    inputs.key.mul_(spread / 3)
    target.check(inputs)
