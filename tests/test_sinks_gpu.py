"""Sinks in the GPU kernels, in the simulator: every kernel that ends a row, and the gradient."""

import pytest
import torch

from matrix import in_turn
from simulated import BF16, FP32, simulated, triton  # noqa: F401
from test_second_order import CALLS as SECOND_ORDER
from test_second_order import check as check_second_order


@pytest.mark.parametrize(**in_turn(name=[name for name in SECOND_ORDER if "sinks" in name], dtype=[BF16, FP32]))
def test_triton_second_order(name, dtype):
    call = SECOND_ORDER[name]
    with triton() as target:
        check_second_order(target, call.inputs("cpu", dtype=dtype), **call.options)


def test_a_shared_sink_of_a_large_batch_is_added_up_by_torch(simulated):  # noqa: F811
    inputs = simulated.inputs(5, 1, 3, 4, 8, dtype=torch.float16).with_sinks("H", FP32, 1)
    simulated.check(inputs)
