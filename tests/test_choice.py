"""Which backend a CUDA call gets first, and how its kernels cut the call: for chips that aren't there."""

import ast
import importlib
import itertools
import json
import math
import re
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkern
import routes
from attnkern import ops, plain, testing
from attnkern.backends import choice, cpu, cuda, failed, triton
from attnkern.params import MAX_HEAD_DIM
from attnkern.problem import Problem
from attnkern.signatures import Derivatives, Inputs

table = importlib.import_module("attnkern.backends")  # as an attribute of the package it is the public function
ROOT = Path(__file__).parents[1]
KIB = 1024
A100 = cuda.Chip(80, 108, 164 * KIB, 163 * KIB)
H100 = cuda.Chip(90, 132, 228 * KIB, 227 * KIB)
RTX4090 = cuda.Chip(89, 128, 100 * KIB, 99 * KIB)
RTX5090 = cuda.Chip(120, 170, 100 * KIB, 99 * KIB)
CHIPS = {"a100": A100, "h100": H100, "rtx4090": RTX4090, "rtx5090": RTX5090}


def problem(*shape, heads_k=None, keys=None, size_v=None, gradient=False, dtype=torch.bfloat16, **options):
    batch, heads, length, size = shape
    q = torch.zeros(shape, dtype=dtype, requires_grad=gradient)
    k, v = (
        torch.zeros(batch, heads_k or heads, keys or length, size, dtype=dtype).requires_grad_(gradient) for _ in "kv"
    )
    return Problem.from_sdpa(q, k, v, enable_gqa=heads_k is not None, **options)


def kind_of(call, chip=A100):
    """A call on a chip as rules see it."""
    return choice.kind_of(call, cuda.plan_of(call, chip), chip.capability)


# ------------------------------------------------------------------------------------------------------------ the plans


@pytest.mark.parametrize("chip", [A100, RTX4090, RTX5090], ids=["a100", "rtx4090", "rtx5090"])
def test_a_forward_plan_names_tile_threads_memory_blocks_and_variant(chip):
    """1000 queries in tiles of 128 are 8 blocks for each of 8 heads; Q, K, V are 128 + 64 + 64 rows of 256 bytes."""
    (line,) = cuda.plan(problem(2, 4, 1000, 128), chip)
    assert line == (
        "forward, sm_80: 128 x 64 queries and keys, head size up to 128, 128 threads, "
        f"{(128 + 64 + 64) * 128 * 2} bytes of shared memory, {8 * 8} blocks, fast path"
    )
    (line,) = cuda.plan(problem(2, 4, 1000, 96, is_causal=True), chip)
    assert "head size up to 96," in line
    assert line.endswith(", fast path, longest rows first")
    (line,) = cuda.plan(problem(2, 4, 1000, 128, softcap=3.0), chip)
    assert line.endswith(", generic")


def test_hoppers_kernels_share_the_tiles_among_its_multiprocessors():
    (line,) = cuda.plan(problem(2, 16, 1000, 128), H100)
    assert line.startswith("forward, sm_90a: 128 x 128 queries and keys, head size up to 128, 384 threads, ")
    assert line.endswith(f" {H100.multiprocessors} blocks, {8 * 32} tiles, 2 stages, fast path, ping-pong")
    (line,) = cuda.plan(problem(2, 4, 1000, 128, dropout_p=0.5), H100)
    assert line.startswith("forward, sm_80: ")
    assert line.endswith(", generic (not sm_90a: there is dropout)")


def calls_near_the_limits_of_tma():
    """Calls of which Hopper's kernels take some."""
    for dtype, size, size_v in itertools.product((torch.bfloat16, torch.float32), (64, 100, 256), (64, 68, 256)):
        yield problem(1, 2, 70, size, size_v=size_v, dtype=dtype)
    yield problem(1, 2, 70, 264)
    yield problem(1, 4, 70, 64, heads_k=2)
    yield problem(1, 2, 70, 64, is_causal=True, softcap=2.0)
    yield problem(1, 2, 70, 64, dropout_p=0.5)
    yield problem(1, 2, 70, 64, attn_mask=torch.ones(70, 70, dtype=torch.bool))
    x = torch.zeros(2, 3, 70, 64, dtype=torch.bfloat16)
    views = {
        "offset": torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape),
        "offset by 16 bytes": torch.zeros(x.numel() + 8, dtype=x.dtype)[8:].view(x.shape),
        "stepped": torch.zeros(2, 3, 70, 128, dtype=x.dtype)[..., ::2],
        "one row for all": x[:, :, :1].expand_as(x),
        "one head for all": x[:, :1].expand_as(x),
        "rows apart": torch.zeros(2, 3, 70, 68, dtype=x.dtype)[..., :64],
        "length first": torch.zeros(2, 70, 3, 64, dtype=x.dtype).transpose(1, 2),
    }
    for view in views.values():
        for arguments in ((view, x, x), (x, view, x), (x, x, view)):
            yield Problem.from_sdpa(*arguments)


def test_hoppers_kernels_are_hoppers_alone():
    """Those that TMA can't feed go to the kernels for every chip, and say why."""
    families = []
    for call in calls_near_the_limits_of_tma():
        hopper, other = (cuda.plan_of(call, chip).launches[0] for chip in (H100, A100))
        assert other.family == "sm_80"
        if hopper.kernel != "decode":
            assert ("not sm_90a: " in str(hopper)) == (hopper.family == "sm_80")
            families.append(hopper.family)
    assert families.count("sm_90a") > 10 < families.count("sm_80")


def test_a_plan_is_made_once():
    call, other = problem(1, 2, 70, 64), problem(1, 2, 170, 64)
    assert cuda.plan_of(call, A100) is cuda.plan_of(problem(1, 2, 70, 64), A100)
    assert cuda.plan_of(call, A100) != cuda.plan_of(other, A100)


def test_unaligned_rows_and_biases_take_the_generic_kernel():
    x, mask = torch.zeros(1, 2, 200, 24, dtype=torch.bfloat16), torch.zeros(200, 200, dtype=torch.bfloat16)
    shifted = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    for arguments in ((x, shifted, x, None), (x, x, x, mask), (x[..., :20], x[..., :20], x[..., :20], None)):
        (line,) = cuda.plan(Problem.from_sdpa(*arguments), A100)
        assert line.endswith(", generic")
    assert cuda.plan(Problem.from_sdpa(x, x, x), A100)[0].endswith(", fast path")


@pytest.mark.parametrize("name", CHIPS)
def test_few_queries_split_the_keys_by_the_multiprocessors_of_the_chip(name):
    """One sequence with one key head is one block: the chip is filled by splits, each with a float32 row of results."""
    chip = CHIPS[name]
    (line,) = cuda.plan(problem(1, 8, 1, 64, heads_k=1, keys=65536), chip)
    assert line.startswith("decode, sm_80: 16 x 64 packed queries and keys, head size up to 64, 128 threads, ")
    assert ", 1 tile of queries, keys in " in line
    splits = int(line.split("keys in ")[1].split()[0])
    assert chip.multiprocessors / 2 < splits <= 4 * chip.multiprocessors
    assert f", {splits} blocks, " in line
    assert line.endswith(f"workspace of {4 * 8 * splits * 65} bytes, then combined")
    (line,) = cuda.plan(problem(64, 32, 1, 64, keys=256), chip)
    assert line.endswith("keys not split")


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_a_backward_plan_takes_the_tiles_that_fit_the_chip(chip):
    forward, delta, dkdv, dq = cuda.plan(problem(1, 4, 512, 128, heads_k=2, gradient=True), chip)
    assert forward.startswith("forward")
    assert delta.startswith("backward, any chip: delta")
    assert dkdv.startswith("backward dk dv, ")
    assert dq.startswith("backward dq, ")
    for line in (dkdv, dq):
        assert ("sm_90a" in line) == (chip is H100)
        assert int(line.split(" bytes")[0].split()[-1]) <= chip.shared_per_block
        if chip is not H100:
            assert line.endswith(", fast path, wide" if chip is A100 else ", fast path, narrow")
    assert f" {512 // 128 * 2} blocks" in dkdv  # of 128 keys, in each head of keys
    assert f" {512 // 128 * 4} blocks" in dq  # of 128 queries, in each head of queries
    sinks = torch.zeros(4, requires_grad=True)
    assert cuda.plan(problem(1, 4, 512, 128, sinks=sinks), chip)[1:] == [delta, "backward sinks, any chip: of delta"]
    kernels = [line.split(",")[0] for line in cuda.plan(problem(1, 4, 512, 128, gradient=True, sinks=sinks), chip)]
    assert kernels == ["forward", "backward", "backward sinks", "backward dk dv", "backward dq"]
    generic = cuda.plan(problem(1, 4, 512, 128, gradient=True, dropout_p=0.5), chip)
    reason = " (not sm_90a: there is dropout)" if chip is H100 else ""
    assert all(line.endswith(f", generic, narrow{reason}") for line in generic[2:])


def test_hoppers_backward_adds_up_dq_unless_results_must_repeat(monkeypatch):
    call = problem(1, 4, 512, 128, gradient=True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    (line,) = cuda.plan(call, H100)[2:]
    assert line.startswith("backward dk dv dq, sm_90a: ")
    assert ", dq added up in " in line
    assert [line.split(",")[0] for line in cuda.plan(call, A100)[2:]] == ["backward dk dv", "backward dq"]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert [line.split(",")[0] for line in cuda.plan(call, H100)[2:]] == ["backward dk dv", "backward dq"]


@pytest.mark.parametrize("deterministic", [True, False])
def test_hoppers_gradients_are_computed_again_where_a_call_excludes_something(monkeypatch, deterministic):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    own = 2 if deterministic else 1
    whole = {"is_causal": True, "alignment": "bottom_right"}
    for queries, keys, options in ((300, 300, {"is_causal": True}), (300, 500, whole), (300, 300, {"window": (9, 0)})):
        assert len(cuda.plan(problem(1, 2, queries, 128, keys=keys, gradient=True, **options), H100)[2:]) == own
    ranges = torch.tensor([0, 300], dtype=torch.int32).expand(300, 1, 2)
    excluding = (300, 500, {"is_causal": True}), (500, 300, whole), (300, 300, {"key_ranges": ranges})
    for queries, keys, options in excluding:
        call = problem(1, 2, queries, 128, keys=keys, gradient=True, **options)
        lines = cuda.plan(call, H100)[2:]
        assert len(lines) == own + 2
        for line, kernel in zip(lines[own:], ("backward dk dv, sm_80: ", "backward dq, sm_80: "), strict=True):
            assert line.startswith(kernel)
            assert line.endswith(", again, for tiles that hold NaN alone")
        assert not any("again" in line for line in cuda.plan(call, A100))


def test_a_backward_plan_has_what_the_call_asks_for():
    x = torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16)
    mask = torch.zeros(300, dtype=torch.bfloat16, requires_grad=True)
    lines = cuda.plan(Problem.from_sdpa(x, x, x, mask), H100)
    assert [line.split(",")[0] for line in lines] == ["forward", "backward", "backward bias"]
    with torch.no_grad():
        assert len(cuda.plan(Problem.from_sdpa(x, x, x, mask), H100)) == 1
    assert cuda.plan(problem(0, 2, 300, 64), H100) == ["no kernel: a dimension is empty"]


# ----------------------------------------------------------------------------------------------------------- the choice


@pytest.fixture
def on(monkeypatch):
    """on(capability): CUDA tensors, fake ones, of a chip that both GPU backends run on."""
    choice.use_rules(())

    def make(capability):
        chip = cuda.Chip(capability, 108, 164 * KIB, 163 * KIB)
        plans = triton._plans()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "chip", lambda index: chip)
        monkeypatch.setattr(cuda, "capability", lambda index: capability)
        monkeypatch.setattr(plans.launch, "capability", lambda index: capability)
        monkeypatch.setattr(plans.launch, "processors", lambda index: chip.multiprocessors)
        for backend in (cuda, triton):
            monkeypatch.setattr(backend, "unavailable", lambda: None)

    yield make
    choice.use_rules(())


def fake(*shape, gradient=False, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=gradient)


@pytest.mark.parametrize(("capability", "kind"), [(80, "generic"), (90, "fast path"), (120, "generic")])
def test_key_ranges_are_a_feature_but_for_hoppers_kernels(capability, kind):
    ranges = torch.zeros(1, 1, 256, 1, 2, dtype=torch.int32)
    call = problem(1, 2, 256, 64)
    chip = cuda.Chip(capability, *H100[1:])
    assert kind_of(call, chip).kind == "fast path"
    assert kind_of(call._replace(ranges=ranges), chip).kind == kind


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_select_and_explain_follow_the_rules(on, capability):
    on(capability)
    with FakeTensorMode():
        for shape, gradient in (((2, 4, 256, 64), False), ((2, 4, 256, 128), True), ((2, 4, 1, 256), False)):
            x = fake(*shape, gradient=gradient)
            call = Problem.from_sdpa(x, x, x)
            rule = choice.rule_for(choice.kind_of(call, cuda.plan_of(call), capability))
            explanation = table.explain(call)
            hopper = cuda.is_for_hopper(cuda.plan_of(call))
            first = next(name for name in rule.order if hopper or name != "cuda-sm90")
            assert explanation.chosen == table.select(call).NAME == first.removesuffix("-sm90")
            assert f"{explanation.chosen}: chosen {choice.told(rule)}" in str(explanation)
            assert ("as measured" in choice.told(rule)) == (capability == 90)
            order = [name for name in explanation.refusals if name != "cpu"]
            assert sorted(order) == ["cuda", "reference", "triton"]
            assert order[-1] == "reference"


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("gradient", [False, True])
def test_on_a_hopper_a_float_mask_goes_to_triton(on, gradient, size):
    """Hopper's own kernels take none. An H200 measured, at head size 128: cuda 142 and 85 TFLOP/s forward and backward,
    Triton 141 and 177."""
    on(90)
    with FakeTensorMode():
        x, mask = fake(2, 4, 256, size, gradient=gradient), fake(2, 4, 256, 256, gradient=gradient)
        assert table.select(Problem.from_sdpa(x, x, x, mask)) is triton
        assert table.select(Problem.from_sdpa(x, x, x)) is cuda


def test_on_a_hopper_the_largest_head_sizes_go_to_triton_without_gradients(on):
    """An H200 measured, at head size 512, forward: cuda 100 TFLOP/s, Triton 189; with gradients cuda 1.21 times it."""
    on(90)
    with FakeTensorMode():
        for size, gradient in itertools.product((264, 512), (False, True)):
            x = fake(1, 4, 256, size, gradient=gradient)
            assert table.select(Problem.from_sdpa(x, x, x)) is (cuda if gradient else triton)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_direct_calls_know_where_the_cuda_kernels_stand_first(on, monkeypatch, capability):
    """A byte for each kind, with Hopper's kernels or without, and head size: as csrc/cuda/direct_cuda.cpp reads it."""
    on(capability)
    told = {}
    monkeypatch.setattr(cuda, "stands_first", lambda index, table: told.update({index: table}))
    choice.tell(3)
    kinds = re.search(r"kKinds\[\] = \{(.*)\};", (ROOT / "csrc/cuda/kind.h").read_text())[1]
    assert ast.literal_eval(f"({kinds},)") == choice.KINDS
    assert len(told[3]) == 3 * 2 * (MAX_HEAD_DIM + 1)
    for (n, kind), hopper, size in itertools.product(enumerate(choice.KINDS), (0, 1), (1, 64, 65, 128, 129, 257, 512)):
        rule = choice.rule_for(choice.CallKind(capability, False, kind, size))
        first = next(name for name in rule.order if hopper or name != "cuda-sm90")
        assert told[3][(2 * n + hopper) * (MAX_HEAD_DIM + 1) + size] == (first != "triton"), (kind, hopper, size)
    choice.use_rules(())
    assert told == {3: None}


def test_without_triton_the_cuda_kernels_stand_first(on, monkeypatch):
    on(80)
    monkeypatch.setattr(triton, "unavailable", lambda: triton.NOT_INSTALLED)
    told = []
    monkeypatch.setattr(cuda, "stands_first", lambda index, table: told.append(table))
    choice.tell(0)
    assert set(told[0]) == {1}


def test_a_refusal_outranks_the_choice(on):
    on(80)
    choice.use_rules([choice.Rule((), (), (), choice.ANY, ("cuda", "triton"), "tried here")])
    with FakeTensorMode():
        x, wide = fake(1, 1, 200, 64), fake(1, 1, 200, 64, dtype=torch.float64)
        assert table.select(Problem.from_sdpa(x, x, x)) is cuda
        assert table.explain(Problem.from_sdpa(wide, wide, wide)).chosen == "reference"
        assert table.select(Problem.from_sdpa(x, x, x), "triton") is triton
        assert table.explain(Problem.from_sdpa(x, x, x), "triton").order == ""  # asked for, not chosen


def test_what_rules_tell_apart():
    assert kind_of(problem(1, 2, 200, 64)) == (80, False, "fast path", 64)
    assert kind_of(problem(1, 2, 200, 64, gradient=True)) == (80, True, "fast path", 64)
    assert kind_of(problem(1, 8, 4, 64, keys=300)).kind == "decode"
    assert kind_of(problem(1, 64, 2, 64, heads_k=1, keys=300)).kind == "decode"
    assert kind_of(problem(1, 64, 5, 64, heads_k=1, keys=300)).kind == "fast path"
    assert kind_of(problem(1, 8, 4, 64, keys=300, gradient=True)).kind == "generic"
    assert kind_of(problem(1, 2, 200, 64, softcap=2.0)).kind == "generic"
    assert kind_of(problem(1, 2, 200, 64, dropout_p=0.5)).kind == "generic"
    with torch.no_grad():
        assert not kind_of(problem(1, 2, 200, 64, gradient=True)).training


def test_rules_go_by_the_plan_and_guess_nothing():
    """What the kernels tell apart and shapes don't: the sign of the scale, and rows that aren't whole vectors."""
    for chip in (A100, RTX4090, H100):
        assert kind_of(problem(1, 2, 200, 64, scale=0.5), chip).kind == "fast path"
    assert kind_of(problem(1, 2, 200, 64, scale=-0.5)).kind == "generic"
    assert kind_of(problem(1, 2, 200, 63)).kind == "generic"


def test_every_call_has_a_rule_and_no_rule_is_in_vain():
    def calls(capabilities):
        sizes = [size for rule in choice.RULES for size in rule.head_dims]
        return [
            choice.CallKind(capability, training, kind, size)
            for capability in capabilities
            for training in (False, True)
            for kind in choice.KINDS
            for size in (1, 64, 128, 256, 512, *sizes)
        ]

    assert {choice.rule_for(call) for call in calls((80, 86, 89, 90, 100, 103, 120, 130))} == set(choice.RULES)
    assert all(rule.because and "reference" not in rule.order for rule in choice.RULES)


def test_measured_rules_are_kept_as_json(on, tmp_path):
    on(90)
    rules = [choice.Rule((90,), ("training",), ("fast path", "generic"), (65, 128), ("cuda", "triton"), "1.2x")]
    choice.dump(rules, tmp_path / "rules.json", {"device": "chip", "torch": "2.13"})
    choice.use_rules(*choice.load(tmp_path / "rules.json"))
    with FakeTensorMode():
        x = fake(1, 1, 200, 128, gradient=True)
        explanation = table.explain(Problem.from_sdpa(x, x, x))
        assert explanation.chosen == "cuda"
        assert explanation.order == "as measured on chip, 2.13 (1.2x)"
        x = fake(1, 1, 200, 64, gradient=True)
        assert choice.rule_for(kind_of(Problem.from_sdpa(x, x, x), H100)) in choice.RULES
    text = json.loads((tmp_path / "rules.json").read_text())
    text["rules"][0]["order"] = ["cublas"]
    (tmp_path / "rules.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=r"order may hold 'triton', 'cuda', .*, got 'cublas'"):
        choice.load(tmp_path / "rules.json")


def test_a_graph_leaves_the_choice_to_its_calls(on, monkeypatch):
    """A trace sees no addresses, and the graph serves other sizes than those it was traced with."""
    on(90)
    with FakeTensorMode():
        x = fake(2, 4, 256, 64)
        call = Problem.from_sdpa(x, x, x)
        assert table.select(call) is cuda
        assert table.name_for_operators(cuda, call, None) == table.FIRST["cuda"]
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert table.name_for_operators(table.select(call), call, None) == table.AT_RUN_TIME
        assert table.name_for_operators(cuda, call, "cuda") == "cuda"


def test_an_operator_that_chooses_at_run_time():
    q, k, v = testing.make_inputs(1, 2, 40, 70, 64, dtype=torch.bfloat16).tensors.values()
    params, grad_out = Problem.from_sdpa(q, k, v).params, torch.randn_like(q)
    with routes.cuda(90) as recorder:
        results = {}
        for name in ("cuda", table.AT_RUN_TIME):
            out, lse = ops.route_forward(*Inputs(q, k, v), *params, True, name)
            grads = ops.route_backward(grad_out, None, *Inputs(q, k, v), out, lse, *params, 7, name)
            second = ops.route_second_backward(
                *Derivatives(*grads[:3]), grad_out, None, *Inputs(q, k, v), out, lse, *params, 7, name
            )
            results[name] = (out, lse, *grads, *second)
        half = len(recorder.launches) // 2
        assert [x.name for x in recorder.launches[:half]] == [x.name for x in recorder.launches[half:]]
    assert all(map(torch.equal, *results.values()))


# ------------------------------------------------------------------------------------------------ what cannot be built


@pytest.fixture
def unbuilt(monkeypatch):
    """unbuilt(*names): Triton cannot compile the functions of such names (none given: any) for the simulated Hopper,
    whose calls choose among the backends. Gives the names that it was asked for, in order."""
    launch = triton._plans().launch
    monkeypatch.setattr(launch, "failures", {})
    monkeypatch.setattr(launch, "_variants", {})
    for plan in ("forward_plan", "backward_plan", "tangent_plan", "second_backward_plan"):
        getattr(triton._plans(), plan).cache_clear()
    monkeypatch.setattr(failed, "_warned", set())

    monkeypatch.setattr(cpu, "call", lambda *given: None)  # the CPU tensors stand for CUDA's

    def name(backend, call, asked):  # as of CUDA tensors
        return table.FIRST[backend.NAME] if asked is None else backend.NAME

    monkeypatch.setattr(table, "name_for_operators", name)
    asked, compile = [], launch.triton.compile

    def make(*names):
        def refuse(source, **options):
            name = source.fn.__name__
            if not names or name in names:
                asked.append(name)
                raise TypeError("cannot convert None")
            return compile(source, **options)

        monkeypatch.setattr(launch.triton, "compile", refuse)
        return asked

    with routes.cuda(90), routes.triton(90):
        yield make
    for plan in ("forward_plan", "backward_plan", "tangent_plan", "second_backward_plan"):
        getattr(triton._plans(), plan).cache_clear()


REASON = r"does not compile for sm_90 \(TypeError: cannot convert None\)"


def leaves():
    return [x.requires_grad_() for x in testing.make_inputs(1, 2, 40, 70, 64, dtype=torch.bfloat16).tensors.values()]


def derived(tensors, **options):
    out = attnkern.attention(*tensors, **options)
    return (out, *torch.autograd.grad(out.sum(), tensors))


def test_the_next_backend_takes_what_one_cannot_build(unbuilt):
    """Said once, not tried again, and told by `explain`."""
    asked, tensors = unbuilt(), leaves()
    with pytest.warns(attnkern.FallbackWarning, match=f"cuda runs this attention .*kernel {REASON}") as caught:
        got = derived(tensors)
    assert len(caught) == 2  # and delta_kernel: a gradient's kernels are others
    assert asked == ["forward_kernel", "delta_kernel"]
    explanation = attnkern.explain(*tensors)
    assert explanation.chosen == "cuda"
    assert "forward_kernel does not compile for sm_90" in explanation.refusals["triton"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = derived(tensors)
    assert asked == ["forward_kernel", "delta_kernel"]
    assert all(map(torch.equal, got, again))
    assert all(map(torch.equal, got, derived(tensors, backend="cuda")))


def test_a_backend_that_was_asked_for_raises_what_it_cannot_build(unbuilt):
    asked, tensors = unbuilt(), leaves()
    with pytest.raises(RuntimeError, match=f"attnkern: backend 'triton' cannot run this call: .*{REASON}"):
        derived(tensors, backend="triton")
    with pytest.raises(RuntimeError, match="attnkern: backend 'triton' cannot run this call"):
        derived(tensors, backend="triton")
    assert asked == ["forward_kernel"]


@pytest.mark.parametrize("name", [table.AT_RUN_TIME, table.FIRST["triton"]])
def test_operators_go_on_where_a_kernel_of_a_later_pass_cannot_be_built(unbuilt, name):
    """The results of one backend's forward pass are what another one's backward pass needs."""
    unbuilt("delta_kernel")
    q, k, v = (x.detach() for x in leaves())
    params = Problem.from_sdpa(q, k, v).params
    choice.use_rules([choice.Rule((), (), (), choice.ANY, ("triton", "cuda"), "tried here")])
    out, lse = ops.route_forward(*Inputs(q, k, v), *params, True, name)
    given = torch.ones_like(out), None, *Inputs(q, k, v), out, lse, *params, 7
    with pytest.warns(attnkern.FallbackWarning, match="cuda runs .*delta_kernel"):
        grads = ops.route_backward(*given, name)
    assert all(map(torch.equal, grads, ops.route_backward(*given, "cuda")))


@pytest.mark.parametrize("name", [table.AT_RUN_TIME, table.FIRST["triton"]])
def test_plain_torch_is_the_last_to_take_a_call_of_an_operator(unbuilt, name):
    unbuilt()
    q, k, v = (x.detach() for x in leaves())
    params = Problem.from_sdpa(q, k, v).params
    with (
        patch.dict(table.TABLE, cpu=(triton, table.reference)),  # undone before the routes: monkeypatch would be after
        pytest.warns(attnkern.FallbackWarning, match=f"plain torch runs this attention.*{REASON}"),
    ):
        out, lse = ops.route_forward(*Inputs(q, k, v), *params, True, name)
    assert torch.equal(out, plain.forward(Inputs(q, k, v), params, True)[0])
    given = torch.ones_like(out), None, *Inputs(q, k, v), out, lse, *params, 7
    with pytest.warns(attnkern.FallbackWarning, match="delta_kernel"):
        grads = ops.route_backward(*given, name)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape, (0,), (0,)]


@pytest.mark.parametrize(
    ("options", "mask", "ranges"),
    [
        ({"is_causal": True}, None, None),
        ({"softcap": 2.0, "window": (30, 3)}, ("float", "1HLS"), None),
        ({"is_causal": True}, ("bool", "B1LS"), [[[3, 20]], [[5, 5]]]),
        ({"is_causal": True}, ("float", "1HLS"), [[[3, 20]], [[5, 5]]]),
    ],
)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_backward_operator_in_plain_torch_is_that_of_the_kernels(options, mask, ranges, p):
    """Whatever lies where no query attends."""
    inputs = testing.make_inputs(2, 4, 60, 70, 32, heads_k=2, mask=mask, seed=3)
    ranges = None if ranges is None else torch.tensor(ranges, dtype=torch.int32).expand(60 // 2, 2, 1, 2).flatten(0, 1)
    dead = testing.unattended(**inputs.tensors, **options, key_ranges=ranges)
    tensors = {n: x.masked_fill(dead[n], math.nan) if n in dead else x for n, x in inputs.tensors.items()}
    problem = Problem.from_sdpa(**tensors, **options, dropout_p=p, enable_gqa=True, key_ranges=ranges)
    given, params = problem.inputs(torch.tensor([5]) if p else None), problem.params
    out, lse = ops.forward(*given, *params, True, "cpu")
    generator = torch.Generator().manual_seed(1)
    grad_out, grad_lse = (torch.randn(x.shape, generator=generator) for x in (out, lse))
    grad_out = grad_out.masked_fill(dead["query"], math.nan)
    grad_mask = 15 if given.bias is not None and given.bias.is_floating_point() else 7
    want = ops.backward(grad_out, grad_lse, *given, out, lse, *params, grad_mask, "cpu")
    made = plain.backward(grad_out, grad_lse, given, out, lse, params, grad_mask)
    for a, b in zip(made, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
        assert a.stride() == b.stride()
