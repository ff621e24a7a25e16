// The operators on CPU tensors, registered straight on the dispatcher (a hop through Python would cost more than a
// short attention). The schemas are in attnkern/ops.py. Only torch's stable C ABI is used.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <tuple>

#include "cpu/operators.h"

namespace {

using attnkern::DType;
using attnkern::OptionalTensor;
using attnkern::cpu::kernels, attnkern::cpu::runtime;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// How the operators of cpu/operators.h see tensors that came through the dispatcher.
struct Dispatcher {
  using Tensor = torch::stable::Tensor;
  struct WhileKernelsRun {};  // the dispatcher has let go of the interpreter already

  static Tensor empty(int64_t dims, const int64_t* sizes, const int64_t* strides, ScalarType dtype) {
    AtenTensorHandle handle = nullptr;
    const auto error = aoti_torch_empty_strided(dims, sizes, strides,
                                                torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                                                aoti_torch_device_type_cpu(), 0, &handle);
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

  static Tensor nothing(ScalarType dtype) {
    const int64_t size = 0, stride = 1;
    return empty(1, &size, &stride, dtype);
  }
};

void check_backend(const std::string& backend) {
  STD_TORCH_CHECK(backend == "cpu", "attnkern: on CPU tensors this operator has the backend 'cpu' only, got '", backend,
                  "'");
}

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, OptionalTensor bias, OptionalTensor philox_seed,
                                   double softmax_scale, double softcap, int64_t window_left, int64_t window_right,
                                   int64_t band_offset, double dropout_p, bool need_lse, std::string backend) {
  check_backend(backend);
  return attnkern::cpu::forward<Dispatcher>(q, k, v, bias, philox_seed, softmax_scale, softcap, window_left,
                                            window_right, band_offset, dropout_p, need_lse);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor grad_out, OptionalTensor grad_lse, Tensor q, Tensor k,
                                                    Tensor v, OptionalTensor bias, OptionalTensor philox_seed,
                                                    Tensor out, Tensor lse, double softmax_scale, double softcap,
                                                    int64_t window_left, int64_t window_right, int64_t band_offset,
                                                    double dropout_p, int64_t grad_mask, std::string backend) {
  check_backend(backend);
  const auto contiguous = [](const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); };
  if (grad_lse.has_value()) grad_lse = contiguous(*grad_lse);
  return attnkern::cpu::backward<Dispatcher>(grad_out, grad_lse, q, k, v, bias, philox_seed, out, contiguous(lse),
                                             softmax_scale, softcap, window_left, window_right, band_offset, dropout_p,
                                             grad_mask);
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
