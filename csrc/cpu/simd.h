// Vectors of one instruction set. Included by the units in isa/, which are compiled with that set's flags;
// everything lives in an unnamed namespace, so that no function compiled for AVX-512 can be linked into another unit.
//
// Simd<C> for C = float or double is the whole interface: the kernels are written against it and know no register
// width. The base is the compilers' vector extension; intrinsics replace it where compilers do worse.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored \
    "-Wmaybe-uninitialized"  // GCC's own headers start from an undefined register (bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

// An operand of inline assembly: x, a vector, in a register. (An emulation has vectors wider than its registers.)
#if defined(ATTNKERN_IN_REGISTER)
#elif defined(__aarch64__)
#define ATTNKERN_IN_REGISTER(x) "+w"(x)
#else
#define ATTNKERN_IN_REGISTER(x) "+v"(x)
#endif

namespace attnkern::cpu {
namespace {

// A register tile, kTileRows x kTileVectors sums, and one of two products at once: sums + vectors of B + 1 of A.
#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64, kRegisters = 32, kTileRows = 6, kTileVectors = 4;  // 24 + 4 + 1
inline constexpr int kPairRows = 6, kPairVectors = 2;                                      // 12 + 12 + 2 + 1
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32, kRegisters = 16, kTileRows = 6, kTileVectors = 2;  // 12 + 2 + 1
inline constexpr int kPairRows = 6, kPairVectors = 2;                                      // one after the other
#elif defined(__aarch64__)
inline constexpr int kVectorBytes = 16, kRegisters = 32, kTileRows = 6, kTileVectors = 4;  // 24 + 4 + 1
inline constexpr int kPairRows = 3, kPairVectors = 4;                                      // 12 + 12 + 4 + 1
#else
inline constexpr int kVectorBytes = 16, kRegisters = 16, kTileRows = 4, kTileVectors = 2;  // 8 + 2 + 1 + product
inline constexpr int kPairRows = 4, kPairVectors = 2;                                      // one after the other
#endif
inline constexpr int kSumsInFlight = 8;  // that keep two pipes of multiply-adds busy: each takes four cycles
inline constexpr int kMostRows = 8;      // of a register tile that is narrow

// Of exponentials of floats. What is rounded to bfloat16 needs few digits; the sum of such numbers needs more.
enum class Precision {
  kFull,         // 1 ulp
  kSum,          // relative error of 2e-7
  kProbability,  // relative error of 1e-4
};

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// ---------------------------------------------------------------------------------------------- 16-bit scalars

inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float to_float(Float16 x) {
  // Scaling by 2^112 moves half's exponent bias (15) to float's (127) and makes subnormals normal.
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (magnitude >= 0x7c00u << 13) bits |= 0x7f800000u;  // infinity and NaN keep the largest exponent
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline BFloat16 to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline Float16 to_float16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (bits >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to above 65504
  if (bits < 0x38800000u) {
    // Subnormal half: adding 0.5 leaves a multiple of 2^-24, rounded to even, in the low bits.
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return {static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  return {static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13))};
}

template <class C, class T>
inline C to_compute(T x) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) return static_cast<C>(to_float(x));
  else return static_cast<C>(x);
}

template <class T, class C>
inline T from_compute(C x) {
  if constexpr (std::is_same_v<T, BFloat16>) return to_bfloat16(static_cast<float>(x));
  else if constexpr (std::is_same_v<T, Float16>) return to_float16(static_cast<float>(x));
  else return static_cast<T>(x);
}

// ------------------------------------------------------------------------------------------------------ vectors

template <class C>
struct SimdTypes;
template <>
struct SimdTypes<float> {
  using Int = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr float kRoundMagic = 0x1.8p23f, kSmallestExponent = -126.0f, kLargestExponent = 128.0f;
};
template <>
struct SimdTypes<double> {
  using Int = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr double kRoundMagic = 0x1.8p52, kSmallestExponent = -1022.0, kLargestExponent = 1024.0;
};

template <class C>
struct Simd {
  static constexpr int kLanes = kVectorBytes / sizeof(C);
  using Int = typename SimdTypes<C>::Int;
  typedef C V __attribute__((vector_size(kVectorBytes)));
  typedef Int IV __attribute__((vector_size(kVectorBytes)));
  // Pairs of 16-bit elements are loaded as C, too.
  typedef C Unaligned __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));

  static V load(const C* p) { return *reinterpret_cast<const Unaligned*>(p); }
  static void store(C* p, V x) { *reinterpret_cast<Unaligned*>(p) = x; }
  static V set1(C x) { return x - V{}; }
  static V zero() { return V{}; }

  static V iota() {
    V x;
    for (int lane = 0; lane < kLanes; ++lane) x[lane] = static_cast<C>(lane);
    return x;
  }

  static V fma(V a, V b, V c) {
#if defined(__AVX512F__)
    if constexpr (sizeof(C) == 4) return _mm512_fmadd_ps(a, b, c);
    else return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
    if constexpr (sizeof(C) == 4) return _mm256_fmadd_ps(a, b, c);
    else return _mm256_fmadd_pd(a, b, c);
#else
    return a * b + c;
#endif
  }

  // The larger; b if either is NaN.
  static V max(V a, V b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(C) == 4) return _mm512_max_ps(a, b);
    else return _mm512_max_pd(a, b);
#elif defined(__AVX2__)
    if constexpr (sizeof(C) == 4) return _mm256_max_ps(a, b);
    else return _mm256_max_pd(a, b);
#else
    return a > b ? a : b;
#endif
  }

  // The smaller; b if either is NaN.
  static V min(V a, V b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(C) == 4) return _mm512_min_ps(a, b);
    else return _mm512_min_pd(a, b);
#elif defined(__AVX2__)
    if constexpr (sizeof(C) == 4) return _mm256_min_ps(a, b);
    else return _mm256_min_pd(a, b);
#else
    return a < b ? a : b;
#endif
  }

  // a * b, rounded before anything is added to it: compilers must not make one multiply-add of both.
  static V product(V a, V b) {
    V x = a * b;
    asm("" : ATTNKERN_IN_REGISTER(x));
    return x;
  }

  // a in the lanes whose bits are set, b in the others.
  static V select(uint64_t bits, V a, V b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(C) == 4) return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), b, a);
    else return _mm512_mask_blend_pd(static_cast<__mmask8>(bits), b, a);
#else
    IV lane{};  // the bit of each, or how far it is from the sign, by which AVX2 selects
#if defined(__AVX2__)
    for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<Int>(8 * sizeof(C) - 1) - i;
    return (IV{} + static_cast<Int>(bits)) << lane < 0 ? a : b;
#else
    for (int i = 0; i < kLanes; ++i) lane[i] = Int{1} << i;
    return ((IV{} + static_cast<Int>(bits)) & lane) != 0 ? a : b;
#endif
#endif
  }

  // 2^y for any y. -inf gives 0, what is too large gives inf, NaN gives NaN. y = n + f with n = round(y); a minimax
  // polynomial for 2^f on [-1/2, 1/2], constant term exactly 1: 1 ulp for results that are not subnormal.
  template <Precision kPrecision = Precision::kFull>
  static V exp2(V y) {
#if defined(__AVX512F__)
    // scalef(anything, -inf) is 0. roundscale and a difference: reduce would take the adders twice as long.
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    if constexpr (sizeof(C) == 4) {
      const V n = _mm512_roundscale_ps(y, kNearest);
      return _mm512_scalef_ps(exp2_polynomial<kPrecision>(y - n), n);
    } else {
      const V n = _mm512_roundscale_pd(y, kNearest);
      return _mm512_scalef_pd(exp2_polynomial<kPrecision>(y - n), n);
    }
#else
    using Types = SimdTypes<C>;
    const V smallest = set1(Types::kSmallestExponent), magic = set1(Types::kRoundMagic);
    // Past the largest exponent n would reach the sign. There n is that exponent and f is 0: the bits of infinity.
    const V clamped = min(set1(Types::kLargestExponent), max(smallest, y));
    const V shifted = clamped + magic;  // n in the low bits of the mantissa
    const V p = exp2_polynomial<kPrecision>(clamped - (shifted - magic));
    const V result = (V)((IV)p + ((IV)shifted << Types::kMantissaBits));
    return y < smallest ? zero() : result;
#endif
  }

  // Natural logarithm of a positive normal number, infinity or NaN; 1 ulp. x = 2^n m with m in [sqrt(1/2), sqrt(2)),
  // polynomial of Cephes' logf for log(1 + (m - 1)).
  static V log(V x) {
    if constexpr (sizeof(C) == 4) {
      const IV bits = (IV)x;
      const IV exponent = (bits - 0x3f3504f3) >> 23;
      const V m = (V)(bits - (exponent << 23)) - set1(1.0f), n = __builtin_convertvector(exponent, V);
      const V square = m * m;
      V p = set1(7.0376836292e-2f);
      p = fma(p, m, set1(-1.1514610310e-1f));
      p = fma(p, m, set1(1.1676998740e-1f));
      p = fma(p, m, set1(-1.2420140846e-1f));
      p = fma(p, m, set1(1.4249322787e-1f));
      p = fma(p, m, set1(-1.6668057665e-1f));
      p = fma(p, m, set1(2.0000714765e-1f));
      p = fma(p, m, set1(-2.4999993993e-1f));
      p = fma(p, m, set1(3.3333331174e-1f));
      p = fma(n, set1(-2.12194440e-4f), p * m * square);
      const V result = fma(n, set1(0.693359375f), m + fma(square, set1(-0.5f), p));
      return x - x == zero() ? result : x;
    } else {
      C lanes[kLanes];
      store(lanes, x);
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = std::log(lanes[lane]);
      return load(lanes);
    }
  }

  template <Precision kPrecision>
  static V exp2_polynomial(V f) {
    static_assert(sizeof(C) == 4 || kPrecision == Precision::kFull);
    if constexpr (kPrecision == Precision::kProbability) {
      V p = set1(5.500814e-02f);
      p = fma(p, f, set1(2.42209e-01f));
      p = fma(p, f, set1(6.932828e-01f));
      return fma(p, f, set1(1.0f));
    } else if constexpr (kPrecision == Precision::kSum) {
      V p = set1(1.32647254e-03f);
      p = fma(p, f, set1(9.67151277e-03f));
      p = fma(p, f, set1(5.55073375e-02f));
      p = fma(p, f, set1(2.40222421e-01f));
      p = fma(p, f, set1(6.93146978e-01f));
      return fma(p, f, set1(1.0f));
    } else if constexpr (sizeof(C) == 4) {
      V p = set1(1.53533606116304820e-04f);
      p = fma(p, f, set1(1.33988748668966416e-03f));
      p = fma(p, f, set1(9.61843736649206291e-03f));
      p = fma(p, f, set1(5.55033246969316232e-02f));
      p = fma(p, f, set1(2.40226479134982629e-01f));
      p = fma(p, f, set1(6.93147202855970535e-01f));
      return fma(p, f, set1(1.0f));
    } else {
      V p = set1(4.43480616380895782e-10);
      p = fma(p, f, set1(7.07377978783447801e-09));
      p = fma(p, f, set1(1.01781989209997842e-07));
      p = fma(p, f, set1(1.32154352948921066e-06));
      p = fma(p, f, set1(1.52527334960647091e-05));
      p = fma(p, f, set1(1.54035304571074590e-04));
      p = fma(p, f, set1(1.33335581467701469e-03));
      p = fma(p, f, set1(9.61812910759409986e-03));
      p = fma(p, f, set1(5.55041086648200982e-02));
      p = fma(p, f, set1(2.40226506959101305e-01));
      p = fma(p, f, set1(6.93147180559945286e-01));
      return fma(p, f, set1(1.0));
    }
  }

  static bool all(IV mask) {
#if defined(__AVX512F__)
    if constexpr (sizeof(C) == 4) return _mm512_movepi32_mask((__m512i)mask) == 0xffff;
    else return _mm512_movepi64_mask((__m512i)mask) == 0xff;
#elif defined(__AVX2__)
    return _mm256_movemask_epi8((__m256i)mask) == -1;
#endif
    Int common = -1;
    for (int lane = 0; lane < kLanes; ++lane) common &= mask[lane];
    return common != 0;
  }

  // ------------------------------------------------------------------ loads and stores of a storage type

#if defined(__AVX512F__)
  // A vector of 16-bit elements.
  template <class T>
  static V widen(__m256i elements) {
    if constexpr (std::is_same_v<T, BFloat16>) return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(elements), 16);
    else return _mm512_cvtph_ps(elements);
  }
#endif

  template <class T>
  static V load_as(const T* p) {
    if constexpr (std::is_same_v<T, C>) {
      return load(p);
#if defined(__AVX512F__)
    } else if constexpr (sizeof(T) == 2 && sizeof(C) == 4) {
      return widen<T>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    } else if constexpr (std::is_same_v<T, BFloat16> && sizeof(C) == 4) {
      const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      return (V)_mm256_slli_epi32(wide, 16);
    } else if constexpr (std::is_same_v<T, Float16> && sizeof(C) == 4) {
      return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
    } else if constexpr (std::is_same_v<T, Float16> && sizeof(C) == 4) {
      return (V)vcvt_f32_f16(vld1_f16(reinterpret_cast<const __fp16*>(p)));
#endif
    } else {
      C lanes[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = to_compute<C>(p[lane]);
      return load(lanes);
    }
  }

  template <class T>
  static void store_as(T* p, V x) {
    if constexpr (std::is_same_v<T, C>) {
      store(p, x);
#if defined(__AVX512F__)
    } else if constexpr (std::is_same_v<T, Float16> && sizeof(C) == 4) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    } else if constexpr (std::is_same_v<T, Float16> && sizeof(C) == 4) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    } else if constexpr (std::is_same_v<T, Float16> && sizeof(C) == 4) {
      vst1_f16(reinterpret_cast<__fp16*>(p), vcvt_f16_f32((float32x4_t)x));
#endif
#if defined(__AVX512BF16__)
    } else if constexpr (std::is_same_v<T, BFloat16> && sizeof(C) == 4) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));  // subnormals become 0
#else
    } else if constexpr (std::is_same_v<T, BFloat16> && sizeof(C) == 4) {
      // to_bfloat16 for all lanes: round to nearest even, NaN stays NaN.
      typedef int16_t Half __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));
      const IV bits = (IV)x, high = bits >> 16;
      const IV rounded = (bits + 0x7fff + (high & 1)) >> 16;
      const IV result = x == x ? rounded : high | 0x40;
      *reinterpret_cast<Half*>(p) = __builtin_convertvector(result, Half);
#endif
    } else {
      C lanes[kLanes];
      store(lanes, x);
      for (int lane = 0; lane < kLanes; ++lane) p[lane] = from_compute<T>(lanes[lane]);
    }
  }

  // One after the other.
  template <class T>
  static void store_two_as(T* p, V first, V second) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16> && sizeof(C) == 4)
      return _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second, first));
#endif
    store_as(p, first);
    store_as(p + kLanes, second);
  }

  // The first n lanes (0 <= n <= kLanes); the others are 0.
  template <class T>
  static V load_as(const T* p, int64_t n) {
    if (n >= kLanes) return load_as(p);
#if defined(__AVX512F__)
    const auto mask = static_cast<__mmask16>((1u << n) - 1);
    if constexpr (std::is_same_v<T, C> && sizeof(C) == 4) return _mm512_maskz_loadu_ps(mask, p);
    else if constexpr (std::is_same_v<T, C>) return _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask), p);
    else if constexpr (sizeof(T) == 2 && sizeof(C) == 4) return widen<T>(_mm256_maskz_loadu_epi16(mask, p));
#endif
    T lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
    return load_as(static_cast<const T*>(lanes));
  }

  template <class T>
  static void store_as(T* p, V x, int64_t n) {
    if (n >= kLanes) return store_as(p, x);
#if defined(__AVX512F__)
    const auto mask = static_cast<__mmask16>((1u << n) - 1);
    if constexpr (std::is_same_v<T, C> && sizeof(C) == 4) return _mm512_mask_storeu_ps(p, mask, x);
    else if constexpr (std::is_same_v<T, C>) return _mm512_mask_storeu_pd(p, static_cast<__mmask8>(mask), x);
    else if constexpr (std::is_same_v<T, Float16> && sizeof(C) == 4)
      return _mm256_mask_storeu_epi16(p, mask, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#endif
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16> && sizeof(C) == 4)
      return _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x));
#endif
    T lanes[kLanes];
    store_as(static_cast<T*>(lanes), x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
  }

  // Whether two vectors become pairs of T's, first and second of a lane side by side in 32 bits.
  template <class T>
  static constexpr bool kPairs =
#if defined(__AVX512BF16__)
      sizeof(C) == 4 && sizeof(T) == 2;
#elif defined(__AVX512F__)
      sizeof(C) == 4 && std::is_same_v<T, Float16>;
#else
      false;
#endif
#if defined(__AVX512F__)
  template <class T>
  static __m512i pairs(V first, V second) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>) {
      // cvtne2ps leaves [first | second]; the permutation interleaves them.
      alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                               21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                               11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
      return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), both);
    }
#endif
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(first, _MM_FROUND_TO_NEAREST_INT));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(second, _MM_FROUND_TO_NEAREST_INT));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
#endif

  // ------------------------------------------------------------------------------------------- across lanes

  // In place: row r, lane c becomes row c, lane r. log2(kLanes) rounds, each exchanging blocks of 2^round lanes.
  template <class Vector>
  static void transpose(Vector (&rows)[kLanes]) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) return transpose_16(rows);
#endif
    transpose_round<1>(rows);
  }

  // Of a and then of b, within every kWithin lanes: every second part of kPart lanes, from number kFrom on.
  template <int kPart, int kWithin, int kFrom>
  static V every_second(V a, V b) {
    return parts_of<kPart, kWithin, kFrom>(a, b, std::make_integer_sequence<int, kLanes>{});
  }

  // Lane t of x[i * kCount] becomes the sum over lanes [i * kCount, (i + 1) * kCount) of x[t]: rounds of adding
  // neighbours, each halving the vectors, then of a transposition. First within 128 bits, then these as a whole: no
  // shuffle needs an index register.
  template <int kCount, int kOf = kLanes, int kFrom = 1>
  static void sum_each(V (&x)[kOf]) {
    sum_round<kCount, kFrom>(x);
  }
  // Lane t of the result is the sum over all lanes of x[t].
  static V sum_each(V (&x)[kLanes]) {
    sum_each<kLanes>(x);
    return x[0];
  }

  // The kCount elements at p, which are 8 bytes or with AVX2 16, again and again.
  template <int kCount>
  static V repeat(const void* p) {
#if defined(__AVX2__)
    if constexpr (kCount * sizeof(C) == 16)
      return (V)_mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    else
#endif
    {
      static_assert(kCount * sizeof(C) == 8);
      typedef int64_t Elements __attribute__((vector_size(kVectorBytes)));
      int64_t element;
      std::memcpy(&element, p, sizeof(element));
      return (V)(Elements{} + element);
    }
  }

  // The last lane first.
  static V reverse(V x) { return reversed(x, std::make_integer_sequence<int, kLanes>{}); }

  // The largest lane, in all lanes.
  static V max_all(V x) {
    max_round<kLanes / 2>(x);
    return x;
  }

  static C sum(V x) {
    C lanes[kLanes];
    store(lanes, x);
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
  }

 private:
  template <int... kLane>
  static V reversed(V x, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(x, x, (kLanes - 1 - kLane)...);
  }
  template <int kStep>
  static void max_round(V& x) {
    if constexpr (kStep > 0) {
      x = max(x, exchange<kStep>(x, std::make_integer_sequence<int, kLanes>{}));
      max_round<kStep / 2>(x);
    }
  }
  template <int kStep, int... kLane>
  static V exchange(V x, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(x, x, (kLane ^ kStep)...);
  }

  template <int kCount, int kStep, int kOf>
  static void sum_round(V (&x)[kOf]) {
    if constexpr (kStep < kOf) {
      constexpr int kPart = kStep < kQuarter ? 1 : kQuarter, kWithin = kStep < kQuarter ? kQuarter : kLanes;
      for (int i = 0; i < kOf; i += kStep < kCount ? kStep : kCount) {
        if ((i & kStep) != 0) continue;
        const V even = every_second<kPart, kWithin, 0>(x[i], x[i + kStep]);
        const V odd = every_second<kPart, kWithin, 1>(x[i], x[i + kStep]);
        if constexpr (kStep < kCount) x[i] = even + odd;
        else x[i] = even, x[i + kStep] = odd;
      }
      sum_round<kCount, 2 * kStep>(x);
    }
  }
  static constexpr int kQuarter = 16 / sizeof(C);  // lanes of 128 bits
  template <int kPart, int kWithin, int kFrom, int... kLane>
  static V parts_of(V a, V b, std::integer_sequence<int, kLane...>) {
    constexpr int kEach = kWithin / kPart / 2;  // parts of a, and of b
    const auto from = [](int lane) constexpr {
      const int part = lane % kWithin / kPart;
      return (part < kEach ? 0 : kLanes) + lane / kWithin * kWithin + (part % kEach * 2 + kFrom) * kPart + lane % kPart;
    };
    return __builtin_shufflevector(a, b, from(kLane)...);
  }

#if defined(__AVX512F__)
  // 64 shuffles of one uop each, none of which needs an index register: 4x4 within the 128-bit quarters of four
  // neighbouring rows, then 4x4 of the quarters.
  static void transpose_16(__m512 (&rows)[16]) {
    __m512 quads[16];
    for (int q = 0; q < 16; q += 4) {
      const __m512d a = (__m512d)_mm512_unpacklo_ps(rows[q], rows[q + 1]);
      const __m512d b = (__m512d)_mm512_unpackhi_ps(rows[q], rows[q + 1]);
      const __m512d c = (__m512d)_mm512_unpacklo_ps(rows[q + 2], rows[q + 3]);
      const __m512d d = (__m512d)_mm512_unpackhi_ps(rows[q + 2], rows[q + 3]);
      quads[q] = (__m512)_mm512_unpacklo_pd(a, c);
      quads[q + 1] = (__m512)_mm512_unpackhi_pd(a, c);
      quads[q + 2] = (__m512)_mm512_unpacklo_pd(b, d);
      quads[q + 3] = (__m512)_mm512_unpackhi_pd(b, d);
    }
    for (int c = 0; c < 4; ++c) {
      const __m512 low01 = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x44);
      const __m512 high01 = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xee);
      const __m512 low23 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x44);
      const __m512 high23 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xee);
      rows[c] = _mm512_shuffle_f32x4(low01, low23, 0x88);
      rows[4 + c] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
      rows[8 + c] = _mm512_shuffle_f32x4(high01, high23, 0x88);
      rows[12 + c] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    }
  }
#endif

  template <int kStep, class Vector>
  static void transpose_round(Vector (&rows)[kLanes]) {
    if constexpr (kStep < kLanes) {
      for (int row = 0; row < kLanes; ++row) {
        if (row & kStep) continue;
        const Vector a = rows[row], b = rows[row + kStep];
        rows[row] = exchange_low<kStep>(a, b, std::make_integer_sequence<int, kLanes>{});
        rows[row + kStep] = exchange_high<kStep>(a, b, std::make_integer_sequence<int, kLanes>{});
      }
      transpose_round<kStep * 2>(rows);
    }
  }
  template <int kStep, class Vector, int... kLane>
  static Vector exchange_low(Vector a, Vector b, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(a, b, ((kLane & kStep) ? kLanes + kLane - kStep : kLane)...);
  }
  template <int kStep, class Vector, int... kLane>
  static Vector exchange_high(Vector a, Vector b, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(a, b, ((kLane & kStep) ? kLanes + kLane : kLane + kStep)...);
  }
};

}  // namespace
}  // namespace attnkern::cpu
