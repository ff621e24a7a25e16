"""A launch and the expected results for every kernel in this folder.

`case(entry, seed)` gives the launch of a mechanism kernel; its results are exact. `flash_case` gives one of the
flash-attention kernels, whose results are held to the project's tolerance rule. `run` executes a case in the simulator.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ptxsim.planted_bugs import Subject

FOLDER = Path(__file__).resolve().parent
FLAGS = (f"-I{FOLDER.parents[2] / 'csrc'}",)  # for cuda/ptx.cuh and ptx_sm90.cuh: a function for each instruction


@dataclass(frozen=True)
class Map:
    """A tensor map over `tensor` (last dimension contiguous), box innermost first, swizzle in bytes."""

    tensor: torch.Tensor
    box: tuple[int, ...]
    swizzle: int = 0

    def encoded(self) -> bytes:
        from ptxsim import tensormap

        names = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
        names |= {torch.int32: "s32", torch.int16: "u16"}
        size = self.tensor.element_size()
        return tensormap.encode(
            self.tensor.data_ptr(),
            names[self.tensor.dtype],
            tuple(self.tensor.shape[::-1]),
            tuple(s * size for s in self.tensor.stride()[-2::-1]),
            self.box,
            swizzle=self.swizzle,
        )


@dataclass
class Case:
    """One launch. `expected` pairs output tensors with what is to be in them, bit for bit."""

    source: str
    entry: str
    target: int
    grid: tuple[int, ...]
    block: int
    args: list
    tensors: list[torch.Tensor] = field(default_factory=list)  # reached through structures and maps
    undefined: list[torch.Tensor] = field(default_factory=list)
    expected: list[tuple[torch.Tensor, np.ndarray]] = field(default_factory=list)
    shared: int = 0

    def check(self) -> None:
        """Raises AssertionError unless every output is as expected."""
        for number, (tensor, expected) in enumerate(self.expected):
            got = tensor.contiguous().numpy().reshape(-1)
            wanted = np.ascontiguousarray(expected).reshape(-1)
            assert got.nbytes == wanted.nbytes, f"{self.entry}: output {number} has {got.nbytes} bytes"
            same = got.view(np.uint8) == wanted.view(np.uint8)
            if not same.all():
                at = int(np.argmin(same)) // got.itemsize
                wanted = wanted.view(got.dtype)
                raise AssertionError(f"{self.entry}: output {number} at {at}: {got[at]}, expected {wanted[at]}")


def run(case: Case, ptx: str | None = None, seed: int | None = None, check: bool = True):
    """Executes a case in the simulator, with other PTX if given; `Case.check` is up to the caller."""
    import ptxsim

    compiled = ptxsim.cuda(FOLDER / case.source, case.entry, target=case.target, flags=FLAGS)
    if ptx is not None:
        compiled = compiled.with_text(ptx)
    args = [a.encoded() if isinstance(a, Map) else a for a in case.args]
    return ptxsim.launch(
        compiled,
        case.grid,
        *args,
        block=case.block,
        shared=case.shared,
        tensors=case.tensors + [a.tensor for a in case.args if isinstance(a, Map)],
        undefined=case.undefined,
        seed=seed,
        check=check,
    )


_BUILDERS: dict[str, Callable[[str, np.random.Generator], Case]] = {}


def _builder(*entries: str):
    def register(build):
        _BUILDERS.update(dict.fromkeys(entries, build))
        return build

    return register


def mechanisms() -> list[str]:
    """The entries that `case` knows: every kernel of mechanisms_sm80.cu and mechanisms_sm90.cu."""
    return list(_BUILDERS)


def case(entry: str, seed: int = 0) -> Case:
    """A launch of one mechanism kernel with fresh inputs."""
    return _BUILDERS[entry](entry, np.random.default_rng(seed))


def _sm80(entry: str, grid, block: int, args: list, expected: list, **more) -> Case:
    return Case("mechanisms_sm80.cu", entry, 80, grid, block, args, expected=expected, **more)


def _sm90(entry: str, grid, block: int, args: list, expected: list, **more) -> Case:
    return Case("mechanisms_sm90.cu", entry, 90, grid, block, args, expected=expected, **more)


def _ints(rng: np.random.Generator, *shape: int, low: int = -100, high: int = 100) -> torch.Tensor:
    return torch.from_numpy(rng.integers(low, high, shape, dtype=np.int32))


# ------------------------------------------------------------------------------------------------------------- sm_80


@_builder("cp_async_pipeline_4", "cp_async_pipeline_8", "cp_async_pipeline_16")
def _cp_async_pipeline(entry, rng):
    floats, blocks, tiles = int(entry.rsplit("_", 1)[1]) // 4, 2, 7
    count = blocks * tiles * 128 * floats - 128 * floats - 5  # the last tile is empty, the one before ragged
    x = _ints(rng, count).float()
    out = torch.full((blocks, 128), math.nan)
    padded = np.zeros(blocks * tiles * 128 * floats, np.float32)
    padded[:count] = x.numpy()
    weights = np.arange(1, floats + 1, dtype=np.float32)
    sums = (padded.reshape(blocks, tiles, 128, floats)[:, :, ::-1] * weights).sum((1, 3), dtype=np.float32)
    return _sm80(entry, (blocks,), 128, [x, out, count, tiles], [(out, sums)])


@_builder("tree_reduction")
def _tree_reduction(entry, rng):
    x, out = _ints(rng, 3, 256), torch.zeros(3, dtype=torch.int32)
    return _sm80(entry, (3,), 256, [x, out], [(out, x.numpy().sum(1, dtype=np.int32))])


@_builder("warp_exchange")
def _warp_exchange(entry, rng):
    x, out = _ints(rng, 2, 3, 32), torch.zeros(2, 3, 32, dtype=torch.int32)
    lanes = np.arange(32)
    scan = x.numpy().cumsum(2, dtype=np.int32)[..., (lanes * 5 + 3) % 32]
    stored = np.empty_like(scan)
    stored[..., lanes ^ 13] = 2 * scan
    result = stored[..., 31 - lanes] - lanes.astype(np.int32)
    return _sm80(entry, (2,), 96, [x, out], [(out, result)], shared=4 * 96)


def _ring(x: np.ndarray) -> np.ndarray:
    """(blocks, rounds, items) -> (blocks, items): what both rings compute."""
    total = np.zeros((x.shape[0], x.shape[2]), np.int32)
    for number in range(x.shape[1]):
        total = 3 * total + x[:, number] + number
    return total.astype(np.int32)


@_builder("named_barrier_ring")
def _named_barrier_ring(entry, rng):
    x, out = _ints(rng, 2, 5, 64), torch.zeros(2, 64, dtype=torch.int32)
    return _sm80(entry, (2,), 128, [x, out, 5], [(out, _ring(x.numpy()))])


@_builder("atomic_histogram")
def _atomic_histogram(entry, rng):
    count = 3 * 128 - 17
    x, histogram = _ints(rng, count), torch.zeros(16, dtype=torch.int32)
    expected = np.bincount(x.numpy() & 15, minlength=16).astype(np.int32)
    return _sm80(entry, (3,), 128, [x, histogram, count], [(histogram, expected)])


@_builder("atomic_zoo")
def _atomic_zoo(entry, rng):
    blocks = 2
    x = _ints(rng, blocks, 64)
    v = x.numpy().reshape(-1)
    n = v.size
    cells = torch.tensor([0, 10**9, -(10**9), -1, 0, 0, 0, 0], dtype=torch.int32)
    wide = torch.tensor([0, 0, 1], dtype=torch.int64)
    total, wide_total = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    halves = torch.zeros(2, dtype=torch.float16)
    tickets = torch.zeros(n, dtype=torch.int32)
    folded = [int(v.sum()), v.min(), v.max(), np.bitwise_and.reduce(v), np.bitwise_or.reduce(v)]
    folded += [np.bitwise_xor.reduce(v), n % 10, n]
    product = 1
    for value in v.tolist():
        product = product * ((value | 1) & 0xFFFFFFFF) & 0xFFFFFFFF
    sums = np.array([int(v.astype(np.int64).sum()) << 20, int((v & 0xFFFF).max()) << 33, product], np.int64)
    return _sm80(
        entry,
        (blocks,),
        64,
        [x, cells, wide, total, wide_total, halves, tickets],
        [
            (cells, np.array(folded, np.int32)),
            (wide, sums),
            (total, np.array([(v & 15).sum()], np.float32)),
            (wide_total, np.array([v.sum()], np.float64)),
            (halves, np.array([(v & 3).sum(), n], np.float16)),
        ],
    )


@_builder("semaphore_chain")
def _semaphore_chain(entry, rng):
    blocks = 4
    semaphore, state = torch.zeros(1, dtype=torch.int32), _ints(rng, 64)
    value = state.numpy().copy()
    for block in range(blocks):
        value = 5 * value + block + np.arange(64, dtype=np.int32)
    expected = [(state, value.astype(np.int32)), (semaphore, np.array([blocks], np.int32))]
    return _sm80(entry, (blocks,), 64, [semaphore, state], expected)


@_builder("warp_collectives")
def _warp_collectives(entry, rng):
    blocks, lanes = 2, np.arange(32)
    x = _ints(rng, blocks, 32)
    x[1] = x[1] & ~4 | 1024  # uniform where block 0 isn't
    out = torch.zeros(blocks, 22, 32, dtype=torch.int32)
    rows = []

    def bits(flags: np.ndarray) -> int:
        return int((np.asarray(flags, bool).astype(np.uint64) << lanes[: len(flags)].astype(np.uint64)).sum())

    for v in x.numpy():
        same = bool(((v & 1024) == (v[0] & 1024)).all())
        unsigned = v.astype(np.uint32)
        result: list = [
            bits(v & 1),
            int((v >= -1000).all()),
            int((v > 90).any()),
            int(((v & 4) != 0).all() or ((v & 4) == 0).all()),
            [bits((v & 3) == (w & 3)) for w in v],
            0xFFFFFFFF if same else 0,
            int(same),
            [bits((v & 1) == (w & 1)) for w in v],
            int(v.sum()),
            int(v.min()),
            int(v.max()),
            int(unsigned.min()),
            int(np.bitwise_and.reduce(v | 3)),
            int(np.bitwise_or.reduce(v & 0xF0)),
            int(np.bitwise_xor.reduce(v)),
            v[lanes * 7 % 32],
            np.where(lanes % 16 >= 3, v[lanes - 3], v),
            np.where(lanes % 8 < 3, v[np.minimum(lanes + 5, 31)], v),
            v[lanes ^ 9],
            v[lanes // 4 * 4 + v % 4],
        ]
        apart = np.where(lanes < 16, bits(v[:16] & 2), int(lanes[16:].sum()))
        result += [apart, apart[(lanes + 16) % 32]]
        rows.append([np.broadcast_to(np.asarray(r, np.int64) & 0xFFFFFFFF, 32) for r in result])
    return _sm80(entry, (blocks,), 32, [x, out], [(out, np.array(rows).astype(np.uint32))])


@_builder("half_arithmetic")
def _half_arithmetic(entry, rng):
    count = 128 + 100

    def halves(odd: bool, divisor: int) -> np.ndarray:
        """Multiples of 1 / divisor with at most eight bits: neither sums nor products of them cancel to zero."""
        drawn = rng.integers(1, 127, (2, count)) * 2 + (1 if odd else 0)
        return drawn * rng.choice([-1, 1], drawn.shape) / divisor

    x, y, z = halves(True, 8), halves(False, 8), halves(True, 64)
    z[:, ::9] = x[:, ::9]
    y[y == -1] = -2  # x y + x isn't to cancel either
    # The kernel reads the same words as f16x2 and as bf16x2: even columns are meant for the one, odd for the other.
    dtypes = [torch.float16, torch.bfloat16]

    def words(values: np.ndarray) -> np.ndarray:
        """(2, n), low half first -> 32-bit words of each dtype: (2 dtypes, n)"""
        return np.stack([_words(torch.from_numpy(values).to(t)) for t in dtypes])

    pick = np.arange(count) % 2
    inputs = [torch.from_numpy(words(v)[pick, np.arange(count)].view(np.int32).copy()) for v in (x, y, z)]
    out = torch.zeros(24, count, dtype=torch.int32)
    equal = np.where(x == z, 0xFFFF, 0).astype(np.uint32)
    values = [x + y, x - y, x * y, x * y + z, np.maximum(x * y + z, 0), np.minimum(x, y), np.maximum(x, y)]
    values += [np.maximum(x, y), -x, abs(x), (x > y) * 1.0]
    rows = np.stack([words(v) for v in values], 1)  # (2 dtypes, 11, n)
    mask = np.broadcast_to(equal[0] | equal[1] << 16, (2, 1, count)).astype(np.uint32)
    expected = np.concatenate([rows, mask], 1)

    case = _sm80(entry, (2,), 128, [*inputs, out, count], [])
    f16, bf16 = out[:12, 0::2], out[12:, 1::2]
    case.expected = [(f16, expected[0][:, 0::2]), (bf16, expected[1][:, 1::2])]
    return case


def _words(halves: torch.Tensor) -> np.ndarray:
    low, high = halves.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return low | high << np.uint32(16)


@_builder("narrow_access")
def _narrow_access(entry, rng):
    blocks = 2
    n = blocks * 128
    bytes_, words = rng.integers(-128, 128, (n, 4)).astype(np.int8), rng.integers(0, 65536, n).astype(np.uint16)
    bytes_out, words_out = torch.zeros(n, 2, dtype=torch.uint8), torch.zeros(n, dtype=torch.int16)
    wide = bytes_.astype(np.int32)
    stored = np.stack([wide[:, 0] + 1, wide[:, 1] * 3, wide[:, 2] >> 1, -wide[:, 3]], 1).astype(np.uint8)
    mirrored = stored.reshape(blocks, 128, 4)[:, ::-1].reshape(n, 4)
    five = (words.astype(np.int32) * 5).astype(np.int16).reshape(blocks, 128)[:, ::-1].reshape(n).astype(np.int32)
    first = np.stack([mirrored[:, 0] ^ mirrored[:, 3], (mirrored[:, 1].view(np.int8) < 0).astype(np.uint8)], 1)
    second = (np.trunc(five / 2).astype(np.int32) - mirrored[:, 2].view(np.int8)).astype(np.int16)
    args = [torch.from_numpy(bytes_), torch.from_numpy(words.view(np.int16)), bytes_out, words_out]
    return _sm80(entry, (blocks,), 128, args, [(bytes_out, first), (words_out, second)])


@_builder("local_array")
def _local_array(entry, rng):
    blocks, steps = 2, 11
    x, out = _ints(rng, blocks * 64), torch.zeros(blocks * 64, dtype=torch.int32)
    v, i = x.numpy(), np.arange(blocks * 64)
    ring = (i[:, None] + np.arange(16) ** 2).astype(np.int64)
    for step in range(steps):
        at = (v + 3 * step) & 15
        ring[i, at] = 2 * ring[i, (at + v + step) & 15] - step
    total = np.zeros_like(i)
    for k in range(16):
        total = (7 * total + ring[:, k]) & 0xFFFFFFFF
    return _sm80(entry, (blocks,), 64, [x, out, steps], [(out, total.astype(np.uint32))])


@_builder("divergence")
def _divergence(entry, rng):
    count = 3 * 128 - 40
    x, out = _ints(rng, count, low=0, high=1000), torch.zeros(count, 2, dtype=torch.int32)
    expected = []
    for v in x.tolist():
        value, steps = v + 1, 0
        while value != 1 and steps < 500:
            value, steps = 3 * value + 1 if value & 1 else value // 2, steps + 1
        reversed_bits = int(f"{steps:032b}"[::-1], 2)
        kinds = [steps, steps**2, steps ^ 0x55, steps << 3, ~steps, reversed_bits, steps % 10]
        result = kinds[v % 7] & 0xFFFFFFFF
        expected.append([result, result & 1])
    return _sm80(entry, (3,), 128, [x, out, count], [(out, np.array(expected, np.uint32))])


@_builder("integer_arithmetic")
def _integer_arithmetic(entry, rng):
    count = 2 * 128 - 9
    a, b = (torch.from_numpy(rng.integers(-(2**31), 2**31, count, dtype=np.int32)) for _ in range(2))
    a[::7] >>= 20
    b[::5] >>= 22
    a[:4] = torch.tensor([-(2**31), 2**31 - 1, 0, -1], dtype=torch.int32)
    b[:4] = torch.tensor([-1, -(2**31), 1, -1], dtype=torch.int32)
    b[b == 0] = 3
    out = torch.zeros(30, count, dtype=torch.int64)
    rows = [_integer_rows(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return _sm80(entry, (2,), 128, [a, b, out, count], [(out, np.array(rows, np.uint64).T)])


def _signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _integer_rows(x: int, y: int) -> list[int]:
    ux, uy = x & 0xFFFFFFFF, y & 0xFFFFFFFF
    wide = (x << 21) ^ y
    uwide = wide & (1 << 64) - 1

    def quotient(p: int, q: int) -> int:
        return abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1)

    def leading(value: int, bits: int) -> int:
        return bits - value.bit_length()

    def first_set(value: int) -> int:
        return (value & -value).bit_length()

    permuted = [(uy << 32 | ux) >> 8 * selector & 0xFF for selector in (5, 3, 1, 6)]
    concatenated = uy << 32 | ux
    rows = [
        _signed(x + y),
        _signed(x - y),
        _signed(x * y),
        x * y >> 32,
        ux * uy >> 32,
        x * y,
        ux * uy,
        0 if y == -1 else quotient(x, y),
        0 if y == -1 else x - y * quotient(x, y),
        ux // uy,
        ux % uy,
        quotient(wide, y | 1),
        uwide % uy,
        wide * x >> 64,
        uwide * uwide >> 64,
        x >> (uy & 31),
        ux >> (uy & 31),
        _signed(ux << (uy & 31)),
        wide >> (uy & 63),
        (concatenated << 11 >> 32) & 0xFFFFFFFF,
        (concatenated >> (ux & 31)) & 0xFFFFFFFF,
        ux.bit_count() + 100 * uwide.bit_count(),
        leading(ux, 32) + 100 * leading(uwide, 64),
        first_set(ux) + 100 * first_set(uwide),
        int(f"{ux:032b}"[::-1], 2),
        sum(byte << 8 * n for n, byte in enumerate(permuted)),
        min(x, y) + 3 * max(ux, uy),
        abs(x >> 1),
        _signed(abs(ux - uy) + 7),
        (ux & uy) | (~ux & 0x0F0F0F0F),
    ]
    return [row & (1 << 64) - 1 for row in rows]


def _fragments(matrices: np.ndarray) -> np.ndarray:
    """(n, 8, 8) 16-bit elements -> (n, 32) registers, as ldmatrix distributes them."""
    lanes = np.arange(32)
    low = matrices[:, lanes // 4, lanes % 4 * 2].astype(np.uint32)
    return low | matrices[:, lanes // 4, lanes % 4 * 2 + 1].astype(np.uint32) << np.uint32(16)


@_builder("ldmatrix_shapes")
def _ldmatrix_shapes(entry, rng):
    tile = rng.integers(0, 65536, (4, 8, 8)).astype(np.uint16)
    out = torch.zeros(14, 32, dtype=torch.int32)
    plain, turned = _fragments(tile), _fragments(tile.transpose(0, 2, 1))
    expected = np.concatenate([plain[:1], plain[:2], plain, turned[:1], turned[:2], turned])
    return _sm80(entry, (1,), 32, [torch.from_numpy(tile.view(np.int16)), out], [(out, expected)])


@_builder("mma_f16", "mma_bf16", "mma_tf32")
def _mma(entry, rng):
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}[entry[4:]]
    depth = 8 if entry == "mma_tf32" else 16
    a, b, d = _ints(rng, 16, depth), _ints(rng, 8, depth), _ints(rng, 16, 8)
    result = (d.numpy() + a.numpy() @ b.numpy().T).astype(np.float32)
    d = d.float()
    return _sm80(entry, (1,), 32, [a.to(dtype), b.to(dtype), d], [(d, result)])


# ------------------------------------------------------------------------------------------------------------- sm_90


@_builder("mbarrier_ring")
def _mbarrier_ring(entry, rng):
    x, out = _ints(rng, 2, 5, 128), torch.zeros(2, 128, dtype=torch.int32)
    return _sm90(entry, (2,), 160, [x, out, 5], [(out, _ring(x.numpy()))])


@_builder("tma_copy_none", "tma_copy_32", "tma_copy_64", "tma_copy_128")
def _tma_copy(entry, rng):
    mode = entry.rsplit("_", 1)[1]
    swizzle = 0 if mode == "none" else int(mode)
    columns, rows = (swizzle or 64) // 2, 16
    shape = (2 * rows - 5, 2 * columns - 8)  # ragged both ways; the pitch is a multiple of 16 bytes
    x = torch.from_numpy(rng.integers(-1000, 1000, shape).astype(np.int16))
    out = torch.zeros(shape, dtype=torch.int16)
    plain = torch.zeros(2, 2, rows, columns, dtype=torch.int16)
    padded = np.zeros((2 * rows, 2 * columns), np.int16)
    padded[: shape[0], : shape[1]] = x.numpy()
    tiles = padded.reshape(2, rows, 2, columns).transpose(0, 2, 1, 3)
    box = (columns, rows)
    args = [Map(x, box, swizzle), Map(out, box, swizzle), plain]
    return _sm90(entry, (2, 2), 128, args, [(plain, tiles), (out, -x.numpy())])


@_builder("tma_copy_3d")
def _tma_copy_3d(entry, rng):
    x = _ints(rng, 3, 7, 12)
    out = torch.zeros_like(x)
    args = [Map(x, (8, 4, 2)), Map(out, (8, 4, 2))]
    return _sm90(entry, (2, 2, 2), 64, args, [(out, 2 * x.numpy() + 1)])


@_builder("tma_reduce_add")
def _tma_reduce_add(entry, rng):
    blocks, column, row = 3, 8, 2  # beyond both ends; before the first column it is an illegal instruction
    total = _ints(rng, 9, 20).float()
    expected = total.numpy().copy()
    for block in range(blocks):
        tile = (np.arange(128) + 128 * block).reshape(8, 16) * 3.0
        expected[row:, column:] += tile[: 9 - row, : 20 - column].astype(np.float32)
    return _sm90(entry, (blocks,), 128, [Map(total, (16, 8)), column, row], [(total, expected)])


@_builder("bulk_copy_reduce")
def _bulk_copy_reduce(entry, rng):
    x, total, sums = _ints(rng, 3, 128).float(), _ints(rng, 128).float(), torch.zeros(3)
    done, result = torch.zeros(1, dtype=torch.int32), torch.zeros(128)
    added = total.numpy() + x.numpy().sum(0)
    expected = [(total, added), (sums, x.numpy().sum(1)), (result, added)]
    return _sm90(entry, (3,), 128, [x, total, sums, done, result], expected)


@_builder(
    "wgmma_ss_none",
    "wgmma_ss_32",
    "wgmma_ss_64",
    "wgmma_ss_128",
    "wgmma_ss_128_n128_t",
    "wgmma_rs_128",
    "wgmma_rs_128_n128_t",
)
def _wgmma(entry, rng):
    dtype = torch.float16 if entry in ("wgmma_ss_64", "wgmma_ss_128", "wgmma_rs_128_n128_t") else torch.bfloat16
    columns, transposed = (128 if "n128" in entry else 64), entry.endswith("_t")
    a, b = _ints(rng, 64, 64), _ints(rng, 64, columns)
    d = torch.full((64, columns), math.nan)
    result = (a.numpy() @ b.numpy()).astype(np.float32)
    b = b if transposed else b.T.contiguous()
    return _sm90(entry, (1,), 128, [a.to(dtype), b.to(dtype), d], [(d, result)])


@_builder("stmatrix_shapes")
def _stmatrix_shapes(entry, rng):
    matrices = rng.integers(0, 65536, (14, 8, 8)).astype(np.uint16)
    registers = np.concatenate([_fragments(matrices[:7]), _fragments(matrices[7:].transpose(0, 2, 1))]).copy("C")
    out = torch.zeros(14, 8, 8, dtype=torch.int16)
    return _sm90(entry, (1,), 32, [torch.from_numpy(registers.view(np.int32)), out], [(out, matrices)])


@_builder("elect_leader")
def _elect_leader(entry, rng):
    leaders = torch.zeros(2, 4, dtype=torch.int32)
    return _sm90(entry, (2,), 128, [leaders], [(leaders, np.ones((2, 4), np.int32))])


@_builder("programmatic_launch")
def _programmatic_launch(entry, rng):
    x, out = _ints(rng, 128), torch.zeros(128, dtype=torch.int32)
    return _sm90(entry, (2,), 64, [x, out], [(out, 2 * x.numpy())])


# ------------------------------------------------------------------------------------------------------------- flash


class FlashSm80Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_int32) for name in ("group", "seqlen_q", "seqlen_k", "causal")),
        ("scale_log2", ctypes.c_float),
    )


class FlashSm90Params(ctypes.Structure):
    _fields_ = (
        ("lse", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("group", "seqlen_q", "seqlen_k", "causal")),
        ("scale_log2", ctypes.c_float),
    )


# entry -> dtype, head_dim, query rows of a block, keys of a block, threads, dynamic shared memory in bytes
FLASH = {
    "flash_sm80_f16_d64": (torch.float16, 64, 64, 64, 128, 40960),
    "flash_sm80_bf16_d64": (torch.bfloat16, 64, 64, 64, 128, 40960),
    "flash_sm80_bf16_d128": (torch.bfloat16, 128, 64, 64, 128, 81920),
    "flash_sm90_bf16_d64": (torch.bfloat16, 64, 128, 64, 384, 49224),
    "flash_sm90_bf16_d128": (torch.bfloat16, 128, 128, 128, 384, 163912),
}


def check_attention(out: torch.Tensor, lse: torch.Tensor, inputs: list[torch.Tensor], options: dict) -> None:
    """Holds a forward pass to twice the error of torch's maths in float32 with the result rounded, and two roundings.

    inputs: query, key, value and a mask or none. options: is_causal, enable_gqa, keep (which weights dropout keeps),
    dropout_p.
    """

    def attention(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, *mask = (x.to(dtype) if x is not None and x.is_floating_point() else x for x in inputs)
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask and mask[0] is not None:
            scores = scores.masked_fill(~mask[0], -math.inf) if mask[0].dtype == torch.bool else scores + mask[0]
        if options.get("is_causal"):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        weights, lse = scores.softmax(-1), scores.logsumexp(-1)
        if (keep := options.get("keep")) is not None:
            weights = weights * keep / (1.0 - options["dropout_p"])
        return weights @ v, lse

    exact, computed = attention(torch.float64), attention(torch.float32)
    for name, tensor, want, other in zip(("out", "lse"), (out, lse), exact, computed, strict=True):
        want, other = want.reshape_as(tensor), other.reshape_as(tensor).to(tensor.dtype)
        finite = want.nan_to_num(0.0, 0.0, 0.0)
        unit = torch.finfo(tensor.dtype).eps * (finite.abs() + finite.square().mean().sqrt())
        same = tensor == want  # infinities too
        unit, off = (torch.where(want.isinf(), 0.0, x) for x in (unit, (other - want).abs()))
        error, allowed = torch.where(same, 0.0, (tensor - want).abs()), 2 * off.amax() + 2 * unit
        assert (error <= allowed).all(), (
            f"{name}, {options}: {float((error / allowed).max()):.3g} times what is allowed"
        )


@dataclass
class FlashCase(Case):
    """`out` and `lse` are what the kernel writes."""

    q: torch.Tensor = None  # type: ignore[assignment]
    k: torch.Tensor = None  # type: ignore[assignment]
    v: torch.Tensor = None  # type: ignore[assignment]
    out: torch.Tensor = None  # type: ignore[assignment]
    lse: torch.Tensor = None  # type: ignore[assignment]
    causal: bool = False

    def check(self) -> None:
        check_attention(self.out, self.lse, [self.q, self.k, self.v], {"is_causal": self.causal, "enable_gqa": True})


def flash_case(
    entry: str,
    *,
    batch: int = 1,
    heads_q: int = 2,
    heads_k: int = 1,
    seqlen_q: int = 100,
    seqlen_k: int = 200,
    causal: bool = False,
    seed: int = 0,
) -> FlashCase:
    """A launch of one flash-attention kernel. What lies between the rows of one head and those of the next is NaN."""
    dtype, head_dim, rows, keys, threads, shared = FLASH[entry]
    generator = torch.Generator().manual_seed(seed)

    def tensor(heads: int, length: int) -> torch.Tensor:
        storage = torch.full((batch, heads, length + 3, head_dim), math.nan, dtype=dtype)
        view = storage[:, :, :length]
        view.copy_(torch.randn(view.shape, generator=generator))
        return view

    q, k, v = tensor(heads_q, seqlen_q), tensor(heads_k, seqlen_k), tensor(heads_k, seqlen_k)
    out = torch.full((batch, heads_q, seqlen_q, head_dim), math.nan, dtype=dtype)
    lse = torch.full((batch, heads_q, seqlen_q), math.nan)
    scale = head_dim**-0.5
    numbers = {
        "group": heads_q // heads_k,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "causal": causal,
        "scale_log2": scale * math.log2(math.e),
    }
    if "sm80" in entry:
        named = {"q": q, "k": k, "v": v, "out": out}
        pointers = {name: t.data_ptr() for name, t in named.items()} | {"lse": lse.data_ptr()}
        strides = {f"{name}_stride": t.stride()[:3] for name, t in named.items()}
        args: list = [FlashSm80Params(**pointers, **strides, **numbers)]
    else:
        boxes = [(64, 64), (64, keys), (64, keys), (64, 64)]
        args = [Map(t, (*box, 1, 1), 128) for t, box in zip((q, k, v, out), boxes, strict=True)]
        args.append(FlashSm90Params(lse=lse.data_ptr(), **numbers))
    return FlashCase(
        source="flash_sm80.cu" if "sm80" in entry else "flash_sm90.cu",
        entry=entry,
        target=80 if "sm80" in entry else 90,
        grid=(-(-seqlen_q // rows), heads_q, batch),
        block=threads,
        args=args,
        tensors=[q, k, v, out, lse],
        undefined=[out, lse],
        shared=shared,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        causal=causal,
    )


def subjects() -> list[Subject]:
    """What bugs are planted in: the mechanisms, and the flash kernels where each stage of their rings is used twice."""
    import ptxsim
    from ptxsim.planted_bugs import Subject

    builders: dict[str, Callable[[], Case]] = {entry: partial(case, entry) for entry in mechanisms()}
    one: dict[str, Any] = {"heads_q": 1, "heads_k": 1}
    builders["flash_sm80_f16_d64"] = partial(flash_case, "flash_sm80_f16_d64", **one, seqlen_q=60, seqlen_k=250)
    builders["flash_sm90_bf16_d64"] = partial(flash_case, "flash_sm90_bf16_d64", **one, seqlen_q=120, seqlen_k=440)
    found = []
    for entry, build in builders.items():
        sample = build()
        text = ptxsim.cuda(FOLDER / sample.source, entry, target=sample.target, flags=FLAGS).text

        def execute(text: str, seed: int | None, build=build) -> None:
            fresh = build()
            run(fresh, text, seed)
            fresh.check()

        found.append(Subject(entry, entry, text, execute))
    return found
