"""The operators `attnkern::forward`, `backward`, `tangent` and `second_backward`: schemas, shapes and strides, FLOP
counts. No arithmetic.

They are what torch.compile, export, the profiler, the FLOP counter, DTensor and selective checkpointing see. Autograd
is outside (autograd.py) and so is autocast (problem.py). The CPU implementation registers itself from C++
(csrc/ops.cpp), because a Python hop costs more than a short attention; devices with several backends route the
argument `backend` in Python, here.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .problem import DTYPES, UNBOUNDED, Score, is_length_major


def _define_library() -> torch.library.Library:
    """torch holds one library of operators of a name in a process."""
    try:
        return torch.library.Library("attnkern", "DEF")
    except RuntimeError as error:
        files = [Path(file) for file in torch.ops.loaded_libraries if Path(file).name == "_C.abi3.so"]
        others = ", ".join(str(file.parent) for file in files) or "whose library isn't loaded"
        raise ImportError(
            f"attnkern: this process has loaded another copy of attnkern ({others}), and {Path(__file__).parent} "
            "can't be loaded beside it: keep one of them on sys.path"
        ) from error


library = _define_library()

_SCORE = (
    "float softmax_scale, float softcap, SymInt window_left, SymInt window_right, SymInt band_offset, float dropout_p"
)
# Any strides are right, but the output's follow the inputs': Inductor must not change them behind the fakes' back.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

# lse has shape (0,) unless need_lse.
library.define(
    f"forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, {_SCORE}, bool need_lse, str backend)"
    " -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
# grad_mask: 1 q, 2 k, 4 v, 8 bias. A gradient not asked for has shape (0,).
library.define(
    "backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed,"
    f" Tensor out, Tensor lse, {_SCORE}, int grad_mask, str backend)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    tags=_TAGS,
)

# What `forward` adds to out and lse where the inputs move by tangents. A tangent that is None is zero.
library.define(
    "tangent(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, Tensor? tq, Tensor? tk, Tensor? tv,"
    f" Tensor? tbias, Tensor out, Tensor lse, {_SCORE}, str backend) -> (Tensor tout, Tensor tlse)",
    tags=_TAGS,
)
# The gradient of <cot_dq, dq> + <cot_dk, dk> + <cot_dv, dv> + <cot_dbias, dbias>, with dq, dk, dv, dbias of `backward`.
# A cotangent that is None is zero. grad_mask as in `backward`, and 16 grad_out, 32 grad_lse.
library.define(
    "second_backward(Tensor? cot_dq, Tensor? cot_dk, Tensor? cot_dv, Tensor? cot_dbias, Tensor grad_out,"
    " Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, Tensor out, Tensor lse,"
    f" {_SCORE}, int grad_mask, str backend)"
    " -> (Tensor g_grad_out, Tensor g_grad_lse, Tensor gq, Tensor gk, Tensor gv, Tensor gbias)",
    tags=_TAGS,
)

forward = torch.ops.attnkern.forward.default
backward = torch.ops.attnkern.backward.default
tangent = torch.ops.attnkern.tangent.default
second_backward = torch.ops.attnkern.second_backward.default

GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS, GRAD_GRAD_OUT, GRAD_GRAD_LSE = 1, 2, 4, 8, 16, 32


def empty_like_heads(x: Tensor, head_dim: int) -> Tensor:
    """Empty (B, H, L, head_dim) in the memory order of x (B, H, L, D)."""
    batch, heads, length, _ = x.shape
    if is_length_major(x):
        return x.new_empty(batch, length, heads, head_dim).transpose(1, 2)
    return x.new_empty(batch, heads, length, head_dim)


def add_up_heads(grads: Sequence[Tensor | None], parts: Sequence[Tensor | None]) -> None:
    """Fills dk and dv from the parts that a kernel wrote, where it wrote more heads than they have: neighbouring heads
    share one. Does nothing for a gradient that is its own part, and for one not asked for (None, or of shape (0,))."""
    for grad, part in zip(grads, parts, strict=True):
        if grad is not None and part is not None and part is not grad and grad.ndim == 4:
            grad.copy_(part.unflatten(1, (grad.shape[1], -1)).sum(2))


# What kernels count on. Calls of attnkern.attention are right by problem.py; these checks are for a caller of the bare
# operators. Those of the compiled libraries make the same ones in C++ (csrc/common/unpack.h).


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise RuntimeError(f"attnkern: {message}")


def _check_devices(q: Tensor | _Kind, **tensors: Tensor | _Kind | None) -> None:
    for name, x in tensors.items():
        _require(x is None or x.device == q.device, f"{name} must be on q's device")


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _kind(x: Tensor) -> _Kind:
    return tuple.__new__(_Kind, (x.shape, x.dtype, x.device))


def _checked(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, philox_seed: Tensor | None, score: Sequence[Any]
) -> Score:
    """Raises where q, k, v, bias and philox_seed don't make a problem; the operator's six numbers, normalised."""
    kinds = _kind(q), _kind(k), _kind(v), None if bias is None else _kind(bias)
    if philox_seed is None:
        return _known(*kinds, None, False, *score)
    return _known(*kinds, _kind(philox_seed), philox_seed.is_contiguous(), *score)


@functools.lru_cache(maxsize=4096)
def _known(
    q: _Kind, k: _Kind, v: _Kind, bias: _Kind | None, philox_seed: _Kind | None, seed_is_contiguous: bool, *score: Any
) -> Score:
    _check_devices(q, k=k, v=v, bias=bias, philox_seed=philox_seed)
    _require(len(q.shape) == len(k.shape) == len(v.shape) == 4, "q, k and v must have 4 dimensions")
    _require(q.dtype in DTYPES and q.dtype == k.dtype == v.dtype, "q, k and v must have one floating dtype")
    (batch, heads, seqlen_q, head_dim), (_, heads_k, seqlen_k, _), heads_v = q.shape, k.shape, v.shape[1]
    _require(
        k.shape[0] == v.shape[0] == batch and k.shape[3] == head_dim and v.shape[2] == seqlen_k,
        "the sizes of q, k and v do not fit",
    )
    _require(
        heads == 0 or (heads_k > 0 and heads_v > 0 and heads % heads_k == 0 and heads % heads_v == 0),
        "the heads of k and v must divide those of q",
    )
    if bias is not None:
        _require(len(bias.shape) == 4, "bias must have 4 dimensions")
        _require(bias.dtype in (torch.bool, torch.float32, q.dtype), "bias must be bool, float32 or of q's dtype")
        full = (batch, heads, seqlen_q, seqlen_k)
        _require(all(n in (1, m) for n, m in zip(bias.shape, full, strict=True)), "the sizes of bias do not fit")
    normal = Score.of(q.dtype, *score)
    if normal.dropout_p > 0:
        _require(
            philox_seed is not None
            and philox_seed.dtype == torch.int64
            and seed_is_contiguous
            and len(philox_seed.shape) == 1
            and philox_seed.shape[0] > 0
            and batch % philox_seed.shape[0] == 0,
            "dropout needs philox_seed, a contiguous int64 vector whose length divides the batch",
        )
    return normal


def _check_results(q: Tensor, v: Tensor, lse_of: dict[str, Tensor | None], **out_of: Tensor | None) -> None:
    """`out_of` must look like the output, `lse_of` like the log-sum-exp."""
    _check_devices(q, **out_of, **lse_of)
    for name, x in out_of.items():
        fits = x is None or (x.shape == (*q.shape[:3], v.shape[3]) and x.dtype == q.dtype)
        _require(fits, f"{name} must have the shape and dtype of the output")
    exact = torch.promote_types(q.dtype, torch.float32)
    for name, x in lse_of.items():
        fits = x is None or (x.shape == q.shape[:3] and x.dtype == exact)
        _require(fits, f"{name} must have shape (batch, heads, seqlen_q) and be float32 (float64 for float64)")


def _check_moves(q: Tensor, of: Sequence[Tensor | None], **moves: Tensor | None) -> None:
    """Tangents of q, k, v and bias, or cotangents of their gradients, must look like these."""
    _check_devices(q, **moves)
    for (name, x), like in zip(moves.items(), of, strict=True):
        if x is not None:
            moving = like is not None and like.dtype != torch.bool
            _require(moving, f"{name} must be None, since only a floating bias moves")
            assert like is not None
            fits = x.shape == like.shape and x.dtype == like.dtype
            _require(fits, f"{name} must have the shape and dtype of what it belongs to")


def _check_grad_mask(grad_mask: int, most: int, bias: Tensor | None) -> None:
    _require(0 <= grad_mask <= most, f"grad_mask must be from 0 to {most}, got {grad_mask}")
    _require(
        not grad_mask & GRAD_BIAS or (bias is not None and bias.dtype != torch.bool),
        "only a floating bias has a gradient",
    )


@torch.library.register_fake("attnkern::forward", lib=library)
def _forward_fake(
    q, k, v, bias, philox_seed, softmax_scale, softcap, left, right, offset, dropout_p, need_lse, backend
):
    _check_devices(q, k=k, v=v, bias=bias, philox_seed=philox_seed)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(q.shape[:3] if need_lse else (0,), dtype=lse_dtype)
    return empty_like_heads(q, v.shape[-1]), lse


@torch.library.register_fake("attnkern::backward", lib=library)
def _backward_fake(
    grad_out,
    grad_lse,
    q,
    k,
    v,
    bias,
    philox_seed,
    out,
    lse,
    softmax_scale,
    softcap,
    left,
    right,
    offset,
    dropout_p,
    grad_mask,
    backend,
):
    _check_devices(q, k=k, v=v, bias=bias, philox_seed=philox_seed)
    _check_devices(q, grad_out=grad_out, grad_lse=grad_lse, out=out, lse=lse)
    return _empty_grads(q, k, v, bias, grad_mask)


def _empty_grads(q, k, v, bias, grad_mask):
    grads = [
        empty_like_heads(x, x.shape[-1]) if grad_mask & bit else x.new_empty(0)
        for x, bit in ((q, GRAD_Q), (k, GRAD_K), (v, GRAD_V))
    ]
    dbias = bias.new_empty(bias.shape) if grad_mask & GRAD_BIAS else q.new_empty(0)
    return *grads, dbias


@torch.library.register_fake("attnkern::tangent", lib=library)
def _tangent_fake(q, k, v, bias, philox_seed, tq, tk, tv, tbias, out, lse, *score_and_backend):
    _check_devices(q, k=k, v=v, bias=bias, philox_seed=philox_seed, out=out, lse=lse)
    _check_devices(q, tq=tq, tk=tk, tv=tv, tbias=tbias)
    return empty_like_heads(q, v.shape[-1]), lse.new_empty(q.shape[:3])


@torch.library.register_fake("attnkern::second_backward", lib=library)
def _second_backward_fake(
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_out, grad_lse, q, k, v, bias, philox_seed, out, lse, *others
):
    _check_devices(q, k=k, v=v, bias=bias, philox_seed=philox_seed, out=out, lse=lse)
    _check_devices(q, cot_dq=cot_dq, cot_dk=cot_dk, cot_dv=cot_dv, cot_dbias=cot_dbias)
    _check_devices(q, grad_out=grad_out, grad_lse=grad_lse)
    grad_mask = others[-2]
    g_grad_out = empty_like_heads(q, v.shape[-1]) if grad_mask & GRAD_GRAD_OUT else q.new_empty(0)
    g_grad_lse = lse.new_empty(q.shape[:3] if grad_mask & GRAD_GRAD_LSE else 0)
    return g_grad_out, g_grad_lse, *_empty_grads(q, k, v, bias, grad_mask)


# CUDA devices have several backends: the operator's last argument says which. (A backend's module holds no kernels yet:
# it fetches them when it is first called.)


def _module_of(backend: str, q: Tensor) -> Any:
    from .backends import with_kernels

    return with_kernels(backend, q.device.type)


def route_forward(q, k, v, bias, philox_seed, *rest):
    """`attnkern::forward` by the backend that is its last argument."""
    *numbers, need_lse, backend = rest
    score = _checked(q, k, v, bias, philox_seed, numbers)
    return _module_of(backend, q).forward(q, k, v, bias, philox_seed, *score, need_lse)


def route_backward(grad_out, grad_lse, q, k, v, bias, philox_seed, out, lse, *rest):
    """`attnkern::backward` by the backend that is its last argument."""
    *numbers, grad_mask, backend = rest
    score = _checked(q, k, v, bias, philox_seed, numbers)
    _check_results(q, v, {"lse": lse, "grad_lse": grad_lse}, out=out, grad_out=grad_out)
    _check_grad_mask(grad_mask, 15, bias)
    arguments = grad_out, grad_lse, q, k, v, bias, philox_seed, out, lse, *score, grad_mask
    return _module_of(backend, q).backward(*arguments)


library.impl("forward", route_forward, "CUDA")
library.impl("backward", route_backward, "CUDA")


# The other two have kernels in some backends only. Plain torch, in tiles, serves the rest.


def route_tangent(q, k, v, bias, philox_seed, tq, tk, tv, tbias, out, lse, *rest):
    """`attnkern::tangent` by the backend that is its last argument."""
    *numbers, backend = rest
    score = _checked(q, k, v, bias, philox_seed, numbers)
    _check_results(q, v, {"lse": lse}, out=out)
    _check_moves(q, (q, k, v, bias), tq=tq, tk=tk, tv=tv, tbias=tbias)
    arguments = q, k, v, bias, philox_seed, tq, tk, tv, tbias, out, lse, *score
    return _with_second_order(backend, q).tangent(*arguments)


def route_second_backward(
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_out, grad_lse, q, k, v, bias, philox_seed, out, lse, *rest
):
    """`attnkern::second_backward` by the backend that is its last argument."""
    *numbers, grad_mask, backend = rest
    score = _checked(q, k, v, bias, philox_seed, numbers)
    _check_results(q, v, {"lse": lse, "grad_lse": grad_lse}, out=out, grad_out=grad_out)
    cotangents = cot_dq, cot_dk, cot_dv, cot_dbias
    _check_moves(q, (q, k, v, bias), cot_dq=cot_dq, cot_dk=cot_dk, cot_dv=cot_dv, cot_dbias=cot_dbias)
    _check_grad_mask(grad_mask, 63, bias)
    arguments = *cotangents, grad_out, grad_lse, q, k, v, bias, philox_seed, out, lse, *score, grad_mask
    return _with_second_order(backend, q).second_backward(*arguments)


def _with_second_order(backend: str, q: Tensor) -> Any:
    from . import second_order
    from .backends import triton

    return triton if _module_of(backend, q) is triton and triton.has_second_order() else second_order


library.impl("tangent", route_tangent, "CompositeExplicitAutograd")
library.impl("second_backward", route_second_backward, "CompositeExplicitAutograd")


# FLOPs, as torch counts its own attention: 2 per multiply-add of each matrix product, masked entries included.


class _Waiting(importlib.abc.MetaPathFinder):
    """Calls functions with torch.utils.flop_counter as soon as that has been imported."""

    def __init__(self) -> None:
        self.functions: list[Callable[[ModuleType], None]] = []

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch.utils.flop_counter":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                run(module)
                for function in self.functions:
                    function(module)

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


_waiting = _Waiting()
if "torch.utils.flop_counter" not in sys.modules:
    sys.meta_path.insert(0, _waiting)


def with_flop_counter(function: Callable[[ModuleType], None]) -> Callable[[], None]:
    """function(torch.utils.flop_counter) now, or when a program imports that. Returns what stops the waiting.

    attnkern doesn't import it: it brings all of Triton along, which takes longer than attnkern itself.
    """
    if (module := sys.modules.get("torch.utils.flop_counter")) is not None and _waiting not in sys.meta_path:
        function(module)
        return lambda: None
    _waiting.functions.append(function)
    return lambda: _waiting.functions.remove(function) if function in _waiting.functions else None


_FORMULAS: dict[Any, Callable[..., int]] = {}


def _counts(operator: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def keep(formula: Callable[..., int]) -> Callable[..., int]:
        _FORMULAS[operator] = formula
        return formula

    return keep


def _pairs(q_shape) -> int:
    batch, heads, seqlen_q, _ = q_shape
    return batch * heads * seqlen_q


@_counts(torch.ops.attnkern.forward)
def _forward_flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Q K^T and P V."""
    return 2 * _pairs(q_shape) * k_shape[2] * (q_shape[3] + v_shape[3])


@_counts(torch.ops.attnkern.backward)
def _backward_flops(grad_shape, grad_lse_shape, q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Q K^T again, dO V^T, P^T dO, dS K, dS^T Q."""
    return 2 * _pairs(q_shape) * k_shape[2] * (3 * q_shape[3] + 2 * v_shape[3])


@_counts(torch.ops.attnkern.tangent)
def _tangent_flops(q_shape, k_shape, v_shape, bias, seed, tq, tk, tv, tbias, *args, out_shape=None, **kwargs) -> int:
    """Q K^T again, the scores' tangents by those of Q and K, the output's by those of the scores and of V."""
    head_dim, head_dim_v = q_shape[3], v_shape[3]
    scores_move = not tq is tk is tbias is None
    size = head_dim * (1 + _given(tq, tk)) + head_dim_v * (scores_move + _given(tv))
    return 2 * _pairs(q_shape) * k_shape[2] * size


@_counts(torch.ops.attnkern.second_backward)
def _second_backward_flops(
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_shape, grad_lse_shape, q_shape, k_shape, v_shape, *args, **kwargs
) -> int:
    """The tangent with its products, dO V^T, dO cot_dv^T, P'^T dO, dS' K, dS'^T Q, dS cot_dk, dS^T cot_dq."""
    head_dim, head_dim_v = q_shape[3], v_shape[3]
    first = _tangent_flops(q_shape, k_shape, v_shape, None, None, cot_dq, cot_dk, cot_dv, cot_dbias)
    scores_move = not cot_dq is cot_dk is cot_dbias is None
    size = head_dim * (2 + _given(cot_dq, cot_dk)) + head_dim_v * (1 + scores_move + _given(cot_dv))
    return first + 2 * _pairs(q_shape) * k_shape[2] * size


def _given(*shapes) -> int:
    return sum(shape is not None for shape in shapes)


def _register_formulas(flop_counter: Any) -> None:
    for operator, formula in _FORMULAS.items():
        flop_counter.register_flop_formula(operator)(formula)


with_flop_counter(_register_formulas)


# Sharding rules (DTensor). Batch elements, heads and, without a band, rows of queries are independent of each other:
# each of the three may be split over ranks, whatever else is sharded is gathered first. What a split cuts has a
# gradient cut the same way; what every rank holds as a whole (one key head for all, a mask for the whole batch) has one
# that is the sum over the ranks.

_sharding_is_registered = False


def register_sharding() -> None:
    """Teach DTensor the operators. To be called where a DTensor may arrive; does nothing before DTensor is imported.

    (All but `tangent`: torch makes no dual numbers of DTensors. Importing DTensor takes half as long as torch itself,
    so attnkern does not.)
    """
    global _sharding_is_registered
    if not _sharding_is_registered and "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.experimental import register_sharding

        _sharding_is_registered = True
        register_sharding(forward)(_forward_sharding)
        register_sharding(backward)(_backward_sharding)
        register_sharding(second_backward)(_second_backward_sharding)


register_sharding._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a trace calls it, and has nothing to see


def _splits(q, k, v, bias, philox_seed, window_left, window_right) -> list[list]:
    """Every way to run on one mesh dimension: the placements of q, k, v, bias, philox_seed and of out and lse."""
    from torch.distributed.tensor import Replicate, Shard

    def split(dim, seed=None):
        cut, whole = Shard(dim), Replicate()
        keys = [whole if dim == 2 or x.shape[dim] == 1 else cut for x in (k, v)]
        mask = None if bias is None else cut if bias.shape[dim] == q.shape[dim] else whole
        return [cut, *keys, mask, seed, cut]

    splits = [[None if x is None else Replicate() for x in (q, k, v, bias, philox_seed, q)]]
    # One key for all counts batch elements and heads from the first of all; one per batch element goes with it.
    if philox_seed is None:
        splits.append(split(0))
        if _heads_divide(q, k, v):
            splits.append(split(1))
        if window_left == window_right == UNBOUNDED:
            splits.append(split(2))
    elif philox_seed.shape[0] == q.shape[0]:
        splits.append(split(0, Shard(0)))
    return splits


def _heads_divide(q, k, v) -> bool:
    """Whether every rank's query heads find their key and value heads on that rank."""
    fewer = {x.shape[1] for x in (k, v)} - {1, q.shape[1]}
    sizes = [math.prod(c) for n in range(q.mesh.ndim + 1) for c in itertools.combinations(q.mesh.shape, n)]
    # DTensor itself does not cut a dimension into more parts than it has entries.
    return all(heads % size == 0 or size > heads for heads in fewer for size in sizes)


def _forward_sharding(q, k, v, bias, seed, scale, softcap, left, right, offset, dropout_p, need_lse, backend):
    from torch.distributed.tensor import Replicate

    others = [None] * 8
    return [
        ([out, out if need_lse else Replicate()], [*inputs, *others])
        for *inputs, out in _splits(q, k, v, bias, seed, left, right)
    ]


def _backward_sharding(grad_out, grad_lse, q, k, v, bias, seed, out, lse, *others):
    score, grad_mask = others[:6], others[6]
    rules = []
    for *inputs, rows in _splits(q, k, v, bias, seed, *score[2:4]):
        given = [rows, None if grad_lse is None else rows, *inputs, rows, rows]
        rules.append((_placed_grads(inputs, rows, grad_mask), [*given, *[None] * len(others)]))
    return rules


def _placed_grads(inputs, rows, grad_mask) -> list:
    """The placements of the gradients of q, k, v, bias (their own are `inputs`): cut alike, or sums over the ranks."""
    from torch.distributed.tensor import Partial, Replicate

    def gradient(x, bit):
        if not grad_mask & bit or not rows.is_shard():
            return Replicate()
        return Partial() if x.is_replicate() else x

    return [gradient(x, bit) for x, bit in zip(inputs[:4], (GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS), strict=True)]


def _second_backward_sharding(
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_out, grad_lse, q, k, v, bias, seed, out, lse, *others
):
    from torch.distributed.tensor import Replicate

    grad_mask = others[6]
    rules = []
    for *inputs, rows in _splits(q, k, v, bias, seed, *others[2:4]):
        cotangents = zip((cot_dq, cot_dk, cot_dv, cot_dbias), inputs[:4], strict=True)
        moved = [None if x is None else placement for x, placement in cotangents]
        given = [*moved, rows, None if grad_lse is None else rows, *inputs, rows, rows]
        of_rows = [rows if grad_mask & bit else Replicate() for bit in (GRAD_GRAD_OUT, GRAD_GRAD_LSE)]
        rules.append(([*of_rows, *_placed_grads(inputs, rows, grad_mask)], [*given, *[None] * len(others)]))
    return rules


register_sharding()
