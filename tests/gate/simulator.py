"""Cases of the simulator's own kernels, tests/ptxsim/kernels/: each must hold the instructions that it is there for."""

from __future__ import annotations

from pathlib import Path

from ptxsim.kernels import triton_forward

from .case import Budget, Case, Cuda, Triton

FOLDER = "tests/ptxsim/kernels"
TILES_FILE = "tests/cuda/tiles_sm90.cu"  # of the product's tiles: tests/test_cuda_tiles.py
# One architecture for each instruction: what others make of these kernels ships nowhere.
ALL = "80"

# The kernels of one mechanism each, with the instructions in which it shows.
MECHANISMS_SM80 = {
    "cp_async_pipeline_*": {"LDGSTS": 1, "LDGDEPBAR": 1, "DEPBAR": 1},
    "tree_reduction": {"BAR": 1},
    "named_barrier_ring": {"BAR": 4},
    "atomic_histogram": {"ATOMS": 1},
    "atomic_zoo": {"ATOMS": 1, "ATOMG": 3},
    "semaphore_chain": {"MEMBAR": 1},
    "warp_collectives": {"SHFL": 6, "VOTE": 5, "MATCH": 3, "REDUX": 5},
    "half_arithmetic": {"HMUL2": 1, "HMNMX2": 6},
    "narrow_access": {"STS": 4, "LDS": 4},
    "divergence": {"VOTE": 2},
    "integer_arithmetic": {"POPC": 1, "FLO": 1, "BREV": 1},
    "ldmatrix_shapes": {"LDSM": 6},
    "mma_*": {"HMMA": 1},
}
ARITHMETIC = {
    "float_exact": {"FFMA": 1},
    "integer": {"IMAD": 1},
    "half_pairs": {"HFMA2": 1},
    "bfloat16_pairs": {"HFMA2": 1},
}
# With the most shared memory of each. Four products of four steps each.
TILES_SM90 = {"tile_products_*": (81928, {"HGMMA": 16, "UTMALDG": 4}), "tile_reduce_add": (16384, {"UTMAREDG": 2})}
MECHANISMS_SM90 = {
    "mbarrier_ring": {"SYNCS": 8},
    "tma_copy_*": {"UTMALDG": 1, "UTMASTG": 1, "SYNCS": 3},
    "tma_reduce_add": {"UTMAREDG": 1},
    "bulk_copy_reduce": {"UBLKCP": 1, "UBLKRED": 1},
    "wgmma_*": {"HGMMA": 4},
    "stmatrix_shapes": {"STSM": 6},
    "elect_leader": {"ELECT": 1},
    "programmatic_launch": {"PREEXIT": 1, "ACQBULK": 1},
}


def mechanism(file: str, kernel: str, archs: str, counts: dict[str, int], *, threads=0, shared=0, **claims) -> Case:
    source = Cuda(f"{FOLDER}/{file}", kernel, threads, shared)
    return Case(f"{Path(file).stem} {kernel}", source, archs, require={archs: counts}, **claims)


def cuda_cases() -> list[Case]:
    return [
        # Two products of a 64-key block: 4 mma for each 16 columns of head_dim. Q, K and V are each copied by LDGSTS.
        *(
            Case(
                f"flash_sm80_{name}",
                Cuda(f"{FOLDER}/flash_sm80.cu", f"flash_sm80_{name}", shared=640 * head_dim),
                ALL,
                require={ALL: {"HMMA.16816": head_dim, "LDSM": head_dim // 2, "LDGSTS": 20}},
            )
            for name, head_dim in (("f16_d64", 64), ("bf16_d64", 64), ("bf16_d128", 128))
        ),
        # One wgmma for each 16 of head_dim (Q K') and of the block's keys (P V), in the loop and once beside it.
        *(
            Case(
                f"flash_sm90_bf16_d{head_dim}",
                Cuda(f"{FOLDER}/flash_sm90.cu", f"flash_sm90_bf16_d{head_dim}", shared=shared),
                "90a",
                require={"90a": {"HGMMA": head_dim // 4, "UTMALDG": 3, "UTMASTG": 1, "SYNCS": 20, "USETMAXREG": 2}},
            )
            for head_dim, shared in ((64, 49224), (128, 163912))
        ),
        *(mechanism("arithmetic.cu", kernel, ALL, counts, threads=128) for kernel, counts in ARITHMETIC.items()),
        mechanism(
            "arithmetic.cu",
            "float_library",
            ALL,
            {"MUFU": 1},
            threads=128,
            spills={ALL: Budget(32, "sinf and cosf reduce large arguments with a table in local memory")},
        ),
        *(mechanism("mechanisms_sm80.cu", kernel, ALL, counts) for kernel, counts in MECHANISMS_SM80.items()),
        *(mechanism("mechanisms_sm90.cu", kernel, "90a", counts) for kernel, counts in MECHANISMS_SM90.items()),
        *(
            Case(f"tiles_sm90 {name}", Cuda(TILES_FILE, name, shared=shared), "90a", require={"90a": counts})
            for name, (shared, counts) in TILES_SM90.items()
        ),
        mechanism("mechanisms_sm80.cu", "warp_exchange", ALL, {"SHFL": 5}, threads=1024, shared=4096),
        mechanism(
            "mechanisms_sm80.cu",
            "local_array",
            ALL,
            {"STL": 1, "LDL": 1},
            spills={ALL: Budget(64, "local memory is its subject: an array indexed by a run-time value")},
        ),
    ]


# Of the Triton kernels, configurations like those that the tests run: the arguments' types, constants, instructions.
INTEGERS = "seqlen_q:i32 seqlen_k:i32 group:i32"
MMA = {"80": {"HMMA": 64, "LDSM": 16, "LDGSTS": 16}, "90a": {"HGMMA": 8, "LDGSTS": 16}, "100a": {"UTCHMMA": 8}}
TF32 = {"80": {"HMMA.1688": 128, "LDGSTS": 16}}
TMA = {"90a": {"HGMMA": 8, "UTMALDG": 3, "UTMASTG": 1, "SYNCS": 8}}
TILES = {"HEAD_DIM": 64, "BLOCK_M": 64, "BLOCK_N": 64, "CAUSAL": True}
BLOCK = {"BLOCK": 128}


def triton_case(name: str, types: str, constexprs, archs: str, require, **claims) -> Case:
    """name is the function's, and may be followed by what tells the configuration; types holds "argument:type"."""
    signature = dict(argument.split(":") for argument in types.split())
    source = Triton(getattr(triton_forward, name.split()[0]), signature, constexprs, {"num_warps": 4})
    return Case(name, source, archs, require, **claims)


def pointers(dtype: str, precision: str | None, archs: str, require) -> Case:
    types = f"q:*{dtype} k:*{dtype} v:*{dtype} out:*{dtype} lse:*fp32 scale_log2:fp32 {INTEGERS}"
    tiles = TILES | {"PRECISION": precision}
    return triton_case(f"forward_pointers {dtype} {precision or ''}".strip(), types, tiles, archs, require)


def triton_cases() -> list[Case]:
    box = "tensordesc<bf16[1,64,64]>"
    rich = "q:*bf16 k:*bf16 v:*bf16 bias:*bf16 out:*bf16 lse:*fp32 kept:*i32 scale_log2:fp32 seqlen_q:i32 seqlen_k:i32"
    return [
        pointers("bf16", None, "80 90a 100a", MMA),
        pointers("fp16", None, ALL, {ALL: MMA[ALL]}),
        pointers("fp32", "tf32", ALL, TF32),
        triton_case(
            "forward_host_descriptors",
            f"q:{box} k:{box} v:{box} out:{box} lse:*fp32 scale_log2:fp32 {INTEGERS}",
            TILES,
            "90a",
            TMA,
        ),
        triton_case(
            "forward_device_descriptors",
            f"q:*bf16 k:*bf16 v:*bf16 out:*bf16 lse:*fp32 heads:i32 scale_log2:fp32 {INTEGERS}",
            TILES,
            "90a",
            TMA,
        ),
        triton_case(
            "forward_rich",
            f"{rich} head_dim:i32 dropout_p:fp32 seed:i64",
            {"BLOCK_D": 64, "BLOCK_M": 64, "BLOCK_N": 32, "PRECISION": None},
            ALL,
            {ALL: {"HMMA": 32}},
            spills={ALL: Budget(304, "every feature in one kernel, never run for its speed")},
        ),
        triton_case("philox_words", "out:*i32 seed:i32 first:i32 count:i32", BLOCK, ALL, {ALL: {"IMAD": 40, "STG": 4}}),
        triton_case(
            "row_reductions",
            "x:*fp32 sums:*fp32 extremes:*fp32 places:*i32 rows:i32 cols:i32",
            {"BLOCK_M": 16, "BLOCK_N": 64},
            ALL,
            {ALL: {"SHFL": 10, "FMNMX": 2}},
        ),
        triton_case(
            "scans",
            "x:*i32 y:*i32 sums:*i32 products:*i32 states:*i32",
            {"BLOCK_M": 16, "BLOCK_N": 64},
            ALL,
            {ALL: {"SHFL": 10}},
        ),
        triton_case(
            "atomic_updates",
            "x:*i32 cells:*i32 wide:*i64 floats:*fp32 old:*i32 count:i32",
            BLOCK,
            ALL,
            {ALL: {"ATOMG": 2}},
        ),
        triton_case("integer_mix", "a:*i8 b:*i64 narrow:*i32 wide:*i64 count:i32", BLOCK, ALL, {ALL: {"IMAD": 20}}),
        triton_case(
            "float_conversions",
            "x:*fp32 half:*fp16 brain:*bf16 fp8:*u8 ints:*i32 back:*fp32 count:i32",
            BLOCK,
            ALL,
            {ALL: {"F2FP": 2, "F2I": 1}},
        ),
        triton_case(
            "elementwise",
            "x:*fp32 y:*fp32 out:*fp32 count:i32",
            BLOCK,
            ALL,
            {ALL: {"FFMA": 1, "MUFU.EX2": 1, "FSETP": 2}},
        ),
    ]
