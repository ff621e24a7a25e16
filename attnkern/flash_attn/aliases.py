"""These modules under the name flash_attn, for code that imports that."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

_NAME = "flash_attn"
_MODULES = ("", ".bert_padding", ".flash_attn_interface", ".layers", ".layers.rotary")
_replaced: list[dict[str, ModuleType]] = []  # what was there before: one entry while installed


def install(*, replace: bool = False) -> None:
    """Makes `import flash_attn` give this package, until `uninstall`; a second call changes nothing.

    Call it before the code that imports flash_attn is imported. Under that name are then flash_attn itself,
    flash_attn_interface, bert_padding and layers.rotary.

    Args:
        replace: also where the real flash_attn is installed. What has imported its names keeps them.

    Raises:
        ImportError: flash_attn is installed, and replace is False.
    """
    if _replaced:
        return
    if not replace and (_NAME in sys.modules or importlib.util.find_spec(_NAME) is not None):
        raise ImportError(
            "attnkern: flash_attn is installed, and stays what `import flash_attn` gives: "
            "install(replace=True) puts attnkern's in its place"
        )
    ours = {_NAME + name: importlib.import_module(__package__ + name) for name in _MODULES}
    _replaced.append(_removed())
    sys.modules.update(ours)


def uninstall() -> None:
    """Undoes `install`; without one, does nothing. What has imported names keeps them."""
    if _replaced:
        _removed()
        sys.modules.update(_replaced.pop())


def _removed() -> dict[str, ModuleType]:
    """The modules under the name flash_attn, which sys.modules then lacks."""
    names = [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]
    return {name: sys.modules.pop(name) for name in names}
