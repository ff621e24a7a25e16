"""``python -m attnkern check``: whether attnkern is right on this machine. The first thing to run on a new one.

Every family of kernels that this machine has computes a few calls forward and backward, against float64 by the rule of
`attnkern.testing`. Each has a process of its own, so that a family that crashes or hangs is reported, and the others
go on. `ATTNKERN_DISABLE` (backends/disabled.py) leaves out a family that is wrong.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

import attnkern

from . import rng, testing
from .backends import cuda, disabled, explain, triton_interpreted
from .problem import Problem

SECONDS = 120.0
"""How long a call may take. (All of them together take less than 20 s on an idle machine; a busy one isn't wrong.)"""

# --------------------------------------------------------------------------------------------------------------------
# What is computed
# --------------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of `attnkern.attention`, by the arguments of `testing.make_inputs` and its own options."""

    name: str
    sizes: tuple[int, ...]  # batch, heads, queries, keys, head size
    inputs: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    gradients: bool = True
    second_order: bool = False
    ranges: tuple[str, str, int] | None = None  # random key ranges: kind, shape and number, of `Inputs.with_ranges`
    biases: bool = False  # sinks and a relative bias
    page_size: int = 0  # of the pages that keys and values lie in; 0: in none

    def made(self, device: str) -> testing.Inputs:
        """Its tensors, alike on all devices."""
        inputs = testing.make_inputs(*self.sizes, **self.inputs, device=device, seed=1)
        if self.biases:
            _, heads, seqlen_q, _ = inputs.query.shape
            entries = seqlen_q + inputs.key.shape[2] - 1
            inputs = inputs.with_sinks("H", FP32, 1).with_relative_bias(heads, entries, FP32, 1)
        if self.page_size:
            inputs = inputs.with_poison(math.nan)
        return inputs if self.ranges is None else inputs.with_ranges(*self.ranges, torch.int32, 1)

    def in_pages(self, key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
        """Its arguments in place of key and value: pools of pages in any order, and which ones a sequence has."""
        batch, _, length, _ = key.shape
        table = torch.randperm(batch * length // self.page_size).view(batch, -1).to(key.device)

        def pool(x: torch.Tensor) -> torch.Tensor:
            pages = x.unflatten(2, (-1, self.page_size)).transpose(1, 2).flatten(0, 1)
            return pages[table.flatten().argsort()]

        return {"key": pool(key), "value": pool(value), "block_table": table}


class Family(NamedTuple):
    """Kernels that are checked together."""

    backend: str
    device: str
    calls: tuple[Call, ...]
    kernel: str = ""  # what a line of the plan must begin with
    without: tuple[str, ...] = ()  # families that would take its calls: left out in its process
    deterministic: bool = False


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SMALL = (1, 2, 130, 150, 64)
DECODE = (2, 8, 1, 1500, 64)
FEATURES = (
    Call("float32", SMALL, {"dtype": FP32}),
    Call("bfloat16, causal", SMALL, {"dtype": BF16}, {"is_causal": True}),
    Call("float16, window", SMALL, {"dtype": FP16}, {"window": (40, 3), "alignment": "bottom_right"}),
    Call("bool mask", (2, 2, 70, 150, 64), {"dtype": BF16, "mask": ("bool", "B1LS")}),
    Call("float mask and its gradient", (2, 2, 70, 150, 64), {"dtype": FP32, "mask": ("float", "1HLS")}),
    Call("grouped heads, softcap", (1, 4, 70, 150, 64), {"heads_k": 2}, {"enable_gqa": True, "softcap": 5.0}),
    Call("dropout", (2, 2, 70, 150, 64), {"dtype": FP32}, {"dropout_p": 0.3}),
    Call("sinks and a relative bias, causal", SMALL, {"dtype": BF16}, {"is_causal": True}, biases=True),
    Call("key ranges, causal", SMALL, {"dtype": BF16}, {"is_causal": True}, ranges=("documents", "B1L", 1)),
    Call("two key ranges", (2, 2, 70, 150, 64), {"dtype": FP16}, ranges=("anything", "BHL", 2)),
)
_DECODING = (
    Call("decoding", DECODE, {"dtype": BF16, "heads_k": 2}, {"enable_gqa": True}, gradients=False),
    Call("decoding, key ranges", DECODE, {"dtype": BF16}, gradients=False, ranges=("anything", "B11", 1)),
    Call("decoding, sinks and a relative bias", DECODE, {"dtype": BF16}, gradients=False, biases=True),
    Call(
        "decoding, keys in pages",
        (2, 8, 1, 1504, 64),
        {"dtype": BF16, "heads_k": 2},
        {"enable_gqa": True},
        gradients=False,
        ranges=("anything", "B11", 1),
        page_size=16,
    ),
)
_HOPPER = tuple(
    Call(f"{kind}, head size {size}", (1, 4, 200, 300, size), {"dtype": dtype, "heads_k": 2}, options)
    for kind, size, dtype, options in (
        ("bfloat16", 128, BF16, {"enable_gqa": True}),
        ("float16, causal", 128, FP16, {"enable_gqa": True, "is_causal": True, "alignment": "bottom_right"}),
    )
)
_HOPPER += (
    _HOPPER[0]._replace(name="key ranges, head size 128", ranges=("documents", "B1L", 1)),
    _HOPPER[1]._replace(name="two key ranges, causal, head size 128", ranges=("few", "BHL", 2)),
)
# Each Triton kernel takes seconds to compile: fewer calls, of more features.
_TRITON = (FEATURES[1], FEATURES[4]._replace(options={"dropout_p": 0.3}), FEATURES[5], FEATURES[-1])

FAMILIES: dict[str, Family] = {
    "cpu": Family("cpu", "cpu", (FEATURES[0]._replace(name="float64", inputs={"dtype": FP64}), *FEATURES, *_DECODING)),
    "reference": Family("reference", "cpu", FEATURES[:2]),
    "triton": Family("triton", "cuda", _TRITON),
    "triton-decode": Family("triton", "cuda", _DECODING, "decode:"),
    "triton-second-order": Family("triton", "cuda", (Call("tangents", (1, 1, 40, 70, 32), second_order=True),)),
    "cuda": Family(
        "cuda",
        "cuda",
        (*FEATURES, Call("head size 320", (1, 2, 70, 150, 320), {"dtype": BF16})),
        "forward, sm_80",
        ("cuda-decode", "cuda-sm90", "cuda-sm90-backward"),
    ),
    "cuda-decode": Family("cuda", "cuda", _DECODING, "decode, sm_80"),
    "cuda-sm90": Family(
        "cuda",
        "cuda",
        tuple(call._replace(gradients=False) for call in (*_HOPPER, _HOPPER[0]._replace(sizes=(1, 4, 200, 300, 64)))),
        "forward, sm_90a",
    ),
    "cuda-sm90-backward": Family("cuda", "cuda", _HOPPER, "backward dk dv, sm_90a", deterministic=True),
    "cuda-sm90-fused": Family("cuda", "cuda", _HOPPER, "backward dk dv dq, sm_90a"),
}
"""By the names of `disabled.FAMILIES`, and the reference."""


def check_call(family: Family, call: Call, device: str) -> None:
    """Runs a call. Raises AssertionError where a result is wrong, or other kernels than the family's would run."""
    torch.manual_seed(1)
    inputs = call.made(device)
    options = dict(call.options)
    if family.kernel and not any(line.startswith(family.kernel) for line in plan_of(family, call, inputs)):
        plan = "; ".join(plan_of(family, call, inputs))
        raise AssertionError(f"expected a kernel {family.kernel!r}, and the plan is: {plan}")
    if call.second_order:
        return _check_second_order(family, inputs, options)
    keep = None
    if p := options.get("dropout_p"):
        state = torch.random.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
        batch, heads, seqlen_q, _ = inputs.query.shape
        seed = rng.draw_seed(inputs.query.device)
        keep = testing.philox_keep(seed, batch, heads, seqlen_q, inputs.key.shape[2], p, inputs.query.device)
        (torch.random.set_rng_state if device == "cpu" else torch.cuda.set_rng_state)(state)
    function = None
    if call.page_size:

        def function(query: Any, key: Any, value: Any, **rest: Any) -> Any:
            out, _ = attnkern.attention(
                query, **call.in_pages(key, value), **rest, return_lse=True, backend=family.backend
            )
            return out

    testing.check_attention(
        inputs, backend=family.backend, gradients=call.gradients, keep=keep, function=function, **options
    )


def plan_of(family: Family, call: Call, inputs: testing.Inputs) -> tuple[str, ...]:
    """How the family's backend cuts a call, as `attnkern.explain` has it."""
    tensors: dict[str, Any] = {name: x.detach() for name, x in inputs.tensors.items()}
    for x in tensors.values():
        x.requires_grad_(call.gradients and x.is_floating_point())
    if call.page_size:
        tensors |= call.in_pages(tensors["key"], tensors["value"])
    return explain(Problem.from_sdpa(**tensors, **call.options), family.backend).plan


def _check_second_order(family: Family, inputs: testing.Inputs, options: dict[str, Any]) -> None:
    names = list(inputs.tensors)
    leaves: list[Any] = [x.requires_grad_() for x in inputs.tensors.values()]

    def attention(*tensors: Any) -> Any:
        return attnkern.attention(*tensors, **options, return_lse=True, backend=family.backend)

    tangents = [torch.randn_like(x) for x in leaves]
    given = tuple(x.detach() for x in leaves)
    (out, lse), (tout, tlse), *_ = torch.func.jvp(attention, given, tuple(tangents))
    grads = [torch.randn_like(x).requires_grad_() for x in (out, lse)]
    first = torch.autograd.grad(attention(*leaves), leaves, grads, create_graph=True)
    second = torch.autograd.grad(first, leaves, tangents)
    want = testing.expected_second_order(
        **{name: x.detach() for name, x in zip(names, leaves, strict=True)},
        tangents=dict(zip(names, tangents, strict=True)),
        grad_out=grads[0].detach(),
        grad_lse=grads[1].detach(),
        **options,
    )
    for name, got in {"tout": tout, "tlse": tlse, **dict(zip(names, second, strict=True))}.items():
        x = want[name]
        x.check(got, gradient=True, name=f"second order: {name}")


class Speed(NamedTuple):
    """Milliseconds of a forward and a backward pass."""

    call: str
    attnkern: float
    torch: float

    def __str__(self) -> str:
        times = f"{self.attnkern:.3g} ms, F.sdpa {self.torch:.3g} ms"
        return f"{self.call}, forward and backward: attnkern {times}: {self.torch / self.attnkern:.2f} times as fast"


SPEEDS = {"cpu": ((1, 8, 1024, 64), torch.float32, 0.5), "cuda": ((4, 16, 4096, 128), torch.bfloat16, 2.0)}
"""Of each device: the sizes of query, key and value, their dtype, and for how many seconds calls are repeated."""


def speed(device: str) -> Speed:
    """Times both in turns; medians."""
    sizes, dtype, seconds = SPEEDS[device]
    q, k, v = (torch.randn(sizes, dtype=dtype, device=device, requires_grad=True) for _ in range(3))

    def milliseconds(function: Callable[..., torch.Tensor]) -> float:
        begin = time.perf_counter()
        out = function(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    functions: tuple[Any, Any] = attnkern.scaled_dot_product_attention, scaled_dot_product_attention
    for function in functions:
        milliseconds(function)
    times: list[list[float]] = [[], []]
    begin = time.perf_counter()
    while len(times[0]) < 3 or time.perf_counter() - begin < seconds:
        for function, found in zip(functions, times, strict=True):
            found.append(milliseconds(function))
    return Speed(f"{device}: causal {sizes} {str(dtype)[6:]}", *map(statistics.median, times))


# --------------------------------------------------------------------------------------------------------------------
# A family's process: it prints what it does as lines of JSON, since it may crash
# --------------------------------------------------------------------------------------------------------------------


def run_one(name: str) -> None:
    """What the process for a family does, or the one for "speed-cpu" or "speed-cuda"."""

    def tell(**line: Any) -> None:
        print(json.dumps(line), flush=True)

    tell(begins="the import")
    if name.startswith("speed-"):
        tell(speed=speed(name.removeprefix("speed-")))
        return
    family = FAMILIES[name]
    torch.use_deterministic_algorithms(family.deterministic)
    for call in family.calls:
        tell(begins=call.name)
        try:
            check_call(family, call, family.device)
        except AssertionError as error:
            tell(wrong=call.name, why=_sentence(error))
        else:
            tell(right=call.name)
    tell(done=True)


def _sentence(error: BaseException | str) -> str:
    """The first line that isn't empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# --------------------------------------------------------------------------------------------------------------------
# The process that the user starts
# --------------------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The outcome of a family's process."""

    name: str
    ok: bool
    text: str
    speed: Speed | None = None


def command(name: str) -> list[str]:
    """What runs a family in a process of its own."""
    return [sys.executable, "-m", "attnkern", "check", "--one", name]


def run(name: str, seconds: float = SECONDS) -> Outcome:
    """Runs a family in its process, which may be silent for so many seconds at most."""
    family = FAMILIES.get(name)
    left_out = {*disabled.left_out, *(family.without if family is not None else ())}
    environment = {**os.environ, disabled.VARIABLE: ",".join(sorted(left_out))}
    begin = heard = time.perf_counter()
    process = subprocess.Popen(
        command(name), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    told: dict[Any, list[str]] = {process.stdout: [], process.stderr: []}

    def listen(stream: Any) -> None:
        nonlocal heard
        for line in stream:
            told[stream].append(line)
            heard = time.perf_counter()

    listeners = [threading.Thread(target=listen, args=(stream,), daemon=True) for stream in told]
    for listener in listeners:
        listener.start()
    hangs = False
    while process.poll() is None and not hangs:
        try:
            process.wait(max(0.0, heard + seconds - time.perf_counter()))
        except subprocess.TimeoutExpired:
            hangs = time.perf_counter() - heard >= seconds
    if hangs:
        process.kill()
    for listener in listeners:
        listener.join(5)  # not for ever: what hangs in the driver isn't reached
    stdout, stderr = map("".join, told.values())
    if hangs:
        return _bad(name, f"HUNG in {_last(stdout)}: no answer in {seconds:g} s")
    lines = list(_lines(stdout))
    wrong = [line for line in lines if "wrong" in line]
    right = [line for line in lines if "right" in line]
    if process.returncode < 0:
        return _bad(name, f"DIED of {signal.Signals(-process.returncode).name} in {_last(stdout)}")
    if process.returncode > 0:
        reason = next((line for line in reversed(stderr.splitlines()) if line[:1].strip()), "")
        return _bad(name, f"FAILED in {_last(stdout)}: {reason or f'exit status {process.returncode}'}")
    if wrong:
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return _bad(name, f"WRONG in {wrong[0]['wrong']}: {wrong[0]['why']}{others}")
    if found := next((line["speed"] for line in lines if "speed" in line), None):
        return Outcome(name, True, "", Speed(*found))
    if not any("done" in line for line in lines):
        return _bad(name, f"STOPPED in {_last(stdout)} without a word")
    return Outcome(name, True, f"right: {len(right)} calls in {time.perf_counter() - begin:.1f} s")


def _bad(name: str, text: str) -> Outcome:
    remedy = f"; {disabled.VARIABLE}={name} leaves it out" if name in disabled.FAMILIES else ""
    return Outcome(name, False, f"{text}{remedy}")


def _lines(stdout: str) -> Iterator[dict[str, Any]]:
    for line in stdout.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # somebody else's
        if isinstance(found, dict):
            yield found


def _last(stdout: str) -> str:
    """What a process did last."""
    return next((line["begins"] for line in reversed(list(_lines(stdout))) if "begins" in line), "the start")


def families() -> dict[str, str | None]:
    """The families to check on this machine, each with the reason for which it isn't run, or None."""
    found = {info.name: info for info in attnkern.backends()}
    names: dict[str, str | None] = {}
    for name, family in FAMILIES.items():
        reason = disabled.reason(name) or found[family.backend].why_not
        if reason is None and name.startswith("cuda-sm90") and cuda.capability(0) != 90:
            reason = "the device is no Hopper"
        if reason is None and {family.device, "any"}.isdisjoint(found[family.backend].device_types):
            reason = triton_interpreted.NOTE
        names[name] = reason
    return names


def about() -> list[str]:
    """Versions, libraries and devices, as lines."""
    info = attnkern.build_info()
    try:
        triton_version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton_version = "not installed"
    lines = [
        f"attnkern {info['attnkern']}, torch {info['torch']}, triton {triton_version}, python {info['python']}, "
        f"{platform.system()} {platform.machine()}",
        f"libraries: {info['cpu_library']}; {info['cuda_library']}",
        f"cpu: {_processor()}, {torch.get_num_threads()} threads, kernels for {info['cpu_isa'] or 'nothing'}",
    ]
    if not torch.cuda.is_available():
        return [*lines, "cuda: torch sees no device"]
    try:
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            chip = f"{device.name}, compute capability {device.major}.{device.minor}"
            lines.append(f"cuda: {chip}, torch for CUDA {torch.version.cuda}")
    except RuntimeError as error:
        lines.append(f"cuda: {_sentence(error)}")
    return lines


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main(only: Sequence[str] | None = None, seconds: float = SECONDS) -> int:
    """Prints the report; 0 if everything that can run here is right, 1 if not. `only`: these families alone."""
    for line in about():
        print(line)
    if disabled.left_out:
        print(f"{disabled.VARIABLE}={','.join(sorted(disabled.left_out))}")
    print(flush=True)
    names = families()
    chosen = [name for name in (names if only is None else only) if names.get(name) is None]
    for name in names if only is None else ():
        if names[name] is not None:
            print(f"{name:<20} not run: {names[name]}")
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        for outcome in pool.map(lambda name: run(name, seconds), chosen):
            print(f"{outcome.name:<20} {outcome.text}", flush=True)
            outcomes.append(outcome)
    # Afterwards, with the machine for themselves.
    for device in SPEEDS:
        of_device = [o for o in outcomes if o.name != "reference" and FAMILIES[o.name].device == device]
        if of_device and all(o.ok for o in of_device):
            timed = run(f"speed-{device}", seconds)
            print(f"{'speed':<20} {timed.speed or timed.text}", flush=True)
            outcomes += [] if timed.ok else [timed]
    wrong = [outcome.name for outcome in outcomes if not outcome.ok]
    kernels = [outcome.name for outcome in outcomes if outcome.name != "reference"]
    if wrong:
        status = f"NOT RIGHT: {', '.join(wrong)}. Please report it, with all of the above"
    elif not kernels:
        status = "no kernels here: plain torch computes everything, slowly"
    else:
        status = "right: all that can run here"
    print(f"\n{'status':<20} {status}")
    return 1 if wrong or not kernels else 0
