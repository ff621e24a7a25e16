"""attn_mask: kinds, shapes, strides, extreme values; rows without a key; how far a NaN reaches."""

import math
from itertools import product

import pytest
import torch

import attnkern
from attnkern import testing
from matrix import FLOATS, in_turn

contract = pytest.mark.contract
B, H, L, S, E = 2, 3, 9, 37, 8
INF = math.inf


def masked(target, mask, dtype=torch.float32, sizes=(B, H, L, S, E)):
    """Random inputs of `sizes` with this mask, moved to the target's device."""
    inputs = target.inputs(*sizes, dtype=dtype)
    return testing.Inputs(inputs.query, inputs.key, inputs.value, mask.to(target.device), inputs.recipe)


SHAPES = ["LS", "1S", "L1", "11", "HLS", "1LS", "H1S", "HL1"]
SHAPES += ["B11S", "BHLS", "1HLS", "B1LS", "B1L1", "1H1S", "BH1S", "1111"]


@contract(14, 15, 16, 20)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["bool", "float", "holes"])
def test_mask_of_every_shape(target, kind, shape, dtype):
    """Output and gradients, the mask's own included, which comes back in the mask's shape and dtype."""
    inputs = target.inputs(B, H, L, S, E, dtype=dtype, mask=(kind, shape))
    results = target.check(inputs)
    assert results["out"].dtype == dtype
    if kind == "holes":
        assert not results["attn_mask"][inputs.attn_mask == -INF].any()


@contract(15, 18, 20)
@pytest.mark.parametrize("shape", ["LS", "B11S", "BHLS", "1H1S", "L1"])
def test_float32_mask_with_any_dtype(target, shape, dtype):
    inputs = target.inputs(B, H, L, S, E, dtype=dtype, mask=("holes", shape), mask_dtype=torch.float32)
    results = target.check(inputs)
    assert results["out"].dtype == dtype
    assert results["attn_mask"].dtype == torch.float32


def positions(length):
    return torch.arange(length, dtype=torch.float64) / length


# Of queries and keys whose places in their sequences, from 0 to 1, are given: who meets whom.
BLOCKS = {
    "causal": lambda q, k: k <= q,
    "sequences side by side": lambda q, k: (q * 3).floor() == (k * 3).floor(),
    "padding in front": lambda q, k: k > 0.7,
    "padding behind": lambda q, k: k < 0.2,
    "an island": lambda q, k: (q - 0.5).abs().maximum((k - 0.4).abs()) < 0.05,
    "nothing": lambda q, k: (q < 0) & (k < 0),
}
OF_BLOCKS = ["bool", "bool, transposed", "float", "float by head"]


@contract(14, 15, 24)
@pytest.mark.parametrize(
    **in_turn(
        **{"name, kind, sizes": list(product(BLOCKS, OF_BLOCKS, [(330, 300), (3, 1300), (1, 1300)]))}, dtype=FLOATS
    ),
    ids=str,
)
def test_blocks_that_a_mask_excludes(target, name, kind, sizes, dtype):
    """Kernels may leave out what no query of a block attends to: the results, zeros among them, stay what they are."""
    inputs = target.inputs(1, 2, *sizes, 16, dtype=dtype, mask=("holes", "1HLS" if kind == "float by head" else "LS"))
    mask = inputs.attn_mask
    meets = BLOCKS[name](positions(sizes[0])[:, None], positions(sizes[1])).to(target.device)
    mask.masked_fill_(~meets, -INF)
    if kind.startswith("bool"):
        mask = mask > -INF
    if kind == "bool, transposed":
        mask = mask.mT.contiguous().mT
    results = target.check(testing.Inputs(inputs.query, inputs.key, inputs.value, mask, f"{inputs.recipe}, {name}"))
    if mask.is_floating_point():
        assert not results["attn_mask"][..., ~meets].any()


@contract(14)
def test_all_true_equals_no_mask(target, dtype):
    q, k, v = target.inputs(B, H, L, S, E, dtype=dtype).tensors.values()
    mask = torch.ones(L, S, dtype=torch.bool, device=target.device)
    torch.testing.assert_close(target.sdpa(q, k, v, mask), target.sdpa(q, k, v))


@contract(14)
def test_true_means_attend(target):
    q, k, v = target.inputs(1, 1, L, S, E).tensors.values()
    mask = torch.zeros(L, S, dtype=torch.bool, device=target.device)
    mask[:, 5] = True
    torch.testing.assert_close(target.sdpa(q, k, v, mask), v[:, :, 5:6].expand(1, 1, L, E))


@contract(15)
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, -1.0])
def test_the_mask_is_not_scaled(target, scale):
    target.check(target.inputs(B, H, L, S, E, mask=("float", "HLS")), scale=scale)


@contract(15)
@pytest.mark.parametrize("value", [1e4, -1e4, 100.0, -100.0, 0.0])
def test_large_mask_values(target, value, dtype):
    mask = (torch.rand(H, L, S) < 0.5).to(dtype) * value
    target.check(masked(target, mask, dtype))


@contract(17)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=lambda x: f"{len(x) + 2}d")
@pytest.mark.parametrize("shape", [(), (S,)], ids=["rank0", "rank1"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_rank_zero_and_one(target, kind, shape, leading):
    inputs = target.random((*leading, L, E), (*leading, S, E), (*leading, S, E))
    mask = target.randn(shape) if kind == "float" else torch.ones(shape, dtype=torch.bool, device=target.device)
    if kind == "bool" and shape:
        mask[::3] = False
    out = target.sdpa(*inputs.tensors.values(), mask)
    want = testing.expected(*inputs.tensors.values(), mask)["out"]
    want.check(out)


@contract(16)
def test_when_only_value_has_the_larger_batch(target):
    inputs = target.random((1, 3, 5, 8), (1, 3, 7, 8), (4, 3, 7, 8), mask=target.randn(1, 3, 5, 7))
    target.check(inputs)


def strided_masks():
    def bool_or_float(kind, shape):
        return torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape)

    return {
        "transposed": lambda kind: bool_or_float(kind, (B, H, S, L)).mT,
        "stepped": lambda kind: bool_or_float(kind, (B, H, L, 2 * S))[..., ::2],
        "stepped rows": lambda kind: bool_or_float(kind, (B, H, 3 * L, S))[..., ::3, :],
        "offset": lambda kind: bool_or_float(kind, (B, H, L + 2, S + 5))[..., 2:, 5:],
        "expanded batch": lambda kind: bool_or_float(kind, (1, 1, L, S)).expand(B, H, L, S),
        "expanded heads": lambda kind: bool_or_float(kind, (B, 1, L, S)).expand(B, H, L, S),
        "expanded rows": lambda kind: bool_or_float(kind, (B, 1, 1, S)).expand(B, H, L, S),
        "expanded columns": lambda kind: bool_or_float(kind, (B, H, L, 1)).expand(B, H, L, S),
        "expanded everywhere": lambda kind: bool_or_float(kind, (1, 1, 1, 1)).expand(B, H, L, S),
        "batch stride 0": lambda kind: bool_or_float(kind, (1, 1, L, S)).expand(B, 1, L, S),
        "heads last": lambda kind: bool_or_float(kind, (B, L, S, H)).permute(0, 3, 1, 2),
        "every second head": lambda kind: bool_or_float(kind, (B, 2 * H, L, S))[:, ::2],
        "windows": lambda kind: bool_or_float(kind, (L + S - 1,)).unfold(0, S, 1),  # relative positions, rows overlap
    }


@contract(19)
@pytest.mark.parametrize("name", strided_masks())
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_of_any_stride(target, name, kind, dtype):
    mask = strided_masks()[name](kind)
    if kind == "float" and dtype != torch.float32 and "expanded" not in name:
        strides = mask.stride()  # keep the strides: .to() would lay an overlapping mask out anew
        flat = torch.empty(0).set_(mask.untyped_storage()).to(dtype)
        mask = flat.as_strided(mask.shape, strides, mask.storage_offset())
    assert mask.to(target.device).stride() == mask.stride() or target.device != "cpu"
    target.check(masked(target, mask, dtype))


@contract(19, 20)
def test_mask_gradient_of_an_expanded_leaf(target):
    leaf = target.randn(1, 1, L, S, requires_grad=True)
    q, k, v = target.inputs(B, H, L, S, E).tensors.values()
    grad_out = target.randn(B, H, L, E)
    (through_expand,) = torch.autograd.grad(target.sdpa(q, k, v, leaf.expand(B, H, L, S)), leaf, grad_out)
    (direct,) = torch.autograd.grad(target.sdpa(q, k, v, leaf), leaf, grad_out)
    want = testing.expected(q, k, v, leaf, grad_out=grad_out)["attn_mask"]
    for got in (through_expand, direct):
        want.check(got, gradient=True)


# --- the lowest finite value


@contract(22)
def test_a_row_of_finfo_min_is_the_mean_of_value(target, dtype):
    mask = torch.zeros(L, S, dtype=dtype)
    mask[2] = torch.finfo(dtype).min
    inputs = masked(target, mask, dtype)
    out = target.check(inputs, gradients=False)["out"]
    if dtype != torch.float16:  # in float16 the differences of the scores survive the addition
        mean = inputs.value.double().mean(-2).to(dtype)
        torch.testing.assert_close(out[:, :, 2], mean)


@contract(22)
def test_part_of_a_row_at_finfo_min_is_excluded(target, dtype):
    mask = torch.zeros(L, S, dtype=dtype)
    mask[:, ::3] = torch.finfo(dtype).min
    inputs = masked(target, mask, dtype)
    out = target.sdpa(*inputs.tensors.values())
    excluded = target.sdpa(inputs.query, inputs.key, inputs.value, inputs.attn_mask == 0)
    torch.testing.assert_close(out, excluded)
    # Exactly: what stands behind it does not matter.
    value = inputs.value.clone()
    value[..., ::3, :] = 1e4
    assert torch.equal(target.sdpa(inputs.query, inputs.key, value, inputs.attn_mask), out)


@contract(22)
@pytest.mark.parametrize("mask_dtype", ["own", "float32"])
def test_gradients_with_rows_of_finfo_min(target, dtype, mask_dtype):
    """Finite everywhere; right for the other rows, and for all of them when such a row has no gradient of its own."""
    bias_dtype = dtype if mask_dtype == "own" else torch.float32
    mask = torch.zeros(L, S, dtype=bias_dtype)
    mask[1] = mask[4] = torch.finfo(bias_dtype).min
    inputs = masked(target, mask, dtype)
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.tensors.items()}
    out = target.sdpa(*leaves.values())
    grad_out = target.randn(B, H, L, E, dtype=dtype)
    for x in torch.autograd.grad(out, list(leaves.values()), grad_out, retain_graph=True):
        assert x.isfinite().all()
    grad_out[:, :, [1, 4]] = 0
    got = torch.autograd.grad(out, list(leaves.values()), grad_out)
    want = testing.expected(**inputs.tensors, grad_out=grad_out)
    for name, x in zip(leaves, got, strict=True):
        want[name].check(x, gradient=True, name=name)


# --- rows without a key


DEAD = {
    "one row, bool": lambda m: m.index_fill_(-2, torch.tensor(3), False),
    "the first and last rows": lambda m: m.index_fill_(-2, torch.tensor([0, L - 1]), False),
    "a whole batch element": lambda m: m.index_fill_(0, torch.tensor(1), False),
    "a whole head": lambda m: m.index_fill_(1, torch.tensor(2), False),
    "everything": lambda m: m.fill_(False),
}


@contract(24)
@pytest.mark.parametrize("which", DEAD)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("heads", ["same", "gqa"])
def test_rows_without_a_key_are_zero(target, which, kind, heads, dtype):
    keep = DEAD[which](torch.ones(B, H, L, S, dtype=torch.bool))
    mask = keep if kind == "bool" else torch.zeros(B, H, L, S, dtype=dtype).masked_fill(~keep, -INF)
    inputs = target.inputs(B, H, L, S, E, dtype=dtype, heads_k=1 if heads == "gqa" else None)
    inputs = testing.Inputs(inputs.query, inputs.key, inputs.value, mask.to(target.device), inputs.recipe)
    results = target.check(inputs, enable_gqa=heads == "gqa")
    dead = ~keep.any(-1).to(target.device)
    assert not results["out"][dead].any()
    assert (results["lse"][dead] == -INF).all()
    assert results["lse"][~dead].isfinite().all()
    assert not results["query"][dead].any()
    if kind == "float":
        assert not results["attn_mask"][dead].any()
        assert results["attn_mask"].isfinite().all()


@contract(24)
@pytest.mark.parametrize("alive", ["first", "last"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_live_keys_only_at_one_end_of_a_long_row(target, alive, kind, dtype):
    s = 1500
    keep = torch.zeros(5, s, dtype=torch.bool)
    keep[:, :3] = alive == "first"
    keep[:, -3:] = alive == "last"
    keep[2] = False
    mask = keep if kind == "bool" else torch.zeros(5, s, dtype=dtype).masked_fill(~keep, -INF)
    target.check(masked(target, mask, dtype, (1, 2, 5, s, 8)))


@contract(24)
def test_lse_gradient_of_a_dead_row_is_zero(target):
    q, k, v = (x.requires_grad_() for x in target.inputs(1, 1, 4, 6, 8).tensors.values())
    keep = torch.ones(4, 6, dtype=torch.bool, device=target.device)
    keep[1] = False
    _, lse = target.attention(q, k, v, keep, return_lse=True)
    dq, dk = torch.autograd.grad(lse, (q, k), torch.ones_like(lse))
    assert dq.isfinite().all()
    assert dk.isfinite().all()
    assert not dq[0, 0, 1].any()


# --- NaN and infinity go where arithmetic takes them, and nowhere else


@contract(23)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("column", [0, S // 2, S - 1])
def test_a_nan_in_the_mask_stays_in_its_row(target, value, column, dtype):
    mask = torch.randn(B, H, L, S).to(dtype)
    mask[1, 2, 4, column] = value
    inputs = masked(target, mask, dtype)
    out = target.sdpa(*inputs.tensors.values())
    mask[1, 2, 4, column] = 0
    clean = target.sdpa(inputs.query, inputs.key, inputs.value, mask.to(target.device))
    hit = torch.zeros(B, H, L, dtype=torch.bool, device=target.device)
    hit[1, 2, 4] = True
    assert out[hit].isnan().all()
    assert torch.equal(out[~hit], clean[~hit])


@contract(41)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("sizes", [(9, 37), (1, 100), (70, 70)], ids=str)
def test_a_nan_in_a_query_row_stays_in_it(target, value, options, sizes, dtype):
    q, k, v = target.inputs(B, H, *sizes, E, dtype=dtype).tensors.values()
    k[1, 2, 0, 3], k[1, 2, 1, 3] = 1, -1  # of scores that are all -inf the row would be one without a key
    clean = target.attention(q, k, v, **options)
    row = sizes[0] // 2
    q[1, 2, row, 3] = value
    out = target.attention(q, k, v, **options)
    hit = torch.zeros(B, H, sizes[0], dtype=torch.bool, device=target.device)
    hit[1, 2, row] = True
    if math.isnan(value) or not options:
        assert out[hit].isnan().all()
    assert torch.equal(out[~hit], clean[~hit])


@contract(41)
@pytest.mark.parametrize("column", [0, 5, 36])
@pytest.mark.parametrize("masked_too", [False, True])
def test_a_nan_in_a_key_reaches_the_rows_that_attend_to_it(target, column, masked_too, dtype):
    q, k, v = target.inputs(B, H, L, S, E, dtype=dtype).tensors.values()
    keep = torch.ones(L, S, dtype=torch.bool, device=target.device)
    if masked_too:
        keep[::2, column] = False
    clean = target.sdpa(q, k, v, keep)
    k[1, 2, column, 3] = math.nan
    out = target.sdpa(q, k, v, keep)
    assert out[1, 2, keep[:, column]].isnan().all()
    elsewhere = torch.ones(B, H, dtype=torch.bool, device=target.device)
    elsewhere[1, 2] = False
    assert torch.equal(out[elsewhere], clean[elsewhere])


@contract(41)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_nan_in_value_reaches_its_column(target, value, dtype):
    q, k, v = target.inputs(B, H, L, S, E, dtype=dtype).tensors.values()
    clean = target.sdpa(q, k, v)
    v[1, 2, 7, 3] = value
    out = target.sdpa(q, k, v)
    hit = torch.zeros(B, H, L, E, dtype=torch.bool, device=target.device)
    hit[1, 2, :, 3] = True
    assert not out[hit].isfinite().any()
    torch.testing.assert_close(out[~hit], clean[~hit])


@contract(41)
def test_a_nan_in_one_head_leaves_the_gradients_of_others_alone(target, dtype):
    inputs = target.inputs(B, H, L, S, E, dtype=dtype)
    grad_out = target.randn(B, H, L, E, dtype=dtype)

    def gradients():
        leaves = [x.detach().requires_grad_() for x in inputs.tensors.values()]
        return torch.autograd.grad(target.sdpa(*leaves), leaves, grad_out)

    clean = gradients()
    inputs.query[1, 2, 3, 0] = inputs.key[1, 2, 0, 0] = inputs.value[1, 2, 5, 5] = math.nan
    elsewhere = torch.ones(B, H, dtype=torch.bool, device=target.device)
    elsewhere[1, 2] = False
    for a, b in zip(gradients(), clean, strict=True):
        assert torch.equal(a[elsewhere], b[elsewhere])
        assert a[1, 2].isnan().any()


@contract(41)
def test_a_nan_of_the_future_is_not_seen_by_the_first_blocks(target, dtype):
    """Behind a causal mask a NaN may spread within its block at most, never to the beginning of a long sequence."""
    q, k, v = target.inputs(1, 2, 400, 400, E, dtype=dtype).tensors.values()
    clean = target.sdpa(q, k, v, is_causal=True)
    k[0, 0, 390] = math.nan
    v[0, 0, 391] = math.nan
    out = target.sdpa(q, k, v, is_causal=True)
    assert torch.equal(out[0, 1], clean[0, 1])
    assert out[0, 0, 391:].isnan().any(-1).all()
    if target.backend != "reference":  # plain torch spreads 0 * NaN over the whole product
        assert torch.equal(out[0, 0, :256], clean[0, 0, :256])


def test_mask_together_with_a_band_is_the_intersection():
    inputs = testing.make_inputs(2, 2, 9, 12, 8, mask=("holes", "BHLS"))
    for backend in (info.name for info in attnkern.backends() if info.available and "cpu" in info.device_types):
        testing.check_attention(inputs, backend=backend, is_causal=True)
        testing.check_attention(inputs, backend=backend, window=(3, 1), alignment="bottom_right")
