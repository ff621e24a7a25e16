"""Bad input: the exception type torch raises, one sentence naming the argument, what was got and what is expected."""

import contextlib
import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import attnkern
from attnkern import ops, testing
from attnkern.arguments import show
from attnkern.params import UNBOUNDED
from attnkern.signatures import Derivatives, Inputs
from bad_calls import bad, check_refused, refused, says

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


def with_these(error=RuntimeError, message="", **arguments):
    """A row: F.sdpa's replacement with some other arguments than those of a good call."""
    arguments = {"query": x, "key": kv, "value": kv, **arguments}
    return bad(message, lambda: attnkern.scaled_dot_product_attention(**arguments), error)


def of_one_kind(kind, error):
    """A row: query, key and value are all of this dtype."""
    message = f"query must be float32, float64, bfloat16 or float16, got {show(kind)}"
    return with_these(error, message, **dict.fromkeys(("query", "key", "value"), t(2, 3, 5, 8, dtype=kind)))


NAN, INF = float("nan"), float("inf")
TENSORS = {"query": x, "key": kv, "value": kv, "attn_mask": t(5, 7)}
NO_TENSORS = None, [[1.0]], 1.0, np.ones((2, 2))
NO_BOOLS = 1, None, "no", np.bool_(True), torch.tensor(True)
NO_NUMBERS = "0.5", 0.5j, torch.tensor([0.5]), torch.tensor(0.5, requires_grad=True), [0.5]
UNUSUAL = torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2
ARGUMENTS = [
    with_these(message="key must have query's dtype float32, got float64", key=kv.double()),
    with_these(message="value must have query's dtype float32, got float64", value=kv.double()),
    with_these(
        message="key must have query's dtype float32, got float64", query=x[:, :, :0], key=kv[:, :, :0].double()
    ),
    with_these(message="value must have query's dtype float32, got float64", query=x[:, :, :0], value=kv.double()),
    with_these(message="key must be on query's device meta, got cpu", query=x.to("meta")),
    *(
        with_these(message=f"{name} must be on query's device cpu, got meta", **{name: TENSORS[name].to("meta")})
        for name in ("key", "value", "attn_mask")
    ),
    *(
        with_these(message=f"{name} must be a dense (strided) tensor, got layout", **{name: y.to_sparse()})
        for name, y in TENSORS.items()
    ),
    *(of_one_kind(kind, RuntimeError) for kind in (torch.int64, torch.int32, torch.uint8, torch.bool)),
    *(of_one_kind(kind, NotImplementedError) for kind in UNUSUAL),
    with_these(message="attn_mask must be None when is_causal=True", attn_mask=t(5, 7), is_causal=True),
    with_these(message="attn_mask must be None when is_causal=True", attn_mask=t(5, 7).bool(), is_causal=True),
    *(
        with_these(message=f"dropout_p must be between 0 and 1, got {p}", dropout_p=p)
        for p in (-0.1, 1.1, 2, -1, NAN, INF, -INF)
    ),
    *(with_these(ValueError, f"scale must be a finite number, got {scale}", scale=scale) for scale in (NAN, INF, -INF)),
    *(
        with_these(TypeError, f"{name}...Tensor...{type(wrong).__name__}", **{name: wrong})
        for name, wrong in itertools.product(("query", "key", "value"), NO_TENSORS)
    ),
    *(
        with_these(TypeError, f"attn_mask...Tensor...{type(wrong).__name__}", attn_mask=wrong)
        for wrong in ([[True]], True, 1.0)
    ),
    *(
        with_these(TypeError, f"{name}...bool...{type(wrong).__name__}", **{name: wrong})
        for name, wrong in itertools.product(("is_causal", "enable_gqa"), NO_BOOLS)
    ),
    *(
        with_these(TypeError, f"'{name}' must be float, not ", **{name: wrong})
        for name, wrong in itertools.product(("scale", "dropout_p"), NO_NUMBERS)
    ),
    with_these(TypeError, "'dropout_p' must be float, not NoneType", dropout_p=None),
]


@contract(2, 3, 21, 31, 33, 37, 38)
@refused(ARGUMENTS)
def test_arguments(call, error, message):
    check_refused(call, error, message)


def option(message, error, **options):
    """Rows: `attention` and `explain` say the same of an option."""
    functions = attnkern.attention, attnkern.explain
    return [bad(message, lambda f=function: f(x, kv, kv, **options), error) for function in functions]


OPTIONS = [
    option("window...-1", ValueError, window=(-1, 0)),
    option("window...-3", ValueError, window=(0, -3)),
    option("return_lse...bool...int", TypeError, return_lse=1),
    option("return_lse...bool...NoneType", TypeError, return_lse=None),
    option("window...5", TypeError, window=5),
    option("window...(1,)", TypeError, window=(1,)),
    option("window...(1, 2, 3)", TypeError, window=(1, 2, 3)),
    option("window...float", TypeError, window=(1.5, 0)),
    option("window...bool", TypeError, window=(True, 0)),
    option("window...str", TypeError, window=("a", 0)),
    option("alignment...top_left...bottom_right...left", ValueError, alignment="left"),
    option("alignment...None", ValueError, alignment=None),
    option("softcap...-1", ValueError, softcap=-1.0),
    option("softcap...nan", ValueError, softcap=NAN),
    option("softcap...inf", ValueError, softcap=INF),
    option("softcap must be from 1.175e-38 to 3.403e+38, float32's range...got 1e-46", ValueError, softcap=1e-46),
    option("softcap must be from...float32's range...got 1e+39", ValueError, softcap=1e39),
    option("softcap...str", TypeError, softcap="a"),
    option("backend...cpu...reference...gpu", ValueError, backend="gpu"),
    option("backend...3", ValueError, backend=3),
]


@refused(itertools.chain(*OPTIONS))
def test_options_of_attention(call, error, message):
    check_refused(call, error, message)


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
WITH_LSE, WITH_GRADIENTS, TANGENT, SECOND = OPERATORS[1:], OPERATORS[1::2], OPERATORS[2:3], OPERATORS[3:]


def raw(message, operators=OPERATORS, **changes):
    """Rows: these operators, with other arguments than those of `arguments_of`."""
    return [pytest.param(operator, changes, message, id=f"{operator}: {message}") for operator in operators]


def elsewhere(name, *shape, of=OPERATORS):
    return raw(f"{name} must be on q's device", of, **{name: t(*shape, device="meta")})


def ranges(*shape, dtype=torch.int32):
    return raw("key_ranges must be int32", key_ranges=torch.zeros(shape, dtype=dtype))


RAW = [
    raw("must be on q's device", q=t(2, 4, 5, 8, device="meta")),
    elsewhere("k", 2, 2, 7, 8),
    elsewhere("v", 2, 2, 7, 6),
    elsewhere("bias", 1, 4, 5, 7),
    elsewhere("lse", 2, 4, 5, of=WITH_LSE),
    elsewhere("out", 2, 4, 5, 6, of=WITH_LSE),
    elsewhere("grad_lse", 2, 4, 5, of=WITH_GRADIENTS),
    elsewhere("grad_out", 2, 4, 5, 6, of=WITH_GRADIENTS),
    elsewhere("tk", 2, 2, 7, 8, of=TANGENT),
    elsewhere("cot_dq", 2, 4, 5, 8, of=SECOND),
    raw("must be on q's device", key_ranges=torch.zeros(1, 1, 5, 1, 2, dtype=torch.int32, device="meta")),
    raw("philox_seed must be on q's device", philox_seed=SEED.to("meta"), dropout_p=0.5),
    ranges(1, 1, 5, 1, 2, dtype=torch.int64),
    ranges(),
    ranges(2),
    ranges(1, 5, 1, 2),
    ranges(1, 1, 5, 3, 2),
    ranges(1, 1, 5, 1, 3),
    ranges(1, 1, 4, 1, 2),  # for other rows
    ranges(1, 2, 5, 1, 2),  # for other heads
    raw("key_ranges must be int32", key_ranges=torch.zeros(1, 1, 5, 1, 4, dtype=torch.int32)[..., ::2]),
    *(raw("dropout_p must be between 0 and 1, got", dropout_p=p, philox_seed=SEED) for p in (NAN, -0.25, 2.0, 1e300)),
    raw("dropout needs philox_seed", dropout_p=0.5),
    raw("philox_seed...divides", dropout_p=0.5, philox_seed=SEED[:0]),
    raw("philox_seed...divides", dropout_p=0.5, philox_seed=SEED.expand(3).clone()),
    *(raw("softcap must be", softcap=c) for c in (1e-46, 1e39, -1.0, NAN, INF)),
    *(raw("scale must be a finite number", softmax_scale=scale) for scale in (NAN, INF)),
    raw("q, k and v must have 4 dimensions", k=t(2, 7, 8)),
    raw("the sizes of q, k and v do not fit", k=t(2, 2, 7, 9)),
    raw("the sizes of q, k and v do not fit", v=t(2, 2, 6, 6)),
    raw("the heads of k and v must divide those of q", k=t(2, 3, 7, 8)),
    raw("q, k and v must have one floating dtype", v=t(2, 2, 7, 6).double()),
    raw("the sizes of bias do not fit", bias=t(1, 4, 5, 6)),
    raw("bias must be bool, float32 or", bias=t(1, 4, 5, 7).long()),
    raw("a bias of bits must have 8 bytes for each 64 keys", bias=t(1, 4, 5, 7).byte()),
    raw("the sizes of bias do not fit", bias=t(1, 4, 6, 8).byte()),
    raw("backend...'cpu'...got...gpu", backend="gpu"),
    raw("lse...shape (batch, heads, seqlen_q) and be float32", WITH_LSE, lse=t(2, 5)),
    raw("lse...shape (batch, heads, seqlen_q) and be float32", WITH_LSE, lse=t(2, 4, 7)),
    raw("lse...and be float32", WITH_LSE, lse=t(2, 4, 5).double()),
    raw("grad_lse...seqlen_q", WITH_GRADIENTS, grad_lse=t(2, 4, 7)),
    raw("out must have the shape and dtype of the output", WITH_LSE, out=t(2, 4, 5, 8)),
    raw("grad_out...dtype of the output", WITH_GRADIENTS, grad_out=t(2, 4, 5, 6).double()),
    *(
        raw("only a floating bias has a gradient", WITH_GRADIENTS, bias=bias, cot_dbias=None)
        for bias in (None, t(1, 4, 5, 8).byte(), t(1, 4, 5, 7).bool())
    ),
    raw("tk must have the shape", TANGENT, tk=t(2, 2, 6, 8)),
    raw("tq must have the shape and dtype", TANGENT, tq=t(2, 4, 5, 8).double()),
    raw("tbias must be None", TANGENT, bias=None),
    raw("cot_dv must have the shape", SECOND, cot_dv=t(2, 2, 7, 8)),
    raw("cot_dbias must be None", SECOND, bias=None, grad_mask=7),
    raw("sinks must be", sinks=t(2, 4).double()),
    raw("sinks must be", sinks=t(2, 3)),
    raw("sinks must be", sinks=t(2, 4, 1)),
    raw("sinks ... have no gradient", WITH_GRADIENTS, sinks=None, cot_dsinks=None),
    raw("tsinks must be None", TANGENT, sinks=None),
    raw("block_table must be int32", OPERATORS[:1], block_table=t(2, 1).long()),
    raw("block_table must be int32", OPERATORS[:1], block_table=t(1, 1).int()),
    raw("rows of a page must be a power of two from 16", OPERATORS[:1], block_table=t(2, 1).int()),
    raw("rows of a page must be a power", OPERATORS[1:2], block_table=t(2, 1).int()),
]


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_operators_take_the_call_that_the_bad_ones_start_from(operator):
    results = getattr(torch.ops.attnkern, operator)(*arguments_of(operator).values())
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize(("operator", "changes", "message"), list(itertools.chain(*RAW)))
def test_operators_say_what_they_cannot_take(operator, changes, message):
    """By the dispatcher, and on the way that CUDA tensors take: the rules are in C++ and in Python."""
    arguments = arguments_of(operator)
    arguments |= {name: y for name, y in changes.items() if name in arguments}
    for function in (getattr(torch.ops.attnkern, operator), getattr(ops, f"route_{operator}")):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            function(*arguments.values())
        text = str(caught.value).splitlines()[0]
        says(text[text.index("attnkern: ") :], message)  # C++ says where, first


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
attnkern.attention(*[torch.zeros(1, 4, 300, 8)] * 3)  # with its threads
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)
params = 0.5, 0.0, 2**62, 2**62, 0, 0.0
for dtype in (torch.float32, torch.bfloat16):
    one = torch.zeros((), dtype=dtype)
    small, wide, rows = one.expand(1, 4, 64, 1), one.expand(1, 4, 64, 2**27), one.expand(1, 4, 2, 2**27)
    row = torch.zeros(1, 4, 64, 1, dtype=dtype), torch.zeros(1, 4, 64)
    long, two = one.expand(1, 1, 2**36, 1), one.expand(1, 1, 2, 1)
    calls = {{
        "result": lambda: attnkern.attention(long, two, two),
        "torch's": lambda: torch.empty(2**40),
        "forward": lambda: attnkern.attention(wide, wide, small),
        "decode": lambda: attnkern.attention(rows, wide, small),
        "backward": lambda: torch.ops.attnkern.backward(
            row[0], None, *Inputs(wide, wide, small), *row, *params, 4, "cpu"),
    }}
    for name, call in calls.items():
        try:
            call()
            print(dtype, name, "no error")
        except Exception as error:
            print(dtype, name, type(error).__name__, " ".join(str(error).split()))
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_no_memory(threads):
    """As torch says it: a RuntimeError with the bytes, and what they are for."""
    code = OUT_OF_MEMORY.format(threads=threads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    said = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert {dtype for dtype, _, _ in said} == {"torch.float32", "torch.bfloat16"}
    for dtype, size in (("torch.float32", 4), ("torch.bfloat16", 2)):
        told = {name: text for of, name, text in said if of == dtype}
        assert re.match(r"RuntimeError .*can't allocate memory: you tried to allocate \d+ bytes", told.pop("torch's"))
        assert told.pop("result") == (
            f"RuntimeError attnkern: can't allocate memory: you tried to allocate {2**36 * size} bytes "
            "for a result of shape (1, 1, 68719476736, 1)"
        )
        assert told.keys() == {"forward", "decode", "backward"}
        for text in told.values():
            expected = (
                r"RuntimeError attnkern: can't allocate memory: you tried to allocate \d{10,} bytes of scratch memory"
            )
            assert re.fullmatch(expected, text), text
