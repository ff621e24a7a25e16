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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from attnkern.backends.failed import CannotBuild

from .arguments import Constants, Strides
from .configs import Config


def block(element: str, shape: tuple[int, ...]) -> str:
    """The type of a tensor descriptor, by its elements and the tile that it loads."""
    return f"tensordesc<{element}[{','.join(map(str, shape))}]>"


class Leaf(NamedTuple):
    """An argument, or a field of one that is a named tuple."""

    kind: str  # its Triton type; "constexpr" for a constant
    value: Any = None  # None for a tensor, which a launch brings
    divisor: int = 1  # of an integer or an address: a number that it is a multiple of


NOTHING = Leaf("constexpr")  # what a kernel has no use for
Tree = Any  # a Leaf, or a named tuple of trees


def leaves(tree: Tree, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """What is no tuple (or a `Leaf`) in a tree, each with its path."""
    if isinstance(tree, Leaf) or not isinstance(tree, tuple):
        yield path, tree
    else:
        for n, branch in enumerate(tree):
            yield from leaves(branch, (*path, n))


def _each(tree: Tree, what: Callable[[Leaf], Any]) -> Any:
    return what(tree) if isinstance(tree, Leaf) else type(tree)(*(_each(branch, what) for branch in tree))


class Kernel:
    """One variant of a Triton function; `variant` makes each once.

    signature maps every argument to its Triton type, or a named tuple of types ("constexpr" for a constant). fixed has
    the constants by path (the argument's number, then the field's), divisors what integers and pointers are multiples
    of; constants are the fields of C.
    """

    def __init__(
        self,
        function: Any,
        signature: Mapping[str, Any],
        constants: Mapping[str, Any],
        fixed: Mapping[tuple[int, ...], Any],
        divisors: Mapping[tuple[int, ...], int],
        config: Config,
    ):
        self.function = function
        self.signature = signature
        self.constants = constants
        self.fixed = fixed
        self.divisors = divisors
        # Triton 3.9 asks for an explicit choice of fp_fusion; this is every version's default.
        self.options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
        self.compiled: dict[int, Any] = {}  # by compute capability
        self.loaded: dict[int, tuple] = {}  # by device index

    def compile(self, capability: int) -> Any:
        """Triton's CompiledKernel for sm_<capability>; no device is needed. Raises CannotBuild, tried once."""
        if (reason := why_not(self, capability)) is not None:
            raise CannotBuild(reason)
        if capability not in self.compiled:
            attrs = {path: [["tt.divisibility", n]] for path, n in self.divisors.items()}
            source = ASTSource(self.function, signature=self.signature, constexprs=self.fixed, attrs=attrs)
            target = GPUTarget("cuda", capability, 32)
            try:
                self.compiled[capability] = triton.compile(source, target=target, options=self.options)
            except Exception as error:  # of a code generator that raises whatever it meets, of LLVM, or of ptxas
                raise _failed((self, capability), f"{self} does not compile for sm_{capability}", error) from error
        return self.compiled[capability]

    def __str__(self) -> str:
        return f"Triton's {self.function.__name__}"


failures: dict[tuple[Kernel, int] | None, str] = {}
"""What could not be built in this process: why, by kernel and compute capability; by None, what holds for all."""


def why_not(kernel: Kernel, capability: int) -> str | None:
    """Why a kernel cannot be built, as far as that was tried."""
    return (failures.get(None) or failures.get((kernel, capability))) if failures else None


def _failed(key: tuple[Kernel, int] | None, what: str, error: Exception) -> CannotBuild:
    told = " ".join(str(error).split())
    failures[key] = f"{what} ({type(error).__name__}{': ' * bool(told)}{told[:300]})"
    return CannotBuild(failures[key])


_variants: dict[tuple, Kernel] = {}


def variant(
    function: Any,
    given: Mapping[str, Leaf],
    strides: Mapping[str, Strides],
    constants: Mapping[str, Any],
    config: Config,
) -> tuple[Kernel, tuple]:
    """The kernel of `function` for these arguments and fields by name, strides by tensor, and constants C; and the
    arguments from `strides` on, those before being tensors. Names that the function doesn't have are passed over."""
    annotations = function.fn.__annotations__

    def tree_of(name: str, kind: Any) -> Tree:
        if kind is Strides:
            return strides.get(name, NOTHING)
        if fields := getattr(kind, "_fields", ()):
            return kind(*(tree_of(field, kind.__annotations__[field]) for field in fields))
        return Leaf("constexpr", Constants(**constants)) if name == "C" else given[name]

    trees = {name: tree_of(name, annotations.get(name)) for name in function.arg_names}
    every = list(leaves(tuple(trees.values())))
    signature = {name: _each(tree, lambda leaf: leaf.kind) for name, tree in trees.items()}
    fixed = {path: leaf.value for path, leaf in every if leaf.kind == "constexpr"}
    divisors = {path: leaf.divisor for path, leaf in every if leaf.divisor > 1 and leaf.kind != "constexpr"}
    key = (function, tuple(signature.values()), tuple(fixed.items()), tuple(divisors.items()), config)
    kernel = _variants.get(key)
    if kernel is None:
        kernel = _variants[key] = Kernel(function, signature, dict(constants), fixed, divisors, config)
    values = [_each(tree, lambda leaf: leaf.value) for tree in trees.values()]
    return kernel, tuple(values[function.arg_names.index("strides") :])


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
        target = capability(device_index)
        compiled = kernel.compile(target)
        try:
            return compiled.run, compiled.function, compiled.packed_metadata  # `run` loads it onto the current device
        except OutOfResources as error:
            raise _failed((kernel, target), f"{kernel} needs more than the device has", error) from error
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            missing = _missing_for_launchers()
            if missing is None and not isinstance(error, subprocess.CalledProcessError):
                raise  # of CUDA, or unknown
            if missing is None:
                raise _failed((kernel, target), f"the launcher of {kernel}, in C, does not compile", error) from error
            raise _failed(None, f"Triton compiles a launcher in C for its kernels, and {missing}", error) from error


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
