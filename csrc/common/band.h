// The one band formula. Query i may attend to key j iff  -left <= j - i - offset <= right.
//
// A tile of queries visits the keys that one of its queries may attend to. Blocks of keys that all of its queries may
// attend to are full, and need no mask; the other visited blocks are partial.
//
// Every structured mask is such a band: causal (left unbounded, right 0; offset 0 for torch's top-left alignment,
// seqlen_k - seqlen_q for bottom-right), a sliding window (finite left and right), and no mask at all.
// Plain C++ without dependencies: host and device code share it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ATTNKERN_HOST_DEVICE __host__ __device__
#else
#define ATTNKERN_HOST_DEVICE
#endif

namespace attnkern {

// Far above any index and far below overflow: i + offset +- kUnbounded fits in 64 bits.
inline constexpr int64_t kUnbounded = int64_t{1} << 62;

struct Range {
  int64_t begin, end;  // half open; empty if end <= begin
};

struct Band {
  int64_t left = kUnbounded, right = kUnbounded, offset = 0;

  // This band seen with queries and keys exchanged, as the backward pass walks it.
  ATTNKERN_HOST_DEVICE Band transposed() const { return {right, left, -offset}; }

  // Keys within `all` that at least one query of [row, row + rows) may attend to.
  ATTNKERN_HOST_DEVICE Range visited(int64_t row, int64_t rows, Range all) const {
    return clip(row + offset - left, row + rows + offset + right, all);
  }

  // Keys within `all` that at least one query of [0, rows) attends to, so that no other one counts. `visited` joins the
  // queries of a band without width, of which none attends to any.
  ATTNKERN_HOST_DEVICE Range reached(int64_t rows, Range all) const {
    return right < -left ? Range{all.begin, all.begin} : visited(0, rows, all);
  }

  // Keys within `all` that every query of [row, row + rows) may attend to.
  ATTNKERN_HOST_DEVICE Range full(int64_t row, int64_t rows, Range all) const {
    return clip(row + rows - 1 + offset - left, row + 1 + offset + right, all);
  }

 private:
  ATTNKERN_HOST_DEVICE static Range clip(int64_t begin, int64_t end, Range all) {
    if (begin < all.begin) begin = all.begin;
    if (end > all.end) end = all.end;
    return {begin, end < begin ? begin : end};
  }
};

// A range as a walk over whole blocks goes through it: from the start of the block that holds its first index to its
// end. Blocks begin at `first`, which is at or before the range. An empty range, wherever it lies, gives no block:
// rounded like the others, it would hold the indices between the block's start and its own.
struct Walk {
  int begin, end;

  ATTNKERN_HOST_DEVICE Walk(Range range, int block, int first = 0) : begin(first), end(first) {
    if (range.begin >= range.end) return;
    begin += (static_cast<int>(range.begin) - first) / block * block;
    end = static_cast<int>(range.end);
  }
  ATTNKERN_HOST_DEVICE int blocks(int block) const { return (end - begin + block - 1) / block; }
};

}  // namespace attnkern
