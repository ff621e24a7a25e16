// Packed calls: where key ranges fall apart into sequences, whose queries attend to keys of their own, each sequence is
// a call of its own with views of its rows. Its tiles meet no other sequence, no bits are made where a band says which
// keys its queries attend to, and a few queries are decoded.
#pragma once

#include <limits>

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

// Key ranges of one entry of the batch, a range a row, for loops over many rows at a time.
struct RowRanges {
  const int32_t* data;
  int64_t step;    // from row to row, in numbers
  int32_t length;  // of the keys

  RowRanges(const Attention& p, int64_t batch)
      : data(p.ranges.data + batch * p.ranges.stride[0]),
        step(p.ranges.stride[2]),
        length(static_cast<int32_t>(p.seqlen_k)) {}

  // body(row, begin, end) for rows [row, row + rows): their ranges as they were given, which may lie outside of the
  // keys or end before they begin.
  template <class Body>
  [[gnu::always_inline]] inline void for_each(int64_t row, int64_t rows, const Body& body) const {
    const int32_t* ends = data + row * step;
    const int32_t first = static_cast<int32_t>(row), count = static_cast<int32_t>(rows);
    if (step == 2)  // which the compiler makes vectors of
      for (int32_t i = 0; i < count; ++i) body(first + i, ends[2 * i], ends[2 * i + 1]);
    else
      for (int32_t i = 0; i < count; ++i) body(first + i, ends[i * step], ends[i * step + 1]);
  }
  int32_t clamped(int32_t key) const { return key < 0 ? 0 : key > length ? length : key; }

  // The keys between the first and the last of these rows' ranges as far as there are such, empty ones left out; and
  // where the last of all begins.
  struct Hull {
    Range keys;
    int64_t last_begin;
  };
  Hull hull(int64_t row, int64_t rows) const {
    int32_t first = length, end = 0, last = 0;
    for_each(row, rows, [&](int32_t, int32_t given_begin, int32_t given_end) {
      const int32_t begins = clamped(given_begin), ends = clamped(given_end);
      const bool empty = ends <= begins;
      const int32_t own_first = empty ? length : begins, own_end = empty ? 0 : ends;
      first = own_first < first ? own_first : first;
      end = own_end > end ? own_end : end;
      last = begins > last ? begins : last;
    });
    return {end > first ? Range{first, end} : Range{0, 0}, last};
  }
};

// Whether one end of the ranges of consecutive rows is that of a band: it rises by 1 from row to row, but for the rows
// at which it lies beyond what there is. All numbers are modulo 2^32, which is exact: see may_fall_apart().
struct RisingEnd {
  uint32_t all = ~uint32_t{0}, any = 0;  // bits of all and of any of the places at row 0 that the rows' ends stand for
  // How the end of a row lies within what there is, if it does, less how far it has risen until then.
  [[gnu::always_inline]] inline void add(bool within, uint32_t place) {
    all &= within ? place : ~uint32_t{0};
    any |= within ? place : 0;
  }
  bool none() const { return all != 0 && any == 0; }  // all rows lie beyond
  bool rises() const { return all == any || none(); }
};

// Makes the sequence's band: the call's and, if the rows' ranges are one within the sequence's keys, theirs. Whether
// they are.
inline bool band_of(const Attention& p, Sequence& s) {
  constexpr int64_t kRows = 64;  // at a time: most that are no band end soon
  constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
  const RowRanges ranges(p, s.batch);
  const int32_t first = static_cast<int32_t>(s.query), first_key = static_cast<int32_t>(s.keys.begin),
                end_key = static_cast<int32_t>(s.keys.end);
  RisingEnd begins, ends;                          // the latter by rows counted backwards
  int32_t last_beyond = -1, first_beyond = kNone;  // rows that begin, and end, beyond
  bool found = true;
  for (int64_t row = 0; row < s.queries && found && s.keys.end > s.keys.begin; row += kRows) {
    ranges.for_each(s.query + row, min64(kRows, s.queries - row), [&](int32_t of_all, int32_t begin, int32_t end) {
      const int32_t i = of_all - first;
      const bool begins_within = begin > first_key, ends_within = end < end_key;
      begins.add(begins_within, static_cast<uint32_t>(begin) - static_cast<uint32_t>(first_key + i));
      ends.add(ends_within, static_cast<uint32_t>(end_key + i) - static_cast<uint32_t>(end));
      const int32_t begins_beyond = begins_within ? -1 : i, ends_beyond = ends_within ? kNone : i;
      last_beyond = begins_beyond > last_beyond ? begins_beyond : last_beyond;
      first_beyond = ends_beyond < first_beyond ? ends_beyond : first_beyond;
    });
    found = begins.rises() && ends.rises();
  }
  const int64_t at_begin = static_cast<int32_t>(begins.any), at_end = ends.any;
  // Beyond lie the first rows' begins and the last rows' ends.
  if (!begins.none()) found &= last_beyond < 0 || last_beyond + at_begin <= 0;
  if (!ends.none()) found &= first_beyond == kNone || at_end <= first_beyond;
  // As bounds of key - query.
  const int64_t keys = s.keys.end - s.keys.begin, moved = p.band.offset + s.query - s.keys.begin;
  int64_t low = p.band.left < kUnbounded ? moved - p.band.left : -kUnbounded;
  int64_t high = p.band.right < kUnbounded ? moved + p.band.right : kUnbounded;
  if (found && !begins.none()) low = max64(low, at_begin);
  if (found && !ends.none()) high = min64(high, keys - at_end - 1);
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
      Sequence all{b, 0, p.seqlen_q, RowRanges(p, b).hull(0, p.seqlen_q).keys, {}, false};
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
  // anywhere. Rows and keys, and ends of ranges beyond them, are told apart by 32 bits.
  static bool may_fall_apart(const Attention& p) {
    if (p.seqlen_q + p.seqlen_k > std::numeric_limits<int32_t>::max()) return false;
    return p.ranges.data != nullptr && p.ranges.count == 1 && p.ranges.heads == 1 && p.ranges.stride[2] != 0 &&
           p.seqlen_q > 1 && p.seqlen_k > 0 && p.heads_q > 0 && (p.bias.data == nullptr || p.relative) &&
           p.dropout_p == 0;
  }

  // The rows from `row` on up to the first whose range begins behind those of all before.
  static Sequence sequence_from(const Attention& p, int64_t batch, int64_t row) {
    constexpr int64_t kRows = 64;  // that are looked at together: mostly the sequence goes on
    const RowRanges ranges(p, batch);
    Sequence s{batch, row, 0, {0, 0}, {}, false};
    while (row + s.queries < p.seqlen_q) {
      const int64_t from = row + s.queries, rows = min64(kRows, p.seqlen_q - from);
      if (const auto some = ranges.hull(from, rows); s.keys.end > s.keys.begin && some.last_begin < s.keys.end) {
        if (some.keys.end > some.keys.begin)
          s.keys = {min64(s.keys.begin, some.keys.begin), max64(s.keys.end, some.keys.end)};
        s.queries += rows;
        continue;
      }
      for (const int64_t end = s.queries + rows; s.queries < end; ++s.queries) {
        const Range range = range_of_row(p.ranges, batch, 0, row + s.queries, 0, {0, p.seqlen_k});
        if (s.queries == 0) s.keys = range;
        else if (range.begin >= s.keys.end && range.begin > s.keys.begin) return s;
        else if (range.end <= range.begin) continue;
        else if (s.keys.end <= s.keys.begin) s.keys = range;
        else s.keys = {min64(s.keys.begin, range.begin), max64(s.keys.end, range.end)};
      }
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

// What has a number for each row of queries.
template <class Numbers>
void for_row_numbers(Forward& p, const Numbers& numbers) {
  numbers(p.lse);
}
template <class Numbers>
void for_row_numbers(Backward& p, const Numbers& numbers) {
  numbers(p.lse), numbers(p.grad_lse);
}
inline void* with_offset(void* numbers, int64_t bytes) { return static_cast<char*>(numbers) + bytes; }
inline const void* with_offset(const void* numbers, int64_t bytes) { return static_cast<const char*>(numbers) + bytes; }

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
  // What lies in pages is found by the table; in one page it lies as it does without pages.
  int64_t entry = s.batch, key = s.keys.begin;
  if (p.pages.table != nullptr) {
    if (call.batch == 1 && call.seqlen_k > 0 && rows_together(KeyRows(p.k, p.pages), key) >= call.seqlen_k) {
      const PlaceInPages place(p.pages, s.batch, key);
      entry = place.page, key = place.row, call.pages = {};
    } else {
      entry = 0, key = 0, call.pages.table += s.batch * p.pages.stride, call.pages.first += s.keys.begin;
    }
  }
  for_views(call, moves(1, s.batch, s.query), moves(group_k, entry, key), moves(group_v, entry, key));
  call.all_heads = p.heads_q, call.all_rows = p.seqlen_q;
  const int64_t number = lse_index(p, s.batch, head, s.query) * bytes_of_numbers(p.dtype);
  for_row_numbers(call, [&](auto*& numbers) {
    if (numbers != nullptr) numbers = with_offset(numbers, number);
  });
  return call;
}

// Sequences that all threads share, side by side: their calls go through their phases in step.
template <class Pass>
class SharedSequences {
 public:
  // `most` of them, at most.
  SharedSequences(const Pass& pass, int64_t most, int64_t workers)
      : pass_(pass), list_(most), workers_(most == 0 ? 0 : workers), last_(workers_) {}
  ~SharedSequences() {
    for (int64_t i = 0; i < count_; ++i) list_.data()[i].plan.destroy(list_.data()[i].plan.call);
  }
  SharedSequences(const SharedSequences&) = delete;

  // Cut for so many threads.
  void add(const Sequence& s, Heads heads, int64_t threads) {
    Shared& shared = list_.data()[count_];
    shared.call = pass_.call_of(s, heads);
    shared.plan = pass_.plan(shared.call, threads, workers_);
    ++count_;
  }
  // The tasks of a phase, or -1 if there is none left.
  int64_t begin(int64_t phase) {
    int64_t tasks = -1;
    for (int64_t i = 0; i < count_; ++i) {
      Shared& shared = list_.data()[i];
      shared.first_task = max64(tasks, 0);
      if (phase < shared.plan.phases(shared.plan.call))
        tasks = shared.first_task + shared.plan.tasks(shared.plan.call, phase);
    }
    for (int64_t i = 0; i < workers_; ++i) leave(i);
    return tasks;
  }
  // The most that a task of a phase needs: had a worker first to look for it, with no memory left others would wait for
  // its task for ever.
  int64_t scratch_bytes(int64_t phase) const {
    int64_t most = 0;
    for (int64_t i = 0; i < count_; ++i)
      if (const Plan& plan = list_.data()[i].plan; phase < plan.phases(plan.call))
        most = max64(most, plan.scratch_bytes(plan.call, phase));
    return most;
  }
  // The queues of all calls.
  int64_t queues(int64_t phase) const {
    int64_t count = 0;
    for (int64_t i = 0; i < count_; ++i) count += queues_of(list_.data()[i].plan, phase);
    return count;
  }
  int64_t queue_end(int64_t phase, int64_t queue) {
    const Shared* const shared = owner_of(phase, queue);
    return shared->first_task + shared->plan.queue_end(shared->plan.call, phase, queue);
  }
  // Scores of a queue's tasks, as if all were computed.
  double queue_work(int64_t phase, int64_t queue) {
    const Shared* const shared = owner_of(phase, queue);
    const auto scores = static_cast<double>(shared->call.seqlen_q) * static_cast<double>(shared->call.seqlen_k);
    return scores / static_cast<double>(queues_of(shared->plan, phase));
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
    if (worker < workers_) last_.data()[worker] = nullptr;
  }
  void end() const {
    for (int64_t i = 0; i < count_; ++i) list_.data()[i].plan.end(list_.data()[i].plan.call);
  }

 private:
  struct Shared {
    typename Pass::Problem call;
    Plan plan;
    int64_t first_task;
  };
  // Whose queue it is; which of its own, then. Queue after queue is asked for: it goes on from the last one's owner.
  const Shared* owner_of(int64_t phase, int64_t& queue) {
    if (phase != owner_phase_ || queue < owner_first_) owner_ = list_.data(), owner_first_ = 0, owner_phase_ = phase;
    for (int64_t own; queue - owner_first_ >= (own = queues_of(owner_->plan, phase)); ++owner_) owner_first_ += own;
    queue -= owner_first_;
    return owner_;
  }
  static int64_t queues_of(const Plan& plan, int64_t phase) {
    return phase < plan.phases(plan.call) ? plan.queues(plan.call, phase) : 0;
  }
  const Pass& pass_;
  Buffer<Shared> list_;
  const Shared* owner_ = nullptr;
  int64_t owner_first_ = 0, owner_phase_ = -1;  // its first queue; of which phase
  int64_t count_ = 0;
  const int64_t workers_;
  Buffer<const Shared*> last_;  // whose call a worker's scratch holds rows of
};

// Runs all sequences of a pass. One that would keep a thread busy when the others are done is shared by all threads;
// the rest are a task each, or one for each KV group.
template <class Pass>
void run_sequences(const Pass& pass, const Sequences& sequences, const Runtime& runtime) {
  const auto& p = pass.p;
  const int64_t groups = p.heads_q / heads_of_kv_group(p), count = sequences.count(), scores = sequences.scores();
  const int64_t threads = runtime.num_threads;
  // Tasks of whole sequences, if there are enough: the heads of a row lie side by side.
  const int64_t parts = count >= 8 * threads ? 1 : groups;
  const auto is_shared = [&](const Sequence& s) { return threads > 1 && s.scores() / parts * 4 * threads > scores; };
  int64_t shared_count = 0;
  for (int64_t i = 0; i < count; ++i) shared_count += is_shared(sequences[i]) ? 1 : 0;
  SharedSequences<Pass> shared(pass, shared_count, threads);
  for (int64_t i = 0; i < count; ++i)
    if (const Sequence& s = sequences[i]; is_shared(s))
      shared.add(s, Heads{0, groups}, max64(1, (s.scores() * threads + scores - 1) / scores));
  for (int64_t phase = 0;; ++phase) {
    const int64_t begun = shared.begin(phase), tasks = max64(0, begun);
    const int64_t others = phase == 0 && shared_count < count ? count * parts : 0;
    if (begun < 0 && others == 0) break;
    const auto body = [&](int64_t task, void*, int64_t worker) {
      if (task < tasks) return shared.run(phase, task, worker);
      const int64_t other = task - tasks;
      const Sequence& s = sequences[other / parts];
      if (is_shared(s)) return;
      shared.leave(worker);
      pass.run(pass.call_of(s, {other % parts * (groups / parts), groups / parts}), {1, runtime.parallel});
    };
    run_tasks(
        p, runtime, tasks + others, shared.scratch_bytes(phase), body, Pass::kTakesTurns ? shared.queues(phase) : 0,
        [&](int64_t queue) { return shared.queue_end(phase, queue); },
        [&](int64_t queue) { return shared.queue_work(phase, queue); }, [](int64_t) {});
  }
  shared.end();
}

// The forward pass of a sequence, by Unit::run(call, runtime) and Unit::plan(call, threads, workers).
template <class Unit>
struct ForwardPass : Unit {
  using Problem = Forward;
  static constexpr bool kTakesTurns = false;
  const Forward& p;
  const Sequences& sequences;

  Forward call_of(const Sequence& s, Heads heads) const { return cpu::call_of(p, sequences, s, heads); }
};

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

// The backward pass of a sequence, by Unit::run and Unit::plan as in ForwardPass.
template <class Unit>
struct BackwardPass : Unit {
  using Problem = Backward;
  static constexpr bool kTakesTurns = true;  // tasks of a shared sequence wait for some before them
  const Backward& p;
  const Sequences& sequences;
  void* sinks_parts;  // (sequences, entries, Hq) of C, null if there is no gradient of sinks

  int64_t entries_of_sinks() const { return p.ranges.batch == 1 ? p.sinks.batch : 1; }
  Backward call_of(const Sequence& s, Heads heads) const {
    Backward call = cpu::call_of(p, sequences, s, heads);
    const int64_t part = (&s - &sequences[0]) * entries_of_sinks() * p.heads_q;
    const int64_t head = heads.first_group * heads_of_kv_group(p);
    if (p.dsinks != nullptr) call.dsinks = with_offset(sinks_parts, (part + head) * bytes_of_numbers(p.dtype));
    return call;
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
  BackwardPass<Unit> pass{{}, p, sequences, nullptr};
  const int64_t entries = pass.entries_of_sinks();
  const Buffer<double> sinks_parts(p.dsinks == nullptr ? 0 : sequences.count() * entries * p.heads_q);
  pass.sinks_parts = sinks_parts.data();
  run_sequences(pass, sequences, runtime);
  if (p.dsinks != nullptr && p.dtype == DType::kFloat64) add_sinks(p, sequences, entries, sinks_parts.data());
  else if (p.dsinks != nullptr) add_sinks(p, sequences, entries, reinterpret_cast<const float*>(sinks_parts.data()));
  // Keys of no sequence.
  for (int64_t i = 0, end = 0; i < sequences.count(); ++i) {
    const Sequence& s = sequences[i];
    const bool last = i + 1 == sequences.count() || sequences[i + 1].batch != s.batch;
    for (int64_t b = s.batch; b < s.batch + sequences.entries(p); ++b)
      for (const Range gap : {Range{end, s.keys.begin}, Range{last ? s.keys.end : p.seqlen_k, p.seqlen_k}}) {
        for (int64_t h = 0; h < p.heads_k; ++h) clear_rows(p, p.dk, b, h, gap, p.head_dim);
        for (int64_t h = 0; h < p.heads_v; ++h) clear_rows(p, p.dv, b, h, gap, p.head_dim_v);
      }
    end = last ? 0 : s.keys.end;
  }
}

}  // namespace
}  // namespace attnkern::cpu
