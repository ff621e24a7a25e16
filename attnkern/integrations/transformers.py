"""`attn_implementation="attnkern"` for the models of Hugging Face transformers.

    import attnkern.integrations.transformers
    attnkern.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnkern")

transformers makes a mask once per forward pass (AttentionMaskInterface) and calls attention in every layer
(AttentionInterface). Between the two it knows dense masks only. Ours for a causal or sliding-window pattern without
padding is a `BandMask`: it takes no memory, every layer's kernel skips what it excludes, and it turns into the dense
mask for any other code that looks inside. Key and value heads stay as few as the model has, with masks as well.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api import attention

NAME = "attnkern"
MINIMUM = (5, 0)


def register() -> None:
    """Make `attn_implementation="attnkern"` known to transformers (>= 5.0). Changes nothing else; may be repeated.

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


class BandMask(Tensor):
    """The bool mask (B, 1, L, S) of causal queries, the last one level with key `visible` - 1, that see `window` keys.

    Shape, dtype and device are that mask's; the memory is one element's. Any other use makes the dense mask, once.
    """

    window: int | None
    visible: int
    _make: Callable[[], Any]
    _dense: Tensor | None

    @staticmethod
    def of(shape: tuple[int, ...], device: Any, window: int | None, visible: int, make: Callable[[], Any]) -> BandMask:
        """`make` gives the dense mask, if anyone asks for it."""
        mask = torch.ones((), dtype=torch.bool, device=device).expand(shape).as_subclass(BandMask)
        mask.window, mask.visible, mask._make, mask._dense = window, visible, make, None
        return mask

    def dense(self) -> Tensor:
        """The mask as a plain tensor."""
        if self._dense is None:
            self._dense = self._make()
        return self._dense

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _OUTSIDE:
            args, kwargs = torch.utils._pytree.tree_map_only(BandMask, BandMask.dense, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_OUTSIDE = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_nested", "is_sparse")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.get_device}
"""What can be asked of a BandMask as it is."""


def attention_mask(**arguments: Any) -> Tensor | None:
    """transformers' mask function: bool (B, 1, L, S) or None, made by its own `sdpa_mask` where a band does not do."""
    from transformers.masking_utils import sdpa_mask

    band = None if torch.compiler.is_compiling() or torch.jit.is_tracing() else _band(**arguments)
    if band is None:
        return sdpa_mask(**arguments)
    shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
    dense = {**arguments, "allow_is_causal_skip": False}
    return BandMask.of(shape, arguments.get("device", "cpu"), *band, lambda: sdpa_mask(**dense))


def _band(
    *,
    kv_length: int,
    q_length: int | None = None,
    q_offset: Any = None,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **others: Any,
) -> tuple[int | None, int] | None:
    """(window, visible keys) if the mask is causal, or causal within a sliding window, and there is no padding."""
    from transformers.masking_utils import causal_mask_function

    if q_length is None or q_offset is None:
        return None  # 5.0 says in other words where the queries are
    if not allow_is_causal_skip:
        return None  # other patterns are laid over it
    if local_size is None:
        if mask_function is not causal_mask_function:
            return None
    elif local_size != getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        return None  # chunked attention has a local size as well
    visible = int(q_offset) + q_length - kv_offset
    if not q_length <= visible <= kv_length:
        return None
    if attention_mask is not None:
        seen = attention_mask[:, kv_offset : kv_offset + visible]
        if seen.shape[-1] < visible or not bool(seen.all()):
            return None
    return local_size, visible


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
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function.

    Args:
        module: the layer; its `is_causal` counts (default True) where neither a mask nor `is_causal` is given.
        query: (B, H, L, E). key, value: (B, Hk, S, E or Ev), Hk dividing H.
        attention_mask: a `BandMask`, bool (True = attend) or float (added), broadcast to (B, H, L, S); it may be longer
            than S. The model's `sliding_window` is in it already.
        position_bias: added to the scores, broadcast to (B, H, L, S), with its gradient (T5).
        s_aux: (H,), one more score in every row's softmax, without a value: attention sinks (gpt-oss).
        dropout, scaling, softcap: as dropout_p, scale and softcap of `attnkern.attention`.
        others: arguments of other implementations (window sizes, packed lengths); here the mask holds them.

    Returns:
        out (B, L, H, Ev) and None in place of the weights.

    Raises:
        ValueError: output_attentions. Otherwise as `attnkern.attention`.
    """
    if others.get("output_attentions"):
        raise ValueError(
            "attnkern: output_attentions needs attn_implementation='eager': the weights are never held in memory here "
            "(attnkern.attention_weights computes those of chosen layers)"
        )
    options: dict[str, Any] = {}
    mask = attention_mask
    if isinstance(mask, BandMask) and mask.shape[2:] != (query.shape[2], key.shape[2]):
        mask = mask.dense()  # made for other queries or keys than these
    if isinstance(mask, BandMask):
        # A static cache is longer than what has been written to it.
        key, value = key[:, :, : mask.visible], value[:, :, : mask.visible]
        window = None if mask.window is None else (mask.window - 1, None)
        options = {"is_causal": True, "alignment": "bottom_right", "window": window}
        mask = None
    elif mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options = {"is_causal": bool(causal) and query.shape[2] > 1}
    else:
        mask = mask[..., : key.shape[2]]
        if mask.is_floating_point() and mask.dtype != torch.float32:
            mask = mask.to(query.dtype)
    if position_bias is not None:
        position_bias = position_bias[..., : key.shape[2]].to(query.dtype)
        if mask is None:
            mask = position_bias
        elif mask.dtype == torch.bool:
            mask = position_bias.masked_fill(~mask, -torch.inf)
        else:
            mask = position_bias + mask
    out: Any
    options |= {"scale": scaling, "softcap": softcap, "enable_gqa": key.shape[1] != query.shape[1]}
    if s_aux is None:
        out = attention(query, key, value, mask, dropout, **options)
    else:
        # The sink takes exp(s_aux) / (exp(lse) + exp(s_aux)) of every row's weight.
        out, lse = attention(query, key, value, mask, dropout, return_lse=True, **options)
        out = out * torch.sigmoid(lse - s_aux.view(1, -1, 1)).unsqueeze(-1).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None
