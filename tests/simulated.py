"""Backends of GPUs on CPU tensors: their kernels, compiled for a GPU, run in the simulator (tests/ptxsim) with hazards
checked."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import launches
import routes
from conftest import Target

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Cuda(Target):
    """The CUDA backend and the recorder of its launches."""

    recorder: launches.Recorder = dataclasses.field(default_factory=launches.Recorder)

    def kernels(self, past: int = 0) -> list[str]:
        """What was launched behind so many: names of templates without their namespaces, "_kernel" and parameters."""
        names = [launch.name for launch in self.recorder.launches[past:]]
        return [re.search(r"\d([a-z_]+(?:fp32|sm90)?)_kernel", name)[1] for name in names]

    def bank_conflicts(self) -> int:
        return sum(report.bank_conflicts for report in self.recorder.reports)


@contextlib.contextmanager
def cuda(gpu: int = 80) -> Iterator[Cuda]:
    """`backend="cuda"` on CPU tensors by its shipped host code and the simulator of one GPU."""
    with routes.cuda(gpu) as recorder:
        yield Cuda("cuda", "cpu", recorder)


@dataclasses.dataclass(frozen=True)
class Triton(Target):
    """The Triton backend and the kernels that it launched, in order."""

    launched: list[Any] = dataclasses.field(default_factory=list)

    def kernels(self) -> list[str]:
        return [kernel.function.__name__ for kernel in self.launched]


@contextlib.contextmanager
def triton(gpu: int = 80) -> Iterator[Triton]:
    """`backend="triton"` on CPU tensors by kernels that are compiled for one GPU."""
    target = Triton("triton", "cpu")
    with routes.triton(gpu, target.launched.append):
        yield target


@pytest.fixture
def simulated(request: Any) -> Iterator[Cuda]:
    """`cuda`, of another GPU by an indirect parameter."""
    with cuda(getattr(request, "param", 80)) as target:
        yield target


@contextlib.contextmanager
def any_order() -> Iterator[None]:
    """torch's default. Tests run in its deterministic mode, for the memory that it poisons there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
