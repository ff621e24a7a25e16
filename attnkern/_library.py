"""Finds and loads the compiled libraries; importing it never fails.

A library that is missing or doesn't load is a reason to report (:func:`load_error`), which the backends turn into a
refusal: the package stays usable through the backends that need no compiled library.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).parent
# _C first: it needs nothing. _cuda is absent where it was built without nvcc.
_LIBRARIES = ("_C", "_cuda")


def _load(name: str) -> str | None:
    path = _PACKAGE / f"{name}.abi3.so"
    if not path.exists():
        if name == "_cuda" and _ERRORS["_C"] is None:
            return f"attnkern was built without its CUDA library ({_build_record().get('cuda', 'unknown reason')})."
        hidden = next((x for x in (Path(folder, "attnkern", path.name) for folder in sys.path) if x.exists()), None)
        if hidden is not None:  # Python was started in a checkout
            return f"{path} is missing, and hides {hidden}: start Python in another folder, or build it (`make build`)."
        return f"{path} is missing: build it with `make build` in a checkout, or reinstall attnkern."
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        return f"{path} does not load ({reason}): rebuild it with `make build` in a checkout, or reinstall attnkern."
    return None


def _build_record() -> dict[str, Any]:
    """What setup.py wrote beside the libraries; empty if there is nothing readable."""
    try:
        return json.loads((_PACKAGE / "_build.json").read_text())
    except (OSError, ValueError):
        return {}


def _find_triton_kernels() -> None:
    """In a checkout that isn't installed, triton_kernels/ lies beside this package instead of in it."""
    checkout = _PACKAGE.parent
    if not (_PACKAGE / "triton_kernels").exists() and (checkout / "triton_kernels" / "__init__.py").exists():
        sys.modules[__package__].__path__.append(str(checkout))


_ERRORS: dict[str, str | None] = {}
for _name in _LIBRARIES:
    _ERRORS[_name] = _load(_name)
_find_triton_kernels()


def load_error(name: str = "_C") -> str | None:
    """Why the compiled library ``name`` (``"_C"``, ``"_cuda"``) isn't there, in one sentence; None if it is loaded."""
    return _ERRORS[name]


def python_functions() -> tuple[Any, ...]:
    """The functions that csrc/direct.cpp has for Python; _C must be loaded."""
    make = ctypes.PyDLL(str(_PACKAGE / "_C.abi3.so")).attnkern_python_functions
    make.restype = ctypes.py_object
    return make()


def build_info() -> dict[str, Any]:
    """What this attnkern is made of: versions, compiled libraries, instruction set, compilers.

    Returns:
        A dict of strings, lists and None: ``attnkern``, ``torch`` and ``python`` (versions), ``cpu_library`` and
        ``cuda_library`` (a path, or why it isn't loaded), ``cpu_isa`` (the instruction set in use; None without the
        CPU library), and as recorded when the libraries were built (None if nothing was recorded): ``built_for_torch``,
        ``cpu_compiler``, ``cpu_flags``, ``cpu_isas``, ``cuda_compiler``, ``cuda_flags``, ``cuda_archs``.
    """
    record = _build_record()
    cuda = record["cuda"] if isinstance(record.get("cuda"), dict) else {}
    return {
        "attnkern": sys.modules[__package__].__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cpu_library": _ERRORS["_C"] or str(_PACKAGE / "_C.abi3.so"),
        "cuda_library": _ERRORS["_cuda"] or str(_PACKAGE / "_cuda.abi3.so"),
        "cpu_isa": _cpu_isa(),
        "built_for_torch": record.get("torch"),
        "cpu_compiler": record.get("compiler"),
        "cpu_flags": record.get("flags"),
        "cpu_isas": list(record["isa"]) if "isa" in record else None,
        "cuda_compiler": cuda.get("compiler"),
        "cuda_flags": cuda.get("flags"),
        "cuda_archs": cuda.get("archs"),
    }


def _cpu_isa() -> str | None:
    if _ERRORS["_C"] is not None:
        return None
    try:
        return torch.ops.attnkern.cpu_isa()
    except RuntimeError as error:  # a bad ATTNKERN_CPU_ISA: this report is where one looks for the cause
        return str(error).splitlines()[0]
