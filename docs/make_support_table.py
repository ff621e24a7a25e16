"""Makes the table of which backend takes what from the backends' own refusals.

python docs/make_support_table.py                              prints it
python docs/make_support_table.py docs/support.md README.md    puts it between the files' support markers, that of pages
                                                               between pages markers, and the lines that are not "yes"
                                                               throughout between exceptions markers
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkern
from attnkern import testing
from attnkern.backends import TABLE, explain
from attnkern.problem import Problem

MARKERS = {name: (f"<!-- {name}:begin -->", f"<!-- {name}:end -->") for name in ("support", "pages", "exceptions")}


class Feature(NamedTuple):
    """One line of the table: a small call of `attnkern.attention`."""

    name: str
    inputs: testing.Inputs
    options: dict[str, Any]

    @property
    def in_pages(self) -> bool:
        return "block_table" in self.options


def features() -> list[Feature]:
    """Every line of the table, in order."""

    def feature(name: str, *sizes: int, options: dict[str, Any] | None = None, **kinds: Any) -> Feature:
        return Feature(name, testing.make_inputs(*sizes, **kinds, seed=0), options or {})

    def ranks(name: str, *shapes: tuple[int, ...]) -> Feature:
        tensors = torch.zeros(shapes[0]), torch.zeros(shapes[1]), torch.zeros(shapes[1])
        return Feature(name, testing.Inputs(*tensors, None, name), {})

    both = {"is_causal": True, "window": (3, None)}
    return [
        feature("float32"),
        feature("float64", dtype=torch.float64),
        feature("bfloat16", dtype=torch.bfloat16),
        feature("float16", dtype=torch.float16),
        ranks("2-D, 3-D and more dimensions, broadcast", (4, 1, 3, 5, 8), (2, 1, 7, 8)),
        feature("any strides", layout="stepped"),
        feature("different lengths of query and key", 1, 2, 5, 9),
        feature("one query, many keys (decoding)", 1, 2, 1, 300),
        feature("any head size, odd or above 256", 1, 2, 3, 3, 321),
        feature("value of another head size", 1, 2, 5, 5, 8, 12),
        feature("empty dimensions", 1, 2, 5, 0),
        feature("`enable_gqa`: fewer key and value heads", 1, 4, heads_k=2, options={"enable_gqa": True}),
        feature("`is_causal`", options={"is_causal": True}),
        feature('`alignment="bottom_right"`', 1, 2, 3, 7, options={"is_causal": True, "alignment": "bottom_right"}),
        feature("`window`", options={"window": (2, 1)}),
        feature("`attn_mask`, bool", mask=("bool", "B1LS")),
        feature("`attn_mask`, float, and its gradient", mask=("float", "1HLS")),
        feature("`attn_mask` with `is_causal` and `window`", mask=("bool", "LS"), options=both),
        feature("`key_ranges`, packed sequences", options={"key_ranges": torch.tensor([[0, 2]])}),
        feature("`scale`, also 0 and negative", options={"scale": -0.5}),
        feature("`softcap`", options={"softcap": 30.0}),
        feature("`sinks`, and their gradient", options={"sinks": torch.zeros(2)}),
        feature("`relative_bias`, and its gradient", options={"relative_bias": torch.zeros(2, 9)}),
        feature("`dropout_p`", options={"dropout_p": 0.1}),
        feature("`return_lse`, and its gradient", options={"return_lse": True}),
    ]


def features_in_pages() -> list[Feature]:
    """Every line of the table of calls whose keys and values lie in pages."""
    tables = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)

    def feature(
        name: str, length: int = 5, heads: int = 2, size: int = 16, head_dim_v: int = 8, **options: Any
    ) -> Feature:
        dtype = options.pop("dtype", torch.float32)
        query, key = torch.zeros(2, heads, length, 8, dtype=dtype), torch.zeros(3, 2, size, 8, dtype=dtype)
        value, mask = torch.zeros(3, 2, size, head_dim_v, dtype=dtype), options.pop("attn_mask", None)
        return Feature(name, testing.Inputs(query, key, value, mask, name), {"block_table": tables, **options})

    lengths = torch.tensor([[0, 20], [0, 3]]).view(2, 1, 1, 1, 2)
    return [
        *(feature(name, dtype=getattr(torch, name)) for name in ("float32", "float64", "bfloat16", "float16")),
        feature("pages of 16", size=16),
        feature("pages of 256", size=256),
        feature("`key_ranges`: lengths of sequences", key_ranges=lengths),
        feature("one query (decoding)", length=1, key_ranges=lengths),
        feature("value of another head size", head_dim_v=12),
        feature("`enable_gqa`: fewer key and value heads", heads=4, enable_gqa=True),
        feature('`is_causal` with `alignment="bottom_right"`', is_causal=True, alignment="bottom_right"),
        feature("`window`", window=(2, 1)),
        feature("`attn_mask`, bool", attn_mask=torch.ones(2, 1, 5, 32, dtype=torch.bool)),
        feature("`attn_mask`, float", attn_mask=torch.zeros(2, 5, 32)),
        feature("`scale`", scale=-0.5),
        feature("`softcap`", softcap=30.0),
        feature("`sinks`", sinks=torch.zeros(2)),
        feature("`relative_bias`", relative_bias=torch.zeros(2, 36)),
        feature("`dropout_p`", dropout_p=0.1),
        feature("`return_lse`", return_lse=True),
    ]


def table(of: list[Feature], *, exceptions: bool = False) -> str:
    """The Markdown table: a line per feature, a column per device and backend, the backend used first to the left.

    With `exceptions` it has only the lines that say something else than "yes".
    """
    rows = [(device, [b.NAME for b in row]) for device, row in TABLE.items() if device != "meta"]
    columns = [(device, name) for device, names in rows for name in names]
    lines = [
        "| | " + " | ".join(f"{device}: `{name}`" for device, name in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for feature in of:
        cells = {column: cell(feature, *column) for column in columns}
        if exceptions and {*cells.values()} == {"yes"}:
            continue
        lines.append(f"| {feature.name} | " + " | ".join(cells.values()) + " |")
    return "\n".join(lines)


def cell(feature: Feature, device: str, backend: str) -> str:
    """ "yes" (forward and backward), "forward only: ..." or "no: ...", with the backend's reasons.

    Pages have no gradient, so of them "yes" means forward."""
    if forward := _refusals(feature, device, backend, gradients=False):
        return f"no: {'; '.join(forward)}"
    if feature.in_pages:
        return "yes"
    backward = _refusals(feature, device, backend, gradients=True)
    return f"forward only: {'; '.join(backward)}" if backward else "yes"


def _refusals(feature: Feature, device: str, backend: str, *, gradients: bool) -> list[str]:
    """The backend's reasons against a feature. That it is not built or has no device here is none of them."""
    call: dict[str, Any] = {**feature.inputs.tensors, **feature.options}
    call.pop("return_lse", None)  # every backend's forward has it: no part of a problem
    problem = Problem.from_sdpa(**call)
    with FakeTensorMode():  # describes tensors of devices that are not there
        tensors: dict[str, Any] = {
            name: _like(x, device, gradients) for name, x in problem._asdict().items() if isinstance(x, Tensor)
        }
        reasons = explain(problem._replace(**tensors)).refusals[backend]
    here = {info.name: info.why_not for info in attnkern.backends()}
    return [reason for reason in reasons if reason != here[backend]]


def _like(x: Tensor, device: str, gradients: bool) -> Tensor:
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return like.requires_grad_() if gradients and x.is_floating_point() else like


def replace(text: str) -> str:
    """`text` with the tables between its markers. Raises ValueError where there are none."""
    found = [name for name, (begin, _) in MARKERS.items() if begin in text]
    if not found:
        raise ValueError(f"no {' and no '.join(begin for begin, _ in MARKERS.values())}")
    for name in found:
        begin, end = MARKERS[name]
        before, _, rest = text.partition(begin)
        of = features_in_pages() if name == "pages" else features()
        made = table(of, exceptions=name == "exceptions")
        text = f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    for page in map(Path, sys.argv[1:]):
        page.write_text(replace(page.read_text()))
    if len(sys.argv) == 1:
        print(table(features()), table(features_in_pages()), sep="\n\n")


if __name__ == "__main__":
    main()
