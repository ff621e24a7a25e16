"""``python -m gate --cycles``: what the inner loops of the attention kernels allow, counted in their SASS. A model.

A turn of a warp's inner loop (sass.py) takes each unit of its multiprocessor some cycles. With enough warps all units
work side by side, and the busiest one is the bound; the FLOPs of a turn over it, times multiprocessors and clock, are
the most that the loop allows. Where so few warps are resident that they can't fill each other's gaps, a turn lasts as
long as its products and its softmax one after the other. Prologue, epilogue, memory, latencies, bank conflicts, tails
of the grid and clocks under load are left out: a kernel is slower than this, never faster.
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
    multiprocessors: int
    clock: float  # GHz, of the peak that the maker states
    macs: int  # multiply-adds of 16 bits, added up in float32; of tf32 half as many
    sync: float  # share of them that mma.sync reaches; wgmma reaches all
    fma: int  # float32 multiply-adds
    shared: int  # KiB of shared memory
    threads: int  # resident at most

    def tflops(self, flops_of_a_clock: float) -> float:
        """Of all multiprocessors."""
        return flops_of_a_clock * self.multiprocessors * self.clock / 1e3


# Multiprocessors, clocks and peaks: NVIDIA's architecture whitepapers (A100 2020, H100 2022, Ada 2022, RTX Blackwell
# 2025). Rates, shared memory and threads: CUDA C++ Programming Guide, "Arithmetic Instructions" and "Compute
# Capabilities". mma.sync on Hopper: 62.9 % of the peak (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
# Architecture via Microbenchmarking", 2024).
CHIPS = (
    Chip("80", "a100", 108, 1.41, 1024, 1.0, 64, 164, 2048),
    Chip("90a", "h100", 132, 1.83, 2048, 0.629, 128, 228, 2048),
    Chip("80", "rtx4090", 128, 2.52, 256, 1.0, 128, 100, 1536),
    Chip("120a", "rtx5090", 170, 2.407, 256, 1.0, 128, 100, 1536),
)
MUFU, ALU, SHARED = 16, 64, 128  # of a multiprocessor: exponentials, integer and compare instructions, bytes
NARROW = 163  # KiB: with less for a block, the kernels that are called wide aren't launched

# TFLOP/s that others published, by chip, pass and head size: bf16 or fp16, no mask, the longest sequences.
# FlashAttention-2 and -3: Shah et al., "FlashAttention-3", 2024, figures 5 and 6, and the charts of the project's
# repository; A100: "FlashAttention-2", 2023, forward and backward together.
PUBLISHED = {
    ("h100", "forward"): {"FA2": {64: 324, 128: 370, 256: 326}, "FA3": {64: 497, 128: 648, 256: 756}},
    ("h100", "backward"): {"FA2": {64: 264, 128: 322}, "FA3": {64: 422, 128: 561}},
    ("a100", "both"): {"FA2": {64: 176, 128: 203}},
}

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
    """What a turn of one warp takes: cycles of each unit of its partition, and FLOPs of its products."""

    cycles: dict[str, float]
    flops: float
    operand_bytes: float  # what wgmma reads of its right operands, per block of 64 rows

    @property
    def limit(self) -> str:
        return max(self.cycles, key=lambda unit: self.cycles[unit])

    @property
    def bound(self) -> float:
        return self.cycles[self.limit]

    def alone(self) -> float:
        """Cycles of a warp that no other one works beside: products, then whatever else takes it longest."""
        others = (n for unit, n in self.cycles.items() if unit not in ("tensor", "shared", "issue"))
        return max(self.bound, self.cycles["tensor"] + max(others))


def measure(instructions: list[tuple[Instruction, int]], chip: Chip) -> Turn:
    """Adds up instructions, each with how often it is issued. Shared memory serves four partitions at a time, each
    with such a warp; a wgmma is issued by four warps, one in each, and read for once."""
    cycles = dict.fromkeys(("tensor", "issue", "mufu", "fma", "alu", "shared"), 0.0)
    flops = operands = 0.0
    for x, times in instructions:
        cycles["issue"] += times
        if x.is_a("HMMA"):
            macs, tf32 = hmma(x)
            flops += 2 * macs * times
            cycles["tensor"] += times * macs * (1 + tf32) / (chip.macs / 4 * chip.sync)
        elif x.is_a("HGMMA"):
            macs, left, right, tf32 = hgmma(x)
            flops += 2 * macs / 4 * times
            cycles["tensor"] += times * macs * (1 + tf32) / chip.macs
            cycles["shared"] += times * (left + right) / SHARED
            operands += times * right
        elif x.is_a(*sass.TENSOR):
            raise GateError(f"the model doesn't know {x.name}")
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
    return Turn(cycles, flops, operands)


def is_uniform(x: Instruction) -> bool:
    """An instruction of the uniform datapath, once per warp: UIADD3, UMOV, R2UR ..."""
    return re.match(r"U(?!TMA|BLKCP)[A-Z]", x.name) is not None


def hmma(x: Instruction) -> tuple[int, bool]:
    """Multiply-adds of one HMMA.16816, .1688 or .1684, and whether they are of tf32."""
    shape = re.match(r"HMMA\.(16)(8)(16|8|4)\.", x.name)
    if shape is None:
        raise GateError(f"the model doesn't know {x.name}")
    return math.prod(map(int, shape.groups())), ".TF32" in x.name


def hgmma(x: Instruction) -> tuple[int, int, int, bool]:
    """Multiply-adds of one HGMMA.64x128x16, the bytes of its left operand in shared memory (none where it is in
    registers), those of its right one, and whether they are of tf32."""
    shape = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\.", x.name)
    if shape is None:
        raise GateError(f"the model doesn't know {x.name}")
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
    """The model's word on one kernel. TFLOP/s count every product that it computes."""

    case: Case
    kernel: Kernel
    chip: Chip
    turn: Turn
    resident: Resident

    @property
    def most(self) -> float:
        return self.chip.tflops(4 * self.turn.flops / self.turn.bound)

    @property
    def with_these_warps(self) -> float:
        warps = max(self.resident.warps, 1e-9)
        return self.chip.tflops(4 * self.turn.flops / max(self.turn.bound, self.turn.alone() / warps))


def figures(case: Case, kernel: Kernel, chip: Chip, reuse: float = 1.0) -> Figures:
    """reuse: how many products read a tile as their right operand that TMA writes once, for wgmma kernels."""
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
    kinds = "|".join(COUNTED)
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


# FLOPs per score and element of the head size; 10 count as the backward pass's.
COUNTED = {"forward": 4, "dkdv": 8, "dq": 6, "fused": 10}
PASSES = (
    ("forward", ("forward",), 4),
    ("backward", ("dkdv", "dq"), 10),
    ("backward, one walk", ("fused",), 10),
    ("both", ("forward", "dkdv", "dq"), 14),
)
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


class Whole(NamedTuple):
    """A pass of several kernels, in TFLOP/s as papers count them."""

    chip: str
    what: str  # of PASSES
    head_dim: int
    family: str
    tflops: float
    published: dict[str, float]  # ratio to


def wholes(found: list[Figures]) -> list[Whole]:
    """Forward; dK dV and dQ as one backward pass, 10 FLOPs counted where 14 are computed; both as 14 of 18."""
    time: dict[tuple[str, str, int], dict[str, float]] = {}  # per score and element of the head size
    for one in found:
        kind, size = pass_of(one.case) or ("", 0)
        family = "triton" if isinstance(one.case.source, Triton) else f"sm_{90 if one.kernel.count('HGMMA') else 80}"
        key = one.chip.name, family, size
        time.setdefault(key, {})[kind] = COUNTED[kind] / one.with_these_warps
    rows = []
    for (chip, family, size), parts in time.items():
        for what, kinds, flops in PASSES:
            if all(kind in parts for kind in kinds):
                tflops = flops / sum(parts[kind] for kind in kinds)
                known = PUBLISHED.get((chip, what.split(",")[0]), {})
                ratios = {name: tflops / by_size[size] for name, by_size in known.items() if size in by_size}
                rows.append(Whole(chip, what, size, family, tflops, ratios))
    return rows


def unclassified(instructions: list[Instruction]) -> Counter[str]:
    """What the model takes for an instruction of the integer pipe, by opcode: to look over."""
    named = (*sass.TENSOR, *MUFU_OPS, *FMA_OPS, *HALF_FMA_OPS, *MEMORY_OPS, *CONTROL_OPS)
    return Counter(x.name.split(".")[0] for x in instructions if not x.is_a(*named) and not is_uniform(x))
