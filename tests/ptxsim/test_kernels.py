"""The kernels of tests/ptxsim/kernels give the right results in the simulator, under its checker.

Which of them notice what when they are broken is test_planted_bugs.py's matter.
"""

import pytest
import torch

from ptxsim.kernels import references, triton_cases

TARGETS = (80, 90, 120)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SHAPES = {
    "ragged_grouped": {"batch": 2, "heads_q": 4, "heads_k": 2, "seqlen_q": 70, "seqlen_k": 330},
    "causal": {"seqlen_q": 200, "seqlen_k": 200, "causal": True},
    "causal_more_queries": {"seqlen_q": 150, "seqlen_k": 40, "causal": True},
    "whole_tiles": {"seqlen_q": 128, "seqlen_k": 256},
    "one_row": {"seqlen_q": 1, "seqlen_k": 1},
}


@pytest.mark.parametrize("entry", references.mechanisms())
def test_mechanism(entry):
    case = references.case(entry, seed=3)
    references.run(case, seed=3)
    case.check()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entry", references.FLASH)
def test_flash(entry, shape):
    case = references.flash_case(entry, **SHAPES[shape], seed=len(shape))
    report = references.run(case)
    case.check()
    assert report.bank_conflicts == 0


@pytest.mark.parametrize("entry", [entry for entry in references.FLASH if "sm80" in entry])
def test_flash_without_keys_gives_zeros(entry):
    case = references.flash_case(entry, seqlen_q=70, seqlen_k=0)
    references.run(case)
    case.check()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", triton_cases.names())
def test_small_triton_kernel(name, target):
    case = triton_cases.case(name, seed=4)
    case.run(target, seed=4)
    case.check()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_triton_forward_by_pointers(target, dtype, causal):
    block_n = 32 if dtype == "f32" else 64
    case = triton_cases.forward_case("forward_pointers", DTYPES[dtype], causal=causal, block_n=block_n)
    case.run(target, num_warps=4, num_stages=2)
    case.check()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("target", [90, 120])
@pytest.mark.parametrize("name", ["forward_host_descriptors", "forward_device_descriptors"])
def test_triton_forward_by_descriptors(name, target, dtype, causal):
    case = triton_cases.forward_case(name, DTYPES[dtype], causal=causal)
    # For sm_120 Triton puts no proxy fence between the stores that make a descriptor in shared memory and the TMA that
    # takes the place over, which the checker reports.
    check = (name, target) != ("forward_device_descriptors", 120)
    case.run(target, num_warps=4, num_stages=2, check=check)
    case.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_triton_forward_with_everything(target, dtype):
    case = triton_cases.rich_case(DTYPES[dtype])
    case.run(target, num_warps=4, num_stages=2)
    case.check()
