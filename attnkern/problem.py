"""`Problem`: one attention call, validated and brought to 4-D. Nothing below this module checks a shape again.

What a call asks for depends on shapes, dtypes, devices and flags alone, not on the tensors' contents. `_normalise`
holds every rule and error message. It is memoised for arguments of the usual types, so that a repeated call costs one
dictionary look-up. `Problem.from_sdpa` describes the tensors, calls it and takes the views it names.

Layout below this module: q (B, Hq, L, E), k (B, Hk, S, E), v (B, Hv, S, Ev). Query head h uses key head h // (Hq // Hk)
and value head h // (Hq // Hv); one shared key or value head is the same index map. The batch is broadcast by stride 0.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import bits, relative, rng
from .arguments import (
    PLAIN,
    Window,
    autocast,
    autocasts,
    check_bounds,
    checked_window,
    constant,
    describe,
    is_causal_bias,
    is_usual_window,
    mask_type_error,
    number,
    show,
    type_error,
)
from .checks import check_added, check_kind, check_mask, check_place, check_ranges, check_sinks
from .dtensor import replicated
from .mask import Mask, check_sizes
from .packed import Jagged, of_jagged
from .pages import Pages, check_no_gradient, pages_of
from .params import (
    UNBOUNDED,
    AttentionParams,
    Band,
    check_alignment,
    check_dropout,
    check_scale,
    check_softcap,
    ends_are_dense,
    holds,
    int_of_numpy,
)
from .shapes import Kind, Sizes, View, broadcast_sizes, equal, fit, shared_heads
from .signatures import GRAD_BITS, Inputs, for_operators

_NUMBERS = frozenset((int, float))


class Problem(NamedTuple):
    """A validated attention call. (A tuple, not a dataclass: 0.1 us instead of 0.5 us to make, in every call.)"""

    q: Tensor  # (B, Hq, L, E)
    k: Tensor  # (B, Hk, S, E)
    v: Tensor  # (B, Hv, S, Ev)
    # (B|1, Hq|1, L|1, S|1): bool (True = attend) or floating point (added to the scaled scores); or a mask in bits
    # (bits.py), or a table (B|1, Hq|1, L + S - 1) of what each distance adds
    bias: Tensor | None
    sinks: Tensor | None  # (Hq,), as most calls give them, or (B|1, Hq); of the log-sum-exp's dtype
    ranges: Tensor | None  # int32 (B|1, Hq|1, L|1, 1|2, 2): a row attends to the keys of [begin, end) of either range
    params: AttentionParams
    # Leading dimensions of the caller's output; None: (B, Hq), as here; or the jagged tensor that it is to be like.
    lead: tuple[int, ...] | Jagged | None
    # Where keys and values lie in pages; k and v are then views of the right sizes, which hold others.
    pages: Pages | None = None

    @classmethod
    def of_inputs(cls, inputs: Inputs, params: AttentionParams) -> Problem:
        """Of an operator's arguments, which are validated."""
        k, v, pages = inputs.k, inputs.v, None
        if inputs.block_table is not None:
            pages = Pages(k, v, inputs.block_table)
            k, v = pages.views()
        return cls(inputs.q, k, v, inputs.bias, inputs.sinks, inputs.key_ranges, params, None, pages)

    def inputs(self, philox_seed: Tensor | None = None) -> Inputs:
        """An operator's arguments."""
        return Inputs(*for_operators(self.given(philox_seed)))

    def given(self, philox_seed: Tensor | None = None) -> Inputs:
        """An operator's arguments but for sinks (Hq,), which `autograd.attention` takes as they are."""
        k, v, table = (self.k, self.v, None) if self.pages is None else self.pages
        return Inputs(self.q, k, v, self.bias, self.sinks, self.ranges, philox_seed, table)

    @classmethod
    def from_sdpa(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | Mask | None = None,
        dropout_p: float = 0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        window: Window = None,
        alignment: str = "top_left",
        softcap: float | None = None,
        key_ranges: Tensor | None = None,
        sinks: Tensor | None = None,
        relative_bias: Tensor | None = None,
        relative_bias_center: int | None = None,
        block_table: Tensor | None = None,
    ) -> Problem:
        """Validate and normalise the arguments of `attnkern.attention`. Raises what torch raises, with the argument."""
        if block_table is not None:
            return cls._of_pages(
                *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, alignment, softcap),
                *(key_ranges, sinks, relative_bias, relative_bias_center, block_table),
            )
        given, of_bits = attn_mask, None
        if isinstance(given, Mask):
            attn_mask, key_ranges, of_bits = _of_mask(given, key_ranges, query, key)
            if type(query) is not Tensor:
                attn_mask = replicated(attn_mask, query)
        if key_ranges is not None and type(query) is not Tensor:
            key_ranges = replicated(key_ranges, query)
        if sinks is not None and not isinstance(sinks, Tensor):
            raise type_error("sinks", "Tensor or None", sinks)
        usual = (
            not torch.compiler.is_compiling()
            # Under a transform a tensor that looks ordinary may wrap one with symbolic sizes.
            and not torch._C._are_functorch_transforms_active()
            and type(query) is type(key) is type(value) is Tensor
            and (attn_mask is None or type(attn_mask) is Tensor)
            and (key_ranges is None or type(key_ranges) is Tensor)
            and (sinks is None or type(sinks) in PLAIN)
            and type(is_causal) is type(enable_gqa) is bool
            and type(dropout_p) in _NUMBERS
            and (scale is None or type(scale) in _NUMBERS)
            and (softcap is None or type(softcap) in _NUMBERS)
            and (window is None or is_usual_window(window))
            and type(alignment) is str
        )
        mask: Any = attn_mask
        of_mask: Any = of_bits
        bottom_right_sizes = None
        if not usual:
            _check_types(query, key, value, attn_mask, key_ranges, is_causal, enable_gqa)
            dropout_p = number("dropout_p", dropout_p)
            scale = None if scale is None else number("scale", scale)
            softcap = None if softcap is None else number("softcap", softcap)
            window = checked_window(window)
            if is_causal_bias(mask):
                alignment, bottom_right_sizes = _of_causal_bias(mask, is_causal, window, alignment)
                mask, is_causal = None, True
            if any(x.is_nested for x in (query, key, value)):
                return cls._of_jagged(
                    *(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa),
                    *(window, alignment, softcap, key_ranges, sinks, relative_bias, relative_bias_center),
                )
            _check_not_nested(mask, key_ranges, sinks)
            _check_placed(query, key, value, attn_mask=mask, sinks=sinks, relative_bias=relative_bias)
        if autocasts(query.device):
            query, key, value, mask = autocast(query, key, value, mask)
        if alignment == "bottom_right" and torch.jit.is_tracing():
            key_ranges = _bottom_right_ranges(query, key, key_ranges, is_causal, checked_window(window))
            is_causal, window, alignment = False, None, "top_left"

        if mask is not None and of_bits is None:
            of_mask = mask.shape, mask.dtype, mask.device, mask.layout
        try:
            normal = (_memoised if usual else _normalise)(
                (query.shape, query.dtype, query.device, query.layout),
                (key.shape, key.dtype, key.device, key.layout),
                (value.shape, value.dtype, value.device, value.layout),
                of_mask,
                None if sinks is None else (sinks.shape, sinks.dtype, sinks.device, sinks.layout),
                None
                if key_ranges is None
                else (key_ranges.shape, key_ranges.dtype, key_ranges.device, key_ranges.layout),
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
                window,
                alignment,
                softcap,
            )
        except RuntimeError:
            _check_not_nested(query, key, value, mask)  # which have no shape; asked beforehand it costs 0.15 us
            if isinstance(given, Mask):
                check_sizes(given, query, key, value)
            raise
        if bottom_right_sizes is not None:
            _check_causal_bias(bottom_right_sizes, query, key)
        if normal.query is not None:
            query = normal.query.of(query)
        if normal.key is not None:
            key = normal.key.of(key)
        if normal.value is not None:
            value = normal.value.of(value)
        if normal.mask is not None:
            mask = normal.mask.of(mask) if of_bits is None else normal.mask.of_bits(mask)
        if sinks is not None:
            if normal.sinks is not None:
                sinks = normal.sinks.of(sinks)
            if sinks.dtype != torch.float32 or query.dtype == torch.float64:  # in half the time of `to`
                sinks = sinks.to(torch.promote_types(query.dtype, torch.float32))
        if key_ranges is not None:
            key_ranges = _narrowed(key_ranges)
            if normal.ranges is not None:
                key_ranges = normal.ranges.of(key_ranges)
        if relative_bias is None:
            if relative_bias_center is not None:
                raise ValueError("attnkern: relative_bias_center needs relative_bias")
        else:
            mask = _with_relative(mask, relative_bias, relative_bias_center, query, key)
        return tuple.__new__(cls, (query, key, value, mask, sinks, key_ranges, normal.params, normal.lead, None))

    @classmethod
    def _of_pages(cls, query: Tensor, key: Tensor, value: Tensor, *others_and_table: Any) -> Problem:
        """Of keys and values in pages: `others_and_table` as from_sdpa takes them."""
        *others, block_table = others_and_table
        if type(query) is not Tensor and isinstance(block_table, Tensor):
            block_table = replicated(block_table, query)
        pages = pages_of(query, key, value, block_table)
        attn_mask, *_, sinks, relative_bias, _center = others
        check_no_gradient(attn_mask=attn_mask, sinks=sinks, relative_bias=relative_bias)
        key, value = pages.views()
        if not autocasts(query.device):
            return cls.from_sdpa(query, key, value, *others)._replace(pages=pages)
        if query.is_floating_point() and query.dtype != torch.float64:
            query = query.to(key.dtype)  # to cast the pools would copy all of their pages
        with torch.autocast(query.device.type, enabled=False):
            return cls.from_sdpa(query, key, value, *others)._replace(pages=pages)

    @classmethod
    def _of_jagged(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        window: Window,
        alignment: str,
        softcap: float | None,
        key_ranges: Tensor | None,
        sinks: Tensor | None,
        relative_bias: Tensor | None,
        relative_bias_center: int | None,
    ) -> Problem:
        """`from_sdpa` of jagged nested tensors: that of their values, packed one after the other."""
        _check_not_nested(query, key, value)
        for name, x in (("attn_mask", attn_mask), ("key_ranges", key_ranges)):
            if x is not None:
                raise ValueError(
                    f"attnkern: {name} must be None beside jagged nested tensors (is_causal and window are within each "
                    "sequence)"
                )
        check_alignment(alignment)
        left, right = window or (None, None)
        q, k, v, ranges = of_jagged(query, key, value, left, 0 if is_causal else right, alignment)
        if ranges is not None:
            is_causal, window = False, None
        offsets: Any = [x.offsets() for x in (query, key)]  # type: ignore[attr-defined]
        if relative_bias is not None and offsets[0] is not offsets[1]:
            raise ValueError(
                "attnkern: relative_bias must be None beside jagged nested tensors of other offsets: key's must be "
                "query's"
            )
        options = dropout_p, is_causal, scale, enable_gqa, window, alignment, softcap, ranges, sinks, relative_bias
        problem = cls.from_sdpa(q, k, v, None, *options, relative_bias_center)
        assert not isinstance(problem.lead, Jagged)
        return problem._replace(lead=Jagged(query, problem.lead))

    def wanted(self) -> int:
        """What a backward pass will be asked for, as the operators' grad_mask; 0: there will be none."""
        if not torch.is_grad_enabled():
            return 0
        tensors = self.q, self.k, self.v, self.bias, self.sinks
        return sum(bit for x, bit in zip(tensors, GRAD_BITS, strict=True) if x is not None and x.requires_grad)

    def restore(self, x: Tensor) -> Tensor:
        """The caller's shape for `x` (B, Hq, ...): leading dimensions as the inputs' broadcast."""
        lead = self.lead
        if isinstance(lead, Jagged):
            return lead.of(self._replace(lead=lead.lead).restore(x))
        return x if lead is None else x.reshape(*lead, *x.shape[2:])

    def __str__(self) -> str:
        """One line that says what was asked for: used by `explain` and in errors."""
        parts = [describe(name, x) for name, x in (("query", self.q), ("key", self.k), ("value", self.v))]
        if self.pages is not None:
            parts.append(f"in {self.pages.key.shape[0]} pages of {self.pages.key.shape[2]}")
        if self.bias is not None:
            bias: Any = bits.as_described(self.bias, self.k.shape[2])
            name = "relative bias" if relative.by_distance(bias) else "mask" if bias is self.bias else "mask of bits"
            parts.append(f"{name} {show(bias.shape)} {show(bias.dtype)} {self.bias.device}")
        if self.ranges is not None:
            parts.append(describe("key_ranges", self.ranges))
        if self.sinks is not None:
            parts.append(describe("sinks", self.sinks))
        params = self.params
        if params.window_left != UNBOUNDED or params.window_right != UNBOUNDED:
            left, right = ("unbounded" if x == UNBOUNDED else str(x) for x in (params.window_left, params.window_right))
            parts.append(f"band left {left}, right {right}, offset {params.band_offset}")
        parts.append(f"scale {params.softmax_scale:.6g}")
        if params.softcap:
            parts.append(f"softcap {params.softcap:.6g}")
        if params.dropout_p:
            parts.append(f"dropout {params.dropout_p:.6g}")
        return "; ".join(parts)


class _Normal(NamedTuple):
    """The views that bring a call's tensors to 4-D, and its numbers."""

    query: View | None  # None: as it is
    key: View | None
    value: View | None
    mask: View | None
    sinks: View | None
    ranges: View | None
    params: AttentionParams
    lead: Sizes | None


def _normalise(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    sinks: Any,
    key_ranges: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    window: Window,
    alignment: str,
    softcap: float | None,
) -> _Normal:
    """All rules: the fields of tensors' `Kind` and options in, views and parameters out."""
    query, key, value = Kind(*query), Kind(*key), Kind(*value)
    mask, sinks, key_ranges = (None if x is None else Kind(*x) for x in (mask, sinks, key_ranges))
    check_dropout(dropout_p)
    check_scale(scale)
    check_softcap(softcap, query.dtype)
    check_bounds(window)
    check_alignment(alignment)
    for name, kind in (("query", query), ("key", key), ("value", value)):
        check_kind(name, kind, query)

    q, k, v = query.shape, key.shape, value.shape
    seqlen_q, head_dim = q[-2:]
    seqlen_k, head_dim_v = v[-2:]
    if k[-1] != head_dim:
        raise RuntimeError(f"attnkern: key's last size must be query's, {head_dim}, got {k[-1]}")
    if k[-2] != seqlen_k:
        raise RuntimeError(
            f"attnkern: key and value must have the same length (dimension -2), got {show(k)} and {show(v)}"
        )
    heads_q, heads_k, heads_v = (x[-3] if len(x) > 2 else 1 for x in (q, k, v))
    if enable_gqa:
        heads_qk = heads = heads_q
        for name, shape, n in (("query", q, heads_q), ("key", k, heads_k), ("value", v, heads_v)):
            if len(shape) < 3:
                raise RuntimeError(
                    f"attnkern: {name} must have a head dimension (-3) with enable_gqa, got {show(shape)}"
                )
            if holds(n != heads, False) and (holds(n == 0, False) or holds(heads % n != 0, False)):
                raise RuntimeError(
                    f"attnkern: {name}'s number of heads must divide query's {heads} with enable_gqa, got {n}"
                )
    else:
        heads_qk = shared_heads("key's number of heads must be 1 or query's", heads_q, heads_k)
        heads = shared_heads("value's number of heads must be 1 or query's and key's", heads_qk, heads_v)
    batch_qk = broadcast_sizes("key's batch dimensions must broadcast with query's", q[:-3], k[:-3])
    batch = broadcast_sizes("value's batch dimensions must broadcast with query's and key's", batch_qk, v[:-3])

    mask_view = sinks_view = ranges_view = None
    if mask is not None:
        # Of 3-D tensors a mask may be 4-D: torch 2.15 takes it so, earlier ones refuse.
        batch_of_mask = batch_qk if len(q) > 3 or len(k) > 3 else (1,)
        scores = (seqlen_q, seqlen_k) if len(q) == len(k) == 2 else (*batch_of_mask, heads_qk, seqlen_q, seqlen_k)
        check_mask(mask, query, scores)
        mask_view = View.of_mask(mask.shape, 3, batch)
    if sinks is not None:
        check_sinks(sinks, query, (*batch, heads))
        if not equal(sinks.shape, (heads,)):
            sinks_view = View.of_mask(sinks.shape, 1, batch, (heads,))
    if key_ranges is not None:
        rows = (seqlen_q,) if max(len(q), len(k), len(v)) == 2 else (*(batch or (1,)), heads, seqlen_q)
        check_ranges(key_ranges, query, rows)
        ranges_view = View.of_mask(key_ranges.shape, 4, batch)

    if scale is None:
        # With no features every score is 0 whatever the scale: any finite one gives the plain mean.
        scale = 1.0 / math.sqrt(constant(head_dim)) if head_dim != 0 else 1.0
    rank = max(len(q), len(k), len(v))
    return _Normal(
        query=View.to(batch, (heads, seqlen_q, head_dim), q),
        key=View.to(batch, (heads_k, seqlen_k, head_dim), k),
        value=View.to(batch, (heads_v, seqlen_k, head_dim_v), v),
        mask=mask_view,
        sinks=sinks_view,
        ranges=ranges_view,
        params=AttentionParams(
            float(scale),
            float(softcap or 0),
            *_band(is_causal, window, seqlen_k - seqlen_q if alignment == "bottom_right" else 0),
            rng.drawn_probability(float(dropout_p)),
        ),
        lead=None if rank == 4 else () if rank == 2 else (*batch, heads),
    )


# For arguments of the expected types alone: True == 1 as keys, but is_causal=1 is an error.
_memoised = functools.lru_cache(maxsize=4096)(_normalise)


def _check_types(
    query: Any, key: Any, value: Any, attn_mask: Any, key_ranges: Any, is_causal: Any, enable_gqa: Any
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise type_error(name, "Tensor", x)
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise mask_type_error(attn_mask)
    if key_ranges is not None and not isinstance(key_ranges, Tensor):
        raise type_error("key_ranges", "Tensor or None", key_ranges)
    for name, x in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(x, bool):
            raise type_error(name, "bool", x)


def _check_not_nested(*tensors: Tensor | None) -> None:
    if any(x is not None and x.is_nested and x.layout != torch.jagged for x in tensors):
        raise RuntimeError("attnkern: nested tensors are supported in the jagged layout only (layout=torch.jagged)")


def _check_placed(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> None:
    """Raises where some are DTensors and others aren't: torch's own error names no argument."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    # A graph cannot ask for torch's leave to mix them, and a transform hides what it wraps.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    from torch.distributed.tensor import DTensor

    tensors = {"query": query, "key": key, "value": value, **others}
    placed = {name: isinstance(x, DTensor) for name, x in tensors.items() if isinstance(x, Tensor)}
    if len(set(placed.values())) < 2 or DTensor._op_dispatcher._allow_implicit_replication:
        return
    whole = next(name for name, is_placed in placed.items() if not is_placed)
    raise RuntimeError(
        f"attnkern: {whole} must be a DTensor, as {next(filter(placed.get, placed))} is: distribute_tensor makes one"
    )


def _with_relative(mask: Tensor | None, given: Any, center: Any, query: Tensor, key: Tensor) -> Tensor:
    """A table of distances for these 4-D tensors; beside a mask, the sum of both, dense."""
    if not isinstance(given, Tensor):
        raise type_error("relative_bias", "Tensor or None", given)
    batch, heads, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    if not 0 < given.dim() <= 3 or not fit(given.shape[:-1], (batch, heads)) or given.shape[-1] == 0:
        raise RuntimeError(
            "attnkern: relative_bias must hold numbers by distance, (R,), (1 or heads, R) or (1 or batch, 1 or heads, "
            f"R) with {heads} heads in a batch of {batch}, got {show(given.shape)}"
        )
    check_place("relative_bias", Kind.of(given), Kind.of(query))
    check_added("relative_bias", given.dtype, query.dtype)
    center = int_of_numpy(center)
    if center is None:
        center = seqlen_q - 1
    elif isinstance(center, bool) or not isinstance(center, (int, torch.SymInt)):
        raise type_error("relative_bias_center", "int or None", center)
    elif not 0 <= center < given.shape[-1]:
        raise ValueError(
            f"attnkern: relative_bias_center must be an index into the {given.shape[-1]} numbers of relative_bias, got "
            f"{center}"
        )
    bias = relative.table(given, center, seqlen_q, seqlen_k)
    if mask is None:
        return bias
    bias = relative.dense(bias, seqlen_q, seqlen_k)
    if bits.in_bits(mask):
        mask = bits.bools(mask, seqlen_k)
    if mask.dtype == torch.bool:
        return bias.where(mask, -math.inf)
    exact = torch.promote_types(query.dtype, torch.float32)
    return bias.to(exact) + mask.to(exact)


def _of_causal_bias(mask: Any, is_causal: bool, window: Window, alignment: str) -> tuple[str, tuple[int, int] | None]:
    """The alignment that a CausalBias stands for, and the sizes of the scores that it was made for if those matter."""
    if is_causal or window is not None or alignment != "top_left":
        raise ValueError("attnkern: attn_mask is a CausalBias: is_causal, window, alignment must not be set")
    if mask.variant.name == "LOWER_RIGHT":
        return "bottom_right", (mask.seq_len_q, mask.seq_len_kv)
    return alignment, None


def _check_causal_bias(sizes: tuple[int, int], query: Tensor, key: Tensor) -> None:
    if sizes != (query.shape[-2], key.shape[-2]):
        raise RuntimeError(
            f"attnkern: attn_mask is a bottom-right CausalBias for {sizes} scores, "
            f"query and key make {(query.shape[-2], key.shape[-2])}"
        )


def _of_mask(mask: Mask, key_ranges: Any, query: Any, key: Any) -> tuple[Any, Any, Any]:
    """attn_mask and key_ranges in place of a Mask; and, if the first is its bits, the description of the mask
    that they stand for: no user's tensor of bytes is a mask."""
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor):
            raise type_error(name, "Tensor", x)
        if x.is_nested:
            raise ValueError(
                "attnkern: attn_mask must be None beside jagged nested tensors (is_causal and window are within each "
                "sequence)"
            )
        if x.dim() < 2:
            raise RuntimeError(
                f"attnkern: {name} must have at least 2 dimensions (..., length, size), got {show(x.shape)}"
            )
    sizes = query.shape[-2], key.shape[-2]
    if (mask.seqlen_q, mask.seqlen_k) != sizes:
        raise RuntimeError(
            f"attnkern: attn_mask is a Mask for {mask.seqlen_q} queries and {mask.seqlen_k} keys, "
            f"query and key have {sizes[0]} and {sizes[1]}"
        )
    if mask.device != query.device:
        raise RuntimeError(f"attnkern: attn_mask must be on query's device {query.device}, got {mask.device}")
    # The dimensions of batch and heads, as far as query and key have any.
    missing = 4 - max(2, min(4, max(query.dim(), key.dim())))
    if any(n != 1 for n in mask.shape[:missing]):
        one = "sequence and head" if missing == 2 else "sequence"
        raise RuntimeError(
            f"attnkern: attn_mask must be a Mask of one {one} for query {show(query.shape)}, got {mask.shape}"
        )
    attn_mask, ranges = mask.as_arguments((0,) * missing, key_ranges)
    if mask.ranges is not None:
        return attn_mask, ranges, None
    held: Any = attn_mask
    return held, ranges, ((*held.shape[:-1], mask.seqlen_k), torch.bool, held.device, held.layout)


def in_int32(ranges: Tensor) -> Tensor:
    """key_ranges in int64 as such ranges in int32: no key has a number beyond."""
    return ranges.clamp(0, 2**31 - 1).to(torch.int32)


def _narrowed(ranges: Tensor) -> Tensor:
    """key_ranges as kernels read them: int32, begin and end side by side."""
    if ranges.dtype == torch.int64:
        ranges = in_int32(ranges)
    return ranges if ends_are_dense(ranges) else ranges.contiguous()


def _band(is_causal: bool, window: Window, offset: int) -> Band:
    left, right = window or (None, None)
    if is_causal:
        right = 0  # a window's bounds are >= 0, so the causal one is the tighter
    if left is None and right is None:
        return Band()
    return Band(
        UNBOUNDED if left is None else min(left, UNBOUNDED),
        UNBOUNDED if right is None else min(right, UNBOUNDED),
        offset,
    )


def _bottom_right_ranges(
    query: Tensor, key: Tensor, key_ranges: Tensor | None, is_causal: bool, window: Window
) -> Tensor | None:
    """key_ranges within a bottom-right band. torch.jit.trace records their sizes; the band's offset would be a constant
    of the trace, and wrong for other lengths."""
    left, right, _ = _band(is_causal, window, 0)
    if left == right == UNBOUNDED:
        return key_ranges
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    level = torch.arange(seqlen_q, device=query.device) + (seqlen_k - seqlen_q)
    begin, end = (level - left).unsqueeze(-1), (level + right + 1).unsqueeze(-1)
    if key_ranges is not None:
        begin, end = begin.maximum(key_ranges[..., 0]), end.minimum(key_ranges[..., 1])
    return torch.stack([begin, end], -1)
