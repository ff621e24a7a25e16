"""Peak memory of a pass over long rows beyond inputs and results, against F.sdpa: `python -m bench.training_memory`.

Each figure is of a process of its own (`bench.memory.peak_growth`), after a short call of the same kind. F.sdpa has a
row where it needs no matrix of scores.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnkern

from . import memory

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


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 32768
    print(f"| {length} long, size {HEAD_DIM} | attnkern, 1 thread | attnkern, 2 threads | F.sdpa, 2 threads |")
    print("| --- | --- | --- | --- |")
    for row in ROWS:
        cells = []
        for provider, threads in (("attnkern", 1), ("attnkern", 2), ("sdpa", 2)):
            if provider == "sdpa" and any(word in row for word in OURS_ALONE):
                cells.append("-")
                continue
            command = [sys.executable, "-m", "bench.training_memory", row, provider, str(threads), str(length)]
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            cells.append(f"{int(answer) / 2**20:.1f} MiB")
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 5:
        print(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    else:
        main()
