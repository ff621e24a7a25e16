"""What no query attends to never enters a sum of the Triton kernels, whatever it holds: masks of bits, tiles that come
in chunks, and derivatives of second order; in the simulator, hazards checked. (Other calls: test_gpu_calls.py.)"""

import math

import pytest
import torch
import torch.nn.functional as F

import attnkern
import simulated
from attnkern import ops
from attnkern.problem import Problem
from attnkern.signatures import Inputs
from random_problems import in_bits
from simulated import BF16, FP16, FP32
from test_unattended import MASKS, derivatives, make, on

# Queries of four heads, keys of two, and what excludes some: of bands keys or queries.
EXCLUDED = {
    "keys in front of a window and behind it": (100, 300, {"window": (40, 30), "alignment": "bottom_right"}),
    "queries behind a window": (190, 100, {"window": (40, 30)}),
    "bool of keys": (40, 70, MASKS["bool of keys"]),
    "ranges": (40, 70, MASKS["ranges"]),
    "bits": (40, 70, MASKS["bits"]),
}


@pytest.mark.parametrize("kind", ["keys in front of a window and behind it", "queries behind a window"])
def test_bands_where_columns_come_in_chunks(kind):
    queries, keys, options = EXCLUDED[kind]
    with simulated.triton() as target:
        inputs, options = make(target, (queries, keys, 40, 2), FP32, poison=math.nan, **options)
        target.check(inputs, **options)
    assert all(kernel.constants["CHUNK"] for kernel in target.launched if "CHUNK" in kernel.constants)


@pytest.mark.parametrize(("case", "gpu"), list(enumerate([90, 80, 90, 80, 90])))
def test_derivatives_of_second_order_and_forward_mode(case, gpu):
    queries, keys, options = list(EXCLUDED.values())[case]
    with simulated.triton(gpu) as target:
        inputs, options = make(target, (queries, keys, 64, 2), BF16, poison=math.nan, **options)
        got, want = (derivatives(target, inputs, poison, options) for poison in (math.nan, None))
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


# sizes, dtype, what leaves keys out of few queries and many keys
DECODED = {
    "bits": ((3, 700, 64, 1), BF16, MASKS["bits"]),
    "bits of keys and ranges, float32": ((2, 700, 300, 2), FP32, MASKS["bits of keys and ranges"]),
}


@pytest.mark.parametrize("kind", DECODED)
def test_bits_of_few_queries(kind):
    sizes, dtype, masks = DECODED[kind]
    with simulated.triton() as target:
        inputs, options = make(target, sizes, dtype, poison=math.nan, **masks)
        target.check(inputs, gradients=False, **on(target, inputs, options))
    assert target.kernels() == ["decode_kernel", "combine_kernel"]


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
    keys = sizes[1]
    monkeypatch.setattr("attnkern.bits.bools", None)

    def attention(attn_mask, **given):
        bits = in_bits(F.pad(attn_mask, (0, -keys % 64), value=True), sizes[0], keys + -keys % 64).bits
        return target.attention(attn_mask=attnkern.Mask(None, bits, None, sizes[0], keys), **given)

    with simulated.triton(gpu) as target:
        inputs, options = make(target, sizes, dtype, poison=math.nan, **options)
        target.check(inputs, function=attention, **options)
    assert {kernel.constants["BIAS"] & 4 for kernel in target.launched if "BIAS" in kernel.constants} == {4}


def test_bits_whose_rows_begin_within_a_word():
    """The operators take such, too: they are copied."""
    q, k, v = torch.randn(1, 2, 9, 16), *torch.randn(2, 1, 2, 70, 16)
    bits = torch.randint(256, (1, 1, 9, 24), dtype=torch.uint8)[..., 3:19]
    params = Problem.from_sdpa(q, k, v).params
    with simulated.triton():
        found, want = (ops.forward(*Inputs(q, k, v, x), *params, True, "triton") for x in (bits, bits.clone()))
    assert all(map(torch.equal, found, want))
