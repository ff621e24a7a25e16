"""Loops as they are read from SASS, their order, and what they take each unit: counted by hand."""

import textwrap
from dataclasses import replace

import pytest

from gate import cases, cycles, rules, sass
from gate.binary import GateError, Kernel, pack, unpack
from gate.case import KIB, Budget, Case, Cuda
from gate.cycles import CHIPS

A100, H100, RTX4090, RTX5090 = CHIPS


def listing(text):
    """SASS of one line per instruction, as cuobjdump prints it: 16 bytes apart; {name} stands for where "name:" is."""
    lines, labels = [], {}
    for line in textwrap.dedent(text).strip().splitlines():
        if line.endswith(":"):
            labels[line[:-1].strip()] = hex(16 * len(lines))
        else:
            lines.append(line.strip())
    encoding = "/* 0x000fe20000000f00 */"
    numbered = [f"        /*{16 * n:04x}*/   {line.format(**labels)} ;   {encoding}" for n, line in enumerate(lines)]
    return "\n".join(numbered)


def kernel(text, registers=128, shared=0, threads=128, **counts):
    return Kernel("planted", registers, 0, 0, 0, shared, 0, threads, [], counts, pack(listing(text), {}))


def case(**claims):
    return Case("planted", Cuda("planted.cu", "planted"), "80 90a", **claims)


# A loop of two warps' worth of everything: a mask that is jumped over, a wait that spins behind the end, a loop within.
LOOP = """
    MOV R1, c[0x0][0x28]
    head:
    LDGSTS.E.BYPASS.128 [R2], [R4.64]
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R2
    @!P0 BRA {spin}
    go:
    inner:
    LDSM.16.M88.4 R4, [R2]
    HMMA.16816.F32.BF16 R8, R4, R12, R8
    HMMA.16816.F32.BF16 R16, R4, R14, R16
    @P1 BRA {inner}
    @P2 BRA {clean}
    FSEL R8, R8, -INF, P3
    FSEL R9, R9, -INF, P3
    clean:
    FMNMX R3, R8, R9, !PT
    FFMA R8, R8, R5, -R3
    IMAD.MOV.U32 R6, RZ, RZ, R7
    MUFU.EX2 R8, R8
    F2FP.BF16.F32.PACK_AB R20, R9, R8
    LDSM.16.MT88.4 R24, [R2+0x100]
    HMMA.16816.F32.BF16 R32, R20, R24, R32
    UIADD3 UR4, UR4, 0x1, URZ
    @P4 BRA {head}
    EXIT
    spin:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R2
    @!P0 BRA {spin}
    BRA {go}
"""


def test_a_listing_survives_packing():
    program = sass.parse(listing(LOOP))
    assert sass.parse(unpack(pack(listing(LOOP), {}))) == program
    assert [str(x) for x in program[:2]] == ["MOV R1, c[0x0][0x28]", "LDGSTS.E.BYPASS.128 [R2], [R4.64]"]
    assert program[3].guard == "@!P0"
    assert program[3].name == "BRA"


def test_a_turn_leaves_out_masks_and_waits():
    loop = sass.main_loop(kernel(LOOP))
    names = [x.name.split(".")[0] for x in loop.flat()]
    assert loop.header == 0x10
    assert "FSEL" not in names
    assert names.count("SYNCS") == 1
    assert names[:4] == ["LDGSTS", "SYNCS", "BRA", "LDSM"]
    (inner,) = loop.inner()
    assert (inner.count("HMMA"), inner.count("LDSM")) == (2, 1)


def test_rolled_loops_turn_as_often_as_the_claim_needs():
    loop = sass.main_loop(kernel(LOOP))
    times = {x.name: n for x, n in loop.turn({"HMMA.16816": 9}) if x.is_a("LDSM", "HMMA", "MUFU")}
    assert times == {
        "LDSM.16.M88.4": 4,
        "HMMA.16816.F32.BF16": 1,  # the last of them, behind the loop
        "MUFU.EX2": 1,
        "LDSM.16.MT88.4": 1,
    }
    assert sum(n for x, n in loop.turn({"HMMA.16816": 9}) if x.is_a("HMMA")) == 9
    for wrong in (8, 1, 0):
        with pytest.raises(GateError, match=f"1 HMMA.16816 and 2 in loops within can't be {wrong} in all"):
            loop.turn({"HMMA.16816": wrong})
    with pytest.raises(GateError, match=r"1 MUFU.EX2 in a turn of the inner loop, 2 claimed"):
        loop.turn({"MUFU.EX2": 2})


def test_a_turns_cycles_are_those_counted_by_hand():
    """9 HMMA, 5 LDSM of 512 bytes, one LDGSTS of 512, one each of MUFU, FFMA, IMAD, FMNMX, F2FP, and in a turn of the
    inner loop a BRA besides."""
    turn = sass.main_loop(kernel(LOOP)).turn({"HMMA.16816": 9})
    found = cycles.measure(turn, A100)
    assert found.cycles == {
        "tensor": 9 * 8,
        "issue": 3 + 4 * 4 + 1 + 9,  # to the inner loop, in it, the jump over the mask, from there
        "mufu": 8,
        "fma": 2 + 2,
        "alu": 2 + 2,
        "shared": (5 + 1) * 4 * 4,  # for each of four partitions
    }
    assert found.busiest == "shared"
    hopper = cycles.measure(turn, H100)
    assert hopper.cycles["tensor"] == pytest.approx(9 * 4 / 0.629)
    assert hopper.cycles["fma"] == 1 + 2
    assert cycles.measure(turn, RTX4090).cycles["tensor"] == 9 * 32


WGMMA = """
    head:
    WARPGROUP.ARRIVE
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT
    HGMMA.64x128x16.F32.BF16 R88, R156, gdesc[UR12].tnspB, R88, gsb0
    WARPGROUP.DEPBAR.LE gsb0, 0x1
    MUFU.EX2 R8, R8
    MUFU.EX2 R9, R9
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    MUFU.EX2 R10, R10
    @P0 BRA {head}
    EXIT
"""


def test_wgmma_reads_its_operands_from_shared_memory():
    """64 x 128 x 16: 64 cycles of the tensor cores; the right operand takes 32 of shared memory, the left one 16 where
    it lies there. TMA writes each right operand once for two warpgroups."""
    planted = kernel(WGMMA, registers=168, shared=100 * KIB, threads=384, USETMAXREG=2, UTMALDG=1)
    found = cycles.figures(case(), planted, H100)
    assert found.turn.cycles["tensor"] == 128
    assert found.turn.cycles["shared"] == (16 + 32) + 32 + 2 * 32 / 2
    assert found.turn.cycles["mufu"] == 24
    assert found.resident == (1, 2.0)
    tf32 = WGMMA.replace("128x16.F32.BF16", "128x8.F32.TF32")
    assert cycles.figures(case(), kernel(tf32, threads=128), H100).turn.cycles["tensor"] == 128


def test_blocks_are_limited_by_registers_memory_and_threads():
    for chip, fits in ((A100, 4), (RTX4090, 4)):
        assert cycles.resident(case(), kernel(LOOP, registers=128), chip).blocks == fits
    assert cycles.resident(case(), kernel(LOOP, registers=32, shared=9 * KIB), RTX4090).blocks == 10
    assert cycles.resident(case(), kernel(LOOP, registers=16, threads=512), RTX4090) == (3, 12.0)
    assert cycles.resident(case(), kernel(LOOP, registers=255, threads=256), A100).blocks == 1


@pytest.mark.parametrize("line", ["HMMA.8816.F32 R4, R5", "HGMMA.64x64.F32 R4, R5", "QMMA.16832.F32 R1, R2"])
def test_products_whose_rate_is_not_known_stop_it(line):
    with pytest.raises(GateError, match=f"no rate is known of {line.split()[0]}"):
        cycles.measure([(x, 1) for x in sass.parse(listing(line))], A100)


# ------------------------------------------------------------------------------------------------------------ the order

BETWEEN = ("WARPGROUP.DEPBAR gsb0, 0x1", ("MUFU.EX2", 2), "WARPGROUP.DEPBAR gsb0, 0x0")


def broken(text, **claims):
    return rules.broken(case(**claims), "90a", kernel(text, threads=128))


def test_exponentials_between_two_waits_pass():
    assert broken(WGMMA, order={"90a": BETWEEN}) == []
    assert broken(WGMMA, order={"90a": (("HGMMA", 2), *BETWEEN, "MUFU.EX2")}) == []
    assert broken(WGMMA, loop={"90a": {"HGMMA": 2, "MUFU.EX2": 3}}) == []


def test_exponentials_behind_the_last_wait_are_found():
    (line,) = broken(WGMMA, order={"90a": (BETWEEN[0], ("MUFU.EX2", 3), BETWEEN[2])})
    assert line == (
        "kernel planted on sm_90a: the inner loop passes 1 WARPGROUP.DEPBAR gsb0, 0x1, 2 MUFU.EX2, "
        "1 WARPGROUP.DEPBAR gsb0, 0x0, 1 MUFU.EX2; it should pass WARPGROUP.DEPBAR gsb0, 0x1, 3 MUFU.EX2, "
        "WARPGROUP.DEPBAR gsb0, 0x0"
    )
    lines = WGMMA.splitlines()
    wait = next(line for line in lines if "0x0" in line)
    lines.remove(wait)
    lines.insert(next(n for n, line in enumerate(lines) if "EX2" in line), wait)  # before all exponentials
    (line,) = broken("\n".join(lines), order={"90a": BETWEEN})
    assert "passes 1 WARPGROUP.DEPBAR gsb0, 0x1, 1 WARPGROUP.DEPBAR gsb0, 0x0, 3 MUFU.EX2; it should" in line


def test_wrong_counts_and_kernels_without_a_loop_are_found():
    (line,) = broken(WGMMA, loop={"90a": {"HGMMA": 4}})
    assert line == "kernel planted on sm_90a: 2 HGMMA in a turn of the inner loop, 4 claimed"
    (line,) = broken("MUFU.EX2 R8, R8\nEXIT", loop={"90a": {"HGMMA": 4}})
    assert line == "kernel planted on sm_90a: no loop with tensor-core instructions"
    assert broken(WGMMA.replace("HGMMA.64x128x16.F32.BF16 R24", "NOP R24"), order={"90a": BETWEEN}) == []


def test_the_simulators_wgmma_kernel_waits_before_its_exponentials():
    """Compiled for real: written as QK, PV, wait 1, softmax, wait 0, and ptxas moves the softmax behind both waits."""
    given = next(c for c in cases.all_cases() if c.name.startswith("flash") and "sm90" in c.name and "d128" in c.name)
    (planted,) = rules.of_case(given, "90a")
    claims = Case("planted", given.source, "90a", loop={"90a": {"HGMMA.64x128x16": 16}}, order={"90a": BETWEEN})
    (line,) = rules.broken(claims, "90a", planted)
    assert "WARPGROUP.DEPBAR gsb0, 0x1, 1 WARPGROUP.DEPBAR gsb0, 0x0, 66 MUFU.EX2; it should pass" in line


# ------------------------------------------------------------------------------------------------ registers handed over

SPECIALISED = """
    MOV R167, R1
    @P0 BRA {consumer}
    USETMAXREG.DEALLOC.CTAPOOL 0x18
    BRA {producer}
    consumer:
    USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0
    IMAD.WIDE.U32 R238, R3, 0x10, R4
    @P1 BRA {consumer}
    EXIT
    producer:
    LDG.E R23, desc[UR44][R22.64]
    LDG.E.128 R20, desc[UR44][R2.64]
    EXIT
"""


def test_registers_behind_setmaxnreg_are_held_to_what_it_leaves():
    """Whatever can be reached from it, wherever the compiler put that; pairs and fours by their last one."""
    planted = kernel(SPECIALISED, USETMAXREG=2)
    assert sorted(sass.setmaxnreg(planted)) == [(24, 24), (240, 240)]
    assert rules.broken(case(), "90a", planted) == []
    for old, new, used, left in (
        ("E R23, ", "E R24, ", 25, 24),
        ("R22.64", "R23.64", 25, 24),
        ("R20, ", "R21, ", 25, 24),
        ("R238, ", "R239, ", 241, 240),
    ):
        (line,) = rules.broken(case(), "90a", kernel(SPECIALISED.replace(old, new), USETMAXREG=2))
        assert line == f"kernel planted on sm_90a: {used} registers behind a USETMAXREG that leaves {left}"


# ------------------------------------------------------------------------------------------------------- a second walk

# The second walk's loop stands first: what is run after what counts.
TWICE = """
    STL.64 [R1], R2
    BRA {first}
    again:
    LDL.64 R2, [R1]
    STL.128 [R1+0x10], R4
    HMMA.16816.F32.BF16 R8, R4, R12, R8
    @P1 BRA {again}
    BRA {end}
    first:
    LDL R6, [R1+0x8]
    HMMA.16816.F32.BF16 R8, R4, R12, R8
    @P0 BRA {first}
    @P2 BRA {again}
    end:
    EXIT
"""


def test_of_two_walks_the_loops_of_the_first_are_held_to_a_budget():
    planted = replace(kernel(TWICE), stack=48)
    assert sass.spilled_in_loops(planted) == (0, 4)
    (line,) = rules.broken(case(walks_again=True), "90a", planted)
    assert line == "kernel planted on sm_90a: 4 bytes of spill loads in the loops of the first walk, budget 0"
    assert rules.broken(case(walks_again=True, spills={"90a": Budget(4, "one word")}), "90a", planted) == []
    (line,) = rules.broken(case(walks_again=True), "90a", replace(planted, packed=kernel(LOOP).packed))
    assert line.endswith("1 inner loops with tensor-core instructions; two walks have an even number")
