// Packed calls: where key ranges fall apart into sequences, whose queries attend to keys of their own, each sequence is
// a call of its own with views of its rows. Its tiles meet no other sequence, no bits are made where a band says which
// keys its queries attend to, and a few queries are decoded.
#pragma once

#include "ranges.h"
#include "tasks.h"

namespace attnkern::cpu {
namespace {

// Queries of one entry of the ranges' batch, and the keys that they, and no others, attend to: those of the band, which
// counts queries and keys from the sequence's first; or, if it `has_ranges`, those of Sequences::ranges.
struct Sequence {
  int64_t batch, query, queries;
  Range keys;
  Band band;
  bool has_ranges;

  int64_t scores() const { return queries * (keys.end - keys.begin); }
};

// What a row's range is, as it was given: it may lie outside of the keys or end before it begins.
inline Range given_range(const KeyRanges& ranges, int64_t batch, int64_t row) {
  const int32_t* ends = ranges.data + batch * ranges.stride[0] + row * ranges.stride[2];
  return {ends[0], ends[1]};
}

// One end of the ranges of consecutive rows, as a band has it: it rises by 1 from row to row, but for the rows at which
// it lies beyond what there is. Of the other end all numbers are turned around.
class RisingEnd {
 public:
  // `distance`: how far the end lies within what there is, 0 or less if it doesn't. False: it is no such end.
  bool add(int64_t row, int64_t distance) {
    if (distance > 0) {
      rises_ &= none_ || distance - row == distance_;
      distance_ = distance - row, none_ = false;
    } else {
      beyond_ = row > beyond_ ? row : beyond_;
    }
    return rises_;
  }
  // Whether it is such an end; none: all rows lie beyond.
  bool rises() const { return rises_ && (none_ || beyond_ + distance_ <= 0); }
  bool none() const { return none_; }
  int64_t at_row_0() const { return distance_; }

 private:
  int64_t distance_ = 0, beyond_ = -kUnbounded;
  bool none_ = true, rises_ = true;
};

// Makes the sequence's band: the call's and, if the rows' ranges are one within the sequence's keys, theirs. Whether
// they are.
inline bool band_of(const Attention& p, Sequence& s) {
  const int64_t keys = s.keys.end - s.keys.begin;
  RisingEnd begins, ends;  // the latter by rows counted backwards
  for (int64_t i = 0; i < s.queries; ++i) {
    const Range range = given_range(p.ranges, s.batch, s.query + i);
    if (!begins.add(i, range.begin - s.keys.begin) || !ends.add(-i, s.keys.end - range.end)) break;
  }
  const bool found = keys == 0 || (begins.rises() && ends.rises());
  // As bounds of key - query.
  const int64_t moved = p.band.offset + s.query - s.keys.begin;
  int64_t low = p.band.left < kUnbounded ? moved - p.band.left : -kUnbounded;
  int64_t high = p.band.right < kUnbounded ? moved + p.band.right : kUnbounded;
  if (found && !begins.none()) low = max64(low, begins.at_row_0());
  if (found && !ends.none()) high = min64(high, keys - ends.at_row_0() - 1);
  if (high < kUnbounded) s.band = {low > -kUnbounded ? high - low : kUnbounded, 0, high};
  else if (low > -kUnbounded) s.band = {0, kUnbounded, low};
  else s.band = {};
  return found;
}

// The sequences of a call, or none if it doesn't fall apart. Made once a call, from each row's range.
class Sequences {
 public:
  explicit Sequences(const Attention& p)
      : list_(may_fall_apart(p) ? p.ranges.batch * p.seqlen_q : 0),
        ranges_(list_.data() == nullptr ? 0 : 2 * p.ranges.batch * p.seqlen_q) {
    if (list_.data() == nullptr) return;
    bool gains = false;
    for (int64_t b = 0; b < p.ranges.batch; ++b) {
      Sequence all{b, 0, p.seqlen_q, hull_of(p, b), {}, false};
      if (band_of(p, all)) {  // a window of one key falls apart, too
        gains = true;
        list_.data()[count_++] = all;
        continue;
      }
      int64_t floor = 0;  // where the keys of the sequences before end
      for (int64_t row = 0; row < p.seqlen_q;) {
        Sequence s = sequence_from(p, b, row);
        row += s.queries;
        if (s.keys.end <= s.keys.begin) {
          s.keys = {floor, floor};
        } else if (s.keys.begin < floor) {  // keys of two sequences
          count_ = 0;
          return;
        }
        finish(p, s);
        gains |= s.queries < p.seqlen_q || !s.has_ranges;
        floor = s.keys.end;
        list_.data()[count_++] = s;
      }
    }
    // A call costs as much as these scores. Where the heads of a row lie side by side, tiles of rows cost more, too.
    constexpr int64_t kScores = 16;
    const bool pays = scores() >= kScores * count_ || p.q.stride[1] < p.q.stride[2];
    if (!gains || !pays) count_ = 0;
  }

  int64_t count() const { return count_; }
  // Of a head, in all entries of the ranges' batch.
  int64_t scores() const {
    int64_t scores = 0;
    for (int64_t i = 0; i < count_; ++i) scores += list_.data()[i].scores();
    return scores;
  }
  int64_t most_queries() const {
    int64_t longest = 0;
    for (int64_t i = 0; i < count_; ++i) longest = max64(longest, list_.data()[i].queries);
    return longest;
  }
  // Of the batch, that a sequence's call has.
  static int64_t entries(const Attention& p) { return p.ranges.batch == 1 ? p.batch : 1; }
  const Sequence& operator[](int64_t i) const { return list_.data()[i]; }
  // The numbers of `KeyRanges` for a sequence: its keys counted from its first.
  KeyRanges ranges_of(const Attention& p, const Sequence& s) const {
    if (!s.has_ranges) return {};
    return {ranges_.data() + 2 * (s.batch * p.seqlen_q + s.query), {0, 0, 2}, 1, 1, 1};
  }

 private:
  // With a bias or dropout, entries count from the call's first query and key. A table of distances can be read from
  // anywhere.
  static bool may_fall_apart(const Attention& p) {
    return p.ranges.data != nullptr && p.ranges.count == 1 && p.ranges.heads == 1 && p.ranges.stride[2] != 0 &&
           p.seqlen_q > 1 && p.seqlen_k > 0 && p.heads_q > 0 && (p.bias.data == nullptr || p.relative) &&
           p.dropout_p == 0;
  }

  // The keys between the first and the last that a row's range holds.
  static Range hull_of(const Attention& p, int64_t batch) {
    Range hull{p.seqlen_k, 0};
    for (int64_t i = 0; i < p.seqlen_q; ++i) {
      const Range range = range_of_row(p.ranges, batch, 0, i, 0, {0, p.seqlen_k});
      if (range.end > range.begin) hull = {min64(hull.begin, range.begin), max64(hull.end, range.end)};
    }
    return hull.end > hull.begin ? hull : Range{0, 0};
  }

  // The rows from `row` on up to the first whose range begins behind those of all before.
  static Sequence sequence_from(const Attention& p, int64_t batch, int64_t row) {
    const Range all{0, p.seqlen_k};
    Sequence s{batch, row, 1, range_of_row(p.ranges, batch, 0, row, 0, all), {}, false};
    for (; row + s.queries < p.seqlen_q; ++s.queries) {
      const Range range = range_of_row(p.ranges, batch, 0, row + s.queries, 0, all);
      if (range.begin >= s.keys.end && range.begin > s.keys.begin) break;
      if (range.end <= range.begin) continue;
      if (s.keys.end <= s.keys.begin) s.keys = range;
      s.keys = {min64(s.keys.begin, range.begin), max64(s.keys.end, range.end)};
    }
    return s;
  }

  // The band or the ranges of a sequence.
  void finish(const Attention& p, Sequence& s) {
    s.has_ranges = !band_of(p, s);
    for (int64_t i = s.query; i < s.query + s.queries && s.has_ranges; ++i) {
      const Range range = range_of_row(p.ranges, s.batch, 0, i, 0, s.keys);
      int32_t* const moved = ranges_.data() + 2 * (s.batch * p.seqlen_q + i);
      moved[0] = static_cast<int32_t>(range.begin - s.keys.begin);
      moved[1] = static_cast<int32_t>(range.end - s.keys.begin);
    }
  }

  Buffer<Sequence> list_;
  Buffer<int32_t> ranges_;
  int64_t count_ = 0;
};

// Some of the heads: KV groups of heads_of_kv_group() query heads each.
struct Heads {
  int64_t first_group, groups;
};

// Of a log-sum-exp, or a sink.
inline int64_t bytes_of_numbers(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

// As at<T>() for the type of the call's tensors.
inline char* bytes_at(const Attention& p, const View& view, int64_t batch, int64_t head, int64_t row) {
  return static_cast<char*>(view.data) +
         (batch * view.stride[0] + head * view.stride[1] + row * view.stride[2]) * bytes_of(p.dtype);
}

// What has rows of queries, of keys and of values.
template <class Queries, class Keys, class Values>
void for_views(Forward& p, const Queries& queries, const Keys& keys, const Values& values) {
  queries(p.q), queries(p.out), keys(p.k), values(p.v);
}
template <class Queries, class Keys, class Values>
void for_views(Backward& p, const Queries& queries, const Keys& keys, const Values& values) {
  queries(p.q), queries(p.out), queries(p.grad_out), queries(p.dq);
  keys(p.k), keys(p.dk), values(p.v), values(p.dv);
}

// A call of a sequence's rows, of some heads. Where all entries of the batch share their ranges, of all entries.
template <class Problem>
Problem call_of(const Problem& p, const Sequences& sequences, const Sequence& s, Heads heads) {
  const int64_t size = heads_of_kv_group(p), group_k = p.heads_q / p.heads_k, group_v = p.heads_q / p.heads_v;
  Problem call = p;
  call.batch = p.ranges.batch == 1 ? p.batch : 1;
  call.heads_q = heads.groups * size;
  call.heads_k = call.heads_q / group_k, call.heads_v = call.heads_q / group_v;
  call.seqlen_q = s.queries, call.seqlen_k = s.keys.end - s.keys.begin;
  call.band = s.band;
  call.ranges = sequences.ranges_of(p, s);
  const int64_t head = heads.first_group * size;
  call.sinks.batch = min64(p.sinks.batch, call.batch);
  if (p.sinks.data != nullptr)
    call.sinks.data = static_cast<const char*>(p.sinks.data) +
                      (s.batch * p.sinks.stride[0] + head * p.sinks.stride[1]) * bytes_of_numbers(p.dtype);
  if (p.relative) {
    const bool own_batch = p.bias_size[0] > 1, own_heads = p.bias_size[1] > 1;
    const int64_t entry = s.batch * p.bias.stride[0] + head * p.bias.stride[1] + s.keys.begin - s.query;
    call.bias.data = static_cast<char*>(p.bias.data) + entry * bytes_of(p.bias_dtype);
    call.bias_size[0] = own_batch ? call.batch : 1, call.bias_size[1] = own_heads ? call.heads_q : 1;
    call.bias_size[2] = call.seqlen_q, call.bias_size[3] = call.seqlen_k;
  }
  const auto moves = [&](int64_t group, int64_t batch, int64_t row) {
    return [&p, at = head / group, batch, row](View& view) {
      if (view.data != nullptr) view.data = bytes_at(p, view, batch, at, row);
    };
  };
  // What lies in pages is found by the table.
  const bool in_pages = p.pages.table != nullptr;
  if (in_pages) call.pages.table += s.batch * p.pages.stride, call.pages.first += s.keys.begin;
  const int64_t entry = in_pages ? 0 : s.batch, key = in_pages ? 0 : s.keys.begin;
  for_views(call, moves(1, s.batch, s.query), moves(group_k, entry, key), moves(group_v, entry, key));
  return call;
}

// copy(numbers of all queries, those of the sequence's call, bytes) for each head of that call: where in `all`, one
// number a query, and where in `part` the sequence's queries are.
template <class Copy>
void for_query_numbers(const Attention& p, const Attention& call, const Sequence& s, Heads heads, void* all, void* part,
                       const Copy& copy) {
  const int64_t size = bytes_of_numbers(p.dtype), head = heads.first_group * heads_of_kv_group(p);
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t h = 0; h < call.heads_q; ++h)
      copy(static_cast<char*>(all) + (((s.batch + b) * p.heads_q + head + h) * p.seqlen_q + s.query) * size,
           static_cast<char*>(part) + (b * call.heads_q + h) * s.queries * size, static_cast<size_t>(s.queries * size));
}

// Sequences that all threads share, side by side: their calls go through their phases in step.
template <class Pass>
class SharedSequences {
 public:
  // `most` of them, at most.
  SharedSequences(const Pass& pass, int64_t most, int64_t workers)
      : pass_(pass), list_(most), last_(most == 0 ? 0 : workers) {}
  ~SharedSequences() {
    for (int64_t i = 0; i < count_; ++i) list_.data()[i].plan.destroy(list_.data()[i].plan.call);
  }
  SharedSequences(const SharedSequences&) = delete;

  // Cut for so many threads. `numbers`: room for the pass's, that stays.
  void add(const Sequence& s, Heads heads, double* numbers, int64_t threads, int64_t workers) {
    Shared& shared = list_.data()[count_];
    shared.sequence = &s, shared.heads = heads;
    shared.call = pass_.call_of(s, heads, numbers);
    shared.plan = pass_.plan(shared.call, threads, workers);
    ++count_;
  }
  // The tasks of a phase, or -1 if there is none left.
  int64_t begin(int64_t phase, int64_t workers) {
    int64_t tasks = -1;
    for (int64_t i = 0; i < count_; ++i) {
      Shared& shared = list_.data()[i];
      shared.first_task = max64(tasks, 0);
      if (phase < shared.plan.phases(shared.plan.call))
        tasks = shared.first_task + shared.plan.tasks(shared.plan.call, phase);
    }
    for (int64_t i = 0; i < workers && count_ > 0; ++i) last_.data()[i] = nullptr;
    return tasks;
  }
  void run(int64_t phase, int64_t task, int64_t worker) const {
    const Shared* shared = list_.data();
    // The last one that begins at the task or before: those before it that begin there, too, have no task.
    for (int64_t count = count_; count > 1;) {
      const int64_t half = count / 2;
      if (shared[half].first_task <= task) shared += half, count -= half;
      else count = half;
    }
    const Plan& plan = shared->plan;
    if (last_.data()[worker] != shared) plan.forget(plan.call, worker);
    last_.data()[worker] = shared;
    void* const memory = thread_scratch(static_cast<std::size_t>(plan.scratch_bytes(plan.call, phase)));
    plan.run(plan.call, phase, task - shared->first_task, memory, worker);
  }
  // The worker's scratch is used for something else.
  void leave(int64_t worker) const {
    if (count_ > 0) last_.data()[worker] = nullptr;
  }
  void end() const {
    for (int64_t i = 0; i < count_; ++i) {
      const Shared& shared = list_.data()[i];
      shared.plan.end(shared.plan.call);
      pass_.finish(*shared.sequence, shared.heads, shared.call);
    }
  }

 private:
  struct Shared {
    const Sequence* sequence;
    Heads heads;
    typename Pass::Problem call;
    Plan plan;
    int64_t first_task;
  };
  const Pass& pass_;
  Buffer<Shared> list_;
  int64_t count_ = 0;
  Buffer<const Shared*> last_;  // whose call a worker's scratch holds rows of
};

// Runs all sequences of a pass. One that would keep a thread busy when the others are done is shared by all threads;
// the rest are a task each, or one for each KV group.
template <class Pass>
void run_sequences(const Pass& pass, const Sequences& sequences, const Runtime& runtime) {
  const auto& p = pass.p;
  const int64_t groups = p.heads_q / heads_of_kv_group(p), count = sequences.count(), scores = sequences.scores();
  const int64_t threads = runtime.num_threads, most_numbers = pass.most_numbers();
  // Tasks of whole sequences, if there are enough: the heads of a row lie side by side.
  const int64_t parts = count >= 8 * threads ? 1 : groups;
  const auto is_shared = [&](const Sequence& s) { return threads > 1 && s.scores() / parts * 4 * threads > scores; };
  int64_t shared_count = 0, shared_numbers = 0;
  for (int64_t i = 0; i < count; ++i)
    if (is_shared(sequences[i])) ++shared_count, shared_numbers += pass.numbers_of(sequences[i]);
  const Buffer<double> numbers_of_shared(shared_numbers),
      numbers_of_workers(shared_count == count ? 0 : threads * most_numbers);
  SharedSequences<Pass> shared(pass, shared_count, threads);
  double* numbers = numbers_of_shared.data();
  for (int64_t i = 0; i < count; ++i) {
    const Sequence& s = sequences[i];
    if (!is_shared(s)) continue;
    const int64_t own = (s.scores() * threads + scores - 1) / scores;
    shared.add(s, Heads{0, groups}, numbers, max64(1, own), threads);
    numbers += pass.numbers_of(s);
  }
  for (int64_t phase = 0;; ++phase) {
    const int64_t begun = shared.begin(phase, threads), tasks = max64(0, begun),
                  others = phase == 0 ? count * parts : 0;
    if (begun < 0 && others == 0) break;
    run_tasks(p, runtime, tasks + others, 0, [&](int64_t task, void*, int64_t worker) {
      if (task < tasks) return shared.run(phase, task, worker);
      const int64_t other = task - tasks;
      const Sequence& s = sequences[other / parts];
      if (is_shared(s)) return;
      shared.leave(worker);
      const Heads heads{other % parts * (groups / parts), groups / parts};
      const auto call = pass.call_of(s, heads, numbers_of_workers.data() + worker * most_numbers);
      pass.run(call, {1, runtime.parallel});
      pass.finish(s, heads, call);
    });
  }
  shared.end();
}

// The forward pass of a sequence, by Unit::run(call, runtime) and Unit::plan(call, threads, workers). Its numbers are
// the log-sum-exp of its call.
template <class Unit>
struct ForwardPass : Unit {
  using Problem = Forward;
  const Forward& p;
  const Sequences& sequences;

  int64_t numbers_of(const Sequence& s) const {
    return p.lse == nullptr ? 0 : s.queries * p.heads_q * sequences.entries(p);
  }
  int64_t most_numbers() const {
    return p.lse == nullptr ? 0 : sequences.most_queries() * p.heads_q * sequences.entries(p);
  }
  Forward call_of(const Sequence& s, Heads heads, double* numbers) const {
    Forward call = cpu::call_of(p, sequences, s, heads);
    if (p.lse != nullptr) call.lse = numbers;
    return call;
  }
  void finish(const Sequence& s, Heads heads, const Forward& call) const {
    if (p.lse != nullptr)
      for_query_numbers(p, call, s, heads, p.lse, call.lse,
                        [](void* all, void* part, size_t bytes) { std::memcpy(all, part, bytes); });
  }
};

// Zeros in rows [begin, end) of a gradient of keys or values.
inline void clear_rows(const Attention& p, const View& view, int64_t batch, int64_t heads, Range rows,
                       int64_t columns) {
  if (view.data == nullptr) return;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t row = rows.begin; row < rows.end; ++row)
      std::memset(bytes_at(p, view, batch, h, row), 0, static_cast<size_t>(columns * bytes_of(p.dtype)));
}

// Sums up what the calls of the sequences have made of the gradient of the sinks, (sequences, entries, Hq).
template <class C>
void add_sinks(const Backward& p, const Sequences& sequences, int64_t entries, const C* parts) {
  C* const dsinks = static_cast<C*>(p.dsinks);
  for (int64_t i = 0; i < p.sinks.batch * p.heads_q; ++i) dsinks[i] = C(0);
  for (int64_t i = 0; i < sequences.count(); ++i) {
    C* const target = dsinks + (p.sinks.batch > 1 ? sequences[i].batch * p.heads_q : 0);
    for (int64_t number = 0; number < entries * p.heads_q; ++number) target[number] += *parts++;
  }
}

// The backward pass of a sequence, by Unit::run and Unit::plan as in ForwardPass. Its numbers are the log-sum-exp of
// its call, the gradient of that, and the gradient of the sinks.
template <class Unit>
struct BackwardPass : Unit {
  using Problem = Backward;
  const Backward& p;
  const Sequences& sequences;
  void* sinks_parts;  // (sequences, entries, Hq) of C, null if there is no gradient of sinks

  int64_t entries_of_sinks() const { return p.ranges.batch == 1 ? p.sinks.batch : 1; }
  int64_t numbers_of_queries(int64_t queries) const {
    return 2 * queries * p.heads_q * sequences.entries(p) + (p.dsinks == nullptr ? 0 : entries_of_sinks() * p.heads_q);
  }
  int64_t numbers_of(const Sequence& s) const { return numbers_of_queries(s.queries); }
  int64_t most_numbers() const { return numbers_of_queries(sequences.most_queries()); }
  Backward call_of(const Sequence& s, Heads heads, double* numbers) const {
    Backward call = cpu::call_of(p, sequences, s, heads);
    const auto gathered = [&](const void* all) {
      double* const part = numbers;
      for_query_numbers(p, call, s, heads, const_cast<void*>(all), part,
                        [](void* from, void* to, size_t bytes) { std::memcpy(to, from, bytes); });
      numbers += call.batch * call.heads_q * s.queries;
      return part;
    };
    call.lse = gathered(p.lse);
    if (p.grad_lse != nullptr) call.grad_lse = gathered(p.grad_lse);
    if (p.dsinks != nullptr) call.dsinks = numbers;
    return call;
  }
  void finish(const Sequence& s, Heads heads, const Backward& call) const {
    if (p.dsinks == nullptr) return;
    const int64_t size = bytes_of_numbers(p.dtype), head = heads.first_group * heads_of_kv_group(p);
    for (int64_t b = 0; b < entries_of_sinks(); ++b)
      std::memcpy(
          static_cast<char*>(sinks_parts) + (((&s - &sequences[0]) * entries_of_sinks() + b) * p.heads_q + head) * size,
          static_cast<const char*>(call.dsinks) + b * call.heads_q * size, static_cast<size_t>(call.heads_q * size));
  }
};

// The forward pass of all sequences.
template <class Unit>
void forward_sequences(const Forward& p, const Sequences& sequences, const Runtime& runtime) {
  run_sequences(ForwardPass<Unit>{{}, p, sequences}, sequences, runtime);
}

// The backward pass of all sequences.
template <class Unit>
void backward_sequences(const Backward& p, const Sequences& sequences, const Runtime& runtime) {
  const int64_t entries = p.ranges.batch == 1 ? p.sinks.batch : 1;
  const Buffer<double> sinks_parts(p.dsinks == nullptr ? 0 : sequences.count() * entries * p.heads_q);
  run_sequences(BackwardPass<Unit>{{}, p, sequences, sinks_parts.data()}, sequences, runtime);
  if (p.dsinks != nullptr && p.dtype == DType::kFloat64) add_sinks(p, sequences, entries, sinks_parts.data());
  else if (p.dsinks != nullptr) add_sinks(p, sequences, entries, reinterpret_cast<const float*>(sinks_parts.data()));
  // Keys of no sequence.
  for (int64_t i = 0, end = 0; i < sequences.count(); ++i) {
    const Sequence& s = sequences[i];
    const bool last = i + 1 == sequences.count() || sequences[i + 1].batch != s.batch;
    for (int64_t b = s.batch; b < s.batch + sequences.entries(p); ++b)
      for (const Range gap : {Range{end, s.keys.begin}, Range{last ? s.keys.end : p.seqlen_k, p.seqlen_k}}) {
        clear_rows(p, p.dk, b, p.heads_k, gap, p.head_dim);
        clear_rows(p, p.dv, b, p.heads_v, gap, p.head_dim_v);
      }
    end = last ? 0 : s.keys.end;
  }
}

}  // namespace
}  // namespace attnkern::cpu
