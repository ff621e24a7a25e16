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

from ..params import DECODE_MAX_ROWS, GRAD_BIAS, GRAD_K, GRAD_Q, GRAD_V, AttentionParams, is_length_major
from . import configs, launch
from .backward import delta_kernel, dkdv_kernel, dq_kernel
from .bias_gradient import bias_gradient_kernel
from .configs import Config
from .decode import combine_kernel, decode_kernel
from .forward import forward_kernel
from .second_backward import second_bias_gradient_kernel, second_dkdv_kernel, second_dq_kernel
from .tangent import tangent_kernel

Sizes = tuple[int, ...]

ELEMENTS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "u8"}
FAR = 2**30  # a bound and a row add up within 32 bits
LOG2E = math.log2(math.e)
DELTA = Config(64, 0, 4, 1)
_HEAD_DIM_V = ("v", "tv", "grad_out")  # of the tensors that are loaded by tiles, those of V0 + V1 columns
table: configs.Table = configs.TABLE  # a device's own, if `use_table` was called


def use_table(chosen: configs.Table) -> None:
    """Takes configurations from another table (`configs.load`) from now on."""
    global table
    table = chosen
    for plan in (forward_plan, backward_plan, tangent_plan, second_backward_plan):
        plan.cache_clear()


class Kind(NamedTuple):
    """What a plan knows of a tensor (batch, heads, length, size)."""

    shape: Sizes
    stride: Sizes
    aligned: bool  # its address is a multiple of 16 bytes

    def strides(self) -> Sizes:
        """0 where a dimension has one entry: whatever torch says there means nothing."""
        return tuple(0 if n <= 1 else s for n, s in zip(self.shape, self.stride, strict=True))

    def vectors(self, unit: int) -> bool:
        """Whether 16 bytes, `unit` elements, can be loaded at a time."""
        return self.aligned and all(s % unit == 0 for s in self.strides()[:3])

    def describable(self, unit: int) -> bool:
        """Whether a tensor descriptor can stand for it: as `vectors`, and no dimension is empty or broadcast."""
        steps = zip(self.shape, self.strides(), strict=True)
        return self.vectors(unit) and all(n == 1 or (n > 1 and s > 0) for n, s in steps)

    def padded(self, unit: int) -> Kind:
        """What `padded` makes of it: describable in any case."""
        _, heads, length, size = self.shape
        pitch = -(-size // unit) * unit
        return Kind(self.shape, (heads * length * pitch, length * pitch, pitch, 1), True)

    def like(self, size: int) -> Layout:
        """The layout of a result (B, H, L, size) in this memory order, as ops.py's fakes have it."""
        batch, heads, length, _ = self.shape
        h, m, d = (max(n, 1) for n in (heads, length, size))
        if is_length_major(self.shape, self.stride):
            return Layout((batch, heads, length, size), (m * h * d, d, h * d, 1))
        return Layout((batch, heads, length, size), (h * m * d, m * d, d, 1))


def padded(x: torch.Tensor, unit: int) -> torch.Tensor:
    """A copy whose rows start at multiples of `unit` elements."""
    *shape, size = x.shape
    return x.new_empty(*shape, -(-size // unit) * unit)[..., :size].copy_(x)


class Layout(NamedTuple):
    shape: Sizes
    stride: Sizes

    def kind(self) -> Kind:
        return Kind(self.shape, self.stride, True)


class Problem(NamedTuple):
    """The key of a plan."""

    capability: int
    dtype: torch.dtype
    q: Kind
    k: Kind
    v: Kind
    bias: Kind | None
    bias_dtype: torch.dtype | None
    seeds: int  # Philox keys; 0: no dropout
    params: AttentionParams
    tf32: bool  # products of float32 may be rounded to tf32


class Direction(NamedTuple):
    """Tangents of q, k, v and the bias, or cotangents of their gradients; None is zero."""

    q: Kind | None
    k: Kind | None
    v: Kind | None
    bias: Kind | None


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
    zero_bias: bool  # but for what the band excludes


class Tangent(NamedTuple):
    tout: Layout
    step: Step | None  # None: there is nothing to add up


@functools.lru_cache(maxsize=4096)
def forward_plan(problem: Problem, need_lse: bool, processors: int = 0) -> Forward:
    """The launches of `attnkern::forward` on a device of so many multiprocessors (0: the keys are not split)."""
    q, k, v = problem.q, problem.k, problem.v
    out = q.like(v.shape[3])
    lse_shape = q.shape[:3] if need_lse else (0,)
    if 0 in (*q.shape[:3], k.shape[2]):
        return Forward(out, lse_shape, None)
    build = _Builder(problem)
    build.tensor("out", out.kind(), problem.dtype, "m")
    build.pointers["lse"] = "fp32" if need_lse else None
    if processors and (parts := build.splits(processors)) is not None:
        return Forward(out, lse_shape, *build.decode(*parts, need_lse))
    step = build.step(forward_kernel, "forward", {"k": k, "v": v}, WRITE_LSE=need_lse)
    return Forward(out, lse_shape, step)


@functools.lru_cache(maxsize=4096)
def backward_plan(problem: Problem, grad_out: Kind, out: Kind, has_grad_lse: bool, grad_mask: int) -> Backward:
    """The launches of `attnkern::backward`."""
    q, k = problem.q, problem.k
    grads = _grad_layouts(problem, grad_mask)
    dq_layout = q.like(q.shape[3])
    if 0 in (*q.shape[:3], k.shape[2]):
        return Backward(grads, dq_layout, None, None, None, None, (), False, bool(grad_mask & GRAD_BIAS))
    build = _Builder(problem)
    delta = build.delta(grad_out, out, has_grad_lse)
    return Backward(grads, dq_layout, delta, *build.gradients(_FIRST, grad_out, grad_mask, None))


@functools.lru_cache(maxsize=4096)
def tangent_plan(problem: Problem, direction: Direction, out: Kind) -> Tangent:
    """The launch of `attnkern::tangent`."""
    q, k = problem.q, problem.k
    layout = q.like(problem.v.shape[3])
    if 0 in (*q.shape[:3], k.shape[2]):
        return Tangent(layout, None)
    build = _Builder(problem)
    build.direction(direction)
    build.tensor("out", out, problem.dtype, "m")
    return Tangent(layout, build.tangent(direction, layout))


@functools.lru_cache(maxsize=4096)
def second_backward_plan(
    problem: Problem, direction: Direction, grad_out: Kind, out: Kind, has_grad_lse: bool, grad_mask: int
) -> tuple[Tangent, Backward]:
    """The launches of `attnkern::second_backward`."""
    q, k = problem.q, problem.k
    grads = _grad_layouts(problem, grad_mask)
    tout, dq_layout = q.like(problem.v.shape[3]), q.like(q.shape[3])
    if 0 in (*q.shape[:3], k.shape[2]):
        nothing = Backward(grads, dq_layout, None, None, None, None, (), False, bool(grad_mask & GRAD_BIAS))
        return Tangent(tout, None), nothing
    build = _Builder(problem)
    build.direction(direction)
    delta = build.delta(grad_out, out, has_grad_lse)
    tangent = build.tangent(direction, tout)
    return Tangent(tout, tangent), Backward(
        grads, dq_layout, delta, *build.gradients(_SECOND, grad_out, grad_mask, direction)
    )


def _grad_layouts(problem: Problem, grad_mask: int) -> tuple[Layout | None, ...]:
    wanted = ((problem.q, GRAD_Q), (problem.k, GRAD_K), (problem.v, GRAD_V))
    return tuple(x.like(x.shape[3]) if grad_mask & bit else None for x, bit in wanted)


_FIRST = {"dkdv": dkdv_kernel, "dq": dq_kernel, "dbias": bias_gradient_kernel}
_SECOND = {
    "second_dkdv": second_dkdv_kernel,
    "second_dq": second_dq_kernel,
    "second_dbias": second_bias_gradient_kernel,
}


class _Builder:
    """The values of all arguments by name, of which every kernel takes those that it has."""

    def __init__(self, problem: Problem):
        self.problem = problem
        q, k, v = problem.q, problem.k, problem.v
        batch, heads, seqlen_q, head_dim = q.shape
        seqlen_k, head_dim_v = v.shape[2:]
        scale, softcap, left, right, offset, dropout_p = problem.params
        low, high = (max(-FAR, min(bound, FAR)) for bound in (offset - left, offset + right))
        self.values: dict[str, Any] = {
            "batch": batch,
            "heads": heads,
            "group_k": heads // k.shape[1],
            "group_v": heads // v.shape[1],
            "seeded_batch": batch // max(problem.seeds, 1),
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "softmax_scale": scale,
            # In units of log2, for exp2; before a softcap in units of that.
            "score_scale": scale / softcap if softcap else scale * LOG2E,
            "softcap": softcap,
            "dropout_threshold": round(dropout_p * 65536),
            "dropout_scale": 1 / (1 - dropout_p) if dropout_p < 1 else 0.0,
            "band_low": low,
            "band_high": high,
            **{f"{name}_stride_{axis}": 0 for name in ("bias", "dbias", "tbias") for axis in "bhm"},
        }
        d0, d1 = configs.chunks(head_dim)
        v0, v1 = configs.chunks(head_dim_v)
        self.constants: dict[str, Any] = {
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "D0": d0,
            "D1": d1,
            "V0": v0,
            "V1": v1,
            "DIMS": min(v0, 64),
            "BIAS": 0,
            "TBIAS": 0,
            "SOFTCAP": softcap != 0,
            "DROPOUT": problem.seeds > 0,
            # A bound that excludes no entry is none, such as that of a bottom-right causal band of one query.
            "HAS_LOW": seqlen_q - 1 + low > 0,
            "HAS_HIGH": high < seqlen_k - 1,
            "PRECISION": "ieee" if problem.dtype != torch.float32 else "tf32" if problem.tf32 else "tf32x3",
            "bias_stride_n": 0,
            "tbias_stride_n": 0,
        }
        self.pointers: dict[str, Any] = {
            "bias": None,
            "seed": "i64" if problem.seeds else None,
            "lse": "fp32",
            "delta": "fp32",
        }
        self.divisors: dict[str, int] = {}
        for name, x, axis in (("q", q, "m"), ("k", k, "n"), ("v", v, "n")):
            self.tensor(name, x, problem.dtype, axis)
        if problem.bias is not None:
            assert problem.bias_dtype is not None
            self._bias("bias", problem.bias, problem.bias_dtype)

    def tensor(self, name: str, x: Kind, dtype: torch.dtype, axis: str) -> None:
        """A tensor (batch, heads, length, size): its pointers, its strides, and what is known of their alignment."""
        unit = 16 // dtype.itemsize
        stem = name.removesuffix("_out") if name == "grad_out" else name
        strides = dict(zip((f"{stem}_stride_{letter}" for letter in ("b", "h", axis)), x.strides(), strict=False))
        pointers = (name, f"{name}0", f"{name}1")
        self.values |= strides
        self.pointers |= dict.fromkeys(pointers, ELEMENTS[dtype])
        if x.vectors(unit):
            self.divisors |= {**dict.fromkeys(strides, unit), **dict.fromkeys(pointers, 16)}

    def _bias(self, name: str, bias: Kind, dtype: torch.dtype) -> None:
        """bias or tbias"""
        self.tensor(name, bias, dtype, "m")
        unit = 16 // dtype.itemsize
        _, _, stride_m, stride_n = bias.strides()
        self.constants[name.upper()] = (2 if dtype == torch.bool else 1) + (2 if stride_m == 0 else 0)
        stride = f"{name}_stride_n"
        if stride_n > 1:
            del self.constants[stride]
            self.values[stride] = stride_n
        else:
            self.constants[stride] = stride_n
        if name in self.divisors and self.values["seqlen_k"] % unit == 0:
            # Else the mask of its last columns cuts vectors.
            self.divisors["seqlen_k"] = max(unit, self.divisors.get("seqlen_k", 1))

    def direction(self, direction: Direction) -> None:
        problem = self.problem
        for name, x, axis in zip(("tq", "tk", "tv"), direction[:3], "mnn", strict=True):
            if x is not None:
                self.tensor(name, x, problem.dtype, axis)
            else:
                self.pointers |= dict.fromkeys((name, f"{name}0", f"{name}1"))
                self.values |= {f"{name}_stride_{letter}": 0 for letter in ("b", "h", axis)}
        self.pointers["tbias"] = None
        if direction.bias is not None:
            assert problem.bias_dtype is not None
            self._bias("tbias", direction.bias, problem.bias_dtype)

    def step(self, function: Any, name: str, loaded: Mapping[str, Kind], **constants: Any) -> Step:
        """The launch of a kernel that loads tiles of the two tensors `loaded`: by descriptors where the chip has them.

        A tensor that can't be described is copied. (By pointers, wgmma would read what cp.async has written: without a
        fence between, which Triton leaves out, and one product after the other.)
        """
        problem = self.problem
        constants = {**self.constants, **constants}
        unit = 16 // problem.dtype.itemsize
        has_tma = configs.has_tma(problem.capability)
        chunk = 0
        if "CHUNK" in function.arg_names:
            sizes = (constants["head_dim"], constants["head_dim_v"])
            roomy = has_tma and bool(loaded) and name not in configs.MMA_SYNC
            chunk = configs.chunk(*sizes, problem.dtype.itemsize, roomy)
            if name == "second_dbias" and max(sizes) > 64 and chunk == 0:
                chunk = 64  # what a chunk loads again, it would have used once: most often it owns one tile of a head
        tma = has_tma and bool(loaded) and chunk == 0
        arch = configs.arch_class(problem.capability, tma or chunk > 0)
        feature = configs.feature_class(constants["BIAS"], constants["SOFTCAP"], constants["DROPOUT"])
        if name == "delta":
            config = DELTA
        else:
            of_table = name.replace("dbias", "dq")  # the same products but one
            row = configs.Row(arch, of_table, problem.dtype.itemsize, feature)
            config = configs.choose(row, constants["head_dim"], constants["head_dim_v"], table)
            if name.endswith("dbias") and has_tma:
                config = config._replace(num_stages=1)  # no cp.async: see above
        constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "TMA": tma, "CHUNK": chunk}
        pointers, divisors = dict(self.pointers), dict(self.divisors)
        descriptors, pads = [], []
        if tma:
            rows = config.block_m if name.endswith("dkdv") else config.block_n
            for tensor, x in loaded.items():
                pads.append(0 if x.describable(unit) else unit)
                described = x.padded(unit) if pads[-1] else x
                widths = ("V0", "V1") if tensor in _HEAD_DIM_V else ("D0", "D1")
                boxes = [(1, 1, rows, constants[width] or 16) for width in widths]
                for n, box in enumerate(boxes):
                    pointers[f"{tensor}{n}"] = launch.Block(ELEMENTS[problem.dtype], box)
                    divisors.pop(f"{tensor}{n}", None)
                descriptors.append(tuple(_descriptor_fields(described, box, unit) for box in boxes))
        kernel = launch.variant(function, pointers, constants, divisors, config)
        values = {**self.values, **constants}
        rest = tuple(values[argument] for argument in function.arg_names if argument not in pointers)
        return Step(kernel, self._grid(name, config, values), rest, tuple(descriptors) or None, tuple(pads))

    def delta(self, grad_out: Kind, out: Kind, has_grad_lse: bool) -> Step:
        self.tensor("out", out, self.problem.dtype, "m")
        self.tensor("grad_out", grad_out, self.problem.dtype, "m")
        self.pointers["grad_lse"] = "fp32" if has_grad_lse else None
        return self.step(delta_kernel, "delta", {}, HAS_GRAD_LSE=has_grad_lse)

    def tangent(self, direction: Direction, tout: Layout) -> Step:
        """After `direction`, and `delta` where nu is asked for."""
        problem = self.problem
        self.tensor("tout", tout.kind(), problem.dtype, "m")
        self.pointers |= {"tlse": "fp32", "nu": "fp32" if "grad_out" in self.pointers else None, "mu": "fp32"}
        if "grad_out" not in self.pointers:
            self.pointers["grad_out"] = None
            self.values |= {f"grad_stride_{axis}": 0 for axis in "bhm"}
        loaded = {"k": problem.k, "v": problem.v, "tk": direction.k, "tv": direction.v}
        return self.step(tangent_kernel, "tangent", {name: x for name, x in loaded.items() if x is not None})

    def gradients(
        self, kernels: Mapping[str, Any], grad_out: Kind, grad_mask: int, direction: Direction | None
    ) -> tuple[Step | None, Step | None, Step | None, tuple[tuple[Layout, torch.dtype], ...], bool, bool]:
        """The fields of a `Backward` after delta: of the first derivative, or of the second, which has a direction."""
        problem = self.problem
        q, k, v, bias = problem.q, problem.k, problem.v, problem.bias
        (dkdv_name, dkdv_function), (dq_name, dq_function), (dbias_name, dbias_function) = kernels.items()
        group_out = math.gcd(self.values["group_k"], self.values["group_v"])
        heads_out = q.shape[1] // group_out
        self.values |= {"heads_out": heads_out, "group_out": group_out}
        if group_out == 1:
            self.constants["group_out"] = 1  # no loop over heads: 30 registers
        dkdv = dq = dbias = None
        parts = []
        if grad_mask & (GRAD_K | GRAD_V):
            for name, x in (("dk", k), ("dv", v)):
                # Heads that are still to be added up are kept in float32.
                own = x.shape[1] == heads_out
                as_written = x if own else Kind((x.shape[0], heads_out, *x.shape[2:]), (0, 0, 0, 0), True)
                layout, dtype = as_written.like(x.shape[3]), problem.dtype if own else torch.float32
                self.tensor(name, layout.kind(), dtype, "n")
                parts.append((layout, dtype))
            loaded = {"q": q, "grad_out": grad_out}
            if direction is not None and direction.q is not None:
                loaded["tq"] = direction.q
            dkdv = self.step(dkdv_function, dkdv_name, loaded)
        falls_off = False
        self.pointers["dbias"] = None
        if grad_mask & GRAD_BIAS:
            assert bias is not None
            assert problem.bias_dtype is not None
            falls_off = bias.shape == (*q.shape[:3], k.shape[2])
            dense = Kind(bias.shape, (0, 0, 0, 0), True).like(bias.shape[3]).kind()
            self.tensor("dbias", dense, problem.bias_dtype, "m")
            if not falls_off:
                self.values |= {"bias_batch": bias.shape[0], "bias_heads": bias.shape[1]}
                shared = {"ROWS_SHARED": bias.shape[2] == 1, "COLS_SHARED": bias.shape[3] == 1}
                dbias = self.step(dbias_function, dbias_name, {}, **shared)
        if grad_mask & GRAD_Q or falls_off:
            self.tensor("dq", q.like(q.shape[3]).kind(), problem.dtype, "m")
            if not falls_off:
                self.pointers["dbias"] = None
            loaded = {"k": k, "v": v}
            if direction is not None:
                more = {"tk": direction.k, "tv": direction.v}
                loaded |= {name: x for name, x in more.items() if x is not None}
            constants = {"DBIAS": falls_off} if direction is None else {}
            dq = self.step(dq_function, dq_name, loaded, **constants)
        zero = falls_off and (self.constants["HAS_LOW"] or self.constants["HAS_HIGH"])
        return dkdv, dq, dbias, tuple(parts), falls_off, zero

    def splits(self, processors: int) -> tuple[int, Config] | None:
        """How many parts decode_kernel cuts the keys into, and its configuration; None where forward_kernel serves
        better: it has tiles enough, or the keys are too few, or what it does is needed."""
        problem, values = self.problem, self.values
        rows = values["group_k"] * values["seqlen_q"]
        if problem.seeds or values["group_k"] != values["group_v"] or rows > DECODE_MAX_ROWS:
            return None
        config = configs.decode(rows, *(self.constants[n] for n in ("head_dim", "head_dim_v")), problem.dtype.itemsize)
        reached = min(values["seqlen_q"] + values["band_high"], values["seqlen_k"]) - max(values["band_low"], 0)
        if reached < 2 * configs.SPLIT_KEYS:
            return None
        programs = values["batch"] * problem.k.shape[1] * -(-rows // config.block_m)
        parts = configs.splits(reached, config.block_n, programs, processors)
        return (parts, config) if parts > 1 or values["group_k"] > 1 else None

    def decode(self, splits: int, config: Config, need_lse: bool) -> tuple[Step, Step, Sizes]:
        """The fields of a `Forward` after its first two."""
        problem, values = self.problem, self.values
        batch, heads, seqlen_q, _ = problem.q.shape
        heads_k, dims = problem.k.shape[1], problem.v.shape[3]
        values |= {"heads_k": heads_k, "group": heads // heads_k, "splits": splits}
        self.pointers |= {"part_out": "fp32", "part_lse": "fp32"}
        self.divisors["part_out"] = 16

        def step(function: Any, config: Config, grid: int, **more: Any) -> Step:
            constants = {**self.constants, **more}
            kernel = launch.variant(function, self.pointers, constants, self.divisors, config)
            every = {**values, **constants}
            rest = tuple(every[argument] for argument in function.arg_names if argument not in self.pointers)
            return Step(kernel, grid, rest, None, ())

        tiles = -(-heads // heads_k * seqlen_q // config.block_m)
        chunk = configs.chunk(problem.q.shape[3], dims, problem.dtype.itemsize, True)
        blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "CHUNK": chunk}
        first = step(decode_kernel, config, splits * tiles * batch * heads_k, **blocks)
        # Two sizes, not one for each number of splits: the number follows the length, and a variant takes compiling.
        sizes = {"SPLITS": 16 if splits <= 16 else configs.MAX_SPLITS, "DIMS": 1 << (dims - 1).bit_length()}
        warps = min(max(sizes["SPLITS"] * sizes["DIMS"] // 2048, 1), 16)
        combine = step(combine_kernel, Config(0, 0, warps, 1), seqlen_q * batch * heads, **sizes, WRITE_LSE=need_lse)
        return first, combine, (batch, heads, seqlen_q, splits, dims)

    def _grid(self, name: str, config: Config, values: Mapping[str, Any]) -> int:
        blocks_m, blocks_n = (
            -(-values[f"seqlen_{x}"] // max(n, 1)) for x, n in (("q", config.block_m), ("k", config.block_n))
        )
        if name.endswith("dkdv"):
            return blocks_n * values["batch"] * values["heads_out"]
        if name.endswith("dbias"):
            tiles = (1 if values["ROWS_SHARED"] else blocks_m) * (1 if values["COLS_SHARED"] else blocks_n)
            return tiles * values["bias_batch"] * values["bias_heads"]
        return blocks_m * values["batch"] * values["heads"]


def _descriptor_fields(x: Kind, box: Sizes, unit: int) -> dict[str, Any]:
    strides = [s if s > 0 else unit for s in x.strides()[:3]]  # of a single entry: any that is allowed
    return {
        "shape": list(x.shape),
        "strides": [*strides, 1],
        "block_shape": list(box),
        "padding": "zero",
        "round_f32_to_tf32": False,
    }
