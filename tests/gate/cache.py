"""Results kept in the user's cache folder by the content of what they were made from."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def product() -> ModuleType:
    """setup.py: the flags that the product is compiled with, where nvcc is, and where results outlive a checkout."""
    spec = importlib.util.spec_from_file_location("attnkern_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


key_of: Callable[..., str] = product().key_of
folder = product().user_folder() / "gate"
compiled = found = 0  # results of this process that weren't in the cache, and that were


@functools.cache
def _digest(path: str, mtime_ns: int, size: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def digest(path: str) -> str | None:
    """Hash of a file's content (ROOT/path where path is relative), None where there is none."""
    full = ROOT / path
    try:
        stat = full.stat()
    except OSError:
        return None
    return _digest(str(full), stat.st_mtime_ns, stat.st_size)


def lookup(key: str) -> Any | None:
    """The result kept under key, unless a file that it was made from has changed since."""
    try:
        entry = json.loads((folder / f"{key}.json").read_text())
    except FileNotFoundError:
        return None
    if any(digest(path) != then for path, then in entry["files"].items()):
        return None
    return entry["result"]


def cached(key: str, make: Callable[[], tuple[Any, Iterable[str]]]) -> Any:
    """The result under key; else make's, which also names the files read. One process makes it, others wait."""
    global compiled, found
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (result := lookup(key)) is None:
            result, files = make()
            compiled += 1
            entry = {"result": result, "files": {path: digest(path) for path in files}}
            unfinished = folder / f"{key}.{os.getpid()}.tmp"
            unfinished.write_text(json.dumps(entry))
            unfinished.replace(folder / f"{key}.json")
        else:
            found += 1
    return result
