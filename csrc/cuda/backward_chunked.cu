// The backward pass where tiles of whole rows don't fit: float32, and 16-bit head sizes above 256. What is computed is
// said in backward.cu, what rows and columns are in backward_tile.cuh; this is another way of going through memory.
//
// Tiles of 64 rows and 64 columns are read by chunks of 256 bytes of the head dimension, one chunk ahead: for the
// scores those of both, for the gradients those of the columns once more. The gradients that a block makes, 64 rows of
// 512 columns in all, stay in registers, 128 of a thread. Between the products the scores change hands through shared
// memory, so that a warp computes 16 rows and 32 columns of them, and then the gradients of 32 rows and a quarter of
// each chunk (float32: of 16 rows and half of it).
//
// Why so. In products of 64 x 64 x head size, dK and dV of one tile are 4: two for the scores, two for the gradients.
// Where both don't fit, for head sizes above 256, one launch makes dV and one dK, (1 + 1) + (2 + 1) = 5; blocks with
// half of each would need 2 (2 + 1) = 6, and tiles of 32 rows 4, but twice the bytes for each product. Read from L2 at
// head size 512, in bytes for each cycle of the 16-bit tensor cores of sm_80, of the 40 or so that it delivers: 32 for
// dV, 40 for dK and dQ, where 163 KiB of shared memory keep 5 chunks of the rows, up to 50 where there are 99. Reads of
// shared memory, in cycles of 128 bytes for each of the tensor cores: 1.5 in 16 bits, 2 in tf32 and 0.7 in three
// products of tf32 for the scores; 1, 1.5 and 0.5 for the gradients. A model, not measured.
#include "cuda/backward.cuh"
#include "cuda/launch.cuh"

namespace attnkern::cuda {
namespace {

constexpr int kRows = 64, kCols = 64;
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWidth = 128;  // of a chunk, in units of 2 bytes
constexpr int kRowTile = kRows * kWidth * 2, kColTile = kCols * kWidth * 2;
constexpr int kScoreTiles = kCols / 2 / 8;  // of a warp: half the columns

// How a kernel's arithmetic is laid out. kDepth: columns of the scores in one step of their products.
template <class Math>
struct Cut {
  static constexpr bool kSingle = std::is_same_v<typename Math::Element, float>;
  static constexpr int kChunk = kWidth / (kSingle ? 2 : 1);  // of the head dimension
  static constexpr int kDepth = kSingle ? 8 : 16;
  static constexpr int kSteps = kCols / kDepth;
  static constexpr uint32_t kHandOver = kSteps * 512 * (kRows / 16);  // bytes of P or of dS, by tiles of 16 x kDepth
  // Of a warp: 32 rows and a quarter of a chunk, or 16 rows and half of one.
  static constexpr int kRowTiles = kSingle ? 1 : 2;
  static constexpr int kDimParts = kThreads / 32 / (kRows / 16 / kRowTiles);
  static constexpr int kDimTiles = kChunk / kDimParts / 8;
  static constexpr int kSlots = 512 / kChunk;  // chunks of the gradients, in 128 registers of a thread
};

struct ChunkedArgs : BackwardArgs {
  int32_t chunks0, chunks1;  // of the head sizes of q and k, and of v and dO; at least 1
  // What a block makes: chunks of dV, then of dK or dQ; together at most kSlots.
  int32_t made1, made0;
  // The rounds of a step: one for each chunk of the scores, of dO V^T if dS is wanted, of dV, of dK or dQ.
  int32_t score_rounds, rounds;
  // Tiles of rows in shared memory. The first `resident` score rounds have theirs all the time, the others, if there
  // are any, share the last two.
  int32_t row_tiles, resident;
};

// Shared memory: 2 tiles of columns; the tiles of rows; the scores that change hands; lse and delta of the columns in
// this step and the next, if those are queries.
constexpr uint32_t kRowTilesAt = 2 * kColTile;

// out += a b for the scores handed over, from a warp's first row on, and a chunk of the columns from `chunk` on.
template <class Math>
__device__ __forceinline__ void add_products(float (&out)[Cut<Math>::kRowTiles][Cut<Math>::kDimTiles][4],
                                             uint32_t scores, uint32_t tile, int chunk) {
  using C = Cut<Math>;
  const int lane = threadIdx.x % 32;
  if constexpr (C::kSingle) {
    constexpr int kAtOnce = 2;
    const float factor[1][2] = {{1.f, 1.f}};
#pragma unroll 1
    for (int first = 0; first < C::kSteps; first += kAtOnce) {
      float a[1][kAtOnce][4];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const uint4 words = ptx::load_shared(scores + (first + n) * 512 + lane * 16);
        a[0][n][0] = __uint_as_float(words.x), a[0][n][1] = __uint_as_float(words.y);
        a[0][n][2] = __uint_as_float(words.z), a[0][n][3] = __uint_as_float(words.w);
      }
      scores_by_columns_tf32<Math::kExact, Tile<kWidth>>(out, 0, factor, a, tile, first * C::kDepth, chunk);
    }
  } else {
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      uint32_t a[C::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        const uint4 words = ptx::load_shared(scores + (m * C::kSteps + step) * 512 + lane * 16);
        a[m][0] = words.x, a[m][1] = words.y, a[m][2] = words.z, a[m][3] = words.w;
      }
#pragma unroll
      for (int n = 0; n < C::kDimTiles; n += 2) {
        uint32_t b[4];  // rows 0-7 and 8-15 at n, then at n + 1
        ptx::ldmatrix<true>(b, Tile<kWidth>::address(tile, step * 16 + lane % 16, chunk + n + lane / 16));
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::mma_m16n8k16<typename Math::Element>(out[m][n], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<typename Math::Element>(out[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
}

// 16 rows of P or of dS, and half of the columns, -> where the warps that add gradients find them.
template <class Math>
__device__ __forceinline__ void hand_over(uint32_t handed_over, int own_row, int own_col,
                                          const float (&tile)[kScoreTiles][4]) {
  using C = Cut<Math>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kScoreTiles; t += C::kDepth / 8) {
    uint4 words;
    if constexpr (C::kSingle) {
      words = make_uint4(__float_as_uint(tile[t][0]), __float_as_uint(tile[t][1]), __float_as_uint(tile[t][2]),
                         __float_as_uint(tile[t][3]));
    } else {
      uint32_t a[4];
      to_operand<typename Math::Element>(a, tile[t], tile[t + 1]);
      words = make_uint4(a[0], a[1], a[2], a[3]);
    }
    const int step = (own_row * kCols + 16 * own_col) / (16 * C::kDepth) + t * 8 / C::kDepth;
    ptx::store_shared(handed_over + step * 512 + lane * 16, words);
  }
}

// Products Q K^T in s and dO V^T in dp -> P, as dV wants it, and dS. The constants of the queries are at `constants` in
// shared memory, if those are columns. Gives the columns that this lane's rows attend to.
template <class Math, bool kKeyRows>
__device__ __forceinline__ uint32_t differentiate_scores(const ChunkedArgs& p, float (&s)[1][kScoreTiles][4],
                                                         float (&dp)[1][kScoreTiles][4], int batch, int head,
                                                         int query_head, [[maybe_unused]] int64_t query_row,
                                                         [[maybe_unused]] const uint8_t* constants, int thread_row,
                                                         int own_col, int thread_col, bool masked) {
  using T = typename Math::Element;
  const int lane = threadIdx.x % 32;
  const HeadScore h = head_score(p.score, batch, query_head);
  uint32_t keep[1][1] = {};
  if (p.score.seeds != nullptr) {
    dropout_bits<kKeyRows, 1, kScoreTiles>(p.score, h, thread_row, thread_col, keep);
  }
  if constexpr (kKeyRows) {
    float col_lse[kScoreTiles][2], col_delta[kScoreTiles][2];
    const uint8_t* at = constants + (own_col + lane % 4 * 2) * 4;
#pragma unroll
    for (int t = 0; t < kScoreTiles; ++t) {
      const float2 l = *reinterpret_cast<const float2*>(at + t * 32);
      const float2 d = *reinterpret_cast<const float2*>(at + kCols * 4 + t * 32);
      col_lse[t][0] = finite_or_far(l.x), col_lse[t][1] = finite_or_far(l.y);
      col_delta[t][0] = d.x, col_delta[t][1] = d.y;
    }
    return to_gradients<T, true, false>(p.score, h, s[0], dp[0], col_lse, col_delta, keep[0], thread_row, thread_col,
                                        masked, [](const auto&) {});
  } else {
    float row_lse[1][2], row_delta[1][2];  // read in every step: registers are short, and it is in L1
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = thread_row + half * 8;
      const bool live = row < p.score.seqlen_q;
      row_lse[0][half] = live ? finite_or_far(p.lse[query_row + row]) : kInfinity;
      row_delta[0][half] = live ? p.delta[query_row + row] : 0.f;
    }
    return to_gradients<T, false, false>(p.score, h, s[0], dp[0], row_lse, row_delta, keep[0], thread_row, thread_col,
                                         masked, [&](const float (&ds)[kScoreTiles][4]) {
                                           if (p.dbias != nullptr)
                                             store_bias_gradients<T>(p, batch, head, ds, thread_row, thread_col);
                                         });
  }
}

// The share of a warp: of the scores 16 rows and half of the columns, of the gradients as in Cut.
template <class Math>
struct WarpShare {
  int row, col, rows, dims;  // rows: in tiles of 16; dims: which part of a chunk

  explicit __device__ __forceinline__ WarpShare(int warp)
      : row(warp / 2 * 16),
        col(warp % 2 * (kCols / 2)),
        rows(warp / Cut<Math>::kDimParts * Cut<Math>::kRowTiles),
        dims(warp % Cut<Math>::kDimParts) {}
};

// A block's gradients, 16 x C::kRowTiles rows from `first_row` on of a warp, -> global memory.
template <class Math, bool kKeyRows>
__device__ __forceinline__ void store_gradients(
    const ChunkedArgs& p, const float (&grad)[Cut<Math>::kSlots][Cut<Math>::kRowTiles][Cut<Math>::kDimTiles][4],
    int batch, int head, int first_row, int seqlen_rows, const WarpShare<Math>& own) {
  using T = typename Math::Element;
  using C = Cut<Math>;
  const int lane = threadIdx.x % 32;
  const Rows& out0 = kKeyRows ? p.dk : p.dq;
#pragma unroll
  for (int slot = 0; slot < C::kSlots; ++slot) {
    const bool values = slot < p.made1;
    if (slot >= p.made1 + p.made0) break;
    const Rows& out = values ? p.dv : out0;
    const bool as_float = std::is_same_v<T, float> || (values ? p.dv_float : kKeyRows && p.dk_float);
    const float factor = values ? 1.f : p.softmax_scale;
    const int first_dim = (values ? slot : slot - p.made1) * C::kChunk + own.dims * C::kDimTiles * 8;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + (own.rows + m) * 16 + half * 8 + lane / 4;
        if (row >= seqlen_rows) continue;
        const int64_t at = batch * out.stride[0] + head * out.stride[1] + row * out.stride[2];
#pragma unroll
        for (int t = 0; t < C::kDimTiles; ++t) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            // As accumulators lie, or as scores_by_columns_tf32 leaves them.
            const int d = first_dim + (C::kSingle ? lane % 4 * 8 + e * 4 + t : t * 8 + lane % 4 * 2 + e);
            const float x = grad[slot][m][t][2 * half + e] * factor;
            if (d >= out.width) continue;
            if (as_float) {
              static_cast<float*>(const_cast<void*>(out.data))[at + d] = x;
            } else {
              static_cast<T*>(const_cast<void*>(out.data))[at + d] = from_float<T>(x);
            }
          }
        }
      }
    }
  }
}

// A block's tiles in shared memory, and what it reads into them.
template <class Math, bool kKeyRows>
struct ChunkedTiles {
  using T = typename Math::Element;
  using C = Cut<Math>;

  const ChunkedArgs& p;
  uint32_t base, handed_over;
  int batch, first_head, first_row;  // first_head: of queries
  int seqlen_rows, seqlen_cols;

  __device__ __forceinline__ int64_t query_row(int h) const {
    return (static_cast<int64_t>(batch) * p.score.heads + h) * p.score.seqlen_q;
  };
  __device__ __forceinline__ uint32_t row_tile(int round, int stage) const {
    return base + kRowTilesAt + (round < p.resident ? round : p.resident + stage) * kRowTile;
  }
  __device__ __forceinline__ uint32_t constants(int parity, int which) const {
    return handed_over + C::kHandOver + (parity * 2 + which) * kCols * 4;
  }
  __device__ __forceinline__ void load_chunk(uint32_t tile, const Rows& rows, int of_head, int chunk, int first,
                                             int length) const {
    Rows at = rows;
    at.width -= chunk * C::kChunk;
    const T* source = head_of<T>(rows, batch, of_head) + chunk * C::kChunk * rows.stride[3];
    load_tile<T, C::kChunk, kRows, kThreads, false>(tile, at, source, first, length);
  }
  __device__ __forceinline__ void load_rows(uint32_t tile, int round) const {
    const int which = round >= p.chunks0, chunk = which ? round - p.chunks0 : round;
    const Rows& rows = kKeyRows ? (which ? p.v : p.k) : (which ? p.grad_out : p.q);
    const int group = kKeyRows ? (which ? p.group_v : p.group_k) : 1;
    load_chunk(tile, rows, first_head / group, chunk, first_row, seqlen_rows);
  }
  // What a round of a step reads: for these queries' head and column.
  __device__ __forceinline__ void load(int stage, int step, int round, int query_head, int col) const {
    const bool scores = round < p.score_rounds;
    const int at = scores ? round : round - p.score_rounds;
    const int before = scores ? p.chunks0 : p.made1;  // of the first kind: for scores those of Q K^T, else of dV
    const int which = (at < before) == scores ? 0 : 1, chunk = at < before ? at : at - before;
    const Rows& cols = kKeyRows ? (which ? p.grad_out : p.q) : (which ? p.v : p.k);
    const int group = kKeyRows ? 1 : (which ? p.group_v : p.group_k);
    load_chunk(base + stage * kColTile, cols, query_head / group, chunk, col, seqlen_cols);
    if (scores && round >= p.resident) load_rows(row_tile(round, stage), round);
    if constexpr (kKeyRows) {
      if (round == 0 && threadIdx.x < 2 * kCols) {
        const int which_constant = threadIdx.x / kCols, n = threadIdx.x % kCols;
        const bool live = col + n < seqlen_cols;
        const float* source = which_constant ? p.delta : p.lse;
        ptx::cp_async<4>(constants(step % 2, which_constant) + n * 4,
                         source + (live ? query_row(query_head) + col + n : 0), live ? 4 : 0);
      }
    }
  }
};

// to = from, which then begins anew if kClear.
template <bool kClear>
__device__ __forceinline__ void take_products(float (&to)[1][kScoreTiles][4], float (&from)[1][kScoreTiles][4]) {
#pragma unroll
  for (int t = 0; t < kScoreTiles; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[0][t][e] = from[0][t][e];
      if (kClear) from[0][t][e] = 0.f;
    }
  }
}

// A round of the gradients: what one chunk of the columns adds to slot number `slot` of them. Behind those of dV, which
// read the probabilities, dS is handed over. `by_scores`: which columns no row attends to has been found by the scores.
template <class Math, bool kKeyRows>
__device__ __forceinline__ void add_gradients(
    const ChunkedArgs& p, float (&grad)[Cut<Math>::kSlots][Cut<Math>::kRowTiles][Cut<Math>::kDimTiles][4],
    const float (&ds)[kScoreTiles][4], const ChunkedTiles<Math, kKeyRows>& tiles,
    const AttendedByWarps<kWarps>& of_warps, bool by_scores, const WarpShare<Math>& own, int slot, int step,
    uint32_t col_tile) {
  using C = Cut<Math>;
  if (slot == p.made1 && p.made1 > 0) {  // the probabilities have been read
    hand_over<Math>(tiles.handed_over, own.row, own.col, ds);
    __syncthreads();
  }
  if (by_scores) {
    clear_unattended<Tile<kWidth>, kCols / 8, kWarps>(col_tile, of_warps.all());
  } else if constexpr (kKeyRows) {
    clear_idle_queries<Tile<kWidth>, kCols, kWarps>(col_tile, tiles.constants(step % 2, 0));
  }
#pragma unroll
  for (int of = 0; of < C::kSlots; ++of) {
    if (of == slot) {
      add_products<Math>(grad[of], tiles.handed_over + own.rows * C::kSteps * 512, col_tile,
                         own.dims * (kWidth / 8 / C::kDimParts));
    }
  }
}

// Registers of a thread, in the loop: 128 of gradients; S and dP of 16 rows and half of the columns, 16 each. A round
// reads one chunk of the columns; see ChunkedArgs for the rounds of a step.
template <class Math, bool kKeyRows>
__global__ void __launch_bounds__(kThreads, 1) chunked_kernel(const __grid_constant__ ChunkedArgs p) {
  using T = typename Math::Element;
  using C = Cut<Math>;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int heads = kKeyRows ? p.heads_out : p.score.heads;
  const int seqlen_rows = kKeyRows ? p.score.seqlen_k : p.score.seqlen_q;
  const int seqlen_cols = kKeyRows ? p.score.seqlen_q : p.score.seqlen_k;

  // Longest first, as in backward_tile.cuh.
  const int batch_head = blockIdx.x % (p.batch * heads), batch = batch_head / heads, head = batch_head % heads;
  const int block = blockIdx.x / (p.batch * heads), blocks = (seqlen_rows + kRows - 1) / kRows;
  const int first_row = (kKeyRows ? block : blocks - 1 - block) * kRows;
  const int first_head = kKeyRows ? head * p.kv_group : head;  // of queries
  const int count = min(kRows, seqlen_rows - first_row);
  if constexpr (!kKeyRows) {
    if (p.dbias != nullptr) store_unreached<T, kThreads, kCols>(p, batch, head, first_row, count);
  }
  auto cols = [&] {
    if constexpr (kKeyRows) {
      return QueryBlocks<kCols>(p.score, batch, first_head, p.kv_group, first_row, count);
    } else {
      return KeyBlocks<kRows, kCols>(p.score, batch, head, first_row, count, {0, seqlen_cols});
    }
  }();
  const auto head_of_columns = [&] {
    if constexpr (kKeyRows) {
      return cols.head();
    } else {
      return head;
    }
  };

  const uint32_t handed_over = base + kRowTilesAt + p.row_tiles * kRowTile;
  const ChunkedTiles<Math, kKeyRows> tiles{p,          base,      handed_over, batch,
                                           first_head, first_row, seqlen_rows, seqlen_cols};
  bool more = !cols.done();
  if (more) {
    for (int round = 0; round < p.resident; ++round) tiles.load_rows(tiles.row_tile(round, 0), round);
    tiles.load(0, 0, 0, head_of_columns(), cols.first());
  }
  ptx::cp_async_commit();

  const WarpShare<Math> own(warp);
  const int thread_row = first_row + own.row + lane / 4;

  __shared__ uint32_t words[kWarps * 4];
  const AttendedByWarps<kWarps> of_warps{ptx::shared_address(words)};
  // Whether the columns that attend to nothing, or that no row attends to, are found by the scores. Queries are known
  // by their lse, unless that is their sink.
  const auto found_by_scores = [&](bool masked) {
    return kKeyRows ? p.score.sinks != nullptr : may_hide<false>(p.score, masked);
  };
  float grad[C::kSlots][C::kRowTiles][C::kDimTiles][4] = {};
  float s[1][kScoreTiles][4], dp[1][kScoreTiles][4] = {};
  int stage = 0, query_head = 0, col = 0;
  bool masked = false;
  for (int step = 0, round = 0; round > 0 || more; stage = 1 - stage) {
    if (round == 0) {
      query_head = head_of_columns(), col = cols.first(), masked = cols.masked();
      cols.advance();
      more = !cols.done();
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (round + 1 < p.rounds) {
      tiles.load(1 - stage, step, round + 1, query_head, col);
    } else if (more) {
      tiles.load(1 - stage, step + 1, 0, head_of_columns(), cols.first());
    }
    ptx::cp_async_commit();
    const uint32_t col_tile = base + stage * kColTile;

    if (round < p.score_rounds) {
      const int which = round >= p.chunks0, chunk = which ? round - p.chunks0 : round;
      if (chunk == 0) take_products<true>(s, dp);  // q k^T is whole: now dO v^T
      // What is left of the head size may need but half a chunk.
      const int left = (which ? p.v.width : p.q.width) - chunk * C::kChunk;
#pragma unroll 1
      for (int half = 0; half < 2 && half * C::kChunk / 2 < left; ++half) {
        Math::template scores<kWidth, kWidth / 32>(dp, tiles.row_tile(round, stage), own.row, col_tile, own.col,
                                                   half * kWidth / 16);
      }

      if (round == p.score_rounds - 1) {
        if (!which) take_products<false>(s, dp);  // dO v^T isn't needed
        const uint32_t attended = differentiate_scores<Math, kKeyRows>(
            p, s, dp, batch, head, query_head, tiles.query_row(head), shared + (tiles.constants(step % 2, 0) - base),
            thread_row, own.col, col + own.col + lane % 4 * 2, masked);
        if (found_by_scores(masked)) {
          of_warps.tell((attended & all_columns<kScoreTiles>()) << warp % 2 * kScoreTiles, warp);
        }
        if (p.made1 > 0) {
          hand_over<Math>(handed_over, own.row, own.col, s[0]);
        } else if (p.made0 > 0) {
          hand_over<Math>(handed_over, own.row, own.col, dp[0]);
        }
      }
    } else {
      add_gradients<Math, kKeyRows>(p, grad, dp[0], tiles, of_warps, found_by_scores(masked), own,
                                    round - p.score_rounds, step, col_tile);
    }

    if (++round == p.rounds) round = 0, ++step;
  }
  ptx::cp_async_wait<0>();

  store_gradients<Math, kKeyRows>(p, grad, batch, head, first_row, seqlen_rows, own);
}

int chunks_of(const BackwardCall& p, int64_t width) {
  const int chunk = p.dtype == DType::kFloat32 ? Cut<Single<true>>::kChunk : Cut<Half<__half>>::kChunk;
  return static_cast<int>(std::max<int64_t>(ceil_div(width, chunk), 1));
}

// Shared memory of a block but for the tiles of rows.
int bytes_beside_rows(const BackwardCall& p) {
  const int handed_over = p.dtype == DType::kFloat32 ? Cut<Single<true>>::kHandOver : Cut<Half<__half>>::kHandOver;
  return static_cast<int>(kRowTilesAt) + handed_over + 2 * 2 * kCols * 4;
}

}  // namespace

void plan_chunked(const BackwardCall& p, int shared_limit, bool bias_by_rows, BackwardPlan& plan) {
  if (std::max(p.head_dim, p.head_dim_v) > kWideHead) return;
  plan.head_class = kWideHead;
  plan.chunked = true;
  const int chunks0 = chunks_of(p, p.head_dim), chunks1 = chunks_of(p, p.head_dim_v);
  const int slots = p.dtype == DType::kFloat32 ? Cut<Single<true>>::kSlots : Cut<Half<__half>>::kSlots;
  // Registers leave room for one block on a multiprocessor, so it may have all the memory.
  const auto cut = [&](int64_t length, int64_t heads, int score_rounds) {
    const int beside = bytes_beside_rows(p), tiles = std::min(score_rounds, (shared_limit - beside) / kRowTile);
    return BackwardLaunch{kRows, kCols, kThreads, beside + tiles * kRowTile, ceil_div(length, kRows) * p.batch * heads};
  };
  static_assert(kRowTilesAt + Cut<Single<true>>::kHandOver + 2 * 2 * kCols * 4 + 2 * kRowTile <= 99 * 1024);
  const bool want_dk = p.dk.data != nullptr, want_dv = p.dv.data != nullptr;
  const bool apart = want_dk && want_dv && chunks0 + chunks1 > slots;
  if (apart) plan.dv = cut(p.seqlen_k, p.heads_out, chunks0);
  if (want_dk || want_dv) plan.dkdv = cut(p.seqlen_k, p.heads_out, chunks0 + (want_dk ? chunks1 : 0));
  if (p.dq.data != nullptr || bias_by_rows) plan.dq = cut(p.seqlen_q, p.heads_q, chunks0 + chunks1);
}

int backward_chunked(const BackwardCall& p, const BackwardPlan& plan, const BackwardArgs& common, void* stream) {
  ChunkedArgs args{common};
  args.chunks0 = chunks_of(p, p.head_dim), args.chunks1 = chunks_of(p, p.head_dim_v);
  return by_math(p, [&](auto math) {
    using Math = decltype(math);
    const auto launch = [&](auto kernel, const BackwardLaunch& cut, bool make1, bool make0, bool need_gradients) {
      args.made1 = make1 ? args.chunks1 : 0, args.made0 = make0 ? args.chunks0 : 0;
      args.score_rounds = args.chunks0 + (need_gradients ? args.chunks1 : 0);
      args.rounds = args.score_rounds + args.made1 + args.made0;
      args.row_tiles = (cut.shared_bytes - bytes_beside_rows(p)) / kRowTile;
      args.resident = args.row_tiles < args.score_rounds ? args.row_tiles - 2 : args.score_rounds;
      return launch_kernel(kernel, cut.blocks, cut.threads, cut.shared_bytes, args, stream);
    };
    const bool apart = plan.dv.blocks > 0, want_dk = p.dk.data != nullptr, want_dv = p.dv.data != nullptr;
    int error = launch(chunked_kernel<Math, true>, plan.dv, true, false, false);
    if (error != cudaSuccess) return error;
    error = launch(chunked_kernel<Math, true>, plan.dkdv, want_dv && !apart, want_dk, want_dk);
    if (error != cudaSuccess) return error;
    return launch(chunked_kernel<Math, false>, plan.dq, false, p.dq.data != nullptr, true);
  });
}

}  // namespace attnkern::cuda
