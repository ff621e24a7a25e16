// From products to probabilities: masked, under a running maximum, dropped and packed as the next product reads them.
#pragma once

#include "amx.h"

namespace attnkern::cpu {
namespace {

template <class Op>
struct ForwardScratch {
  using C = typename Op::Compute;
  using Scalar = typename Op::Scalar;

  ForwardScratch(void* memory, const Forward& p) : tiles(Tiles<Op>::uses(p)) {
    Arena arena(memory);
    const int64_t width = max64(row_scalars<Op>(p.head_dim), row_scalars<Op>(p.head_dim_v) * Op::kPack);
    query_tile = arena.take<Scalar>(row_scalars<Op>(p.head_dim) * kTile<C>);
    rows = arena.take<Scalar>(max64(kBlock<Op>, kTile<C>) * width);
    // In pairs: of two blocks. In tiles: behind room for what lies before a block in its first piece of keys.
    if (tiles) arena.take<C>(Tiles<Op>::kKeys * kTile<C>);
    scores = arena.take<C>(Op::kPack * kBlock<Op> * kTile<C>);
    mask = arena.take<LaneBits>(kBlock<Op>);
    const ScoreParams<C> score(p);
    bias = arena.take<C>(score.has_bias && (score.capped() || tiles) ? kBlock<Op> * kTile<C> : 0);
    keep = arena.take<C>(p.dropout_p > 0 ? kBlock<Op> * kTile<C> : 0);
    tail = arena.take<Scalar>(tiles ? 16 * row_scalars<Op>(p.head_dim) : 0);
    out = arena.take<C>(round_up(p.head_dim_v, Simd<C>::kLanes) * kTile<C>);
    inverse = arena.take<C>(kTile<C>);
    largest = arena.take<C>(kTile<C>);
    sum = arena.take<C>(kTile<C>);
    block_largest = arena.take<C>(kTile<C>);
    correction = arena.take<C>(kTile<C>);
    shift = arena.take<C>(kTile<C>);
    block_sum = arena.take<C>(kTile<C>);
    bytes = arena.used();
  }

  bool tiles;  // products go to the matrix unit
  Scalar *query_tile, *rows, *tail;
  LaneBits* mask;
  C *scores, *bias, *keep, *out, *inverse, *largest, *sum, *block_largest, *correction, *shift,
      *block_sum;  // bias: of a cap, or beside tiles
  int64_t bytes;
};

// Rows j and j + 1 of P as pairs of bfloat16, or the row itself.
template <class Op>
inline void store_probabilities(typename Op::V first, typename Op::V second, typename Op::Scalar* target) {
  if constexpr (Op::kPack == 2) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(target, Op::S::template pairs<BFloat16>(first, second));
#endif
  } else {
    (void)second;
    Op::S::store(target, first);
  }
}

// P^T = exp(S^T + shift) for rows of a block, with the lanes' sums; dropped and packed as Op needs it, in place: row
// j / 2 of the pairs is written after rows j and j + 1 have been read.
template <class Op, bool kFastPath, int kVectors>
inline void exponentiate(int64_t rows, typename Op::Compute factor, const typename Op::Compute* shift,
                         const typename Op::Compute* keep, const typename Op::Compute* scores,
                         typename Op::Scalar* probabilities, typename Op::Compute* sum) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using V = typename S::V;
  const Exponential<Op, kFastPath, Op::kSums> exponential(factor);
  V total[kVectors], part[kVectors];
  for (int v = 0; v < kVectors; ++v) total[v] = S::zero();  // a sum of its own for each block: long rows lose less
  for (int64_t begin = 0; begin < rows; begin += kEqualSum) {
    for (int v = 0; v < kVectors; ++v) part[v] = S::zero();
    for (int64_t j = begin; j < min64(rows, begin + kEqualSum); j += Op::kPack) {
      for (int v = 0; v < kVectors; ++v) {
        V p[Op::kPack];
        for (int half = 0; half < Op::kPack; ++half) {
          if (half == 1 && j + 1 == rows) {
            p[half] = S::zero();
            continue;
          }
          const int64_t at = (j + half) * kTile<C> + v * S::kLanes;
          p[half] = exponential(S::load(scores + at), S::load(shift + v * S::kLanes));
          part[v] += p[half];
          if (keep != nullptr) p[half] *= S::load(keep + at);
        }
        store_probabilities<Op>(p[0], p[Op::kPack - 1], probabilities + j / Op::kPack * kTile<C> + v * S::kLanes);
      }
    }
    for (int v = 0; v < kVectors; ++v) total[v] += part[v];
  }
  for (int v = 0; v < kVectors; ++v) {
    C* running = sum + v * S::kLanes;
    S::store(running, S::load(running) + total[v]);
  }
}

// Exponentiates all vectors of a segment that begins at row `row` of its block.
template <class Op, bool kFastPath>
inline void exponentiate_segment(const Segment& segment, int64_t row, typename Op::Compute factor,
                                 const typename Op::Compute* shift, const typename Op::Compute* keep,
                                 typename Op::Compute* scores, typename Op::Compute* sum) {
  using C = typename Op::Compute;
  for (int64_t v = segment.first; v < segment.last;) {
    const auto part = [&]<int kVectors>() {
      const int64_t lane = v * Simd<C>::kLanes, at = row * kTile<C> + lane;
      exponentiate<Op, kFastPath, kVectors>(
          segment.rows, factor, shift + lane, keep == nullptr ? nullptr : keep + at, scores + at,
          reinterpret_cast<typename Op::Scalar*>(scores) + row / Op::kPack * kTile<C> + lane, sum + lane);
      v += kVectors;
    };
    if (segment.last - v >= 4) part.template operator()<4>();
    else if (segment.last - v >= 2) part.template operator()<2>();
    else part.template operator()<1>();
  }
}

// exp(S^T + shift) of a block of scores in pairs, dropped, whose rows that all lanes meet are done in steps so small
// that they hide among the products of the next block.
template <class Op, bool kFastPath>
struct PairProbabilities {
  using C = typename Op::Compute;
  using S = typename Op::S;
  using Scalar = typename Op::Scalar;
  C factor = 0;
  const C *shift = nullptr, *keep = nullptr;  // keep: may be null
  C *scores = nullptr, *sum = nullptr;
  uint64_t next = 0, end = 0;  // the steps

  // Of a block whose first segment are the steps, if it has all lanes.
  void begin(const BlockPlan& block) {
    const Segment& first = block.segment[0];
    const bool whole = first.row == block.row && first.first == 0 && first.last == kTileVecs<C>;
    next = 0;
    end = whole ? first.rows / 2 * kTileVecs<C> : 0;
  }
  // Products of a register tile between two steps, while those of `rows` rows are computed. Denser, the steps would
  // hold up what brings the products in.
  int64_t pace(int64_t rows, int64_t depth) const {
    return end == 0 ? kPrefetchSteps : max64(2, rows * depth / (kTileRows * static_cast<int64_t>(end)));
  }
  // Two rows of one vector.
  [[gnu::always_inline]] inline void step() {
    const int64_t row = next / kTileVecs<C> * 2, lane = next % kTileVecs<C> * S::kLanes, at = row * kTile<C> + lane;
    const Exponential<Op, kFastPath, Op::kSums> exponential(factor);
    const C* source = scores + at;
    const auto added = S::load(shift + lane);
    auto first = exponential(S::load(source), added), second = exponential(S::load(source + kTile<C>), added);
    S::store(sum + lane, S::load(sum + lane) + (first + second));
    if (!kFastPath && keep != nullptr) {
      first *= S::load(keep + at);
      second *= S::load(keep + at + kTile<C>);
    }
    store_probabilities<Op>(first, second, reinterpret_cast<Scalar*>(scores) + row / 2 * kTile<C> + lane);
    ++next;
  }
  // All that is left.
  void finish(const BlockPlan& block) {
    while (next < end && next % kTileVecs<C> != 0) step();
    for (int64_t s = 0; s < block.segments; ++s) {
      Segment segment = block.segment[s];
      const int64_t done = s == 0 ? static_cast<int64_t>(next / kTileVecs<C>) * 2 : 0;
      segment.rows -= done;
      exponentiate_segment<Op, kFastPath>(segment, segment.row - block.row + done, factor, shift, keep, scores, sum);
    }
  }
};

// S^T to memory, masked by the band, with the maximum per lane. With kScaled they are scaled, and added to the bias, if
// any, that lies where they go.
template <class Op, bool kScaled, class Waiting>
struct ScoreTile {
  using C = typename Op::Compute;
  Factors<Op, false> keys_queries;
  int64_t depth;
  C scale;
  bool biased;
  const LaneBits* mask;  // may be null
  bool partial;          // as of Segment
  Range live;            // lanes of the first row
  int64_t vector;
  C *scores, *largest;
  Waiting* waiting;  // probabilities of the block before; a step of them after every `pace` products
  int64_t pace;
  PrefetchStreams* next;

  template <int kRows, int kVectors>
  void run(int64_t row, int64_t first_vector) const {
    using S = typename Op::S;
    using V = typename S::V;
    V score[kRows][kVectors] = {};
    const int64_t lane = first_vector * S::kLanes;
    ProductWalk<Op, false> walk(keys_queries, row, lane);
    int64_t k = 0;
    if constexpr (Op::kPack == 2) {
      const int64_t part = min64(depth, kLongestSum);
      while (k < part && waiting->next < waiting->end) {
        for (const int64_t end = min64(part, k + pace); k < end; ++k) walk.step(score);
        waiting->step();
        if (next != nullptr) next->prefetch();
      }
    }
    add_products(walk, k, depth, next, score);
    C* target = scores + row * kTile<C> + lane;
    if constexpr (kScaled) {
      const V factor = S::set1(scale);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          score[r][v] = biased ? S::fma(score[r][v], factor, S::load(target + r * kTile<C> + v * S::kLanes))
                               : score[r][v] * factor;
    }
    const V dead = S::set1(-kInfinity<C>);
    exclude_tile<C>(score, bits_from(mask, row), vector + first_vector, dead);
    if (partial) mask_tile<C>(score, {live.begin + row, live.end + row}, vector + first_vector, dead);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      V m = S::load(largest + lane + v * S::kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        S::store(target + r * kTile<C> + v * S::kLanes, score[r][v]);
        m = S::max(score[r][v], m);
      }
      S::store(largest + lane + v * S::kLanes, m);
    }
  }
};

// Scores in memory: x = finish(x, where it lies), then the band and `mask`, which may be null; the maximum per lane
// goes to `largest`. With kMasksOnly they are what they are, but for the band and the mask.
template <bool kMasksOnly, class C, class Finish>
inline void finish_scores(const BandWalk<C>& walk, const BlockPlan& block, const LaneBits* mask, C* scores, C* largest,
                          const Finish& finish) {
  using S = Simd<C>;
  using V = typename S::V;
  constexpr int kChains = 4;  // a maximum waits for the one before
  const V dead = S::set1(-kInfinity<C>);
  for (int64_t s = 0; s < block.segments; ++s) {
    const Segment& segment = block.segment[s];
    const Range live = walk.live_lanes(segment.row);
    for (int64_t v = segment.first; v < segment.last; ++v) {
      const bool partial = segment.partial && !LaneMask<C>::all(live, v, segment.rows);
      LaneMask<C> band(live, v);
      V m[kChains] = {S::load(largest + v * S::kLanes), dead, dead, dead};
      int64_t row = segment.row - block.row, at = row * kTile<C> + v * S::kLanes;
      const int64_t end = row + segment.rows;
      if (kMasksOnly && mask == nullptr && !partial)
        for (; row + kChains <= end; row += kChains)
          for (int i = 0; i < kChains; ++i, at += kTile<C>) m[i] = S::max(S::load(scores + at), m[i]);
      for (; row < end; ++row, at += kTile<C>) {
        V x = finish(S::load(scores + at), at);
        if (mask != nullptr) x = S::select(mask[row] >> (v * S::kLanes), x, dead);
        if (partial) {
          x = band.select(x, dead);
          band.advance();
        }
        S::store(scores + at, x);
        m[0] = S::max(x, m[0]);
      }
      if constexpr (kMasksOnly) m[0] = S::max(S::max(m[1], m[2]), S::max(m[3], m[0]));
      S::store(largest + v * S::kLanes, m[0]);
    }
  }
}

// Products -> scale, softcap, bias and band in place; the maximum per lane goes to `largest`.
template <class C>
inline void transform_scores(const ScoreParams<C>& score, const BandWalk<C>& walk, const BlockPlan& block,
                             const C* bias, const LaneBits* mask, C* scores, C* largest) {
  using S = Simd<C>;
  const auto scale = S::set1(score.scale);
  finish_scores<false>(walk, block, mask, scores, largest,
                       [&](auto x, int64_t at) { return finish_score(score, x, scale, bias + at); });
}

// S^T of a block to memory, masked (by `mask`, too, if it isn't null); block_largest is their maximum per lane. On the
// generic path without a cap they are scaled, and `scores` hold their bias if there is one; else they are the products.
template <class Op, bool kFastPath>
inline void store_scores(const ForwardScratch<Op>& scratch, const ScoreParams<typename Op::Compute>& score,
                         const BandWalk<typename Op::Compute>& walk, const BlockPlan& block, int64_t vectors,
                         int64_t depth, ReadableRows<typename Op::Scalar> keys, const LaneBits* mask,
                         typename Op::Compute* scores, PrefetchStreams* next = nullptr,
                         PairProbabilities<Op, kFastPath>* waiting = nullptr) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  // Of elements that aren't in pairs the fast path comes here for few blocks: the generic path's tile serves it too.
  constexpr bool kPairs = Op::kPack == 2;
  // But its maxima are of products summed in the order of ProbabilityTile's.
  using Tile = ScoreTile<std::conditional_t<kFastPath, Op, typename Op::Product>, !(kPairs && kFastPath),
                         std::conditional_t<kPairs, PairProbabilities<Op, kFastPath>, void>>;
  const bool products = kFastPath || score.capped();
  PairProbabilities<Op, kFastPath> none;
  if (waiting == nullptr) waiting = &none;
  for (int64_t v = 0; v < vectors; ++v) S::store(scratch.block_largest + v * S::kLanes, S::set1(-kInfinity<C>));
  if constexpr (Tiles<Op>::kHas) {
    if (scratch.tiles) {
      const auto steps = static_cast<int64_t>(waiting->end - waiting->next),
                 calls = Tiles<Op>::calls(block.rows, vectors, depth);
      const int64_t at_once = (steps + calls - 1) / calls;
      for (int64_t s = 0; s < block.segments; ++s) {
        const Segment& segment = block.segment[s];
        const int64_t row = segment.row - block.row, lane = segment.first * S::kLanes;
        Tiles<Op>::scores(segment.rows, segment.last - segment.first, depth, keys, row, scratch.query_tile + lane,
                          scratch.tail, scores + row * kTile<C> + lane, [&]() __attribute__((always_inline)) {
                            for (int64_t i = 0; i < at_once && waiting->next < waiting->end; ++i) waiting->step();
                            if (next != nullptr) next->prefetch();
                          });
      }
      if constexpr (kFastPath)
        finish_scores<true>(walk, block, mask, scores, scratch.block_largest, [](auto x, int64_t) { return x; });
      else if (!score.capped())
        transform_scores<C>(score, walk, block, scratch.bias, mask, scores, scratch.block_largest);
      return;
    }
  }
  const int64_t pace = waiting->pace(block.rows, depth);
  for (int64_t s = 0; s < block.segments; ++s) {
    const Segment& segment = block.segment[s];
    const int64_t row = segment.row - block.row, lane = segment.first * S::kLanes;
    for_tiles<kTileRows * kTileVectors, kTileVectors, 1>(
        segment.rows, segment.last - segment.first,
        Tile{{keys.data + row * keys.step, keys.step, scratch.query_tile + lane, kTile<C>},
             depth,
             products ? C(1) : score.scale,
             !products && score.has_bias,
             bits_from(mask, row),
             segment.partial,
             walk.live_lanes(segment.row),
             segment.first,
             scores + row * kTile<C> + lane,
             scratch.block_largest + lane,
             waiting,
             pace,
             next});
  }
}

// From this score on (in the log2 domain) rounding the maximum shows in probabilities whose products are not rounded:
// 2^-12 here.
inline constexpr float kLargeScore = 0x1p12f;

// Products of a block times `factor`, in place: rounded as the maximum is.
template <class C>
[[gnu::noinline]] void scale_scores(const BlockPlan& block, C factor, C* scores) {
  using S = Simd<C>;
  for (int64_t s = 0; s < block.segments; ++s) {
    const Segment& segment = block.segment[s];
    for (int64_t row = segment.row - block.row, end = row + segment.rows; row < end; ++row)
      for (int64_t lane = segment.first * S::kLanes; lane < segment.last * S::kLanes; lane += S::kLanes) {
        C* x = scores + row * kTile<C> + lane;
        S::store(x, S::load(x) * S::set1(factor));
      }
  }
}

// The fast path: S^T becomes P^T while it still is in registers, before its block's maximum is known. m, which is what
// is subtracted, need not be the maximum, only near it. A lane that has none yet takes the largest of its first tile
// with a live key.
template <class Op>
struct ProbabilityTile {
  using C = typename Op::Compute;
  Factors<Op, false> keys_queries;
  int64_t depth;
  bool opening;          // a lane may have m = -inf
  const LaneBits* mask;  // may be null
  bool partial;          // as of Segment
  Range live;            // lanes of the first row
  int64_t vector;
  C *m, *sum, *probabilities;
  PrefetchStreams* next;

  template <int kRows, int kVectors>
  void run(int64_t row, int64_t first_vector) const {
    using S = typename Op::S;
    using V = typename S::V;
    V score[kRows][kVectors] = {};
    const int64_t lane = first_vector * S::kLanes;
    ProductWalk<Op, false> walk(keys_queries, row, lane);
    add_products(walk, 0, depth, next, score);
    const V dead = S::set1(-kInfinity<C>);
    exclude_tile<C>(score, bits_from(mask, row), vector + first_vector, dead);
    if (partial) mask_tile<C>(score, {live.begin + row, live.end + row}, vector + first_vector, dead);
    const Exponential<Op, true, Op::kSums> exponential(1);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = lane + v * S::kLanes;
      V shift = S::load(m + at);
      if (opening) {
        V largest = score[0][v];
#pragma GCC unroll 8
        for (int r = 1; r < kRows; ++r) largest = S::max(score[r][v], largest);
        const V opened = shift == dead ? largest : shift;
        S::store(m + at, opened);
        shift = opened == dead ? S::zero() : opened;
      }
      V total = S::zero();
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const V p = exponential(score[r][v], -shift);
        total += p;
        S::store(probabilities + (row + r) * kTile<C> + at, p);
      }
      S::store(sum + at, S::load(sum + at) + total);
    }
  }
};

// Goes over from the maximum `old` to m: `correction` rescales what was summed under the old one. Returns what is to be
// subtracted: of a lane without any live key so far, whose m is -inf, 0, so that its probabilities are exp(-inf) = 0
// and not NaN. log2e: what takes the scores' domain to that of log2.
template <class Op, class C = typename Op::Compute>
inline typename Op::V new_maximum(const ForwardScratch<Op>& scratch, int64_t lane, typename Op::V old, typename Op::V m,
                                  C log2e) {
  using S = Simd<C>;
  const auto subtracted = m == S::set1(-kInfinity<C>) ? S::zero() : m;
  const auto correction = S::exp2((old - subtracted) * S::set1(log2e));
  S::store(scratch.largest + lane, m);
  S::store(scratch.correction + lane, correction);
  S::store(scratch.sum + lane, S::load(scratch.sum + lane) * correction);
  return subtracted;
}

// A block of the fast path's scores by ProbabilityTile: fills scratch.scores with its probabilities, adds up
// scratch.sum. False if nothing that was summed before is to be rescaled. A lane whose m turns out to be far from its
// maximum, or that has infinities or NaN, gets the maximum as m and the tiles run again; the other lanes come out as
// before, so that a query's result never depends on its neighbours. `opening`: a lane may have met no live key yet.
template <class Op>
[[gnu::noinline]] bool probabilities_in_registers(const ForwardScratch<Op>& scratch,
                                                  const ScoreParams<typename Op::Compute>& score,
                                                  const BandWalk<typename Op::Compute>& walk, const BlockPlan& block,
                                                  int64_t vectors, int64_t depth,
                                                  ReadableRows<typename Op::Scalar> keys, const LaneBits* mask,
                                                  PrefetchStreams* next, bool& opening) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using V = typename S::V;
  const V dead = S::set1(-kInfinity<C>);
  const auto run = [&](bool open, C* m, PrefetchStreams* prefetched) {
    for (int64_t v = 0; v < vectors; ++v) S::store(scratch.block_sum + v * S::kLanes, S::zero());
    for (int64_t s = 0; s < block.segments; ++s) {
      const Segment& segment = block.segment[s];
      const int64_t row = segment.row - block.row, lane = segment.first * S::kLanes;
      for_tiles<kTileRows * kTileVectors, kTileVectors, 1>(
          segment.rows, segment.last - segment.first,
          ProbabilityTile<Op>{{keys.data + row * keys.step, keys.step, scratch.query_tile + lane, kTile<C>},
                              depth,
                              open,
                              bits_from(mask, row),
                              segment.partial,
                              walk.live_lanes(segment.row),
                              segment.first,
                              m + lane,
                              scratch.block_sum + lane,
                              scratch.scores + row * kTile<C> + lane,
                              prefetched});
    }
  };
  const auto in_range = [&](int64_t lane) {
    const V block_sum = S::load(scratch.block_sum + lane), sum = S::load(scratch.sum + lane) + block_sum;
    return ((sum >= S::set1(C(0.5))) & (block_sum <= S::set1(C(0x1p16)))) |
           ((S::load(scratch.largest + lane) == dead) & (sum == S::zero()));
  };

  if (opening)
    for (int64_t v = 0; v < vectors; ++v)  // what m was before
      S::store(scratch.correction + v * S::kLanes, S::load(scratch.largest + v * S::kLanes));
  run(opening, scratch.largest, next);
  auto good = S::zero() == S::zero(), open = good;
  for (int64_t lane = 0; lane < vectors * S::kLanes; lane += S::kLanes) {
    good &= in_range(lane);
    open &= S::load(scratch.largest + lane) > dead;
  }
  const bool rescale = !S::all(good);
  if (rescale) {
    store_scores<Op, true>(scratch, score, walk, block, vectors, depth, keys, mask, scratch.scores);
    for (int64_t lane = 0; lane < vectors * S::kLanes; lane += S::kLanes) {
      const V now = S::load(scratch.largest + lane), old = opening ? S::load(scratch.correction + lane) : now;
      const V largest = S::max(S::load(scratch.block_largest + lane), old);
      S::store(scratch.block_largest + lane, new_maximum(scratch, lane, old, in_range(lane) ? now : largest, C(1)));
    }
    run(false, scratch.block_largest, nullptr);
  }
  for (int64_t v = 0; v < vectors; ++v) {
    C* sum = scratch.sum + v * S::kLanes;
    S::store(sum, S::load(sum) + S::load(scratch.block_sum + v * S::kLanes));
  }
  opening = rescale || !S::all(open);
  return rescale;
}

// Probabilities of all other scores, through memory and with the exact maximum.
template <class T, class Op>
[[gnu::noinline]] void probabilities_through_memory(const Forward& p, const ForwardScratch<Op>& scratch,
                                                    const ScoreParams<typename Op::Compute>& score,
                                                    const BandWalk<typename Op::Compute>& walk, const BlockPlan& block,
                                                    int64_t batch, int64_t head, int64_t query, int64_t queries,
                                                    int64_t depth, ReadableRows<typename Op::Scalar> keys,
                                                    const LaneBits* mask, PrefetchStreams* next) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  const int64_t vectors = (queries + S::kLanes - 1) / S::kLanes;
  const bool capped = score.capped();
  if (score.has_bias)
    bias_tile<C, T>(p, 3, batch, head, block.row, block.rows, query, queries, capped ? scratch.bias : scratch.scores);
  store_scores<Op, false>(scratch, score, walk, block, vectors, depth, keys, capped ? nullptr : mask, scratch.scores,
                          next);
  if (capped) {
    for (int64_t v = 0; v < vectors; ++v) S::store(scratch.block_largest + v * S::kLanes, S::set1(-kInfinity<C>));
    transform_scores<C>(score, walk, block, scratch.bias, mask, scratch.scores, scratch.block_largest);
  }
  if (score.dropout) dropout_tile<C>(p, 3, batch, head, block.row, block.rows, query, queries, scratch.keep);
  for (int64_t lane = 0; lane < vectors * S::kLanes; lane += S::kLanes) {
    const auto old = S::load(scratch.largest + lane), m = S::max(S::load(scratch.block_largest + lane), old);
    S::store(scratch.shift + lane, -new_maximum(scratch, lane, old, m, kLog2E<C>));
  }
  for (int64_t s = 0; s < block.segments; ++s)
    exponentiate_segment<Op, false>(block.segment[s], block.segment[s].row - block.row, C(1), scratch.shift,
                                    score.dropout ? scratch.keep : nullptr, scratch.scores, scratch.sum);
}

}  // namespace
}  // namespace attnkern::cpu
