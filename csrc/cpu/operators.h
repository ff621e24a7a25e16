// What the operators do with CPU tensors: describe them, allocate the results, call the kernels.
#pragma once

#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "common/operators.h"
#include "cpu/kernels.h"

namespace attnkern::cpu {

inline const Kernels& kernels() {
  const char* error;
  const auto* chosen = select_kernels(&error);
  STD_TORCH_CHECK(chosen != nullptr, error);
  return *chosen;
}

inline Runtime runtime() {
  const auto parallel = [](int64_t workers, void (*work)(void*, int64_t), void* context) {
    // torch's C ABI lets no exception through: it makes one of its own, without the message. (An exception_ptr would
    // need a symbol without a version.)
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::string failure;
    torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      try {
        for (int64_t worker = begin; worker < end; ++worker) work(context, worker);
      } catch (const std::exception& error) {
        if (!failed.test_and_set()) failure = error.what();
      }
    });
    if (!failure.empty()) throw std::runtime_error(failure);
  };
  return {static_cast<int64_t>(torch::stable::get_num_threads()), parallel};
}

// out and lse; lse is Host::nothing unless it is needed.
template <class Host, class Tensor = typename Host::Tensor>
std::tuple<Tensor, Tensor> forward(const Inputs<Tensor>& inputs, const AttentionParams& params, bool need_lse) {
  Forward p;
  fill(p, inputs, params, true);
  auto [out, lse] = make_results<Host>(p, inputs.q, need_lse);
  {
    [[maybe_unused]] const typename Host::WhileKernelsRun running;
    kernels().forward(p, runtime());
  }
  return {std::move(out), std::move(lse)};
}

// What grad_mask does not ask for is Host::nothing. Sinks (Hq,) have a gradient (Hq,). lse and grad_lse must be
// contiguous.
template <class Host, class Tensor = typename Host::Tensor>
Gradients<Tensor> backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Inputs<Tensor>& inputs,
                           const Tensor& out, const Tensor& lse, const AttentionParams& params, int64_t grad_mask) {
  Backward p;
  fill(p, inputs, params, true);
  fill_backward(p, grad_out, grad_lse, inputs.q, out, lse);
  const bool flat_sinks = grad_mask & kGradSinks && inputs.sinks.has_value() && inputs.sinks->dim() == 1;
  auto gradients = make_gradients<Host>(p, inputs, flat_sinks ? grad_mask - kGradSinks : grad_mask);
  if (flat_sinks) {
    gradients.dsinks = empty<Host, 1>(inputs.q, {p.heads_q}, lse_type(p));
    p.dsinks = gradients.dsinks.data_ptr();
  }
  {
    [[maybe_unused]] const typename Host::WhileKernelsRun running;
    kernels().backward(p, runtime());
  }
  return gradients;
}

}  // namespace attnkern::cpu
