"""The simulator's test kernels on a real GPU: the same cases, the same PTX, the CUDA driver instead of the simulator.

The tensors of a case are copied to the device, every pointer in its arguments (also within structures and tensor maps)
becomes the device's, and what the kernel wrote is copied back: `case.check()` then judges it as it does a simulation.
"""

from __future__ import annotations

import copy
import ctypes
import functools

import torch

from . import cuda
from .kernels.references import FLAGS, FOLDER, Case, Map
from .kernels.triton_cases import TritonCase

_ELEMENT = {torch.int16: 1, torch.int32: 3, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def _driver() -> ctypes.CDLL:
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes torch's context the current one
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args) -> None:
    status = getattr(_driver(), name)(*args)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()}")


class _Moved:
    """Copies on the device of the storages behind CPU tensors."""

    def __init__(self):
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same view of the copy."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.pairs:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.pairs[storage.data_ptr()] = (flat, flat.cuda())
        moved = self.pairs[storage.data_ptr()][1].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype, device="cuda").set_(
            moved, tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def address(self, cpu: int) -> int:
        for base, (flat, moved) in self.pairs.items():
            if base <= cpu < base + flat.numel():
                return moved.data_ptr() + cpu - base
        return cpu

    def back(self) -> None:
        for flat, moved in self.pairs.values():
            flat.copy_(moved)


def run(case: Case | TritonCase, **options) -> None:
    """Launches the case on the current device; its outputs are then in its (CPU) tensors.

    Raises:
        RuntimeError: the driver refused the module or the launch, or the kernel faulted.
    """
    moved = _Moved()
    if isinstance(case, TritonCase):
        _run_triton(case, moved, options)
    else:
        _run_cuda(case, moved)
    torch.cuda.synchronize()
    moved.back()


def _run_triton(case: TritonCase, moved: _Moved, options: dict) -> None:
    def move(x):
        if isinstance(x, torch.Tensor):
            return moved.add(x)
        if hasattr(x, "base") and hasattr(x, "block_shape"):
            x = copy.copy(x)
            x.base = moved.add(x.base)
        return x

    kwargs = {name: move(x) for name, x in case.kwargs.items()}
    case.kernel[case.grid](*map(move, case.args), **kwargs, **options)  # type: ignore[index]


def _run_cuda(case: Case, moved: _Moved) -> None:
    compiled = cuda(FOLDER / case.source, case.entry, target=case.target, flags=FLAGS)
    for tensor in case.tensors:
        moved.add(tensor)
    values: list = [_argument(x, moved) for x in case.args]
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), compiled.text.encode())
    _call("cuModuleGetFunction", ctypes.byref(function), module, compiled.name.encode())
    if case.shared:
        _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, case.shared)
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    grid = (*case.grid, 1, 1)[:3]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _call("cuLaunchKernel", function, *grid, case.block, 1, 1, case.shared, stream, pointers, None)
    torch.cuda.synchronize()
    _call("cuModuleUnload", module)


def _argument(x, moved: _Moved):
    """A ctypes object that holds the argument as the kernel takes it."""
    if isinstance(x, torch.Tensor):
        return ctypes.c_uint64(moved.add(x).data_ptr())
    if isinstance(x, Map):
        return _tensor_map(x, moved)
    if isinstance(x, ctypes.Structure):
        x = type(x).from_buffer_copy(x)
        for name, kind in x._fields_:
            if kind is ctypes.c_void_p and getattr(x, name):
                setattr(x, name, moved.address(getattr(x, name)))
        return x
    if isinstance(x, float):
        return ctypes.c_float(x)
    return ctypes.c_int32(x)


def _tensor_map(x: Map, moved: _Moved):
    """A CUtensorMap, 64-byte aligned, by the driver's own encoder."""
    tensor = moved.add(x.tensor)
    rank, size = tensor.ndim, tensor.element_size()
    raw = ctypes.create_string_buffer(128 + 64)
    at = -ctypes.addressof(raw) % 64
    out = (ctypes.c_uint64 * 16).from_buffer(raw, at)
    sizes = (ctypes.c_uint64 * rank)(*tensor.shape[::-1])
    strides = (ctypes.c_uint64 * max(rank - 1, 1))(*(s * size for s in tensor.stride()[-2::-1]))
    box = (ctypes.c_uint32 * rank)(*x.box)
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    address = ctypes.c_void_p(tensor.data_ptr())
    kind, swizzle = _ELEMENT[tensor.dtype], _SWIZZLE[x.swizzle]
    _call("cuTensorMapEncodeTiled", out, kind, rank, address, sizes, strides, box, ones, 0, swizzle, 0, 0)
    return out
