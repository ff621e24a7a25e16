// Scores where the rows of a tile may be queries of several heads, which share their keys: every row has a bias and a
// range of keys of its own. Without dropout. Used by decode.cu and forward_wide.cu.
#pragma once

#include "cuda/score.cuh"

namespace attnkern::cuda {

// What a thread knows of one of its rows.
struct PackedRow {
  int begin, end;  // of the keys that it reaches
  int64_t bias;    // offset of its first element
};

__device__ __forceinline__ PackedRow packed_row(const Score& p, int batch, int head, int query) {
  const Range own = p.band.visited(query, 1, {0, p.seqlen_k});
  return {static_cast<int>(own.begin), static_cast<int>(own.end),
          batch * p.bias_stride[0] + head * p.bias_stride[1] + query * p.bias_stride[2]};
}

// Of a bias that is added.
template <typename T>
__device__ __forceinline__ float bias_of(const Score& p, int64_t at) {
  if (p.bias_kind == BiasKind::kFloat32) return static_cast<const float*>(p.bias)[at];
  return to_float(static_cast<const T*>(p.bias)[at]);
}

// Raw products -> scores in the natural-log domain, -inf where a row doesn't attend to the key. `col` includes
// lane % 4 * 2.
template <typename T, int kTiles>
__device__ __forceinline__ void finish_packed(const Score& p, const PackedRow (&rows)[2], float (&s)[kTiles][4],
                                              int col) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int j = col + n * 8 + e % 2;
      const PackedRow& row = rows[e / 2];
      float x = capped<T>(p, s[n][e]);
      bool attends = j >= row.begin && j < row.end;
      const int64_t at = row.bias + min(j, p.seqlen_k - 1) * p.bias_stride[3];
      if (p.bias_kind == BiasKind::kBool) {
        attends = attends && static_cast<const uint8_t*>(p.bias)[at] != 0;
      } else if (p.bias_kind != BiasKind::kNone) {
        x += bias_of<T>(p, at);
      }
      s[n][e] = attends ? x : -kInfinity;
    }
  }
}

}  // namespace attnkern::cuda
