"""What no query attends to never enters a sum of the CUDA C++ kernels, whatever it holds; in the simulator, hazards
checked."""

import math

import pytest
import torch
import torch.nn.functional as F

import attnkern
from random_problems import in_bits
from simulated import BF16, FP16, FP32, simulated  # noqa: F401
from test_unattended import MASKS, make

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
    inputs, options = make(simulated, sizes, dtype, poison=None, mask=("bool", shape))
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


@pytest.mark.parametrize("simulated", [90], indirect=True)
def test_tiles_without_nan_stay_as_they_are(simulated):  # noqa: F811
    inputs, options = make(simulated, (70, 300, 64, 2), BF16, poison=None, **MASKS["ranges of a batch"])
    simulated.check(inputs, **options)
    assert simulated.kernels()[-2:] == ["dkdv", "dq"]
    assert not any(report.statistics["products"] for report in simulated.recorder.reports[-2:])
