// What a kernel is asked to do: plain structs without torch, shared by the operators and the kernels.
#pragma once

#include <cstdint>

#include "band.h"

namespace attnkern {

enum class DType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16, kBool };

// A 4-D tensor (batch, head, row, column); strides in elements. A broadcast dimension has stride 0.
struct View {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
};

// softmax(cap(scale * q k^T) + bias within the band) v, for the shapes below.
// Query head h reads key head h / (heads_q / heads_k) and value head h / (heads_q / heads_v).
struct Attention {
  DType dtype;
  int64_t batch, heads_q, heads_k, heads_v, seqlen_q, seqlen_k, head_dim, head_dim_v;
  View q, k, v;  // (B, Hq, L, E), (B, Hk, S, E), (B, Hv, S, Ev): any strides
  View bias;     // (B|1, Hq|1, L|1, S|1), data null if there is none; bool: true = attend
  DType bias_dtype;
  int64_t bias_size[4];
  double softmax_scale;
  double softcap;  // 0: off
  Band band;
  double dropout_p;      // 0: off
  const int64_t* seeds;  // seed_count keys for equal consecutive groups of the batch
  int64_t seed_count;
  bool tf32;  // GPU kernels for kFloat32: whether products may round their factors to tf32
};

struct Forward : Attention {
  View out;   // (B, Hq, L, Ev), column stride 1
  void* lse;  // (B, Hq, L) contiguous, natural log, float (double for kFloat64); null if not wanted
};

struct Backward : Attention {
  View grad_out, out;  // (B, Hq, L, Ev), any strides
  const void* lse;
  const void* grad_lse;  // (B, Hq, L) contiguous or null
  View dq, dk, dv;       // column stride 1; data null if not wanted
  View dbias;            // contiguous, shape bias_size, bias's dtype; data null if not wanted
};

}  // namespace attnkern
