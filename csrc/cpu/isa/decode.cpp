#include "cpu/decode.h"

#include "cpu/isa/isa.h"

void attnkern::cpu::ATTNKERN_ISA::decode(const Forward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() { cpu::decode<T, Op>(p, runtime); });
}

attnkern::cpu::Plan attnkern::cpu::ATTNKERN_ISA::plan_decode(const Forward& p, int64_t threads) {
  Plan plan{};
  by_dtype(p.dtype, [&]<class T, class Op>() { plan = plan_of(new DecodeCall<T, Op>(p, threads)); });
  return plan;
}
