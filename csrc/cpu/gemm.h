// The one matrix product of the forward and the backward pass:
//
//     C[r][lane] = sum_k A(r, k) * B[k][lane]
//
// A is read one scalar at a time and broadcast, so it stays in the user's layout (rows of K, V, Q or grad_out with any
// row stride); B and C run along the lanes. A register tile holds kTileRows x kTileVectors accumulators.
#pragma once

#include "simd.h"

#if defined(__aarch64__)
#define ATTNKERN_IN_REGISTER(x) "+w"(x)
#else
#define ATTNKERN_IN_REGISTER(x) "+v"(x)
#endif

namespace attnkern::cpu {
namespace {

template <class C>
inline constexpr C kLog2E = C(1.442695040888963407359924681001892137L);

enum class Epilogue {
  kStore,     // C = product
  kStoreMax,  // C = product, and aux = max(aux, product) for every lane
  kAdd,       // C += product
  kRescale,   // C = C * aux + product, aux per lane: the online softmax folded into the accumulation
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
  static constexpr bool kShortExp = false;
};

// For 16-bit elements that are converted to float32.
struct ConvertedDot : Dot<float> {
  static constexpr bool kShortExp = true;
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
  static constexpr bool kShortExp = true;
};
#endif

// exp(scale * x + shift). The sum first, in natural units, then times log2 e: nothing is lost where x is the maximum,
// and a bias of finfo.min doesn't overflow. kPlain scores have no bias, and where less precision will do they are
// scaled once, to units of log2.
template <class Op, bool kPlain>
struct Exponential {
  using S = typename Op::S;
  using V = typename S::V;
  static constexpr bool kBase2 = kPlain && Op::kShortExp;

  explicit Exponential(typename Op::Compute scale)
      : scale_(S::set1(kBase2 ? scale * kLog2E<typename Op::Compute> : scale)) {}
  V shift(V natural) const { return kBase2 ? natural * log2e() : natural; }
  V operator()(V x, V shift) const {
    const V y = S::fma(x, scale_, shift);
    return S::template exp2<Op::kShortExp>(kBase2 ? y : y * log2e());
  }

 private:
  static V log2e() { return S::set1(kLog2E<typename Op::Compute>); }
  V scale_;
};

// One register tile. kUnitRows: A(r, k) = a[r + k * a_step]; otherwise A(r, k) = a[r * a_step + k].
template <class Op, bool kUnitRows, int kRows, int kVectors>
[[gnu::noinline]] void gemm_tile(const typename Op::Scalar* a, int64_t a_step, const typename Op::Scalar* b,
                                 int64_t b_step, int64_t depth, typename Op::Compute* c, int64_t c_step,
                                 Epilogue epilogue, typename Op::Compute* aux) {
  using S = typename Op::S;
  using V = typename S::V;
  constexpr int kLanes = S::kLanes;
  V sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = S::zero();

  for (int64_t k = 0; k < depth; ++k) {
    decltype(Op::load(b)) column[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = Op::load(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto scalar = Op::broadcast(kUnitRows ? a + r : a + r * a_step);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Op::accumulate(sum[r][v], scalar, column[v]);
    }
    a += kUnitRows ? a_step : 1;
    b += b_step;
  }

  if (epilogue == Epilogue::kStore || epilogue == Epilogue::kStoreMax) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) S::store(c + r * c_step + v * kLanes, sum[r][v]);
    if (epilogue == Epilogue::kStoreMax) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        V largest = S::load(aux + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) largest = S::max(largest, sum[r][v]);
        S::store(aux + v * kLanes, largest);
      }
    }
  } else if (epilogue == Epilogue::kAdd) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        auto* p = c + r * c_step + v * kLanes;
        S::store(p, S::load(p) + sum[r][v]);
      }
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const V factor = S::load(aux + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        auto* p = c + r * c_step + v * kLanes;
        S::store(p, S::fma(S::load(p), factor, sum[r][v]));
      }
    }
  }
}

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

template <class Op>
using TileFunction = void (*)(const typename Op::Scalar*, int64_t, const typename Op::Scalar*, int64_t, int64_t,
                              typename Op::Compute*, int64_t, Epilogue, typename Op::Compute*);

template <class Op, bool kUnitRows, int... kIndex>
inline TileFunction<Op> tile_function(int index, std::integer_sequence<int, kIndex...>) {
  static constexpr TileFunction<Op> kTable[] = {
      gemm_tile<Op, kUnitRows, kIndex % kTileRows + 1, kIndex / kTileRows + 1>...};
  return kTable[index];
}

// rows x vectors of C (vectors in units of a register). Rows and vectors are split evenly (7 rows: 4 + 3, not 6 + 1),
// since a tile that is nearly empty is bound by the latency of its few sums.
template <class Op, bool kUnitRows>
inline void gemm(int64_t rows, int64_t vectors, int64_t depth, const typename Op::Scalar* a, int64_t a_step,
                 const typename Op::Scalar* b, int64_t b_step, typename Op::Compute* c, int64_t c_step,
                 Epilogue epilogue, typename Op::Compute* aux = nullptr) {
  constexpr int kLanes = Op::S::kLanes;
  const int64_t column_tiles = (vectors + kTileVectors - 1) / kTileVectors;
  const int64_t row_tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t column_tile = 0, v = 0; column_tile < column_tiles; ++column_tile) {
    const int64_t width = (vectors - v + column_tiles - column_tile - 1) / (column_tiles - column_tile);
    for (int64_t row_tile = 0, r = 0; row_tile < row_tiles; ++row_tile) {
      const int64_t height = (rows - r + row_tiles - row_tile - 1) / (row_tiles - row_tile);
      const auto tile = tile_function<Op, kUnitRows>(static_cast<int>((width - 1) * kTileRows + height - 1),
                                                     std::make_integer_sequence<int, kTileRows * kTileVectors>{});
      tile(kUnitRows ? a + r : a + r * a_step, a_step, b + v * kLanes, b_step, depth, c + r * c_step + v * kLanes,
           c_step, epilogue, aux == nullptr ? nullptr : aux + v * kLanes);
      r += height;
    }
    v += width;
  }
}

}  // namespace
}  // namespace attnkern::cpu
