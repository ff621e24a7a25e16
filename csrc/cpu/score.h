// From raw products to probabilities: scale, softcap, bias and band; and the pieces both passes share.
//
// Scores that have a bias or a cap stay in the natural-log domain: times log2 e a bias of finfo.min would overflow.
// Only their difference from the row's maximum is multiplied by log2 e, for exp2.
#pragma once

#include <cmath>

#include "walk.h"

namespace attnkern::cpu {
namespace {

// tanh: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel (Cody & Waite's split at 0.625).
template <class C>
inline typename Simd<C>::V tanh_lanes(typename Simd<C>::V x) {
  using S = Simd<C>;
  using V = typename S::V;
  if constexpr (sizeof(C) == 8) {
    C lanes[S::kLanes];
    S::store(lanes, x);
    for (int lane = 0; lane < S::kLanes; ++lane) lanes[lane] = std::tanh(lanes[lane]);
    return S::load(lanes);
  } else {
    const V magnitude = x < S::zero() ? -x : x;
    const V limited = S::max(S::set1(0), magnitude > S::set1(20) ? S::set1(20) : magnitude);
    const V large = S::set1(1) - S::set1(2) / (S::exp2(limited * S::set1(2 * kLog2E<C>)) + S::set1(1));
    const V square = x * x;
    V p = S::set1(-5.70498872745e-3f);
    p = S::fma(p, square, S::set1(2.06390887954e-2f));
    p = S::fma(p, square, S::set1(-5.37397155531e-2f));
    p = S::fma(p, square, S::set1(1.33314422036e-1f));
    p = S::fma(p, square, S::set1(-3.33332819422e-1f));
    const V small = S::fma(p * square, x, x);
    const V result = magnitude < S::set1(0.625f) ? small : (x < S::zero() ? -large : large);
    return x != x ? x : result;
  }
}

// What stands between the product and the softmax.
template <class C>
struct ScoreParams {
  // A bool mask keeps scores or excludes them; `adds_mask`: it is taken for a bias of 0 and -inf.
  explicit ScoreParams(const Attention& p, bool adds_mask = false)
      : signed_scale(static_cast<C>(p.softmax_scale)),
        scale(p.softmax_scale < 0 ? -signed_scale : signed_scale),
        negate(p.softmax_scale < 0),
        cap(static_cast<C>(p.softcap)),
        has_bias(p.bias.data != nullptr && (adds_mask || p.bias_dtype != DType::kBool)),
        has_mask(p.bias.data != nullptr && !has_bias),
        mask_added(has_bias && p.bias_dtype == DType::kBool),
        has_ranges(p.ranges.data != nullptr),
        dropout(p.dropout_p > 0) {}

  // Whether scores take the fast path: nothing but a scale, one that keeps -inf and that an operand can be multiplied
  // by without overflow. These scores are in the log2 domain. All others take the generic path.
  bool fast_path() const { return !capped() && !has_bias && !dropout && scale > C(0) && scale <= C(0x1p64); }

  // Whether a score is more than a scaled product and a bias: then `finish_score` makes it, from a product in memory.
  bool capped() const { return cap != C(0); }

  // What the operand along the lanes is multiplied by when it is transposed: all of the scale where that costs nothing
  // (16-bit pairs would be rounded), or the sign.
  template <class Op>
  C operand_factor() const {
    return fast_path() && Op::kPack == 1 ? signed_scale * kLog2E<C> : C(negate ? -1 : 1);
  }
  // ... and what is left for the products of the fast path.
  template <class Op>
  C product_factor() const {
    return Op::kPack == 1 ? C(1) : scale * kLog2E<C>;
  }

  C signed_scale;
  C scale;  // >= 0: a negative scale is turned into the sign of one operand, so that max(scale * s) = scale * max(s)
  bool negate;
  C cap;
  bool has_bias, has_mask, mask_added, has_ranges;
  bool dropout;
};

// Products to scores: scaled (by score.scale or its signed form), capped, biased. `bias` is read if there is one; *t is
// the cap's tanh, for its derivative 1 - t^2.
template <class C>
inline typename Simd<C>::V finish_score(const ScoreParams<C>& score, typename Simd<C>::V product,
                                        typename Simd<C>::V scale, const C* bias, typename Simd<C>::V* t = nullptr) {
  using S = Simd<C>;
  typename S::V x = product * scale;
  if (score.cap != C(0)) {
    x = tanh_lanes<C>(x / S::set1(score.cap));
    if (t != nullptr) *t = x;
    x *= S::set1(score.cap);
  }
  return score.has_bias ? x + S::load(bias) : x;
}

// The sink of a head; -inf, which counts for nothing, where there is none.
template <class C>
inline C sink_of(const Attention& p, int64_t batch, int64_t head) {
  if (p.sinks.data == nullptr) return -kInfinity<C>;
  return static_cast<const C*>(p.sinks.data)[batch * p.sinks.stride[0] + head * p.sinks.stride[1]];
}

// Which lanes of one vector of a tile are alive, row after row: the band moves by one lane per row.
template <class C>
class LaneMask {
 public:
  using S = Simd<C>;
  // live: lanes of the first row, relative to the tile.
  LaneMask(Range live, int64_t vector)
      : from_begin_(S::iota() - S::set1(static_cast<C>(live.begin - vector * S::kLanes))),
        from_end_(S::iota() - S::set1(static_cast<C>(live.end - vector * S::kLanes))) {}

  // Whether all `rows` rows have all their lanes alive.
  static bool all(Range live, int64_t vector, int64_t rows) {
    return live.begin + rows - 1 <= vector * S::kLanes && live.end >= (vector + 1) * S::kLanes;
  }

  typename S::V select(typename S::V alive, typename S::V dead) const {
    return (from_begin_ >= S::zero()) & (from_end_ < S::zero()) ? alive : dead;
  }

  // On to the next row. Bounds too large to be counted exactly are too far away to matter.
  void advance() {
    from_begin_ -= S::set1(C(1));
    from_end_ -= S::set1(C(1));
  }

 private:
  typename S::V from_begin_, from_end_;
};

// A register tile, lanes as in LaneMask for its first row: the lanes outside of the band become `dead`.
template <class C, int kRows, int kVectors>
[[gnu::always_inline]] inline void mask_tile(typename Simd<C>::V (&tile)[kRows][kVectors], Range live, int64_t vector,
                                             typename Simd<C>::V dead) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    if (LaneMask<C>::all(live, vector + v, kRows)) continue;
    LaneMask<C> mask(live, vector + v);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      tile[r][v] = mask.select(tile[r][v], dead);
      mask.advance();
    }
  }
}

// Puts `dead` where a mask excludes a score of a tile; `rows`: as of apply_mask, or null.
template <class C, int kRows, int kVectors>
[[gnu::always_inline]] inline void exclude_tile(typename Simd<C>::V (&tile)[kRows][kVectors], const LaneBits* rows,
                                                int64_t vector, typename Simd<C>::V dead) {
  if (rows == nullptr) return;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const LaneBits bits = rows[r] >> (vector * Simd<C>::kLanes);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) tile[r][v] = Simd<C>::select(bits >> (v * Simd<C>::kLanes), tile[r][v], dead);
  }
}

}  // namespace
}  // namespace attnkern::cpu
