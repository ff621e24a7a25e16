"""attnkern under `torch.nn.functional.scaled_dot_product_attention` (F.sdpa) itself.

F.sdpa chooses one of a few operators of torch ("slots" here: flash, efficient, cuDNN, the CPU's flash) and calls its
forward and backward. The provider "ATTNKERN" puts our kernels into the slots, on the dispatcher, where torch's own
registry of flash attention implementations has it put. So everything above a slot stays torch's: autograd, autocast,
tracing, DTensor, and a compiled graph, which holds calls of slots, follows every switch.

    F.sdpa --torch chooses--> slot --_problem--> a backend's kernel
                              |  '-- _Refused -> the kernel that was in the slot before
                              '-- or torch's composed maths, where no slot takes the call; counted, with the reason

`use_as_sdpa(full=True)` also takes the place of F.sdpa's own operator, above that choice: then dropout, masks with
gradients, inputs that are not 4-D and values of another head size are ours as well, through attnkern's own autograd.

The results of a slot have the strides of torch's meta functions to the letter, because compiled graphs rely on them. A
forward pass of one kernel and a backward pass of another fit together: out and the log-sum-exp mean the same in all.
That is why slots refuse dropout, the one thing that a backward pass of another kernel could not repeat.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.backends.mha
import torch.nn.attention
from torch import Tensor

from .. import api, flops, ops
from ..backends import kernels_for
from ..params import GRAD_BIAS, GRAD_K, GRAD_Q, GRAD_V
from ..problem import Problem, autocasts

NAME = "ATTNKERN"
"""The provider's name in torch's registry: `torch.nn.attention.activate_flash_attention_impl("ATTNKERN")`."""


class _Refused(Exception):
    """Why a call goes to the kernel that was there before."""


# --------------------------------------------------------------------------------------------------------------------
# What ran: the counter
# --------------------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    operator: str  # as the profiler names it
    kernel: str  # "attnkern cpu", ... or "torch"
    reason: str  # why torch; empty for ours


_lines: Counter[tuple[str, str, str]] = Counter()  # _Line -> number of calls
_lines_lock = threading.Lock()
_MAX_LINES = 1000  # a reason may name sizes: a process that meets ever new ones must not grow for it


def _count(operator: str, kernel: str, reason: str = "") -> None:
    line = _Line(operator, kernel, reason)
    with _lines_lock:
        if line not in _lines and len(_lines) >= _MAX_LINES:
            line = line._replace(reason="(other reasons)")
        _lines[line] += 1


class SdpaCalls:
    """Calls of F.sdpa's operators: on which kernels they ran and why others did not. str() is a table.

    One F.sdpa call counts once, its backward pass once more; what `full=True` refuses, once more where torch takes it.
    Calls of all threads count. A compiled graph counts when it runs; only what `full=True` itself or torch's composed
    maths handle is settled, and counted, when it is traced.
    """

    def __init__(self) -> None:
        with _lines_lock:
            self._before = Counter(_lines)
        self._after: Counter[tuple[str, str, str]] | None = None

    def _stop(self) -> None:
        with _lines_lock:
            self._after = Counter(_lines)

    @property
    def lines(self) -> dict[tuple[str, str, str], int]:
        """(operator, kernel, reason) -> number of calls; the reason is empty where attnkern ran."""
        if self._after is not None:
            return dict(self._after - self._before)
        with _lines_lock:
            return dict(_lines - self._before)

    @property
    def attnkern(self) -> int:
        """Number of calls, forward and backward, that ran on attnkern's kernels."""
        return sum(n for (_, kernel, _), n in self.lines.items() if kernel != "torch")

    @property
    def torch(self) -> int:
        """Number of calls, forward and backward, that ran on torch's kernels."""
        return sum(n for (_, kernel, _), n in self.lines.items() if kernel == "torch")

    def __str__(self) -> str:
        rows = [(str(n), *line) for line, n in sorted(self.lines.items())]
        if not rows:
            return "no calls of F.scaled_dot_product_attention"
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            f"{n:>{widths[0]}} x {operator:<{widths[1]}}  {kernel:<{widths[2]}}  {reason}".rstrip()
            for n, operator, kernel, reason in rows
        )

    __repr__ = __str__


_all_calls = SdpaCalls()


def sdpa_calls() -> SdpaCalls:
    """All F.sdpa calls that attnkern has seen in this process, while it was active in any way.

    Returns:
        A `SdpaCalls` that keeps counting; `use_as_sdpa` yields one of its own. Calls made while nothing is active are
        not seen.
    """
    return _all_calls


# --------------------------------------------------------------------------------------------------------------------
# Slots: (backend's name, results) or _Refused
# --------------------------------------------------------------------------------------------------------------------

_Result = tuple[str, Any]


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
    """The backend that takes the call of a slot, and the call as a Problem."""
    if autocasts(query.device):  # a slot's arguments have their final dtype
        with torch.autocast(query.device.type, enabled=False):
            options = {"one_head_dim": one_head_dim, "backward": backward}
            return _problem(query, key, value, bias, is_causal, scale, dropout_p, **options)
    if dropout_p > 0:
        raise _Refused("dropout in a slot: the backward pass may meet another kernel (full=True has dropout)")
    if not query.dim() == key.dim() == value.dim() == 4:
        raise _Refused("the inputs are not 4-D")
    if one_head_dim and value.shape[3] != query.shape[3]:
        raise _Refused(f"value's head size differs from query's, {value.shape[3]} and {query.shape[3]}")
    grouped = not query.shape[1] == key.shape[1] == value.shape[1]
    try:
        problem = Problem.from_sdpa(query, key, value, bias, 0, is_causal, scale, grouped)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _Refused(str(error)) from None
    if problem.q is not query or problem.k is not key or problem.v is not value:
        raise _Refused("the batch sizes differ")
    if backward and not problem.q.requires_grad:  # a tensor made in a compiled graph never does
        return _backend(problem._replace(q=query.detach().requires_grad_())), problem
    return _backend(problem), problem


def _backend(problem: Problem) -> str:
    backend, reasons = kernels_for(problem)
    if backend is None:
        raise _Refused(reasons)
    return backend.NAME


def _forward(backend: str, problem: Problem, need_lse: bool = True) -> tuple[Tensor, Tensor]:
    q, k, v, bias, params, _ = problem
    out, lse = ops.forward(q, k, v, bias, None, *params, need_lse, backend)
    if bias is not None:
        # Of a row without a key, for torch's backward kernels: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
        lse.masked_fill_(lse == -math.inf, 0.0)
    return out, lse


def _backward(
    backend: str, problem: Problem, grad_out: Tensor, out: Tensor, lse: Tensor, *, grad_bias: bool = False
) -> tuple[Tensor, ...]:
    q, k, v, bias, params, _ = problem
    mask = GRAD_Q | GRAD_K | GRAD_V | (GRAD_BIAS if grad_bias else 0)
    return ops.backward(grad_out, None, q, k, v, bias, None, out, lse.contiguous(), *params, mask, backend)


def _cpu_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> _Result:
    backend, problem = _problem(query, key, value, attn_mask, is_causal, scale, dropout_p, one_head_dim=True)
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
) -> _Result:
    backend, problem = _problem(
        query, key, value, attn_mask, is_causal, scale, dropout_p, one_head_dim=True, backward=True
    )
    grads = _backward(backend, problem, grad_out, out, logsumexp)[:3]
    return backend, tuple(_length_major(x) for x in grads)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> _Result:
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
) -> _Result:
    _refuse_float64(query)
    backend, problem = _problem(query, key, value, None, is_causal, scale, dropout_p, one_head_dim=True, backward=True)
    grads = _backward(backend, problem, grad_out, out, logsumexp)[:3]
    return backend, tuple(_like(g, x) for g, x in zip(grads, (query, key, value), strict=True))


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
) -> _Result:
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
) -> _Result:
    _refuse_float64(query)
    _refuse_grouped_heads(query, key, value)
    backend, problem = _problem(
        query, key, value, attn_bias, is_causal, scale, dropout_p, one_head_dim=False, backward=True
    )
    grad_bias = attn_bias is not None and bool(grad_input_mask[3])
    lse = logsumexp[..., : query.shape[2]]
    dq, dk, dv, dbias = _backward(backend, problem, grad_out_, out, lse, grad_bias=grad_bias)
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
) -> _Result:
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
) -> _Result:
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
) -> _Result:
    """Torch's composed maths, which takes what no slot does: only counted, with the reason as far as it shows."""
    if not query.dim() == key.dim() == value.dim() == 4:
        reason = "the inputs are not 4-D"
    elif dropout_p > 0:
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
    raise _Refused(f"{reason}: torch asks no fused kernel (full=True does not ask torch)")


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
) -> _Result:
    """F.sdpa as a whole, above autograd."""
    if torch._C._are_functorch_transforms_active():
        raise _Refused("under a torch.func transform (attnkern.scaled_dot_product_attention has these)")
    if attn_mask is not None and is_causal:
        raise _Refused("attn_mask together with is_causal")
    try:
        problem = Problem.from_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _Refused(str(error)) from None  # torch says it in its own words
    backend = _backend(problem)
    return backend, api.apply(problem, backend, False)[0]


def _refuse_debug_mask(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise _Refused("return_debug_mask=True")


def _refuse_float64(query: Tensor) -> None:
    if query.dtype == torch.float64:
        raise _Refused("float64: the slot's log-sum-exp is float32")


def _refuse_grouped_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.shape[1] == key.shape[1] == value.shape[1]:
        raise _Refused("fewer key or value heads: the slot's gradients have query's")


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


# --------------------------------------------------------------------------------------------------------------------
# The dispatcher
# --------------------------------------------------------------------------------------------------------------------

_Slots = dict[str, tuple[tuple[str, ...], Callable[..., _Result]]]

# The CPU has none of CUDA's operators; with ours, what calls them by name (context_parallel does) runs there as well.
_DEVICES = ("CPU", "CUDA")
_DEVICES_AND_AUTOGRAD = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
_PROVIDER: _Slots = {
    "_scaled_dot_product_flash_attention_for_cpu": (("CPU",), _cpu_flash),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (("CPU",), _cpu_flash_backward),
    "_scaled_dot_product_flash_attention": (_DEVICES, _flash),
    "_scaled_dot_product_flash_attention_backward": (_DEVICES, _flash_backward),
    "_scaled_dot_product_efficient_attention": (_DEVICES, _efficient),
    "_scaled_dot_product_efficient_attention_backward": (_DEVICES, _efficient_backward),
    "_scaled_dot_product_cudnn_attention": (_DEVICES, _cudnn),
    "_scaled_dot_product_cudnn_attention_backward": (_DEVICES, _cudnn_backward),
    "_scaled_dot_product_attention_math": (_DEVICES_AND_AUTOGRAD, _math),
}
_FULL: _Slots = {"scaled_dot_product_attention": (_DEVICES_AND_AUTOGRAD, _whole)}

# Another thread may have read a kernel from the dispatcher and wait for the GIL to enter it while we remove it.
_recently_installed: deque[Any] = deque(maxlen=1000)


def _install(slots: _Slots, undo: contextlib.ExitStack) -> None:
    """Puts kernels on the dispatcher, in front of those that are there."""
    # All kernels before any is registered: one for a device changes what torch computes for its autograd key.
    kernels = [(name, key, _kernel(name, key, function)) for name, (keys, function) in slots.items() for key in keys]
    libraries: dict[str, torch.library.Library] = {}
    undo.callback(_forget_kernels, kernels)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
        # Autograd keys come first and go last: between the two, other threads would find no gradients.
        for name, key, kernel in sorted(kernels, key=lambda x: not x[1].startswith("Autograd")):
            if key not in libraries:
                libraries[key] = torch.library.Library("aten", "IMPL")
                undo.callback(libraries[key]._destroy)
            libraries[key].impl(name, kernel, key, with_keyset=True)
            _recently_installed.append(torch.library.get_kernel(f"aten::{name}", key))
    _forget_kernels(kernels)


def _forget_kernels(kernels: list[tuple[str, str, Callable[..., Any]]]) -> None:
    """Torch's tracers remember which kernel an operator has for a key."""
    for name, key, _ in kernels:
        getattr(torch.ops.aten, name).default._uncache_dispatch(getattr(torch._C.DispatchKey, key))


def _kernel(name: str, key: str, function: Callable[..., _Result]) -> Callable[..., Any]:
    operator = f"aten::{name}"
    try:
        previous = torch.library.get_kernel(operator, key)
    except RuntimeError:  # no kernel for this device
        previous = None

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            backend, result = function(*args, **kwargs)
        except _Refused as refused:
            reason = str(refused)
        else:
            _count(operator, f"attnkern {backend}")
            return result
        if previous is None:
            raise RuntimeError(f"attnkern: torch has no {operator} for {key}, and attnkern refuses: {reason}")
        _count(operator, "torch", reason)
        return previous.call_boxed(keyset, *args, **kwargs)

    return kernel


class _Switch:
    """What is switched on; `remove` switches it off. The provider's is the handle that torch's registry keeps."""

    def __init__(self, *parts: Callable[[contextlib.ExitStack], None]) -> None:
        with contextlib.ExitStack() as undo:
            for part in parts:
                part(undo)
            self._undo = undo.pop_all()

    def remove(self) -> None:
        self._undo.close()


def _provider() -> _Switch:
    return _Switch(lambda undo: _install(_PROVIDER, undo), _turn_off_fast_path, _count_flops)


def _full() -> _Switch:
    return _Switch(lambda undo: _install(_FULL, undo), _separate_cache)


def _turn_off_fast_path(undo: contextlib.ExitStack) -> None:
    """Inference of nn.MultiheadAttention and nn.TransformerEncoder has kernels of its own that bypass F.sdpa."""
    if torch.backends.mha.get_fastpath_enabled():
        torch.backends.mha.set_fastpath_enabled(False)
        undo.callback(torch.backends.mha.set_fastpath_enabled, True)


def _separate_cache(undo: contextlib.ExitStack) -> None:
    """Torch's cache of compiled graphs knows them by the call of F.sdpa, not by what that was traced to."""
    config, tag = torch.compiler.config, "+attnkern_full"
    config.cache_key_tag += tag
    undo.callback(lambda: setattr(config, "cache_key_tag", config.cache_key_tag.replace(tag, "")))


def _count_flops(undo: contextlib.ExitStack) -> None:
    """Gives the CPU's slots torch's own FLOP formulas, which it has for all others."""
    given = contextlib.ExitStack()

    def give(flop_counter: Any) -> None:
        aten = torch.ops.aten
        formulas: dict[Any, Any] = {
            aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.sdpa_flop,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.sdpa_backward_flop,
        }
        for target, formula in formulas.items():
            if target not in flop_counter.flop_registry:
                flop_counter.register_flop_formula(target, get_raw=True)(formula)  # it takes tensors, as torch's has
                given.callback(flop_counter.flop_registry.pop, target, None)

    undo.push(given)
    undo.callback(flops.with_flop_counter(give))


# --------------------------------------------------------------------------------------------------------------------
# Switching
# --------------------------------------------------------------------------------------------------------------------


def register() -> None:
    """Makes the provider's name known to torch's registry, without activating it. Importing attnkern does it."""
    if _missing_registry() is None:
        torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_provider)


def _missing_registry() -> str | None:
    if hasattr(torch.nn.attention, "restore_flash_attention_impl") and hasattr(torch.library, "get_kernel"):
        return None
    return f"torch >= 2.11 (torch.nn.attention's registry of flash attention implementations), got {torch.__version__}"


class _Active:
    """What all open `use_as_sdpa` have in common: the switches are the process's."""

    lock = threading.RLock()
    depth = 0
    depth_full = 0
    previous: str | None = None  # the implementation to restore
    full: _Switch | None = None


@contextlib.contextmanager
def use_as_sdpa(full: bool = False) -> Iterator[SdpaCalls]:
    """While this context is open, F.scaled_dot_product_attention runs on attnkern's kernels, in the whole process.

    Args:
        full: False activates the provider "ATTNKERN", as `torch.nn.attention.activate_flash_attention_impl` does: every
            call that torch gives to a fused kernel is ours if a backend takes it, and compiled graphs follow. True
            also replaces the operator of F.sdpa itself, so that dropout, masks with gradients, inputs that are not 4-D
            and values of another head size are ours too; a graph compiled meanwhile keeps attnkern's operators.

    Yields:
        A `SdpaCalls`: how many calls ran on which kernel and why others did not. It stops counting at the end.

    What no backend takes goes to the kernel that was there before. Contexts nest and may overlap in any order between
    threads; when the last one ends, by an exception too, the implementation that was active before the first one is
    active again. Also works as a decorator. Not to be entered inside a compiled function.

    Raises:
        TypeError: full is not a bool. RuntimeError: torch is older than 2.11.
    """
    if not isinstance(full, bool):
        raise TypeError(f"attnkern: argument 'full' must be bool, not {type(full).__name__}")
    if (missing := _missing_registry()) is not None:
        raise RuntimeError(f"attnkern: use_as_sdpa needs {missing}")
    with contextlib.ExitStack() as stack:
        with _Active.lock:
            _enter_provider()
            stack.callback(_leave_provider)
            if full:
                _enter_full()
                stack.callback(_leave_full)
        calls = SdpaCalls()
        stack.callback(calls._stop)
        yield calls


def _enter_provider() -> None:
    if _Active.depth == 0:
        _Active.previous = torch.nn.attention.current_flash_attention_impl()
        if _Active.previous != NAME:
            torch.nn.attention.activate_flash_attention_impl(NAME)
    _Active.depth += 1


def _leave_provider() -> None:
    with _Active.lock:
        _Active.depth -= 1
        if _Active.depth > 0 or torch.nn.attention.current_flash_attention_impl() == _Active.previous:
            return
        if _Active.previous is None:
            torch.nn.attention.restore_flash_attention_impl()
        else:
            torch.nn.attention.activate_flash_attention_impl(_Active.previous)


def _enter_full() -> None:
    if _Active.depth_full == 0:
        _Active.full = _full()
    _Active.depth_full += 1


def _leave_full() -> None:
    with _Active.lock:
        _Active.depth_full -= 1
        if _Active.depth_full == 0 and _Active.full is not None:
            _Active.full.remove()
            _Active.full = None
