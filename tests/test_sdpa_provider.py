"""F.scaled_dot_product_attention itself on attnkern's kernels: the registry, use_as_sdpa, what it refuses, models."""

import contextlib
import copy
import dataclasses
import gc
import math
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import flop_counter

import attnkern
from attnkern import testing
from attnkern.backends import cpu
from attnkern.integrations import sdpa as integration
from matrix import tagged

aten = torch.ops.aten
FORWARD, BACKWARD = (f"aten::_scaled_dot_product_flash_attention_for_cpu{suffix}" for suffix in ("", "_backward"))
WHOLE, MATH = "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math"
OURS = "attnkern cpu"


@contextlib.contextmanager
def activated():
    """The way without a context manager, as torch documents it."""
    torch.nn.attention.activate_flash_attention_impl("ATTNKERN")
    before = attnkern.SdpaCalls()
    try:
        yield before
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def state():
    """Everything that a switch touches."""
    operators = [
        f"aten::{name}" for kernels in (integration.aten_ops.PROVIDER, integration.aten_ops.FULL) for name in kernels
    ]
    return {
        "kernels": [torch._C._dispatch_dump_table(name) for name in operators],
        "implementation": torch.nn.attention.current_flash_attention_impl(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "flops": dict(flop_counter.flop_registry),
        "cache": torch.compiler.config.cache_key_tag,
    }


@pytest.fixture(autouse=True)
def exactly_restored():
    before = state()
    yield
    assert state() == before


def sdpa_and_gradients(*tensors, grad_out=None, **options):
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    out = F.scaled_dot_product_attention(*leaves, **options)
    wanted = [x for x in leaves[:3] if x.is_floating_point()]
    return out, *torch.autograd.grad(out, wanted, torch.ones_like(out) if grad_out is None else grad_out)


# --- registered, activated, restored


FRESH = f"""
import sys, torch
def tables():
    return [torch._C._dispatch_dump_table(name) for name in ("{WHOLE}", "{FORWARD}")]
before = tables()
import attnkern
assert "ATTNKERN" in torch.nn.attention.list_flash_attention_impls()
assert torch.nn.attention.current_flash_attention_impl() is None
assert tables() == before
assert "torch._dynamo" not in sys.modules
x = torch.ones(1, 1, 3, 4, requires_grad=True)
for full in (False, True):
    with attnkern.use_as_sdpa(full=full):
        torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum().backward()
"""


def test_importing_registers_and_activates_nothing_and_no_switch_warns():
    result = subprocess.run([sys.executable, "-W", "error", "-c", FRESH], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("use", [activated, attnkern.use_as_sdpa], ids=["torch's switch", "use_as_sdpa"])
def test_the_switch(use):
    x = torch.randn(2, 4, 9, 16)
    want = sdpa_and_gradients(x, x, x, is_causal=True)
    with use() as calls:
        assert torch.nn.attention.current_flash_attention_impl() == "ATTNKERN"
        got = sdpa_and_gradients(x, x, x, is_causal=True)
        assert calls.lines == {(FORWARD, OURS, ""): 1, (BACKWARD, OURS, ""): 1}
    sdpa_and_gradients(x, x, x, is_causal=True)
    assert calls.attnkern == 2
    assert calls.torch == 0
    for a, b in zip(got, want, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def test_contexts_nest_and_survive_exceptions():
    x = torch.randn(1, 2, 5, 8)
    with attnkern.use_as_sdpa() as outer:
        with contextlib.suppress(KeyError), attnkern.use_as_sdpa(full=True) as inner:
            F.scaled_dot_product_attention(x, x, x)
            assert set(inner.lines) == {(WHOLE, OURS, "")}
            raise KeyError
        assert torch.nn.attention.current_flash_attention_impl() == "ATTNKERN"
        F.scaled_dot_product_attention(x, x, x)
        assert outer.lines == {(WHOLE, OURS, ""): 1, (FORWARD, OURS, ""): 1}
    assert inner.attnkern == 1

    @attnkern.use_as_sdpa()
    def decorated():
        return torch.nn.attention.current_flash_attention_impl()

    assert decorated() == decorated() == "ATTNKERN"


def test_contexts_may_overlap_in_any_order():
    first, second = attnkern.use_as_sdpa(), attnkern.use_as_sdpa(full=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    x = torch.randn(5, 8)
    before = attnkern.SdpaCalls()
    F.scaled_dot_product_attention(x, x, x)
    assert before.attnkern == 1
    second.__exit__(None, None, None)
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_another_implementation_comes_back():
    class Handle:
        def remove(self):
            active.discard(self)

    active = set()

    def register():
        active.add(handle := Handle())
        return handle

    torch.nn.attention.register_flash_attention_impl("OTHER", register_fn=register)
    try:
        torch.nn.attention.activate_flash_attention_impl("OTHER")
        with attnkern.use_as_sdpa():
            assert not active
        assert torch.nn.attention.current_flash_attention_impl() == "OTHER"
        assert len(active) == 1
        with attnkern.use_as_sdpa():
            torch.nn.attention.activate_flash_attention_impl("OTHER")
        assert len(active) == 1
        torch.nn.attention.restore_flash_attention_impl()
        with attnkern.use_as_sdpa():
            torch.nn.attention.restore_flash_attention_impl()
        assert torch.nn.attention.current_flash_attention_impl() is None
    finally:
        torch.nn.attention._registry._FLASH_ATTENTION_IMPLS.pop("OTHER")


def test_activation_that_is_not_ours_stays():
    with activated():
        with attnkern.use_as_sdpa(full=True):
            pass
        assert torch.nn.attention.current_flash_attention_impl() == "ATTNKERN"


@pytest.mark.parametrize("fails", ["impl", "register_flop_formula"])
def test_a_failed_activation_leaves_nothing(monkeypatch, fails):
    real = torch.library.Library.impl

    def impl(self, name, function, key, **options):
        if fails == "impl" and name == "_scaled_dot_product_efficient_attention":
            raise ValueError("broken")
        return real(self, name, function, key, **options)

    def register_flop_formula(target, get_raw):
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(torch.library.Library, "impl", impl)
        if fails == "register_flop_formula":
            # Newer versions of torch have this formula themselves, and then nothing is registered.
            patch.delitem(flop_counter.flop_registry, aten._scaled_dot_product_flash_attention_for_cpu, raising=False)
            patch.setattr(flop_counter, "register_flop_formula", register_flop_formula)
        with pytest.raises(ValueError, match="broken"), attnkern.use_as_sdpa():
            pass
    with attnkern.use_as_sdpa() as calls:
        F.scaled_dot_product_attention(*[torch.randn(1, 1, 3, 4)] * 3)
    assert calls.attnkern == 1


def test_bad_input(monkeypatch):
    with pytest.raises(TypeError, match="argument 'full' must be bool, not str"), attnkern.use_as_sdpa("yes"):
        pass
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"use_as_sdpa needs torch >= 2\.11 .*, got torch|got \d"):  # noqa: SIM117
        with attnkern.use_as_sdpa():
            pass
    integration.register()  # on such a torch, importing attnkern does nothing
    monkeypatch.undo()


# --- threads


def run_all(*functions):
    """Each in a thread of its own, until all are done."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.real_memory
def test_switching_while_other_threads_call():
    """A thread may be on its way into a kernel when that is removed."""
    x = torch.randn(1, 2, 9, 16)
    want = F.scaled_dot_product_attention(x, x, x)
    wrong, done = [], threading.Event()

    def work():
        leaf = x.clone().requires_grad_()
        while not done.is_set():
            out = F.scaled_dot_product_attention(leaf, leaf, leaf)
            (grad,) = torch.autograd.grad(out.sum(), leaf)
            if not torch.allclose(out, want, atol=1e-5) or not grad.isfinite().all():
                wrong.append(out)

    def switch(full):
        for _ in range(300):
            with attnkern.use_as_sdpa(full=full):
                pass

    def switch_both():
        run_all(lambda: switch(False), lambda: switch(True))
        done.set()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_all(work, work, work, switch_both)
    assert not wrong
    assert not [str(w.message) for w in caught]


def test_all_threads_count():
    x = torch.randn(1, 2, 9, 16)
    with attnkern.use_as_sdpa() as calls:
        run_all(*[lambda: [F.scaled_dot_product_attention(x, x, x) for _ in range(50)]] * 4)
    assert calls.lines == {(FORWARD, OURS, ""): 200}


# --- the CPU's aten op, through F.sdpa


@pytest.mark.parametrize("layout", ["contiguous", "blhd", "sequence_first", "packed", "padded"])
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {}),
        (None, {"is_causal": True, "scale": 0.3}),
        (None, {"enable_gqa": True}),
        (("bool", "BHLS"), {}),
        (("holes", "1HLS"), {}),
        (("bool", "LS"), {"enable_gqa": True}),
    ],
    ids=str,
)
def test_cpu_slot(layout, mask, options, dtype):
    inputs = testing.make_inputs(
        2, 4, 7, 9, 8, heads_k=2 if "enable_gqa" in options else 4, dtype=dtype, layout=layout, mask=mask
    )
    native = F.scaled_dot_product_attention(*inputs.tensors.values(), **options)
    leaves = {n: x.detach().requires_grad_(n != "attn_mask") for n, x in inputs.tensors.items()}
    wanted = list(leaves)[:3]  # a float mask with a gradient is not the aten op's; its values are
    with attnkern.use_as_sdpa() as calls:
        out = F.scaled_dot_product_attention(**leaves, **options)
        grad_out = torch.randn_like(out)
        grads = torch.autograd.grad(out, [leaves[n] for n in wanted], grad_out)
    assert calls.lines == {(FORWARD, OURS, ""): 1, (BACKWARD, OURS, ""): 1}
    assert out.stride() == native.stride()
    want = testing.expected(*inputs.tensors.values(), grad_out=grad_out, **options)
    for name, actual in zip(("out", *wanted), (out, *grads), strict=True):
        want[name].check(actual, gradient=name != "out", name=name, recipe=inputs.recipe)


@pytest.mark.parametrize("case", tagged("full"))
def test_full(case, dtype):
    inputs, options = tagged("full")[case].inputs(dtype=dtype), tagged("full")[case].options
    with attnkern.use_as_sdpa(full=True) as calls:
        testing.check_attention(inputs, function=F.scaled_dot_product_attention, **options)
    assert calls.lines == {(WHOLE, OURS, ""): 1}
    with attnkern.use_as_sdpa() as calls:
        testing.check_attention(inputs, function=F.scaled_dot_product_attention, **options)
    if case in ("mask with a gradient", "value of another size"):
        assert {(operator, kernel) for operator, kernel, _ in calls.lines} == {(MATH, "torch")}


def test_full_takes_all_ranks_and_dropout():
    q, k = torch.randn(4, 1, 3, 5, 8, requires_grad=True), torch.randn(2, 1, 7, 8)
    want = F.scaled_dot_product_attention(q, k, k)
    with attnkern.use_as_sdpa(full=True) as calls:
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k), want)
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(q, k, k, dropout_p=0.4)
        (grad,) = torch.autograd.grad(out.sum(), q)
    assert calls.lines == {(WHOLE, OURS, ""): 2}
    torch.manual_seed(3)
    again = attnkern.scaled_dot_product_attention(q, k, k, dropout_p=0.4)
    assert torch.equal(out, again)
    assert torch.equal(grad, torch.autograd.grad(again.sum(), q)[0])


@pytest.mark.parametrize("full", [False, True])
def test_autocast_inference_mode_and_other_modes(full):
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    with attnkern.use_as_sdpa(full=full) as calls:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = F.scaled_dot_product_attention(q, k, v)
            leaf = q.clone().requires_grad_()
            (grad,) = torch.autograd.grad(F.scaled_dot_product_attention(leaf, k, v).float().sum(), leaf)
        assert (out.dtype, grad.dtype) == (torch.bfloat16, torch.float32)
        with torch.inference_mode():
            assert F.scaled_dot_product_attention(q, k, v).is_inference()
        with torch.no_grad():
            assert not F.scaled_dot_product_attention(leaf, k, v).requires_grad
    assert calls.torch == 0
    assert calls.attnkern == (4 if full else 5)


# --- what we refuse


def test_refused_calls_run_on_torch_and_are_explained(monkeypatch):
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    grad_out = torch.randn_like(q)
    want = sdpa_and_gradients(q, k, v, grad_out=grad_out)
    monkeypatch.setattr(cpu, "refusals", lambda problem: ["it is Sunday"])
    for full in (False, True):
        with attnkern.use_as_sdpa(full=full) as calls:
            got = sdpa_and_gradients(q, k, v, grad_out=grad_out)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        assert calls.attnkern == 0
        assert {reason for _, _, reason in calls.lines} == {"cpu: it is Sunday"}
        assert len(calls.lines) == (3 if full else 2)
        assert "torch  cpu: it is Sunday" in str(calls)


def test_a_backend_without_a_backward_pass_leaves_it_to_torch(monkeypatch):
    """It says so of tensors that need gradients, which those made in a compiled graph never do."""
    torch._dynamo.reset()
    monkeypatch.setattr(cpu, "refusals", lambda problem: ["no gradients"] if problem.q.requires_grad else [])
    leaves = [torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3)]
    want = torch.autograd.grad(F.scaled_dot_product_attention(*leaves).sum(), leaves)
    function = torch.compile(lambda *x: F.scaled_dot_product_attention(*(y * 1 for y in x)), backend="aot_eager")
    with attnkern.use_as_sdpa() as calls:
        got = torch.autograd.grad(function(*leaves).sum(), leaves)
    assert calls.lines == {(FORWARD, OURS, ""): 1, (BACKWARD, "torch", "cpu: no gradients"): 1}
    torch.testing.assert_close(got, want)


def test_double_backward_needs_full():
    """Torch's aten ops have no second derivative, whoever computes them; attnkern's own autograd has."""
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with attnkern.use_as_sdpa():
        (first,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="is not implemented"):
            first.sum().backward()
    with attnkern.use_as_sdpa(full=True):
        assert torch.autograd.gradgradcheck(F.scaled_dot_product_attention, (q, k, v))


def test_torchs_maths_is_counted_with_the_reason():
    q = torch.randn(2, 3, 5, 8)
    mask = torch.zeros(5, 5)
    expected = {
        "dropout_p > 0": lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
        "not 4-D": lambda: F.scaled_dot_product_attention(*[q[None]] * 3),
        "attn_mask needs a gradient": lambda: F.scaled_dot_product_attention(q, q, q, mask.clone().requires_grad_()),
        "not 2-D or 4-D": lambda: F.scaled_dot_product_attention(q, q, q, mask[None].expand(3, 5, 5)),
        "another head size": lambda: F.scaled_dot_product_attention(q, q, q[..., :3].contiguous()),
        "batch sizes differ": lambda: F.scaled_dot_product_attention(q, q[:1], q[:1]),
        "torch chose it": lambda: F.scaled_dot_product_attention(q, q.mT.contiguous().mT, q),
    }
    for reason, call in expected.items():
        with attnkern.use_as_sdpa() as calls:
            call()
        ((line, count),) = calls.lines.items()
        assert line[:2] == (MATH, "torch")
        assert count == 1
        assert reason in line[2]
    with attnkern.use_as_sdpa() as calls, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q)
    assert calls.torch == 1


X = torch.zeros(2, 3, 5, 8)
BAD = [((X, X[..., :4], X), {}), ((X, X.double(), X), {}), ((X, X, X, torch.zeros(5, 5, dtype=torch.int64)), {})]
BAD += [((X, X, X), {"dropout_p": p}) for p in (-0.5, -1e-30, -math.inf, math.nan, 1.5, math.inf)]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("arguments", "options"), BAD)
def test_errors_are_torchs_own(arguments, options, full):
    for grad in (False, True):
        given = [x.detach().requires_grad_(grad and x.is_floating_point()) for x in arguments]
        with pytest.raises(Exception) as torchs:  # noqa: PT011
            F.scaled_dot_product_attention(*given, **options)
        with attnkern.use_as_sdpa(full=full), pytest.raises(type(torchs.value)) as ours:
            F.scaled_dot_product_attention(*given, **options)
        assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("full", [False, True])
def test_what_torch_reads_out_of_bounds_is_an_error(full):
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 4, 8)
    for length in (3, 5, 4000):
        for leaf in (q, q.detach().requires_grad_()):
            with attnkern.use_as_sdpa(full=full), pytest.raises(RuntimeError, match="key and value must have the same"):
                F.scaled_dot_product_attention(leaf, k, torch.randn(2, 3, length, 8))


OUT_OF_BOUNDS = [
    ("key and value must have the same length", (2, 6, 5, 8), (2, 6, 4, 8), (2, 6, 7, 8)),
    ("key's batch size must be query's 2", (2, 6, 5, 8), (3, 6, 4, 8), (3, 6, 4, 8)),
    ("key's batch size must be query's 2", (2, 6, 5, 8), (1, 6, 4, 8), (1, 6, 4, 8)),
    ("value's batch size must be query's 2", (2, 6, 5, 8), (2, 6, 4, 8), (1, 6, 4, 8)),
    ("that divides query's 9", (2, 9, 5, 8), (2, 7, 4, 8), (2, 7, 4, 8)),
    ("that divides query's 1", (2, 1, 5, 8), (2, 4, 4, 8), (2, 4, 4, 8)),
    ("that divides query's 6", (2, 6, 5, 8), (2, 4, 4, 8), (2, 6, 4, 8)),
    ("query must have heads and a length", (2, 9, 0, 8), (2, 7, 4, 8), (2, 7, 4, 8)),
    ("key must have heads and a length", (2, 9, 5, 8), (2, 0, 4, 8), (2, 0, 4, 8)),
]


@pytest.mark.parametrize(("message", "q", "k", "v"), OUT_OF_BOUNDS)
def test_what_torchs_operators_read_out_of_bounds_is_an_error(message, q, k, v):
    q, k, v = map(torch.randn, (q, k, v))
    lse = q.new_zeros(q.shape[:3])
    operator, backward = (getattr(aten, name[6:]) for name in (FORWARD, BACKWARD))
    with attnkern.use_as_sdpa() as calls:
        with pytest.raises(RuntimeError, match=f"^attnkern: .*{message}"):
            operator(q, k, v)
        with pytest.raises(RuntimeError, match=f"^attnkern: .*{message}"):
            backward(q, q, k, v, q, lse, 0.0, False)
    assert calls.torch == 0


@pytest.mark.parametrize("wrong", range(3), ids=["grad_out", "out", "logsumexp"])
def test_what_torchs_backward_reads_out_of_bounds_is_an_error(monkeypatch, wrong):
    monkeypatch.setattr(cpu, "refusals", lambda problem: ["it is told to"])
    q = torch.randn(2, 3, 5, 8)
    results = [q, q, q.new_zeros(q.shape[:3])]
    results[wrong] = results[wrong][:1]
    grad_out, out, lse = results
    with attnkern.use_as_sdpa(), pytest.raises(RuntimeError, match="must have the sizes of query"):
        getattr(aten, BACKWARD[6:])(grad_out, q, q, q, out, lse, 0.0, False)


def test_an_operator_that_torch_lacks_says_why():
    q = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    with attnkern.use_as_sdpa():
        with pytest.raises(RuntimeError, match=r"torch has no .* for CPU, and attnkern refuses: float64"):
            aten._scaled_dot_product_flash_attention(q, q, q)
        with pytest.raises(RuntimeError, match="refuses: dropout"):
            aten._scaled_dot_product_efficient_attention(*[q.float()] * 3, None, True, 0.5)
        with pytest.raises(RuntimeError, match="refuses: fewer key or value heads"):
            aten._scaled_dot_product_efficient_attention(q.float(), *[q[:, :1].float()] * 2, None, True)


def test_the_count_does_not_grow_without_bound(monkeypatch):
    monkeypatch.setattr(integration.counter, "_MAX_LINES", len(integration.counter._lines))
    calls = attnkern.SdpaCalls()
    for i in range(3):
        integration.counter.count("aten::x", "torch", f"length {i}")
    assert calls.lines == {("aten::x", "torch", "(other reasons)"): 3}


@pytest.mark.parametrize("forward_is_ours", [True, False])
def test_forward_and_backward_of_different_kernels_fit(forward_is_ours, dtype):
    """A context may end between them. Rows without a key, which kernels mark in their own way, included."""
    inputs = testing.make_inputs(2, 2, 7, 9, 8, dtype=dtype)
    mask = torch.rand(2, 1, 7, 9) < 0.6
    mask[0, :, 2] = mask[1] = False
    leaves = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    grad_out = torch.randn(2, 2, 7, 8).to(dtype)

    def use(ours):
        return attnkern.use_as_sdpa() if ours else contextlib.nullcontext()

    calls = attnkern.SdpaCalls()
    with use(forward_is_ours):
        out = F.scaled_dot_product_attention(*leaves, mask)
    with use(not forward_is_ours):
        grads = torch.autograd.grad(out, leaves, grad_out)
    assert calls.lines == {(FORWARD if forward_is_ours else BACKWARD, OURS, ""): 1}
    want = testing.expected(*inputs.tensors.values(), mask, grad_out=grad_out)
    # Torch's backward pass from our results is as good as from its own.
    by_torch = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, mask), leaves, grad_out)
    for name, grad, other in zip(("query", "key", "value"), grads, by_torch, strict=True):
        w = want[name]
        testing.assert_within_rule(
            grad, w.exact, other if forward_is_ours else w.baseline, gradient=True, unit=w.unit, name=name
        )


# --- all aten ops: strides, shapes and dtypes of torch's meta functions


def assert_alike(real, fake):
    """What tensors look like in memory; other results are equal."""
    for a, b in zip(real, fake, strict=True):
        assert isinstance(a, torch.Tensor) or a == b
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def flash(q, k, v, bias, **options):
    return aten._scaled_dot_product_flash_attention(q, k, v, **options)


def efficient(q, k, v, bias, **options):
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, **options)


def cudnn(q, k, v, bias, **options):
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, **options)


def for_cpu(q, k, v, bias, **options):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options, attn_mask=bias)


ATEN_OPS = {
    "cpu": (for_cpu, {"gqa", "mask"}),
    "flash": (flash, {"gqa"}),
    "efficient": (efficient, {"mask", "mask gradient", "head_dim_v"}),
    "cudnn": (cudnn, {"gqa", "mask", "head_dim_v"}),
}
FEATURES = [(), ("gqa",), ("mask",), ("mask", "mask gradient"), ("head_dim_v",)]
ATEN_OP_CASES = [(op, features) for op, (_, has) in ATEN_OPS.items() for features in FEATURES if has >= set(features)]


@pytest.mark.parametrize("layout", ["contiguous", "blhd", "sequence_first", "packed"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("op", "features"), ATEN_OP_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_aten_ops_follow_torchs_layouts(op, features, is_causal, layout, dtype):
    """Through torch's own autograd of the operator: forward and backward, results and what they look like in memory.

    The results that carry nothing (lengths, seeds, debug masks) are there too, as torch's meta functions say.
    """
    call, _ = ATEN_OPS[op]
    sizes, heads_k = (2, 4, 37, 43, 8, 5 if "head_dim_v" in features else 8), 2 if "gqa" in features else 4
    mask = ("holes", "1HLS") if "mask" in features else None
    inputs = testing.make_inputs(*sizes, heads_k=heads_k, dtype=dtype, layout=layout, mask=mask)
    tensors = inputs.tensors
    if mask is not None:
        tensors["attn_mask"] = tensors["attn_mask"].expand(2, 4, 37, 43)  # as torch hands it to an operator
    names = ["query", "key", "value", *(["attn_mask"] if "mask gradient" in features else [])]

    def run(given, grad_out=None):
        given = {n: x.detach().requires_grad_(n in names) for n, x in given.items()}
        out, *others = call(given["query"], given["key"], given["value"], given.get("attn_mask"), is_causal=is_causal)
        grad_out = torch.randn(out.shape).to(dtype) if grad_out is None else grad_out
        return grad_out, out, *others, *torch.autograd.grad(out, [given[n] for n in names], grad_out)

    with attnkern.use_as_sdpa() as calls:
        grad_out, *real = run(tensors)
    assert (calls.attnkern, calls.torch) == (2, 0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _, *fake = run({n: mode.from_tensor(x) for n, x in tensors.items()}, mode.from_tensor(grad_out))
    assert_alike(real, fake)

    want = testing.expected(*tensors.values(), grad_out=grad_out, is_causal=is_causal, enable_gqa="gqa" in features)
    lse = real[1].squeeze(-1) if op == "cudnn" else real[1]
    assert (lse[..., 37:] == math.inf).all()
    found = {"out": real[0], "lse": lse[..., :37], **dict(zip(names, real[-len(names) :], strict=True))}
    for name, actual in found.items():
        w = want[name]
        if name == "lse":  # of a row without a key, as torch's kernels write it
            w = dataclasses.replace(w, exact=w.exact.nan_to_num(neginf=0.0), baseline=w.baseline.nan_to_num(neginf=0.0))
        w.check(actual, gradient=name not in ("out", "lse"), name=name)


def test_no_log_sum_exp_where_none_is_asked_for():
    def call(x):
        return aten._scaled_dot_product_efficient_attention(x, x, x, None, False)

    q = torch.randn(2, 4, 5, 8)
    with attnkern.use_as_sdpa():
        real = call(q)
    with FakeTensorMode() as mode:
        assert_alike(real, call(mode.from_tensor(q)))


def test_the_slots_of_cuda_are_filled():
    """What a GPU's calls would find: kernels registered from Python, and none where there was none afterwards."""
    names = [name for name, (keys, _) in integration.aten_ops.PROVIDER.items() if "CUDA" in keys]
    assert len(names) == (10 if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace") else 9)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    before = {name: has(f"aten::{name}", "CUDA") for name in names}
    with attnkern.use_as_sdpa():
        assert all(has(f"aten::{name}", "CUDA") for name in names)
        for name in names:
            assert "sdpa/dispatch.py" in torch._C._dispatch_dump(f"aten::{name}").split("\nCUDA: ")[1].split("\n")[0]
    assert {name: has(f"aten::{name}", "CUDA") for name in names} == before
    gc.collect()


# --- compiled graphs


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs_follow_the_switch(backend):
    """One compiled before the switch, and never again."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    function = torch.compile(F.scaled_dot_product_attention, backend=counter, fullgraph=True)
    inputs = testing.make_inputs(2, 4, 9, 13, 8, layout="sequence_first")
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]

    def run():
        out = function(*leaves, is_causal=True)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    want = run()
    for _ in range(2):
        with attnkern.use_as_sdpa() as calls:
            got = run()
        assert calls.lines == {(FORWARD, OURS, ""): 1, (BACKWARD, OURS, ""): 1}
        between = attnkern.SdpaCalls()
        run()
        assert between.lines == {}
        for a, b in zip(got, want, strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_full_in_compiled_graphs():
    """Traced inside: our operators are in the graph, dropout included, and the cache of graphs tells them apart."""
    q = torch.randn(2, 4, 9, 8, requires_grad=True)
    with attnkern.use_as_sdpa(full=True):
        tag = torch.compiler.config.cache_key_tag
        recorder = torch._dynamo.testing.AotEagerAndRecordGraphs()
        torch._dynamo.reset()
        function = torch.compile(F.scaled_dot_product_attention, backend=recorder, fullgraph=True)
        torch.manual_seed(7)
        out = function(q, q, q, dropout_p=0.5)
        (grad,) = torch.autograd.grad(out.sum(), q)
    assert "attnkern.forward.default" in recorder.fw_graphs[0].code
    assert "attnkern.backward.default" in recorder.bw_graphs[0].code
    assert tag != torch.compiler.config.cache_key_tag
    torch.manual_seed(7)
    want = attnkern.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), q)[0])


# --- FLOPs and profiler


@pytest.mark.parametrize("full", [False, True])
def test_flops_and_profiler_names(full):
    q, k, v = (torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3))
    products = 2 * 2 * 4 * 9 * 9 * 16
    with attnkern.use_as_sdpa(full=full):
        with flop_counter.FlopCounterMode(display=False) as counter:
            F.scaled_dot_product_attention(q, k, v).sum().backward()
        assert counter.get_total_flops() == products * (2 + 5)
        with torch.profiler.profile() as profile:
            F.scaled_dot_product_attention(q, k, v).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"attnkern::forward", "attnkern::backward"} <= names
    if not full:
        assert {FORWARD, BACKWARD} <= names


# --- models: the same one with torch's attention and with ours, by activation alone


def called(model, *args, **options):
    return model(*args, **options)


def check_model(model, *args, run=called, rows=..., full=False, gradients=True, **options):
    """The output's `rows` and the gradients of all parameters, held to the rule: float64 is exact, torch's own the
    yardstick. Returns what was counted."""

    def results(model):
        dtype = dtype_of(model)
        given = [x.to(dtype) for x in args]
        masks = {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in options.items()}
        with torch.set_grad_enabled(gradients):
            out = run(model, *given, **masks)[rows]
        if not gradients:
            return {"output": out}
        model.zero_grad()
        (out * weights[: out.numel()].view_as(out).to(out.dtype)).sum().backward()
        return {"output": out.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}

    weights = torch.randn(10_000)
    exact = results(copy.deepcopy(model).double())
    baseline = results(model)
    with attnkern.use_as_sdpa(full=full) as calls:
        ours = results(model)
    testing.assert_within_rule(ours.pop("output"), exact.pop("output"), baseline.pop("output"))
    # All gradients at once, each in units of its largest entry: torch's own largest error is then one of thousands.
    scales = {name: x.abs().amax() for name, x in exact.items()}
    if gradients:
        ours, exact, baseline = (
            torch.cat([(grads[name].double() / scales[name]).flatten() for name in scales])
            for grads in (ours, exact, baseline)
        )
        unit = torch.tensor(torch.finfo(torch.float32).eps)
        testing.assert_within_rule(ours, exact, baseline, gradient=True, unit=unit, name="gradients")
    return calls


def dtype_of(model):
    return next(model.parameters()).dtype


SMOOTH = "gelu"  # a relu whose input rounds to the other side of 0 has another gradient
PADDING = torch.arange(9) >= torch.tensor([[9], [6], [4]])
CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(9)
ENCODER_MASKS = {
    "no mask": {},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "padding": {"src_key_padding_mask": PADDING},
    "padding and causal": {"mask": CAUSAL.isinf(), "src_key_padding_mask": PADDING},
}


MODES = pytest.mark.parametrize("mode", ["train", "eval", "eval, no_grad"])


@pytest.mark.parametrize("masks", ENCODER_MASKS)
@pytest.mark.parametrize("norm_first", [False, True])
@MODES
def test_transformer_encoder(masks, norm_first, mode):
    """Inference too, which torch takes a fast path for that never calls F.sdpa: activation turns it off."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, 0.0, SMOOTH, batch_first=True, norm_first=norm_first)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).train(mode == "train")
    rows, gradients = ~PADDING if "padding" in masks else ..., mode != "eval, no_grad"
    calls = check_model(model, torch.randn(3, 9, 32), rows=rows, gradients=gradients, **ENCODER_MASKS[masks])
    kinds = [FORWARD, BACKWARD] if gradients else [FORWARD]
    assert calls.lines == {(kind, OURS, ""): 2 for kind in kinds}


@MODES
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer_decoder(mode, batch_first):
    layer = torch.nn.TransformerDecoderLayer(32, 4, 48, 0.0, SMOOTH, batch_first=batch_first)
    model = torch.nn.TransformerDecoder(layer, 2).train(mode == "train")
    inputs = torch.randn(3, 9, 32), torch.randn(3, 7, 32)
    if not batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    masks = {"tgt_mask": CAUSAL, "tgt_is_causal": True, "memory_key_padding_mask": PADDING[:, :7]}
    gradients = mode != "eval, no_grad"
    calls = check_model(model, *inputs, gradients=gradients, **masks)
    assert (calls.attnkern, calls.torch) == (8 if gradients else 4, 0)


def test_whole_transformer_with_dropout_runs_on_ours_with_full():
    """In training dropout keeps the layers away from the aten ops; full=True takes them, and evaluation agrees."""
    model = torch.nn.Transformer(32, 4, 1, 1, 48, 0.1, SMOOTH, batch_first=True)
    inputs = torch.randn(3, 9, 32), torch.randn(3, 5, 32)
    with attnkern.use_as_sdpa() as calls:
        model(*inputs).sum().backward()
    assert calls.lines.keys() == {(MATH, "torch", next(iter(calls.lines))[2])}
    assert "dropout_p > 0" in str(calls)
    with attnkern.use_as_sdpa(full=True) as calls:
        model(*inputs).sum().backward()
    assert calls.lines == {(WHOLE, OURS, ""): 3}
    assert check_model(model.eval(), *inputs, full=True).lines == {(WHOLE, OURS, ""): 3}


def test_multihead_attention_in_the_dtype_of_autocast():
    def run(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype == torch.float32):
            return model(x, x, x, need_weights=False)[0]

    model = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    assert check_model(model, torch.randn(2, 9, 32), run=run).attnkern == 2


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("op", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_aten_ops_on_a_gpu(op, is_causal):
    """Ours where a backend has kernels, with torch's strides; torch's own where none has."""
    inputs = testing.make_inputs(2, 4, 64, 64, 64, dtype=torch.bfloat16, device="cuda", layout="blhd")
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]
    chosen = attnkern.explain(*leaves, is_causal=is_causal).chosen
    with sdpa_kernel(getattr(SDPBackend, op)):
        native = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
        with attnkern.use_as_sdpa() as calls:
            testing.check_attention(inputs, function=F.scaled_dot_product_attention, is_causal=is_causal)
            out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    assert out.stride() == native.stride()
    assert (calls.attnkern, calls.torch) == ((0, 3) if chosen == "reference" else (3, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("full", [None, False, True], ids=["attnkern", "activated", "full"])
def test_cuda_graphs_on_a_gpu(full, dropout_p):
    """Captured once, forward and backward, and replayed with other numbers; dropout draws anew in every replay."""
    function = attnkern.scaled_dot_product_attention if full is None else F.scaled_dot_product_attention
    inputs = testing.make_inputs(2, 4, 64, 64, 64, dtype=torch.bfloat16, device="cuda")
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]
    grad_out = torch.randn_like(leaves[0])

    def step():
        out = function(*leaves, is_causal=True, dropout_p=dropout_p)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    with contextlib.nullcontext() if full is None else attnkern.use_as_sdpa(full=full):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            leaves[2].mul_(2.0)
        runs = []
        for _ in range(2):
            graph.replay()
            runs.append([x.clone() for x in captured])
    if dropout_p:
        assert not torch.equal(runs[0][0], runs[1][0])
        assert all(x.isfinite().all() for x in runs[1])
        return
    want = testing.expected(*leaves, grad_out=grad_out, is_causal=True)
    for name, actual in zip(("out", "query", "key", "value"), runs[1], strict=True):
        w = want[name]
        w.check(actual, gradient=name != "out", name=name)


@pytest.mark.gpu
def test_compiled_with_cuda_graphs_on_a_gpu():
    inputs = testing.make_inputs(2, 4, 64, 64, 64, dtype=torch.bfloat16, device="cuda")
    function = torch.compile(attnkern.scaled_dot_product_attention, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        testing.check_attention(inputs, function=lambda **x: function(**x, is_causal=True).clone(), is_causal=True)
