"""tensormap.replace (PTX ISA 9.7.9.28), tensormap.cp_fenceproxy (9.7.13.16) and fence.proxy.tensormap (9.7.13.4): how a
kernel makes a tensor map of its own."""

from __future__ import annotations

import numpy as np

from ..decode import STOP, Decoder, instruction
from ..errors import Fault, Hazard
from ..tensormap import ORDINAL, SCALAR, TensorMapError, replace

_SCOPES = ("cta", "cluster", "gpu", "sys")


@instruction("tensormap", control=True)
def tensormap(d: Decoder):
    if d.flag("replace"):
        return _replace(d)
    if d.flag("cp_fenceproxy"):
        return _cp_fenceproxy(d)
    return d.fail("expected .replace or .cp_fenceproxy")


def _replace(d: Decoder):
    name = d.choice(*SCALAR, *ORDINAL)
    if not d.flag("tile") or name is None:
        d.fail("expected .tile and a field")
    space = (d.choice("global", "shared::cta") or "generic").split("::")[0]
    if not d.flag("b1024"):
        d.fail("expected .b1024")
    kind = "b64" if name in ("global_address", "global_stride") else "b32"
    d.type(kind)
    address, ordinal, last = d.address(0), d.constant(1) if name in ORDINAL else None, 2 if name in ORDINAL else 1
    value = d.get(last, kind)
    following = d.next

    def step(m):
        values, lanes = np.broadcast_to(value(m), m.n), m.lanes
        m.events += 1
        for pool, selection, offset in m.resolve(space, address(m)[lanes], 128, 64):
            who = lanes if selection is None else lanes[selection]
            if pool is m.params or pool is m.constants:
                raise m.located(Fault(f"tensormap.replace in {pool.name} memory, which can't be written"), int(who[0]))
            if m.checker is not None:
                m.checker.write(pool, who, offset, 128, atomic=True)
            for lane, at in zip(who.tolist(), offset.tolist(), strict=True):
                try:
                    replace(pool.data[at : at + 128], name, ordinal, int(values[lane]))
                except TensorMapError as error:
                    raise m.located(Fault(str(error)), lane) from None
        return following

    return step


def _cp_fenceproxy(d: Decoder):
    words = ("global", "shared::cta", "tensormap::generic", "release", "sync", "aligned")
    if not all(d.flag(word) for word in words) or d.choice(*_SCOPES) is None:
        d.fail(f"expected .{'.'.join(words[:4])}.<scope>.sync.aligned")
    if d.constant(2) != 128:
        d.fail("the size must be 128")
    to, source = d.address(0), d.address(1)
    following = d.next

    def step(m):
        if not m.gather_warps():
            return STOP
        targets, sources = to(m), source(m)
        for warp in m.whole_warps.tolist():
            lanes = np.flatnonzero(m.mask[warp * 32 : warp * 32 + 32]) + warp * 32
            if len(np.unique(targets[lanes])) + len(np.unique(sources[lanes])) != 2:
                words = "the threads of a warp give tensormap.cp_fenceproxy different addresses"
                raise m.located(Fault(words), int(lanes[0]))
            _copy(m, lanes, targets, sources)
        return following

    return step


def _copy(m, lanes, targets, sources):
    mask = np.zeros(m.n, bool)
    mask[lanes] = True
    one = lanes[:1]
    outer = m.enter(mask)
    for_one = m.resolve("global", targets[lanes], 128, 64), m.resolve("shared", sources[lanes], 128, 64)
    (segment, _, to), (shared, _, at) = (parts[0] for parts in for_one)
    if m.checker is not None:
        m.checker.read(shared, one, at[:1], 128)
        m.checker.write(segment, one, to[:1], 128)
        m.checker.warp_sync(mask)
        m.checker.fence(lanes, "gpu")
    segment.data[to[0] : to[0] + 128] = shared.data[at[0] : at[0] + 128]
    m.events += 1
    m.leave(outer)


def fence(d: Decoder):
    """fence.proxy.tensormap::generic: .release as any fence; .acquire lets the copies that follow use the map there."""
    semantics = d.choice("acquire", "release")
    if semantics is None or d.choice(*_SCOPES) is None:
        d.fail("expected .acquire or .release and a scope")
    if semantics == "release":

        def release(m):
            if m.checker is not None:
                m.checker.fence(m.lanes, "gpu")

        return release
    if d.constant(1) != 128:
        d.fail("the size must be 128")
    address = d.address(0)

    def acquire(m):
        if m.checker is None:
            return
        m.checker.fence(m.lanes, "gpu")
        lanes = m.lanes
        for pool, selection, offset in m.resolve("generic", address(m)[lanes], 128, 64):
            who = lanes if selection is None else lanes[selection]
            m.checker.read(pool, who, offset, 128)
            for lane, at in zip(who.tolist(), offset.tolist(), strict=True):
                key = (id(pool), at, int(m.block_of[lane]))
                steps = m.state.setdefault("tensormap fences", {}).setdefault(key, np.zeros(m.warps * 32, np.int64))
                steps[m.thread_of[lane]] = m.step

    return acquire


def use(m, segment, at: int, lane: int):
    """For the checker: the lane's copy uses the tensor map at this offset of a global segment.

    Raises:
        Hazard: it was written by this launch, and nothing orders the copy after that, or no fence stands between.
    """
    m.checker.read(segment, np.array([lane]), np.array([at]), 128)
    written = int(m.checker.last_write(segment, at, 128))
    if not written:
        return
    steps = m.state.get("tensormap fences", {}).get((id(segment), at, int(m.block_of[lane])))
    if steps is not None:
        known = m.checker.known[lane, : len(steps)]
        own = np.arange(len(steps)) == m.thread_of[lane]
        if ((steps > written) & (own | (known >= steps))).any():
            return
    raise m.located(
        Hazard(
            f"uses the tensor map in {segment.describe(at)}, which was written in step {written}, without a "
            "fence.proxy.tensormap::generic.acquire in between"
        ),
        lane,
    )
