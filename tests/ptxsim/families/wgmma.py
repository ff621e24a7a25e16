"""wgmma: asynchronous matrix products of a warpgroup (PTX ISA 9.7.15).

wgmma.mma_async hands its work to an agent of the warpgroup, which does it in the order of issue, at once or (under a
seed) some time before it is waited for. Until wgmma.wait_group has waited, its registers belong to it: the accumulators
hold nothing, and touching them or the A fragment is a fault (9.7.15.7.3). Results reach the registers at the wait.

A register that threads have accessed is ordered before a wgmma.mma_async by wgmma.fence alone (9.7.15.7.1), except
that wgmma.mma_async of one shape follow each other on their accumulators. A mov of a register or constant is no access
of its own: compilers put them between a fence and its wgmma, since it is ptxas which decides whether two registers of
PTX are one; the copy counts as accessed by whatever made its source. Shared memory is read through the
asynchronous proxy (9.7.15.4); what the four warps know orders it, and completion is known to who waits.
"""

from __future__ import annotations

import functools
import re

import numpy as np

from ..decode import STOP, Decoder, Step, instruction
from ..errors import Fault, Hazard
from ..machine import Async
from ..ptx import Imm, Instruction, Kernel, Mem, Pair, Reg, Vec
from .matrix import BYTES, element_type, gather, registers, values

_SHAPE = re.compile(r"m64n(\d+)k(\d+)$")
_INTEGER_WIDTHS = {8, 16, 24, 32, *range(48, 257, 16)}
# swizzle field of a descriptor -> bytes of a row of the pattern
_SWIZZLE = {0: 16, 3: 32, 2: 64, 1: 128}


# -- shared memory operands (9.7.15.5.1.2)


@functools.lru_cache(maxsize=1024)
def chunk_offsets(row_bytes: int, leading: int, stride: int, extent: int, k_major: bool) -> np.ndarray:
    """Byte offsets from the start of a matrix, before swizzling, of its pieces of 16 bytes.

    K-major: [extent, 2], two pieces of each row of 32 bytes of k; eight rows lie `row_bytes` apart, then `stride`.
    MN-major (16-bit elements): [extent / 8, 16], piece p of column k; rows of a pattern hold row_bytes / 16 pieces.

                      next 16 bytes                       leading                      stride
      K, no swizzle   (a row of the pattern is 16 bytes)  next 16 bytes of k           next 8 rows
      K, swizzled     within the pattern's row            unused                       next 8 rows
      MN, no swizzle  (a row of the pattern is 16 bytes)  next 8 k                     next 8 elements
      MN, swizzled    within the pattern's row            next row_bytes of elements   next 8 k
    """
    if k_major:
        row, piece = np.arange(extent)[:, None], np.arange(2)
        return row % 8 * row_bytes + row // 8 * stride + piece * (leading if row_bytes == 16 else 16)
    piece, k = np.arange(extent // 8)[:, None], np.arange(16)
    if row_bytes == 16:
        return piece * stride + k % 8 * 16 + k // 8 * leading
    per_row = row_bytes // 16
    return piece % per_row * 16 + piece // per_row * leading + k % 8 * row_bytes + k // 8 * stride


def addresses(descriptor: int, extent: int, k_major: bool) -> np.ndarray:
    """The shared memory addresses of a matrix's pieces of 16 bytes (9.7.15.5.1.2.2, "Matrix Descriptor Format")."""
    if descriptor & 0x3FF1_C000_C000_C000:
        raise Fault(f"matrix descriptor {descriptor:#x} has reserved bits set")
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    base = descriptor >> 49 & 7
    row_bytes = _SWIZZLE[descriptor >> 62]
    address = start + chunk_offsets(row_bytes, leading, stride, extent, k_major)
    # The pattern permutes the 16-byte pieces of 128 bytes by the number of the 128 bytes in it, which is the address's
    # own unless a base offset says where the pattern starts.
    turn = (address >> 7) - base & (row_bytes // 16 - 1)
    return address ^ turn << 4


# -- the state of a machine's warpgroups


class _User:
    """The registers of an operand, in flight for some warpgroups: a chain of products on one set of accumulators, or
    reads of one A fragment."""

    def __init__(self, key: tuple[int, ...], what: str, positions: np.ndarray, groups: int):
        self.key, self.what, self.positions = key, what, positions
        self.last = np.zeros(groups, np.int64)  # the step at which its last wgmma was issued; 0: not in flight
        self.line = np.zeros(groups, np.int64)
        self.rivals: list[_User] = []  # others that share registers with it and may not be in flight at the same time
        self.buffer: np.ndarray | None = None  # [groups, 64, N], of accumulators
        self.kind = ""


def _operands(kernel: Kernel):
    """(accumulators, A fragment or (), shape) of every wgmma.mma_async."""
    for ins in kernel.instructions:
        if ins.opcode == "wgmma" and "mma_async" in ins.modifiers and len(ins.operands) > 1:
            shape = next((word for word in ins.modifiers if _SHAPE.match(word)), "")
            keys = [
                tuple(r.index for r in getattr(operand, "items", ()) if isinstance(r, Reg))
                for operand in ins.operands[:2]
            ]
            yield *keys, shape


def _copy(ins: Instruction) -> tuple[int, int | None] | None:
    """(destination, source or None for a constant) of a mov of a whole 32-bit register."""
    if ins.opcode != "mov" or not isinstance(ins.operands[0], Reg) or ins.operands[0].bytes != 4:
        return None
    source = ins.operands[1]
    if isinstance(source, Imm):
        return ins.operands[0].index, None
    return (ins.operands[0].index, source.index) if isinstance(source, Reg) else None


def _register_order(kernel: Kernel) -> dict[int, int]:
    """The registers that belong to a wgmma at times, and those that are copied to them, numbered."""
    every = {index for d, a, _ in _operands(kernel) for index in (*d, *a)}
    copies = [copy for copy in map(_copy, kernel.instructions) if copy is not None and copy[1] is not None]
    grows = True
    while grows:
        more = {source for to, source in copies if to in every} - every
        every |= more
        grows = bool(more)
    return {index: n for n, index in enumerate(sorted(every))}


class _Plan:
    """What a kernel's instructions say about registers."""

    def __init__(self, kernel: Kernel):
        self.order = _register_order(kernel)
        self.shapes: dict[str, int] = {}  # to negative numbers
        users: dict[tuple, None] = {}
        for d, a, shape in _operands(kernel):
            self.shapes.setdefault(shape, -1 - len(self.shapes))
            for key, what in ((d, "accumulator"), (a, "A fragment")):
                if key:
                    users[key, what] = None
        self.users = list(users)
        self.positions = [np.array([self.order[index] for index in key])[:, None] for key, _ in users]
        self.rivals = [
            [
                n
                for n, (other, what_else) in enumerate(users)
                if (other, what_else) != (key, what)
                and not what == what_else == "A fragment"
                and not set(key).isdisjoint(other)
            ]
            for key, what in users
        ]
        self.of = {index: [n for n, (key, _) in enumerate(users) if index in key] for index in self.order}


class _Warpgroups:
    def __init__(self, m):
        rows = m.rows_of(m.exists, 128)
        self.count = len(rows)
        self.whole = rows.all(1)
        per_block = self.count // m.blocks
        warps = np.arange(self.count)[:, None] % per_block * 4 + np.arange(4)
        block = np.arange(self.count) // per_block
        self.block = block
        self.lanes = ((block[:, None] * m.warps + warps)[:, :, None] * 32 + np.arange(32)).reshape(self.count, 128)
        self.fenced = np.zeros(self.count, bool)
        self.flying = 0  # (user, warpgroup) pairs in flight
        plan = m.program.notes.get("wgmma")
        if plan is None:
            plan = m.program.notes["wgmma"] = _Plan(m.kernel)
        users = [_User(*key, at, self.count) for key, at in zip(plan.users, plan.positions, strict=True)]
        for user, rivals in zip(users, plan.rivals, strict=True):
            user.rivals = [users[n] for n in rivals]
        self.order, self.shapes = plan.order, plan.shapes
        self.users = dict(zip(plan.users, users, strict=True))
        self.of = {index: [users[n] for n in numbers] for index, numbers in plan.of.items()}
        # Since the last wgmma.fence, per register and warpgroup: 0 no access, n > 0 a thread's access by instruction
        # n - 1, < 0 an accumulator of a wgmma of that shape.
        self.touched = np.zeros((len(self.order), self.count), np.int32)
        self.commits = np.zeros((16, self.count), np.int64)  # the steps of commit_group
        self.committed = np.zeros(self.count, np.int64)
        self.queue: list[_Product] = []
        self.tiles: dict[tuple, np.ndarray] = {}
        self.reads: dict[tuple, object] = {}  # what the checker works out once for each set of tiles
        self.columns = None
        if m.checker is not None:
            self.columns = np.array(
                [m.checker.new_column(int(block[g]), f"wgmma of warpgroup {g % per_block}") for g in range(self.count)]
            )
        self._mask = self._groups = None

    def active(self, m) -> np.ndarray:
        """The warpgroups that have an active thread."""
        if m.mask is not self._mask:
            self._mask, self._groups = m.mask, np.flatnonzero(m.rows_of(m.mask, 128).any(1))
        return self._groups

    def complete(self, m) -> np.ndarray:
        """The active warpgroups, after `gather_warpgroups`."""
        groups = self.active(m)
        if not self.whole[groups].all():
            short = groups[~self.whole[groups]][0]
            raise Fault(
                f"{m.instruction.name} needs a warpgroup of four whole warps, but the last one of block "
                f"{m.name_block(int(self.block[short]))} has fewer than 128 threads"
            )
        return groups

    def name(self, m, group: int) -> str:
        return f"warpgroup {group % (self.count // m.blocks)} of block {m.name_block(int(self.block[group]))}"

    def uniform(self, m, value, groups, what: str) -> np.ndarray:
        """One value per warpgroup of an operand that all its threads must give alike."""
        if np.ndim(value) == 0:
            return np.full(len(groups), value)
        rows = value[self.lanes[groups]]
        if (rows != rows[:, :1]).any():
            row, at = (int(x[0]) for x in np.nonzero(rows != rows[:, :1]))
            lane = int(self.lanes[groups[row], at])
            raise m.located(Fault(f"{what} differs between the threads of a warpgroup"), lane)
        return rows[:, 0]

    # -- registers

    def touch(self, m, indices: tuple[int, ...], positions: np.ndarray, writes: frozenset[int], copy: tuple | None):
        """The active threads access these registers by an ordinary instruction; `copy`: by a mov."""
        groups = self.active(m)
        if self.flying:
            for index in indices:
                for user in self.of[index]:
                    held = user.last[groups] > 0
                    if held.any():
                        self.fault(m, user, index, int(groups[held][0]), "written" if index in writes else "read")
        if m.checker is None:
            return
        if copy is None:
            self.touched[positions, groups] = m.pc + 1
        elif copy[0] in self.order:
            since = 0 if copy[1] is None else self.touched[self.order[copy[1]], groups]
            self.touched[self.order[copy[0]], groups] = since

    def fault(self, m, user: _User, index: int, group: int, how: str):
        name = m.kernel.registers[index].name
        lanes = self.lanes[group]
        raise m.located(
            Fault(
                f"{user.what} {name} is {how} while the wgmma of PTX line {int(user.line[group])} is in flight: no "
                "wgmma.wait_group has waited for it"
            ),
            int(lanes[m.mask[lanes]][0]),
        )

    def claim(self, m, user: _User, groups: np.ndarray, shape: str):
        """A wgmma takes these registers: they must be free, and ordered by a fence."""
        for rival in user.rivals:
            held = rival.last[groups] > 0
            if held.any():
                index = next(index for index in user.key if index in rival.key)
                self.fault(m, rival, index, int(groups[held][0]), "used by another wgmma in another way")
        if m.checker is not None:
            since = self.touched[user.positions, groups]
            code = self.shapes[shape] if user.what == "accumulator" else 0
            bad = (since != 0) & (since != code)
            if bad.any():
                self.unfenced(m, user, bad, since, groups, shape)
            if user.what == "accumulator":
                self.touched[user.positions, groups] = code

    def unfenced(self, m, user: _User, bad, since, groups, shape: str):
        which = np.flatnonzero(bad.any(1))
        group = int(np.flatnonzero(bad[which[0]])[0])
        names = [m.kernel.registers[user.key[i]].name for i in which]
        by = int(since[which[0], group])
        if by > 0:
            who = f"PTX line {m.kernel.instructions[by - 1].line} `{m.kernel.instructions[by - 1].text[:60]}`"
        else:
            who = "a wgmma of shape " + next(s for s, code in self.shapes.items() if code == by)
        raise m.located(
            Hazard(
                f"wgmma of shape {shape} uses {user.what} {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}, "
                f"accessed by {who}, without a wgmma.fence in between"
            ),
            int(self.lanes[groups[group], 0]),
        )

    def fly(self, m, user: _User, groups: np.ndarray):
        self.flying += int((user.last[groups] == 0).sum())
        user.last[groups] = m.step
        user.line[groups] = m.instruction.line

    # -- shared memory

    def tile(self, m, descriptors: np.ndarray, groups: np.ndarray, extent: int, k_major: bool) -> np.ndarray:
        """[warpgroups, pieces]: byte offsets of an operand's pieces of 16 bytes in the pool of shared memory."""
        key = (descriptors.tobytes(), groups.tobytes(), extent, k_major)
        offsets = self.tiles.get(key)
        if offsets is None:
            of = {d: addresses(d, extent, k_major) for d in {int(x) for x in descriptors}}
            address = np.stack([of[int(x)].reshape(-1) for x in descriptors])
            if int(address.max()) + 16 > m.shared.limit:
                row = int(address.max(1).argmax())
                raise m.located(
                    Fault(
                        f"matrix descriptor {int(descriptors[row]):#x} reaches address {int(address.max()):#x} of "
                        f"shared memory, which has {m.shared.limit} bytes"
                    ),
                    int(self.lanes[groups[row], 0]),
                )
            offsets = self.tiles[key] = address + self.block[groups][:, None] * m.shared.stride
        return offsets

    def read(self, m, tiles: list[np.ndarray], groups: np.ndarray):
        """Shows the checker that the agents read these tiles. All four warps must know of the writes."""
        key = tuple(id(tile) for tile in tiles)  # `self.tiles` keeps them
        made = self.reads.get(key)
        if made is None:
            offsets = np.concatenate(tiles, 1)
            made = self.reads[key] = m.checker.prepared(m.shared, offsets, 16, self.columns[groups])
        m.checker.async_read_for_all(m.shared, self.lanes[groups, ::32], made)

    def until(self, groups: np.ndarray, pending: int) -> np.ndarray:
        """The step of the newest commit that all but `pending` of the newest groups include; 0 for none."""
        at = self.committed[groups] - pending - 1
        return np.where(at >= 0, self.commits[np.maximum(at, 0), groups], 0)


def warpgroups(m) -> _Warpgroups:
    if "wgmma" not in m.state:
        m.state["wgmma"] = _Warpgroups(m)
    return m.state["wgmma"]


# -- wgmma.mma_async (9.7.15.5.2)


class _Product:
    """One wgmma.mma_async of some warpgroups, to be done by their agents."""

    def __init__(self, m, spec: _Spec, user: _User, groups, a, b, scale, fresh, start):
        self.m, self.spec, self.user, self.groups = m, spec, user, groups
        self.a, self.b = a, b  # A: [warpgroups, 64, K] from registers, or the offsets of its pieces, as B's always are
        self.scale = scale  # per warpgroup: whether to add to what the accumulators hold
        self.fresh, self.start = fresh, start  # which warpgroups begin, and what their registers held
        self.done = False

    def run(self):
        """Does the work, after that of the same warpgroups which was issued before."""
        queue = warpgroups(self.m).queue
        for product in queue[: queue.index(self) + 1] if not self.done else ():
            if product is self or np.isin(product.groups, self.groups).any():
                product.work()
        warpgroups(self.m).queue = [product for product in queue if not product.done]

    def operand(self, offsets: np.ndarray, kind: str, extent: int, k_major: bool) -> np.ndarray:
        """[warpgroups, extent, K]"""
        rows = self.m.shared.views[4].reshape(-1, 4).take(offsets >> 4, axis=0)
        if k_major:
            raw = rows.view(f"u{BYTES[kind]}").reshape(len(offsets), extent, -1)
            return values(kind, raw)
        raw = rows.view(np.uint16).reshape(len(offsets), extent // 8, 16, 8).swapaxes(2, 3)
        return values(kind, np.ascontiguousarray(raw).reshape(len(offsets), extent, 16))

    def work(self):
        spec, groups = self.spec, self.groups
        a = self.a if self.a.ndim == 3 else self.operand(self.a, spec.kind_a, 64, not spec.transpose_a)
        b = self.operand(self.b, spec.kind_b, spec.n, not spec.transpose_b)
        if spec.negative:
            a = -a
        product = np.matmul(a, b.transpose(0, 2, 1))
        self.m.statistics["products"] += len(groups)
        every = len(groups) == len(self.user.buffer)
        before = self.user.buffer if every else self.user.buffer[groups]
        if not self.scale.any():
            before = np.zeros((), before.dtype)
        else:
            if self.start is not None:
                before[self.fresh] = self.start
            if not self.scale.all():
                before[~self.scale] = 0
        total = spec.add(before, product)
        if every:
            self.user.buffer = total
        else:
            self.user.buffer[groups] = total
        self.done = True


class _Spec:
    """What the modifiers and constants of a wgmma.mma_async say."""

    def __init__(self, d: Decoder):
        shape = d.choice(*(word for word in d.left if _SHAPE.match(word)))
        if shape is None:
            d.fail("expected a shape .m64nNkK")
        self.shape = shape
        self.n, k = (int(x) for x in _SHAPE.match(shape).groups())
        self.saturate = d.flag("satfinite")
        self.to = element_type(d, "f32", "f16", "s32")
        self.kind_a = element_type(d, *BYTES)
        self.kind_b = element_type(d, *BYTES)
        self.check_types(d, k)
        self.d = registers(d, 0, self.n // (4 if self.to == "f16" else 2), 4)
        self.from_registers = isinstance(d.operand(1), Vec)
        self.a = registers(d, 1, 4, 4) if self.from_registers else None
        rest = list(range(4, len(d.ins.operands)))
        constants = [d.constant(which) for which in rest]
        wanted = 0
        if self.to != "s32":
            wanted += 2
        if BYTES[self.kind_a] == 2:
            wanted += 1 if self.from_registers else 2
        if len(d.ins.operands) != 4 + wanted:
            d.fail(f"expected {4 + wanted} operands, got {len(d.ins.operands)}")
        signs, transposes = constants[:2] if self.to != "s32" else (), constants[2:]
        if not all(sign in (1, -1) for sign in signs) or not all(t in (0, 1) for t in transposes):
            d.fail("imm-scale must be 1 or -1, imm-trans 0 or 1")
        self.negative = len(signs) == 2 and signs[0] * signs[1] < 0
        self.transpose_b = bool(transposes) and transposes[-1] == 1
        self.transpose_a = len(transposes) == 2 and transposes[0] == 1

    def check_types(self, d: Decoder, k: int):
        """The combinations of 9.7.15.5.2."""
        a, b = self.kind_a, self.kind_b
        if a in ("s8", "u8"):
            good = b in ("s8", "u8") and self.to == "s32"
        elif a in ("e4m3", "e5m2"):
            good = b in ("e4m3", "e5m2") and self.to in ("f16", "f32")
        elif a == "f16":
            good = b == "f16" and self.to in ("f16", "f32")
        else:
            good = a == b and a in ("bf16", "tf32") and self.to == "f32"
        if not good or k * BYTES[a] != 32:
            d.fail(f"shape .{self.shape} of .{self.to}.{a}.{b} doesn't exist")
        if self.n % 8 or not 8 <= self.n <= 256 or (self.to == "s32" and self.n not in _INTEGER_WIDTHS):
            d.fail(f"N = {self.n} doesn't exist for .{a}")
        if self.saturate and self.to != "s32":
            d.fail(".satfinite needs .s32")

    def add(self, before, product: np.ndarray) -> np.ndarray:
        if self.to == "s32":
            total = before + product.astype(np.int64)
            if self.saturate:
                total = np.clip(total, -(2**31), 2**31 - 1)
            return total.astype(np.int32)
        product += before
        return product.astype(np.float16).astype(np.float32) if self.to == "f16" else product


@functools.lru_cache(maxsize=32)
def _elements(count: int, n: int) -> np.ndarray:
    """Where element i of the accumulators of each lane lies in [count, 64, n]: [n / 2, 128 count] (9.7.15.5.1.1). For
    each warp's 16 rows and each 8 columns it is the fragment of mma."""
    place = np.arange(count * 64 * n).reshape(count, 4, 2, 8, n // 8, 4, 2)
    return np.ascontiguousarray(place.transpose(4, 2, 6, 0, 1, 3, 5)).reshape(n // 2, -1)


def _load(m, spec: _Spec, lanes: np.ndarray) -> np.ndarray:
    """The accumulators as [warpgroups, 64, N]."""
    words = np.concatenate([m.regs[i].view(np.uint32) for i in spec.d]).reshape(len(spec.d), m.n)
    if lanes.size < m.n:
        words = words[:, lanes.reshape(-1)]
    if spec.to == "f16":
        halves = np.ascontiguousarray(words).view(np.float16).reshape(len(spec.d), -1, 2).astype(np.float32)
        elements = halves.transpose(0, 2, 1).reshape(spec.n // 2, -1)
    else:
        elements = words.view(np.int32 if spec.to == "s32" else np.float32)
    matrix = np.empty((len(lanes), 64, spec.n), elements.dtype)
    matrix.reshape(-1)[_elements(len(lanes), spec.n)] = elements
    return matrix


def _store(m, key: tuple[int, ...], kind: str, matrix: np.ndarray, lanes: np.ndarray):
    """The reverse of `_load`."""
    elements = matrix.reshape(-1).take(_elements(len(matrix), matrix.shape[-1]))
    if kind == "f16":
        halves = elements.astype(np.float16).reshape(len(key), 2, -1).transpose(0, 2, 1)
        words = np.ascontiguousarray(halves).view(np.uint32)[:, :, 0]
    else:
        words = elements.view(np.uint32)
    lanes = lanes.reshape(-1)
    if len(lanes) < m.n:
        joined = np.concatenate([m.regs[i].view(np.uint32) for i in key]).reshape(len(key), m.n)
        first, last = int(lanes[0]), int(lanes[-1])
        joined[:, slice(first, last + 1) if last - first + 1 == len(lanes) else lanes] = words
        words = joined
    for index, row in zip(key, words, strict=True):
        m.regs[index] = row


def _mma_async(d: Decoder) -> Step:
    spec = _Spec(d)
    of_a = None if spec.from_registers else d.get(1, "b64")
    of_b, of_scale = d.get(2, "b64"), d.get(3, "pred")
    following = d.next

    def step(m):
        if not m.gather_warpgroups():
            return STOP
        state = warpgroups(m)
        groups = state.complete(m)
        lanes = state.lanes[groups]
        if m.checker is not None and not state.fenced[groups].all():
            first = int(groups[~state.fenced[groups]][0])
            raise Hazard(f"{state.name(m, first)} has executed no wgmma.fence before its first wgmma.mma_async")
        scale = state.uniform(m, of_scale(m), groups, "scale-d").astype(bool)
        b = state.tile(
            m, state.uniform(m, of_b(m), groups, "B's matrix descriptor"), groups, spec.n, not spec.transpose_b
        )
        touched = [b]
        if spec.from_registers:
            fragment = state.users[spec.a, "A fragment"]
            state.claim(m, fragment, groups, spec.shape)
            a = gather(m, spec.a, 2, spec.kind_a, lanes[:, ::32].reshape(-1) >> 5).reshape(len(groups), 64, -1)
        else:
            descriptors = state.uniform(m, of_a(m), groups, "A's matrix descriptor")
            a = state.tile(m, descriptors, groups, 64, not spec.transpose_a)
            touched.append(a)
        user = state.users[spec.d, "accumulator"]
        state.claim(m, user, groups, spec.shape)
        if m.checker is not None:
            state.read(m, touched, groups)
        fresh = user.last[groups] == 0
        start = None
        if (fresh & scale).any():
            start = _load(m, spec, lanes[fresh])
        if user.buffer is None:
            user.buffer = np.zeros((state.count, 64, spec.n), np.int32 if spec.to == "s32" else np.float32)
            user.kind = spec.to
        product = _Product(m, spec, user, groups, a, b, scale, fresh, start)
        state.fly(m, user, groups)
        if spec.from_registers:
            state.fly(m, fragment, groups)
        state.queue.append(product)
        m.defer(Async(product.run, "wgmma", m.mask, m.step, key=product))
        return following

    step.explain = _explain
    return step


def _explain(m, lanes):
    """Which warps a warpgroup lacks."""
    here = np.isin(np.arange(m.n), lanes)
    group = np.flatnonzero(m.rows_of(here, 128).any(1))[0]
    missing = np.flatnonzero(~m.rows_of(here, 128)[group].reshape(4, 32).all(1)) + group % (-(-m.warps // 4)) * 4
    return f"a warpgroup executes it together; not there: warps {', '.join(str(int(w)) for w in missing)}"


# -- wgmma.fence, commit_group, wait_group (9.7.15.7)


def _fence(d: Decoder) -> Step:
    following = d.next

    def step(m):
        if not m.gather_warpgroups():
            return STOP
        state = warpgroups(m)
        groups = state.complete(m)
        state.fenced[groups] = True
        state.touched[:, groups] = 0
        return following

    step.explain = _explain
    return step


def _commit_group(d: Decoder) -> Step:
    following = d.next

    def step(m):
        if not m.gather_warpgroups():
            return STOP
        state = warpgroups(m)
        groups = state.complete(m)
        if int(state.committed[groups].max()) >= len(state.commits):
            state.commits = np.concatenate([state.commits, np.zeros_like(state.commits)])
        state.commits[state.committed[groups], groups] = m.step
        state.committed[groups] += 1
        return following

    step.explain = _explain
    return step


def _wait_group(d: Decoder) -> Step:
    pending, following = d.constant(0), d.next
    if pending < 0:
        d.fail(f"{pending} groups: expected 0 or more")

    def step(m):
        if not m.gather_warpgroups():
            return STOP
        state = warpgroups(m)
        groups = state.complete(m)
        until = state.until(groups, pending)
        if m.pending:
            limit = np.zeros(state.count, np.int64)
            limit[groups] = until
            m.complete(lambda op: op.kind == "wgmma" and bool((limit[op.key.groups] >= op.step).any()))
        for user in state.users.values():
            last = user.last[groups]
            over = groups[(last > 0) & (last <= until)]
            if len(over):
                if user.what == "accumulator":
                    _store(m, user.key, user.kind, user.buffer[over], state.lanes[over])
                user.last[over] = 0
                state.flying -= len(over)
        if m.checker is not None:
            columns, steps = (np.repeat(x, 128) for x in (state.columns[groups], until))
            m.checker.agent_done(state.lanes[groups].reshape(-1), columns, steps)
        return following

    step.explain = _explain
    return step


@instruction("wgmma", control=True)
def wgmma(d: Decoder):
    what = d.choice("mma_async", "fence", "commit_group", "wait_group")
    if what is None:
        d.fail("expected .mma_async, .fence, .commit_group or .wait_group")
    if not (d.flag("sync") and d.flag("aligned")):
        d.fail("expected .sync.aligned")
    return {"mma_async": _mma_async, "fence": _fence, "commit_group": _commit_group, "wait_group": _wait_group}[what](d)


# -- every other instruction of a kernel that has wgmma


def _named(operand):
    """The registers within an operand."""
    if isinstance(operand, Reg):
        yield operand.index
    elif isinstance(operand, Vec):
        for item in operand.items:
            yield from _named(item)
    elif isinstance(operand, Mem):
        yield from _named(operand.base)
        for item in operand.more:
            yield from _named(item)
    elif isinstance(operand, Pair):
        yield from _named(operand.first)
        yield from _named(operand.second)


def wrapper(kernel: Kernel):
    """Lays a look at the registers in flight around the instructions that name any; None if the kernel has no wgmma."""
    if "wgmma" not in kernel.opcodes():
        return None
    order = _register_order(kernel)

    def wrap(d: Decoder, step: Step) -> Step:
        ins = d.ins
        indices = tuple({i for operand in ins.operands for i in _named(operand) if i in order})
        if ins.opcode == "wgmma" or not indices:
            return step
        positions = np.array([order[i] for i in indices])[:, None]
        first, copy = ins.operands[0], _copy(ins)
        writes = frozenset() if isinstance(first, Mem) else frozenset(_named(first))

        def run(m):
            state = m.state.get("wgmma")
            if state is not None:
                state.touch(m, indices, positions, writes, copy)
            return step(m)

        return run

    return wrap
