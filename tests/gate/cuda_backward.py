"""The cases of csrc/cuda/backward.cu: every shape that its tables name, and what the tile makes of it."""

from .case import Budget, Case, Cuda

SOURCE = "csrc/cuda/backward.cu"
ALL = "80 86 90a 100a 120a"
WIDE, NARROW = "80 90a 100a", "86 120a"  # by the shared memory of a block

# (head_dim, plain, wide) -> rows, columns, row tiles of a warp, warps of a row group, stages
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

SPILLS = {
    # The shape that needs no spill, with rows of 16 a warp, takes 144 ldmatrix where this one takes 96.
    "backward dkdv d128 wide": {"90a": Budget(56, "14 words of loop invariants, read once in a step of 256 mma")},
    "backward dkdv d32": {"120a": Budget(8, "2 words of loop invariants, read once in a step of 128 mma")},
}


def cases() -> list[Case]:
    found = [
        Case("backward bias", Cuda(SOURCE, "bias_gradient_kernel<*>", shared=32768), ALL, require={ALL: {"HMMA": 64}})
    ]
    for kind, shapes, gradients in (("dkdv", DKDV, 2), ("dq", DQ, 1)):
        for (head_dim, plain, wide), (rows, columns, row_tiles, split, stages) in shapes.items():
            flags = "true" if plain else "false"
            shape = f"*<{rows}, {columns}, {row_tiles}, {split}, {stages}> "
            tiles = (rows + stages * columns) * 2 * head_dim * 2
            constants = stages * columns * 2 * 4 if kind == "dkdv" else 0
            handed_over = gradients * rows * columns * 2 if split > 1 else 0
            # Of a warp: two products for its scores, and its part of the head dimension of the gradients.
            scores = 2 * row_tiles * (columns // split // 8) * (head_dim // 16)
            products = gradients * row_tiles * (columns // 16) * (head_dim // split // 8)
            name = f"backward {kind} d{head_dim}{'' if plain else ' general'}{' wide' if wide else ''}"
            source = f"{kind}_kernel<*, {head_dim}, {flags}, {shape}>"
            archs = WIDE if wide else ALL
            least = {"HMMA": scores + products, "LDSM": head_dim // 16, "LDGSTS": 4}
            shared = tiles + constants + handed_over
            found.append(
                Case(
                    name,
                    Cuda(SOURCE, source, shared=shared),
                    archs,
                    require={archs: least},
                    spills=SPILLS.get(name, {}),
                    loop={archs: {"HMMA.16816": scores + products}},
                )
            )
            if wide:  # compiled for every chip, launched on those
                found.append(Case(f"{name}, not launched", Cuda(SOURCE, source), NARROW))
    return found
