"""Key ranges in the CUDA C++ kernels, with their host code in the simulator, hazards checked: results and gradients
against float64 by the one tolerance rule, and no block of keys or queries visited that needn't be."""

import math

import pytest
import torch

import launches
import ptxsim
from attnkern import testing
from attnkern.backends import cuda
from attnkern.problem import Problem
from matrix import KINDS, call, in_turn
from random_problems import in_pages
from simulated import BF16, FP16, FP32, simulated  # noqa: F401

VISITS = {
    each.name: each
    for each in (
        call("bfloat16", "", (1, (2, 1), 150, 700, 64)),
        call("d128, softcap", "", (1, 1, 300, 300, 128), softcap=3.0),
        call("window", "", (1, (2, 1), 260, 400, 64), window=(150, 40), alignment="bottom_right"),
        call("float32", "", (1, 1, 140, 230, 32), dtype="fp32"),
        call("d300", "", (1, 1, 130, 260, 300)),
        call("few queries", "", (1, (4, 2), 4, 1500, 64)),
        call("few queries, d300", "", (1, (2, 1), 4, 500, 300)),
        call("queries of four groups of the summary", "", (1, 1, 1700, 300, 32)),
        call("bias", "", (1, 2, 150, 300, 32), mask="float 11LS"),
    )
}
ON_HOPPER = ("bfloat16", "d128, softcap", "window")


def neighbours_apart(seqlen_q, seqlen_k):
    begin = torch.arange(seqlen_q) % 2 * (seqlen_k - 9)
    return torch.stack([begin, begin + 9], -1).unsqueeze(1)


def backwards(seqlen_q, seqlen_k):
    begin = seqlen_k - 1 - torch.arange(seqlen_q) * seqlen_k // seqlen_q
    return torch.stack([begin, begin + 30], -1).unsqueeze(1)


JUMPS = {"window and sinks": KINDS["window and sinks"], "neighbours apart": neighbours_apart, "backwards": backwards}


def attends(this, ranges):
    """The dense mask of a call."""
    shape = this.batch, this.heads_q, this.seqlen_q, this.seqlen_k
    inside = testing.ranges_mask(ranges, this.seqlen_k).expand(shape)
    if (band := this.band) is not None:
        left, right, offset = band
        distance = torch.arange(this.seqlen_k) - torch.arange(this.seqlen_q).unsqueeze(-1) - offset
        inside = inside & (distance >= -left) & (distance <= right)
    return inside


def meetings(attends, rows, columns, packed=1):
    """How many tiles of so many rows and columns hold a score, over all heads; `packed` heads are rows of one tile."""
    attends = attends.unflatten(1, (-1, packed)).transpose(2, 3).flatten(2, 3)
    attends = torch.nn.functional.pad(attends, (0, -attends.shape[3] % columns, 0, -attends.shape[2] % rows))
    return int(attends.unflatten(3, (-1, columns)).any(4).unflatten(2, (-1, rows)).any(3).sum())


def visits_of(launch, this, dense):
    if launch.kernel == "decode":
        return meetings(dense, launch.rows, launch.columns, this.heads_q // this.heads_k)
    by_keys = launch.kernel.startswith(("backward dk", "backward dv"))
    return meetings(dense.mT if by_keys else dense, launch.rows, launch.columns)


ANYWHERE = in_turn(simulated=[80], name=list(VISITS), kind=list(JUMPS))
HERE = in_turn(simulated=[90], name=ON_HOPPER, kind=list(JUMPS))


@pytest.mark.parametrize(ANYWHERE["argnames"], ANYWHERE["argvalues"] + HERE["argvalues"], indirect=["simulated"])
def test_blocks_visited_are_the_least_possible(simulated, name, kind):  # noqa: F811
    """Counted by the products on tensor cores, of which every block of a kernel takes as many."""
    this, target = VISITS[name], simulated.recorder.target
    inputs = this.inputs()
    every = torch.tensor([[0, this.seqlen_k]]).expand(this.seqlen_q, 1, 2)
    found = []
    some = JUMPS[kind](this.seqlen_q, this.seqlen_k)
    for ranges in (every, some):
        simulated.recorder.launches.clear(), simulated.recorder.reports.clear()
        simulated.check(inputs, key_ranges=ranges, **this.options)
        products = [report.statistics["products"] for report in simulated.recorder.reports]
        found.append([count for count in products if count])
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]
    problem = Problem.from_sdpa(*(*leaves, None)[:4], 0.0, **this.options, key_ranges=every)
    limit = launches.SHARED_LIMIT[target]
    plan = cuda.plan_of(problem, cuda.Chip(target, 8, limit + 1024, limit)).launches
    plan = [launch for launch in plan if "again" not in launch.words]  # no tile holds NaN
    plan.sort(key=lambda launch: launch.kernel.startswith("backward") + (launch.kernel != "backward bias"))
    for launch, all_products, products in zip(plan, *found, strict=True):
        of_all, of_these = (visits_of(launch, this, attends(this, x)) for x in (every, some))
        assert products * of_all == all_products * of_these, launch
        assert of_these < of_all


def visited_by_each(simulated, launch):  # noqa: F811
    """How many blocks of keys each block of threads visits, by the products that it adds to those of the ones before
    it. Some of them visits one."""
    products = [0]
    for blocks in range(1, launch.grid[0] + 1):
        report = ptxsim.launch(
            launch.kernel,
            (blocks,),
            *launch.parameters,
            block=launch.block,
            shared=launch.shared,
            tensors=simulated.recorder.tensors,
            check=False,
        )
        products.append(report.statistics["products"])
    counts = torch.tensor(products).diff()
    one = counts[counts > 0].min()
    assert (counts % one == 0).all()
    return counts // one


# The keys of each sequence, how many there is room for, and how many a block has. dtype, head size, options.
UNEQUAL, ROOM, KEYS = [16, 1024, 0, 16], 2048, 64
SPLIT = {
    "d64": (BF16, 64, {}),
    "d64, sinks": (FP16, 64, {"sinks": torch.tensor([-1.0, 0.0, 0.5, 2.0])}),
    "d64, window": (BF16, 64, {"window": (9, 700)}),
    "d40, float32": (FP32, 40, {}),
    "d264, sinks": (BF16, 264, {"sinks": torch.tensor([-1.0, 0.0, 0.5, 2.0])}),
}


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("name", SPLIT)
def test_splits_of_unequal_lengths(simulated, name, pages):  # noqa: F811
    """Each sequence's own keys are dealt out to its splits, not those that there is room for; splits that get none
    leave no output, and none is read. With ranges there are more splits, so that the longest sequence ends sooner."""
    dtype, size, options = SPLIT[name]
    recorder = simulated.recorder
    recorder.multiprocessors = 2  # which four sequences fill
    lengths = torch.tensor(UNEQUAL).view(-1, 1, 1, 1)
    ranges = torch.cat([torch.zeros_like(lengths), lengths], -1).unsqueeze(-2)
    options = {"enable_gqa": True, **options}
    query, key, value = (torch.randn(4, heads, rows, size).to(dtype) for heads, rows in ((4, 2), (1, ROOM), (1, ROOM)))
    expects = testing.expected(query, key, value, key_ranges=ranges, **options)
    key, value = (x.masked_fill((torch.arange(ROOM) >= lengths).mT, math.nan) for x in (key, value))
    if pages:
        (key, value), table = in_pages(16, key, value)
        options["block_table"] = table
    options["return_lse"] = True
    recorder.simulate = False
    simulated.attention(query, key, value, **options)
    without_ranges = recorder.launches.pop(0).grid[0] // len(UNEQUAL)
    recorder.launches.clear()
    recorder.simulate = True
    results = simulated.attention(query, key, value, key_ranges=ranges, **options)
    for of, actual in zip(("out", "lse"), results, strict=True):
        expects[of].check(actual, name=of)
    splits = recorder.launches[0].grid[0] // len(UNEQUAL)
    (parts,) = (x for x in recorder.tensors if x.shape == (4 * 4 * 2 * splits * (size + 1),))
    outputs = parts[: 4 * 4 * 2 * splits * size].view(4, -1, splits, size)

    live = min(UNEQUAL[1], options.get("window", (0, ROOM))[1] + 2)
    blocks = torch.tensor([[1], [-(-live // KEYS)], [0], [1]])
    each = -(-blocks // splits)
    deal = (blocks - torch.arange(splits) * each).clamp(min=0).minimum(each)
    visits = visited_by_each(simulated, recorder.launches[0]).view(-1, splits)
    assert visits.tolist() == deal.tolist()
    assert outputs.isnan().all(-1).equal((visits == 0).unsqueeze(1).expand(outputs.shape[:3]))
    assert visits.max() <= -(-blocks.max() // without_ranges) / 2
