"""Small pieces of PTX for the simulator's own tests."""

from __future__ import annotations

import numpy as np
import torch

import ptxsim

_PRELUDE = """
.version 9.0
.target sm_{target}
.address_size 64
{module}
.visible .entry snippet({params})
{{
  .reg .pred %p<32>;
  .reg .b16 %h<64>;
  .reg .b32 %r<128>;
  .reg .f32 %f<128>;
  .reg .b64 %rd<64>;
  .reg .f64 %d<32>;
  .reg .b64 %arg<16>;
  .reg .b32 %tid, %gid;
  {declarations}
{loads}
  mov.u32 %tid, %tid.x;
  mov.u32 %r127, %ctaid.x;
  mov.u32 %r126, %ntid.x;
  mad.lo.u32 %gid, %r127, %r126, %tid;
{body}
  ret;
}}
"""


def text(body: str, arguments: int, *, target: int = 80, declarations: str = "", module: str = "") -> str:
    """A module with one kernel: %arg0.. hold the pointers, %tid the thread, %gid the thread over all blocks; registers
    %p %h %r %f %rd %d are declared."""
    return _PRELUDE.format(
        target=f"{target}a" if target in (90, 100, 120) else target,
        params=", ".join(f".param .u64 p{n}" for n in range(arguments)),
        loads="\n".join(f"  ld.param.u64 %arg{n}, [p{n}];" for n in range(arguments)),
        body=body,
        declarations=declarations,
        module=module,
    )


def run(body: str, *tensors, threads: int = 32, blocks: int = 1, target: int = 80, **options) -> ptxsim.Report:
    """Runs the body on CPU tensors (or numpy arrays, which are written in place)."""
    keep = [torch.from_numpy(t) if isinstance(t, np.ndarray) else t for t in tensors]
    inside = {k: options.pop(k) for k in ("declarations", "module") if k in options}
    kernel = ptxsim.from_ptx(text(body, len(keep), target=target, **inside), target=target)
    return ptxsim.launch(kernel, blocks, *keep, block=threads, **options)


def each(instruction: str, out: str, *inputs: np.ndarray, target: int = 80, pred: bool = False) -> np.ndarray:
    """Runs one instruction (or several lines) on every element: sources are the registers %a, %b, %c, %e of the inputs'
    widths, the destination is %out (%q, a predicate, if `pred`). `out`: the result's numpy dtype."""
    n = max(len(x) for x in inputs)
    arrays = [np.array(np.broadcast_to(x, n)) for x in inputs]
    result = np.zeros(n, np.uint8 if pred else out)
    size = result.dtype.itemsize
    names = dict(zip("abce", arrays, strict=False))
    lines = []
    declarations = ".reg .pred %q;"
    for k, (name, x) in enumerate(names.items()):
        width = x.dtype.itemsize
        declarations += f" .reg .b{max(8 * width, 16)} %{name};"
        lines += [f"mul.wide.u32 %rd0, %gid, {width};", f"add.u64 %rd0, %rd0, %arg{k};"]
        lines += [f"ld.global.b{8 * width} %{name}, [%rd0];"]
    declarations += f" .reg .b{max(8 * size, 16)} %out;"
    lines += [instruction]
    if pred:
        lines += ["selp.b16 %out, 1, 0, %q;"]
    lines += [f"mul.wide.u32 %rd0, %gid, {size};", f"add.u64 %rd0, %rd0, %arg{len(arrays)};"]
    lines += [f"st.global.b{8 * size} [%rd0], %out;"]
    threads = 1024 if n % 1024 == 0 else 32 if n % 32 == 0 else 1
    run(
        "\n".join(lines),
        *arrays,
        result,
        threads=threads,
        blocks=n // threads,
        target=target,
        declarations=declarations,
    )
    return result
