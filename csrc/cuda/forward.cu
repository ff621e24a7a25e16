// The forward pass for 16-bit elements: a block of threads owns a tile of queries of one head, walks over the blocks of
// keys that they reach, and keeps scores and output in registers (FlashAttention-2: Dao, 2023). Products are mma.sync
// m16n8k16; a warp owns whole rows, so that the softmax needs no more than the lanes of a quad.
//
// K and V have one buffer each. While Q K^T runs, V is under way; while the softmax and P V run, the next K is.
#include "cuda/forward.cuh"
#include "cuda/forward_wide.cuh"

namespace attnkern::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;

// Tiles. Two row tiles of 16 per warp halve what a product reads from shared memory: a fragment of K or V then serves
// two mma. The general variant, which the scores keep busy, and wide heads need the registers for something else. All
// classes fit in 99 KiB, the least that a chip of compute capability 8.0 or above gives to one block.
template <int kHeadDim, bool kPlain>
struct ForwardTile {
  static constexpr int kRowTiles = kPlain && kHeadDim <= 128 ? 2 : 1;
  static constexpr int kKeys = !kPlain && kHeadDim >= 192 ? 32 : 64;
  static constexpr int kRows = kWarps * 16 * kRowTiles;
  // Steps of Q K^T whose fragments are loaded side by side: as the registers allow.
  static constexpr int kAtOnce = kHeadDim % 128 == 0 ? (kPlain ? 2 : 4) : kHeadDim % 64 == 32 ? 1 : kHeadDim / 16;
  static constexpr int kQBytes = kRows * kHeadDim * 2, kKeyBytes = kKeys * kHeadDim * 2;
  static constexpr int kSharedBytes = kQBytes + 2 * kKeyBytes;
};

template <typename T, int kHeadDim, bool kPlain>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ ForwardParams p) {
  using Config = ForwardTile<kHeadDim, kPlain>;
  using Chunks = Tile<kHeadDim>;
  constexpr int kRows = Config::kRows, kKeys = Config::kKeys, kRowTiles = Config::kRowTiles;
  constexpr int kDepth = kHeadDim / 16;  // steps of an mma over the head size
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t q_tile = ptx::shared_address(shared);
  const uint32_t k_tile = q_tile + Config::kQBytes, v_tile = k_tile + Config::kKeyBytes;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto [row_block, batch_head, batch, head] = ForwardBlock(p);
  const int first_row = row_block * kRows, warp_row = warp * 16 * kRowTiles;
  const int seqlen_q = p.score.seqlen_q, seqlen_k = p.score.seqlen_k;

  const T* q = head_of<T>(p.q, batch, head);
  const T* k = head_of<T>(p.k, batch, head / p.group_k);
  const T* v = head_of<T>(p.v, batch, head / p.group_v);
  const auto load_keys = [&](uint32_t tile, const Rows& rows, const T* source, int first) {
    load_tile<T, kHeadDim, kKeys, kThreads, kPlain>(tile, rows, source, first, seqlen_k);
    ptx::cp_async_commit();
  };

  const int rows = min(kRows, seqlen_q - first_row);
  const Range all = {0, seqlen_k};
  const Range reached = p.score.band.visited(first_row, rows, all);
  const Range clean = p.score.band.full(first_row, rows, all);
  const int clean_begin = static_cast<int>(clean.begin), clean_end = static_cast<int>(clean.end);
  const Walk walk(reached, kKeys);
  const int begin = walk.begin, end = walk.end;

  load_tile<T, kHeadDim, kRows, kThreads, kPlain>(q_tile, p.q, q, first_row, seqlen_q);
  ptx::cp_async_commit();
  if (begin < end) load_keys(k_tile, p.k, k, begin);

  // What a lane addresses for ldmatrix.x4: matrices 0 and 1 lie below each other, 2 and 3 beside them; for K, whose
  // rows are the operand's columns, the other way round.
  const int below = lane % 16, beside = lane / 16;
  const int key_below = lane / 16 * 8 + lane % 8, key_beside = lane / 8 % 2;
  const int row = first_row + warp_row + lane / 4;  // this thread's rows: row + 8 n

  HeadScore head_scores{};
  if constexpr (!kPlain) head_scores = head_score(p.score, batch, head);
  float out[kRowTiles][kHeadDim / 8][4] = {};
  RowState state[kRowTiles];
  for (int first = begin; first < end; first += kKeys) {
    ptx::cp_async_wait<0>();  // K is there,
    __syncthreads();          // and nobody needs V's last block any more
    load_keys(v_tile, p.v, v, first);

    float score[kRowTiles][kKeys / 8][4] = {};
    // Where registers are short, not all fragments' loads side by side.
#pragma unroll(Config::kAtOnce)
    for (int d = 0; d < kDepth; ++d) {
      uint32_t query[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::ldmatrix(query[m], Chunks::address(q_tile, warp_row + m * 16 + below, 2 * d + beside));
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t key[4];  // keys 0-7 at d and d + 8, keys 8-15 at d and d + 8
        ptx::ldmatrix(key, Chunks::address(k_tile, n * 16 + key_below, 2 * d + key_beside));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(score[m][2 * n], query[m], key[0], key[1]);
          ptx::mma_m16n8k16<T>(score[m][2 * n + 1], query[m], key[2], key[3]);
        }
      }
    }
    __syncthreads();  // K has been read
    const bool more = first + kKeys < end;
    if (more) load_keys(k_tile, p.k, k, first + kKeys);

    const int col = first + lane % 4 * 2;
    const bool masked = first < clean_begin || first + kKeys > clean_end;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (!kPlain) {
        float unused[1][4];
        finish_scores<T, false, false>(p.score, head_scores, score[m], row + m * 16, col, unused);
      }
      if (masked) mask_scores<false>(p.score, score[m], row + m * 16, col);
      float factor[2];
      softmax_step<kPlain>(p.score, score[m], state[m], factor);
      if constexpr (!kPlain) {
        if (p.score.seeds != nullptr) drop_weights(p.score, head_scores, score[m], row + m * 16, col);
      }
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] *= factor[e / 2];
      }
    }

    // V is there; the next K may still be under way.
    if (more) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t probability[kRowTiles][4];  // two neighbouring 16x8 accumulators are, packed, one 16x16 operand
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* two = &score[m][2 * n + i / 2][i % 2 * 2];
          probability[m][i] = ptx::pack<T>(two[0], two[1]);
        }
      }
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        // Never so, which the compiler can't know: across it no value is loaded ahead, where no register is left.
        if (kPlain && kHeadDim == 128 && d % 4 == 0 && seqlen_k < 0) break;
        uint32_t value[4];  // keys 0-7 and 8-15 at d, then at d + 8
        ptx::ldmatrix<true>(value, Chunks::address(v_tile, n * 16 + below, 2 * d + beside));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma_m16n8k16<T>(out[m][2 * d], probability[m], value[0], value[1]);
          ptx::mma_m16n8k16<T>(out[m][2 * d + 1], probability[m], value[2], value[3]);
        }
      }
    }
  }

  // Through Q's tile, so that global memory sees whole lines. After the loop only this warp uses its rows of it.
  if (begin >= end) {
    ptx::cp_async_wait<0>();
    __syncthreads();
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(state[m].sum[half]);
      float inverse = sum > 0.f ? 1.f / sum : 0.f;
      if (!kPlain && p.score.seeds != nullptr) inverse *= p.score.dropout_scale;
      const int tile_row = warp_row + m * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        ptx::store_shared(Chunks::address(q_tile, tile_row, n) + lane % 4 * 4,
                          ptx::pack<T>(out[m][n][2 * half] * inverse, out[m][n][2 * half + 1] * inverse));
      }
      const int i = first_row + tile_row;
      if (p.lse != nullptr && lane % 4 == 0 && i < seqlen_q) {
        p.lse[static_cast<int64_t>(batch_head) * seqlen_q + i] = log_sum_exp<kPlain>(p.score, state[m].max[half], sum);
      }
    }
  }
  __syncwarp();
  T* target = const_cast<T*>(head_of<T>(p.out, batch, head));
  store_tile<T, kHeadDim, 16 * kRowTiles, 32, kPlain>(q_tile, p.out, target, warp_row, first_row + warp_row, seqlen_q,
                                                      lane);
}

}  // namespace

ForwardPlan plan_forward(const Attention& p) {
  ForwardPlan plan{};
  plan.head_class = head_class(p.head_dim, p.head_dim_v);
  // Rows of unequal length are dealt out longest first, over all heads. Of equal length: those of one head side by
  // side, which read the same keys.
  plan.heads_first = p.band.right < kUnbounded;
  if (plan.head_class == 0 && std::max(p.head_dim, p.head_dim_v) <= kWideHead) {
    const WideTile tile = wide_tile(p.dtype);
    plan.head_class = kWideHead;
    plan.rows = tile.rows, plan.keys = tile.keys, plan.threads = tile.threads, plan.shared_bytes = tile.shared_bytes;
  } else if (p.dtype == DType::kFloat32) {
    cut_forward_fp32(plan);
  } else {
    plan.plain = is_plain(p) && rows_of(p.q, p.head_dim).vector && rows_of(p.k, p.head_dim).vector &&
                 rows_of(p.v, p.head_dim_v).vector;
    by_head_class(plan.head_class, [&](auto width) {
      const auto fill = [&](auto tile) {
        plan.rows = tile.kRows, plan.keys = tile.kKeys, plan.shared_bytes = tile.kSharedBytes;
        return 0;
      };
      return plan.plain ? fill(ForwardTile<width, true>{}) : fill(ForwardTile<width, false>{});
    });
    plan.threads = kThreads;
  }
  plan.blocks = plan.rows == 0 ? 0 : ceil_div(p.seqlen_q, plan.rows) * p.batch * p.heads_q;
  return plan;
}

int forward(const Forward& p, void* stream) {
  const ForwardPlan plan = plan_forward(p);
  if (plan.head_class == kWideHead) {
    SplitParams params{forward_params(p, plan)};
    params.pack = params.splits = 1;
    return launch_wide(p.dtype, params, stream);
  }
  if (p.dtype == DType::kFloat32) return forward_fp32(p, plan, stream);
  return by_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    return by_head_class(plan.head_class, [&](auto width) {
      const auto launch = [&](auto kernel) {
        return launch_kernel(kernel, plan.blocks, plan.threads, plan.shared_bytes, forward_params(p, plan), stream);
      };
      return plan.plain ? launch(forward_kernel<T, width, true>) : launch(forward_kernel<T, width, false>);
    });
  });
}

}  // namespace attnkern::cuda
