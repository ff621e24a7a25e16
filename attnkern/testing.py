"""What the tests, the benchmark and a new backend share: tolerance rule, float64 reference, problems, memory layouts.

The rule, the only one in the project. Let `exact` be float64 maths and `baseline` torch's own maths in the dtype at
hand (matmul, softmax, matmul; float16 and bfloat16 computed in float32 and rounded once, as torch's MATH backend
does). Then

    |actual - exact| <= factor * max|baseline - exact| + unit        with factor 2 (outputs) or 3 (gradients)

where `unit` is what one rounding in the dtype can do to that entry: eps * (|exact| + the root-sum-square of the terms
added up to it). The sum matters where large terms cancel (a score gradient P * (dP - delta) with one key is exactly 0:
every real kernel leaves a rounding of dP there), and root-sum-square rather than the sum of magnitudes, because
roundings are independent: the allowance does not grow with the sequence. What flushing subnormal numbers to zero costs
comes on top. A NaN never passes; an infinity passes only where `exact` has it.

The reference here is written apart from `attnkern.backends.reference`, so that neither can hide the other's mistake.
Nothing in this module needs pytest or hypothesis.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_INPUTS = ("query", "key", "value", "attn_mask")

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0

# --------------------------------------------------------------------------------------------------------------------
# The tolerance rule
# --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Errors:
    """Largest absolute error of a tensor, that of torch's maths in its dtype, and the share of the allowance used."""

    error: float
    baseline_error: float
    ratio: float  # <= 1 passes; inf for a NaN or a misplaced infinity
    where: tuple[int, ...]  # index of the entry with the largest ratio

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0


def rounding_unit(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit of the rule when nothing is known about the terms added up: one rounding of the largest entry."""
    finite = exact.detach().double().abs().nan_to_num(0.0, 0.0, 0.0)
    return torch.finfo(dtype).eps * (finite.amax() if finite.numel() else finite.sum())


def errors(
    actual: Tensor, exact: Tensor, baseline: Tensor, *, factor: float = FORWARD_FACTOR, unit: Tensor | None = None
) -> Errors:
    """Measures `actual` against `exact` (float64) with `baseline` (torch's maths in the same dtype) as the yardstick.

    All three have one shape; `unit` broadcasts to it (default: `rounding_unit`).
    """
    if actual.shape != exact.shape or baseline.shape != exact.shape:
        raise ValueError(
            f"shapes differ: actual {tuple(actual.shape)}, exact {tuple(exact.shape)}, baseline {tuple(baseline.shape)}"
        )
    if exact.isnan().any():
        raise ValueError("exact holds NaN: the rule compares numbers only")
    if unit is None:
        unit = rounding_unit(exact, actual.dtype)
    a, e, b = (x.detach().to("cpu", torch.float64) for x in (actual, exact, baseline))
    unit = unit.to("cpu", torch.float64).expand_as(e)
    if not unit.isfinite().all():
        raise ValueError("unit is not finite: the rule would allow anything")
    if not e.numel():
        return Errors(0.0, 0.0, 0.0, ())
    same = a == e  # equal infinities included, whose difference would be NaN
    difference = torch.where(same, 0.0, (a - e).abs())
    baseline_difference = torch.where(b == e, 0.0, (b - e).abs())
    # Where torch itself overflows (a float16 gradient, say) it is no yardstick.
    baseline_error = baseline_difference.nan_to_num(0.0, 0.0, 0.0).amax()
    allowed = factor * baseline_error + unit
    # Where what is allowed passes the dtype's largest number, infinity is as right as that number.
    past = a.isinf() & (a.sign() == e.sign()) & (e.abs() + allowed > torch.finfo(actual.dtype).max)
    same, difference = same | past, torch.where(past, 0.0, difference)
    ratio = torch.where(same, 0.0, difference / allowed).nan_to_num(math.inf, math.inf, math.inf)
    worst = int(ratio.argmax())
    return Errors(
        error=float(difference.nan_to_num(math.inf, math.inf).amax()),
        baseline_error=float(baseline_error),
        ratio=float(ratio.flatten()[worst]),
        where=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), e.shape)),
    )


def farthest(exact: Tensor, *computed: Tensor) -> Tensor:
    """Of each entry the one that is farthest from `exact`: the yardstick where several runs are as good as one."""

    def farther(one: Tensor, other: Tensor) -> Tensor:
        return torch.where((other - exact).abs() > (one - exact).abs(), other, one)

    return functools.reduce(farther, computed)


def error_ratio(actual: Tensor, exact: Tensor, baseline: Tensor, *, gradient: bool = False) -> float:
    """The error of `actual` as a share of what the rule allows: at most 1 passes, NaN gives inf."""
    return errors(actual, exact, baseline, factor=GRADIENT_FACTOR if gradient else FORWARD_FACTOR).ratio


def assert_within_rule(
    actual: Tensor,
    exact: Tensor,
    baseline: Tensor,
    *,
    gradient: bool = False,
    unit: Tensor | None = None,
    name: str = "output",
    recipe: str = "",
) -> None:
    """Raises AssertionError where `actual` breaks the rule; the message names the worst entry and `recipe`."""
    factor = GRADIENT_FACTOR if gradient else FORWARD_FACTOR
    result = errors(actual, exact, baseline, factor=factor, unit=unit)
    if not result.ok:
        got, want = (float(x.detach()[result.where]) for x in (actual, exact))
        raise AssertionError(
            f"{name}{list(result.where)}: got {got:.9g}, expected {want:.9g}; error {abs(got - want):.3g} is "
            f"{result.ratio:.3g} times what is allowed (torch's own largest error here: {result.baseline_error:.3g})"
            + (f"\n  {recipe}" if recipe else "")
        )


# --------------------------------------------------------------------------------------------------------------------
# Reference maths
# --------------------------------------------------------------------------------------------------------------------


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


def band_mask(
    seqlen_q: int,
    seqlen_k: int,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "top_left",
    device: Any = "cpu",
) -> Tensor | None:
    """The (L, S) bool mask (True = attend) of `is_causal`, `window` and `alignment`; None without a bound."""
    if not is_causal and window is None:
        return None
    left, right = window if window is not None else (None, None)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    offset = seqlen_k - seqlen_q if alignment == "bottom_right" else 0
    distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None] - offset
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left is not None:
        keep &= distance >= -left
    if right is not None:
        keep &= distance <= right
    return keep


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
) -> tuple[Tensor, Tensor]:
    """Softmax weights and log-sum-exp, dead rows as zeros and -inf, from already repeated key heads."""
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
    dead = (scores == -math.inf).all(-1, keepdim=True)
    alive, largest = torch.where(dead, 0.0, scores), torch.zeros(())
    if rest is not None and alive.size(-1):
        largest = alive.detach().amax(-1, keepdim=True)
        alive = alive - largest + rest  # the difference is small where it matters
    weights = torch.where(dead, 0.0, alive.softmax(-1))
    lse = torch.where(dead.squeeze(-1), -math.inf, (alive.logsumexp(-1, keepdim=True) + largest).squeeze(-1))
    return weights, lse


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
    keep: Tensor | None = None,
    split_scale: bool = False,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention as a plain composition in the inputs' dtype, any rank: (out, lse). `keep` replays a dropout mask.

    `exact` is for finite float64: scores, whose errors softmax magnifies, are then right to the last digit.
    """
    if dropout_p and keep is None:
        raise ValueError("dropout needs the mask to replay: pass keep=")
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    band = band_mask(
        query.size(-2), key.size(-2), is_causal=is_causal, window=window, alignment=alignment, device=query.device
    )
    rounding = {"split_scale": split_scale, "exact": exact}
    weights, lse = _weights(query, key, attn_mask, scale=scale, softcap=softcap, band=band, **rounding)
    if keep is not None:
        dropout_p = round(dropout_p * 65536) / 65536  # what `philox_keep` drops
        weights = weights * keep.to(weights.dtype) / (1.0 - dropout_p) if dropout_p < 1 else weights * 0.0
    out = weights @ value
    return out, lse.expand(out.shape[:-1])


@dataclasses.dataclass(frozen=True)
class Expected:
    """One result: its float64 value, torch's own maths in the dtype, and the unit of the rule for each entry."""

    exact: Tensor
    baseline: Tensor
    unit: Tensor


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _computed(run: Callable[..., dict[str, Tensor]], exact: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The yardstick: what torch's own maths in the dtype gives; `run` is that maths.

    There is no wider dtype to measure float64 maths with. Done again with every product rounded otherwise, it is off
    from itself by what it is off from the truth. Both are, so one repetition can come close by chance where there are
    few entries: torch's own attention then breaks the rule in 1 of 6,000 problems. The farthest of three counts.
    """
    if dtype != torch.float64:
        return run(_accumulate_dtype(dtype), split_scale=True)

    runs = [run(dtype, split_scale=True, stretch=stretch) for stretch in (1.1, 1.3, 1.7)]
    return {n: farthest(e, *(computed[n] for computed in runs)) for n, e in exact.items()}


def expected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    keep: Tensor | None = None,
    **options: Any,
) -> dict[str, Expected]:
    """What attention of these inputs has to give: "out", "lse" and, with a `grad_out`, gradients named as the inputs.

    `options` are those of `naive_attention`. A mask gets a gradient where it is floating.
    """
    dtype = query.dtype
    inputs = {"query": query, "key": key, "value": value}
    if attn_mask is not None and attn_mask.is_floating_point():
        inputs["attn_mask"] = attn_mask

    def run(
        compute_dtype: torch.dtype, *, split_scale: bool, stretch: float = 1.0, exact: bool = False
    ) -> dict[str, Tensor]:
        leaves = {n: x.detach().to(compute_dtype).requires_grad_() for n, x in inputs.items()}
        mask = leaves.get("attn_mask", attn_mask)
        with torch.enable_grad():
            q, k, v = leaves["query"] * stretch, leaves["key"] / stretch, leaves["value"] * stretch
            out, lse = naive_attention(q, k, v, mask, keep=keep, split_scale=split_scale, exact=exact, **options)
            out = out / stretch
            results = {"out": out.detach(), "lse": lse.detach()}
            if grad_out is not None:
                targets, seeds = [out], [grad_out.detach().to(compute_dtype)]
                if grad_lse is not None:
                    targets.append(lse)
                    seeds.append(grad_lse.detach().to(compute_dtype))
                grads = torch.autograd.grad(targets, list(leaves.values()), seeds, allow_unused=True)
                for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
                    results[name] = torch.zeros_like(leaf) if grad is None else grad
        return results

    finite = all(x.isfinite().all() for name, x in inputs.items() if name != "attn_mask")
    exact = run(torch.float64, split_scale=False, exact=dtype == torch.float64 and finite)
    computed = _computed(run, exact, dtype)
    units = _units(inputs, attn_mask, exact, grad_out, grad_lse, keep, options)
    dtypes = {"out": dtype, "lse": _accumulate_dtype(dtype), **{n: x.dtype for n, x in inputs.items()}}
    return {n: Expected(exact[n], torch.zeros_like(exact[n]).to(dtypes[n]).copy_(computed[n]), units[n]) for n in exact}


def expected_second_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    direction: dict[str, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor,
    keep: Tensor | None = None,
    **options: Any,
) -> dict[str, Expected]:
    """Tangents of out and lse in a direction, and the second derivatives along it; `options` as of `naive_attention`.

    `direction` holds one tensor for each input that moves, by its name. "tout" and "tlse" are what forward mode has to
    give; the results named as the inputs (a floating mask among them) are the gradients of <grad_out, tout> +
    <grad_lse, tlse>: what double backward has to give where the direction are the gradients' cotangents.
    """
    dtype = query.dtype
    inputs = {"query": query, "key": key, "value": value}
    if attn_mask is not None and attn_mask.is_floating_point():
        inputs["attn_mask"] = attn_mask

    def run(compute_dtype: torch.dtype, *, split_scale: bool, stretch: float = 1.0) -> dict[str, Tensor]:
        tensors = inputs | {"tout": grad_out, "tlse": grad_lse}  # <grad, tangent> by grad is the tangent
        leaves = {n: x.detach().to(compute_dtype).requires_grad_() for n, x in tensors.items()}
        with torch.enable_grad():
            q, k, v = leaves["query"] * stretch, leaves["key"] / stretch, leaves["value"] * stretch
            mask = leaves.get("attn_mask", attn_mask)
            out, lse = naive_attention(q, k, v, mask, keep=keep, split_scale=split_scale, **options)
            moving = [leaves[n] for n in direction]
            seeds = [leaves["tout"], leaves["tlse"]]
            first = torch.autograd.grad((out / stretch, lse), moving, seeds, create_graph=True)
            along = [x.detach().to(compute_dtype) for x in direction.values()]
            second = torch.autograd.grad(first, list(leaves.values()), along, materialize_grads=True)
        return dict(zip(leaves, second, strict=True))

    exact = run(torch.float64, split_scale=False)
    computed = _computed(run, exact, dtype)
    dtypes = {n: x.dtype for n, x in inputs.items()} | {"tout": dtype, "tlse": _accumulate_dtype(dtype)}
    mask = None if attn_mask is None else attn_mask.detach()
    q, k, v = (x.detach().double() for x in (query, key, value))
    out, _ = naive_attention(q, k, v, mask, keep=keep, **options)
    units = _second_order_units(inputs, attn_mask, exact, out, direction, grad_out, grad_lse, keep, options)
    return {n: Expected(exact[n], computed[n].to(dtypes[n]), units[n]) for n in exact}


class _Rounding(NamedTuple):
    """What the units of a problem's results are made of. Full tensors have the query's heads and all leading sizes."""

    full: Callable[[str, Tensor], Tensor]  # an input, or a tensor of its shape, by the input's name
    reduce: Callable[[str, Tensor], Tensor]  # root of the squares summed over what `full` repeated: its transpose
    unit: Callable[[str, Tensor], Tensor]  # the unit of a result, from the root of its squared terms
    scale: float
    weights: Tensor
    condition: Tensor  # what a rounded score does to a weight, relative to it and to eps
    lse_unit: Tensor
    survive: Tensor  # dropout's factor
    additions: float  # scores for each entry of the mask


def _rounding(
    inputs: dict[str, Tensor],
    attn_mask: Tensor | None,
    exact: dict[str, Tensor],
    out: Tensor,
    keep: Tensor | None,
    options: dict[str, Any],
) -> _Rounding:
    dtype = inputs["query"].dtype
    eps, eps_accumulate = torch.finfo(dtype).eps, torch.finfo(_accumulate_dtype(dtype)).eps
    gqa, dropout_p = options.get("enable_gqa", False), round(options.get("dropout_p", 0.0) * 65536) / 65536

    def full(name: str, x: Tensor) -> Tensor:
        if gqa and name in ("key", "value"):
            x = x.repeat_interleave(inputs["query"].size(-3) // x.size(-3), -3)
        if name == "attn_mask":
            return x.expand(*out.shape[:-1], inputs["key"].size(-2))
        return x.expand(*out.shape[:-2], *x.shape[-2:])

    def reduce(name: str, squares: Tensor) -> Tensor:
        leaf = inputs[name].detach().double().requires_grad_()
        with torch.enable_grad():
            (total,) = torch.autograd.grad(full(name, leaf), leaf, squares)
        return total.sqrt()

    q, k = (full(n, inputs[n].detach().double()) for n in ("query", "key"))
    scale = options.get("scale")
    if scale is None:
        scale = 1.0 / math.sqrt(q.size(-1)) if q.size(-1) else 1.0
    band = band_mask(
        q.size(-2),
        k.size(-2),
        is_causal=options.get("is_causal", False),
        window=options.get("window"),
        alignment=options.get("alignment", "top_left"),
        device=q.device,
    )
    mask = None if attn_mask is None else attn_mask.detach()
    weights, lse = _weights(q, k, mask, scale=scale, softcap=options.get("softcap"), band=band, split_scale=False)

    # A score is rounded in the accumulation dtype, and so is the row's log-sum-exp: either moves a weight by that much
    # relative to 1. Twice, as sums round too. Only numbers that leave something of a weight count: a mask of finfo.min
    # is not an error of anything.
    def rounded(x: Tensor) -> Tensor:
        return torch.where(x.abs() < 0.1 / eps_accumulate, x.abs(), 0.0)

    condition = 1.0 + abs(scale) * ((q.square() @ k.square().mT).sqrt() + (q @ k.mT).abs())
    condition = condition + rounded(lse)[..., None]
    if mask is not None and mask.dtype != torch.bool:
        condition = condition + torch.where(weights > 0, rounded(mask.double()), 0.0)
    condition = 2.0 * condition
    survive = torch.ones_like(weights) if keep is None else keep.double() / max(1.0 - dropout_p, 1e-30)
    if dropout_p == 1:
        survive = survive * 0
    # Flushed subnormal weights, summed; the smallest number that the dtype can tell from 0; and what the squares below
    # can't hold.
    lowest = torch.finfo(_accumulate_dtype(dtype)).tiny / eps_accumulate + torch.finfo(dtype).tiny * eps
    lowest = lowest + math.sqrt(torch.finfo(torch.float64).tiny) * eps

    def unit(name: str, terms: Tensor) -> Tensor:
        return eps * (exact[name].abs() + terms) + lowest

    return _Rounding(
        full,
        reduce,
        unit,
        scale,
        weights,
        eps_accumulate / eps * condition,
        (weights * condition).sum(-1),
        survive,
        weights.numel() / max(inputs["attn_mask"].numel(), 1) if "attn_mask" in inputs else 0.0,
    )


def _units(
    inputs: dict[str, Tensor],
    attn_mask: Tensor | None,
    exact: dict[str, Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    keep: Tensor | None,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """The rule's unit for every result: one rounding in the dtype carried through the terms that are added up."""
    dtype = inputs["query"].dtype
    eps, eps_accumulate = torch.finfo(dtype).eps, torch.finfo(_accumulate_dtype(dtype)).eps
    full, reduce, unit, scale, weights, condition, lse_unit, survive, additions = _rounding(
        inputs, attn_mask, exact, exact["out"], keep, options
    )
    q, k, v = (full(n, inputs[n].detach().double()) for n in ("query", "key", "value"))
    w2 = (weights * survive * (1.0 + condition)).square()
    # What a score's rounding moves is the value's distance from the output: nothing where one weight is all.
    moved2 = (weights * condition).square()
    apart2 = (moved2 * survive.square()) @ v.square() - 2.0 * exact["out"] * ((moved2 * survive) @ v)
    apart2 = (apart2 + exact["out"].square() * moved2.sum(-1, keepdim=True)).clamp(min=0.0)
    units = {
        "out": unit("out", ((weights * survive).square() @ v.square() + apart2).sqrt()),
        "lse": eps_accumulate * (exact["lse"].abs().nan_to_num(0.0, 0.0, 0.0) + lse_unit),
    }
    if grad_out is None:
        return units
    do = grad_out.detach().double()
    units["value"] = unit("value", reduce("value", w2.mT @ do.square()))
    # delta is made of the output, rounded and with the error that its terms brought along, which remains where they
    # cancel.
    delta2 = (1.0 + 2.0 * eps_accumulate / eps) ** 2 * (do * exact["out"]).square().sum(-1, keepdim=True)
    delta2 = delta2 + (do.square() * (w2 @ v.square())).sum(-1, keepdim=True)
    dp2 = (do.square() @ v.square().mT) * survive.square()
    centred = (do @ v.mT) * survive - (do * exact["out"]).sum(-1, keepdim=True)
    if grad_lse is not None:
        dlse = grad_lse.detach().double().expand(do.shape[:-1])[..., None]
        centred, delta2 = centred + dlse, delta2 + dlse.square()
    terms2 = dp2 + delta2 + centred.square()
    dx2 = (weights * (1.0 + condition)).square() * terms2  # of the scores as softmax sees them: the mask's gradient
    ds2 = dx2
    if softcap := options.get("softcap"):
        # The slope of tanh turns a rounding of the score into 2 / softcap times as much, relative to itself.
        slope = 1.0 - torch.tanh(scale * (q @ k.mT) / softcap).square()
        ds2 = (weights * (1.0 + condition * (1.0 + 2.0 * slope / softcap))).square() * terms2
    # delta is one rounded number for the whole row, so its error reaches dq through a coherent sum over the keys.
    coherent = delta2 * (weights @ k).square()
    units["query"] = unit("query", abs(scale) * reduce("query", ds2 @ k.square() + coherent))
    units["key"] = unit("key", abs(scale) * reduce("key", ds2.mT @ q.square()))
    if "attn_mask" in inputs:
        # torch adds up what the mask was broadcast to in pairs, a kernel one after the other.
        one_by_one = eps_accumulate / eps * math.sqrt(additions) * exact["attn_mask"].abs()
        units["attn_mask"] = unit("attn_mask", reduce("attn_mask", dx2) + one_by_one)
    return units


def _second_order_units(
    inputs: dict[str, Tensor],
    attn_mask: Tensor | None,
    exact: dict[str, Tensor],
    out: Tensor,
    direction: dict[str, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor,
    keep: Tensor | None,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """As `_units`. Squares of terms end in 2: `t` is the scores' tangent, `dx` their gradient, `w` its tangent."""
    dtype = inputs["query"].dtype
    eps, eps_accumulate = torch.finfo(dtype).eps, torch.finfo(_accumulate_dtype(dtype)).eps
    full, reduce, unit, scale, weights, condition, _, survive, additions = _rounding(
        inputs, attn_mask, exact, out, keep, options
    )
    zeros = {"attn_mask": out.new_zeros(1, 1)} | {n: torch.zeros_like(x) for n, x in inputs.items()}
    q, k, v = (full(n, inputs[n].detach().double()) for n in ("query", "key", "value"))
    tq, tk, tv, tbias = (full(n, (zeros | direction)[n].detach().double()) for n in _INPUTS)
    do, dlse = grad_out.detach().double(), grad_lse.detach().double().expand(out.shape[:-1])[..., None]

    def rows(x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    tz = scale * (tq @ k.mT + q @ tk.mT)
    tz2 = scale**2 * (tq.square() @ k.square().mT + q.square() @ tk.square().mT) + tz.square()
    slope, curvature = torch.ones_like(weights), torch.zeros_like(weights)
    if softcap := options.get("softcap"):
        tanh = torch.tanh(scale * (q @ k.mT) / softcap)
        slope = 1.0 - tanh.square()
        curvature = 2.0 / softcap * tanh.abs() * slope
        condition = condition * (1.0 + 2.0 * slope / softcap)
    p2 = (weights * (1.0 + condition)).square()
    w2 = p2 * survive.square()
    t = slope * tz + tbias
    t2 = slope.square() * tz2 + (curvature * (1.0 + condition)).square() * tz2 + tbias.square()
    mean = rows(weights * t)
    mean2 = rows(p2 * t2) + mean.square()
    tau2, tlse2 = t2 + mean2, (1.0 + eps / eps_accumulate * condition).square() * t2
    units = {
        "tout": unit("tout", ((w2 * tau2) @ v.square() + w2 @ tv.square() + mean2 * out.square()).sqrt()),
        "tlse": eps_accumulate * (exact["tlse"].abs() + (weights.square() * tlse2).sum(-1).sqrt()),
        "value": unit("value", reduce("value", (w2 * tau2).mT @ do.square())),
    }
    dp = (do @ v.mT) * survive
    dp2 = (do.square() @ v.square().mT) * survive.square() + dp.square()
    delta = rows(do * out) - dlse
    delta2 = (1.0 + 2.0 * eps_accumulate / eps) ** 2 * rows((do * out).square()) + dlse.square()
    u2 = ((do.square() @ tv.square().mT) + (do @ tv.mT).square()) * survive.square()
    dx2 = p2 * (dp2 + delta2 + (dp - delta).square())
    g2 = tau2 * (dp2 + delta2 + (dp - delta).square()) + u2
    gamma2 = rows(p2 * g2) + rows((do * exact["tout"]).square()) + delta2 * mean2
    ddx2 = p2 * (g2 + gamma2)
    # What is one rounded number for the whole row reaches the query through a coherent sum over the keys.
    coherent = gamma2 * (weights @ k).square() + delta2 * (
        ((weights * (t - mean)) @ k).square() + (weights @ tk).square()
    )
    dz2 = slope.square() * ddx2 + curvature.square() * tz2 * dx2
    dt2 = slope.square() * dx2
    units["query"] = unit("query", abs(scale) * reduce("query", dz2 @ k.square() + dt2 @ tk.square() + coherent))
    units["key"] = unit("key", abs(scale) * reduce("key", dz2.mT @ q.square() + dt2.mT @ tq.square()))
    if "attn_mask" in inputs:
        one_by_one = eps_accumulate / eps * math.sqrt(additions) * exact["attn_mask"].abs()
        units["attn_mask"] = unit("attn_mask", reduce("attn_mask", ddx2) + one_by_one)
    return units


# --------------------------------------------------------------------------------------------------------------------
# Memory layouts: the same numbers behind other strides. What lies between the numbers is NaN, so that a kernel which
# reads it is caught.
# --------------------------------------------------------------------------------------------------------------------


def _poison(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)


def _contiguous(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _blhd(x: Tensor) -> Tensor:
    return _contiguous(x.transpose(-2, -3)).transpose(-2, -3)


def _sequence_first(x: Tensor) -> Tensor:
    return _contiguous(x.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)


def _packed(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    buffer = _poison(b, n, 3, h, d, like=x)
    buffer[:, :, 1] = x.transpose(1, 2)
    return buffer[:, :, 1].transpose(1, 2)


def _stepped(x: Tensor) -> Tensor:
    buffer = _poison(*x.shape[:-1], 2 * x.size(-1), like=x)
    buffer[..., ::2] = x
    return buffer[..., ::2]


def _stepped_rows(x: Tensor) -> Tensor:
    buffer = _poison(*x.shape[:-2], 3 * x.size(-2), x.size(-1), like=x)
    buffer[..., ::3, :] = x
    return buffer[..., ::3, :]


def _e_major(x: Tensor) -> Tensor:
    return _contiguous(x.mT).mT


def _offset(x: Tensor) -> Tensor:
    buffer = _poison(x.numel() + 3, like=x)
    buffer[3:] = x.reshape(-1)
    return buffer[3:].view(x.shape)


def _padded(x: Tensor) -> Tensor:
    buffer = _poison(*x.shape[:-1], x.size(-1) + 3, like=x)
    buffer[..., : x.size(-1)] = x
    return buffer[..., : x.size(-1)]


def _heads_last(x: Tensor) -> Tensor:
    return _contiguous(x.permute(3, 0, 2, 1)).permute(1, 3, 2, 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": _contiguous,
    "blhd": _blhd,
    "sequence_first": _sequence_first,
    "packed": _packed,
    "stepped": _stepped,
    "stepped_rows": _stepped_rows,
    "e_major": _e_major,
    "offset": _offset,
    "padded": _padded,
    "heads_last": _heads_last,
}


def with_layout(x: Tensor, layout: str) -> Tensor:
    """A view with the values of the 4-D tensor `x` and the strides of that layout (one of `LAYOUTS`)."""
    view = LAYOUTS[layout](x.detach())
    assert view.shape == x.shape
    return view


def packed_qkv(
    batch: int, heads: int, seqlen: int, head_dim: int, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A random (B, L, 3, H, E) projection and its three (B, H, L, E) views: (qkv, query, key, value)."""
    qkv = torch.randn(batch, seqlen, 3, heads, head_dim, dtype=dtype, device=device)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return qkv, q, k, v


def odd_strides_on_size_one(x: Tensor) -> Tensor:
    """`x` with senseless strides on its dimensions of size 1, which torch allows and no kernel may use."""
    return x.as_strided(x.shape, [s if n != 1 else 12345 for n, s in zip(x.shape, x.stride(), strict=True)])


# --------------------------------------------------------------------------------------------------------------------
# Problems
# --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inputs:
    """query, key, value and a mask, with the call that makes them again."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    recipe: str

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {"query": self.query, "key": self.key, "value": self.value, "attn_mask": self.attn_mask}
        return {n: x for n, x in found.items() if x is not None}


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
    extreme: float = 0.5,
) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and options of `attnkern.attention` drawn from all there is, one problem for each seed.

    A share of `extreme` is so in one way or several: amplitudes from 1e-3 to 1e3, scales of either sign from 1e-3 to
    1e2 and 0, scores up to some 1e4, a log-sum-exp up to some 1e3, no heads. The other arguments are what to draw from:
    sizes, the query heads of a key head, and whether there may be a mask.
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
    return inputs, options


# --------------------------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------------------------


def _fill_malloc(on: bool) -> None:
    """glibc's malloc hands out memory full of 0xff bytes, a NaN in every floating dtype (M_PERTURB, which inverts)."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(-6, 0x100 if on else 0)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN inside: an output entry that a kernel forgets, or padding that it reads, cannot pass.

    torch does it for the tensors that it allocates itself (as part of its deterministic mode), malloc for those of
    compiled operators and for the kernels' scratch.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic  # Any: its attribute is invisible to type checkers
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    _fill_malloc(True)
    try:
        yield
    finally:
        _fill_malloc(False)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = fill


@contextlib.contextmanager
def unmodified(*tensors: Tensor | None) -> Iterator[None]:
    """Asserts that the storage behind every tensor, what lies between its entries included, stays as it was."""

    def raw(x: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.detach().untyped_storage())

    kept = [(x, raw(x).clone(), x._version) for x in tensors if x is not None]
    yield
    for x, before, version in kept:
        assert torch.equal(raw(x), before), f"an input of shape {tuple(x.shape)} was written to"
        assert x._version == version, f"an input of shape {tuple(x.shape)} was modified in place"


def check_attention(
    inputs: Inputs,
    *,
    backend: str | None = None,
    gradients: bool = True,
    keep: Tensor | None = None,
    function: Callable[..., Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Runs `attnkern.attention` on `inputs` and holds output, log-sum-exp and all gradients to the rule.

    Also asserts dtypes, shapes, dense outputs that alias no input, and inputs left as they were. `function` replaces
    `attnkern.attention` (it then returns the output alone). Returns what was computed, by the names of `expected`.
    """
    import attnkern

    recipe = f"{inputs.recipe}  {options}  backend={backend!r}"
    leaves: dict[str, Any] = {n: x.detach() for n, x in inputs.tensors.items()}
    if gradients:
        leaves = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in leaves.items()}
    with unmodified(*leaves.values()):
        if function is None:
            out, lse = attnkern.attention(**leaves, **options, return_lse=True, backend=backend)
            results = {"out": out, "lse": lse}
        else:
            results = {"out": function(**leaves, **options)}
        out = results["out"]
        grad_out = grad_lse = None
        if gradients:
            # A quarter of a normal keeps float16 gradients of long rows away from overflow.
            grad_out = (0.25 * torch.randn(out.shape, dtype=torch.float64)).to(out)
            targets, seeds = [out], [grad_out]
            if "lse" in results:
                grad_lse = (0.25 * torch.randn(results["lse"].shape, dtype=torch.float64)).to(results["lse"])
                grad_lse = torch.where(results["lse"].detach() == -math.inf, 0.0, grad_lse)
                targets.append(results["lse"])
                seeds.append(grad_lse)
            wanted = {n: x for n, x in leaves.items() if x.requires_grad}
            results |= dict(zip(wanted, torch.autograd.grad(targets, list(wanted.values()), seeds), strict=True))
    want = expected(
        leaves["query"],
        leaves["key"],
        leaves["value"],
        leaves.get("attn_mask"),
        grad_out=grad_out,
        grad_lse=grad_lse,
        keep=keep,
        **options,
    )
    storages = {x.untyped_storage().data_ptr() for x in leaves.values() if x.numel()}
    for name, actual in results.items():
        exact, reference, unit = want[name].exact, want[name].baseline, want[name].unit
        assert actual.dtype == reference.dtype, f"{name}: dtype {actual.dtype}, expected {reference.dtype}\n  {recipe}"
        assert actual.device == leaves["query"].device, f"{name}: on {actual.device}\n  {recipe}"
        if actual.numel():
            assert actual.untyped_storage().data_ptr() not in storages, f"{name} aliases an input\n  {recipe}"
        assert_within_rule(
            actual,
            exact,
            reference,
            gradient=name not in ("out", "lse"),
            unit=unit,
            name={"out": "output", "lse": "lse"}.get(name, f"gradient of {name}"),
            recipe=recipe,
        )
    return results
