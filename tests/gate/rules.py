"""The rules that a compiled kernel is held to: each broken one is a line."""

from __future__ import annotations

import re

from ptxsim import SHARED_LIMIT

from . import sass
from .binary import GateError, Kernel
from .case import KIB, Case, Cuda, capability
from .compilers import kernels

REGISTERS = 65536  # of a multiprocessor, on every architecture since sm_30
GRANULE = 8  # a warp gets its registers in units of 256: 8 a thread
WARP = 32
STACK = KIB  # of a kernel with a second walk, whose spills are there for the most part
STATIC = 48 * KIB  # what is more must be dynamic (CUDA C++ Programming Guide, "Compute Capabilities"); ptxas is silent


def label(case: Case, kernel: Kernel) -> str:
    """The case's name; where that is about several kernels, with the kernel's."""
    one = not isinstance(case.source, Cuda) or case.source.kernel == kernel.name
    return case.name if one else f"{case.name}: {kernel.name}"


def threads(case: Case, kernel: Kernel) -> int:
    return (isinstance(case.source, Cuda) and case.source.threads) or kernel.threads


def shared(case: Case, kernel: Kernel) -> int:
    """Static and dynamic; a .cu kernel's dynamic part is its claim, a Triton kernel's is in its metadata."""
    return kernel.static_shared + (case.source.shared if isinstance(case.source, Cuda) else kernel.dynamic_shared)


def block_registers(case: Case, kernel: Kernel) -> int:
    warps = -(-threads(case, kernel) // WARP)
    return -(-kernel.registers // GRANULE) * GRANULE * warps * WARP


def of_case(case: Case, arch: str) -> list[Kernel]:
    """The kernels that the case is about, compiled; at least one."""
    found = kernels(case, arch)
    if not isinstance(case.source, Cuda):
        return found
    mine = [kernel for kernel in found if case.source.is_about(kernel.name)]
    if not mine:
        names = ", ".join(kernel.name for kernel in found) or "none"
        raise GateError(
            f"case {case.name}: no kernel of {case.source.path} is {case.source.kernel!r}; it has: {names}."
        )
    return mine


def broken(case: Case, arch: str, kernel: Kernel) -> list[str]:
    """One line for each rule that the kernel breaks."""
    lines = []
    budget = case.budget(arch)
    try:
        for what, found, most in _spilled(case, kernel, budget):
            if found > most:
                lines.append(f"{found} bytes {what}, budget {most}")
    except GateError as error:
        lines.append(str(error))
    limit = SHARED_LIMIT[capability(arch)]
    if (used := shared(case, kernel)) > limit:
        lines.append(f"{used} bytes of shared memory, the chip has {limit}")
    if kernel.static_shared > STATIC:
        lines.append(f"{kernel.static_shared} bytes of static shared memory, at most {STATIC} may be")
    count = threads(case, kernel)
    if count == 0:
        lines.append("neither launch bounds nor claimed threads")
    elif kernel.threads not in (0, count):
        lines.append(f"{count} threads claimed, launch bounds of {kernel.threads}")
    if (used := block_registers(case, kernel)) > REGISTERS:
        lines.append(f"{kernel.registers} registers × {count} threads take {used}, the chip has {REGISTERS}")
    for used, left in sass.setmaxnreg(kernel):
        if used > left:
            lines.append(f"{used} registers behind a USETMAXREG that leaves {left}")
    if not isinstance(case.source, Cuda) and (found := sass.without_address(kernel)):
        lines.append(f"{len(found)} wgmma by descriptors that don't come of an address, the first is {found[0]}")
    lines += [f"ptxas: {note}" for note in kernel.notes if is_fatal(note)]
    for opcode, least in case.required(arch).items():
        if (found := kernel.count(opcode)) < least:
            lines.append(f"{found} {opcode} instructions, at least {least} required")
    lines += _broken_loop(case, arch, kernel)
    return [f"kernel {label(case, kernel)} on sm_{arch}: {line}" for line in lines]


def _spilled(case: Case, kernel: Kernel, budget: int) -> list[tuple[str, int, int]]:
    """What is spilled, how many bytes, and how many may be."""
    if not case.walks_again:
        return [
            ("of spill stores", kernel.spill_stores, budget),
            ("of spill loads", kernel.spill_loads, budget),
            ("of stack", kernel.stack, budget),
        ]
    stores, loads = sass.spilled_in_loops(kernel) if kernel.stack else (0, 0)
    return [
        ("of spill stores in the loops of the first walk", stores, budget),
        ("of spill loads in the loops of the first walk", loads, budget),
        ("of stack", kernel.stack, STACK),
    ]


def _broken_loop(case: Case, arch: str, kernel: Kernel) -> list[str]:
    counts, steps = dict(case.turn(arch)), case.steps(arch)
    if not counts and not steps:
        return []
    lines = []
    try:
        loop = sass.main_loop(kernel)
    except GateError as error:
        return [str(error)]
    try:
        loop.turn(counts)
    except GateError as error:
        lines.append(str(error))
    if steps and (found := sass.order(loop, steps)) is not None:
        wanted = ", ".join(step if isinstance(step, str) else f"{step[1]} {step[0]}" for step in steps)
        lines.append(f"the inner loop passes {found}; it should pass {wanted}")
    return lines


def is_fatal(note: str) -> bool:
    """wgmma serialised, setmaxnreg ignored, and what else ptxas expects to cost speed or warns of.

    C7517 and C7519 tell that it put a wait or an arrive of its own around a wgmma: alone they don't serialise it.
    """
    return "Potential Performance Loss" in note or not re.match(r"\(C75(17|19)\)", note)
