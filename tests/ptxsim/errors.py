"""What the simulator raises."""


class PtxError(ValueError):
    """PTX text that can't be read; the message names the line."""


class UnsupportedInstruction(PtxError):
    """An instruction, modifier or operand form that the simulator does not model. It never guesses."""


class LaunchError(ValueError):
    """A launch that can't be made: a wrong tensor, grid, target or parameter."""


class SimulationError(RuntimeError):
    """Something went wrong while the kernel ran; the message ends with where."""


class Fault(SimulationError):
    """What a GPU would trap on, or leave undefined: a bad address, a misused barrier, a divergent collective."""


class Hazard(SimulationError):
    """Two accesses to one location that nothing orders, or a read of memory that nobody wrote."""


class Deadlock(SimulationError):
    """No thread can go on; the message says who waits for what."""
