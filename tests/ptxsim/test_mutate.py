"""The planted bugs themselves: that each changes what it says and nothing else, and still assembles."""

import shutil
import subprocess
from pathlib import Path

import pytest
import triton

from ptxsim import mutate

# One of everything that a family looks for, in the shapes that compilers and inline assembly write them.
PTX = """\
.version 8.3
.target sm_90a
.address_size 64

.visible .entry other()
{
    bar.sync 0;
    ret;
}

.visible .entry kernel(
    .param .u64 kernel_param_0, // a comment; with a semicolon {
    .param .align 64 .b8 kernel_param_1[128]
)
.maxntid 128, 1, 1
{
    .reg .pred %p<4>;
    .reg .b32 %r<40>;
    .reg .f32 %f<40>;
    .reg .b64 %rd<8>;
    .shared .align 128 .b8 tile[1024];
    .loc 1 10 3
    mov.u32 %r1, tile; ld.param.u64 %rd1, [kernel_param_0];
    cvta.to.global.u64 %rd1, %rd1;
    setp.eq.s32 %p1, %r1, 0;
    mov.b64 %rd2, 0;
    // begin inline asm
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 4;
    // end inline asm
    fence.mbarrier_init.release.cluster;
    bar.sync \t0;
    @!%p1 bra $L__AFTER;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r2;
$L__AFTER:
    {
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r3;
    @!complete bra.uni waitLoop;
    }
    cp.async.cg.shared.global [%r1], [%rd1], 16, 16;
    cp.async.commit_group;
    cp.async.wait_group 1;
    bar.sync 1, 128;
    @%p1 bra $L__SKIP;
    cp.async.ca.shared.global [%r1], [%rd1], 4;
$L__SKIP:
    cp.async.commit_group;
    cp.async.wait_all;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r4, %r5}, [%r1];
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r4,%r5,%r6,%r7},
        {%r8, %r9}, {%f0, %f1, %f2, %f3};
    wgmma.fence.sync.aligned;
    {
    .reg .pred p;
    setp.ne.b32 p, 1, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f4, %f5, %f6, %f7}, %rd2, %rd3, p, 1, 1, 0, 1;
    }
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f4, %f5, %f6, %f7},
        {%r10, %r11, %r12, %r13}, %rd3, 1, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    @%p1 bra $L__RELEASED;
    mbarrier.arrive.shared::cta.b64 _, [%r1];
$L__RELEASED:
    st.shared.u32 [%r1+4], %r20;
    ld.shared.u32 %r21, [%r1+8];
    add.s32 %r22, %r21, 1;
    add.s32 %r23, %r1, 16;
    setp.lt.s32 %p2, %r20, 3;
    @%p2 bra $L__KEPT;
    bar.arrive 2, 128;
$L__KEPT:
    bar.warp.sync -1;
    fence.proxy.async.shared::cta;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ld.acquire.gpu.global.u32 %r24, [%rd1];
    red.release.gpu.global.add.u32 [%rd1], 1;
    griddepcontrol.wait;
    ret;
}
.file 1 "kernel.cu"
"""

KERNEL = "kernel"


def named(family: str, entry: str = KERNEL) -> dict[str, mutate.Mutant]:
    return {m.name.split(": ", 1)[1].rsplit(" at line", 1)[0]: m for m in mutate.mutants(PTX, entry, [family])}


def changed(mutant: mutate.Mutant) -> tuple[list[str], list[str]]:
    """The lines that are only in the original, and only in the mutant."""
    before, after = PTX.splitlines(), mutant.text.splitlines()
    return [x for x in before if x not in after], [x.strip() for x in after if x.strip() and x not in before]


def opcodes(text: str) -> list[str]:
    return [i.opcode for i in mutate.instructions(text, KERNEL)]


def test_entries_are_found_in_order():
    assert mutate.entries(PTX) == ["other", KERNEL]


def test_instructions_have_line_predicate_and_operands():
    found = {i.opcode: i for i in mutate.instructions(PTX, KERNEL)}
    lines = PTX.splitlines()
    assert all(i.opcode in lines[i.line - 1] for i in found.values())
    assert found["mbarrier.init.shared::cta.b64"].predicate == "@%p1"
    assert found["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"].operands[1:3] == (
        "{%r4,%r5,%r6,%r7}",
        "{%r8, %r9}",
    )
    assert found["ret"].operands == ()
    assert "bra.uni" in found


@pytest.mark.parametrize("entry", [None, "absent"])
def test_an_entry_that_is_not_there_is_named(entry):
    with pytest.raises(ValueError, match=r"found the entries \['other', 'kernel'\]"):
        mutate.instructions(PTX, entry)


def test_the_only_entry_needs_no_name():
    text = PTX[: PTX.index(".visible .entry other")] + PTX[PTX.index(".visible .entry kernel") :]
    assert len(mutate.instructions(text)) == len(mutate.instructions(PTX, KERNEL))


def test_what_is_not_ptx_is_refused_with_its_line():
    with pytest.raises(ValueError, match="line 7 isn't understood"):
        mutate.instructions(PTX.replace("    bar.sync 0;", "    = nonsense", 1), "other")


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="'nothing' is unknown; expected some of drop_barrier"):
        mutate.mutants(PTX, KERNEL, ["nothing"])


@pytest.mark.parametrize("family", mutate.FAMILIES)
def test_every_family_plants_bugs_in_the_chosen_kernel_only(family):
    planted = mutate.mutants(PTX, KERNEL, [family])
    body = PTX.index(".visible .entry kernel")
    assert planted
    for mutant in planted:
        assert mutant.text != PTX
        assert mutant.text[:body] == PTX[:body]
        assert mutate.instructions(mutant.text, "other") == mutate.instructions(PTX, "other")
        assert PTX.count("\n", 0, body) < mutant.line <= PTX.count("\n")


def test_names_are_unique():
    names = [m.name for m in mutate.mutants(PTX, KERNEL)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("family", "dropped"),
    [
        ("drop_barrier", ["bar.sync", "bar.sync", "bar.warp.sync"]),
        (
            "drop_arrive",
            ["mbarrier.arrive.expect_tx.shared::cta.b64", "mbarrier.arrive.shared::cta.b64", "bar.arrive"],
        ),
        (
            "drop_commit",
            [
                "cp.async.commit_group",
                "cp.async.commit_group",
                "wgmma.commit_group.sync.aligned",
                "cp.async.bulk.commit_group",
            ],
        ),
        (
            "drop_fence",
            ["fence.mbarrier_init.release.cluster", "wgmma.fence.sync.aligned", "fence.proxy.async.shared::cta"],
        ),
    ],
)
def test_dropped_instructions_are_gone_one_at_a_time(family, dropped):
    planted = mutate.mutants(PTX, KERNEL, [family])
    assert [m.name.split(": drop ")[1].rsplit(" at line ", 1)[0] for m in planted] == dropped
    for mutant, opcode in zip(planted, dropped, strict=True):
        rest = opcodes(PTX)
        line = PTX.splitlines()[mutant.line - 1]
        assert opcode in line
        assert line not in [*mutant.text.splitlines(), None][mutant.line - 1 : mutant.line]
        rest.remove(opcode)
        assert sorted(opcodes(mutant.text)) == sorted(rest)


def test_waits_let_go_too_early():
    loosened = {name: changed(m)[1] for name, m in named("loosen_wait").items()}
    assert loosened == {
        "don't wait in mbarrier.try_wait.parity.shared.b64": ["setp.eq.u32 complete, 0, 0;"],
        "1 + 1 groups in cp.async.wait_group": ["cp.async.wait_group 2;"],
        "drop cp.async.wait_all": [],
        "0 + 1 groups in wgmma.wait_group.sync.aligned": ["wgmma.wait_group.sync.aligned 1;"],
        "0 + 1 groups in cp.async.bulk.wait_group": ["cp.async.bulk.wait_group 1;"],
        "reads only in cp.async.bulk.wait_group": ["cp.async.bulk.wait_group.read 0;"],
        "drop griddepcontrol.wait": [],
    }


def test_parities_and_counts_are_shifted_in_a_register_of_their_own():
    (flipped,) = named("flip_parity").values()
    assert changed(flipped)[1] == [
        "{ .reg .b32 %mutant; xor.b32 %mutant, %r3, 1; mbarrier.try_wait.parity.shared.b64 complete, [%r1], %mutant; }"
    ]
    shifted = {name: changed(m)[1] for name, m in named("shift_count").items()}
    init, expect = "mbarrier.init.shared::cta.b64", "mbarrier.arrive.expect_tx.shared::cta.b64"
    assert shifted == {
        f"{by} in {opcode}": [
            f"{{ .reg .b32 %mutant; add.s32 %mutant, {count}, {int(by)}; {predicate}{opcode} {first}, %mutant; }}"
        ]
        for by in ("+1", "-1")
        for opcode, count, predicate, first in ((init, "4", "@%p1 ", "[%r1]"), (expect, "%r2", "", "_, [%r1]"))
    }


def test_operands_of_matrix_multiplications_are_swapped():
    swapped = {name: " ".join(changed(m)[1]) for name, m in named("swap_operands").items()}
    mma, wgmma = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
    )
    assert "{%r4, %r6, %r5, %r7}" in swapped[f"a[1] and a[2] in {mma}"]
    assert "{%r9, %r8}" in swapped[f"b[0] and b[1] in {mma}"]
    assert "%rd3, %rd2, p, 1, 1, 0, 1;" in swapped[f"a and b in {wgmma}"]
    assert "{%r10, %r12, %r11, %r13}" in swapped[f"a[1] and a[2] in {wgmma}"]
    assert "%rd2, %rd3, p, 1, 1, 0, 0;" in swapped[f"transposition 0 in {wgmma}"]
    assert "%rd3, 1, 1, 1, 1;" in swapped[f"transposition 1 in {wgmma}"]
    assert len(swapped) == 6


def test_of_unrolled_copies_the_first_and_the_last_are_changed():
    line = next(x for x in PTX.splitlines() if "mma.sync" in x) + "\n        {%r8, %r9}, {%f0, %f1, %f2, %f3};\n"
    text = PTX.replace(line, "    .loc 1 70 1\n" + 3 * line + "    .loc 1 71 1\n" + line)
    first = text.splitlines().index(line.splitlines()[0]) + 1
    lines = [m.line for m in mutate.swap_operands(text, KERNEL) if "mma.sync" in m.name]
    assert lines == [first, first, first + 4, first + 4, first + 7, first + 7]


def test_acquire_and_release_become_relaxed():
    assert {name: changed(m)[1] for name, m in named("weaken_order").items()} == {
        "relax ld.acquire.gpu.global.u32": ["ld.relaxed.gpu.global.u32 %r24, [%rd1];"],
        "relax red.release.gpu.global.add.u32": ["red.relaxed.gpu.global.add.u32 [%rd1], 1;"],
    }


def test_stages_are_released_early():
    released = {m.name.split(": ")[1].split(" at line")[0]: m for m in mutate.mutants(PTX, KERNEL, ["release_early"])}
    assert set(released) == {"bar.sync", "mbarrier.arrive.shared::cta.b64", "bar.arrive"}

    def order(mutant: mutate.Mutant, *wanted: str) -> list[str]:
        return [o for o in opcodes(mutant.text) if o in wanted]

    # The wait goes to where the lanes that release and those that don't are together again
    lines = [x.strip() for x in released["mbarrier.arrive.shared::cta.b64"].text.splitlines()]
    join = lines.index("$L__RELEASED:")
    assert lines[join + 1] == "wgmma.wait_group.sync.aligned 0;"
    assert lines.count("wgmma.wait_group.sync.aligned 0;") == 1
    # The release keeps its condition, and what that is computed from, but doesn't wait for the load
    assert order(released["bar.arrive"], "bar.arrive", "st.shared.u32", "ld.shared.u32") == [
        "bar.arrive",
        "st.shared.u32",
        "ld.shared.u32",
    ]
    text = released["bar.arrive"].text
    assert "setp.lt.s32 %p2, %r20, 3;\n\t@!%p2 bar.arrive 2, 128;\n\tst.shared.u32" in text
    # The barrier goes behind the copies, to the commit, which all threads reach
    lines = [x.strip() for x in released["bar.sync"].text.splitlines()]
    assert lines[lines.index("$L__SKIP:") + 1] == "bar.sync 1, 128;"
    assert lines.count("bar.sync 1, 128;") == 1


def assemble(text: str, folder: Path) -> str:
    """What ptxas, which comes with Triton, has to say against a text; nothing if it assembles."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        ptxas = str(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas")
    source = folder / "mutant.ptx"
    source.write_text(text)
    command = [ptxas, "-O0", "-arch=sm_90a", str(source), "-o", str(folder / "mutant.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("family", mutate.FAMILIES)
def test_mutants_assemble(family, tmp_path):
    assert assemble(PTX, tmp_path) == ""
    for mutant in mutate.mutants(PTX, KERNEL, [family]):
        assert assemble(mutant.text, tmp_path) == "", mutant.name


def test_the_assembler_would_notice(tmp_path):
    assert assemble(PTX.replace("bar.sync 1, 128;", "bar.sync 1 128;"), tmp_path) != ""
