"""The hazard checker: happens-before by vector clocks (Lamport; Flanagan and Freund's FastTrack keeps, as here, one
epoch for the last write of each location).

The clock is the machine's step number. `known[lane, column]` is the last step of that column's agent whose accesses
are ordered before whatever the lane does next. Columns 0 .. threads-1 are the threads of the lane's own block; further
columns are asynchronous agents: each thread's cp.async, each thread's bulk groups, each mbarrier's transactions, each
warpgroup's wgmma. An agent's access becomes known to a thread by waiting for it, and to others by what that thread
then synchronises with.

`proxied` is the same knowledge as the asynchronous proxy has it (PTX ISA 8.6, "Proxies"): a thread's plain store is in
it only after a proxy fence somewhere between the store and the TMA or wgmma instruction that accesses the location.

Between blocks nothing is known except through release and acquire on global memory; `foreign[lane]` holds what a
thread has learnt that way, per block.

Every location (a granule: the narrowest access that the kernel makes in that memory) keeps its last write and, in
shared memory, the last read of every warp and agent, in global memory the last read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from .errors import Hazard
from .ptx import TYPE_BYTES, Kernel
from .spaces import Pool, Segment

GENERIC, CP_ASYNC, ASYNC_PROXY, STRONG, REDUCE, MBARRIER = range(6)
NOTED_READS = 64  # threads' reads that are noted before they are entered in the table of each location's last reads
AGENT_SLOTS = 16  # places for reads by asynchronous agents that every location of shared memory keeps
_KIND = {GENERIC: "a store", CP_ASYNC: "the write", ASYNC_PROXY: "the write", STRONG: "an atomic or strong store"}
_KIND |= {REDUCE: "a bulk reduction", MBARRIER: "an mbarrier instruction"}


def _rows(lanes: np.ndarray):
    """An index of these rows (`lanes` ascends): a slice where they follow one another, which copies nothing."""
    first, last = int(lanes[0]), int(lanes[-1])
    return slice(first, last + 1) if last - first == len(lanes) - 1 else lanes


def granule_bytes(kernel: Kernel) -> dict[str, int]:
    """The narrowest access to shared and to global memory among the kernel's instructions."""
    least = {"shared": 16, "global": 16}
    for ins in kernel.instructions:
        if ins.opcode not in ("ld", "ldu", "st", "atom", "red", "cp", "mbarrier"):
            continue
        words = {w.split("::")[0] for w in ins.modifiers}
        spaces = [s for s in least if s in words] if words & {"shared", "global", "local", "param", "const"} else least
        if ins.opcode == "mbarrier":
            size = 8
        elif ins.opcode == "cp":
            sizes = [o.value for o in ins.operands if hasattr(o, "value")]
            size = 16 if "bulk" in words else min(sizes, default=16)
        else:
            kinds = [TYPE_BYTES[w] for w in ins.modifiers if w in TYPE_BYTES]
            size = (kinds[-1] if kinds else 1) * max([int(w[1:]) for w in words if w in ("v2", "v4", "v8")], default=1)
        for s in spaces:
            least[s] = min(least[s], max(size, 1))
    return least


class Checker:
    def __init__(self, machine):
        self.m = weakref.proxy(machine)  # which holds its checker: as a cycle both would keep their gigabytes for long
        kernel = machine.kernel
        opcodes = kernel.opcodes()
        self.threads = t = machine.warps * 32
        bulk = any("bulk" in i.modifiers for i in kernel.instructions if i.opcode == "cp")
        self.uses_async_proxy = bulk or "wgmma" in opcodes
        self.cp_async_column = t  # + thread; only if the kernel uses it
        columns = 2 * t if "cp" in opcodes else t
        self.next_column = [columns] * machine.blocks
        if self.uses_async_proxy or "mbarrier" in opcodes:
            columns += 64
        self.known = np.zeros((machine.n, columns), np.int32)
        self.proxied = np.zeros((machine.n, columns), np.int32) if self.uses_async_proxy else None
        self.own = machine.thread_of.astype(np.int16)
        self.last_full_barrier = np.zeros(machine.blocks, np.int32)
        self.foreign: dict[int, dict[int, np.ndarray]] = {}
        self.published: dict[tuple[int, int], dict] = machine.across["published"]
        self.fenced: dict[int, dict] = {}  # lane -> what it knew at its last fence: a relaxed store publishes that
        self.to_acquire: dict[int, list] = {}  # lane -> what its relaxed loads saw: a fence acquires it
        least = granule_bytes(kernel)
        self.shift = {name: size.bit_length() - 1 for name, size in least.items()}
        self.slots = machine.warps + AGENT_SLOTS
        self.slot_of_column: dict[int, int] = {}
        self.agents: dict[tuple[int, int], str] = {}  # (block, column) -> words

    # -- columns of asynchronous agents

    def new_column(self, block: int, name: str) -> int:
        """A column for an agent of this block."""
        column = self.next_column[block]
        self.next_column[block] += 1
        if column >= self.known.shape[1]:
            extra = np.zeros((len(self.known), 64), np.int32)
            self.known = np.concatenate([self.known, extra], 1)
            if self.proxied is not None:
                self.proxied = np.concatenate([self.proxied, extra], 1)
        self.agents[block, column] = name
        return column

    # -- synchronisation

    def _tick(self, lanes):
        self.known[lanes, self.own[lanes]] = self.m.step

    def join_blocks(self, blocks: np.ndarray):
        """A barrier of all threads of each of these blocks (there is nothing `foreign`): what one of them did is known
        to all of its block."""
        t, step = self.threads, self.m.step
        for clocks in (self.known, self.proxied):
            if clocks is None:
                continue
            rows = clocks.reshape(self.m.blocks, t, -1)
            here = _rows(blocks)
            if clocks is self.known:  # every thread's own clock now stands at this step
                rows[here, :, t:] = rows[here, :, t:].max(1, keepdims=True)
                rows[here, :, :t] = step
            else:
                rows[here] = rows[here].max(1, keepdims=True)
        self.last_full_barrier[blocks] = step

    def warp_sync(self, members: np.ndarray):
        """bar.warp.sync: `members` is a mask of lanes, each warp's synchronise with one another."""
        lanes = np.flatnonzero(members)
        self._tick(lanes)
        whole = members.reshape(-1, 32)
        warps = np.flatnonzero(whole.any(1))
        for clocks in (self.known, self.proxied):
            if clocks is None:
                continue
            if whole[warps].all():
                rows = clocks.reshape(-1, 32, clocks.shape[1])
                rows[warps] = rows[warps].max(1, keepdims=True)
            else:
                for w in warps:
                    some = np.flatnonzero(whole[w]) + 32 * w
                    clocks[some] = clocks[some].max(0)
        if self.foreign:
            for w in warps:
                some = np.flatnonzero(whole[w]) + 32 * w
                merged = self._merge_foreign([self.foreign[int(u)] for u in some if int(u) in self.foreign])
                for u in some if merged else ():
                    self.foreign[int(u)] = merged

    def snapshot(self, lanes: np.ndarray) -> SimpleNamespace:
        """What these lanes (of one block) know together: the clock that an mbarrier's phase gathers."""
        self._tick(lanes)
        here = _rows(lanes)
        rows = [None if c is None else c[here].max(0) for c in (self.known, self.proxied)]
        foreign = self._merge_foreign([self.foreign[int(u)] for u in lanes if int(u) in self.foreign])
        return SimpleNamespace(known=rows[0], proxied=rows[1], foreign=foreign)

    @staticmethod
    def merge(a: SimpleNamespace | None, b: SimpleNamespace | None) -> SimpleNamespace | None:
        if a is None or b is None:
            return a or b

        def longest(x, y):
            if x is None or y is None:
                return x if y is None else y
            if len(x) < len(y):
                x, y = y, x
            out = x.copy()
            np.maximum(out[: len(y)], y, out=out[: len(y)])
            return out

        foreign = Checker._merge_foreign([a.foreign, b.foreign])
        return SimpleNamespace(known=longest(a.known, b.known), proxied=longest(a.proxied, b.proxied), foreign=foreign)

    def acquire(self, lanes: np.ndarray, clock: SimpleNamespace | None, *, gathered: bool = False):
        """The lanes (of the clock's block) learn what the clock holds; `gathered`: what each of them knows is in it."""
        if clock is None or not len(lanes):
            return
        here = _rows(lanes)
        for mine, theirs in ((self.known, clock.known), (self.proxied, clock.proxied)):
            if mine is not None and theirs is not None:
                width = len(theirs)
                mine[here, :width] = theirs if gathered else np.maximum(mine[here, :width], theirs)
        if clock.foreign:
            for u in lanes:
                self.foreign[int(u)] = self._merge_foreign([clock.foreign, self.foreign.get(int(u), {})])

    def agent_clock(self, column: int, step: int, *, async_proxy: bool = True) -> SimpleNamespace:
        """The clock of an agent's completed work alone; cp.async belongs to the generic proxy (async_proxy=False)."""
        row = np.zeros(column + 1, np.int32)
        row[column] = step
        proxied = row if async_proxy and self.proxied is not None else None
        return SimpleNamespace(known=row, proxied=proxied, foreign={})

    def agent_done(self, lanes: np.ndarray, columns, steps, *, async_proxy: bool = True):
        """The lanes have waited for these agents' work up to these steps."""
        for clocks in (self.known, self.proxied if async_proxy else None):
            if clocks is not None:
                clocks[lanes, columns] = np.maximum(clocks[lanes, columns], steps)

    def proxy_fence(self, lanes: np.ndarray):
        """fence.proxy.async: what the lanes know holds for the asynchronous proxy too."""
        if self.proxied is not None:
            self._tick(lanes)
            here = _rows(lanes)
            self.proxied[here] = np.maximum(self.proxied[here], self.known[here])

    # -- release and acquire through memory

    @staticmethod
    def _merge_foreign(parts: list[dict]) -> dict:
        parts = [p for p in parts if p]
        if len(parts) <= 1:
            return parts[0] if parts else {}
        if all(p is parts[0] for p in parts):
            return parts[0]
        out = dict(parts[0])
        for p in parts[1:]:
            for block, row in p.items():
                if block in out:
                    a, b = sorted((out[block], row), key=len)
                    b = b.copy()
                    np.maximum(b[: len(a)], a, out=b[: len(a)])
                    out[block] = b
                else:
                    out[block] = row
        return out

    def _everything(self, lane: int) -> dict:
        """What the lane knows of its own block and of the others."""
        self._tick(np.array([lane]))
        block = int(self.m.block_ids[self.m.block_of[lane]])
        return self._merge_foreign([{block: self.known[lane].copy()}, self.foreign.get(lane, {})])

    def _learn(self, lane: int, knowledge: dict):
        mine = int(self.m.block_ids[self.m.block_of[lane]])
        others = {b: row for b, row in knowledge.items() if b != mine}
        if mine in knowledge:
            row = knowledge[mine]
            self.known[lane, : len(row)] = np.maximum(self.known[lane, : len(row)], row)
        if others:
            self.foreign[lane] = self._merge_foreign([others, self.foreign.get(lane, {})])

    def fence(self, lanes: np.ndarray, scope: str):
        """fence / membar: later relaxed stores publish what is known now; what relaxed loads saw is acquired."""
        for lane in (int(u) for u in lanes):
            for scope_seen, knowledge in self.to_acquire.pop(lane, ()):
                if scope != "cta" or scope_seen == "cta":
                    self._learn(lane, knowledge)
            self.fenced[lane] = (scope, self._everything(lane))

    def synchronise(self, pool: Pool, lanes, offset, strong: str, *, reads: bool, writes: bool):
        """Strong accesses (PTX ISA 8.7, 8.8): "<semantics>.<scope>". Lanes act in order, each after the one before."""
        semantics, _, scope = strong.partition(".")
        releases, acquires = semantics in ("release", "acq_rel"), semantics in ("acquire", "acq_rel")
        if not (releases or acquires or self.fenced or self.published):
            return
        shift = self._shift(pool)
        for lane, at in zip(lanes.tolist(), (offset >> shift).tolist(), strict=True):
            key = (id(pool), at)
            seen = self.published.get(key)
            if reads and seen:
                if acquires:
                    self._learn(lane, seen)
                else:
                    self.to_acquire.setdefault(lane, []).append((scope, seen))
            if writes:
                told = self._everything(lane) if releases else self.fenced.get(lane, (scope, None))[1]
                # A read-modify-write continues the release sequence that it reads from.
                if told is not None or (reads and seen):
                    self.published[key] = self._merge_foreign([told or {}, seen if reads and seen else {}])
                elif key in self.published:
                    del self.published[key]

    # -- accesses

    def _shift(self, pool: Pool) -> int:
        return self.shift["global" if isinstance(pool, Segment) else "shared"]

    def _shadow(self, pool: Pool):
        s = pool.shadow
        if s is None:
            count = (pool.data.size >> self._shift(pool)) + 1
            s = pool.shadow = SimpleNamespace(
                write_step=np.zeros(count, np.int32),
                write_column=np.zeros(count, np.int16),
                write_kind=np.zeros(count, np.uint8),
            )
            if isinstance(pool, Segment):
                s.write_block = np.full(count, -1, np.int32)
                s.read_step = np.zeros(count, np.int32)
                s.read_column = np.zeros(count, np.int16)
                s.read_block = np.full(count, -1, np.int32)
                s.read_by_several = np.zeros(count, bool)
            else:
                s.count = count
                s.read_any = np.zeros(count, np.int32)
                s.read_agent = np.zeros(count, bool)
                s.read_step = s.read_column = None  # of every slot and granule: `_last_reads`
                s.noted = []  # (step, granules, lanes, columns) of threads' reads that aren't in there yet
        return s

    def _note_read(self, s, g, lanes, columns):
        """Most reads are behind a full barrier before a write comes to where they were, so that nobody will ask for
        them: only those that aren't are entered in the table."""
        s.noted.append((self.m.step, g, lanes, columns))
        if len(s.noted) == NOTED_READS:
            barriers = self.last_full_barrier
            s.noted = [n for n in s.noted if n[0] > barriers[self.m.block_of[n[2]]].min()]
            if len(s.noted) > NOTED_READS // 2:
                self._enter_noted(s)

    def _enter_noted(self, s):
        steps, columns = self._last_reads(s)
        for step, g, _, of in s.noted:
            flat = self._slot(of) * s.count + g
            steps[flat], columns[flat] = step, of
        s.noted = []

    def _last_reads(self, s):
        """Step and column of the last read in each slot, by slot * s.count + granule."""
        if s.read_step is None:
            s.read_step = np.zeros(self.slots * s.count, np.int32)
            s.read_column = np.zeros(self.slots * s.count, np.int16)
        return s.read_step, s.read_column

    def _granules(self, pool: Pool, offset: np.ndarray, size: int) -> np.ndarray:
        """[granules per access, lanes]"""
        shift = self._shift(pool)
        first = offset >> shift
        count = max(1, size >> shift)
        return first[None] if count == 1 else first + np.arange(count)[:, None]

    def read(self, pool: Pool, lanes, offset, size: int, strong: str | None = None):
        """Threads read `size` bytes each at these offsets of the pool."""
        if pool.name in ("param", "const"):
            return
        if isinstance(pool, Segment):
            self._global(pool, lanes, offset, size, self.own[lanes], write=False, strong=strong)
        elif pool.name == "shared":
            self._shared_read(pool, lanes, offset, size, strong)
        if strong is not None:
            self.synchronise(pool, lanes, offset, strong, reads=True, writes=False)

    def write(
        self,
        pool: Pool,
        lanes,
        offset,
        size: int,
        strong: str | None = None,
        *,
        atomic: bool = False,
        repeats: Callable[[], np.ndarray] | None = None,
    ):
        """Threads write; `atomic`: they read and write at once. `repeats()` says which lanes write what is there
        already: a compiler lets threads that hold copies of a value all store it, in whatever order."""
        if isinstance(pool, Segment):
            self._global(pool, lanes, offset, size, self.own[lanes], write=True, strong=strong, repeats=repeats)
        elif pool.name == "shared":
            kind = GENERIC if strong is None else STRONG
            own = self.own[lanes]
            self._shared_write(pool, lanes, offset, size, own, kind, uninitialised=atomic, repeats=repeats)
        if strong is not None:
            self.synchronise(pool, lanes, offset, strong, reads=atomic, writes=True)

    def async_write(self, pool: Pool, lanes, offset, size: int, columns, kind: int = ASYNC_PROXY):
        """Agents write on behalf of these lanes; the order of everything before is the lanes'."""
        columns = np.broadcast_to(np.asarray(columns, np.int16), lanes.shape)
        if isinstance(pool, Segment):
            self._global(pool, lanes, offset, size, columns, write=True, strong=None, kind=kind)
        else:
            self._shared_write(pool, lanes, offset, size, columns, kind)

    def async_read(self, pool: Pool, lanes, offset, size: int, columns, kind: int = ASYNC_PROXY):
        """Agents read on behalf of these lanes."""
        columns = np.broadcast_to(np.asarray(columns, np.int16), lanes.shape)
        if isinstance(pool, Segment):
            self._global(pool, lanes, offset, size, columns, write=False, strong=None, kind=kind)
        else:
            self._shared_read(pool, lanes, offset, size, None, columns, kind)

    def async_reduce(self, segment: Segment, lanes, offset, size: int, columns):
        """Agents reduce in global memory on behalf of these lanes: each element by an atomic operation."""
        columns = np.broadcast_to(np.asarray(columns, np.int16), lanes.shape)
        self._global(segment, lanes, offset, size, columns, write=True, strong=None, kind=REDUCE, reads=True)

    def occupy(self, pool: Pool, offset: int, size: int, column: int):
        """mbarrier instructions have written these bytes. A column that nobody ever synchronises with lets any other
        access to them be reported."""
        s, g = self._shadow(pool), self._granules(pool, np.array([offset]), size)
        s.write_step[g], s.write_column[g], s.write_kind[g] = self.m.step, column, MBARRIER

    def vacate(self, pool: Pool, offset: int, size: int, lane: int):
        """The lane gives occupied bytes back, as if it had written them."""
        s, g = self._shadow(pool), self._granules(pool, np.array([offset]), size)
        s.write_step[g], s.write_column[g], s.write_kind[g] = self.m.step, self.own[lane], GENERIC

    def last_write(self, pool: Pool, offset: int, size: int) -> int:
        """The step of the newest write to these bytes; 0: none in this launch."""
        return self._shadow(pool).write_step[self._granules(pool, np.array([offset]), size)].max()

    def prepared(self, pool: Pool, offset, size: int, columns) -> SimpleNamespace:
        """Accesses of agents to shared memory, for `async_read_for_all`; `offset`: [agents, accesses]; `columns`:
        [agents]."""
        agents, accesses = offset.shape
        granule = self._granules(pool, offset.reshape(-1), size).reshape(-1, agents, accesses)
        columns = np.asarray(columns)
        agent = np.broadcast_to(np.arange(agents)[:, None], granule.shape).reshape(-1)
        slot = (self._slot(columns) * self._shadow(pool).count)[:, None] + granule
        return SimpleNamespace(
            granule=granule.reshape(-1), agent=agent, slot=slot.reshape(-1), column=columns.astype(np.int16)[agent]
        )

    def async_read_for_all(self, pool: Pool, lanes, made: SimpleNamespace):
        """Agents read shared memory through the asynchronous proxy, each on behalf of several lanes ([agents, any]), to
        all of which the writes must be known."""
        s, g = self._shadow(pool), made.granule
        step, column = s.write_step.take(g), s.write_column.take(g)
        if not step.all():
            first = int(np.flatnonzero(step == 0)[0])
            lane = lanes[made.agent[first], 0]
            self._report(pool, lane, g[first], self._verb("reads", ASYNC_PROXY), "which was never written")
        known = self.known[lanes].min(1)
        at = made.agent * known.shape[1] + column
        bad = known.reshape(-1).take(at) < step
        how = s.write_kind.take(g)
        plain = (how != ASYNC_PROXY) & (how != MBARRIER)
        if plain.any():
            bad |= plain & (self.proxied[lanes].min(1).reshape(-1).take(at) < step)
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            who, c = lanes[made.agent[first]], column[first]
            clocks = self.known if (self.known[who, c] < step[first]).any() else self.proxied
            lane = who[int(clocks[who, c].argmin())]
            self._report_write(pool, s, g[first, None, None], np.ones((1, 1), bool), [lane], "reads", ASYNC_PROXY)
        steps, columns = self._last_reads(s)
        steps[made.slot], columns[made.slot] = self.m.step, made.column
        s.read_agent[g] = True
        s.read_any[g] = self.m.step

    def _slot(self, columns: np.ndarray) -> np.ndarray:
        """The row of an agent's reads: a warp's threads share one, other agents those behind them, by column."""
        t = self.threads
        return np.where(columns < t, columns >> 5, self.m.warps + columns % AGENT_SLOTS).astype(np.int64)

    def _unordered_writes(self, s, g, step, lanes, kind) -> np.ndarray:
        """Which of these granules' last writes, at `step`, are not ordered before what the lanes (or their agents) do
        now."""
        column = s.write_column.take(g)
        if kind == ASYNC_PROXY:
            suspect = step > 0
        else:
            barrier = self.last_full_barrier[self.m.block_of[lanes]]
            suspect = ((step > barrier) | (column >= self.threads)) & (column != self.own[lanes])
        if not suspect.any():
            return suspect
        at = lanes * self.known.shape[1] + column
        bad = self.known.reshape(-1).take(at) < step
        if kind == ASYNC_PROXY:
            # Even a thread's own store isn't seen by its later TMA or wgmma without a proxy fence.
            how = s.write_kind[g]
            plain = (how != ASYNC_PROXY) & (how != MBARRIER)
            bad = np.where(plain, self.proxied.reshape(-1).take(at) < step, bad)
        return bad & suspect

    def _shared_read(self, pool, lanes, offset, size, strong, columns=None, kind=GENERIC):
        s = self._shadow(pool)
        g = self._granules(pool, offset, size)
        if columns is None:
            columns = self.own[lanes]
        step = s.write_step.take(g)
        if not step.all():
            k, i = (int(x[0]) for x in np.nonzero(step == 0))
            self._report(pool, lanes[i], g[k, i], "reads", "which was never written")
        bad = self._unordered_writes(s, g, step, lanes, kind)
        if strong is not None and bad.any():
            bad &= s.write_kind[g] != STRONG
        if bad.any():
            self._report_write(pool, s, g, bad, lanes, "reads", kind)
        self._note_read(s, g, lanes, columns)
        if (columns >= self.threads).any():
            self._enter_noted(s)  # a full barrier says nothing of agents
            s.read_agent[g] = True
        s.read_any[g] = self.m.step

    def _shared_write(self, pool, lanes, offset, size, columns, kind, *, uninitialised=False, repeats=None):
        s = self._shadow(pool)
        g = self._granules(pool, offset, size)
        step = s.write_step.take(g)
        if uninitialised and not step.all():
            k, i = (int(x[0]) for x in np.nonzero(step == 0))
            self._report(pool, lanes[i], g[k, i], "reads and writes", "which was never written")
        bad = self._unordered_writes(s, g, step, lanes, kind)
        if kind == STRONG and bad.any():
            bad &= s.write_kind[g] != STRONG
        if bad.any() and repeats is not None:
            bad &= ~repeats()
        if bad.any():
            self._report_write(pool, s, g, bad, lanes, "writes", kind)
        barrier = self.last_full_barrier[self.m.block_of[lanes]]
        suspect = (s.read_any.take(g) > barrier) | s.read_agent.take(g)
        if suspect.any():
            k, i = np.nonzero(suspect)
            where, who = g[k, i], lanes[i]
            own = self.own[who]
            self._enter_noted(s)
            for slot in range(self.slots):
                at = s.read_step.take(slot * s.count + where)
                if not at.any():
                    continue
                column = s.read_column.take(slot * s.count + where)
                late = (at > 0) & (self.known[who, column] < at) & (column != own)
                if late.any():
                    first = int(np.flatnonzero(late)[0])
                    reader = self._agent(int(self.m.block_of[who[first]]), int(column[first]))
                    self._report(
                        pool,
                        who[first],
                        where[first],
                        self._verb("writes", kind),
                        f"while nothing orders it after the read by {reader} (step {int(at[first])})",
                    )
                s.read_step[slot * s.count + where] = 0
            s.read_agent[g] = False
        s.read_any[g] = 0
        s.write_step[g] = self.m.step
        s.write_column[g] = columns
        s.write_kind[g] = kind

    def _global(
        self, segment, lanes, offset, size, columns, *, write: bool, strong, kind=GENERIC, reads=False, repeats=None
    ):
        s = self._shadow(segment)
        g = self._granules(segment, offset, size)
        m = self.m
        block = m.block_ids[m.block_of[lanes]]
        verb = self._verb("writes" if write else "reads", kind)
        if strong is not None and kind == GENERIC:
            kind = STRONG
        step = s.write_step[g]
        if segment.undefined and (reads or not write) and not step.all():
            k, i = (int(x[0]) for x in np.nonzero(step == 0))
            self._report(segment, lanes[i], g[k, i], verb, "which was never written")
        if step.any():
            k, i = np.nonzero(step > 0)
            where = g[k, i]
            race = self._unordered(s.write_block[where], s.write_column[where], step[k, i], lanes[i], block[i])
            how = s.write_kind[where]
            if kind in (STRONG, REDUCE):
                race &= (how != STRONG) & (how != REDUCE)
            if kind in (ASYNC_PROXY, REDUCE) and self.proxied is not None:
                same = s.write_block[where] == block[i]
                plain = np.flatnonzero(same & (how != ASYNC_PROXY) & (how != REDUCE) & (how != STRONG))
                race[plain] |= self.proxied[lanes[i[plain]], s.write_column[where[plain]]] < step[k, i][plain]
            if repeats is not None and race.any():
                race &= ~repeats()[i]
            if race.any():
                first = int(np.flatnonzero(race)[0])
                writer = self._agent(int(s.write_block[where[first]]), int(s.write_column[where[first]]), linear=True)
                self._report(
                    segment,
                    lanes[i[first]],
                    where[first],
                    verb,
                    f"while nothing orders it after {_KIND[int(s.write_kind[where[first]])]} by {writer} "
                    f"(step {int(s.write_step[where[first]])})",
                )
        if write:
            read = s.read_step[g]
            if read.any():
                k, i = np.nonzero(read > 0)
                where = g[k, i]
                race = self._unordered(s.read_block[where], s.read_column[where], read[k, i], lanes[i], block[i])
                race |= s.read_by_several[where] & np.array([int(u) not in self.foreign for u in lanes[i]], bool)
                if race.any():
                    first = int(np.flatnonzero(race)[0])
                    reader = self._agent(int(s.read_block[where[first]]), int(s.read_column[where[first]]), linear=True)
                    self._report(
                        segment,
                        lanes[i[first]],
                        where[first],
                        verb,
                        f"while nothing orders it after the read by {reader} (step {int(s.read_step[where[first]])})",
                    )
                s.read_step[g] = 0
                s.read_by_several[g] = False
                s.read_block[g] = -1
            s.write_step[g] = m.step
            s.write_column[g] = columns
            s.write_block[g] = block
            s.write_kind[g] = kind
        elif kind != STRONG:
            before = s.read_block[g]
            s.read_by_several[g] |= (before >= 0) & (before != block)
            s.read_step[g] = m.step
            s.read_column[g] = columns
            s.read_block[g] = block
            if len(lanes) > 1:
                s.read_by_several[g] |= s.read_block[g] != block

    def _unordered(self, block, column, step, lanes, own_block) -> np.ndarray:
        """Which of these accesses, by (block, column) at a step, aren't ordered before the lanes."""
        m = self.m
        same = block == own_block
        barrier = self.last_full_barrier[m.block_of[lanes]]
        race = np.ones(len(lanes), bool)
        at = np.flatnonzero(same)
        if len(at):
            who, c = lanes[at], column[at]
            settled = (c == self.own[who]) | ((c < self.threads) & (step[at] <= barrier[at]))
            race[at] = ~(settled | (self.known[who, c] >= step[at]))
        other = np.flatnonzero(~same)
        for n in other if self.foreign else ():
            row = self.foreign.get(int(lanes[n]), {}).get(int(block[n]))
            if row is not None and column[n] < len(row) and row[column[n]] >= step[n]:
                race[n] = False
        return race

    # -- words

    def _agent(self, block: int, column: int, *, linear: bool = False) -> str:
        if linear:
            here = np.flatnonzero(self.m.block_ids == block)
            if not len(here):
                return f"thread {column} of block number {block} (of an earlier wave)"
            block = int(here[0])
        name = self.m.name_block(block)
        if column < self.threads:
            return f"thread {column} (warp {column // 32}) of block {name}"
        if (block, column) in self.agents:
            return f"{self.agents[block, column]} of block {name}"
        return f"cp.async of thread {column - self.cp_async_column} of block {name}"

    @staticmethod
    def _verb(verb: str, kind: int) -> str:
        return {
            CP_ASYNC: "by cp.async ",
            REDUCE: "by a bulk reduction ",
            ASYNC_PROXY: "through the asynchronous proxy (TMA, wgmma) ",
        }.get(kind, "") + verb

    def _report_write(self, pool, s, g, bad, lanes, verb, kind):
        k, i = (int(x[0]) for x in np.nonzero(bad))
        at = int(g[k, i])
        lane = int(lanes[i])
        column, step, how = int(s.write_column[at]), int(s.write_step[at]), int(s.write_kind[at])
        writer = self._agent(int(self.m.block_of[lane]), column)
        if how == MBARRIER and column >= self.threads:
            why = f"which holds {self.agents[int(self.m.block_of[lane]), column]}"
        elif kind == ASYNC_PROXY and how != ASYNC_PROXY and self.known[lane, column] >= step:
            why = f"but no fence.proxy.async stands between and {_KIND[how]} by {writer} (step {step})"
        elif kind == ASYNC_PROXY and how != ASYNC_PROXY and column == self.own[lane]:
            why = f"but no fence.proxy.async stands between and its own store (step {step})"
        else:
            why = f"while nothing orders it after {_KIND[how]} by {writer} (step {step})"
        self._report(pool, lane, at, self._verb(verb, kind), why)

    def _report(self, pool, lane, granule, verb: str, why: str):
        offset = int(granule) << self._shift(pool)
        raise self.m.located(Hazard(f"{verb} {pool.describe(offset)} {why}"), int(lane))
