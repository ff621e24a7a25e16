// One small kernel per mechanism of Hopper, each of which can be broken in one thing at a time. Every kernel is exact
// (the inputs are small integers). references.py says what each computes.
//
//   entry                   threads   grid                          dynamic shared memory (bytes)
//   mbarrier_ring           160       any                           0
//   tma_copy_none           128       (column tiles, row tiles)     0
//   tma_copy_32             128       (column tiles, row tiles)     0
//   tma_copy_64             128       (column tiles, row tiles)     0
//   tma_copy_128            128       (column tiles, row tiles)     0
//   tma_copy_3d             64        (tiles of each dimension)     0
//   tma_reduce_add          128       any                           0
//   bulk_copy_reduce        128       any (all resident)            0
//   wgmma_ss_none           128       1                             0
//   wgmma_ss_32             128       1                             0
//   wgmma_ss_64             128       1                             0
//   wgmma_ss_128            128       1                             0
//   wgmma_ss_128_n128_t     128       1                             0
//   wgmma_rs_128            128       1                             0
//   wgmma_rs_128_n128_t     128       1                             0
//   stmatrix_shapes         32        1                             0
//   elect_leader            128       any                           0
//   programmatic_launch     64        any                           0
#include "cuda/ptx_sm90.cuh"

using namespace attnkern;

namespace {

// Where TMA and wgmma put the byte that a plain row-major tile has at `offset`: bits 4.. of the address are xored with
// bits 7.., as many as the swizzle permutes 16-byte chunks (2, 4 or 8). The tile starts at a multiple of 1024.
template <int kRowBytes>
__device__ __forceinline__ uint32_t swizzled(uint32_t offset) {
  constexpr uint32_t kChunks = kRowBytes / 16;
  return offset ^ ((offset >> 7 & (kChunks - 1)) << 4);
}

// Reads one box, writes what it read to `plain` (by tile, row-major) and its negative to the same box of `out`.
// The tile's rows are kRowBytes wide, which is the swizzle too unless that is off. 16-bit elements.
template <int kRowBytes, bool kSwizzle>
__device__ __forceinline__ void tma_copy(const ptx::TensorMap& in, const ptx::TensorMap& out, int16_t* plain) {
  constexpr int kRows = 16, kColumns = kRowBytes / 2;
  __shared__ __align__(1024) uint8_t tile[2][kRows * kRowBytes < 1024 ? 1024 : kRows * kRowBytes];
  __shared__ __align__(8) uint64_t barrier_storage;
  const uint32_t barrier = ptx::shared_address(&barrier_storage);
  const int column = blockIdx.x * kColumns, row = blockIdx.y * kRows;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, kRows * kRowBytes);
    ptx::tma_load(ptx::shared_address(tile[0]), in, barrier, column, row);
  }
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);
  plain += (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kRows * kColumns;
  for (int i = threadIdx.x; i < kRows * kColumns; i += 128) {
    const uint32_t at = kSwizzle ? swizzled<kRowBytes>(2 * i) : 2 * i;
    const int16_t value = *reinterpret_cast<const int16_t*>(tile[0] + at);
    plain[i] = value;
    *reinterpret_cast<int16_t*>(tile[1] + at) = static_cast<int16_t>(-value);
  }
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::tma_store(out, ptx::shared_address(tile[1]), column, row);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
}

// d (64 x kN) = a (64 x 64) b (64 x kN) in four steps of k. a by rows; b as kN rows of k, or (kTransposeB) as rows of
// n. Both lie in shared memory in slabs of kRowBytes-wide rows; without swizzle (kRowBytes 16) that is columns of 8x8
// blocks.
template <typename T, int kN, int kRowBytes, bool kRegisterA, bool kTransposeB>
__device__ __forceinline__ void wgmma_tile(const uint16_t* a, const uint16_t* b, float* d) {
  constexpr int kM = 64, kK = 64, kColumns = kRowBytes / 2;
  constexpr bool kSwizzle = kRowBytes > 16;
  constexpr ptx::Swizzle kMode = kRowBytes == 128  ? ptx::Swizzle::k128B
                                 : kRowBytes == 64 ? ptx::Swizzle::k64B
                                 : kRowBytes == 32 ? ptx::Swizzle::k32B
                                                   : ptx::Swizzle::kNone;
  static_assert(!kTransposeB || kSwizzle);
  __shared__ __align__(1024) uint8_t a_tile[kM * kK * 2];
  __shared__ __align__(1024) uint8_t b_tile[kN * kK * 2];
  const auto store = [](uint8_t* tile, const uint16_t* matrix, int rows, int columns) {
    for (int i = threadIdx.x; i < rows * columns; i += 128) {
      const int row = i / columns, column = i % columns;
      const uint32_t offset = row * kRowBytes + column % kColumns * 2;
      const uint32_t slab = column / kColumns * (rows * kRowBytes);
      *reinterpret_cast<uint16_t*>(tile + slab + (kSwizzle ? swizzled<kRowBytes>(offset) : offset)) = matrix[i];
    }
  };
  if constexpr (!kRegisterA) store(a_tile, a, kM, kK);
  if constexpr (kTransposeB) {
    store(b_tile, b, kK, kN);
  } else {
    store(b_tile, b, kN, kK);
  }
  ptx::fence_proxy_async();
  __syncthreads();

  // 16 of k: 32 bytes within a row, or in the next slab; two blocks without swizzle.
  const auto k_major = [](const uint8_t* tile, int rows, int step) {
    const int column = step * 16;
    return ptx::matrix_descriptor(
        ptx::shared_address(tile) + column / kColumns * (rows * kRowBytes) + column % kColumns * 2, rows * kRowBytes,
        8 * kRowBytes, kMode);
  };
  const auto n_major = [](const uint8_t* tile, int step) {
    return ptx::matrix_descriptor(ptx::shared_address(tile) + step * 16 * kRowBytes, kK * kRowBytes, 8 * kRowBytes,
                                  kMode);
  };
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto two = [&](int r, int column) { return *reinterpret_cast<const uint32_t*>(a + r * kK + column); };
  uint32_t fragment[kK / 16][4];
  if constexpr (kRegisterA) {
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
      const int column = step * 16 + 2 * t;
      fragment[step][0] = two(row, column);
      fragment[step][1] = two(row + 8, column);
      fragment[step][2] = two(row, column + 8);
      fragment[step][3] = two(row + 8, column + 8);
    }
  }
  float sum[kN / 8][4];
  ptx::hold(sum);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    const uint64_t b_operand = kTransposeB ? n_major(b_tile, step) : k_major(b_tile, kN, step);
    if constexpr (kRegisterA) {
      ptx::wgmma_rs<T, kN, kTransposeB>(sum, fragment[step], b_operand, step > 0);
    } else {
      ptx::wgmma_ss<T, kN, kTransposeB>(sum, k_major(a_tile, kM, step), b_operand, step > 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::hold(sum);
#pragma unroll
  for (int e = 0; e < kN / 2; ++e) d[(row + e / 2 % 2 * 8) * kN + e / 4 * 8 + 2 * t + e % 2] = sum[e / 4][e % 4];
}

}  // namespace

// Warp 0 fills two slots in turn, warps 1 to 4 read them; phases of mbarriers say which round a slot holds.
extern "C" __global__ void __launch_bounds__(160) mbarrier_ring(const int* x, int* out, int rounds) {
  constexpr int kSlots = 2, kItems = 128;
  __shared__ int slot[kSlots][kItems];
  __shared__ __align__(8) uint64_t full[kSlots], empty[kSlots];
  x += int64_t{blockIdx.x} * rounds * kItems;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kSlots; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&full[s]), 32);
      ptx::mbarrier_init(ptx::shared_address(&empty[s]), kItems);
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int s = round % kSlots;
      ptx::mbarrier_wait(ptx::shared_address(&empty[s]), (round / kSlots & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < kItems; i += 32) {
        slot[s][i + threadIdx.x] = x[round * kItems + i + threadIdx.x] + round;
      }
      ptx::mbarrier_arrive(ptx::shared_address(&full[s]));
    }
  } else {
    const int item = 159 - threadIdx.x;
    int sum = 0;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int s = round % kSlots;
      ptx::mbarrier_wait(ptx::shared_address(&full[s]), round / kSlots & 1);
      sum = 3 * sum + slot[s][item];
      ptx::mbarrier_arrive(ptx::shared_address(&empty[s]));
    }
    out[blockIdx.x * kItems + item] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(128)
    tma_copy_none(const __grid_constant__ ptx::TensorMap in, const __grid_constant__ ptx::TensorMap out,
                  int16_t* plain) {
  tma_copy<64, false>(in, out, plain);
}
extern "C" __global__ void __launch_bounds__(128)
    tma_copy_32(const __grid_constant__ ptx::TensorMap in, const __grid_constant__ ptx::TensorMap out, int16_t* plain) {
  tma_copy<32, true>(in, out, plain);
}
extern "C" __global__ void __launch_bounds__(128)
    tma_copy_64(const __grid_constant__ ptx::TensorMap in, const __grid_constant__ ptx::TensorMap out, int16_t* plain) {
  tma_copy<64, true>(in, out, plain);
}
extern "C" __global__ void __launch_bounds__(128)
    tma_copy_128(const __grid_constant__ ptx::TensorMap in, const __grid_constant__ ptx::TensorMap out,
                 int16_t* plain) {
  tma_copy<128, true>(in, out, plain);
}

// Boxes of {8, 4, 2} ints, no swizzle: out = 2 in + 1 within the tensor, nothing without.
extern "C" __global__ void __launch_bounds__(64)
    tma_copy_3d(const __grid_constant__ ptx::TensorMap in, const __grid_constant__ ptx::TensorMap out) {
  __shared__ __align__(128) int tile[64];
  __shared__ __align__(8) uint64_t barrier_storage;
  const uint32_t barrier = ptx::shared_address(&barrier_storage);
  const int at[3] = {static_cast<int>(blockIdx.x) * 8, static_cast<int>(blockIdx.y) * 4,
                     static_cast<int>(blockIdx.z) * 2};
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, sizeof(tile));
    ptx::tma_load(ptx::shared_address(tile), in, barrier, at[0], at[1], at[2]);
  }
  ptx::mbarrier_wait(barrier, 0);
  tile[threadIdx.x] = 2 * tile[threadIdx.x] + 1;
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::tma_store(out, ptx::shared_address(tile), at[0], at[1], at[2]);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
}

// Every block adds its 8x16 floats, i + 128 block for the i-th, to the same box at (column, row) of `sum`, twice: the
// second time through the same shared memory, which the first reduction must have finished reading.
extern "C" __global__ void __launch_bounds__(128)
    tma_reduce_add(const __grid_constant__ ptx::TensorMap sum, int column, int row) {
  __shared__ __align__(128) float tile[128];
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    tile[threadIdx.x] = static_cast<float>((threadIdx.x + 128 * blockIdx.x) << pass);
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::tma_reduce_add(sum, ptx::shared_address(tile), column, row);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    __syncthreads();
  }
}

// sum += the block's 128 floats, total[block] = their sum, both without a tensor map. Block 0 copies `sum` to `result`
// once every block has added (`done` counts them), for which it is not enough that shared memory has been read.
extern "C" __global__ void __launch_bounds__(128)
    bulk_copy_reduce(const float* x, float* sum, float* total, uint32_t* done, float* result) {
  __shared__ __align__(128) float tile[128];
  __shared__ __align__(8) uint64_t barrier_storage;
  const uint32_t barrier = ptx::shared_address(&barrier_storage);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, sizeof(tile));
    ptx::bulk_load(ptx::shared_address(tile), x + blockIdx.x * 128, sizeof(tile), barrier);
  }
  ptx::mbarrier_wait(barrier, 0);
  if (threadIdx.x == 0) {
    ptx::bulk_reduce_add(sum, ptx::shared_address(tile), sizeof(tile));
    ptx::bulk_commit();
    float all = 0.f;
#pragma unroll 4
    for (int i = 0; i < 128; ++i) all += tile[i];
    total[blockIdx.x] = all;
    ptx::bulk_wait<0>();
    ptx::add_release(done, 1);
    if (blockIdx.x == 0) {
      while (ptx::load_acquire(done) != gridDim.x) {
      }
    }
  }
  if (blockIdx.x == 0) {
    __syncthreads();
    result[threadIdx.x] = sum[threadIdx.x];
  }
}

extern "C" __global__ void __launch_bounds__(128) wgmma_ss_none(const uint16_t* a, const uint16_t* b, float* d) {
  wgmma_tile<__nv_bfloat16, 64, 16, false, false>(a, b, d);
}
extern "C" __global__ void __launch_bounds__(128) wgmma_ss_32(const uint16_t* a, const uint16_t* b, float* d) {
  wgmma_tile<__nv_bfloat16, 64, 32, false, false>(a, b, d);
}
extern "C" __global__ void __launch_bounds__(128) wgmma_ss_64(const uint16_t* a, const uint16_t* b, float* d) {
  wgmma_tile<__half, 64, 64, false, false>(a, b, d);
}
extern "C" __global__ void __launch_bounds__(128) wgmma_ss_128(const uint16_t* a, const uint16_t* b, float* d) {
  wgmma_tile<__half, 64, 128, false, false>(a, b, d);
}
extern "C" __global__ void __launch_bounds__(128) wgmma_ss_128_n128_t(const uint16_t* a, const uint16_t* b, float* d) {
  wgmma_tile<__nv_bfloat16, 128, 128, false, true>(a, b, d);
}
extern "C" __global__ void __launch_bounds__(128) wgmma_rs_128(const uint16_t* a, const uint16_t* b, float* d) {
  wgmma_tile<__nv_bfloat16, 64, 128, true, false>(a, b, d);
}
extern "C" __global__ void __launch_bounds__(128) wgmma_rs_128_n128_t(const uint16_t* a, const uint16_t* b, float* d) {
  wgmma_tile<__half, 128, 128, true, true>(a, b, d);
}

// The inverse of ldmatrix_shapes: registers (7 of a lane, plain, then 7 transposed) -> 14 matrices of 8 rows of 8.
extern "C" __global__ void __launch_bounds__(32) stmatrix_shapes(const uint32_t* registers, uint16_t* out) {
  constexpr int kPitch = 24;  // a row's 16 bytes every 48
  __shared__ __align__(16) uint16_t shared[14 * 8 * kPitch];
  registers += threadIdx.x;
  const auto take = [&] {
    const uint32_t value = *registers;
    registers += 32;
    return value;
  };
  const auto row = [&](int matrix) { return ptx::shared_address(shared + (matrix * 8 + threadIdx.x) * kPitch); };
  const auto shapes = [&]<bool kTranspose>(int first) {
    const uint32_t one[1] = {take()};
    ptx::stmatrix<kTranspose>(row(first), one);
    const uint32_t two[2] = {take(), take()};
    ptx::stmatrix<kTranspose>(row(first + 1), two);
    const uint32_t four[4] = {take(), take(), take(), take()};
    ptx::stmatrix<kTranspose>(row(first + 3), four);
  };
  shapes.template operator()<false>(0);
  shapes.template operator()<true>(7);
  __syncwarp();
#pragma unroll 4
  for (int i = threadIdx.x; i < 14 * 64; i += 32) out[i] = shared[i / 8 * kPitch + i % 8];
}

// leaders[warp] = how many lanes were elected, which is 1 whoever it was.
extern "C" __global__ void __launch_bounds__(128) elect_leader(unsigned* leaders) {
  const bool elected = ptx::elect_one();
  const unsigned ballot = __ballot_sync(0xffffffffu, elected);
  if (elected) leaders[blockIdx.x * 4 + threadIdx.x / 32] = __popc(ballot);
}

extern "C" __global__ void __launch_bounds__(64) programmatic_launch(const int* x, int* out) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int i = blockIdx.x * 64 + threadIdx.x;
  out[i] = 2 * x[i];
}
