// The forward pass for float32 and head sizes up to 256. forward_tile.cuh says how it computes.
#include "cuda/forward_tile.cuh"

namespace attnkern::cuda {
namespace {

template <int kHeadDim, bool kPages>
__global__ void __launch_bounds__(kForwardThreads, 2)
    forward_fp32_kernel(const __grid_constant__ ParamsOf<ForwardParams, kPages> p) {
  forward_block<float, kHeadDim, false, kPages>(p);
}

}  // namespace

int forward_fp32(const Forward& p, const ForwardPlan& plan, void* stream) {
  return by_head_class(plan.head_class, [&](auto width) {
    return by_pages(forward_params(p, plan), p.pages, [&](const auto& params, auto in_pages) {
      return launch_kernel(forward_fp32_kernel<width, in_pages>, plan.blocks, plan.threads, plan.shared_bytes, params,
                           stream);
    });
  });
}

}  // namespace attnkern::cuda
