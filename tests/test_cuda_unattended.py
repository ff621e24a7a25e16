"""What no query attends to never enters a sum of the CUDA C++ kernels, whatever it holds; in the simulator, hazards
checked."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F

import attnkern
from random_problems import in_bits
from test_cuda_kernels import BF16, FP16, FP32, simulated  # noqa: F401
from test_cuda_sm90_backward import AGAIN, any_order, launched
from test_unattended import MASKS, make

# By what has kernels of its own: queries, keys, head size, heads of keys; dtype; masks, of which one excludes by bools
# and one by ranges of keys.
KINDS = {
    "bfloat16": ((70, 140, 64, 2), BF16, ("bool of keys", "ranges of a batch")),
    "float16, rows not aligned": ((70, 109, 36, 2), FP16, ("softcap", "causal")),
    "float32": ((46, 90, 40, 2), FP32, ("window and bool", "ranges")),
    "bfloat16 above 256": ((40, 100, 264, 2), BF16, ("bool and ranges", "ranges")),
    "float32 above 256": ((20, 70, 300, 4), FP32, ("negative scale", "float and ranges")),
    "few queries": ((3, 300, 64, 1), BF16, ("bool of keys", "ranges")),
    "few queries, float32": ((3, 140, 160, 2), FP32, ("bool", "float and ranges")),
    "few queries above 256": ((2, 150, 264, 2), BF16, ("bool of keys", "ranges")),
}


@pytest.mark.parametrize(("kind", "mask"), [(kind, mask) for kind, (*_, masks) in KINDS.items() for mask in masks])
def test_output_lse_and_gradients(simulated, kind, mask):  # noqa: F811
    sizes, dtype, _ = KINDS[kind]
    inputs, options = make(sizes, dtype, poison=math.nan, **MASKS[mask])
    simulated.check(inputs, **options)


# The same kernels and shapes of a mask; keys that end within a byte, a word of 4 bytes or of 8.
BITS = {
    "bfloat16": (80, (70, 140, 64, 2), BF16, "BHLS"),
    "float16, rows not aligned": (80, (70, 109, 36, 2), FP16, "B1LS"),
    "float16, d256, on Hopper": (90, (40, 70, 256, 4), FP16, "11LS"),
    "float32": (80, (46, 90, 40, 2), FP32, "1HLS"),
    "bfloat16 above 256": (80, (40, 100, 264, 1), BF16, "BHLS"),
    "float32 above 256": (90, (20, 72, 300, 2), FP32, "B1LS"),
    "few queries": (80, (3, 300, 64, 1), BF16, "BH1S"),
    "few queries, float32": (80, (3, 140, 160, 2), FP32, "BHLS"),
    "few queries above 256": (80, (2, 150, 264, 2), BF16, "11LS"),
}


@pytest.mark.parametrize(("simulated", "kind"), [(BITS[kind][0], kind) for kind in BITS], indirect=["simulated"])
def test_bits_give_what_bools_do(simulated, kind):  # noqa: F811
    """To the last bit, and aren't unpacked for it. Those behind the last key may be anything, as may be hidden keys;
    what is behind a row's last word is not the mask's."""
    _, sizes, dtype, shape = BITS[kind]
    inputs, options = make(sizes, dtype, poison=None, mask=("bool", shape))
    keys = sizes[1]
    hidden = torch.rand(keys, 1) < 0.2
    bools = inputs.attn_mask & ~hidden.squeeze(1)
    bits = in_bits(F.pad(bools, (0, -keys % 64), value=True), sizes[0], keys + -keys % 64).bits
    results = []
    for mask in (bools, attnkern.Mask(None, bits, None, sizes[0], keys)):
        leaves = [inputs.query, *(x.masked_fill(hidden, math.nan) for x in (inputs.key, inputs.value))]
        leaves = [x.clone().requires_grad_() for x in leaves]
        found = simulated.attention(*leaves, mask, return_lse=True, **options)
        grads = torch.autograd.grad(found, leaves, [torch.ones_like(x) for x in found])
        results.append([*found, *grads])
    assert all(x.dtype != torch.bool for x in simulated.recorder.tensors)
    bits_of = [[x.detach().view(torch.uint8) for x in result] for result in results]
    assert all(map(torch.equal, *bits_of))
    assert all(not x.isnan().any() for x in results[0])


BANDS = {
    "keys behind a causal mask": (150, 220, {"is_causal": True}),
    "queries in front of it": (220, 150, {"is_causal": True, "alignment": "bottom_right"}),
    "keys behind a window": (150, 220, {"window": (40, 30)}),
}


@pytest.mark.parametrize(
    ("simulated", "band", "size"),
    [*((80, band, 64) for band in BANDS), *((90, band, n) for band in BANDS for n in (64, 256))],
    indirect=["simulated"],
)
def test_bands(simulated, band, size):  # noqa: F811
    """On the fast path no key is read that the tile's queries don't attend to, or what was read is cleared. Hopper's
    gradients are computed again."""
    queries, keys, band = BANDS[band]
    inputs, options = make((queries, keys, size, 2), BF16, poison=math.nan, **band)
    simulated.check(inputs, **options)
    if simulated.recorder.target == 90:
        assert launched(simulated.recorder)[-4:] == ["dkdv_sm90", "dq_sm90", *AGAIN]


# Of Hopper's backward pass: queries, keys, head size, heads of keys; dtype; what is excluded, of two query heads that
# share their keys or four; where one walk makes all gradients.
HOPPER = {
    "padding": ((70, 300, 64, 2), BF16, MASKS["ranges of a batch"], False),
    "queries without a key": ((150, 140, 96, 1), FP16, {"ranges": ("few", "BHL", 2)}, False),
    "softcap, window": ((100, 190, 192, 2), BF16, {"window": (40, 30), "softcap": 2.0}, False),
    "padding, d256": ((70, 150, 256, 2), FP16, MASKS["ranges of a batch"], False),
    "padding in one walk": ((70, 300, 128, 2), BF16, MASKS["ranges of a batch"], True),
    "queries without a key in one walk": ((150, 140, 128, 1), FP16, {"ranges": ("few", "BHL", 2)}, True),
    "window in one walk": ((190, 100, 104, 2), BF16, {"window": (40, 30)}, True),
}


@pytest.mark.parametrize(
    ("kind", "poison"), [(kind, (math.nan, math.inf)[n % 2]) for n, kind in enumerate(HOPPER)], ids=list(HOPPER)
)
@pytest.mark.parametrize("simulated", [90], indirect=True)
def test_gradients_on_hopper(simulated, kind, poison):  # noqa: F811
    """Its kernels make NaN of it; other ones compute these tiles again."""
    sizes, dtype, masks, fused = HOPPER[kind]
    inputs, options = make(sizes, dtype, poison=poison, **masks)
    with any_order() if fused else contextlib.nullcontext():
        simulated.check(inputs, **options)
    kernels = ["fused_sm90", "round_dq_sm90"] if fused else ["dkdv_sm90", "dq_sm90"]
    assert launched(simulated.recorder)[-4:] == [*kernels, *AGAIN]
    assert all(report.statistics["products"] for report in simulated.recorder.reports[-2:])


@pytest.mark.parametrize("simulated", [90], indirect=True)
def test_tiles_without_nan_stay_as_they_are(simulated):  # noqa: F811
    inputs, options = make((70, 300, 64, 2), BF16, poison=None, **MASKS["ranges of a batch"])
    simulated.check(inputs, **options)
    assert launched(simulated.recorder)[-2:] == AGAIN
    assert not any(report.statistics["products"] for report in simulated.recorder.reports[-2:])


@pytest.mark.parametrize(
    ("simulated", "sizes", "dtype"),
    [(80, (150, 140, 64, 2), BF16), (80, (90, 70, 40, 2), FP32), (90, (150, 140, 96, 1), FP16)],
    indirect=["simulated"],
)
def test_queries_without_a_key_beside_a_sink(simulated, sizes, dtype):  # noqa: F811
    """Their log-sum-exp is that of the sink, and tells nothing of keys."""
    inputs, options = make(sizes, dtype, poison=math.nan, ranges=("few", "BHL", 2))
    simulated.check(inputs.with_sinks("H", FP32, 1), **options)
