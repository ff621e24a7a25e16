"""shfl, vote, match, redux, activemask and elect against loops written from the PTX ISA, one thread at a time."""

import numpy as np
import pytest

import ptxsim
from ptxsim import Deadlock, Fault, UnsupportedInstruction, snippets

FULL = 0xFFFFFFFF
RNG = np.random.default_rng(20)


def each_lane(instruction: str, *inputs: np.ndarray, outputs: int = 1, target: int = 80, **options) -> list[np.ndarray]:
    """Runs the instruction with one element of every input per lane in %r0, %r1, ...; %r10, %r11, ... are returned."""
    arrays = [np.ascontiguousarray(x, np.uint32) for x in inputs]
    results = [np.zeros(len(arrays[0]), np.uint32) for _ in range(outputs)]
    body = ["mul.wide.u32 %rd0, %gid, 4;"]
    for n in range(len(arrays)):
        body += [f"add.u64 %rd1, %arg{n}, %rd0;", f"ld.global.b32 %r{n}, [%rd1];"]
    body += [instruction]
    for n in range(outputs):
        body += [f"add.u64 %rd1, %arg{len(arrays) + n}, %rd0;", f"st.global.b32 [%rd1], %r{10 + n};"]
    threads = options.pop("threads", min(len(arrays[0]), 128))
    blocks = len(arrays[0]) // threads
    snippets.run("\n".join(body), *arrays, *results, threads=threads, blocks=blocks, target=target, **options)
    return results


def shuffled(mode, value, b, c):
    """9.7.9.6, its pseudocode for each lane of one warp."""
    d, p = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    for lane in range(32):
        bval, cval, segmask = int(b[lane]) & 0x1F, int(c[lane]) & 0x1F, int(c[lane]) >> 8 & 0x1F
        max_lane = (lane & segmask) | (cval & ~segmask & 0x1F)
        min_lane = lane & segmask
        if mode == "up":
            j = lane - bval
            pval = j >= max_lane
        elif mode == "down":
            j = lane + bval
            pval = j <= max_lane
        elif mode == "bfly":
            j = lane ^ bval
            pval = j <= max_lane
        else:
            j = min_lane | (bval & ~segmask & 0x1F)
            pval = j <= max_lane
        if not pval:
            j = lane
        d[lane], p[lane] = value[j], pval
    return d, p


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("fixed", [False, True])
def test_shfl(mode, fixed):
    warps = 16
    value = RNG.integers(0, 2**32, warps * 32, dtype=np.uint32)
    # c as compilers give it (a width of 1 to 32) and anything else; with .down and .idx, j can pass lane 31 only if a
    # clamp allows it, which is out of the warp
    for width in (1, 2, 4, 8, 16, 32):
        segment = 32 - width << 8
        c = np.full(warps * 32, segment if mode == "up" else segment | 0x1F, np.uint32)
        b = np.full(warps * 32, width // 2 if fixed else 0, np.uint32)
        if not fixed:
            b = RNG.integers(0, 64, warps * 32, dtype=np.uint32)
        operands = f"{b[0]}, {c[0]}" if fixed else "%r1, %r2"
        code = f"shfl.sync.{mode}.b32 %r10|%p1, %r0, {operands}, 0xffffffff; selp.u32 %r11, 1, 0, %p1;"
        got = each_lane(code, value, b, c, outputs=2)
        want = [shuffled(mode, *(x[w * 32 : w * 32 + 32] for x in (value, b, c))) for w in range(warps)]
        assert (got[0] == np.concatenate([d for d, _ in want])).all()
        assert (got[1] == np.concatenate([p for _, p in want])).all()


def test_shfl_any_clamp_and_segment():
    value = RNG.integers(0, 2**32, 1024, dtype=np.uint32)
    b, c = RNG.integers(0, 32, 1024, dtype=np.uint32), RNG.integers(0, 2**13, 1024, dtype=np.uint32)
    for mode in ("up", "bfly", "idx"):
        got = each_lane(f"shfl.sync.{mode}.b32 %r10, %r0, %r1, %r2, -1;", value, b, c)[0]
        want = [shuffled(mode, *(x[w * 32 : w * 32 + 32] for x in (value, b, c)))[0] for w in range(32)]
        assert (got == np.concatenate(want)).all()


def test_shfl_of_a_float_register_and_without_a_value():
    value = RNG.standard_normal(32).astype(np.float32)
    code = """
      mov.b32 %f1, %r0;
      shfl.sync.bfly.b32 %f2, %f1, 1, 31, -1;
      shfl.sync.up.b32 _|%p1, %f1, 3, 0, -1;
      mov.b32 %r10, %f2;
      selp.u32 %r11, 1, 0, %p1;
    """
    got, within = each_lane(code, value.view(np.uint32), outputs=2)
    assert (got.view(np.float32) == value[np.arange(32) ^ 1]).all()
    assert (within == (np.arange(32) >= 3)).all()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_members_that_come_by_different_ways(seed):
    """Half of the lanes arrive later; a set of lanes may be named by a mask, two sets at once by two."""
    value = RNG.integers(0, 2**32, 128, dtype=np.uint32)
    lane = np.arange(128) % 32
    code = """
      and.b32 %r1, %tid, 1;
      setp.eq.u32 %p1, %r1, 0;
      mov.u32 %r2, 7;
      @%p1 bra THERE;
      add.u32 %r2, %r2, 1;
      add.u32 %r2, %r2, 1;
    THERE:
      shfl.sync.bfly.b32 %r10, %r0, 1, 31, 0xffffffff;
    """
    assert (each_lane(code, value, seed=seed)[0] == value[np.arange(128) ^ 1]).all()
    code = """
      and.b32 %r1, %tid, 31;
      setp.lt.u32 %p1, %r1, 12;
      @%p1 bra LOW;
      shfl.sync.idx.b32 %r10, %r0, 20, 31, 0xfffff000;
      bra END;
    LOW:
      shfl.sync.idx.b32 %r10, %r0, 3, 31, 0xfff;
    END:
    """
    expected = value[np.arange(128) - lane + np.where(lane < 12, 3, 20)]
    assert (each_lane(code, value, seed=seed)[0] == expected).all()
    code = """
      and.b32 %r1, %tid, 31;
      setp.lt.u32 %p1, %r1, 12;
      selp.b32 %r2, 0xfff, 0xfffff000, %p1;
      selp.b32 %r3, 3, 20, %p1;
      shfl.sync.idx.b32 %r10, %r0, %r3, 31, %r2;
    """
    assert (each_lane(code, value, seed=seed)[0] == expected).all()


def test_exited_threads_are_not_waited_for():
    value = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    code = """
      setp.ge.u32 %p1, %tid, 40;
      @%p1 bra AWAY;
      xor.b32 %r1, %tid, 40;
      shfl.sync.down.b32 %r10, %r0, {by}, 0x1f, 0xffffffff;
      vote.sync.ballot.b32 %r11, 1, 0xffffffff;
    """
    end = "bra END; AWAY: exit; END:"
    got, ballot = each_lane(code.format(by=0) + end, value, outputs=2)
    assert (got[:40] == value[:40]).all()
    assert (got[40:] == 0).all()
    assert (ballot[:40] == np.where(np.arange(40) < 32, FULL, 0xFF)).all()
    with pytest.raises(Fault, match="reads from lane 8 of its warp, which does not take part"):
        each_lane(code.format(by=1) + end, value, outputs=2)


def test_what_a_member_mask_must_be():
    value = np.arange(32)
    with pytest.raises(Fault, match="reads from lane 16 of its warp, which does not take part"):
        each_lane(
            "setp.lt.u32 %p1, %tid, 16; @%p1 shfl.sync.down.b32 %r10, %r0, 1, 31, 0xffff; mov.u32 %r10, 0;", value
        )
    with pytest.raises(Fault, match="doesn't name it"):
        each_lane("shfl.sync.idx.b32 %r10, %r0, 1, 31, 0xfffffffe;", value)
    with pytest.raises(Fault, match="give different masks"):
        each_lane("setp.eq.u32 %p1, %tid, 0; selp.b32 %r2, 0xffff, -1, %p1; vote.sync.all.pred %p2, %p1, %r2;", value)
    with pytest.raises(Deadlock, match="for the rest of its warp"):
        each_lane("setp.lt.u32 %p1, %tid, 16; @%p1 shfl.sync.idx.b32 %r10, %r0, 1, 31, -1; bar.sync 0;", value)


@pytest.mark.parametrize("mode", ["all", "any", "uni", "ballot"])
def test_vote(mode):
    yes = np.concatenate([np.zeros(32), np.ones(32), RNG.integers(0, 2, 32), np.arange(32) < 20]).astype(np.uint32)
    for negated in ("", "!"):
        for mask in (FULL, 0x000FFFFF):
            put = "vote.sync.ballot.b32 %r10" if mode == "ballot" else f"vote.sync.{mode}.pred %p2"
            code = f"""
              mov.u32 %r10, 77;
              and.b32 %r1, %tid, 31;
              shl.b32 %r2, 1, %r1;
              and.b32 %r2, %r2, {mask};
              setp.ne.u32 %p3, %r2, 0;
              setp.ne.u32 %p1, %r0, 0;
              @%p3 {put}, {negated}%p1, {mask};
            """
            code += "" if mode == "ballot" else "@%p3 selp.u32 %r10, 1, 0, %p2;"
            got = each_lane(code, yes)[0]
            for w in range(4):
                members = [i for i in range(32) if mask >> i & 1]
                votes = [bool(yes[w * 32 + i]) != bool(negated) for i in members]
                want = {
                    "all": all(votes),
                    "any": any(votes),
                    "uni": all(votes) or not any(votes),
                    "ballot": sum(1 << i for i, v in zip(members, votes, strict=True) if v),
                }[mode]
                for i in range(32):
                    assert got[w * 32 + i] == (want if i in members else 77)


@pytest.mark.parametrize("mask", [FULL, 0x0FF0FF0F])
@pytest.mark.parametrize("wide", [False, True])
def test_match(mask, wide):
    value = np.concatenate([RNG.integers(0, 4, 32), np.full(32, 9), np.arange(32)]).astype(np.uint32)
    make = "cvt.u64.u32 %rd5, %r0; shl.b64 %rd5, %rd5, 32;"
    source, kind = ("%rd5", "b64") if wide else ("%r0", "b32")
    code = f"""
      {make}
      mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u32 %r12, 0;
      and.b32 %r1, %tid, 31;
      shl.b32 %r2, 1, %r1;
      and.b32 %r2, %r2, {mask};
      setp.ne.u32 %p3, %r2, 0;
      @%p3 match.any.sync.{kind} %r10, {source}, {mask};
      @%p3 match.all.sync.{kind} %r11|%p1, {source}, {mask};
      @%p3 selp.u32 %r12, 1, 0, %p1;
    """
    one, every, true = each_lane(code, value, outputs=3, threads=96)
    members = [i for i in range(32) if mask >> i & 1]
    for w in range(3):
        of = value[w * 32 : w * 32 + 32]
        same = all(of[i] == of[members[0]] for i in members)
        for i in members:
            assert one[w * 32 + i] == sum(1 << j for j in members if of[j] == of[i])
            assert every[w * 32 + i] == (mask if same else 0)
            assert true[w * 32 + i] == same


REDUCTIONS = {
    "add.u32": lambda x: sum(x),
    "add.s32": lambda x: sum(x),
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda x: min(x, key=lambda v: v - (v >> 31 << 32)),
    "max.s32": lambda x: max(x, key=lambda v: v - (v >> 31 << 32)),
    "and.b32": lambda x: np.bitwise_and.reduce(np.array(x, np.uint64)),
    "or.b32": lambda x: np.bitwise_or.reduce(np.array(x, np.uint64)),
    "xor.b32": lambda x: np.bitwise_xor.reduce(np.array(x, np.uint64)),
}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_redux(op):
    value = RNG.integers(0, 2**32, 128, dtype=np.uint32)
    value[32:64] &= 0xFFFF
    got = each_lane(f"redux.sync.{op} %r10, %r0, 0xffffffff;", value)[0]
    for w in range(4):
        want = int(REDUCTIONS[op]([int(v) for v in value[w * 32 : w * 32 + 32]])) & FULL
        assert (got[w * 32 : w * 32 + 32] == want).all()
    code = f"""
      and.b32 %r1, %tid, 31;
      setp.lt.u32 %p1, %r1, 5;
      selp.b32 %r2, 0x1f, 0xffffffe0, %p1;
      redux.sync.{op} %r10, %r0, %r2;
    """
    got = each_lane(code, value)[0]
    for w in range(4):
        for first, last in ((0, 5), (5, 32)):
            part = slice(w * 32 + first, w * 32 + last)
            assert (got[part] == int(REDUCTIONS[op]([int(v) for v in value[part]])) & FULL).all()


def float_extreme(op, absolute, nan, values):
    """9.7.13.12 for .f32, one value after the other."""
    if absolute:
        values = np.abs(values)
    if nan and np.isnan(values).any():
        return 0x7FFFFFFF
    values = [v for v in values if not np.isnan(v)]
    if not values:
        return 0x7FFFFFFF
    best = values[0]
    for v in values[1:]:
        less = v < best or (v == best and np.signbit(v) and not np.signbit(best))
        more = v > best or (v == best and np.signbit(best) and not np.signbit(v))
        if less if op == "min" else more:
            best = v
    return int(np.float32(best).view(np.uint32))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("absolute", ["", ".abs"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
def test_redux_of_floats(op, absolute, nan):
    value = RNG.standard_normal((6, 32)).astype(np.float32)
    value[1, ::3] = np.nan
    value[2] = np.nan
    value[3] = np.where(RNG.integers(0, 2, 32), np.float32(0.0), np.float32(-0.0))
    value[4, 5], value[4, 6] = np.inf, -np.inf
    value[5] *= 1e-40
    got = each_lane(
        f"redux.sync.{op}{absolute}{nan}.f32 %r10, %r0, -1;", value.reshape(-1).view(np.uint32), target=100, threads=192
    )[0]
    for w in range(6):
        assert (got[w * 32 : w * 32 + 32] == float_extreme(op, absolute, nan, value[w])).all()


@pytest.mark.parametrize("seed", [None, 5])
def test_elect_takes_one_lane(seed):
    code = """
      elect.sync %r10|%p1, 0xffffffff;
      selp.u32 %r11, 1, 0, %p1;
      mov.u32 %r12, 0;
      setp.ge.u32 %p2, %r0, 9;
      @%p2 elect.sync _|%p3, 0xfffffe00;
      @%p2 selp.u32 %r12, 1, 0, %p3;
    """
    who, first, second = each_lane(code, np.arange(128) % 32, outputs=3, target=90, seed=seed)
    lane = np.arange(128) % 32
    assert (who == 0).all()
    assert (first == (lane == 0)).all()
    assert (second == (lane == 9)).all()


def test_elect_waits_for_all_threads_that_its_mask_names():
    with pytest.raises(Fault, match=r"thread 31 .* has exited, but is named by it"):
        each_lane("setp.eq.u32 %p1, %tid, 31; @%p1 exit; elect.sync %r10|%p2, -1;", np.arange(32), target=90)


def test_activemask():
    got = each_lane("setp.lt.u32 %p1, %tid, 7; mov.u32 %r10, 0; @%p1 activemask.b32 %r10;", np.arange(32))[0]
    assert (got == np.where(np.arange(32) < 7, 0x7F, 0)).all()


@pytest.mark.parametrize(
    "code",
    [
        "shfl.idx.b32 %r10, %r0, 1, 31;",
        "vote.all.pred %p1, %p2;",
        "redux.sync.add.f32 %r10, %r0, -1;",
        "redux.sync.min.NaN.s32 %r10, %r0, -1;",
        "match.any.sync.b32 %r10|%p1, %r0, -1;",
        "elect.sync %p1, -1;",
        "shfl.sync.bfly.b32.new %r10, %r0, 1, 31, -1;",
    ],
)
def test_other_forms_are_refused(code):
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+: " + code.split()[0].replace(".", r"\.")):
        each_lane(code, np.arange(32))


def test_warp_exchange_orders_no_memory():
    """A store that another lane reads after a shuffle alone is a race; bar.warp.sync orders it."""
    code = """
      .shared .align 4 .b8 box[128];
      mov.u32 %r1, box;
      shl.b32 %r2, %tid, 2;
      add.u32 %r1, %r1, %r2;
      xor.b32 %r3, %r2, 4;
      mov.u32 %r4, box;
      add.u32 %r3, %r3, %r4;
      st.shared.b32 [%r1], %r0;
      {sync}
      ld.shared.b32 %r10, [%r3];
    """
    value = np.arange(32)
    assert (each_lane(code.format(sync="bar.warp.sync -1;"), value)[0] == value ^ 1).all()
    with pytest.raises(ptxsim.Hazard):
        each_lane(code.format(sync="shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;"), value)
