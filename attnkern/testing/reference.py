"""Attention as a plain composition, written apart from `attnkern.backends.reference`: neither hides the other's
mistake."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def philox_keep(
    seed: int | Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float, device: Any = "cpu"
) -> Tensor:
    """Which softmax weights survive dropout: bool (batch, heads, seqlen_q, seqlen_k), for one integer seed.

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in int64 arithmetic; entry
    (b, h, i, j) takes one 16-bit half of one word of the block counted by (j, i, b * heads + h).
    """
    mask32 = 0xFFFFFFFF
    seed = int(seed)
    i = torch.arange(seqlen_q, device=device).view(1, -1, 1)
    j = torch.arange(seqlen_k, device=device).view(1, 1, -1)
    bh = torch.arange(batch * heads, device=device).view(-1, 1, 1)
    shape = (batch * heads, seqlen_q, seqlen_k)
    counter = [
        ((j // 32) * 4 + (j % 8) // 2).expand(shape),
        i.expand(shape),
        (bh & mask32).expand(shape),
        (bh >> 32).expand(shape),
    ]
    words = philox_words(counter, (seed & mask32, (seed >> 32) & mask32))
    word = torch.stack(words).gather(0, ((j // 8) % 4).expand(shape)[None])[0]
    half = (word >> (16 * (j % 2))) & 0xFFFF
    return (half >= round(dropout_p * 65536)).view(batch, heads, seqlen_q, seqlen_k)


def philox_words(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """One Philox4x32-10 block for each entry: four int64 tensors holding uint32 counters in, four words out."""
    mask32 = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The int64 product wraps modulo 2**64, which keeps its bits; `& mask32` undoes the sign of the shift.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & mask32) ^ c1 ^ k0, p1 & mask32, ((p0 >> 32) & mask32) ^ c3 ^ k1, p0 & mask32
        k0, k1 = (k0 + 0x9E3779B9) & mask32, (k1 + 0xBB67AE85) & mask32
    return [c0, c1, c2, c3]


def unattended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    key_ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_bias_center: int | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Of 4-D tensors, which rows no score counts of: bool (B, Hq, L, 1), (B, Hk, S, 1) and (B, Hv, S, 1), by name.

    A bool mask, the band and key ranges decide; what a float mask adds does not.
    """
    live = torch.ones(*query.shape[:3], key.shape[2], dtype=torch.bool, device=query.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        live = live & attn_mask
    named = {n: options[n] for n in ("is_causal", "window", "alignment") if n in options}
    band = band_mask(query.shape[2], key.shape[2], key_ranges=key_ranges, device=query.device, **named)
    if band is not None:
        live = live & band
    dead = {"query": ~live.any(-1, keepdim=True)}
    for name, x in (("key", key), ("value", value)):
        heads = x.shape[1], live.shape[1] // max(1, x.shape[1])
        dead[name] = ~live.unflatten(1, heads).any(2).any(2).unsqueeze(-1)
    return dead


def band_mask(
    seqlen_q: int,
    seqlen_k: int,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "top_left",
    key_ranges: Tensor | None = None,
    device: Any = "cpu",
) -> Tensor | None:
    """The (..., L, S) bool mask (True = attend) of these options, (L, S) without key ranges; None without a bound."""
    if key_ranges is not None:
        band = band_mask(seqlen_q, seqlen_k, is_causal=is_causal, window=window, alignment=alignment, device=device)
        inside = ranges_mask(key_ranges, seqlen_k)
        return inside if band is None else band & inside
    if not is_causal and window is None:
        return None
    left, right = window if window is not None else (None, None)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    offset = seqlen_k - seqlen_q if alignment == "bottom_right" else 0
    distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None] - offset
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    far = 2**62  # no distance is; int64 holds it
    if left is not None:
        keep &= distance >= -min(left, far)
    if right is not None:
        keep &= distance <= min(right, far)
    return keep


def by_distance(table: Tensor, center: int | None, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The bias (..., L, S) of a table (..., R): entry j - i + center, the first or last one beyond; None: L - 1."""
    distance = torch.arange(seqlen_k, device=table.device) - torch.arange(seqlen_q, device=table.device)[:, None]
    at = distance + (seqlen_q - 1 if center is None else center)
    return table[..., at.clamp(0, table.size(-1) - 1)]


def ranges_mask(key_ranges: Tensor, seqlen_k: int) -> Tensor:
    """The bool mask (..., L|1, S) of key_ranges (..., L|1, R, 2): True where a key lies in a range of its row."""
    ends = [key_ranges[..., n, :].to(torch.int64) for n in range(key_ranges.size(-2))]
    keys = torch.arange(seqlen_k, device=key_ranges.device)
    inside = [(keys >= x[..., :1]) & (keys < x[..., 1:]) for x in ends]
    return torch.stack(inside).any(0)


def _weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    *,
    scale: float | None,
    softcap: float | None,
    band: Tensor | None,
    split_scale: bool,
    exact: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax weights and log-sum-exp, dead rows as zeros and -inf, from already repeated key heads.

    With sinks (..., H) the scores have a column more, whose weight is left out.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(query.size(-1)) if query.size(-1) else 1.0
    rest = None  # of the scores: what float64 rounds off
    if exact:
        product = query @ key.mT * scale
        scores, rest = _exact_scores(query.detach(), key.detach(), scale)
        scores = scores + (product - product.detach())  # for its gradient
    elif split_scale:  # torch's MATH backend scales both factors before the product
        root = math.sqrt(abs(scale))
        scores = (query * math.copysign(root, scale)) @ (key * root).mT
    else:
        scores = query @ key.mT * scale
    if softcap:
        t = torch.tanh(scores / softcap)
        scores = softcap * t
        rest = None if rest is None else rest * (1.0 - t.detach().square())
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = torch.where(attn_mask, scores, -math.inf)
        else:
            mask = attn_mask.to(scores.dtype)
            rest = (
                None if rest is None else rest + _two_sum(scores.detach(), mask.detach())[1].nan_to_num(0.0, 0.0, 0.0)
            )
            scores = scores + mask
    if band is not None:
        scores = torch.where(band, scores, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[..., None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
        rest = None if rest is None else torch.cat([rest, torch.zeros_like(column)], -1)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    alive, largest = torch.where(dead, 0.0, scores), None
    if rest is not None and alive.size(-1):
        largest = alive.detach().amax(-1, keepdim=True)
        alive = alive - largest + rest  # the difference is small where it matters
    weights = torch.where(dead, 0.0, alive.softmax(-1))
    lse = alive.logsumexp(-1) if largest is None else alive.logsumexp(-1) + largest.squeeze(-1)
    lse = torch.where(dead.squeeze(-1), -math.inf, lse)
    return weights if sinks is None else weights[..., :-1], lse


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b and what rounding took from it (Knuth, The Art of Computer Programming, volume 2, section 4.2.2)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _exact_scores(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """query @ key.mT * scale of float64 to 60 digits of 2: the number rounded, and the rest of it.

    Rows are cut into slices of 21 bits, whose products float64 adds up without rounding (Ozaki et al., "Error-free
    transformations of matrix multiplication by using fast routines of matrix multiplication", 2012).
    """

    def slices(x: Tensor) -> list[Tensor]:
        largest = x.abs().amax(-1, keepdim=True) if x.size(-1) else x.new_zeros(*x.shape[:-1], 1)
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
        found = []
        for n in range(1, 4):
            magic = unit * (1.5 * 2.0 ** (52 - 21 * n))  # added, it leaves multiples of unit / 2^21n
            found.append((x + magic) - magic)
            x = x - found[-1]
        return found

    high = low = torch.zeros(())
    for a, b in itertools.product(slices(query), slices(key)):
        high, rounded = _two_sum(high, a @ b.mT)
        low = low + rounded
    split = 2.0**27 + 1.0  # Dekker: two halves, whose products are exact

    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        upper = split * x - (split * x - x)
        return upper, x - upper

    (h1, h2), (s1, s2) = halves(high), halves(torch.tensor(scale, dtype=torch.float64))
    product = high * scale
    rounded = ((h1 * s1 - product) + h1 * s2 + h2 * s1) + h2 * s2
    return _two_sum(product, rounded + low * scale)


def naive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "top_left",
    softcap: float | None = None,
    key_ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_bias_center: int | None = None,
    keep: Tensor | None = None,
    split_scale: bool = False,
    exact: bool = False,
    found: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as a plain composition in the inputs' dtype, any rank: (out, lse). `keep` replays a dropout mask.

    `exact` is for finite float64: scores, whose errors softmax magnifies, are then right to the last digit. `found`
    takes the softmax weights, before dropout.
    """
    if dropout_p and keep is None:
        raise ValueError("dropout needs the mask to replay: pass keep=")
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    where: dict[str, Any] = {"is_causal": is_causal, "window": window, "alignment": alignment, "key_ranges": key_ranges}
    band = band_mask(query.size(-2), key.size(-2), **where, device=query.device)
    if relative_bias is not None:
        bias = by_distance(relative_bias, relative_bias_center, query.size(-2), key.size(-2))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            bias = torch.where(attn_mask, bias, -math.inf)
        attn_mask = bias if attn_mask is None or attn_mask.dtype == torch.bool else bias + attn_mask.to(bias.dtype)
    rounding = {"split_scale": split_scale, "exact": exact}
    weights, lse = _weights(query, key, attn_mask, scale=scale, softcap=softcap, band=band, sinks=sinks, **rounding)
    if found is not None:
        found.append(weights.detach())
    if keep is not None:
        dropout_p = round(dropout_p * 65536) / 65536  # what `philox_keep` drops
        weights = weights * keep.to(weights.dtype) / (1.0 - dropout_p) if dropout_p < 1 else weights * 0.0
    out = weights @ value
    return out, lse.expand(out.shape[:-1])
