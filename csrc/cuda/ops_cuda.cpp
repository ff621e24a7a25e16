// The operators on CUDA tensors, one for each pass: described, allocated and launched here. The schemas are in
// attnkern/signatures.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cuda/operators.h"

namespace {

using attnkern::AttentionParams, attnkern::Dispatcher, attnkern::DType, attnkern::OptionalTensor, attnkern::View;
using attnkern::cuda::Device, attnkern::cuda::data_of, attnkern::cuda::dense_sinks, attnkern::cuda::fill_inputs,
    attnkern::cuda::floats;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Inputs = attnkern::Inputs<Tensor>;

// x itself if the columns of its rows lie side by side, else a copy.
Tensor dense_rows(const Tensor& x) {
  const bool dense = x.dim() == 4 && (x.stride(3) == 1 || x.size(3) <= 1);
  return dense ? x : torch::stable::contiguous(x);
}

// out and lse; lse has shape (0,) unless need_lse. splits and schedule: cuda/operators.h's Instead.
std::tuple<Tensor, Tensor> forward(Tensor q ATTNKERN_TENSORS_AFTER_Q(ATTNKERN_AS_ARGUMENT)
                                       ATTNKERN_PARAMS(ATTNKERN_AS_ARGUMENT),
                                   bool need_lse, bool tf32, std::optional<int64_t> splits,
                                   std::optional<int64_t> schedule) {
  return attnkern::cuda::forward<Dispatcher>(Inputs{ATTNKERN_TENSORS(ATTNKERN_AS_VALUE)},
                                             {ATTNKERN_PARAMS(ATTNKERN_AS_VALUE)}, need_lse, tf32,
                                             [](const auto&...) {}, {splits, schedule});
}

// What the kernels write of dk or dv: itself, or float32 of the kernels' more heads, to be added up.
std::optional<Tensor> parts_of(const attnkern::cuda::BackwardCall& p, const Tensor& grad, View& view) {
  if (view.data == nullptr || grad.size(1) == p.heads_out) return {};
  Tensor parts =
      attnkern::empty<Dispatcher, 4>(grad, {grad.size(0), p.heads_out, grad.size(2), grad.size(3)}, ScalarType::Float);
  view = attnkern::output_view(parts);
  return parts;
}

void add_up(const std::optional<Tensor>& parts, Tensor& grad) {
  if (!parts) return;
  const int64_t heads = grad.size(1), group = parts->size(1) / heads;
  const Tensor grouped = torch::stable::view(*parts, {grad.size(0), heads, group, grad.size(2), grad.size(3)});
  const int64_t over[] = {2};
  torch::stable::copy_(grad, torch::stable::sum(grouped, torch::headeronly::IntHeaderOnlyArrayRef(over, 1)));
}

// Adds up what batch elements that share their sinks have made of the sinks' gradient.
void add_up_batch(const Tensor& parts, Tensor& grad) {
  const int64_t over[] = {0};
  const Tensor sum = torch::stable::sum(parts, torch::headeronly::IntHeaderOnlyArrayRef(over, 1));
  torch::stable::copy_(grad, torch::stable::view(sum, {1, grad.size(1)}));
}

// dq, dk, dv, dbias, dsinks; what grad_mask does not ask for has shape (0,). deterministic: the same bits in every run.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor grad_out, OptionalTensor grad_lse ATTNKERN_TENSORS(ATTNKERN_AS_ARGUMENT), Tensor out,
    Tensor lse ATTNKERN_PARAMS(ATTNKERN_AS_ARGUMENT), int64_t grad_mask, bool tf32, bool deterministic) {
  attnkern::cuda::BackwardCall p{};
  fill_inputs(p, Inputs{ATTNKERN_TENSORS(ATTNKERN_AS_VALUE)}, {ATTNKERN_PARAMS(ATTNKERN_AS_VALUE)}, tf32);
  grad_out = dense_rows(grad_out), out = dense_rows(out), lse = attnkern::dense(lse);
  if (grad_lse) grad_lse = attnkern::dense(*grad_lse);
  attnkern::fill_backward(p, grad_out, grad_lse, q, out, lse);
  const Device device(q);
  auto [dq, dk, dv, dbias, dsinks] =
      attnkern::make_gradients<Dispatcher>(p, {ATTNKERN_TENSORS(ATTNKERN_AS_VALUE)}, grad_mask);
  const OptionalTensor all_sinks = dense_sinks<Dispatcher>(p, q, sinks);
  if (p.dsinks != nullptr && p.batch * p.seqlen_q == 0) Dispatcher::zero(dsinks);
  if (p.batch * p.heads_q * p.seqlen_q == 0) return {dq, dk, dv, dbias, dsinks};
  void* stream = device.stream();
  p.heads_out = attnkern::cuda::heads_out_of(p);
  const auto parts_k = parts_of(p, dk, p.dk), parts_v = parts_of(p, dv, p.dv);
  const Tensor delta = floats<Dispatcher>(q, p.batch * p.heads_q * p.seqlen_q);
  p.row_delta = data_of(delta);
  device.check(attnkern::cuda::delta(p, data_of(delta), stream));
  if (p.dsinks != nullptr) {
    const bool shared = p.sinks.batch < p.batch;
    const Tensor parts = shared ? attnkern::empty<Dispatcher, 2>(q, {p.batch, p.heads_q}, ScalarType::Float) : dsinks;
    device.check(attnkern::cuda::backward_sinks(p, data_of(delta), data_of(parts), stream));
    if (shared) add_up_batch(parts, dsinks);
  }
  if (attnkern::has_no_score(p)) return {dq, dk, dv, dbias, dsinks};
  const Tensor summary = attnkern::empty<Dispatcher, 1>(q, {attnkern::cuda::summary_size(p)}, ScalarType::Int);
  p.range_summary = static_cast<const int32_t*>(summary.data_ptr());
  device.check(attnkern::cuda::summarise_ranges(p, static_cast<int32_t*>(summary.data_ptr()), stream));
  const auto plan = attnkern::cuda::plan_backward_sm90(p, device.chip, deterministic);
  const Tensor sums = floats<Dispatcher>(q, plan.dq_sums);
  p.dq_sums = data_of(sums);
  const Tensor marks = attnkern::empty<Dispatcher, 1>(q, {plan.nan_marks}, ScalarType::Byte);
  if (plan.nan_marks > 0) p.nan_marks = attnkern::cuda::nan_marks_of(p, static_cast<uint8_t*>(marks.data_ptr()));
  device.launch(
      plan.refusal == nullptr, [&] { return attnkern::cuda::backward_sm90(p, plan, stream); },
      [&] {
        const auto plain = attnkern::cuda::plan_backward(p, device.chip.shared_per_block);
        const Tensor of_table = floats<Dispatcher>(q, plain.table.sums);
        p.table_sums = data_of(of_table);
        return attnkern::cuda::backward(p, plain, stream);
      });
  add_up(parts_k, dk), add_up(parts_v, dv);
  return {dq, dk, dv, dbias, dsinks};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnkern, CUDA, m) {
  m.impl("cuda_forward", TORCH_BOX(&forward));
  m.impl("cuda_backward", TORCH_BOX(&backward));
}
