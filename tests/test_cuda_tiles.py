"""Hopper's tiles and products (csrc/cuda/smem_sm90.cuh, ptx_sm90.cuh), each shape of wgmma in all its forms."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import ptxsim
from ptxsim.kernels.references import Map

FILE = Path(__file__).parent / "cuda/tiles_sm90.cu"
SHAPES = {32: "bf16", 48: "f16", 64: "bf16", 80: "f16", 96: "bf16", 112: "f16", 128: "bf16", 160: "f16"}
SHAPES |= {192: "bf16", 256: "f16"}
M = K = 64


def tile_map(x: torch.Tensor, rows: int) -> bytes:
    """The map of a (rows, columns) or (batch, heads, rows, columns) tensor, as tensor_map.h makes it."""
    x = x if x.dim() == 4 else x[None, None]
    return Map(x, (128 // x.element_size(), rows, 1, 1), 128).encoded()


@pytest.mark.parametrize("n", SHAPES)
def test_products(n):
    """a b, with each operand by columns and by rows and a from registers; k ends eight columns short of the tile."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[SHAPES[n]]
    a, b = torch.randint(-8, 9, (M, K)).to(dtype), torch.randint(-8, 9, (K, n)).to(dtype)
    short = K - 8
    a[:, short:] = 0  # what TMA makes of the columns that the map leaves out
    given = a[:, :short].contiguous(), a.T.contiguous(), b.T.contiguous(), b
    d = torch.full((4, M, n), math.nan)
    maps = [tile_map(x, rows) for x, rows in zip(given, (M, K, n, K), strict=True)]
    kernel = ptxsim.cuda(FILE, f"tile_products_{SHAPES[n]}_n{n}", target=90)
    shared = 2 * 8192 + n * 128 + -(-n // 64) * 8192 + 8
    report = ptxsim.launch(kernel, (1,), *maps, d, block=128, shared=shared, tensors=given, undefined=[d], seed=n)
    assert torch.equal(d, (a.double() @ b.double()).float().expand(4, M, n))
    assert report.bank_conflicts == 0


def test_reductions_stay_within_each_head():
    """Two blocks add to one head of 80 rows of 52 columns, one to another; nothing is added past the ends."""
    total = torch.zeros(1, 2, 80, 52)
    kernel = ptxsim.cuda(FILE, "tile_reduce_add", target=90)
    for _ in range(2):
        ptxsim.launch(kernel, (2,), tile_map(total, 64), block=128, shared=2 * 8192, tensors=[total], seed=3)
    expected = np.zeros((1, 2, 80, 52), np.float32)
    expected[:, :, 32:] = 2 * (100 * np.arange(48)[:, None] + np.arange(52))
    assert np.array_equal(total.numpy(), expected)
