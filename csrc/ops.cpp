// The operators on CPU tensors, registered straight on the dispatcher (a hop through Python would cost more than a
// short attention). The schemas are in attnkern/signatures.py. Only torch's stable C ABI is used.
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

using attnkern::AttentionParams, attnkern::Dispatcher, attnkern::DType, attnkern::OptionalTensor;
using attnkern::cpu::kernels, attnkern::cpu::runtime;
using torch::stable::Tensor;
using Inputs = attnkern::Inputs<Tensor>;

void check_backend(const std::string& backend) {
  STD_TORCH_CHECK(backend == "cpu", "attnkern: on CPU tensors this operator has the backend 'cpu' only, got '", backend,
                  "'");
}

std::tuple<Tensor, Tensor> forward(Tensor q ATTNKERN_TENSORS_AFTER_Q(ATTNKERN_AS_ARGUMENT)
                                       ATTNKERN_PARAMS(ATTNKERN_AS_ARGUMENT),
                                   bool need_lse, std::string backend) {
  check_backend(backend);
  return attnkern::cpu::forward<Dispatcher>(Inputs{ATTNKERN_TENSORS(ATTNKERN_AS_VALUE)},
                                            AttentionParams{ATTNKERN_PARAMS(ATTNKERN_AS_VALUE)}, need_lse);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor grad_out, OptionalTensor grad_lse ATTNKERN_TENSORS(ATTNKERN_AS_ARGUMENT), Tensor out,
    Tensor lse ATTNKERN_PARAMS(ATTNKERN_AS_ARGUMENT), int64_t grad_mask, std::string backend) {
  check_backend(backend);
  if (grad_lse.has_value()) grad_lse = attnkern::dense(*grad_lse);
  auto [dq, dk, dv, dbias, dsinks] = attnkern::cpu::backward<Dispatcher>(
      grad_out, grad_lse, Inputs{ATTNKERN_TENSORS(ATTNKERN_AS_VALUE)}, out, attnkern::dense(lse),
      AttentionParams{ATTNKERN_PARAMS(ATTNKERN_AS_VALUE)}, grad_mask);
  return {dq, dk, dv, dbias, dsinks};
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
