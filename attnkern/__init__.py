"""Attention kernels for PyTorch, behind the signature of `torch.nn.functional.scaled_dot_product_attention`."""

from . import masks, nn
from ._library import build_info
from .api import attention, explain, scaled_dot_product_attention
from .backends import backends
from .backends.failed import FallbackWarning
from .integrations import sdpa as _sdpa
from .integrations.sdpa import SdpaCalls, sdpa_calls, use_as_sdpa
from .mask import Mask
from .merge import attention_backward, merge_attention
from .paged_cache import PagedCache
from .plot import plot_attention
from .relative import alibi, t5_relative_bias
from .varlen import varlen_attention
from .weights import attention_weights

__version__ = "0.2.0"

__all__ = [
    "FallbackWarning",
    "Mask",
    "PagedCache",
    "SdpaCalls",
    "__version__",
    "alibi",
    "attention",
    "attention_backward",
    "attention_weights",
    "backends",
    "build_info",
    "explain",
    "masks",
    "merge_attention",
    "nn",
    "plot_attention",
    "scaled_dot_product_attention",
    "sdpa_calls",
    "t5_relative_bias",
    "use_as_sdpa",
    "varlen_attention",
]

_sdpa.register()
