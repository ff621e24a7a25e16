"""A call for every CUDA kernel, small enough for a sanitizer, and what it is held to: for tests/test_gpu.py and the
stages of `make gpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import attnkern
from attnkern import rng, testing

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Call(NamedTuple):
    """make_inputs(*sizes, **inputs), attention(**options): lengths are no multiples of a tile."""

    name: str
    sizes: tuple[int, ...]  # batch, heads, queries, keys, head size[, of values]
    dtype: torch.dtype = BF16
    options: Mapping[str, Any] = MappingProxyType({})
    inputs: Mapping[str, Any] = MappingProxyType({})

    def make(self, device: Any = "cuda", seed: int = 1) -> testing.Inputs:
        return testing.make_inputs(*self.sizes, dtype=self.dtype, device=device, seed=seed, **self.inputs)


def calls() -> list[Call]:
    """Each class of head size on the fast path and the generic one, each dtype, few queries, shared heads, masks with
    gradients."""
    causal = {"is_causal": True}
    found = []
    for size in (32, 64, 96, 128, 192, 256, 320, 512):
        found.append(Call(f"d{size} causal", (1, 2, 200, 150, size), options=causal))
        found.append(Call(f"d{size} softcap", (1, 2, 70, 200, size), FP16, {"softcap": 5.0}))
        found.append(Call(f"d{size} mask", (1, 2, 70, 90, size), inputs={"mask": ("bool", "B11S")}))
        found.append(
            Call(f"d{size} few queries", (1, 4, 2, 700, size), inputs={"heads_k": 2}, options={"enable_gqa": True})
        )
    for size in (32, 64, 128, 256, 512):
        found.append(Call(f"d{size} float32", (1, 2, 70, 90, size), FP32, causal))
        found.append(Call(f"d{size} float32 few queries", (1, 2, 2, 300, size), FP32))
    grouped = {"enable_gqa": True}
    found += [
        Call("full", (1, 2, 200, 300, 128)),
        Call("one head", (1, 1, 70, 100, 128)),
        Call("window", (1, 2, 300, 300, 64), options={"is_causal": True, "window": (100, None)}),
        Call("grouped", (1, 6, 150, 150, 64), options=grouped, inputs={"heads_k": 2}),
        Call("grouped, d128", (1, 6, 150, 150, 128), FP16, grouped, {"heads_k": 2}),
        Call("grouped unlike", (1, 6, 150, 150, 128), options=grouped, inputs={"heads_k": 2, "heads_v": 3}),
        Call("192 and 128", (1, 2, 150, 150, 192, 128), options=causal),
        Call("bias", (2, 2, 90, 70, 64), inputs={"mask": ("float", "BHLS")}),
        Call("bias of all elements", (2, 2, 90, 70, 128), inputs={"mask": ("float", "1HLS"), "mask_dtype": FP32}),
        Call("dropout", (1, 2, 90, 70, 64), options={"dropout_p": 0.25}),
        Call("columns apart", (1, 2, 90, 70, 24), inputs={"layout": "stepped"}),
    ]
    return found


CALLS = {call.name: call for call in calls()}
MODES = {"default": False, "deterministic": True}  # what torch is asked for: the backward pass may have other kernels


def leaves_of(call: Call, device: Any = "cuda") -> dict[str, torch.Tensor]:
    return {n: x.requires_grad_(x.is_floating_point()) for n, x in call.make(device).tensors.items()}


def run(call: Call, leaves: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Output, log-sum-exp and all gradients of the CUDA kernels. Dropout draws the same entries in every call."""
    if "dropout_p" in call.options:
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
    inputs, keep = call.make(device, seed), None
    if "dropout_p" in call.options:
        q, k = inputs.query, inputs.key
        torch.manual_seed(5)
        drawn = rng.draw_seed(q.device)
        keep = rng.keep_mask(drawn, call.options["dropout_p"], *q.shape[:3], k.shape[2])
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
