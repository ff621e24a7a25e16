// What the order of a device's backends depends on (attnkern/backends/choice.py), of a forward problem.
#pragma once

#include "cuda/launch.h"

namespace attnkern::cuda {

enum class Kind : int {
  kFastPath,  // kernels without a feature or unaligned rows, or Hopper's without softcap
  kGeneric,
  kDecode,  // few queries of many keys
};
constexpr const char* kKinds[] = {"fast path", "generic", "decode"};

inline Kind kind_of(const Forward& p, const DecodePlan& decoding, const ForwardSm90Plan& hopper) {
  if (decoding.splits > 0) return Kind::kDecode;
  const bool fast = hopper.refusal == nullptr ? hopper.fast_path || p.softcap == 0 : plan_forward(p).fast_path;
  return fast ? Kind::kFastPath : Kind::kGeneric;
}

}  // namespace attnkern::cuda
