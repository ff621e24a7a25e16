"""Keys and values in pages: the same numbers as without pages, bit for bit, wherever the pages lie."""

import inspect

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attnkern
from attnkern.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from attnkern.integrations.sdpa import use_as_sdpa
from attnkern.params import AttentionParams
from attnkern.signatures import Inputs
from random_problems import in_pages

LENGTHS = [320, 17, 0, 128]


def problem(target, queries, dtype, heads=(4, 2), sizes=(64, 64)):
    """query, key, value, and key_ranges of LENGTHS: the last query is level with the last key."""
    batch, longest = len(LENGTHS), max(LENGTHS)
    q = target.randn(batch, heads[0], queries, sizes[0], dtype=dtype)
    k, v = (target.randn(batch, heads[1], longest, size, dtype=dtype) for size in sizes)
    lengths = torch.tensor(LENGTHS, device=target.device)
    return q, k, v, torch.stack([torch.zeros_like(lengths), lengths], -1)[:, None, None, None]


def same(got, want):
    """Bit for bit on the CPU. A GPU may have other tiles for pages: weights are then rounded beside other maxima, and
    an entry that is small because its terms cancel differs by as much as its row's largest."""
    return all(torch.equal(x, y) if y.is_cpu else close(x, y) for x, y in zip(got, want, strict=True))


def close(x, y):
    """Within a few units in the last place of a row's largest entry; infinities where they are."""
    largest = y.abs().masked_fill(y.isinf(), 0).amax(-1, keepdim=True).float()
    allowed = 1e-5 + 4 * torch.finfo(y.dtype).eps * largest
    return bool(((x == y) | ((x.float() - y.float()).abs() <= allowed)).all())


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("queries", [1, 2, 5, 8, 70, 200])
def test_same_bits_as_contiguous(target, dtype, queries, size):
    q, k, v, ranges = problem(target, queries, dtype)
    (key, value), table = in_pages(size, k, v)
    options = {"enable_gqa": True, "key_ranges": ranges, "return_lse": True}
    for more in ({}, {"is_causal": True}, {"window": (20, 3), "alignment": "bottom_right"}):
        want = target.attention(q, k, v, **options, **more)
        assert same(target.attention(q, key, value, block_table=table, **options, **more), want)


@pytest.mark.parametrize("first", [0, 3, 16])
def test_same_bits_of_few_keys(dtype, first):
    """A sequence whose keys lie in one page, from `first` on, of all numbers that few_keys.h takes, and more."""
    pool_k, pool_v = (torch.randn(4, 2, 16, 64).to(dtype) for _ in range(2))
    table = torch.tensor([[2, 0, 3]])
    k, v = (x[table[0]].transpose(0, 1).flatten(1, 2)[None] for x in (pool_k, pool_v))
    for keys in range(1, 14):
        for queries in (1, 2, 3, 8, 13):
            ends = torch.full((queries,), first + keys)
            ranges = torch.stack([torch.full_like(ends, first), ends], -1).view(1, 1, queries, 1, 2)
            q = torch.randn(1, 4, queries, 64).to(dtype)
            options = {"enable_gqa": True, "key_ranges": ranges, "return_lse": True}
            want = attnkern.attention(q, k, v, **options)
            got = attnkern.attention(q, pool_k, pool_v, block_table=table, **options)
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), (keys, queries)


@pytest.mark.parametrize("layout", ["heads first", "side by side"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("megabytes", [44, 72])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_bits_from_memory(dtype, megabytes, head_dim, layout):
    """Decoding keys that no cache holds, which a CPU reads by other kernels: by how many rows share a key head."""
    batch, heads = 3, 4
    length = megabytes * 2**20 // (batch * heads * 2 * head_dim * dtype.itemsize) // 64 * 64
    k, v = (torch.randn(batch, heads, length, head_dim).to(dtype) for _ in range(2))
    (key, value), table = in_pages(64, k, v)
    if layout == "side by side":
        k, v, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v, key, value))
    lengths = torch.tensor([length, length - 5, length // 2])
    ranges = torch.stack([torch.zeros_like(lengths), lengths], -1)[:, None, None, None]
    for rows in (1, 2, 3, 4, 5, 8):
        q = torch.randn(batch, rows * heads, 1, head_dim).to(dtype)
        options = {"enable_gqa": True, "key_ranges": ranges, "return_lse": True}
        want = attnkern.attention(q, k, v, **options)
        got = attnkern.attention(q, key, value, block_table=table, **options)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), rows


OPTIONS = {
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "relative bias": {"relative_bias": torch.linspace(-2, 2, 90)},
    "scale": {"scale": -0.3},
    "bool mask": {"attn_mask": torch.arange(320).expand(4, 1, 1, 320) % 3 > 0},
    "bits": {},
    "bias": {"attn_mask": torch.linspace(-1, 1, 320).expand(4, 4, 1, 320)},
}


@pytest.mark.parametrize("queries", [1, 33])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(target, name, queries):
    options = {n: x.to(target.device) if isinstance(x, torch.Tensor) else x for n, x in OPTIONS[name].items()}
    q, k, v, ranges = problem(target, queries, torch.float32)
    (key, value), table = in_pages(64, k, v)
    mask = options.pop("attn_mask", None)
    if name == "bits":
        mask = attnkern.masks.from_bool(torch.arange(queries * 320).view(queries, 320) % 3 > 0).to(target.device)
        assert mask.bits is not None
    options |= {"enable_gqa": True, "key_ranges": ranges, "return_lse": True}
    want = target.attention(q, k, v, mask, **options)
    assert same(target.attention(q, key, value, mask, block_table=table, **options), want)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (20, 2), (6, 6)], ids=str)
@pytest.mark.parametrize("sizes", [(128, 128), (40, 80), (33, 1), (576, 512)], ids=str)
def test_heads_and_sizes(target, heads, sizes):
    """Few rows and many, whole vectors and parts of them; rows of two parities in bfloat16."""
    for dtype, queries in ((torch.bfloat16, 1), (torch.bfloat16, 3), (torch.float32, 2), (torch.float32, 20)):
        q, k, v, ranges = problem(target, queries, dtype, heads, sizes)
        (key, value), table = in_pages(16, k, v)
        own = ranges + torch.tensor([1, 0], device=target.device)  # an odd first key
        for keys in (ranges, own):
            options = {"enable_gqa": True, "key_ranges": keys, "return_lse": True}
            want = target.attention(q, k, v, **options)
            assert same(target.attention(q, key, value, block_table=table, **options), want)


@pytest.mark.parametrize("layout", ["heads first", "rows first", "strided"])
def test_layouts_of_the_pool(target, layout):
    q, k, v, ranges = problem(target, 3, torch.float32)
    pools, table = in_pages(32, k, v)
    if layout == "rows first":  # as flash_attn has them
        pools = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in pools]
    elif layout == "strided":
        pools = [torch.stack([x, x], -1)[..., 0] for x in pools]
    options = {"enable_gqa": True, "key_ranges": ranges, "return_lse": True}
    got = target.attention(q, *pools, block_table=table, **options)
    assert same(got, target.attention(q, k, v, **options))


def test_many_threads_and_split_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 1, 64), *torch.randn(2, 1, 2, 5000, 64)
    (key, value), table = in_pages(16, k, v)
    ranges = torch.tensor([[3, 4990]])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            want = attnkern.attention(q, k, v, key_ranges=ranges, backend="cpu")
            assert torch.equal(attnkern.attention(q, key, value, key_ranges=ranges, block_table=table), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 1), (8, 2), (12, 1)], ids=str)
def test_more_keys_than_a_block(dtype, heads):
    """By one thread, from any row of a page on: what is behind the last key of a block is another row's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        q, k, v = (
            torch.randn(1, n, rows, 64, dtype=dtype)
            for n, rows in zip((*heads, heads[1]), (1, 1504, 1504), strict=True)
        )
        (key, value), table = in_pages(16, k, v)
        for first in (0, 1, 2, 4, 10):
            options = {"key_ranges": torch.tensor([[first, 1504]]), "enable_gqa": True, "return_lse": True}
            want = attnkern.attention(q, k, v, **options, backend="cpu")
            assert same(attnkern.attention(q, key, value, block_table=table, **options, backend="cpu"), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("size", [16, 64])
def test_more_keys_than_a_cache_holds(rows, size):
    """Where the CPU has kernels of their own for few rows of bfloat16, which take keys in turns, from any row on."""
    q, k, v = (torch.randn(1, n, s, 64, dtype=torch.bfloat16) for n, s in ((2 * rows, 1), (2, 16448), (2, 16448)))
    (key, value), table = in_pages(size, k, v)
    for first in (0, 5):
        options = {"key_ranges": torch.tensor([[first, 16440]]), "enable_gqa": True, "return_lse": True}
        want = attnkern.attention(q, k, v, **options, backend="cpu")
        assert same(attnkern.attention(q, key, value, block_table=table, **options, backend="cpu"), want)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("size", [16, 32, 64])
def test_heads_read_together(dtype, rows, size):
    """The CPU reads the rows of several key heads in the order in which they lie in memory: as without pages, from any
    row on, by any number of threads, more heads than are read together. Up to four rows as head by head, too, of
    which bfloat16 takes turns from 24 MiB of K and V on."""
    keys = 4960 if dtype == torch.bfloat16 else 2080
    q, k, v = (torch.randn(2, n, s, 64, dtype=dtype) for n, s in ((10 * rows, 1), (10, keys), (10, keys)))
    q[:, :rows] *= 30  # maxima that grow late
    k[:, :, 700:], k[1, 3, 1000, 7] = k[:, :, 700:] * 2, float("nan")
    pools, table = in_pages(size, k, v)
    by_row = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*pools, k, v)]
    for threads, first in ((1, 0), (1, 5), (2, 16), (16, 0)):
        torch.set_num_threads(threads)
        options = {"key_ranges": torch.tensor([[first, keys - 10]]), "enable_gqa": True, "backend": "cpu"}
        wanted = []
        for paged, whole in ((pools, (k, v)), (by_row[:2], by_row[2:])):
            wanted.append(attnkern.attention(q, *whole, **options).nan_to_num(3))
            assert torch.equal(attnkern.attention(q, *paged, block_table=table, **options).nan_to_num(3), wanted[-1])
        assert rows > 4 or torch.equal(*wanted)


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, 40])
def test_numbers_of_no_page_matter_only_where_they_are_used(target, bad, monkeypatch):
    monkeypatch.setenv("ATTNKERN_CHECK", "1")  # a GPU's are looked at only then
    q, k, v, ranges = problem(target, 2, torch.float32)
    (key, value), table = in_pages(64, k, v, pages=40)
    options = {"enable_gqa": True, "key_ranges": ranges}
    want = target.attention(q, key, value, block_table=table, **options)
    unused = torch.arange(table.shape[1], device=table.device) * 64 >= ranges[:, 0, 0, :, 1]
    spoiled = table.masked_fill(unused, bad)
    assert torch.equal(target.attention(q, key, value, block_table=spoiled, **options), want)
    spoiled[0, 3] = bad
    with pytest.raises(
        RuntimeError, match=rf"^attnkern: block_table must hold numbers of pages from 0 to 39 .*got {bad} at \[0, 3\]"
    ):
        target.attention(q, key, value, block_table=spoiled, **options)


def test_numbers_of_no_page_without_queries(target, monkeypatch):
    monkeypatch.setenv("ATTNKERN_CHECK", "1")
    pool, table = target.randn(4, 2, 16, 8), torch.full((2, 3), -1, dtype=torch.int32, device=target.device)
    for heads, queries in ((2, 0), (0, 3)):
        q = target.randn(2, heads, queries, 8)
        assert target.attention(q, pool[:, :heads], pool[:, :heads], block_table=table).shape == q.shape


def test_int64_and_strided_tables(target):
    q, k, v, ranges = problem(target, 2, torch.float32)
    pools, table = in_pages(64, k, v)
    options = {"enable_gqa": True, "key_ranges": ranges}
    want = target.attention(q, *pools, block_table=table, **options)
    for other in (table.long(), torch.stack([table, table], -1)[..., 0], table.mT.contiguous().mT):
        assert torch.equal(target.attention(q, *pools, block_table=other, **options), want)


def test_empty(target):
    q, pool = target.randn(2, 2, 3, 8), target.randn(4, 2, 16, 8)
    nothing = torch.zeros(2, 0, dtype=torch.int32, device=target.device)
    out, lse = target.attention(q, pool, pool, block_table=nothing, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert target.attention(q[:0], pool, pool, block_table=nothing[:0]).shape == (0, 2, 3, 8)


ERRORS = {
    "query": (lambda c: c | {"query": c["query"][0]}, r"query must be \(B, Hq, L, E\) beside a block_table"),
    "key": (lambda c: c | {"key": c["key"][0]}, "key must have the shape .pages, heads, rows of a page, size."),
    "pools": (lambda c: c | {"value": c["value"][:3]}, "value must have key's 4 pages of 16 rows, got 3 of 16"),
    "size": (
        lambda c: c | {"key": c["key"][:, :, :12], "value": c["value"][:, :, :12]},
        r"rows of a page \(key's dimension 2\) must be a power of two from 16 on, got 12",
    ),
    "dtype": (
        lambda c: c | {"block_table": c["block_table"].float()},
        "block_table must be int32 or int64, got float32",
    ),
    "batch": (lambda c: c | {"block_table": c["block_table"][:1]}, r"block_table must have the shape \(2, pages of"),
    "other dtype": (lambda c: c | {"key": c["key"].double()}, "key must have query's dtype float32, got float64"),
    "heads": (lambda c: c | {"key": c["key"].expand(-1, 3, -1, -1)}, "key's number of heads must be 1 or query's"),
    "gradient": (
        lambda c: c | {"query": c["query"].requires_grad_()},
        "keys and values in pages have no gradient, and query requires one",
    ),
    "gradients": (
        lambda c: c | {"query": c["query"].requires_grad_(), "value": c["value"].clone().requires_grad_()},
        "query and value require one: call it under torch.no_grad",
    ),
    "gradient of sinks": (
        lambda c: c | {"sinks": torch.zeros(2, device=c["query"].device, requires_grad=True)},
        "no gradient, and sinks requires one",
    ),
    "gradient of a mask": (
        lambda c: c | {"attn_mask": torch.zeros(3, 48, device=c["query"].device, requires_grad=True)},
        "no gradient, and attn_mask requires one",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(target, name):
    change, message = ERRORS[name]
    pool = target.randn(4, 1, 16, 8)
    table = torch.zeros(2, 3, dtype=torch.int32, device=target.device)
    call = {"query": target.randn(2, 2, 3, 8), "key": pool, "value": pool, "block_table": table}
    with pytest.raises(RuntimeError, match=message):
        target.attention(**change(call))
    if name == "gradient":
        with torch.no_grad():
            target.attention(**change(call))


def test_a_number_of_no_page_is_said_as_it_is():
    x, pool = torch.randn(1, 2, 3, 8), torch.randn(4, 2, 16, 8)
    with pytest.raises(RuntimeError, match=r"from 0 to 3 wherever .* got -7 at \[0, 1\]"):
        attnkern.attention(x, pool, pool, block_table=torch.tensor([[0, -7]]))


def test_a_packed_table_of_one_dimension():
    x, pool, ends = torch.randn(10, 2, 8), torch.randn(4, 2, 16, 8), torch.tensor([0, 4, 10])
    with pytest.raises(RuntimeError, match=r"block_table must have the shape \(2, pages of a sequence\), got \(3,\)"):
        attnkern.varlen_attention(x, pool, pool, ends, seqused_k=torch.tensor([4, 6]), block_table=torch.zeros(3).int())


def test_no_tensor(target):
    x = target.randn(2, 2, 3, 8)
    with pytest.raises(TypeError, match="argument 'block_table' must be Tensor, not list"):
        target.attention(x, x, x, block_table=[[0], [1]])


def test_operators_refuse_gradients(kernel_target):
    x, pool = kernel_target.randn(1, 1, 2, 8), kernel_target.randn(2, 1, 16, 8)
    inputs = Inputs(x, pool, pool, block_table=torch.zeros(1, 2, dtype=torch.int32, device=x.device))
    params = AttentionParams(1.0)
    out, lse = torch.ops.attnkern.forward(*inputs, *params, True, kernel_target.backend)
    with pytest.raises(RuntimeError, match="no gradient of keys and values in pages"):
        torch.ops.attnkern.backward(x, None, *inputs, out, lse, *params, 7, kernel_target.backend)


def test_one_graph_for_all_tables():
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def step(q, key, value, table, ranges):
        return attnkern.attention(q, key, value, key_ranges=ranges, block_table=table, enable_gqa=True)

    with torch.no_grad():
        for queries, keys in ((1, 300), (1, 70), (5, 400)):
            q, k, v = torch.randn(2, 4, queries, 16), *torch.randn(2, 2, 2, keys, 16)
            (key, value), table = in_pages(16, k, v)
            ranges = torch.tensor([[0, keys], [5, keys - 9]])[:, None, None, None]
            want = attnkern.attention(q, k, v, key_ranges=ranges, enable_gqa=True)
            assert torch.equal(step(q, key, value, table, ranges), want)
    assert counter.frame_count <= 2


def test_explain_names_the_pages():
    pool = torch.randn(5, 2, 16, 8)
    text = str(attnkern.explain(torch.randn(2, 2, 1, 8), pool, pool, block_table=torch.zeros(2, 3, dtype=torch.int32)))
    assert "in 5 pages of 16" in text
    assert "cpu: chosen" in text


def packed_problem(dtype=torch.float32):
    """Queries of four sequences one after the other, and their keys and values: of each by itself, and in pages."""
    queries, keys = [3, 40, 0, 1], [50, 40, 20, 129]
    q = torch.randn(sum(queries), 4, 24, dtype=dtype)
    k, v = torch.randn(2, 4, 2, 160, 24, dtype=dtype)
    pools, table = in_pages(32, k, v)
    ends = torch.tensor([0, *queries]).cumsum(0)
    return q, k, v, pools, table, ends, torch.tensor(keys)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (20, 0), "softcap": 5.0}], ids=str)
def test_packed_queries(target, options):
    q, k, v, pools, table, ends, used = (
        [y.to(target.device) for y in x] if isinstance(x, list) else x.to(target.device) for x in packed_problem()
    )
    options |= {"enable_gqa": True, "return_lse": True, "backend": target.backend}
    out, lse = attnkern.varlen_attention(q, *pools, ends, seqused_k=used, block_table=table, **options)
    inside = [x.transpose(1, 2)[:, :160].flatten(0, 1) for x in (k, v)]
    every = torch.arange(5, device=target.device) * 160
    want, want_lse = attnkern.varlen_attention(q, *inside, ends, every, seqused_k=used, **options)
    assert same((out, lse), (want, want_lse))


def test_packed_errors():
    q, _, _, pools, table, ends, used = packed_problem()
    with pytest.raises(ValueError, match="seqused_k must be given beside a block_table"):
        attnkern.varlen_attention(q, *pools, ends, block_table=table)
    with pytest.raises(ValueError, match="cu_seqlens_k must be None beside a block_table"):
        attnkern.varlen_attention(q, *pools, ends, ends, seqused_k=used, block_table=table)
    with pytest.raises(RuntimeError, match=r"block_table must have a row for each of the 4 sequences .*got \(3, 5\)"):
        attnkern.varlen_attention(q, *pools, ends, seqused_k=used, block_table=table[:3])
    with pytest.raises(ValueError, match=r"seqused_k must be from 0 .*got 161 for sequence 3, which has 160"):
        attnkern.varlen_attention(q, *pools, ends, seqused_k=used + 32, block_table=table)
    options = {"seqused_k": used, "block_table": table, "relative_bias": torch.zeros(3)}
    with pytest.raises(ValueError, match="relative_bias needs block_table=None"):
        attnkern.varlen_attention(q, *pools, ends, **options)


def test_torch_varlen_attn():
    """torch's function takes pages (pages, size, H, E) on a CPU, where attnkern is active. Torch 2.11's takes none."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        assert torch.__version__.startswith("2.11.")
        return
    q, _, _, pools, table, ends, used = packed_problem(torch.bfloat16)
    want = attnkern.varlen_attention(q, *pools, ends, seqused_k=used, block_table=table, enable_gqa=True)
    options = {"seqused_k": used.int(), "block_table": table, "enable_gqa": True}
    with use_as_sdpa(full=True):
        got = varlen_attn(q, *(x.transpose(1, 2) for x in pools), ends.int(), None, 40, 129, **options)
    assert torch.equal(got, want)


def rows_first(pools):
    return [x.transpose(1, 2).contiguous() for x in pools]


@pytest.mark.parametrize("slopes", [None, (4,), (4, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 3)}], ids=str)
def test_flash_attn_varlen_func(options, slopes):
    q, k, v, pools, table, ends, used = packed_problem()
    options |= {"return_attn_probs": True, "alibi_slopes": None if slopes is None else torch.rand(slopes)}
    ends_k = torch.nn.functional.pad(used.cumsum(0), (1, 0))
    inside = [torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(used.tolist())]) for x in (k, v)]
    want = flash_attn_varlen_func(q, *inside, ends, ends_k, 40, 129, **options)
    with torch.no_grad():
        got = flash_attn_varlen_func(q, *rows_first(pools), ends, ends_k, 40, 129, block_table=table, **options)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("seqlens", [40, "each"], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "leftpad": True}, {"alibi": True, "rotary": True}], ids=str)
def test_flash_attn_with_kvcache(options, seqlens):
    """Appends to pages as to rows, and attends to the same numbers."""
    batch, new = 3, 5
    q, k_new, v_new = (torch.randn(batch, new, heads, 16) for heads in (4, 2, 2))
    k, v = torch.randn(2, batch, 2, 96, 16)
    pools, table = in_pages(32, k, v)
    given = {"cache_seqlens": torch.tensor([0, 17, 91]) if seqlens == "each" else seqlens, "return_softmax_lse": True}
    given["causal"] = options.get("causal", False)
    if options.get("leftpad"):
        given["cache_leftpad"] = torch.tensor([0, 3, 10])
    if options.get("alibi"):
        given["alibi_slopes"] = torch.rand(4)
    if options.get("rotary"):
        given |= dict(zip(("rotary_cos", "rotary_sin"), torch.rand(2, 96, 4), strict=True))
    pools, caches = rows_first(pools), rows_first([k, v])
    want = flash_attn_with_kvcache(q, *caches, k_new, v_new, **given)
    got = flash_attn_with_kvcache(q, *pools, k_new, v_new, block_table=table, **given)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
    for pool, cache in zip(pools, caches, strict=True):
        assert torch.equal(pool[table.long()].flatten(1, 2), cache)


def test_nothing_is_written_to_pages_that_are_not_there():
    q, new, pool = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8), torch.zeros(4, 16, 2, 8)
    for bad in (-1, 4):
        table = torch.tensor([[0, bad]])
        with pytest.raises(RuntimeError, match=f"pages from 0 to 3 where k and v are written, got {bad}"):
            flash_attn_with_kvcache(q, pool, pool, new, new, cache_seqlens=16, block_table=table)
        assert not pool.any()
