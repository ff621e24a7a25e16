"""The CUDA kernels with their shipped host code on CPU tensors: the simulator runs what they launch.

The objects that the build made of csrc/cuda are taken as they are, and that of the schedules which it leaves out.
Instead of CUDA's runtime they are linked with runtime.cpp, which hands on what cudaLaunchKernel was given, and
registers the operators for CPU tensors. So grids, shared memory, strides, allocations and the choice of the variant are
the product's own.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ptxsim
from attnkern import _library
from gate import cache, compilers
from ptxsim import SHARED_LIMIT, tensormap

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "launches"
LAUNCHED = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_void_p),
)
TOLD = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
ZEROED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)
ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    *[ctypes.POINTER(ctypes.c_uint64)] * 2,
    *[ctypes.POINTER(ctypes.c_uint32)] * 2,
    *[ctypes.c_int] * 4,
)
# Of torch's C ABI, as csrc/cuda/ops_cuda.cpp calls it: what runtime.cpp stands in front of.
WRAPPED = (
    "aoti_torch_create_device_guard",
    "aoti_torch_empty_strided",
    "aoti_torch_get_data_ptr",
    "aoti_torch_library_init_impl",
)
# CUtensorMapDataType and CUtensorMapSwizzle of the CUDA driver API, in order.
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz")
SWIZZLES = (0, 32, 64, 128)


@dataclass(frozen=True)
class Launch:
    """What cudaLaunchKernel was given, the argument's bytes included."""

    kernel: ptxsim.Compiled
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    parameters: tuple[bytes, ...]

    @property
    def name(self) -> str:
        return self.kernel.name


@dataclass
class Recorder:
    """Runs operators of csrc/cuda on CPU tensors: what they launch is appended to `launches` and simulated at once.

    `tensors` are those whose memory the last operator knew, results and workspace included.
    """

    target: int = 80
    launches: list[Launch] = field(default_factory=list)
    reports: list[ptxsim.Report] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    simulate: bool = True
    seed: int | None = None  # of the simulator's schedule
    multiprocessors: int = 8  # few: small problems fill them
    refusal: int = 0  # the CUresult with which the driver answers for every tensor map
    launch_error: int = 0  # the cudaError_t of every launch
    left_out: int = 0  # kernels that aren't to run, as csrc/cuda/left_out.h counts them
    launched: Callable[[Launch], object] = lambda launch: None  # is told of each, after it
    undefined: list[torch.Tensor] = field(default_factory=list)  # made, and not written yet

    def directly(self, name: str, *arguments: Any) -> Any:
        """`call` or `forward` past the dispatcher (csrc/cuda/direct_cuda.cpp) on CPU tensors."""
        known = [x for x in arguments if isinstance(x, torch.Tensor)]

        def run() -> Any:
            for x in known:
                self.tell(x, False)
            return library().direct[name](*arguments)

        return self.run(run)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments), which calls operators of csrc/cuda. Raises what the simulator finds wrong."""
        self.tensors, self.undefined = [], []
        return library().call(lambda: function(*arguments), self)

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)
        if not self.simulate:
            return
        # What torch's own operators have written to holds anything else.
        self.undefined = [x for x in self.undefined if bool((bytes_of(x) == POISON).all())]
        before = [x.clone() for x in self.undefined]
        report = ptxsim.launch(
            launch.kernel,
            launch.grid,
            *launch.parameters,
            block=launch.block,
            shared=launch.shared,
            tensors=self.tensors,
            undefined=self.undefined,
            seed=self.seed,
        )
        # What a kernel has written to, later ones may read; what it left out there holds POISON.
        self.undefined = [x for x, old in zip(self.undefined, before, strict=True) if bytes_of(x).equal(bytes_of(old))]
        self.reports.append(report)
        self.launched(launch)

    def tell(self, tensor: torch.Tensor, made: bool) -> None:
        if made and tensor.numel():
            bytes_of(tensor).fill_(POISON)
            self.undefined.append(tensor)
        if tensor.numel() and all(not _same(tensor, known) for known in self.tensors):
            self.tensors.append(tensor)

    def zeroed(self, address: int) -> None:
        self.undefined = [x for x in self.undefined if x.data_ptr() != address]


OPERATORS, DIRECT = Path("csrc/cuda/ops_cuda.cpp"), Path("csrc/cuda/direct_cuda.cpp")
POISON = 0xFF  # every byte of what was allocated: NaN in every floating dtype


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """All of its memory; results are dense, in whatever order."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def _capsule(pointer: int) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(pointer, None, None)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype)


class Library:
    def __init__(self, path: Path):
        torch.ops.load_library(str(path / "recorded.so"))
        runtime = ctypes.CDLL(str(path / "recorded.so"))
        self.set_callbacks, self.set_encode, self.set_chip = runtime.set_callbacks, runtime.set_encode, runtime.set_chip
        self.begin_thread = runtime.begin_thread
        self.recorder: Recorder | None = None

        def empty_strided(*given: Any) -> torch.Tensor:
            made = torch._C._dynamo.guards._empty_strided_cpu(*given)  # type: ignore[attr-defined]
            assert self.recorder is not None
            self.recorder.tell(made, True)
            return made

        names = "call", "forward", "stands_first"
        functions = _library.past_the_dispatcher(path / "recorded.so", "cpu", empty_strided)
        self.direct = dict(zip(names, functions, strict=True))
        self.set_left_out = runtime.set_left_out
        self.texts = {file.stem: file.read_text() for file in sorted(path.glob("*.ptx"))}
        if os.environ.get("ATTNKERN_LINES"):  # the build's PTX doesn't say which line of the source it is at
            for name in self.texts:
                virtual = compilers.product().virtual_arch(f"{name}.cu", "80")
                self.texts[name] = compilers.ptx(f"csrc/cuda/{name}.cu", virtual, ["-lineinfo"])[0]

    @functools.cache  # noqa: B019 (one library per process)
    def kernel(self, name: str, target: int) -> ptxsim.Compiled:
        text = next(text for text in self.texts.values() if f".entry {name}(" in text)
        return ptxsim.from_ptx(text, name, target=target)

    def call(self, function: Callable[[], Any], recorder: Recorder) -> Any:
        """function(), its launches handed to the recorder."""
        target, self.recorder = recorder.target, recorder
        failures: list[BaseException] = []
        invalid_value, launch_failure = 1, 719  # cudaErrorInvalidValue, cudaErrorLaunchFailure

        def kept(function, failed=0):
            """function, for C: an exception is kept for the end, and nothing more is done."""

            def run(*arguments):
                if failures:
                    return failed
                try:
                    return function(*arguments) or 0
                except BaseException as error:
                    failures.append(error)
                    return failed

            return run

        def launched(name, grid, block, shared, most, arguments):
            kernel = self.kernel(name.decode(), target)
            if kernel.program.kernel.static_shared_bytes + shared > most:
                return invalid_value
            sizes = [parameter.bytes for parameter in kernel.program.kernel.params]
            values = tuple(ctypes.string_at(arguments[n], size) for n, size in enumerate(sizes))
            recorder.launch(Launch(kernel, tuple(grid[:3]), tuple(block[:3]), shared, values))

        def told(handle, made):
            (tensor,) = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(handle)])
            recorder.tell(tensor, bool(made))

        def encode(out, element, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill):
            if recorder.refusal:
                return recorder.refusal
            made = tensormap.encode(
                address,
                ELEMENTS[element],
                tuple(sizes[:rank]),
                tuple(strides[: rank - 1]),
                tuple(box[:rank]),
                tuple(steps[:rank]),
                tensormap.INTERLEAVES[interleave],
                SWIZZLES[swizzle],
                bool(fill),
            )
            ctypes.memmove(out, made, len(made))
            return 0

        callbacks = (
            LAUNCHED(kept(launched, launch_failure)),
            TOLD(kept(told)),
            ZEROED(kept(lambda address, size: recorder.zeroed(address))),
        )
        on_encode = ENCODE(kept(encode))
        self.set_callbacks(*callbacks)
        self.set_encode(on_encode)
        self.set_chip(target, recorder.multiprocessors, SHARED_LIMIT[target])
        self.begin_thread(recorder.launch_error)
        self.set_left_out(recorder.left_out)
        try:
            return function()
        except RuntimeError:
            if failures:
                raise failures[0] from None
            raise
        finally:
            self.set_callbacks(LAUNCHED(), TOLD(), ZEROED())
            self.set_encode(ENCODE())
            if failures and sys.exc_info()[0] is None:
                raise failures[0]


@functools.cache
def library() -> Library:
    """The recording library. One per process: operators register once."""
    return Library(build())


def parts() -> tuple[dict[Path, Path], list[Path]]:
    """The build's objects of csrc/cuda/*.cu and their PTX, and the sources of csrc/cuda that it has none of as they
    are."""
    found, missing = {}, []
    for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
        path = source.relative_to(ROOT)
        built = compilers.Built(str(path))
        text = built.ptx(compilers.product().virtual_arch(path, "90a" if path.stem.endswith("_sm90") else "80"))
        if built.files and text is not None:
            found[built.object] = text
        else:
            missing.append(path)
    of_direct = ROOT / "csrc/common/direct.h"  # which the operators don't include
    headers = {*ROOT.glob("csrc/cuda/*.h"), *ROOT.glob("csrc/common/*.h")} - {of_direct}
    for source, read in ((OPERATORS, headers), (DIRECT, {*headers, of_direct})):
        made = host_object(source).stat().st_mtime if host_object(source).exists() else 0
        if any(path.stat().st_mtime > made for path in (ROOT / source, *read)):
            missing.append(source)
    return found, missing


def host_object(source: Path) -> Path:
    """The build's object of one of csrc/cuda/*.cpp."""
    return ROOT / compilers.product().BUILD / "release" / f"{source}.o"


def build() -> Path:
    """Links the build's own objects into a folder named after everything that went into it, their PTX beside: for
    compute_80, all that most kernels need and what a chip without a binary of its own gets; for compute_90a what is for
    Hopper alone.

    Raises:
        RuntimeError: a source has changed since the last build, or nvcc wasn't there.
    """
    product = compilers.product()
    torch_folder = product.find_torch()
    compilers.build_schedules()
    objects, missing = parts()
    if missing:
        raise RuntimeError(
            f"build/ has no binary of {missing[0]} as it is: run `make build`, with nvcc, for 80 and 90a."
        )
    host = Path(__file__).with_name("runtime.cpp")
    flags = [*product.CXXFLAGS.split(), "-Icsrc", "-isystem", f"{torch_folder}/include"]
    key = [torch.__version__, *flags, host.read_text(), (ROOT / "csrc/cuda/left_out.h").read_text(), *WRAPPED]
    of_host = [host_object(source) for source in (OPERATORS, DIRECT)]
    out = FOLDER / _digest([*key, *(str(cache.digest(str(path))) for path in (*of_host, *objects))])
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                for built, text in objects.items():
                    shutil.copy(text, f"{folder}/{Path(built.stem).stem}.ptx")
                _run("g++", *flags, "-c", host, "-o", f"{folder}/runtime.o")
                link = ["-shared", "-Wl,-z,defs", f"-L{torch_folder}/lib", "-Wl,--no-as-needed", "-ltorch_cpu"]
                link += [f"-Wl,--wrap={name}" for name in WRAPPED]
                _run("g++", f"{folder}/runtime.o", *of_host, *objects, *link, "-o", f"{folder}/recorded.so")
                shutil.copytree(folder, f"{folder}.done")
                Path(f"{folder}.done").rename(out)
    return out


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(*command) -> None:
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr or done.stdout}")
