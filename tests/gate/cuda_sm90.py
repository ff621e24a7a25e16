"""The cases of Hopper's forward kernels: every class of head sizes, by each schedule, and the generic variant."""

from .case import Case, Cuda

SOURCE = "csrc/cuda/forward_sm90.cu"
OTHERS = "csrc/cuda/forward_schedules_sm90.cu"
HOPPER = "90a"

WAIT = "WARPGROUP.DEPBAR gsb0, 0x"
SCHEDULES = ("serial", "overlap", "ping-pong")  # as launch.h numbers them

# (head size, that of values, consumers) -> keys of a block, stages of the pipelines, the schedule that is launched
TILES = {
    (64, 64, 2): (128, 3, "overlap"),
    (64, 64, 3): (128, 3, "overlap"),
    (96, 96, 2): (128, 2, "ping-pong"),
    (128, 128, 2): (128, 2, "ping-pong"),
    (192, 128, 2): (128, 2, "ping-pong"),
    (192, 192, 2): (96, 2, "overlap"),
    (256, 256, 2): (80, 2, "ping-pong"),
}


def cases() -> list[Case]:
    found = []
    for tile, (_, _, own) in TILES.items():
        found += [_case(tile, own, False)] if tile[2] == 2 else []  # features leave no registers for a third
        found += [_case(tile, own, True), *(_case(tile, schedule, True) for schedule in SCHEDULES if schedule != own)]
    return found


def _case(tile: tuple[int, int, int], schedule: str, fast_path: bool) -> Case:
    """A product for each 16 of the head size (Q K^T) and of the keys (P V). But in the serial schedule both are under
    way when the scores are waited for, and the exponentials come before the wait for P V; the first block's and the
    last one's products stand beside the loop."""
    (size, values, consumers), (keys, stages, own) = tile, TILES[tile]
    slabs, slabs_v = -(-size // 64), -(-values // 64)  # of 128 bytes a row
    barriers = 2 * consumers + 4 * stages
    shared = consumers * 64 * slabs * 128 + stages * keys * (slabs + slabs_v) * 128 + barriers * 8
    shared += 4 * (consumers if fast_path else stages + consumers)  # what the producer tells the consumers
    if not fast_path:  # what their warps tell each other of two blocks; the key ranges of the queries
        shared += 2 * 4 * consumers * 16 + 16 * 64 * consumers
    scores, outputs, exponentials = size // 16, keys // 16, keys // 2 * (1 if fast_path else 2)
    serial, turns = schedule == "serial", 0 if schedule == "overlap" else 2
    counts = {
        "HGMMA": (1 if serial else 2) * (scores + outputs),
        "UTMALDG": (2 + consumers) * slabs + slabs_v,
        "UTMASTG": slabs_v,
        "STSM": values // 16,
        "SYNCS.EXCH": barriers,
        "USETMAXREG": 2,
        "BAR": 2 + turns,
    }
    # Of a masked block, before its values are cleared and after; on the fast path the last block alone has such keys.
    cleared = 2 if not fast_path else 1 if serial else 0
    steps = (("HGMMA", scores + outputs), f"{WAIT}1", ("MUFU.EX2", exponentials), f"{WAIT}0")
    if serial:
        steps = (("HGMMA", scores), f"{WAIT}0", ("MUFU.EX2", exponentials), ("HGMMA", outputs), f"{WAIT}0")
    variant = ("fast path" if fast_path else "generic") + f" {schedule}" * (schedule != own)
    variant += " three consumers" * (consumers == 3)
    kinds = f"{consumers}, {str(fast_path).lower()}, *{SCHEDULES.index(schedule)}"
    name = f"forward_sm90_kernel<*, {size}, {values}, {kinds}>"
    return Case(
        f"forward d{size}{f'/{values}' if values < size else ''} sm_90 {variant}",
        Cuda(SOURCE if schedule == own else OTHERS, name, 128 * (1 + consumers), shared),
        HOPPER,
        require={HOPPER: counts},
        loop={HOPPER: {"HGMMA": scores + outputs, "MUFU.EX2": exponentials + 2, "BAR": turns + cleared}},
        order={HOPPER: steps},
    )
