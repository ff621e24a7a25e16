"""What no query attends to never enters a sum of the Triton kernels, whatever it holds; in the simulator, hazards
checked."""

import math

import pytest
import torch

from test_triton import BF16, FP16, FP32, Simulated, routed
from test_unattended import MASKS, derivatives, make

# Of few queries and many keys: keys, head size, heads of keys; dtype; what leaves keys out.
DECODED = {
    "slots in front of a window": ((3, 700, 64, 2), BF16, {"window": (530, 9), "alignment": "bottom_right"}),
    "slots behind one": ((3, 700, 40, 2), FP32, {"window": (None, 550)}),
    "a window beside a bias": ((3, 700, 64, 2), FP16, {"mask": ("float", "BHLS"), "window": (None, 550)}),
    "bool of keys": ((3, 700, 64, 1), BF16, MASKS["bool of keys"]),
    "bool, float32": ((3, 520, 80, 2), FP32, MASKS["bool"]),
    "bool above 256, float32": ((1, 520, 264, 2), FP32, MASKS["bool of keys"]),
    "ranges": ((3, 700, 128, 1), BF16, MASKS["ranges"]),
    "ranges above 256": ((2, 700, 264, 2), FP16, MASKS["ranges of a batch"]),
    "ranges beside a bias, float32": ((3, 700, 160, 2), FP32, MASKS["float and ranges"]),
}


@pytest.mark.parametrize("kind", DECODED)
def test_decoding(kind):
    sizes, dtype, masks = DECODED[kind]
    inputs, options = make(sizes, dtype, poison=math.nan, **masks)
    with routed(80) as launched:
        Simulated("triton", "cpu").check(inputs, gradients=False, **options)
    assert [kernel.function.__name__ for kernel in launched] == ["decode_kernel", "combine_kernel"]


BANDS = {
    "keys behind a causal mask": (100, 190, {"is_causal": True}),
    "keys in front of a window and behind it": (100, 300, {"window": (40, 30), "alignment": "bottom_right"}),
    "keys behind a window": (100, 190, {"window": (40, 30)}),
    "queries in front of a causal mask": (190, 100, {"is_causal": True, "alignment": "bottom_right"}),
    "queries behind a window": (190, 100, {"window": (40, 30)}),
}


@pytest.mark.parametrize("gpu", [80, 90])
@pytest.mark.parametrize("band", BANDS)
def test_bands(band, gpu):
    """Output, log-sum-exp and gradients, on rows read by pointers and by TMA."""
    queries, keys, options = BANDS[band]
    inputs, options = make((queries, keys, 64, 2), BF16, poison=math.nan, **options)
    with routed(gpu):
        Simulated("triton", "cpu", gpu).check(inputs, **options)


EXCLUDED = {
    "bool of keys": MASKS["bool of keys"],
    "bool of queries": {"mask": ("bool", "B1L1")},
    "ranges": {"ranges": ("anything", "B11", 1)},
    "ranges of queries": {"ranges": ("few", "BHL", 2)},
}


@pytest.mark.parametrize("gpu", [80, 90])
@pytest.mark.parametrize("kind", EXCLUDED)
def test_masks(kind, gpu):
    """Output, log-sum-exp and gradients, on rows read by pointers and by TMA."""
    inputs, options = make((70, 100, 64, 2), BF16, poison=math.nan, **EXCLUDED[kind])
    with routed(gpu) as launched:
        Simulated("triton", "cpu", gpu).check(inputs, **options)
    assert {"forward_kernel", "dkdv_kernel", "dq_kernel"} <= {kernel.function.__name__ for kernel in launched}


@pytest.mark.parametrize(("kind", "size"), [("ranges", 160), ("bool of keys", 264)])
def test_masks_at_large_head_sizes(kind, size):
    """Output and log-sum-exp; infinity, which makes NaN where a weight of 0 meets it."""
    inputs, options = make((20, 70, size, 2), BF16, poison=math.inf, **EXCLUDED[kind])
    with routed(80):
        Simulated("triton", "cpu").check(inputs, gradients=False, **options)


def test_queries_without_a_key_beside_a_sink():
    inputs, options = make((70, 50, 32, 2), BF16, poison=math.nan, **EXCLUDED["bool of queries"])
    with routed(90):
        Simulated("triton", "cpu", 90).check(inputs.with_sinks("H", torch.float32, 1), **options)


@pytest.mark.parametrize("band", list(BANDS)[1::3])
def test_bands_where_columns_come_in_chunks(band):
    queries, keys, options = BANDS[band]
    inputs, options = make((queries, keys, 40, 2), FP32, poison=math.nan, **options)
    with routed(80) as launched:
        Simulated("triton", "cpu").check(inputs, **options)
    assert all(kernel.constants["CHUNK"] for kernel in launched if "CHUNK" in kernel.constants)


SECOND = [*(BANDS[name] for name in list(BANDS)[1:5:3]), *((40, 70, EXCLUDED[name]) for name in list(EXCLUDED)[::3])]


@pytest.mark.parametrize(("case", "gpu"), enumerate([90, 80, 90, 80]))
def test_derivatives_of_second_order_and_forward_mode(case, gpu):
    queries, keys, options = SECOND[case]
    inputs, options = make((queries, keys, 64, 2), BF16, poison=math.nan, **options)
    with routed(gpu):
        target = Simulated("triton", "cpu", gpu)
        got, want = (derivatives(target, inputs, poison, options) for poison in (math.nan, None))
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
