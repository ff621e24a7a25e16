"""``python -m bench.tune``: the Triton kernels' best configurations on this device, as a table in JSON.

Every row of the table (attnkern/triton_kernels/configs.py) that the device's chip uses is a causal problem; of each,
every candidate that compiles, fits and doesn't spill much is timed, and the fastest written. A table is used by
``attnkern.triton_kernels.plan.use_table(configs.load(path))``; rows that are to be shipped are copied into configs.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from attnkern.triton_kernels import configs, launch, plan
from attnkern.triton_kernels.configs import Config, Row
from rich.console import Console

from attnkern.backends import triton as backend

from . import machine
from .timing import _cuda_block

console = Console(highlight=False)
if not console.is_terminal:  # a log has no width; its lines must not be cut
    console = Console(highlight=False, width=160)
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}  # KiB that a block may have
LENGTH, TOKENS, WIDTH = 4096, 16384, 2048
CALLS, WARM = 20, 5


def rows_of(capability: int) -> list[tuple[Row, int]]:
    """The rows, and the head sizes in them, from which a chip takes its configurations."""
    arch = configs.arch_class(capability, configs.has_tma(capability))
    found: dict[tuple[Row, int], None] = {}
    for row, by_size in configs.TABLE.items():
        if row.arch in (arch, 80 if arch == 86 else arch):
            found |= {(row._replace(arch=arch), size): None for size in by_size}
    return list(found)


def candidates(row: Row, size: int) -> Iterator[Config]:
    """The table's own first; then every tile whose accumulators can fit in registers."""
    yield configs.choose(row, size, size)
    pointers = configs.chunk(size, size, row.itemsize, row.kernel not in configs.MMA_SYNC) > 0
    for rows, cols, warps, stages in itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3)):
        by_keys = row.kernel.endswith("dkdv")
        wgmma = row.arch == 90 and (cols if by_keys else rows) >= 64
        # By pointers it would read what cp.async has written, without a fence between.
        if wgmma and (row.kernel in configs.MMA_SYNC or (pointers and stages > 1)):
            continue
        accumulators = (2 * cols if by_keys else rows) * size
        if accumulators + 2 * rows * cols <= 32 * warps * 224:
            yield Config(rows, cols, warps, stages)


def tensors_of(row: Row, size: int, device: str) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """query, key and value of the row's problem, and its bias."""
    dtype = torch.bfloat16 if row.itemsize == 2 else torch.float32
    shape = (TOKENS // LENGTH, max(1, WIDTH // size), LENGTH, size)
    inputs = [torch.randn(shape, dtype=dtype, device=device) for _ in range(3)]
    bias = torch.randn(1, shape[1], LENGTH, LENGTH, dtype=dtype, device=device) if row.feature == "tile" else None
    return inputs, bias


def launches(row: Row, config: Config, size: int, tensors: Any, launched: list) -> tuple[Any, ...]:
    """The arguments of `launch.run` for this row's kernel with `config`."""
    plan.use_table({**configs.TABLE, row: {size: config}})
    inputs, bias = tensors
    score: Any = (size**-0.5, 30.0 if row.feature == "mods" else 0.0, plan.UNBOUNDED, 0, 0, 0.0)
    launched.clear()
    if row.kernel == "forward":
        arguments: Any = (*inputs, bias, None, *score, True)
        backend.forward(*arguments)
        return launched[-1]
    q = inputs[0]
    lse = torch.zeros(q.shape[:3], device=q.device)
    if row.kernel == "tangent":
        arguments = (*inputs, bias, None, *inputs, bias, q, lse, *score)
        backend.tangent(*arguments)
        return launched[-1]
    wanted = plan.GRAD_Q if row.kernel.endswith("dq") else plan.GRAD_K | plan.GRAD_V
    if row.kernel.startswith("second"):
        arguments = (*inputs, bias, q, None, *inputs, bias, None, q, lse, *score, wanted)
        backend.second_backward(*arguments)
        return launched[-1]
    arguments = (q, None, *inputs, bias, None, q, lse, *score, wanted)
    backend.backward(*arguments)
    return launched[-1]


def main(
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = machine.ROOT / "bench" / "runs" / "tuned.json",
    only: Annotated[str, typer.Option(help="Rows whose description holds it, such as 'dkdv' or '128'.")] = "",
    dry_run: Annotated[
        int, typer.Option("--dry-run", help="Up to the device: compile each row's own for this capability (90, ...).")
    ] = 0,
) -> None:
    """Times candidates for every row and writes the best."""
    capability = dry_run or launch.capability(torch.cuda.current_device())
    launched: list[tuple[Any, ...]] = []
    run, capability_of, processors_of = launch.run, launch.capability, launch.processors
    launch.run = lambda *arguments: launched.append(arguments)
    launch.capability = lambda index: capability
    if dry_run:
        launch.processors = lambda index: 132
    best: dict[Row, dict[int, Config]] = {}
    try:
        for row, size in rows_of(capability):
            about = f"{row.kernel} {8 * row.itemsize}-bit {row.feature} head size {size}"
            if only not in about:
                continue
            tensors = tensors_of(row, size, "meta" if dry_run else "cuda")
            if dry_run:
                config = configs.choose(row, size, size)
                kernel = launches(row, config, size, tensors, launched)[0]
                shared = kernel.compile(capability).metadata.shared // 1024
                fits = "fits" if shared <= SHARED[capability] else "does not fit"
                console.print(
                    f"{about}: {tuple(config)} compiles and {fits} ({shared} KiB); {_count(row, size)} candidates"
                )
                continue
            best.setdefault(row, {})[size] = _fastest(row, size, tensors, launched, run, capability, about)
    finally:
        launch.run, launch.capability, launch.processors = run, capability_of, processors_of
        plan.use_table(configs.TABLE)
    if best:
        out.parent.mkdir(parents=True, exist_ok=True)
        configs.dump(best, out, {"device": torch.cuda.get_device_name(), "torch": torch.__version__})
        console.print(f"table  {out}")


def _count(row: Row, size: int) -> int:
    return len(set(candidates(row, size)))


def _fastest(row: Row, size: int, tensors: Any, launched: list, run: Any, capability: int, about: str) -> Config:
    block = _cuda_block(torch.device("cuda"))
    timed: dict[Config, float] = {}
    for config in dict.fromkeys(candidates(row, size)):
        kernel, *arguments = launches(row, config, size, tensors, launched)
        try:
            compiled = kernel.compile(capability)
            if compiled.metadata.shared > SHARED.get(capability, 99) * 1024:
                continue
            run(kernel, *arguments)
            if compiled.n_spills > 64:
                continue
            block(lambda k=kernel, a=arguments: run(k, *a), WARM)
            timed[config] = block(lambda k=kernel, a=arguments: run(k, *a), CALLS)
        except Exception as error:  # whatever a compiler of many stages, or the driver, says of a candidate
            console.print(f"{about}: {tuple(config)} fails: {type(error).__name__}")
    config = min(timed, key=lambda c: timed[c])
    own = timed.get(configs.choose(row, size, size))
    versus = f", {own / timed[config]:.2f}x the table's" if own else ""
    console.print(f"{about}: {tuple(config)} {timed[config] * 1e6:.1f} us of {len(timed)} candidates{versus}")
    return config


if __name__ == "__main__":
    typer.run(main)
