// What the launches of all kernels share: by dtype, by class of head size, and the launch itself. Host code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/params.h"

namespace attnkern::cuda {

// What a block gets of shared memory without asking, less than the 48 KB that are static and dynamic memory together:
// no kernel declares more than the rest.
constexpr int kUnaskedShared = 47 * 1024;

// Enqueues `blocks` blocks (1-D) of a kernel that takes one struct; a cudaError_t as int.
template <typename Params>
int launch_kernel(void (*kernel)(Params), int64_t blocks, int threads, int shared_bytes, const Params& params,
                  void* stream) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > kUnaskedShared) {
    const cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernel(function, dim3(static_cast<unsigned>(blocks)), dim3(threads), arguments, shared_bytes,
                          static_cast<cudaStream_t>(stream));
}

// run(T{}) for the element type of a 16-bit dtype.
template <typename Run>
int by_element(DType dtype, Run run) {
  switch (dtype) {
    case DType::kBFloat16: return run(__nv_bfloat16{});
    case DType::kFloat16: return run(__half{});
    default: return cudaErrorInvalidValue;
  }
}

// `by_element`, for float32 too.
template <typename Run>
int by_dtype(DType dtype, Run run) {
  return dtype == DType::kFloat32 ? run(float{}) : by_element(dtype, run);
}

// Kernels exist for these widths of tile; what a head size leaves of one is filled with zeros.
constexpr int kHeadClasses[] = {32, 64, 96, 128, 192, 256};

constexpr int kMostHead = 256, kWideHead = kMaxHeadDim;  // the widest class, and what forward_wide.cu holds

// The narrowest that holds both head sizes; 0 if none does.
constexpr int head_class(int64_t head_dim, int64_t head_dim_v) {
  for (const int width : kHeadClasses) {
    if (head_dim <= width && head_dim_v <= width) return width;
  }
  return 0;
}

// run(std::integral_constant<int, kHeadDim>{}) for a class.
template <typename Run>
int by_head_class(int width, Run run) {
  switch (width) {
    case 32: return run(std::integral_constant<int, 32>{});
    case 64: return run(std::integral_constant<int, 64>{});
    case 96: return run(std::integral_constant<int, 96>{});
    case 128: return run(std::integral_constant<int, 128>{});
    case 192: return run(std::integral_constant<int, 192>{});
    case 256: return run(std::integral_constant<int, 256>{});
    default: return cudaErrorInvalidValue;
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace attnkern::cuda
