// How a problem is cut: the plans of launch.h for a problem and a chip that are given as numbers, as JSON. No device,
// no tensor: attnkern/backends/cuda.py asks it about a call, and the tests about chips that aren't there.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <string>
#include <vector>

#include "common/unpack.h"
#include "cuda/kind.h"
#include "cuda/launch.h"
#include "cuda/rows.h"

namespace {

using attnkern::DType, attnkern::View;
using torch::headeronly::ScalarType;
using Numbers = std::vector<int64_t>;

// A tensor by nine numbers: sizes, strides, and the address of its first element, of which only the alignment counts.
View view_of(const Numbers& x, const char* name) {
  STD_TORCH_CHECK(x.size() == 9, "attnkern::cuda_plan: ", name, " must be 4 sizes, 4 strides and an address");
  View view;
  constexpr int64_t kSomewhere = 4096;
  view.data = reinterpret_cast<void*>(kSomewhere + x[8] % kSomewhere);
  for (int n = 0; n < 4; ++n) view.stride[n] = x[n] == 1 ? 0 : x[4 + n];
  return view;
}

// A result as common/operators.h allocates it.
View result(int64_t heads, int64_t length, int64_t width) {
  return {reinterpret_cast<void*>(int64_t{4096}), {heads * length * width, length * width, width, 1}};
}

std::string text(int64_t n) { return std::to_string(n); }
std::string in_pages(const attnkern::Attention& p) { return p.pages.table == nullptr ? "" : ", keys read by pages"; }

// The launches of a call in order: an object of each, of which the tile, the threads and `words` are for people.
class Launches {
 public:
  void add(const std::string& kernel, const std::string& family, int64_t head_dim, int64_t head_dim_v, int64_t rows,
           int64_t columns, int64_t threads, int64_t shared, int64_t blocks, const std::string& words) {
    const auto string = [](const std::string& x) { return "\"" + x + "\""; };
    json_ += (json_.empty() ? "{" : ",\n{") + string("kernel") + ": " + string(kernel) + ", " + string("family") +
             ": " + string(family);
    const std::pair<const char*, int64_t> numbers[] = {
        {"head_dim", head_dim}, {"head_dim_v", head_dim_v}, {"rows", rows},    {"columns", columns},
        {"threads", threads},   {"shared_bytes", shared},   {"blocks", blocks}};
    for (const auto& [name, number] : numbers) json_ += ", " + string(name) + ": " + text(number);
    json_ += ", " + string("words") + ": " + string(words) + "}";
  }
  const std::string& json() const { return json_; }

 private:
  std::string json_;
};

void plan_forward(Launches& launches, const attnkern::Forward& p, const attnkern::cuda::Chip& chip) {
  if (const auto plan = attnkern::cuda::plan_decode(p, chip); plan.splits > 0) {
    std::string words = text(plan.row_tiles) + (plan.row_tiles == 1 ? " tile" : " tiles") + " of queries, ";
    const int64_t bytes = 4 * attnkern::cuda::decode_workspace(p, plan.splits);
    words += plan.splits == 1
                 ? "keys not split"
                 : "keys in " + text(plan.splits) + " splits, workspace of " + text(bytes) + " bytes, then combined";
    words += in_pages(p);
    launches.add("decode", "sm_80", plan.head_class, plan.head_class, plan.rows, plan.keys, plan.threads,
                 plan.shared_bytes, plan.blocks, words);
    return;
  }
  const auto hopper = attnkern::cuda::plan_forward_sm90(p, chip);
  if (hopper.refusal == nullptr) {
    constexpr const char* kSchedules[] = {"serial", "overlapped", "ping-pong"};
    const std::string words = text(hopper.tiles) + " tiles, " + text(hopper.stages) + " stages, " +
                              (hopper.fast_path ? "fast path, " : "generic, ") +
                              kSchedules[static_cast<int>(hopper.schedule)] +
                              (hopper.order.last_rows_first ? ", longest rows first" : "");
    launches.add("forward", "sm_90a", hopper.head_dim, hopper.head_dim_v, hopper.rows, hopper.keys, hopper.threads,
                 hopper.shared_bytes, hopper.blocks, words);
    return;
  }
  const auto plan = attnkern::cuda::plan_forward(p);
  std::string words = std::string(plan.fast_path ? "fast path" : "generic") + in_pages(p) +
                      (plan.heads_first ? ", longest rows first" : "");
  if (chip.capability == 90) words += std::string(" (not sm_90a: ") + hopper.refusal + ")";
  launches.add("forward", "sm_80", plan.head_class, plan.head_class, plan.rows, plan.keys, plan.threads,
               plan.shared_bytes, plan.blocks, words);
}

void plan_backward(Launches& launches, const attnkern::cuda::BackwardCall& p, const attnkern::cuda::Chip& chip,
                   bool deterministic) {
  const auto add = [&](const char* gradients, const char* family, int head_class,
                       const attnkern::cuda::BackwardLaunch& launch, const std::string& words) {
    if (launch.blocks == 0) return;
    launches.add(std::string("backward ") + gradients, family, head_class, head_class, launch.rows, launch.columns,
                 launch.threads, launch.shared_bytes, launch.blocks, words);
  };
  const auto hopper = attnkern::cuda::plan_backward_sm90(p, chip, deterministic);
  if (hopper.refusal == nullptr) {
    const std::string words = hopper.fast_path ? "fast path" : "generic";
    add("dk dv dq", "sm_90a", hopper.head_class, hopper.fused,
        words + ", dq added up in " + text(4 * hopper.dq_sums) + " bytes in any order");
    add("dk dv", "sm_90a", hopper.head_class, hopper.dkdv, words);
    add("dq", "sm_90a", hopper.head_class, hopper.dq, words);
    const std::string again = "generic, narrow, again, for tiles that hold NaN alone";
    add("dk dv", "sm_80", hopper.again.head_class, hopper.again.dkdv, again);
    add("dq", "sm_80", hopper.again.head_class, hopper.again.dq, again);
    return;
  }
  const auto plan = attnkern::cuda::plan_backward(p, chip.shared_per_block);
  std::string words = plan.fast_path ? "fast path" : "generic";
  words += plan.chunked ? ", head size by chunks" : plan.wide ? ", wide" : ", narrow";
  if (chip.capability == 90) words += std::string(" (not sm_90a: ") + hopper.refusal + ")";
  add("dv", "sm_80", plan.head_class, plan.dv, words);
  add(plan.dv.blocks > 0 ? "dk" : "dk dv", "sm_80", plan.head_class, plan.dkdv, words);
  add("dq", "sm_80", plan.head_class, plan.dq, words);
  std::string by_distance;
  if (p.relative) {
    by_distance = "by distance, " + text(plan.table.bands) + " bands in " + text(plan.table.walks) +
                  " walks, added up from " + text(4 * plan.table.sums) + " bytes";
  }
  add("bias", "sm_80", plan.head_class, plan.dbias, by_distance);
}

// chip: compute capability times 10, multiprocessors, bytes of shared memory of a multiprocessor and of a block.
// grad_mask: as attnkern::backward's; 0: no backward pass. bias: empty if there is none. key_ranges: whether there are.
// pages: of a sequence, whose keys and values lie in those that k and v are pools of; 0: they lie in none.
std::string cuda_plan(ScalarType dtype, Numbers q, Numbers k, Numbers v, Numbers bias,
                      ScalarType bias_dtype ATTNKERN_PARAMS(ATTNKERN_AS_ARGUMENT), bool key_ranges, int64_t pages,
                      bool tf32, bool deterministic, int64_t grad_mask, Numbers chip) {
  attnkern::cuda::BackwardCall p{};
  p.dtype = attnkern::dtype_of(dtype);
  p.q = view_of(q, "q"), p.k = view_of(k, "k"), p.v = view_of(v, "v");
  p.batch = q[0], p.heads_q = q[1], p.seqlen_q = q[2], p.head_dim = q[3];
  p.heads_k = k[1], p.seqlen_k = k[2], p.heads_v = v[1], p.head_dim_v = v[3];
  if (!bias.empty()) {
    p.bias = view_of(bias, "bias");
    p.bias_dtype = attnkern::dtype_of(bias_dtype);
    for (int n = 0; n < 4; ++n) p.bias_size[n] = bias[n];
    p.relative = bias[6] < 0;  // as kernels read a table of distances; no tensor has a stride below 0
  }
  static_cast<attnkern::AttentionParams&>(p) = {ATTNKERN_PARAMS(ATTNKERN_AS_VALUE)};
  p.band = attnkern::band_of(window_left, window_right, band_offset);
  p.seed_count = 1, p.tf32 = tf32;
  static const int32_t kSome[2] = {};
  if (key_ranges) p.ranges.data = kSome;
  if (pages > 0) p.pages.table = kSome, p.seqlen_k *= pages;
  STD_TORCH_CHECK(chip.size() == 4 && p.heads_q > 0 && p.heads_k > 0 && p.heads_v > 0,
                  "attnkern::cuda_plan: chip must be 4 numbers, and no tensor without heads");
  attnkern::Forward forward{};
  static_cast<attnkern::Attention&>(forward) = p;
  forward.out = result(p.heads_q, p.seqlen_q, p.head_dim_v);
  attnkern::cuda::Chip limits{};
  limits.capability = static_cast<int>(chip[0]), limits.multiprocessors = static_cast<int>(chip[1]);
  limits.shared_per_multiprocessor = static_cast<int>(chip[2]), limits.shared_per_block = static_cast<int>(chip[3]);
  Launches launches;
  plan_forward(launches, forward, limits);
  const auto kind = attnkern::cuda::kKinds[static_cast<int>(attnkern::cuda::kind_of(
      forward, attnkern::cuda::plan_decode(forward, limits), attnkern::cuda::plan_forward_sm90(forward, limits)))];
  if (grad_mask != 0) {
    p.grad_out = p.out = forward.out;
    p.heads_out = attnkern::cuda::heads_out_of(p);
    if (grad_mask & attnkern::kGradQ) p.dq = result(p.heads_q, p.seqlen_q, p.head_dim);
    if (grad_mask & attnkern::kGradK) p.dk = result(p.heads_out, p.seqlen_k, p.head_dim);
    if (grad_mask & attnkern::kGradV) p.dv = result(p.heads_out, p.seqlen_k, p.head_dim_v);
    if (grad_mask & attnkern::kGradBias) p.dbias = result(p.bias_size[1], p.bias_size[2], p.bias_size[3]);
    plan_backward(launches, p, limits, deterministic);
  }
  const int bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  std::string gathered;
  const auto gather = [&](const View& view, int64_t width, const char* name) {
    if (attnkern::cuda::rows_of(view, width, bytes).vector) return;
    gathered += std::string(gathered.empty() ? "\"" : ", \"") + name + "\"";
  };
  gather(p.q, p.head_dim, "query"), gather(p.k, p.head_dim, "key"), gather(p.v, p.head_dim_v, "value");
  return "{\"launches\": [" + launches.json() + "], \"gathered\": [" + gathered + "], \"kind\": \"" + kind + "\"}";
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnkern, CompositeExplicitAutograd, m) { m.impl("cuda_plan", TORCH_BOX(&cuda_plan)); }
