"""Control flow, moves, selection (PTX ISA 9.7.13; mov, selp, slct, cvta: 9.7.9)."""

from __future__ import annotations

import numpy as np

from ..decode import STOP, UINT, Decoder, instruction
from ..errors import Fault
from ..ptx import Label, Reg, Special, Symbol, Vec
from ..spaces import CONST_WINDOW, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_MASK

_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "const": CONST_WINDOW, "param": PARAM_WINDOW}


def _polls(d: Decoder, target: int) -> bool:
    """Whether the loop that a jump back to `target` closes looks at something that others change."""
    for ins in d.kernel.instructions[target : d.ins.index]:
        if ins.opcode in ("nanosleep", "atom") or (ins.opcode == "mbarrier" and "test_wait" in ins.modifiers):
            return True
        if ins.opcode == "ld" and {"volatile", "acquire", "relaxed", "mmio"} & set(ins.modifiers):
            return True
    return False


@instruction("bra", control=True)
def bra(d: Decoder):
    d.flag("uni")
    target, following = d.label(0), d.next
    guard = d.ins.guard
    polls = target <= d.ins.index and _polls(d, target)

    def jump(m):
        if polls:
            m.poll(m.mask, target)
            return STOP
        return target

    if guard is None:
        return jump
    index, negated = guard.index, guard.negated

    def branch(m):
        predicate = m.regs[index]
        taken = m.mask & ~predicate if negated else m.mask & predicate
        if not np.count_nonzero(taken):
            return following
        rest = m.mask & ~taken
        if not np.count_nonzero(rest):
            return jump(m)
        if polls:
            m.poll(taken, target)
        else:
            m.resume(taken, target)
        m.resume(rest, following)
        return STOP

    return branch


@instruction("brx", control=True)
def brx(d: Decoder):
    d.flag("uni")
    if not d.flag("idx"):
        d.fail("only brx.idx is known")
    index = d.get(0, "u32")
    table = d.operand(1)
    targets = d.kernel.branch_targets.get(getattr(table, "name", None))
    if not targets or min(targets) < 0:
        d.fail("its .branchtargets weren't found")

    def branch(m):
        value = index(m)
        if int(value[m.lanes].max()) >= len(targets):
            raise Fault(f"brx.idx: index beyond its {len(targets)} targets")
        for n, target in enumerate(targets):
            taken = m.mask & (value == n)
            if np.count_nonzero(taken):
                m.resume(taken, target)
        return STOP

    return branch


@instruction("ret", "exit", control=True)
def leave(d: Decoder):
    d.flag("uni")

    def step(m):
        m.exit()
        return STOP

    return step


@instruction("trap", "brkpt")
def trap(d: Decoder):
    def step(m):
        m.fault_lane(f"{d.ins.opcode} was executed", 0)

    return step


@instruction("nanosleep", "pmevent")
def nothing(d: Decoder):
    return lambda m: None


@instruction("mov")
def mov(d: Decoder):
    kind = d.type() if "b128" not in d.left else d.fail("128-bit moves are not supported")
    target, source = d.operand(0), d.operand(1)
    if isinstance(target, Vec):
        return _unpack(d, target, d.get(1, UINT[_bytes(kind)]))
    if isinstance(source, Vec):
        return _pack(d, kind, source)
    put = d.put(0)
    if isinstance(source, Reg) and source.type != "pred" and not source.negated:
        if source.bytes != target.bytes:
            d.fail("source and destination differ in width")
        index, to = source.index, target.index

        def move(m):
            if m.full:
                m.regs[to] = m.regs[index]
            else:
                m.put(to, m.regs[index])

        return move
    if isinstance(source, Label):
        d.fail("the address of a label is not supported")
    value = d.get(1, kind if kind != "pred" else "pred")
    if isinstance(source, Symbol | Special):
        width = UINT[target.bytes]
        return lambda m: put(m, np.asarray(value(m)).astype(width))
    return lambda m: put(m, value(m))


def _bytes(kind: str) -> int:
    return {"b16": 2, "b32": 4, "b64": 8, "u32": 4, "u64": 8, "f32": 4, "f64": 8, "s32": 4, "s64": 8}[kind]


def _unpack(d: Decoder, target: Vec, source):
    parts = len(target.items)
    puts = [d.put(item) for item in target.items]
    sizes = {item.bytes for item in target.items if isinstance(item, Reg)}
    if len(sizes) != 1:
        d.fail("the parts of a vector must have one width")
    part = UINT[sizes.pop()]

    def step(m):
        whole = np.ascontiguousarray(source(m))
        if whole.ndim == 0:
            whole = m.broadcast(whole)
        split = whole.view(part).reshape(-1, parts)
        for n, put in enumerate(puts):
            put(m, np.ascontiguousarray(split[:, n]))

    return step


def _pack(d: Decoder, kind: str, source: Vec):
    put, parts = d.put(0), len(source.items)
    part, whole = UINT[_bytes(kind) // parts], UINT[_bytes(kind)]
    gets = [d.get(item, part) for item in source.items]

    def step(m):
        out = np.empty((m.n, parts), part)
        for n, get in enumerate(gets):
            out[:, n] = get(m)
        put(m, out.view(whole).reshape(-1))

    return step


@instruction("selp")
def selp(d: Decoder):
    kind = d.type()
    put, a, b, p = d.put(0), d.get(1, kind), d.get(2, kind), d.get(3, "pred")
    return lambda m: put(m, np.where(p(m), a(m), b(m)))


@instruction("slct")
def slct(d: Decoder):
    ftz = d.flag("ftz")
    kind, by = d.type(), d.type("s32", "f32")
    put, a, b, c = d.put(0), d.get(1, kind), d.get(2, kind), d.get(3, by)
    tiny = np.float32(2.0**-126)

    def step(m):
        value = c(m)
        chosen = value >= 0
        if ftz:
            chosen |= (value < 0) & (value > -tiny)
        put(m, np.where(chosen, a(m), b(m)))

    return step


@instruction("cvta")
def cvta(d: Decoder):
    back = d.flag("to")
    space = d.choice("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
    if space is None:
        d.fail("which state space?")
    kind = d.type("u64", "u32", "s64", "b64")
    window = np.uint64(_WINDOWS.get(space.split("::")[0], 0))
    put, source = d.put(0), d.get(1, kind)
    width = UINT[d.operand(0).bytes]
    if back:
        return lambda m: put(m, (source(m).astype(np.uint64) & np.uint64(WINDOW_MASK)).astype(width))
    return lambda m: put(m, (source(m).astype(np.uint64) | window).astype(width))


@instruction("isspacep")
def isspacep(d: Decoder):
    space = d.choice("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
    if space is None:
        d.fail("which state space?")
    windows = {
        "global": 0,
        "shared": SHARED_WINDOW,
        "local": LOCAL_WINDOW,
        "const": CONST_WINDOW,
        "param": PARAM_WINDOW,
    }
    window = np.uint64(windows[space.split("::")[0]] >> 56)
    put, source = d.put(0), d.get(1, "u64")
    return lambda m: put(m, (source(m) >> np.uint64(56)) == window)


@instruction("mapa")
def mapa(d: Decoder):
    """A cluster has one block here: an address of rank 0 is the block's own."""
    if d.choice("shared::cluster") is None:
        d.fail("only .shared::cluster is supported")
    kind = d.type("u32", "u64")
    put, source, rank = d.put(0), d.get(1, kind), d.get(2, "u32")

    def step(m):
        if np.any(np.broadcast_to(rank(m), m.n)[m.lanes] != 0):
            m.fault_lane("mapa to a block rank other than 0 of a cluster of one block", 0)
        put(m, source(m))

    return step


@instruction("getctarank")
def getctarank(d: Decoder):
    d.choice("shared::cluster")
    d.type("u32", "u64")
    put = d.put(0)
    return lambda m: put(m, np.uint32(0))
