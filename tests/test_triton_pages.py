"""Keys and values in pages, by the Triton kernels in the simulator: against the same call without pages, wherever the
pages lie; and nothing is read that isn't there."""

import math

import pytest
import torch

import attnkern
import simulated
from attnkern import masks, testing
from matrix import in_turn
from random_problems import in_pages
from simulated import BF16, FP16, FP32

GPUS = (80, 90)
KEYS = 768
LENGTHS = [768, 333, 0, 17]
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "alignment": "bottom_right"},
    "window": {"window": (600, 0), "alignment": "bottom_right"},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "relative bias": {"relative_bias": torch.linspace(-2, 2, 90)},
    "mask": {"attn_mask": (torch.arange(KEYS) % 3 > 0).expand(len(LENGTHS), 1, 1, KEYS)},
}


class Call:
    """A call on pages, and the same without. Behind a sequence's end keys are NaN, as are page 0 and those that no
    sequence has, and the table has numbers of no page."""

    def __init__(self, page, queries, dtype=BF16, size=64, size_v=None, heads=(4, 2), keys=KEYS, lengths=LENGTHS):
        batch, ends = len(lengths), torch.tensor(lengths)
        self.query = torch.randn(batch, heads[0], queries, size, dtype=dtype)
        unused = torch.arange(keys) >= ends[:, None]
        given = (torch.randn(batch, heads[1], keys, n, dtype=dtype) for n in (size, size_v or size))
        self.key, self.value = (x.masked_fill(unused[:, None, :, None], math.nan) for x in given)
        pools, table = in_pages(page, self.key, self.value)
        self.pools = [torch.cat([torch.full_like(x[:1], math.nan), x]) for x in pools]
        bad = torch.tensor([-1, 2**31 - 1, -(2**31), len(self.pools[0])], dtype=torch.int32)
        bad = bad[torch.arange(table.numel()) % 4].view_as(table)
        self.table = torch.where(unused.unflatten(1, (-1, page)).all(-1), bad, table + 1)
        ranges = torch.stack([torch.zeros_like(ends), ends], -1)[:, None, None, None]
        self.options = {"enable_gqa": True, "key_ranges": ranges, "return_lse": True}

    def paged(self, gpu, **options):
        """out, lse, and the kernels."""
        with simulated.triton(gpu) as target:
            got = target.attention(self.query, *self.pools, block_table=self.table, **self.options, **options)
        return got, target.launched

    def contiguous(self, gpu, **options):
        with simulated.triton(gpu) as target:
            return target.attention(self.query, self.key, self.value, **self.options, **options)

    def expected(self, **options):
        """By the definition, of float64: what to hold the results of other tiles to."""
        options |= {name: x for name, x in self.options.items() if name != "return_lse"}
        key, value = (x.nan_to_num(nan=0.0) for x in (self.key, self.value))
        return testing.expected(self.query, key, value, **options)


def of(name, dtype):
    """OPTIONS, of which a bias has the inputs' dtype."""
    return {n: x.to(dtype) if n == "relative_bias" else x for n, x in OPTIONS[name].items()}


def same(got, want):
    return all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize(**in_turn(name=list(OPTIONS), page=[16, 64, 256], gpu=GPUS))
def test_few_queries(name, page, gpu):
    """A block of keys lies in several pages, in two, or in one: the same bits as without pages."""
    turn = list(OPTIONS).index(name) + GPUS.index(gpu)
    dtype, size = ((BF16, 128), (FP16, 64), (FP32, 64))[turn % 3]
    call = Call(page, 1 + 2 * (turn % 2), dtype, size)
    got, launched = call.paged(gpu, **of(name, dtype))
    assert [kernel.function.__name__ for kernel in launched] == ["decode_kernel", "combine_kernel"]
    constants = launched[0].constants
    assert constants["PAGES"] == (2 if page >= constants["BLOCK_N"] else 1)
    assert same(got, call.contiguous(gpu, **of(name, dtype)))


@pytest.mark.parametrize(**in_turn(name=list(OPTIONS), page=[16, 64, 256], gpu=GPUS))
def test_many_queries(name, page, gpu):
    """On sm_80 the same bits, too. sm_90 has other tiles without pages, and sums in another order."""
    turn = list(OPTIONS).index(name) + GPUS.index(gpu)
    dtype, size = ((BF16, 128), (FP16, 64), (FP32, 64))[turn % 3]
    options = of(name, dtype) | ({"window": (100, 0)} if name == "window" else {})
    call = Call(page, 40 + 30 * (turn % 2), dtype, size)
    got, (kernel,) = call.paged(gpu, **options)
    assert kernel.function.__name__ == "forward_kernel"
    assert kernel.constants["PAGES"] == (2 if page >= kernel.constants["BLOCK_N"] else 1)
    if gpu == 80:
        assert same(got, call.contiguous(gpu, **options))
    for x, want in zip(got, call.expected(**options).values(), strict=True):
        want.check(x, gradient=False, name=name)


SIZES = {"two tiles": (96, 80), "columns at a time": (320, 320), "unaligned": (33, 17)}


@pytest.mark.parametrize(**in_turn(queries=[2, 20], name=list(SIZES), dtype=[BF16, FP32]))
def test_head_sizes(name, queries, dtype):
    keys, lengths = (KEYS, LENGTHS[:2]) if queries == 2 else (128, [128, 70])
    call = Call(16, queries, dtype, *SIZES[name], keys=keys, lengths=lengths)
    assert same(call.paged(80)[0], call.contiguous(80))


@pytest.mark.parametrize(("page", "queries", "dtype"), [(16, 3, BF16), (64, 40, BF16), (16, 40, FP32)])
def test_sm_120(page, queries, dtype):
    call = Call(page, queries, dtype)
    assert same(call.paged(120)[0], call.contiguous(120))


@pytest.mark.parametrize("queries", [1, 20])
def test_all_keys(queries):
    """Without ranges: the last page is as full as the others, the last block isn't."""
    call = Call(16, queries, keys=1008 if queries == 1 else 80, lengths=[1008, 1008] if queries == 1 else [80, 80])
    call.options.pop("key_ranges")
    assert same(call.paged(80)[0], call.contiguous(80))


LAYOUTS = {
    "rows first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # as flash_attn has them
    "heads apart": lambda x: torch.cat([x, x], 1)[:, ::2],
    "no dense rows": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_the_pool_and_the_table(name, queries):
    call = Call(32, queries)
    want = call.paged(80)[0] if name != "heads apart" else None
    call.pools = [LAYOUTS[name](x) for x in call.pools]
    call.table = torch.cat([call.table, call.table], 1)[:, : call.table.shape[1]]
    if want is None:  # both heads are the first one's
        call.key, call.value = (x[:, :1].expand(-1, 2, -1, -1) for x in (call.key, call.value))
        want = call.contiguous(80)
    assert same(call.paged(80)[0], want)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("queries", [1, 20])
def test_a_number_of_no_page_counts_as_0(monkeypatch, queries, page, gpu):
    """Where keys are attended to, too, if nobody looks at the table: the simulator finds no read beside the pages."""
    call = Call(page, queries)
    call.table[1, 2] = -7
    with pytest.raises(RuntimeError, match=r"numbers of pages from 0 to \d+ .*got -7 at \[1, 2\]"):
        call.paged(gpu)
    monkeypatch.setattr("attnkern.backends.reference.may_look", lambda table: False)
    first = call.table[0, 0].item()
    call.pools = [torch.cat([x[first : first + 1], x[1:]]) for x in call.pools]
    found = []
    for number in (0, -7, -(2**31), 2**31 - 1, len(call.pools[0])):
        call.table[1, 2] = number
        found.append(call.paged(gpu)[0])
        assert same(found[-1], found[0])
    assert not found[0][0].isnan().any()


def test_a_mask_of_bits():
    call = Call(16, 2)
    mask = masks.from_bool((torch.arange(KEYS) % 5 > 0).expand(2, KEYS))
    assert same(call.paged(80, attn_mask=mask)[0], call.contiguous(80, attn_mask=mask))


def test_no_keys_launch_nothing():
    call = Call(16, 2)
    call.table = call.table[:, :0]
    call.options.pop("key_ranges")
    (out, lse), launched = call.paged(80)
    assert not launched
    assert not out.any()
    assert (lse == -math.inf).all()


def test_another_pool_makes_no_new_kernel():
    """Nor another table, nor other pages of whole blocks."""
    kernels = set()
    for page, keys in ((64, 768), (64, 1024), (128, 768)):
        call = Call(page, 1, keys=keys)
        kernels |= set(call.paged(80)[1])
    assert len(kernels) == 2


def test_explain():
    """Its plan, and the pool that must be copied."""
    call = Call(64, 1)
    with simulated.triton():
        given = {"block_table": call.table, "enable_gqa": True}
        text = str(attnkern.explain(call.query, *call.pools, **given))
        copied = str(attnkern.explain(call.query, *map(LAYOUTS["no dense rows"], call.pools), **given))
    assert "decode: keys in" in text
    assert "copies" not in text
    assert f"copies key (strides {(2 * 2 * 64 * 64, 2 * 64 * 64, 128, 2)})" in copied
