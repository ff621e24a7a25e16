"""The operators: schemas, shapes and strides, and which backend a call goes to. No arithmetic.

Programs see `attnkern::forward`, `backward`, `tangent` and `second_backward`; the operators below them are those of a
compiled library.

They are what torch.compile, export, the profiler, the FLOP counter, DTensor and selective checkpointing see. Autograd
is outside (autograd/) and so is autocast (problem.py). The CPU implementation registers itself from C++
(csrc/ops.cpp), because a Python hop costs more than a short attention; devices with several backends route the
argument `backend` in Python, here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, plain
from .backends import reference
from .backends.failed import CannotBuild
from .params import (
    DTYPES,
    GRAD_BIAS,
    GRAD_GRAD_LSE,
    GRAD_GRAD_OUT,
    GRAD_K,
    GRAD_Q,
    GRAD_V,
    SCHEMA,
    AttentionParams,
    empty_like_heads,
    ends_are_dense,
)
from .problem import Problem


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


def _define(schema: str, **options: Any) -> None:
    try:
        library.define(schema, **options)
    except RuntimeError as error:  # libraries used to define some of their operators themselves
        raise ImportError(
            f"attnkern: the compiled libraries in {Path(__file__).parent} are of another version than its Python "
            "files: build them again (`make build` in a checkout), or reinstall attnkern"
        ) from error


# Any strides are right, but the output's follow the inputs': Inductor must not change them behind the fakes' back.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

# lse has shape (0,) unless need_lse.
_define(
    f"forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? key_ranges, Tensor? philox_seed, {SCHEMA},"
    " bool need_lse, str backend)"
    " -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
# grad_mask: 1 q, 2 k, 4 v, 8 bias. A gradient not asked for has shape (0,).
_define(
    "backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? key_ranges,"
    f" Tensor? philox_seed, Tensor out, Tensor lse, {SCHEMA}, int grad_mask, str backend)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    tags=_TAGS,
)

# The tangents of what `forward` returns, for tangents of its inputs. A tangent that is None is zero.
_define(
    "tangent(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? key_ranges, Tensor? philox_seed, Tensor? tq,"
    f" Tensor? tk, Tensor? tv, Tensor? tbias, Tensor out, Tensor lse, {SCHEMA}, str backend)"
    " -> (Tensor tout, Tensor tlse)",
    tags=_TAGS,
)
# The gradient of <cot_dq, dq> + <cot_dk, dk> + <cot_dv, dv> + <cot_dbias, dbias>, with dq, dk, dv, dbias of `backward`.
# A cotangent that is None is zero. grad_mask as in `backward`, and 16 grad_out, 32 grad_lse.
_define(
    "second_backward(Tensor? cot_dq, Tensor? cot_dk, Tensor? cot_dv, Tensor? cot_dbias, Tensor grad_out,"
    " Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? key_ranges, Tensor? philox_seed,"
    f" Tensor out, Tensor lse, {SCHEMA}, int grad_mask, str backend)"
    " -> (Tensor g_grad_out, Tensor g_grad_lse, Tensor gq, Tensor gk, Tensor gv, Tensor gbias)",
    tags=_TAGS,
)

# Of csrc/cuda: `forward` and `backward` with the backend's own arguments. Where splits or schedule are given,
# they replace the plan's (csrc/cuda/ops_cuda.cpp).
_define(
    f"cuda_forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? key_ranges, Tensor? philox_seed, {SCHEMA},"
    " bool need_lse, bool tf32,"
    " int? splits=None, int? schedule=None) -> (Tensor out, Tensor lse)"
)
_define(
    "cuda_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? key_ranges,"
    f" Tensor? philox_seed, Tensor out, Tensor lse, {SCHEMA}, int grad_mask, bool tf32, bool deterministic)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)
_define(
    f"cuda_plan(ScalarType dtype, int[] q, int[] k, int[] v, int[] bias, ScalarType bias_dtype, {SCHEMA},"
    " bool key_ranges, bool tf32, bool deterministic, int grad_mask, int[] chip) -> str"
)

forward = torch.ops.attnkern.forward.default
backward = torch.ops.attnkern.backward.default
tangent = torch.ops.attnkern.tangent.default
second_backward = torch.ops.attnkern.second_backward.default

# What kernels rely on. problem.py has checked calls of attnkern.attention; these checks are for a caller of the bare
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_ranges: Tensor | None,
    philox_seed: Tensor | None,
    params: Sequence[Any],
) -> AttentionParams:
    """Raises where the tensors don't make a problem; the operator's six numbers, normalised."""
    kinds = _kind(q), _kind(k), _kind(v), None if bias is None else _kind(bias)
    ranges = None if key_ranges is None else (_kind(key_ranges), key_ranges.dim() == 5 and ends_are_dense(key_ranges))
    if philox_seed is None:
        return _known(*kinds, ranges, None, False, *params)
    return _known(*kinds, ranges, _kind(philox_seed), philox_seed.is_contiguous(), *params)


@functools.lru_cache(maxsize=4096)
def _known(
    q: _Kind,
    k: _Kind,
    v: _Kind,
    bias: _Kind | None,
    key_ranges: tuple[_Kind, bool] | None,
    philox_seed: _Kind | None,
    seed_is_contiguous: bool,
    *params: Any,
) -> AttentionParams:
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
    if key_ranges is not None:
        kind, dense = key_ranges
        _check_devices(q, key_ranges=kind)
        _require(
            kind.dtype == torch.int32
            and len(kind.shape) == 5
            and all(n in (1, m) for n, m in zip(kind.shape, (batch, heads, seqlen_q), strict=False))
            and kind.shape[3] in (1, 2)
            and kind.shape[4] == 2
            and dense,
            "key_ranges must be int32 (B or 1, Hq or 1, L or 1, 1 or 2, 2), contiguous in the last two dimensions",
        )
    normal = AttentionParams.of(q.dtype, params)
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


def _check_tangents(q: Tensor, of: Sequence[Tensor | None], **tangents: Tensor | None) -> None:
    """Tangents of q, k, v and bias, or cotangents of their gradients, must look like these."""
    _check_devices(q, **tangents)
    for (name, x), like in zip(tangents.items(), of, strict=True):
        if x is not None:
            has_tangent = like is not None and like.dtype != torch.bool
            _require(has_tangent, f"{name} must be None, since only a floating bias has a tangent")
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
def _forward_fake(q, k, v, bias, key_ranges, philox_seed, *others):
    _check_devices(q, k=k, v=v, bias=bias, key_ranges=key_ranges, philox_seed=philox_seed)
    *_, need_lse, _ = others
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(q.shape[:3] if need_lse else (0,), dtype=lse_dtype)
    return empty_like_heads(q, v.shape[-1]), lse


@torch.library.register_fake("attnkern::backward", lib=library)
def _backward_fake(grad_out, grad_lse, q, k, v, bias, key_ranges, philox_seed, out, lse, *others):
    _check_devices(q, k=k, v=v, bias=bias, key_ranges=key_ranges, philox_seed=philox_seed)
    _check_devices(q, grad_out=grad_out, grad_lse=grad_lse, out=out, lse=lse)
    *_, grad_mask, _ = others
    return _empty_grads(q, k, v, bias, grad_mask)


def _empty_grads(q, k, v, bias, grad_mask):
    grads = [
        empty_like_heads(x, x.shape[-1]) if grad_mask & bit else x.new_empty(0)
        for x, bit in ((q, GRAD_Q), (k, GRAD_K), (v, GRAD_V))
    ]
    dbias = bias.new_empty(bias.shape) if grad_mask & GRAD_BIAS else q.new_empty(0)
    return *grads, dbias


@torch.library.register_fake("attnkern::tangent", lib=library)
def _tangent_fake(q, k, v, bias, key_ranges, philox_seed, tq, tk, tv, tbias, out, lse, *params_and_backend):
    _check_devices(q, k=k, v=v, bias=bias, key_ranges=key_ranges, philox_seed=philox_seed, out=out, lse=lse)
    _check_devices(q, tq=tq, tk=tk, tv=tv, tbias=tbias)
    return empty_like_heads(q, v.shape[-1]), lse.new_empty(q.shape[:3])


@torch.library.register_fake("attnkern::second_backward", lib=library)
def _second_backward_fake(
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_out, grad_lse, q, k, v, bias, key_ranges, philox_seed, out, lse, *others
):
    _check_devices(q, k=k, v=v, bias=bias, key_ranges=key_ranges, philox_seed=philox_seed, out=out, lse=lse)
    _check_devices(q, cot_dq=cot_dq, cot_dk=cot_dk, cot_dv=cot_dv, cot_dbias=cot_dbias)
    _check_devices(q, grad_out=grad_out, grad_lse=grad_lse)
    grad_mask = others[-2]
    g_grad_out = empty_like_heads(q, v.shape[-1]) if grad_mask & GRAD_GRAD_OUT else q.new_empty(0)
    g_grad_lse = lse.new_empty(q.shape[:3] if grad_mask & GRAD_GRAD_LSE else 0)
    return g_grad_out, g_grad_lse, *_empty_grads(q, k, v, bias, grad_mask)


# CUDA devices have several backends: the operator's last argument says which, or leaves it to the call
# (backends.AT_RUN_TIME). (A backend's module holds no kernels yet: it fetches them when it is first called.)


def _run(operator: str, backend: str, problem: Problem, training: bool, *arguments: Any) -> Any:
    """An operator of the backend that its last argument says. Where that one cannot build its kernels, the next runs,
    but for one that was asked for."""
    if backend == backends.AT_RUN_TIME:
        chosen = backends.select(problem, training=training)
    else:
        chosen = backends.with_kernels(backend, problem.q.device.type)
    failed = []
    while True:
        try:
            return _function(chosen, operator)(*arguments)
        except CannotBuild as error:
            if backend == chosen.NAME:
                raise RuntimeError(f"attnkern: backend {backend!r} cannot run this call: {error}") from error
            failed.append(chosen)
            chosen = backends.after(failed, problem, training, error)


def _function(backend: Any, operator: str) -> Any:
    """Of the backend, or in plain torch: for `reference`, and derivatives of which a backend has no kernel."""
    if backend is reference or (operator in ("tangent", "second_backward") and not _has_second_order(backend)):
        return getattr(plain, operator)
    return getattr(backend, operator)


def _has_second_order(backend: Any) -> bool:
    return getattr(backend, "has_second_order", bool)()


def route_forward(q, k, v, bias, key_ranges, philox_seed, *rest):
    """`attnkern::forward` by the backend that is its last argument."""
    *numbers, need_lse, backend = rest
    params = _checked(q, k, v, bias, key_ranges, philox_seed, numbers)
    problem = Problem(q, k, v, bias, key_ranges, params, None)
    return _run("forward", backend, problem, need_lse, q, k, v, bias, key_ranges, philox_seed, params, need_lse)


def route_backward(grad_out, grad_lse, q, k, v, bias, key_ranges, philox_seed, out, lse, *rest):
    """`attnkern::backward` by the backend that is its last argument."""
    *numbers, grad_mask, backend = rest
    params = _checked(q, k, v, bias, key_ranges, philox_seed, numbers)
    _check_results(q, v, {"lse": lse, "grad_lse": grad_lse}, out=out, grad_out=grad_out)
    _check_grad_mask(grad_mask, 15, bias)
    problem = Problem(q, k, v, bias, key_ranges, params, None)
    given = grad_out, grad_lse, q, k, v, bias, key_ranges, philox_seed, out, lse
    return _run("backward", backend, problem, True, *given, params, grad_mask)


library.impl("forward", route_forward, "CUDA")
library.impl("backward", route_backward, "CUDA")


def _interpreted(operator: Any, route: Any) -> Any:
    """On the way to an operator's kernels for a device: `route` for CPU tensors with the backend `triton`, of which the
    compiled library's kernel knows nothing."""
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def chosen(keys: Any, *arguments: Any) -> Any:
        if arguments[-1] == backends.triton.NAME and arguments[0].is_cpu:
            return route(*arguments)
        return operator.redispatch(keys & below, *arguments)

    return chosen


if backends.triton_interpreted.asked:
    library.impl("forward", _interpreted(forward, route_forward), "BackendSelect", with_keyset=True)
    library.impl("backward", _interpreted(backward, route_backward), "BackendSelect", with_keyset=True)


# The other two have kernels in some backends only (`_function`).


def route_tangent(q, k, v, bias, key_ranges, philox_seed, tq, tk, tv, tbias, out, lse, *rest):
    """`attnkern::tangent` by the backend that is its last argument."""
    *numbers, backend = rest
    params = _checked(q, k, v, bias, key_ranges, philox_seed, numbers)
    _check_results(q, v, {"lse": lse}, out=out)
    _check_tangents(q, (q, k, v, bias), tq=tq, tk=tk, tv=tv, tbias=tbias)
    problem = Problem(q, k, v, bias, key_ranges, params, None)
    given = q, k, v, bias, key_ranges, philox_seed, tq, tk, tv, tbias, out, lse
    return _run("tangent", backend, problem, True, *given, params)


def route_second_backward(
    cot_dq, cot_dk, cot_dv, cot_dbias, grad_out, grad_lse, q, k, v, bias, key_ranges, philox_seed, out, lse, *rest
):
    """`attnkern::second_backward` by the backend that is its last argument."""
    *numbers, grad_mask, backend = rest
    params = _checked(q, k, v, bias, key_ranges, philox_seed, numbers)
    _check_results(q, v, {"lse": lse, "grad_lse": grad_lse}, out=out, grad_out=grad_out)
    cotangents = cot_dq, cot_dk, cot_dv, cot_dbias
    _check_tangents(q, (q, k, v, bias), cot_dq=cot_dq, cot_dk=cot_dk, cot_dv=cot_dv, cot_dbias=cot_dbias)
    _check_grad_mask(grad_mask, 63, bias)
    problem = Problem(q, k, v, bias, key_ranges, params, None)
    given = *cotangents, grad_out, grad_lse, q, k, v, bias, key_ranges, philox_seed, out, lse
    return _run("second_backward", backend, problem, True, *given, params, grad_mask)


library.impl("tangent", route_tangent, "CompositeExplicitAutograd")
library.impl("second_backward", route_second_backward, "CompositeExplicitAutograd")
