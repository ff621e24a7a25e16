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

from . import configs, launch
from .backward import delta_kernel, dkdv_kernel, dq_kernel
from .bias_gradient import bias_gradient_kernel
from .configs import Config
from .decode import combine_kernel, decode_kernel
from .forward import forward_kernel

Sizes = tuple[int, ...]

ELEMENTS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "u8"}
UNBOUNDED = 2**62  # problem.py's: a bound of the band that excludes nothing
FAR = 2**30  # a bound and a row add up within 32 bits
LOG2E = math.log2(math.e)
DELTA = Config(64, 0, 4, 1)
table: configs.Table = configs.TABLE  # a device's own, if `use_table` was called
GRAD_Q, GRAD_K, GRAD_V, GRAD_BIAS = 1, 2, 4, 8


def use_table(chosen: configs.Table) -> None:
    """Takes configurations from another table (`configs.load`) from now on."""
    global table
    table = chosen
    forward_plan.cache_clear()
    backward_plan.cache_clear()


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
        if heads > 1 and length > 1 and self.stride[1] < self.stride[2]:
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
    score: tuple[float, float, int, int, int, float]  # problem.Score
    tf32: bool  # products of float32 may be rounded to tf32


class Step(NamedTuple):
    """A launch. `rest` are the arguments after the tensors, `descriptors` the fields of those that load tiles; `pads`
    says of each tensor so loaded to a multiple of how many elements its rows must be copied, 0: not at all."""

    kernel: launch.Kernel
    grid: int
    rest: tuple
    descriptors: tuple[dict[str, Any], ...] | None
    pads: tuple[int, ...]

    def tiles(self, a: torch.Tensor, b: torch.Tensor) -> tuple:
        """Two tensors as four arguments: each for its first columns and for the rest."""
        if self.descriptors is None:
            return (a, a, b, b)
        a, b = (padded(x, unit) if unit else x for x, unit in zip((a, b), self.pads, strict=True))
        a0, a1, b0, b1 = self.descriptors
        make = launch.descriptor
        return (make(a0, a), make(a1, a), make(b0, b), make(b1, b))


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
    q, k, v, bias = problem.q, problem.k, problem.v, problem.bias
    wanted = ((q, GRAD_Q), (k, GRAD_K), (v, GRAD_V))
    grads = tuple(x.like(x.shape[3]) if grad_mask & bit else None for x, bit in wanted)
    dq_layout = q.like(q.shape[3])
    heads = q.shape[1]
    if 0 in (*q.shape[:3], k.shape[2]):
        return Backward(grads, dq_layout, None, None, None, None, (), False, bool(grad_mask & GRAD_BIAS))
    build = _Builder(problem)
    group_out = math.gcd(heads // k.shape[1], heads // v.shape[1])
    heads_out = heads // group_out
    build.values |= {"heads_out": heads_out, "group_out": group_out}
    if group_out == 1:
        build.constants["group_out"] = 1  # no loop over heads: 30 registers
    build.tensor("out", out, problem.dtype, "m")
    build.tensor("grad_out", grad_out, problem.dtype, "m")
    build.pointers["grad_lse"] = "fp32" if has_grad_lse else None
    delta = build.step(delta_kernel, "delta", {}, HAS_GRAD_LSE=has_grad_lse)
    dkdv = dq = dbias = None
    parts = []
    if grad_mask & (GRAD_K | GRAD_V):
        for name, x in (("dk", k), ("dv", v)):
            # Heads that are still to be added up are kept in float32.
            own = x.shape[1] == heads_out
            as_written = x if own else Kind((x.shape[0], heads_out, *x.shape[2:]), (0, 0, 0, 0), True)
            layout, dtype = as_written.like(x.shape[3]), problem.dtype if own else torch.float32
            build.tensor(name, layout.kind(), dtype, "n")
            parts.append((layout, dtype))
        dkdv = build.step(dkdv_kernel, "dkdv", {"q": q, "grad_out": grad_out})
    falls_off = False
    build.pointers["dbias"] = None
    if grad_mask & GRAD_BIAS:
        assert bias is not None
        assert problem.bias_dtype is not None
        falls_off = bias.shape == (*q.shape[:3], k.shape[2])
        dense = Kind(bias.shape, (0, 0, 0, 0), True).like(bias.shape[3]).kind()
        build.tensor("dbias", dense, problem.bias_dtype, "m")
        if not falls_off:
            build.values |= {"bias_batch": bias.shape[0], "bias_heads": bias.shape[1]}
            shared = {"ROWS_SHARED": bias.shape[2] == 1, "COLS_SHARED": bias.shape[3] == 1}
            dbias = build.step(bias_gradient_kernel, "dbias", {}, **shared)
    if grad_mask & GRAD_Q or falls_off:
        build.tensor("dq", dq_layout.kind(), problem.dtype, "m")
        if not falls_off:
            build.pointers["dbias"] = None
        dq = build.step(dq_kernel, "dq", {"k": k, "v": v}, DBIAS=falls_off)
    zero = falls_off and (build.constants["HAS_LOW"] or build.constants["HAS_HIGH"])
    return Backward(grads, dq_layout, delta, dkdv, dq, dbias, tuple(parts), falls_off, zero)


class _Builder:
    """The values of all arguments by name, of which every kernel takes those that it has."""

    def __init__(self, problem: Problem):
        self.problem = problem
        q, k, v = problem.q, problem.k, problem.v
        batch, heads, seqlen_q, head_dim = q.shape
        seqlen_k, head_dim_v = v.shape[2:]
        scale, softcap, left, right, offset, dropout_p = problem.score
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
            **{f"{name}_stride_{axis}": 0 for name in ("bias", "dbias") for axis in "bhm"},
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
            "DIMS": min(v0, 128),
            "BIAS": 0,
            "SOFTCAP": softcap != 0,
            "DROPOUT": problem.seeds > 0,
            # A bound that excludes no entry is none, such as that of a bottom-right causal band of one query.
            "HAS_LOW": seqlen_q - 1 + low > 0,
            "HAS_HIGH": high < seqlen_k - 1,
            "PRECISION": "ieee" if problem.dtype != torch.float32 else "tf32" if problem.tf32 else "tf32x3",
            "bias_stride_n": 0,
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
            self._bias(problem.bias, problem.bias_dtype)

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

    def _bias(self, bias: Kind, dtype: torch.dtype) -> None:
        self.tensor("bias", bias, dtype, "m")
        unit = 16 // dtype.itemsize
        _, _, stride_m, stride_n = bias.strides()
        self.constants["BIAS"] = (2 if dtype == torch.bool else 1) + (2 if stride_m == 0 else 0)
        if stride_n > 1:
            del self.constants["bias_stride_n"]
            self.values["bias_stride_n"] = stride_n
        else:
            self.constants["bias_stride_n"] = stride_n
        if "bias" in self.divisors and self.values["seqlen_k"] % unit == 0:
            self.divisors["seqlen_k"] = unit  # else the mask of its last columns cuts vectors

    def step(self, function: Any, name: str, loaded: Mapping[str, Kind], **constants: Any) -> Step:
        """The launch of a kernel that loads tiles of the two tensors `loaded`: by descriptors where the chip has them.

        A tensor that can't be described is copied. (By pointers, wgmma would read what cp.async has written: without a
        fence between, which Triton leaves out, and one product after the other.)
        """
        problem = self.problem
        constants = {**self.constants, **constants}
        unit = 16 // problem.dtype.itemsize
        tma = configs.has_tma(problem.capability) and bool(loaded)
        arch = configs.arch_class(problem.capability, tma)
        feature = configs.feature_class(constants["BIAS"], constants["SOFTCAP"], constants["DROPOUT"])
        if name == "delta":
            config = DELTA
        else:
            of_table = "dq" if name == "dbias" else name  # the same products but one
            row = configs.Row(arch, of_table, problem.dtype.itemsize, feature)
            config = configs.choose(row, constants["head_dim"], constants["head_dim_v"], table)
            if name == "dbias" and configs.has_tma(problem.capability):
                config = config._replace(num_stages=1)  # no cp.async: see above
        constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "TMA": tma}
        pointers, divisors = dict(self.pointers), dict(self.divisors)
        descriptors, pads = [], []
        if tma:
            rows = config.block_m if name == "dkdv" else config.block_n
            for (tensor, x), widths in zip(loaded.items(), (("D0", "D1"), ("V0", "V1")), strict=True):
                pads.append(0 if x.describable(unit) else unit)
                described = x.padded(unit) if pads[-1] else x
                for n, width in enumerate(widths):
                    box = (1, 1, rows, constants[width] or 16)
                    pointers[f"{tensor}{n}"] = launch.Block(ELEMENTS[problem.dtype], box)
                    divisors.pop(f"{tensor}{n}", None)
                    descriptors.append(_descriptor_fields(described, box, unit))
        kernel = launch.variant(function, pointers, constants, divisors, config)
        values = {**self.values, **constants}
        rest = tuple(values[argument] for argument in function.arg_names if argument not in pointers)
        return Step(kernel, self._grid(name, config, values), rest, tuple(descriptors) or None, tuple(pads))

    def splits(self, processors: int) -> tuple[int, Config] | None:
        """How many parts decode_kernel cuts the keys into, and its configuration; None where forward_kernel serves
        better: it has tiles enough, or the keys are too few, or what it does is needed."""
        problem, values = self.problem, self.values
        rows = values["group_k"] * values["seqlen_q"]
        if problem.seeds or values["group_k"] != values["group_v"] or rows > configs.MAX_DECODE_ROWS:
            return None
        config = configs.decode(rows, *(self.constants[n] for n in ("head_dim", "head_dim_v")), problem.dtype.itemsize)
        reached = min(values["seqlen_q"] + values["band_high"], values["seqlen_k"]) - max(values["band_low"], 0)
        if config is None or reached < 2 * configs.SPLIT_KEYS:
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
        blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
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
        if name == "dkdv":
            return blocks_n * values["batch"] * values["heads_out"]
        if name == "dbias":
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


def gate_cases() -> list[dict[str, Any]]:
    """For the compile gate (docs/proving_kernels.md): the kernels as they are launched for a causal problem of every
    row of the table, at the largest head size that it serves; and those that have no row."""
    cases = [_gate_case(row, size) for row, by_size in configs.TABLE.items() for size in by_size]
    for capability, archs in ((80, "80 86 120a"), (90, "90a")):
        problem = gate_problem(capability, 64, 2, "tile")
        steps = backward_plan(problem, problem.q, problem.q, True, GRAD_BIAS)
        for name, step, count in (("delta", steps.delta, {}), ("dbias", steps.dbias, {"LDG": 1})):
            assert step is not None
            claims = {"archs": archs, "require": {archs: count} if count else {}}
            cases.append({"name": f"triton {name} sm_{capability}", **step.kernel.gate_case(), **claims})
    for itemsize, by_size in configs.DECODE.items():
        for size in by_size:
            cases += _decode_gate_cases(size, itemsize)
    return cases


def _decode_gate_cases(size: int, itemsize: int) -> list[dict[str, Any]]:
    """decode_kernel with the most rows in a tile, and its combine_kernel."""
    problem = gate_problem(80, size, itemsize, "plain")
    x = problem.q._replace(shape=(2, 4, 32, size))
    bottom_right = (*problem.score[:4], 1024 - 32, 0.0)
    plan = forward_plan(problem._replace(q=x, score=bottom_right), True, 132)
    assert plan.step is not None
    assert plan.combine is not None
    archs, options, constants = "80 90a 120a", plan.step.kernel.options, plan.step.kernel.constants
    scores = constants["BLOCK_M"] * constants["BLOCK_N"] // options["num_warps"]
    hmma = 2 * scores * size // 2048 * (1 if itemsize == 2 else 6)
    counts = {"HMMA": hmma, **({"LDGSTS": 1} if options["num_stages"] > 1 else {})}
    named = ((plan.step, "decode", counts), (plan.combine, "combine", {"LDG": 1}))
    return [
        {
            "name": f"triton {name} {'bf16' if itemsize == 2 else 'fp32'} d{size}",
            **step.kernel.gate_case(),
            "archs": archs,
            "require": {archs: require},
        }
        for step, name, require in named
    ]


def gate_problem(capability: int, size: int, itemsize: int, feature: str) -> Problem:
    """A problem of the kind that a row of the table is for; "tile": a bias shared by the batch."""

    def kind(*shape: int) -> Kind:
        return Kind(shape, (0, 0, 0, 0), True).like(shape[3]).kind()

    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    x = kind(2, 4, 1024, size)
    bias = kind(1, 4, 1024, 1024) if feature == "tile" else None
    score = (size**-0.5, 30.0 if feature == "mods" else 0.0, UNBOUNDED, 0, 0, 0.0)
    return Problem(capability, dtype, x, x, x, bias, dtype if bias else None, 0, score, False)


def _gate_case(row: configs.Row, size: int) -> dict[str, Any]:
    problem = gate_problem(row.arch, size, row.itemsize, row.feature)
    backward = backward_plan(problem, problem.q, problem.q, False, GRAD_Q | GRAD_K | GRAD_V)
    step = {"forward": forward_plan(problem, True).step, "dkdv": backward.dkdv, "dq": backward.dq}[row.kernel]
    assert step is not None
    common = row.itemsize == 2 and row.feature == "plain" and size <= 128
    if row.arch == 90:
        archs = "90a 100a" if common else "90a"
    elif row.arch == 86:
        archs = "86 120a"
    elif size in configs.TABLE.get(row._replace(arch=86), {}):
        archs = "80"
    else:  # sm_86's instructions are sm_80's
        archs = "80 86 120a" if common else "80 120a"
    config = configs.TABLE[row][size]
    dots = {"forward": 2, "dkdv": 4, "dq": 3}[row.kernel]
    if row.arch == 90:
        rows = config.block_n if row.kernel == "dkdv" else config.block_m
        products = {"HGMMA": dots * (size // 16)} if rows >= 64 and row.itemsize == 2 else {}
        require = {"90a": {"UTMALDG": 2, **products}}
    else:
        # Of one loop: m16n8k16 does 2048 multiplications of a warp's share; tf32 has m16n8k8, and three for a product.
        scores = config.block_m * config.block_n // config.num_warps
        hmma = dots * scores * size // 2048 * (1 if row.itemsize == 2 else 6)
        require = {archs: {"HMMA": hmma, **({"LDGSTS": 1} if config.num_stages > 1 else {})}}
    return {
        "name": f"triton {row.kernel} {'bf16' if row.itemsize == 2 else 'fp32'} d{size} {row.feature} sm_{row.arch}",
        **step.kernel.gate_case(),
        "archs": archs,
        "require": require,
        "spills": configs.BUDGETS.get((row, size), {}),
    }
