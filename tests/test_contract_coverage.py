"""Every item of the contract with F.scaled_dot_product_attention has a test that shows it."""

import ast
from pathlib import Path

HERE = Path(__file__).parent

# What a replacement of F.scaled_dot_product_attention has to match; tests name these numbers.
ITEMS = {
    1: "signature: six arguments by position, scale and enable_gqa by keyword only",
    2: "wrong types are TypeErrors that name the argument",
    3: "which numbers dropout_p and scale accept",
    4: "the function pickles, copies and has its name",
    5: "any rank from 2 on",
    6: "(..., L, E), (..., S, E), (..., S, Ev) -> (..., L, Ev)",
    7: "leading dimensions broadcast; gradients come back unbroadcast",
    8: "what does not broadcast is an error",
    9: "other head size of key, other length of value: errors",
    10: "empty dimensions: zeros for S = 0, the mean for E = 0, gradients exist",
    11: "more than 65535 batches or heads, long sequences, offsets above 2**31",
    12: "any head size",
    13: "memory linear in the length",
    14: "bool masks: True = attend",
    15: "float masks are added, unscaled",
    16: "shapes that a mask may have",
    17: "masks of rank 0 and 1",
    18: "dtypes that a mask may have",
    19: "masks of any stride",
    20: "gradient of a mask; any subset of inputs may require grad",
    21: "a mask excludes is_causal",
    22: "finfo.min in a mask",
    23: "NaN and +inf in a mask stay in their row",
    24: "a row without a key is 0, in output and gradients",
    25: "is_causal is aligned to the top left",
    26: "is_causal with a scale <= 0",
    27: "enable_gqa: heads are dimension -3 and divide the query's",
    28: "groups of heads are consecutive",
    29: "heads that do not divide; equal heads change nothing; batch broadcasts",
    30: "a mask is per query head; gradients sum over the group",
    31: "any scale; the default is the query's head size",
    32: "dropout of the weights, in every mode, survivors rescaled",
    33: "dropout_p from 0 to 1; 1 gives zeros",
    34: "the seed governs dropout; the backward pass uses the forward's mask",
    35: "dropout with every other option and under checkpointing",
    36: "four dtypes, forward and backward; 16 bits accumulate in float32",
    37: "mixed dtypes and devices",
    38: "integers, complex, float8, sparse",
    39: "scores and values near the end of the float16 range",
    40: "rows of scores of every shape are stable",
    41: "where a NaN or infinity of an input goes",
    42: "bitwise repeatable; deterministic mode",
    43: "independent of the default dtype and device",
    44: "inputs of any stride",
    45: "layout of the output; inputs stay as they are",
    46: "strides of grad_out; lazily negated views",
    47: "packed projections",
    48: "manners of autograd",
    49: "double backward",
    50: "forward mode",
    51: "torch.func.grad, vjp, jacrev, per-sample gradients",
    52: "vmap",
    53: "torch.compile",
    54: "export, make_fx, symbolic_trace",
    55: "meta and fake tensors",
    56: "autocast",
    57: "__torch_function__, modes",
    58: "attn_bias objects",
    59: "jagged nested tensors",
    60: "sdpa_kernel and its switches",
    61: "threads, a fresh process",
    62: "CUDA: streams, devices, graphs, no synchronisation",
    63: "nn.MultiheadAttention",
    64: "transformer layers",
    65: "the calls that transformers makes",
    66: "torch's own samples, saturated softmax",
}


def items_of(decorator):
    """The numbers of a `@contract(...)` decorator, none of another one."""
    if (
        isinstance(decorator, ast.Call)
        and getattr(decorator.func, "id", getattr(decorator.func, "attr", "")) == "contract"
    ):
        return [argument.value for argument in decorator.args]
    return []


def covered():
    """{item: [test, ...]} as the test files declare it."""
    table = {}
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for item in (i for d in node.decorator_list for i in items_of(d)):
                    table.setdefault(item, []).append(f"{path.name}::{node.name}")
    return table


def test_every_item_is_shown():
    table = covered()
    assert {n: text for n, text in ITEMS.items() if n not in table} == {}
    assert set(table) <= set(ITEMS)


def test_no_test_hides_behind_a_namesake():
    """A second function of one name replaces the first, which then shows nothing."""
    for path in HERE.glob("test_*.py"):
        names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        assert len(names) == len(set(names)), path.name


def test_nothing_is_skipped_but_for_a_gpu():
    for path in HERE.glob("**/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif", "xfail", "importorskip"):
                assert path.name == "test_build.py", f"{path.name}:{node.lineno} {node.attr}"
