// Products of bfloat16 by AMX, the matrix unit of Intel's servers from Sapphire Rapids on: 16 x 16 sums of 16 pairs
// each by one instruction, in the layouts that pairs have anyway (gemm.h).
//
//     scores   S^T[key][query]:     A = rows of K as they lie in memory;  B = Q^T in pairs along the head dimension
//     values   O^T[column][query]:  A = V^T in pieces of 32 keys;         B = P^T in pairs along the keys
//     dQ       dQ[query][column]:   A = dS in pairs along the keys;       B = K in pairs of rows
//
// In the backward pass dP is made as scores are, dV and dK as values are. Every product takes whole pieces, with zeros
// where keys or queries are missing or don't meet. So the rows that it sums over must hold no infinity or NaN: where
// they do, the vectors' products take over.
#pragma once

#include "packing.h"
#include "score.h"

namespace attnkern::cpu {
namespace {

// Rows of a block, of which so many may be read.
template <class Scalar>
struct ReadableRows : Rows<Scalar> {
  int64_t readable = kUnbounded;
};

// A block's rows as the products of the scores read them; `last_row`: of the head.
template <class T, class Op, class AnyRows>
inline ReadableRows<typename Op::Scalar> rows_of_scores(const AnyRows& view, int64_t batch, int64_t head,
                                                        const BlockPlan& block, int64_t last_row, int64_t columns,
                                                        typename Op::Scalar* space, bool padded) {
  const auto rows = operand_rows<Op, T>(view, batch, head, block.row, block.rows, columns, space, padded);
  return {rows, rows.data == space ? kUnbounded : min64(last_row - block.row, rows_together(view, block.row))};
}

// What of Op's products the matrix unit does.
template <class Op>
struct Tiles {
  static constexpr bool kHas = false;
  static constexpr int64_t kKeys = 0, kMostRows = 0;
  static bool uses(const Attention&) { return false; }
  static double peak(int64_t iterations) { return gemm_peak<Op>(iterations); }
  struct Setup {
    explicit Setup(bool) {}
    ~Setup() {}
  };
};

#if defined(__AMX_BF16__)
// The tiles' shapes, 16 rows of 64 bytes for all eight, as long as this lives, if they are `used`.
class TileSetup {
 public:
  explicit TileSetup(bool used) : used_(used) {
    if (!used) return;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileSetup() {
    if (used_) _tile_release();
  }
  TileSetup(const TileSetup&) = delete;
  TileSetup& operator=(const TileSetup&) = delete;

 private:
  const bool used_;
};

// Sums of kRows x kColumns tiles (each 1 or 2) in the tile registers: A in 4 and 5, B in 6 and 7.
template <int kRows, int kColumns>
struct TileSums {
  [[gnu::always_inline]] static inline void clear() {
    _tile_zero(0);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kRows > 1) _tile_zero(2);
    if constexpr (kRows > 1 && kColumns > 1) _tile_zero(3);
  }
  [[gnu::always_inline]] static inline void load(const float* c, int64_t step) {
    const int64_t bytes = step * static_cast<int64_t>(sizeof(float));
    asm volatile("" : : : "memory");  // the loads of a tile don't say that they read memory
    _tile_loadd(0, c, bytes);
    if constexpr (kColumns > 1) _tile_loadd(1, c + 16, bytes);
    if constexpr (kRows > 1) _tile_loadd(2, c + 16 * step, bytes);
    if constexpr (kRows > 1 && kColumns > 1) _tile_loadd(3, c + 16 * step + 16, bytes);
  }
  // Adds 16 pairs of the sum: of 16 rows of A, 16 others, and 16 rows of B.
  [[gnu::always_inline]] static inline void add(Rows<uint32_t> a0, Rows<uint32_t> a1, Rows<uint32_t> b) {
    constexpr int64_t kBytes = sizeof(uint32_t);
    asm volatile("" : : : "memory");
    _tile_loadd(6, b.data, b.step * kBytes);
    _tile_loadd(4, a0.data, a0.step * kBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns > 1) {
      _tile_loadd(7, b.data + 16, b.step * kBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows > 1) {
      _tile_loadd(5, a1.data, a1.step * kBytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kRows > 1 && kColumns > 1) _tile_dpbf16ps(3, 5, 7);
  }
  // Rows of 16 floats to each tile.
  [[gnu::always_inline]] static inline void store(float* c, int64_t step) {
    const int64_t bytes = step * static_cast<int64_t>(sizeof(float));
    _tile_stored(0, c, bytes);
    if constexpr (kColumns > 1) _tile_stored(1, c + 16, bytes);
    if constexpr (kRows > 1) _tile_stored(2, c + 16 * step, bytes);
    if constexpr (kRows > 1 && kColumns > 1) _tile_stored(3, c + 16 * step + 16, bytes);
  }
};

template <>
struct Tiles<PairDot> {
  static constexpr bool kHas = true;
  static constexpr int64_t kKeys = 32;          // of a piece of V^T: 16 pairs
  static constexpr int64_t kScalars = 16 * 16;  // of a tile
  static constexpr int64_t kMostRows = 96;      // rows of a block: its scores stay in the nearest cache
  static constexpr int64_t kMostDim = 2 * kLongestSum;

  using Setup = TileSetup;

  // Whether a problem's products go to the matrix unit. (A longer sum of scores would have to be made of parts.)
  static bool uses(const Attention& p) { return p.head_dim > 0 && p.head_dim <= kMostDim && p.head_dim_v > 0; }

  // The arithmetic of products without their loads; returns the FLOPs done.
  [[gnu::noinline]] static double peak(int64_t iterations) {
    const TileSetup setup(true);
    alignas(64) const uint32_t zeros[32] = {};
    TileSums<2, 2>::clear();
    TileSums<2, 2>::add({zeros, 0}, {zeros, 0}, {zeros, 0});
    for (int64_t i = 0; i < iterations; ++i) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    return 2.0 * 4 * 16 * 16 * 32 * static_cast<double>(iterations);
  }

  // body<kRows, kColumns>(row, column) for tiles of 16 rows and 16 columns, four at a time.
  template <class Body>
  [[gnu::always_inline]] static inline void for_blocks(int64_t rows, int64_t columns, const Body& body) {
    for (int64_t r = 0; r < rows; r += 2)
      for (int64_t c = 0; c < columns; c += 2) {
        const bool two_rows = rows - r > 1, two_columns = columns - c > 1;
        if (two_rows && two_columns) body.template operator()<2, 2>(r, c);
        else if (two_rows) body.template operator()<2, 1>(r, c);
        else if (two_columns) body.template operator()<1, 2>(r, c);
        else body.template operator()<1, 1>(r, c);
      }
  }

  // How often scores calls between(), for so many rows and vectors.
  static int64_t calls(int64_t rows, int64_t vectors, int64_t depth) {
    return ((rows + 31) / 32) * ((vectors + 1) / 2) * (round_up(depth, 16) / 16);
  }

  // scores[row][lane] = sum over `pairs` pairs of rows and the lanes' tile, both with zeros up to a multiple of 16: for
  // `rows` rows from `first_row` on and vectors of lanes. Up to 15 more rows of `scores` are overwritten. `tail`: room
  // for 16 rows. between() is called after every 16 pairs of four tiles.
  template <class Between>
  static void scores(int64_t rows, int64_t vectors, int64_t pairs, ReadableRows<uint32_t> all, int64_t first_row,
                     const uint32_t* lanes, uint32_t* tail, float* scores, const Between& between) {
    constexpr int64_t kStep = kTile<float>, kBytes = sizeof(uint32_t);
    const int64_t depth = round_up(pairs, 16), readable = all.readable - first_row;
    const Rows<uint32_t> keys{all.data + first_row * all.step, all.step};
    const int64_t tiles = (rows + 15) / 16, last = 16 * (tiles - 1);
    Rows<uint32_t> at_end{keys.data + last * keys.step, keys.step};
    if (readable - last < 16) {
      for (int64_t i = 0; i < min64(16, readable - last); ++i)
        std::memcpy(tail + i * depth, at_end.data + i * keys.step, static_cast<size_t>(depth * kBytes));
      at_end = {tail, depth};
    }
    for_blocks(tiles, vectors,
               [&]<int kRows, int kColumns>(int64_t row, int64_t vector) __attribute__((always_inline)) {
                 using Sums = TileSums<kRows, kColumns>;
                 const auto rows_from = [&](int64_t tile) {
                   return 16 * tile == last ? at_end : Rows<uint32_t>{keys.data + 16 * tile * keys.step, keys.step};
                 };
                 const Rows<uint32_t> first = rows_from(row), second = rows_from(row + kRows - 1);
                 float* const target = scores + 16 * row * kStep + 16 * vector;
                 const uint32_t* const b = lanes + 16 * vector;
                 Sums::clear();
                 for (int64_t k = 0; k < depth; k += 16) {
                   Sums::add({first.data + k, first.step}, {second.data + k, second.step}, {b + k * kStep, kStep});
                   between();
                 }
                 Sums::store(target, kStep);
               });
  }

  // Pieces of V^T of 32 keys: tiles of 16 columns, whose rows are 16 pairs of keys. Zeros past the last row.
  template <class T, class AnyRows>
  [[gnu::noinline]] static bool pack_values(const AnyRows& view, int64_t batch, int64_t head, int64_t row, int64_t end,
                                            int64_t last_row, int64_t columns, uint32_t* target) {
    using S = Simd<float>;
    using V = S::V;
    typedef uint32_t Bits __attribute__((vector_size(64)));
    const int64_t stride = view.stride[3];
    NonNumbers<float> numbers;
    for (; row < end; row += kKeys) {
      const T* from[kKeys];
      const int64_t count = min64(kKeys, last_row - row);
      for (int64_t i = 0; i < kKeys; ++i) from[i] = i < count ? at<T>(view, batch, head, row + i) : nullptr;
      for (int64_t column = 0; column < columns; column += 16, target += kScalars) {
        const int64_t width = min64(16, columns - column);
        V block[16];
        const auto load = [&](int64_t i) {
          if (i >= count) return Bits{};
          T own[16] = {};
          const T* p = from[i] + column;
          if (stride != 1) {
            p = from[i] + column * stride;
            for (int64_t c = 0; c < width; ++c) own[c] = p[c * stride];
            p = own;
          }
          const V x = S::load_as(p, width);
          numbers.add_vector(x);
          return (Bits)x;
        };
        for (int64_t pair = 0; pair < 16; ++pair) block[pair] = (V)(load(2 * pair) >> 16 | load(2 * pair + 1));
        S::transpose(block);
        for (int64_t c = 0; c < 16; ++c) S::store(reinterpret_cast<float*>(target) + 16 * c, block[c]);
      }
    }
    return !numbers.found();
  }

  // The pieces of a head's V^T that hold the rows [begin, end), a multiple of 32: in the head's packed cache, to which
  // missing pieces are added, if they are its own; or in `scratch`. Null where there are infinities or NaN.
  template <class T, class AnyRows>
  static const uint32_t* values(const AnyRows& view, int64_t heads, int64_t batch, int64_t head, int64_t begin,
                                int64_t end, int64_t last_row, int64_t columns, uint32_t* scratch,
                                PackedCache<uint32_t>* cache) {
    const int64_t piece = round_up(columns, 16) / 16 * kScalars;
    const bool cached = cache != nullptr && begin % kKeys == 0 && end / 2 <= cache->room;
    if (!cached) return pack_values<T>(view, batch, head, begin, end, last_row, columns, scratch) ? scratch : nullptr;
    cache->hold(batch * heads + head, begin, end, [&](int64_t first, int64_t last) {
      cache->numbers &=
          pack_values<T>(view, batch, head, first, last, last_row, columns, cache->at(first, kKeys, piece));
    });
    return cache->numbers ? cache->at(begin, kKeys, piece) : nullptr;
  }

  // A block's rows of pairs stand in whole pieces of keys: how many rows before its first one. (Odd rows are pairs with
  // the next one: pieces of their own.)
  static int64_t rows_before(const BlockPlan& block) { return block.row % 2 == 0 ? block.row % kKeys : 0; }

  // Sets to 0 what a block's segments leave out of the rows [begin, end), `unit` of the block's rows in each, counted
  // from its first, and of [0, last) in a row, of which only what lies before `live` can be theirs.
  template <class T>
  static void clear_left_out(const BlockPlan& block, int64_t unit, int64_t begin, int64_t end, int64_t live,
                             int64_t last, T* rows, int64_t step) {
    const auto clear = [&](int64_t first_row, int64_t last_row, int64_t from, int64_t to) {
      for (int64_t row = first_row; row < last_row && to > from; ++row)
        std::memset(rows + row * step + from, 0, static_cast<size_t>(to - from) * sizeof(T));
    };
    for (int64_t s = 0; s < block.segments; ++s) {
      const Segment& segment = block.segment[s];
      const int64_t first = (segment.row - block.row) / unit, behind = first + (segment.rows + unit - 1) / unit;
      clear(begin, first, 0, last);
      clear(first, behind, 0, 16 * segment.first);
      clear(first, behind, min64(live, 16 * segment.last), last);
      begin = behind;
    }
    clear(begin, end, 0, last);
  }

  // Zeros where the probabilities of a block, `pairs`, lack of whole pieces of keys and of all vectors; returns where
  // these begin.
  static const uint32_t* complete_pairs(const BlockPlan& block, int64_t vectors, uint32_t* pairs) {
    constexpr int64_t kStep = kTile<float>;
    const int64_t before = rows_before(block), end = round_up(before + block.rows, kKeys) - before;
    clear_left_out(block, 2, -before / 2, end / 2, 16 * vectors, 16 * vectors, pairs, kStep);
    return pairs - before / 2 * kStep;
  }

  // sums[column][lane] = correction[lane] * sums + sum over so many pieces of V^T and the pairs of P^T, whose rows lie
  // kTile apart. Without sums that have `started` these are the first; correction null: 1.
  static void add_values(int64_t pieces, int64_t columns, int64_t vectors, const uint32_t* values,
                         const uint32_t* probabilities, const float* correction, bool started, float* sums) {
    using S = Simd<float>;
    constexpr int64_t kStep = kTile<float>;
    const int64_t tiles = (columns + 15) / 16, piece = tiles * kScalars;
    alignas(64) float space[32 * 32];
    for_blocks(tiles, vectors,
               [&]<int kRows, int kColumns>(int64_t row, int64_t vector) __attribute__((always_inline)) {
                 using Sums = TileSums<kRows, kColumns>;
                 float* const target = sums + 16 * row * kStep + 16 * vector;
                 const bool loads = started && correction == nullptr;
                 if (loads) Sums::load(target, kStep);
                 else Sums::clear();
                 const uint32_t* a = values + row * kScalars;
                 const uint32_t* b = probabilities + 16 * vector;
                 for (int64_t i = 0; i < pieces; ++i, a += piece, b += 16 * kStep)
                   Sums::add({a, 16}, {a + kScalars, 16}, {b, kStep});
                 if (loads || !started) return Sums::store(target, kStep);
                 Sums::store(space, 32);
                 for (int64_t v = 0; v < kColumns; ++v) {
                   const auto factor = S::load(correction + 16 * (vector + v));
                   for (int64_t r = 0; r < 16 * kRows; ++r) {
                     float* const sum = target + r * kStep + 16 * v;
                     S::store(sum, S::fma(S::load(sum), factor, S::load(space + 32 * r + 16 * v)));
                   }
                 }
               });
  }

  // sums[row][column] += sum over `lanes` lanes of row_pairs, pairs along the lanes whose rows lie kTile / 2 apart, and
  // of rows of `pairs`. `columns`: in vectors. A row's sum doesn't depend on how many there are.
  static void add_lanes(int64_t rows, int64_t columns, int64_t lanes, const uint32_t* row_pairs, Rows<uint32_t> pairs,
                        float* sums, int64_t step) {
    constexpr int64_t kStep = kTile<float> / 2;
    const int64_t depth = (lanes + kKeys - 1) / kKeys;
    alignas(64) float space[32 * 32];
    for_blocks((rows + 15) / 16, columns,
               [&]<int kRows, int kColumns>(int64_t row, int64_t vector) __attribute__((always_inline)) {
                 using Sums = TileSums<kRows, kColumns>;
                 float* const target = sums + 16 * row * step + 16 * vector;
                 const int64_t height = min64(16 * kRows, rows - 16 * row);
                 const bool whole = height == 16 * kRows;
                 const auto copy_rows = [&](const float* from, int64_t from_step, float* to, int64_t to_step) {
                   for (int64_t r = 0; r < height; ++r)
                     std::memcpy(to + r * to_step, from + r * from_step, 16 * kColumns * sizeof(float));
                 };
                 if (!whole) copy_rows(target, step, space, 32);
                 Sums::load(whole ? target : space, whole ? step : 32);
                 const uint32_t* const a = row_pairs + 16 * row * kStep;
                 for (int64_t k = 0; k < depth; ++k)
                   Sums::add({a + 16 * k, kStep}, {a + 16 * (k + kStep), kStep},
                             {pairs.data + 16 * (k * pairs.step + vector), pairs.step});
                 Sums::store(whole ? target : space, whole ? step : 32);
                 if (!whole) copy_rows(space, 32, target, step);
               });
  }

  // The same for rows of pairs along the lanes: lanes from `lanes` on are none of theirs.
  static void complete_rows(const BlockPlan& block, int64_t lanes, uint32_t* row_pairs) {
    clear_left_out(block, 1, 0, block.rows, lanes, round_up(lanes, kKeys), reinterpret_cast<uint16_t*>(row_pairs),
                   kTile<float>);
  }
};
#endif

// Of `rows` rows those that a packed cache has room for: whole pairs, or pieces of tiles.
template <class Op>
inline int64_t cached_rows(int64_t rows, bool tiles) {
  return round_up(rows, tiles ? Tiles<Op>::kKeys : Op::kPack);
}

// Rows of a block, at most.
template <class Op>
inline int64_t most_rows(bool tiles) {
  return tiles ? Tiles<Op>::kMostRows : kBlock<Op>;
}

// Adds a block to a result by the matrix unit: `pairs`, its factors along the lanes, times `rows`, those of a head that
// has `last_row`. What was summed before counts `correction` times, if that isn't null. False, and nothing is done,
// where the rows hold infinities or NaN, or products don't go to the unit.
template <class T, class Op, class AnyRows>
inline bool add_by_unit(Result<T, Op>& result, bool tiles, const AnyRows& rows, int64_t heads, int64_t batch,
                        int64_t head, const BlockPlan& block, int64_t vectors, int64_t last_row, int64_t columns,
                        typename Op::Scalar* scratch, PackedCache<typename Op::Scalar>* cache,
                        typename Op::Scalar* pairs, const typename Op::Compute* correction) {
  using Unit = Tiles<Op>;
  if constexpr (Unit::kHas) {
    const int64_t begin = block.row - Unit::rows_before(block);
    const int64_t count = round_up(block.row + block.rows - begin, Unit::kKeys);
    const auto pieces = !tiles ? nullptr
                               : Unit::template values<T>(rows, heads, batch, head, begin, begin + count, last_row,
                                                          columns, scratch, cache);
    if (pieces == nullptr) return false;
    const auto [sums, started] = result.open();
    Unit::add_values(count / Unit::kKeys, columns, vectors, pieces, Unit::complete_pairs(block, vectors, pairs),
                     correction, started, sums);
    return true;
  }
  return false;
}

}  // namespace
}  // namespace attnkern::cpu
