"""Does the simulator see bugs? Every planted bug of every test kernel, run and judged.

    python -m ptxsim.planted_bugs            (with tests/ on the path; `make planted-bugs`)

prints a table: one line per kernel and family of bugs, then every survivor with the argument why the mutated kernel is
equivalent to the original. tests/ptxsim/test_planted_bugs.py holds the table to it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ptxsim import PtxError, SimulationError, mutate

SEEDS = (None, 0, 1)


@dataclass(frozen=True)
class Subject:
    """A kernel to plant bugs in: `run(text, seed)` executes it with this PTX and raises where the results are wrong."""

    name: str
    entry: str
    text: str
    run: Callable[[str, int | None], None]


@dataclass(frozen=True)
class Verdict:
    subject: str
    family: str
    mutant: str  # words, with the line in the source rather than in the PTX, which changes with the compiler
    caught_by: str | None  # Hazard, Fault, Deadlock, results; None: it survived
    why: str | None = None  # of a survivor: the argument that it is equivalent


# (subject, mutant) as regular expressions -> why such a mutant is no bug. Each must be used by some survivor.
EQUIVALENT: list[tuple[str, str, str]] = [
    (
        "tma_copy_.*|bulk_copy_reduce|flash_sm90_.*",
        r"drop fence\.mbarrier_init",
        "the fence is for the other blocks of a cluster; in a block alone, program order and bar.sync order the "
        "initialisation before every use (Triton leaves it out there: see forward_host_descriptors)",
    ),
    (
        "programmatic_launch",
        r"drop griddepcontrol\.wait",
        "a launch of one grid has nothing to wait for; what the instruction orders lies outside of the simulator",
    ),
    (
        "flash_sm80_.*",
        "behind the copies",
        "two barriers a block and two stages: who passed the barrier before has done with the stage that is loaded now",
    ),
    (
        "forward_pointers_sm.*",
        r"bar\.sync at source line 66",
        "before the loop: nobody has read the second stage yet, whose first copies start here. In the loop of sm_90: "
        "the readers are wgmmas, which are over for all warps once one has waited, and each thread's copies for a "
        "stage are ordered by the barrier after its wait_group",
    ),
    (
        "forward_pointers_sm.*",
        r"drop cp\.async\.commit_group at source line 66",
        "before the loop: K's group becomes one with V's of the same stage, and the loop waits for both at once",
    ),
    (
        "forward_pointers_sm.*",
        r"groups in cp\.async\.wait_group at source line 63",
        "after the loop: the last group fills with zeros what lies past the end, a stage that the epilogue doesn't use",
    ),
    (
        "forward_pointers_sm90",
        r"drop bar\.sync at source line 63",
        "after the loop: every reader was a wgmma, over for all warps, and the pending copies fill another stage",
    ),
    (
        "forward_pointers_sm90",
        r"drop fence\.proxy\.async\.shared::cta at source line 67",
        "before the loop: the loop has a fence of its own before every wgmma, behind a barrier that orders Q's stores",
    ),
    (
        "forward_host_descriptors_sm90",
        r"drop bar\.sync at source line (94|96|100|101)",
        "before the loop: each time another barrier follows between mbarrier.init and whoever waits. In and after the "
        "loop: one thread refills a stage after its own wgmma.wait_group, when the wgmmas that read the stage are over "
        "for all warps, and all warps must have passed the mbarrier's phase to have issued them",
    ),
    (
        "forward_rich_sm80",
        r"drop bar\.sync at source line 183",
        "before the epilogue: it takes Q's place, which was last read several barriers earlier",
    ),
    (
        "row_reductions_sm80",
        r"drop bar\.sync at source line (217|218)",
        "the indices have just been read from the second half of the scratch memory; the stores go to the first, which "
        "was last read a barrier earlier",
    ),
    (
        "forward_rich_sm80|atomic_updates_sm80",
        r"relax atom\.",
        "Triton's atomics are acquire and release by default; here nothing else is ordered by them",
    ),
]


def judge(subject: Subject) -> Iterator[Verdict]:
    """Runs every mutant of the subject: the fixed schedule first, then drawn ones until something shows."""
    lines = subject.text.splitlines()
    for mutant in mutate.mutants(subject.text, subject.entry):
        caught = None
        for seed in SEEDS:
            caught = _outcome(subject, mutant.text, seed)
            if caught:
                break
        family, _, words = mutant.name.partition(": ")
        words = re.sub(r"at line (\d+)", lambda m: f"at {source_line(lines, int(m[1]))}", words)
        why = None
        if caught is None:
            why = next((w for s, m, w in EQUIVALENT if re.fullmatch(s, subject.name) and re.search(m, words)), None)
        yield Verdict(subject.name, family, words, caught, why)


def _outcome(subject: Subject, text: str, seed: int | None) -> str | None:
    try:
        subject.run(text, seed)
    except SimulationError as error:
        return type(error).__name__
    except AssertionError:
        return "results"
    except PtxError as error:
        # A mutant must be a kernel: one that doesn't decode would count as caught without having been run.
        raise AssertionError(f"a mutant of {subject.name} isn't valid PTX: {error}") from error
    return None


def source_line(lines: list[str], number: int) -> str:
    """The source line of a line of PTX, by the .loc before it."""
    for line in reversed(lines[: number - 1]):
        if m := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            return f"source line {m[2]}" if m[1] == "1" else f"line {m[2]} of file {m[1]}"
        if ".entry" in line:
            break
    return f"PTX line {number}"


def subjects() -> list[Subject]:
    """The kernels of tests/ptxsim/kernels, CUDA and Triton, in cases as small as show every stage twice."""
    from ptxsim.kernels import references, triton_cases

    return [*references.subjects(), *triton_cases.subjects()]


def report(verdicts: list[Verdict]) -> str:
    """The table as text."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    table = Table("kernel", "bugs", "planted", "hazard", "fault", "deadlock", "results", "equivalent", "MISSED")
    groups: dict[tuple[str, str], Counter] = {}
    for v in verdicts:
        key = v.caught_by or ("equivalent" if v.why else "MISSED")
        groups.setdefault((v.subject, v.family), Counter())[key] += 1
    columns = ("Hazard", "Fault", "Deadlock", "results", "equivalent", "MISSED")
    for (subject, family), counts in groups.items():
        table.add_row(subject, family, str(counts.total()), *(str(counts[c] or "") for c in columns))
    totals = sum(groups.values(), Counter())
    table.add_section()
    table.add_row("all", "", str(totals.total()), *(str(totals[c] or "") for c in columns))
    console.print(table)
    for v in verdicts:
        if v.caught_by is None:
            console.print(f"{v.subject}: {v.mutant}: {v.why or 'MISSED'}", highlight=False, soft_wrap=True)
    return console.export_text()


def main() -> int:
    verdicts = [v for subject in subjects() for v in judge(subject)]
    print(report(verdicts))
    return int(any(v.caught_by is None and not v.why for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
