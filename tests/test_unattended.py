"""What no query attends to never enters a sum, whatever it holds: caches' unused slots, padding, gaps."""

import math

import pytest
import torch

from attnkern import testing

MASKS = {
    "bool": {"mask": ("bool", "BHLS")},
    "bool of keys": {"mask": ("bool", "B11S")},
    "ranges": {"ranges": ("few", "BHL", 2)},
    "ranges of a batch": {"ranges": ("anything", "B11", 1)},
    "bool and ranges": {"mask": ("bool", "11LS"), "ranges": ("near", "1HL", 1)},
    "float and ranges": {"mask": ("float", "BHLS"), "ranges": ("near", "B1L", 2)},
    "causal": {"is_causal": True},
    "window and bool": {"mask": ("bool", "BH1S"), "window": (9, 5), "alignment": "bottom_right"},
    "softcap": {"mask": ("bool", "BH1S"), "ranges": ("near", "BHL", 1), "softcap": 2.0},
    "negative scale": {"mask": ("bool", "BH1S"), "ranges": ("near", "BHL", 1), "scale": -0.7},
}
# More keys than queries, decoding, odd sizes; heads that share keys.
SIZES = [(70, 109, 24, 2), (3, 300, 64, 2), (1, 700, 64, 1), (46, 209, 130, 1), (5, 90, 7, 4)]


def make(sizes, dtype, *, poison, mask=None, ranges=None, **options):
    seqlen_q, seqlen_k, size, heads_k = sizes
    inputs = testing.make_inputs(2, 4, seqlen_q, seqlen_k, size, heads_k=heads_k, dtype=dtype, mask=mask)
    if ranges is not None:
        inputs = inputs.with_ranges(*ranges, torch.int32, int(torch.randint(2**31, ())))
    return inputs.with_poison(poison), {"enable_gqa": True, **options}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_output_lse_and_gradients(target, kind, sizes, dtype):
    for poison in (math.nan, math.inf):
        inputs, options = make(sizes, dtype, poison=poison, **MASKS[kind])
        target.check(inputs, **options)
