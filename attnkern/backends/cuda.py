"""The CUDA C++ kernels (csrc/cuda) for compute capability 8.0 and above: tensors in, launches out.

Results are allocated here, and the operators `attnkern::cuda_*` of the compiled library write into them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from .._library import load_error
from ..problem import Problem
from . import disabled

NAME = "cuda"
MAX_HEAD_DIM = 512
MAX_LENGTH = 2**30 - 1
FEW_QUERIES = 64  # at most so many, and the kernels of decode.cu may be better
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
    """What plans ask of a device; memory in bytes."""

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


def notes(problem: Problem) -> list[str]:
    """What a call costs beyond its kernels."""
    tensors = {"query": problem.q, "key": problem.k, "value": problem.v}
    return [
        f"reads {name} element by element, since not all its rows are whole 16-byte chunks at multiples of 16 bytes"
        for name, x in tensors.items()
        if not _has_vectors(x)
    ]


def plan(problem: Problem, on: Chip | None = None) -> list[str]:
    """How the call is cut, a line for each kernel: tile, head class, threads, shared memory, blocks, variant.

    `on` is the chip, None: that of the problem's device. The lines are those of the compiled library's plan functions
    (csrc/cuda/launch.h), which the launches follow. The backward pass is in them where an input requires a gradient.
    """
    q, k, v, bias = problem[:4]
    if 0 in (*q.shape, *k.shape, *v.shape):
        return ["no kernel: a dimension is empty"]
    on = chip(q.get_device()) if on is None else on
    wanted = ((q, ops.GRAD_Q), (k, ops.GRAD_K), (v, ops.GRAD_V), (bias, ops.GRAD_BIAS))
    grad_mask = sum(bit for x, bit in wanted if x is not None and x.requires_grad) if torch.is_grad_enabled() else 0
    described = [[] if x is None else [*x.shape, *x.stride(), _address(x)] for x in (q, k, v, bias)]
    dtypes = [str(x.dtype).removeprefix("torch.") for x in (q, q if bias is None else bias)]
    modes = (_tf32(), torch.are_deterministic_algorithms_enabled())
    text = torch.ops.attnkern.cuda_plan(dtypes[0], *described, dtypes[1], *problem.score, *modes, grad_mask, [*on])
    return text.splitlines()


def _address(x: Tensor) -> int | torch.SymInt:
    """Of the first element within its storage: storages start at multiples of 16 bytes, and fake tensors have none."""
    return x.storage_offset() * x.element_size()


def family(problem: Problem, capability: int) -> str:
    """The kernels of a forward pass with many queries: "sm_90a" (Hopper's) where these take it, or "sm_80".

    As `why_not` in csrc/cuda/forward_sm90.cu: the choice of a backend needs it in every call, and under torch.compile.
    """
    q, k, v, bias, score, _ = problem
    takes = (
        capability == 90
        and disabled.reason("cuda-sm90") is None
        and q.dtype != torch.float32
        and bias is None
        and not score.dropout_p
        and 0 not in (*q.shape, *k.shape, *v.shape)
        and max(q.shape[3], v.shape[3]) <= 256
        and v.shape[3] % 8 == 0  # the output's rows
        and all(_fits_tensor_map(x) for x in (q, k, v))
    )
    return "sm_90a" if takes else "sm_80"


def _fits_tensor_map(x: Tensor) -> bool:
    """Whether TMA can read it: as `fits_tensor_map` in csrc/cuda/tensor_map.h."""
    steps = [0 if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    dense = x.stride(3) == 1 or x.shape[3] == 1
    aligned = torch.compiler.is_compiling() or _address(x) % 16 == 0  # a trace doesn't see where a view begins
    return dense and (steps[2] != 0 or x.shape[2] == 1) and aligned and all(s % 8 == 0 for s in steps)


def run(operator, tensors: tuple[Tensor | None, ...], *rest, results: tuple[Tensor | None, ...] = ()):
    """Calls an operator of the compiled library. Tests put a simulator here: `results` are those of `tensors` that the
    kernels only write."""
    return operator(*tensors, *rest)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    philox_seed: Tensor | None,
    softmax_scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    band_offset: int,
    dropout_p: float,
    need_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`attnkern::forward` (ops.py) on a CUDA device."""
    out = ops.empty_like_heads(q, v.shape[3])
    lse = torch.empty(q.shape[:3] if need_lse else (0,), dtype=torch.float32, device=q.device)
    score = (softmax_scale, softcap, window_left, window_right, band_offset, dropout_p, _tf32())
    inputs, splits, workspace = (q, k, v, bias, philox_seed), 0, None
    if q.shape[2] <= FEW_QUERIES:
        splits = run(torch.ops.attnkern.cuda_decode_splits, inputs, *score)
        if splits > 1:
            parts = q.shape[0] * q.shape[1] * q.shape[2] * splits
            workspace = torch.empty(parts * (v.shape[3] + 1), dtype=torch.float32, device=q.device)
    written = (out, lse if need_lse else None, workspace)
    run(torch.ops.attnkern.cuda_forward, (*inputs, *written), splits, *score, results=written)
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    philox_seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    band_offset: int,
    dropout_p: float,
    grad_mask: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attnkern::backward` (ops.py) on a CUDA device."""
    wanted = ((q, ops.GRAD_Q), (k, ops.GRAD_K), (v, ops.GRAD_V))
    dq, dk, dv = (ops.empty_like_heads(x, x.shape[3]) if grad_mask & bit else None for x, bit in wanted)
    dbias = None
    if grad_mask & ops.GRAD_BIAS:
        assert bias is not None
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=q.device)
    if 0 in (*q.shape[:3], k.shape[2]):
        for grad in (dq, dk, dv, dbias):
            if grad is not None:
                grad.zero_()
    else:
        heads = q.shape[1]
        heads_out = heads // math.gcd(heads // k.shape[1], heads // v.shape[1])
        # Of key and value heads that several of the kernel's share, the parts are float32 and added up below.
        parts = [
            grad
            if grad is None or grad.shape[1] == heads_out
            else torch.empty(grad.shape[0], heads_out, *grad.shape[2:], dtype=torch.float32, device=q.device)
            for grad in (dk, dv)
        ]
        grad_out, out = (x if x.stride(3) == 1 else x.contiguous() for x in (grad_out, out))
        delta = run(torch.ops.attnkern.delta, (grad_out, out, grad_lse))
        written = (dq, *parts, dbias)
        inputs = (grad_out, q, k, v, bias, philox_seed, lse.contiguous(), delta)
        score = (softmax_scale, softcap, window_left, window_right, band_offset, dropout_p, _tf32())
        dq_sums = None
        if not torch.are_deterministic_algorithms_enabled():
            count = run(torch.ops.attnkern.cuda_backward_sums, (*inputs, *written), heads_out, *score)
            dq_sums = torch.zeros(count, dtype=torch.float32, device=q.device) if count else None
        run(torch.ops.attnkern.cuda_backward, (*inputs, *written, dq_sums), heads_out, *score, results=written)
        ops.add_up_heads((dk, dv), parts)
    dq, dk, dv, dbias = (q.new_empty(0) if grad is None else grad for grad in (dq, dk, dv, dbias))
    return dq, dk, dv, dbias


def _tf32() -> bool:
    """Whether torch lets the factors of float32 products be rounded to tf32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _has_vectors(x: Tensor) -> bool:
    """Whether every row is a whole number of dense 16-byte chunks at a multiple of 16 bytes, as smem.cuh's rows_of."""
    steps = [s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    dense = x.stride(3) == 1 or x.shape[3] <= 1
    return dense and _address(x) % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in (*steps, x.shape[3]))
