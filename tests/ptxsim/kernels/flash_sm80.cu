// A flash-attention forward of the sm_80 generation: mma.sync, ldmatrix, cp.async. Small, but with everything that a
// real one has to get right: two stages of K and V in flight, swizzled tiles, ragged lengths, causal and grouped heads.
//
//   entry                 element   head_dim   threads   dynamic shared memory (bytes)
//   flash_sm80_f16_d64    f16       64         128       40960
//   flash_sm80_bf16_d64   bf16      64         128       40960
//   flash_sm80_bf16_d128  bf16      128        128       81920
//
// Grid: (ceil(seqlen_q / 64), heads_q, batch). A block owns 64 query rows, a warp 16 of them.
#include "cuda/ptx.cuh"

namespace {

using namespace attnkern;

// Tensors are (batch, heads, rows, head_dim) with head_dim contiguous and every row aligned to 16 bytes.
struct FlashSm80Params {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;           // (batch, heads_q, seqlen_q), contiguous; natural logarithm
  int64_t q_stride[3];  // batch, head, row; in elements
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t out_stride[3];
  int32_t group;  // query heads per key head
  int32_t seqlen_q, seqlen_k;
  int32_t causal;    // query i sees keys 0..i
  float scale_log2;  // softmax scale * log2(e), positive
};

constexpr int kThreads = 128;
constexpr int kRows = 64;  // of a tile: queries, and keys of one block
constexpr int kStages = 2;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kInfinity = __builtin_huge_valf();

// A tile is kRows rows of head_dim elements. The 16-byte chunks of a row are permuted by its lowest three bits, so that
// the eight rows which ldmatrix reads at once lie in different banks.
template <int kHeadDim>
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
  return tile + row * (kHeadDim * 2) + ((chunk ^ (row & 7)) << 4);
}

// Rows from `first` on; those past `end` are zero. Q, K and V may be followed by anything, NaN included, and 0 * NaN
// would reach the output.
template <typename T, int kHeadDim>
__device__ __forceinline__ void load_tile(uint32_t tile, const T* tensor, int64_t row_stride, int first, int end) {
  constexpr int kChunks = kHeadDim / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool live = first + row < end;
    const T* source = tensor + (live ? (first + row) * row_stride + chunk * 8 : 0);
    ptx::cp_async<16>(chunk_address<kHeadDim>(tile, row, chunk), source, live ? 16 : 0);
  }
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void flash_forward(const FlashSm80Params& p) {
  constexpr uint32_t kTile = kRows * kHeadDim * 2;
  constexpr int kDepth = kHeadDim / 16;  // steps of an mma over head_dim
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t q_tile = ptx::shared_address(shared);
  const auto k_tile = [&](int block) { return q_tile + kTile * (1 + block % kStages * 2); };
  const auto v_tile = [&](int block) { return q_tile + kTile * (2 + block % kStages * 2); };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int first_row = blockIdx.x * kRows;
  const int row = first_row + warp * 16 + lane / 4;  // this thread's rows: row and row + 8
  const auto base = [&](const void* tensor, const int64_t (&stride)[3], int h) {
    return static_cast<const T*>(tensor) + batch * stride[0] + h * stride[1];
  };
  const T* q = base(p.q, p.q_stride, head);
  const T* k = base(p.k, p.k_stride, head / p.group);
  const T* v = base(p.v, p.v_stride, head / p.group);
  const int keys = p.causal ? min(p.seqlen_k, first_row + kRows) : p.seqlen_k;
  const int blocks = (keys + kRows - 1) / kRows;

  // A group may be empty: then counting groups stays the same to the end.
  load_tile<T, kHeadDim>(q_tile, q, p.q_stride[2], first_row, p.seqlen_q);
  ptx::cp_async_commit();
  if (blocks > 0) load_tile<T, kHeadDim>(k_tile(0), k, p.k_stride[2], 0, p.seqlen_k);
  ptx::cp_async_commit();
  if (blocks > 0) load_tile<T, kHeadDim>(v_tile(0), v, p.v_stride[2], 0, p.seqlen_k);
  ptx::cp_async_commit();

  // What a lane addresses for ldmatrix.x4: matrices 0 and 1 lie below each other, or side by side.
  const int below = lane % 16, beside = lane / 16;
  ptx::cp_async_wait<2>();
  __syncthreads();
  uint32_t q_fragment[kDepth][4];
  if (blocks > 0) {  // else no barrier stands between this and the output, which takes Q's place
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      ptx::ldmatrix(q_fragment[d], chunk_address<kHeadDim>(q_tile, warp * 16 + below, 2 * d + beside));
    }
  }

  float out[kHeadDim / 8][4] = {};
  float row_max[2] = {-kInfinity, -kInfinity}, row_sum[2] = {0.f, 0.f};
  for (int block = 0; block < blocks; ++block) {
    ptx::cp_async_wait<1>();  // K of this block; V may still be under way
    __syncthreads();
    if (block + 1 < blocks) {
      load_tile<T, kHeadDim>(k_tile(block + 1), k, p.k_stride[2], (block + 1) * kRows, p.seqlen_k);
    }
    ptx::cp_async_commit();

    float score[kRows / 8][4] = {};
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int n = 0; n < kRows / 16; ++n) {
        uint32_t key[4];  // keys 0-7 at d and d + 8, keys 8-15 at d and d + 8
        const int key_row = n * 16 + lane / 16 * 8 + lane % 8;
        ptx::ldmatrix(key, chunk_address<kHeadDim>(k_tile(block), key_row, 2 * d + lane / 8 % 2));
        ptx::mma_m16n8k16<T>(score[2 * n], q_fragment[d], key[0], key[1]);
        ptx::mma_m16n8k16<T>(score[2 * n + 1], q_fragment[d], key[2], key[3]);
      }
    }

    const int first_key = block * kRows;
    if (first_key + kRows > p.seqlen_k || (p.causal && first_key + kRows > first_row + 1)) {
      const int last_key[2] = {p.causal ? min(row, p.seqlen_k - 1) : p.seqlen_k - 1,
                               p.causal ? min(row + 8, p.seqlen_k - 1) : p.seqlen_k - 1};
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = first_key + n * 8 + lane % 4 * 2 + e % 2;
          score[n][e] = j > last_key[e / 2] ? -kInfinity : score[n][e];
        }
      }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = row_max[half];
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        largest = fmaxf(largest, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      // -inf - -inf would be NaN where a row has seen no key yet
      const float offset = largest == -kInfinity ? 0.f : largest * p.scale_log2;
      const float factor = ptx::ex2(row_max[half] * p.scale_log2 - offset);
      row_max[half] = largest;
      row_sum[half] *= factor;
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          score[n][e] = ptx::ex2(score[n][e] * p.scale_log2 - offset);
          row_sum[half] += score[n][e];
        }
      }
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        out[n][2 * half] *= factor;
        out[n][2 * half + 1] *= factor;
      }
    }

    ptx::cp_async_wait<1>();  // V of this block; K of the next may still be under way
    __syncthreads();
    if (block + 1 < blocks) {
      load_tile<T, kHeadDim>(v_tile(block + 1), v, p.v_stride[2], (block + 1) * kRows, p.seqlen_k);
    }
    ptx::cp_async_commit();

    // Two neighbouring 16x8 accumulators are, packed, one 16x16 operand.
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
      const uint32_t probability[4] = {ptx::pack<T>(score[2 * n][0], score[2 * n][1]),
                                       ptx::pack<T>(score[2 * n][2], score[2 * n][3]),
                                       ptx::pack<T>(score[2 * n + 1][0], score[2 * n + 1][1]),
                                       ptx::pack<T>(score[2 * n + 1][2], score[2 * n + 1][3])};
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        uint32_t value[4];  // keys 0-7 and 8-15 at d, then at d + 8
        ptx::ldmatrix<true>(value, chunk_address<kHeadDim>(v_tile(block), n * 16 + below, 2 * d + beside));
        ptx::mma_m16n8k16<T>(out[2 * d], probability, value[0], value[1]);
        ptx::mma_m16n8k16<T>(out[2 * d + 1], probability, value[2], value[3]);
      }
    }
  }

  // Through shared memory, so that global memory sees whole lines. Only this warp ever read its rows of Q's tile.
  const int64_t lse_row = (static_cast<int64_t>(batch) * gridDim.y + head) * p.seqlen_q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      const uint32_t chunk = chunk_address<kHeadDim>(0, warp * 16 + half * 8 + lane / 4, n);
      *reinterpret_cast<uint32_t*>(shared + chunk + lane % 4 * 4) =
          ptx::pack<T>(out[n][2 * half] * inverse, out[n][2 * half + 1] * inverse);
    }
    const int i = row + half * 8;
    if (lane % 4 == 0 && i < p.seqlen_q) {
      p.lse[lse_row + i] = sum > 0.f ? (row_max[half] * p.scale_log2 + ptx::lg2(sum)) * kLn2 : -kInfinity;
    }
  }
  __syncwarp();
  T* out_base = static_cast<T*>(p.out) + batch * p.out_stride[0] + head * p.out_stride[1];
  constexpr int kChunks = kHeadDim / 8;
#pragma unroll
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int local = warp * 16 + i / kChunks, chunk = i % kChunks;
    if (first_row + local < p.seqlen_q) {
      *reinterpret_cast<uint4*>(out_base + (first_row + local) * p.out_stride[2] + chunk * 8) =
          *reinterpret_cast<const uint4*>(shared + chunk_address<kHeadDim>(0, local, chunk));
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) flash_sm80_f16_d64(const __grid_constant__ FlashSm80Params p) {
  flash_forward<__half, 64>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads) flash_sm80_bf16_d64(const __grid_constant__ FlashSm80Params p) {
  flash_forward<__nv_bfloat16, 64>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads) flash_sm80_bf16_d128(const __grid_constant__ FlashSm80Params p) {
  flash_forward<__nv_bfloat16, 128>(p);
}
