"""The public functions: make a `Problem`, choose a backend, apply it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_variadic

from . import autograd
from . import backends as _backends
from .arguments import check_bool, is_causal_bias, may_look
from .backends import Explanation, cpu, cuda
from .mask import Mask
from .problem import Problem, in_int32

# dropout_p's default is the integer: Dynamo takes a float default for a dynamic input, and compiles twice to find out
# that it is none.


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str | None = None,
) -> Tensor:
    """softmax(query key^T * scale + attn_mask) value, in place of `torch.nn.functional.scaled_dot_product_attention`.

    Same signature, results, gradients and errors, plus `backend`. Scores are never held in memory as a whole, except
    by the reference backend.

    Args:
        query: (..., L, E); float32, float64, bfloat16 or float16; any strides.
        key: (..., S, E), value: (..., S, Ev); query's dtype and device. Leading dimensions broadcast.
        attn_mask: broadcasts to (..., L, S). bool: True = attend. float32 or query's dtype: added to the scaled scores.
            Or a `Mask`, for L queries and S keys, as `attnkern.masks` makes it. A row with no key to attend to gives 0.
        dropout_p: probability with which a weight is dropped, whenever > 0 (in evaluation mode as well); rounded to
            steps of 1/65536.
        is_causal: query i attends to keys 0..i (aligned to the top left when L != S). Excludes attn_mask.
        scale: default 1 / sqrt(E).
        enable_gqa: dimension -3 is heads, and those of key and value divide those of query: query head h uses
            key head h // (Hq // Hk).
        backend: a name of `attnkern.backends()`, which then runs the call or raises; None chooses.

    Returns:
        (..., L, Ev) in query's dtype.

    Raises:
        TypeError: an argument of the wrong type. RuntimeError: shapes, dtypes or devices that do not fit, dropout_p
        outside [0, 1], attn_mask together with is_causal, or a named backend that cannot run the call.
        ValueError: scale that is not finite, an unknown backend.

    Source: A. Vaswani et al., "Attention is all you need", NeurIPS 2017; the tiling is T. Dao et al., "FlashAttention",
    NeurIPS 2022, after M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    if has_torch_function_variadic(query, key, value, attn_mask) or torch.compiler.is_compiling():
        result = _override(
            scaled_dot_product_attention,
            (query, key, value),
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            backend=backend,
        )
        if result is not NotImplemented:
            return result
    elif attn_mask is None or is_causal is not True:
        mask, ranges, bits = attn_mask, None, None
        if type(attn_mask) is Mask:
            mask, ranges, bits = _as_read(attn_mask, None, query, key)
        options = dropout_p, is_causal, scale, enable_gqa, None, "top_left", None, ranges
        rest = None, None, False, backend, bits
        result = cpu.call(query, key, value, mask, *options, *rest, autograd.eager)
        if result is None and type(query) is Tensor and query.is_cuda:
            result = cuda.call(query, key, value, mask, *options, *rest)
        if result is not None:
            return result
    if is_causal is True and attn_mask is not None and not is_causal_bias(attn_mask):
        raise RuntimeError("attnkern: attn_mask must be None when is_causal=True, got a mask (attention() takes both)")
    problem = Problem.from_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return autograd.attention(problem, backend, False)[0]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "top_left",
    softcap: float | None = None,
    key_ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_bias_center: int | None = None,
    block_table: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`scaled_dot_product_attention` with a sliding window, alignment, soft-capping and the log-sum-exp.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend: as in
            `scaled_dot_product_attention`, except that attn_mask may come with is_causal, window and key_ranges: a key
            must then pass all of them.
        window: (left, right), each an int >= 0 or None (unbounded): query i attends to keys j with
            -left <= j - i - offset <= right. is_causal makes right 0.
        alignment: "top_left" (offset 0) or "bottom_right" (offset S - L: the last query is level with the last key),
            for window and is_causal.
        softcap: c > 0 replaces the scaled scores x by c * tanh(x / c), before attn_mask; None or 0: off. Within
            float32's normal range, for float64 inputs float64's.
        key_ranges: (..., L or 1, R, 2), int32 or int64, R 1 or 2, on query's device; the dimensions before R broadcast
            to the output's but the last. Query i attends to keys begin <= j < end of any of its R ranges (begin, end),
            as far as attn_mask, is_causal and window let it. Ends beyond the keys are clamped, an empty range has
            end <= begin. What lies outside costs nothing where the ranges of some 64 successive rows lie together: a
            tile of rows visits all keys from the first to the last of any of their ranges. Not differentiable.
        sinks: (Hq,) or (..., Hq), float32 or query's dtype: a logit of each head that takes part in the softmax of its
            rows and has no value, so that a row's weights sum to less than 1. Differentiable.
        relative_bias: (R,), (1 or Hq, R) or (1 or B, 1 or Hq, R), float32 or query's dtype: query i adds number j - i
            + relative_bias_center of its head to its scaled score with key j, the first or last one where there is no
            such number. Differentiable. `alibi` and `t5_relative_bias` make it. Beside an attn_mask that is no Mask of
            ranges the two become one dense bias (a bool mask's False is -inf, then: NaN in a key that no query
            attends to reaches the results, as with a float mask in F.sdpa).
        relative_bias_center: an index into relative_bias: where the distance 0 stands; None: L - 1.
        block_table: (B, pages of a sequence), int32 or int64: key and value are pools of pages then, (pages, Hk, size,
            E) and (pages, Hv, size, Ev), with a power of two from 16 on as size and any strides, and key j of sequence
            b is row j % size of page block_table[b, j // size], S is pages of a sequence * size. key_ranges say which
            keys there are. A page's number is looked at only where they (or a Mask of ranges), is_causal and window
            leave a query some of its keys; what another attn_mask leaves out doesn't count. query is (B, Hq, L, E). Not
            differentiable, nor are the other arguments beside it. torch.autocast casts the query to the pools' dtype,
            and leaves these. `attnkern.PagedCache` keeps pages.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        out (..., L, Ev) in query's dtype; with return_lse (out, lse), lse (..., L) in float32 (float64 for float64
        inputs), natural logarithm, -inf where no key is attended. With sinks the sink counts as a key does. Both are
        differentiable. `merge_attention` joins such pairs.

    Raises:
        As `scaled_dot_product_attention`; ValueError also for a negative window, an unknown alignment, a bad softcap.

    Source of soft-capping: Gemma Team, "Gemma 2", 2024; of windows: I. Beltagy et al., "Longformer", 2020; of sinks as
    parameters: OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025.
    """
    options = dropout_p, is_causal, scale, enable_gqa, window, alignment, softcap
    if (
        has_torch_function_variadic(query, key, value, attn_mask, key_ranges, sinks, relative_bias, block_table)
        or torch.compiler.is_compiling()
    ):
        result = _override(
            attention,
            (query, key, value),
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            window=window,
            alignment=alignment,
            softcap=softcap,
            key_ranges=key_ranges,
            sinks=sinks,
            relative_bias=relative_bias,
            relative_bias_center=relative_bias_center,
            block_table=block_table,
            return_lse=return_lse,
            backend=backend,
        )
        if result is not NotImplemented:
            return result
    elif relative_bias is None is relative_bias_center:
        mask, ranges, bits = attn_mask, key_ranges, None
        if type(ranges) is Tensor and ranges.dtype is torch.int64:
            ranges = in_int32(ranges)
        if type(attn_mask) is Mask and block_table is None:
            mask, ranges, bits = _as_read(attn_mask, ranges, query, key)
        rest = ranges, sinks, block_table, return_lse, backend, bits
        result = cpu.call(query, key, value, mask, *options, *rest, autograd.eager)
        if result is None and type(query) is Tensor and query.is_cuda:
            looked_at = type(block_table) is Tensor and may_look(block_table)
            result = None if looked_at else cuda.call(query, key, value, mask, *options, *rest)
        if result is not None:
            return result
    check_bool("return_lse", return_lse)
    relative = relative_bias, relative_bias_center
    problem = Problem.from_sdpa(query, key, value, attn_mask, *options, key_ranges, sinks, *relative, block_table)
    out, lse = autograd.attention(problem, backend, return_lse)
    return (out, lse) if return_lse else out


def _as_read(mask: Mask, key_ranges: Any, query: Any, key: Any) -> tuple[Any, Any, Any]:
    """attn_mask, key_ranges and bits as calls past the dispatcher read them: of a Mask, what it has."""
    fits = type(query) is type(key) is Tensor and query.dim() >= 2 <= key.dim()
    if not fits or query.shape[-2] != mask.seqlen_q or key.shape[-2] != mask.seqlen_k:
        return mask, key_ranges, None
    if mask.ranges is None:
        return None, key_ranges, mask.octets
    return (mask, key_ranges, None) if key_ranges is not None else (None, mask.ranges, None)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "top_left",
    softcap: float | None = None,
    key_ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_bias_center: int | None = None,
    block_table: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Explanation:
    """Which backend `attention` would use for these arguments, and why not the others; nothing is computed.

    Print it, or read `.chosen` and `.refusals`, and of the chosen one `.order` (why it came first, where rules order
    the backends), `.notes` (extra work, such as copies) and `.plan` (how its kernels cut the call). Invalid arguments
    raise what the call raises; a named backend that refuses gives chosen=None and the text of the call's error.
    """
    check_bool("return_lse", return_lse)
    options = dropout_p, is_causal, scale, enable_gqa, window, alignment, softcap, key_ranges
    biases = sinks, relative_bias, relative_bias_center
    problem = Problem.from_sdpa(query, key, value, attn_mask, *options, *biases, block_table)
    return _backends.explain(problem, backend)


_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(attention).parameters.items()}


def _override(function: Any, tensors: tuple[Any, Any, Any], *, attn_mask: Any, **options: Any) -> Any:
    """What an argument's own __torch_function__ (or an active mode) makes of the call; NotImplemented: nothing."""
    relevant = tensors if is_causal_bias(attn_mask) else (*tensors, attn_mask)
    if _any_nested(relevant):
        return NotImplemented  # a jagged tensor's __torch_function__ knows nothing of ours
    passed = {name: x for name, x in {"attn_mask": attn_mask, **options}.items() if x is not _DEFAULTS[name]}
    # (Dynamo's has_torch_function does not look whether a subclass's own call has switched it off.)
    if has_torch_function(relevant) and torch._C._is_torch_function_enabled():
        return handle_torch_function(function, relevant, *tensors, **passed)
    return NotImplemented


def _any_nested(tensors: tuple[Any, ...]) -> bool:
    if torch.compiler.is_compiling():
        return any(isinstance(x, Tensor) and x.is_nested for x in tensors)
    with torch._C.DisableTorchFunction():  # asking must not look like a call to a subclass or mode
        return any(isinstance(x, Tensor) and x.is_nested for x in tensors)
