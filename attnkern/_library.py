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
from torch.autograd import forward_ad

from .arguments import listeners
from .params import DTYPES

_PACKAGE = Path(__file__).parent
# _C first: it needs nothing. _cuda is absent where it was built without nvcc.
_LIBRARIES = ("_C", "_cuda")


def path_of(name: str) -> Path:
    """Where the compiled library ``name`` is, or would be."""
    return _PACKAGE / f"{name}.abi3.so"


def _load(name: str) -> str | None:
    path = path_of(name)
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


# DLPack's number of a kind of device, and torch's attribute of its tensors.
_DEVICES = {"cpu": (1, "is_cpu"), "cuda": (2, "is_cuda")}


def by_the_operators(*arguments: Any) -> None:
    """In place of a function that goes past torch's dispatcher: as it answers a call that it doesn't take."""
    return None


NOTHING_DIRECT = (by_the_operators,) * 3


def past_the_dispatcher(library: Path, device: str, empty_strided: Any = None) -> tuple[Any, ...]:
    """What a compiled library, which must be loaded, has for Python beside its operators (csrc/common/direct.h), but
    for `connect`; without effect where torch lacks what it needs. empty_strided: what makes its results; None: torch's
    own."""
    try:
        capsule = torch.Tensor.__dlpack_c_exchange_api__
        make = empty_strided or getattr(torch._C._dynamo.guards, f"_empty_strided_{device}")
        # Problem and autograd/ have handled those before an operator is called.
        for_the_caller = (torch._C._is_any_autocast_enabled, lambda: forward_ad._current_level >= 0)
    except AttributeError:
        return NOTHING_DIRECT
    if listeners is None:
        return NOTHING_DIRECT
    functions_of = ctypes.PyDLL(str(library)).attnkern_python_functions
    functions_of.restype = ctypes.py_object
    connect, *functions = functions_of()
    own = torch.Tensor, torch.Tensor.is_neg, make, DTYPES, listeners, for_the_caller
    connect(capsule, *own, torch.is_grad_enabled, *_DEVICES[device])
    return tuple(functions)


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
        "cpu_library": _ERRORS["_C"] or str(path_of("_C")),
        "cuda_library": _ERRORS["_cuda"] or str(path_of("_cuda")),
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
