"""Bad input: the exception type torch raises, one sentence naming the argument, what was got and what is expected."""

import contextlib
import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import attnkern
from attnkern import ops, testing
from attnkern.params import UNBOUNDED
from attnkern.signatures import Derivatives, Inputs

contract = pytest.mark.contract
x = torch.randn(2, 3, 5, 8)
kv = torch.randn(2, 3, 7, 8)


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


Q, K = (2, 4, 5, 8), (2, 4, 7, 8)

# name: (shapes of query, key, value and mask; words of the message). A name with "gqa" calls with enable_gqa=True.
BAD = {
    "query of one dimension": ([(8,), (5, 8), (5, 8)], ["query", "2 dim", "(8,)"]),
    "key of one dimension": ([(5, 8), (8,), (5, 8)], ["key", "2 dim", "(8,)"]),
    "value of no dimension": ([(5, 8), (5, 8), ()], ["value", "2 dim", "()"]),
    "batch that does not broadcast": ([Q, (3, 4, 7, 8), (3, 4, 7, 8)], ["key", "batch", "2", "3"]),
    "value's batch": ([Q, K, (3, 4, 7, 8)], ["value", "batch", "2", "3"]),
    "heads that could be shared": (
        [Q, (2, 2, 7, 8), (2, 2, 7, 8)],
        ["key's number of heads must be 1 or query's 4, got 2 (enable_gqa=True has 4 share 2)"],
    ),
    "heads that do not broadcast": (
        [Q, (2, 3, 7, 8), (2, 3, 7, 8)],
        ["key's number of heads must be 1 or query's 4, got 3"],
    ),
    "value's heads": ([Q, K, (2, 3, 7, 8)], ["value", "head", "4", "3"]),
    "head size of key": ([Q, (2, 4, 7, 9), K], ["key's last size must be query's, 8, got 9"]),
    "length of value, longer": ([Q, K, (2, 4, 9, 8)], ["key", "value", "length", "7", "9"]),
    "length of value, shorter": ([Q, K, (2, 4, 6, 8)], ["key", "value", "length", "7", "6"]),
    "gqa, not divisible": ([Q, (2, 3, 7, 8), (2, 3, 7, 8)], ["key", "divide", "4", "3"]),
    "gqa, more key heads": ([(2, 2, 5, 8), K, K], ["key", "divide", "2", "4"]),
    "gqa, one query head": ([(2, 1, 5, 8), K, K], ["key", "divide", "1", "4"]),
    "gqa, value heads": ([Q, K, (2, 3, 7, 8)], ["value", "divide", "4", "3"]),
    "gqa without heads": ([(5, 8), (7, 8), (7, 8)], ["head", "enable_gqa", "(5, 8)"]),
    "gqa, mask of key heads": ([Q, (2, 2, 7, 8), (2, 2, 7, 8), (2, 2, 5, 7)], ["attn_mask", "(2, 2, 5, 7)"]),
    "mask of the batch's keys": (
        [Q, K, K, (2, 7)],
        ["(2, 4, 5, 7), got (2, 7) (attn_mask[:, None, None] is for all"],
    ),
    "mask of the batch": (
        [Q, K, K, (2, 5, 7)],
        ["(2, 4, 5, 7), got (2, 5, 7) (attn_mask[:, None] is for"],
    ),
    "mask of another length": ([Q, K, K, (5, 6)], ["attn_mask", "(2, 4, 5, 7)", "(5, 6)"]),
    "mask that enlarges": ([(1, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8), (2, 1, 5, 7)], ["attn_mask", "(2, 1, 5, 7)"]),
    "mask of value's batch": ([(1, 4, 5, 8), (1, 4, 7, 8), K, (2, 1, 5, 7)], ["attn_mask", "(2, 1, 5, 7)"]),
    "mask of higher rank": ([Q[1:], K[1:], K[1:], (2, 4, 5, 7)], ["attn_mask", "(2, 4, 5, 7)"]),
    "mask of higher rank, 4-D": ([Q, K, K, (1, 1, 4, 5, 7)], ["attn_mask", "(1, 1, 4, 5, 7)"]),
    "mask of higher rank, 2-D": ([Q[2:], K[2:], K[2:], (1, 5, 7)], ["attn_mask", "(1, 5, 7)"]),
}


@pytest.mark.parametrize("name", BAD)
@contract(5, 8, 9, 16, 27, 29, 30)
def test_shapes(name):
    shapes, words = BAD[name]
    arguments, keywords = [t(*shape) for shape in shapes], {"enable_gqa": "gqa" in name}
    with testing.unmodified(*arguments), pytest.raises(RuntimeError) as caught:
        attnkern.scaled_dot_product_attention(*arguments, **keywords)
    text = str(caught.value)
    assert type(caught.value) is RuntimeError
    assert all(word in text for word in words), text
    # One sentence, in our name.
    assert text.startswith("attnkern: ")
    assert "\n" not in text
    assert len(text) < 200
    # torch raises as well, except where it reads out of bounds (item 9) or expands what should not be.
    if not name.startswith("length"):
        with pytest.raises((RuntimeError, IndexError)):
            F.scaled_dot_product_attention(*arguments, **keywords)


@contract(16)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_four_dimensions_for_tensors_of_three(target, kind):
    """As torch takes it from 2.15 on; before, it refused."""
    q, k, v = (x[0] for x in target.inputs(1, 4, 5, 7, 8).tensors.values())
    mask = testing.make_mask(kind, "LS", {"L": 5, "S": 7}, device=target.device).expand(1, 4, 5, 7)
    out = target.sdpa(q, k, v, mask)
    assert torch.equal(out, target.sdpa(q, k, v, mask[0]))
    torchs = None
    with contextlib.suppress(RuntimeError):
        torchs = F.scaled_dot_product_attention(q, k, v, mask)
    if torchs is not None:
        assert torchs.shape == out.shape
        dead = ~mask[0].any(-1) if kind == "bool" else torch.zeros(4, 5, dtype=torch.bool, device=q.device)
        torch.testing.assert_close(out[~dead], torchs[~dead])


@contract(37)
@pytest.mark.parametrize("position", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("empty", [False, True])
def test_mixed_dtypes(position, empty):
    tensors = [t(2, 3, 0 if empty else 5, 8) for _ in range(3)]
    tensors[position] = tensors[position].double()
    with pytest.raises(RuntimeError, match=f"(?s){['query', 'key', 'value'][position]}.*dtype.*float32.*float64"):
        attnkern.scaled_dot_product_attention(*tensors)


@contract(37)
@pytest.mark.parametrize("position", range(4), ids=["query", "key", "value", "attn_mask"])
def test_mixed_devices(position):
    tensors = [t(2, 3, 5, 8), t(2, 3, 5, 8), t(2, 3, 5, 8), t(5, 5)]
    tensors[position] = tensors[position].to("meta")
    with pytest.raises(RuntimeError, match=r"(?s)device.*(cpu.*meta|meta.*cpu)"):
        attnkern.scaled_dot_product_attention(*tensors)


@contract(18)
@pytest.mark.parametrize(
    ("query_dtype", "mask_dtype"),
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.bfloat16),
        *((torch.float32, d) for d in (torch.int64, torch.uint8, torch.int8, torch.complex64)),
    ],
    ids=str,
)
def test_mask_dtypes(query_dtype, mask_dtype):
    q = t(2, 3, 5, 8, dtype=query_dtype)
    mask = t(5, 5, dtype=mask_dtype)
    names = [str(d).removeprefix("torch.") for d in (query_dtype, mask_dtype)]
    with pytest.raises(RuntimeError, match=rf"attn_mask must be bool.* query's dtype {names[0]}, got {names[1]}"):
        attnkern.scaled_dot_product_attention(q, q, q, mask)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, q, q, mask)


@contract(38)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers_and_bools(dtype):
    q = t(2, 3, 5, 8, dtype=dtype)
    with pytest.raises(RuntimeError, match=f"query.*float32.*{str(dtype)[6:]}"):
        attnkern.scaled_dot_product_attention(q, q, q)


@contract(38)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dtypes_that_nobody_implements(dtype):
    q = t(2, 3, 5, 8, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"query.*float32.*{str(dtype)[6:]}"):
        attnkern.scaled_dot_product_attention(q, q, q)


@contract(38)
@pytest.mark.parametrize("position", range(4), ids=["query", "key", "value", "attn_mask"])
def test_sparse_tensors(position):
    tensors = [torch.ones(5, 8), torch.ones(5, 8), torch.ones(5, 8), torch.ones(5, 5)]
    tensors[position] = tensors[position].to_sparse()
    with pytest.raises(
        RuntimeError, match="(?i)" + ("query", "key", "value", "attn_mask")[position] + ".*(sparse|dense)"
    ):
        attnkern.scaled_dot_product_attention(*tensors)


@contract(21)
@pytest.mark.parametrize("mask", [t(5, 7), t(5, 7, dtype=torch.bool)], ids=["float", "bool"])
def test_mask_together_with_is_causal(mask):
    with pytest.raises(RuntimeError, match=r"attn_mask.*is_causal"):
        attnkern.scaled_dot_product_attention(x, kv, kv, mask, is_causal=True)


@contract(33)
@pytest.mark.parametrize("dropout_p", [-0.1, 1.1, 2, -1, float("nan"), float("inf"), float("-inf")])
def test_dropout_outside_its_range(dropout_p):
    with pytest.raises(RuntimeError, match=r"dropout.*between 0 and 1.*" + str(dropout_p).replace(".", r"\.")):
        attnkern.scaled_dot_product_attention(x, kv, kv, dropout_p=dropout_p)


@contract(31)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), float("-inf")])
def test_scale_that_is_not_finite(scale):
    with pytest.raises((RuntimeError, ValueError), match=f"scale.*finite.*{scale}"):
        attnkern.scaled_dot_product_attention(x, kv, kv, scale=scale)


@pytest.mark.parametrize(
    ("keywords", "exception", "message"),
    [
        ({"window": (-1, 0)}, ValueError, r"window.*-1"),
        ({"window": (0, -3)}, ValueError, r"window.*-3"),
        ({"window": 5}, TypeError, r"window.*5"),
        ({"window": (1,)}, TypeError, r"window.*\(1,\)"),
        ({"window": (1, 2, 3)}, TypeError, r"window.*\(1, 2, 3\)"),
        ({"window": (1.5, 0)}, TypeError, r"window.*float"),
        ({"window": (True, 0)}, TypeError, r"window.*bool"),
        ({"window": ("a", 0)}, TypeError, r"window.*str"),
        ({"alignment": "left"}, ValueError, r"alignment.*top_left.*bottom_right.*left"),
        ({"alignment": None}, ValueError, r"alignment.*None"),
        ({"softcap": -1.0}, ValueError, r"softcap.*-1"),
        ({"softcap": float("nan")}, ValueError, r"softcap.*nan"),
        ({"softcap": float("inf")}, ValueError, r"softcap.*inf"),
        ({"softcap": 1e-46}, ValueError, r"softcap must be from 1\.175e-38 to 3\.403e\+38, float32's range.*got 1e-46"),
        ({"softcap": 1e39}, ValueError, r"softcap must be from.*float32's range.*got 1e\+39"),
        ({"softcap": "a"}, TypeError, r"softcap.*str"),
        ({"backend": "gpu"}, ValueError, r"backend.*cpu.*reference.*gpu"),
        ({"backend": 3}, ValueError, r"backend.*3"),
    ],
    ids=str,
)
def test_options_of_attention(keywords, exception, message):
    with pytest.raises(exception, match=message):
        attnkern.attention(x, kv, kv, **keywords)
    with pytest.raises(exception, match=message):
        attnkern.explain(x, kv, kv, **keywords)


def test_a_refused_call_draws_no_random_numbers():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        attnkern.scaled_dot_product_attention(x, kv, kv.double(), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("softcap", [torch.finfo(torch.float32).tiny, 1e-30, 1e30, torch.finfo(torch.float32).max])
def test_softcaps_within_the_range_are_what_they_say(target, softcap, dtype):
    target.check(target.inputs(1, 2, 20, 40, 8, dtype=dtype), softcap=softcap)


def test_the_range_of_a_softcap_is_that_of_the_dtype_it_is_computed_in(target):
    target.check(target.inputs(1, 2, 20, 40, 8, dtype=torch.float64), softcap=1e39)
    with pytest.raises(ValueError, match=r"softcap.*2\.225e-308 to 1\.798e\+308, float64's range"):
        target.attention(*[target.randn(1, 2, 5, 8, dtype=torch.float64)] * 3, softcap=1e-310)
    with pytest.raises(ValueError, match=r"softcap.*float32's range"):
        target.attention(*[target.randn(1, 2, 5, 8, dtype=torch.bfloat16)] * 3, softcap=1e39)


# The operators without attnkern.attention around them: they are in reach of everybody, and of torch.compile's graphs.

SCORE = {
    "softmax_scale": 0.5,
    "softcap": 0.0,
    "window_left": UNBOUNDED,
    "window_right": UNBOUNDED,
    "band_offset": 0,
    "dropout_p": 0.0,
}


def arguments_of(operator):
    """Those of a small call, by name and in the schema's order: queries (2, 4, 5, 8), keys (2, 2, 7, 8), a bias."""
    given = {
        **dict(zip("qkv", (t(2, 4, 5, 8), t(2, 2, 7, 8), t(2, 2, 7, 6)), strict=True)),
        "bias": t(1, 4, 5, 7),
        "sinks": t(2, 4),
        "key_ranges": torch.tensor([[0, 7]], dtype=torch.int32).expand(2, 1, 5, 1, 2),
        "philox_seed": None,
        "block_table": None,
        **SCORE,
        "out": t(2, 4, 5, 6),
        "grad_out": t(2, 4, 5, 6),
        "lse": t(2, 4, 5),
        "grad_lse": t(2, 4, 5),
        "need_lse": True,
        "grad_mask": 31,
        "backend": "cpu",
    }
    for name in Derivatives._fields:
        given |= {f"t{name}": torch.zeros_like(given[name]), f"cot_d{name}": torch.zeros_like(given[name])}
    names = [a.name for a in getattr(torch.ops.attnkern, operator).default._schema.arguments]
    return {name: given[name] for name in names}


OPERATORS = ("forward", "backward", "tangent", "second_backward")
SEED = torch.zeros(1, dtype=torch.int64)
META = "must be on q's device"
RANGES = "key_ranges must be int32"
# what is wrong: (operators that have it, arguments instead of those of `arguments_of`, the message)
RAW = {
    **{
        f"{name} on another device": (OPERATORS, {name: t(*shape, device="meta")}, f"{name} {META}")
        for name, shape in (("k", (2, 2, 7, 8)), ("v", (2, 2, 7, 6)), ("bias", (1, 4, 5, 7)))
    },
    **{
        f"key_ranges {what}": (OPERATORS, {"key_ranges": ranges}, message)
        for what, ranges, message in (
            ("on another device", torch.zeros(1, 1, 5, 1, 2, dtype=torch.int32, device="meta"), META),
            ("of int64", torch.zeros(1, 1, 5, 1, 2, dtype=torch.int64), RANGES),
            ("of no dimension", torch.zeros((), dtype=torch.int32), RANGES),
            ("of one dimension", torch.zeros(2, dtype=torch.int32), RANGES),
            ("of four dimensions", torch.zeros(1, 5, 1, 2, dtype=torch.int32), RANGES),
            ("of three ranges", torch.zeros(1, 1, 5, 3, 2, dtype=torch.int32), RANGES),
            ("of three ends", torch.zeros(1, 1, 5, 1, 3, dtype=torch.int32), RANGES),
            ("for other rows", torch.zeros(1, 1, 4, 1, 2, dtype=torch.int32), RANGES),
            ("for other heads", torch.zeros(1, 2, 5, 1, 2, dtype=torch.int32), RANGES),
            ("with ends apart", torch.zeros(1, 1, 5, 1, 4, dtype=torch.int32)[..., ::2], RANGES),
        )
    },
    "q on another device": (OPERATORS, {"q": t(2, 4, 5, 8, device="meta")}, META),
    "seed on another device": (OPERATORS, {"philox_seed": SEED.to("meta"), "dropout_p": 0.5}, f"philox_seed {META}"),
    **{
        f"{name} on another device": (of, {name: t(*shape, device="meta")}, f"{name} {META}")
        for of, name, shape in (
            (OPERATORS[1:], "lse", (2, 4, 5)),
            (OPERATORS[1::2], "grad_lse", (2, 4, 5)),
            (OPERATORS[1:], "out", (2, 4, 5, 6)),
            (OPERATORS[1::2], "grad_out", (2, 4, 5, 6)),
            (OPERATORS[2:3], "tk", (2, 2, 7, 8)),
            (OPERATORS[3:], "cot_dq", (2, 4, 5, 8)),
        )
    },
    **{
        f"dropout_p {p}": (OPERATORS, {"dropout_p": p, "philox_seed": SEED}, "dropout_p must be between 0 and 1, got")
        for p in (float("nan"), -0.25, 2.0, 1e300)
    },
    "dropout without a seed": (OPERATORS, {"dropout_p": 0.5}, "dropout needs philox_seed"),
    "dropout with a seed of no entry": (OPERATORS, {"dropout_p": 0.5, "philox_seed": SEED[:0]}, "philox_seed.*divides"),
    "three seeds for two": (
        OPERATORS,
        {"dropout_p": 0.5, "philox_seed": SEED.expand(3).clone()},
        "philox_seed.*divides",
    ),
    **{
        f"softcap {c}": (OPERATORS, {"softcap": c}, "softcap must be")
        for c in (1e-46, 1e39, -1.0, float("nan"), float("inf"))
    },
    **{
        f"scale {s}": (OPERATORS, {"softmax_scale": s}, "scale must be a finite number")
        for s in (float("nan"), float("inf"))
    },
    "k of 3 dimensions": (OPERATORS, {"k": t(2, 7, 8)}, "q, k and v must have 4 dimensions"),
    "k of another head size": (OPERATORS, {"k": t(2, 2, 7, 9)}, "the sizes of q, k and v do not fit"),
    "v of another length": (OPERATORS, {"v": t(2, 2, 6, 6)}, "the sizes of q, k and v do not fit"),
    "heads that do not divide": (OPERATORS, {"k": t(2, 3, 7, 8)}, "the heads of k and v must divide those of q"),
    "v of another dtype": (
        OPERATORS,
        {"v": t(2, 2, 7, 6, dtype=torch.float64)},
        "q, k and v must have one floating dtype",
    ),
    "bias of another length": (OPERATORS, {"bias": t(1, 4, 5, 6)}, "the sizes of bias do not fit"),
    "bias of another dtype": (OPERATORS, {"bias": t(1, 4, 5, 7, dtype=torch.int64)}, "bias must be bool, float32 or"),
    "bits of another length": (
        OPERATORS,
        {"bias": t(1, 4, 5, 7, dtype=torch.uint8)},
        "a bias of bits must have 8 bytes for each 64 keys",
    ),
    "bits of other rows": (OPERATORS, {"bias": t(1, 4, 6, 8, dtype=torch.uint8)}, "the sizes of bias do not fit"),
    "unknown backend": (OPERATORS, {"backend": "gpu"}, "backend.*'cpu'.*got '?gpu"),
    "lse without heads": (OPERATORS[1:], {"lse": t(2, 5)}, "lse.*shape .batch, heads, seqlen_q. and be float32"),
    "lse of another length": (OPERATORS[1:], {"lse": t(2, 4, 7)}, "lse.*shape .batch, heads, seqlen_q. and be float32"),
    "lse of another dtype": (OPERATORS[1:], {"lse": t(2, 4, 5).double()}, "lse.*and be float32"),
    "grad_lse of another length": (OPERATORS[1::2], {"grad_lse": t(2, 4, 7)}, "grad_lse.*seqlen_q"),
    "out of another size": (OPERATORS[1:], {"out": t(2, 4, 5, 8)}, "out must have the shape and dtype of the output"),
    "grad_out of another dtype": (
        OPERATORS[1::2],
        {"grad_out": t(2, 4, 5, 6).double()},
        "grad_out.*dtype of the output",
    ),
    "gradient of no bias": (OPERATORS[1::2], {"bias": None, "cot_dbias": None}, "only a floating bias has a gradient"),
    "gradient of bits": (
        OPERATORS[1::2],
        {"bias": t(1, 4, 5, 8, dtype=torch.uint8), "cot_dbias": None},
        "only a floating bias has a gradient",
    ),
    "gradient of a bool": (
        OPERATORS[1::2],
        {"bias": t(1, 4, 5, 7, dtype=torch.bool), "cot_dbias": None},
        "only a floating bias has a gradient",
    ),
    "tk of another length": (OPERATORS[2:3], {"tk": t(2, 2, 6, 8)}, "tk must have the shape"),
    "tq of another dtype": (OPERATORS[2:3], {"tq": t(2, 4, 5, 8).double()}, "tq must have the shape and dtype"),
    "tbias without a bias": (OPERATORS[2:3], {"bias": None}, "tbias must be None"),
    "cot_dv of another size": (OPERATORS[3:], {"cot_dv": t(2, 2, 7, 8)}, "cot_dv must have the shape"),
    "cot_dbias without a bias": (OPERATORS[3:], {"bias": None, "grad_mask": 7}, "cot_dbias must be None"),
    "sinks of another dtype": (OPERATORS, {"sinks": t(2, 4).double()}, "sinks must be"),
    "sinks of another size": (OPERATORS, {"sinks": t(2, 3)}, "sinks must be"),
    "sinks without a head": (OPERATORS, {"sinks": t(2, 4, 1)}, "sinks must be"),
    "gradient of no sinks": (OPERATORS[1::2], {"sinks": None, "cot_dsinks": None}, "sinks .* have no gradient"),
    "pages of another dtype": (OPERATORS[:1], {"block_table": t(2, 1).long()}, "block_table must be int32"),
    "pages of another batch": (OPERATORS[:1], {"block_table": t(1, 1).int()}, "block_table must be int32"),
    "small pages": (OPERATORS[:1], {"block_table": t(2, 1).int()}, "rows of a page must be a power of two from 16"),
    "pages beside a gradient": (OPERATORS[1:2], {"block_table": t(2, 1).int()}, "rows of a page must be a power"),
    "tsinks without sinks": (OPERATORS[2:3], {"sinks": None}, "tsinks must be None"),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_operators_take_the_call_that_the_bad_ones_start_from(operator):
    results = getattr(torch.ops.attnkern, operator)(*arguments_of(operator).values())
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize(("operator", "what"), [(o, what) for what in RAW for o in OPERATORS if o in RAW[what][0]])
def test_operators_say_what_they_cannot_take(operator, what):
    """By the dispatcher, and on the way that CUDA tensors take: the rules are in C++ and in Python."""
    _, changes, message = RAW[what]
    arguments = arguments_of(operator)
    arguments |= {name: x for name, x in changes.items() if name in arguments}
    for function in (getattr(torch.ops.attnkern, operator), getattr(ops, f"route_{operator}")):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            function(*arguments.values())
        text = str(caught.value).splitlines()[0]
        text = text[text.index("attnkern: ") :]  # C++ says where, first
        assert re.search(message, text), text


BOUNDS = (0, 3, -3, 2**60, UNBOUNDED - 1, UNBOUNDED, 2**63 - 1, -(2**61), -(2**63))
OFFSETS = (0, 2, -2, 2**60, -(2**60), 2**62, -(2**62), 2**63 - 1, -(2**63))


@pytest.mark.parametrize("operator", ["forward", "tangent"])
def test_bands_of_any_numbers(operator):
    """As whole numbers without limits have it: i + offset - left must not wrap around."""
    seqlen_q, seqlen_k = 6, 9
    q, k, v = t(1, 1, seqlen_q, 4), t(1, 1, seqlen_k, 4), torch.eye(seqlen_k).view(1, 1, seqlen_k, seqlen_k)
    out, lse = torch.zeros(1, 1, seqlen_q, seqlen_k), t(1, 1, seqlen_q)
    for left, right, offset in itertools.product(BOUNDS, BOUNDS, OFFSETS):

        def within(i, j, left=left, right=right, offset=offset):
            distance = j - i - offset
            return (left >= UNBOUNDED or -left <= distance) and (right >= UNBOUNDED or distance <= right)

        keep = torch.tensor([[within(i, j) for j in range(seqlen_k)] for i in range(seqlen_q)])
        params = 0.5, 0.0, left, right, offset, 0.0
        if operator == "forward":
            weights, _ = torch.ops.attnkern.forward(*Inputs(q, k, v), *params, True, "cpu")
        else:  # along V = 1 the output moves by the weights
            zeros = torch.zeros_like(v)
            moves = Derivatives(v=v)
            weights, _ = torch.ops.attnkern.tangent(*Inputs(q, k, zeros), *moves, out, lse, *params, "cpu")
        assert torch.equal(weights[0, 0] != 0, keep), (left, right, offset)


OUT_OF_MEMORY = """
import resource, torch, attnkern
from attnkern.signatures import Inputs

torch.set_num_threads({threads})
one = torch.zeros((), dtype=torch.{dtype})
attnkern.attention(*[torch.zeros(1, 4, 300, 8)] * 3)  # with its threads
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)
small, wide, rows = one.expand(1, 4, 64, 1), one.expand(1, 4, 64, 2**27), one.expand(1, 4, 2, 2**27)
row = torch.zeros(1, 4, 64, 1, dtype=one.dtype), torch.zeros(1, 4, 64)
params = 0.5, 0.0, 2**62, 2**62, 0, 0.0
calls = {{
    "result": lambda: attnkern.attention(one.expand(1, 1, 2**36, 1), one.expand(1, 1, 2, 1), one.expand(1, 1, 2, 1)),
    "torch's": lambda: torch.empty(2**40),
    "forward": lambda: attnkern.attention(wide, wide, small),
    "decode": lambda: attnkern.attention(rows, wide, small),
    "backward": lambda: torch.ops.attnkern.backward(
        row[0], None, *Inputs(wide, wide, small), *row, *params, 4, "cpu"),
}}
for name, call in calls.items():
    try:
        call()
        print(name, "no error")
    except Exception as error:
        print(name, type(error).__name__, " ".join(str(error).split()))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_memory(threads, dtype):
    """As torch says it: a RuntimeError with the bytes, and what they are for."""
    code = OUT_OF_MEMORY.format(threads=threads, dtype=dtype)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert re.match(r"RuntimeError .*can't allocate memory: you tried to allocate \d+ bytes", told["torch's"])
    size = {"float32": 4, "bfloat16": 2}[dtype]
    assert told.pop("result") == (
        f"RuntimeError attnkern: can't allocate memory: you tried to allocate {2**36 * size} bytes "
        "for a result of shape (1, 1, 68719476736, 1)"
    )
    del told["torch's"]
    assert told.keys() == {"forward", "decode", "backward"}
    for text in told.values():
        expected = (
            r"RuntimeError attnkern: can't allocate memory: you tried to allocate \d{10,} bytes of scratch memory"
        )
        assert re.fullmatch(expected, text), text
