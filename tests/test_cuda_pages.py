"""Keys and values in pages, in the CUDA C++ kernels: in the simulator, hazards checked, the bits of the same kernels
without pages."""

import math
from unittest import mock

import pytest
import torch

from attnkern.backends import cuda, reference
from attnkern.problem import Problem
from matrix import in_turn
from random_problems import in_pages
from simulated import BF16, FP16, FP32, simulated  # noqa: F401

# Of each sequence; the pages' capacity is that of the first, in whole pages.
LENGTHS = [141, 17, 0, 64]
DECODE, PREFILL = 3, 70

# dtype, queries, heads of query and of key, head sizes, options. Each class of head size, in every kernel with one.
CALLS = {
    "d64": (BF16, 1, (8, 2), (64, 64), {}),
    "d32, causal": (FP16, DECODE, (4, 2), (32, 32), {"causal": True}),
    "d96 and d72, window": (BF16, DECODE, (2, 2), (96, 72), {"window": (20, 3), "alignment": "bottom_right"}),
    "d128, softcap": (FP16, DECODE, (4, 1), (128, 128), {"softcap": 5.0}),
    "d192, sinks": (BF16, DECODE, (2, 1), (192, 128), {"sinks": True}),
    "d256": (FP16, DECODE, (2, 1), (256, 256), {}),
    "d300": (BF16, DECODE, (2, 1), (300, 300), {}),
    "d64, float32, causal": (FP32, DECODE, (2, 1), (64, 64), {"causal": True}),
    "d200, float32": (FP32, 1, (2, 1), (200, 200), {"sinks": True}),
    "d300, float32": (FP32, 1, (2, 1), (300, 270), {"softcap": 5.0}),
    "d33, float16": (FP16, 2, (4, 2), (33, 33), {}),
    "d64, many queries": (BF16, PREFILL, (4, 2), (64, 64), {"causal": True}),
    "d32, many queries, sinks": (FP16, PREFILL, (2, 2), (32, 24), {"sinks": True, "causal": True}),
    "d96, many queries, window": (BF16, PREFILL, (2, 1), (96, 96), {"window": (20, 3), "alignment": "bottom_right"}),
    "d128, many queries, bias": (FP16, PREFILL, (2, 1), (128, 128), {"bias": True}),
    "d192, many queries": (BF16, PREFILL, (1, 1), (192, 192), {}),
    "d256, many queries, softcap": (FP16, PREFILL, (1, 1), (256, 256), {"softcap": 5.0}),
    "d300, many queries": (BF16, PREFILL, (1, 1), (264, 300), {"causal": True}),
    "d64, float32, many queries": (FP32, PREFILL, (2, 1), (64, 64), {"causal": True}),
    "d160, float32, many queries": (FP32, PREFILL, (1, 1), (160, 136), {}),
    "d33, many queries": (BF16, PREFILL, (2, 1), (33, 40), {}),
}


def problem(name, size):
    """The arguments of a call without pages; and key, value and block_table of the same with pages of so many rows.
    Where no sequence has keys, pages hold NaN and the table what is no page's number."""
    dtype, queries, (heads, heads_k), sizes, options = CALLS[name]
    options = {"enable_gqa": True, "return_lse": True, **options}
    batch, capacity = len(LENGTHS), -(-LENGTHS[0] // size) * size
    lengths = torch.tensor(LENGTHS).view(-1, 1, 1, 1)
    query = torch.randn(batch, heads, queries, sizes[0]).to(dtype)
    key, value = (torch.randn(batch, heads_k, capacity, width).to(dtype) for width in sizes)
    dead = (torch.arange(capacity) >= lengths).mT
    key, value = (x.masked_fill(dead, math.nan) for x in (key, value))
    ends = lengths
    if options.pop("causal", False):  # the last query is level with the last key
        ends = (lengths - queries + 1 + torch.arange(queries).view(1, 1, -1, 1)).clamp_min(0)
    options["key_ranges"] = torch.stack([torch.zeros_like(ends), ends], -1)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 1, heads)
    if options.pop("bias", False):
        options["attn_mask"] = torch.randn(1, heads, queries, capacity).to(dtype)
    pools, table = in_pages(size, key, value)
    unused = torch.arange(table.shape[1]) * size >= lengths.view(-1, 1)
    wide = torch.full((batch, table.shape[1] + 3), -1, dtype=torch.int32)
    table = wide[:, : table.shape[1]].copy_(table.masked_fill(unused, 2**31 - 1))
    return (query, key, value, options), (*pools, table)


def same(got, want):
    return all(map(torch.equal, got, want))


@pytest.mark.parametrize(**in_turn(simulated=[80, 90], name=list(CALLS), size=[16, 64]), indirect=["simulated"])
def test_same_bits_as_contiguous(simulated, name, size):  # noqa: F811
    """By the same kernels, with as many products and no more bank conflicts."""
    (query, key, value, options), (*pools, table) = problem(name, size)
    recorder = simulated.recorder
    recorder.left_out = cuda.LEFT_OUT["cuda-sm90"]
    want = simulated.attention(query, key, value, **options)
    kernels, reports = simulated.kernels(), list(recorder.reports)
    recorder.left_out = 0
    recorder.launches.clear(), recorder.reports.clear()
    assert same(simulated.attention(query, *pools, block_table=table, **options), want)
    assert simulated.kernels() == kernels
    for one, other in zip(recorder.reports, reports, strict=True):
        assert one.statistics["products"] == other.statistics["products"]
        assert one.bank_conflicts == other.bank_conflicts


LAYOUTS = {
    "rows first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # as flash_attn has them
    "columns apart": lambda x: torch.stack([x, x], -1)[..., 0],
    "not aligned": lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["d64", "d64, many queries", "d300, float32"])
def test_layouts_of_the_pool(simulated, name, layout):  # noqa: F811
    (query, key, value, options), (*pools, table) = problem(name, 16)
    want = simulated.attention(query, key, value, **options)
    assert same(simulated.attention(query, *map(LAYOUTS[layout], pools), block_table=table, **options), want)


@pytest.mark.parametrize("queries", [DECODE, PREFILL])
def test_all_keys_of_one_page(simulated, queries):  # noqa: F811
    """No key ranges, no second page: the last block of keys ends with the table."""
    query, pool = torch.randn(2, 2, queries, 64).to(BF16), torch.randn(1, 2, 16, 64).to(BF16)
    table = torch.zeros(2, 9, dtype=torch.int32)
    key = pool.repeat(2, 1, 9, 1)
    simulated.recorder.left_out = cuda.LEFT_OUT["cuda-sm90"]
    options = {"window": (70, 100), "return_lse": True}
    want = simulated.attention(query, key, key, softcap=1e30, **options)  # the generic variant, as with pages
    assert same(simulated.attention(query, pool, pool, block_table=table, softcap=1e30, **options), want)


@pytest.mark.parametrize("name", ["d64", "d64, many queries", "d300", "d33, float16"])
@pytest.mark.parametrize("bad", [-1, 40, 2**31 - 1])
def test_numbers_of_no_page(simulated, name, bad):  # noqa: F811
    """Where they are used they raise, and count as 0 if they may not be looked at: nothing out of bounds is read."""
    (query, *_, options), (key, value, table) = problem(name, 16)
    key, value = (x.nan_to_num()[:40] for x in (key, value))
    table[0, 3] = 0
    want = simulated.attention(query, key, value, block_table=table, **options)
    table[0, 3] = bad
    with pytest.raises(RuntimeError, match=rf"block_table must hold numbers of pages .* got {bad} at \[0, 3\]"):
        simulated.attention(query, key, value, block_table=table, **options)
    with mock.patch.object(reference, "may_look", return_value=False):
        assert same(simulated.attention(query, key, value, block_table=table, **options), want)


@pytest.mark.parametrize("simulated", [80, 90], indirect=True)
def test_without_pages_of_a_sequence(simulated):  # noqa: F811
    for queries in (DECODE, PREFILL):
        query, pool = torch.randn(2, 2, queries, 64).to(BF16), torch.full((4, 2, 16, 64), math.nan).to(BF16)
        nothing = torch.zeros(2, 0, dtype=torch.int32)
        out, lse = simulated.attention(query, pool, pool, block_table=nothing, return_lse=True)
        assert not out.any()
        assert (lse == -math.inf).all()


def test_the_plan():
    """Hopper's own kernels read no pages; splits are those of the whole capacity; strides are those of the pools."""
    on = cuda.Chip(90, 132, 233472, 232448)
    pool, table = torch.zeros(300, 2, 64, 64, dtype=BF16), torch.zeros(4, 64, dtype=torch.int32)
    for queries, kernel in ((1, "decode"), (500, "forward")):
        query, key = (torch.zeros(4, heads, n, 64, dtype=BF16) for heads, n in ((8, queries), (2, 4096)))
        pages = Problem.from_sdpa(query, pool, pool, enable_gqa=True, block_table=table)
        (paged,), (plain,) = (
            cuda.plan_of(x, on).launches for x in (pages, Problem.from_sdpa(query, key, key, enable_gqa=True))
        )
        assert paged.kernel == plain.kernel == kernel
        if kernel == "decode":
            assert paged == plain._replace(words=plain.words + ", keys read by pages")
        else:
            assert plain.family == "sm_90a"
            assert paged.words == "generic, keys read by pages (not sm_90a: keys and values lie in pages)"
        assert cuda.plan_of(pages, on).gathered == ()
        odd = torch.zeros(300, 2, 64, 65, dtype=BF16)[..., :64]
        uneven = Problem.from_sdpa(query, pool, odd, enable_gqa=True, block_table=table)
        assert cuda.plan_of(uneven, on).gathered == ("value",)
