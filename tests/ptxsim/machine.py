"""The machine: registers, threads, and the order in which they run.

All threads of all resident blocks are lanes of flat numpy arrays of `n = blocks * warps * 32` elements: lane =
(block * warps + warp) * 32 + lane of the warp. A register is one such array. Threads at the same instruction form a
group, and an instruction runs once for the whole group, under `mask`. Register arrays are never changed in place: a
write binds a new array, so that moves cost nothing and no step can disturb another's operand.

Threads that diverge become groups of their own and merge again where their program counters meet. Which group runs
next is the schedule's choice: `seed=None` takes the lowest program counter (which reconverges soonest), a seed draws
groups, splits them by warps, and delays asynchronous work, so that a missing order can show in the results as well.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .decode import STOP, UINT, Program
from .errors import Deadlock, Fault, Hazard, SimulationError, UnsupportedInstruction
from .hazards import Checker
from .ptx import Symbol
from .spaces import (
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    WINDOW_MASK,
    GlobalMemory,
    Pool,
)

# Registers start as this: a NaN in every float format, and no likely address.
POISON = 0xFFF7_DEAD_FFF7_DEAD
MAX_POLLS = 2000


@dataclass(slots=True)
class Async:
    """Work handed to an asynchronous agent (cp.async, TMA, wgmma): `run` does it, once."""

    run: Callable[[], None]
    kind: str
    owner: np.ndarray  # mask of the lanes that issued it
    step: int  # when
    key: object = None  # what a family finds it by


class Machine:
    """One wave of resident blocks of one launch."""

    def __init__(
        self,
        program: Program,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        blocks: np.ndarray,
        params: Pool,
        constants: Pool,
        symbols: dict[str, int],
        memory: GlobalMemory,
        dynamic_shared: int,
        seed: int | None,
        check: bool,
        statistics: Counter,
        state: dict,
    ):
        kernel = program.kernel
        self.program, self.kernel = program, kernel
        self.grid, self.block_shape, self.block_ids = grid, block, blocks
        self.threads = block[0] * block[1] * block[2]
        self.blocks = len(blocks)
        self.warps = -(-self.threads // 32)
        self.n = self.blocks * self.warps * 32
        self.memory, self.params, self.constants, self.symbols = memory, params, constants, symbols
        size = kernel.static_shared_bytes
        for v in (*kernel.variables.values(), *kernel.module.variables.values()):
            if v.space == "shared" and v.extern:
                size = max(size, v.offset)
        self.dynamic_shared = dynamic_shared
        self.shared_bytes = size + dynamic_shared
        stride = max(-(-self.shared_bytes // 1024) * 1024, 1024)
        self.shared = Pool("shared", self.blocks * stride, stride=stride, limit=self.shared_bytes)
        local = -(-kernel.local_bytes // 16) * 16
        self.local = Pool("local", self.n * local, stride=local, limit=kernel.local_bytes) if local else None

        every = np.arange(self.n)
        self.every_lane = every
        self.block_of = every // (self.warps * 32)  # of a lane; an index among the resident blocks
        self.thread_of = every % (self.warps * 32)
        self.warp_of = every // 32  # counted over all blocks
        self.exists = self.thread_of < self.threads
        self.live = self.exists.copy()
        poison = {w: np.full(self.n, POISON & (1 << 8 * w) - 1, UINT[w]) for w in (1, 2, 4, 8)}
        no = np.zeros(self.n, bool)
        self.regs: list[np.ndarray] = [
            no if r.type == "pred" else np.zeros((self.n, 2), np.uint64) if r.bytes == 16 else poison[r.bytes]
            for r in kernel.registers
        ]
        self.specials: dict[str, np.ndarray] = {}

        self.ready: dict[int, np.ndarray] = {}  # program counter -> mask of the threads that wait there to be run
        self.polling: dict[int, np.ndarray] = {}  # the same, of threads that looked for something in vain
        self.collecting: dict[int, np.ndarray] = {}  # threads at a collective, waiting for the rest of their warps
        self.parked: dict[int, np.ndarray] = {}  # threads that a barrier will resume, by the instruction they wait at
        self.across = state  # what outlives this wave of blocks
        self.step = state["step"]  # the number of the instruction being run: a clock that all threads share
        self.events = 0  # counts what a polling thread could be waiting for
        self.events_at_poll, self.idle_polls = -1, 0
        self.pc = 0
        self.statistics = statistics
        self.random = None if seed is None else np.random.default_rng(seed)
        self.pending: list[Async] = []
        self.exit_hooks: list[Callable] = []  # given the machine: if they held it, their cycle would keep its gigabytes
        self.conflicts: dict[int, int] = {}  # what `bank_conflicts` has counted before
        self.state: dict[str, object] = {}  # what a family keeps: barriers, mbarriers, commit groups
        self.checker = Checker(self) if check else None
        self.mask, self.full, self._lanes, self._warps = self.live, False, None, None
        self.whole = 0  # 32 or 128 where the mask is known to hold complete warps or warpgroups only

    # -- masks

    def enter(self, mask: np.ndarray):
        """Makes `mask` the active threads; returns what `leave` needs to go back."""
        outer = (self.mask, self.full, self._lanes, self._warps, self.whole)
        full = np.count_nonzero(mask) == self.n
        self.mask, self.full, self._lanes, self._warps, self.whole = mask, full, None, None, 0
        return outer

    def leave(self, outer):
        self.mask, self.full, self._lanes, self._warps, self.whole = outer

    @property
    def lanes(self) -> np.ndarray:
        """The active lanes' numbers, ascending."""
        if self._lanes is None:
            self._lanes = self.every_lane if self.full else np.flatnonzero(self.mask)
        return self._lanes

    @property
    def whole_warps(self) -> np.ndarray:
        """The active warps' numbers. Every existing thread of them is active: for instructions that are collective."""
        if self._warps is None:
            per_warp = self.mask.reshape(-1, 32)
            active = per_warp.any(1)
            lacking = (~per_warp & self.live.reshape(-1, 32)).any(1) & active
            if lacking.any():
                warp = int(np.flatnonzero(lacking)[0])
                raise Fault(
                    f"{self.instruction.name} must be executed by all threads of a warp, but lanes "
                    f"{_ranges(np.flatnonzero(~per_warp[warp]))} of {self.name_warp(warp)} are elsewhere"
                )
            self._warps = np.flatnonzero(active)
        return self._warps

    # -- registers

    def put(self, index: int, value):
        """Writes a register of the active threads."""
        if self.full:
            self.regs[index] = value if value.ndim else np.full(self.n, value)
        else:
            new = self.regs[index].copy()
            if new.dtype is not value.dtype:
                new = new.view(value.dtype)
            np.copyto(new, value, where=self.mask)  # by runs of the mask, which most often holds whole warps
            self.regs[index] = new

    def put_lanes(self, index: int, values: np.ndarray):
        """The same from one value per active lane, in the order of `lanes`."""
        if self.full:
            self.regs[index] = values
        else:
            new = self.regs[index].copy()
            if new.dtype is not values.dtype:
                new = new.view(values.dtype)
            new[self.lanes] = values
            self.regs[index] = new

    def broadcast(self, value) -> np.ndarray:
        return np.full(self.n, value)

    def special(self, name: str) -> np.ndarray:
        """A special register (PTX ISA chapter 10) of every lane."""
        if name not in self.specials:
            value = self._special(name)
            if name.startswith(("clock", "globaltimer")):
                return value
            self.specials[name] = value
        return self.specials[name]

    def _special(self, name: str) -> np.ndarray:
        word, _, axis = name.partition(".")
        x, y, _z = self.block_shape
        thread, lane = self.thread_of, self.thread_of % 32
        gx, gy, _gz = self.grid
        block = self.block_ids[self.block_of]
        if word == "tid":
            value = {"x": thread % x, "y": thread // x % y, "z": thread // (x * y)}[axis]
        elif word == "ntid":
            value = self.broadcast(dict(zip("xyz", self.block_shape, strict=True))[axis])
        elif word in ("ctaid", "clusterid"):
            value = {"x": block % gx, "y": block // gx % gy, "z": block // (gx * gy)}[axis]
        elif word in ("nctaid", "nclusterid"):
            value = self.broadcast(dict(zip("xyz", self.grid, strict=True))[axis])
        elif word in ("cluster_ctaid", "cluster_ctarank", "is_explicit_cluster", "gridid", "smid"):
            value = block % 132 if word == "smid" else self.broadcast(0)
        elif word in ("cluster_nctaid", "cluster_nctarank"):
            value = self.broadcast(1)
        elif word == "nsmid":
            value = self.broadcast(132)
        elif word == "laneid":
            value = lane
        elif word == "warpid":
            value = thread // 32
        elif word == "nwarpid":
            value = self.broadcast(self.warps)
        elif word.startswith("lanemask_"):
            one = np.uint64(1) << lane.astype(np.uint64)
            value = {
                "eq": one,
                "lt": one - np.uint64(1),
                "le": one * np.uint64(2) - np.uint64(1),
                "gt": np.uint64(0xFFFFFFFF) & ~(one * np.uint64(2) - np.uint64(1)),
                "ge": np.uint64(0xFFFFFFFF) & ~(one - np.uint64(1)),
            }[word[-2:]]
        elif word in ("clock", "clock64", "globaltimer", "globaltimer_lo"):
            value = self.broadcast(self.step * 4)
        elif word in ("clock_hi", "globaltimer_hi", "reserved_smem_offset_begin", "reserved_smem_offset_end"):
            value = self.broadcast(0)
        elif word == "dynamic_smem_size":
            value = self.broadcast(self.dynamic_shared)
        elif word in ("total_smem_size", "aggr_smem_size"):
            value = self.broadcast(self.shared_bytes)
        else:
            raise UnsupportedInstruction(f"special register %{name} is not modelled")
        return np.asarray(value)

    def address_of(self, symbol: Symbol) -> int:
        """The address of a variable in its own space (a global variable's is generic at once)."""
        name = symbol.name
        if name in self.symbols:
            return self.symbols[name] + symbol.offset
        for variables in (self.kernel.variables, self.kernel.module.variables):
            if name in variables:
                return variables[name].offset + symbol.offset
        for param in self.kernel.params:
            if param.name == name:
                return param.offset + symbol.offset
        raise UnsupportedInstruction(f"symbol {name} is no variable or parameter of {self.kernel.name}")

    # -- memory

    def resolve(self, space: str, address: np.ndarray, size: int, align: int) -> list[tuple]:
        """Addresses of the active lanes to [(pool, selection, byte offsets)]; selection None stands for all of them.

        Raises:
            Fault: an address is misaligned or outside of what it may reach.
        """
        if not len(address):
            return []
        if space == "generic":
            window = address >> np.uint64(56)
            first = int(window[0])
            if (window == first).all():
                return self._resolve_window(first, address, size, align)
            parts = []
            for w in np.unique(window):
                chosen = np.flatnonzero(window == w)
                for pool, selection, offset in self._resolve_window(int(w), address[chosen], size, align, chosen):
                    parts.append((pool, chosen if selection is None else chosen[selection], offset))
            return parts
        if space == "global":
            return self._resolve_global(address, size, align, None)
        pool = getattr(self, {"shared": "shared", "local": "local", "param": "params", "const": "constants"}[space])
        if pool is None:
            raise Fault(f"access to {space} memory, of which the kernel has none")
        return self._resolve_pool(pool, address, size, align, None)

    def _resolve_window(self, window: int, address, size, align, chosen=None) -> list[tuple]:
        if window == 0:
            return self._resolve_global(address, size, align, chosen)
        pools = {SHARED_WINDOW: self.shared, LOCAL_WINDOW: self.local, PARAM_WINDOW: self.params}
        pool = (pools | {CONST_WINDOW: self.constants}).get(window << 56)
        if pool is None:
            self.fault_lane(f"generic address {int(address[0]):#x} belongs to no memory", 0, chosen)
        return self._resolve_pool(pool, address & np.uint64(WINDOW_MASK), size, align, chosen)

    def _resolve_pool(self, pool: Pool, address, size, align, chosen) -> list[tuple]:
        end = int(address.max()) + size
        if end > pool.limit:
            bad = int(address.argmax())
            self.fault_lane(
                f"{size}-byte access at {int(address[bad]):#x} of {pool.name} memory, which has {pool.limit} bytes",
                bad,
                chosen,
            )
        offset = address.astype(np.int64)
        if align > 1 and (offset & (align - 1)).any():
            bad = int(np.flatnonzero(offset & (align - 1))[0])
            self.fault_lane(
                f"misaligned access: address {int(address[bad]):#x} of {pool.name} memory "
                f"must be a multiple of {align}",
                bad,
                chosen,
            )
        if pool.stride:
            lanes = self.lanes if chosen is None else self.lanes[chosen]
            owner = self.block_of[lanes] if pool is self.shared else lanes
            offset = offset + owner * pool.stride
        return [(pool, None, offset)]

    def _resolve_global(self, address, size, align, chosen) -> list[tuple]:
        low, high = int(address.min()), int(address.max())
        if align > 1 and (address & np.uint64(align - 1)).any():
            bad = int(np.flatnonzero(address & np.uint64(align - 1))[0])
            segment = self.memory.find(int(address[bad]))
            where = (
                segment.describe(int(address[bad]) - segment.base)
                if segment
                else self.memory.nearest(int(address[bad]))
            )
            self.fault_lane(
                f"misaligned access: address {int(address[bad]):#x} ({where}) must be a multiple of {align}",
                bad,
                chosen,
            )
        segment = self.memory.find(low)
        if segment is not None and high + size <= segment.end:
            return [(segment, None, (address - np.uint64(segment.base)).astype(np.int64))]
        which = np.searchsorted(self.memory.bases, address, side="right") - 1
        parts = []
        for w in np.unique(which):
            chosen_here = np.flatnonzero(which == w)
            inside = address[chosen_here]
            segment = self.memory.segments[w] if w >= 0 else None
            outside = (
                np.ones(len(inside), bool) if segment is None else inside + np.uint64(size) > np.uint64(segment.end)
            )
            if outside.any():
                bad = int(chosen_here[np.flatnonzero(outside)[0]])
                at = int(address[bad])
                what = f"{size}-byte access at {at:#x} is out of bounds: {self.memory.nearest(at)}"
                self.fault_lane(what, bad, chosen)
            parts.append((segment, chosen_here, (inside - np.uint64(segment.base)).astype(np.int64)))
        return parts

    def load(self, space: str, address: np.ndarray, count: int, width: int, *, strong: str | None = None) -> np.ndarray:
        """[count, lanes] elements of `width` bytes, one address per active lane (compact, as `lanes`).

        `strong`: None for a weak access, or "relaxed.<scope>", "acquire.<scope>", "volatile".
        """
        size = count * width
        parts = self.resolve(space, address, size, size)
        if len(parts) == 1 and parts[0][1] is None:
            pool, _, offset = parts[0]
            if self.checker is not None:
                self.checker.read(pool, self.lanes, offset, size, strong)
                if pool is self.shared:
                    self.bank_conflicts(address, size)
            return pool.load(offset, count, width)
        out = np.zeros((count, len(address)), UINT[width])
        for pool, selection, offset in parts:
            if self.checker is not None:
                self.checker.read(pool, self.lanes[selection], offset, size, strong)
            out[:, selection] = pool.load(offset, count, width)
        return out

    def store(self, space: str, address: np.ndarray, values: np.ndarray, width: int, *, strong: str | None = None):
        """The same the other way: `values` is [count, lanes], unsigned of `width` bytes."""
        size = len(values) * width
        self.events += 1
        for pool, selection, offset in self.resolve(space, address, size, size):
            if pool is self.params or pool is self.constants:
                raise Fault(f"store to {pool.name} memory, which can't be written")
            lanes = self.lanes if selection is None else self.lanes[selection]
            chosen = values if selection is None else values[:, selection]
            if self.checker is not None:

                def repeats(pool=pool, offset=offset, chosen=chosen):
                    return (pool.load(offset, len(chosen), width) == chosen).all(0)

                self.checker.write(pool, lanes, offset, size, strong, repeats=repeats)
                if pool is self.shared and selection is None:
                    self.bank_conflicts(address, size)
            pool.store(offset, chosen, width)
            if self.checker is not None and len(lanes) > 1:
                self._same_values(pool, offset, lanes, (pool.load(offset, len(chosen), width) != chosen).any(0))

    def load_rows(self, space: str, address: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
        """Rows of 16 bytes of shared memory, one per active lane, or per lane of those `chosen` (positions in `lanes`).

        `address` is compact like `lanes` (like `chosen`). Returns [rows, 4] words.
        """
        address, offset, lanes = self._shared_rows(space, address, chosen)
        if self.checker is not None:
            self.checker.read(self.shared, lanes, offset, 16)
            self.bank_conflicts(address, 16, lanes)
        return self.shared.views[4].reshape(-1, 4).take(offset >> 4, axis=0)

    def store_rows(self, space: str, address: np.ndarray, rows: np.ndarray, chosen: np.ndarray | None = None):
        """The same the other way."""
        self.events += 1
        address, offset, lanes = self._shared_rows(space, address, chosen)
        if self.checker is not None:
            repeats = functools.partial(self._row_repeats, offset, rows)
            self.checker.write(self.shared, lanes, offset, 16, repeats=repeats)
            self.bank_conflicts(address, 16, lanes)
        memory = self.shared.views[4].reshape(-1, 4)
        memory[offset >> 4] = rows
        if self.checker is not None:
            self._same_values(self.shared, offset, lanes, (memory.take(offset >> 4, axis=0) != rows).any(1))

    def _shared_rows(self, space: str, address: np.ndarray, chosen) -> tuple:
        if space == "generic":
            outside = np.flatnonzero(address >> np.uint64(56) != SHARED_WINDOW >> 56)
            if len(outside):
                bad = int(outside[0])
                self.fault_lane(f"generic address {int(address[bad]):#x} is not in shared memory", bad, chosen)
            address = address & np.uint64(WINDOW_MASK)
        [(_, _, offset)] = self._resolve_pool(self.shared, address, 16, 16, chosen)
        return address, offset, self.lanes if chosen is None else self.lanes[chosen]

    def _row_repeats(self, offset: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return (self.shared.views[4].reshape(-1, 4).take(offset >> 4, axis=0) == rows).all(1)

    def _same_values(self, pool: Pool, offset: np.ndarray, lanes: np.ndarray, wrong: np.ndarray):
        if wrong.any():
            bad = int(np.flatnonzero(wrong)[0])
            raise self.located(
                Hazard(
                    f"two threads write different values to {pool.describe(int(offset[bad]))} in the same instruction"
                ),
                int(lanes[bad]),
            )

    def bank_conflicts(self, address: np.ndarray, size: int, lanes: np.ndarray | None = None):
        """Counts how often shared memory has to take more than one turn: 32 banks of 4 bytes; one turn serves 128 bytes
        of a warp, so that lanes of 8 (16) bytes go in two (four) parts; lanes at one word share it."""
        if self.checker is None or not len(address):
            return
        self.statistics["shared accesses"] += 1
        lanes = self.lanes if lanes is None else lanes
        # Loops repeat their patterns, and a shift by all banks changes nothing.
        pattern = address - (address[0] & ~np.uint64(127))
        key = hash((size, pattern.tobytes(), None if lanes is self.every_lane else lanes.tobytes()))
        extra = self.conflicts.get(key)
        if extra is None:
            extra = self.conflicts[key] = _conflicts(pattern, size, lanes)
        if extra:
            self.statistics["bank conflicts"] += extra
            self.statistics["bank conflicts", self.instruction.line] += extra

    # -- the order of things

    def resume(self, mask: np.ndarray, pc: int):
        """Makes these threads ready to run at `pc`."""
        if pc in self.ready:
            self.ready[pc] = self.ready[pc] | mask
        else:
            self.ready[pc] = mask

    def park(self, mask: np.ndarray, pc: int):
        """Takes these threads out: a barrier's completion will `unpark` them."""
        self.parked[pc] = self.parked[pc] | mask if pc in self.parked else mask

    def unpark(self, mask: np.ndarray, pc: int, following: int):
        """The threads of `mask` that are parked at `pc` go on at `following`."""
        rest = self.parked.pop(pc) & ~mask
        if rest.any():
            self.parked[pc] = rest
        self.events += 1
        self.resume(mask, following)

    def gather_warps(self, members: np.ndarray | None = None, *, exited: bool = False) -> bool:
        """For a collective at the present instruction: waits until the threads it names are here.

        `members`: bool per lane, whether the lane's warp expects it (None: every thread of the warp that exists).
        `exited`: threads that have exited are not waited for, as shfl.sync and its like have it; an .aligned
        instruction needs every thread.
        True: the mask now holds complete warps only, go on. False: none is complete yet; return STOP.
        """
        if members is None and not self.collecting and (self.full or self.whole >= 32):
            return True
        return self._gather(32, self.live if exited else self.exists, members)

    def gather_warpgroups(self) -> bool:
        """The same for the four warps of a warpgroup (PTX ISA 9.7.15.1), of which all threads must come."""
        if not self.collecting and self.whole == 128:
            return True
        return self._gather(128, self.exists, None)

    def _gather(self, width: int, expected: np.ndarray, members: np.ndarray | None) -> bool:
        pc = self.pc
        here = self.rows_of(self.mask, width)
        arrived = here.any(1)
        mask, waiting = self.mask, self.collecting.pop(pc, None)
        if waiting is not None:
            # Nothing has changed for collectives that none of these threads belongs to.
            staying = waiting & ~self._spread(arrived, width)
            if staying.any():
                self.collecting[pc] = staying
            mask = mask | (waiting & ~staying)
            here = self.rows_of(mask, width)
        if members is not None:
            expected = expected & members
        wanted = self.rows_of(expected, width) & arrived[:, None]
        missing = (wanted & ~here).any(1)
        if missing.any():
            gone = wanted & ~self.rows_of(self.live, width) & missing[:, None]
            if gone.any():
                lacking = self._spread(gone.any(1), width)
                lane = int(np.flatnonzero(lacking & expected & ~self.live)[0])
                raise self.located(
                    Fault(f"divergent collective: {self.name_lane(lane)} has exited, but is named by it"),
                    int(np.flatnonzero(lacking & mask)[0]),
                )
            waiting = mask & self._spread(missing, width)
            self.collecting[pc] = self.collecting[pc] | waiting if pc in self.collecting else waiting
            mask = mask & ~waiting
            if not mask.any():
                return False
        if mask is not self.mask:
            self.enter(mask)
        if members is None and not missing.any():
            absent = self.rows_of(self.exists, width) & arrived[:, None] & ~here
            self.whole = 0 if absent.any() else width
        return True

    def rows_of(self, mask: np.ndarray, width: int) -> np.ndarray:
        """A mask by warps (width 32) or warpgroups (128); a block's last warpgroup may lack warps."""
        lack = -self.warps * 32 % width
        if not lack:
            return mask.reshape(-1, width)
        padded = np.zeros((self.blocks, self.warps * 32 + lack), bool)
        padded[:, :-lack] = mask.reshape(self.blocks, -1)
        return padded.reshape(-1, width)

    def _spread(self, chosen: np.ndarray, width: int) -> np.ndarray:
        """The mask of all threads of the chosen warps or warpgroups."""
        lack = -self.warps * 32 % width
        mask = np.repeat(chosen, width)
        return mask.reshape(self.blocks, -1)[:, :-lack].reshape(-1) if lack else mask

    def defer(self, op: Async):
        """Hands work to its agent: done at once, or (under a seed) some time before somebody has waited for it."""
        if self.random is None or self.random.random() < 0.4:
            op.run()
        else:
            self.pending.append(op)

    def complete(self, wanted: Callable[[Async], bool]):
        """Finishes the unfinished operations that somebody waits for."""
        if self.pending:
            now = [op for op in self.pending if wanted(op)]
            self.pending = [op for op in self.pending if not any(op is o for o in now)]
            for op in now:
                op.run()
                self.events += 1

    def complete_some(self) -> bool:
        """Lets one unfinished asynchronous operation finish; False if there is none."""
        if not self.pending:
            return False
        op = self.pending.pop(0 if self.random is None else int(self.random.integers(len(self.pending))))
        op.run()
        self.events += 1
        return True

    def run(self):
        """Runs all threads to their ends.

        Raises:
            Fault, Hazard, Deadlock: with kernel, block, thread, PTX line and source line.
        """
        self.ready = {0: self.live.copy()}
        steps = self.program.steps
        with np.errstate(all="ignore"):
            try:
                while True:
                    pc = self.choose()
                    if pc is None:
                        break
                    while True:
                        self.pc = pc
                        self.step += 1
                        following = steps[pc](self)
                        if following is None:
                            pc += 1
                        elif following == STOP:
                            break
                        else:
                            pc = following
                        if pc in self.ready:
                            self.pc = pc
                            self.resume(self.mask, pc)
                            break
                self.complete(lambda op: True)
            except SimulationError as error:
                raise self.located(error, None) from None
            except UnsupportedInstruction as error:
                ins = self.instruction
                raise UnsupportedInstruction(f"PTX line {ins.line}: {ins.name}: {error}") from None

    def choose(self) -> int | None:
        """The next group: enters it, returns its program counter. None: all threads have exited."""
        while True:
            if self.random is not None and self.random.random() < 0.2:
                self.complete_some()
            if self.ready:
                break
            if self.complete_some():
                continue
            if self.polling:
                self.ready, self.polling = self.polling, {}
                break
            if self.parked or self.collecting:
                self.deadlock()
            return None
        if self.random is None:
            pc = min(self.ready)
            mask = self.ready.pop(pc)
        else:
            pcs = sorted(self.ready)
            pc = pcs[int(self.random.integers(len(pcs)))]
            mask = self.ready.pop(pc)
            if self.random.random() < 0.3:
                warps = mask.reshape(-1, 32).any(1)
                drawn = warps & (self.random.random(len(warps)) < 0.5)
                if drawn.any() and (drawn != warps).any():
                    chosen = mask & np.repeat(drawn, 32)
                    self.ready[pc] = mask & ~chosen
                    mask = chosen
        self.enter(mask)
        self.pc = pc
        return pc

    def poll(self, mask: np.ndarray, pc: int):
        """These threads go back to look again; others run first."""
        if self.events != self.events_at_poll:
            self.idle_polls = 0
        else:
            self.idle_polls += 1
            if self.idle_polls > MAX_POLLS:
                self.polling[pc] = mask
                self.deadlock()
        self.events_at_poll = self.events
        self.polling[pc] = self.polling[pc] | mask if pc in self.polling else mask

    def exit(self):
        """The active threads end."""
        self.live = self.live & ~self.mask
        if self.collecting:
            # A collective may have waited for just these; it looks again.
            for pc, mask in self.collecting.items():
                self.resume(mask, pc)
            self.collecting = {}
        for hook in self.exit_hooks:
            hook(self, self.mask)

    # -- words

    @property
    def instruction(self):
        return self.kernel.instructions[min(self.pc, len(self.kernel.instructions) - 1)]

    def name_warp(self, warp: int) -> str:
        return f"warp {warp % self.warps} of block {self.name_block(warp // self.warps)}"

    def name_block(self, block: int) -> str:
        gx, gy, _ = self.grid
        b = int(self.block_ids[block])
        return f"({b % gx}, {b // gx % gy}, {b // (gx * gy)})"

    def name_lane(self, lane: int) -> str:
        thread = int(self.thread_of[lane])
        block = self.name_block(int(self.block_of[lane]))
        return f"thread {thread} (warp {thread // 32}, lane {thread % 32}) of block {block}"

    def where(self, pc: int) -> str:
        ins = self.kernel.instructions[min(pc, len(self.kernel.instructions) - 1)]
        source = ""
        if ins.source:
            name = self.kernel.module.files.get(ins.source[0], f"file {ins.source[0]}")
            source = f", source {name.rsplit('/', 1)[-1]}:{ins.source[1]}"
        return f"PTX line {ins.line} `{ins.text[:100]}`{source}"

    def fault_lane(self, message: str, index: int, chosen=None):
        """A Fault of the index-th active lane (of those `chosen`)."""
        lanes = self.lanes if chosen is None else self.lanes[chosen]
        raise self.located(Fault(message), int(lanes[index]))

    def located(self, error: SimulationError, lane: int | None) -> SimulationError:
        """The error with kernel, block, thread, PTX line and source line; once only."""
        if getattr(error, "located", False):
            return error
        who = (
            self.name_lane(lane) if lane is not None else self.name_lane(int(self.lanes[0])) + " or a thread beside it"
        )
        found = type(error)(f"{error}\n  in {self.kernel.name}, {who}\n  at {self.where(self.pc)}")
        found.located = True
        return found

    def deadlock(self):
        lines = ["no thread can go on:"]
        kinds = (("wait", self.parked), ("wait for the rest of its warp", self.collecting), ("poll", self.polling))
        for verb, groups in kinds:
            for pc, mask in sorted(groups.items()):
                explain = self.program.explain.get(pc)
                lanes = np.flatnonzero(mask)
                for block in np.unique(self.block_of[lanes])[:2]:
                    here = lanes[self.block_of[lanes] == block]
                    words = explain(self, here) if explain else ""
                    lines.append(
                        f"  block {self.name_block(int(block))}: threads {_ranges(self.thread_of[here])} {verb} at "
                        f"{self.where(pc)}{': ' + words if words else ''}"
                    )
        exited = self.exists & ~self.live
        for block in np.unique(self.block_of[exited])[:2]:
            here = np.flatnonzero(exited & (self.block_of == block))
            lines.append(f"  block {self.name_block(int(block))}: threads {_ranges(self.thread_of[here])} have exited")
        error = Deadlock("\n".join(lines) + f"\n  in {self.kernel.name}")
        error.located = True
        raise error


def _conflicts(address: np.ndarray, size: int, lanes: np.ndarray) -> int:
    """The turns beyond the first of every part of a warp that is served at once. Addresses may be negative.

    An access is aligned to its size, so that it fills its banks alone: they count as one that is as wide.
    """
    count = max(size // 4, 1)
    banks = 32 // count
    unit = address.view(np.int64) >> (4 * count).bit_length() - 1
    least = int(unit.min())
    unit -= least - least % banks
    units = int(unit.max()) + 1
    key = (lanes // banks * banks + unit % banks) * units + unit
    key.sort()
    bank = key[np.diff(key, prepend=-1) != 0] // units  # lanes at one word count once
    begins = np.flatnonzero(np.diff(bank, prepend=-1))
    if len(begins) == len(bank):
        return 0
    turns, part = np.diff(begins, append=len(bank)), bank[begins] // banks
    first = np.flatnonzero(np.diff(part, prepend=-1))
    return int((np.maximum.reduceat(turns, first) - 1).sum())


def _ranges(numbers) -> str:
    """0-3, 7, 9-11"""
    out, start, last = [], None, None
    for x in [*sorted(int(i) for i in numbers), None]:
        if start is not None and x != last + 1:
            out.append(str(start) if start == last else f"{start}-{last}")
            start = x
        elif start is None:
            start = x
        last = x
    return ", ".join(out)
