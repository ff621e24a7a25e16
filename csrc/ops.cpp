// The operators on CPU tensors: unpacks tensors into params.h structs, allocates results, calls the kernels.
//
// Registered straight on the dispatcher (a hop through Python would cost more than a short attention). The schemas are
// in attnkern/ops.py. Only torch's stable C ABI is used.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <tuple>

#include "common/unpack.h"
#include "cpu/kernels.h"

namespace {

using attnkern::DType;
using attnkern::dtype_of, attnkern::view_of, attnkern::output_view, attnkern::fill, attnkern::lse_type;
using attnkern::OptionalTensor;
using attnkern::View;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const attnkern::cpu::Kernels& kernels() {
  const char* error;
  const auto* chosen = attnkern::cpu::select_kernels(&error);
  STD_TORCH_CHECK(chosen != nullptr, error);
  return *chosen;
}

attnkern::cpu::Runtime runtime() {
  const auto parallel = [](int64_t workers, void (*work)(void*, int64_t), void* context) {
    torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) work(context, worker);
    });
  };
  return {static_cast<int64_t>(torch::stable::get_num_threads()), parallel};
}

ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return ScalarType::Float;
    case DType::kFloat64: return ScalarType::Double;
    case DType::kBFloat16: return ScalarType::BFloat16;
    case DType::kFloat16: return ScalarType::Half;
    default: return ScalarType::Bool;
  }
}

template <int kDims>
Tensor empty(const int64_t (&sizes)[kDims], const int64_t (&strides)[kDims], ScalarType dtype) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      kDims, sizes, strides, torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor empty_vector(ScalarType dtype) { return empty<1>({0}, {1}, dtype); }

// (B, H, L, width): in (B, L, H, width) memory if `like` is laid out so, else contiguous.
Tensor empty_like_layout(const Tensor& like, int64_t width) {
  const int64_t b = like.size(0), h = like.size(1), l = like.size(2);
  const bool heads_inside = h > 1 && l > 1 && like.stride(1) < like.stride(2);
  if (heads_inside) return empty<4>({b, h, l, width}, {l * h * width, width, h * width, 1}, like.scalar_type());
  return empty<4>({b, h, l, width}, {h * l * width, l * width, width, 1}, like.scalar_type());
}

void check_backend(const std::string& backend) {
  STD_TORCH_CHECK(backend == "cpu", "attnkern: on CPU tensors this operator has the backend 'cpu' only, got '", backend,
                  "'");
}

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, OptionalTensor bias, OptionalTensor philox_seed,
                                   double softmax_scale, double softcap, int64_t window_left, int64_t window_right,
                                   int64_t band_offset, double dropout_p, bool need_lse, std::string backend) {
  attnkern::Forward p;
  check_backend(backend);
  fill(p, q, k, v, bias, philox_seed, softmax_scale, softcap, window_left, window_right, band_offset, dropout_p);
  Tensor out = empty_like_layout(q, p.head_dim_v);
  Tensor lse = need_lse
                   ? empty<3>({p.batch, p.heads_q, p.seqlen_q}, {p.heads_q * p.seqlen_q, p.seqlen_q, 1}, lse_type(p))
                   : empty_vector(lse_type(p));
  p.out = output_view(out);
  p.lse = need_lse ? lse.data_ptr() : nullptr;
  kernels().forward(p, runtime());
  return {out, lse};
}

enum GradMask : int64_t { kGradQ = 1, kGradK = 2, kGradV = 4, kGradBias = 8 };

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor grad_out, OptionalTensor grad_lse, Tensor q, Tensor k,
                                                    Tensor v, OptionalTensor bias, OptionalTensor philox_seed,
                                                    Tensor out, Tensor lse, double softmax_scale, double softcap,
                                                    int64_t window_left, int64_t window_right, int64_t band_offset,
                                                    double dropout_p, int64_t grad_mask, std::string backend) {
  attnkern::Backward p;
  check_backend(backend);
  fill(p, q, k, v, bias, philox_seed, softmax_scale, softcap, window_left, window_right, band_offset, dropout_p);
  for (const Tensor* t : {&grad_out, &out})
    STD_TORCH_CHECK(t->dim() == 4 && t->size(0) == p.batch && t->size(1) == p.heads_q && t->size(2) == p.seqlen_q &&
                        t->size(3) == p.head_dim_v && dtype_of(*t) == p.dtype,
                    "attnkern: grad_out and out must have the shape and dtype of the output");
  const auto row_vector = [&](const Tensor& t) {
    STD_TORCH_CHECK(
        t.dim() == 3 && t.size(0) == p.batch && t.size(1) == p.heads_q && t.size(2) == p.seqlen_q &&
            t.scalar_type() == lse_type(p),
        "attnkern: lse and grad_lse must have shape (batch, heads, seqlen_q) and be float32 (float64 for float64)");
    return t.is_contiguous() ? t : torch::stable::contiguous(t);
  };
  lse = row_vector(lse);
  if (grad_lse.has_value()) grad_lse = row_vector(*grad_lse);
  p.grad_out = view_of(grad_out);
  p.out = view_of(out);
  p.lse = lse.data_ptr();
  p.grad_lse = grad_lse.has_value() ? grad_lse->data_ptr() : nullptr;

  const bool nothing = p.batch == 0 || p.heads_q == 0;
  const auto gradient = [&](bool wanted, const Tensor& of, View& view) {
    view = {};
    if (!wanted) return empty_vector(of.scalar_type());
    Tensor grad = empty_like_layout(of, of.size(3));
    if (nothing) torch::stable::zero_(grad);  // the kernels have nothing to do
    view = output_view(grad);
    return grad;
  };
  Tensor dq = gradient(grad_mask & kGradQ, q, p.dq), dk = gradient(grad_mask & kGradK, k, p.dk),
         dv = gradient(grad_mask & kGradV, v, p.dv), dbias = empty_vector(q.scalar_type());
  p.dbias = {};
  if (grad_mask & kGradBias) {
    STD_TORCH_CHECK(bias.has_value() && p.bias_dtype != DType::kBool, "attnkern: only a floating bias has a gradient");
    const int64_t* n = p.bias_size;
    dbias =
        empty<4>({n[0], n[1], n[2], n[3]}, {n[1] * n[2] * n[3], n[2] * n[3], n[3], 1}, scalar_type_of(p.bias_dtype));
    p.dbias = view_of(dbias);
    if (nothing) torch::stable::zero_(dbias);
  }
  kernels().backward(p, runtime());
  return {dq, dk, dv, dbias};
}

// The kernels' multiply-adds on registers alone, for some milliseconds on every thread: the FLOPs of it. Timed, it is
// the peak of the machine.
double cpu_peak_work(std::string dtype) {
  STD_TORCH_CHECK(dtype == "fp32" || dtype == "fp16" || dtype == "fp64" || dtype == "bf16",
                  "attnkern: dtype must be fp32, fp64, bf16 or fp16, got ", dtype);
  struct Work {
    DType dtype;
    std::atomic<double> flops;
  } work{dtype == "fp64" ? DType::kFloat64 : dtype == "bf16" ? DType::kBFloat16 : DType::kFloat32, 0};
  const auto threads = runtime();
  threads.parallel(
      threads.num_threads,
      [](void* raw, int64_t) {
        auto& shared = *static_cast<Work*>(raw);
        const double flops = kernels().peak_work(shared.dtype, 500000);
        double total = shared.flops;
        while (!shared.flops.compare_exchange_weak(total, total + flops)) {
        }
      },
      &work);
  return work.flops;
}

std::string cpu_isa() { return kernels().name; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnkern, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}

STABLE_TORCH_LIBRARY_FRAGMENT(attnkern, m) {
  m.def("cpu_isa() -> str");
  m.def("cpu_peak_work(str dtype) -> float");
}
STABLE_TORCH_LIBRARY_IMPL(attnkern, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("cpu_peak_work", TORCH_BOX(&cpu_peak_work));
}
