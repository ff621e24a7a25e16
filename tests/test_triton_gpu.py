"""The Triton kernels on a GPU: what the simulator is shown by test_triton.py and test_triton_suite.py, on hardware; and
graphs. Skipped without a GPU."""

import pytest
import torch

import attnkern
import test_triton
import test_triton_decode
from attnkern import rng, testing
from conftest import Target
from test_triton import BF16, FP16, FP32
from test_triton_suite import suite

pytestmark = pytest.mark.gpu
TARGET = Target("triton", "cuda")
CASES = [pytest.param(*case.values[:2], id=case.id.rpartition("-")[0]) for case in suite()]


@pytest.mark.parametrize("name", test_triton.MATRIX)
def test_feature(name):
    """Output, log-sum-exp and all gradients."""
    row = test_triton.MATRIX[name]
    TARGET.check(TARGET.inputs(*row.sizes, **row.more), **row.options)


@pytest.mark.parametrize("name", test_triton_decode.MATRIX)
def test_decode(name):
    """Output and log-sum-exp by the kernels that split the keys, as `explain` says."""
    row = test_triton_decode.MATRIX[name]
    inputs = TARGET.inputs(*row.sizes, **row.more)
    TARGET.check(inputs, gradients=False, **row.options)
    assert attnkern.explain(*inputs.tensors.values(), backend="triton", **row.options).plan[0].startswith("decode: ")


@pytest.mark.parametrize(("function", "arguments"), CASES)
def test_behaviour(function, arguments):
    function(TARGET, **arguments)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_dropout_drops_what_the_reference_drops(dtype):
    """Bit for bit, in the forward pass; and the same entries in the backward pass."""
    inputs = TARGET.inputs(2, 4, 300, 500, 64, heads_k=2, dtype=dtype)
    torch.manual_seed(5)
    keep = rng.keep_mask(rng.draw_seed(inputs.query.device), 0.3, 2, 4, 300, 500)
    value = torch.eye(500, dtype=dtype, device="cuda").expand(2, 2, 500, 500)
    torch.manual_seed(5)
    out = TARGET.sdpa(inputs.query, inputs.key, value[..., :256], dropout_p=0.3, enable_gqa=True)
    assert torch.equal(out != 0, keep[..., :256])
    torch.manual_seed(5)
    TARGET.check(inputs, dropout_p=0.3, enable_gqa=True, keep=keep)


CAPTURED = {
    "forward and backward": ((2, 4, 130, 200, 64), {"dtype": FP16}),
    "bias": ((1, 2, 130, 200, 64), {"dtype": BF16, "mask": ("float", "1HLS")}),
    "rows that are copied": ((1, 2, 130, 200, 24), {"dtype": BF16, "layout": "offset"}),
    "decode": ((2, 4, 1, 4000, 128), {"dtype": BF16}),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_in_a_graph(name):
    """A replay with other inputs in the same memory: descriptors and splits are those of the capture."""
    sizes, kinds = CAPTURED[name]
    leaves = [x.requires_grad_() for x in TARGET.inputs(*sizes, **kinds).tensors.values()]

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
    testing.assert_within_rule(out, want.exact, want.baseline, unit=want.unit)
    del storage, far
    x = torch.randn(1, 2, 2**24 + 64, 64, dtype=BF16, device="cuda")  # rows of one head start beyond 2^30 elements
    q = x[:, :, -64:]
    out = attnkern.attention(q, x, x, window=(100, 0), alignment="bottom_right", backend="triton")
    tail = x[:, :, -200:]
    want = testing.expected(q, tail, tail, window=(100, 0), alignment="bottom_right")["out"]
    testing.assert_within_rule(out, want.exact, want.baseline, unit=want.unit)
