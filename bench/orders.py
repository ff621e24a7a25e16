"""``python -m bench.orders``: in which order the steps of Hopper's forward kernel are fastest, measured in one process.

A plain problem may be computed in any `Order` (csrc/cuda/launch.h): products and softmax one after the other, or
overlapped within a warpgroup, or that with warpgroups in turns. The fastest for a class of head sizes is to be the
kOrder of its tile in csrc/cuda/forward_sm90.cu.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console

import attnkern  # noqa: F401 (registers the operators)
from attnkern.problem import UNBOUNDED

from .timing import _cuda_block

console = Console(highlight=False)
if not console.is_terminal:  # a log has no width; its lines must not be cut
    console = Console(highlight=False, width=160)
ORDERS = ("serial", "overlap", "ping-pong")  # as launch.h numbers them
SIZES = ((128, 128), (64, 64), (256, 256), (192, 128), (96, 96), (192, 192))  # of query and key, of value
LENGTHS = (8192, 2048, 512)
TOKENS, WIDTH = 16384, 2048
ROUNDS, CALLS = 5, 5


class Trial(NamedTuple):
    sizes: tuple[int, int]
    causal: bool
    length: int

    def __str__(self) -> str:
        size, values = self.sizes
        about = f"{size}" if size == values else f"{size}/{values}"
        return f"head size {about}, {'causal' if self.causal else 'full'}, length {self.length}"

    def heads(self) -> int:
        return WIDTH // self.sizes[0]

    def flops(self) -> float:
        """Of both products; half of them with a causal mask."""
        return 2.0 * TOKENS * self.heads() * self.length * sum(self.sizes) / (2 if self.causal else 1)


def trials() -> Iterator[Trial]:
    for length, sizes, causal in itertools.product(LENGTHS, SIZES, (False, True)):
        yield Trial(sizes, causal, length)


def arguments(trial: Trial, device: str) -> tuple[tuple[torch.Tensor, ...], tuple[float | int | bool, ...]]:
    """query, key, value and the output; the arguments behind the order."""
    size, values = trial.sizes
    shapes = [(TOKENS // trial.length, trial.heads(), trial.length, n) for n in (size, size, values, values)]
    q, k, v, out = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    return (q, k, v, out), (size**-0.5, 0.0, UNBOUNDED, 0 if trial.causal else UNBOUNDED, 0, 0.0, False)


def main(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be timed.")] = False,
) -> None:
    """Times the orders in turn for every trial, long sequences first, and prints TFLOP/s."""
    if not dry_run and torch.cuda.get_device_capability() != (9, 0):
        console.print("this device is no Hopper: nothing to time")
        return
    for trial in trials():
        if dry_run:
            tensors, _ = arguments(trial, "meta")
            console.print(f"{trial}: query {list(tensors[0].shape)}, {trial.flops() / 1e12:.2f} TFLOP")
            continue
        tensors, score = arguments(trial, "cuda")
        block = _cuda_block(torch.device("cuda"))
        calls = [
            lambda order=order: torch.ops.attnkern.cuda_forward_sm90(*tensors, order, *score)  # noqa: B023
            for order in range(len(ORDERS))
        ]
        for call in calls:
            block(call, 2)
        rounds = [[block(call, CALLS) for call in calls] for _ in range(ROUNDS)]
        speeds = [trial.flops() / statistics.median(column) / 1e12 for column in zip(*rounds, strict=True)]
        best = ORDERS[speeds.index(max(speeds))]
        figures = ", ".join(f"{name} {speed:.0f}" for name, speed in zip(ORDERS, speeds, strict=True))
        console.print(f"{trial}: {figures} TFLOP/s; {best}")


if __name__ == "__main__":
    typer.run(main)
