"""``python -m bench``: list what there is, run it, whole models or a server's stream, compare two runs, draw one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import attnkern
from bench.cases import CASES, Case, select

from . import cores as many
from . import machine, options, page, plots, providers, record, report, sets, targets
from . import models as whole
from . import serve as serving
from .record import Log, Row
from .stream import TINY, Sizes, Stream
from .sweep import Runner
from .timing import Sampling

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Benchmarks of attnkern against F.scaled_dot_product_attention.",
)
console = Console()
if not console.is_terminal:  # a log has no width; its lines must not be cut
    console = Console(width=160)
T = TypeVar("T")
INTERRUPTED = 130
INTERRUPTION = "[yellow]interrupted: what had finished is kept, the same command goes on from here[/]"

Cases = Annotated[str, typer.Option("--cases", help="Names, tags and globs, comma-separated (see `list`).")]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu or cuda. Default: cuda if attnkern has kernels for it; of targets cpu."),
]


def _parsed(option: str, parse: Callable[..., T], *values: Any) -> T:
    """``parse(*values)``, a ValueError or a file's as a usage error that names the option (exit code 2)."""
    try:
        return parse(*values)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _device(name: str | None, *, may_be_absent: bool = False) -> torch.device:
    if name is None:
        kernels = any("cuda" in info.device_types and info.available for info in attnkern.backends())
        name = "cuda" if kernels and torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{name!r} is neither cpu nor cuda", param_hint="--device")
    if name == "cuda" and not torch.cuda.is_available() and not may_be_absent:
        raise typer.BadParameter("torch finds no CUDA device here", param_hint="--device")
    return torch.device(name)


@app.command()
def run(
    cases: Annotated[
        str | None,
        typer.Option("--cases", help="Names, tags, globs (see `list`). Default: quick-sweep (CUDA: gpu-sweep)."),
    ] = None,
    providers_: Annotated[
        str | None, typer.Option("--providers", help="Comma-separated, or all. Default: kernels and F.sdpa's backends.")
    ] = None,
    passes: Annotated[str | None, typer.Option(help="forward (fwd), backward (bwd), both, forward-grad.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="field=values for every case: seqlen=512:16k:x2, dtype=fp32,bf16.")
    ] = None,
    device: Device = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's; of targets 1.")] = None,
    cpu_time: Annotated[
        bool,
        typer.Option("--cpu-time", help="CPU time of one thread, as of targets: sound on a busy machine. --threads 1."),
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds at most.")] = None,
    block: Annotated[float, typer.Option(min=0.0001, help="Seconds of calls of one provider in a round.")] = 0.02,
    budget: Annotated[float | None, typer.Option(min=0.0, help="Seconds for a case and pass.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON Lines; CSV, plots and a page go beside it. Default: in bench/.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the rows that the file already has.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print every row at the end.")] = False,
    plot_: Annotated[bool, typer.Option("--plot/--no-plot")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
) -> None:
    """Measure cases: time, FLOP/s, share of the measured peak, memory, and the error against float64.

    Rows go to a file as they finish; the same command later goes on where it stopped. Exit code 1: a wrong or failed
    row.
    """
    target_set = None if cases is None else targets.named(cases)
    where = _device(device or (None if target_set is None else "cpu"), may_be_absent=dry_run)
    pattern = ("gpu-sweep" if where.type == "cuda" else "quick-sweep") if cases is None else cases
    defaults = sets.defaults_for(pattern)
    if target_set is not None and (passes or set_ or providers_):
        raise typer.BadParameter(f"{pattern} fixes --passes, --set and --providers", param_hint="--cases")
    if target_set is not None and where.type != "cpu":
        raise typer.BadParameter(f"{pattern} are targets for a CPU", param_hint="--device")
    if target_set is not None and not dry_run and (lacking := targets.environment(pattern)):
        # What chooses instruction sets is read when a process starts.
        os.execve(sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:]], {**os.environ, **lacking})
    if target_set is not None and threads in (None, 1):
        threads, cpu_time = 1, True
    if cpu_time and (threads != 1 or where.type != "cpu"):
        raise typer.BadParameter("CPU time compares on one CPU thread only: add --threads 1", param_hint="--cpu-time")
    chosen = [] if target_set is not None else _parsed("--cases", select, pattern)
    if set_:
        chosen = _parsed("--set", options.apply, chosen, _parsed("--set", options.overrides, set_))
    pass_names = list(defaults.passes)
    if passes is not None:
        pass_names = _parsed("--passes", options.names, passes, options.PASS_NAMES)
    names = defaults.providers if providers_ is None else providers_
    if providers_ is None and names is not None:  # a set's wish, as far as it can be had here
        offered = [p.name for p in providers.all_providers(where)]
        names = ",".join(n for n in names.split(",") if n in offered)
    rivals = _parsed("--providers", providers.choose, names, where)
    groups = [(c, p) for c in chosen for p in pass_names if passes or p.startswith("forward") or not c.forward_only]
    if threads is not None:
        _parsed("--threads", torch.set_num_threads, threads)
    sampling = Sampling(block, rounds or defaults.rounds, min(3, rounds or 3), budget or defaults.budget, cpu_time)

    if dry_run:
        if target_set is not None:
            console.print(targets.plan(target_set))
        else:
            console.print(_group_table(groups, rivals))
        return
    for info in attnkern.backends():
        if where.type in info.device_types and not info.available:
            console.print(f"[yellow]attnkern's {info.name} backend takes no part: {info.why_not}[/]")
    folder = "results" if pattern in targets.SETS else "runs"  # a whole set's
    path = out or machine.ROOT / "bench" / folder / f"{_slug(pattern, where, sampling)}.jsonl"
    log = _parsed("--out", Log, path, fresh)
    log.start_run(machine.provenance(where))
    runner = Runner(where, sampling, seed, registers=target_set is not None)
    try:
        if target_set is not None:
            rows, failed, interrupted = targets.run(target_set, runner, log, console)
        else:
            rows, interrupted = _sweep(groups, rivals, runner, log)
            failed = any(row["status"] in report.FAILED for row in rows)
    finally:
        log.close()
    if target_set is None:
        report.summary(console, rows, full)
    _write_files(path, rows, log.runs, plot_ and target_set is None)  # the docs show what became of targets
    if interrupted:
        console.print(INTERRUPTION)
        raise typer.Exit(INTERRUPTED)
    if failed:
        raise typer.Exit(1)


def _slug(pattern: str, device: torch.device, sampling: Sampling) -> str:
    clock = "cpu-time" if sampling.cpu_time else f"{torch.get_num_threads()}-threads"
    kind = f"cpu-{clock}" if device.type == "cpu" else device.type
    return f"{re.sub(r'[^a-zA-Z0-9]+', '-', pattern).strip('-')[:60]}-{kind}"


def _group_table(groups: Sequence[tuple[Case, str]], rivals: Sequence[providers.Provider]) -> Table:
    table = Table(title=f"{len(groups)} groups, each: {', '.join(p.name for p in rivals)}", title_justify="left")
    for column in ("case", "pass", "shape", "dtype", "work"):
        table.add_column(column)
    for case, pass_name in groups:
        table.add_row(case.name, pass_name, case.shape, case.dtype, report.rate(case.flops(pass_name), "FLOP"))
    return table


def _sweep(
    groups: Sequence[tuple[Any, str]], rivals: Sequence[providers.Provider], runner: Runner, log: Log
) -> tuple[list[Row], bool]:
    """Runs the groups that the log lacks; (all rows of the selection in order, interrupted?)."""
    keys = {group: [runner.key(*group, p.name) for p in rivals] for group in groups}
    waiting = [group for group in groups if not all(map(log.finished, keys[group]))]
    if len(waiting) < len(groups):
        console.print(f"{len(groups) - len(waiting)} of {len(groups)} groups are in {log.path} already (--fresh: anew)")
    if waiting:
        about = report.minutes(runner.expected_seconds(waiting, len(rivals)))
        console.print(f"{len(waiting)} groups, about {about} while nothing else runs, more beside other processes")
    interrupted = False
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(waiting))
        try:
            for case, pass_name in waiting:
                progress.update(task, description=f"{case.name} {pass_name}")
                rows = runner.run(case, pass_name, rivals)
                for row in rows:
                    log.add(row)
                progress.console.print(report.group_line(rows))
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    return [log.rows[key] for group in groups for key in keys[group] if key in log.rows], interrupted


def _run_page(
    title: str,
    of: ModuleType,
    groups: Sequence[tuple[Any, str]],
    rivals: Sequence[providers.Provider],
    runner: Runner,
    name: str,
    out: Path | None,
    fresh: bool,
    plot_: bool,
) -> None:
    """Runs what has a page of its own in the documentation: prints and writes the table that the module `of` makes."""
    path = out or machine.ROOT / "bench" / "runs" / f"{_slug(name, runner.device, runner.sampling)}.jsonl"
    log = _parsed("--out", Log, path, fresh)
    log.start_run(machine.provenance(runner.device))
    try:
        rows, interrupted = _sweep(groups, rivals, runner, log)
    finally:
        log.close()
    table = Table(title=title, title_justify="left")
    for column in of.HEAD:
        table.add_column(column)
    for cells in of.lines(rows):
        table.add_row(*map(escape, cells))
    console.print(table)
    path.with_suffix(".md").write_text(of.markdown(rows, log.runs), encoding="utf-8")
    _write_files(path, rows, log.runs, plot_, of.CSV)
    if interrupted:
        console.print(INTERRUPTION)
        raise typer.Exit(INTERRUPTED)
    if any(row["status"] in report.FAILED for row in rows):
        raise typer.Exit(1)


def _write_files(
    path: Path,
    rows: Sequence[Row],
    runs: Sequence[dict[str, Any]],
    plot: bool,
    columns: Sequence[str] = record.COLUMNS,
) -> None:
    table = path.with_suffix(".csv")
    record.write_csv(table, rows, columns)
    console.print(f"rows   {path}\ntable  {table}", soft_wrap=True, highlight=False)
    if plot and rows:
        _draw(path.with_suffix(""), rows, runs)


def _draw(stem: Path, rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> None:
    """Pictures of the rows, and their page, beside `stem`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    for drawn in plots.draw(rows, runs, stem):
        console.print(f"plot   {drawn}", soft_wrap=True, highlight=False)
    written = page.write(stem.with_name(f"{stem.name}-report.html"), rows, runs)
    console.print(f"page   {written}", soft_wrap=True, highlight=False)


@app.command("models")
def models_(
    models: Annotated[
        str, typer.Option("--models", help="Comma-separated: bert, gpt2, vit, whisper, t5, llama; or all.")
    ] = "all",
    dtypes: Annotated[str, typer.Option("--dtypes", help="fp32, bf16.")] = "fp32,bf16",
    passes: Annotated[str, typer.Option(help="training, prefill, decode.")] = "training,prefill,decode",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at most.")] = 7,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="For the rounds of a model, dtype and pass.")
    ] = 8,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Two small layers in place of each model's own, for a try.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="JSON Lines; Markdown, CSV and plots go beside it. Default: in bench/runs.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the rows that the file already has.")] = False,
    plot_: Annotated[bool, typer.Option("--plot/--no-plot")] = True,
    seed: Annotated[int, typer.Option(help="Of the weights and inputs.")] = 0,
) -> None:
    """Time whole models of transformers on the CPU: "sdpa" against "attnkern", and what attention takes of it.

    Weights are random, nothing is downloaded. Rows go to a file as they finish; the same command later goes on where it
    stopped. Exit code 1: a wrong or failed row.
    """
    labels = {model.name: model.name for model in whole.MODELS}
    names = list(labels) if models == "all" else _parsed("--models", options.names, models, labels)
    kinds = _parsed(
        "--dtypes", options.names, dtypes, {n: d for n, d in options.DTYPE_NAMES.items() if d in whole.ALLOWED}
    )
    pass_names = _parsed("--passes", options.names, passes, {p: p for p in whole.PASSES})
    try:
        chosen = whole.workloads(names, kinds, pass_names, tiny)
    except ImportError as error:
        console.print(f"[red]{error}[/]", soft_wrap=True)
        raise typer.Exit(2) from None
    if not chosen:
        raise typer.BadParameter(f"{models} has none of {passes}", param_hint="--passes")
    if threads is not None:
        _parsed("--threads", torch.set_num_threads, threads)
    where, sampling = torch.device("cpu"), Sampling(0.2, rounds, min(3, rounds), seconds)
    groups = [(workload, workload.pass_name) for workload in chosen]
    runner = whole.ModelRunner(where, sampling, seed)
    name = f"whole-models{'-tiny' * tiny}"
    _run_page("What a model gains", whole, groups, whole.sides(), runner, name, out, fresh, plot_)


@app.command("serve")
def serve_(
    dtypes: Annotated[str, typer.Option("--dtypes", help="fp32, bf16.")] = "fp32,bf16",
    pages: Annotated[str, typer.Option("--pages", help="Tokens of a page: a row for each size.")] = "64,16",
    requests: Annotated[int, typer.Option(min=1, help="How many come.")] = 160,
    running: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Of a step at most: generated ones, the rest of prompts.")] = 256,
    prompt: Annotated[int, typer.Option(min=1, help="Median length, lognormal.")] = 200,
    output: Annotated[int, typer.Option(min=1, help="Median length, lognormal.")] = 80,
    prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that requests have in common, before their prompts.")
    ] = 500,
    shared: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the requests with the prefix.")] = 0.5,
    arrivals: Annotated[float, typer.Option(min=0.001, help="Requests that come in a step, on average.")] = 0.7,
    layers: Annotated[int, typer.Option(min=1, help="Of the transformer.")] = 4,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's.")] = None,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="CPU time of one thread: sound on a busy machine. Needs --threads 1.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny transformer, for a try.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="JSON Lines; Markdown, CSV and plots go beside it. Default: in bench/runs.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the rows that the file already has.")] = False,
    plot_: Annotated[bool, typer.Option("--plot/--no-plot")] = True,
    seed: Annotated[int, typer.Option(help="Of the weights, lengths, arrivals and prompts.")] = 0,
) -> None:
    """Serve a stream of requests on the CPU with PagedCache, and with padded caches and F.sdpa: the same steps.

    Prompts in chunks beside sequences that generate, a prefix that requests share. Rows go to a file as they finish.
    Exit code 1: a wrong or failed row.
    """
    kinds = _parsed(
        "--dtypes", options.names, dtypes, {n: d for n, d in options.DTYPE_NAMES.items() if d in serving.ALLOWED}
    )
    rivals = serving.ways(_parsed("--pages", serving.page_sizes, pages))
    if cpu_time and threads != 1:
        raise typer.BadParameter("CPU time compares on one CPU thread only: add --threads 1", param_hint="--cpu-time")
    sizes = TINY if tiny else Sizes()
    wanted = (requests, running, tokens, prompt, output, prefix, shared, arrivals, layers, seed, sizes)
    streams = [_parsed("--tokens", Stream, dtype, *wanted) for dtype in kinds]
    if threads is not None:
        _parsed("--threads", torch.set_num_threads, threads)
    where, sampling = torch.device("cpu"), Sampling(cpu_time=cpu_time)
    groups = [(stream, "serve") for stream in streams]
    runner = serving.ServeRunner(where, sampling, seed)
    _run_page("A server's stream", serving, groups, rivals, runner, f"serve{'-tiny' * tiny}", out, fresh, plot_)


@app.command("cores")
def cores_(
    threads: Annotated[str, typer.Option("--threads", help="Numbers of threads.")] = "8,32,96,192",
    pass_: Annotated[str | None, typer.Option("--pass", help="forward or backward. Default: both.")] = None,
    longest: Annotated[int, typer.Option(min=1, help="Of the keys.")] = 32768,
    only: Annotated[
        str | None, typer.Option("--only", help="Rows like this glob, as in 'backward fp32 *'; the file keeps others.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Of all numbers of threads; medians of these.")] = 3,
    budget: Annotated[float, typer.Option(min=0.0, help="Seconds for a row, about.")] = 4.0,
    before: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Rows to compare with, before a change.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON Lines; Markdown beside it. Default: in bench/runs.")] = None,
) -> None:
    """How well the CPU kernels would share their work among many cores: tasks timed on one, replayed for many."""
    wanted = threads.split(",")
    if not all(n.isdecimal() and int(n) > 1 for n in wanted):
        raise typer.BadParameter(f"{threads!r} is not a list of numbers from 2 on", param_hint="--threads")
    if pass_ not in (None, "forward", "backward"):
        raise typer.BadParameter(f"{pass_!r} is neither forward nor backward", param_hint="--pass")
    chosen = [p for p in many.problems() if pass_ in (None, p.pass_name) and p.seqlen_k <= longest]
    if not chosen:
        raise typer.BadParameter(f"no row has as few as {longest} keys", param_hint="--longest")
    chosen = [p for p in chosen if only is None or fnmatchcase(p.key, only)]
    if not chosen:
        raise typer.BadParameter(f"no row is like {only!r}", param_hint="--only")
    old = _parsed("--before", record.read, before)[0] if before else None
    program = _parsed("cores", many.Cores)
    path = out or machine.ROOT / "bench" / "runs" / "cores.jsonl"
    log = _parsed("--out", Log, path, only is None)
    log.start_run(machine.provenance(torch.device("cpu")))
    try:
        for problem in chosen:
            row = many.measure(program, problem, [int(n) for n in wanted], turns, budget)
            log.add(row)
            console.print(many.table([row]).splitlines()[-1], highlight=False)
    finally:
        log.close()
        program.close()
    rows = many.in_order(log.rows)
    path.with_suffix(".md").write_text(many.markdown(rows, log.runs, old), encoding="utf-8")
    console.print(many.summary(rows), highlight=False)


@app.command("list")
def list_(cases: Cases = "*", device: Device = None) -> None:
    """Show the sets, the cases and the providers."""
    where = _device(device)
    chosen = _parsed("--cases", select, cases)
    table = Table(title="sets", title_justify="left")
    for column in ("set", "cases", "passes"):
        table.add_column(column)
    for tag, members in sets.tags().items():
        table.add_row(tag, str(len(members)), ", ".join(sets.defaults_for(tag).passes))
    for name in targets.SETS:
        table.add_row(name, str(len(targets.TABLE)), "as the targets say")
    console.print(table)
    table = Table(title=f"cases ({len(chosen)} of {len(CASES)})", title_justify="left")
    for column in ("case", "batch x heads x length x head_dim", "dtype", "features", "sets"):
        table.add_column(column, no_wrap=column == "case")
    for case in chosen:
        table.add_row(case.name, case.shape, case.dtype, case.features, ", ".join(case.tags))
    console.print(table)
    table = Table(title=f"providers on {where.type} (* by default)", title_justify="left")
    for column in ("provider", "what it calls"):
        table.add_column(column)
    for provider in providers.all_providers(where):
        table.add_row(provider.name + ("*" if provider.default else ""), provider.about)
    console.print(table)


Rows = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSON Lines file of `run`.")]


@app.command()
def compare(
    base: Rows,
    new: Rows,
    fail_below: Annotated[float, typer.Option(min=0.0, help="Exit code 1 where a row's new / base is below.")] = 0.97,
    by: Annotated[str, typer.Option(help="ratio (to F.sdpa in the same run: sound) or time.")] = "ratio",
    providers_: Annotated[str | None, typer.Option("--providers", help="Default: attnkern's.")] = None,
) -> None:
    """Compare two runs, row by row. Exit code 1: a row got slower than --fail-below, or lost its result."""
    if by not in ("ratio", "time"):
        raise typer.BadParameter(f"{by!r} is neither ratio nor time", param_hint="--by")
    old_rows, _ = _parsed("BASE", record.read, base)
    new_rows, _ = _parsed("NEW", record.read, new)
    wanted = providers_.split(",") if providers_ else None
    changes = report.comparison(old_rows.values(), new_rows.values(), by, wanted)
    if not changes:
        raise typer.BadParameter(f"{base} and {new} have no row in common", param_hint="NEW")
    slower = [c for c in changes if c.factor < fail_below]
    table = Table(title=f"{new} against {base}, by {by}", title_justify="left")
    for column in ("row", "base", "new", "new / base"):
        table.add_column(column, justify="left" if column == "row" else "right")
    show = report.duration if by == "time" else "{:.2f}x".format
    for change in sorted(changes, key=lambda c: c.factor):
        colour = "red" if change.factor < fail_below else "green" if change.factor > 1 / fail_below else "default"
        table.add_row(change.label, show(change.base), show(change.new), f"[{colour}]{change.factor:.3f}[/]")
    console.print(table)
    broken = [row for row in new_rows.values() if row["status"] in report.FAILED]
    for row in broken:
        console.print(f"[red]{row['status']}[/] {row['case']} {row['pass']} {row['provider']}: {row.get('message')}")
    console.print(f"{len(changes)} rows in common, {len(slower)} below {fail_below}")
    if slower or broken:
        raise typer.Exit(1)


@app.command()
def plot(
    rows: Rows,
    out: Annotated[Path | None, typer.Option(help="How the pictures' paths begin. Default: the file's.")] = None,
) -> None:
    """Draw a run again, and write its page."""
    by_key, runs = _parsed("ROWS", record.read, rows)
    found = list(by_key.values())
    if not found or not all(record.drawable(row) for row in found):
        raise typer.BadParameter(f"{rows} must hold rows of run, models or serve, and no others", param_hint="ROWS")
    stem = out or rows.with_suffix("")
    _parsed("--out", _draw, stem, found, runs)


if __name__ == "__main__":
    app(prog_name="python -m bench")
