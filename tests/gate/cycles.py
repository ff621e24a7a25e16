"""``python -m gate --cycles``: which unit the inner loops of the attention kernels keep busiest, counted in their SASS.

A turn of a warp's inner loop (sass.py) takes each unit of its multiprocessor some cycles. With enough warps all units
work side by side, and a turn lasts at least as long as the busiest one's work. It lasts longer: softmax that no product
hides, prologue, epilogue, memory, latencies, bank conflicts, tails of the grid and clocks under load are left out. So
this says which unit to look at, and no speed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

from . import rules, sass
from .binary import GateError, Kernel
from .case import KIB, Case, Triton, capability
from .sass import Instruction


class Chip(NamedTuple):
    """Rates per clock and multiprocessor. A multiprocessor has four partitions; each issues one instruction a clock."""

    arch: str  # whose binary the product runs there
    name: str
    macs: int  # multiply-adds of 16 bits, added up in float32; of tf32 half as many
    sync: float  # share of them that mma.sync reaches; wgmma reaches all
    fma: int  # float32 multiply-adds
    shared: int  # KiB of shared memory
    threads: int  # resident at most


# Rates, shared memory and threads: CUDA C++ Programming Guide, "Arithmetic Instructions" and "Compute Capabilities".
# mma.sync on Hopper: 62.9 % of the peak (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture
# via Microbenchmarking", 2024).
CHIPS = (
    Chip("80", "a100", 1024, 1.0, 64, 164, 2048),
    Chip("90a", "h100", 2048, 0.629, 128, 228, 2048),
    Chip("80", "rtx4090", 256, 1.0, 128, 100, 1536),
    Chip("120a", "rtx5090", 256, 1.0, 128, 100, 1536),
)
MUFU, ALU, SHARED = 16, 64, 128  # of a multiprocessor: exponentials, integer and compare instructions, bytes
NARROW = 163  # KiB: with less for a block, the kernels that are called wide aren't launched

FMA_OPS = ("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2")
HALF_FMA_OPS = ("IMAD",)  # on the same pipe, at 64 a clock on every chip
MUFU_OPS = ("MUFU", "I2F", "F2I", "F2F", "FRND", "I2FP")
MEMORY_OPS = ("LDSM", "STSM", "LDS", "STS", "LDGSTS", "SHFL", "LDG", "STG", "LD", "ST", "RED", "ATOMS", "ATOMG")
# Neither a pipe nor shared memory: they take an issue slot.
CONTROL_OPS = (
    *("BRA", "BSSY", "BSYNC", "BAR", "SYNCS", "WARPGROUP", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "NOP", "YIELD", "EXIT"),
    *("S2R", "S2UR", "CS2R", "LDC", "ULDC", "LDCU", "UTMALDG", "UTMASTG", "FENCE", "MEMBAR", "ERRBAR", "CCTL", "ELECT"),
    *("WARPGROUPSET", "PREEXIT", "ACQBULK", "NANOSLEEP", "R2UR", "VOTE", "VOTEU", "CALL", "RET", "UBLKCP"),
)


class Turn(NamedTuple):
    """What a turn of one warp takes: cycles of each unit of its partition."""

    cycles: dict[str, float]
    operand_bytes: float  # what wgmma reads of its right operands, per block of 64 rows

    @property
    def busiest(self) -> str:
        return max(self.cycles, key=lambda unit: self.cycles[unit])


def measure(instructions: list[tuple[Instruction, int]], chip: Chip) -> Turn:
    """Adds up instructions, each with how often it is issued. Shared memory serves four partitions at a time, each
    with such a warp; a wgmma is issued by four warps, one in each, and read for once."""
    cycles = dict.fromkeys(("tensor", "issue", "mufu", "fma", "alu", "shared"), 0.0)
    operands = 0.0
    for x, times in instructions:
        cycles["issue"] += times
        if x.is_a("HMMA"):
            macs, tf32 = hmma(x)
            cycles["tensor"] += times * macs * (1 + tf32) / (chip.macs / 4 * chip.sync)
        elif x.is_a("HGMMA"):
            macs, left, right, tf32 = hgmma(x)
            cycles["tensor"] += times * macs * (1 + tf32) / chip.macs
            cycles["shared"] += times * (left + right) / SHARED
            operands += times * right
        elif x.is_a(*sass.TENSOR):
            raise GateError(f"no rate is known of {x.name}")
        elif x.is_a(*MUFU_OPS):
            cycles["mufu"] += times * 32 / (MUFU / 4)
        elif x.is_a(*FMA_OPS):
            cycles["fma"] += times * 32 / (chip.fma / 4)
        elif x.is_a(*HALF_FMA_OPS):
            cycles["fma"] += times * 32 / (ALU / 4)
        elif x.is_a(*MEMORY_OPS):
            cycles["shared"] += times * 4 * width(x) * 32 / SHARED
        elif not (x.is_a(*CONTROL_OPS) or is_uniform(x)):
            cycles["alu"] += times * 32 / (ALU / 4)
    return Turn(cycles, operands)


def is_uniform(x: Instruction) -> bool:
    """An instruction of the uniform datapath, once per warp: UIADD3, UMOV, R2UR ..."""
    return re.match(r"U(?!TMA|BLKCP)[A-Z]", x.name) is not None


def hmma(x: Instruction) -> tuple[int, bool]:
    """Multiply-adds of one HMMA.16816, .1688 or .1684, and whether they are of tf32."""
    shape = re.match(r"HMMA\.(16)(8)(16|8|4)\.", x.name)
    if shape is None:
        raise GateError(f"no rate is known of {x.name}")
    return math.prod(map(int, shape.groups())), ".TF32" in x.name


def hgmma(x: Instruction) -> tuple[int, int, int, bool]:
    """Multiply-adds of one HGMMA.64x128x16, the bytes of its left operand in shared memory (none where it is in
    registers), those of its right one, and whether they are of tf32."""
    shape = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\.", x.name)
    if shape is None:
        raise GateError(f"no rate is known of {x.name}")
    m, n, k = map(int, shape.groups())
    tf32 = ".TF32" in x.name
    size = 4 if tf32 else 2
    sources = x.operands.split(",")[1:]
    from_registers = not sources[0].strip().startswith("gdesc")
    return m * n * k, 0 if from_registers else m * k * size, n * k * size, tf32


def width(x: Instruction) -> int:
    """Bytes of a lane in shared memory, and for loads and stores of global memory in the same pipe."""
    if x.is_a("LDSM", "STSM"):
        tiles = re.search(r"\.M\w*88\.([24])", x.name)
        return 4 * int(tiles[1] if tiles else 1)
    wide = re.search(r"\.(128|64)\b", x.name)
    return int(wide[1]) // 8 if wide else 4


class Resident(NamedTuple):
    blocks: int
    warps: float  # that compute, of a partition


def resident(case: Case, kernel: Kernel, chip: Chip) -> Resident:
    """How many blocks a multiprocessor holds: by registers, shared memory (1 KiB of each block is the system's) and
    threads. Where warps specialise, one warpgroup of a block only loads."""
    threads = rules.threads(case, kernel)
    blocks = min(
        rules.REGISTERS // rules.block_registers(case, kernel),
        chip.shared * KIB // (rules.shared(case, kernel) + KIB),
        chip.threads // threads,
    )
    loading = 128 if kernel.count("USETMAXREG") and kernel.count("UTMALDG") else 0
    return Resident(blocks, blocks * (threads - loading) / 128)


class Figures(NamedTuple):
    """What is counted of one kernel."""

    case: Case
    kernel: Kernel
    chip: Chip
    turn: Turn
    resident: Resident


def figures(case: Case, kernel: Kernel, chip: Chip, reuse: float = 1.0) -> Figures:
    """reuse: of REUSE, for wgmma kernels."""
    turn = measure(sass.main_loop(kernel).turn(dict(case.turn(arch_of(case, chip)))), chip)
    held = resident(case, kernel, chip)
    if turn.operand_bytes and held.blocks:
        consumers = held.warps / held.blocks
        turn.cycles["shared"] += turn.operand_bytes / reuse / consumers / SHARED
    return Figures(case, kernel, chip, turn, held)


def arch_of(case: Case, chip: Chip) -> str:
    return case.arch_of(capability(chip.arch)) or chip.arch


def launched(case: Case, chip: Chip) -> bool:
    """Whether this case's kernel may be what the chip gets: its architecture, and tiles that fit."""
    return case.arch_of(capability(chip.arch)) is not None and ("wide" not in case.name or chip.shared - 1 >= NARROW)


def pass_of(case: Case) -> tuple[str, int] | None:
    """("forward", 128) of "forward d128 fast path", ("dq", 64) of "triton dq bf16 d64 plain sm_80"; None: a case that
    the table leaves out."""
    kinds = "|".join(REUSE)
    name = re.match(rf"(?:triton )?(?:backward )?({kinds})(?: sm_?90)?(?: bf16)? d(64|128|256)\b(.*)", case.name)
    if name is None or set(re.split(r"[^\w]+", name[3])) - {
        "",
        "plain",
        "fast",
        "path",
        "wide",
        "sm_80",
        "sm_90",
        "sm90",
        "sm_100",
    }:
        return None
    return name[1], int(name[2])


# How many products read a tile as their right operand that TMA writes once.
REUSE = {"forward": 1.0, "dkdv": 2.0, "dq": 1.5, "fused": 2.5}


def table(cases: list[Case]) -> tuple[list[Figures], list[str]]:
    """Of every kernel that computes bfloat16 at head sizes 64, 128 and 256 without features, on each chip."""
    found: list[Figures] = []
    lines: list[str] = []
    for chip in CHIPS:
        mine = {case.name: (case, of) for case in cases if (of := pass_of(case)) and launched(case, chip)}
        for case, (kind, _) in mine.values():
            if f"{case.name} wide" in mine:
                continue
            try:
                kernels = rules.of_case(case, arch_of(case, chip))
            except GateError as error:
                kernels, lines = [], [*lines, f"{case.name} on {chip.name}: {error}"]
            for kernel in kernels:
                try:
                    if "bfloat16" in kernel.name or isinstance(case.source, Triton):
                        found.append(figures(case, kernel, chip, REUSE[kind]))
                except GateError as error:
                    lines.append(f"{rules.label(case, kernel)} on {chip.name}: {error}")
    return found, lines


def unclassified(instructions: list[Instruction]) -> Counter[str]:
    """What is taken for an instruction of the integer pipe, by opcode: to look over."""
    named = (*sass.TENSOR, *MUFU_OPS, *FMA_OPS, *HALF_FMA_OPS, *MEMORY_OPS, *CONTROL_OPS)
    return Counter(x.name.split(".")[0] for x in instructions if not x.is_a(*named) and not is_uniform(x))
