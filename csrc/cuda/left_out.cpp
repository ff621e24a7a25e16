// How attnkern/backends/cuda.py says which kernels are left out.
#include "cuda/left_out.h"

#include <torch/csrc/stable/library.h>

namespace {

void leave_out(int64_t families) { attnkern::cuda::left_out = families; }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(attnkern, m) { m.def("cuda_leave_out(int families) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(attnkern, CompositeExplicitAutograd, m) { m.impl("cuda_leave_out", TORCH_BOX(&leave_out)); }
