#define ATTNKERN_KERNELS kKernelsNeon
#define ATTNKERN_ISA "neon"
#include "table.h"
