"""The cases of the backward pass: every shape in the tables of csrc/cuda/backward_dkdv.cu and backward_dq.cu, and what
the tile makes of it; those of backward_bias.cu and backward_chunked.cu, every arithmetic."""

from ptxsim import SHARED_LIMIT

from .case import Budget, Case, Cuda, capability

BIAS, CHUNKED = "csrc/cuda/backward_bias.cu", "csrc/cuda/backward_chunked.cu"
SOURCES = {"dkdv": "csrc/cuda/backward_dkdv.cu", "dq": "csrc/cuda/backward_dq.cu"}
ALL = "80 90a 100 120"
WIDE, NARROW = "80 90a 100", "120"  # by the shared memory of a block

# (head_dim, fast path, wide) -> rows, columns, row tiles of a warp, warps of a row group, stages
DKDV = {
    (32, True, False): (128, 64, 2, 1, 2),
    (64, True, False): (128, 32, 2, 1, 2),
    (96, True, False): (128, 32, 2, 2, 2),
    (128, True, True): (128, 64, 2, 2, 2),
    (128, True, False): (128, 32, 1, 1, 2),
    (192, True, True): (64, 64, 1, 2, 2),
    (192, True, False): (64, 32, 1, 2, 1),
    (256, True, True): (64, 32, 1, 2, 2),
    (256, True, False): (32, 32, 1, 2, 1),
    (32, False, False): (128, 32, 2, 1, 2),
    (64, False, False): (128, 32, 1, 1, 2),
    (96, False, False): (128, 32, 2, 2, 2),
    (128, False, False): (128, 32, 1, 1, 2),
    (192, False, False): (64, 32, 1, 2, 1),
    (256, False, False): (32, 32, 1, 2, 1),
}
DQ = {
    (32, True, False): (128, 64, 2, 1, 2),
    (64, True, False): (128, 64, 2, 1, 2),
    (96, True, False): (128, 32, 2, 1, 2),
    (128, True, True): (128, 64, 2, 2, 2),
    (128, True, False): (128, 32, 1, 1, 2),
    (192, True, True): (128, 32, 2, 2, 2),
    (192, True, False): (64, 32, 1, 1, 2),
    (256, True, True): (64, 32, 1, 2, 2),
    (256, True, False): (64, 16, 1, 1, 2),
    (32, False, False): (128, 32, 2, 1, 2),
    (64, False, False): (128, 32, 2, 1, 2),
    (96, False, False): (128, 32, 1, 1, 2),
    (128, False, False): (128, 32, 1, 1, 2),
    (192, False, False): (64, 32, 1, 1, 2),
    (256, False, False): (64, 16, 1, 1, 2),
}

# The arithmetics of the kernels for the gradient of a bias and for chunks: template argument, bytes of an element, and
# the mma of one step of products.
MATHS = {
    "16-bit": ("Half<*>", 2, "HMMA.16816", 1),
    "tf32": ("Single<false>", 4, "HMMA.1688", 1),
    "3xtf32": ("Single<true>", 4, "HMMA.1688", 3),
}

WALK = "words of the walk over blocks, beside the"
SPILLS = {
    "backward bias 3xtf32": {
        "80 120": Budget(8, "2 words, beside 96 mma of a tile"),
        "90a": Budget(36, f"6 {WALK} 96 mma of a tile"),
    },
    "backward table 3xtf32": {
        "80": Budget(16, f"2 {WALK} 96 mma of a tile"),
        "90a": Budget(32, f"4 {WALK} 96 mma of a tile"),
        "100": Budget(12, f"3 {WALK} 96 mma of a tile"),
        "120": Budget(40, f"7 {WALK} 96 mma of a tile"),
    },
    "backward chunked dkdv tf32": {
        "80": Budget(76, f"15 {WALK} 32 mma of a round, most once in a step of many rounds"),
        "90a": Budget(8, f"1 {WALK} 32 mma of a round"),
    },
    "backward chunked dkdv 3xtf32": {
        "80": Budget(8, f"1 {WALK} 96 mma of a round"),
    },
}


def cases() -> list[Case]:
    found = []
    for name, (math, size, opcode, times) in MATHS.items():
        # 8 column tiles, 4 steps; of float32 one half of them, in a loop.
        least = {opcode: 8 * 4 // (size // 2) * times, "LDSM": 8, "LDGSTS": 4}
        source = Cuda(BIAS, f"bias_gradient_kernel<*{math}*>", shared=32768)
        called = f"backward bias {name}"
        found.append(Case(called, source, ALL, require={ALL: least}, spills=SPILLS.get(called, {})))
        called = f"backward table {name}"
        source = Cuda(BIAS, f"table_sums_kernel<*{math}*>", shared=32768)
        found.append(Case(called, source, ALL, require={ALL: least}, spills=SPILLS.get(called, {})))
        for archs in ("80", "120", "90a 100"):
            found += [_chunked(name, kind, key_rows, archs) for kind, key_rows in (("dkdv", "true"), ("dq", "false"))]
    found.append(Case("backward table added up", Cuda(BIAS, "table_gradient_kernel<*>"), ALL))
    for kind, shapes, gradients in (("dkdv", DKDV, 2), ("dq", DQ, 1)):
        for (head_dim, fast_path, wide), (rows, columns, row_tiles, split, stages) in shapes.items():
            flags = "true" if fast_path else "false"
            shape = f"*<{rows}, {columns}, {row_tiles}, {split}, {stages}> "
            tiles = (rows + stages * columns) * 2 * head_dim * 2
            constants = stages * columns * 2 * 4 if kind == "dkdv" else 0
            handed_over = gradients * rows * columns * 2 if split > 1 else 0
            # Of a warp: two products for its scores, and its part of the head dimension of the gradients.
            scores = 2 * row_tiles * (columns // split // 8) * (head_dim // 16)
            products = gradients * row_tiles * (columns // 16) * (head_dim // split // 8)
            name = f"backward {kind} d{head_dim}{'' if fast_path else ' generic'}{' wide' if wide else ''}"
            source = f"{kind}_kernel<*, {head_dim}, {flags}, {shape}>"
            archs = WIDE if wide else ALL
            # Half the steps of the scores are in the text where the sums take 192 registers.
            sums = 4 * row_tiles * (gradients * head_dim + 2 * columns) // split // 8
            rolled = 2 if sums >= 192 and head_dim >= 128 else 1
            least = {"HMMA": scores // rolled + products, "LDSM": head_dim // 16, "LDGSTS": 4}
            shared = tiles + constants + handed_over
            found.append(
                Case(
                    name,
                    Cuda(SOURCES[kind], source, shared=shared),
                    archs,
                    require={archs: least},
                    spills=SPILLS.get(name, {}),
                    loop={archs: {"HMMA.16816": scores + products}},
                )
            )
            if wide:  # compiled for every chip, launched on those
                found.append(Case(f"{name}, not launched", Cuda(SOURCES[kind], source), NARROW))
    return found


def _chunked(name: str, kind: str, key_rows: str, archs: str) -> Case:
    """For the scores a warp has 4 column tiles, in 4 steps of half a chunk or two of a quarter; for the gradients in
    registers, 128 a thread, 32 accumulators of 16 x 8, and 4 steps or, in a loop, 2."""
    math, size, opcode, times = MATHS[name]
    steps = 8 // size
    tile, beside = 64 * 256, 2 * 64 * 256 + 64 * 64 * size + 2 * 2 * 64 * 4
    rounds = 2 * 512 * size // 256  # of the scores, for the widest heads
    shared = beside + min(rounds, (SHARED_LIMIT[capability(archs.split()[0])] - beside) // tile) * tile
    least = {opcode: (4 + 32) * steps * times, "LDSM": 3 * min(steps, 2), "LDGSTS": 20}
    full_name = f"backward chunked {kind} {name}"
    spills = {arch: budget for arch, budget in SPILLS.get(full_name, {}).items() if arch in archs.split()}
    source = Cuda(CHUNKED, f"chunked_kernel<*{math}, {key_rows}>", shared=shared)
    return Case(f"{full_name} ({archs})", source, archs, require={archs: least}, spills=spills)
