"""attnkern.flash_attn refuses what doesn't fit in one sentence, by flash_attn's own names of arguments."""

import math

import pytest
import torch

from attnkern.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from attnkern.flash_attn.bert_padding import pad_input, unpad_input
from attnkern.flash_attn.layers.rotary import apply_rotary_emb
from bad_calls import bad, check_refused, refused

Q, CU = torch.randn(2, 5, 4, 8), torch.tensor([0, 5, 10], dtype=torch.int32)
T = Q.flatten(0, 1)
SLOPE, COS, PAGES = torch.rand(4), torch.rand(6, 4), torch.zeros(3, 16, 2, 8)
dense, packed, cached = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
BAD = [
    bad("argument 'q' must be Tensor, not NoneType", lambda: dense(None, Q, Q), TypeError),
    bad("argument 'k' must be Tensor, not list", lambda: dense(Q, [1], Q), TypeError),
    bad("q must have the shape (batch_size, seqlen, nheads, headdim)", lambda: dense(T, T, T)),
    bad("q must have the shape (total, nheads, headdim), got (2, 5, 4, 8)", lambda: packed(Q, Q, Q, CU, CU, 5, 5)),
    bad("k must have q's batch_size 2, got 1", lambda: dense(Q, Q[:1], Q[:1])),
    bad("k must have q's headdim 8, got 4", lambda: dense(Q, Q[..., :4], Q)),
    bad("v must have k's shape (2, 5, 4, 8) but for headdim", lambda: dense(Q, Q, Q[:, :4])),
    bad("k's nheads_k must divide q's nheads 4, got 3", lambda: dense(Q, Q[:, :, :3], Q[:, :, :3])),
    bad("v must have k's shape", lambda: dense(Q, Q, Q[:, :, :1])),
    bad("k must have q's dtype and device, float32 and cpu", lambda: dense(Q, Q.half(), Q)),
    bad("v must have q's dtype and device", lambda: dense(Q, Q, Q.to("meta"))),
    bad("q must be float32, float64", lambda: dense(Q.int(), Q.int(), Q.int())),
    bad("kv must have the shape (batch_size, seqlen, 2,", lambda: flash_attn_kvpacked_func(Q, Q)),
    bad("kv's nheads_k", lambda: flash_attn_kvpacked_func(Q, Q[:, :, None, :3].expand(2, 5, 2, 3, 8))),
    bad("qkv must have the shape (batch_size, seqlen, 3,", lambda: flash_attn_qkvpacked_func(Q)),
    bad("qkv", lambda: flash_attn_qkvpacked_func(Q.int()[:, :, None].expand(-1, -1, 3, -1, -1))),
    bad("qkv must have the shape (total, 3,", lambda: flash_attn_varlen_qkvpacked_func(T, CU, 5)),
    bad("argument 'causal' must be bool, not int", lambda: dense(Q, Q, Q, causal=1), TypeError),
    bad("argument 'window_size' must be two ints", lambda: dense(Q, Q, Q, window_size=3), TypeError),
    bad("argument 'window_size'", lambda: dense(Q, Q, Q, window_size=(3,)), TypeError),
    bad("argument 'window_size'", lambda: dense(Q, Q, Q, window_size=(None, 0)), TypeError),
    bad("argument 'softmax_scale' must be float", lambda: dense(Q, Q, Q, softmax_scale="1"), TypeError),
    bad("softmax_scale must be a finite", lambda: dense(Q, Q, Q, softmax_scale=math.inf), ValueError),
    bad("argument 'softcap' must be float, not str", lambda: dense(Q, Q, Q, softcap="1"), TypeError),
    bad("softcap must be from", lambda: dense(Q, Q, Q, softcap=math.nan), ValueError),
    bad("dropout_p must be between 0 and 1, got 2.0", lambda: dense(Q, Q, Q, dropout_p=2.0)),
    bad("argument 'alibi_slopes' must be Tensor", lambda: dense(Q, Q, Q, alibi_slopes=0.5), TypeError),
    bad(
        "alibi_slopes must have the shape (nheads,) or (batch_size, nheads), here (4,) or (2, 4), got (3,)",
        lambda: dense(Q, Q, Q, alibi_slopes=torch.rand(3)),
    ),
    bad("alibi_slopes must be float32", lambda: dense(Q, Q, Q, alibi_slopes=SLOPE.half())),
    bad("alibi_slopes must be on", lambda: dense(Q, Q, Q, alibi_slopes=SLOPE.to("meta"))),
    bad("cu_seqlens_q must begin with 0", lambda: packed(T, T, T, CU + 1, CU, 5, 5)),
    bad("cu_seqlens_k must begin with 0", lambda: packed(T, T, T, CU, CU * 2, 5, 5)),
    bad("cu_seqlens_k must have the shape", lambda: packed(T, T, T, CU, CU[:2], 5, 5)),
    bad("cu_seqlens_q must be int32", lambda: packed(T, T, T, CU.float(), CU, 5, 5)),
    bad("cu_seqlens_k must be on q's", lambda: packed(T, T, T, CU, CU.to("meta"), 5, 5)),
    bad("argument 'cu_seqlens_q' must be Tensor", lambda: packed(T, T, T, None, CU, 5, 5), TypeError),
    bad("cu_seqlens must", lambda: flash_attn_varlen_qkvpacked_func(T[:, None].expand(-1, 3, -1, -1), CU + 1, 5)),
    bad("k and v must be given together, got v alone", lambda: cached(Q, Q, Q, None, Q)),
    bad("cache_seqlens must be given beside k and v", lambda: cached(Q, Q, Q, Q, Q)),
    bad(
        "cache_seqlens must be from 0 to what k_cache has room for beside 5 new tokens, 0, got 1",
        lambda: cached(Q, Q, Q, Q, Q, cache_seqlens=1),
    ),
    bad(
        "cache_seqlens must be from 0 to what k_cache has room for beside 1 new tokens, 4, got 5",
        lambda: cached(Q, Q, Q, Q[:, :1], Q[:, :1], cache_seqlens=torch.tensor([4, 5])),
    ),
    bad("argument 'cache_seqlens'", lambda: cached(Q, Q, Q, cache_seqlens=1.0), TypeError),
    bad("cache_seqlens must have the", lambda: cached(Q, Q, Q, cache_seqlens=CU)),
    bad("cache_seqlens must be int32 or int64, got float32", lambda: cached(Q, Q, Q, cache_seqlens=torch.ones(2))),
    bad(
        "cache_batch_idx must be from 0 to k_cache's last row, 1, got 2",
        lambda: cached(Q, Q, Q, cache_batch_idx=torch.tensor([0, 2])),
    ),
    bad("argument 'cache_batch_idx'", lambda: cached(Q, Q, Q, cache_batch_idx=[0, 1]), TypeError),
    bad(
        "cache_leftpad must be from 0 to cache_seqlens, got 4",
        lambda: cached(Q, Q, Q, cache_seqlens=3, cache_leftpad=torch.tensor([0, 4])),
    ),
    bad("k_cache must have q's batch_size 2 or more", lambda: cached(Q, Q[:1], Q[:1])),
    bad("v_cache must have k_cache's batch_size 2, got 1", lambda: cached(Q, Q, Q[:1])),
    bad("v_cache must have k_cache's seqlen 5, got 4", lambda: cached(Q, Q, Q[:, :4])),
    bad("v_cache must have k_cache's nheads_k 4, got 2", lambda: cached(Q, Q, Q[:, :, :2])),
    bad("k_cache's nheads_k must divide", lambda: cached(Q, Q[:, :, :3], Q[:, :, :3])),
    bad(
        "k must have k_cache's nheads_k, headdim and dtype, (2, 8) float32, got (4, 8) float32",
        lambda: cached(Q, Q[:, :, :2], Q[:, :, :2], Q, Q, cache_seqlens=0),
    ),
    bad(
        "v_cache must have an element of its own for each place that v is written to, got an expanded tensor of",
        lambda: cached(Q, torch.zeros_like(Q), Q[:1].expand(2, -1, -1, -1), Q[:, :1], Q[:, :1], cache_seqlens=0),
    ),
    bad(
        "rotary_cos and rotary_sin must be given together, got rotary_cos alone",
        lambda: cached(Q, Q, Q, Q, Q, COS, cache_seqlens=0),
    ),
    bad("rotary_cos and rotary_sin must come", lambda: cached(Q, Q, Q, None, None, COS, COS)),
    bad(
        "rotary_cos must have a row for each of k_cache's 5 tokens, got 4",
        lambda: cached(Q, Q, Q, Q, Q, COS[:4], COS[:4], cache_seqlens=0),
    ),
    bad(
        "rotary_cos and rotary_sin must have one shape", lambda: cached(Q, Q, Q, Q, Q, COS, COS[:, :2], cache_seqlens=0)
    ),
    bad("block_table must have the shape (2, pages of a sequence)", lambda: cached(Q, Q, Q, block_table=CU)),
    bad(
        "cache_batch_idx must be None beside a block_table",
        lambda: cached(Q, Q, Q, block_table=CU[:2, None], cache_batch_idx=CU[:2]),
    ),
    bad("cos and sin must have a row for each position", lambda: apply_rotary_emb(Q, COS, COS, seqlen_offsets=4)),
    bad("argument 'seqlen_offsets'", lambda: apply_rotary_emb(Q, COS, COS, seqlen_offsets=1.5), TypeError),
    bad("argument 'interleaved' must be bool", lambda: apply_rotary_emb(Q, COS, COS, "no"), TypeError),
    bad("argument 'inplace' must be bool", lambda: apply_rotary_emb(Q, COS, COS, inplace=1), TypeError),
    bad("argument 'rotary_interleaved' must be bool", lambda: cached(Q, Q, Q, rotary_interleaved="no"), TypeError),
    bad("x must have the shape (batch_size, seqlen,", lambda: apply_rotary_emb(T, COS, COS)),
    bad("with rotary_dim at most 8", lambda: apply_rotary_emb(Q, COS.repeat(1, 2), COS.repeat(1, 2))),
    bad("attention_mask must have the shape (2, 5), got (2, 4)", lambda: unpad_input(Q, torch.ones(2, 4))),
    bad("attention_mask must be bool or integer, got float32", lambda: unpad_input(Q, torch.ones(2, 5))),
    bad("indices must have the shape (total,)", lambda: pad_input(T, torch.arange(3), 2, 5)),
    bad("'indices' must be Tensor, not list", lambda: pad_input(T, [0, 1], 2, 5), TypeError),
    bad("cache_seqlens must have the shape (2,), got ()", lambda: cached(Q, Q, Q, cache_seqlens=torch.tensor(3))),
    bad(
        "rotary_cos and rotary_sin must have a row for each position, of which these are 4 to 8, got 6 rows",
        lambda: cached(Q, Q.clone(), Q.clone(), Q[:, :1], Q[:, :1], COS, COS, cache_seqlens=4, causal=True),
    ),
    bad(
        "'max_seqlen_k' must be int, not NoneType",
        lambda: packed(T, T, T, CU, CU, 5, None, 0.1, return_attn_probs=True),
        TypeError,
    ),
    bad(
        "max_seqlen must be 0 or more, got -1",
        lambda: flash_attn_varlen_qkvpacked_func(T[:, None].expand(-1, 3, -1, -1), CU, -1, 0.1, return_attn_probs=True),
    ),
    bad(
        "k_cache's page_size must be a power of two from 16 on, got 12",
        lambda: cached(Q, PAGES[:, :12], PAGES[:, :12], cache_seqlens=1, block_table=CU[:2, None]),
    ),
    bad(
        "v_cache must have k_cache's num_pages 3, got 2",
        lambda: cached(Q, PAGES, PAGES[:2], cache_seqlens=1, block_table=CU[:2, None]),
    ),
    bad(
        "v_cache must have k_cache's page_size 16, got 8",
        lambda: cached(Q, PAGES, PAGES[:, :8], cache_seqlens=1, block_table=CU[:2, None]),
    ),
    bad(
        "k_cache must have a page or more",
        lambda: cached(Q, PAGES[:0], PAGES[:0], cache_seqlens=0, block_table=CU[:2, None]),
    ),
    bad(
        "k must have the shape (num_pages, page_size, nheads_k, headdim)",
        lambda: packed(T, T, T, CU, CU, 5, 5, block_table=CU),
    ),
    bad(
        "dropout_p must be 0 beside a block_table, got 0.1",
        lambda: packed(T, PAGES, PAGES, CU, CU, 5, 5, 0.1, block_table=CU[1:, None]),
    ),
    bad(
        "cu_seqlens_k must",
        lambda: packed(T, PAGES, PAGES, CU, CU * 8, 5, 5, block_table=CU[1:, None].expand(-1, 2)[:, :1]),
    ),
]


@refused(BAD)
def test_bad_calls(call, error, message):
    check_refused(call, error, message)


@pytest.mark.parametrize(
    "options",
    [{"softcap": math.nan}, {"softmax_scale": math.inf}, {"window_size": 3}, {"alibi_slopes": SLOPE[:3]}],
    ids=lambda x: str(next(iter(x))),
)
def test_a_call_that_is_refused_writes_nothing(options):
    caches = torch.zeros(2, 2, 9, 4, 8).unbind()
    with pytest.raises((TypeError, ValueError, RuntimeError), match=next(iter(options))):
        cached(Q, *caches, Q, Q, cache_seqlens=3, **options)
    assert not any(x.any() for x in caches)
