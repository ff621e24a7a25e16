"""Modules: `MultiheadAttention` in place of torch's, and `CrossAttention` between sequences of different widths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.init import constant_, xavier_normal_, xavier_uniform_

from . import api, autograd, rng
from .arguments import is_causal_bias, mask_type_error, may_look, number, show, type_error
from .checks import check_mask_dtype
from .mask import Mask, both, span
from .packed import is_jagged
from .params import UNBOUNDED, Band, within_ranges
from .problem import Problem

Window = tuple[int | None, int | None] | None

_LEAF = f"torch.nn ({__name__})"
"""By the beginning of an instance's `__module__`, torch.fx knows a module that it calls and doesn't trace through."""


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` on attnkern's kernels: same constructor, forward, parameters and state_dict.

    What is different:

    - need_weights=True costs the weights that are returned and no more: they come tile by tile from the forward's
      log-sum-exp, averaged over the heads as they come. With dropout they are the dropped ones, as in torch.
    - A query with every key masked gives 0 (before out_proj), and weights of 0; torch gives NaN with need_weights.
    - is_causal=True needs no attn_mask. Given one, torch's rule holds: it is the hint that the mask is causal.
    - Two masks of different types (one bool, one float) go together without a warning.
    - `window` and `sinks`.
    - attn_mask may be an `attnkern.Mask` (L, S), in which attended keys count, as in functions. A key must pass it,
      is_causal, window and key_padding_mask.
    - With batch_first, query, key and value may be nested tensors of the jagged layout, without masks and weights; so
      torch.nn.TransformerEncoder takes them in training too.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            torch. dropout acts in training mode only.
        window: (left, right), each an int >= 0 or None: query i sees keys i - left to i + right only.
        sinks: whether there is a parameter `sinks` (num_heads,), 0 at first: a learned score of each head that stands
            among those of every row and has no value. A row's weights then sum to less than 1.

    forward(query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True,
    is_causal=False) takes query (L, N, embed_dim), key (S, N, kdim), value (S, N, vdim); (N, L, ...) with batch_first;
    or all without N. key_padding_mask (N, S) and attn_mask (L, S) or (N * num_heads, L, S) are torch's: in a bool mask
    True is NOT attended to (the inverse of `attnkern.attention`), a floating-point one is added to the scores. Padding
    on one side becomes a range of keys where that can be seen for nothing: on the CPU, outside torch.compile.

    It returns (output, weights): output as query, weights None, or (N, L, S), or (N, num_heads, L, S) with
    average_attn_weights=False. Both are differentiable.

    Raises what torch raises: AssertionError for ranks, widths, a key_padding_mask that does not fit and masks of
    integers; RuntimeError for an attn_mask or batch sizes that do not fit; ValueError for sizes that are not positive,
    a dropout that is no probability, or a negative window; TypeError for a dropout that is no number, another window
    than (left, right), and sinks that aren't bool.

    In nn.TransformerEncoderLayer, evaluation without gradients uses this module as well, not torch's own fast path.

    Source: A. Vaswani et al., "Attention is all you need", NeurIPS 2017.
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        window: Window = None,
        sinks: bool = False,
    ) -> None:
        _check_dropout(dropout)
        _check_band(window, "top_left")
        _check_sinks(sinks)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.window = window
        self.register_parameter("sinks", _sinks(num_heads, device, dtype) if sinks else None)
        self.__module__ = _LEAF
        # torch's transformer layers ask it before they take their fast path, which goes past this module's forward.
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            constant_(self.in_proj_bias, 0.0)
            constant_(self.out_proj.bias, 0.0)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                xavier_normal_(bias)
        if (sinks := getattr(self, "sinks", None)) is not None:  # torch's constructor comes here before there are any
            constant_(sinks, 0.0)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if any(is_jagged(x) for x in (query, key, value)):
            return self._attend_jagged(query, key, value, key_padding_mask, need_weights, attn_mask, is_causal), None
        self._check(query, key, value, key_padding_mask, attn_mask)
        batched = query.dim() == 3
        # (sequence, batch) dimensions; a missing batch is one of size 1.
        sequence, batch = (1, 0) if self.batch_first and batched else (0, 1)
        q, k, v = (x if batched else x.unsqueeze(batch) for x in self._project(query, key, value))
        seqlen_q, seqlen_k, batch_size = q.shape[sequence], k.shape[sequence], q.shape[batch]
        mask: Any = None  # a tensor or a Mask of bits
        ranges, window = None, self.window
        if isinstance(attn_mask, Mask):
            mask, ranges = _of_mask(attn_mask)
        elif attn_mask is not None and (not is_causal or need_weights or key_padding_mask is not None):
            # torch's rule for the hint: it stands for the mask only where nothing else is asked for.
            mask, is_causal = _attended("attn_mask", attn_mask, q.dtype), False
            if mask.dim() == 3:
                mask = mask.unflatten(0, (batch_size, self.num_heads))
        if key_padding_mask is not None:
            real = _attended("key_padding_mask", key_padding_mask, q.dtype).view(batch_size, 1, 1, seqlen_k)
            mask, ranges = _with_padding(mask, ranges, real)
        if appended := (self.bias_k is not None) + self.add_zero_attn:
            k, v = self._append(k, v, sequence, batch)
            # Every query sees what is appended: no band has such a shape.
            band = Band(*(UNBOUNDED if x is None else x for x in window or (None, None)))
            band = band._replace(right=0) if is_causal else band
            mask = both(_dense(mask), band.mask(seqlen_q, seqlen_k, q.device))
            if ranges is not None:
                mask, ranges = both(mask, within_ranges(ranges, slice(0, seqlen_k))), None
            mask = None if mask is None else F.pad(mask, (0, appended), value=mask.dtype == torch.bool)
            window, is_causal = None, False

        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).permute(batch, 2, sequence, 3) for x in (q, k, v))
        dropout_p = self.dropout if self.training else 0
        out, weights = _attend(
            *(q, k, v, mask, ranges, self.sinks, dropout_p, is_causal, window, need_weights, average_attn_weights)
        )
        out = out.permute(2, 0, 1, 3) if batch == 1 else out.permute(0, 2, 1, 3)
        out = self.out_proj(out.flatten(-2))
        if not batched:
            out = out.squeeze(batch)
            weights = None if weights is None else weights.squeeze(0)
        return out, weights

    def _attend_jagged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | Mask | None,
        is_causal: bool,
    ) -> Tensor:
        """The output for jagged nested tensors (N, L, embed_dim), (N, S, kdim) and (N, S, vdim) of N sequences."""
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not is_jagged(x) or x.dim() != 3:
                raise AssertionError(
                    f"attnkern: {name} must be a jagged nested tensor (N, length, width) if one of query, key and "
                    f"value is, got layout {x.layout} and {x.dim()} dimensions"
                )
        for name, unwanted in (
            ("key_padding_mask", key_padding_mask is not None),
            ("attn_mask", attn_mask is not None),
            ("need_weights", need_weights),
            ("add_bias_kv", self.bias_k is not None),
            ("add_zero_attn", self.add_zero_attn),
            ("batch_first=False", not self.batch_first),
        ):
            if unwanted:
                raise AssertionError(f"attnkern: jagged nested tensors don't go with {name}")
        q, k, v = (
            x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in self._project(query, key, value)
        )
        dropout_p, sinks = self.dropout if self.training else 0, _wide(self.sinks)
        out = api.attention(q, k, v, None, dropout_p, is_causal, window=self.window, sinks=sinks)
        assert isinstance(out, Tensor)
        return self.out_proj(out.transpose(1, 2).flatten(-2))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The projected query, key and value, with as few matrix products as there are different inputs."""
        weight, bias, width = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if weight is not None and key is value:
            if query is key:
                return F.linear(query, weight, bias).chunk(3, -1)
            weights = weight.split([width, 2 * width])
            biases = (None, None) if bias is None else bias.split([width, 2 * width])
            return F.linear(query, weights[0], biases[0]), *F.linear(key, weights[1], biases[1]).chunk(2, -1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _append(self, k: Tensor, v: Tensor, sequence: int, batch: int) -> tuple[Tensor, Tensor]:
        """Behind the keys and values bias_k and bias_v, then zeros: those that the module has."""
        sizes = [1, 1, self.embed_dim]
        sizes[batch] = k.shape[batch]
        ks, vs = [k], [v]
        if self.bias_k is not None and self.bias_v is not None:
            ks.append(self.bias_k.expand(sizes))
            vs.append(self.bias_v.expand(sizes))
        if self.add_zero_attn:
            ks.append(k.new_zeros(sizes))
            vs.append(v.new_zeros(sizes))
        return torch.cat(ks, sequence), torch.cat(vs, sequence)

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | Mask | None,
    ) -> None:
        """The types of torch's errors, one sentence each."""
        padding = (
            "key_padding_mask (and nn.TransformerEncoder made with enable_nested_tensor=False, or with "
            "use_nested_tensor set to False since)"
        )
        for name, x in (("query", query), ("key", key), ("value", value)):
            _check_tensor(name, x, padding, AssertionError)
        rank = query.dim()
        if rank not in (2, 3):
            raise AssertionError(f"attnkern: query must have 2 (unbatched) or 3 dimensions, got {show(query.shape)}")
        for name, x in (("key", key), ("value", value)):
            if x.dim() != rank:
                raise AssertionError(f"attnkern: {name} must have query's {rank} dimensions, got {show(x.shape)}")
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(
                f"attnkern: query's last size must be embed_dim={self.embed_dim}, got {show(query.shape)}"
            )
        if key.shape[:-1] != value.shape[:-1]:
            raise AssertionError(
                f"attnkern: value must have key's sequence and batch sizes, {show(key.shape)}, got {show(value.shape)}"
            )
        for name, x, option, width in (("key", key, "kdim", self.kdim), ("value", value, "vdim", self.vdim)):
            if x.shape[-1] != width:
                raise AssertionError(f"attnkern: {name}'s last size must be {option}={width}, got {show(x.shape)}")
        batch, sequence = (0, 1) if self.batch_first else (1, 0)
        n, seqlen_q, seqlen_k = (
            (1, query.shape[0], key.shape[0])
            if rank == 2
            else (query.shape[batch], query.shape[sequence], key.shape[sequence])
        )
        if rank == 3 and key.shape[batch] != n:
            raise RuntimeError(
                f"attnkern: key's batch size (dimension {batch} with batch_first={self.batch_first}) must be query's "
                f"{n}, got {show(key.shape)}"
            )
        masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        for name, mask in masks.items():
            if isinstance(mask, Mask) and name == "attn_mask":
                _check_sizes(mask, (n, self.num_heads, seqlen_q, seqlen_k))
            elif mask is not None and (not isinstance(mask, Tensor) or is_causal_bias(mask)):
                raise _no_mask(name, mask)
            elif mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise AssertionError(
                    f"attnkern: {name} must be bool (True = not attended to) or floating point (added to the scores), "
                    f"got {show(mask.dtype)}"
                )
        if key_padding_mask is not None:
            shape = (seqlen_k,) if rank == 2 else (n, seqlen_k)
            if tuple(key_padding_mask.shape) != shape:
                raise AssertionError(
                    f"attnkern: key_padding_mask must have key's shape {shape}, got {show(key_padding_mask.shape)}"
                )
        if attn_mask is not None and not isinstance(attn_mask, Mask):
            flat, heads = (seqlen_q, seqlen_k), (n * self.num_heads, seqlen_q, seqlen_k)
            if tuple(attn_mask.shape) not in (flat, heads):
                # torch tells a wrong rank (and any shape without a batch in 3-D) from a wrong size.
                error = RuntimeError if attn_mask.dim() == 2 or (attn_mask.dim() == rank == 3) else AssertionError
                raise error(f"attnkern: attn_mask must have shape {flat} or {heads}, got {show(attn_mask.shape)}")


class CrossAttention(nn.Module):
    """Attention of one sequence to another of a different width, or to itself, with every size free.

        q = x W_q      k = context W_k      v = context W_v      output = softmax(q k^T / sqrt(k_dim / heads)) v W_o

    Args:
        query_dim: width of x. context_dim: width of context; None: query_dim.
        num_heads: divides k_dim and v_dim.
        k_dim: width of all heads' queries and keys together; None: query_dim.
        v_dim: width of all heads' values together; None: k_dim.
        out_dim: width of the output; None: query_dim.
        dropout: probability with which a weight is dropped in training mode.
        bias: whether the four projections have one.
        window, alignment: as in `attnkern.attention`: position i of x sees positions i - left to i + right of context.
        sinks: as in `MultiheadAttention`.

    Raises ValueError for sizes that are not positive, heads that do not divide k_dim or v_dim, a dropout that is no
    probability, a negative window or an unknown alignment; TypeError for a dropout that is no number, another window
    than (left, right), and sinks that aren't bool.
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        query_dim: int,
        context_dim: int | None = None,
        num_heads: int = 1,
        *,
        k_dim: int | None = None,
        v_dim: int | None = None,
        out_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        window: Window = None,
        alignment: str = "top_left",
        sinks: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_dropout(dropout)
        _check_band(window, alignment)
        _check_sinks(sinks)
        super().__init__()
        self.__module__ = _LEAF
        context_dim = query_dim if context_dim is None else context_dim
        k_dim = query_dim if k_dim is None else k_dim
        v_dim = k_dim if v_dim is None else v_dim
        out_dim = query_dim if out_dim is None else out_dim
        sizes = {"query_dim": query_dim, "context_dim": context_dim, "num_heads": num_heads}
        sizes |= {"k_dim": k_dim, "v_dim": v_dim, "out_dim": out_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"attnkern: {name} must be at least 1, got {size}")
        for name, size in (("k_dim", k_dim), ("v_dim", v_dim)):
            if size % num_heads:
                raise ValueError(f"attnkern: {name} must be a multiple of num_heads={num_heads}, got {size}")
        self.num_heads, self.dropout, self.window, self.alignment = num_heads, dropout, window, alignment
        # Not asked of the projections, in whose place there may be other modules.
        self.query_dim, self.context_dim = query_dim, context_dim
        self.q_proj = nn.Linear(query_dim, k_dim, bias, device, dtype)
        self.k_proj = nn.Linear(context_dim, k_dim, bias, device, dtype)
        self.v_proj = nn.Linear(context_dim, v_dim, bias, device, dtype)
        self.out_proj = nn.Linear(v_dim, out_dim, bias, device, dtype)
        self.register_parameter("sinks", _sinks(num_heads, device, dtype) if sinks else None)

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}, alignment={self.alignment!r}"
        sinks = "" if self.sinks is None else ", sinks=True"
        return f"num_heads={self.num_heads}, dropout={self.dropout}{window}{sinks}"

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        attn_mask: Tensor | Mask | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What the positions of x (N, L, query_dim) gather from context (N, S, context_dim); None: from x itself.

        Args:
            x, context: as above, or both without N.
            padding_mask: (N, S), bool or 0/1 in an integer type: True or 1 is a real position, the others are not seen.
            attn_mask: (L, S), (N, L, S) or (N, num_heads, L, S), likewise: 1 where i sees j, as the edges of a graph.
                Or an `attnkern.Mask`.
            is_causal: position i sees positions 0..i of context (counted as `alignment` says) only.
            need_weights: also return the weights, (N, L, S), or (N, num_heads, L, S) with average_attn_weights=False.

        Returns:
            (N, L, out_dim), or with need_weights the pair. A position that sees nothing gathers 0.

        Raises:
            RuntimeError: ranks, widths, batch sizes or masks that do not fit. TypeError: a floating-point mask, x or
            context that is no tensor.
        """
        context = x if context is None else context
        for name, tensor in (("x", x), ("context", context)):
            _check_tensor(name, tensor, "padding_mask", RuntimeError, jagged=True)
        rank = x.dim()
        if rank not in (2, 3):
            raise RuntimeError(f"attnkern: x must have 2 (unbatched) or 3 dimensions, got {show(x.shape)}")
        if context.dim() != rank or context.shape[:-2] != x.shape[:-2]:
            raise RuntimeError(
                f"attnkern: context must have x's rank and batch size, {show(x.shape)}, got {show(context.shape)}"
            )
        for name, tensor, width in (("x", x, self.query_dim), ("context", context, self.context_dim)):
            if tensor.shape[-1] != width:
                raise RuntimeError(f"attnkern: {name}'s last size must be {width}, got {show(tensor.shape)}")
        lead, seqlen_q, seqlen_k = tuple(x.shape[:-2]), x.shape[-2], context.shape[-2]
        mask: Any = None  # a tensor or a Mask of bits
        ranges, pairs = None, (seqlen_q, seqlen_k)
        if isinstance(attn_mask, Mask):
            _check_sizes(attn_mask, (*(lead or (1,)), self.num_heads, *pairs))
            mask, ranges = _of_mask(attn_mask)
            if not lead:
                ranges = None if ranges is None else ranges.squeeze(0)
        else:
            mask = _real("attn_mask", attn_mask, [pairs, (*lead, *pairs), (*lead, self.num_heads, *pairs)])
            if mask is not None and rank == 3 and mask.dim() == 3:
                mask = mask[:, None]
        real = _real("padding_mask", padding_mask, [(*lead, seqlen_k)])
        if real is not None:
            mask, ranges = _with_padding(mask, ranges, real[..., None, None, :])
        q, k, v = (
            projection(tensor).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
            for projection, tensor in ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context))
        )
        out, weights = _attend(
            *(q, k, v, mask, ranges, self.sinks, self.dropout if self.training else 0, is_causal),
            *(self.window, need_weights, average_attn_weights, self.alignment),
        )
        out = self.out_proj(out.transpose(-2, -3).flatten(-2))
        return out if weights is None else (out, weights)


def _check_tensor(name: str, x: Any, padding: str, error: type[Exception], jagged: bool = False) -> None:
    """Raises where x is no tensor, or a nested one. One of the jagged layout is right where `jagged` says so."""
    if not isinstance(x, Tensor):
        raise type_error(name, "Tensor", x)
    if x.is_nested and not (jagged and is_jagged(x)):
        raise error(
            f"attnkern: {name} must not be a nested tensor but of the jagged layout (layout=torch.jagged), or padded, "
            f"with {padding}"
        )


def _check_band(window: Any, alignment: Any) -> None:
    """Raises in the constructor what a call with them would raise."""
    x = torch.empty(1, 1, device="meta")
    Problem.from_sdpa(x, x, x, window=window, alignment=alignment)


def _check_dropout(dropout: Any) -> None:
    """As torch.nn.Dropout: torch's own MultiheadAttention takes any number, and fails in training."""
    if not 0 <= number("dropout", dropout) <= 1:
        raise ValueError(f"attnkern: dropout must be between 0 and 1, got {dropout}")


def _check_sinks(sinks: Any) -> None:
    if not isinstance(sinks, bool):
        raise type_error("sinks", "bool", sinks)


def _sinks(num_heads: int, device: Any, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))


def _wide(sinks: Tensor | None) -> Tensor | None:
    """Sinks as any query takes them: under autocast it may be of another 16-bit dtype than the module."""
    return None if sinks is None else sinks.to(torch.promote_types(sinks.dtype, torch.float32))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Mask | None,
    ranges: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    window: Window,
    need_weights: bool,
    average: bool,
    alignment: str = "top_left",
) -> tuple[Tensor, Tensor | None]:
    """The attention of q (..., H, L, E), and its weights (..., H, L, S) or, averaged, (..., L, S)."""
    sinks = _wide(sinks)
    options: dict[str, Any] = {"window": window, "alignment": alignment, "key_ranges": ranges, "sinks": sinks}
    if not need_weights:
        out = api.attention(q, k, v, mask, dropout_p, is_causal, **options)
        assert isinstance(out, Tensor)
        return out, None
    problem = Problem.from_sdpa(q, k, v, mask, dropout_p, is_causal, **options)
    seed = rng.seed_for(problem.q) if problem.params.dropout_p > 0 else None
    out, lse = autograd.attention(problem, None, True, seed)
    lse = lse.reshape(problem.q.shape[:-1])
    weights = autograd.weights(problem, lse, seed, None, average)
    return out, weights if q.dim() == 4 else weights.squeeze(0)


def _of_mask(mask: Mask) -> tuple[Mask | None, Tensor | None]:
    """A Mask of bits as it is, or key ranges."""
    return (mask, None) if mask.ranges is None else (None, mask.ranges)


def _dense(mask: Tensor | Mask | None) -> Tensor | None:
    """A Mask as a bool mask, True = attended."""
    return mask.to_dense() if isinstance(mask, Mask) else mask


def _check_sizes(mask: Mask, sizes: tuple[int, ...]) -> None:
    """`sizes` is (N, num_heads, L, S)."""
    if mask.shape[2:] != sizes[2:] or any(n not in (1, m) for n, m in zip(mask.shape[:2], sizes, strict=False)):
        raise RuntimeError(f"attnkern: attn_mask must be a Mask for {sizes} scores, got one for {mask.shape}")


def _with_padding(
    mask: Tensor | Mask | None, ranges: Tensor | None, real: Tensor
) -> tuple[Tensor | Mask | None, Tensor | None]:
    """`mask` and `ranges` together with a mask of keys (..., 1, 1, S), which is a range where they stand together."""
    if real.dtype == torch.bool and real.is_cpu and may_look(real):
        first, last = span(real)
        if torch.equal(last - first, real.sum(-1)):
            first, last = (x.to(torch.int32).unsqueeze(-1) for x in (first, last))
            if ranges is not None:
                begin, end = ranges.unbind(-1)
                first, last = begin.maximum(first), end.minimum(last)
            return mask, torch.stack([first, last], -1)
    return both(_dense(mask), real), ranges


def _attended(name: str, mask: Tensor, of_query: torch.dtype) -> Tensor:
    """A mask of torch's modules, True = hidden, as one of functions, True = attended; one that is added stays.

    But for 16 bits of another dtype than query's, which torch takes beside a bool mask: float32 holds them all."""
    if mask.dtype == torch.bool:
        return ~mask
    if mask.dtype in (torch.float16, torch.bfloat16) and mask.dtype != of_query:
        return mask.float()
    check_mask_dtype(name, mask.dtype, of_query)
    return mask


def _real(name: str, mask: Tensor | None, shapes: list[tuple[int, ...]]) -> Tensor | None:
    """A mask of bool or integers as bool, of one of these shapes."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or is_causal_bias(mask):
        raise _no_mask(name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"attnkern: {name} must be bool or an integer type (1 = attended to), got {show(mask.dtype)}")
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(str(s) for s in dict.fromkeys(shapes))
        raise RuntimeError(f"attnkern: {name} must have shape {wanted}, got {show(mask.shape)}")
    return mask if mask.dtype == torch.bool else mask != 0


def _no_mask(name: str, x: object) -> TypeError:
    if is_causal_bias(x):  # a Tensor by its class, without elements
        return TypeError(
            f"attnkern: argument '{name}' must be Tensor or None, not CausalBias (masks.causal makes a Mask)"
        )
    return mask_type_error(x) if name == "attn_mask" else type_error(name, "Tensor or None (attn_mask takes a Mask)", x)
