"""What the operators take and give, declared once.

Schemas, fakes, routes, autograd's Functions and the rules of sharding and of vmap are made of it, so that none of them
counts arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from .params import (
    GRAD_BIAS,
    GRAD_GRAD_LSE,
    GRAD_GRAD_OUT,
    GRAD_K,
    GRAD_Q,
    GRAD_SINKS,
    GRAD_V,
    SCHEMA,
    AttentionParams,
)


class Inputs(NamedTuple):
    """The tensors of a call, as every operator takes them, in this order.

    A new one becomes an argument of every operator, and stands in ATTNKERN_TENSORS of csrc/common/params.h, too. What
    has a derivative comes first.
    """

    q: Tensor  # (B, Hq, L, E)
    k: Tensor  # (B, Hk, S, E)
    v: Tensor  # (B, Hv, S, Ev)
    # (B|1, Hq|1, L|1, S|1): bool (True = attend) or floating point (added to the scaled scores); or a mask in bits
    # (bits.py), uint8; or a table of what each distance adds (relative.py), floating point (B|1, Hq|1, L + S - 1)
    bias: Tensor | None = None
    # (B|1, Hq) of the log-sum-exp's dtype: a logit of each head that takes part in the softmax and has no value
    sinks: Tensor | None = None
    # int32 (B|1, Hq|1, L|1, 1|2, 2): a row attends to the keys of [begin, end) of either range
    key_ranges: Tensor | None = None
    philox_seed: Tensor | None = None  # int64: a key for each of equal consecutive groups of the batch
    # int32 (B, pages of a sequence): k is (pages, Hk, size, E), v (pages, Hv, size, Ev), and key j of a sequence is row
    # j % size of page block_table[sequence, j // size]. Forward only
    block_table: Tensor | None = None

    @property
    def seqlen_k(self) -> int:
        """S, in pages too."""
        return self.k.shape[2] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def differentiable(self) -> Derivatives:
        return Derivatives(*self[:NUM_DERIVATIVES])

    @property
    def masks(self) -> tuple[Tensor | None, ...]:
        """All but query, key and value."""
        return self[3:]

    @property
    def constant(self) -> tuple[Tensor | None, ...]:
        return self[NUM_DERIVATIVES:]


class Derivatives(NamedTuple):
    """Gradients, tangents or cotangents of those Inputs that have any, or what else there is one of for each."""

    q: Any = None
    k: Any = None
    v: Any = None
    bias: Any = None
    sinks: Any = None


BIAS, SINKS = Inputs._fields.index("bias"), Inputs._fields.index("sinks")
NUM_INPUTS, NUM_DERIVATIVES = len(Inputs._fields), len(Derivatives._fields)


def for_operators(arguments: tuple[Any, ...], first: int = 0) -> tuple[Any, ...]:
    """An operator's arguments, of which the inputs begin at `first`. Those given may have sinks (Hq,) and a bias
    (L, S), as calls have them."""
    bias, sinks = arguments[first + BIAS], arguments[first + SINKS]
    if bias is not None and bias.dim() == 2:
        arguments = *arguments[: first + BIAS], bias[None, None], *arguments[first + BIAS + 1 :]
    if sinks is not None and sinks.dim() == 1:
        arguments = *arguments[: first + SINKS], sinks.unsqueeze(0), *arguments[first + SINKS + 1 :]
    return arguments


GRAD_BITS = Derivatives(GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS, GRAD_SINKS)
"""Bits of the argument grad_mask: which gradients are asked for. A gradient not asked for has shape (0,)."""
SECOND_ORDER_BITS = (GRAD_GRAD_OUT, GRAD_GRAD_LSE, *GRAD_BITS)
"""Those of second_backward, in the order of its results and of backward's differentiable arguments."""

_TENSORS = ", ".join(f"Tensor{'' if kind is Tensor else '?'} {name}" for name, kind in get_type_hints(Inputs).items())


class Signature:
    """An operator's arguments, in groups: `fields` says of each what it is.

    Inputs, or AttentionParams; "t" or another prefix and "*": Derivatives whose names begin with it, None where there
    is none; or the type of a single argument in the schema. Tensors come first.
    """

    def __init__(self, name: str, fields: dict[str, Any], results: str) -> None:
        self.arguments: Any = NamedTuple(name, [(field, Any) for field in fields])  # type: ignore[misc]
        parts, at = [], 0
        self.num_tensors = 0
        self._groups: list[tuple[Any, slice | int]] = []
        for field, kind in fields.items():
            group, count = kind, 1
            if kind is Inputs:
                parts.append(_TENSORS)
                count = NUM_INPUTS
            elif kind is AttentionParams:
                parts.append(SCHEMA)
                group, count = tuple, len(AttentionParams._fields)
            elif kind.endswith("*"):
                parts += [f"Tensor? {kind.removesuffix('*')}{x}" for x in Derivatives._fields]
                group, count = Derivatives, NUM_DERIVATIVES
            else:
                parts.append(f"{kind} {field}")
                group = None
            self._groups.append((group, at if group is None else slice(at, at + count)))
            at += count
            if group in (Inputs, Derivatives) or (group is None and kind.startswith("Tensor")):
                self.num_tensors = at  # they come first
        self.schema = f"{name}({', '.join(parts)}) -> ({results})"

    def of(self, flat: Sequence[Any]) -> Any:
        """The arguments, or what there is one of for each argument, by their groups' names; params are a tuple."""
        return self.arguments(
            *(
                flat[at] if kind is None else tuple(flat[at]) if kind is tuple else kind(*flat[at])
                for kind, at in self._groups
            )
        )


def _gradients(prefix: str) -> str:
    return ", ".join(f"Tensor {prefix}{name}" for name in Derivatives._fields)


_OF_FORWARD = {"inputs": Inputs, "params": AttentionParams, "need_lse": "bool"}
_OF_BACKWARD = {
    "grad_out": "Tensor",
    "grad_lse": "Tensor?",
    "inputs": Inputs,
    "out": "Tensor",
    "lse": "Tensor",
    "params": AttentionParams,
    "grad_mask": "int",
}
_OUT, _GRADIENTS = "Tensor out, Tensor lse", _gradients("d")

FORWARD = Signature("forward", {**_OF_FORWARD, "backend": "str"}, _OUT)
"""lse has shape (0,) unless need_lse."""
ATTENTION = Signature("attention", {**_OF_FORWARD, "backend": "str"}, _OUT)
"""`forward` with its derivatives (autograd/functions.py): what a program of torch.export holds."""
BACKWARD = Signature("backward", {**_OF_BACKWARD, "backend": "str"}, _GRADIENTS)
TANGENT = Signature(
    "tangent",
    {
        "inputs": Inputs,
        "tangents": "t*",
        "out": "Tensor",
        "lse": "Tensor",
        "params": AttentionParams,
        "backend": "str",
    },
    "Tensor tout, Tensor tlse",
)
"""The tangents of what `forward` returns, for tangents of its inputs. A tangent that is None is zero."""
SECOND_BACKWARD = Signature(
    "second_backward",
    {"cotangents": "cot_d*", **_OF_BACKWARD, "backend": "str"},
    f"Tensor g_grad_out, Tensor g_grad_lse, {_gradients('g')}",
)
"""The gradient of the sum of <cot_dx, dx> over the results dx of `backward`. A cotangent that is None is zero."""

WEIGHTS = Signature(
    "weights",
    {
        "q": "Tensor",
        "k": "Tensor",
        "bias": "Tensor?",
        "sinks": "Tensor?",
        "lse": "Tensor?",
        "philox_seed": "Tensor?",
        "rows": "Tensor?",
        "params": AttentionParams,
        "average": "bool",
    },
    "Tensor weights",
)
"""`tiles.weights` with its derivatives (autograd/of_weights.py): what a program of torch.export holds."""

CUDA_FORWARD = Signature("cuda_forward", {**_OF_FORWARD, "tf32": "bool", "splits": "int?", "schedule": "int?"}, _OUT)
"""Of csrc/cuda: with the backend's own arguments. Splits or a schedule that are given replace the plan's."""
CUDA_BACKWARD = Signature("cuda_backward", {**_OF_BACKWARD, "tf32": "bool", "deterministic": "bool"}, _GRADIENTS)
