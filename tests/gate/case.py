"""What is compiled, and what its binary must look like: plain data, checked where it is written down."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptxsim import SHARED_LIMIT

KIB = 1024


def capability(arch: str) -> int:
    """90 of "90a"."""
    match = re.fullmatch(r"(\d+)[af]?", arch)
    if match is None or int(match[1]) not in SHARED_LIMIT:
        known = ", ".join(map(str, SHARED_LIMIT))
        raise ValueError(f"arch must be one of {known}, with or without the suffix a or f; got {arch!r}.")
    return int(match[1])


@dataclass(frozen=True)
class Budget:
    """Bytes that may be spilled (stores, loads, and the stack frame, each), and the argument for them."""

    bytes: int
    because: str

    def __post_init__(self):
        if self.bytes <= 0 or not self.because.strip():
            raise ValueError(f"Budget needs bytes > 0 and the argument for them, got {self.bytes}, {self.because!r}.")


@dataclass(frozen=True)
class Cuda:
    """Kernels of one .cu source, compiled with the flags that the product is compiled with.

    kernel is a glob over their names without namespace and parameters, as in ``forward_kernel<__nv_bfloat16, 128>``;
    threads is the size of the block that they are launched with (0: their launch bounds), shared their dynamic shared
    memory in bytes: the launch decides it, so it isn't in the binary. path is relative to the repository's root (or
    absolute); flags are added to the product's.
    """

    path: str
    kernel: str
    threads: int = 0
    shared: int = 0
    flags: tuple[str, ...] = ()

    def is_about(self, name: str) -> bool:
        """Whether the glob matches a kernel's name; "> >" is ">>"."""
        return fnmatch.fnmatchcase(name.replace("> >", ">>"), self.kernel.replace("> >", ">>"))


@dataclass(frozen=True)
class Triton:
    """One configuration of a Triton or Gluon kernel.

    fn is the JITFunction; signature maps every argument that isn't constexpr to its type ("*bf16", "i32", "fp32",
    "tensordesc<bf16[64, 64]>"), or to a named tuple of types; constexprs maps the others to their values, and constants
    within a tuple by their path; options are num_warps, num_stages and the like. aligned names the integers known to be
    multiples of 16, or has their paths; pointers are taken to be, as those of tensors.
    """

    fn: Any
    signature: Mapping[str, Any]
    constexprs: Mapping[str | tuple[int, ...], Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str | tuple[int, ...], ...] = ()

    def __post_init__(self):
        names = self.fn.arg_names
        given = [*self.signature, *(name for name in self.constexprs if isinstance(name, str))]
        if sorted(given) != sorted(names):
            missing, other = sorted(set(names) - set(given)), sorted(set(given) - set(names))
            raise ValueError(
                f"{self.fn.__name__}: signature and constexprs must name each argument once; "
                f"missing {missing}, unknown {other}, twice {sorted({n for n in given if given.count(n) > 1})}."
            )


@dataclass(frozen=True)
class Case:
    """A kernel and what it claims.

    archs are the architectures it is shipped for, in one string as nvcc names them ("80 86 90a"). require maps such
    strings to the fewest instructions that the SASS must hold: ``{"80 86": {"HMMA": 64, "LDSM": 20}}``; a name also
    stands for all its modifiers, and may have some ("HMMA.16816"). spills maps them to a `Budget`; without one
    nothing may be spilled, and the stack must be empty.

    loop and order are about the inner loop in the SASS, the loop over blocks of keys or of queries (`sass.main_loop`).
    loop maps architectures to how many instructions one turn issues, exactly: ``{"80": {"HMMA.16816": 256}}``; where
    ptxas left a loop within it rolled, its turns are found so. order maps them to what one turn passes in this order,
    wherever it is taken to begin: an opcode, or one with its operands, or a pair with the fewest that must come before
    the next step does. That the exponentials of a wgmma kernel stand between its two waits, and so beside P V::

        order={"90a": (("HGMMA", 16), "WARPGROUP.DEPBAR gsb0, 0x1", ("MUFU.EX2", 64), "WARPGROUP.DEPBAR gsb0, 0x0")}

    walks_again: the kernel has its loops twice, and the second ones run only where the first met NaN in what nobody
    attends to: what is spilled counts in the inner loops of the first alone.
    """

    name: str
    source: Cuda | Triton
    archs: str
    require: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    spills: Mapping[str, Budget] = field(default_factory=dict)
    loop: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    order: Mapping[str, Sequence[str | tuple[str, int]]] = field(default_factory=dict)
    walks_again: bool = False

    def __post_init__(self):
        claimed = self.archs.split()
        if not claimed:
            raise ValueError(f"case {self.name}: archs is empty.")
        for arch in claimed:
            capability(arch)
        for what in ("require", "spills", "loop", "order"):
            named = [arch for archs in getattr(self, what) for arch in archs.split()]
            if not set(named) <= set(claimed) or len(named) != len(set(named)):
                raise ValueError(f"case {self.name}: {what} must name archs of {self.archs!r}, once; got {named}.")

    def arch_of(self, number: int) -> str | None:
        """How the case names the architecture of a compute capability: "120", "120a", or not at all."""
        return next((arch for arch in self.archs.split() if capability(arch) == number), None)

    def required(self, arch: str) -> Mapping[str, int]:
        return _of(arch, self.require, {})

    def budget(self, arch: str) -> int:
        return _of(arch, {archs: budget.bytes for archs, budget in self.spills.items()}, 0)

    def turn(self, arch: str) -> Mapping[str, int]:
        return _of(arch, self.loop, {})

    def steps(self, arch: str) -> Sequence[str | tuple[str, int]]:
        return _of(arch, self.order, ())


def _of(arch: str, claims: Mapping[str, Any], otherwise: Any) -> Any:
    return next((claim for archs, claim in claims.items() if arch in archs.split()), otherwise)
