#include "cpu/backward.h"

#include "cpu/isa/isa.h"

void attnkern::cpu::ATTNKERN_ISA::backward(const Backward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() { cpu::backward<T, Op>(p, runtime); });
}
