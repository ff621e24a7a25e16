"""The Triton kernels' best configurations on this device: a stage of `make gpu`.

A row is a line of the table (attnkern/triton_kernels/configs.py) that the device's chip uses, for one head size, as a
causal problem. Its candidates are compiled and timed, the table's own first, then the nearest to it, for as long as
the row has; a row that the installed Triton can't compile is skipped, and says so.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from attnkern.triton_kernels import configs, launch, plan
from attnkern.triton_kernels.configs import Config, Row

from attnkern import signatures
from attnkern.backends import triton as backend
from attnkern.params import GRAD_K, GRAD_Q, GRAD_V, AttentionParams
from attnkern.testing import Inputs
from bench.cases import Case, case

from .device import Gpu

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}  # KiB that a block may have
LENGTH, TOKENS, WIDTH = 4096, 16384, 2048
CALLS, WARM = 20, 5
SECONDS = 14  # of a row: some candidates, each seconds to compile
# What most calls use comes first.
KERNELS = ("forward", "dkdv", "dq", "tangent", "second_dq", "second_dkdv")
FEATURES, HEADS = ("plain", "ranges", "tile", "mods"), (128, 64, 256, 192, 512)


def name_of(row: Row, size: int) -> str:
    return f"{row.kernel} {8 * row.itemsize}-bit {row.feature} head size {size}"


def table_rows(capability: int) -> dict[str, tuple[Row, int]]:
    """The rows, and the head sizes in them, from which a chip takes its configurations; the most used first."""
    arch = configs.arch_class(capability, configs.has_tma(capability))
    found: set[tuple[Row, int]] = set()
    for row, by_size in configs.TABLE.items():
        if row.arch in (arch, 80 if arch == 86 else arch):
            found |= {(row._replace(arch=arch), size) for size in by_size}

    def rank(entry: tuple[Row, int]) -> tuple[Any, ...]:
        row, size = entry
        second = row.kernel not in KERNELS[:3]
        return second, row.itemsize, FEATURES.index(row.feature), HEADS.index(size), KERNELS.index(row.kernel)

    return {name_of(row, size): (row, size) for row, size in sorted(found, key=rank)}


def rows(device: Gpu) -> list[str]:
    return list(table_rows(device.capability()))


def candidates(row: Row, size: int) -> list[Config]:
    """The table's own first; then every tile whose accumulators can fit in registers, the nearest to it first."""
    own = configs.choose(row, size, size)
    pointers = configs.chunk(size, size, row.itemsize, row.kernel not in configs.MMA_SYNC) > 0
    found = {own}
    for rows, cols, warps, stages in itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3)):
        by_keys = row.kernel.endswith("dkdv")
        wgmma = row.arch == 90 and (cols if by_keys else rows) >= 64
        # By pointers it would read what cp.async has written, without a fence between.
        if wgmma and (row.kernel in configs.MMA_SYNC or (pointers and stages > 1)):
            continue
        accumulators = (2 * cols if by_keys else rows) * size
        if accumulators + 2 * rows * cols <= 32 * warps * 224:
            found.add(Config(rows, cols, warps, stages))

    def distance(config: Config) -> tuple[float, Config]:
        steps = [abs(math.log2(a / b)) for a, b in zip(config[:3], own[:3], strict=True)]
        return sum(steps) + abs(config.num_stages - own.num_stages), config

    return sorted(found, key=distance)


def problem(row: Row, size: int) -> Case:
    more: dict[str, Any] = {"dtype": "bf16" if row.itemsize == 2 else "fp32"}
    if mask := {"tile": "bias", "ranges": "documents:1024"}.get(row.feature):
        more["mask"] = mask
    return case(name_of(row, size), LENGTH, batch=TOKENS // LENGTH, heads=max(1, WIDTH // size), dim=size, **more)


def launches(row: Row, config: Config, size: int, given: Inputs, launched: list) -> tuple[Any, ...]:
    """The arguments of `launch.run` for this row's kernel with `config`."""
    plan.use_table({**configs.TABLE, row: {size: config}})
    inputs = signatures.Inputs(given.query, given.key, given.value, given.attn_mask, key_ranges=given.key_ranges)
    params = AttentionParams(size**-0.5, 30.0 if row.feature == "mods" else 0.0, window_right=0)
    launched.clear()
    if row.kernel == "forward":
        backend.forward(inputs, params, True)
        return launched[-1]
    q = inputs.q
    lse = torch.zeros(q.shape[:3], device=q.device)
    if row.kernel == "tangent":
        backend.tangent(inputs, inputs.differentiable, q, lse, params)
        return launched[-1]
    wanted = GRAD_Q if row.kernel.endswith("dq") else GRAD_K | GRAD_V
    if row.kernel.startswith("second"):
        backend.second_backward(inputs.differentiable, q, None, inputs, q, lse, params, wanted)
        return launched[-1]
    backend.backward(q, None, inputs, q, lse, params, wanted)
    return launched[-1]


def measure(device: Gpu, name: str) -> Iterator[dict[str, Any]]:
    """Times the row's candidates; gives the fastest, and how many of how many were tried."""
    import triton

    capability = device.capability()
    row, size = table_rows(capability)[name]
    about = {**row._asdict(), "head_dim": size}
    shrunk = device.shrunk(problem(row, size))
    inputs = device.inputs(shrunk)
    if shrunk.ranged is not None:
        inputs = replace(inputs, key_ranges=shrunk.ranged.to(device.torch).ranges)
    launched: list[tuple[Any, ...]] = []
    run, launch.run = launch.run, lambda *arguments: launched.append(arguments)
    timed: dict[Config, float] = {}
    failures: dict[str, str] = {}
    own, every = configs.choose(row, size, size), candidates(row, size)
    try:
        for config in device.while_time(every, SECONDS):
            try:
                kernel, *arguments = launches(row, config, size, inputs, launched)
                compiled = kernel.compile(capability)
                if compiled.metadata.shared > SHARED.get(capability, 99) * 1024:
                    failures[str(tuple(config))] = f"{compiled.metadata.shared // 1024} KiB of shared memory"
                    continue
                call = functools.partial(run, kernel, *arguments)
                with device.alone():
                    block = device.block()
                    block(call, device.few(WARM))
                    spilled = getattr(compiled, "n_spills", 0)  # known once it is loaded
                    # (A second walk, which seldom runs, may spill.)
                    if spilled and spilled > 64 and not kernel.constants["UNATTENDED"]:
                        failures[str(tuple(config))] = f"{spilled} registers spilled"
                        continue
                    timed[config] = block(call, device.few(CALLS))
            except Exception as error:  # whatever a compiler of many stages, or the driver, says of a candidate
                failures[str(tuple(config))] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                device.synchronize()  # raises if nothing more will run in this process
    finally:
        launch.run = run
        plan.use_table(configs.TABLE)
    found = {**about, "candidates": len(every), "timed": len(timed), "failures": failures}
    if not timed:
        first = next(iter(failures.values()), "there is no candidate")
        version = f"Triton {triton.__version__}"
        yield {**found, "status": "skipped", "message": f"{version}: none of {len(failures)} candidates runs: {first}"}
        return
    best = min(timed, key=lambda config: timed[config])
    gain = timed[own] / timed[best] if own in timed else None
    yield {**found, "config": list(best), "own": list(own), "seconds": timed[best], "gain": gain}
