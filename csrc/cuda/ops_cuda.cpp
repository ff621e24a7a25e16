// Registration of the CUDA operators, compiled by the host compiler against torch's stable ABI. It needs no CUDA header
// and no symbol of a CUDA torch, so the library loads beside any torch, with or without a driver.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cuda/launch.h"

// Weak: only libtorch_cuda has it, and a CPU torch never gets to call it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace {

using attnkern::cuda::Dtype;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void* current_stream(int32_t device_index) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "attnkern: this torch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

void check_launch(int error) {
  STD_TORCH_CHECK(error == 0, "attnkern: CUDA error: ", attnkern::cuda::error_string(error));
}

Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    default: STD_TORCH_CHECK(false, "attnkern: the CUDA kernels take float32, bfloat16 and float16");
  }
}

void copy_strides(const Tensor& x, int64_t (&stride)[3]) {
  for (int n = 0; n < 3; ++n) stride[n] = x.stride(n);
}

Tensor delta(const Tensor& grad_out, const Tensor& out, const std::optional<Tensor>& grad_lse) {
  STD_TORCH_CHECK(out.dim() == 4 && grad_out.dim() == 4, "attnkern::delta: grad_out and out must have 4 dimensions");
  STD_TORCH_CHECK(grad_out.is_cuda() && grad_out.get_device_index() == out.get_device_index(),
                  "attnkern::delta: grad_out and out must be on one device");
  STD_TORCH_CHECK(grad_out.scalar_type() == out.scalar_type(), "attnkern::delta: grad_out and out must share a dtype");
  for (int n = 0; n < 4; ++n) {
    STD_TORCH_CHECK(grad_out.size(n) == out.size(n), "attnkern::delta: grad_out and out must have equal sizes");
  }
  STD_TORCH_CHECK((grad_out.stride(3) == 1 && out.stride(3) == 1) || out.size(3) <= 1,
                  "attnkern::delta: the last strides of grad_out and out must be 1");
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  Tensor result = torch::stable::new_empty(out, {out.size(0), out.size(1), out.size(2)}, ScalarType::Float);
  attnkern::cuda::DeltaParams params{};
  params.grad_out = grad_out.const_data_ptr();
  params.out = out.const_data_ptr();
  params.delta = static_cast<float*>(result.mutable_data_ptr());
  copy_strides(grad_out, params.grad_out_stride);
  copy_strides(out, params.out_stride);
  if (grad_lse) {
    STD_TORCH_CHECK(grad_lse->dim() == 3 && grad_lse->scalar_type() == ScalarType::Float &&
                        grad_lse->get_device_index() == out.get_device_index(),
                    "attnkern::delta: grad_lse must be a float32 tensor of 3 dimensions on out's device");
    for (int n = 0; n < 3; ++n) {
      STD_TORCH_CHECK(grad_lse->size(n) == out.size(n),
                      "attnkern::delta: grad_lse must have out's sizes without the last");
    }
    params.grad_lse = static_cast<const float*>(grad_lse->const_data_ptr());
    copy_strides(*grad_lse, params.grad_lse_stride);
  }
  params.batch = out.size(0);
  params.heads = out.size(1);
  params.seqlen = out.size(2);
  params.head_dim = out.size(3);
  params.dtype = dtype_of(out);
  check_launch(attnkern::cuda::delta(params, current_stream(out.get_device_index())));
  return result;
}

}  // namespace

// Defined here, not in attnkern/ops.py: it exists on CUDA only and has no gradient of its own.
STABLE_TORCH_LIBRARY_FRAGMENT(attnkern, m) { m.def("delta(Tensor grad_out, Tensor out, Tensor? grad_lse) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(attnkern, CUDA, m) { m.impl("delta", TORCH_BOX(&delta)); }
