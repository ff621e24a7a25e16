// The gradient of the sinks. (The forward passes count the sinks into their sums; the other gradients need P alone, for
// which the log-sum-exp is enough.)
#pragma once

#include "row_terms.h"

namespace attnkern::cpu {
namespace {

// dsink = -sum over the rows of exp(sink - lse) delta, in a fixed order.
template <class T, class C>
void backward_sinks(const Backward& p, const Runtime& runtime) {
  using S = Simd<C>;
  using V = typename S::V;
  constexpr int64_t kRows = 512;  // of a task
  const int64_t pieces = (p.seqlen_q + kRows - 1) / kRows, all_heads = p.batch * p.heads_q;
  const Buffer<C> sums(all_heads * pieces);
  run_tasks(p, runtime, all_heads * pieces, 0, [&](int64_t task, void*, int64_t) {
    const int64_t batch = task / pieces / p.heads_q, head = task / pieces % p.heads_q, first = task % pieces * kRows;
    const C sink = sink_of<C>(p, batch, head);
    V sum = S::zero();
    for (int64_t row = first, end = min64(first + kRows, p.seqlen_q); row < end; row += S::kLanes) {
      const int64_t count = min64(S::kLanes, end - row);
      const V lse = numbers_of_rows<C>(p, p.lse, batch, head, row, count);
      // (A sink of -inf counts for nothing, even where nothing else is; what lies past the rows counts neither.)
      const V probability = sink == -kInfinity<C> ? S::zero() : S::exp2((S::set1(sink) - lse) * S::set1(kLog2E<C>));
      const V term = probability * delta_of_rows<T, C>(p, batch, head, row, count);
      sum += S::iota() < S::set1(static_cast<C>(count)) ? term : S::zero();
    }
    sums.data()[task] = -S::sum(sum);
  });
  C* const dsinks = static_cast<C*>(p.dsinks);
  for (int64_t i = 0; i < p.sinks.batch * p.heads_q; ++i) dsinks[i] = C(0);
  for (int64_t i = 0; i < all_heads * pieces; ++i) dsinks[i / pieces % (p.sinks.batch * p.heads_q)] += sums.data()[i];
}

}  // namespace
}  // namespace attnkern::cpu
