"""Dropout: which weights survive, that torch's seed rules it, that every backend and the backward pass agree on it."""

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attnkern import rng, testing

contract = pytest.mark.contract


def survivors(target, batch, heads, seqlen_q, seqlen_k, dropout_p, seed, dtype=torch.float32, **options):
    """The dropout mask seen from outside: with the identity as value the output is the dropped weights themselves."""
    query = target.randn(batch, heads, seqlen_q, 4, dtype=dtype)
    key = target.randn(batch, heads, seqlen_k, 4, dtype=dtype)
    value = torch.eye(seqlen_k, dtype=dtype, device=target.device).expand(batch, heads, seqlen_k, seqlen_k)
    torch.manual_seed(seed)
    return target.sdpa(query, key, value, dropout_p=dropout_p, **options) != 0


def test_known_answers_of_the_replay():
    """The published test vectors of Philox4x32-10 (Random123); test_rng.py holds attnkern's own to the same."""
    full = 0xFFFFFFFF
    for counter, key, answer in [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((full,) * 4, (full, full), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]:
        assert [int(x) for x in testing.philox_words([torch.tensor(c) for c in counter], key)] == list(answer)


@contract(32, 34)
@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 33, 70), (3, 1, 9, 150)], ids=str)
def test_bits_are_those_of_philox(target, sizes, dropout_p):
    """Bit for bit, against two independent replays from the seed that torch's generator gives."""
    seed = int(torch.randint(2**31, ()))
    got = survivors(target, *sizes, dropout_p, seed)
    torch.manual_seed(seed)
    drawn = rng.draw_seed(torch.device(target.device))
    assert torch.equal(got, rng.keep_mask(drawn, dropout_p, *sizes))
    assert torch.equal(got, testing.philox_keep(drawn, *sizes, dropout_p, device=target.device))


@contract(32, 34)
@pytest.mark.parametrize("queries", [1, 2, 4, 5, 8, 9, 16, 17])
def test_bits_where_there_are_few(target, queries):
    """One run of the generator for several of its numbers of one query."""
    for keys in (1, 2, 3, 6, 7, 8, 9, 31, 33):
        seed = int(torch.randint(2**31, ()))
        got = survivors(target, 2, 2, queries, keys, 0.5, seed)
        torch.manual_seed(seed)
        drawn = rng.draw_seed(torch.device(target.device))
        assert torch.equal(got, testing.philox_keep(drawn, 2, 2, queries, keys, 0.5, target.device))


@contract(34)
@pytest.mark.parametrize("dropout_p", [0.5 / 65536, 2.5 / 65536, 1 - 2.5 / 65536, 1e-9, 1 - 1e-9])
def test_thresholds_halfway_between_two_values(target, dropout_p):
    """Every backend rounds p * 65536 alike: to even, as Python's round."""
    seed = int(torch.randint(2**31, ()))
    got = survivors(target, 1, 2, 400, 400, dropout_p, seed)
    torch.manual_seed(seed)
    drawn = rng.draw_seed(torch.device(target.device))
    assert torch.equal(got, testing.philox_keep(drawn, 1, 2, 400, 400, dropout_p, target.device))


@contract(34, 35)
def test_bits_depend_on_position_alone(target):
    """Not on lengths, masks, causality, head sizes or dtype."""
    long = survivors(target, 2, 2, 70, 100, 0.4, 7)
    assert torch.equal(survivors(target, 2, 2, 9, 100, 0.4, 7), long[:, :, :9])
    assert torch.equal(survivors(target, 2, 2, 70, 33, 0.4, 7), long[..., :33])
    assert torch.equal(survivors(target, 2, 2, 70, 100, 0.4, 7, dtype=torch.float64), long)
    causal = survivors(target, 2, 2, 70, 100, 0.4, 7, is_causal=True)
    assert torch.equal(causal, long.tril())
    mask = torch.rand(2, 2, 70, 100, device=target.device) < 0.5
    mask[..., 0] = True
    assert torch.equal(survivors(target, 2, 2, 70, 100, 0.4, 7, attn_mask=mask), long & mask)


@contract(32)
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.8])
def test_the_share_of_survivors_and_their_scale(target, dropout_p, surprise):
    """Of all weights, and of each batch element, head, row and column: 207 shares, about 8 standard deviations each.

    The chance that one of them fails by chance is 207 * 2 exp(-32) = 5e-12; of all cases of this test, below 1e-10.
    """
    keep = survivors(target, 2, 4, 100, 100, dropout_p, int(torch.randint(2**31, ()))).double()
    kept = 1 - round(dropout_p * 65536) / 65536
    assert surprise(keep.mean(), kept, keep.numel()) < 32
    for dim in range(4):
        shares = keep.mean([d for d in range(4) if d != dim])
        assert surprise(shares, kept, keep.numel() // keep.size(dim)).max() < 32
    q = torch.zeros(1, 1, 3, 4, device=target.device)
    value = torch.eye(8, device=target.device)[None, None]
    out = target.sdpa(q, torch.zeros(1, 1, 8, 4, device=target.device), value, dropout_p=dropout_p)
    survived = out[out != 0].double()
    weight = torch.full_like(survived, 1 / 8 / (1 - rng.drawn_probability(dropout_p)))
    testing.assert_within_rule(survived.float(), weight, weight.float())


@contract(32)
@pytest.mark.parametrize("dropout_p", [1e-5, 0.3, 0.9999, 0.999992])
def test_the_mean_stays(target, dropout_p):
    """What is left of V = 1 is as much as was drawn, times what makes its mean 1: with the steps of the bits, not p."""
    torch.manual_seed(11)
    q, k, v = (target.randn(1, 8, n, 4, dtype=torch.float64) for n in (256, 1024, 1024))
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    out = target.sdpa(torch.zeros_like(q), k, torch.ones_like(v), dropout_p=dropout_p)
    torch.manual_seed(seed)
    keep = testing.philox_keep(rng.draw_seed(torch.device(target.device)), 1, 8, 256, 1024, dropout_p, target.device)
    share = (65536 - round(dropout_p * 65536)) / 65536
    torch.testing.assert_close(out, (keep.double().mean(-1) / share)[..., None].expand_as(out), rtol=1e-12, atol=0)
    # Six standard deviations of 2.1 million draws, with a seed that is fixed.
    assert abs(out.mean().item() - 1) < 6 * math.sqrt((1 - share) / share / keep.numel())


@contract(32)
def test_every_batch_and_head_draws_its_own_bits(target):
    keep = survivors(target, 3, 4, 20, 40, 0.5, 11).flatten(0, 1)
    for a, b in itertools.combinations(range(12), 2):
        assert not torch.equal(keep[a], keep[b])


@contract(32)
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode"])
def test_dropout_applies_in_every_mode(target, mode):
    x = target.randn(2, 3, 9, 8, requires_grad=True)
    with {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]():
        torch.manual_seed(5)
        out = target.sdpa(x, x, x, dropout_p=0.5)
        plain = target.sdpa(x, x, x)
    assert not torch.allclose(out, plain)
    torch.manual_seed(5)
    assert torch.equal(target.sdpa(x.detach(), x.detach(), x.detach(), dropout_p=0.5), out)


@contract(34)
def test_the_seed_determines_it(target):
    q, k, v = target.inputs(2, 3, 9, 17, 8).tensors.values()
    torch.manual_seed(1)
    first, second = target.sdpa(q, k, v, dropout_p=0.5), target.sdpa(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    again = target.sdpa(q, k, v, dropout_p=0.5)
    torch.manual_seed(2)
    other = target.sdpa(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


@contract(34)
def test_no_dropout_draws_no_random_numbers(target):
    q, k, v = (x.requires_grad_() for x in target.inputs(2, 3, 9, 17, 8).tensors.values())
    before = torch.get_rng_state()
    target.sdpa(q, k, v, dropout_p=0.0, is_causal=True).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    target.sdpa(q, k, v, dropout_p=0.1)
    if target.device == "cpu":
        assert not torch.equal(torch.get_rng_state(), before)


@contract(34)
def test_the_backward_pass_draws_no_random_numbers(target):
    q, k, v = (x.requires_grad_() for x in target.inputs(2, 3, 9, 17, 8).tensors.values())
    out = target.sdpa(q, k, v, dropout_p=0.5)
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@contract(33)
@pytest.mark.parametrize("dropout_p", [1.0, 1 - 1e-9])  # the second rounds to the first
def test_everything_dropped(target, dtype, dropout_p):
    leaves = [
        x.requires_grad_() for x in target.inputs(2, 3, 9, 17, 8, dtype=dtype, mask=("float", "LS")).tensors.values()
    ]
    out = target.sdpa(*leaves, dropout_p=dropout_p)
    assert not out.any()
    for x, grad in zip(leaves, torch.autograd.grad(out, leaves, torch.randn_like(out)), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()  # which a NaN would not pass: it is true


@contract(32, 34, 35)
@pytest.mark.parametrize("dropout_p", [0.2, 0.7])
@pytest.mark.parametrize("sizes", [(2, 3, 5, 7, 8), (1, 2, 70, 130, 16), (2, 2, 1, 300, 8), (1, 1, 33, 1, 8)], ids=str)
def test_output_and_gradients_with_the_replayed_mask(target, sizes, dropout_p, dtype):
    target.check_dropout(target.inputs(*sizes, dtype=dtype), dropout_p=dropout_p)


@contract(35)
@pytest.mark.parametrize("mask", [("bool", "BHLS"), ("holes", "1HLS"), ("float", "B11S")], ids=str)
@pytest.mark.parametrize("head_dim_v", [8, 5])
def test_dropout_with_masks_of_every_kind(target, mask, head_dim_v, dtype):
    target.check_dropout(target.inputs(2, 3, 9, 40, 8, head_dim_v, dtype=dtype, mask=mask), dropout_p=0.3)


@contract(35)
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"window": (5, 2), "alignment": "bottom_right"},
        {"scale": -0.5},
        {"softcap": 2.0},
        {"enable_gqa": True},
        {"enable_gqa": True, "is_causal": True},
    ],
    ids=str,
)
def test_dropout_with_every_option(target, options, dtype):
    heads_k = 2 if "enable_gqa" in options else 4
    target.check_dropout(target.inputs(2, 4, 33, 40, 8, heads_k=heads_k, dtype=dtype), dropout_p=0.3, **options)


@contract(35)
@pytest.mark.parametrize("leading", [(), (3,), (2, 2, 3)], ids=lambda x: f"{len(x) + 2}d")
def test_dropout_in_every_rank(target, leading):
    target.check_dropout(target.random((*leading, 9, 8), (*leading, 17, 8), (*leading, 17, 5)), dropout_p=0.3)


@contract(35)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes_the_same_mask(target, use_reentrant):
    leaves = [x.requires_grad_() for x in target.inputs(2, 3, 9, 17, 8).tensors.values()]
    grad_out = target.randn(2, 3, 9, 8)

    def call(q, k, v):
        return target.sdpa(q, k, v, dropout_p=0.4, is_causal=True)

    torch.manual_seed(9)
    out = call(*leaves)
    want = torch.autograd.grad(out, leaves, grad_out)
    torch.manual_seed(9)
    kept = checkpoint(call, *leaves, use_reentrant=use_reentrant)
    assert torch.equal(kept, out)
    kept.backward(grad_out)
    for x, y in zip(leaves, want, strict=True):
        assert torch.equal(x.grad, y)
