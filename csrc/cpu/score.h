// From raw products to probabilities: scale, softcap, bias and band; and the pieces both passes share.
//
// Scores stay in natural units (not times log2 e): a bias of finfo.min would overflow there, and the subtraction of the
// row's maximum is then exact where it matters. Only the difference is multiplied by log2 e, for exp2.
#pragma once

#include <cmath>

#include "blocks.h"

namespace attnkern::cpu {
namespace {

template <class C>
inline constexpr C kLog2E = C(1.442695040888963407359924681001892137L);
template <class C>
inline constexpr C kInfinity = static_cast<C>(__builtin_inf());

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

// What stands between the product and the softmax. `plain`: nothing but the scale.
template <class C>
struct Score {
  explicit Score(const Attention& p)
      : signed_scale(static_cast<C>(p.softmax_scale)), scale(p.softmax_scale < 0 ? -signed_scale : signed_scale),
        negate(p.softmax_scale < 0),
        cap(static_cast<C>(p.softcap)), has_bias(p.bias.data != nullptr), dropout(p.dropout_p > 0) {}

  bool plain() const { return cap == C(0) && !has_bias; }

  C signed_scale;
  C scale;       // >= 0: a negative scale is turned into the sign of one operand, so that max(scale * s) = scale * max(s)
  bool negate;
  C cap;
  bool has_bias;
  bool dropout;
};

// Lanes [begin, end) of vector v as a mask.
template <class C>
inline auto lane_mask(typename Simd<C>::V iota, int64_t v, Range live) {
  using S = Simd<C>;
  const int64_t base = v * S::kLanes;
  // Clipped to the vector, the bounds are small and exact in C.
  const C begin = static_cast<C>(max64(min64(live.begin - base, S::kLanes), 0));
  const C end = static_cast<C>(max64(min64(live.end - base, S::kLanes), 0));
  return (iota >= S::set1(begin)) & (iota < S::set1(end));
}

}  // namespace
}  // namespace attnkern::cpu
