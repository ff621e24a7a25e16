// What the registration (host compiler, torch's stable headers) asks of the kernels (nvcc, no torch header): plain
// structs, plain functions. Every function enqueues on `stream` (a cudaStream_t) of the current device, allocates
// nothing, and returns an error (error_text), 0 for none.
#pragma once

#include <cstdint>
#include <numeric>
#include <string>

#include "common/params.h"
#include "cuda/tile_order.h"

namespace attnkern::cuda {

// delta = rowsum(grad_out * out) - grad_lse, the row constant of the softmax's gradient: dS = P * (dP - delta). The
// columns of grad_out and out lie side by side; delta is (batch, heads_q, seqlen_q), contiguous.
int delta(const Backward& params, float* delta, void* stream);
// The gradient of the sinks by each batch element, (batch, heads_q), contiguous.
int backward_sinks(const Backward& params, const float* delta, float* grads, void* stream);

// How a forward problem is cut: a function of the problem alone.
struct ForwardPlan {
  int head_class;  // width of the tiles; 0: no kernel holds these head sizes
  int rows, keys;  // of a tile of queries, of a block of keys
  int threads, shared_bytes;
  int64_t blocks;
  bool fast_path;    // without softcap, bias, key ranges, dropout and unaligned rows
  bool heads_first;  // neighbouring blocks are heads rather than rows of one head
};
ForwardPlan plan_forward(const Attention& params);

// Within the limits of params.h. The pointers are the device's. A view's strides count in
// a dimension of one entry too: 0 there, or the truth. `out` is written whole.
int forward(const Forward& params, void* stream);

// What plans ask of a device.
struct Chip {
  int multiprocessors;
  int shared_per_multiprocessor, shared_per_block;  // bytes
  int capability;                                   // compute capability times 10
};
// Makes a device this thread's, with a context, and says what it has. Before anything else here; costs next to nothing.
int use_device(int index, Chip& chip);

// The forward pass on Hopper, by TMA and wgmma (forward_sm90.cu), for bfloat16 and float16 with any band and softcap.

// How the two products and the softmax of a warpgroup are interleaved, and the warpgroups with each other.
enum class Schedule : int {
  kSerial,    // Q K^T, softmax, P V, one after the other; only one warpgroup at a time computes its softmax
  kOverlap,   // the softmax of a block of keys runs beside P V of the block before
  kPingPong,  // the same, and the warpgroups take turns at starting their products
};
struct ForwardSm90Plan {
  const char* refusal;                // why these kernels don't take the problem, in words; null: they do
  int head_dim, head_dim_v;           // widths of the tiles
  int rows, keys;                     // of a tile of queries, of a block of keys
  int stages, threads, shared_bytes;  // buffers for K and for V; of a block of threads
  int64_t tiles, blocks;              // the blocks of threads share the tiles
  TileOrder order;                    // in which they take them
  int counters;                       // int32 for that: tiles of unequal length go to the first that is free
  bool fast_path;                     // without softcap and key ranges, and with a scale above 0
  Schedule schedule;                  // any gives the same results
};
ForwardSm90Plan plan_forward_sm90(const Forward& params, const Chip& chip);
// taken: memory for the plan's counters, whatever it holds.
int forward_sm90(const Forward& params, const ForwardSm90Plan& plan, int32_t* taken, void* stream);
// A problem of the fast path by another schedule than the plan's own, put in its place. Weak: null in a library that
// was built without ATTNKERN_SCHEDULES=all.
__attribute__((weak, visibility("hidden"))) int forward_schedules_sm90(const Forward& params,
                                                                       const ForwardSm90Plan& plan, int32_t* taken,
                                                                       void* stream);

// The kernels for few queries and many keys, or splits = 0: not a problem for them. `splits` parts of the keys are read
// side by side, their results kept in a workspace of so many floats and combined by a second kernel.
struct DecodePlan {
  int head_class;
  int rows, keys;  // of a tile of queries, of a block of keys
  int row_tiles;   // into which the queries of a group of heads are packed
  int splits, threads, shared_bytes;
  int64_t blocks;
};
DecodePlan plan_decode(const Attention& params, const Chip& chip);
int64_t decode_workspace(const Forward& params, int splits);
// As `forward`. splits: of plan_decode, at least 1; any other right number gives the same results but for rounding.
int decode(const Forward& params, int splits, float* workspace, void* stream);

// Where Hopper's kernels have stored NaN: a byte for every 16 rows of each gradient, (batch, heads, rows / 16). Null
// for a gradient that isn't wanted, and all of them where nobody asks.
constexpr int kMarkRows = 16;
struct NanMarks {
  uint8_t *dq, *dk, *dv;
};
ATTNKERN_HOST_DEVICE inline int64_t marks_of_head(int64_t rows) { return (rows + kMarkRows - 1) / kMarkRows; }
inline int64_t marks_of_queries(const Attention& p) { return p.batch * p.heads_q * marks_of_head(p.seqlen_q); }
inline int64_t marks_of_keys(const Attention& p) { return p.batch * p.heads_k * marks_of_head(p.seqlen_k); }

// What the backward pass is told of key ranges beside themselves: so many int32 (0 without ranges), for BackwardCall.
int64_t summary_size(const Attention& params);
int summarise_ranges(const Attention& params, int32_t* summary, void* stream);

// Gradients of `forward`. row_delta is what `delta` made (of params.out and
// params.grad_lse, which aren't read here). dk and dv have heads_out heads; where that is more than the tensor's own,
// they are float32 and the caller adds up neighbouring heads. Gradients without data aren't wanted; the others are
// written whole.
struct BackwardCall : Backward {
  const float* row_delta;
  const int32_t* range_summary;  // what `summarise_ranges` made; null without key ranges
  int64_t heads_out;
  float* dq_sums;      // memory for as many as the plan for Hopper says
  NanMarks nan_marks;  // the same
  float* table_sums;   // memory for as many as the other plan says
};
// The marks in memory for as many as the plan says.
inline NanMarks nan_marks_of(const BackwardCall& p, uint8_t* marks) {
  uint8_t* const of_keys = marks + marks_of_queries(p);
  return {p.dq.data == nullptr ? nullptr : marks, p.dk.data == nullptr ? nullptr : of_keys,
          p.dv.data == nullptr ? nullptr : of_keys + marks_of_keys(p)};
}
// How many heads of dk and dv the kernels write: each has one key head and one value head.
inline int64_t heads_out_of(const Attention& p) {
  return p.heads_q / std::gcd(p.heads_q / p.heads_k, p.heads_q / p.heads_v);
}

// One launch of the backward pass: the tile, the threads of a block, and the blocks (0: none is needed).
struct BackwardLaunch {
  int rows, columns;
  int threads, shared_bytes;
  int64_t blocks;
};
// The gradient of a table of distances: the bands of tiles in which it is added up, each in so many walks, and then the
// blocks that put them together.
struct TablePlan {
  int first, bands, walks;
  int64_t sums;  // floats of all bands; 0: the bias isn't a table, or nothing is seen
  int64_t add_up;
};
// How a backward problem is cut: a function of the problem and of the bytes of shared memory that a block may have
// (cudaDevAttrMaxSharedMemoryPerBlockOptin), at least 99 KiB.
struct BackwardPlan {
  int head_class;  // width of the tiles; 0: no kernel holds these head sizes, or there is nothing to do
  bool fast_path;  // without softcap, bias, key ranges, dropout, unaligned rows and heads to be added up
  bool wide;       // tiles for chips with 163 KiB of shared memory per block
  bool chunked;    // the kernels that read the head dimension by chunks: float32, and head sizes above 256
  bool again;      // tiles alone of which a gradient, as it is, holds NaN (`nan_marks`); the others stay. Not chunked
  BackwardLaunch dv;  // of these: dV alone, where a block can't hold it and dK; dkdv then is dK alone
  BackwardLaunch dkdv, dq, dbias;
  TablePlan table;
};
BackwardPlan plan_backward(const BackwardCall& params, int shared_limit, bool again = false);
int backward(const BackwardCall& params, const BackwardPlan& plan, void* stream);

// The backward pass on Hopper, by TMA and wgmma (backward_sm90.cu), for bfloat16 and float16 with any band and softcap.
struct BackwardSm90Plan {
  const char* refusal;             // why these kernels don't take the problem, in words; null: they do
  int head_class;                  // width of the tiles
  bool fast_path;                  // without softcap and key ranges
  BackwardLaunch dkdv, dq;         // without dq_sums
  BackwardLaunch fused, round_dq;  // with them
  int64_t dq_sums;                 // floats in which dq is added up, in any order; 0: none
  // What follows them: the kernels for every chip, on tiles that hold NaN. These kernels multiply queries and keys by
  // a weight of 0 too, and 0 * infinity is NaN; those clear what is excluded. Without blocks where nothing is.
  BackwardPlan again;
  int64_t nan_marks;  // bytes in which these kernels say where they have stored NaN; 0: nobody asks
};
// deterministic: the same bits in every run.
BackwardSm90Plan plan_backward_sm90(const BackwardCall& params, const Chip& chip, bool deterministic);
int backward_sm90(const BackwardCall& params, const BackwardSm90Plan& plan, void* stream);

// Any of the errors above, in a sentence. Beside a cudaError_t there is the driver's refusal of a tensor map, a
// CUresult with its sign changed: the kernels for Hopper can't run then, and others can.
inline bool is_refused_map(int error) { return error < 0; }
std::string error_text(int error, const Chip& chip);

}  // namespace attnkern::cuda
