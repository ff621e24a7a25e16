"""attnkern.flash_attn refuses what doesn't fit in one sentence, by flash_attn's own names of arguments."""

import math
import re

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

Q, CU = torch.randn(2, 5, 4, 8), torch.tensor([0, 5, 10], dtype=torch.int32)
T = Q.flatten(0, 1)
SLOPE, COS = torch.rand(4), torch.rand(6, 4)
BAD = {
    "no tensor": (flash_attn_func, (None, Q, Q), {}, TypeError, "argument 'q' must be Tensor, not NoneType"),
    "list": (flash_attn_func, (Q, [1], Q), {}, TypeError, "argument 'k' must be Tensor, not list"),
    "packed": (
        flash_attn_func,
        (T, T, T),
        {},
        RuntimeError,
        "q must have the shape (batch_size, seqlen, nheads, headdim)",
    ),
    "padded": (
        flash_attn_varlen_func,
        (Q, Q, Q, CU, CU, 5, 5),
        {},
        RuntimeError,
        "q must have the shape (total, nheads, headdim), got (2, 5, 4, 8)",
    ),
    "batch": (flash_attn_func, (Q, Q[:1], Q[:1]), {}, RuntimeError, "k must have q's batch_size 2, got 1"),
    "head size": (flash_attn_func, (Q, Q[..., :4], Q), {}, RuntimeError, "k must have q's headdim 8, got 4"),
    "values": (
        flash_attn_func,
        (Q, Q, Q[:, :4]),
        {},
        RuntimeError,
        "v must have k's shape (2, 5, 4, 8) but for headdim",
    ),
    "heads": (
        flash_attn_func,
        (Q, Q[:, :, :3], Q[:, :, :3]),
        {},
        RuntimeError,
        "k's nheads_k must divide q's nheads 4, got 3",
    ),
    "heads of v": (flash_attn_func, (Q, Q, Q[:, :, :1]), {}, RuntimeError, "v must have k's shape"),
    "dtype": (flash_attn_func, (Q, Q.half(), Q), {}, RuntimeError, "k must have q's dtype and device, float32 and cpu"),
    "device": (flash_attn_func, (Q, Q, Q.to("meta")), {}, RuntimeError, "v must have q's dtype and device"),
    "integers": (flash_attn_func, (Q.int(),) * 3, {}, RuntimeError, "q must be float32, float64"),
    "kv": (flash_attn_kvpacked_func, (Q, Q), {}, RuntimeError, "kv must have the shape (batch_size, seqlen, 2,"),
    "kv heads": (
        flash_attn_kvpacked_func,
        (Q, Q[:, :, None, :3].expand(2, 5, 2, 3, 8)),
        {},
        RuntimeError,
        "kv's nheads_k",
    ),
    "qkv": (flash_attn_qkvpacked_func, (Q,), {}, RuntimeError, "qkv must have the shape (batch_size, seqlen, 3,"),
    "qkv integers": (
        flash_attn_qkvpacked_func,
        (Q.int()[:, :, None].expand(-1, -1, 3, -1, -1),),
        {},
        RuntimeError,
        "qkv",
    ),
    "qkv tokens": (
        flash_attn_varlen_qkvpacked_func,
        (T, CU, 5),
        {},
        RuntimeError,
        "qkv must have the shape (total, 3,",
    ),
    "causal": (flash_attn_func, (Q, Q, Q), {"causal": 1}, TypeError, "argument 'causal' must be bool, not int"),
    "window": (flash_attn_func, (Q, Q, Q), {"window_size": 3}, TypeError, "argument 'window_size' must be two ints"),
    "window of one": (flash_attn_func, (Q, Q, Q), {"window_size": (3,)}, TypeError, "argument 'window_size'"),
    "window of none": (flash_attn_func, (Q, Q, Q), {"window_size": (None, 0)}, TypeError, "argument 'window_size'"),
    "scale": (flash_attn_func, (Q, Q, Q), {"softmax_scale": "1"}, TypeError, "argument 'softmax_scale' must be float"),
    "scale inf": (
        flash_attn_func,
        (Q, Q, Q),
        {"softmax_scale": math.inf},
        ValueError,
        "softmax_scale must be a finite",
    ),
    "softcap": (flash_attn_func, (Q, Q, Q), {"softcap": "1"}, TypeError, "argument 'softcap' must be float, not str"),
    "softcap nan": (flash_attn_func, (Q, Q, Q), {"softcap": math.nan}, ValueError, "softcap must be from"),
    "dropout": (
        flash_attn_func,
        (Q, Q, Q),
        {"dropout_p": 2.0},
        RuntimeError,
        "dropout_p must be between 0 and 1, got 2.0",
    ),
    "slopes": (flash_attn_func, (Q, Q, Q), {"alibi_slopes": 0.5}, TypeError, "argument 'alibi_slopes' must be Tensor"),
    "slopes' shape": (
        flash_attn_func,
        (Q, Q, Q),
        {"alibi_slopes": torch.rand(3)},
        RuntimeError,
        "alibi_slopes must have the shape (nheads,) or (batch_size, nheads), here (4,) or (2, 4), got (3,)",
    ),
    "slopes' dtype": (
        flash_attn_func,
        (Q, Q, Q),
        {"alibi_slopes": SLOPE.half()},
        RuntimeError,
        "alibi_slopes must be float32",
    ),
    "slopes' device": (
        flash_attn_func,
        (Q, Q, Q),
        {"alibi_slopes": SLOPE.to("meta")},
        RuntimeError,
        "alibi_slopes must be on",
    ),
    "ends": (flash_attn_varlen_func, (T, T, T, CU + 1, CU, 5, 5), {}, RuntimeError, "cu_seqlens_q must begin with 0"),
    "more keys": (
        flash_attn_varlen_func,
        (T, T, T, CU, CU * 2, 5, 5),
        {},
        RuntimeError,
        "cu_seqlens_k must begin with 0",
    ),
    "other ends": (
        flash_attn_varlen_func,
        (T, T, T, CU, CU[:2], 5, 5),
        {},
        RuntimeError,
        "cu_seqlens_k must have the shape",
    ),
    "float ends": (
        flash_attn_varlen_func,
        (T, T, T, CU.float(), CU, 5, 5),
        {},
        RuntimeError,
        "cu_seqlens_q must be int32",
    ),
    "ends' device": (
        flash_attn_varlen_func,
        (T, T, T, CU, CU.to("meta"), 5, 5),
        {},
        RuntimeError,
        "cu_seqlens_k must be on q's",
    ),
    "no ends": (
        flash_attn_varlen_func,
        (T, T, T, None, CU, 5, 5),
        {},
        TypeError,
        "argument 'cu_seqlens_q' must be Tensor",
    ),
    "packed ends": (
        flash_attn_varlen_qkvpacked_func,
        (T[:, None].expand(-1, 3, -1, -1), CU + 1, 5),
        {},
        RuntimeError,
        "cu_seqlens must",
    ),
    "v alone": (
        flash_attn_with_kvcache,
        (Q, Q, Q, None, Q),
        {},
        RuntimeError,
        "k and v must be given together, got v alone",
    ),
    "no lengths": (
        flash_attn_with_kvcache,
        (Q, Q, Q, Q, Q),
        {},
        RuntimeError,
        "cache_seqlens must be given beside k and v",
    ),
    "full": (
        flash_attn_with_kvcache,
        (Q, Q, Q, Q, Q),
        {"cache_seqlens": 1},
        RuntimeError,
        "cache_seqlens must be from 0 to what k_cache has room for beside 5 new tokens, 0, got 1",
    ),
    "full for one": (
        flash_attn_with_kvcache,
        (Q, Q, Q, Q[:, :1], Q[:, :1]),
        {"cache_seqlens": torch.tensor([4, 5])},
        RuntimeError,
        "cache_seqlens must be from 0 to what k_cache has room for beside 1 new tokens, 4, got 5",
    ),
    "lengths' type": (
        flash_attn_with_kvcache,
        (Q, Q, Q),
        {"cache_seqlens": 1.0},
        TypeError,
        "argument 'cache_seqlens'",
    ),
    "lengths' shape": (
        flash_attn_with_kvcache,
        (Q, Q, Q),
        {"cache_seqlens": CU},
        RuntimeError,
        "cache_seqlens must have the",
    ),
    "lengths' dtype": (
        flash_attn_with_kvcache,
        (Q, Q, Q),
        {"cache_seqlens": torch.ones(2)},
        RuntimeError,
        "cache_seqlens must be int32 or int64, got float32",
    ),
    "rows": (
        flash_attn_with_kvcache,
        (Q, Q, Q),
        {"cache_batch_idx": torch.tensor([0, 2])},
        RuntimeError,
        "cache_batch_idx must be from 0 to k_cache's last row, 1, got 2",
    ),
    "rows' type": (
        flash_attn_with_kvcache,
        (Q, Q, Q),
        {"cache_batch_idx": [0, 1]},
        TypeError,
        "argument 'cache_batch_idx'",
    ),
    "leftpad": (
        flash_attn_with_kvcache,
        (Q, Q, Q),
        {"cache_seqlens": 3, "cache_leftpad": torch.tensor([0, 4])},
        RuntimeError,
        "cache_leftpad must be from 0 to cache_seqlens, got 4",
    ),
    "small cache": (
        flash_attn_with_kvcache,
        (Q, Q[:1], Q[:1]),
        {},
        RuntimeError,
        "k_cache must have q's batch_size 2 or more",
    ),
    "caches": (
        flash_attn_with_kvcache,
        (Q, Q, Q[:1]),
        {},
        RuntimeError,
        "v_cache must have k_cache's batch_size 2, got 1",
    ),
    "cache's heads": (
        flash_attn_with_kvcache,
        (Q, Q[:, :, :3], Q[:, :, :3]),
        {},
        RuntimeError,
        "k_cache's nheads_k must divide",
    ),
    "new heads": (
        flash_attn_with_kvcache,
        (Q, Q[:, :, :2], Q[:, :, :2], Q, Q),
        {"cache_seqlens": 0},
        RuntimeError,
        "k must have k_cache's nheads_k, headdim and dtype, (2, 8) float32, got (4, 8) float32",
    ),
    "cos alone": (
        flash_attn_with_kvcache,
        (Q, Q, Q, Q, Q, COS),
        {"cache_seqlens": 0},
        RuntimeError,
        "rotary_cos and rotary_sin must be given together, got rotary_cos alone",
    ),
    "nothing to turn": (
        flash_attn_with_kvcache,
        (Q, Q, Q, None, None, COS, COS),
        {},
        RuntimeError,
        "rotary_cos and rotary_sin must come",
    ),
    "few angles": (
        flash_attn_with_kvcache,
        (Q, Q, Q, Q, Q, COS[:4], COS[:4]),
        {"cache_seqlens": 0},
        RuntimeError,
        "rotary_cos must have a row for each of k_cache's 5 tokens, got 4",
    ),
    "angles": (
        flash_attn_with_kvcache,
        (Q, Q, Q, Q, Q, COS, COS[:, :2]),
        {"cache_seqlens": 0},
        RuntimeError,
        "rotary_cos and rotary_sin must have one shape",
    ),
    "pages of a cache": (
        flash_attn_with_kvcache,
        (Q, Q, Q),
        {"block_table": CU},
        NotImplementedError,
        "block_table must be None",
    ),
    "far": (
        apply_rotary_emb,
        (Q, COS, COS),
        {"seqlen_offsets": 4},
        RuntimeError,
        "cos and sin must have a row for each position",
    ),
    "offsets": (apply_rotary_emb, (Q, COS, COS), {"seqlen_offsets": 1.5}, TypeError, "argument 'seqlen_offsets'"),
    "turned tokens": (apply_rotary_emb, (T, COS, COS), {}, RuntimeError, "x must have the shape (batch_size, seqlen,"),
    "wide": (apply_rotary_emb, (Q, COS.repeat(1, 2), COS.repeat(1, 2)), {}, RuntimeError, "with rotary_dim at most 8"),
    "mask": (
        unpad_input,
        (Q, torch.ones(2, 4)),
        {},
        RuntimeError,
        "attention_mask must have the shape (2, 5), got (2, 4)",
    ),
    "indices": (pad_input, (T, torch.arange(3), 2, 5), {}, RuntimeError, "indices must have the shape (total,)"),
    "pages": (
        flash_attn_varlen_func,
        (T, T, T, CU, CU, 5, 5),
        {"block_table": CU},
        NotImplementedError,
        "block_table must be None",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals(case):
    function, arguments, options, error, message = BAD[case]
    with pytest.raises(error, match=f"^attnkern: .*{re.escape(message)}") as raised:
        function(*arguments, **options)
    assert raised.type is error
    assert "\n" not in str(raised.value)
