// Scores where the rows of a tile may be queries of several heads, which share their keys: every row has a bias and a
// range of keys of its own. Without dropout. Used by decode.cu and forward_wide.cu.
#pragma once

#include "cuda/forward_wide.cuh"
#include "cuda/visits.cuh"

namespace attnkern::cuda {

// What a thread knows of one of its rows.
struct PackedRow {
  OwnKeys keys;
  int64_t bias;  // offset of its first element
};

__device__ __forceinline__ PackedRow packed_row(const Score& p, int batch, int head, int query) {
  PackedRow row;
  if (const int32_t* ranges = ranges_of(p, batch, head); ranges != nullptr) {
    row.keys = own_keys(p, ranges, query);
  } else {
    const Range own = p.band.visited(query, 1, {0, p.seqlen_k});
    row.keys = {{static_cast<int>(own.begin), 0}, {static_cast<int>(own.end), 0}};
  }
  row.bias = batch * p.bias_stride[0] + head * p.bias_stride[1] + query * p.bias_stride[2];
  return row;
}

// The blocks of kBlock keys that packed rows reach, numbered in order: those between the first and the last key of the
// rows' first ranges, and those of their second. Which of them a row attends to is asked of each.
template <int kBlock>
struct PackedBlocks {
  int first[2];  // block of either interval
  int before;    // how many the first one has
  int count;

  // By the band, for rows of these queries.
  __device__ __forceinline__ PackedBlocks(const Band& band, int query, int queries, int seqlen_k) : first{0, 0} {
    const Walk walk(band.visited(query, queries, {0, seqlen_k}), kBlock);
    first[0] = walk.begin / kBlock, before = count = walk.blocks(kBlock);
  }
  // By the ranges of keys: keys_of(row) is an OwnKeys, for rows below `rows`. For whole warps.
  template <typename KeysOf>
  __device__ __forceinline__ PackedBlocks(int rows, KeysOf keys_of) : first{0, 0}, before(0), count(0) {
    int begin[2] = {kNoBlock, kNoBlock}, end[2] = {0, 0};
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < rows; row += 32) {
      const OwnKeys own = keys_of(row);
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (own.begin[which] >= own.end[which]) continue;
        begin[which] = min(begin[which], own.begin[which] / kBlock);
        end[which] = max(end[which], (own.end[which] + kBlock - 1) / kBlock);
      }
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      begin[which] = __reduce_min_sync(0xffffffffu, begin[which]);
      end[which] = __reduce_max_sync(0xffffffffu, end[which]);
    }
    const bool second = begin[1] < begin[0];  // which comes first
    const int low = second ? begin[1] : begin[0], low_end = second ? end[1] : end[0];
    int high = second ? begin[0] : begin[1], high_end = second ? end[0] : end[1];
    if (low == kNoBlock) return;
    high = max(high, low_end);  // none twice
    first[0] = low, first[1] = high;
    before = low_end - low, count = before + max(high_end - high, 0);
  }
  __device__ __forceinline__ int block(int n) const { return n < before ? first[0] + n : first[1] + n - before; }
};

// For the rows from first_row on, of at most kRows packed ones that end at row_end.
template <int kBlock, int kRows>
__device__ __forceinline__ PackedBlocks<kBlock> packed_blocks(const Score& p, int batch, int first_head, int pack,
                                                              int first_row, int row_end) {
  const int rows = min(kRows, row_end - first_row), query = first_row / pack;
  if (p.ranges == nullptr) return {p.band, query, (first_row + rows - 1) / pack + 1 - query, p.seqlen_k};
  return {rows, [&](int row) {
            const int r = first_row + row;
            return own_keys(p, ranges_of(p, batch, first_head + r % pack), r / pack);
          }};
}

// What a split without keys leaves of these rows: combine_kernel then reads no output of it.
template <int kRows>
__device__ __forceinline__ void leave_nothing(const SplitParams& p, int split, int batch, int first_head, int first_row,
                                              int row_end) {
  const int row = static_cast<int>(threadIdx.x), r = first_row + row;
  if (row >= kRows || r >= row_end) return;
  const int64_t batch_head = static_cast<int64_t>(batch) * p.score.heads + first_head + r % p.pack;
  p.part_lse[(batch_head * p.score.seqlen_q + r / p.pack) * p.splits + split] = -kInfinity;
}

// Whether a row attends to a key of a block.
template <int kBlock>
__device__ __forceinline__ bool reaches(const OwnKeys& own, int block) {
  const int begin = block * kBlock, end = begin + kBlock;
  return max(own.begin[0], begin) < min(own.end[0], end) || max(own.begin[1], begin) < min(own.end[1], end);
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
  static_assert(sizeof(WordOfTiles<kTiles>) == kTiles);
  uint32_t bits[2] = {};
  if (p.in_bits) {
#pragma unroll
    for (int half = 0; half < 2; ++half) bits[half] = bits_of<WordOfTiles<kTiles>>(p, rows[half].bias, col);
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int j = col + n * 8 + e % 2;
      const PackedRow& row = rows[e / 2];
      float x = capped<T>(p, s[n][e]);
      bool attends = row.keys.has(j);
      const int64_t at = row.bias + min(j, p.seqlen_k - 1) * p.bias_stride[3];
      if (p.bias_kind == BiasKind::kBool) {
        attends = attends && (p.in_bits ? (bits[e / 2] >> (n * 8 + e % 2) & 1) != 0
                                        : static_cast<const uint8_t*>(p.bias)[at] != 0);
      } else if (p.bias_kind != BiasKind::kNone) {
        x += bias_of<T>(p, at);
      }
      s[n][e] = attends ? x : -kInfinity;
    }
  }
}

}  // namespace attnkern::cuda
