// Tiles of 16-bit or 32-bit elements in shared memory: their swizzle, and how they are filled from global memory.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/rows.h"

namespace attnkern::cuda {

template <typename T>
__device__ __forceinline__ const T* head_of(const Rows& rows, int batch, int head) {
  return static_cast<const T*>(rows.data) + batch * rows.stride[0] + head * rows.stride[1];
}

// A tile: rows of kHeadDim 16-bit elements, a multiple of 32, one after the other. The 16-byte chunks of a row are
// permuted by its number so that eight rows of one chunk, which is what ldmatrix reads at a time, lie in different
// banks: with rows of whole 128-byte lines by the lowest three bits; where a row is half a line more, neighbours differ
// by that half, and the next two bits tell the rest apart.
template <int kHeadDim>
struct Tile {
  static_assert(kHeadDim % 32 == 0);
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr bool kWholeLines = kChunks % 8 == 0;
  static constexpr int kMask = kWholeLines ? 7 : 3;

  // The bits that aren't permuted are added apart: as constants they cost no register then.
  __device__ __forceinline__ static uint32_t address(uint32_t tile, int row, int chunk) {
    const int key = (kWholeLines ? row : row >> 1) & kMask;
    return tile + row * kRowBytes + ((chunk & kMask ^ key) << 4) + ((chunk & ~kMask) << 4);
  }
};

// The tile of kHeadDim elements of type T: rows of floats are those of twice as many 16-bit elements. For them eight
// rows of one chunk are what a fragment of mma.m16n8k8 takes, and every second row of two chunks is (tf32.cuh).
template <typename T, int kHeadDim>
using TileOf = Tile<kHeadDim* static_cast<int>(sizeof(T)) / 2>;
template <typename T>
inline constexpr int kPerChunk = 16 / static_cast<int>(sizeof(T));  // elements

// One chunk by single elements: what lies past `width` is 0.
template <typename T>
__device__ __forceinline__ uint4 gather_chunk(const T* row, int64_t column_stride, int first, int width) {
  uint32_t words[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (sizeof(T) == 4) {
      const int d = first + n;
      words[n] = d < width ? reinterpret_cast<const uint32_t*>(row)[d * column_stride] : 0;
    } else {
      uint32_t halves[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int d = first + 2 * n + e;
        halves[e] = d < width ? reinterpret_cast<const uint16_t*>(row)[d * column_stride] : 0;
      }
      words[n] = halves[0] | halves[1] << 16;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Rows [first, first + kRows) of `head` -> the tile, by all kThreads threads. Rows past `end` and columns past the
// width are zero: whatever follows them in memory may be NaN, and 0 * NaN would reach the output. Asynchronous:
// complete after cp_async_commit, cp_async_wait and a barrier. kVector: rows.vector is known to be true.
template <typename T, int kHeadDim, int kRows, int kThreads, bool kVector>
__device__ __forceinline__ void load_tile(uint32_t tile, const Rows& rows, const T* head, int first, int end) {
  using Chunks = TileOf<T, kHeadDim>;
  constexpr int kChunks = Chunks::kChunks;
  constexpr int kTotal = kRows * kChunks;
  if (kVector || rows.vector) {
    // A thread's chunk is the same in all its rows: one address and one step. Where the chunks of a row don't divide
    // the threads, the last few have none.
    constexpr int kStep = kThreads / kChunks;
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const int live_rows = chunk * kPerChunk<T> < rows.width ? end - first - row : 0;
    const T* source = head + (first + row) * rows.stride[2] + chunk * kPerChunk<T>;
    const int64_t step = kStep * rows.stride[2];
#pragma unroll
    for (int i = 0; i < kRows; i += kStep, source += step) {
      const bool live = i < live_rows;
      if (kRows % kStep != 0 && row + i >= kRows) continue;
      if (kThreads % kChunks != 0 && row >= kStep) continue;
      ptx::cp_async<16>(Chunks::address(tile, row + i, chunk), live ? source : head, live ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < kTotal; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool live = first + row < end;
      const T* source = head + (live ? first + row : 0) * rows.stride[2];
      const uint4 words = gather_chunk(source, rows.stride[3], chunk * kPerChunk<T>, live ? rows.width : 0);
      ptx::store_shared(Chunks::address(tile, row, chunk), words);
    }
  }
}

// What a lane addresses for ldmatrix.x4, by row and chunk: matrices 0 and 1 lie below each other, 2 and 3 beside them.
// Of K, whose rows are the operand's columns, the other way round.
struct FragmentLane {
  int below, beside, key_below, key_beside;

  __device__ __forceinline__ FragmentLane() {
    const int lane = threadIdx.x % 32;
    below = lane % 16, beside = lane / 16;
    key_below = lane / 16 * 8 + lane % 8, key_beside = lane / 8 % 2;
  }
};

// Two neighbouring 16x8 accumulators are, packed, one 16x16 left operand.
template <typename T>
__device__ __forceinline__ void to_operand(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = ptx::pack<T>(left[0], left[1]);
  a[1] = ptx::pack<T>(left[2], left[3]);
  a[2] = ptx::pack<T>(right[0], right[1]);
  a[3] = ptx::pack<T>(right[2], right[3]);
}

// Rows [first, first + kRows) of the tile -> global memory, by kThreads threads of which this is number `thread`; rows
// past `end` and columns past the width aren't written. `rows.stride[3]` is 1.
template <typename T, int kHeadDim, int kRows, int kThreads, bool kVector>
__device__ __forceinline__ void store_tile(uint32_t tile, const Rows& rows, T* head, int tile_row, int first, int end,
                                           int thread) {
  using Chunks = TileOf<T, kHeadDim>;
  constexpr int kChunks = Chunks::kChunks;
  constexpr int kTotal = kRows * kChunks;
#pragma unroll(kVector ? 4 : 1)
  for (int i = thread; i < kTotal; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first + row >= end || chunk * kPerChunk<T> >= rows.width) continue;
    const uint4 words = ptx::load_shared(Chunks::address(tile, tile_row + row, chunk));
    T* target = head + (first + row) * rows.stride[2] + chunk * kPerChunk<T>;
    if (kVector || rows.vector) {
      *reinterpret_cast<uint4*>(target) = words;
    } else {
      const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int n = 0; n < kPerChunk<T>; ++n) {
        if (chunk * kPerChunk<T> + n >= rows.width) continue;
        if constexpr (sizeof(T) == 4) {
          reinterpret_cast<uint32_t*>(target)[n] = word[n];
        } else {
          reinterpret_cast<uint16_t*>(target)[n] = static_cast<uint16_t>(word[n / 2] >> n % 2 * 16);
        }
      }
    }
  }
}

}  // namespace attnkern::cuda
