// Backward pass of a few queries against many keys, as heads that pool a sequence have them: bound by reading K and V
// once, and by writing their gradients once.
//
// The query heads that share a key head are handled together ("rows"), by the products of decoding: the head dimension
// lies along the lanes, and rows of K and V are read as they lie in memory. Of a block of keys:
//
//     S = Q K^T    dP = dO V^T                     decode_scores
//     P = exp(S - lse)    dS = P * (dP - delta)    keys along the lanes, with a mask or bias
//     dV = P^T dO    dK = dS^T Q                   a key's row at a time, which is stored at once
//     dQ += dS K                                   decode_values
//
// S is summed up in the order of the forward pass, so P needs no sum of its own as it does where tiles of keys are
// transposed (row_terms.h). A task has some of a head's keys, always as many, and the tasks' parts of dQ are added up
// in their order: the sums have the same bits however many threads there are.
#pragma once

#include "decode.h"
#include "sinks.h"

namespace attnkern::cpu {
namespace {

// Rows of a key head, at most, and queries in pairs (as measured with AVX-512): tiles multiply more of them faster.
inline constexpr int64_t kRowsOfFewQueries = 16, kFewQueriesInPairs = 4;

template <class T, class Op>
inline bool has_few_queries(const Backward& p) {
  using C = typename Op::Compute;
  constexpr int64_t kMostRows = sizeof(T) == 2 || (sizeof(T) == 4 && kVectorBytes == 64) ? kRowsOfFewQueries
                                : sizeof(T) == 4 && kVectorBytes == 32                   ? 12
                                                                                         : 8;
  if ((Op::kPack == 2 && p.seqlen_q > kFewQueriesInPairs) || p.heads_k != p.heads_v || p.heads_k == 0 ||
      p.seqlen_k == 0 || p.head_dim == 0 || p.head_dim_v == 0 || p.heads_q / p.heads_k * p.seqlen_q > kMostRows)
    return false;
  const ScoreParams<C> score(p);
  return (decodes(p, true) || has_few_keys(p)) && !score.capped() && !score.dropout && p.dbias.data == nullptr &&
         p.ranges.count < 2 && !has_large_lse<T, C>(p);
}

// Rows of the gradient of keys or values: for each of kKeys keys the sum over `rows` rows of x, weighted, of kVectors
// vectors of columns. One alone may be incomplete: `columns` are left.
template <class T, class C, int kKeys, int kVectors>
inline void rows_of_keys(const C* weights, int64_t rows, const C* x, int64_t x_step, int64_t columns, C factor, T* out,
                         int64_t out_step) {
  using S = Simd<C>;
  typename S::V sum[kKeys][kVectors] = {};
  for (int64_t r = 0; r < rows; ++r, x += x_step, weights += kDecodeKeys) {
    typename S::V value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) value[v] = S::load(x + v * S::kLanes);
#pragma GCC unroll 4
    for (int j = 0; j < kKeys; ++j) {
      const auto weight = S::set1(weights[j]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[j][v] = S::fma(weight, value[v], sum[j][v]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kKeys; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const auto result = sum[j][v] * S::set1(factor);
      if constexpr (kVectors == 1) S::store_as(out + j * out_step, result, columns);
      else S::store_as(out + j * out_step + v * S::kLanes, result);
    }
}

// The same for all columns of `keys` keys.
template <class T, class C>
[[gnu::noinline]] void store_rows_of_keys(const C* weights, int64_t rows, const C* x, int64_t x_step, int64_t keys,
                                          int64_t columns, C factor, T* out, int64_t out_step) {
  constexpr int64_t kLanes = Simd<C>::kLanes;
  constexpr int kVectors = sizeof(T) < sizeof(C) ? 4 : 2, kKeys = 8 / kVectors;  // whole lines, where there are such
  const auto keys_from = [&]<int kNow>(int64_t j) {
    int64_t c = 0;
    T* const target = out + j * out_step;
    for (; c + kVectors * kLanes <= columns; c += kVectors * kLanes)
      rows_of_keys<T, C, kNow, kVectors>(weights + j, rows, x + c, x_step, columns, factor, target + c, out_step);
    for (; c < columns; c += kLanes)
      rows_of_keys<T, C, kNow, 1>(weights + j, rows, x + c, x_step, columns - c, factor, target + c, out_step);
  };
  int64_t j = 0;
  for (; j + kKeys <= keys; j += kKeys) keys_from.template operator()<kKeys>(j);
  for (; j < keys; ++j) keys_from.template operator()<1>(j);
}

// Keys of a task.
inline constexpr int64_t kKeysOfPart = 2 * kDecodeKeys;

// A backward pass of few queries as tasks: parts of the keys of each key head; then, where there are several parts,
// the sums of dQ.
template <class T, class Op>
class FewQueriesCall {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using V = typename S::V;

 public:
  explicit FewQueriesCall(const Backward& p)
      : p_(p),
        score_(p, true),
        sinks_(p),
        group_(p.heads_q / p.heads_k),
        rows_(group_ * p.seqlen_q),
        heads_(p.batch * p.heads_k),
        parts_((p.seqlen_k + kKeysOfPart - 1) / kKeysOfPart),
        step_(round_up(max64(p.head_dim, p.head_dim_v), 2 * S::kLanes)),
        delta_(p.dsinks == nullptr ? 0 : p.batch * p.heads_q * p.seqlen_q),
        sums_(parts_ == 1 || p.dq.data == nullptr ? 0 : heads_ * parts_ * rows_ * step_),
        bytes_(Scratch(nullptr, *this).bytes) {}

  int64_t phases() const { return sums_.data() == nullptr ? 1 : 2; }
  int64_t tasks(int64_t phase) const { return phase == 0 ? heads_ * parts_ : heads_; }
  int64_t scratch_bytes(int64_t phase) const { return phase == 0 ? bytes_ : 0; }
  int64_t queues(int64_t) const { return 0; }
  int64_t queue_end(int64_t, int64_t) const { return 0; }
  void run(int64_t phase, int64_t task, void* memory, int64_t) const {
    if (phase == 0) return run_part(task, memory);
    C* const sums = sums_.data() + task * parts_ * rows_ * step_;
    for (int64_t part = 1; part < parts_; ++part)
      for (int64_t i = 0; i < rows_ * step_; i += S::kLanes)
        S::store(sums + i, S::load(sums + i) + S::load(sums + part * rows_ * step_ + i));
    store_query_grads(task, sums);
  }
  void forget(int64_t) const {}
  void end() const { sinks_.store(); }

 private:
  // A task's memory. Rows of Q and dO are converted, and as they meet rows of K and V.
  struct Scratch {
    Scratch(void* memory, const FewQueriesCall& call) {
      Arena arena(memory);
      const int64_t numbers = call.rows_ * call.step_, scores = call.rows_ * kDecodeKeys;
      q = arena.take<C>(numbers), grad = arena.take<C>(numbers);
      own_q = arena.take<C>(numbers), own_grad = arena.take<C>(numbers);
      dq = arena.take<C>(numbers);
      p = arena.take<C>(scores), ds = arena.take<C>(scores);
      bias = arena.take<C>(call.score_.has_bias ? scores : 0);
      const bool copies =
          !reads_in_place(call.p_.k, call.p_.head_dim) || !reads_in_place(call.p_.v, call.p_.head_dim_v);
      copy = arena.take<C>(copies ? kDecodeKeys * call.step_ : 0);
      bytes = arena.used();
    }
    C *q, *grad, *own_q, *own_grad, *dq, *p, *ds, *bias, *copy;
    int64_t bytes;
  };
  // Of a row: the keys that it attends to, its log-sum-exp and its delta.
  struct Row {
    Range keys;
    C lse, delta;
  };

  // Whether the mask leaves a query any of these keys.
  bool attends(int64_t batch, int64_t head, int64_t query, Range keys) const {
    for (int64_t key = keys.begin, now; key < keys.end; key += now) {
      now = min64(64, keys.end - key);
      LaneBits attended = 0;
      mask_bits(p_, 2, batch, head, query, 1, key, now, &attended);
      if ((attended & bits_between({0, now})) != 0) return true;
    }
    return false;
  }
  // Rows of Q or dO; zeros for a row without keys, whatever it holds.
  void take_rows(const View& view, int64_t columns, int64_t batch, int64_t head_k, const Row* row, C* target,
                 C* own) const {
    for (C* both : {target, own}) std::memset(both, 0, static_cast<size_t>(rows_ * step_) * sizeof(C));
    for (int64_t r = 0; r < rows_; ++r) {
      if (row[r].keys.end <= row[r].keys.begin) continue;
      const T* source = at<T>(view, batch, head_k * group_ + r / p_.seqlen_q, r % p_.seqlen_q);
      take_row(source, view.stride[3], columns, step_, r, target, own);
    }
  }
  // products[row] = x[row] . each of a block's keys or values, whose rows prefetch those that come before `end`.
  void multiply(const View& view, int64_t columns, int64_t batch, int64_t head_k, int64_t key, int64_t keys,
                int64_t end, const C* x, const C* own, const Scratch& scratch, C* products) const {
    const int64_t portion = keys_of_portion<T>(columns);
    with_rows<C, T>(view, batch, head_k, key, keys, columns, scratch.copy, [&](const auto& rows, bool in_place) {
      const auto* queries = queries_of<typename std::remove_cvref_t<decltype(rows)>::Element>(x, own);
      score_portions<C, kDecodeKeys>({queries, step_, rows_}, rows, keys, columns,
                                     {in_place ? max64(0, min64(keys, end - key - portion)) : 0, portion}, portion,
                                     products);
    });
  }
  // Products to P and dS.
  void differentiate(const Row* row, int64_t key, int64_t keys, const Scratch& scratch) const {
    const V scale = S::set1(score_.signed_scale), log2e = S::set1(kLog2E<C>), excluded = S::set1(-kInfinity<C>);
    for (int64_t r = 0; r < rows_; ++r) {
      const Range live{row[r].keys.begin - key, row[r].keys.end - key};
      const V lse = S::set1(row[r].lse), delta = S::set1(row[r].delta);
      C *const p = scratch.p + r * kDecodeKeys, *const ds = scratch.ds + r * kDecodeKeys;
      for (int64_t j = 0; j < keys; j += S::kLanes) {
        // The product as the forward pass has it: of a large score, the rounding alone would be a large exponent.
        V x = S::product(S::load(p + j), scale);
        const C* const bias = score_.has_bias ? scratch.bias + in_tiles<C>(r, rows_, j) : nullptr;
        if (bias != nullptr) x += S::load(bias);
        V probability = S::template exp2<Op::kSums>((x - lse) * log2e);
        V grad = probability * (S::load(ds + j) - delta);
        if (score_.mask_added) {  // whatever K and V hold
          const auto dead = S::load(bias) == excluded;
          probability = dead ? S::zero() : probability, grad = dead ? S::zero() : grad;
        }
        if (!LaneMask<C>::all(live, j / S::kLanes, 1)) {
          const LaneMask<C> attended(live, j / S::kLanes);
          probability = attended.select(probability, S::zero()), grad = attended.select(grad, S::zero());
        }
        S::store(p + j, probability), S::store(ds + j, grad);
      }
    }
  }
  // dQ += dS K, without what lies in keys that no row attends to: 0 times infinity or NaN would be NaN.
  void add_query_grads(int64_t batch, int64_t head_k, int64_t key, int64_t keys, const Scratch& scratch, C* dq) const {
    C ones[kRowsOfFewQueries];
    for (C& one : ones) one = C(1);
    int64_t begin = 0;
    const auto add_until = [&](int64_t end) {
      if (end > begin)
        with_rows<C, T>(p_.k, batch, head_k, key + begin, end - begin, p_.head_dim, scratch.copy,
                        [&](const auto& rows, bool) {
                          add_values<C, kDecodeKeys>(scratch.ds + begin, rows_, rows, end - begin, p_.head_dim,
                                                     PrefetchAhead{}, ones, dq, step_);
                        });
    };
    const bool by_band_alone = p_.ranges.data == nullptr && !score_.mask_added;
    for (int64_t first = 0; first < keys && !by_band_alone; first += 64) {
      const int64_t now = min64(64, keys - first);
      const LaneBits attended = attended_keys(p_, batch, head_k * group_, group_, key + first, now);
      const RowBits others{{~attended & bits_between({0, now})}};
      rows_of_non_numbers<T, C>(p_.k, batch, head_k, key + first, p_.head_dim, others).for_each([&](int64_t j) {
        add_until(first + j);
        begin = first + j + 1;
      });
    }
    add_until(keys);
  }
  void clear_keys(int64_t batch, int64_t head_k, Range keys) const {
    clear_rows(p_, p_.dk, batch, head_k, keys, p_.head_dim);
    clear_rows(p_, p_.dv, batch, head_k, keys, p_.head_dim_v);
  }
  void store_query_grads(int64_t head, const C* sums) const {
    for (int64_t g = 0; g < group_; ++g)
      store_query_grad<T>(p_, head / p_.heads_k, head % p_.heads_k * group_ + g, 0, p_.seqlen_q,
                          sums + g * p_.seqlen_q * step_, step_);
  }

  void run_part(int64_t task, void* memory) const {
    const int64_t part = task % parts_, head = task / parts_, batch = head / p_.heads_k, head_k = head % p_.heads_k;
    const Range given{part * kKeysOfPart, min64(p_.seqlen_k, (part + 1) * kKeysOfPart)};
    const Range reached = p_.band.reached(p_.seqlen_q, given);
    int64_t begin = min64(reached.begin, given.end), end = max64(begin, min64(reached.end, given.end));
    const bool of_sinks = part == 0 && p_.dsinks != nullptr;
    const Scratch scratch(memory, *this);
    Row row[kRowsOfFewQueries];
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t head_q = head_k * group_ + g, index = (batch * p_.heads_q + head_q) * p_.seqlen_q;
      C delta[kRowsOfFewQueries + S::kLanes];
      for (int64_t i = 0; i < p_.seqlen_q; i += S::kLanes)
        S::store(delta + i, delta_of_rows<T, C>(p_, batch, head_q, i, min64(S::kLanes, p_.seqlen_q - i)));
      const C* lse = static_cast<const C*>(p_.lse) + lse_index(p_, batch, head_q, 0);
      for (int64_t i = 0; i < p_.seqlen_q; ++i) {
        Range keys = p_.band.visited(i, 1, {begin, end});
        if (p_.ranges.data != nullptr) keys = range_of_row(p_.ranges, batch, head_q, i, 0, keys);
        // (A sink alone makes the log-sum-exp a number.)
        const bool without_keys = lse[i] == -kInfinity<C> ||
                                  (p_.sinks.data != nullptr && score_.mask_added && !attends(batch, head_q, i, keys));
        row[g * p_.seqlen_q + i] = {without_keys ? Range{begin, begin} : keys, lse[i], delta[i]};
        if (of_sinks) delta_.data()[index + i] = delta[i];
      }
      if (of_sinks) sinks_.add(batch, head_q, 0, p_.seqlen_q, delta_.data());
    }
    if (p_.ranges.data != nullptr) {
      Range met{end, begin};
      for (int64_t r = 0; r < rows_; ++r)
        if (const Range& keys = row[r].keys; keys.end > keys.begin)
          met = {min64(met.begin, keys.begin), max64(met.end, keys.end)};
      begin = min64(met.begin, met.end), end = met.end;
    }
    take_rows(p_.q, p_.head_dim, batch, head_k, row, scratch.q, scratch.own_q);
    take_rows(p_.grad_out, p_.head_dim_v, batch, head_k, row, scratch.grad, scratch.own_grad);
    C* const dq = sums_.data() == nullptr ? scratch.dq : sums_.data() + task * rows_ * step_;
    std::memset(dq, 0, static_cast<size_t>(rows_ * step_) * sizeof(C));
    for (int64_t key = begin, keys; key < end; key += keys) {
      keys = min64(kDecodeKeys, end - key);
      if (score_.has_bias && excludes_all_of_rows<T>(p_, batch, head_k, key, keys)) {
        clear_keys(batch, head_k, {key, key + keys});
        continue;
      }
      multiply(p_.k, p_.head_dim, batch, head_k, key, keys, end, scratch.q, scratch.own_q, scratch, scratch.p);
      multiply(p_.v, p_.head_dim_v, batch, head_k, key, keys, end, scratch.grad, scratch.own_grad, scratch, scratch.ds);
      if (score_.has_bias) decode_bias<T>(p_, batch, head_k, key, keys, scratch.bias);
      differentiate(row, key, keys, scratch);
      if (p_.dv.data != nullptr)
        store_rows_of_keys<T>(scratch.p, rows_, scratch.grad, step_, keys, p_.head_dim_v, C(1),
                              at<T>(p_.dv, batch, head_k, key), p_.dv.stride[2]);
      if (p_.dk.data != nullptr)
        store_rows_of_keys<T>(scratch.ds, rows_, scratch.q, step_, keys, p_.head_dim, score_.signed_scale,
                              at<T>(p_.dk, batch, head_k, key), p_.dk.stride[2]);
      if (p_.dq.data != nullptr) add_query_grads(batch, head_k, key, keys, scratch, dq);
    }
    clear_keys(batch, head_k, {given.begin, begin});
    clear_keys(batch, head_k, {end, given.end});
    if (p_.dq.data != nullptr && sums_.data() == nullptr) store_query_grads(head, dq);
  }

  const Backward& p_;
  const ScoreParams<C> score_;  // a mask is added
  const SinksGradient<C> sinks_;
  const int64_t group_, rows_, heads_, parts_;
  const int64_t step_;     // of a row
  const Buffer<C> delta_;  // for the gradient of the sinks
  const Buffer<C> sums_;
  const int64_t bytes_;
};

template <class T, class Op>
void backward_few_queries(const Backward& p, const Runtime& runtime) {
  const FewQueriesCall<T, Op> call(p);
  for (int64_t phase = 0; phase < call.phases(); ++phase) run_phase(p, runtime, call, phase);
  call.end();
}

}  // namespace
}  // namespace attnkern::cpu
