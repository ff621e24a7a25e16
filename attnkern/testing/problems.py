"""Random inputs, each with the call that makes them again."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from .layouts import with_layout


@dataclasses.dataclass(frozen=True)
class Inputs:
    """query, key, value, a mask, sinks, a relative bias and key ranges, with the call that makes them again.

    `poison`, if any, is what a check puts in place of all that no query attends to.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    recipe: str
    key_ranges: Tensor | None = None
    sinks: Tensor | None = None
    relative_bias: Tensor | None = None
    poison: float | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {
            n: getattr(self, n) for n in ("query", "key", "value", "attn_mask", "sinks", "relative_bias", "key_ranges")
        }
        return {n: x for n, x in found.items() if x is not None}

    def with_poison(self, value: float) -> Inputs:
        return dataclasses.replace(self, poison=value, recipe=f"{self.recipe}.with_poison({value})")

    def with_sinks(self, shape: str, dtype: torch.dtype, seed: int) -> Inputs:
        """These inputs with random sinks, `shape` "H" or "BH", about a row's log-sum-exp of scores about 0."""
        sizes = self.query.shape[2 - len(shape) : 2]
        drawn = torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        sinks = (2.0 * drawn + math.log(max(1, self.key.shape[-2]))).to(self.query.device, dtype)
        return dataclasses.replace(self, sinks=sinks, recipe=f"{self.recipe}.with_sinks({shape!r}, {dtype}, {seed})")

    def with_relative_bias(self, heads: int, entries: int, dtype: torch.dtype, seed: int) -> Inputs:
        """These inputs with a random table (heads, entries) by distance."""
        drawn = torch.randn(heads, entries, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        recipe = f"{self.recipe}.with_relative_bias({heads}, {entries}, {dtype}, {seed})"
        return dataclasses.replace(self, relative_bias=drawn.to(self.query.device, dtype), recipe=recipe)

    def with_ranges(self, kind: str, shape: str, count: int, dtype: torch.dtype, seed: int) -> Inputs:
        """These inputs with random key ranges (..., count, 2); `shape` spells the rest: "BHL", "1H1", ...

        kind: "anything" (ends in front of the first key and behind the last, some as far as int32 goes, one range in
        eight backwards), "documents" (the same of 24 rows at a time), "near" (up to 40 keys about the row's place, so
        that most blocks of a long row are skipped) or "few" (seven ranges in eight backwards: most rows have no key).
        """
        *sizes, rows, _ = self.query.shape
        seqlen_k, generator = self.key.shape[2], torch.Generator().manual_seed(seed)
        dims = [1 if c == "1" else n for c, n in zip(shape, (*sizes, rows), strict=True)] + [count]
        rows, alike = dims[2], 24 if kind == "documents" else 1
        dims[2] = math.ceil(rows / alike)

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, dims, generator=generator)

        if kind == "near":
            begin = (torch.arange(rows) * seqlen_k // max(1, rows))[:, None] - draw(0, 40)
            end = begin + draw(1, 41)
        elif kind in ("anything", "documents", "few"):
            begin = draw(-5, max(1, seqlen_k))
            end, far = begin + draw(0, seqlen_k + 20), draw(0, 16)
            begin, end = begin.masked_fill(far == 0, -(2**31)), end.masked_fill(far == 1, 2**31 - 1)
            turned = draw(0, 8) < (7 if kind == "few" else 1)
            begin, end = torch.where(turned, end, begin), torch.where(turned, begin, end)
        else:
            raise ValueError(f"kind: got {kind!r}, expected 'anything', 'documents', 'near' or 'few'")
        begin, end = (x.repeat_interleave(alike, 2)[:, :, :rows] for x in (begin, end))
        ranges = torch.stack([begin, end], -1).to(self.query.device, dtype)
        recipe = f"{self.recipe}.with_ranges({kind!r}, {shape!r}, {count}, {dtype}, {seed})"
        return dataclasses.replace(self, key_ranges=ranges, recipe=recipe)


def make_mask(
    kind: str,
    shape: str,
    sizes: dict[str, int],
    *,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """A random mask. `shape` spells its dimensions: "BHLS", "B11S", "LS", "1S", ... with `sizes` giving the letters.

    kind: "bool" (about a third masked), "float" (normal), "holes" (normal with a third of -inf).
    """
    dims = [1 if c == "1" else sizes[c] for c in shape]
    drop = torch.rand(dims, generator=generator).lt(0.35).to(device)
    if kind == "bool":
        return ~drop
    bias = torch.randn(dims, generator=generator, dtype=torch.float64).to(device, dtype)
    if kind == "holes":
        bias = bias.masked_fill(drop, -math.inf)
    elif kind != "float":
        raise ValueError(f"kind: got {kind!r}, expected 'bool', 'float' or 'holes'")
    return bias


def make_inputs(
    batch: int = 2,
    heads: int = 2,
    seqlen_q: int = 5,
    seqlen_k: int | None = None,
    head_dim: int = 8,
    head_dim_v: int | None = None,
    *,
    heads_k: int | None = None,
    heads_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    layout: str | tuple[str, str, str] = "contiguous",
    mask: tuple[str, str] | None = None,
    mask_dtype: torch.dtype | None = None,
    amplitude: tuple[float, float, float] = (1.0, 1.0, 1.0),
    product: float = 0.0,
    seed: int | None = None,
) -> Inputs:
    """Random inputs (normal, 4-D); `mask` is (kind, shape) of `make_mask`.

    `amplitude` is the standard deviation of query, key and value. `product` is the mean of every query times every key,
    which moves all scores, and the log-sum-exp, without making weights more uneven.
    Without a seed one is drawn from torch's generator; the recipe names it, so a failure can be repeated alone.
    """
    arguments = {n: x for n, x in locals().items() if n != "seed"}
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    heads_k = heads if heads_k is None else heads_k
    heads_v = heads_k if heads_v is None else heads_v
    generator = torch.Generator().manual_seed(seed)
    layouts = (layout,) * 3 if isinstance(layout, str) else layout

    def draw(h: int, n: int, d: int, name: str, amplitude: float, mean: float = 0.0) -> Tensor:
        x = torch.randn(batch, h, n, d, generator=generator, dtype=torch.float64)
        return with_layout((x * amplitude + mean).to(device, dtype), name)

    mean = math.sqrt(abs(product) / max(head_dim, 1))
    query = draw(heads, seqlen_q, head_dim, layouts[0], amplitude[0], math.copysign(mean, product))
    key = draw(heads_k, seqlen_k, head_dim, layouts[1], amplitude[1], mean)
    value = draw(heads_v, seqlen_k, head_dim_v, layouts[2], amplitude[2])
    attn_mask = None
    if mask is not None:
        sizes = {"B": batch, "H": heads, "L": seqlen_q, "S": seqlen_k}
        attn_mask = make_mask(*mask, sizes, dtype=mask_dtype or dtype, device=device, generator=generator)
    shown = ", ".join(f"{n}={x!r}" for n, x in arguments.items() if x is not None)
    return Inputs(query, key, value, attn_mask, f"attnkern.testing.make_inputs({shown}, seed={seed})")


@dataclasses.dataclass(frozen=True)
class Packed:
    """Sequences one after the other, as `varlen_attention` takes them: ends of the queries and keys of each, and how
    many keys are in use."""

    ends_q: list[int]
    ends_k: list[int]
    used: list[int] | None

    def mask(self, seqlen_q: int, seqlen_k: int, options: dict[str, Any]) -> Tensor:
        """bool (seqlen_q, seqlen_k), True = attend, written apart from `attnkern.packed`: one query after the other."""
        mask = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
        left, right = (None if x is None else int(x) for x in options.get("window") or (None, None))
        if options.get("is_causal"):
            right = 0
        for n, (first, end) in enumerate(itertools.pairwise(self.ends_q)):
            first_k, keys = self.ends_k[n], self.ends_k[n + 1] - self.ends_k[n]
            keys = keys if self.used is None else max(0, min(self.used[n], keys))
            offset = keys - (end - first) if options.get("alignment", "top_left") == "bottom_right" else 0
            for i in range(end - first):
                begin = 0 if left is None else max(0, i + offset - left)
                last = keys if right is None else min(keys, i + offset + right + 1)
                if last > begin:
                    mask[first + i, first_k + begin : first_k + last] = True
        return mask
