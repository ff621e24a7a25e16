// The table of one instruction set, and which pass a forward problem is for.
#include "cpu/decode.h"
#include "cpu/few_keys_backward.h"
#include "cpu/isa/isa.h"
#include "cpu/sequences.h"

#define ATTNKERN_NAME_OF(isa) #isa
#define ATTNKERN_NAME(isa) ATTNKERN_NAME_OF(isa)

namespace attnkern::cpu::ATTNKERN_ISA {
namespace {

// One thread for what it finishes before a second one has started: some microseconds of arithmetic, or of reading,
// where an element of K or V counts as ten scores. `scores`: of a head of one entry of the batch.
Runtime threads_for(const Attention& p, const Runtime& runtime, int64_t scores) {
  constexpr int64_t kSmall = 1 << 20;
  const int64_t reads = 10 * p.heads_k * p.seqlen_k;
  const bool small = p.batch * (p.heads_q * scores + reads) * (p.head_dim + p.head_dim_v) < kSmall;
  return {small ? 1 : runtime.num_threads, runtime.parallel};
}

// The kernels for dtypes that by_dtype leaves to the set below; null: there are none.
const Kernels* others(DType dtype) {
#if defined(ATTNKERN_EMULATED)
  return dtype == DType::kBFloat16 ? nullptr : &avx2::kernels;
#elif defined(__AVX512BF16__)
  return dtype == DType::kBFloat16 || (kZen5 && dtype == DType::kFloat32) ? nullptr : &avx512::kernels;
#else
  return static_cast<void>(dtype), nullptr;
#endif
}

struct ForwardUnit {
  static void run(const Forward& p, const Runtime& runtime) {
    if (!has_few_keys(p)) return decodes(p) ? decode(p, runtime) : forward(p, runtime);
    by_dtype(p.dtype, [&]<class T, class Op>() { attend_few_keys<T, Op>(p, runtime); });
  }
  static Plan plan(const Forward& p, int64_t threads, int64_t workers) {
    return decodes(p) ? plan_decode(p, threads) : plan_forward(p, threads, workers);
  }
};

struct BackwardUnit {
  static void run(const Backward& p, const Runtime& runtime) {
    const Runtime threads = threads_for(p, runtime, p.seqlen_q * p.seqlen_k);
    bool few = false;
    by_dtype(p.dtype, [&]<class T, class Op>() {
      few = has_few_keys_and_queries<T, Op>(p);
      if (few) backward_few_keys<T, Op>(p, threads);
    });
    if (few) return;
    if (!has_few_queries(p)) return backward(p, runtime);
    backward_few_queries(p, threads);
  }
  static Plan plan(const Backward& p, int64_t threads, int64_t workers) {
    return has_few_queries(p) ? plan_few_queries(p) : plan_backward(p, threads, workers);
  }
};

void run_forward(const Forward& p, const Runtime& runtime) {
  if (const Kernels* kernels = others(p.dtype)) return kernels->forward(p, runtime);
  const Sequences sequences(p);
  if (sequences.count() == 0) return ForwardUnit::run(p, threads_for(p, runtime, p.seqlen_q * p.seqlen_k));
  forward_sequences<ForwardUnit>(p, sequences, threads_for(p, runtime, sequences.scores() / p.ranges.batch));
}

void run_backward(const Backward& p, const Runtime& runtime) {
  if (const Kernels* kernels = others(p.dtype)) return kernels->backward(p, runtime);
  if (has_no_score(p)) {  // the caller has filled the gradients with zeros, but for that of the sinks
    if (p.dsinks == nullptr) return;
    Backward of_sinks = p;
    of_sinks.dq.data = of_sinks.dk.data = of_sinks.dv.data = of_sinks.dbias.data = nullptr;
    return backward(of_sinks, runtime);
  }
  // (The gradient of a table is that of all sequences.)
  if (p.relative && p.dbias.data != nullptr) return backward(p, runtime);
  const Sequences sequences(p);
  if (sequences.count() == 0) return BackwardUnit::run(p, runtime);
  backward_sequences<BackwardUnit>(p, sequences, runtime);
}

double peak_work(DType dtype, int64_t iterations) {
  if (dtype == DType::kFloat64) return gemm_peak<Dot<double>>(iterations);
  return dtype == DType::kBFloat16 ? Tiles<BFloat16Dot>::peak(iterations) : gemm_peak<Dot<float>>(iterations);
}

}  // namespace

const Kernels kernels = {ATTNKERN_NAME(ATTNKERN_ISA), run_forward, run_backward, peak_work};

}  // namespace attnkern::cpu::ATTNKERN_ISA
