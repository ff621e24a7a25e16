"""torch.func, double backward, checkpointing, autocast, compile, export, fake tensors: what torch does to functions."""

import contextlib
import copy
import io
import itertools
import operator
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import attnkern
from attnkern import masks, testing
from attnkern.mask import Mask
from attnkern.params import GRAD_GRAD_LSE, GRAD_GRAD_OUT
from attnkern.signatures import GRAD_BITS, Inputs

contract = pytest.mark.contract
OPTIONS = [{}, {"is_causal": True}, {"enable_gqa": True}]


def naive(*args, **options):
    return testing.naive_attention(*args, **options)[0]


def squared(function, **options):
    return lambda *x: function(*x, **options).square().sum()


def heads_k(options):
    """Of 4 heads of the query."""
    return 2 if "enable_gqa" in options else 4


def leaves_of(target, *sizes, **of):
    return [x.requires_grad_() for x in target.inputs(*sizes, **of).tensors.values()]


def double(target, *sizes, **of):
    """Small float64 inputs: transforms are compared with the same transforms of plain torch to rounding."""
    return tuple(target.inputs(*sizes, dtype=torch.float64, **of).tensors.values())


def same(got, want):
    assert_close(got, want, rtol=1e-9, atol=1e-11)


# --- double backward


@contract(49, 60)
@pytest.mark.parametrize("options", [*OPTIONS, {"window": (1, 1)}, {"softcap": 2.0}, {"mask": True}], ids=str)
def test_double_backward(target, options):
    """Of one first derivative and of all, in grad_out too; where sdpa_kernel chooses for torch as well."""
    options = dict(options)
    mask = ("float", "1HLS") if options.pop("mask", False) else None
    leaves = leaves_of(target, 2, 4, 3, 5, 3, heads_k=heads_k(options), mask=mask, dtype=torch.float64)
    grad_out = target.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)

    def derivatives(function):
        first = torch.autograd.grad(function(*leaves, **options), leaves, grad_out, create_graph=True)
        losses = first[0].square().sum(), sum(x.sin().sum() for x in first)
        return first, *(torch.autograd.grad(loss, (*leaves, grad_out), retain_graph=True) for loss in losses)

    want = derivatives(naive)
    same(derivatives(target.attention), want)
    with sdpa_kernel(SDPBackend.MATH):
        same(derivatives(target.attention), want)


@contract(49)
def test_gradient_penalty(target):
    """The loss through torch.autograd.grad, where a pruned error node would silently give wrong numbers."""
    leaf = target.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)

    def penalty(function):
        (g,) = torch.autograd.grad(squared(function)(leaf, leaf, leaf), leaf, create_graph=True)
        return torch.autograd.grad(g.square().sum(), leaf)

    want = penalty(naive)
    same(penalty(target.attention), want)
    gradient = grad(lambda x: squared(target.attention)(x, x, x))
    same(grad(lambda x: gradient(x).square().sum())(leaf.detach()), want[0])


# --- torch.func and dual numbers


@contract(50, 51)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_jvp_vjp_and_grad(target, options):
    """Of out and lse, by all inputs."""
    mask = None if "is_causal" in options else ("float", "LS")
    primals = double(target, 2, 4, 3, 5, 3, heads_k=heads_k(options), mask=mask)
    tangents = tuple(torch.randn_like(x) for x in primals)
    cotangents = target.randn(2, 4, 3, 3, dtype=torch.float64), target.randn(2, 4, 3, dtype=torch.float64)

    def derivatives(call):
        out, pull = vjp(call, *primals)
        gradient = grad(lambda *x: call(*x)[0].square().sum(), tuple(range(len(primals))))
        return out, pull(cotangents), gradient(*primals), jvp(call, primals, tangents)

    same(
        derivatives(lambda *x: target.attention(*x, **options, return_lse=True)),
        derivatives(lambda *x: testing.naive_attention(*x, **options)),
    )


@contract(50)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dual_numbers(target, options):
    """Of which one input is one."""
    q, k, v = double(target, 2, 4, 3, 5, 3, heads_k=heads_k(options))
    tangent = torch.randn_like(q)
    with forward_ad.dual_level():
        out = target.sdpa(forward_ad.make_dual(q, tangent), k, v, **options)
        carried = forward_ad.unpack_dual(out).tangent
    same(carried, jvp(lambda x: naive(x, k, v, **options), (q,), (tangent,))[1])


@contract(50, 51)
@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian], ids=lambda f: f.__name__)
@pytest.mark.parametrize("argument", range(3), ids=["query", "key", "value"])
def test_jacobians(target, transform, argument):
    inputs = double(target, 1, 1, 2, 3, 2)

    def reduced(function):
        return squared(function) if transform is hessian else lambda *x: function(*x).sum((0, 1))

    same(transform(reduced(target.sdpa), argument)(*inputs), transform(reduced(naive), argument)(*inputs))


@contract(50, 51)
@pytest.mark.parametrize("outer", [jacrev, jacfwd], ids=lambda f: f.__name__)
@pytest.mark.parametrize("inner", [jacrev, jacfwd, hessian], ids=lambda f: f.__name__)
def test_derivatives_of_derivatives(target, inner, outer):
    """Second order by every pair of modes, and third order, of out and lse; then of several samples at once."""
    q, k, v, mask = double(target, 1, 2, 2, 3, 2, heads_k=1, mask=("float", "LS"))

    def function(attend):
        """Of a few numbers that move all inputs, so that the results stay small."""

        def loss(x):
            out, lse = attend(q * x[0], k * x[1], v + x[2], mask * x[3], softcap=1.5, enable_gqa=True)
            return out.square().sum() + lse.sin().sum()

        return outer(inner(loss))

    ours = function(lambda *x, **options: target.attention(*x, **options, return_lse=True))
    plain = function(testing.naive_attention)
    samples = torch.rand(2, 4, dtype=torch.float64, device=target.device)
    same(ours(samples[0]), plain(samples[0]))
    same(vmap(ours)(samples), vmap(plain)(samples))


@contract(49, 50)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_every_way_to_the_second_derivative(target, dropout_p):
    """Finite differences of forward mode, of reverse over reverse and of forward over reverse, batched ones too."""
    inputs = leaves_of(target, 2, 2, 2, 3, 2, heads_k=1, mask=("float", "LS"), dtype=torch.float64)

    def call(*x):
        torch.manual_seed(4)
        return target.attention(*x, dropout_p=dropout_p, softcap=2.0, enable_gqa=True, return_lse=True)

    of_first = {"check_forward_ad": True, "check_batched_grad": True}
    of_first |= {"check_batched_forward_grad": not dropout_p}  # vmap draws no random numbers
    of_second = {"check_fwd_over_rev": True, "check_rev_over_rev": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(call, inputs, **of_first)
    assert torch.autograd.gradgradcheck(call, inputs, **of_second)


@contract(51)
@pytest.mark.parametrize("mask", [None, ("float", "1HLS"), ("float", "LS"), ("bool", "BHLS")], ids=str)
def test_per_sample_gradients(target, mask):
    samples = target.randn(3, 2, 2, 3, 4, dtype=torch.float64)
    _, *shared = double(target, 2, 2, 3, 5, 4, mask=mask)
    arguments = tuple(i for i, x in enumerate((samples, *shared)) if x.is_floating_point())
    got = vmap(grad(squared(target.sdpa), arguments), (0, *[None] * len(shared)))(samples, *shared)
    want = [grad(squared(naive), arguments)(x, *shared) for x in samples]
    same(got, [torch.stack(x) for x in zip(*want, strict=True)])


# --- vmap


def check_vmap(attend, dims, *tensors, **options):
    """out and lse of all samples at once, against one call for each."""

    def call(*x):
        return attend(*x, **options, return_lse=True)

    def sample(i):
        return call(*(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True)))

    (count,) = {x.size(dim) for x, dim in zip(tensors, dims, strict=True) if dim is not None}
    want = zip(*map(sample, range(count)), strict=True)
    assert_close(vmap(call, dims)(*tensors), tuple(torch.stack(x) for x in want))


@contract(52)
@pytest.mark.parametrize("in_dims", list(itertools.product((None, 0, 2), repeat=3))[1:], ids=str)
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_vmap_over_any_dimension(target, in_dims, rank):
    leading = (2, 3)[: rank - 2]
    shapes = [(*leading, *size) for size in ((5, 4), (6, 4), (6, 3))]
    tensors = [
        target.randn(*shape) if dim is None else target.randn(7, *shape).movedim(0, dim)
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    check_vmap(target.attention, in_dims, *tensors, is_causal=True)


@contract(52)
@pytest.mark.parametrize("mask_dim", [None, 0, 1])
@pytest.mark.parametrize("shape", ["LS", "BHLS", "1HLS", "B11S"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_vmap_with_masks(target, mask_dim, shape, kind):
    q, k, v, mask = target.inputs(2, 4, 5, 6, 4, heads_k=2, mask=(kind, shape)).tensors.values()
    if mask_dim is not None:
        mask = torch.stack([mask, mask.flip(-1), mask.flip(-2)], mask_dim)
    queries = torch.stack([q, q + 1, q - 1])
    check_vmap(target.attention, (0, None, None, mask_dim), queries, k, v, mask, enable_gqa=True)


PAGED_DIMS = {"query": (0, None, None, None), "query and table": (2, None, None, 2), "pool of keys": (0, 1, None, None)}
PAGED_DIMS |= {"pools": (None, 0, 2, None), "table": (None, None, None, 0), "all": (1, 0, 0, 1)}


@pytest.mark.parametrize("dims", PAGED_DIMS.values(), ids=PAGED_DIMS)
def test_vmap_with_pages(target, dims):
    samples, batch = 3, 2
    q, pools = target.randn(samples, batch, 4, 5, 8), target.randn(2, samples, 7, 2, 16, 8)
    table = torch.stack([torch.randperm(7)[:6].view(batch, 3) for _ in range(samples)]).to(target.device).int()
    ranges = torch.tensor([[0, 48], [3, 20]], device=target.device)[:, None, None, None]
    table[:, 1, 2] = -1  # no key there is attended to
    given = zip((q, *pools, table), dims, strict=True)
    tensors = [x[0] if dim is None else x.movedim(0, dim) for x, dim in given]

    def attend(query, key, value, block_table, **options):
        return target.attention(query, key, value, block_table=block_table, key_ranges=ranges, **options)

    check_vmap(attend, dims, *tensors, enable_gqa=True)


@contract(52)
def test_vmap_nested_with_out_dims_and_lse(target):
    q, k, v = target.randn(3, 2, 4, 5, 4), target.randn(2, 4, 6, 4), target.randn(2, 4, 6, 4)

    def call(*x):
        return target.attention(*x, return_lse=True)

    got = vmap(vmap(call), (0, None, None), out_dims=(2, 1))(q, k, v)
    outs, lses = zip(*(call(x, k, v) for x in q), strict=True)
    assert_close(got, (torch.stack(outs, 2), torch.stack(lses, 1)))


@contract(52)
def test_dropout_under_vmap(target):
    """An error by default; "same" gives every sample one mask, "different" each its own."""
    q, k = target.randn(1, 2, 2, 9, 4).repeat(3, 1, 1, 1, 1), target.randn(2, 2, 20, 4)
    eye = torch.eye(20, device=target.device).expand(2, 2, 20, 20)

    def kept(**options):
        return vmap(lambda x: target.sdpa(x, k, eye, dropout_p=0.5), **options)(q) != 0

    with pytest.raises(RuntimeError, match="randomness"):
        kept()
    shared, own = kept(randomness="same"), kept(randomness="different")
    assert torch.equal(shared[0], shared[1])
    assert torch.equal(shared[0], shared[2])
    assert not torch.equal(own[0], own[1])
    assert not torch.equal(own[0, 0], own[0, 1])


@contract(51, 52)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_of_dropout_under_vmap(target, randomness):
    """The backward pass under vmap regenerates each sample's own mask: d(sum)/d(value) shows it."""
    q, k, v = (target.randn(3, 1, 2, 6, 4, dtype=torch.float64) for _ in range(3))

    def loss(x, y, z):
        out = target.sdpa(x, y, z, dropout_p=0.5)
        return out.sum(), out

    gradient, out = vmap(grad(loss, 2, has_aux=True), randomness=randomness)(q, k, v)
    # out = W v with the dropped weights W, so <out, 1> = <W^T 1, v>, and the gradient is W^T 1.
    assert_close(out.sum((-1, -2)), (gradient * v).sum((-1, -2)))


# --- autocast


LOW = [torch.bfloat16, torch.float16]


@contract(56)
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("dtypes", [*([d] * 3 for d in (torch.float32, *LOW)), [torch.float32, *LOW]], ids=str)
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts(target, low, dtypes, mask_dtype):
    given = [target.randn(2, 2, 5, 8).to(d) for d in dtypes]
    if mask_dtype is not None:
        given.append(target.randn(5, 5) > 0 if mask_dtype == torch.bool else target.randn(5, 5).to(mask_dtype))
    leaves = [x.requires_grad_() for x in given if x.is_floating_point()]
    with torch.autocast(target.device, dtype=low):
        out = target.sdpa(*given)
    assert out.dtype == low
    assert torch.equal(out, target.sdpa(*(x.to(low) if x.is_floating_point() else x for x in given)))
    for x, g in zip(leaves, torch.autograd.grad(out.float().square().sum(), leaves), strict=True):
        assert g.dtype == x.dtype
        assert g.isfinite().all()


@contract(56)
def test_autocast_leaves_float64_alone(target):
    q, k, v = double(target, 2, 2, 5, 7, 4)
    with torch.autocast(target.device, dtype=torch.bfloat16):
        out = target.sdpa(q, k, v)
        with pytest.raises(RuntimeError, match="dtype"):
            target.sdpa(q, k.float(), v.float())
        with torch.autocast(target.device, enabled=False):
            assert target.sdpa(q.float(), k.float(), v.float()).dtype == torch.float32
        with pytest.raises(RuntimeError):
            target.sdpa(q.long(), k.long(), v.long())
    assert out.dtype == torch.float64
    assert torch.equal(out, target.sdpa(q, k, v))


@contract(56)
def test_derivatives_inside_autocast(kernel_target):
    """What is computed in a tile is not cast."""
    q, k, v = (x.bfloat16() for x in kernel_target.inputs(2, 2, 5, 7, 8).tensors.values())
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))

    def derivatives():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        first = torch.autograd.grad(kernel_target.sdpa(*leaves).sum(), leaves, create_graph=True)
        return jvp(kernel_target.sdpa, (q, k, v), tangents), torch.autograd.grad(first, leaves, tangents)

    want = derivatives()
    with torch.autocast(kernel_target.device, dtype=torch.bfloat16):
        assert_close(derivatives(), want, rtol=0, atol=0)


# --- compile


def compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def check_training(function, call, leaves):
    """Results, their strides and the gradients are those of `call`; both give a tuple."""
    got, want = function(*leaves), call(*leaves)
    assert_close(got, want, check_stride=True)
    grads = [torch.randn_like(x) for x in want]
    assert_close(torch.autograd.grad(got, leaves, grads), torch.autograd.grad(want, leaves, grads))


@contract(53)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 1)}, {"return_lse": True}], ids=str)
def test_compile_trains(target, options, dtype):
    leaves = leaves_of(target, 2, 2, 9, 13, 8, dtype=dtype, mask=("float", "1HLS"), layout="packed")

    def call(*x):
        result = target.attention(*x, **options)
        return result if isinstance(result, tuple) else (result,)

    function, counter = compiled(call)
    check_training(function, call, leaves)
    assert counter.frame_count == 1


@contract(53)
def test_inductor_keeps_strides(target):
    leaves = leaves_of(target, 2, 2, 9, 13, 8)

    def call(q, k, v):
        return ((target.sdpa(q * 2, k, v, is_causal=True) + 1).square(),)

    check_training(compiled(call, "inductor")[0], call, leaves)


@contract(53)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_compile_dynamic_makes_one_graph(target, requires_grad):
    function, counter = compiled(lambda q, k, v: target.sdpa(q, k, v, is_causal=True), dynamic=True)
    counts = []
    for batch, seqlen in [(2, 5), (3, 9), (4, 17), (5, 33), (6, 64)]:
        # No two sizes are equal in the first call: the compiler takes equal ones for one and the same.
        inputs = target.inputs(batch, 3, seqlen, seqlen + 3, 16)
        q, k, v = (x.requires_grad_(requires_grad) for x in inputs.tensors.values())
        out = function(q, k, v)
        assert_close(out, target.sdpa(q, k, v, is_causal=True))
        if requires_grad:
            out.sum().backward()
        counts.append(counter.frame_count)
    # The first call may give two graphs: Dynamo starts again when a float argument turns out to be a constant.
    assert counts == counts[:1] * 5


@contract(53)
def test_compile_takes_the_shape_of_a_mask_and_of_empty_dimensions(target):
    function, _ = compiled(lambda *x: target.sdpa(*x))
    for inputs in (
        target.inputs(2, 2, 9, 13, 8, mask=("bool", "B11S")),
        target.inputs(2, 2, 9, 0, 8),
        target.inputs(2, 2, 0, 9, 8),
        target.random((9, 8), (3, 13, 8), (3, 13, 8)),
    ):
        x = inputs.tensors.values()
        assert_close(function(*x), target.sdpa(*x))


@contract(53)
def test_compile_takes_numbers_of_numpy(target):
    """Dynamo takes them for arrays without dimensions."""
    q, table = target.randn(2, 3, 5, 8), target.randn(9)
    scale, one, left, center = 1 / np.sqrt(8), np.float64(1), np.int64(2), np.int64(4)

    def call(q, table):
        options = {"scale": scale, "softcap": one, "window": (left, 0)}
        return target.attention(q, q, q, relative_bias=table, relative_bias_center=center, **options)

    function, _ = compiled(call)
    assert_close(function(q, table), call(q, table))
    # What is computed in the graph, as torch takes it.
    function, _ = compiled(lambda q: target.sdpa(q, q, q, scale=1 / np.sqrt(q.shape[-1])))
    assert_close(function(q), target.sdpa(q, q, q))


@pytest.mark.parametrize("x", [1, "yes", [True]], ids=lambda x: type(x).__name__)
def test_errors_in_whole_graphs_say_what_is_wrong(x):
    q = torch.randn(2, 3, 5, 8)
    function, _ = compiled(lambda q: attnkern.attention(q, q, q, is_causal=x))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"'is_causal' must be bool, not {type(x).__name__}"):
        function(q)


# --- sizes that depend on data

KEPT = {  # of (batch, heads, length, size): query, key and value, of which a bool vector keeps some
    "batch": lambda x, keep: (x[keep],) * 3,
    "heads": lambda x, keep: (x[:, keep],) * 3,
    "length": lambda x, keep: (x[:, :, keep],) * 3,
    "queries": lambda x, keep: (x[:, :, keep], x, x),
    "keys": lambda x, keep: (x, x[:, :, keep], x[:, :, keep]),
    "heads of (batch, length, heads)": lambda x, keep: (x.transpose(1, 2).contiguous().transpose(1, 2)[:, keep],) * 3,
}


def with_mask(attend, q, k, v):
    return attend(q, k, v, (q[..., :1] + k[..., 1].unsqueeze(-2)) > 0)


def with_ranges(attend, q, k, v):
    begin = torch.arange(q.shape[-2])
    return attend(q, k, v, key_ranges=torch.stack([begin, begin + 3], -1).unsqueeze(1))


def packed(attend, q, k, v):
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    ends = (torch.arange(3) * (x.shape[0] // 2) for x in (q, k))
    ends_q, ends_k = (torch.cat([end[:2], torch.full((1,), x.shape[0])]) for end, x in zip(ends, (q, k), strict=True))
    return attnkern.varlen_attention(q, k, v, ends_q, ends_k)


MODULE = attnkern.nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(False)
OF_KEPT = {
    "plain": lambda attend, q, k, v: attend(q, k, v),
    "causal": lambda attend, q, k, v: attend(q, k, v, is_causal=True, alignment="bottom_right"),
    "mask": with_mask,
    "ranges": with_ranges,
    "grouped": lambda attend, q, k, v: attend(torch.cat([q, q], 1), k, v, enable_gqa=True),
    "one head": lambda attend, q, k, v: attend(q, k.mean(1, keepdim=True), v.mean(1, keepdim=True), enable_gqa=True),
    "module": lambda attend, q, k, v: MODULE(q.mean(1), k.mean(1), v.mean(1))[0],
    "packed": packed,
}

PAIRS = [
    *itertools.product(("length",), OF_KEPT),
    *((kept, "plain") for kept in KEPT if kept != "length"),
    *(("batch", "mask"), ("batch", "ranges"), ("batch", "module"), ("heads", "grouped"), ("heads", "one head")),
    *(("queries", "mask"), ("queries", "packed"), ("keys", "mask"), ("keys", "packed")),
]


@pytest.fixture
def sizes_of_data():
    """A compiled graph may hold a size that its data says."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


@contract(53, 54)
@pytest.mark.parametrize("way", ["export", "fullgraph"])
@pytest.mark.parametrize(("kept", "call"), PAIRS)
@pytest.mark.usefixtures("sizes_of_data")
def test_sizes_that_depend_on_data(kept, call, way):
    """One program serves 0, 1 and more rows, and knows the strides of its results."""

    class Module(torch.nn.Module):
        def forward(self, x, keep):
            return OF_KEPT[call](attnkern.attention, *KEPT[kept](x, keep))

    x = torch.randn(4, 4, 4, 8)
    if way == "export":
        program = torch.export.export(Module(), (x, torch.arange(4) < 3)).module()
    else:
        program = torch.compile(Module(), backend="aot_eager", fullgraph=True)
    for n in (3, 0, 1, 4):
        keep = torch.arange(4) < n
        assert_close(program(x, keep), Module()(x, keep))


@contract(46, 53)
@pytest.mark.parametrize("kept", ["batch", "length", "heads of (batch, length, heads)"])
@pytest.mark.usefixtures("sizes_of_data")
def test_gradients_of_sizes_that_depend_on_data(kept):
    def loss(x, keep):
        return attnkern.attention(*KEPT[kept](x, keep)).square().sum()

    x = torch.randn(4, 4, 4, 8, requires_grad=True)
    program = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for n in (3, 0, 1):
        got, want = (torch.autograd.grad(f(x, torch.arange(4) < n), x) for f in (program, loss))
        assert_close(got, want)


# --- export and tracing


@contract(54)
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_sizes(target, strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return target.sdpa(q, k, v, is_causal=True)

    example, other = (tuple(target.inputs(*n).tensors.values()) for n in ((2, 2, 9, 13, 8), (5, 2, 3, 30, 8)))
    batch, length, keys = (torch.export.Dim(n, min=2, max=64) for n in ("batch", "length", "keys"))
    shapes = ({0: batch, 2: length}, {0: batch, 2: keys}, {0: batch, 2: keys})
    program = torch.export.export(Module(), example, dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program, torch.export.load(file), program.run_decompositions()):
        for x in (example, other):
            assert_close(exported.module()(*x), Module()(*x))


@contract(54)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("options", [{}, {"sinks": 2}, {"window": (4, 2)}, {"return_lse": True}], ids=str)
def test_exported_programs_have_derivatives(target, options, strict):
    """Every kind that the function itself has: they hold an operator that calls it again."""
    dtype = torch.float64 if target.device == "cpu" else torch.float32

    options = dict(options)
    heads_with_sinks = options.pop("sinks", 0)

    class Module(torch.nn.Module):
        def forward(self, q, k, v, bias, sinks=None):
            return target.attention(q, k, v, bias, sinks=sinks, **options)

    x = tuple(target.inputs(2, 2, 9, 13, 8, dtype=dtype, mask=("float", "1H1S")).tensors.values())
    if heads_with_sinks:
        x += (torch.randn(heads_with_sinks, dtype=dtype, device=target.device),)
    program = torch.export.export(Module(), x, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    given = tuple(range(len(x)))

    def loss(run):
        def of(*x):
            results = run(*x)
            return sum(each.square().sum() for each in (results if isinstance(results, tuple) else [results]))

        return of

    leaves = [each.detach().clone().requires_grad_() for each in x]
    want, moves = loss(Module()), tuple(torch.randn_like(each) for each in leaves)
    for run in (program.module(), torch.export.load(file).module()):
        got = loss(run)
        first, second = (torch.autograd.grad(f(*leaves), leaves, create_graph=True) for f in (got, want))
        assert_close(first, second)
        assert_close(*(torch.autograd.grad(grads[0].square().sum(), leaves[1]) for grads in (first, second)))
        assert_close(*(torch.func.grad(f, given)(*x) for f in (got, want)))
        assert_close(*(torch.func.jvp(f, x, moves) for f in (got, want)))
        many = tuple(torch.stack([each, each + 1]) for each in x)
        assert_close(*(torch.func.vmap(torch.func.grad(f))(*many) for f in (got, want)))


@contract(54)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_vmap_and_jvp(target, strict):
    """Transforms within the model, which run in the program; as far as torch exports them (it has no `grad` there)."""

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            many = torch.func.vmap(target.sdpa, (0, None, None))(q, k[0], v[0])
            weights = torch.func.vmap(attnkern.attention_weights)(q, k)
            return many, weights, torch.func.jvp(target.sdpa, (q, k, v), (k, v, q))[1]

    x = leaves_of(target, 2, 3, 7, 7, 8)
    program = torch.export.export(Module(), tuple(x), strict=strict).module()
    results = []
    for run in (program, Module()):
        many, weights, tangent = run(*x)
        grads = torch.autograd.grad(many.square().sum() + weights.square().sum(), x)
        results.append((many, weights, tangent, *grads))
    assert_close(*results)


@contract(54)
def test_an_exported_program_trains(target):
    """A loop of an optimizer, the program compiled or not, gives the model's own parameters."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = torch.nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.projection(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            return target.sdpa(q, k, v, is_causal=True)

    model = Module().to(target.device)
    x = torch.randn(2, 7, 16, device=target.device)
    program = torch.export.export(model, (x,)).module()
    ways = [copy.deepcopy(each) for each in (model, program, program)]  # the program has the model's own parameters
    ways[2].compile()
    results = []
    for run in ways:
        parameters = list(run.parameters())
        optimizer = torch.optim.SGD(parameters, 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            run(x).square().sum().backward()
            optimizer.step()
        results.append([each.detach().clone() for each in parameters])
    for each in results[1:]:
        assert_close(each, results[0])
    assert not torch.equal(results[0][0], model.projection.weight)


@contract(54)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_through_autograd(target, mode):
    def call(*x):
        out = target.sdpa(*x, is_causal=True)
        return out, *torch.autograd.grad(out.square().sum(), x)

    example, other = (leaves_of(target, 2, 2, 9, 13, 8) for _ in range(2))
    graph = make_fx(call, tracing_mode=mode)(*example)
    assert_close(graph(*other), call(*other))


def traced(call, *example):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TracerWarning, and that torch.jit is deprecated
        return torch.jit.trace(call, example, check_trace=False)


@contract(54)
@pytest.mark.parametrize("window", [None, (2, 1), (None, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("with_ranges", [False, True])
def test_a_jit_trace_holds_at_other_lengths(target, with_ranges, rank, is_causal, window):
    """Level at the bottom right, whose offset comes of the lengths."""

    def call(q, k, ranges):
        given = {"is_causal": is_causal, "window": window, "alignment": "bottom_right", "backend": target.backend}
        return attnkern.attention(q, k, k, key_ranges=ranges if with_ranges else None, **given)

    def inputs(seqlen_q, seqlen_k):
        q, k = (target.randn(*(2, 3, n, 8)[-rank:]) for n in (seqlen_q, seqlen_k))
        ends = torch.tensor([[1, seqlen_k - 2]], device=target.device)
        return q, k, ends.expand(seqlen_q, 1, 2)

    with torch.no_grad():
        trace = traced(call, *inputs(5, 5))
        for sizes in ((4, 11), (9, 9), (11, 4)):
            arguments = inputs(*sizes)
            assert_close(trace(*arguments), call(*arguments))


@contract(54)
@pytest.mark.parametrize("tracer", ["jit", "make_fx"])
def test_a_trace_decides_nothing_by_values(tracer):
    """Padding at the end is a range of keys, in the middle it is not."""
    module = attnkern.nn.MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False)

    def call(x, hidden):
        return module(x, x, x, key_padding_mask=hidden, need_weights=False)[0]

    x = torch.randn(1, 4, 8)
    end, middle = (torch.tensor([mask], dtype=torch.bool) for mask in ([0, 0, 0, 1], [0, 1, 0, 0]))
    graph = traced(call, x, end) if tracer == "jit" else make_fx(call, tracing_mode="real")(x, end)
    assert_close(graph(x, middle), call(x, middle))


def test_cu_seqlens_of_a_trace_may_be_others():
    def call(x, cu, used):
        return attnkern.varlen_attention(x, x, x, cu, seqused_k=used, is_causal=True)

    trace = traced(call, torch.randn(10, 2, 8), torch.tensor([0, 3, 10]), torch.tensor([3, 5]))
    arguments = torch.randn(14, 2, 8), torch.tensor([0, 3, 8, 12]), torch.tensor([3, 1, 4])
    assert_close(trace(*arguments), call(*arguments))


MASKS_OF_DATA = {
    "padding": lambda x: masks.padding(x),
    "ids": lambda x: masks.document(x),
    "cu_seqlens": lambda x: masks.document(cu_seqlens=x),
    "packed": lambda x: masks.packed(x),
    "bool": lambda x: masks.from_bool(x > x[:, None]),
    "ranges": lambda x: masks.from_ranges(x.expand(1, 1, 1, 2, 2), 2, 2),
    "or": lambda x: masks.causal(2) | masks.padding(x[1:], 2, 2),
    "not": lambda x: ~masks.padding(x[1:], 2, 2),
}


@pytest.mark.parametrize("what", MASKS_OF_DATA)
def test_masks_that_look_at_data_are_refused_in_a_jit_trace(what):
    with pytest.raises(RuntimeError, match=r"which torch\.jit\.trace would keep as constants"):
        traced(lambda x: MASKS_OF_DATA[what](x).to_dense(), torch.tensor([0, 2]))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("what", ["padding", "ids", "cu_seqlens", "packed", "bool"])
def test_masks_that_look_at_data_are_refused_in_an_export(what, strict):
    class Module(torch.nn.Module):
        def forward(self, x):
            return MASKS_OF_DATA[what](x).to_dense()

    with pytest.raises(Exception, match=r"which torch\.export doesn't know"):
        torch.export.export(Module(), (torch.tensor([0, 2]),), strict=strict)


class Holder(torch.nn.Module):
    """A model of one's own around a module or a function."""

    def __init__(self, held, call):
        super().__init__()
        self.held, self.call, self.mask = held, call, attnkern.masks.sliding_window(2, 0, 4, 4, sinks=1)

    def forward(self, x, y):
        return self.call(self, x, y)


def split_keys(model, x, y):
    parts = [attnkern.attention(x, y, y, return_lse=True, is_causal=causal) for causal in (False, True)]
    out, lse = attnkern.merge_attention(*parts)
    again, _ = attnkern.merge_attention((out, lse), parts[1])
    return again


CU = torch.tensor([0, 1, 3])
TRACED = {  # what is held, how it is called, and what the graph calls
    "sdpa": (
        lambda: None,
        lambda m, x, y: attnkern.scaled_dot_product_attention(x, y, y, is_causal=True),
        [attnkern.scaled_dot_product_attention],
    ),
    "multihead": (
        lambda: attnkern.nn.MultiheadAttention(8, 2, dropout=0.5, window=(1, 1)),
        lambda m, x, y: m.held(x, y, value=y, need_weights=True)[0].relu(),
        ["held"],
    ),
    "weights": (lambda: attnkern.nn.MultiheadAttention(8, 2), lambda m, x, y: m.held(x, y, y)[1], ["held"]),
    "cross": (
        lambda: attnkern.nn.CrossAttention(8, num_heads=2),
        lambda m, x, y: m.held(x, context=y, is_causal=True),
        ["held"],
    ),
    "varlen": (
        lambda: None,
        lambda m, x, y: attnkern.varlen_attention(x, y, y, CU, scale=0.5),
        [attnkern.varlen_attention],
    ),
    "merge": (lambda: None, split_keys, [attnkern.attention] * 2 + [attnkern.merge_attention] * 2),
    "mask": (lambda: None, lambda m, x, y: attnkern.attention(x, y, y, m.mask), [Mask, attnkern.attention]),
}


@contract(54, 57)
@pytest.mark.parametrize(("make", "call", "calls"), TRACED.values(), ids=TRACED)
def test_fx_traces_models_with_modules_and_functions(make, call, calls):
    """By the default tracer, as torch.nn.MultiheadAttention."""
    model = Holder(make(), call).eval()
    traced = torch.fx.symbolic_trace(model)
    x, y = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    for graph in (traced, pickle.loads(pickle.dumps(traced)), torch.fx.symbolic_trace(copy.deepcopy(traced))):
        assert torch.equal(graph(x, y), model(x, y))
    nodes = [node for node in traced.graph.nodes if node.op in ("call_module", "call_function")]
    assert [node.target for node in nodes if node.target is not operator.getitem] == calls
    assert type(getattr(traced, "held", None)) is type(model.held)


# --- fake and meta tensors


@contract(55)
@pytest.mark.parametrize("layout", ["contiguous", "blhd", "packed", "sequence_first", "e_major"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}, {"enable_gqa": True}], ids=str)
def test_fake_tensors_agree_with_real_ones(target, layout, options, dtype):
    inputs = target.inputs(2, 4, 5, 7, 8, heads_k=heads_k(options), dtype=dtype, layout=layout).tensors.values()
    real = target.attention(*inputs, return_lse=True, **options)
    with FakeTensorMode() as mode:
        fake = target.attention(*map(mode.from_tensor, inputs), return_lse=True, **options)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


@contract(55)
@pytest.mark.parametrize("sizes", [(5, 7), (5, 0), (0, 7)], ids=str)
def test_meta_tensors_with_gradients(sizes):
    n, s = sizes
    shapes = [(2, 2, n, 8), (2, 2, s, 8), (2, 2, s, 3)]
    leaves = [torch.randn(shape, device="meta", requires_grad=True) for shape in shapes]
    out = attnkern.scaled_dot_product_attention(*leaves, torch.zeros(n, s, dtype=torch.bool, device="meta"))
    assert (out.shape, out.dtype, out.device.type) == ((2, 2, n, 3), torch.float32, "meta")
    out.sum().backward()
    assert [x.grad.shape for x in leaves] == shapes


@contract(55)
def test_errors_are_raised_for_meta_tensors_too():
    q, k = torch.randn(2, 5, 8, device="meta"), torch.randn(2, 5, 9, device="meta")
    with pytest.raises(RuntimeError, match="key"):
        attnkern.scaled_dot_product_attention(q, k, k)
    with pytest.raises(RuntimeError, match="dtype"):
        attnkern.scaled_dot_product_attention(q, q.double(), q)


def operator_samples(target):
    """Arguments of the operators, as autograd gives them."""
    unbounded = 2**62
    for dtype, heads_k, mask, options in [
        (torch.float32, 4, None, {}),
        (torch.float32, 2, ("float", "1HLS"), {"right": 0, "sinks": 2}),
        (torch.bfloat16, 4, ("bool", "B11S"), {"left": 3}),
        (torch.float64 if target.device == "cpu" else torch.float16, 1, ("float", "B1L1"), {"dropout_p": 0.4}),
    ]:
        drawn = target.inputs(2, 4, 5, 7, 8, 6, heads_k=heads_k, dtype=dtype, mask=mask)
        bias = drawn.attn_mask
        dropout_p = options.get("dropout_p", 0.0)
        seed = torch.tensor([7], device=target.device) if dropout_p else None
        params = (0.3, 0.0, options.get("left", unbounded), options.get("right", unbounded), 0, dropout_p)
        sinks = torch.zeros(options["sinks"], 4, device=target.device) if "sinks" in options else None
        inputs = Inputs(drawn.query, drawn.key, drawn.value, bias, sinks, None, seed)
        forward = (*inputs, *params, True, target.backend)
        out, lse = torch.ops.attnkern.forward(*forward)
        has_gradient = [x is not None and x.is_floating_point() for x in inputs.differentiable]
        bits = sum(bit for bit, has in zip(GRAD_BITS, has_gradient, strict=True) if has)
        grads = torch.randn_like(out), torch.randn_like(lse)
        yield "forward", forward
        yield "attention", forward
        yield "backward", (*grads, *inputs, out, lse, *params, bits, target.backend)
        each = zip(inputs.differentiable, has_gradient, strict=True)
        moves = [torch.randn_like(x) if has else None for x, has in each]
        yield "tangent", (*inputs, *moves, out, lse, *params, target.backend)
        for mask in (GRAD_GRAD_OUT + GRAD_GRAD_LSE + bits, 5):
            second = (*moves, grads[0], grads[1] if mask != 5 else None, *inputs, out, lse)
            yield "second_backward", (*second, *params, mask, target.backend)


@contract(55)
def test_opcheck(kernel_target):
    for name, arguments in operator_samples(kernel_target):
        torch.library.opcheck(
            getattr(torch.ops.attnkern, name).default,
            arguments,
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


# --- FLOPs


def counted(call):
    """What a call gives, and its FLOPs."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return result, counter.get_total_flops()


@contract(53)
def test_flops_are_counted(target):
    leaves = leaves_of(target, 2, 3, 32, 64, 8, 16)
    _, flops = counted(lambda: target.sdpa(*leaves).sum().backward())
    products = 2 * 2 * 3 * 32 * 64 * (8 + 16)
    assert 3 * products <= flops <= 4 * products  # backward computes the scores again


@contract(53)
@pytest.mark.parametrize("shape", [None, *map("".join, itertools.product("B1", "H1", "L1"))])
def test_flops_of_every_derivative(kernel_target, shape):
    """All scores, or those of key ranges, each once, whatever they were broadcast to; d is the head size of query and
    key, e that of value."""
    inputs, ranges, live = kernel_target.inputs(2, 3, 32, 64, 8, 16), None, 2 * 3 * 32 * 64
    if shape is not None:
        ranges = inputs.with_ranges("anything", shape, 2, torch.int64, 3).key_ranges
        live = int(testing.ranges_mask(ranges, 64).expand(2, 3, 32, 64).sum())
        assert 0 < live < 2 * 3 * 32 * 64
    q, k, v = leaves = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    ones = [torch.ones_like(x) for x in leaves]

    def attend(q):
        return kernel_target.attention(q, k, v, key_ranges=ranges)

    out, forward = counted(lambda: attend(q))
    first, backward = counted(lambda: torch.autograd.grad(out, leaves, torch.ones_like(out), create_graph=True))
    _, second = counted(lambda: torch.autograd.grad(first, leaves, ones))
    _, tangent = counted(lambda: jvp(attend, (q.detach(),), (ones[0],)))
    d, e = 8, 16
    sizes = d + e, 3 * d + 2 * e, (3 * d + 2 * e) + (4 * d + 3 * e), (d + e) + (2 * d + e)
    assert [forward, backward, second, tangent] == [2 * live * size for size in sizes]


@pytest.mark.parametrize(("kind", "scores"), [("real", 0), ("fake", 2 * 3 * 32 * 64), ("meta", 2 * 3 * 32 * 64)])
def test_flops_of_empty_key_ranges(kernel_target, kind, scores):
    """None where they can be looked at; all scores where they have no values."""
    device, attend = kernel_target.device, kernel_target.attention
    if kind == "meta":
        device, attend = "meta", attnkern.attention
    with FakeTensorMode() if kind == "fake" else contextlib.nullcontext():
        q, k, v = (torch.zeros(2, 3, *size, device=device) for size in ((32, 8), (64, 8), (64, 16)))
        ranges = torch.zeros(32, 1, 2, dtype=torch.int32, device=device)
        _, flops = counted(lambda: attend(q, k, v, key_ranges=ranges))
    assert flops == 2 * scores * (8 + 16)


@pytest.mark.parametrize("is_causal", [False, True])
def test_flops_of_packed_sequences(kernel_target, is_causal):
    """A sequence's own scores only: as many as one call for each sequence has, less what their windows hide."""
    lengths = [5, 0, 20, 9]
    q, k, v = (kernel_target.randn(34, 2, 8) for _ in range(3))
    ends = torch.tensor([0, *itertools.accumulate(lengths)], device=kernel_target.device)
    options = {"is_causal": is_causal, "backend": kernel_target.backend}
    _, flops = counted(lambda: attnkern.varlen_attention(q, k, v, ends, **options))
    scores = sum(n * (n + 1) // 2 if is_causal else n * n for n in lengths)
    assert flops == 2 * 2 * scores * (8 + 8)


@contract(53)
def test_no_warnings_on_the_ordinary_path(target):
    leaves = [x.requires_grad_() for x in target.inputs(2, 2, 9, 13, 8).tensors.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.sdpa(*leaves, is_causal=True).sum().backward()
