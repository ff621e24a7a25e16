// The tiles of csrc/cuda/smem_sm90.cuh and every shape of wgmma in csrc/cuda/ptx_sm90.cuh, in products of small
// integers. tests/test_cuda_tiles.py says what each kernel computes.
//
//   entry                 threads   grid   dynamic shared memory (bytes)
//   tile_products_*       128       1      8192 (4 + ceil(n / 64) * 2) + 1032
//   tile_reduce_add       128       any    2 * 8192
#include "cuda/smem_sm90.cuh"

using namespace attnkern;
using attnkern::cuda::SlabTile;

namespace {

constexpr int kM = 64, kK = 64;

template <typename T, int kN>
struct Tiles {
  using A = SlabTile<T, kM, kK>;   // (m, k)
  using At = SlabTile<T, kK, kM>;  // (k, m)
  using B = SlabTile<T, kN, kK>;   // (n, k)
  using Bt = SlabTile<T, kK, kN>;  // (k, n)
  static constexpr uint32_t kAt = A::kBytes, kB = kAt + At::kBytes, kBt = kB + B::kBytes;
  static constexpr uint32_t kBarrier = (kBt + Bt::kBytes);
};

// d[i] (64 x kN) = a b four times: both by columns (K-major); a by rows; b by rows; a from registers. The maps have one
// head and one batch entry.
template <typename T, int kN>
__device__ __forceinline__ void tile_products(const ptx::TensorMap& a, const ptx::TensorMap& at,
                                              const ptx::TensorMap& b, const ptx::TensorMap& bt, float* d) {
  using L = Tiles<T, kN>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = ptx::shared_address(memory), barrier = base + L::kBarrier;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, L::kBarrier);
    L::A::load(base, a, barrier, 0, 0, 0);
    L::At::load(base + L::kAt, at, barrier, 0, 0, 0);
    L::B::load(base + L::kB, b, barrier, 0, 0, 0);
    L::Bt::load(base + L::kBt, bt, barrier, 0, 0, 0);
  }
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t fragment[kK / 16][4];
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    ptx::ldmatrix(fragment[step], L::A::address(base, warp * 16 + lane % 16, 2 * step + lane / 16));
  }
#pragma unroll
  for (int kind = 0; kind < 4; ++kind) {
    float sum[kN / 8][4];
    ptx::hold(sum);
    ptx::hold(fragment);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
      const uint64_t by_columns = L::A::by_columns(base, step), by_rows = L::At::by_rows(base + L::kAt, step);
      const uint64_t b_columns = L::B::by_columns(base + L::kB, step), b_rows = L::Bt::by_rows(base + L::kBt, step);
      if (kind == 0) ptx::wgmma_ss<T, kN, false>(sum, by_columns, b_columns, step > 0);
      if (kind == 1) ptx::wgmma_ss<T, kN, false, true>(sum, by_rows, b_columns, step > 0);
      if (kind == 2) ptx::wgmma_ss<T, kN, true>(sum, by_columns, b_rows, step > 0);
      if (kind == 3) ptx::wgmma_rs<T, kN, true>(sum, fragment[step], b_rows, step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(sum);
    ptx::hold(fragment);
#pragma unroll
    for (int e = 0; e < kN / 2; ++e) {
      const int row = warp * 16 + lane / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + lane % 4 * 2 + e % 2;
      d[(kind * kM + row) * kN + column] = sum[e / 4][e % 4];
    }
  }
}

}  // namespace

#define ATTNKERN_PRODUCTS(name, type, n)                                                               \
  extern "C" __global__ void __launch_bounds__(128) tile_products_##name##_n##n(                       \
      const __grid_constant__ ptx::TensorMap a, const __grid_constant__ ptx::TensorMap at,             \
      const __grid_constant__ ptx::TensorMap b, const __grid_constant__ ptx::TensorMap bt, float* d) { \
    tile_products<type, n>(a, at, b, bt, d);                                                           \
  }
ATTNKERN_PRODUCTS(bf16, __nv_bfloat16, 32)
ATTNKERN_PRODUCTS(f16, __half, 48)
ATTNKERN_PRODUCTS(bf16, __nv_bfloat16, 64)
ATTNKERN_PRODUCTS(f16, __half, 80)
ATTNKERN_PRODUCTS(bf16, __nv_bfloat16, 96)
ATTNKERN_PRODUCTS(f16, __half, 112)
ATTNKERN_PRODUCTS(bf16, __nv_bfloat16, 128)
ATTNKERN_PRODUCTS(f16, __half, 160)
ATTNKERN_PRODUCTS(bf16, __nv_bfloat16, 192)
ATTNKERN_PRODUCTS(f16, __half, 256)

// Adds 100 row + column, of a tile of 64 x 60 floats, to sum (batch, heads, rows, columns) at head blockIdx.x and row
// 32 of it. Rows and columns past the tensor's stay out.
extern "C" __global__ void __launch_bounds__(128) tile_reduce_add(const __grid_constant__ ptx::TensorMap sum) {
  using Sum = SlabTile<float, 64, 60>;
  static_assert(Sum::kSlabs == 2 && Sum::kBytes == 2 * 8192);
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t tile = ptx::shared_address(memory);
  for (int i = threadIdx.x; i < 64 * 16; i += 128) {
    const int row = i / 16, chunk = i % 16;
    const auto at = [&](int column) { return __float_as_uint(static_cast<float>(100 * row + column)); };
    ptx::store_shared(Sum::address(tile, row, chunk),
                      make_uint4(at(4 * chunk), at(4 * chunk + 1), at(4 * chunk + 2), at(4 * chunk + 3)));
  }
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    Sum::reduce_add(sum, tile, 32, blockIdx.x, 0);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
}
