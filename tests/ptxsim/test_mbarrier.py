"""mbarrier objects: counts and phases against a model of the manual's words, order for the checker, every misuse."""

import re

import numpy as np
import pytest

from ptxsim import Deadlock, Fault, Hazard, PtxError, snippets

SEEDS = [None, 0, 1, 2, 3]
SHARED = ".shared .align 16 .b8 buf[4096]; .shared .align 8 .b64 bar; .shared .align 8 .b64 other;"
INIT = """
  setp.eq.u32 %p30, %tid, 0;
  @%p30 mbarrier.init.shared::cta.b64 [bar], {count};
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""
WAIT = """
  WAIT_{n}:
  mbarrier.try_wait.parity.shared::cta.b64 %p31, [bar], {parity};
  @!%p31 bra WAIT_{n};
"""


def run(body, *tensors, threads=1, init: int | None = None, **options):
    start = "" if init is None else INIT.format(count=init)
    return snippets.run(start + body, *tensors, threads=threads, target=90, declarations=SHARED, **options)


def wait(parity, n=0):
    return WAIT.format(n=n, parity=parity)


class Model:
    """PTX ISA 9.7.13.15.2 and 9.7.13.15.5 to 7, in so many words."""

    def __init__(self, count):
        self.expected = self.pending = count
        self.phase = self.tx = 0

    def turn(self):
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected

    def arrive(self, count):
        self.pending -= count
        self.turn()

    def drop(self, count):
        self.expected -= count
        self.arrive(count)

    def expect_tx(self, count):
        self.tx += count

    def complete_tx(self, count):
        self.tx -= count
        self.turn()


@pytest.mark.parametrize("seed", range(20))
def test_counts_and_phases_are_those_of_the_model(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 12))
    model, want, lines = Model(count), [], []

    def keep(register):
        lines.append(f"st.global.u32 [%arg0 + {4 * len(want)}], {register};")

    for _ in range(60):
        what = rng.choice(["arrive", "arrive", "arrive_tx", "expect", "complete", "drop", "look"])
        if model.pending == 0 and what in ("arrive", "arrive_tx", "drop"):
            what = "complete"
        if what == "complete" and model.tx <= 0:
            what = "look"
        if what == "arrive":
            n = int(rng.integers(1, model.pending + 1))
            lines.append(f"mbarrier.arrive.shared::cta.b64 %rd0, [bar], {n};")
            lines.append("mbarrier.pending_count.b64 %r0, %rd0;")
            keep("%r0")
            want.append(model.pending)
            before = model.phase
            model.arrive(n)
            lines.append("mbarrier.test_wait.shared::cta.b64 %p0, [bar], %rd0; selp.u32 %r0, 1, 0, %p0;")
            keep("%r0")
            want.append(int(model.phase > before))
        elif what == "arrive_tx":
            n = int(rng.integers(1, 1000))
            lines.append(f"mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [bar], {n};")
            model.expect_tx(n)
            model.arrive(1)
        elif what == "expect":
            n = int(rng.integers(1, 1000))
            lines.append(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {n};")
            model.expect_tx(n)
        elif what == "complete":
            n = int(rng.integers(1, model.tx + 1))
            lines.append(f"mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [bar], {n};")
            model.complete_tx(n)
        elif what == "drop" and model.expected > 2 and model.pending > 1:
            lines.append("mbarrier.arrive_drop.shared::cta.b64 _, [bar];")
            model.drop(1)
        for parity in (0, 1):
            lines.append(f"mbarrier.test_wait.parity.shared::cta.b64 %p0, [bar], {parity}; selp.u32 %r0, 1, 0, %p0;")
            keep("%r0")
            want.append(int(model.phase & 1 != parity))
    out = np.full(len(want), 99, np.uint32)
    run("\n".join(lines), out, init=count)
    assert out.tolist() == want
    assert model.phase > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("look", ["try_wait", "test_wait"])
def test_threads_hand_over_data_in_both_directions(seed, look):
    """32 producers fill a slot for 64 consumers, ten times, through a full and an empty mbarrier."""
    body = """
      @%p30 mbarrier.init.shared::cta.b64 [other], 64;
      bar.sync 0;
      mov.u32 %r0, 0;
      mov.u32 %r9, 0;
      shl.b32 %r1, %tid, 2;
      mov.u32 %r2, buf;
      setp.lt.u32 %p0, %tid, 64;
      @%p0 bra CONSUME;
      sub.u32 %r1, %r1, 256;
      add.u32 %r2, %r2, %r1;
    PRODUCE:
      and.b32 %r3, %r0, 1;
      xor.b32 %r3, %r3, 1;
    EMPTY:
      mbarrier.LOOK.parity.shared::cta.b64 %p1, [other], %r3;
      @!%p1 bra EMPTY;
      mad.lo.u32 %r4, %r0, 100, %tid;
      st.shared.u32 [%r2], %r4;
      mbarrier.arrive.shared::cta.b64 _, [bar];
      add.u32 %r0, %r0, 1;
      setp.lt.u32 %p2, %r0, 10;
      @%p2 bra PRODUCE;
      bra DONE;
    CONSUME:
      and.b32 %r1, %r1, 127;
      add.u32 %r2, %r2, %r1;
    AGAIN:
      and.b32 %r3, %r0, 1;
    FULL:
      mbarrier.LOOK.parity.acquire.cta.shared::cta.b64 %p1, [bar], %r3;
      @!%p1 bra FULL;
      ld.shared.u32 %r4, [%r2];
      mad.lo.u32 %r9, %r9, 3, %r4;
      mbarrier.arrive.release.cta.shared::cta.b64 _, [other];
      add.u32 %r0, %r0, 1;
      setp.lt.u32 %p2, %r0, 10;
      @%p2 bra AGAIN;
    DONE:
      mul.wide.u32 %rd0, %gid, 4;
      add.u64 %rd0, %rd0, %arg0;
      st.global.u32 [%rd0], %r9;
    """
    out = np.zeros((3, 96), np.uint32)
    run(body.replace("LOOK", look), out, threads=96, blocks=3, init=32, seed=seed)
    want = np.zeros(64, np.uint64)
    for n in range(10):
        want = (want * 3 + n * 100 + 64 + np.arange(64) % 32) % 2**32
    assert (out[:, :64] == want).all()
    assert not out[:, 64:].any()


def test_try_wait_may_return_false_under_a_seed_only():
    """A thread that takes false for an answer sees it; a program must be right either way (9.7.13.15.16)."""
    body = """
      setp.ge.u32 %p0, %tid, 32;
      @%p0 bra WAIT;
      mbarrier.arrive.shared::cta.b64 _, [bar];
      bra DONE;
    WAIT:
      mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0, 0x989680;
      selp.u32 %r0, 1, 2, %p1;
      mul.wide.u32 %rd0, %tid, 4;
      add.u64 %rd0, %rd0, %arg0;
      st.global.u32 [%rd0], %r0;
    DONE:
    """
    seen = set()
    for seed in [None, *range(12)]:
        out = np.zeros(64, np.uint32)
        run(body, out, threads=64, init=32, seed=seed)
        if seed is None:
            assert set(out[32:]) == {1}
        seen |= set(out[32:].tolist())
    assert seen == {1, 2}


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_may_name_different_mbarriers(seed):
    """Each of 64 threads arrives on one of four mbarriers and waits for it by the state it got."""
    body = """
      mov.u32 %r0, buf;
      and.b32 %r1, %tid, 3;
      mad.lo.u32 %r0, %r1, 8, %r0;
      setp.lt.u32 %p0, %tid, 4;
      @%p0 mbarrier.init.shared.b64 [%r0], 16;
      bar.sync 0;
      cvt.u64.u32 %rd3, %r0;
      cvta.shared.u64 %rd3, %rd3;
      mbarrier.arrive.b64 %rd0, [%rd3];
    LOOP:
      mbarrier.try_wait.b64 %p1, [%rd3], %rd0;
      @!%p1 bra LOOP;
      mbarrier.pending_count.b64 %r2, %rd0;
      mul.wide.u32 %rd1, %gid, 4;
      add.u64 %rd1, %rd1, %arg0;
      st.global.u32 [%rd1], %r2;
    """
    out = np.zeros((2, 64), np.uint32)
    run(body, out, threads=64, blocks=2, seed=seed)
    # Whatever the order, the arrivals on one mbarrier found 16, 15, ... 1 pending.
    assert (np.sort(out.reshape(2, 16, 4), 1) == np.arange(1, 17)[None, :, None]).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noinc", [True, False])
def test_cp_async_arrives_when_its_copies_are_done(seed, noinc):
    body = """
      mov.u32 %r0, buf;
      mad.lo.u32 %r0, %tid, 4, %r0;
      mul.wide.u32 %rd0, %tid, 4;
      add.u64 %rd1, %rd0, %arg0;
      cp.async.ca.shared.global [%r0], [%rd1], 4;
      ARRIVE
    LOOP:
      mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;
      @!%p1 bra LOOP;
      mov.u32 %r1, buf;
      xor.b32 %r2, %tid, 63;
      mad.lo.u32 %r1, %r2, 4, %r1;
      ld.shared.u32 %r3, [%r1];
      add.u64 %rd1, %rd0, %arg1;
      st.global.u32 [%rd1], %r3;
    """
    if noinc:
        arrive = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];"
    else:
        arrive = "cp.async.mbarrier.arrive.shared.b64 [bar]; mbarrier.arrive.shared.b64 _, [bar];"
    x, out = np.arange(64, dtype=np.uint32) * 7, np.zeros(64, np.uint32)
    run(body.replace("ARRIVE", arrive), x, out, threads=64, init=64, seed=seed)
    assert (out == x[::-1]).all()
    for drawn in range(12 if seed == 0 else 0):
        out[:] = 0
        run(body.replace("ARRIVE", arrive), x, out, threads=64, init=64, seed=drawn, check=False)
        assert (out == x[::-1]).all()
    with pytest.raises(Hazard, match=r"reads shared memory at .* cp.async of thread"):
        run(body.replace("ARRIVE", "mbarrier.arrive.shared.b64 _, [bar];"), x, out, threads=64, init=64, seed=seed)


# -- order


HANDOVER = """
  mov.u32 %r0, buf;
  setp.ge.u32 %p0, %tid, 32;
  @%p0 bra READ;
  mad.lo.u32 %r0, %tid, 4, %r0;
  st.shared.u32 [%r0], %tid;
  mbarrier.arrive{release}.shared::cta.b64 _, [bar];
  {after}
  bra DONE;
READ:
  mbarrier.try_wait.parity{acquire}.shared::cta.b64 %p1, [bar], 0;
  @!%p1 bra READ;
  ld.shared.u32 %r1, [%r0];
DONE:
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_an_arrival_releases_and_a_wait_acquires(seed):
    for release in ("", ".release.cta", ".release.cluster"):
        for acquire in ("", ".acquire.cta", ".acquire.cluster"):
            run(HANDOVER.format(release=release, acquire=acquire, after=""), threads=64, init=32, seed=seed)
    for release, acquire in ((".relaxed.cta", ""), ("", ".relaxed.cluster"), (".relaxed.cta", ".relaxed.cta")):
        with pytest.raises(Hazard, match=r"reads shared memory at 0x0 .*nothing orders it after a store by thread 0"):
            run(HANDOVER.format(release=release, acquire=acquire, after=""), threads=64, init=32, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_follows_the_arrival_is_not_released(seed):
    with pytest.raises(Hazard, match="nothing orders it after"):
        run(HANDOVER.format(release="", acquire="", after="st.shared.u32 [%r0], 5;"), threads=64, init=32, seed=seed)


def test_an_mbarrier_is_used_only_after_its_initialisation_is_known():
    body = """
      setp.eq.u32 %p0, %tid, 0;
      @%p0 mbarrier.init.shared::cta.b64 [bar], 32;
      {barrier}
      mbarrier.arrive.shared::cta.b64 _, [bar];
    """
    run(body.format(barrier="bar.warp.sync -1;"), threads=32)
    with pytest.raises(Hazard, match=r"uses the mbarrier at shared .* its mbarrier.init by thread 0"):
        run(body.format(barrier=""), threads=32)


def test_an_mbarrier_is_invalidated_only_after_its_last_use():
    body = """
      mbarrier.arrive.shared::cta.b64 _, [bar];
      {wait}
      {barrier}
      @%p30 mbarrier.inval.shared::cta.b64 [bar];
      @%p30 st.shared.u32 [bar], 1;
    """
    run(body.format(wait=wait(0), barrier="bar.sync 0;"), threads=64, init=64)
    with pytest.raises(Hazard, match=r"mbarrier.inval of .* after its use by thread"):
        run(body.format(wait=wait(0), barrier=""), threads=64, init=64)


def test_invalidated_memory_can_be_used_again():
    body = """
      mbarrier.arrive.shared::cta.b64 _, [bar];
      mbarrier.inval.shared::cta.b64 [bar];
      st.shared.u64 [bar], 77;
      ld.shared.u64 %rd0, [bar];
      st.global.u64 [%arg0], %rd0;
      mbarrier.init.shared::cta.b64 [bar], 3;
      mbarrier.arrive.shared::cta.b64 %rd0, [bar];
      mbarrier.pending_count.b64 %r0, %rd0;
      st.global.u32 [%arg0 + 8], %r0;
    """
    out = np.zeros(2, np.uint64)
    run(body, out, init=1)
    assert out.tolist() == [77, 3]


# -- misuse


def arrive(n=1, to="_"):
    return f"mbarrier.arrive.shared::cta.b64 {to}, [bar]{'' if n == 1 else f', {n}'};\n"


@pytest.mark.parametrize(
    ("words", "count", "body"),
    [
        ("no mbarrier was initialised at shared", None, arrive()),
        ("no mbarrier was initialised at shared", None, "mbarrier.inval.shared::cta.b64 [bar];"),
        ("count of 0: expected 1 to 2^20 - 1", None, "mbarrier.init.shared::cta.b64 [bar], 0;"),
        ("count of 1048576: expected 1", None, "mbarrier.init.shared::cta.b64 [bar], 1048576;"),
        ("is live: mbarrier.inval must come first", 4, arrive() + "mbarrier.init.shared::cta.b64 [bar], 4;"),
        ("arrival with a count of 0", 4, arrive(0)),
        ("5 arrivals on the mbarrier at shared", 4, arrive(5)),
        ("expects only 0 more in this phase", 1, "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 8;" + arrive()),
        ("no thread has seen phase 0 complete", 1, arrive() + arrive()),
        (
            "an arrival with .noComplete completes the phase",
            2,
            "mbarrier.arrive.noComplete.shared::cta.b64 %rd0, [bar], 2;",
        ),
        ("beyond 2^20 - 1", 1, "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1048576;"),
        ("below -(2^20 - 1)", 1, "mbarrier.complete_tx.shared::cta.b64 [bar], 1048576;"),
        ("more bytes were copied than expected", 1, "mbarrier.complete_tx.shared::cta.b64 [bar], 8;" + arrive()),
        ("phase parity 2: expected 0 or 1", 1, "mbarrier.test_wait.parity.shared::cta.b64 %p0, [bar], 2;"),
        ("no arrival on this mbarrier", 1, "mov.u64 %rd0, 12; mbarrier.test_wait.shared::cta.b64 %p0, [bar], %rd0;"),
        ("that no mbarrier.arrive returned", 1, "mov.u64 %rd0, 12; mbarrier.pending_count.b64 %r0, %rd0;"),
        ("must be a multiple of 8", None, "mbarrier.init.shared::cta.b64 [bar + 4], 1;"),
        ("must lie in the block's shared memory", 1, "mbarrier.arrive.b64 _, [%arg0];"),
        (
            "with the state of phase 0: expected the present phase or the one before",
            1,
            arrive(to="%rd0") + wait(0, 1) + arrive() + wait(1, 2) + "mbarrier.test_wait.shared.b64 %p0, [bar], %rd0;",
        ),
    ],
)
def test_misuse(words, count, body):
    with pytest.raises(Fault, match=re.escape(words)):
        run(body, np.zeros(4, np.uint64), init=count)


def test_several_threads_initialise_at_once():
    with pytest.raises(Fault, match="by several threads at once"):
        run("mbarrier.init.shared::cta.b64 [bar], 1;", threads=2)


@pytest.mark.parametrize(
    "body", ["st.shared.u32 [bar + 4], 0;", "ld.shared.u64 %rd0, [bar];", "atom.shared.add.u32 %r0, [bar], 1;"]
)
def test_plain_accesses_to_a_live_mbarrier(body):
    with pytest.raises(Hazard, match="which holds the mbarrier at shared"):
        run(arrive() + body, init=2)
    if "ld" not in body:
        with pytest.raises(Fault, match="was overwritten by something that is no mbarrier instruction"):
            run(arrive() + body + arrive(), init=2, check=False)


def test_an_mbarrier_that_nobody_used_is_no_more_than_a_store():
    """Triton initialises mbarriers in vain and gives their memory to others, tiles as well as mbarriers."""
    again = "mbarrier.init.shared::cta.b64 [bar], 3; mbarrier.arrive.shared::cta.b64 %rd0, [bar];"
    again += "mbarrier.pending_count.b64 %r0, %rd0; st.global.u32 [%arg0], %r0;"
    out = np.zeros(1, np.uint32)
    run(again, out, init=1)
    assert out[0] == 3
    run("st.shared.u64 [bar], 5; ld.shared.u64 %rd0, [bar];", init=1)
    with pytest.raises(Fault, match="was overwritten by something that is no mbarrier instruction"):
        run("st.shared.u64 [bar], 5;" + arrive(), init=1)
    with pytest.raises(Hazard, match=r"writes shared memory at 0x1000 .* after an mbarrier instruction by thread 0"):
        run(
            "setp.eq.u32 %p0, %tid, 0; @%p0 mbarrier.init.shared::cta.b64 [bar], 1; @!%p0 st.shared.u64 [bar], 5;",
            threads=2,
        )


def test_a_parity_may_be_a_bit_extended_by_its_sign():
    body = "mov.u32 %r0, 0xFFFFFFFF; mbarrier.test_wait.parity.shared::cta.b64 %p0, [bar], %r0;"
    body += "selp.u32 %r1, 1, 0, %p0; st.global.u32 [%arg0], %r1;"
    out = np.zeros(1, np.uint32)
    run(body, out, init=1)
    assert out[0] == 1
    run(arrive() + body, out, init=1)
    assert out[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "mbarrier.arrive.shared::cluster.b64 %rd0, [bar];",
        "mbarrier.arrive.release.shared::cta.b64 _, [bar];",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar];",
        "mbarrier.arrive.acquire.cta.shared::cta.b64 _, [bar];",
        "mbarrier.test_wait.parity.shared::cta.b64 %p0, [bar], 0, 5;",
        "mbarrier.test_wait.parity.weird.shared::cta.b64 %p0, [bar], 0;",
        "mbarrier.wait.shared::cta.b64 %p0, [bar], 0;",
    ],
)
def test_forms_that_do_not_exist(text):
    with pytest.raises(PtxError, match="mbarrier"):
        run(text, init=1)


def test_deadlock_tells_what_is_missing():
    body = arrive(2) + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 16384;\n" + wait(0)
    with pytest.raises(
        Deadlock, match=r"mbarrier at shared 0x1000: phase 0, 1 of 3 arrivals pending, 16384 bytes still expected"
    ):
        run(body, init=3)


def test_a_wait_that_may_mean_a_phase_two_back():
    """Thread 32 hasn't heard of the phases that went by: what its parity means depends on who was faster."""
    body = """
      setp.ge.u32 %p0, %tid, 32;
      @%p0 bra LATE;
      {arrivals}
      bra DONE;
    LATE:
      {know}
      {wait}
    DONE:
    """
    slow = "mov.u32 %r0, 0; SPIN: add.u32 %r0, %r0, 1; setp.lt.u32 %p1, %r0, 9; @%p1 bra SPIN;"
    two = arrive() + wait(0, 1) + arrive() + wait(1, 2)
    for parity in (0, 1):
        with pytest.raises(Hazard, match=f"waits for phase parity {parity}, .* may lie two phases back"):
            run(body.format(arrivals=two, know=slow, wait=wait(parity, 3)), threads=33, init=32)
    # The same for one that has heard of phase 0 but not of phase 1: parity 0 is either of phase 0 or of phase 2.
    both = "bar.sync 1, 64;"
    meeting = {"arrivals": arrive() + wait(0, 1) + both + arrive() + wait(1, 2), "know": wait(0, 4) + both + slow}
    with pytest.raises(Hazard, match=r"waits for phase parity 0, .* may lie two phases back"):
        run(body.format(wait=wait(0, 3), **meeting), threads=64, init=32)
    run(body.format(wait=wait(1, 3), **meeting), threads=64, init=32)
    # One that knows by another way how far the mbarrier is means what it says.
    run(
        body.format(arrivals=two + "bar.sync 1, 64;", know="bar.sync 1, 64;", wait=wait(1, 3)),
        threads=64,
        init=32,
    )
