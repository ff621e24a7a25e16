"""Every feature of torch with attnkern's functions: eager, traced by AOTAutograd, compiled by Inductor. Makes a table.

A feature is a function of `compile`, which leaves a function as it is or compiles it, whole (fullgraph=True). It raises
where results are wrong. The rows are those of docs/compile.md, where each test looks for its own.
"""

import contextlib
import copy
import functools
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attnkern
from attnkern import testing

PAGE = (Path(__file__).parent.parent / "docs" / "compile.md").read_text()
sdpa, attention = attnkern.scaled_dot_product_attention, attnkern.attention


class Column:
    """One way to run a function."""

    def __init__(self, backend):
        self.backend = backend
        self.graphs = 0

    def __call__(self, function, **options):
        if self.backend == "eager":
            return function
        self.counter = torch._dynamo.testing.CompileCounterWithBackend(self.backend)
        return torch.compile(function, backend=self.counter, fullgraph=True, **options)

    def assert_one_graph(self):
        assert self.backend == "eager" or self.counter.frame_count == 1


COLUMNS = ("eager", "aot_eager", "inductor")


def naive(*args, **options):
    return testing.naive_attention(*args, **options)[0]


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def double(*sizes, **options):
    return [*testing.make_inputs(*sizes, dtype=torch.float64, **options).tensors.values()]


FEATURES = {}
NO = {}  # (feature, column) -> what the table says, and the error that shows it


def feature(name, **no):
    def add(function):
        FEATURES[name] = function
        for column, text_and_error in no.items():
            NO[name, column] = text_and_error
        return function

    return add


# --- calls


@feature("inference under `no_grad`")
def no_grad(compile):
    q, k, v = (x.requires_grad_() for x in double(2, 3, 5, 7, 8))
    with torch.no_grad():
        out = compile(lambda *x: sdpa(*x, is_causal=True))(q, k, v)
    assert not out.requires_grad
    same(out, naive(q, k, v, is_causal=True).detach())


@feature("`inference_mode`")
def inference_mode(compile):
    with torch.inference_mode():
        q, k, v = double(2, 3, 5, 7, 8)
        out = compile(lambda *x: sdpa(*x))(q, k, v)
        assert out.is_inference()
        same(out, naive(q, k, v))


@feature("forward and backward: mask gradient, window, softcap, grouped heads, log-sum-exp")
def training(compile):
    leaves = [x.requires_grad_() for x in double(2, 4, 5, 7, 8, heads_k=2, mask=("float", "1HLS"), layout="blhd")]
    options = {"window": (3, 2), "softcap": 5.0, "enable_gqa": True}
    got = compile(lambda *x: attention(*x, **options, return_lse=True))(*leaves)
    want = testing.naive_attention(*leaves, **options)
    grads = [torch.randn_like(x) for x in want]
    same(got, want)
    same(torch.autograd.grad(got, leaves, grads), torch.autograd.grad(want, leaves, grads))


@feature("dynamic shapes: one graph for all, inference and training")
def dynamic_shapes(compile):
    for requires_grad in (False, True):
        function = compile(lambda *x: sdpa(*x, is_causal=True), dynamic=True)
        for batch, length in ((2, 5), (3, 9), (4, 33)):
            leaves = [x.requires_grad_(requires_grad) for x in double(batch, 3, length, length + 3, 16)]
            out, want = function(*leaves), naive(*leaves, is_causal=True)
            same(out, want)
            if requires_grad:
                same(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), leaves))
        compile.assert_one_graph()


@feature("decoding with a growing cache: one graph")
def decoding(compile):
    q, k, v = double(1, 4, 1, 12, 8, heads_k=2)
    function = compile(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), dynamic=True)
    for length in (3, 4, 5, 11):
        x = q, k[:, :, :length], v[:, :, :length]
        same(function(*x), naive(*x, enable_gqa=True))
    compile.assert_one_graph()


@feature("dropout that follows `torch.manual_seed`")
def dropout(compile):
    """Inductor draws other numbers than eager mode, of every function; they follow the seed all the same."""
    q, k, v = (x.requires_grad_() for x in double(2, 3, 5, 40, 8))
    function = compile(lambda *x: sdpa(*x, dropout_p=0.5))

    def run():
        torch.manual_seed(1)
        return function(q, k, v), function(q, k, v)

    first, second = run()
    assert not torch.equal(first, second)
    for got, want in zip(run(), (first, second), strict=True):
        assert torch.equal(got, want)
    # out is linear in v: the backward pass drops what the forward pass dropped.
    (grad_v,) = torch.autograd.grad(first.sum(), v)
    same((grad_v * v).sum(), first.sum())


@feature("autocast")
def autocast(compile):
    q, k, v = (x.float().requires_grad_() for x in double(2, 3, 5, 7, 8))
    function = compile(lambda *x: sdpa(*x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(q, k, v)
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert (out.dtype, grad.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, sdpa(*(x.bfloat16() for x in (q, k, v))))


# --- transforms


@functools.cache
def transformed(backend):
    """{transform: (of attnkern's, of plain maths)}; few compilations, for these are slow.

    The inputs are fixed: whichever test comes first, they are the same.
    """
    compile = Column(backend)
    x, tangent = double(2, 3, 4, seed=1)[:2]
    small = double(1, 1, 2, head_dim=2, seed=2)[0]

    # As little around attention as there can be: Inductor compiles every loop there is.
    def reverse(attend, x):
        def f(y):
            return attend(y, y, y, is_causal=True)

        def loss(y):
            return f(y).sum()

        return {
            "`torch.func.grad`": grad(loss)(x),
            "`torch.func.grad` of `grad`": grad(lambda y: grad(loss)(y).sum())(x),
            "`torch.func.vjp`": vjp(f, x)[1](x)[0],
            "`torch.func.vmap`": vmap(f)(x),
            "`vmap` of `vmap`": vmap(vmap(lambda y: attend(y, y, y)))(x),
            "`vmap` of `grad` (gradients per sample)": vmap(grad(loss))(x),
            "`grad` of `vmap`": grad(lambda y: vmap(f)(y).sum())(x),
        }

    def forward(attend, x):
        def f(y):
            return attend(y, y, y, is_causal=True)

        return {"`torch.func.jvp`": jvp(f, (x,), (tangent,))[1]}

    def jacobians(attend, x):
        def loss(y):
            return attend(y, y, y, is_causal=True).sum()

        return {
            "`jacrev`": jacrev(loss)(x),
            "`jacfwd`": jacfwd(loss)(x),
            "`hessian` (`jacfwd` of `jacrev`)": hessian(loss)(x),
        }

    results = {}
    for function, argument in ((reverse, x), (forward, x), (jacobians, small)):
        torch._dynamo.reset()
        got = compile(functools.partial(function, sdpa))(argument)
        want = function(naive, argument)
        results |= {name: (got[name], want[name]) for name in want}
    return results


for name in (
    "`torch.func.grad`",
    "`torch.func.grad` of `grad`",
    "`torch.func.vjp`",
    "`torch.func.vmap`",
    "`vmap` of `vmap`",
    "`vmap` of `grad` (gradients per sample)",
    "`grad` of `vmap`",
    "`torch.func.jvp`",
    "`jacrev`",
    "`jacfwd`",
    "`hessian` (`jacfwd` of `jacrev`)",
):
    feature(name)(lambda compile, name=name: same(*transformed(compile.backend)[name]))


@feature("`vmap` of `grad`, dynamic shapes: one graph")
def dynamic_transform(compile):
    def per_sample(attend):
        return vmap(grad(lambda y: attend(y, y, y, is_causal=True).sum()))

    function = compile(per_sample(sdpa), dynamic=True)
    for sizes in ((2, 3, 4, 5), (3, 2, 6, 5)):  # head sizes stay: the default scale is made of them
        x = torch.randn(sizes, dtype=torch.float64)
        same(function(x), per_sample(naive)(x))
    compile.assert_one_graph()


NO_DOUBLE_BACKWARD = "no: torch has none of compiled graphs", "does not currently support double backward"


@feature("double backward (`create_graph=True`)", aot_eager=NO_DOUBLE_BACKWARD, inductor=NO_DOUBLE_BACKWARD)
def double_backward(compile):
    leaves = [x.requires_grad_() for x in double(2, 3, 5, 7, 8)]

    def second(function):
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    same(second(compile(lambda *x: sdpa(*x))), second(naive))


NO_DUAL = (
    "no: no graph carries them; `torch.func.jvp` does",
    r"dual numbers .* cannot be compiled|Attempted to wrap a dual tensor",
)


@feature("dual numbers (`torch.autograd.forward_ad`)", aot_eager=NO_DUAL, inductor=NO_DUAL)
def dual_numbers(compile):
    q, k, v = double(2, 3, 5, 7, 8)
    tangent = torch.randn_like(q)
    with torch.autograd.forward_ad.dual_level():
        out = compile(lambda *x: sdpa(*x))(torch.autograd.forward_ad.make_dual(q, tangent), k, v)
        carried = torch.autograd.forward_ad.unpack_dual(out).tangent
    same(carried, jvp(lambda x: naive(x, k, v), (q,), (tangent,))[1])


@feature("batched gradients (`is_grads_batched=True`)")
def batched_gradients(compile):
    leaves = [x.requires_grad_() for x in double(2, 3, 5, 7, 8)]
    grads = torch.randn(4, 2, 3, 5, 8, dtype=torch.float64)

    def run(function):
        return torch.autograd.grad(function(*leaves), leaves, grads, is_grads_batched=True)

    same(run(compile(lambda *x: sdpa(*x))), run(naive))


# --- checkpointing


def checkpointed(compile, **options):
    leaves = [x.requires_grad_() for x in double(2, 3, 5, 7, 8)]

    def run(attend):
        def block(q, k, v):
            return attend(q.sin(), k, v).cos()

        return lambda *x: checkpoint(block, *x, **options)

    def loss_and_grads(function):
        out = function(*leaves)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    same(loss_and_grads(compile(run(sdpa))), loss_and_grads(run(naive)))


@feature("checkpointing")
def checkpointing(compile):
    checkpointed(compile, use_reentrant=False)


@feature("checkpointing, reentrant")
def checkpointing_reentrant(compile):
    leaves = [x.requires_grad_() for x in double(2, 3, 5, 7, 8)]
    function = compile(lambda *x: sdpa(*x))
    out = checkpoint(lambda *x: function(*x).cos(), *leaves, use_reentrant=True)
    out.square().sum().backward()
    want = torch.autograd.grad(naive(*leaves).cos().square().sum(), leaves)
    same([x.grad for x in leaves], list(want))


@feature("checkpointing with dropout")
def checkpointing_with_dropout(compile):
    q, k, v = (x.requires_grad_() for x in double(2, 3, 5, 7, 8))
    function = compile(lambda *x: checkpoint(lambda *y: sdpa(*y, dropout_p=0.5), *x, use_reentrant=False))
    out = function(q, k, v)
    # out is linear in v: the recomputed weights are the dropped ones of the forward pass.
    (grad_v,) = torch.autograd.grad(out.sum(), v)
    same((grad_v * v).sum(), out.sum())


class Counter(TorchDispatchMode):
    """Operators that run; those which a checkpoint's own mode answers from what it kept do not arrive here."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@feature("selective checkpointing that keeps `attnkern::forward`")
def selective_checkpointing(compile):
    leaves = [x.requires_grad_() for x in double(2, 3, 5, 7, 8)]
    keep = CheckpointPolicy.MUST_SAVE

    def policy(context, operator, *args, **kwargs):
        kept = operator is torch.ops.attnkern.forward.default
        return keep if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run(attend):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return lambda *x: checkpoint(
            lambda q, k, v: attend(q.sin(), k, v), *x, use_reentrant=False, context_fn=contexts
        )

    function = compile(run(sdpa))
    torch.autograd.grad(function(*leaves).sum(), leaves)  # compiles
    counter = Counter()
    if compile.backend == "eager":
        with counter:
            got = torch.autograd.grad(function(*leaves).square().sum(), leaves)
    else:  # a dispatch mode would keep the graph from running
        with torch.profiler.profile() as profile:
            got = torch.autograd.grad(function(*leaves).square().sum(), leaves)
        counter.names = [event.name for event in profile.events()]
    assert counter.names.count("attnkern::forward") == 1
    same(got, torch.autograd.grad(run(naive)(*leaves).square().sum(), leaves))


# --- programs


def exported(compile, strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v, is_causal=True)

    length, keys = (torch.export.Dim(n, min=2, max=64) for n in ("length", "keys"))
    shapes = ({2: length}, {2: keys}, {2: keys})
    program = torch.export.export(Module(), (*double(2, 3, 5, 7, 8),), dynamic_shapes=shapes, strict=strict)
    assert "attnkern.attention" in str(program.graph)
    run = compile(program.module(), dynamic=True)
    for sizes in ((2, 3, 5, 7, 8), (2, 3, 11, 4, 8)):
        x = [each.requires_grad_() for each in double(*sizes)]
        results = [f(*x, is_causal=True) if f is naive else f(*x) for f in (run, naive)]
        same(*results)
        same(*(torch.autograd.grad(out.square().sum(), x) for out in results))


@feature("`torch.export`, strict")
def export_strict(compile):
    exported(compile, True)


@feature("`torch.export`, not strict")
def export(compile):
    exported(compile, False)


@feature("fake tensors")
def fake_tensors(compile):
    tensors = double(2, 3, 5, 7, 8, layout="blhd")
    real = sdpa(*tensors)
    with FakeTensorMode() as mode:
        fake = compile(lambda *x: sdpa(*x))(*(mode.from_tensor(x) for x in tensors))
    assert type(fake) is FakeTensor
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@feature("meta tensors, gradients")
def meta_tensors(compile):
    q, k, v = (x.to("meta").requires_grad_() for x in double(2, 3, 5, 7, 8, 4))
    out = compile(lambda *x: sdpa(*x))(q, k, v)
    assert (out.shape, out.device.type) == ((2, 3, 5, 4), "meta")
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


class Block(torch.nn.Module):
    def __init__(self, attend=sdpa):
        super().__init__()
        self.projection = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.attend = attend

    def forward(self, x):
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@feature("modules copied and pickled")
def copies(compile):
    block, x = Block(), torch.randn(2, 5, 16, dtype=torch.float64)
    want = block(x)
    # A test module has no importable name, so the class travels by hand; the function travels by itself.
    attend, state = pickle.loads(pickle.dumps((block.attend, block.state_dict())))
    unpickled = Block(attend)
    unpickled.load_state_dict(state)
    for module in (copy.deepcopy(block), unpickled):
        same(compile(module)(x), want)


@feature("calls from several threads")
def threads(compile):
    function = compile(lambda *x: sdpa(*x, is_causal=True))
    problems = [[x.requires_grad_() for x in double(2, 3, 5, 7, 8)] for _ in range(4)]
    want = [torch.autograd.grad(naive(*x, is_causal=True).sum(), x) for x in problems]
    torch.autograd.grad(function(*problems[0]).sum(), problems[0])  # compiled once, by one
    results = [None] * 4

    def work(i):
        for _ in range(5):
            results[i] = torch.autograd.grad(function(*problems[i]).sum(), problems[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    same(results, want)


# --- tensors that are not plain


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


# Torch's check of operators' aliases, in AOTAutograd, knew no such subclass; F.sdpa itself failed in the same way.
NO_SUBCLASS = "as F.sdpa: not in torch 2.13, in 2.15", "Multiple dispatch failed|Unsupported hasattr call"  # 2.13; 2.11


@feature("subclasses with `__torch_function__`", aot_eager=NO_SUBCLASS, inductor=NO_SUBCLASS)
def torch_function(compile, attend=sdpa):
    q, k, v = double(2, 3, 5, 7, 8)
    out = compile(lambda *x: attend(*x))(q.as_subclass(Named), k, v)
    assert type(out) is Named
    same(out.as_subclass(torch.Tensor), naive(q, k, v))


@feature("subclasses with `__torch_dispatch__`")
def torch_dispatch(compile):
    pairs = [double(2, 3, 5, 7, 8) for _ in range(2)]
    leaves = [TwoTensor(a, b).requires_grad_() for a, b in zip(*pairs, strict=True)]
    out = compile(lambda *x: sdpa(*x))(*leaves)
    grads = torch.autograd.grad(out.sum(), leaves)
    for i, part in enumerate("ab"):
        plain = [x.requires_grad_() for x in pairs[i]]
        want = naive(*plain)
        same(getattr(out, part), want.detach())
        same([getattr(g, part) for g in grads], list(torch.autograd.grad(want.sum(), plain)))


@feature("jagged nested tensors, forward and backward")
def jagged(compile):
    lengths = [4, 7, 2]
    values = torch.randn(13, 3, 8, dtype=torch.float64, requires_grad=True)

    def attend(x):
        y = x.transpose(1, 2)
        return sdpa(y, y, y, is_causal=True).transpose(1, 2)

    offsets = torch.tensor([0, 4, 11, 13])
    out = compile(attend)(torch.nested.nested_tensor_from_jagged(values, offsets)).values()
    parts = [x.transpose(0, 1) for x in values.split(lengths)]
    want = torch.cat([naive(x, x, x, is_causal=True) for x in parts], 1).transpose(0, 1)
    same(out, want)
    same(*torch.autograd.grad(out.sum(), values), *torch.autograd.grad(want.sum(), values))


# --- F.sdpa


def by_activation(compile, leaves, full, **options):
    leaves = [x.requires_grad_() for x in leaves]
    with attnkern.use_as_sdpa(full=full) as calls:
        out = compile(lambda *x: F.scaled_dot_product_attention(*x, **options))(*leaves)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert calls.torch == 0
    assert calls.attnkern > 0
    return out, grads


@feature("F.sdpa, activated")
def activated(compile):
    leaves = [x.float() for x in double(2, 3, 5, 7, 8)]  # Inductor of torch 2.11 has no float64 there
    out, grads = by_activation(compile, leaves, False, is_causal=True)
    want = naive(*leaves, is_causal=True)
    torch.testing.assert_close((out, *grads), (want, *torch.autograd.grad(want.sum(), leaves)))


@feature("F.sdpa with `full=True`, dropout")
def activated_in_full(compile):
    leaves = double(2, 3, 5, 7, 8)
    out, grads = by_activation(compile, leaves, True, dropout_p=0.5)
    same((grads[2] * leaves[2]).sum(), out.sum())  # linear in value, with the dropped weights


# --- the table


# What torch can compile in some versions, of its own attention as of ours.
AS_TORCH = ("subclasses with `__torch_function__`",)


def can(function, backend, attend, error):
    """Whether a feature works with an attention; False where it fails with this error."""
    torch._dynamo.reset()
    try:
        function(Column(backend), attend)
    except Exception as found:
        if re.search(error, str(found)) is None:
            raise
        return False
    return True


def cell(name, backend):
    torch._dynamo.reset()
    text, error = NO.get((name, backend), ("yes", None))
    if error is not None and name in AS_TORCH:
        ours, torchs = (
            can(FEATURES[name], backend, attend, error) for attend in (sdpa, F.scaled_dot_product_attention)
        )
        assert ours == torchs, f"attnkern {'can' if ours else 'cannot'}, F.sdpa {'can' if torchs else 'cannot'}"
        return text
    with contextlib.nullcontext() if error is None else pytest.raises(Exception, match=error):
        FEATURES[name](Column(backend))
    return text


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name, record_property):
    row = f"| {name} | " + " | ".join(cell(name, backend) for backend in COLUMNS) + " |"
    record_property("feature", row)
    assert row in PAGE.splitlines()


@pytest.mark.parametrize("name", AS_TORCH)
def test_what_torchs_own_attention_cannot_compile_it_can_do_eagerly(name):
    FEATURES[name](Column("eager"), F.scaled_dot_product_attention)


def test_forward_over_reverse_with_dynamic_shapes():
    """Second derivatives keep to the layouts that forward mode can do with symbolic sizes."""
    torch._dynamo.reset()
    compile = Column("aot_eager")

    def second(attend):
        return lambda x: jvp(grad(lambda y: attend(y, y, y).sum()), (x,), (x,))[1]

    function = compile(second(sdpa), dynamic=True)
    for sizes in ((2, 3, 4, 5), (3, 2, 6, 5)):
        x = torch.randn(sizes, dtype=torch.float64)
        same(function(x), second(naive)(x))
    compile.assert_one_graph()


@pytest.mark.parametrize("option", ["dropout_p", "scale"])
def test_floats_from_outside_make_no_more_graphs_than_torchs_own(option):
    q, k, v = double(2, 3, 5, 7, 8)
    counts = []
    for attend in (sdpa, F.scaled_dot_product_attention):
        torch._dynamo.reset()
        compile = Column("aot_eager")
        function = compile(lambda *x, number, attend=attend: attend(*x, **{option: number}), dynamic=True)
        for number in (0.25, 0.25, 0.5):
            function(q, k, v, number=number)
            counts.append(compile.counter.frame_count)
    assert counts[:3] == counts[3:]


def test_the_page_has_no_other_rows():
    table = re.search(r"<!-- features:begin -->\n(.*?)<!-- features:end -->", PAGE, re.DOTALL)[1].splitlines()
    assert table[0] == "| | " + " | ".join(COLUMNS) + " |"
    assert [row.split(" | ")[0].removeprefix("| ") for row in table[2:]] == [*FEATURES, "CUDA graphs"]
