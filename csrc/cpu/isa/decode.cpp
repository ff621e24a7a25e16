#include "cpu/decode.h"

#include "cpu/isa/isa.h"

void attnkern::cpu::ATTNKERN_ISA::decode(const Forward& p, const Runtime& runtime) {
  by_dtype(p.dtype, [&]<class T, class Op>() { cpu::decode<T, Op>(p, runtime); });
}
