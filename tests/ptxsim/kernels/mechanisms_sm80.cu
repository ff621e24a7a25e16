// One small kernel per mechanism, each of which can be broken in one thing at a time. Every kernel is exact: integers,
// or floats whose every intermediate is representable (the inputs are small integers), so results compare bit for bit.
// references.py says what each computes.
//
//   entry                    threads   grid                dynamic shared memory (bytes)
//   cp_async_pipeline_4      128       any                 0
//   cp_async_pipeline_8      128       any                 0
//   cp_async_pipeline_16     128       any                 0
//   tree_reduction           256       any                 0
//   warp_exchange            any 32n   any                 4 * threads
//   named_barrier_ring       128       any                 0
//   atomic_histogram         128       any                 0
//   atomic_zoo               64        any                 0
//   semaphore_chain          64        any (all resident)  0
//   warp_collectives         32        any                 0
//   half_arithmetic          128       any                 0
//   narrow_access            128       any                 0
//   local_array              64        any                 0
//   divergence               128       any                 0
//   integer_arithmetic       128       any                 0
//   ldmatrix_shapes          32        1                   0
//   mma_f16, mma_bf16        32        1                   0
//   mma_tf32                 32        1                   0
#include "cuda/ptx.cuh"

using namespace attnkern;

namespace {

// Three stages, one barrier a tile: the stage that is loaded at tile t was read at tile t - 1, before the barrier.
// Thread i reads what thread 127 - i copied.
template <int kBytes>
__device__ __forceinline__ void cp_async_pipeline(const float* x, float* out, int count, int tiles) {
  constexpr int kThreads = 128, kStages = 3, kFloats = kBytes / 4, kTile = kThreads * kFloats;
  __shared__ __align__(16) float stage[kStages][kTile];
  const auto load = [&](int tile) {
    const int64_t first = (int64_t{blockIdx.x} * tiles + tile) * kTile + threadIdx.x * kFloats;
    const int live = static_cast<int>(max(int64_t{0}, min(int64_t{kFloats}, count - first)));
    ptx::cp_async<kBytes>(ptx::shared_address(&stage[tile % kStages][threadIdx.x * kFloats]), live > 0 ? x + first : x,
                          live * 4);
  };
  for (int tile = 0; tile < kStages - 1; ++tile) {
    if (tile < tiles) load(tile);
    ptx::cp_async_commit();
  }
  float sum = 0.f;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();
    if (tile + kStages - 1 < tiles) load(tile + kStages - 1);
    ptx::cp_async_commit();
    for (int i = 0; i < kFloats; ++i) {
      sum += (i + 1) * stage[tile % kStages][(kThreads - 1 - threadIdx.x) * kFloats + i];
    }
  }
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

// PTX: red. The compiler itself writes atom with a result that nobody reads.
__device__ __forceinline__ void red_shared(unsigned* address, unsigned value) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(ptx::shared_address(address)), "r"(value) : "memory");
}
__device__ __forceinline__ void red_global(unsigned* address, unsigned value) {
  asm volatile("red.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t bits(__half2 x) { return reinterpret_cast<const uint32_t&>(x); }
__device__ __forceinline__ uint32_t bits(__nv_bfloat162 x) { return reinterpret_cast<const uint32_t&>(x); }

// 16x16 by 16x8 (or 16x8 by 8x8 for tf32). a by rows, b by columns, as the instruction has it; d by rows.
template <typename T>
__device__ __forceinline__ void mma_tile(const T* a, const T* b, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const auto two = [](const T* p) { return *reinterpret_cast<const uint32_t*>(p); };
  const uint32_t fragment[4] = {two(a + g * 16 + 2 * t), two(a + (g + 8) * 16 + 2 * t), two(a + g * 16 + 2 * t + 8),
                                two(a + (g + 8) * 16 + 2 * t + 8)};
  float sum[4] = {d[g * 8 + 2 * t], d[g * 8 + 2 * t + 1], d[(g + 8) * 8 + 2 * t], d[(g + 8) * 8 + 2 * t + 1]};
  ptx::mma_m16n8k16<T>(sum, fragment, two(b + g * 16 + 2 * t), two(b + g * 16 + 2 * t + 8));
  d[g * 8 + 2 * t] = sum[0];
  d[g * 8 + 2 * t + 1] = sum[1];
  d[(g + 8) * 8 + 2 * t] = sum[2];
  d[(g + 8) * 8 + 2 * t + 1] = sum[3];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
    cp_async_pipeline_4(const float* x, float* out, int count, int tiles) {
  cp_async_pipeline<4>(x, out, count, tiles);
}
extern "C" __global__ void __launch_bounds__(128)
    cp_async_pipeline_8(const float* x, float* out, int count, int tiles) {
  cp_async_pipeline<8>(x, out, count, tiles);
}
extern "C" __global__ void __launch_bounds__(128)
    cp_async_pipeline_16(const float* x, float* out, int count, int tiles) {
  cp_async_pipeline<16>(x, out, count, tiles);
}

// out[block] = sum of the block's 256 values. A barrier for every halving, within a warp too.
extern "C" __global__ void __launch_bounds__(256) tree_reduction(const int* x, int* out) {
  __shared__ int partial[256];
  partial[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
#pragma unroll 1
  for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

// An inclusive scan of each warp by shuffles, then two permutations through shared memory, each warp in its own part.
extern "C" __global__ void warp_exchange(const int* x, int* out) {
  extern __shared__ int exchange[];
  const int lane = threadIdx.x % 32;
  int* mine = exchange + threadIdx.x / 32 * 32;
  int value = x[blockIdx.x * blockDim.x + threadIdx.x];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += before;
  }
  mine[lane] = value;
  __syncwarp();
  value = mine[(lane * 5 + 3) % 32];
  __syncwarp();  // everyone has read before anyone overwrites
  mine[lane ^ 13] = 2 * value;
  __syncwarp();
  out[blockIdx.x * blockDim.x + threadIdx.x] = mine[31 - lane] - lane;
}

// Warps 0 and 1 fill two slots in turn, warps 2 and 3 empty them: a barrier per slot and direction.
extern "C" __global__ void __launch_bounds__(128) named_barrier_ring(const int* x, int* out, int rounds) {
  constexpr int kSlots = 2, kItems = 64, kFull = 1, kEmpty = kFull + kSlots;
  __shared__ int slot[kSlots][kItems];
  x += int64_t{blockIdx.x} * rounds * kItems;
  if (threadIdx.x < kItems) {
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      if (round >= kSlots) ptx::barrier_sync(kEmpty + round % kSlots, 128);
      slot[round % kSlots][threadIdx.x] = x[round * kItems + threadIdx.x] + round;
      ptx::barrier_arrive(kFull + round % kSlots, 128);
    }
  } else {
    const int item = 127 - threadIdx.x;
    int sum = 0;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      ptx::barrier_sync(kFull + round % kSlots, 128);
      sum = 3 * sum + slot[round % kSlots][item];
      if (round + kSlots < rounds) ptx::barrier_arrive(kEmpty + round % kSlots, 128);
    }
    out[blockIdx.x * kItems + item] = sum;
  }
}

// Sixteen bins, first in shared, then in global memory, by reductions that return nothing.
extern "C" __global__ void __launch_bounds__(128) atomic_histogram(const int* x, unsigned* histogram, int count) {
  __shared__ unsigned bins[16];
  if (threadIdx.x < 16) bins[threadIdx.x] = 0;
  __syncthreads();
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i < count) red_shared(&bins[x[i] & 15], 1);
  __syncthreads();
  if (threadIdx.x < 16) red_global(&histogram[threadIdx.x], bins[threadIdx.x]);
}

// Orders of the threads don't show in what is kept. cells: sum, min, max, and, or, xor, wrapped count, number of
// tickets drawn; wide: 64-bit sum and max, and a product (mod 2^32) by compare and swap; sums: float, double;
// tickets: which were drawn, each once.
extern "C" __global__ void __launch_bounds__(64)
    atomic_zoo(const int* x, int* cells, unsigned long long* wide, float* sum, double* wide_sum, __half2* half_sum,
               unsigned* tickets) {
  const int value = x[blockIdx.x * 64 + threadIdx.x];
  atomicAdd(&cells[0], value);
  atomicMin(&cells[1], value);
  atomicMax(&cells[2], value);
  atomicAnd(&cells[3], value);
  atomicOr(&cells[4], value);
  atomicXor(&cells[5], value);
  atomicInc(reinterpret_cast<unsigned*>(&cells[6]), 9u);
  const int ticket = atomicAdd(&cells[7], 1);
  atomicExch(&tickets[ticket], 1u + threadIdx.x);
  atomicAdd(&wide[0], static_cast<unsigned long long>(static_cast<long long>(value) << 20));
  atomicMax(&wide[1], static_cast<unsigned long long>(value & 0xffff) << 33);
  unsigned long long seen = atomicCAS(&wide[2], 0ull, 0ull), expected;
  do {
    expected = seen;
    seen = atomicCAS(&wide[2], expected, (expected * static_cast<unsigned>(value | 1)) & 0xffffffffu);
  } while (seen != expected);
  atomicAdd(sum, static_cast<float>(value & 15));
  atomicAdd(wide_sum, static_cast<double>(value));
  atomicAdd(half_sum, __halves2half2(__int2half_rn(value & 3), __float2half(1.f)));
}

// The blocks take turns by block number; state'[i] = 5 state[i] + block + i doesn't commute.
extern "C" __global__ void __launch_bounds__(64) semaphore_chain(uint32_t* semaphore, uint32_t* state) {
  if (threadIdx.x == 0) {
    while (ptx::load_acquire(semaphore) != blockIdx.x) {
    }
  }
  __syncthreads();
  state[threadIdx.x] = 5 * state[threadIdx.x] + blockIdx.x + threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) ptx::add_release(semaphore, 1);
}

// out: 22 rows of 32 words for every block.
extern "C" __global__ void __launch_bounds__(32) warp_collectives(const int* x, unsigned* out) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x;
  const int value = x[blockIdx.x * 32 + lane];
  out += blockIdx.x * 22 * 32 + lane;
  int row = 0;
  const auto put = [&](unsigned result) { out[32 * row++] = result; };
  put(__ballot_sync(kAll, value & 1));
  put(__all_sync(kAll, value >= -1000));
  put(__any_sync(kAll, value > 90));
  int uniform;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nvote.sync.uni.pred q, p, 0xffffffff;\nselp.u32 %0, 1, 0, q;\n}\n"
      : "=r"(uniform)
      : "r"(value & 4));
  put(uniform);
  put(__match_any_sync(kAll, value & 3));
  int same;
  put(__match_all_sync(kAll, value & 1024, &same));
  put(same);
  put(__match_any_sync(kAll, static_cast<unsigned long long>(value & 1) << 40));
  put(__reduce_add_sync(kAll, value));
  put(__reduce_min_sync(kAll, value));
  put(__reduce_max_sync(kAll, value));
  put(__reduce_min_sync(kAll, static_cast<unsigned>(value)));
  put(__reduce_and_sync(kAll, value | 3));
  put(__reduce_or_sync(kAll, value & 0xf0));
  put(__reduce_xor_sync(kAll, value));
  put(__shfl_sync(kAll, value, lane * 7));
  put(__shfl_up_sync(kAll, value, 3, 16));
  put(__shfl_down_sync(kAll, value, 5, 8));
  put(__shfl_xor_sync(kAll, value, 9));
  put(__shfl_sync(kAll, value, value, 4));
  // Half of a warp, while the other half is elsewhere
  unsigned apart;
  if (lane < 16) {
    apart = __ballot_sync(0xffffu, value & 2);
  } else {
    apart = __reduce_add_sync(0xffff0000u, static_cast<unsigned>(lane));
  }
  put(apart);
  put(__shfl_sync(kAll, apart, (lane + 16) % 32));
}

// Packed arithmetic, rounded once each: 12 rows of f16x2, 12 of bf16x2.
extern "C" __global__ void __launch_bounds__(128)
    half_arithmetic(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* out, int count) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= count) return;
  out += i;
  const auto put = [&](uint32_t result) {
    *out = result;
    out += count;
  };
  const auto rows = [&]<typename T2>(const T2& x, const T2& y, const T2& z) {
    put(bits(__hadd2(x, y)));
    put(bits(__hsub2(x, y)));
    put(bits(__hmul2(x, y)));
    put(bits(__hfma2(x, y, z)));
    put(bits(__hfma2_relu(x, y, z)));
    put(bits(__hmin2(x, y)));
    put(bits(__hmax2(x, y)));
    put(bits(__hmax2_nan(x, y)));
    put(bits(__hneg2(x)));
    put(bits(__habs2(x)));
    put(bits(__hgt2(x, y)));
    put(__heq2_mask(x, z));
  };
  const uint32_t xyz[3] = {a[i], b[i], c[i]};
  const auto* f16 = reinterpret_cast<const __half2*>(xyz);
  rows(f16[0], f16[1], f16[2]);
  const auto* bf16 = reinterpret_cast<const __nv_bfloat162*>(xyz);
  rows(bf16[0], bf16[1], bf16[2]);
}

// Bytes and 16-bit words, signed and not, one at a time and as vectors, through shared memory at odd places.
extern "C" __global__ void __launch_bounds__(128)
    narrow_access(const int8_t* bytes, const uint16_t* words, uint8_t* bytes_out, int16_t* words_out) {
  __shared__ __align__(4) uint8_t shared_bytes[4 * 128 + 4];
  __shared__ int16_t shared_words[128];
  const int i = blockIdx.x * 128 + threadIdx.x;
  const char4 four = reinterpret_cast<const char4*>(bytes)[i];
  const int at = 4 * threadIdx.x + 1;
  shared_bytes[at] = static_cast<uint8_t>(four.x + 1);
  shared_bytes[at + 1] = static_cast<uint8_t>(four.y * 3);
  shared_bytes[at + 2] = static_cast<uint8_t>(four.z >> 1);
  shared_bytes[at + 3] = static_cast<uint8_t>(-four.w);
  shared_words[127 - threadIdx.x] = static_cast<int16_t>(words[i] * 5);
  __syncthreads();
  const int from = 4 * (127 - threadIdx.x) + 1;
  bytes_out[2 * i] = shared_bytes[from] ^ shared_bytes[from + 3];
  bytes_out[2 * i + 1] = static_cast<uint8_t>(static_cast<int8_t>(shared_bytes[from + 1]) < 0);
  words_out[i] = static_cast<int16_t>(shared_words[threadIdx.x] / 2 - static_cast<int8_t>(shared_bytes[from + 2]));
}

// An array that is indexed by data lives in local memory.
extern "C" __global__ void __launch_bounds__(64) local_array(const int* x, int* out, int steps) {
  int ring[16];
  const int i = blockIdx.x * 64 + threadIdx.x;
#pragma unroll 1
  for (int k = 0; k < 16; ++k) ring[k] = i + k * k;
  const int value = x[i];
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int at = (value + 3 * step) & 15;
    ring[at] = 2 * ring[(at + value + step) & 15] - step;
  }
  int sum = 0;
#pragma unroll 1
  for (int k = 0; k < 16; ++k) sum = 7 * sum + ring[k];
  out[i] = sum;
}

// Loops of different length, an early return, a jump table and a barrier-free join.
extern "C" __global__ void __launch_bounds__(128) divergence(const unsigned* x, unsigned* out, int count) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= count) return;
  unsigned value = x[i] + 1, steps = 0;
#pragma unroll 1
  while (value != 1 && steps < 500) {
    if (value & 1) {
      value = 3 * value + 1;
    } else {
      value /= 2;
    }
    ++steps;
  }
  unsigned result;
  switch (x[i] % 7) {
    case 0: result = steps; break;
    case 1: result = steps * steps; break;
    case 2: result = steps ^ 0x55u; break;
    case 3: result = steps << 3; break;
    case 4: result = ~steps; break;
    case 5: result = __brev(steps); break;
    default: result = steps % 10u; break;
  }
  const unsigned together = __ballot_sync(__activemask(), result & 1);
  out[2 * i] = result;
  out[2 * i + 1] = together >> (threadIdx.x % 32) & 1;
}

// 30 rows; b is never zero.
extern "C" __global__ void __launch_bounds__(128)
    integer_arithmetic(const int* a, const int* b, long long* out, int count) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= count) return;
  const int x = a[i], y = b[i];
  const unsigned ux = x, uy = y;
  const long long wide = (static_cast<long long>(x) << 21) ^ y;
  const unsigned long long uwide = wide;
  out += i;
  const auto put = [&](long long result) {
    *out = result;
    out += count;
  };
  put(static_cast<int>(ux + uy));
  put(static_cast<int>(ux - uy));
  put(static_cast<int>(ux * uy));
  put(__mulhi(x, y));
  put(__umulhi(ux, uy));
  put(static_cast<long long>(x) * y);
  put(static_cast<unsigned long long>(ux) * uy);
  put(y == -1 ? 0 : x / y);
  put(y == -1 ? 0 : x % y);
  put(ux / uy);
  put(ux % uy);
  put(wide / (y | 1));
  put(static_cast<long long>(uwide % uy));
  put(__mul64hi(wide, x));
  put(static_cast<long long>(__umul64hi(uwide, uwide)));
  put(x >> (uy & 31));
  put(ux >> (uy & 31));
  put(static_cast<int>(ux << (uy & 31)));
  put(wide >> (uy & 63));
  put(__funnelshift_l(ux, uy, 11));
  put(__funnelshift_r(ux, uy, ux & 31));
  put(__popc(ux) + 100 * __popcll(uwide));
  put(__clz(x) + 100 * __clzll(wide));
  put(__ffs(x) + 100 * __ffsll(wide));
  put(__brev(ux));
  put(__byte_perm(ux, uy, 0x6135));
  put(min(x, y) + 3ll * max(ux, uy));
  put(abs(x >> 1));
  put(static_cast<int>(__usad(ux, uy, 7u)));
  put((ux & uy) | (~ux & 0x0f0f0f0fu));
}

// tile: 32 rows of 8 16-bit values. x1, x2, x4, then the same transposed; 7 registers a lane each.
extern "C" __global__ void __launch_bounds__(32) ldmatrix_shapes(const uint16_t* tile, uint32_t* out) {
  constexpr int kPitch = 24;  // a row's 16 bytes every 48
  __shared__ __align__(16) uint16_t shared[32 * kPitch];
  for (int i = threadIdx.x; i < 32 * 8; i += 32) shared[i / 8 * kPitch + i % 8] = tile[i];
  __syncthreads();
  const uint32_t row = ptx::shared_address(shared + threadIdx.x * kPitch);
  uint32_t one[1], two[2], four[4];
  out += threadIdx.x;
  const auto put = [&](const uint32_t* registers, int n) {
    for (int i = 0; i < n; ++i) out[32 * i] = registers[i];
    out += 32 * n;
  };
  ptx::ldmatrix(one, row);
  put(one, 1);
  ptx::ldmatrix(two, row);
  put(two, 2);
  ptx::ldmatrix(four, row);
  put(four, 4);
  ptx::ldmatrix<true>(one, row);
  put(one, 1);
  ptx::ldmatrix<true>(two, row);
  put(two, 2);
  ptx::ldmatrix<true>(four, row);
  put(four, 4);
}

extern "C" __global__ void __launch_bounds__(32) mma_f16(const __half* a, const __half* b, float* d) {
  mma_tile(a, b, d);
}
extern "C" __global__ void __launch_bounds__(32) mma_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d) {
  mma_tile(a, b, d);
}
extern "C" __global__ void __launch_bounds__(32) mma_tf32(const float* a, const float* b, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const uint32_t fragment[4] = {ptx::to_tf32(a[g * 8 + t]), ptx::to_tf32(a[(g + 8) * 8 + t]),
                                ptx::to_tf32(a[g * 8 + t + 4]), ptx::to_tf32(a[(g + 8) * 8 + t + 4])};
  float sum[4] = {d[g * 8 + 2 * t], d[g * 8 + 2 * t + 1], d[(g + 8) * 8 + 2 * t], d[(g + 8) * 8 + 2 * t + 1]};
  ptx::mma_m16n8k8_tf32(sum, fragment, ptx::to_tf32(b[g * 8 + t]), ptx::to_tf32(b[g * 8 + t + 4]));
  d[g * 8 + 2 * t] = sum[0];
  d[g * 8 + 2 * t + 1] = sum[1];
  d[(g + 8) * 8 + 2 * t] = sum[2];
  d[(g + 8) * 8 + 2 * t + 1] = sum[3];
}
