"""__torch_function__, modes, torch's attn_bias objects, nested tensors, sdpa_kernel, a fresh process."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnkern
from attnkern import testing

contract = pytest.mark.contract
sdpa = attnkern.scaled_dot_product_attention


class Recorder(torch.Tensor):
    calls = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append((getattr(func, "__name__", str(func)), kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


class Duck:
    """Not a tensor at all."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func.__name__, tuple(type(x).__name__ for x in args), dict(kwargs or {})


@contract(57)
@pytest.mark.parametrize("position", range(4), ids=["query", "key", "value", "attn_mask"])
def test_subclasses_get_the_call(position):
    tensors = [torch.randn(2, 5, 8) for _ in range(3)] + [torch.zeros(5, 5)]
    plain = sdpa(*tensors)
    tensors[position] = tensors[position].as_subclass(Recorder)
    Recorder.calls.clear()
    out = sdpa(*tensors)
    assert Recorder.calls[0][0] == "scaled_dot_product_attention"
    assert type(out) is Recorder
    torch.testing.assert_close(out.as_subclass(torch.Tensor), plain)


@contract(57)
def test_duck_types_may_return_anything_and_see_only_what_was_passed():
    x = torch.randn(2, 5, 8)
    assert sdpa(Duck(), x, x) == ("scaled_dot_product_attention", ("Duck", "Tensor", "Tensor"), {})
    name, _, keywords = sdpa(x, x, Duck(), is_causal=True, scale=0.5)
    assert name == "scaled_dot_product_attention"
    assert keywords == {"is_causal": True, "scale": 0.5}
    _, _, keywords = sdpa(x, x, x, Duck())
    assert set(keywords) == {"attn_mask"}


@contract(57)
def test_function_modes_see_the_call():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 3, 5, 8)
    with Mode():
        out = sdpa(x, x, x)
    assert seen[0] == "scaled_dot_product_attention"
    assert torch.equal(out, sdpa(x, x, x))


@contract(57)
def test_dispatch_modes_see_the_operators(target):
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = (x.requires_grad_() for x in target.inputs(2, 3, 9, 17, 8).tensors.values())
    want = torch.autograd.grad(target.sdpa(q, k, v).sum(), (q, k, v))
    with Mode():
        got = torch.autograd.grad(target.sdpa(q, k, v).sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    if target.backend == "reference":
        assert any("bmm" in name for name in seen)
    else:
        assert {"attnkern.forward.default", "attnkern.backward.default"} <= set(seen)


@contract(57)
def test_parameters_give_plain_tensors(target):
    parameters = [torch.nn.Parameter(x) for x in target.inputs(2, 3, 5, 7, 8).tensors.values()]
    out = target.sdpa(*parameters)
    assert type(out) is torch.Tensor
    out.sum().backward()
    assert all(p.grad is not None for p in parameters)


# --- torch.nn.attention.bias


@contract(58)
@pytest.mark.parametrize("lengths", [(5, 5), (5, 9), (9, 5), (1, 7)], ids=str)
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rank", [3, 4])
def test_causal_bias_objects(target, make, lengths, rank):
    leading = (2, 4)[4 - rank :]
    inputs = target.random((*leading, lengths[0], 8), (*leading, lengths[1], 8), (*leading, lengths[1], 8))
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]
    bias = make(*lengths)
    out = target.sdpa(*leaves, bias)
    explicit = torch.ones(lengths, dtype=torch.bool, device=target.device)
    explicit = explicit.tril(lengths[1] - lengths[0] if make is causal_lower_right else 0)
    grad_out = torch.randn_like(out)
    want = testing.expected(*(x.detach() for x in leaves), explicit, grad_out=grad_out)
    got = {"out": out, **dict(zip(("query", "key", "value"), torch.autograd.grad(out, leaves, grad_out), strict=True))}
    for name, x in got.items():
        w = want[name]
        w.check(x, gradient=name != "out", name=name)
    if lengths[0] > lengths[1] and make is causal_lower_right:
        assert not out[..., : lengths[0] - lengths[1], :].any()


@contract(58)
def test_causal_bias_with_grouped_heads(target):
    q, k, v = target.inputs(2, 4, 5, 9, 8, heads_k=2).tensors.values()
    out = target.sdpa(q, k, v, causal_lower_right(5, 9), enable_gqa=True)
    torch.testing.assert_close(
        out, target.attention(q, k, v, is_causal=True, alignment="bottom_right", enable_gqa=True)
    )


@contract(58)
def test_causal_bias_excludes_is_causal():
    x = torch.randn(2, 3, 5, 8)
    with pytest.raises(ValueError, match="CausalBias"):
        sdpa(x, x, x, causal_upper_left(5, 5), is_causal=True)


# --- nested tensors


def jagged(*lengths):
    return torch.nested.nested_tensor([torch.randn(n, 3, 8) for n in lengths], layout=torch.jagged)


@contract(59)
def test_jagged_nested_tensors():
    q, k, v = (jagged(4, 7, 2) for _ in range(3))
    q, k, v = (torch.nested.nested_tensor_from_jagged(x.values(), q.offsets()) for x in (q, k, v))
    out = sdpa(*(x.transpose(1, 2) for x in (q, k, v)))
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    for a, b in zip(out.unbind(), want.unbind(), strict=True):
        torch.testing.assert_close(a, b)


@contract(59)
def test_jagged_nested_tensors_refuse_as_torch_does():
    q = jagged(4, 7).transpose(1, 2)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)mask"):
        sdpa(q, q, q, torch.zeros(7, 7))
    with pytest.raises(ValueError, match=r"(?i)nested|jagged"):
        sdpa(q, torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8))


@contract(59)
def test_strided_nested_tensors_are_refused():
    q = torch.nested.nested_tensor([torch.randn(3, 4, 8), torch.randn(3, 7, 8)])
    with pytest.raises(RuntimeError, match="nested"):
        sdpa(q, q, q)


# --- torch's own switches


@contract(60)
@pytest.mark.parametrize(
    "backends",
    [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION], [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]],
    ids=str,
)
def test_right_under_any_choice_of_torchs_backends(target, backends):
    inputs = target.inputs(2, 3, 9, 17, 8)
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    with sdpa_kernel(backends):
        inside = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
        target.check(inputs)
        assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == inside
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before


# --- a process of its own


@contract(61)
def test_a_fresh_process_can_import_and_call():
    code = (
        "import attnkern, torch; x = torch.ones(1, 1, 3, 4, requires_grad=True); "
        "attnkern.scaled_dot_product_attention(x, x, x).sum().backward(); print(x.grad.shape)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "1, 1, 3, 4" in result.stdout
