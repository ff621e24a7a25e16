// What the kernels of the backward pass share: their argument, the products of scores, and the way from scores to
// gradients. backward.cu says what is computed.
#pragma once

#include "cuda/launch.h"
#include "cuda/score.cuh"
#include "cuda/smem.cuh"
#include "cuda/tf32.cuh"
#include "cuda/unattended.cuh"
#include "cuda/visits.cuh"

namespace attnkern::cuda {

// A table's gradient is added up in bands of tiles (backward_bias.cu).
struct TableBands {
  float* sums;  // (batch, heads, walks, count, 128), contiguous
  int32_t first, count, walks;
};

struct BackwardArgs {
  Score score;
  Rows q, k, v, grad_out;
  Rows dq, dk, dv;     // data null: not wanted; column stride 1
  const float* lse;    // (batch, heads, seqlen_q), contiguous, natural logarithm
  const float* delta;  // the same
  void* dbias;         // contiguous, of the bias' dtype; null: not wanted
  int64_t dbias_stride[3];
  int32_t dbias_size[4];
  TableBands table;
  float softmax_scale;
  int32_t batch, heads_out;            // of dk and dv
  int32_t group_k, group_v, kv_group;  // query heads per head of k, of v, of dk and dv
  bool dk_float, dv_float;             // heads that are still to be added up
  bool again;                          // see BackwardPlan
  NanMarks nan_marks;                  // the same
};

// The kernels, each in a file of its own: how many blocks a plan needs, and the launch. rows and heads are of dK and dV
// or of dQ.
BackwardLaunch plan_dkdv(const BackwardPlan& plan, int64_t rows, int64_t heads);
int launch_dkdv(DType dtype, const BackwardPlan& plan, const BackwardArgs& args, void* stream);
BackwardLaunch plan_dq(const BackwardPlan& plan, int64_t rows, int64_t heads);
int launch_dq(DType dtype, const BackwardPlan& plan, const BackwardArgs& args, void* stream);
// Of one that several scores share.
void plan_bias_gradient(const Backward& p, BackwardPlan& plan);
int launch_bias_gradient(const Backward& p, const BackwardPlan& plan, const BackwardArgs& args, void* stream);
// float32, and head sizes above 256.
void plan_chunked(const BackwardCall& p, int shared_limit, bool bias_by_rows, BackwardPlan& plan);
int backward_chunked(const BackwardCall& p, const BackwardPlan& plan, const BackwardArgs& common, void* stream);

// The arithmetic of a kernel: its elements, and out += a b^T for kRowTiles x 16 rows of tile a and kColTiles x 8 rows
// of tile b, over kSteps x 32 bytes of them from `chunk` on; rows of kWidth x 2 bytes.
template <typename T>
struct Half {
  using Element = T;

  // kUnrolled: steps whose loads may be under way side by side.
  template <int kWidth, int kSteps, int kUnrolled = kSteps, int kRowTiles, int kColTiles>
  __device__ __forceinline__ static void scores(float (&out)[kRowTiles][kColTiles][4], uint32_t a_tile, int a_row,
                                                uint32_t b_tile, int b_row, int chunk) {
    const int lane = threadIdx.x % 32;
    const int below = lane % 16, beside = lane / 16;
#pragma unroll(kUnrolled)
    for (int d = 0; d < kSteps; ++d) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::ldmatrix(a[m], Tile<kWidth>::address(a_tile, a_row + m * 16 + below, chunk + 2 * d + beside));
      }
#pragma unroll
      for (int n = 0; n < kColTiles / 2; ++n) {
        uint32_t b[4];  // rows 0-7 at d and d + 8, rows 8-15 at d and d + 8
        const int row = b_row + n * 16 + lane / 16 * 8 + lane % 8;
        ptx::ldmatrix(b, Tile<kWidth>::address(b_tile, row, chunk + 2 * d + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(out[m][2 * n], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<T>(out[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
};

template <bool kExact_>
struct Single {
  using Element = float;
  static constexpr bool kExact = kExact_;

  template <int kWidth, int kSteps, int kRowTiles, int kColTiles>
  __device__ __forceinline__ static void scores(float (&out)[kRowTiles][kColTiles][4], uint32_t a_tile, int a_row,
                                                uint32_t b_tile, int b_row, int chunk) {
    // By 16 columns and half of the steps: accumulators for three kinds of terms are many registers.
    static_assert(kRowTiles == 1 && kSteps % 2 == 0);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int from = chunk + half * kSteps;
#pragma unroll
      for (int n = 0; n < kColTiles; n += 2) {
        rows_by_rows_tf32<kExact, Tile<kWidth>, Tile<kWidth>, kSteps / 2>(
            reinterpret_cast<float (&)[1][2][4]>(out[0][n]), a_tile, a_row, from, b_tile, b_row + n * 8, from);
      }
    }
  }
};

// run(Math{}) for a problem.
template <typename Run>
int by_math(const Attention& p, Run run) {
  switch (p.dtype) {
    case DType::kBFloat16: return run(Half<__nv_bfloat16>{});
    case DType::kFloat16: return run(Half<__half>{});
    case DType::kFloat32: return p.tf32 ? run(Single<false>{}) : run(Single<true>{});
    default: return cudaErrorInvalidValue;
  }
}

// A row without keys has an lse of -inf, which would make its probabilities infinite instead of 0.
__device__ __forceinline__ float finite_or_far(float lse) { return lse == -kInfinity ? kInfinity : lse; }

// The survivors of dropout in a warp's tiles, from the lane's first row and column on: bit 4 * (n % 8) + e of
// keep[m][n / 8].
template <bool kKeyRows, int kRowTiles, int kColTiles>
__device__ __forceinline__ void dropout_bits(const Score& p, const HeadScore& h, int row, int col,
                                             uint32_t (&keep)[kRowTiles][(kColTiles + 7) / 8]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (uint32_t& word : keep[m]) word = 0;
  }
  if constexpr (kKeyRows) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      uint32_t bits[kRowTiles];
      dropout_keep_transposed(p, h, row, col + n * 8, bits);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) keep[m][n / 8] |= bits[m] << n % 8 * 4;
    }
  } else {
    const int skipped = kColTiles % 4 == 0 ? 0 : col % 32 / 8;  // of a block of 32 keys this warp may have one half
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColTiles; n += 4) {
        const uint32_t bits = dropout_keep(p, h, row + m * 16, col + (n - skipped) * 8) >> skipped * 4;
        keep[m][n / 8] |= bits << n % 8 * 4;
      }
    }
  }
}

// Products q k^T and dO v^T of one row tile -> probabilities as dV wants them in `s`, and dS as dQ and dK want it in
// `dp`. lse and delta are of the queries: [n][e % 2] of the columns if kKeyRows, else [0][e / 2] of the rows. keep:
// from dropout_bits, read if there is dropout. on_gradient(ds) sees dS before softcap's derivative. Gives the columns
// that this lane's rows attend to, as unattended.cuh counts them; all, if `may_hide` says that none is hidden.
template <typename T, bool kKeyRows, bool kFastPath, int kTiles, class OnGradient>
__device__ __forceinline__ uint32_t to_gradients(const Score& p, const HeadScore& h, float (&s)[kTiles][4],
                                                 float (&dp)[kTiles][4], const float (&lse)[kKeyRows ? kTiles : 1][2],
                                                 const float (&delta)[kKeyRows ? kTiles : 1][2],
                                                 const uint32_t (&keep)[(kTiles + 7) / 8], int row, int col,
                                                 bool masked, OnGradient on_gradient) {
  [[maybe_unused]] float t[kFastPath ? 1 : kTiles][4];
  const bool dropout = !kFastPath && p.seeds != nullptr;
  if constexpr (!kFastPath) finish_scores<T, kKeyRows, true>(p, h, s, row, col, t);
  if (masked) {
    if constexpr (kFastPath) {
      mask_scores<kKeyRows>(p, s, row, col);
    } else {
      mask_scores<kKeyRows>(p, h, s, row, col);
    }
  }
  uint32_t attended = ~0u;
  if (may_hide<kFastPath>(p, masked)) {
    attended = attended_columns(s);
    // Where query and key don't meet, the other factors of dS may be NaN, as softcap's below.
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[n][e] = s[n][e] != -kInfinity ? dp[n][e] : 0.f;
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = kKeyRows ? n : 0, of = kKeyRows ? e % 2 : e / 2;
      const float w = probability<kFastPath>(p, s[n][e], lse[at][of]);
      float gradient = dp[n][e], kept = w;
      if constexpr (!kFastPath) {
        if (dropout) {
          const float factor = keep[n / 8] >> (n % 8 * 4 + e) & 1 ? p.dropout_scale : 0.f;
          gradient *= factor;
          kept *= factor;
        }
      }
      dp[n][e] = w * (gradient - delta[at][of]);
      s[n][e] = kept;
    }
  }
  on_gradient(dp);
  if constexpr (!kFastPath) {
    if (p.softcap != 0.f) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[n][e] = dp[n][e] != 0.f ? dp[n][e] * product_factor(p, t[n][e]) : 0.f;
      }
    }
  }
  return attended;
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

template <typename T>
__device__ __forceinline__ void store_bias_gradient(const BackwardArgs& p, int64_t at, float x) {
  if (p.score.bias_kind == BiasKind::kFloat32) {
    static_cast<float*>(p.dbias)[at] = x;
  } else {
    static_cast<T*>(p.dbias)[at] = from_float<T>(x);
  }
}

// dS of one row tile of queries -> the gradient of a bias that has an entry per score.
template <typename T, int kTiles>
__device__ __forceinline__ void store_bias_gradients(const BackwardArgs& p, int batch, int head,
                                                     const float (&ds)[kTiles][4], int row, int col) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = row + e / 2 * 8, j = col + n * 8 + e % 2;
      if (i >= p.score.seqlen_q || j >= p.score.seqlen_k) continue;
      const int64_t at = batch * p.dbias_stride[0] + head * p.dbias_stride[1] + i * p.dbias_stride[2] + j;
      store_bias_gradient<T>(p, at, ds[n][e]);
    }
  }
}

// Zeros for `count` queries from first_row on and the keys that none of their blocks visits, by all warps of the block.
// With key ranges, whose blocks may lie anywhere: for all keys, before a barrier and what the visited ones are given.
template <typename T, int kThreads, int kCols>
__device__ __forceinline__ void store_unreached(const BackwardArgs& p, int batch, int head, int first_row, int count) {
  const int seqlen_k = p.score.seqlen_k;
  const Walk walk(p.score.band.visited(first_row, count, {0, seqlen_k}), kCols);
  const int begin = walk.begin, end = p.score.ranges != nullptr ? begin : begin + walk.blocks(kCols) * kCols;
  for (int i = threadIdx.x / 32; i < count; i += kThreads / 32) {
    const int64_t at = batch * p.dbias_stride[0] + head * p.dbias_stride[1] + (first_row + i) * p.dbias_stride[2];
    for (int j = threadIdx.x % 32; j < seqlen_k; j += 32) {
      if (j < begin || j >= end) store_bias_gradient<T>(p, at + j, 0.f);
    }
  }
}

}  // namespace attnkern::cuda
