// What the units of one instruction set share. Every .cpp of this folder is compiled once for each instruction set,
// with its flags and its name as ATTNKERN_ISA (ISA in setup.py); the name is the namespace of what the units give each
// other.
#pragma once

#include "cpu/gemm.h"
#include "cpu/kernels.h"
#include "cpu/tasks.h"

namespace attnkern::cpu::ATTNKERN_ISA {

// A pass each, for the element types of by_dtype.
void forward(const Forward&, const Runtime&);
void decode(const Forward&, const Runtime&);
void backward(const Backward&, const Runtime&);
// A backward pass for which the kernels of decoding will do (few_queries.h).
bool has_few_queries(const Backward&);
void backward_few_queries(const Backward&, const Runtime&);
// The same as tasks, cut for so many threads, of which `workers` run them, or those of other calls beside them. The
// problem must stay where it is.
Plan plan_forward(const Forward&, int64_t threads, int64_t workers);
Plan plan_decode(const Forward&, int64_t threads);
Plan plan_backward(const Backward&, int64_t threads, int64_t workers);
Plan plan_few_queries(const Backward&);

namespace {

#if defined(__AVX512BF16__)
using BFloat16Dot = PairDot;
#else
using BFloat16Dot = ConvertedDot;  // rows are converted to float32 as they are read
#endif

// run.operator()<T, Op>() for elements T of a dtype and their products. What has no instructions of its own here, and
// isn't a Zen 5's float32, table.cpp leaves to the set below.
template <class Run>
void by_dtype([[maybe_unused]] DType dtype, const Run& run) {
#if defined(__AVX512BF16__)
  if constexpr (kZen5)
    if (dtype == DType::kFloat32) return run.template operator()<float, Dot<float> >();
  run.template operator()<BFloat16, BFloat16Dot>();
#else
  switch (dtype) {
    case DType::kFloat32: return run.template operator()<float, Dot<float> >();
    case DType::kFloat64: return run.template operator()<double, Dot<double> >();
    case DType::kBFloat16: return run.template operator()<BFloat16, BFloat16Dot>();
    default: return run.template operator()<Float16, ConvertedDot>();
  }
#endif
}

}  // namespace
}  // namespace attnkern::cpu::ATTNKERN_ISA
