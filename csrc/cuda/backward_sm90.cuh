// What the kernels of backward_sm90.cu are made of: what their blocks compute, the producer that fills the pipeline,
// the products and the arithmetic between them.
#pragma once

#include "cuda/launch.h"
#include "cuda/score.cuh"
#include "cuda/sm90.cuh"
#include "cuda/smem.cuh"
#include "cuda/smem_sm90.cuh"
#include "cuda/visits.cuh"

namespace attnkern::cuda {
namespace {

constexpr uint32_t kMostShared = 227 * 1024;

struct Source {
  ptx::TensorMap map;
  int32_t head_step, batch_step;  // 0 if all of them share one
};

struct BackwardSm90Args {
  Source rows[2];           // K and V, or Q and dO
  Source cols[2];           // Q and dO, or K and V
  ptx::TensorMap grads[2];  // dK and dV, or dQ
  uint8_t* nan_marks[2];    // of grads (NanMarks); null: nobody asks
  float* dq_sums;           // of the fused kernel, see sum_of
  Score score;              // scale: times log2(e) without a softcap, over the softcap with one
  const float* lse;         // (batch, heads, seqlen_q), contiguous, natural logarithm
  const float* delta;       // the same
  float softmax_scale;
  int32_t batch, heads;    // of the rows
  int32_t group;           // query heads per head of k and v
  int32_t swizzled_heads;  // L2 head swizzle: (batch, head) pairs whose blocks are neighbours, so that L2 holds what
                           // they read
  bool wanted[2];          // of grads
};

struct RoundArgs {
  Rows dq;
  uint8_t* nan_marks;  // null: nobody asks
  const float* dq_sums;
  float softmax_scale;
  int32_t heads, seqlen_q;
};

// dQ before it is scaled and rounded, in float32: for every 64 queries of every head, two halves of the columns of 128,
// each as the 128 threads of a warpgroup hold a 64x64 accumulator: [eight columns][thread][four numbers].
constexpr int kSumRows = 64, kSumColumns = 64, kSumTiles = kSumColumns / 8, kHalves = 2;
constexpr uint32_t kSumBytes = kSumRows * kSumColumns * 4;

// Fast path: by the band alone, without a softcap.
template <typename T_, int kHeadDim_, int kCols_, int kSlots_, bool kKeyRows_, bool kFastPath_>
struct Shape {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kCols = kCols_, kSlots = kSlots_;
  static constexpr bool kKeyRows = kKeyRows_, kFastPath = kFastPath_;
  // Sums of dK and dV for 64 keys don't fit into one warpgroup's registers above a head size of 128: there the two
  // have the same rows, and one each.
  static constexpr bool kSplit = kKeyRows && kHeadDim > 128;
  static constexpr bool kFused = false;
  static constexpr int kRowTiles = kSplit ? 1 : kConsumers, kRows = kRowTiles * kGroupRows;
  using RowTile = SlabTile<T, kGroupRows, kHeadDim>;
  using ColTile = SlabTile<T, kCols, kHeadDim>;
  // Shared memory: rows, as [of rows[0] or rows[1]][row tile]; the pipeline of columns; what the first warpgroup hands
  // to the second; lse or delta of each slot's columns, if those are queries; barriers; beside the fast path what the
  // producer tells of the columns of each slot, and their head; and which of the keys the queries of each step attend
  // to, as bits, if those are columns.
  static constexpr uint32_t kRing = 2 * kRowTiles * RowTile::kBytes;
  static constexpr uint32_t kHanded = kRing + kSlots * ColTile::kBytes;
  static constexpr uint32_t kConstants = kHanded + (kSplit ? kGroupRows * kCols * 4 : 0);
  static constexpr uint32_t kBarriers = kConstants + (kKeyRows ? kSlots * kCols * 4 : 0);
  static constexpr uint32_t kInfo = kBarriers + (2 + 2 * kSlots + (kSplit ? 2 : 0)) * 8;
  static constexpr uint32_t kOwnKeys = (kInfo + 2 * kSlots * 4 + 15) / 16 * 16;
  static constexpr uint32_t kBytes = kFastPath ? kInfo : kOwnKeys + (kKeyRows ? kSlots / 2 * kCols * kRows / 8 : 0);
  static_assert(!kKeyRows || kSlots % 2 == 0, "every second slot has queries");
};

// All three gradients in one walk. Behind what dK and dV take: dS of all keys for the queries of a step, twice; what
// each warpgroup has for half of the columns of dQ.
template <typename T_, bool kFastPath_>
struct FusedShape : Shape<T_, 128, 64, 4, true, kFastPath_> {
  using Base = Shape<T_, 128, 64, 4, true, kFastPath_>;
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
  __device__ __forceinline__ uint32_t info(int slot) const { return base + S::kInfo + 4 * slot; }
  __device__ __forceinline__ uint32_t head_info(int slot) const { return info(S::kSlots + slot); }
  // Which of the group-th 32 keys the query in this column attends to.
  __device__ __forceinline__ uint32_t own_keys(int slot, int group, int column) const {
    return base + S::kOwnKeys + ((slot / 2 * (S::kRows / 32) + group) * S::kCols + column) * 4;
  }
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

// What a block computes: its rows.
template <class S>
struct Block {
  int batch, head;  // of the rows
  int first_row, count;
  bool any = true;  // whether they reach a column

  __device__ __forceinline__ explicit Block(const BackwardSm90Args& p) {
    const int seqlen_rows = S::kKeyRows ? p.score.seqlen_k : p.score.seqlen_q;
    const int blocks = (seqlen_rows + S::kRows - 1) / S::kRows;
    const int first = static_cast<int>(blockIdx.x) / (p.swizzled_heads * blocks) * p.swizzled_heads;
    const int neighbours = min(p.swizzled_heads, p.batch * p.heads - first);
    const int number = static_cast<int>(blockIdx.x) - first * blocks;
    const int pair = first + number % neighbours;
    batch = pair / p.heads, head = pair % p.heads;
    // Longest first: with a causal band the first keys are reached by the most queries, and the last queries reach the
    // most keys.
    const int block = number / neighbours;
    first_row = (S::kKeyRows ? block : blocks - 1 - block) * S::kRows;
    count = min(S::kRows, seqlen_rows - first_row);
    if constexpr (S::kFastPath) any = !columns(p).done();
  }

  // The tiles of columns that they reach, of every head. Beside the fast path for whole warps.
  __device__ __forceinline__ auto columns(const BackwardSm90Args& p) const {
    const Band& band = p.score.band;
    const int first_head = head * p.group;
    if constexpr (S::kFastPath && S::kKeyRows) {
      return BandBlocksOfHeads<S::kCols>(band.transposed(), first_row, count, p.score.seqlen_q, first_head, p.group);
    } else if constexpr (S::kFastPath) {
      return BandBlocksOfHeads<S::kCols>(band, first_row, count, p.score.seqlen_k, head / p.group, 1);
    } else if constexpr (S::kKeyRows) {
      return QueryBlocks<S::kCols, (S::kCols + 31) / 32>(p.score, batch, first_head, p.group, first_row, count);
    } else {
      const Range all = {0, p.score.seqlen_k};
      return KeyBlocks<S::kRows, S::kCols, S::kRows / 32>(p.score, batch, head, first_row, count, all);
    }
  }
  // Keys past the end are rows of zeros: their scores are 0, so where the scores of all others are low their
  // probabilities overflow. That is nothing to gradients of their own, which are never stored, but dQ is summed over
  // all rows.
  __device__ __forceinline__ bool has_masked_rows() const { return S::kFused && count < S::kRows; }
};

// The tiles of columns as they come to a consumer: on the fast path by its own count, else as the producer says.
template <class S>
class Columns {
 public:
  __device__ __forceinline__ Columns(const BackwardSm90Args& p, const Block<S>& block) : tiles_(p, block) {}
  __device__ __forceinline__ bool more() const { return tiles_.more; }
  // The next tile, which is in this slot.
  __device__ __forceinline__ void advance(const Shared<S>& shared, int slot) { tiles_.advance(shared, slot); }
  __device__ __forceinline__ int col() const { return tiles_.col(); }
  __device__ __forceinline__ int head() const { return tiles_.head; }  // of queries; for the fused kernel
  // Scores of the tile in this slot: where query and key don't meet, -inf.
  template <int kTiles>
  __device__ __forceinline__ void mask(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared,
                                       int slot, float (&s)[kTiles][4], int thread_row) const {
    if (!tiles_.masked() && !block.has_masked_rows()) return;
    const int thread_col = col() + threadIdx.x % 4 * 2;
    if (S::kFastPath || p.score.ranges == nullptr) {
      mask_scores<S::kKeyRows>(p.score, s, thread_row, thread_col);
    } else if constexpr (S::kKeyRows) {
      const int row = thread_row - block.first_row;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 both = ptx::load_shared_pair(shared.own_keys(slot, row / 32, n * 8 + threadIdx.x % 4 * 2));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t keys = __float_as_uint(e % 2 ? both.y : both.x);
          s[n][e] = keys >> (row % 32 + e / 2 * 8) & 1 ? s[n][e] : -kInfinity;
        }
      }
    } else {
      const int32_t* ranges = ranges_of(p.score, block.batch, block.head);
      mask_by_keys<false>(s, thread_row, thread_col, [&](int n) { return own_keys(p.score, ranges, thread_row + n); });
    }
  }

 private:
  struct Counted : BandBlocksOfHeads<S::kCols> {
    using Base = BandBlocksOfHeads<S::kCols>;
    int first, head;
    bool more;
    __device__ __forceinline__ Counted(const BackwardSm90Args& p, const Block<S>& block)
        : Base(block.columns(p)), more(block.any) {}
    __device__ __forceinline__ void advance(const Shared<S>&, int) {
      first = Base::first(), head = Base::head();
      Base::advance();
      more = !Base::done();
    }
    __device__ __forceinline__ int col() const { return first; }
    __device__ __forceinline__ bool masked() const { return Base::masked(first); }
  };
  struct Told {
    uint32_t info = 0;
    int head = 0;
    bool more;
    __device__ __forceinline__ Told(const BackwardSm90Args&, const Block<S>& block) : more(block.any) {}
    __device__ __forceinline__ void advance(const Shared<S>& shared, int slot) {
      info = ptx::load_shared_word(shared.info(slot));
      more = !BlockInfo::of(info).last;
      if constexpr (S::kFused) head = static_cast<int>(ptx::load_shared_word(shared.head_info(slot)));
    }
    __device__ __forceinline__ int col() const { return BlockInfo::of(info).first; }
    __device__ __forceinline__ bool masked() const { return BlockInfo::of(info).masked; }
  };
  std::conditional_t<S::kFastPath, Counted, Told> tiles_;
};

// One thread: K or V, or Q or dO.
template <class S>
__device__ __forceinline__ void load_rows(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared,
                                          int which) {
  const Source& source = p.rows[which];
  ptx::mbarrier_arrive_expect_tx(shared.rows_full(which), S::kRowTiles * S::RowTile::kBytes);
#pragma unroll
  for (int n = 0; n < S::kRowTiles; ++n) {
    S::RowTile::load(shared.rows(which, n), source.map, shared.rows_full(which), block.first_row + n * kGroupRows,
                     block.head * source.head_step, block.batch * source.batch_step);
  }
}

// One thread on the fast path, else a whole warp, of which one thread copies: all tiles into shared memory, in the
// order of use. Beside the fast path the first rows are under way.
template <class S, class Tiles>
__device__ __forceinline__ void load_tiles(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared,
                                           Tiles tiles) {
  const bool copies = S::kFastPath || ptx::elect_one();
  PipelineState<S::kSlots> at;
  BlockInfo info{};
  int query_head = 0;
  // With the first tile of a step.
  const auto tell = [&](int which) {
    if (which != 0) return;
    ptx::store_shared(shared.info(at.stage), info.word());
    if constexpr (S::kFused) ptx::store_shared(shared.head_info(at.stage), static_cast<uint32_t>(query_head));
  };
  const auto load_cols = [&](int which, int head, int col) {
    const Source& source = p.cols[which];
    ptx::mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);  // at once in the first round
    if (copies) {
      if constexpr (!S::kFastPath) tell(which);
      ptx::mbarrier_arrive_expect_tx(shared.full(at.stage), S::ColTile::kBytes);
      S::ColTile::load(shared.cols(at.stage), source.map, shared.full(at.stage), col, head * source.head_step,
                       block.batch * source.batch_step);
    }
    at.advance();
  };
  if constexpr (S::kFastPath) load_rows<S>(p, block, shared, 0);
  for (bool first = true; !tiles.done(); first = false) {
    info.first = tiles.first();
    int head = block.head / p.group;
    if constexpr (S::kKeyRows || S::kFastPath) head = query_head = tiles.head();
    if constexpr (!S::kFastPath) info.masked = tiles.masked();
    tiles.advance();
    info.last = tiles.done();
    load_cols(0, head, info.first);
    if (first && copies) load_rows<S>(p, block, shared, 1);
    load_cols(1, head, info.first);
  }
}

// -lse * log2(e), the exponent's constant: -inf makes all probabilities of a query 0. So for one without keys, whose
// lse of -inf would make them infinite, and for one past the end.
__device__ __forceinline__ float exponent_constant(float lse, bool live) {
  return live && lse != -kInfinity ? -lse * kLog2E : -kInfinity;
}

// One warp: the constants of the queries that pass by, of every second slot from `which` on; with those of the first
// slots the keys that the queries attend to.
template <class S, class Tiles>
__device__ __forceinline__ void load_constants(const BackwardSm90Args& p, const Block<S>& block,
                                               const Shared<S>& shared, int which, Tiles tiles) {
  constexpr int kEach = (S::kCols + 31) / 32;
  const int lane = threadIdx.x % 32;
  const float* source = which == 0 ? p.lse : p.delta;
  const int64_t first_head = static_cast<int64_t>(block.batch) * p.heads * p.group;
  float next[kEach];
  int col = 0, head = 0;
  const auto load = [&] {
    col = tiles.first(), head = tiles.head();
    const int64_t row = (first_head + head) * p.score.seqlen_q;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int query = col + i * 32 + lane;
      const bool live = query < p.score.seqlen_q;
      const float x = live ? source[row + query] : 0.f;
      next[i] = which == 0 ? exponent_constant(x, live) : x;
    }
    tiles.advance();
  };
  PipelineState<S::kSlots> at;
  if (which == 1) at.advance();
  load();
#pragma unroll 1
  for (bool more = true; more;) {
    ptx::mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i * 32 + lane >= S::kCols) break;
      ptx::store_shared(shared.constants(at.stage) + (i * 32 + lane) * 4, __float_as_uint(next[i]));
      if (S::kFastPath || which == 1 || p.score.ranges == nullptr) continue;
      const OwnKeys own = own_keys(p.score, ranges_of(p.score, block.batch, head), col + i * 32 + lane);
#pragma unroll
      for (int group = 0; group < S::kRows / 32; ++group) {
        const int first = block.first_row + group * 32;
        ptx::store_shared(shared.own_keys(at.stage, group, i * 32 + lane),
                          bits_between(own.begin[0] - first, own.end[0] - first) |
                              bits_between(own.begin[1] - first, own.end[1] - first));
      }
    }
    ptx::mbarrier_arrive(shared.full(at.stage));
    more = !tiles.done();
    if (more) load();
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

// The probability of the raw product s, which becomes what dP - delta is to be multiplied by. `constant`: of the query.
template <bool kSoftcap>
__device__ __forceinline__ float probability_of(const Score& p, float& s, float constant) {
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

// run(std::bool_constant<kSoftcap>{}) for the call. The fused kernel's have none.
template <class S, typename Run>
__device__ __forceinline__ void by_softcap(const Score& p, Run run) {
  if (!S::kFastPath && !S::kFused && p.softcap != 0.f) {
    run(std::true_type{});
  } else {
    run(std::false_type{});
  }
}

// A warp tells whether its 16 rows of a gradient, from `row` of so many on, hold NaN; `found`: whether this lane's do.
__device__ __forceinline__ void mark_nan(uint8_t* marks, int64_t head, int row, int rows, bool found) {
  found = __any_sync(0xffffffffu, found);
  if (threadIdx.x % 32 == 0 && row < rows) marks[head * marks_of_head(rows) + row / kMarkRows] = found;
}

// A warpgroup's rows from `row` on of gradient number `which`, through the tile that it has no more use for: after the
// barrier, when all four warps have waited for the wgmmas that read it.
template <class S>
__device__ __forceinline__ void store_gradient(const BackwardSm90Args& p, int which, const Block<S>& block, int row,
                                               int barrier, uint32_t tile, const float (&grad)[S::kHeadDim / 8][4],
                                               float factor) {
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
  if (S::kHeadDim < kColumns && !block.any) {
    const uint32_t zeros[4] = {};
#pragma unroll
    for (int c = S::kHeadDim / 16; c < kColumns / 16; ++c)
      ptx::stmatrix(S::RowTile::address(tile, warp * 16 + lane % 16, 2 * c + lane / 16), zeros);
  }
  ptx::fence_proxy_async();
  ptx::barrier_sync(barrier, kWarpgroup);
  if (warp == 0 && ptx::elect_one()) {
    S::RowTile::store(p.grads[which], tile, row, block.head, block.batch);
    ptx::bulk_commit();
  }
  if (p.nan_marks[which] == nullptr) return;
  bool nan = false;
#pragma unroll
  for (int n = 0; n < S::kHeadDim / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) nan |= isnan(grad[n][e] * factor);
  }
  mark_nan(p.nan_marks[which], static_cast<int64_t>(block.batch) * p.heads + block.head, row + warp * kMarkRows,
           S::kKeyRows ? p.score.seqlen_k : p.score.seqlen_q, nan);
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

// Products s, masked -> probabilities as dV wants them; what dP - delta is to be multiplied by stays in s.
template <class S>
__device__ __forceinline__ void to_probabilities(const Score& p, const Shared<S>& shared, int slot,
                                                 float (&s)[S::kCols / 8][4],
                                                 uint32_t (&probabilities)[S::kCols / 16][4]) {
  by_softcap<S>(p, [&](auto softcap) {
#pragma unroll
    for (int n = 0; n < S::kCols / 8; ++n) {
      const float2 constant = constants(shared, slot, n);
      float w[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) w[e] = probability_of<softcap>(p, s[n][e], e % 2 ? constant.y : constant.x);
      probabilities[n / 2][n % 2 * 2] = ptx::pack<typename S::T>(w[0], w[1]);
      probabilities[n / 2][n % 2 * 2 + 1] = ptx::pack<typename S::T>(w[2], w[3]);
    }
  });
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

}  // namespace
}  // namespace attnkern::cuda
