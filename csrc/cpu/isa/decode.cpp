#include "cpu/few_queries.h"
#include "cpu/isa/isa.h"

void attnkern::cpu::ATTNKERN_ISA::decode(const Forward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() { cpu::decode<T, Op>(p, runtime); });
}

attnkern::cpu::Plan attnkern::cpu::ATTNKERN_ISA::plan_decode(const Forward& p, int64_t threads) {
  Plan plan{};
  by_dtype(p.dtype, [&]<class T, class Op>() { plan = plan_of(new DecodeCall<T, Op>(p, threads)); });
  return plan;
}

bool attnkern::cpu::ATTNKERN_ISA::has_few_queries(const Backward& p) {
  bool few = false;
  by_dtype(p.dtype, [&]<class T, class Op>() { few = cpu::has_few_queries<T, Op>(p); });
  return few;
}

void attnkern::cpu::ATTNKERN_ISA::backward_few_queries(const Backward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() { cpu::backward_few_queries<T, Op>(p, runtime); });
}

attnkern::cpu::Plan attnkern::cpu::ATTNKERN_ISA::plan_few_queries(const Backward& p) {
  Plan plan{};
  by_dtype(p.dtype, [&]<class T, class Op>() { plan = plan_of(new FewQueriesCall<T, Op>(p)); });
  return plan;
}
