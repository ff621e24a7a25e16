// csrc/cuda/tile_order.h for the host: tests/test_tile_order.py asks it which tiles come when.
#include "cuda/tile_order.h"

// The (batch * head, block of rows) of every tile in the order in which they are taken, into `tiles`.
// sizes: batch, heads of queries, of keys and values, queries, keys, head size.
extern "C" void tile_order(const int64_t* sizes, int64_t left, int64_t right, const int32_t* ranges, int rows,
                           int multiprocessors, int32_t* tiles) {
  attnkern::Attention p{};
  p.batch = sizes[0], p.heads_q = sizes[1], p.heads_k = p.heads_v = sizes[2];
  p.seqlen_q = sizes[3], p.seqlen_k = sizes[4], p.head_dim = p.head_dim_v = sizes[5];
  p.band = {left, right, 0};
  p.ranges.data = ranges;
  const attnkern::cuda::TileOrder order = attnkern::cuda::tile_order(p, rows, multiprocessors);
  for (int n = 0; n < order.batch_heads * order.row_blocks; ++n) {
    const auto [batch_head, row_block] = order[n];
    tiles[2 * n] = batch_head, tiles[2 * n + 1] = row_block;
  }
}
