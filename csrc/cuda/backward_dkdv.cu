// dK and dV by blocks of keys. backward.cu says what is computed, backward_tile.cuh how.
#include "cuda/backward_tile.cuh"

namespace attnkern::cuda {
namespace {

// At least one block per multiprocessor: without a number ptxas may spill to make room for two.
template <typename T, int kHeadDim, bool kFastPath, class S>
__global__ void __launch_bounds__(S::kThreads, 1) dkdv_kernel(const __grid_constant__ BackwardArgs p) {
  backward_block<T, kHeadDim, true, kFastPath, S>(p);
}

// Head size, fast path, wide: rows, columns, row tiles of a warp, warps of a row group, stages.
constexpr ShapeRow kShapes[] = {
    {32, true, false, 128, 64, 2, 1, 2},   {64, true, false, 128, 32, 2, 1, 2},  {96, true, false, 128, 32, 2, 2, 2},
    {128, true, true, 128, 64, 2, 2, 2},   {128, true, false, 128, 32, 1, 1, 2}, {192, true, true, 64, 64, 1, 2, 2},
    {192, true, false, 64, 32, 1, 2, 1},   {256, true, true, 64, 32, 1, 2, 2},   {256, true, false, 32, 32, 1, 2, 1},
    {32, false, false, 128, 32, 2, 1, 2},  {64, false, false, 128, 32, 1, 1, 2}, {96, false, false, 128, 32, 2, 2, 2},
    {128, false, false, 128, 32, 1, 1, 2}, {192, false, false, 64, 32, 1, 2, 1}, {256, false, false, 32, 32, 1, 2, 1},
};

}  // namespace

BackwardLaunch plan_dkdv(const BackwardPlan& plan, int64_t rows, int64_t heads) {
  return plan_by_shape<kShapes, true>(plan, rows, heads);
}

int launch_dkdv(DType dtype, const BackwardPlan& plan, const BackwardArgs& args, void* stream) {
  return by_element(dtype, [&](auto element) {
    return by_shape<kShapes>(plan, [&](auto width, auto fast_path, auto, auto shape) {
      return launch_kernel(dkdv_kernel<decltype(element), width, fast_path, decltype(shape)>, plan.dkdv.blocks,
                           plan.dkdv.threads, plan.dkdv.shared_bytes, args, stream);
    });
  });
}

}  // namespace attnkern::cuda
