// Which entries of a block dropout keeps: Philox by position, 16 counters at a time.
#pragma once

#include "../common/philox.h"
#include "bias.h"

namespace attnkern::cpu {
namespace {

inline constexpr int kPhiloxLanes = 16;

// What the lanes are: run<n>() with n neighbouring queries, for 16 / n calls of a block of keys side by side.
template <class Run>
inline void by_queries(int64_t queries, const Run& run) {
  if (queries <= 4) run.template operator()<4>();
  else if (queries <= 8) run.template operator()<8>();
  else run.template operator()<kPhiloxLanes>();
}

// The calls of each block that have keys of a tile: those from this one on have none.
inline int64_t calls_of_block(int64_t first_key, int64_t keys) {
  return first_key % philox::kBlockKeys == 0 ? min64((keys + 1) / 2, philox::kCallsPerBlock) : philox::kCallsPerBlock;
}

#if defined(__AVX512F__)
// Philox of one seed, head and entry of the batch for 16 counters at once.
class PhiloxLanes {
 public:
  PhiloxLanes(uint64_t seed, uint64_t batch_head) : low_(batch_head & 0xffffffffu), high_(batch_head >> 32) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (auto& keys : keys_) {
      keys[0] = key[0], keys[1] = key[1];
      key[0] += philox::kWeyl0, key[1] += philox::kWeyl1;
    }
  }

  void words(__m512i call, __m512i query, __m512i (&words)[4]) const {
    // Even lanes and odd ones as numbers of 64 bits, of which the upper half is ignored: a product's lower half then is
    // where it is needed.
    __m512i x[4][2] = {{call, _mm512_srli_epi64(call, 32)}, {query, _mm512_srli_epi64(query, 32)}};
    const __m512i first = _mm512_set1_epi64(philox::kMultiplier0), second = _mm512_set1_epi64(philox::kMultiplier1);
    for (int odd = 0; odd < 2; ++odd) {
      x[2][odd] = _mm512_set1_epi64(static_cast<long long>(low_));
      x[3][odd] = _mm512_set1_epi64(static_cast<long long>(high_));
    }
    const auto round = [](__m512i product, __m512i other, uint64_t key) {
      constexpr int kXor = 0x96;  // of all three
      return _mm512_ternarylogic_epi64(_mm512_srli_epi64(product, 32), other,
                                       _mm512_set1_epi64(static_cast<long long>(key)), kXor);
    };
#pragma GCC unroll 10
    for (const auto& keys : keys_)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const __m512i a = _mm512_mul_epu32(x[0][odd], first), b = _mm512_mul_epu32(x[2][odd], second);
        x[0][odd] = round(b, x[1][odd], keys[0]);
        x[1][odd] = b;
        x[2][odd] = round(a, x[3][odd], keys[1]);
        x[3][odd] = a;
      }
    for (int w = 0; w < 4; ++w) words[w] = _mm512_mask_blend_epi32(0xaaaa, x[w][0], _mm512_slli_epi64(x[w][1], 32));
  }

 private:
  uint64_t low_, high_, keys_[philox::kRounds][2];
};

// What the tile of an entry holds: `kept` where its half of a word isn't below the threshold, else 0.
template <class C>
struct Keeping {
  using S = Simd<C>;
  uint32_t threshold;
  C kept;

  // kLanes entries of which `bits` are kept.
  void store(C* target, uint32_t bits) const {
    if constexpr (sizeof(C) == 4)
      S::store(target, (typename S::V)_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), S::set1(kept)));
    else S::store(target, (typename S::V)_mm512_maskz_mov_pd(static_cast<__mmask8>(bits), S::set1(kept)));
  }

  // Rows are keys, lanes are queries.
  void fill_keys(const PhiloxLanes& philox, int64_t key, int64_t keys, int64_t query, int64_t queries, C* tile) const {
    by_queries(queries, [&]<int kQueries>() { fill_keys<kQueries>(philox, key, keys, query, queries, tile); });
  }
  template <int kQueries>
  void fill_keys(const PhiloxLanes& philox, int64_t key, int64_t keys, int64_t query, int64_t queries, C* tile) const {
    constexpr int kBeside = kPhiloxLanes / kQueries;
    const __m512i limit = _mm512_set1_epi32(static_cast<int>(threshold)), low_half = _mm512_set1_epi32(0xffff);
    const __m512i of_row = _mm512_and_si512(lane_numbers(), _mm512_set1_epi32(kQueries - 1));
    const __m512i of_call = _mm512_srli_epi32(lane_numbers(), __builtin_ctz(kQueries));
    const int64_t calls = calls_of_block(key, keys);
    for (int64_t i = 0; i < queries; i += kQueries) {
      const __m512i lanes = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(query + i)), of_row);
      for (int64_t block = key / philox::kBlockKeys; block * philox::kBlockKeys < key + keys; ++block)
        for (int64_t call = 0; call < calls; call += kBeside) {
          __m512i words[4];
          const auto first = static_cast<int>(block * philox::kCallsPerBlock + call);
          philox.words(_mm512_add_epi32(_mm512_set1_epi32(first), of_call), lanes, words);
          for (int half = 0; half < 8; ++half) {
            const __m512i word = words[half / 2];
            const __m512i value = half % 2 == 0 ? _mm512_and_si512(word, low_half) : _mm512_srli_epi32(word, 16);
            const uint32_t bits = _mm512_cmpge_epu32_mask(value, limit);
            for (int n = 0; n < kBeside; ++n) {
              const int64_t j = block * philox::kBlockKeys + half / 2 * 8 + (call + n) * 2 + half % 2 - key;
              if (j < 0 || j >= keys) continue;
              for (int lane = 0; lane < kPhiloxLanes; lane += S::kLanes)
                store(tile + j * kTile<C> + i + lane, bits >> (n * kQueries + lane));
            }
          }
        }
    }
  }

  // Rows are queries, lanes are keys from the first one of a block on. The eight keys of a word in four neighbouring
  // calls are neighbours.
  void fill_queries(const PhiloxLanes& philox, int64_t key, int64_t keys, int64_t query, int64_t queries,
                    C* tile) const {
    // Of two queries and two blocks, four calls each.
    const __m512i number = lane_numbers(), calls = _mm512_and_si512(number, _mm512_set1_epi32(7));
    const __m512i second_query = _mm512_srli_epi32(number, 3);
    const __m512i limit = _mm512_set1_epi16(static_cast<short>(threshold));  // too large for it, `kept` is 0
    for (int64_t i = 0; i < queries; i += 2) {
      const __m512i rows = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(query + i)), second_query);
      for (int64_t j = 0; j < keys; j += 2 * philox::kBlockKeys) {
        const int64_t call = (key + j) / philox::kBlockKeys * philox::kCallsPerBlock;
        __m512i words[4];
        philox.words(_mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(call)), calls), rows, words);
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

  static __m512i lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
};
#endif

// Philox for kQueries neighbouring queries and as many neighbouring calls as make 16 counters, all at once (the loops
// vectorise): words[w][lane].
template <int kQueries>
inline void philox_lanes(uint64_t seed, uint32_t call, uint32_t query, uint64_t batch_head,
                         uint32_t (&words)[4][kPhiloxLanes]) {
  uint32_t x0[kPhiloxLanes], x1[kPhiloxLanes], x2[kPhiloxLanes], x3[kPhiloxLanes];
  for (uint32_t lane = 0; lane < kPhiloxLanes; ++lane) {
    x0[lane] = call + lane / kQueries;
    x1[lane] = query + lane % kQueries;
    x2[lane] = static_cast<uint32_t>(batch_head);
    x3[lane] = static_cast<uint32_t>(batch_head >> 32);
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < philox::kRounds; ++round) {
    for (int lane = 0; lane < kPhiloxLanes; ++lane) {
      const uint64_t a = uint64_t{philox::kMultiplier0} * x0[lane], b = uint64_t{philox::kMultiplier1} * x2[lane];
      x0[lane] = static_cast<uint32_t>(b >> 32) ^ x1[lane] ^ key0;
      x1[lane] = static_cast<uint32_t>(b);
      x2[lane] = static_cast<uint32_t>(a >> 32) ^ x3[lane] ^ key1;
      x3[lane] = static_cast<uint32_t>(a);
    }
    key0 += philox::kWeyl0;
    key1 += philox::kWeyl1;
  }
  for (int lane = 0; lane < kPhiloxLanes; ++lane) {
    words[0][lane] = x0[lane];
    words[1][lane] = x1[lane];
    words[2][lane] = x2[lane];
    words[3][lane] = x3[lane];
  }
}

// tile[loop][lane] = 1 / (1 - p) where the entry is kept, 0 where it is dropped. loop_dim as in bias_tile.
template <class C>
inline void dropout_tile(const Attention& p, int loop_dim, int64_t batch, int64_t head, int64_t loop, int64_t loops,
                         int64_t lane, int64_t lanes, C* tile) {
  const int64_t group = p.batch / p.seed_count;
  const uint64_t seed = static_cast<uint64_t>(p.seeds[batch / group]);
  const uint64_t batch_head = static_cast<uint64_t>((batch % group) * p.heads_q + head);
  const uint32_t threshold = philox::threshold(p.dropout_p);
  const C kept = threshold <= 0xffff ? static_cast<C>(1.0 / (1.0 - p.dropout_p)) : C(0);  // beyond, no entry is kept
  const bool keys_loop = loop_dim == 3;
#if defined(__AVX512F__)
  const PhiloxLanes lanes_of(seed, batch_head);
  const Keeping<C> keeping{threshold, kept};
  if (keys_loop) return keeping.fill_keys(lanes_of, loop, loops, lane, lanes, tile);
  if (lane % philox::kBlockKeys == 0) return keeping.fill_queries(lanes_of, lane, lanes, loop, loops, tile);
#endif
  const int64_t query = keys_loop ? lane : loop, queries = keys_loop ? lanes : loops;
  const int64_t key = keys_loop ? loop : lane, keys = keys_loop ? loops : lanes;
  const int64_t query_step = keys_loop ? 1 : kTile<C>, key_step = keys_loop ? kTile<C> : 1;
  const int64_t calls = calls_of_block(key, keys);
  by_queries(queries, [&]<int kQueries>() {
    constexpr int kBeside = kPhiloxLanes / kQueries;
    const C kept_entry = kept;  // the tile might hold what is captured, for all that the compiler knows
    const int64_t to_query = query_step, to_key = key_step;
    for (int64_t i = 0; i < queries; i += kQueries) {
      const int64_t count = min64(kQueries, queries - i);
      for (int64_t block = key / philox::kBlockKeys; block * philox::kBlockKeys < key + keys; ++block)
        for (int64_t call = 0; call < calls; call += kBeside) {
          uint32_t words[4][kPhiloxLanes];
          philox_lanes<kQueries>(seed, static_cast<uint32_t>(block * philox::kCallsPerBlock + call),
                                 static_cast<uint32_t>(query + i), batch_head, words);
          for (int n = 0; n < kBeside; ++n)
            for (int w = 0; w < 4; ++w)
              for (int half = 0; half < 2; ++half) {
                const int64_t j = block * philox::kBlockKeys + w * 8 + (call + n) * 2 + half - key;
                if (j < 0 || j >= keys) continue;
                const uint32_t* const word = words[w] + n * kQueries;
                C* target = tile + i * to_query + j * to_key;
                for (int64_t r = 0; r < count; ++r)
                  target[r * to_query] = ((word[r] >> (16 * half)) & 0xffffu) >= threshold ? kept_entry : C(0);
              }
        }
    }
  });
}

}  // namespace
}  // namespace attnkern::cpu
