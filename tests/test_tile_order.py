"""The order in which Hopper's forward kernel takes its tiles (csrc/cuda/tile_order.h, compiled for the host): all
multiprocessors of an H100 end at about the same time."""

import ctypes
import functools
import heapq
import itertools
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gate.cuda_sm90 import TILES

ROOT = Path(__file__).parents[1]
UNBOUNDED = 1 << 62
MULTIPROCESSORS = 132
ROWS = 128  # of a tile, but for a third consumer's
OVERHEAD = 1.2  # of a tile, in blocks of keys: its beginning and its end
AHEAD = 2  # blocks of keys of a tile that are still to be done when the next one is taken: the stages of the pipelines


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """taken(batch, heads, heads_k, queries, keys, head_dim, left, right, ranges): an array of (batch * head, block of
    rows) of every tile."""
    library = tmp_path_factory.mktemp("tile_order") / "tile_order.so"
    source = ROOT / "tests/cuda/tile_order.cpp"
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}", source, "-o", library]
    subprocess.run(command, check=True)
    function = ctypes.CDLL(str(library)).tile_order

    def order(*sizes, left=UNBOUNDED, right=UNBOUNDED, ranges=False, rows=ROWS):
        batch, heads, _, queries, *_ = sizes
        tiles = np.full((batch * heads * -(-queries // rows), 2), -1, np.int32)
        some = (ctypes.c_int32 * 2)()
        numbers = (ctypes.c_int64 * 6)(*sizes)
        pointer = tiles.ctypes.data_as(ctypes.c_void_p)
        bounds = ctypes.c_int64(left), ctypes.c_int64(right)
        function(numbers, *bounds, some if ranges else None, rows, MULTIPROCESSORS, pointer)
        return tiles

    return order


def makespan(blocks):
    """Time of the last multiprocessor over the mean, if tiles of so many blocks of keys are taken in this order."""
    free = [(0.0, 0.0)] * MULTIPROCESSORS  # when each takes its next tile, and when it begins it
    for count in blocks:
        _, begin = heapq.heappop(free)
        end = begin + count + OVERHEAD
        heapq.heappush(free, (max(begin, end - OVERHEAD - AHEAD), end))
    return max(end for _, end in free) * MULTIPROCESSORS / sum(count + OVERHEAD for count in blocks)


# Of a sequence: the keys [begin, end) of every query.


def causal(length, draw):
    rows = np.arange(length)
    return np.zeros_like(rows), rows + 1


def window(length, draw):
    rows = np.arange(length)
    return np.maximum(rows - 4095, 0), rows + 1


def documents(length, draw):
    ends = [0]
    while ends[-1] < length:
        ends.append(ends[-1] + draw.randint(100, 4000))
    rows = np.arange(length)
    return np.array(ends)[np.searchsorted(ends, rows, side="right") - 1], rows + 1


KINDS = {
    "causal": (causal, {"right": 0}),
    "causal told as ranges": (causal, {"ranges": True}),
    "documents, causal": (documents, {"right": 0, "ranges": True}),
    "window": (window, {"left": 4095, "right": 0}),
}
HEADS = {64: (32, 32), 128: (16, 16), 256: (8, 8)}  # of queries, of keys: 2048 columns together
LENGTHS = (16384, 8192, 4096, 2048)  # 16384 tokens together
TABLE = [("causal", size, *heads, length) for size, heads in HEADS.items() for length in LENGTHS]
TABLE += [("causal told as ranges", size, *heads, length) for size, heads in HEADS.items() for length in LENGTHS]
TABLE += [("documents, causal", size, *HEADS[size], length) for size in (64, 128) for length in LENGTHS]
TABLE += [("window", size, *heads, 16384) for size, heads in HEADS.items()]
TABLE += [("causal", 128, 32, 8, length) for length in LENGTHS]
TABLE += [("causal", 128, heads, heads, 16384) for heads in (7, 11, 40)]  # the last section has others than the rest


@functools.cache
def blocks_of(kind, length, rows, keys, seed):
    """How many blocks of keys every block of rows visits."""
    begin, end = KINDS[kind][0](length, random.Random(seed))
    first = np.arange(0, length, rows)
    return (end[np.minimum(first + rows, length) - 1] - 1) // keys - begin[first] // keys + 1


@pytest.mark.parametrize(("kind", "size", "heads", "heads_k", "length"), TABLE)
def test_multiprocessors_end_together(taken, kind, size, heads, heads_k, length):
    batch = max(1, 16384 // length)
    third = size == 64 and kind == "causal" and length >= 4096  # as pays_third has it
    rows, keys = 192 if third else ROWS, TILES[size, size, 3 if third else 2][0]
    tiles = taken(batch, heads, heads_k, length, length, size, **KINDS[kind][1], rows=rows)
    for seed in range(3 if kind.startswith("documents") else 1):
        of_entry = np.stack([blocks_of(kind, length, rows, keys, 100 * seed + n) for n in range(batch)])
        assert makespan(of_entry[tiles[:, 0] // heads, tiles[:, 1]]) <= 1.03


@pytest.mark.parametrize("options", [{}, {"right": 0}, {"left": 9}, {"ranges": True}, {"right": 0, "ranges": True}])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 5), (2, 12, 4), (7, 8, 1)])
@pytest.mark.parametrize("length", [1, 129, 5000, 70000])
def test_each_tile_is_taken_once(taken, sizes, length, options):
    tiles = taken(*sizes, length, length, 128, **options)
    numbers = tiles[:, 0].astype(np.int64) * -(-length // ROWS) + tiles[:, 1]
    assert np.array_equal(np.sort(numbers), np.arange(len(tiles)))


@pytest.mark.parametrize(
    ("options", "first"),
    [({}, 0), ({"left": 9}, 0), ({"right": 0}, 7), ({"left": 9, "right": 9}, 7), ({"ranges": True}, 7)],
)
def test_the_longest_rows_come_first(taken, options, first):
    """Those that see most keys: the last ones of a causal problem, the first ones if nothing but the past is hidden."""
    assert taken(2, 3, 3, 1024, 1024, 128, **options)[0, 1] == first


def test_heads_come_in_sections(taken):
    """Rows of as many heads side by side as the cache holds keys and values of, those that share them counted each."""
    for heads, heads_k, together in ((16, 16, 4), (32, 8, 16)):
        tiles = taken(1, heads, heads_k, 16384, 16384, 128, right=0)
        assert tiles[:together].tolist() == [[n, 127] for n in range(together)]
        assert tiles[together].tolist() == [0, 126]
    assert taken(1, 16, 16, 16384, 16384, 128)[:3].tolist() == [[0, 0], [0, 1], [0, 2]]


@pytest.mark.parametrize("options", [{"ranges": True}, {"right": 0, "ranges": True}, {"left": 255, "right": 0}])
def test_sections_of_short_sequences_fit_the_cache(taken, options):
    """But for the last one, which needs tiles enough to end evenly."""
    for length, together in ((1024, 64), (4096, 16)):  # heads whose keys and values are 32 MiB
        tiles = taken(16, 16, 16, length, length, 128, **options)
        begins = np.flatnonzero(np.diff((tiles[:, 1] == tiles[0, 1]).astype(int), prepend=0) == 1)
        sizes = [len(set(tiles[a:b, 0].tolist())) for a, b in itertools.pairwise(begins)]
        assert 0 < max(sizes) <= together
