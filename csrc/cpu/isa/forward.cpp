#include "cpu/forward.h"

#include "cpu/isa/isa.h"

void attnkern::cpu::ATTNKERN_ISA::forward(const Forward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() { cpu::forward<T, Op>(p, runtime); });
}
