#define ATTNKERN_KERNELS kKernelsAvx2
#define ATTNKERN_ISA "avx2"
#include "table.h"
