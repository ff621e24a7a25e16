"""The CUDA C++ kernels (csrc/cuda) with their host code, compiled for a GPU and run on the CPU (tests/launches)."""

import dataclasses
import importlib

import launches
import pytest
import torch
from conftest import Target

import attnkern
from attnkern import ops, testing

table = importlib.import_module("attnkern.backends")  # as an attribute of the package it is the public function
cuda = table.cuda
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Simulated(Target):
    """The CUDA backend on CPU tensors."""

    recorder: launches.Recorder = dataclasses.field(default_factory=launches.Recorder)


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


CASES = {
    "plain": ((1, 2, 100, 70, 64), {}, {}),
    "causal": ((1, 2, 150, 150, 64), {"is_causal": True}, {}),
    "window": ((1, 2, 160, 160, 64), {"is_causal": True, "window": (40, None)}, {}),
    "bottom right": ((1, 2, 40, 150, 32), {"is_causal": True, "alignment": "bottom_right"}, {}),
    "empty rows": ((1, 2, 150, 50, 32), {"is_causal": True, "alignment": "bottom_right"}, {}),
    "softcap": ((1, 2, 90, 70, 80, 96), {"softcap": 3.0}, {"dtype": FP16}),
    "bias": ((2, 2, 70, 70, 64), {}, {"mask": ("float", "BHLS")}),
    "bias of all": ((2, 2, 70, 70, 64), {}, {"mask": ("float", "1HLS"), "mask_dtype": FP32}),
    "bool": ((2, 2, 70, 70, 64), {}, {"mask": ("bool", "B11S")}),
    "grouped": ((1, 6, 70, 70, 64), {"enable_gqa": True}, {"heads_k": 2, "heads_v": 3}),
    "length first": ((1, 3, 70, 70, 64), {}, {"layout": "blhd"}),
    "offset": ((1, 2, 70, 70, 24), {}, {"layout": "offset"}),
    "stepped": ((1, 2, 70, 70, 24), {}, {"layout": "stepped"}),
    "d96": ((1, 1, 130, 100, 96), {}, {}),
    "d128": ((1, 1, 130, 130, 128), {}, {"dtype": FP16}),
    "d192": ((1, 1, 70, 70, 192, 128), {}, {}),
    "d256": ((1, 1, 70, 70, 256), {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_first(simulated, name):
    sizes, options, more = CASES[name]
    simulated.check(simulated.inputs(*sizes, **{"dtype": BF16, **more}), **options)
    assert simulated.recorder.reports
