"""A launch and the expected results for every kernel of triton_forward.py.

`case(name, seed)` gives the small kernels', whose results are exact. `forward_case` and `rich_case` give the forward
passes, whose results are held to the project's tolerance rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import triton_forward as kernels
from .references import check_attention

if TYPE_CHECKING:
    from ptxsim.planted_bugs import Subject


@dataclass
class TritonCase:
    """One launch: `kernel`, `grid`, positional `args` and `kwargs` as Triton has them. `expected` pairs output tensors
    with what is to be in them, bit for bit."""

    kernel: object
    grid: tuple[int, ...]
    args: list
    kwargs: dict
    undefined: list[torch.Tensor] = field(default_factory=list)
    expected: list[tuple[torch.Tensor, np.ndarray]] = field(default_factory=list)

    def compiled(self, target: int, **options):
        """What the simulator runs; `options` are Triton's (num_warps, num_stages)."""
        import ptxsim

        return ptxsim.compile_triton(self.kernel, *self.args, target=target, **self.kwargs, **options)

    def run(self, target: int, seed: int | None = None, *, check: bool = True, text: str | None = None, **options):
        """Executes it in the simulator, with other PTX if given."""
        import ptxsim

        compiled = self.compiled(target, **options)
        if text is not None:
            compiled = compiled.with_text(text)
        arguments = dict(zip(self.kernel.arg_names, self.args, strict=False))  # type: ignore[attr-defined]
        values = [arguments[name] for name in compiled.arguments]
        return ptxsim.run(compiled, self.grid, values, undefined=self.undefined, seed=seed, check=check)

    def check(self) -> None:
        """Raises AssertionError unless every output is as expected."""
        for number, (tensor, expected) in enumerate(self.expected):
            got = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            wanted = np.ascontiguousarray(expected).reshape(-1).view(np.uint8)
            assert got.size == wanted.size, f"output {number} has {got.size} bytes, expected {wanted.size}"
            if not (got == wanted).all():
                at = int(np.argmin(got == wanted)) // tensor.element_size()
                shown = tensor.contiguous().reshape(-1)[at].item()
                raise AssertionError(f"output {number} at {at}: {shown}, expected {expected.reshape(-1)[at]}")


@dataclass
class ForwardCase(TritonCase):
    """`out` and `lse` are what the kernel writes; `inputs` and `options` as `testing.expected` wants them."""

    out: torch.Tensor = None  # type: ignore[assignment]
    lse: torch.Tensor = None  # type: ignore[assignment]
    inputs: list[torch.Tensor] = field(default_factory=list)
    options: dict = field(default_factory=dict)

    def check(self) -> None:
        super().check()
        check_attention(self.out, self.lse, self.inputs, self.options)


FORWARDS = ("forward_pointers", "forward_host_descriptors", "forward_device_descriptors")


def forward_case(
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    heads: int = 2,
    group: int = 2,
    seqlen_q: int = 100,
    seqlen_k: int = 200,
    head_dim: int = 64,
    causal: bool = False,
    block_m: int = 64,
    block_n: int = 64,
    precision: str = "tf32x3",
    seed: int = 0,
) -> ForwardCase:
    """A launch of one of FORWARDS. Those with descriptors are for targets of 90 and above."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(count: int, length: int) -> torch.Tensor:
        return torch.randn(count, length, head_dim, generator=generator).to(dtype)

    q, k, v = tensor(heads, seqlen_q), tensor(heads // group, seqlen_k), tensor(heads // group, seqlen_k)
    out, lse = torch.full_like(q, math.nan), torch.full((heads, seqlen_q), math.nan)
    scale = head_dim**-0.5
    tensors: list = [q, k, v, out]
    if name == "forward_host_descriptors":
        from triton.tools.tensor_descriptor import TensorDescriptor

        blocks = [block_m, block_n, block_n, block_m]
        tensors = [TensorDescriptor.from_tensor(t, [1, b, head_dim]) for t, b in zip(tensors, blocks, strict=True)]
    kwargs: dict[str, Any] = {"HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n, "CAUSAL": causal}
    if name == "forward_pointers":
        kwargs["PRECISION"] = precision
    count = [heads] if name == "forward_device_descriptors" else []
    return ForwardCase(
        kernel=getattr(kernels, name),
        grid=(-(-seqlen_q // block_m), heads),
        args=[*tensors, lse, *count, scale * math.log2(math.e), seqlen_q, seqlen_k, group],
        kwargs=kwargs,
        undefined=[out, lse],
        out=out,
        lse=lse,
        inputs=[q, k, v],
        options={"is_causal": causal, "enable_gqa": True},
    )


def philox(seed: int, c0, c1=0, c2=0, c3=0) -> np.ndarray:
    """The four words of Philox-4x32-10 (Salmon and others, SC 2011) for arrays of counters: uint32[4, ...]."""
    mask = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x).astype(np.uint64) & mask for x in np.broadcast_arrays(c0, c1, c2, c3)]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ key[0], p1 & mask, (p0 >> np.uint64(32)) ^ c[3] ^ key[1], p0 & mask]
        key = [key[0] + np.uint64(0x9E3779B9) & mask, key[1] + np.uint64(0xBB67AE85) & mask]
    return np.stack(c).astype(np.uint32)


def uniform(words: np.ndarray) -> np.ndarray:
    """What tl.rand makes of a word: [0, 1) in fp32."""
    signed = words.view(np.int32)
    signed = np.where(signed < 0, -signed - 1, signed)
    return signed.astype(np.float32) * np.float32(4.6566127342e-10)


def rich_case(
    dtype: torch.dtype = torch.bfloat16,
    *,
    heads: int = 2,
    seqlen_q: int = 75,
    seqlen_k: int = 90,
    head_dim: int = 61,
    dropout_p: float = 0.25,
    block_m: int = 64,
    block_n: int = 32,
    precision: str = "tf32x3",
    seed: int = 0,
) -> ForwardCase:
    """A launch of forward_rich: odd sizes, causal, with bias and dropout. What it counted is exact."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, k, v = tensor(heads, seqlen_q, head_dim), tensor(heads, seqlen_k, head_dim), tensor(heads, seqlen_k, head_dim)
    bias = tensor(seqlen_q, seqlen_k)
    out, lse = torch.full_like(q, math.nan), torch.full((heads, seqlen_q), math.nan)
    kept = torch.zeros(heads, 2, dtype=torch.int32)
    key, scale = 2**40 + 12345, head_dim**-0.5

    entries = np.arange(heads * seqlen_q * seqlen_k, dtype=np.int64).reshape(heads, seqlen_q, seqlen_k)
    keep = uniform(philox(key, entries)[0]) >= np.float32(dropout_p)
    visible = np.tri(seqlen_q, seqlen_k, dtype=bool)
    counts = (keep & visible).sum(2)
    return ForwardCase(
        kernel=kernels.forward_rich,
        grid=(-(-seqlen_q // block_m), heads),
        args=[q, k, v, bias, out, lse, kept, scale * math.log2(math.e), seqlen_q, seqlen_k, head_dim, dropout_p, key],
        kwargs={"BLOCK_D": 64, "BLOCK_M": block_m, "BLOCK_N": block_n, "PRECISION": precision},
        undefined=[out, lse],
        expected=[(kept, np.stack([counts[:, 0::2].sum(1), counts[:, 1::2].sum(1)], 1).astype(np.int32))],
        out=out,
        lse=lse,
        inputs=[q, k, v, bias],
        options={"is_causal": True, "keep": torch.from_numpy(keep), "dropout_p": dropout_p},
    )


_BUILDERS: dict[str, Callable[[np.random.Generator], TritonCase]] = {}


def _builder(build):
    _BUILDERS[build.__name__[1:]] = build
    return build


def names() -> list[str]:
    """The kernels that `case` knows."""
    return list(_BUILDERS)


def case(name: str, seed: int = 0) -> TritonCase:
    """A launch of one of the small kernels with fresh inputs."""
    return _BUILDERS[name](np.random.default_rng(seed))


def _zeros(*shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@_builder
def _philox_words(rng):
    count, first, key = 200, 2**31 - 90, int(rng.integers(2**62))
    out, i = _zeros(4, count), np.arange(count)
    expected = philox(key, i + first, 1, i // 3, 7)
    args = [out, key, first, count]
    return TritonCase(kernels.philox_words, (2,), args, {"BLOCK": 128}, expected=[(out, expected)])


@_builder
def _row_reductions(rng):
    rows, cols = 27, 53
    x = rng.permuted(np.tile(np.arange(-26, 27), (rows, 1)), axis=1).astype(np.float32)  # no ties, exact sums
    sums, extremes, places = _zeros(2, rows, dtype=torch.float32), _zeros(2, rows, dtype=torch.float32), _zeros(2, rows)
    expected = [
        (sums, np.stack([x.sum(1), (x * x).sum(1)])),
        (extremes, np.stack([x.max(1), x.min(1)])),
        (places, np.stack([x.argmax(1), x.argmin(1)]).astype(np.int32)),
    ]
    args = [torch.from_numpy(x), sums, extremes, places, rows, cols]
    return TritonCase(kernels.row_reductions, (2,), args, {"BLOCK_M": 16, "BLOCK_N": 64}, expected=expected)


@_builder
def _scans(rng):
    x, y = (rng.integers(-3, 4, (16, 64)).astype(np.int32) for _ in range(2))
    outputs = [_zeros(16, 64) for _ in range(3)]
    states, state = np.empty_like(y), np.zeros(16, np.int64)
    for j in range(64):
        state = state * x[:, j] + y[:, j]
        states[:, j] = state.astype(np.int32)
        state = states[:, j].astype(np.int64)
    columns = x[::-1].cumsum(0, dtype=np.int32)[::-1]
    results = [x.cumsum(1, dtype=np.int32), columns, states]
    args = [torch.from_numpy(x), torch.from_numpy(y), *outputs]
    expected = list(zip(outputs, results, strict=True))
    return TritonCase(kernels.scans, (1,), args, {"BLOCK_M": 16, "BLOCK_N": 64}, expected=expected)


@_builder
def _atomic_updates(rng):
    count = 3 * 128 - 31
    x = rng.integers(-50, 50, count).astype(np.int32)
    cells = torch.tensor([0, -(10**9), 10**9, -1, 0, 0], dtype=torch.int32)
    wide, floats, old = _zeros(2, dtype=torch.int64), torch.tensor([0.0, -1e9]), _zeros(count)
    folds = [int(x.sum()), x.max(), x.min()]
    folds += [f.reduce(x) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
    expected = [
        (cells, np.array(folds, np.int32)),
        (wide, np.array([int(x.astype(np.int64).sum()) << 20, int((x % 2 != 0).sum())])),
        (floats, np.array([x.sum(), x.max()], np.float32)),
    ]
    args = [torch.from_numpy(x), cells, wide, floats, old, count]
    return TritonCase(kernels.atomic_updates, (3,), args, {"BLOCK": 128}, expected=expected)


@_builder
def _integer_mix(rng):
    count = 2 * 128 - 3
    x = rng.integers(-128, 128, count).astype(np.int8)
    y = rng.integers(-(2**63), 2**63, count, dtype=np.int64)
    y[::4] >>= 40
    x[::3] = abs(x[::3] >> 2)
    y[y == 0] = 1
    narrow, wide = _zeros(8, count), _zeros(8, count, dtype=torch.int64)
    word, small, long = y.astype(np.int32), x.astype(np.int32), x.astype(np.int64)
    divisor = np.where(word == 0, 1, word)
    odd, shift = long * 2 + 1, (long & 63).astype(np.uint64)

    def truncated(p, q):
        """Division and remainder of C, which Triton has too."""
        quotient = (np.abs(p.astype(object)) // np.abs(q.astype(object))) * (np.sign(p) * np.sign(q)).astype(object)
        return quotient, p.astype(object) - quotient * q.astype(object)

    def wrapped(values, dtype):
        bits = np.dtype(dtype).itemsize * 8
        return np.array([(int(v) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for v in values], dtype)

    quotient, rest = truncated(small, divisor)
    long_quotient, long_rest = truncated(y, odd)
    high = [(int(w) & 0xFFFFFFFF) * 0x9E3779B9 >> 32 for w in word]
    long_high = [(int(w) & 2**64 - 1) * 0x9E3779B97F4A7C15 >> 64 for w in y]
    narrow_rows = [
        wrapped(small * small, np.int8),
        x >> 2,
        x.view(np.uint8) >> 2,
        quotient,
        rest,
        np.where(x > 0, word, -word),
        high,
        abs(small) ^ (word | 5),
    ]
    wide_rows = [
        long.astype(object) * y.astype(object),
        long_quotient,
        long_rest,
        (y.view(np.uint64) << shift).view(np.int64),
        y >> shift.astype(np.int64),
        np.minimum(long << 40, y),
        (y & ~long) | (long ^ 3),
        long_high,
    ]
    expected = [
        (narrow, np.stack([wrapped(row, np.int32) for row in narrow_rows])),
        (wide, np.stack([wrapped(row, np.int64) for row in wide_rows])),
    ]
    args = [torch.from_numpy(x), torch.from_numpy(y), narrow, wide, count]
    return TritonCase(kernels.integer_mix, (2,), args, {"BLOCK": 128}, expected=expected)


@_builder
def _float_conversions(rng):
    count = 2 * 128 - 50
    x = torch.from_numpy((rng.standard_normal(count) * 10.0 ** rng.integers(-9, 6, count)).astype(np.float32))
    x[:8] = torch.tensor([0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 65504.0, -65519.0, 2**-25, -(2**-24)])
    half, brain = _zeros(count, dtype=torch.float16), _zeros(count, dtype=torch.bfloat16)
    fp8, ints, back = _zeros(count, dtype=torch.uint8), _zeros(count), _zeros(count, dtype=torch.float32)
    x = x.clamp(-57344, 57344)  # of e5m2: what lies above saturates or not, by the version
    results = [x.half(), x.bfloat16(), x.to(torch.float8_e5m2), x.to(torch.int32), x.bfloat16().half().float()]
    outputs = [half, brain, fp8, ints, back]
    expected = [(o, r.view(torch.uint8).numpy()) for o, r in zip(outputs, results, strict=True)]
    return TritonCase(kernels.float_conversions, (2,), [x, *outputs, count], {"BLOCK": 128}, expected=expected)


@_builder
def _elementwise(rng):
    count = 2 * 128 - 7
    x, y = (rng.integers(-40, 41, count).astype(np.float32) / 8 for _ in range(2))
    y[y == 0] = 0.5
    x = np.where(rng.random(count) < 0.1, y, x)
    out = _zeros(6, count, dtype=torch.float32)
    rows = [x * y + x, x / y, np.sqrt(abs(x)), None, np.where((x > y) & (x < 3), x - y, np.where(x == y, 7, y))]
    rows.append(np.clip(x, -1, 1))
    # ex2.approx has an error bound, not a result
    expected = [(out[n], r.astype(np.float32)) for n, r in enumerate(rows) if r is not None]
    args = [torch.from_numpy(x), torch.from_numpy(y), out, count]
    return TritonCase(kernels.elementwise, (2,), args, {"BLOCK": 128}, expected=expected)


def subjects() -> list[Subject]:
    """What bugs are planted in: forward passes for both generations, and the small kernels that synchronise."""
    from ptxsim.planted_bugs import Subject

    found = []

    def add(name: str, build: Callable[[], TritonCase], target: int, **options) -> None:
        compiled = build().compiled(target, **options)

        def execute(text: str, seed: int | None) -> None:
            fresh = build()
            fresh.run(target, seed, text=text, **options)
            fresh.check()

        found.append(Subject(f"{name}_sm{target}", compiled.name, compiled.text, execute))

    sizes: dict[str, Any] = {"heads": 1, "group": 1, "seqlen_q": 60, "seqlen_k": 250}
    pipelined = {"num_warps": 4, "num_stages": 3}
    for target in (80, 90):
        add("forward_pointers", partial(forward_case, "forward_pointers", **sizes), target, **pipelined)
    add("forward_host_descriptors", partial(forward_case, "forward_host_descriptors", **sizes), 90, **pipelined)
    add("forward_rich", partial(rich_case, heads=1), 80, num_warps=4, num_stages=2)
    for name in names():
        add(name, partial(case, name), 80)
    return found
