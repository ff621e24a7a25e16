"""What no query attends to never enters a sum of the Triton kernels, whatever it holds; in the simulator, hazards
checked."""

import math

import pytest
import torch
import torch.nn.functional as F

import attnkern
from attnkern import ops
from attnkern.problem import Problem
from attnkern.signatures import Inputs
from random_problems import in_bits
from test_triton import BF16, FP16, FP32, Simulated, routed
from test_unattended import MASKS, derivatives, make, on

# Of few queries and many keys: keys, head size, heads of keys; dtype; what leaves keys out.
DECODED = {
    "slots in front of a window": ((3, 700, 64, 2), BF16, {"window": (530, 9), "alignment": "bottom_right"}),
    "slots behind one": ((3, 700, 40, 2), FP32, {"window": (None, 550)}),
    "a window beside a bias": ((3, 700, 64, 2), FP16, {"mask": ("float", "BHLS"), "window": (None, 550)}),
    "bool of keys": ((3, 700, 64, 1), BF16, MASKS["bool of keys"]),
    "bool, float32": ((3, 520, 80, 2), FP32, MASKS["bool"]),
    "bits": ((3, 700, 64, 1), BF16, MASKS["bits"]),
    "bits of keys and ranges, float32": ((2, 700, 300, 2), FP32, MASKS["bits of keys and ranges"]),
    "bool above 256, float32": ((1, 520, 264, 2), FP32, MASKS["bool of keys"]),
    "ranges": ((3, 700, 128, 1), BF16, MASKS["ranges"]),
    "ranges above 256": ((2, 700, 264, 2), FP16, MASKS["ranges of a batch"]),
    "ranges beside a bias, float32": ((3, 700, 160, 2), FP32, MASKS["float and ranges"]),
}


@pytest.mark.parametrize("kind", DECODED)
def test_decoding(kind):
    sizes, dtype, masks = DECODED[kind]
    inputs, options = make(sizes, dtype, poison=math.nan, **masks)
    target = Simulated("triton", "cpu")
    with routed(80) as launched:
        target.check(inputs, gradients=False, **on(target, options))
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


# Keys that end within a byte, a word, or with one; rows that are all the same; beside ranges, a window and dropout.
BITS = {
    "bfloat16": (80, (70, 140, 64, 2), BF16, {"mask": ("bool", "BHLS")}),
    "float16, causal": (90, (70, 109, 128, 1), FP16, {"mask": ("bool", "B1LS"), "is_causal": True}),
    "float32, window": (120, (46, 90, 40, 2), FP32, {"mask": ("bool", "1HLS"), "window": (40, 30)}),
    "of keys": (90, (70, 128, 64, 4), BF16, {"mask": ("bool", "BH1S")}),
    "and ranges": (80, (40, 100, 64, 2), FP16, {"mask": ("bool", "11LS"), "ranges": ("near", "1HL", 2)}),
}


@pytest.mark.parametrize("kind", BITS)
def test_bits(kind, monkeypatch):
    """Output, log-sum-exp and gradients, of a mask that becomes no bools; those behind the last key may be anything."""
    gpu, sizes, dtype, options = BITS[kind]
    inputs, options = make(sizes, dtype, poison=math.nan, **options)
    target, keys = Simulated("triton", "cpu", gpu), sizes[1]
    monkeypatch.setattr("attnkern.bits.bools", None)

    def attention(attn_mask, **given):
        bits = in_bits(F.pad(attn_mask, (0, -keys % 64), value=True), sizes[0], keys + -keys % 64).bits
        return target.attention(attn_mask=attnkern.Mask(None, bits, None, sizes[0], keys), **given)

    with routed(gpu) as launched:
        target.check(inputs, function=attention, **options)
    assert {kernel.constants["BIAS"] & 4 for kernel in launched if "BIAS" in kernel.constants} == {4}


def test_bits_whose_rows_begin_within_a_word():
    """The operators take such, too: they are copied."""
    q, k, v = torch.randn(1, 2, 9, 16), *torch.randn(2, 1, 2, 70, 16)
    bits = torch.randint(256, (1, 1, 9, 24), dtype=torch.uint8)[..., 3:19]
    params = Problem.from_sdpa(q, k, v).params
    with routed(80):
        found, want = (ops.forward(*Inputs(q, k, v, x), *params, True, "triton") for x in (bits, bits.clone()))
    assert all(map(torch.equal, found, want))


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
SECOND.append((40, 70, MASKS["bits"]))


@pytest.mark.parametrize(("case", "gpu"), enumerate([90, 80, 90, 80, 90]))
def test_derivatives_of_second_order_and_forward_mode(case, gpu):
    queries, keys, options = SECOND[case]
    inputs, options = make((queries, keys, 64, 2), BF16, poison=math.nan, **options)
    with routed(gpu):
        target = Simulated("triton", "cpu", gpu)
        got, want = (derivatives(target, inputs, poison, options) for poison in (math.nan, None))
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
