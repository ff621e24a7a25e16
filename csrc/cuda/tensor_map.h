// Tensor maps: what TMA needs to know of a tensor, encoded by the driver. Host code; the driver's function is asked for
// at run time, so that nothing is linked against libcuda.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstring>

#include "common/params.h"
#include "cuda/ptx_sm90.cuh"

namespace attnkern::cuda {

// Whether TMA can read or write `view` (rows of `width` elements of `element_bytes`): dense rows, and the address and
// all strides multiples of 16 bytes. A broadcast dimension (stride 0) is no obstacle but for rows.
inline bool fits_tensor_map(const View& view, int64_t length, int64_t width, int64_t element_bytes) {
  constexpr int64_t kMostBytes = int64_t{1} << 40;
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0 || (view.stride[3] != 1 && width > 1)) return false;
  if (view.stride[2] == 0 && length > 1) return false;
  for (int n = 0; n < 3; ++n) {
    const int64_t bytes = view.stride[n] * element_bytes;
    if (bytes < 0 || bytes >= kMostBytes || bytes % 16 != 0) return false;
  }
  return true;
}

// A function of the driver, by its type of cudaTypedefs.h; null if the driver has none of this version.
template <typename Function>
Function driver_function(const char* name, [[maybe_unused]] unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(function) : nullptr;
}

// The map of `view`, (batch, heads, length, width), as kernels address it: coordinates (column, row, head, batch).
// Boxes are `rows` x 128 bytes with the 128-byte swizzle; outside of the tensor zeros are read and nothing is written,
// for each head apart. A dimension of stride 0 has one entry in the map: its coordinate must be 0. An error as in
// launch.h.
inline int make_tensor_map(ptx::TensorMap& map, CUtensorMapDataType type, int64_t element_bytes, const View& view,
                           int64_t batch, int64_t heads, int64_t length, int64_t width, int rows) {
  using Encode = PFN_cuTensorMapEncodeTiled_v12000;
  static_assert(sizeof(CUtensorMap) == sizeof(ptx::TensorMap));
  static const Encode encode = driver_function<Encode>("cuTensorMapEncodeTiled", 12000);
  if (encode == nullptr) return -CUDA_ERROR_NOT_SUPPORTED;
  const int64_t counts[4] = {width, length, heads, batch};
  cuuint64_t sizes[4], strides[3];
  sizes[0] = static_cast<cuuint64_t>(width);
  for (int n = 1; n < 4; ++n) {
    const int64_t stride = view.stride[3 - n] * element_bytes;
    sizes[n] = stride == 0 ? 1 : static_cast<cuuint64_t>(counts[n]);
    // Of a single entry: any that the driver takes.
    strides[n - 1] =
        stride == 0 ? static_cast<cuuint64_t>((width * element_bytes + 15) / 16 * 16) : static_cast<cuuint64_t>(stride);
  }
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / element_bytes), static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  alignas(64) CUtensorMap made;
  const CUresult result =
      encode(&made, type, 4, view.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return -result;
  std::memcpy(&map, &made, sizeof(map));
  return cudaSuccess;
}

inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
         : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

}  // namespace attnkern::cuda
