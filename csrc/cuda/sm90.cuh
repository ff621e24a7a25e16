// What Hopper's forward and backward kernels have in common: a block of threads is a producer warpgroup and two
// consumers; and what neither pass takes.
#pragma once

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/left_out.h"
#include "cuda/score.cuh"
#include "cuda/tensor_map.h"

namespace attnkern::cuda {

inline constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = kWarpgroup * (1 + kConsumers);
inline constexpr int kGroupRows = 64;  // of a consumer: the m of wgmma
inline constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

// What the producer tells the consumers of a block of columns, in a word of shared memory, beside the block itself.
struct BlockInfo {
  int first;  // column, a multiple of 16
  bool masked, last;
  bool hides;  // whether there may be a column that no row reaches

  __device__ __forceinline__ uint32_t word() const {
    return static_cast<uint32_t>(first) / 16 * 8 + hides * 4 + masked * 2 + last;
  }
  __device__ __forceinline__ static BlockInfo of(uint32_t word) {
    return {static_cast<int>(word / 8 * 16), (word & 2) != 0, (word & 1) != 0, (word & 4) != 0};
  }
};

#ifdef ATTNKERN_NO_SM90
inline constexpr const char* kNotCompiled = "the library was compiled without sm_90a";
#else
inline constexpr const char* kNotCompiled = nullptr;
#endif

// Why neither pass takes a problem, null if one may; family: of left_out.h.
inline const char* why_not_sm90(const Attention& p, const Chip& chip, int family) {
  if (kNotCompiled != nullptr) return kNotCompiled;
  if (left_out & family) return kLeftOut;
  if (chip.capability != 90) return "the device is no Hopper";
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "the dtype isn't bfloat16 or float16";
  if (const char* lacking = beyond_sm90(p)) return lacking;
  for (const int64_t size : {p.batch, p.heads_q, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v}) {
    if (size == 0) return "a size is 0";
  }
  if (std::max(p.head_dim, p.head_dim_v) > 256) return "a head size is above 256";
  return nullptr;
}

// Which input TMA can't read, null if it can read all.
inline const char* unfit_input(const Attention& p) {
  if (!fits_tensor_map(p.q, p.seqlen_q, p.head_dim, 2)) return "the strides of query aren't multiples of 16 bytes";
  if (!fits_tensor_map(p.k, p.seqlen_k, p.head_dim, 2)) return "the strides of key aren't multiples of 16 bytes";
  if (!fits_tensor_map(p.v, p.seqlen_k, p.head_dim_v, 2)) return "the strides of value aren't multiples of 16 bytes";
  return nullptr;
}

}  // namespace attnkern::cuda
