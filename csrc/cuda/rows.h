// How kernels read the rows of a tensor. Host code, but for the struct.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace attnkern::cuda {

// Rows of one head's (length, width) matrix in global memory, and how they may be read.
struct Rows {
  const void* data;
  int64_t stride[4];  // batch, head, row, column; in elements
  int32_t width;
  bool vector;  // every row starts at a multiple of 16 bytes and is a whole number of dense 16-byte chunks
};

// The tensor as kernels read or write it, on the host: rows of `width` elements of so many bytes.
inline Rows rows_of(const View& view, int64_t width, int bytes = 2) {
  Rows rows{view.data, {}, static_cast<int32_t>(width), false};
  uint64_t bits = reinterpret_cast<uintptr_t>(view.data) | static_cast<uint64_t>(width) * bytes;
  for (int n = 0; n < 4; ++n) rows.stride[n] = view.stride[n];
  for (int n = 0; n < 3; ++n) bits |= static_cast<uint64_t>(view.stride[n]) * bytes;
  rows.vector = bits % 16 == 0 && (view.stride[3] == 1 || width <= 1);
  return rows;
}

}  // namespace attnkern::cuda
