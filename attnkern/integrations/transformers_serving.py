"""Continuous batching of transformers (`generate_batch`) for models of attnkern's name.

transformers packs the new tokens of all requests into one row and keeps keys and values in pages of a pool, its
PagedAttentionCache. Its own list says which implementations get no dense mask (L x S of all requests) and read the
pages where they lie; `take_over` puts the name on it. Steps that only decode are attention to pages by a block_table;
the others get keys and values from the cache as packed sequences, as flash attention does.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..pages import is_page_size
from ..varlen import varlen_attention
from .transformers import NAME


@functools.cache
def take_over() -> None:
    """Have continuous batching accept models of attnkern's name. A version that isn't as expected stays as it is, and
    refuses them with an error of its own."""
    try:
        from transformers.generation.continuous_batching import cache, continuous_api, initialization
    except ImportError:  # before 5.20
        return
    manager, paged = continuous_api.ContinuousBatchingManager, cache.PagedAttentionCache
    expected: list[tuple[Any, list[str]]] = [
        (getattr(manager, "switch_to_cb_friendly_attn", None), ["self", "model"]),
        (getattr(paged, "update", None), ["self", "key_states", "value_states", "layer_idx", "kwargs"]),
        (getattr(initialization, "is_flash_attention_requested", None), ["config"]),
        (getattr(cache, "is_flash_attention_requested", None), ["config"]),
        (getattr(initialization, "ensure_decode_fast_path_is_available", None), ["config", "cb_config"]),
    ]
    for function, first in expected:
        if function is None or list(inspect.signature(function).parameters)[: len(first)] != first:
            return

    their_switch = manager.switch_to_cb_friendly_attn

    @functools.wraps(their_switch)
    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        # Layers that never call AttentionInterface would leave the cache unread.
        if model.config._attn_implementation != NAME or not model._can_set_attn_implementation():
            their_switch(self, model, *args, **kwargs)

    manager.switch_to_cb_friendly_attn = switch  # type: ignore[method-assign]

    for module in (initialization, cache):
        module.is_flash_attention_requested = _no_mask_needed(module.is_flash_attention_requested)  # type: ignore[attr-defined]

    their_check = initialization.ensure_decode_fast_path_is_available

    @functools.wraps(their_check)
    def ensure(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        # Theirs asks for a GPU and flash_attn's function.
        if config._attn_implementation != NAME or not _reads_pages(cache, config, cb_config.page_size):
            their_check(config, cb_config, *args, **kwargs)

    initialization.ensure_decode_fast_path_is_available = ensure


def _no_mask_needed(theirs: Any) -> Any:
    """is_flash_attention_requested, as continuous batching asks: for masks, the memory for them, and repeated heads."""

    @functools.wraps(theirs)
    def requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        if config is not None and config._attn_implementation == NAME:
            return not args and kwargs.get("version") is None
        return theirs(config, *args, **kwargs)

    return requested


def _reads_pages(cache: Any, config: Any, page_size: int) -> bool:
    """Whether all layers keep keys and values in pages that `attention` reads."""
    if not is_page_size(page_size):
        return False
    kinds = cache.group_layers_by_attn_type(config)
    return all(cache.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds)


# Not in a graph: writes to views of the pool, which overlap, would copy all of it for each layer.
@torch.compiler.disable
def paged_attention(
    layer_idx: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arguments: dict[str, Any],
    **options: Any,
) -> Tensor:
    """Attends to what a PagedAttentionCache holds of each request, the new tokens among it.

    Args:
        layer_idx: which layer of the cache.
        query: (1, H, T, E): the new tokens of all requests.
        key, value: (1, Hk, T, E or Ev): theirs, which join the cache here, where `arguments` has a block_table or the
            cache itself. Else what the cache holds of all requests.
        arguments: what continuous batching gives every layer. Before transformers 5.24 the cache is among it; since
            then the layer has called its `update`, which leaves in its place what belongs to the layer.
        options: scale, softcap, sinks and enable_gqa of `attention`.

    Returns:
        (1, T, H, Ev).
    """
    arguments = dict(arguments)
    if (cache := arguments.pop("cache", None)) is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer_idx, kwargs=arguments)
    # The window: this many keys, the query's own the last of them.
    window, ends_k = arguments.get("sliding_window"), arguments["cu_seq_lens_k"]
    if arguments.get("block_table") is None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        left = None if window is None else (window - 1, None)
        out: Any = varlen_attention(q, k, v, arguments["cu_seq_lens_q"], ends_k, is_causal=True, window=left, **options)
        return out.unsqueeze(0)

    # One new token for each request; a request of no keys is there for the sake of a fixed size, and has no pages. It
    # writes what the first request writes, which leaves its place as it is where it has no page either.
    table, pools = arguments["block_table"], (arguments["k_cache"], arguments["v_cache"])
    end = ends_k[1:] - ends_k[:-1]
    place, size = (end - 1).clamp(min=0).to(torch.int64), pools[0].shape[1]
    page, within = table.gather(1, (place // size)[:, None]).squeeze(1).to(torch.int64), place % size
    alive = page >= 0
    page, within = (torch.where(alive, x, x[:1].clamp(min=0)) for x in (page, within))
    for pool, new in zip(pools, (key, value), strict=True):
        written = new[0].transpose(0, 1)
        first = torch.where(alive[:1, None, None], written[:1], pool[page[:1], within[:1]])
        pool[page, within] = torch.where(alive[:, None, None], written, first)
    begin = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
    ranges = torch.stack([begin, end], -1)[:, None, None, None]
    k, v = (pool.transpose(1, 2) for pool in pools)
    q = query[0].transpose(0, 1).unsqueeze(2)
    out = attention(q, k, v, key_ranges=ranges, block_table=table, **options)
    return out.squeeze(2).unsqueeze(0)
