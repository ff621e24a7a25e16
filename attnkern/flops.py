"""FLOPs of the operators, as torch counts its own attention: 2 per multiply-add of each matrix product, masked entries
included. attnkern doesn't import torch.utils.flop_counter, which imports all of Triton, but waits until a program does.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import ops  # noqa: F401 (defines the operators)


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


def _counts(operator: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def keep(formula: Callable[..., int]) -> Callable[..., int]:
        _FORMULAS[operator] = formula
        return formula

    return keep


def _pairs(q_shape) -> int:
    batch, heads, seqlen_q, _ = q_shape
    return batch * heads * seqlen_q


@_counts(torch.ops.attnkern.forward)
def _forward_flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Q K^T and P V."""
    return 2 * _pairs(q_shape) * k_shape[2] * (q_shape[3] + v_shape[3])


@_counts(torch.ops.attnkern.backward)
def _backward_flops(grad_shape, grad_lse_shape, q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Q K^T again, dO V^T, P^T dO, dS K, dS^T Q."""
    return 2 * _pairs(q_shape) * k_shape[2] * (3 * q_shape[3] + 2 * v_shape[3])


@_counts(torch.ops.attnkern.tangent)
def _tangent_flops(
    q_shape, k_shape, v_shape, bias, ranges, seed, tq, tk, tv, tbias, *args, out_shape=None, **kwargs
) -> int:
    """Q K^T again, the scores' tangents by those of Q and K, the output's by those of the scores and of V."""
    head_dim, head_dim_v = q_shape[3], v_shape[3]
    scores_move = not tq is tk is tbias is None
    size = head_dim * (1 + _given(tq, tk)) + head_dim_v * (scores_move + _given(tv))
    return 2 * _pairs(q_shape) * k_shape[2] * size


@_counts(torch.ops.attnkern.second_backward)
def _second_backward_flops(
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_shape, grad_lse_shape, q_shape, k_shape, v_shape, *args, **kwargs
) -> int:
    """The tangent with its products, dO V^T, dO cot_dv^T, P'^T dO, dS' K, dS'^T Q, dS cot_dk, dS^T cot_dq."""
    head_dim, head_dim_v = q_shape[3], v_shape[3]
    first = _tangent_flops(q_shape, k_shape, v_shape, None, None, None, cot_dq, cot_dk, cot_dv, cot_dbias)
    scores_move = not cot_dq is cot_dk is cot_dbias is None
    size = head_dim * (2 + _given(cot_dq, cot_dk)) + head_dim_v * (1 + scores_move + _given(cot_dv))
    return first + 2 * _pairs(q_shape) * k_shape[2] * size


def _given(*shapes) -> int:
    return sum(shape is not None for shape in shapes)


def _register_formulas(flop_counter: Any) -> None:
    for operator, formula in _FORMULAS.items():
        flop_counter.register_flop_formula(operator)(formula)


with_flop_counter(_register_formulas)
