// Registration of the CUDA operators, compiled by the host compiler against torch's stable ABI. It needs no CUDA header
// and no symbol of a CUDA torch, so the library loads beside any torch, with or without a driver.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <mutex>
#include <set>
#include <string>

#include "common/unpack.h"
#include "cuda/launch.h"

// Weak: only libtorch_cuda has it, and a CPU torch never gets to call it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

// The tests compile this file for CPU tensors too, against a CUDA runtime that hands every launch to a simulator.
#ifdef ATTNKERN_RECORD_LAUNCHES
#define ATTNKERN_DISPATCH_KEY CPU
#else
#define ATTNKERN_DISPATCH_KEY CUDA
#endif

namespace {

using attnkern::check_device, attnkern::OptionalTensor;
using attnkern::cuda::Dtype;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void* current_stream(int32_t device_index) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "attnkern: this torch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

#ifdef ATTNKERN_RECORD_LAUNCHES
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
#else
using torch::stable::accelerator::DeviceGuard;
#endif

// The device of a call: made current in torch and here, its limits, and torch's stream on it.
struct Device {
  DeviceGuard guard;
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

// Whether there is no query: then there is nothing to compute, and kernels may divide by a count that is 0.
bool has_no_query(const attnkern::Attention& p) { return p.batch * p.heads_q * p.seqlen_q == 0; }

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
  STD_TORCH_CHECK(grad_out.device() == out.device(), "attnkern::delta: grad_out and out must be on one device");
  STD_TORCH_CHECK(grad_out.scalar_type() == out.scalar_type(), "attnkern::delta: grad_out and out must share a dtype");
  for (int n = 0; n < 4; ++n) {
    STD_TORCH_CHECK(grad_out.size(n) == out.size(n), "attnkern::delta: grad_out and out must have equal sizes");
  }
  STD_TORCH_CHECK((grad_out.stride(3) == 1 && out.stride(3) == 1) || out.size(3) <= 1,
                  "attnkern::delta: the last strides of grad_out and out must be 1");
  const Device device(out);
  Tensor result = torch::stable::new_empty(out, {out.size(0), out.size(1), out.size(2)}, ScalarType::Float);
  attnkern::cuda::DeltaParams params{};
  params.grad_out = grad_out.const_data_ptr();
  params.out = out.const_data_ptr();
  params.delta = static_cast<float*>(result.mutable_data_ptr());
  copy_strides(grad_out, params.grad_out_stride);
  copy_strides(out, params.out_stride);
  if (grad_lse) {
    STD_TORCH_CHECK(
        grad_lse->dim() == 3 && grad_lse->scalar_type() == ScalarType::Float && grad_lse->device() == out.device(),
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
  device.check(attnkern::cuda::delta(params, device.stream()));
  return result;
}

void fill_inputs(attnkern::Attention& p, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                 const OptionalTensor& philox_seed, double softmax_scale, double softcap, int64_t window_left,
                 int64_t window_right, int64_t band_offset, double dropout_p, bool tf32) {
  attnkern::fill(p, q, k, v, bias, philox_seed, softmax_scale, softcap, window_left, window_right, band_offset,
                 dropout_p);
  p.tf32 = tf32;
  STD_TORCH_CHECK(p.dtype == attnkern::DType::kBFloat16 || p.dtype == attnkern::DType::kFloat16 ||
                      p.dtype == attnkern::DType::kFloat32,
                  "attnkern: these kernels take bfloat16, float16 and float32");
  constexpr int64_t kMost = int64_t{1} << 30;
  STD_TORCH_CHECK(p.head_dim <= 512 && p.head_dim_v <= 512 && p.seqlen_q < kMost && p.seqlen_k < kMost &&
                      p.batch * p.heads_q < kMost,
                  "attnkern: these kernels take head sizes up to 512, and lengths and batch * heads below 2^30");
}

// A result (batch, heads, length, width) for a kernel to write.
attnkern::View result_view(const Tensor& x, const Tensor& q, int64_t heads, int64_t length, int64_t width,
                           const char* name) {
  check_device(x, q, name);
  STD_TORCH_CHECK(x.dim() == 4 && x.size(0) == q.size(0) && x.size(1) == heads && x.size(2) == length &&
                      x.size(3) == width && (x.stride(3) == 1 || width <= 1),
                  "attnkern: ", name, " has the wrong sizes, or a last stride that isn't 1");
  return attnkern::output_view(x);
}

const float* row_constants(const Tensor& x, const Tensor& q, const char* name) {
  check_device(x, q, name);
  STD_TORCH_CHECK(x.dim() == 3 && x.size(0) == q.size(0) && x.size(1) == q.size(1) && x.size(2) == q.size(2) &&
                      x.scalar_type() == ScalarType::Float && x.is_contiguous(),
                  "attnkern: ", name, " must be float32, contiguous, and of shape (batch, heads, seqlen_q)");
  return static_cast<const float*>(x.const_data_ptr());
}

// How many parts of the keys the kernels for few queries read side by side; 0: the problem isn't for them.
int64_t decode_splits(Tensor q, Tensor k, Tensor v, OptionalTensor bias, OptionalTensor philox_seed,
                      double softmax_scale, double softcap, int64_t window_left, int64_t window_right,
                      int64_t band_offset, double dropout_p, bool tf32) {
  attnkern::Attention p{};
  fill_inputs(p, q, k, v, bias, philox_seed, softmax_scale, softcap, window_left, window_right, band_offset, dropout_p,
              tf32);
  return has_no_query(p) ? 0 : attnkern::cuda::plan_decode(p, Device(q).chip).splits;
}

void forward(Tensor q, Tensor k, Tensor v, OptionalTensor bias, OptionalTensor philox_seed, Tensor out,
             OptionalTensor lse, OptionalTensor workspace, int64_t splits, double softmax_scale, double softcap,
             int64_t window_left, int64_t window_right, int64_t band_offset, double dropout_p, bool tf32) {
  attnkern::Forward p{};
  fill_inputs(p, q, k, v, bias, philox_seed, softmax_scale, softcap, window_left, window_right, band_offset, dropout_p,
              tf32);
  STD_TORCH_CHECK(out.scalar_type() == q.scalar_type(), "attnkern: out must have q's dtype");
  p.out = result_view(out, q, p.heads_q, p.seqlen_q, p.head_dim_v, "out");
  if (lse) p.lse = const_cast<float*>(row_constants(*lse, q, "lse"));
  if (has_no_query(p)) return;
  const Device device(q);
  void* stream = device.stream();
  if (splits == 0) {
    const auto plan = attnkern::cuda::plan_forward_sm90(p, device.chip);
    device.launch(
        plan.refusal == nullptr, [&] { return attnkern::cuda::forward_sm90(p, plan, stream); },
        [&] { return attnkern::cuda::forward(p, stream); });
    return;
  }
  const int64_t needed = attnkern::cuda::decode_workspace(p, static_cast<int>(splits));
  if (needed > 0) {
    STD_TORCH_CHECK(workspace.has_value() && workspace->scalar_type() == ScalarType::Float &&
                        workspace->is_contiguous() && workspace->numel() >= needed,
                    "attnkern: workspace must be contiguous float32 of at least ", needed, " entries");
    check_device(*workspace, q, "workspace");
  }
  STD_TORCH_CHECK(dropout_p == 0 && p.heads_k == p.heads_v, "attnkern: this problem can't be split");
  device.check(attnkern::cuda::decode(
      p, static_cast<int>(splits), needed > 0 ? static_cast<float*>(workspace->mutable_data_ptr()) : nullptr, stream));
}

// The forward kernel for Hopper in an order of its steps that is given (launch.h): for timing, and for tests.
void forward_sm90(Tensor q, Tensor k, Tensor v, Tensor out, int64_t order, double softmax_scale, double softcap,
                  int64_t window_left, int64_t window_right, int64_t band_offset, double dropout_p, bool tf32) {
  attnkern::Forward p{};
  fill_inputs(p, q, k, v, {}, {}, softmax_scale, softcap, window_left, window_right, band_offset, dropout_p, tf32);
  STD_TORCH_CHECK(out.scalar_type() == q.scalar_type(), "attnkern: out must have q's dtype");
  p.out = result_view(out, q, p.heads_q, p.seqlen_q, p.head_dim_v, "out");
  const Device device(q);
  auto plan = attnkern::cuda::plan_forward_sm90(p, device.chip);
  STD_TORCH_CHECK(plan.refusal == nullptr, "attnkern: no kernel for Hopper takes this: ", plan.refusal);
  STD_TORCH_CHECK(order >= 0 && order <= 2 && plan.plain, "attnkern: order must be 0, 1 or 2, and softcap 0");
  plan.order = static_cast<attnkern::cuda::Order>(order);
  device.check(attnkern::cuda::forward_sm90(p, plan, device.stream()));
}

attnkern::cuda::BackwardCall backward_call(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                           const OptionalTensor& bias, const OptionalTensor& philox_seed,
                                           const Tensor& lse, const Tensor& delta, const OptionalTensor& dq,
                                           const OptionalTensor& dk, const OptionalTensor& dv,
                                           const OptionalTensor& dbias, int64_t heads_out, double softmax_scale,
                                           double softcap, int64_t window_left, int64_t window_right,
                                           int64_t band_offset, double dropout_p, bool tf32) {
  attnkern::cuda::BackwardCall p{};
  fill_inputs(p, q, k, v, bias, philox_seed, softmax_scale, softcap, window_left, window_right, band_offset, dropout_p,
              tf32);
  check_device(grad_out, q, "grad_out");
  STD_TORCH_CHECK(grad_out.dim() == 4 && grad_out.size(0) == p.batch && grad_out.size(1) == p.heads_q &&
                      grad_out.size(2) == p.seqlen_q && grad_out.size(3) == p.head_dim_v &&
                      grad_out.scalar_type() == q.scalar_type(),
                  "attnkern: grad_out must have the shape and dtype of the output");
  STD_TORCH_CHECK(p.heads_q == 0 || (heads_out > 0 && p.heads_q % heads_out == 0 && heads_out % p.heads_k == 0 &&
                                     heads_out % p.heads_v == 0),
                  "attnkern: heads_out must divide the heads of q and be a multiple of those of k and v");
  p.grad_out = attnkern::view_of(grad_out);
  p.lse = row_constants(lse, q, "lse");
  p.row_delta = row_constants(delta, q, "delta");
  p.heads_out = heads_out;
  if (dq) {
    STD_TORCH_CHECK(dq->scalar_type() == q.scalar_type(), "attnkern: dq must have q's dtype");
    p.dq = result_view(*dq, q, p.heads_q, p.seqlen_q, p.head_dim, "dq");
  }
  const auto of_keys = [&](const OptionalTensor& grad, int64_t heads, int64_t width, const char* name) {
    if (!grad) return attnkern::View{};
    STD_TORCH_CHECK(grad->scalar_type() == (heads_out > heads ? ScalarType::Float : q.scalar_type()),
                    "attnkern: ", name, " must have q's dtype, or be float32 where its heads are still to be added up");
    return result_view(*grad, q, heads_out, p.seqlen_k, width, name);
  };
  p.dk = of_keys(dk, p.heads_k, p.head_dim, "dk");
  p.dv = of_keys(dv, p.heads_v, p.head_dim_v, "dv");
  if (dbias) {
    STD_TORCH_CHECK(bias.has_value() && p.bias_dtype != attnkern::DType::kBool &&
                        dbias->scalar_type() == bias->scalar_type() && dbias->is_contiguous(),
                    "attnkern: dbias must be contiguous and of the dtype of a floating bias");
    check_device(*dbias, q, "dbias");
    STD_TORCH_CHECK(dbias->dim() == 4, "attnkern: dbias must have 4 dimensions");
    for (int n = 0; n < 4; ++n) {
      STD_TORCH_CHECK(dbias->size(n) == p.bias_size[n], "attnkern: dbias must have the sizes of bias");
    }
    p.dbias = attnkern::output_view(*dbias);
  }
  return p;
}

// How many entries of dq_sums the backward pass takes if it may add up dq in any order; 0: it doesn't.
int64_t backward_sums(Tensor grad_out, Tensor q, Tensor k, Tensor v, OptionalTensor bias, OptionalTensor philox_seed,
                      Tensor lse, Tensor delta, OptionalTensor dq, OptionalTensor dk, OptionalTensor dv,
                      OptionalTensor dbias, int64_t heads_out, double softmax_scale, double softcap,
                      int64_t window_left, int64_t window_right, int64_t band_offset, double dropout_p, bool tf32) {
  const auto p = backward_call(grad_out, q, k, v, bias, philox_seed, lse, delta, dq, dk, dv, dbias, heads_out,
                               softmax_scale, softcap, window_left, window_right, band_offset, dropout_p, tf32);
  return has_no_query(p) ? 0 : attnkern::cuda::backward_sums(p, Device(q).chip);
}

void backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, OptionalTensor bias, OptionalTensor philox_seed,
              Tensor lse, Tensor delta, OptionalTensor dq, OptionalTensor dk, OptionalTensor dv, OptionalTensor dbias,
              OptionalTensor dq_sums, int64_t heads_out, double softmax_scale, double softcap, int64_t window_left,
              int64_t window_right, int64_t band_offset, double dropout_p, bool tf32) {
  auto p = backward_call(grad_out, q, k, v, bias, philox_seed, lse, delta, dq, dk, dv, dbias, heads_out, softmax_scale,
                         softcap, window_left, window_right, band_offset, dropout_p, tf32);
  if (has_no_query(p)) {
    for (OptionalTensor* grad : {&dq, &dk, &dv, &dbias}) {
      if (*grad) torch::stable::zero_(**grad);
    }
    return;
  }
  const Device device(q);
  if (dq_sums) {
    const int64_t needed = attnkern::cuda::backward_sums(p, device.chip);
    STD_TORCH_CHECK(needed > 0, "attnkern: dq_sums must be None for this problem");
    STD_TORCH_CHECK(
        dq_sums->scalar_type() == ScalarType::Float && dq_sums->is_contiguous() && dq_sums->numel() == needed,
        "attnkern: dq_sums must be contiguous float32 of ", needed, " entries");
    check_device(*dq_sums, q, "dq_sums");
    p.dq_sums = static_cast<float*>(dq_sums->mutable_data_ptr());
  }
  void* stream = device.stream();
  device.launch(
      attnkern::cuda::plan_backward_sm90(p, device.chip).refusal == nullptr,
      [&] { return attnkern::cuda::backward_sm90(p, device.chip, stream); },
      [&] { return attnkern::cuda::backward(p, device.chip, stream); });
}

}  // namespace

// Defined here, not in attnkern/ops.py: they exist on CUDA only and have no gradients of their own. Results are written
// into tensors of the caller's: attnkern/backends/cuda.py.
#ifndef ATTNKERN_RECORD_LAUNCHES
STABLE_TORCH_LIBRARY_FRAGMENT(attnkern, m) {
#define ATTNKERN_SCORE \
  "float softmax_scale, float softcap, int window_left, int window_right, int band_offset, float dropout_p, bool tf32"
  m.def("delta(Tensor grad_out, Tensor out, Tensor? grad_lse) -> Tensor");
  m.def(
      "cuda_forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, Tensor(a!) out, "
      "Tensor(b!)? lse, Tensor(c!)? workspace, int splits, " ATTNKERN_SCORE ") -> ()");
  m.def("cuda_forward_sm90(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int order, " ATTNKERN_SCORE ") -> ()");
  m.def("cuda_decode_splits(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, " ATTNKERN_SCORE
        ") -> int");
  m.def(
      "cuda_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, Tensor lse, "
      "Tensor delta, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dbias, Tensor(e!)? dq_sums, "
      "int heads_out, " ATTNKERN_SCORE ") -> ()");
  m.def(
      "cuda_backward_sums(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? philox_seed, Tensor "
      "lse, Tensor delta, Tensor? dq, Tensor? dk, Tensor? dv, Tensor? dbias, int heads_out, " ATTNKERN_SCORE
      ") -> int");
#undef ATTNKERN_SCORE
}
#endif

STABLE_TORCH_LIBRARY_IMPL(attnkern, ATTNKERN_DISPATCH_KEY, m) {
  m.impl("delta", TORCH_BOX(&delta));
  m.impl("cuda_forward", TORCH_BOX(&forward));
  m.impl("cuda_forward_sm90", TORCH_BOX(&forward_sm90));
  m.impl("cuda_decode_splits", TORCH_BOX(&decode_splits));
  m.impl("cuda_backward", TORCH_BOX(&backward));
  m.impl("cuda_backward_sums", TORCH_BOX(&backward_sums));
}
