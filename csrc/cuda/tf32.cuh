// Products of floats on the tensor cores by mma.m16n8k8, whose factors are tf32: the exponent of a float, 11 bits of
// its significand. Either the factors are rounded to that, or (kExact) each is split into two such numbers, x = high +
// low + at most 2^-23 |x|, and
//
//   a b = a_high b_high + (a_high b_low + a_low b_high)
//
// is three products (Ootomo, Yokota: "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
// theoretical peak performance", 2022, whose second point counts here as well: the cores cut off what an accumulator
// can't hold, always towards zero, so long sums are put together outside of them, and the small terms have an
// accumulator of their own). An infinite factor gives NaN: infinity minus its high part is no number.
//
// Fragments, with g = lane / 4 and t = lane % 4. Where the summed dimension runs along a tile's rows, a 16-byte chunk
// is 4 steps of it and ldmatrix loads both operands as it does 16-bit ones. Where it runs down the rows (probabilities
// times values) the right operand is read by chunks, every lane two rows of one: step 2t of eight is number t of the
// operand and step 2t + 1 is number t + 4, so that an accumulator is a left operand in the registers it was made in.
// The four words of a chunk belong to four neighbouring column tiles: tile j holds columns 4g + j of 32. Of its
// accumulator a lane has, in order, columns 8t + j and 8t + 4 + j of row g, then of row g + 8.
#pragma once

#include "cuda/smem.cuh"

namespace attnkern::cuda {

// What an mma takes for some floats.
template <bool kExact, int kCount>
struct Tf32 {
  uint32_t high[kCount];
  uint32_t low[kExact ? kCount : 1];

  __device__ __forceinline__ void set(int n, uint32_t bits) {
    const float x = __uint_as_float(bits);
    if constexpr (kExact) {
      // To nearest, as cvt.rna does but without its test for NaN: a NaN lives on in `low`. The mma doesn't look at the
      // low 13 bits.
      high[n] = bits + 0x1000;
      low[n] = __float_as_uint(x - __uint_as_float(high[n] & 0xFFFFE000u));
    } else {
      high[n] = ptx::to_tf32(x);
    }
  }
};

// run(std::bool_constant<kExact>{}).
template <class Run>
__device__ __forceinline__ void by_precision(bool exact, Run run) {
  if (exact) {
    run(std::true_type{});
  } else {
    run(std::false_type{});
  }
}

// d += a b. The small terms go to `small`, which counts only if kExact.
template <bool kExact>
__device__ __forceinline__ void mma_tf32(float (&d)[4], float (&small)[4], const Tf32<kExact, 4>& a, uint32_t b0_high,
                                         uint32_t b1_high, uint32_t b0_low, uint32_t b1_low) {
  if constexpr (kExact) {
    ptx::mma_m16n8k8_tf32(small, a.low, b0_high, b1_high);
    ptx::mma_m16n8k8_tf32(small, a.high, b0_low, b1_low);
  }
  ptx::mma_m16n8k8_tf32(d, a.high, b0_high, b1_high);
}

// out += a b^T for kRowTiles x 16 rows of tile a and kColTiles x 8 rows of tile b (one or an even number), over kSteps
// x 8 columns from these chunks on.
template <bool kExact, class TileA, class TileB, int kSteps, int kRowTiles, int kColTiles>
__device__ __forceinline__ void rows_by_rows_tf32(float (&out)[kRowTiles][kColTiles][4], uint32_t a_tile, int a_row,
                                                  int a_chunk, uint32_t b_tile, int b_row, int b_chunk) {
  constexpr int kFlush = 4;  // steps that the cores may add up
  constexpr int kAtOnce = kSteps < kFlush ? kSteps : kFlush, kPair = kColTiles == 1 ? 1 : 2;
  static_assert(kColTiles % kPair == 0 && kSteps % kAtOnce == 0);
  const int lane = threadIdx.x % 32;
  const int below = lane % 16, beside = lane / 16;
  const int b_below = (kColTiles == 1 ? 0 : lane / 16 * 8) + lane % 8, b_beside = lane / 8 % 2;
  float small[kRowTiles][kColTiles][4] = {};
#pragma unroll 1
  for (int first = 0; first < kSteps; first += kAtOnce) {
    float fresh[kRowTiles][kColTiles][4] = {};
#pragma unroll
    for (int ahead = 0; ahead < kAtOnce; ++ahead) {
      const int step = first + ahead;
      Tf32<kExact, 4> a[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        uint32_t x[4];
        ptx::ldmatrix(x, TileA::address(a_tile, a_row + m * 16 + below, a_chunk + 2 * step + beside));
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m].set(i, x[i]);
      }
#pragma unroll
      for (int n = 0; n < kColTiles; n += kPair) {
        uint32_t x[2 * kPair];  // rows 0-7 at steps 0-3 and 4-7, then rows 8-15
        ptx::ldmatrix(x, TileB::address(b_tile, b_row + n * 8 + b_below, b_chunk + 2 * step + b_beside));
        Tf32<kExact, 2 * kPair> b;
#pragma unroll
        for (int i = 0; i < 2 * kPair; ++i) b.set(i, x[i]);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int j = 0; j < kPair; ++j) {
            mma_tf32<kExact>(fresh[m][n + j], small[m][n + j], a[m], b.high[2 * j], b.high[2 * j + 1],
                             b.low[kExact ? 2 * j : 0], b.low[kExact ? 2 * j + 1 : 0]);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] += fresh[m][n][e];
      }
    }
  }
  if constexpr (kExact) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] += small[m][n][e];
      }
    }
  }
}

// d += a b for one step of 8 rows of tile b from b_row (a multiple of 8) on, at 32 columns (8 chunks) from b_chunk (a
// multiple of 8) on; a is in the order of steps that is explained above.
template <bool kExact, class TileB, int kRowTiles>
__device__ __forceinline__ void columns_tf32(float (&d)[kRowTiles][4][4], float (&small)[kRowTiles][4][4],
                                             const Tf32<kExact, 4> (&a)[kRowTiles], uint32_t b_tile, int b_row,
                                             int b_chunk) {
  const int lane = threadIdx.x % 32;
  const int row = b_row + lane % 4 * 2, chunk = b_chunk + lane / 4;
  const uint4 even = ptx::load_shared(TileB::address(b_tile, row, chunk));
  const uint4 odd = ptx::load_shared(TileB::address(b_tile, row + 1, chunk));
  Tf32<kExact, 4> b0, b1;
  b0.set(0, even.x), b0.set(1, even.y), b0.set(2, even.z), b0.set(3, even.w);
  b1.set(0, odd.x), b1.set(1, odd.y), b1.set(2, odd.z), b1.set(3, odd.w);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int low = kExact ? j : 0;
      mma_tf32<kExact>(d[m][j], small[m][j], a[m], b0.high[j], b1.high[j], b0.low[low], b1.low[low]);
    }
  }
}

// out = out * factor + a b, for a an accumulator of kRowTiles x 16 rows and kSteps x 8 columns, and the rows of tile b
// from b_row on, at 32 columns from b_chunk on. factor: of the lane's two rows of every row tile.
template <bool kExact, class TileB, int kRowTiles, int kSteps, int kDimTiles>
__device__ __forceinline__ void scores_by_columns_tf32(float (&out)[kRowTiles][kDimTiles][4], int out_tile,
                                                       const float (&factor)[kRowTiles][2],
                                                       const float (&a)[kRowTiles][kSteps][4], uint32_t b_tile,
                                                       int b_row, int b_chunk) {
  float fresh[kRowTiles][4][4] = {}, small[kRowTiles][4][4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    Tf32<kExact, 4> left[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) left[m].set(i, __float_as_uint(a[m][step][i % 2 * 2 + i / 2]));
    }
    columns_tf32<kExact, TileB>(fresh, small, left, b_tile, b_row + step * 8, b_chunk);
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = out[m][out_tile + j][e];
        x = fmaf(x, factor[m][e / 2], kExact ? fresh[m][j][e] + small[m][j][e] : fresh[m][j][e]);
      }
    }
  }
}

// Where a lane's accumulators of four column tiles, as scores_by_columns_tf32 makes them, belong in a tile of floats:
// two chunks of row g (+ 8 with half). `chunk`: as b_chunk.
template <class TileB, int kDimTiles>
__device__ __forceinline__ void store_columns_tf32(uint32_t tile, int row, int chunk, const float (&out)[kDimTiles][4],
                                                   int out_tile, int half, float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __float_as_uint(out[out_tile + j][half * 2 + side] * factor);
    ptx::store_shared(TileB::address(tile, row + lane / 4 + half * 8, chunk + lane % 4 * 2 + side),
                      make_uint4(x[0], x[1], x[2], x[3]));
  }
}

}  // namespace attnkern::cuda
