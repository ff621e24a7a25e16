"""What the kernels take, in few arguments: tensors by their roles, then strides, the numbers of a call, and the
constants of a variant. Triton passes named tuples field by field: an entry may be None, which costs no parameter.
"""

import math
from typing import Any, NamedTuple

import triton.language as tl

from ..params import AttentionParams

LOG2E = math.log2(math.e)
_FAR = 2**30  # a bound and a row add up within 32 bits


class Strides(NamedTuple):
    """Elements from one batch element, head, row and column of a tensor to the next."""

    b: Any
    h: Any
    row: Any
    column: Any = None  # of a bias alone: all others have dense rows


class Numbers(NamedTuple):
    """The numbers of a call, the same for all its kernels."""

    softmax_scale: Any
    score_scale: Any  # what `score.scores` multiplies products by
    softcap: Any
    dropout_threshold: Any
    dropout_scale: Any
    batch: Any
    heads: Any
    group_k: Any  # query heads of a key head
    group_v: Any
    seeded_batch: Any  # batch elements of a Philox key
    seqlen_q: Any
    seqlen_k: Any
    band_low: Any
    band_high: Any
    # Of keys and values in pages; None without
    pages: Any  # how many there are
    page_shift: Any  # a page has 2^page_shift rows
    table_row: Any  # entries of the table from one sequence to the next


FLOATS = ("softmax_scale", "score_scale", "softcap", "dropout_scale")
"""Of the numbers of a call those that are no integers."""


def score_numbers(params: AttentionParams) -> dict[str, Any]:
    """What `Numbers` have of how scores are made."""
    scale, softcap, left, right, offset, dropout_p = params
    low, high = (max(-_FAR, min(bound, _FAR)) for bound in (offset - left, offset + right))
    return {
        "softmax_scale": scale,
        # In the log2 domain, for exp2; before a softcap in units of that.
        "score_scale": scale / softcap if softcap else scale * LOG2E,
        "softcap": softcap,
        "dropout_threshold": round(dropout_p * 65536),
        "dropout_scale": 1 / (1 - dropout_p) if dropout_p < 1 else 0.0,
        "band_low": low,
        "band_high": high,
    }


def reaches_all(count: int, size: int, low: int, high: int) -> bool:
    """Whether each of `count` rows attends to one of `size` columns, row i to those from i + low to i + high, and each
    column has a row that attends to it."""
    return low <= min(0, size - count) and high >= max(0, size - count)


def score_constants(params: AttentionParams) -> dict[str, Any]:
    """Which features of scores a kernel's variant has, but for the bias, the band and dropout."""
    return {"SOFTCAP": params.softcap != 0}


class Masks(NamedTuple):
    """What is known of scores beside products and band: the bias and its tangent, the key ranges, and of these what
    `ranges.visits_kernel` leaves."""

    bias: Any
    tbias: Any
    ranges: Any
    visits: Any


class Queries(NamedTuple):
    """What a kernel of blocks of queries reads of them."""

    q: Any
    tq: Any
    grad_out: Any


class Keys(NamedTuple):
    """What a kernel of blocks of keys reads of them."""

    k: Any
    v: Any
    tk: Any
    tv: Any


class RowTerms(NamedTuple):
    """Numbers of every row of scores, (batch, heads, seqlen_q) contiguous in fp32; mu and nu for second order."""

    lse: Any
    delta: Any
    mu: Any
    nu: Any


class Constants:
    """The constants of a kernel's variant, as one constexpr argument with a field for each."""

    def __init__(self, **values: Any):
        self.__dict__ = {name: tl.constexpr(value) for name, value in values.items()}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the variant has no constant {name}")

    def __repr__(self) -> str:  # what Triton's cache and the names of functions know it by
        return ", ".join(f"{name} {value.value!r}" for name, value in self.__dict__.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))
