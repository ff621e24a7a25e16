#define ATTNKERN_KERNELS kKernelsAvx512Bf16
#define ATTNKERN_ISA "avx512bf16"
#include "table.h"
