// The forward pass for float32 and head sizes up to 256: forward.cu's order of things, with products of tf32.cuh. One
// variant does everything: three mma of 8 steps where 16-bit elements take half a one leave the scores' branches no
// weight, and whether factors may be rounded to tf32 is a branch around whole products.
#include "cuda/forward.cuh"
#include "cuda/tf32.cuh"

namespace attnkern::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;

// Tiles. Two row tiles of 16 per warp, where the registers are there, halve what a product reads from shared memory,
// and what splitting a fragment of K or V costs. Within 99 KiB, as all classes.
template <int kHeadDim>
struct Tile32 {
  static constexpr int kRowTiles = kHeadDim <= 64 ? 2 : 1;
  static constexpr int kKeys = kRowTiles == 2 || kHeadDim > 192 ? 16 : 32;
  static constexpr int kRows = kWarps * 16 * kRowTiles;
  static constexpr int kQBytes = kRows * kHeadDim * 4, kKeyBytes = kKeys * kHeadDim * 4;
  static constexpr int kSharedBytes = kQBytes + 2 * kKeyBytes;
};

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2) forward_fp32_kernel(const __grid_constant__ ForwardParams p) {
  using Config = Tile32<kHeadDim>;
  using Chunks = TileOf<float, kHeadDim>;
  constexpr int kRows = Config::kRows, kKeys = Config::kKeys, kRowTiles = Config::kRowTiles;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t q_tile = ptx::shared_address(shared);
  const uint32_t k_tile = q_tile + Config::kQBytes, v_tile = k_tile + Config::kKeyBytes;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const ForwardBlock at(p);
  const int first_row = at.row_block * kRows, warp_row = warp * 16 * kRowTiles;
  const int seqlen_q = p.score.seqlen_q, seqlen_k = p.score.seqlen_k;
  const float* q = head_of<float>(p.q, at.batch, at.head);
  const float* k = head_of<float>(p.k, at.batch, at.head / p.group_k);
  const float* v = head_of<float>(p.v, at.batch, at.head / p.group_v);
  const auto load_keys = [&](uint32_t tile, const Rows& rows, const float* source, int first) {
    load_tile<float, kHeadDim, kKeys, kThreads, false>(tile, rows, source, first, seqlen_k);
    ptx::cp_async_commit();
  };

  const int rows = min(kRows, seqlen_q - first_row);
  const Range all = {0, seqlen_k};
  const Range reached = p.score.band.visited(first_row, rows, all);
  const Range clean = p.score.band.full(first_row, rows, all);
  const int clean_begin = static_cast<int>(clean.begin), clean_end = static_cast<int>(clean.end);
  const Walk walk(reached, kKeys);
  const int begin = walk.begin, end = walk.end;

  load_tile<float, kHeadDim, kRows, kThreads, false>(q_tile, p.q, q, first_row, seqlen_q);
  ptx::cp_async_commit();
  if (begin < end) load_keys(k_tile, p.k, k, begin);

  const int row = first_row + warp_row + lane / 4;  // this thread's rows: row + 8 n
  const HeadScore head_scores = head_score(p.score, at.batch, at.head);
  float out[kRowTiles][kHeadDim / 8][4] = {};
  RowState state[kRowTiles];
  for (int first = begin; first < end; first += kKeys) {
    ptx::cp_async_wait<0>();  // K is there,
    __syncthreads();          // and nobody needs V's last block any more
    load_keys(v_tile, p.v, v, first);

    float score[kRowTiles][kKeys / 8][4] = {};
    if (p.exact) {
      rows_by_rows_tf32<true, Chunks, Chunks, kHeadDim / 8>(score, q_tile, warp_row, 0, k_tile, 0, 0);
    } else {
      rows_by_rows_tf32<false, Chunks, Chunks, kHeadDim / 8>(score, q_tile, warp_row, 0, k_tile, 0, 0);
    }
    __syncthreads();  // K has been read
    const bool more = first + kKeys < end;
    if (more) load_keys(k_tile, p.k, k, first + kKeys);

    const int col = first + lane % 4 * 2;
    const bool masked = first < clean_begin || first + kKeys > clean_end;
    float factor[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float unused[1][4];
      finish_scores<float, false, false>(p.score, head_scores, score[m], row + m * 16, col, unused);
      if (masked) mask_scores<false>(p.score, score[m], row + m * 16, col);
      softmax_step<false>(p.score, score[m], state[m], factor[m]);
      if (p.score.seeds != nullptr) drop_weights(p.score, head_scores, score[m], row + m * 16, col);
    }

    // V is there; the next K may still be under way.
    if (more) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
    // A branch for every 32 columns: across it the compiler doesn't load ahead, for which it would spill.
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 4) {
      if (p.exact) {
        scores_by_columns_tf32<true, Chunks>(out, d, factor, score, v_tile, 0, 2 * d);
      } else {
        scores_by_columns_tf32<false, Chunks>(out, d, factor, score, v_tile, 0, 2 * d);
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
      if (p.score.seeds != nullptr) inverse *= p.score.dropout_scale;
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; d += 4) {
        store_columns_tf32<Chunks>(q_tile, warp_row + m * 16, 2 * d, out[m], d, half, inverse);
      }
      const int i = row + m * 16 + half * 8;
      if (p.lse != nullptr && lane % 4 == 0 && i < seqlen_q) {
        p.lse[static_cast<int64_t>(at.batch_head) * seqlen_q + i] = exact_log_sum_exp(state[m].max[half], sum);
      }
    }
  }
  __syncwarp();
  float* target = const_cast<float*>(head_of<float>(p.out, at.batch, at.head));
  store_tile<float, kHeadDim, 16 * kRowTiles, 32, false>(q_tile, p.out, target, warp_row, first_row + warp_row,
                                                         seqlen_q, lane);
}

}  // namespace

void cut_forward_fp32(ForwardPlan& plan) {
  by_head_class(plan.head_class, [&](auto width) {
    using Config = Tile32<width>;
    plan.rows = Config::kRows, plan.keys = Config::kKeys, plan.shared_bytes = Config::kSharedBytes;
    return 0;
  });
  plan.threads = kThreads;
}

int forward_fp32(const Forward& p, const ForwardPlan& plan, void* stream) {
  return by_head_class(plan.head_class, [&](auto width) {
    return launch_kernel(forward_fp32_kernel<width>, plan.blocks, plan.threads, plan.shared_bytes,
                         forward_params(p, plan), stream);
  });
}

}  // namespace attnkern::cuda
