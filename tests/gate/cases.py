"""Every case, and the check that no kernel is without one.

A .cu file's cases are written down here and in cuda_*.py, those of triton_kernels/ in `triton`, those of the
simulator's kernels in `simulator`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from types import FunctionType, ModuleType

from . import cuda_backward, cuda_forward, cuda_sm90, cuda_sm90_backward, simulator, triton
from .binary import GateError
from .cache import ROOT
from .case import Case, Cuda, Triton
from .compilers import kernels

ALL = "80 90a 100 120"

CUDA = [
    Case("delta", Cuda("csrc/cuda/delta.cu", "delta_kernel<*, 1>"), ALL, require={ALL: {"LDG": 2, "SHFL": 3}}),
    Case("gradient of sinks", Cuda("csrc/cuda/delta.cu", "sinks_kernel"), ALL, require={ALL: {"LDG": 3, "SHFL": 5}}),
    Case(
        "summary of key ranges",
        Cuda("csrc/cuda/ranges.cu", "summarise_ranges_kernel"),
        ALL,
        require={"80 90a 120": {"REDUX": 4}},
    ),
    Case(  # 16 bytes a lane
        "delta by vectors",
        Cuda("csrc/cuda/delta.cu", "delta_kernel<*, [48]>"),
        ALL,
        require={ALL: {"LDG.E.128": 2, "SHFL": 3}},
    ),
]


def cuda_sources() -> list[str]:
    """Every file that must have cases: those with kernels, of their own or of a header."""

    def has_kernels(text: str) -> bool:
        headers = re.findall(r'^#include "(cuda/\w+\.cuh)"', text, re.M)
        return "__global__" in text or any(has_kernels((ROOT / "csrc" / name).read_text()) for name in headers)

    found = [*ROOT.glob("csrc/cuda/*.cu"), *ROOT.glob("tests/cuda/*.cu"), *ROOT.glob("tests/ptxsim/kernels/*.cu")]
    return sorted(str(path.relative_to(ROOT)) for path in found if has_kernels(path.read_text()))


@functools.cache
def triton_modules() -> list[ModuleType]:
    """The modules with Triton or Gluon functions; tests/ is on the path for this package's sake already."""
    found = []
    for folder, package in (("triton_kernels", "attnkern.triton_kernels"), ("tests/ptxsim/kernels", "ptxsim.kernels")):
        for path in sorted((ROOT / folder).glob("*.py")):
            if re.search(r"^@(triton|gluon)\.jit", path.read_text(), re.M):
                found.append(importlib.import_module(f"{package}.{path.stem}"))
    return found


def all_cases() -> list[Case]:
    hopper = [*cuda_sm90.cases(), *cuda_sm90_backward.cases()]
    cuda = [*CUDA, *cuda_forward.cases(), *cuda_backward.cases(), *hopper, *simulator.cuda_cases()]
    cases = [*cuda, *triton.cases(), *simulator.triton_cases()]
    names = [case.name for case in cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"the names of cases must differ, twice: {', '.join(sorted(twice))}.")
    return cases


def unclaimed_in_source(path: str, cases: list[Case]) -> list[str]:
    """A line for each kernel of a .cu file that no case is about, in any architecture compiled."""
    about = [(c.source, c) for c in cases if isinstance(c.source, Cuda) and c.source.path == path]
    if not about:
        return [f"{path}: no case in tests/gate/cases.py"]
    lines = []
    for source, case in about:
        for arch in case.archs.split():
            same = [s for s, c in about if s.flags == source.flags and arch in c.archs.split()]
            for kernel in kernels(case, arch):
                if not any(s.is_about(kernel.name) for s in same):
                    lines.append(f"kernel {kernel.name} of {path} on sm_{arch}: no case in tests/gate/cases.py")
    return list(dict.fromkeys(lines))


def unclaimed_in_modules(modules: list[ModuleType], cases: list[Case]) -> list[str]:
    """A line for each Triton kernel that no case compiles: a kernel is a JITFunction that no other one names."""
    from triton.runtime.jit import JITFunction

    functions = {}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__:
                functions[value.fn.__qualname__, module.__name__] = value
    called = {word for (name, _), f in functions.items() for word in names_in(f.fn) - {name}}
    compiled = {id(case.source.fn) for case in cases if isinstance(case.source, Triton)}
    return [
        f"kernel {name} of {module}: no case compiles it"
        for (name, module), function in functions.items()
        if name not in called and id(function) not in compiled
    ]


def names_in(function: FunctionType) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def unclaimed(cases: list[Case]) -> list[str]:
    lines = []
    for path in cuda_sources():
        try:
            lines += unclaimed_in_source(path, cases)
        except GateError as error:
            lines.append(str(error))
    return lines + unclaimed_in_modules(triton_modules(), cases)
