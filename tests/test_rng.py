"""The dropout generator: right bits (published vectors, an independent implementation), right layout, right rate."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnkern import rng


def philox_ints(key, counter):
    """Philox4x32-10 as its paper writes it, with Python's own integers."""
    k, c = list(key), list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def philox_torch(key, counter):
    return [w.item() for w in rng.philox(tuple(map(torch.tensor, key)), tuple(map(torch.tensor, counter)))]


# Known answers published with Random123 (kat_vectors, philox4x32 10).
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_words(key, counter, words):
    assert philox_torch(key, counter) == list(words)
    assert philox_ints(key, counter) == list(words)


uint32 = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(st.tuples(uint32, uint32), st.tuples(uint32, uint32, uint32, uint32))
def test_philox_equals_the_integer_form(key, counter):
    assert philox_torch(key, counter) == philox_ints(key, counter)


@pytest.mark.parametrize("seeds", [[0x0123456789ABCDEF], [5, 2**62 + 11, 5]], ids=["one seed", "three groups"])
def test_keep_mask_follows_the_counter_layout(seeds):
    batch, heads, seqlen_q, seqlen_k, p = 3, 2, 3, 71, 0.3
    mask = rng.keep_mask(torch.tensor(seeds), p, batch, heads, seqlen_q, seqlen_k)
    assert mask.shape == (batch, heads, seqlen_q, seqlen_k)
    assert mask.dtype == torch.bool
    per_group = batch // len(seeds)
    for b in range(batch):
        seed = seeds[b // per_group]
        for h in range(heads):
            bh = (b % per_group) * heads + h
            for i in range(seqlen_q):
                for j in range(seqlen_k):
                    words = philox_ints((seed & 0xFFFFFFFF, seed >> 32), ((j // 32) * 4 + (j % 8) // 2, i, bh, 0))
                    half = (words[(j // 8) % 4] >> (16 * (j % 2))) & 0xFFFF
                    assert mask[b, h, i, j].item() == (half >= round(p * 65536)), (b, h, i, j)


def test_a_longer_key_sequence_keeps_the_shorter_ones_bits():
    seed = torch.tensor([42])
    long = rng.keep_mask(seed, 0.5, 2, 3, 5, 100)
    assert torch.equal(rng.keep_mask(seed, 0.5, 2, 3, 4, 33), long[:, :, :4, :33])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_rate(p, surprise):
    """Within about 8 standard deviations: the chance to fail is 2 exp(-32) = 3e-14 each. Exact at both ends."""
    kept = rng.keep_mask(rng.draw_seed(torch.device("cpu")), p, 4, 8, 64, 128).double()
    assert surprise(kept.mean(), 1 - round(p * 65536) / 65536, kept.numel()) < 32


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty(shape):
    assert rng.keep_mask(torch.tensor([1]), 0.5, *shape).shape == shape


def test_seed_is_ruled_by_manual_seed():
    torch.manual_seed(7)
    first, second = rng.draw_seed(torch.device("cpu")), rng.draw_seed(torch.device("cpu"))
    torch.manual_seed(7)
    assert torch.equal(rng.draw_seed(torch.device("cpu")), first)
    assert first.dtype == torch.int64
    assert first.shape == (1,)
    assert not torch.equal(first, second)
