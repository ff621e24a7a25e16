// The bias of a block as a tile of numbers, a bool mask and key ranges as bits, and which blocks a bias excludes.
#pragma once

#include <bit>

#include "ranges.h"

namespace attnkern::cpu {
namespace {

template <class C>
inline constexpr C kInfinity = static_cast<C>(__builtin_inf());

// A bool mask as a bias: true = attend.
template <class C, class T>
inline C bias_value(T x) {
  if constexpr (std::is_same_v<T, bool>) return x ? C(0) : -kInfinity<C>;
  else return to_compute<C>(x);
}

// The first n of a vector of entries, the others 0.
template <class C, class T>
inline typename Simd<C>::V load_bias(const T* p, int64_t n) {
  using S = Simd<C>;
  if constexpr (std::is_same_v<T, bool>) {
#if defined(__AVX512BW__)
    if (sizeof(C) == 4 && n >= S::kLanes) {
      const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return (typename S::V)_mm512_maskz_mov_ps(_mm_testn_epi8_mask(entries, entries),
                                                _mm512_set1_ps(-kInfinity<float>));
    }
#endif
    typedef int8_t Bytes __attribute__((vector_size(S::kLanes)));
    Bytes bytes = Bytes{} + int8_t{1};
    std::memcpy(&bytes, p, static_cast<size_t>(min64(n, S::kLanes)));
    return __builtin_convertvector(bytes, typename S::IV) != 0 ? S::zero() : S::set1(-kInfinity<C>);
  } else {
    return S::load_as(p, n);
  }
}

// tile[loop][lane] for loops x lanes entries of the bias; lanes are filled up to whole vectors with 0.
template <class C, class T>
inline void bias_tile_of(const T* source, int64_t loop_stride, int64_t lane_stride, int64_t loops, int64_t lanes,
                         C* tile) {
  using S = Simd<C>;
  using V = typename S::V;
  constexpr int kLanes = S::kLanes;
  const int64_t vectors = (lanes + kLanes - 1) / kLanes;
  if (lane_stride == 0) {
    for (int64_t i = 0; i < loops; ++i) {
      const V value = S::set1(bias_value<C>(source[i * loop_stride]));
      for (int64_t v = 0; v < vectors; ++v) S::store(tile + i * kTile<C> + v * kLanes, value);
    }
  } else if (lane_stride == 1) {
    for (int64_t i = 0; i < loops; ++i)
      for (int64_t v = 0; v < vectors; ++v)
        S::store(tile + i * kTile<C> + v * kLanes,
                 load_bias<C>(source + i * loop_stride + v * kLanes, lanes - v * kLanes));
  } else if (lane_stride == -1) {
    for (int64_t i = 0; i < loops; ++i)
      for (int64_t v = 0; v < vectors; ++v) {
        const T* first = source + i * loop_stride - v * kLanes;
        C* target = tile + i * kTile<C> + v * kLanes;
        if (const int64_t count = lanes - v * kLanes; count >= kLanes)
          S::store(target, S::reverse(load_bias<C>(first - (kLanes - 1), kLanes)));
        else
          for (int64_t lane = 0; lane < kLanes; ++lane)
            target[lane] = lane < count ? bias_value<C>(first[-lane]) : C(0);
      }
  } else if (loop_stride == 1) {
    for (int64_t v = 0; v < vectors; ++v)
      for (int64_t i = 0; i < loops; i += kLanes) {
        V block[kLanes];
        const T* row = source + v * kLanes * lane_stride + i;
        const int64_t height = min64(kLanes, lanes - v * kLanes), width = min64(kLanes, loops - i);
        if (height == kLanes && width == kLanes) {
          load_block<C>(row, lane_stride, block, [](const T* p) { return load_bias<C>(p, kLanes); });
        } else {
          for (int64_t r = 0; r < kLanes; ++r)
            block[r] = r < height ? load_bias<C>(row + r * lane_stride, width) : S::zero();
        }
        S::transpose(block);
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r)
          if (r < width) S::store(tile + (i + r) * kTile<C> + v * kLanes, block[r]);
      }
  } else {
    for (int64_t i = 0; i < loops; ++i)
      for (int64_t lane = 0; lane < vectors * kLanes; ++lane)
        tile[i * kTile<C> + lane] = lane < lanes ? bias_value<C>(source[i * loop_stride + lane * lane_stride]) : C(0);
  }
}

// A mask of bits: those of a row's keys [key, key + keys), 64 at most. Its words are whole, whatever the keys.
inline LaneBits bits_of_keys(const uint8_t* row, int64_t key, int64_t keys) {
  const auto word = [&](int64_t index) {
    LaneBits bits;
    std::memcpy(&bits, row + index * static_cast<int64_t>(sizeof(bits)), sizeof(bits));
    return bits;
  };
  const int64_t first = key / 64, shift = key % 64;
  const LaneBits bits = word(first) >> shift;
  return shift + keys <= 64 ? bits : bits | word(first + 1) << (64 - shift);
}

// A row of a mask of bits.
inline const uint8_t* row_of_bits(const Attention& p, int64_t batch, int64_t head, int64_t query) {
  return static_cast<const uint8_t*>(p.bias.data) + batch * p.bias.stride[0] + head * p.bias.stride[1] +
         query * p.bias.stride[2];
}

// bias_tile of a mask of bits, whose keys are the lanes.
template <class C>
inline void bias_tile_of_bits(const Attention& p, int64_t batch, int64_t head, int64_t query, int64_t queries,
                              int64_t key, int64_t keys, C* tile) {
  using S = Simd<C>;
  for (int64_t i = 0; i < queries; ++i) {
    const LaneBits bits = bits_of_keys(row_of_bits(p, batch, head, query + i), key, keys);
    for (int64_t lane = 0; lane < keys; lane += S::kLanes)
      S::store(tile + i * kTile<C> + lane, S::select(bits >> lane, S::zero(), S::set1(-kInfinity<C>)));
  }
}

// Bytes of an entry of the bias.
template <class T>
inline int64_t bias_bytes(const Attention& p) {
  return p.bias_dtype == DType::kBool ? sizeof(bool) : p.bias_dtype == DType::kFloat32 ? sizeof(float) : sizeof(T);
}

// Whether a bias has a row for each query, whose keys lie side by side.
// (Those of bits are so short that they needn't be prefetched.)
inline bool has_bias_rows(const Attention& p) {
  return p.bias.stride[2] != 0 && p.bias.stride[3] == 1 && !p.relative && !p.bits;
}

// Such rows, to be prefetched: `keys` of them from `key` on.
template <class T>
inline PrefetchRows bias_to_prefetch(const Attention& p, int64_t batch, int64_t head, int64_t query, int64_t queries,
                                     int64_t key, int64_t keys) {
  const int64_t size = bias_bytes<T>(p), *stride = p.bias.stride;
  const int64_t entry = batch * stride[0] + head * stride[1] + query * stride[2] + key;
  return {static_cast<const char*>(p.bias.data) + entry * size, stride[2] * size, keys > 0 ? queries : 0, keys * size};
}

// loop_dim: 3 where the loop runs over keys and the lanes over queries, 2 where it is the other way round. (A mask is
// added where the lanes are keys.)
template <class C, class T>
inline void bias_tile(const Attention& p, int loop_dim, int64_t batch, int64_t head, int64_t loop, int64_t loops,
                      int64_t lane, int64_t lanes, C* tile) {
  if (p.bits) return bias_tile_of_bits(p, batch, head, loop, loops, lane, lanes, tile);
  const int lane_dim = 5 - loop_dim;
  const int64_t offset = batch * p.bias.stride[0] + head * p.bias.stride[1] + loop * p.bias.stride[loop_dim] +
                         lane * p.bias.stride[lane_dim];
  const int64_t loop_stride = p.bias.stride[loop_dim], lane_stride = p.bias.stride[lane_dim];
  if (p.bias_dtype == DType::kBool)
    bias_tile_of(static_cast<const bool*>(p.bias.data) + offset, loop_stride, lane_stride, loops, lanes, tile);
  else if (p.bias_dtype == DType::kFloat32 && !std::is_same_v<T, float>)
    bias_tile_of(static_cast<const float*>(p.bias.data) + offset, loop_stride, lane_stride, loops, lanes, tile);
  else bias_tile_of(static_cast<const T*>(p.bias.data) + offset, loop_stride, lane_stride, loops, lanes, tile);
}

// 0 for the one entry of a mask or bias that leaves nothing of a score: false, or -inf.
inline uint8_t from_excluded(bool x) { return x; }
inline uint32_t from_excluded(float x) { return std::bit_cast<uint32_t>(x) ^ 0xff800000u; }
inline uint64_t from_excluded(double x) { return std::bit_cast<uint64_t>(x) ^ 0xfff0000000000000u; }
inline uint16_t from_excluded(BFloat16 x) { return x.bits ^ 0xff80; }
inline uint16_t from_excluded(Float16 x) { return x.bits ^ 0xfc00; }

// Whether the mask or bias excludes all of these keys from all of these queries, so that they can be left out. Stops at
// the first row with anything else. Keys that don't lie side by side aren't looked at.
template <class T>
[[gnu::noinline]] bool excludes_all(const Attention& p, int64_t batch, int64_t head, int64_t query, int64_t queries,
                                    int64_t key, int64_t keys) {
  const int64_t* stride = p.bias.stride;
  if (p.bits) {
    const uint8_t* row = row_of_bits(p, batch, head, query);
    for (int64_t r = 0, count = stride[2] == 0 ? 1 : queries; r < count; ++r, row += stride[2])
      for (int64_t j = 0; j < keys; j += 64)
        if (const int64_t some = min64(64, keys - j); (bits_of_keys(row, key + j, some) & bits_between({0, some})) != 0)
          return false;
    return true;
  }
  if (stride[3] != 1 && stride[3] != 0) return false;
  const int64_t rows = stride[2] == 0 ? 1 : queries, columns = stride[3] == 0 ? 1 : keys;
  const int64_t offset = batch * stride[0] + head * stride[1] + query * stride[2] + key * stride[3];
  const auto all_of = [&](const auto* row) {
    row += offset;
    for (int64_t r = 0; r < rows; ++r, row += stride[2]) {
      decltype(from_excluded(*row)) any = 0;
      for (int64_t c = 0; c < columns; ++c) any |= from_excluded(row[c]);
      if (any != 0) return false;
    }
    return true;
  };
  if (p.bias_dtype == DType::kBool) return all_of(static_cast<const bool*>(p.bias.data));
  if (p.bias_dtype == DType::kFloat32) return all_of(static_cast<const float*>(p.bias.data));
  return all_of(static_cast<const T*>(p.bias.data));
}

// ------------------------------------------------------------------------------------------------- bits

// Of the rows from `row` on, if there are any.
inline const LaneBits* bits_from(const LaneBits* mask, int64_t row) { return mask == nullptr ? nullptr : mask + row; }

// A row whose entries lie side by side.
inline LaneBits bits_of_row(const uint8_t* row, int64_t lanes) {
  LaneBits bits = 0;
#if defined(__AVX512BW__)
  const __m512i entries = _mm512_maskz_loadu_epi8(~__mmask64{0} >> (64 - lanes), row);
  bits = _mm512_test_epi8_mask(entries, entries);
#elif defined(__AVX2__)
  for (int64_t lane = 0; lane < lanes; lane += 32) {
    __m256i entries{};
    if (lanes - lane >= 32) std::memcpy(&entries, row + lane, sizeof(entries));
    else std::memcpy(&entries, row + lane, static_cast<size_t>(lanes - lane));
    const auto zeros = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(entries, __m256i{})));
    bits |= LaneBits{~zeros} << lane;
  }
#else
  for (int64_t lane = 0; lane < lanes; lane += 8) {
    uint64_t entries = 0;
    std::memcpy(&entries, row + lane, static_cast<size_t>(min64(8, lanes - lane)));
    entries |= entries >> 4;  // an entry that isn't 0 to its lowest bit
    entries |= entries >> 2;
    entries |= entries >> 1;
    constexpr uint64_t kLowest = 0x0101010101010101, kGather = 0x0102040810204080;
    bits |= ((entries & kLowest) * kGather >> 56) << lane;
  }
#endif
  return bits;
}

// Rows whose entries lie `lane_stride` apart, where those of a lane lie side by side.
inline void bits_of_columns(const uint8_t* source, int64_t lane_stride, int64_t loops, int64_t lanes, LaneBits* rows) {
  constexpr int kRows = 32, kLanesOfByte = 8, kBytes = sizeof(LaneBits);
  typedef uint8_t Column __attribute__((vector_size(kRows)));
  const int64_t count = min64(kRows, loops);
  for (int64_t next = 0; next < loops; next += kRows) {
    const int64_t i = min64(next, loops - count);  // the last ones overlap, so that all are whole
    uint8_t bytes[kBytes][kRows];                  // the bits of eight lanes in each row
    for (int64_t b = 0; b < kBytes; ++b) {
      Column bits{};
      for (int64_t lane = b * kLanesOfByte; lane < min64(lanes, (b + 1) * kLanesOfByte); ++lane) {
        const uint8_t* column = source + lane * lane_stride + i;
        Column entries{};
        if (count == kRows) std::memcpy(&entries, column, kRows);
        else std::memcpy(&entries, column, static_cast<size_t>(count));
        const auto bit = static_cast<uint8_t>(1 << lane % kLanesOfByte);
        bits |= (Column)(entries != 0) & (Column{} + bit);
      }
      std::memcpy(bytes[b], &bits, kRows);
    }
    for (int64_t j = 0; j < count; ++j) {
      rows[i + j] = 0;
      for (int b = 0; b < kBytes; ++b) rows[i + j] |= LaneBits{bytes[b][j]} << (kLanesOfByte * b);
    }
  }
}

// Bit j of row i becomes bit i of row j: halves of the matrix are exchanged, then halves of the halves.
[[gnu::noinline]] inline void transpose_bits(LaneBits (&rows)[64]) {
  const auto round = [&]<int kStep>(LaneBits low) __attribute__((always_inline)) {
    for (int begin = 0; begin < 64; begin += 2 * kStep)
      for (int i = begin; i < begin + kStep; ++i) {
        const LaneBits differing = (rows[i] >> kStep ^ rows[i + kStep]) & low;
        rows[i] ^= differing << kStep;
        rows[i + kStep] ^= differing;
      }
  };
  round.template operator()<32>(0x00000000ffffffff);
  round.template operator()<16>(0x0000ffff0000ffff);
  round.template operator()<8>(0x00ff00ff00ff00ff);
  round.template operator()<4>(0x0f0f0f0f0f0f0f0f);
  round.template operator()<2>(0x3333333333333333);
  round.template operator()<1>(0x5555555555555555);
}

// bits_of_mask of a mask that has them: 64 keys at a time.
inline void bits_of_bits(const Attention& p, int loop_dim, int64_t batch, int64_t head, int64_t loop, int64_t loops,
                         int64_t lane, int64_t lanes, LaneBits* rows) {
  if (loop_dim == 2) {
    const uint8_t* row = row_of_bits(p, batch, head, loop);
    for (int64_t i = 0; i < loops; ++i, row += p.bias.stride[2]) rows[i] = bits_of_keys(row, lane, lanes);
    return;
  }
  const uint8_t* first = row_of_bits(p, batch, head, lane);
  const int64_t step = p.bias.stride[2], queries = step == 0 ? 1 : lanes;
  for (int64_t next = 0; next < loops; next += 64) {
    const int64_t keys = min64(64, loops - next);
    LaneBits words[64] = {}, any = 0, all = ~LaneBits{0};
    for (int64_t i = 0; i < queries; ++i) {
      words[i] = bits_of_keys(first + i * step, loop + next, keys);
      any |= words[i], all &= words[i];
    }
    const LaneBits within = bits_between({0, keys});
    if ((any & within) == 0 || (all & within) == within || queries == 1) {  // of each key, all queries or none
      for (int64_t j = 0; j < keys; ++j) rows[next + j] = -(any >> j & 1);
    } else {
      transpose_bits(words);
      std::memcpy(rows + next, words, static_cast<size_t>(keys) * sizeof(LaneBits));
    }
  }
}

// The bits of a bool mask.
[[gnu::noinline]] inline void bits_of_mask(const Attention& p, int loop_dim, int64_t batch, int64_t head, int64_t loop,
                                           int64_t loops, int64_t lane, int64_t lanes, LaneBits* rows) {
  if (p.bits) return bits_of_bits(p, loop_dim, batch, head, loop, loops, lane, lanes, rows);
  const int64_t loop_stride = p.bias.stride[loop_dim], lane_stride = p.bias.stride[5 - loop_dim];
  const uint8_t* source = static_cast<const uint8_t*>(p.bias.data) + batch * p.bias.stride[0] +
                          head * p.bias.stride[1] + loop * loop_stride + lane * lane_stride;
  if (lane_stride != 0 && lane_stride != 1 && loop_stride == 1) {
    bits_of_columns(source, lane_stride, loops, lanes, rows);
  } else {
    for (int64_t i = 0; i < loops; ++i) {
      const uint8_t* row = source + i * loop_stride;
      if (lane_stride == 1) {
        rows[i] = bits_of_row(row, lanes);
      } else {
        rows[i] = 0;
        for (int64_t j = 0; j < (lane_stride == 0 ? 1 : lanes); ++j)
          rows[i] |= LaneBits{row[j * lane_stride] != 0} << j;
        if (lane_stride == 0) rows[i] = -rows[i];
      }
    }
  }
}

// What a bool mask and key ranges leave of `loops` rows of `lanes` lanes; the bits of lanes past the last one are set
// in rows that have any. loop_dim as in bias_tile.
inline void mask_bits(const Attention& p, int loop_dim, int64_t batch, int64_t head, int64_t loop, int64_t loops,
                      int64_t lane, int64_t lanes, LaneBits* rows) {
  if (p.bias.data != nullptr && p.bias_dtype == DType::kBool)
    bits_of_mask(p, loop_dim, batch, head, loop, loops, lane, lanes, rows);
  else
    for (int64_t i = 0; i < loops; ++i) rows[i] = ~LaneBits{0};
  if (p.ranges.data != nullptr) exclude_by_ranges(p, loop_dim, batch, head, loop, loops, lane, lanes, rows);
  const LaneBits beyond = lanes == 64 ? 0 : ~LaneBits{0} << lanes;
  for (int64_t i = 0; i < loops; ++i) rows[i] = (rows[i] & ~beyond) == 0 ? 0 : rows[i] | beyond;
}

// Which of the keys [key, key + keys), 64 at most, a query of the heads [head, head + heads) attends to.
[[gnu::noinline]] inline LaneBits attended_keys(const Attention& p, int64_t batch, int64_t head, int64_t heads,
                                                int64_t key, int64_t keys) {
  LaneBits attended = 0, rows[kBlockRows];
  for (int64_t h = head; h < head + heads; ++h)
    for (int64_t row = 0; row < p.seqlen_q; row += kBlockRows) {
      const int64_t count = min64(kBlockRows, p.seqlen_q - row);
      mask_bits(p, 2, batch, h, row, count, key, keys, rows);
      for (int64_t i = 0; i < count; ++i) {
        const Range band = p.band.visited(row + i, 1, {key, key + keys});
        attended |= rows[i] & bits_between({band.begin - key, band.end - key});
      }
    }
  return attended;
}

}  // namespace
}  // namespace attnkern::cpu
