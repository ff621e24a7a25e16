"""What the project's own files say of it: one version, a workflow of make's targets, forms that ask for what helps."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import attnkern
import tiers

ROOT = Path(__file__).parent.parent
CHANGES = (ROOT / "CHANGELOG.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text()
FORMS = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*"))


def _sources():
    folders = ("attnkern", "bench", "csrc", "docs", "tests", "triton_kernels", ".ci", ".github")
    kinds = {"", ".py", ".cpp", ".h", ".cu", ".cuh", ".md", ".yml", ".yaml", ".toml", ".cff", ".in", ".txt"}
    found = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    return [path for path in found if path.is_file() and path.suffix in kinds and path.name != ".git"]


def _pyproject(pattern):
    return re.search(pattern, (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def test_the_version_stands_in_one_place():
    """Beside the changelog, whose first heading it is, and what was measured with it."""
    number = re.compile(rf"(?<![\w.]){re.escape(attnkern.__version__)}(?![\w.])")
    where = [str(path.relative_to(ROOT)) for path in _sources() if number.search(path.read_text(errors="ignore"))]
    spelled = [path for path in where if not path.startswith(("bench/results/", "docs/images/"))]
    assert sorted(spelled) == ["CHANGELOG.md", "attnkern/__init__.py"]
    assert _pyproject(r"^dynamic = (.*)$") == '["version"]'
    assert _pyproject(r"^version = (.*)$") == '{ attr = "attnkern.__version__" }'


def test_the_changelog_goes_by_version():
    headings = re.findall(r"^## (\S+)(?: \(unreleased\))?$", CHANGES, re.MULTILINE)
    assert headings[0] == attnkern.__version__
    assert len(headings) == len(re.findall(r"^#{1,6} ", CHANGES, re.MULTILINE)) - 1
    versions = [tuple(map(int, heading.split("."))) for heading in headings]
    assert versions == sorted({*versions}, reverse=True)
    assert all(re.match(r"\n\n- \S", section) for section in re.split(r"^## .*$", CHANGES, flags=re.MULTILINE)[1:])


def test_the_workflow_runs_make():
    """Targets that are there, and nothing of its own; Python from the oldest that the package takes."""
    (job,) = yaml.safe_load(WORKFLOW)["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert {"make lint", "make test", "make docs"} <= {*commands}
    for command in commands:
        target = re.fullmatch(r"make ([a-z-]+)", command)[1]
        assert re.search(rf"^{target}:.*  ## ", MAKEFILE, re.MULTILINE), command
    pythons = job["strategy"]["matrix"]["python"]
    assert pythons[0] == _pyproject(r'^requires-python = ">=(.*)"$')
    assert len(pythons) == 2
    (setup,) = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python@")]
    assert setup["cache"] == "pip"
    assert (ROOT / setup["cache-dependency-path"]).is_file()


def test_the_workflow_takes_torch_from_where_the_makefile_says():
    index = yaml.safe_load(WORKFLOW)["env"]["PIP_EXTRA_INDEX_URL"]
    assert f"# PIP_EXTRA_INDEX_URL={index} " in MAKEFILE


def test_the_hooks_are_the_tools_of_make_lint():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    entries = [hook["entry"] for hook in repo["hooks"]]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    recipe = recipe.replace("$(PY)", ".venv/bin/python").replace("$(CLANG_FORMAT)", ".venv/bin/clang-format")
    assert entries == re.findall(r"^\t@(.*) (?:\.|\$\(CPP\))$", recipe, re.MULTILINE)
    kinds = re.findall(r'-name "(\*\.\w+)"', re.search(r"^CPP := .*$", MAKEFILE, re.MULTILINE)[0])
    names = [str(path.relative_to(ROOT)) for path in _sources()]
    formatted = {x for x in names if x.startswith(("csrc/", "tests/")) and any(fnmatch(x, kind) for kind in kinds)}
    assert formatted == {name for name in names if re.search(repo["hooks"][-1]["files"], name)} != set()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_for_issues_ask_for_what_helps(path):
    form = yaml.safe_load(path.read_text())
    fields = {field["id"]: field for field in form["body"]}
    assert "attnkern.explain(" in fields["explain"]["attributes"]["description"]
    if path.stem == "bug_report":
        assert "`python -m attnkern check`" in fields["check"]["attributes"]["label"]
        assert fields["check"]["validations"]["required"] is True


def test_there_are_forms_for_bugs_and_features():
    assert [path.name for path in FORMS] == ["bug_report.yml", "feature_request.yml"]


def test_the_citation_names_the_projects_authors():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert [author["name"] for author in citation["authors"]] == [_pyproject(r'^authors = \[\{ name = "(.*)" \}\]$')]
    assert citation["license"] == _pyproject(r'^license = "(.*)"$')
    assert f"(c) 2026 {citation['authors'][0]['name']}\n" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize(
    "path", [".github/workflows/ci.yml", ".pre-commit-config.yaml", "CITATION.cff", "CHANGELOG.md", "Makefile"]
)
def test_a_change_to_them_runs_these_tests(path):
    assert "tests/test_project.py" in tiers.touched([path])
