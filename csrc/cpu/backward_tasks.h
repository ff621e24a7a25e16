// How a backward pass is cut into tasks, and the gradients that several tasks add to.
#pragma once

#include "backward.h"

namespace attnkern::cpu {
namespace {

// Sums of dK and dV of a tile of a KV group.
template <class C>
int64_t sums_of_tile(const Backward& p, int64_t kv_group) {
  return kTile<C> * (kv_group / (p.heads_q / p.heads_k) * round_up(p.head_dim, Simd<C>::kLanes) +
                     kv_group / (p.heads_q / p.heads_v) * round_up(p.head_dim_v, Simd<C>::kLanes));
}

// Of `threads` threads; `workers` run tasks of this call or of others beside it.
template <class T, class C>
BackwardCut cut_backward(const Backward& p, int64_t threads, int64_t workers, const BiasGradPlan<C>& bias) {
  // Tasks of shared groups for each thread, so that all end at about the same time, and more where a band or ranges
  // make them uneven; but a tile of keys is read and transposed for a task, which pays from so many queries on, or from
  // fewer, if threads would have hardly any tasks.
  const bool uneven = p.band.left < kUnbounded || p.band.right < kUnbounded || p.ranges.data != nullptr;
  const int64_t tasks_of_thread = uneven ? 16 : 8;
  constexpr int64_t kLeastRows = 192, kFewestRows = 128, kFewTasks = 6;
  // Sums of the shared groups take 16 MiB, or 1 MiB for each thread if that is more, or those of one group. Tables of
  // distances take 16 MiB.
  constexpr int64_t kSums = 1 << 22, kSumsOfThread = 1 << 18;
  const int64_t kv_group = heads_of_kv_group(p), groups = p.batch * p.heads_q / kv_group;
  const int64_t tiles = max64(1, (p.seqlen_k + kTile<C> - 1) / kTile<C>);
  // Beside other calls there are no threads that whole groups could keep busy alike.
  const int64_t left = tiles == 1 || bias.way == bias.kAdded ? 0 : threads < workers ? groups : groups % threads;
  BackwardCut cut{kv_group, groups - left, left, tiles};
  if (left == 0) return cut;
  const int64_t wanted_pieces = (tasks_of_thread * threads + left * tiles - 1) / (left * tiles);
  const auto pieces_of = [&](int64_t rows) { return max64(1, min64(wanted_pieces, p.seqlen_q / rows)); };
  const bool few = left * tiles * pieces_of(kLeastRows) < kFewTasks * threads;
  const int64_t pieces = pieces_of(few ? kFewestRows : kLeastRows);
  cut.piece_rows = max64(2, round_up((p.seqlen_q + pieces - 1) / pieces, 64));
  // No last piece that is much shorter than the others.
  while (cut.piece_rows > kFewestRows && 4 * (round_up(p.seqlen_q, cut.piece_rows) - p.seqlen_q) > cut.piece_rows)
    cut.piece_rows -= 64;
  cut.pieces = max64(1, (p.seqlen_q + cut.piece_rows - 1) / cut.piece_rows);
  const int64_t of_queries = QueryGradSums<T, C>::in_output(p) ? 0 : kv_group * p.seqlen_q * p.head_dim;
  const int64_t of_keys = cut.pieces == 1 ? 0 : tiles * sums_of_tile<C>(p, kv_group);
  cut.slots =
      max64(1, min64(left, max64(kSums, kSumsOfThread * workers) * threads / workers / max64(1, of_queries + of_keys)));
  if (bias.way == bias.kByTask)
    cut.tables = max64(1, min64(min64(tiles * cut.pieces, 2 * threads), kSums / (left * max64(1, bias.size))));
  return cut;
}

// Zeros for the gradient of a bias that has an entry per score.
template <class T>
void clear_bias_grad(const Backward& p, const Runtime& runtime) {
  const int64_t bytes = p.seqlen_q * p.seqlen_k * bias_bytes<T>(p);
  run_tasks(p, runtime, p.batch * p.heads_q, 0, [&](int64_t head, void*, int64_t) {
    std::memset(static_cast<char*>(p.dbias.data) + head * bytes, 0, static_cast<size_t>(bytes));
  });
}

// d(table) from the sums of tasks, `size` for each: those of whole groups, then those of the shared ones.
template <class T, class C>
void add_tables(const Backward& p, const C* sums, int64_t size, const BackwardCut& cut) {
  const int64_t entries = distances(p), tables = p.bias_size[0] * p.bias_size[1], groups = cut.whole + cut.left;
  const Buffer<C> total(tables * entries);
  std::memset(total.data(), 0, static_cast<size_t>(tables * entries) * sizeof(C));
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t batch = group * cut.kv_group / p.heads_q, head = group * cut.kv_group % p.heads_q;
    const int64_t table = (p.bias_size[0] == 1 ? 0 : batch) * p.bias_size[1] + (p.bias_size[1] == 1 ? 0 : head);
    C* const target = total.data() + table * entries;
    for (int64_t part = 0; part < (group < cut.whole ? 1 : cut.tables); ++part, sums += size)
      for (int64_t i = 0; i < size; ++i) target[i] += sums[i];
  }
  with_bias_grad<T>(p, [&]<class Bias>(Bias* dbias) {
    for (int64_t i = 0; i < tables * entries; ++i) dbias[i] = from_compute<Bias>(total.data()[i]);
  });
}

// The phases of a backward pass: the row terms of shared groups, or of all; the sweep over the keys of whole groups;
// that of shared ones. Tasks of a phase may run side by side; those of the next one begin when they have ended.
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
        cut_(cut_backward<T>(p, threads, workers, bias_)),
        visiting_(p),
        first_tile_meets_all_(first_tile_meets_all()),
        prefetches_heads_(prefetches_heads(workers)),
        prefetch_calls_of_head_(prefetch_calls_of_head()),
        query_grads_(p, cut_, workers),
        progress_(p, cut_),
        kept_(cut_.left > 0 && cut_.pieces > 1 ? cut_.slots * cut_.tiles * sums_of_tile<C>(p, cut_.kv_group) : 0),
        sweeps_of_whole_(bias_sums() ? bias_.groups * bias_.tasks : cut_.whole),
        bias_grads_((by_task()                           ? cut_.whole + cut_.left * cut_.tables
                     : bias_sums() && !bias_.in_output() ? sweeps_of_whole_
                                                         : 0) *
                    bias_.size),
        // Of q and of grad_out, where the queries are walked more than once.
        caches_(workers, cut_.tiles > 1 && copies_queries() ? 2 * cut_.kv_group : 0,
                cached_rows<Op>(p.seqlen_q, sizes_.tiles) / Op::kPack,
                round_up(max64(p.head_dim, p.head_dim_v), Simd<C>::kLanes), is_window(p.band) && Op::kPack == 1) {}

  int64_t phases() const { return sweeps_ ? 3 : 1; }
  int64_t tasks(int64_t phase) const {
    if (phase == 0) return (p_.batch * p_.heads_q - first_term_head()) * term_pieces();
    return phase == 1 ? sweeps_of_whole_ : cut_.shared_tasks();
  }
  int64_t scratch_bytes(int64_t phase) const {
    if (phase == 0) return norm_.data() == nullptr ? 0 : sizes_.bytes;
    return sizes_.bytes + caches_.bytes() + query_grads_.scratch_bytes();
  }
  int64_t queues(int64_t phase) const { return phase == 2 && cut_.left > 0 ? cut_.slots : 0; }
  int64_t queue_end(int64_t, int64_t queue) const { return cut_.groups_before(queue + 1) * cut_.tasks_of_group(); }
  void run(int64_t phase, int64_t task, void* memory, int64_t worker) const {
    if (phase == 0) return make_some_terms(task, memory);
    if (phase == 2) return sweep_shared({cut_, task}, memory, worker);
    if (!by_task() && !bias_sums()) return sweep_whole(task, memory, worker, nullptr);
    C* grads = bias_grads_.data() + task * bias_.size;
    if (bias_.in_output() && bias_sums()) grads = static_cast<C*>(p_.dbias.data) + task / bias_.tasks * bias_.size;
    std::memset(grads, 0, static_cast<size_t>(bias_.size) * sizeof(C));
    if (by_task()) return sweep_whole(task, memory, worker, grads);
    const int64_t group = task / bias_.tasks, part = task % bias_.tasks;
    const int64_t end = bias_.members * (part + 1) / bias_.tasks;
    for (int64_t member = bias_.members * part / bias_.tasks; member < end; ++member)
      sweep_whole(bias_.kv_group(group, member), memory, worker, grads);
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
  // Rows of q and grad_out: converted, in pairs, or since they lie apart.
  bool copies_queries() const {
    return kConverts<T, Op> || Op::kPack == 2 || copies_rows<T, C>(p_, p_.q, p_.head_dim, p_.seqlen_k) ||
           copies_rows<T, C>(p_, p_.grad_out, p_.head_dim_v, p_.seqlen_k);
  }
  bool bias_apart() const { return bias_.way == bias_.kApart; }
  bool bias_sums() const { return bias_.way == bias_.kAdded; }
  bool by_task() const { return bias_.way == bias_.kByTask; }
  bool adds_bias() const { return bias_sums() || by_task() || bias_.way == bias_.kStored; }
  // Row terms from this head on are computed first. A task that has a whole KV group computes its own.
  bool terms_first() const { return bias_apart() || !sweeps_; }
  int64_t first_term_head() const { return terms_first() ? 0 : cut_.whole * cut_.kv_group; }
  int64_t term_pieces() const { return (p_.seqlen_q + term_rows_ - 1) / term_rows_; }
  void make_terms_of(const BackwardScratch<Op>& scratch, int64_t batch, int64_t head, int64_t row, int64_t rows) const {
    make_terms<T>(p_, scratch, batch, head, row, rows, terms_);
    sinks_.add(batch, head, row, rows, terms_.delta);
  }
  void make_some_terms(int64_t task, void* memory) const {
    const int64_t pieces = term_pieces(), head = first_term_head() + task / pieces, row = task % pieces * term_rows_;
    const int64_t rows = min64(term_rows_, p_.seqlen_q - row), batch = head / p_.heads_q;
    make_terms_of(BackwardScratch<Op>(memory, p_), batch, head % p_.heads_q, row, rows);
    const int64_t index = head / cut_.kv_group - cut_.whole, h = head % cut_.kv_group;
    if (index < 0 || cut_.left == 0) return;
    query_grads_.begin_shared(index, h, batch, head % p_.heads_q, {row, row + rows});
    if (h == 0 && row == 0) progress_.begin(index);
  }

  // Whether every query has scores with the first tile of keys.
  bool first_tile_meets_all() const {
    const ScoreParams<C> score(p_);
    if (score.has_bias || score.has_mask || score.has_ranges || sizes_.tiles || p_.seqlen_k == 0) return false;
    const Range met = p_.band.transposed().visited(0, min64(kTile<C>, p_.seqlen_k), {0, p_.seqlen_q});
    return met.end - met.begin == p_.seqlen_q;
  }

  // What the task of a head reads first and, where it isn't converted at the end, what it writes. (Results
  // whose rows collide would drive each other out of the caches.)
  struct NextHead {
    PrefetchRows places[8];
    int64_t count = 0;
  };
  NextHead head_to_prefetch(int64_t head) const {
    NextHead next;
    const auto add = [&](const View& view, int64_t rows, int64_t columns) {
      if (view.data != nullptr)
        next.places[next.count++] =
            rows_to_prefetch<T>(view, head / p_.heads_q, head % p_.heads_q, 0, rows, rows, columns);
    };
    add(p_.grad_out, p_.seqlen_q, p_.head_dim_v), add(p_.out, p_.seqlen_q, p_.head_dim_v);
    add(p_.k, p_.seqlen_k, p_.head_dim), add(p_.v, p_.seqlen_k, p_.head_dim_v), add(p_.q, p_.seqlen_q, p_.head_dim);
    const auto add_result = [&](const View& view, int64_t rows, int64_t columns) {
      if (std::is_same_v<T, C> && !collide<T>(view, columns)) add(view, rows, columns);
    };
    add_result(p_.dq, p_.seqlen_q, p_.head_dim);
    add_result(p_.dk, p_.seqlen_k, p_.head_dim), add_result(p_.dv, p_.seqlen_k, p_.head_dim_v);
    return next;
  }
  // Many short heads, each with keys of its own, that come from far away: the machine's own prefetching ends where the
  // rows of a head do. Two of them are to lie in the second-level cache.
  bool prefetches_heads(int64_t workers) const {
    constexpr int64_t kMostBytes = (kVectorBytes == 64 ? 512 : 256) << 10;
    const int64_t bytes = 2 * (p_.seqlen_q + p_.seqlen_k) * (p_.head_dim + p_.head_dim_v) * bytes_of(p_.dtype);
    return p_.seqlen_k > 0 && cut_.kv_group == 1 && ScoreParams<C>(p_).fast_path() && !sizes_.tiles &&
           bytes <= kMostBytes && entries_of_call(p_) * p_.heads_q * bytes >= kFarBytes * workers;
  }
  // How often the tiles of a head call for it.
  int64_t prefetch_calls_of_head() const {
    int64_t calls = 0;
    for (int64_t tile = 0; prefetches_heads_ && tile < cut_.tiles; ++tile) {
      const int64_t keys = min64(kTile<C>, p_.seqlen_k - tile * kTile<C>);
      const Range queries = p_.band.transposed().visited(tile * kTile<C>, keys, {0, p_.seqlen_q});
      const int64_t vectors = (keys + Simd<C>::kLanes - 1) / Simd<C>::kLanes;
      if (queries.end > queries.begin)
        calls += prefetch_calls_of_gradients<Op>(p_, queries.end - queries.begin, vectors);
    }
    return max64(1, calls);
  }

  // A task's memory.
  struct Memory {
    BackwardScratch<Op> scratch;
    PackedCache<typename Op::Scalar>* cache;
    char* sums;
  };
  Memory memory_of(void* memory, int64_t worker) const {
    char* const cache = static_cast<char*>(memory) + sizes_.bytes;
    return {BackwardScratch<Op>(memory, p_), caches_.of(worker, cache), cache + caches_.bytes()};
  }
  void sweep_whole(int64_t group, void* memory, int64_t worker, C* grads_of_bias) const {
    const Memory own = memory_of(memory, worker);
    const int64_t batch = group * cut_.kv_group / p_.heads_q, head = group * cut_.kv_group % p_.heads_q;
    if (!bias_apart())
      for (int64_t h = head; h < head + cut_.kv_group; ++h) make_terms_of(own.scratch, batch, h, 0, p_.seqlen_q);
    const QueryGrad<C> dq = query_grads_.begin(batch, head, first_tile_meets_all_, own.sums, worker);
    const NextHead next_head = prefetches_heads_ && group + 1 < cut_.whole ? head_to_prefetch(group + 1) : NextHead();
    PrefetchByLine<PrefetchSeries> prefetch({next_head.places, next_head.count}, prefetch_calls_of_head_);
    backward_heads<T, Op>(p_, own.scratch, batch, head, cut_.kv_group, {0, p_.seqlen_k}, terms_, visiting_, dq, nullptr,
                          adds_bias(), grads_of_bias, own.cache, {{0, p_.seqlen_q}},
                          next_head.count > 0 ? &prefetch : nullptr);
    query_grads_.end(batch, head, dq);
  }
  void sweep_shared(const SharedTask& task, void* memory, int64_t worker) const {
    const Memory own = memory_of(memory, worker);
    const int64_t batch = task.group * cut_.kv_group / p_.heads_q, head = task.group * cut_.kv_group % p_.heads_q;
    const int64_t key = task.tile * kTile<C>, row = task.piece * cut_.piece_rows;
    Piece<C> piece{{row, min64(p_.seqlen_q, row + cut_.piece_rows)}, task.piece == 0, task.piece + 1 == cut_.pieces};
    if (cut_.pieces > 1)
      piece.sums = kept_.data() + (task.slot * cut_.tiles + task.tile) * sums_of_tile<C>(p_, cut_.kv_group);
    // The sums of dK and dV are those of the tile's last piece, or of the slot's last group.
    if (!piece.first) piece.before = &progress_.of(task.group, task.tile, task.piece - 1);
    else if (task.round > 0) piece.before = &progress_.of(task.group - cut_.slots, task.tile, cut_.pieces - 1);
    piece.awaited = progress_.done();
    C* table = nullptr;
    if (by_task()) {
      const int64_t number = task.tile * cut_.pieces + task.piece, before = number - cut_.tables;
      table = bias_grads_.data() +
              (cut_.whole + (task.group - cut_.whole) * cut_.tables + number % cut_.tables) * bias_.size;
      if (before < 0) std::memset(table, 0, static_cast<size_t>(bias_.size) * sizeof(C));
      else wait_until(progress_.of(task.group, before / cut_.pieces, before % cut_.pieces), progress_.done());
    }
    const QueryGrad<C> dq = query_grads_.shared(task.slot, batch, head);
    Turns<T, C> turns(p_, cut_, visiting_, progress_, query_grads_, dq, task, piece.rows);
    backward_heads<T, Op>(p_, own.scratch, batch, head, cut_.kv_group, {key, min64(p_.seqlen_k, key + kTile<C>)},
                          terms_, visiting_, dq, query_grads_.wanted() ? &turns : nullptr, adds_bias(), table,
                          own.cache, piece, nullptr);
    announce(progress_.of(task.group, task.tile, task.piece), progress_.done());
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
  const BackwardCut cut_;
  const VisitingQueries<C> visiting_;
  const bool first_tile_meets_all_, prefetches_heads_;
  const int64_t prefetch_calls_of_head_;
  const QueryGradSums<T, C> query_grads_;
  const TasksProgress progress_;
  const Buffer<C> kept_;  // dK and dV of shared groups, where they are sums of pieces
  const int64_t sweeps_of_whole_;
  const Buffer<C> bias_grads_;
  const PackedCaches<typename Op::Scalar> caches_;
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
