"""The cases of csrc/cuda/forward.cu and decode.cu: every class of head size, and what its tile makes of it."""

from .case import Budget, Case, Cuda

ALL = "80 86 90a 100a 120a"
HEAD_SIZES = (32, 64, 96, 128, 192, 256)

FULL = "output and scores take 192 of 255 registers; {} loads from L1 per block of keys, beside its 256 mma"
STEP = "ptxas prefers the register count at which one block of threads more fits; some loads per block of keys"
SPILLS = {  # of the forward kernel, by head size and variant
    (32, True): {"90a": Budget(16, STEP)},
    (32, False): {"120a": Budget(16, STEP)},
    (96, True): {"90a": Budget(8, "a value of one load per block of keys")},
    (96, False): {"100a": Budget(12, STEP)},
    (128, True): {
        "80 100a 120a": Budget(8, FULL.format(2)),
        "86": Budget(20, FULL.format("at most 5")),
        "90a": Budget(64, FULL.format("at most 12")),
    },
}


def cases() -> list[Case]:
    found = [Case("combine", Cuda("csrc/cuda/decode.cu", "combine_kernel<*>"), ALL, require={ALL: {"SHFL": 10}})]
    for size in HEAD_SIZES:
        found += [_forward(size, True), _forward(size, False), _decode(size)]
    return found


def _forward(size: int, plain: bool) -> Case:
    """Per 16 of the head size and 16 keys: a fragment of K and one of V, each for two mma of every row tile; a fragment
    of Q for each row tile. K is loaded in two places."""
    row_tiles = 2 if plain and size <= 128 else 1
    keys = 32 if not plain and size >= 192 else 64
    steps, threads = size // 16, 128
    steps_qk = 4 if size in (128, 256) else steps  # in the text: that loop isn't unrolled to its end
    counts = {
        "HMMA.16816": (steps_qk + steps) * keys // 16 * 2 * row_tiles,
        "LDSM": steps_qk * (row_tiles + keys // 16) + steps * keys // 16,
        "LDGSTS": (64 * row_tiles + 3 * keys) * (size // 8) // threads,
    }
    shared = (64 * row_tiles + 2 * keys) * size * 2
    source = Cuda("csrc/cuda/forward.cu", f"forward_kernel<*, {size}, {'true' if plain else 'false'}>", threads, shared)
    name = f"forward d{size} {'plain' if plain else 'general'}"
    turn = {"HMMA.16816": 2 * steps * keys // 16 * 2 * row_tiles}
    return Case(name, source, ALL, require={ALL: counts}, spills=SPILLS.get((size, plain), {}), loop={ALL: turn})


def _decode(size: int) -> Case:
    steps, stages = size // 16, 2 if size <= 128 else 1
    counts = {"HMMA.16816": 4 * steps, "LDSM": 3 * steps, "LDGSTS": 2 * 64 * (size // 8) // 128}
    source = Cuda("csrc/cuda/decode.cu", f"decode_kernel<*, {size}>", 128, (16 + stages * 128) * size * 2)
    spills = {"100a": Budget(8, STEP)} if size == 192 else {}
    return Case(f"decode d{size}", source, ALL, require={ALL: counts}, spills=spills)
