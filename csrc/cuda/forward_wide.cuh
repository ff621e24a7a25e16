// The parameters of kernels that split the keys, and the kernels for head sizes from 257 to 512 as forward.cu and
// decode.cu launch them.
#pragma once

#include "cuda/forward.cuh"

namespace attnkern::cuda {

struct SplitParams : ForwardParams {
  float* part_out;  // (batch, heads, seqlen_q, splits, head_dim_v); null if splits is 1
  float* part_lse;  // (batch, heads, seqlen_q, splits)
  int32_t pack;     // query heads whose queries are packed into the rows; 1 with dropout. row_blocks counts packed rows
  int32_t splits;   // of the keys, 1 with dropout
};

struct WideTile {
  int rows, keys, threads, shared_bytes;
};
WideTile wide_tile(DType dtype);
int launch_wide(const Attention& p, const SplitParams& params, void* stream);

}  // namespace attnkern::cuda
