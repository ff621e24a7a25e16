"""A kernel's loops as its SASS has them: which instructions one turn of the inner loop issues, in which order.

Loops are found in the control flow (natural loops, by dominators), since compilers put waiting and other rare blocks
behind the end of a function. Of the ways through a loop the one counts that does the loop's work: of all the ways with
the most instructions of `WORK`, the shortest. Masks at the edge of a band, and the spinning of a wait, are left out so.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .binary import GateError, Kernel, unpack

TENSOR = ("HMMA", "HGMMA", "IMMA", "DMMA", "QMMA", "OMMA", "UTCHMMA")
WORK = (*TENSOR, "MUFU", "LDSM", "LDS", "STS", "STSM", "LDGSTS", "UTMALDG", "UBLKCP", "SHFL", "BAR", "WARPGROUP")


class Instruction(NamedTuple):
    """One line of SASS: "HGMMA.64x128x16.F32.BF16", "R24, R156, gdesc[UR12].tnspB, R24"."""

    address: int
    guard: str  # "@!P0", or ""
    name: str
    operands: str

    def __str__(self) -> str:
        return f"{self.name} {self.operands}".strip()

    def is_a(self, *opcodes: str) -> bool:
        """Whether it is one of these, with any modifiers behind those given."""
        return any(self.name == opcode or self.name.startswith(f"{opcode}.") for opcode in opcodes)


@dataclass
class Loop:
    """A turn: instructions, and loops within it that may take several turns of their own."""

    header: int  # address
    blocks: frozenset[int] = field(repr=False)
    items: list[Instruction | Loop] = field(default_factory=list, repr=False)

    def inner(self) -> list[Loop]:
        return [item for item in self.items if isinstance(item, Loop)]

    def flat(self) -> list[Instruction]:
        """Every instruction, those of loops within once."""
        return [x for item in self.items for x in (item.flat() if isinstance(item, Loop) else [item])]

    def count(self, *opcodes: str) -> int:
        return sum(x.is_a(*opcodes) for x in self.flat())

    def turn(self, claimed: dict[str, int] | None = None) -> list[tuple[Instruction, int]]:
        """Every instruction with how often a turn issues it. How many turns the loops with tensor-core instructions
        take within this one follows from `claimed`, which says how many instructions of a kind there are."""
        nested = [loop for loop in self.inner() if loop.count(*TENSOR)]
        turns = 1
        for opcode, wanted in (claimed or {}).items():
            inside = sum(loop.count(opcode) for loop in nested)
            outside = self.count(opcode) - inside
            if inside:
                turns, rest = divmod(wanted - outside, inside)
                if rest or turns < 1:
                    raise GateError(f"{outside} {opcode} and {inside} in loops within can't be {wanted} in all")
            elif outside != wanted:
                raise GateError(f"{outside} {opcode} in a turn of the inner loop, {wanted} claimed")
        found = []
        for item in self.items:
            if isinstance(item, Loop):
                found += [(x, turns if item in nested else 1) for x in item.flat()]
            else:
                found.append((item, 1))
        return found


def parse(listing: str) -> list[Instruction]:
    """The lines of a listing as `binary.unpack` returns it, or as cuobjdump prints it."""
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;"
    return [Instruction(int(at, 16), guard, name, rest) for at, guard, name, rest in re.findall(pattern, listing)]


def without_address(kernel: Kernel) -> list[Instruction]:
    """The products that read shared memory by a descriptor which doesn't come, on every way there, of an address: of
    14 bits cut from one, as its low word has them. What is added before the address is there, ptxas (12.8) takes from
    whatever is in the register."""
    return _without_address(kernel.packed) if kernel.count("HGMMA") else []


@functools.lru_cache(64)
def _without_address(packed: str) -> list[Instruction]:
    blocks, successors = control_flow(parse(unpack(packed)))
    before: dict[int, list[int]] = {at: [] for at in blocks}
    for at, targets in successors.items():
        for target in targets:
            before[target].append(at)
    # Of a block and a register: the instructions that write it, in order, and which of their words it is.
    writers: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for at, block in blocks.items():
        for i, x in enumerate(block):
            for word, register in enumerate(_written(x)):
                writers.setdefault((at, register), []).append((i, word))
    asked: set[tuple[int, int, str]] = set()  # values: a block, the instruction in it (-1: none), the register
    refuted: set[tuple[int, int, str]] = set()

    def comes_of_address(at: int, n: int, register: str) -> bool:
        """Of what a register holds before instruction n of a block."""
        places = writers.get((at, register), [])
        last = bisect.bisect_left(places, (n,))
        i, word = places[last - 1] if last else (-1, 0)
        value = at, i, register
        if value not in asked:
            asked.add(value)  # and taken to be right meanwhile: a way that comes back to itself adds nothing
            if i >= 0:
                x = blocks[at][i]
                right = made_of_address(at, i, x, word) and (not x.guard or comes_of_address(at, i, register))
            else:
                ways = before[at]
                right = bool(ways) and all(comes_of_address(one, len(blocks[one]), register) for one in ways)
            if not right:
                refuted.add(value)
        return value not in refuted

    def made_of_address(at: int, i: int, x: Instruction, word: int) -> bool:
        if re.search(r", 0x3fff\b", x.operands) or (x.is_a("SGXT", "USGXT") and x.operands.endswith(" 0xe")):
            return True
        if x.is_a("LDL"):
            return (slot := _slot(x)) is not None and comes_of_address(at, i, f"[{slot + 4 * word}]")
        if not x.is_a("STL", *_PASSING_ON):
            return False
        sources = re.findall(r"(?<![\w\[])(U?R)(\d+)", x.operands.partition(",")[2])
        return any(comes_of_address(at, i, f"{kind}{int(number) + word}") for kind, number in sources)

    def by_address(at: int, n: int, x: Instruction) -> bool:
        first = re.search(r"gdesc\[UR(\d+)\]", x.operands) if x.is_a("HGMMA") else None
        # The first operand's, unless that is in registers; then the second's.
        words = () if first is None else (2,) if re.match(r"R\d+, R", x.operands) else (0, 2)
        return all(comes_of_address(at, n, f"UR{int(first[1]) + word}") for word in words)

    # What is refuted stays so; what wasn't is right once nothing more is, since then each leans on others as right.
    found, known = [], -1
    while known < len(refuted):
        known = len(refuted)
        asked = refuted.copy()
        found = [x for at, block in blocks.items() for n, x in enumerate(block) if not by_address(at, n, x)]
    return found


_PASSING_ON = ("MOV", "UMOV", "IMAD", "R2UR", "IADD3", "UIADD3", "VIADD", "LOP3", "ULOP3", "SEL", "USEL", "SHFL")


def _written(x: Instruction) -> list[str]:
    """The registers, and words of the stack by their place, that an instruction writes, as far as values of descriptors
    may be in them."""
    if x.is_a("STL"):
        words = 4 if ".128" in x.name else 2 if ".64" in x.name else 1
        return [] if (slot := _slot(x)) is None else [f"[{slot + 4 * n}]" for n in range(words)]
    result = re.match(r"(U?R)(\d+)\b", x.operands)
    if result is None or x.is_a("BRA", "BRX", "RET"):
        return []
    if product := re.match(r"HGMMA\.64x(\d+)x", x.name):
        width = int(product[1]) // 2
    elif re.search(r"\.128|88\.4", x.name):
        width = 4
    else:
        width = 2 if re.search(r"\.64|\.WIDE|88\.2|^CS2R", x.name) else 1
    return [f"{result[1]}{int(result[2]) + n}" for n in range(width)]


def _slot(x: Instruction) -> int | None:
    """Where on the stack it loads or stores."""
    found = re.search(r"\[R1(?:\+(0x[0-9a-f]+))?\]", x.operands)
    return int(found[1] or "0", 16) if found else None


def main_loop(kernel: Kernel) -> Loop:
    """The loop over blocks of keys, or of queries: the innermost that has tensor-core instructions, and exponentials
    where any such loop has; of several the one with the most tensor-core instructions, then the shortest."""
    return _main_loop(kernel.packed)


@functools.lru_cache(64)
def _main_loop(packed: str) -> Loop:
    found = [loop for loop in loops(parse(unpack(packed))) if loop.count(*TENSOR)]
    found = [loop for loop in found if loop.count("MUFU.EX2")] or found
    innermost = [loop for loop in found if not any(other.blocks < loop.blocks for other in found)]
    if not innermost:
        raise GateError("no loop with tensor-core instructions")
    return min(innermost, key=lambda loop: (-loop.count(*TENSOR), len(loop.flat())))


def spilled_in_loops(kernel: Kernel) -> tuple[int, int]:
    """Bytes that the inner loops with tensor-core instructions store to local memory and load from it, of the first of
    a kernel's two walks over its blocks."""
    return _spilled_in_loops(kernel.packed)


@functools.lru_cache(64)
def _spilled_in_loops(packed: str) -> tuple[int, int]:
    program = parse(unpack(packed))
    blocks, successors = control_flow(program)
    found = [loop for loop in loops(program) if loop.count(*TENSOR)]
    innermost = [loop for loop in found if not any(other.blocks < loop.blocks for other in found)]

    def followers(loop: Loop) -> int:
        seen, todo = set(), [loop.header]
        while todo:
            if (at := todo.pop()) not in seen:
                seen.add(at)
                todo += successors[at]
        return sum(other.header in seen for other in innermost)

    if not innermost or len(innermost) % 2:
        raise GateError(f"{len(innermost)} inner loops with tensor-core instructions; two walks have an even number")
    first = sorted(innermost, key=followers, reverse=True)[: len(innermost) // 2]
    every = [x for loop in first for at in loop.blocks for x in blocks[at]]
    return _local_bytes(every, "STL"), _local_bytes(every, "LDL")


def _local_bytes(instructions: Iterable[Instruction], opcode: str) -> int:
    """The width is a modifier: none for 4 bytes."""
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    return sum(
        next((widths[part] for part in x.name.split(".")[1:] if part in widths), 4)
        for x in instructions
        if x.is_a(opcode)
    )


def setmaxnreg(kernel: Kernel) -> list[tuple[int, int]]:
    """Of every USETMAXREG: the registers used by the code that can be reached from it, and those it leaves."""
    return _setmaxnreg(kernel.packed) if kernel.count("USETMAXREG") else []


@functools.lru_cache(64)
def _setmaxnreg(packed: str) -> list[tuple[int, int]]:
    blocks, successors = control_flow(parse(unpack(packed)))
    found = []
    for start, block in blocks.items():
        for n, x in enumerate(block):
            if x.is_a("USETMAXREG"):
                used, seen, todo = registers(block[n + 1 :]), {start}, [*successors[start]]
                while todo:
                    if (at := todo.pop()) not in seen:
                        seen.add(at)
                        todo += successors[at]
                        used = max(used, registers(blocks[at]))
                found.append((used, int(x.operands.split()[-1], 16)))
    return found


def registers(instructions: Iterable[Instruction]) -> int:
    """One more than the highest that they name or, where they take pairs or fours, may mean. What is filled by more at
    a time, as accumulators are, counts where it is read by name."""
    most = -1
    for x in instructions:
        wide = 4 if ".128" in x.name else 2 if ".64" in x.name or ".WIDE" in x.name else 1
        for number, pair in re.findall(r"\bR(\d+)(\.64)?", x.operands):
            most = max(most, int(number) + (1 if pair else wide - 1))
    return most + 1


def order(loop: Loop, steps: Sequence[str | tuple[str, int]]) -> str | None:
    """Whether a turn of the loop, begun at some place, passes these steps one after the other: None, or what it
    passes instead. A step is reached when its instruction has come so often, before that of the next step comes."""
    wanted = [(step, 1) if isinstance(step, str) else step for step in steps]
    turn = loop.flat()

    def matches(x: Instruction, step: str) -> bool:
        opcode, _, operands = step.partition(" ")
        return x.is_a(opcode) and operands in ("", x.operands)

    def holds(start: int) -> bool:
        at = seen = 0
        for x in (*turn[start:], *turn[:start]):
            if at + 1 < len(wanted) and seen < wanted[at][1] and matches(x, wanted[at + 1][0]):
                return False
            if matches(x, wanted[at][0]):
                seen += 1
            if seen == wanted[at][1]:
                at, seen = at + 1, 0
                if at == len(wanted):
                    return True
        return False

    if any(holds(n) for n, x in enumerate(turn) if matches(x, wanted[0][0])):
        return None
    passed: list[list] = []
    for x in turn:
        for step in dict.fromkeys(step for step, _ in wanted):
            if matches(x, step):
                if passed and passed[-1][0] == step:
                    passed[-1][1] += 1
                else:
                    passed.append([step, 1])
    return ", ".join(f"{count} {step}" for step, count in passed) or "none of them"


def loops(program: Sequence[Instruction]) -> list[Loop]:
    """Every loop, inner ones first."""
    blocks, successors = control_flow(program)
    dominators = _dominators(successors)
    predecessors: dict[int, list[int]] = {at: [] for at in blocks}
    for at, targets in successors.items():
        for target in targets:
            predecessors[target].append(at)
    bodies: dict[int, set[int]] = {}
    for at, targets in successors.items():
        for header in targets:
            if at in dominators and header in dominators[at]:
                body = bodies.setdefault(header, {header})
                todo = [at]
                while todo:
                    if (one := todo.pop()) not in body:
                        body.add(one)
                        todo += [p for p in predecessors[one] if p in dominators]
    found: list[Loop] = []
    for header, body in sorted(bodies.items(), key=lambda item: len(item[1])):
        loop = Loop(header, frozenset(body))
        within = [other for other in found if other.blocks < loop.blocks]
        children = [a for a in within if not any(a.blocks < b.blocks for b in within)]
        loop.items = _way_through(loop, children, blocks, successors)
        found.append(loop)
    return found


def control_flow(program: Sequence[Instruction]) -> tuple[dict[int, list[Instruction]], dict[int, list[int]]]:
    """Basic blocks by the address of their first instruction, and which follow each."""
    addresses = [x.address for x in program]
    after = dict(itertools.pairwise(addresses))
    jumps: dict[int, tuple[list[int], bool]] = {}  # targets, and whether the next instruction may follow
    meeting: dict[str, int] = {}  # where the threads that BSSY names meet again
    for x in program:
        if x.is_a("BSSY"):
            barrier, target = x.operands.split(",")[:2]
            meeting[barrier.strip()] = int(target, 16)
        elif x.is_a("BRA", "JMP"):
            *conditions, target = x.operands.split(",")
            falls = bool(x.guard) or any(c.strip() not in ("PT", "UPT") for c in conditions)
            found = re.search(r"0x[0-9a-f]+", target)
            jumps[x.address] = ([int(found[0], 16)] if found else [], falls)
        elif x.is_a("BSYNC") and (target := meeting.get(x.operands.split(",")[0].strip())) is not None:
            jumps[x.address] = ([target], bool(x.guard))
        elif x.is_a("BRX", "JMX"):
            _, _, targets = x.operands.partition("->")
            jumps[x.address] = ([int(target, 16) for target in targets.split()], bool(x.guard))
        elif x.is_a("EXIT", "RET", "BPT", "KILL"):
            jumps[x.address] = ([], bool(x.guard))
    leaders = {addresses[0]} if addresses else set()
    for at, (targets, _) in jumps.items():
        leaders |= {target for target in targets if target in after or target in addresses}
        if at in after:
            leaders.add(after[at])
    blocks: dict[int, list[Instruction]] = {}
    for x in program:
        if x.address in leaders:
            current = blocks[x.address] = []
        current.append(x)
    successors = {}
    for at, block in blocks.items():
        last = block[-1].address
        targets, falls = jumps.get(last, ([], True))
        follows = [after[last]] if falls and last in after else []
        successors[at] = [target for target in dict.fromkeys((*targets, *follows)) if target in blocks]
    return blocks, successors


def _dominators(successors: dict[int, list[int]]) -> dict[int, set[int]]:
    """Of every block that can be reached from the first: the blocks on all ways to it."""
    first = next(iter(successors))
    order, seen, stack = [], {first}, [(first, iter(successors[first]))]
    while stack:
        at, rest = stack[-1]
        for target in rest:
            if target not in seen:
                seen.add(target)
                stack.append((target, iter(successors[target])))
                break
        else:
            order.append(at)
            stack.pop()
    order.reverse()
    predecessors: dict[int, list[int]] = {at: [] for at in order}
    for at in order:
        for target in successors[at]:
            predecessors[target].append(at)
    dominators = {at: set(order) for at in order}
    dominators[first] = {first}
    changed = True
    while changed:
        changed = False
        for at in order[1:]:
            new = set.intersection(*(dominators[p] for p in predecessors[at])) | {at}
            if new != dominators[at]:
                dominators[at], changed = new, True
    return dominators


def _way_through(
    loop: Loop, children: list[Loop], blocks: dict[int, list[Instruction]], successors: dict[int, list[int]]
) -> list[Instruction | Loop]:
    """From the header around to it again."""
    child_of = {at: child for child in children for at in child.blocks}

    def node(at: int) -> int:
        return child_of[at].header if at in child_of else at

    def follow(at: int) -> Iterable[int]:
        if at not in child_of:
            return successors[at]
        inside = child_of[at].blocks
        return dict.fromkeys(target for one in sorted(inside) for target in successors[one] if target not in inside)

    def worth(at: int) -> tuple[int, int]:
        own = child_of[at].flat() if at in child_of else blocks[at]
        return sum(x.is_a(*WORK) for x in own), -len(own)

    best: dict[int, tuple[tuple[int, int], list[int]] | None] = {}

    def search(at: int) -> tuple[tuple[int, int], list[int]] | None:
        if at not in best:
            best[at] = None  # while it is looked for: a way that comes back to itself is none
            ways = []
            for target in follow(at):
                if target == loop.header:
                    ways.append(((0, 0), []))
                elif target in loop.blocks and (way := search(node(target))) is not None:
                    ways.append(way)
            if ways:
                (work, length), rest = max(ways, key=lambda way: way[0])
                own = worth(at)
                best[at] = (work + own[0], length + own[1]), [at, *rest]
        return best[at]

    found = search(node(loop.header))
    items: list[Instruction | Loop] = []
    for at in found[1] if found else []:
        items += [child_of[at]] if at in child_of else blocks[at]
    return items
