"""README and docs say what is true: support table, examples, commands, links, names of functions."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnkern

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```\w*\n.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)  # prose may make what it likes
MAKE_TABLE = "docs/make_support_table.py"
EXAMPLES = [(code, output) for language, code, output in FENCE.findall(README) if language == "python"]


def _support():
    spec = importlib.util.spec_from_file_location("make_support_table", ROOT / MAKE_TABLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


support = _support()


def test_the_support_table_is_the_generated_one():
    assert support.replace(README) == README, "README.md: run `python docs/make_support_table.py README.md`"


@pytest.mark.parametrize("feature", support.features(), ids=lambda f: f.name)
def test_the_support_table_holds(target, feature):
    """What the table says of a backend that can run here, by running it."""
    cell = support.cell(feature, target.device, target.backend)
    leaves = {name: x.detach().to(target.device) for name, x in feature.inputs.tensors.items()}
    if cell.startswith("no: "):
        with pytest.raises(RuntimeError, match=re.escape(cell.removeprefix("no: "))):
            target.attention(**leaves, **feature.options)
        return
    if cell == "yes":
        leaves = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in leaves.items()}
    results = target.attention(**leaves, **feature.options)
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == 1 + feature.options.get("return_lse", False)
    assert all(x.isfinite().all() for x in results)
    if cell == "yes":
        wanted = [x for x in leaves.values() if x.requires_grad]
        for x, grad in zip(wanted, torch.autograd.grad([x.sum() for x in results], wanted), strict=True):
            assert grad.shape == x.shape
            assert grad.isfinite().all()


def test_the_command_writes_the_table(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"above\n{support.BEGIN}\nstale\n{support.END}\nbelow\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, MAKE_TABLE, page], check=True, cwd=ROOT, env=env)
    assert page.read_text() == f"above\n{support.BEGIN}\n{support.table()}\n{support.END}\nbelow\n"
    with pytest.raises(ValueError, match="support:begin"):
        support.replace("a page without markers")


def test_a_refusal_shows_in_the_table(monkeypatch):
    """Only reasons against the problem: a missing library is the machine's matter."""
    cpu = support.TABLE["cpu"][0]
    monkeypatch.setattr(cpu, "unavailable", lambda: "nothing is compiled")

    def refusals(problem):
        reasons = ["no dropout"] if problem.params.dropout_p else []
        reasons += ["no gradient"] if problem.params.softcap and problem.q.requires_grad else []
        return [cpu.unavailable(), *reasons]

    monkeypatch.setattr(cpu, "refusals", refusals)
    cells = {f.name: support.cell(f, "cpu", "cpu") for f in support.features()}
    assert cells.pop("`dropout_p`") == "no: no dropout"
    assert cells.pop("`softcap`") == "forward only: no gradient"
    assert set(cells.values()) == {"yes"}


@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_examples_run(example, monkeypatch, capsys):
    monkeypatch.setattr(attnkern.integrations.sdpa.counter, "_all_calls", attnkern.SdpaCalls())  # of this example alone
    code, output = EXAMPLES[example]
    try:
        exec(compile(code, f"README.md, example {example}", "exec"), {})
    finally:
        if torch.nn.attention.current_flash_attention_impl() is not None:
            torch.nn.attention.restore_flash_attention_impl()
    assert capsys.readouterr().out == output


def test_examples_about_masks_run(capsys):
    """What a line prints stands behind it."""
    for language, code, _ in FENCE.findall((ROOT / "docs" / "masks.md").read_text()):
        assert language == "python"
        exec(compile(code, "docs/masks.md", "exec"), {})
        assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)


def test_there_are_examples():
    assert len(EXAMPLES) == README.count("```python\n") >= 5
    assert sum(bool(output) for _, output in EXAMPLES) == README.count("```text\n") >= 2
    first = [line for line in EXAMPLES[0][0].splitlines() if line]
    assert len(first) <= 6


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    code = [code for page in PAGES for code in CODE.findall(page.read_text())]
    targets = {name for text in code for name in re.findall(r"^`?make ([\w-]+)", text, re.MULTILINE)}
    assert {"test", "bench"} <= targets
    for name in targets:
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"make {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_pictures_exist(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert links
    for link in links:
        if not link.startswith("https://"):
            file, _, heading = link.partition("#")
            target = page.parent / file if file else page
            assert target.is_file(), f"{page.name} links to {link}, which is not there"
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if heading else []
            assert heading in ["", *(re.sub(r"[^\w -]", "", h).replace(" ", "-").lower() for h in headings)], link


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda p: p.name)
def test_names_are_where_the_docs_say(page):
    """ "`name` in [file](link)" and "`name` and `other` in ...": that file has them."""
    found = re.findall(r"((?:`\w+`(?:\s+and\s+)?)+)\s+in\s+\[[^\]]+\]\(([^)]+)\)", page.read_text())
    assert len(found) > 5
    for names, link in found:
        text = (page.parent / link).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b{name}\b", text), f"{page.name}: {name} in {link}"
