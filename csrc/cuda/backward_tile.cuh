// A block of the kernels for dK and dV (backward_dkdv.cu) and for dQ (backward_dq.cu), which are one: `rows` stay in
// shared memory, `columns` pass by. For dK and dV rows are keys and columns queries, so that P^T and dS^T are left
// operands of their products in the registers they were made in; for dQ rows are queries and columns keys.
//
//   dK, dV:  S^T = K Q^T   dP^T = V dO^T   dV += P^T dO   dK += dS^T Q
//   dQ:      S   = Q K^T   dP   = dO V^T                  dQ += dS K
#pragma once

#include "cuda/backward.cuh"
#include "cuda/launch.cuh"

namespace attnkern::cuda {

// How a block computes. Every row group of 16 * kRowTiles rows belongs to kSplit warps. For the scores these share out
// the columns; for the products with the scores they share out the head dimension and hand each other the scores.
template <int kRows_, int kCols_, int kRowTiles_, int kSplit_, int kStages_>
struct Shape {
  static constexpr int kRows = kRows_, kCols = kCols_, kRowTiles = kRowTiles_, kSplit = kSplit_, kStages = kStages_;
  static constexpr int kGroups = kRows / (16 * kRowTiles);
  static constexpr int kThreads = kGroups * kSplit * 32;
  static constexpr int kWarpCols = kCols / kSplit;
  static_assert(kRows % (16 * kRowTiles) == 0 && kWarpCols % 16 == 0 && kStages >= 1 && kStages <= 2);
};

// Shared memory, in this order: the two tiles of rows; per stage the two tiles of columns; per stage lse and delta of
// the columns, if those are queries; the scores handed over (P and dS, or dS alone).
template <class S, int kHeadDim, bool kKeyRows>
struct Layout {
  static constexpr uint32_t kRowTile = S::kRows * kHeadDim * 2, kColTile = S::kCols * kHeadDim * 2;
  static constexpr uint32_t kStage = 2 * kRowTile;
  static constexpr uint32_t kConstants = kStage + S::kStages * 2 * kColTile;
  static constexpr uint32_t kHandOver = kConstants + (kKeyRows ? S::kStages * 2 * S::kCols * 4 : 0);
  static constexpr uint32_t kMatrix = S::kRows * S::kCols * 2;
  static constexpr uint32_t kBytes = kHandOver + (S::kSplit > 1 ? (kKeyRows ? 2 : 1) * kMatrix : 0);
};

// out += a b for 16 columns of a, in registers, and the 16 rows of tile b from b_row on, at kDims columns from chunk
// on.
template <typename T, int kHeadDim, int kRowTiles, int kDimTiles>
__device__ __forceinline__ void gradient_mma(float (&out)[kRowTiles][kDimTiles][4], const uint32_t (&a)[kRowTiles][4],
                                             uint32_t b_tile, int b_row, int chunk) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 0; d < kDimTiles / 2; ++d) {
    uint32_t b[4];  // rows 0-7 and 8-15 at d, then at d + 8
    ptx::ldmatrix<true>(b, Tile<kHeadDim>::address(b_tile, b_row + lane % 16, chunk + 2 * d + lane / 16));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ptx::mma_m16n8k16<T>(out[m][2 * d], a[m], b[0], b[1]);
      ptx::mma_m16n8k16<T>(out[m][2 * d + 1], a[m], b[2], b[3]);
    }
  }
}

// The columns that a block goes through: of the step under way, and of the next copy. By the band they are counted; the
// numbers of both take fewer registers than what one could make the other of.
template <int kCols>
class CountedColumns {
 public:
  __device__ __forceinline__ CountedColumns(const Band& band, int first_row, int64_t rows, int columns, int first_head,
                                            int heads)
      : head(first_head), copy_head(first_head) {
    const Range all = {0, columns};
    const Range visited = band.visited(first_row, rows, all), full = band.full(first_row, rows, all);
    full_begin_ = static_cast<int>(full.begin), full_end_ = static_cast<int>(full.end);
    const Walk walk(visited, 1);
    first = copy_first = begin_ = walk.begin, end_ = walk.end;
    steps_ = walk.blocks(kCols) * heads;
  }
  // Of the columns that a row meets.
  __device__ __forceinline__ int end() const { return end_; }
  int first, head, copy_first, copy_head;
  __device__ __forceinline__ bool more() const { return step_ < steps_; }
  __device__ __forceinline__ void start() {}
  __device__ __forceinline__ bool more_copies() const { return step_ + 1 < steps_; }
  __device__ __forceinline__ void copied() {
    copy_first += kCols;
    if (copy_first >= end_) copy_first = begin_, ++copy_head;
  }
  __device__ __forceinline__ bool masked() const { return first < full_begin_ || first + kCols > full_end_; }
  __device__ __forceinline__ void finish() {
    first += kCols;
    if (first >= end_) first = begin_, ++head;
    ++step_;
  }

 private:
  int begin_, end_, full_begin_, full_end_, steps_, step_ = 0;
};

// The columns of a row tile where their blocks are found one by one.
template <class Blocks>
class FoundColumns {
 public:
  __device__ __forceinline__ FoundColumns(const Blocks& blocks, int only_head) : head(only_head), blocks_(blocks) {
    next();
  }
  int first = 0, head, copy_first, copy_head;
  __device__ __forceinline__ bool more() const { return !blocks_.done(); }
  __device__ __forceinline__ void start() {
    first = copy_first, head = copy_head, masked_ = blocks_.masked();
    blocks_.advance();
    next();
  }
  __device__ __forceinline__ bool more_copies() const { return more(); }
  __device__ __forceinline__ void copied() {}
  __device__ __forceinline__ bool masked() const { return masked_; }
  __device__ __forceinline__ void finish() {}

 private:
  __device__ __forceinline__ void next() {
    copy_first = blocks_.first();
    if constexpr (requires { blocks_.head(); }) {
      copy_head = blocks_.head();
    } else {
      copy_head = head;
    }
  }
  Blocks blocks_;
  bool masked_ = false;
};

// Whether kernels for Hopper may have stored gradients before: not in code for sm_100 and up, which Hopper doesn't run.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kMayFollowHopper = false;
#else
constexpr bool kMayFollowHopper = true;
#endif

// What a block works on: its rows of one head (of dk and dv, or of dq), and this warp's part of them. Grid: blocks of
// rows
// * batch * heads, heads fastest.
template <typename T, int kHeadDim, bool kKeyRows, bool kFastPath, class S>
struct BackwardBlock {
  using L = Layout<S, kHeadDim, kKeyRows>;
  static constexpr int kRowTiles = S::kRowTiles, kColTiles = S::kWarpCols / 8;
  static constexpr int kDimTiles = kHeadDim / S::kSplit / 8;  // of a warp's share of the gradients
  using Scores = float[kRowTiles][kColTiles][4];
  using Gradient = float[kRowTiles][kDimTiles][4];  // dK or dQ
  // dV
  using ValueGradient = float[kKeyRows ? kRowTiles : 1][kKeyRows ? kDimTiles : 1][4];
  using RowConstants = float[kRowTiles][1][2];

  const BackwardArgs& p;
  uint8_t* shared;
  uint32_t row_tile[2];
  int lane, group, part;
  int seqlen_rows, seqlen_cols;
  int batch, head, first_row;
  int own_row, own_col;  // of a tile: this warp's first

  __device__ __forceinline__ BackwardBlock(const BackwardArgs& args, uint8_t* memory) : p(args), shared(memory) {
    row_tile[0] = ptx::shared_address(shared), row_tile[1] = ptx::shared_address(shared) + L::kRowTile;
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    group = warp / S::kSplit, part = warp % S::kSplit;
    const int heads = kKeyRows ? p.heads_out : p.score.heads;
    seqlen_rows = kKeyRows ? p.score.seqlen_k : p.score.seqlen_q;
    seqlen_cols = kKeyRows ? p.score.seqlen_q : p.score.seqlen_k;
    // Longest first: with a causal band the first keys are visited by the most queries, and the last queries visit the
    // most keys.
    const int batch_head = blockIdx.x % (p.batch * heads);
    batch = batch_head / heads, head = batch_head % heads;
    const int block = blockIdx.x / (p.batch * heads);
    const int blocks = (seqlen_rows + S::kRows - 1) / S::kRows;
    first_row = (kKeyRows ? block : blocks - 1 - block) * S::kRows;
    own_row = group * 16 * kRowTiles;
    own_col = part * S::kWarpCols;
  }

  __device__ __forceinline__ uint32_t col_tile(int stage, int which) const {
    return row_tile[0] + L::kStage + (stage * 2 + which) * L::kColTile;
  }
  __device__ __forceinline__ uint32_t constants(int stage, int which) const {
    return row_tile[0] + L::kConstants + (stage * 2 + which) * S::kCols * 4;
  }
  __device__ __forceinline__ int64_t query_row(int h) const {
    return (static_cast<int64_t>(batch) * p.score.heads + h) * p.score.seqlen_q;
  }

  // The columns that these rows visit.
  __device__ __forceinline__ auto columns(int first_head, int heads, int count) const {
    const Band& band = p.score.band;
    if constexpr (kFastPath) {
      return CountedColumns<S::kCols>(kKeyRows ? band.transposed() : band, first_row, count, seqlen_cols, first_head,
                                      heads);
    } else if constexpr (kKeyRows) {
      return FoundColumns(QueryBlocks<S::kCols>(p.score, batch, first_head, heads, first_row, count), first_head);
    } else {
      return FoundColumns(KeyBlocks<S::kRows, S::kCols>(p.score, batch, head, first_row, count, {0, seqlen_cols}),
                          head);
    }
  }

  // Whether earlier kernels have stored NaN in its rows of a gradient.
  __device__ __forceinline__ bool stored_nan() const {
    const int heads = kKeyRows ? p.heads_out : p.score.heads;
    const int64_t first = (static_cast<int64_t>(batch) * heads + head) * marks_of_head(seqlen_rows);
    bool found = false;
    const auto look = [&](const uint8_t* marks) {
      if (marks == nullptr) return;
#pragma unroll
      for (int row = first_row; row < first_row + S::kRows; row += kMarkRows) {
        if (row < seqlen_rows) found |= marks[first + row / kMarkRows] != 0;
      }
    };
    look(kKeyRows ? p.nan_marks.dk : p.nan_marks.dq);
    if constexpr (kKeyRows) look(p.nan_marks.dv);
    return found;
  }

  // K and V of the first of these query heads, or Q and dO.
  __device__ __forceinline__ void load_rows(int first_head) const {
    const Rows& rows0 = kKeyRows ? p.k : p.q;
    const Rows& rows1 = kKeyRows ? p.v : p.grad_out;
    const int h0 = kKeyRows ? first_head / p.group_k : head, h1 = kKeyRows ? first_head / p.group_v : head;
    const T* head0 = head_of<T>(rows0, batch, h0);
    const T* head1 = head_of<T>(rows1, batch, h1);
    load_tile<T, kHeadDim, S::kRows, S::kThreads, kFastPath>(row_tile[0], rows0, head0, first_row, seqlen_rows);
    load_tile<T, kHeadDim, S::kRows, S::kThreads, kFastPath>(row_tile[1], rows1, head1, first_row, seqlen_rows);
  }

  // Q and dO of a query head with lse and delta, or K and V, from column `col` on, up to `end`.
  __device__ __forceinline__ void load_cols(int stage, int query_head, int col, int end) const {
    const Rows& cols0 = kKeyRows ? p.q : p.k;
    const Rows& cols1 = kKeyRows ? p.grad_out : p.v;
    const int h0 = kKeyRows ? query_head : query_head / p.group_k, h1 = kKeyRows ? query_head : query_head / p.group_v;
    const T* head0 = head_of<T>(cols0, batch, h0);
    const T* head1 = head_of<T>(cols1, batch, h1);
    load_tile<T, kHeadDim, S::kCols, S::kThreads, kFastPath>(col_tile(stage, 0), cols0, head0, col, end);
    load_tile<T, kHeadDim, S::kCols, S::kThreads, kFastPath>(col_tile(stage, 1), cols1, head1, col, end);
    if constexpr (kKeyRows) {
      static_assert(S::kCols <= S::kThreads);
      if (threadIdx.x < S::kCols) {
        const int64_t at = query_row(query_head) + col + threadIdx.x;
        const bool live = col + static_cast<int>(threadIdx.x) < end;
        ptx::cp_async<4>(constants(stage, 0) + threadIdx.x * 4, p.lse + (live ? at : 0), live ? 4 : 0);
        ptx::cp_async<4>(constants(stage, 1) + threadIdx.x * 4, p.delta + (live ? at : 0), live ? 4 : 0);
      }
    }
  }

  // Of the rows, if those are queries.
  __device__ __forceinline__ void read_row_constants(RowConstants& lse, RowConstants& delta) const {
    if constexpr (!kKeyRows) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + own_row + m * 16 + half * 8 + lane / 4;
          const bool live = row < seqlen_rows;
          lse[m][0][half] = live ? finite_or_far(p.lse[query_row(head) + row]) : kInfinity;
          delta[m][0][half] = live ? p.delta[query_row(head) + row] : 0.f;
        }
      }
    }
  }

  // The columns' tiles that gradients are summed over, without those that attend to nothing or that no row attends to.
  // Queries are known by their lse, before the scores; keys, and queries whose lse is their sink, by the scores, before
  // the gradients.
  __device__ __forceinline__ void clear_queries([[maybe_unused]] int stage) const {
    if constexpr (kKeyRows && !kFastPath) {
      if (p.score.sinks != nullptr) return;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        clear_idle_queries<Tile<kHeadDim>, S::kCols, S::kThreads / 32>(col_tile(stage, which), constants(stage, 0));
      }
    }
  }
  __device__ __forceinline__ void clear_columns([[maybe_unused]] int stage, [[maybe_unused]] bool masked,
                                                [[maybe_unused]] uint32_t attended) const {
    if constexpr (!kFastPath) {
      if (!may_hide<kFastPath>(p.score, masked) || (kKeyRows && p.score.sinks == nullptr)) return;
      constexpr int kWarps = S::kThreads / 32;
      __shared__ uint32_t words[kWarps * 4];
      const AttendedByWarps<kWarps> of_warps{ptx::shared_address(words)};
      of_warps.tell((attended & all_columns<kColTiles>()) << part * kColTiles, threadIdx.x / 32);
      __syncthreads();
#pragma unroll
      for (int which = 0; which < (kKeyRows ? 2 : 1); ++which) {
        clear_unattended<Tile<kHeadDim>, S::kCols / 8, kWarps>(col_tile(stage, which), of_warps.all());
      }
    }
  }

  // Products Q K^T in s and dO V^T in dp -> P, as dV wants it, and dS. Gives the columns that this lane's rows attend
  // to.
  __device__ __forceinline__ uint32_t differentiate_scores(Scores& s, Scores& dp, int stage, int query_head, int col,
                                                           bool masked, const RowConstants& lse,
                                                           const RowConstants& delta) const {
    HeadScore h{};
    if constexpr (!kFastPath) h = head_score(p.score, batch, query_head);
    const int thread_col = col + own_col + lane % 4 * 2;
    uint32_t keep[kRowTiles][(kColTiles + 7) / 8] = {};
    if constexpr (!kFastPath) {
      if (p.score.seeds != nullptr) {
        dropout_bits<kKeyRows, kRowTiles, kColTiles>(p.score, h, first_row + own_row + lane / 4, thread_col, keep);
      }
    }
    uint32_t attended = 0;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int thread_row = first_row + own_row + m * 16 + lane / 4;
      if constexpr (kKeyRows) {
        float col_lse[kColTiles][2], col_delta[kColTiles][2];
        const uint8_t* base = shared + (constants(stage, 0) - row_tile[0]) + (own_col + lane % 4 * 2) * 4;
#pragma unroll
        for (int n = 0; n < kColTiles; ++n) {
          const float2 l = *reinterpret_cast<const float2*>(base + n * 32);
          const float2 d = *reinterpret_cast<const float2*>(base + S::kCols * 4 + n * 32);
          col_lse[n][0] = finite_or_far(l.x), col_lse[n][1] = finite_or_far(l.y);
          col_delta[n][0] = d.x, col_delta[n][1] = d.y;
        }
        attended |= to_gradients<T, true, kFastPath>(p.score, h, s[m], dp[m], col_lse, col_delta, keep[m], thread_row,
                                                     thread_col, masked, [](const auto&) {});
      } else {
        attended |= to_gradients<T, false, kFastPath>(
            p.score, h, s[m], dp[m], lse[m], delta[m], keep[m], thread_row, thread_col, masked,
            [&]([[maybe_unused]] const float (&ds)[kColTiles][4]) {
              if constexpr (!kFastPath) {
                if (p.dbias != nullptr) store_bias_gradients<T>(p, batch, head, ds, thread_row, thread_col);
              }
            });
      }
    }
    return attended;
  }

  // dK += dS^T Q and dV += P^T dO, or dQ += dS K.
  __device__ __forceinline__ void add_gradients(Gradient& grad0, [[maybe_unused]] ValueGradient& grad1, const Scores& s,
                                                const Scores& dp, int stage) const {
    // Operands, and where the other warps of the row group find them: in the order of the lanes, a tile after another.
    uint32_t probabilities[kKeyRows ? kColTiles / 2 : 1][kRowTiles][4], gradients[kColTiles / 2][kRowTiles][4];
    const auto hand_over = [&](int which, int tile, int m) {
      const int n = (group * (S::kCols / 16) + tile) * kRowTiles + m;
      return row_tile[0] + L::kHandOver + which * L::kMatrix + n * 512 + lane * 16;
    };
#pragma unroll
    for (int n = 0; n < kColTiles / 2; ++n) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if constexpr (kKeyRows) to_operand<T>(probabilities[n][m], s[m][2 * n], s[m][2 * n + 1]);
        to_operand<T>(gradients[n][m], dp[m][2 * n], dp[m][2 * n + 1]);
        if constexpr (S::kSplit > 1) {
          const int tile = part * (kColTiles / 2) + n;
          const auto give = [&](int which, const uint32_t (&a)[4]) {
            ptx::store_shared(hand_over(which, tile, m), make_uint4(a[0], a[1], a[2], a[3]));
          };
          give(0, gradients[n][m]);
          if constexpr (kKeyRows) give(1, probabilities[n][m]);
        }
      }
    }

    const int chunk = part * kDimTiles;
#pragma unroll
    for (int n = 0; n < kColTiles / 2; ++n) {
      const int row = own_col + n * 16;
      if constexpr (kKeyRows) gradient_mma<T, kHeadDim>(grad1, probabilities[n], col_tile(stage, 1), row, chunk);
      gradient_mma<T, kHeadDim>(grad0, gradients[n], col_tile(stage, 0), row, chunk);
    }
    if constexpr (S::kSplit > 1) {
      ptx::barrier_sync(1 + group, S::kSplit * 32);
#pragma unroll
      for (int other = 1; other < S::kSplit; ++other) {
        const int first = (part + other) % S::kSplit * (kColTiles / 2);
#pragma unroll
        for (int n = 0; n < kColTiles / 2; ++n) {
          const auto take = [&](uint32_t (&a)[kRowTiles][4], int which) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              const uint4 words = ptx::load_shared(hand_over(which, first + n, m));
              a[m][0] = words.x, a[m][1] = words.y, a[m][2] = words.z, a[m][3] = words.w;
            }
          };
          uint32_t a[kRowTiles][4];
          if constexpr (kKeyRows) {
            take(a, 1);
            gradient_mma<T, kHeadDim>(grad1, a, col_tile(stage, 1), (first + n) * 16, chunk);
          }
          take(a, 0);
          gradient_mma<T, kHeadDim>(grad0, a, col_tile(stage, 0), (first + n) * 16, chunk);
        }
      }
    }
  }

  // One gradient, through a tile of rows that has done its service, so that global memory sees whole lines.
  __device__ __forceinline__ void store(const Gradient& grad, float factor, const Rows& out, uint32_t tile,
                                        [[maybe_unused]] bool as_float) const {
    if (out.data == nullptr) return;
    if constexpr (kKeyRows && !kFastPath) {
      if (as_float) {
        float* target = const_cast<float*>(head_of<float>(out, batch, head));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int row = first_row + own_row + m * 16 + e / 2 * 8 + lane / 4;
              const int d = (part * kDimTiles + n) * 8 + lane % 4 * 2 + e % 2;
              if (row < seqlen_rows && d < out.width) target[row * out.stride[2] + d] = grad[m][n][e] * factor;
            }
          }
        }
        return;
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = own_row + m * 16 + half * 8 + lane / 4;
          const uint32_t address = Tile<kHeadDim>::address(tile, row, part * kDimTiles + n) + lane % 4 * 4;
          ptx::store_shared(address, ptx::pack<T>(grad[m][n][2 * half] * factor, grad[m][n][2 * half + 1] * factor));
        }
      }
    }
    __syncthreads();
    store_tile<T, kHeadDim, S::kRows, S::kThreads, kFastPath>(tile, out, const_cast<T*>(head_of<T>(out, batch, head)),
                                                              0, first_row, seqlen_rows, threadIdx.x);
  }
};

// Registers of a thread, in the loop: the gradients, 4 * kRowTiles * kDimTiles each; S and dP, 4 * kRowTiles *
// kColTiles each, then P and dS as operands in half of that. Shared memory: Layout.
template <typename T, int kHeadDim, bool kKeyRows, bool kFastPath, class S>
__device__ __forceinline__ void backward_block(const BackwardArgs& p) {
  using Block = BackwardBlock<T, kHeadDim, kKeyRows, kFastPath, S>;
  constexpr int kRowTiles = Block::kRowTiles, kColTiles = Block::kColTiles, kDimTiles = Block::kDimTiles;
  // Where the sums take most of the registers, the loads of half a row of fragments at a time.
  constexpr int kSums = 4 * kRowTiles * ((kKeyRows ? 2 : 1) * kDimTiles + 2 * kColTiles);
  constexpr int kSteps = kHeadDim / 16, kUnrolled = kSums >= 192 && kSteps >= 8 ? kSteps / 2 : kSteps;
  extern __shared__ __align__(128) uint8_t shared[];
  const Block block(p, shared);
  const int first_head = kKeyRows ? block.head * p.kv_group : block.head;  // of queries
  const int kv_group = kKeyRows ? p.kv_group : 1;

  if constexpr (!kFastPath && kMayFollowHopper) {
    if (p.again && !block.stored_nan()) return;
  }
  const int count = min(S::kRows, block.seqlen_rows - block.first_row);
  if constexpr (!kKeyRows && !kFastPath) {
    if (p.dbias != nullptr)
      store_unreached<T, S::kThreads, S::kCols>(p, block.batch, block.head, block.first_row, count);
  }

  auto cols = block.columns(first_head, kv_group, count);  // of every query head
  const auto load = [&](int stage) {
    if constexpr (kFastPath) {
      block.load_cols(stage, cols.copy_head, cols.copy_first, cols.end());
    } else {
      block.load_cols(stage, cols.copy_head, cols.copy_first, block.seqlen_cols);
    }
    cols.copied();
  };
  if (cols.more()) {
    block.load_rows(first_head);
    load(0);
  }
  ptx::cp_async_commit();
  typename Block::RowConstants lse, delta;
  block.read_row_constants(lse, delta);

  typename Block::Gradient grad0 = {};
  typename Block::ValueGradient grad1 = {};
  for (int step = 0; cols.more(); ++step) {
    const int stage = step % S::kStages;
    cols.start();
    ptx::cp_async_wait<0>();
    __syncthreads();
    if constexpr (S::kStages == 2) {
      if (cols.more_copies()) load(1 - stage);
      ptx::cp_async_commit();
    }
    block.clear_queries(stage);
    typename Block::Scores s = {}, dp = {};
    Half<T>::template scores<kHeadDim, kSteps, kUnrolled>(s, block.row_tile[0], block.own_row, block.col_tile(stage, 0),
                                                          block.own_col, 0);
    Half<T>::template scores<kHeadDim, kSteps, kUnrolled>(dp, block.row_tile[1], block.own_row,
                                                          block.col_tile(stage, 1), block.own_col, 0);
    const uint32_t attended =
        block.differentiate_scores(s, dp, stage, cols.head, cols.first, cols.masked(), lse, delta);
    block.clear_columns(stage, cols.masked(), attended);
    block.add_gradients(grad0, grad1, s, dp, stage);
    if constexpr (S::kStages == 1) {
      __syncthreads();
      if (cols.more_copies()) load(0);
      ptx::cp_async_commit();
    }
    cols.finish();
  }

  ptx::cp_async_wait<0>();
  __syncthreads();
  block.store(grad0, p.softmax_scale, kKeyRows ? p.dk : p.dq, block.row_tile[0], p.dk_float);
  if constexpr (kKeyRows) block.store(grad1, 1.f, p.dv, block.row_tile[1], p.dv_float);
}

// The shape of a kernel for a class of head sizes, of the fast path or the generic variant, for chips with kWideShared
// or with kNarrowShared bytes of shared memory a block. Registers bound the columns (sums of one head size per row,
// products of one row with the columns); shared memory bounds the rest.
struct ShapeRow {
  int head_class;
  bool fast_path, wide;
  int rows, cols, row_tiles, split, stages;
};
// Wide shapes take what an A100, H100 or B200 has, narrow ones what every chip since sm_80 has.
constexpr int kWideShared = 163 * 1024, kNarrowShared = 99 * 1024;

template <const auto& kTable, int kHeadDim, bool kFastPath, bool kWide>
struct FoundShape {
  static constexpr ShapeRow find() {
    for (const ShapeRow& row : kTable) {
      if (row.head_class == kHeadDim && row.fast_path == kFastPath && row.wide == kWide) return row;
    }
    return {};  // no rows: Shape doesn't compile
  }
  static constexpr ShapeRow kRow = find();
  using Type = Shape<kRow.rows, kRow.cols, kRow.row_tiles, kRow.split, kRow.stages>;
};
template <const auto& kTable, int kHeadDim, bool kFastPath, bool kWide>
using ShapeOf = typename FoundShape<kTable, kHeadDim, kFastPath, kWide>::Type;

// run(std::integral_constant<int, kHeadDim>{}, std::bool_constant<kFastPath>{}, std::bool_constant<kWide>{},
// Shape<...>{}) for a plan.
template <const auto& kTable, typename Run>
int by_shape(const BackwardPlan& plan, Run run) {
  return by_head_class(plan.head_class, [&](auto width) {
    if (!plan.fast_path)
      return run(width, std::false_type{}, std::false_type{}, ShapeOf<kTable, width, false, false>{});
    if constexpr (width >= 128) {
      if (plan.wide) return run(width, std::true_type{}, std::true_type{}, ShapeOf<kTable, width, true, true>{});
    }
    return run(width, std::true_type{}, std::false_type{}, ShapeOf<kTable, width, true, false>{});
  });
}

// The launch for so many rows in each of so many heads.
template <const auto& kTable, bool kKeyRows>
BackwardLaunch plan_by_shape(const BackwardPlan& plan, int64_t rows, int64_t heads) {
  BackwardLaunch launch{};
  by_shape<kTable>(plan, [&](auto width, auto, auto wide, auto shape) {
    using S = decltype(shape);
    constexpr int kBytes = Layout<S, width, kKeyRows>::kBytes;
    static_assert(kBytes <= (wide ? kWideShared : kNarrowShared));
    launch = {S::kRows, S::kCols, S::kThreads, kBytes, ceil_div(rows, S::kRows) * heads};
    return 0;
  });
  return launch;
}

}  // namespace attnkern::cuda
