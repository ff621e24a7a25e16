"""Gradients of the Hopper kernels (csrc/cuda/backward_sm90.cu) with their host code, run by the simulator of an sm_90
with hazards checked, against float64 by the one tolerance rule."""

import contextlib
import dataclasses
import re

import pytest
import torch

import launches
import ptxsim
from attnkern import testing
from gate import cuda_sm90_backward as gate_cases
from matrix import call, tagged
from ptxsim import mutate, planted_bugs
from simulated import BF16, any_order, simulated  # noqa: F401

pytestmark = pytest.mark.parametrize("simulated", [90], indirect=True)


@pytest.mark.parametrize("softcap", [0.0, 5.0], ids=["fast path", "softcap"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_head_sizes(simulated, head_dim, softcap):  # noqa: F811
    """Every width of tile, with more queries and keys than a block has rows; no bank conflict."""
    simulated.check_call(call("", "", (1, 1, 150, 140, head_dim, head_dim - 8), causal=True, softcap=softcap))
    claimed = {case.name: case.source for case in gate_cases.cases()}
    last = list(zip(simulated.recorder.launches, simulated.recorder.reports, strict=True))[-2:]
    for (launch, report), kind in zip(last, ("dkdv", "dq"), strict=True):
        source = claimed[f"backward {kind} d{head_dim} sm_90{' generic' if softcap else ''}"]
        assert launch.shared == source.shared
        assert report.bank_conflicts == 0


def test_shared_memory_of_one_walk(simulated):  # noqa: F811
    """As the gate was told."""
    simulated.recorder.simulate = False
    q = torch.zeros(1, 1, 70, 128, dtype=BF16, requires_grad=True)
    with any_order():
        simulated.attention(q, q, q).sum().backward()
    source = next(case.source for case in gate_cases.cases() if case.name == "backward fused d128 sm_90")
    assert simulated.recorder.launches[simulated.kernels().index("fused_sm90")].shared == source.shared


def test_only_what_is_asked_for_is_launched(simulated):  # noqa: F811
    for names, kernel in [(("query",), "dq_sm90"), (("key",), "dkdv_sm90"), (("value",), "dkdv_sm90")]:
        inputs = simulated.inputs(1, 1, 33, 40, 64, dtype=BF16)
        leaves = {n: x.detach().requires_grad_(n in names) for n, x in inputs.tensors.items()}
        out = simulated.attention(**leaves)
        before = len(simulated.recorder.launches)
        (grad,) = torch.autograd.grad(out.sum(), [leaves[n] for n in names])
        assert torch.isfinite(grad).all()
        assert simulated.kernels(before) == ["delta", kernel]


def test_inputs_that_repeat(simulated):  # noqa: F811
    """Strides of 0 over heads and batch, as `expand` makes them: their tensor maps have one entry there."""
    q, k, v = (torch.randn(1, 1, n, 64, dtype=BF16).expand(2, 3, n, 64).requires_grad_() for n in (70, 90, 90))
    out = simulated.attention(q, k, v)
    grad = torch.randn(1, 1, 70, 64, dtype=BF16).expand(2, 3, 70, 64)
    want = testing.expected(q, k, v, grad_out=grad)
    for name, actual in zip(("query", "key", "value"), torch.autograd.grad(out, (q, k, v), grad), strict=True):
        assert_gradient(actual, want[name], name, "expanded inputs")
    assert simulated.kernels()[-2:] == ["dkdv_sm90", "dq_sm90"]


@pytest.mark.parametrize("name", tagged("sm90-backward-refused"))
def test_what_the_plan_refuses_goes_to_the_other_kernels(simulated, name):  # noqa: F811
    simulated.recorder.simulate = False
    this = tagged("sm90-backward-refused")[name]
    leaves = {n: x.requires_grad_(x.is_floating_point()) for n, x in this.inputs().tensors.items()}
    simulated.attention(**leaves, **this.options).sum().backward()
    assert {"dkdv", "dq"} <= set(simulated.kernels())
    assert not {"dkdv_sm90", "dq_sm90"} & set(simulated.kernels())


def assert_gradient(actual, want, name, recipe):
    want.check(actual, gradient=True, name=f"gradient of {name}", recipe=recipe)


@dataclasses.dataclass
class Replay:
    """Launches of one backward pass, to be run again with other schedules or other PTX."""

    launches: dict[str, launches.Launch]
    tensors: list[torch.Tensor]
    grads: dict[str, torch.Tensor]
    want: dict
    recipe: str

    def run(self, kind, text=None, seed=None):
        launch = self.launches[kind]
        names = ("query",) if kind == "dq_sm90" else ("key", "value")
        for name in names:
            self.grads[name].fill_(torch.nan)
        if kind == "fused_sm90":
            sums = max((x for x in self.tensors if x.dim() == 1), key=torch.numel)
            sums.zero_()
        ptxsim.launch(
            launch.kernel if text is None else launch.kernel.with_text(text),
            launch.grid,
            *launch.parameters,
            block=launch.block,
            shared=launch.shared,
            tensors=self.tensors,
            undefined=[self.grads[name] for name in names],
            seed=seed,
        )
        if kind == "fused_sm90":
            names = (*names, "query")
            self.grads["query"].fill_(torch.nan)
            launch = self.launches["round_dq_sm90"]
            ptxsim.launch(launch.kernel, launch.grid, *launch.parameters, block=launch.block, tensors=self.tensors)
        for name in names:
            assert_gradient(self.grads[name], self.want[name], name, f"{self.recipe}, schedule {seed}")


def replay(simulated, kind, head_dim):  # noqa: F811
    """One backward pass of two query heads of a group in which every slot of the pipeline is used twice, recorded."""
    lengths = {"dkdv_sm90": (120, 70), "dq_sm90": (70, 400), "fused_sm90": (120, 140)}
    seqlen_q, seqlen_k = lengths[kind]
    inputs = simulated.inputs(1, 2, seqlen_q, seqlen_k, head_dim, heads_k=1, heads_v=1, dtype=BF16)
    leaves = {n: x.requires_grad_() for n, x in inputs.tensors.items()}
    alignment = "bottom_right" if kind == "dq_sm90" else "top_left"
    options = {"is_causal": True, "alignment": alignment, "enable_gqa": True}
    grad_out, grad_lse = torch.randn(1, 2, seqlen_q, head_dim).to(BF16), torch.randn(1, 2, seqlen_q)
    targets = simulated.attention(**leaves, **options, return_lse=True)
    with any_order() if kind == "fused_sm90" else contextlib.nullcontext():
        grads = torch.autograd.grad(targets, tuple(leaves.values()), (grad_out, grad_lse))
    want = testing.expected(*leaves.values(), grad_out=grad_out, grad_lse=grad_lse, **options)
    found = dict(zip(simulated.kernels(), simulated.recorder.launches, strict=True))
    return Replay(found, simulated.recorder.tensors, dict(zip(leaves, grads, strict=True)), want, inputs.recipe)


# Above a head size of 128 the two consumers of dK and dV have different roles.
KERNELS = [("dkdv_sm90", 64), ("dkdv_sm90", 192), ("dq_sm90", 64), ("fused_sm90", 128)]


@pytest.mark.parametrize(("kind", "head_dim"), KERNELS)
def test_every_order_of_events(simulated, kind, head_dim):  # noqa: F811
    """Warps in any order, copies and wgmma complete as late as they may."""
    kernel = replay(simulated, kind, head_dim)
    for seed in range(20):
        kernel.run(kind, seed=seed)


# Of every kernel, and of one in which all that the others share is planted too.
FAMILIES = ("drop_arrive", "drop_fence", "loosen_wait", "flip_parity")
MORE = ("drop_barrier", "release_early", "shift_count")
# Why a bug is none: what survives, how often at most.
EQUIVALENT = {
    r"drop fence\.mbarrier_init": (1, "it is for the other blocks of a cluster"),
    r"drop bar\.sync": (
        2,
        "before dK and dV go into the tiles of K and V, when all four warps have waited for the wgmmas that read them: "
        "the simulator takes each wait for that of the whole warpgroup",
    ),
    r"drop wgmma\.fence": (2, "of dP, and of dQ beside dK: since the one before nothing has touched its registers"),
    r"don't wait in mbarrier\.try_wait": (
        2,
        "the producer's for the second slot of a step, released with the first; and where dS is ready, Q's, for which "
        "the warpgroup that made P has waited",
    ),
}


@pytest.mark.parametrize(("kind", "head_dim"), KERNELS)
def test_planted_bugs(simulated, monkeypatch, kind, head_dim):  # noqa: F811
    """Slots released early, waits, fences and arrivals left out, phases and expected bytes wrong, in the PTX: each is
    caught, or argued to be none."""
    kernel = replay(simulated, kind, head_dim)
    compiled = kernel.launches[kind].kernel
    subject = planted_bugs.Subject(kind, compiled.name, compiled.text, lambda text, seed: kernel.run(kind, text, seed))
    families = (*FAMILIES, *MORE) if (kind, head_dim) == KERNELS[0] else FAMILIES
    every = mutate.mutants(compiled.text, compiled.name, families)
    chosen = [m for m in every if not m.name.startswith("shift_count") or "expect_tx" in m.name]
    monkeypatch.setattr(mutate, "mutants", lambda text, entry: chosen)
    survivors = [v.mutant for v in planted_bugs.judge(subject) if v.caught_by is None]
    assert len(chosen) >= 25
    for pattern, (most, why) in EQUIVALENT.items():
        found = [mutant for mutant in survivors if re.search(pattern, mutant)]
        assert len(found) <= most, f"{len(found)} survived, {most} argued ({why}): {found}"
        survivors = [mutant for mutant in survivors if mutant not in found]
    assert not survivors


def test_ring_that_starts_anew_with_each_head(simulated, tmp_path):  # noqa: F811
    """A bug in the source rather than in one instruction: the producer's phases drift from the consumers'."""
    kernel = replay(simulated, "dkdv_sm90", 64)
    header, kernels = ((launches.ROOT / f"{gate_cases.SOURCE}{end}").read_text() for end in ("h", ""))
    kernels = kernels.replace('#include "cuda/backward_sm90.cuh"\n', "")
    source = header.replace("#pragma once\n", "") + kernels.split("// Columns and slots by head size.")[0]
    name = "dkdv_sm90_kernel<Shape<__nv_bfloat16, 64, 96, 4, true, true>>"
    source += f"template __global__ void {name}(const __grid_constant__ BackwardSm90Args);\n}}\n}}\n"
    right = "load_cols(1, head, info.first);"
    wrong = f"{right} if (!tiles.done() && tiles.head() != head) at = {{}};"
    assert source.count(right) == 1

    def text(name, code):
        path = tmp_path / f"{name}_sm90.cu"
        path.write_text(code)
        return ptxsim.cuda(path, "dkdv_sm90", target=90).text

    def run(text, seed):
        launch = kernel.launches["dkdv_sm90"]
        compiled = ptxsim.from_ptx(text, target=90)
        kernel.launches["dkdv_sm90"] = dataclasses.replace(launch, kernel=compiled)
        kernel.run("dkdv_sm90", seed=seed)

    run(text("right", source), 0)
    with pytest.raises(ptxsim.SimulationError):
        run(text("wrong", source.replace(right, wrong)), 0)
