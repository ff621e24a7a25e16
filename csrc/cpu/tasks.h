// How a pass is cut into tasks and who runs them.
#pragma once

#include <numeric>

#include "blocks.h"

namespace attnkern::cpu {

// A call that is cut into tasks, of whatever class (ForwardCall, DecodeCall, BackwardCall): its tasks come in phases.
// Those of one phase may run side by side, and those of other calls beside them; the next phase begins when they have
// ended.
struct Plan {
  void* call;
  int64_t (*phases)(const void* call);
  int64_t (*tasks)(const void* call, int64_t phase);
  int64_t (*scratch_bytes)(const void* call, int64_t phase);
  // A phase's tasks may have to be taken in their order, from so many queues; 0: from any.
  int64_t (*queues)(const void* call, int64_t phase);
  int64_t (*queue_end)(const void* call, int64_t phase, int64_t queue);
  void (*run)(const void* call, int64_t phase, int64_t task, void* memory, int64_t worker);
  void (*forget)(const void* call, int64_t worker);
  void (*end)(void* call);      // what follows all phases
  void (*destroy)(void* call);  // gives its memory back
};

namespace {

template <class Call>
Plan plan_of(Call* call) {
  return {call,
          [](const void* given) { return static_cast<const Call*>(given)->phases(); },
          [](const void* given, int64_t phase) { return static_cast<const Call*>(given)->tasks(phase); },
          [](const void* given, int64_t phase) { return static_cast<const Call*>(given)->scratch_bytes(phase); },
          [](const void* given, int64_t phase) { return static_cast<const Call*>(given)->queues(phase); },
          [](const void* given, int64_t phase, int64_t queue) {
            return static_cast<const Call*>(given)->queue_end(phase, queue);
          },
          [](const void* given, int64_t phase, int64_t task, void* memory, int64_t worker) {
            static_cast<const Call*>(given)->run(phase, task, memory, worker);
          },
          [](const void* given, int64_t worker) { static_cast<const Call*>(given)->forget(worker); },
          [](void* given) { static_cast<const Call*>(given)->end(); },
          [](void* given) { delete static_cast<Call*>(given); }};
}

// A KV group: the query heads that share K and V heads. Where K and V have different numbers of heads, it is the
// smallest set of query heads that shares neither with another.
inline int64_t heads_of_kv_group(const Attention& p) { return std::lcm(p.heads_q / p.heads_k, p.heads_q / p.heads_v); }

// Rows of a head that are one task, where rows need nothing of each other; and how many such tasks `rows` make.
inline constexpr int64_t kTaskRows = 512;
inline int64_t task_pieces(int64_t rows) { return (rows + kTaskRows - 1) / kTaskRows; }

// Tasks 0 .. tasks - 1, cut into queues of neighbours, from which they are taken one by one, in their order, by
// whichever worker is free. Each worker begins with a share of the work of its own, so that call after call the same
// core meets the same heads and has their rows, and those of the results, in its caches; then it goes on to the next
// queue.
class TaskQueues {
 public:
  // A queue for each worker.
  TaskQueues(int64_t tasks, int64_t workers) : count_(workers), queue_(workers), first_(0) {
    for (int64_t i = 0; i < workers; ++i) queue_.data()[i] = {tasks * i / workers, tasks * (i + 1) / workers};
  }
  // end_of(i): where queue i ends. work_of(i): how much its tasks are, of the work of all.
  template <class EndOf, class WorkOf>
  TaskQueues(int64_t count, int64_t workers, const EndOf& end_of, const WorkOf& work_of)
      : count_(count), queue_(count), first_(workers) {
    double work = 0, before = 0;
    for (int64_t i = 0, begin = 0; i < count; begin = queue_.data()[i++].end) {
      queue_.data()[i] = {begin, end_of(i)};
      work += work_of(i);
    }
    for (int64_t worker = 0, i = 0; worker < workers; first_.data()[worker++] = static_cast<int32_t>(i))
      while (i + 1 < count && before + work_of(i) <= work * worker / workers) before += work_of(i++);
  }

  // The queue that a worker begins with. (Not looked for by the worker: the queues' cache lines go from core to core.)
  int64_t first_of(int64_t worker) const { return first_.data() == nullptr ? worker : first_.data()[worker]; }
  // begin(), then body(task) until no task is left.
  template <class Begin, class Body>
  void work(int64_t worker, const Begin& begin, const Body& body) const {
    if (!goes_on_) begin();
    const int64_t first = first_of(worker);
    for (int64_t i = 0; i < count_; ++i) {
      Queue& queue = queue_.data()[(first + i) % count_];
      int64_t task;
      while ((task = __atomic_fetch_add(&queue.next, 1, __ATOMIC_RELAXED)) < queue.end) body(task);
    }
  }

 private:
  friend struct TaskByTask;  // of bench/cores.cpp, which times each task
  struct alignas(64) Queue {
    int64_t next, end;
  };
  int64_t count_;
  Buffer<Queue> queue_;
  const Buffer<int32_t> first_;  // empty: each with its own queue
  bool goes_on_ = false;         // the workers have begun before
};

// Runs body(task, scratch, worker) for every task of problem p, on at most num_threads workers, each of which calls
// begin(worker) first. The tasks are in `queues` queues, as TaskQueues has them; where that is 0, in one for each
// worker.
template <class Problem, class Body, class EndOf, class WorkOf, class Begin>
inline void run_tasks(const Problem& p, const Runtime& runtime, int64_t tasks, int64_t scratch_bytes, const Body& body,
                      int64_t queues, const EndOf& end_of, const WorkOf& work_of, const Begin& begin) {
  const int64_t workers = min64(runtime.num_threads, tasks);
  if (workers <= 1) {
    void* scratch = thread_scratch(static_cast<std::size_t>(scratch_bytes));
    begin(0);
    for (int64_t task = 0; task < tasks; ++task) body(task, scratch, 0);
    return;
  }
  struct Context {
    TaskQueues queues;  // first: bench/cores.cpp looks for it here
    const Problem& problem;
    int64_t scratch_bytes;
    const Body& body;
    const Begin& begin;
  } context{queues > 0 ? TaskQueues(queues, workers, end_of, work_of) : TaskQueues(tasks, workers), p, scratch_bytes,
            body, begin};
  const auto work = [](void* raw, int64_t worker) {
    Context& shared = *static_cast<Context*>(raw);
    // Another core has just written it: all of it at once, not miss after miss as the fields are read.
    for (std::size_t byte = 0; byte < sizeof(Problem); byte += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(&shared.problem) + byte);
    void* scratch = thread_scratch(static_cast<std::size_t>(shared.scratch_bytes));
    shared.queues.work(
        worker, [&] { shared.begin(worker); }, [&](int64_t task) { shared.body(task, scratch, worker); });
  };
  runtime.parallel(workers, work, &context);
}
template <class Problem, class Body>
inline void run_tasks(const Problem& p, const Runtime& runtime, int64_t tasks, int64_t scratch_bytes,
                      const Body& body) {
  run_tasks(
      p, runtime, tasks, scratch_bytes, body, 0, [](int64_t) { return int64_t{0}; }, [](int64_t) { return 0.0; },
      [](int64_t) {});
}

// A phase of a call that is alone.
template <class Problem, class Call>
inline void run_phase(const Problem& p, const Runtime& runtime, const Call& call, int64_t phase) {
  run_tasks(
      p, runtime, call.tasks(phase), call.scratch_bytes(phase),
      [&](int64_t task, void* memory, int64_t worker) { call.run(phase, task, memory, worker); }, call.queues(phase),
      [&](int64_t queue) { return call.queue_end(phase, queue); },
      [&](int64_t queue) {
        return static_cast<double>(call.queue_end(phase, queue) - (queue > 0 ? call.queue_end(phase, queue - 1) : 0));
      },
      [&](int64_t worker) { call.forget(worker); });
}

}  // namespace
}  // namespace attnkern::cpu
