#define ATTNKERN_KERNELS kKernelsGeneric
#define ATTNKERN_ISA "generic"
#include "table.h"
