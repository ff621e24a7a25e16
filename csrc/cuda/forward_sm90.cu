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

}  // namespace

ForwardSm90Plan plan_forward_sm90(const Forward& p, const Chip& chip) {
  ForwardSm90Plan plan{};
  plan.refusal = why_not(p, chip);
  if (plan.refusal != nullptr) return plan;
  by_tile(p.head_dim, p.head_dim_v, 0, [&]<int kHeadDim, int kHeadDimV>(ForwardSm90Tile<kHeadDim, kHeadDimV> tile) {
    plan.head_dim = kHeadDim, plan.head_dim_v = kHeadDimV;
    plan.keys = tile.kKeys, plan.stages = tile.kStages;
    plan.shared_bytes = is_fast_path(p) ? tile.template kSharedBytes<true> : tile.template kSharedBytes<false>;
    plan.schedule = tile.kSchedule;
    return 0;
  });
  plan.rows = kRows;
  plan.threads = kThreads;
  plan.tiles = ceil_div(p.seqlen_q, kRows) * p.batch * p.heads_q;
  if (plan.tiles > INT32_MAX / 2) {
    plan.refusal = "there are more than 2^30 tiles of 128 queries";
    return plan;
  }
  plan.blocks = std::min<int64_t>(plan.tiles, chip.multiprocessors);
  plan.fast_path = is_fast_path(p);
  plan.order = tile_order(p, kRows, chip.multiprocessors);
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
    return by_tile(p.head_dim, p.head_dim_v, kNone, [&]<int kD, int kDV>(ForwardSm90Tile<kD, kDV> tile) {
      return plan.fast_path ? launch_forward_sm90<T, kD, kDV, true, tile.kSchedule>(p, plan, taken, stream)
                            : launch_forward_sm90<T, kD, kDV, false, tile.kSchedule>(p, plan, taken, stream);
    });
  });
#endif
}

}  // namespace attnkern::cuda
