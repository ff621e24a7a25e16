"""A call for every CUDA kernel, small enough for a sanitizer, and what it is held to: for tests/test_gpu.py and the
stages of `make gpu`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import attnkern
from attnkern import rng, testing
from matrix import Call, call, tagged
from random_problems import in_pages


@dataclasses.dataclass(frozen=True)
class InPages(Call):
    """A call, without gradients, whose keys and values lie in pages of `page_size` rows, whole ones, in any order."""

    page_size: int = 16

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        pools, table = in_pages(self.page_size, key, value)
        return _attention(query, *pools, block_table=table, **options)


_attention = attnkern.attention  # which `check` replaces


def _in_pages() -> Iterator[InPages]:
    """Each class of head size, with few queries and with many; and what else a call may have."""
    for page_size, size, kind, sizes, more in (
        *((16, n, "few queries", (2, (4, 2), 2, 704, n), {"ranges": "anything B11 1"}) for n in (32, 64, 96, 128)),
        *((64, n, "few queries", (2, (4, 2), 2, 704, n), {"ranges": "anything B11 1"}) for n in (64, 128, 192, 256)),
        *((16, n, "causal", (2, (4, 2), 150, 208, n), {"causal": True}) for n in (64, 128, 256)),
        *((64, n, "documents", (2, 2, 150, 192, n), {"ranges": "documents B1L 1"}) for n in (32, 96, 128, 192, 320)),
        (16, 64, "one query, sinks", (2, (8, 2), 1, 1504, 64), {"ranges": "anything B11 1", "sinks": "H"}),
        (16, 128, "bias", (2, 2, 70, 80, 128), {"mask": "float BHLS", "ranges": "anything BHL 2"}),
        (64, 64, "float32", (1, 2, 70, 128, 64), {"dtype": "fp32", "softcap": 5.0}),
        (16, 64, "float32 few queries", (1, 2, 2, 304, 64), {"dtype": "fp32", "ranges": "anything B1L 1"}),
    ):
        found = call(f"pages of {page_size}, d{size} {kind}", "gpu", sizes, **more)
        yield InPages(**{f.name: getattr(found, f.name) for f in dataclasses.fields(found)}, page_size=page_size)


CALLS = tagged("gpu") | {call.name: call for call in _in_pages()}
MODES = {"default": False, "deterministic": True}  # what torch is asked for: the backward pass may have other kernels


def leaves_of(call: Call, device: Any = "cuda", seed: int = 1) -> dict[str, torch.Tensor]:
    tensors = call.inputs(device, seed).tensors
    if isinstance(call, InPages):
        pools, table = in_pages(call.page_size, tensors["key"], tensors["value"])
        return tensors | {"key": pools[0], "value": pools[1], "block_table": table}
    return {n: x.requires_grad_(x.is_floating_point()) for n, x in tensors.items()}


def run(call: Call, leaves: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Output, log-sum-exp and all gradients there are of the CUDA kernels. Dropout draws the same entries in every
    call."""
    if call.dropout:
        torch.manual_seed(7)
    out, lse = attnkern.attention(**leaves, **call.options, return_lse=True, backend="cuda")
    wanted = [x for x in leaves.values() if x.requires_grad]
    if not wanted:
        return out, lse
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
    if isinstance(call, InPages):
        with mock.patch.object(attnkern, "attention", call.attention):
            testing.check_attention(inputs.with_poison(math.nan), backend="cuda", gradients=False, **call.options)
    else:
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
