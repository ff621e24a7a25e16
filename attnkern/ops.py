"""The operators: schemas, shapes and strides, and which backend a call goes to. No arithmetic.

Programs see `attnkern::forward`, `backward`, `tangent` and `second_backward`; those of torch.export see `attention` and
`weights`, which have derivatives. The operators below them are those of a compiled library.

They are what torch.compile, export, the profiler, the FLOP counter, DTensor and selective checkpointing see. Autograd
is outside (autograd/) and so is autocast (problem.py). The CPU implementation registers itself from C++
(csrc/ops.cpp), because a Python hop costs more than a short attention; devices with several backends route the
argument `backend` in Python, here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import backends, plain
from .backends import reference
from .backends.failed import CannotBuild
from .bits import is_mask, row_bytes
from .pages import is_page_size
from .params import (
    DTYPES,
    GRAD_BIAS,
    GRAD_GRAD_LSE,
    GRAD_GRAD_OUT,
    GRAD_SINKS,
    LEAST_PAGE,
    SCHEMA,
    AttentionParams,
    empty_like_heads,
    ends_are_dense,
)
from .problem import Problem
from .shapes import Kind
from .signatures import (
    ATTENTION,
    BACKWARD,
    CUDA_BACKWARD,
    CUDA_FORWARD,
    FORWARD,
    GRAD_BITS,
    SECOND_BACKWARD,
    SECOND_ORDER_BITS,
    TANGENT,
    WEIGHTS,
    Derivatives,
    Inputs,
    Signature,
)


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

for _signature in (FORWARD, BACKWARD, TANGENT, SECOND_BACKWARD, ATTENTION, WEIGHTS):
    _define(_signature.schema, tags=_TAGS)
for _signature in (CUDA_FORWARD, CUDA_BACKWARD):
    _define(_signature.schema)
_define(
    f"cuda_plan(ScalarType dtype, int[] q, int[] k, int[] v, int[] bias, ScalarType bias_dtype, {SCHEMA},"
    " bool key_ranges, int pages, bool tf32, bool deterministic, int grad_mask, int[] chip) -> str"
)

forward = torch.ops.attnkern.forward.default
backward = torch.ops.attnkern.backward.default
tangent = torch.ops.attnkern.tangent.default
second_backward = torch.ops.attnkern.second_backward.default
attention = torch.ops.attnkern.attention.default
weights = torch.ops.attnkern.weights.default

# What kernels rely on. problem.py has checked calls of attnkern.attention; these checks are for a caller of the bare
# operators. Those of the compiled libraries make the same ones in C++ (csrc/common/unpack.h).


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise RuntimeError(f"attnkern: {message}")


def _check_devices(q: Tensor | Kind, **tensors: Tensor | Kind | None) -> None:
    for name, x in tensors.items():
        _require(x is None or x.device == q.device, f"{name} must be on q's device")


def _checked(inputs: Inputs, params: Sequence[Any]) -> AttentionParams:
    """Raises where the tensors don't make a problem; the operator's numbers, normalised."""
    kinds = (None if x is None else Kind.of(x) for x in inputs)
    ranges, seed = inputs.key_ranges, inputs.philox_seed
    dense = ranges is not None and ranges.dim() == 5 and ends_are_dense(ranges)
    return _known(Inputs(*kinds), dense, seed is not None and seed.is_contiguous(), *params)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _known(inputs: Any, ranges_are_dense: bool, seed_is_contiguous: bool, *params: Any) -> AttentionParams:
    """Of Inputs whose entries are a Kind or None."""
    _check_devices(**inputs._asdict())
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    key_ranges, philox_seed = inputs.key_ranges, inputs.philox_seed
    _require(len(q.shape) == len(k.shape) == len(v.shape) == 4, "q, k and v must have 4 dimensions")
    _require(q.dtype in DTYPES and q.dtype == k.dtype == v.dtype, "q, k and v must have one floating dtype")
    (batch, heads, seqlen_q, head_dim), (_, heads_k, rows, _), heads_v = q.shape, k.shape, v.shape[1]
    table = inputs.block_table
    _require(
        k.shape[0] == v.shape[0]
        and k.shape[3] == head_dim
        and v.shape[2] == rows
        and (table is not None or k.shape[0] == batch),
        "the sizes of q, k and v do not fit",
    )
    if table is not None:
        _require(
            table.dtype == torch.int32 and len(table.shape) == 2 and table.shape[0] == batch,
            "block_table must be int32 (B, pages of a sequence)",
        )
        _require(
            is_page_size(rows) and (k.shape[0] > 0 or table.shape[1] == 0),
            f"the rows of a page must be a power of two from {LEAST_PAGE} on",
        )
    seqlen_k = inputs.seqlen_k
    _require(
        heads == 0 or (heads_k > 0 and heads_v > 0 and heads % heads_k == 0 and heads % heads_v == 0),
        "the heads of k and v must divide those of q",
    )
    if bias is not None:
        by_distance = len(bias.shape) == 3
        _require(by_distance or len(bias.shape) == 4, "bias must have 4 dimensions (3 as a table of distances)")
        of_bits = not by_distance and bias.dtype == torch.uint8
        known = of_bits or bias.dtype in (torch.bool, torch.float32, q.dtype)
        _require(known, "bias must be bool, float32 or of q's dtype")
        full = (batch, heads, seqlen_q, seqlen_k)
        if by_distance:
            _require(
                bias.dtype != torch.bool
                and bias.shape[2] == max(0, seqlen_q + seqlen_k - 1)
                and all(n in (1, m) for n, m in zip(bias.shape[:2], full, strict=False)),
                "a bias of 3 dimensions must be floating point, (B or 1, Hq or 1, L + S - 1), and dense in the last "
                "one",
            )
        else:
            if of_bits:
                whole = bias.shape[3] == row_bytes(seqlen_k)
                _require(whole, "a bias of bits must have 8 bytes for each 64 keys, side by side")
            sizes = zip(bias.shape, full[: 3 if of_bits else 4], strict=False)
            _require(all(n in (1, m) for n, m in sizes), "the sizes of bias do not fit")
    if (sinks := inputs.sinks) is not None:
        exact = torch.promote_types(q.dtype, torch.float32)
        fits = len(sinks.shape) == 2 and sinks.shape[0] in (1, batch) and sinks.shape[1] == heads
        _require(fits and sinks.dtype == exact, "sinks must be (B or 1, Hq) and float32 (float64 for float64)")
    if key_ranges is not None:
        shape = key_ranges.shape
        _require(
            key_ranges.dtype == torch.int32
            and len(shape) == 5
            and all(n in (1, m) for n, m in zip(shape, (batch, heads, seqlen_q), strict=False))
            and shape[3] in (1, 2)
            and shape[4] == 2
            and ranges_are_dense,
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


def _check_not_in_pages(inputs: Inputs) -> None:
    _require(inputs.block_table is None, "there is no gradient of keys and values in pages")


def _check_tangent_devices(inputs: Inputs, prefix: str, tangents: Derivatives) -> None:
    _check_devices(inputs.q, **{f"{prefix}{name}": x for name, x in tangents._asdict().items()})


def _check_tangents(inputs: Inputs, prefix: str, tangents: Derivatives) -> None:
    """Tangents, or cotangents of gradients, must look like what they belong to."""
    _check_tangent_devices(inputs, prefix, tangents)
    for name, x, like in zip(Derivatives._fields, tangents, inputs.differentiable, strict=True):
        if x is not None:
            has_tangent = like is not None and not is_mask(like)
            _require(has_tangent, f"{prefix}{name} must be None, since only a floating bias, and sinks, have a tangent")
            fits = x.shape == like.shape and x.dtype == like.dtype
            _require(fits, f"{prefix}{name} must have the shape and dtype of what it belongs to")


def _check_grad_mask(grad_mask: int, bits: Sequence[int], inputs: Inputs) -> None:
    most = sum(bits)
    _require(0 <= grad_mask <= most, f"grad_mask must be from 0 to {most}, got {grad_mask}")
    bias = inputs.bias
    _require(
        not grad_mask & GRAD_BIAS or (bias is not None and not is_mask(bias)),
        "only a floating bias has a gradient",
    )
    _require(not grad_mask & GRAD_SINKS or inputs.sinks is not None, "sinks that aren't given have no gradient")


def _fake(signature: Signature) -> Any:
    """The results' shapes and strides, of a function of the operator's `arguments`."""

    def register(made: Any) -> Any:
        @torch.library.register_fake(f"attnkern::{signature.arguments.__name__}", lib=library)
        def fake(*flat: Any) -> Any:
            call = signature.of(flat)
            tensors = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
            _check_devices(**call.inputs._asdict(), **tensors)
            return made(call)

        return made

    return register


def _empty_lse(q: Tensor, needed: Any) -> Tensor:
    return q.new_empty(q.shape[:3] if needed else (0,), dtype=torch.promote_types(q.dtype, torch.float32))


def _empty_gradients(inputs: Inputs, grad_mask: int) -> list[Tensor]:
    """New memory has the order of its input's; that of a bias and of sinks is contiguous."""

    def gradient(name: str, x: Tensor, bit: int) -> Tensor:
        if not grad_mask & bit:
            return _empty_lse(inputs.q, False) if name == "sinks" else inputs.q.new_empty(0)
        return x.new_empty(x.shape) if name in ("bias", "sinks") else empty_like_heads(x, x.shape[-1])

    return [gradient(*of) for of in zip(Derivatives._fields, inputs.differentiable, GRAD_BITS, strict=True)]


@_fake(FORWARD)
def _forward_fake(call):
    return empty_like_heads(call.inputs.q, call.inputs.v.shape[-1]), _empty_lse(call.inputs.q, call.need_lse)


@_fake(BACKWARD)
def _backward_fake(call):
    return tuple(_empty_gradients(call.inputs, call.grad_mask))


@_fake(TANGENT)
def _tangent_fake(call):
    _check_tangent_devices(call.inputs, "t", call.tangents)
    return empty_like_heads(call.inputs.q, call.inputs.v.shape[-1]), _empty_lse(call.inputs.q, True)


@_fake(SECOND_BACKWARD)
def _second_backward_fake(call):
    q = call.inputs.q
    _check_tangent_devices(call.inputs, "cot_d", call.cotangents)
    g_grad_out = empty_like_heads(q, call.inputs.v.shape[-1]) if call.grad_mask & GRAD_GRAD_OUT else q.new_empty(0)
    g_grad_lse = _empty_lse(q, call.grad_mask & GRAD_GRAD_LSE)
    return g_grad_out, g_grad_lse, *_empty_gradients(call.inputs, call.grad_mask)


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


def route_forward(*flat):
    """`attnkern::forward` by the backend that is its last argument."""
    call = FORWARD.of(flat)
    params = _checked(call.inputs, call.params)
    problem = Problem.of_inputs(call.inputs, params)
    return _run("forward", call.backend, problem, call.need_lse, call.inputs, params, call.need_lse)


def _check_backward(call: Any, bits: Sequence[int]) -> AttentionParams:
    """Of the arguments of backward, or second_backward."""
    q, v = call.inputs.q, call.inputs.v
    params = _checked(call.inputs, call.params)
    _check_not_in_pages(call.inputs)
    _check_results(q, v, {"lse": call.lse, "grad_lse": call.grad_lse}, out=call.out, grad_out=call.grad_out)
    _check_grad_mask(call.grad_mask, bits, call.inputs)
    return params


def route_backward(*flat):
    """`attnkern::backward` by the backend that is its last argument."""
    call = BACKWARD.of(flat)
    params = _check_backward(call, GRAD_BITS)
    problem = Problem.of_inputs(call.inputs, params)
    given = call.grad_out, call.grad_lse, call.inputs, call.out, call.lse
    return _run("backward", call.backend, problem, True, *given, params, call.grad_mask)


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


def route_tangent(*flat):
    """`attnkern::tangent` by the backend that is its last argument."""
    call = TANGENT.of(flat)
    params = _checked(call.inputs, call.params)
    _check_not_in_pages(call.inputs)
    _check_results(call.inputs.q, call.inputs.v, {"lse": call.lse}, out=call.out)
    _check_tangents(call.inputs, "t", call.tangents)
    problem = Problem.of_inputs(call.inputs, params)
    return _run("tangent", call.backend, problem, True, call.inputs, call.tangents, call.out, call.lse, params)


def route_second_backward(*flat):
    """`attnkern::second_backward` by the backend that is its last argument."""
    call = SECOND_BACKWARD.of(flat)
    params = _check_backward(call, SECOND_ORDER_BITS)
    _check_tangents(call.inputs, "cot_d", call.cotangents)
    problem = Problem.of_inputs(call.inputs, params)
    given = call.cotangents, call.grad_out, call.grad_lse, call.inputs, call.out, call.lse
    return _run("second_backward", call.backend, problem, True, *given, params, call.grad_mask)


library.impl("tangent", route_tangent, "CompositeExplicitAutograd")
library.impl("second_backward", route_second_backward, "CompositeExplicitAutograd")
