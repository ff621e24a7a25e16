"""Runs a call and holds all that it computes to the rule; checks that the call changes nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .expectations import expected
from .problems import Inputs, Packed
from .reference import unattended


def _fill_malloc(on: bool) -> None:
    """glibc's malloc hands out memory full of 0xff bytes, a NaN in every floating dtype (M_PERTURB, which inverts)."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(-6, 0x100 if on else 0)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN inside: an output entry that a kernel forgets, or padding that it reads, shows.

    torch does it for the tensors that it allocates itself (as part of its deterministic mode), malloc for those of
    compiled operators and for the kernels' scratch.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic  # Any: its attribute is invisible to type checkers
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    _fill_malloc(True)
    try:
        yield
    finally:
        _fill_malloc(False)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = fill


@contextlib.contextmanager
def unmodified(*tensors: Tensor | None) -> Iterator[None]:
    """Asserts that the storage behind every tensor, what lies between its entries included, stays as it was."""

    def raw(x: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.detach().untyped_storage())

    kept = [(x, raw(x).clone(), x._version) for x in tensors if x is not None]
    yield
    for x, before, version in kept:
        assert torch.equal(raw(x), before), f"an input of shape {tuple(x.shape)} was written to"
        assert x._version == version, f"an input of shape {tuple(x.shape)} was modified in place"


def check_attention(
    inputs: Inputs,
    *,
    backend: str | None = None,
    gradients: bool = True,
    keep: Tensor | None = None,
    function: Callable[..., Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Runs `attnkern.attention` on `inputs` and holds output, log-sum-exp and all gradients to the rule.

    Also asserts dtypes, shapes, dense outputs that alias no input, and inputs left as they were. `function` replaces
    `attnkern.attention` (it then returns the output alone). Inputs with poison have it, in the call, wherever no query
    attends to, and in the gradients of output and log-sum-exp where a query attends to nothing; what is expected does
    not change. Returns what was computed, by the names of `expected`.
    """
    import attnkern

    recipe = f"{inputs.recipe}  {options}  backend={backend!r}"
    leaves: dict[str, Any] = {n: x.detach() for n, x in inputs.tensors.items()}
    clean, poison = leaves, inputs.poison
    dead = {} if poison is None else unattended(**leaves, **options)

    def poisoned(x: Tensor, name: str) -> Tensor:
        return x if poison is None or name not in dead else x.masked_fill(dead[name], poison)

    leaves = {n: poisoned(x, n) for n, x in leaves.items()}
    if gradients:
        leaves = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in leaves.items()}
    with unmodified(*leaves.values()):
        if function is None:
            out, lse = attnkern.attention(**leaves, **options, return_lse=True, backend=backend)
            results = {"out": out, "lse": lse}
        else:
            results = {"out": function(**leaves, **options)}
        out = results["out"]
        grad_out = grad_lse = None
        if gradients:
            # A quarter of a normal keeps float16 gradients of long rows away from overflow.
            grad_out = (0.25 * torch.randn(out.shape, dtype=torch.float64)).to(out)
            targets, seeds = [out], [poisoned(grad_out, "query")]
            if "lse" in results:
                grad_lse = (0.25 * torch.randn(results["lse"].shape, dtype=torch.float64)).to(results["lse"])
                grad_lse = grad_lse.masked_fill(results["lse"].detach() == -math.inf, 0.0)
                targets.append(results["lse"])
                # Where a query attends to nothing, the log-sum-exp is its sink, if there is one.
                given = grad_lse.unsqueeze(-1)
                seeds.append((given if inputs.sinks is not None else poisoned(given, "query")).squeeze(-1))
            wanted = {n: x for n, x in leaves.items() if x.requires_grad}
            results |= dict(zip(wanted, torch.autograd.grad(targets, list(wanted.values()), seeds), strict=True))
    want = expected(**clean, **options, grad_out=grad_out, grad_lse=grad_lse, keep=keep)
    storages = {x.untyped_storage().data_ptr() for x in leaves.values() if x.numel()}
    for name, actual in results.items():
        dtype = want[name].baseline.dtype
        assert actual.dtype == dtype, f"{name}: dtype {actual.dtype}, expected {dtype}\n  {recipe}"
        assert actual.device == leaves["query"].device, f"{name}: on {actual.device}\n  {recipe}"
        if actual.numel():
            assert actual.untyped_storage().data_ptr() not in storages, f"{name} aliases an input\n  {recipe}"
        want[name].check(
            actual,
            gradient=name not in ("out", "lse"),
            name={"out": "output", "lse": "lse"}.get(name, f"gradient of {name}"),
            recipe=recipe,
        )
    return results


def check_packed(
    inputs: Inputs, packed: Packed, *, backend: str | None = None, looks: bool = False, **options: Any
) -> dict[str, Tensor]:
    """`check_attention` of `attnkern.varlen_attention`, of inputs (1, heads, T, E), against the mask of its definition.

    `looks` False: as on a GPU and in graphs, where no value of cu_seqlens and seqused_k is looked at.
    """
    import attnkern

    device = inputs.query.device
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (packed.ends_q, packed.ends_k)
    )
    used = None if packed.used is None else torch.tensor(packed.used, device=device)
    mask = packed.mask(inputs.query.shape[2], inputs.key.shape[2], options).to(device)

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, enable_gqa: bool = False) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        with mock.patch("attnkern.packed.may_look", return_value=looks):
            out: Any = attnkern.varlen_attention(
                *(q, k, v, cu_seqlens_q, cu_seqlens_k),
                seqused_k=used,
                enable_gqa=enable_gqa,
                backend=backend,
                **options,
            )
        return out.transpose(0, 1)[None]

    grouped: dict[str, Any] = {"enable_gqa": True} if options.pop("enable_gqa", False) else {}
    return check_attention(dataclasses.replace(inputs, attn_mask=mask), backend=backend, function=run, **grouped)
