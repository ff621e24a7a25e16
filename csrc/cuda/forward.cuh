// What the forward kernels share: their parameters, which block of threads does what, and what else they do alike.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/launch.h"
#include "cuda/pages.cuh"
#include "cuda/smem.cuh"
#include "cuda/softmax.cuh"
#include "cuda/visits.cuh"

namespace attnkern::cuda {

struct ForwardParams {
  Rows q, k, v, out;
  float* lse;  // (batch, heads, seqlen_q) contiguous, or null
  Score score;
  int32_t batch, group_k, group_v;  // queries' heads per head of k, of v
  int32_t row_blocks;
  bool exact;        // float32: products in three parts
  bool heads_first;  // neighbouring blocks of the grid are heads, the longest rows first; else rows of one head
};

inline ForwardParams forward_params(const Forward& p, const ForwardPlan& plan) {
  const int bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  ForwardParams params{};
  params.q = rows_of(p.q, p.head_dim, bytes);
  params.k = rows_of(p.k, p.head_dim, bytes);
  params.v = rows_of(p.v, p.head_dim_v, bytes);
  params.out = rows_of(p.out, p.head_dim_v, bytes);
  params.lse = static_cast<float*>(p.lse);
  params.score = score_of(p, plan.fast_path);
  params.batch = static_cast<int32_t>(p.batch);
  params.group_k = static_cast<int32_t>(p.heads_q / p.heads_k);
  params.group_v = static_cast<int32_t>(p.heads_q / p.heads_v);
  params.row_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q, plan.rows));
  params.exact = !p.tf32;
  params.heads_first = plan.heads_first;
  return params;
}

// What this block of threads computes.
struct ForwardBlock {
  int row_block, batch_head, batch, head;

  __device__ __forceinline__ explicit ForwardBlock(const ForwardParams& p) {
    const int heads = p.score.heads, batch_heads = p.batch * heads;
    const int block = blockIdx.x;
    row_block = p.heads_first ? p.row_blocks - 1 - block / batch_heads : block % p.row_blocks;
    batch_head = p.heads_first ? block % batch_heads : block / p.row_blocks;
    batch = batch_head / heads, head = batch_head % heads;
  }
};

// Probabilities that dropout drops become 0. Rows and columns as in score.cuh; the first column is a multiple of 16.
template <int kTiles>
__device__ __forceinline__ void drop_probabilities(const Score& p, const HeadScore& h, float (&s)[kTiles][4], int row,
                                                   int col) {
  static_assert(kTiles % 4 == 0 || kTiles == 2);
  const int skipped = kTiles % 4 == 0 ? 0 : col % 32 / 8;  // tiles of the 32 columns that one word is about
#pragma unroll
  for (int n = 0; n < kTiles; n += 4) {
    const uint32_t keep = dropout_keep(p, h, row, col + (n - skipped) * 8) >> skipped * 4;
#pragma unroll
    for (int e = 0; e < 4 * (kTiles < 4 ? kTiles : 4); ++e) {
      if ((keep >> e & 1) == 0) s[n + e / 4][e % 4] = 0.f;
    }
  }
}

// For float32 (forward_fp32.cu).
int forward_fp32(const Forward& p, const ForwardPlan& plan, void* stream);

}  // namespace attnkern::cuda
