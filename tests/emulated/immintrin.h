// AVX-512, AVX512-BF16 and AMX in plain C++: what csrc/cpu uses of them, so that its kernels for these instructions
// run, and are tested, on any machine with AVX2. Found before the compiler's own header where a build asks for it
// (build_emulated in setup.py). Results are those of the manual, but that subnormal numbers aren't flushed.
#pragma once

#include_next <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#define __AVX512F__ 1
#if ATTNKERN_EMULATED_BF16
#define __AVX512BF16__ 1
#define __AMX_BF16__ 1
#endif
#pragma GCC diagnostic ignored "-Wunused-function"
#define ATTNKERN_IN_REGISTER(x) "+m"(x)

namespace {
namespace emulated {

template <class T>
struct Lanes {
  typedef T V __attribute__((vector_size(64), may_alias));
  static constexpr int kCount = 64 / sizeof(T);
};
using F = Lanes<float>::V;
using D = Lanes<double>::V;
using I32 = Lanes<int32_t>::V;
using U32 = Lanes<uint32_t>::V;
using U64 = Lanes<uint64_t>::V;
using U16 = Lanes<uint16_t>::V;
using U8 = Lanes<uint8_t>::V;

template <class To, class From>
inline To bits_of(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

// body(low), body(high) of what is done by halves.
template <class V, class Half, class Body, class... Vs>
inline V by_halves(const Body& body, const Vs&... xs) {
  Half parts[2], of_all[2][sizeof...(Vs)];
  int n = 0;
  ((std::memcpy(&of_all[0][n], &xs, 32), std::memcpy(&of_all[1][n], reinterpret_cast<const char*>(&xs) + 32, 32), ++n),
   ...);
  for (int h = 0; h < 2; ++h) parts[h] = body(of_all[h]);
  V result;
  std::memcpy(&result, parts, 64);
  return result;
}

inline __m512 fmadd_ps(F a, F b, F c) {
  return by_halves<__m512, __m256>([](const __m256* x) { return _mm256_fmadd_ps(x[0], x[1], x[2]); }, a, b, c);
}
inline __m512d fmadd_pd(D a, D b, D c) {
  return by_halves<__m512d, __m256d>([](const __m256d* x) { return _mm256_fmadd_pd(x[0], x[1], x[2]); }, a, b, c);
}
inline __m512 max_ps(F a, F b) { return (__m512)(a > b ? a : b); }
inline __m512d max_pd(D a, D b) { return (__m512d)(a > b ? a : b); }
inline __m512 min_ps(F a, F b) { return (__m512)(a < b ? a : b); }
inline __m512d min_pd(D a, D b) { return (__m512d)(a < b ? a : b); }

// Lanes whose bits are set from b, the others from a.
template <class V, class T = std::remove_cvref_t<decltype(V{}[0])>>
[[gnu::noinline]] V blend(uint64_t bits, V a, V b) {
  for (int lane = 0; lane < Lanes<T>::kCount; ++lane)
    if (bits >> lane & 1) a[lane] = b[lane];
  return a;
}
// Bit by lane of what a predicate holds.
template <class V, class Predicate>
[[gnu::noinline]] uint64_t mask_of(V a, V b, const Predicate& holds) {
  uint64_t bits = 0;
  constexpr int kCount = static_cast<int>(sizeof(V) / sizeof(a[0]));
  for (int lane = 0; lane < kCount; ++lane) bits |= uint64_t{holds(a[lane], b[lane])} << lane;
  return bits;
}
// Elements whose bits are set; those of the others aren't touched.
template <class V, class T>
[[gnu::noinline]] V load_some(uint64_t bits, const void* p) {
  V x{};
  T lanes[sizeof(V) / sizeof(T)] = {};
  for (size_t i = 0; i < sizeof(V) / sizeof(T); ++i)
    if (bits >> i & 1) std::memcpy(&lanes[i], static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
  std::memcpy(&x, lanes, sizeof(x));
  return x;
}
template <class T, class V>
[[gnu::noinline]] void store_some(void* p, uint64_t bits, const V& x) {
  T lanes[sizeof(V) / sizeof(T)];
  std::memcpy(lanes, &x, sizeof(x));
  for (size_t i = 0; i < sizeof(V) / sizeof(T); ++i)
    if (bits >> i & 1) std::memcpy(static_cast<char*>(p) + i * sizeof(T), &lanes[i], sizeof(T));
}

[[gnu::noinline]] __m512 roundscale_ps(F x) {
  return by_halves<__m512, __m256>(
      [](const __m256* h) { return _mm256_round_ps(h[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }, x);
}
[[gnu::noinline]] __m512d roundscale_pd(D x) {
  return by_halves<__m512d, __m256d>(
      [](const __m256d* h) { return _mm256_round_pd(h[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }, x);
}
// a times 2^b, b whole or infinite.
template <class V>
[[gnu::noinline]] V scalef(V a, V b) {
  using C = std::remove_cvref_t<decltype(a[0])>;
  for (int lane = 0; lane < Lanes<C>::kCount; ++lane) {
    const C n = b[lane];
    if (n != n) a[lane] = n;
    else if (std::isinf(n) && n < 0) a[lane] = std::isinf(a[lane]) ? C(NAN) : C(0);
    else if (std::isinf(n))
      a[lane] = a[lane] == 0 ? C(NAN) : std::copysign(C(INFINITY), a[lane] != a[lane] ? C(1) : C(a[lane]));
    else a[lane] = std::ldexp(a[lane], static_cast<int>(n < -5000 ? C(-5000) : n > 5000 ? C(5000) : n));
  }
  return a;
}

[[gnu::noinline]] F dpbf16_ps(F sum, __m512bh a, __m512bh b) {
  const U32 x = bits_of<U32>(a), y = bits_of<U32>(b);
  sum = (F)fmadd_ps((F)(x & 0xffff0000u), (F)(y & 0xffff0000u), sum);
  return (F)fmadd_ps((F)(x << 16), (F)(y << 16), sum);
}
// The upper halves of the rounded numbers' bits, where they lie.
inline U32 rounded_to_bf16(F x) {
  const U32 bits = (U32)x;
  const U32 rounded = bits + 0x7fff + (bits >> 16 & 1);
  return (x == x ? rounded : bits | 0x400000u) >> 16;
}
[[gnu::noinline]] __m256bh cvtneps_pbh(F x) {
  typedef uint16_t Half __attribute__((vector_size(32)));
  return bits_of<__m256bh>(__builtin_convertvector(rounded_to_bf16(x), Half));
}
[[gnu::noinline]] __m512bh cvtne2ps_pbh(F high, F low) {
  const __m256bh parts[2] = {cvtneps_pbh(low), cvtneps_pbh(high)};
  return bits_of<__m512bh>(parts);
}
[[gnu::noinline]] __m256i cvtps_ph(F x) {
  __m256 halves[2];
  std::memcpy(halves, &x, 64);
  const __m128i parts[2] = {_mm256_cvtps_ph(halves[0], _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(halves[1], _MM_FROUND_TO_NEAREST_INT)};
  return bits_of<__m256i>(parts);
}
[[gnu::noinline]] __m512 cvtph_ps(__m256i x) {
  __m128i halves[2];
  std::memcpy(halves, &x, 32);
  const __m256 parts[2] = {_mm256_cvtph_ps(halves[0]), _mm256_cvtph_ps(halves[1])};
  return bits_of<__m512>(parts);
}
[[gnu::noinline]] __m512i cvtepu16_epi32(__m256i x) {
  typedef uint16_t Half __attribute__((vector_size(32)));
  return (__m512i) __builtin_convertvector(bits_of<Half>(x), U32);
}

// Element i of the result is place(i) of a and b, one after the other.
template <class V, class Place>
inline V shuffled(V a, V b, const Place& place) {
  constexpr int kCount = static_cast<int>(sizeof(V) / sizeof(a[0]));
  V x{};
  for (int i = 0; i < kCount; ++i) {
    const int from = place(i);
    x[i] = from < kCount ? a[from] : b[from - kCount];
  }
  return x;
}
// Elements of a and b in turn, from the first or the second half of each 128 bits.
template <class V>
[[gnu::noinline]] V unpacked(V a, V b, int half) {
  constexpr int kCount = static_cast<int>(sizeof(V) / sizeof(a[0])), kQuarter = kCount / 4;
  return shuffled(a, b, [&](int i) {
    return i / kQuarter * kQuarter + half * kQuarter / 2 + i % kQuarter / 2 + (i % 2 == 0 ? 0 : kCount);
  });
}
// Quarters of a, then of b.
template <class V>
[[gnu::noinline]] V quarters(V a, V b, int order) {
  constexpr int kCount = static_cast<int>(sizeof(V) / sizeof(a[0])), kQuarter = kCount / 4;
  return shuffled(a, b, [&](int i) {
    const int quarter = i / kQuarter;
    return (order >> 2 * quarter & 3) * kQuarter + i % kQuarter + (quarter < 2 ? 0 : kCount);
  });
}
[[gnu::noinline]] __m512i permutex2var_epi64(U64 a, U64 index, U64 b) {
  return (__m512i)shuffled(a, b, [&](int i) { return static_cast<int>(index[i] & 15); });
}
[[gnu::noinline]] __m512i permutexvar_epi16(U16 index, U16 a) {
  return (__m512i)shuffled(a, a, [&](int i) { return static_cast<int>(index[i] & 31); });
}
inline __m512i loadu(const void* p) {
  __m512i x;
  std::memcpy(&x, p, 64);
  return x;
}
inline __m256i upper_half(__m512i x) {
  __m256i halves[2];
  std::memcpy(halves, &x, 64);
  return halves[1];
}

struct Tiles {
  struct Config {
    uint8_t palette, start, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config;
  unsigned char data[8][16][64];
};
inline thread_local Tiles tiles = {};

inline void check(bool right) {
  if (!right) std::abort();  // as the processor would
}
[[gnu::noinline]] void tile_loadconfig(const void* p) {
  std::memset(&tiles, 0, sizeof(tiles));
  std::memcpy(&tiles.config, p, 64);
  check(tiles.config.palette == 1 && tiles.config.start == 0);
  for (int tile = 0; tile < 8; ++tile) check(tiles.config.rows[tile] <= 16 && tiles.config.row_bytes[tile] <= 64);
}
inline void tile_release() { std::memset(&tiles, 0, sizeof(tiles)); }
inline void tile_zero(int tile) {
  check(tiles.config.palette == 1);
  std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile]));
}
[[gnu::noinline]] void tile_loadd(int tile, const void* p, int64_t stride) {
  tile_zero(tile);
  for (int row = 0; row < tiles.config.rows[tile]; ++row)
    std::memcpy(tiles.data[tile][row], static_cast<const char*>(p) + row * stride, tiles.config.row_bytes[tile]);
}
[[gnu::noinline]] void tile_stored(int tile, void* p, int64_t stride) {
  check(tiles.config.palette == 1);
  for (int row = 0; row < tiles.config.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(p) + row * stride, tiles.data[tile][row], tiles.config.row_bytes[tile]);
}
[[gnu::noinline]] void tile_dpbf16ps(int sum, int a, int b) {
  const Tiles::Config& config = tiles.config;
  check(config.palette == 1 && config.rows[a] == config.rows[sum] && config.row_bytes[b] == config.row_bytes[sum] &&
        config.rows[b] == config.row_bytes[a] / 4);
  for (int m = 0; m < config.rows[sum]; ++m) {
    F even{}, odd{}, total;
    for (int k = 0; k < config.rows[b]; ++k) {
      uint32_t pair;
      std::memcpy(&pair, tiles.data[a][m] + 4 * k, 4);
      const U32 first = U32{} + (pair << 16), second = U32{} + (pair & 0xffff0000u);
      U32 pairs;
      std::memcpy(&pairs, tiles.data[b][k], 64);
      even = (F)fmadd_ps((F)first, (F)(pairs << 16), even);
      odd = (F)fmadd_ps((F)second, (F)(pairs & 0xffff0000u), odd);
    }
    std::memcpy(&total, tiles.data[sum][m], 64);
    total += even + odd;
    std::memcpy(tiles.data[sum][m], &total, config.row_bytes[sum]);
  }
}

}  // namespace emulated
}  // namespace

#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_fmadd_pd emulated::fmadd_pd
#define _mm512_max_ps emulated::max_ps
#define _mm512_max_pd emulated::max_pd
#define _mm512_min_ps emulated::min_ps
#define _mm512_min_pd emulated::min_pd
#define _mm512_mask_blend_ps(k, a, b) ((__m512)emulated::blend<emulated::F>(k, (emulated::F)(a), (emulated::F)(b)))
#define _mm512_mask_blend_pd(k, a, b) ((__m512d)emulated::blend<emulated::D>(k, (emulated::D)(a), (emulated::D)(b)))
#define _mm512_mask_blend_epi32(k, a, b) \
  ((__m512i)emulated::blend<emulated::U32>(k, (emulated::U32)(a), (emulated::U32)(b)))
#define _mm512_maskz_mov_ps(k, a) _mm512_mask_blend_ps(k, emulated::F{}, a)
#define _mm512_maskz_mov_pd(k, a) _mm512_mask_blend_pd(k, emulated::D{}, a)
#define _mm512_movepi32_mask(a) \
  static_cast<__mmask16>(emulated::mask_of((emulated::I32)(a), (emulated::I32)(a), [](auto x, auto) { return x < 0; }))
#define _mm512_movepi64_mask(a) \
  static_cast<__mmask8>(emulated::mask_of((__m512i)(a), (__m512i)(a), [](auto x, auto) { return x < 0; }))
#define _mm512_cmpge_epu32_mask(a, b) \
  emulated::mask_of((emulated::U32)(a), (emulated::U32)(b), [](auto x, auto y) { return x >= y; })
#define _mm512_cmpge_epu16_mask(a, b) \
  emulated::mask_of((emulated::U16)(a), (emulated::U16)(b), [](auto x, auto y) { return x >= y; })
#define _mm512_test_epi8_mask(a, b) \
  emulated::mask_of((emulated::U8)(a), (emulated::U8)(b), [](auto x, auto y) { return (x & y) != 0; })
#define _mm512_test_epi16_mask(a, b) \
  emulated::mask_of((emulated::U16)(a), (emulated::U16)(b), [](auto x, auto y) { return (x & y) != 0; })
#define _mm_testn_epi8_mask(a, b)                                                 \
  emulated::mask_of(emulated::bits_of<Bytes16>(a), emulated::bits_of<Bytes16>(b), \
                    [](auto x, auto y) { return (x & y) == 0; })
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
#define _mm512_maskz_loadu_ps(k, p) emulated::load_some<__m512, float>(k, p)
#define _mm512_maskz_loadu_pd(k, p) emulated::load_some<__m512d, double>(k, p)
#define _mm512_maskz_loadu_epi8(k, p) emulated::load_some<__m512i, uint8_t>(k, p)
#define _mm512_maskz_loadu_epi16(k, p) emulated::load_some<__m512i, uint16_t>(k, p)
#define _mm256_maskz_loadu_epi16(k, p) emulated::load_some<__m256i, uint16_t>(k, p)
#define _mm512_mask_storeu_ps(p, k, x) emulated::store_some<float>(p, k, x)
#define _mm512_mask_storeu_pd(p, k, x) emulated::store_some<double>(p, k, x)
#define _mm256_mask_storeu_epi16(p, k, x) emulated::store_some<uint16_t>(p, k, x)
#undef _mm512_roundscale_ps
#undef _mm512_roundscale_pd
#define _mm512_roundscale_ps(x, how) (static_cast<void>(how), emulated::roundscale_ps(x))
#define _mm512_roundscale_pd(x, how) (static_cast<void>(how), emulated::roundscale_pd(x))
#define _mm512_scalef_ps(a, b) ((__m512)emulated::scalef<emulated::F>((emulated::F)(a), (emulated::F)(b)))
#define _mm512_scalef_pd(a, b) ((__m512d)emulated::scalef<emulated::D>((emulated::D)(a), (emulated::D)(b)))
#define _mm512_dpbf16_ps(sum, a, b) ((__m512)emulated::dpbf16_ps((emulated::F)(sum), a, b))
#define _mm512_cvtneps_pbh(x) emulated::cvtneps_pbh((emulated::F)(x))
#define _mm512_cvtne2ps_pbh(high, low) emulated::cvtne2ps_pbh((emulated::F)(high), (emulated::F)(low))
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, how) emulated::cvtps_ph((emulated::F)(x))
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_unpacklo_ps(a, b) ((__m512)emulated::unpacked((emulated::F)(a), (emulated::F)(b), 0))
#define _mm512_unpackhi_ps(a, b) ((__m512)emulated::unpacked((emulated::F)(a), (emulated::F)(b), 1))
#define _mm512_unpacklo_pd(a, b) ((__m512d)emulated::unpacked((emulated::D)(a), (emulated::D)(b), 0))
#define _mm512_unpackhi_pd(a, b) ((__m512d)emulated::unpacked((emulated::D)(a), (emulated::D)(b), 1))
#define _mm512_unpacklo_epi16(a, b) ((__m512i)emulated::unpacked((emulated::U16)(a), (emulated::U16)(b), 0))
#define _mm512_unpackhi_epi16(a, b) ((__m512i)emulated::unpacked((emulated::U16)(a), (emulated::U16)(b), 1))
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_f32x4(a, b, order) ((__m512)emulated::quarters((emulated::F)(a), (emulated::F)(b), order))
#define _mm512_shuffle_i32x4(a, b, order) ((__m512i)emulated::quarters((emulated::U32)(a), (emulated::U32)(b), order))
#define _mm512_permutex2var_epi64(a, index, b) \
  emulated::permutex2var_epi64((emulated::U64)(a), (emulated::U64)(index), (emulated::U64)(b))
#define _mm512_permutexvar_epi16(index, a) emulated::permutexvar_epi16((emulated::U16)(index), (emulated::U16)(a))
#define _mm512_loadu_si512 emulated::loadu
#define _mm512_load_si512 emulated::loadu
#define _mm512_storeu_si512(p, x) emulated::store_some<uint8_t>(p, ~uint64_t{0}, x)
#define _mm512_setzero_si512() (__m512i{})
#define _mm512_set1_ps(x) ((__m512)(emulated::F{} + (x)))
#define _mm512_set1_epi64(x) ((__m512i)(emulated::U64{} + static_cast<uint64_t>(x)))
#define _mm512_set1_epi32(x) ((__m512i)(emulated::U32{} + static_cast<uint32_t>(x)))
#define _mm512_set1_epi16(x) ((__m512i)(emulated::U16{} + static_cast<uint16_t>(x)))
#undef _mm512_setr_epi64
#undef _mm512_setr_epi32
#define _mm512_setr_epi64(...) ((__m512i)emulated::U64{__VA_ARGS__})
#define _mm512_setr_epi32(...) ((__m512i)emulated::U32{__VA_ARGS__})
#undef _mm512_srli_epi64
#undef _mm512_slli_epi64
#undef _mm512_srli_epi32
#undef _mm512_slli_epi32
#define _mm512_srli_epi64(x, n) ((__m512i)((emulated::U64)(x) >> (n)))
#define _mm512_slli_epi64(x, n) ((__m512i)((emulated::U64)(x) << (n)))
#define _mm512_srli_epi32(x, n) ((__m512i)((emulated::U32)(x) >> (n)))
#define _mm512_slli_epi32(x, n) ((__m512i)((emulated::U32)(x) << (n)))
#define _mm512_add_epi32(a, b) ((__m512i)((emulated::U32)(a) + (emulated::U32)(b)))
#define _mm512_and_si512(a, b) ((__m512i)((emulated::U64)(a) & (emulated::U64)(b)))
#define _mm512_or_si512(a, b) ((__m512i)((emulated::U64)(a) | (emulated::U64)(b)))
#define _mm512_mul_epu32(a, b) ((__m512i)(((emulated::U64)(a) & 0xffffffffu) * ((emulated::U64)(b) & 0xffffffffu)))
#undef _mm512_ternarylogic_epi64
#define _mm512_ternarylogic_epi64(a, b, c, table) \
  ((__m512i)((emulated::U64)(a) ^ (emulated::U64)(b) ^ (emulated::U64)(c) ^ ((table) - 0x96)))  // that of exclusive or
#define _mm512_castsi512_si256(x) emulated::load_some<__m256i, uint8_t>(~uint64_t{0}, &static_cast<const __m512i&>(x))
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64(x, n) emulated::upper_half(x)
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::tile_loadconfig
#define _tile_release emulated::tile_release
#define _tile_zero emulated::tile_zero
#define _tile_loadd emulated::tile_loadd
#define _tile_stored emulated::tile_stored
#define _tile_dpbf16ps emulated::tile_dpbf16ps
