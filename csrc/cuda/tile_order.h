// The order in which Hopper's forward kernel takes its tiles of queries: the longest first, as far as that is known,
// and neighbours that share keys. Plain C++ without dependencies: host and device code share it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/params.h"

namespace attnkern::cuda {

struct TileOrder {
  int32_t batch_heads, row_blocks;
  int32_t section_heads;  // L2 head swizzle: heads whose tiles come together, row block by row block
  int32_t last_section;   // first head of the last section, which has the heads that are left, too
  bool last_rows_first;   // they have the most keys
  bool unequal;           // not all tiles have the same number of keys

  struct Tile {
    int batch_head, row_block;
  };
  ATTNKERN_HOST_DEVICE Tile operator[](int tile) const {
    const int section = tile / (section_heads * row_blocks) * section_heads;
    const int first_head = section < last_section ? section : last_section;
    const int heads = first_head < last_section ? section_heads : batch_heads - last_section;
    const int index = tile - first_head * row_blocks;
    const int row_block = index / heads;
    return {first_head + index % heads, last_rows_first ? row_blocks - 1 - row_block : row_block};
  }
};

// The keys and values of how many heads the L2 cache (50 MB) holds.
inline int64_t cached_heads(const Attention& p) {
  constexpr int64_t kCache = int64_t{32} << 20;
  const int64_t bytes = std::max<int64_t>(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * 2);
  int64_t heads = 1;
  while (2 * heads * bytes <= kCache && heads < p.batch * p.heads_q) heads *= 2;
  return heads;
}

// Tiles are given out in order, each to the first multiprocessor that is free, so the last section needs tiles enough
// for all to end with short ones. Causal rows shorten evenly, and few will do. Of a window only the first rows are
// short, and of key ranges nothing is known here: many tiles even that out. Their rows come last first, as causal
// ranges want it. The sections before it have what the cache holds: a batch of short sequences, read anew from memory
// for every block of rows, would be bound by that.
inline TileOrder tile_order(const Attention& p, int rows, int multiprocessors) {
  TileOrder order{};
  const int64_t batch_heads = p.batch * p.heads_q, row_blocks = (p.seqlen_q + rows - 1) / rows;
  const bool ranges = p.ranges.data != nullptr;
  order.batch_heads = static_cast<int32_t>(batch_heads), order.row_blocks = static_cast<int32_t>(row_blocks);
  order.unequal = ranges || p.band.left < kUnbounded || p.band.right < kUnbounded;
  order.last_rows_first = p.band.right < kUnbounded || (ranges && p.band.left >= kUnbounded);
  int64_t heads = 1, last_heads = 1;
  if (order.unequal) {
    const bool shortens = !ranges && p.band.left >= kUnbounded;
    const int64_t least = shortens ? multiprocessors * 3 / 2 : multiprocessors * 4;
    const int64_t sharing = p.heads_q / std::max(p.heads_k, p.heads_v);
    heads = cached_heads(p) * sharing;
    last_heads = std::max(heads, (least + row_blocks - 1) / row_blocks);
    // The others are cut into equal sections.
    const int64_t others = std::max<int64_t>(0, batch_heads - last_heads) / sharing;
    const int64_t sections = (others * sharing + heads - 1) / heads;
    if (sections > 0) heads = others / sections * sharing;
    last_heads = batch_heads - sections * heads;
  }
  heads = std::min(heads, batch_heads);
  order.section_heads = static_cast<int32_t>(heads);
  order.last_section = static_cast<int32_t>(batch_heads - std::min(last_heads, batch_heads));
  return order;
}

}  // namespace attnkern::cuda
