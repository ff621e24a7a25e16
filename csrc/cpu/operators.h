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
  if (chosen == nullptr) throw std::runtime_error(error);
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

// Raises unless all pages that a row of the call attends to are there.
inline void check_pages(const Attention& p) {
  if (p.pages.table == nullptr || p.heads_q == 0 || p.seqlen_q == 0) return;
  const auto check = [&](int64_t b, int64_t begin, int64_t end) {
    for (int64_t i = begin >> p.pages.shift; begin < end && i <= (end - 1) >> p.pages.shift; ++i) {
      const int32_t page = p.pages.table[b * p.pages.stride + i];
      if (page >= 0 && page < p.pages.count) continue;
      throw std::runtime_error(  // a user's mistake: without the place in this file, which torch's checks put in front
          "attnkern: block_table must hold numbers of pages from 0 to " + std::to_string(p.pages.count - 1) +
          " wherever key_ranges, is_causal and window leave keys, got " + std::to_string(page) + " at [" +
          std::to_string(b) + ", " + std::to_string(i) + "]");
    }
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.ranges.data == nullptr) {
      const auto visited = p.band.visited(0, p.seqlen_q, {0, p.seqlen_k});
      check(b, visited.begin, visited.end);
      continue;
    }
    // Rows that follow each other mostly share their keys: those of the row before have been looked at.
    int64_t known_begin = 0, known_end = 0;
    const int64_t heads = p.ranges.heads, rows = p.ranges.stride[2] == 0 ? 1 : p.seqlen_q;
    for (int64_t which = 0; which < p.ranges.count; ++which)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < rows; ++i) {
          const int32_t* ends =
              p.ranges.data + b * p.ranges.stride[0] + h * p.ranges.stride[1] + i * p.ranges.stride[2] + 2 * which;
          const auto visited = p.band.visited(i, rows == 1 ? p.seqlen_q : 1, {0, p.seqlen_k});
          const int64_t begin = std::max<int64_t>(ends[0], visited.begin),
                        end = std::min<int64_t>(ends[1], visited.end);
          if (begin >= end) continue;
          const bool grows = known_begin <= begin && begin <= known_end;
          check(b, grows ? std::max(begin, known_end) : begin, end);
          known_begin = grows ? known_begin : begin, known_end = grows ? std::max(known_end, end) : end;
        }
  }
}

// out and lse; lse is Host::nothing unless it is needed.
template <class Host, class Tensor = typename Host::Tensor>
std::tuple<Tensor, Tensor> forward(const Inputs<Tensor>& inputs, const AttentionParams& params, bool need_lse) {
  Forward p;
  fill(p, inputs, params);
  check_pages(p);
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
  fill(p, inputs, params);
  STD_TORCH_CHECK(p.pages.table == nullptr, "attnkern: there is no gradient of keys and values in pages");
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
