"""Which tile a kernel works on: a table by chip, kernel, head size, element size and kind of score, and how to read it.

The rows come from compiled kernels: the largest tile that neither spills nor serialises its products, at the number of
stages that shared memory holds. The compile gate checks every row.
"""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# sm_80: pointers, 163 KiB of shared memory. sm_86: the same with 99 KiB (sm_89 and sm_120 too). sm_90: descriptors and
# wgmma, 227 KiB. sm_100: descriptors and tcgen05.
ARCHS = (80, 86, 90, 100)
KERNELS = ("forward", "dkdv", "dq")
BUCKETS = (64, 128, 192, 256, 512)
FEATURES = ("plain", "mods", "tile")


def arch_class(capability: int, tma: bool) -> int:
    """The table's chip for a compute capability; without descriptors a newer chip runs the kernels of sm_80."""
    if capability in (86, 87, 89) or capability >= 120:
        return 86
    if capability < 90 or not tma:
        return 80
    return 90 if capability < 100 else 100


def has_tma(capability: int) -> bool:
    """Whether kernels for this chip load by descriptors where strides allow. (sm_120 has them, and no use for them:
    its products read registers.)"""
    return 90 <= capability < 120


def feature_class(bias: int, softcap: bool, dropout: bool) -> str:
    """ "tile": something of the tile's shape is held beside the scores; "mods": only arithmetic is added."""
    return "tile" if bias or dropout else "mods" if softcap else "plain"


def chunks(size: int) -> tuple[int, int]:
    """A head size as what a kernel computes: the largest power of two in it (16 to 256) and one for the rest, or 0."""
    first = min(max(16, 1 << (max(size, 1).bit_length() - 1)), 256)
    rest = size - first
    return first, 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())


def bucket(head_dim: int, head_dim_v: int) -> int:
    """The smallest head size of the table that covers both."""
    size = max(sum(chunks(head_dim)), sum(chunks(head_dim_v)))
    return next(b for b in BUCKETS if b >= size)


Key = tuple[int, str, int, int, str]  # arch, kernel, bucket, element size, feature class


def _rows(
    arch: int, kernel: str, itemsize: int, feature: str, *configs: tuple[int, int, int, int]
) -> dict[Key, Config]:
    """One row per bucket."""
    return {
        (arch, kernel, size, itemsize, feature): Config(*config) for size, config in zip(BUCKETS, configs, strict=True)
    }


# (BLOCK_M, BLOCK_N, warps, stages) for head sizes up to 64, 128, 192, 256 and 512. A class without a row has "plain"'s.
TABLE: dict[Key, Config] = {
    **_rows(80, "forward", 2, "plain", (128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 8, 1), (32, 32, 8, 1)),
    **_rows(80, "forward", 2, "tile", (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 8, 1), (32, 32, 8, 1)),
    **_rows(80, "forward", 4, "plain", (64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
    **_rows(80, "dkdv", 2, "plain", (64, 64, 4, 2), (32, 64, 4, 1), (32, 64, 8, 1), (16, 64, 8, 1), (16, 32, 8, 1)),
    **_rows(80, "dkdv", 4, "plain", (32, 32, 4, 1), (16, 32, 4, 1), (16, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
    **_rows(80, "dq", 2, "plain", (64, 64, 4, 2), (64, 32, 4, 1), (64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 8, 1)),
    **_rows(80, "dq", 4, "plain", (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
    **_rows(
        90, "forward", 2, "plain", (128, 128, 8, 2), (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 1)
    ),
    **_rows(
        90, "forward", 2, "tile", (128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)
    ),
    **_rows(90, "forward", 4, "plain", (128, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1), (64, 32, 8, 1), (64, 32, 8, 1)),
    **_rows(90, "dkdv", 2, "plain", (64, 128, 8, 2), (64, 128, 8, 2), (64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 8, 1)),
    **_rows(90, "dkdv", 4, "plain", (32, 64, 8, 1), (32, 64, 8, 1), (32, 64, 8, 1), (32, 64, 8, 1), (32, 64, 8, 1)),
    **_rows(90, "dq", 2, "plain", (128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
    **_rows(90, "dq", 4, "plain", (64, 32, 8, 1), (64, 32, 8, 1), (64, 32, 8, 1), (64, 32, 8, 1), (64, 32, 8, 1)),
}


def choose(
    arch: int,
    kernel: str,
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    feature: str,
    table: dict[Key, Config] = TABLE,
) -> Config:
    """The row for a problem. `arch` is of `arch_class`; pure, so that a plan can be kept."""
    size = bucket(head_dim, head_dim_v)
    for name in (kernel, "dq"):
        for chip in (arch, 80 if arch < 90 else 90):
            for kind in (feature, "plain"):
                if (chip, name, size, itemsize, kind) in table:
                    return table[chip, name, size, itemsize, kind]
    raise KeyError((arch, kernel, size, itemsize, feature))
