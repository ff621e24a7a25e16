// Forward pass for a few queries against many keys (decoding with a KV cache): bound by reading K and V once.
//
// The query heads that share a key head are handled together ("rows"), so that grouped-query attention reads its cache
// once. The head dimension lies along the lanes, of eight rows some of it beside the rows, and rows of K and V are read
// as they lie in memory; many rows meet values by register tiles, as in the other passes. What comes next is
// prefetched. Both work on a block of keys at a time, first K, then V; the commonest shapes of few rows have a kernel
// in which they take turns more often. Where there are fewer heads than threads the keys are split, and the parts
// merged by their log-sum-exp (Dao et al., Flash-Decoding, 2023).
#pragma once

#include <new>

#include "decode_scores.h"
#include "decode_turns.h"

namespace attnkern::cpu {
namespace {

// Whether the mask leaves none of these keys for any of the rows.
template <class T>
inline bool excludes_all_of_rows(const Attention& p, int64_t batch, int64_t head_k, int64_t key, int64_t keys) {
  const int64_t group = p.heads_q / p.heads_k, different = p.bias.stride[1] == 0 ? 1 : group;
  for (int64_t g = 0; g < different; ++g)
    if (!excludes_all<T>(p, batch, head_k * group + g, 0, p.seqlen_q, key, keys)) return false;
  return true;
}

// How many rows ahead K or V are prefetched: `most`, or fewer where heads lie side by side and rows go to the
// first-level cache. It has few places for rows so far apart: one that comes later would drive out one not yet read.
template <class T>
inline int64_t rows_ahead(const View& rows, int64_t most) {
  constexpr int64_t kApart = 32 << 10;  // bytes
  if (!kZen5 || !side_by_side(rows)) return most;
  return min64(most, max64(4, kApart / (rows.stride[2] * static_cast<int64_t>(sizeof(T)))));
}

// The head after this one, whose keys begin at `begin`, too, where keys come from memory: else it isn't worth it. Not
// in pages, whose rows have no place of their own there.
template <class Keys>
inline HeadAfter head_after(const Forward& p, int64_t batch, int64_t head_k, int64_t begin) {
  if (std::is_same_v<Keys, View> && key_bytes(p) >= kTurnsFrom) {
    if (head_k + 1 < p.heads_k) return {batch, head_k + 1, begin};
    if (batch + 1 < p.batch) return {batch + 1, 0, begin};
  }
  return {};
}

// decode_values by register tiles. `end`: of the head's keys.
template <int64_t kKeysOfBlock, class T, class Op, class Keys>
[[gnu::noinline]] void value_tiles(const Forward& p, const DecodeScratch<Op>& scratch, int64_t batch, int64_t head_v,
                                   int64_t rows, int64_t key, int64_t keys, int64_t end, HeadAfter after) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using Scalar = typename Op::Scalar;
  const int64_t vectors = (p.head_dim_v + S::kLanes - 1) / S::kLanes;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t v = 0; v < vectors; ++v) {
      auto* out = scratch.out + r * scratch.out_step + v * S::kLanes;
      S::store(out, S::load(out) * S::set1(scratch.factor[r]));
    }
  const auto* probabilities = reinterpret_cast<const Scalar*>(scratch.scores);
  const Keys v_rows = rows_of<Keys>(p.v, p.pages);
  // What several runs of rows read again and again is to stay in the first-level cache.
  const int64_t portion = rows <= kTileRows ? keys : kTile<C>, ahead = rows_ahead<T>(p.v, kTile<C>);
  for (int64_t j = 0; j < keys; j += portion) {
    const int64_t now = min64(portion, keys - j);
    const int64_t over = key + j + ahead - end;
    const auto prefetch =
        over >= 0 && after.batch >= 0
            ? rows_to_prefetch<T>(v_rows, after.batch, after.head, after.key + over, now, end, p.head_dim_v)
            : rows_to_prefetch<T>(v_rows, batch, head_v, key + j + ahead, now, end, p.head_dim_v);
    if constexpr (Op::kPack == 2) {
#if defined(__AVX512BF16__)
      const int64_t wide = (p.head_dim_v + 31) / 32, pairs = (now + 1) / 2;
      if (wide == 0) return;
      auto values = block_rows<T>(v_rows, batch, head_v, key + j);
      if constexpr (!decltype(values)::kTogether) values.count = end - key - j, values.prefetches = rows <= kTileRows;
      PrefetchByRow next(prefetch, prefetch_calls_of_pass<kTileRows * 2, 2>(rows, wide, pairs));
      using Tile =
          ValuePairsTile<kKeysOfBlock, std::remove_const_t<decltype(values)>, std::remove_const_t<decltype(prefetch)>>;
      for_tiles<kTileRows * 2, 2, 1>(
          rows, wide, Tile{probabilities + j / 2, values, now, p.head_dim_v, scratch.out, scratch.out_step, &next});
#endif
    } else {
      const auto values = operand_rows<Op, T>(v_rows, batch, head_v, key + j, now, p.head_dim_v, scratch.block, true);
      gemm_prefetching<typename Op::Product>(rows, vectors, now,
                                             {probabilities + j, kKeysOfBlock, values.data, values.step},
                                             {scratch.out, scratch.out_step, Epilogue::kAdd, nullptr}, prefetch);
    }
  }
}

// The rows of key head `head_k`, converted, and no results yet.
template <class T, class Op>
void begin_part(const Forward& p, const DecodeScratch<Op>& scratch, int64_t batch, int64_t head_k) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  const int64_t group = p.heads_q / p.heads_k, rows = group * p.seqlen_q;
  for (int64_t r = 0; r < rows; ++r) {
    const T* query = at<T>(p.q, batch, head_k * group + r / p.seqlen_q, r % p.seqlen_q);
    take_row(query, p.q.stride[3], p.head_dim, scratch.q_step, r, scratch.q, scratch.own_q);
    scratch.largest[r] = -kInfinity<C>;
    S::store(scratch.sums + r * S::kLanes, S::zero());
  }
  for (int64_t i = 0; i < rows * scratch.out_step; ++i) scratch.out[i] = C(0);
  if constexpr (kAlongLanes<C, T>)
    if (can_lie_along_lanes<C, T>(p.head_dim))
      lay_along_lanes<C, T>({queries_of<T>(scratch), scratch.q_step, rows}, p.head_dim,
                            reinterpret_cast<typename RowDot<C, T>::Query*>(scratch.q_lanes));
}

// Products of a block to probabilities under the rows' new maximum, in bfloat16 if `rounded`; rescales the sums so far,
// adds to them, and leaves in scratch.factor what is to rescale the output.
template <int64_t kKeysOfBlock, class T, class Op>
void block_probabilities(const Forward& p, const DecodeScratch<Op>& scratch, int64_t batch, int64_t head_k, int64_t key,
                         int64_t keys, bool rounded) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using V = typename S::V;
  const ScoreParams<C> score(p, true);
  const int64_t group = p.heads_q / p.heads_k, rows = group * p.seqlen_q;
  if (score.has_bias) decode_bias<T>(p, batch, head_k, key, keys, scratch.bias);
  for (int64_t g = 0; g < group && score.dropout; ++g)
    for (int64_t first = 0; first < keys; first += kTile<C>)
      // (Whole vectors of it: the probabilities after the last key are to be numbers, where keys come in pairs.)
      dropout_tile<C>(p, 2, batch, head_k * group + g, 0, p.seqlen_q, key + first,
                      round_up(min64(kTile<C>, keys - first), S::kLanes),
                      scratch.keep + in_tiles<C>(g * p.seqlen_q, rows, first));
  // The keys that a row attends to, of its range number `which` where it has ranges.
  const auto visited_by = [&](int64_t r, int64_t which) {
    const Range visited = p.band.visited(r % p.seqlen_q, 1, {key, key + keys});
    if (p.ranges.data == nullptr) return visited;
    return range_of_row(p.ranges, batch, head_k * group + r / p.seqlen_q, r % p.seqlen_q, which, visited);
  };
  // Whether a row's scores need nothing but the scale, and meet all keys.
  const auto on_fast_path = [&](int64_t r) {
    const Range visited = visited_by(r, 0);
    return score.fast_path() && visited.begin == key && visited.end == key + keys && keys % S::kLanes == 0;
  };
  const V dead = S::set1(-kInfinity<C>), scale = S::set1(score.signed_scale), log2e = S::set1(kLog2E<C>);
  C shifts[kSharedMaxRows];
  for (int64_t r = 0; r < rows; ++r) {
    C* row = scratch.scores + r * kKeysOfBlock;
    V largest = dead;
    if (on_fast_path(r)) {
      for (int64_t j = 0; j < keys; j += S::kLanes) largest = S::max(S::product(S::load(row + j), scale), largest);
    } else {
      const auto live = [&](int64_t which) {
        const Range visited = visited_by(r, which);
        return Range{visited.begin - key, visited.end - key};
      };
      const Range first = live(0), second = p.ranges.count == 2 ? live(1) : Range{};
      for (int64_t j = 0; j < keys; j += S::kLanes) {
        const int64_t vector = j / S::kLanes;
        const C* bias = scratch.bias + in_tiles<C>(r, rows, j);
        V x = finish_score(score, S::load(row + j), scale, bias);
        if (score.mask_added) x = S::load(bias) == dead ? dead : x;
        if (!LaneMask<C>::all(first, vector, 1)) {
          const V others = p.ranges.count == 2 ? LaneMask<C>(second, vector).select(x, dead) : dead;
          x = LaneMask<C>(first, vector).select(x, others);
        }
        S::store(row + j, x);
        largest = S::max(x, largest);
      }
    }
    // The same value in all lanes: the row's maximum so far, and what rescales the sums made under the old one.
    const V old = S::set1(scratch.largest[r]), m = S::max(S::max_all(largest), old);
    const V shift = m == dead ? S::zero() : m + (m - m);  // NaN where scores overflow
    const V correction = S::exp2((old - shift) * log2e);
    S::store(scratch.sums + r * S::kLanes, S::load(scratch.sums + r * S::kLanes) * correction);
    shifts[r] = -shift[0];
    scratch.factor[r] = correction[0];
    scratch.largest[r] = m[0];
  }
  for (int64_t r = 0; r < rows; ++r) {
    C* row = scratch.scores + r * kKeysOfBlock;
    const V shift = S::set1(shifts[r]), factor = on_fast_path(r) ? scale : S::set1(1);
    V total = S::zero();
    for (int64_t begin = 0; begin < keys; begin += kEqualSum * S::kLanes) {
      V part = S::zero();
      for (int64_t j = begin; j < min64(keys, begin + kEqualSum * S::kLanes); j += S::kLanes) {
        // The product as the maximum has it: of a large score, the rounding alone would be a large exponent.
        V probability = S::template exp2<Op::kSums>((S::product(S::load(row + j), factor) + shift) * log2e);
        part += probability;
        if (score.dropout) probability *= S::load(scratch.keep + in_tiles<C>(r, rows, j));
        if (rounded) S::store_as(reinterpret_cast<BFloat16*>(row) + j, probability);
        else S::store(row + j, probability);
      }
      total += part;
    }
    S::store(scratch.sums + r * S::kLanes, S::load(scratch.sums + r * S::kLanes) + total);
  }
}

// The rows of key head `head_k` against keys [begin, end), of which all rows attend to `full`: continues what
// scratch.out (not normalised), largest and sums (one per lane) hold.
template <int64_t kKeysOfBlock, class T, class Op, class Keys>
void decode_keys(const Forward& p, const DecodeScratch<Op>& scratch, int64_t batch, int64_t head_k, int64_t begin,
                 int64_t end, Range full) {
  using C = typename Op::Compute;
  static_assert(kKeysOfBlock % kTile<float> == 0);
  const int64_t rows = p.heads_q / p.heads_k * p.seqlen_q;
  // (Few rows of bfloat16 wait for memory anyway, and keep their probabilities' digits.)
  const bool by_value_tiles =
      rows >= kRowsForValueTiles<T, Op> && (Op::kPack == 1 || reads_in_place(p.v, p.head_dim_v));
  // All rows meet as many keys as are prefetched meanwhile, then the next. One row alone has so little to do with wide
  // elements that the processor itself looks far enough ahead.
  const int64_t portion = keys_of_portion<T>(p.head_dim);
  const Keys k_rows = rows_of<Keys>(p.k, p.pages), v_rows = rows_of<Keys>(p.v, p.pages);
  const int64_t ahead = rows_ahead<T>(p.k, portion);
  const bool prefetches = rows > 1 || sizeof(T) == 2;
  const HeadAfter after = prefetches ? head_after<Keys>(p, batch, head_k, begin) : HeadAfter{};
  const auto stream = stream_for<T, Op, Keys>(p, rows);
  Range streamed = full;
  streamed.end -= (streamed.end - streamed.begin) % Simd<C>::kLanes;
  if (stream == nullptr || streamed.begin >= streamed.end) streamed = {end, end};
  // How many of the keys that come next a mask excludes from all rows, as it does where a cache isn't full.
  const auto left_out = [&](int64_t key, int64_t last) -> int64_t {
    const int64_t keys = min64(kDecodeKeys, last - key);
    return p.bias.data != nullptr && excludes_all_of_rows<T>(p, batch, head_k, key, keys) ? keys : 0;
  };
  for (int64_t key = begin, keys; key < end; key += keys) {
    const bool streams = key >= streamed.begin && key < streamed.end;
    const int64_t last = key < streamed.begin ? streamed.begin : streams ? streamed.end : end;
    keys = left_out(key, last);
    if (keys > 0) continue;
    if (streams) {
      keys = p.bias.data == nullptr ? last - key : min64(kDecodeKeys, last - key);
      while (key + keys < last && left_out(key + keys, last) == 0) keys += min64(kDecodeKeys, last - key - keys);
      stream(p, scratch, batch, head_k, key, keys);
      continue;
    }
    keys = min64(kKeysOfBlock, last - key);
    const int64_t own = prefetches ? max64(0, min64(keys, end - key - ahead)) : 0;
    const auto prefetch = [&](const View& view, bool in_place) -> PrefetchAhead {
      if (!in_place) return {0, ahead};
      return {own, ahead, after.beyond(view, batch, head_k, end, ahead)};
    };
    with_rows<C, T>(k_rows, batch, head_k, key, keys, p.head_dim, scratch.block, [&](const auto& k, bool in_place) {
      using Element = typename std::remove_cvref_t<decltype(k)>::Element;
      const auto* lanes = in_place && can_lie_along_lanes<C, T>(p.head_dim)
                              ? queries_of<Element>(scratch.q_lanes, scratch.q_lanes)
                              : nullptr;
      score_portions<C, kKeysOfBlock>({queries_of<Element>(scratch), scratch.q_step, rows, lanes}, k, keys, p.head_dim,
                                      prefetch(p.k, in_place), portion, scratch.scores);
    });
    block_probabilities<kKeysOfBlock, T>(p, scratch, batch, head_k, key, keys, by_value_tiles && Op::kPack == 2);
    if (by_value_tiles) value_tiles<kKeysOfBlock, T, Op, Keys>(p, scratch, batch, head_k, rows, key, keys, end, after);
    else
      with_rows<C, T>(v_rows, batch, head_k, key, keys, p.head_dim_v, scratch.block, [&](const auto& v, bool in_place) {
        add_values<C, kKeysOfBlock>(scratch.scores, rows, v, keys, p.head_dim_v, prefetch(p.v, in_place),
                                    scratch.factor, scratch.out, scratch.out_step);
      });
  }
}

// decode_part without what lies in keys that none of the rows attends to, where 0 times infinity or NaN is NaN: each
// run of other keys by itself.
template <int64_t kKeysOfBlock, class T, class Op, class Keys>
[[gnu::noinline]] void decode_attended(const Forward& p, const DecodeScratch<Op>& scratch, int64_t batch,
                                       int64_t head_k, int64_t begin, int64_t end) {
  const int64_t group = p.heads_q / p.heads_k;
  begin_part<T>(p, scratch, batch, head_k);
  int64_t run = begin;
  const auto finish_run = [&](int64_t last) {
    if (last > run) decode_keys<kKeysOfBlock, T, Op, Keys>(p, scratch, batch, head_k, run, last, {last, last});
  };
  for (int64_t key = begin; key < end; key += 64) {
    const int64_t keys = min64(64, end - key);
    const LaneBits attended = attended_keys(p, batch, head_k * group, group, key, keys);
    for (int64_t i = 0; i < keys; ++i) {
      if ((attended >> i & 1) != 0) continue;
      finish_run(key + i);
      run = key + i + 1;
    }
  }
  finish_run(end);
}

// decode_keys for `heads` key heads from head_k on.
template <int64_t kKeysOfBlock, class T, class Op, class Keys>
void decode_keys_of_heads(const Forward& p, const DecodeScratch<Op>* scratch, int64_t batch, int64_t head_k,
                          int64_t heads, int64_t begin, int64_t end, Range full) {
  if (heads == 1) return decode_keys<kKeysOfBlock, T, Op, Keys>(p, *scratch, batch, head_k, begin, end, full);
  const int64_t turns = max64(0, full.end - full.begin) / Simd<typename Op::Compute>::kLanes;
  const int64_t streamed = turns * Simd<typename Op::Compute>::kLanes, first = turns == 0 ? end : full.begin;
  const auto in_blocks = [&](int64_t from, int64_t to) {
    for (int64_t h = 0; from < to && h < heads; ++h)
      decode_keys<kKeysOfBlock, T, Op, Keys>(p, scratch[h], batch, head_k + h, from, to, {to, to});
  };
  in_blocks(begin, first);
  if (turns == 0) return;
  heads_for<T, Op>(p, p.heads_q / p.heads_k * p.seqlen_q)(p, scratch, batch, head_k, heads, first, streamed);
  in_blocks(first + streamed, end);
}

// The rows of `heads` key heads from head_k on against their keys in [begin, end): fills each head's scratch.out,
// largest and sums.
template <int64_t kKeysOfBlock, class T, class Op, class Keys>
void decode_part(const Forward& p, const DecodeScratch<Op>* scratch, int64_t batch, int64_t head_k, int64_t heads,
                 int64_t begin, int64_t end) {
  const int64_t group = p.heads_q / p.heads_k, rows = group * p.seqlen_q;
  for (int64_t h = 0; h < heads; ++h) begin_part<T>(p, scratch[h], batch, head_k + h);
  const VisitedKeys visited(p, batch, head_k * group, group, 0, p.seqlen_q, {begin, end});
  for (const Range keys : {visited.first(), visited.second()}) {
    if (keys.end <= keys.begin) continue;
    Range full{keys.end, keys.end};
    for (int64_t which = 0; which < 2; ++which) {
      const Range common = visited.common(which);
      const Range all = p.band.full(0, p.seqlen_q, {max64(keys.begin, common.begin), min64(keys.end, common.end)});
      if (all.end - all.begin > full.end - full.begin) full = all;
    }
    decode_keys_of_heads<kKeysOfBlock, T, Op, Keys>(p, scratch, batch, head_k, heads, keys.begin, keys.end, full);
  }
  if (p.ranges.data == nullptr && !(p.bias.data != nullptr && p.bias_dtype == DType::kBool)) return;
  for (int64_t h = 0; h < heads; ++h) {
    NonNumbers<typename Op::Compute> sums;
    for (int64_t r = 0; r < rows; ++r) sums.add(scratch[h].out + r * scratch[h].out_step, 1, p.head_dim_v);
    if (sums.found()) decode_attended<kKeysOfBlock, T, Op, Keys>(p, scratch[h], batch, head_k + h, begin, end);
  }
}

// Merges the parts of one row with its sink and writes output and log-sum-exp. A part is [out..., largest, sum], `step`
// apart.
template <class T, class C>
inline void decode_finish(const Forward& p, int64_t batch, int64_t head, int64_t row, const C* part, int64_t parts,
                          int64_t step, C* merged) {
  using S = Simd<C>;
  const int64_t width = round_up(p.head_dim_v, S::kLanes);
  const auto largest_of = [&](int64_t i) { return part[i * step + step - 2]; };
  const auto sum_of = [&](int64_t i) { return part[i * step + step - 1]; };
  const C sink = sink_of<C>(p, batch, head);
  C m = sink;
  for (int64_t i = 0; i < parts; ++i) m = largest_of(i) > m ? largest_of(i) : m;
  const C shift = m == -kInfinity<C> ? C(0) : m;
  C sum = std::exp(sink - shift);
  for (int64_t d = 0; d < width; d += S::kLanes) S::store(merged + d, S::zero());
  for (int64_t i = 0; i < parts; ++i) {
    const C weight = std::exp(largest_of(i) - shift);
    sum += sum_of(i) * weight;
    for (int64_t d = 0; d < width; d += S::kLanes)
      S::store(merged + d, S::fma(S::load(part + i * step + d), S::set1(weight), S::load(merged + d)));
  }
  T* out = at<T>(p.out, batch, head, row);
  for (int64_t d = 0; d < p.head_dim_v; d += S::kLanes) {
    const auto value = sum == C(0) ? S::zero() : S::load(merged + d) / S::set1(sum);
    S::store_as(out + d, value, p.head_dim_v - d);
  }
  if (p.lse != nullptr)
    static_cast<C*>(p.lse)[lse_index(p, batch, head, row)] =
        sum == C(0) ? -kInfinity<C> : static_cast<C>(static_cast<double>(m) + std::log(static_cast<double>(sum)));
}

// Decoding in two phases: parts of the keys of each key head, and their merge. A single part is merged at once.
template <class T, class Op>
class DecodeCall {
  using C = typename Op::Compute;

 public:
  // Cut for so many threads.
  DecodeCall(const Forward& p, int64_t threads)
      : p_(p),
        group_(p.heads_q / p.heads_k),
        rows_(group_ * p.seqlen_q),
        heads_(p.batch * p.heads_k),
        // Keys that any row reaches, in parts of whole blocks: enough parts for every thread to get several.
        visited_(p.band.visited(0, p.seqlen_q, {0, p.seqlen_k})),
        blocks_(max64(1, (visited_.end - visited_.begin + kDecodeKeys - 1) / kDecodeKeys)),
        parts_(threads == 1 || heads_ == 0 ? 1 : max64(1, min64((4 * threads + heads_ - 1) / heads_, blocks_))),
        part_keys_((blocks_ + parts_ - 1) / parts_ * kDecodeKeys),
        // Copied rows are to stay in the cache, so a block then has fewer keys.
        many_(rows_ <= kFewRows && reads_in_place(p.k, p.head_dim) && reads_in_place(p.v, p.head_dim_v)),
        heads_of_set_(heads_of_set(threads)),
        sets_((p.heads_k + heads_of_set_ - 1) / heads_of_set_),
        sizes_(scratch(nullptr)),
        others_(scratch(nullptr, &sizes_)),
        step_(sizes_.out_step + 2),
        merged_(parts_ == 1 ? 0 : heads_ * rows_ * parts_ * step_) {}

  int64_t phases() const { return 2; }
  int64_t tasks(int64_t phase) const {
    if (rows_ == 0) return 0;
    return phase == 0 ? p_.batch * sets_ * parts_ : parts_ == 1 ? 0 : heads_ * rows_;
  }
  int64_t scratch_bytes(int64_t phase) const {
    const int64_t merged = sizes_.out_step * static_cast<int64_t>(sizeof(C));
    return phase == 0 ? heads_bytes() + (parts_ == 1 ? part_bytes() + merged : 0) : merged;
  }
  int64_t queues(int64_t) const { return 0; }
  int64_t queue_end(int64_t, int64_t) const { return 0; }
  // Whether the merge is worth threads.
  bool merges_in_parallel() const { return heads_ * rows_ * parts_ > 64; }
  void run(int64_t phase, int64_t task, void* memory, int64_t) const {
    if (phase == 0) return run_part(task, memory);
    finish(task / rows_, task % rows_, merged_.data() + task * parts_ * step_, static_cast<C*>(memory));
  }
  void forget(int64_t) const {}
  void end() const {}

 private:
  DecodeScratch<Op> scratch(void* memory, const DecodeScratch<Op>* first = nullptr) const {
    return {memory, p_, rows_, many_ ? kManyKeys : kDecodeKeys, first};
  }
  int64_t heads_bytes() const { return sizes_.bytes + (heads_of_set_ - 1) * others_.bytes; }
  int64_t part_bytes() const { return round_up(step_, Simd<C>::kLanes) * static_cast<int64_t>(sizeof(C)); }
  // Merges the parts of a row of a key head, which are counted over the batch.
  void finish(int64_t head, int64_t r, const C* parts, C* merged) const {
    decode_finish<T>(p_, head / p_.heads_k, head % p_.heads_k * group_ + r / p_.seqlen_q, r % p_.seqlen_q, parts,
                     parts_, step_, merged);
  }
  // How many key heads a task reads together: there are to be two tasks for each thread, if heads suffice for that.
  int64_t heads_of_set(int64_t threads) const {
    if (heads_ == 0 || heads_for<T, Op>(p_, rows_) == nullptr) return 1;
    const int64_t tasks = p_.batch * parts_, sets = threads == 1 ? 1 : (2 * threads + tasks - 1) / tasks;
    return max64(1, min64(kHeadsTogether, p_.heads_k / sets));
  }
  void run_part(int64_t task, void* memory) const {
    const int64_t part = task % parts_, set = task / parts_ % sets_, batch = task / parts_ / sets_;
    const int64_t head_k = set * heads_of_set_, heads = min64(heads_of_set_, p_.heads_k - head_k);
    const int64_t begin = min64(visited_.end, visited_.begin + part * part_keys_);
    DecodeScratch<Op> own[kHeadsTogether];
    char* next = static_cast<char*>(memory);
    for (int64_t h = 0; h < heads; next += own[h++].bytes)
      new (own + h) DecodeScratch<Op>(scratch(next, h == 0 ? nullptr : own));
    const auto run = p_.pages.table == nullptr
                         ? (many_ ? decode_part<kManyKeys, T, Op, View> : decode_part<kDecodeKeys, T, Op, View>)
                         : (many_ ? decode_part<kManyKeys, T, Op, KeyRows> : decode_part<kDecodeKeys, T, Op, KeyRows>);
    run(p_, own, batch, head_k, heads, begin, min64(visited_.end, begin + part_keys_));
    char* const single = static_cast<char*>(memory) + heads_bytes();
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t r = 0; r < rows_; ++r) {
        const int64_t head = batch * p_.heads_k + head_k + h;
        C* target =
            parts_ == 1 ? reinterpret_cast<C*>(single) : merged_.data() + ((head * rows_ + r) * parts_ + part) * step_;
        std::memcpy(target, own[h].out + r * own[h].out_step, static_cast<size_t>(own[h].out_step) * sizeof(C));
        target[step_ - 2] = own[h].largest[r];
        target[step_ - 1] = Simd<C>::sum(Simd<C>::load(own[h].sums + r * Simd<C>::kLanes));
        if (parts_ == 1) finish(head, r, target, reinterpret_cast<C*>(single + part_bytes()));
      }
  }

  const Forward& p_;
  const int64_t group_, rows_, heads_;
  const Range visited_;
  const int64_t blocks_, parts_, part_keys_;
  const bool many_;
  const int64_t heads_of_set_, sets_;
  const DecodeScratch<Op> sizes_, others_;  // of a task's first key head, and of each other
  const int64_t step_;
  const Buffer<C> merged_;
};

template <class T, class Op>
void decode(const Forward& p, const Runtime& runtime) {
  const DecodeCall<T, Op> call(p, runtime.num_threads);
  run_phase(p, runtime, call, 0);
  run_phase(p, {call.merges_in_parallel() ? runtime.num_threads : 1, runtime.parallel}, call, 1);
}

}  // namespace
}  // namespace attnkern::cpu
