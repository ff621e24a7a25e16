"""Relative bias in the GPU kernels, in the simulator: they read a table by the strides of a bias."""

import pytest

from matrix import in_turn, on_gpus, tagged
from test_cuda_kernels import simulated  # noqa: F401
from test_second_order import CALLS as SECOND_ORDER
from test_second_order import check as check_second_order
from test_triton import BF16, FP32, Simulated, routed

CALLS = tagged("relative-gpu")


@pytest.mark.parametrize(("name", "gpu"), on_gpus(CALLS))
def test_triton(name, gpu):
    with routed(gpu):
        Simulated("triton", "cpu", gpu).check_call(CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_cuda(name, simulated):  # noqa: F811
    simulated.check_call(CALLS[name])


@pytest.mark.parametrize(**in_turn(2, name=[name for name in SECOND_ORDER if "relative" in name], dtype=[BF16, FP32]))
def test_triton_second_order(name, dtype):
    call = SECOND_ORDER[name]
    with routed(80):
        check_second_order(Simulated("triton", "cpu"), call.inputs("cpu", dtype=dtype), **call.options)
