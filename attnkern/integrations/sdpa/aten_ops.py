"""Our kernel for each of the aten ops that F.sdpa calls: (a backend's name, the results), or `Refused`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import autograd, ops
from ...arguments import autocasts
from ...backends import kernels_for, name_for_operators
from ...packed import packed_ranges, paged_ranges
from ...params import GRAD_BIAS, GRAD_K, GRAD_Q, GRAD_V
from ...problem import Problem


class Refused(Exception):
    """Why a call goes to the kernel that was there before."""


Result = tuple[str, Any]


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    *,
    one_head_dim: bool,
    backward: bool = False,
) -> tuple[str, Problem]:
    """The backend that takes the call of an aten op, and the call as a Problem."""
    if autocasts(query.device):  # an aten op's arguments have their final dtype
        with torch.autocast(query.device.type, enabled=False):
            options = {"one_head_dim": one_head_dim, "backward": backward}
            return _problem(query, key, value, bias, is_causal, scale, dropout_p, **options)
    if dropout_p != 0:  # below 0 and NaN too, for which torch has its error
        raise Refused("dropout in an aten op: the backward pass may meet another kernel (full=True has dropout)")
    if not query.dim() == key.dim() == value.dim() == 4:
        raise Refused("the inputs are not 4-D")
    if one_head_dim and value.shape[3] != query.shape[3]:
        raise Refused(f"value's head size differs from query's, {value.shape[3]} and {query.shape[3]}")
    grouped = not query.shape[1] == key.shape[1] == value.shape[1]
    try:
        problem = Problem.from_sdpa(query, key, value, bias, 0, is_causal, scale, grouped)
    except (RuntimeError, TypeError, ValueError) as error:
        raise Refused(str(error)) from None
    if problem.q is not query or problem.k is not key or problem.v is not value:
        raise Refused("the batch sizes differ")
    if backward and not problem.q.requires_grad:  # a tensor made in a compiled graph never does
        return _backend(problem._replace(q=query.detach().requires_grad_())), problem
    return _backend(problem), problem


def _backend(problem: Problem) -> str:
    backend, reasons = kernels_for(problem)
    if backend is None:
        raise Refused(reasons)
    return name_for_operators(backend, problem, None)


def _forward(backend: str, problem: Problem, need_lse: bool = True) -> tuple[Tensor, Tensor]:
    out, lse = ops.forward(*problem.inputs(), *problem.params, need_lse, backend)
    if problem.bias is not None:
        # Of a row without a key, for torch's backward kernels: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
        lse.masked_fill_(lse == -math.inf, 0.0)
    return out, lse


def _backward(
    backend: str, problem: Problem, grad_out: Tensor, out: Tensor, lse: Tensor, *, grad_bias: bool = False
) -> tuple[Tensor, ...]:
    mask = GRAD_Q | GRAD_K | GRAD_V | (GRAD_BIAS if grad_bias else 0)
    results = out, lse.contiguous()
    return ops.backward(grad_out, None, *problem.inputs(), *results, *problem.params, mask, backend)


def _cpu_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Result:
    given = query, key, value
    try:
        backend, problem = _problem(*given, attn_mask, is_causal, scale, dropout_p, one_head_dim=True)
    except Refused:
        _check_for_torch(*given)
        raise
    out, lse = _forward(backend, problem)
    return backend, (_like(out, query), _with_strides(lse, _strides(lse.shape, (0, 2, 1))))


def _cpu_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Result:
    given = query, key, value
    try:
        backend, problem = _problem(*given, attn_mask, is_causal, scale, dropout_p, one_head_dim=True, backward=True)
    except Refused:
        _check_for_torch(*given, grad_out=grad_out, out=out, logsumexp=logsumexp)
        raise
    grads = _backward(backend, problem, grad_out, out, logsumexp)[:3]
    return backend, tuple(_length_major(x) for x in grads)


def _check_for_torch(query: Tensor, key: Tensor, value: Tensor, **results: Tensor) -> None:
    """Raises for what torch's CPU kernels read out of bounds, or divide by 0 with, without a word.

    They check the rest: ranks, dtypes, head sizes, the mask's shape. F.sdpa lets only wrong lengths through to them.
    """
    q, k, v = (tuple(x.shape) for x in (query, key, value))
    if not len(q) == len(k) == len(v) == 4 or not q[3] == k[3] == v[3]:
        return
    if k[2] != v[2]:
        raise RuntimeError(f"attnkern: key and value must have the same length (dimension -2), got {k} and {v}")
    for name, shape in (("query", q), ("key", k), ("value", v)):
        if shape[0] != q[0]:
            raise RuntimeError(f"attnkern: {name}'s batch size must be query's {q[0]} in this operator, got {shape}")
        if 0 in shape[1:3]:
            raise RuntimeError(f"attnkern: {name} must have heads and a length in this operator, got {shape}")
    if k[1] != v[1] or q[1] % k[1]:
        raise RuntimeError(
            f"attnkern: key and value must have one number of heads (dimension -3) that divides query's {q[1]} in this "
            f"operator, got {k[1]} and {v[1]}"
        )
    for name, x in results.items():
        if x.shape != q[: x.dim()] or x.dim() < 3:
            raise RuntimeError(f"attnkern: {name} must have the sizes of query {q}, got {tuple(x.shape)}")


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Result:
    _refuse_debug_mask(return_debug_mask)
    _refuse_float64(query)
    backend, problem = _problem(query, key, value, None, is_causal, scale, dropout_p, one_head_dim=True)
    out, lse = _forward(backend, problem)
    rng_state = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    lengths = query.shape[2], key.shape[2]
    return backend, (_like(out, query), lse, None, None, *lengths, *rng_state, query.new_empty(0))


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Result:
    _refuse_float64(query)
    backend, problem = _problem(query, key, value, None, is_causal, scale, dropout_p, one_head_dim=True, backward=True)
    grads = _backward(backend, problem, grad_out, out, logsumexp)[:3]
    return backend, tuple(_like(g, x) for g, x in zip(grads, (query, key, value), strict=True))


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None],
    used: Tensor | None = None,
    block_table: Tensor | None = None,
    *,
    backward: bool = False,
) -> tuple[str, Problem]:
    """The backend and the Problem of torch's bare flash attention: packed sequences (T, H, E), or (B, L, H, E).

    Beside a block_table, key and value are pools of pages (pages, size, H, E).
    """
    _refuse_float64(query)
    if dropout_p != 0:
        raise Refused("dropout in an aten op: the backward pass may meet another kernel")
    if value.shape[-1] != query.shape[-1]:
        raise Refused(f"value's head size differs from query's, {value.shape[-1]} and {query.shape[-1]}")
    if (cum_seq_q is None) != (cum_seq_k is None) and block_table is None:
        raise Refused("of cum_seq_q and cum_seq_k one is None")
    left, right = (None if x is None or x < 0 else int(x) for x in window)
    if is_causal:
        right = 0
    options: dict[str, Any] = {"window": (left, right), "alignment": "bottom_right"}
    tensors = query, key, value
    if block_table is not None:
        if cum_seq_q is None or used is None:
            raise Refused("block_table without cum_seq_q and seqused_k")
        ranges = paged_ranges(query, block_table, key.shape[1], cum_seq_q, used, left, right, "bottom_right")
        options = {"key_ranges": ranges, "block_table": block_table.reshape(1, -1)}
        tensors = query.unsqueeze(0), key, value
    elif cum_seq_q is not None and cum_seq_k is not None:
        ranges = packed_ranges(query, key, cum_seq_q, cum_seq_k, used, left, right, "bottom_right")
        options = {"key_ranges": ranges}
        tensors = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    elif used is not None:
        raise Refused("seqused_k without cum_seq_q")
    q, k, v = (x.transpose(1, 2) for x in tensors)
    try:
        problem = Problem.from_sdpa(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **options)
    except (RuntimeError, TypeError, ValueError) as error:
        raise Refused(str(error)) from None
    if backward and not problem.q.requires_grad:
        return _backend(problem._replace(q=problem.q.detach().requires_grad_())), problem
    return _backend(problem), problem


def _bare_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Result:
    """What torch.nn.attention.varlen calls: out as query lies, lse (H, T) or (B, H, L). max_q and max_k aren't read."""
    _refuse_debug_mask(return_debug_mask)
    if alibi_slopes is not None:
        raise Refused("alibi_slopes is given")
    if num_splits is not None:
        raise Refused("num_splits: the last bit of a sequence's results may depend on its neighbours")
    window = window_size_left, window_size_right
    given = cum_seq_q, cum_seq_k, dropout_p, is_causal, scale, window, seqused_k, block_table
    backend, problem = _packed(query, key, value, *given)
    out, lse = ops.forward(*problem.inputs(), *problem.params, True, backend)
    out = out.transpose(1, 2)
    if cum_seq_q is not None:
        out, lse = out.squeeze(0), lse.squeeze(0)
    unused = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64), query.new_empty(0)
    return backend, (_like(out, query), lse, *unused)


def _bare_flash_out(out: Tensor, *args: Any, **kwargs: Any) -> Result:
    backend, (result, lse, *_) = _bare_flash(*args, **kwargs)
    out.copy_(result)
    return backend, lse


def _bare_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Result:
    window = window_size_left, window_size_right
    given = cum_seq_q, cum_seq_k, dropout_p, is_causal, scale, window
    backend, problem = _packed(query, key, value, *given, backward=True)
    if cum_seq_q is not None:
        grad_out, out, logsumexp = grad_out.unsqueeze(0), out.unsqueeze(0), logsumexp.unsqueeze(0)
    grads = _backward(backend, problem, grad_out.transpose(1, 2), out.transpose(1, 2), logsumexp)[:3]
    inputs = query, key, value
    return backend, tuple(_like(g.transpose(1, 2).reshape(x.shape), x) for g, x in zip(grads, inputs, strict=True))


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Result:
    _refuse_float64(query)
    _refuse_grouped_heads(query, key, value)
    backend, problem = _problem(query, key, value, attn_bias, is_causal, scale, dropout_p, one_head_dim=False)
    out, lse = _forward(backend, problem, compute_log_sumexp)
    if compute_log_sumexp:
        # Rows up to a multiple of 32 do not exist: +inf makes every weight of theirs 0, as torch's kernel has it.
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
    else:
        lse = lse.new_empty(*query.shape[:2], 0)
    return backend, (_length_major(out), lse, *_unused_seeds(query))


def _efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Result:
    _refuse_float64(query)
    _refuse_grouped_heads(query, key, value)
    backend, problem = _problem(
        query, key, value, attn_bias, is_causal, scale, dropout_p, one_head_dim=False, backward=True
    )
    grad_bias = attn_bias is not None and bool(grad_input_mask[3])
    lse = logsumexp[..., : query.shape[2]]
    dq, dk, dv, dbias, _ = _backward(backend, problem, grad_out_, out, lse, grad_bias=grad_bias)
    if attn_bias is not None and grad_bias:
        last = dbias.shape[3]  # in rows of a multiple of 16
        dbias = torch.nn.functional.pad(dbias.reshape(attn_bias.shape), (0, -last % 16))[..., :last]
    return backend, (*(_length_major(x) for x in (dq, dk, dv)), dbias if grad_bias else None)


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Result:
    _refuse_debug_mask(return_debug_mask)
    _refuse_float64(query)
    backend, problem = _problem(query, key, value, attn_bias, is_causal, scale, dropout_p, one_head_dim=False)
    out, lse = _forward(backend, problem)
    # The order of query's dimensions in memory, whatever value's head size.
    order = sorted(range(4), key=lambda i: query.stride(i), reverse=True)
    out = _like(out, query) if out.shape == query.shape else _with_strides(out, _strides(out.shape, order))
    lengths = query.shape[2], key.shape[2]
    return backend, (out, lse.unsqueeze(-1), None, None, *lengths, *_unused_seeds(query), None)


def _cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Result:
    _refuse_float64(query)
    backend, problem = _problem(
        query, key, value, attn_bias, is_causal, scale, dropout_p, one_head_dim=False, backward=True
    )
    grads = _backward(backend, problem, grad_out, out, logsumexp.squeeze(-1))[:3]
    return backend, tuple(_like(g, x) for g, x in zip(grads, (query, key, value), strict=True))


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Result:
    """Torch's composed maths, which takes what no other aten op does: counted, with the reason as far as it shows."""
    if not query.dim() == key.dim() == value.dim() == 4:
        reason = "the inputs are not 4-D"
    elif dropout_p != 0:
        reason = "dropout_p > 0"
    elif attn_mask is not None and attn_mask.requires_grad:
        reason = "attn_mask needs a gradient"
    elif attn_mask is not None and attn_mask.dim() not in (2, 4):
        reason = "attn_mask is not 2-D or 4-D"
    elif value.shape[-1] != query.shape[-1]:
        reason = "value has another head size than query"
    elif not query.shape[0] == key.shape[0] == value.shape[0]:
        reason = "the batch sizes differ"
    else:
        reason = "torch chose it (sdpa_kernel, strides, or a limit of its own)"
    raise Refused(f"{reason}: torch asks no fused kernel (full=True does not ask torch)")


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Result:
    """F.sdpa as a whole, above autograd."""
    if torch._C._are_functorch_transforms_active():
        raise Refused("under a torch.func transform (attnkern.scaled_dot_product_attention has these)")
    if attn_mask is not None and is_causal:
        raise Refused("attn_mask together with is_causal")
    try:
        problem = Problem.from_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (RuntimeError, TypeError, ValueError) as error:
        raise Refused(str(error)) from None  # torch says it in its own words
    backend = _backend(problem)
    return backend, autograd.attention(problem, None, False)[0]


def _refuse_debug_mask(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise Refused("return_debug_mask=True")


def _refuse_float64(query: Tensor) -> None:
    if query.dtype == torch.float64:
        raise Refused("float64: the aten op's log-sum-exp is float32")


def _refuse_grouped_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.shape[1] == key.shape[1] == value.shape[1]:
        raise Refused("fewer key or value heads: the aten op's gradients have query's")


def _unused_seeds(query: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)


def _strides(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Of a dense tensor whose dimensions lie in memory in this order, the outermost first."""
    strides, step = [0] * len(sizes), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.stride() == strides:
        return x
    if all(a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True) if n > 1):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _like(x: Tensor, model: Tensor) -> Tensor:
    """x with the strides of torch.empty_like(model)."""
    if x.stride() == model.stride():  # x is dense, so model is
        return x
    return _with_strides(x, torch.empty_like(model, device="meta").stride())


def _length_major(x: Tensor) -> Tensor:
    return _with_strides(x, _strides(x.shape, (0, 2, 1, 3)))


AtenOps = dict[str, tuple[tuple[str, ...], Callable[..., Result]]]

# The CPU has none of CUDA's operators; with ours, what calls them by name (context_parallel does) runs there as well.
_DEVICES = ("CPU", "CUDA")
_DEVICES_AND_AUTOGRAD = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
PROVIDER: AtenOps = {
    "_scaled_dot_product_flash_attention_for_cpu": (("CPU",), _cpu_flash),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (("CPU",), _cpu_flash_backward),
    "_scaled_dot_product_flash_attention": (_DEVICES, _flash),
    "_scaled_dot_product_flash_attention_backward": (_DEVICES, _flash_backward),
    "_scaled_dot_product_efficient_attention": (_DEVICES, _efficient),
    "_scaled_dot_product_efficient_attention_backward": (_DEVICES, _efficient_backward),
    "_scaled_dot_product_cudnn_attention": (_DEVICES, _cudnn),
    "_scaled_dot_product_cudnn_attention_backward": (_DEVICES, _cudnn_backward),
    "_scaled_dot_product_attention_math": (_DEVICES_AND_AUTOGRAD, _math),
    "_flash_attention_forward": (_DEVICES, _bare_flash),
    "_flash_attention_backward": (_DEVICES, _bare_flash_backward),
}
if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):  # not in every torch
    PROVIDER["_flash_attention_forward_no_dropout_inplace"] = (_DEVICES, _bare_flash_out)
FULL: AtenOps = {"scaled_dot_product_attention": (_DEVICES_AND_AUTOGRAD, _whole)}
