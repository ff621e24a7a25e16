"""What only a GPU can show: streams, devices, graphs, no synchronisation. Skipped without one."""

import pytest
import torch

import attnkern
import gpu_kernels
from attnkern import testing
from attnkern.signatures import Inputs

contract = pytest.mark.contract
pytestmark = pytest.mark.gpu


def leaves(device="cuda", dtype=torch.float16):
    x = testing.make_inputs(2, 4, 130, 200, 64, dtype=dtype, device=device, seed=3).tensors.values()
    return [y.requires_grad_() for y in x]


def run(tensors, **options):
    out = attnkern.scaled_dot_product_attention(*tensors, **options)
    return (out, *torch.autograd.grad(out.sum(), tensors))


@contract(62)
def test_runs_on_the_current_stream():
    tensors = leaves()
    want = run(tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        tensors[0].data.zero_()  # behind the sleep: a kernel on another stream would still see the old query
        got = run(tensors)
    torch.cuda.synchronize()
    assert not torch.equal(got[0], want[0])
    mean = tensors[2].detach().float().mean(-2, keepdim=True).half().expand_as(got[0])
    torch.testing.assert_close(got[0], mean)


@contract(62)
def test_never_waits_for_the_device():
    tensors = leaves()
    run(tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(tensors, dropout_p=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contract(62)
def test_cuda_graph_capture():
    tensors = leaves()
    run(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(tensors)
    with torch.no_grad():
        for x in tensors:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, run(tensors), strict=True):
        assert torch.equal(a, b)


@contract(62)
def test_tensors_of_a_device_that_is_not_current():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(0):
        for x in run(leaves(last)):
            assert x.device == last


@contract(62)
def test_deterministic_mode():
    assert torch.are_deterministic_algorithms_enabled()
    tensors = leaves()
    for a, b in zip(run(tensors), run(tensors), strict=True):
        assert torch.equal(a, b)


@contract(62)
def test_float32_is_float32():
    """Without allow_tf32 the products keep 24 bits."""
    assert not torch.backends.cuda.matmul.allow_tf32
    testing.check_attention(testing.make_inputs(2, 4, 130, 200, 64, device="cuda"))


@contract(62, 19)
@pytest.mark.parametrize("layout", ["transposed", "stepped", "expanded"])
def test_masks_whose_last_stride_is_not_one(layout):
    inputs = testing.make_inputs(2, 4, 64, 128, 64, dtype=torch.float16, device="cuda")
    mask = {
        "transposed": lambda: torch.randn(4, 128, 64, device="cuda").mT,
        "stepped": lambda: torch.randn(4, 64, 256, device="cuda")[..., ::2],
        "expanded": lambda: torch.randn(4, 64, 1, device="cuda").expand(4, 64, 128),
    }[layout]()
    testing.check_attention(testing.Inputs(inputs.query, inputs.key, inputs.value, mask, inputs.recipe))


KERNELS = ["triton", "cuda"]


@contract(62)
@pytest.mark.parametrize("backend", KERNELS)
def test_compiled_whole(backend):
    """One graph, forward and backward, with the results of eager mode."""
    tensors = leaves()

    def call(q, k, v):
        return attnkern.scaled_dot_product_attention(q, k, v, is_causal=True, backend=backend)

    want, got = call(*tensors), torch.compile(call, fullgraph=True)(*tensors)
    assert torch.equal(got, want)
    grad_out = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(x, tensors, grad_out) for x in (got, want)), strict=True):
        assert torch.equal(a, b)


@contract(62)
@pytest.mark.parametrize("backend", KERNELS)
def test_the_operators_are_what_their_schemas_say(backend):
    q, k, v = (x.detach() for x in leaves())
    params = (0.125, 0.0, 2**62, 0, 0, 0.0)
    torch.library.opcheck(torch.ops.attnkern.forward.default, (*Inputs(q, k, v), *params, True, backend))
    out, lse = torch.ops.attnkern.forward(*Inputs(q, k, v), *params, True, backend)
    backward = (torch.ones_like(out), None, *Inputs(q, k, v), out, lse, *params, 7, backend)
    torch.library.opcheck(torch.ops.attnkern.backward.default, backward)


@pytest.mark.parametrize("mode", gpu_kernels.MODES)
@pytest.mark.parametrize("name", gpu_kernels.CALLS)
def test_every_cuda_kernel(name, mode):
    """Every class of head size, dtype and variant, with all gradients; Hopper's where they take the call."""
    with gpu_kernels.mode(mode):
        gpu_kernels.check(gpu_kernels.CALLS[name])


def test_the_cuda_plan_is_what_runs():
    """Names of the kernels that the profiler sees, against what `explain` says."""
    q, k, v = leaves()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = attnkern.attention(q, k, v, backend="cuda")
        torch.autograd.grad(out.sum(), (q, k, v))
    names = " ".join(event.name for event in profile.events())
    plan = attnkern.explain(q, k, v, backend="cuda").plan
    assert ("forward_sm90_kernel" in names) == plan[0].startswith("forward, sm_90a")
    assert ("dq_sm90_kernel" in names) == plan[-1].startswith("backward dq, sm_90a")
    assert "forward" in names
    assert "dq" in names


@pytest.mark.parametrize(
    "name",
    ["d64 causal", "d128 causal", "d256 causal", "grouped", "bias of all elements", "documents, d128", "gaps, d128"],
)
def test_cuda_kernels_give_the_same_bits_in_every_run(name):
    assert gpu_kernels.differing_runs(gpu_kernels.CALLS[name], 100) == 0


def test_every_row_of_the_triton_table_runs():
    """Registers and shared memory are enough on this chip, for the largest head size of each row."""
    from attnkern.triton_kernels import configs, launch

    capability = launch.capability(torch.cuda.current_device())
    arch = configs.arch_class(capability, configs.has_tma(capability))
    for row, by_size in configs.TABLE.items():
        if row.arch not in (arch, 80 if arch == 86 else arch):
            continue
        for size in by_size:
            dtype = torch.bfloat16 if row.itemsize == 2 else torch.float32
            mask = ("float", "1HLS") if row.feature == "tile" else None
            inputs = testing.make_inputs(1, 2, 130, 200, size, dtype=dtype, device="cuda", mask=mask)
            if row.feature == "ranges":
                inputs = inputs.with_ranges("few", "BHL", 2, torch.int32, 1)
            softcap = 5.0 if row.feature == "mods" else None
            testing.check_attention(inputs, backend="triton", is_causal=True, softcap=softcap)
