// What the operators do with CUDA tensors: describe them, allocate the results, launch the kernels. Compiled by the
// host compiler against torch's stable ABI. It needs no CUDA header and no symbol of a CUDA torch, so the library loads
// beside any torch, with or without a driver.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "common/operators.h"
#include "cuda/kind.h"
#include "cuda/launch.h"

// Weak: only libtorch_cuda has it, and a CPU torch never gets to call it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace attnkern::cuda {

using torch::headeronly::ScalarType;

inline void* current_stream(int32_t device_index) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "attnkern: this torch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

// The device of a call: made current in torch and here, its limits, and torch's stream on it.
struct Device {
  torch::stable::accelerator::DeviceGuard guard;
  Chip chip{};
  int32_t index;

  template <class Tensor>
  explicit Device(const Tensor& x) : guard(x.get_device_index()), index(x.get_device_index()) {
    check(use_device(index, chip));
  }
  void* stream() const { return current_stream(index); }
  void check(int error) const { STD_TORCH_CHECK(error == 0, "attnkern: ", error_text(error, chip)); }
  // Hopper's kernels if the plan takes them. A driver that refuses their tensor maps is no reason to fail: which maps
  // it takes isn't all written down, and the kernels for every chip need none.
  template <class Hopper, class Any>
  void launch(bool takes, Hopper hopper, Any any) const {
    int error = takes ? hopper() : any();
    if (is_refused_map(error)) {
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
    const std::string text = "attnkern: " + error_text(error, chip) +
                             "; the kernels for every chip run in place of Hopper's, which are faster (said once)";
    aoti_torch_warn(__func__, __FILE__, __LINE__, text.c_str());
  }
};

template <class Tensor>
void fill_inputs(Attention& p, const Inputs<Tensor>& inputs, const AttentionParams& params, bool tf32) {
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
template <class Host, class Tensor = typename Host::Tensor>
std::optional<Tensor> dense_sinks(Attention& p, const Tensor& q, const std::optional<Tensor>& sinks) {
  if (!sinks || (p.sinks.batch == p.batch && sinks->is_contiguous())) return {};
  Tensor dense = empty<Host, 2>(q, {p.batch, p.heads_q}, ScalarType::Float);
  Host::copy(dense, *sinks);
  p.sinks.data = dense.data_ptr();
  return dense;
}

template <class Host, class Tensor = typename Host::Tensor>
Tensor floats(const Tensor& like, int64_t count) {
  return empty<Host, 1>(like, {count}, ScalarType::Float);
}
template <class Tensor>
float* data_of(const Tensor& x) {
  return static_cast<float*>(x.data_ptr());
}

// Hopper's forward kernel by another schedule than the plan's own, where the library holds it.
inline int forward_by_schedule(const Forward& p, ForwardSm90Plan plan, int64_t schedule, int32_t* taken, void* stream) {
  STD_TORCH_CHECK(plan.refusal == nullptr, "attnkern: no kernel for Hopper takes this: ", plan.refusal);
  STD_TORCH_CHECK(schedule >= 0 && schedule <= 2 && plan.fast_path,
                  "attnkern: schedule must be 0, 1 or 2, and softcap 0");
  const auto own = std::exchange(plan.schedule, static_cast<Schedule>(schedule));
  if (plan.schedule == own) return forward_sm90(p, plan, taken, stream);
  STD_TORCH_CHECK(forward_schedules_sm90 != nullptr, "attnkern: this library has schedule ", static_cast<int>(own),
                  " alone for these head sizes: build it with ATTNKERN_SCHEDULES=all");
  return forward_schedules_sm90(p, plan, taken, stream);
}

// What may replace a plan's own choice, for timing and tests: any number of splits from 1 on (0: not the kernels for
// few queries) and any Schedule of the fast path is right.
struct Instead {
  std::optional<int64_t> splits = {}, schedule = {};
};

// out and lse; lse is Host::nothing unless it is needed. `accepts` is asked before anything is launched, with the
// problem, its kind and the device, and may throw.
template <class Host, class Tensor = typename Host::Tensor, class Accepts>
std::tuple<Tensor, Tensor> forward(const Inputs<Tensor>& inputs, const AttentionParams& params, bool need_lse,
                                   bool tf32, Accepts&& accepts, const Instead& instead = {}) {
  Forward p{};
  fill_inputs(p, inputs, params, tf32);
  const Tensor& q = inputs.q;
  const Device device(q);
  auto [out, lse] = make_results<Host>(p, q, need_lse);
  if (p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0) return {std::move(out), std::move(lse)};
  const auto decoding = plan_decode(p, device.chip);
  const auto plan = plan_forward_sm90(p, device.chip);
  accepts(p, decoding, plan, device);
  const std::optional<Tensor> all_sinks = dense_sinks<Host>(p, q, inputs.sinks);
  void* stream = device.stream();
  const int parts = instead.schedule ? 0 : instead.splits ? static_cast<int>(*instead.splits) : decoding.splits;
  if (parts > 0) {
    STD_TORCH_CHECK(p.dropout_p == 0 && p.heads_k == p.heads_v, "attnkern: this problem can't be split");
    const Tensor workspace = floats<Host>(q, decode_workspace(p, parts));
    [[maybe_unused]] const typename Host::WhileKernelsRun running;
    device.check(decode(p, parts, data_of(workspace), stream));
    return {std::move(out), std::move(lse)};
  }
  std::optional<Tensor> counters;  // of four bytes
  if (plan.counters > 0) counters = floats<Host>(q, plan.counters);
  int32_t* taken = counters ? static_cast<int32_t*>(counters->data_ptr()) : nullptr;
  [[maybe_unused]] const typename Host::WhileKernelsRun running;
  const bool takes = plan.refusal == nullptr;
  const auto hopper = [&] { return forward_sm90(p, plan, taken, stream); };
  const auto any = [&] { return cuda::forward(p, stream); };
  if (instead.schedule) {
    device.check(forward_by_schedule(p, plan, *instead.schedule, taken, stream));
  } else if constexpr (Host::kWarns) {
    device.launch(takes, hopper, any);
  } else {
    device.check(takes ? hopper() : any());
  }
  return {std::move(out), std::move(lse)};
}

}  // namespace attnkern::cuda
