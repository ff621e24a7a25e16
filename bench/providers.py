"""Who competes: attnkern's backends and every backend of F.scaled_dot_product_attention that the device offers.

A provider turns a case and its tensors into a differentiable call. ``jobs`` wraps that call for one pass.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import attnkern
from attnkern import relative, signatures
from attnkern.params import AttentionParams
from attnkern.problem import Problem
from attnkern.testing import Inputs
from bench.cases import BY_DISTANCE, Case

from . import device as devices
from .timing import Work

PASSES = ("forward", "backward", "both", "forward-grad")
BASELINE = "sdpa"
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Refused(Exception):
    """The provider can't do this case; the message says why."""


@dataclass(frozen=True)
class Provider:
    """``bind(case, inputs)`` gives the call, or raises Refused. ``default``: takes part unless others are named."""

    name: str
    about: str
    device_types: tuple[str, ...]
    bind: Callable[[Case, Inputs], Attend]
    context: Callable[[], AbstractContextManager] = nullcontext
    default: bool = True
    quadratic: bool = False  # holds all scores
    checked: bool = True  # its result is held to the tolerance rule
    instead: Callable[[Case], Case] | None = None  # it runs another case of these sizes, by which a mask's cost is told

    def work(self, case: Case, inputs: Inputs, grad_out: Tensor, pass_name: str) -> Work:
        """The call of one pass. It returns the output, then the gradients of query, key, value and what is learned."""
        if self.instead is not None:
            case = self.instead(case)
            inputs = replace(inputs, attn_mask=None, relative_bias=None, sinks=None)
        with self.context():
            if pass_name == "forward":
                return Work(partial(self.bind(case, inputs), *_tensors(inputs)), self.context)
            learned = {name: getattr(inputs, name).detach().requires_grad_() for name in case.learned}
            inputs = replace(inputs, **learned)
            attend = self.bind(case, inputs)
            *tensors, mask = _tensors(inputs)
            query, key, value = leaves = [x.detach().requires_grad_() for x in tensors]
            leaves += learned.values()
            if pass_name == "forward-grad":
                return Work(partial(attend, query, key, value, mask), self.context)
            if pass_name == "backward":
                out = attend(query, key, value, mask)
                return Work(partial(torch.autograd.grad, out, leaves, grad_out, retain_graph=True), self.context)

        def both() -> tuple[Tensor, ...]:
            out = attend(query, key, value, mask)
            return (out, *torch.autograd.grad(out, leaves, grad_out))

        return Work(both, self.context)


def _tensors(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """query, key, value and the mask, or the table (Hq, L + S - 1) of a relative bias."""
    mask = inputs.attn_mask if inputs.relative_bias is None else inputs.relative_bias
    return inputs.query, inputs.key, inputs.value, mask


def results(
    case: Case,
    pass_name: str,
    returned: object,
    restore: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """What a Work's call returned, by the names of attnkern.testing.expected."""
    tensors = returned if isinstance(returned, tuple) else (returned,)
    dense = tensors[-1].dim() == 4  # of a rival, in place of a table
    learned = ("attn_mask" if name == "relative_bias" and dense else name for name in case.learned)
    names = ("out",) if pass_name.startswith("forward") else ("query", "key", "value", *learned)
    if pass_name == "both":
        names = ("out", *names)
    found = {name: x.detach() for name, x in zip(names, tensors, strict=False) if x.numel()}
    return found if restore is None else restore(found)


# --- attnkern ---------------------------------------------------------------------------------------------------------


def _options(case: Case) -> dict[str, Any]:
    """The keyword arguments of a case that F.scaled_dot_product_attention has too."""
    return {
        "dropout_p": case.dropout,
        "is_causal": case.causal,
        "scale": case.scale,
        "enable_gqa": case.heads_q != case.heads_k,
    }


def _extended(case: Case) -> dict[str, Any]:
    return {**_options(case), "window": case.window, "alignment": case.alignment, "softcap": case.softcap or None}


def _attnkern(backend: str, case: Case, inputs: Inputs) -> Attend:
    if case.ranged_kind:
        return _attnkern_with_ranges(backend, case, inputs)
    query, key, value, _ = _tensors(inputs)
    options = {**_extended(case), "sinks": inputs.sinks, "backend": backend}
    given: dict[str, Any] = {"attn_mask": inputs.attn_mask, "relative_bias": inputs.relative_bias}
    explanation = attnkern.explain(query, key, value, **given, **options)
    if explanation.chosen != backend:
        raise Refused("; ".join(explanation.refusals[backend]))
    if case.mask in BY_DISTANCE:

        def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor | None) -> Any:
            return attnkern.attention(query, key, value, relative_bias=table, **options)

        return attend
    drop_in = inputs.sinks is None and case.window is None and case.alignment == "top_left" and not case.softcap
    if drop_in and not (case.causal and case.mask != "none"):
        return partial(attnkern.scaled_dot_product_attention, **_options(case), backend=backend)
    function: Callable[..., Any] = attnkern.attention  # gives the output alone unless asked for more
    return partial(function, **options)


def _attnkern_with_ranges(backend: str, case: Case, inputs: Inputs, dense: bool = False) -> Attend:
    """Told as a Mask, made before the clock starts, or as cu_seqlens; ``dense``: as the bool tensor of the same."""
    if case.ranged is None:
        raise Refused("there are no ranges that a dense mask could take the place of")
    query, key, value, _ = _tensors(inputs)
    whole = case.ranged.to(query.device)
    mask = whole.to_dense() if dense else whole
    options: dict[str, Any] = {**_extended(case), "is_causal": False, "backend": backend}
    explanation = attnkern.explain(query, key, value, mask, **options)
    if explanation.chosen != backend:
        raise Refused("; ".join(explanation.refusals[backend]))

    def attend(query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None) -> Any:
        return attnkern.attention(query, key, value, mask, **options)

    if dense or case.ranged_kind != "packed":
        return attend
    ends, options["is_causal"] = case.ends.to(query.device), case.causal
    options.pop("alignment")

    def attend_packed(query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None) -> Any:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        out: Any = attnkern.varlen_attention(q, k, v, ends, **options)
        return out.transpose(0, 1).unsqueeze(0)

    return attend_packed


def _without_mask(case: Case) -> Case:
    """The same sizes, all scores; of a window and the first keys, the window alone; of learned sinks and of a bias by
    distance, all but them."""
    if case.sinks:
        return replace(case, sinks=False)
    if case.mask in BY_DISTANCE:
        return replace(case, mask="none")
    if case.ranged_kind == "packed" or (case.mask == "none" and case.band is None):
        raise Refused("there is no call of these sizes without the mask")
    plain = replace(case, mask="none", causal=False, window=None, alignment="top_left")
    if case.ranged_kind == "streaming":
        width = int(case.mask.removeprefix("streaming:").partition("+")[0])
        return replace(plain, causal=True, window=(width - 1, 0))
    return plain


class _OperatorProvider(Provider):
    """A bare operator has no autograd: ``backward`` is a call of its own."""

    def work(self, case: Case, inputs: Inputs, grad_out: Tensor, pass_name: str) -> Work:
        if pass_name == "forward":
            return Work(partial(self.bind(case, inputs), *_tensors(inputs)), self.context)
        if pass_name == "backward":
            return Work(self.backward(case, inputs, grad_out), self.context)
        raise Refused("a bare operator runs forward or backward only")

    @abstractmethod
    def backward(self, case: Case, inputs: Inputs, grad_out: Tensor) -> Callable[[], tuple[Tensor, ...]]: ...


def _params(case: Case, inputs: Inputs) -> AttentionParams:
    """The operator's arguments from softmax_scale to dropout_p."""
    if case.ranged_kind:
        raise Refused("the bare operator is timed without ranges only")
    if case.dropout or case.sinks or case.mask in BY_DISTANCE:
        raise Refused("the bare operator is timed without dropout, sinks and relative biases only")
    query, key, value, mask = _tensors(inputs)
    return Problem.from_sdpa(query, key, value, mask, **_extended(case)).params


def _attnkern_op(case: Case, inputs: Inputs) -> Attend:
    op, params = torch.ops.attnkern.forward.default, _params(case, inputs)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return op(*signatures.Inputs(query, key, value, mask), *params, False, "cpu")[0]

    return attend


class _AttnkernOperator(_OperatorProvider):
    """The operator without the Python above it: what a short call costs at least."""

    def backward(self, case: Case, inputs: Inputs, grad_out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        q, k, v, mask = _tensors(inputs)
        params = _params(case, inputs)
        out, lse = torch.ops.attnkern.forward.default(*signatures.Inputs(q, k, v, mask), *params, True, "cpu")
        wanted = 7 + 8 * (case.mask == "bias")
        op = torch.ops.attnkern.backward.default
        return partial(op, grad_out, None, *signatures.Inputs(q, k, v, mask), out, lse, *params, wanted, "cpu")


class _TritonOperator(_OperatorProvider):
    """The Triton backend's Python with a driver that does nothing, on CPU tensors: what a launch costs the host."""

    def backward(self, case: Case, inputs: Inputs, grad_out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        raise Refused("the forward pass alone is one launch")


def _triton_operator(case: Case, inputs: Inputs) -> Attend:
    """The whole operator: looks up the plan, allocates the results, launches."""
    from attnkern.backends import triton

    _refuse_other_than_launches(case)
    params = _params(case, inputs)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return triton.forward(signatures.Inputs(query, key, value, mask), params, False)[0]

    return attend


def _triton_launch(case: Case, inputs: Inputs) -> Attend:
    """A launch alone, with the arguments at hand."""
    from attnkern.triton_kernels import launch

    from attnkern.backends import triton

    _refuse_other_than_launches(case)
    launched: list[tuple[Any, ...]] = []
    arguments = signatures.Inputs(*_tensors(inputs)), _params(case, inputs), False
    with _without_driver():
        run, launch.run = launch.run, lambda *arguments: launched.append(arguments)
        try:
            triton.forward(*arguments)
        finally:
            launch.run = run
    call = partial(run, *launched[0])

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        call()
        return query

    return attend


def _refuse_other_than_launches(case: Case) -> None:
    if "launch-overhead" not in case.tags:
        raise Refused("it computes nothing: for the cases of launch-overhead")


@contextmanager
def _without_driver() -> Iterator[None]:
    from attnkern.triton_kernels import launch

    def nothing(*arguments: Any) -> None: ...

    replaced = {
        "capability": lambda index: 80,
        "processors": lambda index: 108,
        "_load": lambda kernel, index: (nothing, None, None),
        "_stream": lambda index: 0,
        "_current_device": lambda: -1,  # the index of CPU tensors
    }
    before = {name: getattr(launch, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(launch, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(launch, name, function)


# --- torch ------------------------------------------------------------------------------------------------------------


def _sdpa(case: Case, inputs: Inputs) -> Attend:
    if case.softcap:
        raise Refused("F.scaled_dot_product_attention has no softcap")
    options = _options(case)
    if case.sinks:
        return _sdpa_with_a_key_more(case, inputs)
    if case.ranged_kind == "packed":
        return partial(F.scaled_dot_product_attention, **options)  # of the padded batch
    band_is_causal = case.window is None and (case.alignment == "top_left" or case.seqlen_q == case.seqlen_k)
    if not case.ranged_kind and (case.band is None or (band_is_causal and case.mask == "none")):
        return partial(F.scaled_dot_product_attention, **options)
    options["is_causal"] = False
    # torch knows no other band, and no ranges: the dense mask that means the same, made before the clock starts.
    if case.mask == "bias":
        raise Refused("F.scaled_dot_product_attention takes no mask with a band, and this one needs its gradient")
    keep = case.keep_mask(device=inputs.query.device)
    assert keep is not None
    mask = inputs.attn_mask
    if mask is None:
        dense = keep
    elif mask.dtype == torch.bool:
        dense = mask & keep
    else:
        dense = mask.masked_fill(~keep, float("-inf"))

    def attend(query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dense, **options)

    return attend


def _sdpa_with_a_key_more(case: Case, inputs: Inputs) -> Attend:
    """The sinks as the scores of a key of zeros, whose value is 0: a mask adds them. It is made before the clock starts
    where they aren't trained."""
    query, sinks = inputs.query, inputs.sinks
    assert sinks is not None
    keep = case.keep_mask(device=query.device)
    scores = query.new_zeros(1, case.heads_q, case.seqlen_q, case.seqlen_k)
    scores = scores if keep is None else scores.masked_fill(~keep, float("-inf"))
    options = {**_options(case), "is_causal": False}

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

        query, key, value = map(padded, _tensors(inputs)[:3])
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


class _TorchCpuOperator(_OperatorProvider):
    """torch's flash operator for CPUs called directly: the rival of ``cpu-op``."""

    def backward(self, case: Case, inputs: Inputs, grad_out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        q, k, v, mask = _tensors(inputs)
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


def all_providers(device: torch.device) -> list[Provider]:
    """Every provider of the device, attnkern's available backends first."""
    kind = devices.of(device).kind
    found: list[Provider] = []
    for info in attnkern.backends():
        if info.available and (kind in info.device_types or "any" in info.device_types):
            about = f"attnkern.scaled_dot_product_attention(backend={info.name!r})"
            whole = info.name == "reference"  # builds the whole matrix, in Python
            bind = partial(_attnkern, info.name)
            found.append(Provider(info.name, about, (kind,), bind, default=not whole, quadratic=whole))
            if not whole:
                about = "the same with a dense bool mask where the case's is ranges"
                bind = partial(_attnkern_with_ranges, info.name, dense=True)
                found.append(Provider(f"{info.name}-bool", about, (kind,), bind, default=False))
                bind, about = (
                    partial(_attnkern, info.name),
                    "the same without the case's mask (of a window with its first keys, with the window) or its sinks",
                )
                plain: dict[str, Any] = {"default": False, "checked": False, "instead": _without_mask}
                found.append(Provider(f"{info.name}-plain", about, (kind,), bind, **plain))
            if info.name == "cpu":
                about = "torch.ops.attnkern.forward and .backward, bare"
                found.append(_AttnkernOperator("cpu-op", about, (kind,), _attnkern_op, default=False))
    if importlib.util.find_spec("triton") is not None:
        more: dict[str, Any] = {"context": _without_driver, "default": False, "checked": False}
        about = "the Triton backend's operator, the driver stubbed"
        found.append(_TritonOperator("triton-host", about, ("cpu",), _triton_operator, **more))
        about = "a launch of the Triton backend alone, the driver stubbed"
        found.append(_TritonOperator("triton-launch", about, ("cpu",), _triton_launch, **more))
    about = "F.scaled_dot_product_attention"
    both = ("cpu", "cuda")
    found.append(_Sdpa(BASELINE, f"{about}, torch chooses", both, _sdpa))
    for name, (backend, kinds) in SDPA_BACKENDS.items():
        forced, math = f"{about} under sdpa_kernel({backend.name})", backend is SDPBackend.MATH
        found.append(_Sdpa(name, forced, kinds, _sdpa, partial(_only, backend), quadratic=math))
    found.append(_Flex("flex", "flex_attention under torch.compile", both, _flex, default=False))
    about = "torch.nn.attention.varlen.varlen_attn"
    found.append(Provider("torch-varlen", about, ("cuda",), _torch_varlen, default=False))
    about = "aten._scaled_dot_product_flash_attention_for_cpu, bare"
    found.append(_TorchCpuOperator("sdpa-op", about, ("cpu",), _torch_cpu_op, default=False))
    return [p for p in found if kind in p.device_types]


def choose(names: str | None, device: torch.device) -> list[Provider]:
    """The named providers (comma-separated; ``all``; None: the default ones). Raises ValueError naming a wrong one."""
    offered = all_providers(device)
    if names is None:
        return [p for p in offered if p.default]
    if names == "all":
        return offered
    by_name = {p.name: p for p in offered}
    chosen = []
    for name in filter(None, (n.strip() for n in names.split(","))):
        if name not in by_name:
            raise ValueError(f"{name!r} is no provider on {devices.of(device).kind}: {', '.join(by_name)}")
        chosen.append(by_name[name])
    if not chosen:
        raise ValueError("no provider is named")
    return chosen


# --- which kernel ran -------------------------------------------------------------------------------------------------


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
