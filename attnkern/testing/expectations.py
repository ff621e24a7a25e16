"""What a call is held to: float64 maths, torch's own maths in the dtype, and the unit of the rule for each entry."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reference import _weights, band_mask, by_distance, naive_attention
from .tolerance import assert_within_rule, farthest

_INPUTS = ("query", "key", "value", "attn_mask")


@dataclasses.dataclass(frozen=True)
class Expected:
    """One result: its float64 value, torch's own maths in the dtype, and the unit of the rule for each entry."""

    exact: Tensor
    baseline: Tensor
    unit: Tensor

    def check(self, actual: Tensor, *, gradient: bool = False, name: str = "output", recipe: str = "") -> None:
        """Raises AssertionError where `actual` breaks the rule, as `assert_within_rule` does."""
        exact, baseline, unit = self.exact, self.baseline, self.unit
        assert_within_rule(actual, exact, baseline, gradient=gradient, unit=unit, name=name, recipe=recipe)


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _computed(run: Callable[..., dict[str, Tensor]], exact: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The yardstick: what torch's own maths in the dtype gives; `run` is that maths.

    Products of 16-bit numbers have few digits, so that float32 adds them up almost exactly. A kernel that scales one
    factor first has ordinary float32 numbers, and 2.3 times the error in log-sum-exp. So 16-bit inputs are stretched
    here, which gives them all of float32's digits.

    There is no wider dtype to measure float64 maths with. Float64 maths is therefore repeated with every product
    rounded differently: the repetitions differ from each other as much as from the exact result. With few entries one
    repetition can come close by chance, and torch's own attention then breaks the rule in 1 of 6,000 problems. So the
    farthest of three counts.
    """
    if dtype != torch.float64:
        return run(_accumulate_dtype(dtype), split_scale=True, stretch=1.0 if dtype == torch.float32 else 1.1)

    runs = [run(dtype, split_scale=True, stretch=stretch) for stretch in (1.1, 1.3, 1.7)]
    return {n: farthest(e, *(computed[n] for computed in runs)) for n, e in exact.items()}


def expected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    keep: Tensor | None = None,
    **options: Any,
) -> dict[str, Expected]:
    """What attention of these inputs has to give: "out", "lse" and, with a `grad_out`, gradients named as the inputs.

    `options` are those of `naive_attention`. A mask gets a gradient where it is floating.
    """
    dtype = query.dtype
    inputs = _differentiable(query, key, value, attn_mask, sinks, relative_bias)

    def run(
        compute_dtype: torch.dtype,
        *,
        split_scale: bool,
        stretch: float = 1.0,
        exact: bool = False,
        found: list[Tensor] | None = None,
    ) -> dict[str, Tensor]:
        differentiated = grad_out is not None
        leaves = {n: x.detach().to(compute_dtype).requires_grad_(differentiated) for n, x in inputs.items()}
        mask = leaves.get("attn_mask", attn_mask)
        added: dict[str, Any] = {"keep": keep, **{n: leaves.get(n) for n in ("sinks", "relative_bias")}}
        with torch.set_grad_enabled(differentiated):
            q, k, v = leaves["query"], leaves["key"], leaves["value"]
            if stretch != 1.0:
                q, k, v = q * stretch, k / stretch, v * stretch
            rounding: dict[str, Any] = {"split_scale": split_scale, "exact": exact, "found": found}
            out, lse = naive_attention(q, k, v, mask, **rounding, **added, **options)
            if stretch != 1.0:
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
    refined = dtype == torch.float64 and finite
    found: list[Tensor] = []
    exact = run(torch.float64, split_scale=False, exact=refined, found=found)
    computed = _computed(run, exact, dtype)
    # The units are those of float64 maths as it rounds, which refined scores are not.
    weights = None if refined else found[0]
    units = _units(inputs, attn_mask, exact, grad_out, grad_lse, keep, options, weights)
    dtypes = {"out": dtype, "lse": _accumulate_dtype(dtype), **{n: x.dtype for n, x in inputs.items()}}
    return {n: Expected(exact[n], torch.zeros_like(exact[n]).to(dtypes[n]).copy_(computed[n]), units[n]) for n in exact}


def expected_second_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    tangents: dict[str, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor,
    keep: Tensor | None = None,
    **options: Any,
) -> dict[str, Expected]:
    """The tangents of out and lse, and the second derivatives along the inputs' tangents; `options` as of
    `naive_attention`.

    `tangents` holds one tensor for each input that has a tangent, by its name. "tout" and "tlse" are what forward mode
    has to give. The results named as the inputs (a floating mask among them) are the gradients of <grad_out, tout> +
    <grad_lse, tlse>: what double backward has to give where the tangents are the gradients' cotangents.
    """
    dtype = query.dtype
    inputs = _differentiable(query, key, value, attn_mask, sinks, relative_bias)

    def run(compute_dtype: torch.dtype, *, split_scale: bool, stretch: float = 1.0) -> dict[str, Tensor]:
        tensors = inputs | {"tout": grad_out, "tlse": grad_lse}  # <grad, tangent> by grad is the tangent
        leaves = {n: x.detach().to(compute_dtype).requires_grad_() for n, x in tensors.items()}
        with torch.enable_grad():
            q, k, v = leaves["query"] * stretch, leaves["key"] / stretch, leaves["value"] * stretch
            mask = leaves.get("attn_mask", attn_mask)
            added: dict[str, Any] = {"keep": keep, **{n: leaves.get(n) for n in ("sinks", "relative_bias")}}
            out, lse = naive_attention(q, k, v, mask, split_scale=split_scale, **added, **options)
            differentiated = [leaves[n] for n in tangents]
            seeds = [leaves["tout"], leaves["tlse"]]
            first = torch.autograd.grad((out / stretch, lse), differentiated, seeds, create_graph=True)
            along = [x.detach().to(compute_dtype) for x in tangents.values()]
            second = torch.autograd.grad(first, list(leaves.values()), along, materialize_grads=True)
        return dict(zip(leaves, second, strict=True))

    exact = run(torch.float64, split_scale=False)
    computed = _computed(run, exact, dtype)
    dtypes = {n: x.dtype for n, x in inputs.items()} | {"tout": dtype, "tlse": _accumulate_dtype(dtype)}
    mask = None if attn_mask is None else attn_mask.detach()
    q, k, v = (x.detach().double() for x in (query, key, value))
    added: dict[str, Any] = {n: inputs[n].detach().double() for n in ("sinks", "relative_bias") if n in inputs}
    out, _ = naive_attention(q, k, v, mask, keep=keep, **added, **options)
    units = _second_order_units(inputs, attn_mask, exact, out, tangents, grad_out, grad_lse, keep, options)
    return {n: Expected(exact[n], computed[n].to(dtypes[n]), units[n]) for n in exact}


def _differentiable(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *others: Tensor | None
) -> dict[str, Tensor]:
    """The inputs that have a gradient, by name; `others` are sinks and relative_bias."""
    bias = attn_mask if attn_mask is not None and attn_mask.is_floating_point() else None
    given = zip((*_INPUTS, "sinks", "relative_bias"), (query, key, value, bias, *others), strict=True)
    return {name: x for name, x in given if x is not None}


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
    additions: dict[str, float]  # scores for each entry of a bias
    sink: Tensor  # its weight, as `weights`: (..., L, 1); 0 without sinks
    sink_condition: Tensor


def _rounding(
    inputs: dict[str, Tensor],
    attn_mask: Tensor | None,
    exact: dict[str, Tensor],
    out: Tensor,
    keep: Tensor | None,
    options: dict[str, Any],
    weights: Tensor | None = None,
) -> _Rounding:
    """`weights` are float64 maths' own where the caller has them; exact["lse"] is then their log-sum-exp."""
    dtype = inputs["query"].dtype
    eps, eps_accumulate = torch.finfo(dtype).eps, torch.finfo(_accumulate_dtype(dtype)).eps
    gqa, dropout_p = options.get("enable_gqa", False), round(options.get("dropout_p", 0.0) * 65536) / 65536

    def full(name: str, x: Tensor) -> Tensor:
        if gqa and name in ("key", "value"):
            x = x.repeat_interleave(inputs["query"].size(-3) // x.size(-3), -3)
        if name == "attn_mask":
            return x.expand(*out.shape[:-1], inputs["key"].size(-2))
        if name == "relative_bias":
            sizes = out.size(-2), inputs["key"].size(-2)
            return by_distance(x, options.get("relative_bias_center"), *sizes).expand(*out.shape[:-1], sizes[1])
        if name == "sinks":
            return x[..., None, None].expand(*out.shape[:-1], 1)
        return x.expand(*out.shape[:-2], *x.shape[-2:])

    def reduce(name: str, squares: Tensor) -> Tensor:
        if name in _INPUTS and squares.shape == inputs[name].shape:
            return squares.sqrt()  # `full` repeats nothing
        leaf = inputs[name].detach().double().requires_grad_()
        with torch.enable_grad():
            (total,) = torch.autograd.grad(full(name, leaf), leaf, squares)
        return total.sqrt()

    q, k = (full(n, inputs[n].detach().double()) for n in ("query", "key"))
    scale = options.get("scale")
    if scale is None:
        scale = 1.0 / math.sqrt(q.size(-1)) if q.size(-1) else 1.0
    mask = None if attn_mask is None else attn_mask.detach()
    if "relative_bias" in inputs:
        bias = full("relative_bias", inputs["relative_bias"].detach().double())
        mask = bias if mask is None else bias.where(mask, -math.inf) if mask.dtype == torch.bool else bias + mask
    sinks = inputs["sinks"].detach().double() if "sinks" in inputs else None
    if weights is not None:
        weights, lse = weights.expand(*out.shape[:-1], k.size(-2)), exact["lse"]
    else:
        where: dict[str, Any] = {n: options[n] for n in ("is_causal", "window", "alignment") if n in options}
        where |= {"key_ranges": options.get("key_ranges"), "device": q.device}
        band = band_mask(q.size(-2), k.size(-2), **where)
        given: dict[str, Any] = {"scale": scale, "softcap": options.get("softcap"), "band": band, "sinks": sinks}
        weights, lse = _weights(q, k, mask, split_scale=False, **given)

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
    sink = sink_condition = torch.zeros_like(lse)[..., None]
    if sinks is not None:
        sink = (full("sinks", sinks) - lse[..., None]).exp()
        sink_condition = 2.0 * (1.0 + rounded(full("sinks", sinks)) + rounded(lse)[..., None])
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
        (weights * condition).sum(-1) + (sink * sink_condition).squeeze(-1),
        survive,
        {n: weights.numel() / max(inputs[n].numel(), 1) for n in ("attn_mask", "relative_bias") if n in inputs},
        sink,
        eps_accumulate / eps * sink_condition,
    )


def _units(
    inputs: dict[str, Tensor],
    attn_mask: Tensor | None,
    exact: dict[str, Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    keep: Tensor | None,
    options: dict[str, Any],
    weights: Tensor | None,
) -> dict[str, Tensor]:
    """The rule's unit for every result: one rounding in the dtype carried through the terms that are added up."""
    dtype = inputs["query"].dtype
    eps, eps_accumulate = torch.finfo(dtype).eps, torch.finfo(_accumulate_dtype(dtype)).eps
    full, reduce, unit, scale, weights, condition, lse_unit, survive, additions, sink, sink_condition = _rounding(
        inputs, attn_mask, exact, exact["out"], keep, options, weights
    )
    q, k, v = (full(n, inputs[n].detach().double()) for n in ("query", "key", "value"))
    v2 = v.square()
    kept = weights if keep is None else weights * survive
    w2 = (kept * (1.0 + condition)).square()
    # A score's rounding changes the output by the value's distance from it: by nothing where one weight is 1.
    moved2 = (weights * condition).square()
    once2, twice2 = (moved2, moved2) if keep is None else (moved2 * survive, moved2 * survive.square())
    apart2 = twice2 @ v2 - 2.0 * exact["out"] * (once2 @ v)
    moved2 = moved2.sum(-1, keepdim=True) + (sink * sink_condition).square()  # a sink's value is 0
    apart2 = (apart2 + exact["out"].square() * moved2).clamp(min=0.0)
    units = {
        "out": unit("out", (kept.square() @ v2 + apart2).sqrt()),
        "lse": eps_accumulate * (exact["lse"].abs().nan_to_num(0.0, 0.0, 0.0) + lse_unit),
    }
    if grad_out is None:
        return units

    def multiplied(squares: Tensor) -> Tensor:
        # Of numbers that are rounded to the dtype before they are multiplied. Below the normal numbers a rounding is up
        # to half a step, however small the number; two steps are seven of its standard deviations.
        return torch.where(squares > 0, squares.clamp(min=(2.0 * torch.finfo(dtype).tiny) ** 2), squares)

    do = grad_out.detach().double()
    do2, delta = do.square(), do * exact["out"]
    units["value"] = unit("value", reduce("value", multiplied(w2).mT @ do2))
    # delta is made of the output, rounded and with the error that its terms brought along, which remains where they
    # cancel.
    delta2 = (1.0 + 2.0 * eps_accumulate / eps) ** 2 * delta.square().sum(-1, keepdim=True)
    delta2 = delta2 + (do2 * (w2 @ v2)).sum(-1, keepdim=True)
    delta = delta.sum(-1, keepdim=True)
    dp, dp2 = do @ v.mT, do2 @ v2.mT
    if keep is not None:
        dp, dp2 = dp * survive, dp2 * survive.square()
    centred = dp - delta
    if grad_lse is not None:
        dlse = grad_lse.detach().double().expand(do.shape[:-1])[..., None]
        centred, delta2 = centred + dlse, delta2 + dlse.square()
    terms2 = dp2 + delta2 + centred.square()
    p2 = w2 if keep is None else (weights * (1.0 + condition)).square()
    dx2 = p2 * terms2  # of the scores as softmax sees them: the mask's gradient
    ds2 = dx2
    if softcap := options.get("softcap"):
        # The slope of tanh turns a rounding of the score into 2 / softcap times as much, relative to itself.
        slope = 1.0 - torch.tanh(scale * (q @ k.mT) / softcap).square()
        ds2 = (weights * (1.0 + condition * (1.0 + 2.0 * slope / softcap))).square() * terms2
    # delta is one rounded number for the whole row, so its error reaches dq through a coherent sum over the keys.
    coherent = delta2 * (weights @ k).square()
    units["query"] = unit("query", abs(scale) * reduce("query", multiplied(ds2) @ k.square() + coherent))
    units["key"] = unit("key", abs(scale) * reduce("key", multiplied(ds2).mT @ q.square()))
    for name, count in additions.items():
        # torch adds up what the bias was broadcast to in pairs, a kernel one after the other.
        one_by_one = eps_accumulate / eps * math.sqrt(count) * exact[name].abs()
        units[name] = unit(name, reduce(name, dx2) + one_by_one)
    if "sinks" in inputs:
        delta = delta - (0.0 if grad_lse is None else dlse)
        of_rows = (sink * (1.0 + sink_condition)).square() * (delta2 + delta.square())
        rows_of_one = sink.numel() / max(1, inputs["sinks"].numel())
        one_by_one = eps_accumulate / eps * math.sqrt(rows_of_one) * exact["sinks"].abs()
        units["sinks"] = unit("sinks", reduce("sinks", of_rows) + one_by_one)
    return units


def _second_order_units(
    inputs: dict[str, Tensor],
    attn_mask: Tensor | None,
    exact: dict[str, Tensor],
    out: Tensor,
    tangents: dict[str, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor,
    keep: Tensor | None,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """As `_units`. Squares of terms end in 2: `t` is the scores' tangent, `dx` their gradient, `w` its tangent."""
    dtype = inputs["query"].dtype
    eps, eps_accumulate = torch.finfo(dtype).eps, torch.finfo(_accumulate_dtype(dtype)).eps
    full, reduce, unit, scale, weights, condition, _, survive, additions, sink, sink_condition = _rounding(
        inputs, attn_mask, exact, out, keep, options
    )
    zeros = {"attn_mask": out.new_zeros(1, 1)} | {n: torch.zeros_like(x) for n, x in inputs.items()}
    q, k, v = (full(n, inputs[n].detach().double()) for n in ("query", "key", "value"))
    tq, tk, tv, tbias = (full(n, (zeros | tangents)[n].detach().double()) for n in _INPUTS)
    if "relative_bias" in tangents:
        tbias = tbias + full("relative_bias", tangents["relative_bias"].detach().double())
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
    t_sink = full("sinks", tangents["sinks"].detach().double()) if "sinks" in tangents else torch.zeros_like(sink)
    sink2 = (sink * (1.0 + sink_condition)).square()
    mean = rows(weights * t) + sink * t_sink
    mean2 = rows(p2 * t2) + sink2 * t_sink.square() + mean.square()
    tau2, tlse2 = t2 + mean2, (1.0 + eps / eps_accumulate * condition).square() * t2
    of_sink = (sink * (1.0 + eps / eps_accumulate * sink_condition) * t_sink.abs()).squeeze(-1)
    units = {
        "tout": unit("tout", ((w2 * tau2) @ v.square() + w2 @ tv.square() + mean2 * out.square()).sqrt()),
        "tlse": eps_accumulate * (exact["tlse"].abs() + (weights.square() * tlse2).sum(-1).sqrt() + of_sink),
        "value": unit("value", reduce("value", (w2 * tau2).mT @ do.square())),
    }
    dp = (do @ v.mT) * survive
    dp2 = (do.square() @ v.square().mT) * survive.square() + dp.square()
    delta = rows(do * out) - dlse
    delta2 = (1.0 + 2.0 * eps_accumulate / eps) ** 2 * rows((do * out).square()) + dlse.square()
    u2 = ((do.square() @ tv.square().mT) + (do @ tv.mT).square()) * survive.square()
    dx2 = p2 * (dp2 + delta2 + (dp - delta).square())
    g2 = tau2 * (dp2 + delta2 + (dp - delta).square()) + u2
    g_sink2 = (t_sink.square() + mean2) * (delta2 + delta.square())
    gamma2 = rows(p2 * g2) + sink2 * g_sink2 + rows((do * exact["tout"]).square()) + delta2 * mean2
    ddx2 = p2 * (g2 + gamma2)
    # What is one rounded number for the whole row reaches the query through a coherent sum over the keys.
    coherent = gamma2 * (weights @ k).square() + delta2 * (
        ((weights * (t - mean)) @ k).square() + (weights @ tk).square()
    )
    dz2 = slope.square() * ddx2 + curvature.square() * tz2 * dx2
    dt2 = slope.square() * dx2
    units["query"] = unit("query", abs(scale) * reduce("query", dz2 @ k.square() + dt2 @ tk.square() + coherent))
    units["key"] = unit("key", abs(scale) * reduce("key", dz2.mT @ q.square() + dt2.mT @ tq.square()))
    for name, count in additions.items():
        one_by_one = eps_accumulate / eps * math.sqrt(count) * exact[name].abs()
        units[name] = unit(name, reduce(name, ddx2) + one_by_one)
    if "sinks" in inputs:
        units["sinks"] = unit("sinks", reduce("sinks", sink2 * (g_sink2 + gamma2)))
    return units
