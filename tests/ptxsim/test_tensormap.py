"""Tensor maps: what may be encoded, which bytes a box covers, and where they lie in shared memory."""

import numpy as np
import pytest

import ptxsim
from ptxsim import tensormap
from ptxsim.boxes import TABLES, by_element

BASE = 0x7F00_0000_1000


def make(element="f16", sizes=(64, 32), strides=(128,), box=(32, 8), **options) -> tensormap.TensorMap:
    return tensormap.decode(tensormap.encode(BASE, element, sizes, strides, box, **options))


def test_encoding_keeps_every_field():
    made = make("bf16", (70, 9, 300), (144, 2048), (32, 3, 17), element_strides=(1, 2, 8), swizzle=64, fill_nan=True)
    assert (made.address, made.element, made.sizes, made.strides) == (BASE, "bf16", (70, 9, 300), (144, 2048))
    assert (made.box, made.steps, made.swizzle, made.fill_nan) == ((32, 3, 17), (1, 2, 8), 64, True)
    assert made.counts == (32, 2, 3)
    assert made.bytes == 32 * 2 * 3 * 2


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("element 'f8'", {"element": "f8"}),
        ("rank 6", {"sizes": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}),
        ("rank 0", {"sizes": (), "strides": (), "box": ()}),
        ("2 strides", {"strides": (128, 256)}),
        ("1 box", {"box": (32,)}),
        ("global address", {"address": BASE + 8}),
        ("size 0 of dimension 1", {"sizes": (64, 0)}),
        ("stride 120 of dimension 1", {"strides": (120,)}),
        (r"below 2\^40", {"strides": (1 << 40,)}),
        ("box size 257", {"box": (32, 257)}),
        ("box size 0", {"box": (32, 0)}),
        ("12 bytes wide, expected a multiple of 16", {"box": (6, 8)}),
        ("at most the 32 bytes of the swizzle", {"swizzle": 32}),
        ("swizzle 96", {"swizzle": 96}),
        ("element stride 9", {"element_strides": (1, 9)}),
        ("interleaved layout needs 3", {"interleave": 16}),
        ("NaN", {"element": "s32", "fill_nan": True, "box": (4, 8)}),
        ("atoms of 32 bytes", {"atom": 1, "swizzle": 64}),
    ],
)
def test_what_the_driver_refuses(words, change):
    good = {"address": BASE, "element": "f16", "sizes": (64, 32), "strides": (128,), "box": (32, 8)}
    tensormap.encode(**good)
    with pytest.raises(tensormap.TensorMapError, match=words):
        tensormap.encode(**good | change)
    assert issubclass(tensormap.TensorMapError, ptxsim.LaunchError)


def test_bytes_that_are_no_tensor_map():
    for data in (bytes(128), bytes(range(128)), b"\xab" * 128):
        with pytest.raises(tensormap.TensorMapError, match="no tensor map"):
            tensormap.decode(data)


def test_replacing_every_field_makes_the_same_map():
    want = tensormap.encode(BASE, "f32", (40, 12), (256,), (8, 4), swizzle=32)
    data = np.zeros(128, np.uint8)
    fields = [("global_address", None, BASE), ("rank", None, 1), ("elemtype", None, 7), ("swizzle_mode", None, 1)]
    fields += [("global_stride", 0, 256), ("box_dim", 0, 8), ("box_dim", 1, 4), ("global_dim", 0, 40)]
    fields += [("global_dim", 1, 12), ("element_stride", 0, 1), ("element_stride", 1, 1)]
    for name, ordinal, value in fields:
        with pytest.raises(tensormap.TensorMapError, match=r"no tensor map|never written|expected 1 to"):
            tensormap.decode(data.tobytes())
        tensormap.replace(data, name, ordinal, value)
    assert tensormap.decode(data.tobytes()) == tensormap.decode(want)
    for name in ("interleave_layout", "fill_mode"):  # the zeroed bytes say so already
        tensormap.replace(data, name, None, 0)
    assert tensormap.decode(data.tobytes()) == tensormap.decode(want)


@pytest.mark.parametrize(
    ("name", "ordinal", "value"),
    [("rank", None, 5), ("elemtype", None, 13), ("box_dim", 5, 1), ("box_dim", 0, 257), ("global_stride", 4, 16)],
)
def test_replacing_with_what_does_not_fit(name, ordinal, value):
    data = np.frombuffer(tensormap.encode(BASE, "f32", (40, 12), (256,), (8, 4)), np.uint8).copy()
    with pytest.raises(tensormap.TensorMapError, match=name):
        tensormap.replace(data, name, ordinal, value)


def test_replacing_in_bytes_that_nobody_zeroed():
    with pytest.raises(tensormap.TensorMapError, match="neither a tensor map nor zero"):
        tensormap.replace(np.full(128, 0xAB, np.uint8), "rank", None, 1)


# -- which bytes


SHAPES = [
    ("u8", (50,), (), (16,), (1,)),
    ("f16", (21, 13), (48,), (8, 6), (1, 1)),
    ("f32", (9, 7, 5), (48, 400), (4, 3, 4), (1, 1, 1)),
    ("f32", (9, 7, 5), (48, 400), (4, 5, 4), (1, 2, 3)),
    ("u64", (3, 4, 3, 2, 3), (32, 160, 480, 1008), (2, 3, 2, 2, 2), (1, 2, 1, 1, 1)),
    ("bf16", (16, 4, 6), (192, 32), (8, 3, 2), (1, 1, 1)),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_windows_cover_the_elements_in_bounds(shape):
    element, sizes, strides, box, steps = shape
    made = make(element, sizes, strides, box, element_strides=steps)
    rng = np.random.default_rng(0)
    extent = sum((size - 1) * p for size, p in zip(sizes, (made.element_bytes, *strides), strict=True))
    data = rng.integers(0, 256, extent + made.element_bytes + 64, np.uint8)
    dtype = np.dtype(f"u{made.element_bytes}")
    corners = [tuple(-b - 1 for b in box), tuple(sizes), (0,) * len(sizes), tuple(s - 1 for s in sizes)]
    for _ in range(60):
        corners.append(tuple(int(rng.integers(-b - 2, s + 3)) for b, s in zip(box, sizes, strict=True)))
    for start in corners:
        want = by_element(made, start)
        offsets, rows, width = made.rows(start)
        parts = made.inside(start)
        got = set()
        for offset, row in zip(offsets.tolist(), rows.tolist(), strict=True):
            outer = []
            for n in made.counts[1:]:
                row, index = divmod(row, n)
                outer.append(index)
            for k in range(width // made.element_bytes):
                got.add(((parts[0].start + k, *outer), offset + k * made.element_bytes))
        assert got == set(want.items())
        if parts is None:
            assert not want
            continue
        window = made.window(data, 16, start, parts, dtype)
        for index, offset in want.items():
            inside = tuple(i - p.start for i, p in zip(index, parts, strict=True))
            assert window[inside[::-1]] == data[16 + offset : 16 + offset + made.element_bytes].view(dtype)[0]
        assert window.size == len(want)


# -- where in shared memory


@pytest.mark.parametrize("mode", TABLES)
@pytest.mark.parametrize("first_line", [0, 1, 3, 6])
def test_swizzles_are_the_manual_s_tables(mode, first_line):
    swizzle, atom = mode
    table = TABLES[mode]
    width = swizzle or 128
    made = make("f16", (width // 2, 64), (256,), (width // 2, 4096 // width), swizzle=swizzle, atom=atom)
    address = 5 * 1024 + 128 * first_line
    units = made.shared_units(address)
    assert len(units) == 256
    for source, target in enumerate(units.tolist()):
        line, column = divmod(source, 8)
        # "swizzle base offset": the pattern begins where the address is a multiple of its length.
        pattern = table[(first_line + line) % len(table)]
        assert target // 8 == line
        assert pattern[target % 8] == str(column)
    for unit in (0, 9, 77):
        byte = address + 16 * unit + 5
        moved = tensormap.swizzle_address(byte, swizzle, tensormap.ATOMS[atom])
        assert moved == address + 16 * int(units[unit]) + 5
