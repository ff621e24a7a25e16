// Keys and values in the pages of a pool (Pages in params.h), for the kernels that take them: each is a variant of its
// own beside that whose keys lie one after the other, which knows nothing of pages.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/params.h"
#include "cuda/smem.cuh"

namespace attnkern::cuda {

template <typename Params>
struct InPages : Params {
  Pages pages;
};
template <typename Params, bool kPages>
using ParamsOf = std::conditional_t<kPages, InPages<Params>, Params>;

// run(params, std::bool_constant<kPages>{}), of the variant that a call needs. Host code.
template <typename Params, typename Run>
int by_pages(const Params& params, const Pages& pages, Run run) {
  if (pages.table == nullptr) return run(params, std::false_type{});
  InPages<Params> with{params, pages};
  with.pages.count = std::min<int64_t>(pages.count, int64_t{1} << 31);  // as int32 numbers them
  return run(with, std::true_type{});
}

// Where the keys of one entry of the batch lie: one after the other,
struct Together {};
// or in pages.
struct PageTable {
  const int32_t* entries;
  uint32_t count;
  int shift;

  // The page of a key.
  __device__ __forceinline__ int64_t of(int key) const {
    const uint32_t number = static_cast<uint32_t>(__ldg(entries + (key >> shift)));
    return number < count ? number : 0;
  }
  __device__ __forceinline__ int row(int key) const { return key & ((1 << shift) - 1); }
};

template <typename Params>
__device__ __forceinline__ auto table_of(const Params& p, [[maybe_unused]] int batch) {
  if constexpr (requires { p.pages; }) {
    return PageTable{p.pages.table + batch * p.pages.stride, static_cast<uint32_t>(p.pages.count), p.pages.shift};
  } else {
    return Together{};
  }
}

// The keys or values of a head, or in pages those of page 0.
template <typename T>
__device__ __forceinline__ const T* keys_of(const Rows& rows, Together, int batch, int head) {
  return head_of<T>(rows, batch, head);
}
template <typename T>
__device__ __forceinline__ const T* keys_of(const Rows& rows, PageTable, int, int head) {
  return head_of<T>(rows, 0, head);
}

// load_tile of keys or values.
template <typename T, int kHeadDim, int kRows, int kThreads, bool kVector>
__device__ __forceinline__ void load_keys(Together, uint32_t tile, const Rows& rows, const T* head, int first,
                                          int end) {
  load_tile<T, kHeadDim, kRows, kThreads, kVector>(tile, rows, head, first, end);
}

// `first`, before `end`, is a multiple of kRows, so that the rows are part of a page or whole pages. Where the threads
// take sixteen rows or fewer at a step, all read the same entry of the table, once for each sixteen rows. What is past
// the end is in the last key's page as far as the table is concerned, and not read.
template <typename T, int kHeadDim, int kRows, int kThreads, bool kVector>
__device__ __forceinline__ void load_keys(const PageTable& pages, uint32_t tile, const Rows& rows, const T* head,
                                          int first, int end) {
  static_assert(!kVector && (kRows & (kRows - 1)) == 0);
  using Chunks = TileOf<T, kHeadDim>;
  constexpr int kChunks = Chunks::kChunks, kPage = static_cast<int>(kLeastPage);
  if (rows.vector) {
    constexpr int kStep = kThreads / kChunks;
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const int live_rows = chunk * kPerChunk<T> < rows.width ? end - first - row : 0;
#pragma unroll
    for (int i = 0; i < kRows; i += kStep) {
      if (kRows % kStep != 0 && row + i >= kRows) continue;
      if (kThreads % kChunks != 0 && row >= kStep) continue;
      const int key = first + row + i, of_page = kPage % kStep == 0 ? first + i / kPage * kPage : key;
      const T* source = head + pages.of(min(of_page, end - 1)) * rows.stride[0] + pages.row(key) * rows.stride[2] +
                        chunk * kPerChunk<T>;
      const bool live = i < live_rows;
      ptx::cp_async<16>(Chunks::address(tile, row + i, chunk), live ? source : head, live ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks, key = min(first + row, end - 1);
      const bool live = first + row < end;
      const T* source = head + pages.of(key) * rows.stride[0] + pages.row(key) * rows.stride[2];
      const uint4 words = gather_chunk(source, rows.stride[3], chunk * kPerChunk<T>, live ? rows.width : 0);
      ptx::store_shared(Chunks::address(tile, row, chunk), words);
    }
  }
}

}  // namespace attnkern::cuda
