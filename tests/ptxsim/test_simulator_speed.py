"""How long the simulator takes (pytest-benchmark; the figures are in docs/proving_kernels.md). No time is asserted."""

from functools import partial

import pytest

from ptxsim.kernels import references, triton_cases

FORWARD = {"heads": 2, "group": 1, "seqlen_q": 256, "seqlen_k": 256}


def flash(entry: str):
    case = references.flash_case(entry, heads_q=2, heads_k=2, seqlen_q=256, seqlen_k=256)
    return case, partial(references.run, case)


def triton_forward(name: str, target: int):
    case = triton_cases.forward_case(name, **FORWARD)
    return case, partial(case.run, target, num_warps=4, num_stages=2)


CASES = {
    "flash sm_80, nvcc": partial(flash, "flash_sm80_bf16_d64"),
    "flash sm_90a, nvcc": partial(flash, "flash_sm90_bf16_d64"),
    "forward sm_80, Triton": partial(triton_forward, "forward_pointers", 80),
    "forward sm_90, Triton": partial(triton_forward, "forward_pointers", 90),
    "forward sm_90, Triton, descriptors": partial(triton_forward, "forward_host_descriptors", 90),
}


@pytest.mark.real_memory
@pytest.mark.parametrize("name", CASES)
def test_forward_of_two_heads_of_256(benchmark, name):
    """Two heads, 256 queries and keys, head_dim 64, bf16, under the checker, once compiled."""
    benchmark.group = "two heads, L = 256, D = 64, with the hazard checker"
    case, run = CASES[name]()
    run()
    benchmark.pedantic(run, rounds=3, iterations=1)
    case.check()


@pytest.mark.real_memory
def test_launch_of_a_kernel_already_compiled(benchmark):
    """A launch of next to no work: what every launch costs."""
    benchmark.group = "launch overhead"
    case = triton_cases.case("elementwise")
    run = partial(case.run, 80)
    run()
    benchmark.pedantic(run, rounds=10, iterations=1)
    case.check()
