// Few queries, many keys (decoding with a cache). The query heads that share a key head are packed into the rows of one
// tile, so that keys and values are read once: row r is query r / group of the group's head r % group. The keys are
// split over blocks of the grid; each leaves its own normalised output and log-sum-exp, and combine_kernel puts these
// together (Dao, Haziza, Massa, Sizov, "Flash-Decoding", 2023).
//
// A block of keys is shared out among the warps, sixteen (or eight) to each: every warp has a softmax and an output of
// its own for all rows, and they are merged at the end. Head sizes above 256 are forward_wide.cu's, split in the same
// way.
#include "cuda/forward_wide.cuh"
#include "cuda/left_out.h"
#include "cuda/packed.cuh"
#include "cuda/tf32.cuh"
#include "cuda/unattended.cuh"

namespace attnkern::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kRows = 16;
constexpr int kCombined = 8;     // splits whose outputs combine_kernel loads side by side
constexpr int kMaxSplits = 128;  // of which combine_kernel keeps the weights: kMaxSplits / 32 per lane

template <typename T, int kHeadDim>
struct DecodeTile {
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kStages = kRowBytes <= 256 ? 2 : 1;
  static constexpr int kWarpKeys = kRowBytes <= 512 ? 16 : 8, kKeys = kWarps * kWarpKeys;
  static constexpr int kQBytes = kRows * kRowBytes, kKeyBytes = kKeys * kRowBytes;
  static constexpr int kSharedBytes = kQBytes + kStages * 2 * kKeyBytes;
  // What the merge takes, in the same memory: a maximum and a sum per warp and row, in place of the queries; an output
  // per warp, in place of keys and values.
  static_assert(kWarps * kRows * 8 <= kQBytes && kWarps * kRows * kHeadDim * 4 <= kStages * 2 * kKeyBytes);
};

// The rows and the split of a block of threads. Row r is query r / p.pack of head first_head(p) + r % p.pack.
struct DecodeBlock {
  int split, batch, head_k, first_row, row_end;

  explicit __device__ __forceinline__ DecodeBlock(const SplitParams& p) {
    split = blockIdx.x % p.splits;
    const int tile = blockIdx.x / p.splits % p.row_blocks, batch_head = blockIdx.x / p.splits / p.row_blocks;
    const int heads_k = p.score.heads / p.pack;
    batch = batch_head / heads_k, head_k = batch_head % heads_k;
    first_row = tile * kRows, row_end = p.score.seqlen_q * p.pack;
  }
  // Computed where it is needed: kept, it would be one register more, and some of the kernels have none left.
  __device__ __forceinline__ int first_head(const SplitParams& p) const { return head_k * p.pack; }
};

// The rows of Q -> shared memory, by single elements where 16 bytes can't be read at a time.
template <typename T, int kHeadDim>
__device__ __forceinline__ void load_packed_queries(const SplitParams& p, const DecodeBlock& at, uint32_t q_tile) {
  using Chunks = TileOf<T, kHeadDim>;
  for (int i = threadIdx.x; i < kRows * Chunks::kChunks; i += kThreads) {
    const int row = i / Chunks::kChunks, chunk = i % Chunks::kChunks, r = at.first_row + row;
    const bool live = r < at.row_end;
    const T* source =
        head_of<T>(p.q, at.batch, at.first_head(p) + (live ? r % p.pack : 0)) + (live ? r / p.pack : 0) * p.q.stride[2];
    const uint32_t target = Chunks::address(q_tile, row, chunk);
    const int column = chunk * kPerChunk<T>;
    if (p.q.vector) {
      const bool inside = live && column < p.q.width;
      ptx::cp_async<16>(target, inside ? source + column : source, inside ? 16 : 0);
    } else {
      ptx::store_shared(target, gather_chunk(source, p.q.stride[3], column, live ? p.q.width : 0));
    }
  }
}

// The two products of a warp, with its keys of a block.
template <typename T, int kHeadDim>
struct DecodeProducts {
  static constexpr int kWarpKeys = DecodeTile<T, kHeadDim>::kWarpKeys, kDepth = kHeadDim / 16;
  static_assert(kWarpKeys == 16);
  using Chunks = TileOf<T, kHeadDim>;

  __device__ __forceinline__ static void scores(float (&score)[1][kWarpKeys / 8][4], uint32_t q_tile, uint32_t k_tile,
                                                int warp, bool) {
    const int lane = threadIdx.x % 32, below = lane % 16, beside = lane / 16;
    const int key_below = lane / 16 * 8 + lane % 8, key_beside = lane / 8 % 2;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      uint32_t query[4], key[4];
      ptx::ldmatrix(query, Chunks::address(q_tile, below, 2 * d + beside));
      ptx::ldmatrix(key, Chunks::address(k_tile, warp * 16 + key_below, 2 * d + key_beside));
      ptx::mma_m16n8k16<T>(score[0][0], query, key[0], key[1]);
      ptx::mma_m16n8k16<T>(score[0][1], query, key[2], key[3]);
    }
  }

  // out = out * factor + P V
  __device__ __forceinline__ static void add_values(float (&out)[1][kHeadDim / 8][4],
                                                    const float (&score)[1][kWarpKeys / 8][4],
                                                    const float (&factor)[1][2], uint32_t v_tile, int warp, bool) {
    const int lane = threadIdx.x % 32, below = lane % 16, beside = lane / 16;
    uint32_t probability[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      probability[i] = ptx::pack<T>(score[0][i / 2][i % 2 * 2], score[0][i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      uint32_t value[4];
      ptx::ldmatrix<true>(value, Chunks::address(v_tile, warp * 16 + below, 2 * d + beside));
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[0][2 * d + t][e] *= factor[0][e / 2];
        ptx::mma_m16n8k16<T>(out[0][2 * d + t], probability, value[2 * t], value[2 * t + 1]);
      }
    }
  }

  // Of the output, where a lane has element `side` of column tile n.
  __device__ __forceinline__ static int column(int n, int side) {
    return n * 8 + static_cast<int>(threadIdx.x % 32) % 4 * 2 + side;
  }
};

template <int kHeadDim>
struct DecodeProducts<float, kHeadDim> {
  static constexpr int kWarpKeys = DecodeTile<float, kHeadDim>::kWarpKeys;
  using Chunks = TileOf<float, kHeadDim>;

  __device__ __forceinline__ static void scores(float (&score)[1][kWarpKeys / 8][4], uint32_t q_tile, uint32_t k_tile,
                                                int warp, bool exact) {
    by_precision(exact, [&](auto is_exact) {
      rows_by_rows_tf32<is_exact, Chunks, Chunks, kHeadDim / 8>(score, q_tile, 0, 0, k_tile, warp * kWarpKeys, 0);
    });
  }

  __device__ __forceinline__ static void add_values(float (&out)[1][kHeadDim / 8][4],
                                                    const float (&score)[1][kWarpKeys / 8][4],
                                                    const float (&factor)[1][2], uint32_t v_tile, int warp,
                                                    bool exact) {
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 4) {  // as in forward_tile.cuh, a branch each
      by_precision(exact, [&](auto is_exact) {
        scores_by_columns_tf32<is_exact, Chunks>(out, d, factor, score, v_tile, warp * kWarpKeys, 2 * d);
      });
    }
  }

  // Of 32 columns four tiles have every fourth (tf32.cuh).
  __device__ __forceinline__ static int column(int n, int side) {
    return n / 4 * 32 + static_cast<int>(threadIdx.x % 32) % 4 * 8 + side * 4 + n % 4;
  }
};

// What the warps leave in shared memory, of their own keys, and what it makes together.
template <typename T, int kHeadDim>
struct WarpResults {
  float *maxima, *sums;  // [warp][row]
  float* outputs;        // [warp][row][column]

  explicit __device__ __forceinline__ WarpResults(uint8_t* shared)
      : maxima(reinterpret_cast<float*>(shared)),
        sums(maxima + kWarps * kRows),
        outputs(reinterpret_cast<float*>(shared + DecodeTile<T, kHeadDim>::kQBytes)) {}

  __device__ __forceinline__ void store(int warp, const RowState& state, const float (&out)[kHeadDim / 8][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = warp * kRows + lane / 4 + half * 8;
      const float sum = quad_sum(state.sum[half]);
      if (lane % 4 == 0) maxima[slot] = state.max[half], sums[slot] = sum;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          outputs[slot * kHeadDim + DecodeProducts<T, kHeadDim>::column(n, side)] = out[n][2 * half + side];
        }
      }
    }
  }

  // The output and the log-sum-exp of the split, or of the call if it has but one.
  __device__ __forceinline__ void merge(const SplitParams& p, const DecodeBlock& at) const {
    for (int i = threadIdx.x; i < kRows * kHeadDim; i += kThreads) {
      const int row = i / kHeadDim, d = i % kHeadDim, r = at.first_row + row;
      if (r >= at.row_end || d >= p.v.width) continue;
      const int head = at.first_head(p) + r % p.pack;
      float largest = -kInfinity, sum = 0.f, total = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, maxima[w * kRows + row]);
      const float reference = largest == -kInfinity ? 0.f : largest;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float factor = ptx::ex2((maxima[w * kRows + row] - reference) * kLog2E);
        sum += factor * sums[w * kRows + row];
        total += factor * outputs[(w * kRows + row) * kHeadDim + d];
      }
      const int64_t batch_head = static_cast<int64_t>(at.batch) * p.score.heads + head;
      if (p.splits == 1) sum += sink_term<false>(p.score, batch_head, largest);
      total *= inverse_of(sum);
      const int64_t of_row = batch_head * p.score.seqlen_q + r / p.pack;
      if (p.splits > 1) {
        p.part_out[(of_row * p.splits + at.split) * p.v.width + d] = total;
        if (d == 0) p.part_lse[of_row * p.splits + at.split] = exact_log_sum_exp(largest, sum);
      } else {
        T* target = const_cast<T*>(head_of<T>(p.out, at.batch, head));
        target[r / p.pack * p.out.stride[2] + d] = static_cast<T>(total);
        if (d == 0 && p.lse != nullptr)
          p.lse[of_row] = log_sum_exp_with_sink<float, false>(p.score, batch_head, largest, sum);
      }
    }
  }
};

template <typename T, int kHeadDim, bool kPages>
__global__ void __launch_bounds__(kThreads, std::is_same_v<T, float> ? 2 : 1)
    decode_kernel(const __grid_constant__ ParamsOf<SplitParams, kPages> p) {
  using Config = DecodeTile<T, kHeadDim>;
  using Products = DecodeProducts<T, kHeadDim>;
  constexpr int kStages = Config::kStages, kKeys = Config::kKeys, kWarpKeys = Config::kWarpKeys;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t q_tile = ptx::shared_address(shared);
  const auto k_tile = [&](int n) { return q_tile + Config::kQBytes + n % kStages * 2 * Config::kKeyBytes; };
  const auto v_tile = [&](int n) { return k_tile(n) + Config::kKeyBytes; };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int seqlen_k = p.score.seqlen_k;
  const DecodeBlock at(p);
  const auto table = table_of(p, at.batch);
  const T* k = keys_of<T>(p.k, table, at.batch, at.head_k);
  const T* v = keys_of<T>(p.v, table, at.batch, at.head_k);

  // The keys that some row reaches, in whole blocks, dealt out evenly: with ranges each tile's own, however many keys
  // there is room for.
  const auto reached =
      packed_blocks<kKeys, kRows>(p.score, at.batch, at.first_head(p), p.pack, at.first_row, at.row_end);
  const int each = (reached.count + p.splits - 1) / p.splits;
  const int begin = min(at.split * each, reached.count), end = min((at.split + 1) * each, reached.count);
  if (p.splits > 1 && begin >= end) {
    leave_nothing<kRows>(p, at.split, at.batch, at.first_head(p), at.first_row, at.row_end);
    return;
  }

  PackedRow rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = min(at.first_row + lane / 4 + half * 8, at.row_end - 1);
    rows[half] = packed_row(p.score, at.batch, at.first_head(p) + r % p.pack, r / p.pack);
  }
  // Every warp has all rows. A block that no row attends to is neither read nor waited for.
  const auto visits = [&](int n) {
    if (p.score.ranges == nullptr) return true;
    const int block = reached.block(n);
    const bool own = reaches<kKeys>(rows[0].keys, block) || reaches<kKeys>(rows[1].keys, block);
    return __any_sync(0xffffffffu, own) != 0;
  };
  const auto load = [&](int n) {
    if (n < end && visits(n)) {
      const int first = reached.block(n) * kKeys;
      load_keys<T, kHeadDim, kKeys, kThreads, false>(table, k_tile(n), p.k, k, first, seqlen_k);
      load_keys<T, kHeadDim, kKeys, kThreads, false>(table, v_tile(n), p.v, v, first, seqlen_k);
    }
    ptx::cp_async_commit();  // an empty group too: counting them stays the same to the end
  };
  load_packed_queries<T, kHeadDim>(p, at, q_tile);
#pragma unroll
  for (int n = 0; n < kStages; ++n) load(begin + n);

  float out[1][kHeadDim / 8][4] = {};
  RowState state;
  for (int n = begin; n < end; ++n) {
    ptx::cp_async_wait<kStages - 1>();
    if (!visits(n)) {
      load(n + kStages);
      continue;
    }
    __syncthreads();
    float score[1][kWarpKeys / 8][4] = {};
    Products::scores(score, q_tile, k_tile(n), warp, p.exact);
    finish_packed<T>(p.score, rows, score[0], reached.block(n) * kKeys + warp * kWarpKeys + lane % 4 * 2);
    const uint32_t attended = attended_columns(score[0]);
    if (!all_attended<kWarpKeys / 8>(attended)) {  // by this lane's rows, which seldom differ: now by all
      clear_unattended<TileOf<T, kHeadDim>, kWarpKeys / 8, 1>(v_tile(n), warp * kWarpKeys, over_rows(attended), 0);
      __syncwarp();
    }
    float factor[1][2];
    softmax_step<false>(p.score, score[0], state, factor[0]);
    Products::add_values(out, score, factor, v_tile(n), warp, p.exact);
    __syncthreads();
    load(n + kStages);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();

  const WarpResults<T, kHeadDim> results(shared);
  results.store(warp, state, out[0]);
  __syncthreads();
  results.merge(p, at);
}

// *source, or 0 without reading it. (ptxas makes a branch of some of the loads that a ?: guards.)
__device__ __forceinline__ float load_if(bool condition, const float* source) {
  float value;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.f32 %0, 0f00000000;\n\t@p ld.global.f32 %0, [%1];\n\t}"
      : "=f"(value)
      : "l"(source), "r"(static_cast<int>(condition)));
  return value;
}

// A warp per query, head and 32 columns. The outputs of eight splits are under way at a time: with one after the other
// the kernel would be as slow as memory is far away, times the number of splits. What a split without keys has left is
// not read.
template <typename T>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ SplitParams p) {
  constexpr int kPerLane = kMaxSplits / 32;
  const int lane = threadIdx.x % 32, heads = p.score.heads, seqlen_q = p.score.seqlen_q;
  const int chunks = max((p.v.width + 31) / 32, 1);
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32, at = number / chunks;
  const int chunk = static_cast<int>(number % chunks), d = chunk * 32 + lane;
  const int i = static_cast<int>(at % seqlen_q), head = static_cast<int>(at / seqlen_q % heads);
  const int64_t batch = at / seqlen_q / heads;
  if (batch >= p.batch) return;
  float lse[kPerLane], largest = -kInfinity, sum = 0.f;
  uint32_t found[kPerLane];  // the splits that have found keys, as bits
#pragma unroll
  for (int n = 0; n < kPerLane; ++n) {
    const int split = n * 32 + lane;
    lse[n] = split < p.splits ? p.part_lse[at * p.splits + split] : -kInfinity;
    found[n] = __ballot_sync(0xffffffffu, lse[n] != -kInfinity);
    largest = fmaxf(largest, lse[n]);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
  const float reference = largest == -kInfinity ? 0.f : largest;
#pragma unroll
  for (int n = 0; n < kPerLane; ++n) {
    lse[n] = ptx::ex2((lse[n] - reference) * kLog2E);
    sum += lse[n];
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  sum += sink_term<false>(p.score, at / seqlen_q, largest);
  const float inverse = inverse_of(sum);
  T* target = const_cast<T*>(head_of<T>(p.out, static_cast<int>(batch), head)) + i * p.out.stride[2];
  const bool live = d < p.v.width;
  const float* parts = p.part_out + at * p.splits * p.v.width + d;
  float total = 0.f;
#pragma unroll
  for (int n = 0; n < kPerLane; ++n) {
#pragma unroll 1
    for (int first = 0; first < 32 && found[n] >> first != 0; first += kCombined) {
      // Nothing but loads between the first and the last of them.
      float weight[kCombined], part[kCombined];
#pragma unroll
      for (int of = 0; of < kCombined; ++of) weight[of] = __shfl_sync(0xffffffffu, lse[n], first + of);
#pragma unroll
      for (int of = 0; of < kCombined; ++of) {
        const bool reads = live && (found[n] >> first >> of & 1) != 0;
        part[of] = load_if(reads, parts + static_cast<int64_t>(n * 32 + first + of) * p.v.width);
      }
#pragma unroll
      for (int of = 0; of < kCombined; ++of) total += weight[of] * part[of];
    }
  }
  if (live) target[d] = static_cast<T>(total * inverse);
  if (chunk == 0 && lane == 0 && p.lse != nullptr)
    p.lse[at] = log_sum_exp_with_sink<float, false>(p.score, at / seqlen_q, largest, sum);
}

}  // namespace

DecodePlan plan_decode(const Attention& p, const Chip& chip) {
  DecodePlan plan{};
  const int64_t widest = std::max(p.head_dim, p.head_dim_v);
  plan.head_class = widest > kWideHead ? 0 : widest > kMostHead ? kWideHead : head_class(p.head_dim, p.head_dim_v);
  if ((left_out & kNoDecode) || plan.head_class == 0 || p.batch * p.heads_q * p.seqlen_q == 0) return plan;
  // With dropout it is training, whose calls have many queries: the forward kernels.
  const int64_t group = p.heads_q / p.heads_k;
  if (p.dropout_p > 0 || p.heads_k != p.heads_v) return plan;
  if (p.seqlen_q * group > kDecodeMaxRows && !shares_rows(group, p.seqlen_q)) return plan;
  if (plan.head_class == kWideHead) {
    const WideTile tile = wide_tile(p.dtype);
    plan.rows = tile.rows, plan.keys = tile.keys, plan.threads = tile.threads, plan.shared_bytes = tile.shared_bytes;
  } else {
    by_dtype(p.dtype, [&](auto element) {
      return by_head_class(plan.head_class, [&](auto width) {
        using Config = DecodeTile<decltype(element), width>;
        plan.rows = kRows, plan.keys = Config::kKeys, plan.threads = kThreads;
        plan.shared_bytes = Config::kSharedBytes;
        return 0;
      });
    });
  }
  plan.row_tiles = static_cast<int>(ceil_div(p.seqlen_q * group, plan.rows));
  // Every tile reads K and V anew, the forward kernel reads them once for every head of a group: where that is less, it
  // is the better one as soon as its blocks fill the chip. (Many small windows of an image, say.)
  if (plan.row_tiles > group && plan_forward(p).blocks >= chip.multiprocessors) return plan;
  // Time in units of one block of keys: the blocks of a split, for every round of splits that the chip can hold at
  // once, and what the second kernel costs. Registers let four blocks of threads share a multiprocessor, memory maybe
  // fewer.
  constexpr int kReserved = 1024;  // by the system, per block of threads
  constexpr double kCombine = 4, kPerSplit = 1. / 16, kBegun = 0.5;
  const int resident = std::clamp(chip.shared_per_multiprocessor / (plan.shared_bytes + kReserved), 1, 4);
  const Range reached = p.band.visited(0, p.seqlen_q, {0, p.seqlen_k});
  const int64_t blocks = ceil_div(std::max<int64_t>(reached.end - reached.begin, 1), plan.keys);
  const int64_t tiles = p.batch * p.heads_k * plan.row_tiles, slots = int64_t{resident} * chip.multiprocessors;
  const auto cost = [&](int64_t splits) {
    const auto rounds = [&](int64_t of) { return static_cast<double>(ceil_div(of * splits, slots)); };
    const double each = static_cast<double>(ceil_div(blocks, splits));
    const double combined = splits > 1 ? kCombine + kPerSplit * static_cast<double>(splits) : 0;
    const double all_full = rounds(tiles) * each + combined;
    if (p.ranges.data == nullptr) return all_full;
    // The device alone knows how many keys a tile has. So the sum of two ends: all have these, or those of one entry of
    // the batch do and the others none. A block of threads costs kBegun beside its keys, also one that has none.
    const double one_full = rounds(tiles / p.batch) * each + combined;
    return all_full + one_full + 2 * kBegun * rounds(tiles);
  };
  plan.splits = 1;
  double least = cost(1);
  for (int64_t splits = 2; splits <= std::min<int64_t>(blocks, kMaxSplits); ++splits) {
    if (const double now = cost(splits); now < least) least = now, plan.splits = static_cast<int>(splits);
  }
  plan.blocks = tiles * plan.splits;
  return plan;
}

int64_t decode_workspace(const Forward& p, int splits) {
  return splits > 1 ? p.batch * p.heads_q * p.seqlen_q * splits * (p.head_dim_v + 1) : 0;
}

int decode(const Forward& p, int splits, float* workspace, void* stream) {
  if (splits < 1 || splits > kMaxSplits) return cudaErrorInvalidValue;
  const bool wide = std::max(p.head_dim, p.head_dim_v) > kMostHead;
  ForwardPlan plan{};
  plan.rows = wide ? wide_tile(p.dtype).rows : kRows;
  SplitParams params{forward_params(p, plan)};
  params.pack = params.group_k;
  params.row_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q * params.pack, plan.rows));
  params.splits = splits;
  const int64_t rows = p.batch * p.heads_q * p.seqlen_q;
  if (splits > 1) {
    params.part_out = workspace;
    params.part_lse = workspace + rows * splits * p.head_dim_v;
  }
  return by_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    const auto launch = [&](auto width) {
      return by_pages(params, p.pages, [&](const auto& given, auto in_pages) {
        return launch_kernel(decode_kernel<T, width, in_pages>, p.batch * p.heads_k * params.row_blocks * splits,
                             kThreads, DecodeTile<T, width>::kSharedBytes, given, stream);
      });
    };
    const int error =
        wide ? launch_wide(p, params, stream) : by_head_class(head_class(p.head_dim, p.head_dim_v), launch);
    if (error != cudaSuccess || splits == 1) return error;
    const int64_t warps = rows * std::max<int64_t>(ceil_div(p.head_dim_v, 32), 1);
    return launch_kernel(combine_kernel<T>, ceil_div(warps, kWarps), kThreads, 0, params, stream);
  });
}

}  // namespace attnkern::cuda
