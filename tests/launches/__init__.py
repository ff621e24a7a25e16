"""The CUDA kernels with their shipped host code on CPU tensors: launches are recorded, the simulator runs them.

The objects that the build made of csrc/cuda/*.cu are taken as they are; ops_cuda.cpp is compiled with its operators for
CPU tensors. Instead of CUDA's runtime they are linked with runtime.cpp, which hands on what cudaLaunchKernel was given.
So grids, shared memory, strides and the choice of the variant are the product's own.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import ptxsim
from gate import cache, compilers
from gate.case import SHARED_LIMIT
from ptxsim import tensormap

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "launches"
RECORD = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_void_p),
)
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
    """Runs operators of the recording library; `launches` is what they launched, in order."""

    target: int = 80
    launches: list[Launch] = field(default_factory=list)
    reports: list[ptxsim.Report] = field(default_factory=list)
    simulate: bool = True
    seed: int | None = None  # of the simulator's schedule
    multiprocessors: int = 8  # few: small problems fill them
    refusal: int = 0  # the CUresult with which the driver answers for every tensor map
    launch_error: int = 0  # the cudaError_t of every launch
    left_out: int = 0  # kernels that aren't to run, as csrc/cuda/left_out.h counts them

    def run(self, operator, tensors: Sequence[torch.Tensor | None], *rest, results: Sequence[torch.Tensor | None] = ()):
        """operator(*tensors, *rest) on CPU tensors, then its launches in the simulator."""
        before = len(self.launches)
        returned = library().call(lambda: operator(*tensors, *rest), self)
        known = [x for x in (*tensors, returned) if isinstance(x, torch.Tensor)]
        if self.simulate:
            undefined = [x for x in results if x is not None]
            for launch in self.launches[before:]:
                report = ptxsim.launch(
                    launch.kernel,
                    launch.grid,
                    *launch.parameters,
                    block=launch.block,
                    shared=launch.shared,
                    tensors=known,
                    undefined=undefined,
                    seed=self.seed,
                )
                undefined = []  # written, or at least allowed to be read by the next kernel
                self.reports.append(report)
        return returned


class Library:
    def __init__(self, path: Path):
        torch.ops.load_library(str(path / "recorded.so"))
        runtime = ctypes.CDLL(str(path / "recorded.so"))
        self.set_record, self.set_encode, self.set_chip = runtime.set_record, runtime.set_encode, runtime.set_chip
        self.begin_thread = runtime.begin_thread
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

    def call(self, function, recorder: Recorder):
        """function(), what it launches appended to the recorder's launches."""
        target = recorder.target
        failures: list[BaseException] = []

        def record(name, grid, block, shared, arguments):
            try:
                kernel = self.kernel(name.decode(), target)
                sizes = [parameter.bytes for parameter in kernel.program.kernel.params]
                values = tuple(ctypes.string_at(arguments[n], size) for n, size in enumerate(sizes))
                recorder.launches.append(Launch(kernel, tuple(grid[:3]), tuple(block[:3]), shared, values))
            except BaseException as error:
                failures.append(error)

        def encode(out, element, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill):
            if recorder.refusal:
                return recorder.refusal
            try:
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
            except BaseException as error:
                failures.append(error)
            return 0

        callbacks = RECORD(record), ENCODE(encode)
        self.set_record(callbacks[0])
        self.set_encode(callbacks[1])
        self.set_chip(target, recorder.multiprocessors, SHARED_LIMIT[target])
        self.begin_thread(recorder.launch_error)
        self.set_left_out(recorder.left_out)
        try:
            return function()
        finally:
            self.set_record(RECORD())
            self.set_encode(ENCODE())
            if failures:
                raise failures[0]


@functools.cache
def library() -> Library:
    """The recording library. One per process: operators register once."""
    return Library(build())


def parts() -> tuple[dict[Path, Path], list[Path]]:
    """The build's objects of csrc/cuda/*.cu and their PTX, and the sources that it has none of as they are."""
    found, missing = {}, []
    for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
        path = source.relative_to(ROOT)
        built = compilers.Built(str(path))
        text = built.ptx(compilers.product().virtual_arch(path, "90a" if path.stem.endswith("_sm90") else "80"))
        if built.files and text is not None:
            found[built.object] = text
        else:
            missing.append(path)
    return found, missing


def build() -> Path:
    """Links the build's own objects into a folder named after everything that went into it, their PTX beside: for
    compute_80, all that most kernels need and what a chip without a binary of its own gets; for compute_90a what is for
    Hopper alone.

    Raises:
        RuntimeError: a source has changed since the last build, or nvcc wasn't there.
    """
    product = compilers.product()
    torch_folder = product.find_torch()
    objects, missing = parts()
    if missing:
        raise RuntimeError(
            f"build/ has no binary of {missing[0]} as it is: run `make build`, with nvcc, for 80 and 90a."
        )
    hosts = [ROOT / "csrc/cuda/ops_cuda.cpp", Path(__file__).with_name("runtime.cpp")]
    flags = [*product.CXXFLAGS.split(), product.TARGET, "-DATTNKERN_RECORD_LAUNCHES", "-Icsrc"]
    flags += ["-isystem", f"{torch_folder}/include"]
    headers = [*ROOT.glob("csrc/cuda/*.h"), *ROOT.glob("csrc/common/*.h")]
    key = [torch.__version__, *flags, *(path.read_text() for path in (*hosts, *sorted(headers)))]
    out = FOLDER / _digest([*key, *(str(cache.digest(str(path))) for path in objects)])
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                for built, text in objects.items():
                    shutil.copy(text, f"{folder}/{Path(built.stem).stem}.ptx")
                compiled = [f"{folder}/{host.stem}.o" for host in hosts]
                for host, target in zip(hosts, compiled, strict=True):
                    _run("g++", *flags, "-c", host, "-o", target)
                link = ["-shared", "-Wl,-z,defs", f"-L{torch_folder}/lib", "-Wl,--no-as-needed", "-ltorch_cpu"]
                _run("g++", *compiled, *objects, *link, "-o", f"{folder}/recorded.so")
                shutil.copytree(folder, f"{folder}.done")
                Path(f"{folder}.done").rename(out)
    return out


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(*command) -> None:
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr or done.stdout}")
