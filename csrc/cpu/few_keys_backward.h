// Backward pass of a few queries against few keys, as packed sequences of some tokens have it: few_keys.h once more.
//
// A lane is a query of a head; the heads that share a key head lie together, and several such groups where they fit in
// a vector. Of each key and all lanes:
//
//     S = Q K^T    dP = dO V^T                       few_scores, as in the forward pass
//     P = exp(S - lse)    dS = P * (dP - delta)
//     dV = P^T dO    dK = dS^T Q    dQ = dS K        a row at a time, the head dimension along the lanes
//
// P needs no sum of its own: its scores have the bits of the forward pass. No product meets a pair of query and key
// that don't attend to each other, whatever they hold.
#pragma once

#include "few_keys.h"
#include "row_terms.h"

namespace attnkern::cpu {
namespace {

// Where rows lie side by side and need no prefetching, eight keys, and in pairs more than some scores, are faster by
// the kernels of decoding or by tiles (as measured).
template <class T, class Op>
inline bool has_few_keys_and_queries(const Backward& p) {
  using C = typename Op::Compute;
  constexpr int64_t kScoresInPairs = 40;
  if (!has_few_keys(p) || p.heads_k != p.heads_v || p.seqlen_q == 0 || p.seqlen_k == 0 || p.head_dim == 0 ||
      p.head_dim_v == 0)
    return false;
  const int64_t group = p.heads_q / p.heads_k;
  const bool many = Op::kPack == 2 ? p.seqlen_q * p.seqlen_k > kScoresInPairs
                                   : p.seqlen_k == kFewKeys && (!kConverts<T, Op> || group > 1);
  return !(many && !lie_apart(p.k, p.head_dim)) && group * p.seqlen_q <= Simd<C>::kLanes && p.dropout_p == 0 &&
         p.dbias.data == nullptr && p.dsinks == nullptr && reads_in_place(p.grad_out, p.head_dim_v) &&
         reads_in_place(p.out, p.head_dim_v) && !has_large_lse<T, C>(p);
}

// Rows of a gradient, sums of weighted rows: output o is the sum over the rows i of which[o] of rows[i] times
// weights[o * output_step + i * row_step], times `factor`.
template <class T, class C>
struct WeightedRows {
  const T* const* rows;
  const C* weights;
  int64_t output_step, row_step, columns;
  C factor;

  // kOutputs of them from o on, columns from c on; one vector alone may be incomplete.
  template <int kOutputs, int kVectors>
  [[gnu::always_inline]] inline void store(int64_t o, const LaneBits* which, int64_t c, T* out,
                                           int64_t out_step) const {
    using S = Simd<C>;
    using V = typename S::V;
    V sums[kOutputs][kVectors] = {};
    const auto add = [&]<int kFirst, int kCount>(LaneBits of_rows) __attribute__((always_inline)) {
      for (; of_rows != 0; of_rows &= of_rows - 1) {
        const int64_t i = std::countr_zero(of_rows);
        const T* row = rows[i] + c;
        const C* weight = weights + (o + kFirst) * output_step + i * row_step;
        V x[kVectors];
        for (int v = 0; v < kVectors; ++v)
          x[v] = kVectors == 1 ? S::load_as(row, columns - c) : S::load_as(row + v * S::kLanes);
        for (int n = 0; n < kCount; ++n)
          for (int v = 0; v < kVectors; ++v)
            sums[kFirst + n][v] = S::fma(S::set1(weight[n * output_step]), x[v], sums[kFirst + n][v]);
      }
    };
    if constexpr (kOutputs == 2) {
      add.template operator()<0, 2>(which[o] & which[o + 1]);
      add.template operator()<0, 1>(which[o] & ~which[o + 1]);
      add.template operator()<1, 1>(which[o + 1] & ~which[o]);
    } else {
      add.template operator()<0, 1>(which[o]);
    }
    for (int n = 0; n < kOutputs; ++n)
      for (int v = 0; v < kVectors; ++v) {
        const V x = sums[n][v] * S::set1(factor);
        T* const target = out + (o + n) * out_step + c;
        if constexpr (kVectors == 1) S::store_as(target, x, columns - c);
        else S::store_as(target + v * S::kLanes, x);
      }
  }

  // All of `outputs`, two at a time: what both sum is read once.
  void store_all(int64_t outputs, const LaneBits* which, T* out, int64_t out_step) const {
    constexpr int64_t kLanes = Simd<C>::kLanes;
    const auto from = [&]<int kOutputs>(int64_t o) __attribute__((always_inline)) {
      int64_t c = 0;
      for (; c + 4 * kLanes <= columns; c += 4 * kLanes) store<kOutputs, 4>(o, which, c, out, out_step);
      for (; c < columns; c += kLanes) store<kOutputs, 1>(o, which, c, out, out_step);
    };
    int64_t o = 0;
    for (; o + 2 <= outputs; o += 2) from.template operator()<2>(o);
    if (o < outputs) from.template operator()<1>(o);
  }
};

// All queries of `heads` heads from `first` on, whole groups that share a key head.
template <class T, class Op>
void few_gradients(const Backward& p, const ScoreParams<typename Op::Compute>& score, int64_t batch, int64_t first,
                   int64_t heads) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using V = typename S::V;
  constexpr int64_t kLanes = S::kLanes;
  const int64_t rows = p.seqlen_q, lanes = heads * rows, group = p.heads_q / p.heads_k;
  const int64_t keys = min64(p.seqlen_k, kFewKeys);
  C scores[(kFewKeys + 2) * kLanes], grads[(kFewKeys + 2) * kLanes];
  few_scores<T>(p.q, p.k, batch, first, heads, group, 0, rows, keys, p.head_dim, scores);
  few_scores<T>(p.grad_out, p.v, batch, first, heads, group, 0, rows, keys, p.head_dim_v, grads);

  const T *queries[kLanes], *grad_rows[kLanes];
  V products[kLanes] = {};
  C lse[2 * kLanes], given[2 * kLanes] = {};
  C bias[kFewKeys * kTile<C>];
  LaneBits of_row = 0, without_keys = 0;
  for (int64_t n = 0, h = 0; h < heads; ++h) {
    const int64_t head = first + h, index = lse_index(p, batch, head, 0);
    const size_t bytes = static_cast<size_t>(rows) * sizeof(C);
    std::memcpy(lse + n, static_cast<const C*>(p.lse) + index, bytes);
    if (p.grad_lse != nullptr) std::memcpy(given + n, static_cast<const C*>(p.grad_lse) + index, bytes);
    if (score.has_bias) bias_tile<C, T>(p, 3, batch, head, 0, keys, 0, rows, bias + n);
    of_row |= LaneBits{1} << n;
    prefetch_later<0, T>(p.out, batch, head, 0, rows, p.head_dim_v);
    for (int64_t r = 0; r < rows; ++r, ++n) {
      queries[n] = at<T>(p.q, batch, head, r), grad_rows[n] = at<T>(p.grad_out, batch, head, r);
      products[n] = product_of_rows<T, C>(grad_rows[n], 1, at<T>(p.out, batch, head, r), 1, p.head_dim_v);
      without_keys |= LaneBits{lse[n] == -kInfinity<C>} << n;
    }
  }
  const V delta = S::sum_each(products) - S::load(given), shift = S::load(lse), log2e = S::set1(kLog2E<C>);
  const V scale = S::set1(score.signed_scale), excluded = S::set1(-kInfinity<C>);
  const Band band = p.band.transposed();
  C probabilities[kFewKeys * kLanes], score_grads[kFewKeys * kLanes];
  LaneBits met_by[kFewKeys];  // the lanes that attend to a key
  for (int64_t j = 0; j < keys; ++j) {
    const Range seen = band.visited(j, 1, {0, rows});
    LaneBits met = bits_between(seen) * of_row & ~without_keys;
    const C* const of_key = score.has_bias ? bias + j * kTile<C> : nullptr;
    if (score.mask_added && !S::all(S::load(of_key) != excluded))
      for (int64_t n = 0; n < lanes; ++n) met &= ~(LaneBits{of_key[n] == -kInfinity<C>} << n);
    V t = S::zero();
    const V x = finish_score<C>(score, S::load(scores + j * lanes), scale, of_key, &t);
    const V probability = S::template exp2<Op::kSums>((x - shift) * log2e);
    V grad = probability * (S::load(grads + j * lanes) - delta);
    if (score.capped()) grad *= S::set1(1) - t * t;
    S::store(probabilities + j * kLanes, probability);
    S::store(score_grads + j * kLanes, grad);
    met_by[j] = met;
  }

  for (int64_t begin = 0; begin < lanes; begin += group * rows) {
    const int64_t head_k = (first + begin / rows) / group;
    if (p.dq.data != nullptr) {
      const T* key_rows[kFewKeys];
      for (int64_t j = 0; j < keys; ++j) key_rows[j] = at<T>(p.k, batch, head_k, j);
      for (int64_t n = begin, h = head_k * group; h < (head_k + 1) * group; ++h, n += rows) {
        prefetch_later<1, T>(p.dq, batch, h, 0, rows, p.head_dim);
        LaneBits own[kLanes] = {};
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t j = 0; j < keys; ++j) own[r] |= (met_by[j] >> (n + r) & 1) << j;
        WeightedRows<T, C>{key_rows, score_grads + n, 1, kLanes, p.head_dim, score.signed_scale}.store_all(
            rows, own, at<T>(p.dq, batch, h), p.dq.stride[2]);
      }
    }
    const LaneBits of_group = bits_between({begin, begin + group * rows});
    LaneBits met[kFewKeys];
    for (int64_t j = 0; j < keys; ++j) met[j] = met_by[j] & of_group;
    const auto store_keys = [&](const View& view, const C* weights, const T* const* row, int64_t columns, C factor) {
      if (view.data == nullptr) return;
      prefetch_later<1, T>(view, batch, head_k, 0, keys, columns);
      WeightedRows<T, C>{row, weights, kLanes, 1, columns, factor}.store_all(keys, met, at<T>(view, batch, head_k),
                                                                             view.stride[2]);
    };
    store_keys(p.dk, score_grads, queries, p.head_dim, score.signed_scale);
    store_keys(p.dv, probabilities, grad_rows, p.head_dim_v, C(1));
  }
}

template <class T, class Op>
void backward_few_keys(const Backward& p, const Runtime& runtime) {
  using C = typename Op::Compute;
  const ScoreParams<C> score(p, true);
  const int64_t group = p.heads_q / p.heads_k, groups = p.batch * p.heads_k;
  const int64_t at_once = Simd<C>::kLanes / (group * p.seqlen_q);
  const int64_t tasks = runtime.num_threads == 1 ? 1 : min64(groups, 4 * runtime.num_threads);
  run_tasks(p, runtime, tasks, 0, [&](int64_t task, void*, int64_t) {
    const int64_t end = groups * (task + 1) / tasks;
    for (int64_t g = groups * task / tasks, now; g < end; g += now) {
      const int64_t batch = g / p.heads_k, first = g - batch * p.heads_k;
      now = min64(at_once, min64(end - g, p.heads_k - first));
      few_gradients<T, Op>(p, score, batch, first * group, now * group);
    }
  });
}

}  // namespace
}  // namespace attnkern::cpu
