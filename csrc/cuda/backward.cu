// The backward pass, without atomics and so the same in every run: dK and dV by blocks of keys, dQ (and the gradient of
// a bias that has an entry per score) by blocks of queries, the gradient of a broadcast bias by its own tiles. Each
// makes the probabilities again from the saved log-sum-exp.
//
//   P = exp(S - lse)    dV = P^T dO    dS = P (dO V^T - delta)    dQ = scale dS K    dK = scale dS^T Q    dbias = dS
//
// Tri Dao: "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, section 3.1.2. The
// two loops over the scores cost seven products where one loop with atomic additions to dQ would cost five.
#include "cuda/backward_tile.cuh"

namespace attnkern::cuda {
namespace {

bool is_full_size(const Backward& p) {
  return !p.relative && p.bias_size[0] == p.batch && p.bias_size[1] == p.heads_q && p.bias_size[2] == p.seqlen_q &&
         p.bias_size[3] == p.seqlen_k;
}

BackwardArgs arguments(const BackwardCall& p, const BackwardPlan& plan) {
  BackwardArgs a{};
  a.score = score_of_backward(p, plan.fast_path);
  const auto rows = [&](const View& view, int64_t width) {
    return rows_of(view, width, p.dtype == DType::kFloat32 ? 4 : 2);
  };
  a.q = rows(p.q, p.head_dim), a.k = rows(p.k, p.head_dim), a.v = rows(p.v, p.head_dim_v);
  a.grad_out = rows(p.grad_out, p.head_dim_v);
  a.dq = rows(p.dq, p.head_dim), a.dk = rows(p.dk, p.head_dim), a.dv = rows(p.dv, p.head_dim_v);
  a.lse = static_cast<const float*>(p.lse);
  a.delta = p.row_delta;
  a.dbias = p.dbias.data;
  for (int n = 0; n < 4; ++n) a.dbias_size[n] = static_cast<int32_t>(p.bias_size[n]);
  a.table = {p.table_sums, plan.table.first, plan.table.bands, plan.table.walks};
  a.dbias_stride[0] = p.bias_size[1] * p.bias_size[2] * p.bias_size[3];
  a.dbias_stride[1] = p.bias_size[2] * p.bias_size[3];
  a.dbias_stride[2] = p.bias_size[3];
  a.softmax_scale = static_cast<float>(p.softmax_scale);
  a.batch = static_cast<int32_t>(p.batch);
  a.heads_out = static_cast<int32_t>(p.heads_out);
  a.group_k = static_cast<int32_t>(p.heads_q / p.heads_k), a.group_v = static_cast<int32_t>(p.heads_q / p.heads_v);
  a.kv_group = static_cast<int32_t>(p.heads_q / p.heads_out);
  a.dk_float = p.heads_out > p.heads_k, a.dv_float = p.heads_out > p.heads_v;
  a.again = plan.again;
  a.nan_marks = p.nan_marks;
  return a;
}

// The plan where tiles hold whole rows.
void plan_tiles(const BackwardCall& p, int shared_limit, bool bias_by_rows, BackwardPlan& plan) {
  plan.head_class = head_class(p.head_dim, p.head_dim_v);
  const auto vector = [](const View& view, int64_t width) { return rows_of(view, width).vector; };
  // Again: by the generic kernels alone, so that the others needn't look.
  plan.fast_path = !plan.again && is_fast_path(p) && p.heads_out == p.heads_k && p.heads_out == p.heads_v &&
                   vector(p.q, p.head_dim) && vector(p.k, p.head_dim) && vector(p.v, p.head_dim_v) &&
                   vector(p.grad_out, p.head_dim_v) && vector(p.dq, p.head_dim) && vector(p.dk, p.head_dim) &&
                   vector(p.dv, p.head_dim_v);
  plan.wide = plan.fast_path && plan.head_class >= 128 && shared_limit >= kWideShared;
  if (p.dk.data != nullptr || p.dv.data != nullptr) plan.dkdv = plan_dkdv(plan, p.seqlen_k, p.batch * p.heads_out);
  if (p.dq.data != nullptr || bias_by_rows) plan.dq = plan_dq(plan, p.seqlen_q, p.batch * p.heads_q);
}

}  // namespace

BackwardPlan plan_backward(const BackwardCall& p, int shared_limit, bool again) {
  BackwardPlan plan{};
  plan.again = again;
  if (p.batch * p.heads_q == 0) return plan;
  const bool bias_by_rows = p.dbias.data != nullptr && is_full_size(p);
  if (p.dtype == DType::kFloat32 || std::max(p.head_dim, p.head_dim_v) > kMostHead) {
    plan_chunked(p, shared_limit, bias_by_rows, plan);
  } else {
    plan_tiles(p, shared_limit, bias_by_rows, plan);
  }
  if (plan.head_class == 0) return plan;
  if (p.dbias.data != nullptr && !bias_by_rows) plan_bias_gradient(p, plan);
  return plan;
}

int backward(const BackwardCall& p, const BackwardPlan& plan, void* stream) {
  if (p.batch * p.heads_q == 0) return cudaSuccess;
  if (plan.head_class == 0) return cudaErrorInvalidValue;
  BackwardArgs args = arguments(p, plan);
  if (plan.dbias.threads > 0) {
    if (const int error = launch_bias_gradient(p, plan, args, stream); error != cudaSuccess) return error;
    args.dbias = nullptr;  // not dq_kernel's business
  }
  if (plan.chunked) return backward_chunked(p, plan, args, stream);
  if (const int error = launch_dkdv(p.dtype, plan, args, stream); error != cudaSuccess) return error;
  return launch_dq(p.dtype, plan, args, stream);
}

}  // namespace attnkern::cuda
