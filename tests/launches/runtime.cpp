// A CUDA runtime without a GPU: kernels register as with the real one, a launch is handed to `launched`. Only what the
// product's host code calls is here; anything else fails to link. And between torch's C ABI and that code: operators
// for CUDA tensors are registered for CPU tensors, and every tensor that is made or whose memory is used is told of
// (the linker's --wrap puts __wrap_x in the place of x, which is __real_x then).
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <cstring>
#include <map>

#include "cuda/left_out.h"

struct Dim3 {
  unsigned x, y, z;
};
// What a launch comes back with: 0, or a cudaError_t. `most`: what its static and dynamic shared memory may be
// together, by what was asked for.
using Launched = int (*)(const char* kernel, const unsigned* grid, const unsigned* block, uint64_t shared,
                         uint64_t most, void** arguments);
// A tensor that is made (its contents undefined) or used: a reference of its own, which the callee takes over.
using Told = void (*)(AtenTensorHandle tensor, int made);
using Zeroed = void (*)(void* address, uint64_t bytes);
// cuTensorMapEncodeTiled, its enumerations as int.
using Encode = int (*)(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                       const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave, int swizzle,
                       int promotion, int fill);

namespace {
Launched launched = nullptr;
Told told = nullptr;
Zeroed zeroed = nullptr;
Encode encode = nullptr;
std::map<const void*, const char*>& kernels() {
  static std::map<const void*, const char*> map;
  return map;
}
std::map<const void*, int>& shared_limits() {
  static std::map<const void*, int> map;
  return map;
}
void* handle = nullptr;
bool has_context = false;  // as a thread's: made by cudaSetDevice, asked for by the driver
int launch_error = 0;      // what every launch comes back with
int shared_per_block = 0;  // what the chip gives one block at most
int capability = 0;        // compute capability times 10
int multiprocessors = 0;
constexpr int kInvalidValue = 1, kDefaultShared = 48 * 1024;

// The host code keeps the driver's function for good; `encode` may change.
AOTITorchError tell(AOTITorchError error, AtenTensorHandle tensor, bool made) {
  AtenTensorHandle own = nullptr;
  if (error == AOTI_TORCH_SUCCESS && told != nullptr) error = aoti_torch_new_tensor_handle(tensor, &own);
  if (own != nullptr) told(own, made);
  return error;
}

int encode_tensor_map(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                      const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion,
                      int fill) {
  constexpr int kInvalidContext = 201;
  if (!has_context) return kInvalidContext;
  if (encode == nullptr) return kInvalidValue;
  return encode(map, type, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill);
}
int error_name(int error, const char** name) {
  *name = error == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_INVALID_CONTEXT";
  return 0;
}
}  // namespace

extern "C" {

__attribute__((visibility("default"))) void set_callbacks(Launched on_launch, Told on_tensor, Zeroed on_zeros) {
  launched = on_launch, told = on_tensor, zeroed = on_zeros;
}

__attribute__((visibility("default"))) void set_encode(Encode function) { encode = function; }

__attribute__((visibility("default"))) void set_chip(int target, int count, int bytes) {
  capability = target;
  multiprocessors = count;
  shared_per_block = bytes;
}

__attribute__((visibility("default"))) void set_left_out(int families) { attnkern::cuda::left_out = families; }

// A thread that has asked nothing of CUDA yet; what launches come back with.
__attribute__((visibility("default"))) void begin_thread(int error) {
  has_context = false;
  launch_error = error;
}

int cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long, int* found) {
  constexpr int kSymbolNotFound = 1;
  *function = nullptr;
  if (std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0) *function = reinterpret_cast<void*>(&encode_tensor_map);
  if (std::strcmp(symbol, "cuGetErrorName") == 0) *function = reinterpret_cast<void*>(&error_name);
  *found = *function != nullptr ? 0 : kSymbolNotFound;
  return 0;
}

int cudaSetDevice(int device) {
  has_context = true;
  return device <= 0 ? 0 : kInvalidValue;  // -1: a CPU tensor's
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int kMultiProcessorCount = 16, kMaxSharedMemoryPerMultiprocessor = 81, kMaxSharedMemoryPerBlockOptin = 97;
  constexpr int kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76;
  switch (attribute) {
    case kMultiProcessorCount: *value = multiprocessors; return 0;
    case kMaxSharedMemoryPerMultiprocessor: *value = shared_per_block + 1024; return 0;
    case kMaxSharedMemoryPerBlockOptin: *value = shared_per_block; return 0;
    case kComputeCapabilityMajor: *value = capability / 10; return 0;
    case kComputeCapabilityMinor: *value = capability % 10; return 0;
    default: return kInvalidValue;
  }
}

int aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

AOTITorchError __wrap_aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __real_aoti_torch_library_init_impl(const char* library, const char* key, const char* file,
                                                   uint32_t line, TorchLibraryHandle* made);
AOTITorchError __wrap_aoti_torch_library_init_impl(const char* library, const char* key, const char* file,
                                                   uint32_t line, TorchLibraryHandle* made) {
  const char* own = std::strcmp(key, "CUDA") == 0 ? "CPU" : key;
  return __real_aoti_torch_library_init_impl(library, own, file, line, made);
}

AOTITorchError __real_aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                                               int32_t dtype, int32_t device_type, int32_t device_index,
                                               AtenTensorHandle* made);
AOTITorchError __wrap_aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                                               int32_t dtype, int32_t device_type, int32_t device_index,
                                               AtenTensorHandle* made) {
  const auto error = __real_aoti_torch_empty_strided(dims, sizes, strides, dtype, device_type, device_index, made);
  return tell(error, *made, true);
}

AOTITorchError __real_aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** pointer);
AOTITorchError __wrap_aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** pointer) {
  return tell(__real_aoti_torch_get_data_ptr(tensor, pointer), tensor, false);
}

int cudaMemsetAsync(void* address, int value, std::size_t bytes, void*) {
  std::memset(address, value, bytes);
  if (zeroed != nullptr) zeroed(address, bytes);
  return 0;
}

void** __cudaRegisterFatBinary(void*) { return &handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  kernels()[function] = name;
}

// What <<<>>> would call: the product launches by cudaLaunchKernel alone.
int __cudaPushCallConfiguration(Dim3, Dim3, uint64_t, void*) { return kInvalidValue; }
int __cudaPopCallConfiguration(Dim3*, Dim3*, uint64_t*, void*) { return kInvalidValue; }
int __cudaGetKernel(void**, const void*) { return kInvalidValue; }
int __cudaLaunchKernel(void*, Dim3, Dim3, void**, uint64_t, void*) { return kInvalidValue; }

int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  constexpr int kMaxDynamicSharedMemorySize = 8;
  if (attribute != kMaxDynamicSharedMemorySize || kernels().count(function) == 0) return kInvalidValue;
  if (value > shared_per_block) return kInvalidValue;
  shared_limits()[function] = value;
  return 0;
}

int cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** arguments, uint64_t shared, void*) {
  const auto found = kernels().find(function);
  const auto limit = shared_limits().find(function);
  if (found == kernels().end() || grid.x == 0 || grid.y == 0 || grid.z == 0) return kInvalidValue;
  const bool asked = limit != shared_limits().end();
  if (shared > static_cast<uint64_t>(asked ? limit->second : kDefaultShared)) return kInvalidValue;
  const unsigned grids[3] = {grid.x, grid.y, grid.z}, blocks[3] = {block.x, block.y, block.z};
  if (launch_error != 0 || launched == nullptr) return launch_error != 0 ? launch_error : kInvalidValue;
  return launched(found->second, grids, blocks, shared, asked ? shared_per_block : kDefaultShared, arguments);
}

int cudaGetLastError() { return 0; }
const char* cudaGetErrorString(int error) { return error == 0 ? "no error" : "the recording runtime refused the call"; }
}
