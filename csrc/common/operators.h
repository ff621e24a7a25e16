// What the operators of every device do around their kernels: allocate the results in the layout of the inputs, check
// what the backward pass is given, and put both into the structs of params.h.
//
// A Host says what tensors are, how they are made and what stands for one that isn't asked for: torch's dispatcher
// (Dispatcher, here) or Python itself (common/direct.h).
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/unpack.h"

namespace attnkern {

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

// Tensors that came through the dispatcher.
struct Dispatcher {
  using Tensor = torch::stable::Tensor;
  using ScalarType = torch::headeronly::ScalarType;
  struct WhileKernelsRun {};  // the dispatcher has let go of the interpreter already
  static constexpr bool kWarns = true;

  // On the device of `like`.
  static Tensor empty(const Tensor& like, int64_t dims, const int64_t* sizes, const int64_t* strides,
                      ScalarType dtype) {
    int32_t device_type = 0, index = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
    AtenTensorHandle handle = nullptr;
    const auto error = aoti_torch_empty_strided(dims, sizes, strides,
                                                torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                                                device_type, index, &handle);
    if (error != AOTI_TORCH_SUCCESS) out_of_memory(dims, sizes, dtype);
    return Tensor(handle);
  }

  [[noreturn]] static void out_of_memory(int64_t dims, const int64_t* sizes, ScalarType dtype) {
    __int128 bytes = dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2;
    std::string shape;
    for (int64_t n = 0; n < dims; ++n) {
      bytes *= sizes[n];
      shape += (n > 0 ? ", " : "") + std::to_string(sizes[n]);
    }
    std::string digits;
    for (; bytes > 0; bytes /= 10) digits.insert(digits.begin(), static_cast<char>('0' + static_cast<int>(bytes % 10)));
    throw std::runtime_error("attnkern: can't allocate memory: you tried to allocate " + digits +
                             " bytes for a result of shape (" + shape + ")");
  }

  static Tensor nothing(const Tensor& like, ScalarType dtype) {
    const int64_t size = 0, stride = 1;
    return empty(like, 1, &size, &stride, dtype);
  }

  static void zero(Tensor& x) { torch::stable::zero_(x); }

  static void copy(Tensor& to, const Tensor& from) { torch::stable::copy_(to, from); }
};

// x itself if it is contiguous, else a copy.
inline torch::stable::Tensor dense(const torch::stable::Tensor& x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

// Contiguous, on the device of `like`.
template <class Host, int kDims>
typename Host::Tensor empty(const typename Host::Tensor& like, const int64_t (&sizes)[kDims],
                            torch::headeronly::ScalarType dtype) {
  int64_t strides[kDims], step = 1;
  for (int n = kDims - 1; n >= 0; --n) strides[n] = step, step *= sizes[n];
  return Host::empty(like, kDims, sizes, strides, dtype);
}

// (B, H, L, width): in (B, L, H, width) memory if `like` is laid out so, else contiguous. As `empty_like_heads` in
// attnkern/params.py, which is what torch.compile goes by.
template <class Host>
typename Host::Tensor empty_like_heads(const typename Host::Tensor& like, int64_t width) {
  const int64_t b = like.size(0), h = like.size(1), l = like.size(2);
  const bool heads_inside = h > 1 && l > 1 && like.stride(1) < like.stride(2);
  const int64_t sizes[4] = {b, h, l, width}, strides[4] = {l * h * width, width, h * width, 1};
  if (heads_inside) return Host::empty(like, 4, sizes, strides, like.scalar_type());
  return empty<Host, 4>(like, {b, h, l, width}, like.scalar_type());
}

// Allocates out and lse and puts them into p. lse is Host::nothing unless it is needed.
template <class Host, class Tensor = typename Host::Tensor>
std::pair<Tensor, Tensor> make_results(Forward& p, const Tensor& q, bool need_lse) {
  Tensor out = empty_like_heads<Host>(q, p.head_dim_v);
  Tensor lse =
      need_lse ? empty<Host, 3>(q, {p.batch, p.heads_q, p.seqlen_q}, lse_type(p)) : Host::nothing(q, lse_type(p));
  p.out = output_view(out);
  p.lse = need_lse ? lse.data_ptr() : nullptr;
  return {std::move(out), std::move(lse)};
}

// Puts what the backward pass is given besides the inputs into p. lse and grad_lse must be contiguous.
template <class Tensor>
void fill_backward(Backward& p, const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& q,
                   const Tensor& out, const Tensor& lse) {
  check_device(grad_out, q, "grad_out"), check_device(out, q, "out"), check_device(lse, q, "lse");
  if (grad_lse.has_value()) check_device(*grad_lse, q, "grad_lse");
  for (const Tensor* t : {&grad_out, &out}) {
    STD_TORCH_CHECK(t->dim() == 4 && t->size(0) == p.batch && t->size(1) == p.heads_q && t->size(2) == p.seqlen_q &&
                        t->size(3) == p.head_dim_v && t->scalar_type() == q.scalar_type(),
                    "attnkern: grad_out and out must have the shape and dtype of the output");
  }
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
}

template <class Tensor>
struct Gradients {
  Tensor dq, dk, dv, dbias, dsinks;
};

// Allocates the gradients that grad_mask asks for and puts them into p; the others are Host::nothing. Zeros where there
// is no score.
template <class Host, class Tensor = typename Host::Tensor>
Gradients<Tensor> make_gradients(Backward& p, const Inputs<Tensor>& inputs, int64_t grad_mask) {
  const Tensor& q = inputs.q;
  const auto finished = [&](Tensor&& grad, View& view) {
    if (has_no_score(p) && grad.numel() > 0) Host::zero(grad);
    view = output_view(grad);
    return std::move(grad);
  };
  const auto gradient = [&](GradBit bit, const Tensor& of, View& view) {
    view = {};
    if (!(grad_mask & bit)) return Host::nothing(q, of.scalar_type());
    return finished(empty_like_heads<Host>(of, of.size(3)), view);
  };
  const auto gradient_of_bias = [&] {
    p.dbias = {};
    if (!(grad_mask & kGradBias)) return Host::nothing(q, q.scalar_type());
    STD_TORCH_CHECK(inputs.bias.has_value() && p.bias_dtype != DType::kBool,
                    "attnkern: only a floating bias has a gradient");
    const int64_t* n = p.bias_size;
    if (p.relative) {
      Tensor grad = empty<Host, 3>(q, {n[0], n[1], inputs.bias->size(2)}, scalar_type_of(p.bias_dtype));
      if (has_no_score(p) && grad.numel() > 0) Host::zero(grad);
      p.dbias.data = grad.data_ptr();
      return grad;
    }
    return finished(empty<Host, 4>(q, {n[0], n[1], n[2], n[3]}, scalar_type_of(p.bias_dtype)), p.dbias);
  };
  const auto gradient_of_sinks = [&] {
    p.dsinks = nullptr;
    if (!(grad_mask & kGradSinks)) return Host::nothing(q, lse_type(p));
    STD_TORCH_CHECK(inputs.sinks.has_value(), "attnkern: sinks that aren't given have no gradient");
    Tensor grad = empty<Host, 2>(q, {p.sinks.batch, p.heads_q}, lse_type(p));
    p.dsinks = grad.data_ptr();
    return grad;
  };
  return {gradient(kGradQ, q, p.dq), gradient(kGradK, inputs.k, p.dk), gradient(kGradV, inputs.v, p.dv),
          gradient_of_bias(), gradient_of_sinks()};
}

}  // namespace attnkern
