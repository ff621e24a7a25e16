"""Hopper's kernels (csrc/cuda/forward_sm90.cu) with their host code, tensor maps included, in the simulator of sm_90a
with the hazard checker on, against float64 by the one tolerance rule."""

import ctypes
import dataclasses
import itertools
import os
import re
import struct
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

import launches
import ptxsim
from attnkern import testing
from attnkern.backends import cuda
from attnkern.params import AttentionParams
from attnkern.signatures import Inputs
from gate import compilers
from matrix import LAST, call, in_turn, tagged
from ptxsim import mutate
from simulated import BF16, Cuda, simulated  # noqa: F401

ROOT = Path(__file__).parents[1]
PLAIN = AttentionParams(0.125)  # of a fast-path call with head size 64
KERNEL = re.compile(r"forward_sm90_kernelI(13__nv_bfloat16|6__half)Li(\d+)ELi(\d+)ELi[23]ELb([01])E")


class Forward(Cuda):
    def __call__(self, *sizes, **more):
        """One call, checked, which must be one launch of the Hopper kernel; its template arguments (dtype, head size,
        that of values, fast path)."""
        return self.check_call(call("", "", sizes, **more))

    def check(self, inputs, **options):
        before = len(self.recorder.launches)
        super().check(inputs, gradients=False, **options)
        (launch,) = self.recorder.launches[before:]
        found = KERNEL.search(launch.name)
        assert found is not None, launch.name
        assert self.recorder.reports[-1].bank_conflicts == 0
        return {"6__half": "f16"}.get(found[1], "bf16"), int(found[2]), int(found[3]), found[4] == "1"


@pytest.fixture
def hopper(simulated):  # noqa: F811
    simulated.recorder.target = 90
    return simulated


@pytest.fixture
def forward(hopper):
    """The backend, with few queries sent to this kernel too."""
    hopper.recorder.left_out = cuda.LEFT_OUT["cuda-decode"]
    return Forward(**vars(hopper))


@pytest.mark.parametrize("number", [1, 201], ids=["CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_CONTEXT"])
def test_a_tensor_map_that_the_driver_refuses(hopper, number, request):
    """What it says is told, once, and the kernels for every chip do the work."""
    hopper.recorder.refusal = number
    inputs = hopper.inputs(1, 1, 70, 70, 64, dtype=BF16)
    name = request.node.callspec.id.split("-")[0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hopper.check(inputs)
        hopper.check(inputs)
    assert hopper.kernels() == ["forward", "delta", "dkdv", "dq"] * 2
    (text,) = [text for x in told if "tensor map" in (text := str(x.message))]
    assert text.startswith(f"attnkern: the driver refuses a tensor map: {name} (CUresult {number}); the kernels for ")
    with pytest.raises(RuntimeError, match=re.escape(f"attnkern: the driver refuses a tensor map: {name}")):
        cuda.forward(Inputs(*inputs.tensors.values()), PLAIN, False, schedule=0)


@pytest.mark.parametrize("source", ["forward", "backward"])
def test_a_tile_is_written_when_all_its_readers_have_waited(source):
    """Results leave through tiles that wgmma has read: a barrier of the warpgroup stands before the first stmatrix into
    one. (The simulator can't tell: it takes a warp's wait for that of the whole warpgroup.)"""
    for entry in launches.library().texts[f"{source}_sm90"].split(".entry ")[1:]:
        events = re.findall(r"stmatrix|bar\.sync|wgmma\.wait_group", entry)
        before = [x for x, y in itertools.pairwise(events) if y == "stmatrix" != x]
        dumped = ["wgmma.wait_group"] if "fused_sm90" in entry[:200] else []  # dS, into a tile that no wgmma reads yet
        assert before[len(dumped) :] == ["bar.sync"] * len(before[len(dumped) :])
        assert before[: len(dumped)] == dumped
        assert len(before) > len(dumped) or "stmatrix" not in entry


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("shared", [(0,), (1,), (0, 1)], ids=["batch", "heads", "both"])
def test_broadcast_tensors(forward, which, shared):
    """Strides of 0 are no tensor map's: its dimension then has one entry."""
    inputs = forward.inputs(2, 3, 70, 140, 64, dtype=BF16)
    x = getattr(inputs, which)
    one = x[tuple(slice(1) if n in shared else slice(None) for n in range(2))]
    forward.check(dataclasses.replace(inputs, **{which: one.expand_as(x)}))


def test_without_lse(forward):
    """A call that needs no gradient writes none."""
    q = torch.randn(1, 1, 70, 64, dtype=BF16)
    out, lse = cuda.forward(Inputs(q, q, q), PLAIN, False)
    assert lse.shape == (0,)
    assert KERNEL.search(forward.recorder.launches[0].name)
    want = testing.expected(q, q, q)["out"]
    want.check(out, name="out")


# Of each class of tiles: head size, that of values.
SIZES = [(64, 64), (80, 96), (64, 128), (192, 128), (136, 192), (256, 200)]


@pytest.mark.parametrize(**in_turn(schedule=[0, 1, 2], sizes=SIZES), ids=str)
def test_schedules(forward, schedule, sizes):
    """Each schedule of products and softmax that may be timed against the others, with tiles enough for turns to be
    taken across them."""
    q, k = (torch.randn(1, 3, length, sizes[0], dtype=BF16) for length in (130, 300))
    v = torch.randn(1, 3, 300, sizes[1], dtype=BF16)
    forward.recorder.multiprocessors, forward.recorder.seed = 2, schedule
    out, _ = cuda.forward(Inputs(q, k, v), AttentionParams(sizes[0] ** -0.5), False, schedule=schedule)
    (launch,) = forward.recorder.launches
    assert f"8ScheduleE{schedule}" in launch.name
    want = testing.expected(q, k, v)["out"]
    want.check(out, name="out")


@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_schedules_of_three_consumers(forward, schedule):
    q, k, v = (torch.randn(1, 2, length, 64, dtype=BF16) for length in (530, 560, 560))
    forward.recorder.multiprocessors, forward.recorder.seed = 2, schedule
    out, _ = cuda.forward(Inputs(q, k, v), PLAIN, False, schedule=schedule)
    (launch,) = forward.recorder.launches
    assert f"8ScheduleE{schedule}" in launch.name
    assert launch.block == (512, 1, 1)
    testing.expected(q, k, v)["out"].check(out, name="out")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_three_consumers(forward, dtype):
    """Six tiles of 192 queries for two blocks of threads; the last tile isn't full, nor is the last block of keys."""
    forward.recorder.multiprocessors = 2
    forward(1, 2, 530, 560, 64, dtype=dtype)
    assert forward.recorder.launches[-1].block == (512, 1, 1)
    forward(1, 2, 510, 560, 64, dtype=dtype)
    assert forward.recorder.launches[-1].block == (384, 1, 1)


@pytest.mark.prove
def test_three_consumers_and_a_causal_band(forward):
    forward(1, 1, 4096, 4100, 40, causal=True)
    assert forward.recorder.launches[-1].block == (512, 1, 1)


def test_a_library_with_one_schedule_refuses_the_others():
    """As `make build` makes it: without the kernels that are for timing."""
    code = """
        import torch, launches, routes
        from attnkern.backends import cuda
        from attnkern.params import AttentionParams
        from attnkern.signatures import Inputs
        parts = launches.parts
        launches.parts = lambda: ({x: y for x, y in parts()[0].items() if "schedules" not in x.name}, parts()[1])
        q = torch.ones(1, 1, 70, 64, dtype=torch.bfloat16)
        with routes.cuda(90) as recorder:
            recorder.simulate = False
            for schedule in (1, 2):  # its own, another
                cuda.forward(Inputs(q, q, q), AttentionParams(0.125), False, schedule=schedule)
                print(len(recorder.launches))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout == "1\n"
    told = "attnkern: this library has schedule 1 alone for these head sizes: build it with ATTNKERN_SCHEDULES=all"
    assert told in done.stderr


# --------------------------------------------------------------------------------------------- tiles, one after another


@pytest.mark.landing
def test_tiles_share_the_multiprocessors(forward):
    """Five tiles for each of two blocks of threads, of odd and even numbers of blocks of keys, one without any: phases
    of all barriers carry over."""
    forward.recorder.multiprocessors = 2
    forward(1, 5, 250, 450, 64, causal=True)  # 10 tiles of 1 to 4 blocks of keys
    assert forward.recorder.launches[-1].grid == (2, 1, 1)
    forward(1, 5, 250, 150, 64, **LAST)
    forward.recorder.multiprocessors = 3
    forward(1, 4, 150, 70, 128)
    assert forward.recorder.launches[-1].grid == (3, 1, 1)
    forward.recorder.multiprocessors = 100
    forward(1, 2, 150, 70, 64)
    assert forward.recorder.launches[-1].grid == (4, 1, 1)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(8, 20))])
def test_any_schedule(forward, seed):
    """Warps in any order; copies and products finish as late as they may."""
    forward.recorder.seed = seed
    forward.recorder.multiprocessors = 2
    forward(1, 3, 130, 400, 64, **LAST)
    if seed < 5:
        forward(1, 1, 130, 300, 128, dtype="fp16", softcap=2.0)
        forward(1, 1, 130, 300, 256, causal=True)


def counters(recorder):
    """Those of the last call: how many tiles were asked for beyond the first of each block of threads."""
    return [x.view(torch.int32).item() for x in recorder.tensors if x.shape == (1,)]


# Calls of six tiles, and the multiprocessors that share them.
UNEQUAL = {
    "causal": (call("", "", (1, 2, 260, 260, 64), causal=True), 2),
    "nearly all take one": (call("", "", (1, 2, 260, 140, 64), causal=True), 5),
    "rows without keys": (call("", "", (1, 2, 260, 70, 64), **LAST), 1),
    "ranges": (call("", "", (1, 2, 260, 140, 64)), 2),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_tiles_of_unequal_length_go_to_who_is_free(forward, name):
    """Whoever takes which, the bits are the same; every tile is taken once, and then there are no more."""
    this, multiprocessors = UNEQUAL[name]
    inputs, outs = this.inputs(), []
    ranges = torch.stack([torch.arange(260) // 3, torch.arange(260) % 110 + 30], -1).unsqueeze(1)  # some are empty
    options = {"key_ranges": ranges} if name == "ranges" else {}
    for count, seed in ((multiprocessors, None), (multiprocessors, 1), (100, None)):
        forward.recorder.multiprocessors, forward.recorder.seed = count, seed
        outs.append(forward.attention(**inputs.tensors, **this.options, **options))
        assert forward.recorder.launches[-1].grid[0] == min(6, count)
        assert counters(forward.recorder) == ([6] if count < 6 else [])
    assert all(torch.equal(outs[-1], out) for out in outs)


def test_tiles_of_equal_length_need_no_counter(forward):
    forward.recorder.multiprocessors, forward.recorder.simulate = 2, False
    q = torch.zeros(1, 5, 130, 64, dtype=BF16)
    forward.sdpa(q, q, q)
    assert counters(forward.recorder) == []


# -------------------------------------------------------------------------------------------------------- planted bugs


def alone(text, name):
    """The PTX of one kernel of a file of many."""
    kernels = re.split(r"^(?=\.entry )", text, flags=re.M)
    return kernels[0] + next(kernel for kernel in kernels if kernel.startswith(f".entry {name}("))


def stuck_phases(text, name):
    """Every bit that is flipped from one use of a barrier (or round of tiles) to the next isn't."""
    flip = re.compile(r"xor\.b32\s+(%r\d+), (%r\d+), 1;")
    for m in flip.finditer(text):
        yield mutate.Mutant("stuck phase", 0, f"{text[: m.start()]}mov.b32 {m[1]}, {m[2]};{text[m.end() :]}")


def planted(*families, only=""):
    def found(text, name):
        return [m for m in mutate.mutants(text, name, families) if only in m.name]

    return found


# kind: how to plant it, how many there are at least, and how many of them are argued to be no bugs.
BUGS = {
    "a stage released early": (planted("release_early"), 2, 2),
    # 2: the loop's K, whose buffer is filled again only behind a V that waits for a later product; a tile's last V,
    # whose buffer is filled again only behind the next tile's Q, which waits for this tile's output.
    "a missing wait": (planted("loosen_wait"), 16, 0),
    "a missing fence": (planted("drop_fence"), 4, 1),  # 1: of mbarrier.init, which matters in clusters
    "a wrong count of bytes": (planted("shift_count", only="expect_tx"), 10, 0),
    "a stuck phase": (stuck_phases, 5, 0),
}


@pytest.mark.parametrize("kind", BUGS)
def test_planted_bugs_are_found(forward, kind):
    """In tiles of five blocks of keys to one, of which two blocks of threads take whichever is next.

    Of the last tile's last block of keys, some are attended to by no query, so that their values are cleared.
    """
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 1, length, 64, dtype=BF16) for length in (600, 700, 700))
    forward.recorder.multiprocessors, forward.recorder.simulate = 2, False
    params = AttentionParams(0.125, window_right=0)
    out, lse = cuda.forward(Inputs(q, k, v), params, True, splits=0)
    (launch,) = forward.recorder.launches
    (taken,) = [x for x in forward.recorder.tensors if x.shape == (1,)]
    want = testing.expected(q, k, v, is_causal=True)

    def outcome(text, seed):
        taken.zero_()
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        try:
            ptxsim.launch(
                ptxsim.from_ptx(text, launch.name, target=90),
                launch.grid,
                *launch.parameters,
                block=launch.block,
                shared=launch.shared,
                tensors=[q, k, v, out, lse, taken],
                undefined=[out, lse],
                seed=seed,
            )
        except ptxsim.SimulationError as error:
            return type(error).__name__
        try:
            for name, x in (("out", out), ("lse", lse)):
                want[name].check(x, name=name)
        except AssertionError:
            return "results"
        return None

    text = alone(launch.kernel.text, launch.name)
    assert outcome(text, None) is None
    plant, least, argued = BUGS[kind]
    outcomes = {m: outcome(m.text, None) or outcome(m.text, 0) for m in plant(text, launch.name)}
    survivors = [m.name for m, how in outcomes.items() if how is None]
    assert len(outcomes) - len(survivors) >= least
    assert len(survivors) <= argued, survivors


# ------------------------------------------------------------------------------------------------- what is for others

REFUSED = tagged("sm90-refused")  # what then runs: the kernel for every chip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_runs_elsewhere(hopper, name):
    hopper.check_call(REFUSED[name], gradients=False)
    assert hopper.kernels() == ["forward"]


def test_dropout_runs_elsewhere(hopper):
    q = torch.randn(1, 1, 70, 64, dtype=BF16)
    hopper.sdpa(q, q, q, dropout_p=0.3)
    assert hopper.kernels() == ["forward"]


@pytest.mark.parametrize("target", [80, 86, 100])
def test_other_chips_take_other_kernels(simulated, target):  # noqa: F811
    simulated.recorder.target = target
    q = torch.randn(1, 1, 70, 64, dtype=BF16)
    simulated.sdpa(q, q, q)
    assert simulated.kernels() == ["forward"]


def test_the_order_of_tiles_is_the_plan_s(forward):
    """Of a causal problem and of key ranges the last rows of all heads that share the cache, then the rows before, each
    to the first that is free; else head by head in turn. (What comes when: test_tile_order.py.)"""
    q = torch.zeros(1, 3, 300, 64, dtype=BF16)
    forward.recorder.simulate = False
    forward.sdpa(q, q, q, is_causal=True)
    forward.sdpa(q, q, q)
    forward.attention(q, q, q, key_ranges=torch.tensor([0, 9]).expand(300, 1, 2))
    counts = struct.pack("<3i", 9, 3, 3)  # tiles, heads, blocks of rows
    found = []
    for launch in forward.recorder.launches:
        before, _, rest = launch.parameters[0].partition(counts)
        # heads of a section, the last section's first one, whether the last rows come first, whether tiles differ
        found.append((*struct.unpack_from("<2i2?", rest), struct.unpack("<q", before[-8:]) != (0,)))
    assert found == [(3, 0, True, True, True), (1, 2, False, False, False), (3, 0, True, True, True)]


PLANNED = """
#include "cuda/launch.h"
extern "C" __attribute__((visibility("default"))) const char* refusal() {
  using namespace attnkern;
  return cuda::plan_forward_sm90(Forward{}, cuda::Chip{132, 228 * 1024, 90}).refusal;
}
extern "C" __attribute__((visibility("default"))) int launched() {
  return attnkern::cuda::forward_sm90({}, {}, nullptr, nullptr);
}
"""


def test_a_library_without_sm_90a_refuses(tmp_path):
    """It links, and its plan says why."""
    nvcc, _ = compilers.nvcc()
    product = compilers.product()
    (tmp_path / "asks.cpp").write_text(PLANNED)
    flags = [*product.NVCCFLAGS.split(), *product.sm90_flags(["80", "120"]).split(), f"-I{ROOT / 'csrc'}"]
    sources = [str(ROOT / "csrc/cuda/forward_sm90.cu"), "asks.cpp"]
    link = ["-shared", "-cudart", "static", "-Xlinker", "-z", "-Xlinker", "defs", "-o", "asks.so"]
    subprocess.run([nvcc, *flags, *sources, *link], cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "asks.so"))
    library.refusal.restype = ctypes.c_char_p
    assert library.refusal() == b"the library was compiled without sm_90a"
    assert library.launched() != 0
    assert "sm_90a" in product.sm90_flags(["80", "90a"])
