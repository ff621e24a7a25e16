"""Calls by the Triton kernels in Triton's interpreter, for test_triton_interpreted.py:

    TRITON_INTERPRET=1 PYTHONPATH=.:tests python -m interpreted

runs the case that each line of its input names, and answers what was wrong with it, as a line of JSON; "" for nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import math
import re
import sys
import traceback
import zlib
from collections.abc import Callable
from unittest import mock

import torch

import attnkern
from attnkern import check as checks
from attnkern import testing
from attnkern.__main__ import show
from attnkern.problem import Problem
from conftest import Target
from matrix import Call, call, tagged
from random_problems import attention_in_bits, in_pages
from test_unattended import MASKS, make

TARGET = Target("triton", "cpu")
RANGES = ("documents, d64", "gaps", "intervals, bias")
SHARES = {"triton": 1, "numbers": 6, "masked-bands": 14, "second-order": 6}  # of how many calls of a tag one is taken
DROPOUT = {
    "shared keys": call("", "", (2, (2, 1), 18, 40, 24), dtype="fp32", dropout=0.3),
    "bias, window": call("", "", (1, 2, 18, 40, 16), dtype="fp16", mask="float BHLS", dropout=0.5, window=(9, 5)),
}


def tiny(call: Call) -> Call:
    """The call with a fifth of its length, in a dtype that the interpreter has."""
    lengths = {name: -(-getattr(call, name) // 5) for name in ("seqlen_q", "seqlen_k") if getattr(call, name) > 32}
    window = call.window and tuple(None if bound is None else -(-bound // 5) for bound in call.window)
    return dataclasses.replace(call, **lengths, window=window, dtype=call.dtype.replace("bf16", "fp16"))


def _nobody_attends(kind: str) -> None:
    inputs, options = make(TARGET, (20, 35, 16, 2), torch.float32, poison=math.nan, **MASKS[kind])
    TARGET.check(inputs, **options)


def _calls() -> dict[str, Callable[[], object]]:
    def check(call: Call, **options: object) -> Callable[[], object]:
        return lambda: TARGET.check_call(call, **options)

    found = {f"{tag}: {name}": check(tiny(each)) for tag, every in SHARES.items() for name, each in _some(tag, every)}
    found |= {f"ranges: {name}": check(tiny(tagged("gpu")[name])) for name in RANGES}
    found |= {f"relative: {name}": check(tiny(each)) for name, each in _some("relative-gpu", 4)}
    found |= {f"dropout: {name}": check(each) for name, each in DROPOUT.items()}
    for name, each in _some("triton-decode", 4):  # keys enough for splits, which `tiny` wouldn't leave
        found[f"decode: {name}"] = check(dataclasses.replace(each, dtype=tiny(each).dtype), gradients=False)
    for kind in ("bool of keys", "ranges", "causal"):
        found[f"nobody attends: {kind}"] = functools.partial(_nobody_attends, kind)
    family = checks.FAMILIES["triton-second-order"]
    found |= {f"second order: {each.name}": _second_order(family, each) for each in family.calls}
    found |= {f"pages, {n} queries": functools.partial(_in_pages, n) for n in (1, 20)}
    return found | {
        f.__name__[1:].replace("_", " "): f for f in (_bits, _in_a_graph, _asked_for_by_name, _what_is_told)
    }


def _in_pages(queries: int) -> None:
    """Pages of half a block and of two; the second sequence has as many keys as its range says."""
    q, k, v = torch.randn(2, 4, queries, 32), *torch.randn(2, 2, 2, 640, 32)
    ranges = torch.tensor([[0, 640], [3, 100]])[:, None, None, None]
    options = {"key_ranges": ranges, "enable_gqa": True, "return_lse": True, "backend": "triton"}
    want = attnkern.attention(q, k, v, **options)
    for size in (16, 64):
        pools, table = in_pages(size, k, v)
        got = attnkern.attention(q, *pools, block_table=table, **options)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def _bits() -> None:
    """To the last bit what bools give: the interpreter sums in one order."""
    for queries, keys, shape in ((20, 70, "BHLS"), (20, 109, "1H1S"), (3, 1050, "B1LS")):
        inputs, options = make(TARGET, (queries, keys, 16, 2), torch.float32, poison=None, mask=("bool", shape))
        found = []
        for function in (attnkern.attention, attention_in_bits):
            x = {name: t.clone().requires_grad_(name != "attn_mask") for name, t in inputs.tensors.items()}
            out, lse = function(**x, **options, return_lse=True, backend="triton")
            total = out.square().sum() + lse[lse.isfinite()].sum()
            found.append([out, lse, *torch.autograd.grad(total, [x[n] for n in ("query", "key", "value")])])
        assert all(map(torch.equal, *found))


def _some(tag: str, every: int) -> list[tuple[str, Call]]:
    return list(tagged(tag).items())[::every]


def _second_order(family: checks.Family, call: checks.Call) -> Callable[[], object]:
    return lambda: checks.check_call(family, call, "cpu")


def _x() -> torch.Tensor:
    return torch.randn(1, 2, 9, 16)


def _in_a_graph() -> None:
    graph = torch.compile(lambda x, backend: attnkern.attention(x, x, x, backend=backend), backend="aot_eager")
    x = _x()
    torch.testing.assert_close(graph(x, "triton"), graph(x, "cpu"))


def _asked_for_by_name() -> None:
    """Where `cpu` is left out, the reference takes what nobody asked another backend for."""
    x, table = _x(), importlib.import_module("attnkern.backends")
    assert attnkern.explain(x, x, x).chosen == "cpu"
    with mock.patch.object(table.disabled, "left_out", frozenset({"cpu"})):
        assert attnkern.explain(x, x, x).chosen == "reference"
        chosen, _ = table.kernels_for(Problem.from_sdpa(x, x, x))
        assert chosen is None


def _what_is_told() -> None:
    x, told = _x(), "interpreted, as TRITON_INTERPRET says"
    explanation = attnkern.explain(x, x, x, backend="triton")
    assert explanation.notes == (told,)
    assert f"  triton: chosen; {told}\n    forward: tiles of 16 queries x 32 keys, pointers" in str(explanation)
    refused = attnkern.explain(*[x.bfloat16()] * 3, backend="triton").refusals["triton"]
    assert refused == ["query is bfloat16, whose bits Triton's interpreter multiplies as integers"]
    assert checks.families()["triton"] == told
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        show()
    assert re.search(rf"^triton +cpu +{told}$", shown.getvalue(), re.M)


CASES = _calls()


def said(name: str) -> str:
    torch.manual_seed(zlib.crc32(name.encode()))
    try:
        with testing.poisoned_memory():
            CASES[name]()
    except Exception:  # whatever an interpreter of kernels raises
        return traceback.format_exc()
    return ""


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(said(line.rstrip("\n"))), flush=True)


if __name__ == "__main__":
    main()
