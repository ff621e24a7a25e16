"""Which of F.sdpa's operators ran on which kernels, and why others did not."""

from __future__ import annotations

import threading
from collections import Counter
from typing import NamedTuple


class _Line(NamedTuple):
    operator: str  # as the profiler names it
    kernel: str  # "attnkern cpu", ... or "torch"
    reason: str  # why torch; empty for ours


_lines: Counter[tuple[str, str, str]] = Counter()  # _Line -> number of calls
_lines_lock = threading.Lock()
_MAX_LINES = 1000  # a reason may name sizes: a process that meets ever new ones must not grow for it


def count(operator: str, kernel: str, reason: str = "") -> None:
    line = _Line(operator, kernel, reason)
    with _lines_lock:
        if line not in _lines and len(_lines) >= _MAX_LINES:
            line = line._replace(reason="(other reasons)")
        _lines[line] += 1


class SdpaCalls:
    """Calls of F.sdpa's operators: on which kernels they ran and why others did not. str() is a table.

    One F.sdpa call counts once, its backward pass once more; what `full=True` refuses, once more where torch takes it.
    Calls of all threads count. A compiled graph counts when it runs; only what `full=True` itself or torch's composed
    maths handle is settled, and counted, when it is traced.
    """

    def __init__(self) -> None:
        with _lines_lock:
            self._before = Counter(_lines)
        self._after: Counter[tuple[str, str, str]] | None = None

    def _stop(self) -> None:
        with _lines_lock:
            self._after = Counter(_lines)

    @property
    def lines(self) -> dict[tuple[str, str, str], int]:
        """(operator, kernel, reason) -> number of calls; the reason is empty where attnkern ran."""
        if self._after is not None:
            return dict(self._after - self._before)
        with _lines_lock:
            return dict(_lines - self._before)

    @property
    def attnkern(self) -> int:
        """Number of calls, forward and backward, that ran on attnkern's kernels."""
        return sum(n for (_, kernel, _), n in self.lines.items() if kernel != "torch")

    @property
    def torch(self) -> int:
        """Number of calls, forward and backward, that ran on torch's kernels."""
        return sum(n for (_, kernel, _), n in self.lines.items() if kernel == "torch")

    def __str__(self) -> str:
        rows = [(str(n), *line) for line, n in sorted(self.lines.items())]
        if not rows:
            return "no calls of F.scaled_dot_product_attention"
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            f"{n:>{widths[0]}} x {operator:<{widths[1]}}  {kernel:<{widths[2]}}  {reason}".rstrip()
            for n, operator, kernel, reason in rows
        )

    __repr__ = __str__


_all_calls = SdpaCalls()


def sdpa_calls() -> SdpaCalls:
    """All F.sdpa calls that attnkern has seen in this process, while it was active in any way.

    Returns:
        A `SdpaCalls` that keeps counting; `use_as_sdpa` yields one of its own. Calls made while nothing is active are
        not seen.
    """
    return _all_calls
