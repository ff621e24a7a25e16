"""Which tile a kernel works on: a table by chip, kernel, element size, kind of score and head size, and how to read it.

The rows come from compiled kernels, not from measurements: of the usual tiles the largest that doesn't spill or
serialise its products, at the number of stages that shared memory holds. Only sm_90's plain forward pass in 16 bits up
to head size 64 has what an H200 measured: 853 us, 1.33x the tile of 128 keys. The compile gate builds every row. What a
device measures best, `python -m bench.gpu --apply` puts in here (after `make gpu`, stage tuning); `dump` and `load`
keep a table as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Config(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Row(NamedTuple):
    """What a list of configurations is for."""

    arch: int  # of `arch_class`
    kernel: str  # of KERNELS
    itemsize: int
    feature: str  # of `feature_class`


Table = Mapping[Row, Mapping[int, Config]]  # of each row: head sizes up to which a configuration serves

ARCHS = (80, 86, 90)
KERNELS = ("forward", "dkdv", "dq", "tangent", "second_dkdv", "second_dq")
# Of these, tiles on sm_90 have 32 rows at most, which mma.sync multiplies. With 64 it would be wgmma, and where two
# products with weights from registers follow each other, as they do here, Triton (3.7.1) converts the second's weights
# after the wgmma.fence that has to order it. With descriptors they have 2 stages: with one, TMA writes a tile where a
# store was, without the proxy fence between. (The simulator reports both.) Tiles of float32 have 32 rows at most too
# where a head size is in two parts, dkdv's at every head size (`_miscompiled`).
MMA_SYNC = ("tangent", "second_dkdv", "second_dq")
FEATURES = ("plain", "mods", "tile", "ranges")
_INSTEAD = {"ranges": "tile"}  # of a feature without a row, before "plain"

# BLOCK_M, BLOCK_N, warps, stages. A chip or feature without a row takes that of 80 or of "plain"; so the rows of 80
# keep to the 99 KiB of shared memory that 86 has.
_ROWS: dict[tuple[int, str, int, str], dict[int, tuple[int, int, int, int]]] = {
    (80, "forward", 2, "plain"): {
        64: (128, 64, 4, 3),
        128: (128, 64, 8, 2),
        192: (128, 32, 8, 2),
        256: (64, 32, 8, 2),
        512: (64, 32, 8, 1),
    },
    (80, "forward", 2, "tile"): {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 2)},
    (80, "forward", 2, "ranges"): {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
    (80, "forward", 4, "plain"): {64: (128, 32, 8, 2), 256: (64, 32, 8, 2), 512: (32, 16, 8, 2)},
    (80, "dkdv", 2, "plain"): {
        64: (64, 128, 8, 2),
        128: (64, 64, 8, 2),
        192: (32, 32, 8, 2),
        256: (16, 64, 8, 2),
        512: (32, 32, 8, 1),
    },
    (80, "dkdv", 2, "tile"): {64: (32, 128, 8, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 1)},
    (80, "dkdv", 4, "plain"): {256: (32, 32, 8, 2), 512: (16, 16, 8, 2)},
    (80, "dq", 2, "plain"): {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 1), 512: (64, 32, 8, 1)},
    (80, "dq", 2, "tile"): {64: (128, 32, 8, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 1)},
    (80, "dq", 4, "plain"): {64: (128, 32, 8, 2), 256: (64, 32, 8, 2), 512: (32, 16, 8, 2)},
    (80, "tangent", 2, "plain"): {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (32, 32, 8, 1), 512: (16, 32, 8, 1)},
    (80, "tangent", 4, "plain"): {128: (32, 32, 8, 1), 512: (16, 32, 8, 1)},
    (80, "second_dq", 2, "plain"): {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (32, 32, 8, 1), 512: (32, 16, 8, 1)},
    (80, "second_dq", 4, "plain"): {64: (32, 32, 8, 1), 128: (32, 16, 8, 1), 256: (16, 32, 8, 1), 512: (16, 16, 8, 1)},
    (80, "second_dkdv", 2, "plain"): {
        64: (32, 32, 4, 2),
        128: (32, 32, 8, 2),
        256: (16, 32, 8, 1),
        512: (16, 16, 8, 1),
    },
    (80, "second_dkdv", 4, "plain"): {128: (16, 32, 8, 1), 512: (16, 16, 8, 1)},
    (90, "tangent", 2, "plain"): {64: (32, 64, 4, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 2), 512: (16, 32, 8, 1)},
    (90, "second_dq", 2, "plain"): {64: (32, 64, 8, 2), 128: (32, 32, 8, 2), 256: (32, 32, 8, 2), 512: (32, 16, 8, 1)},
    (90, "second_dkdv", 2, "plain"): {
        64: (32, 32, 4, 2),
        128: (64, 32, 8, 2),
        256: (16, 32, 8, 2),
        512: (16, 16, 8, 1),
    },
    (86, "forward", 2, "plain"): {64: (128, 64, 8, 3)},
    (90, "forward", 2, "plain"): {
        64: (128, 64, 8, 2),
        128: (128, 128, 8, 2),
        256: (128, 64, 8, 2),
        512: (64, 32, 8, 2),
    },
    (90, "forward", 2, "mods"): {128: (128, 64, 8, 3)},
    (90, "forward", 2, "tile"): {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 2)},
    (90, "forward", 2, "ranges"): {64: (128, 128, 8, 2), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)},
    (90, "forward", 4, "plain"): {64: (128, 64, 8, 2), 256: (32, 32, 8, 2), 512: (32, 16, 8, 2)},
    (90, "dkdv", 2, "plain"): {
        64: (64, 128, 8, 2),
        128: (64, 128, 8, 2),
        192: (64, 64, 8, 2),
        256: (32, 64, 8, 2),
        512: (32, 32, 8, 1),
    },
    (90, "dkdv", 2, "tile"): {64: (64, 128, 8, 2), 128: (32, 128, 8, 2), 256: (32, 64, 8, 2)},
    (90, "dkdv", 4, "plain"): {64: (16, 32, 4, 2), 256: (32, 32, 8, 2), 512: (16, 16, 8, 2)},
    (90, "dq", 2, "plain"): {64: (128, 128, 8, 2), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2), 512: (32, 32, 8, 1)},
    (90, "dq", 2, "tile"): {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 2)},
    (90, "dq", 2, "ranges"): {64: (128, 128, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
    (90, "dq", 4, "plain"): {64: (64, 32, 8, 1), 256: (32, 32, 8, 2), 512: (32, 16, 8, 2)},
}
TABLE: dict[Row, dict[int, Config]] = {
    Row(*row): {size: Config(*config) for size, config in by_size.items()} for row, by_size in _ROWS.items()
}


# Of decode_kernel, by element size and head size: the largest BLOCK_M, BLOCK_N, warps, stages. For every chip: up to 32
# rows the products are mma.sync's (wgmma has 64), and stages keep to 99 KiB of shared memory.
DECODE: dict[int, dict[int, tuple[int, int, int, int]]] = {
    2: {64: (32, 32, 4, 4), 128: (32, 64, 4, 2), 256: (32, 32, 4, 2), 512: (32, 16, 8, 2)},
    4: {64: (32, 32, 4, 2), 256: (32, 32, 8, 2), 512: (16, 32, 8, 2)},
}
SPLIT_KEYS = 256  # the fewest that a split is worth
MAX_SPLITS = 128


# Of table_gradient_kernel, whose tiles are best square: it loads queries as often as keys. For every chip, and in one
# stage. (Its derivative takes the tiles of second_dq.)
BANDS: dict[int, dict[int, tuple[int, int, int, int]]] = {
    2: {64: (64, 64, 4, 1), 128: (64, 64, 8, 1), 256: (32, 32, 8, 1), 512: (32, 32, 4, 1)},
    4: {64: (64, 32, 8, 1), 256: (32, 32, 8, 1), 512: (32, 16, 8, 1)},
}


def bands(head_dim: int, head_dim_v: int, itemsize: int) -> Config:
    """The configuration of table_gradient_kernel. LookupError above head size 512."""
    size = max(sum(chunks(head_dim)), sum(chunks(head_dim_v)))
    for limit, config in BANDS[itemsize].items():
        if size <= limit:
            return Config(*config)
    raise LookupError(f"no configuration for head sizes {head_dim} and {head_dim_v}")


def decode(rows: int, head_dim: int, head_dim_v: int, itemsize: int) -> Config:
    """The configuration of decode_kernel for `rows` queries of one key head. LookupError above head size 512."""
    size = max(sum(chunks(head_dim)), sum(chunks(head_dim_v)))
    for limit, (most_rows, block_n, warps, stages) in DECODE[itemsize].items():
        if size <= limit:
            return Config(16 if rows <= 16 else most_rows, block_n, warps, stages)
    raise LookupError(f"no configuration for head sizes {head_dim} and {head_dim_v}")


def splits(keys: int, block_n: int, programs: int, processors: int) -> int:
    """Into how many parts to cut `keys` keys so that `programs` programs become two for each of the chip's processors.

    A part has SPLIT_KEYS keys or more, in whole blocks, none is empty, and there are at most MAX_SPLITS.
    """
    blocks = -(-keys // block_n)
    wanted = min(-(-2 * processors // max(programs, 1)), keys // SPLIT_KEYS, MAX_SPLITS)
    each = -(-blocks // max(wanted, 1))
    each = max(each, SPLIT_KEYS // block_n)
    return max(-(-blocks // max(each, 1)), 1)


def arch_class(capability: int, tma: bool) -> int:
    """The table's chip: 90 with descriptors (9.0, 10.0); 86 for 8.6, 8.9 and 12.0; else 80."""
    if capability in (86, 87, 89) or capability >= 120:
        return 86
    return 90 if capability >= 90 and tma else 80


def has_tma(capability: int) -> bool:
    """Whether tiles are loaded by descriptor. (12.0 could, and has no use for it: its products read registers.)"""
    return 90 <= capability < 120


def feature_class(bias: int, ranges: int, softcap: bool, dropout: bool) -> str:
    """ "tile": more than the scores is held of a tile; "ranges": only the ends of its rows' key ranges are; "mods":
    there is only arithmetic more."""
    return "tile" if bias or dropout else "ranges" if ranges else "mods" if softcap else "plain"


def chunks(size: int) -> tuple[int, int]:
    """A head size as kernels compute it: the largest power of two in it (16 to 256), and one for the rest (or 0)."""
    first = min(max(16, 1 << (max(size, 1).bit_length() - 1)), 256)
    rest = size - first
    return first, 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())


def chunk(head_dim: int, head_dim_v: int, itemsize: int, roomy: bool) -> int:
    """How many columns at a time q k^T and dO v^T are summed by, from pointers: for head sizes of which registers don't
    hold whole rows; 0: all, one operand from registers. (tf32x3 splits both operands in two.)

    roomy: for decode_kernel, and where operands come by descriptors.
    """
    whole = {2: 512, 4: 64} if roomy else {2: 256, 4: 32}
    return 128 // itemsize if max(head_dim, head_dim_v) > whole[itemsize] else 0


def _miscompiled(row: Row, config: Config, in_parts: bool) -> bool:
    """Whether ptxas 12.8, which Triton 3.6 and 3.7 bring along, may make wrong code of a tile. Of float32 on sm_90 in
    64 rows or more, which wgmma multiplies, with a head size in two parts: it computes descriptors from an address
    before that is there, of whatever is in the register. (The gate looks where descriptors come from.)"""
    rows = config.block_n if row.kernel.endswith("dkdv") else config.block_m
    return row.arch == 90 and row.itemsize == 4 and rows >= 64 and in_parts


def choose(row: Row, head_dim: int, head_dim_v: int, table: Table = TABLE) -> Config:
    """The configuration of a row for two head sizes. LookupError above its largest, 512."""
    cut = chunks(head_dim), chunks(head_dim_v)
    size, in_parts = max(map(sum, cut)), any(rest for _, rest in cut)
    for arch in dict.fromkeys((row.arch, 80)):
        for feature in dict.fromkeys((row.feature, _INSTEAD.get(row.feature, "plain"), "plain")):
            by_size = table.get(row._replace(arch=arch, feature=feature), {})
            for limit in sorted(by_size):
                if size <= limit and not _miscompiled(row, by_size[limit], in_parts):
                    return by_size[limit]
    raise LookupError(f"no configuration for head sizes {head_dim} and {head_dim_v}: {row}")


def load(path: str | Path) -> dict[Row, dict[int, Config]]:
    """A table as `dump` wrote it, over the built-in one."""
    table = {row: dict(by_size) for row, by_size in TABLE.items()}
    for entry in json.loads(Path(path).read_text())["rows"]:
        row = Row(entry["arch"], entry["kernel"], entry["itemsize"], entry["feature"])
        table.setdefault(row, {})[entry["head_dim"]] = Config(*entry["config"])
    return table


def dump(table: Table, path: str | Path, about: Mapping[str, Any]) -> None:
    """Writes the rows of a table as JSON; `about` says of which device and how."""
    rows = [
        {**row._asdict(), "head_dim": size, "config": list(config)}
        for row, by_size in sorted(table.items())
        for size, config in sorted(by_size.items())
    ]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    Path(path).write_text(f'{{"about": {json.dumps(dict(about))},\n"rows": [\n{lines}\n]}}\n')
