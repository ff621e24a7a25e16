"""Every kernel keeps to its claims on every architecture; the gate fails where a fault is planted, really compiled."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import triton
import triton.language as tl

from gate import binary, cache, cases, compilers, rules, sass, table
from gate.binary import GateError
from gate.case import KIB, Budget, Case, Cuda, Triton
from ptxsim import SHARED_LIMIT

ROOT = Path(__file__).parents[1]
CASES = cases.all_cases()
EVERY = 16  # of a Triton kernel's cases for an architecture, .ci/run has one in so many


def pairs():
    """Each case with each architecture. Of C++ .ci/run has all, which are few compilations. Those of a Triton kernel
    take turns: where one architecture has a size and a feature, the next has the next. A kernel's first case is there
    on each architecture, but on one of sm_86 and sm_120a only, in turn: both have sm_80's instructions and as little
    shared memory."""
    found, of_kernel, kernels = [], defaultdict(list), {}
    for case in CASES:
        for turn, arch in enumerate(case.archs.split()):
            name = tuple(case.name.split()[:2])
            kernel = of_kernel[name, arch]
            kernel.append(case)
            other = ("86", "120a")[kernels.setdefault(name, len(kernels)) % 2]
            first = len(kernel) == 1 and not (arch == other and {"86", "120a"} <= set(case.archs.split()))
            often = isinstance(case.source, Cuda) or len(kernel) % EVERY == (1 + turn) % EVERY or first
            marks = [] if often else [pytest.mark.prove]
            found.append(pytest.param(case, arch, id=f"{case.name}-sm_{arch}", marks=marks))
    return found


@pytest.mark.landing
@pytest.mark.parametrize(("case", "arch"), pairs())
def test_kernels_keep_to_their_claims(case, arch):
    lines = [line for kernel in rules.of_case(case, arch) for line in rules.broken(case, arch, kernel)]
    assert not lines, "\n".join(lines)


def test_no_kernel_is_without_a_case():
    assert any(path.endswith("delta.cu") for path in cases.cuda_sources())
    assert cases.unclaimed(CASES) == []


# ------------------------------------------------------------------------------------------------- planted in .cu files


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and a folder for sources."""
    monkeypatch.setattr(cache, "folder", tmp_path / "cache")
    return tmp_path


@pytest.fixture
def plant(fresh):
    """planted(source, arch, **claims): the lines on the kernel ``planted`` of a source, flags as -D."""

    def lines(source, arch, flags=(), threads=128, shared=0, file="planted.cu", **claims):
        path = fresh / file
        path.write_text(textwrap.dedent(source))
        case = Case("planted", Cuda(str(path), "planted", threads, shared, tuple(flags)), arch, **claims)
        (kernel,) = rules.of_case(case, arch)
        return rules.broken(case, arch, kernel)

    return lines


SPILL = """
    __global__ void __launch_bounds__(512, BLOCKS) planted(const float* x, float* y, int n) {
      float a[48];
    #pragma unroll
      for (int i = 0; i < 48; ++i) a[i] = x[threadIdx.x + i * n];
    #pragma unroll 1
      for (int k = 0; k < n; ++k) {
    #pragma unroll
        for (int i = 0; i < 48; ++i) a[i] = a[i] * a[(i * 7 + 1) % 48] + x[k];
      }
    #pragma unroll
      for (int i = 0; i < 48; ++i) y[threadIdx.x + i * n] = a[i];
    }
"""


@pytest.mark.parametrize("arch", ["80", "86", "90a", "100a", "120a"])
def test_a_spill_is_found(plant, arch):
    assert plant(SPILL, arch, ["-DBLOCKS=1"], threads=512) == []
    stores, loads, stack = plant(SPILL, arch, ["-DBLOCKS=3"], threads=512)  # a third of the registers
    for line, what in ((stores, "spill stores"), (loads, "spill loads"), (stack, "stack")):
        head, figure = line.split(": ")
        assert head == f"kernel planted on sm_{arch}"
        assert 0 < int(figure.split()[0]) < 1000
        assert figure.endswith(f" bytes of {what}, budget 0")


def test_a_spill_within_its_budget_passes_and_no_larger_one(plant):
    lines = plant(SPILL, "90a", ["-DBLOCKS=3"], threads=512)
    most = max(int(line.split(": ")[1].split()[0]) for line in lines)
    claims = {"flags": ["-DBLOCKS=3"], "threads": 512}
    assert plant(SPILL, "90a", **claims, spills={"90a": Budget(most, "planted")}) == []
    lines = plant(SPILL, "90a", **claims, spills={"90a": Budget(most - 1, "planted")})
    assert lines
    assert all(f": {most} bytes of " in line and line.endswith(f", budget {most - 1}") for line in lines)


@pytest.mark.parametrize("arch", ["80", "90a"])
def test_the_outputs_of_eight_splits_are_loaded_side_by_side(arch):
    """ptxas moves loads to where they are used, and may wait for one before it asks for the next."""
    (case,) = [case for case in cases.all_cases() if case.name == "combine"]
    for kernel in rules.of_case(case, arch):
        loops = [loop for loop in sass.loops(sass.parse(binary.unpack(kernel.packed))) if loop.count("LDG")]
        assert loops
        assert [sass.order(loop, [("LDG", 8), ("FFMA", 8)]) for loop in loops] == [None] * len(loops)


def test_a_stack_without_spills_is_found(plant):
    indexed = """
        __global__ void __launch_bounds__(128) planted(float* y, int n) {
          float a[64];
          for (int i = 0; i < 64; ++i) a[i] = y[i];
          for (int k = 0; k < n; ++k) a[k * 7 & 63] += a[k * 5 & 63];
          y[threadIdx.x] = a[n & 63];
        }
    """
    assert plant(indexed, "80") == ["kernel planted on sm_80: 256 bytes of stack, budget 0"]


WGMMA = """
    #include <cstdint>
    __device__ CALL void wgmma(float (&d)[4], uint64_t a, uint64_t b, int add) {
      asm volatile(
          "{ .reg .pred p; setp.ne.b32 p, %6, 0;"
          "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0; }"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(add));
    }
    __global__ void __launch_bounds__(128) planted(float* y, uint64_t a, uint64_t b) {
      float d[4] = {};
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      for (int k = 0; k < 4; ++k) wgmma(d, a + k, b + k, k > 0);
      if (TOUCH) {
        d[0] *= 2.f;  // an accumulator, while the wgmma are under way
        wgmma(d, a, b, 1);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");
      for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = d[i];
    }
"""


@pytest.mark.parametrize(
    ("flags", "code"),
    [(["-DCALL=", "-DTOUCH=1"], "C7511"), (["-DCALL=__noinline__", "-DTOUCH=0"], "C7510")],
    ids=["accumulator touched", "across a call"],
)
def test_a_serialised_wgmma_is_found(plant, flags, code):
    required = {"90a": {"HGMMA": 4}}
    assert plant(WGMMA, "90a", ["-DCALL=", "-DTOUCH=0"], file="planted_sm90.cu", require=required) == []
    lines = plant(WGMMA, "90a", flags, file="planted_sm90.cu")
    assert [
        line for line in lines if f"ptxas: ({code}) " in line and "wgmma.mma_async" in line and "serialized" in line
    ]


LOOP = """
    __global__ void __launch_bounds__(32) planted(float* y, const unsigned* x, int n) {
      float d[4] = {};
      unsigned a[4] = {x[0], x[1], x[2], x[3]}, b[2] = {x[4], x[5]};
    #pragma unroll 1
      for (int i = 0; i < n; ++i) {
        for (int k = 0; k < PRODUCTS; ++k) {
          asm volatile(
              "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
              "{%0, %1, %2, %3};"
              : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
          asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(d[k]));
        }
      }
      for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = d[i];
    }
"""


@pytest.mark.parametrize("arch", ["80", "90a", "120a"])
def test_the_inner_loops_instructions_and_their_order_are_held_to_the_claim(plant, arch):
    flags = ["-DPRODUCTS=2"]
    counts, alternating = {"HMMA.16816": 2, "MUFU.EX2": 2}, ("HMMA", "MUFU.EX2", "HMMA", "MUFU.EX2")
    assert plant(LOOP, arch, flags, threads=32, loop={arch: counts}, order={arch: alternating}) == []
    (line,) = plant(LOOP, arch, ["-DPRODUCTS=3"], threads=32, loop={arch: {"HMMA": 2}})
    assert line == f"kernel planted on sm_{arch}: 3 HMMA in a turn of the inner loop, 2 claimed"
    (line,) = plant(LOOP, arch, flags, threads=32, order={arch: ("HMMA", ("MUFU.EX2", 2), "HMMA")})
    assert line.startswith(
        f"kernel planted on sm_{arch}: the inner loop passes 1 HMMA, 1 MUFU.EX2, 1 HMMA, 1 MUFU.EX2;"
    )
    assert line.endswith("; it should pass HMMA, 2 MUFU.EX2, HMMA")


OPS = ("sin", "cos", "lg2", "rsqrt", "rcp")


@pytest.mark.parametrize("arch", ["80", "120a"])
def test_a_jump_by_a_table_leaves_no_loop(fresh, arch):
    """A switch within the inner loop."""
    end = LOOP.rindex("        }\n      }\n")
    cases_of = [
        f'case {n}: asm volatile("{op}.approx.ftz.f32 %0, %0;" : "+f"(d[0])); break;' for n, op in enumerate(OPS)
    ]
    switch = f"          switch (x[6]) {{ {' '.join(cases_of)} }}\n"
    path = fresh / "planted.cu"
    path.write_text(textwrap.dedent(LOOP[:end] + switch + LOOP[end:]))
    case = Case("planted", Cuda(str(path), "planted", 32, flags=("-DPRODUCTS=2",)), arch)
    (kernel,) = rules.of_case(case, arch)
    program = sass.parse(binary.unpack(kernel.packed))
    (jump, *_) = [x for x in program if x.is_a("BRX")]
    targets = [int(target, 16) for target in jump.operands.partition("->")[2].split()]
    assert len(set(targets)) > 1
    loop = sass.main_loop(kernel)
    assert set(targets) <= loop.blocks
    assert loop.count("HMMA") == 2


def test_an_ignored_setmaxnreg_is_found(plant):
    source = """
        __global__ void __launch_bounds__(384 BLOCKS) planted(float* y, int n) {
          if (threadIdx.x < 128) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
          } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
            for (int i = 0; i < n; ++i) y[threadIdx.x + i] = i;
          }
        }
    """
    claims = {"threads": 384, "require": {"90a": {"USETMAXREG": 2}}, "file": "planted_sm90.cu"}
    assert plant(source.replace("BLOCKS", ", 1"), "90a", **claims) == []
    ignored, missing = plant(source.replace("BLOCKS", ""), "90a", **claims)
    assert ignored.startswith("kernel planted on sm_90a: ptxas: (C7508) ")
    assert "'setmaxnreg' ignored" in ignored
    assert missing == "kernel planted on sm_90a: 0 USETMAXREG instructions, at least 2 required"


def test_a_warning_of_ptxas_is_found(plant):
    (line,) = plant("__global__ void __launch_bounds__(1024, 2) planted(float* y) { *y = 1; }", "86", threads=1024)
    assert "on sm_86: ptxas: Value of threads per SM for entry _Z7plantedPf is out of range" in line


SHARED = """
    __global__ void __launch_bounds__(128) planted(float* y) {
      __shared__ float fixed[STATIC];
      extern __shared__ float s[];
      s[threadIdx.x] = fixed[threadIdx.x] = y[threadIdx.x];
      __syncthreads();
      y[threadIdx.x] = s[127 - threadIdx.x] + fixed[threadIdx.x ^ 1];
    }
"""


@pytest.mark.parametrize("arch", ["80", "86", "90a", "100a", "120a"])
def test_shared_memory_is_held_to_the_chips(plant, arch):
    limit = {"80": 163, "86": 99, "90a": 227, "100a": 227, "120a": 99}[arch] * KIB
    flags = ["-DSTATIC=256"]  # 1 KiB
    assert plant(SHARED, arch, flags, shared=limit - KIB) == []
    assert plant(SHARED, arch, flags, shared=limit - KIB + 16) == [
        f"kernel planted on sm_{arch}: {limit + 16} bytes of shared memory, the chip has {limit}"
    ]


def test_131_kb_of_shared_memory_are_too_much_for_sm_120(plant):
    (line,) = plant(SHARED, "120a", ["-DSTATIC=128"], shared=131072)
    assert line == "kernel planted on sm_120a: 131584 bytes of shared memory, the chip has 101376"


def test_more_than_48_kib_of_static_shared_memory_are_found(plant):
    (line,) = plant(SHARED, "90a", ["-DSTATIC=20000"])
    assert line == "kernel planted on sm_90a: 80000 bytes of static shared memory, at most 49152 may be"
    with pytest.raises(GateError, match=r"ptxas error .*uses too much shared data"):
        plant(SHARED, "80", ["-DSTATIC=20000"])


def test_a_missing_instruction_is_found(plant):
    copy = """
        #include <cstdint>
        __global__ void __launch_bounds__(128) planted(const float4* x, float4* y) {
          __shared__ float4 s[128];
        #if ASYNC
          const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(s + threadIdx.x));
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16; cp.async.wait_all;" :: "r"(to), "l"(x + threadIdx.x));
        #else
          s[threadIdx.x] = x[threadIdx.x];
        #endif
          __syncthreads();
          y[threadIdx.x] = s[127 - threadIdx.x];
        }
    """
    required = {"80": {"LDGSTS": 1, "LDS.128": 1}}
    assert plant(copy, "80", ["-DASYNC=1"], require=required) == []
    (line,) = plant(copy, "80", ["-DASYNC=0"], require=required)
    assert line == "kernel planted on sm_80: 0 LDGSTS instructions, at least 1 required"


def test_registers_and_threads_are_held_to_the_chips_and_to_each_other(plant):
    unbounded = SPILL.replace("__launch_bounds__(512, BLOCKS) ", "").replace("48", "80")
    assert plant(unbounded, "80", threads=256) == []
    (line,) = plant(unbounded, "80", threads=1024)
    assert "registers × 1024 threads take" in line
    assert line.endswith(", the chip has 65536")
    (line,) = plant(SPILL, "80", ["-DBLOCKS=1"], threads=256)
    assert line == "kernel planted on sm_80: 256 threads claimed, launch bounds of 512"


def test_a_source_that_does_not_compile_is_named_with_the_compilers_error(plant):
    with pytest.raises(GateError, match=r"planted\.cu doesn't compile for compute_80: .*error.*undeclared_name"):
        plant("__global__ void planted(float* y) { *y = undeclared_name; }", "80")


def test_a_kernel_without_a_case_and_a_case_without_a_kernel_are_named(fresh):
    path = str(fresh / "two.cu")
    Path(path).write_text(
        "namespace a { namespace { template <typename T, int N> __global__ void one(T* y) { *y = N; } } }\n"
        "template __global__ void a::one<float, 4>(float*);\n"
        'extern "C" __global__ void two(int* y) { *y = 2; }\n'
    )
    one, two = (Case(glob, Cuda(path, glob, threads=32), "80 90a") for glob in ("one<float, ?>", "two"))
    assert cases.unclaimed_in_source(path, [one, two]) == []
    assert cases.unclaimed_in_source(path, [one]) == [
        f"kernel two of {path} on sm_{arch}: no case in tests/gate/cases.py" for arch in ("80", "90a")
    ]
    assert cases.unclaimed_in_source(path, []) == [f"{path}: no case in tests/gate/cases.py"]
    assert [kernel.name for kernel in rules.of_case(one, "80")] == ["one<float, 4>"]
    assert Cuda(path, "a<*<int>>").is_about("a<b<int> >")  # as c++filt writes it
    with pytest.raises(GateError, match=r"no kernel of .*two\.cu is 'three'; it has: .*two"):
        rules.of_case(Case("three", Cuda(path, "three", threads=32), "80"), "80")


# ----------------------------------------------------------------------------------------------------------- the cache


def test_the_cache_answers_the_second_time_and_notices_a_changed_header(fresh, plant):
    header = fresh / "planted.h"
    source = '#include "planted.h"\n__global__ void __launch_bounds__(32) planted(float* y) { SUM }'
    before = cache.compiled

    def verdict(text):
        header.write_text(text)
        found = plant(source, "80", threads=32, require={"80": {"SHFL": 1}})
        return found, cache.compiled - before

    missing = ["kernel planted on sm_80: 0 SHFL instructions, at least 1 required"]
    assert verdict("#define SUM y[threadIdx.x] += 1;") == (missing, 2)  # PTX and its binary
    assert verdict("#define SUM y[threadIdx.x] += 1;") == (missing, 2)
    assert verdict("#define SUM y[threadIdx.x] += __shfl_xor_sync(~0u, y[threadIdx.x], 1);") == ([], 4)
    header.unlink()
    with pytest.raises(GateError, match=r"planted\.h"):
        plant(source, "80")


def test_flags_and_architectures_are_kept_apart_and_share_their_ptx(fresh, plant):
    before = cache.compiled
    for _ in range(2):
        assert plant(SHARED, "80", ["-DSTATIC=128"]) == plant(SHARED, "90a", ["-DSTATIC=128"]) == []
        assert len(plant(SHARED, "90a", ["-DSTATIC=20000"])) == 1
    assert cache.compiled - before == 3 + 2


# -------------------------------------------------------------------------------------------------------------- Triton


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, K, lda, ldb, ldc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        a = tl.load(a_ptr + m[:, None] * lda + (k0 + k)[None, :])
        b = tl.load(b_ptr + (k0 + k)[:, None] * ldb + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * ldc + n[None, :], acc.to(c_ptr.dtype.element_ty))


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def double_kernel(x_ptr):
    tl.store(x_ptr, doubled(tl.load(x_ptr)))


def matmul(archs, tile=(64, 64, 64), fn=matmul_kernel, require=None, **options):
    signature = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16") | dict.fromkeys(("K", "lda", "ldb", "ldc"), "i32")
    constexprs = dict(zip(("BM", "BN", "BK"), tile, strict=True))
    return Case(
        "matmul", Triton(fn, signature, constexprs, options, aligned=("K", "lda", "ldb", "ldc")), archs, require or {}
    )


def triton_lines(case, arch):
    (kernel,) = rules.of_case(case, arch)
    return rules.broken(case, arch, kernel)


MATMUL = {"80": {"HMMA.16816": 32, "LDSM": 16, "LDGSTS": 16}, "90a": {"HGMMA": 4}, "100a": {"UTCHMMA": 4}}


@pytest.mark.parametrize("arch", ["80", "90a", "100a"])
def test_a_triton_kernel_is_compiled_once_and_measured(fresh, arch):
    before, case = cache.compiled, matmul("80 90a 100a", require=MATMUL)
    assert triton_lines(case, arch) == triton_lines(case, arch) == []
    assert cache.compiled == before + 1
    (kernel,) = rules.of_case(case, arch)
    assert kernel.threads == 128
    assert 2 * 2 * 64 * 64 * 2 <= rules.shared(case, kernel) < 64 * KIB  # both operands, at least two stages
    assert triton_lines(matmul("80 90a 100a", require={"80 90a 100a": {"FRND": 1}}), arch) == [
        f"kernel matmul on sm_{arch}: 0 FRND instructions, at least 1 required"
    ]


def test_a_triton_spill_is_found(fresh):
    lines = triton_lines(matmul("80", tile=(128, 256, 64), num_warps=4), "80")
    assert [line.split(" bytes ")[1] for line in lines] == [
        "of spill stores, budget 0",
        "of spill loads, budget 0",
        "of stack, budget 0",
    ]


ADDRESS = ("SHF.R.U32.HI R13, RZ, 0x4, R12", "SGXT.U32 R13, R13, 0xe")
BY_DESCRIPTOR = "HGMMA.64x16x8.F32.TF32 R48, R24, gdesc[UR20], R48"
DESCRIPTORS = {
    "made of an address": ((*ADDRESS, "IADD3 R14, P0, R13, 0x2, RZ", "R2UR UR22, R14"), True),
    "kept on the stack": (
        (*ADDRESS, "STL [R1+0x4], R13", "LDL.64 R14, [R1]", "R2UR UR12, R15", "UIADD3.64 UR22, UR12, 0x2, URZ"),
        True,
    ),
    # As ptxas 12.8 made them.
    "before the address": (("CS2R R14, SRZ", "IADD3 R14, P0, R14, 0x2, RZ", *ADDRESS, "R2UR UR22, R14"), False),
    "of the stack pointer": (("LDC R1, c[0x0][0x28]", "IADD3 R7, P3, R1, 0x2, RZ", "R2UR UR22, R7"), False),
    "on one way only": (("@!P0 BRA 0x40", *ADDRESS, "R2UR UR22, R13"), False),
}


@pytest.mark.parametrize("case", list(DESCRIPTORS))
def test_a_descriptor_that_comes_of_no_address_is_found(fresh, case):
    lines, is_right = DESCRIPTORS[case]
    matmul_case = matmul("80")
    (kernel,) = rules.of_case(matmul_case, "80")
    listing = "".join(f"/*{16 * n:04x}*/ {line} ;\n" for n, line in enumerate((*lines, BY_DESCRIPTOR, "EXIT")))
    counts = {**kernel.sass, "HGMMA.64x16x8.F32.TF32": 1}
    planted = dataclasses.replace(kernel, packed=binary.pack(listing, {}), sass=counts)
    said = f"1 wgmma by descriptors that don't come of an address, the first is {BY_DESCRIPTOR}"
    assert rules.broken(matmul_case, "80", kernel) == []
    assert rules.broken(matmul_case, "80", planted) == ([] if is_right else [f"kernel matmul on sm_80: {said}"])


def test_a_triton_kernels_shared_memory_is_held_to_the_chips(fresh):
    stages = matmul("90a 120a", tile=(128, 128, 64), num_warps=8, num_stages=5)
    assert triton_lines(stages, "90a") == []
    assert "kernel matmul on sm_120a: 131072 bytes of shared memory, the chip has 101376" in triton_lines(
        stages, "120a"
    )


def test_a_triton_kernel_that_does_not_compile_is_named(fresh):
    with pytest.raises(GateError, match="matmul_kernel doesn't compile for sm_80: CompilationError"):
        triton_lines(matmul("80", tile=(64, 64, 48)), "80")
    with pytest.raises(GateError, match="matmul_kernel: sm_90 is claimed, but Triton makes sm_90a"):
        triton_lines(matmul("90"), "90")


def test_a_triton_kernels_key_follows_the_helpers_it_calls(fresh):
    def key(factor):
        path = fresh / "scaled.py"
        path.write_text(
            "import triton\nimport triton.language as tl\n\n\n"
            f"@triton.jit\ndef scaled(x):\n    return x * {factor}\n\n\n"
            "@triton.jit\ndef scale_kernel(x_ptr):\n    tl.store(x_ptr, scaled(tl.load(x_ptr)))\n"
        )
        spec = importlib.util.spec_from_file_location("scaled", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["scaled"] = module
        try:
            spec.loader.exec_module(module)
            return compilers.key(Case("scale", Triton(module.scale_kernel, {"x_ptr": "*fp32"}), "80"), "80")
        finally:
            del sys.modules["scaled"]

    assert key(2.0) == key(2.0) != key(3.0)


def test_a_triton_kernel_without_a_case_is_named():
    """`doubled` is named by another function, so it isn't one."""
    module, case = sys.modules[__name__], matmul("80")
    assert cases.unclaimed_in_modules([module], [case]) == [f"kernel double_kernel of {__name__}: no case compiles it"]
    assert len(cases.unclaimed_in_modules([module], [])) == 2


# ---------------------------------------------------------------------------------------------------- bad claims, tools


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budget(16, " "), "Budget needs bytes > 0 and the argument"),
        (lambda: Budget(0, "none"), "Budget needs bytes > 0 and the argument"),
        (lambda: Case("x", Cuda("x.cu", "*", 32), "75"), "arch must be one of 80, 86, 90, 100, 120.*got '75'"),
        (lambda: Case("x", Cuda("x.cu", "*", 32), ""), "case x: archs is empty"),
        (lambda: Case("x", Cuda("x.cu", "*", 32), "80", {"90a": {"HGMMA": 1}}), "case x: require must name archs"),
        (lambda: Case("x", Cuda("x.cu", "*", 32), "80", {}, {"86": Budget(8, "y")}), "case x: spills must name archs"),
        (lambda: Case("x", Cuda("x.cu", "*", 32), "80", loop={"86": {"HMMA": 1}}), "case x: loop must name archs"),
        (lambda: Case("x", Cuda("x.cu", "*", 32), "80", order={"86": ("HMMA",)}), "case x: order must name archs"),
        (lambda: Triton(matmul_kernel, {"a_ptr": "*bf16"}), "matmul_kernel: signature and constexprs .*'BK'"),
        (lambda: Triton(matmul_kernel, {"d_ptr": "*bf16"}), r"matmul_kernel: .*unknown \['d_ptr'\]"),
    ],
)
def test_claims_are_checked_where_they_are_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_chip_has_a_limit():
    assert {arch: limit // KIB for arch, limit in SHARED_LIMIT.items()} == {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}


def gate(*arguments, **env):
    env = {**os.environ, "PYTHONPATH": "tests", **env}
    return subprocess.run([sys.executable, "-m", "gate", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


def test_the_command_prints_every_kernel_in_a_line_of_its_own():
    text = "delta by vectors"
    for case in CASES:
        for arch in case.archs.split() if case.name == text else ():
            # Compiled again, in processes of its own.
            (cache.folder / f"{compilers.key(case, arch)}.json").unlink(missing_ok=True)
    assert gate("-k", text).returncode == 0
    done = gate("-k", text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 compilations not in the cache, 0 rules broken, " in done.stdout
    rows = [line for line in done.stdout.splitlines() if "delta_kernel<" in line]
    assert len(rows) == 3 * 4
    assert all(row.split("delta_kernel<")[0].startswith("delta") and "LDG" in row and "sm_" in row for row in rows)


def test_the_command_fails_with_a_line_for_each_broken_rule(fresh, monkeypatch, capsys):
    (fresh / "planted.cu").write_text(textwrap.dedent(SHARED))
    source = Cuda(str(fresh / "planted.cu"), "planted", threads=128, shared=131072, flags=("-DSTATIC=128",))
    for archs, status in (("90a", 0), ("90a 120a", 1)):
        monkeypatch.setattr(table, "all_cases", lambda archs=archs: [Case("planted", source, archs)])
        assert table.main(["-k", "planted"]) == status
    out = capsys.readouterr().out
    assert out.count("kernel planted on sm_120a: 131584 bytes of shared memory, the chip has 101376\n") == 1
    assert "2 kernels of 1 cases" in out
    assert table.main(["-k", "no such case"]) == 1


def test_without_a_compiler_or_a_disassembler_the_gate_fails_and_says_so(monkeypatch):
    done = gate("-k", "delta", ATTNKERN_CUDA="0")
    assert done.returncode == 1
    assert "ATTNKERN_CUDA=0: the compile gate compiles the CUDA sources" in done.stdout
    monkeypatch.setenv("ATTNKERN_CUDA", "auto")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    compilers.nvcc.cache_clear()
    with pytest.raises(GateError, match="nvcc not found: the compile gate"):
        compilers.nvcc()

    def nothing(name):
        raise PackageNotFoundError(name)

    binary.disassembler.cache_clear()
    monkeypatch.setattr(binary, "distribution", nothing)
    with pytest.raises(GateError, match="pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"):
        binary.disassembler()
