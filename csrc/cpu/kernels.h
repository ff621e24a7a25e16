// The table of CPU kernels. Each instruction set fills one (isa/table.cpp); dispatch.cpp picks one by cpuid.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../common/params.h"

namespace attnkern::cpu {

// How a kernel runs in parallel and where it gets memory: given by the caller, so that kernels know nothing of torch.
struct Runtime {
  int64_t num_threads;
  // Calls work(context, worker) for worker = 0 .. workers - 1, possibly at the same time.
  void (*parallel)(int64_t workers, void (*work)(void* context, int64_t worker), void* context);
};

struct Kernels {
  const char* name;
  void (*forward)(const Forward&, const Runtime&);
  void (*backward)(const Backward&, const Runtime&);
  // Runs the dtype's multiply-adds on registers alone and returns their FLOPs: the roof that benchmarks compare with.
  double (*peak_work)(DType, int64_t iterations);
};

// Weak: a build may leave some out (ATTNKERN_CPU_ISAS in setup.py), and their addresses are then null.
namespace generic {
[[gnu::weak]] extern const Kernels kernels;
}
namespace avx2 {
[[gnu::weak]] extern const Kernels kernels;
}
namespace avx512 {
[[gnu::weak]] extern const Kernels kernels;
}
namespace zen5 {  // comes with avx512: the instructions of avx512bf16, as AMD's Zen 5 is fastest with them
[[gnu::weak]] extern const Kernels kernels;
}
namespace avx512bf16 {  // comes with avx512
[[gnu::weak]] extern const Kernels kernels;
}
namespace amx {  // comes with avx512
[[gnu::weak]] extern const Kernels kernels;
}
namespace neon {
[[gnu::weak]] extern const Kernels kernels;
}

// The kernels for this machine, or those that ATTNKERN_CPU_ISA names. On a name that is unknown or that this machine
// cannot run: returns null and sets *error (static storage).
const Kernels* select_kernels(const char** error);

// A thread's own scratch memory, 64-byte aligned, kept between calls.
void* thread_scratch(std::size_t bytes);

// How far tasks have come, for others that follow them. In a cache line of its own.
struct alignas(64) Progress {
  std::atomic<int32_t> reached{0};
};
// Waits until another thread has announced `least` or more. What it has written before is then seen here. (Out of line:
// bench/cores.cpp has its own.)
void wait_until(Progress& progress, int64_t least);
void announce(Progress& progress, int64_t reached);

// Throws an error that says how much scratch memory there is no room for; out of line, so that no kernel unit holds
// code of the standard library.
[[noreturn]] void out_of_memory(int64_t bytes);

}  // namespace attnkern::cpu
