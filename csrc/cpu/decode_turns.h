// Which decoding calls take turns between K and V, by which kernel: decode_stream or decode_heads.
#pragma once

#include "decode_heads.h"

namespace attnkern::cpu {
namespace {

template <class T, class Op>
using DecodeStream = void (*)(const Forward& p, const DecodeScratch<Op>& scratch, int64_t batch, int64_t head_k,
                              int64_t key, int64_t keys);
template <class T, class Op>
using DecodeHeads = void (*)(const Forward& p, const DecodeScratch<Op>* scratch, int64_t batch, int64_t head_k,
                             int64_t heads, int64_t key, int64_t keys);

// Bytes of a call's K and V from which on 2 to 4 rows of bfloat16 take turns, from three times as many on unless heads
// lie side by side, 5 to 8 from eight times as many on, 3 and more of float32 from four times as many on, and with 16
// registers more than one row of any type; one row of float32 always. As measured: what is in a cache is multiplied
// faster in blocks, what is not is read faster in turns. (A Zen 5 reads more than four rows of bfloat16 faster in
// blocks.) Pages decide nothing here: the bits are to be those of the same keys without them.
inline constexpr int64_t kTurnsFrom = 8 << 20;

inline int64_t key_bytes(const Forward& p) {
  return entries_of_call(p) * p.heads_k * p.seqlen_k * (p.head_dim + p.head_dim_v) * bytes_of(p.dtype);
}

// How many rows take turns, at most; kHeads: those of key heads side by side. As measured: with 32 registers, more have
// too much to multiply for it, as short ones of bfloat16 have, and three and more wide rows of float32 that lie one
// after the other are read as fast in blocks.
template <class T, class Op, bool kHeads, int kDim>
constexpr int64_t most_rows_of_turns() {
  if (kRegisters == 16) return kHeads ? kRowsOfHeadsTogether<T> : sizeof(T) == 4 ? 8 : 4;
  if (Op::kPack == 2) return kZen5 || kDim < 96 ? 4 : kHeads || kDim <= 128 ? 8 : 7;
  if (sizeof(T) < 4) return 1;
  if (kHeads || kDim <= 64) return 8;
  return kDim <= 128 ? 2 : 1;
}

// The kernel of turns for these rows, of_size<kRows, kDim>(), or null. With 16 registers, sums lie in memory and one
// kernel does for any number of rows.
template <class Kernel, class T, class Op, bool kHeads, class OfSize>
Kernel kernel_of_turns(const Forward& p, int64_t rows, const OfSize& of_size) {
  using C = typename Op::Compute;
  if constexpr (sizeof(C) == 4 && kVectorBytes >= 32) {
    if (const ScoreParams<C> score(p); score.capped() || score.dropout || p.head_dim != p.head_dim_v ||
                                       !reads_in_place(p.k, p.head_dim) || !reads_in_place(p.v, p.head_dim_v))
      return nullptr;
    const auto of_dim = [&]<int kDim>() -> Kernel {
      constexpr int64_t kMost = most_rows_of_turns<T, Op, kHeads, kDim>();
      if constexpr (kRegisters == 16) {
        const bool pays = rows <= (key_bytes(p) >= kTurnsFrom ? kMost : sizeof(T) == 4 ? 1 : 0);
        return pays ? of_size.template operator()<4, kDim>() : nullptr;
      } else {
        if (rows == 1) return of_size.template operator()<1, kDim>();
        const int64_t of_pairs = side_by_side(p.k) ? kTurnsFrom : 3 * kTurnsFrom;
        const int64_t of_others = rows > 2 ? 4 * kTurnsFrom : 0;
        const int64_t least = Op::kPack == 1 ? of_others : rows > 4 ? 8 * kTurnsFrom : of_pairs;
        // (Few keys take turns only on a Zen 5, and where a head by itself would read rows that lie far apart.)
        const bool few = !kZen5 && least > 0 && p.seqlen_k < kDecodeKeys && !side_by_side(p.k);
        if (rows > kMost || key_bytes(p) < least || few) return nullptr;
        if constexpr (kMost >= 2 && kDim <= 128)
          if (rows == 2) return of_size.template operator()<2, kDim>();
        if constexpr (kMost > 2) return of_size.template operator()<4, kDim>();
        return nullptr;
      }
    };
    switch (p.head_dim) {
      case 32: return of_dim.template operator()<32>();
      case 64: return of_dim.template operator()<64>();
      case 80: return of_dim.template operator()<80>();
      case 96: return of_dim.template operator()<96>();
      case 128: return of_dim.template operator()<128>();
      case 256: return of_dim.template operator()<256>();
    }
  }
  return nullptr;
}

template <class T, class Op, class Keys>
DecodeStream<T, Op> stream_for(const Forward& p, int64_t rows) {
  return kernel_of_turns<DecodeStream<T, Op>, T, Op, false>(
      p, rows, []<int kRows, int kDim>() { return &decode_stream<T, Op, Keys, kRows, kDim>; });
}

// That for several key heads: where a key's rows of all heads lie side by side, and with 32 registers for more than two
// rows in pages, if without pages they would take turns, too. (Rows that do little with what they read are better off
// with the two streams of a head, and so is what comes from memory, unless rows are short.) The heads have the same
// keys.
template <class T, class Op>
DecodeHeads<T, Op> heads_for(const Forward& p, int64_t rows) {
  constexpr int64_t kMemory = 64 << 20;
  const bool beside = side_by_side(p.k) && side_by_side(p.v);
  const bool gathers = kRegisters == 32 && p.pages.table != nullptr && rows > 2;
  if (!beside && !(gathers && (head_by_head<T>(p.head_dim) || key_bytes(p) < kMemory))) return nullptr;
  if (p.heads_k == 1 || p.bias.data != nullptr || p.ranges.stride[1] != 0) return nullptr;
  using Kernel = DecodeHeads<T, Op>;
  const auto of_size = [&]<int kRows, int kDim>() -> Kernel {
    if constexpr (kRegisters == 32)
      if (kRows < 4 || (beside && rows <= 4)) return &decode_heads<T, Op, kRows, kDim, TurnBesideOthers<T>>;
    if constexpr (kRegisters == 16 || kRows == 4)  // (as measured, more rows gain nothing from what is closer)
      return &decode_heads<T, Op, kRows, kDim, TurnOfHead<T>>;
    return nullptr;
  };
  return beside ? kernel_of_turns<Kernel, T, Op, true>(p, rows, of_size)
                : kernel_of_turns<Kernel, T, Op, false>(p, rows, of_size);
}

}  // namespace
}  // namespace attnkern::cpu
