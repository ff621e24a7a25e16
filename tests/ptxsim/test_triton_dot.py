"""tl.dot as Triton compiles it, with exact results: fragments, descriptors and swizzles of somebody who reads the PTX
ISA independently, and whose kernels run on hardware."""

import re

import pytest
import torch
import triton
import triton.language as tl

import ptxsim


@triton.jit
def product(
    a_ptr,
    b_ptr,
    c_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    A_BY_COLUMNS: tl.constexpr,
    B_BY_COLUMNS: tl.constexpr,
    A_IN_REGISTERS: tl.constexpr,
):
    m, n = tl.arange(0, M), tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for first in tl.static_range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        if A_BY_COLUMNS:
            a = tl.trans(tl.load(a_ptr + k[:, None] * M + m[None, :]))
        else:
            a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        if B_BY_COLUMNS:
            b = tl.trans(tl.load(b_ptr + n[:, None] * K + k[None, :]))
        else:
            b = tl.load(b_ptr + k[:, None] * N + n[None, :])
        if A_IN_REGISTERS:
            a = (a * 2).to(a.dtype)
        total = tl.dot(a, b, total)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total)


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# dtype, M, N, K, step of k, A by columns, B by columns, A in registers, warps, what the PTX must hold
HOPPER = [
    (F16, 64, 64, 128, 64, False, False, False, 4, r"wgmma\S+m64n64k16.f32.f16.f16 .*%rd\d+, %rd\d+, .* 0, 1;"),
    (BF16, 128, 128, 64, 64, False, True, False, 4, r"wgmma\S+m64n128k16.f32.bf16.bf16 .* 0, 0;"),
    (BF16, 128, 64, 32, 32, True, False, False, 4, r"wgmma\S+m64n64k16.f32.bf16.bf16 .* 1, 1;"),
    (F16, 64, 16, 64, 16, True, True, False, 4, r"wgmma\S+m64n16k16.f32.f16.f16 .* 1, 0;"),
    (BF16, 128, 256, 32, 32, False, False, False, 8, r"wgmma\S+m64n256k16"),
    (BF16, 128, 32, 32, 32, True, False, False, 8, r"wgmma\S+m64n32k16.f32.bf16.bf16 .* 1, 1;"),
    (F16, 64, 32, 32, 32, False, False, True, 4, r"wgmma\S+m64n32k16.f32.f16.f16 .*{%r\d+,%r\d+,%r\d+,%r\d+}, %rd"),
    (F32, 64, 64, 64, 32, False, False, False, 4, r"wgmma\S+m64n64k8.f32.tf32.tf32"),
    (E4M3, 64, 64, 64, 64, False, True, False, 4, r"wgmma\S+m64n64k32.f32.e4m3.e4m3"),
    (E5M2, 64, 32, 128, 64, False, False, False, 4, r"wgmma\S+m64n32k32.f32.e5m2.e5m2"),
]
AMPERE = [
    (F16, 64, 64, 64, 32, False, False, False, 4, r"ldmatrix\S+trans[^$]*mma\S+m16n8k16.row.col.f32.f16.f16.f32"),
    (BF16, 64, 32, 64, 64, True, True, True, 4, r"ldmatrix\S+x4.trans[^$]*mma\S+m16n8k16.row.col.f32.bf16.bf16.f32"),
    (F32, 32, 32, 64, 32, False, True, False, 2, r"mma\S+m16n8k8.row.col.f32.tf32.tf32.f32"),
    (F16, 32, 16, 64, 32, False, True, False, 1, r"mma\S+m16n8k16"),
]


@pytest.mark.parametrize(
    ("target", "case"), [(90, c) for c in HOPPER] + [(80, c) for c in AMPERE], ids=lambda x: str(x)[:70]
)
def test_tl_dot(target, case):
    dtype, m, n, k, step, a_columns, b_columns, in_registers, warps, pattern = case
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-4, 5, (m, k), generator=generator).float()
    b = torch.randint(-4, 5, (k, n), generator=generator).float()
    expected = a @ b * (2 if in_registers else 1)
    first = (a.T.contiguous() if a_columns else a).to(dtype)
    second = (b.T.contiguous() if b_columns else b).to(dtype)
    options = {
        "M": m,
        "N": n,
        "K": k,
        "STEP": step,
        "A_BY_COLUMNS": a_columns,
        "B_BY_COLUMNS": b_columns,
        "A_IN_REGISTERS": in_registers,
        "target": target,
        "num_warps": warps,
    }
    out = torch.zeros(m, n)
    compiled = ptxsim.compile_triton(product, first, second, out, **options)
    assert re.search(pattern, compiled.text)
    for seed in (None, 1, 2):
        out.zero_()
        ptxsim.launch(product, 1, first, second, out, seed=seed, **options)
        assert torch.equal(out, expected)
