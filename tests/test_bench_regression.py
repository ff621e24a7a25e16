"""A small set of timings for pytest-benchmark: `--benchmark-save`, then `--benchmark-compare --benchmark-compare-fail`.

The sweep is bench's (`python -m bench`); these few catch a regression of a kernel or of the Python above it. Where
pytest-benchmark isn't installed, the calls run and their results are looked at, untimed.
"""

import pytest
import torch

from bench import providers
from bench.cases import case
from bench.provider import results

CASES = [
    (case("short call", 64, heads=1), "forward"),
    (case("short call", 64, heads=1), "both"),
    (case("forward fp32", 256, heads=2), "forward"),
    (case("forward bf16 causal", 256, heads=2, dtype="bf16", causal=True), "forward"),
    (case("backward fp32", 256, heads=2), "backward"),
    (case("backward bf16 causal", 256, heads=2, dtype="bf16", causal=True), "backward"),
    (case("decode", 1, 2048, heads=(8, 2), dim=128, dtype="bf16"), "forward"),
]
PROVIDERS = [p for p in providers.choose(None, torch.device("cpu")) if not p.name.startswith("sdpa")]


class Untimed:
    """In place of pytest-benchmark's fixture."""

    group = ""

    def pedantic(self, call, rounds, iterations, warmup_rounds):
        for _ in range(warmup_rounds):
            call()
        return call()


@pytest.fixture
def timer(request):
    installed = request.config.pluginmanager.hasplugin("benchmark")
    return request.getfixturevalue("benchmark") if installed else Untimed()


@pytest.mark.real_memory
@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p.name)
@pytest.mark.parametrize(("problem", "pass_name"), CASES, ids=lambda x: getattr(x, "name", x))
def test_speed(timer, problem, pass_name, provider):
    inputs = problem.inputs()
    grad_out = torch.randn(problem.batch, problem.heads_q, problem.seqlen_q, problem.head_dim_v).to(inputs.query)
    work = provider.work(problem, inputs, grad_out, pass_name)
    timer.group = f"{problem.name}, {pass_name}"
    result = timer.pedantic(work.call, rounds=20, iterations=5, warmup_rounds=2)
    for tensor in results(problem, pass_name, result).values():
        assert tensor.isfinite().all()
