// The gradient of the sinks. (The forward passes count the sinks into their sums; the other gradients need P alone, for
// which the log-sum-exp is enough.)
#pragma once

#include "row_terms.h"
#include "tasks.h"

namespace attnkern::cpu {
namespace {

// dsink = -sum over the rows of exp(sink - lse) delta, in a fixed order: by pieces of kTaskRows rows, and those one
// after the other.
template <class C>
class SinksGradient {
 public:
  // Where p wants none, nothing is done.
  explicit SinksGradient(const Backward& p)
      : p_(p), pieces_(task_pieces(p.seqlen_q)), sums_(p.dsinks == nullptr ? 0 : p.batch * p.heads_q * pieces_) {}

  // Takes in `rows` rows of a head, of which the first begins a piece. `delta` has one number for each row of the call.
  void add(int64_t batch, int64_t head, int64_t row, int64_t rows, const C* delta) const {
    using S = Simd<C>;
    if (p_.dsinks == nullptr) return;
    const C sink = sink_of<C>(p_, batch, head);
    for (const int64_t last = row + rows; row < last; row += kTaskRows) {
      typename S::V sum = S::zero();
      for (int64_t i = row, end = min64(row + kTaskRows, last); i < end; i += S::kLanes) {
        const int64_t count = min64(S::kLanes, end - i);
        const auto lse = numbers_of_rows<C>(p_, p_.lse, batch, head, i, count);
        // (A sink of -inf counts for nothing, even where nothing else is; what lies past the rows counts neither.)
        const auto probability =
            sink == -kInfinity<C> ? S::zero() : S::exp2((S::set1(sink) - lse) * S::set1(kLog2E<C>));
        const auto term = probability * S::load_as(delta + (batch * p_.heads_q + head) * p_.seqlen_q + i, count);
        sum += S::iota() < S::set1(static_cast<C>(count)) ? term : S::zero();
      }
      sums_.data()[(batch * p_.heads_q + head) * pieces_ + row / kTaskRows] = S::sum(sum);
    }
  }

  // Writes the gradient, once all rows are in.
  void store() const {
    if (p_.dsinks == nullptr) return;
    C* const dsinks = static_cast<C*>(p_.dsinks);
    const int64_t step = p_.all_heads == 0 ? p_.heads_q : p_.all_heads;
    const auto sink = [&](int64_t i) -> C& { return dsinks[i / p_.heads_q * step + i % p_.heads_q]; };
    const int64_t count = p_.sinks.batch * p_.heads_q, all_pieces = p_.batch * p_.heads_q * pieces_;
    for (int64_t i = 0; i < count; ++i) sink(i) = C(0);
    for (int64_t i = 0; i < all_pieces; ++i) sink(i / pieces_ % count) -= sums_.data()[i];
  }

 private:
  const Backward& p_;
  int64_t pieces_;
  Buffer<C> sums_;
};

}  // namespace
}  // namespace attnkern::cpu
