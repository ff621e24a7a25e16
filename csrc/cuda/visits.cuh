// Which blocks of columns a tile of rows visits: those in which one of its rows attends to a column, or is attended to
// by one, and no other. Blocks in which all rows and columns meet need no mask.
//
// By the band alone they are one interval. With key ranges they are found 32 at a time, as bits: a lane reads the
// ranges of every 32nd row, and the warp puts together what its lanes know. All warps of a block find the same. Nothing
// of a mask is kept but these two words, so that a mask costs no memory.
#pragma once

#include "cuda/launch.h"
#include "cuda/score.cuh"

namespace attnkern::cuda {

constexpr int kNoBlock = INT32_MAX;
constexpr int kGranule = 16, kSummaryRows = 32 * kGranule;  // queries of an entry of the summary, of a group
constexpr int kSummarySize = 33;                            // entries of a group, its own before those of its granules

inline int64_t summary_groups(const Attention& p) { return (p.seqlen_q + kSummaryRows - 1) / kSummaryRows; }

// For the backward pass: with the summary of its ranges.
inline Score score_of_backward(const BackwardCall& p, bool fast_path) {
  Score s = score_of(p, fast_path);
  s.summary = reinterpret_cast<const int4*>(p.range_summary);
  const int64_t of_head = summary_groups(p) * kSummarySize;
  s.summary_stride[0] = p.ranges.batch > 1 ? p.ranges.heads * of_head : 0;
  s.summary_stride[1] = p.ranges.heads > 1 ? of_head : 0;
  return s;
}

// The blocks of kBlock columns that a band leaves to a tile of rows, one after the other: from the first column that a
// row meets, or the multiple of kBlock before it, up to the last one.
template <int kBlock, bool kAligned = false>
class BandBlocks {
 public:
  __device__ __forceinline__ BandBlocks(const Band& band, int first_row, int64_t rows, int columns) {
    const Range all = {0, columns};
    const Range visited = band.visited(first_row, rows, all), full = band.full(first_row, rows, all);
    full_begin_ = static_cast<int>(full.begin), full_end_ = static_cast<int>(full.end);
    const Walk walk(visited, kAligned ? kBlock : 1);
    first_ = walk.begin, end_ = walk.end;
  }
  __device__ __forceinline__ bool done() const { return first_ >= end_; }
  // Of the columns that a row meets.
  __device__ __forceinline__ int end() const { return end_; }
  // The block's first column.
  __device__ __forceinline__ int first() const { return first_; }
  // Whether a row and a column of the block that begins here don't meet: of any block, and so asked when it is needed.
  __device__ __forceinline__ bool masked(int first) const { return first < full_begin_ || first + kBlock > full_end_; }
  __device__ __forceinline__ void advance() { first_ += kBlock; }

 protected:
  int first_, end_, full_begin_, full_end_;
};

// The blocks that a band leaves of so many heads, one head after the other.
template <int kBlock>
class BandBlocksOfHeads : public BandBlocks<kBlock, true> {
  using Base = BandBlocks<kBlock, true>;

 public:
  __device__ __forceinline__ BandBlocksOfHeads(const Band& band, int first_row, int64_t rows, int columns,
                                               int first_head, int heads)
      : Base(band, first_row, rows, columns),
        begin_(this->first_),
        head_(first_head),
        end_head_(Base::done() ? first_head : first_head + heads) {}
  __device__ __forceinline__ bool done() const { return head_ >= end_head_; }
  __device__ __forceinline__ int head() const { return head_; }
  __device__ __forceinline__ void advance() {
    Base::advance();
    if (Base::done()) this->first_ = begin_, ++head_;
  }

 private:
  int begin_, head_, end_head_;
};

// run(own_of(row)) for every 32nd of so many queries, from the lane's on: the keys of kAtOnce of them are read before
// one is looked at. Past the last query, the last one's come again.
template <int kAtOnce, typename OwnOf, typename Run>
__device__ __forceinline__ void each_own_keys(OwnOf own_of, int count, Run run) {
#pragma unroll 1
  for (int row = threadIdx.x % 32; row < count; row += 32 * kAtOnce) {
    OwnKeys own[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) own[n] = own_of(n == 0 ? row : min(row + n * 32, count - 1));
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) run(own[n]);
  }
}

// The key ranges of a tile's queries, copied into shared memory by the warp that walks by them: there they cost a walk
// one wait for memory, where every look costs several else. Number n of all queries, then number n + 1.
template <int kRows>
constexpr uint32_t kStagedBytes = kRows * 16;
template <int kRows>
__device__ __forceinline__ uint32_t staged_at(int n, int row) {
  return (n * kRows + row) * 4;
}
template <int kRows>
__device__ __forceinline__ void stage_ranges(const Score& p, int batch, int head, int first_row, int rows,
                                             uint32_t to) {
  if (p.ranges != nullptr) {
    const int32_t* ranges = ranges_of(p, batch, head) + first_row * p.range_stride[2];
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < rows; row += 32) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n >= 2 * p.range_count) break;
        ptx::cp_async<4>(to + staged_at<kRows>(n, row), ranges + row * p.range_stride[2] + n);
      }
    }
  }
  ptx::cp_async_commit();
}

// The blocks of keys that a tile of at most kRows queries of one head visits, by the band and the key ranges. For whole
// warps. kAhead: the first blocks are found with the ranges of so many rows of a lane under way at a time, in as many
// registers more. kStaged: the ranges are those that stage_ranges has copied; and it is known whether a block may have
// keys that no query of the tile attends to.
template <int kRows, int kBlock, int kAhead = 1, bool kStaged = false>
class KeyBlocks {
 public:
  // Blocks begin at `columns.begin`; keys past `columns.end` aren't looked at.
  __device__ __forceinline__ KeyBlocks(const Score& p, int batch, int head, int first_row, int rows, Range columns,
                                       uint32_t staged = 0)
      : p_(p),
        staged_(staged),
        batch_(batch),
        head_(head),
        first_row_(first_row),
        rows_(rows),
        begin_(static_cast<int>(columns.begin)),
        end_(static_cast<int>(columns.end)) {
    if constexpr (kStaged) {
      ptx::cp_async_wait<0>();
      __syncwarp();
    }
    look<kAhead>(0);
  }
  __device__ __forceinline__ bool done() const { return visited_ == 0; }
  __device__ __forceinline__ int first() const { return begin_ + (window_ + __ffs(visited_) - 1) * kBlock; }
  __device__ __forceinline__ bool masked() const { return (full_ & visited_ & -visited_) == 0; }
  // False: a query of the tile attends to all of the block, so that every key has one.
  __device__ __forceinline__ bool hides() const
    requires kStaged
  {
    return (covered_ & visited_ & -visited_) == 0;
  }
  __device__ __forceinline__ void advance() {
    visited_ &= visited_ - 1;
    if (visited_ == 0) look<1>(window_ + 32);
  }

 private:
  __device__ __forceinline__ OwnKeys own_keys_of(int row) const {
    if constexpr (kStaged) {
      return own_keys_by(p_, first_row_ + row, [&](int n) {
        return static_cast<int>(ptx::load_shared_word(staged_ + staged_at<kRows>(n, row)));
      });
    } else {
      return own_keys(p_, ranges_of(p_, batch_, head_), first_row_ + row);
    }
  }
  // run(begin, end) for the two intervals of keys of a row.
  template <typename Run>
  __device__ __forceinline__ void each_interval(const OwnKeys& own, Run run) const {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int begin = max(own.begin[which], begin_) - begin_, end = min(own.end[which], end_) - begin_;
      if (begin < end) run(begin, end);
    }
  }

  // The blocks that lie within an interval of keys, as bits. Past the last key there is nothing to hide.
  __device__ __forceinline__ uint32_t whole_blocks(int begin, int end) const {
    const int past = end == end_ - begin_ ? end + kBlock - 1 : end;
    return bits_between((begin + kBlock - 1) / kBlock - window_, past / kBlock - window_);
  }

  // The first block from number `from` on that is visited, and the 31 behind it.
  template <int kAtOnce>
  __device__ __forceinline__ void look(int from) {
    visited_ = full_ = covered_ = 0;
    if (p_.ranges == nullptr) {
      const Range all = {begin_, end_};
      const Range visited = p_.band.visited(first_row_, rows_, all), full = p_.band.full(first_row_, rows_, all);
      if (visited.begin >= visited.end) return;
      window_ = max(from, static_cast<int>(visited.begin - begin_) / kBlock);
      visited_ = bits_between(0, static_cast<int>(visited.end - begin_ + kBlock - 1) / kBlock - window_);
      full_ = bits_between(static_cast<int>(full.begin - begin_ + kBlock - 1) / kBlock - window_,
                           static_cast<int>(full.end - begin_) / kBlock - window_);
      if constexpr (kStaged) {
        covered_ = whole_blocks(static_cast<int>(visited.begin) - begin_, static_cast<int>(visited.end) - begin_);
      }
      return;
    }
    const auto each_row = [&](auto run) {
      each_own_keys<kAtOnce>([&](int row) { return own_keys_of(row); }, rows_, run);
    };
    int nearest = kNoBlock;
    each_row([&](const OwnKeys& own) {
      each_interval(own, [&](int begin, int end) {
        if ((end - 1) / kBlock >= from) nearest = min(nearest, max(begin / kBlock, from));
      });
    });
    window_ = __reduce_min_sync(0xffffffffu, nearest);
    if (window_ == kNoBlock) return;
    uint32_t seen = 0, full = ~0u, some = 0;
    each_row([&](const OwnKeys& own) {
      uint32_t covered = 0;
      each_interval(own, [&](int begin, int end) {
        seen |= bits_between(begin / kBlock - window_, (end + kBlock - 1) / kBlock - window_);
        covered |= bits_between((begin + kBlock - 1) / kBlock - window_, end / kBlock - window_);
        if constexpr (kStaged) some |= whole_blocks(begin, end);
      });
      full &= covered;
    });
    if constexpr (kStaged) covered_ = __reduce_or_sync(0xffffffffu, some);
    visited_ = __reduce_or_sync(0xffffffffu, seen);
    full_ = __reduce_and_sync(0xffffffffu, full);
  }

  const Score& p_;
  uint32_t staged_;
  int batch_, head_, first_row_, rows_, begin_, end_;
  int window_;               // the first of 32 blocks,
  uint32_t visited_, full_;  // of which a bit says whether it is visited, still to come, and needs no mask
  uint32_t covered_;         // and whether some query attends to all of it, or by the band all together
};

// KeyBlocks with queries and keys exchanged: the blocks of kBlock queries, of so many heads one after the other, by
// which a tile of at most kRows keys is visited. Which queries may visit it is read from the summary of the ranges
// (ranges.cu), and then asked of the queries themselves. kAhead: of the first block so many of a lane's queries at a
// time.
template <int kBlock, int kAhead = 1>
class QueryBlocks {
 public:
  __device__ __forceinline__ QueryBlocks(const Score& p, int batch, int first_head, int heads, int first_row, int rows)
      : p_(p),
        batch_(batch),
        head_(first_head),
        end_head_(first_head + heads),
        begin_(first_row),
        end_(first_row + rows) {
    const Range range = visiting();
    if (range.begin >= range.end) head_ = end_head_;
    begin_head();
    find<kAhead>();
  }
  __device__ __forceinline__ bool done() const { return head_ >= end_head_; }
  __device__ __forceinline__ int head() const { return head_; }
  __device__ __forceinline__ int first() const { return first_; }
  __device__ __forceinline__ bool masked() const { return masked_; }

  __device__ __forceinline__ void advance() { find<1>(); }

 private:
  static constexpr int kGranules = kBlock / kGranule;  // of a block
  static_assert(kBlock % kGranule == 0);

  template <int kAtOnce>
  __device__ __forceinline__ void find() {
    while (head_ < end_head_) {
      if (candidates_ == 0) {
        look();
        continue;
      }
      first_ = (group_ * 32 + __ffs(candidates_) - 1) / kGranules * kBlock;
      candidates_ &= ~bits_between(0, next_granule() - group_ * 32);
      if (meets<kAtOnce>()) return;
    }
  }

  // That the band leaves. Found anew whenever they are asked for, which is seldom.
  __device__ __forceinline__ Range visiting() const {
    return p_.band.transposed().visited(begin_, end_ - begin_, {0, p_.seqlen_q});
  }
  // The first granule behind the block.
  __device__ __forceinline__ int next_granule() const { return first_ / kGranule + kGranules; }
  __device__ __forceinline__ void begin_head() {
    group_ = static_cast<int>(visiting().begin) / kSummaryRows - 1;
    first_ = -kBlock;
    candidates_ = 0;
  }

  // The next group of which some granule may visit, or the next head. A lane reads one entry of the summary, so that
  // none waits for more loads than two.
  __device__ __forceinline__ void look() {
    ++group_;
    const Range range = visiting();
    if (group_ * kSummaryRows >= range.end) {
      ++head_;
      begin_head();
      return;
    }
    uint32_t visits = ~0u;
    if (p_.ranges != nullptr) {
      const int lane = threadIdx.x % 32, groups = (p_.seqlen_q + kSummaryRows - 1) / kSummaryRows;
      const int4* summary = p_.summary + batch_ * p_.summary_stride[0] + head_ * p_.summary_stride[1];
      const auto may_visit = [&](const int4& hull) {
        return (hull.x < end_ && hull.y > begin_) || (hull.z < end_ && hull.w > begin_);
      };
      // Whole groups that don't.
      const bool live = group_ + lane < groups && may_visit(summary[(group_ + lane) * kSummarySize]);
      const uint32_t found = __ballot_sync(0xffffffffu, live);
      if (found == 0) {
        group_ += 31;
        return;
      }
      group_ += __ffs(found) - 1;
      visits = __ballot_sync(0xffffffffu, may_visit(summary[group_ * kSummarySize + 1 + lane]));
    }
    // Those that the band leaves, and no block that has begun in the group before.
    const int first = max(static_cast<int>(range.begin) / kGranule, next_granule());
    const int end = static_cast<int>(range.end + kGranule - 1) / kGranule;
    candidates_ = visits & bits_between(first - group_ * 32, end - group_ * 32);
  }

  // Whether some query of the block attends to some key of the tile; and whether not every one does to every key.
  template <int kAtOnce>
  __device__ __forceinline__ bool meets() {
    if (p_.ranges == nullptr) {
      masked_ = first_ + kBlock > p_.seqlen_q || begin_ - (first_ + kBlock - 1) < p_.low || end_ - 1 - first_ > p_.high;
      return true;
    }
    bool some = false, all = true;
    const int32_t* ranges = ranges_of(p_, batch_, head_);
    each_own_keys<kAtOnce>([&](int row) { return own_keys(p_, ranges, first_ + row); }, kBlock,
                           [&](const OwnKeys& own) {
                             bool covers = false;
#pragma unroll
                             for (int which = 0; which < 2; ++which) {
                               some |= max(own.begin[which], begin_) < min(own.end[which], end_);
                               covers |= own.begin[which] <= begin_ && own.end[which] >= end_;
                             }
                             all &= covers;
                           });
    masked_ = !__all_sync(0xffffffffu, all);
    return __any_sync(0xffffffffu, some);
  }

  const Score& p_;
  int batch_, head_, end_head_, begin_, end_;  // the keys
  int group_;                                  // of kSummaryRows queries,
  uint32_t candidates_;                        // of whose granules a bit says whether it is still to be looked at
  int first_;
  bool masked_ = false;
};

}  // namespace attnkern::cuda
