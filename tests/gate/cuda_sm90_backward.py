"""The cases of csrc/cuda/backward_sm90.cu: every shape that its table names, and what the tile makes of it."""

from .case import Case, Cuda

SOURCE = "csrc/cuda/backward_sm90.cu"
HOPPER = "90a"
THREADS = 384

TILES = {64: (96, 128, 4), 96: (80, 128, 4), 128: (64, 128, 4), 192: (64, 80, 4), 256: (64, 64, 3)}


def cases() -> list[Case]:
    return [
        _case(kind, head_dim, softcap) for kind in ("dkdv", "dq") for head_dim in TILES for softcap in (False, True)
    ]


def _case(kind: str, head_dim: int, softcap: bool) -> Case:
    dkdv = kind == "dkdv"
    columns, slots = (TILES[head_dim][0], 4) if dkdv else TILES[head_dim][1:]
    split = dkdv and head_dim > 128  # one warpgroup has P and dV, the other dS and dK
    slabs = -(-head_dim // 64)  # of 128 bytes a row
    row_tiles = 1 if split else 2
    tiles = (2 * row_tiles * 64 + slots * columns) * slabs * 128
    handed = 64 * columns * 4 if split else 0
    constants = slots * columns * 4 if dkdv else 0
    shared = tiles + handed + constants + (2 + 2 * slots + (2 if split else 0)) * 8
    flags = f"{str(dkdv).lower()}, {str(softcap).lower()}"
    name = f"{kind}_sm90_kernel<*Shape<*, {head_dim}, {columns}, {slots}, {flags}>>"
    return Case(
        f"backward {kind} d{head_dim} sm_90{' softcap' * softcap}",
        Cuda(SOURCE, name, THREADS, shared),
        HOPPER,
    )
