// Rows of operands as a product reads them: converted, or in pairs, or without those that must not enter a sum.
#pragma once

#include "walk.h"

namespace attnkern::cpu {
namespace {

// Whether rows of T are converted for Op's products.
template <class T, class Op>
inline constexpr bool kConverts = Op::kPack == 1 && !std::is_same_v<T, typename Op::Scalar>;

// Rows [begin, end) of one head as a product reads them, converted or in pairs: the same worker's next tile of that
// head needs them again.
template <class Scalar>
struct alignas(64) PackedCache {  // shares no cache line with another worker
  Scalar* memory;                 // of the head's rows from `first` on
  int64_t room;                   // rows, or pairs of rows
  bool moves;                     // where it is full it begins anew; otherwise it keeps a head's first rows
  int64_t head = -1, begin = 0, end = 0, first = 0;
  bool numbers = true;  // and nothing else, where that was asked

  // Makes it hold the rows [row, last) of head `index`: pack(first, last) for those that it lacks.
  template <class Pack>
  void hold(int64_t index, int64_t row, int64_t last, const Pack& pack) {
    if (head != index || row < begin || row > end || (moves && last - first > room))
      *this = {memory, room, moves, index, row, row, moves ? row : 0};
    if (end >= last) return;
    pack(end, last);
    end = last;
  }
  Scalar* at(int64_t row, int64_t pack, int64_t step) const { return memory + (row - first) / pack * step; }
};
inline constexpr int64_t kPackedCacheBytes = 3 << 18;  // of a worker, at most: with it a call needs no more than torch

// The packed caches of all workers. They lie in the workers' scratch, which stays from call to call: fresh memory would
// come page by page.
template <class Scalar>
class PackedCaches {
 public:
  // A worker has `records` caches of so many rows, or pairs of rows, of `scalars` each, if there is memory for all.
  // Those of rows move under a window. (Those of pairs don't: not measured.)
  PackedCaches(int64_t workers, int64_t records, int64_t rows, int64_t scalars, bool moves)
      : records_(records),
        moves_(moves),
        room_(min64(rows, kPackedCacheBytes / max64(1, records * scalars * static_cast<int64_t>(sizeof(Scalar))))),
        record_scalars_(room_ * scalars),
        rows_(workers * records) {}
  // Of a worker's scratch.
  int64_t bytes() const { return records_ * record_scalars_ * static_cast<int64_t>(sizeof(Scalar)); }
  // The records of a worker, with `memory` of its scratch; null if there are none.
  PackedCache<Scalar>* of(int64_t worker, void* memory) const {
    PackedCache<Scalar>* records = rows_.data() + worker * records_;
    for (int64_t i = 0; i < records_; ++i) records[i].memory = static_cast<Scalar*>(memory) + i * record_scalars_;
    return records_ == 0 ? nullptr : records;
  }
  // To be called before a worker's first of(), and after another call has used its scratch: it has packed nothing.
  // (The workers make their records themselves: for all of them one thread would take as long as for a task.)
  void forget(int64_t worker) const {
    for (int64_t i = 0; i < records_; ++i) rows_.data()[worker * records_ + i] = {nullptr, room_, moves_};
  }

 private:
  int64_t records_;
  bool moves_;
  int64_t room_, record_scalars_;
  Buffer<PackedCache<Scalar>> rows_;
};

// V rows in pairs along the keys: scratch[j / 2][column] = (V[j][column], V[j + 1][column]); 0 past the last row.
template <class T>
[[gnu::noinline]] void interleave_rows(const T* source, int64_t row_stride, int64_t column_stride, int64_t rows,
                                       int64_t columns, uint32_t* target, int64_t step) {
  for (int64_t j = 0; j < rows; j += 2, target += step) {
    const T* first = source + j * row_stride;
    const T* second = first + row_stride;
    const bool single = j + 1 == rows;
    int64_t c = 0;
#if defined(__AVX512BF16__)
    if (column_stride == 1) {
      for (; c + 32 <= columns; c += 32) {
        const __m512i low = _mm512_loadu_si512(first + c);
        const __m512i high = single ? _mm512_setzero_si512() : _mm512_loadu_si512(second + c);
        // unpack works within 128-bit quarters; the shuffles put the quarters in order.
        const __m512i a = _mm512_unpacklo_epi16(low, high), b = _mm512_unpackhi_epi16(low, high);
        const __m512i order_low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i order_high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        _mm512_storeu_si512(target + c, _mm512_permutex2var_epi64(a, order_low, b));
        _mm512_storeu_si512(target + c + 16, _mm512_permutex2var_epi64(a, order_high, b));
      }
    }
#endif
    for (; c < columns; ++c) {
      const uint32_t low = first[c * column_stride].bits;
      const uint32_t high = single ? 0 : second[c * column_stride].bits;
      target[c] = low | high << 16;
    }
  }
}

// Rows of a view, converted or in pairs, with the columns padded to whole vectors: in the head's packed cache, to which
// missing rows are added, or in `scratch` where the cache has no room for them.
template <class T, class Op, class AnyRows>
inline Rows<typename Op::Scalar> packed_rows(const AnyRows& view, int64_t heads, int64_t batch, int64_t head,
                                             int64_t row, int64_t rows, int64_t last_row, int64_t columns,
                                             typename Op::Scalar* scratch, PackedCache<typename Op::Scalar>* cache) {
  const int64_t step = round_up(columns, Op::S::kLanes);
  const auto copy = [&](int64_t begin, int64_t end, typename Op::Scalar* target) {
    for (int64_t next = begin, count; next < end; next += count, target += count / Op::kPack * step) {
      const T* source = at<T>(view, batch, head, next);
      count = min64(end - next, rows_together(view, next));
      if constexpr (Op::kPack == 2) {
        int64_t row_stride = view.stride[2];
        if (count % 2 != 0 && next + count < end) {  // a pair of rows that lie apart
          if (count == 1) row_stride = at<T>(view, batch, head, next + 1) - source;
          count = max64(2, count - 1);
        }
        interleave_rows(source, row_stride, view.stride[3], count, columns, target, step);
      } else {
        convert_rows(source, view.stride[2], columns <= 1 ? 1 : view.stride[3], count, columns, target, step);
      }
    }
  };
  const int64_t end = row + rows;
  const bool room = cache != nullptr && ((cache->moves ? rows : end) + Op::kPack - 1) / Op::kPack <= cache->room;
  // A pair that only begins here would bring the next row in: 0 times infinity.
  if (!room || row % Op::kPack != 0 || (rows % Op::kPack != 0 && end != last_row)) {
    copy(row, end, scratch);
    return {scratch, step};
  }
  cache->hold(batch * heads + head, row, end,
              [&](int64_t first, int64_t last) { copy(first, last, cache->at(first, Op::kPack, step)); });
  return {cache->at(row, Op::kPack, step), step};
}

// Whether rows hold infinities or NaN: times 0 such a number is NaN, and NaN is a sum that it enters.
template <class C>
class NonNumbers {
  using S = Simd<C>;
  static constexpr int64_t kSums = 4;  // of their own, since an addition waits for the one before

 public:
  template <class T>
  void add(const T* row, int64_t stride, int64_t columns) {
    int64_t c = 0;
    if (stride != 1) {
      C sum = C(0);
      for (; c < columns; ++c) sum += to_compute<C>(row[c * stride]) * C(0);
      sums_[0] += S::set1(sum);
      return;
    }
    for (; c + kSums * S::kLanes <= columns; c += kSums * S::kLanes)
      for (int64_t n = 0; n < kSums; ++n) sums_[n] = S::fma(S::load_as(row + c + n * S::kLanes), S::zero(), sums_[n]);
    for (; c < columns; c += S::kLanes) sums_[0] = S::fma(S::load_as(row + c, columns - c), S::zero(), sums_[0]);
  }
  void add_vector(typename S::V x) { sums_[0] = S::fma(x, S::zero(), sums_[0]); }
  bool found() const {
    auto numbers = sums_[0] == sums_[0];
    for (int64_t n = 1; n < kSums; ++n) numbers &= sums_[n] == sums_[n];
    return !S::all(numbers);
  }

 private:
  typename S::V sums_[kSums] = {S::zero(), S::zero(), S::zero(), S::zero()};
};

// Which of a head's rows, counted from `row`, hold infinities or NaN, of those that are `asked` for. Mostly none does,
// which is found out about all of them at once.
template <class T, class C, class AnyRows>
inline RowBits rows_of_non_numbers(const AnyRows& view, int64_t batch, int64_t head, int64_t row, int64_t columns,
                                   const RowBits& asked) {
  const auto add = [&](NonNumbers<C>& numbers, int64_t i) {
    numbers.add(at<T>(view, batch, head, row + i), columns <= 1 ? 1 : view.stride[3], columns);
  };
  RowBits found;
  NonNumbers<C> all;
  asked.for_each([&](int64_t i) { add(all, i); });
  if (!all.found()) return found;
  asked.for_each([&](int64_t i) {
    NonNumbers<C> own;
    add(own, i);
    if (own.found()) found.add(i);
  });
  return found;
}

// A copy of `count` rows, or pairs of rows, in which those of `cleared` are 0. It may be where the rows are.
template <class Op>
[[gnu::noinline]] Rows<typename Op::Scalar> with_zeros(Rows<typename Op::Scalar> rows, int64_t count, int64_t columns,
                                                       const RowBits& cleared, typename Op::Scalar* copy) {
  using Scalar = typename Op::Scalar;
  const bool in_place = rows.data == copy;
  const int64_t step = in_place ? rows.step : round_up(columns, Op::S::kLanes);
  if (!in_place)
    for (int64_t i = 0; i < count; i += Op::kPack) {
      Scalar* target = copy + i / Op::kPack * step;
      std::memcpy(target, rows.data + i / Op::kPack * rows.step, static_cast<size_t>(columns) * sizeof(Scalar));
      for (int64_t c = columns; c < step; ++c) target[c] = Scalar(0);
    }
  cleared.for_each([&](int64_t i) {
    Scalar* target = copy + i / Op::kPack * step;
    for (int64_t c = 0; c < columns; ++c)
      if constexpr (Op::kPack == 2) target[c] &= i % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
      else target[c] = Scalar(0);
  });
  return {copy, step};
}

// The rows of a block that a sum over them reads, without what lies in rows that no lane attends to: 0 times infinity
// or NaN would be NaN. `rows` itself where all such rows hold numbers; else a copy.
template <class T, class Op, class AnyRows>
inline Rows<typename Op::Scalar> attended_rows(Rows<typename Op::Scalar> rows, const AnyRows& view, int64_t batch,
                                               int64_t head, const BlockPlan& block, int64_t columns,
                                               typename Op::Scalar* copy) {
  if (!block.unattended.any()) return rows;
  const RowBits cleared =
      rows_of_non_numbers<T, typename Op::Compute>(view, batch, head, block.row, columns, block.unattended);
  return cleared.any() ? with_zeros<Op>(rows, block.rows, columns, cleared, copy) : rows;
}

}  // namespace
}  // namespace attnkern::cpu
