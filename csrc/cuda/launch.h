// What the registration (host compiler, torch's stable headers) asks of the kernels (nvcc, no torch header): plain
// structs, plain functions. Every function enqueues on `stream` (a cudaStream_t) of the current device, allocates
// nothing, and returns a cudaError_t as int.
#pragma once

#include <cstdint>

namespace attnkern::cuda {

enum class Dtype : int { kFloat32, kBFloat16, kFloat16 };

// delta = rowsum(grad_out * out) - grad_lse, the row constant of the softmax's gradient: dS = P * (dP - delta).
struct DeltaParams {
  // (batch, heads, seqlen, head_dim), last stride 1, the others here in elements
  const void* grad_out;
  const void* out;
  const float* grad_lse;  // (batch, heads, seqlen), or null for zero
  float* delta;           // (batch, heads, seqlen), contiguous
  int64_t grad_out_stride[3];
  int64_t out_stride[3];
  int64_t grad_lse_stride[3];
  int64_t batch, heads, seqlen, head_dim;
  Dtype dtype;
};

int delta(const DeltaParams& params, void* stream);

const char* error_string(int error);

}  // namespace attnkern::cuda
