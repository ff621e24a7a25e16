"""Attention kernels for PyTorch, behind the signature of `torch.nn.functional.scaled_dot_product_attention`."""

from ._library import build_info
from .api import attention, explain, scaled_dot_product_attention
from .backends import FallbackWarning, backends
from .merge import merge_attention

__version__ = "0.1.0"

__all__ = [
    "FallbackWarning",
    "__version__",
    "attention",
    "backends",
    "build_info",
    "explain",
    "merge_attention",
    "scaled_dot_product_attention",
]
