// decode_stream for several key heads at a time, whose rows are read in the order in which they lie in memory.
#pragma once

#include "decode_stream.h"

namespace attnkern::cpu {
namespace {

// Key heads of a task, turns of each that follow each other, and rows of each, at most. (Measured with AVX2: more rows
// have so much to compute that blocks of one head are faster, though its rows lie far apart.)
inline constexpr int64_t kHeadsTogether = 8, kTurnsTogether = 4;
template <class T>
inline constexpr int64_t kRowsOfHeadsTogether = sizeof(T) == 4 ? 10 : 8;

// Whether a turn of a head has so few bytes, of rows that lie in pages, that its K and V and those of the next head
// stay in the first-level cache together. (Measured on a Zen 5 alone.)
template <class T>
constexpr bool head_by_head(int64_t head_dim) {
  return kZen5 && head_dim * static_cast<int64_t>(sizeof(T)) <= 128;
}

// Whether a key's rows of all heads lie side by side.
inline bool side_by_side(const View& rows) { return rows.stride[1] < rows.stride[2]; }

// Rows of K or V of several heads from `key` on, which may lie in pages.
template <class T, int kDim>
class TurnsOfHeads {
 public:
  static constexpr int64_t kLanes = Simd<float>::kLanes;

  TurnsOfHeads(const Forward& p, const View& view, int64_t batch, int64_t head, int64_t heads, int64_t key,
               int64_t keys)
      : rows_(view, p.pages),
        batch_(batch),
        head_(head),
        key_(key),
        keys_(keys),
        side_by_side_(side_by_side(view)),
        dense_(side_by_side_ && view.stride[1] * heads == view.stride[2]) {}

  // How many turns from key number j on a head meets before the next one does, of `most`: those of which its rows lie
  // together, or each turn's by themselves where heads follow one after the other. (Where heads lie side by side, more
  // than one wouldn't stay in the first-level cache for the last head.)
  int64_t turns(int64_t j, int64_t most) const {
    if (side_by_side_) return 1;
    most = min64(most, kTurnsTogether);
    if (!head_by_head<T>(kDim)) return max64(1, min64(most, rows_together(rows_, key_ + j) / kLanes));
    int64_t count = 1;
    while (count < most && together(j + (count - 1) * kLanes) && together(j + count * kLanes)) ++count;
    return count;
  }
  // That of the keys from number j on; `other` are prefetched meanwhile: those of `other_head` from their number `next`
  // on, in the order in which they lie in memory.
  template <class TurnOfOne>
  [[gnu::always_inline]] TurnOfOne turn(int64_t head, int64_t j, const TurnsOfHeads& other, int64_t other_head,
                                        int64_t next, int64_t early) {
    TurnOfOne now;
    now.early = early;
    if constexpr (std::is_same_v<TurnOfOne, TurnBesideOthers<T>>) now.next_head = rows_.stride[1];
    if (together(j)) {
      now.row = row(head, j), now.step = rows_.stride[2];
    } else {
      copy_turn<kDim>(rows_, batch_, head_ + head, key_ + j, copy_);
      now.row = copy_, now.step = kDim;
    }
    if (next >= other.keys_ || !other.together(next)) now.other = now.row, now.other_step = now.step;
    else if (other.dense_)
      now.other_step = other.rows_.stride[1], now.other = other.row(0, next) + other_head * kLanes * now.other_step;
    else now.other = other.row(other_head, next), now.other_step = other.rows_.stride[2];
    return now;
  }

 private:
  bool together(int64_t j) const { return rows_together(rows_, key_ + j) >= kLanes; }
  const T* row(int64_t head, int64_t j) const { return at<T>(rows_, batch_, head_ + head, key_ + j); }

  const KeyRows rows_;
  const int64_t batch_, head_, key_, keys_;
  const bool side_by_side_, dense_;
  alignas(64) T copy_[kLanes * kDim];  // of rows in two pages
};

// How many of the turns, up to the first that doesn't, leave the rows' maxima as they are.
template <class Op>
[[gnu::noinline]] int64_t turns_without_maximum(const DecodeScratch<Op>& scratch, float scale, int64_t rows,
                                                int64_t turns, const float* scores) {
  using S = Simd<float>;
  for (int64_t t = 0; t < turns; ++t)
    for (int64_t r = 0; r < rows; ++r, scores += S::kLanes)
      if (!S::all(S::product(S::load(scores), S::set1(scale)) <= S::set1(scratch.largest[r]))) return t;
  return turns;
}

// How many rows are prefetched while a turn's scores become probabilities.
inline int64_t early_rows(int64_t rows) { return 2 * min64(rows, 3); }

// Scores of turns of a head to probabilities. Only one turn may have a greater maximum.
template <class Op, SumOrder kOrder, int kDim, class TurnOfOne>
[[gnu::noinline]] void probabilities_of_turns(const DecodeScratch<Op>& scratch, float signed_scale, int64_t rows,
                                              int64_t turns, const float* scores, float* probabilities,
                                              const TurnOfOne* prefetched) {
  using S = Simd<float>;
  using V = S::V;
  constexpr int kLanes = S::kLanes;
  const V scale = S::set1(signed_scale);
  for (int64_t r = 0; r < rows; ++r) {
    V m = S::set1(scratch.largest[r]);
    if (const V x = S::product(S::load(scores + r * kLanes), scale); turns == 1 && !S::all(x <= m)) {
      add_recent_sums<kDim, kOrder>(scratch, rows);
      m = raise_maximum<kDim>(scratch, r, m, x);
    }
    const V shift = m == S::set1(-kInfinity<float>) ? S::zero() : m + (m - m);  // NaN where scores overflow
    float* sum = scratch.recent + r * scratch.recent_step() + scratch.out_step;
    V total = S::load(sum);
#pragma GCC unroll 4
    for (int64_t t = 0; t < turns; ++t) {
      const int64_t place = (t * rows + r) * kLanes;
      const TurnOfOne& turn = prefetched[t];
      for (int64_t i = 2 * r; i < 2 * r + 2 && i < turn.early; ++i)
        prefetch_row(turn.other + i * turn.other_step, kDim);
      const V x = S::product(S::load(scores + place), scale);
      const V probability = S::exp2<Op::kSums>((x - shift) * S::set1(kLog2E<float>));
      total += probability;
      if constexpr (kOrder == SumOrder::kOfPairs)
        S::store_as(reinterpret_cast<BFloat16*>(probabilities + place), probability);
      else S::store(probabilities + place, probability);
    }
    S::store(sum, total);
  }
}

// score_turn and add_values_of_turns apart from other runs of rows: a function that holds runs of all lengths has too
// few registers for the places of their rows.
template <class T, int kDim, int kRun, class TurnOfOne>
[[gnu::noinline]] void score_run(const TurnOfOne& now, bool prefetches, const typename RowDot<float, T>::Query* q,
                                 int64_t q_step, float* scores) {
  score_turn<T, kDim, kRun>(now, prefetches, q, q_step, scores);
}
template <bool kPairs, int kDim, int kRun, class TurnOfOne>
[[gnu::noinline]] void add_run(const TurnOfOne* turns, int64_t count, bool prefetches, const float* probabilities,
                               int64_t part, float* sums, int64_t step) {
  add_values_of_turns<kPairs, kDim, kRun>(turns, count, prefetches, probabilities, part, sums, step);
}

// decode_stream for several key heads, which may lie in pages, and without a bias: some turns of all heads, first of K
// and then of V, or of a head after the other. Meanwhile the next of these are prefetched. Each head adds up in the
// order of decode_stream. TurnOfOne: TurnOfHead<T>, or TurnBesideOthers<T> where heads lie so.
template <class T, class Op, int kRows, int kDim, class TurnOfOne>
[[gnu::noinline]] void decode_heads(const Forward& p, const DecodeScratch<Op>* scratch, int64_t batch, int64_t head_k,
                                    int64_t heads, int64_t key, int64_t keys) {
  using S = Simd<float>;
  constexpr bool kPairs = kTurnsInPairs<T, Op, kRows>;
  constexpr SumOrder kOrder = kSumOrder<T, Op, kRows, kDim>;
  constexpr int kLanes = S::kLanes;
  const int64_t rows = kRows < 4 ? kRows : p.heads_q / p.heads_k * p.seqlen_q, recent_step = scratch->recent_step();
  const int64_t part = rows * kLanes;  // scores or probabilities of a turn
  const float scale = ScoreParams<float>(p, true).signed_scale;
  using Turns = TurnsOfHeads<T, kDim>;
  Turns k(p, p.k, batch, head_k, heads, key, keys), v(p, p.v, batch, head_k, heads, key, keys);
  const auto turns_from = [&](int64_t j) {
    const int64_t most = min64(keys - j, kDecodeKeys - j % kDecodeKeys) / kLanes;
    return v.turns(j, k.turns(j, most));
  };
  // Both prefetch rows of `other_head` meanwhile, from number `next` of `other` on. Of each head's scratch.scores:
  // those of some turns, those of the next ones, probabilities.
  const auto score_turns = [&](int64_t head, int64_t j, int64_t turns, int64_t place, const Turns& other,
                               int64_t other_head, int64_t next) {
    const DecodeScratch<Op>& own = scratch[head];
    const auto* q = queries_of<T>(own);
    for (int64_t t = 0; t < turns; ++t) {
      const auto turn = k.template turn<TurnOfOne>(head, j + t * kLanes, other, other_head, next + t * kLanes, 0);
      float* scores = own.scores + (place + t) * part;
      for_rows_of<kRows>(rows, [&]<int kRun>(int64_t r) __attribute__((always_inline)) {
        if constexpr (kRows < 4) score_turn<T, kDim, kRun>(turn, true, q, own.q_step, scores);
        else score_run<T, kDim, kRun>(turn, r == 0, q + r * own.q_step, own.q_step, scores + r * kLanes);
      });
    }
  };
  const auto add_turns = [&](int64_t head, int64_t j, int64_t turns, int64_t place, const Turns& other,
                             int64_t other_head, int64_t next) {
    const DecodeScratch<Op>& own = scratch[head];
    const float* scores = own.scores + place * part;
    float* probabilities = own.scores + 2 * kTurnsTogether * part;
    if (j % kDecodeKeys == 0) add_recent_sums<kDim, kOrder>(own, rows);
    TurnOfOne of_turns[kTurnsTogether];
    for (int64_t t = 0; t < turns; ++t)
      of_turns[t] =
          v.template turn<TurnOfOne>(head, j + t * kLanes, other, other_head, next + t * kLanes, early_rows(rows));
    for (int64_t t = 0, now; t < turns; t += now) {
      now = max64(1, turns_without_maximum(own, scale, rows, turns - t, scores + t * part));
      probabilities_of_turns<Op, kOrder, kDim>(own, scale, rows, now, scores + t * part, probabilities, of_turns + t);
      for_rows_of<kRows>(rows, [&]<int kRun>(int64_t r) __attribute__((always_inline)) {
        if constexpr (kRows < 4)
          add_values_of_turns<kPairs, kDim, kRun>(of_turns + t, now, true, probabilities, part, own.recent,
                                                  recent_step);
        else
          add_run<kPairs, kDim, kRun>(of_turns + t, now, r == 0, probabilities + r * kLanes, part,
                                      own.recent + r * recent_step, recent_step);
      });
    }
  };

  for (int64_t head = 0; head < heads; ++head)
    std::memset(scratch[head].recent, 0, static_cast<size_t>(rows * recent_step) * sizeof(float));
  if (!head_by_head<T>(kDim) || side_by_side(p.k)) {  // K of all heads, then V
    int64_t turns = turns_from(0);
    for (int64_t head = 0; head < heads; ++head) score_turns(head, 0, turns, 0, v, head, 0);
    for (int64_t j = 0, place = 0; j < keys; place = kTurnsTogether - place) {
      const int64_t now = turns, next = j + now * kLanes;
      turns = next < keys ? turns_from(next) : 0;
      for (int64_t head = 0; turns > 0 && head < heads; ++head)
        score_turns(head, next, turns, kTurnsTogether - place, v, head, j);
      const int64_t after = next + turns * kLanes;
      for (int64_t head = 0; head < heads; ++head)
        add_turns(head, j, now, place, after < keys ? k : v, head, after < keys ? after : next);
      j = next;
    }
  } else {  // a head's K and V, which are prefetched while the head before is at work
    for (int64_t j = 0, turns; j < keys; j += turns * kLanes) {
      turns = turns_from(j);
      for (int64_t head = 0; head < heads; ++head) {
        const bool last = head + 1 == heads;
        const int64_t other = last ? 0 : head + 1, next = last ? j + turns * kLanes : j;
        score_turns(head, j, turns, 0, k, other, next);
        add_turns(head, j, turns, 0, v, other, next);
      }
    }
  }
  for (int64_t head = 0; head < heads; ++head) add_recent_sums<kDim, kOrder>(scratch[head], rows);
}

}  // namespace
}  // namespace attnkern::cpu
