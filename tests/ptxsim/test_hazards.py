"""What the hazard checker must report, and what it must let pass: small kernels, whole and broken."""

import re

import pytest
import torch

from ptxsim import Fault, Hazard, SimulationError, snippets
from ptxsim.hazards import NOTED_READS

SHARED = ".shared .align 16 .b8 buffer[4096];"
ADDRESSES = """
  mov.u32 %r0, buffer;
  shl.b32 %r1, %tid, 2;
  add.u32 %r2, %r0, %r1;           // own word
  xor.b32 %r3, %r1, {distance};
  add.u32 %r4, %r0, %r3;           // another thread's word
  mul.wide.u32 %rd1, %gid, 4;
  add.u64 %rd2, %arg0, %rd1;       // own element of argument 0
"""


def run(body: str, *, threads=64, distance=128, blocks=1, elements=4096, undefined=False, arguments=1, **options):
    x = torch.arange(elements, dtype=torch.int32)
    more = [torch.zeros(elements, dtype=torch.int32) for _ in range(arguments - 1)]
    if undefined:
        options["undefined"] = [x]
    snippets.run(
        ADDRESSES.format(distance=distance) + body, x, *more, threads=threads, blocks=blocks, module=SHARED, **options
    )
    return x


def pairs(good: str, *removals: str):
    """(kernel, is it right) for the whole kernel and for it without each of these lines."""
    yield good, None
    for line in removals:
        assert line in good
        yield good.replace(line, "", 1), line


EXCHANGE = """
  ld.global.u32 %r10, [%rd2];
  st.shared.u32 [%r2], %r10;
  bar.sync 0;
  ld.shared.u32 %r11, [%r4];
  st.global.u32 [%rd2], %r11;
"""
REUSE = """
  st.shared.u32 [%r2], %tid;
  bar.sync 0;
  ld.shared.u32 %r11, [%r4];
  bar.sync 1;
  st.shared.u32 [%r2], %r11;
"""
WARP = EXCHANGE.replace("bar.sync 0;", "bar.warp.sync -1;")
NAMED = """
  setp.lt.u32 %p1, %tid, 32;
  @%p1 bra PRODUCE;
  bar.sync 3, 64;
  ld.shared.u32 %r11, [%r4];
  bra DONE;
PRODUCE:
  st.shared.u32 [%r2], %tid;
  bar.arrive 3, 64;
DONE:
"""
CP_ASYNC = """
  cp.async.ca.shared.global [%r2], [%rd2], 4;
  cp.async.commit_group;
  cp.async.wait_group 0;
  bar.sync 0;
  ld.shared.u32 %r11, [%r4];
"""
CP_ASYNC_STAGES = """
  cp.async.ca.shared.global [%r2], [%rd2], 4;
  cp.async.commit_group;
  cp.async.ca.shared.global [%r2+1024], [%rd2], 4;
  cp.async.commit_group;
  cp.async.wait_group 1;
  bar.sync 0;
  ld.shared.u32 %r11, [%r4];
"""
ATOMIC = """
  mov.u32 %r20, 0;
  setp.eq.u32 %p1, %tid, 0;
  @%p1 st.shared.u32 [buffer], %r20;
  bar.sync 0;
  atom.shared.add.u32 %r21, [buffer], 1;
  bar.sync 1;
  ld.shared.u32 %r22, [buffer];
"""
SEMAPHORE = """
  setp.ne.u32 %p1, %tid, 0;
  mov.u32 %r30, %ctaid.x;
  setp.eq.u32 %p2, %r30, 1;
  @%p2 bra CONSUME;
  st.global.u32 [%rd2], 7;
  bar.sync 0;
  @%p1 bra DONE;
  fence.acq_rel.gpu;
  st.relaxed.gpu.global.u32 [%arg1], 1;
  bra DONE;
CONSUME:
  @%p1 bra WAITED;
SPIN:
  ld.relaxed.gpu.global.u32 %r31, [%arg1];
  setp.eq.u32 %p3, %r31, 0;
  @%p3 bra SPIN;
  fence.acquire.gpu;
WAITED:
  bar.sync 1;
  sub.u64 %rd3, %rd2, 256;
  ld.global.u32 %r32, [%rd3];
  st.global.u32 [%rd2], %r32;
DONE:
"""
CASES = [
    ("exchange", EXCHANGE, {}, "bar.sync 0;"),
    ("reuse", REUSE, {}, "bar.sync 0;", "bar.sync 1;"),
    ("within a warp", WARP, {"distance": 4}, "bar.warp.sync -1;"),
    ("named barrier", NAMED, {}, "bar.sync 3, 64;\n  ld", "bar.arrive 3, 64;"),
    ("cp.async", CP_ASYNC, {}, "cp.async.wait_group 0;", "bar.sync 0;", "cp.async.commit_group;"),
    ("cp.async in stages", CP_ASYNC_STAGES, {}, "cp.async.wait_group 1;", "bar.sync 0;"),
    ("atomics", ATOMIC, {}, "bar.sync 0;", "bar.sync 1;"),
    (
        "between blocks",
        SEMAPHORE,
        {"blocks": 2, "arguments": 2},
        "bar.sync 0;",
        "fence.acq_rel.gpu;",
        "fence.acquire.gpu;",
        "bar.sync 1;",
    ),
]


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("name", "body", "options"), [case[:3] for case in CASES], ids=[case[0] for case in CASES])
def test_whole_kernels_pass(name, body, options, seed):
    run(body, seed=seed, **options)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    ("body", "options", "line"),
    [(case[1], case[2], line) for case in CASES for line in case[3:]],
    ids=[f"{case[0]} without {line.split(';')[0]}" for case in CASES for line in case[3:]],
)
def test_one_line_less_is_reported(body, options, line, seed):
    broken = body.replace(line, "ld" if line.endswith("ld") else "", 1)
    assert broken != body
    with pytest.raises(SimulationError):
        run(broken, seed=seed, **options)


def message(body: str, kind=Hazard, **options) -> str:
    with pytest.raises(kind) as caught:
        run(body, **options)
    return str(caught.value)


def test_a_report_names_both_threads_the_place_and_the_line():
    text = message(EXCHANGE.replace("bar.sync 0;", ""))
    assert re.search(
        r"reads shared memory at 0x80 of block 0 while nothing orders it after a store by thread 32 ", text
    )
    assert "in snippet, thread 0 (warp 0, lane 0) of block (0, 0, 0)" in text
    assert re.search(r"at PTX line \d+ `ld.shared.u32 %r11, \[%r4\]`", text)


def test_shared_memory_that_nobody_wrote():
    assert "never written" in message("ld.shared.u32 %r11, [%r2];")
    assert "never written" in message("atom.shared.add.u32 %r21, [%r2], 1;")


def test_global_memory_declared_undefined():
    assert "never written" in message("ld.global.u32 %r11, [%rd2];", undefined=True)
    run("st.global.u32 [%rd2], 5; ld.global.u32 %r11, [%rd2];", undefined=True)


def test_threads_that_write_different_values_at_once():
    assert "different values" in message("st.shared.u32 [buffer], %tid;")
    assert "different values" in message("st.global.u32 [%arg0], %tid;")
    run("mov.u32 %r9, 3; st.shared.u32 [buffer], %r9;")


def test_blocks_that_share_global_memory_without_atomics():
    body = "mul.wide.u32 %rd5, %tid, 4; add.u64 %rd6, %arg0, %rd5; "
    assert "nothing orders it" in message(
        body + "add.u32 %r9, %gid, 1; ld.global.u32 %r8, [%rd6]; st.global.u32 [%rd6], 1;", blocks=2
    )
    run(body + "red.global.add.u32 [%rd6], 1;", blocks=2)
    run(body + "ld.global.u32 %r8, [%rd6];", blocks=2)


def test_an_atomic_and_a_plain_access_race():
    assert "nothing orders it" in message("red.global.add.u32 [%arg0], 1; ld.global.u32 %r8, [%arg0];")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("ld.global.u32 %r9, [%rd2+1];", "must be a multiple of 4"),
        ("ld.shared.v4.u32 {%r9, %r10, %r11, %r12}, [%r2];", "must be a multiple of 16"),
        ("ld.global.u32 %r9, [%rd2+16384];", "out of bounds: 0 bytes past the end of argument args[0]"),
        ("ld.global.u32 %r9, [%rd2+-4];", "bytes before argument args[0]"),
        ("st.shared.u32 [%r2+4096], %tid;", "of shared memory, which has 4096 bytes"),
        ("ld.u32 %r9, [0x0900000000000000];", "belongs to no memory"),
        ("st.param.u32 [p0], %tid;", "can't be written"),
        ("trap;", "trap was executed"),
    ],
)
def test_bad_accesses(body, words):
    assert words in message(body, Fault)


@pytest.mark.parametrize("after", [0, 1, NOTED_READS - 1, NOTED_READS, 3 * NOTED_READS])
@pytest.mark.parametrize("before", [0, 1, NOTED_READS // 2, NOTED_READS, 3 * NOTED_READS])
def test_no_read_is_forgotten(before, after):
    """However many there were, and whether some of them are behind a barrier."""
    read = "ld.shared.u32 %r11, [%r4];"
    body = f"st.shared.u32 [%r2], %tid; bar.sync 0; {read * before} bar.sync 0; {read * after}"
    run(body + "bar.sync 0; st.shared.u32 [%r2], %r0;", blocks=2)
    if after:
        assert "while nothing orders it after the read by thread" in message(body + "st.shared.u32 [%r2], %r0;", Hazard)
    else:
        run(body + "st.shared.u32 [%r2], %r0;", blocks=2)


def test_bank_conflicts_are_counted():
    for stride, turns in ((4, 0), (8, 1), (128, 31), (132, 0)):
        body = f"mul.lo.u32 %r5, %tid, {stride}; mov.u32 %r6, buffer; add.u32 %r6, %r6, %r5; st.shared.u32 [%r6], %tid;"
        x = torch.zeros(32, dtype=torch.int32)
        report = snippets.run(body, x, module=".shared .align 16 .b8 buffer[8192];")
        assert report.bank_conflicts == turns, stride


def test_wide_accesses_take_turns_by_parts_of_a_warp():
    body = "mul.lo.u32 %r5, %tid, 16; mov.u32 %r6, buffer; add.u32 %r6, %r6, %r5;"
    body += "st.shared.v4.u32 [%r6], {%tid, %tid, %tid, %tid};"
    x = torch.zeros(32, dtype=torch.int32)
    assert snippets.run(body, x, module=SHARED).bank_conflicts == 0


def test_without_the_checker_nothing_is_reported():
    run(EXCHANGE.replace("bar.sync 0;", ""), check=False)
