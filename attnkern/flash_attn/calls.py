"""What all functions of the layer share: ALiBi as a bias, and one call of `attnkern.attention`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import autograd, relative, rng
from ..api import attention
from ..arguments import Window
from ..problem import Problem
from ..weights import attention_weights


class Alibi(NamedTuple):
    """-slope * |distance of query and key|, to be added to the scores."""

    bias: Tensor  # a table (B|1, H, L + S - 1), or (B|1, H, L|1, S); float32 (float64 for float64 queries)
    too_much: Tensor | None  # (B|1, H, L): what the bias adds to a row's log-sum-exp beyond that

    @property
    def options(self) -> dict[str, Any]:
        """Of `attnkern.attention`."""
        return {"relative_bias" if relative.by_distance(self.bias) else "attn_mask": self.bias}

    @classmethod
    def by_distance(cls, slopes: Tensor, seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> Alibi | None:
        """Of slopes (H,) or (B, H), where the last query stands beside the last key; None where there are no scores."""
        if seqlen_q == 0 or seqlen_k == 0:
            return None
        slopes = slopes.detach().to(torch.promote_types(dtype, torch.float32))
        table = relative.alibi(slopes.reshape(-1), seqlen_q, seqlen_k)
        return cls(table.view(-1, slopes.shape[-1], table.shape[-1]), None)

    @classmethod
    def of(
        cls,
        slopes_q: Tensor,
        slopes_k: Tensor,
        places_q: Tensor,
        places_k: Tensor,
        right: int | None,
        dtype: torch.dtype,
    ) -> Alibi:
        """Of slopes (B|1, H, L|1) for queries and (B|1, H, S|1) for keys, and of their places (B|1, 1, L) and
        (B|1, 1, S) on one line.

        Where no query sees a key behind its own place (`right` is 0), slope * place of the key makes the same weights,
        at one number for each key. It rounds in proportion to the place: by more than float16 does where slope * place
        is above 8192, by more than bfloat16 from eight times as much on.
        """
        exact = torch.promote_types(dtype, torch.float32)
        slopes_q, slopes_k, places_q, places_k = (
            x.detach().to(exact) for x in (slopes_q, slopes_k, places_q, places_k)
        )
        if right == 0 and dtype in (torch.float16, torch.bfloat16):
            return cls((slopes_k * places_k).unsqueeze(-2), slopes_q * places_q)
        distance = (places_q.unsqueeze(-1) - places_k.unsqueeze(-2)).abs()
        return cls(distance * -slopes_q.unsqueeze(-1), None)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    scale: float | None,
    window: Window,
    softcap: float,
    ranges: Tensor | None,
    alibi: Alibi | None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, H, L, Dv), lse (B, H, L) and S_dmask of q (B, H, L, D), k (B, Hk, S, D) and v (B, Hk, S, Dv).

    S_dmask (B, H, L, S) holds the weights in q's dtype, negative where they are dropped; without dropout it is (0,).
    Beside a block_table, k and v are pools of pages as `attention` takes them, and there is no dropout.
    """
    biases = {} if alibi is None else alibi.options
    options: dict[str, Any] = {
        "scale": scale,
        "enable_gqa": True,
        "window": window,
        "alignment": "bottom_right",
        "softcap": softcap,
        "key_ranges": ranges,
    }
    if dropout_p == 0:
        options["block_table"] = block_table
        out, lse = attention(q, k, v, dropout_p=dropout_p, return_lse=True, **biases, **options)
        s_dmask = q.new_empty(0)
    else:
        problem = Problem.from_sdpa(q, k, v, dropout_p=dropout_p, **biases, **options)
        seed = rng.seed_for(problem.q)
        out, lse = autograd.attention(problem, None, True, seed)
        with torch.no_grad():
            bias = biases.get("attn_mask")
            if "relative_bias" in biases:  # S_dmask has an entry for each score anyway
                bias = relative.dense(biases["relative_bias"], q.shape[2], k.shape[2])
            weights = attention_weights(q, k, bias, **options)
            s_dmask = torch.where(rng.keep_mask(seed, problem.params.dropout_p, *weights.shape), weights, -weights)
    if alibi is not None and alibi.too_much is not None:
        lse = lse - alibi.too_much
    return out, lse, s_dmask
