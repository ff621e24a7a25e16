"""The tests of behaviour, which run every backend that is available, with the Triton kernels in the simulator.

Of a test with parameters a few cases are taken, each with other values of all of them; the GPUs take turns, and the
tests before `.ci/run`: what they are about, the matrix of test_gpu_calls.py has for every kernel.
"""

import inspect
import itertools

import pytest
import torch

import simulated
import test_band
import test_decode
import test_dropout
import test_gqa
import test_gradients
import test_lse_merge
import test_masks
import test_sdpa_parity
from random_problems import random_problem
from simulated import BF16, FP16, FP32

FILES = (test_masks, test_band, test_gqa, test_gradients, test_dropout, test_lse_merge, test_sdpa_parity, test_decode)
DTYPES = [BF16, FP16, FP32]
LEFT_OUT = {
    # Too large for the simulator; what they are about, in brackets, is tested at other sizes.
    "test_mask_gradient_over_many_blocks",  # [test_gpu_calls.py: bias of queries, of keys, of everything]
    "test_live_keys_only_at_one_end_of_a_long_row",
    "test_a_nan_of_the_future_is_not_seen_by_the_first_blocks",
    "test_thresholds_halfway_between_two_values",
    "test_the_share_of_survivors_and_their_scale",  # [test_bits_are_those_of_philox]
    "test_many_batches_and_heads",
    "test_long_sequences",
    "test_named_cases",
    "test_bitwise_repeatable",
    "test_element_offsets_above_two_to_the_31",  # the simulator shadows all of a storage [test_strides_beyond_32_bits]
    "test_gradcheck",  # float64, which the kernels don't have
    "test_merge_does_not_depend_on_order",  # in float64
    "test_the_mean_stays",  # in float64
    "test_bits_depend_on_position_alone",  # with float64 among others [test_gpu_calls.py: dropped entries]
    "test_every_band",  # 9 lengths of 36 bands [test_bands_in_every_dtype, test_gpu_calls.py]
    "test_empty_dimensions",  # [test_gpu_calls.py: empty; test_triton.py: head size zero]
    "test_numbers_of_every_kind",  # about arguments, not kernels
}
MOST = 1  # cases of one test: a kernel of its own to compile each


def values_of(function):
    """The parameters of a test and the values that each takes: pytest's, and the dtypes of the kernels."""
    found = {}
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args or (mark.kwargs["argnames"], mark.kwargs["argvalues"])
            names = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
            found[tuple(names)] = [
                getattr(v, "values", v) if len(names) > 1 else (v,)
                for v in values
                if "dtype" not in names or torch.float64 not in getattr(v, "values", (v,))
            ]
    if "dtype" in inspect.signature(function).parameters and not any("dtype" in names for names in found):
        found["dtype",] = [(x,) for x in DTYPES]
    return found


def cases_of(function):
    """As many as the parameter with the most values has, but at most MOST, from all over them."""
    found = values_of(function)
    count = max((len(values) for values in found.values()), default=1)
    for n in range(count):
        if count > MOST and n * MOST // count == (n - 1) * MOST // count:
            continue
        arguments = {}
        for names, values in found.items():
            arguments |= dict(zip(names, values[n % len(values)], strict=True))
        yield arguments


def suite():
    turns = itertools.cycle((80, 90, 80, 90, 80, 90, 120))
    landing = itertools.cycle((True, False))
    for file in FILES:
        for name, function in vars(file).items():
            if not name.startswith("test_") or name in LEFT_OUT:
                continue
            if "target" not in inspect.signature(function).parameters:
                continue
            for arguments in cases_of(function):
                gpu = next(turns)
                about = "-".join(str(x).removeprefix("torch.") for x in arguments.values())
                marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "real_memory"]
                marks += [] if next(landing) else [pytest.mark.prove]
                case = f"{file.__name__[5:]}-{name[5:]}[{about}]-sm_{gpu}"
                yield pytest.param(function, arguments, gpu, id=case, marks=marks)


@pytest.mark.parametrize(("function", "arguments", "gpu"), list(suite()))
def test_behaviour(function, arguments, gpu, record_property):
    with simulated.triton(gpu) as target:
        function(target, **arguments)
    dtype = str(arguments.get("dtype", FP32)).removeprefix("torch.")
    name = f"{function.__module__[5:]}: {function.__name__[5:].replace('_', ' ')}"
    record_property("triton", (name, f"sm_{gpu} {dtype}"))


@pytest.mark.parametrize("gpu", [80, 90])
@pytest.mark.parametrize("round", range(3))  # each of kernels that no other run has compiled
def test_random_problems(gpu, round, record_property):
    inputs, options = random_problem(int(torch.randint(2**31, ())), dtypes=DTYPES, ranges=False)
    with simulated.triton(gpu) as target:
        target.check(inputs, **options)
    record_property("triton", ("random problems", f"sm_{gpu} {str(inputs.query.dtype).removeprefix('torch.')}"))
