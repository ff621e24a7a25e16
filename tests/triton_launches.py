"""Launches of the Triton kernels by the launcher of whichever Triton is imported, on a driver that writes them down:

    PYTHONPATH=.venv-triton-3.6.0:.:tests python -m triton_launches 90 FOLDER

A line of JSON with Triton's version; then one for each launch: its kernel, how many parameters the kernel has, and what
the driver got that it shouldn't have, "" for nothing. The driver is built in FOLDER.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from attnkern.triton_kernels import launch
from triton.backends.nvidia.driver import CudaDriver

import attnkern
import routes
from attnkern import masks

# What Triton's C code calls of the driver, and a launch as it came. A tensor map holds what it was to be made of.
DRIVER = r"""
#include <stdint.h>
#include <string.h>
#define DOES_NOTHING(name) int name(void) { return 0; }
DOES_NOTHING(cuInit) DOES_NOTHING(cuDeviceGet) DOES_NOTHING(cuDevicePrimaryCtxRetain) DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxGetDevice) DOES_NOTHING(cuCtxGetLimit) DOES_NOTHING(cuCtxSetLimit) DOES_NOTHING(cuDriverGetVersion)
DOES_NOTHING(cuFuncSetAttribute) DOES_NOTHING(cuFuncSetCacheConfig) DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuStreamIsCapturing) DOES_NOTHING(cuOccupancyMaxActiveClusters) DOES_NOTHING(cuTensorMapEncodeIm2col)
int cuCtxGetCurrent(uintptr_t* context) { return *context = 1, 0; }
int cuModuleLoadData(uintptr_t* module, const void* data) { return *module = 2, 0; }
int cuModuleGetFunction(uintptr_t* function, uintptr_t module, const char* name) { return *function = 3, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { return *value = 227 * 1024, 0; }
int cuFuncGetAttribute(int* value, int attribute, uintptr_t function) { return *value = 1024, 0; }
int cuPointerGetAttribute(uint64_t* value, int attribute, uint64_t pointer) { return *value = pointer, 0; }
int cuGetErrorString(int error, const char** text) { return *text = "an error", 0; }
int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, uint64_t address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box) {
  memset(map, 0, 128);
  *map++ = address;
  for (uint32_t n = 0; n < rank; ++n) *map++ = sizes[n];
  for (uint32_t n = 0; n + 1 < rank; ++n) *map++ = strides[n];
  for (uint32_t n = 0; n < rank; ++n) *map++ = box[n];
  return 0;
}
struct Config { uint32_t grid[3], block[3], shared; uint64_t stream; };
struct Config config;
uint32_t count, sizes[512], launches;
uint8_t parameters[512 * 128];
int cuLaunchKernelEx(const struct Config* given, uintptr_t function, void** values, void** extra) {
  config = *given;
  ++launches;
  uint8_t* at = parameters;
  for (uint32_t n = 0; n < count; at += sizes[n++]) memcpy(at, values[n], sizes[n]);
  return function == 3 && extra == NULL ? 0 : 1;
}
"""
STREAM = 77


class Config(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint32 * 7), ("stream", ctypes.c_uint64))


def driver_in(folder: Path) -> ctypes.CDLL:
    """The driver, built and loaded: what is linked to libcuda.so.1, or opens it, gets this one."""
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libcuda.so.1"
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    subprocess.run(["gcc", *flags, "-o", library, folder / "driver.c"], check=True)
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def parameters_of(ptx: str) -> list[int]:
    """Bytes of each parameter of a kernel."""
    (listed,) = re.findall(r"\.entry \S+\((.*?)\n\)", ptx, re.S)
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?", listed)
    return [int(bits) // 8 * int(length or 1) for bits, length in found]


def expected(kernel: launch.Kernel, args: tuple, compiled: Any) -> list[bytes]:
    """The values of the parameters, by the types that the kernel was compiled for."""
    maps = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    kinds = launch.leaves(tuple(kernel.signature.values()))
    found = []
    for (_, kind), (_, value) in zip(kinds, launch.leaves(args), strict=True):
        if kind.startswith("tensordesc"):
            made, size = next(maps), value.base.element_size()
            words = [value.base.data_ptr(), *value.shape[::-1]]
            words += [stride * size for stride in value.strides[-2::-1]] + list(made["block_size"][::-1])
            found.append(struct.pack(f"<{len(words)}Q", *words).ljust(128, b"\0"))
            found += [struct.pack("<i", n) for n in value.shape] + [struct.pack("<q", n) for n in value.strides]
        elif kind.startswith("*"):
            found.append(struct.pack("<Q", value.data_ptr()))
        elif kind != "constexpr":
            found.append(struct.pack({"i32": "<i", "i64": "<q", "fp32": "<f"}[kind], value))
    return [*found, bytes(8), bytes(8)]  # and no scratch memory, of two kinds


@contextlib.contextmanager
def recorded(capability: int, driver: ctypes.CDLL) -> Iterator[list[dict[str, Any]]]:
    """`backend="triton"` takes CPU tensors, and computes nothing. Gives its launches, with what was wrong with each."""
    launches: list[dict[str, Any]] = []
    run = launch.run

    def check(kernel, grid, args, index):
        compiled = kernel.compile(capability)
        want, sizes = expected(kernel, args, compiled), parameters_of(compiled.asm["ptx"])
        said = []
        if [len(value) for value in want] != sizes:
            said.append(f"{len(want)} parameters of {[len(value) for value in want]} bytes, the kernel has {sizes}")
        ctypes.c_uint32.in_dll(driver, "count").value = len(sizes)
        (ctypes.c_uint32 * 512).in_dll(driver, "sizes")[: len(sizes)] = sizes
        before = (number := ctypes.c_uint32.in_dll(driver, "launches")).value
        run(kernel, grid, args, index)
        if number.value != before + 1:
            said.append(f"{number.value - before} launches")
        raw = bytes((ctypes.c_uint8 * sum(sizes)).in_dll(driver, "parameters"))
        at = 0
        for n, (value, size) in enumerate(zip(want, sizes, strict=False)):
            if raw[at : at + size] != value:
                said.append(f"parameter {n} is {raw[at : at + size].hex()}, not {value.hex()}")
            at += size
        config, meta = Config.in_dll(driver, "config"), compiled.metadata
        got, wanted = (*config.words, config.stream), (grid, 1, 1, 32 * meta.num_warps, 1, 1, meta.shared, STREAM)
        if got != wanted:
            said.append(f"grid, block, shared memory and stream are {got}, not {wanted}")
        launches.append({"kernel": str(kernel), "parameters": len(sizes), "said": "; ".join(said)})

    nvidia = CudaDriver()
    nvidia.get_current_device = lambda: 0
    nvidia.get_device_capability = lambda device: divmod(capability, 10)
    triton.runtime.driver.set_active(nvidia)
    with (
        routes.triton(capability),
        patch.object(launch, "run", check),
        patch.object(launch, "_current_device", lambda: 0),
        patch.object(launch, "_stream", lambda index: STREAM),
        patch.object(torch.cuda, "device", lambda index: contextlib.nullcontext()),
    ):
        yield launches


def calls() -> None:
    """Kernels of every pass, with features whose tensors come in tuples of their own."""

    def leaf(*shape):
        return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)

    q, k, v, bias = leaf(2, 4, 70, 64), leaf(2, 2, 90, 64), leaf(2, 2, 90, 64), leaf(1, 4, 70, 90)
    documents = masks.packed(torch.tensor([0, 30, 70]), is_causal=True)
    sdpa = attnkern.scaled_dot_product_attention
    for out in (
        sdpa(q, k, v, is_causal=True, enable_gqa=True, backend="triton"),
        sdpa(q, k, v, attn_mask=bias, dropout_p=0.25, enable_gqa=True, backend="triton"),
        sdpa(q, k[:, :, :70], v[:, :, :70], attn_mask=documents, enable_gqa=True, backend="triton"),
    ):
        out.backward(torch.ones_like(out))
    out = attnkern.attention(q, k, v, enable_gqa=True, relative_bias=leaf(4, 159), backend="triton")
    out.backward(torch.ones_like(out))
    with torch.no_grad():
        sdpa(leaf(1, 4, 1, 64), leaf(1, 4, 2000, 64), leaf(1, 4, 2000, 64), backend="triton")
        pool, table = leaf(9, 4, 256, 64), torch.arange(8, dtype=torch.int32)[None]
        attnkern.attention(leaf(1, 4, 1, 64), pool, pool, block_table=table, backend="triton")


def main(capability: int, folder: Path) -> None:
    driver = driver_in(folder)
    triton.knobs.nvidia.libcuda_path = str(folder)
    print(json.dumps({"triton": triton.__version__}))
    with recorded(capability, driver) as launches:
        calls()
    for one in launches:
        print(json.dumps(one))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
