"""mbarrier objects (PTX ISA 9.7.13.15) and what signals them: threads, cp.async and the bulk copies.

An object lives in 8 bytes of shared memory. Those hold an opaque word, and from its first use on the checker takes them
for occupied, so that a plain access to them is noticed; the counts are kept here, by the bytes' offset in the machine's
shared memory. Before its first use an object is no more than what its initialisation stored: Triton gives the memory
of objects that it initialises in vain to others, without the mbarrier.inval that the manual asks for.

For the hazard checker the arrivals of a phase gather what their threads know, completed transactions add the work of
the mbarrier's own agent (`column`), and a wait for the phase acquires all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from ..decode import STOP, Decoder, instruction
from ..errors import Fault, Hazard
from ..hazards import Checker
from ..machine import Async
from ..ptx import Sink

MAX_COUNT = (1 << 20) - 1  # of arrivals, and of transactions in either direction (9.7.13.15.2)
_STATE_MAGIC = 0xB5
_GIVES_UP = 0.15  # how often, under a seed, try_wait returns false after its time limit


class MBarrier:
    """One object: the counts of 9.7.13.15.2, and who waits."""

    def __init__(self, m, offset: int, count: int, lane: int):
        self.offset = offset
        self.block, self.address = divmod(offset, m.shared.stride)
        self.count = self.pending = count  # arrivals expected in each phase; those still to come in this one
        self.phase = self.tx = 0
        self.under_way = 0  # bytes of copies that were issued with it and aren't complete
        self.fresh = True  # nobody has used it
        self.seen = True  # whether a thread has seen that the phase before is complete
        self.waiting: dict[int, tuple[np.ndarray, Callable]] = {}  # instruction -> parked threads, what releases them
        self.clock = self.done = None  # what arrivals have gathered in this phase; what the completed ones hold
        self.last: list[tuple[int, int]] = []  # (column, step) of what completed the newest phases, newest first
        self.untracked = False  # whether something relaxed has used it, which leaves no trace in the clocks
        self.born = (int(m.thread_of[lane]), m.step)
        self.used = np.zeros(m.warps * 32, np.int32)  # by each thread of the block: the step of its last use
        self.transacted = 0  # the step of the newest copy that signals it

    @property
    def name(self) -> str:
        return f"the mbarrier at shared {self.address:#x}"

    def describe(self) -> str:
        """mbarrier at shared 0x400: phase 3, 1 of 2 arrivals pending, 16384 bytes still expected"""
        words = f"mbarrier at shared {self.address:#x}: phase {self.phase}"
        words += f", {self.pending} of {self.count} arrivals pending"
        if self.tx > 0:
            words += f", {self.tx} bytes still expected"
        elif self.tx < 0:
            words += f", {-self.tx} bytes more copied than expected"
        return words


def live(m) -> dict[int, MBarrier]:
    """The machine's mbarriers by offset in shared memory."""
    return m.state.setdefault("mbarriers", {})


def _columns(m, offset: int) -> tuple[int, int]:
    """The checker's columns of the mbarrier there: its bytes' (which nobody ever knows), its transactions'."""
    kept = m.state.setdefault("mbarrier columns", {})
    if offset not in kept:
        block, address = divmod(offset, m.shared.stride)
        names = (f"the mbarrier at shared {address:#x}", f"TMA onto the mbarrier at shared {address:#x}")
        kept[offset] = tuple(m.checker.new_column(block, name) for name in names)
    return kept[offset]


def column(m, b: MBarrier) -> int:
    """The checker's column of the copies that signal this mbarrier."""
    return _columns(m, b.offset)[1]


def places(m, space: str, address: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """The active lanes by the mbarrier they name: [(offset in shared memory, lanes)]."""
    lanes = m.lanes
    parts = m.resolve(space, address if m.full else address[lanes], 8, 8)
    if len(parts) != 1 or parts[0][0] is not m.shared:
        m.fault_lane("an mbarrier's address must lie in the block's shared memory", 0)
    offset = parts[0][2]
    if (offset == offset[0]).all():
        return [(int(offset[0]), lanes)]
    return [(int(o), lanes[offset == o]) for o in np.unique(offset)]


def find(m, offset: int, lanes: np.ndarray) -> MBarrier:
    """The mbarrier that these lanes use now.

    Raises:
        Fault: there is none, or a plain store has overwritten it.
        Hazard: nothing orders its mbarrier.init before.
    """
    b = live(m).get(offset)
    lane = int(lanes[0])
    if b is None:
        address = offset % m.shared.stride
        raise m.located(Fault(f"{m.instruction.name}: no mbarrier was initialised at shared {address:#x}"), lane)
    if m.shared.views[8][offset // 8] != _word(offset):
        raise m.located(Fault(f"{b.name} was overwritten by something that is no mbarrier instruction"), lane)
    if m.checker is not None:
        by, step = b.born
        late = (m.checker.known[lanes, by] < step) & (m.thread_of[lanes] != by)
        if late.any():
            raise m.located(
                Hazard(f"uses {b.name} while nothing orders it after its mbarrier.init by thread {by} (step {step})"),
                int(lanes[late][0]),
            )
        b.used[m.thread_of[lanes]] = m.step
        if b.fresh:
            m.checker.occupy(m.shared, offset, 8, _columns(m, offset)[0])
    b.fresh = False
    return b


def _word(offset: int) -> np.uint64:
    return np.uint64(0xB5A3_3A5B << 32 | offset)


# -- the operations of 9.7.13.15.5 to 9.7.13.15.7


def _fault(m, b: MBarrier, lane: int, words: str):
    return m.located(Fault(f"{words}; {b.describe()}"), lane)


def expect(m, b: MBarrier, count: int, lane: int):
    """expect-tx."""
    b.tx += count
    if b.tx > MAX_COUNT:
        raise _fault(m, b, lane, f"the tx-count grows beyond 2^20 - 1 by expecting {count} bytes")


def transact(m, b: MBarrier, count: int, lane: int, clock: SimpleNamespace | None, by: tuple[int, int]):
    """complete-tx; `clock` is what a wait will know by it, `by` the column and step of whoever performs it."""
    b.tx -= count
    m.events += 1
    if b.tx < -MAX_COUNT:
        raise _fault(m, b, lane, f"the tx-count falls below -(2^20 - 1) by the completion of {count} bytes")
    if clock is not None:
        b.clock = Checker.merge(b.clock, clock)
    _turn(m, b, lane, by)


def arrive(m, b: MBarrier, count: int, lane: int, by: tuple[int, int], *, complete: bool = True):
    """arrive-on."""
    m.events += 1
    if count > b.pending:
        raise _fault(m, b, lane, f"{count} arrivals on {b.name}, which expects only {b.pending} more in this phase")
    if not b.seen:
        raise _fault(
            m, b, lane, f"arrival in phase {b.phase}, but no thread has seen phase {b.phase - 1} complete by a wait"
        )
    b.pending -= count
    if not complete and not b.pending:
        raise _fault(m, b, lane, "an arrival with .noComplete completes the phase")
    _turn(m, b, lane, by)


def _turn(m, b: MBarrier, lane: int, by: tuple[int, int]):
    """Phase completion (9.7.13.15.6)."""
    if b.pending or b.tx > 0:
        return
    if b.tx < 0:
        raise _fault(m, b, lane, "all have arrived, but more bytes were copied than expected in this phase")
    if b.under_way:
        raise _fault(
            m,
            b,
            lane,
            f"phase {b.phase} is complete although {b.under_way} bytes of copies that signal it are still under way: "
            "fewer were expected",
        )
    b.phase += 1
    b.pending = b.count
    b.seen = False
    b.done, b.clock = Checker.merge(b.done, b.clock), None
    b.last = [by, *b.last[:1]]
    waiting, b.waiting = b.waiting, {}
    for pc, (mask, release) in waiting.items():
        b.seen = True
        release(m, b, np.flatnonzero(mask))
        m.unpark(mask, pc, pc + 1)


def _state(b: MBarrier, pending: np.ndarray | int) -> np.ndarray:
    """The opaque word that mbarrier.arrive returns: object, phase, and the arrivals pending before."""
    fixed = _STATE_MAGIC << 56 | (b.address >> 3 & 0xFFFF) << 40 | (b.phase & 0xFFFFF) << 20
    return np.uint64(fixed) | np.asarray(pending, np.uint64)


# -- instructions


def _space(d: Decoder) -> str:
    """shared::cluster is the block's own shared memory: a cluster has one block here."""
    return "shared" if d.choice("shared", "shared::cta", "shared::cluster") else "generic"


def _semantics(d: Decoder, *allowed: str) -> str:
    semantics, scope = d.choice(*allowed), d.choice("cta", "cluster")
    if (semantics is None) != (scope is None):
        d.fail("semantics and scope must be given together")
    return semantics or allowed[0]


@instruction("mbarrier", control=True)
def mbarrier(d: Decoder):
    what = d.ins.modifiers[0] if d.ins.modifiers else ""
    decoders = {"init": _init, "inval": _inval, "expect_tx": _expect_tx, "complete_tx": _complete_tx, "arrive": _arrive}
    decoders |= {"arrive_drop": _arrive, "test_wait": _wait, "try_wait": _wait, "pending_count": _pending_count}
    if what not in decoders:
        d.fail(f"expected one of {', '.join('.' + name for name in decoders)}")
    d.flag(what)
    step = decoders[what](d, what)
    d.type("b64")
    return step


def _init(d: Decoder, what: str):
    space = _space(d)
    address, count = d.address(0), d.get(1, "u32")
    following = d.next

    def step(m):
        counts = np.broadcast_to(count(m), m.n)
        for offset, lanes in places(m, space, address(m)):
            lane, n = int(lanes[0]), int(counts[lanes[0]])
            before = live(m).get(offset)
            if len(lanes) > 1 or (before is not None and not before.fresh):
                name = f"the mbarrier at shared {offset % m.shared.stride:#x}"
                words = "is live: mbarrier.inval must come first" if len(lanes) == 1 else "by several threads at once"
                raise m.located(Fault(f"mbarrier.init: {name} {words}"), lane)
            if not 1 <= n <= MAX_COUNT:
                raise m.located(Fault(f"mbarrier.init with a count of {n}: expected 1 to 2^20 - 1"), lane)
            live(m)[offset] = MBarrier(m, offset, n, lane)
            if m.checker is not None:
                m.checker.write(m.shared, lanes, np.array([offset]), 8)
                m.checker.occupy(m.shared, offset, 8, int(m.thread_of[lane]))
            m.shared.views[8][offset // 8] = _word(offset)
        return following

    return step


def _inval(d: Decoder, what: str):
    space = _space(d)
    address = d.address(0)
    following = d.next

    def step(m):
        for offset, lanes in places(m, space, address(m)):
            lane = int(lanes[0])
            b = find(m, offset, lanes)
            if len(lanes) > 1:
                raise m.located(Fault(f"mbarrier.inval: {b.name} by several threads at once"), lane)
            if b.waiting or b.under_way:
                why = "threads wait for it" if b.waiting else f"{b.under_way} bytes of copies are under way"
                raise _fault(m, b, lane, f"mbarrier.inval while {why}")
            if m.checker is not None:
                known = m.checker.known[lane]
                late = (known[: len(b.used)] < b.used) & (np.arange(len(b.used)) != m.thread_of[lane])
                if late.any():
                    thread = int(np.flatnonzero(late)[0])
                    raise m.located(
                        Hazard(
                            f"mbarrier.inval of {b.name} while nothing orders it after its use by thread {thread} "
                            f"(step {b.used[thread]})"
                        ),
                        lane,
                    )
                if known[column(m, b)] < b.transacted:
                    words = f"mbarrier.inval of {b.name} by a thread that hasn't waited for the copies that signal it"
                    raise m.located(Hazard(words), lane)
                m.checker.vacate(m.shared, offset, 8, lane)
            m.shared.data[offset : offset + 8] = 0xAB
            del live(m)[offset]
        return following

    return step


def _expect_tx(d: Decoder, what: str):
    space = _space(d)
    _semantics(d, "relaxed")
    address, count = d.address(0), d.get(1, "u32")
    following = d.next

    def step(m):
        counts = np.broadcast_to(count(m), m.n)
        for offset, lanes in places(m, space, address(m)):
            b = find(m, offset, lanes)
            for lane in lanes.tolist():
                expect(m, b, int(counts[lane]), lane)
        return following

    return step


def _complete_tx(d: Decoder, what: str):
    space = _space(d)
    _semantics(d, "relaxed")
    address, count = d.address(0), d.get(1, "u32")
    following = d.next

    def step(m):
        counts = np.broadcast_to(count(m), m.n)
        for offset, lanes in places(m, space, address(m)):
            b = find(m, offset, lanes)
            for lane in lanes.tolist():
                b.untracked = True
                transact(m, b, int(counts[lane]), lane, None, (int(m.thread_of[lane]), m.step))
        return following

    return step


def _arrive(d: Decoder, what: str):
    drops = what == "arrive_drop"
    expects, complete = d.flag("expect_tx"), not d.flag("noComplete")
    cluster = "shared::cluster" in d.left
    space = _space(d)
    releases = _semantics(d, "release", "relaxed") == "release"
    state = None if isinstance(d.operand(0), Sink) else d.put_lanes(0)
    if state and cluster:
        d.fail("an mbarrier of .shared::cluster returns no state: expected _")
    address = d.address(1)
    number = d.get(2, "u32") if d.has(2) else None
    if number is None and (expects or not complete):
        d.fail("the third operand is missing")
    following = d.next

    def step(m):
        numbers = None if number is None else np.broadcast_to(number(m), m.n)
        states = np.zeros(m.n, np.uint64)
        for offset, lanes in places(m, space, address(m)):
            b = find(m, offset, lanes)
            counts = np.ones(len(lanes), np.int64) if numbers is None or expects else numbers[lanes].astype(np.int64)
            if not ((counts >= 1) & (counts <= MAX_COUNT)).all():
                bad = int(np.flatnonzero((counts < 1) | (counts > MAX_COUNT))[0])
                raise _fault(m, b, int(lanes[bad]), f"arrival with a count of {counts[bad]}: expected 1 to 2^20 - 1")
            total = int(counts.sum())
            if total <= b.pending and not expects:
                together = [(lanes, counts, total)]
            else:
                together = [(lanes[i : i + 1], counts[i : i + 1], int(counts[i])) for i in range(len(lanes))]
            for some, each, all_of_them in together:
                first, last = int(some[0]), int(some[-1])
                states[some] = _state(b, b.pending - (np.cumsum(each) - each))
                if expects:
                    expect(m, b, int(numbers[first]), first)
                if drops:
                    b.count -= all_of_them
                if not releases:
                    b.untracked = True
                elif m.checker is not None:
                    b.clock = Checker.merge(b.clock, m.checker.snapshot(some))
                arrive(m, b, all_of_them, last, (int(m.thread_of[last]), m.step), complete=complete)
        if state:
            state(m, states[m.lanes])
        return following

    return step


def _pending_count(d: Decoder, what: str):
    put, state = d.put(0), d.get(1, "b64")
    following = d.next

    def step(m):
        word = np.broadcast_to(state(m), m.n)
        if (word[m.lanes] >> np.uint64(56) != _STATE_MAGIC).any():
            raise Fault("mbarrier.pending_count of a word that no mbarrier.arrive returned")
        put(m, (word & np.uint64(0xFFFFF)).astype(np.uint32))
        return following

    return step


def _wait(d: Decoder, what: str):
    """test_wait looks; try_wait suspends the thread until the phase is complete or, under a seed, until it gives up."""
    parity, space = d.flag("parity"), _space(d)
    acquires = _semantics(d, "acquire", "relaxed") == "acquire"
    tries = what == "try_wait"
    put, address = d.put(0), d.address(1)
    wanted = d.get(2, "u32" if parity else "b64")
    if d.has(3):
        d.get(3, "u32")  # a time limit
        if not tries:
            d.fail("only try_wait takes a time limit")
    pc, following = d.ins.index, d.next

    def step(m):
        value = np.broadcast_to(wanted(m), m.n)
        over = np.zeros(m.n, bool)
        parked = np.zeros(m.n, bool)
        for offset, lanes in places(m, space, address(m)):
            b = find(m, offset, lanes)
            over_here = (_over_parity if parity else _over_state)(m, b, lanes, value[lanes])
            completed = lanes[over_here]
            if len(completed):
                over[completed] = True
                b.seen = True
                learn(m, b, completed)
            rest = lanes[~over_here]
            if tries and len(rest):
                if m.random is not None:
                    gives_up = m.random.random(m.n // 32) < _GIVES_UP
                    rest = rest[~gives_up[m.warp_of[rest]]]
                if len(rest):
                    mask = np.zeros(m.n, bool)
                    mask[rest] = True
                    parked |= mask
                    b.waiting[pc] = (b.waiting[pc][0] | mask if pc in b.waiting else mask, release)
        if not parked.any():
            put(m, over)
            return following
        m.park(parked, pc)
        go = m.mask & ~parked
        if not go.any():
            return STOP
        m.enter(go)
        put(m, over)
        return following

    def learn(m, b, lanes):
        if m.checker is None:
            return
        if acquires:
            m.checker.acquire(lanes, b.done)
        else:
            b.untracked = True

    def release(m, b, lanes):
        learn(m, b, lanes)
        mask = np.zeros(m.n, bool)
        mask[lanes] = True
        outer = m.enter(mask)
        put(m, mask)
        m.leave(outer)

    def explain(m, lanes):
        block = int(m.block_of[lanes[0]])
        return "; ".join(b.describe() for b in live(m).values() if b.block == block and pc in b.waiting)

    step.explain = explain
    return step


def _over_parity(m, b: MBarrier, lanes: np.ndarray, parity: np.ndarray) -> np.ndarray:
    # Valid are 0 and 1. Triton's warp specialisation passes a bit extended by its sign: the lowest bit is what counts.
    parity = np.where(parity == 0xFFFFFFFF, np.uint32(1), parity)
    if (parity > 1).any():
        bad = int(np.flatnonzero(parity > 1)[0])
        raise _fault(m, b, int(lanes[bad]), f"a wait for the phase parity {parity[bad]}: expected 0 or 1")
    over = parity != b.phase & 1
    if m.checker is None or b.untracked or not b.phase:
        return over
    # The parity means the phase before or the present one. Which of them these are, a thread knows by what it has
    # synchronised with. One that can't know that the phase before is complete may as well mean an older phase of the
    # same parity, and what it gets depends on who was faster.
    unaware = _unaware(m, b, lanes, 0)
    if unaware.any():
        lost = unaware & (~over | _unaware(m, b, lanes, 1))
        if lost.any():
            bad = int(np.flatnonzero(lost)[0])
            raise m.located(
                Hazard(
                    f"waits for phase parity {parity[bad]}, but nothing lets the thread know that phase {b.phase - 1} "
                    f"is complete: the phase it means may lie two phases back; {b.describe()}"
                ),
                int(lanes[bad]),
            )
    return over


def _unaware(m, b: MBarrier, lanes: np.ndarray, back: int) -> np.ndarray:
    """Which lanes aren't ordered after the completion of the newest phase but `back`; before the first: all know."""
    if back >= len(b.last):
        return np.zeros(len(lanes), bool)
    by, step = b.last[back]
    return (m.checker.known[lanes, by] < step) & (m.thread_of[lanes] != by)


def _over_state(m, b: MBarrier, lanes: np.ndarray, state: np.ndarray) -> np.ndarray:
    good = state >> np.uint64(40) == np.uint64(_STATE_MAGIC << 16 | b.address >> 3 & 0xFFFF)
    phase = (state >> np.uint64(20) & np.uint64(0xFFFFF)).astype(np.int64)
    behind = b.phase - phase & 0xFFFFF
    wrong = ~good | (behind > 1)
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        what = f"phase {phase[bad]}" if good[bad] else "no arrival on this mbarrier"
        raise _fault(
            m, b, int(lanes[bad]), f"a wait with the state of {what}: expected the present phase or the one before"
        )
    return behind == 1


def async_arrive(d: Decoder):
    """cp.async.mbarrier.arrive (9.7.13.15.15): an arrival when all earlier cp.async of the thread are complete."""
    if not (d.flag("mbarrier") and d.flag("arrive")):
        d.fail("expected .mbarrier.arrive")
    counts_itself = not d.flag("noinc")
    space = _space(d)
    d.type("b64")
    address = d.address(0)

    def step(m):
        for offset, lanes in places(m, space, address(m)):
            _async_arrive(m, find(m, offset, lanes), lanes, counts_itself)

    return step


def _async_arrive(m, b: MBarrier, lanes: np.ndarray, counts_itself: bool):
    lane, count, issued, mask = int(lanes[0]), len(lanes), m.step, np.zeros(m.n, bool)
    mask[lanes] = True
    if counts_itself:
        b.pending += count
        if b.pending > MAX_COUNT:
            raise _fault(m, b, lane, "the pending count grows beyond 2^20 - 1")
    clock = None
    if m.checker is not None:
        columns = m.checker.cp_async_column + m.thread_of[lanes]
        clock = m.checker.agent_clock(int(columns.max()), issued, async_proxy=False)
        clock.known[:] = 0
        clock.known[columns] = issued

    def run():
        m.complete(lambda op: op.kind == "cp.async" and op.step < issued and bool((op.owner & mask).any()))
        if clock is not None:
            b.clock = Checker.merge(b.clock, clock)
        arrive(m, b, count, lane, (int(m.thread_of[lane]) if clock is None else int(columns[0]), issued))

    m.defer(Async(later(m, lane, run), "cp.async.mbarrier.arrive", mask, issued))


def later(m, lane: int, run: Callable[[], None]) -> Callable[[], None]:
    """`run`, whose errors tell of the lane and the instruction that is executing now, whenever it runs."""
    pc = m.pc

    def at_its_instruction():
        here, m.pc = m.pc, pc
        try:
            run()
        except (Fault, Hazard) as error:
            raise m.located(error, lane) from None
        finally:
            m.pc = here

    return at_its_instruction
