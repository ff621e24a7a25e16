"""The cases of csrc/cuda's forward and decode kernels: every class of head size, and what its tile makes of it."""

import dataclasses

from .case import Budget, Case, Cuda

ALL = "80 90a 100 120"
HEAD_SIZES = (32, 64, 96, 128, 192, 256)

FULL = "output and scores take 192 of 255 registers; at most 4 loads from L1 per block of keys, beside its 256 mma"
SPILLS = {  # by kind, head size and variant
    ("forward", 128, "fast path"): {"80": Budget(12, FULL), "90a 100": Budget(16, FULL)},
    ("forward", 32, "generic"): {
        "120": Budget(12, "3 words of the walk over blocks, for four blocks of threads"),
        "90a": Budget(16, "3 words of the walk over blocks, one read twice, for four blocks of threads"),
        "100": Budget(24, "5 words of the walk over blocks, one read twice, for four blocks of threads"),
    },
    ("forward", 32, "generic pages"): {
        "90a": Budget(24, "6 words of the walk over blocks and pages, for four blocks of threads"),
    },
}


def cases() -> list[Case]:
    decode = "csrc/cuda/decode.cu"
    found = [Case("combine", Cuda(decode, "combine_kernel<*>"), ALL, require={ALL: {"SHFL": 10}})]
    for size in HEAD_SIZES:
        found.append(_forward(size, True))
        for pages in (False, True):
            kinds = _forward_fp32(size, pages), _decode(size, pages), _decode_fp32(size, pages)
            found += [_forward(size, False, pages), *kinds]
    return [*found, *(kind(pages) for pages in (False, True) for kind in (_wide, _wide_fp32))]


def _case(kind: str, size: int, variant: str, pages: bool, source: Cuda, counts: dict[str, int], **more) -> Case:
    """Of a kernel whose last argument, in `source` still to come, is whether keys and values lie in pages."""
    variant = f"{variant} pages".strip() if pages else variant
    source = dataclasses.replace(source, kernel=f"{source.kernel}, {str(pages).lower()}>")
    spills = SPILLS.get((kind, size, variant), {})
    return Case(f"{kind} d{size} {variant}".strip(), source, ALL, require={ALL: counts}, spills=spills, **more)


def _forward(size: int, fast_path: bool, pages: bool = False) -> Case:
    """Per 16 of the head size and 16 keys: a fragment of K and one of V, each for two mma of every row tile; a fragment
    of Q for each row tile. K is loaded in two places."""
    row_tiles = 2 if fast_path and size <= 128 else 1
    keys = 32 if not fast_path and size >= 192 else 64
    steps, threads = size // 16, 128
    # In the text: that loop is unrolled as the registers allow.
    steps_qk = {32: 1, 96: 1, 128: 2 if fast_path else 4, 256: 2 if fast_path else 4}.get(size, steps)
    counts = {
        "HMMA.16816": (steps_qk + steps) * keys // 16 * 2 * row_tiles,
        "LDSM": steps_qk * (row_tiles + keys // 16) + steps * keys // 16,
        "LDGSTS": (64 * row_tiles + 3 * keys) * (size // 8) // threads,
    }
    shared = (64 * row_tiles + 2 * keys) * size * 2
    source = Cuda(
        "csrc/cuda/forward.cu", f"forward_kernel<*, {size}, {'true' if fast_path else 'false'}", threads, shared
    )
    turn = {"HMMA.16816": 2 * steps * keys // 16 * 2 * row_tiles}
    variant = "fast path" if fast_path else "generic"
    return _case("forward", size, variant, pages, source, counts, loop={ALL: turn})


PRODUCTS = 3 + 1  # in the text, of one: in three parts, or with rounded factors
FLUSH = 4  # steps of 8 of the head size that are unrolled


def _forward_fp32(size: int, pages: bool) -> Case:
    """Per 8 of the head size and 16 keys a fragment of K; per 32 of it and 8 keys two loads of V, for four mma."""
    row_tiles = 2 if size <= 64 else 1
    keys = 16 if size <= 64 or size > 192 else 32
    scores, values = FLUSH * row_tiles * (keys // 8), (size // 8) * row_tiles * (keys // 8)
    counts = {
        "HMMA.1688.F32.TF32": (scores + values) * PRODUCTS,
        "LDSM": 2 * FLUSH * (row_tiles + keys // 16),
        "LDS.128": 2 * (size // 32) * (keys // 8) * 2,
        "LDGSTS": (64 * row_tiles + 3 * keys) * (size // 4) // 128,
    }
    shared = (64 * row_tiles + 2 * keys) * size * 4
    source = Cuda("csrc/cuda/forward_fp32.cu", f"forward_fp32_kernel<{size}", 128, shared)
    return _case("forward", size, "float32", pages, source, counts)


def _decode(size: int, pages: bool) -> Case:
    steps, stages = size // 16, 2 if size <= 128 else 1
    counts = {"HMMA.16816": 4 * steps, "LDSM": 3 * steps, "LDGSTS": 2 * 64 * (size // 8) // 128}
    shared = (16 + stages * 128) * size * 2
    source = Cuda("csrc/cuda/decode.cu", f"decode_kernel<__*, {size}", 128, shared)
    return _case("decode", size, "", pages, source, counts)


def _decode_fp32(size: int, pages: bool) -> Case:
    keys, stages = 64 if size <= 128 else 32, 2 if size <= 64 else 1
    tiles = keys // 4 // 8  # of a warp
    counts = {
        "HMMA.1688.F32.TF32": (FLUSH + size // 8) * tiles * PRODUCTS,
        "LDSM": 2 * FLUSH * 2,
        "LDS.128": 2 * (size // 32) * tiles * 2,
        "LDGSTS": 2 * keys * (size // 4) // 128,
    }
    shared = (16 + stages * 2 * keys) * size * 4
    source = Cuda("csrc/cuda/decode.cu", f"decode_kernel<float, {size}", 128, shared)
    return _case("decode", size, "float32", pages, source, counts)


# Q; three chunks of 8 KiB; the probabilities; of every row what is about its scores, and a value of four warps.
WIDE_SHARED = 64 * 1024 + 3 * 8 * 1024 + 8 * 1024


def _wide(pages: bool) -> Case:
    """A chunk of K: 4 steps for 2 row tiles and 16 keys. One of V: 4 runs of 16 columns. Text for two halves of V."""
    counts = {"HMMA.16816": 4 * 2 * 2 + 2 * 4 * 2 * 2, "LDSM": 4 * 3 + 2 * (2 + 4), "LDGSTS": 4}
    shared = WIDE_SHARED + 64 * (16 + 16)
    source = Cuda("csrc/cuda/forward_wide.cu", "forward_wide_kernel<__*", 256, shared)
    return _case("forward", 512, "", pages, source, counts)


def _wide_fp32(pages: bool) -> Case:
    """The same with one row tile, and 2 runs of 32 columns."""
    counts = {
        "HMMA.1688.F32.TF32": (4 * 2 + 2 * 2 * 4) * PRODUCTS,
        "LDSM": 2 * (4 * 2 + 2),
        "LDS.128": 2 * 2 * 2 * 2,
        "LDGSTS": 4,
    }
    shared = WIDE_SHARED + 32 * (16 + 16)
    source = Cuda("csrc/cuda/forward_wide.cu", "forward_wide_kernel<float", 256, shared)
    return _case("forward", 512, "float32", pages, source, counts)
