// Devices and errors. Host code alone.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace attnkern::cuda {

int use_device(int index, Chip& chip) {
  // Not only for the runtime that is linked in here, which has a current device of its own: a thread that has asked
  // nothing of CUDA yet has no context, and the driver encodes no tensor map without one.
  cudaError_t error = cudaSetDevice(index);
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, index);
  };
  int major = 0, minor = 0;
  get(chip.multiprocessors, cudaDevAttrMultiProcessorCount);
  get(chip.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(chip.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(major, cudaDevAttrComputeCapabilityMajor);
  get(minor, cudaDevAttrComputeCapabilityMinor);
  chip.capability = 10 * major + minor;
  return error;
}

std::string error_text(int error, const Chip& chip) {
  if (is_refused_map(error)) {
    const auto name_of = driver_function<PFN_cuGetErrorName_v6000>("cuGetErrorName", 6000);
    const char* name = nullptr;
    if (name_of == nullptr || name_of(static_cast<CUresult>(-error), &name) != CUDA_SUCCESS) name = "unknown";
    return std::string("the driver refuses a tensor map: ") + name + " (CUresult " + std::to_string(-error) + ")";
  }
  const std::string text = cudaGetErrorString(static_cast<cudaError_t>(error));
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled: {
      const std::string number = std::to_string(chip.capability / 10) + "." + std::to_string(chip.capability % 10);
      return "the library has no binary for compute capability " + number + ", and the driver makes none of its PTX (" +
             text + "): build with ATTNKERN_CUDA_ARCHS=" + std::to_string(chip.capability) + ", or update the driver";
    }
    default: return "CUDA error: " + text;
  }
}

}  // namespace attnkern::cuda
