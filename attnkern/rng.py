"""Dropout bits: Philox4x32-10, counted by the position of a score.

Every score (b, h, i, j) owns 16 random bits that depend on the seed and on that position alone, never on tile shapes,
threads or devices. So every backend drops the same entries, the backward pass regenerates them, and this module
replays them in plain torch. The kernels mirror the layout written here:

    key      (seed & 0xffffffff, seed >> 32)
    counter  (c0 = (j // 32) * 4 + (j % 8) // 2,  c1 = i,  c2 = bh & 0xffffffff,  c3 = bh >> 32)  with bh = b * Hq + h
    word     (j // 8) % 4          of the four 32-bit output words
    half     j % 2                 low or high 16 bits of that word
    keep     half >= round(p * 65536)

One call thus serves 8 entries of a row: two neighbours in each of four consecutive groups of 8 columns, which is what
one thread of a tensor-core multiply holds.

A seed tensor of n elements splits the batch into n equal consecutive groups: group g has key seed[g] and counts its own
batch elements from 0. (n > 1 is what vmap makes of n separate calls.)

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch
from torch import Tensor

from .dtensor import replicated

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def drawn_probability(dropout_p: float) -> float:
    """The probability that entries are dropped with: dropout_p in steps of 1/65536, halfway ones to the even step.

    Survivors are divided by 1 less this; any other divisor would change the mean.
    """
    return round(dropout_p * 65536) / 65536


def draw_seed(device: torch.device) -> Tensor:
    """A fresh Philox key from torch's generator of `device`: int64, shape (1,). Ruled by `torch.manual_seed`."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def seed_for(q: Tensor) -> Tensor:
    """A fresh key for the dropout of q (B, ...); for a DTensor one per batch element, the first rank's on all ranks.

    So a batch may be sharded: an element drops the same entries on every rank.
    """
    if not hasattr(q, "device_mesh"):
        return draw_seed(q.device)
    from torch.distributed.tensor import Replicate, distribute_tensor

    keys = torch.randint(2**63 - 1, q.shape[:1], dtype=torch.int64, device=q.device)
    return distribute_tensor(keys, q.device_mesh, [Replicate()] * q.device_mesh.ndim)


def _mul_hi_lo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b. In two halves: the whole 64-bit product would overflow a signed int64."""
    low = a * (b & 0xFFFF)
    mid = a * (b >> 16) + (low >> 16)
    return mid >> 16, ((mid & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four uint32 words (held in int64) per counter. Keys and counters broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(_MULTIPLIERS[0], c0)
        hi1, lo1 = _mul_hi_lo(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def keep_mask(
    seed: Tensor,
    dropout_p: float,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: slice = slice(None),
    rows: slice = slice(None),
    batches: slice = slice(None),
) -> Tensor:
    """The entries that dropout keeps: bool (batch, num_heads, seqlen_q, seqlen_k), on the device of `seed`.

    `heads`, `rows` and `batches` take a tile out of it, without making the rest.
    """

    def index(n: int) -> Tensor:
        return replicated(torch.arange(n, dtype=torch.int64, device=seed.device), seed)

    groups = seed.shape[0]
    key = seed.repeat_interleave(batch // groups)[batches].view(-1, 1, 1, 1)
    b = index(batch // groups).repeat(groups)[batches].view(-1, 1, 1, 1)
    bh = b * num_heads + index(num_heads)[heads].view(-1, 1, 1)
    words = philox(
        (key & _MASK, (key >> 32) & _MASK),
        (index((seqlen_k + 31) // 32 * 4), index(seqlen_q)[rows].view(-1, 1), bh & _MASK, bh >> 32),
    )
    j = index(seqlen_k)
    c0, word, half = (j // 32) * 4 + (j % 8) // 2, (j // 8) % 4, j % 2
    bits = torch.stack(words, -1).flatten(-2).index_select(-1, c0 * 4 + word) >> (16 * half)
    return (bits & 0xFFFF) >= round(dropout_p * 65536)
