"""The operators `attnkern::forward` and `attnkern::backward`: schemas, shapes and strides, FLOP counts. No arithmetic.

They are what torch.compile, export, the profiler, the FLOP counter, DTensor and selective checkpointing see. Autograd
is outside (autograd.py) and so is autocast (problem.py). The CPU implementation registers itself from C++
(csrc/ops.cpp), because a Python hop costs more than a short attention; devices with several backends route the
argument `backend` in Python, here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .problem import is_length_major

library = torch.library.Library("attnkern", "DEF")

_SCORE = (
    "float softmax_scale, float softcap, SymInt window_left, SymInt window_right, SymInt band_offset, float dropout_p"
)
# Any strides are right, but the output's follow the inputs': Inductor must not change them behind the fakes' back.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

# lse has shape (0,) unless need_lse.
library.define(
    f"forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, {_SCORE}, bool need_lse, str backend)"
    " -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
# grad_mask: 1 q, 2 k, 4 v, 8 bias. A gradient not asked for has shape (0,).
library.define(
    "backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed,"
    f" Tensor out, Tensor lse, {_SCORE}, int grad_mask, str backend)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    tags=_TAGS,
)

forward = torch.ops.attnkern.forward.default
backward = torch.ops.attnkern.backward.default

GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS = 1, 2, 4, 8


def _empty_like_heads(x: Tensor, head_dim: int) -> Tensor:
    """Empty (B, H, L, head_dim) in the memory order of x (B, H, L, D)."""
    batch, heads, length, _ = x.shape
    if is_length_major(x):
        return x.new_empty(batch, length, heads, head_dim).transpose(1, 2)
    return x.new_empty(batch, heads, length, head_dim)


@torch.library.register_fake("attnkern::forward", lib=library)
def _forward_fake(
    q, k, v, bias, philox_seed, softmax_scale, softcap, left, right, offset, dropout_p, need_lse, backend
):
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(q.shape[:3] if need_lse else (0,), dtype=lse_dtype)
    return _empty_like_heads(q, v.shape[-1]), lse


@torch.library.register_fake("attnkern::backward", lib=library)
def _backward_fake(
    grad_out,
    grad_lse,
    q,
    k,
    v,
    bias,
    philox_seed,
    out,
    lse,
    softmax_scale,
    softcap,
    left,
    right,
    offset,
    dropout_p,
    grad_mask,
    backend,
):
    grads = [
        _empty_like_heads(x, x.shape[-1]) if grad_mask & bit else x.new_empty(0)
        for x, bit in ((q, GRAD_Q), (k, GRAD_K), (v, GRAD_V))
    ]
    dbias = bias.new_empty(bias.shape) if grad_mask & GRAD_BIAS else q.new_empty(0)
    return *grads, dbias


# FLOPs, as torch counts its own attention: 2 per multiply-add of each matrix product, masked entries included.


def _pairs(q_shape) -> int:
    batch, heads, seqlen_q, _ = q_shape
    return batch * heads * seqlen_q


@register_flop_formula(torch.ops.attnkern.forward)
def _forward_flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Q K^T and P V."""
    return 2 * _pairs(q_shape) * k_shape[2] * (q_shape[3] + v_shape[3])


@register_flop_formula(torch.ops.attnkern.backward)
def _backward_flops(grad_shape, grad_lse_shape, q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Q K^T again, dO V^T, P^T dO, dS K, dS^T Q."""
    return 2 * _pairs(q_shape) * k_shape[2] * (3 * q_shape[3] + 2 * v_shape[3])


# Sharding rules (DTensor) belong here: Replicate, Shard(0), and Shard(1) where both head counts divide.
