"""torch.func, double backward, checkpointing, autocast, compile, export, fake tensors: what torch does to functions."""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import attnkern
from attnkern import masks, testing
from attnkern.params import GRAD_GRAD_LSE, GRAD_GRAD_OUT
from attnkern.signatures import GRAD_BITS, Inputs

contract = pytest.mark.contract
OPTIONS = [{}, {"is_causal": True}, {"enable_gqa": True}]


def naive(*args, **options):
    return testing.naive_attention(*args, **options)[0]


def double(target, *sizes, heads_k=None, mask=None):
    """Small float64 inputs: transforms are compared with the same transforms of plain torch to rounding."""
    return target.inputs(*sizes, heads_k=heads_k, mask=mask, dtype=torch.float64).tensors.values()


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


# --- double backward


@contract(49)
@pytest.mark.parametrize("options", [*OPTIONS, {"window": (1, 1)}, {"softcap": 2.0}, {"mask": True}], ids=str)
def test_double_backward(target, options):
    options = dict(options)
    mask = ("float", "1HLS") if options.pop("mask", False) else None
    leaves = [
        x.requires_grad_()
        for x in double(target, 2, 4, 3, 5, 3, heads_k=2 if "enable_gqa" in options else 4, mask=mask)
    ]
    grad_out = torch.randn(2, 4, 3, 3, dtype=torch.float64, device=target.device)

    def second_order(function):
        out = function(*leaves, **options)
        first = torch.autograd.grad(out, leaves, grad_out, create_graph=True)
        return first, torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    for got, want in zip(second_order(target.attention), second_order(naive), strict=True):
        same(got, want)


@contract(49)
def test_double_backward_through_grad_out(target):
    q, k, v = (x.requires_grad_() for x in double(target, 1, 2, 3, 5, 3))
    grad_out = torch.randn(1, 2, 3, 3, dtype=torch.float64, device=target.device, requires_grad=True)

    def through(function):
        first = torch.autograd.grad(function(q, k, v), (q, k, v), grad_out, create_graph=True)
        return torch.autograd.grad([x.sin().sum() for x in first], (grad_out, q))

    same(through(target.attention), through(naive))


@contract(49)
def test_gradient_penalty(target):
    """The loss through torch.autograd.grad, where a pruned error node would silently give wrong numbers."""
    leaf = target.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)

    def penalty(function):
        (g,) = torch.autograd.grad(function(leaf, leaf, leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(g.square().sum(), leaf)

    same(penalty(target.attention), penalty(naive))
    same(
        grad(lambda x: grad(lambda y: target.attention(y, y, y).square().sum())(x).square().sum())(leaf.detach()),
        penalty(naive)[0],
    )


@contract(49)
def test_gradgradcheck(target):
    leaves = tuple(x.requires_grad_() for x in double(target, 1, 1, 2, 3, 2, mask=("float", "LS")))
    assert torch.autograd.gradgradcheck(lambda *x: target.attention(*x, return_lse=True), leaves)


@contract(49)
def test_double_backward_with_dropout(target):
    leaves = [x.requires_grad_() for x in double(target, 1, 2, 3, 5, 3)]

    def call(*x):
        torch.manual_seed(4)
        return target.attention(*x, dropout_p=0.3)

    assert torch.autograd.gradgradcheck(call, leaves)


@contract(49, 60)
def test_double_backward_inside_sdpa_kernel_math(target):
    leaves = [x.requires_grad_() for x in double(target, 1, 2, 3, 5, 3)]
    with sdpa_kernel(SDPBackend.MATH):
        first = torch.autograd.grad(target.sdpa(*leaves).sum(), leaves, create_graph=True)
        want = torch.autograd.grad(F.scaled_dot_product_attention(*leaves).sum(), leaves, create_graph=True)
        same(
            torch.autograd.grad(first[0].square().sum(), leaves, allow_unused=True),
            torch.autograd.grad(want[0].square().sum(), leaves, allow_unused=True),
        )


# --- forward mode


@contract(50)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_jvp(target, options):
    primals = tuple(double(target, 2, 4, 3, 5, 3, heads_k=2 if "enable_gqa" in options else 4, mask=("float", "LS")))
    tangents = tuple(torch.randn_like(x) for x in primals)
    if "is_causal" in options:
        primals, tangents = primals[:3], tangents[:3]
    same(
        jvp(lambda *x: target.sdpa(*x, **options), primals, tangents),
        jvp(lambda *x: naive(*x, **options), primals, tangents),
    )


@contract(50)
def test_jvp_of_out_and_lse(target):
    primals = tuple(double(target, 2, 2, 3, 5, 3))
    tangents = tuple(torch.randn_like(x) for x in primals)
    got = jvp(lambda *x: target.attention(*x, return_lse=True), primals, tangents)
    same(got, jvp(lambda *x: testing.naive_attention(*x), primals, tangents))


@contract(50)
def test_dual_numbers(target):
    q, k, v = double(target, 2, 2, 3, 5, 3)
    tangent = torch.randn_like(q)
    with torch.autograd.forward_ad.dual_level():
        out = target.sdpa(torch.autograd.forward_ad.make_dual(q, tangent), k, v)
        carried = torch.autograd.forward_ad.unpack_dual(out).tangent
        assert carried is not None
    same(carried, jvp(lambda x: naive(x, k, v), (q,), (tangent,))[1])


@contract(50, 51)
@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian], ids=lambda f: f.__name__)
@pytest.mark.parametrize("argument", range(3), ids=["query", "key", "value"])
def test_jacobians(target, transform, argument):
    inputs = tuple(double(target, 1, 1, 2, 3, 2))

    def reduced(function):
        return lambda *x: function(*x).sum((0, 1)) if transform is not hessian else function(*x).square().sum()

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
    q, k, v, mask = (x.requires_grad_() for x in double(target, 2, 2, 2, 3, 2, heads_k=1, mask=("float", "LS")))

    def call(*x):
        torch.manual_seed(4)
        return target.attention(*x, dropout_p=dropout_p, softcap=2.0, enable_gqa=True, return_lse=True)

    inputs = (q, k, v, mask)
    assert torch.autograd.gradcheck(
        call,
        inputs,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=not dropout_p,  # vmap draws no random numbers
    )
    assert torch.autograd.gradgradcheck(
        call, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


# --- reverse mode under torch.func


@contract(51)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_func_grad_and_vjp(target, options):
    inputs = tuple(double(target, 2, 4, 3, 5, 3, heads_k=2 if "enable_gqa" in options else 4))

    def loss(function):
        return lambda *x: function(*x, **options).square().sum()

    same(grad(loss(target.sdpa), (0, 1, 2))(*inputs), grad(loss(naive), (0, 1, 2))(*inputs))
    out, pull = vjp(lambda *x: target.sdpa(*x, **options), *inputs)
    want, want_pull = vjp(lambda *x: naive(*x, **options), *inputs)
    cotangent = torch.randn_like(out)
    same((out, *pull(cotangent)), (want, *want_pull(cotangent)))


@contract(51)
@pytest.mark.parametrize("mask", [None, ("float", "1HLS"), ("float", "LS"), ("bool", "BHLS")], ids=str)
def test_per_sample_gradients(target, mask):
    samples = 3
    q = torch.randn(samples, 2, 2, 3, 4, dtype=torch.float64, device=target.device)
    _, k, v, *rest = double(target, 2, 2, 3, 5, 4, mask=mask)
    arguments = (0, 1, 2, 3) if rest and rest[0].is_floating_point() else (0, 1, 2)

    def loss(function):
        return lambda *x: function(*x).square().sum()

    dims = (0, None, None, *([None] * len(rest)))
    got = vmap(grad(loss(target.sdpa), arguments), dims)(q, k, v, *rest)
    want = [grad(loss(naive), arguments)(x, k, v, *rest) for x in q]
    for i, x in enumerate(got):
        same(x, torch.stack([w[i] for w in want]))


@contract(51)
def test_batched_grad_outputs(target):
    leaves = [x.requires_grad_() for x in double(target, 2, 2, 3, 5, 4, mask=("float", "1HLS"))]
    out, plain = target.sdpa(*leaves), naive(*leaves)
    grad_outs = torch.randn(4, *out.shape, dtype=torch.float64, device=target.device)
    got = torch.autograd.grad(out, leaves, grad_outs, is_grads_batched=True, retain_graph=True)
    same(got, torch.autograd.grad(plain, leaves, grad_outs, is_grads_batched=True))


# --- vmap


@contract(52)
@pytest.mark.parametrize("in_dims", list(itertools.product((None, 0, 2), repeat=3))[1:], ids=str)
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_vmap_over_any_dimension(target, in_dims, rank):
    leading = (2, 3)[: rank - 2]
    sizes = {"q": (*leading, 5, 4), "k": (*leading, 6, 4), "v": (*leading, 6, 3)}

    def batched(shape, dim):
        return target.randn(*shape) if dim is None else target.randn(7, *shape).movedim(0, dim)

    tensors = [batched(s, d) for s, d in zip(sizes.values(), in_dims, strict=True)]
    got = vmap(lambda *x: target.sdpa(*x, is_causal=True), in_dims)(*tensors)
    looped = [
        target.sdpa(
            *(x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True)), is_causal=True
        )
        for i in range(7)
    ]
    torch.testing.assert_close(got, torch.stack(looped))


@contract(52)
@pytest.mark.parametrize("mask_dim", [None, 0, 1])
@pytest.mark.parametrize("shape", ["LS", "BHLS", "1HLS", "B11S"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_vmap_with_masks(target, mask_dim, shape, kind):
    q, k, v, mask = target.inputs(2, 3, 5, 6, 4, mask=(kind, shape)).tensors.values()
    q = torch.stack([q, q + 1, q - 1])
    masks = mask if mask_dim is None else torch.stack([mask, mask.flip(-1), mask.flip(-2)], mask_dim)
    got = vmap(target.sdpa, (0, None, None, mask_dim))(q, k, v, masks)
    looped = [target.sdpa(q[i], k, v, masks if mask_dim is None else masks.select(mask_dim, i)) for i in range(3)]
    torch.testing.assert_close(got, torch.stack(looped))


PAGED_DIMS = {"query": (0, None, None, None), "query and table": (2, None, None, 2), "pool of keys": (0, 1, None, None)}
PAGED_DIMS |= {"pools": (None, 0, 2, None), "table": (None, None, None, 0), "all": (1, 0, 0, 1)}


@pytest.mark.parametrize("dims", PAGED_DIMS.values(), ids=PAGED_DIMS)
def test_vmap_with_pages(target, dims):
    samples, batch = 3, 2
    q, pools = target.randn(samples, batch, 4, 5, 8), target.randn(2, samples, 7, 2, 16, 8)
    table = torch.stack([torch.randperm(7)[:6].view(batch, 3) for _ in range(samples)]).to(target.device).int()
    ranges = torch.tensor([[0, 48], [3, 20]], device=target.device)[:, None, None, None]
    table[:, 1, 2] = -1  # no key there is attended to
    given = [x if dim is not None else x[0] for x, dim in zip((q, *pools, table), dims, strict=True)]

    def call(query, key, value, block_table):
        options = {"key_ranges": ranges, "enable_gqa": True, "return_lse": True}
        return target.attention(query, key, value, block_table=block_table, **options)

    moved = [x if dim is None else x.movedim(0, dim) for x, dim in zip(given, dims, strict=True)]
    got = vmap(call, dims)(*moved)
    each = [call(*(x if dim is None else x[n] for x, dim in zip(given, dims, strict=True))) for n in range(samples)]
    for x, y in zip(got, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(y))


@contract(52)
def test_vmap_nested_with_out_dims_and_lse(target):
    q, k, v = target.randn(3, 2, 4, 5, 4), target.randn(2, 4, 6, 4), target.randn(2, 4, 6, 4)

    def call(x, y, z):
        return target.attention(x, y, z, enable_gqa=False, return_lse=True)

    out, lse = vmap(vmap(call), (0, None, None), out_dims=(2, 1))(q, k, v)
    want = [call(x, k, v) for x in q]
    torch.testing.assert_close(out, torch.stack([w[0] for w in want], 2))
    torch.testing.assert_close(lse, torch.stack([w[1] for w in want], 1))


@contract(52)
def test_vmap_with_grouped_heads(target):
    q, k, v = target.randn(3, 2, 4, 5, 8), target.randn(3, 2, 2, 6, 8), target.randn(3, 2, 2, 6, 8)
    got = vmap(lambda *x: target.sdpa(*x, enable_gqa=True))(q, k, v)
    torch.testing.assert_close(
        got, target.sdpa(*(x.flatten(0, 1) for x in (q, k, v)), enable_gqa=True).unflatten(0, (3, 2))
    )


@contract(52)
def test_dropout_under_vmap(target):
    """An error by default; "same" gives every sample one mask, "different" each its own."""
    q = target.randn(3, 2, 2, 9, 4)
    q = q[:1].expand_as(q).clone()
    k = target.randn(2, 2, 20, 4)
    eye = torch.eye(20, device=target.device).expand(2, 2, 20, 20)

    def call(x):
        return target.sdpa(x, k, eye, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(q)
    same_bits = vmap(call, randomness="same")(q) != 0
    assert torch.equal(same_bits[0], same_bits[1])
    assert torch.equal(same_bits[0], same_bits[2])
    other_bits = vmap(call, randomness="different")(q) != 0
    assert not torch.equal(other_bits[0], other_bits[1])
    assert not torch.equal(other_bits[0, 0], other_bits[0, 1])


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
    torch.testing.assert_close(out.sum((-1, -2)), (gradient * v).sum((-1, -2)))


# --- checkpointing, saved tensors, copies


@contract(35)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(target, use_reentrant):
    leaves = [x.requires_grad_() for x in double(target, 2, 2, 9, 7, 4)]
    want = torch.autograd.grad(target.sdpa(*leaves, is_causal=False).square().sum(), leaves)
    checkpoint(lambda *x: target.sdpa(*x), *leaves, use_reentrant=use_reentrant).square().sum().backward()
    same([x.grad for x in leaves], list(want))


class Block(torch.nn.Module):
    def __init__(self, backend, attention=attnkern.scaled_dot_product_attention):
        super().__init__()
        self.projection = torch.nn.Linear(16, 48)
        self.attention = attention
        self.backend = backend

    def forward(self, x, is_causal=False, dropout_p=0.0):
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        out = self.attention(q, k, v, is_causal=is_causal, dropout_p=dropout_p, backend=self.backend)
        return out.transpose(1, 2).flatten(2)


@contract(4, 47)
def test_modules_holding_the_function_copy_and_pickle(target):
    block = Block(target.backend).to(target.device)
    x = target.randn(2, 5, 16)
    want = block(x)
    assert torch.equal(copy.deepcopy(block)(x), want)
    # A class of a test module has no importable name: the function itself has to.
    assert pickle.loads(pickle.dumps(block.attention)) is block.attention


# --- autocast


@contract(56)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32,) * 3,
        (torch.bfloat16,) * 3,
        (torch.float16,) * 3,
        (torch.float32, torch.bfloat16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts(target, low, dtypes, mask_dtype):
    leaves = [target.randn(2, 2, 5, 8).to(d).requires_grad_() for d in dtypes]
    mask = None
    if mask_dtype is not None:
        mask = (
            target.randn(5, 5) > 0 if mask_dtype == torch.bool else target.randn(5, 5).to(mask_dtype).requires_grad_()
        )
    with torch.autocast(target.device, dtype=low):
        out = target.sdpa(*leaves, mask)
    assert out.dtype == low
    by_hand = target.sdpa(
        *(x.to(low) for x in leaves), mask if mask is None or mask_dtype == torch.bool else mask.to(low)
    )
    assert torch.equal(out, by_hand)
    wanted = [*leaves, mask] if mask is not None and mask.requires_grad else leaves
    for x, g in zip(wanted, torch.autograd.grad(out.float().square().sum(), wanted), strict=True):
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


# --- compile


def compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


@contract(53)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 1)}, {"return_lse": True}], ids=str)
def test_compile_trains(target, options, dtype):
    inputs = target.inputs(2, 2, 9, 13, 8, dtype=dtype, mask=("float", "1HLS"), layout="blhd")
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]

    def call(*x):
        result = target.attention(*x, **options)
        return result if isinstance(result, tuple) else (result,)

    function, counter = compiled(call)
    got, want = function(*leaves), call(*leaves)
    assert counter.frame_count == 1
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    grads = [torch.randn_like(x) for x in want]
    for a, b in zip(torch.autograd.grad(got, leaves, grads), torch.autograd.grad(want, leaves, grads), strict=True):
        torch.testing.assert_close(a, b)


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
        torch.testing.assert_close(out, target.sdpa(q, k, v, is_causal=True))
        if requires_grad:
            out.sum().backward()
        counts.append(counter.frame_count)
    # The first call may give two graphs: Dynamo starts again when a float argument turns out to be a constant.
    assert counts == counts[:1] * 5


@contract(53)
def test_compile_a_decode_loop(target):
    q, k, v = target.inputs(1, 4, 1, 12, 8, heads_k=2).tensors.values()
    function, counter = compiled(lambda q, k, v: target.sdpa(q, k, v, enable_gqa=True), dynamic=True)
    for t in range(3, 12):
        torch.testing.assert_close(
            function(q, k[:, :, :t], v[:, :, :t]), target.sdpa(q, k[:, :, :t], v[:, :, :t], enable_gqa=True)
        )
    assert counter.frame_count <= 2  # the cache's strides stay, only its length grows


@contract(53)
def test_compiled_dropout_follows_the_seed(target):
    q, k, v = target.inputs(2, 2, 9, 13, 8).tensors.values()
    function, _ = compiled(lambda *x: target.sdpa(*x, dropout_p=0.5))
    torch.manual_seed(1)
    first, second = function(q, k, v), function(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(function(q, k, v), first)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    torch.testing.assert_close(target.sdpa(q, k, v, dropout_p=0.5), first)


@contract(53)
def test_compiled_module_with_packed_projection(target):
    block = Block(target.backend).to(target.device)
    function, _ = compiled(block)
    x = target.randn(2, 7, 16)
    for arguments in ({}, {"is_causal": True}):
        got, want = function(x, **arguments), block(x, **arguments)
        torch.testing.assert_close(got, want)
        for a, b in zip(
            torch.autograd.grad(got.sum(), list(block.parameters())),
            torch.autograd.grad(want.sum(), list(block.parameters())),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@contract(53)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compile_with_other_compilers(target, backend):
    leaves = [x.requires_grad_() for x in target.inputs(2, 2, 9, 13, 8).tensors.values()]

    def call(q, k, v):
        return (target.sdpa(q * 2, k, v, is_causal=True) + 1).square()

    function, _ = compiled(call, backend)
    got, want = function(*leaves), call(*leaves)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    grad_out = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, leaves, grad_out), torch.autograd.grad(want, leaves, grad_out), strict=True
    ):
        torch.testing.assert_close(a, b)


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
        torch.testing.assert_close(function(*x), target.sdpa(*x))


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


@contract(53, 54)
@pytest.mark.parametrize("way", ["export", "fullgraph"])
@pytest.mark.parametrize(("kept", "call"), PAIRS)
def test_sizes_that_depend_on_data(kept, call, way):
    """One program serves 0, 1 and more rows, and knows the strides of its results."""

    class Module(torch.nn.Module):
        def forward(self, x, keep):
            return OF_KEPT[call](attnkern.attention, *KEPT[kept](x, keep))

    x = torch.randn(4, 4, 4, 8)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        if way == "export":
            program = torch.export.export(Module(), (x, torch.arange(4) < 3)).module()
        else:
            program = torch.compile(Module(), backend="aot_eager", fullgraph=True)
        for n in (3, 0, 1, 4):
            keep = torch.arange(4) < n
            torch.testing.assert_close(program(x, keep), Module()(x, keep))


@contract(46, 53)
@pytest.mark.parametrize("kept", ["batch", "length", "heads of (batch, length, heads)"])
def test_gradients_of_sizes_that_depend_on_data(kept):
    def loss(x, keep):
        return attnkern.attention(*KEPT[kept](x, keep)).square().sum()

    x = torch.randn(4, 4, 4, 8, requires_grad=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        program = torch.compile(loss, backend="aot_eager", fullgraph=True)
        for n in (3, 0, 1):
            got, want = (torch.autograd.grad(f(x, torch.arange(4) < n), x)[0] for f in (program, loss))
            torch.testing.assert_close(got, want)


# --- export and tracing


@contract(54)
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_sizes(target, strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return target.sdpa(q, k, v, is_causal=True)

    q, k, v = target.inputs(2, 2, 9, 13, 8).tensors.values()
    batch, length, keys = (torch.export.Dim(n, min=2, max=64) for n in ("batch", "length", "keys"))
    shapes = ({0: batch, 2: length}, {0: batch, 2: keys}, {0: batch, 2: keys})
    program = torch.export.export(Module(), (q, k, v), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program, torch.export.load(file), program.run_decompositions()):
        for inputs in (target.inputs(2, 2, 9, 13, 8), target.inputs(5, 2, 3, 30, 8)):
            x = inputs.tensors.values()
            torch.testing.assert_close(exported.module()(*x), target.sdpa(*x, is_causal=True))


@contract(54)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_through_autograd(target, mode):
    def call(q, k, v):
        out = target.sdpa(q, k, v, is_causal=True)
        return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))

    x = [x.requires_grad_() for x in target.inputs(2, 2, 9, 13, 8).tensors.values()]
    graph = make_fx(call, tracing_mode=mode)(*x)
    y = [y.requires_grad_() for y in target.inputs(2, 2, 9, 13, 8).tensors.values()]
    for a, b in zip(graph(*y), call(*y), strict=True):
        torch.testing.assert_close(a, b)


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
            torch.testing.assert_close(trace(*arguments), call(*arguments))


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
    torch.testing.assert_close(graph(x, middle), call(x, middle))


def test_cu_seqlens_of_a_trace_may_be_others():
    def call(x, cu, used):
        return attnkern.varlen_attention(x, x, x, cu, seqused_k=used, is_causal=True)

    trace = traced(call, torch.randn(10, 2, 8), torch.tensor([0, 3, 10]), torch.tensor([3, 5]))
    arguments = torch.randn(14, 2, 8), torch.tensor([0, 3, 8, 12]), torch.tensor([3, 1, 4])
    torch.testing.assert_close(trace(*arguments), call(*arguments))


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


@contract(54, 57)
def test_fx_symbolic_trace():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attnkern.scaled_dot_product_attention(q, k, v, is_causal=True)

    traced = torch.fx.symbolic_trace(Module())
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [attnkern.scaled_dot_product_attention]
    x = testing.make_inputs(2, 2, 9, 13, 8).tensors.values()
    assert torch.equal(traced(*x), attnkern.scaled_dot_product_attention(*x, is_causal=True))


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
TRACED = {
    "multihead": (
        lambda: attnkern.nn.MultiheadAttention(8, 2, dropout=0.5, window=(1, 1)),
        lambda m, x, y: m.held(x, y, value=y, need_weights=True)[0].relu(),
    ),
    "weights": (lambda: attnkern.nn.MultiheadAttention(8, 2), lambda m, x, y: m.held(x, y, y)[1]),
    "cross": (lambda: attnkern.nn.CrossAttention(8, num_heads=2), lambda m, x, y: m.held(x, context=y, is_causal=True)),
    "varlen": (lambda: None, lambda m, x, y: attnkern.varlen_attention(x, y, y, CU, scale=0.5)),
    "merge": (lambda: None, split_keys),
    "mask": (lambda: None, lambda m, x, y: attnkern.attention(x, y, y, m.mask)),
}


@pytest.mark.parametrize(("make", "call"), TRACED.values(), ids=TRACED)
def test_fx_traces_models_with_modules_and_functions(make, call):
    """By the default tracer, as torch.nn.MultiheadAttention."""
    model = Holder(make(), call).eval()
    traced = torch.fx.symbolic_trace(model)
    x, y = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    for graph in (traced, pickle.loads(pickle.dumps(traced)), torch.fx.symbolic_trace(copy.deepcopy(traced))):
        assert torch.equal(graph(x, y), model(x, y))
    if model.held is not None:
        assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["held"]
        assert type(traced.held) is type(model.held)


# --- fake and meta tensors


@contract(55)
@pytest.mark.parametrize("layout", ["contiguous", "blhd", "packed", "sequence_first", "e_major"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}, {"enable_gqa": True}], ids=str)
def test_fake_tensors_agree_with_real_ones(target, layout, options, dtype):
    inputs = target.inputs(2, 4, 5, 7, 8, heads_k=2 if "enable_gqa" in options else 4, dtype=dtype, layout=layout)
    real = target.attention(*inputs.tensors.values(), return_lse=True, **options)
    with FakeTensorMode() as mode:
        fake = target.attention(*(mode.from_tensor(x) for x in inputs.tensors.values()), return_lse=True, **options)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


@contract(55)
@pytest.mark.parametrize("sizes", [(2, 2, 5, 7, 8), (2, 2, 5, 0, 8), (2, 2, 0, 7, 8)], ids=str)
def test_meta_tensors_with_gradients(sizes):
    b, h, n, s, e = sizes
    q = torch.randn(b, h, n, e, device="meta", requires_grad=True)
    k = torch.randn(b, h, s, e, device="meta", requires_grad=True)
    v = torch.randn(b, h, s, 3, device="meta", requires_grad=True)
    mask = torch.zeros(n, s, dtype=torch.bool, device="meta")
    out = attnkern.scaled_dot_product_attention(q, k, v, mask)
    assert (out.shape, out.dtype, out.device.type) == ((b, h, n, 3), torch.float32, "meta")
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [q.shape, k.shape, v.shape]


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
        (torch.float64, 1, ("float", "B1L1"), {"dropout_p": 0.4}),
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


@contract(53)
def test_flops_are_counted(target):
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (x.requires_grad_() for x in target.inputs(2, 3, 32, 64, 8, 16).tensors.values())
    with FlopCounterMode(display=False) as counter:
        target.sdpa(q, k, v).sum().backward()
    products = 2 * 2 * 3 * 32 * 64
    forward, backward = products * (8 + 16), products * (2 * 8 + 2 * 16)
    total = counter.get_total_flops()
    assert total >= forward + backward
    assert total <= forward + backward + products * (8 + 16)  # backward computes the scores again


def test_flops_of_key_ranges(kernel_target):
    """Their live scores, each once, whatever they were broadcast to; in every order of derivative."""
    from torch.utils.flop_counter import FlopCounterMode

    inputs, found = kernel_target.inputs(2, 3, 32, 64, 8, 16), []
    for shape in itertools.product("B1", "H1", "L1"):
        ranges = inputs.with_ranges("anything", "".join(shape), 2, torch.int64, 3).key_ranges
        live = int(testing.ranges_mask(ranges, 64).expand(2, 3, 32, 64).sum())
        q, k, v = (x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
        with FlopCounterMode(display=False) as forward:
            out = kernel_target.attention(q, k, v, key_ranges=ranges)
        with FlopCounterMode(display=False) as backward:
            first = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), create_graph=True)
        with FlopCounterMode(display=False) as second:
            torch.autograd.grad(first, (q, k, v), [torch.ones_like(x) for x in (q, k, v)])
        with FlopCounterMode(display=False) as tangent:
            jvp(lambda x: kernel_target.attention(x, k, v, key_ranges=ranges), (q.detach(),), (torch.ones_like(q),))  # noqa: B023
        counts = [counter.get_total_flops() for counter in (forward, backward, second, tangent)]
        sizes = 8 + 16, 3 * 8 + 2 * 16, 3 * 8 + 2 * 16 + 4 * 8 + 3 * 16, 8 + 16 + 2 * 8 + 16
        assert counts == [2 * live * size for size in sizes]
        found.append(live)
    assert 0 < found[0] < 2 * 3 * 32 * 64  # of each row a range of its own
    nothing = torch.zeros(1, 2, dtype=torch.int64, device=kernel_target.device)
    with FlopCounterMode(display=False) as counter:
        kernel_target.attention(q, k, v, key_ranges=nothing)
    assert counter.get_total_flops() == 0


def test_flops_of_key_ranges_without_values(kernel_target):
    """All scores count, and nothing is looked at."""
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, k, v = kernel_target.randn(2, 3, 32, 8), kernel_target.randn(2, 3, 64, 8), kernel_target.randn(2, 3, 64, 16)
        ranges = torch.zeros(32, 1, 2, dtype=torch.int32, device=kernel_target.device)
        kernel_target.attention(q, k, v, key_ranges=ranges)
    assert counter.get_total_flops() == 2 * 2 * 3 * 32 * 64 * (8 + 16)
    q, k, v, ranges = (torch.zeros(x.shape, dtype=x.dtype, device="meta") for x in (q, k, v, ranges))
    with FlopCounterMode(display=False) as counter:
        attnkern.attention(q, k, v, key_ranges=ranges)
    assert counter.get_total_flops() == 2 * 2 * 3 * 32 * 64 * (8 + 16)


def test_flops_of_packed_sequences(kernel_target):
    """A sequence's own scores only: as many as one call for each sequence has, less what their windows hide."""
    from torch.utils.flop_counter import FlopCounterMode

    lengths = [5, 0, 20, 9]
    q, k, v = (kernel_target.randn(34, 2, 8) for _ in range(3))
    ends = torch.tensor([0, *itertools.accumulate(lengths)], device=kernel_target.device)
    for is_causal, scores in ((False, sum(n * n for n in lengths)), (True, sum(n * (n + 1) // 2 for n in lengths))):
        with FlopCounterMode(display=False) as counter:
            attnkern.varlen_attention(q, k, v, ends, is_causal=is_causal, backend=kernel_target.backend)
        assert counter.get_total_flops() == 2 * 2 * scores * (8 + 8)


@contract(53)
def test_flops_of_tangents_and_second_derivatives(kernel_target):
    """The first derivative's count is in the test above; d is the head size of query and key, e that of value."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (x.requires_grad_() for x in kernel_target.inputs(2, 3, 32, 64, 8, 16).tensors.values())
    products, d, e = 2 * 2 * 3 * 32 * 64, 8, 16
    with FlopCounterMode(display=False) as counter:
        jvp(lambda x: kernel_target.sdpa(x, k, v), (q,), (torch.ones_like(q),))
    assert counter.get_total_flops() == products * ((d + e) + (2 * d + e))
    out = kernel_target.sdpa(q, k, v)
    first = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), create_graph=True)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(first, (q, k, v), [torch.ones_like(x) for x in (q, k, v)])
    assert counter.get_total_flops() == products * ((3 * d + 2 * e) + (4 * d + 3 * e))


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
        torch.testing.assert_close(derivatives(), want, rtol=0, atol=0)


@contract(53)
def test_no_warnings_on_the_ordinary_path(target):
    leaves = [x.requires_grad_() for x in target.inputs(2, 2, 9, 13, 8).tensors.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.sdpa(*leaves, is_causal=True).sum().backward()
