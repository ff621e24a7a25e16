// The operators on CUDA tensors, one for each pass: described, allocated and launched here. Compiled by the host
// compiler against torch's stable ABI. It needs no CUDA header and no symbol of a CUDA torch, so the library loads
// beside any torch, with or without a driver. The schemas are in attnkern/signatures.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "common/operators.h"
#include "cuda/launch.h"

// Weak: only libtorch_cuda has it, and a CPU torch never gets to call it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace {

using attnkern::AttentionParams, attnkern::Dispatcher, attnkern::DType, attnkern::OptionalTensor, attnkern::View;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Inputs = attnkern::Inputs<Tensor>;

void* current_stream(int32_t device_index) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "attnkern: this torch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

// The device of a call: made current in torch and here, its limits, and torch's stream on it.
struct Device {
  torch::stable::accelerator::DeviceGuard guard;
  attnkern::cuda::Chip chip{};
  int32_t index;

  explicit Device(const Tensor& x) : guard(x.get_device_index()), index(x.get_device_index()) {
    check(attnkern::cuda::use_device(index, chip));
  }
  void* stream() const { return current_stream(index); }
  void check(int error) const { STD_TORCH_CHECK(error == 0, "attnkern: ", attnkern::cuda::error_text(error, chip)); }
  // Hopper's kernels if the plan takes them. A driver that refuses their tensor maps is no reason to fail: which maps
  // it takes isn't all written down, and the kernels for every chip need none.
  template <class Hopper, class Any>
  void launch(bool takes, Hopper hopper, Any any) const {
    int error = takes ? hopper() : any();
    if (attnkern::cuda::is_refused_map(error)) {
      warn_of_fallback(error);
      error = any();
    }
    check(error);
  }
  void warn_of_fallback(int error) const {
    static std::mutex mutex;
    static std::set<int> said;
    const std::lock_guard lock(mutex);
    if (!said.insert(error).second) return;
    const std::string text = "attnkern: " + attnkern::cuda::error_text(error, chip) +
                             "; the kernels for every chip run in place of Hopper's, which are faster (said once)";
    aoti_torch_warn(__func__, __FILE__, __LINE__, text.c_str());
  }
};

void fill_inputs(attnkern::Attention& p, const Inputs& inputs, const AttentionParams& params, bool tf32) {
  attnkern::fill(p, inputs, params);
  const auto aligned = [](uint64_t x) { return x % 8 == 0; };
  STD_TORCH_CHECK(!p.bits || (aligned(reinterpret_cast<uintptr_t>(p.bias.data)) &&
                              std::all_of(p.bias.stride, p.bias.stride + 3, aligned)),
                  "attnkern: a bias of bits must have its rows at multiples of 8 bytes");
  p.tf32 = tf32;
  STD_TORCH_CHECK(p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16 || p.dtype == DType::kFloat32,
                  "attnkern: these kernels take bfloat16, float16 and float32");
  STD_TORCH_CHECK(p.head_dim <= attnkern::kMaxHeadDim && p.head_dim_v <= attnkern::kMaxHeadDim &&
                      p.seqlen_q <= attnkern::kMaxLength && p.seqlen_k <= attnkern::kMaxLength &&
                      p.batch * p.heads_q <= attnkern::kMaxLength,
                  "attnkern: these kernels take head sizes up to ", attnkern::kMaxHeadDim,
                  ", and lengths and batch * heads up to ", attnkern::kMaxLength);
}

// The sinks of all heads and batch elements, one after the other, as kernels read them; puts them into p.
OptionalTensor dense_sinks(attnkern::Attention& p, const Tensor& q, const OptionalTensor& sinks) {
  if (!sinks) return {};
  Tensor dense = *sinks;
  if (p.sinks.batch < p.batch || !dense.is_contiguous()) {
    dense = attnkern::empty<Dispatcher, 2>(q, {p.batch, p.heads_q}, ScalarType::Float);
    torch::stable::copy_(dense, *sinks);
  }
  p.sinks.data = dense.data_ptr();
  return dense;
}

// x itself if the columns of its rows lie side by side, else a copy.
Tensor dense_rows(const Tensor& x) {
  const bool dense = x.dim() == 4 && (x.stride(3) == 1 || x.size(3) <= 1);
  return dense ? x : torch::stable::contiguous(x);
}

Tensor floats(const Tensor& like, int64_t count) {
  return attnkern::empty<Dispatcher, 1>(like, {count}, ScalarType::Float);
}
float* data_of(const Tensor& x) { return static_cast<float*>(x.data_ptr()); }

// Hopper's forward kernel by another schedule than the plan's own, where the library holds it.
int forward_by_schedule(const attnkern::Forward& p, attnkern::cuda::ForwardSm90Plan plan, int64_t schedule,
                        int32_t* taken, void* stream) {
  STD_TORCH_CHECK(plan.refusal == nullptr, "attnkern: no kernel for Hopper takes this: ", plan.refusal);
  STD_TORCH_CHECK(schedule >= 0 && schedule <= 2 && plan.fast_path,
                  "attnkern: schedule must be 0, 1 or 2, and softcap 0");
  const auto own = std::exchange(plan.schedule, static_cast<attnkern::cuda::Schedule>(schedule));
  if (plan.schedule == own) return attnkern::cuda::forward_sm90(p, plan, taken, stream);
  STD_TORCH_CHECK(attnkern::cuda::forward_schedules_sm90 != nullptr, "attnkern: this library has schedule ",
                  static_cast<int>(own), " alone for these head sizes: build it with ATTNKERN_SCHEDULES=all");
  return attnkern::cuda::forward_schedules_sm90(p, plan, taken, stream);
}

// out and lse; lse has shape (0,) unless need_lse. splits and schedule replace those of the plan: for timing and tests.
// Any number of splits from 1 on (0: not the kernels for few queries) and any Schedule of the fast path is right.
std::tuple<Tensor, Tensor> forward(Tensor q ATTNKERN_TENSORS_AFTER_Q(ATTNKERN_AS_ARGUMENT)
                                       ATTNKERN_PARAMS(ATTNKERN_AS_ARGUMENT),
                                   bool need_lse, bool tf32, std::optional<int64_t> splits,
                                   std::optional<int64_t> schedule) {
  attnkern::Forward p{};
  fill_inputs(p, {ATTNKERN_TENSORS(ATTNKERN_AS_VALUE)}, {ATTNKERN_PARAMS(ATTNKERN_AS_VALUE)}, tf32);
  const Device device(q);
  auto [out, lse] = attnkern::make_results<Dispatcher>(p, q, need_lse);
  const OptionalTensor all_sinks = dense_sinks(p, q, sinks);
  if (p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0) return {out, lse};
  void* stream = device.stream();
  const int parts = schedule ? 0
                    : splits ? static_cast<int>(*splits)
                             : attnkern::cuda::plan_decode(p, device.chip).splits;
  if (parts > 0) {
    STD_TORCH_CHECK(p.dropout_p == 0 && p.heads_k == p.heads_v, "attnkern: this problem can't be split");
    const Tensor workspace = floats(q, attnkern::cuda::decode_workspace(p, parts));
    device.check(attnkern::cuda::decode(p, parts, data_of(workspace), stream));
    return {out, lse};
  }
  const auto plan = attnkern::cuda::plan_forward_sm90(p, device.chip);
  std::optional<Tensor> counters;
  if (plan.counters > 0) counters = attnkern::empty<Dispatcher, 1>(q, {plan.counters}, ScalarType::Int);
  int32_t* taken = counters ? static_cast<int32_t*>(counters->data_ptr()) : nullptr;
  if (schedule) {
    device.check(forward_by_schedule(p, plan, *schedule, taken, stream));
    return {out, lse};
  }
  device.launch(
      plan.refusal == nullptr, [&] { return attnkern::cuda::forward_sm90(p, plan, taken, stream); },
      [&] { return attnkern::cuda::forward(p, stream); });
  return {out, lse};
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
  fill_inputs(p, {ATTNKERN_TENSORS(ATTNKERN_AS_VALUE)}, {ATTNKERN_PARAMS(ATTNKERN_AS_VALUE)}, tf32);
  grad_out = dense_rows(grad_out), out = dense_rows(out), lse = attnkern::dense(lse);
  if (grad_lse) grad_lse = attnkern::dense(*grad_lse);
  attnkern::fill_backward(p, grad_out, grad_lse, q, out, lse);
  const Device device(q);
  auto [dq, dk, dv, dbias, dsinks] =
      attnkern::make_gradients<Dispatcher>(p, {ATTNKERN_TENSORS(ATTNKERN_AS_VALUE)}, grad_mask);
  const OptionalTensor all_sinks = dense_sinks(p, q, sinks);
  if (p.dsinks != nullptr && p.batch * p.seqlen_q == 0) Dispatcher::zero(dsinks);
  if (p.batch * p.heads_q * p.seqlen_q == 0) return {dq, dk, dv, dbias, dsinks};
  void* stream = device.stream();
  p.heads_out = attnkern::cuda::heads_out_of(p);
  const auto parts_k = parts_of(p, dk, p.dk), parts_v = parts_of(p, dv, p.dv);
  const Tensor delta = floats(q, p.batch * p.heads_q * p.seqlen_q);
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
  const Tensor sums = floats(q, plan.dq_sums);
  p.dq_sums = data_of(sums);
  device.launch(
      plan.refusal == nullptr, [&] { return attnkern::cuda::backward_sm90(p, plan, stream); },
      [&] {
        const auto plain = attnkern::cuda::plan_backward(p, device.chip.shared_per_block);
        const Tensor of_table = floats(q, plain.table.sums);
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
