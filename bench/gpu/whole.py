"""Whole outputs and gradients beside FlashAttention's, a stage of `make gpu`: the table checks some rows of a head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attnkern
from attnkern import testing
from bench.cases import select

from .device import Gpu

FACTOR = 4  # of FlashAttention's own error, that results may differ from its results


def measure(device: Gpu, name: str) -> Iterator[dict[str, Any]]:
    """The largest difference from FlashAttention's output and gradients, as a share of what is allowed.

    FlashAttention's own error is that of its first head, against float64; at least half a unit in the last place of the
    largest value.
    """
    case = device.shrunk(select(name)[0])
    inputs = device.inputs(case)
    given = inputs.query, inputs.key, inputs.value
    grad_out = torch.randn_like(inputs.query) / 4

    def results(function: Callable[..., Any]) -> dict[str, Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        out = function(*leaves, is_causal=case.causal)
        grads = torch.autograd.grad(out, leaves, grad_out)
        return {"out": out.detach(), **dict(zip(("query", "key", "value"), grads, strict=True))}

    ours = results(partial(attnkern.scaled_dot_product_attention, backend="cuda"))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = results(scaled_dot_product_attention)
    band = case.keep_mask(device=inputs.query.device)
    query, key, value, grad = (x[:1, :1] for x in (*given, grad_out))
    want = testing.expected(query, key, value, None if band is None else band[None, None], grad_out=grad)
    shares = {}
    for n, flash in theirs.items():
        exact = want[n].exact
        own = max(
            float((flash[:1, :1] - exact).abs().max()), torch.finfo(flash.dtype).eps / 2 * float(exact.abs().max())
        )
        share = float((ours[n].float() - flash.float()).abs().max()) / (FACTOR * own)
        shares[n] = share if bool(ours[n].isfinite().all()) else float("inf")
    worst = max(shares, key=lambda n: shares[n])
    wrong = f"{worst} differs from FlashAttention's by {shares[worst]:.3g} times the allowed"
    told = {"status": "wrong", "message": wrong} if shares[worst] > 1 else {"status": "ok"}
    yield {"allowed_share": shares[worst], "worst": worst, "shares": shares, **told}
