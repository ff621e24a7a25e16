// Keys of a block that none of its scores counts: their rows of a tile may hold infinities or NaN, which a weight of 0
// doesn't take out of a sum. Where a block has such keys, their rows become zeros before a product reads them.
//
// Which keys a warp's rows attend to is a word of each lane, about the columns that it has of the scores: bit n of the
// even one of column tile n, 16 + n of the odd one. A row of a tile with 8 kTiles keys is then found in the word of
// lane row % 8 / 2.
#pragma once

#include "cuda/score.cuh"
#include "cuda/smem.cuh"

namespace attnkern::cuda {

// Whether one of eight 16-bit numbers is NaN.
template <typename T>
__device__ __forceinline__ bool holds_nan(const uint4& numbers) {
  constexpr uint32_t kInfinityBits = std::is_same_v<T, __half> ? 0x7c00 : 0x7f80;
  const auto either = [](uint32_t pair) {
    return (pair & 0x7fff) > kInfinityBits || (pair & 0x7fff0000) > (kInfinityBits << 16 | 0xffff);
  };
  return either(numbers.x) || either(numbers.y) || either(numbers.z) || either(numbers.w);
}

// Whether a score of a block may be excluded: what isn't masked may be by a bool mask.
template <bool kFastPath>
__device__ __forceinline__ bool may_hide(const Score& p, bool masked) {
  return masked || (!kFastPath && p.bias_kind == BiasKind::kBool);
}

// Of this lane's rows alone, from masked scores. Dropout and underflow take no key out of a sum, so that they are none.
template <int kTiles>
__device__ __forceinline__ uint32_t attended_columns(const float (&s)[kTiles][4]) {
  static_assert(kTiles <= 16);
  uint32_t attended = 0;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      attended |= static_cast<uint32_t>(fmaxf(s[n][e], s[n][2 + e]) != -kInfinity) << (n + e * 16);
    }
  }
  return attended;
}

// Of all rows of the warp, from those of its lanes.
__device__ __forceinline__ uint32_t over_rows(uint32_t attended) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) attended |= __shfl_xor_sync(0xffffffffu, attended, lanes);
  return attended;
}

template <int kTiles>
__device__ __forceinline__ constexpr uint32_t all_columns() {
  return ((1u << kTiles) - 1) * 0x10001u;
}
template <int kTiles>
__device__ __forceinline__ bool all_attended(uint32_t attended) {
  return __all_sync(0xffffffffu, (attended & all_columns<kTiles>()) == all_columns<kTiles>());
}

// By a warp.
template <class Chunks>
__device__ __forceinline__ void clear_row(uint32_t tile, int row) {
  for (int chunk = threadIdx.x % 32; chunk < Chunks::kChunks; chunk += 32) {
    ptx::store_shared(Chunks::address(tile, row, chunk), make_uint4(0, 0, 0, 0));
  }
}

// The rows of a tile, 8 kTiles from first_row on, that aren't attended to become zeros: those of number `warp` and
// every kWarps-th after it.
template <class Chunks, int kTiles, int kWarps>
__device__ __forceinline__ void clear_unattended(uint32_t tile, int first_row, uint32_t attended, int warp) {
#pragma unroll 1
  for (int row = warp; row < 8 * kTiles; row += kWarps) {
    const uint32_t word = __shfl_sync(0xffffffffu, attended, row % 8 / 2);
    if ((word >> (row / 8 + row % 2 * 16) & 1) == 0) clear_row<Chunks>(tile, first_row + row);
  }
}

// A tile of queries that all threads have waited for, without those that attend to nothing: their log-sum-exps, in
// shared memory too, are -inf.
template <class Chunks, int kRows, int kWarps>
__device__ __forceinline__ void clear_idle_queries(uint32_t tile, uint32_t lse) {
  const auto idle = [&](int row) { return __uint_as_float(ptx::load_shared_word(lse + row * 4)) == -kInfinity; };
  bool any = false;
#pragma unroll
  for (int row = threadIdx.x % 32; row < kRows; row += 32) any |= idle(row);
  if (!__any_sync(0xffffffffu, any)) return;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < kRows; row += kWarps) {
    if (idle(row)) clear_row<Chunks>(tile, row);
  }
  __syncthreads();
}

// Where the warps of a block of threads tell each other what their rows attend to: a word every kStride bytes of shared
// memory, of every warp one for each lane of a quad.
template <int kWarps, int kStride = 4>
struct AttendedByWarps {
  uint32_t words;

  // Before a barrier. By warps that are numbered from 0 on.
  __device__ __forceinline__ void tell(uint32_t attended, int warp) const {
    const int lane = threadIdx.x % 32;
    attended = over_rows(attended);
    if (lane < 4) ptx::store_shared(words + (warp * 4 + lane) * kStride, attended);
  }
  // After it: by the rows of all warps.
  __device__ __forceinline__ uint32_t all() const {
    uint32_t attended = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      attended |= ptx::load_shared_word(words + (warp * 4 + threadIdx.x % 4) * kStride);
    }
    return attended;
  }
};

// A tile that all threads have waited for, without the rows that aren't attended to by any warp.
template <class Chunks, int kTiles, int kWarps>
__device__ __forceinline__ void clear_unattended(uint32_t tile, uint32_t attended) {
  if (all_attended<kTiles>(attended)) return;
  clear_unattended<Chunks, kTiles, kWarps>(tile, 0, attended, threadIdx.x / 32);
  __syncthreads();
}

}  // namespace attnkern::cuda
