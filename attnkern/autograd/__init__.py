"""Gradients, of every order and under every transform."""

from .functions import attention, part_backward
from .of_weights import weights

__all__ = ["attention", "part_backward", "weights"]
