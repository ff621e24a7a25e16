"""The tests' own tools: the rule lets nothing pass that it should not, and the reference says what torch says."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnkern import testing


def results(dtype=torch.float32, **options):
    inputs = testing.make_inputs(2, 2, 9, 33, 8, dtype=dtype, mask=("holes", "1HLS"))
    grad_out = torch.randn(2, 2, 9, 8, dtype=dtype)
    return inputs, testing.expected(**inputs.tensors, grad_out=grad_out, **options)


@pytest.mark.parametrize("name", ["out", "query", "key", "value", "attn_mask"])
def test_the_baseline_passes_and_a_wrong_entry_does_not(name, dtype):
    _, want = results(dtype)
    x = want[name]
    testing.assert_within_rule(x.baseline, x.exact, x.baseline, unit=x.unit)
    for change in (1.05, math.nan, math.inf):
        wrong = x.baseline.clone(memory_format=torch.contiguous_format)
        wrong.view(-1)[int(wrong.abs().argmax())] *= change
        with pytest.raises(AssertionError, match="times what is allowed"):
            testing.assert_within_rule(wrong, x.exact, x.baseline, gradient=True, unit=x.unit)


def test_a_nan_never_passes():
    exact = torch.zeros(3, dtype=torch.float64)
    for actual in (torch.full((3,), math.nan), torch.tensor([0.0, math.nan, 0.0])):
        assert testing.errors(actual, exact, actual).ratio == math.inf
        assert not testing.errors(actual, exact, exact.float()).ok
    with pytest.raises(ValueError, match="NaN"):
        testing.errors(exact.float(), torch.full((3,), math.nan, dtype=torch.float64), exact.float())


def test_infinities_pass_only_where_they_belong():
    exact = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert testing.errors(exact.float(), exact, exact.float()).ok
    for wrong in ([math.inf, 1.0], [0.0, 1.0], [-math.inf, -math.inf], [math.nan, 1.0]):
        assert not testing.errors(torch.tensor(wrong), exact, exact.float()).ok


def test_an_infinite_allowance_is_refused():
    x = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="unit"):
        testing.errors(x.float(), x, x.float(), unit=torch.tensor([1.0, math.inf]))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shapes differ"):
        testing.errors(torch.zeros(2), torch.zeros(3).double(), torch.zeros(3))


def test_factors():
    """Twice torch's error passes for outputs, three times for gradients, and not more than that."""
    exact = torch.ones(1000, dtype=torch.float64)
    baseline = (exact + 1e-3).float()
    for gradient, factor in ((False, 2), (True, 3)):
        assert testing.error_ratio((exact + 0.99e-3 * factor).float(), exact, baseline, gradient=gradient) < 1
        assert testing.error_ratio((exact + 1.01e-3 * factor).float(), exact, baseline, gradient=gradient) > 1


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -0.3}, {"enable_gqa": True}], ids=str)
@pytest.mark.parametrize("mask", [None, ("bool", "BHLS"), ("float", "LS")], ids=str)
def test_the_naive_reference_is_torchs_attention(options, mask):
    if mask and "is_causal" in options:
        mask = None
    heads_k = 2 if "enable_gqa" in options else 4
    inputs = testing.make_inputs(2, 4, 9, 13, 8, 6, heads_k=heads_k, dtype=torch.float64, mask=mask)
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(*inputs.tensors.values(), **options)
    torch.testing.assert_close(testing.naive_attention(*inputs.tensors.values(), **options)[0], want)


def test_the_naive_reference_passes_gradcheck():
    inputs = testing.make_inputs(1, 2, 3, 4, 3, dtype=torch.float64, mask=("float", "1HLS"))
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]
    assert torch.autograd.gradcheck(lambda *x: testing.naive_attention(*x, softcap=2.0, window=(1, 1)), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_rule_is_sharp(dtype):
    """A kernel that forgets its last key of 500, or drops the scale's last percent, is caught in every dtype."""
    inputs = testing.make_inputs(1, 2, 33, 500, 64, dtype=dtype)
    want = testing.expected(*inputs.tensors.values())["out"]
    q, k, v = (x.float() for x in inputs.tensors.values())
    for wrong in (
        testing.naive_attention(q, k[:, :, :-1], v[:, :, :-1])[0],
        testing.naive_attention(q, k, v, scale=0.99 / 8)[0],
    ):
        assert not testing.errors(wrong.to(dtype), want.exact, want.baseline, unit=want.unit).ok


def test_layouts_keep_values_and_hide_nan():
    x = torch.randn(2, 3, 5, 8)
    for name in testing.LAYOUTS:
        view = testing.with_layout(x, name)
        assert torch.equal(view, x)
    for name in ("packed", "stepped", "stepped_rows", "offset", "padded"):
        storage = torch.empty(0).set_(testing.with_layout(x, name).untyped_storage())
        assert storage.isnan().sum() == storage.numel() - x.numel() > 0


def test_problems_come_again_from_their_seed():
    for seed in (0, 1, 2):
        (a, a_options), (b, b_options) = testing.random_problem(seed), testing.random_problem(seed)
        assert a_options == b_options
        assert all(torch.equal(x, y) for x, y in zip(a.tensors.values(), b.tensors.values(), strict=True))
    inputs = testing.make_inputs(1, 2, 3, 4, 5, dtype=torch.bfloat16, mask=("holes", "LS"))
    again = eval(inputs.recipe, {"attnkern": __import__("attnkern.testing"), "torch": torch})
    assert all(torch.equal(x, y) for x, y in zip(inputs.tensors.values(), again.tensors.values(), strict=True))


def test_unmodified_notices_a_write_between_the_entries():
    storage = torch.zeros(10)
    with pytest.raises(AssertionError, match="written to"), testing.unmodified(storage[::2]):
        storage.data[1] = 1.0


def test_fresh_memory_is_poisoned(dtype):
    """Also where torch does not fill it: in deterministic mode it leaves compiled operators' tensors as they are."""
    for size in (1, 100, 10000):
        assert torch.empty(size, dtype=dtype).isnan().all()
        torch.utils.deterministic.fill_uninitialized_memory = False
        assert torch.empty(size, dtype=dtype).isnan().any()


def test_importable_without_the_test_tools():
    code = """
import sys
sys.modules["pytest"] = sys.modules["hypothesis"] = None
import attnkern.testing
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
