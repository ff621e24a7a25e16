"""Few queries against many keys: the case of text generation, which backends run by a kernel of its own."""

from itertools import product

import pytest
import torch

import attnkern
from attnkern import testing
from matrix import FLOATS, in_turn

contract = pytest.mark.contract


@pytest.mark.parametrize(
    **in_turn(**{"seqlen_q, seqlen_k": list(product([1, 2, 3, 4, 7, 8, 9, 16], [1, 63, 1025, 4096]))}, dtype=FLOATS),
    ids=str,
)
def test_few_queries(target, seqlen_q, seqlen_k, dtype):
    target.check(target.inputs(1, 2, seqlen_q, seqlen_k, 16, dtype=dtype))


@contract(65)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (12, 4)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_grouped_queries_with_a_cache_in_length_major_memory(target, heads, seqlen_q, dtype):
    inputs = target.inputs(2, heads[0], seqlen_q, 600, 32, heads_k=heads[1], dtype=dtype, layout="blhd")
    target.check(inputs, enable_gqa=True, is_causal=True, alignment="bottom_right")


@contract(65)
@pytest.mark.parametrize("mask", [("bool", "B11S"), ("holes", "B11S"), ("float", "1H1S"), ("bool", "BHLS")], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_with_masks(target, mask, seqlen_q, dtype):
    target.check(target.inputs(2, 4, seqlen_q, 1300, 16, dtype=dtype, mask=mask))


@contract(24)
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_a_sequence_without_keys_in_the_batch(target, seqlen_q, dtype):
    """Padding to the left up to the end: one sequence of the batch has nothing to attend to."""
    inputs = target.inputs(3, 2, seqlen_q, 500, 16, dtype=dtype)
    keep = (
        torch.arange(500, device=target.device)
        >= torch.tensor([0, 490, 500], device=target.device)[:, None, None, None]
    )
    inputs = testing.Inputs(inputs.query, inputs.key, inputs.value, keep, inputs.recipe)
    results = target.check(inputs)
    assert not results["out"][2].any()


@pytest.mark.parametrize(
    **in_turn(
        **{"head_dim, head_dim_v, seqlen_q": list(product([1, 3, 17, 80, 257], [1, 24, 130], [1, 7]))}, dtype=FLOATS
    ),
    ids=str,
)
def test_head_sizes(target, seqlen_q, head_dim, head_dim_v, dtype):
    target.check(target.inputs(1, 3, seqlen_q, 301, head_dim, head_dim_v, dtype=dtype))


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(target, layout, dtype):
    target.check(target.inputs(2, 3, 2, 300, 24, dtype=dtype, layout=layout))


@pytest.mark.parametrize(
    "options", [{"window": (100, 0)}, {"window": (0, 50)}, {"softcap": 2.0}, {"scale": -0.3}], ids=str
)
def test_options(target, options, dtype):
    target.check(target.inputs(1, 2, 3, 400, 16, dtype=dtype), alignment="bottom_right", **options)


@contract(53)
def test_a_growing_cache_gives_the_rows_of_causal_attention(target):
    q, k, v = target.inputs(2, 4, 24, 24, 16, heads_k=2).tensors.values()
    whole = target.sdpa(q, k, v, is_causal=True, enable_gqa=True)
    for t in range(24):
        step = target.sdpa(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], enable_gqa=True)
        torch.testing.assert_close(step, whole[:, :, t : t + 1])


# Sizes for which few rows have a kernel of their own on the CPU, and one for which they haven't.
HEAD_DIMS = [32, 64, 72, 80, 96, 128, 256]


@pytest.mark.parametrize(
    **in_turn(
        **{"head_dim, dtype, seqlen_q": list(product(HEAD_DIMS, FLOATS, [1, 2]))}, options=[{}, {"window": (150, 0)}]
    ),
    ids=str,
)
def test_common_head_sizes(target, head_dim, seqlen_q, options, dtype):
    """Keys that all rows meet, whole vectors of them and some more; those before and after that some rows meet."""
    inputs = target.inputs(1, 2, seqlen_q, 333, head_dim, dtype=dtype)
    target.check(inputs, is_causal=True, alignment="bottom_right", **options)


MASKS = [("bool", "B11S"), ("holes", "BHLS"), ("float", "1H1S")]


@pytest.mark.parametrize(
    **in_turn(**{"head_dim, dtype, heads": list(product(HEAD_DIMS, FLOATS, [(2, 2), (4, 2)]))}, mask=MASKS), ids=str
)
def test_masks_of_common_head_sizes(target, head_dim, heads, mask, dtype):
    inputs = target.inputs(2, heads[0], 1, 333, head_dim, heads_k=heads[1], dtype=dtype, mask=mask)
    target.check(inputs, enable_gqa=True, scale=-0.2 if head_dim == 64 else None)


@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_padding_in_front_of_common_head_sizes(target, seqlen_q, mask, dtype):
    """No key for long, for one sequence of the batch none at all: nothing that a maximum could start from."""
    inputs = target.inputs(3, 2, seqlen_q, 700, 64, dtype=dtype)
    first = torch.tensor([0, 530, 700], device=target.device)[:, None, None, None]
    keep = torch.arange(700, device=target.device) >= first
    if mask == "float":
        keep = torch.zeros(keep.shape, device=target.device, dtype=dtype).masked_fill(~keep, -torch.inf)
    results = target.check(testing.Inputs(inputs.query, inputs.key, inputs.value, keep, inputs.recipe))
    assert not results["out"][2].any()


@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_scores_that_grow_all_along(target, seqlen_q, dtype):
    """Each key's score is the greatest so far, by far now and then."""
    inputs = target.inputs(1, 2, seqlen_q, 700, 64, dtype=dtype)
    with torch.no_grad():
        inputs.query.abs_()
        steps = torch.linspace(-1, 1, 700, device=target.device).pow(3)[:, None]
        inputs.key.abs_().clamp_(max=1.5).mul_(steps.to(dtype))
    target.check(inputs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_one_bad_key_spoils_its_head_alone(target, seqlen_q, bad, dtype):
    query, key, value = (x.detach() for x in target.inputs(1, 2, seqlen_q, 500, 64, dtype=dtype).tensors.values())
    query, key = query.clone(), key.clone()
    query[:, 1, :, 5] = 1.0
    expected = target.sdpa(query, key, value)
    key[:, 1, 300, 5] = bad
    out = target.sdpa(query, key, value)
    assert torch.equal(out[:, 0], expected[:, 0])
    assert out[:, 1].isnan().all()


MANY_HEADS = [  # query and key heads, queries, head sizes
    ((17, 1), 1, (64, 64)),
    ((48, 1), 1, (128, 128)),
    ((71, 1), 2, (64, 64)),
    ((24, 2), 3, (40, 24)),
    ((16, 4), 12, (80, 80)),
    ((128, 1), 2, (96, 48)),
    ((130, 1), 2, (16, 16)),
]
SHARED = {
    "all": {},
    "causal": {"is_causal": True, "alignment": "bottom_right"},
    "window": {"is_causal": True, "window": (90, 0), "alignment": "bottom_right", "softcap": 3.0},
    "padding": {"mask": ("bool", "B11S")},
    "bias": {"mask": ("holes", "1HLS")},
    "ranges": {"ranges": ("anything", "BHL", 2)},
    "sinks": {"sinks": "BH", "ranges": ("documents", "B1L", 1)},
}


@contract(27)
@pytest.mark.parametrize(**in_turn(**{"heads, queries, sizes": MANY_HEADS}, dtype=FLOATS, kind=list(SHARED)), ids=str)
def test_many_query_heads_share_a_key_head(target, heads, queries, sizes, kind, dtype):
    """With few queries each they are rows of one product on the CPU, up to 256 of them: the last size has more."""
    options = dict(SHARED[kind])
    ranges, sinks = options.pop("ranges", None), options.pop("sinks", None)
    given = {"heads_k": heads[1], "dtype": dtype, "mask": options.pop("mask", None)}
    inputs = target.inputs(2, heads[0], queries, 300, *sizes, **given)
    if ranges is not None:
        inputs = inputs.with_ranges(*ranges, torch.int32, 0)
    if sinks is not None:
        inputs = inputs.with_sinks(sinks, torch.promote_types(dtype, torch.float32), 0)
    target.check(inputs, enable_gqa=True, **options)


LONG = list(product(["all", "window", "bool", "bias", "grouped"], [torch.bfloat16, torch.float32, torch.float16]))


@pytest.mark.parametrize(**in_turn(**{"kind, dtype": LONG}, rows=[1, 2, 3, 4, 5, 8]), ids=str)
def test_more_keys_than_a_cache_holds(kernel_target, rows, dtype, kind):
    """From 8 MiB of K and V on, 2 to 4 rows of bfloat16 have a kernel of their own on the CPU, and with AVX2 1 to 4 of
    any type, of float32 up to 8."""
    head_dim = HEAD_DIMS[(LONG.index((kind, dtype)) + rows) % 7]
    keys = 2**23 // (2 * dtype.itemsize * head_dim) + 37
    heads, queries = (rows, 1) if kind == "grouped" else (1, rows)
    mask = {"bool": ("holes", "B11S"), "bias": ("float", "1H1S")}.get(kind)
    inputs = kernel_target.inputs(1, heads, queries, keys, head_dim, heads_k=1, dtype=dtype, mask=mask)
    options = {"is_causal": True, "window": (keys - 100, 0), "alignment": "bottom_right"} if kind == "window" else {}
    kernel_target.check(inputs, enable_gqa=True, **options)


@pytest.mark.parametrize(**in_turn(rows=[1, 3, 5, 6, 7, 8, 12, 16], dtype=[torch.float32, torch.bfloat16]), ids=str)
def test_heads_side_by_side(kernel_target, rows, dtype):
    """Where a token's heads lie side by side, up to ten rows of float32 and eight of 16 bits read several of them
    together on a CPU with AVX2, from 8 MiB of K and V on; sooner, or with more rows, a head after the other."""
    head_dim = HEAD_DIMS[rows % 7]
    keys = 2**23 // (2 * dtype.itemsize * head_dim * 3) + 37
    inputs = kernel_target.inputs(1, 3 * rows, 1, keys, head_dim, heads_k=3, dtype=dtype, layout="blhd")
    kernel_target.check(inputs, enable_gqa=True)


SHARED_CACHES = list(product(["heads", "tokens", "pages"], [128, 96, 256, 64]))


@pytest.mark.parametrize(
    **in_turn(**{"kind, head_dim": SHARED_CACHES}, dtype=[torch.bfloat16, torch.float32], rows=[8, 5, 3, 6, 7, 4]),
    ids=str,
)
def test_sequences_share_a_cache_of_64_mib(kind, head_dim, rows, dtype):
    """As many bytes as make five to eight rows of bfloat16 take turns, too. Sequences that see the same keys count them
    once each: so there are few keys, and the expected result is that of one sequence with all queries."""
    sequences, heads_k = 64, 2
    keys = 2**26 // (sequences * heads_k * 2 * head_dim * dtype.itemsize) + 37
    torch.manual_seed(0)
    query = torch.randn(sequences, heads_k * rows, 1, head_dim, dtype=dtype)
    key, value = torch.randn(2, 1, heads_k, keys, head_dim, dtype=dtype)
    alone = query.unflatten(1, (heads_k, rows)).transpose(0, 1).reshape(1, heads_k, sequences * rows, head_dim)
    want = testing.expected(alone, key, value)
    pages = {}
    if kind == "tokens":
        key, value = (testing.with_layout(x, "blhd") for x in (key, value))
    if kind == "pages":
        padded = torch.nn.functional.pad(torch.cat((key, value)), (0, 0, 0, -keys % 64))
        key, value = padded.unflatten(2, (-1, 64)).transpose(1, 2).contiguous()
        pages["block_table"] = torch.arange(key.size(0), dtype=torch.int32).expand(sequences, -1).contiguous()
        pages["key_ranges"] = torch.tensor([[[0, keys]]], dtype=torch.int32)
    else:
        key, value = (x.expand(sequences, -1, -1, -1) for x in (key, value))
    out, lse = attnkern.attention(query, key, value, enable_gqa=True, return_lse=True, backend="cpu", **pages)
    for name, result in {"out": out, "lse": lse}.items():
        of_heads = result.unflatten(1, (heads_k, rows)).transpose(0, 1)
        want[name].check(of_heads.reshape(1, heads_k, sequences * rows, *result.shape[3:]), name=name)
