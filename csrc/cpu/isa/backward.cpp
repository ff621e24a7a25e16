#include "cpu/backward.h"

#include "cpu/isa/isa.h"

void attnkern::cpu::ATTNKERN_ISA::backward(const Backward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() {
    const SinksGradient<typename Op::Compute> sinks(p);
    cpu::backward<T, Op>(p, runtime, sinks);
    sinks.store();
  });
}
