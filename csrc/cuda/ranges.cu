// The summary of key ranges that tiles of keys look for their queries in (visits.cuh): for every 16 queries, and for
// every group of 512, the first and the last key of their first ranges, and of their second. O(L) numbers, made once
// for a backward pass.
#include "cuda/launch.cuh"
#include "cuda/visits.cuh"

namespace attnkern::cuda {
namespace {

constexpr int kThreads = 128;

struct SummaryArgs {
  Score score;
  int4* summary;
  int32_t batch, heads;  // for which the ranges differ
  int32_t groups;        // of a head
};

// A warp per group, a lane per granule. A row's empty range counts for nothing.
__global__ void __launch_bounds__(kThreads) summarise_ranges_kernel(const __grid_constant__ SummaryArgs p) {
  const int64_t number = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, group = static_cast<int>(number % p.groups);
  const int64_t batch_head = number / p.groups;
  const int head = static_cast<int>(batch_head % p.heads), batch = static_cast<int>(batch_head / p.heads);
  if (batch >= p.batch) return;
  const int32_t* ranges = ranges_of(p.score, batch, head);
  const int first = group * kSummaryRows + lane * kGranule;
  int begin[2] = {INT32_MAX, INT32_MAX}, end[2] = {0, 0};
#pragma unroll 1
  for (int query = first; query < first + kGranule; ++query) {
    const OwnKeys own = own_keys(p.score, ranges, query);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      if (own.begin[which] >= own.end[which]) continue;
      begin[which] = min(begin[which], own.begin[which]), end[which] = max(end[which], own.end[which]);
    }
  }
  int4* target = p.summary + number * kSummarySize;
  target[1 + lane] = make_int4(begin[0], end[0], begin[1], end[1]);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    begin[which] = __reduce_min_sync(0xffffffffu, begin[which]),
    end[which] = __reduce_max_sync(0xffffffffu, end[which]);
  }
  if (lane == 0) *target = make_int4(begin[0], end[0], begin[1], end[1]);
}

}  // namespace

int64_t summary_size(const Attention& p) {
  return p.ranges.data == nullptr ? 0 : p.ranges.batch * p.ranges.heads * summary_groups(p) * kSummarySize * 4;
}

int summarise_ranges(const Attention& p, int32_t* summary, void* stream) {
  if (summary_size(p) == 0) return cudaSuccess;
  SummaryArgs a{score_of(p, false), reinterpret_cast<int4*>(summary), static_cast<int32_t>(p.ranges.batch),
                static_cast<int32_t>(p.ranges.heads), static_cast<int32_t>(summary_groups(p))};
  const int64_t warps = p.ranges.batch * p.ranges.heads * summary_groups(p);
  return launch_kernel(summarise_ranges_kernel, ceil_div(warps, kThreads / 32), kThreads, 0, a, stream);
}

}  // namespace attnkern::cuda
