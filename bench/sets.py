"""What a set of cases runs with unless the command line says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.cases import CASES, Case


@dataclass(frozen=True)
class Defaults:
    passes: tuple[str, ...] = ("forward", "backward")
    providers: str | None = None
    budget: float = 2.0
    rounds: int = 11


# Against torch's ways to the same, and our own without the mask and with a dense one. Training is both passes.
MASKED = Defaults(("forward", "both"), "cpu,triton,cuda,cpu-plain,cuda-plain,cpu-bool,sdpa,flex,torch-varlen", 4.0, 9)

DEFAULTS = {
    # A few minutes on two cores. The math kernel would take as long again.
    "quick-sweep": Defaults(providers="cpu,triton,cuda,sdpa", budget=0.6, rounds=7),
    "growth": Defaults(("forward",), "cpu,triton,cuda,sdpa"),
    "launch-overhead": Defaults(
        ("forward", "forward-grad", "both"), "cpu,cpu-op,triton,triton-host,triton-launch,cuda,sdpa,sdpa-op", 4.0, 31
    ),
    "smoke": Defaults(budget=0.3, rounds=3),
    "relative": Defaults(("forward", "both"), "cpu,triton,cuda,cpu-plain,cuda-plain,sdpa,flex", 4.0, 9),
    "pages": Defaults(("forward",), "cpu,cpu-pages-16,cpu-pages-64,sdpa", 3.0, 9),
    "sinks": Defaults(("forward", "both"), "cpu,triton,cuda,cpu-plain,cuda-plain,sdpa", 4.0, 15),
    **dict.fromkeys(("documents", "packed", "padding", "streaming", "prefix"), MASKED),
}


def defaults_for(pattern: str) -> Defaults:
    return DEFAULTS.get(pattern, Defaults())


def tags(cases: Sequence[Case] = CASES) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in cases:
        for tag in case.tags:
            found.setdefault(tag, []).append(case)
    return found
