// A flash-attention forward of the Hopper generation: TMA, mbarrier pipeline, wgmma, warp specialisation.
//
//   entry                 element   head_dim   keys per block   threads   dynamic shared memory (bytes)
//   flash_sm90_bf16_d64   bf16      64         64               384       49224
//   flash_sm90_bf16_d128  bf16      128        128              384       163912
//
// Grid: (ceil(seqlen_q / 128), heads_q, batch). Warpgroup 0 copies; warpgroups 1 and 2 own 64 query rows each.
//
// Tensor maps: (batch, heads, rows, head_dim) in bf16, so innermost first {head_dim, rows, heads, batch}, 128-byte
// swizzle, out of bounds zero. Boxes: q and out {64, 64, 1, 1}; k and v {64, keys per block, 1, 1}.
#include "cuda/ptx_sm90.cuh"

namespace {

using namespace attnkern;

struct FlashSm90Params {
  float* lse;                  // (batch, heads_q, seqlen_q), contiguous; natural logarithm
  int32_t group;               // query heads per key head
  int32_t seqlen_q, seqlen_k;  // at least 1, as tensor maps have it
  int32_t causal;              // query i sees keys 0..i
  float scale_log2;            // softmax scale * log2(e), positive
};

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kGroupRows = 64;  // query rows of a warpgroup
constexpr int kStages = 2;
constexpr int kSlabColumns = 64,
              kRowBytes = 128;  // a tile is slabs of 64 columns: 128 bytes a row, as the swizzle has it
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kInfinity = __builtin_huge_valf();

template <int kHeadDim, int kKeys>
struct Layout {
  static constexpr int kSlabs = kHeadDim / kSlabColumns;
  static constexpr uint32_t kQSlab = kGroupRows * kRowBytes, kQTile = kQSlab * kSlabs;  // of one warpgroup
  static constexpr uint32_t kKvSlab = kKeys * kRowBytes, kKvTile = kKvSlab * kSlabs;
  static constexpr uint32_t kK = kConsumers * kQTile, kV = kK + kStages * kKvTile;
  static constexpr uint32_t kBarriers = kV + kStages * kKvTile;
  static constexpr uint32_t kBytes = kBarriers + (1 + 4 * kStages) * 8;
};
static_assert(Layout<64, 64>::kBytes == 49224 && Layout<128, 128>::kBytes == 163912);

// Stage and phase of the n-th use of a ring of kStages buffers.
__device__ __forceinline__ uint32_t stage_of(uint32_t n) { return n % kStages; }
__device__ __forceinline__ uint32_t parity_of(uint32_t n) { return n / kStages & 1; }

struct Barriers {
  uint32_t first;
  __device__ uint32_t q_full() const { return first; }
  __device__ uint32_t k_full(int n) const { return first + 8 * (1 + stage_of(n)); }
  __device__ uint32_t v_full(int n) const { return first + 8 * (1 + kStages + stage_of(n)); }
  __device__ uint32_t k_empty(int n) const { return first + 8 * (1 + 2 * kStages + stage_of(n)); }
  __device__ uint32_t v_empty(int n) const { return first + 8 * (1 + 3 * kStages + stage_of(n)); }
};

// s = Q K^T: both K-major, 16 of head_dim at a time.
template <int kHeadDim, int kKeys>
__device__ __forceinline__ void scores(float (&s)[kKeys / 8][4], uint32_t q, uint32_t k) {
  using L = Layout<kHeadDim, kKeys>;
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    const int slab = d / 4, column = d % 4 * 32;
    const auto operand = [&](uint32_t tile, uint32_t slab_bytes) {
      return ptx::matrix_descriptor(tile + slab * slab_bytes + column, 0, 8 * kRowBytes, ptx::Swizzle::k128B);
    };
    ptx::wgmma_ss<__nv_bfloat16, kKeys, false>(s, operand(q, L::kQSlab), operand(k, L::kKvSlab), d > 0);
  }
}

// out += P V: P from registers, V as it lies, rows of keys, which makes it N-major.
template <int kHeadDim, int kKeys>
__device__ __forceinline__ void add_values(float (&out)[kHeadDim / 8][4], const uint32_t (&p)[kKeys / 16][4],
                                           uint32_t v) {
  using L = Layout<kHeadDim, kKeys>;
#pragma unroll
  for (int n = 0; n < kKeys / 16; ++n) {
    const uint64_t operand =
        ptx::matrix_descriptor(v + n * 16 * kRowBytes, L::kKvSlab, 8 * kRowBytes, ptx::Swizzle::k128B);
    ptx::wgmma_rs<__nv_bfloat16, kHeadDim, true>(out, p[n], operand, true);
  }
}

// The state of a thread's two rows (row and row + 8 of its warpgroup).
struct Softmax {
  float largest[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0.f, 0.f};
  float factor[2];  // what everything accumulated before the last block is to be multiplied by

  // s becomes exp(s - largest)
  template <int kTiles>
  __device__ __forceinline__ void update(float (&s)[kTiles][4], float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float now = largest[half];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) now = fmaxf(now, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
      // -inf - -inf would be NaN where a row has seen no key yet
      const float offset = now == -kInfinity ? 0.f : now * scale_log2;
      factor[half] = ptx::ex2(largest[half] * scale_log2 - offset);
      largest[half] = now;
      sum[half] *= factor[half];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float &first = s[n][2 * half], &second = s[n][2 * half + 1];
        first = ptx::ex2(first * scale_log2 - offset);
        second = ptx::ex2(second * scale_log2 - offset);
        sum[half] += first + second;
      }
    }
  }
};

// Two neighbouring blocks of eight columns are, packed, one operand of 16.
template <int kTiles>
__device__ __forceinline__ void pack_operand(uint32_t (&p)[kTiles / 2][4], const float (&s)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    p[i / 4][i % 4] = ptx::pack<__nv_bfloat16>(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
  }
}

template <int kHeadDim, int kKeys>
__device__ __forceinline__ void flash_forward(const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                              const ptx::TensorMap& v_map, const ptx::TensorMap& out_map,
                                              const FlashSm90Params& p) {
  using L = Layout<kHeadDim, kKeys>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  const auto k_tile = [&](int n) { return base + L::kK + stage_of(n) * L::kKvTile; };
  const auto v_tile = [&](int n) { return base + L::kV + stage_of(n) * L::kKvTile; };
  const Barriers barriers{base + L::kBarriers};

  const int head = blockIdx.y, batch = blockIdx.z;
  const int block_row = blockIdx.x * (kConsumers * kGroupRows);
  const int keys = p.causal ? min(p.seqlen_k, block_row + kConsumers * kGroupRows) : p.seqlen_k;
  const int blocks = (keys + kKeys - 1) / kKeys;

  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barriers.q_full(), 1);
#pragma unroll
    for (int n = 0; n < kStages; ++n) {
      ptx::mbarrier_init(barriers.k_full(n), 1);
      ptx::mbarrier_init(barriers.v_full(n), 1);
      ptx::mbarrier_init(barriers.k_empty(n), kConsumers * kWarpgroup / 32);  // one arrival per warp
      ptx::mbarrier_init(barriers.v_empty(n), kConsumers * kWarpgroup / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  // The same for all lanes, and known as such to the compiler.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x / 32 == 0 && ptx::elect_one()) {
      ptx::mbarrier_arrive_expect_tx(barriers.q_full(), kConsumers * L::kQTile);
#pragma unroll
      for (int i = 0; i < kConsumers * L::kSlabs; ++i) {
        ptx::tma_load(base + i * L::kQSlab, q_map, barriers.q_full(), i % L::kSlabs * kSlabColumns,
                      block_row + i / L::kSlabs * kGroupRows, head, batch);
      }
      const int key_head = head / p.group;
      const auto load = [&](uint32_t tile, const ptx::TensorMap& map, uint32_t full, uint32_t empty, int n) {
        ptx::mbarrier_wait(empty, parity_of(n) ^ 1);  // at once in the first round
        ptx::mbarrier_arrive_expect_tx(full, L::kKvTile);
#pragma unroll
        for (int slab = 0; slab < L::kSlabs; ++slab) {
          ptx::tma_load(tile + slab * L::kKvSlab, map, full, slab * kSlabColumns, n * kKeys, key_head, batch);
        }
      };
      // In the order of use: K of the next block before V of this one.
      for (int n = 0; n <= blocks; ++n) {
        if (n < blocks) load(k_tile(n), k_map, barriers.k_full(n), barriers.k_empty(n), n);
        if (n > 0) load(v_tile(n - 1), v_map, barriers.v_full(n - 1), barriers.v_empty(n - 1), n - 1);
      }
    }
    return;
  }

  ptx::setmaxnreg_inc<240>();
  const int consumer = warpgroup - 1;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int first_row = block_row + consumer * kGroupRows;
  const int row = first_row + warp * 16 + lane / 4;  // this thread's rows: row and row + 8
  const uint32_t q_tile = base + consumer * L::kQTile;
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  const auto mask = [&](float (&s)[kKeys / 8][4], int n) {
    const int first_key = n * kKeys;
    if (first_key + kKeys <= p.seqlen_k && !(p.causal && first_key + kKeys > first_row + 1)) return;
    const int last_key[2] = {p.causal ? min(row, p.seqlen_k - 1) : p.seqlen_k - 1,
                             p.causal ? min(row + 8, p.seqlen_k - 1) : p.seqlen_k - 1};
#pragma unroll
    for (int e = 0; e < kKeys / 2; ++e) {
      const int j = first_key + e / 4 * 8 + lane % 4 * 2 + e % 2;
      s[e / 4][e % 4] = j > last_key[e / 2 % 2] ? -kInfinity : s[e / 4][e % 4];
    }
  };

  Softmax softmax;
  float out[kHeadDim / 8][4] = {};
  uint32_t probability[kKeys / 16][4];
  ptx::mbarrier_wait(barriers.q_full(), 0);
  float s[kKeys / 8][4];
  ptx::mbarrier_wait(barriers.k_full(0), 0);
  ptx::hold(s);
  ptx::wgmma_fence();
  scores<kHeadDim, kKeys>(s, q_tile, k_tile(0));
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::hold(s);
  release(barriers.k_empty(0));
  mask(s, 0);
  softmax.update(s, p.scale_log2);
  pack_operand(probability, s);

  // The softmax of one block runs beside the P V of the block before.
  for (int n = 1; n < blocks; ++n) {
    ptx::mbarrier_wait(barriers.k_full(n), parity_of(n));
    ptx::mbarrier_wait(barriers.v_full(n - 1), parity_of(n - 1));
    ptx::hold(s);
    ptx::hold(out);
    ptx::hold(probability);
    ptx::wgmma_fence();
    scores<kHeadDim, kKeys>(s, q_tile, k_tile(n));
    ptx::wgmma_commit();
    add_values<kHeadDim, kKeys>(out, probability, v_tile(n - 1));
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::hold(s);
    release(barriers.k_empty(n));
    mask(s, n);
    softmax.update(s, p.scale_log2);
    ptx::wgmma_wait<0>();
    ptx::hold(out);
    ptx::hold(probability);
    release(barriers.v_empty(n - 1));
#pragma unroll
    for (int e = 0; e < kHeadDim / 2; ++e) out[e / 4][e % 4] *= softmax.factor[e / 2 % 2];
    pack_operand(probability, s);  // only now: the wgmma read its registers until the wait
  }

  ptx::mbarrier_wait(barriers.v_full(blocks - 1), parity_of(blocks - 1));
  ptx::hold(out);
  ptx::hold(probability);
  ptx::wgmma_fence();
  add_values<kHeadDim, kKeys>(out, probability, v_tile(blocks - 1));
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::hold(out);

  float inverse[2];
  const int64_t lse_row = (static_cast<int64_t>(batch) * gridDim.y + head) * p.seqlen_q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = softmax.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    inverse[half] = sum > 0.f ? 1.f / sum : 0.f;
    const int i = row + half * 8;
    if (lane % 4 == 0 && i < p.seqlen_q) {
      p.lse[lse_row + i] = sum > 0.f ? (softmax.largest[half] * p.scale_log2 + ptx::lg2(sum)) * kLn2 : -kInfinity;
    }
  }

  // The output leaves through this warpgroup's part of Q: a warp writes the rows that its own wgmmas read, which are
  // over.
#pragma unroll
  for (int c = 0; c < kHeadDim / 16; ++c) {
    const int local = warp * 16 + lane % 16, chunk = c % 4 * 2 + lane / 16;
    const uint32_t address = q_tile + c / 4 * L::kQSlab + local * kRowBytes + ((chunk ^ (local & 7)) << 4);
    uint32_t tile[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* two = &out[2 * c + i / 2][i % 2 * 2];
      tile[i] = ptx::pack<__nv_bfloat16>(two[0] * inverse[i % 2], two[1] * inverse[i % 2]);
    }
    ptx::stmatrix(address, tile);
  }
  ptx::fence_proxy_async();
  ptx::barrier_sync(1 + consumer, kWarpgroup);
  if (warp == 0 && ptx::elect_one()) {
#pragma unroll
    for (int slab = 0; slab < L::kSlabs; ++slab) {
      ptx::tma_store(out_map, q_tile + slab * L::kQSlab, slab * kSlabColumns, first_row, head, batch);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();  // shared memory must outlive the copy
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_sm90_bf16_d64(const __grid_constant__ attnkern::ptx::TensorMap q,
                        const __grid_constant__ attnkern::ptx::TensorMap k,
                        const __grid_constant__ attnkern::ptx::TensorMap v,
                        const __grid_constant__ attnkern::ptx::TensorMap out,
                        const __grid_constant__ FlashSm90Params p) {
  flash_forward<64, 64>(q, k, v, out, p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_sm90_bf16_d128(const __grid_constant__ attnkern::ptx::TensorMap q,
                         const __grid_constant__ attnkern::ptx::TensorMap k,
                         const __grid_constant__ attnkern::ptx::TensorMap v,
                         const __grid_constant__ attnkern::ptx::TensorMap out,
                         const __grid_constant__ FlashSm90Params p) {
  flash_forward<128, 128>(q, k, v, out, p);
}
