// Forward pass for a few queries against many keys (decoding with a KV cache): bound by reading K and V once.
//
// The query heads that share a key head are handled together ("rows"), so that grouped-query attention reads its cache
// once. The head dimension lies along the lanes, rows of K and V are read as they lie in memory, a block of keys at a
// time, the next one prefetched. Where there are fewer heads than threads the keys are split, and the parts merged by
// their log-sum-exp (Dao et al., Flash-Decoding, 2023).
#pragma once

#include "forward.h"

namespace attnkern::cpu {
namespace {

inline constexpr int64_t kDecodeRows = 16;  // most query rows of one key head that this path takes
// Keys of a block. The more, the fewer interruptions of the stream from memory, but the scores are to stay in the
// first-level cache: the greater number is for few rows.
inline constexpr int64_t kDecodeKeys = 256, kManyKeys = 1024, kFewRows = 4;

// Each of the first `keys` rows of a block fetches the one that is read `ahead` keys later. Spread over the work: a
// burst of them would leave the memory idle afterwards.
struct Fetch {
  int64_t keys, ahead;
};

template <class T>
inline void prefetch_row(const T* row, int64_t columns) {
  for (int64_t byte = 0; byte < columns * static_cast<int64_t>(sizeof(T)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(row) + byte);
}

// How a vector of a row of T meets one of a query: converted, or as pairs that are multiplied as they are.
template <class C, class T>
struct RowDot {
  using Query = C;
  using V = typename Simd<C>::V;
  static constexpr int kWidth = Simd<C>::kLanes;  // elements
  static V load_query(const Query* p) { return Simd<C>::load(p); }
  static V load(const T* p) { return Simd<C>::load_as(p); }
  static V load(const T* p, int64_t n) { return Simd<C>::load_as(p, n); }
  static V accumulate(V sum, V a, V b) { return Simd<C>::fma(a, b, sum); }
};
#if defined(__AVX512BF16__)
template <>
struct RowDot<float, BFloat16> {
  using Query = BFloat16;
  using V = Simd<float>::V;
  static constexpr int kWidth = 32;
  static __m512i load_query(const Query* p) { return _mm512_loadu_si512(p); }
  static __m512i load(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static __m512i load(const BFloat16* p, int64_t n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
  }
  static V accumulate(V sum, __m512i a, __m512i b) { return PairDot::accumulate(sum, a, b); }
};
#endif

// scores[row][key] = q[row] . K[key] for kRows rows and `keys` keys of a block, kLanes / kRows keys at a time. Here as
// below, a row of scores has room for a block's keys.
template <class C, class T, int kRows, int64_t kKeysOfBlock>
[[gnu::noinline]] void decode_scores(const typename RowDot<C, T>::Query* q, int64_t q_step, const T* k,
                                     int64_t k_stride, int64_t keys, int64_t columns, Fetch fetch, C* scores) {
  using S = Simd<C>;
  using V = typename S::V;
  using Dot = RowDot<C, T>;
  constexpr int kKeys = S::kLanes / kRows, kWidth = Dot::kWidth;
  const int64_t whole = columns / kWidth * kWidth;
  for (int64_t j = 0; j < keys; j += kKeys) {
    V sum[S::kLanes];
#pragma GCC unroll 16
    for (int t = 0; t < S::kLanes; ++t) sum[t] = S::zero();
    const bool prefetch = j < fetch.keys;
    const int64_t ahead = fetch.ahead * k_stride;
    const T* row[kKeys];
    for (int key = 0; key < kKeys; ++key) row[key] = k + min64(j + key, keys - 1) * k_stride;
    const auto step = [&](int64_t c, int64_t width) {
      decltype(Dot::load_query(q)) query[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) query[r] = Dot::load_query(q + r * q_step + c);
#pragma GCC unroll 16
      for (int key = 0; key < kKeys; ++key) {
        const auto value = width == kWidth ? Dot::load(row[key] + c) : Dot::load(row[key] + c, width);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r * kKeys + key] = Dot::accumulate(sum[r * kKeys + key], value, query[r]);
        if (prefetch && c * sizeof(T) % 64 == 0) __builtin_prefetch(row[key] + c + ahead);
      }
    };
    for (int64_t c = 0; c < whole; c += kWidth) step(c, kWidth);
    if (whole < columns) step(whole, columns - whole);
    C sums[S::kLanes];
    S::store(sums, S::sum_each(sum));
    for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * kKeysOfBlock + j, sums + r * kKeys, kKeys * sizeof(C));
  }
}

// out[row] = out[row] * factor[row] + sum_key p[row][key] V[key], kVectors vectors of the head dimension at a time.
template <class C, class T, int kRows, int kVectors, int64_t kKeysOfBlock>
[[gnu::noinline]] void decode_values(const C* p, const T* v, int64_t v_stride, int64_t keys, int64_t columns,
                                     Fetch fetch, const C* factor, C* out, int64_t out_step) {
  using S = Simd<C>;
  using V = typename S::V;
  V sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c) sum[r][c] = S::zero();
  const auto accumulate = [&](auto load) {
    for (int64_t j = 0; j < keys; ++j, v += v_stride) {
      if (j < fetch.keys) prefetch_row(v + fetch.ahead * v_stride, min64(columns, kVectors * S::kLanes));
      V value[kVectors];
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) value[c] = load(c);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const V weight = S::set1(p[r * kKeysOfBlock + j]);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) sum[r][c] = S::fma(weight, value[c], sum[r][c]);
      }
    }
  };
  if (columns >= kVectors * S::kLanes) accumulate([&](int c) { return S::load_as(v + c * S::kLanes); });
  else accumulate([&](int c) { return S::load_as(v + c * S::kLanes, max64(0, columns - c * S::kLanes)); });
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c) {
      C* total = out + r * out_step + c * S::kLanes;
      S::store(total, S::fma(S::load(total), S::set1(factor[r]), sum[r][c]));
    }
}

#if defined(__AVX512BF16__)
// The same for weights that were rounded to bfloat16: two keys at a time, 64 columns.
template <int kRows, int64_t kKeysOfBlock>
[[gnu::noinline]] void decode_value_pairs(const BFloat16* p, const BFloat16* v, int64_t v_stride, int64_t keys,
                                          int64_t columns, Fetch fetch, const float* factor, float* out,
                                          int64_t out_step) {
  using S = Simd<float>;
  const auto mask = [&](int64_t first) {
    return static_cast<__mmask32>((uint64_t{1} << max64(0, min64(32, columns - first))) - 1);
  };
  const __mmask32 masks[2] = {mask(0), mask(32)};
  S::V sum[kRows][4] = {};
  for (int64_t j = 0; j < keys; j += 2, v += 2 * v_stride) {
    for (int64_t ahead = j; ahead < min64(j + 2, fetch.keys); ++ahead)
      prefetch_row(v + (fetch.ahead + ahead - j) * v_stride, min64(columns, 64));
    __m512i value[4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const BFloat16* source = v + half * 32;
      const __m512i low = _mm512_maskz_loadu_epi16(masks[half], source);
      const __m512i high = _mm512_maskz_loadu_epi16(j + 1 < keys ? masks[half] : 0, source + v_stride);
      value[2 * half] = _mm512_unpacklo_epi16(low, high);  // within 128-bit quarters: put in order at the end
      value[2 * half + 1] = _mm512_unpackhi_epi16(low, high);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512i weights = PairDot::broadcast(reinterpret_cast<const uint32_t*>(p + 2 * r * kKeysOfBlock + j));
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) sum[r][c] = PairDot::accumulate(sum[r][c], weights, value[c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const S::V a = sum[r][2 * half], b = sum[r][2 * half + 1];
      const S::V halves[2] = {
          __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
          __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
      for (int i = 0; i < 2; ++i) {
        float* total = out + r * out_step + (2 * half + i) * S::kLanes;
        S::store(total, S::fma(S::load(total), S::set1(factor[r]), halves[i]));
      }
    }
}
#endif

template <class C>
struct DecodeScratch {
  DecodeScratch(void* memory, const Forward& p, int64_t rows, int64_t keys) {
    Arena arena(memory);
    constexpr int64_t kSlack = 4 * Simd<C>::kLanes;      // decode_values works on up to four vectors
    q_step = round_up(p.head_dim, 2 * Simd<C>::kLanes);  // room for either kind of RowDot
    out_step = round_up(p.head_dim_v, kSlack);
    q = arena.take<C>(rows * q_step);
    q_as_given = arena.take<C>(rows * q_step);
    out = arena.take<C>(rows * out_step);
    block = arena.take<C>(keys > kDecodeKeys ? 0 : keys * round_up(max64(p.head_dim, p.head_dim_v), kSlack));
    scores = arena.take<C>(rows * keys);
    bias = arena.take<C>(p.bias.data == nullptr ? 0 : rows * keys);
    keep = arena.take<C>(p.dropout_p > 0 ? rows * keys : 0);
    largest = arena.take<C>(kDecodeRows);
    sums = arena.take<C>(kDecodeRows * Simd<C>::kLanes);
    factor = arena.take<C>(kDecodeRows);
    bytes = arena.used();
  }
  C *q, *q_as_given, *out, *block, *scores, *bias, *keep, *largest, *sums, *factor;
  int64_t q_step, out_step, bytes;
};

// How many keys all rows meet at a time. As measured: what several runs of rows read again and again is to be a part of
// the first-level cache, the smaller in float32, which reads twice as much for a product.
template <class T>
inline int64_t keys_of_portion(int64_t columns) {
  const int64_t row_bytes = round_up(max64(1, columns), 16) * static_cast<int64_t>(sizeof(T));
  return sizeof(T) == 2 ? 64 : max64(16, min64(64, 8192 / row_bytes / 16 * 16));
}

// Splits n rows into runs of 4, 2 and 1.
template <class Body>
inline void for_row_runs(int64_t n, const Body& body) {
  int64_t r = 0;
  for (; r + 4 <= n; r += 4) body.template operator()<4>(r);
  for (; r + 2 <= n; r += 2) body.template operator()<2>(r);
  for (; r < n; ++r) body.template operator()<1>(r);
}

// Whether rows are read as they lie in memory.
inline bool reads_in_place(const View& view, int64_t columns) { return view.stride[3] == 1 || columns <= 1; }

// A block of K or V: the user's rows, or a converted copy.
template <class C, class T, class Body>
inline void with_rows(const View& view, int64_t batch, int64_t head, int64_t key, int64_t keys, int64_t columns,
                      C* copy, const Body& body) {
  const T* source = at<T>(view, batch, head, key);
  if (reads_in_place(view, columns)) return body(source, view.stride[2], true);
  const int64_t step = round_up(columns, Simd<C>::kLanes);
  convert_rows<C>(source, view.stride[2], view.stride[3], keys, columns, copy, step);
  body(static_cast<const C*>(copy), step, false);
}

// The rows of key head `head_k` against keys [begin, end): fills scratch.out (not normalised), largest and sums (one
// per lane).
template <int64_t kKeysOfBlock, class T, class C>
void decode_part(const Forward& p, const DecodeScratch<C>& scratch, int64_t batch, int64_t head_k, int64_t begin,
                 int64_t end) {
  using S = Simd<C>;
  using V = typename S::V;
  static_assert(kKeysOfBlock % kTile<float> == 0);
  const Score<C> score(p);
  const int64_t group = p.heads_q / p.heads_k, rows = group * p.seqlen_q;
  for (int64_t r = 0; r < rows; ++r) {
    const T* query = at<T>(p.q, batch, head_k * group + r / p.seqlen_q, r % p.seqlen_q);
    convert_rows<C>(query, 0, p.head_dim <= 1 ? 1 : p.q.stride[3], 1, p.head_dim, scratch.q + r * scratch.q_step, 0);
    if constexpr (!std::is_same_v<typename RowDot<C, T>::Query, C>) {
      T* given = reinterpret_cast<T*>(scratch.q_as_given) + r * scratch.q_step;
      for (int64_t c = 0; c < scratch.q_step; ++c) given[c] = c < p.head_dim ? query[c * p.q.stride[3]] : T{};
    }
    scratch.largest[r] = -kInfinity<C>;
    S::store(scratch.sums + r * S::kLanes, S::zero());
  }
  for (int64_t i = 0; i < rows * scratch.out_step; ++i) scratch.out[i] = C(0);

#if defined(__AVX512BF16__)
  // Few rows wait for memory anyway, and keep their weights' digits.
  const bool pairs = std::is_same_v<T, BFloat16> && rows >= 4 && reads_in_place(p.v, p.head_dim_v);
#else
  constexpr bool pairs = false;
#endif
  // All rows meet as many keys as are fetched meanwhile, then the next. One row alone has so little to do with wide
  // elements that the processor itself looks far enough ahead.
  const int64_t portion = keys_of_portion<T>(p.head_dim);
  const bool fetches = rows > 1 || sizeof(T) == 2;
  const V dead = S::set1(-kInfinity<C>), scale = S::set1(score.signed_scale);
  for (int64_t key = begin; key < end; key += kKeysOfBlock) {
    const int64_t keys = min64(kKeysOfBlock, end - key);
    const Fetch fetch{fetches ? max64(0, min64(keys, end - key - portion)) : 0, portion}, none{0, 0};
    with_rows<C, T>(
        p.k, batch, head_k, key, keys, p.head_dim, scratch.block, [&](auto* k, int64_t stride, bool in_place) {
          using Key = std::remove_cvref_t<decltype(*k)>;
          using Query = typename RowDot<C, Key>::Query;
          const auto* q = reinterpret_cast<const Query*>(std::is_same_v<Query, C> ? scratch.q : scratch.q_as_given);
          for (int64_t j = 0; j < keys; j += portion) {
            const int64_t now = min64(portion, keys - j);
            const Fetch some{max64(0, min64(now, fetch.keys - j)), portion};
            for_row_runs(rows, [&]<int kRuns>(int64_t r) {
              constexpr int kRows = kRuns < S::kLanes ? kRuns : S::kLanes;
              for (int64_t first = r; first < r + kRuns; first += kRows)
                decode_scores<C, Key, kRows, kKeysOfBlock>(
                    q + first * scratch.q_step, scratch.q_step, k + j * stride, stride, now, p.head_dim,
                    first == 0 && in_place ? some : none, scratch.scores + first * kKeysOfBlock + j);
            });
          }
        });

    for (int64_t g = 0; g < group; ++g)
      for (int64_t first = 0; first < keys; first += kTile<C>) {  // tiles of kTile lanes, as bias and dropout come
        const int64_t head = head_k * group + g, lanes = min64(kTile<C>, keys - first);
        C* bias = score.has_bias ? scratch.bias + first * rows + g * p.seqlen_q * kTile<C> : nullptr;
        C* keep = score.dropout ? scratch.keep + first * rows + g * p.seqlen_q * kTile<C> : nullptr;
        if (score.has_bias) bias_tile<C, T>(p, 2, batch, head, 0, p.seqlen_q, key + first, lanes, bias);
        if (score.dropout) dropout_tile<C>(p, 2, batch, head, 0, p.seqlen_q, key + first, lanes, keep);
      }

    for (int64_t r = 0; r < rows; ++r) {
      C* row = scratch.scores + r * kKeysOfBlock;
      const Range reached = p.band.reached(r % p.seqlen_q, 1, {key, key + keys});
      const Range live{reached.begin - key, reached.end - key};
      const auto tile_at = [&](int64_t j) { return j / kTile<C> * kTile<C> * rows + r * kTile<C> + j % kTile<C>; };
      V largest = dead;
      for (int64_t j = 0; j < keys; j += S::kLanes) {
        V x = finish_score(score, S::load(row + j), scale, scratch.bias + tile_at(j));
        if (!LaneMask<C>::all(live, j / S::kLanes, 1)) x = LaneMask<C>(live, j / S::kLanes).select(x, dead);
        S::store(row + j, x);
        largest = S::max(x, largest);
      }
      // The same value in all lanes: the row's maximum so far, and what rescales the sums made under the old one.
      const V old = S::set1(scratch.largest[r]), m = S::max(S::max_all(largest), old);
      const V shift = m == dead ? S::zero() : m, log2e = S::set1(kLog2E<C>);
      const V correction = S::exp2((old - shift) * log2e);
      V total = S::load(scratch.sums + r * S::kLanes) * correction;
      for (int64_t j = 0; j < keys; j += S::kLanes) {
        V probability = S::exp2((S::load(row + j) - shift) * log2e);
        total += probability;
        if (score.dropout) probability *= S::load(scratch.keep + tile_at(j));
        if (pairs) S::store_as(reinterpret_cast<BFloat16*>(row) + j, probability);
        else S::store(row + j, probability);
      }
      scratch.factor[r] = correction[0];
      scratch.largest[r] = m[0];
      S::store(scratch.sums + r * S::kLanes, total);
    }

#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>) {
      const T* v = at<T>(p.v, batch, head_k, key);
      for (int64_t c = 0; pairs && c < p.head_dim_v; c += 64)
        for_row_runs(rows, [&]<int kRows>(int64_t r) {
          decode_value_pairs<kRows, kKeysOfBlock>(reinterpret_cast<const BFloat16*>(scratch.scores + r * kKeysOfBlock),
                                                  v + c, p.v.stride[2], keys, p.head_dim_v - c, r == 0 ? fetch : none,
                                                  scratch.factor + r, scratch.out + r * scratch.out_step + c,
                                                  scratch.out_step);
        });
      if (pairs) continue;
    }
#endif
    with_rows<C, T>(
        p.v, batch, head_k, key, keys, p.head_dim_v, scratch.block, [&](auto* v, int64_t stride, bool in_place) {
          using Value = std::remove_cvref_t<decltype(*v)>;
          for (int64_t c = 0; c < p.head_dim_v; c += 4 * S::kLanes)
            for_row_runs(rows, [&]<int kRows>(int64_t r) {
              decode_values<C, Value, kRows, 4, kKeysOfBlock>(scratch.scores + r * kKeysOfBlock, v + c, stride, keys,
                                                              p.head_dim_v - c, r == 0 && in_place ? fetch : none,
                                                              scratch.factor + r,
                                                              scratch.out + r * scratch.out_step + c, scratch.out_step);
            });
        });
  }
}

// Merges the parts of one row and writes output and log-sum-exp. A part is [out..., largest, sum], `step` apart.
template <class T, class C>
inline void decode_finish(const Forward& p, int64_t batch, int64_t head, int64_t row, const C* part, int64_t parts,
                          int64_t step, C* merged) {
  using S = Simd<C>;
  const int64_t width = round_up(p.head_dim_v, S::kLanes);
  const auto largest_of = [&](int64_t i) { return part[i * step + step - 2]; };
  const auto sum_of = [&](int64_t i) { return part[i * step + step - 1]; };
  C m = -kInfinity<C>;
  for (int64_t i = 0; i < parts; ++i) m = largest_of(i) > m ? largest_of(i) : m;
  const C shift = m == -kInfinity<C> ? C(0) : m;
  C sum = C(0);
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
    static_cast<C*>(p.lse)[(batch * p.heads_q + head) * p.seqlen_q + row] =
        sum == C(0) ? -kInfinity<C> : static_cast<C>(static_cast<double>(m) + std::log(static_cast<double>(sum)));
}

inline bool decodes(const Forward& p) {
  return p.heads_k == p.heads_v && p.heads_k > 0 && p.heads_q / p.heads_k * p.seqlen_q <= kDecodeRows;
}

template <class T, class C>
void decode(const Forward& p, const Runtime& runtime) {
  const int64_t group = p.heads_q / p.heads_k, rows = group * p.seqlen_q, heads = p.batch * p.heads_k;
  if (rows == 0 || heads == 0) return;
  // Keys that any row reaches, in parts of whole blocks: enough parts for every thread to get several.
  const Range reached = p.band.reached(0, p.seqlen_q, {0, p.seqlen_k});
  const int64_t blocks = max64(1, (reached.end - reached.begin + kDecodeKeys - 1) / kDecodeKeys);
  int64_t parts = runtime.num_threads == 1 ? 1 : (4 * runtime.num_threads + heads - 1) / heads;
  parts = max64(1, min64(parts, blocks));
  const int64_t part_keys = (blocks + parts - 1) / parts * kDecodeKeys;
  // What is copied is to stay in the cache, too.
  const bool in_place = reads_in_place(p.k, p.head_dim) && reads_in_place(p.v, p.head_dim_v);
  const bool many = rows <= kFewRows && in_place;
  const int64_t keys = many ? kManyKeys : kDecodeKeys;
  const DecodeScratch<C> sizes(nullptr, p, rows, keys);
  const int64_t step = sizes.out_step + 2;
  const Buffer<C> merged(heads * rows * parts * step);
  run_tasks(p, runtime, heads * parts, sizes.bytes, [&](int64_t task, void* memory, int64_t) {
    const DecodeScratch<C> scratch(memory, p, rows, keys);
    const int64_t part = task % parts, head = task / parts;
    const int64_t begin = min64(reached.end, reached.begin + part * part_keys);
    const auto run = many ? decode_part<kManyKeys, T, C> : decode_part<kDecodeKeys, T, C>;
    run(p, scratch, head / p.heads_k, head % p.heads_k, begin, min64(reached.end, begin + part_keys));
    for (int64_t r = 0; r < rows; ++r) {
      C* target = merged.data() + ((head * rows + r) * parts + part) * step;
      std::memcpy(target, scratch.out + r * scratch.out_step, static_cast<size_t>(scratch.out_step) * sizeof(C));
      target[step - 2] = scratch.largest[r];
      target[step - 1] = Simd<C>::sum(Simd<C>::load(scratch.sums + r * Simd<C>::kLanes));
    }
  });
  const int64_t finish_bytes = sizes.out_step * static_cast<int64_t>(sizeof(C));
  const Runtime alone{heads * rows * parts > 64 ? runtime.num_threads : 1, runtime.parallel};
  run_tasks(p, alone, heads * rows, finish_bytes, [&](int64_t task, void* memory, int64_t) {
    const int64_t head = task / rows, r = task % rows;
    decode_finish<T>(p, head / p.heads_k, head % p.heads_k * group + r / p.seqlen_q, r % p.seqlen_q,
                     merged.data() + task * parts * step, parts, step, static_cast<C*>(memory));
  });
}

}  // namespace
}  // namespace attnkern::cpu
