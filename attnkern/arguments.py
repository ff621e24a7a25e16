"""Types of arguments: what is taken for a number, a window or a mask, what autocast makes of tensors, whether their
values may be looked at, and how errors show the rest."""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .params import int_of_numpy, shown, untraced

Window = tuple[int | None, int | None] | None

PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Types without methods of their own that change what an operator does."""


def _listeners() -> tuple[Callable[[], Any], ...] | None:
    try:
        return (
            torch._C._len_torch_dispatch_stack,
            torch._C._autograd._profiler_enabled,
            torch._C._is_tracing,
            torch._C._are_functorch_transforms_active,
        )
    except AttributeError:
        return None


listeners = _listeners()
"""Whether modes of __torch_dispatch__, profilers, jit.trace or torch.func see operators, or must: a question for each;
None where torch lacks one of them."""


def is_usual_window(window: Any) -> bool:
    return type(window) is tuple and len(window) == 2 and all(x is None or type(x) is int for x in window)


def checked_window(window: Any) -> Window:
    """`window` as a tuple of two bounds, each an int >= 0 or None; None: there is none."""
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"attnkern: argument 'window' must be (left, right) or None, not {shown(window)}")
    bounds: Any = tuple(int_of_numpy(x) for x in window)
    for bound in bounds:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt))):
            raise TypeError(f"attnkern: the bounds in 'window' must be int or None, not {type_name(bound)}")
    check_bounds(bounds)
    return bounds


def check_bounds(window: Any) -> None:
    if window is not None and any(bound is not None and bound < 0 for bound in window):
        raise ValueError(f"attnkern: window's bounds must be >= 0 (None: unbounded), got {window}")


def is_causal_bias(x: object) -> bool:
    """Whether `x` is one of torch.nn.attention.bias' causal masks, which hold their sizes instead of elements."""
    return type(x).__name__ == "CausalBias" and type(x).__module__ == "torch.nn.attention.bias"


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device. (Nearly every call ends at the first test: 0.1 us, not 0.5.)"""
    return (
        torch._C._is_any_autocast_enabled()
        # Dynamo of torch 2.11 cannot ask this, so the common devices are not asked.
        and (device.type in ("cpu", "cuda") or torch.amp.is_autocast_available(device.type))
        and torch.is_autocast_enabled(device.type)
    )


def autocast(query: Tensor, *others: Any) -> list[Any]:
    """torch's rule for its lower-precision list: floating point goes to autocast's dtype, float64 stays."""
    dtype = torch.get_autocast_dtype(query.device.type)
    return [
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in (query, *others)
    ]


def rounds_to_tf32(dtype: torch.dtype) -> bool:
    """Whether torch lets the factors of such tensors' products on a GPU be rounded to tf32."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def number(name: str, x: Any) -> float:
    """What torch takes for a float: Python and numpy scalars, and 0-dim tensors outside the graph."""
    x = untraced(x)
    if isinstance(x, Tensor):
        if x.ndim == 0 and not x.requires_grad and not x.is_complex():
            return float(x.item())
    elif isinstance(x, (float, int, torch.SymFloat, torch.SymInt)):
        return float(constant(x))
    elif isinstance(x, numbers.Real) or is_numpy_bool(x):
        return float(x)
    raise type_error(name, "float", x)


def integer(name: str, x: Any) -> Any:
    """An int, numpy's as Python's, or a size of a graph; TypeError for anything else, bools among them."""
    x = int_of_numpy(x)
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise type_error(name, "int", x)
    return x


def index_of(x: Any) -> Any:
    """An int, numpy's, or a tensor of one, as Python's int, or a size of a graph; None of anything else, bools among
    them."""
    if isinstance(x, (int, torch.SymInt)):  # which operator.index would make a constant of a graph's size
        return None if isinstance(x, bool) else x
    try:
        return operator.index(x)
    except TypeError:
        return None


def check_bool(name: str, x: object) -> None:
    if not isinstance(x, bool):
        raise type_error(name, "bool", x)


def constant(x: Any) -> Any:
    """A number that a trace may hold as a symbol, as a constant guarded on: operators take their floats as such."""
    if torch.compiler.is_compiling() or isinstance(x, (torch.SymInt, torch.SymFloat)):
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        return guard_scalar(x)
    return x


def has_values(*tensors: Tensor) -> bool:
    """Whether tensors have values that a program may branch on: not in a graph or trace, which serves other values."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch.jit.is_tracing():
        return False
    if making_graph():
        return False
    return not any(isinstance(x, (FakeTensor, FunctionalTensor)) or x.is_meta for x in tensors)


def making_graph() -> bool:
    """Whether make_fx, of real tensors too, or AOTAutograd is running."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def may_look(*tensors: Tensor) -> bool:
    """Whether values are there and may be checked: at no cost on the CPU, or where ATTNKERN_CHECK=1 asks for it."""
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    return has_values(*tensors) and (on_cpu or asked_to_look())


def asked_to_look() -> bool:
    """Whether ATTNKERN_CHECK is 1, now. Raises ValueError where it is neither 0 nor 1."""
    value = os.environ.get("ATTNKERN_CHECK") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"attnkern: ATTNKERN_CHECK must be 0 or 1, got {value!r}")
    return value == "1"


asked_to_look()  # a bad value is an error when attnkern is imported, on any device


def exporting() -> bool:
    """As torch.compiler.is_exporting(), which torch 2.11 answers with True whenever it compiles."""
    return torch.compiler._is_exporting_flag


def check_not_traced(*tensors: Tensor) -> None:
    """Raises where a mask's data can't be looked at: meta tensors have none, torch.export's come later, and
    torch.jit.trace keeps as a constant what is seen."""
    if any(x.is_meta for x in tensors):
        raise RuntimeError("attnkern: this mask depends on what its data are, got a meta tensor, which has no values")
    if tensors and exporting():
        raise RuntimeError(
            "attnkern: this mask depends on what its data are, which torch.export doesn't know: make it outside and "
            "pass it to the model, or give its lengths"
        )
    if torch.jit.is_tracing():
        raise RuntimeError(
            "attnkern: this mask depends on what its data are, which torch.jit.trace would keep as constants: make it "
            "before, or give its lengths, or use torch.export"
        )
    if not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_batchedtensor, tensors)):
        raise RuntimeError(
            "attnkern: this mask depends on what its data are, which torch.vmap hides: make it outside, or give its "
            "lengths"
        )


def is_numpy_bool(x: object) -> bool:
    return type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_")


def type_error(name: str, expected: str, x: object) -> TypeError:
    return TypeError(f"attnkern: argument '{name}' must be {expected}, not {type_name(x)}")


def mask_type_error(attn_mask: object) -> TypeError:
    """Of an attn_mask that is no mask, with what makes one of it."""
    hint = ""
    if hasattr(attn_mask, "mask_mod"):
        hint = " (masks.from_mask_mod makes a Mask of its mask_mod)"
    elif callable(attn_mask):
        hint = " (masks.from_mask_mod makes a Mask of a mask_mod)"
    elif isinstance(attn_mask, list | tuple) or hasattr(attn_mask, "__array__"):
        hint = " (masks.from_bool makes a Mask of torch.tensor(attn_mask), masks.padding makes one of lengths)"
    return TypeError(f"{type_error('attn_mask', 'Tensor, Mask or None', attn_mask)}{hint}")


def type_name(x: object) -> str:
    if isinstance(x, Tensor):
        return f"Tensor of shape {show(x.shape)}{' that requires grad' if x.requires_grad else ''}"
    kind = type(x)
    if torch.compiler.is_compiling():  # Dynamo can't read a type's module, and would say so instead of the error
        return kind.__name__
    ours = kind.__module__.partition(".")[0] in ("builtins", "attnkern")
    return kind.__name__ if ours else f"{kind.__module__}.{kind.__name__}"


def show(x: object) -> str:
    """Shapes as plain tuples, dtypes without their module."""
    return str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else str(tuple(x))  # type: ignore[arg-type]


def describe(name: str, x: Tensor) -> str:
    return f"{name} {show(x.shape)} {show(x.dtype)} {x.device}"
