// The PTX instructions that CUDA C++ has no word for, one wrapper each. Nothing here decides anything: the layout of
// tiles, the number of stages and the order of waits belong to the kernels.
//
// "PTX: x" names the section of the PTX ISA by its title (the numbers move between versions of the manual).
// Shared memory addresses are 32-bit addresses of the shared window, as `shared_address` gives them. "memory" is
// clobbered wherever an instruction orders, starts or reads memory that the compiler can't see.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace attnkern::ptx {

// PTX: cvta. A generic pointer into shared memory -> its address in the shared window.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---------------------------------------------------------------------------------------------- arithmetic

// PTX: ex2. 2^x, subnormal results flushed to zero; ex2(-inf) = 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX: lg2. log2(x); lg2(0) = -inf.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX: cvt. Two floats rounded to nearest even and packed, `low` in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  uint32_t packed;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// PTX: cvt. Rounded to tf32 (to nearest, halves away from zero), as mma wants its operands.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// ------------------------------------------------------------------------------------- registers and barriers

// PTX: setmaxnreg. Every warp of a warpgroup executes it; a multiple of 8 in [24, 256].
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// PTX: elect.sync. True in exactly one lane of the (converged) warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// PTX: bar, barrier. Named barrier `id` (1..15; 0 is __syncthreads') of `threads` threads, a multiple of 32: sync
// waits for all of them, arrive only counts as one.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// PTX: ld, red; Memory Consistency Model. A hand-over between blocks: everything before the release is visible to
// whoever reads its value with the acquire, and to those which a barrier orders after that thread.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(uint32_t* address, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// PTX: griddepcontrol. Lets the next grid of the stream start, and waits for the one before.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ------------------------------------------------------------------------------------------------ warp level

// PTX: ldmatrix. One, two or four 8x8 matrices of 16-bit elements; the addresses of matrix i's rows (16 bytes, aligned)
// come from lanes 8i..8i+7. Lane l gets elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of each matrix, or of
// its transpose.
template <bool kTranspose = false>
__device__ __forceinline__ void ldmatrix(uint32_t (&m)[1], uint32_t row) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(m[0]) : "r"(row) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(m[0]) : "r"(row) : "memory");
  }
}
template <bool kTranspose = false>
__device__ __forceinline__ void ldmatrix(uint32_t (&m)[2], uint32_t row) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(row)
                 : "memory");
  }
}
template <bool kTranspose = false>
__device__ __forceinline__ void ldmatrix(uint32_t (&m)[4], uint32_t row) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
  }
}

// PTX: stmatrix (sm_90). The inverse of ldmatrix, same lanes and addresses.
template <bool kTranspose = false>
__device__ __forceinline__ void stmatrix(uint32_t row, const uint32_t (&m)[1]) {
  if constexpr (kTranspose) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row), "r"(m[0]) : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row), "r"(m[0]) : "memory");
  }
}
template <bool kTranspose = false>
__device__ __forceinline__ void stmatrix(uint32_t row, const uint32_t (&m)[2]) {
  if constexpr (kTranspose) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(m[0]), "r"(m[1])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(m[0]), "r"(m[1])
                 : "memory");
  }
}
template <bool kTranspose = false>
__device__ __forceinline__ void stmatrix(uint32_t row, const uint32_t (&m)[4]) {
  if constexpr (kTranspose) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
                 "r"(m[2]), "r"(m[3])
                 : "memory");
  }
}

// PTX: Matrix Fragments for mma.m16n8k16 with floating point type. d += a b, a 16x16 by rows, b 16x8 by columns.
// With g = lane / 4 and t = lane % 4, halves low before high:
//   a: (g, 2t) (g + 8, 2t) (g, 2t + 8) (g + 8, 2t + 8), each with its right neighbour
//   b: rows 2t and 2t + 8 of column g, each with the row below
//   d: (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1)
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// PTX: Matrix Fragments for mma.m16n8k8. d += a b in tf32, a 16x8 by rows, b 8x8 by columns:
//   a: (g, t) (g + 8, t) (g, t + 4) (g + 8, t + 4)      b: rows t and t + 4 of column g      d as above
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// -------------------------------------------------------------------------------- asynchronous copies (sm_80)

// PTX: cp.async. Copies `source_bytes` <= kBytes from global to shared and zero-fills the rest. Both addresses are
// aligned to kBytes. 16 bytes bypass L1, which a tile read once has no use for.
template <int kBytes>
__device__ __forceinline__ void cp_async(uint32_t destination, const void* source, int source_bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source), "n"(kBytes),
                 "r"(source_bytes)
                 : "memory");
  }
}

// PTX: cp.async.commit_group, cp.async.wait_group. Per thread: waits until at most kPending of its groups are under
// way. The other threads' copies need a barrier on top.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// PTX: st, ld. Plain accesses of 16 bytes by an address of the shared window.
__device__ __forceinline__ void store_shared(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// ------------------------------------------------------------------------------------------ mbarrier (sm_90)

// PTX: mbarrier.init. `arrivals` per phase.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// PTX: membar, fence. Makes initialised barriers known to the asynchronous units.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX: mbarrier.arrive. Releases what this thread did so far to those who wait for the phase.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// PTX: mbarrier.arrive. The same, and the phase can't end before `bytes` more have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// PTX: mbarrier.test_wait, mbarrier.try_wait. True once the phase of this parity is over; the first phase is 0, and
// waiting for parity 1 on a fresh barrier returns at once.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ----------------------------------------------------------------------------------- bulk copies, TMA (sm_90)

// A CUtensorMap without the driver's header: encoded by cuTensorMapEncodeTiled, passed as a __grid_constant__.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// PTX: membar, fence. Orders this thread's plain accesses to shared memory before later asynchronous ones (TMA, wgmma).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// PTX: cp.async.bulk.tensor. The box of `map` at these coordinates (innermost first) -> shared memory; what lies
// outside the tensor reads as zero. The whole box counts towards `barrier`'s bytes. One thread executes it.
__device__ __forceinline__ void tma_load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(destination),
      "l"(&map), "r"(c0), "r"(c1), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1,
                                         int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(destination),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1,
                                         int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
      "%5}], [%6];" ::"r"(destination),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

// The other way; what lies outside the tensor isn't written. Completion by bulk groups.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32_t source, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(c0),
               "r"(c1), "r"(source)
               : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32_t source, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
               "r"(c0), "r"(c1), "r"(c2), "r"(source)
               : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32_t source, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(source)
               : "memory");
}

// PTX: cp.reduce.async.bulk.tensor. Adds to the tensor, in the map's element type.
__device__ __forceinline__ void tma_reduce_add(const TensorMap& map, uint32_t source, int c0, int c1) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(source)
      : "memory");
}
__device__ __forceinline__ void tma_reduce_add(const TensorMap& map, uint32_t source, int c0, int c1, int c2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(source)
      : "memory");
}
__device__ __forceinline__ void tma_reduce_add(const TensorMap& map, uint32_t source, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(source)
      : "memory");
}

// PTX: cp.async.bulk, cp.reduce.async.bulk. Plain runs of bytes: addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void bulk_reduce_add(float* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

// PTX: cp.async.bulk.commit_group, cp.async.bulk.wait_group. Groups of the stores and reductions of this thread: at
// most kPending under way, or (read) still reading shared memory.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// --------------------------------------------------------------------------------------------- wgmma (sm_90a)

// PTX: wgmma.fence. Before the first wgmma, and whenever its registers were touched by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// PTX: wgmma.commit_group, wgmma.wait_group
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers that a wgmma is reading or writing across this point.
template <int kCount>
__device__ __forceinline__ void hold(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kRows, int kCount>
__device__ __forceinline__ void hold(uint32_t (&registers)[kRows][kCount]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) asm volatile("" : "+r"(registers[i][j])::"memory");
  }
}

// PTX: Matrix Descriptor Format. The swizzle's bytes are the width of a tile's row in shared memory.
enum class Swizzle : uint64_t { kNone = 0, k128B = 1, k64B = 2, k32B = 3 };

// PTX: Shared Memory Matrix Layout. Byte offsets between the repeating blocks of an operand (8 rows x 16 bytes without
// swizzle, else 8 rows x the swizzle's bytes, start aligned to 8 x the swizzle's bytes):
//                      leading                                   stride
//   K-major            next 16 bytes of k (only if not swizzled)  next 8 rows
//   MN-major, swizzled next block of columns                      next 8 k
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride,
                                                      Swizzle swizzle) {
  const auto encode = [](uint32_t x) { return static_cast<uint64_t>((x & 0x3FFFF) >> 4); };
  return encode(address) | encode(leading) << 16 | encode(stride) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

// PTX: wgmma.mma_async. d (64 x kN, fp32) = a b, or d + a b if `accumulate`; a is 64x16, from shared memory (ss,
// K-major) or registers (rs), b 16 x kN from shared memory: K-major, or N-major if kTransposeB.
// PTX: Register Fragments for wgmma.mma_async.m64nNk16: warp w of the warpgroup holds rows 16w..16w+15 as in
// mma.m16n8k16, d[4n..4n+3] for columns 8n..8n+7.
#define ATTNKERN_D8(i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define ATTNKERN_D32(i) ATTNKERN_D8(i), ATTNKERN_D8(i + 8), ATTNKERN_D8(i + 16), ATTNKERN_D8(i + 24)
#define ATTNKERN_LIST32                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTNKERN_LIST64                                                                \
  ATTNKERN_LIST32                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ATTNKERN_WGMMA(shape, list, flag, operands)              \
  "{\n"                                                          \
  ".reg .pred p;\n"                                              \
  "setp.ne.b32 p, " flag                                         \
  ", 0;\n"                                                       \
  "wgmma.mma_async.sync.aligned." shape " {" list "}, " operands \
  ";\n"                                                          \
  "}\n"

template <typename T, int kN, bool kTransposeB>
__device__ __forceinline__ void wgmma_ss(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  static_assert(kN == 64 || kN == 128);
  const int flag = accumulate;
  if constexpr (kN == 64 && std::is_same_v<T, __half>) {
    asm volatile(ATTNKERN_WGMMA("m64n64k16.f32.f16.f16", ATTNKERN_LIST32, "%34", "%32, %33, p, 1, 1, 0, %35")
                 : ATTNKERN_D32(0)
                 : "l"(a), "l"(b), "r"(flag), "n"(int{kTransposeB}));
  } else if constexpr (kN == 64) {
    asm volatile(ATTNKERN_WGMMA("m64n64k16.f32.bf16.bf16", ATTNKERN_LIST32, "%34", "%32, %33, p, 1, 1, 0, %35")
                 : ATTNKERN_D32(0)
                 : "l"(a), "l"(b), "r"(flag), "n"(int{kTransposeB}));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(ATTNKERN_WGMMA("m64n128k16.f32.f16.f16", ATTNKERN_LIST64, "%66", "%64, %65, p, 1, 1, 0, %67")
                 : ATTNKERN_D32(0), ATTNKERN_D32(32)
                 : "l"(a), "l"(b), "r"(flag), "n"(int{kTransposeB}));
  } else {
    asm volatile(ATTNKERN_WGMMA("m64n128k16.f32.bf16.bf16", ATTNKERN_LIST64, "%66", "%64, %65, p, 1, 1, 0, %67")
                 : ATTNKERN_D32(0), ATTNKERN_D32(32)
                 : "l"(a), "l"(b), "r"(flag), "n"(int{kTransposeB}));
  }
}

template <typename T, int kN, bool kTransposeB>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  static_assert(kN == 64 || kN == 128);
  const int flag = accumulate;
  if constexpr (kN == 64 && std::is_same_v<T, __half>) {
    asm volatile(
        ATTNKERN_WGMMA("m64n64k16.f32.f16.f16", ATTNKERN_LIST32, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38")
        : ATTNKERN_D32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(flag), "n"(int{kTransposeB}));
  } else if constexpr (kN == 64) {
    asm volatile(
        ATTNKERN_WGMMA("m64n64k16.f32.bf16.bf16", ATTNKERN_LIST32, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38")
        : ATTNKERN_D32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(flag), "n"(int{kTransposeB}));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        ATTNKERN_WGMMA("m64n128k16.f32.f16.f16", ATTNKERN_LIST64, "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70")
        : ATTNKERN_D32(0), ATTNKERN_D32(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(flag), "n"(int{kTransposeB}));
  } else {
    asm volatile(
        ATTNKERN_WGMMA("m64n128k16.f32.bf16.bf16", ATTNKERN_LIST64, "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70")
        : ATTNKERN_D32(0), ATTNKERN_D32(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(flag), "n"(int{kTransposeB}));
  }
}

#undef ATTNKERN_WGMMA
#undef ATTNKERN_LIST64
#undef ATTNKERN_LIST32
#undef ATTNKERN_D32
#undef ATTNKERN_D8

}  // namespace attnkern::ptx
