// Tiles in shared memory as TMA and wgmma lay them out, with the 128-byte swizzle.
#pragma once

#include "cuda/ptx_sm90.cuh"

namespace attnkern::cuda {

// kRows rows of kColumns elements, cut into slabs of 128 bytes of every row: slab after slab, in each row after row.
// The 16-byte chunks of a row are permuted by the lowest three bits of its number. A tile starts at a multiple of 1024
// bytes; of one whose columns don't fill the last slab, that slab is there in full.
template <typename T, int kRows, int kColumns>
struct SlabTile {
  static_assert(kRows % 8 == 0);
  static constexpr int kRowBytes = 128;
  static constexpr int kSlabColumns = kRowBytes / sizeof(T);
  static constexpr int kSlabs = (kColumns + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kChunks = kColumns / (16 / static_cast<int>(sizeof(T)));
  static constexpr uint32_t kSlabBytes = kRows * kRowBytes;
  static constexpr uint32_t kBytes = kSlabs * kSlabBytes;

  // Of a 16-byte chunk, for plain accesses, ldmatrix and stmatrix.
  __device__ __forceinline__ static uint32_t address(uint32_t tile, int row, int chunk) {
    return tile + chunk / 8 * kSlabBytes + row * kRowBytes + ((chunk ^ row) % 8 << 4);
  }

  // The box of `map` with its rows from `row` on -> the tile. The map has (batch, heads, rows, columns), a box of
  // kRows x kSlabColumns and the 128-byte swizzle (tensor_map.h). `full` gets kBytes: expect them before. One thread.
  __device__ __forceinline__ static void load(uint32_t tile, const ptx::TensorMap& map, uint32_t full, int row,
                                              int head, int batch) {
#pragma unroll
    for (int n = 0; n < kSlabs; ++n) {
      ptx::tma_load(tile + n * kSlabBytes, map, full, n * kSlabColumns, row, head, batch);
    }
  }

  // The other way; rows and columns past the tensor's aren't written. One thread, which commits.
  __device__ __forceinline__ static void store(const ptx::TensorMap& map, uint32_t tile, int row, int head, int batch) {
#pragma unroll
    for (int n = 0; n < kSlabs; ++n) ptx::tma_store(map, tile + n * kSlabBytes, n * kSlabColumns, row, head, batch);
  }
  __device__ __forceinline__ static void reduce_add(const ptx::TensorMap& map, uint32_t tile, int row, int head,
                                                    int batch) {
#pragma unroll
    for (int n = 0; n < kSlabs; ++n) {
      ptx::tma_reduce_add(map, tile + n * kSlabBytes, n * kSlabColumns, row, head, batch);
    }
  }

  // An operand of wgmma whose k are the tile's columns: `step` counts 16 of them; rows from `row`, a multiple of 8, on.
  __device__ __forceinline__ static uint64_t by_columns(uint32_t tile, int step, int row = 0) {
    constexpr int kSteps = kSlabColumns / 16;
    return descriptor(tile, step / kSteps * kSlabBytes + step % kSteps * 32 + row * kRowBytes, 0);
  }

  // One whose k are the tile's rows (kTransposeA or kTransposeB): `step` counts 16 of them; from slab `slab` on.
  __device__ __forceinline__ static uint64_t by_rows(uint32_t tile, int step, int slab = 0) {
    return descriptor(tile, slab * kSlabBytes + step * 16 * kRowBytes, kSlabBytes);
  }

 private:
  // Everything but the tile's address is constant, and the sum stays within the lower word: one addition.
  __device__ __forceinline__ static uint64_t descriptor(uint32_t tile, uint32_t offset, uint32_t leading) {
    const uint64_t fixed = ptx::matrix_descriptor(offset, leading, 8 * kRowBytes, ptx::Swizzle::k128B);
    return fixed >> 32 << 32 | (static_cast<uint32_t>(fixed) + (tile >> 4));
  }
};

// Where a pipeline of kStages buffers, used in turn, is: the buffer of the next use, and the parity of its barriers.
template <int kStages>
struct PipelineState {
  static_assert(kStages > 0);
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace attnkern::cuda
