"""Peak memory of a pass over long rows beyond inputs and results, against F.sdpa: `python -m bench.training_memory`.

Each figure is of a process of its own (`bench.memory.peak_growth`), after a short call of the same kind. F.sdpa has a
row where it needs no matrix of scores. Rows go to a file as they finish, and the table to a page beside it.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnkern

from . import machine, memory, report
from .record import Log, Row

ROWS = (
    *("fp32 forward", "fp32 training", "bf16 training", "bf16 training, causal", "bf16 training, key mask"),
    *("bf16 training, prefix ranges", "bf16 training, packed", "bf16 training, sinks", "bf16 training, relative bias"),
    "bf16 training, causal, 4 heads to 1",
)
OURS_ALONE = ("ranges", "packed", "sinks", "relative", "heads")
HEAD_DIM, SEQUENCE = 64, 4096


def inputs(row: str, length: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key, value, and the call's options."""
    dtype = torch.float32 if "fp32" in row else torch.bfloat16
    heads = 4 if "heads" in row else 1
    tensors = [torch.randn(1, h, length, HEAD_DIM).to(dtype) for h in (heads, 1, 1)]
    options: dict[str, Any] = {"is_causal": True} if "causal" in row else {}
    if "heads" in row:
        options["enable_gqa"] = True
    if "key mask" in row:
        options["attn_mask"] = torch.ones(1, 1, 1, length, dtype=torch.bool)
    if "sinks" in row:
        options["sinks"] = torch.zeros(heads, requires_grad=True)
    if "relative" in row:
        options["relative_bias"] = torch.zeros(2 * length - 1, requires_grad=True)
    rows = torch.arange(length, dtype=torch.int32)
    if "packed" in row:
        options["key_ranges"] = torch.stack([rows // SEQUENCE * SEQUENCE, rows + 1], -1).view(1, 1, length, 1, 2)
    if "ranges" in row:
        ends = (rows + 1).clamp(min=length // 4)
        options["key_ranges"] = torch.stack([torch.zeros_like(rows), ends], -1).view(1, 1, length, 1, 2)
    return tensors, options


def measure(row: str, provider: str, threads: int, length: int) -> int | None:
    """Bytes, in this process."""
    torch.set_num_threads(threads)
    attention: Any = attnkern.attention if provider == "attnkern" else F.scaled_dot_product_attention

    def call(tensors: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_("training" in row) for x in tensors]
        out = attention(*leaves, **options)
        return (out, *torch.autograd.grad(out, leaves, out.detach())) if "training" in row else (out,)

    call(*inputs(row, 256))
    given = inputs(row, length)
    results, peak = memory.peak_growth(lambda: call(*given), torch.device("cpu"))
    return None if peak is None else peak - memory.size_of(results)


def table(rows: Iterable[Row]) -> str:
    """In Markdown: what each call took beyond its inputs and results."""
    cells: dict[str, dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: (row["provider"] != "attnkern", row["threads"])):
        column = f"{row['provider']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"
        cells.setdefault(row["case"], {})[column] = report.size(row["peak"])
    columns = list(dict.fromkeys(column for found in cells.values() for column in found))
    lines = [["call", *columns], ["---"] * (1 + len(columns))]
    lines += [[case, *(found.get(column, "-") for column in columns)] for case, found in cells.items()]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main(length: int, path: Path) -> None:
    log = Log(path)  # goes on where it stopped
    command = shlex.join(("python", "-m", "bench.training_memory", *sys.argv[1:]))
    log.start_run(machine.provenance(torch.device("cpu")) | {"command": command})
    sides = [("attnkern", 1), ("attnkern", 2), ("F.sdpa", 1), ("F.sdpa", 2)]
    for provider, threads in sides:
        for row in ROWS:
            call = (row, provider, str(threads), str(length))
            key = shlex.join(call)
            if log.finished(key) or (provider == "F.sdpa" and any(word in row for word in OURS_ALONE)):
                continue
            answer = subprocess.run(
                [sys.executable, "-m", "bench.training_memory", *call], stdout=subprocess.PIPE, text=True, check=True
            ).stdout
            found = {"key": key, "case": row, "provider": provider, "threads": threads, "length": length}
            log.add(found | {"head_dim": HEAD_DIM, "peak": int(answer), "status": "ok"})
            print(row, provider, threads, report.size(int(answer)), flush=True)
    log.close()
    path.with_suffix(".md").write_text(table(log.rows.values()), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 5:
        print(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    elif len(sys.argv) == 3:
        main(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        sys.exit("python -m bench.training_memory LENGTH ROWS.jsonl")
