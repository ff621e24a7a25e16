"""The Triton kernels, compiled for GPUs as they are shipped and run on the CPU by the simulator (tests/ptxsim), hazards
checked: what takes more than one call (those are in test_gpu_calls.py), and what needs no kernel to run."""

import contextlib
import dataclasses
import importlib
import math
import subprocess

import pytest
import torch
from attnkern.triton_kernels import configs, launch, plan
from torch._dynamo.testing import CompileCounterWithBackend

import attnkern
import simulated
from attnkern import ops, rng, testing
from attnkern.backends import disabled
from attnkern.backends.failed import CannotBuild
from attnkern.params import empty_like_heads
from attnkern.problem import Problem
from attnkern.signatures import Inputs
from simulated import BF16, FP32

table = importlib.import_module("attnkern.backends")  # as an attribute of the package it is the public function
triton = table.triton


@pytest.fixture
def target(request):
    """Takes the place of conftest's."""
    with simulated.triton(getattr(request, "param", 80)) as target:
        yield target


def test_dropout_of_samples_with_keys_of_their_own(target):
    """vmap makes one seed for every sample."""
    q, k, v = (x.detach() for x in target.inputs(3, 2, 40, 64, 64, dtype=BF16).tensors.values())
    torch.manual_seed(3)
    together = torch.vmap(lambda *x: target.sdpa(*x, dropout_p=0.4), randomness="different")(
        *(x[:, None] for x in (q, k, v))
    )
    torch.manual_seed(3)
    seeds = torch.vmap(lambda _: rng.draw_seed(torch.device("cpu")), randomness="different")(torch.zeros(3))
    params = Problem.from_sdpa(q, k, v, None, 0.4).params
    for n in range(3):
        of_one = Inputs(q[n : n + 1], k[n : n + 1], v[n : n + 1], philox_seed=seeds[n])
        alone, _ = ops.forward(*of_one, *params, False, "triton")
        assert torch.equal(together[n], alone)


def test_a_trace_takes_the_backend_by_name(monkeypatch):
    """What selects it is traced, in one graph, on a device for which Triton has kernels: here the meta device, on which
    none runs."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    monkeypatch.setattr(launch, "capability", lambda index: 90)
    monkeypatch.setitem(table.TABLE, "meta", (triton,))
    leaves = [torch.empty(1, 2, 40, 16, device="meta", requires_grad=True) for _ in range(3)]

    def call(q, k, v):
        return attnkern.scaled_dot_product_attention(q, k, v, is_causal=True, backend="triton")

    torch.compile(call, fullgraph=True, backend=counter)(*leaves).sum().backward()
    assert counter.frame_count == 1
    assert all(x.grad.shape == x.shape for x in leaves)


SUBSETS = [("query",), ("key",), ("value",), ("attn_mask",), ("query", "attn_mask"), ("key", "value")]


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_only_what_is_asked_for(subset):
    """Kernels whose results nobody wants are not launched."""
    inputs = testing.make_inputs(1, 2, 40, 70, 64, heads_k=1, dtype=BF16, mask=("float", "BHLS"))
    tensors = {n: x.requires_grad_(n in subset) for n, x in inputs.tensors.items()}
    with simulated.triton() as target:
        out = target.attention(**tensors, enable_gqa=True)
        grad_out = torch.randn_like(out)
        grads = torch.autograd.grad(out, [tensors[n] for n in subset], grad_out)
    want = testing.expected(**{n: x.detach() for n, x in tensors.items()}, grad_out=grad_out, enable_gqa=True)
    for name, grad in zip(subset, grads, strict=True):
        want[name].check(grad, gradient=True, name=name)
    names = target.kernels()
    assert ("dkdv_kernel" in names) == bool({"key", "value"} & set(subset))
    assert ("dq_kernel" in names) == bool({"query", "attn_mask"} & set(subset))


def strided_masks():
    """Masks of 40 x 64 scores whose strides no kernel would choose."""
    return {
        "transposed": torch.randn(2, 64, 40, dtype=BF16).mT,
        "every other column": torch.randn(2, 40, 128, dtype=BF16)[..., ::2],
        "expanded columns": torch.randn(2, 40, 1, dtype=BF16).expand(2, 40, 64),
        "expanded rows": torch.randn(2, 1, 64, dtype=BF16).expand(2, 40, 64),
    }


@pytest.mark.parametrize("name", strided_masks())
def test_masks_of_any_stride(target, name):
    inputs = target.inputs(1, 2, 40, 64, 64, dtype=BF16)
    target.check(dataclasses.replace(inputs, attn_mask=strided_masks()[name]), gradients=False)


@pytest.mark.parametrize("target", [80, 90], indirect=True)
def test_keys_shared_by_stride_0(target):
    inputs = target.inputs(2, 2, 40, 70, 64, dtype=BF16)
    key, value = (x[:1].expand(2, 2, 70, 64) for x in (inputs.key, inputs.value))
    target.check(dataclasses.replace(inputs, key=key, value=value))


def test_a_nan_stays_in_its_row_and_head(target):
    q, k, v = target.inputs(1, 2, 70, 70, 64, dtype=BF16).tensors.values()
    q[0, 0, 5] = math.nan
    out, lse = target.attention(q, k, v, is_causal=True, return_lse=True)
    bad = torch.zeros(1, 2, 70, dtype=torch.bool)
    bad[0, 0, 5] = True
    assert torch.equal(lse.isnan(), bad)
    assert torch.equal(out.isnan().all(-1), bad)
    assert torch.equal(out.isnan().any(-1), bad)


def test_rows_of_finfo_min(target):
    """Such a row is the mean of value, has finite gradients, and the other rows are right."""
    inputs = target.inputs(1, 2, 40, 70, 64, dtype=BF16, mask=("float", "BHLS"))
    inputs.attn_mask[:, :, [1, 35]] = torch.finfo(BF16).min
    out = target.check(inputs, gradients=False)["out"]
    mean = inputs.value.double().mean(-2).to(BF16)
    torch.testing.assert_close(out[:, :, 35], mean)
    leaves = [x.detach().requires_grad_() for x in inputs.tensors.values()]
    out = target.sdpa(*leaves)
    grad_out = torch.randn_like(out)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, leaves, grad_out, retain_graph=True))
    grad_out[:, :, [1, 35]] = 0
    want = testing.expected(**inputs.tensors, grad_out=grad_out)
    for name, x in zip(inputs.tensors, torch.autograd.grad(out, leaves, grad_out), strict=True):
        want[name].check(x, gradient=True, name=name)


# --- what needs no kernel to run


class Uncompiled:
    """A kernel whose launcher in C fails to compile."""

    def compile(self, capability):
        return self

    @property
    def run(self):
        raise subprocess.CalledProcessError(1, ["gcc", "main.c"])


def test_what_a_launcher_lacks_is_named(monkeypatch, tmp_path):
    """Triton compiles launchers in C on the user's machine, and none where one lacks what all need."""
    monkeypatch.setattr(launch, "failures", {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launch, "capability", lambda index: 90)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"launcher in C .* CC=no-such-compiler is not found: install gcc"):
        launch._load(Uncompiled(), 0)
    assert None in launch.failures
    monkeypatch.delenv("CC")
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="finds no C compiler: install gcc, or set CC"):
        launch._load(Uncompiled(), 0)
    monkeypatch.setattr(launch.shutil, "which", lambda name: "/bin/gcc")
    monkeypatch.setattr(launch.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(RuntimeError, match=r"Python\.h is missing: install this Python's headers \(python3\.\d+-dev\)"):
        launch._load(Uncompiled(), 0)
    (tmp_path / "Python.h").touch()
    launch.failures.clear()
    with pytest.raises(CannotBuild, match=r"does not compile \(CalledProcessError: "):
        launch._load(Uncompiled(), 0)
    assert None not in launch.failures


def test_what_cuda_reports_of_a_launch_is_no_reason_to_go_on(monkeypatch):
    """But what a chip lacks for a kernel is known before anything runs."""

    def load(error):
        class Kernel:
            def compile(self, capability):
                return self

            @property
            def run(self):
                raise error

        monkeypatch.setattr(launch, "failures", {})
        monkeypatch.setattr(launch, "_missing_for_launchers", lambda: None)
        launch._load(Kernel(), 0)

    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launch, "capability", lambda index: 90)
    with pytest.raises(CannotBuild, match=r"needs more than the device has .*shared memory"):
        load(launch.OutOfResources(300000, 232448, "shared memory"))
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        load(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not isinstance(caught.value, CannotBuild)
    assert not launch.failures


@pytest.mark.parametrize(("left_out", "kernels"), [("triton-decode", True), ("triton-second-order", False)])
def test_second_order_is_plain_torchs_where_the_kernels_are_left_out(monkeypatch, left_out, kernels):
    monkeypatch.setattr(disabled, "left_out", frozenset({left_out}))
    monkeypatch.setitem(table.TABLE, "cpu", (triton, *table.TABLE["cpu"]))
    assert (ops._function(triton, "tangent") is triton.tangent) == kernels


def problem(q=(1, 2, 9, 64), k=None, v=None, dtype=BF16, **options):
    shapes = (q, k or q, v or k or q)
    return Problem.from_sdpa(*(torch.zeros(s, dtype=dtype) for s in shapes), **options)


def test_what_it_refuses():
    with simulated.triton(80):
        assert triton.refusals(problem()) == []
        assert triton.refusals(problem(dtype=torch.float64)) == ["query is float64"]
        assert triton.refusals(problem(v=(1, 2, 9, 513))) == ["head size 513 is above 512"]
        assert triton.refusals(problem(q=(1, 2, 9, 512), dtype=FP32)) == []
        long = torch.zeros(1, 1, 1, 64, dtype=BF16).expand(1, 1, 2**30, 64)
        assert triton.refusals(Problem.from_sdpa(long[:, :, :1], long, long)) == [
            f"length {2**30} is above {2**30 - 1}"
        ]
    with simulated.triton(75):
        assert triton.refusals(problem()) == ["compute capability 7.5, and 8.0 is needed"]
    assert triton.refusals(problem()) == [triton.unavailable()]


@pytest.mark.parametrize(
    ("target", "size", "size_v"), [(80, 8, 0), (90, 8, 0), (90, 0, 8), (80, 0, 0)], indirect=["target"]
)
def test_head_size_zero(target, size, size_v):
    """Kernels get a column of zeros. Results are laid out as the operators' fakes have them."""
    inputs = testing.make_inputs(2, 4, 5, 7, size, size_v, heads_k=2, dtype=BF16, layout="blhd")
    results = target.check(inputs, is_causal=True, enable_gqa=True)
    assert set(target.kernels()) == {"forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"}
    tensors = [x.detach().requires_grad_() for x in inputs.tensors.values()]
    explanation = attnkern.explain(*tensors, backend="triton", is_causal=True, enable_gqa=True)
    assert [line.split(":")[0] for line in explanation.plan] == ["forward", "delta", "dkdv", "dq"]
    layouts = {"out": empty_like_heads(inputs.query, size_v)}
    layouts |= {name: empty_like_heads(x, x.shape[3]) for name, x in inputs.tensors.items()}
    for name, x in layouts.items():
        assert (results[name].shape, results[name].stride()) == (x.shape, x.stride()), name


def test_explain_tells_of_copies():
    stepped = testing.make_inputs(1, 2, 9, 9, 24, dtype=BF16, layout=("stepped", "contiguous", "offset"))
    with simulated.triton(80):
        explanation = attnkern.explain(*stepped.tensors.values(), backend="triton")
        assert explanation.notes == ("copies query (strides (864, 432, 48, 2))",)
        assert "triton: chosen; copies query" in str(explanation)
    with simulated.triton(90):  # descriptors want addresses in multiples of 16 bytes
        notes = attnkern.explain(*stepped.tensors.values(), backend="triton").notes
        assert [note.split(" (")[0] for note in notes] == ["copies query", "copies value"]


def plan_of(capability, inputs, **options):
    with simulated.triton(capability):
        return attnkern.explain(*inputs.tensors.values(), backend="triton", **options)


def test_explain_tells_the_plan():
    """The launches of a call, as it makes them."""
    inputs = testing.make_inputs(1, 2, 40, 70, 64, dtype=BF16)
    forward = "forward: tiles of 128 queries x 64 keys, pointers, 3 stages, 4 warps, 2 programs"
    explanation = plan_of(80, inputs)
    assert explanation.plan == (forward,)
    assert str(explanation).endswith(f"triton: chosen\n    {forward}") or f"\n    {forward}\n" in str(explanation)
    for x in inputs.tensors.values():
        x.requires_grad_()
    lines = plan_of(90, inputs).plan
    assert [line.split(":")[0] for line in lines] == ["forward", "delta", "dkdv", "dq"]
    assert [" TMA," in line for line in lines] == [True, False, True, True]
    inputs = testing.make_inputs(1, 2, 40, 70, 64, dtype=BF16)
    sinks = torch.zeros(2, requires_grad=True)
    lines = plan_of(80, inputs, sinks=sinks).plan  # as a call launches them: with the log-sum-exp, and delta
    assert [line.split(":")[0] for line in lines] == ["forward", "delta", "dsinks"]
    with torch.no_grad():
        assert plan_of(80, inputs, sinks=sinks).plan == (forward,)
    wide = testing.make_inputs(1, 2, 40, 70, 300, dtype=FP32)
    assert ", 32 columns at a time, pointers, " in plan_of(90, wide).plan[0]
    assert plan_of(80, testing.make_inputs(1, 2, 0, 70, 64)).plan == ("no kernel: nothing to add up",)


def test_explain_tells_of_splits_as_they_are_launched(monkeypatch):
    inputs = testing.make_inputs(2, 4, 2, 1100, 64, heads_k=2, dtype=BF16)
    splits, combine = plan_of(80, inputs, enable_gqa=True).plan
    grids = []
    with simulated.triton(80):
        monkeypatch.setattr(launch, "run", lambda kernel, grid, args, index: grids.append((grid, args)))
        attnkern.attention(**inputs.tensors, enable_gqa=True, backend="triton")
    (grid, args), (combined, _) = grids
    parts = args[5].shape[3]
    assert parts > 1
    assert splits.startswith(
        f"decode: keys in {parts} splits, tiles of 16 queries of the heads that share their keys x "
    )
    assert splits.endswith(f", {grid} programs")
    assert combine.endswith(f", {combined} programs")


def test_decode_copies_nothing():
    """Its kernel loads by pointers: rows that no descriptor can stand for stay where they are."""
    many, few = (testing.make_inputs(1, 2, n, 1100, 24, dtype=BF16, layout="offset") for n in (100, 1))
    assert [note.split(" (")[0] for note in plan_of(90, many).notes] == ["copies key", "copies value"]
    assert plan_of(90, few).plan[0].startswith("decode: ")
    assert plan_of(90, few).notes == ()


def test_explain_tells_of_copies_in_the_backward_pass():
    inputs = testing.make_inputs(1, 2, 40, 70, 24, dtype=BF16, layout=("offset", "contiguous", "contiguous"))
    inputs.key.requires_grad_()
    assert plan_of(90, inputs).notes == ("copies query in the backward pass",)
    assert plan_of(80, inputs).notes == ()


@pytest.mark.parametrize(("allowed", "used"), [("ieee", "tf32x3"), ("tf32", "tf32")])
def test_tf32_only_where_torch_allows_it(set_precision, allowed, used):
    set_precision(allowed)
    x = torch.zeros(1, 1, 16, 64)
    with simulated.triton(80):
        key = triton._problem(plan, Inputs(x, x, x), Problem.from_sdpa(x, x, x).params)
        assert plan.forward_plan(key, True).step.kernel.constants["PRECISION"] == used


def test_a_sequence_length_makes_no_new_kernel():
    """Nor does one that is 1 or a multiple of 16, which Triton's own launcher would specialise."""

    def kernels(seqlen_q, seqlen_k):
        q, k = (testing.make_inputs(1, 2, n, n, 64, dtype=BF16).query for n in (seqlen_q, seqlen_k))
        key = triton._problem(plan, Inputs(q, k, k), Problem.from_sdpa(q, k, k).params)
        backward = plan.backward_plan(key, key.q, key.q, False, 7)
        return [plan.forward_plan(key, True).step.kernel, backward.dkdv.kernel, backward.dq.kernel]

    with simulated.triton(80):
        assert kernels(1, 1) == kernels(17, 333) == kernels(512, 1024) == kernels(4096, 1)


def test_strides_beyond_32_bits():
    """More than 2^31 elements: only the steps from row to row, within a tile, are 32 bits wide."""
    small = torch.zeros(1, 1, 1, 64, dtype=BF16)
    with simulated.triton(80):
        key = triton._problem(plan, Inputs(small, small, small), problem().params)
        far = plan.TensorSpec((2, 2, 4, 64), (2**40, 2**33, 64, 1), True)
        step = plan.forward_plan(key._replace(q=far, k=far, v=far), True).step
    strides = step.kernel.signature["strides"]
    assert {strides.q, strides.k, strides.v, strides.out} == {("i64", "i64", "i32", "constexpr")}
    assert set(step.rest[0]) == {None, (2**40, 2**33, 64, None), (512, 256, 64, None)}
    assert not triton._has_rows(torch.empty_strided((1, 1, 2, 64), (0, 0, 2**31, 1), device="meta"))


@pytest.mark.parametrize("head_dim", [1, 15, 16, 17, 64, 80, 96, 100, 192, 255, 256, 257, 320, 384, 512])
def test_chunks_of_a_head_size(head_dim):
    first, rest = configs.chunks(head_dim)
    assert first + rest >= head_dim
    assert first in (16, 32, 64, 128, 256)
    assert rest in (0, 16, 32, 64, 128, 256)
    assert rest == 0 or first < head_dim


def test_the_table_has_a_row_for_every_head_size():
    for arch in configs.ARCHS:
        for kernel in configs.KERNELS:
            for feature in configs.FEATURES:
                for itemsize in (2, 4):
                    row = configs.Row(arch, kernel, itemsize, feature)
                    found = {configs.choose(row, size, 16) for size in range(1, 513)}
                    assert found <= {c for by_size in configs.TABLE.values() for c in by_size.values()}
                    with pytest.raises(LookupError, match=f"{kernel}"):
                        configs.choose(row, 1024, 16)


def test_a_table_as_json(tmp_path):
    row = configs.Row(80, "dq", 2, "plain")
    configs.dump({row: {64: configs.Config(16, 16, 4, 1)}}, tmp_path / "table.json", {"device": "one"})
    table = configs.load(tmp_path / "table.json")
    assert configs.choose(row, 64, 64, table) == (16, 16, 4, 1)
    assert configs.choose(row, 128, 128, table) == configs.choose(row, 128, 128)
    assert configs.TABLE[row][64] != (16, 16, 4, 1)
