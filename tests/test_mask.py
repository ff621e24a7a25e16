"""attnkern.Mask and attnkern.masks against the dense mask that each stands for, and in calls."""

import io
import itertools
import operator

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import attnkern
from attnkern import Mask, masks, testing
from bad_calls import bad, check_refused, refused
from random_problems import in_bits

SIZES = [(1, 1), (5, 9), (64, 64), (70, 33), (130, 200)]


def dense(f, seqlen_q, seqlen_k, batch=1, heads=1):
    b, h, i, j = (torch.arange(n) for n in (batch, heads, seqlen_q, seqlen_k))
    shape = batch, heads, seqlen_q, seqlen_k
    return f(b[:, None, None, None], h[:, None, None], i[:, None], j).expand(shape)


def equal(mask, want):
    """Where all are alike, the mask may have one of them."""
    assert mask.to_dense().dtype == torch.bool
    assert torch.equal(mask.to_dense().expand(want.shape), want)
    assert abs(mask.sparsity - (1 - want.float().mean().item())) < 1e-6
    check_stored(mask)


def check_stored(mask):
    """What the class says of its tensors."""
    if mask.ranges is not None:
        assert mask.bits is mask.blocks is None
        assert mask.ranges.dtype == torch.int32
        assert mask.ranges.is_contiguous()
        begin, end = mask.ranges.unbind(-1)
        assert ((begin >= 0) & (begin <= end) & (end <= mask.seqlen_k)).all()
        if begin.shape[-1] == 2:
            assert ((end[..., 0] < begin[..., 1]) | (begin[..., 1] == end[..., 1])).all()
        return
    assert mask.bits.dtype == torch.int64
    want = mask.to_dense()
    pad = (0, -mask.seqlen_k % 64, 0, -mask.seqlen_q % 64)
    tiles, edges = (
        torch.nn.functional.pad(x, pad).unflatten(3, (-1, 64)).unflatten(2, (-1, 64)) for x in (want, want | True)
    )
    lives, fills = tiles.any(3).any(-1), (tiles | ~edges).all(3).all(-1)
    assert torch.equal(mask.blocks.expand(lives.shape), (lives.int() + fills.int()).to(torch.uint8))


@pytest.mark.parametrize("left", [False, True])
def test_padding(left):
    lengths = [0, 3, 9]
    mask = masks.padding(lengths, 5, 9, left)
    n = torch.tensor(lengths)
    equal(mask, dense(lambda b, h, i, j: (j >= 9 - n[b]) if left else (j < n[b]), 5, 9, 3))
    assert mask.ranges.shape == (3, 1, 1, 1, 2)
    assert masks.padding(torch.tensor(lengths)).shape == (3, 1, 9, 9)


@pytest.mark.parametrize("is_causal", [False, True])
def test_document(is_causal):
    lengths = [3, 0, 40, 1, 26]
    ids = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    cu = [0, *itertools.accumulate(lengths)]
    want = dense(lambda b, h, i, j: (ids[i] == ids[j]) & ((j <= i) | (not is_causal)), 70, 70)
    for mask in (
        masks.document(ids, is_causal=is_causal),
        masks.document(cu_seqlens=cu, is_causal=is_causal),
        masks.document(cu_seqlens=torch.tensor(cu, dtype=torch.int32), seqlen=70, is_causal=is_causal),
    ):
        equal(mask, want)
        assert mask.ranges.shape == (1, 1, 70, 1, 2)
    mask = masks.document(cu_seqlens=cu[:-1], seqlen=70, is_causal=is_causal)  # tokens of no document
    equal(mask, want & (ids < 4))
    both = torch.stack([ids, ids.flip(0)])
    equal(masks.document(both), dense(lambda b, h, i, j: both[b, i] == both[b, j], 70, 70, 2))
    apart = torch.arange(70) % 7
    mask = masks.document(apart, is_causal=is_causal)
    equal(mask, dense(lambda b, h, i, j: (apart[i] == apart[j]) & ((j <= i) | (not is_causal)), 70, 70))
    assert mask.ranges is None


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"window": (5, 2)}, {"is_causal": True, "alignment": "top_left"}], ids=str
)
def test_packed(options):
    """It is what varlen_attention makes of the same arguments."""
    ends_q, ends_k = torch.tensor([0, 3, 3, 40, 41]), torch.tensor([0, 9, 11, 50, 70], dtype=torch.int64)
    used = torch.tensor([9, 0, 30, 17])
    q, k = torch.randn(41, 2, 8), torch.randn(70, 2, 8)
    for keys, given in ((k, (ends_q, ends_k)), (k, (ends_q, ends_k.clone())), (q, (ends_q,))):
        seqused = {} if keys is q else {"seqused_k": used}
        mask = masks.packed(*given, **seqused, **options)
        check_stored(mask)
        assert mask.shape == (1, 1, 41, len(keys))
        want = attnkern.varlen_attention(q, keys, keys, *given, **seqused, **options)
        x = [t.transpose(0, 1)[None] for t in (q, keys, keys)]
        assert torch.equal(attnkern.attention(*x, mask)[0].transpose(0, 1), want)
    assert masks.packed(torch.tensor([0])).shape == (1, 1, 0, 0)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prefix_causal_and_windows(sizes):
    seqlen_q, seqlen_k = sizes
    for prefix in (0, 1, seqlen_k):
        equal(masks.prefix_lm(prefix, *sizes), dense(lambda b, h, i, j, p=prefix: (j < p) | (j <= i), *sizes))
    prefixes = torch.tensor([0, seqlen_k])
    equal(masks.prefix_lm(prefixes, *sizes), dense(lambda b, h, i, j: (j < prefixes[b]) | (j <= i), *sizes, 2))
    for alignment, offset in (("top_left", 0), ("bottom_right", seqlen_k - seqlen_q)):
        equal(masks.causal(*sizes, alignment), dense(lambda b, h, i, j, o=offset: j <= i + o, *sizes))
        for left, right, sinks in itertools.product((None, 0, 7), (None, 0, 3), (0, 4, 1000)):
            mask = masks.sliding_window(left, right, *sizes, sinks=sinks, alignment=alignment)

            def within(b, h, i, j, left=left, right=right, sinks=sinks, offset=offset):
                distance = j - i - offset
                near = (distance >= (-(2**40) if left is None else -left)) | (j < sinks)
                return near & (distance <= (2**40 if right is None else right))

            equal(mask, dense(within, *sizes))
            assert mask.ranges is not None


DOCUMENTS = torch.tensor([0] * 20 + [1] * 50 + [2] * 26)
PARENT = torch.tensor([0, *((n - 1) // 2 for n in range(1, 96))])
ANCESTORS = torch.zeros(96, 96, dtype=torch.bool)
for node in range(96):
    at = node
    while True:
        ANCESTORS[node, at] = True
        if at == 0:
            break
        at = int(PARENT[at])


def natten(b, h, q, k):
    near_x = (q % 8 - k % 8).abs() <= 2
    return near_x & ((q // 8 - k // 8).abs() <= 2)


MODS = {  # as FlexAttention's users write them
    "causal": (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "ranges"),
    "sliding window": (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 17), "ranges"),
    "prefix": (lambda b, h, q_idx, kv_idx: (kv_idx < 11) | (q_idx >= kv_idx), "ranges"),
    "document": (lambda b, h, q_idx, kv_idx: DOCUMENTS[q_idx] == DOCUMENTS[kv_idx], "ranges"),
    "causal document": (lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k), "ranges"),
    "dilated": (lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx).abs() <= 20) & ((q_idx - kv_idx) % 2 == 0), "bits"),
    "neighbourhood": (natten, "bits"),
    "tree": (lambda b, h, q_idx, kv_idx: ANCESTORS[q_idx, kv_idx], "bits"),
    "heads": (lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 10 * (h + 1), "ranges"),
    "batch": (lambda b, h, q_idx, kv_idx: kv_idx < 20 * (b + 1), "ranges"),
    "nothing": (lambda b, h, q_idx, kv_idx: kv_idx < 0, "ranges"),
}


@pytest.mark.parametrize("name", MODS)
def test_flex_attentions_functions_unchanged(name):
    f, kind = MODS[name]
    mask = masks.from_mask_mod(f, 2, 3, 96, 96)
    want = create_mask(f, 2, 3, 96, 96, "cpu")
    equal(mask, want)
    assert (mask.ranges is not None) == (kind == "ranges")
    stored = mask.bits if mask.ranges is None else mask.ranges
    assert stored.shape[:2] == (2 if name == "batch" else 1, 3 if name == "heads" else 1)
    inputs = testing.make_inputs(2, 3, 96, 96, 16)
    out = attnkern.attention(inputs.query, inputs.key, inputs.value, mask)
    testing.expected(*inputs.tensors.values(), want)["out"].check(out)


def test_a_long_function_never_holds_all_scores():
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with Sizes():
        mask = masks.from_mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 1000), None, None, 8192, 8192)
    assert mask.ranges is not None
    assert largest < 2**25  # 8192 * 8192 is 2**26
    assert torch.equal(mask.ranges, masks.sliding_window(999, 0, 8192).ranges)


def some_masks():
    """One range, two, bits, of every broadcast shape."""
    yield masks.causal(70, 90)
    yield masks.padding([0, 90], 70, 90)
    yield masks.sliding_window(20, 0, 70, 90, sinks=3)
    for shape in ((1, 1, 70, 1, 2), (2, 3, 70, 2, 2), (1, 3, 1, 2, 2)):
        yield masks.from_ranges(torch.randint(-5, 100, shape), 70, 90)
    yield masks.from_bool(torch.rand(70, 90) < 0.5)
    yield masks.from_bool(torch.rand(2, 1, 70, 90) < 0.9)
    yield masks.from_bool(torch.zeros(70, 90, dtype=torch.bool))


@pytest.mark.parametrize("combine", [operator.and_, operator.or_], ids=["and", "or"])
def test_combined(combine):
    for one, other in itertools.product(some_masks(), some_masks()):
        equal(combine(one, other), combine(one.to_dense(), other.to_dense()))


def test_inverted():
    for mask in some_masks():
        equal(~mask, ~mask.to_dense())
        equal(~~mask, mask.to_dense())


def test_ranges_stay_ranges_where_two_suffice():
    window = masks.causal(64) & masks.sliding_window(9, None, 64)
    assert window.ranges.shape[3] == 1
    assert (window | masks.padding([3], 64, 64)).ranges.shape[3] == 2
    assert (~masks.sliding_window(9, 9, 64)).ranges.shape[3] == 2
    assert (window & ~masks.document(torch.arange(64) // 5)).ranges is not None
    three = masks.from_ranges(torch.tensor([[1, 2], [5, 9], [20, 30]]).view(1, 1, 1, 3, 2), 64, 64)
    assert three.ranges is None


MADE_OF_SIZES = {
    "sinks": lambda device: masks.sliding_window(20, 0, 70, 90, sinks=3, device=device),
    "two ranges": lambda device: masks.from_ranges(
        torch.tensor([[9, 20], [0, 3]], device=device)[None, None, None], 70, 90
    ),
    "and": lambda device: (
        masks.sliding_window(20, 0, 70, 90, sinks=3, device=device)
        & masks.causal(70, 90, "bottom_right", device=device)
    ),
    "or": lambda device: masks.prefix_lm(9, 70, 90, device=device) | masks.sliding_window(9, 9, 70, 90, device=device),
    "not": lambda device: masks.sliding_window(9, 9, 70, 90, device=device).__invert__(),  # Dynamo knows no ~
}


@pytest.mark.parametrize("what", MADE_OF_SIZES)
def test_two_ranges_are_made_without_a_look_at_data(what):
    """A graph holds their making, and no device is waited for: the meta device has nothing to look at."""
    make = MADE_OF_SIZES[what]
    assert make("meta").ranges.shape[3] == 2
    x, y = torch.randn(1, 2, 70, 8), torch.randn(1, 2, 90, 8)

    def f(x, y):
        return attnkern.attention(x, y, y, make("cpu"))

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), f(x, y))
    torch.testing.assert_close(f(x, y), attnkern.attention(x, y, y, make("cpu").to_dense()))


def test_calls_take_it(target):
    inputs = target.inputs(2, 3, 70, 90, 16)
    tensors = inputs.query, inputs.key, inputs.value
    for mask in (m.to(target.device) for m in some_masks()):
        given = mask.to_dense()
        for options in ({}, {"is_causal": True}, {"window": (30, None), "softcap": 5.0}):
            got, want = (target.attention(*tensors, m, **options) for m in (mask, given))
            torch.testing.assert_close(got, want)
        torch.testing.assert_close(target.sdpa(*tensors, mask), target.sdpa(*tensors, given))
        for options in ({}, {"rows": [3, -1]}, {"heads": 1, "average_heads": True}):
            got, want = (attnkern.attention_weights(*tensors[:2], m, **options) for m in (mask, given))
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "sizes",  # batch, heads, those of the keys, queries, keys
    [
        (2, 4, 2, 1, 300),
        (1, 4, 4, 3, 257),
        (2, 2, 1, 70, 150),
        (2, 2, 2, 130, 7),
        (1, 8, 1, 2, 1030),
        (1, 1, 1, 65, 64),
    ],
)
def test_bits_are_read_as_bools_are(target, dtype, sizes):
    """To the bit: whatever the mask shares, with keys that no row attends to, few and most of the others; each shape
    with two of the options."""
    batch, heads, heads_k, seqlen_q, seqlen_k = sizes
    q, k, v = target.inputs(batch, heads, seqlen_q, seqlen_k, 32, heads_k=heads_k, dtype=dtype).tensors.values()
    tensors = [x.requires_grad_() for x in (q, k, v)]
    near = torch.tensor([3, seqlen_k - 2], dtype=torch.int32, device=target.device).view(1, 1, 1, 1, 2)
    every_option = ({}, {"is_causal": True, "softcap": 3.0}, {"key_ranges": near}, {"dropout_p": 0.4})
    shapes = itertools.product(*(sorted({1, size}) for size in (batch, heads, seqlen_q)))
    for place, shape in enumerate(shapes):
        for n, share in enumerate((0.03, 0.9)):  # both with each shape
            options = every_option[(place + n) % 4]
            bools = (torch.rand(*shape, seqlen_k) < share).to(target.device)
            bools[..., seqlen_k // 3 : seqlen_k // 2] = False
            results = []
            for mask in (in_bits(bools, seqlen_q, seqlen_k), bools):
                torch.manual_seed(3)
                out, lse = target.attention(*tensors, mask, **options, enable_gqa=True, return_lse=True)
                torch.manual_seed(3)
                with torch.no_grad():
                    again = target.attention(*tensors, mask, **options, enable_gqa=True)
                grads = torch.autograd.grad(out.square().sum() + lse[lse.isfinite()].sum(), tensors)
                results.append((out, lse, again, *grads))
            torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("lead", "shape"), [((), ()), ((2,), ()), ((2,), (2,)), ((2, 1), (2, 1)), ((2, 3, 1), (3, 1)), ((2, 3, 2), (2,))]
)
def test_bits_beside_queries_of_every_rank(target, lead, shape):
    """2-D and 3-D, which have no batch, and 5-D, over whose first dimension the mask is spread."""
    bools = (torch.rand(*shape, 9, 70) < 0.5).to(target.device)
    q, k = target.randn(*lead, 9, 8), target.randn(*lead, 70, 8)
    mask = masks.from_bool(bools)
    assert mask.bits is not None
    results = [target.attention(q, k, k, m, return_lse=True) for m in (mask, bools)]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_derivatives_under_bits(target):
    """Twice, forward, of samples that share the mask and of such with masks of their own."""
    bools = (torch.rand(3, 1, 2, 9, 70) < 0.5).to(target.device)
    stacked = [masks.from_bool(x) for x in bools]
    assert all(mask.bits is not None for mask in stacked)
    shared, own = stacked[0], pytree.tree_map(lambda *x: None if x[0] is None else torch.stack(x), *stacked)
    q = target.randn(1, 2, 9, 8, dtype=torch.float64)
    k = target.randn(1, 2, 70, 8, dtype=torch.float64)
    many = target.randn(3, 1, 2, 9, 8, dtype=torch.float64)

    def f(q, k, mask):
        return target.attention(q, k, k, mask)

    def second(mask):
        leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        first = torch.autograd.grad(f(*leaves, mask).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    def results(shared, own):
        return (
            *second(shared),
            torch.func.jvp(lambda q, k: f(q, k, shared), (q, k), (q.sin(), k.cos()))[1],
            torch.func.vmap(lambda q: f(q, k, shared))(many),
            torch.func.vmap(lambda q, mask: f(q, k, mask))(many, own),
            torch.func.vmap(torch.func.grad(lambda q, mask: f(q, k, mask).square().sum()))(many, own),
            torch.func.hessian(lambda q: f(q, k[:, :, :70], shared).square().sum())(q),
        )

    torch.testing.assert_close(results(shared, own), results(bools[0], bools))


def test_only_a_mask_brings_bits():
    """A user's own bytes are no mask, not even of the size that bits would have."""
    for seqlen_k in (8, 70):
        q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, seqlen_k, 8)
        given = in_bits(torch.rand(1, 1, 5, seqlen_k) < 0.5, 5, seqlen_k).bits.view(torch.uint8)
        for function in (attnkern.attention, attnkern.scaled_dot_product_attention, attnkern.attention_weights):
            arguments = (q, k) if function is attnkern.attention_weights else (q, k, k)
            with pytest.raises(RuntimeError, match=r"attn_mask must be bool or query's dtype float32, got uint8"):
                function(*arguments, attn_mask=given)


BESIDE_RANGES = {
    "one range": lambda: masks.padding(torch.tensor([50, 90]), 70, 90),
    "two ranges": lambda: masks.sliding_window(5, 5, 70, 90) | masks.prefix_lm(4, 70, 90) & masks.padding([4], 70, 90),
    "bits": lambda: masks.from_mask_mod(lambda b, h, q, k: (q + k) % 3 == 0, None, None, 70, 90),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", BESIDE_RANGES)
def test_beside_key_ranges_both_count(kind, count, target):
    """Also where the two together leave more than two ranges to a row, and beyond the keys."""
    mask = BESIDE_RANGES[kind]().to(target.device)
    begin = torch.randint(0, 60, (4, 70, count), generator=torch.Generator().manual_seed(0))
    ranges = torch.stack([begin, begin + 25], -1)
    ranges[:, 5] = torch.tensor([80, 2**40])
    ranges = ranges.to(target.device)
    inputs = target.inputs(2, 4, 70, 90, 16, dtype=torch.float32)
    allowed = testing.ranges_mask(ranges[None], 90) & mask.to_dense()
    tensors = {n: x.requires_grad_() for n, x in inputs.tensors.items()}
    results = []
    for options in ({"attn_mask": mask, "key_ranges": ranges}, {"attn_mask": allowed}):
        out, lse = attnkern.attention(**tensors, **options, return_lse=True, backend=target.backend)
        grads = torch.autograd.grad(out.square().sum() + lse[lse.isfinite()].sum(), list(tensors.values()))
        results.append((out, lse, *grads))
    torch.testing.assert_close(*results)


def test_inputs_of_fewer_dimensions(target):
    x = target.randn(3, 40, 8)
    mask = masks.causal(40).to(target.device)
    want = target.attention(x, x, x, is_causal=True)
    torch.testing.assert_close(target.attention(x, x, x, mask), want)
    torch.testing.assert_close(target.attention(x[0], x[0], x[0], mask), want[0])


def test_padding_under_vmap(target):
    q = target.randn(3, 1, 2, 16, 8)
    lengths = torch.tensor([3, 16, 0], device=target.device)
    options = {"backend": target.backend}

    def f(q, n):
        return attnkern.attention(q, q, q, masks.padding(n[None], 16, 16), **options)

    want = attnkern.attention(*[q[:, 0]] * 3, masks.padding(lengths, 16, 16), **options)
    torch.testing.assert_close(torch.vmap(f)(q, lengths)[:, 0], want)


def test_the_parts_of_a_ring(target):
    """attention_backward takes it: documents over two parts of the keys."""
    inputs = target.inputs(1, 2, 60, 60, 8)
    q, k, v = inputs.query, inputs.key, inputs.value
    mask = masks.document(torch.arange(60) // 25, is_causal=True).to(target.device)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = target.attention(*leaves, mask, return_lse=True)
    grad = torch.randn_like(out)
    want = torch.autograd.grad(out, leaves, grad)
    rest = out.detach(), lse.detach(), mask
    got = attnkern.attention_backward(grad, q, k, v, *rest, backend=target.backend)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mask", [masks.causal(64), masks.from_mask_mod(natten, None, None, 64, 64)], ids=repr)
def test_compile_and_checkpoint(mask):
    q, k, v = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))

    def f(q, k, v, mask):
        return attnkern.attention(q, k, v, mask)

    want = f(q, k, v, mask)
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, mask), want)
    again = checkpoint(f, q, k, v, mask, use_reentrant=False)
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (again, want))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_made_in_inference_mode_it_trains():
    """So does what has no gradient beside it, as with torch: bool masks and key_ranges."""
    with torch.inference_mode():
        ranges = masks.sliding_window(9, 0, 64)
        made = {
            "Mask of ranges": {"attn_mask": ranges},
            "Mask of bits": {"attn_mask": masks.from_bool(ranges.to_dense() & (torch.rand(64, 64) < 0.5))},
            "bool": {"attn_mask": ranges.to_dense().contiguous()},
            "int32": {"key_ranges": ranges.ranges},
            "int64": {"key_ranges": ranges.ranges.long()},
        }
    x = torch.randn(1, 2, 64, 8, requires_grad=True)
    for name, given in made.items():
        usual = {key: m.clone() if isinstance(m, torch.Tensor) else m.to_dense().clone() for key, m in given.items()}

        def f(x, options):
            return attnkern.attention(x, x, x, **options).square().sum()

        (got,), (want,) = (torch.autograd.grad(f(x, options), x) for options in (given, usual))
        torch.testing.assert_close(got, want, msg=name)
        torch.testing.assert_close(torch.func.grad(f)(x.detach(), given), want, msg=name)
        if "attn_mask" in given:
            attnkern.attention_weights(x, x, **given).square().sum().backward()


def test_a_data_loader_collates_it():
    """Of ranges, of bits and of both, whether rows and heads are alike in a sample or not."""
    of_one = [mask for mask in some_masks() if mask.shape[0] == 1]
    for some in ([mask for mask in of_one if mask.ranges is not None], of_one, of_one[-2:], [of_one[0]]):
        want = torch.cat([mask.to_dense().expand(-1, 3, -1, -1) for mask in some])
        collated = torch.utils.data.default_collate([{"mask": mask} for mask in some])["mask"]
        equal(collated, want)
    with pytest.raises(RuntimeError, match="of one size and device"):
        torch.utils.data.default_collate([masks.causal(5), masks.causal(6)])


def test_layers_keep_its_bits_and_nothing_else():
    """One tensor for the backward pass, however many layers: the mask's own."""
    mask = masks.from_bool(torch.rand(128, 128) < 0.5)
    modules = [attnkern.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(4)]
    x = torch.randn(1, 128, 8)
    saved = {}

    def save(t):
        if not t.is_floating_point():
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        for module in modules:
            x = module(x, x, x, attn_mask=mask, need_weights=False)[0]
            q = x.unflatten(-1, (2, 4)).transpose(1, 2)
            x = x + attnkern.attention(q, q, q, mask).transpose(1, 2).flatten(2)
    assert saved == {mask.bits.untyped_storage().data_ptr(): 128 * 128 // 8}
    x.sum().backward()


@pytest.mark.parametrize("mask", [masks.causal(64), masks.from_mask_mod(natten, None, None, 64, 64)], ids=repr)
def test_export(mask, capfd):
    class Attend(torch.nn.Module):
        def forward(self, x, mask):
            return attnkern.attention(x, x, x, mask)

    x = torch.randn(1, 2, 64, 8)
    program = torch.export.export(Attend(), (x, mask))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert "Logging error" not in capfd.readouterr().err
    for exported in (program, loaded):
        torch.testing.assert_close(exported.module()(x, mask), attnkern.attention(x, x, x, mask))


def test_files_hold_it():
    """torch.load as it is by default, which takes known types only."""
    saved = list(some_masks())
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    for got, want in zip(torch.load(file), saved, strict=True):
        assert got.shape == want.shape
        equal(got, want.to_dense())


def test_it_moves_shows_and_draws_itself():
    mask = masks.sliding_window(9, 0, 100, sinks=4)
    assert mask.to("cpu").device.type == "cpu"
    assert mask.to("meta").shape == mask.shape == (1, 1, 100, 100)
    assert repr(mask) == "Mask(1, 1, 100, 100: two ranges per row, 1,600 bytes, cpu)"
    axes = mask.plot(block=10, title="window and sinks")
    image = axes.images[0].get_array()
    assert image.shape == (10, 10)
    assert (image[0, 0], image[9, 0], image[9, 4], image[9, 9]) == (1, 1, 0, 1)


Q = torch.zeros(2, 4, 5, 8)
BLOCK_MASK = create_block_mask(lambda b, h, q, k: q >= k, None, None, 5, 5, device="cpu")

RANGE = torch.tensor([0, 2**32])[None, None, None, None]


def attend(mask, **options):
    return attnkern.attention(Q, Q, Q, mask, **options)


BAD = [
    bad("6 queries and 5 keys, query", lambda: attend(masks.causal(6, 5))),
    bad("query and key have 5 and 5", lambda: attend(masks.causal(5, 6))),
    bad(
        "attn_mask is a Mask of 3 sequences, query, key and value have 2$", lambda: attend(masks.padding([1] * 3, 5, 5))
    ),
    bad(
        "attn_mask is a Mask of 3 heads, query, key and value have 4$",
        lambda: attend(masks.from_bool(torch.arange(3 * 25).view(3, 5, 5) % 2 == 0)),
    ),
    bad("Mask or None, ...masks.from_mask_mod", lambda: attend(BLOCK_MASK), TypeError),
    bad(
        "'attn_mask' must be Tensor, Mask or None, not function ...masks.from_mask_mod",
        lambda: attend(lambda b, h, q, k: q >= k),
        TypeError,
    ),
    bad(
        "Mask or None, not list (masks.from_bool makes a Mask of torch.tensor(attn_mask), masks.padding ",
        lambda: attend([[True] * 5] * 5),
        TypeError,
    ),
    bad(
        "Mask or None, not numpy.ndarray (masks.from_bool makes a Mask of torch.tensor(attn_mask), ",
        lambda: attend(torch.ones(5, 5).numpy()),
        TypeError,
    ),
    bad("can't be indexed: ...masks.from_ranges", lambda: masks.causal(4)[:, :, 1:2], TypeError),
    bad("not Tensor ...masks.from_bool", lambda: torch.ones(4, 4).bool() & masks.causal(4), TypeError),
    bad("not Tensor ...masks.from_bool", lambda: masks.causal(4) & torch.ones(4, 4).bool(), TypeError),
    bad("not Tensor ...masks.from_bool", lambda: torch.ones(4, 4).bool() | masks.causal(4), TypeError),
    bad("must be combined with a Mask, not bool", lambda: masks.causal(4) | True, TypeError),
    bad("must have ranges or bits, got neither", lambda: Mask(None, None, None, 4, 4).shape, TypeError),
    bad(
        "mask_mod must give a bool tensor of shape (), got bool of shape (4,)",
        lambda: masks.from_mask_mod(lambda b, h, q, k: torch.ones(4).bool(), None, None, 4, 4),
    ),
    bad("mask must be a dense", lambda: masks.from_bool(torch.ones(4, 4).bool().to_sparse())),
    bad("got a meta tensor", lambda: masks.from_bool(torch.ones(4, 4, device="meta").bool())),
    bad(
        "mask must be a dense (strided) tensor, got a nested tensor",
        lambda: masks.from_bool(torch.nested.nested_tensor([torch.ones(3, 3).bool()])),
    ),
    bad("seqlen_k must be at most 2147483647, got 2147483653", lambda: masks.causal(4, 2**31 + 5), ValueError),
    bad("seqlen_k must be at most 2147483647", lambda: masks.from_ranges(RANGE, 4, 2**32), ValueError),
    bad("KV_LEN must be at most", lambda: masks.from_mask_mod(natten, None, None, 4, 2**40), ValueError),
    bad("on what its data are, got a meta tensor", lambda: masks.document(torch.ones(4, device="meta").int())),
    bad("on what its data are, got a meta tensor", lambda: masks.padding(torch.ones(4, device="meta").int())),
    bad(
        "on what its data are, got a meta tensor", lambda: masks.from_mask_mod(natten, None, None, 4, 4, device="meta")
    ),
    bad("cu_seqlens_q ...meta", lambda: masks.packed(torch.ones(4, device="meta").int())),
    bad("lengths must be within int64", lambda: masks.padding([2**70]), ValueError),
    bad(
        "lengths must be integers or an integer tensor, got [tensor(1.5000)]",
        lambda: masks.padding([torch.tensor(1.5)]),
        TypeError,
    ),
    bad(
        "lengths must be a dense (strided) tensor, got layout torch.sparse_coo",
        lambda: masks.padding(torch.tensor([1, 2]).to_sparse(), 5, 5),
    ),
    bad(
        "ids must be a dense (strided) tensor, got a nested tensor",
        lambda: masks.document(torch.nested.nested_tensor([torch.tensor([1, 1])], layout=torch.jagged)),
    ),
    bad(
        "ranges must be a dense (strided) tensor, got layout torch.sparse_coo",
        lambda: masks.from_ranges(torch.zeros(1, 1, 4, 1, 2).int().to_sparse(), 4, 4),
    ),
    bad("got [1.5, ......$", lambda: masks.padding([1.5] * 10000), TypeError),
    bad("prefix must be integers or an integer tensor, got True", lambda: masks.prefix_lm(True, 4), TypeError),
    bad("must have 1 dimension, got", lambda: masks.padding(torch.ones(2, 2).int())),
    bad("argument 'left' must be bool, not int", lambda: masks.padding([1], left=1), TypeError),
    bad("argument 'is_causal' must be bool, not int", lambda: masks.document([1], is_causal=1), TypeError),
    bad(
        "attn_mask must be a Mask of one sequence for query (4, 5, 8), got (2, 1, 5, 5)",
        lambda: attnkern.attention(Q[0], Q[0], Q[0], masks.padding([1, 2], 5, 5)),
    ),
    bad(
        "attn_mask must be a Mask of one sequence and head for query (5, 8), got (2, 1, 5, 5)",
        lambda: attnkern.attention(Q[0, 0], Q[0, 0], Q[0, 0], masks.padding([1, 2], 5, 5)),
    ),
    bad(
        "'mask_mod' must be a function, not torch....BlockMask (its mask_mod is one)",
        lambda: masks.from_mask_mod(BLOCK_MASK, None, None, 5, 5),
        TypeError,
    ),
    bad(
        "mask_mod must give a bool tensor, not bool",
        lambda: masks.from_mask_mod(lambda b, h, q, k: True, None, None, 4, 4),
        TypeError,
    ),
    bad(
        "lengths must have an integer dtype, got bool (masks.from_bool makes a Mask of a bool tensor)",
        lambda: masks.padding(torch.ones(2, 5).bool(), 5, 5),
    ),
    bad("on query's device cpu", lambda: attend(masks.causal(5).to("meta"))),
    bad(
        "key_ranges, less its last two dimensions, must broadcast to the rows of scores",
        lambda: attend(masks.causal(5), key_ranges=torch.zeros(4, 1, 2).int()),
    ),
    bad(
        "key_ranges must be int32 or int64, got float32",
        lambda: attend(masks.causal(5), key_ranges=torch.zeros(1, 1, 2)),
    ),
    bad(
        "attn_mask must be None when is_causal=True",
        lambda: attnkern.scaled_dot_product_attention(Q, Q, Q, masks.causal(5), is_causal=True),
    ),
    bad("masks to be combined must be of one size", lambda: masks.causal(5) & masks.causal(6)),
    bad("lengths must be from 0 to the number of keys, 5, got 7$", lambda: masks.padding([2, 7], 5, 5), ValueError),
    bad("prefix must be from 0 to the number of keys, 5, got -1$", lambda: masks.prefix_lm([-1, 9], 5), ValueError),
    bad("begin with 0, got 1", lambda: masks.document(cu_seqlens=[1, 5]), ValueError),
    bad("not fall, got 3 after 5", lambda: masks.document(cu_seqlens=[0, 5, 3]), ValueError),
    bad("not exceed the length 5, got 9", lambda: masks.document(cu_seqlens=[0, 9], seqlen=5), ValueError),
    bad("'cu_seqlens_q' must be Tensor, not list", lambda: masks.packed([0, 5]), TypeError),
    bad("cu_seqlens_q must begin with 0, never fall", lambda: masks.packed(torch.tensor([0, 5, 3]))),
    bad(
        "cu_seqlens_k must have the shape of cu_seqlens_q",
        lambda: masks.packed(torch.tensor([0, 5]), torch.tensor([0, 3, 5])),
    ),
    bad("(sequences + 1,), got (0,)", lambda: masks.packed(torch.tensor([]).int())),
    bad("window", lambda: masks.packed(torch.tensor([0, 5]), window=3), TypeError),
    bad("alignment must be", lambda: masks.packed(torch.tensor([0, 5]), alignment="left"), ValueError),
    bad("must give a bool", lambda: masks.from_mask_mod(lambda b, h, q, k: q - k, None, None, 4, 4)),
    bad("mask must be bool", lambda: masks.from_bool(torch.zeros(4, 4))),
    bad("ranges must have the shape", lambda: masks.from_ranges(torch.zeros(4, 1, 2).int(), 4, 4)),
    bad("alignment must be", lambda: masks.causal(4, 4, "left"), ValueError),
    bad("'device' must be torch.device, ... not dtype", lambda: masks.causal(4).to(torch.float64), TypeError),
    bad("'device' must be torch.device, ... not Tensor", lambda: masks.causal(4).to(Q), TypeError),
    bad("'device' must be torch.device, ... not bool", lambda: masks.causal(4).to(True), TypeError),
    bad(
        "the ranges of a Mask must be torch.int32, got torch.float16",
        lambda: attend(pytree.tree_map(torch.Tensor.half, masks.causal(5))),
    ),
    bad(
        "the bits of a Mask must be torch.int64, got torch.float64",
        lambda: pytree.tree_map(torch.Tensor.double, masks.document(torch.arange(70) % 7)).to_dense(),
    ),
    bad("neither true nor false; ... by &, | and ~", lambda: masks.causal(4) and masks.causal(4), TypeError),
    bad("neither true nor false; ... by &, | and ~", lambda: not masks.causal(4), TypeError),
    bad("left must be >= 0, got -1", lambda: masks.sliding_window(-1, 0, 4), ValueError),
]


@refused(BAD)
def test_bad_calls(call, error, message):
    check_refused(call, error, message)


class Sub(Mask):
    """A Mask by another name."""


def test_a_subclass_is_a_mask():
    mask = masks.causal(5)
    sub = Sub(mask.ranges, None, None, 5, 5)
    q = torch.randn(2, 4, 5, 8)
    assert torch.equal(attnkern.attention(q, q, q, sub), attnkern.attention(q, q, q, mask))


def test_numpy_and_tensors_of_one_number_go_where_lists_and_ints_go():
    lengths = np.array([3, 5], dtype=np.int32)
    for given in (lengths, list(lengths), [3, 5]):
        assert torch.equal(masks.padding(given, np.int64(4), np.int32(6)).ranges, masks.padding([3, 5], 4, 6).ranges)
    tensors = [torch.tensor(3), torch.tensor(5)]  # of which none can be compared with 2**63
    assert torch.equal(masks.padding(tensors, 4, 6).ranges, masks.padding([3, 5], 4, 6).ranges)
    assert masks.document(np.array([[0, 0, 1]])).shape == (1, 1, 3, 3)
    assert masks.prefix_lm(np.int64(2), 4).shape == (1, 1, 4, 4)
    assert torch.equal(masks.sliding_window(np.int64(2), 0, 4).ranges, masks.sliding_window(2, 0, 4).ranges)
    q = torch.randn(2, 4, 5, 8)
    assert torch.equal(attnkern.attention(q, q, q, window=(np.int64(1), 0)), attnkern.attention(q, q, q, window=(1, 0)))


def test_it_cannot_be_changed():
    mask = masks.causal(4)
    assert isinstance(mask, Mask)
    with pytest.raises(AttributeError):
        mask.seqlen_q = 5


def test_makers_take_a_size_that_a_graph_has_as_a_symbol():
    """One graph for all lengths, and nothing that torch.export takes for a bound of them."""

    class Makers(torch.nn.Module):
        def forward(self, x):
            n = x.shape[0]
            made = (
                masks.prefix_lm(n - 1, n),
                masks.padding([n - 1, 3], n, n),
                masks.document(cu_seqlens=[0, 3, n], seqlen=n),
            )
            return [mask.ranges + 0 for mask in made]

    counter = CompileCounter()
    compiled = torch.compile(Makers(), backend=counter, fullgraph=True, dynamic=True)
    sizes = ({0: torch.export.Dim("n", min=4)},)
    exported = torch.export.export(Makers(), (torch.zeros(8),), dynamic_shapes=sizes).module()
    for n in (8, 9, 13):
        for run in (compiled, exported):
            for found, expected in zip(run(torch.zeros(n)), Makers()(torch.zeros(n)), strict=True):
                assert torch.equal(found, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (masks.document, torch.tensor([[0, 0, 1], [0, 1, 1]])),
        (masks.from_bool, torch.ones(2, 3, 3, dtype=torch.bool)),
        (masks.packed, torch.tensor([[0, 2, 3], [0, 1, 3]])),
        (lambda lengths: masks.padding(lengths[None]), torch.tensor([2, 3])),
        (lambda ranges: masks.from_ranges(ranges, 3, 3), torch.ones(2, 1, 1, 1, 3, 2, dtype=torch.int64)),
    ],
)
def test_a_maker_that_looks_at_its_data_says_so_under_vmap(make, data):
    with pytest.raises(RuntimeError, match=r"this mask depends on what its data are, which torch\.vmap hides"):
        torch.vmap(lambda x: make(x).to_dense())(data)
