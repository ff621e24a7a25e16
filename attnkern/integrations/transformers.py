"""`attn_implementation="attnkern"` for the models of Hugging Face transformers.

    import attnkern.integrations.transformers
    attnkern.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnkern")

transformers makes a mask once per forward pass (AttentionMaskInterface) and calls attention in every layer
(AttentionInterface). Between the two it knows dense masks only. Ours is a `CompactMask`: a band, or a range of keys for
each query, for causal, sliding and chunked patterns, padding, packed sequences and static caches. Every layer's kernel
skips what it excludes, and it turns into the dense mask for any other code that looks inside. Compiled graphs hold the
ranges as a tensor. Key and value heads stay as few as the model has, with masks as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..api import attention
from ..arguments import has_values
from ..backends.failed import FallbackWarning
from ..mask import both, span
from ..packed import packed_ranges

NAME = "attnkern"
MINIMUM = (5, 0)


def register() -> None:
    """Make `attn_implementation="attnkern"` known to transformers (>= 5.0). May be repeated.

    It changes nothing for models of other implementations. (BLOOM, MPT, Falcon and GPT-J compute attention in their
    own code; their layers look at the mask now, whether attnkern made it.)

    Raises:
        ImportError: transformers is not installed, or older.
    """
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or tuple(int(x) for x in re.findall(r"\d+", version)[:2]) < MINIMUM:
        found = "which is not installed" if version is None else f"found {version}"
        needed = ".".join(map(str, MINIMUM))
        raise ImportError(f"attnkern: register() needs transformers >= {needed}, {found} (pip install -U transformers)")
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    from . import transformers_layers, transformers_serving

    transformers_layers.take_over()
    transformers_serving.take_over()


class CompactMask(Tensor):
    """A bool mask (B, 1, L, S) in few numbers: a `CausalTail`, or `RowRanges`.

    Shape, dtype and device are that mask's; the memory is one element's and the numbers'. What leaves every element as
    it is (detach, clone, a slice of all, another device) gives a CompactMask. Any other use makes the dense mask, once,
    and a FallbackWarning where that is large.
    """

    content: CausalTail | RowRanges
    _make: Callable[[], Any]
    _made: list[tuple[Tensor, int]]  # the dense mask and its version, once it is made; views share the list

    @staticmethod
    def of(
        shape: tuple[int, ...], device: Any, content: CausalTail | RowRanges, make: Callable[[], Any]
    ) -> CompactMask:
        """`make` gives the dense mask, a new one each time, if anyone asks for it."""
        mask = torch.ones((), dtype=torch.bool, device=device).expand(shape).as_subclass(CompactMask)
        mask.content, mask._make, mask._made = content, make, []
        return mask

    def dense(self) -> Tensor:
        """The mask as a plain tensor."""
        if not self._made:
            if self.shape[2] > _LONG and not torch.compiler.is_compiling():
                _tell_dense()
            with torch.inference_mode(False):  # its tensors have no version
                dense = self._make()
            self._made.append((dense, dense._version))
        return self._made[0][0]

    @property
    def is_written_to(self) -> bool:
        """Whether someone has changed the dense mask in place: `content` is no longer all then."""
        return any(dense._version != version for dense, version in self._made)

    def _moved(self, device: torch.device) -> CompactMask:
        """A copy on a device, which has a dense mask of its own."""
        content, make = self.content, self._make
        if device == self.device:
            return CompactMask.of(self.shape, device, content, make)
        if isinstance(content, RowRanges):
            real = None if content.real is None else content.real.to(device)
            content = RowRanges(content.ranges.to(device), real)
        return CompactMask.of(self.shape, device, content, lambda: make().to(device))

    def _view(self) -> CompactMask:
        """All of this mask, in the same memory."""
        view = CompactMask.of(self.shape, self.device, self.content, self._make)
        view._made = self._made
        return view

    def _plain(self) -> Tensor:
        """As `RowRanges.packed`."""
        batch_size, _, q_length, _ = self.shape
        content = self.content
        if isinstance(content, CausalTail):
            end = torch.arange(content.visible - q_length, content.visible, device=self.device) + 1
            begin = torch.zeros_like(end) if content.window is None else (end - content.window).clamp(min=0)
            content = RowRanges(torch.stack([begin, end], -1).to(torch.int32)[None, None, :, None], None)
        return content.packed(batch_size)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.contiguous and not args[0].is_written_to:
            # generate() asks for it, of masks of static caches, before it compiles.
            return args[0]._plain()
        with torch._C.DisableTorchFunctionSubclass():
            # Dynamo guards and imitates what goes into a graph as it lies in memory, with its own few elements.
            at_work = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
            if func in _OUTSIDE or (at_work and func in _IN_MEMORY):
                return func(*args, **kwargs)
            if at_work or not torch.compiler.is_compiling():
                with contextlib.suppress(_ElementsCount), _ElementsStay():
                    result = func(*args, **kwargs)
                    if isinstance(result, (CompactMask, *_FACTS)):
                        return result
            args, kwargs = pytree.tree_map_only(CompactMask, CompactMask.dense, (args, kwargs))
            return func(*args, **kwargs)


_OUTSIDE = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_nested", "is_sparse")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.get_device}
"""What is asked of a CompactMask in every layer: told at once, in less time than `_ElementsStay` takes."""
_IN_MEMORY = {Tensor.stride, Tensor.untyped_storage} | {getattr(Tensor, name).__get__ for name in ("grad", "_base")}
"""What Dynamo asks of a graph's inputs besides."""
_FACTS = (bool, int, torch.Size, torch.dtype, torch.device, torch.layout)
"""The types of answers that don't depend on its elements, where no operator has been called."""


class _ElementsCount(Exception):
    """Something is done with a CompactMask that depends on its elements."""


class _ElementsStay(TorchDispatchMode):
    """Runs the operators that leave all elements of a CompactMask as they are, and raises at any other.

    All that Python calls `to`, `cpu`, `view_as`, `[...]` and so on comes down to one of these few.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func is aten.is_pinned.default:
            return func(*args, **kwargs)
        mask = args[0] if args else None
        if isinstance(mask, CompactMask) and not mask.is_written_to:
            if func in (aten.alias.default, aten.detach.default):
                return mask._view()
            if func in (aten.view.default, aten.expand.default, aten.slice.Tensor):
                if func(*args, **kwargs).shape == mask.shape:
                    return mask._view()
            elif func in (aten.clone.default, aten._to_copy.default) and kwargs.get("dtype") in (None, torch.bool):
                return mask._moved(torch.device(kwargs.get("device") or mask.device))
        raise _ElementsCount


_LONG = 1024
"""Queries above which a dense mask is worth a warning."""


@functools.cache
def _tell_dense() -> None:
    warnings.warn(
        "attnkern: a hook or the model's own code looks into attention_mask, which is made dense (L x S): slower, and "
        "with more memory",
        FallbackWarning,
        stacklevel=4,
    )


class CausalTail(NamedTuple):
    """Causal queries, the last one level with key `visible` - 1, that see `window` keys."""

    window: int | None
    visible: int


class RowRanges(NamedTuple):
    """Queries that each see a range of keys, as far as these are real."""

    ranges: Tensor  # int32 (B|1, 1, L, 1, 2)
    real: Tensor | None  # bool (B, 1, 1, S); None: all in the ranges are

    def packed(self, batch_size: int) -> Tensor:
        """One int32 tensor (B, 1, L, 2), or with `real` (B, L + S, 2, 1), for compiled graphs.

        By its 4 dimensions transformers knows a mask that is made already. Code that takes it for a dense one may cut
        queries off the first kind; where it joins it with another along the keys, it makes a shape that `unpack`
        refuses.
        """
        own = self.ranges[:, 0, :, 0].expand(batch_size, -1, -1)
        if self.real is None:
            return own.unsqueeze(1).contiguous()
        flags = self.real[:, 0, 0, :, None].expand(batch_size, -1, 2).to(torch.int32)
        return torch.cat([own, flags], 1).unsqueeze(-1)

    @classmethod
    def unpack(cls, x: Tensor, seqlen_q: int, seqlen_k: int) -> RowRanges:
        if x.dim() == 4 and x.shape[1:] == (1, seqlen_q, 2):
            return cls(x[:, :, :, None], None)
        rows = x.shape[1]
        if x.dim() != 4 or x.shape[2:] != (2, 1) or rows < seqlen_q + seqlen_k:
            raise RuntimeError(
                "attnkern: attention_mask must be bool, floating point, or what attnkern's mask function made for "
                f"{seqlen_q} queries and {seqlen_k} keys, got int32 {tuple(x.shape)}"
            )
        real = x[:, None, None, seqlen_q : seqlen_q + seqlen_k, 0, 0] != 0
        return cls(x[:, None, :seqlen_q, None, :, 0], real)


def attention_mask(**arguments: Any) -> Tensor | None:
    """transformers' mask function: None, or the mask (B, 1, L, S) as a `CompactMask`, or as `RowRanges.packed` where it
    goes through a compiled graph. A pattern that isn't ranges of keys is dense, made by transformers' `sdpa_mask`; the
    mask of a model whose own code computes attention is that of "eager", which such code adds to its scores."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

    from .transformers_layers import needs_eager_mask, taken_over

    config: Any = arguments.get("config")
    own = taken_over(config)
    if own is None and (_computes_itself(type(config)) or type(config).__name__ in _ADD_MASKS):
        return eager_mask(**arguments)
    q_length, q_offset = arguments.get("q_length"), arguments.get("q_offset")
    if own is not None and needs_eager_mask(config, q_length, arguments["kv_length"], q_offset):
        return eager_mask(**arguments)
    as_dense = sdpa_mask if own is None else eager_mask
    if torch.jit.is_tracing() or q_length is None or q_offset is None:
        return as_dense(**arguments)  # 5.0 says in other words where the queries are
    if own is not None:
        # Falcon asks for a mask that it can lay over ALiBi, MPT for one that isn't None; neither looks inside then.
        arguments = {**arguments, "allow_is_causal_skip": True, "allow_is_bidirectional_skip": False}
    function, padding = arguments.get("mask_function", causal_mask_function), arguments.get("attention_mask")
    skip_causal, skip_all = (arguments.get(f"allow_is_{n}_skip", n == "causal") for n in ("causal", "bidirectional"))
    shape = arguments["batch_size"], 1, q_length, arguments["kv_length"]

    def dense() -> Tensor | None:
        return sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    def compact(content: CausalTail | RowRanges) -> CompactMask:
        device = arguments.get("device")
        if own == "Falcon" and config.alibi:
            # Of 4 dimensions, it would be made dense and joined with ALiBi, (B, H, L, S) for all layers.
            return CompactMask.of((shape[0], *shape[2:]), device, content, lambda: cast(Tensor, dense()).squeeze(1))
        return CompactMask.of(shape, device, content, dense)

    if getattr(config, "index_topk", None) is not None:
        return dense()  # the layers' indexer scores keys by it
    if skip_all and function is bidirectional_mask_function and _is_whole(padding):
        return None
    compiled = torch.compiler.is_compiling()
    if compiled:
        # A mask that must be made is one to look into, but for decoding steps and packed sequences.
        if not (skip_causal or skip_all or q_length == 1) and (padding is not None or function is causal_mask_function):
            return dense()
    elif (band := _band(**arguments)) is not None:
        return compact(band)
    if (unknown := _unknown(function, arguments.get("use_vmap", False))) is not None:
        if not torch.compiler.is_compiling():
            _tell(unknown)
        return dense() if own is None else eager_mask(**arguments)
    ranges = _ranges(function, shape, q_offset, arguments.get("kv_offset", 0), padding, arguments.get("device"))
    if ranges.real is not None and q_length > 1 and type(config).__name__ in _CUT_MASKS and config.num_kv_shared_layers:
        return dense()
    if not compiled:
        return compact(ranges)
    packed = ranges.packed(shape[0])
    return packed.view(shape[0], -1, 2) if own == "Falcon" and config.alibi else packed


_ADD_MASKS = frozenset({"BigBirdPegasusConfig", "DeepseekV4Config", "Gemma4AudioConfig", "GitConfig", "InformerConfig"})
"""Models of which some layers call AttentionInterface and others do without, and want eager's mask for their scores;
and those whose layers join another mask to it, of numbers to be added (DeepSeek-V4, for its compressed keys)."""
_CUT_MASKS = frozenset({"Gemma4TextConfig", "Gemma4UnifiedTextConfig"})
"""Models whose layers that share keys compute the last queries alone, and cut their mask as a dense one."""


def _computes_itself(config: type) -> bool:
    """Whether the model of this configuration's class is one of transformers' that never call AttentionInterface."""
    if config not in _COMPUTE_THEMSELVES:
        from transformers.models.auto.modeling_auto import MODEL_MAPPING

        found: Any = MODEL_MAPPING.get(config, None) or ()
        models = found if isinstance(found, tuple) else (found,)
        own = [model.__name__ for model in models if not model._can_set_attn_implementation()]
        _COMPUTE_THEMSELVES[config] = bool(own)
        if own:
            warnings.warn(
                f"attnkern: {own[0]} computes attention in its own code, without attn_implementation: the "
                "kernels are not used",
                FallbackWarning,
                stacklevel=4,
            )
    return _COMPUTE_THEMSELVES[config]


_COMPUTE_THEMSELVES: dict[type, bool] = {type(None): False}
"""By the class of the configuration."""
# A compiled graph takes the answer for a constant. (As by torch.compiler.assume_constant_result, which imports Dynamo.)
_computes_itself._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_whole(padding: Tensor | None) -> bool:
    """Whether nothing is padding, as far as may be looked at."""
    return padding is None or (has_values(padding) and bool(padding.all()))


def _band(
    *,
    kv_length: int,
    q_length: int,
    q_offset: Any,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **others: Any,
) -> CausalTail | None:
    """The mask, if it is causal, or causal within a sliding window, and there is no padding."""
    from transformers.masking_utils import causal_mask_function

    if not allow_is_causal_skip or isinstance(q_offset, Tensor):
        return None  # other patterns are laid over it; a static cache's offset is not to be waited for
    if local_size is None:
        if mask_function is not causal_mask_function:
            return None
    elif local_size != getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        return None  # chunked attention has a local size as well
    visible = q_offset + q_length - kv_offset
    if not q_length <= visible <= kv_length:
        return None
    if attention_mask is not None:
        seen = attention_mask[:, kv_offset : kv_offset + visible]
        if seen.shape[-1] < visible or not _is_whole(seen):
            return None
    return CausalTail(local_size, visible)


_KNOWN = (
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "chunked_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
)
_COMBINED = ("and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.inner_mask")


def _unknown(function: Any, use_vmap: bool) -> str | None:
    """The name of the part of a mask function that may be anything but one range of keys, its own in it, per query.

    A compiled graph can't look into a function: there transformers' word counts, which says use_vmap of a user's own.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function or function is bidirectional_mask_function:
        return None
    name = function.__qualname__
    if use_vmap or function.__module__ != "transformers.masking_utils" or name not in _KNOWN + _COMBINED:
        return f"{function.__module__}.{name}"
    if name in _COMBINED and not torch.compiler.is_compiling():
        for cell in function.__closure__:
            parts = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
            for part in parts:
                if not isinstance(part, Tensor) and (found := _unknown(part, False)) is not None:
                    return found
    return None


@functools.cache
def _tell(unknown: str) -> None:
    warnings.warn(
        f"attnkern: transformers' mask holds {unknown}, which may be no ranges of keys: masks are dense (L x S)",
        stacklevel=2,
    )


_WAYS = 32
_MOST_ROUNDS = 6  # 32^6 = 2^30 keys


def _ranges(
    function: Callable[..., Tensor],
    shape: tuple[int, ...],
    q_offset: Any,
    kv_offset: int,
    padding: Tensor | None,
    device: Any,
) -> RowRanges:
    """The keys of each query, of a mask function that gives every query one range with its own place in it.

    The ends are searched for from that place on, `_WAYS` - 1 keys of each query at a time: in log S steps and O(L)
    memory, without a look at what the function is made of.
    """
    batch_size, _, q_length, kv_length = shape
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    query = (torch.arange(q_length, device=device) + q_offset)[:, None]
    query = query[None, None]
    ahead = torch.arange(1, _WAYS, device=device)

    def sees(keys: Tensor) -> Tensor:
        inside = (keys >= 0) & (keys < kv_length)
        return inside & function(batch, head, query, keys.clamp(0, kv_length - 1) + kv_offset)

    first = last = (query - kv_offset).clamp(0, kv_length - 1)
    empty = ~sees(first)
    rounds = _MOST_ROUNDS
    if not torch.compiler.is_compiling():
        rounds = max(1, math.ceil(math.log(kv_length, _WAYS) + 1e-9))
    for step in (_WAYS**n for n in reversed(range(rounds))):
        first = first - step * sees(first - step * ahead).sum(-1, keepdim=True)
        last = last + step * sees(last + step * ahead).sum(-1, keepdim=True)
    begin, end, real = first, (last + 1).masked_fill(empty, 0), None
    if padding is not None:
        real = F.pad(padding.bool(), (0, kv_length + kv_offset - padding.shape[-1]))[:, kv_offset:][:, None, None]
        left, right = span(real)
        begin, end = begin.maximum(left[..., None]), end.minimum(right[..., None])
        if has_values(real) and bool((right - left == real.sum(-1)).all()):
            real = None
    return RowRanges(torch.stack([begin, end], -1).to(torch.int32), real)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function.

    Args:
        module: the layer; its `is_causal` counts (default False, as by eager) where neither a mask nor `is_causal` is
            given.
        query: (B, H, L, E). key, value: (B, Hk, S, E or Ev), Hk dividing H.
        attention_mask: what `attention_mask` makes, or bool (True = attend) or float (added), broadcast to
            (B, H, L, S); it may be longer than S. The model's `sliding_window` is in it already.
        position_bias: added to the scores, broadcast to (B, H, L, S), with its gradient (T5, ALiBi).
        s_aux: (H,), one more score in every row's softmax, without a value: attention sinks (gpt-oss, MiMo-V2).
        sinks: (B, H, L, 1), such a score for each query (Inkling 2).
        indices: (B, L, n), the keys that each query sees, as far as the mask lets it (DeepSeek-V3.2).
        block_indices: (B, Hi, L, n), the same for blocks of the layer's `indexer.block_size` keys, each Hi for H / Hi
            heads; -1 is none (MiniMax-M3).
        dropout, scaling, softcap: as dropout_p, scale and softcap of `attnkern.attention`.
        others: cu_seq_lens_q and cu_seq_lens_k, where sequences packed into the rows of the batch, one after the
            other, begin and end (B * L and B * S tokens): a query sees its own only. read_index and what comes with
            it, from continuous batching (`transformers_serving`). The rest is for other implementations (window
            sizes); here the mask holds it.

    Returns:
        out (B, L, H, Ev) and None in place of the weights.

    Raises:
        ValueError: output_attentions. Otherwise as `attnkern.attention`.
    """
    if others.get("output_attentions"):
        raise no_weights()
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    common: dict[str, Any] = {"scale": scaling, "softcap": softcap, "enable_gqa": key.shape[1] != query.shape[1]}
    if s_aux is not None:
        common["sinks"] = s_aux if s_aux.dtype == torch.float32 else s_aux.to(query.dtype)
    if "read_index" in others:
        if not (sinks is indices is block_indices is None):
            raise ValueError(
                "attnkern: continuous batching needs layers without indices, block_indices and sinks, got "
                f"{type(module).__qualname__}"
            )
        from .transformers_serving import paged_attention

        return paged_attention(module.layer_idx, query, key, value, others, **common), None
    chosen = _chosen_keys(module, query.shape[1], key.shape[2], indices, block_indices)
    packed = others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k")
    key, value, mask, options = _with_mask(query, key, value, attention_mask, causal, packed)
    if position_bias is not None and mask is None and query.shape[2] > 1 and _is_by_distance(module):
        options["relative_bias"] = _table(position_bias, key.shape[2]).to(query.dtype)
    elif position_bias is not None:
        position_bias = position_bias[..., : key.shape[2]]
        if position_bias.dtype != torch.float32:
            position_bias = position_bias.to(query.dtype)
        mask = both(position_bias, mask)
    if chosen is not None:
        mask = both(mask, chosen[..., : key.shape[2]])
    out: Any = attention(query, key, value, mask, dropout, return_lse=sinks is not None, **common, **options)
    if sinks is not None:
        out, lse = out
        # What the sink leaves of a row's weights: exp(lse) / (exp(lse) + exp(sink)).
        out = out * torch.sigmoid(lse.unsqueeze(-1) - sinks).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def _chosen_keys(
    module: Any, heads: int, seqlen_k: int, indices: Tensor | None, block_indices: Tensor | None
) -> Tensor | None:
    """Where a query may look, bool (B, 1 or H, L, S), by what the layer's indexer has chosen."""
    if indices is not None:
        empty = torch.zeros(*indices.shape[:-1], seqlen_k, dtype=torch.bool, device=indices.device)
        return empty.scatter(-1, indices.long(), True).unsqueeze(1)
    if block_indices is not None:
        size = module.indexer.block_size
        blocks = -(-seqlen_k // size)
        empty = torch.zeros(*block_indices.shape[:-1], blocks + 1, dtype=torch.bool, device=block_indices.device)
        chosen = empty.scatter(-1, torch.where(block_indices < 0, blocks, block_indices), True)[..., :blocks]
        chosen = chosen.repeat_interleave(size, -1)[..., :seqlen_k]
        return chosen.repeat_interleave(heads // block_indices.shape[1], 1)
    return None


def no_weights() -> ValueError:
    """What output_attentions gets."""
    return ValueError(
        "attnkern: output_attentions needs attn_implementation='eager': the weights are never held in memory here "
        "(attnkern.attention_weights computes those of chosen layers)"
    )


_BY_DISTANCE = frozenset(
    f"transformers.models.{n.lower()}.modeling_{n.lower()}.{n}Attention" for n in ("T5", "MT5", "UMT5")
)
"""Layers whose position_bias depends on the distance from query to key alone: on its bucket, or it is 0."""


def _is_by_distance(module: torch.nn.Module) -> bool:
    return f"{type(module).__module__}.{type(module).__qualname__}" in _BY_DISTANCE


def _table(bias: Tensor, seqlen_k: int) -> Tensor:
    """Of a bias by distance (1, H, L, S), its numbers for the first keys as a table (1, H, L + seqlen_k - 1): the first
    column from below, and the first row. All the gradient goes to these: a bucket's weight sums over its entries."""
    distance = torch.arange(1 - bias.shape[2], seqlen_k, device=bias.device)
    at = torch.where(distance < 0, -distance * bias.shape[3], distance)
    return bias.flatten(2).index_select(-1, at)


def _with_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    packed: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """key, value, attn_mask and the other options of `attnkern.attention` for a mask as `attention_mask` makes it."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    content: CausalTail | RowRanges | None = None
    if isinstance(mask, CompactMask):
        if mask.shape[2:] == (seqlen_q, seqlen_k) and (torch.compiler.is_compiling() or not mask.is_written_to):
            content, mask = mask.content, None
        else:
            mask = mask.dense()  # made for other queries or keys than these, or changed since
    elif mask is not None and mask.dtype == torch.int32:
        content, mask = RowRanges.unpack(mask, seqlen_q, seqlen_k), None
    if mask is not None:
        mask = mask[..., :seqlen_k]
        if mask.is_floating_point() and mask.dtype != torch.float32:
            mask = mask.to(query.dtype)
    if isinstance(content, RowRanges):
        own = content.ranges
        if packed[0] is not None:
            (begin, end), (first, last) = own.unbind(-1), _own_keys(query, key, packed, None, None).unbind(-1)
            own = torch.stack([begin.maximum(first), end.minimum(last)], -1)
        return key, value, content.real, {"key_ranges": own}
    causal = content is not None or (mask is None and causal and seqlen_q > 1)
    left = None if content is None or content.window is None else content.window - 1
    if packed[0] is not None:
        return key, value, mask, {"key_ranges": _own_keys(query, key, packed, left, 0 if causal else None)}
    if content is None:
        return key, value, mask, {"is_causal": causal}
    # A static cache is longer than what has been written to it.
    key, value = key[:, :, : content.visible], value[:, :, : content.visible]
    window = None if left is None else (left, None)
    return key, value, None, {"is_causal": True, "alignment": "bottom_right", "window": window}


def _own_keys(
    query: Tensor, key: Tensor, packed: tuple[Tensor | None, Tensor | None], left: int | None, right: int | None
) -> Tensor:
    """The keys of each query's own sequence within the window, int32 (B, 1, L, 1, 2)."""
    ends_q, ends_k = packed
    assert ends_q is not None
    tokens_q, tokens_k = (x[:, 0, :, 0].reshape(-1) for x in (query, key))
    ranges = packed_ranges(
        tokens_q, tokens_k, ends_q, ends_q if ends_k is None else ends_k, None, left, right, "bottom_right"
    )
    batch_size, _, seqlen_q, _ = query.shape
    row = torch.arange(batch_size, dtype=torch.int32, device=query.device) * key.shape[2]
    return ranges.view(batch_size, 1, seqlen_q, 1, 2) - row[:, None, None, None, None]
