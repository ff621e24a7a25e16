"""Exchange between the threads of a warp: shfl.sync (PTX ISA 9.7.9.6), vote.sync (9.7.13.9), match.sync (9.7.13.10),
activemask (9.7.13.11), redux.sync (9.7.13.12) and elect.sync (9.7.13.14).

They wait for the threads of their member mask that have not exited (elect.sync: for all of them), and order no memory
accesses, so that the hazard checker learns nothing here.
"""

from __future__ import annotations

import numpy as np

from ..decode import STOP, Decoder, instruction
from ..ptx import Imm, Pair
from .barrier import named

_LANE = np.arange(32, dtype=np.int64)
_BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)
_FULL = np.uint32(0xFFFFFFFF)


class _Members:
    """A membermask operand. A constant that names all 32 lanes costs nothing."""

    def __init__(self, d: Decoder, which: int):
        operand = d.operand(which)
        self.everyone = isinstance(operand, Imm) and d.constant(which) & 0xFFFFFFFF == 0xFFFFFFFF
        self.value = d.get(which, "u32")

    def gather(self, m, *, exited: bool = True) -> bool:
        return m.gather_warps(None if self.everyone else named(m, self.value(m)), exited=exited)

    def bits(self, m) -> np.ndarray:
        """[warps, 32] of each lane: the lanes of its mask that take part, as bits."""
        here = (m.mask.reshape(-1, 32) * _BIT).sum(1, dtype=np.uint32)[:, None]
        given = self.value(m)
        return here & (given if np.ndim(given) == 0 else given.reshape(-1, 32))

    def matrix(self, m) -> np.ndarray:
        """[warps, 32, 32]: at [w, j, i], whether lane j's set includes lane i."""
        return (np.broadcast_to(self.bits(m), (m.n // 32, 32))[:, :, None] & _BIT) != 0


def _by_warp(m, value) -> np.ndarray:
    return np.broadcast_to(value, m.n).reshape(-1, 32)


def _sync(d: Decoder):
    if not d.flag("sync"):
        d.fail("only the .sync form is known")


def _targets(d: Decoder):
    """d or d|p: a function that writes both."""
    operand = d.operand(0)
    if not isinstance(operand, Pair):
        return d.put(operand), None
    return d.put(operand.first), d.put(operand.second)


# -- shfl.sync (9.7.9.6)


def _source(mode: str, b, c) -> tuple[np.ndarray, np.ndarray]:
    """The lane each lane reads from, and whether that lies within its segment; b and c broadcast to [..., 32]."""
    b, c = np.asarray(b).astype(np.int64), np.asarray(c).astype(np.int64)
    by, clamp, segment = b & 31, c & 31, c >> 8 & 31
    first = _LANE & segment
    last = first | (clamp & ~segment)
    if mode == "up":
        j = _LANE - by
        within = j >= last
    else:
        j = {"down": _LANE + by, "bfly": _LANE ^ by, "idx": first | (by & ~segment)}[mode]
        within = j <= last
    return np.where(within, j, _LANE), within


@instruction("shfl", control=True)
def shfl(d: Decoder):
    _sync(d)
    mode = d.choice("up", "down", "bfly", "idx")
    if mode is None:
        d.fail("expected .up, .down, .bfly or .idx")
    d.type("b32")
    put, put_within = _targets(d)
    a, b, c = d.get(1, "b32"), d.get(2, "b32"), d.get(3, "b32")
    members, following = _Members(d, 4), d.next
    fixed = None
    if isinstance(d.operand(2), Imm) and isinstance(d.operand(3), Imm):
        fixed = _source(mode, d.constant(2) & 0xFFFFFFFF, d.constant(3) & 0xFFFFFFFF)

    def step(m):
        if not members.gather(m):
            return STOP
        j, within = fixed or _source(mode, _by_warp(m, b(m)), _by_warp(m, c(m)))
        value = _by_warp(m, a(m))
        if not (members.everyone and (m.full or (m.whole >= 32 and m.threads % 32 == 0))):
            _check_sources(m, members, np.broadcast_to(j, (m.n // 32, 32)))
        if j.ndim == 1:
            result = value.take(j, axis=1)
        else:
            result = np.take_along_axis(value, j, 1)
        put(m, result.reshape(-1))
        if put_within is not None:
            put_within(m, np.broadcast_to(within, (m.n // 32, 32)).reshape(-1))
        return following

    return step


def _check_sources(m, members: _Members, j: np.ndarray):
    """Reading from a thread that doesn't take part is undefined."""
    wrong = ~((members.bits(m) >> j.astype(np.uint32)) & 1).astype(bool).reshape(-1) & m.mask
    if wrong.any():
        lane = int(np.flatnonzero(wrong)[0])
        m.fault_lane(
            f"shfl.sync reads from lane {int(j.reshape(-1)[lane])} of its warp, which does not take part: "
            "it has exited or isn't in the member mask",
            int(np.searchsorted(m.lanes, lane)),
        )


# -- vote.sync, activemask (9.7.13.9, 9.7.13.11)


@instruction("vote", control=True)
def vote(d: Decoder):
    _sync(d)
    mode = d.choice("all", "any", "uni", "ballot")
    if mode is None:
        d.fail("expected .all, .any, .uni or .ballot")
    d.type("b32" if mode == "ballot" else "pred")
    put, a = d.put(0), d.get(1, "pred")
    members, following = _Members(d, 2), d.next

    def step(m):
        if not members.gather(m):
            return STOP
        bits = members.bits(m)
        yes = bits & (_by_warp(m, a(m)) * _BIT).sum(1, dtype=np.uint32)[:, None]
        if mode == "ballot":
            result = yes
        elif mode == "all":
            result = yes == bits
        elif mode == "any":
            result = yes != 0
        else:
            result = (yes == bits) | (yes == 0)
        put(m, np.ascontiguousarray(np.broadcast_to(result, (m.n // 32, 32))).reshape(-1))
        return following

    return step


@instruction("activemask")
def activemask(d: Decoder):
    """The lanes that happen to execute together: any set that holds the executing lane would do."""
    d.type("b32")
    put = d.put(0)
    return lambda m: put(m, np.repeat((m.mask.reshape(-1, 32) * _BIT).sum(1, dtype=np.uint32), 32))


# -- match.sync (9.7.13.10)


@instruction("match", control=True)
def match(d: Decoder):
    mode = d.choice("any", "all")
    if mode is None:
        d.fail("expected .any or .all")
    _sync(d)
    kind = d.type("b32", "b64")
    put, put_all = _targets(d)
    if put_all is not None and mode == "any":
        d.fail("match.any has no predicate destination")
    a, members, following = d.get(1, kind), _Members(d, 2), d.next

    def step(m):
        if not members.gather(m):
            return STOP
        value = _by_warp(m, a(m))
        equal = (value[:, :, None] == value[:, None, :]) & members.matrix(m)
        same = (equal * _BIT).sum(2, dtype=np.uint32)
        if mode == "any":
            put(m, same.reshape(-1))
            return following
        bits = np.broadcast_to(members.bits(m), same.shape)
        every = same == bits
        put(m, np.where(every, bits, np.uint32(0)).reshape(-1))
        if put_all is not None:
            put_all(m, every.reshape(-1))
        return following

    return step


# -- redux.sync (9.7.13.12)

_NEUTRAL = {"add": 0, "or": 0, "xor": 0, "and": 0xFFFFFFFF}


@instruction("redux", control=True)
def redux(d: Decoder):
    _sync(d)
    op = d.choice("add", "min", "max", "and", "or", "xor")
    if op is None:
        d.fail("which operation?")
    kind = d.type("b32") if op in ("and", "or", "xor") else d.type("u32", "s32", *(() if op == "add" else ("f32",)))
    absolute, nan = d.flag("abs"), d.flag("NaN")
    if (absolute or nan) and kind != "f32":
        d.fail(".abs and .NaN need .f32")
    put, a, members, following = d.put(0), d.get(1, kind), _Members(d, 2), d.next
    if kind == "f32":
        combine = _float_extreme(op, absolute, nan)
    else:
        combine = _integer(op, kind)

    def step(m):
        if not members.gather(m):
            return STOP
        value, bits = _by_warp(m, a(m)), members.bits(m)
        if (bits == bits[:, :1]).all():  # one set of lanes per warp
            taken = (bits[:, 0][:, None] & _BIT) != 0
            result = np.repeat(combine(value, taken), 32)
        else:
            result = combine(np.repeat(value, 32, 0), members.matrix(m).reshape(-1, 32))
        put(m, result)
        return following

    return step


def _integer(op: str, kind: str):
    """([sets, 32] values, which of them count) -> [sets]; .u32 and .s32 sums wrap."""
    if op in ("min", "max"):
        limits = np.iinfo("i4" if kind == "s32" else "u4")
        neutral = limits.max if op == "min" else limits.min
        return lambda value, taken: getattr(np.where(taken, value, value.dtype.type(neutral)), op)(1)
    ufunc = {"add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op]
    neutral = np.uint32(_NEUTRAL[op])
    return lambda value, taken: ufunc.reduce(np.where(taken, value.view(np.uint32), neutral), 1, dtype=np.uint32)


def _float_extreme(op: str, absolute: bool, nan: bool):
    """.f32: -0 is less than +0; NaN is left out, or with .NaN decides; of NaN alone the result is the canonical one."""
    canonical = np.uint32(0x7FFFFFFF)

    def combine(value, taken):
        bits = np.ascontiguousarray(value).view(np.uint32)
        if absolute:
            bits = bits & canonical
        # Floats as integers in the same order, -0 below +0.
        key = np.where(bits >> 31 != 0, ~bits, bits | np.uint32(1 << 31)).astype(np.int64)
        isnan = np.isnan(bits.view(np.float32))
        counts = taken & ~isnan
        worst = np.int64(1 << 40) if op == "min" else np.int64(-1)
        best = getattr(np.where(counts, key, worst), op)(1)
        back = np.where(best >= 1 << 31, best - (1 << 31), ~best & 0xFFFFFFFF).astype(np.uint32)
        none = ~counts.any(1)
        if nan:
            none |= (taken & isnan).any(1)
        return np.where(none, canonical, back).view(np.float32)

    return combine


# -- elect.sync (9.7.13.14)


@instruction("elect", control=True)
def elect(d: Decoder):
    """The leader is the lowest lane of the member mask that takes part: the same one every time, as the ISA asks."""
    _sync(d)
    put, put_leader = _targets(d)
    if put_leader is None:
        d.fail("expected d|p")
    members, following = _Members(d, 1), d.next

    def step(m):
        if not members.gather(m, exited=False):
            return STOP
        bits = np.broadcast_to(members.bits(m), (m.n // 32, 32))
        lowest = bits & (~bits + np.uint32(1))
        leader = np.log2(np.maximum(lowest, 1)).astype(np.uint32)
        put(m, leader.reshape(-1))
        put_leader(m, (leader == _LANE).reshape(-1))
        return following

    return step
