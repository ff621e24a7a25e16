// Chooses the kernels once, by cpuid or by ATTNKERN_CPU_ISA, and owns the threads' scratch memory.
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace attnkern::cpu {
namespace {

struct Candidate {
  const Kernels* kernels;  // nullptr: left out of this build
  bool supported;
};

#if defined(__x86_64__) && !defined(ATTNKERN_EMULATED)
// Linux gives a process the tiles' registers when it asks; its threads have them too.
bool may_use_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return ::syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

// Best first.
std::span<const Candidate> candidates() {
  static const Candidate table[] = {
#if defined(ATTNKERN_EMULATED)  // tests/emulated
      {&amx::kernels, true},
      {&avx512bf16::kernels, true},
      {&avx512::kernels, true},
      {&avx2::kernels, true},
#elif defined(__x86_64__)
#define ATTNKERN_HAS_AVX512                                                                                         \
  (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && \
   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
#define ATTNKERN_HAS_AVX512BF16 \
  (ATTNKERN_HAS_AVX512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi"))
// (With bfloat16's instructions only a Zen 5 has this one, which isn't used.)
#define ATTNKERN_IS_ZEN5 __builtin_cpu_supports("avx512vp2intersect")
      {&amx::kernels, ATTNKERN_HAS_AVX512BF16 && __builtin_cpu_supports("amx-tile") &&
                          __builtin_cpu_supports("amx-bf16") && may_use_tiles()},
      {&zen5::kernels, ATTNKERN_HAS_AVX512BF16 && ATTNKERN_IS_ZEN5},
      {&avx512bf16::kernels, bool(ATTNKERN_HAS_AVX512BF16)},
      {&avx512::kernels, bool(ATTNKERN_HAS_AVX512)},
      {&avx2::kernels,
       __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#elif defined(__aarch64__)
      {&neon::kernels, true},
#endif
      {&generic::kernels, true},
#if defined(__x86_64__) && !defined(ATTNKERN_EMULATED)
      {&zen5::kernels, ATTNKERN_HAS_AVX512BF16 && !ATTNKERN_IS_ZEN5},  // by name: others are faster here
#endif
  };
  return table;
}

}  // namespace

const Kernels* select_kernels(const char** error) {
  static std::string message;
  static const Kernels* const chosen = []() -> const Kernels* {
    const char* wanted = std::getenv("ATTNKERN_CPU_ISA");
    const bool any = wanted == nullptr || *wanted == '\0';
    std::string runnable;
    for (const auto& [kernels, supported] : candidates()) {
      if (kernels == nullptr || !supported) continue;
      if (any || std::strcmp(wanted, kernels->name) == 0) return kernels;
      runnable += std::string(runnable.empty() ? "" : ", ") + kernels->name;
    }
    if (runnable.empty()) {
      message =
          "this build of attnkern has kernels for another CPU alone (ATTNKERN_CPU_ISAS): build it on this machine";
    } else {
      message = std::string("ATTNKERN_CPU_ISA=") + wanted +
                " is not an instruction set that this build has and this machine runs; expected one of " + runnable +
                ", or leave it unset";
    }
    return nullptr;
  }();
  *error = message.c_str();
  return chosen;
}

void wait_until(Progress& progress, int64_t least) {
  int32_t reached;
  for (int64_t turns = 0; (reached = progress.reached.load(std::memory_order_acquire)) < least; ++turns) {
    if (turns > 1000) progress.reached.wait(reached, std::memory_order_acquire);  // its thread may need this core
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
  }
}

void announce(Progress& progress, int64_t reached) {
  progress.reached.store(static_cast<int32_t>(reached), std::memory_order_release);
  progress.reached.notify_all();
}

void out_of_memory(int64_t bytes) {
  throw std::runtime_error("attnkern: can't allocate memory: you tried to allocate " + std::to_string(bytes) +
                           " bytes of scratch memory");
}

void* thread_scratch(std::size_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local std::size_t size = 0;
  if (bytes > size) {
    const std::size_t rounded = (bytes + 4095) / 4096 * 4096;
    memory.reset();
    size = 0;
    memory.reset(std::aligned_alloc(64, rounded));
    if (memory == nullptr) out_of_memory(static_cast<int64_t>(rounded));
    size = rounded;
  }
#if defined(__SANITIZE_ADDRESS__)
  // NaN: what a kernel reads without having written it is to be seen.
  if (bytes > 0) std::memset(memory.get(), 0xff, bytes);
#endif
  return memory.get();
}

}  // namespace attnkern::cpu
