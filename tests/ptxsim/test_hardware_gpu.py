"""The simulator's test kernels on a GPU, held to the very results that the simulator is held to: bit for bit where the
ISA promises a result, by the tolerance rule for the flash kernels. Skipped without a GPU of the kernel's generation."""

import pytest
import torch

from ptxsim import hardware
from ptxsim.kernels import references, triton_cases

pytestmark = pytest.mark.gpu


def run(case) -> None:
    """sm_90a code runs on compute capability 9.0 only; sm_80 code from 8.0 on."""
    capability = torch.cuda.get_device_capability()
    if (capability != (9, 0)) if case.target == 90 else capability < (8, 0):
        pytest.skip(f"needs a GPU of another generation: sm_{case.target}, not {capability}")
    hardware.run(case)
    case.check()


@pytest.mark.parametrize("entry", references.mechanisms())
def test_gpu_mechanisms_give_what_the_simulator_gives(entry):
    case = references.case(entry, 1)
    run(case)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("entry", references.FLASH)
def test_gpu_flash_kernels(entry, causal):
    case = references.flash_case(entry, causal=causal)
    run(case)


@pytest.mark.parametrize("name", triton_cases.names())
def test_gpu_triton_kernels(name):
    case = triton_cases.case(name)
    hardware.run(case)
    case.check()
