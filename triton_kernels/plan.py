"""What the launches of a problem need but for its tensors: a function of shapes, strides and options, so that it can be
kept. A new sequence length costs some arithmetic; only what is a constant of a kernel (head sizes, features, alignment)
makes another variant of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..params import GRAD_BIAS, GRAD_K, GRAD_Q, GRAD_V, AttentionParams, decodes
from ..shapes import Layout, Sizes, TensorSpec
from . import configs, launch
from .arguments import FLOATS, Constants, Strides, reaches_all, score_constants, score_numbers
from .backward import delta_kernel, dkdv_kernel, dq_kernel
from .bias_gradient import bias_gradient_kernel, table_gradient_kernel
from .configs import Config
from .decode import combine_kernel, decode_kernel
from .forward import forward_kernel
from .launch import NOTHING, Leaf
from .ranges import VISIT, visits_kernel
from .tangent import tangent_kernel

ELEMENTS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "u8"}
DELTA = Config(64, 0, 4, 1)
VISITS = Config(VISIT.value, VISIT.value, 4, 1)
TABLE_PROGRAMS = 1024  # of table_gradient_kernel: up to so many its bands are cut into walks, several for a processor
_HEAD_DIM_V = ("v", "tv", "grad_out")  # of the tensors that are loaded by tiles, those of head size head_dim_v
table: configs.Table = configs.TABLE  # a device's own, if `use_table` was called


def use_table(chosen: configs.Table) -> None:
    """Takes configurations from another table (`configs.load`) from now on."""
    global table
    table = chosen
    for plan in (forward_plan, backward_plan, tangent_plan, second_backward_plan):
        plan.cache_clear()


def padded(x: torch.Tensor, unit: int) -> torch.Tensor:
    """A copy whose rows start at multiples of `unit` elements."""
    *shape, size = x.shape
    return x.new_empty(*shape, -(-size // unit) * unit)[..., :size].copy_(x)


class Pages(NamedTuple):
    """Keys and values in pages. k and v are then specs of (pages, heads, keys of a sequence, size), with the strides of
    the pages."""

    size: int  # rows of a page
    table_row: int  # entries of the table from one sequence to the next


class PlanKey(NamedTuple):
    """The key of a plan."""

    capability: int
    dtype: torch.dtype
    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    bias: TensorSpec | None
    bias_dtype: torch.dtype | None
    seeds: int  # Philox keys; 0: no dropout
    params: AttentionParams
    tf32: bool  # products of float32 may be rounded to tf32
    ranges: TensorSpec | None = None
    sinks: bool = False
    pages: Pages | None = None  # in which keys and values lie


class TangentSpecs(NamedTuple):
    """Tangents of q, k, v and the bias, or cotangents of their gradients; None is zero."""

    q: TensorSpec | None
    k: TensorSpec | None
    v: TensorSpec | None
    bias: TensorSpec | None


class Step(NamedTuple):
    """A launch. `rest` are the arguments after the tensors, `descriptors` two for each of those that load tiles; `pads`
    says of each tensor so loaded to a multiple of how many elements its rows must be copied, 0: not at all."""

    kernel: launch.Kernel
    grid: int
    rest: tuple
    descriptors: tuple[tuple[dict[str, Any], dict[str, Any]], ...] | None
    pads: tuple[int, ...]

    def tiles(self, *tensors: torch.Tensor | None) -> list[Any]:
        """Each tensor as two arguments: for its first columns and for the rest. None, where there is none, stays."""
        if self.descriptors is None:
            return [argument for x in tensors for argument in (x, x)]
        make = launch.descriptor
        arguments: list[Any] = []
        each = zip(self.descriptors, self.pads, strict=True)
        for x in tensors:
            if x is None:
                arguments += (None, None)
                continue
            (first, rest), unit = next(each)
            if unit:
                x = padded(x, unit)
            arguments += (make(first, x), make(rest, x))
        return arguments


class Forward(NamedTuple):
    out: Layout
    lse_shape: Sizes
    step: Step | None  # None: there is nothing to add up
    combine: Step | None = None  # after `step` where that splits the keys: puts the parts together,
    parts: Sizes = ()  # (batch, heads, seqlen_q, splits, head_dim_v)


class Bands(NamedTuple):
    """What table_gradient_kernel writes: sums by distance of each band of tiles."""

    shape: Sizes  # (batch, heads, walks, bands, BLOCK_M + BLOCK_N)
    apart: int  # distances from a band's first to the next one's, BLOCK_N
    first: int  # the first band's first distance


class Backward(NamedTuple):
    """None for a step: nothing asks for it, or there is nothing to add up."""

    grads: tuple[Layout | None, ...]  # dq, dk, dv; None: not asked for
    dq_layout: Layout
    delta: Step | None
    dkdv: Step | None
    dq: Step | None
    dbias: Step | None
    parts: tuple[tuple[Layout, torch.dtype], ...]  # dk and dv as dkdv_kernel writes them: of as many heads or more
    bias_falls_off: bool  # dq_kernel stores the bias' gradient too,
    zero_bias: bool  # but for what the band and the key ranges exclude; a table, to which `bands` are added
    visits: Step | None = None  # before dkdv and dbias, where these ask which queries visit their keys: writes
    visits_shape: Sizes = ()  # what this is the shape of, zeros before
    bands: Bands | None = None  # of a table: what dbias writes


class Tangent(NamedTuple):
    tout: Layout
    step: Step | None  # None: there is nothing to add up


@functools.lru_cache(maxsize=4096)
def forward_plan(problem: PlanKey, need_lse: bool, processors: int = 0) -> Forward:
    """The launches of `attnkern::forward` on a device of so many multiprocessors (0: the keys are not split)."""
    q, k, v = problem.q, problem.k, problem.v
    out = q.like(v.shape[3])
    lse_shape = q.shape[:3] if need_lse else (0,)
    if 0 in (*q.shape[:3], k.shape[2]):
        return Forward(out, lse_shape, None)
    build = _Builder(problem)
    build.tensor("out", out.spec(), problem.dtype)
    if not need_lse:
        build.tensors["lse"] = NOTHING
    if processors and (parts := build.splits(processors)) is not None:
        return Forward(out, lse_shape, *build.decode(*parts, need_lse))
    loaded = {"k": k, "v": v} if problem.pages is None else {}
    step = build.step(forward_kernel, "forward", loaded, WRITE_LSE=need_lse)
    return Forward(out, lse_shape, step)


@functools.lru_cache(maxsize=4096)
def backward_plan(
    problem: PlanKey, grad_out: TensorSpec, out: TensorSpec, has_grad_lse: bool, grad_mask: int
) -> Backward:
    """The launches of `attnkern::backward`."""
    q, k = problem.q, problem.k
    grads = _grad_layouts(problem, grad_mask)
    dq_layout = q.like(q.shape[3])
    if 0 in (*q.shape[:3], k.shape[2]):
        return Backward(grads, dq_layout, None, None, None, None, (), False, bool(grad_mask & GRAD_BIAS))
    build = _Builder(problem)
    delta = build.delta(grad_out, out, has_grad_lse)
    return Backward(grads, dq_layout, delta, *build.gradients(grad_out, grad_mask, None))


@functools.lru_cache(maxsize=4096)
def tangent_plan(problem: PlanKey, tangents: TangentSpecs, out: TensorSpec) -> Tangent:
    """The launch of `attnkern::tangent`."""
    q, k = problem.q, problem.k
    layout = q.like(problem.v.shape[3])
    if 0 in (*q.shape[:3], k.shape[2]):
        return Tangent(layout, None)
    build = _Builder(problem)
    build.add_tangents(tangents)
    build.tensor("out", out, problem.dtype)
    return Tangent(layout, build.tangent(tangents, layout))


@functools.lru_cache(maxsize=4096)
def second_backward_plan(
    problem: PlanKey, tangents: TangentSpecs, grad_out: TensorSpec, out: TensorSpec, has_grad_lse: bool, grad_mask: int
) -> tuple[Tangent, Backward]:
    """The launches of `attnkern::second_backward`."""
    q, k = problem.q, problem.k
    grads = _grad_layouts(problem, grad_mask)
    tout, dq_layout = q.like(problem.v.shape[3]), q.like(q.shape[3])
    if 0 in (*q.shape[:3], k.shape[2]):
        nothing = Backward(grads, dq_layout, None, None, None, None, (), False, bool(grad_mask & GRAD_BIAS))
        return Tangent(tout, None), nothing
    build = _Builder(problem)
    build.add_tangents(tangents)
    delta = build.delta(grad_out, out, has_grad_lse)
    tangent = build.tangent(tangents, tout)
    return Tangent(tout, tangent), Backward(grads, dq_layout, delta, *build.gradients(grad_out, grad_mask, tangents))


def _grad_layouts(problem: PlanKey, grad_mask: int) -> tuple[Layout | None, ...]:
    wanted = ((problem.q, GRAD_Q), (problem.k, GRAD_K), (problem.v, GRAD_V))
    return tuple(x.like(x.shape[3]) if grad_mask & bit else None for x, bit in wanted)


class _Builder:
    """The values of all arguments by name, of which every kernel takes those that it has."""

    def __init__(self, problem: PlanKey):
        self.problem = problem
        q, k, v = problem.q, problem.k, problem.v
        batch, heads, seqlen_q, head_dim = q.shape
        seqlen_k, head_dim_v = v.shape[2:]
        self.numbers: dict[str, Any] = {
            **score_numbers(problem.params),
            "batch": batch,
            "heads": heads,
            "group_k": heads // k.shape[1],
            "group_v": heads // v.shape[1],
            "seeded_batch": batch // max(problem.seeds, 1),
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
        }
        if problem.pages is not None:
            size, row = problem.pages
            self.numbers |= {"pages": k.shape[0], "page_shift": size.bit_length() - 1, "table_row": row}
        low, high = self.numbers["band_low"], self.numbers["band_high"]
        self.constants: dict[str, Any] = {
            "QK": _columns(head_dim),
            "V": _columns(head_dim_v),
            "BIAS": 0,
            "NATURAL": False,
            "RANGES": 0 if problem.ranges is None else problem.ranges.shape[3],
            **score_constants(problem.params),
            "DROPOUT": problem.seeds > 0,
            # A bound that excludes no entry is none, such as that of a bottom-right causal band of one query.
            "HAS_LOW": seqlen_q - 1 + low > 0,
            "HAS_HIGH": high < seqlen_k - 1,
            "UNATTENDED": problem.ranges is not None or not reaches_all(seqlen_q, seqlen_k, low, high),
            "CLEAR": False,
            "PRECISION": "ieee" if problem.dtype != torch.float32 else "tf32" if problem.tf32 else "tf32x3",
            "TANGENT": False,
            "PAGES": 0,
            **dict.fromkeys(("TQ", "TK", "TV", "TBIAS"), 0),
        }
        self.tensors: dict[str, Leaf] = {
            **dict.fromkeys(("bias", "tq", "tk", "tv", "tbias", "ranges", "visits", "grad_out", "mu", "nu"), NOTHING),
            **dict.fromkeys(("pages", "page_shift", "table_row"), NOTHING),
            "table": NOTHING if problem.pages is None else Leaf("*i32"),
            **{f"{name}{n}": NOTHING for name in ("tq", "tk", "tv") for n in (0, 1)},
            "seed": Leaf("*i64") if problem.seeds else NOTHING,
            "sinks": Leaf("*fp32") if problem.sinks else NOTHING,
            "lse": Leaf("*fp32"),
            "delta": Leaf("*fp32"),
        }
        self.strides: dict[str, Strides] = {}
        self.divisors: dict[str, int] = {}
        for name, x in (("q", q), ("k", k), ("v", v)):
            self.tensor(name, x, problem.dtype)
        if problem.bias is not None:
            assert problem.bias_dtype is not None
            self._bias("bias", problem.bias, problem.bias_dtype)
        if problem.ranges is not None:
            self._integers("ranges", problem.ranges)
        self.constants["NATURAL"] = self.constants["BIAS"] % 2 == 1
        self.constants["UNATTENDED"] |= problem.bias is not None and not self.constants["NATURAL"]

    def tensor(self, name: str, x: TensorSpec, dtype: torch.dtype) -> None:
        """A tensor (batch, heads, length, size): its pointer, its strides, and what is known of their alignment."""
        unit = 16 // dtype.itemsize
        aligned = x.vectors(unit)
        pointer = Leaf(f"*{ELEMENTS[dtype]}", None, 16 if aligned else 1)
        self.tensors |= dict.fromkeys((name, f"{name}0", f"{name}1"), pointer)
        # From one batch element or head to the next reaches beyond 2^31; what stays within a tile doesn't.
        b, *others = x.strides()[:3]
        narrow = self.problem.pages is not None and name in ("k", "v") and b < 2**31  # of each row's page: a mad.wide
        kinds = zip(("i32" if narrow else "i64", "i64", "i32"), (b, *others), strict=True)
        self.strides[name] = Strides(*(Leaf(kind, stride, unit if aligned else 1) for kind, stride in kinds), NOTHING)

    def _bias(self, name: str, bias: TensorSpec, dtype: torch.dtype) -> None:
        """bias or tbias"""
        _, _, row, column = bias.strides()
        kind = {torch.bool: 2, torch.uint8: 4}.get(dtype, 1)
        self.constants[name.upper()] = kind + (8 if row == 0 else 0)
        if dtype == torch.uint8:
            self._integers(name, bias, "*u8")
            return
        self.tensor(name, bias, dtype)
        unit = 16 // dtype.itemsize
        column_kind = "i32" if column > 1 else "constexpr"
        self.strides[name] = self.strides[name]._replace(column=Leaf(column_kind, column))
        if self.tensors[name].divisor > 1 and self.numbers["seqlen_k"] % unit == 0:
            # Else the mask of its last columns cuts vectors.
            self.divisors["seqlen_k"] = max(unit, self.divisors.get("seqlen_k", 1))

    def _integers(self, name: str, x: TensorSpec, pointer: str = "*i32") -> None:
        """ranges or visits, or a bias of bits"""
        self.tensors[name] = Leaf(pointer)
        self.strides[name] = Strides(*(Leaf("i64", stride) for stride in x.strides()[:3]), NOTHING)

    def add_tangents(self, tangents: TangentSpecs) -> None:
        problem = self.problem
        for name, x in zip(("tq", "tk", "tv"), tangents[:3], strict=True):
            if x is not None:
                self.tensor(name, x, problem.dtype)
                self.constants[name.upper()] = 1
        if tangents.bias is not None:
            assert problem.bias_dtype is not None
            self._bias("tbias", tangents.bias, problem.bias_dtype)

    def variant(
        self, function: Any, config: Config, constants: Mapping[str, Any], described: Mapping[str, Leaf] | None = None
    ) -> tuple[launch.Kernel, tuple]:
        """`launch.variant` with what is known by now."""
        numbers = {
            name: Leaf("fp32" if name in FLOATS else "i32", value, self.divisors.get(name, 1))
            for name, value in self.numbers.items()
        }
        if self.numbers.get("kv_group") == 1:
            numbers["kv_group"] = Leaf("constexpr", 1)  # no loop over heads: 30 registers
        given = {**self.tensors, **numbers, **(described or {})}
        return launch.variant(function, given, self.strides, constants, config)

    def step(self, function: Any, name: str, loaded: Mapping[str, TensorSpec], **constants: Any) -> Step:
        """The launch of a kernel that loads tiles of the two tensors `loaded`: by descriptors where the chip has them.

        A tensor that can't be described is copied. (By pointers, wgmma would read what cp.async has written: without a
        fence between, which Triton leaves out, and one product after the other.)
        """
        problem = self.problem
        constants = {**self.constants, **constants}
        unit = 16 // problem.dtype.itemsize
        sizes = problem.q.shape[3], problem.v.shape[3]
        has_tma = configs.has_tma(problem.capability)
        roomy = has_tma and bool(loaded) and name not in configs.MMA_SYNC
        chunk = configs.chunk(*sizes, problem.dtype.itemsize, roomy)
        if name == "second_dbias" and max(sizes) > 64 and chunk == 0:
            chunk = 64  # what a chunk loads again, it would have used once: most often it owns one tile of a head
        tma = has_tma and bool(loaded) and chunk == 0
        arch = configs.arch_class(problem.capability, tma or chunk > 0)
        held = (constants[name] for name in ("BIAS", "RANGES", "SOFTCAP", "DROPOUT"))
        feature = configs.feature_class(*held)
        of_table = name.replace("dbias", "dq")  # the same products but one
        row = configs.Row(arch, of_table, problem.dtype.itemsize, feature)
        config = configs.choose(row, *sizes, table)
        if (name.endswith("dbias") or problem.pages is not None) and has_tma:
            config = config._replace(num_stages=1)  # no cp.async: see above
        if function is table_gradient_kernel:
            if not constants["TANGENT"]:
                config = configs.bands(*sizes, problem.dtype.itemsize)
            # Tiles of queries are loaded in the loop too, for which shared memory has no second stage.
            config = config._replace(block_n=min(config.block_m, config.block_n), num_stages=1)
            self._cut_in_bands(config)
        constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "TMA": tma, "CHUNK": chunk}
        constants["PAGES"] = self._pages(config.block_n)
        blocks, descriptors, pads = {}, [], []
        if tma:
            rows = config.block_m if name.endswith("dkdv") else config.block_n
            for tensor, x in loaded.items():
                pads.append(0 if x.describable(unit) else unit)
                described = x.padded(unit) if pads[-1] else x
                widths = configs.chunks(sizes[tensor in _HEAD_DIM_V])
                boxes = [(1, 1, rows, width or 16) for width in widths]
                for n, box in enumerate(boxes):
                    blocks[f"{tensor}{n}"] = Leaf(launch.block(ELEMENTS[problem.dtype], box))
                descriptors.append(tuple(_descriptor_fields(described, box, unit) for box in boxes))
        kernel, rest = self.variant(function, config, constants, blocks)
        return Step(kernel, self._grid(name, config, constants), rest, tuple(descriptors) or None, tuple(pads))

    def _pages(self, block_n: int) -> int:
        """`PAGES` of tiles.py."""
        pages = self.problem.pages
        return 0 if pages is None else 2 if pages.size >= block_n else 1

    def _cut_in_bands(self, config: Config) -> None:
        """The numbers of table_gradient_kernel: of the bands in which some query may see a key."""
        numbers = self.numbers
        size, step = config.block_m, config.block_n
        lowest = max(1 - numbers["seqlen_q"], numbers["band_low"])
        highest = min(numbers["seqlen_k"] - 1, numbers["band_high"])
        first = lowest // step
        bands = max((highest + size - 1) // step - first + 1, 0) if lowest <= highest else 0
        programs = bands * numbers["batch"] * numbers["heads"]
        tiles = -(-min(numbers["seqlen_q"], numbers["seqlen_k"]) // size)
        walks = max(min(TABLE_PROGRAMS // max(programs, 1), tiles // 2), 1)
        self.numbers |= {"first_band": first, "bands": bands, "walks": walks}

    def delta(self, grad_out: TensorSpec, out: TensorSpec, has_grad_lse: bool) -> Step:
        problem = self.problem
        self.tensor("out", out, problem.dtype)
        self.tensor("grad_out", grad_out, problem.dtype)
        self.tensors["grad_lse"] = Leaf("*fp32") if has_grad_lse else NOTHING
        first, _ = configs.chunks(problem.v.shape[3])
        own = {"V": self.constants["V"], "BLOCK_M": DELTA.block_m, "DIMS": min(first, 64), "HAS_GRAD_LSE": has_grad_lse}
        kernel, rest = self.variant(delta_kernel, DELTA, own)
        return Step(kernel, self._grid("delta", DELTA, own), rest, None, ())

    def visits(self) -> tuple[Step, Sizes]:
        """The launch of visits_kernel, and the shape of what it writes."""
        assert self.problem.ranges is not None
        batch, heads, *_ = self.problem.ranges.shape
        shape = (batch, heads, -(-self.numbers["seqlen_k"] // VISITS.block_n), 2)
        self._integers("visits", TensorSpec(shape, (0, 0, 0, 0), True).like(2).spec())
        self.numbers["ranges_heads"] = heads
        own = {name: self.constants[name] for name in ("RANGES", "HAS_LOW", "HAS_HIGH")}
        own |= {"BLOCK_M": VISITS.block_m, "BLOCK_N": VISITS.block_n}
        kernel, rest = self.variant(visits_kernel, VISITS, own)
        tiles = -(-self.numbers["seqlen_q"] // VISITS.block_m)
        return Step(kernel, tiles * batch * heads, rest, None, ()), shape

    def tangent(self, tangents: TangentSpecs, tout: Layout) -> Step:
        """After `add_tangents`, and `delta` where nu is asked for."""
        problem = self.problem
        self.tensor("tout", tout.spec(), problem.dtype)
        asks_nu = self.tensors["grad_out"] is not NOTHING
        self.tensors |= {"tlse": Leaf("*fp32"), "mu": Leaf("*fp32"), "nu": Leaf("*fp32") if asks_nu else NOTHING}
        loaded = {"k": problem.k, "v": problem.v, "tk": tangents.k, "tv": tangents.v}
        return self.step(tangent_kernel, "tangent", _given(loaded), NU=asks_nu)

    def gradients(self, grad_out: TensorSpec, grad_mask: int, tangents: TangentSpecs | None) -> tuple[Any, ...]:
        """The fields of a `Backward` after delta: of the first derivative, or of the second, which has tangents."""
        problem = self.problem
        q, k, v, bias = problem.q, problem.k, problem.v, problem.bias
        order = "" if tangents is None else "second_"
        tq, tk, tv = (None, None, None) if tangents is None else tangents[:3]
        self.constants["TANGENT"] = tangents is not None
        kv_group = math.gcd(self.numbers["group_k"], self.numbers["group_v"])
        heads_out = q.shape[1] // kv_group
        self.numbers |= {"heads_out": heads_out, "kv_group": kv_group}
        dkdv = dq = dbias = visits = bands = None
        visits_shape: Sizes = ()
        by_keys = GRAD_K | GRAD_V | (GRAD_BIAS if bias is not None and not bias.is_table() else 0)
        if problem.ranges is not None and grad_mask & by_keys:
            visits, visits_shape = self.visits()
        parts = []
        if grad_mask & (GRAD_K | GRAD_V):
            for name, x in (("dk", k), ("dv", v)):
                # Heads that are still to be added up are kept in float32.
                own = x.shape[1] == heads_out
                as_written = x if own else TensorSpec((x.shape[0], heads_out, *x.shape[2:]), (0, 0, 0, 0), True)
                layout, dtype = as_written.like(x.shape[3]), problem.dtype if own else torch.float32
                self.tensor(name, layout.spec(), dtype)
                parts.append((layout, dtype))
            loaded = {"q": q, "tq": tq, "grad_out": grad_out}
            dkdv = self.step(dkdv_kernel, f"{order}dkdv", _given(loaded))
        falls_off = False
        if grad_mask & GRAD_BIAS:
            assert bias is not None
            assert problem.bias_dtype is not None
            falls_off = bias.shape == (*q.shape[:3], k.shape[2]) and not bias.is_table()
            dense = TensorSpec(bias.shape, (0, 0, 0, 0), True).like(bias.shape[3]).spec()
            self.tensor("dbias", dense, problem.bias_dtype)
            if bias.is_table():
                self.tensors["parts"] = Leaf("*fp32")
                dbias = self.step(table_gradient_kernel, f"{order}dbias", {})
                bands = self._bands(dbias)
                dbias = dbias if dbias.grid else None
            elif not falls_off:
                self.numbers |= {"bias_batch": bias.shape[0], "bias_heads": bias.shape[1]}
                shared = {"ROWS_SHARED": bias.shape[2] == 1, "COLS_SHARED": bias.shape[3] == 1}
                dbias = self.step(bias_gradient_kernel, f"{order}dbias", {}, **shared)
        if grad_mask & GRAD_Q or falls_off:
            self.tensor("dq", q.like(q.shape[3]).spec(), problem.dtype)
            if not falls_off:
                self.tensors["dbias"] = NOTHING
                self.strides.pop("dbias", None)
            loaded = {"k": k, "v": v, "tk": tk, "tv": tv}
            dq = self.step(dq_kernel, f"{order}dq", _given(loaded), DBIAS=falls_off)
        zero = falls_off and any(self.constants[name] for name in ("HAS_LOW", "HAS_HIGH", "RANGES"))
        zero = zero or bands is not None
        return dkdv, dq, dbias, tuple(parts), falls_off, zero, visits, visits_shape, bands

    def _bands(self, dbias: Step) -> Bands:
        """What the launch of table_gradient_kernel writes."""
        numbers, constants = self.numbers, dbias.kernel.constants
        size, step = constants["BLOCK_M"], constants["BLOCK_N"]
        shape = (*(numbers[name] for name in ("batch", "heads", "walks", "bands")), size + step)
        return Bands(shape, step, numbers["first_band"] * step - (size - 1))

    def splits(self, processors: int) -> tuple[int, Config] | None:
        """How many parts decode_kernel cuts the keys into, and its configuration; None where forward_kernel serves
        better: it has tiles enough, or the keys are too few, or what it does is needed."""
        problem, numbers = self.problem, self.numbers
        rows = numbers["group_k"] * numbers["seqlen_q"]
        if numbers["group_k"] != numbers["group_v"] or not decodes(numbers["group_k"], numbers["seqlen_q"]):
            return None
        if problem.seeds:
            return None
        config = configs.decode(rows, problem.q.shape[3], problem.v.shape[3], problem.dtype.itemsize)
        reached = min(numbers["seqlen_q"] + numbers["band_high"], numbers["seqlen_k"]) - max(numbers["band_low"], 0)
        if reached < 2 * configs.SPLIT_KEYS:
            return None
        programs = numbers["batch"] * problem.k.shape[1] * -(-rows // config.block_m)
        parts = configs.splits(reached, config.block_n, programs, processors)
        return (parts, config) if parts > 1 or numbers["group_k"] > 1 else None

    def decode(self, splits: int, config: Config, need_lse: bool) -> tuple[Step, Step, Sizes]:
        """The fields of a `Forward` after its first two."""
        problem = self.problem
        batch, heads, seqlen_q, _ = problem.q.shape
        heads_k, dims = problem.k.shape[1], problem.v.shape[3]
        self.numbers |= {"heads_k": heads_k, "group": heads // heads_k, "splits": splits}
        self.tensors |= {"part_out": Leaf("*fp32", None, 16), "part_lse": Leaf("*fp32")}
        tiles = -(-heads // heads_k * seqlen_q // config.block_m)
        chunk = configs.chunk(problem.q.shape[3], dims, problem.dtype.itemsize, True)
        own = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "CHUNK": chunk, "UNATTENDED": False}
        own["PAGES"] = self._pages(config.block_n)
        kernel, rest = self.variant(decode_kernel, config, {**self.constants, **own})
        first = Step(kernel, splits * tiles * batch * heads_k, rest, None, ())
        # Two sizes, not one for each number of splits: the number follows the length, and a variant takes compiling.
        sizes = {"SPLITS": 16 if splits <= 16 else configs.MAX_SPLITS, "DIMS": 1 << (dims - 1).bit_length()}
        warps = min(max(sizes["SPLITS"] * sizes["DIMS"] // 2048, 1), 16)
        own = {"V": self.constants["V"], **sizes, "WRITE_LSE": need_lse}
        kernel, rest = self.variant(combine_kernel, Config(0, 0, warps, 1), own)
        combine = Step(kernel, seqlen_q * batch * heads, rest, None, ())
        return first, combine, (batch, heads, seqlen_q, splits, dims)

    def _grid(self, name: str, config: Config, constants: Mapping[str, Any]) -> int:
        numbers = self.numbers
        blocks_m, blocks_n = (
            -(-numbers[f"seqlen_{x}"] // max(n, 1)) for x, n in (("q", config.block_m), ("k", config.block_n))
        )
        if name.endswith("dkdv"):
            return blocks_n * numbers["batch"] * numbers["heads_out"]
        if name.endswith("dbias") and "ROWS_SHARED" not in constants:
            return numbers["walks"] * numbers["bands"] * numbers["batch"] * numbers["heads"]
        if name.endswith("dbias"):
            tiles = (1 if constants["ROWS_SHARED"] else blocks_m) * (1 if constants["COLS_SHARED"] else blocks_n)
            return tiles * numbers["bias_batch"] * numbers["bias_heads"]
        return blocks_m * numbers["batch"] * numbers["heads"]


def _columns(size: int) -> Constants:
    """`W` of tiles.py."""
    first, rest = configs.chunks(size)
    return Constants(dims=size, first=first, rest=rest)


def _given(tensors: Mapping[str, TensorSpec | None]) -> dict[str, TensorSpec]:
    return {name: x for name, x in tensors.items() if x is not None}


def _descriptor_fields(x: TensorSpec, box: Sizes, unit: int) -> dict[str, Any]:
    strides = [s if s > 0 else unit for s in x.strides()[:3]]  # of a single entry: any that is allowed
    return {
        "shape": list(x.shape),
        "strides": [*strides, 1],
        "block_shape": list(box),
        "padding": "zero",
        "round_f32_to_tf32": False,
    }
