"""The definition of attention as attnkern computes it, in plain torch. Every other backend is tested against it.

    x    = softmax_scale * q k^T                          (B, Hq, L, S); query head h uses key head h // (Hq // Hk)
    x    = softcap * tanh(x / softcap)                    if softcap > 0
    x    = x + bias, or -inf where a bool bias is False
    x    = -inf outside the band                          keep (i, j) iff -left <= j - i - offset <= right
    x    = -inf outside the row's key ranges              keep (i, j) iff begin <= j < end of one of them
    lse  = log (exp(sink) + sum_j exp(x))                 natural logarithm; without sinks there is no exp(sink)
    p    = exp(x - lse), dropped out, survivors divided by (1 - dropout_p)
    out  = p v

A row whose every x is -inf has lse = -inf (or its sink), out = 0 and gradients 0. What no query attends to, by a bool
bias, the band and the ranges, counts as 0, whatever it holds. Inputs of 16 bits are computed in float32, others in
their own dtype. Differentiable any number of times, under every torch.func transform; holds all scores in memory.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import Tensor

from .. import bits, relative, rng
from ..arguments import autocasts, may_look
from ..dtensor import replicated
from ..pages import Pages, check_table
from ..params import AttentionParams, is_length_major, within_ranges
from ..problem import Problem
from ..signatures import Inputs

NAME = "reference"


def refusals(problem: Problem) -> list[str]:
    """Why this backend cannot run `problem`: it can run every one."""
    return []


def unavailable() -> str | None:
    """Why this backend cannot run at all here: it always can."""
    return None


def forward(problem: Problem, philox_seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (B, Hq, L, Ev) in q's dtype and lse (B, Hq, L) in float32 (float64 for float64)."""
    inputs = problem.inputs(philox_seed)
    check_pages(inputs, problem.params)
    out, lse = attention(inputs, problem.params)
    if is_length_major(problem.q.shape, problem.q.stride()):
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse


def check_pages(inputs: Inputs, params: AttentionParams) -> None:
    """Where values may be looked at: raises for a number of no page in the block_table, if a query attends to keys
    there by the band and the ranges."""
    q, table = inputs.q, inputs.block_table
    if table is not None and 0 not in q.shape[:3] and may_look(table):
        used = may_attend(q, inputs.seqlen_k, None, inputs.key_ranges, params)
        wide = None if used is None else used.reshape((1,) * (4 - used.dim()) + used.shape)
        check_table(Pages(inputs.k, inputs.v, table), wide)


def attention(inputs: Inputs, params: AttentionParams) -> tuple[Tensor, Tensor]:
    q, k, v, bias, philox_seed = inputs.q, inputs.k, inputs.v, inputs.bias, inputs.philox_seed
    if autocasts(q.device):
        with torch.autocast(q.device.type, enabled=False):
            return attention(inputs, params)
    if inputs.block_table is not None:
        k, v = Pages(k, v, inputs.block_table).gathered()
    batch, num_heads, seqlen_q, _ = q.shape
    k, v = per_query_head(k, num_heads), per_query_head(v, num_heads)
    live = may_attend(q, k.shape[-2], bias, inputs.key_ranges, params)
    q, k, v = attended(live, [q], [k, v])
    x = masked(products(q, k, params), bias, live)
    without_keys = (x == -math.inf).all(-1, keepdim=True)
    x, dead = alive(with_sinks(x, inputs.sinks))
    lse = x.logsumexp(-1).masked_fill(dead.squeeze(-1), -math.inf)
    p = x.softmax(-1)[..., : k.shape[-2]].masked_fill(without_keys, 0.0)
    if philox_seed is not None:
        keep = rng.keep_mask(philox_seed, params.dropout_p, batch, num_heads, seqlen_q, k.shape[-2])
        p = drop(p, keep, params.dropout_p)
    # (Rows without keys are 0 already. Their gradient is to be, too, where it meets p.)
    return (p @ v.to(p.dtype)).masked_fill(without_keys, 0.0).to(q.dtype), lse


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
    live = may_attend(q, k.shape[-2], bias, key_ranges, params, rows)
    return masked(products(q, k, params), bias, live)


def products(q: Tensor, k: Tensor, params: AttentionParams) -> Tensor:
    """x before bias and masks, with as many heads in k as in q."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    x = params.softmax_scale * (q.to(dtype) @ k.to(dtype).mT)
    return params.softcap * torch.tanh(x / params.softcap) if params.softcap else x


def masked(x: Tensor, bias: Tensor | None, live: Tensor | None) -> Tensor:
    """The scores x with a floating bias, -inf where they don't count."""
    if bias is not None and not bits.is_mask(bias):
        if relative.by_distance(bias):
            bias = relative.dense(bias, *x.shape[-2:])
        x = x + bias.to(x.dtype)
    return x if live is None else x.masked_fill(~live, -math.inf)


def with_sinks(x: Tensor, sinks: Tensor | None) -> Tensor:
    """The scores with a column more, of the sinks (B|1, H), if there are any."""
    if sinks is None:
        return x
    return torch.cat([x, sinks[..., None, None].expand(*x.shape[:-1], 1)], -1)


def may_attend(
    q: Tensor,
    seqlen_k: int,
    bias: Tensor | None,
    key_ranges: Tensor | None,
    params: AttentionParams,
    rows: Tensor | None = None,
) -> Tensor | None:
    """bool, to be broadcast to (B, Hq, L, S) and on the device of q: what a bool bias, the band and the ranges leave;
    None: all.

    `rows` says which queries q's are; None: all of them.
    """
    if bias is not None and bits.in_bits(bias):
        bias = bits.bools(bias, seqlen_k)
    masks = (
        bias if bias is not None and bias.dtype == torch.bool else None,
        replicated(params.band.mask(q.shape[-2], seqlen_k, q.device, rows), q),
        None if key_ranges is None else within_ranges(key_ranges, slice(0, seqlen_k)),
    )
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, given) if given else None


def attended(live: Tensor | None, of_queries: list[Any], of_keys: list[Any]) -> list[Any]:
    """Tensors with a row for each query, then those with a row for each key; 0 in the rows that no score counts of.

    Infinity or NaN there would meet weights of 0. None stays None.
    """
    if live is None:
        return [*of_queries, *of_keys]
    dead = [~live.any(-1, keepdim=True)] * len(of_queries) + [~live.any(-2, keepdim=True).mT] * len(of_keys)
    given = [*of_queries, *of_keys]
    return [None if x is None else x.masked_fill(rows, 0.0) for x, rows in zip(given, dead, strict=True)]


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
