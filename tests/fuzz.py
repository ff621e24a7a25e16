"""`make fuzz MINUTES=10`: problems drawn from all there is, extremes included, on every backend and instruction set.

`cpu-<set>` is the CPU backend forced to an instruction set, `reference` plain torch; `cuda-sm80`, `cuda-sm90`,
`cuda-sm90-fused` (outside torch's deterministic mode) and `triton` are GPU kernels in the simulator (tests/ptxsim),
hazards checked. Each runs in processes of its own, side by side as far as there are cores, and gets a share of the
time. A failure prints the line that repeats it, and is kept in fuzz_found.jsonl, whose problems tests/test_fuzz.py
runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import platform
import random
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import attnkern
from attnkern import testing
from random_problems import Paged, attention_in_bits, random_packed, random_paged, random_problem

ROOT = Path(__file__).resolve().parents[1]
FOUND = Path(__file__).with_name("fuzz_found.jsonl")
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
ISAS: dict[str, dict[str, set[str]]] = {  # with what the machine must have, as /proc/cpuinfo names it
    "x86_64": {
        "amx": {*AVX512, "avx512_bf16", "avx512vbmi", "amx_tile", "amx_bf16"},
        "zen5": {*AVX512, "avx512_bf16", "avx512vbmi"},
        "avx512bf16": {*AVX512, "avx512_bf16", "avx512vbmi"},
        "avx512": AVX512,
        "avx2": {"avx2", "fma", "f16c"},
        "generic": set(),
    },
    "aarch64": {"neon": set(), "generic": set()},
}
MOST = 10  # failures of a place, after which it is left
BEGUN, FAILED, ENDED = "begun: ", "failed: ", "ended"  # what a process tells of itself
FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
# What simulated kernels are drawn from: as small as crosses a tile of keys and one of queries.
SHORT = {"lengths": (33, 64, 65, 100, 129, 160), "batches": (1, 1, 2), "heads": (1, 1, 2), "groups": (1, 1, 2)}
SMALL: dict[str, Any] = {**SHORT, "extreme": 0.8, "dims_v": (), "poison": True}
HOPPER = {**SMALL, "dtypes": (BF16, FP16), "masks": False, "layouts": ("contiguous", "blhd", "packed")}
THREADS = (1, 1, 1, 2, 3, 8, 33, 192)  # more than a machine has, too
EVERY_SIZE = (1, 2, 3, 8, 16, 17, 32, 40, 64, 72, 129, 192, 256)
DRAWN: dict[str, dict[str, Any]] = {
    "cpu": {"dtypes": (FP32, FP64, BF16, FP16), "poison": True, "head_dims": EVERY_SIZE},
    "reference": {"dtypes": (FP32, FP64, BF16, FP16), "poison": True},
    "cuda-sm80": {**SMALL, "dtypes": (BF16, BF16, FP16, FP32), "head_dims": (8, 16, 24, 40, 64)},
    "cuda-sm90": {**HOPPER, "head_dims": (64, 80)},
    "cuda-sm90-fused": {**HOPPER, "head_dims": (104, 128)},
    "triton": {**SMALL, "dtypes": (BF16, BF16, FP16, FP32), "head_dims": (16, 24, 40, 64), "ranges": False},
}


def runnable_isas() -> list[str]:
    """The CPU kernels' instruction sets that this machine has, best first; read apart from the library's own cpuid."""
    told = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    flags = set(told[1].split()) if told else set()
    return [isa for isa, wanted in ISAS.get(platform.machine(), {"generic": set()}).items() if wanted <= flags]


def places() -> list[str]:
    """Where problems can run here: what --on takes."""
    return [*(f"cpu-{isa}" for isa in runnable_isas()), *list(DRAWN)[1:]]


@contextlib.contextmanager
def running(place: str) -> Iterator[str]:
    """The backend that runs a call there; the instruction set has been forced when the process began."""
    if place.startswith(("cpu", "reference")):
        yield place.split("-")[0]
        return
    import routes

    fused = place.endswith("fused")
    route = routes.triton(80) if place == "triton" else routes.cuda(90 if "sm90" in place else 80)
    with route:
        torch.use_deterministic_algorithms(not fused)
        yield place.split("-")[0]


@contextlib.contextmanager
def several_threads(count: int) -> Iterator[None]:
    """So many for torch, and the number before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One to check: the call that makes its inputs, and the options of the call."""

    place: str
    recipe: str
    options: dict[str, Any]
    huge: bool = False  # scores so large that one takes all: gradients are rounding alone
    packed: dict[str, Any] | None = None  # the fields of testing.Packed
    paged: dict[str, Any] | None = None  # the fields of random_problems.Paged
    threads: int = 1

    def check(self) -> None:
        """Raises what is wrong with the results."""
        inputs = eval(self.recipe, {"attnkern": attnkern, "torch": torch, "nan": math.nan, "inf": math.inf})
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in self.options.items()}  # from JSON
        torch.manual_seed(0)
        with several_threads(self.threads), testing.poisoned_memory(), running(self.place) as backend:
            if self.huge:
                check_huge(inputs, backend, **options)
            elif self.packed is not None:
                testing.check_packed(inputs, testing.Packed(**self.packed), backend=backend, **options)
            elif self.paged is not None:
                paged = Paged(**self.paged)
                in_pages = functools.partial(paged.attention, attnkern.attention)
                with mock.patch.object(attnkern, "attention", in_pages):
                    check_masks(paged.alike(inputs), backend, gradients=False, **options)
            else:
                check_masks(inputs, backend, **options)


def check_masks(inputs: testing.Inputs, backend: str, **options: Any) -> None:
    """A bool mask also as one of bits, on the CPU."""
    testing.check_attention(inputs, backend=backend, **options)
    if backend == "cpu" and inputs.attn_mask is not None and inputs.attn_mask.dtype == torch.bool:
        testing.check_attention(inputs, function=attention_in_bits, **options)


def check_huge(inputs: testing.Inputs, backend: str, scale: float, **options: Any) -> None:
    """Rows whose largest score leads by more than any rounding are the value of that key."""
    q, k, v = inputs.query, inputs.key, inputs.value
    options["key_ranges"] = inputs.key_ranges
    out, lse = attnkern.attention(q, k, v, scale=scale, return_lse=True, backend=backend, **options)
    if 0 in (*out.shape, k.size(2)):
        return
    exact, _ = testing.naive_attention(q.double(), k.double(), v.double(), scale=scale, **options)
    k = k.repeat_interleave(q.size(1) // k.size(1), 1)
    scores = q.double() @ k.double().mT * scale
    told = {name: x for name, x in options.items() if name in ("is_causal", "window", "alignment", "key_ranges")}
    if (band := testing.band_mask(q.size(2), k.size(2), **told)) is not None:
        scores = scores.masked_fill(~band, -math.inf)
    top = scores.topk(min(2, scores.size(-1))).values.nan_to_num(neginf=-1e300)
    far = 1e-4 * abs(scale) * q.double().norm(dim=-1) * k.double().norm(dim=-1).amax(-1, keepdim=True)
    clear = (top[..., 0] - top[..., -1] > far.clamp(min=60.0)) | (top.size(-1) == 1)  # e^-60 is nothing in float64
    assert out.isfinite().all(), "output is not finite"
    assert not lse.isnan().any(), "lse is NaN"
    # The output is one value, rounded. float32 on a GPU goes through two parts of tf32, which hold 22 of its 24 bits.
    most = 4 if backend in ("cuda", "triton") and out.dtype == torch.float32 else 2
    wrong = clear[..., None] & ((out.double() - exact).abs() > most * torch.finfo(out.dtype).eps * exact.abs())
    assert not wrong.any(), f"output{wrong.nonzero()[0].tolist()}: {out[wrong][0]}, expected {exact[wrong][0]}"


def drawn(place: str, seed: int) -> Problem:
    """The problem of a seed, on the CPU for any number of threads: how a call is cut depends on it."""
    threads = random.Random(f"threads {seed}").choice(THREADS) if place.startswith("cpu") else 1
    return dataclasses.replace(_drawn(place, seed), threads=threads)


def _drawn(place: str, seed: int) -> Problem:
    kinds = DRAWN.get(place, DRAWN["cpu"])
    rng = random.Random(seed)
    if rng.random() < 0.1:
        inputs, options = random_problem(seed, **{**kinds, "extreme": 0.0, "masks": False, "biases": False})
        most = 18 if place.startswith(("cpu", "reference")) else 5  # GPU kernels: docs/limits.md
        options["scale"] = float(f"{rng.choice([-1, 1]) * 10.0 ** rng.uniform(4, most):.2g}")
        options.pop("softcap", None)
        return Problem(place, inputs.recipe, options, huge=True)
    if kinds.get("ranges", True) and random.Random(f"packed {seed}").random() < 0.15:  # apart from what the rest draws
        inputs, options, packed = random_packed(seed, **kinds)
        return Problem(place, inputs.recipe, options, packed=dataclasses.asdict(packed))
    if random.Random(f"pages {seed}").random() < 0.15:
        inputs, options, paged = random_paged(seed, **kinds)
        return Problem(place, inputs.recipe, options, paged=dataclasses.asdict(paged))
    inputs, options = random_problem(seed, **kinds)
    return Problem(place, inputs.recipe, options)


def check(place: str, seeds: Iterator[int], seconds: float) -> None:
    """Problems of a place until the time is over, or some have failed."""
    end, failures = time.perf_counter() + seconds, 0
    for seed in seeds:
        print(f"{BEGUN}{seed}", flush=True)
        problem = drawn(place, seed)
        try:
            problem.check()
        except Exception as error:
            told = str(error).strip().splitlines() or [type(error).__name__]
            print(f"FAILED python -m fuzz --on {place} --seed {seed}\n  {told[0]}", flush=True)
            print(f"  {problem.recipe}  {problem.options}, {problem.threads} threads", flush=True)
            if not isinstance(error, (AssertionError, RuntimeError)):
                traceback.print_exc()
            print(f"{FAILED}{seed}", flush=True)
            failures += 1
        if time.perf_counter() > end or failures >= MOST:
            break
    print(ENDED, flush=True)


def keep(failed: list[dict[str, Any]]) -> None:
    """Adds what isn't there yet to the kept ones."""
    known = [json.loads(line) for line in FOUND.read_text().splitlines()] if FOUND.exists() else []
    new = [problem for problem in failed if problem not in known]
    if new:
        with FOUND.open("a") as file:
            file.writelines(json.dumps(problem) + "\n" for problem in new)
        print(f"{len(new)} kept in {FOUND.relative_to(ROOT)}")


def command(place: str, *rest: str) -> tuple[list[str], dict[str, str]]:
    """A process for a place, and its environment."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    if place.startswith("cpu-"):
        environment["ATTNKERN_CPU_ISA"] = place.removeprefix("cpu-")
    return [sys.executable, "-m", "fuzz", "--inside", "--on", place, *rest], environment


def watch(place: str, first: int, seconds: float) -> list[dict[str, Any]]:
    """Processes for a place until the time is over: one that dies costs the problem it died of. What failed."""
    end, count, failed = time.perf_counter() + seconds, 0, []
    while True:
        left = max(end - time.perf_counter(), 0.0)
        line, environment = command(place, "--seed", str(first), "--seconds", f"{left:.1f}")
        done = subprocess.run(line, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        lines = done.stdout.splitlines()
        begun = [int(line.removeprefix(BEGUN)) for line in lines if line.startswith(BEGUN)]
        seeds = [int(line.removeprefix(FAILED)) for line in lines if line.startswith(FAILED)]
        told = [line for line in lines if line.startswith(("FAILED", "  "))]
        ended = ENDED in lines
        if not ended:
            seeds.append(begun[-1] if begun else first)
            told.append(f"FAILED python -m fuzz --on {place} --seed {seeds[-1]}")
            told.append(f"  the process ended with {done.returncode}")
            first = seeds[-1] + 1
        count += len(begun)
        failed += [dataclasses.asdict(drawn(place, seed)) | {"seed": seed} for seed in seeds]
        if told:
            print("\n".join(told), flush=True)
        if ended or len(failed) >= MOST or time.perf_counter() > end:
            print(f"{place:<16} {count} problems, {len(failed)} failed", flush=True)
            return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="in all")
    parser.add_argument("--on", action="append", choices=places(), help="only there; may be given several times")
    parser.add_argument("--seed", type=int, help="this problem alone, or with --minutes from it on")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    where = given.on or places()
    shares = {place: 1.0 if place.startswith(("cuda", "triton")) else 0.4 for place in where}  # simulators are slow
    first = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    if given.inside:
        torch.set_num_threads(1)
        check(where[0], iter(range(first, 2**62)), given.seconds)
        return 0

    cores = min(len(os.sched_getaffinity(0)), len(where))
    one = given.seed is not None and given.minutes == parser.get_default("minutes")
    all_seconds = 0.0 if one else given.minutes * 60 * cores / sum(shares.values())
    print(f"{', '.join(where)} from seed {first}", flush=True)

    with ThreadPoolExecutor(cores) as pool:
        failed = [
            problem
            for found in pool.map(lambda place: watch(place, first, all_seconds * shares[place]), where)
            for problem in found
        ]
    keep(failed)
    print(f"{len(failed)} failed" if failed else "nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
