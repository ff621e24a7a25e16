"""Calls on simulated GPUs: the kernels as they are shipped, with their host code, hazards checked; output, log-sum-exp
and gradients against float64 by the one tolerance rule.

`Calls` makes the tests. Classes for each backend below say how a call is run, which calls of tests/matrix.py (or grids
of sizes and dtypes) there are of each kind, on which GPUs, and which kernels must have run. What is particular to a
kernel, its tiles, pipelines and plans, is in test_triton*.py and test_cuda_*.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import pytest

import simulated
from attnkern import testing
from attnkern.backends import cuda
from bench.cases import override
from matrix import KINDS, Call, call, in_turn, on_gpus, tagged

CHUNKED = 256  # head sizes above it go through CUDA's kernels by chunks, as does float32 on the way back


@dataclasses.dataclass(frozen=True)
class Kind:
    """Calls that are checked alike: parameters (call, gpu), and what is looked at beside the results."""

    cases: Iterable[Any]
    gradients: bool = True
    check: Callable[[Any, Call], object] | None = None  # of a target, in place of its check_call
    first: str = ""  # the kernel that a call begins with
    banks: bool = False  # no lane of a warp waits for another's bank
    any_order: bool = False  # torch doesn't ask for determinism
    landing: bool = False  # .ci/run has all cases


def on(calls: str | Iterable[Call], *gpus: int) -> list[Any]:
    """Cases of these calls, or of those with a tag, on each of these GPUs, or on sm_80."""
    given = list(tagged(calls).values() if isinstance(calls, str) else calls)
    return [pytest.param(each, gpu, id=f"{each.name}-sm_{gpu}") for gpu in gpus or (80,) for each in given]


def grid(made: Callable[..., Any], **values: Any) -> list[Any]:
    """Cases of all combinations of these values as `in_turn` has them, `gpu` one of them or 80; `made` makes a call of
    the others, or several."""
    found = []
    for each in in_turn(**values)["argvalues"]:
        given = {"gpu": 80, **dict(zip(values, each.values, strict=True))}
        gpu, this = given.pop("gpu"), made(**given)
        of = [this] if isinstance(this, Call) else this
        found += [pytest.param(x, gpu, id=f"{x.name}-sm_{gpu}", marks=each.marks) for x in of]
    return found


def on_own(tag: str) -> list[Any]:
    """Cases of the calls with a tag on the GPUs that each names, of which .ci/run has one."""
    calls = tagged(tag)
    return [pytest.param(calls[x.values[0]], x.values[1], id=x.id, marks=x.marks) for x in on_gpus(calls)]


def changed(given: Call, name: str, **fields: Any) -> Call:
    """The call with other fields; in a dtype or a size of its own it is of no tag."""
    return dataclasses.replace(given, name=f"{name}: {given.name}", **fields)


def in_ranges(calls: dict[str, Call], *gpus: int, kinds: Iterable[str] = KINDS) -> list[Any]:
    """Cases of all these calls with each of these kinds of key ranges, on each of these GPUs."""

    def made(name: str, kind: str) -> Call:
        return dataclasses.replace(calls[name], name=f"{name}, {kind}", ranges=kind)

    return grid(made, gpu=gpus, name=list(calls), kind=list(kinds))


def hidden(by: str) -> Callable[[Any, Call], object]:
    """Keys that a "bool mask" or a "band" excludes may hold anything."""
    return lambda target, call: target.check_hidden_keys(by, call.inputs(), **call.options)


def dropped(target: Any, call: Call) -> None:
    """What is dropped is that of `rng.keep_mask`, bit by bit."""
    target.check_dropped_entries(call.head_dim, call.torch_dtype, gradients=not call.forward_only)


def no_numbers(target: Any, call: Call) -> None:
    target.check_no_numbers(call.inputs(), **call.options)


def _test(kind: Kind) -> Callable[..., None]:
    @pytest.mark.parametrize(("call", "gpu"), list(kind.cases))
    def test(self, call, gpu, record_property, request):
        with self.run(gpu) as target, simulated.any_order() if kind.any_order else contextlib.nullcontext():
            if kind.check is not None:
                kind.check(target, call)
            else:
                target.check_call(call, **({} if kind.gradients else {"gradients": False}))
        self.ran(target, call, kind)
        name = request.node.originalname.removeprefix("test_").replace("_", " ")
        sizes = "/".join(map(str, dict.fromkeys([call.head_dim, call.head_dim_v])))
        record_property(target.backend, (f"{name}: {call.name}", f"sm_{gpu} {call.dtype} {sizes}"))

    return pytest.mark.landing(test) if kind.landing else test


class Calls:
    """A test for each of GRIDS, so that each has its share of a tier's seconds."""

    GRIDS: ClassVar[dict[str, Kind]] = {}

    def __init_subclass__(cls):
        for name, kind in cls.GRIDS.items():
            setattr(cls, f"test_{name}", _test(kind))

    run: Any  # of a GPU: within it the target that it gives runs there

    def ran(self, target, call, kind):
        """Asserts which kernels did."""
        raise NotImplementedError


NUMBERS, MASKED_BANDS = (list(tagged(tag).values()) for tag in ("numbers", "masked-bands"))
SCORES = [-1000.0, -100.0, 100.0, 1000.0]


# ------------------------------------------------------------------------------------- CUDA C++, kernels for every chip

FEATURES, DECODE, DECODE_WIDE = (tagged(tag) for tag in ("cuda-forward", "cuda-decode", "decode-wide"))
# What has forward kernels of its own: dtype, columns beside the call's, at most so many queries and keys, in two blocks
# of keys of which the second is ragged.
OTHERS = {
    "float32": ("fp32", 0, 100, 80),
    "bfloat16 above 256": ("bf16", 200, 70, 80),
    "float32 above 256": ("fp32", 200, 40, 80),
}
DECODE_OTHERS = {
    "float32": ("fp32", 0, DECODE),
    "bfloat16 above 256": ("bf16", 240, DECODE_WIDE),
    "float32 above 256": ("fp32", 240, DECODE_WIDE),
}
# The kernels that go by chunks, beside float32, whose products tell most about their order: dtype, head size, calls.
BY_CHUNKS = {
    "float32": ("fp32", 40, "cuda-backward"),
    "bfloat16 by chunks": ("bf16", 264, "chunks"),
    "float16 by chunks": ("fp16", 264, "chunks-fp16"),
}


def of_other_kernels(name: str, family: str) -> Call:
    dtype, columns, queries, keys = OTHERS[family]
    this = FEATURES[name]
    value = max(this.head_dim_v + columns, 257) if columns else this.head_dim_v
    size = value if this.head_dim == this.head_dim_v else this.head_dim + columns
    lengths = {"seqlen_q": min(this.seqlen_q, queries), "seqlen_k": min(this.seqlen_k, keys)}
    return changed(this, family, dtype=dtype, head_dim=size, head_dim_v=value, **lengths)


def decoded_by_other_kernels() -> Iterator[Call]:
    for family, (dtype, columns, calls) in DECODE_OTHERS.items():
        for this in calls.values():
            sizes = {"head_dim": this.head_dim + columns, "head_dim_v": this.head_dim_v + columns}
            yield changed(this, family, dtype=dtype, seqlen_k=min(this.seqlen_k, 500), **sizes)


def with_gradients() -> Iterator[Call]:
    yield from tagged("cuda-backward").values()
    for family, (dtype, size, tag) in BY_CHUNKS.items():
        for this in tagged(tag).values():
            sizes = {"head_dim": size, "head_dim_v": max(size + this.head_dim_v - this.head_dim, 8)}
            lengths = {"seqlen_q": min(this.seqlen_q, 100), "seqlen_k": min(this.seqlen_k, 100)}  # two tiles
            yield changed(this, family, dtype=dtype, **sizes, **lengths)


def head_size(size: int, variant: str, dtype: str) -> Call:
    """Of a class of tile, filled or not."""
    more, value = ({"causal": True}, size) if variant == "fast path" else ({"softcap": 5.0}, max(size - 16, 8))
    return call(f"{size}, {variant}, {dtype}", "", (1, 1, 65, 65, size, value), dtype=dtype, **more)


def head_sizes_of_other_kernels() -> Iterator[Call]:
    """Of float32, and every run of columns of 16-bit heads above 256; dense rows."""
    for size in (8, 40, 96, 128, 136, 256, 264, 384, 512):
        for dtype in ("fp32", "bf16", "fp16")[: 3 if size > CHUNKED else 1]:
            yield call(f"{size}, {dtype}", "", (1, 1, 65, 65, size, max(size - 56, 8)), dtype=dtype, softcap=5.0)


def extremes() -> Iterator[Call]:
    """Scores far from 0 and from each other, scale 0 and below, a large softcap; at sizes that leave the last tiles
    ragged."""
    yield from NUMBERS
    for dtype in ("fp16", "fp32"):
        yield from (changed(each, dtype, dtype=dtype) for each in NUMBERS[:12:2])


def far_in_ranges(score: float) -> Iterator[Call]:
    """The rows' few keys decide what is subtracted before the exponential, and those that are masked don't."""
    for dtype, size in (("bf16", 64), ("fp16", 128), ("fp32", 40)):
        sizes = (1, 1, 70, 150, size)
        yield call(f"{score}, {dtype}", "", sizes, dtype=dtype, score=score, ranges="window and sinks")


def entries(*sizes: tuple[str, int]) -> list[Call]:
    """For `dropped`: with gradients at head size 64."""
    return [call(f"{dtype}, d{n}", "", (2, 4, 70, 90, n, 90), dtype=dtype, forward_only=n > 64) for dtype, n in sizes]


class Cuda(Calls):
    """The kernels for every chip: of 16-bit numbers, of float32 and of head sizes above 256."""

    run = staticmethod(simulated.cuda)

    def ran(self, target, call, kind):
        names, wide = target.kernels(), max(call.head_dim, call.head_dim_v) > CHUNKED
        if kind.first:
            of = "" if kind.first == "decode" or call.dtype != "fp32" else "_fp32"
            assert names[0] == ("forward_wide" if wide else f"{kind.first}{of}")
        if kind.check is not None or 0 in (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k):
            return
        assert kind.gradients or set(names[1:]) <= {"combine"}
        split = "combine" in names
        assert split == ("split" in call.tags) if call.sinks else split >= ("split" in call.tags)
        if kind.gradients:
            chunks = wide or call.dtype == "fp32"
            assert {"delta", *(["chunked"] if chunks else ["dkdv", "dq"])} <= set(names) or target.recorder.target == 90
            assert ("chunked" in names) == chunks
            assert sum("sinks" in name for name in names) == bool(call.sinks)
        assert not kind.banks or target.bank_conflicts() == 0


class TestCudaForward(Cuda):
    """Every forward kernel; gradients where they are those of all calls."""

    GRIDS: ClassVar = {
        "features": Kind(on(FEATURES.values()), first="forward"),
        "features_of_other_kernels": Kind(
            grid(of_other_kernels, name=list(FEATURES), family=list(OTHERS)),
            gradients=False,
            first="forward",
            banks=True,
        ),
        "head_sizes": Kind(
            grid(
                head_size,
                size=[8, 64, 72, 128, 136, 256],
                variant=["fast path", "generic"],
                dtype=["bf16", "fp16"],
            )
        ),
        "head_sizes_of_other_kernels": Kind(on(head_sizes_of_other_kernels()), gradients=False, banks=True),
        "other_chips": Kind(on("cuda-chips", 86, 90, 120)),
        "other_chips_and_kernels": Kind(on("cuda-chips-forward", 86, 90, 120), gradients=False),
        "decode": Kind(on(DECODE.values()), first="decode"),
        "decode_by_other_kernels": Kind(on(decoded_by_other_kernels()), gradients=False, first="decode"),
        "dropped_entries": Kind(
            on(entries(("bf16", 64), ("fp32", 64), ("fp32", 200), ("bf16", 300), ("fp32", 300))), check=dropped
        ),
        "keys_behind_a_mask": Kind(on("hidden-keys"), check=hidden("bool mask")),
        "keys_behind_a_band": Kind(on("hidden-keys"), check=hidden("band")),
        "empty": Kind(on("empty"), landing=True),
    }


class TestCudaBackward(Cuda):
    """Every kernel of gradients."""

    GRIDS: ClassVar = {
        "gradients": Kind(on(with_gradients())),
        "extremes": Kind(on(extremes()), landing=True),
        "masks_beside_bands": Kind(on(MASKED_BANDS)),
        "dropout": Kind(on("cuda-dropout")),
    }


class TestCudaMasks(Cuda):
    """What all passes go by: key ranges, sinks, relative bias, what is excluded."""

    GRIDS: ClassVar = {
        "key_ranges": Kind(in_ranges(tagged("cuda-ranges"), 80, 90)),
        "extreme_scores_in_ranges": Kind(grid(far_in_ranges, gpu=[80, 90], score=SCORES)),
        "sinks": Kind(on("sinks-gpu")),
        "relative_bias": Kind(on("relative-gpu")),
        "what_is_excluded": Kind(on("cuda-unattended")),
        "what_bands_exclude": Kind(on("excluding-bands")),
        "no_numbers": Kind(on("no-numbers"), check=no_numbers),
    }


# -------------------------------------------------------------------------------------------------- CUDA C++ for Hopper

# (head size, of values) -> the class of tiles
CLASSES = {
    (64, 64): (64, 64),
    (80, 96): (96, 96),
    (64, 128): (128, 128),
    (192, 128): (192, 128),
    (136, 192): (192, 192),
    (256, 200): (256, 256),
}
FORWARD = re.compile(r"forward_sm90_kernelI(13__nv_bfloat16|6__half)Li(\d+)ELi(\d+)ELi[23]ELb([01])E")
# What follows Hopper's kernels where the call excludes something: tiles that hold NaN are computed again.
AGAIN = ["dkdv", "dq"]
RANGES = tagged("sm90-ranges")
HOPPERS_KINDS = ["documents", "window and sinks", "one range of a head", "nothing"]


def hoppers_head_size(sizes: tuple[int, int], variant: str, dtype: str) -> Call:
    """Keys enough for each buffer of the pipelines to be used twice."""
    more = {"causal": True} if variant == "fast path" else {"softcap": 5.0}
    lengths = (70, 400 if sizes[0] == 64 else 300)
    name = f"{sizes[0]} and {sizes[1]}, {variant}, {dtype}"
    return call(name, "", (1, 1, *lengths, *sizes), dtype=dtype, alignment="bottom_right", **more)


class Hopper(Calls):
    """Its own kernels (csrc/cuda/*_sm90.cu), tensor maps included; few queries go to them, too."""

    @staticmethod
    @contextlib.contextmanager
    def run(gpu):
        with simulated.cuda(gpu) as target:
            target.recorder.left_out = cuda.LEFT_OUT["cuda-decode"]
            yield target

    def ran(self, target, call, kind):
        names = target.kernels()
        assert names[0] == "forward_sm90"
        assert not kind.banks or target.bank_conflicts() == 0
        if kind.check is not None:
            return
        found = FORWARD.search(target.recorder.launches[0].name)
        tile = CLASSES.get((call.head_dim, call.head_dim_v))
        assert found[1] == {"bf16": "13__nv_bfloat16", "fp16": "6__half"}[call.dtype]
        assert tile is None or (int(found[2]), int(found[3])) == tile
        plain = not call.softcap and not call.ranges and call.softmax_scale > 0
        assert (found[4] == "1") == plain
        if not kind.gradients:
            assert len(names) == 1
            return
        backward = [name for name in names[names.index("delta") + 1 :] if name != "summarise_ranges"]
        one_walk = kind.any_order and not call.softcap
        own = ["fused_sm90", "round_dq_sm90"] if one_walk else ["dkdv_sm90", "dq_sm90"]
        excluded = testing.unattended(**call.inputs().tensors, **call.options)
        again = bool(call.ranges) or any(bool(rows.any()) for rows in excluded.values())
        expected = [*own, *(AGAIN if again else [])] if call.softcap or call.softmax_scale > 0 else AGAIN
        assert [name for name in backward if "sinks" not in name] == expected
        products = [report.statistics["products"] for report in target.recorder.reports[-2:]]
        assert call.poison is None or all(products)


class TestHopper(Hopper):
    """Every kernel of its own."""

    GRIDS: ClassVar = {
        "features": Kind(on("sm90-forward", 90), gradients=False, banks=True, landing=True),
        "head_sizes": Kind(
            grid(
                hoppers_head_size,
                gpu=[90],
                sizes=list(CLASSES),
                variant=["fast path", "softcap"],
                dtype=["bf16", "fp16"],
            ),
            gradients=False,
            banks=True,
        ),
        "keys_behind_a_band": Kind(on([tagged("hidden-keys")["d64"]], 90), check=hidden("band"), banks=True),
        "gradients": Kind(on("sm90-backward", 90)),
        "gradients_in_one_walk": Kind(on("sm90-fused", 90), any_order=True, banks=True),
        "extremes": Kind(on(NUMBERS, 90), landing=True),
        "extremes_in_one_walk": Kind(
            on((override(each, dtype="fp16", head_dim=128) for each in NUMBERS), 90), any_order=True, landing=True
        ),
    }


class TestHopperMasks(Hopper):
    """What all passes go by, also those that come again for what is excluded."""

    GRIDS: ClassVar = {
        "key_ranges": Kind(in_ranges(RANGES, 90, kinds=HOPPERS_KINDS), banks=True),
        "key_ranges_in_one_walk": Kind(
            in_ranges({"d128": RANGES["d128"]}, 90, kinds=HOPPERS_KINDS), any_order=True, banks=True
        ),
        "sinks": Kind(
            on((call(f"d{n}", "", (2, 2, 130, 150, n), causal=True, sinks="H") for n in (64, 128, 256)), 90),
            gradients=False,
        ),
        "no_numbers": Kind(on("no-numbers-sm90", 90), check=no_numbers),
        "what_is_excluded": Kind(on("sm90-unattended", 90)),
        "what_is_excluded_in_one_walk": Kind(on("sm90-fused-unattended", 90), any_order=True),
        "what_bands_exclude": Kind(
            on(
                (
                    dataclasses.replace(each, name=f"{each.name}, d{size}", head_dim=size, head_dim_v=size)
                    for each in tagged("excluding-bands").values()
                    for size in (64, 256)
                ),
                90,
            )
        ),
    }


# --------------------------------------------------------------------------------------------------------------- Triton


def shares_a_bias(call: Call) -> bool:
    """An entry of a mask that has a gradient goes with several scores."""
    kind, shape, *_ = (*call.mask.split(), "")
    sizes = (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k)
    alike = [n > 1 for entry, n in zip(shape.rjust(4, "1"), sizes, strict=True) if entry == "1"]
    return kind in ("float", "holes") and any(alike)


def extremes_in_ranges() -> Iterator[Call]:
    """Of rows that attend to any keys, and with most rows that have none."""
    for ranges in ("anything B1L 2", "few B1L 2"):
        yield from (override(each, ranges=ranges) for each in NUMBERS[3::4])


class TestTriton(Calls):
    """The Triton kernels."""

    run = staticmethod(simulated.triton)

    def ran(self, target, call, kind):
        names = target.kernels()
        if 0 in (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k):
            assert not names
        elif kind.check is None:
            split = ["decode_kernel", "combine_kernel"]
            assert kind.first != "decode" or names == split
            assert not call.sinks or (split[1] in names) == ("split" in call.tags)
            if kind.gradients:
                assert {"delta_kernel", "dkdv_kernel", "dq_kernel"} <= set(names)
                assert ("visits_kernel" in names) == bool(call.ranges)
                assert call.relative or ("bias_gradient_kernel" in names) == shares_a_bias(call)

    GRIDS: ClassVar = {
        "features": Kind(on_own("triton")),
        "extremes": Kind(grid(lambda extreme: extreme, gpu=[80, 90], extreme=NUMBERS), landing=True),
        "masks_beside_bands": Kind(grid(lambda masked: masked, gpu=[80, 90], masked=MASKED_BANDS[::2])),
        "extremes_in_ranges": Kind(on(extremes_in_ranges(), 80, 90)),
        "decode": Kind(on_own("triton-decode"), gradients=False, first="decode"),
        "decode_in_ranges": Kind(on("triton-decode-ranges", 80, 90), gradients=False, first="decode"),
        "sinks": Kind(on_own("sinks-gpu")),
        "relative_bias": Kind(on_own("relative-gpu")),
        "key_ranges": Kind(in_ranges(tagged("triton-ranges"), 80, 90)),
        "key_ranges_beside_masks": Kind(
            in_ranges(tagged("triton-masked-ranges"), 80, 90, kinds=["whole documents", "window and sinks", "anything"])
        ),
        "dropped_entries": Kind(on(entries(("bf16", 64)), 80, 90), check=dropped),
        "dropout": Kind(on("triton-dropout", 80, 90)),
        "keys_behind_a_mask": Kind(on("hidden-keys"), check=hidden("bool mask")),
        "keys_behind_a_band": Kind(on("hidden-keys"), check=hidden("band")),
        "what_is_excluded": Kind(on("triton-unattended", 80, 90)),
        "what_is_excluded_from_decoding": Kind(on("triton-decode-unattended"), gradients=False, first="decode"),
        "what_bands_exclude": Kind(on("excluding-bands", 80, 90)),
        "no_numbers": Kind(on("no-numbers"), check=no_numbers),
        "empty": Kind(on("empty"), landing=True),
    }
