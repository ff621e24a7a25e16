"""What `python -m attnkern check`, the tests and the benchmark share: tolerance rule, float64 reference, inputs.

The rule, the only one in the project. Let `exact` be float64 maths and `baseline` torch's own maths in the dtype at
hand (matmul, softmax, matmul; float16 and bfloat16 are stretched to have all of float32's digits, computed in float32,
and rounded once). Then

    |actual - exact| <= factor * max|baseline - exact| + unit        with factor 2 (outputs) or 3 (gradients)

where `unit` is what one rounding in the dtype can do to that entry: eps * (|exact| + the root-sum-square of the terms
added up to it). The sum matters where large terms cancel (a score gradient P * (dP - delta) with one key is exactly 0:
every real kernel leaves a rounding of dP there), and root-sum-square rather than the sum of magnitudes, because
roundings are independent: the allowance does not grow with the sequence. A weight or a score's gradient, which kernels
round to be multiplied again, counts as no smaller than twice the dtype's least normal number. What flushing subnormal
numbers to zero costs comes on top. A NaN never passes; an infinity passes only where `exact` has it.

The reference here is written apart from `attnkern.backends.reference`, so that neither can hide the other's mistake.
Nothing in this module needs pytest or hypothesis.
"""

from .checks import check_attention, check_packed, poisoned_memory, unmodified
from .expectations import Expected, expected, expected_second_order
from .layouts import LAYOUTS, odd_strides_on_size_one, packed_qkv, with_layout
from .problems import Inputs, Packed, make_inputs, make_mask
from .reference import band_mask, by_distance, naive_attention, philox_keep, philox_words, ranges_mask, unattended
from .tolerance import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    Errors,
    assert_within_rule,
    error_ratio,
    errors,
    farthest,
    rounding_unit,
)

__all__ = [
    "FORWARD_FACTOR",
    "GRADIENT_FACTOR",
    "LAYOUTS",
    "Errors",
    "Expected",
    "Inputs",
    "Packed",
    "assert_within_rule",
    "band_mask",
    "by_distance",
    "check_attention",
    "check_packed",
    "error_ratio",
    "errors",
    "expected",
    "expected_second_order",
    "farthest",
    "make_inputs",
    "make_mask",
    "naive_attention",
    "odd_strides_on_size_one",
    "packed_qkv",
    "philox_keep",
    "philox_words",
    "poisoned_memory",
    "ranges_mask",
    "rounding_unit",
    "unattended",
    "unmodified",
    "with_layout",
]
