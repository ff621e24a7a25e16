"""Integer and bit operations of the simulator against Python's integers, in the words of the ISA's pseudocode."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxsim import integers as ix

TYPES = {f"{s}{w}": np.dtype(f"{'i' if s == 's' else 'u'}{w // 8}") for s in "us" for w in (16, 32, 64)}
SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=8, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def quiet():
    with np.errstate(all="ignore"):
        yield


def draw(rng, kind, count=40):
    """Integers of every magnitude, the extreme ones among them."""
    dtype = TYPES[kind]
    bits = 8 * dtype.itemsize
    drawn = rng.integers(0, 2**64, count, dtype=np.uint64) >> rng.integers(0, 64, count, dtype=np.uint64)
    chosen = [int(v) for v in drawn]
    chosen += [0, 1, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits) - 1, (1 << bits) - 2]
    rng.shuffle(chosen)
    return np.array([v % (1 << bits) for v in chosen], np.uint64).astype(f"u{dtype.itemsize}").view(dtype)


def wrap(kind, value):
    """A Python integer as the type holds it."""
    bits = 8 * TYPES[kind].itemsize
    value %= 1 << bits
    return value - (1 << bits) if kind[0] == "s" and value >> bits - 1 else value


def mask_of(kind):
    """All bits set, as the type holds it."""
    return wrap(kind, -1)


def clamp(kind, value):
    info = np.iinfo(TYPES[kind])
    return min(max(value, info.min), info.max)


def check(got, kind, expected):
    assert got.dtype == TYPES[kind]
    assert got.tolist() == list(expected)


@pytest.mark.parametrize("kind", list(TYPES))
@given(seed=SEEDS)
@few
def test_products(kind, seed):
    rng = np.random.default_rng(seed)
    a, b = draw(rng, kind), draw(rng, kind)
    bits = 8 * a.dtype.itemsize
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    check(ix.mul_hi(a, b), kind, [wrap(kind, x * y >> bits) for x, y in pairs])
    if bits < 64:
        check(ix.mul_wide(a, b), f"{kind[0]}{2 * bits}", [x * y for x, y in pairs])
    if bits == 32:
        check(
            ix.add_sat(a.view("i4"), b.view("i4")),
            "s32",
            [clamp("s32", wrap("s32", x) + wrap("s32", y)) for x, y in pairs],
        )
        check(
            ix.sub_sat(a.view("i4"), b.view("i4")),
            "s32",
            [clamp("s32", wrap("s32", x) - wrap("s32", y)) for x, y in pairs],
        )

        def low24(x):
            x &= 0xFFFFFF
            return x - (1 << 24) if kind[0] == "s" and x >> 23 else x

        check(ix.mul24(a, b, "lo"), kind, [wrap(kind, low24(x) * low24(y)) for x, y in pairs])
        check(ix.mul24(a, b, "hi"), kind, [wrap(kind, low24(x) * low24(y) >> 16) for x, y in pairs])
    if kind == "s32":
        c = draw(rng, kind)
        expected = [clamp(kind, (x * y >> 32) + z) for (x, y), z in zip(pairs, c.tolist(), strict=True)]
        check(ix.mad_hi_sat(a, b, c), kind, expected)


@pytest.mark.parametrize("kind", list(TYPES))
@given(seed=SEEDS)
@few
def test_division_cuts_towards_zero(kind, seed):
    rng = np.random.default_rng(seed)
    a, b, c = draw(rng, kind), draw(rng, kind), draw(rng, kind)
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))

    def quotient(x, y):
        return (-1 if (x < 0) != (y < 0) else 1) * (abs(x) // abs(y))

    check(ix.div(a, b), kind, [wrap(kind, quotient(x, y)) if y else wrap(kind, -1) for x, y in pairs])
    check(ix.rem(a, b), kind, [x - y * quotient(x, y) if y else x for x, y in pairs])
    expected = [wrap(kind, z + abs(x - y)) for (x, y), z in zip(pairs, c.tolist(), strict=True)]
    check(ix.sad(a, b, c), kind, expected)


def test_the_most_negative_number_divided_by_minus_one_wraps():
    for kind in ("s16", "s32", "s64"):
        least = np.array([np.iinfo(TYPES[kind]).min], TYPES[kind])
        check(ix.div(least, -np.ones_like(least)), kind, least.tolist())
        check(ix.rem(least, -np.ones_like(least)), kind, [0])


@pytest.mark.parametrize("bits", [32, 64])
@given(seed=SEEDS)
@few
def test_counting_bits(bits, seed):
    a = draw(np.random.default_rng(seed), f"u{bits}")
    values = a.tolist()
    check(ix.popc(a), "u32", [bin(v).count("1") for v in values])
    check(ix.clz(a), "u32", [bits - v.bit_length() for v in values])
    check(ix.brev(a), f"u{bits}", [int(f"{v:0{bits}b}"[::-1], 2) for v in values])
    for kind in (f"u{bits}", f"s{bits}"):
        x = a.view(TYPES[kind])
        magnitudes = [~v if v < 0 else v for v in x.tolist()]
        plain = [v.bit_length() - 1 if v else 0xFFFFFFFF for v in magnitudes]
        check(ix.bfind(x), "u32", plain)
        check(ix.bfind(x, shiftamt=True), "u32", [bits - 1 - v if v < bits else v for v in plain])


@given(mask=st.integers(0, 2**32 - 1), base=st.integers(0, 31), offset=st.integers(-34, 34))
def test_fns(mask, base, offset):
    expected = 0xFFFFFFFF
    if offset == 0:
        expected = base if mask >> base & 1 else expected
    else:
        positions = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [p for p in positions if mask >> p & 1]
        expected = found[abs(offset) - 1] if len(found) >= abs(offset) else expected
    got = ix.fns(np.array([mask, mask], "u4"), np.uint32(base), np.int32(offset))
    assert got.tolist() == [expected] * 2


def test_fns_as_the_manual_shows_it():
    mask = np.uint32(0xAAAAAAAA)
    cases = {(3, 1): 3, (3, -1): 3, (2, 1): 3, (2, -1): 1}
    assert {k: ix.fns(mask, np.uint32(k[0]), np.int32(k[1])).tolist() for k in cases} == cases


AMOUNTS = np.array([0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 1 << 16, 1 << 31, (1 << 32) - 1], np.uint32)


@pytest.mark.parametrize("kind", list(TYPES))
@given(seed=SEEDS)
@few
def test_shifts_by_any_amount(kind, seed):
    a = draw(np.random.default_rng(seed), kind)[: len(AMOUNTS)]
    pairs = list(zip(a.tolist(), AMOUNTS.tolist(), strict=True))
    bits = 8 * a.dtype.itemsize
    check(ix.shl(a, AMOUNTS), kind, [wrap(kind, x << min(n, bits)) for x, n in pairs])
    check(ix.shr(a, AMOUNTS), kind, [x >> min(n, bits) for x, n in pairs])
    scalar = AMOUNTS[int(seed) % len(AMOUNTS)]
    check(ix.shr(a, scalar), kind, [x >> min(int(scalar), bits) for x in a.tolist()])


@given(seed=SEEDS)
@few
def test_funnel_shifts(seed):
    rng = np.random.default_rng(seed)
    a, b = draw(rng, "u32")[: len(AMOUNTS)], draw(rng, "u32")[: len(AMOUNTS)]
    for mode in ("clamp", "wrap"):
        left, right = [], []
        for x, y, c in zip(a.tolist(), b.tolist(), AMOUNTS.tolist(), strict=True):
            n = min(c, 32) if mode == "clamp" else c & 31
            left.append((y << n | x >> 32 - n) & 0xFFFFFFFF)
            right.append((y << 32 - n | x >> n) & 0xFFFFFFFF)
        check(ix.shf("l", mode, a, b, AMOUNTS), "u32", left)
        check(ix.shf("r", mode, a, b, AMOUNTS), "u32", right)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@given(seed=SEEDS)
@few
def test_bit_fields(kind, seed):
    rng = np.random.default_rng(seed)
    a, b = draw(rng, kind), draw(rng, kind)
    msb = 8 * a.dtype.itemsize - 1
    edge = [0, 1, msb, msb + 1, msb + 2, 255, 256 + 3]
    start = rng.choice([*edge, *range(msb)], len(a)).astype("u4")
    length = rng.choice([*edge, *range(msb)], len(a)).astype("u4")
    extracted, inserted = [], []
    unsigned = b.view(f"u{a.dtype.itemsize}")
    for x, y, c, d in zip(a.tolist(), unsigned.tolist(), start.tolist(), length.tolist(), strict=True):
        pos, n = c & 0xFF, d & 0xFF
        x &= (1 << msb + 1) - 1

        def bit(v, i):
            return v >> i & 1

        sign = 0 if kind[0] == "u" or n == 0 else bit(x, min(pos + n - 1, msb))
        e = sum((bit(x, pos + i) if i < n and pos + i <= msb else sign) << i for i in range(msb + 1))
        extracted.append(wrap(kind, e))
        f = y
        for i in range(n):
            if pos + i <= msb:
                f = f & ~(1 << pos + i) | bit(x, i) << pos + i
        inserted.append(f)
    check(ix.bfe(a, start, length), kind, extracted)
    bits = a.view(unsigned.dtype)
    check(ix.bfi(bits, unsigned, start, length), f"u{msb + 1}", inserted)
    check(
        ix.bfe(a, start[0], length[0]),
        kind,
        [int(v) for v in ix.bfe(a, np.full_like(start, start[0]), np.full_like(length, length[0]))],
    )


@given(seed=SEEDS)
@few
def test_szext_and_bmsk(seed):
    rng = np.random.default_rng(seed)
    a = draw(rng, "u32")
    b = rng.choice([*range(34), 63, 64, 65, (1 << 32) - 1], len(a)).astype("u4")
    for mode in ("clamp", "wrap"):
        widths = [n & 31 if mode == "wrap" else min(n, 32) for n in b.tolist()]
        unsigned = [x & (1 << n) - 1 for x, n in zip(a.tolist(), widths, strict=True)]
        signed = [v - (1 << n) if n and v >> n - 1 else v for v, n in zip(unsigned, widths, strict=True)]
        check(ix.szext(a, b, mode), "u32", unsigned)
        check(ix.szext(a.view("i4"), b, mode), "s32", signed)
        start = rng.choice([0, 1, 5, 31, 32, 40], len(b)).astype("u4")
        starts = [s & 31 if mode == "wrap" else min(s, 32) for s in start.tolist()]
        expected = [((1 << n) - 1) << s & 0xFFFFFFFF for n, s in zip(widths, starts, strict=True)]
        check(ix.bmsk(start, b, mode), "u32", expected)


@pytest.mark.parametrize(("at", "bt"), list(itertools.product("us", "us")))
@given(seed=SEEDS)
@few
def test_dot_products(at, bt, seed):
    rng = np.random.default_rng(seed)
    ct = "u32" if at == bt == "u" else "s32"
    a, b, c = draw(rng, f"{at}32"), draw(rng, f"{bt}32"), draw(rng, ct)

    def parts(value, size, sign):
        raw = [value >> size * i & (1 << size) - 1 for i in range(32 // size)]
        return [v - (1 << size) if sign == "s" and v >> size - 1 else v for v in raw]

    four, low, high = [], [], []
    for x, y, z in zip(a.view("u4").tolist(), b.view("u4").tolist(), c.tolist(), strict=True):
        y = parts(y, 8, bt)
        four.append(wrap(ct, z + sum(p * q for p, q in zip(parts(x, 8, at), y, strict=True))))
        h = parts(x, 16, at)
        low.append(wrap(ct, z + h[0] * y[0] + h[1] * y[1]))
        high.append(wrap(ct, z + h[0] * y[2] + h[1] * y[3]))
    check(ix.dp4a(a, b, c), ct, four)
    check(ix.dp2a(a, b, c, "lo"), ct, low)
    check(ix.dp2a(a, b, c, "hi"), ct, high)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@given(seed=SEEDS)
@few
def test_carries_make_long_arithmetic(kind, seed):
    rng = np.random.default_rng(seed)
    bits = 8 * TYPES[kind].itemsize
    mask = (1 << bits) - 1
    words = [draw(rng, kind) for _ in range(4)]
    words[0][:4], words[2][:4] = mask_of(kind), [1, 0, 0, 1]  # carries that run through a word of ones
    words[1][:4], words[3][:4] = mask_of(kind), [0, 0, 1, 1]
    a0, a1, b0, b1 = words
    low, carry = ix.add_carry(a0, b0)
    high, out = ix.add_carry(a1, b1, carry)
    dlow, borrow = ix.sub_carry(a0, b0)
    dhigh, under = ix.sub_carry(a1, b1, borrow)
    mlow, mcarry = ix.mad_carry(a0, b0, a1, "lo")
    mhigh, mout = ix.mad_carry(a0, b0, b1, "hi", mcarry)
    assert carry.dtype == out.dtype == borrow.dtype == under.dtype == bool
    for i, (w0, w1, v0, v1) in enumerate(zip(*(w.tolist() for w in words), strict=True)):
        x = (w0 & mask) | (w1 & mask) << bits
        y = (v0 & mask) | (v1 & mask) << bits
        assert (int(low[i]) & mask) | (int(high[i]) & mask) << bits | int(out[i]) << 2 * bits == x + y
        difference = (int(dlow[i]) & mask) | (int(dhigh[i]) & mask) << bits
        assert difference - (int(under[i]) << 2 * bits) == x - y
        product = (w0 * v0) % (1 << 2 * bits)
        total = (product & mask) + (w1 & mask)
        assert int(mlow[i]) & mask == total & mask
        assert bool(mcarry[i]) == (total > mask)
        upper = (product >> bits) + (v1 & mask) + (total >> bits)
        assert int(mhigh[i]) & mask == upper & mask
        assert bool(mout[i]) == (upper > mask)


@pytest.mark.parametrize("table", range(256))
def test_lop3_of_every_table(table):
    a, b, c = (np.array([v], np.uint32) for v in (0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA))
    assert ix.lop3(table)(a, b, c).tolist() == [table * 0x01010101]


def test_lop3_refuses_other_tables():
    with pytest.raises(ValueError, match="256"):
        ix.lop3(256)


@given(seed=SEEDS, scalar=st.booleans())
@few
def test_prmt_picks_bytes(seed, scalar):
    rng = np.random.default_rng(seed)
    a, b, c = draw(rng, "u32"), draw(rng, "u32"), rng.integers(0, 1 << 32, 46, dtype=np.uint32)
    if scalar:
        c[:] = c[0]
    expected = []
    for x, y, control in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        source = (y << 32 | x).to_bytes(8, "little")
        picked = []
        for i in range(4):
            select = control >> 4 * i & 0xF
            byte = source[select & 7]
            picked.append((0xFF if byte >> 7 else 0) if select & 8 else byte)
        expected.append(int.from_bytes(bytes(picked), "little"))
    check(ix.prmt(a, b, c[0] if scalar else c), "u32", expected)
    if scalar:
        check(ix.prmt_constant(int(c[0]))(a, b), "u32", expected)
    check(ix.prmt(a, np.uint32(5), c), "u32", ix.prmt(a, np.full_like(a, 5), c).tolist())


@pytest.mark.parametrize("scalar", [False, True])
def test_prmt_modes(scalar):
    # The manual's table, from byte 3 of the result down to byte 0; bytes of b:a are numbered 7 to 0.
    table = {
        "f4e": ["3210", "4321", "5432", "6543"],
        "b4e": ["5670", "6701", "7012", "0123"],
        "rc8": ["0000", "1111", "2222", "3333"],
        "ecl": ["3210", "3211", "3222", "3333"],
        "ecr": ["0000", "1110", "2210", "3210"],
        "rc16": ["1010", "3232", "1010", "3232"],
    }
    a, b = np.array([0x03020100], "u4"), np.array([0x07060504], "u4")
    for mode, rows in table.items():
        for c, row in enumerate(rows):
            control = np.uint32(c + 4) if scalar else np.array([c + 4], "u4")
            expected = [int("0" + "0".join(row), 16)]
            assert ix.prmt(a, b, control, mode).tolist() == expected, (mode, c)
            assert ix.prmt_constant(int(np.asarray(control).item()), mode)(a, b).tolist() == expected
            assert ix.prmt_constant(int("0x" + row, 16))(a, b).tolist() == expected


@given(seed=SEEDS)
@few
def test_halfword_operations(seed):
    rng = np.random.default_rng(seed)
    a, b = draw(rng, "u32"), draw(rng, "u32")

    def by_halves(kind, function):
        half = f"{kind[0]}16"
        out = []
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            parts = [function(wrap(half, x >> s), wrap(half, y >> s)) & 0xFFFF for s in (0, 16)]
            out.append(parts[0] | parts[1] << 16)
        return out

    check(ix.halves(np.add, "u16x2")(a, b), "u32", by_halves("u16x2", lambda x, y: x + y))
    check(ix.halves(np.minimum, "s16x2")(a, b), "u32", by_halves("s16x2", min))
    check(ix.halves(np.maximum, "u16x2")(a, b), "u32", by_halves("u16x2", max))
    clamped = ix.halves(lambda x, y: ix.relu(np.minimum(x, y)), "s16x2")(a, b)
    check(clamped, "u32", by_halves("s16x2", lambda x, y: max(min(x, y), 0)))


@pytest.mark.parametrize("kind", ["u2", "s2", "u4", "s4", "u8", "s8", "u16", "s16"])
@given(seed=SEEDS)
@few
def test_cvt_pack(kind, seed):
    rng = np.random.default_rng(seed)
    a, b, c = draw(rng, "s32"), draw(rng, "s32"), draw(rng, "u32")
    a[:20] %= 40
    size = int(kind[1:])
    low, high = (0, (1 << size) - 1) if kind[0] == "u" else (-(1 << size - 1), (1 << size - 1) - 1)

    def field(v):
        return min(max(v, low), high) & (1 << size) - 1

    triples = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    if size == 16:
        check(ix.cvt_pack(kind)(a, b), "u32", [field(x) << 16 | field(y) for x, y, _ in triples])
    else:
        expected = [(z << 2 * size | field(x) << size | field(y)) & 0xFFFFFFFF for x, y, z in triples]
        check(ix.cvt_pack(kind)(a, b, c), "u32", expected)
