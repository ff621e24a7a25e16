"""The cases of csrc/cuda/backward_sm90.cu: every shape that its table names, and what the tile makes of it."""

from .case import Budget, Case, Cuda

SOURCE = "csrc/cuda/backward_sm90.cu"
HOPPER = "90a"
THREADS = 384
WAIT = "WARPGROUP.DEPBAR gsb0, 0x"

# Columns of a step where rows are keys, then where they are queries, and the slots of the pipeline there.
TILES = {64: (96, 128, 4), 96: (80, 128, 4), 128: (64, 128, 4), 192: (64, 80, 4), 256: (64, 64, 3)}


def cases() -> list[Case]:
    found = [
        _case(kind, head_dim, fast_path) for kind in ("dkdv", "dq") for head_dim in TILES for fast_path in (True, False)
    ]
    rounding = Cuda(SOURCE, "round_dq_sm90_kernel<*>", 128)
    return [
        *found,
        _fused(True),
        _fused(False),
        Case("backward round dq d128 sm_90", rounding, HOPPER, require={HOPPER: {"LDG.E.128": 16}}),
    ]


def _fused(fast_path: bool) -> Case:
    """As dkdv of head size 128, and dQ: 16 of 128 keys at a time, for half of the columns a warpgroup."""
    dkdv = _case("dkdv", 128, fast_path)
    shared = -(-dkdv.source.shared // 1024) * 1024 + 2 * 128 * 64 * 2 + 2 * 64 * 64 * 4
    first = (("HGMMA", 16), f"{WAIT}1", ("MUFU.EX2", 32), ("HGMMA", 4))
    return Case(
        f"backward fused d128 sm_90{'' if fast_path else ' generic'}",
        Cuda(SOURCE, f"fused_sm90_kernel<*, {str(fast_path).lower()}>", THREADS, shared),
        HOPPER,
        require={HOPPER: {**dkdv.require[HOPPER], "HGMMA": 32, "UBLKRED": 1}},
        loop={HOPPER: {"HGMMA": 32, "MUFU.EX2": 32}},
        order={HOPPER: (*first, f"{WAIT}1", ("HGMMA", 12), f"{WAIT}0")},
        spills={} if fast_path else {HOPPER: Budget(8, "a word of the marks, written before the loop, read behind it")},
    )


def _case(kind: str, head_dim: int, fast_path: bool) -> Case:
    dkdv = kind == "dkdv"
    columns, slots = (TILES[head_dim][0], 4) if dkdv else TILES[head_dim][1:]
    split = dkdv and head_dim > 128  # one warpgroup has P and dV, the other dS and dK
    slabs, row_tiles, gradients = -(-head_dim // 64), 1 if split else 2, 2 if dkdv else 1
    tiles = (2 * row_tiles * 64 + slots * columns) * slabs * 128
    handed = 64 * columns * 4 if split else 0
    constants = slots * columns * 4 if dkdv else 0
    barriers = 2 + 2 * slots + (2 if split else 0)
    shared = tiles + handed + constants + 8 * barriers
    if not fast_path:  # what the producer tells the consumers, and a bit for each key of the rows, of each query
        told = shared + 2 * slots * 4
        shared = -(-told // 16) * 16 + (slots // 2 * columns * 8 * row_tiles if dkdv else 0)
    counts = {
        "USETMAXREG": 2,
        "HGMMA": 2 * (head_dim // 16) + gradients * (columns // 16),
        "UTMALDG": 2 * (row_tiles + 1) * slabs,
        "UTMASTG": gradients * slabs,
        "STSM": gradients * (head_dim // 16),
        "SYNCS.EXCH": barriers,
    }
    # With a softcap, the way that is counted, two of each score. Exponentials stand behind the wait for S and before
    # the one for what was started with it: dP, in the time of which they pass; where P and dS are made by different
    # warpgroups, they are between the first one's two products.
    scores, exponentials, gradient = head_dim // 16, columns // 2 * (1 if fast_path else 2), ("HGMMA", columns // 16)
    first = [("HGMMA", scores if split else 2 * scores), f"{WAIT}{0 if split else 1}", ("MUFU.EX2", exponentials)]
    if split:
        order = [*first, gradient, f"{WAIT}0"]
    elif dkdv:
        order = [*first, gradient, f"{WAIT}1", gradient, f"{WAIT}0"]
    else:
        order = [*first, f"{WAIT}0", gradient, f"{WAIT}0"]
    turn = {"HGMMA": sum(count for name, count in (first[0], gradient)) + (columns // 16 if dkdv and not split else 0)}
    flags = f"{str(dkdv).lower()}, {str(fast_path).lower()}"
    return Case(
        f"backward {kind} d{head_dim} sm_90{'' if fast_path else ' generic'}",
        Cuda(SOURCE, f"{kind}_sm90_kernel<*Shape<*, {head_dim}, {columns}, {slots}, {flags}> >", THREADS, shared),
        HOPPER,
        require={HOPPER: counts},
        loop={HOPPER: {**turn, "MUFU.EX2": exponentials}},
        order={HOPPER: tuple(order)},
    )
