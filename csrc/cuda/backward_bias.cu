// The gradient of a bias that several scores share: of one that is broadcast by its own tiles, of a table of distances
// by bands of tiles. backward.cu says what is computed.
#include "cuda/backward.cuh"
#include "cuda/launch.cuh"

namespace attnkern::cuda {
namespace {

// Queries and keys of a tile of the bias' gradient, and the head dimensions that are in shared memory at a time: sums
// over the head dimension are all that is needed, so that one kernel serves every head size.
constexpr int kBiasTile = 64, kBiasThreads = kBiasTile / 16 * 32;
constexpr int kBiasWidth = 64;  // of a chunk of the head dimension, in units of 2 bytes
constexpr uint32_t kBiasTileBytes = kBiasTile * kBiasWidth * 2;
constexpr uint32_t kBiasSharedBytes = 4 * kBiasTileBytes;
// Of a band of tiles: its distances, and one more. Bands are cut into walks up to so many blocks, several for a
// multiprocessor.
constexpr int kBandWidth = 2 * kBiasTile;
constexpr int64_t kTableBlocks = 1024;

// A block's sums -> its tile of the gradient, `own` the head and batch element of the bias; queries or keys that share
// an entry are added up first. shared: where warps meet.
template <typename T, int kTiles>
__device__ __forceinline__ void store_sums(const BackwardArgs& p, uint8_t* shared, float (&sum)[kTiles][4], int own,
                                           int own_row, int own_col, bool rows_share, bool cols_share) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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

// The tiles whose score gradients a block adds up: of these heads, from one row to another, of some keys.
struct OwnTiles {
  int batch, batches, head, heads;
  int row, row_end, row_step;
  int col, col_end;
  __device__ __forceinline__ Range keys(int) const { return {col, col_end}; }
};
// Those of a band: from one to the next, the first key moves as far as the first query.
struct BandTiles : OwnTiles {
  __device__ __forceinline__ Range keys(int first_row) const {
    return {first_row + col, min(first_row + col + kBiasTile, col_end)};
  }
};

// Registers of a thread: the sums, S and dP, 32 each. Shared memory: chunks of two tiles, Q and K or dO and V, twice.
template <class Math, class Tiles>
__device__ __forceinline__ void add_tiles(const BackwardArgs& p, uint32_t shared, const Tiles& tiles,
                                          float (&sum)[kBiasTile / 8][4]) {
  using T = typename Math::Element;
  constexpr int kTiles = kBiasTile / 8, kBiasChunk = kBiasWidth * 2 / static_cast<int>(sizeof(T));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int seqlen_q = p.score.seqlen_q, seqlen_k = p.score.seqlen_k;
  const int q_chunks = max(1, (p.q.width + kBiasChunk - 1) / kBiasChunk);
  const int chunks = q_chunks + max(1, (p.v.width + kBiasChunk - 1) / kBiasChunk);
  for (int n = 0; n < tiles.batches * tiles.heads; ++n) {
    const int batch = tiles.batch + n / tiles.heads, head = tiles.head + n % tiles.heads;
    const HeadScore h = head_score(p.score, batch, head);
    const int64_t query_row = (static_cast<int64_t>(batch) * p.score.heads + head) * seqlen_q;
    for (int first_row = tiles.row; first_row < tiles.row_end; first_row += tiles.row_step) {
      const int count = min(kBiasTile, seqlen_q - first_row);
      KeyBlocks<kBiasTile, kBiasTile> cols(p.score, batch, head, first_row, count, tiles.keys(first_row));
      float lse[1][2], delta[1][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = first_row + warp * 16 + half * 8 + lane / 4;
        lse[0][half] = i < seqlen_q ? finite_or_far(p.lse[query_row + i]) : kInfinity;
        delta[0][half] = i < seqlen_q ? p.delta[query_row + i] : 0.f;
      }
      for (; !cols.done(); cols.advance()) {
        const int first_col = cols.first();
        // Chunks of Q and K, then of dO and V.
        const auto load = [&](int chunk) {
          const bool scores = chunk < q_chunks;
          const int first = (scores ? chunk : chunk - q_chunks) * kBiasChunk;
          const auto tile = [&](int which, Rows rows, int of_head, int from, int end) {
            rows.width -= first;
            load_tile<T, kBiasChunk, kBiasTile, kBiasThreads, false>(
                shared + (chunk % 2 * 2 + which) * kBiasTileBytes, rows,
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
          const uint32_t tile = shared + chunk % 2 * 2 * kBiasTileBytes;
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
        __builtin_assume(!p.score.in_bits);  // a mask has no gradient
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
}

// The gradient of a bias that several scores share: broadcast over batch elements, heads, queries or keys. A block owns
// one tile of it and adds up the score gradients of everything that shares it.
// Grid: tiles of keys (1 if they share) * tiles of queries (1 if they share) * heads of bias * batch elements of bias.
template <class Math>
__global__ void __launch_bounds__(kBiasThreads, 1) bias_gradient_kernel(const __grid_constant__ BackwardArgs p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int seqlen_q = p.score.seqlen_q, seqlen_k = p.score.seqlen_k;
  const bool rows_share = p.dbias_size[2] == 1, cols_share = p.dbias_size[3] == 1;
  const int row_blocks = (p.dbias_size[2] + kBiasTile - 1) / kBiasTile;
  const int col_blocks = (p.dbias_size[3] + kBiasTile - 1) / kBiasTile;
  const int own_row = blockIdx.x / col_blocks % row_blocks * kBiasTile;
  const int own_col = blockIdx.x % col_blocks * kBiasTile;
  const int own = blockIdx.x / (row_blocks * col_blocks);
  OwnTiles tiles;
  tiles.batch = own / p.dbias_size[1], tiles.batches = p.dbias_size[0] == 1 ? p.batch : 1;
  tiles.head = own % p.dbias_size[1], tiles.heads = p.dbias_size[1] == 1 ? p.score.heads : 1;
  tiles.row = own_row, tiles.row_end = rows_share ? seqlen_q : min(own_row + kBiasTile, seqlen_q);
  tiles.row_step = kBiasTile;
  tiles.col = own_col, tiles.col_end = cols_share ? seqlen_k : min(own_col + kBiasTile, seqlen_k);

  float sum[kBiasTile / 8][4] = {};
  add_tiles<Math>(p, ptx::shared_address(shared), tiles, sum);
  store_sums<typename Math::Element>(p, shared, sum, own, own_row, own_col, rows_share, cols_share);
}

// The gradient of a table of distances: its sums by bands, of which each has the tiles whose first key is equally far
// from their first query. What is at the same place of a band's tiles adds up as it is; along the diagonals it adds up
// once, at the end. A band's tiles are dealt out to so many walks.
// Grid: walks * heads * batch * bands, the last bands first: with a causal band they have the most tiles.
template <class Math>
__global__ void __launch_bounds__(kBiasThreads, 1) table_sums_kernel(const __grid_constant__ BackwardArgs p) {
  constexpr int kTiles = kBiasTile / 8;
  constexpr int kStep = kBiasTile + 1;  // in shared memory, where neighbouring rows are in other banks
  static_assert(kBiasTile * kStep * 4 <= kBiasSharedBytes && kBandWidth == kBiasThreads);
  extern __shared__ __align__(128) uint8_t shared[];
  const TableBands& bands = p.table;
  const int walk = blockIdx.x % bands.walks, batch_head = blockIdx.x / bands.walks % (p.batch * p.score.heads);
  const int band = bands.count - 1 - blockIdx.x / (bands.walks * p.batch * p.score.heads);
  const int ahead = (bands.first + band) * kBiasTile;
  BandTiles tiles;
  tiles.batch = batch_head / p.score.heads, tiles.batches = 1;
  tiles.head = batch_head % p.score.heads, tiles.heads = 1;
  tiles.row = max(-ahead, 0) + walk * kBiasTile;
  tiles.row_end = min(p.score.seqlen_q, p.score.seqlen_k - ahead), tiles.row_step = bands.walks * kBiasTile;
  tiles.col = ahead, tiles.col_end = p.score.seqlen_k;

  float sum[kTiles][4] = {};
  add_tiles<Math>(p, ptx::shared_address(shared), tiles, sum);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* sums = reinterpret_cast<float*>(shared);
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sums[(warp * 16 + e / 2 * 8 + lane / 4) * kStep + t * 8 + lane % 4 * 2 + e % 2] = sum[t][e];
    }
  }
  __syncthreads();
  // A thread per diagonal, from the last query and the first key on.
  const int distance = static_cast<int>(threadIdx.x) - (kBiasTile - 1);
  float total = 0.f;
  for (int row = max(-distance, 0); row < min(kBiasTile - distance, kBiasTile); ++row) {
    total += sums[row * kStep + row + distance];
  }
  const int64_t number = (static_cast<int64_t>(batch_head) * bands.walks + walk) * bands.count + band;
  bands.sums[number * kBandWidth + threadIdx.x] = total;
}

// The sums of the bands -> the table's gradient. A thread per entry, which adds up the two bands that have its
// distance, over all walks and what shares the table, in a fixed order. Grid: entries * heads * batch elements of the
// table.
template <typename T>
__global__ void __launch_bounds__(kBiasThreads) table_gradient_kernel(const __grid_constant__ BackwardArgs p) {
  const TableBands& bands = p.table;
  const int entries = p.score.seqlen_q + p.score.seqlen_k - 1, chunks = (entries + kBiasThreads - 1) / kBiasThreads;
  const int entry = blockIdx.x % chunks * kBiasThreads + threadIdx.x, own = blockIdx.x / chunks;
  if (entry >= entries) return;
  const int own_batch = own / p.dbias_size[1], own_head = own % p.dbias_size[1];
  const int batches = p.dbias_size[0] == 1 ? p.batch : 1, heads = p.dbias_size[1] == 1 ? p.score.heads : 1;
  // Of the first band that may have it.
  const int distance = entry - (p.score.seqlen_q - 1), last = (distance & kBiasTile - 1) + kBiasTile - 1;
  const int band = (distance - (distance & kBiasTile - 1)) / kBiasTile - bands.first;
  float total = 0.f;
  for (int n = 0; n < batches * heads; ++n) {
    const int64_t batch_head = static_cast<int64_t>(own_batch + n / heads) * p.score.heads + own_head + n % heads;
    for (int walk = 0; walk < bands.walks; ++walk) {
      const float* sums = bands.sums + (batch_head * bands.walks + walk) * bands.count * kBandWidth;
      if (band >= 0 && band < bands.count) total += sums[band * kBandWidth + last];
      if (last >= kBiasTile && band + 1 >= 0 && band + 1 < bands.count) {
        total += sums[(band + 1) * kBandWidth + last - kBiasTile];
      }
    }
  }
  store_bias_gradient<T>(p, static_cast<int64_t>(own) * entries + entry, total);
}

}  // namespace

void plan_bias_gradient(const Backward& p, BackwardPlan& plan) {
  plan.dbias = {kBiasTile, kBiasTile, kBiasThreads, static_cast<int>(kBiasSharedBytes), 0};
  if (!p.relative) {
    plan.dbias.blocks =
        ceil_div(p.bias_size[2], kBiasTile) * ceil_div(p.bias_size[3], kBiasTile) * p.bias_size[0] * p.bias_size[1];
    return;
  }
  // The distances at which some query may see a key are the keys that the first query would see, before the first key
  // as well.
  const Range seen = p.band.visited(0, 1, {1 - p.seqlen_q, p.seqlen_k});
  const auto band_of = [](int64_t distance) {
    const int64_t within = (distance % kBiasTile + kBiasTile) % kBiasTile;
    return (distance - within) / kBiasTile;
  };
  TablePlan& table = plan.table;
  table.bands = 0, table.walks = 1;
  if (seen.begin < seen.end) {
    const int64_t rows = ceil_div(p.seqlen_q, kBiasTile), columns = ceil_div(p.seqlen_k, kBiasTile);
    const int64_t first = std::max(band_of(seen.begin), 1 - rows);
    const int64_t last = std::min(band_of(seen.end - 1 + kBiasTile - 1), columns - 1);
    const int64_t most = kTableBlocks / (p.batch * p.heads_q * (last - first + 1));
    table.first = static_cast<int>(first), table.bands = static_cast<int>(last - first + 1);
    table.walks = static_cast<int>(std::max<int64_t>(1, std::min(most, std::min(rows, columns) / 2)));
  }
  plan.dbias.blocks = p.batch * p.heads_q * table.bands * table.walks;
  table.sums = plan.dbias.blocks * kBandWidth;
  table.add_up = ceil_div(p.seqlen_q + p.seqlen_k - 1, kBiasThreads) * p.bias_size[0] * p.bias_size[1];
}

int launch_bias_gradient(const Backward& p, const BackwardPlan& plan, const BackwardArgs& args, void* stream) {
  return by_math(p, [&](auto math) {
    using Math = decltype(math);
    const auto launch = [&](auto kernel) {
      return launch_kernel(kernel, plan.dbias.blocks, plan.dbias.threads, plan.dbias.shared_bytes, args, stream);
    };
    if (!p.relative) return launch(bias_gradient_kernel<Math>);
    if (plan.dbias.blocks > 0) {
      if (const int error = launch(table_sums_kernel<Math>); error != cudaSuccess) return error;
    }
    return launch_kernel(table_gradient_kernel<typename Math::Element>, plan.table.add_up, kBiasThreads, 0, args,
                         stream);
  });
}

}  // namespace attnkern::cuda
