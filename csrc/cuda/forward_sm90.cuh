// The forward pass for Hopper: copies by TMA, products by wgmma, and warpgroups with roles of their own (as in
// FlashAttention-3: Shah et al., 2024). One producer warp keeps the tiles of Q, K and V coming; each of two consumer
// warpgroups, or three, owns 64 rows of queries. A block of threads takes one tile after the other, so that the copies
// for the next tile run beside the end of this one. Which tile is next the producer asks of a counter, and tells the
// consumers.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/launch.h"
#include "cuda/sm90.cuh"
#include "cuda/smem_sm90.cuh"
#include "cuda/softmax.cuh"
#include "cuda/unattended.cuh"
#include "cuda/visits.cuh"

namespace attnkern::cuda {
namespace {

constexpr int kMostConsumers = 3;
enum NamedBarrier {
  kStored = 1,
  kTurn = kStored + kMostConsumers,
  kCleared = kTurn + kMostConsumers
};  // by consumer; 0 is __syncthreads'

// What a coordinate of a tensor map is multiplied by: 0 for a dimension that the tensor repeats.
struct Steps {
  int32_t head, batch;
};

struct ForwardSm90Params {
  ptx::TensorMap q, k, v, out;
  Score score;
  float exponent;  // what a score is multiplied by to be the exponent of a power of 2
  bool raw;        // the scores are the products as they are, but for the band
  float* lse;      // (batch, heads, seqlen_q) contiguous, or null
  Steps q_steps, k_steps, v_steps;
  int32_t group_k, group_v;  // queries' heads per head of k, of v
  int32_t* taken;            // tiles beyond the first of each block of threads; null: they are taken in turn
  int32_t tiles;
  TileOrder order;
};

// Consumers, keys per block and stages of the pipelines, for a class of head sizes.
template <int kHeadDim, int kHeadDimV, int kCount>
struct ForwardSm90Tile {
  static constexpr int kConsumers = kCount;
  static constexpr int kRows = kConsumers * kGroupRows, kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : cuda::kProducerRegisters;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : cuda::kConsumerRegisters;
  static constexpr int kKeys = kHeadDim <= 128 || kHeadDimV <= 128 ? 128 : kHeadDim <= 192 ? 96 : 80;
  static constexpr int kStages = kHeadDim <= 64 ? 3 : 2;
  static constexpr Schedule kSchedule = kHeadDim <= 64     ? Schedule::kOverlap
                                        : kHeadDimV <= 128 ? Schedule::kPingPong
                                        : kHeadDim <= 192  ? Schedule::kOverlap
                                                           : Schedule::kPingPong;

  template <typename T>
  using Q = SlabTile<T, kGroupRows, kHeadDim>;
  template <typename T>
  using K = SlabTile<T, kKeys, kHeadDim>;
  template <typename T>
  using V = SlabTile<T, kKeys, kHeadDimV>;

  static constexpr uint32_t kQBytes = Q<uint16_t>::kBytes, kKBytes = K<uint16_t>::kBytes, kVBytes = V<uint16_t>::kBytes;
  static constexpr uint32_t kFirstK = kConsumers * kQBytes, kFirstV = kFirstK + kStages * kKBytes;
  static constexpr uint32_t kBarriers = kFirstV + kStages * kVBytes;
  static constexpr uint32_t kInfo = kBarriers + 8 * (2 * kConsumers + 4 * kStages);
  // Beside the fast path: what the consumers' warps tell each other of two blocks; the key ranges of a tile's queries,
  // for the producer.
  static constexpr int kWarps = kConsumers * kWarpgroup / 32;
  static constexpr uint32_t kAttended = kInfo + 4 * (kStages + kConsumers), kAttendedBytes = kWarps * 16;
  static constexpr uint32_t kRanges = kAttended + 2 * kAttendedBytes;
  template <bool kFastPath>
  static constexpr int kSharedBytes = kFastPath ? kInfo + 4 * kConsumers : kRanges + kStagedBytes<kRows>;
  static_assert(kHeadDimV <= kHeadDim, "the output leaves through Q's buffer");
};

// Where things are in shared memory.
template <typename Config>
struct Shared {
  uint32_t base;
  __device__ __forceinline__ uint32_t q(int consumer) const { return base + consumer * Config::kQBytes; }
  __device__ __forceinline__ uint32_t k(int stage) const { return base + Config::kFirstK + stage * Config::kKBytes; }
  __device__ __forceinline__ uint32_t v(int stage) const { return base + Config::kFirstV + stage * Config::kVBytes; }
  __device__ __forceinline__ uint32_t barrier(int n) const { return base + Config::kBarriers + 8 * n; }
  __device__ __forceinline__ uint32_t q_info(int consumer) const { return base + Config::kInfo + 4 * consumer; }
  __device__ __forceinline__ uint32_t k_info(int stage) const { return q_info(Config::kConsumers + stage); }
  __device__ __forceinline__ AttendedByWarps<Config::kWarps> attended(int parity) const {
    return {base + Config::kAttended + parity * Config::kAttendedBytes};
  }
  __device__ __forceinline__ uint32_t ranges() const { return base + Config::kRanges; }
  __device__ __forceinline__ uint32_t q_full(int consumer) const { return barrier(consumer); }
  __device__ __forceinline__ uint32_t q_empty(int consumer) const { return barrier(Config::kConsumers + consumer); }
  __device__ __forceinline__ uint32_t pipeline_barrier(int which, int stage) const {
    return barrier(2 * Config::kConsumers + which * Config::kStages + stage);
  }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return pipeline_barrier(0, stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return pipeline_barrier(1, stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return pipeline_barrier(2, stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return pipeline_barrier(3, stage); }
};

// What the producer tells a consumer of a tile, in a word of shared memory, beside the queries themselves.
struct TileInfo {
  int tile;  // the number of tiles: there are no more
  bool any;  // whether it visits any block of keys

  __device__ __forceinline__ uint32_t word() const { return static_cast<uint32_t>(tile) * 2 + any; }
  __device__ __forceinline__ static TileInfo of(uint32_t word) { return {static_cast<int>(word / 2), (word & 1) != 0}; }
};

// One tile of queries.
struct Work {
  int batch_head, batch, head, first_row, rows;
};

// The blocks of keys that it visits; `ranges`: where those of its queries have been staged.
template <class Config, bool kFastPath>
__device__ __forceinline__ auto keys_of(const ForwardSm90Params& p, const Work& work,
                                        [[maybe_unused]] uint32_t ranges) {
  if constexpr (kFastPath) {
    return BandBlocks<Config::kKeys>(p.score.band, work.first_row, work.rows, p.score.seqlen_k);
  } else {
    const Range all = {0, p.score.seqlen_k};
    return KeyBlocks<Config::kRows, Config::kKeys, 1, true>(p.score, work.batch, work.head, work.first_row, work.rows,
                                                            all, ranges);
  }
}

template <class Config>
__device__ __forceinline__ Work work_of(const ForwardSm90Params& p, int tile) {
  Work work;
  const auto [batch_head, row_block] = p.order[tile];
  work.batch_head = batch_head;
  work.batch = batch_head / p.score.heads;
  work.head = batch_head % p.score.heads;
  work.first_row = row_block * Config::kRows;
  work.rows = min(Config::kRows, p.score.seqlen_q - work.first_row);
  return work;
}

// One thread on the fast path, else a whole warp, of which one thread copies.
template <typename T, typename Config, bool kFastPath>
__device__ __forceinline__ void produce(const ForwardSm90Params& p, const Shared<Config>& shared) {
  const bool copies = kFastPath || ptx::elect_one();
  PipelineState<Config::kStages> k_pipeline, v_pipeline;
  uint32_t parity = 0;
  // Q's buffers are free only when the last output has left them.
  const auto tell = [&](int consumer, const TileInfo& info) {
    ptx::mbarrier_wait(shared.q_empty(consumer), parity ^ 1);
    if (copies) ptx::store_shared(shared.q_info(consumer), info.word());
  };
  // The tile after this one. It is taken when all keys of this one are under way, no sooner: then the last tiles go to
  // those who end first. Meanwhile the consumers have some blocks of keys to do.
  const auto next_tile = [&](int tile) {
    const int blocks = gridDim.x;
    if (p.taken == nullptr) return tile + blocks;
    int next = copies ? blocks + atomicAdd(p.taken, 1) : 0;
    if constexpr (!kFastPath) next = __reduce_max_sync(0xffffffffu, next);
    return next;
  };
  // Beside the fast path it is taken before the last V has room, and its key ranges come meanwhile.
  int tile = blockIdx.x, next = 0;
  const auto stage = [&](int tile) {
    if (tile >= p.tiles) return;
    const Work work = work_of<Config>(p, tile);
    stage_ranges<Config::kRows>(p.score, work.batch, work.head, work.first_row, work.rows, shared.ranges());
  };
  const auto take_next = [&] {
    next = next_tile(tile);
    __syncwarp();  // all have read the ranges of this one
    stage(next);
  };
  if constexpr (!kFastPath) stage(tile);
#pragma unroll 1
  for (; tile < p.tiles; tile = next) {
    const Work work = work_of<Config>(p, tile);
    auto keys = keys_of<Config, kFastPath>(p, work, shared.ranges());
    // Waits for the opposite parity pass at once in the first round.
    const auto load_k = [&] {
      const int first = keys.first();
      BlockInfo info{first};
      if constexpr (!kFastPath) info.masked = keys.masked(), info.hides = info.masked && keys.hides();
      keys.advance();
      info.last = keys.done();
      ptx::mbarrier_wait(shared.k_empty(k_pipeline.stage), k_pipeline.parity ^ 1);
      if (copies) {
        if constexpr (!kFastPath) ptx::store_shared(shared.k_info(k_pipeline.stage), info.word());
        ptx::mbarrier_arrive_expect_tx(shared.k_full(k_pipeline.stage), Config::kKBytes);
        Config::template K<T>::load(shared.k(k_pipeline.stage), p.k, shared.k_full(k_pipeline.stage), first,
                                    work.head / p.group_k * p.k_steps.head, work.batch * p.k_steps.batch);
      }
      k_pipeline.advance();
      return first;
    };
    const auto load_v = [&](int first) {
      ptx::mbarrier_wait(shared.v_empty(v_pipeline.stage), v_pipeline.parity ^ 1);
      if (copies) {
        ptx::mbarrier_arrive_expect_tx(shared.v_full(v_pipeline.stage), Config::kVBytes);
        Config::template V<T>::load(shared.v(v_pipeline.stage), p.v, shared.v_full(v_pipeline.stage), first,
                                    work.head / p.group_v * p.v_steps.head, work.batch * p.v_steps.batch);
      }
      v_pipeline.advance();
    };
    // The first K needn't wait until Q's buffers are free.
    bool any = !keys.done();
    int first = any ? load_k() : 0;
#pragma unroll
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      tell(consumer, {tile, any});
      if (!copies) continue;
      ptx::mbarrier_arrive_expect_tx(shared.q_full(consumer), Config::kQBytes);
      Config::template Q<T>::load(shared.q(consumer), p.q, shared.q_full(consumer),
                                  work.first_row + consumer * kGroupRows, work.head * p.q_steps.head,
                                  work.batch * p.q_steps.batch);
    }
    parity ^= 1;
    if constexpr (!kFastPath) {
      if (!any) take_next();
    }
#pragma unroll 1
    while (any) {  // in the order of use
      const int before = first;
      any = !keys.done();
      if (any) {
        first = load_k();
      } else if constexpr (!kFastPath) {
        take_next();
      }
      load_v(before);
    }
    if constexpr (kFastPath) next = next_tile(tile);
  }
#pragma unroll
  for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
    tell(consumer, {p.tiles, false});
    if (copies) ptx::mbarrier_arrive(shared.q_full(consumer));
  }
}

template <typename T, int kHeadDim, int kHeadDimV, int kConsumers, bool kFastPath, Schedule kSchedule>
struct Consumer {
  using Config = ForwardSm90Tile<kHeadDim, kHeadDimV, kConsumers>;
  using Q = typename Config::template Q<T>;
  using K = typename Config::template K<T>;
  using V = typename Config::template V<T>;
  using Out = SlabTile<T, kGroupRows, kHeadDimV>;
  static constexpr int kKeys = Config::kKeys;

  const ForwardSm90Params& p;
  const Shared<Config>& shared;
  const int consumer, warp, lane;
  PipelineState<Config::kStages> k_pipeline, v_pipeline;
  uint32_t parity = 0;

  float out[kHeadDimV / 8][4];
  float scores[kKeys / 8][4];
  uint32_t probabilities[kKeys / 16][4];  // of the block before: an operand
  RowState state;
  bool hides = false;  // whether keys of the block before may not be attended to: never set on the fast path
  int told = 0;        // how many such blocks there were

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  // The warpgroups wait for their turn and pass it on to the next; the first one is consumer 0's.
  __device__ __forceinline__ void wait_turn() const { ptx::barrier_sync(kTurn + consumer, 2 * kWarpgroup); }
  __device__ __forceinline__ void pass_turn() const {
    const int next = consumer + 1 < Config::kConsumers ? consumer + 1 : 0;
    ptx::barrier_arrive(kTurn + next, 2 * kWarpgroup);
  }

  __device__ __forceinline__ void start_scores() {
    const uint32_t q = shared.q(consumer), k = shared.k(k_pipeline.stage);
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      ptx::wgmma_ss<T, kKeys, false>(scores, Q::by_columns(q, d), K::by_columns(k, d), d > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void start_output(bool accumulate) {
    const uint32_t v = shared.v(v_pipeline.stage);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      ptx::wgmma_rs<T, kHeadDimV, true>(out, probabilities[n], V::by_rows(v, n), n > 0 || accumulate);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void release_k() {
    release(shared.k_empty(k_pipeline.stage));
    k_pipeline.advance();
  }
  __device__ __forceinline__ void release_v() {
    release(shared.v_empty(v_pipeline.stage));
    v_pipeline.advance();
  }

  // The blocks of keys as they come: on the fast path by their own count, else as the producer says.
  using Keys = std::conditional_t<kFastPath, BandBlocks<kKeys>, BlockInfo>;

  __device__ __forceinline__ bool is_last(const Keys& keys) const {
    if constexpr (kFastPath) {
      Keys next = keys;
      next.advance();
      return next.done();
    } else {
      return keys.last;
    }
  }
  // The next block, whose K is there.
  __device__ __forceinline__ void advance(Keys& keys) const {
    if constexpr (kFastPath) {
      keys.advance();
    } else {
      keys = BlockInfo::of(ptx::load_shared_word(shared.k_info(k_pipeline.stage)));
      __syncwarp();  // one lane releases what all have read
    }
  }

  // Scores -> probabilities, not yet rounded.
  __device__ __forceinline__ void softmax(const Work& work, const Keys& keys, float (&factor)[2]) {
    const int row = work.first_row + consumer * kGroupRows + warp * 16 + lane / 4;
    Score score = p.score;
    if constexpr (kFastPath) {
      const int first = keys.first();
      if (keys.masked(first)) mask_scores<false>(score, scores, row, first + lane % 4 * 2);
    } else {
      score.bias_kind = BiasKind::kNone;  // what the plan refuses costs no registers
      HeadScore h{};
      const int col = keys.first + lane % 4 * 2;
      float unused[1][4];
      if (!p.raw) finish_scores<T, false, false>(score, h, scores, row, col, unused);
      if (keys.masked) {
        h.ranges = ranges_of(score, work.batch, work.head);
        mask_scores<false>(score, h, scores, row, col);
        if (keys.hides) shared.attended(++told % 2).tell(attended_columns(scores), consumer * 4 + warp);
      }
      hides = keys.hides;
    }
    score.scale = p.exponent;
    softmax_step<true>(score, scores, state, factor);
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kHeadDimV / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= factor[e / 2];
    }
  }

  // Two neighbouring blocks of eight columns are, packed, one operand of 16.
  __device__ __forceinline__ void round_probabilities() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      const float* two = &scores[i / 2][i % 2 * 2];
      probabilities[i / 4][i % 4] = ptx::pack<T>(two[0], two[1]);
    }
  }

  __device__ __forceinline__ void wait_k() const {
    ptx::mbarrier_wait(shared.k_full(k_pipeline.stage), k_pipeline.parity);
  }
  __device__ __forceinline__ void wait_v() const {
    ptx::mbarrier_wait(shared.v_full(v_pipeline.stage), v_pipeline.parity);
  }

  // V of the block before, without the keys that none of the tile's queries attends to: both consumers read it, and
  // each clears every other row. On the fast path such keys are in the last block alone, at its end; past the tensor's
  // end are zeros.
  __device__ __forceinline__ void clear_values([[maybe_unused]] const Keys& keys, [[maybe_unused]] bool last) {
    uint32_t attended = 0;
    if constexpr (kFastPath) {
      const int end = keys.end() - keys.first();
      if (!last || end >= kKeys || keys.end() == p.score.seqlen_k) return;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        attended |= (bits_between(0, (end - lane % 4 * 2 - e + 7) >> 3) & 0xFFFFu) << 16 * e;
      }
    } else {
      if (!hides) return;
      ptx::barrier_sync(kCleared, Config::kConsumers * kWarpgroup);
      attended = shared.attended(told % 2).all();
      if (all_attended<kKeys / 8>(attended)) return;
    }
    clear_unattended<V, kKeys / 8, Config::kWarps>(shared.v(v_pipeline.stage), 0, attended, consumer * 4 + warp);
    ptx::fence_proxy_async();
    ptx::barrier_sync(kCleared, Config::kConsumers * kWarpgroup);
  }

  __device__ __forceinline__ void attend_serially(const Work& work, Keys keys) {
#pragma unroll 1
    for (bool more = true; more;) {
      wait_k();
      if constexpr (!kFastPath) advance(keys);
      ptx::hold(scores);
      ptx::wgmma_fence();
      start_scores();
      ptx::wgmma_wait<0>();
      ptx::hold(scores);
      release_k();
      float factor[2];
      wait_turn();
      softmax(work, keys, factor);
      pass_turn();
      more = !is_last(keys);
      rescale(factor);
      round_probabilities();
      wait_v();
      clear_values(keys, !more);
      ptx::hold(out);
      ptx::hold(probabilities);
      ptx::wgmma_fence();
      start_output(true);
      ptx::wgmma_wait<0>();
      ptx::hold(out);
      release_v();
      if constexpr (kFastPath) keys.advance();
    }
  }

  __device__ __forceinline__ void attend_overlapped(const Work& work, Keys keys) {
    wait_k();
    if constexpr (!kFastPath) advance(keys);
    ptx::hold(scores);
    ptx::wgmma_fence();
    start_scores();
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    release_k();
    float factor[2];
    softmax(work, keys, factor);
    round_probabilities();
    bool more = !is_last(keys);
    if (more) wait_k();
#pragma unroll 1
    while (more) {
      advance(keys);
      more = !is_last(keys);
      wait_v();
      clear_values(keys, false);
      if constexpr (kSchedule == Schedule::kPingPong) wait_turn();
      ptx::hold(scores);
      ptx::hold(out);
      ptx::hold(probabilities);
      ptx::wgmma_fence();
      start_scores();
      start_output(true);
      if constexpr (kSchedule == Schedule::kPingPong) pass_turn();
      ptx::wgmma_wait<1>();
      ptx::hold(scores);
      release_k();
      softmax(work, keys, factor);
      ptx::hold(scores);
      // Here rather than at the loop's head: ptxas would move the softmax behind the wait for P V, out of its shadow,
      // but not across the branches of a loop that waits.
      if (more) wait_k();
      ptx::wgmma_wait<0>();
      ptx::hold(out);
      ptx::hold(probabilities);
      release_v();
      rescale(factor);
      round_probabilities();  // only now: the wgmma read these registers until the wait
    }
    wait_v();
    clear_values(keys, true);
    ptx::hold(out);
    ptx::hold(probabilities);
    ptx::wgmma_fence();
    start_output(true);
    ptx::wgmma_wait<0>();
    ptx::hold(out);
    release_v();
  }

  // out and lse leave; the output through this warpgroup's part of Q, when all four warps have waited for the wgmmas
  // that read it: which rows of it a warp's own ones read isn't said anywhere.
  __device__ __forceinline__ void finish(const Work& work) {
    const int first_row = work.first_row + consumer * kGroupRows;
    Score score = p.score;
    score.scale = p.exponent;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = state.max[half];
      const float sum = quad_sum(state.sum[half]) + sink_term<true>(score, work.batch_head, max);
      inverse[half] = inverse_of(sum);
      const int i = first_row + warp * 16 + half * 8 + lane / 4;
      if (p.lse != nullptr && lane % 4 == 0 && i < p.score.seqlen_q) {
        p.lse[static_cast<int64_t>(work.batch_head) * p.score.seqlen_q + i] =
            log_sum_exp_with_sink<T, true>(score, work.batch_head, max, sum);
      }
    }
    const uint32_t tile = shared.q(consumer);
    ptx::barrier_sync(kStored + consumer, kWarpgroup);
#pragma unroll
    for (int c = 0; c < kHeadDimV / 16; ++c) {
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = &out[2 * c + i / 2][i % 2 * 2];
        matrices[i] = ptx::pack<T>(two[0] * inverse[i % 2], two[1] * inverse[i % 2]);
      }
      ptx::stmatrix(Out::address(tile, warp * 16 + lane % 16, 2 * c + lane / 16), matrices);
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(kStored + consumer, kWarpgroup);
    if (warp == 0 && ptx::elect_one()) {
      Out::store(p.out, tile, first_row, work.head, work.batch);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
      ptx::mbarrier_arrive(shared.q_empty(consumer));
    }
  }

  __device__ __forceinline__ void run() {
    if (kSchedule != Schedule::kOverlap && consumer + 1 == Config::kConsumers) pass_turn();
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int n = 0; n < kHeadDimV / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][e] = 0.f;
      }
      state = RowState{};
      ptx::mbarrier_wait(shared.q_full(consumer), parity);
      parity ^= 1;
      const TileInfo info = TileInfo::of(ptx::load_shared_word(shared.q_info(consumer)));
      if (info.tile == p.tiles) break;
      const Work work = work_of<Config>(p, info.tile);
      Keys keys = [&] {
        if constexpr (kFastPath) {
          return keys_of<Config, true>(p, work, 0);
        } else {
          return Keys{};
        }
      }();
      if (info.any) {
        if constexpr (kSchedule == Schedule::kSerial) {
          attend_serially(work, keys);
        } else {
          attend_overlapped(work, keys);
        }
      }
      finish(work);
    }
  }
};

template <typename T, int kHeadDim, int kHeadDimV, int kConsumers, bool kFastPath, Schedule kSchedule>
__global__ void __launch_bounds__(ForwardSm90Tile<kHeadDim, kHeadDimV, kConsumers>::kThreads, 1)
    forward_sm90_kernel(const __grid_constant__ ForwardSm90Params p) {
  using Config = ForwardSm90Tile<kHeadDim, kHeadDimV, kConsumers>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<Config> shared{ptx::shared_address(memory)};
  if (threadIdx.x == 0) {
#pragma unroll
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      ptx::mbarrier_init(shared.q_full(consumer), 1);
      ptx::mbarrier_init(shared.q_empty(consumer), 1);
    }
#pragma unroll
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(shared.k_full(stage), 1);
      ptx::mbarrier_init(shared.v_full(stage), 1);
      ptx::mbarrier_init(shared.k_empty(stage), Config::kConsumers * kWarpgroup / 32);  // an arrival per warp
      ptx::mbarrier_init(shared.v_empty(stage), Config::kConsumers * kWarpgroup / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  // One value for all lanes, and known as such to the compiler.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x / 32 == 0 && (!kFastPath || ptx::elect_one())) produce<T, Config, kFastPath>(p, shared);
    return;
  }
  ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
  Consumer<T, kHeadDim, kHeadDimV, kConsumers, kFastPath, kSchedule> consumer{
      p, shared, warpgroup - 1, static_cast<int>(threadIdx.x / 32 % 4), static_cast<int>(threadIdx.x % 32)};
  consumer.run();
}

inline bool has_third(const ForwardSm90Plan& plan) { return plan.rows > 2 * kGroupRows; }

// run(ForwardSm90Tile<...>{}) for the narrowest tiles that hold both head sizes; `none` if there are none. `third`:
// with a third consumer, where tiles can have one.
template <typename Result, typename Run>
Result by_tile(int64_t head_dim, int64_t head_dim_v, bool third, Result none, Run run) {
  const int64_t size = std::max(head_dim, head_dim_v);
  if (size <= 64) return third ? run(ForwardSm90Tile<64, 64, 3>{}) : run(ForwardSm90Tile<64, 64, 2>{});
  if (size <= 96) return run(ForwardSm90Tile<96, 96, 2>{});
  if (size <= 128) return run(ForwardSm90Tile<128, 128, 2>{});
  if (size <= 192) return head_dim_v <= 128 ? run(ForwardSm90Tile<192, 128, 2>{}) : run(ForwardSm90Tile<192, 192, 2>{});
  if (size <= 256) return run(ForwardSm90Tile<256, 256, 2>{});
  return none;
}

template <typename T, int kHeadDim, int kHeadDimV, int kConsumers, bool kFastPath, Schedule kSchedule>
int launch_forward_sm90(const Forward& p, const ForwardSm90Plan& plan, int32_t* taken, void* stream) {
  using Config = ForwardSm90Tile<kHeadDim, kHeadDimV, kConsumers>;
  ForwardSm90Params params{};
  const CUtensorMapDataType type = map_type(p.dtype);
  const auto map = [&](ptx::TensorMap& made, const View& view, int64_t heads, int64_t length, int64_t width, int rows) {
    return make_tensor_map(made, type, 2, view, p.batch, heads, length, width, rows);
  };
  int error = map(params.q, p.q, p.heads_q, p.seqlen_q, p.head_dim, kGroupRows);
  if (error == cudaSuccess) error = map(params.k, p.k, p.heads_k, p.seqlen_k, p.head_dim, Config::kKeys);
  if (error == cudaSuccess) error = map(params.v, p.v, p.heads_v, p.seqlen_k, p.head_dim_v, Config::kKeys);
  if (error == cudaSuccess) error = map(params.out, p.out, p.heads_q, p.seqlen_q, p.head_dim_v, kGroupRows);
  if (error != cudaSuccess) return error;
  const auto steps = [](const View& view) { return Steps{view.stride[1] != 0, view.stride[0] != 0}; };
  params.q_steps = steps(p.q), params.k_steps = steps(p.k), params.v_steps = steps(p.v);
  params.score = score_of(p, kFastPath);
  params.raw = p.softcap == 0 && p.softmax_scale > 0;
  params.exponent = params.raw ? score_of(p, true).scale : kLog2E;
  params.lse = static_cast<float*>(p.lse);
  params.group_k = static_cast<int32_t>(p.heads_q / p.heads_k);
  params.group_v = static_cast<int32_t>(p.heads_q / p.heads_v);
  params.tiles = static_cast<int32_t>(plan.tiles);
  params.order = plan.order;
  if (plan.counters > 0) {
    params.taken = taken;
    error = cudaMemsetAsync(taken, 0, plan.counters * sizeof(int32_t), static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return error;
  }
  return launch_kernel(forward_sm90_kernel<T, kHeadDim, kHeadDimV, kConsumers, kFastPath, kSchedule>, plan.blocks,
                       Config::kThreads, Config::template kSharedBytes<kFastPath>, params, stream);
}

}  // namespace
}  // namespace attnkern::cuda
