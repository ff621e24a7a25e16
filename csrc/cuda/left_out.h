// Kernels that the user has left out (ATTNKERN_DISABLE, read by attnkern/backends/disabled.py). Plans look here, and
// everything else follows plans.
#pragma once

#include <cstdint>

namespace attnkern::cuda {

enum LeftOut : int64_t { kNoDecode = 1, kNoSm90 = 2, kNoSm90Backward = 4, kNoSm90Fused = 8 };

// Set once, before the first plan is made.
inline int64_t left_out = 0;

inline constexpr const char* kLeftOut = "ATTNKERN_DISABLE leaves it out";

}  // namespace attnkern::cuda
