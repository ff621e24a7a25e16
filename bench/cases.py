"""Named attention problems, shared by the tests, the benchmarks and tuning.

A :class:`Case` is a description without tensors: sizes, dtype, band, kind of mask. ``CASES`` lists the named ones
(model shapes, sequence sweeps, decoding, masks), ``select`` finds them by name, tag or glob, and ``Case.inputs``
draws the tensors.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnkern import masks, testing
from attnkern.mask import Mask
from attnkern.relative import alibi

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MASKS = ("none", "bool", "padding", "packed", "cache", "float", "bias", "relative", "alibi")
BLOCKS = ("padding", "packed", "cache")  # of these masks kernels can leave out whole blocks
BY_DISTANCE = ("relative", "alibi")  # a table, given as relative_bias
RANGES = {  # masks with numbers, which attnkern is told as ranges of keys
    "documents": r":[1-9]\d*",
    "prefix": r":\d+",
    "padding": r":\d+",
    "streaming": r":[1-9]\d*\+\d+",
    "packed": r":[1-9]\d*-\d+",
}


@dataclass(frozen=True)
class Case:
    """One attention problem.

    ``mask`` is one of MASKS: "bool" (1, 1, L, S) with a third of the entries hidden, "padding" (B, 1, 1, S) bool, the
    first half to all of the keys, "packed" (1, 1, L, S) bool, four causal sequences side by side, "cache" (1, 1, 1, S)
    bool, the first eighth of the keys, as in a cache of fixed size, "float" (1, 1, L, S) additive, "bias"
    (1, Hq, L, S) additive and learned (backward gives its gradient), "relative" a learned table (Hq, L + S - 1) by
    distance, as T5's, "alibi" such a table of ALiBi's slopes.
    Or it is a kind in RANGES with numbers, and there is no tensor: "documents:700", documents of so many tokens side by
    side; "prefix:512", so many keys for all, and beyond them those up to the query's own place; "padding:50", sequences
    of different lengths, which are so many percent of the keys on average; "streaming:256+4", the query's own key, 255
    to its left and the first 4; "packed:20-50", sequences of such lengths, drawn at random, in place of a padded batch.
    ``layout`` "bhld" is contiguous, "blhd" gives transposed views of (B, L, H, D) memory, as a projection leaves them.
    ``window`` and ``alignment`` are those of :func:`attnkern.attention`. ``sinks``: whether it has any, learned.
    """

    name: str
    seqlen_q: int
    seqlen_k: int
    batch: int = 1
    heads_q: int = 8
    heads_k: int = 8
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "fp32"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    alignment: str = "top_left"
    mask: str = "none"
    dropout: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    layout: str = "bhld"
    forward_only: bool = False
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = (self.batch, self.heads_q, self.heads_k, self.seqlen_q, self.seqlen_k, self.head_dim, self.head_dim_v)
        if min(sizes) < 1:
            raise ValueError(f"case {self.name}: every size must be at least 1, got {sizes}")
        if self.heads_q % self.heads_k:
            raise ValueError(f"case {self.name}: heads_q={self.heads_q} is no multiple of heads_k={self.heads_k}")
        for value, allowed, field in (
            (self.dtype, tuple(DTYPES), "dtype"),
            ("none" if self.ranged_kind else self.mask, (*MASKS, *(f"{kind}:..." for kind in RANGES)), "mask"),
            (self.layout, ("bhld", "blhd"), "layout"),
            (self.alignment, ("top_left", "bottom_right"), "alignment"),
        ):
            if value not in allowed:
                raise ValueError(f"case {self.name}: {field}={value!r} is not one of {', '.join(allowed)}")
        other_lengths = self.seqlen_q != self.seqlen_k and self.ranged_kind != "padding"
        if self.ranged_kind and (other_lengths or self.window is not None):
            raise ValueError(f"case {self.name}: mask={self.mask!r} needs as many keys as queries, and no window")
        for field, number, most in (("dropout", self.dropout, 1), ("softcap", self.softcap, math.inf)):
            if not 0 <= number <= most:
                raise ValueError(f"case {self.name}: {field} must be from 0 to {most:g}, got {number:g}")
        if self.sinks and self.mask != "none":
            raise ValueError(f"case {self.name}: sinks need mask='none', got {self.mask!r}")

    @property
    def ranged_kind(self) -> str:
        """The kind of a mask in RANGES; "" for others."""
        kind, colon, numbers = self.mask.partition(":")
        return kind if kind in RANGES and re.fullmatch(RANGES[kind], colon + numbers) else ""

    @property
    def lengths(self) -> list[int]:
        """Of documents, packed and padded sequences."""
        numbers = [int(n) for n in re.findall(r"\d+", self.mask)]
        if self.ranged_kind == "padding":
            mean = min(numbers[0], 100) / 100
            spread = min(mean, 1 - mean)
            places = [(2 * n + 1) / self.batch - 1 for n in range(self.batch)]
            return [round((mean + place * spread) * self.seqlen_k) for place in places]
        least, most = numbers[0], numbers[-1]
        draw, ends = random.Random(0), [0]
        while ends[-1] < self.seqlen_q:
            ends.append(min(self.seqlen_q, ends[-1] + draw.randint(least, max(least, most))))
        return [end - begin for begin, end in itertools.pairwise(ends)]

    @property
    def ends(self) -> torch.Tensor:
        """cu_seqlens of `lengths`: int32, 0 the first."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)

    @property
    def ranged(self) -> Mask | None:
        """The mask of a kind in RANGES, with the causal one in it; else None."""
        return _ranged(self) if self.ranged_kind else None

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def shape(self) -> str:
        """The sizes on one short line, e.g. ``1x32/8x1024x128`` (batch, heads, length, head_dim)."""
        heads = f"{self.heads_q}" if self.heads_q == self.heads_k else f"{self.heads_q}/{self.heads_k}"
        length = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}/{self.seqlen_k}"
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return f"{self.batch}x{heads}x{length}x{dim}"

    @property
    def features(self) -> str:
        """What is special, in words: ``causal, window 256/0, bias mask``."""
        words = ["causal"] * self.causal
        if self.window is not None:
            words.append("window " + "/".join("" if bound is None else str(bound) for bound in self.window))
        words += [self.alignment.replace("_", "-")] * (self.alignment != "top_left")
        words += [f"{self.mask} mask"] * (self.mask != "none") + [self.layout] * (self.layout != "bhld")
        words += [f"dropout {self.dropout:g}"] * bool(self.dropout) + [f"softcap {self.softcap:g}"] * bool(self.softcap)
        words += ["sinks"] * self.sinks
        return ", ".join(words)

    @property
    def distances(self) -> int:
        """From a query to a key, how many there are."""
        return self.seqlen_q + self.seqlen_k - 1

    @property
    def slopes(self) -> torch.Tensor:
        """ALiBi's, (Hq,) in float64: 2^(-8 / Hq) and its powers."""
        return 2.0 ** (torch.arange(1, self.heads_q + 1, dtype=torch.float64) * (-8 / self.heads_q))

    @property
    def grouped(self) -> bool:
        """Query heads share key or value heads."""
        return self.heads_q != self.heads_k

    @property
    def learned(self) -> tuple[str, ...]:
        """Inputs beside query, key and value that have a gradient."""
        bias = {"bias": ("attn_mask",), "relative": ("relative_bias",)}.get(self.mask, ())
        return bias + ("sinks",) * self.sinks

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of :func:`attnkern.attention` that are not its defaults."""
        given = {
            "dropout_p": (self.dropout, 0.0),
            "is_causal": (self.causal, False),
            "scale": (self.scale, None),
            "enable_gqa": (self.grouped, False),
            "window": (self.window, None),
            "alignment": (self.alignment, "top_left"),
            "softcap": (self.softcap, 0.0),
        }
        found = {name: value for name, (value, default) in given.items() if value != default}
        return found if self.ranged is None else {**found, "key_ranges": self.ranged.ranges}

    @property
    def band(self) -> tuple[int, int, int] | None:
        """(left, right, offset): entry (i, j) is kept iff -left <= j - i - offset <= right. None: every entry is."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        if left is None and right is None:
            return None
        far = self.seqlen_q + self.seqlen_k
        offset = self.seqlen_k - self.seqlen_q if self.alignment == "bottom_right" else 0
        return (far if left is None else left, far if right is None else right, offset)

    def attended_entries(self) -> float:
        """Scores of one head inside the band, or let through by a mask in BLOCKS or RANGES; the batch's mean.

        Other masks hardly leave a block of scores empty: they don't count.
        """
        if self.ranged is not None:
            return int(self.ranged.live) / self.ranged.shape[0]
        if self.mask in BLOCKS:
            band = self.keep_mask()
            mask = self.block_mask() if band is None else self.block_mask() & band
            return mask.expand(self.batch, 1, self.seqlen_q, self.seqlen_k).sum().item() / self.batch
        if self.band is None:
            return self.seqlen_q * self.seqlen_k
        left, right, offset = self.band
        rows = torch.arange(self.seqlen_q) + offset
        first = (rows - left).clamp(min=0)
        last = (rows + right).clamp(max=self.seqlen_k - 1)
        return int((last - first + 1).clamp(min=0).sum())

    @property
    def live_share(self) -> float:
        """`attended_entries` over all L * S."""
        return self.attended_entries() / (self.seqlen_q * self.seqlen_k)

    def flops(self, pass_name: str) -> float:
        """Multiplications and additions of the matrix products; backward recomputes the scores (five products)."""
        pairs = 2.0 * self.batch * self.heads_q * self.attended_entries()
        forward = pairs * (self.head_dim + self.head_dim_v)
        backward = pairs * (3 * self.head_dim + 2 * self.head_dim_v)
        return _of_pass(pass_name, forward, backward)

    def bytes_moved(self, pass_name: str) -> float:
        """Bytes of every input that is needed and every output, each counted once: the least traffic to memory."""
        query = self.batch * self.heads_q * self.seqlen_q
        key = needed = self.batch * self.heads_k * self.seqlen_k
        if self.mask in BLOCKS:
            keys = self.block_mask().any(-2).expand(self.batch, 1, self.seqlen_k)
            needed = self.heads_k * int(keys.sum())
        elif self.ranged_kind == "padding":
            needed = self.heads_k * sum(self.lengths)
        dims = self.head_dim + self.head_dim_v
        mask = {"float": 1, "bias": self.heads_q}.get(self.mask, 0) * self.seqlen_q * self.seqlen_k
        if self.mask in BY_DISTANCE:
            mask = self.heads_q * self.distances
        forward = (query + needed) * dims + mask
        backward = query * 2 * (self.head_dim + self.head_dim_v) + (needed + key) * dims + 2 * mask
        return self.torch_dtype.itemsize * _of_pass(pass_name, forward, backward)

    def keep_mask(self, rows: torch.Tensor | None = None, device: str | torch.device = "cpu") -> torch.Tensor | None:
        """The band as a bool (rows, S) mask, True = attend, for implementations that know only dense masks.

        Of a mask in RANGES, with the band: (B|1, 1, rows, S).
        """
        if self.ranged is not None:
            dense = self.ranged.to(device).to_dense()
            return dense if rows is None else dense[:, :, rows.to(device)]
        if self.band is None:
            return None
        left, right, offset = self.band
        i = torch.arange(self.seqlen_q, device=device) if rows is None else rows.to(device)
        distance = torch.arange(self.seqlen_k, device=device) - i[:, None] - offset
        return (distance >= -left) & (distance <= right)

    def block_mask(self) -> torch.Tensor:
        """The bool mask of a case whose mask is in BLOCKS: the same for every seed."""
        keys = torch.arange(self.seqlen_k)
        if self.mask == "cache":
            return (keys * 8 < self.seqlen_k)[None, None, None]
        if self.mask == "padding":
            kept = (torch.arange(self.batch) + 0.5) / self.batch / 2 + 0.5
            return (keys < kept[:, None] * self.seqlen_k)[:, None, None]
        keys, queries = keys * self.seqlen_q, torch.arange(self.seqlen_q)[:, None] * self.seqlen_k
        sequence = self.seqlen_q * self.seqlen_k / 4
        return ((keys <= queries) & (keys // sequence == queries // sequence))[None, None]

    def inputs(self, device: str | torch.device = "cpu", seed: int = 0) -> testing.Inputs:
        """Standard normal query, key, value and the mask, the same for a seed on every device."""
        kinds = {"bool": ("bool", "11LS"), "float": ("float", "11LS"), "bias": ("float", "1HLS")}
        layout = {"bhld": "contiguous", "blhd": "blhd"}[self.layout]
        mask = kinds.get(self.mask)
        inputs = self.drawn(dtype=self.torch_dtype, device=device, layout=layout, mask=mask, seed=seed)
        if self.mask in BLOCKS:
            inputs = replace(inputs, attn_mask=self.block_mask().to(device))
        if self.mask == "relative":
            inputs = inputs.with_relative_bias(self.heads_q, self.distances, self.torch_dtype, seed)
        if self.mask == "alibi":
            inputs = replace(inputs, relative_bias=self.alibi_table(device))
        if self.sinks:
            inputs = inputs.with_sinks("H", torch.promote_types(self.torch_dtype, torch.float32), seed)
        return inputs

    def alibi_table(self, device: str | torch.device) -> torch.Tensor:
        """(Hq, L + S - 1) in the case's dtype, as a model of that dtype adds it to its scores."""
        return alibi(self.slopes, self.seqlen_q, self.seqlen_k).to(device, self.torch_dtype)

    def drawn(self, **kinds: Any) -> testing.Inputs:
        """:func:`attnkern.testing.make_inputs` of these sizes."""
        sizes = (self.batch, self.heads_q, self.seqlen_q, self.seqlen_k, self.head_dim, self.head_dim_v)
        return testing.make_inputs(*sizes, heads_k=self.heads_k, **kinds)


@functools.lru_cache(maxsize=16)
def _ranged(case: Case) -> Mask:
    length, kind = case.seqlen_k, case.ranged_kind
    numbers = [int(n) for n in re.findall(r"\d+", case.mask)]
    if kind in ("documents", "packed"):
        return masks.packed(case.ends, is_causal=case.causal)
    if kind == "padding":
        mask = masks.padding(case.lengths, case.seqlen_q, length)
    elif kind == "prefix":
        mask = masks.prefix_lm(min(numbers[0], length), length)
    else:
        mask = masks.sliding_window(numbers[0] - 1, 0, length, sinks=numbers[1])
    return mask & masks.causal(length) if case.causal else mask


def _of_pass(pass_name: str, forward: float, backward: float) -> float:
    parts = {"forward": (1, 0), "forward-grad": (1, 0), "backward": (0, 1), "both": (1, 1)}[pass_name]
    return parts[0] * forward + parts[1] * backward


def case(
    name: str, length: int, keys: int | None = None, *, heads: int | tuple[int, int] = 8, dim: int = 64, **more: Any
) -> Case:
    """A Case in short form: ``keys`` defaults to ``length``, ``heads`` is a number or (query heads, key heads)."""
    heads_q, heads_k = heads if isinstance(heads, tuple) else (heads, heads)
    return Case(
        name=name,
        seqlen_q=length,
        seqlen_k=length if keys is None else keys,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=dim,
        **{"head_dim_v": dim, **more},
    )


def _models() -> Iterable[Case]:
    # One attention layer each, as published; batches small enough for a CPU.
    model: dict[str, Any] = {"dtype": "bf16", "tags": ("models",)}
    yield case("llama3-8b", 1024, heads=(32, 8), dim=128, causal=True, **model)
    yield case("gpt2", 1024, heads=12, causal=True, **{**model, "dtype": "fp32"})
    yield case("bert-base", 512, batch=4, heads=12, mask="padding", **{**model, "dtype": "fp32"})
    yield case("bert-base-dropout", 128, batch=4, heads=12, dropout=0.1, **{**model, "dtype": "fp32"})
    yield case("vit-b16", 197, batch=8, heads=12, layout="blhd", **{**model, "dtype": "fp32"})
    yield case("vit-h14", 257, batch=4, heads=16, dim=80, layout="blhd", **model)
    yield case("whisper-encoder", 1500, heads=20, **model)
    yield case("whisper-cross", 448, 1500, heads=20, **model)
    yield case("t5-bias", 512, heads=12, mask="bias", scale=1.0, **{**model, "dtype": "fp32"})
    yield case("mistral-window", 2048, heads=(32, 8), dim=128, causal=True, window=(511, 0), **model)
    yield case("gemma2-softcap", 512, heads=(8, 4), dim=256, causal=True, softcap=50.0, **model)
    yield case("deepseek-mla", 512, heads=16, dim=192, head_dim_v=128, causal=True, **model)
    yield case("sd15-self", 1024, batch=2, heads=8, dim=80, layout="blhd", **model)
    yield case("sd15-cross", 1024, 77, batch=2, heads=8, dim=80, layout="blhd", **model)
    yield case("swin-window", 49, batch=64, heads=4, dim=32, mask="bias", **{**model, "dtype": "fp32"})


def _decode() -> Iterable[Case]:
    for dtype in ("fp32", "bf16"):
        more: dict[str, Any] = {"dtype": dtype, "forward_only": True, "tags": ("decode",)}
        yield case(f"decode-mha-4k-{dtype}", 1, 4096, heads=8, dim=128, **more)
        yield case(f"decode-mha-64k-{dtype}", 1, 65536, heads=1, dim=128, **more)
        yield case(f"decode-llama-4k-{dtype}", 1, 4096, heads=(32, 8), dim=128, **more)
        yield case(f"decode-mqa-4k-{dtype}", 1, 4096, heads=(48, 1), dim=128, **more)
        yield case(f"decode-batch-512-{dtype}", 1, 512, batch=32, **more)
        yield case(f"decode-cache-16k-{dtype}", 1, 16384, heads=(32, 8), dim=128, mask="cache", **more)
        more |= {"causal": True, "alignment": "bottom_right"}
        yield case(f"decode-speculative-4k-{dtype}", 8, 4096, heads=(32, 8), dim=128, **more)


def _masks() -> Iterable[Case]:
    for dtype in ("fp32", "bf16"):
        more: dict[str, Any] = {"dtype": dtype, "heads": 4, "tags": ("masks",)}
        for mask in ("bool", "padding", "packed", "float", "bias"):
            yield case(f"mask-{mask}-{dtype}", 1024, mask=mask, **more)
        yield case(f"window-256-{dtype}", 4096, **{**more, "heads": 1}, causal=True, window=(255, 0))
        yield case(f"bottom-right-{dtype}", 512, 1024, causal=True, alignment="bottom_right", **more)


def _sinks() -> Iterable[Case]:
    """gpt-oss's layers, whole and with a window in turns."""
    for dtype in ("fp32", "bf16"):
        more: dict[str, Any] = {"heads": (64, 8), "sinks": True, "dtype": dtype, "tags": ("sinks",)}
        for length in (512, 2048):
            yield case(f"sinks-causal-{length}-{dtype}", length, causal=True, **more)
            yield case(f"sinks-window-128-{length}-{dtype}", length, causal=True, window=(127, 0), **more)
        yield case(f"sinks-decode-4k-{dtype}", 1, 4096, forward_only=True, **more)


def _ranges() -> Iterable[Case]:
    """What a mask leaves out must not cost."""
    for dtype in ("fp32", "bf16"):
        for tag, length, batch, kinds in (
            ("documents", 4096, 1, (256, 512, 700, 1024, 2048)),
            ("prefix", 4096, 1, (512, 1024, 2048, 3072)),
            ("padding", 1024, 8, (25, 50, 75)),
        ):
            more: dict[str, Any] = {"batch": batch, "dtype": dtype, "tags": (tag,)}
            if tag != "padding":
                yield case(f"{tag}-causal-{dtype}", length, causal=True, **more)
            for n in kinds:
                yield case(f"{tag}-{n}-{dtype}", length, mask=f"{tag}:{n}", causal=tag == "documents", **more)
        for length in (2**n for n in range(11, 16)):
            more = {"heads": 1, "dtype": dtype, "tags": ("streaming",)}
            yield case(f"streaming-{length}-{dtype}", length, mask="streaming:256+4", **more)
        # About 400 sequences of an encoder, and 15 of a decoder.
        more = {"dtype": dtype, "layout": "blhd", "tags": ("packed",)}
        yield case(f"packed-20-50-{dtype}", 14000, mask="packed:20-50", **more)
        yield case(f"packed-100-1000-{dtype}", 8192, mask="packed:100-1000", causal=True, **more)
    # A server's step: 32 sequences of 128 to 8064 tokens; and one that checks drafts of 4 tokens.
    more = {"heads": (32, 8), "dim": 128, "mask": "padding:50", "forward_only": True, "tags": ("pages",)}
    yield case("pages-decode-32x8k-bf16", 1, 8192, batch=32, dtype="bf16", **more)
    for dtype in ("fp32", "bf16"):
        yield case(f"pages-decode-16x4k-{dtype}", 1, 4096, batch=16, dtype=dtype, **more)
        yield case(f"pages-drafts-16x4k-{dtype}", 4, 4096, batch=16, dtype=dtype, **more)


def sweep(
    prefix: str,
    lengths: Sequence[int],
    tags: tuple[str, ...],
    *,
    tokens: int,
    dtypes: Sequence[str] = ("fp32", "bf16"),
    dims: Sequence[int] = (64, 128),
) -> Iterable[Case]:
    """Cases over length with batch x heads x length constant, so that a row's work grows linearly with the length."""
    for dtype in dtypes:
        for dim in dims:
            for causal in (False, True):
                for length in lengths:
                    problems = max(1, tokens // length)
                    heads = math.gcd(problems, 8)
                    yield case(
                        f"{prefix}-{dtype}-d{dim}-{'causal' if causal else 'full'}-{length}",
                        length,
                        batch=problems // heads,
                        heads=heads,
                        dim=dim,
                        dtype=dtype,
                        causal=causal,
                        tags=tags,
                    )


def _relative() -> Iterable[Case]:
    more: dict[str, Any] = {"tags": ("relative",)}
    for dtype in ("fp32", "bf16"):
        yield case(f"relative-t5-{dtype}", 2048, mask="relative", dtype=dtype, **more)
        yield case(f"relative-alibi-{dtype}", 4096, mask="alibi", causal=True, dtype=dtype, **more)


def _sweeps() -> Iterable[Case]:
    yield from sweep("sweep", [2**n for n in range(7, 13)], ("quick-sweep",), tokens=8192)
    yield from sweep("long", [8192, 16384, 32768], ("long-sweep",), tokens=32768)
    # The usual GPU sweep: 16k tokens, a model width of 2048.
    for dim in (64, 128, 256):
        for causal in (False, True):
            for length in (2**n for n in range(9, 15)):
                kind = "causal" if causal else "full"
                yield case(
                    f"gpu-bf16-d{dim}-{kind}-{length}",
                    length,
                    batch=16384 // length,
                    heads=2048 // dim,
                    dim=dim,
                    dtype="bf16",
                    causal=causal,
                    tags=("gpu-sweep",),
                )
    gpu: dict[str, Any] = {"heads": 16, "dim": 128, "dtype": "bf16", "tags": ("gpu-features",)}
    yield case("gpu-window-1024", 32768, **gpu, causal=True, window=(1023, 0))
    yield case("gpu-bias", 4096, **gpu, mask="bias")
    yield case("gpu-d512", 4096, **{**gpu, "heads": 4, "dim": 512}, causal=True)
    yield case("gpu-fp32", 4096, **{**gpu, "dtype": "fp32"}, causal=True)
    gpu |= {"tags": ("gpu-ranges",)}
    yield case("gpu-documents-1024", 16384, **gpu, causal=True, mask="documents:1024")
    yield case("gpu-streaming-1024", 32768, **gpu, mask="streaming:1024+4")
    yield case("gpu-padding-50", 4096, **gpu, batch=4, mask="padding:50")
    gpu |= {"tags": ("gpu-features",)}
    for dim in (64, 128, 256):
        for length in (4096, 16384, 65536):
            name = f"gpu-decode-d{dim}-{length // 1024}k"
            yield case(name, 1, length, **{**gpu, "heads": (32, 8), "dim": dim}, batch=4, forward_only=True)
    for n in range(6, 16):
        yield case(f"growth-{2**n}", 2**n, heads=1, forward_only=True, tags=("growth",))
    for dtype in ("fp32", "bf16"):
        yield case(f"launch-{dtype}", 64, heads=1, dtype=dtype, tags=("launch-overhead",))
    for dtype in ("fp32", "bf16"):
        # Small enough for a smoke test, odd enough to reach every tail.
        yield case(f"smoke-{dtype}", 33, 47, heads=(4, 2), dim=24, dtype=dtype, causal=True, tags=("smoke",))


CASES: tuple[Case, ...] = (*_models(), *_decode(), *_masks(), *_sinks(), *_ranges(), *_relative(), *_sweeps())


def select(pattern: str, cases: Sequence[Case] = CASES) -> list[Case]:
    """The cases matching a comma-separated list of names, tags and globs (``llama*,decode``), once each, in order.

    Raises ValueError naming the item that matches nothing.
    """
    chosen: set[str] = set()
    for item in filter(None, (part.strip() for part in pattern.split(","))):
        found = {c.name for c in cases if item in c.tags or fnmatch.fnmatchcase(c.name, item)}
        if not found:
            tags = sorted({tag for c in cases for tag in c.tags})
            raise ValueError(f"{item!r} is no case, tag or matching glob; tags: {', '.join(tags)}")
        chosen |= found
    if not chosen:
        raise ValueError("no case is named")
    return [c for c in cases if c.name in chosen]


def override(case: Case, **fields: Any) -> Case:
    """A copy with other fields, named after them. Sizes that were equal (L and S, E and Ev, heads) stay equal."""
    changed = {key: value for key, value in fields.items() if getattr(case, key) != value}
    if not changed:
        return case
    label = ",".join(f"{key}={value}" for key, value in changed.items())
    for given, other in (("seqlen_q", "seqlen_k"), ("head_dim", "head_dim_v"), ("heads_q", "heads_k")):
        if given in changed and other not in fields and getattr(case, given) == getattr(case, other):
            changed[other] = changed[given]
    return replace(case, name=f"{case.name}[{label}]", **changed)
