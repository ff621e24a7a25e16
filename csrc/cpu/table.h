// Fills the table of one instruction set. An isa_*.cpp defines ATTNKERN_KERNELS (the table's name) and ATTNKERN_ISA.
#include "backward.h"
#include "decode.h"
#include "kernels.h"

namespace attnkern::cpu {
namespace {

#if defined(__AVX512BF16__)
using BFloat16Dot = PairDot;
#else
using BFloat16Dot = ConvertedDot;  // rows are converted to float32 as they are read
#endif

// One thread for what it finishes before a second one has started: some microseconds of arithmetic, or of reading,
// where an element of K or V counts as ten scores.
Runtime threads_for(const Forward& p, const Runtime& runtime) {
  constexpr int64_t kSmall = 1 << 20;
  const int64_t scores = p.heads_q * p.seqlen_q * p.seqlen_k, reads = 10 * p.heads_k * p.seqlen_k;
  const bool small = p.batch * (scores + reads) * (p.head_dim + p.head_dim_v) < kSmall;
  return {small ? 1 : runtime.num_threads, runtime.parallel};
}

template <class T, class Op>
void choose_forward(const Forward& p, const Runtime& runtime) {
  if (decodes(p)) decode<T, Op>(p, runtime);
  else forward<T, Op>(p, runtime);
}

void run_forward(const Forward& p, const Runtime& all) {
  const Runtime runtime = threads_for(p, all);
  switch (p.dtype) {
    case DType::kFloat32: return choose_forward<float, Dot<float>>(p, runtime);
    case DType::kFloat64: return choose_forward<double, Dot<double>>(p, runtime);
    case DType::kBFloat16: return choose_forward<BFloat16, BFloat16Dot>(p, runtime);
    default: return choose_forward<Float16, ConvertedDot>(p, runtime);
  }
}

void run_backward(const Backward& p, const Runtime& runtime) {
  switch (p.dtype) {
    case DType::kFloat32: return backward<float, Dot<float>>(p, runtime);
    case DType::kFloat64: return backward<double, Dot<double>>(p, runtime);
    case DType::kBFloat16: return backward<BFloat16, BFloat16Dot>(p, runtime);
    default: return backward<Float16, ConvertedDot>(p, runtime);
  }
}

double peak_work(DType dtype, int64_t iterations) {
  if (dtype == DType::kFloat64) return gemm_peak<Dot<double>>(iterations);
  return dtype == DType::kBFloat16 ? gemm_peak<BFloat16Dot>(iterations) : gemm_peak<Dot<float>>(iterations);
}

}  // namespace

const Kernels ATTNKERN_KERNELS = {ATTNKERN_ISA, run_forward, run_backward, peak_work};

}  // namespace attnkern::cpu
