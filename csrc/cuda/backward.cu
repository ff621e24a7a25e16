// The backward pass, without atomics and so the same in every run: dK and dV by blocks of keys, dQ (and the gradient of
// a bias that has an entry per score) by blocks of queries, the gradient of a broadcast bias by its own tiles. Each
// makes the weights again from the saved log-sum-exp.
//
//   P = exp(S - lse)    dV = P^T dO    dS = P (dO V^T - delta)    dQ = scale dS K    dK = scale dS^T Q    dbias = dS
//
// Tri Dao: "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, section 3.1.2. The
// two loops over the scores cost seven products where one loop with atomic additions to dQ would cost five.
//
// The first two kernels are one: `rows` stay in shared memory, `columns` pass by. For dK and dV rows are keys and
// columns queries, so that P^T and dS^T are left operands of their products in the registers they were made in; for dQ
// rows are queries and columns keys.
//
//   dK, dV:  S^T = K Q^T   dP^T = V dO^T   dV += P^T dO   dK += dS^T Q
//   dQ:      S   = Q K^T   dP   = dO V^T                  dQ += dS K
#include "cuda/backward.cuh"
#include "cuda/launch.cuh"

namespace attnkern::cuda {
namespace {

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

// One block of rows of one head (of dk and dv, or of dq). Grid: blocks of rows * batch * heads, heads fastest.
template <typename T, int kHeadDim, bool kKeyRows, bool kPlain, class S>
__device__ __forceinline__ void backward_block(const BackwardArgs& p) {
  using L = Layout<S, kHeadDim, kKeyRows>;
  constexpr int kRowTiles = S::kRowTiles, kColTiles = S::kWarpCols / 8;
  constexpr int kDimTiles = kHeadDim / S::kSplit / 8;  // of a warp's share of the gradients
  // Where the sums take most of the registers, the loads of half a row of fragments at a time.
  constexpr int kSums = 4 * kRowTiles * ((kKeyRows ? 2 : 1) * kDimTiles + 2 * kColTiles);
  constexpr int kSteps = kHeadDim / 16, kUnrolled = kSums >= 192 && kSteps >= 8 ? kSteps / 2 : kSteps;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t row_tile[2] = {ptx::shared_address(shared), ptx::shared_address(shared) + L::kRowTile};
  const auto col_tile = [&](int stage, int which) {
    return row_tile[0] + L::kStage + (stage * 2 + which) * L::kColTile;
  };
  const auto constants = [&](int stage, int which) {
    return row_tile[0] + L::kConstants + (stage * 2 + which) * S::kCols * 4;
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / S::kSplit, part = warp % S::kSplit;
  const int heads = kKeyRows ? p.heads_out : p.score.heads;
  const int seqlen_rows = kKeyRows ? p.score.seqlen_k : p.score.seqlen_q;
  const int seqlen_cols = kKeyRows ? p.score.seqlen_q : p.score.seqlen_k;
  // Longest first: with a causal band the first keys are reached by the most queries, and the last queries reach the
  // most keys.
  const int batch_head = blockIdx.x % (p.batch * heads), batch = batch_head / heads, head = batch_head % heads;
  const int block = blockIdx.x / (p.batch * heads);
  const int blocks = (seqlen_rows + S::kRows - 1) / S::kRows;
  const int first_row = (kKeyRows ? block : blocks - 1 - block) * S::kRows;
  const int own_row = group * 16 * kRowTiles;                   // of the tile: this warp's first
  const int first_head = kKeyRows ? head * p.group_out : head;  // of queries
  const int group_out = kKeyRows ? p.group_out : 1;

  // The columns that these rows reach, in whole tiles, and those that all of them reach.
  const Band band = kKeyRows ? p.score.band.transposed() : p.score.band;
  const int64_t count = min(S::kRows, seqlen_rows - first_row);
  const Range reached = band.reached(first_row, count, {0, seqlen_cols});
  const Range shared_by_all = band.shared(first_row, count, {0, seqlen_cols});
  const int clean_begin = static_cast<int>(shared_by_all.begin), clean_end = static_cast<int>(shared_by_all.end);
  const Walk walk(reached, S::kCols);
  const int begin = walk.begin, end = walk.end, tiles = walk.blocks(S::kCols);  // per head
  const int steps = tiles * group_out;

  const Rows& rows0 = kKeyRows ? p.k : p.q;
  const Rows& rows1 = kKeyRows ? p.v : p.grad_out;
  const Rows& cols0 = kKeyRows ? p.q : p.k;
  const Rows& cols1 = kKeyRows ? p.grad_out : p.v;
  const auto query_row = [&](int h) { return (static_cast<int64_t>(batch) * p.score.heads + h) * p.score.seqlen_q; };

  // What the next load is about: the head and the column.
  int load_head = first_head, load_col = begin;
  const auto load = [&](int stage) {
    const int h0 = kKeyRows ? load_head : load_head / p.group_k, h1 = kKeyRows ? load_head : load_head / p.group_v;
    const T* head0 = head_of<T>(cols0, batch, h0);
    const T* head1 = head_of<T>(cols1, batch, h1);
    load_tile<T, kHeadDim, S::kCols, S::kThreads, kPlain>(col_tile(stage, 0), cols0, head0, load_col, seqlen_cols);
    load_tile<T, kHeadDim, S::kCols, S::kThreads, kPlain>(col_tile(stage, 1), cols1, head1, load_col, seqlen_cols);
    if constexpr (kKeyRows) {
      static_assert(S::kCols <= S::kThreads);
      if (threadIdx.x < S::kCols) {
        const int64_t at = query_row(load_head) + load_col + threadIdx.x;
        const bool live = load_col + static_cast<int>(threadIdx.x) < seqlen_cols;
        ptx::cp_async<4>(constants(stage, 0) + threadIdx.x * 4, p.lse + (live ? at : 0), live ? 4 : 0);
        ptx::cp_async<4>(constants(stage, 1) + threadIdx.x * 4, p.delta + (live ? at : 0), live ? 4 : 0);
      }
    }
    load_col += S::kCols;
    if (load_col >= end) load_col = begin, ++load_head;
  };

  if (steps > 0) {
    const int h0 = kKeyRows ? first_head / p.group_k : head, h1 = kKeyRows ? first_head / p.group_v : head;
    const T* head0 = head_of<T>(rows0, batch, h0);
    const T* head1 = head_of<T>(rows1, batch, h1);
    load_tile<T, kHeadDim, S::kRows, S::kThreads, kPlain>(row_tile[0], rows0, head0, first_row, seqlen_rows);
    load_tile<T, kHeadDim, S::kRows, S::kThreads, kPlain>(row_tile[1], rows1, head1, first_row, seqlen_rows);
    load(0);
  }
  ptx::cp_async_commit();

  float lse[kRowTiles][1][2], delta[kRowTiles][1][2];  // of the rows, if those are queries
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

  float grad0[kRowTiles][kDimTiles][4] = {};                                // dK or dQ
  float grad1[kKeyRows ? kRowTiles : 1][kKeyRows ? kDimTiles : 1][4] = {};  // dV
  int query_head = first_head, col = begin;
  for (int step = 0; step < steps; ++step) {
    const int stage = step % S::kStages;
    ptx::cp_async_wait<0>();
    __syncthreads();
    if constexpr (S::kStages == 2) {
      if (step + 1 < steps) load(1 - stage);
      ptx::cp_async_commit();
    }

    float s[kRowTiles][kColTiles][4] = {}, dp[kRowTiles][kColTiles][4] = {};
    const int own_col = part * S::kWarpCols;  // of the tile: this warp's first
    Half<T>::template scores<kHeadDim, kSteps, kUnrolled>(s, row_tile[0], own_row, col_tile(stage, 0), own_col, 0);
    Half<T>::template scores<kHeadDim, kSteps, kUnrolled>(dp, row_tile[1], own_row, col_tile(stage, 1), own_col, 0);

    const bool masked = col < clean_begin || col + S::kCols > clean_end;
    HeadScore h{};
    if constexpr (!kPlain) h = head_score(p.score, batch, query_head);
    const int thread_col = col + own_col + lane % 4 * 2;
    uint32_t keep[kRowTiles][(kColTiles + 7) / 8] = {};
    if constexpr (!kPlain) {
      if (p.score.seeds != nullptr) {
        dropout_bits<kKeyRows, kRowTiles, kColTiles>(p.score, h, first_row + own_row + lane / 4, thread_col, keep);
      }
    }
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
        to_gradients<T, true, kPlain>(p.score, h, s[m], dp[m], col_lse, col_delta, keep[m], thread_row, thread_col,
                                      masked, [](const auto&) {});
      } else {
        to_gradients<T, false, kPlain>(p.score, h, s[m], dp[m], lse[m], delta[m], keep[m], thread_row, thread_col,
                                       masked, [&]([[maybe_unused]] const float (&ds)[kColTiles][4]) {
                                         if constexpr (!kPlain) {
                                           if (p.dbias != nullptr)
                                             store_bias_gradients<T>(p, batch, head, ds, thread_row, thread_col);
                                         }
                                       });
      }
    }

    // Operands, and where the other warps of the row group find them: in the order of the lanes, a tile after another.
    uint32_t weights[kKeyRows ? kColTiles / 2 : 1][kRowTiles][4], gradients[kColTiles / 2][kRowTiles][4];
    const auto hand_over = [&](int which, int tile, int m) {
      const int n = (group * (S::kCols / 16) + tile) * kRowTiles + m;
      return row_tile[0] + L::kHandOver + which * L::kMatrix + n * 512 + lane * 16;
    };
#pragma unroll
    for (int n = 0; n < kColTiles / 2; ++n) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if constexpr (kKeyRows) to_operand<T>(weights[n][m], s[m][2 * n], s[m][2 * n + 1]);
        to_operand<T>(gradients[n][m], dp[m][2 * n], dp[m][2 * n + 1]);
        if constexpr (S::kSplit > 1) {
          const int tile = part * (kColTiles / 2) + n;
          const auto give = [&](int which, const uint32_t (&a)[4]) {
            ptx::store_shared(hand_over(which, tile, m), make_uint4(a[0], a[1], a[2], a[3]));
          };
          give(0, gradients[n][m]);
          if constexpr (kKeyRows) give(1, weights[n][m]);
        }
      }
    }

    const int chunk = part * kDimTiles;
#pragma unroll
    for (int n = 0; n < kColTiles / 2; ++n) {
      const int row = own_col + n * 16;
      if constexpr (kKeyRows) gradient_mma<T, kHeadDim>(grad1, weights[n], col_tile(stage, 1), row, chunk);
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

    if constexpr (S::kStages == 1) {
      __syncthreads();
      if (step + 1 < steps) load(0);
      ptx::cp_async_commit();
    }
    col += S::kCols;
    if (col >= end) col = begin, ++query_head;
  }

  // The tiles of rows have done their service: the gradients go through them, so that global memory sees whole lines.
  const auto store = [&](float (&grad)[kRowTiles][kDimTiles][4], float factor, const Rows& out, uint32_t tile,
                         [[maybe_unused]] bool as_float) {
    if (out.data == nullptr) return;
    if constexpr (kKeyRows && !kPlain) {
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
    store_tile<T, kHeadDim, S::kRows, S::kThreads, kPlain>(tile, out, const_cast<T*>(head_of<T>(out, batch, head)), 0,
                                                           first_row, seqlen_rows, threadIdx.x);
  };
  ptx::cp_async_wait<0>();
  __syncthreads();
  store(grad0, p.softmax_scale, kKeyRows ? p.dk : p.dq, row_tile[0], p.dk_float);
  if constexpr (kKeyRows) store(grad1, 1.f, p.dv, row_tile[1], p.dv_float);

  if constexpr (!kKeyRows && !kPlain) {  // the bias' gradient in tiles that no row reaches
    if (p.dbias == nullptr) return;
    store_unreached<T, S::kThreads>(p, batch, head, first_row, static_cast<int>(count), begin,
                                    begin + tiles * S::kCols);
  }
}

// At least one block per multiprocessor: without a number ptxas may spill to make room for two.
template <typename T, int kHeadDim, bool kPlain, class S>
__global__ void __launch_bounds__(S::kThreads, 1) dkdv_kernel(const __grid_constant__ BackwardArgs p) {
  backward_block<T, kHeadDim, true, kPlain, S>(p);
}

template <typename T, int kHeadDim, bool kPlain, class S>
__global__ void __launch_bounds__(S::kThreads, 1) dq_kernel(const __grid_constant__ BackwardArgs p) {
  backward_block<T, kHeadDim, false, kPlain, S>(p);
}

// Queries and keys of a tile of the bias' gradient, and the head dimensions that are in shared memory at a time: sums
// over the head dimension are all that is needed, so that one kernel serves every head size.
constexpr int kBiasTile = 64, kBiasThreads = kBiasTile / 16 * 32;
constexpr int kBiasWidth = 64;  // of a chunk of the head dimension, in units of 2 bytes
constexpr uint32_t kBiasTileBytes = kBiasTile * kBiasWidth * 2;
constexpr uint32_t kBiasSharedBytes = 4 * kBiasTileBytes;

// The gradient of a bias that several scores share: broadcast over batch elements, heads, queries or keys. A block owns
// one tile of it and adds up the score gradients of everything that shares it.
// Grid: tiles of keys (1 if they share) * tiles of queries (1 if they share) * heads of bias * batch elements of bias.
template <class Math>
__global__ void __launch_bounds__(kBiasThreads, 1) bias_gradient_kernel(const __grid_constant__ BackwardArgs p) {
  using T = typename Math::Element;
  constexpr int kTiles = kBiasTile / 8, kBiasChunk = kBiasWidth * 2 / static_cast<int>(sizeof(T));
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int seqlen_q = p.score.seqlen_q, seqlen_k = p.score.seqlen_k;
  const bool rows_share = p.dbias_size[2] == 1, cols_share = p.dbias_size[3] == 1;
  const int row_blocks = (p.dbias_size[2] + kBiasTile - 1) / kBiasTile;
  const int col_blocks = (p.dbias_size[3] + kBiasTile - 1) / kBiasTile;
  const int own_row = blockIdx.x / col_blocks % row_blocks * kBiasTile;
  const int own_col = blockIdx.x % col_blocks * kBiasTile;
  const int own = blockIdx.x / (row_blocks * col_blocks);
  const int own_batch = own / p.dbias_size[1], own_head = own % p.dbias_size[1];
  const int row_end = rows_share ? seqlen_q : min(own_row + kBiasTile, seqlen_q);
  const int col_end = cols_share ? seqlen_k : min(own_col + kBiasTile, seqlen_k);
  const int batches = p.dbias_size[0] == 1 ? p.batch : 1, heads = p.dbias_size[1] == 1 ? p.score.heads : 1;
  const int q_chunks = max(1, (p.q.width + kBiasChunk - 1) / kBiasChunk);
  const int chunks = q_chunks + max(1, (p.v.width + kBiasChunk - 1) / kBiasChunk);

  float sum[kTiles][4] = {};
  for (int n = 0; n < batches * heads; ++n) {
    const int batch = own_batch + n / heads, head = own_head + n % heads;
    const HeadScore h = head_score(p.score, batch, head);
    const int64_t query_row = (static_cast<int64_t>(batch) * p.score.heads + head) * seqlen_q;
    for (int first_row = own_row; first_row < row_end; first_row += kBiasTile) {
      const int count = min(kBiasTile, seqlen_q - first_row);
      const Walk walk(p.score.band.reached(first_row, count, {own_col, col_end}), kBiasTile, own_col);
      float lse[1][2], delta[1][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = first_row + warp * 16 + half * 8 + lane / 4;
        lse[0][half] = i < seqlen_q ? finite_or_far(p.lse[query_row + i]) : kInfinity;
        delta[0][half] = i < seqlen_q ? p.delta[query_row + i] : 0.f;
      }
      for (int first_col = walk.begin; first_col < walk.end; first_col += kBiasTile) {
        // Chunks of Q and K, then of dO and V.
        const auto load = [&](int chunk) {
          const bool scores = chunk < q_chunks;
          const int first = (scores ? chunk : chunk - q_chunks) * kBiasChunk;
          const auto tile = [&](int which, Rows rows, int of_head, int from, int end) {
            rows.width -= first;
            load_tile<T, kBiasChunk, kBiasTile, kBiasThreads, false>(
                base + (chunk % 2 * 2 + which) * kBiasTileBytes, rows,
                head_of<T>(rows, batch, of_head) + first * rows.stride[3], from, end);
          };
          tile(0, scores ? p.q : p.grad_out, head, first_row, seqlen_q);
          tile(1, scores ? p.k : p.v, head / (scores ? p.group_k : p.group_v), first_col, seqlen_k);
        };
        float s[1][kTiles][4], dp[1][kTiles][4] = {};
        __syncthreads();  // the tiles of the round before were read
        load(0);
        ptx::cp_async_commit();
        for (int chunk = 0; chunk < chunks; ++chunk) {
          ptx::cp_async_wait<0>();
          __syncthreads();
          if (chunk + 1 < chunks) load(chunk + 1);
          ptx::cp_async_commit();
          const uint32_t tile = base + chunk % 2 * 2 * kBiasTileBytes;
          if (chunk == q_chunks) {  // q k^T is whole: now dO v^T
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
#pragma unroll
              for (int e = 0; e < 4; ++e) s[0][t][e] = dp[0][t][e], dp[0][t][e] = 0.f;
            }
          }
          Math::template scores<kBiasWidth, kBiasWidth / 16>(dp, tile, warp * 16, tile + kBiasTileBytes, 0, 0);
        }
        const int thread_row = first_row + warp * 16 + lane / 4, thread_col = first_col + lane % 4 * 2;
        uint32_t keep[1][1] = {};
        if (p.score.seeds != nullptr) dropout_bits<false, 1, kTiles>(p.score, h, thread_row, thread_col, keep);
        to_gradients<T, false, false>(p.score, h, s[0], dp[0], lse, delta, keep[0], thread_row, thread_col, true,
                                      [&](const float (&ds)[kTiles][4]) {
#pragma unroll
                                        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
                                          for (int e = 0; e < 4; ++e) sum[t][e] += ds[t][e];
                                        }
                                      });
      }
    }
  }

  const int64_t target = static_cast<int64_t>(own) * p.dbias_size[2] * p.dbias_size[3];
  const auto store = [&](int i, int j, float x) {
    if (i < p.dbias_size[2] && j < p.dbias_size[3]) {
      store_bias_gradient<T>(p, target + static_cast<int64_t>(i) * p.dbias_size[3] + j, x);
    }
  };
  if (!rows_share && !cols_share) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        store(own_row + warp * 16 + e / 2 * 8 + lane / 4, own_col + t * 8 + lane % 4 * 2 + e % 2, sum[t][e]);
      }
    }
    return;
  }
  if (cols_share) {  // into each row's column 0
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = 0.f;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) total += sum[t][2 * half] + sum[t][2 * half + 1];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      sum[0][2 * half] = total;
      if (!rows_share && lane % 4 == 0) store(own_row + warp * 16 + half * 8 + lane / 4, 0, total);
    }
    if (!rows_share) return;
  }
  // Over the rows: within the warp, then over the warps in their order.
  float* totals = reinterpret_cast<float*>(shared);  // [warp][column]
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float total = sum[t][e] + sum[t][e + 2];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) total += __shfl_xor_sync(0xffffffffu, total, distance);
      if (lane < 4) totals[warp * kBiasTile + t * 8 + lane * 2 + e] = total;
    }
  }
  __syncthreads();
  if (threadIdx.x < kBiasTile) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kBiasThreads / 32; ++w) total += totals[w * kBiasTile + threadIdx.x];
    store(0, own_col + threadIdx.x, total);
  }
}

// Shapes. Registers bound the columns (sums of one head size per row, products of one row with the columns); shared
// memory bounds the rest. Wide ones take what an A100, H100 or B200 has, narrow ones what every chip since sm_80 has.
constexpr int kWideShared = 163 * 1024, kNarrowShared = 99 * 1024;

template <int kHeadDim, bool kPlain, bool kWide>
struct DkdvShape;
template <>
struct DkdvShape<32, true, false> {
  using Type = Shape<128, 64, 2, 1, 2>;
};
template <>
struct DkdvShape<64, true, false> {
  using Type = Shape<128, 32, 2, 1, 2>;
};
template <>
struct DkdvShape<96, true, false> {
  using Type = Shape<128, 32, 2, 2, 2>;
};
template <>
struct DkdvShape<128, true, true> {
  using Type = Shape<128, 64, 2, 2, 2>;
};
template <>
struct DkdvShape<128, true, false> {
  using Type = Shape<128, 32, 1, 1, 2>;
};
template <>
struct DkdvShape<192, true, true> {
  using Type = Shape<64, 64, 1, 2, 2>;
};
template <>
struct DkdvShape<192, true, false> {
  using Type = Shape<64, 32, 1, 2, 1>;
};
template <>
struct DkdvShape<256, true, true> {
  using Type = Shape<64, 32, 1, 2, 2>;
};
template <>
struct DkdvShape<256, true, false> {
  using Type = Shape<32, 32, 1, 2, 1>;
};
template <>
struct DkdvShape<32, false, false> {
  using Type = Shape<128, 32, 2, 1, 2>;
};
template <>
struct DkdvShape<64, false, false> {
  using Type = Shape<128, 32, 1, 1, 2>;
};
template <int kHeadDim>
struct DkdvShape<kHeadDim, false, false> : DkdvShape<kHeadDim, true, false> {};

template <int kHeadDim, bool kPlain, bool kWide>
struct DqShape;
template <>
struct DqShape<32, true, false> {
  using Type = Shape<128, 64, 2, 1, 2>;
};
template <>
struct DqShape<64, true, false> {
  using Type = Shape<128, 64, 2, 1, 2>;
};
template <>
struct DqShape<96, true, false> {
  using Type = Shape<128, 32, 2, 1, 2>;
};
template <>
struct DqShape<128, true, true> {
  using Type = Shape<128, 64, 2, 2, 2>;
};
template <>
struct DqShape<128, true, false> {
  using Type = Shape<128, 32, 1, 1, 2>;
};
template <>
struct DqShape<192, true, true> {
  using Type = Shape<128, 32, 2, 2, 2>;
};
template <>
struct DqShape<192, true, false> {
  using Type = Shape<64, 32, 1, 1, 2>;
};
template <>
struct DqShape<256, true, true> {
  using Type = Shape<64, 32, 1, 2, 2>;
};
template <>
struct DqShape<256, true, false> {
  using Type = Shape<64, 16, 1, 1, 2>;
};
template <>
struct DqShape<32, false, false> {
  using Type = Shape<128, 32, 2, 1, 2>;
};
template <>
struct DqShape<64, false, false> {
  using Type = Shape<128, 32, 2, 1, 2>;
};
template <>
struct DqShape<96, false, false> {
  using Type = Shape<128, 32, 1, 1, 2>;
};
template <int kHeadDim>
struct DqShape<kHeadDim, false, false> : DqShape<kHeadDim, true, false> {};

// run(std::bool_constant<kPlain>{}, std::bool_constant<kWide>{}) for a plan.
template <int kHeadDim, typename Run>
int by_variant(const BackwardPlan& plan, Run run) {
  if (!plan.plain) return run(std::false_type{}, std::false_type{});
  if constexpr (kHeadDim >= 128) {
    if (plan.wide) return run(std::true_type{}, std::true_type{});
  }
  return run(std::true_type{}, std::false_type{});
}

bool is_full_size(const Backward& p) {
  return p.bias_size[0] == p.batch && p.bias_size[1] == p.heads_q && p.bias_size[2] == p.seqlen_q &&
         p.bias_size[3] == p.seqlen_k;
}

BackwardArgs arguments(const BackwardCall& p, const BackwardPlan& plan) {
  BackwardArgs a{};
  a.score = score_of(p, plan.plain);
  const auto rows = [&](const View& view, int64_t width) {
    return rows_of(view, width, p.dtype == DType::kFloat32 ? 4 : 2);
  };
  a.q = rows(p.q, p.head_dim), a.k = rows(p.k, p.head_dim), a.v = rows(p.v, p.head_dim_v);
  a.grad_out = rows(p.grad_out, p.head_dim_v);
  a.dq = rows(p.dq, p.head_dim), a.dk = rows(p.dk, p.head_dim), a.dv = rows(p.dv, p.head_dim_v);
  a.lse = static_cast<const float*>(p.lse);
  a.delta = p.row_delta;
  a.dbias = p.dbias.data;
  for (int n = 0; n < 4; ++n) a.dbias_size[n] = static_cast<int32_t>(p.bias_size[n]);
  a.dbias_stride[0] = p.bias_size[1] * p.bias_size[2] * p.bias_size[3];
  a.dbias_stride[1] = p.bias_size[2] * p.bias_size[3];
  a.dbias_stride[2] = p.bias_size[3];
  a.softmax_scale = static_cast<float>(p.softmax_scale);
  a.batch = static_cast<int32_t>(p.batch);
  a.heads_out = static_cast<int32_t>(p.heads_out);
  a.group_k = static_cast<int32_t>(p.heads_q / p.heads_k), a.group_v = static_cast<int32_t>(p.heads_q / p.heads_v);
  a.group_out = static_cast<int32_t>(p.heads_q / p.heads_out);
  a.dk_float = p.heads_out > p.heads_k, a.dv_float = p.heads_out > p.heads_v;
  return a;
}

// The plan where tiles hold whole rows.
void plan_tiles(const BackwardCall& p, int shared_limit, bool bias_by_rows, BackwardPlan& plan) {
  plan.head_class = head_class(p.head_dim, p.head_dim_v);
  const auto vector = [](const View& view, int64_t width) { return rows_of(view, width).vector; };
  plan.plain = is_plain(p) && p.heads_out == p.heads_k && p.heads_out == p.heads_v && vector(p.q, p.head_dim) &&
               vector(p.k, p.head_dim) && vector(p.v, p.head_dim_v) && vector(p.grad_out, p.head_dim_v) &&
               vector(p.dq, p.head_dim) && vector(p.dk, p.head_dim) && vector(p.dv, p.head_dim_v);
  plan.wide = plan.plain && plan.head_class >= 128 && shared_limit >= kWideShared;
  by_head_class(plan.head_class, [&](auto width) {
    return by_variant<width>(plan, [&](auto plain, auto wide) {
      using Dkdv = typename DkdvShape<width, plain, wide>::Type;
      using Dq = typename DqShape<width, plain, wide>::Type;
      constexpr int kDkdvBytes = Layout<Dkdv, width, true>::kBytes, kDqBytes = Layout<Dq, width, false>::kBytes;
      static_assert(kDkdvBytes <= (wide ? kWideShared : kNarrowShared));
      static_assert(kDqBytes <= (wide ? kWideShared : kNarrowShared));
      if (p.dk.data != nullptr || p.dv.data != nullptr) {
        const int64_t blocks = ceil_div(p.seqlen_k, Dkdv::kRows) * p.batch * p.heads_out;
        plan.dkdv = {Dkdv::kRows, Dkdv::kCols, Dkdv::kThreads, kDkdvBytes, blocks};
      }
      if (p.dq.data != nullptr || bias_by_rows) {
        const int64_t blocks = ceil_div(p.seqlen_q, Dq::kRows) * p.batch * p.heads_q;
        plan.dq = {Dq::kRows, Dq::kCols, Dq::kThreads, kDqBytes, blocks};
      }
      return 0;
    });
  });
}

}  // namespace

BackwardPlan plan_backward(const BackwardCall& p, int shared_limit) {
  BackwardPlan plan{};
  if (p.batch * p.heads_q == 0) return plan;
  const bool bias_by_rows = p.dbias.data != nullptr && is_full_size(p);
  if (p.dtype == DType::kFloat32 || std::max(p.head_dim, p.head_dim_v) > kMostHead) {
    plan_chunked(p, shared_limit, bias_by_rows, plan);
  } else {
    plan_tiles(p, shared_limit, bias_by_rows, plan);
  }
  if (plan.head_class == 0) return plan;
  if (p.dbias.data != nullptr && !bias_by_rows) {
    const int64_t blocks =
        ceil_div(p.bias_size[2], kBiasTile) * ceil_div(p.bias_size[3], kBiasTile) * p.bias_size[0] * p.bias_size[1];
    plan.dbias = {kBiasTile, kBiasTile, kBiasThreads, static_cast<int>(kBiasSharedBytes), blocks};
  }
  return plan;
}

int backward(const BackwardCall& p, const Chip& chip, void* stream) {
  const BackwardPlan plan = plan_backward(p, chip.shared_per_block);
  if (p.batch * p.heads_q == 0) return cudaSuccess;
  if (plan.head_class == 0) return cudaErrorInvalidValue;
  BackwardArgs args = arguments(p, plan);
  if (plan.dbias.blocks > 0) {
    const int error = by_math(p, [&](auto math) {
      return launch_kernel(bias_gradient_kernel<decltype(math)>, plan.dbias.blocks, plan.dbias.threads,
                           plan.dbias.shared_bytes, args, stream);
    });
    if (error != cudaSuccess) return error;
    args.dbias = nullptr;  // not dq_kernel's business
  }
  if (plan.chunked) return backward_chunked(p, plan, args, stream);
  return by_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    return by_head_class(plan.head_class, [&](auto width) {
      return by_variant<width>(plan, [&](auto plain, auto wide) {
        using Dkdv = typename DkdvShape<width, plain, wide>::Type;
        using Dq = typename DqShape<width, plain, wide>::Type;
        const int error = launch_kernel(dkdv_kernel<T, width, plain, Dkdv>, plan.dkdv.blocks, plan.dkdv.threads,
                                        plan.dkdv.shared_bytes, args, stream);
        if (error != cudaSuccess) return error;
        return launch_kernel(dq_kernel<T, width, plain, Dq>, plan.dq.blocks, plan.dq.threads, plan.dq.shared_bytes,
                             args, stream);
      });
    });
  });
}

}  // namespace attnkern::cuda
