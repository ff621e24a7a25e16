"""From a case's source to what its binary holds; compiled once for each content of source, flags and tools."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import binary, cache
from .binary import GateError, Kernel
from .cache import product
from .case import Case, Cuda, Triton, capability


@functools.cache
def nvcc() -> tuple[str, str]:
    """nvcc's path and version."""
    try:
        path, why_not = product().find_nvcc()
    except SystemExit as error:
        raise GateError(str(error)) from error
    if path is None:
        raise GateError(
            f"{why_not}: the compile gate compiles the CUDA sources, with or without a GPU; "
            "install the CUDA toolkit (13.0 or newer), or set CUDA_HOME to it, with ATTNKERN_CUDA unset."
        )
    return path, binary.run(path, "--version").stdout


@functools.cache
def tools() -> str:
    """What every result depends on beside its source: the disassembler, and how listings are read."""
    readers = [cache.digest(f"tests/gate/{name}.py") for name in ("binary", "compilers")]
    return f"{binary.disassembler()[1]} {readers}"


def key(case: Case, arch: str) -> str:
    """The key of a case's compilation; kernels of one .cu share it."""
    source = case.source
    if isinstance(source, Cuda):
        return cache.key_of(source.path, nvcc_flags(source, arch), _environment(), nvcc(), tools())
    return triton_key(source, arch)


def kernels(case: Case, arch: str) -> list[Kernel]:
    """Every kernel that the case's source holds, as compiled for arch."""
    source = case.source
    if isinstance(source, Cuda):
        make = functools.partial(compile_cuda, source, arch)
    else:
        make = functools.partial(compile_triton, source, arch)
    found = cache.cached(key(case, arch), make)
    return [Kernel(**fields) for fields in found]


def nvcc_flags(source: Cuda, arch: str) -> list[str]:
    code = f"arch=compute_{product().virtual_arch(source.path, arch)},code=sm_{arch}"
    return [*product().NVCCFLAGS.split(), "-Icsrc", *source.flags, "-gencode", code]


def compile_cuda(source: Cuda, arch: str) -> tuple[list[dict], list[str]]:
    """The kernels' fields, and the files that nvcc read. PTX is made once for all chips that have it in common."""
    if (built := from_build(source, arch)) is not None:
        found, files = binary.read(built.cubin(arch), built.log(arch)), built.files
    else:
        text, files = ptx(source.path, product().virtual_arch(source.path, arch), source.flags)
        with tempfile.TemporaryDirectory() as folder:
            cubin, written = Path(folder, "cubin"), Path(folder, "ptx.ptx")
            written.write_text(text)
            command = [nvcc()[0], *nvcc_flags(source, arch), "-cubin", "-Xptxas", "-v", written, "-o", cubin]
            found = binary.read(cubin, _compiled(command, source.path, f"sm_{arch}"))
    for kernel, name in zip(found, short_names([k.name for k in found]), strict=True):
        kernel.name = name
    return [dataclasses.asdict(kernel) for kernel in found], files


class Built:
    """What the product's build keeps of a .cu file that it compiled (`compile_cuda` in setup.py)."""

    def __init__(self, path: str):
        self.object = cache.ROOT / product().BUILD / "release" / f"{path}.o"
        self.stem = Path(path).stem

    @functools.cached_property
    def files(self) -> list[str]:
        """The files that nvcc read; empty where the build has none, or one older than these."""
        try:
            found, made = dependencies(Path(f"{self.object}.d").read_text()), self.object.stat().st_mtime
            return found if all((cache.ROOT / file).stat().st_mtime <= made for file in found) else []
        except FileNotFoundError:
            return []

    def _kept(self, *endings: str) -> Path | None:
        """nvcc leaves an architecture out of the name where it compiles for no other."""
        kept = [Path(f"{self.object}.kept", f"{self.stem}{ending}") for ending in endings]
        return next((path for path in kept if path.exists()), None)

    def cubin(self, arch: str) -> Path | None:
        virtual = product().virtual_arch(f"{self.stem}.cu", arch)
        found = self._kept(f".compute_{virtual}.sm_{arch}.cubin", f".sm_{arch}.cubin", ".cubin")
        return found if found and self.log(arch) else None

    def ptx(self, virtual: str) -> Path | None:
        found = self._kept(f".compute_{virtual}.ptx", ".ptx")
        return found if found and f"\n.target sm_{virtual}" in found.read_text() else None

    def log(self, arch: str) -> str:
        """What ptxas said of an architecture: it runs once for each, and begins with the global memory in use."""
        text = Path(f"{self.object}.log").read_text()
        runs = re.split(r"^(?=ptxas info\s*: \d+ bytes gmem)", text, flags=re.M)
        return "".join(run for run in runs if f"for 'sm_{arch}'" in run)


def build_schedules() -> Built:
    """What the product's build leaves out, and tests and gate are about too; compiled unless it is there as it is."""
    built = Built(str(product().SCHEDULES))
    if not built.files:
        done = binary.run(sys.executable, "setup.py", "-q", "build_schedules", cwd=cache.ROOT)
        if done.returncode:
            raise GateError(f"{built.stem} wasn't built: {(done.stdout + done.stderr).strip()}")
        built = Built(str(product().SCHEDULES))
    return built


def from_build(source: Cuda, arch: str) -> Built | None:
    """The build's own binary, if it has one of the source as it is, for this architecture."""
    built = build_schedules() if source.path == str(product().SCHEDULES) else Built(source.path)
    plain = not source.flags and not any(_environment())
    return built if plain and built.files and built.cubin(arch) else None


def ptx(path: str, virtual: str, flags: Sequence[str] = ()) -> tuple[str, list[str]]:
    """A source's PTX for compute_<virtual> by the product's flags and these, and the files that nvcc read."""
    flags = [*product().NVCCFLAGS.split(), "-Icsrc", *flags, f"-arch=compute_{virtual}"]

    def make() -> tuple[list, list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            out, depends = Path(folder, "ptx"), Path(folder, "d")
            command = [nvcc()[0], *flags, "-ptx", "-MD", "-MF", depends, path, "-o", out]
            _compiled(command, path, f"compute_{virtual}")
            files = dependencies(depends.read_text())
            return [out.read_text(), files], files

    return cache.cached(cache.key_of("ptx", path, flags, _environment(), nvcc()), make)


def _compiled(command: list, path: str, target: str) -> str:
    """What nvcc printed."""
    done = binary.run(*command, cwd=cache.ROOT)
    if done.returncode:
        raise GateError(f"{path} doesn't compile for {target}: {binary.first_error(done.stderr + done.stdout)}")
    return done.stderr


def _environment() -> list[str | None]:
    return [os.environ.get(f"NVCC_{where}_FLAGS") for where in ("PREPEND", "APPEND")]


def dependencies(rule: str) -> list[str]:
    """The files that a make rule, as nvcc -MD writes it, depends on."""
    listed = rule.split(" : ", 1)[1]
    return [name.replace("\\ ", " ") for name in re.split(r"(?:(?<!\\)\s|\\\n)+", listed.strip())]


def short_names(mangled: list[str]) -> list[str]:
    """``delta_kernel<float, 4>`` of what c++filt makes of it: return type, namespaces and parameters left out."""
    if not mangled:
        return []
    lines = binary.run("c++filt", *mangled).stdout.splitlines()
    return [short_name(line) for line in lines]


def short_name(demangled: str) -> str:
    text = demangled.replace("(anonymous namespace)::", "")
    depth, start = 0, 0
    for i, c in enumerate(text):
        if c in "<(":
            if c == "(" and depth == 0:  # the parameters
                return text[start:i]
            depth += 1
        elif c in ">)":
            depth -= 1
        elif depth == 0 and (c == " " or text[i - 1 : i + 1] == "::"):
            start = i + 1
    return text[start:]


def triton_source(source: Triton):
    """What triton.compile takes; the attributes are those that a launch with tensors finds."""
    from triton.compiler import ASTSource

    fn = source.fn
    kind = ASTSource
    if getattr(fn, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        kind = GluonASTSource
    signature = {name: source.signature.get(name, "constexpr") for name in fn.arg_names}
    aligned = [(fn.arg_names.index(name),) if isinstance(name, str) else name for name in source.aligned]
    aligned += [path for path, kind_of in _types(tuple(signature.values())) if kind_of.startswith("*")]
    attrs = {path: [["tt.divisibility", 16]] for path in aligned}
    return kind(fn=fn, signature=signature, constexprs=dict(source.constexprs), attrs=attrs)


def _types(signature: tuple, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """The types in a signature, which may be nested, with their paths."""
    for n, kind in enumerate(signature):
        if isinstance(kind, tuple):
            yield from _types(kind, (*path, n))
        else:
            yield (*path, n), kind


def triton_target(arch: str):
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", capability(arch), 32)


def triton_options(source: Triton) -> dict:
    # Newer Tritons warn where it is left open.
    return {"enable_fp_fusion": True, **source.options}


def triton_key(source: Triton, arch: str) -> str:
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend

    ast, backend = triton_source(source), make_backend(triton_target(arch)).hash()
    inputs = [ast.hash(), sorted(ast.signature.items()), sorted(triton_options(source).items()), arch]
    environment = sorted(get_cache_invalidating_env_vars().items())
    return cache.key_of(*inputs, triton.__version__, backend, environment, tools())


def compile_triton(source: Triton, arch: str) -> tuple[list[dict], list[str]]:
    """The kernel's fields; no files: the key holds the source and what it calls."""
    import triton
    from triton import knobs

    ptxas = io.StringIO()
    with contextlib.ExitStack() as stack:
        for group in (knobs.nvidia, knobs.compilation, knobs.cache):
            stack.enter_context(group.scope())
        stack.enter_context(contextlib.redirect_stdout(ptxas))
        # Triton runs ptxas with -v, and prints what it said on demand; on a hit of Triton's own cache nothing is said.
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory())
        try:
            compiled = triton.compile(triton_source(source), target=triton_target(arch), options=triton_options(source))
        except Exception as error:  # whatever a compiler of many stages raises
            reason = " ".join(str(error).split())[:300]
            message = f"{source.fn.__name__} doesn't compile for sm_{arch}: {type(error).__name__}: {reason}"
            raise GateError(message) from error
    log = ptxas.getvalue()
    said_for = re.search(r"for '(sm_\w+)'", log)
    if said_for is None or said_for[1] != f"sm_{arch}":
        made = said_for[1] if said_for else "nothing that ptxas reports on"
        raise GateError(f"{source.fn.__name__}: sm_{arch} is claimed, but Triton makes {made}.")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        found = binary.read(file.name, log, dynamic_shared=compiled.metadata.shared)
    return [dataclasses.asdict(kernel) for kernel in found], []
