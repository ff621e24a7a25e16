"""The CUDA C++ kernels (csrc/cuda) for compute capability 8.0 and above: one operator of the compiled library for each
pass, which allocates, plans and launches (csrc/cuda/ops_cuda.cpp); and its plans, as data.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._library import NOTHING_DIRECT, load_error, past_the_dispatcher, path_of
from ..arguments import rounds_to_tf32
from ..bits import as_described
from ..params import GRAD_SINKS, MAX_HEAD_DIM, MAX_LENGTH, AttentionParams
from ..problem import Problem
from ..relative import as_scores, by_distance
from ..shapes import TensorSpec, lies
from ..signatures import Inputs
from . import disabled
from .reference import check_pages

NAME = "cuda"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# As csrc/cuda/left_out.h counts them.
LEFT_OUT = {"cuda-decode": 1, "cuda-sm90": 2, "cuda-sm90-backward": 4, "cuda-sm90-fused": 8}
if load_error("_cuda") is None and disabled.parts(NAME):
    torch.ops.attnkern.cuda_leave_out(sum(LEFT_OUT[family] for family in disabled.parts(NAME)))


@functools.cache
def unavailable() -> str | None:
    """Why this backend cannot run at all here, or None."""
    if (reason := disabled.reason(NAME)) is not None:
        return reason
    if (error := load_error("_cuda")) is not None:
        return f"the compiled CUDA library is not loaded ({error})"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


@functools.cache
def capability(index: int) -> int:
    """Compute capability times 10 of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


class Chip(NamedTuple):
    """The numbers of a device that plans depend on; memory in bytes."""

    capability: int  # times 10
    multiprocessors: int
    shared_per_multiprocessor: int
    shared_per_block: int


@functools.cache
def chip(index: int) -> Chip:
    """The limits of a CUDA device."""
    found: Any = torch.cuda.get_device_properties(index)
    shared = found.shared_memory_per_multiprocessor, found.shared_memory_per_block_optin
    return Chip(capability(index), found.multi_processor_count, *shared)


# As backends/cpu.py's; `stands_first` tells `call` which calls of a device are this backend's where none is named.
_loaded = load_error("_cuda") is None and disabled.reason(NAME) is None
call, forward_directly, stands_first = past_the_dispatcher(path_of("_cuda"), NAME) if _loaded else NOTHING_DIRECT


def refusals(problem: Problem) -> list[str]:
    """Why this backend cannot run `problem`; empty if it can."""
    q, k, v = problem.q, problem.k, problem.v
    reasons = []
    if (reason := unavailable()) is not None:
        reasons.append(reason)
    elif (found := capability(q.get_device())) < 80:
        reasons.append(f"compute capability {found / 10}, and 8.0 is needed")
    if q.dtype not in _DTYPES:
        reasons.append(f"query is {str(q.dtype).removeprefix('torch.')}")
    if (size := max(q.shape[3], v.shape[3])) > MAX_HEAD_DIM:
        reasons.append(f"head size {size} is above {MAX_HEAD_DIM}")
    if (length := max(q.shape[2], k.shape[2])) > MAX_LENGTH:
        reasons.append(f"length {length} is above {MAX_LENGTH}")
    return reasons


class Launch(NamedTuple):
    """A launch of a plan: the kernel, and how it cuts the work. str() is its line in `explain`."""

    kernel: str  # "forward", "decode", or "backward" and the gradients that it makes
    family: str  # "sm_80": mma.sync and cp.async, on every chip; "sm_90a": Hopper's wgmma and TMA
    head_dim: int  # widths of the tiles: head sizes up to these
    head_dim_v: int
    rows: int  # of a tile of what the kernel goes through in parallel, and
    columns: int  # of a block of what it loops over
    threads: int  # of a block
    shared_bytes: int
    blocks: int
    words: str  # the variant

    def __str__(self) -> str:
        names = {"decode": "packed queries and keys", "forward": "queries and keys", "backward dq": "queries and keys"}
        names["backward bias"] = names["backward dq"]
        sizes = f"up to {self.head_dim}"
        if self.head_dim_v != self.head_dim:
            sizes += f" and {self.head_dim_v}"
        parts = [
            f"{self.kernel}, {self.family}: {self.rows} x {self.columns} {names.get(self.kernel, 'keys and queries')}",
            f"head size {sizes}",
            f"{self.threads} threads",
            f"{self.shared_bytes} bytes of shared memory",
            f"{self.blocks} blocks",
        ]
        return ", ".join([*parts, self.words] if self.words else parts)


class Plan(NamedTuple):
    """What the compiled library does for a call (csrc/cuda/plan.cpp)."""

    launches: tuple[Launch, ...]  # in order; the forward pass first
    gathered: tuple[str, ...]  # inputs whose rows aren't whole 16-byte chunks: they are read element by element
    kind: str  # of the forward pass, what the order of backends depends on: one of csrc/cuda/kind.h


def _spec_of_bias(bias: Tensor, seqlen_q: int, seqlen_k: int) -> TensorSpec:
    return TensorSpec(*as_scores(bias, seqlen_q, seqlen_k), True) if by_distance(bias) else TensorSpec.of(bias)


def plan_of(problem: Problem, on: Chip | None = None) -> Plan:
    """How the library cuts a call. It depends on shapes, strides, alignment, options and the chip.

    `on` is the chip, None: that of the problem's device. The backward pass is in it where an input requires a gradient.
    """
    q, k, v, bias = problem[:4]
    seqlen_k, pages = k.shape[2], 0
    if bias is not None:
        bias = as_described(bias, seqlen_k)
    if problem.pages is not None:
        k, v, table = problem.pages
        pages = table.shape[1]
    return _plan(
        q.dtype,
        (*lies(q), *lies(k), *lies(v)),
        None if bias is None else _spec_of_bias(bias, q.shape[2], seqlen_k),
        torch.bool if bias is None else bias.dtype,
        problem.params,
        problem.ranges is not None,
        pages,
        *_modes(q.dtype),
        problem.wanted(),
        chip(q.get_device()) if on is None else on,
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype,
    of_tensors: tuple[Any, ...],
    bias: TensorSpec | None,
    bias_dtype: torch.dtype,
    params: AttentionParams,
    *rest_and_chip: Any,
) -> Plan:
    q, k, v = (TensorSpec(*of_tensors[n : n + 3]) for n in (0, 3, 6))
    if 0 in (*q.shape, *k.shape, *v.shape):
        return Plan((), (), "generic")
    *rest, on = rest_and_chip
    described = [[] if x is None else [*x.shape, *x.stride, int(not x.aligned)] for x in (q, k, v, bias)]
    found = json.loads(torch.ops.attnkern.cuda_plan(dtype, *described, bias_dtype, *params, *rest, [*on]))
    return Plan(tuple(Launch(**launch) for launch in found["launches"]), tuple(found["gathered"]), found["kind"])


def notes(problem: Problem) -> list[str]:
    """What a call costs beyond its kernels."""
    return [
        f"reads {name} element by element, since not all its rows are whole 16-byte chunks at multiples of 16 bytes"
        for name in plan_of(problem).gathered
    ]


def plan(problem: Problem, on: Chip | None = None) -> list[str]:
    """`plan_of`, a line for each kernel."""
    launches = plan_of(problem, on).launches
    lines = [str(launch) for launch in launches] or ["no kernel: a dimension is empty"]
    if launches and problem.wanted():
        lines.insert(1, "backward, any chip: delta = rowsum(grad_out * out) first")
        if problem.wanted() & GRAD_SINKS:
            lines.insert(2, "backward sinks, any chip: of delta")
    return lines


def is_for_hopper(plan: Plan) -> bool:
    """Whether the forward pass is that of Hopper's own kernels."""
    return bool(plan.launches) and plan.launches[0].family == "sm_90a"


def forward(
    inputs: Inputs,
    params: AttentionParams,
    need_lse: bool,
    splits: int | None = None,
    schedule: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`attnkern::forward` (ops.py) on a CUDA device. splits and schedule replace the plan's: for timing."""
    check_pages(inputs, params)
    if splits is None is schedule and (results := forward_directly(*inputs, *params, need_lse, NAME)) is not None:
        return results
    tf32, _ = _modes(inputs.q.dtype)
    operator = torch.ops.attnkern.cuda_forward
    return _run(operator, *inputs, *params, need_lse, tf32, splits, schedule)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    params: AttentionParams,
    grad_mask: int,
) -> tuple[Tensor, ...]:
    """`attnkern::backward` (ops.py) on a CUDA device."""
    operator = torch.ops.attnkern.cuda_backward
    return _run(operator, grad_out, grad_lse, *inputs, out, lse, *params, grad_mask, *_modes(inputs.q.dtype))


def _run(operator: Any, *arguments: Any) -> Any:
    try:
        return operator(*arguments)
    except RuntimeError as error:
        # torch's C ABI passes on that an allocation failed, but not as which exception.
        if "attnkern: can't allocate memory" not in str(error):
            raise
        message = str(error).splitlines()[0].replace("can't allocate memory", "CUDA out of memory")
        raise torch.OutOfMemoryError(message) from None


def _modes(dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether torch lets the factors of these tensors' float32 products be rounded to tf32; whether it asks for the
    same bits in every run."""
    return rounds_to_tf32(dtype), torch.are_deterministic_algorithms_enabled()
