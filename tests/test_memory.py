"""Memory of the kernels grows with S * D, never with L * S: peak resident memory of a fresh process."""

import json
import os
import subprocess
import sys

import pytest

contract = pytest.mark.contract

# Peak growth over the call in MiB (VmHWM, reset before the call), the results included.
MEASURE = """
import json, sys, torch
import attnkern
length, heads, dtype, mode = json.loads(sys.argv[1])
torch.set_num_threads(2)
# Not in one storage: torch lays out a tangent, storage included, as its primal.
q, k, v = (torch.randn(1, heads, length, 64).to(getattr(torch, dtype)) for _ in range(3))
for x in (q, k, v):
    x.requires_grad_("forward" not in mode)
options = {"is_causal": True} if "causal" in mode else {}
mask = torch.ones(1, 1, 1, length, dtype=torch.bool) if "mask" in mode else None
bits = None
if "bits" in mode:
    bits = attnkern.masks.from_mask_mod(lambda b, h, i, j: (i - j) % 4 != 0, None, None, length, length)
    assert bits.bits.nbytes == length * length // 8
bias = torch.zeros(1, 1, 1, length, requires_grad=True) if "bias" in mode else None
small = attnkern.attention(*(x[:, :, :64] for x in (q, k, v)), backend="cpu")
if "forward" not in mode:
    small.backward(small.detach())  # imports and allocates what is needed once
    for x in (q, k, v):
        x.grad = None
along = [torch.randn_like(x) for x in (q, k, v)]
def call(*x):
    dense = mask if mask is not None else bias
    if dense is not None:
        dense = dense[..., : x[1].shape[2]]
    return attnkern.attention(*x, dense if bits is None or x[1].shape[2] < length else bits, backend="cpu", **options)
def jvp(*x):
    return torch.func.jvp(call, x, tuple(along))[1]
def double(*x):
    out = call(*x)
    first = torch.autograd.grad(out, x, out.detach(), create_graph=True)
    return torch.autograd.grad(first, x, along)
def over(*x):
    out, pull = torch.func.vjp(call, *x)
    return torch.func.jvp(lambda *y: torch.func.vjp(call, *y)[1](out.detach()), x, tuple(along))[1]
def status(name):
    return next(int(x.split()[1]) / 1024 for x in open("/proc/self/status") if x.startswith(name))
second = next((f for f in (jvp, double, over) if f.__name__ in mode), None)
if second is not None:
    whole, along = along, [x[:, :1, :512] for x in along]
    second(*(x[:, :1, :512].detach().requires_grad_() for x in (q, k, v)))
    along = whole
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
if second is not None:
    results = second(q, k, v)
else:
    out = call(q, k, v)
    if "forward" not in mode:
        out.backward(out.detach())
print(status("VmHWM") - before)
"""

# What is freed goes back to the system at once. Else glibc moves its thresholds with what a process frees, and keeps up
# to 16 MiB more in one run than in the next.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**16),
    "MALLOC_TRIM_THRESHOLD_": str(2**16),
}


def growth(length, heads, dtype, mode):
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps([length, heads, dtype, mode])],
        env=os.environ | ALLOCATOR,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return float(result.stdout)


@contract(13)
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        ("float32", "forward"),
        ("float32", "forward bits"),
        ("bfloat16", "backward bits"),
        ("float32", "backward causal"),
        ("bfloat16", "backward causal"),
        ("float32", "backward mask"),
        ("bfloat16", "backward bias"),
    ],
)
def test_peak_growth(dtype, mode):
    """4096 queries and keys in 4 heads: the scores alone would be 256 MiB, bools of them for all heads 16 MiB; an input
    is 4 MiB in float32."""
    length, heads = 4096, 4
    tensors = 1 if "forward" in mode else 4  # out, and the gradients of query, key and value
    assert growth(length, heads, dtype, mode) < (tensors + 1) * length * heads * 64 * 4 / 2**20 + 4


@contract(13, 49, 50)
@pytest.mark.parametrize(
    ("dtype", "mode", "results"),
    [
        ("float32", "jvp causal", 2),
        ("bfloat16", "double bias", 8),
        ("float32", "over causal", 8),
    ],
)
def test_peak_growth_of_forward_mode_and_of_second_derivatives(dtype, mode, results):
    """The scores of 4096 queries and keys would be 64 MiB, once; there are some tiles of 1 MiB, and the results."""
    length = 4096
    assert growth(length, 1, dtype, mode) < (results + 1) * length * 64 * 4 / 2**20 + 32


@contract(13)
def test_growth_is_linear_in_the_length():
    """What further queries and keys of one head cost is within twice what output and gradients take."""
    short, long = growth(2048, 1, "float32", "backward causal"), growth(16384, 1, "float32", "backward causal")
    assert long - short < 2 * 4 * (16384 - 2048) * 64 * 4 / 2**20 + 2
