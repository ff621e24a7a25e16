"""Attention that isn't attnkern's: every backend of F.scaled_dot_product_attention, torch's other calls, zentorch's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from attnkern import relative
from attnkern.testing import Inputs
from bench.cases import BY_DISTANCE, Case

from . import device as devices
from .provider import BASELINE, Attend, OperatorProvider, Provider, Refused, options_of, tensors_of
from .timing import Work


def _sdpa(case: Case, inputs: Inputs) -> Attend:
    if case.softcap:
        raise Refused("F.scaled_dot_product_attention has no softcap")
    options = options_of(case)
    if case.sinks:
        return _sdpa_with_a_key_more(case, inputs)
    if case.ranged_kind == "packed":
        return partial(F.scaled_dot_product_attention, **options)  # of the padded batch
    if _says_all(case):
        return partial(F.scaled_dot_product_attention, **options)
    options["is_causal"] = False
    if case.mask == "bias":
        raise Refused("F.scaled_dot_product_attention takes no mask with a band, and this one needs its gradient")
    dense = _dense_mask(case, inputs)

    def attend(query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dense, **options)

    return attend


def _says_all(case: Case) -> bool:
    """Whether is_causal or a mask tells the case. torch knows no other band, no ranges, and not both together."""
    band_is_causal = case.window is None and (case.alignment == "top_left" or case.seqlen_q == case.seqlen_k)
    return not case.ranged_kind and (case.band is None or (band_is_causal and case.mask == "none"))


def _dense_mask(case: Case, inputs: Inputs) -> Tensor:
    """The mask that tells any other case, made before the clock starts."""
    keep, mask = case.keep_mask(device=inputs.query.device), inputs.attn_mask
    assert keep is not None
    if mask is None:
        return keep
    return mask & keep if mask.dtype == torch.bool else mask.masked_fill(~keep, float("-inf"))


def _sdpa_with_a_key_more(case: Case, inputs: Inputs) -> Attend:
    """The sinks as the scores of a key of zeros, whose value is 0: a mask adds them. It is made before the clock starts
    where they aren't trained."""
    query, sinks = inputs.query, inputs.sinks
    assert sinks is not None
    keep = case.keep_mask(device=query.device)
    scores = query.new_zeros(1, case.heads_q, case.seqlen_q, case.seqlen_k)
    scores = scores if keep is None else scores.masked_fill(~keep, float("-inf"))
    options = {**options_of(case), "is_causal": False}

    def with_column() -> Tensor:
        column = sinks.to(query.dtype)[None, :, None, None].expand(-1, -1, case.seqlen_q, 1)
        return torch.cat([scores, column], -1)

    made = None if sinks.requires_grad else with_column()

    def attend(query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None) -> Tensor:
        mask = with_column() if made is None else made
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, mask, **options)

    return attend


class _Sdpa(Provider):
    """Of packed sequences it gets the padded batch, whose making and unmaking is off the clock. So are a dense bias in
    place of a table, and the sums along the diagonals of its gradient."""

    def work(self, case: Case, inputs: Inputs, grad_out: Tensor, pass_name: str) -> Work:
        if inputs.relative_bias is not None:
            sizes = case.seqlen_q, case.seqlen_k
            bias = relative.dense(inputs.relative_bias, *sizes)[None]
            dense = replace(inputs, attn_mask=bias, relative_bias=None)
            same = replace(case, mask="bias" if case.learned else "float")
            return replace(super().work(same, dense, grad_out, pass_name), restore=_by_distance)
        if case.ranged_kind != "packed":
            return super().work(case, inputs, grad_out, pass_name)
        lengths = case.lengths

        def padded(x: Tensor) -> Tensor:
            """(1, H, tokens, E) as (sequences, H, longest, E)."""
            parts = [part.transpose(0, 1) for part in x[0].split(lengths, 1)]
            return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2).contiguous()

        def packed(x: Tensor) -> Tensor:
            return torch.cat([part[:, :n] for part, n in zip(x, lengths, strict=True)], 1)[None]

        query, key, value = map(padded, tensors_of(inputs)[:3])
        # Right of a causal sequence the padding is out of sight anyway.
        mask = None if case.causal else _key_padding(lengths, query.device)
        batch = replace(inputs, query=query, key=key, value=value, attn_mask=mask)

        def restore(found: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: packed(x) for name, x in found.items()}

        return replace(super().work(case, batch, padded(grad_out), pass_name), restore=restore)


def _by_distance(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """A gradient (1, Hq, L, S) of a dense bias as that of the table (Hq, L + S - 1) it was made from."""
    if "attn_mask" not in found:
        return found
    grad = found.pop("attn_mask")[0]
    seqlen_q, seqlen_k = grad.shape[1:]
    total = grad.new_zeros(grad.shape[0], seqlen_q + seqlen_k - 1, dtype=torch.float64)
    relative.add_diagonals(total, grad.double(), 0, 0, seqlen_q)
    return {**found, "relative_bias": total.to(grad.dtype)}


def _key_padding(lengths: Sequence[int], device: torch.device) -> Tensor:
    """bool (sequences, 1, 1, longest), True = attend."""
    keys = torch.arange(max(lengths), device=device)
    return (keys < torch.tensor(lengths, device=device)[:, None])[:, None, None]


class _Flex(Provider):
    """Compiled FlexAttention. The mask's blocks are made, and everything is compiled, before the clock starts."""

    def work(self, case: Case, inputs: Inputs, grad_out: Tensor, pass_name: str) -> Work:
        if inputs.query.device.type == "cpu" and pass_name != "forward":
            raise Refused("FlexAttention has no backward pass on a CPU")
        work = super().work(case, inputs, grad_out, pass_name)
        work.call()
        return work


def _flex(case: Case, inputs: Inputs) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    known = case.mask == "none" or case.ranged_kind or case.mask in BY_DISTANCE
    if not known or case.dropout or case.softcap or case.sinks:
        raise Refused("FlexAttention is timed with masks that it can be told as functions")
    torch._dynamo.reset()  # so that no case is one recompilation too many
    device, make = inputs.query.device, create_block_mask
    mask_mod, block_mask = _mask_mod(case, device), None
    if mask_mod is not None:
        if case.seqlen_q * case.seqlen_k > 2**26:  # of which it would hold int64, several times
            make = torch.compile(create_block_mask)
        batch = case.batch if case.ranged_kind == "padding" else None
        block_mask = make(mask_mod, batch, None, case.seqlen_q, case.seqlen_k, device=device)
    whole: Any = flex_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor | None) -> Any:
        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert table is not None
            return score + table[h, j - i + case.seqlen_q - 1]

        score_mod = add if case.mask in BY_DISTANCE else None
        options = {"block_mask": block_mask, "scale": case.scale, "enable_gqa": case.grouped}
        return whole(query, key, value, score_mod=score_mod, **options)

    compiled: Attend = torch.compile(attend, dynamic=False)
    return compiled


def _mask_mod(case: Case, device: torch.device) -> Callable[[Any, Any, Any, Any], Any] | None:
    """The mask as FlexAttention's documentation would write it."""
    numbers = [int(n) for n in re.findall(r"\d+", case.mask)]
    has_lengths = case.ranged_kind in ("documents", "packed", "padding")
    lengths = torch.tensor(case.lengths if has_lengths else [], dtype=torch.int64, device=device)
    left, right, offset = case.band or (0, 0, 0)
    ids = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    kinds: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
        "documents": lambda b, h, i, j: ids[i] == ids[j],
        "packed": lambda b, h, i, j: ids[i] == ids[j],
        "padding": lambda b, h, i, j: j < lengths[b],
        "prefix": lambda b, h, i, j: (j < numbers[0]) | (i >= j),
        "streaming": lambda b, h, i, j: (i >= j) & ((i - j < numbers[0]) | (j < numbers[1])),
        "": lambda b, h, i, j: (j - i - offset >= -left) & (j - i - offset <= right),
    }
    if not case.ranged_kind and case.band is None:
        return None
    allowed = kinds[case.ranged_kind]
    if case.causal and case.ranged_kind:
        return lambda b, h, i, j: allowed(b, h, i, j) & (i >= j)
    return allowed


def _torch_varlen(case: Case, inputs: Inputs) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    if case.ranged_kind not in ("documents", "packed") or case.batch > 1:
        raise Refused("varlen_attn is timed with documents and packed sequences")
    options: dict[str, Any] = {"scale": case.scale} if case.scale is not None else {}
    if case.grouped:
        options["enable_gqa"] = True
    if case.causal:  # the oldest torch has is_causal, later ones have the window instead
        has_window = "window_size" in inspect.signature(varlen_attn).parameters
        options |= {"window_size": (-1, 0)} if has_window else {"is_causal": True}
    ends, longest = case.ends.to(inputs.query.device), max(case.lengths)

    def attend(query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None) -> Any:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        out: Any = varlen_attn(q, k, v, ends, ends, longest, longest, **options)
        return out.transpose(0, 1).unsqueeze(0)

    return attend


class _TorchCpuOperator(OperatorProvider):
    """torch's flash operator for CPUs called directly: the rival of ``cpu-op``."""

    def backward(self, case: Case, inputs: Inputs, grad_out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        q, k, v, mask = tensors_of(inputs)
        _refuse_unknown_to_torch_op(case)
        if case.mask == "bias":
            raise Refused("torch's flash operator has no gradient for a mask")
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = forward(q, k, v, 0.0, case.causal, attn_mask=mask, scale=case.scale)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return partial(op, grad_out, q, k, v, out, lse, 0.0, case.causal, attn_mask=mask, scale=case.scale)


def _refuse_unknown_to_torch_op(case: Case) -> None:
    if (
        case.ranged_kind
        or case.dropout
        or case.softcap
        or case.sinks
        or case.window
        or case.alignment != "top_left"
        or case.head_dim != case.head_dim_v
    ):
        raise Refused("torch's flash operator for CPUs knows causal and a mask only")


def _torch_cpu_op(case: Case, inputs: Inputs) -> Attend:
    _refuse_unknown_to_torch_op(case)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return op(query, key, value, 0.0, case.causal, attn_mask=mask, scale=case.scale)[0]

    return attend


SDPA_BACKENDS = {
    "sdpa-cudnn": (SDPBackend.CUDNN_ATTENTION, ("cuda",)),
    "sdpa-flash": (SDPBackend.FLASH_ATTENTION, ("cpu", "cuda")),
    "sdpa-efficient": (SDPBackend.EFFICIENT_ATTENTION, ("cuda",)),
    "sdpa-math": (SDPBackend.MATH, ("cpu", "cuda")),
}


@contextmanager
def _only(backend: SDPBackend) -> Iterator[None]:
    with warnings.catch_warnings():  # each refused backend gives its reasons as warnings
        warnings.simplefilter("ignore")
        with sdpa_kernel(backend):
            yield


class _Zentorch(OperatorProvider):
    """AMD's operator for EPYC. The dense mask of a window or of ranges is made before the clock starts."""

    def backward(self, case: Case, inputs: Inputs, grad_out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        raise Refused("zentorch_sdpa has no backward pass")


# What a CPU must have, by /proc/cpuinfo's names: without it the operator calls torch's.
ZENTORCH_NEEDS = {torch.float32: "avx512f", torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}


def _zentorch_op() -> Callable[..., tuple[Tensor, Tensor]]:
    if importlib.util.find_spec("zentorch") is None:
        raise Refused("zentorch isn't installed: pip install zentorch, of the version that is for the installed torch")
    try:
        importlib.import_module("zentorch")  # registers its operators
    except (ImportError, OSError) as error:
        raise Refused(f"zentorch can't be imported beside torch {torch.__version__}: {error}") from error
    if not hasattr(torch.ops.zentorch, "zentorch_sdpa"):
        raise Refused("this zentorch has no operator zentorch_sdpa")
    op: Callable[..., tuple[Tensor, Tensor]] = torch.ops.zentorch.zentorch_sdpa.default
    return op


def _zentorch(case: Case, inputs: Inputs) -> Attend:
    op, dtype = _zentorch_op(), inputs.query.dtype
    known = not (case.dropout or case.softcap or case.sinks or case.mask in BY_DISTANCE)
    if not known or case.ranged_kind == "packed" or case.head_dim != case.head_dim_v:
        raise Refused("zentorch_sdpa knows causal and a mask only, and one head size")
    flags = devices.cpu_info().get("flags", [])
    if dtype not in ZENTORCH_NEEDS or (flags and ZENTORCH_NEEDS[dtype] not in flags):
        raise Refused(f"zentorch_sdpa calls torch's operator for {case.dtype} on this CPU")
    mask = inputs.attn_mask if _says_all(case) else _dense_mask(case, inputs)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
    causal = case.causal and _says_all(case)

    def attend(query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None) -> Tensor:
        return op(query, key, value, 0.0, causal, attn_mask=mask, scale=case.scale)[0]

    return attend


def all_rivals() -> list[Provider]:
    """For every device, F.scaled_dot_product_attention first. One that must be installed says so in its rows."""
    about, both = "F.scaled_dot_product_attention", ("cpu", "cuda")
    found: list[Provider] = [_Sdpa(BASELINE, f"{about}, torch chooses", both, _sdpa)]
    for name, (backend, kinds) in SDPA_BACKENDS.items():
        forced, math = f"{about} under sdpa_kernel({backend.name})", backend is SDPBackend.MATH
        found.append(_Sdpa(name, forced, kinds, _sdpa, partial(_only, backend), quadratic=math))
    found.append(_Flex("flex", "flex_attention under torch.compile", both, _flex, default=False))
    about = "torch.nn.attention.varlen.varlen_attn"
    found.append(Provider("torch-varlen", about, ("cuda",), _torch_varlen, default=False))
    about = "aten._scaled_dot_product_flash_attention_for_cpu, bare"
    found.append(_TorchCpuOperator("sdpa-op", about, ("cpu",), _torch_cpu_op, default=False))
    about = "zentorch.zentorch_sdpa, bare, of the package zentorch"
    found.append(_Zentorch("zentorch", about, ("cpu",), _zentorch, default=False))
    return found


KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
}


class Seen(TorchDispatchMode):
    """While active, notes the operators that torch dispatches to; ``kernel`` names the attention kernel among them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = "math"  # which is a composition and has no operator of its own

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.removesuffix("_backward")
        self.kernel = KERNELS.get(name, self.kernel)
        return func(*args, **(kwargs or {}))
