// Forward pass against few keys: packed sequences of some tokens, the first tokens of a cache. All that a head needs of
// its scores lies in registers and the first-level cache; nothing is packed or transposed. Heads of so few rows that
// several fit in a vector share its softmax.
#pragma once

#include "forward.h"

namespace attnkern::cpu {
namespace {

// body(column, load) for each vector of a row: load(x) has the columns that x points to.
template <class C, class Body>
[[gnu::always_inline]] inline void for_vectors(int64_t columns, const Body& body) {
  using S = Simd<C>;
  int64_t c = 0;
  for (; c + S::kLanes <= columns; c += S::kLanes) body(c, [](const auto* x) { return S::load_as(x); });
  if (c < columns) body(c, [rest = columns - c](const auto* x) { return S::load_as(x, rest); });
}

// Products of kRows queries and kKeys keys, each a vector of parts of its sum: of key j from products + j * step on.
template <class T, class C, int kRows, int kKeys>
[[gnu::noinline]] void few_products(const T* q, int64_t q_step, const T* k, int64_t k_step, int64_t columns,
                                    typename Simd<C>::V* products, int64_t step) {
  using S = Simd<C>;
  using V = typename S::V;
  V sums[kKeys][kRows] = {};
  for_vectors<C>(columns, [&](int64_t c, const auto& load) __attribute__((always_inline)) {
    V query[kRows];
    for (int r = 0; r < kRows; ++r) query[r] = load(q + r * q_step + c);
    for (int j = 0; j < kKeys; ++j) {
      const V key = load(k + j * k_step + c);
      for (int r = 0; r < kRows; ++r) sums[j][r] = S::fma(query[r], key, sums[j][r]);
    }
  });
  for (int j = 0; j < kKeys; ++j)
    for (int r = 0; r < kRows; ++r) products[j * step + r] = sums[j][r];
}

// A row's output from column c on: the sum over its keys, without those of `excluded`, of probability and value, times
// `inverse`.
template <bool kExcludes, class T, class C, int kVectors>
[[gnu::always_inline]] inline void few_values(const C* probabilities, const T* v, int64_t v_step, int64_t keys,
                                              int64_t columns, C inverse, LaneBits excluded, T* out) {
  using S = Simd<C>;
  using V = typename S::V;
  V sums[kVectors] = {};
  for (int64_t j = 0; j < keys; ++j) {
    if (kExcludes && (excluded >> j & 1) != 0) continue;
    const V probability = S::set1(probabilities[j * S::kLanes]);
    const T* row = v + j * v_step;
    for (int n = 0; n < kVectors; ++n)
      sums[n] =
          S::fma(probability, kVectors == 1 ? S::load_as(row, columns) : S::load_as(row + n * S::kLanes), sums[n]);
  }
  for (int n = 0; n < kVectors; ++n) {
    const V x = inverse == C(0) ? S::zero() : sums[n] * S::set1(inverse);
    if constexpr (kVectors == 1) S::store_as(out, x, columns);
    else S::store_as(out + n * S::kLanes, x);
  }
}

// Prefetches as many rows of a head as are read or written now: those kFewKeys behind them, which belong to sequences
// that follow. Only where rows lie apart: the machine's own prefetching ends with such a row. To the second-level
// cache: they share few lines of the first one, and would drive each other out. (Inlined early, since gcc takes a
// function that only prefetches for one without effects, and drops its calls.)
template <int kForWriting, class T>
[[gnu::always_inline]] inline void prefetch_later(const View& view, int64_t batch, int64_t head, int64_t row,
                                                  int64_t rows, int64_t columns) {
  if (!lie_apart(view, columns)) return;
  for (int64_t i = 0; i < rows; ++i) {
    const char* later = reinterpret_cast<const char*>(at<T>(view, batch, head, row + i + kFewKeys));
    for (int64_t byte = 0; byte < columns * static_cast<int64_t>(sizeof(T)); byte += 64)
      __builtin_prefetch(later + byte, kForWriting, 2);
  }
}

// Scores of rows [row, row + rows) of `heads` heads of a from `first` on with the first `keys` rows of b, of which
// `group` heads share one: of key j and lane n, which count the rows of all heads, from scores + j * heads * rows + n
// on.
template <class T, class C>
[[gnu::always_inline]] inline void few_scores(const View& a, const View& b, int64_t batch, int64_t first, int64_t heads,
                                              int64_t group, int64_t row, int64_t rows, int64_t keys, int64_t columns,
                                              C* scores) {
  using S = Simd<C>;
  using V = typename S::V;
  constexpr int64_t kLanes = S::kLanes;
  const int64_t lanes = heads * rows;
  V products[(kFewKeys + 1) * kLanes];  // whole vectors of them are summed
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t head_a = first + h, head_b = head_a / group;
    prefetch_later<0, T>(a, batch, head_a, row, rows, columns);
    if (row == 0 && head_b * group == head_a) prefetch_later<0, T>(b, batch, head_b, 0, keys, columns);
    const T *of_a = at<T>(a, batch, head_a, row), *of_b = at<T>(b, batch, head_b);
    for (int64_t j = 0; j < keys; j += 2)
      for (int64_t r = 0; r < rows; r += 4) {
        static constexpr decltype(&few_products<T, C, 1, 1>) kRun[2][4] = {
            {few_products<T, C, 1, 1>, few_products<T, C, 2, 1>, few_products<T, C, 3, 1>, few_products<T, C, 4, 1>},
            {few_products<T, C, 1, 2>, few_products<T, C, 2, 2>, few_products<T, C, 3, 2>, few_products<T, C, 4, 2>}};
        kRun[min64(2, keys - j) - 1][min64(4, rows - r) - 1](of_a + r * a.stride[2], a.stride[2],
                                                             of_b + j * b.stride[2], b.stride[2], columns,
                                                             products + j * lanes + h * rows + r, lanes);
      }
  }
  for (int64_t i = 0; i < keys * lanes; i += kLanes) {
    for (int64_t n = keys * lanes; n < i + kLanes; ++n) products[n] = S::zero();
    S::store(scores + i, S::sum_each(*reinterpret_cast<V(*)[kLanes]>(products + i)));
  }
}

// Rows [row, row + rows) of `heads` heads from `first` on, a lane each: at most a vector of them. Of several heads they
// are all rows, without dropout.
template <class T, class Op, bool kBiased, bool kSeveral>
void attend_few_rows(const Forward& p, const ScoreParams<typename Op::Compute>& score, int64_t batch, int64_t first,
                     int64_t heads, int64_t row, int64_t rows) {
  if (!kSeveral) heads = 1;  // which the compiler then knows
  using C = typename Op::Compute;
  using S = Simd<C>;
  using V = typename S::V;
  constexpr int64_t kLanes = S::kLanes;
  const int64_t lanes = heads * rows, group_k = p.heads_q / p.heads_k, group_v = p.heads_q / p.heads_v;
  const int64_t keys = kBiased ? min64(p.seqlen_k, kFewKeys) : p.seqlen_k, v_step = p.v.stride[2];

  C scores[(kFewKeys + 2) * kLanes], probabilities[kFewKeys * kLanes];
  few_scores<T>(p.q, p.k, batch, first, heads, group_k, row, rows, keys, p.head_dim, scores);

  const Band band = p.band.transposed();
  const V dead = S::set1(-kInfinity<C>), log2e = S::set1(kLog2E<C>);
  LaneBits of_row = 1;  // the lane of a row in each head
  V sink = S::set1(sink_of<C>(p, batch, first));
  for (int64_t h = 1; h < heads; ++h) {
    of_row |= LaneBits{1} << (h * rows);
    if (p.sinks.data != nullptr)
      sink = S::select(bits_between({h * rows, kLanes}), S::set1(sink_of<C>(p, batch, first + h)), sink);
  }
  // Nothing counts of keys that a mask excludes from a row, or a bias from all rows of a head: bits of those.
  C bias[kBiased ? kFewKeys * kTile<C> : 1];
  LaneBits excluded_from_all[kBiased ? kLanes : 1] = {};
  for (int64_t h = 0; kBiased && h < heads; ++h)  // (What one fills up the next writes over.)
    bias_tile<C, T>(p, 3, batch, first + h, 0, keys, row, rows, bias + h * rows);
  V m = sink;
  for (int64_t j = 0; j < keys; ++j) {
    const C* const of_key = kBiased ? bias + j * kTile<C> : nullptr;
    V x = finish_score<C>(score, S::load(scores + j * lanes), S::set1(score.signed_scale), of_key);
    if constexpr (kBiased) {
      const V own = S::load(of_key);
      if (score.mask_added) x = own == dead ? dead : x;
      else if (!S::all(own != dead))
        for (int64_t h = 0; h < heads; ++h) {
          const LaneBits of_head = bits_between({h * rows, (h + 1) * rows});
          if (!S::all(S::select(of_head, own, dead) == dead)) continue;
          excluded_from_all[h] |= LaneBits{1} << j;
          x = S::select(of_head, dead, x);
        }
    }
    const Range seen = band.visited(j, 1, {row, row + rows});
    x = S::select(bits_between({seen.begin - row, seen.end - row}) * of_row, x, dead);
    S::store(probabilities + j * kLanes, x);
    m = S::max(x, m);
  }
  const V shift = m == dead ? S::zero() : m + (m - m);  // NaN where scores overflow
  V sum = S::exp2((sink - shift) * log2e);
  for (int64_t j = 0; j < keys; ++j) {
    const V x = S::template exp2<Op::kSums>((S::load(probabilities + j * kLanes) - shift) * log2e);
    S::store(probabilities + j * kLanes, x);
    sum += x;
  }
  if (score.dropout) {
    C keep[kFewKeys * kTile<C>];
    dropout_tile<C>(p, 3, batch, first, 0, keys, row, rows, keep);
    for (int64_t j = 0; j < keys; ++j) {
      C* const x = probabilities + j * kLanes;
      for (int64_t r = 0; r < rows; ++r) x[r] *= keep[j * kTile<C> + r];
    }
  }
  C inverse[kLanes];
  S::store(inverse, sum == S::zero() ? S::zero() : S::set1(1) / sum);
  if (p.lse != nullptr) {
    C lse[2 * kLanes];
    S::store(lse, sum == S::zero() ? dead : m + S::log(sum));
    for (int64_t h = 0; h < heads; ++h)
      std::memcpy(static_cast<C*>(p.lse) + lse_index(p, batch, first + h, row), lse + h * rows,
                  static_cast<size_t>(rows) * sizeof(C));
  }

  for (int64_t n = 0, h = 0; h < heads; ++h) {
    const int64_t head_v = (first + h) / group_v;
    const T* v = at<T>(p.v, batch, head_v);
    if (row == 0 && head_v * group_v == first + h) prefetch_later<0, T>(p.v, batch, head_v, 0, keys, p.head_dim_v);
    prefetch_later<1, T>(p.out, batch, first + h, row, rows, p.head_dim_v);
    for (int64_t r = 0; r < rows; ++r, ++n) {
      const Range own = p.band.visited(row + r, 1, {0, keys});
      const C* weights = probabilities + own.begin * kLanes + n;
      const T* values = v + own.begin * v_step;
      T* out = at<T>(p.out, batch, first + h, row + r);
      LaneBits excluded = 0;
      if constexpr (kBiased) {
        excluded = excluded_from_all[h];
        for (int64_t j = 0; j < keys && score.mask_added; ++j)
          excluded |= LaneBits{bias[j * kTile<C> + n] == -kInfinity<C>} << j;
        excluded >>= own.begin;
      }
      int64_t c = 0;
      const auto add = [&]<int kVectors>() {
        few_values<kBiased, T, C, kVectors>(weights, values + c, v_step, own.end - own.begin, p.head_dim_v - c,
                                            inverse[n], excluded, out + c);
        c += kVectors * kLanes;
      };
      while (c + 8 * kLanes <= p.head_dim_v) add.template operator()<8>();
      while (c + 4 * kLanes <= p.head_dim_v) add.template operator()<4>();
      while (c < p.head_dim_v) add.template operator()<1>();
    }
  }
}

template <class T, class Op>
void attend_few_keys(const Forward& p, const Runtime& runtime) {
  using C = typename Op::Compute;
  constexpr int64_t kRows = Simd<C>::kLanes;
  const ScoreParams<C> score(p, true);
  const int64_t heads = p.batch * p.heads_q;
  const int64_t at_once = score.dropout ? 1 : max64(1, kRows / max64(1, p.seqlen_q));
  const int64_t tasks = runtime.num_threads == 1 ? 1 : min64(heads, 4 * runtime.num_threads);
  run_tasks(p, runtime, tasks, 0, [&](int64_t task, void*, int64_t) {
    const auto attend = [&]<bool kBiased, bool kSeveral>() {
      const int64_t end = heads * (task + 1) / tasks;
      for (int64_t h = heads * task / tasks, now; h < end; h += now) {
        const int64_t batch = h / p.heads_q, first = h - batch * p.heads_q;
        now = min64(at_once, min64(end - h, p.heads_q - first));
        for (int64_t row = 0; row < p.seqlen_q; row += kRows)
          attend_few_rows<T, Op, kBiased, kSeveral>(p, score, batch, first, now, row, min64(kRows, p.seqlen_q - row));
      }
    };
    const auto attend_by = [&]<bool kBiased>() {
      if (at_once > 1) attend.template operator()<kBiased, true>();
      else attend.template operator()<kBiased, false>();
    };
    if (score.has_bias) attend_by.template operator()<true>();
    else attend_by.template operator()<false>();
  });
}

}  // namespace
}  // namespace attnkern::cpu
