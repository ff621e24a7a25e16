"""Loads, stores, atomics and fences (PTX ISA 9.7.9 "Data Movement"; 9.7.13 "Synchronization": atom, red, fence)."""

from __future__ import annotations

import numpy as np

from ..decode import DTYPES, UINT, Decoder, instruction
from ..ptx import TYPE_BYTES, Sink
from ..spaces import Segment

_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const")
_HINTS = ("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate")
_HINTS += ("L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B", "nc", "unified")
_CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt")
SCOPES = ("cta", "cluster", "gpu", "sys")


def space_of(d: Decoder, *, default: str = "generic") -> str:
    return (d.choice(*_SPACES) or default).split("::")[0]


def skip_hints(d: Decoder) -> bool:
    """Cache hints change speed, not results. Whether an L2::cache_hint operand follows."""
    while d.choice(*_HINTS) or d.choice(*_CACHE):
        pass
    return d.flag("L2::cache_hint")


def strength(d: Decoder) -> str | None:
    """ "<semantics>.<scope>" of a strong access, None of a weak one."""
    if d.flag("weak"):
        return None
    if d.flag("volatile"):
        return "relaxed.sys"
    if d.flag("mmio"):
        d.flag("relaxed")
        return f"relaxed.{d.choice(*SCOPES) or 'sys'}"
    semantics = d.choice("relaxed", "acquire", "release", "acq_rel")
    if semantics is None:
        return None
    scope = d.choice(*SCOPES)
    if scope is None:
        d.fail(f".{semantics} needs a scope")
    return f"{semantics}.{scope}"


@instruction("ld", "ldu")
def ld(d: Decoder):
    strong = strength(d)
    space = space_of(d)
    skip_hints(d)
    count = int(d.choice("v2", "v4", "v8", default="v1")[1:])
    kind = d.type() if "b128" not in d.left else d.fail("128-bit elements are not supported")
    width = TYPE_BYTES[kind]
    signed = np.dtype(f"i{width}") if kind.startswith("s") else UINT[width]
    address = d.address(1)
    items = d.items(0)
    if len(items) != count:
        d.fail(f"{count} destinations expected, got {len(items)}")
    puts = [d.put_lanes(item) for item in items]

    def step(m):
        where = address(m)
        values = m.load(space, where if m.full else where[m.lanes], count, width, strong=strong)
        for n, put in enumerate(puts):
            put(m, values[n].view(signed))

    return step


@instruction("st")
def st(d: Decoder):
    strong = strength(d)
    space = space_of(d)
    skip_hints(d)
    count = int(d.choice("v2", "v4", "v8", default="v1")[1:])
    kind = d.type() if "b128" not in d.left else d.fail("128-bit elements are not supported")
    width = TYPE_BYTES[kind]
    address = d.address(0)
    items = d.items(1)
    if len(items) != count:
        d.fail(f"{count} sources expected, got {len(items)}")
    sources = [d.get(item, UINT[width]) for item in items]

    def step(m):
        where = address(m)
        values = np.empty((count, len(m.lanes)), UINT[width])
        for n, source in enumerate(sources):
            value = source(m)
            values[n] = value if m.full or value.ndim == 0 else value[m.lanes]
        m.store(space, where if m.full else where[m.lanes], values, width, strong=strong)

    return step


def _f16_pair(op):
    def run(old, value):
        return op(old.view("f2").reshape(-1, 2), value.view("f2").reshape(-1, 2)).view("u4").reshape(-1)

    return run


def _bf16(op):
    from .. import numerics

    def run(old, value):
        wide = op(numerics.bf16_to_f32(old.view("u2")), numerics.bf16_to_f32(value.view("u2")))
        return numerics.f32_to_bf16(wide).view(old.dtype)

    return run


def operation(d: Decoder, name: str, kind: str):
    """(old, operand[, second]) -> new, on arrays of DTYPES[kind]; PTX ISA 9.7.13.5."""
    if name in ("and", "or", "xor"):
        return getattr(np, f"bitwise_{name}")
    if name == "exch":
        return lambda old, value: value
    if name == "cas":
        return lambda old, compare, value: np.where(old == compare, value, old)
    if name == "inc":
        return lambda old, value: np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1))
    if name == "dec":
        return lambda old, value: np.where((old == 0) | (old > value), value, old - old.dtype.type(1))
    if name in ("add", "min", "max"):
        op = {"add": np.add, "min": np.fmin, "max": np.fmax}[name]
        if kind == "f16x2":
            return _f16_pair(op)
        if kind in ("bf16", "bf16x2"):
            return _bf16(op)
        return op
    d.fail(f"operation .{name} is not modelled")


def _atomic(d: Decoder, *, returns: bool):
    semantics = d.choice("relaxed", "acquire", "release", "acq_rel", default="relaxed")
    scope = d.choice(*SCOPES, default="gpu")
    space = space_of(d)
    name = d.choice("add", "and", "or", "xor", "exch", "cas", "inc", "dec", "min", "max")
    if name is None:
        d.fail("which operation?")
    d.flag("noftz")
    skip_hints(d)
    count = int(d.choice("v2", "v4", "v8", default="v1")[1:])
    kind = d.type() if "b128" not in d.left else d.fail("128-bit atomics are not supported")
    width, dtype = TYPE_BYTES[kind], DTYPES[kind]
    first = 1 if returns else 0
    address = d.address(first)
    sources = [[d.get(item, dtype) for item in d.items(first + 1)]]
    if name == "cas":
        sources.append([d.get(item, dtype) for item in d.items(first + 2)])
    items = d.items(0) if returns else ()
    puts = [d.put_lanes(item) if not isinstance(item, Sink) else (lambda m, v: None) for item in items]
    if (returns and len(puts) != count) or len(sources[0]) != count:
        d.fail(f"{count} elements expected")
    apply = operation(d, name, kind)
    strong = f"{semantics}.{scope}"
    ftz = kind == "f32" and name == "add"

    def step(m):
        where = address(m)
        lanes = m.lanes
        operands = [[np.ascontiguousarray(np.broadcast_to(s(m), m.n)[lanes]) for s in vector] for vector in sources]
        before = [np.empty(len(lanes), dtype) for _ in range(count)]
        m.events += 1
        for pool, selection, offset in m.resolve(space, where[lanes], width * count, width * count):
            chosen = np.arange(len(lanes)) if selection is None else selection
            if m.checker is not None:
                m.checker.write(pool, lanes[chosen], offset, width * count, strong, atomic=True)
            # In global memory, however it is addressed, operands and results are flushed.
            run = flushed(apply) if ftz and isinstance(pool, Segment) else apply
            for e in range(count):
                index = (offset + e * width) // width
                view = pool.views[width]
                # Lanes that meet at one address take turns, in order of lanes (the ISA leaves the order open).
                turn = _turns(index)
                for t in range(int(turn.max()) + 1 if len(turn) else 0):
                    now = np.flatnonzero(turn == t)
                    old = view[index[now]].view(dtype)
                    before[e][chosen[now]] = old
                    new = run(old, *(vector[e][chosen[now]] for vector in operands))
                    view[index[now]] = np.asarray(new).astype(dtype, copy=False).view(UINT[width])
        for e, put in enumerate(puts):
            put(m, before[e])

    return step


def flushed(apply):
    """f32 addition that takes subnormal operands and results for zeros of their sign."""
    from .. import numerics

    return lambda old, value: numerics.flush(apply(numerics.flush(old), numerics.flush(value)))


def _turns(index: np.ndarray) -> np.ndarray:
    """For every element, how many earlier ones have the same value."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    start = np.r_[True, ordered[1:] != ordered[:-1]]
    first = np.flatnonzero(start)[np.cumsum(start) - 1] if len(index) else start
    turn = np.empty(len(index), np.int64)
    turn[order] = np.arange(len(index)) - first
    return turn


@instruction("atom")
def atom(d: Decoder):
    return _atomic(d, returns=True)


@instruction("red")
def red(d: Decoder):
    if "async" in d.left:
        d.fail("red.async needs a cluster")
    return _atomic(d, returns=False)


@instruction("prefetch", "prefetchu", "applypriority", "discard")
def prefetch(d: Decoder):
    d.left.clear()  # hints only: every modifier names a cache
    return lambda m: None


@instruction("createpolicy")
def createpolicy(d: Decoder):
    """The policy only steers the cache: any value will do."""
    d.left.clear()
    put = d.put(0)
    return lambda m: put(m, np.uint64(0))


@instruction("fence", "membar")
def fence(d: Decoder):
    """PTX ISA 9.7.13.4. Proxy fences order the generic proxy and another; the rest order this thread's accesses."""
    if d.ins.opcode == "membar" and "proxy" not in d.left:
        scope = {"cta": "cta", "gl": "gpu", "sys": "sys"}.get(d.choice("cta", "gl", "sys"))
        if scope is None:
            d.fail("which scope?")
    elif d.flag("proxy"):
        return _proxy_fence(d)
    elif d.flag("mbarrier_init"):
        if not (d.flag("release") and d.flag("cluster")):
            d.fail("expected .release.cluster")
        scope = "cta"
    else:
        d.choice("sc", "acq_rel", "acquire", "release", default="acq_rel")
        d.choice("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        scope = d.choice(*SCOPES)
        if scope is None:
            d.fail("which scope?")

    def step(m):
        if m.checker is not None:
            m.checker.fence(m.lanes, scope)

    return step


def _proxy_fence(d: Decoder):
    if d.choice("async", "async::generic"):
        # Narrower forms name the spaces they hold for; the model keeps one order for all of them.
        d.choice("acquire", "release")
        d.choice("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        d.choice("global", "shared::cta", "shared::cluster", "shared")
        d.choice(*SCOPES)

        def step(m):
            if m.checker is not None:
                m.checker.proxy_fence(m.lanes)

        return step
    if d.flag("tensormap::generic"):
        from . import tensormap

        return tensormap.fence(d)
    if d.flag("alias"):
        # Aliases don't exist here.
        def order(m):
            if m.checker is not None:
                m.checker.fence(m.lanes, "gpu")
                m.checker.proxy_fence(m.lanes)

        return order
    d.fail("which proxy?")
