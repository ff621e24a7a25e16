"""Gradients: the only package that knows about them."""

from .functions import attention, part_backward
from .of_weights import weights

__all__ = ["attention", "part_backward", "weights"]
