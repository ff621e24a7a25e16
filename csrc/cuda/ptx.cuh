// The PTX instructions that CUDA C++ has no word for, one wrapper each. Nothing here decides anything: the layout of
// tiles, the number of stages and the order of waits belong to the kernels. Those of Hopper are in ptx_sm90.cuh.
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

// ------------------------------------------------------------------------------------------------ barriers

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

// ------------------------------------------------------------------------------------ asynchronous copies

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

// PTX: st, ld. Plain accesses of 16, 8 or 4 bytes by an address of the shared window.
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
__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

}  // namespace attnkern::ptx
