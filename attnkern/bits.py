"""A bool mask in bits, 64 keys in 8 bytes: what the operators take as a bias of dtype uint8.

(B|1, Hq|1, L|1, 8 * ceil(S / 64)), dense in the last dimension: bit j % 8 of byte j // 8 of a row says whether the row
attends to key j, and those beyond S are not read. These are the `bits` of a Mask, seen as bytes. Kernels read them as
they are, a GPU's by words, so that rows must begin at multiples of 8 bytes. Computations in plain torch take the bools
of a tile (`bools`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .dtensor import replicated

WORD = 64
"""Keys of a word, of which a row has whole ones."""


def in_bits(bias: Tensor | None) -> bool:
    """Whether the bias of an operator is a mask of bits."""
    return bias is not None and bias.dtype == torch.uint8


def is_mask(bias: Any) -> bool:
    """Whether a bias says which scores count, by bools or bits, and adds nothing to them: it has no gradient."""
    return bias.dtype in (torch.bool, torch.uint8)


def row_bytes(seqlen_k: int) -> int:
    """The size of the last dimension."""
    return (seqlen_k + WORD - 1) // WORD * (WORD // 8)


def bools(bits: Tensor, seqlen_k: int) -> Tensor:
    """bool (..., S) of bits (..., 8 * ceil(S / 64)), uint8."""
    kind: Any = {"dtype": torch.uint8, "device": bits.device}
    octets = (torch.arange(256, **kind).unsqueeze(-1) >> torch.arange(8, **kind)).bitwise_and_(1)
    # A table of bools, not of bytes viewed as bools: torch 2.11 has no vmap of a view(dtype).
    unpacked = replicated(octets.bool(), bits).index_select(0, bits.flatten().int())
    return unpacked.view(*bits.shape[:-1], bits.shape[-1] * 8)[..., :seqlen_k]


def as_described(bias: Tensor | None, seqlen_k: int) -> Tensor | None:
    """A bias for its shape, strides and dtype: of bits the bools that they stand for, a tensor without values."""
    if bias is None or not in_bits(bias):
        return bias
    whole = (*bias.shape[:3], math.ceil(seqlen_k / WORD) * WORD)
    return torch.empty(whole, dtype=torch.bool, device="meta")[..., :seqlen_k]
