"""Which backend a CUDA call gets first, as data: `RULES`, the first that matches a call counts.

On chips that nobody has measured the order follows from how the kernels are made, and `explain` says so. `make gpu`
measures. A user's own measured rules are kept as JSON (`dump`, `load`) and put to use by `use_rules(load(path))`, like
tables of tiles.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..params import MAX_HEAD_DIM
from ..problem import Problem
from . import cuda, triton
from .cuda import Plan

PASSES = ("forward", "training")
KINDS = ("fast path", "generic", "decode")

UNMEASURED = "by structure, not measured"


class Rule(NamedTuple):
    """The order of backends for some calls. An empty tuple of `capabilities`, `passes` or `kinds` means any.

    `order` names backends; "cuda-sm90" is `cuda` where its Hopper kernels take the call. What the order leaves out
    comes after it.
    """

    capabilities: tuple[int, ...]  # compute capability times 10
    passes: tuple[str, ...]  # forward: nothing requires a gradient; training: something does
    kinds: tuple[str, ...]  # as the plan of the CUDA C++ kernels has it (csrc/cuda/kind.h); no decode in training
    head_dims: tuple[int, int]  # the larger of both head sizes is in this range, both ends included
    order: tuple[str, ...]
    because: str


ANY = (0, 2**30)
# As measured; `python -m bench.gpu --apply` writes them.
MEASURED: tuple[Rule, ...] = (
    Rule(
        (90,),
        ("forward",),
        ("decode",),
        (1, 512),
        ("cuda", "triton"),
        "a call takes 17 us, triton's 120; reading 512 MB 0.86 to 1.15x triton's speed, on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("forward",),
        ("fast path",),
        (1, 64),
        ("cuda-sm90", "triton"),
        "cuda 725 us, 1.56x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("forward",),
        ("generic",),
        (65, 128),
        ("cuda-sm90", "triton"),
        "cuda 844 us, 1.55x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("forward",),
        ("generic",),
        (1, 64),
        ("triton", "cuda-sm90"),
        "triton 1522 us, 1.00x cuda on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("forward",),
        ("fast path",),
        (65, 128),
        ("cuda-sm90", "triton"),
        "cuda 460 us, 1.60x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("forward",),
        ("fast path",),
        (129, 256),
        ("cuda-sm90", "triton"),
        "cuda 410 us, 1.40x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("forward",),
        ("generic",),
        (129, 256),
        ("cuda-sm90", "triton"),
        "cuda 586 us, 1.58x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("forward",),
        ("generic",),
        (257, 512),
        ("triton", "cuda"),
        "triton 1749 us, 1.62x cuda on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("training",),
        ("fast path",),
        (1, 64),
        ("cuda-sm90", "triton"),
        "cuda 2584 us, 1.79x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("training",),
        ("fast path",),
        (65, 128),
        ("cuda-sm90", "triton"),
        "cuda 2003 us, 1.58x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("training",),
        ("generic",),
        (65, 128),
        ("cuda-sm90", "triton"),
        "cuda 3153 us, 1.70x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("training",),
        ("fast path",),
        (129, 256),
        ("cuda-sm90", "triton"),
        "cuda 1872 us, 2.70x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("training",),
        ("generic",),
        (1, 64),
        ("cuda-sm90", "triton"),
        "cuda 5018 us, 1.54x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("training",),
        ("generic",),
        (129, 256),
        ("cuda-sm90", "triton"),
        "cuda 2469 us, 2.64x triton on NVIDIA H200",
    ),
    Rule(
        (90,),
        ("training",),
        ("generic",),
        (257, 512),
        ("cuda", "triton"),
        "cuda 11951 us, 1.21x triton on NVIDIA H200",
    ),
)
# Of kernels as they are here (docs/cuda_kernels.md).
RULES: tuple[Rule, ...] = (
    *MEASURED,
    Rule((), (), ("decode",), ANY, ("triton", "cuda"), "kernels that hold no feature but the call's"),
    Rule(
        (90,),
        (),
        ("fast path",),
        ANY,
        ("cuda-sm90", "triton", "cuda"),
        "softmax beside P V, where Triton's kernels wait",
    ),
    Rule((90, 100, 103), (), (), ANY, ("triton", "cuda"), "wgmma or tcgen05 outruns mma.sync"),
    Rule((), (), ("fast path",), ANY, ("cuda", "triton"), "less traffic of shared memory for the same products"),
    Rule((), (), (), ANY, ("triton", "cuda"), "kernels that hold no feature but the call's"),
)
_rules: tuple[Rule, ...] = RULES
_source = UNMEASURED


class CallKind(NamedTuple):
    """What rules tell calls apart by."""

    capability: int
    training: bool
    kind: str
    head_dim: int


def kind_of(problem: Problem, plan: Plan, capability: int, training: bool | None = None) -> CallKind:
    """A CUDA call as rules see it, with the plan of the CUDA C++ kernels. training: whether a backward pass follows;
    None: that is seen of the inputs."""
    q, _, v, *_ = problem
    if training is None:
        training = problem.wanted() > 0
    kind = "generic" if training and plan.kind == "decode" else plan.kind
    return CallKind(capability, training, kind, max(q.shape[3], v.shape[3]))


def rule_for(call: CallKind) -> Rule:
    """The first rule that matches. Every set of rules ends with one for all calls."""
    return _known_match(call)


def _first_match(call: CallKind) -> Rule:
    for rule in _rules:
        if _matches(rule, call):
            return rule
    raise LookupError(f"no rule for {call}")


_known_match = functools.cache(_first_match)


def source() -> str:
    """Where the rules in use come from: "by structure, not measured", or what their file says of itself."""
    return _source


def told(rule: Rule) -> str:
    """A rule, in words."""
    return f"{'as measured' if rule in MEASURED else _source} ({rule.because})"


def use_rules(rules: Sequence[Rule], source: str = UNMEASURED) -> None:
    """Makes `rules` (a result of `load`, or `RULES`) those of this process. Those of `RULES` follow them."""
    global _rules, _source
    _rules, _source = (*rules, *RULES), source
    _known_match.cache_clear()
    for index in _told:
        cuda.stands_first(index, None)
    _told.clear()


_told: set[int] = set()


def tell(index: int) -> None:
    """Lets calls past the dispatcher know for which calls of a CUDA device the CUDA C++ kernels stand first."""
    if index in _told:
        return
    capability, has_triton = cuda.capability(index), triton.unavailable() is None

    def is_first(kind: str, for_hopper: bool, size: int) -> bool:
        for name in rule_for(CallKind(capability, False, kind, size)).order:
            if name == "triton" and has_triton:
                return False
            if name == "cuda" or (name == "cuda-sm90" and for_hopper):
                return True
        return False

    calls = itertools.product(KINDS, (False, True), range(MAX_HEAD_DIM + 1))
    cuda.stands_first(index, bytes(itertools.starmap(is_first, calls)))
    _told.add(index)


def load(path: str | Path) -> tuple[list[Rule], str]:
    """Rules as `dump` wrote them, and their source: the arguments of `use_rules`.

    Raises ValueError for a rule with a pass, a kind or a backend that isn't known.
    """
    content = json.loads(Path(path).read_text())
    rules = []
    for entry in content["rules"]:
        fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in entry.items()}
        rule = Rule(**fields)
        for name, found, known in (
            ("passes", rule.passes, PASSES),
            ("kinds", rule.kinds, KINDS),
            ("order", rule.order, ("triton", "cuda", "cuda-sm90", "reference")),
        ):
            if unknown := set(found) - set(known):
                raise ValueError(
                    f"{path}: {name} may hold {', '.join(map(repr, known))}, got {', '.join(map(repr, unknown))}"
                )
        rules.append(rule)
    return rules, "as measured on " + ", ".join(str(value) for value in content["about"].values())


def dump(rules: Sequence[Rule], path: str | Path, about: Mapping[str, Any]) -> None:
    """Writes rules as JSON; `about` says on which device and how they were measured."""
    lines = ",\n".join(f"  {json.dumps(rule._asdict())}" for rule in rules)
    Path(path).write_text(f'{{"about": {json.dumps(dict(about))},\n"rules": [\n{lines}\n]}}\n')


def _matches(rule: Rule, call: CallKind) -> bool:
    low, high = rule.head_dims
    return (
        (not rule.capabilities or call.capability in rule.capabilities)
        and (not rule.passes or PASSES[call.training] in rule.passes)
        and (not rule.kinds or call.kind in rule.kinds)
        and low <= call.head_dim <= high
    )
