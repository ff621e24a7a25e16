"""A provider: what turns a case and its tensors into a differentiable call, and that into the call of one pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnkern.testing import Inputs
from bench.cases import Case

from .timing import Work

PASSES = ("forward", "backward", "both", "forward-grad")
BASELINE = "sdpa"
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Refused(Exception):
    """The provider can't do this case; the message says why."""


@dataclass(frozen=True)
class Provider:
    """``bind(case, inputs)`` gives the call, or raises Refused. ``default``: takes part unless others are named."""

    name: str
    about: str
    device_types: tuple[str, ...]
    bind: Callable[[Case, Inputs], Attend]
    context: Callable[[], AbstractContextManager] = nullcontext
    default: bool = True
    quadratic: bool = False  # holds all scores
    checked: bool = True  # its result is held to the tolerance rule
    instead: Callable[[Case], Case] | None = None  # it runs another case of these sizes, by which a mask's cost is told

    def work(self, case: Case, inputs: Inputs, grad_out: Tensor, pass_name: str) -> Work:
        """The call of one pass. It returns the output, then the gradients of query, key, value and what is learned."""
        if self.instead is not None:
            case = self.instead(case)
            inputs = replace(inputs, attn_mask=None, relative_bias=None, sinks=None)
        with self.context():
            if pass_name == "forward":
                return Work(partial(self.bind(case, inputs), *tensors_of(inputs)), self.context)
            learned = {name: getattr(inputs, name).detach().requires_grad_() for name in case.learned}
            inputs = replace(inputs, **learned)
            attend = self.bind(case, inputs)
            *tensors, mask = tensors_of(inputs)
            query, key, value = leaves = [x.detach().requires_grad_() for x in tensors]
            leaves += learned.values()
            if pass_name == "forward-grad":
                return Work(partial(attend, query, key, value, mask), self.context)
            if pass_name == "backward":
                out = attend(query, key, value, mask)
                return Work(partial(torch.autograd.grad, out, leaves, grad_out, retain_graph=True), self.context)

        def both() -> tuple[Tensor, ...]:
            out = attend(query, key, value, mask)
            return (out, *torch.autograd.grad(out, leaves, grad_out))

        return Work(both, self.context)


def tensors_of(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """query, key, value and the mask, or the table (Hq, L + S - 1) of a relative bias."""
    mask = inputs.attn_mask if inputs.relative_bias is None else inputs.relative_bias
    return inputs.query, inputs.key, inputs.value, mask


def results(
    case: Case,
    pass_name: str,
    returned: object,
    restore: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """What a Work's call returned, by the names of attnkern.testing.expected."""
    tensors = returned if isinstance(returned, tuple) else (returned,)
    dense = tensors[-1].dim() == 4  # of a rival, in place of a table
    learned = ("attn_mask" if name == "relative_bias" and dense else name for name in case.learned)
    names = ("out",) if pass_name.startswith("forward") else ("query", "key", "value", *learned)
    if pass_name == "both":
        names = ("out", *names)
    found = {name: x.detach() for name, x in zip(names, tensors, strict=False) if x.numel()}
    return found if restore is None else restore(found)


def options_of(case: Case) -> dict[str, Any]:
    """The keyword arguments of a case that F.scaled_dot_product_attention has too."""
    return {
        "dropout_p": case.dropout,
        "is_causal": case.causal,
        "scale": case.scale,
        "enable_gqa": case.heads_q != case.heads_k,
    }


def extended_options_of(case: Case) -> dict[str, Any]:
    return {**options_of(case), "window": case.window, "alignment": case.alignment, "softcap": case.softcap or None}


class OperatorProvider(Provider):
    """A bare operator has no autograd: ``backward`` is a call of its own."""

    def work(self, case: Case, inputs: Inputs, grad_out: Tensor, pass_name: str) -> Work:
        if pass_name == "forward":
            return Work(partial(self.bind(case, inputs), *tensors_of(inputs)), self.context)
        if pass_name == "backward":
            return Work(self.backward(case, inputs, grad_out), self.context)
        raise Refused("a bare operator runs forward or backward only")

    @abstractmethod
    def backward(self, case: Case, inputs: Inputs, grad_out: Tensor) -> Callable[[], tuple[Tensor, ...]]: ...
