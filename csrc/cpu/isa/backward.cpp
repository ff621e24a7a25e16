#include "cpu/backward_tasks.h"
#include "cpu/isa/isa.h"

void attnkern::cpu::ATTNKERN_ISA::backward(const Backward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() { cpu::backward<T, Op>(p, runtime); });
}

attnkern::cpu::Plan attnkern::cpu::ATTNKERN_ISA::plan_backward(const Backward& p, int64_t threads, int64_t workers) {
  Plan plan{};
  by_dtype(p.dtype, [&]<class T, class Op>() { plan = plan_of(new BackwardCall<T, Op>(p, threads, workers)); });
  return plan;
}
