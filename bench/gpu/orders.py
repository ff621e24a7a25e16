"""By which schedule Hopper's forward kernel is fastest: a stage of `make gpu`.

The fast path may compute in any `Schedule` (csrc/cuda/launch.h): products and softmax one after the other, or
overlapped within a warpgroup, or that with warpgroups in turns. The fastest for a class of head sizes is to be the
kSchedule of its tile in csrc/cuda/forward_sm90.cuh. The library holds that one alone unless it was built with
ATTNKERN_SCHEDULES=all, as the campaign's first stage builds it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from attnkern.backends import cuda
from attnkern.params import UNBOUNDED, AttentionParams
from attnkern.signatures import Inputs
from bench.cases import Case, case

from .device import Gpu

SCHEDULES = ("serial", "overlap", "ping-pong")  # as launch.h numbers them
SIZES = ((128, 128), (64, 64), (256, 256), (192, 128), (96, 96), (192, 192))  # of query and key, of value
LENGTHS = (8192, 2048, 512)
TOKENS, WIDTH = 16384, 2048
ROUNDS, CALLS = 5, 5


def trials() -> Iterator[Case]:
    """Long sequences first."""
    for length, (size, values), causal in itertools.product(LENGTHS, SIZES, (True, False)):
        name = f"d{size}" if size == values else f"d{size}/{values}"
        yield case(
            f"{name} {'causal' if causal else 'full'} {length}",
            length,
            batch=TOKENS // length,
            heads=WIDTH // size,
            dim=size,
            head_dim_v=values,
            dtype="bf16",
            causal=causal,
        )


TRIALS = {trial.name: trial for trial in trials()}


def rows(device: Gpu) -> list[str]:
    return list(TRIALS) if device.capability() == 90 else []


def measure(device: Gpu, name: str) -> Iterator[dict[str, Any]]:
    """TFLOP/s of each schedule, in turns, and which is best. What they compute is the correctness stage's question."""
    trial = device.shrunk(TRIALS[name])
    inputs = device.inputs(trial)
    params = AttentionParams(trial.softmax_scale, window_right=0 if trial.causal else UNBOUNDED)
    block = device.block()

    def call_of(schedule: int) -> Any:
        tensors = Inputs(inputs.query, inputs.key, inputs.value)
        return lambda: cuda.forward(tensors, params, False, schedule=schedule)

    calls = {name: call_of(schedule) for schedule, name in enumerate(SCHEDULES)}
    for call in calls.values():
        block(call, device.few(2))
    rounds = [{n: block(call, device.few(CALLS)) for n, call in calls.items()} for _ in range(device.few(ROUNDS))]
    seconds = {n: statistics.median(one[n] for one in rounds) for n in calls}
    best = min(seconds, key=lambda n: seconds[n])
    tflops = {n: trial.flops("forward") / s / 1e12 for n, s in seconds.items()}
    yield {"head_dim": trial.head_dim, "head_dim_v": trial.head_dim_v, "tflops": tflops, "best": best}
