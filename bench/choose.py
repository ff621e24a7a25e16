"""``python -m bench.choose``: which backend is first on this device, measured, as rules for attnkern's choice.

For each kind of call and range of head sizes (attnkern/backends/choice.py), the backends that take it are timed in turn
in one process, forward alone and forward with backward. The rules, fastest backend first, are put to use by
``choice.use_rules(*choice.load(path))``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console

import attnkern
from attnkern.backends import choice
from attnkern.problem import Problem

from . import machine
from .timing import _cuda_block

console = Console(highlight=False)
if not console.is_terminal:  # a log has no width; its lines must not be cut
    console = Console(highlight=False, width=160)
BACKENDS = ("triton", "cuda")
RANGES = {64: (1, 64), 128: (65, 128), 256: (129, 256), 512: (257, 512)}  # the size that is timed for each
TOKENS, WIDTH, LENGTH, CACHE = 16384, 2048, 4096, 16384
ROUNDS, CALLS = 5, 5
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Trial(NamedTuple):
    training: bool
    kind: str
    size: int

    def __str__(self) -> str:
        return f"{choice.PASSES[self.training]} {self.kind} head size {self.size}"


def trials() -> Iterator[Trial]:
    """All that rules tell apart; a call with gradients is never one of few queries."""
    for size in RANGES:
        for kind in choice.KINDS:
            for training in (False, True):
                if not (training and kind == "decode"):
                    yield Trial(training, kind, size)


def arguments(trial: Trial, device: str) -> tuple[Tensors, dict[str, Any]]:
    """query, key and value of bfloat16, and the options of `attnkern.attention`."""
    heads = max(1, WIDTH // trial.size)
    if trial.kind == "decode":
        shapes = [(4, heads, n, trial.size) for n in (1, CACHE, CACHE)]
    else:
        shapes = [(TOKENS // LENGTH, heads, LENGTH, trial.size)] * 3
    q, k, v = (torch.randn(s, dtype=torch.bfloat16, device=device, requires_grad=trial.training) for s in shapes)
    options: dict[str, dict[str, Any]] = {
        "decode": {},
        "plain": {"is_causal": True},
        "general": {"is_causal": True, "softcap": 30.0},
    }
    return (q, k, v), options[trial.kind]


def call_of(trial: Trial, backend: str, tensors: Tensors, options: dict[str, Any]) -> Callable[[], object]:
    if not trial.training:
        return lambda: attnkern.attention(*tensors, **options, backend=backend)
    grad_out = torch.randn_like(tensors[0])

    def step() -> object:
        out = attnkern.attention(*tensors, **options, backend=backend)
        return torch.autograd.grad(out, tensors, grad_out)

    return step


def rule_of(trial: Trial, capability: int, seconds: dict[str, float]) -> choice.Rule:
    """The backends by their times, and by how much the first wins."""
    order = sorted(seconds, key=lambda name: seconds[name])
    ratio = f", {seconds[order[1]] / seconds[order[0]]:.2f}x {order[1]}" if len(order) > 1 else ""
    because = f"{order[0]} {seconds[order[0]] * 1e6:.0f} us{ratio}"
    kind, size = (trial.kind,), RANGES[trial.size]
    return choice.Rule((capability,), (choice.PASSES[trial.training],), kind, size, tuple(order), because)


def main(
    out: Annotated[Path, typer.Option(help="Where the rules go.")] = machine.ROOT / "bench" / "runs" / "choice.json",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be timed.")] = False,
) -> None:
    """Times every backend for every kind of call; the file is written anew after each."""
    if dry_run:
        for trial in trials():
            tensors, options = arguments(trial, "meta")
            call = choice.call_of(Problem.from_sdpa(*tensors, **options), 90)
            assert (call.training, call.kind, call.head_dim) == trial
            console.print(
                f"{trial}: {', '.join(BACKENDS)}; {choice.rule_for(call).order[0]} is first {choice.source()}"
            )
        return
    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    block, rules = _cuda_block(device), []
    out.parent.mkdir(parents=True, exist_ok=True)
    for trial in trials():
        tensors, options = arguments(trial, "cuda")
        calls = {}
        for name in BACKENDS:
            if attnkern.explain(*tensors, **options, backend=name).chosen == name:
                calls[name] = call_of(trial, name, tensors, options)
                block(calls[name], 2)
        if not calls:
            console.print(f"{trial}: no backend takes it")
            continue
        rounds = [{name: block(call, CALLS) for name, call in calls.items()} for _ in range(ROUNDS)]
        seconds = {name: statistics.median(one[name] for one in rounds) for name in calls}
        rules.append(rule_of(trial, 10 * major + minor, seconds))
        console.print(f"{trial}: {rules[-1].because}")
        choice.dump(rules, out, about)
    console.print(f"rules  {out}")


if __name__ == "__main__":
    typer.run(main)
