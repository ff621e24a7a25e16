"""Random inputs, each with the call that makes them again, and problems drawn from all there is."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layouts import LAYOUTS, with_layout


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
        """The same with random sinks, `shape` "H" or "BH", about a row's log-sum-exp of scores about 0."""
        sizes = self.query.shape[2 - len(shape) : 2]
        drawn = torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        sinks = (2.0 * drawn + math.log(max(1, self.key.shape[-2]))).to(self.query.device, dtype)
        return dataclasses.replace(self, sinks=sinks, recipe=f"{self.recipe}.with_sinks({shape!r}, {dtype}, {seed})")

    def with_relative_bias(self, heads: int, entries: int, dtype: torch.dtype, seed: int) -> Inputs:
        """The same with a random table (heads, entries) by distance."""
        drawn = torch.randn(heads, entries, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        recipe = f"{self.recipe}.with_relative_bias({heads}, {entries}, {dtype}, {seed})"
        return dataclasses.replace(self, relative_bias=drawn.to(self.query.device, dtype), recipe=recipe)

    def with_ranges(self, kind: str, shape: str, count: int, dtype: torch.dtype, seed: int) -> Inputs:
        """The same with random key ranges (..., count, 2); `shape` spells the rest: "BHL", "1H1", ...

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


def far_key(gap: float, place: int, *, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Inputs:
    """33 queries and 97 keys, of which the one at `place` has scores that are about `gap` above all others."""
    inputs = make_inputs(1, 2, 33, 97, 16, dtype=dtype, device=device, amplitude=(0.1, 0.1, 1.0), product=40.0)
    inputs.key[..., place, :] *= 1.0 + gap / 10.0
    return dataclasses.replace(inputs, recipe=f"{inputs.recipe} with key[..., {place}, :] *= {1.0 + gap / 10.0}")


# One off every tile and block of keys or queries.
LENGTHS = (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 61, 63, 64, 65, 95, 96, 97, 127, 128, 129, 130, 160, 191, 193, 256, 257)
FEW = (1, 1, 2, 3, 8, 15, 16)  # queries, which have kernels of their own
PACKED_LENGTHS = (0, 1, 2, 7, 33, 64, 70, 130)
FAR = (2**31 - 2, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**100)  # bounds of windows


def random_problem(
    seed: int,
    *,
    device: Any = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    lengths: Sequence[int] = LENGTHS,
    head_dims: Sequence[int] = (1, 2, 3, 8, 16, 17, 32, 40, 64, 72),
    dims_v: Sequence[int] = (1, 5, 24),
    layouts: Sequence[str] = tuple(LAYOUTS),
    batches: Sequence[int] = (1, 1, 2, 3),
    heads: Sequence[int] = (1, 2, 3),
    groups: Sequence[int] = (1, 1, 2, 4),
    masks: bool = True,
    ranges: bool = True,
    biases: bool = True,
    poison: bool = False,
    extreme: float = 0.5,
) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and options of `attnkern.attention` drawn from all there is, one problem for each seed.

    A share of `extreme` of the problems is extreme in one way or several: amplitudes from 1e-3 to 1e3, scales of either
    sign from 1e-3 to 1e2 and 0, scores up to some 1e4, a log-sum-exp up to some 1e3, no heads. The other arguments say
    what is drawn from: sizes, the query heads of a key head, and whether there may be a mask, key ranges, sinks and
    relative biases, and poison where no query attends to.
    """
    rng = random.Random(seed)

    def rounded(x: float) -> float:
        return float(f"{x:.2g}")

    wild = rng.random() < extreme
    heads_k = 0 if wild and rng.random() < 0.04 else rng.choice(list(heads))
    group = rng.choice(list(groups))
    head_dim = rng.choice(list(head_dims))
    seqlen_k = rng.choice(list(lengths))
    draw = rng.random()
    seqlen_q = seqlen_k if draw < 0.3 else rng.choice(list(lengths if draw < 0.7 else FEW))
    if draw > 0.85:  # keys that fill vectors
        seqlen_k = rng.choice([n for n in lengths if n > 0 and n % 16 == 0])
    dtype = rng.choice(list(dtypes))
    options: dict[str, Any] = {}
    if group > 1 and heads_k > 0:
        options["enable_gqa"] = True
    kind = rng.choice(["none", "band", "band", *(["mask", "mask", "both", "both", "both"] if masks else [])])
    mask = None
    if kind in ("mask", "both"):
        mask = (rng.choice(["bool", "float", "holes"]), "".join(rng.choice([c, c, "1"]) for c in "BHLS"))
    if kind in ("band", "both"):
        if rng.random() < 0.4:
            options["is_causal"] = True
        else:
            options["window"] = (rng.choice([None, 0, 1, 5, 40, 70]), rng.choice([None, 0, 1, 5, 40]))
            far = random.Random(f"far {seed}")  # apart from what the rest draws
            if wild and far.random() < 0.3:
                options["window"] = tuple(far.choice([bound, far.choice(FAR)]) for bound in options["window"])
        options["alignment"] = rng.choice(["top_left", "bottom_right"])
    scale = 1.0 / math.sqrt(head_dim)
    if rng.random() < 0.5:
        choices = [0.0, -0.5, 0.125, 1.0]
        if wild:
            choices = [
                0.0,
                0.0,
                -0.5,
                1.0,
                -3.0,
                -3.0,
                *(rounded(sign * 10.0 ** rng.uniform(-3, 2)) for sign in (1, -1)),
            ]
        options["scale"] = scale = rng.choice(choices)
    if rng.random() < (0.3 if wild else 0.15):
        options["softcap"] = rng.choice([1.0, 5.0, 30.0])
    amplitude, product = [1.0, 1.0, 1.0], 0.0
    if wild:
        amplitude = [10.0 ** rng.uniform(-3, 3) if rng.random() < 0.5 else 1.0 for _ in range(3)]
        # A score's rounding is to leave weights with a few digits, and 16-bit gradients are not to overflow.
        largest = 1e4 if dtype != torch.float16 else 1e2
        spread = abs(scale) * math.sqrt(head_dim) * amplitude[0] * amplitude[1]
        amplitude[0] /= max(1.0, spread / largest)
        if dtype == torch.float16:
            most = max(1.0, amplitude[0], amplitude[1]) * max(1.0, abs(scale))
            amplitude[2] = min(amplitude[2], 100.0 / most)
        if scale != 0.0 and rng.random() < 0.5:
            product = rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(1, 3) / abs(scale)
            product /= max(1.0, abs(product) / 1e6)
    inputs = make_inputs(
        rng.choice(list(batches)),
        heads_k * group,
        seqlen_q,
        seqlen_k,
        head_dim,
        rng.choice([head_dim, head_dim, *dims_v]),
        heads_k=heads_k,
        dtype=dtype,
        device=device,
        layout=tuple(rng.choice(list(layouts)) for _ in range(3)),  # type: ignore[arg-type]
        mask=mask,
        mask_dtype=rng.choice([dtype, torch.float32]),
        amplitude=tuple(map(rounded, amplitude)),  # type: ignore[arg-type]
        product=rounded(product),
        seed=seed,
    )
    if ranges and rng.random() < 0.3:
        kind, shape = rng.choice(["anything", "documents", "near", "few"]), "".join(rng.choice([c, "1"]) for c in "BHL")
        inputs = inputs.with_ranges(kind, shape, rng.choice([1, 2]), rng.choice([torch.int32, torch.int64]), seed)
    added = random.Random(f"added {seed}")  # apart from what the rest draws
    if biases and added.random() < 0.15:
        inputs = inputs.with_sinks(added.choice(["H", "BH"]), torch.promote_types(dtype, torch.float32), seed)
    if biases and added.random() < 0.15 and seqlen_q + seqlen_k > 1:
        entries = added.choice([1, 9, seqlen_q + seqlen_k - 1, 2 * seqlen_q + 70])
        exact = torch.promote_types(dtype, torch.float32)
        tables, of = added.choice([1, heads_k * group]), added.choice([dtype, exact])
        inputs = inputs.with_relative_bias(tables, entries, of, seed)
        options["relative_bias_center"] = added.choice([None, added.randrange(entries)])
    # (Beside a relative bias a bool mask is one of -inf, which hides no poison.)
    if poison and rng.random() < 0.4 and (inputs.relative_bias is None or inputs.attn_mask is None):
        inputs = inputs.with_poison(rng.choice([math.nan, math.inf, -math.inf]))
    return inputs, options


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


def random_packed(seed: int, **kinds: Any) -> tuple[Inputs, dict[str, Any], Packed]:
    """Packed sequences drawn as `random_problem` draws: (1, heads, T, E), options, and the sequences.

    Sequences may be empty, buffers longer than their sequences, keys in use more than a sequence has or below 0, and
    bounds of windows beyond any integer type.
    """
    rng = random.Random(seed)
    number = rng.randint(1, 6)

    def ends() -> list[int]:
        return list(itertools.accumulate((rng.choice(PACKED_LENGTHS) for _ in range(number)), initial=0))

    ends_q = ends()
    ends_k = list(ends_q) if rng.random() < 0.4 else ends()
    buffers = (max(1, x[-1]) + rng.choice([0, 0, 1, 30]) for x in (ends_q, ends_k))
    used = None
    if rng.random() < 0.5:
        lengths = [b - a for a, b in itertools.pairwise(ends_k)]
        used = [rng.choice([n, n // 2, n + 3, rng.choice([-1, 0, 2**31 - 1])]) for n in lengths]
    options: dict[str, Any] = {"alignment": rng.choice(["top_left", "bottom_right"])}
    draw = rng.random()
    if draw < 0.3:
        options["is_causal"] = True
    elif draw < 0.7:
        options["window"] = tuple(rng.choice([None, 0, 3, 40, rng.choice(FAR)]) for _ in range(2))
    heads_k, group = rng.choice([1, 2]), rng.choice([1, 1, 2])
    if group > 1:
        options["enable_gqa"] = True
    head_dim = rng.choice(kinds.get("head_dims", (8, 17, 64)))
    inputs = make_inputs(
        *(1, heads_k * group, *buffers, head_dim),
        heads_k=heads_k,
        dtype=rng.choice(list(kinds.get("dtypes", (torch.float32, torch.bfloat16)))),
        seed=seed,
    )
    if kinds.get("poison") and rng.random() < 0.5:
        inputs = inputs.with_poison(rng.choice([math.nan, math.inf]))
    return inputs, options, Packed(ends_q, ends_k, used)
