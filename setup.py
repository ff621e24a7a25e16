"""Build attnkern's compiled libraries; the metadata is in pyproject.toml.

Two plain shared objects without Python.h, compiled by ninja against torch's stable ABI, so that one binary serves
every torch from 2.11 and every CPython from 3.10 on:

    attnkern/_C.abi3.so      csrc/*.cpp, csrc/cpu/*.cpp, and csrc/cpu/isa/*.cpp for each instruction set
    attnkern/_cuda.abi3.so   csrc/cuda/*.cpp and csrc/cuda/*.cu, where nvcc is found
    attnkern/_build.json     what they were built with, for attnkern.build_info()

A git checkout compiles nothing that another one has compiled: objects are kept in the user's cache folder
(ATTNKERN_CACHE, by default ~/.cache/attnkern), each under a hash of all that goes into it. Above CACHED bytes, those
that weren't used for longest are deleted.

Environment: ATTNKERN_CUDA=auto|0|1 (1: nvcc is required), ATTNKERN_CUDA_ARCHS (default "80 90a 100 120"; PTX of
compute_80 is always added), ATTNKERN_CPU_ISAS (which instruction sets the CPU library has kernels for, as in "avx2
avx512"; generic is always among them, and "generic" alone is the fastest build; "native": what this machine runs and no
more; default: all of the machine's architecture), ATTNKERN_SCHEDULES=all (Hopper's forward kernels also by the
schedules that are not their own, for timing), ATTNKERN_SKIP_EXT=1 (Python files only), CXX, CXXFLAGS, CUDA_HOME,
MAX_JOBS. A CXX for another machine cross-compiles, the CPU library only.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from typing import ClassVar

import setuptools
from setuptools import Command, Extension, find_packages, setup

if int(setuptools.__version__.partition(".")[0]) < 77:  # which can't read pyproject.toml; Python 3.10 brings 65
    raise SystemExit(
        f"attnkern is built by setuptools 77 or newer, here is {setuptools.__version__}: "
        f"{sys.executable} -m pip install --upgrade setuptools"
    )
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)  # relative paths throughout: the binaries don't name the machine
BUILD = Path("build/ninja")
HERE = platform.machine()
X86, ARM, ANY = ("x86_64",), ("aarch64",), ("x86_64", "aarch64")
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512"
ISA = {  # best first: the machines it is compiled on, its own flags for csrc/cpu/isa/*.cpp
    "amx": (X86, f"{AVX512} -mavx512bf16 -mavx512vbmi -mamx-tile -mamx-bf16"),
    "zen5": (X86, f"{AVX512} -mavx512bf16 -mavx512vbmi -mavx512vp2intersect"),
    "avx512bf16": (X86, f"{AVX512} -mavx512bf16 -mavx512vbmi"),
    "avx512": (X86, AVX512),
    "avx2": (X86, "-mavx2 -mfma -mf16c"),
    "neon": (ARM, ""),
    "generic": (ANY, ""),
}
# Which other set runs the dtypes that one has no kernels for.
BELOW = dict.fromkeys(("amx", "zen5", "avx512bf16"), "avx512")
# The target, torch 2.10, must not exceed the oldest torch served: a newer one would not load there.
TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# What is to be inlined says so: -O3's larger limit for the rest takes a sixth of the compile time and makes no call
# faster.
INLINING = "--param max-inline-insns-single=70"
CXXFLAGS = (
    f"-O3 {INLINING} -std=c++20 -ffp-contract=fast -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -Wall -Wextra"
)
# tests/emulated has AMX and the vectors beside it in plain C++, which AVX2 runs.
EMULATED = Path("tests/emulated/immintrin.h")
SANITIZE = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
NVCCFLAGS = "-O3 -std=c++20 -Xcompiler -fPIC,-fvisibility=hidden"
SCHEDULES = Path("csrc/cuda/forward_schedules_sm90.cu")  # for timing and tests
CACHED = 2**30
# exports.map hides every symbol, weak template instances and the static CUDA runtime too: no clash with torch's own.
LDFLAGS = "-shared -Xlinker --version-script=csrc/exports.map -Xlinker -z -Xlinker defs -Xlinker --no-as-needed"


def key_of(*parts):
    """A name for what is made of these."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def user_folder():
    """Where objects, and what the tests prove of them, outlive a checkout."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ATTNKERN_CACHE") or Path(caches, "attnkern"))


def objects_folder():
    """Where a git checkout's objects are kept; None elsewhere, and where no folder can be made."""
    folder = user_folder() / "objects"
    if not Path(".git").exists():
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


@functools.cache
def release_of(tool):
    """What a compiler says of itself, and of the one that nvcc calls; what it reads of the environment."""
    tools = [tool.split(), ["g++"]] if tool.endswith("nvcc") else [tool.split()]
    told = [subprocess.run([*words, "--version"], capture_output=True, text=True).stdout for words in tools]
    names = ("CPATH", "CPLUS_INCLUDE_PATH", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    return [*told, *(os.environ.get(name, "") for name in names)]


@functools.cache
def included(path):
    """The files of ours that one includes by a name in quotes."""
    names = re.findall(r'^\s*#\s*include\s+"(.*)"', path.read_text(), re.M)
    found = [[Path(os.path.normpath(folder / name)) for folder in (path.parent, Path("csrc"))] for name in names]
    return [next(filter(Path.exists, paths)) for paths in found if any(map(Path.exists, paths))]


def hash_of(source, *made_with):
    """Of a source, all that it includes, and these words."""
    files, left = set(), [source]
    while left:
        if (path := left.pop()) not in files:
            files.add(path)
            left += included(path)
    texts = [f"{path}\n{path.read_text()}" for path in sorted(files)]
    return key_of(*made_with, *texts)


def drop_oldest(folder):
    """Deletes the objects that weren't used for longest, until CACHED bytes at most are left."""
    left = CACHED
    for entry in sorted(folder.iterdir(), key=lambda entry: -entry.stat().st_mtime):
        left -= sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
        if left < 0:
            shutil.rmtree(entry, ignore_errors=True)


def first_line(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def find_compiler():
    """The compiler, and the machine that it compiles for."""
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(cxx.split()[0]) is None:
        raise SystemExit(f"C++ compiler {cxx} not found: install g++ 12 or newer, or set CXX.")
    target = first_line(*cxx.split(), "-dumpmachine")  # x86_64-linux-gnu
    machine = target.split("-")[0]
    if "linux" not in target or machine not in ANY:
        raise SystemExit(
            f"attnkern compiles for Linux (x86-64, aarch64), {cxx} for {target}; "
            "ATTNKERN_SKIP_EXT=1 installs the Python files."
        )
    return cxx, machine


def find_torch():
    """The folder of the installed torch, without the two seconds of importing it.

    pip's isolated build hides what is installed beside the interpreter, where attnkern will run: any torch does to
    build against, and that one saves fetching another.
    """
    hidden = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = importlib.util.find_spec("torch") or PathFinder.find_spec("torch", hidden)
    if found is None or found.origin is None:
        raise SystemExit(
            "attnkern is compiled against the installed torch, and this Python has none: install torch first, "
            "then build with `pip install --no-build-isolation .`, which needs ninja and setuptools >= 77."
        )
    torch = Path(found.origin).parent
    if tuple(map(int, re.findall(r"\d+", version_of(torch))[:2])) < (2, 11):
        raise SystemExit(f"attnkern needs torch >= 2.11, found {version_of(torch)}.")
    return torch


def version_of(torch):
    return re.findall(r"^__version__ = '(.*)'", (torch / "version.py").read_text(), re.M)[0]


def stand_in_for_torch(torch, cxx, folder):
    """For another machine, whose torch isn't here: an empty libtorch_cpu.so with the names of this one's C interface.

    -z defs then refuses what torch doesn't have, as it does where torch itself is linked against.
    """
    command = ("nm", "-D", "--defined-only", torch / "lib" / "libtorch_cpu.so")
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    names = sorted({name for name in listed if name.startswith(("aoti_torch_", "torch_"))})
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "torch.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    flags = ("-x", "c", "-w", "-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so")
    subprocess.run([*cxx.split(), *flags, source, "-o", folder / "libtorch_cpu.so"], check=True)


def find_nvcc(machine=HERE):
    """nvcc's path, or None and the reason why the CUDA library isn't built for a machine."""
    wanted, home = os.environ.get("ATTNKERN_CUDA", "auto"), os.environ.get("CUDA_HOME")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"ATTNKERN_CUDA must be auto, 0 or 1, got {wanted!r}.")
    if wanted == "0":
        return None, "ATTNKERN_CUDA=0"
    if machine != HERE:
        if wanted == "1":
            raise SystemExit(f"ATTNKERN_CUDA=1, but the compiler is one for {machine}: build the CUDA library there.")
        return None, f"compiled for {machine} on {HERE}"
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if nvcc is None and wanted == "1":
        raise SystemExit(f"ATTNKERN_CUDA=1, but nvcc was not found in {f'{home}/bin' if home else 'PATH'}.")
    return nvcc, "nvcc not found"


def library_flags():
    """For the C++ of the CPU's library."""
    return f"{CXXFLAGS} {TARGET} -Icsrc {os.environ.get('CXXFLAGS', '')}".rstrip()


def max_jobs():
    """MAX_JOBS, at most the cores and one job per 2 GB of free memory."""
    wanted = os.environ.get("MAX_JOBS")
    if wanted and not wanted.strip().isdecimal():
        raise SystemExit(f"MAX_JOBS must be a number of jobs, got {wanted!r}.")
    available = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    bound = min(len(os.sched_getaffinity(0)), int(available[1]) // 2**21 if available else 1)
    return max(1, min(bound, int(wanted or bound)))


# -MMD: system headers are left out, among them torch's, which lie in another folder for another checkout. The hash of
# an object tells of their releases.
COMPILE = "$tool $flags -MMD -MF $out.d -c $in -o $out"
# PTX, the binary of each architecture and what ptxas says of it stay beside the object: tests/gate and tests/launches
# read them.
COMPILE_CUDA = (
    "rm -rf $out.kept && mkdir $out.kept && "
    "if $tool $flags -Xptxas -v --keep --keep-dir $out.kept -MD -MF $out.d -c $in -o $out > $out.log 2>&1; "
    "then grep warning $out.log; find $out.kept -type f ! -name '*.ptx' ! -name '*.cubin' -delete; "
    "else cat $out.log; exit 1; fi"
)
# Either, unless a folder has what it would make.
ONCE = (
    'entry="{folder}/$hash"; rm -rf $out.kept; if cp -R "$$entry"/. "$$(dirname $out)" 2> /dev/null; '
    'then touch "$$entry" 2> /dev/null || :; '
    'else {{ {command}; }} && {{ new="$$(mktemp -d "$$entry".XXXXXX)" && cp -R $out* "$$new" && '
    'mv -T "$$new" "$$entry" 2> /dev/null || rm -rf "$$new"; }}; fi'
)


class Ninja:
    """build/ninja/<name>.ninja, its objects beside it in <name>/ or in another's folder.

    In a checkout, objects come from the user's cache folder, if they are there, and go into it.
    """

    def __init__(self, name, folder=None):
        self.name, self.folder, self.edges = name, BUILD / (folder or name), []
        self.cache = objects_folder()
        self.jobs = max_jobs()  # here: a bad MAX_JOBS is said before anything is built

        def once(command):
            # ":": where nothing is kept, another hash makes it another command, so that ninja runs it.
            return ONCE.format(folder=self.cache, command=command) if self.cache else f": $hash; {command}"

        self.rules = [
            f"builddir = {BUILD}",
            f"rule compile\n  command = {once(COMPILE)}\n  description = compile $in\n  depfile = $out.d\n  deps = gcc",
            f"rule compile_cuda\n  command = {once(COMPILE_CUDA)}\n  description = compile $in\n  depfile = $out.d",
            "rule link\n  command = $tool $in -o $out $flags\n  description = link $out",
        ]

    def add(self, rule, out, sources, tool, flags, made_of=""):
        edge = f"build {out}: {rule} {' '.join(map(str, sources))}\n  tool = {tool}\n  flags = {flags}"
        self.edges.append((rule, f"{edge}\n  hash = {made_of}"))

    def compile(self, sources, tool, flags, variant=""):
        objects = [self.folder / f"{source}{variant}.o" for source in sources]
        # Torch's release, not where it lies.
        said = re.sub(r"(?<=-isystem )(\S+)/include", lambda match: version_of(Path(match[1])), flags)
        for source, out in zip(sources, objects, strict=True):
            rule, command = ("compile_cuda", COMPILE_CUDA) if source.suffix == ".cu" else ("compile", COMPILE)
            self.add(rule, out, [source], tool, flags, hash_of(source, out, command, said, *release_of(tool)))
        return objects

    def compile_passes(self, cxx, flags, isa, variant=""):
        """csrc/cpu/isa/*.cpp for an instruction set, whose flags are among these."""
        passes = sorted(Path("csrc/cpu/isa").glob("*.cpp"))
        return self.compile(passes, cxx, f"{flags} -DATTNKERN_ISA={isa}", f".{isa}{variant}")

    def compile_kernels(self, machine, cxx, flags):
        """The CPU kernels: csrc/cpu/*.cpp, and the passes for each instruction set.

        Of an inline function that several units have out of line, the linker takes the first: what every machine runs
        comes first, then the instruction sets, the lowest first, so that no unit gets a better one's.
        """
        objects = self.compile(sorted(Path("csrc/cpu").glob("*.cpp")), cxx, flags)
        for isa in reversed(cpu_isas(machine)):
            objects += self.compile_passes(cxx, f"{flags} {ISA[isa][1]}", isa)
        return objects

    def run(self):
        ninja = shutil.which("ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if ninja is None:
            raise SystemExit("ninja not found: pip install ninja.")
        BUILD.mkdir(parents=True, exist_ok=True)
        with open(BUILD / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two `make` at once must not write one object
            path = BUILD / f"{self.name}.ninja"
            # Ninja begins with what is listed first: CUDA's units, which take longest, so that none is left at the end.
            edges = [edge for _, edge in sorted(self.edges, key=lambda edge: edge[0] != "compile_cuda")]
            path.write_text("\n".join([*self.rules, *edges]) + "\n")
            if subprocess.run([ninja, "-f", path, "-j", str(self.jobs)]).returncode:
                raise SystemExit("attnkern was not built: the compiler's message is above.")
        if self.cache:
            with contextlib.suppress(FileNotFoundError):  # another checkout's build does the same
                drop_oldest(self.cache)


def cpu_isas(machine):
    """The instruction sets to compile for: those of the compiler's machine that are asked for, best first."""
    own = [name for name, (machines, _) in ISA.items() if machine in machines]
    asked = os.environ.get("ATTNKERN_CPU_ISAS", "").split() or own
    wanted = [native_isa(own)] if asked == ["native"] else [*asked, "generic"]
    if unknown := [name for name in wanted if name not in own]:
        raise SystemExit(
            f"ATTNKERN_CPU_ISAS must be native or name instruction sets of {machine} ({', '.join(own)}), "
            f"got {unknown[0]!r}."
        )
    wanted += [BELOW[name] for name in wanted if name in BELOW]
    return [name for name in own if name in wanted]


def native_isa(own):
    """The best one that this machine runs; csrc/cpu/dispatch.cpp asks for the same features."""
    listed = re.search(r"^(?:flags|Features)\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
    features = {name.replace("_", "") for name in listed[1].split()} if listed else set()
    named = {isa: re.findall(r"-m((?:avx|amx)[\w-]+|fma|f16c)", flags) for isa, (_, flags) in ISA.items()}
    needed = {isa: {name.replace("-", "") for name in names} for isa, names in named.items()}
    return next(isa for isa in own if needed[isa] <= features)


def virtual_arch(source, arch):
    """The PTX that a source's binary for sm_<arch> is made of: one for all chips up to sm_90, one from sm_100 on, for
    which nvcc has another front end. *_sm90.cu have Hopper's own instructions."""
    match = re.fullmatch(r"(\d{2,})[af]?", arch)
    if match is None or int(match[1]) < 80:
        raise SystemExit(f'ATTNKERN_CUDA_ARCHS must name architectures from 80 on, as in "80 90a 120", got {arch!r}.')
    if Path(source).stem.endswith("_sm90"):
        return "90a"
    return "100" if int(match[1]) >= 100 else "80"


def cuda_archs():
    return os.environ.get("ATTNKERN_CUDA_ARCHS", "80 90a 100 120").split()


def sm90_flags(archs):
    """For csrc/cuda/*_sm90.cu, whose kernels only sm_90a can run: without it their plans remain, which refuse."""
    code = "arch=compute_90a,code=sm_90a" if "90a" in archs else "arch=compute_80,code=sm_80 -DATTNKERN_NO_SM90"
    return f"-gencode {code}"


def hopper_flags(archs):
    return f"{NVCCFLAGS} {sm90_flags(archs)} -Icsrc"


def hopper_sources():
    """csrc/cuda/*_sm90.cu that go into the library."""
    asked = os.environ.get("ATTNKERN_SCHEDULES", "")
    if asked not in ("", "all"):
        raise SystemExit(f"ATTNKERN_SCHEDULES must be all or not be set, got {asked!r}.")
    return sorted(path for path in Path("csrc/cuda").glob("*_sm90.cu") if asked or path != SCHEDULES)


class BuildLibraries(build_ext):
    """Both libraries, straight to their destination: this folder (--inplace) or the wheel's tree."""

    def run(self):
        (cxx, machine), torch = find_compiler(), find_torch()
        nvcc, why_not = find_nvcc(machine)
        package = Path("." if self.inplace else self.build_lib) / "attnkern"
        flags = library_flags()
        torch_flags = f"{flags} -isystem {torch}/include"
        # Another machine's objects have a folder of their own: these stay.
        ninja = Ninja("release" if machine == HERE else f"release-{machine}")
        libraries = torch / "lib"
        if machine != HERE:
            libraries = ninja.folder
            stand_in_for_torch(torch, cxx, libraries)
        objects = ninja.compile(sorted(Path("csrc").glob("*.cpp")), cxx, torch_flags)
        objects += ninja.compile_kernels(machine, cxx, flags)
        ninja.add("link", package / "_C.abi3.so", objects, cxx, f"{LDFLAGS} -L{libraries} -ltorch_cpu")
        record = {
            "compiler": first_line(*cxx.split(), "--version"),
            "flags": flags,
            "isa": {isa: ISA[isa][1] for isa in cpu_isas(machine)},
            "torch": version_of(torch),
            "cuda": why_not,
        }
        if nvcc:
            archs, hopper = cuda_archs(), hopper_sources()
            sources = Path("csrc/cuda")
            others = sorted({*sources.glob("*.cu")} - {*sources.glob("*_sm90.cu")})
            codes = [f"-gencode arch=compute_{virtual_arch(others[0], arch)},code=sm_{arch}" for arch in archs]
            nvcc_flags = " ".join([NVCCFLAGS, *codes, "-gencode arch=compute_80,code=compute_80", "-Icsrc"])
            objects = ninja.compile(sorted(sources.glob("*.cpp")), cxx, torch_flags)
            objects += ninja.compile(others, nvcc, nvcc_flags)
            objects += ninja.compile(hopper, nvcc, hopper_flags(archs))
            # -ltorch: a CUDA torch's needs libtorch_cuda, where the one weak CUDA symbol of ops_cuda.cpp then resolves.
            link_flags = f"{LDFLAGS} -cudart static -cudadevrt none -L{libraries} -ltorch -ltorch_cpu"
            ninja.add("link", package / "_cuda.abi3.so", objects, nvcc, link_flags)
            compiler = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
            record["cuda"] = {"compiler": compiler.splitlines()[-2], "archs": archs, "flags": nvcc_flags}
        else:
            print(f"{why_not}: building the CPU library only", flush=True)
            for stale in {package, *Path("build").glob("lib*/attnkern")}:
                (stale / "_cuda.abi3.so").unlink(missing_ok=True)
        ninja.run()
        (package / "_build.json").write_text(json.dumps(record, indent=2) + "\n")

    def get_outputs(self):
        package = Path(self.build_lib, "attnkern")
        return [str(package / name) for name in ("_C.abi3.so", "_cuda.abi3.so", "_build.json")]


class BuildWheel(bdist_wheel):
    """A wheel for every CPython from 3.10 on and for the machine that is compiled for."""

    plat_name: str | None

    def finalize_options(self):
        if self.distribution.has_ext_modules():
            self.py_limited_api = "cp310"
            self.plat_name = self.plat_name or f"linux_{find_compiler()[1]}"
        super().finalize_options()


class BuildSchedules(Command):
    """The object of SCHEDULES beside the others, whatever ATTNKERN_SCHEDULES says: for tests and the gate."""

    user_options: ClassVar[list] = []
    initialize_options = finalize_options = lambda self: None

    def run(self):
        (nvcc, why_not), ninja = find_nvcc(), Ninja("schedules", "release")
        if nvcc is None:
            raise SystemExit(f"{why_not}: {SCHEDULES} needs it.")
        ninja.compile([SCHEDULES], nvcc, hopper_flags(cuda_archs()))
        ninja.run()


class BuildKernelTests(Command):
    """tests/cpp/*.cpp with the objects of the CPU kernels, as they are in the library: build/ninja/test_kernels.

    --sanitize: both under AddressSanitizer and UBSan, build/ninja/test_kernels.sanitize.
    """

    user_options: ClassVar[list] = [("sanitize", None, "under AddressSanitizer and UBSan")]
    boolean_options: ClassVar[list] = ["sanitize"]

    def initialize_options(self):
        self.sanitize = False

    def finalize_options(self):
        pass

    def run(self):
        (cxx, machine), name = find_compiler(), "test_kernels"
        folder, flags, link_flags = "release", library_flags(), "-pthread"
        if self.sanitize:
            name, folder, flags, link_flags = f"{name}.sanitize", "sanitize", f"{CXXFLAGS} {SANITIZE} -Icsrc", SANITIZE
        ninja = Ninja(name, folder)
        objects = ninja.compile_kernels(machine, cxx, flags)
        objects += ninja.compile(sorted(Path("tests/cpp").glob("*.cpp")), cxx, flags)
        ninja.add("link", BUILD / name, objects, cxx, link_flags)
        ninja.run()


class BuildEmulated(Command):
    """The CPU library with the kernels for AMX and for AVX-512 without bfloat16, emulated, and those that AVX2 runs:
    build/ninja/_C.emulated.so."""

    user_options: ClassVar[list] = []
    initialize_options = finalize_options = lambda self: None

    def run(self):
        (cxx, machine), torch, ninja = find_compiler(), find_torch(), Ninja("emulated", "release")
        if machine not in X86:
            raise SystemExit(f"{EMULATED} is for x86-64, the compiler for {machine}.")
        flags = library_flags()
        emulated = f"-DATTNKERN_EMULATED=0x{key_of(EMULATED.read_text())[:8]}"
        objects = ninja.compile(sorted(Path("csrc").glob("*.cpp")), cxx, f"{flags} -isystem {torch}/include")
        objects += ninja.compile(sorted(Path("csrc/cpu").glob("*.cpp")), cxx, f"{flags} {emulated}", ".emulated")
        for isa in ("generic", "avx2"):
            objects += ninja.compile_passes(cxx, f"{flags} {ISA[isa][1]}", isa)
        flags += f" {ISA['avx2'][1]} -Og -Wno-psabi -I{EMULATED.parent} {emulated}"
        for isa in ("amx", "avx512"):
            bf16 = f"-DATTNKERN_EMULATED_BF16={int(isa in BELOW)}"
            objects += ninja.compile_passes(cxx, f"{flags} {bf16}", isa, ".emulated")
        ninja.add("link", BUILD / "_C.emulated.so", objects, cxx, f"{LDFLAGS} -L{torch}/lib -ltorch_cpu")
        ninja.run()


class BuildCores(Command):
    """bench/cores.cpp with the objects of the CPU kernels, as they are in the library: build/ninja/cores.

    With ATTNKERN_CPU_ISAS as it was for the library, nothing but bench/cores.cpp is compiled.
    """

    user_options: ClassVar[list] = []
    initialize_options = finalize_options = lambda self: None

    def run(self):
        (cxx, machine), ninja = find_compiler(), Ninja("cores", "release")
        flags = library_flags()
        objects = ninja.compile_kernels(machine, cxx, flags)
        objects += ninja.compile([Path("bench/cores.cpp")], cxx, flags)
        # What the program answers itself.
        wrapped = ("14thread_scratchEm", "10wait_untilERNS0_8ProgressEl", "8announceERNS0_8ProgressEl")
        wrap = " ".join(f"-Wl,--wrap=_ZN8attnkern3cpu{name}" for name in wrapped)
        ninja.add("link", BUILD / "cores", objects, cxx, f"-pthread {wrap}")
        ninja.run()


if __name__ == "__main__":  # tests/gate imports this module for its flags
    extensions = (
        [] if os.environ.get("ATTNKERN_SKIP_EXT") == "1" else [Extension("attnkern._C", [], py_limited_api=True)]
    )
    setup(
        packages=[*find_packages(include=["attnkern", "attnkern.*"]), "attnkern.triton_kernels"],
        package_dir={
            "attnkern.triton_kernels": "triton_kernels"
        },  # never top-level: that name is another distribution's
        ext_modules=extensions,
        cmdclass={
            "bdist_wheel": BuildWheel,
            "build_ext": BuildLibraries,
            "build_schedules": BuildSchedules,
            "build_kernel_tests": BuildKernelTests,
            "build_cores": BuildCores,
            "build_emulated": BuildEmulated,
        },
    )
