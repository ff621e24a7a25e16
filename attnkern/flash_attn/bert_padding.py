"""Tokens of a padded batch as packed sequences, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import show, type_error
from .arguments import check_dims


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices]: the rows (n, ...) of an input (tokens, ...), indices integer (n,)."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...), whose rows `indices` (n,) are values (n, ...), the others 0."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch that attention_mask selects, sequence after sequence. Waits for a GPU.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: bool or integer (batch, seqlen), 1 = a token.
        unused_mask: likewise, 1 = a token that is packed as well, but not counted in seqused.

    Returns:
        hidden_states (total, ...); indices int64 (total,), of the tokens in the flattened batch; cu_seqlens int32
        (batch + 1,); the longest sequence's length; seqused int32 (batch,), the tokens of attention_mask.

    Raises:
        TypeError: arguments of the wrong type. RuntimeError: masks of another shape, or floating point.
    """
    if not isinstance(hidden_states, Tensor) or hidden_states.dim() < 2:
        check_dims("hidden_states", hidden_states, "batch, seqlen, ...")
    batch, seqlen = hidden_states.shape[:2]
    _check_mask("attention_mask", attention_mask, batch, seqlen)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, batch, seqlen)
    selected = attention_mask != 0
    every = selected if unused_mask is None else selected | (unused_mask != 0)
    used, lengths = (mask.sum(-1, dtype=torch.int32) for mask in (selected, every))
    indices = every.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if batch else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def _check_mask(name: str, mask: Tensor, batch: int, seqlen: int) -> None:
    check_dims(name, mask, batch, seqlen)
    if mask.is_floating_point():  # which may be one of 0 and -inf, to be added
        raise RuntimeError(f"attnkern: {name} must be bool or integer, got {show(mask.dtype)}")


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) of packed tokens (total, ...) at `indices` (total,) of the flattened batch; 0 elsewhere."""
    for name, x in (("hidden_states", hidden_states), ("indices", indices)):
        if not isinstance(x, Tensor):
            raise type_error(name, "Tensor", x)
    if hidden_states.shape[:1] != indices.shape:
        raise RuntimeError(
            f"attnkern: indices must have the shape (total,), one for each of hidden_states "
            f"{show(hidden_states.shape)}, got {show(indices.shape)}"
        )
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
