// The PTX instructions of Hopper (sm_90, wgmma and setmaxnreg: sm_90a), one wrapper each, as ptx.cuh has those of
// sm_80; the rules are told there.
#pragma once

#include "cuda/ptx.cuh"

namespace attnkern::ptx {

// ---------------------------------------------------------------------------------------- registers and warps

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

// PTX: griddepcontrol. Lets the next grid of the stream start, and waits for the one before.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// PTX: stmatrix. The inverse of ldmatrix, same lanes and addresses.
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

// ------------------------------------------------------------------------------------------------- mbarrier

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

// ----------------------------------------------------------------------------------------- bulk copies, TMA

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

// ---------------------------------------------------------------------------------------------------- wgmma

// PTX: wgmma.fence. Before the first wgmma, and whenever its registers were touched by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// PTX: wgmma.commit_group, wgmma.wait_group
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers that a wgmma is reading or writing across this point.
template <typename T, int kRows, int kCount>
__device__ __forceinline__ void hold(T (&registers)[kRows][kCount]) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, uint32_t>);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if constexpr (std::is_same_v<T, float>) {
        asm volatile("" : "+f"(registers[i][j])::"memory");
      } else {
        asm volatile("" : "+r"(registers[i][j])::"memory");
      }
    }
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

// PTX: wgmma.mma_async. d (64 x kN, fp32) = a b, or d + a b if `accumulate`; a is 64x16, from shared memory (ss:
// K-major, or M-major if kTransposeA) or registers (rs), b 16 x kN from shared memory: K-major, or N-major if
// kTransposeB.
// PTX: Register Fragments for wgmma.mma_async.m64nNk16: warp w of the warpgroup holds rows 16w..16w+15 as in
// mma.m16n8k16, d[n] for columns 8n..8n+7.
template <int kN>
struct Wgmma;

#define ATTNKERN_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ATTNKERN_R1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ATTNKERN_R2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define ATTNKERN_R3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTNKERN_R4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ATTNKERN_R5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ATTNKERN_R6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define ATTNKERN_R7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define ATTNKERN_R8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define ATTNKERN_R9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define ATTNKERN_R10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define ATTNKERN_R11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define ATTNKERN_R12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define ATTNKERN_R13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define ATTNKERN_R14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define ATTNKERN_R15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define ATTNKERN_D8(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define ATTNKERN_D16(n) ATTNKERN_D8(2 * n), ATTNKERN_D8(2 * n + 1)
#define ATTNKERN_WGMMA(shape, types, list, flag, operands)                     \
  "{\n"                                                                        \
  ".reg .pred p;\n"                                                            \
  "setp.ne.b32 p, " flag                                                       \
  ", 0;\n"                                                                     \
  "wgmma.mma_async.sync.aligned." shape ".f32." types " {" list "}, " operands \
  ";\n"                                                                        \
  "}\n"
// `list` and the last arguments name the n / 2 registers of d; r0 to r6 are the operands after them.
#define ATTNKERN_SHAPE(n, list, r0, r1, r2, r3, r4, r5, r6, ...)                                                    \
  template <>                                                                                                       \
  struct Wgmma<n> {                                                                                                 \
    template <typename T, bool kTransposeA, bool kTransposeB>                                                       \
    __device__ __forceinline__ static void ss(float (&d)[n / 8][4], uint64_t a, uint64_t b, int accumulate) {       \
      if constexpr (std::is_same_v<T, __half>) {                                                                    \
        asm volatile(ATTNKERN_WGMMA("m64n" #n "k16", "f16.f16", list, r2, r0 ", " r1 ", p, 1, 1, " r3 ", " r4)      \
                     : __VA_ARGS__                                                                                  \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(int{kTransposeA}), "n"(int{kTransposeB}));              \
      } else {                                                                                                      \
        asm volatile(ATTNKERN_WGMMA("m64n" #n "k16", "bf16.bf16", list, r2, r0 ", " r1 ", p, 1, 1, " r3 ", " r4)    \
                     : __VA_ARGS__                                                                                  \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(int{kTransposeA}), "n"(int{kTransposeB}));              \
      }                                                                                                             \
    }                                                                                                               \
    template <typename T, bool kTransposeB>                                                                         \
    __device__ __forceinline__ static void rs(float (&d)[n / 8][4], const uint32_t (&a)[4], uint64_t b,             \
                                              int accumulate) {                                                     \
      if constexpr (std::is_same_v<T, __half>) {                                                                    \
        asm volatile(ATTNKERN_WGMMA("m64n" #n "k16", "f16.f16", list, r5,                                           \
                                    "{" r0 ", " r1 ", " r2 ", " r3 "}, " r4 ", p, 1, 1, " r6)                       \
                     : __VA_ARGS__                                                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(int{kTransposeB})); \
      } else {                                                                                                      \
        asm volatile(ATTNKERN_WGMMA("m64n" #n "k16", "bf16.bf16", list, r5,                                         \
                                    "{" r0 ", " r1 ", " r2 ", " r3 "}, " r4 ", p, 1, 1, " r6)                       \
                     : __VA_ARGS__                                                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(int{kTransposeB})); \
      }                                                                                                             \
    }                                                                                                               \
  };

ATTNKERN_SHAPE(32, ATTNKERN_R0 ATTNKERN_R1, "%16", "%17", "%18", "%19", "%20", "%21", "%22", ATTNKERN_D16(0),
               ATTNKERN_D16(1))
ATTNKERN_SHAPE(48, ATTNKERN_R0 ATTNKERN_R1 ATTNKERN_R2, "%24", "%25", "%26", "%27", "%28", "%29", "%30",
               ATTNKERN_D16(0), ATTNKERN_D16(1), ATTNKERN_D16(2))
ATTNKERN_SHAPE(64, ATTNKERN_R0 ATTNKERN_R1 ATTNKERN_R2 ATTNKERN_R3, "%32", "%33", "%34", "%35", "%36", "%37", "%38",
               ATTNKERN_D16(0), ATTNKERN_D16(1), ATTNKERN_D16(2), ATTNKERN_D16(3))
ATTNKERN_SHAPE(80, ATTNKERN_R0 ATTNKERN_R1 ATTNKERN_R2 ATTNKERN_R3 ATTNKERN_R4, "%40", "%41", "%42", "%43", "%44",
               "%45", "%46", ATTNKERN_D16(0), ATTNKERN_D16(1), ATTNKERN_D16(2), ATTNKERN_D16(3), ATTNKERN_D16(4))
ATTNKERN_SHAPE(96, ATTNKERN_R0 ATTNKERN_R1 ATTNKERN_R2 ATTNKERN_R3 ATTNKERN_R4 ATTNKERN_R5, "%48", "%49", "%50", "%51",
               "%52", "%53", "%54", ATTNKERN_D16(0), ATTNKERN_D16(1), ATTNKERN_D16(2), ATTNKERN_D16(3), ATTNKERN_D16(4),
               ATTNKERN_D16(5))
ATTNKERN_SHAPE(112, ATTNKERN_R0 ATTNKERN_R1 ATTNKERN_R2 ATTNKERN_R3 ATTNKERN_R4 ATTNKERN_R5 ATTNKERN_R6, "%56", "%57",
               "%58", "%59", "%60", "%61", "%62", ATTNKERN_D16(0), ATTNKERN_D16(1), ATTNKERN_D16(2), ATTNKERN_D16(3),
               ATTNKERN_D16(4), ATTNKERN_D16(5), ATTNKERN_D16(6))
ATTNKERN_SHAPE(128, ATTNKERN_R0 ATTNKERN_R1 ATTNKERN_R2 ATTNKERN_R3 ATTNKERN_R4 ATTNKERN_R5 ATTNKERN_R6 ATTNKERN_R7,
               "%64", "%65", "%66", "%67", "%68", "%69", "%70", ATTNKERN_D16(0), ATTNKERN_D16(1), ATTNKERN_D16(2),
               ATTNKERN_D16(3), ATTNKERN_D16(4), ATTNKERN_D16(5), ATTNKERN_D16(6), ATTNKERN_D16(7))
ATTNKERN_SHAPE(160,
               ATTNKERN_R0 ATTNKERN_R1 ATTNKERN_R2 ATTNKERN_R3 ATTNKERN_R4 ATTNKERN_R5 ATTNKERN_R6 ATTNKERN_R7
                   ATTNKERN_R8 ATTNKERN_R9,
               "%80", "%81", "%82", "%83", "%84", "%85", "%86", ATTNKERN_D16(0), ATTNKERN_D16(1), ATTNKERN_D16(2),
               ATTNKERN_D16(3), ATTNKERN_D16(4), ATTNKERN_D16(5), ATTNKERN_D16(6), ATTNKERN_D16(7), ATTNKERN_D16(8),
               ATTNKERN_D16(9))
ATTNKERN_SHAPE(192,
               ATTNKERN_R0 ATTNKERN_R1 ATTNKERN_R2 ATTNKERN_R3 ATTNKERN_R4 ATTNKERN_R5 ATTNKERN_R6 ATTNKERN_R7
                   ATTNKERN_R8 ATTNKERN_R9 ATTNKERN_R10 ATTNKERN_R11,
               "%96", "%97", "%98", "%99", "%100", "%101", "%102", ATTNKERN_D16(0), ATTNKERN_D16(1), ATTNKERN_D16(2),
               ATTNKERN_D16(3), ATTNKERN_D16(4), ATTNKERN_D16(5), ATTNKERN_D16(6), ATTNKERN_D16(7), ATTNKERN_D16(8),
               ATTNKERN_D16(9), ATTNKERN_D16(10), ATTNKERN_D16(11))
ATTNKERN_SHAPE(256,
               ATTNKERN_R0 ATTNKERN_R1 ATTNKERN_R2 ATTNKERN_R3 ATTNKERN_R4 ATTNKERN_R5 ATTNKERN_R6 ATTNKERN_R7
                   ATTNKERN_R8 ATTNKERN_R9 ATTNKERN_R10 ATTNKERN_R11 ATTNKERN_R12 ATTNKERN_R13 ATTNKERN_R14
                       ATTNKERN_R15,
               "%128", "%129", "%130", "%131", "%132", "%133", "%134", ATTNKERN_D16(0), ATTNKERN_D16(1),
               ATTNKERN_D16(2), ATTNKERN_D16(3), ATTNKERN_D16(4), ATTNKERN_D16(5), ATTNKERN_D16(6), ATTNKERN_D16(7),
               ATTNKERN_D16(8), ATTNKERN_D16(9), ATTNKERN_D16(10), ATTNKERN_D16(11), ATTNKERN_D16(12), ATTNKERN_D16(13),
               ATTNKERN_D16(14), ATTNKERN_D16(15))

#undef ATTNKERN_SHAPE
#undef ATTNKERN_WGMMA
#undef ATTNKERN_D16
#undef ATTNKERN_D8
#undef ATTNKERN_R15
#undef ATTNKERN_R14
#undef ATTNKERN_R13
#undef ATTNKERN_R12
#undef ATTNKERN_R11
#undef ATTNKERN_R10
#undef ATTNKERN_R9
#undef ATTNKERN_R8
#undef ATTNKERN_R7
#undef ATTNKERN_R6
#undef ATTNKERN_R5
#undef ATTNKERN_R4
#undef ATTNKERN_R3
#undef ATTNKERN_R2
#undef ATTNKERN_R1
#undef ATTNKERN_R0

template <typename T, int kN, bool kTransposeB, bool kTransposeA = false>
__device__ __forceinline__ void wgmma_ss(float (&d)[kN / 8][4], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  Wgmma<kN>::template ss<T, kTransposeA, kTransposeB>(d, a, b, accumulate);
}

template <typename T, int kN, bool kTransposeB>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  Wgmma<kN>::template rs<T, kTransposeB>(d, a, b, accumulate);
}

}  // namespace attnkern::ptx
