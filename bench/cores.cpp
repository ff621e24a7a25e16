// What a call would take on many cores, from its tasks' times on one. The kernels run as they are, cut for any number
// of threads, but task by task: each worker's share at first, one task after the other, as its core would meet them;
// then the times are replayed through the queue itself, by workers that each have a clock. Whoever's clock is behind
// takes the next task. Parts of a call that one thread runs are timed as they are.
//
// A line on stdin is a problem, `pass dtype batch heads_q heads_k seqlen_q seqlen_k head_dim mask threads rounds`:
// forward or backward; float32 or bfloat16; all, causal, packed (causal sequences side by side) or prefix (ranges: the
// first quarter of the keys, and those before). A line on stdout is `seconds alone phases tasks scratch` of it: what
// the call takes, what one thread takes of that alone, how often threads start, tasks of the longest phase, bytes that
// each thread keeps. With 1 thread it is a plain call; with -2 one by two real threads. Times are medians of CPU time.
#include <malloc.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cpu/tasks.h"

// The linker gives the kernels' calls of thread_scratch() to this one (--wrap, in setup.py), which notes what they ask.
std::atomic<std::size_t> most_scratch{0};
extern "C" void* __real__ZN8attnkern3cpu14thread_scratchEm(std::size_t bytes);
extern "C" void* __wrap__ZN8attnkern3cpu14thread_scratchEm(std::size_t bytes) {
  for (std::size_t known = most_scratch; known < bytes && !most_scratch.compare_exchange_weak(known, bytes);) {
  }
  return __real__ZN8attnkern3cpu14thread_scratchEm(bytes);
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
      : clocks(static_cast<size_t>(workers)), contexts_(clocks.size()), done_(clocks.size()), stacks_(clocks.size()) {}

  // Runs work(worker) for all; each must call wait() before it looks at what others change. The latest clock.
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
        if (!done_[w] && (running_ == clocks.size() || clocks[w] < clocks[running_])) running_ = w;
      swapcontext(&home_, &contexts_[running_]);
      left -= done_[running_] ? 1 : 0;
    }
    return *std::max_element(clocks.begin(), clocks.end());
  }
  void wait() { swapcontext(&contexts_[running_], &home_); }

  std::vector<double> clocks;

 private:
  static constexpr size_t kStack = 1 << 16;
  static Replay* current;
  static void enter() {
    Replay& own = *current;
    own.work_(own.given_, static_cast<int64_t>(own.running_));
    own.done_[own.running_] = true;
  }

  std::vector<ucontext_t> contexts_;
  std::vector<bool> done_;
  std::vector<std::unique_ptr<char[]>> stacks_;
  ucontext_t home_;
  size_t running_ = 0;
  void (*work_)(void*, int64_t) = nullptr;
  void* given_ = nullptr;
};
Replay* Replay::current = nullptr;

double parallel_cpu = 0, parallel_time = 0;  // of the call: on this core, and with the threads asked for
int64_t phases = 0, most_tasks = 0;

// Takes the place of the threads.
struct TaskByTask {
  static void parallel(int64_t workers, void (*work)(void*, int64_t), void* context) {
    const double start = cpu_time();
    run(workers, work, context);
    ++phases;
    parallel_cpu += cpu_time() - start;
  }

 private:
  static void run(int64_t workers, void (*work)(void*, int64_t), void* context) {
    TaskQueue& queue = *static_cast<TaskQueue*>(context);
    TaskQueue::Share* const shares = queue.share_.data();
    const int64_t count = queue.shares_, tasks = shares[count - 1].end;
    const std::vector<TaskQueue::Share> given(shares, shares + count);
    queue.shares_ = 1;  // one of a single task
    std::vector<double> seconds(static_cast<size_t>(tasks));
    // One queue for all: every worker in its turn.
    for (int64_t worker = 0; worker < workers; ++worker) {
      const bool own = count == workers;
      const int64_t first = own ? given[static_cast<size_t>(worker)].next : worker;
      const int64_t end = own ? given[static_cast<size_t>(worker)].end : tasks, step = own ? 1 : workers;
      double before = cpu_time();
      queue.goes_on_ = false;
      for (int64_t task = first; task < end; task += step) {
        shares[0] = {task, task + 1};
        work(context, worker);
        queue.goes_on_ = true;
        const double now = cpu_time();
        seconds[static_cast<size_t>(task)] = now - before;
        before = now;
      }
    }
    const TaskQueue again(tasks, workers, count == 1);
    Replay replay(workers);
    parallel_time += replay.run([&](int64_t worker) {
      const auto take = [&](int64_t task) {
        replay.clocks[static_cast<size_t>(worker)] += seconds[static_cast<size_t>(task)];
        replay.wait();
      };
      again.work(worker, [] {}, take);
    });
    most_tasks = std::max(most_tasks, tasks);
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
  parallel_time += (seconds[0] + seconds[1]) / 2;
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
  std::vector<double> seconds, alone;
  most_scratch = 0;
  for (int64_t round = -1; round < of.rounds; ++round) {  // the first one warms up
    // As torch gives them: what is written first is memory that no one has touched, or that has just been freed.
    const Tensor dq = tensor(of.pass == "backward" ? of.heads_q : 0, of.seqlen_q),
                 dk = tensor(of.pass == "backward" ? of.heads_k : 0, of.seqlen_k),
                 dv = tensor(of.pass == "backward" ? of.heads_k : 0, of.seqlen_k);
    p.grad_out = out.view, p.dq = dq.view, p.dk = dk.view, p.dv = dv.view;
    parallel_cpu = parallel_time = 0, phases = most_tasks = 0;
    const double start = cpu_time();
    of.pass == "backward" ? kernels.backward(p, runtime) : kernels.forward(forward, runtime);
    const double serial = cpu_time() - start - parallel_cpu;
    if (round < 0) continue;
    seconds.push_back(serial + parallel_time), alone.push_back(serial);
  }
  const auto middle = [](std::vector<double>& x) {
    std::nth_element(x.begin(), x.begin() + static_cast<int64_t>(x.size() / 2), x.end());
    return x[x.size() / 2];
  };
  std::printf("%.9g %.9g %lld %lld %zu\n", middle(seconds), middle(alone), static_cast<long long>(phases),
              static_cast<long long>(most_tasks), most_scratch.load());
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
