// Which entries of a block dropout keeps: Philox by position, a vector of counters at a time.
#pragma once

#include "../common/philox.h"
#include "bias.h"

namespace attnkern::cpu {
namespace {

// A vector of Philox's words, those of a counter in each lane.
typedef uint32_t PhiloxWords __attribute__((vector_size(kVectorBytes)));
inline constexpr int kPhiloxLanes = kVectorBytes / 4;

inline PhiloxWords lane_numbers() {
  PhiloxWords numbers{};
  for (int lane = 0; lane < kPhiloxLanes; ++lane) numbers[lane] = static_cast<uint32_t>(lane);
  return numbers;
}

// Philox of one seed, head and entry of the batch for a vector of counters at once.
class PhiloxLanes {
 public:
  PhiloxLanes(uint64_t seed, uint64_t batch_head) : low_(batch_head & 0xffffffffu), high_(batch_head >> 32) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (auto& keys : keys_) {
      keys[0] = key[0], keys[1] = key[1];
      key[0] += philox::kWeyl0, key[1] += philox::kWeyl1;
    }
  }

  void words(PhiloxWords call, PhiloxWords query, PhiloxWords (&words)[4]) const {
    // Even lanes and odd ones as numbers of 64 bits, of which the upper half is ignored: a product's lower half then is
    // where it is needed.
    Wide x[4][2] = {{(Wide)call, (Wide)call >> 32}, {(Wide)query, (Wide)query >> 32}};
    for (int odd = 0; odd < 2; ++odd) x[2][odd] = Wide{} + low_, x[3][odd] = Wide{} + high_;
#pragma GCC unroll 10
    for (const auto& keys : keys_)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const Wide a = product(x[0][odd], philox::kMultiplier0), b = product(x[2][odd], philox::kMultiplier1);
        x[0][odd] = exclusive_or(b >> 32, x[1][odd], Wide{} + keys[0]);
        x[1][odd] = b;
        x[2][odd] = exclusive_or(a >> 32, x[3][odd], Wide{} + keys[1]);
        x[3][odd] = a;
      }
    for (int w = 0; w < 4; ++w) words[w] = (PhiloxWords)((x[w][0] & 0xffffffffu) | x[w][1] << 32);
  }

 private:
  typedef uint64_t Wide __attribute__((vector_size(kVectorBytes)));

  // Of the lower halves of a.
  static Wide product(Wide a, uint32_t b) {
#if defined(__AVX512F__)
    return (Wide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    return (Wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
    return (Wide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#elif defined(__aarch64__)
    return (Wide)vmull_u32(vmovn_u64((uint64x2_t)a), vdup_n_u32(b));
#else
    return (a & 0xffffffffu) * b;
#endif
  }
  static Wide exclusive_or(Wide a, Wide b, Wide c) {
#if defined(__AVX512F__)
    return (Wide)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
    return a ^ b ^ c;
#endif
  }

  uint64_t low_, high_, keys_[philox::kRounds][2];
};

// What the lanes are: run<n>() with n neighbouring queries, for as many calls of a block of keys side by side as then
// fill them.
template <class Run>
inline void by_queries(int64_t queries, const Run& run) {
  constexpr int kHalf = kPhiloxLanes > 8 ? 8 : kPhiloxLanes;
  if (queries <= 4) run.template operator()<4>();
  else if (queries <= kHalf) run.template operator()<kHalf>();
  else run.template operator()<kPhiloxLanes>();
}

// The calls of each block that have keys of a tile: those from this one on have none.
inline int64_t calls_of_block(int64_t first_key, int64_t keys) {
  return first_key % philox::kBlockKeys == 0 ? min64((keys + 1) / 2, philox::kCallsPerBlock) : philox::kCallsPerBlock;
}

// The counters of the lanes: kQueries queries from one on, of as many calls from one on as fill them.
template <int kQueries>
inline void philox_words(const PhiloxLanes& philox, int64_t call, int64_t query, PhiloxWords (&words)[4]) {
  philox.words(lane_numbers() / kQueries + static_cast<uint32_t>(call),
               lane_numbers() % kQueries + static_cast<uint32_t>(query), words);
}

template <class T>
struct Eight {
  typedef T V __attribute__((vector_size(8 * sizeof(T))));
};

// What the tile of an entry holds: `kept` where its half of a word isn't below the threshold, else 0.
template <class C>
struct Keeping {
  using S = Simd<C>;
  using Number = typename S::Int;
  uint32_t threshold;
  C kept;

  // Rows are keys, lanes are queries; those of a whole vector of words are written.
  void fill_keys(const PhiloxLanes& philox, int64_t key, int64_t keys, int64_t query, int64_t queries, C* tile) const {
    by_queries(queries, [&]<int kQueries>() { fill_keys<kQueries>(philox, key, keys, query, queries, tile); });
  }
  template <int kQueries>
  void fill_keys(const PhiloxLanes& philox, int64_t key, int64_t keys, int64_t query, int64_t queries, C* tile) const {
    constexpr int kBeside = kPhiloxLanes / kQueries;
    const int64_t calls = calls_of_block(key, keys);
    for (int64_t i = 0; i < queries; i += kQueries)
      for (int64_t block = key / philox::kBlockKeys; block * philox::kBlockKeys < key + keys; ++block)
        for (int64_t call = 0; call < calls; call += kBeside) {
          PhiloxWords words[4];
          philox_words<kQueries>(philox, block * philox::kCallsPerBlock + call, query + i, words);
#pragma GCC unroll 8
          for (int half = 0; half < 8; ++half) {
            const PhiloxWords word = words[half / 2], value = half % 2 == 0 ? word & 0xffff : word >> 16;
            for (int n = 0; n < kBeside; ++n) {
              const int64_t j = block * philox::kBlockKeys + half / 2 * 8 + (call + n) * 2 + half % 2 - key;
              if (j < 0 || j >= keys) continue;
              C* const row = tile + j * kTile<C> + i;
              if constexpr (kBeside == 1 && sizeof(C) == sizeof(uint32_t)) {
                S::store(row, value >= threshold ? S::set1(kept) : S::zero());
              } else {
                for (int r = 0; r < kQueries; ++r) row[r] = value[n * kQueries + r] >= threshold ? kept : C(0);
              }
            }
          }
        }
  }

  // Rows are queries, lanes are keys. The eight keys of a word in the four calls of a block are neighbours, as the
  // halves of neighbouring words in memory are.
  void fill_queries(const PhiloxLanes& philox, int64_t key, int64_t keys, int64_t query, int64_t queries,
                    C* tile) const {
#if defined(__AVX512F__)
    if (key % philox::kBlockKeys == 0) return fill_blocks(philox, key, keys, query, queries, tile);
#endif
    constexpr int64_t kQueries = kPhiloxLanes / philox::kCallsPerBlock;
    const PhiloxWords of_row = lane_numbers() / philox::kCallsPerBlock;
    const PhiloxWords of_call = lane_numbers() % philox::kCallsPerBlock;
    for (int64_t i = 0; i < queries; i += kQueries)
      for (int64_t block = key / philox::kBlockKeys; block * philox::kBlockKeys < key + keys; ++block) {
        PhiloxWords words[4];
        philox.words(of_call + static_cast<uint32_t>(block * philox::kCallsPerBlock),
                     of_row + static_cast<uint32_t>(query + i), words);
        for (int64_t r = 0; r < min64(kQueries, queries - i); ++r)
#pragma GCC unroll 4
          for (int w = 0; w < 4; ++w) {
            const int64_t j = block * philox::kBlockKeys + w * 8 - key;
            C* const lanes = tile + (i + r) * kTile<C> + j;
            C entries[8];
            eight_entries(reinterpret_cast<const char*>(&words[w]) + r * 8 * sizeof(uint16_t), entries);
            if (j >= 0 && j + 8 <= keys) std::memcpy(lanes, entries, sizeof(entries));
            else
              for (int64_t n = max64(0, -j); n < min64(8, keys - j); ++n) lanes[n] = entries[n];
          }
      }
  }

  // The entries of eight halves of words.
  [[gnu::always_inline]] inline void eight_entries(const char* words, C (&entries)[8]) const {
    typename Eight<uint16_t>::V halves;
    std::memcpy(&halves, words, sizeof(halves));
    const auto numbers = __builtin_convertvector(halves, typename Eight<Number>::V);
    const typename Eight<C>::V zeros{}, result = numbers >= static_cast<Number>(threshold) ? zeros + kept : zeros;
    std::memcpy(entries, &result, sizeof(result));
  }

#if defined(__AVX512F__)
  // As fill_queries, from the first key of a block on: two queries and two blocks of keys at a time.
  void fill_blocks(const PhiloxLanes& philox, int64_t key, int64_t keys, int64_t query, int64_t queries,
                   C* tile) const {
    const __m512i limit = _mm512_set1_epi16(static_cast<short>(threshold));  // too large for it, `kept` is 0
    for (int64_t i = 0; i < queries; i += 2) {
      for (int64_t j = 0; j < keys; j += 2 * philox::kBlockKeys) {
        const int64_t call = (key + j) / philox::kBlockKeys * philox::kCallsPerBlock;
        PhiloxWords numbers[4];
        philox.words(lane_numbers() % 8 + static_cast<uint32_t>(call),
                     lane_numbers() / 8 + static_cast<uint32_t>(query + i), numbers);
        __m512i words[4];
        for (int w = 0; w < 4; ++w) words[w] = (__m512i)numbers[w];
        const __m512i a = _mm512_shuffle_i32x4(words[0], words[1], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(words[0], words[1], 0xee);
        const __m512i c = _mm512_shuffle_i32x4(words[2], words[3], 0x44);
        const __m512i d = _mm512_shuffle_i32x4(words[2], words[3], 0xee);
        const __m512i halves[4] = {_mm512_shuffle_i32x4(a, c, 0x88), _mm512_shuffle_i32x4(a, c, 0xdd),
                                   _mm512_shuffle_i32x4(b, d, 0x88), _mm512_shuffle_i32x4(b, d, 0xdd)};
        for (int n = 0; n < 4; ++n) {
          const int64_t row = i + n / 2, lane = j + n % 2 * philox::kBlockKeys;
          if (row >= queries || lane >= keys) continue;
          const uint32_t bits = _mm512_cmpge_epu16_mask(halves[n], limit);
          for (int first = 0; first < philox::kBlockKeys; first += S::kLanes)
            store(tile + row * kTile<C> + lane + first, bits >> first);
        }
      }
    }
  }

 private:
  // kLanes entries of which `bits` are kept.
  void store(C* target, uint32_t bits) const {
    if constexpr (sizeof(C) == 4)
      S::store(target, (typename S::V)_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), S::set1(kept)));
    else S::store(target, (typename S::V)_mm512_maskz_mov_pd(static_cast<__mmask8>(bits), S::set1(kept)));
  }
#endif
};

// tile[loop][lane] = 1 / (1 - p) where the entry is kept, 0 where it is dropped. loop_dim as in bias_tile.
template <class C>
inline void dropout_tile(const Attention& p, int loop_dim, int64_t batch, int64_t head, int64_t loop, int64_t loops,
                         int64_t lane, int64_t lanes, C* tile) {
  const int64_t group = p.batch / p.seed_count;
  const uint64_t seed = static_cast<uint64_t>(p.seeds[batch / group]);
  const uint64_t batch_head = static_cast<uint64_t>((batch % group) * p.heads_q + head);
  const uint32_t threshold = philox::threshold(p.dropout_p);
  const C kept = threshold <= 0xffff ? static_cast<C>(1.0 / (1.0 - p.dropout_p)) : C(0);  // beyond, no entry is kept
  const PhiloxLanes philox(seed, batch_head);
  const Keeping<C> keeping{threshold, kept};
  if (loop_dim == 3) keeping.fill_keys(philox, loop, loops, lane, lanes, tile);
  else keeping.fill_queries(philox, lane, lanes, loop, loops, tile);
}

}  // namespace
}  // namespace attnkern::cpu
