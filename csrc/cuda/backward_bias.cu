// The gradient of a bias that several scores share, by its own tiles. backward.cu says what is computed.
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

// The gradient of a bias that several scores share: broadcast over batch elements, heads, queries or keys. A block owns
// one tile of it and adds up the score gradients of everything that shares it.
// Registers of a thread: the sums, S and dP, 32 each. Shared memory: chunks of two tiles, Q and K or dO and V, twice.
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
      KeyBlocks<kBiasTile, kBiasTile> cols(p.score, batch, head, first_row, count, {own_col, col_end});
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

  store_sums<T>(p, shared, sum, own, own_row, own_col, rows_share, cols_share);
}

}  // namespace

BackwardLaunch plan_bias_gradient(const Backward& p) {
  const int64_t blocks =
      ceil_div(p.bias_size[2], kBiasTile) * ceil_div(p.bias_size[3], kBiasTile) * p.bias_size[0] * p.bias_size[1];
  return {kBiasTile, kBiasTile, kBiasThreads, static_cast<int>(kBiasSharedBytes), blocks};
}

int launch_bias_gradient(const Backward& p, const BackwardPlan& plan, const BackwardArgs& args, void* stream) {
  return by_math(p, [&](auto math) {
    return launch_kernel(bias_gradient_kernel<decltype(math)>, plan.dbias.blocks, plan.dbias.threads,
                         plan.dbias.shared_bytes, args, stream);
  });
}

}  // namespace attnkern::cuda
