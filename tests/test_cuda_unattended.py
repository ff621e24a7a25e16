"""What no query attends to never enters a sum of the CUDA C++ kernels, whatever it holds; in the simulator, hazards
checked."""

import math

import pytest

from test_cuda_kernels import BF16, FP16, FP32, simulated  # noqa: F401
from test_cuda_sm90_backward import launched
from test_unattended import MASKS, make

# By what has kernels of its own: queries, keys, head size, heads of keys; dtype.
KINDS = {
    "bfloat16": ((70, 140, 64, 2), BF16),
    "float16, rows not aligned": ((70, 109, 36, 2), FP16),
    "float32": ((46, 90, 40, 2), FP32),
    "bfloat16 above 256": ((70, 140, 264, 2), BF16),
    "float32 above 256": ((40, 100, 300, 2), FP32),
    "few queries": ((3, 300, 64, 1), BF16),
    "few queries, float32": ((3, 200, 160, 2), FP32),
    "few queries above 256": ((2, 150, 264, 2), BF16),
}


# Every kernel with a bool mask and with ranges; every mask with two of them, by tiles of rows and by chunks.
CASES = [(kind, mask) for kind in KINDS for mask in ("bool", "ranges")]
CASES += [(kind, mask) for kind in ("bfloat16", "float32") for mask in MASKS if mask not in ("bool", "ranges")]


@pytest.mark.parametrize(("kind", "mask"), CASES)
def test_output_lse_and_gradients(simulated, kind, mask):  # noqa: F811
    sizes, dtype = KINDS[kind]
    inputs, options = make(sizes, dtype, poison=math.nan, **MASKS[mask])
    simulated.check(inputs, **options)


BANDS = {
    "causal, few queries": {"is_causal": True},
    "causal": {"is_causal": True, "alignment": "bottom_right"},
    "window": {"window": (40, 30)},
}


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("simulated", [80, 90], indirect=True)
def test_bands(simulated, band, size):  # noqa: F811
    """On the fast path no key is read that the tile's queries don't attend to, or what was read is cleared."""
    queries, keys = (150, 300) if band == "causal, few queries" else (170, 190)
    inputs, options = make((queries, keys, size, 2), BF16, poison=math.nan, **BANDS[band])
    simulated.check(inputs, gradients=simulated.recorder.target == 80, **options)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("simulated", [90], indirect=True)
def test_ranges_on_hopper(simulated, size):  # noqa: F811
    for mask in ("ranges", "ranges of a batch"):
        inputs, options = make((150, 300, size, 2), BF16, poison=math.nan, **MASKS[mask])
        simulated.check(inputs, gradients=False, **options)
    assert launched(simulated.recorder) == ["forward_sm90"] * 2
