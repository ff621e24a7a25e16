// Tensors -> the structs of params.h, for the operators of every device. Checks here guard the kernels against a caller
// that went around attnkern.problem, which is where users' errors are found and explained.
//
// A Tensor is torch::stable::Tensor (only torch's stable C ABI is used) or what common/direct.h makes of a Python
// object.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "common/params.h"
#include "common/philox.h"

namespace attnkern {

using OptionalTensor = std::optional<torch::stable::Tensor>;

// The tensors of a call.
template <class Tensor>
struct Inputs {
  using OptionalTensor = std::optional<Tensor>;
  ATTNKERN_TENSORS(ATTNKERN_AS_FIELD)
};

inline DType dtype_of(torch::headeronly::ScalarType type) {
  switch (type) {
    case torch::headeronly::ScalarType::Float: return DType::kFloat32;
    case torch::headeronly::ScalarType::Double: return DType::kFloat64;
    case torch::headeronly::ScalarType::BFloat16: return DType::kBFloat16;
    case torch::headeronly::ScalarType::Half: return DType::kFloat16;
    case torch::headeronly::ScalarType::Bool: return DType::kBool;
    default: STD_TORCH_CHECK(false, "attnkern: unsupported dtype"); return DType::kBool;
  }
}

template <class Tensor>
DType dtype_of(const Tensor& tensor) {
  return dtype_of(tensor.scalar_type());
}

template <class Tensor>
View view_of(const Tensor& tensor) {
  View view;
  view.data = tensor.data_ptr();
  for (int dim = 0; dim < 4; ++dim) view.stride[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
  return view;
}

// Strides of our own results: with a size of 1 they are never used, and 0 elsewhere would be wrong.
template <class Tensor>
View output_view(const Tensor& tensor) {
  View view = view_of(tensor);
  view.stride[3] = 1;
  return view;
}

template <class Tensor>
void check_device(const Tensor& x, const Tensor& q, const char* name) {
  STD_TORCH_CHECK(x.device() == q.device(), "attnkern: ", name, " must be on q's device");
}
template <class Tensor>
void check_device(const std::optional<Tensor>& x, const Tensor& q, const char* name) {
  if (x.has_value()) check_device(*x, q, name);
}

// The band of any three numbers, by numbers that Band may add up: what lies beyond kUnbounded is out of reach of every
// index, as kUnbounded is.
inline Band band_of(int64_t left, int64_t right, int64_t offset) {
  constexpr int64_t kFar = kUnbounded / 4;
  using Wide = __int128;
  const auto within = [](Wide x) { return static_cast<int64_t>(std::clamp(x, Wide{-kUnbounded}, Wide{kUnbounded})); };
  if (-kFar <= offset && offset <= kFar) return {within(left), within(right), offset};
  // The offset becomes part of both bounds. None moves a bound that isn't there.
  return {left >= kUnbounded ? kUnbounded : within(Wide{left} - offset),
          right >= kUnbounded ? kUnbounded : within(Wide{right} + offset), 0};
}

inline torch::headeronly::ScalarType lse_type(const Attention& p) {
  return p.dtype == DType::kFloat64 ? torch::headeronly::ScalarType::Double : torch::headeronly::ScalarType::Float;
}

// Bytes of a row of bits: whole words of 64 keys.
inline int64_t bytes_of_bits(int64_t seqlen_k) { return (seqlen_k + 63) / 64 * 8; }

template <class Tensor>
void fill(Attention& p, const Inputs<Tensor>& inputs, const AttentionParams& params) {
#define ATTNKERN_CHECK_DEVICE(type, name) check_device(inputs.name, inputs.q, #name);
  ATTNKERN_TENSORS_AFTER_Q(ATTNKERN_CHECK_DEVICE)
#undef ATTNKERN_CHECK_DEVICE
  const Tensor &q = inputs.q, &k = inputs.k, &v = inputs.v;
  const std::optional<Tensor>&bias = inputs.bias, &sinks = inputs.sinks, &key_ranges = inputs.key_ranges,
        &philox_seed = inputs.philox_seed;
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "attnkern: q, k and v must have 4 dimensions");
  p.dtype = dtype_of(q);
  STD_TORCH_CHECK(p.dtype != DType::kBool && k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                  "attnkern: q, k and v must have one floating dtype");
  p.batch = q.size(0), p.heads_q = q.size(1), p.seqlen_q = q.size(2), p.head_dim = q.size(3);
  p.heads_k = k.size(1), p.seqlen_k = k.size(2), p.heads_v = v.size(1), p.head_dim_v = v.size(3);
  const bool in_pages = inputs.block_table.has_value();
  STD_TORCH_CHECK(k.size(0) == v.size(0) && k.size(3) == p.head_dim && v.size(2) == p.seqlen_k &&
                      (in_pages || k.size(0) == p.batch),
                  "attnkern: the sizes of q, k and v do not fit");
  p.pages = {};
  if (in_pages) {
    const Tensor& table = *inputs.block_table;
    const int64_t size = k.size(2), count = k.size(0), each = table.dim() == 2 ? table.size(1) : 0;
    STD_TORCH_CHECK(table.scalar_type() == torch::headeronly::ScalarType::Int && table.dim() == 2 &&
                        table.size(0) == p.batch && (each <= 1 || table.stride(1) == 1) && (count > 0 || each == 0),
                    "attnkern: block_table must be int32 (B, pages of a sequence), dense in the last dimension");
    STD_TORCH_CHECK(size >= kLeastPage && (size & (size - 1)) == 0,
                    "attnkern: the rows of a page must be a power of two from ", kLeastPage, " on, got ", size);
    p.pages = {static_cast<const int32_t*>(table.data_ptr()), table.size(0) == 1 ? 0 : table.stride(0), count, 0,
               static_cast<int32_t>(__builtin_ctzll(static_cast<unsigned long long>(size)))};
    p.seqlen_k = each * size;
  }
  STD_TORCH_CHECK(
      p.heads_q == 0 || (p.heads_k > 0 && p.heads_v > 0 && p.heads_q % p.heads_k == 0 && p.heads_q % p.heads_v == 0),
      "attnkern: the heads of k and v must divide those of q");
  p.q = view_of(q), p.k = view_of(k), p.v = view_of(v);
  p.bias = {};
  p.relative = p.bits = false;
  p.bias_dtype = DType::kBool;
  if (bias.has_value()) {
    p.relative = bias->dim() == 3;
    STD_TORCH_CHECK(p.relative || bias->dim() == 4,
                    "attnkern: bias must have 4 dimensions (3 as a table of distances)");
    const auto type = bias->scalar_type();
    p.bits = !p.relative && type == torch::headeronly::ScalarType::Byte;
    STD_TORCH_CHECK(type == torch::headeronly::ScalarType::Bool || type == torch::headeronly::ScalarType::Float ||
                        type == q.scalar_type() || p.bits,
                    "attnkern: bias must be bool, float32 or of q's dtype");
    p.bias_dtype = p.bits ? DType::kBool : dtype_of(type);
    const int64_t full[4] = {p.batch, p.heads_q, p.seqlen_q, p.seqlen_k}, distances = p.seqlen_q + p.seqlen_k - 1;
    STD_TORCH_CHECK(
        !p.bits || (bias->size(3) == bytes_of_bits(p.seqlen_k) && (bias->stride(3) == 1 || p.seqlen_k == 0)),
        "attnkern: a bias of bits must have 8 bytes for each 64 keys, side by side");
    for (int dim = 0; dim < 4; ++dim) {
      p.bias_size[dim] = (p.relative && dim > 1) || (p.bits && dim == 3) ? full[dim] : bias->size(dim);
      STD_TORCH_CHECK(p.bias_size[dim] == full[dim] || p.bias_size[dim] == 1, "attnkern: the sizes of bias do not fit");
    }
    if (p.relative) {
      STD_TORCH_CHECK(
          p.bias_dtype != DType::kBool && bias->size(2) == (distances < 0 ? 0 : distances) &&
              (bias->stride(2) == 1 || bias->size(2) <= 1),
          "attnkern: a bias of 3 dimensions must be floating point, (B or 1, Hq or 1, L + S - 1), and dense "
          "in the last one");
      const auto between = [&](int dim) { return bias->size(dim) == 1 ? 0 : bias->stride(dim); };
      p.bias = {static_cast<char*>(bias->data_ptr()) + (p.seqlen_q - 1) * bytes_of(p.bias_dtype),
                {between(0), between(1), -1, 1}};
    } else {
      p.bias = view_of(*bias);
    }
  }
  p.sinks = {};
  if (sinks.has_value()) {
    const int64_t dims = sinks->dim();  // (without a batch only past the dispatcher: common/direct.h)
    STD_TORCH_CHECK((dims == 1 || (dims == 2 && (sinks->size(0) == p.batch || sinks->size(0) == 1))) &&
                        sinks->size(dims - 1) == p.heads_q && sinks->scalar_type() == lse_type(p),
                    "attnkern: sinks must be (B or 1, Hq) and float32 (float64 for float64)");
    const bool by_batch = dims == 2 && sinks->size(0) > 1;
    p.sinks = {sinks->data_ptr(), {by_batch ? sinks->stride(0) : 0, sinks->stride(dims - 1)}, by_batch ? p.batch : 1};
  }
  p.ranges = {};
  if (key_ranges.has_value()) {
    const Tensor& x = *key_ranges;
    const int64_t rows[3] = {p.batch, p.heads_q, p.seqlen_q};
    bool fits = x.dim() == 5 && x.scalar_type() == torch::headeronly::ScalarType::Int &&
                (x.size(3) == 1 || x.size(3) == 2) && x.size(4) == 2 && x.stride(4) == 1 &&
                (x.stride(3) == 2 || x.size(3) == 1);
    for (int dim = 0; fits && dim < 3; ++dim) {
      fits = x.size(dim) == 1 || x.size(dim) == rows[dim];
      p.ranges.stride[dim] = x.size(dim) == 1 ? 0 : x.stride(dim);
    }
    STD_TORCH_CHECK(fits,
                    "attnkern: key_ranges must be int32 (B or 1, Hq or 1, L or 1, 1 or 2, 2), contiguous in the "
                    "last two dimensions");
    p.ranges.data = static_cast<const int32_t*>(x.data_ptr());
    p.ranges.batch = x.size(0), p.ranges.heads = x.size(1), p.ranges.count = x.size(3);
  }
  const double softcap = params.softcap, dropout_p = params.dropout_p;
  STD_TORCH_CHECK(std::isfinite(params.softmax_scale), "attnkern: softmax_scale must be a finite number, got ",
                  params.softmax_scale);
  const auto holds = [&](auto computed) {
    using Limits = std::numeric_limits<decltype(computed)>;
    return softcap == 0 || (softcap >= Limits::min() && softcap <= Limits::max());
  };
  STD_TORCH_CHECK(p.dtype == DType::kFloat64 ? holds(double{}) : holds(float{}),
                  "attnkern: softcap must be 0 or a positive normal number of ",
                  p.dtype == DType::kFloat64 ? "float64" : "float32", ", got ", softcap);
  static_cast<AttentionParams&>(p) = params;
  p.band = band_of(params.window_left, params.window_right, params.band_offset);
  STD_TORCH_CHECK(dropout_p >= 0 && dropout_p <= 1, "attnkern: dropout_p must be between 0 and 1, got ", dropout_p);
  p.dropout_p = philox::threshold(dropout_p) / 65536.0;  // the probability that entries are dropped with
  p.seeds = nullptr;
  p.seed_count = 1;
  if (p.dropout_p > 0) {
    STD_TORCH_CHECK(philox_seed.has_value() && philox_seed->dim() == 1 &&
                        philox_seed->scalar_type() == torch::headeronly::ScalarType::Long &&
                        philox_seed->is_contiguous() && philox_seed->numel() > 0 && p.batch % philox_seed->numel() == 0,
                    "attnkern: dropout needs philox_seed, a contiguous int64 vector whose length divides the batch");
    p.seeds = static_cast<const int64_t*>(philox_seed->data_ptr());
    p.seed_count = philox_seed->numel();
  }
}

}  // namespace attnkern
