"""The CUDA C++ kernels (csrc/cuda) with their host code, compiled for a GPU and run on the CPU (tests/launches)."""

import dataclasses
import importlib
import re

import pytest
import torch

import launches
import ptxsim
from attnkern import ops, rng, testing
from attnkern.problem import Problem
from conftest import Target

table = importlib.import_module("attnkern.backends")  # as an attribute of the package it is the public function
cuda = table.cuda
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Simulated(Target):
    """The CUDA backend on CPU tensors; the hazard checker is on in every launch."""

    recorder: launches.Recorder = dataclasses.field(default_factory=launches.Recorder)

    def kernels(self):
        """What was launched: template names with their arguments, namespaces and parameters left out."""
        names = [launch.name for launch in self.recorder.launches]
        return [re.search(r"\d(delta|forward|decode|combine|dkdv|dq|bias_gradient)_kernel", name)[1] for name in names]


@pytest.fixture
def simulated(request, monkeypatch):
    """Routes `backend="cuda"` on CPU tensors through the product's host code and the simulator of one GPU."""
    recorder = launches.Recorder(getattr(request, "param", 80))
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "capability", lambda index: recorder.target)
    monkeypatch.setattr(cuda, "run", recorder.run)
    monkeypatch.setitem(table.TABLE, "cpu", (cuda, *table.TABLE["cpu"]))
    monkeypatch.setattr(ops, "forward", ops.route_forward)
    monkeypatch.setattr(ops, "backward", ops.route_backward)
    return Simulated("cuda", "cpu", recorder)


# name: sizes (batch, heads, queries, keys, head size[, of values]), options of the call, options of the inputs.
# Lengths are no multiples of a tile, and the queries too many for the kernels of decode.cu.
FEATURES = {
    "plain": ((1, 2, 100, 70, 64), {}, {}),
    "fp16": ((1, 1, 100, 70, 64), {}, {"dtype": FP16}),
    "causal": ((1, 2, 150, 150, 64), {"is_causal": True}, {}),
    "window": ((1, 2, 160, 160, 64), {"is_causal": True, "window": (40, None)}, {}),
    "bottom right": ((1, 2, 70, 150, 32), {"is_causal": True, "alignment": "bottom_right"}, {}),
    "rows without keys": ((1, 2, 150, 50, 32), {"is_causal": True, "alignment": "bottom_right"}, {}),
    "softcap": ((1, 2, 90, 70, 80, 96), {"softcap": 3.0}, {"dtype": FP16}),
    "negative scale": ((1, 1, 70, 70, 32), {"scale": -0.5, "is_causal": True}, {}),
    "bias": ((2, 2, 70, 70, 64), {}, {"mask": ("float", "BHLS")}),
    "float32 bias of all elements": ((2, 2, 70, 70, 64), {}, {"mask": ("float", "1HLS"), "mask_dtype": FP32}),
    "bias of keys": ((2, 2, 70, 70, 64), {"window": (30, 9)}, {"mask": ("float", "B11S")}),
    "bool mask": ((2, 2, 70, 70, 64), {}, {"mask": ("bool", "B11S")}),
    "bool mask and softcap": ((1, 2, 70, 70, 32), {"softcap": 2.0}, {"mask": ("bool", "BHLS")}),
    "grouped": ((1, 6, 70, 70, 64), {"enable_gqa": True}, {"heads_k": 2, "heads_v": 2}),
    "grouped unlike": ((1, 6, 70, 70, 64), {"enable_gqa": True}, {"heads_k": 2, "heads_v": 3}),
    "length first": ((1, 3, 70, 70, 64), {}, {"layout": "blhd"}),
    "unaligned rows": ((1, 2, 70, 70, 24), {}, {"layout": "offset"}),
    "columns apart": ((1, 2, 70, 70, 24), {}, {"layout": "stepped"}),
    "odd head size": ((1, 2, 70, 70, 21, 13), {"is_causal": True}, {}),
    "one key": ((1, 2, 70, 1, 32), {}, {}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(simulated, name):
    sizes, options, more = FEATURES[name]
    simulated.check(simulated.inputs(*sizes, **{"dtype": BF16, **more}), **options)
    assert {"forward", "delta", "dkdv", "dq"} <= set(simulated.kernels())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("variant", ["plain", "general"])
@pytest.mark.parametrize("size", [8, 64, 72, 128, 136, 256])
def test_head_sizes(simulated, size, variant, dtype):
    """Every class of tile, filled and not."""
    options = {"is_causal": True} if variant == "plain" else {"softcap": 5.0}
    other = size if variant == "plain" else max(size - 16, 8)
    simulated.check(simulated.inputs(1, 1, 65, 65, size, other, dtype=dtype), **options)


@pytest.mark.parametrize("simulated", [86, 90, 120], indirect=True)
def test_other_chips(simulated):
    """Less shared memory takes other tiles; each must fit where it is launched."""
    simulated.check(simulated.inputs(1, 1, 70, 70, 128, dtype=BF16), is_causal=True)
    simulated.check(simulated.inputs(1, 1, 65, 65, 256, dtype=BF16))


def test_dropout(simulated):
    """Bit for bit the entries of `rng.keep_mask`, in the forward and the backward pass."""
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    keep = rng.keep_mask(rng.draw_seed(torch.device("cpu")), 0.3, 2, 4, 70, 90)
    options = {"dropout_p": 0.3, "enable_gqa": True}
    inputs = simulated.inputs(2, 4, 70, 90, 64, 90, heads_k=2, dtype=BF16)
    inputs = dataclasses.replace(inputs, value=torch.eye(90, dtype=BF16).expand(2, 2, 90, 90))
    torch.manual_seed(seed)
    assert torch.equal(simulated.sdpa(*list(inputs.tensors.values()), **options) != 0, keep)
    torch.manual_seed(seed)
    simulated.check(inputs, **options, keep=keep)


# The same with few queries. A split of the keys is a block of the grid; the simulated chip has eight multiprocessors.
DECODE = {
    "one query": ((2, 2, 1, 700, 64), {}, {}),
    "grouped": ((1, 8, 1, 500, 64), {"enable_gqa": True}, {"heads_k": 2}),
    "several queries": ((1, 6, 5, 300, 128), {"is_causal": True, "alignment": "bottom_right"}, {"dtype": FP16}),
    "two tiles of rows": ((1, 8, 7, 150, 32), {"enable_gqa": True, "window": (60, 20)}, {"heads_k": 2}),
    "window": ((1, 2, 1, 700, 64), {"window": (90, None), "alignment": "bottom_right"}, {}),
    "rows without keys": ((1, 2, 9, 5, 32), {"is_causal": True, "alignment": "bottom_right"}, {}),
    "bias": ((2, 4, 2, 130, 64), {"softcap": 4.0, "enable_gqa": True}, {"heads_k": 2, "mask": ("float", "1HLS")}),
    "bool mask": ((1, 2, 2, 200, 64), {}, {"mask": ("bool", "BHLS")}),
    "unaligned rows": ((1, 2, 1, 130, 24), {}, {"layout": "offset"}),
    "unlike head sizes": ((1, 2, 1, 130, 80, 200), {}, {}),
    "length first": ((1, 4, 3, 130, 256), {}, {"layout": "blhd"}),
    "one block": ((1, 2, 3, 40, 64), {}, {}),
}


@pytest.mark.parametrize("name", DECODE)
def test_decode(simulated, name):
    sizes, options, more = DECODE[name]
    simulated.check(simulated.inputs(*sizes, **{"dtype": BF16, **more}), **options)
    assert simulated.kernels()[0] == "decode"
    if name in ("one query", "grouped"):  # long enough for a second kernel to be worth it
        assert simulated.kernels()[1] == "combine"


def test_splits_change_nothing_but_rounding(simulated):
    """Any number of splits is right, those that find no keys included."""
    inputs = simulated.inputs(1, 2, 2, 200, 64, dtype=BF16)
    q, k, v = inputs.tensors.values()
    want = testing.expected(q, k, v)
    score = (*Problem.from_sdpa(q, k, v, None, 0.0).score, False)
    for splits in (1, 2, 3, 7, 128):
        out, lse = torch.empty(1, 2, 2, 64, dtype=BF16), torch.empty(1, 2, 2)
        written = (out, lse, torch.empty(4 * splits * 65))
        tensors = (q, k, v, None, None, *written)
        simulated.recorder.run(torch.ops.attnkern.cuda_forward, tensors, splits, *score, results=written)
        for name, actual in (("out", out), ("lse", lse)):
            exact, baseline, unit = want[name].exact, want[name].baseline, want[name].unit
            testing.assert_within_rule(actual, exact, baseline, unit=unit, name=f"{name} of {splits} splits")


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 70, 0), (2, 2, 5, 0)], ids=str)
def test_empty_inputs(simulated, shape):
    simulated.check(simulated.inputs(*shape, 8, dtype=BF16, mask=("float", "BHLS")))


SUBSETS = [("query",), ("key",), ("value",), ("attn_mask",), ("query", "attn_mask"), ("key", "value")]


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_only_what_is_asked_for(simulated, subset):
    """A gradient is the same, whatever else is asked for."""
    inputs = simulated.inputs(1, 2, 70, 70, 32, dtype=BF16, mask=("float", "1HLS"))
    grads = []
    for wanted in (subset, tuple(inputs.tensors)):
        leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.tensors.items()}
        out = simulated.sdpa(*leaves.values())
        grads.append(torch.autograd.grad(out, [leaves[name] for name in subset], torch.ones_like(out)))
    assert all(map(torch.equal, *grads))


def test_rows_of_heads_are_dealt_out_longest_first(simulated):
    """With a causal band the first blocks of the grid are the last rows of all heads."""
    q = torch.zeros(2, 3, 300, 64, dtype=BF16)
    simulated.recorder.simulate = False
    simulated.sdpa(q, q, q, is_causal=True)
    simulated.sdpa(q, q, q)
    causal, plain = simulated.recorder.launches
    assert causal.grid == plain.grid == (3 * 2 * 3, 1, 1)
    assert [causal.parameters[0][-8], plain.parameters[0][-8]] == [1, 0]  # the last member, heads_first


def test_no_bank_conflicts(simulated):
    """Swizzled tiles: neither ldmatrix nor cp.async makes lanes wait for each other, in any class of tile."""
    for size in (32, 64, 96, 128, 192, 256):
        simulated.check(simulated.inputs(1, 1, 128, 128, size, dtype=BF16), gradients=False)
    assert [report.bank_conflicts for report in simulated.recorder.reports] == [0] * 6


REFUSED = {
    "query is float32": {"dtype": FP32},
    "head size 264 is above 256": {"size": 264},
}


@pytest.mark.parametrize("why", REFUSED)
def test_refusals(simulated, why):
    given = {"dtype": BF16, "size": 32, **REFUSED[why]}
    x = torch.zeros(1, 1, 3, given["size"], dtype=given["dtype"])
    with pytest.raises(RuntimeError, match=why):
        simulated.sdpa(x, x, x)


def test_notes_say_what_is_slow(simulated):
    x = torch.zeros(1, 2, 70, 24, dtype=BF16)
    problem = Problem.from_sdpa(x, testing.with_layout(x, "offset"), x)
    assert [note.split(",")[0] for note in cuda.notes(problem)] == ["reads key element by element"]


@pytest.mark.parametrize("barrier", [0, 1, 2])
def test_a_missing_barrier_is_found(simulated, barrier):
    """Each of the forward loop's barriers is needed, and these tests would see it go."""
    q = torch.randn(1, 1, 128, 64, dtype=BF16)
    simulated.recorder.simulate = False
    out = simulated.sdpa(q, q, q)
    (launch,) = simulated.recorder.launches
    start = launch.kernel.text.index(f".entry {launch.name}(")
    body = launch.kernel.text[start:]
    found = [match.span() for match in re.finditer(r"bar(rier)?\.sync\s+0;", body)]
    first, last = found[barrier]
    broken = launch.kernel.with_text(launch.kernel.text[:start] + body[:first] + body[last:])
    with pytest.raises(ptxsim.Hazard):
        ptxsim.launch(
            broken,
            launch.grid,
            *launch.parameters,
            block=launch.block,
            shared=launch.shared,
            tensors=[q, out],
        )
