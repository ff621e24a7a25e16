"""The way in: compile a kernel for a GPU, run it on the CPU.

    report = ptxsim.launch(triton_function, (grid_x, grid_y), q, k, v, out, scale, BLOCK=64, target=90, num_warps=4)
    kernel = ptxsim.cuda("delta.cu", "delta_kernel", target=80)
    report = ptxsim.launch(kernel, (8,), params, block=256, tensors=[grad_out, out, delta])

Tensors are CPU tensors, and their own addresses are the kernel's global addresses: nothing is copied, so that
structures of pointers made by host code work as they are. Bounds are those of the storage behind each tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from . import ptx, tensormap
from .compilers import SHARED_LIMIT, check_target, ptx_of
from .decode import Program
from .errors import LaunchError
from .machine import Machine
from .spaces import GlobalMemory, Pool, Segment

RESIDENT_LANES = 16384


@dataclass(frozen=True, eq=False)
class Compiled:
    """PTX ready to be launched: what `launch` needs to know beside the arguments."""

    text: str
    name: str
    target: int
    threads: int | None = None  # per block, if the compiler fixed it
    shared: int = 0  # dynamic shared memory, in bytes, if the compiler fixed it
    scratch: int = 0  # global scratch of each block, in bytes (Triton's device-made descriptors)
    descriptors: tuple = ()  # Triton's description of each tensor descriptor argument
    arguments: tuple[str, ...] = ()  # names, for messages
    signature: tuple = ()  # Triton's types of the arguments that are passed

    @property
    def program(self) -> Program:
        return _decoded(self.text, self.name, self.target)

    def with_text(self, text: str) -> Compiled:
        """The same kernel with other PTX: for planted bugs."""
        return replace(self, text=text)


@contextlib.contextmanager
def _uncollected():
    """Without the collector: hundreds of thousands of objects are made, all of which stay, and it would look through
    them again and again. Behind it they count as old ones, which it has looked through."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
            gc.enable()


@functools.lru_cache(maxsize=32)  # 18 megabytes for 9,000 instructions, both together
def _decoded(text: str, name: str, target: int) -> Program:
    with _uncollected():
        return Program(_parsed(text, name), target)


@functools.lru_cache(maxsize=32)
def _parsed(text: str, name: str) -> ptx.Kernel:
    """What all targets have in common."""
    kernel = ptx.parse(text, name).kernel(name)
    kernel.module.kernels = {}  # a cycle would keep the megabytes of a kernel that nobody needs any more
    return kernel


@dataclass
class Report:
    """What a launch did: `steps` instructions of groups; counts by name ("products": mma of a warp, wgmma of a
    warpgroup; what shared memory did); nothing about time."""

    steps: int = 0
    statistics: Counter = field(default_factory=Counter)

    @property
    def bank_conflicts(self) -> int:
        """Extra turns that shared memory took because lanes met in one bank."""
        return self.statistics["bank conflicts"]


def launch(
    kernel,
    grid,
    *args,
    target: int = 90,
    block=None,
    shared: int | None = None,
    tensors: Sequence[torch.Tensor] = (),
    undefined: Sequence[torch.Tensor] = (),
    seed: int | None = None,
    check: bool = True,
    **kwargs,
) -> Report:
    """Compiles `kernel` for a GPU and executes its PTX on CPU tensors.

    Args:
        kernel: a Triton JITFunction, or what `cuda` or `compile_triton` returned.
        grid: blocks in x, y, z.
        args: the kernel's arguments. For a CUDA kernel: tensors (their pointers), numbers, ctypes structures, bytes.
        target: compute capability a Triton kernel is compiled for: 80, 86, 90, 100 or 120.
        block: threads per block of a CUDA kernel, in x, y, z.
        shared: bytes of dynamic shared memory of a CUDA kernel.
        tensors: tensors that are reached through pointers in structures.
        undefined: tensors whose contents nobody may read before the kernel has written them.
        seed: None runs the lowest program counter first; an integer draws the order of warps and asynchronous work.
        check: the hazard checker.
        kwargs: constexpr and other arguments of a Triton kernel by name, and its compile options (num_warps, ...).

    Raises:
        LaunchError: an argument, the grid or the target is wrong.
        PtxError: the PTX holds something that the simulator doesn't know.
        Fault, Hazard, Deadlock: what the kernel does wrong.
    """
    grid, compiled, values = _dims(grid, "grid"), kernel, list(args)
    if not isinstance(kernel, Compiled):
        if not hasattr(kernel, "arg_names"):
            raise LaunchError(f"kernel: expected a Triton JITFunction or ptxsim.cuda(...), got {type(kernel).__name__}")
        bound = _bind(kernel, args, kwargs)
        compiled = compile_triton(kernel, *args, target=target, **kwargs)
        values = [bound[name] for name in compiled.arguments]
    elif kernel.signature:
        raise LaunchError("a compiled Triton kernel is launched by `run(compiled, grid, values)`")
    elif kwargs:
        raise LaunchError(f"unknown arguments: {', '.join(kwargs)}")
    return run(
        compiled,
        grid,
        values,
        block=block,
        shared=shared,
        tensors=tensors,
        undefined=undefined,
        seed=seed,
        check=check,
    )


def run(
    compiled: Compiled,
    grid,
    values: Sequence,
    *,
    block=None,
    shared: int | None = None,
    tensors: Sequence[torch.Tensor] = (),
    undefined: Sequence[torch.Tensor] = (),
    seed: int | None = None,
    check: bool = True,
) -> Report:
    """`launch` of something compiled, with the values of exactly the arguments it takes (`compiled.arguments`)."""
    program = compiled.program
    kernel = program.kernel
    grid = _dims(grid, "grid")
    if compiled.threads is not None:
        block = (compiled.threads,)
    if block is None:
        block = kernel.required_threads
        if block is None:
            raise LaunchError(f"block: the threads per block of {kernel.name} must be given")
    block = _dims(block, "block")
    threads = block[0] * block[1] * block[2]
    if not 0 < threads <= 1024:
        raise LaunchError(f"block: {threads} threads; expected 1 to 1024")
    if kernel.max_threads and threads > int(np.prod(kernel.max_threads)):
        raise LaunchError(f"block: {threads} threads, but {kernel.name} was compiled for at most {kernel.max_threads}")
    dynamic = compiled.shared if shared is None else shared
    limit = SHARED_LIMIT[compiled.target]
    if kernel.static_shared_bytes + dynamic > limit:
        raise LaunchError(
            f"shared: {kernel.static_shared_bytes + dynamic} bytes, "
            f"but a block of sm_{compiled.target} has at most {limit}"
        )
    blocks = grid[0] * grid[1] * grid[2]
    memory = GlobalMemory()
    expanded = _expand(compiled, values, memory, blocks, undefined)
    for n, tensor in enumerate(tensors):
        _register(memory, tensor, f"tensors[{n}]", undefined)
    params = _params(kernel, expanded, memory)
    symbols, constants = _module_variables(kernel, memory)
    report = Report()
    state: dict = {"step": 1, "published": {}}
    if not blocks:
        return report
    per_wave = max(1, RESIDENT_LANES // (-(-threads // 32) * 32))
    for first in range(0, blocks, per_wave):
        machine = Machine(
            program,
            grid=grid,
            block=block,
            blocks=np.arange(first, min(first + per_wave, blocks)),
            params=params,
            constants=constants,
            symbols=symbols,
            memory=memory,
            dynamic_shared=dynamic,
            seed=None if seed is None else seed + first,
            check=check,
            statistics=report.statistics,
            state=state,
        )
        machine.run()
        report.steps += machine.step - state["step"]
        state["step"] = machine.step + 1
    return report


# -- Triton


@functools.lru_cache(maxsize=4096)
def _triton_types() -> dict:
    names = {"bool": "i1", "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64"}
    names |= {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "uint16": "u16"}
    names |= {"uint32": "u32", "uint64": "u64", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
    return {getattr(torch, k): v for k, v in names.items() if hasattr(torch, k)}


_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"}
_compiled: dict = {}


def _bind(fn, args, kwargs) -> dict:
    given = {k: v for k, v in kwargs.items() if k not in _OPTIONS}
    if unknown := [k for k in given if k not in fn.arg_names]:
        raise LaunchError(f"{fn.__name__} has no argument {unknown[0]!r}; it has: {', '.join(fn.arg_names)}")
    if len(args) > len(fn.arg_names):
        raise LaunchError(f"{fn.__name__} takes {len(fn.arg_names)} arguments, got {len(args)}")
    bound = dict(zip(fn.arg_names, args, strict=False))
    if twice := [k for k in given if k in bound]:
        raise LaunchError(f"argument {twice[0]!r} of {fn.__name__} is given twice")
    bound |= given
    for param in fn.params:
        if param.name not in bound:
            if not param.has_default:
                raise LaunchError(f"missing argument {param.name!r} of {fn.__name__}")
            bound[param.name] = param.default
    return bound


def _specialise(name: str, value, param) -> tuple:
    """(Triton type, constant or None, alignment known) of an argument: what Triton's own launcher would choose."""
    if param.is_constexpr or value is None:
        return ("constexpr", value, False)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise LaunchError(f"argument {name!r}: expected a CPU tensor, got one on {value.device}")
        if value.dtype not in _triton_types():
            raise LaunchError(f"argument {name!r}: dtype {value.dtype} has no Triton type")
        return ("*" + _triton_types()[value.dtype], None, value.data_ptr() % 16 == 0)
    if isinstance(value, bool):
        return ("i1", None, False)
    if isinstance(value, int):
        kind = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        if param.do_not_specialize:
            return (kind, None, False)
        if value == 1:
            return ("constexpr", 1, False)
        return (kind, None, value % 16 == 0 and not param.do_not_specialize_on_alignment)
    if isinstance(value, float):
        return ("fp32", None, False)
    if hasattr(value, "base") and hasattr(value, "block_shape"):
        dtype = _triton_types()[value.base.dtype]
        return (f"tensordesc<{dtype}{list(value.block_shape)}>".replace(" ", ""), None, False)
    raise LaunchError(f"argument {name!r}: can't pass a {type(value).__name__} to a Triton kernel")


def compile_triton(fn, *args, target: int = 90, **kwargs) -> Compiled:
    """Compiles a Triton function for `target` as its launcher would for these arguments; kept for later calls.

    Raises:
        LaunchError: an argument is missing or can't be passed; the target is unknown.
    """
    check_target(target)
    bound = _bind(fn, args, kwargs)
    options = {k: v for k, v in kwargs.items() if k in _OPTIONS}
    kinds = [_specialise(p.name, bound[p.name], p) for p in fn.params]
    key = (fn, target, tuple((k, repr(v), a) for k, v, a in kinds), tuple(sorted(options.items())))
    if key not in _compiled:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        # Triton 3.9 asks for an explicit choice; this is every version's default.
        options.setdefault("enable_fp_fusion", True)
        signature = {p.name: k for p, (k, _, _) in zip(fn.params, kinds, strict=True)}
        constants = {p.name: v for p, (k, v, _) in zip(fn.params, kinds, strict=True) if k == "constexpr"}
        attrs = {(n,): [["tt.divisibility", 16]] for n, (_, _, aligned) in enumerate(kinds) if aligned}
        source = ASTSource(fn, signature=signature, constexprs=constants, attrs=attrs)
        built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        _compiled[key] = of_triton(built, signature, target)
    return _compiled[key]


def of_triton(built, signature: dict[str, str], target: int) -> Compiled:
    """What `triton.compile` returned for a signature (every argument's type by name), to be launched by `run`.

    Raises:
        LaunchError: it is a kernel for clusters.
    """
    meta = built.metadata
    if getattr(meta, "num_ctas", 1) != 1:
        raise LaunchError("num_ctas: clusters of several blocks are not simulated")
    passed = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    return Compiled(
        text=built.asm["ptx"],
        name=meta.name,
        target=target,
        threads=int(built.asm["ptx"].split(".reqntid")[1].split()[0].rstrip(",")),
        shared=meta.shared,
        scratch=getattr(meta, "global_scratch_size", 0),
        descriptors=tuple(getattr(meta, "tensordesc_meta", None) or ()),
        arguments=tuple(passed),
        signature=tuple(passed.values()),
    )


# The element types of tensormap.replace (PTX ISA 9.7.9.27.1), which Triton's descriptors use.
_ELEMENTS = {0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f32", 9: "f64"}
_ELEMENTS |= {10: "bf16", 11: "tf32"}


def _descriptor(value, meta) -> list:
    """What Triton's launcher passes for a host-side tensor descriptor."""
    shape, strides = [int(s) for s in value.shape], [int(s) for s in value.strides]
    nan = getattr(value, "padding", "zero") == "nan"
    if meta is None:
        rounds = bool(getattr(value, "round_f32_to_tf32", False))
        return [value.base, *shape, *strides, nan, rounds, *shape, *strides]
    element = "tf32" if getattr(value, "round_f32_to_tf32", False) else _ELEMENTS[meta["elem_type"]]
    size = meta["elem_size"]
    coded = tensormap.encode(
        value.base.data_ptr(),
        element,
        tuple(shape[::-1]),
        tuple(s * size for s in strides[:-1][::-1]),
        tuple(meta["block_size"][::-1]),
        swizzle={0: 0, 1: 32, 2: 64, 3: 128}[meta["swizzle"]],
        fill_nan=nan,
    )
    return [coded, *shape, *strides]


def _expand(compiled: Compiled, values, memory: GlobalMemory, blocks: int, undefined) -> list:
    """The values of the PTX kernel's parameters, in order; registers the tensors among them."""
    names = compiled.arguments or tuple(f"args[{n}]" for n in range(len(values)))
    if compiled.arguments and len(values) != len(compiled.arguments):
        raise LaunchError(f"{compiled.name} takes {len(compiled.arguments)} arguments, got {len(values)}")
    out: list = []
    descriptors = iter(compiled.descriptors or [None] * len(values))
    for name, value in zip(names, values, strict=True):
        if isinstance(value, torch.Tensor):
            _register(memory, value, f"argument {name}", undefined)
            out.append(value)
        elif hasattr(value, "base") and hasattr(value, "block_shape"):
            _register(memory, value.base, f"descriptor {name}", undefined)
            out += _descriptor(value, next(descriptors))
        else:
            out.append(value)
    if compiled.signature:
        out.append(0)
        if compiled.scratch:
            scratch = np.full(compiled.scratch * blocks + 128, 0xAB, np.uint8)
            start = -scratch.ctypes.data % 128
            scratch = scratch[start : start + compiled.scratch * blocks]
            memory.add(Segment("global scratch", scratch.ctypes.data, scratch, undefined=True))
            out[-1] = scratch.ctypes.data
        out.append(0)  # profiler's scratch
    return out


# -- CUDA


def cuda(source: str | Path, name: str | None = None, *, target: int, flags: Sequence[str] = ()) -> Compiled:
    """Compiles a .cu file by the compiler in use (`use_compiler`) and picks the kernel whose name holds `name`.

    Raises:
        LaunchError: the file, nvcc or the target isn't there, or the file doesn't compile.
        PtxError: no such kernel in it, or several.
    """
    check_target(target)
    path = Path(source).resolve()
    if not path.exists():
        raise LaunchError(f"source: {path} does not exist")
    return _cuda(path, name, target, tuple(flags))


# One object per kernel and process.
@functools.lru_cache(maxsize=256)
def _cuda(path: Path, name: str | None, target: int, flags: tuple) -> Compiled:
    text = ptx_of(path, target, flags)
    return Compiled(text, _names(text).kernel(name).name, target)


@functools.lru_cache(maxsize=64)
def _names(text: str) -> ptx.Module:
    return ptx.parse(text, "")  # no body: only the kernels' names


def from_ptx(text: str, name: str | None = None, *, target: int, shared: int = 0) -> Compiled:
    """PTX text as it is."""
    check_target(target)
    return Compiled(text, _names(text).kernel(name).name, target, shared=shared)


# -- arguments to bytes


def _dims(value, what: str) -> tuple[int, int, int]:
    dims = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(dims) <= 3 or not all(isinstance(d, int) and d >= 0 for d in dims):
        raise LaunchError(f"{what}: expected one to three sizes, got {value!r}")
    return (*dims, *(1,) * (3 - len(dims)))


def _register(memory: GlobalMemory, tensor: torch.Tensor, name: str, undefined):
    if not isinstance(tensor, torch.Tensor):
        raise LaunchError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise LaunchError(f"{name}: expected a CPU tensor, got one on {tensor.device}")
    storage = tensor.untyped_storage()
    size, base = storage.nbytes(), storage.data_ptr()
    if not size or any(s.base == base for s in memory.segments):
        return
    if base % 16:
        raise LaunchError(f"{name}: its storage starts at {base:#x}, which isn't a multiple of 16")
    data = np.frombuffer((ctypes.c_uint8 * size).from_address(base), np.uint8)
    unknown = any(u.untyped_storage().data_ptr() == base for u in undefined)
    what = f"{name} ({str(tensor.dtype)[6:]}, shape {tuple(tensor.shape)})"
    memory.add(Segment(what, base, data, undefined=unknown, element=tensor.element_size()))


def _params(kernel: ptx.Kernel, values, memory: GlobalMemory) -> Pool:
    if len(values) != len(kernel.params):
        raise LaunchError(f"{kernel.name} has {len(kernel.params)} parameters, got {len(values)} values")
    pool = Pool("param", kernel.param_bytes)
    for param, value in zip(kernel.params, values, strict=True):
        raw = _bytes(param, value)
        pool.data[param.offset : param.offset + param.bytes] = np.frombuffer(raw, np.uint8)
    return pool


def _bytes(param: ptx.Variable, value) -> bytes:
    if isinstance(value, torch.Tensor):
        raw = value.data_ptr().to_bytes(8, "little")
    elif isinstance(value, bool | np.bool_):
        raw = int(value).to_bytes(param.bytes, "little")
    elif isinstance(value, int | np.integer):
        raw = (int(value) & (1 << 8 * param.bytes) - 1).to_bytes(param.bytes, "little")
    elif isinstance(value, float | np.floating):
        raw = {2: np.float16, 4: np.float32, 8: np.float64}[param.bytes](value).tobytes()
    elif isinstance(value, bytes | bytearray | ctypes.Structure):
        raw = bytes(value)
    else:
        raise LaunchError(f"parameter {param.name}: can't pass a {type(value).__name__}")
    if len(raw) != param.bytes:
        raise LaunchError(f"parameter {param.name} has {param.bytes} bytes, got a value of {len(raw)}")
    return raw


def _module_variables(kernel: ptx.Kernel, memory: GlobalMemory) -> tuple[dict[str, int], Pool]:
    """Lays out .global and .const variables; a .global one is a segment of its own."""
    symbols: dict[str, int] = {}
    everything = {**kernel.module.variables, **kernel.variables}
    size = max((v.offset + v.bytes for v in everything.values() if v.space == "const"), default=0)
    constants = Pool("const", size)
    for v in everything.values():
        if v.space == "const":
            constants.data[v.offset : v.offset + v.bytes] = np.frombuffer(v.init or bytes(v.bytes), np.uint8)
        elif v.space == "global" and v.bytes:
            store = np.zeros(v.bytes + 256, np.uint8)
            start = -store.ctypes.data % 128
            data = store[start : start + v.bytes]
            if v.init:
                data[:] = np.frombuffer(v.init, np.uint8)
            memory.add(Segment(f"variable {v.name}", data.ctypes.data, data))
            symbols[v.name] = data.ctypes.data
    return symbols, constants
