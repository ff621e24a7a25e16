// Every schedule of Hopper's forward kernels but their own, to be timed against it and tested: left out of the library
// unless ATTNKERN_SCHEDULES=all (setup.py).
#include "cuda/forward_sm90.cuh"

namespace attnkern::cuda {

int forward_schedules_sm90(const Forward& p, const ForwardSm90Plan& plan, int32_t* taken, void* stream) {
  if (plan.refusal != nullptr || !plan.fast_path) return cudaErrorInvalidValue;
#ifdef ATTNKERN_NO_SM90
  return cudaErrorNoKernelImageForDevice;
#else
  return by_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kNone = cudaErrorInvalidValue;
    const auto launch = [&]<int kD, int kDV, int kCount>(ForwardSm90Tile<kD, kDV, kCount> tile) {
      const auto by = [&]<Schedule kSchedule>() {
        if constexpr (kSchedule == tile.kSchedule) {
          return kNone;  // forward_sm90's
        } else {
          return launch_forward_sm90<T, kD, kDV, kCount, true, kSchedule>(p, plan, taken, stream);
        }
      };
      switch (plan.schedule) {
        case Schedule::kSerial: return by.template operator()<Schedule::kSerial>();
        case Schedule::kOverlap: return by.template operator()<Schedule::kOverlap>();
        case Schedule::kPingPong: return by.template operator()<Schedule::kPingPong>();
      }
      return kNone;
    };
    return by_tile(p.head_dim, p.head_dim_v, has_third(plan), kNone, launch);
  });
#endif
}

}  // namespace attnkern::cuda
