// dQ: where it is summed, and in which order tasks that share a KV group add to it.
#pragma once

#include "bias_gradient.h"

namespace attnkern::cpu {
namespace {

// Whether rows are copied, since they lie apart, that meet `others` rows of the other side: several tiles of them. And
// under a window, where a row meets few tiles, rows that crowd.
template <class T, class C>
inline bool copies_rows(const Backward& p, const View& view, int64_t columns, int64_t others) {
  return others > kTile<C> && (is_window(p.band) ? crowds<T>(view, columns) : lie_apart(view, columns));
}

// Where a head's dQ is summed: in the output itself, or in a buffer of the compute type with rows of whole vectors. Or
// in both: an output of 16-bit elements has room for the float32 sums of half of its rows.
template <class C>
struct QueryGrad {
  C* data;            // of the rows from `split` on
  int64_t step;       // from row to row
  int64_t head_step;  // from head to head
  int64_t split = 0;
  C* first = nullptr;  // of the rows before it
  int64_t first_head_step = 0;
  // Of a whole KV group, where the first tile of keys meets all queries: it stores its sums, to which others add; if it
  // is the only one, they are the results, and go to the output at once. Else all add to zeros.
  bool first_stores = false, at_once = false;

  C* row(int64_t head, int64_t i) const {
    return i < split ? first + head * first_head_step + i * step : data + head * head_step + (i - split) * step;
  }
  PrefetchRows to_prefetch(int64_t head, int64_t i, int64_t rows, int64_t columns) const {
    constexpr int64_t kBytes = sizeof(C);
    if (data == nullptr) return {};
    return {reinterpret_cast<const char*>(row(head, i)), step * kBytes, rows, columns * kBytes};
  }
};

// Which tasks there are. The first `whole` KV groups are a task each. The `left` ones after them are shared: each tile
// of keys is a task, or is one with each piece of the queries.
struct BackwardCut {
  int64_t kv_group, whole, left, tiles;
  int64_t slots = 1;                   // where the sums of a shared group lie: for so many at a time
  int64_t pieces = 1, piece_rows = 0;  // of the queries
  int64_t tables = 1;                  // of a shared group, where the gradient of a table of distances is summed

  int64_t tasks_of_group() const { return tiles * pieces; }
  int64_t shared_tasks() const { return left * tasks_of_group(); }
  // The shared groups of the slots before this one.
  int64_t groups_before(int64_t slot) const { return left / slots * slot + min64(left % slots, slot); }
};

// A task of a shared group. Each slot has a queue of tasks, in this order: group after group, tile after tile, piece
// after piece. They wait only for tasks before them, which have begun when they are taken from the queue.
struct SharedTask {
  int64_t slot, round;  // round: how many groups had their sums in the slot before
  int64_t group;        // of all
  int64_t tile, piece;

  SharedTask(const BackwardCut& cut, int64_t task) {
    const int64_t at = task / cut.tasks_of_group(), fewest = cut.left / cut.slots, longer = cut.left % cut.slots;
    slot = at < longer * (fewest + 1) ? at / (fewest + 1) : (at - longer) / fewest;
    round = at - cut.groups_before(slot);
    group = cut.whole + round * cut.slots + slot;
    tile = task % cut.tasks_of_group() / cut.pieces, piece = task % cut.pieces;
  }
};

// Where tasks sum dQ. Whole KV groups: in the output, if it has room for the sums; else in a worker's scratch, or, if
// they are too large to stay there, in a buffer for each worker and, as far as they fit, the output. Shared groups: all
// tasks of one in the output, or in a buffer.
template <class T, class C>
class QueryGradSums {
 public:
  QueryGradSums(const Backward& p, const BackwardCut& cut, int64_t workers)
      : p_(p),
        cut_(cut),
        wanted_(p.dq.data != nullptr && p.head_dim > 0),
        direct_(in_output(p)),
        step_(round_up(p.head_dim, Simd<C>::kLanes)),
        head_step_(p.seqlen_q * step_),
        sums_(wanted_ && !direct_ && cut.whole > 0 ? cut.kv_group * head_step_ : 0),
        large_(sums_ > kScratchSums),
        rows_in_output_(large_ && sizeof(T) == 2 && sizeof(C) == 4 && step_ == p.head_dim && p.dq.stride[1] % 2 == 0 &&
                                p.dq.stride[2] == p.head_dim
                            ? p.seqlen_q / 2
                            : 0),
        large_step_(head_step_ - rows_in_output_ * step_),
        large_sums_(large_ ? workers * cut.kv_group * large_step_ : 0),
        shared_sums_(wanted_ && !direct_ && cut.left > 0 ? cut.slots * cut.kv_group * head_step_ : 0) {}

  // Rows that lie apart are no place for sums, unless the sums are too many to stay in a worker's scratch.
  static bool in_output(const Backward& p) {
    return std::is_same_v<T, C> && p.head_dim % Simd<C>::kLanes == 0 &&
           !(copies_rows<T, C>(p, p.dq, p.head_dim, p.seqlen_k) &&
             heads_of_kv_group(p) * p.seqlen_q * p.head_dim <= kScratchSums);
  }
  int64_t scratch_bytes() const { return large_ ? 0 : sums_ * static_cast<int64_t>(sizeof(C)); }
  bool wanted() const { return wanted_; }

  // The sums of a whole group's heads from `head` on, zeros unless the `first_stores`. `scratch`: the worker's, of
  // scratch_bytes().
  QueryGrad<C> begin(int64_t batch, int64_t head, bool first_stores, void* scratch, int64_t worker) const {
    const int64_t kv_group = cut_.kv_group;
    QueryGrad<C> dq{nullptr, step_, head_step_};
    dq.at_once = first_stores && cut_.tiles == 1;
    if (!wanted_ || dq.at_once) return dq;
    C* output = reinterpret_cast<C*>(at<T>(p_.dq, batch, head));
    if (direct_) dq = {output, p_.dq.stride[2], p_.dq.stride[1]};
    else if (!large_) dq.data = static_cast<C*>(scratch);
    else
      dq = {large_sums_.data() + worker * kv_group * large_step_,
            step_,
            large_step_,
            rows_in_output_,
            output,
            p_.dq.stride[1] / 2};
    dq.first_stores = first_stores;
    for (int64_t h = 0; h < kv_group && !first_stores; ++h) clear(dq, h, {0, p_.seqlen_q});
    return dq;
  }
  // Writes the output.
  void end(int64_t batch, int64_t head, const QueryGrad<C>& dq) const {
    if (!wanted_ || dq.at_once) return;
    for (int64_t h = 0; h < cut_.kv_group; ++h) {
      // In this order, since the sums lie in the output: a row is shorter than its sums, so no unread sum is
      // overwritten.
      store_query_grad<T>(p_, batch, head + h, 0, dq.split, dq.row(h, 0), dq.step);
      store_query_grad<T>(p_, batch, head + h, dq.split, p_.seqlen_q - dq.split, dq.row(h, dq.split), dq.step);
    }
  }

  // Before the first task of a shared group: zeros, in rows of head `h` of shared group `index`.
  void begin_shared(int64_t index, int64_t h, int64_t batch, int64_t head, Range rows) const {
    if (!wanted_) return;
    clear_rows(p_, p_.dq, batch, head, rows, p_.head_dim);
    if (!direct_ && index < cut_.slots) clear(sums_of(index), h, rows);
  }
  QueryGrad<C> shared(int64_t slot, int64_t batch, int64_t head) const {
    if (!wanted_) return {nullptr, step_, head_step_};
    return direct_ ? QueryGrad<C>{at<C>(p_.dq, batch, head), p_.dq.stride[2], p_.dq.stride[1]} : sums_of(slot);
  }
  // Writes rows of a head of a shared group to the output, and clears their sums for the slot's next group.
  void end_shared(const QueryGrad<C>& dq, int64_t h, int64_t batch, int64_t head, Range rows) const {
    store_query_grad<T>(p_, batch, head, rows.begin, rows.end - rows.begin, dq.row(h, rows.begin), dq.step);
    if (!direct_) clear(dq, h, rows);
  }

 private:
  static constexpr int64_t kScratchSums = 1 << 18;

  QueryGrad<C> sums_of(int64_t slot) const {
    return {shared_sums_.data() + slot * cut_.kv_group * head_step_, step_, head_step_};
  }
  void clear(const QueryGrad<C>& dq, int64_t head, Range rows) const {
    for (int64_t i = rows.begin; i < rows.end; ++i)
      std::memset(dq.row(head, i), 0, static_cast<size_t>(direct_ ? p_.head_dim : step_) * sizeof(C));
  }

  const Backward& p_;
  const BackwardCut cut_;
  bool wanted_, direct_;
  int64_t step_, head_step_, sums_;  // sums_: of a worker, if they aren't in the output
  bool large_;
  int64_t rows_in_output_, large_step_;  // the rows of a head whose sums it has room for: if they lie together
  const Buffer<C> large_sums_, shared_sums_;
};

// How far the tasks of shared groups have come: so many queries, those of all heads of the group one after the other;
// and in the end one more.
class TasksProgress {
 public:
  TasksProgress(const Backward& p, const BackwardCut& cut)
      : cut_(cut), seqlen_q_(p.seqlen_q), progress_(cut.shared_tasks()) {}

  // Before the first task of shared group `index`.
  void begin(int64_t index) const {
    for (int64_t i = 0; i < cut_.tasks_of_group(); ++i)
      new (progress_.data() + index * cut_.tasks_of_group() + i) Progress;
  }
  Progress& of(int64_t group, int64_t tile, int64_t piece) const {
    return progress_.data()[((group - cut_.whole) * cut_.tiles + tile) * cut_.pieces + piece];
  }
  int64_t at(int64_t h, int64_t row) const { return h * seqlen_q_ + row; }
  int64_t done() const { return cut_.kv_group * seqlen_q_ + 1; }

 private:
  const BackwardCut& cut_;
  const int64_t seqlen_q_;
  const Buffer<Progress> progress_;
};

// A task's turns to add to dQ of its shared group: after the tiles before its own, so that the sums don't depend on how
// fast threads are. Tasks that begin together follow each other from block to block, each a bit behind.
template <class T, class C>
class Turns {
 public:
  Turns(const Backward& p, const BackwardCut& cut, const VisitingQueries<C>& visiting, const TasksProgress& progress,
        const QueryGradSums<T, C>& sums, const QueryGrad<C>& dq, const SharedTask& task, Range piece)
      : p_(p), cut_(cut), visiting_(visiting), progress_(progress), sums_(sums), dq_(dq), task_(task), piece_(piece) {}

  // Of head `h` of the group.
  void begin(int64_t h) {
    head_ = h;
    met_ = met_by(task_.round, task_.tile);
    opened_ = passed_ = met_.begin;
  }
  // Waits until all rows before `row` may be added to.
  void open(int64_t row) {
    Range rows{opened_, row};
    int64_t tile = task_.tile;
    for (int64_t round = task_.round; round >= 0; --round, tile = cut_.tiles)
      while (tile-- > 0 && rows.end > rows.begin) {
        const Range met = met_by(round, tile);
        if (met.end <= rows.begin && visiting_.rise()) break;
        if (met.begin >= rows.end || met.end <= rows.begin) continue;
        wait_until(progress_.of(group_of(round), tile, task_.piece), progress_.at(head_, min64(rows.end, met.end)));
        // For these rows it has waited for those before it itself.
        if (met.begin <= rows.begin) rows.begin = met.end;
        else if (met.end >= rows.end) rows.end = met.begin;
      }
    opened_ = max64(opened_, row);
  }
  // Nothing will be added to rows before `row` any more.
  void pass(int64_t row) {
    open(row);
    finish({passed_, row}, task_.tile + 1);
    passed_ = max64(passed_, row);
    announce(progress_.of(task_.group, task_.tile, task_.piece), progress_.at(head_, row));
  }
  void end() {
    if (met_.end > met_.begin) pass(met_.end);
  }

 private:
  int64_t group_of(int64_t round) const { return task_.group - (task_.round - round) * cut_.slots; }
  // Of the piece, the queries that a tile of keys meets.
  Range met_by(int64_t round, int64_t tile) const {
    const int64_t head = group_of(round) * cut_.kv_group + head_;
    return visiting_.of(head / p_.heads_q, head % p_.heads_q, tile, piece_);
  }
  // Stores those rows that no tile from `tile` on meets.
  void finish(Range rows, int64_t tile) const {
    for (; tile < cut_.tiles && rows.end > rows.begin; ++tile) {
      const Range met = met_by(task_.round, tile);
      if (met.begin >= rows.end && visiting_.rise()) break;
      if (met.begin >= rows.end || met.end <= rows.begin) continue;
      finish({rows.begin, met.begin}, tile + 1);
      rows.begin = met.end;
    }
    if (rows.end <= rows.begin) return;
    const int64_t head = task_.group * cut_.kv_group + head_;
    sums_.end_shared(dq_, head_, head / p_.heads_q, head % p_.heads_q, rows);
  }

  const Backward& p_;
  const BackwardCut& cut_;
  const VisitingQueries<C>& visiting_;
  const TasksProgress& progress_;
  const QueryGradSums<T, C>& sums_;
  const QueryGrad<C>& dq_;
  const SharedTask& task_;
  const Range piece_;
  int64_t head_ = 0;
  Range met_{0, 0};
  int64_t opened_ = 0, passed_ = 0;  // rows before these
};

}  // namespace
}  // namespace attnkern::cpu
