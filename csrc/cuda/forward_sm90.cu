// Which problems Hopper's forward kernels take, how they are cut, and the kernels: of each class of head sizes the one
// with its own schedule.
#include "cuda/forward_sm90.cuh"

namespace attnkern::cuda {
namespace {

const char* why_not(const Forward& p, const Chip& chip) {
  if (const char* refusal = why_not_sm90(p, chip, kNoSm90)) return refusal;
  if (p.pages.table != nullptr) return "keys and values lie in pages";
  if (const char* refusal = unfit_input(p)) return refusal;
  if (!fits_tensor_map(p.out, p.seqlen_q, p.head_dim_v, 2)) return "the strides of out aren't multiples of 16 bytes";
  return nullptr;
}

// Whether a third warpgroup pays, which fills the times when the others wait, and makes tiles longer: as an H200 has
// measured it. Registers allow it up to a head size of 64, without features.
bool pays_third(const Forward& p) {
  if (std::max(p.head_dim, p.head_dim_v) > 64 || !is_fast_path(p) || p.band.left < kUnbounded) return false;
  return std::min(p.seqlen_q, p.seqlen_k) >= (p.band.right < kUnbounded ? 4096 : 512);
}

}  // namespace

ForwardSm90Plan plan_forward_sm90(const Forward& p, const Chip& chip) {
  ForwardSm90Plan plan{};
  plan.refusal = why_not(p, chip);
  if (plan.refusal != nullptr) return plan;
  by_tile(p.head_dim, p.head_dim_v, pays_third(p), 0,
          [&]<int kD, int kDV, int kCount>(ForwardSm90Tile<kD, kDV, kCount> tile) {
            plan.head_dim = kD, plan.head_dim_v = kDV;
            plan.rows = tile.kRows, plan.keys = tile.kKeys, plan.stages = tile.kStages, plan.threads = tile.kThreads;
            plan.shared_bytes = is_fast_path(p) ? tile.template kSharedBytes<true> : tile.template kSharedBytes<false>;
            plan.schedule = tile.kSchedule;
            return 0;
          });
  plan.fast_path = is_fast_path(p);
  plan.tiles = ceil_div(p.seqlen_q, plan.rows) * p.batch * p.heads_q;
  if (plan.tiles > INT32_MAX / 2) {
    plan.refusal = "there are more than 2^30 tiles of queries";
    return plan;
  }
  plan.blocks = std::min<int64_t>(plan.tiles, chip.multiprocessors);
  plan.order = tile_order(p, plan.rows, chip.multiprocessors);
  plan.counters = plan.order.unequal && plan.tiles > plan.blocks;
  return plan;
}

int forward_sm90(const Forward& p, const ForwardSm90Plan& plan, int32_t* taken, void* stream) {
  if (plan.refusal != nullptr) return cudaErrorInvalidValue;
#ifdef ATTNKERN_NO_SM90
  return cudaErrorNoKernelImageForDevice;
#else
  return by_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kNone = cudaErrorInvalidValue;
    const auto launch = [&]<int kD, int kDV, int kCount>(ForwardSm90Tile<kD, kDV, kCount> tile) {
      if (plan.fast_path) return launch_forward_sm90<T, kD, kDV, kCount, true, tile.kSchedule>(p, plan, taken, stream);
      if constexpr (kCount == 2)
        return launch_forward_sm90<T, kD, kDV, 2, false, tile.kSchedule>(p, plan, taken, stream);
      return kNone;
    };
    return by_tile(p.head_dim, p.head_dim_v, has_third(plan), kNone, launch);
  });
#endif
}

}  // namespace attnkern::cuda
