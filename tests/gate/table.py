"""Compile what isn't in the cache, print the table; status 1 where a rule is broken."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ptxsim import SHARED_LIMIT

from . import cache, compilers, cycles, rules, sass
from .binary import GateError, Kernel
from .case import KIB, Case, capability
from .cases import all_cases, unclaimed

UNITS = ("tensor", "issue", "mufu", "fma", "alu", "shared")


def compile_missing(cases: list[Case], capabilities: Collection[int] | None = None) -> int:
    """Fills the cache, in as many processes as the build uses; failures show when the table asks again.
    capabilities: only for these."""
    missing = {}
    for case in cases:
        for arch in case.archs.split():
            wanted = capabilities is None or capability(arch) in capabilities
            if wanted and cache.lookup(key := compilers.key(case, arch)) is None:
                missing[key] = (case.name, arch)
    jobs = min(compilers.product().max_jobs(), len(missing))
    if jobs > 1:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_compile, missing.values()))
    return len(missing)


def _compile(name_and_arch: tuple[str, str]) -> None:
    name, arch = name_and_arch
    with contextlib.suppress(GateError):  # the first process asks again, and says it
        compilers.kernels(next(case for case in all_cases() if case.name == name), arch)


def check(cases: list[Case]) -> tuple[list[tuple[Case, str, Kernel, list[str]]], list[str]]:
    """The table's rows with the rules that each breaks, and the lines on what has no row."""
    rows, lines = [], []
    for case in cases:
        mine = []
        for arch in case.archs.split():
            try:
                mine += [(case, arch, k, rules.broken(case, arch, k)) for k in rules.of_case(case, arch)]
            except GateError as error:
                lines.append(str(error))
        rows += sorted(mine, key=lambda row: row[2].name)
    return rows, list(dict.fromkeys(lines))


def table_of(rows, plain: bool) -> Table:
    table = Table(box=None, pad_edge=False) if plain else Table()
    table.add_column("kernel", no_wrap=plain)
    for name in ("arch", "regs", "threads", "block's regs", "stack", "spilled", "loaded", "shared KiB", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("instructions, required; registers behind setmaxnreg", no_wrap=plain)
    for case, arch, kernel, broken in rows:
        counts = [f"{kernel.count(op)} {op} ≥ {least}" for op, least in case.required(arch).items()]
        counts += [f"{used} of {left} registers" for used, left in sass.setmaxnreg(kernel)]
        figures = (
            f"sm_{arch}",
            kernel.registers,
            rules.threads(case, kernel),
            rules.block_registers(case, kernel),
            kernel.stack,
            kernel.spill_stores,
            kernel.spill_loads,
            f"{rules.shared(case, kernel) / KIB:.1f}",
            SHARED_LIMIT[capability(arch)] // KIB,
        )
        cells = [rules.label(case, kernel), *map(str, figures), ", ".join(counts)]
        table.add_row(*map(escape, cells), style="red" if broken else None)
    return table


def print_cycles(cases: list[Case], console: Console) -> int:
    """The counts of cycles.py: a row per kernel and chip; status 1 where a kernel has no figures."""
    attention = [case for case in cases if cycles.pass_of(case)]
    compile_missing(attention, {capability(chip.arch) for chip in cycles.CHIPS})
    found, lines = cycles.table(attention)
    console.print("Of the inner loops, from their SASS: cycles that a turn of one warp takes each unit. Not a speed.")
    plain = not console.is_terminal
    table = Table(box=None, pad_edge=False) if plain else Table()
    table.add_column("kernel", no_wrap=True)
    for name in ("chip", "arch", "blocks", "warps", *UNITS, "busiest"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        units = [f"{one.turn.cycles[unit]:.0f}" for unit in UNITS]
        held = (str(one.resident.blocks), f"{one.resident.warps:g}")
        chip = (one.chip.name, f"sm_{one.chip.arch}")
        table.add_row(one.case.name, *chip, *held, *units, one.turn.busiest)
    console.print(table)
    for line in lines:
        console.print(escape(line), style="bold red", soft_wrap=True)
    return 1 if lines or not found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gate", description=__doc__.split("\n")[0])
    parser.add_argument("-k", metavar="TEXT", default="", help="only cases whose name holds it")
    parser.add_argument("--cycles", action="store_true", help="what keeps the units busy in inner loops")
    options = parser.parse_args(arguments)
    text = options.k
    console = Console(highlight=False)
    if not console.is_terminal:  # a log has no width; its lines must not be cut
        console = Console(highlight=False, width=1000)
    start = time.perf_counter()
    everything = all_cases()
    cases = [case for case in everything if text in case.name]
    if options.cycles:
        return print_cycles(cases, console)
    try:
        compiled = compile_missing(cases)
        rows, lines = check(cases)
        lines += [line for row in rows for line in row[3]]
        if not text:
            lines += unclaimed(everything)
    except GateError as error:
        compiled, rows, lines = 0, [], [str(error)]
    if rows:
        console.print(table_of(rows, plain=not console.is_terminal))
    for line in lines:
        console.print(escape(line), style="bold red", soft_wrap=True)
    console.print(
        f"{len(rows)} kernels of {len(cases)} cases, {compiled} compilations not in the cache, "
        f"{len(lines)} rules broken, {time.perf_counter() - start:.1f} s"
    )
    return 1 if lines or not rows else 0
