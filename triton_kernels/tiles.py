"""Tiles of rows and their products, with their tangents where a kernel has some.

A head size that is no power of two is split, D = D0 + D1, so that nothing is multiplied by padding but the end of D1:
a row's columns come as two tiles. `W` says how: dims columns, of which `first` in the first tile and `rest` (or none,
0) in the second.

Rows of keys and values may lie in pages. `PAGES`, a constant of the variant, says how: 0 one after the other, 1 those
of a block in several pages, 2 those of a block in one. With pages tiles are loaded by pointers.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import Masks


class Pages(NamedTuple):
    """Where the rows of a sequence lie: row j is row j % 2^shift of page table[j >> shift], one of `count`."""

    table: Any
    count: Any
    shift: Any
    stride: Any  # elements from page to page


class Operand(NamedTuple):
    """The rows of one head of a tensor and of its tangent (without one, of the tensor twice), from which tiles are
    loaded: descriptors of the columns of the first tile and of the second, or twice a pointer to the head."""

    x0: Any
    x1: Any
    t0: Any
    t1: Any
    b: Any
    h: Any
    stride: Any
    tangent_stride: Any
    length: Any
    pages: Any  # `Pages`; 0 where rows lie one after the other. x0 and x1 are then of the first page


class Tiles(NamedTuple):
    """The two tiles of some rows from `first` on, and those of their tangent; or, where products load a chunk of
    columns at a time, the pointers of the `Operand`."""

    x0: Any
    x1: Any
    t0: Any
    t1: Any
    first: Any
    stride: Any
    tangent_stride: Any
    length: Any


@triton.constexpr_function
def reaches(first, count, size):
    """Whether first + count <= size is certain at compile time."""
    return isinstance(first, int) and isinstance(size, int) and first + count <= size


@triton.jit
def head_of(pointer, b, h, strides):
    """The pointer to a head's first row."""
    return pointer + b.to(tl.int64) * strides.b + h.to(tl.int64) * strides.h


@triton.jit
def masks_of(masks, b, h, strides, C: tl.constexpr):
    """The pointers to a head's bias, its tangent and its key ranges, and the visits; 0 for what there isn't (Triton 3.6
    lets no function return a tuple that holds a None)."""
    bias = 0
    tbias = 0
    ranges = 0
    visits = 0
    if C.BIAS > 0:
        bias = head_of(masks.bias, b, h, strides.bias)
    if C.TBIAS > 0:
        tbias = head_of(masks.tbias, b, h, strides.tbias)
    if C.RANGES > 0:
        ranges = head_of(masks.ranges, b, h, strides.ranges)
    if masks.visits is not None:
        visits = masks.visits
    return Masks(bias, tbias, ranges, visits)


@triton.jit
def operand(
    x0, x1, t0, t1, b, h, strides, tangent_strides, call, KEYS: tl.constexpr, TANGENT: tl.constexpr, TMA: tl.constexpr,
    table=None,
):  # fmt: skip
    """The `Operand` of a head of a tensor with a row for each key (KEYS) or query, given as two descriptors if TMA,
    else as a pointer in x0; likewise its tangent if TANGENT. With a table of pages, x0 points to these."""
    length = call.seqlen_k if KEYS else call.seqlen_q
    pages = 0
    if table is not None:
        pages = Pages(table + b.to(tl.int64) * call.table_row, call.pages, call.page_shift, strides.b)
        x0 = head_of(x0, h * 0, h, strides)
        x1 = x0
    elif not TMA:
        x0 = head_of(x0, b, h, strides)
        x1 = x0
    if TANGENT:
        if not TMA:
            t0 = head_of(t0, b, h, tangent_strides)
            t1 = t0
        return Operand(x0, x1, t0, t1, b, h, strides.row, tangent_strides.row, length, pages)
    else:
        return Operand(x0, x1, x0, x1, b, h, strides.row, strides.row, length, pages)


@triton.jit
def _start_of(page, pages):
    """Elements from the first page to a page, or to each of some. A number that isn't one of a page counts as 0."""
    page = tl.where(page.to(tl.uint32) < pages.count.to(tl.uint32), page, 0)
    return page.to(tl.int64) * pages.stride


@triton.jit
def load_tile(source, b, h, first, stride, length, first_dim, dims, ROWS: tl.constexpr, DIMS: tl.constexpr,
              TMA: tl.constexpr, TAIL: tl.constexpr, reached=None, pages=0, PAGES: tl.constexpr = 0):  # fmt: skip
    """Rows [first, first + ROWS) and DIMS columns of one head's (length, dims) matrix, zero past its ends.

    `source` is a descriptor of (batch, heads, length, dims) if TMA, else a pointer to the head's first row, with
    `stride` elements from row to row. TAIL: the rows may run past the end. `reached`, [ROWS], with a pointer: of the
    other rows nothing is loaded, they are zero. `dims` known at compile time spares the mask of columns where there is
    nothing to mask.
    """
    if TMA:
        return tl.reshape(source.load([b, h, first, first_dim]), [ROWS, DIMS])
    else:
        rows = tl.arange(0, ROWS)
        d = first_dim + tl.arange(0, DIMS)
        if PAGES == 1:  # `first` begins one
            entries = pages.table + (first >> pages.shift) + (rows >> pages.shift)
            if TAIL:
                page = tl.load(entries, mask=first + rows < length, other=0)
            else:
                page = tl.load(entries)
            within = rows & ((1 << pages.shift) - 1)
            pointers = source + _start_of(page, pages)[:, None] + (within[:, None] * stride + d[None, :])
        elif PAGES == 2:
            page = tl.load(pages.table + (first >> pages.shift))
            within = (first & ((1 << pages.shift) - 1)).to(tl.int64)
            pointers = source + _start_of(page, pages) + within * stride + (rows[:, None] * stride + d[None, :])
        else:
            pointers = source + first.to(tl.int64) * stride + (rows[:, None] * stride + d[None, :])
        mask = d[None, :] < dims
        if TAIL and PAGES != 2:  # a sequence has whole pages
            mask = mask & (first + rows[:, None] < length)
        if reached is not None:
            mask = mask & reached[:, None]
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _load_part(
    rows, first, PART: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
    TANGENT: tl.constexpr = False, reached=None, PAGES: tl.constexpr = 0,
):  # fmt: skip
    """The first tile (PART 0) or the second of ROWS rows of an `Operand`, or of its tangent."""
    x0 = rows.t0 if TANGENT else rows.x0
    x1 = rows.t1 if TANGENT else rows.x1
    stride = rows.tangent_stride if TANGENT else rows.stride
    if PART == 0:
        return load_tile(
            x0, rows.b, rows.h, first, stride, rows.length, 0, W.dims, ROWS, W.first, TMA, TAIL, reached, rows.pages,
            PAGES,
        )  # fmt: skip
    else:
        return load_tile(
            x1, rows.b, rows.h, first, stride, rows.length, W.first, W.dims, ROWS, W.rest, TMA, TAIL, reached,
            rows.pages, PAGES,
        )  # fmt: skip


@triton.jit
def load_tiles(
    rows, first, W: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, TANGENT: tl.constexpr, TMA: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """The `Tiles` of ROWS rows of an `Operand`."""
    x0 = rows.x0
    x1 = rows.x1
    t0 = rows.t0
    t1 = rows.t1
    if C.CHUNK == 0:
        x0 = _load_part(rows, first, 0, W, ROWS, TMA, TAIL)
        x1 = x0
        if W.rest > 0:
            x1 = _load_part(rows, first, 1, W, ROWS, TMA, TAIL)
        t0 = x0
        t1 = x1
        if TANGENT:
            t0 = _load_part(rows, first, 0, W, ROWS, TMA, TAIL, True)
            t1 = t0
            if W.rest > 0:
                t1 = _load_part(rows, first, 1, W, ROWS, TMA, TAIL, True)
    return Tiles(x0, x1, t0, t1, first, rows.stride, rows.tangent_stride, rows.length)


@triton.jit
def _load_chunk(
    pointer, rows, first, stride, dim, W: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, pages=0,
    PAGES: tl.constexpr = 0,
):  # fmt: skip
    """Of an `Operand` or `Tiles` of pointers."""
    return load_tile(
        pointer, 0, 0, first, stride, rows.length, dim, W.dims, ROWS, C.CHUNK, False, True, None, pages, PAGES
    )


@triton.jit
def _times_transposed(total, tangent, a, at, b, bt, C: tl.constexpr, A_TANGENT: tl.constexpr, B_TANGENT: tl.constexpr):
    """total + a b^T and tangent + at b^T + a bt^T; without tangents the first twice (no None: see `masks_of`)."""
    total = tl.dot(a, tl.trans(b), total, input_precision=C.PRECISION)
    if A_TANGENT:
        tangent = tl.dot(at, tl.trans(b), tangent, input_precision=C.PRECISION)
    if B_TANGENT:
        tangent = tl.dot(a, tl.trans(bt), tangent, input_precision=C.PRECISION)
    if not (A_TANGENT or B_TANGENT):
        tangent = total
    return total, tangent


@triton.jit
def products(
    a, rows, first, W: tl.constexpr, A_ROWS: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr,
    TAIL: tl.constexpr, A_TANGENT: tl.constexpr = False, TANGENT: tl.constexpr = False,
):  # fmt: skip
    """a b^T of `Tiles` a and ROWS rows b of an `Operand`, from `first` on; its tangent at b^T + a bt^T (of those that
    there are; without any, a b^T again); and b's `Tiles`, each of which is loaded when it is multiplied.

    With a CHUNK so many columns at a time: where registers can't hold the whole rows.
    """
    x0 = rows.x0
    x1 = rows.x1
    t0 = rows.t0
    t1 = rows.t1
    total = None
    tangent = None
    if C.CHUNK > 0:
        total = tl.zeros([A_ROWS, ROWS], tl.float32)
        tangent = tl.zeros([A_ROWS, ROWS], tl.float32)
        for dim in range(0, W.dims, C.CHUNK):
            x = _load_chunk(a.x0, a, a.first, a.stride, dim, W, A_ROWS, C)
            y = _load_chunk(x0, rows, first, rows.stride, dim, W, ROWS, C, rows.pages, C.PAGES)
            xt = x
            yt = y
            if A_TANGENT:
                xt = _load_chunk(a.t0, a, a.first, a.tangent_stride, dim, W, A_ROWS, C)
            if TANGENT:
                yt = _load_chunk(t0, rows, first, rows.tangent_stride, dim, W, ROWS, C)
            total, tangent = _times_transposed(total, tangent, x, xt, y, yt, C, A_TANGENT, TANGENT)
    else:
        x0 = _load_part(rows, first, 0, W, ROWS, TMA, TAIL, False, None, C.PAGES)
        t0 = x0
        if TANGENT:
            t0 = _load_part(rows, first, 0, W, ROWS, TMA, TAIL, True)
        total, tangent = _times_transposed(total, tangent, a.x0, a.t0, x0, t0, C, A_TANGENT, TANGENT)
        x1 = x0
        t1 = t0
        if W.rest > 0:
            x1 = _load_part(rows, first, 1, W, ROWS, TMA, TAIL, False, None, C.PAGES)
            t1 = x1
            if TANGENT:
                t1 = _load_part(rows, first, 1, W, ROWS, TMA, TAIL, True)
            total, tangent = _times_transposed(total, tangent, a.x1, a.t1, x1, t1, C, A_TANGENT, TANGENT)
    tiles = Tiles(x0, x1, t0, t1, first, rows.stride, rows.tangent_stride, rows.length)
    if A_TANGENT or TANGENT:
        return total, tangent, tiles
    else:
        return total, total, tiles


@triton.jit
def zeros(ROWS: tl.constexpr, W: tl.constexpr):
    """What `add_product` adds to; the second tile is a small one where there is none."""
    return tl.zeros([ROWS, W.first], tl.float32), tl.zeros([ROWS, W.rest if W.rest > 0 else 16], tl.float32)


@triton.jit
def _cleared(b, held):
    """b with zeros in the rows that `held` doesn't have. By bits: the mask of a row's two neighbours of 16 bits is one
    register, where selecting would take two predicates."""
    BITS: tl.constexpr = tl.int32 if b.dtype.primitive_bitwidth == 32 else tl.int16
    return (b.to(BITS, bitcast=True) & -held.to(BITS)[:, None]).to(b.dtype, bitcast=True)


@triton.jit
def add_product(
    acc, a, b, W: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, TAIL: tl.constexpr, TANGENT: tl.constexpr = False,
    held=None,
):  # fmt: skip
    """acc + a b, with a in b's dtype: b's two tiles, or those of its tangent if TANGENT; loaded here if b holds
    pointers. TAIL as in `load_tile`, held as in `add_rows`."""
    acc0 = acc[0]
    acc1 = acc[1]
    b0 = b.t0 if TANGENT else b.x0
    b1 = b.t1 if TANGENT else b.x1
    stride = b.tangent_stride if TANGENT else b.stride
    if C.CHUNK > 0:
        b0 = load_tile(b0, 0, 0, b.first, stride, b.length, 0, W.dims, ROWS, W.first, False, TAIL, held)
    elif held is not None:
        b0 = _cleared(b0, held)
    acc0 = tl.dot(a.to(b0.dtype), b0, acc0, input_precision=C.PRECISION)
    if W.rest > 0:
        if C.CHUNK > 0:
            b1 = load_tile(b1, 0, 0, b.first, stride, b.length, W.first, W.dims, ROWS, W.rest, False, TAIL,
                           held)  # fmt: skip
        elif held is not None:
            b1 = _cleared(b1, held)
        acc1 = tl.dot(a.to(b1.dtype), b1, acc1, input_precision=C.PRECISION)
    return acc0, acc1


@triton.jit
def add_rows(
    acc, factor, a, rows, first, W: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr,
    TAIL: tl.constexpr, TANGENT: tl.constexpr = False, reached=None, held=None,
):  # fmt: skip
    """acc, every row times its factor (None: 1), + a b, with a in b's dtype: b are ROWS rows of an `Operand`, or of its
    tangent, from `first` on, each tile of which is loaded when it is multiplied.

    A weight of 0 times NaN is NaN: `reached` and `held`, [ROWS], say which rows of b weights may meet, and the others
    are zero. What `reached` leaves out isn't loaded (with pointers); `held`, which may be known later, clears it then.
    """
    acc0 = acc[0]
    acc1 = acc[1]
    b = _load_part(rows, first, 0, W, ROWS, TMA, TAIL, TANGENT, reached, C.PAGES)
    if held is not None:
        b = _cleared(b, held)
    a = a.to(b.dtype)
    if factor is not None:
        acc0 = acc0 * factor[:, None]
    acc0 = tl.dot(a, b, acc0, input_precision=C.PRECISION)
    if W.rest > 0:
        b = _load_part(rows, first, 1, W, ROWS, TMA, TAIL, TANGENT, reached, C.PAGES)
        if held is not None:
            b = _cleared(b, held)
        if factor is not None:
            acc1 = acc1 * factor[:, None]
        acc1 = tl.dot(a, b, acc1, input_precision=C.PRECISION)
    return acc0, acc1


@triton.jit
def add_rows_and_products(
    acc, a, c, rows, first, W: tl.constexpr, C_ROWS: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
    TMA: tl.constexpr, TAIL: tl.constexpr, held=None,
):  # fmt: skip
    """acc + a b, as `add_rows` has it, and c b^T, as `products` has it, with b loaded once but where it comes in chunks
    of columns. What isn't `held` is zero in the first alone."""
    acc0 = acc[0]
    acc1 = acc[1]
    if C.CHUNK > 0:
        acc0, acc1 = add_rows(acc, None, a, rows, first, W, ROWS, C, TMA, TAIL, False, held)
        total, _, _ = products(c, rows, first, W, C_ROWS, ROWS, C, TMA, TAIL)
    else:
        b = _load_part(rows, first, 0, W, ROWS, TMA, TAIL)
        a = a.to(b.dtype)
        x = b
        if held is not None:
            x = _cleared(b, held)
        acc0 = tl.dot(a, x, acc0, input_precision=C.PRECISION)
        total = tl.dot(c.x0, tl.trans(b), input_precision=C.PRECISION)
        if W.rest > 0:
            b = _load_part(rows, first, 1, W, ROWS, TMA, TAIL)
            x = b
            if held is not None:
                x = _cleared(b, held)
            acc1 = tl.dot(a, x, acc1, input_precision=C.PRECISION)
            total = tl.dot(c.x1, tl.trans(b), total, input_precision=C.PRECISION)
    return (acc0, acc1), total


@triton.jit
def store_tile(pointer, tile, first, stride, length, first_dim, dims, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """The reverse of load_tile by pointer, within the ends; converts to the pointer's dtype."""
    rows = tl.arange(0, ROWS)
    d = first_dim + tl.arange(0, DIMS)
    pointers = pointer + first.to(tl.int64) * stride + (rows[:, None] * stride + d[None, :])
    mask = first + rows[:, None] < length
    if not reaches(first_dim, DIMS, dims):
        mask = mask & (d[None, :] < dims)
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def store_tiles(pointer, acc, factor, first, stride, length, W: tl.constexpr, ROWS: tl.constexpr):
    """Stores two tiles of rows of a head, each times `factor` (which broadcasts to them)."""
    store_tile(pointer, acc[0] * factor, first, stride, length, 0, W.dims, ROWS, W.first)
    if W.rest > 0:
        store_tile(pointer, acc[1] * factor, first, stride, length, W.first, W.dims, ROWS, W.rest)
