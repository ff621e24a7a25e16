"""What a call would take on many cores: its tasks timed one by one and replayed through the kernels' own queue.

`build/ninja/cores` (bench/cores.cpp, `python setup.py build_cores`) runs the kernels of the library. They cut a call
for as many threads as they are told, and one core runs the tasks. The efficiency is what one thread takes of a call cut
for one, over what T threads take together of a call cut for T, measured in turns. All is CPU time, so others may use
the machine. What several cores share isn't in it: memory, the last cache, the clock, and what it takes to wake threads
up.
"""

from __future__ import annotations

import shlex
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from . import report
from .plots import machine_line
from .record import Row

PROGRAM = Path(__file__).resolve().parent.parent / "build" / "ninja" / "cores"
THREADS = (8, 32, 96, 192)
ENOUGH = 50e-6  # seconds of work for each thread: less is not worth more threads
WANTED = 0.85
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
FEWEST = 3  # times of a task: of one alone, what held it up would hold up all that wait for it
TWO = -2  # two real threads, for the program


@dataclass(frozen=True)
class Problem:
    """`mask`: all, causal, packed or prefix, as bench/cores.cpp says."""

    pass_name: str
    dtype: str
    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 64
    mask: str = "all"

    @property
    def name(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_k else f"{self.heads_q}/{self.heads_k}"
        lengths = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q} x {self.seqlen_k}"
        return f"{self.batch} x {heads} x {lengths} x {self.head_dim}"

    @property
    def key(self) -> str:
        """What a row is known by, in every run."""
        return shlex.join((self.pass_name, self.dtype, self.name, self.mask))

    def line(self, threads: int, rounds: int) -> str:
        """What the program reads."""
        sizes = (self.batch, self.heads_q, self.heads_k, self.seqlen_q, self.seqlen_k, self.head_dim)
        words = (self.pass_name, DTYPES[self.dtype], *sizes, self.mask, threads, rounds)
        return " ".join(map(str, words)) + "\n"


def problems() -> list[Problem]:
    """Those of the page: heads of the batch 1 to 64, lengths 128 to 32k."""
    found = []
    for pass_name in ("forward", "backward"):
        sizes = [
            *(("bf16", 1, 1, n, "all") for n in (2048, 8192, 32768)),
            *(("bf16", 8, 8, n, "all") for n in (512, 2048, 8192)),
            *(("bf16", 40, 40, n, "all") for n in (512, 2048)),
            *(("bf16", 64, 64, n, "all") for n in (128, 512, 2048)),
            *((dtype, heads, heads, n, mask)
              for heads, n in ((1, 8192), (8, 2048), (64, 512))
              for dtype, mask in (("fp32", "all"), ("bf16", "causal"))),
            ("bf16", 32, 8, 2048, "causal"),
            ("bf16", 8, 8, 4096, "packed"),
            ("bf16", 8, 8, 4096, "prefix"),
            ("bf16", 32, 8, 8192, "packed"),
        ]  # fmt: skip
        for dtype, heads, heads_k, length, mask in sizes:
            found.append(Problem(pass_name, dtype, 1, heads, heads_k, length, length, mask=mask))
    for dtype, batch, heads, heads_k, keys in (
        ("bf16", 1, 8, 8, 32768), ("bf16", 8, 8, 8, 4096), ("bf16", 1, 32, 8, 32768), ("fp32", 16, 32, 8, 4096),
    ):  # fmt: skip
        found.append(Problem("forward", dtype, batch, heads, heads_k, 1, keys, 128))
    return found


class Answer(NamedTuple):
    """Of bench/cores.cpp: `seconds` of a call; those that one thread takes `alone`; those that `one` thread takes of
    the call cut for it, measured in turns with the other; tasks of the longest phase; bytes that a thread keeps."""

    seconds: float
    alone: float
    one: float
    phases: int
    tasks: int
    scratch: int


class Cores:
    """The program, which answers a line with a line."""

    def __init__(self, program: Path = PROGRAM) -> None:
        if not program.exists():
            raise ValueError(f"{program.name} is not built: python setup.py build_cores")
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def ask(self, problem: Problem, threads: int, rounds: int = 1) -> Answer:
        """Of a call that is cut for so many threads."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(problem.line(threads, rounds))
        self._process.stdin.flush()
        words = self._process.stdout.readline().split()
        if len(words) != 6:
            raise RuntimeError(f"{PROGRAM.name} ended at {problem.line(threads, rounds)!r}")
        seconds, alone, one = map(float, words[:3])
        phases, tasks, scratch = map(int, words[3:])
        return Answer(seconds, alone, one, phases, tasks, scratch)

    def close(self) -> None:
        self._process.communicate()


# Where a thread keeps most: at these many numbers of a head, which its packed caches and its sums just hold.
SCRATCH_LONGEST = {"forward": 1 << 19, "backward": 1 << 18}
SCRATCH_SIZES = (64, 128, 256)


def scratch_problems(pass_name: str, dtype: str) -> list[Problem]:
    """Those that need most scratch, of SCRATCH_SIZES; decode: of the most query heads to one of keys."""
    if pass_name == "decode":
        return [Problem("forward", dtype, 1, 256, 1, 1, 2048, size) for size in SCRATCH_SIZES]
    lengths = [SCRATCH_LONGEST[pass_name] // size for size in SCRATCH_SIZES]
    return [Problem(pass_name, dtype, 1, 1, 1, n, n, size) for n, size in zip(lengths, SCRATCH_SIZES, strict=True)]


def scratch(cores: Cores) -> dict[tuple[str, str], list[float]]:
    """KiB that a thread keeps at most, for SCRATCH_SIZES: of each pass and dtype."""
    return {
        (pass_name, dtype): [cores.ask(problem, 1).scratch / 1024 for problem in scratch_problems(pass_name, dtype)]
        for pass_name in ("forward", "decode", "backward")
        for dtype in DTYPES
    }


def scratch_table(found: dict[tuple[str, str], list[float]]) -> str:
    """In Markdown."""
    lines = [["KiB of a thread", "dtype", *(f"head size {size}" for size in SCRATCH_SIZES)]]
    lines.append(["---"] * len(lines[0]))
    lines += [[pass_name, dtype, *(f"{n:.0f}" for n in sizes)] for (pass_name, dtype), sizes in found.items()]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def measure(cores: Cores, problem: Problem, threads: Sequence[int], turns: int = 3, budget: float = 4.0) -> Row:
    """A row: seconds for 1, 2 (by tasks, and by two real threads) and `threads`, medians of turns."""
    first = cores.ask(problem, 1).seconds
    counts = (2, TWO, *threads)
    rounds = max(FEWEST, min(31, int(budget / first / (2 * len(counts)) / turns) - 1))
    turns = turns if first * 4 * len(counts) * turns < 4 * budget else 1
    found: dict[int, list[Answer]] = {t: [] for t in counts}
    for _ in range(turns):
        for t in counts:
            found[t].append(cores.ask(problem, t, rounds))
    seconds = {t: statistics.median(x.seconds for x in found[t]) for t in counts}
    one = statistics.median(x.one for t in counts for x in found[t])
    return {
        "key": problem.key,
        "case": problem.name,
        "pass": problem.pass_name,
        **{k: v for k, v in asdict(problem).items() if k != "pass_name"},
        "seconds": one,
        "by_two": seconds[2],
        "two": seconds[TWO],
        "threads": list(threads),
        "efficiency": [statistics.median(x.one / t / x.seconds for x in found[t]) for t in threads],
        "enough": [one / t >= ENOUGH for t in threads],
        "alone": [statistics.median(x.alone for x in found[t]) / seconds[t] for t in threads],
        "phases": found[threads[-1]][0].phases,
        "tasks": [found[t][0].tasks for t in threads],
        "scratch": max(found[t][0].scratch for t in threads),
        "status": "ok",
    }


def in_order(rows: dict[str, Row]) -> list[Row]:
    """Those of the page as it lists them: a file has the rows that were measured last at its end."""
    return [rows[problem.key] for problem in problems() if problem.key in rows]


def table(rows: Iterable[Row], before: dict[str, Row] | None = None) -> str:
    """In Markdown: the efficiency, in brackets where there isn't work enough; after that of `before`, where given."""
    rows = list(rows)
    threads = rows[0]["threads"]
    lines = [["pass", "batch x heads x length x size", "dtype", "mask", "one thread", *map(str, threads)]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        cells = []
        old = (before or {}).get(row["key"])
        for i in range(len(threads)):
            cell = f"{row['efficiency'][i]:.0%}"
            if old is not None:
                cell = f"{old['efficiency'][i]:.0%} → {cell}"
            cells.append(cell if row["enough"][i] else f"({cell})")
        cells = [x.replace("%", " %") for x in cells]
        name = "decode" if row["seqlen_q"] == 1 else row["pass"]
        lines.append([name, row["case"], row["dtype"], row["mask"], report.duration(row["seconds"]), *cells])
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def summary(rows: Iterable[Row]) -> str:
    """How many cells are under what is wanted, and how far the model is off with two threads."""
    rows = list(rows)
    cells = [(e, n) for row in rows for e, n in zip(row["efficiency"], row["enough"], strict=True)]
    enough = [e for e, n in cells if n]
    low = sum(e < WANTED for e in enough)
    off = sorted(abs(row["by_two"] / row["two"] - 1) for row in rows)
    return (
        f"Of {len(cells)} cells {len(enough)} have work enough, {ENOUGH * 1e6:.0f} us for each thread; of these {low} "
        f"are under {WANTED:.0%}, the mean is {statistics.mean(enough or [0]):.0%}. Two real threads take as much "
        f"CPU time as the replay says, within {off[len(off) // 2]:.1%} in the median and {off[-1]:.1%} at most."
    )


def markdown(rows: Sequence[Row], runs: Sequence[dict[str, Any]], before: dict[str, Row] | None = None) -> str:
    """The table as a page of its own."""
    where = f"{machine_line(runs[-1])}: `{runs[-1]['command']}`"
    return f"# Many cores\n\n{where}\n\n{summary(rows)}\n\n{table(rows, before)}"
