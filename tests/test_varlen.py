"""attnkern.varlen_attention: packed sequences against one call for each of them."""

import inspect
import itertools
from typing import ClassVar

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import attnkern
from attnkern import masks, testing
from attnkern.packed import packed_ranges

TAKEN = inspect.signature(varlen_attn).parameters  # older torches have less of it

LENGTHS = {
    "one": ([50], [50]),
    "alike": ([32, 32, 32], [32, 32, 32]),
    "short": ([3, 20, 1, 47, 33, 5], [3, 20, 1, 47, 33, 5]),
    "empty ones": ([0, 20, 0, 0, 30, 0], [0, 20, 0, 0, 30, 0]),
    "crossed": ([5, 70, 1, 130], [90, 12, 33, 250]),
    "no keys": ([5, 70, 3], [90, 0, 33]),
    "long": ([300, 17, 200], [300, 17, 200]),
}
OPTIONS = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "top left": {"is_causal": True, "alignment": "top_left"},
    "window": {"window": (20, 3)},
    "left": {"window": (9, None), "is_causal": True, "softcap": 3.0, "scale": 0.4},
}


def ends(lengths, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def packed(target, lengths_q, lengths_k, dtype, heads=4, heads_k=2, size=16):
    shapes = (sum(lengths_q), heads, size), (sum(lengths_k), heads_k, size), (sum(lengths_k), heads_k, size + 8)
    return [target.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def one_by_one(target, q, k, v, lengths_q, lengths_k, used=None, *, return_lse=False, **options):
    """The same by a call for each sequence."""
    outs, lses = [], []
    sequences = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), used or lengths_k, strict=True)
    for *tensors, n in sequences:
        a, b, c = (x.transpose(0, 1)[None] for x in tensors)
        out, lse = target.attention(a, b[:, :, :n], c[:, :, :n], enable_gqa=True, return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_sequence_is_a_call_of_its_own(target, lengths, options, dtype):
    lengths_q, lengths_k = LENGTHS[lengths]
    given = {"alignment": "bottom_right", **OPTIONS[options]}
    q, k, v = packed(target, lengths_q, lengths_k, dtype)
    out, lse = attnkern.varlen_attention(
        q, k, v, ends(lengths_q), ends(lengths_k), enable_gqa=True, return_lse=True, backend=target.backend, **given
    )
    want, want_lse = one_by_one(target, q, k, v, lengths_q, lengths_k, **given)
    assert out.shape == (sum(lengths_q), 4, 24)
    assert lse.shape == (4, sum(lengths_q))
    rule = {"float64": (1e-12, 1e-12), "float32": (2e-5, 1e-5)}.get(str(dtype)[6:], (4e-2, 3e-2))
    for got, expected in ((out, want), (lse, want_lse)):
        torch.testing.assert_close(got, expected, atol=rule[0], rtol=rule[1])
    grad = torch.randn_like(out)
    grad_lse = torch.where(lse.isinf(), 0.0, torch.randn_like(lse))
    grads = torch.autograd.grad((out, lse), (q, k, v), (grad, grad_lse))
    want_grads = torch.autograd.grad((want, want_lse), (q, k, v), (grad, grad_lse))
    for got, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected, atol=4 * rule[0], rtol=4 * rule[1])


def test_the_rule_holds_for_each_sequence(target, dtype):
    """The project's own rule, for the middle one of three."""
    q, k, v = packed(target, [40, 90, 30], [40, 90, 30], dtype, heads_k=4)
    out = attnkern.varlen_attention(q, k, v, ends([40, 90, 30]), is_causal=True, backend=target.backend)
    a, b, c = (x.detach()[40:130].transpose(0, 1)[None] for x in (q, k, v))
    testing.expected(a, b, c, is_causal=True)["out"].check(out.detach()[40:130].transpose(0, 1)[None])


OWN_CALLS = {
    "decoding": ([1] * 20, [100] * 20),
    "decoding beside a prompt": ([1, 1, 120, 2, 1, 1, 1], [60, 1, 120, 30, 4, 4, 5]),
    "prompts": ([3, 1, 70, 20, 33], [40, 5, 65, 7, 90]),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", OWN_CALLS)
def test_the_cpu_computes_what_the_calls_compute(lengths, is_causal, dtype):
    """To the bit: a sequence's tiles walk no keys of others, and a few queries are decoded. So it costs no more."""
    lengths_q, lengths_k = OWN_CALLS[lengths]
    q, k, v = packed(torch, lengths_q, lengths_k, dtype)
    given = {"is_causal": is_causal, "alignment": "bottom_right", "return_lse": True, "backend": "cpu"}
    own = attnkern.varlen_attention(q, k, v, ends(lengths_q), ends(lengths_k), enable_gqa=True, **given)
    calls = one_by_one(attnkern, q, k, v, lengths_q, lengths_k, **given)
    grad = torch.randn_like(own[0])
    results, want = ((*x, *torch.autograd.grad(x[0], (q, k, v), grad)) for x in (own, calls))
    assert all(torch.equal(x, y) for x, y in zip(results, want, strict=True))


BOUNDS = [2**31 - 2, 2**31 - 1, 2**32, 2**40, 2**62, 2**63 - 2, 2**63 - 1, 2**63, 2**100]


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_large_bounds_are_unbounded(kind, alignment):
    q, k, v = packed(torch, [5, 7, 2], [9, 4, 6], torch.float32)
    cu = ends([5, 7, 2], kind), ends([9, 4, 6], kind)
    of_queries, of_keys = (c.to(torch.int64) for c in cu)
    jagged = [
        torch.nested.nested_tensor_from_jagged(x, c).transpose(1, 2)
        for x, c in ((q, of_queries), (k, of_keys), (v, of_keys))
    ]
    for small in ((None, 2), (2, None), (None, None)):
        want = attnkern.varlen_attention(q, k, v, *cu, enable_gqa=True, window=small, alignment=alignment)
        for bound in BOUNDS:
            window = tuple(bound if x is None else x for x in small)
            options = {"window": window, "alignment": alignment}
            assert torch.equal(attnkern.varlen_attention(q, k, v, *cu, enable_gqa=True, **options), want), window
            mask = masks.packed(*cu, **options)
            assert torch.equal(mask.ranges, masks.packed(*cu, window=small, alignment=alignment).ranges), window
            out = attnkern.attention(*jagged, enable_gqa=True, **options)
            assert torch.equal(out.transpose(1, 2).values(), want), window


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_keys_in_use(target, kind):
    lengths_q, lengths_k, used = [4, 1, 9], [40, 30, 20], [17, 30, 0]
    q, k, v = packed(target, lengths_q, lengths_k, torch.float32)
    for options in ({}, {"is_causal": True}, {"window": (3, 0)}):
        out = attnkern.varlen_attention(
            q,
            k,
            v,
            ends(lengths_q, kind),
            ends(lengths_k, kind),
            seqused_k=torch.tensor(used, dtype=kind),
            enable_gqa=True,
            backend=target.backend,
            **options,
        )
        want, _ = one_by_one(target, q, k, v, lengths_q, lengths_k, used, alignment="bottom_right", **options)
        torch.testing.assert_close(out, want)


USED = {"more": [6, 4], "negative": [-3, 4], "wraps": [2**32 + 2, -(2**32) + 2], "last": [4, 2**31 - 1]}
USED_AS = {"more": [4, 4], "negative": [0, 4], "wraps": [4, 0], "last": [4, 5]}


@pytest.mark.parametrize("used", USED)
def test_keys_that_no_sequence_has_are_refused(used):
    q, cu, n = torch.randn(9, 2, 8), ends([4, 5]), torch.tensor(USED[used])
    wrong = next(i for i, (a, b) in enumerate(zip(USED[used], USED_AS[used], strict=True)) if a != b)
    message = rf"seqused_k must be from 0 to .*, got {USED[used][wrong]} for sequence {wrong}, which has {4 + wrong}"
    with pytest.raises(ValueError, match=message):
        attnkern.varlen_attention(q, q, q, cu, seqused_k=n)
    with pytest.raises(ValueError, match=message):
        masks.packed(cu, seqused_k=n)
    if "seqused_k" in TAKEN:
        with attnkern.use_as_sdpa(), pytest.raises(ValueError, match=message):
            varlen_attn(q, q, q, cu, cu, 5, 5, seqused_k=n)


BUFFERS = {"both": (6, 4), "queries": (6, 0), "keys": (0, 4), "nothing else": (5, 5)}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("buffers", BUFFERS)
def test_tokens_behind_the_last_sequence(target, buffers, options):
    """Queries get zeros, an lse of -inf and no gradient, and neither they nor such keys change another's results."""
    lengths_q, lengths_k = ([], []) if buffers == "nothing else" else ([5, 0, 30], [7, 3, 20])
    used_q, used_k = sum(lengths_q), sum(lengths_k)
    more_q, more_k = BUFFERS[buffers]
    q, k, v = packed(target, [used_q + more_q], [used_k + more_k], torch.float32)

    def results(q, k, v):
        given = {"enable_gqa": True, "return_lse": True, "backend": target.backend, **OPTIONS[options]}
        out, lse = attnkern.varlen_attention(q, k, v, ends(lengths_q), ends(lengths_k), **given)
        return out, lse.transpose(0, 1), *torch.autograd.grad(out.sum(), (q, k, v))

    tight = (x.detach()[:n].requires_grad_() for x, n in ((q, used_q), (k, used_k), (v, used_k)))
    for got, want, fill in zip(results(q, k, v), results(*tight), (0, -torch.inf, 0, 0, 0), strict=True):
        torch.testing.assert_close(got[: len(want)], want)
        assert (got[len(want) :] == fill).all()


def test_cu_seqlens_k_are_those_of_q(target):
    q, k, v = packed(target, [40, 9], [40, 9], torch.float32, heads_k=4)
    given = {"is_causal": True, "backend": target.backend}
    alone = attnkern.varlen_attention(q, k, v, ends([40, 9]), **given)
    assert torch.equal(alone, attnkern.varlen_attention(q, k, v, ends([40, 9]), ends([40, 9]), **given))


def test_dropout_comes_again(target):
    q, k, v = packed(target, [64, 30], [64, 30], torch.float32, heads_k=4)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(attnkern.varlen_attention(q, k, v, ends([64, 30]), dropout_p=0.5, backend=target.backend))
    assert torch.equal(*results)
    plain = attnkern.varlen_attention(q, k, v, ends([64, 30]), backend=target.backend)
    assert not torch.allclose(results[0], plain)


def test_one_graph_serves_all_lengths(target):
    def f(q, k, v, cu):
        return attnkern.varlen_attention(q, k, v, cu, is_causal=True, backend=target.backend)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([20, 31], [7, 50, 3], [64, 9, 12, 30]):
        q, k, v = packed(target, lengths, lengths, torch.float32, heads_k=4)
        results = []
        for function in (compiled, f):
            out = function(q, k, v, ends(lengths))
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


def test_memory_follows_the_tokens():
    """400 sequences of 20 to 50 tokens: no tensor of tokens x tokens, nor of sequences x longest x longest."""
    lengths = [20 + 7 * n % 31 for n in range(400)]
    q, k, v = (torch.randn(sum(lengths), 8, 64) for _ in range(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        attnkern.varlen_attention(q, k, v, ends(lengths), is_causal=True, backend="cpu")
    most = max(event.cpu_memory_usage for event in profile.events())
    assert most <= 2 * q.numel() * 4


Q = torch.zeros(10, 2, 8)
CU = ends([4, 6])
BAD = {
    "4-D": ((Q[None], Q, Q, CU), {}, RuntimeError, r"query must have the shape \(tokens, Hq, E\), got \(1, 10, 2, 8\)"),
    "value's tokens": ((Q, Q, Q[:8], CU), {}, RuntimeError, "value must have key's 10 tokens, got 8"),
    "heads": (
        (Q, Q[:, :1].expand(-1, 3, -1), Q, CU),
        {},
        RuntimeError,
        r"key's number of heads must be 1 or query's 2, got 3$",
    ),
    "list": ((Q, Q, Q, [0, 10]), {}, TypeError, "'cu_seqlens_q' must be Tensor, not list"),
    "float": ((Q, Q, Q, CU.float()), {}, RuntimeError, "cu_seqlens_q must be int32 or int64 with shape .* got float32"),
    "2-D": ((Q, Q, Q, CU[None]), {}, RuntimeError, r"got int32 with shape \(1, 3\)"),
    "nothing": ((Q, Q, Q, CU[:0]), {}, RuntimeError, r"shape \(sequences \+ 1,\), got \(0,\)"),
    "begins late": ((Q, Q, Q, CU + 1), {}, RuntimeError, "begin with 0, .* 10, got .1, 5, 11."),
    "falls": ((Q, Q, Q, torch.tensor([0, 7, 4, 10])), {}, RuntimeError, "never fall"),
    "ends late": ((Q, Q, Q, ends([4, 7])), {}, RuntimeError, "not exceed the number of tokens, 10, got .0, 4, 11."),
    "other keys": (
        (Q, Q, Q, CU, ends([10])),
        {},
        RuntimeError,
        r"cu_seqlens_k must have the shape of cu_seqlens_q \(3,\)",
    ),
    "meta": ((Q, Q, Q, CU.to("meta")), {}, RuntimeError, "cu_seqlens_q must be on query's device cpu, got meta"),
    "used": ((Q, Q, Q, CU), {"seqused_k": CU}, RuntimeError, r"seqused_k must be int32 or int64 with shape \(2,\)"),
    "window": ((Q, Q, Q, CU), {"window": (-1, 0)}, ValueError, "window's bounds must be >= 0"),
    "alignment": ((Q, Q, Q, CU), {"alignment": "left"}, ValueError, "alignment must be 'top_left' or 'bottom_right'"),
    "is_causal": ((Q, Q, Q, CU), {"is_causal": 1}, TypeError, "'is_causal' must be bool"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    arguments, options, error, message = BAD[what]
    with pytest.raises(error, match=message):
        attnkern.varlen_attention(*arguments, **options)


# ------------------------------------------------------------------------------------------ values on another device


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a GPU and has its numbers on the CPU."""

    waits: ClassVar[list[str]] = []  # what looked at numbers

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda:0")
        if func in LOOKS:
            cls.waits.append(func.__name__)
        args, kwargs = tree_map_only(cls, lambda x: x.as_subclass(torch.Tensor), (args, kwargs or {}))
        return tree_map_only(torch.Tensor, lambda x: x.as_subclass(cls), func(*args, **kwargs))


LOOKS = {torch.equal, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.nonzero, torch.Tensor.cpu}
LOOKS |= {getattr(torch.Tensor, f"__{name}__") for name in ("bool", "int", "float", "index")}


class MadeElsewhere(TorchFunctionMode):
    """Tensors that are made for the GPU, for which there is none."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.arange and torch.device(kwargs.get("device", "cpu")).type == "cuda":
            return func(*args, **{**kwargs, "device": "cpu"}).as_subclass(Elsewhere)
        return func(*args, **kwargs)


@pytest.fixture
def elsewhere(monkeypatch):
    Elsewhere.waits.clear()
    # The function itself runs on them; else it would hand itself to their class.
    monkeypatch.setattr("attnkern.varlen.has_torch_function", lambda tensors: False)
    with MadeElsewhere():
        yield lambda x: x.as_subclass(Elsewhere)


WRONG = {"begins late": [3, 20, 50], "falls": [0, 51, 50], "ends late": [0, 20, 51]}


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("wrong", WRONG)
def test_ends_elsewhere_are_checked_where_it_is_asked_for(elsewhere, monkeypatch, wrong, which):
    """By ATTNKERN_CHECK=1: on a GPU the check waits for it, and nothing else does."""
    q, k, v = (elsewhere(torch.randn(50, 2, 8)) for _ in range(3))
    cu = {name: elsewhere(ends([20, 30])) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    cu[which] = elsewhere(torch.tensor(WRONG[wrong], dtype=torch.int32))
    for setting in (None, "0"):
        monkeypatch.delenv("ATTNKERN_CHECK", raising=False)
        if setting is not None:
            monkeypatch.setenv("ATTNKERN_CHECK", setting)
        assert packed_ranges(q, k, *cu.values(), None, 3, 0, "bottom_right").device.type == "cuda"
        assert not Elsewhere.waits
    monkeypatch.setenv("ATTNKERN_CHECK", "1")
    shown = ", ".join(map(str, WRONG[wrong]))
    with pytest.raises(RuntimeError, match=rf"{which} must begin with 0, .* tokens, 50, got \[{shown}\]"):
        attnkern.varlen_attention(q, k, v, **cu)


CUTS = {"behind": [0, 4, 9], "before": [3, 9, 12], "both": [2, 5, 5, 9], "none": [0], "nothing": [4, 4]}


def attended(cu, tokens, is_causal):
    """bool (tokens, tokens), of what cu_seqlens say."""
    i = torch.arange(tokens)
    own = [(i >= a) & (i < b) for a, b in itertools.pairwise(cu)]
    same = sum(((x[:, None] & x) for x in own), torch.zeros(tokens, tokens, dtype=torch.bool))
    return same.bool() & ((i <= i[:, None]) | (not is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_tokens_of_no_sequence_where_nothing_looks(elsewhere, monkeypatch, cut, is_causal):
    """Before the first and behind the last, on another device and in a graph."""
    monkeypatch.delenv("ATTNKERN_CHECK", raising=False)
    x, cu = torch.randn(12, 2, 8), torch.tensor(CUTS[cut])
    options = {"is_causal": is_causal, "return_lse": True, "backend": "reference"}
    heads = x.transpose(0, 1)
    mask = attended(CUTS[cut], 12, is_causal)
    want, want_lse = attnkern.attention(heads, heads, heads, mask, return_lse=True, backend="reference")
    out, lse = attnkern.varlen_attention(*[elsewhere(x)] * 3, elsewhere(cu), **options)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), want.transpose(0, 1))
    torch.testing.assert_close(lse.as_subclass(torch.Tensor), want_lse)
    assert not Elsewhere.waits


def test_tokens_of_no_sequence_in_graphs():
    def f(x, cu):
        return attnkern.varlen_attention(x, x, x, cu), masks.document(cu_seqlens=cu, seqlen=12).ranges

    compiled = torch.compile(f, backend="eager", fullgraph=True, dynamic=True)
    for cut in ("behind", "before", "both", "nothing"):
        x = torch.randn(12, 2, 8, requires_grad=True)
        out, ranges = compiled(x, torch.tensor(CUTS[cut]))
        heads = x.transpose(0, 1)
        mask = attended(CUTS[cut], 12, False)
        want = attnkern.attention(heads, heads, heads, mask).transpose(0, 1)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, want)))
        assert torch.equal(masks.from_ranges(ranges, 12, 12).to_dense()[0, 0], mask)


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", OPTIONS)
def test_keys_in_use_end_with_their_sequence(elsewhere, monkeypatch, kind, used, options):
    """Where nothing looks at them. They are int64 where int32 can't hold them."""
    monkeypatch.delenv("ATTNKERN_CHECK", raising=False)
    q, k, v = packed(torch, [3, 4], [4, 5], torch.float32, heads_k=4)
    cu = ends([3, 4], kind), ends([4, 5], kind)
    given = torch.tensor(USED[used], dtype=torch.int64 if used == "wraps" else kind)
    options = {**OPTIONS[options], "backend": "reference"}
    out = attnkern.varlen_attention(*map(elsewhere, (q, k, v, *cu)), seqused_k=elsewhere(given), **options)
    want = attnkern.varlen_attention(q, k, v, *cu, seqused_k=torch.tensor(USED_AS[used]), **options)
    assert torch.equal(out.as_subclass(torch.Tensor), want)
    assert not Elsewhere.waits


def test_keys_in_use_end_with_their_sequence_in_graphs():
    q, k, v = packed(torch, [3, 4], [4, 5], torch.float32)

    def f(q, k, v, used):
        return attnkern.varlen_attention(q, k, v, ends([3, 4]), ends([4, 5]), seqused_k=used, enable_gqa=True)

    results = []
    for function, used in ((torch.compile(f, backend="eager", fullgraph=True), USED), (f, USED_AS)):
        for numbers in used.values():
            out = function(q, k, v, torch.tensor(numbers))
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(results[: len(USED)], results[len(USED) :])


def test_keys_in_use_elsewhere_are_checked_where_it_is_asked_for(elsewhere, monkeypatch):
    q, cu, used = (elsewhere(x) for x in (torch.randn(9, 2, 8), ends([4, 5]), torch.tensor([6, 5])))
    monkeypatch.delenv("ATTNKERN_CHECK", raising=False)
    ranges = packed_ranges(q, q, cu, cu, used, None, None, "bottom_right")
    assert not Elsewhere.waits
    assert ranges[0].as_subclass(torch.Tensor).tolist() == [[0, 4]]
    monkeypatch.setenv("ATTNKERN_CHECK", "1")
    with pytest.raises(ValueError, match="seqused_k must be"):
        packed_ranges(q, q, cu, cu, used, None, None, "bottom_right")


@pytest.mark.parametrize("setting", [None, "1"])
def test_right_ends_elsewhere(elsewhere, monkeypatch, setting):
    """The results don't depend on the check, and without it nothing looks at a number."""
    monkeypatch.delenv("ATTNKERN_CHECK", raising=False)
    if setting is not None:
        monkeypatch.setenv("ATTNKERN_CHECK", setting)
    q, k, v = (torch.randn(50, 2, 8) for _ in range(3))
    options = {"is_causal": True, "return_lse": True, "backend": "reference"}
    want = attnkern.varlen_attention(q, k, v, ends([20, 0, 30]), **options)
    results = attnkern.varlen_attention(*map(elsewhere, (q, k, v, ends([20, 0, 30]))), **options)
    for got, expected in zip(results, want, strict=True):
        assert got.device.type == "cuda"
        assert torch.equal(got.as_subclass(torch.Tensor), expected)
    assert Elsewhere.waits == ([] if setting is None else ["tolist"] * 2)


def test_ends_without_numbers_are_not_checked(monkeypatch):
    monkeypatch.setenv("ATTNKERN_CHECK", "1")
    q, cu = Q.to("meta"), ends([7, 4]).to("meta")
    assert attnkern.varlen_attention(q, q, q, cu).shape == q.shape
    with FakeTensorMode() as mode:
        q, cu = (mode.from_tensor(x) for x in (Q, ends([7, 4])))
        assert attnkern.varlen_attention(q, q, q, cu).shape == q.shape


# ------------------------------------------------------------------------------------------ torch.nn.attention.varlen


def torchs(q, k, v, lengths_q, lengths_k, window, **options):
    """torch's own function, of the oldest torch too."""
    longest = max(lengths_q), max(lengths_k)
    if "window_size" in TAKEN:
        options["window_size"] = tuple(-1 if x is None else x for x in window)
    else:
        options["is_causal"] = window == (None, 0)
    if "enable_gqa" in TAKEN:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, ends(lengths_q), ends(lengths_k), *longest, **options)


FAR_WINDOWS = [(2**40, 0), (-1, 2**31 - 1), (2**63 - 1, 2**63 - 1)]


@pytest.mark.parametrize("window", FAR_WINDOWS if "window_size" in TAKEN else [(-1, -1)], ids=str)
def test_torchs_own_function_with_large_bounds(window):
    q, k, v = (torch.randn(30, 2, 8) for _ in range(3))
    with attnkern.use_as_sdpa():
        out = torchs(q, k, v, [13, 17], [13, 17], window)
        want = torchs(q, k, v, [13, 17], [13, 17], (None, 0 if window[1] == 0 else None))
    assert torch.equal(out, want)


WINDOWS = [(None, None), (None, 0)] + [(9, 0), (4, 3)] * ("window_size" in TAKEN)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", ["short", "empty ones", "crossed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torchs_own_function_runs_on_a_cpu(lengths, window, dtype):
    lengths_q, lengths_k = LENGTHS[lengths]
    heads_k = 2 if "enable_gqa" in TAKEN else 4
    shapes = (sum(lengths_q), 4, 16), (sum(lengths_k), heads_k, 16), (sum(lengths_k), heads_k, 16)
    tensors = [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]
    with attnkern.use_as_sdpa() as calls:
        out, lse = torchs(*tensors, lengths_q, lengths_k, window, return_aux=AuxRequest(lse=True))
        grad = torch.randn_like(out)
        grads = torch.autograd.grad(out, tensors, grad)
    assert {kernel for _, kernel, _ in calls.lines} == {"attnkern cpu"}
    want, want_lse = attnkern.varlen_attention(
        *tensors, ends(lengths_q), ends(lengths_k), window=window, enable_gqa=True, return_lse=True
    )
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    for got, expected in zip(grads, torch.autograd.grad(want, tensors, grad), strict=True):
        torch.testing.assert_close(got, expected)


def test_torchs_own_function_with_tokens_behind_the_last_sequence():
    q, k, v = (torch.randn(20, 2, 8, requires_grad=True) for _ in range(3))
    with attnkern.use_as_sdpa() as calls:
        out = torchs(q, k, v, [4, 9], [4, 9], (None, 0))
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert {kernel for _, kernel, _ in calls.lines} == {"attnkern cpu"}
    want = attnkern.varlen_attention(q, k, v, ends([4, 9]), is_causal=True)
    assert torch.equal(out, want)
    assert not out[13:].any()
    for got, expected in zip(grads, torch.autograd.grad(want.sum(), (q, k, v)), strict=True):
        assert torch.equal(got, expected)
        assert not got[13:].any()


def test_torchs_own_function_compiles():
    lengths = [20, 3, 41]
    q, k, v = (torch.randn(64, 4, 16, requires_grad=True) for _ in range(3))
    with attnkern.use_as_sdpa():
        compiled = torch.compile(lambda *x: torchs(*x, lengths, lengths, (None, 0)), fullgraph=True)
        out = compiled(q, k, v)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        want = torchs(q, k, v, lengths, lengths, (None, 0))
        want_grads = torch.autograd.grad(want.square().sum(), (q, k, v))
    for got, expected in zip((out, *grads), (want, *want_grads), strict=True):
        torch.testing.assert_close(got, expected)


def test_what_is_refused_says_why():
    x = torch.randn(8, 2, 8)
    with attnkern.use_as_sdpa():
        with pytest.raises(RuntimeError, match="value's head size differs from query's, 4 and 8"):
            torch.ops.aten._flash_attention_forward(x, x, x[..., :4], None, None, 8, 8, 0.0, False, False)
        for dropout_p in (0.5, -0.5, float("nan")):
            with pytest.raises(RuntimeError, match="dropout in an aten op"):
                torch.ops.aten._flash_attention_forward(x, x, x, ends([8]), ends([8]), 8, 8, dropout_p, False, False)
        with pytest.raises(RuntimeError, match="cu_seqlens_q must begin with 0"):
            torch.ops.aten._flash_attention_forward(x, x, x, ends([9]), ends([8]), 8, 8, 0.0, False, False)


def test_a_batch_without_cu_seqlens():
    """torch's bare flash attention of (B, L, H, E), level at the bottom right."""
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16)
    with attnkern.use_as_sdpa():
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, k, None, None, 5, 9, 0.0, True, False)
    a, b = q.transpose(1, 2), k.transpose(1, 2)
    options = {"is_causal": True, "alignment": "bottom_right", "enable_gqa": True}
    want, want_lse = attnkern.attention(a, b, b, **options, return_lse=True)
    torch.testing.assert_close(out, want.transpose(1, 2))
    torch.testing.assert_close(lse, want_lse)
