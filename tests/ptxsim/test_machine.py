"""Order: divergence and reconvergence, loops, barriers, polling, deadlocks, the schedules; and what is refused."""

import ctypes

import numpy as np
import pytest
import torch

import ptxsim
from ptxsim import Deadlock, Fault, LaunchError, PtxError, UnsupportedInstruction, ptx, snippets

SEEDS = [None, 0, 1, 2]
STORE = "mul.wide.u32 %rd1, %gid, 4; add.u64 %rd2, %arg0, %rd1; st.global.u32 [%rd2], %r0;"


def results(body: str, threads=64, blocks=2, **options) -> np.ndarray:
    out = np.zeros(threads * blocks, np.uint32)
    snippets.run(body + STORE, out, threads=threads, blocks=blocks, **options)
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_divergent_branches_meet_again(seed):
    body = """
      and.b32 %r1, %tid, 3;
      setp.eq.u32 %p1, %r1, 0;
      @%p1 bra ZERO;
      setp.eq.u32 %p2, %r1, 1;
      @!%p2 bra OTHER;
      mov.u32 %r0, 11;
      bra DONE;
    ZERO:
      mov.u32 %r0, 10;
      bra DONE;
    OTHER:
      add.u32 %r0, %r1, 100;
    DONE:
      bar.warp.sync -1;
    """
    tid = np.arange(128) % 64
    expected = np.select([tid % 4 == 0, tid % 4 == 1], [10, 11], tid % 4 + 100)
    assert (results(body, seed=seed) == expected).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_loops_of_different_length(seed):
    body = """
      mov.u32 %r0, 0;
      mov.u32 %r1, 0;
    LOOP:
      add.u32 %r0, %r0, %r1;
      add.u32 %r1, %r1, 1;
      setp.le.u32 %p1, %r1, %tid;
      @%p1 bra LOOP;
    """
    tid = np.arange(128) % 64
    assert (results(body, seed=seed) == tid * (tid + 1) // 2).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_that_leave_early(seed):
    out = results("mov.u32 %r0, 5; setp.gt.u32 %p1, %tid, 40; @%p1 exit;", seed=seed)
    assert (out.reshape(2, 64) == np.where(np.arange(64) > 40, 0, 5)).all()


def test_predicated_instructions_leave_other_threads_alone():
    assert (
        results("mov.u32 %r0, 1; setp.lt.u32 %p1, %tid, 8; @%p1 mov.u32 %r0, 2; @!%p1 add.u32 %r0, %r0, 6;")[:64]
        == np.where(np.arange(64) < 8, 2, 7)
    ).all()


def test_nested_scopes_hide_names():
    body = """
      mov.u32 %r0, 1;
      { .reg .b32 %r0; mov.u32 %r0, 50; { .reg .pred p; setp.eq.u32 p, %tid, 0; @p bra AGAIN; AGAIN: } }
      { .reg .pred p; setp.eq.u32 p, %tid, 1; @!p bra AGAIN; add.u32 %r0, %r0, 1; AGAIN: }
    """
    assert results(body)[:3].tolist() == [1, 2, 1]


def test_special_registers():
    out = np.zeros((2, 3, 2, 40), np.uint32)
    body = """
      mov.u32 %r1, %tid.y; mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, %tid;
      mov.u32 %r4, %ctaid.y; mov.u32 %r5, %nctaid.x; mov.u32 %r6, %ctaid.x; mad.lo.u32 %r7, %r4, %r5, %r6;
      mov.u32 %r8, %ntid.y; mul.lo.u32 %r9, %r8, %r2; mad.lo.u32 %r10, %r7, %r9, %r3;
      mul.wide.u32 %rd1, %r10, 4; add.u64 %rd2, %arg0, %rd1;
      mov.u32 %r11, %laneid; mov.u32 %r12, %warpid; mad.lo.u32 %r13, %r12, 32, %r11;
      st.global.u32 [%rd2], %r13;
    """
    kernel = ptxsim.from_ptx(snippets.text(body, 1), target=80)
    ptxsim.launch(kernel, (3, 2), torch.from_numpy(out), block=(40, 2))
    assert (out.reshape(6, 80) == np.arange(80)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_polling_threads_let_others_run(seed):
    body = """
      setp.ne.u32 %p1, %tid, 0;
      mov.u32 %r1, %ctaid.x;
      setp.eq.u32 %p2, %r1, 1;
      @%p1 bra DONE;
      @%p2 bra WRITE;
    SPIN:
      ld.acquire.gpu.global.u32 %r2, [%arg1];
      setp.eq.u32 %p3, %r2, 0;
      @%p3 bra SPIN;
      bra DONE;
    WRITE:
      st.release.gpu.global.u32 [%arg1], 1;
    DONE:
      mov.u32 %r0, 9;
    """
    out, flag = np.zeros(128, np.uint32), np.zeros(1, np.uint32)
    snippets.run(body + STORE, out, flag, threads=64, blocks=2, seed=seed)
    assert (out == 9).all()


def test_a_flag_that_nobody_sets():
    body = "SPIN: ld.volatile.global.u32 %r2, [%arg0]; setp.eq.u32 %p3, %r2, 0; @%p3 bra SPIN;"
    with pytest.raises(Deadlock, match=r"threads 0-31 poll at PTX line"):
        snippets.run(body, np.zeros(1, np.uint32))


@pytest.mark.parametrize("seed", SEEDS)
def test_deadlock_says_who_waits_for_whom(seed):
    body = "setp.lt.u32 %p1, %tid, 32; @%p1 bra DONE; bar.sync 0; DONE:"
    with pytest.raises(Deadlock) as caught:
        snippets.run(body, np.zeros(1, np.uint32), threads=96, seed=seed)
    text = str(caught.value)
    assert "threads 32-95 wait at PTX line" in text
    assert "barrier 0 has 64 of 96 threads; not there: warps [0]" in text
    assert "threads 0-31 have exited" in text


def test_a_barrier_within_a_divergent_warp():
    body = "setp.lt.u32 %p1, %tid, 16; @%p1 bra A; bar.sync 0; bra DONE; A: bar.sync 0; DONE:"
    with pytest.raises((Deadlock, Fault), match="rest of its warp"):
        snippets.run(body, np.zeros(1, np.uint32), threads=64)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("bar.sync 16;", "a block has the barriers 0 to 15"),
        ("bar.sync 1, 48;", "expected a multiple of 32"),
        ("bar.sync 1, 128;", "at most the block's"),
        (
            "setp.lt.u32 %p1, %tid, 32; @%p1 bra A; bar.sync 1, 64; bra B; A: bar.arrive 1, 32; bar.arrive 1, 32; B:",
            "others gave",
        ),
        ("bar.warp.sync 1;", "doesn't name it"),
        ("setp.gt.u32 %p1, %tid, 3; @%p1 exit; bar.warp.sync -1;", "has exited"),
    ],
)
def test_barrier_misuse(body, words):
    with pytest.raises((Fault, Deadlock), match=words):
        snippets.run(body, np.zeros(1, np.uint32), threads=64)


@pytest.mark.parametrize("op", ["popc.u32 %r0", "and.pred %q", "or.pred %q"])
@pytest.mark.parametrize("seed", SEEDS)
def test_bar_red(op, seed):
    body = f".reg .pred %q; setp.lt.u32 %p1, %tid, 40; bar.red.{op}, 0, %p1;" + (
        "selp.u32 %r0, 1, 0, %q;" if "pred" in op else ""
    )
    expected = {"popc": 40, "and.": 0, "or.p": 1}[op[:4]]
    assert (results(body, seed=seed) == expected).all()


def test_moves_of_vectors():
    body = """
      mov.b64 %rd5, {%tid, %gid};
      { .reg .b32 lo, hi; mov.b64 {lo, hi}, %rd5; add.u32 %r0, lo, hi; }
      { .reg .b16 a, b; mov.b32 {a, b}, %r0; mov.b32 %r1, {b, a}; mov.b32 {a, _}, %r1; mov.b32 %r0, {a, a}; }
    """
    assert (results(body) == 0).all()


def test_shared_local_and_generic_addresses():
    body = """
      { .local .align 4 .b8 mine[16];
        .shared .align 4 .b8 ours[256];
        mov.u64 %rd3, mine; cvta.local.u64 %rd4, %rd3; st.u32 [%rd4+8], %tid; ld.local.u32 %r3, [mine+8];
        mov.u32 %r4, ours; cvt.u64.u32 %rd5, %r4; cvta.shared.u64 %rd6, %rd5;
        mul.wide.u32 %rd7, %tid, 4; add.u64 %rd6, %rd6, %rd7; st.u32 [%rd6], %r3; ld.u32 %r0, [%rd6];
        isspacep.shared %p5, %rd6; selp.u32 %r5, 1, 0, %p5; mad.lo.u32 %r0, %r5, 1000, %r0; }
    """
    assert (results(body)[:64] == np.arange(64) + 1000).all()


def test_a_dynamic_array_starts_behind_the_arrays_of_the_kernel():
    module = ".extern .shared .align 16 .b8 dynamic[];"
    body = """
      { .shared .align 4 .b8 ours[40];
        mov.u32 %r1, dynamic; mov.u32 %r2, ours; sub.u32 %r0, %r1, %r2; }
    """
    assert set(results(body, module=module, shared=64)) == {48}


def test_constant_and_global_variables():
    module = ".const .align 4 .u32 table[4] = {3, 1, 4, 1}; .global .align 4 .u32 counter = 5;"
    body = """
      and.b32 %r1, %tid, 3;
      shl.b32 %r1, %r1, 2;
      mov.u32 %r2, table;
      add.u32 %r2, %r2, %r1;
      ld.const.u32 %r0, [%r2];
      ld.global.u32 %r3, [counter];
      add.u32 %r0, %r0, %r3;
    """
    assert results(body, module=module)[:4].tolist() == [8, 6, 9, 6]


def test_indirect_branches():
    body = """
      and.b32 %r1, %tid, 1;
      brx.idx %r1, TARGETS;
    TARGETS: .branchtargets EVEN, ODD;
    EVEN: mov.u32 %r0, 2; bra DONE;
    ODD: mov.u32 %r0, 3;
    DONE:
    """
    assert results(body)[:4].tolist() == [2, 3, 2, 3]


def test_more_blocks_than_are_resident_at_once():
    assert (
        results("mov.u32 %r0, %ctaid.x;", threads=1024, blocks=40).reshape(40, 1024) == np.arange(40)[:, None]
    ).all()


# -- what is refused


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("frobnicate.u32 %r0, %r1;", r"PTX line \d+: unknown instruction frobnicate.u32"),
        ("add.quickly.u32 %r0, %r1, %r2;", r"unknown modifier .quickly"),
        ("ld.global.someday.u32 %r0, [%arg0];", r"unknown modifier .someday"),
        ("cp.async.ca.shared.global [%r1], [%arg0], 5;", "cp-size 5"),
        ("mov.u32 %r0, %nowhere;", "neither a declared register nor a special one"),
        ("bra NOWHERE;", "no label of this kernel"),
        ("mov.u32 %r0, %pm0;", "neither a declared register nor a special one"),
    ],
)
def test_what_the_simulator_does_not_know(body, words):
    with pytest.raises(PtxError, match=words):
        snippets.run(body, np.zeros(1, np.uint32))


def test_text_that_is_no_ptx():
    for text in ("", "int main() {}", 7):
        with pytest.raises(PtxError, match="no PTX module"):
            ptx.parse(text)
    with pytest.raises(PtxError, match="line 4"):
        ptx.parse(".version 9.0\n.target sm_80\n.address_size 64\n.visible .entry k( {\n mov ?? }")


def test_launch_errors():
    kernel = ptxsim.from_ptx(snippets.text("", 1), target=80)
    x = torch.zeros(4)
    for match, call in (
        ("target: expected one of", lambda: ptxsim.from_ptx(snippets.text("", 1), target=75)),
        ("grid: expected", lambda: ptxsim.launch(kernel, (1, 1, 1, 1), x, block=32)),
        ("block: the threads per block", lambda: ptxsim.launch(kernel, 1, x)),
        ("block: 2048 threads", lambda: ptxsim.launch(kernel, 1, x, block=2048)),
        ("has 1 parameters, got 0", lambda: ptxsim.launch(kernel, 1, block=32)),
        ("can't pass a str", lambda: ptxsim.launch(kernel, 1, "x", block=32)),
        ("has 8 bytes, got a value of 4", lambda: ptxsim.launch(kernel, 1, b"four", block=32)),
        ("expected a CPU tensor, got one on meta", lambda: ptxsim.launch(kernel, 1, x.to("meta"), block=32)),
        ("at most 166912", lambda: ptxsim.launch(kernel, 1, x, block=32, shared=200000)),
        ("expected a Triton JITFunction", lambda: ptxsim.launch(print, 1, x)),
        ("does not exist", lambda: ptxsim.cuda("nothing.cu", target=80)),
    ):
        with pytest.raises(LaunchError, match=match):
            call()


def test_structures_are_passed_by_value():
    class Params(ctypes.Structure):
        _fields_ = [("out", ctypes.c_void_p), ("value", ctypes.c_int32), ("scale", ctypes.c_float)]

    text = """.version 9.0
    .target sm_80
    .address_size 64
    .visible .entry k(.param .align 8 .b8 p[16]) {
      .reg .b64 %a; .reg .b32 %r<4>;
      ld.param.u64 %a, [p]; ld.param.v2.b32 {%r1, %r2}, [p+8];
      st.global.v2.b32 [%a], {%r1, %r2};
      ret; }
    """
    out = torch.zeros(2, dtype=torch.int32)
    ptxsim.launch(ptxsim.from_ptx(text, target=80), 1, Params(out.data_ptr(), 41, 1.5), block=1, tensors=[out])
    assert out[0] == 41
    assert out[1:].view(torch.float32) == 1.5
    with pytest.raises(Fault, match="no global memory was passed"):
        ptxsim.launch(ptxsim.from_ptx(text, target=80), 1, Params(out.data_ptr(), 41, 1.5), block=1)


def test_unsupported_instructions_are_ptx_errors():
    assert issubclass(UnsupportedInstruction, PtxError)


@pytest.mark.parametrize("seed", SEEDS)
def test_setmaxnreg_waits_for_registers(seed):
    """384 threads start with 168 registers each; 240 for two warpgroups are there once the third has given its up."""
    body = """
      setp.lt.u32 %p1, %tid, 256;
      @%p1 bra MORE;
      LESS
      bra DONE;
    MORE:
      setmaxnreg.inc.sync.aligned.u32 240;
    DONE:
    """
    dec = "setmaxnreg.dec.sync.aligned.u32 24;"
    snippets.run(body.replace("LESS", dec), threads=384, target=90, seed=seed)
    with pytest.raises(Deadlock, match=r"setmaxnreg.inc.*the block's warps hold \d+ registers of 65536"):
        snippets.run(body.replace("LESS", ""), threads=384, target=90, seed=seed)


@pytest.mark.parametrize("space", [".global", ""])
def test_adding_floats_in_global_memory_flushes_subnormals(space):
    """PTX ISA 9.7.13.5 and 6: operands and results, to a zero of their sign; however the memory is addressed."""
    old = np.array([1.5e-38, 1e-40, -1e-40, 2e-38], np.float32)
    new = np.array([1e-40, 1e-40, -1e-40, -1.5e-38], np.float32)
    out = old.copy()
    body = """
      mul.wide.u32 %rd0, %tid, 4;
      add.u64 %rd1, %rd0, %arg0;
      add.u64 %rd2, %rd0, %arg1;
      ld.global.f32 %f0, [%rd2];
    """
    snippets.run(f"{body} red{space}.add.f32 [%rd1], %f0;", out, new, threads=4)
    assert out.tobytes() == np.array([1.5e-38, 0.0, -0.0, 0.0], np.float32).tobytes()
