// The backward pass on Hopper (sm_90a): the two deterministic kernels of backward_tile.cuh, dK and dV by blocks of keys
// and dQ by blocks of queries, with TMA, wgmma and warp specialisation. Same definitions, same walk over the band. And
// one for all three gradients, whose blocks add to dQ in global memory in whatever order they come.
//
//   dK, dV:  S^T = K Q^T   dP^T = V dO^T   dV += P^T dO   dK += dS^T Q
//   dQ:      S   = Q K^T   dP   = dO V^T                  dQ += dS K
//
// `rows` (64 for each of two consumer warpgroups) stay in shared memory, tiles of `columns` pass by in a ring that the
// producer warpgroup fills: first the tile that makes S, then the one that makes dP. Scores come out of wgmma as the
// left operand of the gradients' products wants them, so P and dS never leave the registers. (Swapped products: Shah et
// al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024.)
//
// A step of a consumer; what is in flight runs beside the arithmetic at the same height:
//
//   dK, dV   S    wait S; exponentials, P  | dP        dQ   S    wait S; exponentials | dP
//            dV   wait dP; dS              | dV             wait dP; dS
//            dK   wait dV, dK                               dQ   wait dQ
#include "cuda/launch.cuh"
#include "cuda/launch.h"
#include "cuda/left_out.h"
#include "cuda/score.cuh"
#include "cuda/smem.cuh"
#include "cuda/smem_sm90.cuh"
#include "cuda/tensor_map.h"

namespace attnkern::cuda {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kGroupRows = 64;  // of a warpgroup
constexpr uint32_t kMostShared = 227 * 1024;

struct Source {
  ptx::TensorMap map;
  int32_t head_step, batch_step;  // 0 if all of them share one
};

struct BackwardSm90Args {
  Source rows[2];           // K and V, or Q and dO
  Source cols[2];           // Q and dO, or K and V
  ptx::TensorMap grads[2];  // dK and dV, or dQ
  float* dq_sums;           // of the fused kernel, see sum_of
  Score score;              // scale: times log2(e) without a softcap, over the softcap with one
  const float* lse;         // (batch, heads, seqlen_q), contiguous, natural logarithm
  const float* delta;       // the same
  float softmax_scale;
  int32_t batch, heads;  // of the rows
  int32_t group;         // query heads per head of k and v
  int32_t section;       // (batch, head) pairs whose blocks are neighbours, so that L2 holds what they read
  bool wanted[2];        // of grads
};

struct RoundArgs {
  Rows dq;
  const float* dq_sums;
  float softmax_scale;
  int32_t heads, seqlen_q;
};

// dQ before it is scaled and rounded, in float32: for every 64 queries of every head, two halves of the columns of 128,
// each as the 128 threads of a warpgroup hold a 64x64 accumulator: [eight columns][thread][four numbers].
constexpr int kSumRows = 64, kSumColumns = 64, kSumTiles = kSumColumns / 8, kHalves = 2;
constexpr uint32_t kSumBytes = kSumRows * kSumColumns * 4;

template <typename T_, int kHeadDim_, int kCols_, int kSlots_, bool kKeyRows_, bool kSoftcap_>
struct Shape {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kCols = kCols_, kSlots = kSlots_;
  static constexpr bool kKeyRows = kKeyRows_, kSoftcap = kSoftcap_;
  // Sums of dK and dV for 64 keys don't fit into one warpgroup's registers above a head size of 128: there the two
  // have the same rows, and one each.
  static constexpr bool kSplit = kKeyRows && kHeadDim > 128;
  static constexpr bool kFused = false;
  static constexpr int kRowTiles = kSplit ? 1 : kConsumers, kRows = kRowTiles * kGroupRows;
  using RowTile = SlabTile<T, kGroupRows, kHeadDim>;
  using ColTile = SlabTile<T, kCols, kHeadDim>;
  // Shared memory: rows, as [of rows[0] or rows[1]][row tile]; the ring of columns; what the first warpgroup hands to
  // the second; lse or delta of each slot's columns, if those are queries; barriers.
  static constexpr uint32_t kRing = 2 * kRowTiles * RowTile::kBytes;
  static constexpr uint32_t kHanded = kRing + kSlots * ColTile::kBytes;
  static constexpr uint32_t kConstants = kHanded + (kSplit ? kGroupRows * kCols * 4 : 0);
  static constexpr uint32_t kBarriers = kConstants + (kKeyRows ? kSlots * kCols * 4 : 0);
  static constexpr uint32_t kBytes = kBarriers + (2 + 2 * kSlots + (kSplit ? 2 : 0)) * 8;
};

// All three gradients in one walk. Behind what dK and dV take: dS of all keys for the queries of a step, twice; what
// each warpgroup has for half of the columns of dQ.
template <typename T_>
struct FusedShape : Shape<T_, 128, 64, 4, true, false> {
  using Base = Shape<T_, 128, 64, 4, true, false>;
  static constexpr bool kFused = true;
  using ScoreTile = SlabTile<T_, Base::kRows, Base::kCols>;
  static constexpr uint32_t kScores = (Base::kBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kSums = kScores + 2 * ScoreTile::kBytes;
  static constexpr uint32_t kBytes = kSums + kSumBytes * kConsumers;
};

template <class S>
struct Shared {
  uint32_t base;
  __device__ __forceinline__ uint32_t rows(int which, int tile) const {
    return base + (which * S::kRowTiles + tile) * S::RowTile::kBytes;
  }
  __device__ __forceinline__ uint32_t cols(int slot) const { return base + S::kRing + slot * S::ColTile::kBytes; }
  __device__ __forceinline__ uint32_t handed(int n) const {
    return base + S::kHanded + (n * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  }
  __device__ __forceinline__ uint32_t constants(int slot) const { return base + S::kConstants + slot * (S::kCols * 4); }
  __device__ __forceinline__ uint32_t barrier(int n) const { return base + S::kBarriers + 8 * n; }
  __device__ __forceinline__ uint32_t rows_full(int which) const { return barrier(which); }
  __device__ __forceinline__ uint32_t full(int slot) const { return barrier(2 + slot); }
  __device__ __forceinline__ uint32_t empty(int slot) const { return barrier(2 + S::kSlots + slot); }
  __device__ __forceinline__ uint32_t handed_full() const { return barrier(2 + 2 * S::kSlots); }
  __device__ __forceinline__ uint32_t handed_empty() const { return barrier(3 + 2 * S::kSlots); }
};

__device__ __forceinline__ float* sum_of(const BackwardSm90Args& p, int batch, int head, int rows, int half) {
  const int64_t blocks = (p.score.seqlen_q + kSumRows - 1) / kSumRows;
  const int64_t number = (static_cast<int64_t>(batch) * p.score.heads + head) * blocks + rows;
  return p.dq_sums + (number * kHalves + half) * (kSumBytes / 4);
}
__device__ __forceinline__ int sum_index(int n) { return n * kWarpgroup + threadIdx.x % kWarpgroup; }
__device__ __forceinline__ uint4 as_words(const float (&x)[4]) {
  return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

// What a block computes: its rows, and the columns that they reach.
template <class S>
struct Block {
  int batch, head;  // of the rows
  int first_row;
  int begin, end;              // columns of every head, in whole tiles from `begin`
  int clean_begin, clean_end;  // those that all rows reach
  int heads;                   // of columns, one after the other
  int steps;

  __device__ __forceinline__ explicit Block(const BackwardSm90Args& p) {
    const int seqlen_rows = S::kKeyRows ? p.score.seqlen_k : p.score.seqlen_q;
    const int seqlen_cols = S::kKeyRows ? p.score.seqlen_q : p.score.seqlen_k;
    const int blocks = (seqlen_rows + S::kRows - 1) / S::kRows;
    const int first = static_cast<int>(blockIdx.x) / (p.section * blocks) * p.section;
    const int neighbours = min(p.section, p.batch * p.heads - first);
    const int number = static_cast<int>(blockIdx.x) - first * blocks;
    const int pair = first + number % neighbours;
    batch = pair / p.heads, head = pair % p.heads;
    // Longest first: with a causal band the first keys are reached by the most queries, and the last queries reach the
    // most keys.
    const int block = number / neighbours;
    first_row = (S::kKeyRows ? block : blocks - 1 - block) * S::kRows;
    const Band band = S::kKeyRows ? p.score.band.transposed() : p.score.band;
    const int64_t count = min(S::kRows, seqlen_rows - first_row);
    const Range reached = band.reached(first_row, count, {0, seqlen_cols});
    const Range shared_by_all = band.shared(first_row, count, {0, seqlen_cols});
    clean_begin = static_cast<int>(shared_by_all.begin), clean_end = static_cast<int>(shared_by_all.end);
    // Keys past the end are rows of zeros: their scores are 0, so where the scores of all others are low their weights
    // overflow. That is nothing to gradients of their own, which are never stored, but dQ is summed over all rows.
    if (S::kFused && count < S::kRows) clean_end = clean_begin;
    const Walk walk(reached, S::kCols);
    begin = walk.begin, end = walk.end;
    heads = S::kKeyRows ? p.group : 1;
    steps = walk.blocks(S::kCols) * heads;
  }
};

// One thread: all tiles into shared memory, in the order of use.
template <class S>
__device__ __forceinline__ void load_tiles(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared) {
  const auto load_rows = [&](int which) {
    const Source& source = p.rows[which];
    ptx::mbarrier_arrive_expect_tx(shared.rows_full(which), S::kRowTiles * S::RowTile::kBytes);
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      S::RowTile::load(shared.rows(which, n), source.map, shared.rows_full(which), block.first_row + n * kGroupRows,
                       block.head * source.head_step, block.batch * source.batch_step);
    }
  };
  Ring<S::kSlots> at;
  const auto load_cols = [&](int which, int head, int col) {
    const Source& source = p.cols[which];
    ptx::mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);  // at once in the first round
    ptx::mbarrier_arrive_expect_tx(shared.full(at.stage), S::ColTile::kBytes);
    S::ColTile::load(shared.cols(at.stage), source.map, shared.full(at.stage), col, head * source.head_step,
                     block.batch * source.batch_step);
    at.advance();
  };
  int head = S::kKeyRows ? block.head * p.group : block.head / p.group, col = block.begin;
  load_rows(0);
  for (int step = 0; step < block.steps; ++step) {
    load_cols(0, head, col);
    if (step == 0) load_rows(1);
    load_cols(1, head, col);
    col += S::kCols;
    if (col >= block.end) col = block.begin, ++head;
  }
}

// -lse * log2(e), the exponent's constant: -inf makes all weights of a query 0. So for one without keys, whose lse of
// -inf would make them infinite, and for one past the end.
__device__ __forceinline__ float exponent_constant(float lse, bool live) {
  return live && lse != -kInfinity ? -lse * kLog2E : -kInfinity;
}

// One warp: the constants of the queries that pass by, of every second slot from `which` on.
template <class S>
__device__ __forceinline__ void load_constants(const BackwardSm90Args& p, const Block<S>& block,
                                               const Shared<S>& shared, int which) {
  constexpr int kEach = (S::kCols + 31) / 32;
  const int lane = threadIdx.x % 32;
  const float* source = which == 0 ? p.lse : p.delta;
  int64_t row = (static_cast<int64_t>(block.batch) * p.heads + block.head) * p.group * p.score.seqlen_q;
  int col = block.begin;
  float next[kEach];
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int query = col + i * 32 + lane;
      const bool live = query < p.score.seqlen_q;
      const float x = live ? source[row + query] : 0.f;
      next[i] = which == 0 ? exponent_constant(x, live) : x;
    }
    col += S::kCols;
    if (col >= block.end) col = block.begin, row += p.score.seqlen_q;
  };
  Ring<S::kSlots> at;
  if (which == 1) at.advance();
  load();
#pragma unroll 1
  for (int step = 0; step < block.steps; ++step) {
    ptx::mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i * 32 + lane >= S::kCols) break;
      ptx::store_shared(shared.constants(at.stage) + (i * 32 + lane) * 4, __float_as_uint(next[i]));
    }
    ptx::mbarrier_arrive(shared.full(at.stage));
    if (step + 1 < block.steps) load();
    at.advance(), at.advance();
  }
}

// out = a b^T: 64 rows of tile a, kCols rows of tile b, 16 of the head dimension at a time.
template <class S>
__device__ __forceinline__ void scores(float (&out)[S::kCols / 8][4], uint32_t a, uint32_t b) {
  ptx::hold(out);
  ptx::wgmma_fence();
#pragma unroll
  for (int d = 0; d < S::kHeadDim / 16; ++d) {
    ptx::wgmma_ss<typename S::T, S::kCols, false>(out, S::RowTile::by_columns(a, d), S::ColTile::by_columns(b, d),
                                                  d > 0);
  }
  ptx::wgmma_commit();
}

// out += a b: a from registers, b the tile as it lies, rows of columns, which makes it N-major.
template <class S>
__device__ __forceinline__ void add_gradients(float (&out)[S::kHeadDim / 8][4], uint32_t (&a)[S::kCols / 16][4],
                                              uint32_t b) {
  ptx::hold(out);
  ptx::hold(a);
  ptx::wgmma_fence();
#pragma unroll
  for (int n = 0; n < S::kCols / 16; ++n) {
    ptx::wgmma_rs<typename S::T, S::kHeadDim, true>(out, a[n], S::ColTile::by_rows(b, n), true);
  }
  ptx::wgmma_commit();
}

// Two neighbouring blocks of eight columns are, packed, one left operand of 16.
template <typename T, int kTiles>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[kTiles / 2][4], const float (&x)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    a[n / 2][n % 2 * 2] = ptx::pack<T>(x[n][0], x[n][1]);
    a[n / 2][n % 2 * 2 + 1] = ptx::pack<T>(x[n][2], x[n][3]);
  }
}

// The weight of the raw product s, which becomes what dP - delta is to be multiplied by. `constant`: of the query.
template <bool kSoftcap>
__device__ __forceinline__ float weight_of(const Score& p, float& s, float constant) {
  if constexpr (kSoftcap) {
    // Of a masked score neither: -inf times a scale of 0 is NaN.
    const float t = tanh_of(s == -kInfinity ? 0.f : s * p.scale);
    const float w = s == -kInfinity ? 0.f : ptx::ex2(fmaf(t, p.softcap * kLog2E, constant));
    s = w * (1.f - t * t);
    return w;
  } else {
    return s = ptx::ex2(fmaf(s, p.scale, constant));
  }
}

// A warpgroup's rows from `row` on, through the tile that it has no more use for: after the barrier, when all four
// warps have waited for the wgmmas that read it.
template <class S>
__device__ __forceinline__ void store_gradient(const ptx::TensorMap& map, const Block<S>& block, int row, int barrier,
                                               uint32_t tile, const float (&grad)[S::kHeadDim / 8][4], float factor) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  ptx::barrier_sync(barrier, kWarpgroup);
#pragma unroll
  for (int c = 0; c < S::kHeadDim / 16; ++c) {
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* pair = &grad[2 * c + e / 2][e % 2 * 2];
      words[e] = ptx::pack<typename S::T>(pair[0] * factor, pair[1] * factor);
    }
    ptx::stmatrix(S::RowTile::address(tile, warp * 16 + lane % 16, 2 * c + lane / 16), words);
  }
  // The copy also reads columns past the tensor's, which it writes nowhere. Nothing has loaded them where the block has
  // no step.
  constexpr int kColumns = S::RowTile::kSlabs * S::RowTile::kSlabColumns;
  if (S::kHeadDim < kColumns && block.steps == 0) {
    const uint32_t zeros[4] = {};
#pragma unroll
    for (int c = S::kHeadDim / 16; c < kColumns / 16; ++c)
      ptx::stmatrix(S::RowTile::address(tile, warp * 16 + lane % 16, 2 * c + lane / 16), zeros);
  }
  ptx::fence_proxy_async();
  ptx::barrier_sync(barrier, kWarpgroup);
  if (warp == 0 && ptx::elect_one()) {
    S::RowTile::store(map, tile, row, block.head, block.batch);
    ptx::bulk_commit();
  }
}

// Once per warp, when all its lanes are done.
__device__ __forceinline__ void arrive(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// The two slots of a step. Together: the producer fills them in their order, so that the second is of no use before the
// first, which is needed to the end.
template <class S>
__device__ __forceinline__ void release(const Shared<S>& shared, int first, int second) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  ptx::mbarrier_arrive(shared.empty(first));
  ptx::mbarrier_arrive(shared.empty(second));
}

// Rows are keys from here on. What a slot holds for this thread's two queries of the n-th eight.
template <class S>
__device__ __forceinline__ float2 constants(const Shared<S>& shared, int slot, int n) {
  return ptx::load_shared_pair(shared.constants(slot) + (n * 8 + threadIdx.x % 4 * 2) * 4);
}

// Products s, masked -> weights as dV wants them; what dP - delta is to be multiplied by stays in s.
template <class S>
__device__ __forceinline__ void to_weights(const Score& p, const Shared<S>& shared, int slot,
                                           float (&s)[S::kCols / 8][4], uint32_t (&weights)[S::kCols / 16][4]) {
#pragma unroll
  for (int n = 0; n < S::kCols / 8; ++n) {
    const float2 constant = constants(shared, slot, n);
    float w[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) w[e] = weight_of<S::kSoftcap>(p, s[n][e], e % 2 ? constant.y : constant.x);
    weights[n / 2][n % 2 * 2] = ptx::pack<typename S::T>(w[0], w[1]);
    weights[n / 2][n % 2 * 2 + 1] = ptx::pack<typename S::T>(w[2], w[3]);
  }
}

// dS as dK wants it.
template <class S>
__device__ __forceinline__ void to_gradients(const Shared<S>& shared, int slot, const float (&factor)[S::kCols / 8][4],
                                             float (&dp)[S::kCols / 8][4], uint32_t (&gradients)[S::kCols / 16][4]) {
#pragma unroll
  for (int n = 0; n < S::kCols / 8; ++n) {
    const float2 delta = constants(shared, slot, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[n][e] = factor[n][e] * (dp[n][e] - (e % 2 ? delta.y : delta.x));
  }
  pack_operand<typename S::T>(gradients, dp);
}

template <class S>
__device__ __forceinline__ bool is_clean(const Block<S>& block, int col) {
  return block.clean_begin <= col && col + S::kCols <= block.clean_end;
}

// What the fused kernel does for dQ: the two warpgroups exchange dS, of which each multiplies all keys by half of the
// columns of K, and adds what comes of it to the sums in global memory. Named barriers: one of all consumers, and one
// for each warpgroup.
constexpr int kExchanged = 1 + kConsumers;
__device__ __forceinline__ int own_barrier(int consumer) { return 1 + consumer; }

template <class S>
__device__ __forceinline__ uint32_t score_tile(const Shared<S>& shared, int step) {
  return shared.base + S::kScores + step % 2 * S::ScoreTile::kBytes;
}

// The tile's last readers, the products for dQ two steps ago, were over before the exchange of the step before.
template <class S>
__device__ __forceinline__ void hand_out_scores(const Shared<S>& shared, int step, int consumer,
                                                const uint32_t (&gradients)[S::kCols / 16][4]) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row = consumer * kGroupRows + warp * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < S::kCols / 16; ++n) {
    ptx::stmatrix(S::ScoreTile::address(score_tile<S>(shared, step), row, 2 * n + lane / 16), gradients[n]);
  }
  ptx::fence_proxy_async();
}

template <class S>
__device__ __forceinline__ void start_dq(const Shared<S>& shared, int step, int consumer, float (&dq)[kSumTiles][4]) {
  ptx::barrier_sync(kExchanged, kConsumers * kWarpgroup);
  ptx::hold(dq);
  ptx::wgmma_fence();
#pragma unroll
  for (int n = 0; n < S::kRows / 16; ++n) {
    const uint32_t k_rows = shared.rows(0, n / (kGroupRows / 16));
    ptx::wgmma_ss<typename S::T, kSumColumns, true, true>(dq, S::ScoreTile::by_rows(score_tile<S>(shared, step), n),
                                                          S::RowTile::by_rows(k_rows, n % (kGroupRows / 16), consumer),
                                                          n > 0);
  }
  ptx::wgmma_commit();
  if (threadIdx.x / 32 % 4 == 0) ptx::bulk_wait_read<0>();  // one of its lanes started the last addition
}

template <class S>
__device__ __forceinline__ void add_dq(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared,
                                       int head, int col, int consumer, const float (&dq)[kSumTiles][4]) {
  const uint32_t sums = shared.base + S::kSums + consumer * kSumBytes;
  ptx::barrier_sync(own_barrier(consumer), kWarpgroup);
#pragma unroll
  for (int n = 0; n < kSumTiles; ++n) {
    ptx::store_shared(sums + sum_index(n) * 16, as_words(dq[n]));
  }
  ptx::fence_proxy_async();
  ptx::barrier_sync(own_barrier(consumer), kWarpgroup);
  if (threadIdx.x / 32 % 4 == 0 && ptx::elect_one()) {
    ptx::bulk_reduce_add(sum_of(p, block.batch, head, col / S::kCols, consumer), sums, kSumBytes);
    ptx::bulk_commit();
  }
}

template <class S>
__device__ __forceinline__ void consume_dkdv(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared,
                                             int consumer) {
  constexpr int kTiles = S::kCols / 8;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row = block.first_row + consumer * kGroupRows, thread_row = row + warp * 16 + lane / 4;
  const uint32_t k_tile = shared.rows(0, consumer), v_tile = shared.rows(1, consumer);

  float dk[S::kHeadDim / 8][4] = {}, dv[S::kHeadDim / 8][4] = {};
  if (block.steps > 0) {
    ptx::mbarrier_wait(shared.rows_full(0), 0);
    ptx::mbarrier_wait(shared.rows_full(1), 0);
  }
  Ring<S::kSlots> at;
  int col = block.begin;
  [[maybe_unused]] int head = block.head * p.group;  // of queries
#pragma unroll 1
  for (int step = 0; step < block.steps; ++step) {
    const auto q = at;
    at.advance();
    const auto grad_out = at;
    at.advance();
    float s[kTiles][4], dp[kTiles][4];
    ptx::mbarrier_wait(shared.full(q.stage), q.parity);
    scores<S>(s, k_tile, shared.cols(q.stage));
    ptx::mbarrier_wait(shared.full(grad_out.stage), grad_out.parity);
    scores<S>(dp, v_tile, shared.cols(grad_out.stage));
    ptx::wgmma_wait<1>();
    ptx::hold(s);

    if (!is_clean(block, col)) mask_scores<true>(p.score, s, thread_row, col + lane % 4 * 2);
    uint32_t weights[S::kCols / 16][4], gradients[S::kCols / 16][4];
    to_weights<S>(p.score, shared, q.stage, s, weights);
    add_gradients<S>(dv, weights, shared.cols(grad_out.stage));
    ptx::wgmma_wait<1>();
    ptx::hold(dp);
    to_gradients<S>(shared, grad_out.stage, s, dp, gradients);
    if constexpr (S::kFused) hand_out_scores<S>(shared, step, consumer, gradients);
    add_gradients<S>(dk, gradients, shared.cols(q.stage));
    [[maybe_unused]] float dq[kSumTiles][4];
    if constexpr (S::kFused) start_dq<S>(shared, step, consumer, dq);
    ptx::wgmma_wait<0>();
    ptx::hold(dv);
    ptx::hold(weights);
    ptx::hold(dk);
    ptx::hold(gradients);
    if constexpr (S::kFused) ptx::hold(dq);
    release(shared, q.stage, grad_out.stage);
    if constexpr (S::kFused) add_dq<S>(p, block, shared, head, col, consumer, dq);
    col += S::kCols;
    if (col >= block.end) col = block.begin, ++head;
  }
  if constexpr (S::kFused) ptx::barrier_sync(kExchanged, kConsumers * kWarpgroup);  // both have read all of K for dQ
  if (p.wanted[0]) store_gradient<S>(p.grads[0], block, row, own_barrier(consumer), k_tile, dk, p.softmax_scale);
  if (p.wanted[1]) store_gradient<S>(p.grads[1], block, row, own_barrier(consumer), v_tile, dv, 1.f);
}

// The first warpgroup of two that share their rows: P and dV. Between its own products nothing is under way but the
// other's.
template <class S>
__device__ __forceinline__ void consume_dv(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared) {
  constexpr int kTiles = S::kCols / 8;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int thread_row = block.first_row + warp * 16 + lane / 4;
  const uint32_t k_tile = shared.rows(0, 0);
  float dv[S::kHeadDim / 8][4] = {};
  if (block.steps > 0) ptx::mbarrier_wait(shared.rows_full(0), 0);
  Ring<S::kSlots> at;
  int col = block.begin;
#pragma unroll 1
  for (int step = 0; step < block.steps; ++step) {
    const auto q = at;
    at.advance();
    const auto grad_out = at;
    at.advance();
    float s[kTiles][4];
    ptx::mbarrier_wait(shared.full(q.stage), q.parity);
    scores<S>(s, k_tile, shared.cols(q.stage));
    ptx::wgmma_wait<0>();
    ptx::hold(s);
    if (!is_clean(block, col)) mask_scores<true>(p.score, s, thread_row, col + lane % 4 * 2);
    uint32_t weights[S::kCols / 16][4];
    to_weights<S>(p.score, shared, q.stage, s, weights);
    ptx::mbarrier_wait(shared.full(grad_out.stage), grad_out.parity);
    add_gradients<S>(dv, weights, shared.cols(grad_out.stage));
    ptx::mbarrier_wait(shared.handed_empty(), step & 1 ^ 1);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      ptx::store_shared(shared.handed(n), as_words(s[n]));
    }
    arrive(shared.handed_full());
    ptx::wgmma_wait<0>();
    ptx::hold(dv);
    ptx::hold(weights);
    release(shared, q.stage, grad_out.stage);
    col += S::kCols;
    if (col >= block.end) col = block.begin;
  }
  if (p.wanted[1]) store_gradient<S>(p.grads[1], block, block.first_row, 1, k_tile, dv, 1.f);
}

// The second one: dS and dK.
template <class S>
__device__ __forceinline__ void consume_dk(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared) {
  constexpr int kTiles = S::kCols / 8;
  const uint32_t v_tile = shared.rows(1, 0);
  float dk[S::kHeadDim / 8][4] = {};
  if (block.steps > 0) ptx::mbarrier_wait(shared.rows_full(1), 0);
  Ring<S::kSlots> at;
#pragma unroll 1
  for (int step = 0; step < block.steps; ++step) {
    const auto q = at;
    at.advance();
    const auto grad_out = at;
    at.advance();
    float dp[kTiles][4], factor[kTiles][4];
    ptx::mbarrier_wait(shared.full(grad_out.stage), grad_out.parity);
    scores<S>(dp, v_tile, shared.cols(grad_out.stage));
    ptx::mbarrier_wait(shared.handed_full(), step & 1);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint4 words = ptx::load_shared(shared.handed(n));
      factor[n][0] = __uint_as_float(words.x), factor[n][1] = __uint_as_float(words.y);
      factor[n][2] = __uint_as_float(words.z), factor[n][3] = __uint_as_float(words.w);
    }
    arrive(shared.handed_empty());
    ptx::wgmma_wait<0>();
    ptx::hold(dp);
    uint32_t gradients[S::kCols / 16][4];
    to_gradients<S>(shared, grad_out.stage, factor, dp, gradients);
    ptx::mbarrier_wait(shared.full(q.stage), q.parity);
    add_gradients<S>(dk, gradients, shared.cols(q.stage));
    ptx::wgmma_wait<0>();
    ptx::hold(dk);
    ptx::hold(gradients);
    release(shared, q.stage, grad_out.stage);
  }
  if (p.wanted[0]) store_gradient<S>(p.grads[0], block, block.first_row, 2, v_tile, dk, p.softmax_scale);
}

template <class S>
__device__ __forceinline__ void consume_dq(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared,
                                           int consumer) {
  using T = typename S::T;
  constexpr int kTiles = S::kCols / 8;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row = block.first_row + consumer * kGroupRows, thread_row = row + warp * 16 + lane / 4;
  const uint32_t q_tile = shared.rows(0, consumer), grad_out_tile = shared.rows(1, consumer);
  float constant[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = thread_row + half * 8;
    const bool live = query < p.score.seqlen_q;
    const int64_t at = (static_cast<int64_t>(block.batch) * p.heads + block.head) * p.score.seqlen_q + query;
    constant[half] = exponent_constant(live ? p.lse[at] : 0.f, live);
    delta[half] = live ? p.delta[at] : 0.f;
  }

  float dq[S::kHeadDim / 8][4] = {};
  if (block.steps > 0) {
    ptx::mbarrier_wait(shared.rows_full(0), 0);
    ptx::mbarrier_wait(shared.rows_full(1), 0);
    ptx::mbarrier_wait(shared.full(0), 0);
  }
  Ring<S::kSlots> at;
  int col = block.begin;
#pragma unroll 1
  for (int step = 0; step < block.steps; ++step) {
    const auto k = at;
    at.advance();
    const auto v = at;
    at.advance();
    float s[kTiles][4], dp[kTiles][4];
    scores<S>(s, q_tile, shared.cols(k.stage));
    ptx::mbarrier_wait(shared.full(v.stage), v.parity);
    scores<S>(dp, grad_out_tile, shared.cols(v.stage));
    ptx::wgmma_wait<1>();
    ptx::hold(s);

    if (!is_clean(block, col)) mask_scores<false>(p.score, s, thread_row, col + lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) weight_of<S::kSoftcap>(p.score, s[n][e], constant[e / 2]);
    }
    ptx::hold(s);
    // The next step's tile is waited for here: ptxas would move the exponentials behind the wait for dP, where nothing
    // runs beside them, but not across this loop.
    if (step + 1 < block.steps) ptx::mbarrier_wait(shared.full(at.stage), at.parity);
    ptx::wgmma_wait<0>();
    ptx::hold(dp);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[n][e] = s[n][e] * (dp[n][e] - delta[e / 2]);
    }
    uint32_t gradients[S::kCols / 16][4];
    pack_operand<T>(gradients, dp);
    add_gradients<S>(dq, gradients, shared.cols(k.stage));
    ptx::wgmma_wait<0>();
    ptx::hold(dq);
    ptx::hold(gradients);
    release(shared, k.stage, v.stage);
    col += S::kCols;
  }
  store_gradient<S>(p.grads[0], block, row, own_barrier(consumer), q_tile, dq, p.softmax_scale);
}

template <class S>
__device__ __forceinline__ void backward_block(const BackwardSm90Args& p) {
  static_assert(S::kBytes <= kMostShared);
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<S> shared{ptx::shared_address(memory)};
  const Block<S> block(p);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared.rows_full(0), 1);
    ptx::mbarrier_init(shared.rows_full(1), 1);
    if constexpr (S::kSplit) {
      ptx::mbarrier_init(shared.handed_full(), kWarpgroup / 32);
      ptx::mbarrier_init(shared.handed_empty(), kWarpgroup / 32);
    }
#pragma unroll
    for (int slot = 0; slot < S::kSlots; ++slot) {
      ptx::mbarrier_init(shared.full(slot), 1 + (S::kKeyRows ? 32 : 0));
      ptx::mbarrier_init(shared.empty(slot), kConsumers * kWarpgroup / 32);  // one arrival per warp
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  // The same for all lanes, and known as such to the compiler.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < kWarpgroup / 32) {
    ptx::setmaxnreg_dec<24>();
    if (block.steps == 0) return;
    if (warp == 0) {
      if (ptx::elect_one()) load_tiles<S>(p, block, shared);
    } else if (S::kKeyRows && warp <= 2) {
      load_constants<S>(p, block, shared, warp - 1);
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    const int consumer = warp / (kWarpgroup / 32) - 1;
    if constexpr (S::kSplit) {
      if (consumer == 0) {
        consume_dv<S>(p, block, shared);
      } else {
        consume_dk<S>(p, block, shared);
      }
    } else if constexpr (S::kKeyRows) {
      consume_dkdv<S>(p, block, shared, consumer);
    } else {
      consume_dq<S>(p, block, shared, consumer);
    }
    ptx::bulk_wait_read<0>();  // shared memory must outlive the copies, which are those of one thread
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) dkdv_sm90_kernel(const __grid_constant__ BackwardSm90Args p) {
  backward_block<S>(p);
}
template <class S>
__global__ void __launch_bounds__(kThreads, 1) dq_sm90_kernel(const __grid_constant__ BackwardSm90Args p) {
  backward_block<S>(p);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) fused_sm90_kernel(const __grid_constant__ BackwardSm90Args p) {
  backward_block<FusedShape<T>>(p);
}

// The sums -> dQ. Grid: blocks of 64 queries * query heads * batch, blocks fastest.
template <typename T>
__global__ void __launch_bounds__(kWarpgroup) round_dq_sm90_kernel(const __grid_constant__ RoundArgs p) {
  const int64_t blocks = (p.seqlen_q + kSumRows - 1) / kSumRows;
  const int head = static_cast<int>(blockIdx.x / blocks % p.heads),
            batch = static_cast<int>(blockIdx.x / blocks / p.heads);
  const int row = static_cast<int>(blockIdx.x % blocks) * kSumRows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const float4* sums = reinterpret_cast<const float4*>(p.dq_sums) + int64_t{blockIdx.x} * (kHalves * kSumBytes / 16);
  T* dq = const_cast<T*>(head_of<T>(p.dq, batch, head));
#pragma unroll
  for (int n = 0; n < kHalves * kSumTiles; ++n) {
    const float4 x = sums[sum_index(n)];
    const int column = n * 8 + threadIdx.x % 4 * 2;
    if (column >= p.dq.width) continue;
    const uint32_t words[2] = {ptx::pack<T>(x.x * p.softmax_scale, x.y * p.softmax_scale),
                               ptx::pack<T>(x.z * p.softmax_scale, x.w * p.softmax_scale)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= p.seqlen_q) continue;
      *reinterpret_cast<uint32_t*>(dq + (row + 8 * half) * p.dq.stride[2] + column) = words[half];
    }
  }
}

// Columns and slots by head size. What the registers hold: two products with the columns beside the sums of a gradient
// (dQ) or of two (dK and dV); 64 columns at least, or wgmma waits for shared memory.
template <int kHeadDim>
struct Tiles;
template <>
struct Tiles<64> {
  static constexpr int kQueries = 96, kKeys = 128, kKeySlots = 4;
};
template <>
struct Tiles<96> {
  static constexpr int kQueries = 80, kKeys = 128, kKeySlots = 4;
};
template <>
struct Tiles<128> {
  static constexpr int kQueries = 64, kKeys = 128, kKeySlots = 4;
};
template <>
struct Tiles<192> {
  static constexpr int kQueries = 64, kKeys = 80, kKeySlots = 4;
};
template <>
struct Tiles<256> {
  static constexpr int kQueries = 64, kKeys = 64, kKeySlots = 3;
};
template <typename T, int kHeadDim, bool kSoftcap>
using DkdvShape = Shape<T, kHeadDim, Tiles<kHeadDim>::kQueries, 4, true, kSoftcap>;
template <typename T, int kHeadDim, bool kSoftcap>
using DqShape = Shape<T, kHeadDim, Tiles<kHeadDim>::kKeys, Tiles<kHeadDim>::kKeySlots, false, kSoftcap>;

#ifdef ATTNKERN_NO_SM90
constexpr const char* kNotCompiled = "the library was compiled without sm_90a";
#else
constexpr const char* kNotCompiled = nullptr;
#endif

// run(std::integral_constant<int, kHeadDim>{}) for the narrowest tiles that hold both head sizes, of at most 256.
template <typename Run>
int by_width(const BackwardCall& p, Run run) {
  const int64_t size = std::max(p.head_dim, p.head_dim_v);
  if (size <= 64) return run(std::integral_constant<int, 64>{});
  if (size <= 96) return run(std::integral_constant<int, 96>{});
  if (size <= 128) return run(std::integral_constant<int, 128>{});
  if (size <= 192) return run(std::integral_constant<int, 192>{});
  return run(std::integral_constant<int, 256>{});
}

const char* why_not(const BackwardCall& p, const Chip& chip) {
  if (kNotCompiled != nullptr) return kNotCompiled;
  if (left_out & kNoSm90Backward) return kLeftOut;
  if (chip.capability != 90) return "the device is no Hopper";
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "the dtype isn't bfloat16 or float16";
  if (p.bias.data != nullptr) return "there is a mask or bias";
  if (p.dropout_p > 0) return "there is dropout";
  if (p.softcap == 0 && p.softmax_scale <= 0) return "the scale isn't positive";
  for (const int64_t size : {p.batch, p.heads_q, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v}) {
    if (size == 0) return "a size is 0";
  }
  if (std::max(p.head_dim, p.head_dim_v) > 256) return "a head size is above 256";
  // Zeros up to 64 columns would cost more than wgmma gains over mma.
  if (std::max(p.head_dim, p.head_dim_v) <= 32) return "both head sizes are at most 32";
  if (p.heads_out != p.heads_k || p.heads_out != p.heads_v) return "key and value heads are shared differently";
  const auto fits = [](const View& view, int64_t length, int64_t width) {
    return view.data == nullptr || fits_tensor_map(view, length, width, 2);
  };
  if (!fits(p.q, p.seqlen_q, p.head_dim)) return "the strides of query aren't multiples of 16 bytes";
  if (!fits(p.k, p.seqlen_k, p.head_dim)) return "the strides of key aren't multiples of 16 bytes";
  if (!fits(p.v, p.seqlen_k, p.head_dim_v)) return "the strides of value aren't multiples of 16 bytes";
  if (!fits(p.grad_out, p.seqlen_q, p.head_dim_v)) return "the strides of grad_out aren't multiples of 16 bytes";
  if (!fits(p.dq, p.seqlen_q, p.head_dim) || !fits(p.dk, p.seqlen_k, p.head_dim) ||
      !fits(p.dv, p.seqlen_k, p.head_dim_v)) {
    return "the strides of a gradient aren't multiples of 16 bytes";
  }
  return nullptr;
}

// Blocks that run side by side read the columns of so many (batch, head) pairs, which L2 (50 MB) then holds.
int section_of(int64_t column_bytes, int64_t pairs) {
  constexpr int64_t kCache = int64_t{32} << 20;
  return static_cast<int>(std::clamp(kCache / std::max<int64_t>(1, column_bytes), int64_t{1}, pairs));
}

int make_source(Source& source, const BackwardCall& p, const View& view, int64_t heads, int64_t length, int64_t width,
                int rows) {
  source.head_step = view.stride[1] != 0, source.batch_step = view.stride[0] != 0;
  return make_tensor_map(source.map, map_type(p.dtype), 2, view, p.batch, heads, length, width, rows);
}

BackwardSm90Args arguments(const BackwardCall& p, int64_t heads, int section) {
  BackwardSm90Args a{};
  a.score = score_of(p, p.softcap == 0);
  a.lse = static_cast<const float*>(p.lse);
  a.delta = p.row_delta;
  a.softmax_scale = static_cast<float>(p.softmax_scale);
  a.batch = static_cast<int32_t>(p.batch), a.heads = static_cast<int32_t>(heads);
  a.group = static_cast<int32_t>(p.heads_q / p.heads_k);
  a.section = section;
  return a;
}

// Of dK and dV, or of all three gradients.
template <class S>
int launch_by_keys(const BackwardCall& p, const BackwardLaunch& launch, void (*kernel)(BackwardSm90Args),
                   void* stream) {
  if (launch.blocks == 0) return cudaSuccess;
  const int64_t bytes = p.heads_q / p.heads_k * p.seqlen_q * (p.head_dim + p.head_dim_v) * 2;
  BackwardSm90Args a = arguments(p, p.heads_k, section_of(bytes, p.batch * p.heads_k));
  int error = make_source(a.rows[0], p, p.k, p.heads_k, p.seqlen_k, p.head_dim, kGroupRows);
  error = error ? error : make_source(a.rows[1], p, p.v, p.heads_k, p.seqlen_k, p.head_dim_v, kGroupRows);
  error = error ? error : make_source(a.cols[0], p, p.q, p.heads_q, p.seqlen_q, p.head_dim, S::kCols);
  error = error ? error : make_source(a.cols[1], p, p.grad_out, p.heads_q, p.seqlen_q, p.head_dim_v, S::kCols);
  const View* grads[] = {&p.dk, &p.dv};
  const int64_t widths[] = {p.head_dim, p.head_dim_v};
  for (int n = 0; n < 2; ++n) {
    a.wanted[n] = grads[n]->data != nullptr;
    if (error || !a.wanted[n]) continue;
    error = make_tensor_map(a.grads[n], map_type(p.dtype), 2, *grads[n], p.batch, p.heads_k, p.seqlen_k, widths[n],
                            kGroupRows);
  }
  if (error) return error;
  a.dq_sums = p.dq_sums;
  return launch_kernel(kernel, launch.blocks, launch.threads, launch.shared_bytes, a, stream);
}

template <class S>
int launch_dq(const BackwardCall& p, const BackwardLaunch& launch, void* stream) {
  if (launch.blocks == 0) return cudaSuccess;
  const int64_t bytes = ceil_div(p.seqlen_k * (p.head_dim + p.head_dim_v) * 2, p.heads_q / p.heads_k);
  BackwardSm90Args a = arguments(p, p.heads_q, section_of(bytes, p.batch * p.heads_q));
  int error = make_source(a.rows[0], p, p.q, p.heads_q, p.seqlen_q, p.head_dim, kGroupRows);
  error = error ? error : make_source(a.rows[1], p, p.grad_out, p.heads_q, p.seqlen_q, p.head_dim_v, kGroupRows);
  error = error ? error : make_source(a.cols[0], p, p.k, p.heads_k, p.seqlen_k, p.head_dim, S::kCols);
  error = error ? error : make_source(a.cols[1], p, p.v, p.heads_k, p.seqlen_k, p.head_dim_v, S::kCols);
  error = error ? error
                : make_tensor_map(a.grads[0], map_type(p.dtype), 2, p.dq, p.batch, p.heads_q, p.seqlen_q, p.head_dim,
                                  kGroupRows);
  if (error) return error;
  return launch_kernel(dq_sm90_kernel<S>, launch.blocks, launch.threads, launch.shared_bytes, a, stream);
}

template <typename T>
int round_dq(const BackwardCall& p, const BackwardLaunch& launch, void* stream) {
  const RoundArgs a{rows_of(p.dq, p.head_dim), p.dq_sums, static_cast<float>(p.softmax_scale),
                    static_cast<int32_t>(p.heads_q), static_cast<int32_t>(p.seqlen_q)};
  return launch_kernel(round_dq_sm90_kernel<T>, launch.blocks, launch.threads, launch.shared_bytes, a, stream);
}

// One walk over the scores makes five products where two walks make seven. For head sizes that fill its tile.
bool can_fuse(const BackwardCall& p) {
  const int64_t size = std::max(p.head_dim, p.head_dim_v);
  return size > 96 && size <= 128 && p.softcap == 0 && p.dq.data != nullptr && p.dk.data != nullptr &&
         p.dv.data != nullptr;
}

}  // namespace

BackwardSm90Plan plan_backward_sm90(const BackwardCall& p, const Chip& chip, bool deterministic) {
  BackwardSm90Plan plan{};
  plan.refusal = why_not(p, chip);
  if (plan.refusal != nullptr) return plan;
  plan.plain = p.softcap == 0;
  if (!deterministic && !(left_out & kNoSm90Fused) && can_fuse(p)) {
    plan.dq_sums = p.batch * p.heads_q * ceil_div(p.seqlen_q, kSumRows) * (kHalves * kSumBytes / 4);
    using S = FusedShape<__half>;
    plan.head_class = S::kHeadDim;
    plan.fused = {S::kRows, S::kCols, kThreads, static_cast<int>(S::kBytes),
                  ceil_div(p.seqlen_k, S::kRows) * p.batch * p.heads_k};
    plan.round_dq = {kSumRows, S::kHeadDim, kWarpgroup, 0, ceil_div(p.seqlen_q, kSumRows) * p.batch * p.heads_q};
    return plan;
  }
  by_width(p, [&](auto width) {
    using Dkdv = DkdvShape<__half, width, false>;
    using Dq = DqShape<__half, width, false>;
    plan.head_class = width;
    if (p.dk.data != nullptr || p.dv.data != nullptr) {
      const int64_t blocks = ceil_div(p.seqlen_k, Dkdv::kRows) * p.batch * p.heads_k;
      plan.dkdv = {Dkdv::kRows, Dkdv::kCols, kThreads, static_cast<int>(Dkdv::kBytes), blocks};
    }
    if (p.dq.data != nullptr) {
      const int64_t blocks = ceil_div(p.seqlen_q, Dq::kRows) * p.batch * p.heads_q;
      plan.dq = {Dq::kRows, Dq::kCols, kThreads, static_cast<int>(Dq::kBytes), blocks};
    }
    return 0;
  });
  return plan;
}

int backward_sm90(const BackwardCall& p, const BackwardSm90Plan& plan, void* stream) {
  if (plan.refusal != nullptr) return cudaErrorInvalidValue;
#ifdef ATTNKERN_NO_SM90
  return cudaErrorNoKernelImageForDevice;
#else
  return by_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    if (plan.fused.blocks > 0) {
      int error = cudaMemsetAsync(p.dq_sums, 0, plan.dq_sums * sizeof(float), static_cast<cudaStream_t>(stream));
      if (error == cudaSuccess) {
        error = launch_by_keys<FusedShape<T>>(p, plan.fused, fused_sm90_kernel<T>, stream);
      }
      return error != cudaSuccess ? error : round_dq<T>(p, plan.round_dq, stream);
    }
    return by_width(p, [&](auto width) {
      const auto launch = [&](auto softcap) {
        using Dkdv = DkdvShape<T, width, softcap>;
        const int error = launch_by_keys<Dkdv>(p, plan.dkdv, dkdv_sm90_kernel<Dkdv>, stream);
        return error != cudaSuccess ? error : launch_dq<DqShape<T, width, softcap>>(p, plan.dq, stream);
      };
      return plan.plain ? launch(std::false_type{}) : launch(std::true_type{});
    });
  });
#endif
}

}  // namespace attnkern::cuda
