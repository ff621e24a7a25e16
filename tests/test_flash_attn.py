"""attnkern.flash_attn: what flash_attn's functions mean, sequence by sequence in float64, and what they refuse."""

import functools
import inspect
import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attnkern import flash_attn
from attnkern.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from attnkern.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from attnkern.flash_attn.layers.rotary import apply_rotary_emb
from matrix import in_turn
from sequences import ends

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
DTYPES = list(TOLERANCE)


def may_see(i, j, seqlen_q, seqlen_k, causal=False, window_size=(-1, -1)):
    """The last query stands beside the last key."""
    place = i + seqlen_k - seqlen_q
    left, right = window_size
    return not ((causal and j > place) or (left >= 0 and j < place - left) or (0 <= right < j - place))


def expected(q, k, v, slopes=None, softmax_scale=None, softcap=0.0, **band):
    """out (Lq, H, D) and lse (H, Lq) of one sequence's q (Lq, H, D), k (Lk, Hk, D) and v, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    (seqlen_q, heads, size), seqlen_k = q.shape, k.shape[0]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (size**-0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
    place = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (place - torch.arange(seqlen_k)).abs()
    seen = [[may_see(i, j, seqlen_q, seqlen_k, **band) for j in range(seqlen_k)] for i in range(seqlen_q)]
    seen = torch.tensor(seen, dtype=torch.bool).reshape(seqlen_q, seqlen_k)
    weights = scores.exp().where(seen, 0.0)
    total = weights.sum(-1)
    weights = weights / total.where(total > 0, 1.0)[..., None]
    return torch.einsum("hij,jhd->ihd", weights, v), total.log()


def check(out, want, dtype, rule=None):
    assert out.dtype == dtype
    tolerance = TOLERANCE[rule or dtype]
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


def check_lse(lse, want, dtype, rule=None):
    """It is computed in float32 or more, of inputs of 16 bits as they are."""
    check(lse, want, torch.promote_types(dtype, torch.float32), rule)


def check_grads(outputs, wants, leaves, dtype):
    """Gradients of leaves through outputs and through float64's."""
    weights = [torch.where(x.isinf(), 0.0, torch.randn_like(x)) for x in wants]
    loss = [(x.double().masked_fill(x.isinf(), 0.0) * w).sum() for x, w in zip(outputs, weights, strict=True)]
    grads = torch.autograd.grad(sum(loss), leaves)
    loss = [(x.masked_fill(x.isinf(), 0.0) * w).sum() for x, w in zip(wants, weights, strict=True)]
    for grad, want in zip(grads, torch.autograd.grad(sum(loss), leaves, materialize_grads=True), strict=True):
        torch.testing.assert_close(grad.double(), want.double(), atol=6 * TOLERANCE[dtype], rtol=6 * TOLERANCE[dtype])


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "left": {"window_size": (2, -1), "softcap": 2.5},
    "right": {"window_size": (-1, 0), "softmax_scale": 0.3},
    "causal window": {"causal": True, "window_size": (4, 2), "softcap": 1.5},
    "nothing": {"causal": True, "window_size": (0, 0)},
}
SLOPES = {"no slopes": None, "slopes": 1, "slopes of each": 2}
LENGTHS = {
    "alike": (9, 9),
    "decode": (1, 17),
    "few keys": (13, 4),
    "one": (1, 1),
    "no queries": (0, 5),
    "no keys": (5, 0),
}


def slopes_of(kind, batch, heads):
    shape = {None: None, 1: (heads,), 2: (batch, heads)}[SLOPES[kind]]
    return None if shape is None else torch.rand(shape)


def slopes_at(slopes, n):
    return slopes if slopes is None or slopes.dim() == 1 else slopes[n]


@pytest.mark.parametrize(
    **in_turn(**{"options, lengths, slopes": list(itertools.product(OPTIONS, LENGTHS, SLOPES))}, dtype=DTYPES), ids=str
)
def test_batches(options, lengths, slopes, dtype):
    (seqlen_q, seqlen_k), given = LENGTHS[lengths], OPTIONS[options]
    heads, heads_k, size = {"alike": (4, 2, 24), "decode": (6, 1, 40)}.get(lengths, (2, 2, 8))
    alibi = slopes_of(slopes, 2, heads)
    shapes = (2, seqlen_q, heads, size), (2, seqlen_k, heads_k, size), (2, seqlen_k, heads_k, size)
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    out, lse, s_dmask = flash_attn_func(*leaves, alibi_slopes=alibi, return_attn_probs=True, **given)
    assert s_dmask.shape == (0,)
    assert lse.shape == (2, heads, seqlen_q)
    assert torch.equal(flash_attn_func(*leaves, alibi_slopes=alibi, **given), out)
    wants = [expected(*(x[n] for x in leaves), slopes_at(alibi, n), **given) for n in range(2)]
    wants = [torch.stack(x) for x in zip(*wants, strict=True)]
    check(out, wants[0], dtype)
    check_lse(lse, wants[1], dtype)
    check_grads((out, lse), wants, leaves, dtype)


PACKED = {
    "alike": ([5, 1, 9, 0, 2], [5, 1, 9, 0, 2]),
    "decode": ([1, 1, 1], [7, 1, 12]),
    "few keys": ([6, 0, 4, 3], [2, 3, 0, 5]),
    "none": ([], []),
}


@pytest.mark.parametrize(
    **in_turn(**{"options, lengths, slopes": list(itertools.product(OPTIONS, PACKED, SLOPES))}, dtype=DTYPES), ids=str
)
def test_packed_sequences(options, lengths, slopes, dtype):
    """Three tokens behind the last sequence are of none."""
    (of_q, of_k), given, heads = PACKED[lengths], OPTIONS[options], 4
    alibi = slopes_of(slopes, len(of_q), heads)
    cu = ends(of_q), ends(of_k, torch.int64 if lengths == "decode" else torch.int32)
    if lengths == "decode":
        cu = cu[0].long(), cu[1]
    total_q, total_k = sum(of_q) + 3, sum(of_k) + 3
    shapes = (total_q, heads, 16), (total_k, 2, 16), (total_k, 2, 16)
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    arguments = *leaves, *cu, 0, 0
    out, lse, s_dmask = flash_attn_varlen_func(*arguments, alibi_slopes=alibi, return_attn_probs=True, **given)
    assert s_dmask.shape == (0,)
    assert torch.equal(flash_attn_varlen_func(*arguments, alibi_slopes=alibi, **given), out)
    parts = zip(*(x.split([*n, 3]) for x, n in zip(leaves, (of_q, of_k, of_k), strict=True)), strict=True)
    wants = [
        expected(*part, slopes_at(alibi, n), **given) if n < len(of_q) else (0 * part[0].double(), None)
        for n, part in enumerate(parts)
    ]
    want = torch.cat([x[0] for x in wants])
    want_lse = torch.cat([*(x[1] for x in wants[:-1]), torch.full((heads, 3), -math.inf).double()], 1)
    check(out, want, dtype)
    check_lse(lse, want_lse, dtype)
    check_grads((out, lse), (want, want_lse), leaves, dtype)


def rotated(x, cos, sin, positions, interleaved):
    """x (L, H, D), element by element."""
    out, half = x.double().clone(), cos.shape[1]
    for token, position in enumerate(positions):
        for n in range(half):
            a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + half)
            c, s = cos[position, n].double(), sin[position, n].double()
            out[token, :, a] = x[token, :, a].double() * c - x[token, :, b].double() * s
            out[token, :, b] = x[token, :, a].double() * s + x[token, :, b].double() * c
    return out


def angles(positions, half, dtype=torch.float32):
    x = torch.rand(positions, half) * 6
    return x.cos().to(dtype), x.sin().to(dtype)


CACHES = {
    "all of it": {"cache_seqlens": None, "new": 0},
    "int": {"cache_seqlens": 7, "new": 0},
    "int, new": {"cache_seqlens": 4, "new": 3},
    "lengths": {"cache_seqlens": [0, 5, 11], "new": 0},
    "lengths, new": {"cache_seqlens": [0, 5, 9], "new": 3},
    "first": {"cache_seqlens": 0, "new": 1},
    "padded": {"cache_seqlens": [4, 5, 9], "new": 2, "leftpad": [4, 0, 3]},
    "padded int": {"cache_seqlens": 6, "new": 0, "leftpad": [6, 0, 3]},
    "padded whole": {"cache_seqlens": None, "new": 0, "leftpad": [6, 0, 12]},
}


EXTRAS = {  # slopes, rotary, rows
    "plain": ("no slopes", None, None),
    "other rows": ("slopes", None, [3, 0, 4]),
    "halves": ("slopes of each", "halves", None),
    "interleaved": ("no slopes", "interleaved", [0, 2, 1]),
}
CACHED = [  # every dtype takes its turn
    (cache, options, seqlen_q, extra, DTYPES[(n + n // 4) % 4])
    for n, (cache, options, seqlen_q, extra) in enumerate(
        itertools.product(CACHES, ["plain", "causal", "causal window", "left"], [1, 3], EXTRAS)
    )
    if CACHES[cache]["new"] or EXTRAS[extra][1] is None  # turned are new keys
]


@pytest.mark.parametrize(("cache", "options", "seqlen_q", "extra", "dtype"), CACHED)
def test_caches(cache, options, seqlen_q, extra, dtype):
    slopes, rotary, rows = EXTRAS[extra]
    case, given, (batch, room, heads) = CACHES[cache], OPTIONS[options], (3, 12, 4)
    new = case["new"]
    alibi = slopes_of(slopes, batch, heads)
    q = torch.randn(batch, seqlen_q, heads, 16).to(dtype)
    k_cache, v_cache = torch.randn(2, 5, room, 2, 16).to(dtype)
    k, v = torch.randn(2, batch, new, 2, 16).to(dtype) if new else (None, None)
    seqlens = case["cache_seqlens"]
    before = [room if seqlens is None else seqlens] * batch if not isinstance(seqlens, list) else seqlens
    pads = case.get("leftpad", [0] * batch)
    more = {}
    if rotary:
        more = dict(zip(("rotary_cos", "rotary_sin"), angles(room, 4, dtype), strict=True))
        more["rotary_interleaved"] = rotary == "interleaved"
    wants, caches = [], [k_cache.clone(), v_cache.clone()]
    for n, (row, length, pad) in enumerate(zip(rows or range(batch), before, pads, strict=True)):
        query = q[n]
        if new:
            fresh = k[n]
            if more:
                tables = more["rotary_cos"], more["rotary_sin"]
                fresh = rotated(fresh, *tables, range(length, length + new), rotary == "interleaved").to(dtype)
                turns = range(length, length + seqlen_q) if given else [length] * seqlen_q
                query = rotated(query, *tables, turns, rotary == "interleaved").to(dtype)
            caches[0][row, length : length + new], caches[1][row, length : length + new] = fresh, v[n]
        keys, values = (x[row, pad : length + new] for x in caches)
        wants.append(expected(query, keys, values, slopes_at(alibi, n), **given))
    got = flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v),
        cache_seqlens=torch.tensor(seqlens, dtype=torch.int32) if isinstance(seqlens, list) else seqlens,
        cache_batch_idx=None if rows is None else torch.tensor(rows, dtype=torch.int32),
        cache_leftpad=torch.tensor(pads, dtype=torch.int32) if "leftpad" in case else None,
        alibi_slopes=alibi,
        return_softmax_lse=True,
        **more,
        **given,
    )
    check(got[0], torch.stack([x[0] for x in wants]), dtype)
    check_lse(got[1], torch.stack([x[1] for x in wants]), dtype, dtype if rotary else None)
    for cache, want in zip((k_cache, v_cache), caches, strict=True):
        torch.testing.assert_close(cache, want, atol=TOLERANCE[dtype] / 2, rtol=TOLERANCE[dtype] / 2)


def test_a_cache_gives_no_gradient():
    q = torch.randn(2, 1, 2, 8, requires_grad=True)
    cache = torch.zeros(2, 4, 2, 8)
    out = flash_attn_with_kvcache(q, cache, cache.clone(), q, q, cache_seqlens=0)
    assert isinstance(out, torch.Tensor)
    assert not out.requires_grad
    assert not cache.requires_grad
    assert torch.equal(cache[:, :1], q)
    assert not cache[:, 1:].any()


def test_one_graph_serves_a_growing_cache():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend=counter)
    q, k = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    caches, wants = ([torch.zeros(2, 9, 2, 8) for _ in range(2)] for _ in range(2))
    tables = angles(9, 4)
    for n in range(5):
        options = {"cache_seqlens": torch.tensor([n, n + 2], dtype=torch.int32), "causal": True}
        got = compiled(q, *caches, k, k, *tables, **options)
        torch.testing.assert_close(got, flash_attn_with_kvcache(q, *wants, k, k, *tables, **options))
        torch.testing.assert_close(caches, wants)
    assert counter.frame_count == 1


def of_lengths(q, k_cache, v_cache, k, lengths, rows):
    return flash_attn_with_kvcache(
        *(q, k_cache.clone(), v_cache.clone(), k, k),
        cache_seqlens=lengths,
        cache_batch_idx=rows,
        cache_leftpad=lengths // 2,
        causal=True,
    )


def of_one_length(q, k_cache, v_cache, slopes):
    return flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=3, alibi_slopes=slopes)


def of_pages(q, k_cache, v_cache, table):
    return flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=3, block_table=table)


def packed_in_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, table):
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, 1, 1, block_table=table)


def call_of_sizes(name, n):
    """A call in which one size or more is n."""
    batch, seqlen, rows, pages = n, 9, n, 3
    if name == "longer caches":
        batch, seqlen, rows = 2, n, 2
    elif name == "more rows":
        batch, rows = 2, n
    elif name == "more pages":
        batch, pages = 2, n
    q, k = torch.randn(batch, 1, 4, 8), torch.randn(batch, 1, 2, 8)
    caches = torch.randn(2, rows, seqlen, 2, 8).unbind()
    pool = torch.randn(2, pages, 16, 2, 8).unbind()
    table = torch.arange(batch * 2).view(batch, 2) % pages
    if name == "more pages":
        return of_pages, (q, *pool, table)
    if name == "packed":
        return packed_in_pages, (q[:, 0], *pool, torch.arange(batch + 1), torch.arange(batch + 1) * 5, table)
    if name == "slopes":
        return of_one_length, (q, *caches, torch.rand(batch, 4))
    return of_lengths, (q, *caches, k, torch.arange(batch) % 3, torch.arange(batch).flip(0))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["batches", "longer caches", "more rows", "more pages", "packed", "slopes"])
def test_a_second_graph_serves_all_sizes(name, dynamic):
    """The first may be one of its own sizes."""
    counter = CompileCounterWithBackend("eager")
    attend, _ = call_of_sizes(name, 3)
    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    for n in range(3, 8):
        _, arguments = call_of_sizes(name, n)
        torch.testing.assert_close(compiled(*arguments), attend(*arguments))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, [2, 0, 5]], ids=str)
def test_rotary(offsets, interleaved):
    x = torch.randn(3, 4, 2, 12, dtype=torch.float64, requires_grad=True)
    cos, sin = angles(9, 4, torch.float64)
    starts = offsets if isinstance(offsets, list) else [offsets] * 3
    given = torch.tensor(offsets) if isinstance(offsets, list) else offsets
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
    want = torch.stack([rotated(x[n], cos, sin, range(s, s + 4), interleaved) for n, s in enumerate(starts)])
    torch.testing.assert_close(out, want)
    (grad,), (want_grad,) = (torch.autograd.grad(y.square().sum() + y.sum(), x) for y in (out, want))
    torch.testing.assert_close(grad, want_grad)
    changed = x.detach().clone()
    assert apply_rotary_emb(changed, cos, sin, interleaved, True, given) is changed
    torch.testing.assert_close(changed, want)
    # Packed: 4, 0 and 2 tokens, and two that are of none.
    tokens = x.detach().flatten(0, 1)[:8]
    got = apply_rotary_emb(tokens, cos, sin, interleaved, False, given, ends([4, 0, 2]), 4)
    places = [*range(starts[0], starts[0] + 4), *range(starts[2], starts[2] + 2)]
    torch.testing.assert_close(got, torch.cat([rotated(tokens[:6], cos, sin, places, interleaved), tokens[6:]]))


def test_padding_and_back():
    x = torch.randn(3, 5, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0] * 5, [0, 1, 1, 0, 1]])
    for kind in (mask, mask.bool()):
        tokens, indices, cu_seqlens, longest, used = unpad_input(x, kind)
        assert torch.equal(tokens, x[kind.bool()])
        assert indices.tolist() == [0, 1, 11, 12, 14]
        assert cu_seqlens.tolist() == [0, 2, 2, 5]
        assert cu_seqlens.dtype == used.dtype == torch.int32
        assert (longest, used.tolist()) == (3, [2, 0, 3])
        assert torch.equal(index_first_axis(x.flatten(0, 1), indices), tokens)
        padded = pad_input(tokens, indices, 3, 5)
        assert torch.equal(padded, x * mask[..., None])
        (grad,) = torch.autograd.grad(padded.sum(), x)
        assert torch.equal(grad, mask[..., None].expand_as(x).float())
    *_, cu_seqlens, longest, used = unpad_input(x, mask, torch.tensor([[0, 0, 1, 1, 1], [1, 0, 0, 0, 0], [0] * 5]))
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 5, 6, 9], 5, [2, 0, 3])
    # A token of both masks, and one that a number above 1 marks, are one token.
    tokens, *_, cu_seqlens, longest, used = unpad_input(x, 2 * mask, torch.ones_like(mask))
    assert (len(tokens), cu_seqlens.tolist(), longest, used.tolist()) == (15, [0, 5, 10, 15], 5, [2, 0, 3])


def test_packed_arguments_are_slices():
    qkv = torch.randn(2, 7, 3, 4, 16, requires_grad=True)
    options = {"causal": True, "softcap": 2.0, "alibi_slopes": torch.rand(4), "return_attn_probs": True}
    q, k, v = qkv.unbind(2)
    want = flash_attn_func(q, k, v, **options)
    for got in (
        flash_attn_qkvpacked_func(qkv, **options),
        flash_attn_kvpacked_func(q, qkv[:, :, 1:], **options),
    ):
        assert all(map(torch.equal, got, want))
    tokens, cu = qkv.flatten(0, 1), ends([7, 7])
    q, k, v = tokens.unbind(1)
    varlen = flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, **options)
    torch.testing.assert_close(varlen[0], want[0].flatten(0, 1))
    torch.testing.assert_close(varlen[1], want[1].transpose(0, 1).flatten(1))
    for got in (
        flash_attn_varlen_qkvpacked_func(tokens, cu, 7, **options),
        flash_attn_varlen_kvpacked_func(q, tokens[:, 1:], cu, cu, 7, 7, **options),
    ):
        assert all(map(torch.equal, got, varlen))
    (grad,) = torch.autograd.grad(flash_attn_qkvpacked_func(qkv, causal=True).sum(), qkv)
    assert grad.shape == qkv.shape


@pytest.mark.parametrize("lengths", [([6, 6], [6, 6]), ([3, 0, 5], [4, 2, 5])])
def test_dropped_weights(lengths):
    """S_dmask says which weights were dropped: the rest, scaled up, makes the output."""
    torch.manual_seed(0)
    of_q, of_k = lengths
    q, k = torch.randn(sum(of_q), 4, 8), torch.randn(sum(of_k), 2, 8)
    options = {"dropout_p": 0.5, "causal": True, "alibi_slopes": torch.rand(4)}
    most = max(of_q), max(of_k)
    cu = ends(of_q), ends(of_k)
    out, lse, s_dmask = flash_attn_varlen_func(q, k, k, *cu, *most, return_attn_probs=True, **options)
    assert s_dmask.shape == (len(of_q), 4, *most)
    for n, (a, b, rows, mask) in enumerate(zip(q.split(of_q), k.split(of_k), out.split(of_q), s_dmask, strict=True)):
        mask = mask[:, : of_q[n], : of_k[n]]
        torch.testing.assert_close(mask.abs().sum(), s_dmask[n].abs().sum())
        values = b.repeat_interleave(2, 1)
        torch.testing.assert_close(torch.einsum("hij,jhd->ihd", 2 * mask.clamp(min=0), values), rows)
        want, want_lse = expected(a, b, b, options["alibi_slopes"], causal=True)
        torch.testing.assert_close(
            torch.einsum("hij,jhd->ihd", mask.abs(), values).double(), want, atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(lse.split(of_q, 1)[n].double(), want_lse, atol=1e-5, rtol=1e-5)
    assert 0.2 < (s_dmask < 0).sum() / (s_dmask != 0).sum() < 0.8
    outs = []
    for _ in range(2):
        torch.manual_seed(1)
        outs.append(flash_attn_varlen_func(q, k, k, *cu, *most, **options))
    assert torch.equal(*outs)
    if of_q == of_k:
        a, b = (x.unflatten(0, (2, 6)) for x in (q, k))
        out, _, s_dmask = flash_attn_func(a, b, b, return_attn_probs=True, **options)
        assert s_dmask.shape == (2, 4, 6, 6)
        kept = 2 * s_dmask.clamp(min=0)
        torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", kept, b.repeat_interleave(2, 2)), out)


def test_slopes_get_no_gradient():
    slopes = torch.rand(2, requires_grad=True)
    q = torch.randn(1, 4, 2, 8)
    assert not flash_attn_func(q, q, q, alibi_slopes=slopes).requires_grad
    assert not flash_attn_func(q.half(), q.half(), q.half(), causal=True, alibi_slopes=slopes).requires_grad


WITH_SLOPES = [
    "flash_attn_func(q, k, v, alibi_slopes=slopes)",
    "flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes[None])",
    "flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), window_size=(99, 9), alibi_slopes=slopes)",
    "flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 2)[0], cu, 0, alibi_slopes=slopes)",
    "flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 0, 0, causal=True, alibi_slopes=slopes)",
    "flash_attn_with_kvcache(q.detach(), k, v, cache_seqlens=k.shape[1], causal=True, alibi_slopes=slopes)",
    # No table: of slopes of each, causal and of 16 bits, one row.
    "flash_attn_varlen_func(*(x[0].bfloat16() for x in (q, k, v)), cu, cu, 0, 0, causal=True, alibi_slopes=each)",
]
PEAKS = """
import json, os, resource, sys, torch
from attnkern.flash_attn import *
torch.set_num_threads(1)
slopes, each = torch.rand(2), torch.rand(2, 2)
def run(call, n):
    q, k, v = (torch.randn(1, n, 2, 16).requires_grad_() for _ in range(3))
    cu = torch.tensor([0, n // 3, n], dtype=torch.int32)
    out = eval(call)
    if out.requires_grad:
        out.sum().backward()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for call in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        run(call, 64)
        before = peak()
        run(call, 8192)
        print(peak() - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@functools.cache
def memory_with_slopes():
    """Bytes by call, each measured in a process of its own, which comes from one that has imported all."""
    command = [sys.executable, "-c", PEAKS, json.dumps(WITH_SLOPES)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(WITH_SLOPES, map(int, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("call", WITH_SLOPES)
def test_slopes_take_no_square(call):
    """Neither pass holds an Lq x Lk."""
    assert memory_with_slopes()[call] < 32e6  # 2 x 8192 x 8192 numbers are 537e6 bytes


GRAPHS = {  # whether sizes are symbols from the first call on, and lengths
    "one total": (None, [[5, 7, 8], [1, 0, 19], [20, 0, 0], [3, 4, 5]]),
    "all totals": (True, [[5, 7, 8], [1, 30, 19], [20, 40, 2], [3, 4, 5]]),
}


@pytest.mark.parametrize(("lengths", "alibi"), [("one total", True), ("all totals", False), ("all totals", True)])
def test_one_graph_serves_all_lengths(lengths, alibi):
    counter = CompileCounterWithBackend("aot_eager")
    dynamic, batches = GRAPHS[lengths]

    def attend(q, k, v, cu_seqlens, longest, slopes):
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True, alibi_slopes=slopes
        )

    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    slopes = torch.rand(2) if alibi else None
    for batch in batches:
        tokens = sum(batch) if dynamic else 20
        q, k, v = (torch.randn(tokens, 2, 8, requires_grad=True) for _ in range(3))
        results = []
        for function in (compiled, attend):
            out = function(q, k, v, ends(batch), max(batch), slopes)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


def test_one_graph_of_batches():
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend=counter)
    for seqlen in (5, 9, 12, 30):
        q = torch.randn(2, seqlen, 4, 8)
        torch.testing.assert_close(compiled(q, q, q, causal=True), flash_attn_func(q, q, q, causal=True))
    assert counter.frame_count <= 2


def test_signatures():
    """Names and order of flash_attn 2.8, defaults but for 0 and 0.0."""
    options = {
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
    }
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    for function, tensors, more in (
        (flash_attn_func, "q k v", {}),
        (flash_attn_kvpacked_func, "q kv", {}),
        (flash_attn_qkvpacked_func, "qkv", {}),
        (flash_attn_varlen_func, f"q k v {lengths}", {"block_table": None}),
        (flash_attn_varlen_kvpacked_func, f"q kv {lengths}", {}),
        (flash_attn_varlen_qkvpacked_func, "qkv cu_seqlens max_seqlen", {}),
    ):
        want = {**dict.fromkeys(tensors.split(), inspect.Parameter.empty), **options, **more}
        found = {name: x.default for name, x in inspect.signature(function).parameters.items()}
        assert found == want
        assert list(found) == list(want)


def test_softcap_below_zero_is_off():
    q = torch.randn(1, 5, 2, 8)
    assert torch.equal(flash_attn_func(q, q, q, softcap=-1.0), flash_attn_func(q, q, q))


def test_version():
    assert flash_attn.__version__.startswith("2.8.")
