"""The definition of attention as attnkern computes it, in plain torch. Every other backend is tested against it.

    x    = softmax_scale * q k^T                          (B, Hq, L, S); query head h uses key head h // (Hq // Hk)
    x    = softcap * tanh(x / softcap)                    if softcap > 0
    x    = x + bias, or -inf where a bool bias is False
    x    = -inf outside the band                          keep (i, j) iff -left <= j - i - offset <= right
    x    = -inf outside the row's key ranges              keep (i, j) iff begin <= j < end of one of them
    lse  = log sum_j exp(x)                               natural logarithm
    p    = exp(x - lse), dropped out, survivors divided by (1 - dropout_p)
    out  = p v

A row whose every x is -inf has lse = -inf, out = 0 and gradients 0. Inputs of 16 bits are computed in float32, others
in their own dtype. Differentiable any number of times, under every torch.func transform; holds all scores in memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import rng
from ..params import AttentionParams, is_length_major, within_ranges
from ..problem import Problem, autocasts

NAME = "reference"


def refusals(problem: Problem) -> list[str]:
    """Why this backend cannot run `problem`: it can run every one."""
    return []


def unavailable() -> str | None:
    """Why this backend cannot run at all here: it always can."""
    return None


def forward(problem: Problem, philox_seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (B, Hq, L, Ev) in q's dtype and lse (B, Hq, L) in float32 (float64 for float64)."""
    q, k, v, bias, ranges, params, _ = problem
    out, lse = attention(q, k, v, bias, ranges, philox_seed, params)
    if is_length_major(q.shape, q.stride()):
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_ranges: Tensor | None,
    philox_seed: Tensor | None,
    params: AttentionParams,
) -> tuple[Tensor, Tensor]:
    if autocasts(q.device):
        with torch.autocast(q.device.type, enabled=False):
            return attention(q, k, v, bias, key_ranges, philox_seed, params)
    batch, num_heads, seqlen_q, _ = q.shape
    x, dead = alive(scores(q, per_query_head(k, num_heads), bias, key_ranges, params))
    lse = x.logsumexp(-1).masked_fill(dead.squeeze(-1), -math.inf)
    p = x.softmax(-1).masked_fill(dead, 0.0)
    if philox_seed is not None:
        keep = rng.keep_mask(philox_seed, params.dropout_p, batch, num_heads, seqlen_q, k.shape[-2])
        p = drop(p, keep, params.dropout_p)
    return (p @ per_query_head(v, num_heads).to(p.dtype)).to(q.dtype), lse


def scores(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    key_ranges: Tensor | None,
    params: AttentionParams,
    rows: Tensor | None = None,
) -> Tensor:
    """x, with as many heads in k as in q; `rows` says which queries these are (None: all of them)."""
    if autocasts(q.device):
        with torch.autocast(q.device.type, enabled=False):
            return scores(q, k, bias, key_ranges, params, rows)
    dtype = torch.promote_types(q.dtype, torch.float32)
    x = params.softmax_scale * (q.to(dtype) @ k.to(dtype).mT)
    if params.softcap:
        x = params.softcap * torch.tanh(x / params.softcap)
    return masked(x, bias, key_ranges, params, rows)


def masked(
    x: Tensor, bias: Tensor | None, key_ranges: Tensor | None, params: AttentionParams, rows: Tensor | None
) -> Tensor:
    """The scores x with bias, key ranges and band; `rows` as in `scores`."""
    if bias is not None:
        x = x.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else x + bias.to(x.dtype)
    if (keep := params.band.mask(x.shape[-2], x.shape[-1], x.device, rows)) is not None:
        x = x.masked_fill(~keep, -math.inf)
    if key_ranges is not None:
        x = x.masked_fill(~within_ranges(key_ranges, slice(0, x.shape[-1])), -math.inf)
    return x


def alive(x: Tensor) -> tuple[Tensor, Tensor]:
    """x with dead rows as zeros, and which rows are dead: to be zeroed after softmax.

    So their NaN never exists, in no derivative. (And softmax, not exp(x - lse): lse cannot hold log S beside a bias of
    finfo.min, which stands for a mean.)
    """
    dead = (x == -math.inf).all(-1, keepdim=True)
    return x.masked_fill(dead, 0.0), dead


def drop(p: Tensor, keep: Tensor, dropout_p: float) -> Tensor:
    return p.masked_fill(~keep, 0.0) / (1.0 - dropout_p if dropout_p < 1.0 else 1.0)


def per_query_head(x: Tensor, num_heads: int) -> Tensor:
    """Key or value heads repeated for the consecutive query heads that share them."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)
