// Key ranges: which keys the rows of a tile visit, which queries the keys of a tile are visited by, and the bits of a
// block's rows and lanes.
#pragma once

#include "blocks.h"

namespace attnkern::cpu {
namespace {

// A bit for each lane of a tile's row: whether query and key meet.
using LaneBits = uint64_t;

// The bits of some lanes, as far as there are such.
inline LaneBits bits_between(Range lanes) {
  const auto below = [](int64_t end) {
    return end >= 64 ? ~LaneBits{0} : end <= 0 ? LaneBits{0} : (LaneBits{1} << end) - 1;
  };
  return below(lanes.end) & ~below(lanes.begin);
}

// A row's range number `which`, as far as it lies in `all`. Empty ones end where they begin, in `all` too.
inline Range range_of_row(const KeyRanges& ranges, int64_t batch, int64_t head, int64_t row, int64_t which, Range all) {
  const int32_t* ends =
      ranges.data + batch * ranges.stride[0] + head * ranges.stride[1] + row * ranges.stride[2] + 2 * which;
  const int64_t begin = min64(all.end, max64(all.begin, ends[0]));
  return {begin, max64(begin, min64(all.end, ends[1]))};
}

// The keys that a tile of rows visits: those between the ends of either range, over all rows that it isn't empty for.
class VisitedKeys {
 public:
  // `rows` rows of `heads` heads from `row` and `head` on; keys as far as they lie in `all`.
  VisitedKeys(const Attention& p, int64_t batch, int64_t head, int64_t heads, int64_t row, int64_t rows, Range all) {
    if (p.ranges.data == nullptr) {
      hull_[0] = common_[0] = all;
      return;
    }
    if (p.ranges.stride[1] == 0) heads = 1;
    if (p.ranges.stride[2] == 0) rows = 1;
    for (int64_t which = 0; which < p.ranges.count; ++which) {
      Range hull{all.end, all.begin}, common = all;
      for (int64_t h = head; h < head + heads; ++h)
        for (int64_t i = row; i < row + rows; ++i) {
          const Range range = range_of_row(p.ranges, batch, h, i, which, all);
          common = {max64(common.begin, range.begin), min64(common.end, range.end)};
          if (range.end > range.begin) hull = {min64(hull.begin, range.begin), max64(hull.end, range.end)};
        }
      if (hull.end > hull.begin) hull_[which] = hull, common_[which] = common;
    }
    if (hull_[0].end <= hull_[0].begin) std::swap(hull_[0], hull_[1]), std::swap(common_[0], common_[1]);
    if (hull_[1].end <= hull_[1].begin) return;
    if (hull_[1].begin < hull_[0].begin) std::swap(hull_[0], hull_[1]), std::swap(common_[0], common_[1]);
    if (hull_[1].begin <= hull_[0].end) hull_[0].end = max64(hull_[0].end, hull_[1].end), hull_[1] = {};
  }

  // In order and apart; may be empty.
  Range first() const { return hull_[0]; }
  Range second() const { return hull_[1]; }
  // Keys that all rows attend to; may be empty.
  Range common(int64_t which) const { return common_[which]; }
  // Whether all rows attend to these keys.
  bool shares(int64_t key, int64_t keys) const {
    const auto holds = [&](Range range) { return range.begin <= key && key + keys <= range.end; };
    return holds(common_[0]) || holds(common_[1]);
  }

 private:
  Range hull_[2] = {}, common_[2] = {};
};

// The queries that visit each tile of keys: those between the first and the last. Made once for a backward pass.
template <class C>
class VisitingQueries {
 public:
  explicit VisitingQueries(const Backward& p)
      : queries_(p.band.transposed()),
        seqlen_k_(p.seqlen_k),
        ranges_(p.ranges),
        tiles_(max64(1, (p.seqlen_k + kTile<C> - 1) / kTile<C>)),
        ends_(p.ranges.data == nullptr ? 0 : 2 * tiles_ * p.ranges.batch * p.ranges.heads) {
    if (ends_.data() == nullptr) return;
    constexpr int64_t kRows = 16;  // at a time
    for (int64_t b = 0; b < ranges_.batch; ++b)
      for (int64_t h = 0; h < ranges_.heads; ++h) {
        int32_t* ends = of_head(b, h);
        for (int64_t tile = 0; tile < tiles_; ++tile) ends[2 * tile] = ends[2 * tile + 1] = 0;
        for (int64_t row = 0; row < p.seqlen_q; row += kRows) {
          const int64_t end = min64(p.seqlen_q, row + kRows);
          const VisitedKeys keys(p, b, h, 1, row, end - row, {0, p.seqlen_k});
          for (const Range visited : {keys.first(), keys.second()}) {
            if (visited.end <= visited.begin) continue;
            for (int64_t tile = visited.begin / kTile<C>; tile <= (visited.end - 1) / kTile<C>; ++tile) {
              if (ends[2 * tile + 1] == 0) ends[2 * tile] = static_cast<int32_t>(row);
              ends[2 * tile + 1] = static_cast<int32_t>(end);
            }
          }
        }
      }
  }

  // Whether those of a tile begin and end no later than those of the next one.
  bool rise() const { return ends_.data() == nullptr; }
  // Those of a tile, as far as they lie in `within`.
  Range of(int64_t batch, int64_t head, int64_t tile, Range within) const {
    if (ends_.data() != nullptr) {
      const int32_t* ends = of_head(ranges_.batch == 1 ? 0 : batch, ranges_.heads == 1 ? 0 : head) + 2 * tile;
      within = {max64(within.begin, ends[0]), min64(within.end, ends[1])};
    }
    const int64_t key = tile * kTile<C>;
    return queries_.visited(key, min64(kTile<C>, seqlen_k_ - key), within);
  }

 private:
  int32_t* of_head(int64_t batch, int64_t head) const {
    return ends_.data() + 2 * tiles_ * (batch * ranges_.heads + head);
  }
  Band queries_;
  int64_t seqlen_k_;
  KeyRanges ranges_;
  int64_t tiles_;
  Buffer<int32_t> ends_;
};

// Takes out of the bits of `loops` rows of `lanes` lanes what the key ranges exclude. loop_dim: 3 where the loop runs
// over keys and the lanes over queries, 2 where it is the other way round.
[[gnu::noinline]] inline void exclude_by_ranges(const Attention& p, int loop_dim, int64_t batch, int64_t head,
                                                int64_t loop, int64_t loops, int64_t lane, int64_t lanes,
                                                LaneBits* rows) {
  if (loop_dim == 2) {
    for (int64_t i = 0; i < loops; ++i) {
      LaneBits inside = 0;
      for (int64_t which = 0; which < p.ranges.count; ++which) {
        const Range keys = range_of_row(p.ranges, batch, head, loop + i, which, {lane, lane + lanes});
        inside |= bits_between({keys.begin - lane, keys.end - lane});
      }
      rows[i] &= inside;
    }
    return;
  }
  LaneBits inside[2 * kBlockRows] = {};
  for (int64_t which = 0; which < p.ranges.count; ++which) {
    LaneBits changes[2 * kBlockRows + 1] = {}, now = 0;  // where a lane's range begins, and where it ends
    for (int64_t i = 0; i < lanes; ++i) {
      const Range keys = range_of_row(p.ranges, batch, head, lane + i, which, {loop, loop + loops});
      changes[keys.begin - loop] ^= LaneBits{1} << i;
      changes[keys.end - loop] ^= LaneBits{1} << i;
    }
    for (int64_t j = 0; j < loops; ++j) inside[j] |= now ^= changes[j];
  }
  for (int64_t j = 0; j < loops; ++j) rows[j] &= inside[j];
}

}  // namespace
}  // namespace attnkern::cpu
