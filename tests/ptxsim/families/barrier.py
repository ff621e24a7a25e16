"""Barriers of a block and of a warp (PTX ISA 9.7.13.1-3): bar, barrier, bar.warp.sync, barrier.cluster; griddepcontrol
and setmaxnreg, which need all threads of a warp(group) as well."""

from __future__ import annotations

import numpy as np

from ..decode import STOP, Decoder, instruction
from ..errors import Fault
from ..hazards import Checker
from ..ptx import Imm

_REGISTERS = 65536  # of a multiprocessor


class _Named:
    """One of a block's sixteen barriers: who has arrived in its present phase, and how many it waits for."""

    __slots__ = ("arrived", "clock", "count", "parked", "values")

    def __init__(self, n: int):
        self.arrived = np.zeros(n, bool)
        self.parked: dict[int, np.ndarray] = {}  # instruction -> mask
        self.count = 0
        self.clock = None
        self.values = []  # of bar.red


def _barriers(m) -> dict[tuple[int, int], _Named]:
    if "barriers" not in m.state:
        m.state["barriers"] = {}
    return m.state["barriers"]


def _block_lanes(m) -> list[np.ndarray]:
    lanes = m.lanes
    if m.blocks == 1:
        return [lanes]
    blocks = m.block_of[lanes]
    edges = np.flatnonzero(np.diff(blocks)) + 1
    return np.split(lanes, edges)


def _all_at_once(m) -> bool:
    """The usual case, many blocks in one: all threads of each block that is here are, and none has a barrier open. Then
    nobody has to wait."""
    here = m.mask.reshape(m.blocks, -1)
    whole = here.all(1)
    if m.threads % 32 or _barriers(m) or (here.any(1) != whole).any() or (m.checker and m.checker.foreign):
        return False
    if m.checker is not None:
        m.checker.join_blocks(np.flatnonzero(whole))
    return True


@instruction("bar", "barrier", control=True)
def bar(d: Decoder):
    if d.flag("warp"):
        return _warp_sync(d)
    if d.flag("cluster"):
        return _cluster(d)
    aligned = d.flag("aligned") or d.ins.opcode == "bar"
    d.flag("cta")
    what = d.choice("sync", "arrive", "red")
    if what is None:
        d.fail("expected .sync, .arrive or .red")
    operands = list(d.ins.operands)
    reduce = put = source = None
    if what == "red":
        reduce = d.choice("popc", "and", "or")
        kind = d.type("u32", "pred")
        put = d.put(operands.pop(0))
        source = d.get(operands.pop(), "pred")
        if (reduce == "popc") != (kind == "u32"):
            d.fail("popc gives .u32, and/or give .pred")
    number = d.get(operands[0], "u32")
    threads = d.get(operands[1], "u32") if len(operands) > 1 else None
    if what == "arrive" and threads is None:
        d.fail("bar.arrive needs the number of threads")
    pc, following = d.ins.index, d.next

    def step(m):
        if aligned and not m.gather_warps():
            return STOP
        ids = number(m)
        if what == "sync" and threads is None and ids.ndim == 0 and ids <= 15 and _all_at_once(m):
            m.events += 1
            m.resume(m.mask, following)
            return STOP
        ids = np.broadcast_to(ids, m.n)
        counts = None if threads is None else np.broadcast_to(threads(m), m.n)
        mine = None if source is None else np.broadcast_to(source(m), m.n)
        for lanes in _block_lanes(m):
            _arrive(m, lanes, ids, counts, mine)
        return following if what == "arrive" else STOP

    def _arrive(m, lanes, ids, counts, mine):
        here = ids[lanes]
        first = int(here[0])
        if (here != first).any():
            for one in np.unique(here):
                _arrive(m, lanes[here == one], ids, counts, mine)
            return
        block = int(m.block_of[lanes[0]])
        if first > 15:
            raise m.located(Fault(f"barrier {first}: a block has the barriers 0 to 15"), int(lanes[0]))
        count = m.threads if counts is None else int(counts[lanes[0]])
        if counts is not None and (count % 32 or not 0 < count <= m.warps * 32 or (counts[lanes] != count).any()):
            raise m.located(
                Fault(
                    f"barrier {first} for {count} threads: expected a multiple of 32, one for all, at most the block's"
                ),
                int(lanes[0]),
            )
        barriers = _barriers(m)
        b = barriers.get((block, first))
        if b is None:
            b = barriers[block, first] = _Named(m.n)
        if b.arrived.any() and b.count != count:
            raise m.located(
                Fault(f"barrier {first} is waited for with {count} threads, but others gave {b.count}"), int(lanes[0])
            )
        if b.arrived[lanes].any():
            raise m.located(
                Fault(f"barrier {first}: threads arrive a second time before its phase is complete"), int(lanes[0])
            )
        b.count = count
        b.arrived[lanes] = True
        if m.checker is not None:
            b.clock = Checker.merge(b.clock, m.checker.snapshot(lanes))
        if what != "arrive":
            mask = np.zeros(m.n, bool)
            mask[lanes] = True
            b.parked[pc] = b.parked[pc] | mask if pc in b.parked else mask
            m.park(mask, pc)
        if mine is not None:
            b.values.append(mine[lanes])
        total = int(b.arrived.sum())
        if total > count:
            raise m.located(Fault(f"barrier {first} expects {count} threads, but {total} arrived"), int(lanes[0]))
        if total == count:
            _release(m, block, first, b)

    def _release(m, block, first, b):
        del _barriers(m)[block, first]
        waiting = np.zeros(m.n, bool)
        for mask in b.parked.values():
            waiting |= mask
        if m.checker is not None:
            full = int(waiting.sum()) == m.threads
            m.checker.acquire(np.flatnonzero(waiting), b.clock, gathered=True)
            if full:
                m.checker.last_full_barrier[block] = m.step
        for at, mask in b.parked.items():
            if at in m.program.deliver:
                m.program.deliver[at](m, mask, np.concatenate(b.values))
            m.unpark(mask, at, at + 1)

    def explain(m, lanes):
        block = int(m.block_of[lanes[0]])
        words = []
        for (owner, first), b in _barriers(m).items():
            if owner == block and pc in b.parked:
                missing = np.flatnonzero(m.exists & ~b.arrived & (m.block_of == block))
                some = sorted({int(t) // 32 for t in m.thread_of[missing]})
                words.append(
                    f"barrier {first} has {int(b.arrived.sum())} of {b.count} threads; not there: warps {some}"
                )
        return "; ".join(words)

    step.explain = explain
    if what == "red":

        def deliver(m, mask, values):
            value = {"popc": np.uint32(values.sum()), "and": np.bool_(values.all()), "or": np.bool_(values.any())}
            outer = m.enter(mask)
            put(m, value[reduce])
            m.leave(outer)

        step.deliver = deliver
    return step


def _warp_sync(d: Decoder):
    if not d.flag("sync"):
        d.fail("expected .sync")
    members = d.get(0, "u32")
    everyone = isinstance(d.operand(0), Imm) and d.constant(0) & 0xFFFFFFFF == 0xFFFFFFFF
    following = d.next

    def step(m):
        if not m.gather_warps(None if everyone else named(m, members(m))):
            return STOP
        if m.checker is not None:
            m.checker.warp_sync(m.mask)
        return following

    return step


def named(m, membermask) -> np.ndarray:
    """A membermask operand as a mask of lanes: those that the threads here, and those waiting here, name.

    Threads of a warp may form several sets with a mask each. Every thread must name itself, and all of a set must give
    the same mask (PTX ISA 9.7.13.2).
    """
    here = m.mask | m.collecting[m.pc] if m.pc in m.collecting else m.mask
    bits = np.broadcast_to(membermask, m.n).astype(np.uint32, copy=False).reshape(-1, 32)
    active = here.reshape(-1, 32)
    # Lanes that aren't here have no say.
    given = np.where(active, bits, 0).max(1)
    position = np.arange(32, dtype=np.uint32)
    if (active & (bits != given[:, None])).any():
        names = (bits[:, :, None] >> position & 1).astype(bool) & active[:, :, None]
        if (names & active[:, None, :] & (bits[:, :, None] != bits[:, None, :])).any():
            raise Fault("threads that name each other in a member mask give different masks")
        out = names.any(1).reshape(-1)
        unnamed = here & ~(bits >> position & 1).astype(bool).reshape(-1)
    else:
        out = (given[:, None] >> position & 1).astype(bool).reshape(-1)
        unnamed = here & ~out
    if unnamed.any():
        lane = int(np.flatnonzero(unnamed)[0])
        raise m.located(Fault("a thread executes a collective whose member mask doesn't name it"), lane)
    return out


def _cluster(d: Decoder):
    """A cluster has one block here: its barrier is one of all the block's threads, in two halves."""
    what = d.choice("arrive", "wait")
    d.choice("release", "relaxed", "acquire")
    d.flag("aligned")
    if what is None:
        d.fail("expected .arrive or .wait")
    pc, following = d.ins.index, d.next

    def arrive(m):
        state = m.state.setdefault("cluster", {})
        for lanes in _block_lanes(m):
            block = int(m.block_of[lanes[0]])
            b = state.setdefault(block, {"arrived": np.zeros(m.n, bool), "open": np.zeros(m.n, bool), "clock": None})
            if b["arrived"][lanes].any():
                raise m.located(Fault("barrier.cluster.arrive twice without a wait"), int(lanes[0]))
            b["arrived"][lanes] = True
            if m.checker is not None:
                b["clock"] = Checker.merge(b["clock"], m.checker.snapshot(lanes))
            if int(b["arrived"].sum()) == m.threads:
                b["open"] = b["arrived"]
                b["arrived"] = np.zeros(m.n, bool)
                b["opened"], b["clock"] = b["clock"], None
                for at in [p for p in m.parked if p in m.state.get("cluster_waits", ())]:
                    here = m.parked[at] & b["open"]
                    if here.any():
                        _pass(m, b, np.flatnonzero(here))
                        m.unpark(here, at, at + 1)
        return following

    def _pass(m, b, lanes):
        b["open"] = b["open"].copy()
        b["open"][lanes] = False
        if m.checker is not None:
            m.checker.acquire(lanes, b["opened"])

    def wait(m):
        m.state.setdefault("cluster_waits", set()).add(pc)
        go = np.zeros(m.n, bool)
        for lanes in _block_lanes(m):
            b = m.state.get("cluster", {}).get(int(m.block_of[lanes[0]]))
            if b is None:
                raise m.located(Fault("barrier.cluster.wait without an arrive"), int(lanes[0]))
            ready = lanes[b["open"][lanes]]
            if len(ready):
                _pass(m, b, ready)
                go[ready] = True
        stay = m.mask & ~go
        if stay.any():
            m.park(stay, pc)
            if not go.any():
                return STOP
            m.enter(go)
        return following

    return arrive if what == "arrive" else wait


@instruction("griddepcontrol")
def griddepcontrol(d: Decoder):
    """Launches here run one after the other, so what a dependent launch would wait for has always happened."""
    if not d.choice("launch_dependents", "wait"):
        d.fail("expected .launch_dependents or .wait")
    return lambda m: None


@instruction("setmaxnreg", control=True)
def setmaxnreg(d: Decoder):
    """PTX ISA 9.7.19.5: all threads of a warpgroup, a multiple of 8 in 24..256. Registers are unlimited here; what is
    kept is each warp's share of the register file: .inc waits until others have given enough back."""
    change = d.choice("inc", "dec")
    if change is None or not (d.flag("sync") and d.flag("aligned")):
        d.fail("expected .inc or .dec, .sync.aligned")
    d.type("u32")
    count = d.constant(0)
    if count % 8 or not 24 <= count <= 256:
        d.fail(f"{count} registers: expected a multiple of 8 from 24 to 256")
    pc, following = d.ins.index, d.next

    def step(m):
        if not m.gather_warps():
            return STOP
        warps = m.whole_warps
        if "registers" not in m.state:
            each = min(_REGISTERS // (m.warps * 32) // 8 * 8, 256)
            m.state["registers"] = np.full((m.blocks, m.warps), each)
        held = m.state["registers"]
        if change == "dec":
            held[warps // m.warps, warps % m.warps] = count
            for waiting, mask in m.state.pop("register waits", {}).items():
                m.unpark(mask, waiting, waiting)
            return following
        go = np.zeros(m.n // 32, bool)
        for w in warps.tolist():
            mine = held[w // m.warps]
            if (int(mine.sum()) - int(mine[w % m.warps]) + count) * 32 <= _REGISTERS:
                mine[w % m.warps] = count
                go[w] = True
        stay = m.mask & ~np.repeat(go, 32)
        if not stay.any():
            return following
        m.park(stay, pc)
        waits = m.state.setdefault("register waits", {})
        waits[pc] = waits[pc] | stay if pc in waits else stay
        if not go.any():
            return STOP
        m.enter(m.mask & ~stay)
        return following

    def explain(m, lanes):
        total = 32 * int(m.state["registers"][m.block_of[lanes[0]]].sum())
        return f"the block's warps hold {total} registers of {_REGISTERS}"

    step.explain = explain
    return step
