"""The calls that tests check: one table, from which each test takes those with its tag."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from attnkern import testing
from bench.cases import DTYPES, Case

ALL = (80, 90, 120)
LAST: dict[str, Any] = {"causal": True, "alignment": "bottom_right"}


def documents(seqlen_q: int, seqlen_k: int, *, size: int = 24, is_causal: bool = True) -> torch.Tensor:
    """Documents of `size` keys, and of as large a share of the queries."""
    row = torch.arange(seqlen_q)
    place = (row + 1) * seqlen_k // seqlen_q - 1
    begin = place // size * size
    end = place + 1 if is_causal else (begin + size).clamp(max=seqlen_k)
    return torch.stack([begin, end], -1).view(seqlen_q, 1, 2)


def window_and_sinks(seqlen_q: int, seqlen_k: int, *, left: int = 20, sinks: int = 3) -> torch.Tensor:
    place = torch.arange(seqlen_q) + seqlen_k - seqlen_q
    sink = torch.stack([torch.zeros_like(place), (place + 1).clamp(max=sinks)], -1)
    return torch.stack([sink, torch.stack([place - left, place + 1], -1)], -2)


def padding(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([[0, n] for n in lengths]).view(-1, 1, 1, 1, 2)


def anything(batch: int, heads: int, rows: int, ranges: int, seqlen_k: int) -> torch.Tensor:
    """Ends in front of the first key and behind the last, ranges that overlap or are empty, one in eight backwards."""
    shape = batch, heads, rows, ranges
    begin = torch.randint(-5, max(1, seqlen_k - 9), shape)
    end = begin + torch.randint(10, seqlen_k + 20, shape)
    turned = torch.randint(8, shape) == 0
    return torch.stack([torch.where(turned, end, begin), torch.where(turned, begin, end)], -1)


# Key ranges by the lengths of query and key; "anything" is for two batch elements and four heads, as is the next.
KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "documents": lambda lq, lk: documents(lq, lk),
    "whole documents": lambda lq, lk: documents(lq, lk, size=90, is_causal=False),
    "window and sinks": window_and_sinks,
    "padding": lambda lq, lk: padding([lk // 2, lk]),
    "nothing": lambda lq, lk: torch.tensor([[3, 3]]).expand(lq, 1, 2),
    "everything": lambda lq, lk: torch.tensor([[-7, 2**31 - 1]]).expand(1, 1, 2),
    "anything": lambda lq, lk: anything(2, 4, lq, 2, lk),
    "one range of a head": lambda lq, lk: anything(1, 4, 1, 1, lk),
    "one range of a row": lambda lq, lk: anything(1, 1, lq, 1, lk),
}


@dataclasses.dataclass(frozen=True)
class Call(Case):
    """A case of more kinds than the benchmark has; its name is its own among those of a tag.

    ``mask`` is "none" or a kind and a shape of :func:`attnkern.testing.make_mask`, and a dtype that isn't query's
    ("float BHLS", "holes 1HLS fp32"). ``layout`` is "bhld" or one of ``testing.LAYOUTS``, or one each for query, key
    and value ("stepped padded e_major").
    """

    heads_v: int | None = None  # None: as many as heads_k
    score: float = 0.0  # what the scores lie around
    ranges: str = ""  # of KINDS, or what `testing.Inputs.with_ranges` takes: kind, shape and number of random ones
    sinks: str = ""  # "H" or "BH", as `testing.Inputs.with_sinks` takes it: float32, or float64
    relative: str = ""  # "H" or "1", and how many numbers by distance ("": L + S - 1)
    poison: float | None = None  # what all that no query attends to holds, and queries without a key
    gpus: tuple[int, ...] = (80, 90)  # compute capabilities that Triton's kernels are compiled for

    def __post_init__(self) -> None:
        """Any size will do, also 0; `make_inputs` refuses the rest."""

    @property
    def grouped(self) -> bool:
        """Query heads share key or value heads."""
        return self.heads_q != self.heads_k or self.heads_v not in (None, self.heads_q)

    def inputs(
        self, device: str | torch.device = "cpu", seed: int | None = None, dtype: torch.dtype | None = None
    ) -> testing.Inputs:
        """Random ones, from torch's generator where there is no seed; ``dtype`` in place of the call's own."""
        given: dict[str, Any] = {"heads_v": self.heads_v, "dtype": dtype or self.torch_dtype}
        given["layout"] = tuple((self.layout.replace("bhld", "contiguous").split() * 3)[:3])
        if self.mask != "none":
            kind, shape, *other = self.mask.split()
            given |= {"mask": (kind, shape), "mask_dtype": DTYPES[other[0]] if other else None}
        inputs = self.drawn(device=device, seed=seed, **given)
        inputs = self._moved(inputs) if self.score else inputs
        if self.ranges in KINDS:
            inputs = dataclasses.replace(inputs, key_ranges=KINDS[self.ranges](self.seqlen_q, self.seqlen_k).to(device))
        elif self.ranges:
            kind, shape, count = self.ranges.split()
            inputs = inputs.with_ranges(kind, shape, int(count), torch.int32, seed or 0)
        if self.relative:
            heads, *entries = self.relative.split()
            count = int(entries[0]) if entries else self.seqlen_q + self.seqlen_k - 1
            drawn = int(torch.randint(2**31, ())) if seed is None else seed
            inputs = inputs.with_relative_bias(self.heads_q if heads == "H" else 1, count, inputs.query.dtype, drawn)
        if self.sinks:
            exact = torch.promote_types(inputs.query.dtype, torch.float32)
            inputs = inputs.with_sinks(self.sinks, exact, int(torch.randint(2**31, ())) if seed is None else seed)
        return inputs if self.poison is None else inputs.with_poison(self.poison)

    def _moved(self, inputs: testing.Inputs) -> testing.Inputs:
        """Every entry of query and key is one number, give or take a little noise."""
        product = self.score / self.softmax_scale
        size = math.sqrt(abs(product) / self.head_dim)
        query, key = inputs.query * 0.2 + size, inputs.key * 0.2 + math.copysign(size, product)
        recipe = f"{inputs.recipe} with query * 0.2 + {size}, key * 0.2 + {math.copysign(size, product)}"
        return dataclasses.replace(inputs, query=query, key=key, recipe=recipe)


def call(name: str, tags: str, sizes: Sequence[Any], **more: Any) -> Call:
    """A Call in short form; ``sizes`` are (batch, heads, seqlen_q, seqlen_k, head_dim[, head_dim_v]), heads a number or
    those of (query, key[, value])."""
    batch, heads, seqlen_q, seqlen_k, *dims = sizes
    more = {"dtype": "bf16", "tags": tuple(tags.split()), "head_dim": dims[0], "head_dim_v": dims[-1], **more}
    heads_q, heads_k, *heads_v = (heads, heads) if isinstance(heads, int) else heads
    return Call(name, seqlen_q, seqlen_k, batch, heads_q, heads_k, heads_v=heads_v[0] if heads_v else None, **more)


def tagged(tag: str) -> dict[str, Call]:
    """The calls with a tag, by name."""
    found = [each for each in CALLS if tag in each.tags]
    assert len({each.name for each in found}) == len(found) > 0, f"calls of {tag!r}: none, or a name twice"
    return {each.name: each for each in found}


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def in_turn(**values: Sequence[Any]) -> dict[str, Any]:
    """Arguments of `parametrize` for all combinations of these values. .ci/run has as many as the longest of them has
    values: each value of each at least once, two that are shorter beside each other in every pairing where that many
    allow it. A name such as "mask, sizes" is of several parameters, whose values are tuples."""
    names = [name.split(", ") for name in values]
    most = max(map(len, values.values()))
    landing = {
        tuple((k + n * (k // len(given))) % len(given) for n, given in enumerate(values.values())) for k in range(most)
    }
    found = []
    for places in itertools.product(*map(range, map(len, values.values()))):
        of = []
        for several, given, place in zip(names, values.values(), places, strict=True):
            of += given[place] if len(several) > 1 else [given[place]]
        found.append(pytest.param(*of, marks=[] if places in landing else [pytest.mark.prove]))
    return {"argnames": tuple(itertools.chain(*names)), "argvalues": found}


def on_gpus(calls: dict[str, Call]) -> list[Any]:
    """Parameters of a test: the names of these calls, with every GPU of each. .ci/run has one for each, in turn."""
    found = []
    for n, (name, each) in enumerate(calls.items()):
        for gpu in each.gpus:
            marks = [] if gpu == each.gpus[n % len(each.gpus)] else [pytest.mark.prove]
            found.append(pytest.param(name, gpu, id=f"{name}-sm_{gpu}", marks=marks))
    return found


def _on_gpus() -> Iterator[Call]:
    """Every CUDA kernel, small enough for a sanitizer: each class of head size on the fast path and the
    generic one, each dtype, few queries, shared heads, masks with gradients."""
    for size in (32, 64, 96, 128, 192, 256, 320, 512):
        yield call(f"d{size} causal", "gpu", (1, 2, 200, 150, size), causal=True)
        yield call(f"d{size} softcap", "gpu", (1, 2, 70, 200, size), dtype="fp16", softcap=5.0)
        yield call(f"d{size} mask", "gpu", (1, 2, 70, 90, size), mask="bool B11S")
        yield call(f"d{size} few queries", "gpu", (1, (4, 2), 2, 700, size))
    for size in (32, 64, 128, 256, 512):
        yield call(f"d{size} float32", "gpu", (1, 2, 70, 90, size), dtype="fp32", causal=True)
        yield call(f"d{size} float32 few queries", "gpu", (1, 2, 2, 300, size), dtype="fp32")
    yield call("full", "gpu", (1, 2, 200, 300, 128))
    yield call("one head", "gpu", (1, 1, 70, 100, 128))
    yield call("window", "gpu", (1, 2, 300, 300, 64), causal=True, window=(100, None))
    yield call("grouped", "gpu", (1, (6, 2), 150, 150, 64))
    yield call("grouped, d128", "gpu", (1, (6, 2), 150, 150, 128), dtype="fp16")
    yield call("grouped unlike", "gpu", (1, (6, 2, 3), 150, 150, 128))
    yield call("192 and 128", "gpu", (1, 2, 150, 150, 192, 128), causal=True)
    yield call("bias", "gpu", (2, 2, 90, 70, 64), mask="float BHLS")
    yield call("bias of all elements", "gpu", (2, 2, 90, 70, 128), mask="float 1HLS fp32")
    yield call("dropout", "gpu", (1, 2, 90, 70, 64), dropout=0.25)
    yield call("columns apart", "gpu", (1, 2, 90, 70, 24), layout="stepped")
    yield call("sinks", "gpu", (1, (4, 2), 200, 200, 64), causal=True, sinks="H")
    yield call("sinks, softcap, d128", "gpu", (2, 2, 70, 150, 128), softcap=5.0, sinks="BH")
    yield call("sinks, few queries", "gpu", (2, (4, 2), 2, 700, 128), sinks="BH")
    yield call("relative bias", "gpu", (1, 2, 150, 150, 64), causal=True, relative="H")
    yield from _ranges_on_gpus()
    # More tiles than any chip has multiprocessors, twice: blocks that go from one tile to the next.
    yield call("many tiles", "gpu", (2, 40, 1100, 1100, 128))
    yield call("many tiles, causal", "gpu", (2, 40, 1100, 1100, 128), causal=True)
    # Hopper's forward kernel with a third warpgroup, in tiles of 192 queries.
    yield call("three consumers", "gpu", (2, 40, 530, 560, 64))
    yield call("three consumers, causal", "gpu", (1, 2, 4100, 4100, 64), causal=True)


def _ranges_on_gpus() -> Iterator[Call]:
    """Key ranges: of documents, two of a row anywhere, about the diagonal, and none for most rows."""
    for size in (64, 128, 256):
        yield call(f"documents, d{size}", "gpu", (1, (4, 2), 200, 200, size), causal=True, ranges="documents B1L 1")
        yield call(f"intervals, d{size}", "gpu", (2, 2, 150, 300, size), ranges="anything BHL 2")
    yield call("gaps", "gpu", (1, 1, 70, 100, 64), ranges="few B1L 2")
    yield call("gaps, d128", "gpu", (1, (4, 2), 200, 300, 128), dtype="fp16", ranges="few BHL 1")
    yield call("near, d128", "gpu", (1, 2, 700, 700, 128), causal=True, ranges="near B1L 2")
    yield call("near, d320", "gpu", (1, 2, 90, 300, 320), ranges="near B1L 1")
    yield call("near, float32", "gpu", (1, 2, 90, 300, 64), dtype="fp32", ranges="near BHL 2")
    yield call("intervals, bias", "gpu", (2, 2, 90, 70, 64), mask="float BHLS", ranges="anything B1L 2")
    yield call("intervals, softcap", "gpu", (1, 2, 150, 150, 64), softcap=5.0, ranges="anything B1L 1")
    yield call("documents, few queries", "gpu", (2, (4, 2), 2, 700, 64), ranges="anything B11 1")
    yield call("intervals, few queries", "gpu", (2, (4, 2), 2, 700, 128), ranges="anything BHL 2")


_ODD = (1, 1, 70, 129, 64)  # the last blocks of queries and of keys are ragged, whatever their size


def _numbers() -> Iterator[Call]:
    """At the edge of what a kernel's numbers take."""
    calls: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("scores near -30", (1, 1, 70, 100, 64), {"score": -30.0}),
        ("scores near -100", (1, 1, 70, 100, 64), {"score": -100.0}),
        ("scores near -1000", _ODD, {"score": -1000.0}),
        ("scores near 1000", _ODD, {"score": 1000.0}),
        ("scores near -100, causal", _ODD, {"causal": True, "score": -100.0}),
        ("scores near 100, negative scale", _ODD, {"scale": -0.3, "score": 100.0}),
        ("scores far apart", _ODD, {"scale": 3.0}),
        ("scores far apart, negative scale", _ODD, {"scale": -3.0}),
        ("scores close together", _ODD, {"scale": 1e-3}),
        ("scale 0", (1, 1, 33, 65, 64), {"scale": 0.0, "causal": True}),
        ("scale 0, softcap, one query", (1, 1, 1, 33, 64), {"scale": 0.0, "softcap": 30.0}),
        ("scale 0, softcap, window", (1, 1, 70, 65, 64), {"scale": 0.0, "softcap": 30.0, "window": (9, 9)}),
        ("negative scale, softcap", _ODD, {"scale": -1.0, "softcap": 5.0, "causal": True}),
        ("softcap 1e3", (1, 1, 40, 65, 64), {"softcap": 1e3}),
        ("softcap 1e4, scores near 1000", (1, 1, 40, 65, 64), {"softcap": 1e4, "score": 1000.0}),
        ("softcap 1e6, one query", (1, 1, 1, 65, 64), {"softcap": 1e6}),
        ("one key", (1, 1, 65, 1, 64), {"scale": -2.0}),
        ("one query of many keys", (1, 1, 1, 257, 64), {"scale": 3.0}),
    ]
    for name, sizes, more in calls:
        yield call(name, "numbers", sizes, **more)


def _masked_bands() -> Iterator[Call]:
    """Masks of nearly every broadcast shape with bands whose first or last key lies past a block, at lengths beyond two
    blocks."""
    bands: tuple[tuple[str, dict[str, Any]], ...] = (
        ("40 keys before and all after", {"window": (40, None)}),
        ("1 key before", {"window": (1, 0)}),
        ("all keys before and 20 after", {"window": (None, 20)}),
        ("the diagonal, bottom right", {"window": (0, 0), "alignment": "bottom_right"}),
        ("100 keys before, causal, bottom right", {"window": (100, None), **LAST}),
    )
    shapes = map("".join, itertools.product("B1", "H1", "L1", "S1"))
    for shape, (name, band) in list(itertools.product(shapes, bands))[:: len(bands) + 1]:
        mask = f"float {shape}"
        yield call(f"float mask {shape}, {name}", "masked-bands", (2, 2, 131, 150, 16), **band, mask=mask)


_EXCLUDING: dict[str, dict[str, Any]] = {  # as MASKS of test_unattended.py
    "bool": {"mask": "bool BHLS"},
    "bool of keys": {"mask": "bool B11S"},
    "ranges": {"ranges": "few BHL 2"},
    "ranges of a batch": {"ranges": "anything B11 1"},
    "bool and ranges": {"mask": "bool 11LS", "ranges": "near 1HL 1"},
    "float and ranges": {"mask": "float BHLS", "ranges": "near B1L 2"},
    "causal": {"causal": True},
    "window and bool": {"mask": "bool BH1S", "window": (9, 5), "alignment": "bottom_right"},
    "softcap": {"mask": "bool BH1S", "ranges": "near BHL 1", "softcap": 2.0},
    "negative scale": {"mask": "bool BH1S", "ranges": "near BHL 1", "scale": -0.7},
    "window": {"window": (40, 30)},
    "softcap, window": {"window": (40, 30), "softcap": 2.0},
    "bool of queries": {"mask": "bool B1L1"},
    "slots in front of a window": {"window": (530, 9), "alignment": "bottom_right"},
    "slots behind a window": {"window": (None, 550)},
    "slots behind a window, bias": {"mask": "float BHLS", "window": (None, 550)},
}


def _excluded() -> Iterator[Call]:
    """Keys and queries that are excluded and hold NaN, or infinity: where kernels are their own, two kinds of mask."""
    calls: list[tuple[str, str, tuple[int, int, int, int], str, str]] = [
        ("cuda", "bfloat16", (70, 140, 64, 2), "bf16", "bool of keys; ranges of a batch"),
        ("cuda", "float16, rows not aligned", (70, 109, 36, 2), "fp16", "softcap; causal"),
        ("cuda", "float32", (46, 90, 40, 2), "fp32", "window and bool; ranges"),
        ("cuda", "bfloat16 above 256", (40, 100, 264, 2), "bf16", "bool and ranges; ranges"),
        ("cuda", "float32 above 256", (20, 70, 300, 4), "fp32", "negative scale; float and ranges"),
        ("cuda", "few queries", (3, 300, 64, 1), "bf16", "bool of keys; ranges"),
        ("cuda", "few queries, float32", (3, 140, 160, 2), "fp32", "bool; float and ranges"),
        ("cuda", "few queries above 256", (2, 150, 264, 2), "bf16", "bool of keys; ranges"),
        ("triton", "d64", (70, 100, 64, 2), "bf16", "bool of keys; bool of queries; ranges of a batch; ranges"),
        ("triton-decode", "d64", (3, 700, 64, 2), "bf16", "slots in front of a window"),
        ("triton-decode", "d40, float32", (3, 700, 40, 2), "fp32", "slots behind a window"),
        ("triton-decode", "d64, float16", (3, 700, 64, 2), "fp16", "slots behind a window, bias"),
        ("triton-decode", "d64, shared keys", (3, 700, 64, 1), "bf16", "bool of keys"),
        ("triton-decode", "d80, float32", (3, 520, 80, 2), "fp32", "bool"),
        ("triton-decode", "d264, float32", (1, 520, 264, 2), "fp32", "bool of keys"),
        ("triton-decode", "d128, shared keys", (3, 700, 128, 1), "bf16", "ranges"),
        ("triton-decode", "d264, float16", (2, 700, 264, 2), "fp16", "ranges of a batch"),
        ("triton-decode", "d160, float32", (3, 700, 160, 2), "fp32", "float and ranges"),
    ]
    for kernels, name, sizes, dtype, kinds in calls:
        for kind in kinds.split("; "):
            yield _excluding(f"{name}: {kind}", f"{kernels}-unattended", sizes, dtype, kind)
    # Infinity, which makes NaN where a weight of 0 meets it.
    for size, kind in ((160, "ranges of a batch"), (264, "bool of keys")):
        of = _excluding(f"infinity, d{size}: {kind}", "triton-unattended", (20, 70, size, 2), "bf16", kind)
        yield dataclasses.replace(of, poison=math.inf)
    # Hopper's gradients, and those that one walk makes.
    hopper = [
        ("sm90", (70, 300, 64, 2), "bf16", "ranges of a batch"),
        ("sm90", (150, 140, 96, 1), "fp16", "ranges"),
        ("sm90", (100, 190, 192, 2), "bf16", "softcap, window"),
        ("sm90", (70, 150, 256, 2), "fp16", "ranges of a batch"),
        ("sm90-fused", (70, 300, 128, 2), "bf16", "ranges of a batch"),
        ("sm90-fused", (150, 140, 128, 1), "fp16", "ranges"),
        ("sm90-fused", (190, 100, 104, 2), "bf16", "window"),
    ]
    for n, (kernels, sizes, dtype, kind) in enumerate(hopper):
        of = _excluding(f"d{sizes[2]}: {kind}", f"{kernels}-unattended", sizes, dtype, kind)
        yield dataclasses.replace(of, poison=(math.nan, math.inf)[n % 2])
    for name, tag, sizes, dtype, kind in (
        ("beside a sink", "cuda-unattended", (150, 140, 64, 2), "bf16", "ranges"),
        ("beside a sink, float32", "cuda-unattended", (90, 70, 40, 2), "fp32", "ranges"),
        ("beside a sink", "sm90-unattended", (150, 140, 96, 1), "fp16", "ranges"),
        ("beside a sink", "triton-unattended", (70, 50, 32, 2), "bf16", "bool of queries"),
    ):  # queries without a key, whose log-sum-exp is that of the sink
        yield dataclasses.replace(_excluding(name, tag, sizes, dtype, kind), sinks="H")


def _excluding(name: str, tags: str, sizes: tuple[int, int, int, int], dtype: str, kind: str) -> Call:
    seqlen_q, seqlen_k, size, heads_k = sizes
    more = {"dtype": dtype, "poison": math.nan, **_EXCLUDING[kind]}
    return call(name, tags, (2, (4, heads_k), seqlen_q, seqlen_k, size), **more)


CALLS: tuple[Call, ...] = (
    # Results and gradients of the GPU kernels: lengths are no multiples of a tile.
    call("bfloat16", "triton cuda-backward tf32 sm90-backward", (1, 2, 100, 170, 64)),
    call("float16, causal, shared keys", "triton", (1, (4, 2, 1), 150, 130, 64), dtype="fp16", causal=True),
    call("grouped unlike", "triton cuda-backward chunks", (1, (6, 2, 3), 33, 70, 64)),
    call("float32", "triton", (1, 2, 70, 90, 64), dtype="fp32", gpus=ALL),
    call("window", "triton", (1, 2, 160, 150, 64), window=(40, 3), alignment="bottom_right", gpus=ALL),
    call("window to the left", "triton", (1, 1, 150, 150, 64), window=(30, None)),
    call("rows without keys", "triton cuda-backward chunks sm90-backward", (1, 2, 150, 50, 64), **LAST),
    call("one query", "triton cuda-backward chunks sm90-backward", (2, 2, 1, 150, 64), **LAST),
    call("softcap, head sizes 80 and 96", "triton cuda-forward", (1, 2, 90, 70, 80, 96), dtype="fp16", softcap=3.0),
    call("scale 0", "triton cuda-backward", (1, 1, 40, 40, 64), scale=0.0),
    call("scale below 0", "triton cuda-backward", (1, 1, 40, 40, 64), scale=-0.5),
    call("bias", "triton cuda-backward tf32", (2, 2, 70, 80, 64), causal=True, mask="float BHLS", gpus=ALL),
    call("float32 bias shared by the batch", "triton cuda-backward", (2, 2, 70, 70, 64), mask="holes 1HLS fp32"),
    call("bias of keys", "triton cuda-backward", (2, 2, 70, 90, 64), causal=True, mask="float B11S"),
    call("bias of queries", "triton cuda-backward chunks chunks-fp16", (2, 2, 70, 90, 64), mask="float 1HL1"),
    call("bias of everything", "triton", (1, 2, 70, 90, 64), mask="float 11"),
    call("bool mask", "triton cuda-backward", (1, 2, 70, 96, 64), mask="bool BHLS"),
    call("bool mask of keys, window", "triton", (2, 2, 100, 100, 64), window=(20, 20), mask="bool B11S"),
    call("head size 128", "triton", (1, 2, 130, 130, 128), causal=True, gpus=ALL),
    call("head sizes 192 and 128", "triton", (1, 1, 100, 100, 192, 128), causal=True),
    call("head size 256", "triton", (1, 1, 70, 70, 256)),
    call("head sizes 320 and 512", "triton", (1, 1, 33, 40, 320, 512)),
    call(
        "float32, head sizes 80 and 128, bias shared by the batch",
        "triton",
        (2, 1, 40, 50, 80, 128),
        dtype="fp32",
        mask="float 1HLS",
    ),
    call("float32, head sizes 512 and 320", "triton", (1, 1, 20, 40, 512, 320), dtype="fp32", causal=True),
    call("head sizes 8 and 17", "triton cuda-backward tf32", (1, 2, 40, 70, 8, 17)),
    call("length-major", "triton cuda-backward sm90-backward", (2, 3, 40, 70, 64), layout="blhd"),
    call("rows not aligned", "triton cuda-backward chunks", (1, 2, 40, 70, 24), layout="offset"),
    call(
        "last stride 2, padding between rows",
        "triton cuda-backward",
        (1, 2, 40, 70, 24),
        layout="stepped padded e_major",
    ),
    call(
        "float16, causal, shared keys",
        "cuda-backward chunks chunks-fp16 sm90-backward",
        (1, (4, 2), 150, 130, 64),
        dtype="fp16",
        causal=True,
    ),
    call("one key head for all", "cuda-backward", (2, (3, 1), 70, 40, 32), **LAST),
    call("more value heads than key heads", "cuda-backward", (1, (4, 1, 2), 33, 70, 64)),
    call(
        "window",
        "cuda-backward chunks tf32 sm90-backward",
        (1, 1, 170, 150, 64),
        window=(40, 3),
        alignment="bottom_right",
    ),
    call("window to the left", "cuda-backward", (1, 1, 160, 150, 64), window=(30, None)),
    call("keys that no query reaches", "cuda-backward", (1, 1, 20, 170, 32), causal=True),
    call("one key", "cuda-backward sm90-backward", (1, 2, 40, 1, 64)),
    call(
        "softcap, head sizes 80 and 96",
        "cuda-backward sm90-backward",
        (1, 1, 90, 70, 80, 96),
        dtype="fp16",
        softcap=3.0,
    ),
    call(
        "softcap, bias, window",
        "cuda-backward chunks chunks-fp16",
        (1, 1, 70, 80, 64),
        window=(30, 20),
        softcap=2.0,
        mask="float BHLS",
    ),
    call("bias, shared keys", "cuda-backward", (1, (4, 2), 40, 70, 32), dtype="fp16", mask="float BHLS"),
    call(
        "float32 bias of full size with holes",
        "cuda-backward",
        (1, 2, 70, 140, 64),
        window=(20, 20),
        mask="holes BHLS fp32",
    ),
    call("bias shared by the heads", "cuda-backward tf32", (2, 2, 70, 70, 80, 24), causal=True, mask="float B1LS"),
    call("bias of everything", "cuda-backward", (1, 2, 70, 90, 64), window=(20, None), mask="float 11"),
    call("bool mask of keys, window", "cuda-backward", (2, 1, 70, 70, 64), window=(20, 20), mask="bool B11S"),
    call("one key head for all", "sm90-backward", (2, (3, 1), 70, 140, 128), **LAST),
    call("window to the left", "sm90-backward", (1, 1, 200, 150, 96), window=(30, None)),
    call("keys that no query reaches", "sm90-backward", (1, 1, 20, 270, 64), causal=True),
    call(
        "softcap, scale below 0, shared keys",
        "sm90-backward",
        (1, (2, 1), 70, 70, 192),
        causal=True,
        softcap=2.0,
        scale=-0.2,
    ),
    call("rows apart, head sizes 72 and 40", "sm90-backward", (1, 2, 70, 70, 72, 40), layout="packed"),
    call("full", "sm90-fused", (1, 2, 100, 170, 128)),
    call("causal, shared keys", "sm90-fused", (1, (4, 2), 150, 200, 128), dtype="fp16", **LAST),
    call("window, head sizes 104 and 120", "sm90-fused", (1, 1, 200, 170, 104, 120), window=(30, 10)),
    call("rows without keys", "sm90-fused", (1, 2, 150, 40, 128), **LAST, layout="blhd"),
    call("keys that no query reaches", "sm90-fused", (2, 1, 20, 270, 128), causal=True),
    call("narrow", "sm90-backward-refused", (1, 2, 40, 40, 32)),
    call("negative scale", "sm90-backward-refused", (1, 2, 40, 40, 64), scale=-0.5),
    call("bias", "sm90-backward-refused", (1, 2, 40, 40, 64), mask="float B11S"),
    call("dropout", "sm90-backward-refused", (1, 2, 40, 40, 64), dropout=0.5),
    call("heads shared differently", "sm90-backward-refused", (1, (4, 1, 2), 40, 40, 64)),
    call("unaligned rows", "sm90-backward-refused", (1, 2, 40, 40, 68)),
    # Sinks: every way that a forward pass has to its end.
    call("full", "sinks sinks-gpu", (2, 2, 70, 90, 64), sinks="H"),
    call("causal, shared keys", "sinks sinks-gpu", (2, (4, 2), 131, 131, 64), causal=True, sinks="BH"),
    call("one query", "sinks sinks-gpu split", (1, 2, 1, 600, 64), sinks="H"),
    call("few queries, shared keys", "sinks sinks-gpu split", (2, (4, 1), 3, 600, 64), sinks="BH", **LAST),
    call("window, softcap", "sinks", (1, 2, 100, 100, 40), window=(30, 5), softcap=3.0, sinks="H"),
    call("rows without keys", "sinks sinks-gpu", (1, 2, 90, 40, 64), sinks="BH", **LAST),
    call("bool mask", "sinks", (2, 2, 70, 90, 24), mask="bool BHLS", sinks="H"),
    call("bias", "sinks sinks-gpu", (2, 2, 70, 90, 64), mask="float 1HLS", sinks="BH"),
    call("documents", "sinks sinks-gpu", (2, (4, 2), 150, 150, 64), causal=True, ranges="documents B1L 1", sinks="H"),
    call("two ranges, few queries", "sinks", (2, 2, 3, 300, 64), ranges="anything BHL 2", sinks="BH"),
    call("one key", "sinks", (1, 2, 40, 1, 8), sinks="H"),
    call("head sizes 192 and 128", "sinks sinks-gpu", (1, 2, 70, 150, 192, 128), causal=True, sinks="H"),
    call("head size 320", "sinks sinks-gpu", (1, 1, 40, 70, 320), sinks="H"),
    call("float32", "sinks-gpu", (1, 2, 70, 90, 64), dtype="fp32", causal=True, sinks="H"),
    call("sinks", "second-order", (2, 2, 7, 9, 8), sinks="H"),
    call(
        "sinks of the batch, bias, causal", "second-order", (2, 2, 7, 9, 8), causal=True, mask="float 1HLS", sinks="BH"
    ),
    call("sinks, rows without keys, softcap", "second-order", (1, 2, 9, 4, 8), softcap=2.0, sinks="H", **LAST),
    # Relative bias.
    call("table", "relative relative-gpu", (2, 2, 70, 90, 64), relative="H"),
    call(
        "one table for all heads, causal", "relative relative-gpu", (2, (4, 2), 150, 150, 64), causal=True, relative="1"
    ),
    call("few numbers", "relative", (2, 2, 90, 70, 24), relative="H 9"),
    call("one query", "relative relative-gpu", (2, 4, 1, 600, 64), relative="H"),
    call("few queries, shared keys", "relative relative-gpu", (2, (4, 1), 3, 600, 64), relative="H", **LAST),
    call(
        "window, softcap, sinks",
        "relative relative-gpu",
        (1, 2, 131, 131, 40),
        window=(40, 9),
        softcap=3.0,
        relative="H",
        sinks="H",
    ),
    call("bool mask of keys", "relative", (2, 2, 70, 90, 24), mask="bool B11S", relative="H"),
    call("float mask", "relative", (2, 2, 70, 90, 24), mask="float 11LS", relative="1"),
    call(
        "documents",
        "relative relative-gpu",
        (2, (4, 2), 150, 150, 64),
        causal=True,
        ranges="documents B1L 1",
        relative="H",
    ),
    call("two ranges", "relative relative-gpu", (2, 2, 70, 300, 32), ranges="anything BHL 2", relative="H"),
    call("rows without keys", "relative relative-gpu", (1, 2, 90, 40, 64), relative="H", **LAST),
    call("one key", "relative relative-gpu", (1, 2, 40, 1, 8), relative="H"),
    call("head size 192", "relative relative-gpu", (1, 2, 70, 150, 192, 128), relative="H"),
    call("head size 320, float32", "relative relative-gpu", (1, 1, 40, 70, 320), dtype="fp32", relative="H"),
    call("dropout", "relative-gpu", (2, (4, 2), 70, 90, 64), dropout=0.3, causal=True, relative="1"),
    call("bands in several walks", "relative-gpu", (1, 1, 530, 600, 32), relative="H"),
    call("relative bias", "second-order", (2, 2, 7, 9, 8), relative="H"),
    call("relative bias, sinks, softcap", "second-order", (2, (4, 2), 9, 5, 8), softcap=2.0, relative="1", sinks="H"),
    # Forward kernels of CUDA: more queries than the kernels of decode.cu take.
    call("plain", "cuda-forward", (1, 2, 100, 70, 64)),
    call("fp16", "cuda-forward", (1, 1, 100, 70, 64), dtype="fp16"),
    call("causal", "cuda-forward", (1, 2, 150, 150, 64), causal=True),
    call("window", "cuda-forward", (1, 2, 160, 160, 64), causal=True, window=(40, None)),
    call("bottom right", "cuda-forward", (1, 2, 70, 150, 32), **LAST),
    call("rows without keys", "cuda-forward", (1, 2, 150, 50, 32), **LAST),
    call("negative scale", "cuda-forward", (1, 1, 70, 70, 32), causal=True, scale=-0.5),
    call("bias", "cuda-forward", (2, 2, 70, 70, 64), mask="float BHLS"),
    call("float32 bias of all elements", "cuda-forward", (2, 2, 70, 70, 64), mask="float 1HLS fp32"),
    call("bias of keys", "cuda-forward", (2, 2, 70, 70, 64), window=(30, 9), mask="float B11S"),
    call("bool mask", "cuda-forward", (2, 2, 70, 70, 64), mask="bool B11S"),
    call("bool mask and softcap", "cuda-forward", (1, 2, 70, 70, 32), softcap=2.0, mask="bool BHLS"),
    call("grouped", "cuda-forward", (1, (6, 2), 70, 70, 64)),
    call("grouped unlike", "cuda-forward sm90-forward", (1, (6, 2, 3), 70, 70, 64)),
    call("length first", "cuda-forward", (1, 3, 70, 70, 64), layout="blhd"),
    call("unaligned rows", "cuda-forward", (1, 2, 70, 70, 24), layout="offset"),
    call("columns apart", "cuda-forward", (1, 2, 70, 70, 24), layout="stepped"),
    call("odd head size", "cuda-forward", (1, 2, 70, 70, 21, 13), causal=True),
    call("one key", "cuda-forward", (1, 2, 70, 1, 32)),
    call("full", "sm90-forward", (1, 2, 130, 300, 64)),
    call("causal", "sm90-forward", (1, 1, 260, 260, 64), causal=True),
    call("causal, more keys than queries", "sm90-forward", (1, 1, 150, 300, 64), causal=True),
    call("causal from the end", "sm90-forward", (1, 1, 150, 300, 64), dtype="fp16", **LAST),
    call("rows without keys", "sm90-forward", (1, 2, 300, 100, 64), **LAST),
    call("window", "sm90-forward", (1, 1, 300, 300, 64), window=(60, 20)),
    call("window to the left", "sm90-forward", (1, 1, 300, 300, 64), window=(40, None)),
    call("causal window", "sm90-forward", (1, 1, 300, 300, 64), causal=True, window=(100, None)),
    call("softcap", "sm90-forward", (1, 1, 130, 200, 64), dtype="fp16", softcap=3.0),
    call("softcap, causal", "sm90-forward", (1, 1, 130, 130, 64), causal=True, softcap=3.0),
    call("scale below 0", "sm90-forward", (1, 1, 70, 140, 64), causal=True, scale=-0.5),
    call("scale 0", "sm90-forward", (1, 1, 70, 140, 64), scale=0.0),
    call("grouped heads", "sm90-forward", (2, (4, 2), 70, 140, 64)),
    call("one query", "sm90-forward", (2, 2, 1, 200, 64)),
    call("one key", "sm90-forward", (2, 2, 70, 1, 64)),
    call("one of each", "sm90-forward", (1, 1, 1, 1, 64), causal=True),
    call("length-major", "sm90-forward", (2, 3, 70, 140, 64), layout="blhd"),
    call("interleaved", "sm90-forward", (1, 2, 70, 140, 64), layout="packed"),
    call("head sizes 40 and 24", "sm90-forward", (1, 2, 70, 140, 40, 24), causal=True),
    call("mask", "sm90-refused", (1, 1, 70, 70, 64), mask="bool BHLS"),
    call("bias", "sm90-refused", (1, 1, 70, 70, 64), mask="float BHLS"),
    call("rows not aligned", "sm90-refused", (1, 1, 70, 70, 64), layout="padded"),
    call("columns apart", "sm90-refused", (1, 1, 70, 70, 64), layout="stepped"),
    call("address not aligned", "sm90-refused", (1, 1, 70, 70, 64), layout="offset"),
    call("head size 12", "sm90-refused", (1, 1, 70, 70, 12)),
    # Keys that a mask or band hides, in every forward kernel.
    call("d64", "hidden-keys", (1, 1, 70, 140, 64)),
    call("d40, float32", "hidden-keys", (1, 1, 70, 100, 40), dtype="fp32"),
    call("d264", "hidden-keys", (1, 1, 70, 100, 264)),
    call("one query", "hidden-keys", (1, 1, 1, 100, 64)),
    call("few queries", "hidden-keys", (1, 1, 2, 140, 64)),
    call("few queries, softcap", "hidden-keys", (1, 1, 3, 100, 64), softcap=5.0),
    call("one query, float32", "hidden-keys", (1, 1, 1, 100, 64), dtype="fp32"),
    # Numbers that are none, in a row of queries or of a mask, through every kernel that has a softmax.
    call("causal", "no-numbers no-numbers-sm90", (1, 2, 40, 40, 64), causal=True),
    call("softcap, sinks", "no-numbers no-numbers-sm90", (1, 2, 30, 70, 96), softcap=5.0, sinks="H"),
    call("bias", "no-numbers", (1, 2, 40, 70, 64), mask="float BHLS"),
    call("bias, dropout", "no-numbers", (1, 2, 40, 70, 32), mask="float BHLS", dropout=0.5),
    call("bias, float32", "no-numbers", (1, 2, 40, 70, 40), mask="float BHLS", dtype="fp32"),
    call("bias, d264", "no-numbers", (1, 2, 40, 70, 264), mask="float BHLS"),
    call("few queries", "no-numbers", (1, 2, 3, 60, 64), mask="float BHLS"),
    call("few queries, float32", "no-numbers", (1, 2, 3, 60, 40), mask="float BHLS", dtype="fp32"),
    call("few queries, d264", "no-numbers", (1, 2, 3, 60, 264), mask="float BHLS"),
    call("one query in parts", "no-numbers split", (1, 2, 1, 700, 64), mask="float BHLS"),
    # Few queries.
    call("one query", "cuda-decode split", (2, 2, 1, 700, 64)),
    call("grouped", "cuda-decode decode-wide split", (1, (8, 2), 1, 500, 64)),
    call("several queries", "cuda-decode decode-wide", (1, 6, 5, 300, 128), dtype="fp16", **LAST),
    call("two tiles of rows", "cuda-decode", (1, (8, 2), 7, 150, 32), window=(60, 20)),
    call("many heads of one key head", "cuda-decode", (1, (80, 1), 1, 150, 64)),
    call("window", "cuda-decode decode-wide", (1, 2, 1, 700, 64), window=(90, None), alignment="bottom_right"),
    call("rows without keys", "cuda-decode decode-wide", (1, 2, 9, 5, 32), **LAST),
    call("bias", "cuda-decode decode-wide", (2, (4, 2), 2, 130, 64), softcap=4.0, mask="float 1HLS"),
    call("bool mask", "cuda-decode decode-wide", (1, 2, 2, 200, 64), mask="bool BHLS"),
    call("unaligned rows", "cuda-decode decode-wide", (1, 2, 1, 130, 24), layout="offset"),
    call("unlike head sizes", "cuda-decode", (1, 2, 1, 130, 80, 200)),
    call("length first", "cuda-decode", (1, 4, 3, 130, 256), layout="blhd"),
    call("one block", "cuda-decode", (1, 2, 3, 40, 64)),
    call("one query", "triton-decode", (1, 2, 1, 600, 64), gpus=ALL),
    call("float16, shared keys, causal", "triton-decode", (1, (8, 2), 4, 700, 64), dtype="fp16", **LAST),
    call("one key head, two tiles of rows", "triton-decode", (1, (12, 1), 3, 530, 64)),
    call("many heads of one key head", "triton-decode", (1, (80, 1), 1, 560, 64)),
    call("float32", "triton-decode", (1, (4, 2), 2, 520, 64), dtype="fp32"),
    call("window", "triton-decode", (1, 2, 3, 1100, 64), window=(700, 0), alignment="bottom_right"),
    call("head sizes 80 and 48, softcap", "triton-decode", (2, 2, 2, 530, 80, 48), softcap=3.0),
    call("head size 256", "triton-decode", (1, 1, 1, 513, 256)),
    call("float32, head size 500", "triton-decode", (1, 1, 1, 513, 500), dtype="fp32"),
    call("bias with holes", "triton-decode", (2, 2, 3, 560, 64), mask="holes BHLS"),
    call("bool mask of keys", "triton-decode", (2, (4, 2), 2, 560, 64), mask="bool B11S"),
    call("bias", "triton-decode", (1, (4, 2), 2, 560, 64), mask="float 1HLS"),
    call("length-major", "triton-decode", (2, (4, 2), 3, 560, 64), layout="blhd"),
    call("many queries", "triton-not-decode", (1, 2, 65, 600, 64)),
    call("few keys", "triton-not-decode", (1, 2, 1, 500, 64)),
    call("dropout", "triton-not-decode", (1, 2, 1, 600, 64), dropout=0.5),
    call("values shared otherwise", "triton-not-decode", (1, (4, 2, 1), 1, 600, 64)),
    call("a narrow window", "triton-not-decode", (1, 2, 1, 2000, 64), window=(300, 0), alignment="bottom_right"),
    call("programs enough", "triton-not-decode", (8, 1, 1, 600, 64)),
    # In a CUDA graph.
    call("forward and backward", "captured", (2, 4, 130, 200, 64), dtype="fp16"),
    call("bias", "captured", (1, 2, 130, 200, 64), mask="float 1HLS"),
    call("rows that are copied", "captured", (1, 2, 130, 200, 24), layout="offset"),
    call("decode", "captured", (2, 4, 1, 4000, 128)),
    # Tangents and second derivatives by the Triton kernels.
    call("bfloat16, grouped unlike", "triton-second", (1, (6, 3, 2), 70, 90, 64)),
    call(
        "float32, softcap, causal",
        "triton-second",
        (1, 1, 40, 70, 64),
        dtype="fp32",
        causal=True,
        softcap=0.7,
        gpus=(80,),
    ),
    call(
        "float16, rows without keys, head sizes 80 and 48, rows not aligned",
        "triton-second",
        (1, 2, 70, 40, 80, 48),
        dtype="fp16",
        **LAST,
        layout="blhd offset bhld",
        gpus=(90,),
    ),
    call(
        "bias, window, dropout",
        "triton-second",
        (1, 1, 50, 70, 64),
        window=(40, 10),
        dropout=0.3,
        mask="float BHLS",
        gpus=(90, 120),
    ),
    call(
        "float32 bias of keys, softcap, shared keys",
        "triton-second",
        (2, (2, 1), 40, 70, 32),
        causal=True,
        softcap=2.0,
        mask="float 1H1S fp32",
        gpus=(90,),
    ),
    call("bias of queries, dropout", "triton-second", (2, 2, 40, 50, 32), dropout=0.5, mask="float B1L1", gpus=(80,)),
    call("head size 128, bool mask", "triton-second", (1, 1, 40, 96, 128), mask="bool BHLS", gpus=(90,)),
    call("head sizes 192 and 256", "triton-second", (1, 1, 40, 50, 192, 256), gpus=(90,)),
    call("head size 320", "triton-second", (1, 1, 20, 40, 320), gpus=(90,)),
    call(
        "float32, head size 160, dropout", "triton-second", (1, 1, 20, 40, 160), dtype="fp32", dropout=0.3, gpus=(90,)
    ),
    # Derivatives by every backend, in every dtype.
    call("plain", "second-order", (2, 2, 9, 53, 8)),
    call("causal", "second-order", (2, 2, 9, 53, 8), causal=True),
    call("causal bottom right", "second-order", (2, 2, 9, 53, 8), **LAST),
    call("more queries than keys", "second-order", (2, 2, 53, 9, 8), **LAST),
    call("window", "second-order", (2, 2, 9, 53, 8), window=(3, 2)),
    call("window beyond the keys", "second-order", (2, 2, 53, 9, 8), window=(2, 1)),
    call("bias", "second-order", (2, 2, 9, 53, 8), mask="float BHLS"),
    call("bias with holes, one row", "second-order", (2, 2, 9, 53, 8), mask="holes 1H1S"),
    call("bias, one column", "second-order", (2, 2, 9, 53, 8), causal=True, mask="float B1L1"),
    call("bias, one number", "second-order", (2, 2, 9, 53, 8), mask="float 11"),
    call("bool mask", "second-order", (2, 2, 9, 53, 8), mask="bool BHLS"),
    call("gqa", "second-order", (2, (4, 2), 9, 53, 8)),
    call("other value heads", "second-order", (2, (4, 2, 1), 9, 53, 8), causal=True),
    call("one key head", "second-order", (2, (4, 1, 4), 9, 53, 8)),
    call("value size", "second-order", (2, 2, 9, 53, 8, 2)),
    call("softcap", "second-order", (2, 2, 9, 53, 8), softcap=1.5, mask="holes 1HLS"),
    call("negative scale", "second-order", (2, 2, 9, 53, 8), causal=True, scale=-0.8),
    call("strided", "second-order", (2, 2, 9, 53, 8), layout="blhd e_major stepped"),
    call("one query", "second-order", (2, 2, 1, 53, 8)),
    call("no keys", "second-order", (2, 2, 9, 0, 8)),
    call("no queries", "second-order", (2, 2, 0, 53, 8)),
    call("no batch", "second-order", (0, 2, 9, 53, 8)),
    call("plain", "gradcheck", (2, 2, 3, 5, 3)),
    call("causal", "gradcheck", (2, 2, 3, 5, 3), causal=True),
    call("causal bottom right", "gradcheck", (2, 2, 3, 5, 3), **LAST),
    call("window", "gradcheck", (2, 2, 3, 5, 3), window=(1, 2)),
    call("bias", "gradcheck", (2, 2, 3, 5, 3), mask="float BHLS"),
    call("bias with holes, one row", "gradcheck", (2, 2, 3, 5, 3), mask="holes 1H1S"),
    call("bias, one column", "gradcheck", (2, 2, 3, 5, 3), causal=True, mask="float B1L1"),
    call("bool mask", "gradcheck", (2, 2, 3, 5, 3), mask="bool BHLS"),
    call("gqa", "gradcheck", (2, (4, 2), 3, 5, 3)),
    call("other value heads", "gradcheck", (2, (4, 2, 1), 3, 5, 3), causal=True),
    call("value size", "gradcheck", (2, 2, 3, 5, 3, 2)),
    call("softcap", "gradcheck", (2, 2, 3, 5, 3), softcap=1.5, mask="float 1HLS"),
    call("negative scale", "gradcheck", (2, 2, 3, 5, 3), causal=True, scale=-0.8),
    call("strided", "gradcheck", (2, 2, 3, 5, 3), layout="blhd e_major stepped"),
    call("one query", "gradcheck", (2, 2, 1, 9, 3)),
    call("dropout", "gradcheck", (2, 2, 3, 5, 3), dropout=0.4),
    # By use_as_sdpa(full=True) as a whole.
    call("mask with a gradient", "full", (2, 4, 7, 9, 8), mask="float 1HLS"),
    call("value of another size", "full", (2, 4, 7, 9, 8, 5), causal=True),
    call("no keys", "full", (2, 4, 7, 0, 8)),
    call("grouped heads and a mask", "full", (2, (4, 2), 7, 9, 8), mask="bool B11S"),
    # Few heads and many keys: a head's keys, or its gradient of query, are shared out and summed up afterwards.
    call("one head", "threads", (1, 1, 130, 300, 16)),
    call("one head, causal", "threads", (1, 1, 200, 200, 24), causal=True),
    call("three heads", "threads", (1, 3, 70, 200, 64)),
    call("shared keys, causal", "threads", (1, (4, 2), 33, 200, 16), causal=True),
    call("one key head, bias with holes", "threads", (1, (6, 1), 33, 150, 24), mask="holes 1HLS"),
    call("many queries, bias shared by the batch", "threads", (2, 2, 450, 70, 8), mask="float 1HLS"),
    call("one key head, bias shared by the batch", "threads", (7, (2, 1), 40, 50, 16), mask="float 1HLS"),
    call("bias of one head, causal", "threads", (3, 3, 40, 70, 16), causal=True, mask="float 11LS"),
    call("shared keys, bias shared by the heads", "threads", (3, (4, 2), 40, 70, 16), mask="float B1LS"),
    call("many queries, bias of queries, window", "threads", (2, 1, 450, 150, 8), window=(60, 20), mask="holes B1L1"),
    call("one key, bias of queries", "threads", (1, 5, 130, 1, 16), mask="float 11L1"),
    call("one query", "threads", (1, 1, 1, 3001, 16)),
    call("few queries, causal", "threads", (1, 2, 3, 2000, 24), **LAST),
    call("few queries, shared keys, bool mask", "threads", (1, (8, 2), 2, 1500, 16), mask="bool B11S"),
    call("one query, bias with holes, softcap", "threads", (2, 2, 1, 1500, 16), softcap=3.0, mask="holes BHLS"),
    call("few queries, window", "threads", (1, 1, 4, 2000, 16), window=(100, None), alignment="bottom_right"),
    call("few queries, scale below 0", "threads", (1, 2, 2, 2000, 16), scale=-0.4),
    # Key ranges beside everything else: the kinds of KINDS by turns, for two batch elements and four heads.
    call("bfloat16", "cuda-ranges", (2, (4, 2), 150, 200, 64)),
    call("float16, d128", "cuda-ranges", (2, (4, 2), 70, 200, 128), dtype="fp16"),
    call("head sizes 24 and 40, rows not aligned", "cuda-ranges", (2, (4, 1), 90, 80, 24, 40), layout="offset"),
    call("grouped unlike", "cuda-ranges", (2, (4, 1, 2), 70, 100, 64)),
    call("float32", "cuda-ranges", (2, (4, 2), 70, 100, 40), dtype="fp32"),
    call("d300", "cuda-ranges", (2, (4, 2), 40, 100, 300)),
    call("few queries", "cuda-ranges", (2, (4, 2), 3, 300, 64)),
    call("few queries, float32", "cuda-ranges", (2, (4, 2), 2, 200, 64), dtype="fp32"),
    call("few queries, d300", "cuda-ranges", (2, (4, 2), 2, 200, 300)),
    call(
        "softcap, window",
        "cuda-ranges",
        (2, (4, 2), 150, 200, 64),
        softcap=3.0,
        window=(60, 9),
        alignment="bottom_right",
    ),
    call("negative scale, causal", "cuda-ranges", (2, 4, 100, 90, 64), causal=True, scale=-0.3),
    call("bias", "cuda-ranges", (2, (4, 2), 70, 140, 64), mask="float BHLS", **LAST),
    call("bias of heads and keys", "cuda-ranges", (2, (4, 2), 70, 90, 32), mask="float 1H1S"),
    call("bool mask", "cuda-ranges", (2, (4, 2), 70, 90, 32), mask="bool B1LS"),
    call("bias, float32", "cuda-ranges", (2, (4, 2), 40, 70, 40), dtype="fp32", mask="float BHLS"),
    call("dropout", "cuda-ranges", (2, 4, 70, 100, 64), dropout=0.3),
    call("d64", "sm90-ranges", (1, (4, 2), 150, 260, 64)),
    call("d72 and d96", "sm90-ranges", (1, 4, 140, 130, 72, 96)),
    call("d128", "sm90-ranges", (1, (4, 2), 140, 300, 128), dtype="fp16"),
    call("d192 and d128", "sm90-ranges", (1, 4, 70, 130, 192, 128)),
    call("d256", "sm90-ranges", (1, 4, 70, 100, 256)),
    call("softcap", "sm90-ranges", (1, 4, 140, 130, 64), softcap=4.0, **LAST),
    call("window", "sm90-ranges", (1, 4, 140, 150, 64), window=(50, 20)),
    call("negative scale", "sm90-ranges", (1, 4, 140, 150, 64), scale=-0.3, softcap=9.0),
    # By the Triton kernels: lengths about those of their tiles; masks of every kind beside the other features.
    call("as many keys", "triton-ranges", (2, (4, 2), 130, 130, 64)),
    call("more keys, float16", "triton-ranges", (2, (4, 2), 66, 200, 64), dtype="fp16"),
    call("few queries, float32", "triton-ranges", (2, (4, 2), 3, 97, 64), dtype="fp32"),
    call("one query past a tile", "triton-ranges", (2, (4, 2), 65, 130, 64)),
    call("window", "triton-masked-ranges", (2, (4, 2), 66, 130, 64), window=(30, 4), alignment="bottom_right"),
    call("bool", "triton-masked-ranges", (2, (4, 2), 66, 130, 80), dtype="fp32", softcap=3.0, mask="bool BHLS"),
    call("bias", "triton-masked-ranges", (2, (4, 2), 66, 130, 128, 40), scale=-0.3, mask="float BHLS"),
    call(
        "bias shared by the batch, every feature",
        "triton-masked-ranges",
        (2, (4, 2), 66, 130, 32),
        dtype="fp32",
        window=(50, None),
        softcap=2.0,
        scale=0.4,
        mask="float 1HLS",
        **LAST,
    ),
    call("bias of keys", "triton-masked-ranges", (2, (4, 2), 66, 130, 64), causal=True, mask="float B11S"),
    call(
        "bias of queries",
        "triton-masked-ranges",
        (2, (4, 2), 66, 130, 80),
        dtype="fp32",
        window=(30, 4),
        alignment="bottom_right",
        mask="float 11L1",
    ),
    call("padding", "triton-decode-ranges", (2, (4, 2), 4, 1100, 64), ranges="padding"),
    call("float32", "triton-decode-ranges", (2, (4, 1), 4, 1100, 64), dtype="fp32", ranges="window and sinks"),
    call(
        "window, bool mask",
        "triton-decode-ranges",
        (2, (4, 2), 4, 1100, 64),
        window=(700, 0),
        alignment="bottom_right",
        mask="bool B11S",
        ranges="anything",
    ),
    call("no keys", "triton-decode-ranges", (2, (4, 1), 4, 1100, 64), mask="bool B11S", ranges="nothing"),
    # Bands that exclude keys or queries.
    call("keys behind a causal mask", "excluding-bands", (2, (4, 2), 150, 220, 64), causal=True),
    call("queries in front of it", "excluding-bands", (2, (4, 2), 220, 150, 64), **LAST),
    call("keys behind a window", "excluding-bands", (2, (4, 2), 150, 220, 64), window=(40, 30)),
    call("queries behind it", "excluding-bands", (2, (4, 2), 220, 150, 64), window=(40, 30)),
    call(
        "keys before a window and behind it",
        "excluding-bands",
        (2, (4, 2), 100, 300, 64),
        window=(40, 30),
        alignment="bottom_right",
    ),
    # Dimensions of size 0.
    call("no batch", "empty", (0, 2, 5, 7, 8), mask="float BHLS"),
    call("no heads", "empty", (2, 0, 5, 7, 8), mask="float BHLS"),
    call("no queries", "empty", (2, 2, 0, 7, 8), mask="float BHLS"),
    call("many queries, no keys", "empty", (2, 2, 70, 0, 8), mask="float BHLS"),
    call("no keys", "empty", (2, 2, 5, 0, 8), mask="float BHLS"),
    # Dropout: row tiles of 16 and of 32 keys, of whole and of half blocks.
    call("d64", "cuda-dropout", (2, (2, 1), 40, 100, 64), dropout=0.3),
    call("d96", "cuda-dropout", (2, (2, 1), 40, 100, 96), dropout=0.3),
    call("d256", "cuda-dropout", (2, (2, 1), 40, 100, 256), dropout=0.3),
    call("d264", "cuda-dropout", (2, (2, 1), 40, 100, 264), dropout=0.3),
    call("d40, float32", "cuda-dropout", (2, (2, 1), 40, 100, 40), dtype="fp32", dropout=0.3),
    call("documents", "triton-dropout", (2, 4, 66, 130, 64), dropout=0.3, ranges="documents"),
    call("any ranges, causal", "triton-dropout", (2, 4, 66, 130, 64), causal=True, dropout=0.3, ranges="anything"),
    call(
        "bias, window",
        "cuda-dropout triton-dropout",
        (2, 1, 70, 70, 64),
        mask="float BHLS",
        dropout=0.5,
        window=(50, 10),
    ),
    call(
        "bias shared by the batch, window",
        "cuda-dropout",
        (2, 1, 70, 70, 64),
        mask="float 1HLS",
        dropout=0.5,
        window=(50, 10),
    ),
    # Smaller shared memory takes other tiles.
    call("causal", "cuda-chips", (1, 1, 70, 70, 128), causal=True),
    call("d256", "cuda-chips", (1, 1, 65, 65, 256)),
    call("d72, float32", "cuda-chips-forward", (1, 1, 33, 70, 72), dtype="fp32", softcap=9.0),
    call("d256, float32", "cuda-chips-forward", (1, 1, 17, 70, 256), dtype="fp32", softcap=9.0),
    call("d300, float32", "cuda-chips-forward", (1, 1, 17, 70, 300), dtype="fp32", softcap=9.0),
    call("d300", "cuda-chips-forward", (1, 1, 33, 70, 300), softcap=9.0),
    call("d512, float16, one query", "cuda-chips-forward", (1, 1, 1, 70, 512), dtype="fp16", softcap=9.0),
    *_on_gpus(),
    *_numbers(),
    *_masked_bands(),
    *_excluded(),
)
