"""The instruction families. Importing this package registers every decoder."""

# ruff: noqa: F401
from . import (
    barrier,
    bulk,
    control,
    cp_async,
    floating,
    integer,
    matrix,
    mbarrier,
    memory,
    tensormap,
    warp,
    wgmma,
)


def wrappers(kernel, target):
    """Functions (decoder, step) -> step that a family lays around every instruction of this kernel."""
    return [wrap for wrap in (wgmma.wrapper(kernel),) if wrap is not None]
