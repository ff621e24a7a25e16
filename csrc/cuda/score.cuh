// What happens between Q K^T and P V, for both passes: scale, softcap, bias, band, dropout.
//
// Two variants of every kernel. The fast path has a positive scale and nothing else but the band: its scores stay raw
// products, and the scale is part of the exponent's factor. The generic one has every feature by branches that are the
// same for all threads; its scores are in the natural-log domain (not times log2 e: a bias of finfo.min would
// overflow).
//
// Functions here work on one accumulator row tile of mma.m16n8k16: s[n][e] is row `row + e / 2 * 8`, column
// `col + n * 8 + e % 2`, where `row` includes lane / 4 and `col` lane % 4 * 2. Rows are queries and columns keys, or
// the other way round if kTransposed.
#pragma once

#include <algorithm>

#include "common/params.h"
#include "common/philox.h"
#include "cuda/ptx.cuh"

namespace attnkern::cuda {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.693147180559945309417f;
inline constexpr float kInfinity = __builtin_huge_valf();

enum class BiasKind : int32_t { kNone, kBool, kFloat32, kElement };  // kElement: the dtype of q

struct Score {
  float scale;    // fast path: softmax_scale * log2(e); generic: softmax_scale, over softcap if there is one
  float softcap;  // 0: off
  int32_t seqlen_q, seqlen_k;
  Band band;
  int32_t low, high;  // the same: query i attends to key j iff low <= j - i <= high; what is far out is cut to 30 bits
  const void* bias;
  int64_t bias_stride[4];
  BiasKind bias_kind;
  uint32_t dropout_threshold;  // 0: no dropout
  float dropout_scale;         // of what is kept
  bool in_bits;                // a bool mask is, and has its rows at multiples of 8 bytes
  const int64_t* seeds;
  int32_t seeded_batch;   // batch elements per seed
  int32_t heads;          // of queries
  const float* sinks;     // (batch, heads), contiguous; null: none
  const int32_t* ranges;  // of keys, common/params.h; null: all keys
  int64_t range_stride[3];
  int32_t range_count;
  const int4* summary;  // of the ranges (ranges.cu), for the backward pass
  int64_t summary_stride[2];
};

// Whether the fast path computes this problem.
inline bool is_fast_path(const Attention& p) {
  return p.softcap == 0 && p.bias.data == nullptr && p.dropout_p == 0 && p.softmax_scale > 0 &&
         p.ranges.data == nullptr;
}

// What Hopper's kernels lack of how a problem's scores are made, null if nothing.
inline const char* beyond_sm90(const Attention& p) {
  if (p.bias.data != nullptr) return "there is a mask or bias";
  if (p.dropout_p > 0) return "there is dropout";
  return nullptr;
}

inline Score score_of(const Attention& p, bool fast_path) {
  Score s{};
  s.scale = static_cast<float>(fast_path ? p.softmax_scale * 1.4426950408889634074
                                         : (p.softcap != 0 ? p.softmax_scale / p.softcap : p.softmax_scale));
  s.softcap = static_cast<float>(p.softcap);
  s.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  s.seqlen_k = static_cast<int32_t>(p.seqlen_k);
  s.band = p.band;
  constexpr int64_t kFar = (int64_t{1} << 30) - 1;
  s.low = static_cast<int32_t>(std::clamp(p.band.offset - p.band.left, -kFar, kFar));
  s.high = static_cast<int32_t>(std::clamp(p.band.offset + p.band.right, -kFar, kFar));
  s.bias = p.bias.data;
  for (int n = 0; n < 4; ++n) s.bias_stride[n] = p.bias.stride[n];
  s.bias_kind = p.bias.data == nullptr            ? BiasKind::kNone
                : p.bias_dtype == DType::kBool    ? BiasKind::kBool
                : p.bias_dtype == DType::kFloat32 ? BiasKind::kFloat32
                                                  : BiasKind::kElement;
  s.in_bits = p.bits;
  s.dropout_threshold = philox::threshold(p.dropout_p);
  s.dropout_scale = p.dropout_p < 1 ? static_cast<float>(1 / (1 - p.dropout_p)) : 0.f;
  s.seeds = p.dropout_p > 0 ? p.seeds : nullptr;
  s.seeded_batch = static_cast<int32_t>(p.seed_count > 0 ? p.batch / p.seed_count : p.batch);
  s.heads = static_cast<int32_t>(p.heads_q);
  s.sinks = static_cast<const float*>(p.sinks.data);
  s.ranges = p.ranges.data;
  for (int n = 0; n < 3; ++n) s.range_stride[n] = p.ranges.stride[n];
  s.range_count = static_cast<int32_t>(p.ranges.count);
  return s;
}

// The key ranges of a head's first query, null if there are none.
__device__ __forceinline__ const int32_t* ranges_of(const Score& p, int batch, int head) {
  return p.ranges == nullptr ? nullptr : p.ranges + batch * p.range_stride[0] + head * p.range_stride[1];
}

// The keys that a query attends to by its ranges and the band, in two intervals, either of which may be empty.
struct OwnKeys {
  int begin[2], end[2];

  __device__ __forceinline__ bool has(int key) const {
    return (key >= begin[0] && key < end[0]) || (key >= begin[1] && key < end[1]);
  }
};

// ends_of(n): number n of its ranges' beginnings and ends. A query past the end has no key.
template <typename EndsOf>
__device__ __forceinline__ OwnKeys own_keys_by(const Score& p, int query, EndsOf ends_of) {
  OwnKeys own = {};
  if (query >= p.seqlen_q) return own;
  const int first = max(query + p.low, 0), end = min(query + p.high + 1, p.seqlen_k);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    if (which >= p.range_count) break;
    own.begin[which] = min(max(ends_of(2 * which), first), end);
    own.end[which] = max(min(ends_of(2 * which + 1), end), own.begin[which]);
  }
  return own;
}
// ranges: of the query's head.
__device__ __forceinline__ OwnKeys own_keys(const Score& p, const int32_t* ranges, int query) {
  const int32_t* ends = ranges + query * p.range_stride[2];
  return own_keys_by(p, query, [&](int n) { return ends[n]; });
}

// What of the above belongs to one head of one batch element.
struct HeadScore {
  int64_t bias;           // offset of its first element
  uint32_t key[2];        // dropout's seed
  uint32_t counter[2];    // and the head's number, counted from the first batch element of its seed
  const int32_t* ranges;  // of its first query; null: all keys
};

__device__ __forceinline__ HeadScore head_score(const Score& p, int batch, int head) {
  HeadScore h{};
  h.bias = batch * p.bias_stride[0] + head * p.bias_stride[1];
  h.ranges = ranges_of(p, batch, head);
  if (p.seeds != nullptr) {
    const uint64_t seed = static_cast<uint64_t>(p.seeds[batch / p.seeded_batch]);
    const uint64_t number = static_cast<uint64_t>(batch % p.seeded_batch) * p.heads + head;
    h.key[0] = static_cast<uint32_t>(seed), h.key[1] = static_cast<uint32_t>(seed >> 32);
    h.counter[0] = static_cast<uint32_t>(number), h.counter[1] = static_cast<uint32_t>(number >> 32);
  }
  return h;
}

// tanh by exp2 of a negative number: no overflow. Near 0, where 1 - e cancels, by an odd polynomial (minimax for the
// relative error, 2^-26 before rounding): a large cap makes of all scores such small numbers, and multiplies what they
// lost. Relative error below 2^-21.
__device__ __forceinline__ float tanh_of(float x) {
  const float e = ptx::ex2(fabsf(x) * (-2.f * kLog2E)), square = x * x;
  const float p = fmaf(fmaf(fmaf(0.017256994f, square, -0.05305295f), square, 0.13325988f), square, -0.3333315f);
  return square < 0.25f ? fmaf(p * square, x, x) : copysignf(__fdividef(1.f - e, 1.f + e), x);
}

// As exact as scores of T want it.
template <typename T>
__device__ __forceinline__ float tanh_for(float x) {
  return std::is_same_v<T, float> ? tanhf(x) : tanh_of(x);
}

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __half2float(x);
  } else {
    return __bfloat162float(x);
  }
}

// A raw product -> a score in the natural-log domain, without bias and band.
template <typename T>
__device__ __forceinline__ float capped(const Score& p, float s) {
  const float x = s * p.scale;
  return p.softcap != 0.f ? tanh_for<T>(x) * p.softcap : x;
}

// A word of the row of bits that begins at byte `at`, about the keys from a multiple of its size on. Bit 0 is that of
// `key`, one of the first eight. Past the end, the last word is read: such scores are masked or never stored.
template <typename Word>
__device__ __forceinline__ auto bits_of(const Score& p, int64_t at, int key) {
  constexpr int kBytes = sizeof(Word);
  const uint8_t* bytes = static_cast<const uint8_t*>(p.bias) + at + min(key >> 3, (p.seqlen_k - 1) >> 3 & -kBytes);
  return *reinterpret_cast<const Word*>(bytes) >> (key & 7);
}

// The widest word of which tiles side by side have whole ones.
template <int kTiles>
using WordOfTiles = std::conditional_t<
    kTiles % 8 == 0, uint64_t,
    std::conditional_t<kTiles % 4 == 0, uint32_t, std::conditional_t<kTiles % 2 == 0, uint16_t, uint8_t>>>;

// -inf where the bits of a query's row say so. Where rows are keys, those of 16 keys are 2 bytes.
template <bool kTransposed, int kTiles>
__device__ __forceinline__ void hide_by_bits(const Score& p, const HeadScore& h, float (&s)[kTiles][4], int row,
                                             int col) {
  const auto row_of = [&](int query) { return h.bias + min(query, p.seqlen_q - 1) * p.bias_stride[2]; };
  if constexpr (kTransposed) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int bits = bits_of<uint16_t>(p, row_of(col + n * 8 + e), row);
        s[n][e] = bits & 1 ? s[n][e] : -kInfinity;
        s[n][2 + e] = bits >> 8 & 1 ? s[n][2 + e] : -kInfinity;
      }
    }
  } else {
    using Word = WordOfTiles<kTiles>;
    constexpr int kBytes = sizeof(Word);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int first = 0; first < kTiles; first += kBytes) {
        const auto bits = bits_of<Word>(p, row_of(row + half * 8), col + first * 8);
#pragma unroll
        for (int n = 0; n < kBytes; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[first + n][2 * half + e];
            x = bits >> (n * 8 + e) & 1 ? x : -kInfinity;
          }
        }
      }
    }
  }
}

// Raw products -> scores in the natural-log domain, without the band. Generic variant only.
// If kKeepTanh, `t` gets tanh(scale * s / softcap) for score_gradient; not written without a softcap.
template <typename T, bool kTransposed, bool kKeepTanh, int kTiles>
__device__ __forceinline__ void finish_scores(const Score& p, const HeadScore& h, float (&s)[kTiles][4], int row,
                                              int col, float (&t)[kKeepTanh ? kTiles : 1][4]) {
  if (p.softcap != 0.f) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float tanh = tanh_for<T>(s[n][e] * p.scale);
        if constexpr (kKeepTanh) t[n][e] = tanh;
        s[n][e] = tanh * p.softcap;
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= p.scale;
    }
  }
  if (p.bias_kind == BiasKind::kNone) return;
  // Past the ends the last row and column are read: those scores are masked or never stored.
  const auto each = [&](auto convert) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + e / 2 * 8, c = col + n * 8 + e % 2;
        const int i = min(kTransposed ? c : r, p.seqlen_q - 1), j = min(kTransposed ? r : c, p.seqlen_k - 1);
        convert(s[n][e], h.bias + i * p.bias_stride[2] + j * p.bias_stride[3]);
      }
    }
  };
  if (p.bias_kind == BiasKind::kBool) {
    if (p.in_bits) {
      hide_by_bits<kTransposed>(p, h, s, row, col);
    } else {
      const uint8_t* bias = static_cast<const uint8_t*>(p.bias);
      each([&](float& x, int64_t at) { x = bias[at] != 0 ? x : -kInfinity; });
    }
  } else if (p.bias_kind == BiasKind::kFloat32) {
    const float* bias = static_cast<const float*>(p.bias);
    each([&](float& x, int64_t at) { x += bias[at]; });
  } else {
    const T* bias = static_cast<const T*>(p.bias);
    each([&](float& x, int64_t at) { x += to_float(bias[at]); });
  }
}

// -inf where the query doesn't attend to the key, or one of them is past the end. Both variants.
template <bool kTransposed, int kTiles>
__device__ __forceinline__ void mask_scores(const Score& p, float (&s)[kTiles][4], int row, int col) {
  const int low = kTransposed ? -p.high : p.low, high = kTransposed ? -p.low : p.high;
  const int rows = kTransposed ? p.seqlen_k : p.seqlen_q, columns = kTransposed ? p.seqlen_q : p.seqlen_k;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + half * 8;
    const int begin = r + low, end = r < rows ? min(r + high + 1, columns) : 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = col + n * 8 + e;
        float& x = s[n][2 * half + e];
        x = c >= begin && c < end ? x : -kInfinity;
      }
    }
  }
}

// Numbers [begin, end) as bits.
__device__ __forceinline__ uint32_t bits_between(int begin, int end) {
  const auto below = [](int n) { return n >= 32 ? ~0u : (1u << max(n, 0)) - 1; };
  return below(end) & ~below(begin);
}

// Masks scores by key ranges. keys_of(n) are the OwnKeys of query number n, counted from the lane's first row, or
// column if kTransposed. Which scores remain is made out first, as bits of either row: n of those in even columns, 16 +
// n in odd ones. That takes fewer registers than comparing each.
template <bool kTransposed, int kTiles, typename KeysOf>
__device__ __forceinline__ void mask_by_keys(float (&s)[kTiles][4], int row, int col, KeysOf keys_of) {
  static_assert(kTiles <= 16);
  uint32_t kept[2] = {};
  if constexpr (kTransposed) {
#pragma unroll 1
    for (int n = 0; n < 2 * kTiles; ++n) {
      const OwnKeys own = keys_of(n / 2 * 8 + n % 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        kept[half] |= static_cast<uint32_t>(own.has(row + half * 8)) << (n / 2 + n % 2 * 16);
      }
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const OwnKeys own = keys_of(half * 8);
#pragma unroll
      for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int begin = (own.begin[which] - col - e + 7) >> 3, end = (own.end[which] - col - e + 7) >> 3;
          kept[half] |= (bits_between(begin, end) & 0xFFFFu) << 16 * e;
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = kept[e / 2] >> (n + e % 2 * 16) & 1 ? s[n][e] : -kInfinity;
  }
}

// Either, as the call says.
template <bool kTransposed, int kTiles>
__device__ __forceinline__ void mask_scores(const Score& p, const HeadScore& h, float (&s)[kTiles][4], int row,
                                            int col) {
  if (h.ranges == nullptr) {
    mask_scores<kTransposed>(p, s, row, col);
  } else {
    const auto keys_of = [&](int n) { return own_keys(p, h.ranges, (kTransposed ? col : row) + n); };
    mask_by_keys<kTransposed>(s, row, col, keys_of);
  }
}

// Philox-4x32-10 (common/philox.h).
__device__ __forceinline__ uint4 philox_words(const HeadScore& h, uint32_t c0, uint32_t c1) {
  uint32_t x0 = c0, x1 = c1, x2 = h.counter[0], x3 = h.counter[1], k0 = h.key[0], k1 = h.key[1];
#pragma unroll
  for (int round = 0; round < philox::kRounds; ++round) {
    const uint32_t high0 = __umulhi(philox::kMultiplier0, x0), low0 = philox::kMultiplier0 * x0;
    const uint32_t high1 = __umulhi(philox::kMultiplier1, x2), low1 = philox::kMultiplier1 * x2;
    x0 = high1 ^ x1 ^ k0, x1 = low1;
    x2 = high0 ^ x3 ^ k1, x3 = low0;
    k0 += philox::kWeyl0, k1 += philox::kWeyl1;
  }
  return make_uint4(x0, x1, x2, x3);
}

// Which entries of four neighbouring tiles (32 columns, the first a multiple of 32) survive dropout: bit 4 * n + e.
// Rows are queries; the lane's `row` and `col` as above.
__device__ __forceinline__ uint32_t dropout_keep(const Score& p, const HeadScore& h, int row, int col) {
  uint32_t keep = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 words = philox_words(h, col / 32 * 4 + col % 8 / 2, row + half * 8);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      keep |= static_cast<uint32_t>((word[n] & 0xFFFFu) >= p.dropout_threshold) << (4 * n + 2 * half);
      keep |= static_cast<uint32_t>((word[n] >> 16) >= p.dropout_threshold) << (4 * n + 2 * half + 1);
    }
  }
  return keep;
}

// `dropout_keep` for rows that are keys, of one or two row tiles, the first key a multiple of 16 or 32, and one column
// tile of 8 queries: bit e of keep[m]. A call's words belong to keys 8 apart, which this lane has, their halves to
// neighbouring keys, which are this lane's row and that of the lane 4 away. So each of the two makes the words of one
// of their two queries, and gives the other one half.
template <int kRowTiles>
__device__ __forceinline__ void dropout_keep_transposed(const Score& p, const HeadScore& h, int row, int col,
                                                        uint32_t (&keep)[kRowTiles]) {
  static_assert(kRowTiles <= 2);
  const bool odd = row % 2 != 0;
  const uint4 words = philox_words(h, row / 32 * 4 + row % 8 / 2, col + odd);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const bool upper = kRowTiles == 2 ? m == 1 : row / 16 % 2 != 0;
    const uint32_t first = upper ? words.z : words.x, second = upper ? words.w : words.y;
    const uint32_t low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
    const uint32_t own = odd ? high : low;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
    keep[m] = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t bits = (e != 0) == odd ? own : other;
      keep[m] |= static_cast<uint32_t>((bits & 0xFFFFu) >= p.dropout_threshold) << e;
      keep[m] |= static_cast<uint32_t>((bits >> 16) >= p.dropout_threshold) << (2 + e);
    }
  }
}

// The probability of a score under a known log-sum-exp, for the backward pass. A row without keys has an lse of -inf:
// pass +inf for it (and for rows past the end), then its probabilities are 0.
template <bool kFastPath>
__device__ __forceinline__ float probability(const Score& p, float s, float lse) {
  if constexpr (kFastPath) return ptx::ex2(fmaf(s, p.scale, -lse * kLog2E));
  return ptx::ex2((s - lse) * kLog2E);
}

// dS = P (dP - delta): of the score after the bias. What flows on to the raw product is dS * product_factor, with
// `t` = tanh from finish_scores, times softmax_scale (which the caller applies once, to dQ and dK).
__device__ __forceinline__ float product_factor(const Score& p, float t) {
  return p.softcap != 0.f ? 1.f - t * t : 1.f;
}

}  // namespace attnkern::cuda
