// The walk along the band: into which blocks and segments the loop dimension is cut, and what a mask leaves of them.
#pragma once

#include "dropout.h"

namespace attnkern::cpu {
namespace {

// Some of the rows of a block, a bit each.
struct RowBits {
  static constexpr int64_t kWords = 2 * kBlockRows / 64;
  uint64_t words[kWords] = {};

  void add(int64_t row, bool here = true) { words[row / 64] |= uint64_t{here} << row % 64; }
  bool any() const {
    uint64_t all = 0;
    for (const uint64_t word : words) all |= word;
    return all != 0;
  }
  template <class Body>
  void for_each(const Body& body) const {
    for (int64_t w = 0; w < kWords; ++w)
      for (uint64_t word = words[w]; word != 0; word &= word - 1) body(64 * w + std::countr_zero(word));
  }
};

struct BlockPlan {
  int64_t row, rows;
  int64_t segments;
  RowBits unattended;  // rows of the segments that a mask or ranges exclude from all lanes, counted from `row`
  Segment segment[2 * kBlockRows / kGroup + 3];  // a full one, and the last of either edge may be short
};

// C = A^T B, summed over the rows of a block: of A, `rows` scalars in a row, and of B, whose vectors are the tile's.
template <class Op>
inline void gemm_over_block(int64_t rows, int64_t vectors, const BlockPlan& block, const Factors<Op, true>& factors,
                            const Target<typename Op::Compute>& target) {
  static_assert(kBlockRows <= kLongestSum);
  const Segment& first = block.segment[0];
  const bool one = block.segments == 1 && first.row == block.row && first.last - first.first == vectors;
  for_tiles<kTileRows * kTileVectors, kTileVectors, 1>(
      rows, vectors,
      SegmentsTile<Op>{factors, block.row, one ? (first.rows + Op::kPack - 1) / Op::kPack : 0, block.segment,
                       block.segments, target});
}

// Whether a result of so many rows and columns is summed with its columns along the lanes, in the user's layout, and
// not with its rows. The last vector of what lies along the lanes is partly idle: where fewer are, decides.
template <class C>
inline bool sums_by_rows(int64_t rows, int64_t columns) {
  return round_up(columns, Simd<C>::kLanes) * rows <= columns * round_up(rows, Simd<C>::kLanes);
}

// Vectors of columns of a row, of which there are so many from the first vector on.
template <class T, class V, int kVectors>
[[gnu::always_inline]] inline void store_row(const V (&row)[kVectors], T* target, int64_t columns) {
  using S = Simd<std::remove_cvref_t<decltype(row[0][0])>>;
  if (columns >= kVectors * S::kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v + 1 < kVectors; v += 2) S::store_two_as(target + v * S::kLanes, row[v], row[v + 1]);
    if constexpr (kVectors % 2 != 0) S::store_as(target + (kVectors - 1) * S::kLanes, row[kVectors - 1]);
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) S::store_as(target + v * S::kLanes, row[v], columns - v * S::kLanes);
  }
}

// The sums of a result whose columns lie along the lanes, and the user's rows that they become. A factor for each row
// is an array of the tile's length.
template <class C, class T>
struct RowSums {
  using S = Simd<C>;
  C* sums;       // rows of whole vectors
  int64_t step;  // from row to row
  T* out;
  int64_t out_step, columns;
  bool started = false;           // sums hold those of earlier blocks
  const C* correction = nullptr;  // the factor of these; null: 1
  // The factor of the results; set for the last block, which stores them. They are exactly 0 where it is 0, even for
  // infinity and NaN.
  const C* factor = nullptr;

  static typename S::V scaled(typename S::V sum, typename S::V scale) {
    return scale == S::zero() ? S::zero() : sum * scale;
  }
  // The results, where the last block was not known to be.
  void store(int64_t rows) const {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = 0; column < columns; column += S::kLanes)
        S::store_as(out + row * out_step + column, scaled(S::load(sums + row * step + column), S::set1(factor[row])),
                    columns - column);
  }
};

// A register tile of R = P^T V, where P is a block's and a row of P^T is a lane of the tile: the lanes are the columns
// of V, so that rows are cut as finely as a register tile has them, at the edge of the band, too.
template <class Op, class T>
struct RowSumsTile {
  using C = typename Op::Compute;
  using S = Simd<C>;
  Factors<Op, true> factors;  // from the block's first row on
  const BlockPlan* block;
  int64_t whole;  // steps of the sums, if all rows are one segment of all vectors; else 0
  Band band;      // of the lanes
  int64_t lane;   // of the tile's first row
  int64_t first;  // row of this tile
  RowSums<C, T> target;

  template <int kRows, int kVectors>
  void run(int64_t row, int64_t vector) const {
    typename Op::V sum[kRows][kVectors] = {};
    row += first;
    const int64_t column = vector * S::kLanes;
    const auto add = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
      ProductWalk<Op, true> walk(factors.from(begin), row, column);
      for (int64_t k = begin; k < end; ++k) walk.step(sum);
    };
    if (whole > 0) add(0, whole);
    else for_live_rows(row, kRows, add);

    const RowSums<C, T> to = target;  // nothing that is stored can be part of it
    C* const sums = to.sums + row * to.step + column;
    if (to.started) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto scale = S::set1(to.correction == nullptr ? C(1) : to.correction[row + r]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          sum[r][v] = S::fma(S::load(sums + r * to.step + v * S::kLanes), scale, sum[r][v]);
      }
    }
    if (to.factor == nullptr) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) S::store(sums + r * to.step + v * S::kLanes, sum[r][v]);
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto scale = S::set1(to.factor[row + r]);
        T* const out = to.out + (row + r) * to.out_step + column;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = to.scaled(sum[r][v], scale);
        store_row(sum[r], out, to.columns - column);
      }
    }
  }

 private:
  // add(begin, end) for the steps of the block that `rows` rows, which are lanes of one vector, meet.
  template <class Add>
  [[gnu::always_inline]] inline void for_live_rows(int64_t row, int64_t rows, const Add& add) const {
    const int64_t vector = row / S::kLanes;
    const auto alive = [&](const Segment& segment) { return vector >= segment.first && vector < segment.last; };
    for (const Segment *segment = block->segment, *last = segment + block->segments; segment < last;) {
      if (!alive(*segment)) {
        ++segment;
        continue;
      }
      Range steps{segment->row, segment->row};
      for (; segment < last && segment->row == steps.end && alive(*segment); ++segment) steps.end += segment->rows;
      const Range live = band.visited(lane + row, rows, steps);
      if (live.end > live.begin)
        add((live.begin - block->row) / Op::kPack, (live.end - block->row + Op::kPack - 1) / Op::kPack);
    }
  }
};

// R = P^T V, summed over the rows of a block, for `rows` lanes of its tile from `lane` on.
template <class Op, class T>
inline void sum_rows(int64_t rows, const BlockPlan& block, const Factors<Op, true>& factors, const Band& band,
                     int64_t lane, const RowSums<typename Op::Compute, T>& target) {
  static_assert(kBlockRows <= kLongestSum);
  constexpr int64_t kLanes = Op::S::kLanes;
  const Segment& first = block.segment[0];
  const bool one = block.segments == 1 && !first.partial && first.row == block.row &&
                   first.last - first.first == (rows + kLanes - 1) / kLanes;
  const int64_t whole = one ? (first.rows + Op::kPack - 1) / Op::kPack : 0,
                vectors = (target.columns + kLanes - 1) / kLanes;
  for (int64_t row = 0, at_once = one ? rows : kLanes; row < rows; row += at_once)
    for_tiles<kTileRows * kTileVectors, kTileVectors, 1>(
        min64(at_once, rows - row), vectors, RowSumsTile<Op, T>{factors, &block, whole, band, lane, row, target});
}

// O, dK or dV of a tile, in the making: a row for each of the tile's lanes, summed over the blocks of all that it
// meets.
template <class T, class Op>
class Result {
 public:
  using C = typename Op::Compute;
  using Scalar = typename Op::Scalar;
  // Of a tensor with `rows` rows a head; `sums` has room for kTile rows of whole vectors. `transposed`: the rows stay
  // along the lanes in any case.
  Result(const View& view, int64_t rows, int64_t columns, C* sums, bool transposed = false)
      : view_(view),
        by_rows_(!transposed && sums_by_rows<C>(rows, columns)),
        rows_{sums, round_up(columns, Simd<C>::kLanes), nullptr, view.stride[2], columns} {}
  // Then `rows` of add() must be padded to whole vectors.
  bool by_rows() const { return by_rows_; }
  bool stored() const { return rows_.factor != nullptr; }

  void begin(int64_t batch, int64_t head, int64_t lane, int64_t lanes) {
    lane_ = lane;
    lanes_ = lanes;
    rows_.out = view_.data == nullptr ? nullptr : at<T>(view_, batch, head, lane);
    rows_.started = false;
    rows_.factor = nullptr;
  }
  // Adds the sum over a block's rows of `factors`, transposed, times `rows`; what was summed before counts `correction`
  // times, if that isn't null. If `factor` isn't null nothing follows, and results by rows are stored.
  void add(const BlockPlan& block, const Scalar* factors, Rows<Scalar> rows, const Band& band, const C* correction,
           const C* factor) {
    if (by_rows_) {
      rows_.correction = correction;
      rows_.factor = factor;
      sum_rows<typename Op::Product, T>(lanes_, block, {factors, kTile<C>, rows.data, rows.step}, band, lane_, rows_);
    } else {
      gemm_over_block<typename Op::Product>(rows_.columns, (lanes_ + Simd<C>::kLanes - 1) / Simd<C>::kLanes, block,
                                            {rows.data, rows.step, factors, kTile<C>},
                                            {rows_.sums, kTile<C>,
                                             !rows_.started          ? Epilogue::kStore
                                             : correction != nullptr ? Epilogue::kRescale
                                                                     : Epilogue::kAdd,
                                             correction});
    }
    rows_.started = true;
  }
  // The sums by columns, for one who adds a block to them; not `started`: the block's are the first.
  struct Sums {
    C* sums;
    bool started;
  };
  Sums open() {
    const Sums sums{rows_.sums, rows_.started};
    rows_.started = true;
    return sums;
  }
  // Adds the sums of other blocks, which lie in `kept`, unless these are the `first`; and keeps them there, unless they
  // are the `last`.
  void join(C* kept, bool first, bool last) {
    using S = Simd<C>;
    start();
    for (int64_t i = 0; i < rows_.step * kTile<C>; i += S::kLanes) {
      const auto sum = first ? S::load(rows_.sums + i) : S::load(kept + i) + S::load(rows_.sums + i);
      S::store((last ? rows_.sums : kept) + i, sum);
    }
  }
  // Stores what the last block has not.
  void end(const C* factor) {
    if (stored()) return;
    rows_.factor = factor;
    start();
    if (by_rows_) rows_.store(lanes_);
    else store_transposed(rows_.sums, lanes_, rows_.columns, factor, rows_.out, rows_.out_step);
  }

 private:
  // Zeros, if the lanes met no block.
  void start() {
    if (!rows_.started) std::memset(rows_.sums, 0, static_cast<size_t>(rows_.step * kTile<C>) * sizeof(C));
    rows_.started = true;
  }

  const View& view_;
  bool by_rows_;
  int64_t lane_ = 0, lanes_ = 0;
  RowSums<C, T> rows_;
};

// Whether each tile meets but a part of the loop dimension, which moves on from tile to tile.
inline bool is_window(const Band& band) { return band.left < kUnbounded && band.right < kUnbounded; }

// Cuts the part of the loop dimension that the tile's lanes visit into blocks of at most `most` rows, evenly sized. The
// full rows of a block are one segment. Where an edge of the band passes through, segments of kGroup rows hold their
// live vectors only. An edge stays in one block if it fits, and segments begin an even number of rows from their block,
// so that pairs of rows stay together.
template <class C>
class BandWalk {
 public:
  // The loop indices of a lane are band.visited(lane), as far as they are in `within`, and then in `later`.
  BandWalk(const Band& band, int64_t lane, int64_t lanes, Range within, int64_t most, Range later = {})
      : band_(band.transposed()), lane_(lane), lanes_(lanes), later_(later), most_(most) {
    enter(within);
  }

  bool next(BlockPlan& block) {
    if (next_ >= visited_.end) {
      if (later_.end <= later_.begin) return false;
      enter(later_);
      later_ = {};
      if (next_ >= visited_.end) return false;
    }
    const int64_t left = visited_.end - next_, parts = (left + most_ - 1) / most_;
    int64_t end = next_ + min64(left, round_up((left + parts - 1) / parts, 2));
    // All in front of the edge that the block would tear apart.
    if (end < visited_.end && end > full_.end && even(full_.end) > next_) end = even(full_.end);
    block.row = next_;
    block.rows = end - next_;
    block.segments = 0;
    block.unattended = {};
    const Range full{next_ + min64(end - next_, round_up(max64(full_.begin - next_, 0), 2)),
                     full_.end >= end ? end : even(full_.end)};
    const bool any = full.end > full.begin;
    add_partial(block, {next_, any ? full.begin : end});
    if (any) {
      block.segment[block.segments++] = {full.begin, full.end - full.begin, 0, vectors(lanes_), false};
      add_partial(block, {full.end, end});
    }
    next_ = end;
    return true;
  }

  // Whether next() will find nothing more.
  bool done() const { return next_ >= visited_.end && later_.end <= later_.begin; }

  // Lanes of the tile, relative to its first, that loop index `row` may meet; may lie outside of the tile.
  Range live_lanes(int64_t row) const {
    return {row + band_.offset - band_.left - lane_, row + band_.offset + band_.right + 1 - lane_};
  }

 private:
  void enter(Range within) {
    visited_ = band_.transposed().visited(lane_, lanes_, within);
    full_ = band_.transposed().full(lane_, lanes_, within);
    if (full_.end <= full_.begin) full_ = {visited_.end, visited_.end};
    next_ = visited_.begin;
  }
  static int64_t vectors(int64_t lanes) { return (lanes + Simd<C>::kLanes - 1) / Simd<C>::kLanes; }
  // The last row in front of `row` that an even number of rows separates from the next block's first.
  int64_t even(int64_t row) const { return next_ + (row - next_) / 2 * 2; }

  // Partial segments of the rows [begin, end).
  void add_partial(BlockPlan& block, Range rows) const {
    for (int64_t row = rows.begin; row < rows.end; row += kGroup) {
      const int64_t count = min64(kGroup, rows.end - row);
      const Range live = band_.visited(row, count, {lane_, lane_ + lanes_});
      if (live.end > live.begin)
        block.segment[block.segments++] = {row, count, (live.begin - lane_) / Simd<C>::kLanes,
                                           vectors(live.end - lane_), true};
    }
  }

  Band band_;
  int64_t lane_, lanes_;
  Range later_, visited_, full_;
  int64_t next_, most_;
};

// What a bool mask and key ranges leave of a block: of a full block, rows in front and behind that it excludes from all
// lanes go, and segments of kGroup rows hold their live vectors only. False if nothing is left. `mask`: the bits of the
// block's rows, in `rows`; null if all are set.
template <class C>
inline bool apply_mask(const Attention& p, const BandWalk<C>& walk, int loop_dim, int64_t batch, int64_t head,
                       int64_t lane, int64_t lanes, LaneBits* rows, BlockPlan& block, const LaneBits*& mask) {
  mask_bits(p, loop_dim, batch, head, block.row, block.rows, lane, lanes, rows);
  int64_t begin = 0, end = block.rows;
  while (begin < end && rows[begin] == 0) ++begin;
  if (begin == end) return false;
  while (rows[end - 1] == 0) --end;
  Segment* const segment = block.segment;
  if (block.segments == 1 && !segment->partial && segment->rows == block.rows) {
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
  const LaneBits within = bits_between({0, lanes});
  // Of a row of a segment, the lanes that it reaches.
  const auto live_of = [&](const Segment& of_rows, int64_t row) {
    const LaneBits live = rows[row - block.row] & within;
    return of_rows.partial ? live & bits_between(walk.live_lanes(row)) : live;
  };
  LaneBits all = ~LaneBits{0};
  bool unattended = false;
  for (int64_t s = 0; s < block.segments; ++s) {
    const Segment& of_rows = block.segment[s];
    const int64_t first = of_rows.row - block.row;
    for (int64_t i = first; i < first + of_rows.rows; ++i) all &= rows[i];
    if (of_rows.partial)
      for (int64_t i = 0; i < of_rows.rows; ++i) unattended |= live_of(of_rows, of_rows.row + i) == 0;
    else
      for (int64_t i = first; i < first + of_rows.rows; ++i) unattended |= (rows[i] & within) == 0;
  }
  if (unattended)
    for (int64_t s = 0; s < block.segments; ++s) {
      const Segment& of_rows = block.segment[s];
      for (int64_t row = of_rows.row; row < of_rows.row + of_rows.rows; ++row)
        block.unattended.add(row - block.row, live_of(of_rows, row) == 0);
    }
  mask = all == ~LaneBits{0} ? nullptr : rows;
  return true;
}

}  // namespace
}  // namespace attnkern::cpu
