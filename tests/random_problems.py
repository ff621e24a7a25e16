"""Problems drawn from all there is, by a seed, for the tests and tests/fuzz.py."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnkern
from attnkern.testing import LAYOUTS, Inputs, Packed, make_inputs, unmodified, with_layout


def far_key(gap: float, place: int, *, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Inputs:
    """33 queries and 97 keys, of which the one at `place` has scores that are about `gap` above all others."""
    inputs = make_inputs(1, 2, 33, 97, 16, dtype=dtype, device=device, amplitude=(0.1, 0.1, 1.0), product=40.0)
    inputs.key[..., place, :] *= 1.0 + gap / 10.0
    return dataclasses.replace(inputs, recipe=f"{inputs.recipe} with key[..., {place}, :] *= {1.0 + gap / 10.0}")


def in_bits(mask: Tensor, seqlen_q: int, seqlen_k: int) -> attnkern.Mask:
    """A Mask of bits of a bool mask (B|1, Hq|1, L|1, S|1), even where ranges suffice. (It has no blocks.)"""
    words = F.pad(mask.expand(*mask.shape[:3], seqlen_k), (0, -seqlen_k % 64)).unflatten(-1, (-1, 64))
    bits = (words.long() << torch.arange(64, device=mask.device)).sum(-1)
    return attnkern.Mask(None, bits, None, seqlen_q, seqlen_k)


def attention_in_bits(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **options: Any) -> Any:
    """`attnkern.attention` with a bool mask of 4 dimensions as a Mask of bits."""
    mask = in_bits(attn_mask, query.shape[2], key.shape[2])
    return attnkern.attention(query, key, value, mask, **options)


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
    page: int = 1,
    more_keys: int = 0,
) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and options of `attnkern.attention` drawn from all there is, one problem for each seed.

    A share of `extreme` of the problems is extreme in one way or several: amplitudes from 1e-3 to 1e3, scales of either
    sign from 1e-3 to 1e2 and 0, scores up to some 1e4, a log-sum-exp up to some 1e3, no heads. The other arguments say
    what is drawn from: sizes, the query heads of a key head, and whether there may be a mask, key ranges, sinks and
    relative biases, and poison where no query attends to. Keys fill whole pages of `page` rows, and are
    `more_keys` more than a length that is drawn.
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
    seqlen_k = -(-(seqlen_k + more_keys) // page) * page
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
        device=kinds.get("device", "cpu"),
    )
    if kinds.get("poison") and rng.random() < 0.5:
        inputs = inputs.with_poison(rng.choice([math.nan, math.inf]))
    return inputs, options, Packed(ends_q, ends_k, used)


@dataclasses.dataclass(frozen=True)
class Paged:
    """The pools in which keys and values lie: rows i * size on of sequence b are page table[b][i] of `count`, which
    others may have, too."""

    size: int
    count: int
    table: list[list[int]]
    layouts: list[str]  # of the two pools

    def alike(self, inputs: Inputs) -> Inputs:
        """Inputs whose keys and values are those of the first that has a page, wherever others have it."""
        numbers = [n for row in self.table for n in row]
        first = torch.tensor([numbers.index(n) for n in numbers], dtype=torch.int64)

        def shared(x: Tensor) -> Tensor:
            blocks = self._blocks(x)
            return blocks.flatten(0, 1)[first].view(blocks.shape).transpose(1, 2).reshape(x.shape)

        return dataclasses.replace(inputs, key=shared(inputs.key), value=shared(inputs.value))

    def _blocks(self, x: Tensor) -> Tensor:
        """(B, H, S, D) -> (B, pages of a sequence, H, size, D)"""
        return x.unflatten(2, (x.shape[2] // self.size, self.size)).transpose(1, 2)

    def pool(self, x: Tensor, layout: str) -> Tensor:
        """What is not finite in one sequence's rows of a page counts as absent: another may have numbers there. Pages
        of no sequence hold NaN."""
        pool = torch.full((self.count, x.shape[1], self.size, x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
        for row, blocks in zip(self.table, self._blocks(x), strict=True):
            for n, block in zip(row, blocks, strict=True):
                pool[n] = torch.where(pool[n].isfinite(), pool[n], block)
        return with_layout(pool, layout)

    def attention(
        self, run: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
    ) -> Any:
        """`run`, which is `attnkern.attention`, of the keys and values in pages. Where no sequence attends to a page's
        rows, and the call may look which do, the table has the number of no page."""
        pools = [self.pool(x, layout) for x, layout in zip((key, value), self.layouts, strict=True)]
        table = torch.tensor(self.table, dtype=torch.int32, device=key.device).view(len(self.table), -1)
        if key.numel() and not rest and options.get("attn_mask") is None:
            dead = self._blocks(key).isfinite().logical_not().flatten(2).all(-1)
            table = table.masked_fill(dead, -1).masked_fill(dead & (table % 2 == 0), 2**31 - 1)
        with unmodified(*pools, table):
            return run(query, *pools, *rest, block_table=table, **options)


def random_paged(seed: int, sizes: Sequence[int] = (16, 16, 32, 64, 128), **kinds: Any) -> tuple[Inputs, dict, Paged]:
    """A problem of `random_problem` with its keys and values in pages of one of the sizes, in any order; sequences may
    share them. Most have ranges, as of sequences of different lengths, and poison beyond them."""
    rng = random.Random(f"paged {seed}")
    size = rng.choice(list(sizes))
    # The CPU's kernels walk over 1024 keys at a time.
    more = 0 if "lengths" in kinds else rng.choice([0, 0, 0, 1024])
    inputs, options = random_problem(seed, **kinds, page=size, more_keys=more)
    if inputs.key_ranges is None and rng.random() < 0.6:
        kind, dtype = rng.choice(["anything", "near"]), rng.choice([torch.int32, torch.int64])
        inputs = inputs.with_ranges(kind, rng.choice(["B11", "B1L"]), 1, dtype, seed)
    if inputs.poison is None and (inputs.relative_bias is None or inputs.attn_mask is None):
        inputs = inputs.with_poison(math.nan)
    batch, each = inputs.key.shape[0], inputs.key.shape[2] // size
    count = max(1, batch * each + rng.choice([0, 1, 5]))
    numbers = rng.sample(range(count), batch * each)
    table = [numbers[b * each : (b + 1) * each] for b in range(batch)]
    if rng.random() < 0.7:
        for b, i in itertools.product(range(batch), range(each)):
            if rng.random() < 0.3:
                table[b][i] = table[rng.randrange(b + 1)][rng.choice([i, i, i, rng.randrange(each)])]
    return inputs, options, Paged(size, count, table, [rng.choice(list(LAYOUTS)) for _ in range(2)])


def in_pages(size, *tensors, pages=None):
    """Keys and values (B, H, S, D) in pools (pages, H, size, D) of pages in any order, and the int32 block_table. What
    no sequence has is NaN."""
    batch, _, length, _ = tensors[0].shape
    each = -(-length // size)
    pages = batch * each + 3 if pages is None else pages
    places = torch.randperm(pages)[: batch * each].view(batch, each).to(tensors[0].device)
    pools = []
    for x in tensors:
        padded = torch.nn.functional.pad(x, (0, 0, 0, each * size - length), value=math.nan)
        pool = torch.full((pages, x.shape[1], size, x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
        pool[places] = padded.unflatten(2, (each, size)).transpose(1, 2)
        pools.append(pool)
    return pools, places.int()
