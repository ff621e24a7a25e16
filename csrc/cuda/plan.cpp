// How a problem is cut, in words: the plans of launch.h for a problem and a chip that are given as numbers. No device,
// no tensor: attnkern.explain asks it about a call, and the tests about chips that aren't there.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "common/params.h"
#include "cuda/launch.h"

namespace {

using attnkern::DType, attnkern::View;
using Numbers = std::vector<int64_t>;

DType dtype_of(const std::string& name) {
  const std::pair<const char*, DType> known[] = {{"float32", DType::kFloat32},
                                                 {"bfloat16", DType::kBFloat16},
                                                 {"float16", DType::kFloat16},
                                                 {"bool", DType::kBool}};
  for (const auto& [text, dtype] : known) {
    if (name == text) return dtype;
  }
  STD_TORCH_CHECK(false, "attnkern::cuda_plan: dtype must be float32, bfloat16, float16 or bool, got ", name);
}

// A tensor by nine numbers: sizes, strides, and the address of its first element, of which only the alignment counts.
View view_of(const Numbers& x, const char* name) {
  STD_TORCH_CHECK(x.size() == 9, "attnkern::cuda_plan: ", name, " must be 4 sizes, 4 strides and an address");
  View view;
  constexpr int64_t kSomewhere = 4096;
  view.data = reinterpret_cast<void*>(kSomewhere + x[8] % kSomewhere);
  for (int n = 0; n < 4; ++n) view.stride[n] = x[n] == 1 ? 0 : x[4 + n];
  return view;
}

// A result as backends/cuda.py allocates it.
View result(int64_t heads, int64_t length, int64_t width) {
  return {reinterpret_cast<void*>(int64_t{4096}), {heads * length * width, length * width, width, 1}};
}

std::string text(int64_t n) { return std::to_string(n); }

std::string tile(int head_class, int64_t rows, int64_t columns, const char* names, int64_t threads, int64_t shared,
                 int64_t blocks) {
  return text(rows) + " x " + text(columns) + " " + names + ", head size up to " + text(head_class) + ", " +
         text(threads) + " threads, " + text(shared) + " bytes of shared memory, " + text(blocks) + " blocks";
}

std::string forward_line(const attnkern::Forward& p, const attnkern::cuda::Chip& chip) {
  if (const auto plan = attnkern::cuda::plan_decode(p, chip); plan.splits > 0) {
    std::string line = "decode, sm_80: " + tile(plan.head_class, plan.rows, plan.keys, "packed queries and keys",
                                                plan.threads, plan.shared_bytes, plan.blocks);
    line += ", " + text(plan.row_tiles) + (plan.row_tiles == 1 ? " tile" : " tiles") + " of queries";
    if (plan.splits == 1) return line + ", keys not split";
    const int64_t bytes = 4 * attnkern::cuda::decode_workspace(p, plan.splits);
    return line + ", keys in " + text(plan.splits) + " splits, workspace of " + text(bytes) + " bytes, then combined";
  }
  const auto hopper = attnkern::cuda::plan_forward_sm90(p, chip);
  if (hopper.refusal == nullptr) {
    constexpr const char* kOrders[] = {", serial", ", overlapped", ", ping-pong"};
    return "forward, sm_90a: " + text(hopper.rows) + " x " + text(hopper.keys) +
           " queries and keys, head sizes up to " + text(hopper.head_dim) + " and " + text(hopper.head_dim_v) + ", " +
           text(hopper.stages) + " stages, " + text(hopper.threads) + " threads, " + text(hopper.shared_bytes) +
           " bytes of shared memory, " + text(hopper.blocks) + " blocks for " + text(hopper.tiles) + " tiles" +
           (hopper.plain ? ", plain" : ", with softcap") + kOrders[static_cast<int>(hopper.order)] +
           (hopper.last_rows_first ? ", longest rows first" : "");
  }
  const auto plan = attnkern::cuda::plan_forward(p);
  std::string line = "forward, sm_80: " + tile(plan.head_class, plan.rows, plan.keys, "queries and keys", plan.threads,
                                               plan.shared_bytes, plan.blocks);
  line += std::string(plan.plain ? ", plain" : ", general") + (plan.heads_first ? ", longest rows first" : "");
  return chip.capability == 90 ? line + " (not sm_90a: " + hopper.refusal + ")" : line;
}

std::string backward_lines(attnkern::cuda::BackwardCall p, const attnkern::cuda::Chip& chip, bool deterministic) {
  std::string lines = "\nbackward, any chip: delta = rowsum(grad_out * out) first";
  const auto add = [&](const char* name, const char* family, const char* names, int head_class,
                       const attnkern::cuda::BackwardLaunch& launch, const std::string& variant) {
    if (launch.blocks == 0) return;
    lines += std::string("\nbackward ") + name + ", " + family + ": ";
    lines += tile(head_class, launch.rows, launch.columns, names, launch.threads, launch.shared_bytes, launch.blocks);
    lines += variant;
  };
  constexpr const char* kKeyRows = "keys and queries";
  constexpr const char* kQueryRows = "queries and keys";
  const int64_t sums = deterministic ? 0 : attnkern::cuda::backward_sums(p, chip);
  if (sums > 0) p.dq_sums = reinterpret_cast<float*>(int64_t{4096});
  const auto hopper = attnkern::cuda::plan_backward_sm90(p, chip);
  if (hopper.refusal == nullptr) {
    const char* variant = hopper.plain ? ", plain" : ", with softcap";
    if (sums > 0) {
      const std::string added = ", dq added up in " + text(4 * sums) + " bytes in any order";
      add("dk dv dq", "sm_90a", kKeyRows, hopper.head_class, hopper.fused, variant + added);
      return lines;
    }
    add("dk dv", "sm_90a", kKeyRows, hopper.head_class, hopper.dkdv, variant);
    add("dq", "sm_90a", kQueryRows, hopper.head_class, hopper.dq, variant);
    return lines;
  }
  const auto plan = attnkern::cuda::plan_backward(p, chip.shared_per_block);
  std::string variant = plan.plain ? ", plain" : ", general";
  variant += plan.chunked ? ", head size by chunks" : plan.wide ? ", wide" : ", narrow";
  if (chip.capability == 90) variant += std::string(" (not sm_90a: ") + hopper.refusal + ")";
  add("dv", "sm_80", kKeyRows, plan.head_class, plan.dv, variant);
  add(plan.dv.blocks > 0 ? "dk" : "dk dv", "sm_80", kKeyRows, plan.head_class, plan.dkdv, variant);
  add("dq", "sm_80", kQueryRows, plan.head_class, plan.dq, variant);
  add("bias", "sm_80", kQueryRows, plan.head_class, plan.dbias, "");
  return lines;
}

// chip: compute capability times 10, multiprocessors, bytes of shared memory of a multiprocessor and of a block.
// grad_mask: as attnkern::backward's; 0: no backward pass. bias: empty if there is none.
std::string cuda_plan(std::string dtype, Numbers q, Numbers k, Numbers v, Numbers bias, std::string bias_dtype,
                      double softmax_scale, double softcap, int64_t window_left, int64_t window_right,
                      int64_t band_offset, double dropout_p, bool tf32, bool deterministic, int64_t grad_mask,
                      Numbers chip) {
  attnkern::cuda::BackwardCall p{};
  p.dtype = dtype_of(dtype);
  p.q = view_of(q, "q"), p.k = view_of(k, "k"), p.v = view_of(v, "v");
  p.batch = q[0], p.heads_q = q[1], p.seqlen_q = q[2], p.head_dim = q[3];
  p.heads_k = k[1], p.seqlen_k = k[2], p.heads_v = v[1], p.head_dim_v = v[3];
  if (!bias.empty()) {
    p.bias = view_of(bias, "bias");
    p.bias_dtype = dtype_of(bias_dtype);
    for (int n = 0; n < 4; ++n) p.bias_size[n] = bias[n];
  }
  p.softmax_scale = softmax_scale, p.softcap = softcap;
  p.band = {window_left, window_right, band_offset};
  p.dropout_p = dropout_p, p.seed_count = 1, p.tf32 = tf32;
  STD_TORCH_CHECK(chip.size() == 4 && p.heads_q > 0 && p.heads_k > 0 && p.heads_v > 0,
                  "attnkern::cuda_plan: chip must be 4 numbers, and no tensor without heads");
  attnkern::Forward forward{};
  static_cast<attnkern::Attention&>(forward) = p;
  forward.out = result(p.heads_q, p.seqlen_q, p.head_dim_v);
  attnkern::cuda::Chip limits{};
  limits.capability = static_cast<int>(chip[0]), limits.multiprocessors = static_cast<int>(chip[1]);
  limits.shared_per_multiprocessor = static_cast<int>(chip[2]), limits.shared_per_block = static_cast<int>(chip[3]);
  std::string lines = forward_line(forward, limits);
  if (grad_mask == 0) return lines;
  p.grad_out = p.out = forward.out;
  p.heads_out = p.heads_q / std::gcd(p.heads_q / p.heads_k, p.heads_q / p.heads_v);
  if (grad_mask & 1) p.dq = result(p.heads_q, p.seqlen_q, p.head_dim);
  if (grad_mask & 2) p.dk = result(p.heads_out, p.seqlen_k, p.head_dim);
  if (grad_mask & 4) p.dv = result(p.heads_out, p.seqlen_k, p.head_dim_v);
  if (grad_mask & 8) p.dbias = result(p.bias_size[1], p.bias_size[2], p.bias_size[3]);
  return lines + backward_lines(p, limits, deterministic);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(attnkern, m) {
  m.def(
      "cuda_plan(str dtype, int[] q, int[] k, int[] v, int[] bias, str bias_dtype, float softmax_scale, float softcap, "
      "int window_left, int window_right, int band_offset, float dropout_p, bool tf32, bool deterministic, "
      "int grad_mask, int[] chip) -> str");
}
STABLE_TORCH_LIBRARY_IMPL(attnkern, CompositeExplicitAutograd, m) { m.impl("cuda_plan", TORCH_BOX(&cuda_plan)); }
