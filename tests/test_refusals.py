"""Which backend runs a call: backends(), explain(), no silent fall-back, one warning per reason."""

import importlib
import warnings

import pytest
import torch

import attnkern
from attnkern import _library, testing
from attnkern.backends import failed
from attnkern.signatures import Inputs
from random_problems import random_problem

table = importlib.import_module("attnkern.backends")  # as an attribute of the package it is the public function


@pytest.fixture
def without_library(monkeypatch):
    """The package as it is where nothing was compiled."""
    reason = "attnkern/_C.abi3.so is missing"
    monkeypatch.setattr(table.cpu, "load_error", lambda *_: reason)
    for name in ("call", "forward", "backward"):
        monkeypatch.setattr(table.cpu, name, _library.by_the_operators)
    monkeypatch.setattr(failed, "_warned", set())
    return reason


def inputs(device="cpu"):
    return testing.make_inputs(1, 2, 5, 7, 8, device=device).tensors.values()


def test_the_kernels_are_here_to_be_tested():
    """Without it, every test of the C++ kernels would silently drop out of the suite."""
    found = {b.name: b for b in attnkern.backends()}
    assert found["cpu"].available, found["cpu"].why_not
    assert found["reference"].available


def test_backends_lists_names_devices_and_reasons(without_library):
    found = {b.name: b for b in attnkern.backends()}
    assert found["cpu"].device_types == ("cpu",)
    assert not found["cpu"].available
    assert without_library in found["cpu"].why_not
    assert found["reference"].available
    assert found["reference"].why_not is None


def test_the_first_that_does_not_refuse_is_chosen():
    explanation = attnkern.explain(*inputs())
    assert explanation.chosen == "cpu"
    assert explanation.refusals["cpu"] == []
    text = str(explanation)
    assert "query (1, 2, 5, 8) float32 cpu" in text
    assert "key (1, 2, 7, 8)" in text
    assert "cpu: chosen" in text
    assert any(line.strip().startswith("reference:") for line in text.splitlines())


def test_explain_shows_the_whole_call():
    q, k, v = inputs()
    mask = torch.ones(5, 7, dtype=torch.bool)
    text = str(
        attnkern.explain(q, k, v, mask, 0.25, scale=0.5, window=(3, None), alignment="bottom_right", softcap=30.0)
    )
    first = text.splitlines()[0]
    for part in ("mask", "bool", "0.25", "0.5", "left 3", "offset 2", "30"):
        assert part in first


def test_explain_computes_nothing_and_never_warns(without_library):
    q, k, v = inputs()
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explanation = attnkern.explain(q, k, v, dropout_p=0.5)
    assert explanation.chosen == "reference"
    assert torch.equal(torch.get_rng_state(), before)


def test_explain_raises_what_the_call_raises():
    q, k, v = inputs()
    for arguments, keywords in [((q, k, v.double()), {}), ((q, k, v), {"dropout_p": 2.0}), ((q, k, None), {})]:
        messages = []
        for function in (attnkern.explain, attnkern.attention):
            with pytest.raises((RuntimeError, TypeError)) as caught:
                function(*arguments, **keywords)
            messages.append((type(caught.value), str(caught.value)))
        assert messages[0] == messages[1]


def test_a_backend_asked_for_by_name_is_the_one_that_runs(target):
    explanation = attnkern.explain(*inputs(target.device), backend=target.backend)
    assert explanation.chosen == target.backend
    assert f"{target.backend}: chosen" in str(explanation)


def test_a_backend_asked_for_by_name_never_falls_back(without_library):
    q, k, v = inputs()
    with pytest.raises(RuntimeError) as caught:
        attnkern.scaled_dot_product_attention(q, k, v, backend="cpu")
    text = str(caught.value)
    assert "'cpu' cannot run this call" in text
    assert "query (1, 2, 5, 8) float32 cpu" in text
    assert without_library in text
    explanation = attnkern.explain(q, k, v, backend="cpu")
    assert explanation.chosen is None
    assert str(explanation) in text


def test_a_backend_of_another_device_refuses():
    q, k, v = inputs("meta")
    with pytest.raises(RuntimeError, match=r"(?s)'cpu' cannot run this call.*cpu: query is on meta"):
        attnkern.scaled_dot_product_attention(q, k, v, backend="cpu")
    assert attnkern.explain(q, k, v).chosen == "reference"


def test_falling_back_warns_once_per_reason(without_library, monkeypatch):
    q, k, v = inputs()
    with pytest.warns(attnkern.FallbackWarning, match="missing") as caught:
        out = attnkern.scaled_dot_product_attention(q, k, v)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    torch.testing.assert_close(out, testing.naive_attention(q, k, v)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attnkern.scaled_dot_product_attention(q, k, v)
        attnkern.attention(q, k, v, is_causal=True)
        attnkern.attention(q, k, v, backend="reference")
    monkeypatch.setattr(table.cpu, "load_error", lambda *_: "another reason")
    with pytest.warns(attnkern.FallbackWarning, match="another reason"):
        attnkern.scaled_dot_product_attention(q, k, v)


def test_the_warning_can_be_filtered(without_library):
    assert issubclass(attnkern.FallbackWarning, UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", attnkern.FallbackWarning)
        attnkern.scaled_dot_product_attention(*inputs())


def test_meta_tensors_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attnkern.scaled_dot_product_attention(*inputs("meta"))


def test_every_option_is_taken_by_the_kernels():
    """The cpu backend refuses nothing that a valid call can hold: a refusal added later needs its text tested here."""
    for seed in range(200):
        problem, options = random_problem(seed, dtypes=[torch.float32, torch.float64, torch.bfloat16, torch.float16])
        explanation = attnkern.explain(**problem.tensors, **options)
        assert explanation.chosen == "cpu", str(explanation)


def test_the_modules_of_the_package_are_behind_the_function():
    import attnkern.backends.cpu as module

    assert module is table.cpu
    assert attnkern.backends.cpu is table.cpu
    assert attnkern.backends()[0].name == "cpu"


def test_the_operator_refuses_another_backends_name():
    q, k, v = inputs()
    params = (0.5, 0.0, 2**62, 2**62, 0, 0.0)
    with pytest.raises(RuntimeError, match="backend"):
        torch.ops.attnkern.forward(*Inputs(q, k, v), *params, True, "triton")


def test_build_info_is_plain_data():
    info = attnkern.build_info()
    assert info["attnkern"] == attnkern.__version__
    assert info["torch"] == torch.__version__


def test_the_public_names():
    names = {
        "scaled_dot_product_attention",
        "attention",
        "merge_attention",
        "explain",
        "backends",
        "build_info",
        "FallbackWarning",
        "__version__",
        "use_as_sdpa",
        "sdpa_calls",
        "SdpaCalls",
        "attention_backward",
        "attention_weights",
        "varlen_attention",
        "alibi",
        "t5_relative_bias",
        "Mask",
        "PagedCache",
        "masks",
        "plot_attention",
        "nn",
    }
    assert set(attnkern.__all__) == names
    for name in names:
        assert getattr(attnkern, name).__doc__
