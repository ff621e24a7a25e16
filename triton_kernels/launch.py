"""From a kernel and its constants to a launch, without Triton's own launcher: that looks at every argument of every
call, and makes a new variant of a kernel when an integer happens to be 1 or a multiple of 16, as sequence lengths do.

A `Kernel` is one variant: constants, types and what is known to be aligned. It is compiled once per architecture and
loaded once per device; a launch is then a dictionary look-up and one call into the driver.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from .configs import Config

_FLOATS = frozenset(("softmax_scale", "score_scale", "softcap", "dropout_scale"))
# Strides from one batch element or head to the next reach beyond 2^31; those within a tile don't.
_LONG = ("_stride_b", "_stride_h")


class Block(NamedTuple):
    """The type of an argument that is a tensor descriptor: its element type and the tile that it loads."""

    element: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"tensordesc<{self.element}[{','.join(map(str, self.shape))}]>"


class Kernel:
    """One variant of a Triton function; `variant` makes each once.

    signature maps every argument to its Triton type ("constexpr" for a constant), constants those to their values;
    divisors names the integers and pointers that are multiples of a number.
    """

    def __init__(
        self,
        function: Any,
        signature: Mapping[str, str],
        constants: Mapping[str, Any],
        divisors: Mapping[str, int],
        config: Config,
    ):
        self.function = function
        self.signature = signature
        self.constants = constants
        self.divisors = divisors
        # Triton 3.9 asks for an explicit choice of fp_fusion; this is every version's default.
        self.options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
        self.compiled: dict[int, Any] = {}  # by compute capability
        self.loaded: dict[int, tuple] = {}  # by device index

    def compile(self, capability: int) -> Any:
        """Triton's CompiledKernel for sm_<capability>; no device is needed."""
        if capability not in self.compiled:
            names = list(self.signature)
            attrs = {(names.index(name),): [["tt.divisibility", n]] for name, n in self.divisors.items()}
            source = ASTSource(self.function, signature=self.signature, constexprs=self.constants, attrs=attrs)
            target = GPUTarget("cuda", capability, 32)
            self.compiled[capability] = triton.compile(source, target=target, options=self.options)
        return self.compiled[capability]


_variants: dict[tuple, Kernel] = {}


def variant(
    function: Any,
    pointers: Mapping[str, str | Block | None],
    constants: Mapping[str, Any],
    divisors: Mapping[str, int],
    config: Config,
) -> Kernel:
    """The kernel of `function`, whose arguments named in `pointers` and `constants` are these; the rest are numbers.

    A pointer is an element type ("bf16"), a `Block` (a descriptor), or None (nothing is passed: the kernel has no use
    for it). Names that the function doesn't have are passed over.
    """
    names = function.arg_names
    kinds = tuple(pointers.get(name) for name in names)
    values = {name: constants[name] for name in names if name in constants}
    divisors = {name: divisors[name] for name in names if name in divisors}
    key = (function, kinds, tuple(values.items()), tuple(divisors.items()), config)
    kernel = _variants.get(key)
    if kernel is None:
        signature = {}
        for name, kind in zip(names, kinds, strict=True):
            if name in values:
                signature[name] = "constexpr"
            elif name not in pointers:
                signature[name] = "fp32" if name in _FLOATS else "i64" if name.endswith(_LONG) else "i32"
            elif kind is None:
                signature[name] = "constexpr"
                values[name] = None
            else:
                signature[name] = str(kind) if isinstance(kind, Block) else f"*{kind}"
        passed = {name: n for name, n in divisors.items() if signature[name] != "constexpr"}
        kernel = _variants[key] = Kernel(function, signature, values, passed, config)
    return kernel


@functools.cache
def capability(device_index: int) -> int:
    """Compute capability of a device, e.g. 90."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


@functools.cache
def processors(device_index: int) -> int:
    """How many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def descriptor(fields: dict[str, Any], base: Tensor) -> TensorDescriptor:
    """A descriptor of `base` with the other fields as given. (Not by its constructor, whose checks cost 1.5 us.)"""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.__dict__.update(fields)
    made.base = base
    return made


def run(kernel: Kernel, grid: int, args: tuple, device_index: int) -> None:
    """Launches `grid` programs on the device's current stream. args: all that the function has, constants included."""
    loaded = kernel.loaded.get(device_index)
    if loaded is None:
        loaded = kernel.loaded[device_index] = _load(kernel, device_index)
    launcher, function, metadata = loaded
    if _current_device() == device_index:
        launcher(grid, 1, 1, _stream(device_index), function, metadata, None, None, None, *args)
    else:
        with torch.cuda.device(device_index):
            launcher(grid, 1, 1, _stream(device_index), function, metadata, None, None, None, *args)


def _load(kernel: Kernel, device_index: int) -> tuple:
    with torch.cuda.device(device_index):
        compiled = kernel.compile(capability(device_index))
        try:
            return compiled.run, compiled.function, compiled.packed_metadata  # `run` loads it onto the current device
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            if (missing := _missing_for_launchers()) is None:
                raise
            raise RuntimeError(
                f"attnkern: Triton compiles a launcher in C for its kernels, and {missing}, or pass backend='cuda'"
            ) from error


def _missing_for_launchers() -> str | None:
    """What of a C compiler and Python's header isn't there, and how to get it; None: both are."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler.split()[0]) is None:
        return f"{'finds no C compiler' if compiler is None else f'CC={compiler} is not found'}: install gcc, or set CC"
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        return f"{header} is missing: install this Python's headers (python{sysconfig.get_python_version()}-dev)"
    return None


# Absent from a torch without CUDA, which launches nothing.
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
