"""cp.async: copies from global to shared memory by an agent of each thread (PTX ISA 9.7.9.25.3, non-bulk)."""

from __future__ import annotations

import numpy as np

from ..decode import Decoder, instruction
from ..hazards import CP_ASYNC
from ..machine import Async
from . import bulk, mbarrier
from .async_groups import groups
from .memory import skip_hints


def finish(m, until: np.ndarray):
    """The active lanes wait for what they issued up to these steps."""
    lanes = m.lanes
    if m.pending:
        limit = np.zeros(m.n, np.int64)
        limit[lanes] = until
        m.complete(lambda op: op.kind == "cp.async" and bool((limit[op.owner] >= op.step).any()))
    if m.checker is not None:
        column = m.checker.cp_async_column + m.thread_of[lanes]
        m.checker.agent_done(lanes, column, until, async_proxy=False)


@instruction("cp")
def cp(d: Decoder):
    if not d.flag("async"):
        d.fail("expected cp.async or cp.reduce.async")
    if "bulk" in d.left:
        return bulk.decode(d)
    if d.flag("commit_group"):
        return lambda m: groups(m, "cp.async").commit(m)
    if d.flag("wait_group"):
        pending = d.constant(0)
        return lambda m: finish(m, groups(m, "cp.async").done(m, pending))
    if d.flag("wait_all"):
        return lambda m: finish(m, np.full(len(m.lanes), m.step))
    if "mbarrier" in d.left:
        return mbarrier.async_arrive(d)
    if not d.choice("ca", "cg"):
        d.fail("expected .ca or .cg")
    if not d.choice("shared", "shared::cta") or not d.flag("global"):
        d.fail("expected .shared.global")
    skip_hints(d)
    size = d.constant(2)
    if size not in (4, 8, 16):
        d.fail(f"cp-size {size}: expected 4, 8 or 16")
    to, source = d.address(0), d.address(1)
    # The fourth operand is the number of bytes to read (the rest is zero), or a predicate that reads none.
    actual = ignore = None
    if d.has(3):
        operand = d.operand(3)
        if getattr(operand, "type", "") == "pred":
            ignore = d.get(3, "pred")
        else:
            actual = d.get(3, "u32")

    def step(m):
        lanes = m.lanes
        destination, origin = to(m)[lanes], source(m)[lanes]
        (pool, _, offset) = m.resolve("shared", destination, size, size)[0]
        taken = np.full(len(lanes), size, np.int64)
        if actual is not None:
            taken = np.broadcast_to(actual(m), m.n)[lanes].astype(np.int64)
            if (taken > size).any():
                m.fault_lane(f"src-size {int(taken.max())} is larger than cp-size {size}", int(taken.argmax()))
        elif ignore is not None:
            taken = np.where(np.broadcast_to(ignore(m), m.n)[lanes], 0, size)
        whole = np.flatnonzero(taken == size)
        outer = None
        parts = []
        if len(whole) == len(lanes):
            parts = m.resolve("global", origin, size, size)
        elif len(whole):
            mask = np.zeros(m.n, bool)
            mask[lanes[whole]] = True
            outer = m.enter(mask)
            parts = [
                (segment, whole if chosen is None else whole[chosen], at)
                for segment, chosen, at in m.resolve("global", origin[whole], size, size)
            ]
            m.leave(outer)
        ragged = np.flatnonzero((taken > 0) & (taken < size))
        pieces = []
        for i in ragged.tolist():
            segment = m.memory.find(int(origin[i]))
            if segment is None or int(origin[i]) + int(taken[i]) > segment.end:
                m.fault_lane(
                    f"cp.async reads {int(taken[i])} bytes at {int(origin[i]):#x}, out of bounds: "
                    f"{m.memory.nearest(int(origin[i]))}",
                    i,
                )
            pieces.append((i, segment, int(origin[i]) - segment.base, int(taken[i])))
        if m.checker is not None:
            column = m.checker.cp_async_column + m.thread_of[lanes]
            for segment, chosen, at in parts:
                who = slice(None) if chosen is None else chosen
                m.checker.async_read(segment, lanes[who], at, size, column[who], CP_ASYNC)
            for i, segment, at, count in pieces:
                one = slice(i, i + 1)
                m.checker.async_read(segment, lanes[one], np.array([at]), count, column[one], CP_ASYNC)
            m.checker.async_write(pool, lanes, offset, size, column, CP_ASYNC)
        m.bank_conflicts(destination, size)

        def run():
            if len(parts) == 1 and parts[0][1] is None:
                pool.store(offset, parts[0][0].load(parts[0][2], size // 4, 4), 4)
                return
            values = np.zeros((size // 4, len(lanes)), np.uint32)
            for segment, chosen, at in parts:
                values[:, slice(None) if chosen is None else chosen] = segment.load(at, size // 4, 4)
            pool.store(offset, values, 4)
            for i, segment, at, count in pieces:
                start = int(offset[i])
                pool.data[start : start + count] = segment.data[at : at + count]

        m.defer(Async(run, "cp.async", m.mask, m.step))

    return step
