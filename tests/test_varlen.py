"""attnkern.varlen_attention: packed sequences, jagged ones too, against one call for each of them."""

import inspect
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import attnkern
from attnkern import masks, testing
from attnkern.packed import packed_ranges
from bad_calls import bad, check_refused, refused
from sequences import LENGTHS, ends, flat, nested, one_by_one, packed

TAKEN = inspect.signature(varlen_attn).parameters  # older torches have less of it

OPTIONS = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "top left": {"is_causal": True, "alignment": "top_left"},
    "window": {"window": (20, 3)},
    "left": {"window": (9, None), "is_causal": True, "softcap": 3.0, "scale": 0.4},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_sequence_is_a_call_of_its_own(target, lengths, options, dtype):
    """And jagged nested tensors of the same tokens are the same call, to the bit."""
    lengths = LENGTHS[lengths]
    tensors = packed(target, *lengths, dtype)
    given = {"alignment": "bottom_right", "enable_gqa": True, "return_lse": True, **OPTIONS[options]}
    given["backend"] = target.backend_for(*tensors)
    out, lse = attnkern.varlen_attention(*tensors, *map(target.ends, lengths), **given)
    query, key, value = nested(*tensors, *lengths)
    of_jagged, lse_of_jagged = attnkern.attention(query, key, value, **given)
    assert of_jagged.shape == (len(lengths[0]), 4, query.shape[2], 24)
    assert lse_of_jagged.shape == (len(lengths[0]), 4, query.shape[2])
    assert of_jagged.offsets() is lse_of_jagged.offsets() is query.offsets()
    assert torch.equal(flat(of_jagged), out)
    assert torch.equal(lse_of_jagged.values(), lse)
    del given["enable_gqa"], given["return_lse"], given["backend"]
    want, want_lse = one_by_one(target.attention, *tensors, *lengths, **given)
    atol, rtol = {"float64": (1e-12, 1e-12), "float32": (2e-5, 1e-5)}.get(str(dtype)[6:], (4e-2, 3e-2))
    for got, expected in ((out, want), (lse, want_lse)):
        torch.testing.assert_close(got, expected, atol=atol, rtol=rtol)
    grad = torch.randn_like(out)
    grad_lse = torch.where(lse.isinf(), 0.0, torch.randn_like(lse))
    want_grads = torch.autograd.grad((want, want_lse), tensors, (grad, grad_lse))
    for results in ((out, lse), (flat(of_jagged), lse_of_jagged.values())):
        grads = torch.autograd.grad(results, tensors, (grad, grad_lse))
        for got, expected in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(got, expected, atol=4 * atol, rtol=4 * rtol)


def test_the_rule_holds_for_each_sequence(target, dtype):
    """The project's own rule, for the middle one of three; cu_seqlens_k are those of the queries."""
    q, k, v = packed(target, [40, 90, 30], [40, 90, 30], dtype, heads_k=4)
    out = target.varlen_attention(q, k, v, target.ends([40, 90, 30]), is_causal=True)
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
    lengths = OWN_CALLS[lengths]
    tensors = packed(torch, *lengths, dtype)
    given = {"is_causal": is_causal, "alignment": "bottom_right", "backend": "cpu"}
    own = attnkern.varlen_attention(*tensors, *map(ends, lengths), enable_gqa=True, return_lse=True, **given)
    calls = one_by_one(attnkern.attention, *tensors, *lengths, **given)
    grad = torch.randn_like(own[0])
    results, want = ((*x, *torch.autograd.grad(x[0], tensors, grad)) for x in (own, calls))
    assert all(torch.equal(x, y) for x, y in zip(results, want, strict=True))


BOUNDS = [2**31 - 2, 2**31 - 1, 2**32, 2**40, 2**62, 2**63 - 2, 2**63 - 1, 2**63, 2**100]


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_large_bounds_are_unbounded(kind, alignment):
    q, k, v = packed(torch, [5, 7, 2], [9, 4, 6])
    cu = ends([5, 7, 2], kind), ends([9, 4, 6], kind)
    jagged = nested(q, k, v, [5, 7, 2], [9, 4, 6])
    for small in ((None, 2), (2, None), (None, None)):
        want = attnkern.varlen_attention(q, k, v, *cu, enable_gqa=True, window=small, alignment=alignment)
        for bound in BOUNDS:
            window = tuple(bound if x is None else x for x in small)
            options = {"window": window, "alignment": alignment}
            assert torch.equal(attnkern.varlen_attention(q, k, v, *cu, enable_gqa=True, **options), want), window
            mask = masks.packed(*cu, **options)
            assert torch.equal(mask.ranges, masks.packed(*cu, window=small, alignment=alignment).ranges), window
            out = attnkern.attention(*jagged, enable_gqa=True, **options)
            assert torch.equal(flat(out), want), window


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_keys_in_use(target, kind):
    lengths, used = ([4, 1, 9], [40, 30, 20]), [17, 30, 0]
    tensors = packed(target, *lengths)
    given = {
        "seqused_k": torch.tensor(used, dtype=kind, device=target.device),
        "enable_gqa": True,
        "backend": target.backend,
    }
    for options in ({}, {"is_causal": True}, {"window": (3, 0)}):
        out = attnkern.varlen_attention(*tensors, *(target.ends(x, kind) for x in lengths), **given, **options)
        want, _ = one_by_one(target.attention, *tensors, *lengths, used, alignment="bottom_right", **options)
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
    q, k, v = packed(target, [used_q + more_q], [used_k + more_k])

    def results(q, k, v):
        given = {"enable_gqa": True, "return_lse": True, "backend": target.backend, **OPTIONS[options]}
        out, lse = attnkern.varlen_attention(q, k, v, target.ends(lengths_q), target.ends(lengths_k), **given)
        return out, lse.transpose(0, 1), *torch.autograd.grad(out.sum(), (q, k, v))

    tight = (x.detach()[:n].requires_grad_() for x, n in ((q, used_q), (k, used_k), (v, used_k)))
    for got, want, fill in zip(results(q, k, v), results(*tight), (0, -torch.inf, 0, 0, 0), strict=True):
        torch.testing.assert_close(got[: len(want)], want)
        assert (got[len(want) :] == fill).all()


def test_dropout_comes_again(target):
    """To the bit, and of jagged tensors too."""
    lengths = [64, 30]
    tensors = packed(target, lengths, lengths, heads_k=4)
    of_jagged = nested(*tensors, lengths, lengths)
    calls = [
        lambda **more: attnkern.varlen_attention(*tensors, target.ends(lengths), **more, backend=target.backend)
    ] * 2
    calls.append(lambda **more: flat(attnkern.attention(*of_jagged, **more, backend=target.backend)))
    results = []
    for call in calls:
        torch.manual_seed(3)
        results.append(call(dropout_p=0.5))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.allclose(results[0], calls[0]())


def test_one_graph_serves_all_lengths(target):
    def f(q, k, v, cu):
        return attnkern.varlen_attention(q, k, v, cu, is_causal=True, backend=target.backend)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([20, 31], [7, 50, 3], [64, 9, 12, 30]):
        q, k, v = packed(target, lengths, lengths, heads_k=4)
        results = []
        for function in (compiled, f):
            out = function(q, k, v, target.ends(lengths))
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


def test_an_exported_program_takes_one_sequence():
    """2 s."""

    class Module(torch.nn.Module):
        def forward(self, x, cu):
            return attnkern.varlen_attention(x, x, x, cu, is_causal=True)

    x, ends = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    sizes = {0: torch.export.Dim("tokens")}, {0: torch.export.Dim("ends")}
    program = torch.export.export(Module(), (x, ends), dynamic_shapes=sizes, strict=False)
    for lengths in ([7], [2, 0, 4]):
        x = torch.randn(sum(lengths), 2, 8)
        ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        torch.testing.assert_close(program.module()(x, ends), Module()(x, ends))


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
attend = attnkern.varlen_attention
BAD = [
    bad("query must have the shape (tokens, Hq, E), got (1, 10, 2, 8)", lambda: attend(Q[None], Q, Q, CU)),
    bad("'query' must be Tensor, not numpy.ndarray", lambda: attend(Q.numpy(), Q, Q, CU), TypeError),
    bad("value must have key's 10 tokens, got 8", lambda: attend(Q, Q, Q[:8], CU)),
    bad("key must be on query's device cpu, got meta", lambda: attend(Q, Q.to("meta"), Q, CU)),
    bad("key's number of heads must be 1 or query's 2, got 3$", lambda: attend(Q, Q[:, :1].expand(-1, 3, -1), Q, CU)),
    bad("'cu_seqlens_q' must be Tensor, not list", lambda: attend(Q, Q, Q, [0, 10]), TypeError),
    bad("cu_seqlens_q must be int32 or int64 with shape ... got float32", lambda: attend(Q, Q, Q, CU.float())),
    bad("got int32 with shape (1, 3)", lambda: attend(Q, Q, Q, CU[None])),
    bad("shape (sequences + 1,), got (0,)", lambda: attend(Q, Q, Q, CU[:0])),
    bad("begin with 0, ... 10, got [1, 5, 11]", lambda: attend(Q, Q, Q, CU + 1)),
    bad("never fall", lambda: attend(Q, Q, Q, torch.tensor([0, 7, 4, 10]))),
    bad("not exceed the number of tokens, 10, got [0, 4, 11]", lambda: attend(Q, Q, Q, ends([4, 7]))),
    bad("cu_seqlens_k must have the shape of cu_seqlens_q (3,)", lambda: attend(Q, Q, Q, CU, ends([10]))),
    bad("cu_seqlens_q must be on query's device cpu, got meta", lambda: attend(Q, Q, Q, CU.to("meta"))),
    bad("seqused_k must be int32 or int64 with shape (2,)", lambda: attend(Q, Q, Q, CU, seqused_k=CU)),
    bad("window's bounds must be >= 0", lambda: attend(Q, Q, Q, CU, window=(-1, 0)), ValueError),
    bad("alignment must be 'top_left' or 'bottom_right'", lambda: attend(Q, Q, Q, CU, alignment="left"), ValueError),
    bad("'is_causal' must be bool", lambda: attend(Q, Q, Q, CU, is_causal=1), TypeError),
]


@refused(BAD)
def test_bad_calls(call, error, message):
    check_refused(call, error, message)


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
    monkeypatch.delenv("ATTNKERN_CHECK", raising=False)
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
        if setting is not None:
            monkeypatch.setenv("ATTNKERN_CHECK", setting)
        assert packed_ranges(q, k, *cu.values(), None, 3, 0, "bottom_right").device.type == "cuda"
        assert not Elsewhere.waits
    monkeypatch.setenv("ATTNKERN_CHECK", "1")
    shown = ", ".join(map(str, WRONG[wrong]))
    with pytest.raises(RuntimeError, match=rf"{which} must begin with 0, .* tokens, 50, got \[{shown}\]"):
        attnkern.varlen_attention(q, k, v, **cu)


CUTS = {"behind": [0, 4, 9], "before": [3, 9, 12], "both": [2, 5, 5, 9], "none": [0], "nothing": [4, 4]}


def attended(cu, is_causal):
    """Of 12 tokens, what cu_seqlens say."""
    return testing.Packed(cu, cu, None).mask(12, 12, {"is_causal": is_causal})


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_tokens_of_no_sequence_where_nothing_looks(elsewhere, cut, is_causal):
    """Before the first and behind the last, on another device and in a graph."""
    x, cu = torch.randn(12, 2, 8), torch.tensor(CUTS[cut])
    options = {"is_causal": is_causal, "return_lse": True, "backend": "reference"}
    heads = x.transpose(0, 1)
    mask = attended(CUTS[cut], is_causal)
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
        mask = attended(CUTS[cut], False)
        want = attnkern.attention(heads, heads, heads, mask).transpose(0, 1)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, want)))
        assert torch.equal(masks.from_ranges(ranges, 12, 12).to_dense()[0, 0], mask)


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", OPTIONS)
def test_keys_in_use_end_with_their_sequence(elsewhere, kind, used, options):
    """Where nothing looks at them. They are int64 where int32 can't hold them."""
    q, k, v = packed(torch, [3, 4], [4, 5], heads_k=4)
    cu = ends([3, 4], kind), ends([4, 5], kind)
    given = torch.tensor(USED[used], dtype=torch.int64 if used == "wraps" else kind)
    options = {**OPTIONS[options], "backend": "reference"}
    out = attnkern.varlen_attention(*map(elsewhere, (q, k, v, *cu)), seqused_k=elsewhere(given), **options)
    want = attnkern.varlen_attention(q, k, v, *cu, seqused_k=torch.tensor(USED_AS[used]), **options)
    assert torch.equal(out.as_subclass(torch.Tensor), want)
    assert not Elsewhere.waits


def test_keys_in_use_end_with_their_sequence_in_graphs():
    q, k, v = packed(torch, [3, 4], [4, 5])

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
    ranges = packed_ranges(q, q, cu, cu, used, None, None, "bottom_right")
    assert not Elsewhere.waits
    assert ranges[0].as_subclass(torch.Tensor).tolist() == [[0, 4]]
    monkeypatch.setenv("ATTNKERN_CHECK", "1")
    with pytest.raises(ValueError, match="seqused_k must be"):
        packed_ranges(q, q, cu, cu, used, None, None, "bottom_right")


def test_ranges_of_the_call_before():
    """Are taken again for the same sequences alone: not where numbers have changed, by numpy, too, or sizes or options
    have, nor from inference mode or another mode."""
    query, key, value = (torch.randn(12, 2, 8, requires_grad=True) for _ in range(3))
    numbers = np.array([0, 5, 12])
    ends = torch.from_numpy(numbers)  # torch doesn't see it change

    def check(lengths, query=query, **options):
        out = attnkern.varlen_attention(query, key, value, ends, **options)
        begin = 0
        for length in lengths:
            rows = [x[begin : begin + length].transpose(0, 1) for x in (query, key, value)]
            alone = attnkern.attention(*rows, **{"alignment": "bottom_right", **options}).transpose(0, 1)
            torch.testing.assert_close(out[begin : begin + length], alone, atol=1e-5, rtol=1e-5)
            begin += length
        assert not out[begin:].any()
        return out

    with torch.inference_mode():
        check([5, 7])
    first = check([5, 7])
    torch.autograd.grad(first.sum(), (query, key, value))
    assert torch.equal(check([5, 7]), first)
    with FlopCounterMode(display=False):
        check([5, 7])
    check([5, 7], is_causal=True)
    check([5, 7], window=(2, 1))
    numbers[1] = 3
    check([3, 9])
    numbers[2] = 10
    check([3, 7])
    check([3, 7], query[:11])
    with pytest.raises(RuntimeError, match="not exceed the number of tokens, 9"):
        attnkern.varlen_attention(query[:9], key, value, ends)
    with FakeTensorMode(allow_non_fake_inputs=True):
        attnkern.varlen_attention(*(torch.empty(12, 2, 8) for _ in range(3)), torch.tensor([0, 3, 10]))
    check([3, 7])
    numbers[2] = 12
    check([3, 9])
    masks.packed(ends).ranges.zero_()
    check([3, 9])


@pytest.mark.parametrize("setting", [None, "1"])
def test_right_ends_elsewhere(elsewhere, monkeypatch, setting):
    """The results don't depend on the check, and without it nothing looks at a number."""
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
    """Seven queries and keys behind the last sequence are of none."""
    lengths_q, lengths_k = LENGTHS[lengths]
    heads_k = 2 if "enable_gqa" in TAKEN else 4
    tensors = packed(torch, [*lengths_q, 7], [*lengths_k, 7], dtype, heads_k=heads_k, size_v=16)
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
    assert not out[-7:].any()
    for got, expected in zip(grads, torch.autograd.grad(want, tensors, grad), strict=True):
        torch.testing.assert_close(got, expected)


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
