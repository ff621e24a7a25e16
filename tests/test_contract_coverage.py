"""Every item of the contract with F.scaled_dot_product_attention has a test that shows it."""

import ast
from pathlib import Path

HERE = Path(__file__).parent

# Items 1 to 66, by the sections they are listed in.
SECTIONS = {
    "signature and argument types": range(1, 5),
    "shapes": range(5, 14),
    "attn_mask": range(14, 24),
    "rows without a key": range(24, 25),
    "is_causal": range(25, 27),
    "enable_gqa": range(27, 31),
    "scale": range(31, 32),
    "dropout": range(32, 36),
    "dtypes, devices, numerics": range(36, 44),
    "memory layout": range(44, 48),
    "autograd and transforms": range(48, 63),
    "clients": range(63, 67),
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
    missing = {name: [i for i in items if i not in table] for name, items in SECTIONS.items()}
    assert not any(missing.values()), {n: m for n, m in missing.items() if m}
    assert sorted(table) == list(range(1, 67))


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
