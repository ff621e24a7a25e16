"""Planted bugs: PTX text in, PTX texts with one bug each out.

A family is a function `(ptx, entry) -> list[Mutant]`; `mutants` runs them all. A mutant is the whole text with one
synchronising instruction removed, moved or weakened (or one operand of a matrix multiplication swapped) within the
kernel `entry`; it still assembles. Whether it is a bug is another matter: some are equivalent to the original.

Plain text to plain text: nothing here knows the simulator, nor any kernel.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["FAMILIES", "Instruction", "Mutant", "entries", "instructions", "mutants"]


@dataclass(frozen=True)
class Mutant:
    """One planted bug: `name` says which, `line` (from 1) where in the original, `text` is the mutated PTX."""

    name: str
    line: int
    text: str


@dataclass(frozen=True)
class Instruction:
    """One instruction within a PTX text, from `start` to `end` (which is past its semicolon)."""

    start: int
    end: int
    line: int
    predicate: str  # "@%p1", "@!%p1" or ""
    opcode: str  # with all modifiers
    operands: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.opcode} at line {self.line}"

    def is_(self, *prefixes: str) -> bool:
        """Whether the opcode's first words are one of these, as in "bar.sync"."""
        return any(self.opcode == p or self.opcode.startswith(p + ".") for p in prefixes)

    def rendered(self, opcode: str | None = None, operands: Iterable[str] | None = None) -> str:
        """The instruction again, with another opcode or other operands."""
        listed = ", ".join(self.operands if operands is None else operands)
        return f"{self.predicate} {opcode or self.opcode} {listed};".lstrip()


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_TOKEN = re.compile(
    r"""\s+
      | //[^\n]* | /\*.*?\*/
      | \.(?:loc|file)\b[^\n]*                    # ends with its line, not with a semicolon
      | \.[^;]*;
      | (?P<scope>[{}])
      | (?P<label>[\w$%]+)\s*:(?!:)
      | (?P<instruction>(?P<predicate>@!?[\w$%]+)?\s*(?P<opcode>[a-z][\w.:]*)(?P<operands>[^;]*);)""",
    re.VERBOSE | re.DOTALL,
)


def entries(ptx: str) -> list[str]:
    """The names of the kernels in a PTX text, in order."""
    return _ENTRY.findall(ptx)


def _body(ptx: str, entry: str | None) -> int:
    """Where the entry's body begins: its opening brace."""
    matches = [m for m in _ENTRY.finditer(ptx) if entry is None or m[1] == entry]
    if len(matches) != 1:
        wanted = "exactly one entry" if entry is None else f"entry {entry!r}"
        raise ValueError(f"ptx: found the entries {entries(ptx)}; expected {wanted}")
    depth = 0
    for position in range(matches[0].end() - 1, len(ptx)):
        depth += {"(": 1, ")": -1}.get(ptx[position], 0)
        if ptx[position] == "{" and depth == 0:
            return position
    raise ValueError(f"ptx: entry {matches[0][1]!r} has no body")


def _split(operands: str) -> tuple[str, ...]:
    """At the commas outside of braces, brackets and parentheses."""
    parts, depth = [""], 0
    for character in operands:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(stripped for part in parts if (stripped := " ".join(part.split())))


def _scan(ptx: str, entry: str | None) -> tuple[list[Instruction], dict[str, tuple[int, int]]]:
    """The instructions of an entry, and for each label where it starts and ends."""
    found: list[Instruction] = []
    labels: dict[str, tuple[int, int]] = {}
    position = _body(ptx, entry)
    line, counted, depth = 1, 0, 0
    while True:
        token = _TOKEN.match(ptx, position)
        if token is None:
            number = ptx.count("\n", 0, position) + 1
            raise ValueError(f"ptx: line {number} isn't understood: {ptx[position:].splitlines()[0]!r}")
        if token["instruction"]:
            line, counted = line + ptx.count("\n", counted, position), position
            operands = _split(re.sub(r"//[^\n]*|/\*.*?\*/", " ", token["operands"], flags=re.DOTALL))
            found.append(Instruction(position, token.end(), line, token["predicate"] or "", token["opcode"], operands))
        elif token["label"]:
            labels[token["label"]] = (position, token.end())
        elif token["scope"]:
            depth += 1 if token["scope"] == "{" else -1
            if depth == 0:
                return found, labels
        position = token.end()


def instructions(ptx: str, entry: str | None = None) -> list[Instruction]:
    """The instructions of one kernel in textual order.

    `entry` may be left out if the text has one kernel only. Raises ValueError if it isn't there, or at text that isn't
    PTX.
    """
    return _scan(ptx, entry)[0]


def _edited(ptx: str, *edits: tuple[int, int, str]) -> str:
    for start, end, new in sorted(edits, reverse=True):
        ptx = ptx[:start] + new + ptx[end:]
    return ptx


def _replaced(ptx: str, family: str, change: str, instruction: Instruction, new: str) -> Mutant:
    text = _edited(ptx, (instruction.start, instruction.end, new))
    return Mutant(f"{family}: {change} {instruction.label}", instruction.line, text)


def _dropper(family: str, *opcodes: str) -> Callable[[str, str | None], list[Mutant]]:
    def drop(ptx: str, entry: str | None = None) -> list[Mutant]:
        return [_replaced(ptx, family, "drop", i, "") for i in instructions(ptx, entry) if i.is_(*opcodes)]

    drop.__doc__ = f"Every {', '.join(opcodes)} dropped, one at a time."
    return drop


drop_barrier = _dropper("drop_barrier", "bar.sync", "bar.warp.sync", "barrier.sync", "barrier.cta.sync")
drop_arrive = _dropper("drop_arrive", "mbarrier.arrive", "bar.arrive", "barrier.arrive", "barrier.cta.arrive")
drop_commit = _dropper("drop_commit", "cp.async.commit_group", "cp.async.bulk.commit_group", "wgmma.commit_group")
drop_fence = _dropper("drop_fence", "fence", "membar", "wgmma.fence")


_WAIT_GROUPS = ("cp.async.wait_group", "cp.async.bulk.wait_group", "wgmma.wait_group")


def loosen_wait(ptx: str, entry: str | None = None) -> list[Mutant]:
    """Every wait lets go too early, one at a time.

    wait_group n: n + 1 may be under way; a bulk group that is waited for altogether is waited for .read only;
    wait_all and griddepcontrol.wait: gone; mbarrier.try_wait and test_wait: always true.
    """
    result = []
    for i in instructions(ptx, entry):
        if i.is_(*_WAIT_GROUPS):
            more = i.rendered(operands=[str(int(i.operands[0]) + 1)])
            result.append(_replaced(ptx, "loosen_wait", f"{i.operands[0]} + 1 groups in", i, more))
            if i.is_("cp.async.bulk.wait_group") and ".read" not in i.opcode:
                read = i.rendered(opcode=i.opcode + ".read")
                result.append(_replaced(ptx, "loosen_wait", "reads only in", i, read))
        elif i.is_("cp.async.wait_all", "griddepcontrol.wait"):
            result.append(_replaced(ptx, "loosen_wait", "drop", i, ""))
        elif i.is_("mbarrier.try_wait", "mbarrier.test_wait"):
            true = i.rendered("setp.eq.u32", [i.operands[0], "0", "0"])
            result.append(_replaced(ptx, "loosen_wait", "don't wait in", i, true))
    return result


def flip_parity(ptx: str, entry: str | None = None) -> list[Mutant]:
    """Every wait on a phase's parity waits for the other one."""
    result = []
    for i in instructions(ptx, entry):
        if i.is_("mbarrier.try_wait.parity", "mbarrier.test_wait.parity"):
            result.append(_with_shifted(ptx, "flip_parity", "other parity in", i, 2, "xor.b32"))
    return result


def _with_shifted(ptx: str, family: str, change: str, i: Instruction, operand: int, opcode: str, by: int = 1) -> Mutant:
    """Operand number `operand` becomes `opcode` of it and `by`, in a scope of its own."""
    operands = list(i.operands)
    before, operands[operand] = operands[operand], "%mutant"
    new = f"{{ .reg .b32 %mutant; {opcode} %mutant, {before}, {by}; {i.rendered(operands=operands)} }}"
    return _replaced(ptx, family, change, i, new)


def shift_count(ptx: str, entry: str | None = None) -> list[Mutant]:
    """Every expected byte count of an mbarrier, and every count of its arrivals, one too many and one too few."""
    result = []
    for i in instructions(ptx, entry):
        if i.is_("mbarrier.init"):
            operand = 1
        elif i.is_("mbarrier.arrive.expect_tx", "mbarrier.expect_tx"):
            operand = len(i.operands) - 1
        else:
            continue
        for by in (1, -1):
            result.append(_with_shifted(ptx, "shift_count", f"{by:+d} in", i, operand, "add.s32", by))
    return result


_LOCATION = re.compile(r"^\s*\.loc\b[^\n]*", re.MULTILINE)


def _locations(ptx: str, entry: str | None, found: list[Instruction]) -> list[str]:
    """The .loc directive that each instruction stands under; its own line where there is none."""
    where = list(_LOCATION.finditer(ptx, _body(ptx, entry)))
    numbers = [bisect_right(where, i.start, key=lambda m: m.start()) - 1 for i in found]
    return [where[n][0].strip() if n >= 0 else f"line {i.line}" for n, i in zip(numbers, found, strict=True)]


def swap_operands(ptx: str, entry: str | None = None) -> list[Mutant]:
    """Operands of every mma swapped: registers of a fragment, the descriptors of a wgmma, the transposition of B.

    Of the copies that unrolling makes of one multiplication, which share a source location, only the first and last.
    """
    result = []
    found = instructions(ptx, entry)
    copies: dict[tuple[str, str], list[int]] = {}
    for number, location in enumerate(_locations(ptx, entry, found)):
        copies.setdefault((found[number].opcode, location), []).append(number)
    chosen = [found[n] for n in sorted({n for same in copies.values() for n in (same[0], same[-1])})]

    def swapped_registers(i: Instruction, operand: int, first: int, second: int, change: str) -> None:
        registers = list(_split(i.operands[operand][1:-1]))
        registers[first], registers[second] = registers[second], registers[first]
        operands = [*i.operands[:operand], "{" + ", ".join(registers) + "}", *i.operands[operand + 1 :]]
        result.append(_replaced(ptx, "swap_operands", change, i, i.rendered(operands=operands)))

    for i in chosen:
        if i.is_("mma.sync"):
            if i.operands[1].count(",") == 3:
                swapped_registers(i, 1, 1, 2, "a[1] and a[2] in")
            if i.operands[2].count(",") == 1:
                swapped_registers(i, 2, 0, 1, "b[0] and b[1] in")
        elif i.is_("wgmma.mma_async"):
            if i.operands[1].startswith("{"):
                swapped_registers(i, 1, 1, 2, "a[1] and a[2] in")
            else:
                d, a, b, *rest = i.operands
                swapped = i.rendered(operands=[d, b, a, *rest])
                result.append(_replaced(ptx, "swap_operands", "a and b in", i, swapped))
            # The last immediate, unless there are no transpositions (other than 16-bit operands)
            if len(i.operands) == (7 if i.operands[1].startswith("{") else 8):
                other = {"0": "1", "1": "0"}[i.operands[-1]]
                turned = i.rendered(operands=[*i.operands[:-1], other])
                result.append(_replaced(ptx, "swap_operands", f"transposition {other} in", i, turned))
    return result


def weaken_order(ptx: str, entry: str | None = None) -> list[Mutant]:
    """Every acquire and every release becomes relaxed."""
    result = []
    for i in instructions(ptx, entry):
        for word in (".acquire", ".release", ".acq_rel"):
            if i.is_("ld", "st", "red", "atom") and word in i.opcode:
                weak = i.rendered(opcode=i.opcode.replace(word, ".relaxed"))
                result.append(_replaced(ptx, "weaken_order", "relax", i, weak))
    return result


_RELEASES = ("mbarrier.arrive", "bar.arrive", "barrier.arrive", "barrier.cta.arrive")
_ACCESSES = ("ld.shared", "st.shared", "ldmatrix", "stmatrix")


def release_early(ptx: str, entry: str | None = None) -> list[Mutant]:
    """Every stage handed over before the work on it is done, one at a time.

    Where a wgmma.wait_group comes before the release, the wait moves behind it (to where the warp is together again if
    only some lanes release). Where accesses to shared memory come before it, the release moves, with what its address
    is computed from, before the first of them in its block of straight-line code. And a block-wide barrier that makes
    room for cp.async moves behind the copies, to the commit that ends their group.
    """
    found, labels = _scan(ptx, entry)
    starts = sorted(start for start, _ in labels.values())
    result = []
    for position, release in enumerate(found):
        if release.is_(*_RELEASES) and not release.is_("mbarrier.arrive.expect_tx"):
            mutant = _release_before(ptx, found, labels, starts, position)
            if mutant is not None:
                result.append(mutant)
        if release.is_("bar.sync", "barrier.sync", "barrier.cta.sync"):
            mutant = _barrier_behind_copies(ptx, found, position)
            if mutant is not None:
                result.append(mutant)
    return result


def _release_before(
    ptx: str, found: list[Instruction], labels: dict[str, tuple[int, int]], starts: list[int], position: int
) -> Mutant | None:
    release = found[position]
    for guard in reversed(found[:position]):
        if guard.is_("wgmma.wait_group"):
            between = [i for i in found if guard.start < i.start < release.start]
            joins = [labels[i.operands[0]] for i in between if i.is_("bra") and i.predicate and i.operands[0] in labels]
            there = max([release.end, *(end for start, end in joins if start > release.start)])
            wait = ptx[guard.start : guard.end]
            text = _edited(ptx, (guard.start, guard.end, ""), (there, there, f"\n\t{wait}"))
            return Mutant(f"release_early: {release.label} before {guard.label}", release.line, text)
        if guard.is_(*_ACCESSES, *_RELEASES, "bar", "barrier", "mbarrier"):
            break
    # The straight-line code before the release; a branch around the release counts as its predicate
    block_start = max((s for s in starts if s < release.start), default=0)
    block = [i for i in found[:position] if i.start > block_start]
    predicate = release.predicate
    for index in reversed(range(len(block))):
        i = block[index]
        around = i.is_("bra") and i.predicate and labels.get(i.operands[0], (0, 0))[0] > release.start
        if around and not predicate:
            predicate = i.predicate.replace("@!", "@") if "!" in i.predicate else i.predicate.replace("@", "@!")
        elif i.is_("bra", "ret", "exit", "bar", "barrier", "mbarrier"):
            block = block[index + 1 :]
            break
    first = next((n for n, i in enumerate(block) if i.is_(*_ACCESSES)), None)
    if first is None:
        return None
    # What the release's operands are computed from, among the instructions that it is to overtake
    moved, edits = [f"{predicate} {release.rendered()}" if predicate != release.predicate else release.rendered()], []
    needed = set(_registers([predicate, *release.operands]))
    for i in reversed(block[first:]):
        if i.operands and not i.is_("st", "bra") and needed & set(_registers(i.operands[:1])):
            if i.is_("ld", "ldmatrix"):
                return None
            moved.append(i.rendered())
            edits.append((i.start, i.end, ""))
            needed |= set(_registers([i.predicate, *i.operands[1:]]))
    guard = block[first]
    edits += [(release.start, release.end, ""), (guard.start, guard.start, "\n\t".join(reversed(moved)) + "\n\t")]
    return Mutant(f"release_early: {release.label} before {guard.label}", release.line, _edited(ptx, *edits))


def _registers(operands: Iterable[str]) -> list[str]:
    return [r for operand in operands for r in re.findall(r"[%$\w]+", operand) if not r.isdigit()]


def _barrier_behind_copies(ptx: str, found: list[Instruction], position: int) -> Mutant | None:
    barrier, copies = found[position], False
    for i in found[position + 1 :]:
        if i.is_("cp.async.ca", "cp.async.cg"):
            copies = True
        elif i.is_("cp.async.commit_group"):
            if not copies:
                return None
            text = _edited(
                ptx, (barrier.start, barrier.end, ""), (i.start, i.start, ptx[barrier.start : barrier.end] + "\n\t")
            )
            return Mutant(f"release_early: {barrier.label} behind the copies", barrier.line, text)
        elif i.is_("bar", "barrier", "cp.async", "mbarrier", "ret", "exit"):
            return None
    return None


FAMILIES: dict[str, Callable[[str, str | None], list[Mutant]]] = {
    "drop_barrier": drop_barrier,
    "drop_arrive": drop_arrive,
    "drop_commit": drop_commit,
    "drop_fence": drop_fence,
    "loosen_wait": loosen_wait,
    "flip_parity": flip_parity,
    "shift_count": shift_count,
    "swap_operands": swap_operands,
    "weaken_order": weaken_order,
    "release_early": release_early,
}


def mutants(ptx: str, entry: str | None = None, families: Iterable[str] = tuple(FAMILIES)) -> list[Mutant]:
    """Every mutant of one kernel, family by family.

    `entry` may be left out if the text has one kernel only. Raises ValueError at an unknown family or entry, or at
    text that isn't PTX.
    """
    for family in families:
        if family not in FAMILIES:
            raise ValueError(f"families: {family!r} is unknown; expected some of {', '.join(FAMILIES)}")
    return [mutant for family in families for mutant in FAMILIES[family](ptx, entry)]
