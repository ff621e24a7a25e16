"""Bulk copies and reductions: bytes moved, boxes and swizzles, the two ends of a store, proxies, and every misuse."""

import gc
import re
import weakref

import numpy as np
import pytest
import torch

from ptxsim import Deadlock, Fault, Hazard, PtxError, UnsupportedInstruction, front, snippets, tensormap
from ptxsim.boxes import by_element, unit_at

SEEDS = [None, 0, 1, 2]
SHARED = ".shared .align 1024 .b8 buf[{size}]; .shared .align 8 .b64 bar;"
INIT = """
  setp.eq.u32 %p30, %tid, 0;
  @%p30 mbarrier.init.shared::cta.b64 [bar], 1;
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""
WAIT = """
  WAIT_{n}:
  mbarrier.try_wait.parity.shared::cta.b64 %p31, [bar], {parity};
  @!%p31 bra WAIT_{n};
"""
PUBLISH = "fence.proxy.async.shared::cta; bar.sync 0;"
DRAIN = "@%p30 cp.async.bulk.commit_group; @%p30 cp.async.bulk.wait_group 0;"


def run(body, *tensors, threads=64, size=8192, **options):
    return snippets.run(
        INIT + body, *tensors, threads=threads, target=90, declarations=SHARED.format(size=size), **options
    )


def wait(parity=0, n=0):
    return WAIT.format(n=n, parity=parity)


def expect(count):
    return f"@%p30 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {count};"


def words(start, count, argument, *, out, n=0):
    """Copies `count` bytes between buf + start and the tensor of this argument, four bytes a thread and turn."""
    move = "ld.shared.u32 %r23, [%r22]; st.global.u32 [%rd20], %r23;"
    if not out:
        move = "ld.global.u32 %r23, [%rd20]; st.shared.u32 [%r22], %r23;"
    return f"""
      mov.u32 %r20, %tid;
    NEXT_{n}:
      setp.ge.u32 %p20, %r20, {count // 4};
      @%p20 bra LAST_{n};
      shl.b32 %r21, %r20, 2;
      mov.u32 %r22, buf;
      add.u32 %r22, %r22, {start};
      add.u32 %r22, %r22, %r21;
      cvt.u64.u32 %rd20, %r21;
      add.u64 %rd20, %rd20, %arg{argument};
      {move}
      mov.u32 %r24, %ntid.x;
      add.u32 %r20, %r20, %r24;
      bra NEXT_{n};
    LAST_{n}:
      bar.sync 0;
    """


def load(count, at=0, source="%arg0"):
    name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return f"@%p30 {name} [buf + {at}], [{source}], {count}, [bar];"


def store(count, at=0, target="%arg0"):
    return f"@%p30 cp.async.bulk.global.shared::cta.bulk_group [{target}], [buf + {at}], {count};"


def numbers(count, dtype=np.uint32, seed=0):
    return np.random.default_rng(seed).integers(0, 200, count).astype(dtype)


# -- linear copies


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("count", "at"), [(16, 0), (16, 16), (2048, 64), (4096, 4096)])
def test_loading_and_storing_bytes(count, at, seed):
    x, out, copied = numbers(1024), np.zeros(1024, np.uint32), np.zeros(count // 4, np.uint32)
    body = expect(count) + load(count, at) + wait() + words(at, count, 2, out=True) + store(count, at, "%arg1") + DRAIN
    run(body, x, out, copied, seed=seed)
    assert (copied == x[: count // 4]).all()
    assert (out[: count // 4] == x[: count // 4]).all()
    assert not out[count // 4 :].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_lane_may_copy(seed):
    """32 threads copy 16 bytes each, to where their neighbour's came from; two blocks."""
    body = """
      mov.u32 %r0, buf;
      mad.lo.u32 %r0, %tid, 16, %r0;
      mul.wide.u32 %rd0, %tid, 16;
      add.u64 %rd1, %rd0, %arg0;
      @%p30 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 512;
      cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r0], [%rd1], 16, [bar], %rd0;
    """
    body += wait()
    body += """
      xor.b32 %r1, %tid, 1;
      mov.u32 %r2, buf;
      mad.lo.u32 %r2, %r1, 16, %r2;
      mad.lo.u32 %r3, %r127, 32, %tid;
      mul.wide.u32 %rd2, %r3, 16;
      add.u64 %rd2, %rd2, %arg1;
      cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 16;
      cp.async.bulk.commit_group;
      cp.async.bulk.wait_group 0;
    """
    x, out = numbers(128).reshape(32, 4), np.zeros((2, 32, 4), np.uint32)
    run(body, x, out, threads=32, blocks=2, seed=seed)
    assert (out == x[np.arange(32) ^ 1]).all()


def test_hints_do_nothing():
    body = """
      cp.async.bulk.prefetch.L2.global [%arg0], 64;
      cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%arg0, {%r0, %r1}];
      prefetch.tensormap [%arg0];
    """
    run(body, numbers(16))


# -- reductions


def _f32_flushed(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def _bf16_to_f32(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def _f32_to_bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def reference(op, kind, old, new):
    """PTX ISA 9.7.9.25.4.2 in numpy."""
    if kind == "bf16":
        return _f32_to_bf16(reference(op, "wide", _bf16_to_f32(old), _bf16_to_f32(new)))
    if op == "add" and kind == "f32":
        return _f32_flushed(_f32_flushed(old) + _f32_flushed(new))
    if op == "inc":
        return np.where(old >= new, 0, old + 1).astype(old.dtype)
    if op == "dec":
        return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
    plain = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    return (plain | {"xor": np.bitwise_xor})[op](old, new)


TYPES = {"u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8", "f32": "f4", "f64": "f8", "f16": "f2", "bf16": "u2"}
TYPES |= {"b32": "u4", "b64": "u8"}
VALID = [("add", k) for k in ("u32", "s32", "u64", "f32", "f64", "f16", "bf16")]
VALID += [(op, k) for op in ("min", "max") for k in ("u32", "s32", "u64", "s64", "f16", "bf16")]
VALID += [("inc", "u32"), ("dec", "u32"), *((op, k) for op in ("and", "or", "xor") for k in ("b32", "b64"))]


def operands(kind, count):
    """Both operands of a reduction: random bits (of floats without NaN), edges first."""
    rng = np.random.default_rng(5)
    dtype = np.dtype(TYPES[kind])
    if dtype.kind == "f" or kind == "bf16":
        tiny = {"f16": 6e-8, "f64": 5e-324}.get(kind, 1e-40)
        edges = np.array([0, -0.0, 1, -1, tiny, -tiny, 3.5, 100.25])
        out = [np.r_[np.repeat(edges, 8), np.tile(edges, 8)], rng.standard_normal(count) * 10]
        out = [np.r_[np.repeat(edges, 8), rng.standard_normal(count - 64)], np.r_[np.tile(edges, 8), out[1][64:]]]
        if kind == "bf16":
            return [_f32_to_bf16(x.astype(np.float32)) for x in out]
        return [x.astype(dtype) for x in out]
    edge = np.array([0, 1, 2, 3, -1 & 0xFF, 7, 8, 9], np.uint64)
    size = dtype.itemsize
    bits = [rng.integers(0, 256, count * size, np.uint8).view(dtype).copy() for _ in range(2)]
    bits[0][:64], bits[1][:64] = np.repeat(edge, 8).astype(dtype), np.tile(edge, 8).astype(dtype)
    return bits


def same(a, b):
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("op", "kind"), VALID)
def test_reducing_bytes(op, kind):
    old, new = operands(kind, 128)
    want, size = reference(op, kind, old, new), old.nbytes
    name = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}"
    name += ".noftz" if op == "add" and kind in ("f16", "bf16") else ""
    body = words(0, size, 1, out=False) + PUBLISH + f"@%p30 {name}.{kind} [%arg0], [buf], {size};" + DRAIN
    for seed in (None, 1):
        got = old.copy()
        run(body, got.view(np.uint8), new.view(np.uint8), seed=seed)
        assert same(got, want)


@pytest.mark.parametrize(
    "text",
    [
        "add.f16 [%arg0], [buf], 16;",
        "add.noftz.f32 [%arg0], [buf], 16;",
        "min.f32 [%arg0], [buf], 16;",
        "and.f32 [%arg0], [buf], 16;",
        "exch.u32 [%arg0], [buf], 16;",
        "add.s64 [%arg0], [buf], 16;",
    ],
)
def test_reductions_that_do_not_exist(text):
    with pytest.raises(PtxError, match=r"cp\.reduce\.async\.bulk"):
        run(f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{text}", numbers(4))


# -- tensors


def map_of(x: torch.Tensor, element, sizes, strides, box, **options) -> torch.Tensor:
    """A tensor map in a tensor of its own (torch aligns it to 64)."""
    coded = tensormap.encode(x.data_ptr(), element, sizes, strides, box, **options)
    return torch.frombuffer(bytearray(coded), dtype=torch.uint8).clone()


def tensor_load(rank, at, coordinates, more=""):
    """One copy, at literal coordinates."""
    moves = " ".join(f"mov.u32 %r{k}, {c & 0xFFFFFFFF};" for k, c in enumerate(coordinates))
    where = ", ".join(f"%r{k}" for k in range(rank))
    name = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes{more}"
    return f"{moves} @%p30 {name} [buf + {at}], [%arg1, {{{where}}}], [bar]"


def tensor_store(rank, at, coordinates, name="cp.async.bulk.tensor.{r}d.global.shared::cta.tile.bulk_group"):
    moves = " ".join(f"mov.u32 %r{k}, {c & 0xFFFFFFFF};" for k, c in enumerate(coordinates))
    where = ", ".join(f"%r{k}" for k in range(rank))
    return f"{moves} @%p30 {name.format(r=rank)} [%arg1, {{{where}}}], [buf + {at}];"


# element, sizes, strides, box, steps, swizzle, atom
BOXES = [
    ("u8", (50,), (), (32,), (1,), 0, 0),
    ("f16", (21, 13), (48,), (8, 6), (1, 1), 0, 0),
    ("f32", (9, 7, 5), (48, 400), (4, 4, 2), (1, 2, 3), 0, 0),
    ("u64", (3, 4, 3, 2, 3), (32, 160, 480, 1008), (2, 3, 2, 2, 2), (1, 1, 1, 2, 1), 0, 0),
    ("f16", (40, 30), (96,), (16, 24), (1, 1), 32, 0),
    ("bf16", (40, 30), (96,), (32, 24), (1, 1), 64, 0),
    ("f16", (100, 30), (208,), (64, 24), (1, 1), 128, 0),
    ("f32", (40, 30, 3), (176, 5328), (32, 9, 2), (1, 1, 1), 128, 0),
    ("f32", (40, 30), (176,), (32, 20), (1, 1), 128, 1),
    ("f32", (40, 30), (176,), (32, 20), (1, 1), 128, 3),
]


def corners(sizes, box):
    inside = tuple(0 for _ in sizes)
    across = tuple(size - max(b // 2, 1) for size, b in zip(sizes, box, strict=True))
    before = tuple(-(b // 2) for b in box)
    return [inside, across, before, tuple(sizes), tuple(s // 3 for s in sizes)]


def box_bytes(made, data: np.ndarray, start, at: int) -> np.ndarray:
    """What buf holds from `at` on after the box was loaded there: element by element, then by the table."""
    flat = np.zeros(made.bytes, np.uint8)
    size = made.element_bytes
    for index, offset in by_element(made, start).items():
        place = 0
        for i, n in zip(reversed(index), reversed(made.counts), strict=True):
            place = place * n + i
        flat[place * size : place * size + size] = data[offset : offset + size]
    return np.array([flat[unit_at(made.swizzle, made.atom, at + k) - at] for k in range(made.bytes)], np.uint8)


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("at", [0, 384])
def test_tensor_loads(box, at):
    element, sizes, strides, shape, steps, swizzle, atom = box
    if swizzle == 128 and atom:
        at = at // 512 * 512
    x = torch.from_numpy(np.random.default_rng(2).integers(0, 256, 20000, np.uint8))
    described = map_of(x, element, sizes, strides, shape, element_strides=steps, swizzle=swizzle, atom=atom)
    made = tensormap.decode(described.numpy().tobytes())
    for n, start in enumerate(corners(sizes, shape)):
        out = np.zeros(made.bytes, np.uint8)
        body = expect(made.bytes) + tensor_load(len(sizes), at, start) + ";" + wait()
        run(body + words(at, made.bytes, 2, out=True), x, described, out, seed=[None, 0, 1][n % 3])
        assert (out == box_bytes(made, x.numpy(), start, at)).all()


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("seed", [None, 3])
def test_tensor_stores(box, seed):
    element, sizes, strides, shape, steps, swizzle, atom = box
    rng = np.random.default_rng(3)
    source = rng.integers(0, 256, 8192, np.uint8)
    for start in corners(sizes, shape):
        before = rng.integers(0, 256, 20000, np.uint8)
        x = torch.from_numpy(before.copy())
        described = map_of(x, element, sizes, strides, shape, element_strides=steps, swizzle=swizzle, atom=atom)
        made = tensormap.decode(described.numpy().tobytes())
        body = words(0, 8192, 2, out=False) + PUBLISH + tensor_store(len(sizes), 1024, start) + DRAIN
        run(body, x, described, source, seed=seed)
        flat = np.zeros(made.bytes, np.uint8)
        for k in range(made.bytes):
            flat[unit_at(swizzle, atom, k)] = source[1024 + k]
        want, size = before.copy(), made.element_bytes
        for index, offset in by_element(made, start).items():
            place = 0
            for i, n in zip(reversed(index), reversed(made.counts), strict=True):
                place = place * n + i
            want[offset : offset + size] = flat[place * size : place * size + size]
        assert (x.numpy() == want).all()


@pytest.mark.parametrize(("op", "kind"), [(op, k) for op, k in VALID if k not in ("b32", "b64", "f64")])
def test_tensor_reductions(op, kind):
    old, new = operands(kind, 128)
    size = old.itemsize
    inner = 32 // size
    got = torch.from_numpy(old.copy().view(np.uint8))
    described = map_of(got, kind, (inner - 1, 128 // inner - 1), (32,), (inner, 128 // inner), swizzle=32)
    name = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group"
    # The tile as TMA finds it: swizzled, as the table says.
    flat, swizzled = new.view(np.uint8), np.zeros(new.nbytes, np.uint8)
    for k in range(new.nbytes):
        swizzled[k] = flat[unit_at(32, 0, k)]
    body = words(0, new.nbytes, 2, out=False) + PUBLISH + tensor_store(2, 0, (0, 0), name) + DRAIN
    run(body, got, described, swizzled)
    want = old.copy().reshape(-1, inner)
    inside = np.s_[: 128 // inner - 1, : inner - 1]
    both = (x.reshape(-1, inner)[inside] for x in (old, new))
    want[inside] = reference(op, kind, *(np.ascontiguousarray(x) for x in both))
    assert same(got.numpy(), want)


def test_no_reduction_at_a_negative_coordinate():
    x, described = plain_map()
    name = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    with pytest.raises(Fault, match=re.escape("a reduction at a negative coordinate: (0, -1)")):
        run(tensor_store(2, 0, (0, -1), name) + DRAIN, x, described, torch.zeros(128, dtype=torch.uint8), size=8192)


def test_out_of_bounds_as_nan():
    for kind, bits in (("f16", "f2"), ("f32", "f4"), ("f64", "f8")):
        x = torch.ones(64, dtype=torch.float64)
        inner = 16 // np.dtype(bits).itemsize
        described = map_of(x, kind, (inner, 3), (16,), (inner, 4), fill_nan=True)
        out = np.zeros(4 * inner, bits)
        body = expect(64) + tensor_load(2, 0, (0, 1)) + ";" + wait() + words(0, 64, 2, out=True)
        run(body, x, described, out.view(np.uint8))
        assert np.isnan(out.reshape(4, inner)[2:]).all()
        assert not np.isnan(out.reshape(4, inner)[:2]).any()


def plain_map(**options):
    x = torch.zeros(64, 64, dtype=torch.float16)
    return x, map_of(x, "f16", (64, 64), (128,), (8, 8), **options)


@pytest.mark.parametrize(
    ("kind", "words_", "text"),
    [
        (PtxError, "unknown modifier .im2col", tensor_load(2, 0, (0, 0), ".im2col") + ";"),
        (PtxError, "unknown modifier .tile::gather4", tensor_load(2, 0, (0, 0), ".tile::gather4") + ";"),
        (PtxError, "unknown modifier .cta_group::2", tensor_load(2, 0, (0, 0), ".cta_group::2") + ";"),
        (PtxError, "3 coordinates expected, got 2", tensor_load(2, 0, (0, 0)).replace("2d", "3d") + ";"),
        (PtxError, "multicast to blocks 0x3", tensor_load(2, 0, (0, 0), ".multicast::cluster") + ", 3;"),
        (Fault, "a copy of 1 dimensions by a tensor map of rank 2", tensor_load(1, 0, (0,)) + ";"),
        (Fault, "must be a multiple of 128", tensor_load(2, 64, (0, 0)) + ";"),
        (Fault, "no tensor map", "add.u64 %arg1, %arg2, 0;" + tensor_load(2, 0, (0, 0)) + ";"),
        (Fault, "must be a multiple of 64", "add.u64 %arg1, %arg1, 32;" + tensor_load(2, 0, (0, 0)) + ";"),
        (Fault, "128-byte access at 0x2000 of shared memory", tensor_load(2, 8192, (0, 0)) + ";"),
        (Fault, "must be a multiple of 16", load(32, 8)),
        (Fault, "must be a multiple of 16", "add.u64 %arg0, %arg0, 8;" + load(32)),
        (Fault, "a bulk copy of 24 bytes", load(24)),
        (Fault, "is out of bounds", "add.u64 %arg0, %arg0, 8176;" + load(32)),
        (Fault, "no mbarrier was initialised", load(32).replace("[bar]", "[buf + 8]")),
    ],
)
def test_misuse(kind, words_, text):
    x, described = plain_map()
    with pytest.raises(kind, match=re.escape(words_)):
        run(text, x, described, torch.zeros(128, dtype=torch.uint8), size=8192)


@pytest.mark.parametrize(
    ("words_", "options"),
    [
        ("rows narrower than the swizzle", {"swizzle": 32}),
        ("8-byte flips", {"swizzle": 128, "atom": 2}),
    ],
)
def test_tensor_maps_that_are_not_modelled(words_, options):
    x, described = plain_map(**options)
    with pytest.raises(UnsupportedInstruction, match=words_):
        run(tensor_load(2, 0, (0, 0)) + ";", x, described)


def test_a_tensor_map_of_tf32_is_not_modelled():
    x = torch.zeros(64)
    with pytest.raises(UnsupportedInstruction, match="tf32"):
        run(tensor_load(1, 0, (0,)) + ";", x, map_of(x, "tf32", (64,), (), (8,)))


def test_a_tensor_map_that_reaches_beyond_its_tensor():
    x = torch.zeros(64, dtype=torch.float32)
    described = map_of(x, "f32", (16, 5), (64,), (4, 2))
    run(expect(32) + tensor_load(2, 0, (0, 2)) + ";" + wait(), x, described)
    with pytest.raises(Fault, match=r"reaches 16 bytes past the last byte of argument args\[0\]"):
        run(expect(32) + tensor_load(2, 0, (0, 3)) + ";" + wait(), x, described)


# -- order: loads


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_is_seen_only_after_the_wait(seed):
    x, out = numbers(256), np.zeros(256, np.uint32)
    body = expect(1024) + load(1024)
    with pytest.raises(Hazard, match=r"reads shared memory at 0x0 .* TMA onto the mbarrier at shared 0x2000"):
        run(body + words(0, 1024, 1, out=True) + wait(), x, out, seed=seed)


def test_an_unwaited_load_shows_in_the_numbers_of_some_schedule():
    x, wrong = numbers(256) + 1, 0
    for seed in range(10):
        out = np.zeros(256, np.uint32)
        run(expect(1024) + load(1024) + words(0, 1024, 1, out=True) + wait(), x, out, seed=seed, check=False)
        wrong += not (out == x).all()
    assert wrong


def test_memory_that_is_read_may_not_be_loaded_into():
    x, out = numbers(256), np.zeros(256, np.uint32)
    twice = expect(1024) + load(1024) + wait() + "{read}" + expect(1024) + load(1024) + wait(1, 1)
    read = words(0, 1024, 1, out=True)
    run(twice.format(read=read), x, out)
    with pytest.raises(Hazard, match=r"through the asynchronous proxy .*writes .* after the read by thread"):
        run(twice.format(read=read.replace("bar.sync 0;", "")), x, out)


def test_memory_that_was_stored_to_needs_a_proxy_fence_before_a_load():
    x = numbers(256)
    body = "st.shared.u32 [buf], 1; {fence} bar.sync 0;" + expect(1024) + load(1024) + wait()
    run(body.format(fence="fence.proxy.async.shared::cta;"), x, threads=1)
    with pytest.raises(Hazard, match=r"no fence.proxy.async stands between"):
        run(body.format(fence=""), x, threads=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_expecting_the_wrong_number_of_bytes(seed):
    x = numbers(256)
    with pytest.raises(Deadlock, match=r"phase 0, 0 of 1 arrivals pending, 16 bytes still expected"):
        run(expect(1040) + load(1024) + wait(), x, seed=seed)
    with pytest.raises(Fault, match=r"more bytes were copied than expected|16 bytes more copied than expected"):
        run(expect(1008) + load(1024) + wait(), x, seed=seed)
    with pytest.raises(Fault, match=r"copied than expected|still under way: fewer were expected"):
        run(load(1024) + "@%p30 mbarrier.arrive.shared::cta.b64 _, [bar];" + wait(), x, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_expecting_the_bytes_of_one_copy_of_two(seed):
    with pytest.raises(
        Fault, match=r"copied than expected|1024 bytes of copies that signal it are still|no thread has waited"
    ):
        run(expect(1024) + load(1024) + load(1024, 1024) + wait(), numbers(256), seed=seed)


@pytest.mark.parametrize("tensor", [False, True])
def test_the_source_of_a_load_may_not_be_written_before_the_wait(tensor):
    x = torch.zeros(64, 64, dtype=torch.float16)
    described = map_of(x, "f16", (64, 64), (128,), (8, 8))
    issue = expect(128) + (tensor_load(2, 0, (0, 0)) + ";" if tensor else load(128))
    touch = "@%p30 st.global.u32 [%arg0], 7;"
    run(issue + wait() + touch, x, described)
    with pytest.raises(Hazard, match=r"writes argument args\[0\].* after the read by TMA onto the mbarrier"):
        run(issue + touch + wait(), x, described)
    with pytest.raises(Hazard, match=r"reads argument args\[0\].*"):
        run("@!%p30 st.global.u32 [%arg0], 7;" + issue + wait(), x, described, threads=2)


def test_an_mbarrier_is_invalidated_by_one_who_has_waited_for_its_copies():
    body = expect(128) + load(128) + "{wait} bar.sync 0; @%p30 mbarrier.inval.shared::cta.b64 [bar];"
    run(body.format(wait=wait()), numbers(64))
    with pytest.raises(Hazard, match=r"mbarrier.inval .* hasn't waited for the copies"):
        run(body.format(wait=""), numbers(64))


def test_a_block_may_not_end_before_its_loads():
    with pytest.raises(Fault, match="no thread has waited for the copies that signal the mbarrier at shared 0x2000"):
        run(expect(1024) + load(1024), numbers(256))


# -- order: stores


def fill(value):
    return f"mov.u32 %r40, {value}; mad.lo.u32 %r41, %tid, 4, 0; mov.u32 %r42, buf; add.u32 %r42, %r42, %r41;" + (
        "st.shared.u32 [%r42], %r40;"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_memory_may_be_written_again_once_it_was_read(seed):
    body = fill(1) + PUBLISH + store(256) + "@%p30 cp.async.bulk.commit_group; {wait} bar.sync 0;" + fill(2) + DRAIN
    out = np.zeros(64, np.uint32)
    run(body.format(wait="@%p30 cp.async.bulk.wait_group.read 0;"), out, seed=seed)
    assert (out == 1).all()
    with pytest.raises(Hazard, match=r"writes shared memory .* after the read by TMA reading for thread 0"):
        run(body.format(wait=""), out, seed=seed)
    # A group that wasn't committed isn't waited for.
    late = body.replace("@%p30 cp.async.bulk.commit_group; {wait}", "@%p30 cp.async.bulk.wait_group.read 0;")
    with pytest.raises(Hazard, match=r"writes shared memory .* after the read by TMA reading for thread 0"):
        run(late, out, seed=seed)


def test_an_unwaited_store_shows_in_the_numbers_of_some_schedule():
    body = fill(1) + PUBLISH + store(256) + "@%p30 cp.async.bulk.commit_group; bar.sync 0;" + fill(2) + "bar.sync 0;"
    wrong = 0
    for seed in range(10):
        out = np.zeros(64, np.uint32)
        run(body + DRAIN, out, seed=seed, check=False)
        wrong += not (out == 1).all()
    assert wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_wait_group_leaves_the_newest_groups(seed):
    """Two stores in two groups: waiting until one group is left frees the first's source, not the second's."""
    body = fill(1) + fill(1).replace("buf;", "buf; add.u32 %r42, %r42, 512;") + PUBLISH
    body += store(256) + "@%p30 cp.async.bulk.commit_group;" + store(256, 512, "%arg1")
    body += "@%p30 cp.async.bulk.commit_group; @%p30 cp.async.bulk.wait_group.read 1; bar.sync 0;"
    out, other = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    run(body + fill(2) + DRAIN, out, other, seed=seed)
    assert (out == 1).all()
    assert (other == 1).all()
    with pytest.raises(Hazard, match=r"writes shared memory at 0x200 .* after the read by TMA reading"):
        run(body + fill(2).replace("buf;", "buf; add.u32 %r42, %r42, 512;") + DRAIN, out, other, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_store_wrote_may_be_read_after_the_full_wait_only(seed):
    body = fill(7) + PUBLISH + store(256) + "@%p30 cp.async.bulk.commit_group; @%p30 cp.async.bulk.wait_group{read} 0;"
    body += "@%p30 ld.global.u32 %r50, [%arg0]; @%p30 st.global.u32 [%arg1], %r50;" + DRAIN
    out = np.zeros(64, np.uint32)
    seen = np.zeros(4, np.uint32)
    run(body.format(read=""), out, seen, seed=seed)
    assert seen[0] == 7
    for drawn in range(12 if seed == 0 else 0):
        out[:], seen[:] = 0, 0
        run(body.format(read=""), out, seen, seed=drawn, check=False)
        assert seen[0] == 7
    with pytest.raises(Hazard, match=r"reads argument args\[0\].* by TMA writing for thread 0"):
        run(body.format(read=".read"), out, seen, seed=seed)


@pytest.mark.parametrize("reduces", [False, True])
def test_a_store_needs_a_proxy_fence_after_plain_stores(reduces):
    out = np.zeros(64, np.uint32)
    text = store(256)
    if reduces:
        text = "@%p30 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%arg0], [buf], 256;"
    run(fill(1) + PUBLISH + text + DRAIN, out)
    with pytest.raises(Hazard, match=r"reads shared memory .*but no fence.proxy.async stands between"):
        run(fill(1) + "bar.sync 0;" + text + DRAIN, out)
    with pytest.raises(Hazard, match=r"reads shared memory .*while nothing orders it after a store"):
        run(fill(1) + "fence.proxy.async.shared::cta;" + text + DRAIN, out)


def test_a_fence_by_the_issuing_thread_alone_covers_what_it_knows():
    """The order "stores, barrier, fence by one thread, copy" is as good as "fence by all, barrier, copy"."""
    out = np.zeros(64, np.uint32)
    run(fill(1) + "bar.sync 0; @%p30 fence.proxy.async;" + store(256) + DRAIN, out)
    assert (out == 1).all()


def test_a_block_may_not_end_before_its_stores_have_read():
    with pytest.raises(Fault, match="a bulk store may still read its shared memory"):
        run(fill(1) + PUBLISH + store(256) + "@%p30 cp.async.bulk.commit_group;", np.zeros(64, np.uint32))


def test_a_machine_goes_without_the_collector(monkeypatch):
    """Which comes seldom beside a million objects of decoded kernels, and a machine may hold gigabytes."""
    made = []

    class Watched(front.Machine):
        def run(self):
            made.append(weakref.ref(self))
            super().run()

    monkeypatch.setattr(front, "Machine", Watched)
    gc.disable()
    try:
        run(fill(1) + PUBLISH + store(256) + DRAIN, np.zeros(64, np.uint32))
        run(expect(256) + load(256) + wait(), numbers(64))
        assert [ref() for ref in made] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_may_reduce_to_the_same_memory_but_not_store(seed):
    text = "@%p30 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%arg0], [buf], 256;"
    out = np.zeros(64, np.uint32)
    run(fill(5) + PUBLISH + text + DRAIN, out, blocks=3, seed=seed)
    assert (out == 15).all()
    with pytest.raises(Hazard, match=r"writes argument args\[0\] .* by TMA writing for thread 0 of block"):
        run(fill(5) + PUBLISH + store(256) + DRAIN, out, blocks=3, seed=seed)


def test_reducing_to_what_nobody_has_written():
    out = torch.zeros(64, dtype=torch.int32)
    text = "@%p30 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%arg0], [buf], 256;"
    with pytest.raises(Hazard, match="which was never written"):
        run(fill(5) + PUBLISH + text + DRAIN, out, undefined=[out])


def test_a_row_that_ends_within_a_granule_belongs_to_two_tiles():
    """Blocks store 16 bytes wide columns side by side from byte 12 on: each granule of 16 bytes has two of them."""
    x = torch.zeros(8, 36, dtype=torch.int32)
    described = map_of(x, "s32", (35, 8), (144,), (4, 8))
    body = "mul.lo.u32 %r60, %r127, 4; add.u32 %r60, %r60, 3;" + fill("%r127") + PUBLISH
    body += "mov.u32 %r61, 0; @%p30 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    body += " [%arg1, {%r60, %r61}], [buf];" + DRAIN
    run(body, x, described, blocks=8)
    want = np.zeros((8, 36), np.int32)
    want[:, 3:35] = np.repeat(np.arange(8), 4)
    assert (x.numpy() == want).all()
    # Whole granules have one owner.
    with pytest.raises(Hazard, match=r"writes argument args\[0\] .* by TMA writing for thread 0"):
        run(
            body.replace("mul.lo.u32 %r60, %r127, 4; add.u32 %r60, %r60, 3;", "mov.u32 %r60, 4;"),
            x,
            described,
            blocks=2,
        )
    # So have those that a row leaves at the end of the tensor: the rest is padding.
    with pytest.raises(Hazard, match=r"writes argument args\[0\] .* by TMA writing for thread 0"):
        run(
            body.replace("mul.lo.u32 %r60, %r127, 4; add.u32 %r60, %r60, 3;", "mov.u32 %r60, 32;"),
            x,
            described,
            blocks=2,
        )


# -- tensor maps that the kernel makes


DEVICE = """
  setp.lt.u32 %p28, %tid, 32;
  mov.u32 %r70, buf;
  mad.lo.u32 %r71, %tid, 4, %r70;
  @%p28 st.shared.u32 [%r71 + 1024], 0;
  bar.sync 0;
  cvt.u64.u32 %rd40, %r70;
  add.u64 %rd40, %rd40, 1024;
  @%p30 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%rd40], %arg0;
  @%p30 tensormap.replace.tile.rank.shared::cta.b1024.b32 [%rd40], 1;
  @%p30 tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%rd40], 0, 8;
  @%p30 tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%rd40], 1, 8;
  @%p30 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%rd40], 0, 20;
  @%p30 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%rd40], 1, 10;
  @%p30 tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%rd40], 0, 96;
  @%p30 tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%rd40], 0, 1;
  @%p30 tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%rd40], 1, 1;
  @%p30 tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%rd40], 7;
  @%p30 tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%rd40], 0;
  @%p30 tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%rd40], 1;
  @%p30 tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%rd40], 0;
  @%p28 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%arg1], [%rd40], 128;
  @%p28 fence.proxy.tensormap::generic.acquire.gpu [%arg1], 0x80;
  bar.sync 0;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tensor_map_made_by_the_kernel(seed):
    x = torch.arange(10 * 24, dtype=torch.float32).reshape(10, 24)
    space, out = torch.full((128,), 9, dtype=torch.uint8), np.zeros((8, 8), np.float32)
    body = DEVICE + expect(256) + tensor_load(2, 0, (16, 4)) + ";" + wait() + words(0, 256, 2, out=True)
    run(body, x, space, out, seed=seed)
    tile = np.zeros((8, 8), np.float32)
    tile[:6, :4] = x.numpy()[4:10, 16:20]
    flat = tile.reshape(-1).view(np.uint8)
    assert (out.reshape(-1).view(np.uint8) == [flat[unit_at(32, 0, k)] for k in range(256)]).all()
    assert tensormap.decode(space.numpy().tobytes()).sizes == (20, 10)


@pytest.mark.parametrize(
    ("kind", "message", "take", "give"),
    [
        (Hazard, "without a fence.proxy.tensormap::generic.acquire", "@%p28 fence.proxy.tensormap.*?;", ""),
        (Fault, r"\.global_stride was never written", "@%p30 tensormap.replace.tile.global_stride.*?;", ""),
        (Fault, "neither a tensor map nor zero", r"1024\], 0;", "1024], 5;"),
        (Hazard, "which was never written", r"@%p28 st.shared.*?;", ""),
        (Hazard, "nothing orders it after a store by thread", r"1024\], 0;\s*bar.sync 0;", "1024], 0;"),
        (Fault, "257 as .box_dim 0", r"box_dim(.*?) 0, 8;", r"box_dim\1 0, 257;"),
        (
            Deadlock,
            "wait for the rest of its warp at .*tensormap.cp_fence",
            "@%p28 tensormap.cp_",
            "@%p30 tensormap.cp_",
        ),
        (Fault, "give tensormap.cp_fenceproxy different addresses", "bar.sync 0;\n  cvt", "bar.sync 0; SHIFT cvt"),
        (PtxError, "the size must be 128", r"\[%rd40\], 128", "[%rd40], 64"),
        (PtxError, "unknown modifier .weird", "tile.rank", "tile.weird.rank"),
    ],
)
def test_making_a_tensor_map_wrongly(kind, message, take, give):
    shift = "setp.eq.u32 %p27, %tid, 5; @%p27 add.u64 %arg1, %arg1, 128;"
    text, count = re.subn(take, give, DEVICE, count=1, flags=re.S)
    assert count
    x, space = torch.zeros(10, 24), torch.zeros(256, dtype=torch.uint8)
    body = text.replace("SHIFT", shift) + expect(256) + tensor_load(2, 0, (16, 4)) + ";" + wait()
    with pytest.raises(kind, match=message):
        run(body, x, space)


@pytest.mark.parametrize("ordered", [True, False])
def test_the_acquiring_fence_of_another_thread(ordered):
    """It covers a copy that a barrier orders after it."""
    fence = re.search(r"@%p28 (fence.proxy.tensormap.*?;)", DEVICE)[1]
    other = f"bar.sync 0; @!%p28 {fence}" + ("bar.sync 0;" if ordered else "")
    text = DEVICE.replace(f"@%p28 {fence}\n  bar.sync 0;", other)
    assert text != DEVICE
    x, space = torch.zeros(10, 24), torch.zeros(128, dtype=torch.uint8)
    body = text + expect(256) + tensor_load(2, 0, (16, 4)) + ";" + wait()
    for seed in (None, 1, 2):
        if ordered:
            run(body, x, space, seed=seed)
        else:
            with pytest.raises(Hazard, match=r"without a fence.proxy.tensormap::generic.acquire"):
                run(body, x, space, seed=seed)


def test_a_thread_copies_the_tensor_map_that_another_one_made():
    """cp_fenceproxy waits for its warp; what its threads wrote is ordered by a barrier alone."""
    by_lane_1 = "setp.eq.u32 %p26, %tid, 1;" + DEVICE.replace("@%p30 tensormap.replace", "@%p26 tensormap.replace")
    x, space = torch.zeros(10, 24), torch.zeros(128, dtype=torch.uint8)
    body = expect(256) + tensor_load(2, 0, (16, 4)) + ";" + wait()
    run(by_lane_1.replace("@%p28 tensormap.cp", "bar.warp.sync -1; @%p28 tensormap.cp") + body, x, space)
    with pytest.raises(Hazard, match=r"reads shared memory .* after a store by thread 1 "):
        run(by_lane_1 + body, x, space)
