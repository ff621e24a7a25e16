// One step of the online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) on the two
// rows that a thread holds of an accumulator row tile.
#pragma once

#include "cuda/score.cuh"

namespace attnkern::cuda {

struct RowState {
  float max[2] = {-kInfinity, -kInfinity};  // as the scores: raw products (fast path), natural-log domain (generic)
  float sum[2] = {0.f, 0.f};                // of this thread's columns, relative to max
};

// The larger of x over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// exp(s - max) for a whole row needs no guard but one: a row that has seen no key keeps 0 as its reference, since
// -inf - -inf is NaN.
template <bool kFastPath>
__device__ __forceinline__ float exp_difference(const Score& p, float s, float reference) {
  // Fast path: one FFMA; `reference` is scaled. Generic: the difference first, which is exact and can't overflow.
  return kFastPath ? ptx::ex2(fmaf(s, p.scale, -reference)) : ptx::ex2((s - reference) * kLog2E);
}

// Scores of a row, the first (half 0) or second of this thread's two -> probabilities relative to the new maximum;
// `factor` is for what was summed up before.
template <bool kFastPath, int kTiles>
__device__ __forceinline__ void weigh(const Score& p, float (&s)[kTiles][4], RowState& state, int half, float largest,
                                      float& factor) {
  const float reference = largest == -kInfinity ? 0.f : kFastPath ? largest * p.scale : largest;
  factor = exp_difference<kFastPath>(p, state.max[half], reference);
  state.max[half] = largest;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 2 * half; e < 2 * half + 2; ++e) {
      s[n][e] = exp_difference<kFastPath>(p, s[n][e], reference);
      sum += s[n][e];
    }
  }
  state.sum[half] = state.sum[half] * factor + sum;
}

// A step of the softmax for both rows of a lane, their new maxima included.
template <bool kFastPath, int kTiles>
__device__ __forceinline__ void softmax_step(const Score& p, float (&s)[kTiles][4], RowState& state,
                                             float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = state.max[half];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    weigh<kFastPath>(p, s, state, half, quad_max(largest), factor[half]);
  }
}

// What a row's output is multiplied by: 0 in a row without keys. A row with a NaN among its scores is NaN, also where
// dropout has taken that one out of the output.
__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.f ? 0.f : 1.f / sum; }

// The natural log-sum-exp of a row from its maximum and its whole sum; -inf for a row without keys, NaN where a score
// is, which the maximum doesn't show.
template <bool kFastPath>
__device__ __forceinline__ float log_sum_exp(const Score& p, float max, float sum) {
  return kFastPath ? (max * p.scale + ptx::lg2(sum)) * kLn2 : max + ptx::lg2(sum) * kLn2;
}

// The log-sum-exp in the natural-log domain, for float32: lg2.approx is off by 2^-22 where the result is small.
__device__ __forceinline__ float exact_log_sum_exp(float max, float sum) { return max + logf(sum); }

// As exact as outputs of T want it.
template <typename T, bool kFastPath>
__device__ __forceinline__ float log_sum_exp_of(const Score& p, float max, float sum) {
  if constexpr (std::is_same_v<T, float>) return exact_log_sum_exp(max, sum);
  return log_sum_exp<kFastPath>(p, max, sum);
}

// What the sink of a row's head, if there are any, adds to the row's sum, of which max is the reference: infinity where
// it lies far above the row's scores, or where the row has none.
template <bool kFastPath>
__device__ __forceinline__ float sink_term(const Score& p, int64_t batch_head, float max) {
  if (p.sinks == nullptr) return 0.f;
  const float sink = p.sinks[batch_head];
  if (sink == -kInfinity) return 0.f;
  return kFastPath ? ptx::ex2(fmaf(sink, kLog2E, -max * p.scale)) : ptx::ex2((sink - max) * kLog2E);
}

// The log-sum-exp of a row by a sum that has the sink's term. Where the sink is the largest, it is the reference: a
// maximum far below would take digits from the logarithm of a large sum, and beside a term of infinity nothing else
// counts.
template <typename T, bool kFastPath>
__device__ __forceinline__ float log_sum_exp_with_sink(const Score& p, int64_t batch_head, float max, float sum) {
  const float term = sink_term<kFastPath>(p, batch_head, max);
  if (term <= 1.f) return log_sum_exp_of<T, kFastPath>(p, max, sum);
  const float ratio = sum == kInfinity ? 1.f : sum / term;
  return p.sinks[batch_head] + (std::is_same_v<T, float> ? logf(ratio) : ptx::lg2(ratio) * kLn2);
}

}  // namespace attnkern::cuda
