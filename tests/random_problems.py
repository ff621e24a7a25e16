"""Problems drawn from all there is, by a seed, for the tests and tests/fuzz.py."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnkern
from attnkern.testing import LAYOUTS, Inputs, Packed, make_inputs


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
