"""Gradients, of every order and under every transform."""

from .functions import attention, eager, part_backward
from .of_weights import weights

__all__ = ["attention", "eager", "part_backward", "weights"]
