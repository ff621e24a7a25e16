// Scores of a few rows of queries with many keys, which lie as they do in memory.
#pragma once

#include <bit>

#include "decode_products.h"

namespace attnkern::cpu {
namespace {

// Whether rows of queries may lie along the lanes: with elements that meet as they lie, and room for several of them.
template <class C, class T>
inline constexpr bool kAlongLanes =
    std::is_same_v<typename RowDot<C, T>::Query, T> && (kRegisters == 32 ? Simd<C>::kLanes >= 8 : kVectorBytes == 32);

// How many keys meet kVectors vectors of queries at a time: there are registers for their sums.
template <int kVectors, int kLanes>
inline constexpr int kKeysOfScores = min64(
    kLanes, kRegisters == 32 && kVectors == 3 ? 8 : std::bit_floor(static_cast<unsigned>(kRegisters / 2 / kVectors)));

// kKeys rows that lie `step` apart, as pointers to every fourth: addresses of all are more than there are registers.
template <class T, int kKeys>
struct RowsTogether {
  const T* group[(kKeys + 3) / 4];
  int64_t step;

  RowsTogether(const T* first, int64_t row_step) : step(row_step) {
#pragma GCC unroll 4
    for (int g = 0; g < (kKeys + 3) / 4; ++g) group[g] = first + 4 * g * step;
  }
  [[gnu::always_inline]] const T* row(int key) const { return group[key / 4] + key % 4 * step; }
  [[gnu::always_inline]] void advance(int64_t columns) {
#pragma GCC unroll 4
    for (const T*& rows : group) {
      rows += columns;
      asm("" : "+r"(rows));  // or there is an address for each row again
    }
  }
};

// The same where there are only `count`: the last one stands for the others.
template <class T, int kKeys>
struct LastRows {
  const T* rows[kKeys];

  LastRows(const T* first, int64_t step, int64_t count) {
    for (int key = 0; key < kKeys; ++key) rows[key] = first + min64(key, count - 1) * step;
  }
  [[gnu::always_inline]] const T* row(int key) const { return rows[key]; }
  [[gnu::always_inline]] void advance(int64_t columns) {
    for (const T*& row : rows) row += columns;
  }
};

// Queries that meet keys: kVectors rows, `step` apart; or, where kRows of them lie along the lanes of a vector,
// kVectors times as many, with as many terms of their products as there is room for (lay_along_lanes).
template <class C, class T, int kVectors, int kRows>
struct QueryVectors {
  using Dot = RowDot<C, T>;
  static constexpr int kWidth = Dot::kWidth / kRows;  // columns that a vector has of each row
  const typename Dot::Query* q;
  int64_t step, columns;

  // Adds to sum[vector][key] what kKeys rows of keys give. They begin at `first`, and prefetch those `ahead`, unless
  // that is 0.
  template <int kKeys, class Rows>
  [[gnu::always_inline]] inline void add_products(Rows keys, const T* first, int64_t key_step, int64_t ahead,
                                                  typename Simd<C>::V (&sum)[kVectors][kKeys]) const {
    constexpr int kBytes = kWidth * sizeof(T) * kKeys, kLine = 64 / sizeof(T);
    constexpr int kAtOnce = kBytes < 64 ? 1 : kBytes / 64;  // rows of which a step prefetches a line
    constexpr int kSteps = kBytes < 64 ? 64 / kBytes : 1;   // ... or how many steps do so for one
    const auto* query = q;
    const auto step = [&]() __attribute__((always_inline)) {
      add_columns<true>(keys, query, sum);
      keys.advance(kWidth);
      query += kRows == 1 ? kWidth : kVectors * Dot::kWidth;
    };
    int64_t c = 0;
    for (; c + kLine <= columns; c += kLine) {
      const T* next = first + c + ahead;
#pragma GCC unroll 2
      for (int i = 0; i < kLine / kWidth; ++i) {
        step();
        if (ahead == 0 || i % kSteps != 0) continue;
#pragma GCC unroll 16
        for (int n = 0; n < kAtOnce; ++n, next += key_step) __builtin_prefetch(next, 0, kPrefetchTo);
      }
    }
    if (c == columns) return;
    for (int key = 0; ahead != 0 && key < kKeys; ++key)
      __builtin_prefetch(first + key * key_step + c + ahead, 0, kPrefetchTo);
    for (; c + kWidth <= columns; c += kWidth) step();
    if constexpr (kRows == 1)
      if (c < columns) add_columns<false>(keys, query, sum);
  }

 private:
  template <bool kWhole, int kKeys, class Rows>
  [[gnu::always_inline]] inline void add_columns(const Rows& keys, const typename Dot::Query* query,
                                                 typename Simd<C>::V (&sum)[kVectors][kKeys]) const {
    decltype(Dot::load_query(query)) queries[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) queries[v] = Dot::load_query(query + v * (kRows == 1 ? step : Dot::kWidth));
#pragma GCC unroll 16
    for (int key = 0; key < kKeys; ++key) {
      decltype(Dot::load(keys.row(key))) value;
      if constexpr (kRows > 1)
        value = (decltype(value))Simd<C>::template repeat<Simd<C>::kLanes / kRows>(keys.row(key));
      else if constexpr (kWhole) value = Dot::load(keys.row(key));
      else value = Dot::load(keys.row(key), columns % kWidth);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[v][key] = Dot::accumulate(sum[v][key], value, queries[v]);
    }
  }
};

// scores[row][key] = q[row] . K[key] for `keys` keys of a block and `rows` rows, no more than q has. Here as below, a
// row of scores has room for a block's keys.
template <int64_t kKeysOfBlock, class C, int kVectors, int kRows, class Keys>
[[gnu::noinline]] void decode_scores(const QueryVectors<C, typename Keys::Element, kVectors, kRows>& q, int64_t rows,
                                     const Keys k, int64_t keys, PrefetchAhead prefetch, C* scores) {
  using S = Simd<C>;
  using V = typename S::V;
  using T = typename Keys::Element;
  constexpr int kLanes = S::kLanes, kTerms = kLanes / kRows, kKeys = kKeysOfScores<kVectors, kLanes>;
  for (int64_t j = 0; j < keys;) {
    const T* next = k.row(j);
    const int64_t end = min64(keys, j + k.together(j)),
                  ahead = j < prefetch.keys ? k.row(j + prefetch.ahead) - next : 0;
    for (; j < end; j += kLanes) {
      const int64_t now = min64(kLanes, end - j);
      V all[kVectors][kLanes];  // a few at a time, and of these the sums over some of their lanes
#pragma GCC unroll 8
      for (int part = 0; part < kLanes; part += kKeys, next += kKeys * k.stride) {
        V sum[kVectors][kKeys] = {};
        const int64_t of_part = j + part < prefetch.keys ? ahead : prefetch.beyond;
        if (part + kKeys <= now) [[likely]]
          q.add_products(RowsTogether<T, kKeys>(next, k.stride), next, k.stride, of_part, sum);
        else if (part < now)
          q.add_products(LastRows<T, kKeys>(next, k.stride, now - part), next, k.stride, of_part, sum);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          S::template sum_each<kTerms, kKeys>(sum[v]);
#pragma GCC unroll 16
          for (int key = 0; key < kKeys; ++key) all[v][part + key] = sum[v][key];
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        S::template sum_each<kTerms, kLanes, kKeys>(all[v]);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          if (v * kRows + r >= rows) break;
          C* target = scores + (v * kRows + r) * kKeysOfBlock + j;
          if (now == kLanes) S::store(target, all[v][r * kTerms]);
          else S::store_as(target, all[v][r * kTerms], now);
        }
      }
    }
    j = end;
  }
}

// Calls body<vectors, rows of a vector>(first row, rows) for runs of rows. Where elements meet as they lie, as many
// rows as fill them lie along the lanes of a vector or two: fewer sums across lanes are left, and the fewer vectors a
// key meets, the more keys do.
template <class C, class T, class Body>
[[gnu::always_inline]] inline void for_runs_of_queries(int64_t rows, bool lanes, const Body& body) {
  int64_t r = 0;
  [[maybe_unused]] const auto along_lanes = [&]<int kVectors, int kRows>(int64_t least) __attribute__((always_inline)) {
    constexpr int kAll = kVectors * kRows;
    for (; rows - r >= least; r += kAll) body.template operator()<kVectors, kRows>(r, min64(kAll, rows - r));
  };
  if constexpr (kAlongLanes<C, T>) {
    if (lanes) {
      if constexpr (kRegisters == 32) {
        along_lanes.template operator()<1, 8>(8);
      } else {
        if constexpr (Simd<C>::kLanes == 8) along_lanes.template operator()<2, 4>(7);
        along_lanes.template operator()<2, 2>(3);
      }
    }
  }
  if (r >= rows) return;
  const auto run = [&]<int kRows>(int64_t next) { body.template operator()<kRows, 1>(r + next, kRows); };
  for_long_runs<min64(4, Simd<C>::kLanes)>(rows - r, run);
}

// Rows of queries as they meet keys: one by one, and along the lanes, unless that is null.
template <class Query>
struct RowsOfQueries {
  const Query* rows;
  int64_t step, count;
  const Query* lanes = nullptr;
};

// Whether rows of so many columns can lie along the lanes: whole vectors of their terms, and sums that aren't long.
template <class C, class T>
inline bool can_lie_along_lanes(int64_t columns) {
  constexpr int64_t kColumns = RowDot<C, T>::kWidth / (kRegisters == 32 ? 8 : Simd<C>::kLanes / 2);  // of a vector
  return kAlongLanes<C, T> && columns % (2 * kColumns) == 0 && columns <= kColumns * kLongestSum;
}

// Lays rows out so: of each run, a vector's rows and terms side by side, then those of the run's next vector.
template <class C, class T>
[[gnu::noinline]] void lay_along_lanes(const RowsOfQueries<typename RowDot<C, T>::Query>& q, int64_t columns,
                                       typename RowDot<C, T>::Query* lanes) {
  for_runs_of_queries<C, T>(q.count, true, [&]<int kVectors, int kRows>(int64_t first, int64_t count) {
    constexpr int64_t kWidth = RowDot<C, T>::kWidth / kRows;
    auto* to = lanes + first * columns;
    for (int64_t c = 0; kRows > 1 && c < columns; c += kWidth)
      for (int64_t r = 0; r < kVectors * kRows; ++r, to += kWidth) {
        if (r < count) std::memcpy(to, q.rows + (first + r) * q.step + c, kWidth * sizeof(*to));
        else std::memset(static_cast<void*>(to), 0, kWidth * sizeof(*to));
      }
  });
}

// decode_scores for any number of rows.
template <class C, int64_t kKeysOfBlock, class Keys>
inline void score_rows(const RowsOfQueries<typename RowDot<C, typename Keys::Element>::Query>& q, const Keys& k,
                       int64_t keys, int64_t columns, PrefetchAhead prefetch, C* scores) {
  using T = typename Keys::Element;
  for_runs_of_queries<C, T>(q.count, q.lanes != nullptr, [&]<int kVectors, int kRows>(int64_t r, int64_t count) {
    const auto* run = kRows > 1 ? q.lanes + r * columns : q.rows + r * q.step;
    decode_scores<kKeysOfBlock>(QueryVectors<C, T, kVectors, kRows>{run, q.step, columns}, count, k, keys,
                                r == 0 ? prefetch : PrefetchAhead{}, scores + r * kKeysOfBlock);
  });
}

// score_rows for a block: all rows meet the keys of a portion, then the next.
template <class C, int64_t kKeysOfBlock, class Keys>
inline void score_portions(const RowsOfQueries<typename RowDot<C, typename Keys::Element>::Query>& q, const Keys& k,
                           int64_t keys, int64_t columns, PrefetchAhead prefetch, int64_t portion, C* scores) {
  for (int64_t j = 0; j < keys; j += portion) {
    const int64_t now = min64(portion, keys - j);
    score_rows<C, kKeysOfBlock>(q, k.from(j), now, columns,
                                {max64(0, min64(now, prefetch.keys - j)), prefetch.ahead, prefetch.beyond}, scores + j);
  }
}

}  // namespace
}  // namespace attnkern::cpu
