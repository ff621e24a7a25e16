"""The grammar of the command line's values. A ValueError says what is wrong with which value."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from bench.cases import DTYPES, Case, override

from .provider import PASSES

PASS_NAMES = {"fwd": "forward", "bwd": "backward", **{p: p for p in PASSES}}
DTYPE_NAMES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", **{d: d for d in DTYPES}}


def names(text: str, allowed: dict[str, str]) -> list[str]:
    """A comma-separated list of allowed names, each once."""
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in allowed:
            raise ValueError(f"{name!r} is none of {', '.join(allowed)}")
        found.append(allowed[name])
    if not found:
        raise ValueError("nothing is named")
    return list(dict.fromkeys(found))


def integers(text: str) -> list[int]:
    """``512``, ``64,128``, ``512:16k:x2`` (times two up to 16384), ``100:500:+100``; k is 1024."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\w+):(\w+):([x+])(\w+)", part)
        if match is None:
            found.append(_integer(part))
            continue
        value, last, step = _integer(match[1]), _integer(match[2]), _integer(match[4])
        if step < (2 if match[3] == "x" else 1):
            raise ValueError(f"{part!r} never gets to its end")
        if value > last:
            raise ValueError(f"{part!r} ends before it begins")
        while value <= last:
            found.append(value)
            value = value * step if match[3] == "x" else value + step
    return found


def _integer(text: str) -> int:
    match = re.fullmatch(r"(\d+)(k?)", text)
    if match is None or int(match[1]) < 1:
        raise ValueError(f"{text!r} is no positive number, list (64,128) or range (512:16k:x2)")
    return int(match[1]) * (1024 if match[2] else 1)


def _floats(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is no list of numbers") from None


def _booleans(text: str) -> list[bool]:
    values = {"true": True, "false": False}
    if any(part not in values for part in text.split(",")):
        raise ValueError(f"{text!r} is none of true, false, true,false")
    return [values[part] for part in text.split(",")]


def _windows(text: str) -> list[tuple[int | None, int | None] | None]:
    """``256/0``: 256 keys to the left, none to the right; an empty side is unbounded; ``none``: no window."""
    found: list[tuple[int | None, int | None] | None] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d*)/(\d*)", part)
        if match is None and part != "none":
            raise ValueError(f"{part!r} is no window (256/0, 128/128, 4096/, none)")
        found.append(match and (int(match[1]) if match[1] else None, int(match[2]) if match[2] else None))
    return found


def _words(text: str) -> list[str]:
    return text.split(",")


FIELDS: dict[str, tuple[str, Callable[[str], Sequence[Any]]]] = {
    "seqlen": ("seqlen_q", integers),
    "heads": ("heads_q", integers),
    **{name: (name, integers) for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k")},
    **{name: (name, integers) for name in ("head_dim", "head_dim_v")},
    **{name: (name, _floats) for name in ("dropout", "softcap", "scale")},
    "dtype": ("dtype", lambda text: names(text, DTYPE_NAMES)),
    **{name: (name, _words) for name in ("mask", "layout", "alignment")},
    "causal": ("causal", _booleans),
    "sinks": ("sinks", _booleans),
    "window": ("window", _windows),
}


def overrides(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of ``field=values`` items, as keyword arguments of :func:`bench.cases.override`."""
    axes: list[list[tuple[str, Any]]] = []
    for text in texts:
        field, equals, values = text.partition("=")
        if not equals or field not in FIELDS:
            raise ValueError(f"{text!r} must be field=values with a field of {', '.join(FIELDS)}")
        name, parse = FIELDS[field]
        axes.append([(name, value) for value in parse(values)])
    return [dict(combination) for combination in itertools.product(*axes)]


def apply(cases: Sequence[Case], changes: Sequence[dict[str, Any]]) -> list[Case]:
    """Every case under every change, without repetitions. Raises ValueError for a change that makes no valid case."""
    changed = [override(case, **change) for case in cases for change in changes]
    return list({case.name: case for case in changed}.values())
