"""README and docs say what is true: examples, commands, links, names of functions, pages of the site.

A block in ```python is run, by itself. What it prints stands in the ```text block behind it, or behind each `print` as
a comment. A block in ```py isn't run so: it is of a library that need not be installed, of several processes, or of
the simulator. Tests of their own run those of docs/proving_kernels.md (here) and docs/distributed.md.
"""

import csv
import ctypes
import dataclasses
import importlib.util
import re
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import typer

import attnkern
from bench import targets
from bench.__main__ import app
from bench.cases import select
from bench.gpu import summary
from gate import rules
from gate.case import Budget, Case, Cuda, Triton

ROOT = Path(__file__).parent.parent
SITE = sorted(ROOT.glob("docs/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SITE]
FENCE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```\w*\n.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)  # prose may make what it likes
LINK = re.compile(r"(?:\]\(|(?:src|srcset)=\")([^)\s\"]+)[)\"]")
EXAMPLES = [(page, i, *found) for page in PAGES for i, found in enumerate(FENCE.findall(page.read_text()))]
README = PAGES[0].read_text()
MKDOCS = (ROOT / "mkdocs.yml").read_text()


@pytest.fixture
def own_switch(monkeypatch):
    """The switch under F.sdpa is off afterwards, and its calls are counted for this test alone."""
    monkeypatch.setattr(attnkern.integrations.sdpa.counter, "_all_calls", attnkern.SdpaCalls())
    yield
    if torch.nn.attention.current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize(
    ("page", "number", "code", "output"), EXAMPLES, ids=[f"{page.stem}-{number}" for page, number, *_ in EXAMPLES]
)
def test_examples_run(page, number, code, output, own_switch, capsys):
    exec(compile(code, f"{page.name}, example {number}", "exec"), {})
    comments = "".join(f"{x}\n" for x in re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE))
    assert capsys.readouterr().out == (output or comments)


def test_the_readme_has_examples():
    examples = [(code, output) for page, _, code, output in EXAMPLES if page == PAGES[0]]
    assert len(examples) == README.count("```python\n") >= 2
    assert sum(bool(output) for _, output in examples) == README.count("```text\n") >= 1
    first = [line for line in examples[0][0].splitlines() if line]
    assert len(first) <= 6


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_all_blocks_have_a_language(page):
    opened = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2]
    assert set(opened) <= {"python", "py", "text", "sh", "cpp"}


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    code = [code for page in PAGES for code in CODE.findall(page.read_text())]
    targets = {name for text in code for name in re.findall(r"^`?make ([\w-]+)", text, re.MULTILINE)}
    assert {"test", "bench"} <= targets
    for name in targets:
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"make {name}"


def test_benchmarks_have_the_options_that_they_are_shown_with():
    """`python -m bench`, and the cases that it names."""
    commands, shown = typer.main.get_command(app).commands, []
    for page in PAGES:
        for code in CODE.findall(page.read_text()):
            shown += re.findall(r"python -m bench (\w+)([^`\n]*)", code)
    assert len(shown) > 10
    for name, words in shown:
        options = {option for x in commands[name].params for option in (*x.opts, *x.secondary_opts)}
        assert {*re.findall(r"--[\w-]+", words)} <= options, (name, words)
        for cases in re.findall(r"--cases ([\w,-]+)", words):
            assert all(targets.named(x) or select(x) for x in cases.split(","))


class DeltaArgs(ctypes.Structure):
    """As csrc/cuda/delta.cu has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("grad_out", "out", "lse", "grad_lse", "delta")),
        *((name, ctypes.c_int64 * 3) for name in ("grad_out_stride", "out_stride")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "seqlen", "head_dim")),
    )


def test_what_the_page_on_proving_kernels_shows_runs(tmp_path, monkeypatch):
    """Its blocks, one after the other: two launches in the simulator, two cases, and an order in the text of a list."""
    blocks = re.findall(
        r"^( *)```py(?:thon)?\n(.*?)^ *```", (ROOT / "docs/proving_kernels.md").read_text(), re.DOTALL | re.MULTILINE
    )
    triton_launch, cuda_launch, cuda_case, order, triton_case = (textwrap.dedent(code) for _, code in blocks)
    file = tmp_path / "shown.py"  # Triton reads a kernel's source in its file
    file.write_text(triton_launch)
    spec = importlib.util.spec_from_file_location("shown", file)
    shown = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shown)
    torch.testing.assert_close(shown.y, shown.x + 1)

    grad_out, out = torch.randn(2, 2, 5, 32, 64).unbind()
    lse, delta = torch.zeros(2, 5, 32), torch.empty(2, 5, 32)
    pointers = [x if x is None else x.data_ptr() for x in (grad_out, out, lse, None, delta)]
    strides = [(ctypes.c_int64 * 3)(*x.stride()[:3]) for x in (grad_out, out)]
    names = {"params": DeltaArgs(*pointers, *strides, 2, 5, 32, 64), "ptxsim": shown.ptxsim, "add_one": shown.add_one}
    names |= {"grad_out": grad_out, "out": out, "lse": lse, "delta": delta}
    names |= {"Budget": Budget, "Case": Case, "Cuda": Cuda, "Triton": Triton}
    monkeypatch.chdir(ROOT)
    exec(cuda_launch, names)
    torch.testing.assert_close(delta, (grad_out * out).sum(-1))

    exec(order, names)
    dataclasses.replace(eval(cuda_case, names), order=names["order"])  # it would refuse what is no order
    for code in (cuda_case, triton_case):
        case = eval(code, names)
        for arch in case.archs.split():
            found = rules.of_case(case, arch)
            assert found
            assert [line for kernel in found for line in rules.broken(case, arch, kernel)] == []


def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them, and of the objects that an API page documents."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w -]", "", x).replace(" ", "-").lower() for x in headings}
    return made | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_pictures_exist(page):
    for link in LINK.findall(page.read_text()):
        if not link.startswith("https://"):
            file, _, heading = link.partition("#")
            target = page.parent / file if file else page
            assert target.is_file(), f"{page.name} links to {link}, which is not there"
            assert not heading or heading in _anchors(target), link


def test_every_picture_stands_on_a_page():
    shown = {link.rpartition("/")[2] for page in PAGES for link in LINK.findall(page.read_text())}
    assert {picture.name for picture in (ROOT / "docs" / "images").iterdir()} <= shown


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_row_of_a_table_stands_in_one(page):
    """Below a head and a rule with as many columns."""
    for table in re.findall(r"(?:^\|.*\n)+", CODE.sub("code", page.read_text()), re.MULTILINE):
        head, *rest = table.splitlines()
        assert rest, head
        assert re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", rest[0]), head
        assert {row.count("|") - row.count(r"\|") for row in rest} == {head.count("|") - head.count(r"\|")}, head


@pytest.mark.parametrize("page", SITE, ids=lambda p: p.name)
def test_names_are_where_the_docs_say(page):
    """ "`name` in [file](link)" and "`name` and `other` in ...": that file has them."""
    for names, link in re.findall(r"((?:`\w+`(?:\s+and\s+)?)+)\s+in\s+\[[^\]]+\]\(([^)]+)\)", page.read_text()):
        text = (page.parent / link).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b{name}\b", text), f"{page.name}: {name} in {link}"


def test_every_page_stands_in_the_navigation():
    """README.md as index.md."""
    listed = re.findall(r"^ +- .*: (\w+\.md)(?: #.*)?$", MKDOCS, re.MULTILINE)
    assert sorted(listed) == sorted({*listed}) == sorted(["index.md", *(page.name for page in SITE)])


def test_every_public_name_stands_in_the_reference():
    documented = {x.rpartition(".")[2] for page in ROOT.glob("docs/api*.md") for x in _anchors(page)}
    assert {*attnkern.__all__} - {"__version__", "nn"} | {"MultiheadAttention", "CrossAttention"} <= documented


RATIOS = re.findall(
    r"<!-- ratios:(\S+) -->\n(.*?)\n<!-- ratios:end -->", (ROOT / "docs" / "benchmarks.md").read_text(), re.DOTALL
)


GPUS = re.findall(
    r"<!-- gpu:(\S+) -->\n(.*?)\n<!-- gpu:end -->", (ROOT / "docs" / "benchmarks.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize(("name", "table"), GPUS, ids=["speed", "decoding"])
def test_a_gpus_tables_are_those_of_its_results(name, table):
    page = (ROOT / "bench" / "results" / f"{name}.md").read_text()
    assert table in page
    assert summary.page(summary.read(ROOT / "bench" / "results" / f"{name}.jsonl")) == page


@pytest.mark.parametrize(("name", "table"), RATIOS, ids=[name for name, _ in RATIOS])
def test_the_benchmarks_are_those_of_the_results(name, table):
    """F.sdpa's time over ours: how many rows, the least, the geometric mean, the most."""
    with (ROOT / "bench" / "results" / f"{name}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["provider"] == "cpu" and row["ratio"]]
    dtypes = {"float32": "fp32", "bfloat16": "bf16"}
    for line in table.splitlines()[2:]:
        label, *cells = line.strip("| ").split(" | ")
        dtype, direction = label.split(", ")
        found = [float(x["ratio"]) for x in rows if x["dtype"] == dtypes[dtype] and x["pass"] == direction]
        figures = min(found), statistics.geometric_mean(found), max(found)
        assert cells == [str(len(found)), *(f"{x:.2f}" for x in figures)]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    index = (tmp_path / "api.html").read_text()
    assert 'id="attnkern.attention"' in index
    assert "fonts.googleapis" not in index  # nothing is fetched when a page is read
    first = (tmp_path / "index.html").read_text()
    assert all(f'{name}="images/speed-{shade}.png"' in first for name, shade in (("src", "light"), ("srcset", "dark")))
    assert 'href="limits.html"' in first
