// Moving blocks between the user's tensors and the layouts of the kernels: rows, transposed tiles, bias, dropout.
// "lane" is the dimension along the vectors (queries in the forward pass, keys in the backward pass), "loop" the other.
#pragma once

#include <bit>
#include <cstdlib>

#include "../common/params.h"
#include "../common/philox.h"
#include "gemm.h"
#include "kernels.h"

namespace attnkern::cpu {
namespace {

inline constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

template <class C>
inline constexpr int64_t kTile = 256 / sizeof(C);  // lanes of a score tile: 64 floats, 32 doubles
template <class C>
inline constexpr int64_t kTileVecs = kTile<C> / Simd<C>::kLanes;
// Rows of a score tile: half as large in pairs, it may be twice as long.
inline constexpr int64_t kBlockRows = 96;
template <class Op>
inline constexpr int64_t kBlock = kBlockRows * Op::kPack;
inline constexpr int64_t kGroup = 16;  // rows of a segment at the edge of the band

// Hands out 64-byte aligned pieces of one allocation. Built twice: without memory it only adds up the size.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    char* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// Memory of one call, as opposed to a thread's scratch: not kept.
template <class C>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<C*>(count == 0 ? nullptr : ::aligned_alloc(64, round_up(count * sizeof(C), 64)))) {
    if (count != 0 && data_ == nullptr) out_of_memory(count * static_cast<int64_t>(sizeof(C)));
  }
  ~Buffer() { ::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  C* data() const { return data_; }

 private:
  C* data_;
};

template <class T>
inline T* at(const View& view, int64_t batch, int64_t head, int64_t row = 0, int64_t column = 0) {
  return static_cast<T*>(view.data) + batch * view.stride[0] + head * view.stride[1] + row * view.stride[2] +
         column * view.stride[3];
}

// Whether rows are read as they lie in memory.
inline bool reads_in_place(const View& view, int64_t columns) { return view.stride[3] == 1 || columns <= 1; }

// What a head's tiles meet again and again comes from memory, or from far away in the caches, from this size on.
inline constexpr int64_t kFarBytes = 4 << 20;

// `rows` rows of a view from `row` on, as far as they come before `end`.
template <class T>
inline ComingRows coming_rows(const View& view, int64_t batch, int64_t head, int64_t row, int64_t rows, int64_t end,
                              int64_t columns) {
  constexpr int64_t kBytes = sizeof(T);
  const int64_t count = reads_in_place(view, columns) ? max64(0, min64(rows, end - row)) : 0;
  return {reinterpret_cast<const char*>(at<T>(view, batch, head, row)), view.stride[2] * kBytes, count,
          columns * kBytes};
}

// Rows of operands with column stride 1: the user's own memory where it will do, else a converted copy.
template <class Scalar>
struct Rows {
  const Scalar* data;
  int64_t step;  // Scalars from row to row
};

// Copies rows x columns with conversion; columns up to round_up(columns, lanes) are written, with zeros.
template <class C, class T>
inline void convert_rows(const T* source, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns,
                         C* target, int64_t step) {
  using S = Simd<C>;
  for (int64_t r = 0; r < rows; ++r, source += row_stride, target += step) {
    if (column_stride == 1) {
      for (int64_t c = 0; c < columns; c += S::kLanes) S::store(target + c, S::load_as(source + c, columns - c));
    } else {
      for (int64_t c = 0; c < columns; ++c) target[c] = to_compute<C>(source[c * column_stride]);
      for (int64_t c = columns; c < round_up(columns, S::kLanes); ++c) target[c] = C(0);
    }
  }
}

// Scalars in a row of `columns` elements, padded to whole vectors.
template <class Op>
inline int64_t row_scalars(int64_t columns) {
  return round_up((columns + Op::kPack - 1) / Op::kPack, Op::S::kLanes);
}

// Rows of a block as operand A (or, padded = true, as operand B: whole vectors may be read from every row).
template <class Op, class T>
inline Rows<typename Op::Scalar> operand_rows(const View& view, int64_t batch, int64_t head, int64_t row, int64_t rows,
                                              int64_t columns, typename Op::Scalar* scratch, bool padded = false) {
  using Scalar = typename Op::Scalar;
  const T* source = at<T>(view, batch, head, row);
  const int64_t row_stride = view.stride[2], column_stride = view.stride[3];
  const bool unit = column_stride == 1 || columns <= 1;
  if constexpr (Op::kPack == 1) {
    if constexpr (std::is_same_v<T, Scalar>)
      if (unit && !(padded && columns % Op::S::kLanes != 0)) return {source, row_stride};
    const int64_t step = row_scalars<Op>(columns);
    convert_rows<Scalar>(source, row_stride, unit ? 1 : column_stride, rows, columns, scratch, step);
    return {scratch, step};
  } else {
    if (unit && columns % 2 == 0 && row_stride % 2 == 0)
      return {reinterpret_cast<const Scalar*>(source), row_stride / 2};
    const int64_t step = row_scalars<Op>(columns);
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = source + r * row_stride;
      T* to = reinterpret_cast<T*>(scratch + r * step);
      if (unit) std::memcpy(to, from, static_cast<size_t>(columns) * sizeof(T));
      else
        for (int64_t c = 0; c < columns; ++c) to[c] = from[c * column_stride];
      if (columns % 2 != 0) to[columns] = T{};
    }
    return {scratch, step};
  }
}

// One vector of each of kLanes rows: load(row), one row after the other.
template <class C, class T, class Load>
[[gnu::always_inline]] inline void load_block(const T* row, int64_t step, typename Simd<C>::V (&block)[Simd<C>::kLanes],
                                              const Load& load) {
#pragma GCC unroll 16
  for (int r = 0; r < Simd<C>::kLanes; ++r, row += step) {
    block[r] = load(row);
    asm("" : "+r"(row));  // one pointer that moves, not an address for every row
  }
}

// tile[column][lane] = factor * rows[lane][column] for lane < count (others 0). Of pairs only the factor's sign counts.
template <class Op>
[[gnu::noinline]] void transpose_tile(Rows<typename Op::Scalar> rows, int64_t count, int64_t scalars,
                                      typename Op::Compute factor, typename Op::Scalar* tile) {
  using S = Simd<typename Op::Compute>;
  using V = typename S::V;
  using C = typename Op::Compute;
  using Scalar = typename Op::Scalar;
  constexpr int kLanes = S::kLanes;
  for (int64_t lane = 0; lane < round_up(count, kLanes); lane += kLanes) {
    for (int64_t column = 0; column < scalars; column += kLanes) {
      V block[kLanes];
      const int64_t width = min64(kLanes, scalars - column);
      const Scalar* row = rows.data + lane * rows.step + column;
      if (width == kLanes && count - lane >= kLanes) {
        load_block<C>(row, rows.step, block, [](const Scalar* p) { return S::load(reinterpret_cast<const C*>(p)); });
      } else {
        for (int r = 0; r < kLanes; ++r) {
          const C* source = reinterpret_cast<const C*>(row + r * rows.step);
          block[r] = lane + r < count ? S::load_as(source, width) : S::zero();
        }
      }
      S::transpose(block);
      if constexpr (Op::kPack == 1) {
        for (int c = 0; c < kLanes; ++c) block[c] *= S::set1(factor);
      } else {
        if (factor < C(0)) {
          using IV = typename S::IV;
          const IV signs = IV{} + static_cast<typename S::Int>(0x80008000u);
          for (int c = 0; c < kLanes; ++c) block[c] = (V)((IV)block[c] ^ signs);
        }
      }
      C* target = reinterpret_cast<C*>(tile + column * kTile<C> + lane);
#pragma GCC unroll 16
      for (int c = 0; c < kLanes; ++c)
        if (c < width) S::store(target + c * kTile<C>, block[c]);
    }
  }
}

// rows[lane][column] = tile[column][lane] * factor[lane], back to the user's layout; exactly 0 where factor is 0, even
// for infinity and NaN. factor may be null.
template <class C, class T>
[[gnu::noinline]] void store_transposed(const C* tile, int64_t count, int64_t columns, const C* factor, T* target,
                                        int64_t row_stride) {
  using S = Simd<C>;
  using V = typename S::V;
  constexpr int kLanes = S::kLanes;
  for (int64_t lane = 0; lane < count; lane += kLanes) {
    const V scale = factor == nullptr ? S::set1(C(1)) : S::load(factor + lane);
    bool zeros = false;
    for (int64_t i = 0; factor != nullptr && i < kLanes; ++i) zeros |= factor[lane + i] == C(0);
    const int64_t height = min64(kLanes, count - lane);
    const auto scaled = [&](V x) { return zeros ? (scale == S::zero() ? S::zero() : x * scale) : x * scale; };
    int64_t column = 0;
#if defined(__AVX512F__)
    if constexpr (S::template kPairs<T>)  // half as much to transpose
      for (; columns - column >= 2 * kLanes; column += 2 * kLanes) {
        V block[kLanes];
        const C* source = tile + column * kTile<C> + lane;
#pragma GCC unroll 16
        for (int c = 0; c < kLanes; ++c, source += 2 * kTile<C>) {
          block[c] = (V)S::template pairs<T>(scaled(S::load(source)), scaled(S::load(source + kTile<C>)));
          asm("" : "+r"(source));
        }
        S::transpose(block);
        T* row = target + lane * row_stride + column;
        for (int64_t r = 0; r < height; ++r, row += row_stride) S::store(reinterpret_cast<C*>(row), block[r]);
      }
#endif
    for (; column < columns; column += kLanes) {
      V block[kLanes];
      const int64_t width = min64(kLanes, columns - column);
      const C* source = tile + column * kTile<C> + lane;
      if (width == kLanes) {
        load_block<C>(source, kTile<C>, block, [&](const C* p) { return scaled(S::load(p)); });
      } else {
        for (int c = 0; c < kLanes; ++c) block[c] = c < width ? scaled(S::load(source + c * kTile<C>)) : S::zero();
      }
      S::transpose(block);
      T* row = target + lane * row_stride + column;
      if (width == kLanes && height == kLanes) {
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r, row += row_stride) {
          S::store_as(row, block[r]);
          asm("" : "+r"(row));
        }
      } else {
        for (int64_t r = 0; r < height; ++r) S::store_as(row + r * row_stride, block[r], width);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------- bias

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

// Bytes of an entry of the bias.
template <class T>
inline int64_t bias_bytes(const Attention& p) {
  return p.bias_dtype == DType::kBool ? sizeof(bool) : p.bias_dtype == DType::kFloat32 ? sizeof(float) : sizeof(T);
}

// Whether a bias has a row for each query, whose keys lie side by side.
inline bool has_bias_rows(const Attention& p) { return p.bias.stride[2] != 0 && p.bias.stride[3] == 1; }

// Such rows, to be fetched: `keys` of them from `key` on.
template <class T>
inline ComingRows coming_bias(const Attention& p, int64_t batch, int64_t head, int64_t query, int64_t queries,
                              int64_t key, int64_t keys) {
  const int64_t size = bias_bytes<T>(p), *stride = p.bias.stride;
  const int64_t entry = batch * stride[0] + head * stride[1] + query * stride[2] + key;
  return {static_cast<const char*>(p.bias.data) + entry * size, stride[2] * size, keys > 0 ? queries : 0, keys * size};
}

// loop_dim: 3 where the loop runs over keys and the lanes over queries, 2 where it is the other way round.
template <class C, class T>
inline void bias_tile(const Attention& p, int loop_dim, int64_t batch, int64_t head, int64_t loop, int64_t loops,
                      int64_t lane, int64_t lanes, C* tile) {
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

// ------------------------------------------------------------------------------------------------- bool masks

// A bit for each lane of a tile's row: whether the mask lets query and key meet.
using LaneBits = uint64_t;

// Of the rows from `row` on, if there is a mask.
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

// The bits of `loops` rows of `lanes` lanes; those of lanes past the last one are set in rows that have any. loop_dim
// as in bias_tile.
[[gnu::noinline]] inline void mask_bits(const Attention& p, int loop_dim, int64_t batch, int64_t head, int64_t loop,
                                        int64_t loops, int64_t lane, int64_t lanes, LaneBits* rows) {
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
  const LaneBits beyond = lanes == 64 ? 0 : ~LaneBits{0} << lanes;
  for (int64_t i = 0; i < loops; ++i) rows[i] = (rows[i] & ~beyond) == 0 ? 0 : rows[i] | beyond;
}

// ---------------------------------------------------------------------------------------------------- dropout

inline constexpr int kPhiloxLanes = 16;

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
    const __m512i limit = _mm512_set1_epi32(static_cast<int>(threshold)), low_half = _mm512_set1_epi32(0xffff);
    for (int64_t i = 0; i < queries; i += kPhiloxLanes) {
      const __m512i lanes = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(query + i)), lane_numbers());
      for (int64_t block = key / philox::kBlockKeys; block * philox::kBlockKeys < key + keys; ++block)
        for (int64_t call = 0; call < philox::kCallsPerBlock; ++call) {
          __m512i words[4];
          philox.words(_mm512_set1_epi32(static_cast<int>(block * philox::kCallsPerBlock + call)), lanes, words);
          for (int half = 0; half < 8; ++half) {
            const int64_t j = block * philox::kBlockKeys + half / 2 * 8 + call * 2 + half % 2 - key;
            if (j < 0 || j >= keys) continue;
            const __m512i word = words[half / 2];
            const __m512i value = half % 2 == 0 ? _mm512_and_si512(word, low_half) : _mm512_srli_epi32(word, 16);
            const uint32_t bits = _mm512_cmpge_epu32_mask(value, limit);
            for (int lane = 0; lane < kPhiloxLanes; lane += S::kLanes)
              store(tile + j * kTile<C> + i + lane, bits >> lane);
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

// Philox for 16 neighbouring queries at once (the loops vectorise): words[w][lane].
inline void philox_queries(uint64_t seed, uint32_t c0, uint32_t query, uint64_t batch_head,
                           uint32_t (&words)[4][kPhiloxLanes]) {
  uint32_t x0[kPhiloxLanes], x1[kPhiloxLanes], x2[kPhiloxLanes], x3[kPhiloxLanes];
  for (int lane = 0; lane < kPhiloxLanes; ++lane) {
    x0[lane] = c0;
    x1[lane] = query + static_cast<uint32_t>(lane);
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
  for (int64_t i = 0; i < queries; i += kPhiloxLanes) {
    const int64_t count = min64(kPhiloxLanes, queries - i);
    for (int64_t block = key / philox::kBlockKeys; block * philox::kBlockKeys < key + keys; ++block)
      for (int64_t call = 0; call < philox::kCallsPerBlock; ++call) {
        uint32_t words[4][kPhiloxLanes];
        philox_queries(seed, static_cast<uint32_t>(block * philox::kCallsPerBlock + call),
                       static_cast<uint32_t>(query + i), batch_head, words);
        for (int w = 0; w < 4; ++w)
          for (int half = 0; half < 2; ++half) {
            const int64_t j = block * philox::kBlockKeys + w * 8 + call * 2 + half - key;
            if (j < 0 || j >= keys) continue;
            C* target = tile + i * query_step + j * key_step;
            for (int64_t r = 0; r < count; ++r)
              target[r * query_step] = ((words[w][r] >> (16 * half)) & 0xffffu) >= threshold ? kept : C(0);
          }
      }
  }
}

// ------------------------------------------------------------------------------------- the walk along the band

struct BlockPlan {
  int64_t row, rows;
  int64_t segments;
  Segment segment[2 * kBlockRows / kGroup + 3];  // a clean one, and the last of either edge may be short
};

// What a mask leaves of a block: rows in front and behind that it excludes from all lanes go, if the band doesn't cut
// the block, and segments of kGroup rows hold their live vectors only. False if nothing is left. `mask`: the bits of
// the block's rows, in `rows`; null if all are set.
template <class C>
inline bool apply_mask(const Attention& p, int loop_dim, int64_t batch, int64_t head, int64_t lane, int64_t lanes,
                       LaneBits* rows, BlockPlan& block, const LaneBits*& mask) {
  mask_bits(p, loop_dim, batch, head, block.row, block.rows, lane, lanes, rows);
  int64_t begin = 0, end = block.rows;
  while (begin < end && rows[begin] == 0) ++begin;
  if (begin == end) return false;
  while (rows[end - 1] == 0) --end;
  Segment* const segment = block.segment;
  if (block.segments == 1 && !segment->cut && segment->rows == block.rows) {
    constexpr int64_t kLanes = Simd<C>::kLanes;
    begin = begin / 2 * 2;  // pairs stay together
    block.row += begin;
    block.rows = min64(block.rows, round_up(end, 2)) - begin;
    rows += begin;
    block.segments = 0;
    int64_t row = 0;
    for (int64_t count; row < block.rows; row += count) {
      count = min64(kGroup, block.rows - row);
      LaneBits any = 0;
      for (int64_t i = 0; i < count; ++i) any |= rows[row + i];
      if (any == 0) continue;
      const int64_t first = std::countr_zero(any) / kLanes;
      const int64_t last = min64((lanes - 1) / kLanes, (63 - std::countl_zero(any)) / kLanes) + 1;
      Segment& before = segment[max64(0, block.segments - 1)];
      if (block.segments > 0 && before.row + before.rows == block.row + row && before.first == first &&
          before.last == last)
        before.rows += count;
      else segment[block.segments++] = {block.row + row, count, first, last, false};
    }
  }
  LaneBits all = ~LaneBits{0};
  for (int64_t i = 0; i < block.rows; ++i) all &= rows[i];
  mask = all == ~LaneBits{0} ? nullptr : rows;
  return true;
}

// C = A^T B, summed over the rows of a block: of A, `rows` scalars in a row, and of B, whose vectors are the tile's.
template <class Op>
inline void gemm_over_block(int64_t rows, int64_t vectors, const BlockPlan& block, const Factors<Op, true>& factors,
                            const Target<typename Op::Compute>& target) {
  // Nothing to choose from: without the choice a tile is 1 to 3 % faster.
  const Segment& first = block.segment[0];
  if (block.segments == 1 && first.row == block.row && first.last - first.first == vectors)
    gemm<Op, true>(rows, vectors, (first.rows + Op::kPack - 1) / Op::kPack, factors, target);
  else
    for_tiles<kTileRows * kTileVectors, kTileVectors, 1>(
        rows, vectors, SegmentsTile<Op>{factors, block.row, block.segment, block.segments, target});
}

// Cuts the loop dimension, as far as the band lets the tile's lanes reach, into blocks of at most `most` rows, evenly
// sized. What the band leaves whole of a block is one segment; where it cuts through, segments of kGroup rows hold
// their live vectors only. An edge of the band stays in one block if it fits, and segments begin an even number of rows
// from their block, so that pairs of rows stay together.
template <class C>
class BandWalk {
 public:
  // band.reached(lane) are the loop indices of a lane; the walk keeps to those in `within`.
  BandWalk(const Band& band, int64_t lane, int64_t lanes, Range within, int64_t most)
      : band_(band.transposed()),
        lane_(lane),
        lanes_(lanes),
        reached_(band.reached(lane, lanes, within)),
        clean_(band.shared(lane, lanes, within)),
        next_(reached_.begin),
        most_(most) {
    if (clean_.end <= clean_.begin) clean_ = {reached_.end, reached_.end};
  }

  bool next(BlockPlan& block) {
    if (next_ >= reached_.end) return false;
    const int64_t left = reached_.end - next_, parts = (left + most_ - 1) / most_;
    int64_t end = next_ + min64(left, round_up((left + parts - 1) / parts, 2));
    // All in front of the edge that the block would tear apart.
    if (end < reached_.end && end > clean_.end && even(clean_.end) > next_) end = even(clean_.end);
    block.row = next_;
    block.rows = end - next_;
    block.segments = 0;
    const Range clean{next_ + min64(end - next_, round_up(max64(clean_.begin - next_, 0), 2)),
                      clean_.end >= end ? end : even(clean_.end)};
    const bool any = clean.end > clean.begin;
    cut(block, {next_, any ? clean.begin : end});
    if (any) {
      block.segment[block.segments++] = {clean.begin, clean.end - clean.begin, 0, vectors(lanes_), false};
      cut(block, {clean.end, end});
    }
    next_ = end;
    return true;
  }

  // Lanes of the tile, relative to its first, that loop index `row` may meet; may lie outside of the tile.
  Range live_lanes(int64_t row) const {
    return {row + band_.offset - band_.left - lane_, row + band_.offset + band_.right + 1 - lane_};
  }

 private:
  static int64_t vectors(int64_t lanes) { return (lanes + Simd<C>::kLanes - 1) / Simd<C>::kLanes; }
  // The last row in front of `row` that an even number of rows separates from the next block's first.
  int64_t even(int64_t row) const { return next_ + (row - next_) / 2 * 2; }

  // Segments of the rows [begin, end).
  void cut(BlockPlan& block, Range rows) const {
    for (int64_t row = rows.begin; row < rows.end; row += kGroup) {
      const int64_t count = min64(kGroup, rows.end - row);
      const Range live = band_.reached(row, count, {lane_, lane_ + lanes_});
      if (live.end > live.begin)
        block.segment[block.segments++] = {row, count, (live.begin - lane_) / Simd<C>::kLanes,
                                           vectors(live.end - lane_), true};
    }
  }

  Band band_;
  int64_t lane_, lanes_;
  Range reached_, clean_;
  int64_t next_, most_;
};

}  // namespace
}  // namespace attnkern::cpu
