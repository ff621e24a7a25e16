"""attnkern/params.py and csrc/common/params.h say the same: what every backend agrees on."""

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attnkern import ops, params
from attnkern.params import AttentionParams
from attnkern.signatures import Derivatives, Inputs

HEADER = (Path(__file__).parents[1] / "csrc/common/params.h").read_text().replace("int64_t{1}", "1")
TYPES = {"double": float, "int64_t": int}


def constant(name):
    found = re.search(rf"\b{name} = ([^,;}}]+)", HEADER)
    assert found is not None, name
    return eval(found[1], {})  # arithmetic of our own header


def test_the_numbers_of_a_call():
    (listed,) = re.findall(r"#define ATTNKERN_PARAMS\(X\)((?:[^\n]*\\\n)*[^\n]*\n)", HEADER)
    fields = [(name, TYPES[kind]) for kind, name in re.findall(r"X\((\w+), (\w+)\)", listed)]
    assert fields == list(params.get_type_hints(AttentionParams).items())


def test_the_tensors_of_a_call():
    listed = re.findall(r"#define ATTNKERN_TENSORS(?:_AFTER_Q)?\(X\)((?:[^\n]*\\\n)*[^\n]*\n)", HEADER)
    found = [re.findall(r"X\((\w+), (\w+)\)", x) for x in reversed(listed)]
    hints = params.get_type_hints(Inputs)
    want = [("Tensor" if kind is torch.Tensor else "OptionalTensor", name) for name, kind in hints.items()]
    assert [x for part in found for x in part] == want
    assert Derivatives._fields == Inputs._fields[: len(Derivatives._fields)]


def test_few_places_spell_the_tensors_out():
    """A new one is to touch few files: those that give it a meaning."""
    spelled = re.compile(r"\bbias\b[^\n]{0,40}\b(key_)?ranges\b[^\n]{0,40}\b(philox_)?seed\b")
    package = Path(ops.__file__).parent
    places = {str(p.relative_to(package)): len(spelled.findall(p.read_text())) for p in package.rglob("*.py")}
    found = {name: count for name, count in places.items() if count}
    assert sum(found.values()) <= 4, found
    sources = package.parent / "csrc"
    files = [p for p in sources.rglob("*") if p.suffix in (".h", ".cpp", ".cuh", ".cu")]
    assert {p.name for p in files if spelled.search(p.read_text())} <= {"params.h", "unpack.h"}


def test_dtypes_bits_and_limits():
    (dtypes,) = re.findall(r"enum class DType : int32_t \{([^}]*)\}", HEADER)
    names = [str(dtype).removeprefix("torch.") for dtype in (*params.DTYPES, torch.bool)]
    assert [name.strip().removeprefix("k").lower() for name in dtypes.split(",")] == names
    for name in ("Q", "K", "V", "Bias"):
        assert constant(f"kGrad{name}") == getattr(params, f"GRAD_{name.upper()}")
    assert constant("kMaxHeadDim") == params.MAX_HEAD_DIM
    assert constant("kMaxLength") == params.MAX_LENGTH
    assert constant("kDecodeMaxRows") == params.DECODE_MAX_ROWS
    assert constant("kSharedMaxRows") == params.SHARED_MAX_ROWS
    assert constant("kSharedMaxQueries") == params.SHARED_MAX_QUERIES
    assert constant("kLeastPage") == params.LEAST_PAGE


def arguments_of(name):
    return [argument.name for argument in getattr(torch.ops.attnkern, name).default._schema.arguments]


@pytest.mark.parametrize(
    "name", ["forward", "backward", "tangent", "second_backward", "cuda_forward", "cuda_backward", "cuda_plan"]
)
def test_every_operator_takes_them_in_order(name):
    """They are declared once; schemas follow."""
    arguments = arguments_of(name)
    for fields in (AttentionParams._fields, Inputs._fields):
        if name != "cuda_plan" or fields is AttentionParams._fields:
            first = arguments.index(fields[0])
            assert arguments[first : first + len(fields)] == list(fields)


def test_no_import_goes_round():
    """Nothing below the operators knows them, and nothing is imported late to hide that."""
    package = Path(ops.__file__).parent
    below = [
        "params",
        "problem",
        "signatures",
        "rng",
        "tiles",
        "second_order",
        *(f"backends/{p.stem}" for p in package.glob("backends/*.py")),
    ]
    for name in below:
        text = (package / f"{name}.py").read_text()
        imported = re.findall(r"^\s*from \.+(\w*) import (.*)$", text, re.M)
        assert not [line for line in imported if line[0] in ("ops", "autograd", "api") or "ops" in line[1].split(", ")]
    for name in ("ops", *below):
        late = re.findall(r"^[ ]+from (\.+\w*) import \w+", (package / f"{name}.py").read_text(), re.M)
        assert late == [], name


def test_the_order_of_sizes_that_depend_on_data():
    """As that of any larger size, which is the order that a kernel gives its result."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        n, m = env.create_unbacked_symint(), env.create_unbacked_symint()
        for heads, length in ((n, 5), (5, n), (n, m), (n, n)):
            for x, major in (
                (torch.empty(2, heads, length, 8), False),
                (torch.empty(2, length, heads, 8).transpose(1, 2), True),
                (torch.empty(length, heads, 8).transpose(0, 1).unsqueeze(0), True),
            ):
                assert params.is_length_major(x.shape, x.stride()) is major
        for alike in (torch.empty(2, n, 1, 8), torch.empty(2, 1, n, 8)):
            assert not params.is_length_major(alike.shape, alike.stride())
