"""FLOPs of the operators, as torch counts its own attention: 2 per multiply-add of each matrix product.

Scores that a mask or a band excludes count, as in torch's counts. Those outside key ranges don't, as torch leaves out
what lies between packed sequences; without their values (fake tensors, a meta device, DTensors) all scores count.
attnkern doesn't import torch.utils.flop_counter, which imports all of Triton, but waits until a program does.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import (
    ops,  # noqa: F401 (defines the operators)
    signatures,
)
from .mask import Mask


class _Waiting(importlib.abc.MetaPathFinder):
    """Calls functions with torch.utils.flop_counter as soon as that has been imported."""

    def __init__(self) -> None:
        self.functions: list[Callable[[ModuleType], None]] = []

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch.utils.flop_counter":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                run(module)
                for function in self.functions:
                    function(module)

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


_waiting = _Waiting()
if "torch.utils.flop_counter" not in sys.modules:
    sys.meta_path.insert(0, _waiting)


def with_flop_counter(function: Callable[[ModuleType], None]) -> Callable[[], None]:
    """function(torch.utils.flop_counter) now, or when a program imports that. Returns what stops the waiting.

    attnkern doesn't import it itself: it imports all of Triton, which takes longer than attnkern.
    """
    if (module := sys.modules.get("torch.utils.flop_counter")) is not None and _waiting not in sys.meta_path:
        function(module)
        return lambda: None
    _waiting.functions.append(function)
    return lambda: _waiting.functions.remove(function) if function in _waiting.functions else None


_FORMULAS: dict[Any, Callable[..., int]] = {}


def _counts(signature: signatures.Signature) -> Callable[[Callable[[Any], int]], Callable[[Any], int]]:
    """Of an operator, by a function of its grouped arguments."""

    def keep(formula: Callable[[Any], int]) -> Callable[[Any], int]:
        operator = getattr(torch.ops.attnkern, signature.arguments.__name__)
        _FORMULAS[operator] = lambda *flat, **_: formula(signature.of(flat))
        return formula

    return keep


def _scores(inputs: signatures.Inputs) -> int:
    """How many count. Waits for the device that key ranges are on."""
    key_ranges = inputs.key_ranges
    batch, heads, seqlen_q, _ = inputs.q.shape
    seqlen_k = inputs.seqlen_k
    # No subclass, whose values another may hold (FakeTensor) or that holds a part of them (DTensor).
    if key_ranges is None or type(key_ranges) is not Tensor or key_ranges.is_meta:
        return batch * heads * seqlen_q * seqlen_k
    mask = Mask.of_ranges(key_ranges, seqlen_q, seqlen_k)
    alike = [n if mine == 1 else 1 for n, mine in zip((batch, heads), mask.shape, strict=False)]
    return int(mask.live) * alike[0] * alike[1]


@_counts(signatures.FORWARD)
def _forward_flops(call: Any) -> int:
    """Q K^T and P V."""
    q, v = call.inputs.q, call.inputs.v
    return 2 * _scores(call.inputs) * (q.shape[3] + v.shape[3])


@_counts(signatures.BACKWARD)
def _backward_flops(call: Any) -> int:
    """Q K^T again, dO V^T, P^T dO, dS K, dS^T Q."""
    q, v = call.inputs.q, call.inputs.v
    return 2 * _scores(call.inputs) * (3 * q.shape[3] + 2 * v.shape[3])


@_counts(signatures.TANGENT)
def _tangent_flops(call: Any) -> int:
    """Q K^T again, the scores' tangents by those of Q and K, the output's by those of the scores and of V."""
    return 2 * _scores(call.inputs) * _tangent_size(call.inputs, call.tangents)


@_counts(signatures.SECOND_BACKWARD)
def _second_backward_flops(call: Any) -> int:
    """The tangent with its products, dO V^T, dO cot_dv^T, P'^T dO, dS' K, dS'^T Q, dS cot_dk, dS^T cot_dq."""
    q, v, moved = call.inputs.q, call.inputs.v, call.cotangents
    scores_move = _given(moved.q, moved.k, moved.bias) > 0
    size = q.shape[3] * (2 + _given(moved.q, moved.k)) + v.shape[3] * (1 + scores_move + _given(moved.v))
    return 2 * _scores(call.inputs) * (size + _tangent_size(call.inputs, moved))


def _tangent_size(inputs: signatures.Inputs, moved: signatures.Derivatives) -> int:
    scores_move = _given(moved.q, moved.k, moved.bias) > 0
    return inputs.q.shape[3] * (1 + _given(moved.q, moved.k)) + inputs.v.shape[3] * (scores_move + _given(moved.v))


def _given(*tensors) -> int:
    return sum(x is not None for x in tensors)


def _register_formulas(flop_counter: Any) -> None:
    for operator, formula in _FORMULAS.items():
        flop_counter.register_flop_formula(operator, get_raw=True)(formula)


with_flop_counter(_register_formulas)
