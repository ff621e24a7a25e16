"""A PTX simulator: GPU kernels, compiled for real, run on the CPU with a hazard checker (docs/proving_kernels.md)."""

from .compilers import SHARED_LIMIT, nvcc, use_compiler
from .errors import Deadlock, Fault, Hazard, LaunchError, PtxError, SimulationError, UnsupportedInstruction
from .front import Compiled, Report, compile_triton, cuda, from_ptx, launch, of_triton, run

__all__ = [
    "SHARED_LIMIT",
    "Compiled",
    "Deadlock",
    "Fault",
    "Hazard",
    "LaunchError",
    "PtxError",
    "Report",
    "SimulationError",
    "UnsupportedInstruction",
    "compile_triton",
    "cuda",
    "from_ptx",
    "launch",
    "nvcc",
    "of_triton",
    "run",
    "use_compiler",
]
