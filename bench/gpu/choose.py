"""Which backend is first on this device, measured, as rules for attnkern's choice: a stage of `make gpu`.

For each kind of call and range of head sizes (attnkern/backends/choice.py), the backends that take it are timed in turn
in one process, forward alone and forward with backward.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import attnkern
from attnkern.backends import choice, cuda
from attnkern.problem import Problem
from attnkern.testing import Inputs
from bench.cases import Case, case

from .device import Gpu

BACKENDS = ("triton", "cuda")
RANGES = {128: (65, 128), 64: (1, 64), 256: (129, 256), 512: (257, 512)}  # the size that is timed for each
TOKENS, WIDTH, LENGTH, CACHE = 16384, 2048, 4096, 16384
ROUNDS, CALLS = 5, 5


class Trial(NamedTuple):
    training: bool
    kind: str
    size: int

    def __str__(self) -> str:
        return f"{choice.PASSES[self.training]} {self.kind} head size {self.size}"

    def case(self) -> Case:
        more: dict[str, Any] = {"heads": max(1, WIDTH // self.size), "dim": self.size, "dtype": "bf16"}
        if self.kind == "decode":
            return case(str(self), 1, CACHE, batch=4, **more)
        softcap = 30.0 if self.kind == "generic" else 0.0
        return case(str(self), LENGTH, batch=TOKENS // LENGTH, causal=True, softcap=softcap, **more)


def trials() -> Iterator[Trial]:
    """All that rules tell apart; a call with gradients is never one of few queries, and the kernels of the largest head
    sizes have no fast path."""
    for size in RANGES:
        for kind in choice.KINDS:
            for training in (False, True):
                if not (training and kind == "decode") and not (size > 256 and kind == "fast path"):
                    yield Trial(training, kind, size)


TRIALS = {str(trial): trial for trial in trials()}


def rows(device: Gpu) -> list[str]:
    return list(TRIALS)


def call_of(trial: Trial, backend: str, inputs: Inputs, options: dict[str, Any]) -> Callable[[], object]:
    q, k, v = (x.detach().requires_grad_(trial.training) for x in (inputs.query, inputs.key, inputs.value))
    if not trial.training:
        return lambda: attnkern.attention(q, k, v, **options, backend=backend)
    grad_out = torch.randn_like(inputs.query)

    def step() -> object:
        out = attnkern.attention(q, k, v, **options, backend=backend)
        return torch.autograd.grad(out, (q, k, v), grad_out)

    return step


def measure(device: Gpu, name: str) -> Iterator[dict[str, Any]]:
    """Seconds of each backend that takes the trial's calls; one that raises refuses them."""
    trial = TRIALS[name]
    problem = device.shrunk(trial.case())
    inputs, options = device.inputs(problem), problem.options
    refused = {}
    calls = {}
    for backend in BACKENDS:
        told = attnkern.explain(inputs.query, inputs.key, inputs.value, **options, backend=backend)
        if told.chosen == backend:
            call = call_of(trial, backend, inputs, options)
            try:
                call()  # compiles
            except Exception as error:
                refused[backend] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                device.synchronize()  # raises if nothing more will run in this process
            else:
                calls[backend] = call
        else:
            refused[backend] = "; ".join(told.refusals[backend])
    if not calls:
        yield {"status": "refused", "message": str(refused)}
        return
    with device.alone():
        block = device.block()
        rounds = [{n: block(call, device.few(CALLS)) for n, call in calls.items()} for _ in range(device.few(ROUNDS))]
    seconds = {n: statistics.median(one[n] for one in rounds) for n in calls}
    asked = Problem.from_sdpa(inputs.query, inputs.key, inputs.value, **options)
    hopper = "cuda" in calls and cuda.is_for_hopper(cuda.plan_of(asked))
    yield {
        **trial._asdict(),
        "capability": device.capability(),
        "hopper": hopper,
        "seconds": seconds,
        "refused": refused,
    }


def rule_of(trial: Trial, capability: int, hopper: bool, seconds: dict[str, float], chip: str) -> choice.Rule:
    """The backends by their times, and by how much the first wins. hopper: what was timed of `cuda` are Hopper's own
    kernels, and the rule is theirs."""
    order = sorted(seconds, key=lambda name: seconds[name])
    ratio = f", {seconds[order[1]] / seconds[order[0]]:.2f}x {order[1]}" if len(order) > 1 else ""
    because = f"{order[0]} {seconds[order[0]] * 1e6:.0f} us{ratio} on {chip}"
    kind, size = (trial.kind,), RANGES[trial.size]
    names = ["cuda-sm90" if name == "cuda" and hopper else name for name in order]
    return choice.Rule((capability,), (choice.PASSES[trial.training],), kind, size, tuple(names), because)
