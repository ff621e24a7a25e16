"""The Triton kernels on CPU tensors, by Triton's interpreter: one program after the other, every operation one of
numpy. For reading them and stepping through them (docs/triton_on_a_cpu.md), not for work.

The kernels are those of triton_kernels/ as they stand. Only what the interpreter leaves out of the language is added
here: fields of constants and of tuples, and loops whose variable is a tensor.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ..problem import Problem

VARIABLE = "TRITON_INTERPRET"
CAPABILITY = 80  # its kernels load by pointers: those for later chips have inline assembly, which isn't interpreted
PROCESSORS = 4  # over which the keys of few queries are split
BLOCK_M, BLOCK_N = 16, 32  # of all tiles but decoding's: small enough to look at

asked = os.environ.get(VARIABLE, "").lower() in ("1", "true", "on", "y", "yes")
"""Whether Triton is to interpret kernels, as it reads the variable itself: when a kernel is defined, and so once."""
NOTE = f"interpreted, as {VARIABLE} says"
_one_at_a_time = threading.Lock()  # the interpreter keeps the number of its program in one place for all threads


def unavailable() -> str | None:
    """Why the interpreter cannot run, or None."""
    if importlib.util.find_spec("numpy") is None:
        return "Triton's interpreter needs numpy, which is not installed"
    language = sys.modules.get("triton.language")
    if language is not None and type(language.max).__name__ != "InterpretedFunction":
        return f"{VARIABLE} was set after triton was imported: set it before Python starts"
    return None


def refusals(problem: Problem) -> list[str]:
    """What the interpreter leaves out of what the kernels can do."""
    reasons = []
    if not problem.q.is_cpu:
        reasons.append(f"{VARIABLE} has its kernels interpreted, which takes CPU tensors")
    if str(problem.q.dtype) == "torch.bfloat16":
        reasons.append("query is bfloat16, whose bits Triton's interpreter multiplies as integers")
    return reasons


def use(plans: ModuleType) -> None:
    """Has the launches of triton_kernels/plan.py interpreted from now on, in small tiles."""
    launch, configs = plans.launch, plans.configs
    launch.run, launch.capability, launch.processors = run, lambda index: CAPABILITY, lambda index: PROCESSORS
    plans.use_table({row: {512: configs.Config(BLOCK_M, BLOCK_N, 4, 1)} for row in configs.TABLE})
    configs.BANDS = {itemsize: {512: (BLOCK_M, BLOCK_M, 4, 1)} for itemsize in configs.BANDS}
    for name in ("backward", "bias_gradient", "decode", "forward", "ranges", "score", "tangent", "tiles"):
        of_module = vars(importlib.import_module(f"{plans.__package__}.{name}"))
        of_module |= {"range": _range, "afresh": lambda x: x}  # the latter is for a compiler's registers


def run(kernel: Any, grid: int, args: tuple, device_index: int) -> None:
    """In place of `launch.run`: interprets `grid` programs."""
    import numpy

    *given, constants = map(_named, kernel.signature.values(), args)
    with _one_at_a_time, numpy.errstate(all="ignore"):  # a GPU doesn't warn of infinities either
        kernel.function.run(*given, _plain(constants), grid=(grid,), warmup=False)


def _named(kind: Any, value: Any) -> Any:
    """An argument whose fields have the names of the signature's, from which a compiler takes them."""
    return type(kind)(*map(_named, kind, value)) if isinstance(kind, tuple) else value


def _plain(constant: Any) -> Any:
    """Of `Constants` the values themselves: the interpreter doesn't look into a constexpr."""
    fields = getattr(constant, "__dict__", None)
    return constant if fields is None else SimpleNamespace(**{name: _plain(x.value) for name, x in fields.items()})


def _range(*bounds: Any) -> Iterator[Any]:
    """Python's range, of scalar tensors, as a compiler has them: kernels convert them to 64 bits."""
    from triton.runtime.interpreter import interpreter_semantic

    for n in range(*(x.handle.data.item() if hasattr(x, "handle") else x for x in bounds)):
        yield interpreter_semantic.to_tensor(n)
