"""A call for every CUDA kernel, small enough for a sanitizer: shared by tests/test_gpu.py and `make gpu`.

PYTHONPATH=tests python -m gpu_kernels                runs each once, for compute-sanitizer to watch
PYTHONPATH=tests python -m gpu_kernels --repeat 1000  each so often, bit for bit the same
PYTHONPATH=tests python -m gpu_kernels --list         no device needed
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import attnkern
from attnkern import testing

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Call(NamedTuple):
    """make_inputs(*sizes, **inputs), attention(**options): lengths are no multiples of a tile."""

    name: str
    sizes: tuple[int, ...]  # batch, heads, queries, keys, head size[, of values]
    dtype: torch.dtype = BF16
    options: Mapping[str, Any] = MappingProxyType({})
    inputs: Mapping[str, Any] = MappingProxyType({})

    def make(self, device: str = "cuda") -> testing.Inputs:
        return testing.make_inputs(*self.sizes, dtype=self.dtype, device=device, seed=1, **self.inputs)


def calls() -> list[Call]:
    """Each class of head size plain and general, each dtype, few queries, shared heads, masks with gradients."""
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
        Call("window", (1, 2, 300, 300, 64), options={"is_causal": True, "window": (100, None)}),
        Call("grouped", (1, 6, 150, 150, 64), options=grouped, inputs={"heads_k": 2}),
        Call("grouped unlike", (1, 6, 150, 150, 128), options=grouped, inputs={"heads_k": 2, "heads_v": 3}),
        Call("192 and 128", (1, 2, 150, 150, 192, 128), options=causal),
        Call("bias", (2, 2, 90, 70, 64), inputs={"mask": ("float", "BHLS")}),
        Call("bias of all elements", (2, 2, 90, 70, 128), inputs={"mask": ("float", "1HLS"), "mask_dtype": FP32}),
        Call("dropout", (1, 2, 90, 70, 64), options={"dropout_p": 0.25}),
        Call("columns apart", (1, 2, 90, 70, 24), inputs={"layout": "stepped"}),
    ]
    return found


CALLS = {call.name: call for call in calls()}


def run(call: Call, leaves: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Output, log-sum-exp and all gradients of the CUDA kernels. Dropout draws the same entries in every call."""
    torch.manual_seed(7)
    out, lse = attnkern.attention(**leaves, **call.options, return_lse=True, backend="cuda")
    wanted = [x for x in leaves.values() if x.requires_grad]
    return [out, lse, *torch.autograd.grad([out, lse], wanted, [torch.ones_like(out), torch.ones_like(lse)])]


def leaves_of(call: Call) -> dict[str, torch.Tensor]:
    return {n: x.requires_grad_(x.is_floating_point()) for n, x in call.make().tensors.items()}


def differing_runs(call: Call, times: int) -> int:
    """How many of so many runs differ from the first in any bit, in torch's deterministic mode, which stays on. The
    device is asked once, at the end."""
    leaves = leaves_of(call)
    torch.use_deterministic_algorithms(True)
    first = [x.detach().clone() for x in run(call, leaves)]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times - 1):
        unlike = [
            (a.view(torch.uint8) != b.view(torch.uint8)).any() for a, b in zip(run(call, leaves), first, strict=True)
        ]
        differing += torch.stack(unlike).any()
    return int(differing)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=0, metavar="N", help="run each N times and compare all bits")
    parser.add_argument("--list", action="store_true", help="the names of the calls")
    options = parser.parse_args(arguments)
    failed = 0
    for name, call in CALLS.items():
        if options.list:
            print(name)
            continue
        start = time.perf_counter()
        if options.repeat:
            differing = differing_runs(call, options.repeat)
            failed += differing > 0
            said = f"{differing} of {options.repeat} runs differ from the first"
        else:
            for deterministic in (False, True):  # the backward pass may have other kernels then
                torch.use_deterministic_algorithms(deterministic)
                run(call, leaves_of(call))
            torch.cuda.synchronize()
            said = "done"
        print(f"{name}: {said}, {time.perf_counter() - start:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
