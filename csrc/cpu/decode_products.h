// The products of a few rows of queries with many keys, which are read once and prefetched meanwhile.
#pragma once

#include "softmax.h"

namespace attnkern::cpu {
namespace {

// Keys of a block. The more, the fewer interruptions of the stream from memory, but the scores are to stay in the
// first-level cache: the greater number is for few rows.
inline constexpr int64_t kDecodeKeys = 256, kManyKeys = 1024, kFewRows = 4;

// Rows from which on values are multiplied by register tiles, as in the other passes. (Rows that are to be converted
// gain nothing from it.)
template <class T, class Op>
inline constexpr int64_t kRowsForValueTiles = kConverts<T, Op> ? kSharedMaxRows + 1
                                              : Op::kPack == 2 ? 3
                                                               : 6;

// Where a row's bias and dropout factors begin, for a key of the block.
template <class C>
inline int64_t in_tiles(int64_t row, int64_t rows, int64_t key) {
  return key / kTile<C> * kTile<C> * rows + row * kTile<C> + key % kTile<C>;
}

// Each of the first `keys` rows of a block prefetches the one that is read `ahead` keys later, and the others what lies
// `beyond` elements behind them, unless that is 0. Spread over the work: a burst of them would leave the memory idle
// afterwards.
struct PrefetchAhead {
  int64_t keys, ahead, beyond = 0;
};

// The head that comes after one at work, and its first key. A negative batch: there is none.
struct HeadAfter {
  int64_t batch = -1, head = 0, key = 0;

  // How many elements it is from a row of the head at work, whose keys end at `end`, to the row of this one that is
  // read `ahead` keys later; 0: there is none.
  int64_t beyond(const View& rows, int64_t at_batch, int64_t at_head, int64_t end, int64_t ahead) const {
    if (batch < 0) return 0;
    return (batch - at_batch) * rows.stride[0] + (head - at_head) * rows.stride[1] +
           (key - end + ahead) * rows.stride[2];
  }
};

// A block's rows of keys or values from its first on.
template <class T>
struct BlockRows {
  using Element = T;
  static constexpr bool kTogether = true;
  const T* first;
  int64_t stride;

  const T* row(int64_t i) const { return first + i * stride; }
  BlockRows from(int64_t i) const { return {row(i), stride}; }
  static constexpr int64_t together(int64_t) { return kUnbounded; }
};

// A block's rows in pages, from row `key` of a head on.
template <class T>
struct PagedRows {
  using Element = T;
  static constexpr bool kTogether = false;
  const KeyRows* rows;
  int64_t stride, batch, head, key;
  int64_t count = 0;        // how many there are
  bool prefetches = false;  // each row one that comes later

  const T* row(int64_t i) const { return at<T>(*rows, batch, head, key + i); }
  PagedRows from(int64_t i) const { return {rows, stride, batch, head, key + i}; }
  int64_t together(int64_t i) const { return rows_together(*rows, key + i); }
};

template <class T>
inline BlockRows<T> block_rows(const View& view, int64_t batch, int64_t head, int64_t key) {
  return {at<T>(view, batch, head, key), view.stride[2]};
}
template <class T>
inline PagedRows<T> block_rows(const KeyRows& rows, int64_t batch, int64_t head, int64_t key) {
  return {&rows, rows.stride[2], batch, head, key};
}

template <int kTo = kPrefetchTo, class T>
inline void prefetch_row(const T* row, int64_t columns) {
  for (int64_t byte = 0; byte < columns * static_cast<int64_t>(sizeof(T)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, kTo);
}

#if defined(__AVX512F__)
// Of 32 elements the first n.
inline __mmask32 first_of_32(int64_t n) { return static_cast<__mmask32>((uint64_t{1} << min64(32, n)) - 1); }
#endif

// Two vectors of columns of bfloat16, side by side, as those of even and those of odd number: of two elements in 32
// bits, a shift makes one a float and a mask the other, while elements in order must be spread.
struct ByParity {
  using S = Simd<float>;
  using V = S::V;
  V even, odd;

  static ByParity load(const BFloat16* p) {
    typedef int32_t Two __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));
    return of_pairs(*reinterpret_cast<const Two*>(p));
  }
  static ByParity load(const BFloat16* p, int64_t n) {
#if defined(__AVX512F__)
    return of_pairs((S::IV)_mm512_maskz_loadu_epi16(first_of_32(n), p));
#else
    BFloat16 elements[2 * S::kLanes] = {};
    std::memcpy(elements, p, static_cast<size_t>(n) * sizeof(BFloat16));
    return load(elements);
#endif
  }
  static ByParity of_pairs(S::IV two) { return {(V)(two << 16), (V)(two & -0x10000)}; }
  static ByParity of(V a, V b) {
    return [&]<int... kLane>(std::integer_sequence<int, kLane...>) -> ByParity {
      return {__builtin_shufflevector(a, b, (2 * kLane)...), __builtin_shufflevector(a, b, (2 * kLane + 1)...)};
    }(std::make_integer_sequence<int, S::kLanes>{});
  }
  // The vector from column number kFirst on.
  template <int kFirst>
  V columns() const {
    return [&]<int... kLane>(std::integer_sequence<int, kLane...>) {
      return __builtin_shufflevector(even, odd, (kLane % 2 * S::kLanes + (kFirst + kLane) / 2)...);
    }(std::make_integer_sequence<int, S::kLanes>{});
  }
};

// Whether kVectors vectors of columns of T are read so.
template <class T, int kVectors>
inline constexpr bool kReadsByParity = kVectors % 2 == 0 && std::is_same_v<T, BFloat16>;

// How a vector of a row of T meets one of a query: converted, in order or by parity, or as pairs that are multiplied as
// they are. `Query` are the query's elements, kConverted whether they are in order and converted; else take_query makes
// `room` of them.
template <class C, class T>
struct RowDot {
  using Query = C;
  static constexpr bool kConverted = true;
  using V = typename Simd<C>::V;
  static constexpr int kWidth = Simd<C>::kLanes;  // elements
  static V load_query(const Query* p) { return Simd<C>::load(p); }
  static V load(const T* p) { return Simd<C>::load_as(p); }
  static V load(const T* p, int64_t n) { return Simd<C>::load_as(p, n); }
  static V accumulate(V sum, V a, V b) { return Simd<C>::fma(a, b, sum); }
};
#if defined(__AVX512BF16__)
template <>
struct RowDot<float, BFloat16> {
  using Query = BFloat16;
  using V = Simd<float>::V;
  static constexpr bool kConverted = false;
  static constexpr int kWidth = 32;
  static void take_query(Query* to, int64_t room, const BFloat16* from, int64_t stride, int64_t columns) {
    const int64_t copied = stride == 1 ? columns : 0;  // at once
    std::memcpy(static_cast<void*>(to), from, static_cast<size_t>(copied) * sizeof(Query));
    for (int64_t c = copied; c < room; ++c) to[c] = c < columns ? from[c * stride] : BFloat16{};
  }
  static __m512i load_query(const Query* p) { return _mm512_loadu_si512(p); }
  static __m512i load(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static __m512i load(const BFloat16* p, int64_t n) { return _mm512_maskz_loadu_epi16(first_of_32(n), p); }
  static V accumulate(V sum, __m512i a, __m512i b) { return PairDot::accumulate(sum, a, b); }
};
#else
template <>
struct RowDot<float, BFloat16> {
  using S = Simd<float>;
  using Query = float;
  using V = S::V;
  static constexpr bool kConverted = false;
  static constexpr int kWidth = 2 * S::kLanes;
  static void take_query(Query* to, int64_t room, const BFloat16* from, int64_t stride, int64_t columns) {
    for (int64_t c = 0; c < room; c += kWidth) {
      Query next[kWidth] = {};
      for (int64_t i = 0; i < min64(kWidth, columns - c); ++i) next[i] = to_float(from[(c + i) * stride]);
      const auto query = ByParity::of(S::load(next), S::load(next + S::kLanes));
      S::store(to + c, query.even), S::store(to + c + S::kLanes, query.odd);
    }
  }
  static ByParity load_query(const Query* p) { return {S::load(p), S::load(p + S::kLanes)}; }
  static ByParity load(const BFloat16* p) { return ByParity::load(p); }
  static ByParity load(const BFloat16* p, int64_t n) { return ByParity::load(p, n); }
  static V accumulate(V sum, const ByParity& a, const ByParity& b) {
    return S::fma(a.odd, b.odd, S::fma(a.even, b.even, sum));
  }
};
#endif

// Row number r of a block of queries, `step` elements each, converted, and in `own` as it meets rows of T, if that is
// another form.
template <class T, class C>
inline void take_row(const T* row, int64_t stride, int64_t columns, int64_t step, int64_t r, C* converted, C* own) {
  using Dot = RowDot<C, T>;
  convert_rows<C>(row, 0, columns <= 1 ? 1 : stride, 1, columns, converted + r * step, 0);
  if constexpr (!Dot::kConverted)
    Dot::take_query(reinterpret_cast<typename Dot::Query*>(own) + r * step, step, row, stride, columns);
}
// Of these two blocks, the one that meets rows of T.
template <class T, class C>
inline auto* queries_of(const C* converted, const C* own) {
  using Dot = RowDot<C, T>;
  return reinterpret_cast<const typename Dot::Query*>(Dot::kConverted ? converted : own);
}

// What a head's rows need while they meet keys.
template <class Op>
struct DecodeScratch {
  using C = typename Op::Compute;

  DecodeScratch() = default;
  // Of a head beside `first`, which is at work when that isn't: they share what holds nothing meanwhile.
  DecodeScratch(void* memory, const Forward& p, int64_t rows, int64_t keys, const DecodeScratch* first) {
    Arena arena(memory);
    constexpr int64_t kLanes = Simd<C>::kLanes;
    q_step = round_up(p.head_dim, 2 * kLanes);      // room for either kind of RowDot
    out_step = round_up(p.head_dim_v, 2 * kLanes);  // ... and for ValuePairsTile
    q = arena.take<C>(rows * q_step);
    own_q = arena.take<C>(rows * q_step);
    q_lanes = arena.take<C>(round_up(rows, 4) * q_step / Op::kPack);
    out = arena.take<C>(rows * out_step);
    recent = arena.take<C>(rows * recent_step());
    scores = arena.take<C>(rows * keys);
    bias = arena.take<C>(p.bias.data == nullptr ? 0 : rows * keys);
    keep = arena.take<C>(p.dropout_p > 0 ? rows * keys : 0);
    largest = arena.take<C>(rows);
    sums = arena.take<C>(rows * kLanes);
    factor = arena.take<C>(rows);
    block = first != nullptr     ? first->block
            : keys > kDecodeKeys ? nullptr
                                 : arena.take<C>(keys * round_up(max64(p.head_dim, p.head_dim_v), kLanes));
    bytes = arena.used();
  }
  // Of a row of `recent`: as one of `out`, and a vector after it.
  int64_t recent_step() const { return out_step + Simd<C>::kLanes; }

  C *q, *own_q, *q_lanes, *out, *recent, *block, *scores, *bias, *keep, *largest, *sums, *factor;
  int64_t q_step, out_step, bytes;
};

// The queries as they meet rows of T.
template <class T, class Op>
inline auto* queries_of(const DecodeScratch<Op>& scratch) {
  return queries_of<T>(scratch.q, scratch.own_q);
}

// out[row] = out[row] * factor[row] + sum_key p[row][key] V[key] for kVectors vectors of the head dimension. One alone
// may be incomplete: `columns` are left. A row of p has room for a block's keys.
template <class C, int kRows, int kVectors, int64_t kKeysOfBlock, class Values>
[[gnu::noinline]] void decode_values(const C* p, const Values values, int64_t column, int64_t keys, int64_t columns,
                                     PrefetchAhead prefetch, const C* factor, C* out, int64_t out_step) {
  using S = Simd<C>;
  using V = typename S::V;
  using T = typename Values::Element;
  constexpr bool kByParity = kReadsByParity<T, kVectors>;
  // Sums of longer runs of keys would lose digits.
  for (int64_t first = 0; first < keys; first += kDecodeKeys) {
    const int64_t last = min64(keys, first + kDecodeKeys);
    V sum[kRows][kVectors] = {};
    const auto accumulate = [&](int64_t j, int64_t end, auto* v, int64_t ahead, auto load) {
      for (; j < end; ++j, v += values.stride) {
        const int64_t by = j < prefetch.keys ? ahead : prefetch.beyond;
        if (by != 0) prefetch_row(v + by, min64(columns, kVectors * S::kLanes));
        V value[kVectors];
        load(v, value);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const V probability = S::set1(p[r * kKeysOfBlock + j]);
#pragma GCC unroll 8
          for (int c = 0; c < kVectors; ++c) sum[r][c] = S::fma(probability, value[c], sum[r][c]);
        }
      }
    };
    for (int64_t j = first, end; j < last; j = end) {
      const auto* v = values.row(j) + column;
      int64_t ahead = 0;
      if (Values::kTogether || j < prefetch.keys) ahead = values.row(j + prefetch.ahead) + column - v;
      end = min64(last, j + values.together(j));
      if (columns >= kVectors * S::kLanes) {
        accumulate(j, end, v, ahead, [](auto* row, V(&value)[kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 8
          for (int c = 0; c < kVectors; ++c) {
            if constexpr (!kByParity) value[c] = S::load_as(row + c * S::kLanes);
            else if (c % 2 == 0) {
              const auto two = ByParity::load(row + c * S::kLanes);
              value[c] = two.even, value[c + 1] = two.odd;
            }
          }
        });
      } else {
        accumulate(j, end, v, ahead, [&](auto* row, V(&value)[kVectors]) {
          for (V& x : value) x = S::load_as(row, columns);
        });
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kVectors; ++c) {
        if constexpr (kByParity)
          if (c % 2 == 0) {
            const ByParity two{sum[r][c], sum[r][c + 1]};
            sum[r][c] = two.columns<0>(), sum[r][c + 1] = two.columns<S::kLanes>();
          }
        C* total = out + r * out_step + c * S::kLanes;
        S::store(total, S::fma(S::load(total), S::set1(first == 0 ? factor[r] : C(1)), sum[r][c]));
      }
  }
}

// How often register tiles call prefetch() while they read all rows of B once. One run of tiles reads them all for its
// first columns; several runs read a few of them at a time.
template <int kSums, int kMostVectors>
inline int64_t prefetch_calls_of_pass(int64_t rows, int64_t vectors, int64_t depth) {
  const int64_t first = rows <= kTileRows ? min64(vectors, kMostVectors) : vectors;
  return max64(1, prefetch_calls<kSums, kMostVectors>(rows, first, depth));
}

// A register tile of a product that prefetches rows meanwhile.
template <class Op, class Prefetch>
struct PrefetchingTile {
  Factors<Op, false> factors;
  int64_t depth;
  Target<typename Op::Compute> target;
  PrefetchByLine<Prefetch>* prefetch;

  template <int kRows, int kVectors>
  void run(int64_t row, int64_t vector) const {
    typename Op::V sum[kRows][kVectors] = {};
    ProductWalk<Op, false> walk(factors, row, vector * Op::S::kLanes);
    PrefetchByLine<Prefetch> next = *prefetch;  // in registers
    add_products(walk, 0, depth, &next, sum);
    *prefetch = next;
    target.take(sum, row, vector);
  }
};

// C = A B, as gemm; meanwhile it prefetches all rows of `prefetch`.
template <class Op, class Prefetch>
inline void gemm_prefetching(int64_t rows, int64_t vectors, int64_t depth, const Factors<Op, false>& factors,
                             const Target<typename Op::Compute>& target, const Prefetch& prefetch) {
  if (vectors == 0) return;
  constexpr int kSums = kTileRows * kTileVectors;
  PrefetchByLine<Prefetch> next(prefetch, prefetch_calls_of_pass<kSums, kTileVectors>(rows, vectors, depth));
  for_tiles<kSums, kTileVectors, 1>(rows, vectors, PrefetchingTile<Op, Prefetch>{factors, depth, target, &next});
}

// The first (kFrom = 0) or the last 16 (8) of 32 columns that _mm512_unpacklo_epi16 and unpackhi have left in a and b.
template <int kFrom, class V>
inline V in_order(V a, V b) {
  constexpr int f = kFrom;
  return __builtin_shufflevector(a, b, f, f + 1, f + 2, f + 3, f + 16, f + 17, f + 18, f + 19, f + 4, f + 5, f + 6,
                                 f + 7, f + 20, f + 21, f + 22, f + 23);
}

// In which order the sums of two vectors of columns lie: that of the columns, by parity, or as they come of pairs of
// keys.
enum class SumOrder { kOwn, kByParity, kOfPairs };
// Adds two vectors of sums to those of their columns.
template <SumOrder kOrder, class V>
[[gnu::always_inline]] inline void add_two_sums(float* total, V a, V b) {
  using S = Simd<float>;
  const ByParity two{a, b};
  if constexpr (kOrder == SumOrder::kOfPairs) {
    const V first = in_order<0>(a, b);
    b = in_order<8>(a, b), a = first;
  } else if constexpr (kOrder == SumOrder::kByParity) {
    a = two.columns<0>(), b = two.columns<S::kLanes>();
  }
  S::store(total, S::load(total) + a), S::store(total + S::kLanes, S::load(total + S::kLanes) + b);
}

#if defined(__AVX512BF16__)
// out[row] += sum_key p[row][key] V[key] in bfloat16, two keys at a time: rows of V become pairs in registers. A
// "vector" is one of 32 columns here, two of `out`.
template <int64_t kKeysOfBlock, class Values, class Prefetch>
struct ValuePairsTile {
  const uint32_t* p;  // pairs of probabilities
  Values v;
  int64_t keys, columns;
  float* out;
  int64_t out_step;
  PrefetchByRow<Prefetch>* prefetch;

  template <int kRows, int kVectors>
  void run(int64_t row, int64_t vector) const {
    using S = Simd<float>;
    constexpr int64_t kAhead = kTile<float>;
    __mmask32 mask[kVectors];
    for (int c = 0; c < kVectors; ++c) mask[c] = first_of_32(columns - (vector + c) * 32);
    S::V sum[kRows][2 * kVectors] = {};
    const uint32_t* probabilities = p + row * kKeysOfBlock;
    const BFloat16* source = v.row(0) + vector * 32;
    [[maybe_unused]] int64_t apart = 0, ahead = 0;  // of the rows of a pair in two pages; of those that are prefetched
    PrefetchByRow<Prefetch> next = *prefetch;
    const auto step = [&]<bool kBoth, bool kApart = false>() __attribute__((always_inline)) {
      const int64_t second = kApart ? apart : v.stride;
      __m512i value[2 * kVectors];
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) {
        const __m512i low = _mm512_maskz_loadu_epi16(mask[c], source + c * 32);
        const __m512i high =
            kBoth ? _mm512_maskz_loadu_epi16(mask[c], source + second + c * 32) : _mm512_setzero_si512();
        value[2 * c] = _mm512_unpacklo_epi16(low, high);  // within 128-bit quarters: put in order at the end
        value[2 * c + 1] = _mm512_unpackhi_epi16(low, high);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512i pair = PairDot::broadcast(probabilities + r * kKeysOfBlock);
#pragma GCC unroll 4
        for (int c = 0; c < 2 * kVectors; ++c) sum[r][c] = PairDot::accumulate(sum[r][c], pair, value[c]);
      }
      if constexpr (!Values::kTogether)  // a line of the columns here of both rows, that many rows ahead
        if (ahead != 0) {
#pragma GCC unroll 2
          for (int c = 0; c < kVectors; ++c) {
            __builtin_prefetch(source + ahead + c * 32, 0, kPrefetchTo);
            __builtin_prefetch(source + v.stride + ahead + c * 32, 0, kPrefetchTo);
          }
        }
      source += 2 * v.stride;
      ++probabilities;
    };
    for (int64_t j = 0; j < keys / 2;) {
      int64_t steps = kPrefetchSteps;
      if constexpr (!Values::kTogether) {
        const int64_t together = v.together(2 * j);
        source = v.row(2 * j) + vector * 32;
        if (together == 1) {
          apart = v.row(2 * j + 1) + vector * 32 - source;
          step.template operator()<true, true>();
          ++j;
          continue;
        }
        steps = min64(steps, together / 2);
        ahead = v.prefetches && row == 0 && 2 * j + kAhead < v.count ? v.row(2 * j + kAhead) + vector * 32 - source : 0;
      }
      for (const int64_t end = min64(keys / 2, j + steps); j < end; ++j) step.template operator()<true>();
      bool spread = true;
      if constexpr (!Values::kTogether) spread = !v.prefetches;
      if (spread) next.prefetch();
    }
    if (keys % 2 != 0) {
      if constexpr (!Values::kTogether) source = v.row(keys - 1) + vector * 32;
      step.template operator()<false>();
    }
    *prefetch = next;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c)
        add_two_sums<SumOrder::kOfPairs>(out + (row + r) * out_step + (vector + c) * 32, sum[r][2 * c],
                                         sum[r][2 * c + 1]);
  }
};
#endif

// How many keys all rows meet at a time. As measured: what several runs of rows read again and again is to be a part of
// the first-level cache, the smaller in float32, which reads twice as much for a product.
template <class T>
inline int64_t keys_of_portion(int64_t columns) {
  const int64_t row_bytes = round_up(max64(1, columns), 16) * static_cast<int64_t>(sizeof(T));
  return sizeof(T) == 2 ? 64 : max64(16, min64(64, 8192 / row_bytes / 16 * 16));
}

// body<n>(r), of up to kMost rows.
template <int kMost, class Body>
[[gnu::always_inline]] inline void with_run(int64_t n, int64_t r, const Body& body) {
  [&]<int... kLess>(std::integer_sequence<int, kLess...>) {
    ((n == kLess + 1 ? body.template operator()<kLess + 1>(r) : void()), ...);
  }(std::make_integer_sequence<int, kMost>{});
}

// Splits n rows into runs of kMost, and one of what is left.
template <int kMost, class Body>
[[gnu::always_inline]] inline void for_long_runs(int64_t n, const Body& body) {
  for (int64_t r = 0; r < n; r += kMost) with_run<kMost>(min64(kMost, n - r), r, body);
}

// Splits n rows into runs of 4, and what is left into one run, or with few registers into 2 and 1.
template <class Body>
[[gnu::always_inline]] inline void for_row_runs(int64_t n, const Body& body) {
  if constexpr (kRegisters == 32) {
    for_long_runs<4>(n, body);
  } else {
    int64_t r = 0;
    for (; r + 4 <= n; r += 4) body.template operator()<4>(r);
    for (; r + 2 <= n; r += 2) body.template operator()<2>(r);
    for (; r < n; ++r) body.template operator()<1>(r);
  }
}

// Splits n rows evenly into as few runs as can be, of up to kMost.
template <int kMost, class Body>
[[gnu::always_inline]] inline void for_even_runs(int64_t n, const Body& body) {
  for (int64_t r = 0, runs = (n + kMost - 1) / kMost; runs > 0; --runs) {
    const int64_t now = n / runs;
    with_run<kMost>(now, r, body);
    r += now, n -= now;
  }
}

// decode_values for any number of rows and columns.
template <class C, int64_t kKeysOfBlock, class Values>
inline void add_values(const C* p, int64_t rows, const Values& values, int64_t keys, int64_t columns,
                       PrefetchAhead prefetch, const C* factor, C* out, int64_t out_step) {
  constexpr int64_t kLanes = Simd<C>::kLanes;
  int64_t c = 0;
  constexpr int kMost = kVectorBytes == 32 ? 6 : 4;
  const auto pass = [&]<int kVectors, int kMostRows>() {
    const auto run = [&]<int kRows>(int64_t r) {
      if constexpr (kRows <= kMostRows)
        decode_values<C, kRows, kVectors, kKeysOfBlock>(p + r * kKeysOfBlock, values, c, keys, columns - c,
                                                        r == 0 ? prefetch : PrefetchAhead{}, factor + r,
                                                        out + r * out_step + c, out_step);
    };
    if constexpr (kMostRows > 4) for_even_runs<kMostRows>(rows, run);
    else for_row_runs(rows, run);
    c += kVectors * kLanes;
  };
  // Whole rows at a time, where there are registers for it. Only a last vector is incomplete.
  if constexpr (kVectorBytes == 64)
    if (rows < 3 && columns == 8 * kLanes) pass.template operator()<8, 2>();
  // One row in pages: twice as many, for half as many looks at the table.
  if constexpr (kVectorBytes == 32 && !Values::kTogether)
    while (rows == 1 && c + 8 * kLanes <= columns) pass.template operator()<8, 1>();
  if (kRegisters == 32 || rows < 4)
    while (c + 4 * kLanes <= columns) pass.template operator()<4, kRegisters / 8>();
  while (c + 2 * kLanes <= columns) pass.template operator()<2, kMost>();
  while (c < columns) pass.template operator()<1, kMost>();
}

// Runs of n rows where the caller's kernel is for kRows rows, or for any number (4).
template <int kRows, class Body>
[[gnu::always_inline]] inline void for_rows_of(int64_t n, const Body& body) {
  if constexpr (kRows < 4) body.template operator()<kRows>(0);
  else for_row_runs(n, body);
}

// A block of K or V: the user's rows, or a converted copy.
template <class C, class T, class Keys, class Body>
inline void with_rows(const Keys& view, int64_t batch, int64_t head, int64_t key, int64_t keys, int64_t columns,
                      C* copy, const Body& body) {
  if (reads_in_place(view, columns)) return body(block_rows<T>(view, batch, head, key), true);
  const int64_t step = round_up(columns, Simd<C>::kLanes);
  for_runs(view, key, keys, [&](int64_t first, int64_t count) {
    convert_rows<C>(at<T>(view, batch, head, key + first), view.stride[2], view.stride[3], count, columns,
                    copy + first * step, step);
  });
  body(BlockRows<C>{copy, step}, false);
}

}  // namespace
}  // namespace attnkern::cpu
