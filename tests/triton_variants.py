"""Variants of the Triton kernels, every kernel with every feature, compiled for a GPU by whichever Triton is imported:

    PYTHONPATH=.venv-triton-3.6.0:.:tests python -m triton_variants 90

A line of JSON with Triton's version; then one for each variant: its name, and what the compiler said against it, ""
for nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from attnkern.triton_kernels import launch, plan

from attnkern.params import GRAD_BIAS, GRAD_K, GRAD_Q, GRAD_V, UNBOUNDED, AttentionParams

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BIASES = {
    "bias": (2, 4, 1024, 1024),
    "bias of heads": (1, 4, 1024, 1024),
    "bias of keys": (2, 1, 1, 1024),
    "mask": (1, 4, 1024, 1024),
    "mask in bits": (1, 4, 1024, 128),
    "padding": (2, 1, 1, 1024),
    "bias by distance": (1, 4, 1024, 1024),
}


class Problem(NamedTuple):
    """What a call has beside 4 heads and 1024 keys, and the kernels of it that are compiled, by name."""

    size: int
    kernels: str
    dtype: torch.dtype = BF16
    bias: str = ""  # of BIASES; "mask" and "padding" are bool, in bits uint8
    ranges: int = 0
    dropout: bool = False
    softcap: float = 0.0
    queries: int = 1024
    page: int = 0  # rows of a page; 0: keys and values lie one after the other
    band: tuple[int, int] = (UNBOUNDED, UNBOUNDED)  # left and right

    def key(self, capability: int) -> plan.PlanKey:
        q, k = dense(2, 4, self.queries, self.size), dense(2, 4, 1024, self.size)
        pages = None
        if self.page:
            k = k._replace(shape=(300, *k.shape[1:]), stride=dense(300, 4, self.page, self.size).stride)
            pages = plan.Pages(self.page, 1024 // self.page)
        bias = ranges = bias_dtype = None
        if self.bias:
            batch, heads, rows, keys = BIASES[self.bias]
            bias = dense(batch, heads, min(rows, self.queries), keys)
            if self.bias.endswith("by distance"):
                bias = plan.TensorSpec(bias.shape, (*bias.stride[:2], -1, 1), False)
            bias_dtype = self.dtype if self.bias.startswith("bias") else torch.bool
            bias_dtype = torch.uint8 if self.bias.endswith("in bits") else bias_dtype
        if self.ranges:
            row = 2 * self.ranges
            stride = (self.queries * row, 0, row, 2, 1)
            ranges = plan.TensorSpec((2, 1, self.queries, self.ranges, 2), stride, True)
        params = AttentionParams(self.size**-0.5, self.softcap, *self.band, 0, 0.25 if self.dropout else 0.0)
        masks = bias, bias_dtype, int(self.dropout)
        return plan.PlanKey(capability, self.dtype, q, k, k, *masks, params, False, ranges, False, pages)


CAUSAL, WINDOW = (UNBOUNDED, 0), (200, 5)
# By compute capability: pointers and mma.sync, descriptors and wgmma, descriptors and tcgen05.
PROBLEMS = {
    80: [
        Problem(64, "forward dkdv dq delta", band=CAUSAL),
        Problem(64, "dbias second_dkdv second_dbias", bias="bias of heads", ranges=1, band=CAUSAL),
        Problem(128, "forward dq tangent", bias="mask", dropout=True, band=WINDOW),
        Problem(128, "dkdv visits", ranges=2, softcap=30.0, dtype=FP16),
        Problem(64, "forward second_dq", dtype=FP32),
        Problem(64, "dbias second_dbias", bias="bias by distance", ranges=2, dropout=True),
        Problem(64, "forward dkdv dq second_dq", bias="mask in bits", band=CAUSAL),
        Problem(64, "decode", queries=4, bias="mask in bits"),
        Problem(64, "decode combine", queries=4),
        Problem(64, "decode", queries=4, ranges=2, bias="bias", softcap=30.0),
        Problem(64, "forward", page=16, ranges=1, band=CAUSAL),
        Problem(64, "decode", page=64, queries=4, ranges=1),
    ],
    90: [
        Problem(64, "forward dkdv dq tangent second_dkdv second_dq"),
        Problem(128, "forward dkdv dq", ranges=1, band=CAUSAL),
        Problem(64, "dkdv tangent second_dq", ranges=2, bias="padding", band=WINDOW),
        Problem(128, "forward dq", bias="bias", dropout=True),
        Problem(64, "dkdv", bias="mask", softcap=30.0, dtype=FP32),
        Problem(128, "forward dkdv", bias="mask in bits"),
        Problem(64, "dbias", bias="bias by distance", band=CAUSAL),
        Problem(128, "decode", queries=4, ranges=1, dtype=FP32),
        Problem(128, "forward", page=64, ranges=1, band=CAUSAL),
        Problem(64, "decode", page=16, queries=4, band=WINDOW),
    ],
    100: [
        Problem(128, "forward dkdv dq", band=CAUSAL),
        Problem(64, "forward dq", ranges=2, dropout=True),
        Problem(64, "forward dkdv dbias", bias="bias of keys", softcap=30.0),
        Problem(128, "dbias", bias="bias by distance", band=CAUSAL),
        Problem(128, "second_dkdv", bias="mask"),
        Problem(64, "forward dkdv", bias="mask in bits"),
        Problem(64, "forward", page=16, ranges=1),
    ],
}


def dense(*shape: int) -> plan.TensorSpec:
    """A tensor (B, H, L, size) without gaps."""
    return plan.TensorSpec(shape, (0, 0, 0, 0), True).like(shape[3]).spec()


def steps(problem: Problem, capability: int) -> dict[str, Any]:
    """The launches that a call may come to, by the names of their kernels."""
    key = problem.key(capability)
    mask = GRAD_Q | GRAD_K | GRAD_V
    if problem.bias.startswith("bias"):
        mask |= GRAD_BIAS
    forward = plan.forward_plan(key, True, 132 if problem.queries < 1024 else 0)
    found = {"forward": forward.step, "decode": forward.step, "combine": forward.combine}
    if problem.page:
        return found
    backward = plan.backward_plan(key, key.q, key.q, True, mask)
    direction = plan.TangentSpecs(key.q, key.k, key.v, key.bias if mask & GRAD_BIAS else None)
    tangent, second = plan.second_backward_plan(key, direction, key.q, key.q, True, mask)
    found |= {"tangent": tangent.step} | {
        name: getattr(backward, name) for name in ("delta", "visits", "dkdv", "dq", "dbias")
    }
    return found | {f"second_{name}": getattr(second, name) for name in ("dkdv", "dq", "dbias")}


def variants(capability: int) -> Iterator[tuple[str, launch.Kernel]]:
    for problem in PROBLEMS[capability]:
        found = steps(problem, capability)
        for name in problem.kernels.split():
            yield f"{name} of {problem}", found[name].kernel


def main(capability: int) -> None:
    print(json.dumps({"triton": triton.__version__}))
    for name, kernel in variants(capability):
        try:
            kernel.compile(capability)
            said = ""
        except Exception as error:  # whatever a compiler of many stages raises
            said = f"{type(error).__name__}: {error}"
        print(json.dumps({"variant": name, "said": said}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
