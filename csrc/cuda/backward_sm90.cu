// The backward pass on Hopper (sm_90a): the two deterministic kernels of backward_tile.cuh, dK and dV by blocks of keys
// and dQ by blocks of queries, with TMA, wgmma and warp specialisation. Same definitions, same walk over the band. And
// one for all three gradients, whose blocks add to dQ in global memory in whatever order they come.
//
//   dK, dV:  S^T = K Q^T   dP^T = V dO^T   dV += P^T dO   dK += dS^T Q
//   dQ:      S   = Q K^T   dP   = dO V^T                  dQ += dS K
//
// `rows` (64 for each of two consumer warpgroups) stay in shared memory, tiles of `columns` pass by in a pipeline that
// the producer warpgroup fills: first the tile that makes S, then the one that makes dP. Scores come out of wgmma as
// the left operand of the gradients' products wants them, so P and dS never leave the registers. (Swapped products:
// Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024.)
//
// A step of a consumer; what is in flight runs beside the arithmetic at the same height:
//
//   dK, dV   S    wait S; exponentials, P  | dP        dQ   S    wait S; exponentials | dP
//            dV   wait dP; dS              | dV             wait dP; dS
//            dK   wait dV, dK                               dQ   wait dQ
#include "cuda/backward_sm90.cuh"
#include "cuda/launch.cuh"

namespace attnkern::cuda {
namespace {

// Beside the fast path the first rows are under way before it is known whether they are needed: then they are waited
// for in any case, since shared memory must not be written meanwhile.
template <class S>
__device__ __forceinline__ void wait_for_first_rows(const Block<S>& block, const Shared<S>& shared) {
  if (block.any || !S::kFastPath) ptx::mbarrier_wait(shared.rows_full(0), 0);
}

template <class S>
__device__ __forceinline__ void consume_dkdv(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared,
                                             int consumer) {
  constexpr int kTiles = S::kCols / 8;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row = block.first_row + consumer * kGroupRows, thread_row = row + warp * 16 + lane / 4;
  const uint32_t k_tile = shared.rows(0, consumer), v_tile = shared.rows(1, consumer);

  float dk[S::kHeadDim / 8][4] = {}, dv[S::kHeadDim / 8][4] = {};
  wait_for_first_rows<S>(block, shared);
  if (block.any) {
    ptx::mbarrier_wait(shared.rows_full(1), 0);
  }
  PipelineState<S::kSlots> at;
  Columns<S> columns(p, block);
#pragma unroll 1
  for (int step = 0; columns.more(); ++step) {
    const auto q = at;
    at.advance();
    const auto grad_out = at;
    at.advance();
    float s[kTiles][4], dp[kTiles][4];
    ptx::mbarrier_wait(shared.full(q.stage), q.parity);
    columns.advance(shared, q.stage);
    scores<S>(s, k_tile, shared.cols(q.stage));
    ptx::mbarrier_wait(shared.full(grad_out.stage), grad_out.parity);
    scores<S>(dp, v_tile, shared.cols(grad_out.stage));
    ptx::wgmma_wait<1>();
    ptx::hold(s);

    columns.mask(p, block, shared, q.stage, s, thread_row);
    uint32_t probabilities[S::kCols / 16][4], gradients[S::kCols / 16][4];
    to_probabilities<S>(p.score, shared, q.stage, s, probabilities);
    add_gradients<S>(dv, probabilities, shared.cols(grad_out.stage));
    ptx::wgmma_wait<1>();
    ptx::hold(dp);
    to_gradients<S>(shared, grad_out.stage, s, dp, gradients);
    if constexpr (S::kFused) hand_out_scores<S>(shared, step, consumer, gradients);
    add_gradients<S>(dk, gradients, shared.cols(q.stage));
    [[maybe_unused]] float dq[kSumTiles][4];
    if constexpr (S::kFused) start_dq<S>(shared, step, consumer, dq);
    ptx::wgmma_wait<0>();
    ptx::hold(dv);
    ptx::hold(probabilities);
    ptx::hold(dk);
    ptx::hold(gradients);
    if constexpr (S::kFused) ptx::hold(dq);
    release(shared, q.stage, grad_out.stage);
    if constexpr (S::kFused) add_dq<S>(p, block, shared, columns.head(), columns.col(), consumer, dq);
  }
  if constexpr (S::kFused) ptx::barrier_sync(kExchanged, kConsumers * kWarpgroup);  // both have read all of K for dQ
  if (p.wanted[0]) store_gradient<S>(p, 0, block, row, own_barrier(consumer), k_tile, dk, p.softmax_scale);
  if (p.wanted[1]) store_gradient<S>(p, 1, block, row, own_barrier(consumer), v_tile, dv, 1.f);
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
  wait_for_first_rows<S>(block, shared);
  PipelineState<S::kSlots> at;
  Columns<S> columns(p, block);
#pragma unroll 1
  for (int step = 0; columns.more(); ++step) {
    const auto q = at;
    at.advance();
    const auto grad_out = at;
    at.advance();
    float s[kTiles][4];
    ptx::mbarrier_wait(shared.full(q.stage), q.parity);
    columns.advance(shared, q.stage);
    scores<S>(s, k_tile, shared.cols(q.stage));
    ptx::wgmma_wait<0>();
    ptx::hold(s);
    columns.mask(p, block, shared, q.stage, s, thread_row);
    uint32_t probabilities[S::kCols / 16][4];
    to_probabilities<S>(p.score, shared, q.stage, s, probabilities);
    ptx::mbarrier_wait(shared.full(grad_out.stage), grad_out.parity);
    add_gradients<S>(dv, probabilities, shared.cols(grad_out.stage));
    ptx::mbarrier_wait(shared.handed_empty(), step & 1 ^ 1);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      ptx::store_shared(shared.handed(n), as_words(s[n]));
    }
    arrive(shared.handed_full());
    ptx::wgmma_wait<0>();
    ptx::hold(dv);
    ptx::hold(probabilities);
    release(shared, q.stage, grad_out.stage);
  }
  if (p.wanted[1]) store_gradient<S>(p, 1, block, block.first_row, 1, k_tile, dv, 1.f);
}

// The second one: dS and dK.
template <class S>
__device__ __forceinline__ void consume_dk(const BackwardSm90Args& p, const Block<S>& block, const Shared<S>& shared) {
  constexpr int kTiles = S::kCols / 8;
  const uint32_t v_tile = shared.rows(1, 0);
  float dk[S::kHeadDim / 8][4] = {};
  if (block.any) ptx::mbarrier_wait(shared.rows_full(1), 0);
  PipelineState<S::kSlots> at;
  Columns<S> columns(p, block);
#pragma unroll 1
  for (int step = 0; columns.more(); ++step) {
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
    columns.advance(shared, q.stage);
    add_gradients<S>(dk, gradients, shared.cols(q.stage));
    ptx::wgmma_wait<0>();
    ptx::hold(dk);
    ptx::hold(gradients);
    release(shared, q.stage, grad_out.stage);
  }
  if (p.wanted[0]) store_gradient<S>(p, 0, block, block.first_row, 2, v_tile, dk, p.softmax_scale);
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
  wait_for_first_rows<S>(block, shared);
  if (block.any) {
    ptx::mbarrier_wait(shared.rows_full(1), 0);
    ptx::mbarrier_wait(shared.full(0), 0);
  }
  PipelineState<S::kSlots> at;
  Columns<S> columns(p, block);
#pragma unroll 1
  while (columns.more()) {
    columns.advance(shared, at.stage);
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

    columns.mask(p, block, shared, k.stage, s, thread_row);
    by_softcap<S>(p.score, [&](auto softcap) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) probability_of<softcap>(p.score, s[n][e], constant[e / 2]);
      }
    });
    ptx::hold(s);
    // The next step's tile is waited for here: ptxas would move the exponentials behind the wait for dP, where nothing
    // runs beside them, but not across this loop.
    if (columns.more()) ptx::mbarrier_wait(shared.full(at.stage), at.parity);
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
  }
  store_gradient<S>(p, 0, block, row, own_barrier(consumer), q_tile, dq, p.softmax_scale);
}

template <class S>
__device__ __forceinline__ void backward_block(const BackwardSm90Args& p) {
  static_assert(S::kBytes <= kMostShared);
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<S> shared{ptx::shared_address(memory)};
  Block<S> block(p);
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
    // Where the columns have to be looked for, the rows come meanwhile.
    if constexpr (!S::kFastPath) load_rows<S>(p, block, shared, 0);
  }
  // One value for all lanes, and known as such to the compiler.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  // By every warp, which spares telling the others what one has found.
  const auto tiles = block.columns(p);
  if constexpr (!S::kFastPath) block.any = !tiles.done();
  __syncthreads();

  if (warp < kWarpgroup / 32) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (!block.any) return;
    if (warp == 0) {
      if (!S::kFastPath || ptx::elect_one()) load_tiles<S>(p, block, shared, tiles);
    } else if constexpr (S::kKeyRows) {
      if (warp <= 2) load_constants<S>(p, block, shared, warp - 1, tiles);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
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

template <typename T, bool kFastPath>
__global__ void __launch_bounds__(kThreads, 1) fused_sm90_kernel(const __grid_constant__ BackwardSm90Args p) {
  backward_block<FusedShape<T, kFastPath>>(p);
}

// Four words of each lane of a quad: lane n gets the n-th of all four, in their order.
__device__ __forceinline__ void exchange_in_quads(uint32_t (&words)[4]) {
#pragma unroll
  for (int apart = 1; apart <= 2; apart *= 2) {
    const bool upper = (threadIdx.x & apart) != 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & apart) continue;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words[n] : words[n + apart], apart);
      words[n] = upper ? other : words[n];
      words[n + apart] = upper ? words[n + apart] : other;
    }
  }
}

// The sums -> dQ. Grid: blocks of 64 queries * query heads * batch, blocks fastest.
//
// A lane has two columns of eight, as the products left them. The four lanes of a quad exchange theirs of 32 columns,
// so that each writes eight in a row: words of 4 bytes would reach only half of every 32 bytes that memory writes.
template <typename T>
__global__ void __launch_bounds__(kWarpgroup) round_dq_sm90_kernel(const __grid_constant__ RoundArgs p) {
  constexpr int kAtOnce = 4;  // eights of columns
  const int64_t blocks = (p.seqlen_q + kSumRows - 1) / kSumRows, batch_head = blockIdx.x / blocks;
  const int head = static_cast<int>(batch_head % p.heads), batch = static_cast<int>(batch_head / p.heads);
  const int warp_row = static_cast<int>(blockIdx.x % blocks) * kSumRows + threadIdx.x / 32 * kMarkRows;
  const int row = warp_row + threadIdx.x % 32 / 4, part = threadIdx.x % kAtOnce;
  const float4* sums = reinterpret_cast<const float4*>(p.dq_sums) + int64_t{blockIdx.x} * (kHalves * kSumBytes / 16);
  T* dq = const_cast<T*>(head_of<T>(p.dq, batch, head));
  bool nan = false;
#pragma unroll
  for (int first = 0; first < kHalves * kSumTiles; first += kAtOnce) {
    float4 x[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) x[n] = sums[sum_index(first + n)];
    uint32_t words[2][kAtOnce];  // of both rows
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const float y[4] = {x[n].x * p.softmax_scale, x[n].y * p.softmax_scale, x[n].z * p.softmax_scale,
                          x[n].w * p.softmax_scale};
      nan |= isnan(y[0]) || isnan(y[1]) || isnan(y[2]) || isnan(y[3]);
      words[0][n] = ptx::pack<T>(y[0], y[1]), words[1][n] = ptx::pack<T>(y[2], y[3]);
    }
    const int column = (first + part) * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      exchange_in_quads(words[half]);
      if (row + 8 * half >= p.seqlen_q) continue;
      uint16_t* to = reinterpret_cast<uint16_t*>(dq + (row + 8 * half) * p.dq.stride[2] + column);
      if (column + 8 <= p.dq.width) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[half][0], words[half][1], words[half][2], words[half][3]);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (column + e < p.dq.width) to[e] = static_cast<uint16_t>(words[half][e / 2] >> e % 2 * 16);
      }
    }
  }
  if (p.nan_marks != nullptr) mark_nan(p.nan_marks, batch_head, warp_row, p.seqlen_q, nan);
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
template <typename T, int kHeadDim, bool kFastPath>
using DkdvShape = Shape<T, kHeadDim, Tiles<kHeadDim>::kQueries, 4, true, kFastPath>;
template <typename T, int kHeadDim, bool kFastPath>
using DqShape = Shape<T, kHeadDim, Tiles<kHeadDim>::kKeys, Tiles<kHeadDim>::kKeySlots, false, kFastPath>;

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
  if (const char* refusal = why_not_sm90(p, chip, kNoSm90Backward)) return refusal;
  if (p.softcap == 0 && p.softmax_scale <= 0) return "the scale isn't positive";
  // Zeros up to 64 columns would cost more than wgmma gains over mma.
  if (std::max(p.head_dim, p.head_dim_v) <= 32) return "both head sizes are at most 32";
  if (p.heads_out != p.heads_k || p.heads_out != p.heads_v) return "key and value heads are shared differently";
  if (const char* refusal = unfit_input(p)) return refusal;
  const auto fits = [](const View& view, int64_t length, int64_t width) {
    return view.data == nullptr || fits_tensor_map(view, length, width, 2);
  };
  if (!fits(p.grad_out, p.seqlen_q, p.head_dim_v)) return "the strides of grad_out aren't multiples of 16 bytes";
  if (!fits(p.dq, p.seqlen_q, p.head_dim) || !fits(p.dk, p.seqlen_k, p.head_dim) ||
      !fits(p.dv, p.seqlen_k, p.head_dim_v)) {
    return "the strides of a gradient aren't multiples of 16 bytes";
  }
  return nullptr;
}

// Blocks that run side by side read the columns of so many (batch, head) pairs, which L2 (50 MB) then holds.
int swizzled_heads(int64_t column_bytes, int64_t pairs) {
  constexpr int64_t kCache = int64_t{32} << 20;
  return static_cast<int>(std::clamp(kCache / std::max<int64_t>(1, column_bytes), int64_t{1}, pairs));
}

int make_source(Source& source, const BackwardCall& p, const View& view, int64_t heads, int64_t length, int64_t width,
                int rows) {
  source.head_step = view.stride[1] != 0, source.batch_step = view.stride[0] != 0;
  return make_tensor_map(source.map, map_type(p.dtype), 2, view, p.batch, heads, length, width, rows);
}

BackwardSm90Args arguments(const BackwardCall& p, int64_t heads, int swizzled_heads) {
  BackwardSm90Args a{};
  a.score = score_of_backward(p, p.softcap == 0);
  a.lse = static_cast<const float*>(p.lse);
  a.delta = p.row_delta;
  a.softmax_scale = static_cast<float>(p.softmax_scale);
  a.batch = static_cast<int32_t>(p.batch), a.heads = static_cast<int32_t>(heads);
  a.group = static_cast<int32_t>(p.heads_q / p.heads_k);
  a.swizzled_heads = swizzled_heads;
  return a;
}

// Of dK and dV, or of all three gradients.
template <class S>
int launch_by_keys(const BackwardCall& p, const BackwardLaunch& launch, void (*kernel)(BackwardSm90Args),
                   void* stream) {
  if (launch.blocks == 0) return cudaSuccess;
  const int64_t bytes = p.heads_q / p.heads_k * p.seqlen_q * (p.head_dim + p.head_dim_v) * 2;
  BackwardSm90Args a = arguments(p, p.heads_k, swizzled_heads(bytes, p.batch * p.heads_k));
  int error = make_source(a.rows[0], p, p.k, p.heads_k, p.seqlen_k, p.head_dim, kGroupRows);
  error = error ? error : make_source(a.rows[1], p, p.v, p.heads_k, p.seqlen_k, p.head_dim_v, kGroupRows);
  error = error ? error : make_source(a.cols[0], p, p.q, p.heads_q, p.seqlen_q, p.head_dim, S::kCols);
  error = error ? error : make_source(a.cols[1], p, p.grad_out, p.heads_q, p.seqlen_q, p.head_dim_v, S::kCols);
  const View* grads[] = {&p.dk, &p.dv};
  uint8_t* nan_marks[] = {p.nan_marks.dk, p.nan_marks.dv};
  const int64_t widths[] = {p.head_dim, p.head_dim_v};
  for (int n = 0; n < 2; ++n) {
    a.wanted[n] = grads[n]->data != nullptr;
    if (error || !a.wanted[n]) continue;
    a.nan_marks[n] = nan_marks[n];
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
  BackwardSm90Args a = arguments(p, p.heads_q, swizzled_heads(bytes, p.batch * p.heads_q));
  int error = make_source(a.rows[0], p, p.q, p.heads_q, p.seqlen_q, p.head_dim, kGroupRows);
  error = error ? error : make_source(a.rows[1], p, p.grad_out, p.heads_q, p.seqlen_q, p.head_dim_v, kGroupRows);
  error = error ? error : make_source(a.cols[0], p, p.k, p.heads_k, p.seqlen_k, p.head_dim, S::kCols);
  error = error ? error : make_source(a.cols[1], p, p.v, p.heads_k, p.seqlen_k, p.head_dim_v, S::kCols);
  error = error ? error
                : make_tensor_map(a.grads[0], map_type(p.dtype), 2, p.dq, p.batch, p.heads_q, p.seqlen_q, p.head_dim,
                                  kGroupRows);
  if (error) return error;
  a.nan_marks[0] = p.nan_marks.dq;
  return launch_kernel(dq_sm90_kernel<S>, launch.blocks, launch.threads, launch.shared_bytes, a, stream);
}

template <typename T>
int round_dq(const BackwardCall& p, const BackwardLaunch& launch, void* stream) {
  const RoundArgs a{rows_of(p.dq, p.head_dim),
                    p.nan_marks.dq,
                    p.dq_sums,
                    static_cast<float>(p.softmax_scale),
                    static_cast<int32_t>(p.heads_q),
                    static_cast<int32_t>(p.seqlen_q)};
  return launch_kernel(round_dq_sm90_kernel<T>, launch.blocks, launch.threads, launch.shared_bytes, a, stream);
}

// Whether there may be a key that no query attends to, or a query without a key.
bool excludes(const Attention& p) {
  const auto reaches_all = [](const Band& band, int64_t rows, int64_t columns) {
    const Range reached = band.reached(rows, {0, columns});
    return reached.begin == 0 && reached.end == columns;
  };
  return p.ranges.data != nullptr || !reaches_all(p.band, p.seqlen_q, p.seqlen_k) ||
         !reaches_all(p.band.transposed(), p.seqlen_k, p.seqlen_q);
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
  plan.fast_path = p.softcap == 0 && p.ranges.data == nullptr;
  if (excludes(p)) {
    plan.again = plan_backward(p, chip.shared_per_block, true);
    plan.nan_marks = marks_of_queries(p) + 2 * marks_of_keys(p);
  }
  if (!deterministic && !(left_out & kNoSm90Fused) && can_fuse(p)) {
    plan.dq_sums = p.batch * p.heads_q * ceil_div(p.seqlen_q, kSumRows) * (kHalves * kSumBytes / 4);
    using S = FusedShape<__half, true>;
    plan.head_class = S::kHeadDim;
    const uint32_t bytes = plan.fast_path ? S::kBytes : FusedShape<__half, false>::kBytes;
    plan.fused = {S::kRows, S::kCols, kThreads, static_cast<int>(bytes),
                  ceil_div(p.seqlen_k, S::kRows) * p.batch * p.heads_k};
    plan.round_dq = {kSumRows, S::kHeadDim, kWarpgroup, 0, ceil_div(p.seqlen_q, kSumRows) * p.batch * p.heads_q};
    return plan;
  }
  const auto plan_shapes = [&](auto width, auto fast_path) {
    using Dkdv = DkdvShape<__half, width, fast_path>;
    using Dq = DqShape<__half, width, fast_path>;
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
  };
  by_width(p, [&](auto width) {
    return plan.fast_path ? plan_shapes(width, std::true_type{}) : plan_shapes(width, std::false_type{});
  });
  return plan;
}

int backward_sm90(const BackwardCall& p, const BackwardSm90Plan& plan, void* stream) {
  if (plan.refusal != nullptr) return cudaErrorInvalidValue;
#ifdef ATTNKERN_NO_SM90
  return cudaErrorNoKernelImageForDevice;
#else
  const int error = by_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    if (plan.fused.blocks > 0) {
      int error = cudaMemsetAsync(p.dq_sums, 0, plan.dq_sums * sizeof(float), static_cast<cudaStream_t>(stream));
      if (error == cudaSuccess) {
        error = plan.fast_path
                    ? launch_by_keys<FusedShape<T, true>>(p, plan.fused, fused_sm90_kernel<T, true>, stream)
                    : launch_by_keys<FusedShape<T, false>>(p, plan.fused, fused_sm90_kernel<T, false>, stream);
      }
      return error != cudaSuccess ? error : round_dq<T>(p, plan.round_dq, stream);
    }
    return by_width(p, [&](auto width) {
      const auto launch = [&](auto fast_path) {
        using Dkdv = DkdvShape<T, width, fast_path>;
        const int error = launch_by_keys<Dkdv>(p, plan.dkdv, dkdv_sm90_kernel<Dkdv>, stream);
        return error != cudaSuccess ? error : launch_dq<DqShape<T, width, fast_path>>(p, plan.dq, stream);
      };
      return plan.fast_path ? launch(std::true_type{}) : launch(std::false_type{});
    });
  });
  return error != cudaSuccess || !plan.again.again ? error : backward(p, plan.again, stream);
#endif
}

}  // namespace attnkern::cuda
