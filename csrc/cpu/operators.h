// What the operators do with CPU tensors: unpack them into params.h structs, allocate the results, call the kernels.
//
// A Host says what tensors are, how they are made and what stands for one that isn't asked for: torch's dispatcher
// (ops.cpp) or Python itself (direct.cpp).
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "common/unpack.h"
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

inline torch::headeronly::ScalarType scalar_type_of(DType dtype) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case DType::kFloat32: return ScalarType::Float;
    case DType::kFloat64: return ScalarType::Double;
    case DType::kBFloat16: return ScalarType::BFloat16;
    case DType::kFloat16: return ScalarType::Half;
    default: return ScalarType::Bool;
  }
}

template <class Host, int kDims>
typename Host::Tensor empty(const int64_t (&sizes)[kDims], const int64_t (&strides)[kDims],
                            torch::headeronly::ScalarType dtype) {
  return Host::empty(kDims, sizes, strides, dtype);
}

// (B, H, L, width): in (B, L, H, width) memory if `like` is laid out so, else contiguous.
template <class Host>
typename Host::Tensor empty_like_layout(const typename Host::Tensor& like, int64_t width) {
  const int64_t b = like.size(0), h = like.size(1), l = like.size(2);
  const bool heads_inside = h > 1 && l > 1 && like.stride(1) < like.stride(2);
  if (heads_inside) return empty<Host, 4>({b, h, l, width}, {l * h * width, width, h * width, 1}, like.scalar_type());
  return empty<Host, 4>({b, h, l, width}, {h * l * width, l * width, width, 1}, like.scalar_type());
}

// out and lse; lse is Host::nothing unless it is needed.
template <class Host, class Tensor = typename Host::Tensor>
std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
                                   const std::optional<Tensor>& philox_seed, double softmax_scale, double softcap,
                                   int64_t window_left, int64_t window_right, int64_t band_offset, double dropout_p,
                                   bool need_lse) {
  Forward p;
  fill(p, q, k, v, bias, philox_seed, softmax_scale, softcap, window_left, window_right, band_offset, dropout_p);
  Tensor out = empty_like_layout<Host>(q, p.head_dim_v);
  Tensor lse =
      need_lse ? empty<Host, 3>({p.batch, p.heads_q, p.seqlen_q}, {p.heads_q * p.seqlen_q, p.seqlen_q, 1}, lse_type(p))
               : Host::nothing(lse_type(p));
  p.out = output_view(out);
  p.lse = need_lse ? lse.data_ptr() : nullptr;
  {
    [[maybe_unused]] const typename Host::WhileKernelsRun running;
    kernels().forward(p, runtime());
  }
  return {std::move(out), std::move(lse)};
}

enum GradMask : int64_t { kGradQ = 1, kGradK = 2, kGradV = 4, kGradBias = 8 };

// dq, dk, dv, dbias; what grad_mask does not ask for is Host::nothing. lse and grad_lse must be contiguous.
template <class Host, class Tensor = typename Host::Tensor>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                                    const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const std::optional<Tensor>& bias,
                                                    const std::optional<Tensor>& philox_seed, const Tensor& out,
                                                    const Tensor& lse, double softmax_scale, double softcap,
                                                    int64_t window_left, int64_t window_right, int64_t band_offset,
                                                    double dropout_p, int64_t grad_mask) {
  Backward p;
  fill(p, q, k, v, bias, philox_seed, softmax_scale, softcap, window_left, window_right, band_offset, dropout_p);
  check_device(grad_out, q, "grad_out"), check_device(out, q, "out"), check_device(lse, q, "lse");
  if (grad_lse.has_value()) check_device(*grad_lse, q, "grad_lse");
  for (const Tensor* t : {&grad_out, &out})
    STD_TORCH_CHECK(t->dim() == 4 && t->size(0) == p.batch && t->size(1) == p.heads_q && t->size(2) == p.seqlen_q &&
                        t->size(3) == p.head_dim_v && t->scalar_type() == q.scalar_type(),
                    "attnkern: grad_out and out must have the shape and dtype of the output");
  const auto row_vector = [&](const Tensor& t) {
    STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == p.batch && t.size(1) == p.heads_q && t.size(2) == p.seqlen_q &&
                        t.scalar_type() == lse_type(p) && t.is_contiguous(),
                    "attnkern: lse and grad_lse must have shape (batch, heads, seqlen_q) and be float32 (float64 for "
                    "float64)");
    return t.data_ptr();
  };
  p.grad_out = view_of(grad_out);
  p.out = view_of(out);
  p.lse = row_vector(lse);
  p.grad_lse = grad_lse.has_value() ? row_vector(*grad_lse) : nullptr;

  // Without queries the kernels have nothing to do.
  const auto zero_if_nothing = [&](const View& view, int64_t bytes) {
    if ((p.batch == 0 || p.heads_q == 0) && bytes > 0) std::memset(view.data, 0, bytes);
  };
  const auto gradient = [&](bool wanted, const Tensor& of, View& view) {
    view = {};
    if (!wanted) return Host::nothing(of.scalar_type());
    Tensor grad = empty_like_layout<Host>(of, of.size(3));
    view = output_view(grad);
    zero_if_nothing(view, grad.numel() * grad.element_size());
    return grad;
  };
  Tensor dq = gradient(grad_mask & kGradQ, q, p.dq), dk = gradient(grad_mask & kGradK, k, p.dk),
         dv = gradient(grad_mask & kGradV, v, p.dv);
  const auto gradient_of_bias = [&] {
    p.dbias = {};
    if (!(grad_mask & kGradBias)) return Host::nothing(q.scalar_type());
    STD_TORCH_CHECK(bias.has_value() && p.bias_dtype != DType::kBool, "attnkern: only a floating bias has a gradient");
    const int64_t* n = p.bias_size;
    Tensor grad = empty<Host, 4>({n[0], n[1], n[2], n[3]}, {n[1] * n[2] * n[3], n[2] * n[3], n[3], 1},
                                 scalar_type_of(p.bias_dtype));
    p.dbias = view_of(grad);
    zero_if_nothing(p.dbias, grad.numel() * grad.element_size());
    return grad;
  };
  Tensor dbias = gradient_of_bias();
  {
    [[maybe_unused]] const typename Host::WhileKernelsRun running;
    kernels().backward(p, runtime());
  }
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dbias)};
}

}  // namespace attnkern::cpu
