"""Integer, logic and bit instructions run as PTX: operand order, types and modifiers. (What the operations compute on
all kinds of values is tested in test_integer_functions.py.)"""

import numpy as np
import pytest

from ptxsim import Fault, UnsupportedInstruction, snippets

INT_MIN, INT_MAX, ONES = -(1 << 31), (1 << 31) - 1, (1 << 32) - 1

# instruction, result, operands (numpy type, values), expected values
CASES = [
    ("add.u32 %out, %a, %b", "u4", [("u4", [ONES, 7]), ("u4", [2, 5])], [1, 12]),
    ("add.s16 %out, %a, -3", "i2", [("i2", [1, -(1 << 15)])], [-2, (1 << 15) - 3]),
    ("add.s64 %out, %a, %b", "i8", [("i8", [1 << 40]), ("i8", [-1])], [(1 << 40) - 1]),
    ("add.sat.s32 %out, %a, %b", "i4", [("i4", [INT_MAX, INT_MIN, 3]), ("i4", [1, -1, 4])], [INT_MAX, INT_MIN, 7]),
    ("add.u16x2 %out, %a, %b", "u4", [("u4", [0x0001FFFF]), ("u4", [0x00020001])], [0x00030000]),
    ("add.s16x2 %out, %a, %b", "u4", [("u4", [0x7FFF0001]), ("u4", [0x0001FFFF])], [0x80000000]),
    ("sub.u32 %out, %a, %b", "u4", [("u4", [3]), ("u4", [5])], [ONES - 1]),
    ("sub.sat.s32 %out, %a, %b", "i4", [("i4", [INT_MIN, 9]), ("i4", [1, 4])], [INT_MIN, 5]),
    ("mul.lo.u32 %out, %a, %b", "u4", [("u4", [1 << 31]), ("u4", [3])], [1 << 31]),
    ("mul.hi.u32 %out, %a, %b", "u4", [("u4", [ONES]), ("u4", [ONES])], [ONES - 1]),
    ("mul.hi.s32 %out, %a, %b", "i4", [("i4", [-1, INT_MIN]), ("i4", [1, INT_MIN])], [-1, 1 << 30]),
    ("mul.wide.s32 %out, %a, %b", "i8", [("i4", [-5]), ("i4", [INT_MAX])], [-5 * INT_MAX]),
    ("mul.wide.u16 %out, %a, %b", "u4", [("u2", [0xFFFF]), ("u2", [0xFFFF])], [0xFFFE0001]),
    ("mul.hi.u64 %out, %a, %b", "u8", [("u8", [1 << 63]), ("u8", [6])], [3]),
    ("mad.lo.s32 %out, %a, %b, %c", "i4", [("i4", [7]), ("i4", [-3]), ("i4", [4])], [-17]),
    ("mad.hi.u32 %out, %a, %b, %c", "u4", [("u4", [1 << 31]), ("u4", [6]), ("u4", [10])], [13]),
    ("mad.wide.u32 %out, %a, %b, %c", "u8", [("u4", [ONES]), ("u4", [2]), ("u8", [1 << 40])], [(1 << 40) + 2 * ONES]),
    ("mad.hi.sat.s32 %out, %a, %b, %c", "i4", [("i4", [INT_MAX]), ("i4", [4]), ("i4", [INT_MAX])], [INT_MAX]),
    ("mul24.lo.u32 %out, %a, %b", "u4", [("u4", [0xFF000003]), ("u4", [5])], [15]),
    ("mul24.hi.s32 %out, %a, %b", "i4", [("i4", [0x00FFFFFF]), ("i4", [1 << 16])], [-1]),
    ("mad24.lo.s32 %out, %a, %b, %c", "i4", [("i4", [0x00FFFFFF]), ("i4", [2]), ("i4", [7])], [5]),
    ("mad24.hi.sat.s32 %out, %a, %b, %c", "i4", [("i4", [1 << 20]), ("i4", [1 << 20]), ("i4", [INT_MAX])], [INT_MAX]),
    ("sad.s32 %out, %a, %b, %c", "i4", [("i4", [-3, 4]), ("i4", [4, -3]), ("i4", [10, 20])], [17, 27]),
    ("sad.u32 %out, %a, %b, %c", "u4", [("u4", [1]), ("u4", [ONES]), ("u4", [3])], [1]),
    ("div.s32 %out, %a, %b", "i4", [("i4", [-7, 7, 7]), ("i4", [2, -2, 0])], [-3, -3, -1]),
    ("div.u32 %out, %a, %b", "u4", [("u4", [ONES]), ("u4", [2])], [INT_MAX]),
    ("rem.s32 %out, %a, %b", "i4", [("i4", [-7, 7]), ("i4", [4, -4])], [-3, 3]),
    ("rem.u64 %out, %a, 10", "u8", [("u8", [(1 << 64) - 1])], [5]),
    ("abs.s32 %out, %a", "i4", [("i4", [-5, 5, INT_MIN])], [5, 5, INT_MIN]),
    ("neg.s16 %out, %a", "i2", [("i2", [5, -(1 << 15)])], [-5, -(1 << 15)]),
    ("min.s32 %out, %a, %b", "i4", [("i4", [-1, 4]), ("i4", [1, 3])], [-1, 3]),
    ("min.u32 %out, %a, %b", "u4", [("u4", [ONES]), ("u4", [1])], [1]),
    ("max.relu.s32 %out, %a, %b", "i4", [("i4", [-5, -5]), ("i4", [-3, 3])], [0, 3]),
    ("min.relu.s16x2 %out, %a, %b", "u4", [("u4", [0xFFFF0005]), ("u4", [0x00010003])], [0x00000003]),
    ("max.u16x2 %out, %a, %b", "u4", [("u4", [0xFFFF0001]), ("u4", [0x00010003])], [0xFFFF0003]),
    ("max.s16x2 %out, %a, %b", "u4", [("u4", [0xFFFF0001]), ("u4", [0x00010003])], [0x00010003]),
    ("popc.b32 %out, %a", "u4", [("u4", [0, ONES, 0x80000001])], [0, 32, 2]),
    ("popc.b64 %out, %a", "u4", [("u8", [(1 << 64) - 1])], [64]),
    ("clz.b32 %out, %a", "u4", [("u4", [0, 1, 1 << 31])], [32, 31, 0]),
    ("clz.b64 %out, %a", "u4", [("u8", [0, 1])], [64, 63]),
    ("bfind.u32 %out, %a", "u4", [("u4", [0, 0x80])], [ONES, 7]),
    ("bfind.s32 %out, %a", "u4", [("i4", [-1, -2, 5])], [ONES, 0, 2]),
    ("bfind.shiftamt.u64 %out, %a", "u4", [("u8", [1, 0])], [63, ONES]),
    ("fns.b32 %out, %a, 2, -1", "u4", [("u4", [0xAAAAAAAA])], [1]),
    ("brev.b32 %out, %a", "u4", [("u4", [1, 0x80000002])], [1 << 31, 0x40000001]),
    ("brev.b64 %out, %a", "u8", [("u8", [1])], [1 << 63]),
    ("bfe.u32 %out, %a, 4, 8", "u4", [("u4", [0x12345678])], [0x67]),
    ("bfe.s32 %out, %a, %b, %c", "i4", [("i4", [0x000000F0]), ("u4", [4]), ("u4", [4])], [-1]),
    ("bfe.u64 %out, %a, 32, 16", "u8", [("u8", [0x1234567800000000])], [0x5678]),
    ("bfi.b32 %out, %a, %b, 8, 4", "u4", [("u4", [0xFF]), ("u4", [0])], [0xF00]),
    ("bfi.b64 %out, %a, %b, 60, 8", "u8", [("u8", [0xAB]), ("u8", [1])], [0xB000000000000001]),
    ("szext.clamp.s32 %out, %a, 8", "i4", [("i4", [0x1FF, 0x7F])], [-1, 0x7F]),
    ("szext.wrap.u32 %out, %a, 36", "u4", [("u4", [0xFF])], [0xF]),
    ("bmsk.clamp.b32 %out, %a, %b", "u4", [("u4", [1, 31]), ("u4", [2, 9])], [6, 1 << 31]),
    ("dp4a.u32.s32 %out, %a, %b, %c", "i4", [("u4", [0x010200FF]), ("i4", [0x030405FF]), ("i4", [9])], [20 - 255]),
    ("dp2a.hi.s32.u32 %out, %a, %b, %c", "i4", [("i4", [0x2FFFF]), ("u4", [0x3FF0000]), ("i4", [1])], [1 + 6 - 255]),
    ("and.b32 %out, %a, 0xFF", "u4", [("u4", [0x1234])], [0x34]),
    ("or.b64 %out, %a, %b", "u8", [("u8", [1]), ("u8", [1 << 40])], [1 | 1 << 40]),
    ("xor.b16 %out, %a, %b", "u2", [("u2", [0xF0F0]), ("u2", [0xFFFF])], [0x0F0F]),
    ("not.b32 %out, %a", "u4", [("u4", [0])], [ONES]),
    ("cnot.b32 %out, %a", "u4", [("u4", [0, 7])], [1, 0]),
    ("lop3.b32 %out, %a, %b, %c, 0x40", "u4", [("u4", [0xF0]), ("u4", [0xCC]), ("u4", [0xAA])], [0x40]),
    ("lop3.b32 %out, %a, %b, %c, 0x1A", "u4", [("u4", [0xF0]), ("u4", [0xCC]), ("u4", [0xAA])], [0x1A]),
    ("shf.l.wrap.b32 %out, %a, %b, 36", "u4", [("u4", [0x80000000]), ("u4", [1])], [0x18]),
    ("shf.r.clamp.b32 %out, %a, %b, %c", "u4", [("u4", [16] * 2), ("u4", [3, 3]), ("u4", [4, 40])], [0x30000001, 3]),
    ("shl.b32 %out, %a, 4", "u4", [("u4", [0xF0000001])], [0x10]),
    ("shl.b32 %out, %a, 40", "u4", [("u4", [1])], [0]),
    ("shl.b64 %out, %a, %b", "u8", [("u8", [1, 1]), ("u4", [40, 64])], [1 << 40, 0]),
    ("shr.u32 %out, %a, %b", "u4", [("u4", [ONES, ONES]), ("u4", [4, 32])], [ONES >> 4, 0]),
    ("shr.s32 %out, %a, 35", "i4", [("i4", [-9, 9])], [-1, 0]),
    ("shr.s16 %out, %a, %b", "i2", [("i2", [-9, -9]), ("u4", [1, 1 << 20])], [-5, -1]),
    ("shr.b16 %out, %a, 1", "u2", [("u2", [0x8000])], [0x4000]),
    ("prmt.b32 %out, %a, %b, 0x5410", "u4", [("u4", [0x33221100]), ("u4", [0x77665544])], [0x55441100]),
    ("prmt.b32 %out, %a, %b, %c", "u4", [("u4", [0x33221180]), ("u4", [0x77665544]), ("u4", [0x8765])], [0xFF776655]),
    ("prmt.b32.rc16 %out, %a, %b, 1", "u4", [("u4", [0x33221100]), ("u4", [0])], [0x33223322]),
    ("prmt.b32.f4e %out, %a, %b, %c", "u4", [("u4", [0x33221100]), ("u4", [0x77665544]), ("u4", [2])], [0x55443322]),
]  # fmt: skip


NAMES = [f"{case[0].split(' ')[0]}-{n}" for n, case in enumerate(CASES)]


@pytest.mark.parametrize(("text", "out", "inputs", "expected"), CASES, ids=NAMES)
def test_instruction(text, out, inputs, expected):
    arrays = [np.array(values, kind) for kind, values in inputs]
    assert snippets.each(f"{text};", out, *arrays).tolist() == expected


def test_logic_on_predicates():
    x = np.array([0, 1, 2, 3], "u4")
    body = """
      and.b32 %r0, %a, 1;  setp.ne.u32 %p0, %r0, 0;
      and.b32 %r0, %a, 2;  setp.ne.u32 %p1, %r0, 0;
      {op}
    """
    for op, expected in {
        "and.pred %q, %p0, %p1;": [0, 0, 0, 1],
        "or.pred %q, %p0, %p1;": [0, 1, 1, 1],
        "xor.pred %q, %p0, %p1;": [0, 1, 1, 0],
        "not.pred %q, %p0;": [1, 0, 1, 0],
        "and.pred %q, %p0, !%p1;": [0, 1, 0, 0],
    }.items():
        assert snippets.each(body.format(op=op), "u1", x, pred=True).tolist() == expected, op


def test_lop3_with_a_predicate():
    a, b = np.array([1, 2, 4, 0], "u4"), np.array([1, 1, 4, 0], "u4")
    set_q = "setp.eq.u32 %p0, %a, 2;"
    for boolean, expected in (("or", [1, 1, 1, 0]), ("and", [0, 0, 0, 0])):
        text = f"{set_q} lop3.{boolean}.b32 %r0|%q, %a, %b, %b, 0xC0, %p0;"
        assert snippets.each(text, "u1", a, b, pred=True).tolist() == expected
        text = f"{set_q} lop3.{boolean}.b32 _|%q, %a, %b, %b, 0xC0, %p0;"
        assert snippets.each(text, "u1", a, b, pred=True).tolist() == expected
    text = f"{set_q} lop3.or.b32 %out|%p1, %a, %b, %b, 0xC0, %p0;"
    assert snippets.each(text, "u4", a, b).tolist() == [1, 0, 4, 0]


def test_long_arithmetic_through_the_carry_flag(fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    a, b = (rng.integers(0, 1 << 63, 64, dtype=np.uint64) * np.uint64(2) + np.uint64(1) for _ in range(2))
    split = "mov.b64 {%r0, %r1}, %a; mov.b64 {%r2, %r3}, %b;"
    join = "mov.b64 %out, {%r4, %r5};"
    total = f"{split} add.cc.u32 %r4, %r0, %r2; addc.u32 %r5, %r1, %r3; {join}"
    assert (snippets.each(total, "u8", a, b) == a + b).all()
    difference = f"{split} sub.cc.u32 %r4, %r0, %r2; subc.u32 %r5, %r1, %r3; {join}"
    assert (snippets.each(difference, "u8", a, b) == a - b).all()
    carry = f"{split} add.cc.u32 %r4, %r0, %r2; addc.cc.u32 %r5, %r1, %r3; addc.u32 %out, 0, 0;"
    assert snippets.each(carry, "u4", a, b).tolist() == [(int(x) + int(y)) >> 64 for x, y in zip(a, b, strict=True)]
    # The manual's 64 by 64 bit product, its upper half.
    product = f"""{split}
      mul.lo.u32 %r6, %r0, %r2;
      mul.hi.u32 %r7, %r0, %r2;
      mad.lo.cc.u32 %r7, %r1, %r2, %r7;
      madc.hi.u32 %r8, %r1, %r2, 0;
      mad.lo.cc.u32 %r7, %r0, %r3, %r7;
      madc.hi.cc.u32 %r8, %r0, %r3, %r8;
      addc.u32 %r9, 0, 0;
      mad.lo.cc.u32 %r8, %r1, %r3, %r8;
      madc.hi.u32 %r9, %r1, %r3, %r9;
      mov.b64 %out, {{%r8, %r9}};
    """
    expected = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
    assert snippets.each(product, "u8", a, b).tolist() == expected


def test_the_carry_flag_belongs_to_each_thread():
    a = np.array([ONES, 1] * 16, "u4")
    text = """
      setp.eq.u32 %p0, %a, 1;
      add.cc.u32 %r0, %a, 1;
      @%p0 add.cc.u32 %r0, %a, 0xFFFFFFFF;
      addc.u32 %out, 0, 0;
    """
    assert snippets.each(text, "u4", a).tolist() == [1, 1] * 16
    text = text.replace("%r0, %a, 0xFFFFFFFF", "%r0, %a, 0")
    assert snippets.each(text, "u4", a).tolist() == [1, 0] * 16


def test_a_carry_nobody_wrote_is_a_fault():
    with pytest.raises(Fault, match="carry flag"):
        snippets.each("addc.u32 %out, %a, 0;", "u4", np.zeros(32, "u4"))


def test_results_stay_out_of_inactive_threads():
    a = np.arange(64, dtype="u4")
    text = "mov.u32 %out, 77; setp.lt.u32 %p0, %a, 10; @%p0 mad.lo.u32 %out, %a, 3, 1; @!%p0 popc.b32 %out, %a;"
    expected = [3 * x + 1 if x < 10 else bin(x).count("1") for x in range(64)]
    assert snippets.each(text, "u4", a).tolist() == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("add.rn.u32 %out, %a, %a;", "unknown modifier .rn"),
        ("add.sat.u32 %out, %a, %a;", "type .u32"),
        ("sub.u16x2 %out, %a, %a;", "type .u16x2"),
        ("mul.u32 %out, %a, %a;", ".lo, .hi or .wide"),
        ("mul.wide.u64 %rd0, %rd1, %rd2;", "type .u64"),
        ("mul.wide.u32 %out, %a, %a;", "not as wide"),
        ("mad.lo.sat.s32 %out, %a, %a, %a;", "mad.hi.s32 only"),
        ("add.u32 %rd0, %a, %a;", "not as wide"),
        ("add.u32 %out, %h1, %a;", "too narrow"),
        ("add.u32 %out, %a;", "3 operands"),
        ("add.u32 %out, %a, %a, %a;", "3 operands"),
        ("add.u32 %p0, %a, %a;", "can't hold"),
        ("min.NaN.s32 %out, %a, %a;", "unknown modifier .NaN"),
        ("max.relu.u32 %out, %a, %a;", "type .u32"),
        ("shl.u32 %out, %a, 1;", "type .u32"),
        ("shf.l.b32 %out, %a, %a, %a;", ".clamp or .wrap"),
        ("shr.wrap.u32 %out, %a, 1;", "unknown modifier .wrap"),
        ("lop3.b32 %out, %a, %a, %a, 256;", "immLut is 256"),
        ("lop3.b32 %out, %a, %a, %a, %a;", "integer constant"),
        ("prmt.b32.xyz %out, %a, %a, 1;", "unknown modifier .xyz"),
        ("bfe.b32 %out, %a, 1, 2;", "type .b32"),
        ("dp4a.u32 %out, %a, %a, %a;", "no type"),
        ("popc.u32 %out, %a;", "type .u32"),
    ],
)
def test_forms_that_do_not_exist_stop_with_name_and_line(text, words):
    with pytest.raises(UnsupportedInstruction) as stopped:
        snippets.each(f"\n\n{text}", "u4", np.zeros(1, "u4"))
    message = str(stopped.value)
    assert words in message
    assert message.startswith("PTX line ")
    assert f" {text.split()[0]}: " in message
