// The backward's preprocess, bound by memory: reads grad_out and out once. Eight lanes share a row, so that a warp
// reads whole 128-byte lines (16 bytes a lane) even where rows are as short as a line.
#include "cuda/launch.cuh"
#include "cuda/launch.h"
#include "cuda/rows.h"
#include "cuda/score.cuh"

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

struct DeltaArgs {
  const void* grad_out;
  const void* out;
  const float* lse;
  const float* grad_lse;  // null: zero
  float* delta;
  int64_t grad_out_stride[3], out_stride[3];
  int64_t batch, heads, seqlen, head_dim;
};

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) delta_kernel(DeltaArgs p) {
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
      for (int n = 0; n < kVector; ++n) {
        // A 0 counts for nothing, whatever lies beside it: it may be the output of a row without keys.
        const float factor = to_float(o.x[n]);
        sum += factor == 0.f ? 0.f : to_float(g.x[n]) * factor;
      }
    }
  }
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  if (live && threadIdx.x % kLanes == 0) {
    // Whatever the gradients of a query are that attends to nothing, they count as 0.
    const bool attends = p.lse[row] != -kInfinity;
    p.delta[row] = !attends ? 0.f : p.grad_lse == nullptr ? sum : sum - p.grad_lse[row];
  }
}

struct SinksArgs {
  const float *sinks, *lse, *delta;
  float* grads;  // (batch, heads)
  int64_t seqlen;
};

// The gradient of the sinks: -sum over the rows of exp(sink - lse) delta. A block for each head of a batch element.
__global__ void __launch_bounds__(kThreads) sinks_kernel(SinksArgs p) {
  __shared__ float sums[kThreads / 32];
  const int64_t first = int64_t{blockIdx.x} * p.seqlen;
  const float sink = p.sinks[blockIdx.x];
  float sum = 0.f;
  // A sink of -inf counts for nothing, even where nothing else is.
  for (int64_t i = threadIdx.x; i < p.seqlen && sink != -kInfinity; i += kThreads)
    sum += ptx::ex2((sink - p.lse[first + i]) * kLog2E) * p.delta[first + i];
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) sum += sums[warp];
  p.grads[blockIdx.x] = -sum;
}

}  // namespace

int backward_sinks(const Backward& p, const float* delta, float* grads, void* stream) {
  const SinksArgs a{static_cast<const float*>(p.sinks.data), static_cast<const float*>(p.lse), delta, grads,
                    p.seqlen_q};
  return launch_kernel(sinks_kernel, p.batch * p.heads_q, kThreads, 0, a, stream);
}

int delta(const Backward& p, float* delta, void* stream) {
  DeltaArgs a{p.grad_out.data,
              p.out.data,
              static_cast<const float*>(p.lse),
              static_cast<const float*>(p.grad_lse),
              delta,
              {},
              {},
              p.batch,
              p.heads_q,
              p.seqlen_q,
              p.head_dim_v};
  for (int n = 0; n < 3; ++n) a.grad_out_stride[n] = p.grad_out.stride[n], a.out_stride[n] = p.out.stride[n];
  return by_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kBytes = sizeof(T), kVector = 16 / kBytes;
    const bool vector = rows_of(p.grad_out, p.head_dim_v, kBytes).vector && rows_of(p.out, p.head_dim_v, kBytes).vector;
    return launch_kernel(vector ? delta_kernel<T, kVector> : delta_kernel<T, 1>,
                         ceil_div(p.batch * p.heads_q * p.seqlen_q, kRows), kThreads, 0, a, stream);
  });
}

}  // namespace attnkern::cuda
