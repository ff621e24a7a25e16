// What a kernel is asked to do: plain structs without torch, shared by the operators and the kernels.
#pragma once

#include <cstdint>

#include "band.h"

namespace attnkern {

enum class DType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16, kBool };

// Of a floating-point type.
inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// The numbers that make a probability of a score: what an operator takes of them, in its order, as AttentionParams in
// attnkern/params.py. ATTNKERN_PARAMS(X) is X(type, name) of each; AS_ARGUMENT and AS_VALUE make a function's
// parameters of them, after others, and a value of those again.
#define ATTNKERN_PARAMS(X) \
  X(double, softmax_scale) \
  X(double, softcap) X(int64_t, window_left) X(int64_t, window_right) X(int64_t, band_offset) X(double, dropout_p)
#define ATTNKERN_AS_FIELD(type, name) type name;
#define ATTNKERN_AS_ARGUMENT(type, name) , type name
#define ATTNKERN_AS_VALUE(type, name) name,

struct AttentionParams {
  ATTNKERN_PARAMS(ATTNKERN_AS_FIELD)
};
#define ATTNKERN_AS_ONE(type, name) +1
constexpr int kParamCount = 0 ATTNKERN_PARAMS(ATTNKERN_AS_ONE);

// The tensors of a call, as every operator takes them, in this order: as Inputs in attnkern/signatures.py. Where the
// macros above make arguments, Tensor and OptionalTensor must be types.
#define ATTNKERN_TENSORS_AFTER_Q(X) \
  X(Tensor, k)                      \
  X(Tensor, v)                      \
  X(OptionalTensor, bias)           \
  X(OptionalTensor, sinks)          \
  X(OptionalTensor, key_ranges) X(OptionalTensor, philox_seed) X(OptionalTensor, block_table)
#define ATTNKERN_TENSORS(X) X(Tensor, q) ATTNKERN_TENSORS_AFTER_Q(X)
constexpr int kTensorCount = 0 ATTNKERN_TENSORS(ATTNKERN_AS_ONE);
#undef ATTNKERN_AS_ONE

// Bits of grad_mask: which gradients a backward operator is asked for.
enum GradBit : int64_t { kGradQ = 1, kGradK = 2, kGradV = 4, kGradBias = 8, kGradSinks = 16 };

// What GPU kernels take: head sizes up to the first; lengths, and batch * heads, up to the second.
constexpr int64_t kMaxHeadDim = 512, kMaxLength = (int64_t{1} << 30) - 1;
// Rows of queries, over the query heads that share a key head, go to the kernels for decoding: on GPUs up to
// kDecodeMaxRows of any kind (with more the forward kernel has enough blocks, or enough work per key), and up to
// kSharedMaxRows where no head has more than kSharedMaxQueries of them: the forward kernels would read the keys for
// each head, and multiply them with tiles that are mostly empty.
constexpr int64_t kDecodeMaxRows = 64, kSharedMaxRows = 256, kSharedMaxQueries = 16;
constexpr bool shares_rows(int64_t heads, int64_t queries) {
  return heads > 1 && queries <= kSharedMaxQueries && heads * queries <= kSharedMaxRows;
}

// A 4-D tensor (batch, head, row, column); strides in elements. A broadcast dimension has stride 0.
struct View {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
};

// A logit of each head that takes part in the softmax of its rows and has no value.
struct Sinks {
  const void* data = nullptr;  // float (double for kFloat64); null: none
  int64_t stride[2] = {0, 0};  // of batch and head, in numbers
  int64_t batch = 1;           // entries of the batch for which they differ
};

// Which keys a row attends to, besides the band: those of one range or of two, [begin, end) of int32 side by side.
struct KeyRanges {
  const int32_t* data = nullptr;            // null: all keys
  int64_t stride[3] = {0, 0, 0};            // of batch, head and row, in numbers; 0 where they share
  int64_t count = 0, batch = 1, heads = 1;  // ranges of a row; for how many entries of the batch and heads they differ
};

// Where keys and values lie that come in pages: row `key` of entry b of the batch is row `key % size` of page
// table[b][key / size]. The pages of a pool have one size, a power of two that is kLeastPage or more.
struct Pages {
  const int32_t* table = nullptr;  // null: there are none
  int64_t stride = 0;              // of the batch, in numbers
  int64_t count = 0;               // pages of the pool; a number that isn't one of a page counts as 0
  int64_t first = 0;               // which row of the table is the call's key 0
  int32_t shift = 0;               // log2 of the rows of a page
};
constexpr int64_t kLeastPage = 16;

// softmax(cap(scale * q k^T) + bias within the band and the ranges) v, for the shapes below.
// Query head h reads key head h / (heads_q / heads_k) and value head h / (heads_q / heads_v).
struct Attention : AttentionParams {  // with dropout_p as entries are drawn
  DType dtype;
  int64_t batch, heads_q, heads_k, heads_v, seqlen_q, seqlen_k, head_dim, head_dim_v;
  View q, k, v;  // (B, Hq, L, E), (B, Hk, S, E), (B, Hv, S, Ev): any strides
  Pages pages;   // if there are any, k is (pages, Hk, size, E) and v (pages, Hv, size, Ev); forward pass only
  View bias;     // (B|1, Hq|1, L|1, S|1), data null if there is none; bool: true = attend
  DType bias_dtype;
  int64_t bias_size[4];
  bool bits;         // the bias is bool, in bits: key j is bit j % 8 of byte j / 8 of its row, and strides are in bytes
  bool relative;     // the bias is a table (B|1, Hq|1, L + S - 1) by j - i: its view has row stride -1, column stride 1
  Sinks sinks;       // (B|1, Hq)
  KeyRanges ranges;  // (B|1, Hq|1, L|1, 1|2, 2)
  Band band;         // of its window
  // Heads of an entry of the batch and rows of a head that lse, grad_lse and dsinks have, where a call is one of some
  // heads and rows of a larger one (on CPUs); 0: as many as the call.
  int64_t all_heads = 0, all_rows = 0;
  const int64_t* seeds;  // seed_count keys for equal consecutive groups of the batch
  int64_t seed_count;
  bool tf32;  // GPU kernels for kFloat32: whether products may round their factors to tf32
};

// Where lse and grad_lse have the number of a row.
inline int64_t lse_index(const Attention& p, int64_t batch, int64_t head, int64_t row) {
  const int64_t heads = p.all_heads == 0 ? p.heads_q : p.all_heads, rows = p.all_rows == 0 ? p.seqlen_q : p.all_rows;
  return (batch * heads + head) * rows + row;
}

// Whether there is no score: then kernels have nothing to do, and may divide by a count that is 0.
inline bool has_no_score(const Attention& p) {
  return p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0 || p.seqlen_k == 0;
}

struct Forward : Attention {
  View out;   // (B, Hq, L, Ev), column stride 1
  void* lse;  // (B, Hq, L) contiguous, natural log, float (double for kFloat64); null if not wanted
};

struct Backward : Attention {
  View grad_out, out;  // (B, Hq, L, Ev), any strides
  const void* lse;
  const void* grad_lse;  // (B, Hq, L) contiguous or null
  View dq, dk, dv;       // column stride 1; data null if not wanted
  View dbias;            // contiguous, the bias's shape and dtype; data null if not wanted
  void* dsinks;          // (sinks.batch, Hq) contiguous, the type of sinks; null if not wanted
};

}  // namespace attnkern
