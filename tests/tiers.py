"""Which tests run: `make test` some of everything, `make test-changed` what a change touches, `.ci/run` all but
cases marked `prove`, proofs that stand (proofs.py), and most GPU proofs that don't; `make prove` all.

A tier has so many seconds. Every test function gets the same share of them, at least one case if that is done within
LONGEST. It takes the cases first that show a parameter's value for the first time, then those that show two values
together for the first time, the quickest first. What is left over is cut into shards, and `make test` runs one of them:
the next one for every commit, so that landing after landing walks through all of it. A case's seconds are CPU time;
they stand in durations.json, which --time-into writes. `.ci/run` cuts what it leaves out into shards in the same way:
the proofs that stand, cases marked `prove`, and what a function of GPU proofs has beyond PROVEN seconds, where it
isn't marked `landing`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
# Of one core of the machine that durations.json names; imports and collection come to it. `make test` is to take two
# cores of another no more than 8 minutes.
SECONDS = {"quick": 500.0, "changed": 180.0}
SHARD = 60.0  # of the quick tier's seconds
ROTATING = 90.0  # seconds of what `.ci/run` leaves out, that it runs nevertheless
PROVEN = 4.0  # seconds of a function of GPU proofs in `.ci/run`, or its first case
LONGEST = 12.0  # seconds of a function's first case, if it is to be in every tier
UNKNOWN = 0.3  # seconds of a case that was never timed
LONG = 0.1  # of one that durations.json names; the others of its file take `brief`

CALLS = "band clients decode direct dropout errors extremes few_keys few_queries gqa gradients key_ranges lse_merge"
CALLS += " mask masks odd_queries pages properties refusals relative sdpa_parity sinks unattended"
TORCH = "distributed features flash_attn flash_attn_install flash_attn_refusals jagged memory nn overrides"
TORCH += " paged_cache sdpa_provider second_order threads transformers transforms varlen"
CUDA = "choice cuda_backward cuda_kernels cuda_key_ranges cuda_pages cuda_planted_bugs cuda_sm90 cuda_sm90_backward"
CUDA += " cuda_tiles cuda_unattended cycles fuzz gate relative_gpu sinks_gpu tile_order"
CUDA += " gpu_calls::TestCudaForward gpu_calls::TestCudaBackward gpu_calls::TestCudaMasks"
CUDA += " gpu_calls::TestHopper gpu_calls::TestHopperMasks"
# What runs kernels of all passes.
WITH_ALL_CUDA = "cuda_key_ranges cuda_unattended cycles fuzz gate relative_gpu sinks_gpu tile_order"
WITH_ALL_CUDA += " gpu_calls::TestCudaMasks gpu_calls::TestHopperMasks"
TRITON = "choice fuzz gate triton triton_decode triton_interpreted triton_pages triton_ranges triton_second_order"
TRITON += " gpu_calls::TestTriton triton_suite relative_gpu sinks_gpu triton_unattended triton_versions"
GPU = "gpu gpu_stages triton_gpu"
# What takes calls of tests/matrix.py.
MATRIX = f"{GPU} cuda_backward cuda_kernels cuda_planted_bugs cuda_sm90 cuda_sm90_backward gradients sdpa_provider"
MATRIX += " gpu_calls key_ranges relative relative_gpu second_order sinks sinks_gpu threads triton triton_decode"
MATRIX += " triton_interpreted triton_second_order"
# Changed files, and the tests that they may break: tests/test_<name>.py, or classes of one that go by what they run.
# The first line that fits counts.
TOUCHES = [
    ("csrc/cuda/*sm90*", f"choice cuda_sm90 cuda_sm90_backward cuda_tiles gpu_calls::TestHopper {WITH_ALL_CUDA}"),
    (
        "csrc/cuda/forward* csrc/cuda/decode.cu",
        f"choice cuda_kernels cuda_pages cuda_planted_bugs gpu_calls::TestCudaForward {WITH_ALL_CUDA}",
    ),
    ("csrc/cuda/backward*", f"choice cuda_backward cuda_planted_bugs gpu_calls::TestCudaBackward {WITH_ALL_CUDA}"),
    # Simulated kernels are launched by the operators, but for test_direct.py's.
    ("csrc/common/direct.h csrc/cuda/direct_cuda.cpp", f"{CALLS} {TORCH} build choice isa"),
    ("csrc/cuda/*", CUDA),
    ("csrc/cpu/* csrc/exports.map", f"{CALLS} {TORCH} bench_cores build fuzz isa"),
    ("csrc/common/*", f"{CALLS} {CUDA} {TORCH} isa params rng"),
    ("csrc/*", f"{CALLS} {TORCH} build isa"),
    ("triton_kernels/*", TRITON),
    (
        "attnkern/integrations/transformers.py attnkern/integrations/transformers_layers.py",
        "bench_models docs transformers",
    ),
    ("attnkern/integrations/distributed.py attnkern/integrations/shards.py", "distributed docs"),
    ("attnkern/integrations/*", "contract_coverage flash_attn_install jagged sdpa_provider transformers"),
    ("attnkern/backends/*", f"{CALLS} {CUDA} {TORCH} {TRITON} check"),
    # What the backends are written in terms of.
    ("attnkern/params.py attnkern/rng.py", f"{CALLS} {CUDA} {TORCH} {TRITON} build params rng"),
    ("attnkern/check.py attnkern/__main__.py", "check"),
    ("attnkern/paged_cache.py", "bench_serve docs paged_cache"),
    ("attnkern/flash_attn/*", "docs flash_attn flash_attn_install flash_attn_refusals"),
    ("attnkern/nn.py", "docs examples features jagged nn"),
    ("bench/cases.py", f"bench {MATRIX} sdpa_parity"),
    ("attnkern/testing/*", f"{CALLS} {CUDA} {TRITON} testing"),
    ("attnkern/plot.py attnkern/tiles.py attnkern/weights.py", "clients docs features testing"),
    ("attnkern/__init__.py", f"{CALLS} {TORCH} build check contract_coverage docs params project readme rng testing"),
    ("attnkern/*", f"{CALLS} {TORCH} build check contract_coverage docs params readme rng testing"),
    ("bench/results/*", "bench bench_models bench_serve docs readme"),
    ("bench/gpu/*", f"{GPU} docs readme"),
    ("bench/*", f"bench bench_cores bench_models bench_regression bench_serve {GPU} docs readme"),
    ("docs/triton_on_a_cpu.md", "docs readme triton_interpreted"),
    ("docs/models.md docs/serving.md docs/make_run_pages.py", "bench_models bench_serve docs readme"),
    ("docs/shares.md docs/make_share_pages.py", "bench docs readme"),
    ("docs/examples/* docs/make_notebook.py", "distributed docs examples"),
    ("docs/coming_from_flash_attn.md", "docs flash_attn_install"),
    ("docs/compile.md", "docs features readme"),
    ("docs/distributed.md", "distributed docs readme"),
    ("CHANGELOG.md", "docs project readme"),
    ("docs/* README.md CONTRIBUTING.md LICENSE mkdocs.yml", "docs readme"),
    (
        "setup.py Makefile pyproject.toml MANIFEST.in requirements-dev.txt .ci/*",
        "build docs project readme tiers triton_versions",
    ),
    (".github/* .pre-commit-config.yaml CITATION.cff", "project"),
    ("tests/ptxsim/*", f"ptxsim {CUDA} {TRITON}"),
    ("tests/gate/*", "gate cycles"),
    ("tests/launches/* tests/routes.py tests/simulated.py", f"{CUDA} {TRITON} gpu_stages"),
    ("tests/fuzz*", "fuzz"),
    ("tests/gpu_kernels.py tests/fake_stages.py", "gpu gpu_stages"),
    ("tests/wheels.py", "build"),
    ("tests/bench_runs.py", "bench_models bench_serve"),
    ("tests/random_problems.py", "direct extremes fuzz isa nn properties refusals testing triton_suite"),
    ("tests/matrix.py", MATRIX),
    ("tests/bad_calls.py", "errors flash_attn_refusals jagged key_ranges mask varlen"),
    ("tests/excluding.py", "few_keys few_queries odd_queries"),
    ("tests/sequences.py", "few_keys flash_attn jagged threads varlen"),
    ("tests/triton_launches.py", "triton_versions"),
    ("tests/triton_variants.py", "triton_versions gate"),
    ("tests/interpreted.py", "triton_interpreted"),
    ("tests/cpp/*", "build"),
    ("tests/emulated/*", "isa"),
    ("tests/cuda/*", "cuda_tiles gate tile_order"),
    ("tests/conftest.py tests/proofs.py tests/tiers.py tests/durations.json", "tiers testing rng"),
    ("tests/test_unattended.py", "cuda_unattended triton_interpreted triton_unattended"),  # and itself
    ("tests/test_second_order.py", "relative_gpu sinks_gpu"),
    ("tests/test_triton_suite.py", "triton_gpu"),
    ("tests/test_*", ""),  # itself
    (".*", ""),  # no test reads an editor's or git's settings
]


def touched(changed: Iterable[str]) -> list[str]:
    """The test files (a folder for the simulator's) that a change to these files may break.

    Raises:
        LookupError: a file that no line of TOUCHES fits.
    """
    found = set()
    for path in changed:
        found |= set(map(path_of, names_touched(path)))
        if fnmatch(path, "tests/test_*"):
            found.add(path)
    # With a file come its classes.
    return sorted(
        path for path in found if path not in {f"{x}::{path.split('::')[-1]}" for x in found} and exists(path)
    )


def path_of(name: str) -> str:
    """What TOUCHES names: a file of tests, a class of one ("gpu_calls::TestHopper"), or the simulator's folder."""
    file, *within = name.split("::")
    return "tests/ptxsim" if name == "ptxsim" else "::".join([f"tests/test_{file}.py", *within])


def exists(path: str) -> bool:
    return (ROOT / path.split("::")[0]).exists()


@functools.cache
def names_touched(path: str) -> list[str]:
    """As TOUCHES has them; raises LookupError."""
    if (names := next((names for paths, names in TOUCHES if _fits(path, paths)), None)) is None:
        raise LookupError(f"{path}: no line of TOUCHES in tests/tiers.py fits it")
    return names.split()


def _fits(path: str, patterns: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns.split())


def changed_files(since: str | None = None) -> list[str]:
    """Files that differ from a commit; without one from the last, or where nothing does what that one changed."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    new = git("ls-files", "--others", "--exclude-standard")
    found = git("diff", "--name-only", since or "HEAD") + new
    return found or git("diff", "--name-only", "HEAD~1")


class Costs:
    """How long a case takes, of what `Timed` wrote: seconds by case for the long ones, and of a brief one by file."""

    def __init__(self, long: dict[str, float], brief: dict[str, float]):
        self.long, self.brief = long, brief

    def __call__(self, case: str) -> float:
        return self.long[case] if case in self.long else self.brief.get(case.split("::")[0], UNKNOWN)


def costs(path: Path = DURATIONS) -> Costs:
    written = json.loads(path.read_text()) if path.exists() else {"long": {}, "brief": {}}
    return Costs(written["long"], written["brief"])


def function_of(case: str) -> str:
    return case.split("[")[0]


def in_order(cases: list[tuple[str, dict[str, Any]]], cost: Costs) -> list[str]:
    """A function's cases, those that show most first."""
    waiting = sorted(cases, key=lambda case: (cost(case[0]), case[0]))
    order, seen = [], set()
    for together in (1, 2):
        left = []
        for case, parameters in waiting:
            shown = set(itertools.combinations(sorted(parameters.items()), together))
            (order if shown - seen or not (order or left) else left).append((case, parameters))
            seen |= shown
        waiting = left
    return [case for case, _ in order + waiting]


def in_orders(cases: list[tuple[str, dict[str, Any]]], cost: Costs) -> list[list[str]]:
    """Each function's, by itself."""
    functions = defaultdict(list)
    for case in cases:
        functions[function_of(case[0])].append(case)
    return [in_order(found, cost) for found in functions.values()]


def first_of(order: list[str], seconds: float, cost: Costs) -> list[str]:
    """As many as are done within so many seconds."""
    sums = itertools.accumulate(cost(case) for case in order)
    return [case for case, total in zip(order, sums, strict=True) if total <= seconds]


def part_of_proofs(cases: list[tuple[str, dict[str, Any]]], cost: Costs) -> set[str]:
    """PROVEN seconds of each function, its first case at least."""
    orders = in_orders(cases, cost)
    return {case for order in orders for case in first_of(order, max(PROVEN, cost(order[0])), cost)}


def choose(cases: list[tuple[str, dict[str, Any]]], seconds: float, cost: Costs) -> set[str]:
    """So many seconds of these cases, (id, its parameters' values by name).

    A function's share is the largest with which all of them keep to the seconds.
    """
    orders = in_orders(cases, cost)

    def within(share: float) -> list[str]:
        found = []
        for order in orders:
            found += first_of(order, max(share, cost(order[0]) if cost(order[0]) <= LONGEST else 0.0), cost)
        return found

    low, high = 0.0, seconds
    for _ in range(30):
        middle = (low + high) / 2
        if sum(map(cost, within(middle))) <= seconds:
            low = middle
        else:
            high = middle
    return set(within(low))


def shards(rest: Iterable[str], cost: Costs, seconds: float = SHARD) -> list[list[str]]:
    """These cases cut into parts of about so many seconds."""
    rest = sorted(rest)
    parts: list[list[str]] = [[] for _ in range(max(1, round(sum(map(cost, rest)) / seconds)))]
    for case in rest:
        parts[zlib.crc32(case.encode()) % len(parts)].append(case)
    return parts


def commits() -> int:
    """How many there are: which shard is the next."""
    done = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0


# ------------------------------------------------------------------------------------------------------ pytest's hooks


def pytest_addoption(parser):
    parser.addoption("--tier", choices=["quick", "changed", "landing", "all"], default="all", help="see tests/tiers.py")
    parser.addoption("--time-into", metavar="FILE", help="write how long each case takes, as tests/durations.json")


def pytest_collection_modifyitems(config, items):
    cost, tier = costs(), config.getoption("--tier")
    proven = getattr(config, "proven", frozenset())  # where proofs.py isn't loaded
    if tier != "all" or proven:
        everything = {item.nodeid for item in items}
        if tier == "landing":
            often = [item for item in items if item.get_closest_marker("prove") is None]
            of_gpus = [item for item in often if config.is_gpu_proof(item.nodeid)]
            part = [item for item in of_gpus if not item.get_closest_marker("landing")]
            whole = {item.nodeid for item in often} - {item.nodeid for item in part}
            chosen = (whole | part_of_proofs([with_values(item) for item in part], cost)) - proven
        elif tier == "all":
            chosen = everything - proven
        else:
            chosen = choose(list(map(with_values, items)), SECONDS[tier] - (SHARD if tier == "quick" else 0.0), cost)
        if tier in ("quick", "landing"):
            parts = shards(everything - chosen, cost, SHARD if tier == "quick" else ROTATING)
            chosen |= set(parts[commits() % len(parts)])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
    # The longest file first, so that no worker is left alone with it; a file's cases together, for what they compile.
    seconds = defaultdict(float)
    for item in items:
        seconds[item.nodeid.split("::")[0]] += cost(item.nodeid)
    items.sort(key=lambda item: -seconds[item.nodeid.split("::")[0]])


def with_values(item: Any) -> tuple[str, dict[str, Any]]:
    """A case's id, and what tells its parameters' values apart: of several in one `parametrize` each by itself."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return item.nodeid, {name: str(value) for name, value in params.items()}


def cpu_seconds() -> float:
    """Of this process and of its children that have ended: neither waiting counts nor what else the machine does."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def compilations_found() -> int:
    """How many compilations this process has been spared, because the gate's cache had what they make."""
    return getattr(sys.modules.get("gate.cache"), "found", 0)


class Clock:
    """Writes into the report of each phase what it took, in the process that runs it, and whether that is all: what an
    earlier run has compiled takes no time."""

    def __init__(self) -> None:
        self.before, self.found = cpu_seconds(), compilations_found()

    def pytest_runtest_logstart(self):
        self.before, self.found = cpu_seconds(), compilations_found()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        now = cpu_seconds()
        report = yield
        report.cpu_seconds, self.before = now - self.before, now
        report.at_least = compilations_found() > self.found
        return report


class Timed:
    """Adds up what the phases of each case took; with xdist in the process that hears from all workers."""

    def __init__(self, path: str):
        self.path, self.seconds = Path(path), defaultdict(float)
        self.at_least: set[str] = set()

    def pytest_runtest_logreport(self, report):
        if hasattr(report, "cpu_seconds"):  # not of a worker that died
            self.seconds[report.nodeid] += report.cpu_seconds
            if report.at_least:
                self.at_least.add(report.nodeid)

    def pytest_sessionfinish(self):
        before = costs(self.path)
        for case in self.at_least & before.long.keys():
            self.seconds[case] = max(self.seconds[case], before.long[case])
        files: dict[str, list[float]] = defaultdict(list)
        for case, seconds in self.seconds.items():
            if seconds < LONG:
                files[case.split("::")[0]].append(seconds)
        brief = {file: round(sum(seconds) / len(seconds), 4) for file, seconds in files.items()}
        long = {case: round(seconds, 1) for case, seconds in self.seconds.items() if seconds >= LONG}
        # What didn't run keeps its times.
        waited = {case: x for case, x in before.long.items() if case not in self.seconds}
        kept = {
            kind: {name: x for name, x in sorted(times.items()) if (ROOT / name.split("::")[0]).exists()}
            for kind, times in (("brief", before.brief | brief), ("long", waited | long))
        }
        record = {"machine": machine(), **kept}
        self.path.write_text(json.dumps(record, indent=0) + "\n")


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text()
    found = {name: re.search(rf"^{name}\s*:\s*(.*)$", text, re.M) for name in ("model name", "cpu family", "model")}
    told = {name: match[1] if match else "?" for name, match in found.items()}
    threads = len(re.findall(r"^processor", text, re.M))
    return f"{told['model name']} (family {told['cpu family']}, model {told['model']}), {threads} threads"


def pytest_configure(config):
    if path := config.getoption("--time-into"):
        config.pluginmanager.register(Clock())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Timed(path))


def main() -> int:
    """`make test-changed`: pytest on what changed since a commit (the argument) or the last one."""
    since, *options = sys.argv[1:]
    changed = changed_files(since or None)
    files = touched(changed)
    print(f"{len(changed)} changed files touch {', '.join(files) or 'no test'}", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", "--tier", "changed", *options, *files]) if files else 0


if __name__ == "__main__":
    sys.exit(main())
