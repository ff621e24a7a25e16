#include "cpu/forward.h"

#include "cpu/isa/isa.h"

void attnkern::cpu::ATTNKERN_ISA::forward(const Forward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() { cpu::forward<T, Op>(p, runtime); });
}

attnkern::cpu::Plan attnkern::cpu::ATTNKERN_ISA::plan_forward(const Forward& p, int64_t threads, int64_t workers) {
  Plan plan{};
  by_dtype(p.dtype, [&]<class T, class Op>() { plan = plan_of(new ForwardCall<T, Op>(p, threads, workers)); });
  return plan;
}
