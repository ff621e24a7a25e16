"""Attention layers of transformers' models that never call its AttentionInterface: BLOOM, MPT, Falcon and, before
transformers 5.24, GPT-J.

Their layers compute attention in their own `forward`. `take_over` puts one before it that computes projections,
positions and cache as theirs and leaves the rest to `attention_forward`. It runs in models of attnkern's name. Layers
of BLOOM and MPT don't know the name: there it runs where the mask is one that attnkern's mask function has made, which
transformers asks for such models alone; any other mask goes to their own.

ALiBi is what the model makes of it: one row of numbers per head, slope * key, (B|1, H, 1, S). The slope * query that
the distance lacks is the same for all keys of a row, which softmax doesn't see; so is what padding on the left shifts
positions by. As a mask that all queries share, the row is added as it is: rounded as the model rounds it (Falcon to
bfloat16), and counting no padding where that has holes, which a table by distance could do neither of.

Sources: O. Press et al., "Train short, test long" (ALiBi), 2022; BigScience Workshop, "BLOOM", 2022; MosaicML,
"Introducing MPT-7B", 2023; E. Almazrouei et al., "The Falcon series of open language models", 2023; J. Su et al.,
"RoFormer" (rotary positions), 2021; B. Wang, A. Komatsuzaki, "GPT-J-6B", 2021.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends.failed import warn_once
from .transformers import NAME, CompactMask, attention_forward, no_weights


def _bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    query, key, value = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, -1)).unbind(-2)
    bias = alibi.unflatten(0, (-1, self.num_heads))
    p = self.attention_dropout.p
    out = _attend(self, query, key, value, attention_mask, layer_past, p, None, bias, output_attentions)
    return residual + F.dropout(self.dense(out), self.hidden_dropout, self.training), None


def _mpt(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    cache = kwargs.get("past_key_values", cache)  # its name before 5.24
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
    query, key, value = qkv.unflatten(-1, (3, self.n_heads, -1)).unbind(-3)
    bias = None
    if position_bias is not None:  # (H, 1, max_seq_len), of which the last key has the last number
        most, seqlen_k = position_bias.shape[-1], attention_mask.shape[-1]
        if seqlen_k > most:
            raise RuntimeError(f"attnkern: MptModel has positions for {most} keys (max_seq_len), got {seqlen_k} keys")
        bias = position_bias[None, :, :, most - seqlen_k :]
    out = _attend(self, query, key, value, attention_mask, cache, self.attn_dropout_p, self.softmax_scale, bias)
    return self.out_proj(out), None


def _falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    qkv = self.query_key_value(hidden_states).unflatten(-1, (-1, self.head_dim))
    if self.new_decoder_architecture:  # groups of heads, each with its key and value behind it
        qkv = qkv.unflatten(-2, (self.num_kv_heads, -1))
        query, key, value = qkv[..., :-2, :].flatten(-3, -2), qkv[..., -2, :], qkv[..., -1, :]
    elif self.multi_query:
        query, key, value = qkv[..., :-2, :], qkv[..., -2:-1, :], qkv[..., -1:, :]
    else:
        query, key, value = qkv.unflatten(-2, (-1, 3)).unbind(-2)
    bias, p = None, 0.0
    if alibi is None:  # and there is no dropout of weights, in theirs
        assert position_embeddings is not None
        cos, sin = (x.unsqueeze(2).chunk(2, -1)[0] for x in position_embeddings)
        query, key = (_turn(*x.chunk(2, -1), cos=cos, sin=sin, dim=-2) for x in (query, key))
    else:
        p = self.attention_dropout.p
    if alibi is not None and attention_mask.dim() == 3:  # a dense one holds ALiBi already
        # Falcon scales the bias along with the scores.
        bias = (alibi.float() if alibi.dtype != torch.float64 else alibi).unflatten(0, (-1, self.num_heads))
        bias = bias * self.inv_norm_factor
        attention_mask = _of_4_dimensions(attention_mask, query.shape[1])
    out = _attend(self, query, key, value, attention_mask, layer_past, p, None, bias, output_attentions)
    return self.dense(out), None


def _gptj(
    self: Any,
    hidden_states: Tensor,
    layer_past: Any = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    heads = self.num_attention_heads
    query, key, value = (f(hidden_states).unflatten(-1, (heads, -1)) for f in (self.q_proj, self.k_proj, self.v_proj))
    positions = self.embed_positions.to(hidden_states.device)[position_ids].to(query.dtype)
    sin, cos = positions.unsqueeze(2).chunk(2, -1)
    turned = []
    for x in (query, key):
        first, rest = (x, None) if self.rotary_dim is None else (x[..., : self.rotary_dim], x[..., self.rotary_dim :])
        first = _turn(first[..., ::2], first[..., 1::2], cos=cos, sin=sin, dim=-1)
        turned.append(first if rest is None else torch.cat([first, rest], -1))
    p = self.attn_dropout.p
    out = _attend(self, turned[0], turned[1], value, attention_mask, layer_past, p, None, None, output_attentions)
    return self.resid_dropout(self.out_proj(out)), None


def _turn(x: Tensor, y: Tensor, *, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    """Rotary positions: (x, y), each (B, L, H, E / 2), turned by their angles. dim -1: x and y alternate; -2: x, then
    y."""
    return torch.stack([x * cos - y * sin, y * cos + x * sin], dim).flatten(-2)


def _attend(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    cache: Any,
    dropout_p: float,
    scale: float | None,
    bias: Tensor | None,
    output_attentions: bool = False,
) -> Tensor:
    """(B, L, H * E) of query (B, L, H, E), key and value (B, L, Hk, E), which join the cache. scale None: E ** -0.5."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if cache is not None:
        key, value = cache.update(key, value, layer.layer_idx)
    out, _ = attention_forward(
        layer,
        query,
        key,
        value,
        mask,
        dropout_p if layer.training else 0.0,
        scale,
        position_bias=bias,
        output_attentions=output_attentions,
    )
    return out.flatten(2)


def _of_4_dimensions(mask: Tensor, seqlen_q: int) -> Tensor:
    """A mask as `attention_forward` takes it, of one of three dimensions that `attention_mask` has made for Falcon."""
    if not isinstance(mask, CompactMask):
        return mask.unsqueeze(1 if mask.shape[1] == seqlen_q else -1)
    batch_size, seqlen_q, seqlen_k = mask.shape
    if mask.is_written_to:
        return mask.dense().unsqueeze(1)
    shape = batch_size, 1, seqlen_q, seqlen_k
    return CompactMask.of(shape, mask.device, mask.content, lambda: mask.dense().unsqueeze(1))


class Layer(NamedTuple):
    """A layer of transformers and what takes its place."""

    module: str
    name: str
    reads: str
    """Names in their code that ours relies on: without one of them it is another layer than we know."""
    forward: Callable[..., tuple[Tensor, None]]


LAYERS = (
    Layer(
        "bloom",
        "Bloom",
        "query_key_value num_heads layer_idx inv_norm_factor attention_dropout hidden_dropout dense baddbmm "
        "pretraining_tp slow_but_exact",
        _bloom,
    ),
    Layer("mpt", "Mpt", "Wqkv clip_qkv n_heads layer_idx softmax_scale attn_dropout_p out_proj", _mpt),
    Layer(
        "falcon",
        "Falcon",
        "query_key_value new_decoder_architecture multi_query num_heads num_kv_heads head_dim layer_idx "
        "apply_rotary_pos_emb inv_norm_factor attention_dropout dense",
        _falcon,
    ),
    Layer(
        "gptj",
        "GPTJ",
        "q_proj k_proj v_proj num_attention_heads embed_positions layer_idx rotary_dim apply_rotary_pos_emb "
        "scale_attn attn_dropout out_proj resid_dropout",
        _gptj,
    ),
)

_TAKEN: dict[type, str] = {}
"""The names of LAYERS that are taken over, by the class of the model's configuration."""


def taken_over(config: Any) -> str | None:
    """The name in LAYERS of a configuration's model, where `take_over` has changed its layers."""
    return _TAKEN.get(type(config))


def take_over() -> None:
    """Puts `Layer.forward` before that of transformers' layers, for models with attnkern's name.

    A layer that isn't as expected stays as it is. May be repeated.
    """
    for layer in LAYERS:
        try:
            module = importlib.import_module(f"transformers.models.{layer.module}.modeling_{layer.module}")
            cls, config = getattr(module, f"{layer.name}Attention"), getattr(module, f"{layer.name}Config")
            model = getattr(module, f"{layer.name}Model")
        except (ImportError, AttributeError):
            continue
        if config in _TAKEN or not _is_as_expected(cls, layer):
            continue
        cls.forward = _either(cls.forward, layer.forward)
        if layer.name == "Mpt":
            model.forward = _telling(model.forward)
        classes = getattr(module, f"{layer.name.upper()}_ATTENTION_CLASSES", None)
        if classes is not None:
            classes[NAME] = cls
        _TAKEN[config] = layer.name


def _is_as_expected(theirs: type, layer: Layer) -> bool:
    parts = [inspect.unwrap(getattr(theirs, name)) for name in ("__init__", "forward")]
    names = {name for part in parts if inspect.isfunction(part) for name in part.__code__.co_names}
    parameters = [list(inspect.signature(function).parameters) for function in (parts[1], layer.forward)]
    named_now = ["cache" if name == "past_key_values" else name for name in parameters[0]]
    return named_now == parameters[1] and names.issuperset(layer.reads.split())


def _either(theirs: Callable, ours: Callable) -> Callable:
    @functools.wraps(theirs)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        config = getattr(self, "config", None)
        if config is None:  # BLOOM and MPT, which never have int32 of anyone else
            is_ours = isinstance(mask, Tensor) and mask.dtype == torch.int32
        else:
            is_ours = config._attn_implementation == NAME
        return (ours if is_ours or isinstance(mask, CompactMask) else theirs)(self, *args, **kwargs)

    return forward


def _telling(theirs: Callable) -> Callable:
    """Of MPT, whose layers know neither the name nor what is asked for."""

    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation == NAME:
            wanted = kwargs.get("output_attentions")
            if self.config.output_attentions if wanted is None else wanted:
                raise no_weights()
            mask = kwargs.get("attention_mask")
            if mask is not None and mask.dim() == 4 and not torch.compiler.is_compiling():
                warn_once(
                    "MptModel attention_mask",
                    "attnkern: MptModel takes an attention_mask of 4 dimensions for keys to leave out, and computes "
                    "attention in its own code then: the kernels are not used",
                )
        return theirs(self, *args, **kwargs)

    return forward


def needs_eager_mask(config: Any, q_length: int | None, kv_length: int, q_offset: Any) -> bool:
    """Whether a layer that is taken over can't do what is asked for, so that the model's own code does, with eager's
    mask."""
    name = taken_over(config)
    if name == "Mpt" and (
        torch.compiler.is_compiling()
        or isinstance(q_offset, Tensor)
        or (q_length is not None and q_offset is not None and q_offset + q_length < kv_length)
    ):
        reason = "makes its mask bool: no ranges of keys go into a compiled graph or along with a static cache"
    elif name == "Bloom" and config.pretraining_tp > 1 and config.slow_but_exact:
        reason = "cuts its output projection into slices (slow_but_exact)"
    else:
        return False
    if not torch.compiler.is_compiling():
        warn_once(
            f"{name}Model {reason}",
            f"attnkern: {name}Model {reason}, and its own code computes attention: the kernels are not used",
        )
    return True
