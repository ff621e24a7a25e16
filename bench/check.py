"""The error of a result against float64, by the project's one rule (attnkern.testing), at a cost below the timing's.

A long problem is checked on a sample: whole groups of heads (query heads that share a key head) and, where one group
is still too large, some of its query rows. The checked call then gets a ``grad_out`` that is zero on the other rows, so
that the gradients of keys and values are sums over the sampled rows alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkern import rng, testing
from bench.cases import Case

MAX_ENTRIES = 1 << 19  # scores that the float64 reference holds at once


@dataclass(frozen=True)
class Error:
    """Of one row: the largest absolute error, the share of the allowed (<= 1 passes), the relative rms by tensor."""

    max_abs: float
    allowed_share: float
    worst: str  # the tensor with the largest share
    rms: dict[str, float]

    @property
    def ok(self) -> bool:
        return self.allowed_share <= 1.0


class Checker:
    """The expected results of one case. ``grad_out`` is the gradient that a checked call must get, ``grad_timed`` that
    of a timed call, without zeros."""

    def __init__(self, case: Case, inputs: testing.Inputs, seed: int = 0) -> None:
        self.case, self.inputs, self.seed = case, inputs, seed
        pick = random.Random(seed)
        group = case.heads_q // case.heads_k
        entries = group * case.seqlen_q * case.seqlen_k
        fit = max(1, MAX_ENTRIES // entries)
        if case.learned:  # whose gradient sums over the batch
            batch, heads = case.batch, min(case.heads_k, max(1, fit // case.batch))
        else:
            heads = min(case.heads_k, fit)
            batch = min(case.batch, max(1, fit // heads))
        self.batch = _index(pick, case.batch, batch)
        self.heads_k = _index(pick, case.heads_k, heads)
        self.heads_q = (self.heads_k[:, None] * group + torch.arange(group)).flatten()
        rows = max(16, MAX_ENTRIES // (group * case.seqlen_k))
        if case.mask == "relative":  # some rows alone are no problem by distance
            rows = case.seqlen_q
        self.rows = _index(pick, case.seqlen_q, rows)
        device = inputs.query.device
        generator = torch.Generator(device).manual_seed(seed + 1)
        shape = (case.batch, case.heads_q, case.seqlen_q, case.head_dim_v)
        # A quarter of a normal keeps float16 gradients of long rows away from overflow.
        drawn = torch.randn(shape, generator=generator, device=device) * 0.25
        self.grad_out = self.grad_timed = drawn.to(inputs.query)
        if len(self.rows) < case.seqlen_q:
            kept = torch.zeros(case.seqlen_q, 1, dtype=torch.bool, device=device)
            kept[self.rows.to(device)] = True
            self.grad_out = self.grad_timed * kept
        self._expected: dict[tuple[bool, str], dict[str, testing.Expected]] = {}

    def _sample(self, name: str, x: Tensor) -> Tensor:
        """The sampled part of a tensor with the named one's shape."""
        if name == "relative_bias":
            return x.index_select(0, self.heads_q.to(x.device))
        heads = self.heads_k if name in ("key", "value") else self.heads_q
        if name == "sinks":
            return x[heads.to(x.device)]
        for dim, index in ((0, self.batch), (1, heads), (2, None if name in ("key", "value") else self.rows)):
            if index is not None and x.size(dim) > 1 and len(index) < x.size(dim):
                x = x.index_select(dim, index.to(x.device))
        return x

    def expected(self, gradients: bool, provider: str) -> dict[str, testing.Expected]:
        """Float64 and torch's own maths on the sample. With dropout they replay what the provider drops."""
        key = (gradients, provider if self.case.dropout else "")
        if key not in self._expected:
            case, inputs = self.case, self.inputs
            mask = None if inputs.attn_mask is None else self._sample("attn_mask", inputs.attn_mask)
            table = None if inputs.relative_bias is None else self._sample("relative_bias", inputs.relative_bias)
            if table is not None and case.mask == "alibi":
                mask = testing.by_distance(table, None, case.seqlen_q, case.seqlen_k)[None, :, self.rows]
                table = None
            band = case.keep_mask(self.rows, inputs.query.device)
            if mask is not None and band is not None:
                if mask.dtype == torch.bool:
                    mask = mask & band
                else:
                    mask = mask.masked_fill(~band, -math.inf)
            elif band is not None:
                mask = self._sample("attn_mask", band[(None,) * (4 - band.dim())])
            keep = self._dropout_keep(provider) if case.dropout else None
            result = testing.expected(
                self._sample("query", inputs.query),
                self._sample("key", inputs.key),
                self._sample("value", inputs.value),
                mask,
                sinks=None if inputs.sinks is None else self._sample("sinks", inputs.sinks),
                grad_out=self._sample("out", self.grad_out) if gradients else None,
                keep=keep,
                dropout_p=case.dropout,
                scale=case.scale,
                enable_gqa=case.heads_q != case.heads_k,
                softcap=case.softcap or None,
                relative_bias=table,
            )
            self._expected[key] = result
        return self._expected[key]

    def error(self, results: dict[str, Tensor], provider: str) -> Error:
        """Holds results (named as attnkern.testing.expected names them) to the rule."""
        expected = self.expected(set(results) != {"out"}, provider)
        max_abs, share, worst, rms = 0.0, -1.0, "", {}
        for name, result in results.items():
            want = expected[name]
            actual = self._sample(name, result)
            factor = testing.FORWARD_FACTOR if name == "out" else testing.GRADIENT_FACTOR
            e = testing.errors(actual, want.exact, want.baseline, factor=factor, unit=want.unit)
            ratio = e.ratio if bool(result.isfinite().all()) else math.inf  # also where nothing was sampled
            max_abs = max(max_abs, e.error)
            if ratio > share:
                share, worst = ratio, name
            size = want.exact.square().mean().sqrt()
            rms[name] = float((actual.double() - want.exact).square().mean().sqrt() / size) if size else 0.0
        return Error(max_abs, share, worst, rms)

    def seed_call(self) -> None:
        """To be called right before a checked call: dropout then drops what ``expected`` replays."""
        torch.manual_seed(self.seed)

    def _dropout_keep(self, provider: str) -> Tensor:
        case, query = self.case, self.inputs.query
        sizes = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_k)
        self.seed_call()
        if not provider.startswith("sdpa"):
            keep = testing.philox_keep(rng.draw_seed(query.device), *sizes, case.dropout, query.device)
        else:
            # With the identity as values torch returns the weights it kept.
            identity = torch.eye(case.seqlen_k, dtype=query.dtype, device=query.device)
            weights = torch.nn.functional.scaled_dot_product_attention(
                query,
                self.inputs.key,
                identity.expand(case.batch, case.heads_k, -1, -1),
                dropout_p=case.dropout,
                is_causal=case.causal,
                enable_gqa=case.heads_q != case.heads_k,
            )
            # Torch divides by what 1 - p is, `testing` by what the steps of our bits make of it.
            steps = 1 - round(case.dropout * 65536) / 65536
            keep = (weights != 0).double() * (steps / (1 - case.dropout))
        return self._sample("out", keep)


def _index(pick: random.Random, size: int, count: int) -> Tensor:
    """At most ``count`` sorted indices below ``size``, the first and the last among them."""
    if count >= size:
        return torch.arange(size)
    ends = [0, size - 1][:count]
    return torch.tensor(sorted({*ends, *pick.sample(range(1, size - 1), count - len(ends))}))
