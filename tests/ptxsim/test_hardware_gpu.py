"""The simulator's test kernels on a GPU, held to the very results that the simulator is held to: bit for bit where the
ISA promises a result, by the tolerance rule for the flash kernels. Skipped without a GPU of the kernel's generation."""

import pytest
import torch

from ptxsim import hardware
from ptxsim.kernels import references, triton_cases

pytestmark = pytest.mark.gpu


def runs_here(case) -> bool:
    """sm_90a code runs on compute capability 9.0 only, sm_80 code from 8.0 on. Without a GPU: all, to be skipped."""
    if not torch.cuda.is_available():
        return True
    capability = torch.cuda.get_device_capability()
    return capability == (9, 0) if case.target == 90 else capability >= (8, 0)


MECHANISMS = [entry for entry in references.mechanisms() if runs_here(references.case(entry))]
FLASH = [entry for entry in references.FLASH if runs_here(references.flash_case(entry))]


def run(case) -> None:
    hardware.run(case)
    case.check()


@pytest.mark.parametrize("entry", MECHANISMS)
def test_gpu_mechanisms_give_what_the_simulator_gives(entry):
    run(references.case(entry, 1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("entry", FLASH)
def test_gpu_flash_kernels(entry, causal):
    run(references.flash_case(entry, causal=causal))


@pytest.mark.parametrize("name", triton_cases.names())
def test_gpu_triton_kernels(name):
    run(triton_cases.case(name))
