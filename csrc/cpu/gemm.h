// The one matrix product of the forward and the backward pass:
//
//     C[r][lane] = sum_k A(r, k) * B[k][lane]
//
// A is read one scalar at a time and broadcast, so it is read where it lies: rows of the user's K, Q or grad_out with
// any row stride, or probabilities where they were made. B and C run along the lanes. A register tile holds kTileRows x
// kTileVectors accumulators.
#pragma once

#include "simd.h"

namespace attnkern::cpu {
namespace {

template <class C>
inline constexpr C kLog2E = C(1.442695040888963407359924681001892137L);

enum class Epilogue {
  kStore,    // C = product
  kAdd,      // C += product
  kRescale,  // C = C * aux + product, aux per lane: the online softmax folded into the accumulation
};

// How a scalar of A meets a vector of B: one product in the compute type. And how precise an exponential has to be.
template <class C>
struct Dot {
  using Product = Dot;  // what `gemm` is to be called with
  using Scalar = C;     // element of A and of B
  using Compute = C;
  static constexpr int kPack = 1;  // terms of the sum in one Scalar
  using S = Simd<C>;
  using V = typename S::V;
  static V load(const Scalar* b) { return S::load(b); }
  static V broadcast(const Scalar* a) { return S::set1(*a); }
  static V accumulate(V sum, V a, V b) { return S::fma(a, b, sum); }
  static constexpr Precision kSums = Precision::kFull, kProbabilities = Precision::kFull;  // of exponentials
};

// For 16-bit elements that are converted to float32.
struct ConvertedDot : Dot<float> {
  static constexpr Precision kSums = Precision::kSum, kProbabilities = Precision::kSum;
};

#if defined(__AVX512BF16__)
// Two bfloat16 products at once, summed in float32: a Scalar is a pair of neighbours along the summed dimension.
struct PairDot {
  using Product = PairDot;
  using Scalar = uint32_t;
  using Compute = float;
  static constexpr int kPack = 2;
  using S = Simd<float>;
  using V = S::V;
  static __m512i load(const Scalar* b) { return _mm512_loadu_si512(b); }
  static __m512i broadcast(const Scalar* a) {
    int pair;  // the memory holds bfloat16: no access as an integer lvalue
    std::memcpy(&pair, a, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static V accumulate(V sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  static constexpr Precision kSums = Precision::kSum, kProbabilities = Precision::kProbability;
};
#endif

// P = exp(score - m). kFastPath: nothing but a scale stands between the products and the scores, which then are in the
// log2 domain: what the products aren't scaled by yet is `scale`. Otherwise the scores are in the natural-log domain,
// where a bias of finfo.min doesn't overflow. The difference is taken first: nothing is lost where x is the maximum.
template <class Op, bool kFastPath, Precision kPrecision>
struct Exponential {
  using S = typename Op::S;
  using V = typename S::V;

  explicit Exponential(typename Op::Compute scale) : scale_(S::set1(scale)) {}
  // shift = -m
  V operator()(V x, V shift) const {
    if constexpr (kFastPath) return S::template exp2<kPrecision>(Op::kPack == 1 ? x + shift : S::fma(x, scale_, shift));
    else return S::template exp2<kPrecision>((x + shift) * S::set1(kLog2E<typename Op::Compute>));
  }

 private:
  V scale_;
};

// Operands of one product C[r][lane] = sum_k A(r, k) * B[k][lane], A(r, k) = a[r * a_step + k] or, with kUnitRows,
// a[r + k * a_step].
template <class Op, bool kUnitRows>
struct Factors {
  using Scalar = typename Op::Scalar;
  const Scalar* a;
  int64_t a_step;
  const Scalar* b;
  int64_t b_step;

  const Scalar* row(int64_t r) const { return kUnitRows ? a + r : a + r * a_step; }
  // Without the first k terms.
  Factors from(int64_t k) const { return {a + (kUnitRows ? k * a_step : k), a_step, b + k * b_step, b_step}; }
};

// The place in such a product where a register tile is at work.
template <class Op, bool kUnitRows>
class ProductWalk {
 public:
  using Scalar = typename Op::Scalar;
  ProductWalk(const Factors<Op, kUnitRows>& factors, int64_t row, int64_t lane)
      : a_(factors.row(row)),
        far_(factors.row(row + kFar)),
        b_(factors.b + lane),
        a_step_(factors.a_step),
        b_step_(factors.b_step) {
    // A compiler that knows where row kFar is would keep the distance of every row in a register, and has too few.
    asm("" : "+r"(far_));
  }

  // Adds the terms of the next k to the sums, which are registers: to those of the vectors [kFirst, kLast).
  template <int kRows, int kVectors, int kFirst = 0, int kLast = kVectors>
  [[gnu::always_inline]] inline void step(typename Op::V (&sum)[kRows][kVectors]) {
    decltype(Op::load(b_)) column[kVectors];
#pragma GCC unroll 4
    for (int v = kFirst; v < kLast; ++v) column[v] = Op::load(b_ + v * Op::S::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto scalar = Op::broadcast(kUnitRows ? a_ + r : r < kFar ? a_ + r * a_step_ : far_ + (r - kFar) * a_step_);
#pragma GCC unroll 4
      for (int v = kFirst; v < kLast; ++v) sum[r][v] = Op::accumulate(sum[r][v], scalar, column[v]);
    }
    a_ += kUnitRows ? a_step_ : 1;
    far_ += kUnitRows ? a_step_ : 1;
    b_ += b_step_;
    // Or it would keep one index for all three, and make addresses of it at every step.
    asm("" : "+r"(a_), "+r"(far_), "+r"(b_));
  }

 private:
  static constexpr int kFar = 3;
  const Scalar *a_, *far_, *b_;
  int64_t a_step_, b_step_;
};

// Whether these are the kernels of AMD's Zen 5. With bfloat16's instructions it alone has VP2INTERSECT, which isn't
// used. Its first-level cache has 48 KiB, half as much again as that of a Zen 4, and is filled as fast as the second.
#if defined(__AVX512VP2INTERSECT__) && defined(__AVX512BF16__)
inline constexpr bool kZen5 = true;
#else
inline constexpr bool kZen5 = false;
#endif

// To which cache rows are prefetched, as __builtin_prefetch counts: with AVX-512 to the second, which waits for more
// lines at a time (a Zen 4 then reads up to twice as many bytes a second from memory); with less, and on a Zen 5, to
// the first, as measured.
inline constexpr int kPrefetchTo = kVectorBytes == 64 && !kZen5 ? 2 : 3;

// Rows to prefetch, because they are read soon. A few at a time, between products: all at once they would wait for each
// other, and leave the memory idle afterwards.
struct PrefetchRows {
  const char* row = nullptr;
  int64_t step = 0, rows = 0, bytes = 0;  // from row to row; how many; of a row

  void advance() { --rows, row += step; }
  int64_t all_bytes() const { return rows * bytes; }
};

// Rows of several places, one place after the other.
struct PrefetchSeries : PrefetchRows {
  const PrefetchRows* others = nullptr;
  int64_t count = 0;  // of these

  PrefetchSeries() = default;
  PrefetchSeries(const PrefetchRows& rows) : PrefetchRows(rows) {}
  PrefetchSeries(const PrefetchRows* places, int64_t number) : others(places), count(number) { go_on(); }
  void advance() {
    PrefetchRows::advance();
    go_on();
  }
  int64_t all_bytes() const {
    int64_t sum = PrefetchRows::all_bytes();
    for (int64_t i = 0; i < count; ++i) sum += others[i].all_bytes();
    return sum;
  }

 private:
  void go_on() {
    while (rows == 0 && count > 0) static_cast<PrefetchRows&>(*this) = *others++, --count;
  }
};

// Rows that lie in pages.
struct PrefetchPages : PrefetchRows {
  int64_t in_page = 0;                 // how many are left in this one
  const int32_t* next_page = nullptr;  // the number of the next
  const char* pages = nullptr;         // where page 0 is, from page to page, and how many rows one has
  int64_t page_step = 0, page_rows = 0;

  void advance() {
    PrefetchRows::advance();
    if (rows > 0 && --in_page == 0) row = pages + *next_page++ * page_step, in_page = page_rows;
  }
};

// Prefetches all rows in so many calls of prefetch(), whole rows at a time: for loops so short that finer steps would
// cost time.
template <class Rows>
class PrefetchByRow {
 public:
  PrefetchByRow(const Rows& rows, int64_t calls) : rows_(rows), at_once_((rows.rows + calls - 1) / calls) {}
  void prefetch() {
    for (int64_t row = 0; row < at_once_ && rows_.rows > 0; ++row, rows_.advance())
      for (int64_t byte = 0; byte < rows_.bytes; byte += 64) __builtin_prefetch(rows_.row + byte, 0, kPrefetchTo);
  }

 private:
  Rows rows_;
  int64_t at_once_;
};

// Prefetches rows by cache lines, as evenly as possible. Part of the loop that calls it: the sums of a register tile
// would go to memory for a call.
template <class Rows>
class PrefetchByLine {
 public:
  PrefetchByLine() = default;
  PrefetchByLine(const Rows& rows, int64_t calls) : rows_(rows), at_once_((rows.all_bytes() / calls + 63) / 64 * 64) {}
  [[gnu::always_inline]] inline void prefetch() {
    for (int64_t left = at_once_; left > 0 && rows_.rows > 0;) {
      const int64_t end = next_ + left < rows_.bytes ? next_ + left : rows_.bytes;
      left -= end - next_;
      for (; next_ < end; next_ += 64) __builtin_prefetch(rows_.row + next_, 0, kPrefetchTo);
      if (end < rows_.bytes) return;
      next_ = 0;
      rows_.advance();
    }
  }

 private:
  Rows rows_;
  int64_t at_once_ = 0, next_ = 0;  // bytes
};
// Prefetches from three places at once, of which the first may be a series.
struct PrefetchStreams {
  PrefetchByLine<PrefetchSeries> first;
  PrefetchByLine<PrefetchRows> second, third;
  [[gnu::always_inline]] inline void prefetch() {
    first.prefetch();
    second.prefetch();
    third.prefetch();
  }
};
// Steps of a register tile between two calls of prefetch.
inline constexpr int64_t kPrefetchSteps = 8;

// The terms [k, depth) of a register tile's sums; `next`, what is to be prefetched meanwhile, may be null.
template <class Op, int kRows, int kVectors, class Prefetch>
[[gnu::always_inline]] inline void add_terms(ProductWalk<Op, false>& walk, int64_t k, int64_t depth, Prefetch* next,
                                             typename Op::V (&sum)[kRows][kVectors]) {
  if (next == nullptr) {
    for (; k < depth; ++k) walk.step(sum);
    return;
  }
  while (k < depth) {
    for (const int64_t end = depth < k + kPrefetchSteps ? depth : k + kPrefetchSteps; k < end; ++k) walk.step(sum);
    next->prefetch();
  }
}

// How many terms are added up one after the other. More of them would lose digits: a longer sum is made of such parts.
inline constexpr int64_t kLongestSum = 128;
// And of probabilities: where many are the same (a saturated softcap), so are their rounding errors.
inline constexpr int64_t kEqualSum = 16;

// Adds the terms from step k on to all sums of a tile, which are in memory: registers hold those of a part. A function
// of its own: where a tile's sums may go to memory, the compiler doesn't keep them in registers anywhere.
template <class Op, int kRows, int kVectors, class Prefetch>
[[gnu::noinline]] void add_parts(ProductWalk<Op, false> walk, int64_t k, int64_t depth, Prefetch* next,
                                 typename Op::V* total) {
  for (bool none = k == 0; k < depth; k += kLongestSum, none = false) {
    typename Op::V sum[kRows][kVectors] = {};
    add_terms(walk, 0, depth - k < kLongestSum ? depth - k : kLongestSum, next, sum);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        total[r * kVectors + v] = none ? sum[r][v] : total[r * kVectors + v] + sum[r][v];
  }
}

// The sums of a register tile from step k on; `sum` holds those of the steps before.
template <class Op, int kRows, int kVectors, class Prefetch>
[[gnu::always_inline]] inline void add_products(ProductWalk<Op, false>& walk, int64_t k, int64_t depth, Prefetch* next,
                                                typename Op::V (&sum)[kRows][kVectors]) {
  if (depth <= kLongestSum) [[likely]]
    return add_terms(walk, k, depth, next, sum);
  typename Op::V total[kRows * kVectors];
  const auto for_each = [&](auto body) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) body(total[r * kVectors + v], sum[r][v]);
  };
  if (k > 0) for_each([](auto& done, auto& tile) { done = tile; });
  add_parts<Op, kRows, kVectors>(walk, k, depth, next, total);
  for_each([](auto& done, auto& tile) { tile = done; });
}

// Where a product goes: C, and what becomes of what it held.
template <class C>
struct Target {
  using S = Simd<C>;
  using V = typename S::V;
  C* c;
  int64_t c_step;
  Epilogue epilogue;
  const C* aux;

  template <int kRows, int kVectors>
  [[gnu::always_inline]] inline void take(const V (&sum)[kRows][kVectors], int64_t row, int64_t vector) const {
    constexpr int kLanes = S::kLanes;
    C* target = c + row * c_step + vector * kLanes;
    const auto for_each = [&](auto body) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) body(target + r * c_step + v * kLanes, sum[r][v]);
    };
    if (epilogue == Epilogue::kStore) {
      for_each([](C* p, V x) { S::store(p, x); });
    } else if (epilogue == Epilogue::kAdd) {
      for_each([](C* p, V x) { S::store(p, S::load(p) + x); });
    } else {
      const C* lanes = aux + vector * kLanes;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const V factor = S::load(lanes + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          C* p = target + r * c_step + v * kLanes;
          S::store(p, S::fma(S::load(p), factor, sum[r][v]));
        }
      }
    }
  }
};

// A register tile of a product that goes to memory: `To` takes it.
template <class Op, class To>
struct ProductTile {
  Factors<Op, false> factors;
  int64_t depth;
  To target;

  template <int kRows, int kVectors>
  void run(int64_t row, int64_t vector) const {
    typename Op::V sum[kRows][kVectors] = {};
    ProductWalk<Op, false> walk(factors, row, vector * Op::S::kLanes);
    add_products(walk, 0, depth, static_cast<PrefetchStreams*>(nullptr), sum);
    target.take(sum, row, vector);
  }
};

// Part of a block: `rows` loop indices from `row`, for which the vectors [first, last) of the tile can be alive.
struct Segment {
  int64_t row, rows, first, last;
  bool partial;  // an edge of the band passes through: scores must be masked
};

// A tile of a product that sums over the rows of a block, no more than kLongestSum: each of its segments adds to the
// vectors that it has alive, while the sums stay in registers.
template <class Op>
struct SegmentsTile {
  Factors<Op, true> factors;  // from row `begin` on
  int64_t begin;
  int64_t whole;  // steps of the sums, if all rows are one segment of all vectors: a tile is 1 to 3 % faster; else 0
  const Segment* segment;
  int64_t segments;
  Target<typename Op::Compute> target;

  template <int kRows, int kVectors>
  void run(int64_t row, int64_t vector) const {
    typename Op::V sum[kRows][kVectors] = {};
    if (whole > 0) {
      ProductWalk<Op, true> walk(factors, row, vector * Op::S::kLanes);
      for (int64_t k = 0; k < whole; ++k) walk.step(sum);
    }
    for (int64_t s = 0; s < (whole > 0 ? 0 : segments); ++s) {
      const int64_t k = (segment[s].row - begin) / Op::kPack, depth = (segment[s].rows + Op::kPack - 1) / Op::kPack;
      const int64_t first = segment[s].first - vector, last = segment[s].last - vector;
      const auto add = [&]<int kFirst, int kLast>() __attribute__((always_inline)) {
        ProductWalk<Op, true> walk(factors.from(k), row, vector * Op::S::kLanes);
        for (int64_t i = 0; i < depth; ++i) walk.template step<kRows, kVectors, kFirst, kLast>(sum);
      };
      for_vectors<0, kVectors, kVectors>(first, last, add);
    }
    target.take(sum, row, vector);
  }

 private:
  // add<kFirst, kLast>() for what [first, last) has in common with [0, kVectors).
  template <int kFirst, int kLast, int kVectors, class Add>
  [[gnu::always_inline]] static inline void for_vectors(int64_t first, int64_t last, const Add& add) {
    if ((kFirst == 0 ? first <= 0 : first == kFirst) && (kLast == kVectors ? last >= kVectors : last == kLast))
      add.template operator()<kFirst, kLast>();
    else if constexpr (kLast - 1 > kFirst) for_vectors<kFirst, kLast - 1, kVectors>(first, last, add);
    else if constexpr (kFirst + 1 < kVectors) for_vectors<kFirst + 1, kVectors, kVectors>(first, last, add);
  }
};

// The arithmetic of a full register tile without its loads; returns the FLOPs done.
template <class Op>
[[gnu::noinline]] double gemm_peak(int64_t iterations) {
  using S = typename Op::S;
  const typename Op::Scalar ones[S::kLanes] = {};
  const auto operand = Op::load(ones);
  typename S::V sum[kTileRows][kTileVectors] = {};
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) {
        sum[r][v] = Op::accumulate(sum[r][v], operand, operand);
        asm volatile("" : ATTNKERN_IN_REGISTER(sum[r][v]));  // neither removed nor merged
      }
  }
  return 2.0 * Op::kPack * S::kLanes * kTileRows * kTileVectors * static_cast<double>(iterations);
}

template <class Tile, int kRows, int kVectors>
[[gnu::noinline]] void run_tile(const Tile& tile, int64_t row, int64_t vector) {
  tile.template run<kRows, kVectors>(row, vector);
}

// Rows of the tallest register tile with kSums sums that is `vectors` wide.
template <int kSums>
constexpr int tallest(int vectors) {
  return kSums / vectors < kMostRows ? kSums / vectors : kMostRows;
}

template <class Tile, int kSums, int kRows, int kVectors>
constexpr auto tile_entry() -> void (*)(const Tile&, int64_t, int64_t) {
  if constexpr (kRows <= tallest<kSums>(kVectors)) return run_tile<Tile, kRows, kVectors>;
  else return nullptr;
}

template <class Tile, int kSums, int... kIndex>
inline auto tile_function(int64_t rows, int64_t vectors, std::integer_sequence<int, kIndex...>) {
  static constexpr void (*kTable[])(
      const Tile&, int64_t, int64_t) = {tile_entry<Tile, kSums, kIndex % kMostRows + 1, kIndex / kMostRows + 1>()...};
  return kTable[(vectors - 1) * kMostRows + rows - 1];
}

// Cuts rows x vectors into register tiles of up to kSums sums, evenly (7 rows: 4 + 3, not 6 + 1), since a tile that is
// nearly empty is bound by the latency of its few sums; for the same reason narrow ones are taller. kUnit rows stay
// together.
template <int kSums, int kMostVectors, int kUnit, class Tile>
inline void for_tiles(int64_t rows, int64_t vectors, const Tile& tile) {
  const int64_t units = (rows + kUnit - 1) / kUnit, columns = (vectors + kMostVectors - 1) / kMostVectors;
  if (units == 0 || columns == 0) return;
  // The first `wider` (or `longer`) of the tiles have one vector (or unit) more than the others.
  const int64_t width = vectors / columns, wider = vectors - width * columns;
  for (int64_t column = 0, v = 0; column < columns; ++column) {
    const int64_t v_end = v + width + (column < wider);
    const int64_t most = tallest<kSums>(static_cast<int>(v_end - v)) / kUnit, count = (units + most - 1) / most;
    const int64_t height = units / count, longer = units - height * count;
    for (int64_t tile_row = 0, r = 0; tile_row < count; ++tile_row) {
      const int64_t end = r + (height + (tile_row < longer)) * kUnit, r_end = end < rows ? end : rows;
      tile_function<Tile, kSums>(r_end - r, v_end - v, std::make_integer_sequence<int, kMostRows * kMostVectors>{})(
          tile, r, v);
      r = r_end;
    }
    v = v_end;
  }
}

// How often the tiles that for_tiles cuts will call prefetch, if they do after every `steps` of `depth`.
template <int kSums, int kMostVectors>
inline int64_t prefetch_calls(int64_t rows, int64_t vectors, int64_t depth, int64_t steps = kPrefetchSteps) {
  const int64_t columns = (vectors + kMostVectors - 1) / kMostVectors, width = (vectors + columns - 1) / columns;
  const int64_t most = tallest<kSums>(static_cast<int>(width));
  return columns * ((rows + most - 1) / most) * ((depth + steps - 1) / steps);
}

// C = A B for rows x vectors of C (vectors in units of a register).
template <class Op, class To = Target<typename Op::Compute>>
inline void gemm(int64_t rows, int64_t vectors, int64_t depth, const Factors<Op, false>& factors, const To& target) {
  for_tiles<kTileRows * kTileVectors, kTileVectors, 1>(rows, vectors, ProductTile<Op, To>{factors, depth, target});
}

}  // namespace
}  // namespace attnkern::cpu
