#include "cpu/backward.h"

#include "cpu/isa/isa.h"
#include "cpu/sinks.h"

void attnkern::cpu::ATTNKERN_ISA::backward(const Backward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() { cpu::backward<T, Op>(p, runtime); });
}

void attnkern::cpu::ATTNKERN_ISA::backward_sinks(const Backward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() { cpu::backward_sinks<T, typename Op::Compute>(p, runtime); });
}
