"""cp.async.bulk and cp.reduce.async.bulk (PTX ISA 9.7.9.25.4 linear, 9.7.9.27.1 tensor, 9.7.9.27.2 groups): TMA.

What loads shared memory signals an mbarrier by the bytes it brings. What stores or reduces to global memory belongs to
the bulk groups of its thread and has two ends: its source has been read (wait_group.read), and it is written
(wait_group). Either is done by an agent, late under a seed: then the source is read, or the destination written.

The checker knows loads as the agent of the mbarrier, stores as two agents of the thread, one for each end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode import DTYPES, UINT, Decoder
from ..errors import Fault, UnsupportedInstruction
from ..machine import Async
from ..ptx import TYPE_BYTES, Mem, Vec
from ..spaces import Segment
from ..tensormap import FLIP, TensorMap, TensorMapError
from ..tensormap import decode as decode_map
from . import mbarrier, tensormap
from .async_groups import groups
from .memory import flushed, operation

_COMPLETE = "mbarrier::complete_tx::bytes"
_RANKS = {f"{n}d": n for n in range(1, 6)}
_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
# Destination global: operation -> element types (9.7.9.25.4.2, and the narrower table of 9.7.9.27.1.3).
_LINEAR = {"add": {"u32", "s32", "u64", "f32", "f64", "f16", "bf16"}, "inc": {"u32"}, "dec": {"u32"}}
_LINEAR |= {name: {"u32", "s32", "u64", "s64", "f16", "bf16"} for name in ("min", "max")}
_LINEAR |= {name: {"b32", "b64", "u32", "s32", "u64", "s64"} for name in ("and", "or", "xor")}
_TENSOR = _LINEAR | {"add": _LINEAR["add"] - {"f64"}}


def decode(d: Decoder) -> Callable:
    """What follows cp.async or cp.reduce.async."""
    reduces = d.flag("reduce")
    if not d.flag("bulk"):
        d.fail("expected .bulk")
    if d.flag("commit_group"):
        return lambda m: groups(m, "bulk").commit(m)
    if d.flag("wait_group"):
        reads, pending = d.flag("read"), d.constant(0)
        return lambda m: _wait(m, groups(m, "bulk").done(m, pending), reads)
    if d.flag("prefetch"):
        return _prefetch(d)
    tensor = d.flag("tensor")
    spaces = [word for word in d.left if word in ("global", "shared::cta", "shared::cluster")]
    for word in spaces:
        d.flag(word)
    d.flag("L2::cache_hint")
    loads = spaces in (["shared::cluster", "global"], ["shared::cta", "global"])
    if not loads and spaces != ["global", "shared::cta"]:
        d.fail("expected .shared::cta.global, .shared::cluster.global or .global.shared::cta")
    completion = _COMPLETE if loads else "bulk_group"
    if not d.flag(completion):
        d.fail(f"expected .{completion}")
    if loads and reduces:
        d.fail("a reduction in shared memory needs a cluster of several blocks")
    if tensor:
        rank = _RANKS.get(d.choice(*_RANKS))
        d.flag("tile")
        return _tensor_load(d, rank) if loads else _tensor_store(d, rank, reduces)
    return _linear_load(d) if loads else _linear_store(d, reduces)


def _prefetch(d: Decoder) -> Callable:
    """A hint to the cache (9.7.9.25.4.3, 9.7.9.27.1.4)."""
    if not (d.flag("L2") and d.flag("global")):
        d.fail("expected .L2.global")
    d.flag("L2::cache_hint")
    if d.flag("tensor"):
        d.choice(*_RANKS)
        d.flag("tile")
    return lambda m: None


# -- groups


def _agents(m, lane: int) -> tuple[int, int]:
    """The checker's columns of a thread's stores: of their reading, of their writing."""
    columns = _columns(m)
    if columns[0, lane] < 0:
        block, thread = int(m.block_of[lane]), int(m.thread_of[lane])
        for k, verb in enumerate(("reading", "writing")):
            columns[k, lane] = m.checker.new_column(block, f"TMA {verb} for thread {thread}")
    return int(columns[0, lane]), int(columns[1, lane])


def _columns(m) -> np.ndarray:
    if "bulk columns" not in m.state:
        m.state["bulk columns"] = np.full((2, m.n), -1, np.int64)
    return m.state["bulk columns"]


def _wait(m, until: np.ndarray, reads: bool):
    """The active lanes wait for what they issued up to these steps: to be read, or to be done."""
    lanes = m.lanes
    if m.pending:
        limit = dict(zip(lanes.tolist(), until.tolist(), strict=True))
        kinds = ("bulk.read",) if reads else ("bulk.read", "bulk.write")
        m.complete(lambda op: op.kind in kinds and limit.get(op.key, 0) >= op.step)
    if m.checker is not None and "bulk columns" in m.state:
        columns = _columns(m)
        issued = columns[0, lanes] >= 0
        for k in (0,) if reads else (0, 1):
            m.checker.agent_done(lanes[issued], columns[k, lanes[issued]], until[issued])


def _watch_exits(m):
    """Registers, once, the check that no block ends while a copy may still use its shared memory."""
    if m.checker is None or "bulk exits" in m.state:
        return
    m.state["bulk exits"] = stored = np.zeros(m.n, np.int64)  # each lane's newest store

    def ended(m, mask):
        for block in np.unique(m.block_of[mask]).tolist():
            of_block = slice(block * m.warps * 32, (block + 1) * m.warps * 32)
            if m.live[of_block].any():
                continue
            for lane in np.flatnonzero(stored[of_block]) + of_block.start:
                if m.checker.known[lane, _agents(m, int(lane))[0]] < stored[lane]:
                    words = "the block ends while a bulk store may still read its shared memory: no wait_group since"
                    raise m.located(Fault(words), int(lane))
            for b in mbarrier.live(m).values():
                if b.block != block or not b.transacted:
                    continue
                if m.checker.known[of_block, mbarrier.column(m, b)].max() < b.transacted:
                    words = f"the block ends, but no thread has waited for the copies that signal {b.name}"
                    raise m.located(Fault(words), of_block.start)

    m.exit_hooks.append(ended)


# -- one thread at a time


def _each_lane(m):
    """The active lanes one by one, each as the only active one."""
    for lane in m.lanes.tolist():
        mask = np.zeros(m.n, bool)
        mask[lane] = True
        outer = m.enter(mask)
        yield lane
        m.leave(outer)


def _value(source: Callable, m, lane: int) -> int:
    return int(np.broadcast_to(source(m), m.n)[lane])


def _place(m, space: str, address: int, size: int, align: int) -> tuple:
    """(pool, offset) of `size` bytes that the one active lane names."""
    pool, _, offset = m.resolve(space, np.array([address], np.uint64), size, align)[0]
    return pool, int(offset[0])


def _load(m, lane: int, b: mbarrier.MBarrier, offset: int, size: int, read: Callable[[int], None], run: Callable):
    """Issues what brings `size` bytes to this offset of shared memory and signals `b`; `read(column)` tells the checker
    of its source."""
    _watch_exits(m)
    clock, by, issued = None, (0, 0), m.step
    b.under_way += size
    b.transacted = issued
    if m.checker is not None:
        agent = mbarrier.column(m, b)
        read(agent)
        m.checker.async_write(m.shared, np.array([lane]), np.array([offset]), size, agent)
        clock, by = m.checker.agent_clock(agent, issued), (agent, issued)

    def arrived():
        run()
        b.under_way -= size
        mbarrier.transact(m, b, size, lane, clock, by)

    m.defer(Async(mbarrier.later(m, lane, arrived), "bulk.load", m.mask, issued, lane))


def _store(m, lane: int, offset: int, size: int, write: Callable[[int], None], take: Callable, put: Callable):
    """Issues what takes `size` bytes from this offset of shared memory (`take() -> data`) and puts them (`put(data)`);
    `write(column)` tells the checker of its destination."""
    _watch_exits(m)
    if m.checker is not None:
        reading, writing = _agents(m, lane)
        m.state["bulk exits"][lane] = m.step
        m.checker.async_read(m.shared, np.array([lane]), np.array([offset]), size, reading)
        write(writing)
    taken: list[np.ndarray] = []

    def read():
        if not taken:
            taken.append(take())

    def written():
        read()
        put(taken[0])

    m.defer(Async(mbarrier.later(m, lane, read), "bulk.read", m.mask, m.step, lane))
    m.defer(Async(mbarrier.later(m, lane, written), "bulk.write", m.mask, m.step, lane))


def _reduction(d: Decoder, name: str, kind: str) -> Callable:
    """(destination, source) -> result. f32 flushes subnormal operands and results, f16 and bf16 keep them."""
    apply = operation(d, name, kind)
    if kind == "f32":
        return flushed(apply)
    return apply


# -- linear


def _multicast(d: Decoder, index: int) -> Callable | None:
    """The operand that names the blocks of the cluster, if there is one."""
    return d.get(index, "u16") if d.flag("multicast::cluster") else None


def _check_mask(m, mask: Callable | None, lane: int):
    if mask is not None and _value(mask, m, lane) != 1:
        raise UnsupportedInstruction(f"multicast to blocks {_value(mask, m, lane):#x}: a cluster has one block here")


def _check_size(m, size: int, lane: int):
    if size % 16:
        raise m.located(Fault(f"a bulk copy of {size} bytes: expected a multiple of 16"), lane)


def _linear_load(d: Decoder) -> Callable:
    """9.7.9.25.4.1, global to shared."""
    to, source, size, barrier = d.address(0), d.address(1), d.get(2, "u32"), d.address(3)
    blocks = _multicast(d, 4)

    def step(m):
        addresses = to(m), source(m), barrier(m)
        for lane in _each_lane(m):
            _check_mask(m, blocks, lane)
            count = _value(size, m, lane)
            _check_size(m, count, lane)
            ((place, lanes),) = mbarrier.places(m, "shared", addresses[2])
            b = mbarrier.find(m, place, lanes)
            if count:
                _, offset = _place(m, "shared", int(addresses[0][lane]), count, 16)
                segment, at = _place(m, "global", int(addresses[1][lane]), count, 16)
                _load_bytes(m, lane, b, offset, segment, at, count)

    return step


def _load_bytes(m, lane, b, offset, segment, at, count):
    def read(agent):
        m.checker.async_read(segment, np.array([lane]), np.array([at]), count, agent)

    def run():
        m.shared.data[offset : offset + count] = segment.data[at : at + count]

    _load(m, lane, b, offset, count, read, run)


def _linear_store(d: Decoder, reduces: bool) -> Callable:
    """9.7.9.25.4.1 shared to global, and 9.7.9.25.4.2."""
    apply, dtype = None, UINT[1]
    if reduces:
        name = d.choice(*_REDUCTIONS)
        noftz = d.flag("noftz")
        kind = d.type()
        if name is None or kind not in _LINEAR[name]:
            d.fail(f"no reduction .{name}.{kind} to global memory")
        if noftz != (name == "add" and kind in ("f16", "bf16")):
            d.fail(".add of .f16 and .bf16 needs .noftz, and nothing else takes it")
        apply, dtype = _reduction(d, name, kind), DTYPES[kind]
        if TYPE_BYTES[kind] != dtype.itemsize:
            d.fail(f"elements of type .{kind} are not supported")
    to, source, size = d.address(0), d.address(1), d.get(2, "u32")

    def step(m):
        addresses = to(m), source(m)
        for lane in _each_lane(m):
            count = _value(size, m, lane)
            _check_size(m, count, lane)
            if count:
                segment, at = _place(m, "global", int(addresses[0][lane]), count, 16)
                _, offset = _place(m, "shared", int(addresses[1][lane]), count, 16)
                _store_bytes(m, lane, segment, at, offset, count, apply, dtype)

    return step


def _store_bytes(m, lane, segment, at, offset, count, apply, dtype):
    def write(agent):
        tell = m.checker.async_write if apply is None else m.checker.async_reduce
        tell(segment, np.array([lane]), np.array([at]), count, agent)

    def take():
        return m.shared.data[offset : offset + count].view(dtype).copy()

    def put(data):
        target = segment.data[at : at + count].view(dtype)
        target[:] = data if apply is None else apply(target, data)

    _store(m, lane, offset, count, write, take, put)


# -- tensors


class _Tile:
    """The box of a tensor map at some coordinates."""

    def __init__(self, m, lane: int, address: int, coordinates: list[int]):
        pool, at = _place(m, "generic", address, 128, 64)
        if pool is m.shared or pool is m.local:
            raise m.located(Fault("a tensor map must lie in parameter, constant or global memory"), lane)
        if isinstance(pool, Segment) and m.checker is not None:
            tensormap.use(m, pool, at, lane)
        try:
            self.map: TensorMap = decode_map(pool.data[at : at + 128].tobytes())
        except TensorMapError as error:
            raise m.located(Fault(f"{error}; it was read from {pool.describe(at)}"), lane) from None
        self.coordinates = tuple(coordinates)
        self._understood(m, lane)
        self.segment = m.memory.find(self.map.address)
        if self.segment is None:
            words = f"a tensor map's global address {self.map.address:#x}: {m.memory.nearest(self.map.address)}"
            raise m.located(Fault(words), lane)
        self.start = self.map.address - self.segment.base
        self.parts = self.map.inside(self.coordinates)
        self.rows, _, self.row_bytes = self.map.rows(self.coordinates)
        if len(self.rows):
            end = self.start + int(self.rows.max()) + self.row_bytes
            if end > self.segment.data.size:
                raise m.located(
                    Fault(
                        f"a tensor map reaches {end - self.segment.data.size} bytes past the last byte of "
                        f"{self.segment.name} at coordinates {self.coordinates}: its sizes or strides are wrong"
                    ),
                    lane,
                )

    def _understood(self, m, lane: int):
        t = self.map
        if len(self.coordinates) != t.rank:
            words = f"a copy of {len(self.coordinates)} dimensions by a tensor map of rank {t.rank}"
            raise m.located(Fault(words), lane)
        if t.interleave or t.atom == FLIP:
            raise UnsupportedInstruction("tensor maps with interleaving or 8-byte flips are not modelled")
        if t.element in ("tf32", "tf32.ftz", "f32.ftz"):
            raise UnsupportedInstruction(f"tensor maps of {t.element} elements, which are rounded, are not modelled")
        if t.swizzle and t.counts[0] * t.element_bytes != t.swizzle:
            raise UnsupportedInstruction(
                f"a box {t.counts[0] * t.element_bytes} bytes wide with swizzle {t.swizzle}: the manual doesn't say "
                "how rows narrower than the swizzle lie"
            )

    def tell(self, m, how: Callable, lane: int, agent: int):
        """Tells the checker of the rows in global memory. Granules that a row covers in part count only where the row
        ends with the tensor: then the rest is padding, elsewhere somebody else may own it."""
        if self.parts is None:
            return
        size = 1 << m.checker.shift["global"]
        first = self.start + self.rows
        head = int(first[0]) % size
        to_edge = self.coordinates[0] + self.parts[0].stop == self.map.sizes[0]
        end = head + self.row_bytes
        end = -(-end // size) * size if to_edge else end // size * size
        begin = size if head else 0
        if end > begin:
            how(self.segment, np.full(len(first), lane), first - head + begin, end - begin, agent)

    def window(self, dtype) -> np.ndarray:
        return self.map.window(self.segment.data, self.start, self.coordinates, self.parts, dtype)


def _units(m, offset: int, size: int) -> np.ndarray:
    """Shared memory as units of 16 bytes."""
    return m.shared.views[8][offset // 8 : (offset + size) // 8].reshape(-1, 2)


def _coordinates(d: Decoder, index: int, rank: int) -> list[Callable]:
    operand = d.operand(index)
    if not (isinstance(operand, Mem) and len(operand.more) == 1 and isinstance(operand.more[0], Vec)):
        d.fail("expected [tensor map, {coordinates}]")
    items = operand.more[0].items
    if len(items) != rank:
        d.fail(f"{rank} coordinates expected, got {len(items)}")
    return [d.get(item, "s32") for item in items]


def _tensor_load(d: Decoder, rank: int) -> Callable:
    """9.7.9.27.1.2, global to shared."""
    to, source, coordinates, barrier = d.address(0), d.address(1), _coordinates(d, 1, rank), d.address(2)
    blocks = _multicast(d, 3)

    def step(m):
        addresses = to(m), source(m), barrier(m)
        for lane in _each_lane(m):
            _check_mask(m, blocks, lane)
            tile = _Tile(m, lane, int(addresses[1][lane]), [_value(c, m, lane) for c in coordinates])
            ((place, lanes),) = mbarrier.places(m, "shared", addresses[2])
            b = mbarrier.find(m, place, lanes)
            _, offset = _place(m, "shared", int(addresses[0][lane]), tile.map.bytes, 128)
            _load_tile(m, lane, b, offset, tile)

    return step


def _load_tile(m, lane, b, offset, tile):
    t, dtype = tile.map, UINT[tile.map.element_bytes]

    def read(agent):
        tile.tell(m, m.checker.async_read, lane, agent)

    def run():
        if t.fill_nan:
            # The manual speaks of a special NaN without giving its bits; this is a NaN in every format.
            box = np.full(t.bytes, 0xFF, np.uint8)
            box[1 :: min(t.element_bytes, 4)] = 0x7F
            box = box.view(dtype).reshape(t.counts[::-1])
        else:
            box = np.zeros(t.counts[::-1], dtype)
        if tile.parts is not None:
            box[tuple(tile.parts[::-1])] = tile.window(dtype)
        _units(m, offset, t.bytes)[t.shared_units(offset)] = box.reshape(-1).view(np.uint64).reshape(-1, 2)

    _load(m, lane, b, offset, t.bytes, read, run)


def _tensor_store(d: Decoder, rank: int, reduces: bool) -> Callable:
    """9.7.9.27.1.2 shared to global, and 9.7.9.27.1.3."""
    name = d.choice(*_REDUCTIONS) if reduces else None
    if reduces and name is None:
        d.fail("which reduction?")
    applies = {k: _reduction(d, name, k) for k in sorted(_TENSOR[name])} if reduces else {}
    to, coordinates, source = d.address(0), _coordinates(d, 0, rank), d.address(1)

    def step(m):
        addresses = to(m), source(m)
        for lane in _each_lane(m):
            at = [_value(c, m, lane) for c in coordinates]
            tile = _Tile(m, lane, int(addresses[0][lane]), at)
            _, offset = _place(m, "shared", int(addresses[1][lane]), tile.map.bytes, 128)
            apply = None
            if reduces:
                if min(at) < 0:  # the ISA doesn't say so; an H200 answers with an illegal instruction
                    raise m.located(Fault(f"a reduction at a negative coordinate: {tuple(at)}"), lane)
                apply = applies.get(tile.map.element)
                if apply is None:
                    raise m.located(Fault(f"no reduction .{name} of {tile.map.element} elements"), lane)
            _store_tile(m, lane, offset, tile, apply)

    return step


def _store_tile(m, lane, offset, tile, apply):
    t = tile.map
    dtype = UINT[t.element_bytes] if apply is None else DTYPES[t.element]

    def write(agent):
        tile.tell(m, m.checker.async_write if apply is None else m.checker.async_reduce, lane, agent)

    def take():
        return _units(m, offset, t.bytes)[t.shared_units(offset)].reshape(-1).view(dtype).reshape(t.counts[::-1])

    def put(box):
        if tile.parts is None:
            return
        inside, window = box[tuple(tile.parts[::-1])], tile.window(dtype)
        window[...] = inside if apply is None else apply(np.ascontiguousarray(window), np.ascontiguousarray(inside))

    _store(m, lane, offset, t.bytes, write, take, put)
