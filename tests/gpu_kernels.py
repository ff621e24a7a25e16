"""A call for every CUDA kernel, small enough for a sanitizer, and what it is held to: for tests/test_gpu.py and the
stages of `make gpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import attnkern
from attnkern import rng, testing
from matrix import Call, tagged

CALLS = tagged("gpu")
MODES = {"default": False, "deterministic": True}  # what torch is asked for: the backward pass may have other kernels


def leaves_of(call: Call, device: Any = "cuda") -> dict[str, torch.Tensor]:
    return {n: x.requires_grad_(x.is_floating_point()) for n, x in call.inputs(device, 1).tensors.items()}


def run(call: Call, leaves: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Output, log-sum-exp and all gradients of the CUDA kernels. Dropout draws the same entries in every call."""
    if call.dropout:
        torch.manual_seed(7)
    out, lse = attnkern.attention(**leaves, **call.options, return_lse=True, backend="cuda")
    wanted = [x for x in leaves.values() if x.requires_grad]
    return out, lse, *torch.autograd.grad([out, lse], wanted, [torch.ones_like(out), torch.ones_like(lse)])


@contextlib.contextmanager
def mode(name: str) -> Iterator[None]:
    """torch's default, or its deterministic mode. Tests run in the latter, for the memory that it poisons there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(MODES[name])
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check(call: Call, device: Any = "cuda", seed: int = 1) -> None:
    """Output, log-sum-exp and all gradients against float64 by the tolerance rule. AssertionError says what is wrong.

    Memory that was freed holds NaN, so that what a kernel leaves unwritten is seen in either mode.
    """
    inputs, keep = call.inputs(device, seed), None
    if call.dropout:
        q, k = inputs.query, inputs.key
        torch.manual_seed(5)
        drawn = rng.draw_seed(q.device)
        keep = rng.keep_mask(drawn, call.dropout, *q.shape[:3], k.shape[2])
    # Of the allocator's small blocks and of its large ones.
    poison = [torch.full((size,), float("nan"), device=inputs.query.device) for size in [1 << 16] * 32 + [1 << 22] * 4]
    del poison
    torch.manual_seed(5)
    testing.check_attention(inputs, backend="cuda", keep=keep, **call.options)


def differing_runs(call: Call, times: int, device: Any = "cuda") -> int:
    """How many of so many runs differ from the first in any bit, in deterministic mode. The device is asked once."""
    leaves = leaves_of(call, device)
    with mode("deterministic"):
        first = [x.detach().clone() for x in run(call, leaves)]
        differing = torch.zeros((), dtype=torch.int64, device=first[0].device)
        for _ in range(times - 1):
            unlike = [
                (a.view(torch.uint8) != b.view(torch.uint8)).any()
                for a, b in zip(run(call, leaves), first, strict=True)
            ]
            differing += torch.stack(unlike).any()
    return int(differing)
