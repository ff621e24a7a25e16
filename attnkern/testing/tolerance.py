"""The tolerance rule (attnkern/testing/__init__.py)."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0


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
