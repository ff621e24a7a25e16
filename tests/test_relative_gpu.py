"""Relative bias in the GPU kernels, in the simulator: they read a table by the strides of a bias."""

import dataclasses
import json
import re

import pytest
import torch
from attnkern.triton_kernels import configs, plan

import attnkern
from attnkern.params import GRAD_BIAS, UNBOUNDED, AttentionParams
from matrix import in_turn, tagged
from simulated import BF16, FP32, simulated, triton  # noqa: F401
from test_second_order import CALLS as SECOND_ORDER
from test_second_order import check as check_second_order

CALLS = tagged("relative-gpu")


@pytest.mark.parametrize(**in_turn(name=[name for name in SECOND_ORDER if "relative" in name], dtype=[BF16, FP32]))
def test_triton_second_order(name, dtype):
    call = SECOND_ORDER[name]
    with triton() as target:
        check_second_order(target, call.inputs("cpu", dtype=dtype), **call.options)


@pytest.mark.parametrize("name", ["one table for all heads, causal", "documents"])
def test_cuda_has_kernels_for_the_gradient(name, simulated):  # noqa: F811
    call = CALLS[name]
    inputs = dataclasses.replace(call.inputs("cpu"), relative_bias=call.inputs("cpu").relative_bias.requires_grad_())
    out = simulated.attention(**inputs.tensors, **call.options)
    before = len(simulated.recorder.launches)
    torch.autograd.grad(out.sum(), inputs.relative_bias)
    launched = [re.search(r"([a-z_]*)_kernel", launch.name)[1] for launch in simulated.recorder.launches[before:]]
    expected = ["delta", *(["summarise_ranges"] if "key_ranges" in inputs.tensors else [])]
    assert [name.lstrip("_") for name in launched] == [*expected, "table_sums", "table_gradient"]
    told = str(attnkern.explain(**inputs.tensors, **call.options, backend="cuda"))
    assert "backward bias, sm_80: 64 x 64 queries and keys" in told
    assert "by distance, " in told


def test_cuda_with_a_table_of_each_batch_element(simulated):  # noqa: F811
    inputs = CALLS["table"].inputs(seed=0)
    simulated.check(dataclasses.replace(inputs, relative_bias=torch.randn(2, 1, 159).to(BF16)))


def _bias_launch(seqlen_q, seqlen_k, heads, left=UNBOUNDED, right=UNBOUNDED):
    """CUDA's plan of the gradient of a table: bands, walks and bytes of their sums."""
    entries = seqlen_q + seqlen_k - 1
    shape = [1, heads, seqlen_q, 64, heads * seqlen_q * 64, seqlen_q * 64, 64, 1, 0]
    keys = [1, heads, seqlen_k, 64, heads * seqlen_k * 64, seqlen_k * 64, 64, 1, 0]
    table = [1, heads, seqlen_q, seqlen_k, heads * entries, entries, -1, 1, 0]
    params = AttentionParams(1.0, 0.0, left, right)
    asked = (BF16, shape, keys, keys, table, BF16, *params, False, 0, False, True, GRAD_BIAS)
    asked += ([80, 108, 167936, 166912],)
    launches = json.loads(torch.ops.attnkern.cuda_plan(*asked))["launches"]
    (words,) = [launch["words"] for launch in launches if launch["kernel"] == "backward bias"] or [None]
    return words and tuple(map(int, re.findall(r"\d+", words)))


def test_memory_beside_the_table_of_cuda():
    """As of Triton's kernel, below."""
    for heads in (1, 40):
        for queries, keys in ((1, 1), (3, 700), (5000, 5000), (2**17, 2**17)):
            bands, walks, size = _bias_launch(queries, keys, heads)
            assert bands == -(-queries // 64) + -(-keys // 64) - 1
            assert size == heads * walks * bands * 128 * 4
            assert walks == 1 or heads * walks * bands <= 1024
    bands, walks, _ = _bias_launch(2**17, 2**17, 1, left=100, right=0)
    assert bands == 3
    assert walks > 64
    assert _bias_launch(50, 40, 2, right=-60) is None


def test_triton_with_a_table_of_each_batch_element():
    inputs = CALLS["table"].inputs(seed=0)
    inputs = dataclasses.replace(inputs, relative_bias=torch.randn(2, 1, 159).to(BF16))
    with triton() as target:
        target.check(inputs)


def _steps(seqlen_q, seqlen_k, size, heads, band=(UNBOUNDED, UNBOUNDED), dtype=BF16, capability=80):
    """The plan of the gradient of a table."""
    entries = seqlen_q + seqlen_k - 1
    q, k = (plan.TensorSpec((1, heads, n, size), (0, 0, 0, 0), True).like(size).spec() for n in (seqlen_q, seqlen_k))
    table = plan.TensorSpec((1, heads, seqlen_q, seqlen_k), (heads * entries, entries, -1, 1), False)
    key = plan.PlanKey(capability, dtype, q, k, k, table, dtype, 0, AttentionParams(1.0, 0.0, *band), False)
    return plan.backward_plan(key, q, q, False, GRAD_BIAS)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_order_of_sums_is_fixed(capability):
    """No program adds to what another one adds to."""
    ptx = _steps(500, 500, 64, 2, capability=capability).dbias.kernel.compile(capability).asm["ptx"]
    assert re.search(r"\bst\.global", ptx)
    assert not re.search(r"\b(atom|red)\.", ptx)


@pytest.mark.parametrize(("dtype", "size"), [(d, s) for d in configs.BANDS for s in configs.BANDS[d]])
def test_memory_beside_the_table(dtype, size):
    """O(L + S), or a fixed size where bands are cut into walks; less beside a window."""
    sizes = (1, 1), (3, 700), (5000, 5000), (2**17, 2**17)
    for heads, (queries, keys) in [(h, s) for h in (1, 40) for s in sizes]:
        shape = _steps(queries, keys, size, heads, dtype={2: BF16, 4: FP32}[dtype]).bands.shape
        *_, walks, bands, width = shape
        of_one_walk = 3 * (queries + keys) + 5 * width
        assert bands * width <= of_one_walk
        assert walks == 1 or heads * walks * bands <= plan.TABLE_PROGRAMS
    window = _steps(2**17, 2**17, size, 1, band=(100, 0), dtype={2: BF16, 4: FP32}[dtype]).bands
    assert window.shape[3] <= 12
    assert window.shape[2] > 64  # few bands, of which each is long


def test_nothing_to_see_launches_nothing():
    """A window beyond all keys."""
    steps = _steps(50, 40, 64, 2, band=(UNBOUNDED, -60))
    assert steps.dbias is None
    assert steps.zero_bias
