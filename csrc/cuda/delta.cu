// The backward's preprocess, bound by memory: reads grad_out and out once. Eight lanes share a row, so that a warp
// reads whole 128-byte lines (16 bytes a lane) even where rows are as short as a line.
#include "cuda/launch.cuh"
#include "cuda/launch.h"

namespace attnkern::cuda {
namespace {

constexpr int kLanes = 8;
constexpr int kThreads = 256;
constexpr int kRows = kThreads / kLanes;

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }

template <typename T, int kVector>
struct alignas(kVector * sizeof(T)) Vector {
  T x[kVector];
};

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) delta_kernel(DeltaParams p) {
  const int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / kLanes;
  const bool live = row < p.batch * p.heads * p.seqlen;
  const int64_t i = row % p.seqlen, h = row / p.seqlen % p.heads, b = row / p.seqlen / p.heads;
  const auto at = [&](const int64_t* stride) { return b * stride[0] + h * stride[1] + i * stride[2]; };
  float sum = 0.f;
  if (live) {
    const T* grad_out = static_cast<const T*>(p.grad_out) + at(p.grad_out_stride);
    const T* out = static_cast<const T*>(p.out) + at(p.out_stride);
    for (int64_t d = threadIdx.x % kLanes * kVector; d < p.head_dim; d += kLanes * kVector) {
      const auto g = *reinterpret_cast<const Vector<T, kVector>*>(grad_out + d);
      const auto o = *reinterpret_cast<const Vector<T, kVector>*>(out + d);
#pragma unroll
      for (int n = 0; n < kVector; ++n) sum += to_float(g.x[n]) * to_float(o.x[n]);
    }
  }
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  if (live && threadIdx.x % kLanes == 0) {
    p.delta[row] = p.grad_lse == nullptr ? sum : sum - p.grad_lse[at(p.grad_lse_stride)];
  }
}

template <typename T>
int run(const DeltaParams& p, void* stream) {
  const int64_t blocks = (p.batch * p.heads * p.seqlen + kRows - 1) / kRows;
  constexpr int kVector = 16 / sizeof(T);
  // The bits of both addresses and of every step between rows: low bits set mean that some row isn't 16-byte aligned.
  uint64_t bytes = reinterpret_cast<uintptr_t>(p.grad_out) | reinterpret_cast<uintptr_t>(p.out);
  for (int n = 0; n < 3; ++n) bytes |= (p.grad_out_stride[n] | p.out_stride[n]) * sizeof(T);
  const bool aligned = (bytes | p.head_dim * sizeof(T)) % 16 == 0;
  const auto kernel = aligned ? delta_kernel<T, kVector> : delta_kernel<T, 1>;
  return launch_kernel(kernel, blocks, kThreads, 0, p, stream);
}

}  // namespace

int delta(const DeltaParams& params, void* stream) {
  switch (params.dtype) {
    case Dtype::kFloat32: return run<float>(params, stream);
    case Dtype::kBFloat16: return run<__nv_bfloat16>(params, stream);
    case Dtype::kFloat16: return run<__half>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attnkern::cuda
