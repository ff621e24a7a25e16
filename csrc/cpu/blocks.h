// Moving blocks between the user's tensors and the layouts of the kernels: rows and transposed tiles.
// "lane" is the dimension along the vectors (queries in the forward pass, keys in the backward pass), "loop" the other.
#pragma once

#include <cstdlib>

#include "../common/params.h"
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
inline constexpr int64_t kGroup = kVectorBytes == 64 ? 16 : 8;  // rows of a segment at the edge of the band

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

// Rows of keys or of values, which may lie in pages.
struct KeyRows : View {
  KeyRows(const View& view, const Pages& given) : View(view), pages(given) {}
  Pages pages;
};

// Rows of keys or of values as `Keys`: View where it is known that they don't.
template <class Keys>
inline Keys rows_of(const View& view, const Pages& pages) {
  if constexpr (std::is_same_v<Keys, KeyRows>) return {view, pages};
  else return view;
}

// Where a row lies: in which page, and in which row of it.
struct PlaceInPages {
  int64_t page, row;

  PlaceInPages(const Pages& pages, int64_t batch, int64_t number) {
    const int64_t place = pages.first + number, given = pages.table[batch * pages.stride + (place >> pages.shift)];
    page = given >= 0 && given < pages.count ? given : 0;
    row = place & ((int64_t{1} << pages.shift) - 1);
  }
};

template <class T>
inline T* at(const KeyRows& rows, int64_t batch, int64_t head, int64_t row, int64_t column = 0) {
  if (rows.pages.table == nullptr) return at<T>(static_cast<const View&>(rows), batch, head, row, column);
  const PlaceInPages place(rows.pages, batch, row);
  return at<T>(static_cast<const View&>(rows), place.page, head, place.row, column);
}

// How many rows from `row` on lie one after the other.
inline constexpr int64_t rows_together(const View&, int64_t) { return kUnbounded; }
inline int64_t rows_together(const KeyRows& rows, int64_t row) {
  if (rows.pages.table == nullptr) return kUnbounded;
  const int64_t size = int64_t{1} << rows.pages.shift;
  return size - ((rows.pages.first + row) & (size - 1));
}

// body(first row, number of rows) for each run of rows that lie one after the other.
template <class AnyRows, class Body>
inline void for_runs(const AnyRows& view, int64_t row, int64_t rows, const Body& body) {
  for (int64_t i = 0, now; i < rows; i += now) {
    now = min64(rows - i, rows_together(view, row + i));
    body(i, now);
  }
}

// As at<T>() for the type of the call's tensors.
inline char* bytes_at(const Attention& p, const View& view, int64_t batch, int64_t head, int64_t row) {
  return static_cast<char*>(view.data) +
         (batch * view.stride[0] + head * view.stride[1] + row * view.stride[2]) * bytes_of(p.dtype);
}

// Zeros in rows of a head of a gradient, if it is wanted.
inline void clear_rows(const Attention& p, const View& view, int64_t batch, int64_t head, Range rows, int64_t columns) {
  for (int64_t row = rows.begin; view.data != nullptr && row < rows.end; ++row)
    std::memset(bytes_at(p, view, batch, head, row), 0, static_cast<size_t>(columns * bytes_of(p.dtype)));
}

// Whether rows are read as they lie in memory.
inline bool reads_in_place(const View& view, int64_t columns) { return view.stride[3] == 1 || columns <= 1; }

// Whether rows lie apart, as those of a token's heads side by side do.
inline bool lie_apart(const View& view, int64_t columns) {
  return view.stride[2] > columns && reads_in_place(view, columns);
}

// Whether such rows begin a multiple of 4 KiB apart, where the lines of the first-level cache come round again.
template <class T>
inline bool collide(const View& view, int64_t columns) {
  return lie_apart(view, columns) && view.stride[2] * static_cast<int64_t>(sizeof(T)) % 4096 == 0;
}

// Whether such rows crowd in few lines of the first-level cache: they begin a multiple of a quarter of the 4 KiB apart
// after which its lines come round again.
template <class T>
inline bool crowds(const View& view, int64_t columns) {
  return lie_apart(view, columns) && view.stride[2] * static_cast<int64_t>(sizeof(T)) % 1024 == 0;
}

// How many entries the batch of a call has: a sequence of a packed call is one of many.
inline int64_t entries_of_call(const Attention& p) {
  return p.all_rows > 0 ? p.all_rows / max64(1, p.seqlen_q) : p.batch;
}

// What a head's tiles meet again and again comes from memory, or from far away in the caches, from this size on.
inline constexpr int64_t kFarBytes = 4 << 20;

// `rows` rows of a view from `row` on, as far as they come before `end`.
template <class T>
inline PrefetchRows rows_to_prefetch(const View& view, int64_t batch, int64_t head, int64_t row, int64_t rows,
                                     int64_t end, int64_t columns) {
  constexpr int64_t kBytes = sizeof(T);
  const int64_t count = reads_in_place(view, columns) ? max64(0, min64(rows, end - row)) : 0;
  return {reinterpret_cast<const char*>(at<T>(view, batch, head, row)), view.stride[2] * kBytes, count,
          columns * kBytes};
}
template <class T>
inline PrefetchPages rows_to_prefetch(const KeyRows& rows, int64_t batch, int64_t head, int64_t row, int64_t count,
                                      int64_t end, int64_t columns) {
  const Pages& pages = rows.pages;
  const View& pool = rows;
  PrefetchPages found;
  if (row >= end) return found;
  static_cast<PrefetchRows&>(found) = rows_to_prefetch<T>(pool, 0, head, 0, count, end - row, columns);
  found.pages = found.row;
  found.row = reinterpret_cast<const char*>(at<T>(rows, batch, head, row));
  found.in_page = rows_together(rows, row);
  found.next_page = pages.table + batch * pages.stride + ((pages.first + row) >> pages.shift) + 1;
  found.page_step = pool.stride[0] * static_cast<int64_t>(sizeof(T)), found.page_rows = int64_t{1} << pages.shift;
  return found;
}

// Of rows that may lie in pages, those that lie together with the first.
template <class T>
inline PrefetchRows together_to_prefetch(const KeyRows& rows, int64_t batch, int64_t head, int64_t row, int64_t count,
                                         int64_t end, int64_t columns) {
  const View& view = rows;
  if (rows.pages.table == nullptr) return rows_to_prefetch<T>(view, batch, head, row, count, end, columns);
  if (row >= end) return {};
  PrefetchRows found =
      rows_to_prefetch<T>(view, 0, head, 0, min64(count, rows_together(rows, row)), end - row, columns);
  found.row = reinterpret_cast<const char*>(at<T>(rows, batch, head, row));
  return found;
}

// Rows of operands with column stride 1: the user's own memory where it will do, else a converted copy.
template <class Scalar>
struct Rows {
  const Scalar* data;
  int64_t step;  // Scalars from row to row
};

// convert_rows where a column's elements follow each other: blocks that are transposed in registers.
template <class C, class T, class To>
[[gnu::noinline]] void convert_columns(const T* source, int64_t column_stride, int64_t rows, int64_t columns,
                                       To* target, int64_t step) {
  using S = Simd<C>;
  constexpr int64_t kLanes = S::kLanes;
  // Row by row within a few columns: so many streams the processor prefetches.
  for (int64_t c = 0; c < columns; c += kLanes) {
    const int64_t of_columns = min64(kLanes, columns - c);
    for (int64_t r = 0; r < rows; r += kLanes) {
      const int64_t of_rows = min64(kLanes, rows - r);
      typename S::V block[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const T* column = source + (c + i) * column_stride + r;
        block[i] = i >= of_columns ? S::zero() : of_rows == kLanes ? S::load_as(column) : S::load_as(column, of_rows);
      }
      S::transpose(block);
      for (int64_t i = 0; i < of_rows; ++i) {
        To* to = target + (r + i) * step + c;
        if constexpr (std::is_same_v<To, C>) S::store(to, block[i]);
        else S::store_as(to, block[i], of_columns);
      }
    }
  }
}

// Copies rows x columns with conversion; columns up to round_up(columns, lanes) are written, with zeros. Rows that lie
// apart are prefetched, since the machine does so only where one follows the other.
template <class C, class T>
inline void convert_rows(const T* source, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns,
                         C* target, int64_t step) {
  using S = Simd<C>;
  constexpr int64_t kRowsAhead = 8, kLine = 64 / static_cast<int64_t>(sizeof(T));
  if (row_stride == 1 && column_stride != 1 && rows > 1)
    return convert_columns<C>(source, column_stride, rows, columns, target, step);
  const int64_t ahead = row_stride > columns + kLine ? kRowsAhead * row_stride : 0;
  for (int64_t r = 0; r < rows; ++r, source += row_stride, target += step) {
    if (column_stride == 1) {
      for (int64_t c = 0; ahead > 0 && c < columns; c += kLine) __builtin_prefetch(source + ahead + c);
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

// Rows of a block as operand A (or, padded = true, as operand B: whole vectors may be read from every row; of pairs
// they end in zeros).
template <class Op, class T, class AnyRows>
inline Rows<typename Op::Scalar> operand_rows(const AnyRows& view, int64_t batch, int64_t head, int64_t row,
                                              int64_t rows, int64_t columns, typename Op::Scalar* scratch,
                                              bool padded = false) {
  using Scalar = typename Op::Scalar;
  const int64_t row_stride = view.stride[2], column_stride = view.stride[3], step = row_scalars<Op>(columns);
  const bool unit = column_stride == 1 || columns <= 1, together = rows <= rows_together(view, row);
  if constexpr (Op::kPack == 1) {
    if constexpr (std::is_same_v<T, Scalar>)
      if (unit && together && !(padded && columns % Op::S::kLanes != 0))
        return {at<T>(view, batch, head, row), row_stride};
    for_runs(view, row, rows, [&](int64_t first, int64_t count) {
      convert_rows<Scalar>(at<T>(view, batch, head, row + first), row_stride, unit ? 1 : column_stride, count, columns,
                           scratch + first * step, step);
    });
  } else {
    if (unit && together && columns % 2 == 0 && row_stride % 2 == 0 && !(padded && columns % (2 * Op::S::kLanes) != 0))
      return {reinterpret_cast<const Scalar*>(at<T>(view, batch, head, row)), row_stride / 2};
    for_runs(view, row, rows, [&](int64_t first, int64_t count) {
      const T* from = at<T>(view, batch, head, row + first);
      const bool by_columns = !unit && row_stride == 1 && count > 1;
      if (by_columns)
        convert_columns<float>(from, column_stride, count, columns, reinterpret_cast<T*>(scratch + first * step),
                               2 * step);
      for (int64_t r = first; r < first + count; ++r, from += row_stride) {
        T* to = reinterpret_cast<T*>(scratch + r * step);
        if (unit) std::memcpy(to, from, static_cast<size_t>(columns) * sizeof(T));
        else if (!by_columns)
          for (int64_t c = 0; c < columns; ++c) to[c] = from[c * column_stride];
        for (int64_t c = columns; c < (padded ? 2 * step : round_up(columns, 2)); ++c) to[c] = T{};
      }
    });
  }
  return {scratch, step};
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

// tile[column][lane] = factor * rows[lane][column] for lane < count (others 0), and zeros for columns up to a whole
// vector of them. Of pairs only the factor's sign counts.
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
      for (int c = 0; c < kLanes; ++c) S::store(target + c * kTile<C>, block[c]);
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

}  // namespace
}  // namespace attnkern::cpu
