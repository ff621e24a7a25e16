#define ATTNKERN_KERNELS kKernelsAvx512
#define ATTNKERN_ISA "avx512"
#include "table.h"
