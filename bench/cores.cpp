// What a call would take on many cores, from its tasks' times on one. The kernels run as they are, cut for any number
// of threads, but task by task: each worker's at first, one task after the other, as its core would meet them; then the
// times are replayed through the queues themselves, by workers that each have a clock. Whoever's clock is behind takes
// the next task. Parts of a call that one thread runs are timed as they are. None of the tasks waits for others
// as it runs, so that sums are added up in another order; when it would, and how far others have come, is noted, and
// the clocks wait for each other.
//
// A line on stdin is a problem, `pass dtype batch heads_q heads_k seqlen_q seqlen_k head_dim mask threads rounds`:
// forward or backward; float32 or bfloat16; all, causal, packed (causal sequences side by side) or prefix (ranges: the
// first quarter of the keys, and those before). A line on stdout is `seconds alone one phases tasks scratch` of it:
// what the call takes, what one thread takes of that alone, what the call takes that is cut for one thread, in turns
// with it; how often threads start, tasks of the longest phase, bytes that each thread keeps. With 1 thread it is a
// plain call; with -2 one by two real threads. Times are medians of CPU time.
#include <malloc.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/tasks.h"

namespace attnkern::cpu {
namespace {

uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
#endif
}

// What tasks ask of the library that run one by one.
struct OneByOne {
  struct Event {
    double time;  // in ticks, then as a part of the task's time
    Progress* progress;
    int64_t reached;
    bool waits;
  };
  std::vector<std::vector<Event>> events;  // of the tasks
  size_t task = 0;

  void note(Progress& progress, int64_t reached, bool waits) {
    events[task].push_back({static_cast<double>(ticks()), &progress, reached, waits});
  }
};
OneByOne* one_by_one = nullptr;  // null: threads run the tasks
std::atomic<std::size_t> most_scratch{0};

}  // namespace
}  // namespace attnkern::cpu

// The linker gives the kernels' calls of these functions to those that follow (--wrap, in setup.py).
extern "C" {
void* __real__ZN8attnkern3cpu14thread_scratchEm(std::size_t bytes);
void* __wrap__ZN8attnkern3cpu14thread_scratchEm(std::size_t bytes) {
  using namespace attnkern::cpu;
  for (std::size_t known = most_scratch; known < bytes && !most_scratch.compare_exchange_weak(known, bytes);) {
  }
  return __real__ZN8attnkern3cpu14thread_scratchEm(bytes);
}
void __real__ZN8attnkern3cpu10wait_untilERNS0_8ProgressEl(attnkern::cpu::Progress& progress, int64_t least);
void __wrap__ZN8attnkern3cpu10wait_untilERNS0_8ProgressEl(attnkern::cpu::Progress& progress, int64_t least) {
  using namespace attnkern::cpu;
  if (one_by_one != nullptr) one_by_one->note(progress, least, true);
  else __real__ZN8attnkern3cpu10wait_untilERNS0_8ProgressEl(progress, least);
}
void __real__ZN8attnkern3cpu8announceERNS0_8ProgressEl(attnkern::cpu::Progress& progress, int64_t reached);
void __wrap__ZN8attnkern3cpu8announceERNS0_8ProgressEl(attnkern::cpu::Progress& progress, int64_t reached) {
  using namespace attnkern::cpu;
  if (one_by_one != nullptr) one_by_one->note(progress, reached, false);
  else __real__ZN8attnkern3cpu8announceERNS0_8ProgressEl(progress, reached);
}
}

namespace attnkern::cpu {
namespace {

double cpu_time() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Workers that share one core, each with a clock of its own.
class Replay {
 public:
  explicit Replay(int64_t workers)
      : clocks(static_cast<size_t>(workers)),
        contexts_(clocks.size()),
        done_(clocks.size()),
        awaited_(clocks.size()),
        stacks_(clocks.size()) {}

  // Runs work(worker) for all; each must call go_on() before it looks at what others change. The latest clock.
  template <class Work>
  double run(const Work& work) {
    work_ = [](void* given, int64_t worker) { (*static_cast<const Work*>(given))(worker); };
    given_ = const_cast<Work*>(&work);
    current = this;
    for (size_t w = 0; w < clocks.size(); ++w) {
      stacks_[w].reset(new char[kStack]);
      getcontext(&contexts_[w]);
      contexts_[w].uc_stack.ss_sp = stacks_[w].get();
      contexts_[w].uc_stack.ss_size = kStack;
      contexts_[w].uc_link = &home_;
      makecontext(&contexts_[w], &Replay::enter, 0);
    }
    for (size_t left = clocks.size(); left > 0;) {
      running_ = clocks.size();
      for (size_t w = 0; w < clocks.size(); ++w)
        if (!done_[w] && awaited_[w].progress == nullptr && (running_ == clocks.size() || clocks[w] < clocks[running_]))
          running_ = w;
      if (running_ == clocks.size()) throw std::logic_error("all workers wait for each other");
      swapcontext(&home_, &contexts_[running_]);
      left -= done_[running_] ? 1 : 0;
    }
    return *std::max_element(clocks.begin(), clocks.end());
  }
  void go_on() { swapcontext(&contexts_[running_], &home_); }
  void wait_until(Progress* progress, int64_t least) {
    if (reached_[progress] >= least) return;
    awaited_[running_] = {progress, least};
    go_on();
  }
  void announce(Progress* progress, int64_t reached) {
    reached_[progress] = reached;
    for (size_t w = 0; w < clocks.size(); ++w)
      if (awaited_[w].progress == progress && awaited_[w].least <= reached) {
        awaited_[w] = {};
        clocks[w] = std::max(clocks[w], clocks[running_]);
      }
  }

  std::vector<double> clocks;

 private:
  static constexpr size_t kStack = 1 << 16;
  static Replay* current;
  static void enter() {
    Replay& own = *current;
    own.work_(own.given_, static_cast<int64_t>(own.running_));
    own.done_[own.running_] = true;
  }
  struct Awaited {
    Progress* progress = nullptr;
    int64_t least = 0;
  };

  std::vector<ucontext_t> contexts_;
  std::vector<bool> done_;
  std::vector<Awaited> awaited_;  // null where a worker doesn't wait
  std::map<Progress*, int64_t> reached_;
  std::vector<std::unique_ptr<char[]>> stacks_;
  ucontext_t home_;
  size_t running_ = 0;
  void (*work_)(void*, int64_t) = nullptr;
  void* given_ = nullptr;
};
Replay* Replay::current = nullptr;

double middle_of(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<int64_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

// What one core has made of a phase of a call, round after round.
struct Phase {
  int64_t workers = 0;
  std::vector<int64_t> ends;                 // of the queues
  std::vector<int64_t> firsts;               // the queues that the workers begin with
  std::vector<std::vector<double>> seconds;  // of each task in the rounds
  OneByOne notes;                            // of the last round

  // What it would take with all workers, if each task took the median of its times. (Of one round, a task that
  // something else held up would hold up all that wait for it.)
  double time() const {
    const TaskQueues queues(
        static_cast<int64_t>(ends.size()), workers, [&](int64_t q) { return ends[static_cast<size_t>(q)]; },
        [&](int64_t q) { return static_cast<double>(std::count(firsts.begin(), firsts.end(), q)); });
    Replay replay(workers);
    return replay.run([&](int64_t worker) {
      const auto take = [&](int64_t task) {
        const double all = middle_of(seconds[static_cast<size_t>(task)]);
        double& clock = replay.clocks[static_cast<size_t>(worker)];
        double done = 0;
        for (const OneByOne::Event& event : notes.events[static_cast<size_t>(task)]) {
          clock += all * (event.time - done);
          done = event.time;
          replay.go_on();
          if (event.waits) replay.wait_until(event.progress, event.reached);
          else replay.announce(event.progress, event.reached);
        }
        clock += all * (1 - done);
        replay.go_on();
      };
      queues.work(worker, [] {}, take);
    });
  }
};
std::vector<Phase> phases;  // of the call
size_t phase = 0;           // the next one
double parallel_cpu = 0;    // of the round
double two_threads_time = 0;

// Takes the place of the threads.
struct TaskByTask {
  static void parallel(int64_t workers, void (*work)(void*, int64_t), void* context) {
    const double start = cpu_time();
    if (phase == phases.size()) phases.emplace_back();
    run(phases[phase++], workers, work, context);
    parallel_cpu += cpu_time() - start;
  }

 private:
  static void run(Phase& now, int64_t workers, void (*work)(void*, int64_t), void* context) {
    TaskQueues& queues = *static_cast<TaskQueues*>(context);
    TaskQueues::Queue* const list = queues.queue_.data();
    const std::vector<TaskQueues::Queue> given(list, list + queues.count_);
    const auto tasks = static_cast<size_t>(given.back().end);
    // Who takes a queue's tasks, in turns: those that begin with it, or the last of those before.
    std::vector<std::vector<int64_t>> takers(given.size());
    for (int64_t worker = 0; worker < workers; ++worker)
      takers[static_cast<size_t>(queues.first_of(worker))].push_back(worker);
    for (size_t q = 1; q < takers.size(); ++q)
      if (takers[q].empty()) takers[q] = {takers[q - 1].back()};
    queues.count_ = 1;  // of a single task
    now.workers = workers;
    now.ends.clear(), now.firsts.clear();
    for (int64_t worker = 0; worker < workers; ++worker) now.firsts.push_back(queues.first_of(worker));
    for (const auto& queue : given) now.ends.push_back(queue.end);
    now.seconds.resize(tasks);
    now.notes.events.assign(tasks, {});
    one_by_one = &now.notes;
    for (int64_t worker = 0; worker < workers; ++worker) {
      queues.goes_on_ = false;
      for (size_t q = 0; q < given.size(); ++q) {
        const auto own = std::find(takers[q].begin(), takers[q].end(), worker);
        if (own == takers[q].end()) continue;
        const auto [begin, end] = given[q];
        for (int64_t task = begin + (own - takers[q].begin()); task < end;
             task += static_cast<int64_t>(takers[q].size())) {
          const auto number = now.notes.task = static_cast<size_t>(task);
          list[0] = {task, task + 1};
          const auto start = static_cast<double>(ticks());
          const double before = cpu_time();
          work(context, worker);
          queues.goes_on_ = true;
          now.seconds[number].push_back(cpu_time() - before);
          const double all = static_cast<double>(ticks()) - start;
          for (auto& event : now.notes.events[number]) event.time = (event.time - start) / all;
        }
      }
    }
    one_by_one = nullptr;
  }
};

// Two threads that share the tasks as they do outside; half of their CPU time, since others use this machine.
void two_threads(int64_t workers, void (*work)(void*, int64_t), void* context) {
  const double start = cpu_time();
  double seconds[2] = {0, 0};
  std::atomic<int> ready{0};
  const auto timed = [&](int64_t worker) {
    ++ready;
    while (ready < workers) {
    }
    const double begun = cpu_time();
    work(context, worker);
    seconds[worker] = cpu_time() - begun;
  };
  {
    std::thread other(timed, 1);
    timed(0);
    other.join();
  }
  two_threads_time += (seconds[0] + seconds[1]) / 2;
  parallel_cpu += cpu_time() - start;
}

// A contiguous tensor (batch, heads, rows, columns) of small numbers.
struct Tensor {
  View view;
  Buffer<char> memory;
  Tensor(DType dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns)
      : memory(batch * heads * rows * columns * bytes_of(dtype)) {
    const int64_t count = batch * heads * rows * columns;
    view = {memory.data(), {heads * rows * columns, rows * columns, columns, 1}};
    uint32_t state = 1;
    for (int64_t i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      const float value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      if (dtype == DType::kFloat32) std::memcpy(memory.data() + 4 * i, &value, 4);
      else reinterpret_cast<uint16_t*>(memory.data())[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
};

struct Problem {
  std::string pass, dtype, mask;
  int64_t batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim, threads, rounds;
};

std::vector<int32_t> ranges_of(const Problem& of) {
  std::vector<int32_t> ranges;
  if (of.mask == "prefix")
    for (int64_t i = 0; i < of.seqlen_q; ++i)
      ranges.insert(ranges.end(), {0, static_cast<int32_t>(std::max(i + 1, of.seqlen_k / 4))});
  // Of lengths about an eighth of all, from a half to three halves of that.
  uint32_t state = 1;
  for (int64_t begin = 0; of.mask == "packed" && begin < of.seqlen_q;) {
    state = state * 1664525u + 1013904223u;
    const int64_t mean = std::max<int64_t>(2, of.seqlen_q / 8);
    const int64_t end = std::min(of.seqlen_q, begin + mean / 2 + static_cast<int64_t>(state >> 8) % mean);
    for (int64_t i = begin; i < end; ++i)
      ranges.insert(ranges.end(), {static_cast<int32_t>(begin), static_cast<int32_t>(i + 1)});
    begin = end;
  }
  return ranges;
}

void run(const Problem& of, const Kernels& kernels) {
  const DType dtype = of.dtype == "float32" ? DType::kFloat32 : DType::kBFloat16;
  const auto tensor = [&](int64_t heads, int64_t rows) { return Tensor(dtype, of.batch, heads, rows, of.head_dim); };
  const Tensor q = tensor(of.heads_q, of.seqlen_q), k = tensor(of.heads_k, of.seqlen_k),
               v = tensor(of.heads_k, of.seqlen_k), out = tensor(of.heads_q, of.seqlen_q);
  Backward p{};
  p.softmax_scale = 1 / std::sqrt(static_cast<double>(of.head_dim));
  p.dtype = dtype;
  p.batch = of.batch, p.heads_q = of.heads_q, p.heads_k = p.heads_v = of.heads_k;
  p.seqlen_q = of.seqlen_q, p.seqlen_k = of.seqlen_k, p.head_dim = p.head_dim_v = of.head_dim;
  p.q = q.view, p.k = k.view, p.v = v.view, p.out = out.view;
  p.window_left = p.window_right = -1;
  if (of.mask == "causal") p.band.right = 0;
  const std::vector<int32_t> ranges = ranges_of(of);
  if (!ranges.empty()) p.ranges = {ranges.data(), {0, 0, 2}, 1, 1, 1};
  Buffer<float> lse(of.batch * of.heads_q * of.seqlen_q);
  Forward forward{};
  static_cast<Attention&>(forward) = p;
  forward.out = p.out;
  forward.lse = of.pass == "backward" ? lse.data() : nullptr;
  p.lse = lse.data();

  Runtime runtime{of.threads, TaskByTask::parallel};
  if (of.threads == -2) runtime = {2, two_threads};
  if (of.pass == "backward") kernels.forward(forward, {1, nullptr});
  phases.clear();
  std::vector<double> together, alone, ones;
  most_scratch = 0;
  // The first round warms up, where there are several.
  for (int64_t round = of.rounds > 1 ? -1 : 0; round < of.rounds; ++round) {
    // As torch gives them: what is written first is memory that no one has touched, or that has just been freed.
    const Tensor dq = tensor(of.pass == "backward" ? of.heads_q : 0, of.seqlen_q),
                 dk = tensor(of.pass == "backward" ? of.heads_k : 0, of.seqlen_k),
                 dv = tensor(of.pass == "backward" ? of.heads_k : 0, of.seqlen_k);
    p.grad_out = out.view, p.dq = dq.view, p.dk = dk.view, p.dv = dv.view;
    parallel_cpu = two_threads_time = 0, phase = 0;
    if (round == 0) phases.clear();
    const auto call = [&](const Runtime& threads) {
      const double start = cpu_time();
      of.pass == "backward" ? kernels.backward(p, threads) : kernels.forward(forward, threads);
      return cpu_time() - start;
    };
    const double one = call({1, nullptr}), all = call(runtime);
    const double serial = all - parallel_cpu;
    if (round < 0) continue;
    ones.push_back(one);
    together.push_back(two_threads_time), alone.push_back(serial);
  }
  double seconds = middle_of(together) + middle_of(alone);
  size_t most_tasks = 0;
  for (const Phase& each : phases) {
    seconds += each.time();
    most_tasks = std::max(most_tasks, each.seconds.size());
  }
  std::printf("%.9g %.9g %.9g %zu %zu %zu\n", seconds, middle_of(alone), middle_of(ones), phases.size(), most_tasks,
              most_scratch.load());
  std::fflush(stdout);
}

}  // namespace
}  // namespace attnkern::cpu

int main() {
  // What the C library comes to by itself once a process has given large tensors back: their memory stays.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
  const char* error;
  const attnkern::cpu::Kernels* kernels = attnkern::cpu::select_kernels(&error);
  if (kernels == nullptr) return std::fprintf(stderr, "%s\n", error), 1;
  std::string line;
  while (std::getline(std::cin, line)) {
    attnkern::cpu::Problem of;
    std::istringstream words(line);
    if (!(words >> of.pass >> of.dtype >> of.batch >> of.heads_q >> of.heads_k >> of.seqlen_q >> of.seqlen_k >>
          of.head_dim >> of.mask >> of.threads >> of.rounds))
      return std::fprintf(stderr, "no problem: %s\n", line.c_str()), 1;
    attnkern::cpu::run(of, *kernels);
  }
}
