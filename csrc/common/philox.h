// Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the layout
// of dropout's random bits. One definition for every backend: which entry is dropped depends on the seed and on
// (batch * head, query, key) alone, never on tiles, threads or the device.
//
//   key     = seed (64 bits)
//   counter = { (j / 32) * 4 + (j % 8) / 2,  i,  low and high half of batch * heads + head }
//   entry (i, j) reads half j % 2 of word (j / 8) % 4, and is kept iff half >= round(p * 65536).
//
// One call thus yields the eight entries {8w + 2t, 8w + 2t + 1 : w = 0..3} of a 32-key block: exactly those which one
// thread of an mma.m16n8 accumulator holds in four neighbouring tiles, so that no random word is computed twice there.
#pragma once

#include <cmath>
#include <cstdint>

#include "band.h"

namespace attnkern::philox {

inline constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
inline constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
inline constexpr int kRounds = 10;
inline constexpr int kBlockKeys = 32, kCallsPerBlock = 4;

// p in [0, 1] -> the 16-bit value below which an entry is dropped (65536: all of them).
// Halves round to even.
ATTNKERN_HOST_DEVICE inline uint32_t threshold(double p) { return static_cast<uint32_t>(nearbyint(p * 65536.0)); }

}  // namespace attnkern::philox
