"""The Triton kernels on a GPU: what the simulator is shown by test_triton.py and test_triton_suite.py, on hardware; and
graphs. Skipped without a GPU."""

import pytest
import torch

import attnkern
from attnkern import testing
from conftest import Target
from matrix import tagged
from simulated import BF16, FP16, FP32
from test_triton_suite import suite

pytestmark = pytest.mark.gpu
TARGET = Target("triton", "cuda")
CASES = [pytest.param(*case.values[:2], id=case.id.rpartition("-")[0]) for case in suite()]


@pytest.mark.parametrize("name", tagged("triton"))
def test_feature(name):
    """Output, log-sum-exp and all gradients."""
    TARGET.check_call(tagged("triton")[name])


@pytest.mark.parametrize("name", tagged("triton-decode"))
def test_decode(name):
    """Output and log-sum-exp by the kernels that split the keys, as `explain` says."""
    call = tagged("triton-decode")[name]
    inputs = call.inputs("cuda")
    TARGET.check(inputs, gradients=False, **call.options)
    assert attnkern.explain(*inputs.tensors.values(), backend="triton", **call.options).plan[0].startswith("decode: ")


@pytest.mark.parametrize(("function", "arguments"), CASES)
def test_behaviour(function, arguments):
    function(TARGET, **arguments)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_dropout_drops_what_the_reference_drops(dtype):
    """Bit for bit, in the forward pass; and the same entries in the backward pass."""
    inputs = TARGET.inputs(2, 4, 300, 500, 64, heads_k=2, dtype=dtype)
    value = torch.eye(500, dtype=dtype, device="cuda").expand(2, 2, 500, 500)
    keep = TARGET.kept(0.3, 2, 4, 300, 500)
    out = TARGET.sdpa(inputs.query, inputs.key, value[..., :256], dropout_p=0.3, enable_gqa=True)
    assert torch.equal(out != 0, keep[..., :256])
    TARGET.check_dropout(inputs, dropout_p=0.3, enable_gqa=True)


@pytest.mark.parametrize("name", tagged("captured"))
def test_captured_in_a_graph(name):
    """A replay with other inputs in the same memory: descriptors and splits are those of the capture."""
    leaves = [x.requires_grad_() for x in tagged("captured")[name].inputs("cuda").tensors.values()]

    def call():
        out = TARGET.sdpa(*leaves)
        return (out, *torch.autograd.grad(out.sum(), leaves))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles and loads
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, call(), strict=True):
        assert torch.equal(a, b)


def test_more_than_two_to_the_31_elements():
    """A head far into the memory of a tensor, and a batch of heads of more than 2^31 elements in all."""
    storage = torch.empty(2**31 + 2**20, dtype=BF16, device="cuda")
    far = [storage.as_strided((2, 2, 100, 64), (2**31, 6400, 64, 1), 2**17 * i).normal_() for i in range(3)]
    near = testing.Inputs(*(x.contiguous() for x in far), None, "far apart")
    out = TARGET.sdpa(*far)
    want = testing.expected(*near.tensors.values())["out"]
    want.check(out)
    del storage, far
    x = torch.randn(1, 2, 2**24 + 64, 64, dtype=BF16, device="cuda")  # rows of one head start beyond 2^30 elements
    q = x[:, :, -64:]
    out = attnkern.attention(q, x, x, window=(100, 0), alignment="bottom_right", backend="triton")
    tail = x[:, :, -200:]
    want = testing.expected(q, tail, tail, window=(100, 0), alignment="bottom_right")["out"]
    want.check(out)
