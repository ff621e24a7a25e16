"""Tensors of our own beside a caller's DTensors, with which torch mixes no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def replicated(x: Any, beside: Any) -> Any:
    """x, which every rank has as a whole, beside a tensor that may be a DTensor; anything else as it is."""
    if type(x) is not Tensor:
        return x
    if not torch.compiler.is_compiling() and _functorch.is_functorch_wrapped_tensor(beside):
        while _functorch.is_functorch_wrapped_tensor(beside):
            beside = _functorch.get_unwrapped(beside)
        with temporarily_clear_interpreter_stack():  # torch.func can't follow `from_local`, and has no need to
            return replicated(x, beside)
    if type(beside).__name__ != "DTensor":
        return x
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, beside.device_mesh, [Replicate()] * beside.device_mesh.ndim, run_check=False)
