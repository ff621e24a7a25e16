// The terms of a row: delta, and the shift and the factor with which P is computed from the saved log-sum-exp.
#pragma once

#include "gradients.h"

namespace attnkern::cpu {
namespace {

// delta and shift of `rows` rows of a head, a vector of rows at a time.
template <class T, class C>
inline void compute_terms(const Backward& p, bool fast_path, int64_t batch, int64_t head, int64_t row, int64_t rows,
                          RowTerms<C> terms) {
  using S = Simd<C>;
  using V = typename S::V;
  const int64_t base = (batch * p.heads_q + head) * p.seqlen_q, end = row + rows;
  const int64_t grad_stride = p.grad_out.stride[3], out_stride = p.out.stride[3];
  for (; row < end; row += S::kLanes) {
    const int64_t count = min64(S::kLanes, end - row);
    V product[S::kLanes] = {};
    for (int64_t r = 0; r < count; ++r) {
      const T* grad = at<T>(p.grad_out, batch, head, row + r);
      const T* out = at<T>(p.out, batch, head, row + r);
      if (grad_stride == 1 && out_stride == 1) {
        for (int64_t d = 0; d < p.head_dim_v; d += S::kLanes)
          product[r] =
              S::fma(S::load_as(grad + d, p.head_dim_v - d), S::load_as(out + d, p.head_dim_v - d), product[r]);
      } else {
        for (int64_t d = 0; d < p.head_dim_v; ++d)
          product[r][0] += to_compute<C>(grad[d * grad_stride]) * to_compute<C>(out[d * out_stride]);
      }
    }
    const auto given = [&](const void* vector) {
      return S::load_as(static_cast<const C*>(vector) + base + row, count);
    };
    const V lse = given(p.lse), scaled = lse * S::set1(fast_path ? -kLog2E<C> : C(-1));
    const V delta = S::sum_each(product) - (p.grad_lse == nullptr ? S::zero() : given(p.grad_lse));
    S::store_as(terms.shift + base + row, lse == S::set1(-kInfinity<C>) ? lse : scaled, count);
    S::store_as(terms.delta + base + row, delta, count);
  }
}

// From this magnitude on the rounding of the log-sum-exp, and of scores that the forward pass has summed in another
// order, shows in P (in 16-bit results later). In a row of nothing but finfo.min the log-sum-exp has lost the number of
// keys.
template <class T, class C>
inline constexpr C kLargeLse = std::is_same_v<T, C> ? C(64) : C(1024);

template <class T, class C>
inline bool has_large_lse(const C* lse, int64_t rows) {
  bool large = false;
  for (int64_t i = 0; i < rows; ++i) {
    const C magnitude = lse[i] < C(0) ? -lse[i] : lse[i];
    large |= (magnitude >= kLargeLse<T, C>)&(magnitude < kInfinity<C>);
  }
  return large;
}

// Adds a segment's scores, as P will be computed from them, to the lanes' maxima and sums of exponentials.
template <class Op, bool kFastPath, class C = typename Op::Compute>
inline void add_to_sums(const ScoreParams<C>& score, const BandWalk<C>& walk, const Segment& segment, int64_t keys,
                        const C* bias, const LaneBits* mask, const C* scores, C* largest, C* sum) {
  using S = Simd<C>;
  using V = typename S::V;
  const C factor = kFastPath ? score.template product_factor<Op>() : C(1);
  const V scale = S::set1(score.scale), dead = S::set1(-kInfinity<C>), to_log2 = S::set1(kFastPath ? C(1) : kLog2E<C>);
  const Exponential<Op, kFastPath, Precision::kFull> exponential(factor);
  const Range live = walk.live_lanes(segment.row);
  for (int64_t i = 0; i < segment.rows; ++i) {
    V m = S::load(largest + i * S::kLanes), total = S::load(sum + i * S::kLanes);
    for (int64_t v = segment.first; v < segment.last; ++v) {
      const int64_t at = i * kTile<C> + v * S::kLanes;
      V x = S::load(scores + at);
      if constexpr (!kFastPath) x = finish_score(score, x, scale, bias + at);
      if (mask != nullptr) x = S::select(mask[i] >> (v * S::kLanes), x, dead);
      if (segment.partial) x = LaneMask<C>({live.begin + i, live.end + i}, v).select(x, dead);
      if ((v + 1) * S::kLanes > keys) x = LaneMask<C>({0, keys}, v).select(x, dead);
      const V old = m;
      m = S::max(S::product(x, S::set1(factor)), old);
      const V shift = m == dead ? S::zero() : m;
      total = S::fma(total, S::exp2((old - shift) * to_log2), exponential(x, -shift));
    }
    S::store(largest + i * S::kLanes, m);
    S::store(sum + i * S::kLanes, total);
  }
}

// shift and norm of rows whose lse is large, from the same scores as their P.
template <class T, class Op, class C = typename Op::Compute>
[[gnu::noinline]] void normalise_again(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch,
                                       int64_t head, int64_t row, int64_t rows, RowTerms<C> terms) {
  using S = Simd<C>;
  using V = typename S::V;
  const ScoreParams<C> score(p);
  const int64_t depth = (p.head_dim + Op::kPack - 1) / Op::kPack;
  C *largest = scratch.grad_scores, *sum = largest + rows * S::kLanes;
  for (int64_t i = 0; i < rows * S::kLanes; ++i) largest[i] = -kInfinity<C>, sum[i] = C(0);
  for (int64_t key = 0; key < p.seqlen_k; key += kTile<C>) {
    const int64_t keys = min64(kTile<C>, p.seqlen_k - key);
    load_key_tile<T, Op>(p, scratch, score, batch, head / (p.heads_q / p.heads_k), key, keys);
    BandWalk<C> walk(p.band.transposed(), key, keys, {row, row + rows}, kBlock<Op>);
    BlockPlan block;
    while (walk.next(block)) {
      if (block.segments == 0 || (score.has_bias && excludes_all<T>(p, batch, head, block.row, block.rows, key, keys)))
        continue;
      const LaneBits* mask = nullptr;
      if ((score.has_mask || score.has_ranges) &&
          !apply_mask<C>(p, walk, 2, batch, head, key, keys, scratch.mask, block, mask))
        continue;
      if (score.has_bias) bias_tile<C, T>(p, 2, batch, head, block.row, block.rows, key, keys, scratch.bias);
      const auto q_rows = operand_rows<Op, T>(p.q, batch, head, block.row, block.rows, p.head_dim, scratch.q_rows);
      for (int64_t s = 0; s < block.segments; ++s) {
        const Segment& segment = block.segment[s];
        const int64_t first = segment.row - block.row, lane = segment.first * S::kLanes, at = first * kTile<C>;
        const auto multiply = [&]<class Product>() {
          gemm<Product>(segment.rows, segment.last - segment.first, depth,
                        {q_rows.data + first * q_rows.step, q_rows.step, scratch.k_tile + lane, kTile<C>},
                        {scratch.scores + at + lane, kTile<C>, Epilogue::kStore, nullptr});
        };
        // In the order of summation that P is computed in: GradientTile's, or score_block's.
        if (score.fast_path()) multiply.template operator()<Op>();
        else multiply.template operator()<typename Op::Product>();
        const int64_t lanes = (segment.row - row) * S::kLanes;
        const auto add = score.fast_path() ? add_to_sums<Op, true> : add_to_sums<Op, false>;
        add(score, walk, segment, keys, scratch.bias + at, bits_from(mask, first), scratch.scores + at, largest + lanes,
            sum + lanes);
      }
    }
  }
  const V to_log2 = S::set1(score.fast_path() ? C(1) : kLog2E<C>);
  for (int64_t i = 0; i < rows; ++i) {
    const V of_lanes = S::load(largest + i * S::kLanes), m = S::max_all(of_lanes);
    const V shift = m == S::set1(-kInfinity<C>) ? S::zero() : m;
    const C total = S::sum(S::load(sum + i * S::kLanes) * S::exp2((of_lanes - shift) * to_log2));
    terms.shift[i] = -m[0] < kInfinity<C> ? -m[0] : -kInfinity<C>;
    terms.norm[i] = total == C(0) ? C(1) : C(1) / total;
  }
}

// All terms of `rows` rows of a head.
template <class T, class Op, class C = typename Op::Compute>
inline void make_terms(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch, int64_t head, int64_t row,
                       int64_t rows, RowTerms<C> terms) {
  compute_terms<T>(p, ScoreParams<C>(p).fast_path(), batch, head, row, rows, terms);
  if (terms.norm == nullptr) return;
  constexpr int64_t kMost = kBlock<Op> * kTile<C> / (2 * Simd<C>::kLanes);  // rows that scratch has room for
  for (const int64_t end = row + rows; row < end; row += kMost) {
    const int64_t index = (batch * p.heads_q + head) * p.seqlen_q + row, count = min64(kMost, end - row);
    const RowTerms<C> some = terms.from(index);
    if (has_large_lse<T>(static_cast<const C*>(p.lse) + index, count))
      normalise_again<T>(p, scratch, batch, head, row, count, some);
    else
      for (int64_t i = 0; i < count; ++i) some.norm[i] = C(1);
  }
}

}  // namespace
}  // namespace attnkern::cpu
