// A block of the forward kernels for head sizes up to 256 (forward.cu: 16-bit elements, forward_fp32.cu: float32): it
// owns a tile of queries of one head, walks over the blocks of keys that they visit, and keeps scores and output in
// registers (FlashAttention-2: Dao, 2023). A warp owns whole rows, so that the softmax needs no more than the lanes of
// a quad.
//
// K and V have one buffer each. While Q K^T runs, V is under way; while the softmax and P V run, the next K is.
#pragma once

#include "cuda/forward.cuh"
#include "cuda/tf32.cuh"
#include "cuda/unattended.cuh"

namespace attnkern::cuda {

inline constexpr int kForwardWarps = 4, kForwardThreads = kForwardWarps * 32;

// The precision of a kernel: its products, and how many row tiles of 16 queries a warp has and how many keys a block.
// Here of 16-bit elements, by mma.m16n8k16. Two row tiles halve what a product reads from shared memory: a fragment of
// K or V then serves two mma. The generic variant, which the scores keep busy, and wide heads need the registers for
// something else.
template <typename T, int kHeadDim, bool kFastPath>
struct ForwardProducts {
  static constexpr int kRowTiles = kFastPath && kHeadDim <= 128 ? 2 : 1;
  static constexpr int kKeys = !kFastPath && kHeadDim >= 192 ? 32 : 64;
  using Chunks = Tile<kHeadDim>;
  static constexpr int kDepth = kHeadDim / 16;  // steps of an mma over the head size
  // Steps of Q K^T whose fragments are loaded side by side: as the registers allow.
  static constexpr int kAtOnce = kHeadDim % 128 == 0 ? (kFastPath ? 2 : 4) : kHeadDim % 64 == 32 ? 1 : kHeadDim / 16;

  // score += Q K^T, of this warp's rows.
  __device__ __forceinline__ static void scores(float (&score)[kRowTiles][kKeys / 8][4], uint32_t q_tile, int warp_row,
                                                uint32_t k_tile, const FragmentLane& at, const ForwardParams&) {
    // Where registers are short, not all fragments' loads side by side.
#pragma unroll(kAtOnce)
    for (int d = 0; d < kDepth; ++d) {
      uint32_t query[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::ldmatrix(query[m], Chunks::address(q_tile, warp_row + m * 16 + at.below, 2 * d + at.beside));
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t key[4];  // keys 0-7 at d and d + 8, keys 8-15 at d and d + 8
        ptx::ldmatrix(key, Chunks::address(k_tile, n * 16 + at.key_below, 2 * d + at.key_beside));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(score[m][2 * n], query[m], key[0], key[1]);
          ptx::mma_m16n8k16<T>(score[m][2 * n + 1], query[m], key[2], key[3]);
        }
      }
    }
  }

  __device__ __forceinline__ static void rescale(float (&out)[kHeadDim / 8][4], const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= factor[e / 2];
    }
  }

  // out += P V.
  __device__ __forceinline__ static void add_values(float (&out)[kRowTiles][kHeadDim / 8][4],
                                                    const float (&probabilities)[kRowTiles][kKeys / 8][4],
                                                    const float (&)[kRowTiles][2], uint32_t v_tile,
                                                    const FragmentLane& at, const ForwardParams& p) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t probability[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* two = &probabilities[m][2 * n + i / 2][i % 2 * 2];
          probability[m][i] = ptx::pack<T>(two[0], two[1]);
        }
      }
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        // Never so, which the compiler can't know: across it no value is loaded ahead, where no register is left.
        if (kFastPath && kHeadDim == 128 && d % 4 == 0 && p.score.seqlen_k < 0) break;
        uint32_t value[4];  // keys 0-7 and 8-15 at d, then at d + 8
        ptx::ldmatrix<true>(value, Chunks::address(v_tile, n * 16 + at.below, 2 * d + at.beside));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(out[m][2 * d], probability[m], value[0], value[1]);
          ptx::mma_m16n8k16<T>(out[m][2 * d + 1], probability[m], value[2], value[3]);
        }
      }
    }
  }

  // The lane's part of a row of the output, times `factor` -> row lane / 4 (+ 8 with half) of a row tile.
  __device__ __forceinline__ static void store_row(uint32_t tile, int first_row, const float (&out)[kHeadDim / 8][4],
                                                   int half, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      ptx::store_shared(Chunks::address(tile, first_row + half * 8 + lane / 4, n) + lane % 4 * 4,
                        ptx::pack<T>(out[n][2 * half] * factor, out[n][2 * half + 1] * factor));
    }
  }
};

// float32, by products of tf32.cuh. One variant does everything: three mma of 8 steps where 16-bit elements take half a
// one leave the scores' branches no weight, and whether factors may be rounded to tf32 is a branch around whole
// products. Two row tiles per warp, where the registers are there, also halve what splitting a fragment costs.
template <int kHeadDim>
struct ForwardProducts<float, kHeadDim, false> {
  static constexpr int kRowTiles = kHeadDim <= 64 ? 2 : 1;
  static constexpr int kKeys = kRowTiles == 2 || kHeadDim > 192 ? 16 : 32;
  using Chunks = TileOf<float, kHeadDim>;

  __device__ __forceinline__ static void scores(float (&score)[kRowTiles][kKeys / 8][4], uint32_t q_tile, int warp_row,
                                                uint32_t k_tile, const FragmentLane&, const ForwardParams& p) {
    by_precision(p.exact, [&](auto exact) {
      rows_by_rows_tf32<exact, Chunks, Chunks, kHeadDim / 8>(score, q_tile, warp_row, 0, k_tile, 0, 0);
    });
  }

  // With the product: see add_values.
  __device__ __forceinline__ static void rescale(float (&)[kHeadDim / 8][4], const float (&)[2]) {}

  // out = out * factor + P V. A branch for every 32 columns: across it the compiler doesn't load ahead, for which it
  // would spill.
  __device__ __forceinline__ static void add_values(float (&out)[kRowTiles][kHeadDim / 8][4],
                                                    const float (&probabilities)[kRowTiles][kKeys / 8][4],
                                                    const float (&factor)[kRowTiles][2], uint32_t v_tile,
                                                    const FragmentLane&, const ForwardParams& p) {
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 4) {
      by_precision(p.exact, [&](auto exact) {
        scores_by_columns_tf32<exact, Chunks>(out, d, factor, probabilities, v_tile, 0, 2 * d);
      });
    }
  }

  __device__ __forceinline__ static void store_row(uint32_t tile, int first_row, const float (&out)[kHeadDim / 8][4],
                                                   int half, float factor) {
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 4) store_columns_tf32<Chunks>(tile, first_row, 2 * d, out, d, half, factor);
  }
};

// All classes fit in 99 KiB, the least that a chip of compute capability 8.0 or above gives to one block.
template <typename T, int kHeadDim, bool kFastPath>
struct ForwardTile : ForwardProducts<T, kHeadDim, kFastPath> {
  using Products = ForwardProducts<T, kHeadDim, kFastPath>;
  static constexpr int kRows = kForwardWarps * 16 * Products::kRowTiles;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kQBytes = kRows * kRowBytes, kKeyBytes = Products::kKeys * kRowBytes;
  static constexpr int kSharedBytes = kQBytes + 2 * kKeyBytes;  // Q, K, V
};

// The output, normalised, through Q's tile, so that global memory sees whole lines; and the log-sum-exp. After the loop
// only this warp uses its rows of that tile.
template <typename T, int kHeadDim, bool kFastPath, class Config = ForwardTile<T, kHeadDim, kFastPath>>
__device__ __forceinline__ void store_output(const ForwardParams& p, const ForwardBlock& at, uint32_t q_tile,
                                             int warp_row, int seqlen_q,
                                             const float (&out)[Config::kRowTiles][kHeadDim / 8][4],
                                             const RowState (&state)[Config::kRowTiles]) {
  const int lane = threadIdx.x % 32, first_row = at.row_block * Config::kRows;
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = state[m].max[half];
      const float sum = quad_sum(state[m].sum[half]) + sink_term<kFastPath>(p.score, at.batch_head, max);
      float inverse = inverse_of(sum);
      if (!kFastPath && p.score.seeds != nullptr) inverse *= p.score.dropout_scale;
      const int tile_row = warp_row + m * 16 + half * 8 + lane / 4, i = first_row + tile_row;
      Config::store_row(q_tile, warp_row + m * 16, out[m], half, inverse);
      if (p.lse != nullptr && lane % 4 == 0 && i < seqlen_q) {
        p.lse[static_cast<int64_t>(at.batch_head) * seqlen_q + i] =
            log_sum_exp_with_sink<T, kFastPath>(p.score, at.batch_head, max, sum);
      }
    }
  }
  __syncwarp();
  T* target = const_cast<T*>(head_of<T>(p.out, at.batch, at.head));
  store_tile<T, kHeadDim, 16 * Config::kRowTiles, 32, kFastPath>(q_tile, p.out, target, warp_row, first_row + warp_row,
                                                                 seqlen_q, lane);
}

// Registers of a thread, in the loop: the output, kRowTiles * kHeadDim / 2, and the scores of a block of keys, which
// become its probabilities, kRowTiles * kKeys / 2.
template <typename T, int kHeadDim, bool kFastPath, bool kPages>
__device__ __forceinline__ void forward_block(const ParamsOf<ForwardParams, kPages>& p) {
  static_assert(!(kFastPath && kPages));
  using Config = ForwardTile<T, kHeadDim, kFastPath>;
  constexpr int kRows = Config::kRows, kKeys = Config::kKeys, kRowTiles = Config::kRowTiles;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t q_tile = ptx::shared_address(shared);
  const uint32_t k_tile = q_tile + Config::kQBytes, v_tile = k_tile + Config::kKeyBytes;
  AttendedByWarps<kForwardWarps> of_warps{};
  if constexpr (!kFastPath) {
    __shared__ uint32_t words[kForwardWarps * 4];
    of_warps.words = ptx::shared_address(words);
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const ForwardBlock at(p);
  const int first_row = at.row_block * kRows, warp_row = warp * 16 * kRowTiles;
  const int seqlen_q = p.score.seqlen_q, seqlen_k = p.score.seqlen_k;
  const T* q = head_of<T>(p.q, at.batch, at.head);
  const auto table = table_of(p, at.batch);
  const T* k = keys_of<T>(p.k, table, at.batch, at.head / p.group_k);
  const T* v = keys_of<T>(p.v, table, at.batch, at.head / p.group_v);
  HeadScore head_scores{};
  if constexpr (!kFastPath) head_scores = head_score(p.score, at.batch, at.head);
  const int rows = min(kRows, seqlen_q - first_row);
  auto keys = [&] {
    if constexpr (kFastPath) {
      return BandBlocks<kKeys>(p.score.band, first_row, rows, seqlen_k);
    } else {
      return KeyBlocks<kRows, kKeys>(p.score, at.batch, at.head, first_row, rows, {0, seqlen_k});
    }
  }();

  const int keys_end = [&] {
    if constexpr (kFastPath) {
      return keys.end();
    } else {
      return seqlen_k;
    }
  }();
  const auto load_block = [&](uint32_t tile, const Rows& rows, const T* source, int first) {
    load_keys<T, kHeadDim, kKeys, kForwardThreads, kFastPath>(table, tile, rows, source, first, keys_end);
    ptx::cp_async_commit();
  };

  load_tile<T, kHeadDim, kRows, kForwardThreads, kFastPath>(q_tile, p.q, q, first_row, seqlen_q);
  ptx::cp_async_commit();
  bool more = !keys.done();
  if (more) load_block(k_tile, p.k, k, keys.first());

  const FragmentLane fragment_lane;
  const int row = first_row + warp_row + lane / 4;  // this thread's rows: row + 8 n
  float out[kRowTiles][kHeadDim / 8][4] = {};
  RowState state[kRowTiles];
  const bool any = more;
  while (more) {
    const int first = keys.first();
    ptx::cp_async_wait<0>();  // K is there,
    __syncthreads();          // and nobody needs V's last block any more
    load_block(v_tile, p.v, v, first);
    float score[kRowTiles][kKeys / 8][4] = {};
    Config::scores(score, q_tile, warp_row, k_tile, fragment_lane, p);
    __syncthreads();  // K has been read
    // In this order: in most others ptxas spills registers of the narrowest generic kernel for one chip or another.
    const int col = first + lane % 4 * 2;
    bool masked;
    if constexpr (kFastPath) {
      masked = keys.masked(first);
    } else {
      masked = keys.masked();
    }
    keys.advance();
    more = !keys.done();
    if (more) load_block(k_tile, p.k, k, keys.first());

    // On the fast path a row attends to every key that was read.
    const bool hides = !kFastPath && may_hide<kFastPath>(p.score, masked);
    [[maybe_unused]] uint32_t attended = 0;
    float factor[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (!kFastPath) {
        float unused[1][4];
        finish_scores<T, false, false>(p.score, head_scores, score[m], row + m * 16, col, unused);
      }
      if (masked) {
        if constexpr (kFastPath) {
          mask_scores<false>(p.score, score[m], row + m * 16, col);
        } else {
          mask_scores<false>(p.score, head_scores, score[m], row + m * 16, col);
        }
      }
      if (hides) attended |= attended_columns(score[m]);
      softmax_step<kFastPath>(p.score, score[m], state[m], factor[m]);
      if constexpr (!kFastPath) {
        if (p.score.seeds != nullptr) drop_probabilities(p.score, head_scores, score[m], row + m * 16, col);
      }
      Config::rescale(out[m], factor[m]);
    }

    if (hides) of_warps.tell(attended, warp);
    // V is there; the next K may still be under way.
    if (more) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
    if (hides) clear_unattended<typename Config::Chunks, kKeys / 8, kForwardWarps>(v_tile, of_warps.all());
    Config::add_values(out, score, factor, v_tile, fragment_lane, p);
  }

  if (!any) {  // Q is still under way
    ptx::cp_async_wait<0>();
    __syncthreads();
  }
  store_output<T, kHeadDim, kFastPath>(p, at, q_tile, warp_row, seqlen_q, out, state);
}

}  // namespace attnkern::cuda
