"""Numbers at the ends of their range: scores that lie far apart, large, of either sign or all the same.

tests/test_isa.py draws the same for every instruction set, `make fuzz` for every backend.
"""

import dataclasses
import functools
import itertools
import math

import pytest
import torch

from attnkern import testing
from random_problems import far_key

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize("place", [0, 50, -1])
@pytest.mark.parametrize("gap", [60, 90, 178, 250, 720, 5000])
def test_a_key_far_above_the_others(target, gap, place, dtype):
    """e^gap overflows in float32 from 89 on, in float64 from 710 on: wherever that key stands, it takes all."""
    results = target.check(far_key(gap, place, dtype=dtype, device=target.device))
    assert results["out"].isfinite().all()


@pytest.mark.parametrize("queries", [1, 2, 8, 16, 40])
@pytest.mark.parametrize("scale", [-3.0, -0.5, 0.0, 3.0])
def test_scales_of_either_sign(target, scale, queries, dtype):
    """A negative scale makes the smallest product the largest score, also where few queries meet many keys."""
    for keys in (160, 257):
        target.check(target.inputs(1, 2, queries, keys, 64, dtype=dtype), scale=scale)


@pytest.mark.parametrize("queries", [1, 3, 16, 40])
@pytest.mark.parametrize("scale", [1e4, 1e8, 1e9, -1e12, 1e18, 1e30])
def test_scores_so_large_that_one_takes_all(target, scale, queries, dtype):
    """The rounding of such a score is a large exponent: the maximum and what it is taken from must be rounded alike."""
    if abs(scale) > 1e12 and target.device == "cuda" and dtype != FP64:
        scale = math.copysign(1e12, scale)
    for keys, options in [(64, {}), (100, {}), (100, {"is_causal": True, "alignment": "bottom_right"})]:
        q, k, v = target.inputs(1, 2, queries, keys, 64, dtype=dtype, seed=5).tensors.values()
        out, lse = target.attention(q, k, v, scale=scale, return_lse=True, **options)
        exact, exact_lse = testing.naive_attention(q.double(), k.double(), v.double(), scale=scale, **options)
        top = (q.double() @ k.double().mT * scale).topk(2).values
        assert (top[..., 0] - top[..., 1]).min() > 1e-4 * abs(scale)  # nothing depends on how a score is rounded
        if scale == 1e4 and dtype != FP64:
            continue  # some rows have several keys there: `testing.check_attention` is for these
        torch.testing.assert_close(out, exact.to(out), rtol=0.0, atol=0.0)
        torch.testing.assert_close(lse, exact_lse.to(lse), rtol=2e-6, atol=0.0)


def _gradients_one_by_one(q, k, v, grad_out, scale):
    """Gradients of weights that are kept, of scores that are summed one product after another.

    A library's product of matrices is a yardstick that changes with the machine: some take few rows in 16 partial sums,
    which rounds a quarter as much.
    """
    scores = q.new_zeros(*q.shape[:-1], k.size(-2))
    for d in range(q.size(-1)):
        scores += q[..., d, None] * k[..., None, :, d]
    weights = (scores * scale).softmax(-1)
    grad_weights = grad_out @ v.mT
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True)) * scale
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad_out


def _exact_gradients(q, k, v, grad_out, scale):
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = testing.naive_attention(*leaves, scale=scale, exact=q.dtype == FP64)
    return torch.autograd.grad(out, leaves, grad_out.double())


def _mean_errors(grads, exact, scale):
    return torch.stack([(x.double() - y).abs().mean() / scale for x, y in zip(grads, exact, strict=True)])


def _saturating(queries, dtype, device):
    """Inputs and gradients of the output, scales, exact gradients and the mean errors of plain maths."""
    found = []
    for seed in range(8):
        for amplitude, scale, width in ((3.0, 1.2, 192), (6.0, 2.0, 256), (10.0, 3.0, 288), (10.0, 0.1, 64)):
            sizes, amplitudes = (2, 2, queries, 200, width, 64), (amplitude, amplitude, 1.0)
            inputs = testing.make_inputs(*sizes, dtype=dtype, device=device, amplitude=amplitudes, seed=seed)
            generator = torch.Generator().manual_seed(seed)
            grad_out = torch.randn(2, 2, queries, 64, generator=generator, dtype=FP64).to(inputs.query)
            given = *inputs.tensors.values(), grad_out
            exact = _exact_gradients(*given, scale)
            plain = _mean_errors(_gradients_one_by_one(*given, scale), exact, scale)
            found.append((given, scale, exact, plain))
    return found


@pytest.fixture(scope="module", params=itertools.product([8, 64, 129], [FP32, FP64]), ids=str)
def saturating(request):
    """`_saturating`, of a device, once for all targets."""
    return functools.cache(functools.partial(_saturating, *request.param))


def test_gradients_where_scores_saturate(target, saturating):
    """Scores up to 2e4: the mean error is at most twice that of plain maths in the dtype, which keeps the weights.

    The mean is that of some hundred rows with two keys almost alike, whose weights depend on how scores are rounded;
    all others must come out as if nothing had been rounded. Inputs are the same in every run.
    """
    own_errors = plain_errors = 0
    for (*inputs, grad_out), scale, exact, plain in saturating(target.device):
        leaves = [x.detach().requires_grad_() for x in inputs]
        grads = torch.autograd.grad(target.attention(*leaves, scale=scale), leaves, grad_out)
        own_errors = own_errors + _mean_errors(grads, exact, scale)
        plain_errors = plain_errors + plain
    for name, own, most in zip(("query", "key", "value"), own_errors.tolist(), plain_errors.tolist(), strict=True):
        assert own <= 2 * most, f"gradient of {name}: {own:.2g}, plain maths {most:.2g}"


def test_rows_whose_mask_is_finfo_min_throughout(target):
    """Such a row is the mean of its keys; a log-sum-exp of -3e38 can't say how many they are.

    (Nor can it in float64: its own gradient is left out.)
    """
    mask = torch.zeros(40, 70, device=target.device)
    mask[3:7] = torch.finfo(FP32).min
    inputs = dataclasses.replace(target.inputs(1, 2, 40, 70, 16), attn_mask=mask)
    target.check(inputs, function=lambda **leaves: target.attention(**leaves))


def test_a_scale_that_operands_cannot_be_multiplied_by(target):
    """Products that are small, a scale that is not: no score is too large until its product with the scale is."""
    q, k, v = target.inputs(1, 1, 40, 70, 16, amplitude=(100.0, 1e-37, 1.0), seed=1).tensors.values()
    scale = 1e37
    out = target.attention(q, k, v, scale=scale)
    want = testing.naive_attention(q.double(), k.double(), v.double(), scale=scale)[0]
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [129, 192, 256, 512])
@pytest.mark.parametrize("amplitude", [10, 100, 1000])
def test_gradients_of_long_sums_at_large_scores(target, size, amplitude, dtype):
    """P and what normalises it are of the same scores, summed in one order: longer sums than 128 terms have two."""
    if dtype == FP16 and amplitude > 100:
        amplitude = 300  # products of 16 bits are not to overflow
    inputs = target.inputs(1, 1, 70, 97, size, dtype=dtype, amplitude=(amplitude, amplitude, 1.0))
    value = inputs.value.detach().requires_grad_()
    out = target.attention(inputs.query, inputs.key, value, scale=1.0)
    grad_out = 0.25 * torch.randn_like(out)
    (actual,) = torch.autograd.grad(out, value, grad_out)
    told = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "scale": 1.0, "grad_out": grad_out}
    testing.expected(**told)["value"].check(actual, gradient=True, name="gradient of value", recipe=inputs.recipe)
