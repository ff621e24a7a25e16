// The kernel of decoding that keeps the memory busy: a vector of keys is a turn, in which rows of K and then of V are
// read, so that both streams go on while scores become probabilities.
#pragma once

#include <bit>

#include "decode_scores.h"

namespace attnkern::cpu {
namespace {

// bias <- that of all rows of a key head for keys [key, key + keys), in tiles of kTile lanes.
template <class T, class C>
[[gnu::noinline]] void decode_bias(const Attention& p, int64_t batch, int64_t head_k, int64_t key, int64_t keys,
                                   C* bias) {
  const int64_t group = p.heads_q / p.heads_k, rows = group * p.seqlen_q;
  for (int64_t first = 0; first < keys; first += kTile<C>)
    for (int64_t g = 0; g < group; ++g)
      bias_tile<C, T>(p, 2, batch, head_k * group + g, 0, p.seqlen_q, key + first, min64(kTile<C>, keys - first),
                      bias + in_tiles<C>(g * p.seqlen_q, rows, first));
}

// The sums of a turn's values, in pairs of keys (bfloat16) or one by one.
template <class T, class Op, int kRows>
inline constexpr bool kTurnsInPairs = Op::kPack == 2 && kRows >= kRowsForValueTiles<T, Op>;

// That of the sums in scratch.recent.
template <class T, class Op, int kRows, int kDim>
inline constexpr SumOrder kSumOrder = kTurnsInPairs<T, Op, kRows>                     ? SumOrder::kOfPairs
                                      : kReadsByParity<T, kDim / Simd<float>::kLanes> ? SumOrder::kByParity
                                                                                      : SumOrder::kOwn;

// Calls move(where a vector of sums belongs, the vector) for all of them.
template <int kRows, int kVectors, class V, class Move>
[[gnu::always_inline]] inline void move_sums(float* sums, int64_t step, V (&sum)[kRows][kVectors], const Move& move) {
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < kVectors; ++c) move(sums + r * step + c * Simd<float>::kLanes, sum[r][c]);
}

// kRows vectors of kRows equal parts: part j of vector i becomes part i of vector j.
template <int kRows, class V>
inline void transpose_groups(V (&x)[kRows]) {
  if constexpr (kRows > 1) {
    constexpr int kLanes = Simd<float>::kLanes;
    const auto even = [](V a, V b) { return Simd<float>::every_second<kLanes / kRows, kLanes, 0>(a, b); };
    const auto odd = [](V a, V b) { return Simd<float>::every_second<kLanes / kRows, kLanes, 1>(a, b); };
    if constexpr (kRows == 2) {
      const V a = x[0], b = x[1];
      x[0] = even(a, b), x[1] = odd(a, b);
    } else {
      const V a = even(x[0], x[1]), b = even(x[2], x[3]), c = odd(x[0], x[1]), d = odd(x[2], x[3]);
      x[0] = even(a, b), x[1] = even(c, d), x[2] = odd(a, b), x[3] = odd(c, d);
    }
  }
}

// Adds scratch.recent to scratch.out and sums, and clears it.
template <int kDim, SumOrder kOrder, class Op>
[[gnu::noinline]] void add_recent_sums(const DecodeScratch<Op>& scratch, int64_t rows) {
  using S = Simd<float>;
  using V = S::V;
  constexpr int kLanes = S::kLanes;
  const auto add = [](float* total, V sum) { S::store(total, S::load(total) + sum); };
  for (int64_t r = 0; r < rows; ++r) {
    float *out = scratch.out + r * scratch.out_step, *recent = scratch.recent + r * scratch.recent_step();
    if constexpr (kOrder != SumOrder::kOwn) {
      for (int64_t c = 0; c < kDim; c += 2 * kLanes)
        add_two_sums<kOrder>(out + c, S::load(recent + c), S::load(recent + c + kLanes));
    } else {
      for (int64_t c = 0; c < kDim; c += kLanes) add(out + c, S::load(recent + c));
    }
    add(scratch.sums + r * kLanes, S::load(recent + scratch.out_step));
    std::memset(recent, 0, static_cast<size_t>(scratch.recent_step()) * sizeof(float));
  }
}

// A row's maximum so far, m, and that of its next scores x: returns the greater one and rescales what is summed up.
template <int kDim, class Op>
[[gnu::always_inline]] inline Simd<float>::V raise_maximum(const DecodeScratch<Op>& scratch, int64_t row,
                                                           Simd<float>::V m, Simd<float>::V x) {
  using S = Simd<float>;
  const S::V old = m;
  m = S::max_all(S::max(x, m));
  const S::V correction = S::exp2((old - m) * S::set1(kLog2E<float>));
  for (int64_t c = 0; c < kDim; c += S::kLanes) {
    float* out = scratch.out + row * scratch.out_step + c;
    S::store(out, S::load(out) * correction);
  }
  S::store(scratch.sums + row * S::kLanes, S::load(scratch.sums + row * S::kLanes) * correction);
  scratch.largest[row] = m[0];
  return m;
}

// A turn's rows; and how far away those are that are prefetched meanwhile.
template <class T>
struct Turn {
  const T* row;
  int64_t step, ahead;
};

// The same; rows from elsewhere are prefetched meanwhile, row i with row i, without the first `early` ones.
template <class T>
struct TurnOfHead {
  const T* row;
  int64_t step;
  const T* other;
  int64_t other_step, early;
  [[gnu::always_inline]] void prefetch(int64_t i, int64_t column, int64_t columns) const {
    if (i >= early) prefetch_row(other + i * other_step + column, columns);
  }
};

// The same where the heads of a token lie side by side, `next_head` apart. What comes four rows later is prefetched,
// too, from the second-level cache to the first: the processor itself looks for rows that follow each other.
template <class T>
struct TurnBesideOthers : TurnOfHead<T> {
  static constexpr int64_t kLanes = Simd<float>::kLanes, kAhead = 4;
  int64_t next_head;
  [[gnu::always_inline]] void prefetch(int64_t i, int64_t column, int64_t columns) const {
    TurnOfHead<T>::prefetch(i, column, columns);
    const int64_t later =
        i < kLanes - kAhead ? (i + kAhead) * this->step : (i + kAhead - kLanes) * this->step + next_head;
    prefetch_row<3>(this->row + later + column, columns);
  }
};

// Copies the rows of a turn from `key` on, which lie in two pages.
template <int kDim, class T>
inline void copy_turn(const KeyRows& rows, int64_t batch, int64_t head, int64_t key, T* copy) {
  for_runs(rows, key, Simd<float>::kLanes, [&](int64_t first, int64_t count) {
    const T* source = at<T>(rows, batch, head, key + first);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(copy + (first + i) * kDim, source + i * rows.stride[2], kDim * sizeof(T));
  });
}

// The rows of K or V from `key` on, a turn at a time, in their order. kAhead: how many rows ahead they are prefetched;
// kDenseAhead: where they follow each other and may be near.
template <class T, class Keys, int kDim, int64_t kAhead, int64_t kDenseAhead>
class Turns {
  static constexpr bool kInPages = !std::is_same_v<Keys, View>;
  static constexpr int64_t kLanes = Simd<float>::kLanes, kTurnsAhead = (kAhead + kLanes - 1) / kLanes;

 public:
  Turns(const Forward& p, const View& view, int64_t batch, int64_t head, int64_t key, int64_t keys, bool may_be_near)
      : rows_(rows_of<Keys>(view, p.pages)),
        first_(at<T>(rows_, batch, head, key)),
        ahead_((may_be_near && rows_.stride[2] == kDim ? kDenseAhead : kAhead) * rows_.stride[2]),
        batch_(batch),
        head_(head),
        key_(key),
        keys_(keys) {
    if constexpr (kInPages) {
      found_[0] = last_ = first_;
      for (int64_t turn = 1; turn < kTurnsAhead; ++turn) find(turn);
    }
  }

  // That of the keys from number j on.
  [[gnu::always_inline]] Turn<T> from(int64_t j) {
    const int64_t step = rows_.stride[2];
    if constexpr (!kInPages) {
      return {first_ + j * step, step, ahead_};
    } else {
      find(j / kLanes + kTurnsAhead);
      const T* row = found_[j / kLanes % kFound];
      if (rows_together(rows_, key_ + j) >= kLanes) [[likely]]
        return {row, step, last_ - row};
      copy_turn<kDim>(rows_, batch_, head_, key_ + j, copy_);
      return {copy_, kDim, 0};
    }
  }

 private:
  static constexpr int64_t kFound = int64_t{1} << std::bit_width(static_cast<uint64_t>(kTurnsAhead));

  // The rows of a turn, which are prefetched before they are read: those behind the turn before, unless a page begins.
  [[gnu::always_inline]] void find(int64_t turn) {
    const int64_t j = turn * kLanes;
    if (j >= keys_) return;
    const bool same_page = rows_together(rows_, key_ + j - kLanes) > kLanes;
    last_ = same_page ? last_ + kLanes * rows_.stride[2] : at<T>(rows_, batch_, head_, key_ + j);
    found_[turn % kFound] = last_;
  }

  const Keys rows_;
  const T* const first_;
  const int64_t ahead_;  // unless in pages
  const int64_t batch_, head_, key_, keys_;
  const T* last_ = nullptr;
  const T* found_[kInPages ? kFound : 1];
  alignas(64) T copy_[kInPages ? kLanes * kDim : 1];  // of rows in two pages
};

// The row behind another. A compiler that could see all rows of a turn would keep their places in registers, those of
// vectors, too, and sums in memory.
template <class T>
[[gnu::always_inline]] inline const T* next_row(const T* row, int64_t step) {
  row += step;
  asm("" : "+r"(row));
  return row;
}

// The parts into which kRun rows cut lanes and registers: three rows leave one of four empty.
template <int kRun>
inline constexpr int kPartsOf = std::bit_ceil(static_cast<unsigned>(kRun));

// scores[row] = q[row] . K of a turn's keys, for kRun rows.
template <class T, int kDim, int kRun, template <class> class AnyTurn>
[[gnu::always_inline]] inline void score_turn(const AnyTurn<T>& now, bool prefetches,
                                              const typename RowDot<float, T>::Query* q, int64_t q_step,
                                              float* scores) {
  using S = Simd<float>;
  using V = S::V;
  using Dot = RowDot<float, T>;
  constexpr int kLanes = S::kLanes, kGroups = kPartsOf<kRun>, kGroup = kLanes / kGroups;
  const T* row = now.row;
  V all[kGroups];  // of each group of keys: kRun rows of sums
#pragma GCC unroll 2
  for (int group = 0; group < kGroups; ++group) {
    V sum[kLanes] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; ++i, row = next_row(row, now.step)) {
      if constexpr (!std::is_same_v<AnyTurn<T>, Turn<T>>) {
        if (prefetches) now.prefetch(group * kGroup + i, 0, kDim);
      } else if (prefetches) {
        prefetch_row(row + now.ahead, kDim);
      }
#pragma GCC unroll 16
      for (int c = 0; c < kDim; c += Dot::kWidth) {
        const auto value = kDim - c < Dot::kWidth ? Dot::load(row + c, kDim - c) : Dot::load(row + c);
#pragma GCC unroll 4
        for (int r = 0; r < kRun; ++r)
          sum[r * kGroup + i] = Dot::accumulate(sum[r * kGroup + i], value, Dot::load_query(q + r * q_step + c));
      }
    }
    all[group] = S::sum_each(sum);
  }
  transpose_groups(all);
#pragma GCC unroll 4
  for (int r = 0; r < kRun; ++r) S::store(scores + r * kLanes, all[r]);
}

// score_turn for eight rows that lie along the lanes.
template <class T, int kDim>
[[gnu::always_inline]] inline void score_turn_of_lanes(const Turn<T>& now,
                                                       const typename RowDot<float, T>::Query* lanes, float* scores) {
  using S = Simd<float>;
  constexpr int kLanes = S::kLanes, kTerms = kLanes / 8;
  const QueryVectors<float, T, 1, 8> q{lanes, 0, kDim};
  S::V sum[1][kLanes] = {};
  q.add_products(RowsTogether<T, kLanes>(now.row, now.step), now.row, now.step, now.ahead, sum);
  S::template sum_each<kTerms>(sum[0]);
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) S::store(scores + r * kLanes, sum[0][r * kTerms]);
}

// Prefetches the rows of a turn that comes later in the order of the memory, though some columns of all rows are read
// first: call number i of those columns, which begin at `column`, prefetches the next kColumns elements.
template <int kColumns, int kDim, class T>
[[gnu::always_inline]] inline void prefetch_in_order(const Turn<T>& now, int64_t column, int64_t i) {
  const int64_t first = column * Simd<float>::kLanes + i * kColumns;
  if (first * static_cast<int64_t>(sizeof(T)) % 64 == 0)
    prefetch_row(now.row + first / kDim * now.step + now.ahead + first % kDim, kColumns);
}

// sum[row] += probabilities[row] . V of a turn's keys, for kRun rows and kColumns columns from `column` on.
template <bool kPairs, int kDim, int kColumns, class T, int kRun, int kVectors, template <class> class AnyTurn>
[[gnu::always_inline]] inline void add_turn(const AnyTurn<T>& now, bool prefetches, const float* probabilities,
                                            int64_t column, Simd<float>::V (&sum)[kRun][kVectors]) {
  using S = Simd<float>;
  using V = S::V;
  constexpr int kLanes = S::kLanes;
  const T* row = now.row + column;
  if constexpr (kPairs) {
#if defined(__AVX512BF16__)
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i, row = next_row(row, 2 * now.step)) {
      if constexpr (!std::is_same_v<AnyTurn<T>, Turn<T>>) {
        if (prefetches) now.prefetch(2 * i, column, kColumns), now.prefetch(2 * i + 1, column, kColumns);
      } else if (prefetches) {
        if constexpr (kZen5 && kDim % (2 * kColumns) == 0) prefetch_in_order<2 * kColumns, kDim>(now, column, i);
        else prefetch_row(row + now.ahead, kColumns), prefetch_row(row + now.step + now.ahead, kColumns);
      }
      __m512i value[kVectors];
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; c += 2) {
        const auto mask = first_of_32(kColumns - c * kLanes);
        const __m512i low = _mm512_maskz_loadu_epi16(mask, row + c * kLanes);
        const __m512i high = _mm512_maskz_loadu_epi16(mask, row + now.step + c * kLanes);
        value[c] = _mm512_unpacklo_epi16(low, high);  // within 128-bit quarters: put in order at the end
        value[c + 1] = _mm512_unpackhi_epi16(low, high);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRun; ++r) {
        const __m512i pair = PairDot::broadcast(reinterpret_cast<const uint32_t*>(probabilities) + r * kLanes + i);
#pragma GCC unroll 16
        for (int c = 0; c < kVectors; ++c) sum[r][c] = PairDot::accumulate(sum[r][c], pair, value[c]);
      }
    }
#endif
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; ++i, row = next_row(row, now.step)) {
      if constexpr (!std::is_same_v<AnyTurn<T>, Turn<T>>) {
        if (prefetches) now.prefetch(i, column, kColumns);
      } else if (prefetches) {
        if constexpr (kRegisters == 16) prefetch_in_order<kColumns, kDim>(now, column, i);
        else prefetch_row(row + now.ahead, kColumns);
      }
      const auto add = [&](int c, V value) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < kRun; ++r) sum[r][c] = S::fma(S::set1(probabilities[r * kLanes + i]), value, sum[r][c]);
      };
#pragma GCC unroll 16
      for (int c = 0; c < kVectors; ++c) {
        if constexpr (!kReadsByParity<T, kVectors>) add(c, S::load_as(row + c * kLanes));
        else if (c % 2 == 0) {
          const auto two = ByParity::load(row + c * kLanes);
          add(c, two.even), add(c + 1, two.odd);
        }
      }
    }
  }
}

// How many vectors of columns of a value kRun rows meet at once: there are registers for their sums.
template <bool kPairs, int kDim, int kRun>
inline constexpr int kVectorsOfValues = min64(
    (kPairs ? round_up(kDim, 2 * Simd<float>::kLanes) : kDim) / Simd<float>::kLanes, kRegisters / 2 / kPartsOf<kRun>);

// Adds all kDim columns of some turns, whose probabilities lie `part` apart, to sums that lie in memory: as many
// columns at a time as there are registers for.
template <bool kPairs, int kDim, int kRun, class T, template <class> class AnyTurn>
[[gnu::always_inline]] inline void add_values_of_turns(const AnyTurn<T>* turns, int64_t count, bool prefetches,
                                                       const float* probabilities, int64_t part, float* sums,
                                                       int64_t step) {
  using S = Simd<float>;
  constexpr int kLanes = S::kLanes, kVectors = (kPairs ? round_up(kDim, 2 * kLanes) : kDim) / kLanes;
  constexpr int kBlock = kVectorsOfValues<kPairs, kDim, kRun>, kRest = kVectors % kBlock, kWhole = kVectors - kRest;
  const auto columns = [&]<int kCount, int kColumns>(int64_t c) __attribute__((always_inline)) {
    S::V sum[kRun][kCount];
    float* first = sums + c * kLanes;
    move_sums(first, step, sum, [](float* from, S::V& to) { to = S::load(from); });
    for (int64_t i = 0; i < count; ++i)
      add_turn<kPairs, kDim, kColumns>(turns[i], prefetches, probabilities + i * part, c * kLanes, sum);
    move_sums(first, step, sum, [](float* to, S::V& from) { S::store(to, from); });
  };
  constexpr int kColumns = kWhole == kBlock ? min64(kDim, kBlock * kLanes) : kBlock * kLanes;
  for (int64_t c = 0; c < kWhole; c += kBlock) columns.template operator()<kBlock, kColumns>(c);
  if constexpr (kRest != 0) columns.template operator()<kRest, kDim - kWhole * kLanes>(kWhole);
}

// How many rows ahead K and V are prefetched; as measured.
template <class T, bool kPairs, int kDim>
inline constexpr int64_t kRowsAhead = (kPairs && !kZen5 ? 8192 : 4096) / (kDim * sizeof(T));
// And where rows follow each other, which with AVX-512 the processor prefetches, too, unless one row of float32 meets
// them: four of them or 1 KiB, or a turn and 4 KiB where some columns of all of a turn's values come first. (A Zen 5 is
// fastest with 4 KiB throughout, the 64 lines that it waits for at a time: it drops what is prefetched beyond them.)
template <class T, bool kPairs, int kRows, int kDim>
constexpr int64_t dense_rows_ahead() {
  constexpr int64_t kLanes = Simd<float>::kLanes, kBytes = kDim * sizeof(T);
  if (kZen5 || kRegisters == 16 || (kRows == 1 && sizeof(T) == 4)) return kRowsAhead<T, kPairs, kDim>;
  if (kRows == 4 && kDim > kVectorsOfValues<kPairs, kDim, 4> * kLanes) return max64(kLanes, 4096 / kBytes);
  return max64(4, 1024 / kBytes);
}

// Rows of queries against keys [key, key + keys), whole vectors of keys that every query attends to; scores have a
// scale and perhaps a bias. Continues what scratch.out, largest and sums hold. K and V take turns, a vector of keys
// each, and rows are read in the order of the memory, so that neither of the two streams stops for long. A turn's
// probabilities become ready while the next one's scores are computed. kRows: 1, 2, or 4 for any number of rows, which
// then meet a turn's keys in runs of up to 4, or eight along the lanes, while these lie in the first-level cache.
//
// Registers, 16 of sums each: scores have kRun rows x 16 / kRun keys, values kRun rows x 16 / kRun vectors of columns.
// From turn to turn the sums of values stay there (1 and 2 rows) or lie in scratch.recent. They are added to
// scratch.out every kDecodeKeys keys: sums of longer runs would lose digits.
template <class T, class Op, class Keys, int kRows, int kDim>
[[gnu::noinline]] void decode_stream(const Forward& p, const DecodeScratch<Op>& scratch, int64_t batch, int64_t head_k,
                                     int64_t key, int64_t keys) {
  using S = Simd<float>;
  using V = S::V;
  constexpr bool kPairs = kTurnsInPairs<T, Op, kRows>;
  constexpr SumOrder kOrder = kSumOrder<T, Op, kRows, kDim>;
  constexpr bool kInRegisters = kRows < 4;  // the sums of values, from turn to turn
  constexpr int kLanes = S::kLanes;
  const int64_t rows = kRows < 4 ? kRows : p.heads_q / p.heads_k * p.seqlen_q, recent_step = scratch.recent_step();
  using RowsInTurns = Turns<T, Keys, kDim, kRowsAhead<T, kPairs, kDim>, dense_rows_ahead<T, kPairs, kRows, kDim>()>;
  const bool near = rows <= 5 || Op::kPack == 2;  // (as measured: more rows of float32 take so long that far is better)
  RowsInTurns k(p, p.k, batch, head_k, key, keys, near), v(p, p.v, batch, head_k, key, keys, near);
  const ScoreParams<float> score(p, true);
  const V scale = S::set1(score.signed_scale);
  const auto* q = queries_of<T>(scratch);
  [[maybe_unused]] V kept[kInRegisters ? kRows : 1][kInRegisters ? kDim / kLanes : 1] = {};
  [[maybe_unused]] V kept_sum[kInRegisters ? kRows : 1] = {};
  alignas(64) [[maybe_unused]] float few[kInRegisters ? 2 * kRows * kLanes : 1];
  float* const scores = kInRegisters ? few : scratch.scores;  // a vector of each row
  float* const probabilities = scores + rows * kLanes;

  const auto score_rows_of = [&](const Turn<T>& now) __attribute__((always_inline)) {
    if constexpr (kRows == 4 && kRegisters == 32 && Op::kPack == 2)  // (float32 gains nothing from it)
      if (rows == 8) return score_turn_of_lanes<T, kDim>(now, queries_of<T>(scratch.q_lanes, scratch.q_lanes), scores);
    for_rows_of<kRows>(rows, [&]<int kRun>(int64_t r) __attribute__((always_inline)) {
      score_turn<T, kDim, kRun>(now, r == 0, q + r * scratch.q_step, scratch.q_step, scores + r * kLanes);
    });
  };
  const auto add_values_of = [&](const Turn<T>& now) __attribute__((always_inline)) {
    if constexpr (kInRegisters) add_turn<kPairs, kDim, kDim>(now, true, probabilities, 0, kept);
    else
      for_row_runs(rows, [&]<int kRun>(int64_t r) __attribute__((always_inline)) {
        add_values_of_turns<kPairs, kDim, kRun>(&now, 1, r == 0, probabilities + r * kLanes, 0,
                                                scratch.recent + r * recent_step, recent_step);
      });
  };
  const auto add_recent = [&]() __attribute__((always_inline)) {
    if constexpr (kInRegisters) {
      const auto add = [](float* total, V& sum) { S::store(total, S::load(total) + sum), sum = S::zero(); };
      if constexpr (kOrder == SumOrder::kByParity) {
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
          for (int c = 0; c < kDim / kLanes; c += 2) {
            add_two_sums<kOrder>(scratch.out + r * scratch.out_step + c * kLanes, kept[r][c], kept[r][c + 1]);
            kept[r][c] = kept[r][c + 1] = S::zero();
          }
      } else {
        move_sums(scratch.out, scratch.out_step, kept, add);
      }
      for (int r = 0; r < kRows; ++r) add(scratch.sums + r * kLanes, kept_sum[r]);
    } else {
      add_recent_sums<kDim, kOrder>(scratch, rows);
    }
  };

  if constexpr (!kInRegisters) std::memset(scratch.recent, 0, static_cast<size_t>(rows * recent_step) * sizeof(float));
  score_rows_of(k.from(0));
  for (int64_t j = 0; j < keys; j += kLanes) {
    if (j % kDecodeKeys == 0) {
      add_recent();
      if (score.has_bias) decode_bias<T>(p, batch, head_k, key + j, min64(kDecodeKeys, keys - j), scratch.bias);
    }
#pragma GCC unroll 2
    for (int64_t r = 0; r < rows; ++r) {
      V x = S::product(S::load(scores + r * kLanes), scale);
      if (score.has_bias) {
        const V bias = S::load(scratch.bias + in_tiles<float>(r, rows, j % kDecodeKeys));
        x = score.mask_added && bias == S::set1(-kInfinity<float>) ? bias : x + bias;
      }
      V m = S::set1(scratch.largest[r]);
      if (!S::all(x <= m)) {  // a greater maximum, which soon gets rare, or NaN, which is none
        add_recent();
        m = raise_maximum<kDim>(scratch, r, m, x);
      }
      const V shift = m == S::set1(-kInfinity<float>) ? S::zero() : m + (m - m);  // NaN where scores overflow
      const V probability = S::exp2<Op::kSums>((x - shift) * S::set1(kLog2E<float>));
      if constexpr (kInRegisters) kept_sum[r] += probability;
      else {
        float* sum = scratch.recent + r * recent_step + scratch.out_step;
        S::store(sum, S::load(sum) + probability);
      }
      float* target = probabilities + r * kLanes;
      if constexpr (kPairs) S::store_as(reinterpret_cast<BFloat16*>(target), probability);
      else S::store(target, probability);
    }
    if (j + kLanes < keys) score_rows_of(k.from(j + kLanes));
    add_values_of(v.from(j));
  }
  add_recent();
}

}  // namespace
}  // namespace attnkern::cpu
