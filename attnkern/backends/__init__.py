"""Which backend runs a problem. The only place that chooses.

A backend is a module with

    NAME
    unavailable() -> str | None          why it cannot run at all on this machine
    refusals(problem) -> list[str]       why it cannot run this problem (cheap: asked in every call)
    notes(problem) -> list[str]          extra work, such as copying an input, for `explain`; optional
    plan(problem) -> list[str]           how its kernels cut the problem, for `explain`; optional
    forward, backward                    the operators of ops.py, with AttentionParams in place of their numbers

and its line in `TABLE`. All but `reference` are reached through the operators of ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from ..params import shown
from ..problem import Problem
from . import choice, cpu, cuda, disabled, reference, triton, triton_interpreted
from .failed import CannotBuild, warn_once

# Best first; on CUDA devices choice.py orders them. The reference runs on every device, alone on one without a line,
# and takes every call: nothing after it is ever chosen, it has to be asked for.
TABLE: dict[str, tuple[ModuleType, ...]] = {
    "cpu": (cpu, reference),
    "cuda": (triton, cuda, reference),
    "meta": (reference,),
}
if triton_interpreted.asked:
    TABLE |= {"cpu": (cpu, reference, triton), "cuda": (cuda, reference)}
_BY_NAME = {backend.NAME: backend for row in TABLE.values() for backend in row}


class BackendInfo(NamedTuple):
    """One backend, as `backends()` lists it."""

    name: str
    device_types: tuple[str, ...]
    available: bool
    why_not: str | None  # None if available


@dataclass(frozen=True)
class Explanation:
    """Which backend a call gets and why the others do not. str() is the text of the error and of the warning."""

    problem: str  # the inputs, in one line
    chosen: str | None  # None if the backend asked for refuses
    # Every backend in order of preference; an empty list: it can run the call. Then the parts of these that
    # ATTNKERN_DISABLE leaves out, by the names of disabled.py.
    refusals: dict[str, list[str]]
    notes: tuple[str, ...] = ()  # what the chosen one has to do besides, such as copying an input
    plan: tuple[str, ...] = ()  # how its kernels cut the problem
    order: str = ""  # why the backends stand in this order, where that is a choice

    def __str__(self) -> str:
        def line(name: str, reasons: list[str]) -> str:
            if name == self.chosen:
                chosen = f"chosen {self.order}" if self.order else "chosen"
                return "\n    ".join(["; ".join([f"  {name}: {chosen}", *self.notes]), *self.plan])
            return f"  {name}: {'; '.join(reasons) if reasons else 'could run this call'}"

        return "\n".join([f"  {self.problem}", *(line(name, reasons) for name, reasons in self.refusals.items())])


AT_RUN_TIME = "chosen at run time"
"""In place of a backend's name, as an operator's last argument: the call chooses. It knows its tensors' addresses."""
FIRST = {name: f"{name} first" for name in _BY_NAME}
"""In place of a backend's name: the call chose it, and another one runs where its kernels cannot be built."""
KERNELS = {name: backend for backend in (triton, cuda) for name in (backend.NAME, FIRST[backend.NAME])}
"""The backends whose `forward` and `backward` an eager call reaches past the operators where nothing listens to those,
by the names that operators know them by. (The CPU's are reached by csrc/common/direct.h.)"""


def select(problem: Problem, name: str | None = None, training: bool | None = None) -> ModuleType:
    """The backend that runs `problem`: the one named, or the first of its device that does not refuse.

    training says whether a backward pass follows; None: that is seen of the inputs.
    """
    if name is None:
        for backend in _row(problem, training):
            if not backend.refusals(problem):
                if backend is reference and problem.q.device.type != "meta":
                    _warn_fallback(_fallback_reasons(problem))
                return backend
    elif not _refusals(_named(name), problem):
        return _named(name)
    elif (reason := _named(name).unavailable()) == triton.NOT_INSTALLED:  # whatever else there is against the call
        raise RuntimeError(f"attnkern: backend {name!r} cannot run this call: {reason}")
    raise RuntimeError(f"attnkern: backend {name!r} cannot run this call\n{explain(problem, name)}")


def name_for_operators(backend: ModuleType, problem: Problem, asked: str | None) -> str:
    """The operators' argument `backend`. A trace knows no addresses, and its graph serves other shapes: on devices
    where the order of backends depends on them, each call of the graph chooses again. A backend that was asked for
    stands alone; one that was chosen does not."""
    if asked is not None or backend is reference or not problem.q.is_cuda:
        return backend.NAME
    return AT_RUN_TIME if torch.compiler.is_compiling() else FIRST[backend.NAME]


def kernels_for(problem: Problem) -> tuple[ModuleType | None, str]:
    """The first backend with kernels that takes `problem`, or None and why none does: for a caller with a choice."""
    chosen = next(backend for backend in _row(problem) if not backend.refusals(problem))
    return (None, _fallback_reasons(problem)) if chosen is reference else (chosen, "")


def explain(problem: Problem, name: str | None = None) -> Explanation:
    """What `select` does with the same arguments, as data. Warns of nothing; raises for an unknown name only."""
    row = _row(problem)
    others = [backend for backend in _BY_NAME.values() if backend not in row]
    refusals = {backend.NAME: _refusals(backend, problem) for backend in (*row, *others)}
    candidates = list(refusals) if name is None else [_named(name).NAME]
    chosen = next((n for n in candidates if not refusals[n]), None)
    told = [getattr(_BY_NAME[chosen], hook, None) if chosen is not None else None for hook in ("notes", "plan")]
    notes, plan = (tuple(hook(problem)) if hook else () for hook in told)
    found = _rule(problem) if name is None else None
    for backend in row:
        refusals |= {part: [disabled.REASON] for part in disabled.parts(backend.NAME)}
    order = "" if found is None else choice.told(found[0])
    return Explanation(str(problem), chosen, refusals, notes, plan, order)


def backends() -> list[BackendInfo]:
    """Every backend, the devices it runs on, and whether it can run here."""
    infos = []
    for name, backend in _BY_NAME.items():
        devices = ("any",) if backend is reference else tuple(d for d, row in TABLE.items() if backend in row)
        why_not = backend.unavailable()
        infos.append(BackendInfo(name, devices, why_not is None, why_not))
    return infos


# `attnkern.backends` is this function: `import attnkern.backends.cpu as c` finds the module as its attribute.
vars(backends).update(choice=choice, cpu=cpu, cuda=cuda, disabled=disabled, reference=reference, triton=triton)
vars(backends).update(triton_interpreted=triton_interpreted)


def with_kernels(name: str, device_type: str) -> ModuleType:
    """The backend that an operator names as its last argument, for tensors of a kind of device."""
    row = TABLE.get(device_type, ())
    for backend in row:
        if name in (backend.NAME, FIRST[backend.NAME]) and backend is not reference:
            return backend
    names = ", ".join(repr(backend.NAME) for backend in row if backend is not reference)
    raise ValueError(f"attnkern: backend must be one of {names or 'none'} on {device_type} tensors, got {shown(name)}")


def after(failed: Sequence[ModuleType], problem: Problem, training: bool | None, reason: CannotBuild) -> ModuleType:
    """The next backend for a call of which `failed`, the last one for `reason`, cannot build the kernels. Warns."""
    row = [backend for backend in _row(problem, training) if backend not in failed]
    chosen = next(backend for backend in row if not backend.refusals(problem))
    told = f"{failed[-1].NAME}: {reason}"
    if chosen is reference:
        _warn_fallback("; ".join([told, *(f"{b.NAME}: {why}" for b in row for why in b.refusals(problem))]))
    else:
        warn_once(told, f"attnkern: {chosen.NAME} runs this attention in place of another backend ({told})")
    return chosen


def _named(name: str) -> ModuleType:
    if name not in _BY_NAME:
        raise ValueError(
            f"attnkern: backend must be one of {', '.join(map(repr, _BY_NAME))} or None, got {shown(name)}"
        )
    return _BY_NAME[name]


def _row(problem: Problem, training: bool | None = None) -> tuple[ModuleType, ...]:
    if problem.q.is_cpu:  # as below, in a third of the time
        return TABLE["cpu"]
    row = TABLE.get(problem.q.device.type, (reference,))
    if torch.compiler.is_compiling() or (found := _rule(problem, training)) is None:
        return row  # each call of a graph chooses its order
    rule, plan = found
    hopper = "cuda-sm90" in rule.order and cuda.is_for_hopper(plan)
    names = [name.removesuffix("-sm90") for name in rule.order if hopper or name != "cuda-sm90"]
    return tuple(dict.fromkeys((*(_BY_NAME[name] for name in names), *row)))


def _rule(problem: Problem, training: bool | None = None) -> tuple[choice.Rule, cuda.Plan] | None:
    """The rule for the order of a CUDA device's backends, and the plan that it goes by; None on other devices, and for
    calls that the CUDA C++ kernels refuse: there is nothing to order."""
    if not problem.q.is_cuda or not torch.cuda.is_available() or cuda.refusals(problem):
        return None
    plan, index = cuda.plan_of(problem), problem.q.get_device()
    choice.tell(index)
    return choice.rule_for(choice.kind_of(problem, plan, cuda.capability(index), training)), plan


def _refusals(backend: ModuleType, problem: Problem) -> list[str]:
    device = problem.q.device.type
    if backend is not reference and backend not in TABLE.get(device, ()):
        hint = f", where {triton_interpreted.VARIABLE}=1, set before Python starts, has its kernels interpreted"
        return [f"query is on {device}{hint if backend is triton and device == 'cpu' else ''}"]
    return backend.refusals(problem)


def _fallback_reasons(problem: Problem) -> str:
    reasons = [f"{b.NAME}: {reason}" for b in _row(problem) if b is not reference for reason in b.refusals(problem)]
    return "; ".join(reasons) or f"no backend has kernels for {problem.q.device.type} tensors"


def _warn_fallback(reasons: str) -> None:
    warn_once(reasons, f"attnkern: plain torch runs this attention, slowly and with memory for all scores ({reasons})")


# A trace warns once, when it is made: torch.compiler.assume_constant_result, which does just this but first imports
# all of Dynamo (0.7 s).
_warn_fallback._dynamo_marked_constant = True  # type: ignore[attr-defined]
