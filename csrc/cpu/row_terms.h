// The terms of a row: delta, and the shift and the factor with which P is computed from the saved log-sum-exp.
#pragma once

#include <limits>

#include "gradients.h"

namespace attnkern::cpu {
namespace {

// The lanes' parts of a product of two rows. Beside a 0 of b counts nothing, whatever a holds: b may be the output of a
// row without keys.
template <class T, class C>
inline typename Simd<C>::V product_of_rows(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t size) {
  using S = Simd<C>;
  typename S::V product = S::zero();
  if (a_stride == 1 && b_stride == 1) {
    int64_t d = 0;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>)
      for (; d < size; d += 32) {
        const __m512i factors = _mm512_maskz_loadu_epi16(first_of_32(size - d), b + d);
        const auto count = _mm512_test_epi16_mask(factors, _mm512_set1_epi16(0x7f80));  // a subnormal is 0 here
        const __m512i others = _mm512_maskz_loadu_epi16(count, a + d);
        product = _mm512_dpbf16_ps(product, (__m512bh)others, (__m512bh)factors);
      }
#endif
    for (; d < size; d += S::kLanes) {
      const auto factor = S::load_as(b + d, size - d);
      product = S::fma(factor == S::zero() ? S::zero() : S::load_as(a + d, size - d), factor, product);
    }
  } else {
    for (int64_t d = 0; d < size; ++d)
      if (const C factor = to_compute<C>(b[d * b_stride]); factor != C(0))
        product[0] += to_compute<C>(a[d * a_stride]) * factor;
  }
  return product;
}

// The numbers that lse or grad_lse has of `count` rows, at most a vector of them.
template <class C>
inline typename Simd<C>::V numbers_of_rows(const Attention& p, const void* vector, int64_t batch, int64_t head,
                                           int64_t row, int64_t count) {
  return Simd<C>::load_as(static_cast<const C*>(vector) + lse_index(p, batch, head, row), count);
}

// delta of as many rows.
template <class T, class C>
inline typename Simd<C>::V delta_of_rows(const Backward& p, int64_t batch, int64_t head, int64_t row, int64_t count) {
  using S = Simd<C>;
  typename S::V product[S::kLanes] = {};
  for (int64_t r = 0; r < count; ++r)
    product[r] = product_of_rows<T, C>(at<T>(p.grad_out, batch, head, row + r), p.grad_out.stride[3],
                                       at<T>(p.out, batch, head, row + r), p.out.stride[3], p.head_dim_v);
  const auto given = p.grad_lse == nullptr ? S::zero() : numbers_of_rows<C>(p, p.grad_lse, batch, head, row, count);
  return S::sum_each(product) - given;
}

// delta and shift of `rows` rows of a head, a vector of rows at a time.
template <class T, class C>
inline void compute_terms(const Backward& p, bool fast_path, int64_t batch, int64_t head, int64_t row, int64_t rows,
                          RowTerms<C> terms) {
  using S = Simd<C>;
  using V = typename S::V;
  const int64_t base = (batch * p.heads_q + head) * p.seqlen_q, end = row + rows;
  for (; row < end; row += S::kLanes) {
    const int64_t count = min64(S::kLanes, end - row);
    const V lse = numbers_of_rows<C>(p, p.lse, batch, head, row, count);
    const V scaled = lse * S::set1(fast_path ? -kLog2E<C> : C(-1)),
            delta = delta_of_rows<T, C>(p, batch, head, row, count);
    S::store_as(terms.shift + base + row, lse == S::set1(-kInfinity<C>) ? lse : scaled, count);
    S::store_as(terms.delta + base + row, delta, count);
  }
}

// From this magnitude on the rounding of the log-sum-exp, and of scores that the forward pass has summed in another
// order, shows in P (in 16-bit results later). In a row of nothing but finfo.min the log-sum-exp has lost the number of
// keys.
template <class T, class C>
inline constexpr C kLargeLse = std::is_same_v<T, C> ? C(64) : C(1024);

// Whether the log-sum-exp of some of these rows of a head is as large.
template <class T, class C>
inline bool has_large_lse(const Backward& p, int64_t batch, int64_t head, int64_t row, int64_t rows) {
  using S = Simd<C>;
  auto small = S::zero() == S::zero();
  for (const int64_t end = row + rows; row < end; row += S::kLanes) {
    const auto lse = numbers_of_rows<C>(p, p.lse, batch, head, row, end - row), magnitude = S::max(lse, -lse);
    small &= ~((magnitude >= S::set1(kLargeLse<T, C>)) & (magnitude < S::set1(kInfinity<C>)));
  }
  return !S::all(small);
}
// The same for all rows of the call.
template <class T, class C>
inline bool has_large_lse(const Backward& p) {
  for (int64_t head = 0; head < p.batch * p.heads_q; ++head)
    if (has_large_lse<T, C>(p, head / p.heads_q, head % p.heads_q, 0, p.seqlen_q)) return true;
  return false;
}

// Whether P is to be normalised by a sum of its own, of some of these rows of a head or of the call. After decoding,
// and with few keys, it is, where results have the digits to show the other order of summation.
template <class T, class C, class... Rows>
inline bool needs_norm(const Backward& p, Rows... rows) {
  return (std::is_same_v<T, C> && (decodes(p) || has_few_keys(p))) || has_large_lse<T, C>(p, rows...);
}

// The Euclidean length of a row: |q| |k| bounds their product, and so how far its rounding may be off.
template <class T, class C>
inline C length_of(const View& view, int64_t batch, int64_t head, int64_t row, int64_t columns) {
  const T* x = at<T>(view, batch, head, row);
  return std::sqrt(Simd<C>::sum(product_of_rows<T, C>(x, view.stride[3], x, view.stride[3], columns)));
}

// What the lanes of each row have of its scores: their maximum, the sum of exponentials, and the length of the longest
// key among those that count.
template <class C>
struct LaneSums {
  C *largest, *sum, *length;
  LaneSums(C* memory, int64_t rows)
      : largest(memory), sum(largest + rows * Simd<C>::kLanes), length(sum + rows * Simd<C>::kLanes) {
    for (int64_t i = 0; i < rows * Simd<C>::kLanes; ++i) largest[i] = -kInfinity<C>, sum[i] = length[i] = C(0);
  }
};

// Adds a segment's scores, as P will be computed from them, from the row `row` of the sums on.
template <class Op, bool kFastPath, class C = typename Op::Compute>
inline void add_to_sums(const ScoreParams<C>& score, const BandWalk<C>& walk, const Segment& segment, int64_t keys,
                        const C* bias, const LaneBits* mask, const C* scores, const C* key_lengths,
                        const LaneSums<C>& sums, int64_t row) {
  using S = Simd<C>;
  using V = typename S::V;
  const C factor = kFastPath ? score.template product_factor<Op>() : C(1);
  const V scale = S::set1(score.scale), dead = S::set1(-kInfinity<C>), to_log2 = S::set1(kFastPath ? C(1) : kLog2E<C>);
  const Exponential<Op, kFastPath, Precision::kFull> exponential(factor);
  const Range live = walk.live_lanes(segment.row);
  for (int64_t i = 0; i < segment.rows; ++i) {
    const int64_t of_row = (row + i) * S::kLanes;
    V m = S::load(sums.largest + of_row), total = S::load(sums.sum + of_row), length = S::load(sums.length + of_row);
    for (int64_t v = segment.first; v < segment.last; ++v) {
      const int64_t at = i * kTile<C> + v * S::kLanes;
      V x = S::load(scores + at);
      if constexpr (!kFastPath) x = finish_score(score, x, scale, bias + at);
      if (mask != nullptr) x = S::select(mask[i] >> (v * S::kLanes), x, dead);
      if (segment.partial) x = LaneMask<C>({live.begin + i, live.end + i}, v).select(x, dead);
      if ((v + 1) * S::kLanes > keys) x = LaneMask<C>({0, keys}, v).select(x, dead);
      length = S::max(x == dead ? S::zero() : S::load(key_lengths + v * S::kLanes), length);
      const V old = m;
      m = S::max(S::product(x, S::set1(factor)), old);
      const V shift = m == dead ? S::zero() : m;
      total = S::fma(total, S::exp2((old - shift) * to_log2), exponential(x, -shift));
    }
    S::store(sums.largest + of_row, m);
    S::store(sums.sum + of_row, total);
    S::store(sums.length + of_row, length);
  }
}

// The norm of a row whose scores as P's have this maximum, in the natural-log domain, and this sum of exponentials. The
// saved log-sum-exp is that of these scores but for rounding (of itself, and of scores as large as `reach`), and then P
// sums up to 1; or it is that of more keys, as a ring's, and decides.
template <class C>
inline C norm_of(C lse, double largest, C sum, C reach) {
  if (sum == C(0)) return C(1);
  const double own = largest + std::log(static_cast<double>(sum)), given = static_cast<double>(lse);
  const double rounding = 4. * std::numeric_limits<C>::epsilon() * (std::fabs(given) + static_cast<double>(reach));
  return given - own > rounding ? static_cast<C>(std::exp(largest - given)) : C(1) / sum;
}

// shift and norm of rows that need one, from the same scores as their P.
template <class T, class Op, class C = typename Op::Compute>
[[gnu::noinline]] void normalise_again(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch,
                                       int64_t head, int64_t row, int64_t rows, RowTerms<C> terms) {
  using S = Simd<C>;
  using V = typename S::V;
  const ScoreParams<C> score(p);
  const int64_t depth = (p.head_dim + Op::kPack - 1) / Op::kPack;
  const LaneSums<C> sums(scratch.grad_scores, rows);
  const int64_t head_k = head / (p.heads_q / p.heads_k);
  C key_lengths[kTile<C>] = {};
  const typename Tiles<Op>::Setup tiles(scratch.tiles);
  for (int64_t key = 0; key < p.seqlen_k; key += kTile<C>) {
    const int64_t keys = min64(kTile<C>, p.seqlen_k - key);
    load_key_tile<T, Op>(p, scratch, score, batch, head_k, key, keys);
    for (int64_t j = 0; j < keys; ++j) key_lengths[j] = length_of<T, C>(p.k, batch, head_k, key + j, p.head_dim);
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
      const auto q_rows =
          rows_of_scores<T, Op>(p.q, batch, head, block, p.seqlen_q, p.head_dim, scratch.q_rows, scratch.tiles);
      for (int64_t s = 0; s < block.segments; ++s) {
        const Segment& segment = block.segment[s];
        const int64_t first = segment.row - block.row, lane = segment.first * S::kLanes, at = first * kTile<C>;
        const auto multiply = [&]<class Product>() {
          gemm<Product>(segment.rows, segment.last - segment.first, depth,
                        {q_rows.data + first * q_rows.step, q_rows.step, scratch.k_tile + lane, kTile<C>},
                        {scratch.scores + at + lane, kTile<C>, Epilogue::kStore, nullptr});
        };
        // In the order of summation that P is computed in: GradientTile's, or score_block's.
        if (scratch.tiles) products_to_memory(p, scratch, segment, first, false, q_rows, {});
        else if (score.fast_path()) multiply.template operator()<Op>();
        else multiply.template operator()<typename Op::Product>();
        const auto add = score.fast_path() ? add_to_sums<Op, true> : add_to_sums<Op, false>;
        add(score, walk, segment, keys, scratch.bias + at, bits_from(mask, first), scratch.scores + at, key_lengths,
            sums, segment.row - row);
      }
    }
  }
  const V to_log2 = S::set1(score.fast_path() ? C(1) : kLog2E<C>);
  const C of_head = sink_of<C>(p, batch, head), most = std::numeric_limits<C>::max();
  C scaled = score.fast_path() ? of_head * kLog2E<C> : of_head;
  if (of_head <= most && scaled > most) scaled = most;  // beside it nothing else counts, as it is
  const V sink = S::set1(scaled);
  const C* lse = static_cast<const C*>(p.lse) + lse_index(p, batch, head, row);
  for (int64_t i = 0; i < rows; ++i) {
    const V of_lanes = S::load(sums.largest + i * S::kLanes), m = S::max(S::max_all(of_lanes), sink);
    const V shift = m == S::set1(-kInfinity<C>) ? S::zero() : m;
    const V of_keys = S::load(sums.sum + i * S::kLanes) * S::exp2((of_lanes - shift) * to_log2);
    const C total = S::sum(of_keys) + S::exp2((sink - shift) * to_log2)[0];
    const C length = S::max_all(S::load(sums.length + i * S::kLanes))[0];
    const C query_length = length_of<T, C>(p.q, batch, head, row + i, p.head_dim);
    const double natural = static_cast<double>(m[0]) / (score.fast_path() ? static_cast<double>(kLog2E<C>) : 1.);
    terms.shift[i] = -m[0] < kInfinity<C> ? -m[0] : -kInfinity<C>;
    terms.norm[i] = norm_of<C>(lse[i], natural, total, std::fabs(score.scale) * query_length * length);
  }
}

// All terms of `rows` rows of a head.
template <class T, class Op, class C = typename Op::Compute>
inline void make_terms(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch, int64_t head, int64_t row,
                       int64_t rows, RowTerms<C> terms) {
  compute_terms<T>(p, ScoreParams<C>(p).fast_path(), batch, head, row, rows, terms);
  if (terms.norm == nullptr) return;
  constexpr int64_t kMost = kBlock<Op> * kTile<C> / (3 * Simd<C>::kLanes);  // rows that scratch has room for
  for (const int64_t end = row + rows; row < end; row += kMost) {
    const int64_t index = (batch * p.heads_q + head) * p.seqlen_q + row, count = min64(kMost, end - row);
    const RowTerms<C> some = terms.from(index);
    if (needs_norm<T, C>(p, batch, head, row, count)) normalise_again<T>(p, scratch, batch, head, row, count, some);
    else
      for (int64_t i = 0; i < count; ++i) some.norm[i] = C(1);
  }
}

}  // namespace
}  // namespace attnkern::cpu
