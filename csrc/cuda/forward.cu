// The forward pass: how a problem is cut, which kernel it gets, and the kernels for 16-bit elements and head sizes up
// to 256. forward_tile.cuh says how they compute.
#include "cuda/forward_tile.cuh"
#include "cuda/forward_wide.cuh"

namespace attnkern::cuda {
namespace {

template <typename T, int kHeadDim, bool kFastPath, bool kPages>
__global__ void __launch_bounds__(kForwardThreads)
    forward_kernel(const __grid_constant__ ParamsOf<ForwardParams, kPages> p) {
  forward_block<T, kHeadDim, kFastPath, kPages>(p);
}

}  // namespace

ForwardPlan plan_forward(const Attention& p) {
  ForwardPlan plan{};
  plan.head_class = head_class(p.head_dim, p.head_dim_v);
  // Rows of unequal length are dealt out longest first, over all heads. Of equal length: those of one head side by
  // side, which read the same keys.
  plan.heads_first = p.band.right < kUnbounded;
  if (plan.head_class == 0 && std::max(p.head_dim, p.head_dim_v) <= kWideHead) {
    const WideTile tile = wide_tile(p.dtype);
    plan.head_class = kWideHead;
    plan.rows = tile.rows, plan.keys = tile.keys, plan.threads = tile.threads, plan.shared_bytes = tile.shared_bytes;
  } else {
    const bool is_float = p.dtype == DType::kFloat32;
    plan.fast_path = !is_float && is_fast_path(p) && p.pages.table == nullptr && rows_of(p.q, p.head_dim).vector &&
                     rows_of(p.k, p.head_dim).vector && rows_of(p.v, p.head_dim_v).vector;
    by_head_class(plan.head_class, [&](auto width) {
      const auto fill = [&](auto tile) {
        plan.rows = tile.kRows, plan.keys = tile.kKeys, plan.shared_bytes = tile.kSharedBytes;
        return 0;
      };
      using T = __half;  // as of bfloat16
      if (is_float) return fill(ForwardTile<float, width, false>{});
      return plan.fast_path ? fill(ForwardTile<T, width, true>{}) : fill(ForwardTile<T, width, false>{});
    });
    plan.threads = kForwardThreads;
  }
  plan.blocks = plan.rows == 0 ? 0 : ceil_div(p.seqlen_q, plan.rows) * p.batch * p.heads_q;
  return plan;
}

int forward(const Forward& p, void* stream) {
  const ForwardPlan plan = plan_forward(p);
  if (plan.head_class == kWideHead) {
    SplitParams params{forward_params(p, plan)};
    params.pack = params.splits = 1;
    return launch_wide(p, params, stream);
  }
  if (p.dtype == DType::kFloat32) return forward_fp32(p, plan, stream);
  return by_element(p.dtype, [&](auto element) {
    using T = decltype(element);
    return by_head_class(plan.head_class, [&](auto width) {
      const auto launch = [&](auto kernel, const auto& params) {
        return launch_kernel(kernel, plan.blocks, plan.threads, plan.shared_bytes, params, stream);
      };
      const ForwardParams params = forward_params(p, plan);
      if (plan.fast_path) return launch(forward_kernel<T, width, true, false>, params);
      return by_pages(params, p.pages, [&](const auto& given, auto in_pages) {
        return launch(forward_kernel<T, width, false, in_pages>, given);
      });
    });
  });
}

}  // namespace attnkern::cuda
