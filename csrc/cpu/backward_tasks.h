// How a backward pass is cut into tasks, and the gradients of queries and of a bias that several tasks add to.
#pragma once

#include "backward.h"

namespace attnkern::cpu {
namespace {

// Which tasks there are. The first `whole` KV groups are a task each. The `left` ones after them, fewer than there are
// threads, are shared. Either their tiles of keys are dealt out to `chunks` tasks, each of which sums a dQ of
// its own. Or, if chunks is 0, nothing is summed by two: `key_tasks` of a tile of keys each compute dK and dV, and
// `query_tasks` of query_rows rows of a head each compute dQ, from scores that both compute. (Sums over the keys that
// threads share cost reads and writes that grow with the number of threads; the scores once more cost as much as ever.)
struct BackwardCut {
  int64_t kv_group, whole, left, chunks, query_rows, query_pieces, key_tasks, query_tasks;

  int64_t shared_tasks() const { return chunks == 0 ? key_tasks + query_tasks : left * chunks; }
};

template <class C>
BackwardCut cut_backward(const Backward& p, int64_t threads, int64_t workers, const BiasGradPlan<C>& bias) {
  const int64_t kv_group = heads_of_kv_group(p), groups = p.batch * p.heads_q / kv_group;
  const int64_t tiles = max64(1, (p.seqlen_k + kTile<C> - 1) / kTile<C>);
  const int64_t left = tiles == 1 || bias.way == bias.kAdded ? 0 : groups % threads;
  BackwardCut cut{kv_group, groups - left, left, 1, 0, 0, 0, 0};
  if (left == 0) return cut;
  // Times (python -m bench cores), in that of a tile of keys with all queries of its group.
  constexpr double kKeys = 0.9;     // of dK and dV alone
  constexpr double kQueries = 0.7;  // of dQ alone
  constexpr double kPart = 0.5;     // of a task's part of dQ, up to five times as much where all parts lie far away
  // Parts, with those of other calls beside this one, lie far away from so many numbers on. Memory of that size the C
  // library gives back to the system when the call ends; kGivenBack is the time of that, for as much as a group's dQ.
  constexpr double kFarSums = 1 << 23, kGivenBack = 0.09;
  const Wanted wanted(p);
  const bool of_keys = wanted.dk || wanted.dv || bias.way == bias.kStored;
  const double sums = static_cast<double>(left * kv_group * p.seqlen_q * p.head_dim);
  const double kept = static_cast<double>(left * p.seqlen_k * (p.head_dim + p.head_dim_v));
  // Tasks' own sums of a table's gradient take 16 MiB, whatever the number of threads, or one sum for each group.
  constexpr int64_t kTables = 1 << 22;
  const int64_t most = bias.way == bias.kByTask ? max64(1, kTables / (left * max64(1, bias.size))) : tiles;
  double least = 0;
  for (int64_t chunks = 1; chunks <= min64(tiles, most); ++chunks) {
    const double rounds = static_cast<double>((left * chunks + threads - 1) / threads);
    const double parts = static_cast<double>(chunks) * sums;
    const double far = parts * static_cast<double>(workers) / (kFarSums * static_cast<double>(threads));
    const double part = wanted.dq ? kPart * (1 + 4 * (far < 1 ? far : 1)) : 0;
    double time = rounds * (static_cast<double>((tiles + chunks - 1) / chunks) + part);
    // In steps, parts take half of kFarSums, and what is kept comes to it.
    const double memory = far > 0.5 ? kFarSums / 2 + kept : parts;
    if (wanted.dq && memory > kFarSums) time += kGivenBack * memory * static_cast<double>(left) / sums;
    if (least == 0 || time < least) least = time, cut.chunks = chunks;
  }
  const double share = static_cast<double>(left * tiles) / static_cast<double>(threads);
  const double twice = share * ((of_keys ? kKeys : 0) + kQueries) + kKeys / 2;
  if (bias.way == bias.kByTask || !wanted.dq || least <= twice) return cut;
  cut.chunks = 0;
  cut.key_tasks = of_keys ? left * tiles : 0;
  // As many rows as leave every thread some tasks.
  for (cut.query_rows = kTaskRows; cut.query_rows > kTile<C>; cut.query_rows /= 2)
    if (left * kv_group * ((p.seqlen_q + cut.query_rows - 1) / cut.query_rows) >= 2 * threads) break;
  cut.query_pieces = (p.seqlen_q + cut.query_rows - 1) / cut.query_rows;
  cut.query_tasks = left * kv_group * cut.query_pieces;
  return cut;
}

// Writes rows of a dQ buffer, scaled, to the output, which may be the buffer.
template <class T, class C>
inline void store_query_grad(const Backward& p, int64_t batch, int64_t head, int64_t row, int64_t rows, const C* source,
                             int64_t step) {
  using S = Simd<C>;
  const auto scale = S::set1(static_cast<C>(p.softmax_scale));
  for (int64_t i = 0; i < rows; ++i) {
    T* target = at<T>(p.dq, batch, head, row + i);
    for (int64_t d = 0; d < p.head_dim; d += S::kLanes)
      S::store_as(target + d, S::load(source + i * step + d) * scale, p.head_dim - d);
  }
}

// Where tasks sum dQ. Whole KV groups: in the output, if it has room for the sums; else in a worker's scratch, or, if
// they are too large to stay there, in a buffer for each worker and, as far as they fit, the output. Tasks that have
// chunks of a KV group have parts of their own, unless there is but one; these go step by step, so that they need no
// memory that grows with the length. Rows of a head that are a task: in the output, or in scratch.
template <class T, class C>
class QueryGradSums {
 public:
  QueryGradSums(const Backward& p, const BackwardCut& cut, int64_t threads, int64_t workers)
      : p_(p),
        cut_(cut),
        wanted_(p.dq.data != nullptr),
        direct_(std::is_same_v<T, C> && p.head_dim % Simd<C>::kLanes == 0),
        chunks_direct_(direct_ && cut.chunks == 1),
        step_(round_up(p.head_dim, Simd<C>::kLanes)),
        head_step_(p.seqlen_q * step_),
        sums_(wanted_ && !direct_ && cut.whole > 0 ? cut.kv_group * head_step_ : 0),
        large_(sums_ > kScratchSums),
        rows_in_output_(large_ && sizeof(T) == 2 && sizeof(C) == 4 && step_ == p.head_dim && p.dq.stride[1] % 2 == 0 &&
                                p.dq.stride[2] == p.head_dim
                            ? p.seqlen_q / 2
                            : 0),
        large_step_(head_step_ - rows_in_output_ * step_),
        step_rows_(has_parts() ? min64(p.seqlen_q, max64(256, most_part_rows(threads, workers) / 64 * 64))
                               : p.seqlen_q),
        adding_rows_(max64(1, min64(32, cut.left * cut.kv_group * step_rows_ / (2 * threads)))),
        large_sums_(large_ ? workers * cut.kv_group * large_step_ : 0),
        parts_(has_parts() ? cut.left * cut.chunks * cut.kv_group * step_rows_ * step_ : 0) {}

  int64_t scratch_bytes() const {
    const int64_t piece = cut_.chunks > 0 || direct_ ? 0 : cut_.query_rows * step_;
    return max64(large_ ? 0 : sums_, piece) * static_cast<int64_t>(sizeof(C));
  }
  // The queries of a step.
  int64_t step_rows() const { return step_rows_; }

  // Zeros, for the task's rows of its heads from `head` on. `scratch`: the worker's, of scratch_bytes().
  QueryGrad<C> begin(int64_t task, Range rows, int64_t batch, int64_t head, void* scratch, int64_t worker) const {
    const int64_t kv_group = cut_.kv_group;
    QueryGrad<C> dq{nullptr, step_, head_step_};
    if (!wanted_ || p_.head_dim == 0) return dq;
    C* output = reinterpret_cast<C*>(at<T>(p_.dq, batch, head));
    if (in_place(task)) dq = {output, p_.dq.stride[2], p_.dq.stride[1]};
    else if (!is_whole(task)) {
      dq.head_step = (rows.end - rows.begin) * step_;
      dq.data = parts_.data() + (task - cut_.whole) * kv_group * dq.head_step - rows.begin * step_;
    } else if (!large_) dq.data = static_cast<C*>(scratch);
    else
      dq = {large_sums_.data() + worker * kv_group * large_step_,
            step_,
            large_step_,
            rows_in_output_,
            output,
            p_.dq.stride[1] / 2};
    clear(dq, kv_group, rows, in_place(task));
    return dq;
  }
  // Writes the output, unless it takes the sums of other tasks, too.
  void end(int64_t task, int64_t batch, int64_t head, const QueryGrad<C>& dq) const {
    if (!wanted_ || !(is_whole(task) || in_place(task))) return;
    for (int64_t h = 0; h < cut_.kv_group; ++h) {
      // In this order, since the sums lie in the output: a row is shorter than its sums, so no unread sum is
      // overwritten.
      store_query_grad<T>(p_, batch, head + h, 0, dq.split, dq.row(h, 0), dq.step);
      store_query_grad<T>(p_, batch, head + h, dq.split, p_.seqlen_q - dq.split, dq.row(h, dq.split), dq.step);
    }
  }

  // The same for a task that has some rows of one head.
  QueryGrad<C> begin_rows(Range rows, int64_t batch, int64_t head, void* scratch) const {
    QueryGrad<C> dq{static_cast<C*>(scratch) - rows.begin * step_, step_, 0};
    if (direct_) dq = {reinterpret_cast<C*>(at<T>(p_.dq, batch, head)), p_.dq.stride[2], 0};
    if (p_.head_dim > 0) clear(dq, 1, rows, direct_);
    return dq;
  }
  void end_rows(Range rows, int64_t batch, int64_t head, const QueryGrad<C>& dq) const {
    store_query_grad<T>(p_, batch, head, rows.begin, rows.end - rows.begin, dq.row(0, rows.begin), dq.step);
  }

  // After a step: adds up what the tasks have made of its rows, and writes it to the output. In so many tasks.
  int64_t adding_tasks(Range rows) const {
    return has_parts() ? cut_.left * cut_.kv_group * ((rows.end - rows.begin + adding_rows_ - 1) / adding_rows_) : 0;
  }
  void add_parts(int64_t task, Range within) const {
    using S = Simd<C>;
    const int64_t all = within.end - within.begin, pieces = (all + adding_rows_ - 1) / adding_rows_;
    const int64_t piece = task % pieces, h = task / pieces % cut_.kv_group, index = task / pieces / cut_.kv_group;
    const int64_t row = piece * adding_rows_, rows = min64(adding_rows_, all - row), head_step = all * step_;
    C* first = parts_.data() + (index * cut_.chunks * cut_.kv_group + h) * head_step + row * step_;
    for (int64_t chunk = 1; chunk < cut_.chunks; ++chunk)
      for (int64_t i = 0; i < rows * step_; i += S::kLanes)
        S::store(first + i, S::load(first + i) + S::load(first + chunk * cut_.kv_group * head_step + i));
    const int64_t head = (cut_.whole + index) * cut_.kv_group + h;
    store_query_grad<T>(p_, head / p_.heads_q, head % p_.heads_q, within.begin + row, rows, first, step_);
  }

 private:
  static constexpr int64_t kScratchSums = 1 << 18;
  // All parts, of calls that run side by side, too, take 16 MiB, or a task's as much as a core's cache holds.
  static constexpr int64_t kStepSums = 1 << 14, kAllSums = 1 << 22;

  bool is_whole(int64_t task) const { return task < cut_.whole; }
  bool in_place(int64_t task) const { return is_whole(task) ? direct_ : chunks_direct_; }
  bool has_parts() const { return wanted_ && cut_.left > 0 && cut_.chunks > 0 && !chunks_direct_; }
  int64_t most_part_rows(int64_t threads, int64_t workers) const {
    return max64(kStepSums, kAllSums * threads / workers / max64(1, cut_.left * cut_.chunks)) /
           max64(1, cut_.kv_group * step_);
  }
  void clear(const QueryGrad<C>& dq, int64_t heads, Range rows, bool in_output) const {
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = rows.begin; i < rows.end; ++i)
        std::memset(dq.row(h, i), 0, static_cast<size_t>(in_output ? p_.head_dim : step_) * sizeof(C));
  }

  const Backward& p_;
  const BackwardCut cut_;
  bool wanted_, direct_, chunks_direct_;
  int64_t step_, head_step_, sums_;  // sums_: of a worker, if they aren't in the output
  bool large_;
  int64_t rows_in_output_, large_step_;  // the rows of a head whose sums it has room for: if they lie together
  int64_t step_rows_, adding_rows_;
  const Buffer<C> large_sums_, parts_;
};

// Zeros for the gradient of a bias that has an entry per score.
template <class T>
void clear_bias_grad(const Backward& p, const Runtime& runtime) {
  const int64_t bytes = p.seqlen_q * p.seqlen_k * bias_bytes<T>(p);
  run_tasks(p, runtime, p.batch * p.heads_q, 0, [&](int64_t head, void*, int64_t) {
    std::memset(static_cast<char*>(p.dbias.data) + head * bytes, 0, static_cast<size_t>(bytes));
  });
}

// d(table) from the sums of all tasks, `size` for each: those of whole groups, then those of the shared ones.
template <class T, class C>
void add_tables(const Backward& p, const C* sums, int64_t size, const BackwardCut& cut) {
  const int64_t entries = distances(p), tables = p.bias_size[0] * p.bias_size[1], groups = cut.whole + cut.left;
  const Buffer<C> total(tables * entries);
  std::memset(total.data(), 0, static_cast<size_t>(tables * entries) * sizeof(C));
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t batch = group * cut.kv_group / p.heads_q, head = group * cut.kv_group % p.heads_q;
    const int64_t table = (p.bias_size[0] == 1 ? 0 : batch) * p.bias_size[1] + (p.bias_size[1] == 1 ? 0 : head);
    C* const target = total.data() + table * entries;
    for (int64_t part = 0; part < (group < cut.whole ? 1 : cut.chunks); ++part, sums += size)
      for (int64_t i = 0; i < size; ++i) target[i] += sums[i];
  }
  with_bias_grad<T>(p, [&]<class Bias>(Bias* dbias) {
    for (int64_t i = 0; i < tables * entries; ++i) dbias[i] = from_compute<Bias>(total.data()[i]);
  });
}

// The phases of a backward pass: the row terms of shared groups, or of all; then, for each step of queries, the sweep
// over the keys and the sum of the parts of dQ. Tasks of a phase may run side by side; those of the next one begin when
// they have ended.
template <class T, class Op>
class BackwardCall {
  using C = typename Op::Compute;

 public:
  // Cut for so many threads; `workers`: how many run tasks, of this call or of others beside it.
  BackwardCall(const Backward& p, int64_t threads, int64_t workers)
      : p_(p),
        sinks_(p),
        all_rows_(p.batch * p.heads_q * p.seqlen_q),
        shift_(all_rows_),
        delta_(all_rows_),
        norm_(needs_norm<T, C>(p) ? all_rows_ : 0),
        terms_{shift_.data(), delta_.data(), norm_.data()},
        // The gradient of the sinks is a sum by such rows.
        term_rows_(p.dsinks != nullptr ? kTaskRows : max64(64, min64(kTaskRows, all_rows_ / (2 * threads) / 64 * 64))),
        sizes_(nullptr, p),
        bias_(p, threads, p.bias_dtype == DType::kFloat32 ? std::is_same_v<C, float> : std::is_same_v<T, C>),
        sweeps_(p.dq.data != nullptr || p.dk.data != nullptr || p.dv.data != nullptr || by_task()),
        tiles_(max64(1, (p.seqlen_k + kTile<C> - 1) / kTile<C>)),
        cut_(cut_backward(p, threads, workers, bias_)),
        visiting_(p),
        query_grads_(p, cut_, threads, workers),
        kept_(query_grads_.step_rows() < p.seqlen_q ? cut_.left * tiles_ * kept_of_tile() : 0),
        sweep_tasks_(bias_sums() ? bias_.groups * bias_.tasks : cut_.whole + cut_.shared_tasks()),
        bias_grads_(by_task() || (bias_sums() && !bias_.in_output()) ? sweep_tasks_ * bias_.size : 0),
        // Of q and of grad_out, where the queries are walked more than once.
        caches_(workers, tiles_ > 1 && (kConverts<T, Op> || Op::kPack == 2) ? 2 * cut_.kv_group : 0,
                (p.seqlen_q + Op::kPack - 1) / Op::kPack, round_up(max64(p.head_dim, p.head_dim_v), Simd<C>::kLanes)),
        of_keys_(p),
        of_queries_(p) {
    of_keys_.dq.data = of_queries_.dk.data = of_queries_.dv.data = nullptr;
  }

  int64_t phases() const {
    const int64_t step = query_grads_.step_rows();
    return sweeps_ ? 1 + 2 * max64(1, (p_.seqlen_q + step - 1) / step) : 1;
  }
  int64_t tasks(int64_t phase) const {
    if (phase == 0) return (p_.batch * p_.heads_q - first_term_head()) * term_pieces();
    if (phase % 2 == 0) return query_grads_.adding_tasks(step_of(phase).rows);
    return phase == 1 ? sweep_tasks_ : cut_.shared_tasks();
  }
  int64_t scratch_bytes(int64_t phase) const {
    if (phase == 0) return norm_.data() == nullptr ? 0 : sizes_.bytes;
    return phase % 2 == 0 ? 0 : sizes_.bytes + caches_.bytes() + query_grads_.scratch_bytes();
  }
  // Whether a phase's first tasks are its longest.
  bool in_order(int64_t phase) const { return phase == 1 && cut_.left > 0 && cut_.chunks == 0; }
  void run(int64_t phase, int64_t task, void* memory, int64_t worker) const {
    if (phase == 0) return make_some_terms(task, memory);
    if (phase % 2 == 0) return query_grads_.add_parts(task, step_of(phase).rows);
    const Step<C> now = step_of(phase);
    if (phase > 1) task += cut_.whole;
    if (!by_task() && !bias_sums()) return sweep(task, memory, worker, nullptr, now);
    C* grads = bias_grads_.data() + task * bias_.size;
    if (bias_.in_output() && bias_sums()) grads = static_cast<C*>(p_.dbias.data) + task / bias_.tasks * bias_.size;
    if (now.first) std::memset(grads, 0, static_cast<size_t>(bias_.size) * sizeof(C));
    if (by_task()) return sweep(task, memory, worker, grads, now);
    const int64_t group = task / bias_.tasks, part = task % bias_.tasks;
    const int64_t end = bias_.members * (part + 1) / bias_.tasks;
    for (int64_t member = bias_.members * part / bias_.tasks; member < end; ++member)
      sweep(bias_.kv_group(group, member), memory, worker, grads, now);
  }
  // To be called before a worker's scratch is used for this call, at first and whenever others have used it.
  void forget(int64_t worker) const { caches_.forget(worker); }

  // What follows the first phase and the last one, where the call is alone.
  void begin_bias(const Runtime& runtime) const {
    if (bias_apart()) backward_bias<T, Op>(p_, runtime, terms_);
    if (bias_.way == bias_.kStored &&
        (p_.band.left < kUnbounded || p_.band.right < kUnbounded || p_.ranges.data != nullptr))
      clear_bias_grad<T>(p_, runtime);  // the tiles leave out what lies outside the band and the ranges
  }
  void end_bias(const Runtime& runtime) const {
    if (!sweeps_) return;
    if (by_task()) add_tables<T>(p_, bias_grads_.data(), bias_.size, cut_);
    else if (bias_grads_.data() != nullptr) add_bias_grads<T>(p_, runtime, bias_, bias_grads_.data());
  }
  // What follows all phases.
  void end() const { sinks_.store(); }

 private:
  bool bias_apart() const { return bias_.way == bias_.kApart; }
  bool bias_sums() const { return bias_.way == bias_.kAdded; }
  bool by_task() const { return bias_.way == bias_.kByTask; }
  // Row terms from this head on are computed first. A task that has a whole KV group computes its own.
  bool terms_first() const { return bias_apart() || !sweeps_; }
  int64_t first_term_head() const { return terms_first() ? 0 : cut_.whole * cut_.kv_group; }
  int64_t term_pieces() const { return (p_.seqlen_q + term_rows_ - 1) / term_rows_; }
  // Sums of dK and dV of a tile of a KV group.
  int64_t kept_of_tile() const {
    return kTile<C> * (cut_.kv_group / (p_.heads_q / p_.heads_k) * round_up(p_.head_dim, Simd<C>::kLanes) +
                       cut_.kv_group / (p_.heads_q / p_.heads_v) * round_up(p_.head_dim_v, Simd<C>::kLanes));
  }
  // Of shared groups.
  Step<C> step_of(int64_t phase) const {
    const int64_t step = query_grads_.step_rows(), begin = (phase - 1) / 2 * step;
    const Range rows{begin, min64(p_.seqlen_q, begin + step)};
    return {rows, begin == 0, rows.end == p_.seqlen_q, nullptr};
  }

  void make_terms_of(const BackwardScratch<Op>& scratch, int64_t batch, int64_t head, int64_t row, int64_t rows) const {
    make_terms<T>(p_, scratch, batch, head, row, rows, terms_);
    sinks_.add(batch, head, row, rows, terms_.delta);
  }
  void make_some_terms(int64_t task, void* memory) const {
    const int64_t pieces = term_pieces(), head = first_term_head() + task / pieces, row = task % pieces * term_rows_;
    make_terms_of(BackwardScratch<Op>(memory, p_), head / p_.heads_q, head % p_.heads_q, row,
                  min64(term_rows_, p_.seqlen_q - row));
  }

  void sweep(int64_t task, void* memory, int64_t worker, C* grads_of_bias, const Step<C>& now) const {
    const BackwardScratch<Op> scratch(memory, p_);
    char* const cache_memory = static_cast<char*>(memory) + sizes_.bytes;
    PackedCache<typename Op::Scalar>* const cache = caches_.of(worker, cache_memory);
    char* const sums = cache_memory + caches_.bytes();
    const int64_t shared = task - cut_.whole;
    if (shared >= 0 && cut_.chunks == 0)
      return shared < cut_.key_tasks ? sweep_keys(scratch, shared, cache)
                                     : sweep_queries(scratch, shared - cut_.key_tasks, cache, sums);
    const int64_t index = shared < 0 ? task : cut_.whole + shared / cut_.chunks;
    const int64_t batch = index * cut_.kv_group / p_.heads_q, head = index * cut_.kv_group % p_.heads_q;
    Step<C> of_task{{0, p_.seqlen_q}};
    if (shared >= 0) of_task = now;
    if (shared >= 0 && kept_.data() != nullptr)
      of_task.sums = kept_.data() + shared / cut_.chunks * tiles_ * kept_of_tile();
    if (shared < 0 && !bias_apart())
      for (int64_t h = head; h < head + cut_.kv_group; ++h) make_terms_of(scratch, batch, h, 0, p_.seqlen_q);
    const QueryGrad<C> dq = query_grads_.begin(task, of_task.rows, batch, head, sums, worker);
    backward_heads<T, Op>(p_, scratch, batch, head, cut_.kv_group, shared < 0 ? 0 : shared % cut_.chunks,
                          shared < 0 ? 1 : cut_.chunks, terms_, visiting_, dq,
                          bias_sums() || by_task() || bias_.way == bias_.kStored, grads_of_bias, cache, of_task);
    query_grads_.end(task, batch, head, dq);
  }
  // dK and dV of a tile of keys of a shared group.
  void sweep_keys(const BackwardScratch<Op>& scratch, int64_t task, PackedCache<typename Op::Scalar>* cache) const {
    const int64_t head = (cut_.whole + task % cut_.left) * cut_.kv_group, tile = task / cut_.left;
    backward_heads<T, Op>(of_keys_, scratch, head / p_.heads_q, head % p_.heads_q, cut_.kv_group, tile, tiles_, terms_,
                          visiting_, {}, bias_.way == bias_.kStored, nullptr, cache, {{0, p_.seqlen_q}});
  }
  // dQ of some rows of a head of a shared group.
  void sweep_queries(const BackwardScratch<Op>& scratch, int64_t task, PackedCache<typename Op::Scalar>* cache,
                     void* sums) const {
    // Under a causal mask the last rows meet most keys, as the first keys most rows: these tasks come first.
    const int64_t heads = cut_.left * cut_.kv_group, at = cut_.whole * cut_.kv_group + task % heads;
    const int64_t row = (cut_.query_pieces - 1 - task / heads) * cut_.query_rows;
    const int64_t batch = at / p_.heads_q, head = at % p_.heads_q;
    const Range rows{row, min64(p_.seqlen_q, row + cut_.query_rows)};
    const QueryGrad<C> dq = query_grads_.begin_rows(rows, batch, head, sums);
    backward_heads<T, Op>(of_queries_, scratch, batch, head, 1, 0, 1, terms_, visiting_, dq, false, nullptr, cache,
                          {rows});
    query_grads_.end_rows(rows, batch, head, dq);
  }

  const Backward& p_;
  const SinksGradient<C> sinks_;
  const int64_t all_rows_;
  const Buffer<C> shift_, delta_, norm_;
  const RowTerms<C> terms_;
  const int64_t term_rows_;  // of a task
  const BackwardScratch<Op> sizes_;
  const BiasGradPlan<C> bias_;
  const bool sweeps_;
  const int64_t tiles_;
  const BackwardCut cut_;
  const VisitingQueries<C> visiting_;
  const QueryGradSums<T, C> query_grads_;
  const Buffer<C> kept_;  // dK and dV from step to step
  const int64_t sweep_tasks_;
  const Buffer<C> bias_grads_;
  const PackedCaches<typename Op::Scalar> caches_;
  Backward of_keys_, of_queries_;  // the call, but for the gradients of the others
};

template <class T, class Op>
void backward(const Backward& p, const Runtime& runtime) {
  if (p.batch * p.heads_q == 0) return;  // the caller has filled the gradients with zeros
  const BackwardCall<T, Op> call(p, runtime.num_threads, runtime.num_threads);
  run_phase(p, runtime, call, 0);
  call.begin_bias(runtime);
  for (int64_t phase = 1; phase < call.phases(); ++phase) run_phase(p, runtime, call, phase);
  call.end_bias(runtime);
  call.end();
}

}  // namespace
}  // namespace attnkern::cpu
