"""attnkern.flash_attn: what flash_attn's functions mean, sequence by sequence in float64, and what they refuse."""

import inspect
import itertools
import math
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attnkern
from attnkern import flash_attn
from attnkern.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

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


def check(out, want, dtype):
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def check_lse(lse, want, dtype):
    """It is computed in float32 or more, of inputs of 16 bits as they are."""
    exact = torch.promote_types(dtype, torch.float32)
    check(lse, want, exact)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slopes", SLOPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OPTIONS)
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


def ends(lengths, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


PACKED = {
    "alike": ([5, 1, 9, 0, 2], [5, 1, 9, 0, 2]),
    "decode": ([1, 1, 1], [7, 1, 12]),
    "few keys": ([6, 0, 4, 3], [2, 3, 0, 5]),
    "none": ([], []),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slopes", SLOPES)
@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("options", OPTIONS)
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
    torch.manual_seed(0)
    assert torch.equal(flash_attn_varlen_func(q, k, k, *cu, *most, **options), out) is False  # another seed was drawn
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


def test_slopes_of_causal_calls_take_no_square(monkeypatch):
    """Of 16 bits."""
    seen = []
    whole = attnkern.flash_attn.flash_attn_interface.attention
    module = attnkern.flash_attn.flash_attn_interface
    monkeypatch.setattr(module, "attention", lambda *a, **b: (seen.append(a[3].shape), whole(*a, **b))[1])
    q = torch.randn(2, 9, 4, 8, dtype=torch.bfloat16)
    flash_attn_func(q, q, q, causal=True, alibi_slopes=torch.rand(4))
    flash_attn_func(q, q, q, window_size=(3, 0), alibi_slopes=torch.rand(2, 4))
    flash_attn_func(q, q, q, alibi_slopes=torch.rand(4))
    assert seen == [(1, 4, 1, 9), (2, 4, 1, 9), (1, 4, 9, 9)]


def test_one_graph_serves_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(q, k, v, cu_seqlens, max_seqlen, slopes):
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True, alibi_slopes=slopes
        )

    q, k, v = (torch.randn(20, 2, 8, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2)
    for lengths in ([5, 7, 8], [1, 0, 19], [20, 0, 0], [3, 4, 5]):
        cu = ends(lengths)
        out = compiled(q, k, v, cu, max(lengths), slopes)
        want = flash_attn_varlen_func(q, k, v, cu, cu, max(lengths), max(lengths), causal=True, alibi_slopes=slopes)
        torch.testing.assert_close(out, want)
        grads, wants = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want))
        torch.testing.assert_close(grads, wants)
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


Q, CU = torch.randn(2, 5, 4, 8), ends([5, 5])
T = Q.flatten(0, 1)
SLOPE = torch.rand(4)
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


def test_softcap_below_zero_is_off():
    assert torch.equal(flash_attn_func(Q, Q, Q, softcap=-1.0), flash_attn_func(Q, Q, Q))


def test_version():
    assert flash_attn.__version__.startswith("2.8.")
