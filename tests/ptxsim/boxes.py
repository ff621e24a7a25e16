"""What the manual says of boxes and swizzles, element by element: for the tests, in place of anything clever."""

import itertools

from . import tensormap

# PTX ISA 5.5.7: which 16-byte unit each line of 128 bytes holds where, by (swizzle, number of the atomicity).
TABLES = {
    (0, 0): ["01234567"],
    (32, 0): ["01234567", "10325476"],
    (64, 0): ["01234567", "10325476", "23016745", "32107654"],
    (128, 0): [
        "01234567",
        "10325476",
        "23016745",
        "32107654",
        "45670123",
        "54761032",
        "67452301",
        "76543210",
    ],
    (128, 1): ["01234567", "23016745", "45670123", "67452301"],
    (128, 3): ["01234567", "45670123"],
}


def by_element(made: tensormap.TensorMap, start: tuple) -> dict:
    """Element of the box -> byte offset in the tensor, for those in bounds: PTX ISA 5.5.3, one element at a time."""
    out = {}
    for index in itertools.product(*(range(n) for n in made.counts)):
        at = [s + i * e for s, i, e in zip(start, index, made.steps, strict=True)]
        if all(0 <= a < size for a, size in zip(at, made.sizes, strict=True)):
            pitches = (made.element_bytes, *made.strides)
            out[index] = sum(a * p for a, p in zip(at, pitches, strict=True))
    return out


def unit_at(swizzle: int, atom: int, address: int) -> int:
    """Which byte of a tile without swizzling lies at this shared address (of the tile that starts at address 0)."""
    table = TABLES[swizzle, atom]
    line, column = divmod(address // 16, 8)
    return 128 * line + 16 * int(table[line % len(table)][column]) + address % 16
