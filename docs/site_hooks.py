"""What the site does beside mkdocs' own.

The first page is README.md. A link that leads out of docs/ leads to a page of the site that shows the file: so every
link is good in the repository and on the site, and the site needs no address of the repository. Sections of docstrings
that are prose stay prose.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?:(?<=\]\()|(?<=src=\")|(?<=srcset=\"))([^)\s#\"]+)(?=[#)\"])")
LANGUAGES = {
    ".py": "python",
    ".cpp": "cpp",
    ".h": "cpp",
    ".cuh": "cpp",
    ".cu": "cpp",
    ".json": "json",
    ".jsonl": "json",
}


def on_files(files: Any, config: Any) -> Any:
    """A page for each file outside docs/ that a page links to, and for those that such a page links to."""
    waiting = [(f"docs/{f.src_uri}", Path(f.abs_src_path).read_text()) for f in files.documentation_pages()]
    readme = (ROOT / "README.md").read_text()
    waiting.append(("README.md", readme))
    files.append(File.generated(config, "index.md", content=readme))
    while waiting:
        path, text = waiting.pop()
        for link in LINK.findall(text):
            target = _repository_path(path, link)
            shown = target and _shown_as(target)
            if not shown or files.get_file_from_path(shown):
                continue
            content = (ROOT / target).read_text()
            if target.endswith(".md"):
                waiting.append((target, content))
            elif shown.endswith(".md"):
                content = _page_of_source(target, content)
            files.append(File.generated(config, shown, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links to what `on_files` made in place of links to the repository's files."""
    here = page.file.src_uri
    path = here.removeprefix("source/") if here.startswith("source/") else f"docs/{here}"
    if here == "index.md":
        path = "README.md"

    def shown(match: re.Match[str]) -> str:
        target = _repository_path(path, match[0])
        if target is None:
            return match[0]
        return posixpath.relpath(_shown_as(target) or target.removeprefix("docs/"), posixpath.dirname(here) or ".")

    return LINK.sub(shown, markdown)


def _repository_path(page: str, link: str) -> str | None:
    """The file that a link on this page means, from the repository's root; None for an address."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return target if (ROOT / target).is_file() and "://" not in link else None


def _shown_as(target: str) -> str | None:
    """The page that shows this file of the repository; None for one that mkdocs takes by itself."""
    if target.startswith("docs/") and not target.endswith(".py"):
        return None
    if target == "README.md":
        return "index.md"
    as_it_is = target.endswith((".md", ".csv", ".html"))
    return f"source/{target}" if as_it_is else f"source/{target}.md"


def _page_of_source(path: str, text: str) -> str:
    fence = "`" * 8
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n{fence} {language}\n{text}\n{fence}\n"


class ProseSections(griffe.Extension):
    """What a docstring returns and raises is one paragraph each, where mkdocstrings looks for a list."""

    SECTION = re.compile(r"^(Returns|Raises|Yields):\n((?:    .*\n?)+)", re.MULTILINE)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = inspect.cleandoc(obj.docstring.value)
            obj.docstring.value = self.SECTION.sub(lambda m: f"**{m[1]}:** {textwrap.dedent(m[2])}", text)
