// The last queries of a call, where these are a few beyond whole vectors of queries, as those of an image with a token
// for the whole of it are one: a tile's last vector takes as long with one lane as with all. They are decoded, row by
// row, after the tiles of their head, whose keys and values lie in a cache then.
#pragma once

#include "decode_scores.h"

namespace attnkern::cpu {
namespace {

// Keys that odd queries meet, at most: all of a row's scores are computed before its first probability.
inline constexpr int64_t kOddKeys = kManyKeys;

// How many they are; 0: the tiles have all queries. As measured: up to half a vector, up to an eighth where one vector
// is all that comes before; of bfloat16 in pairs up to an eighth, behind two vectors and more.
template <class Op>
inline int64_t odd_queries(const Forward& p) {
  constexpr int64_t kLanes = Simd<typename Op::Compute>::kLanes, kFew = max64(1, kLanes / 8);
  const bool one_vector = p.seqlen_q < 2 * kLanes;
  const int64_t odd = p.seqlen_q % kLanes;
  const int64_t most = Op::kPack == 2 ? (one_vector ? 0 : kFew) : one_vector ? kFew : kLanes / 2;
  const bool decodes = p.dropout_p == 0 && p.ranges.count <= 1 && !Tiles<Op>::uses(p) &&
                       reads_in_place(p.k, p.head_dim) && reads_in_place(p.v, p.head_dim_v);
  return decodes && p.seqlen_q > kLanes && odd <= most && p.seqlen_k <= kOddKeys ? odd : 0;
}

template <class Op>
inline DecodeScratch<Op> odd_scratch(void* memory, const Forward& p, int64_t queries) {
  return {memory, p, queries, kOddKeys, nullptr};
}

// The odd queries of a head, from `query` on.
template <class T, class Op>
class OddQueries {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using V = typename S::V;
  static constexpr int64_t kLanes = S::kLanes;

 public:
  OddQueries(const Forward& p, void* memory, int64_t batch, int64_t head, int64_t query)
      : p_(p),
        score_(p, true),
        batch_(batch),
        head_(head),
        query_(query),
        rows_(p.seqlen_q - query),
        scratch_(odd_scratch<Op>(memory, p, rows_)),
        visited_(VisitedKeys(p, batch, head, 1, query, rows_, p.band.visited(query, rows_, {0, p.seqlen_k})).first()),
        keys_(visited_.end - visited_.begin) {}

  // Writes their results. Returns false if these aren't to count: an infinity or NaN has come from keys that a mask or
  // a range may exclude.
  bool attend() const { return p_.pages.table == nullptr ? attend<View>() : attend<KeyRows>(); }

 private:
  template <class Keys>
  bool attend() const {
    multiply_keys<Keys>();
    C inverse[kLanes];
    for (int64_t r = 0; r < rows_; ++r) inverse[r] = make_probabilities(r);
    multiply_values<Keys>();
    NonNumbers<C> sums;
    for (int64_t r = 0; r < rows_; ++r) {
      const C* const out = scratch_.out + r * scratch_.out_step;
      T* const target = at<T>(p_.out, batch_, head_, query_ + r);
      sums.add(out, 1, p_.head_dim_v);
      for (int64_t c = 0; c < p_.head_dim_v; c += kLanes) {
        const V x = inverse[r] == C(0) ? S::zero() : S::load(out + c) * S::set1(inverse[r]);
        S::store_as(target + c, x, p_.head_dim_v - c);
      }
    }
    return !(score_.has_bias || score_.has_ranges) || !sums.found();
  }

  // Those that a row attends to, counted from the first that any row does.
  Range keys_of(int64_t r) const {
    Range own = p_.band.visited(query_ + r, 1, visited_);
    if (score_.has_ranges) own = range_of_row(p_.ranges, batch_, head_, query_ + r, 0, own);
    return {own.begin - visited_.begin, own.end - visited_.begin};
  }

  template <class Keys>
  void multiply_keys() const {
    for (int64_t r = 0; r < rows_; ++r)
      take_row(at<T>(p_.q, batch_, head_, query_ + r), p_.q.stride[3], p_.head_dim, scratch_.q_step, r, scratch_.q,
               scratch_.own_q);
    const Keys k_rows = rows_of<Keys>(p_.k, p_.pages);
    const auto k = block_rows<T>(k_rows, batch_, head_ / (p_.heads_q / p_.heads_k), visited_.begin);
    score_rows<C, kOddKeys>({queries_of<T>(scratch_), scratch_.q_step, rows_}, k, keys_, p_.head_dim, {},
                            scratch_.scores);
    for (int64_t j = 0; score_.has_bias && j < keys_; j += kTile<C>)
      bias_tile<C, T>(p_, 2, batch_, head_, query_, rows_, visited_.begin + j, min64(kTile<C>, keys_ - j),
                      scratch_.bias + in_tiles<C>(0, rows_, j));
  }

  // Products of row r to probabilities, whose sum it returns as what the values are to be multiplied by: 0 if there
  // are none. Writes the log-sum-exp.
  C make_probabilities(int64_t r) const {
    C* const row = scratch_.scores + r * kOddKeys;
    const Range own = keys_of(r);
    const V dead = S::set1(-kInfinity<C>), scale = S::set1(score_.signed_scale), log2e = S::set1(kLog2E<C>);
    const V sink = S::set1(sink_of<C>(p_, batch_, head_));
    V m = sink;
    for (int64_t j = 0; j < keys_; j += kLanes) {
      const C* const bias = scratch_.bias + in_tiles<C>(r, rows_, j);
      V x = finish_score<C>(score_, S::load(row + j), scale, bias);
      if (score_.mask_added) x = S::load(bias) == dead ? dead : x;
      if (!LaneMask<C>::all(own, j / kLanes, 1)) x = LaneMask<C>(own, j / kLanes).select(x, dead);
      S::store(row + j, x);
      m = S::max(x, m);
    }
    m = S::max_all(m);
    const V shift = m == dead ? S::zero() : m + (m - m);  // NaN where scores overflow
    V total = S::zero();
    for (int64_t begin = 0; begin < keys_; begin += kEqualSum * kLanes) {
      V part = S::zero();
      for (int64_t j = begin; j < min64(keys_, begin + kEqualSum * kLanes); j += kLanes) {
        const V probability = S::template exp2<Op::kSums>((S::load(row + j) - shift) * log2e);
        part += probability;
        S::store(row + j, probability);
      }
      total += part;
    }
    const V sum = S::exp2((sink - shift) * log2e) + S::set1(S::sum(total));
    if (p_.lse != nullptr)
      S::store_as(static_cast<C*>(p_.lse) + lse_index(p_, batch_, head_, query_ + r),
                  sum == S::zero() ? dead : m + S::log(sum), 1);
    return sum[0] == C(0) ? C(0) : C(1) / sum[0];
  }

  // Keys that all rows attend to are multiplied for all of them, the others row by row.
  template <class Keys>
  void multiply_values() const {
    Range common{0, keys_};
    for (int64_t r = 0; r < rows_; ++r) {
      const Range own = keys_of(r);
      common = {max64(common.begin, own.begin), min64(common.end, own.end)};
    }
    if (common.end <= common.begin) common = {keys_, keys_};
    for (int64_t c = 0; c < rows_ * scratch_.out_step; c += kLanes) S::store(scratch_.out + c, S::zero());
    C factor[kLanes];
    for (C& x : factor) x = C(1);
    const Keys v_rows = rows_of<Keys>(p_.v, p_.pages);
    const auto v = block_rows<T>(v_rows, batch_, head_ / (p_.heads_q / p_.heads_v), visited_.begin);
    const auto add = [&](int64_t r, int64_t rows, Range keys) {
      if (keys.end > keys.begin)
        add_values<C, kOddKeys>(scratch_.scores + r * kOddKeys + keys.begin, rows, v.from(keys.begin),
                                keys.end - keys.begin, p_.head_dim_v, {}, factor, scratch_.out + r * scratch_.out_step,
                                scratch_.out_step);
    };
    add(0, rows_, common);
    for (int64_t r = 0; r < rows_; ++r) {
      const Range own = keys_of(r);
      add(r, 1, {own.begin, min64(own.end, common.begin)});
      add(r, 1, {max64(own.begin, common.end), own.end});
    }
  }

  const Forward& p_;
  const ScoreParams<C> score_;
  const int64_t batch_, head_, query_, rows_;
  const DecodeScratch<Op> scratch_;
  const Range visited_;
  const int64_t keys_;
};

}  // namespace
}  // namespace attnkern::cpu
