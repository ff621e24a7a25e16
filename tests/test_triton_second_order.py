"""Forward-mode and second derivatives by the Triton kernels, compiled for GPUs as they are shipped and run on the CPU
by the simulator, hazards checked: every feature against float64 by the one tolerance rule."""

import contextlib

import pytest
import torch

import attnkern
import simulated
from attnkern import ops, rng, testing
from attnkern.params import GRAD_BIAS, GRAD_GRAD_LSE, GRAD_GRAD_OUT, GRAD_K, GRAD_Q, GRAD_SINKS, GRAD_V
from attnkern.problem import Problem
from attnkern.signatures import SECOND_ORDER_BITS, Derivatives, Inputs
from matrix import on_gpus, tagged
from simulated import BF16

EVERYTHING = ("query", "key", "value", "attn_mask")
CALLS = tagged("triton-second")


def along(inputs, moving):
    """Random tangents of some inputs; those of the mask where it has any."""
    given = inputs.tensors
    return {n: torch.randn_like(given[n]) for n in moving if n in given and given[n].is_floating_point()}


def assert_derivatives(found, want, recipe):
    for name, x in found.items():
        gradient = name not in ("tout", "tlse")
        want[name].check(x, gradient=gradient, name=name, recipe=recipe)


def check(gpu, inputs, moving=EVERYTHING, has_grad_lse=True, **options):
    """Both operators against float64, on the inputs' device if gpu is None; gives the names of the kernels launched in
    the simulator of a gpu. `moving` names the inputs that have a tangent, or a cotangent of their gradient."""
    tensors = {name: x.detach() for name, x in inputs.tensors.items()}
    problem = Problem.from_sdpa(**tensors, **options)
    params, seed, keep = problem.params, None, None
    if params.dropout_p:
        seed = rng.draw_seed(problem.q.device)
        keep = rng.keep_mask(seed, params.dropout_p, *problem.q.shape[:3], problem.k.shape[2])
    direction = along(inputs, moving)
    given = Derivatives(*(direction.get(name) for name in EVERYTHING))
    with simulated.triton(gpu) if gpu else contextlib.nullcontext(simulated.Triton("triton", "cuda")) as target:
        call = problem.inputs(seed)
        out, lse = ops.forward(*call, *params, True, "triton")
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse) * has_grad_lse
        target.launched.clear()
        tout, tlse = ops.tangent(*call, *given, out, lse, *params, "triton")
        has_gradient = call.bias is not None and call.bias.is_floating_point()
        mask = sum(SECOND_ORDER_BITS) - GRAD_SINKS - (0 if has_gradient else GRAD_BIAS)
        grads = (grad_out, grad_lse if has_grad_lse else None)
        second = ops.second_backward(*given, *grads, *call, out, lse, *params, mask, "triton")
    want = testing.expected_second_order(
        **tensors, tangents=direction, grad_out=grad_out, grad_lse=grad_lse, keep=keep, **options
    )
    assert_derivatives({"tout": tout, "tlse": tlse}, want, inputs.recipe)
    found = dict(zip(("tout", "tlse", *EVERYTHING), second[:-1], strict=True))
    assert_derivatives({name: x for name, x in found.items() if name in want}, want, inputs.recipe)
    return [name_of(kernel) for kernel in target.launched]


def name_of(kernel):
    """Kernels of both orders are told apart by "second_"."""
    return ("second_" if kernel.constants.get("TANGENT") else "") + kernel.function.__name__


@pytest.mark.parametrize(("name", "gpu"), on_gpus(CALLS))
def test_feature(name, gpu, record_property):
    """The tangents of out and lse; the gradients of all inputs, of grad_out and of grad_lse."""
    names = check(gpu, CALLS[name].inputs(), **CALLS[name].options)
    assert names.count("tangent_kernel") == 2
    assert {"delta_kernel", "second_dkdv_kernel", "second_dq_kernel"} <= set(names)
    record_property("triton", f"sm_{gpu}  second order: {name}")


@pytest.mark.parametrize(("size", "size_v"), [(8, 0), (0, 8)])
def test_head_size_zero(size, size_v):
    inputs = testing.make_inputs(1, 2, 5, 7, size, size_v, dtype=BF16)
    assert "tangent_kernel" in check(80, inputs, is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(name):
    check(None, CALLS[name].inputs("cuda"), **CALLS[name].options)


SUBSETS = [("query",), ("value",), ("key", "attn_mask")]


@pytest.mark.parametrize("moving", SUBSETS, ids="+".join)
def test_a_direction_that_is_zero_elsewhere(moving):
    """Products with what doesn't move are left out."""
    check(80, testing.make_inputs(1, 2, 20, 40, 16, dtype=BF16, mask=("float", "BHLS")), moving, has_grad_lse=False)


def test_what_is_not_asked_for_is_not_launched():
    x = torch.randn(1, 2, 20, 16, dtype=BF16)
    params = Problem.from_sdpa(x, x, x).params
    given = (*Derivatives(x), x, None, *Inputs(x, x, x), x, torch.zeros(1, 2, 20), *params)
    kernels = {GRAD_Q: "second_dq_kernel", GRAD_K: "second_dkdv_kernel", GRAD_V: "second_dkdv_kernel"}
    kernels |= {GRAD_GRAD_OUT: None, GRAD_GRAD_LSE: None}
    with simulated.triton() as target:
        for bit, kernel in kernels.items():
            target.launched.clear()
            results = ops.second_backward(*given, bit, "triton")
            assert [r.ndim > 1 for r in results] == [bit == each for each in SECOND_ORDER_BITS]
            names = {name_of(kernel) for kernel in target.launched} - {"tangent_kernel", "delta_kernel"}
            assert names == ({kernel} if kernel else set())


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)], ids=str)
def test_empty_inputs_launch_nothing(shape):
    assert not check(80, testing.make_inputs(*shape, 8, dtype=BF16, mask=("float", "BHLS")))


def test_through_torch():
    """torch.func.jvp and double backward of attention run these kernels, which give the same in every run."""
    options = {"is_causal": True, "enable_gqa": True}
    inputs = testing.make_inputs(1, 2, 40, 50, 32, heads_k=1, dtype=BF16, mask=("float", "11LS"))
    direction = along(inputs, EVERYTHING)
    grad_out, grad_lse = torch.randn(1, 2, 40, 32, dtype=BF16), torch.randn(1, 2, 40)
    given = {name: x.detach() for name, x in inputs.tensors.items()}
    want = testing.expected_second_order(**given, tangents=direction, grad_out=grad_out, grad_lse=grad_lse, **options)

    def attention(*tensors):
        return attnkern.attention(*tensors, **options, return_lse=True, backend="triton")

    with simulated.triton() as target:
        _, (tout, tlse) = torch.func.jvp(attention, tuple(given.values()), tuple(direction.values()))
        assert [name_of(kernel) for kernel in target.launched] == ["forward_kernel", "tangent_kernel"]
        leaves = [x.clone().requires_grad_() for x in (*given.values(), grad_out, grad_lse)]
        first = torch.autograd.grad(attention(*leaves[:4]), leaves[:4], leaves[4:], create_graph=True)
        target.launched.clear()
        second, again = (
            torch.autograd.grad(first, leaves, tuple(direction.values()), retain_graph=True) for _ in range(2)
        )
        names = {name_of(kernel) for kernel in target.launched}
    kernels = ("second_dkdv", "second_dq", "second_bias_gradient", "tangent", "delta")
    assert names == {f"{kernel}_kernel" for kernel in kernels}
    assert_derivatives({"tout": tout, "tlse": tlse}, want, inputs.recipe)
    assert_derivatives(dict(zip((*EVERYTHING, "tout", "tlse"), second, strict=True)), want, inputs.recipe)
    assert all(map(torch.equal, second, again))
