"""Attention of packed sequences: one row of tokens, sequence after sequence, without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .api import attention
from .arguments import Window, checked_window, type_error
from .packed import heads_first, packed_ranges, paged_ranges, tokens_first
from .pages import pages_of
from .params import check_alignment, holds


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    is_causal: bool = False,
    window: Window = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_bias_center: int | None = None,
    block_table: Tensor | None = None,
    dropout_p: float = 0,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of n sequences that are packed one after the other.

    No length has to be known on the host: nothing waits for a GPU, and one compiled graph serves all lengths.

    Args:
        query: (T, Hq, E), the queries of all sequences; dtypes and strides as in `attention`.
        key: (Tk, Hk, E), value: (Tk, Hk, Ev).
        cu_seqlens_q: (n + 1,), int32 or int64: sequence s has the queries cu_seqlens_q[s] to cu_seqlens_q[s + 1]; the
            first is 0, the last T or less. Queries behind the last are of no sequence and attend to nothing: zeros in
            the output, and no gradient. So a buffer of a fixed size holds any number of tokens.
        cu_seqlens_k: the same for keys, the last is Tk or less; None: cu_seqlens_q.
        seqused_k: (n,), int32 or int64: how many keys of each sequence there are, from its first on; None: all. Beyond
            0 and the sequence's length they count as these.
        is_causal, window, alignment: as in `attention`, within each sequence; by default its last query is level with
            the last of its keys that there are.
        scale, softcap, dropout_p, enable_gqa, backend: as in `attention`; sinks likewise, (Hq,).
        relative_bias, relative_bias_center: as in `attention`, within each sequence; they need cu_seqlens_k=None. By
            default the center is the middle of the R numbers, (R - 1) // 2.
        block_table: (n, pages of a sequence), int32 or int64: key and value are pools of pages then, (pages, Hk, size,
            E) and (pages, Hv, size, Ev), as in `attention`; cu_seqlens_k must be None, and seqused_k says how many keys
            each sequence has. There is no gradient.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        (T, Hq, Ev) in query's dtype; with return_lse also lse (Hq, T), as in `attention`. Both are differentiable.

    Raises:
        As `attention`; RuntimeError also for cu_seqlens and seqused_k of another shape or dtype. Values are checked on
        the CPU outside of graphs, and on other devices where ATTNKERN_CHECK=1 is in the environment: RuntimeError for
        cu_seqlens that don't start at 0, fall, or exceed T (Tk), ValueError for seqused_k below 0 or above the length
        of its sequence.

    Source: packed sequences are those of T. Dao's flash_attn_varlen_func (FlashAttention-2, 2023).
    """
    relevant = query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, sinks, relative_bias, block_table
    if not torch.compiler.is_compiling() and has_torch_function(relevant):
        return handle_torch_function(
            varlen_attention,
            relevant,
            *relevant[:5],
            seqused_k=seqused_k,
            is_causal=is_causal,
            window=window,
            alignment=alignment,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            relative_bias=relative_bias,
            relative_bias_center=relative_bias_center,
            block_table=block_table,
            dropout_p=dropout_p,
            enable_gqa=enable_gqa,
            return_lse=return_lse,
            backend=backend,
        )
    if block_table is None:
        check_packed(query, key, value)
    else:
        block_table = _checked_table(query, key, value, cu_seqlens_k, seqused_k, block_table)
    if relative_bias is not None:
        if cu_seqlens_k is not None or block_table is not None:
            other = "cu_seqlens_k" if block_table is None else "block_table"
            raise ValueError(f"attnkern: relative_bias needs {other}=None: queries and keys of the same places")
        if relative_bias_center is None and isinstance(relative_bias, Tensor) and relative_bias.dim() > 0:
            relative_bias_center = (relative_bias.shape[-1] - 1) // 2
    left, right = check_packed_window(is_causal, window, alignment)
    if block_table is None:
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
        ranges = packed_ranges(query, key, cu_seqlens_q, cu_seqlens_k, seqused_k, left, right, alignment)
        q, k, v = heads_first(query, key, value, batch=sinks is not None)  # (sinks may be (1, Hq))
    else:
        used: Any = seqused_k
        ranges = paged_ranges(query, block_table, key.shape[2], cu_seqlens_q, used, left, right, alignment)
        [q], k, v, block_table = heads_first(query, batch=True), key, value, block_table.reshape(1, -1)
    results: Any = attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        sinks=sinks,
        relative_bias=relative_bias,
        relative_bias_center=relative_bias_center,
        key_ranges=ranges,
        block_table=block_table,
        return_lse=return_lse,
        backend=backend,
    )
    if not return_lse:
        return tokens_first(results)
    out, lse = results
    return tokens_first(out), lse.squeeze(0) if lse.dim() == 3 else lse


def check_packed(query: Any, key: Any, value: Any) -> None:
    """Raises unless they are tensors of packed tokens."""
    for name, x, size in (("query", query, "Hq, E"), ("key", key, "Hk, E"), ("value", value, "Hk, Ev")):
        if not isinstance(x, Tensor):
            raise type_error(name, "Tensor", x)
        if x.dim() != 3:
            raise RuntimeError(f"attnkern: {name} must have the shape (tokens, {size}), got {tuple(x.shape)}")
    if holds(key.shape[0] != value.shape[0], False):
        raise RuntimeError(f"attnkern: value must have key's {key.shape[0]} tokens, got {value.shape[0]}")


def _checked_table(query: Any, key: Any, value: Any, cu_seqlens_k: Any, seqused_k: Any, block_table: Any) -> Tensor:
    """Raises unless they are packed queries and pools of pages with the keys that each sequence has in them."""
    if not isinstance(query, Tensor):
        raise type_error("query", "Tensor", query)
    if query.dim() != 3:
        raise RuntimeError(f"attnkern: query must have the shape (tokens, Hq, E), got {tuple(query.shape)}")
    if cu_seqlens_k is not None:
        raise ValueError(
            "attnkern: cu_seqlens_k must be None beside a block_table: seqused_k says which keys there are"
        )
    if seqused_k is None:
        raise ValueError("attnkern: seqused_k must be given beside a block_table: how many keys each sequence has")
    numbered = block_table if isinstance(block_table, Tensor) and block_table.dim() == 2 else seqused_k
    sequences = numbered.shape[0] if isinstance(numbered, Tensor) and numbered.dim() > 0 else 0
    return pages_of(query[None].expand(sequences, -1, -1, -1), key, value, block_table).table


def check_packed_window(is_causal: Any, window: Any, alignment: Any) -> tuple[int | None, int | None]:
    """The window's bounds, causal or not, after checks."""
    if not isinstance(is_causal, bool):
        raise type_error("is_causal", "bool", is_causal)
    check_alignment(alignment)
    left, right = checked_window(window) or (None, None)
    return left, 0 if is_causal else right
