"""What the site takes from outside docs/, and links that lead there.

Pages are written to be read in the repository too: a link may lead to any file of it. On the site, CHANGELOG.md and
CONTRIBUTING.md are pages of their own; other files are named, not linked.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ADDED = ("CHANGELOG.md", "CONTRIBUTING.md")
NOTES = "notes/index.md"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The dated notes in the navigation, newest first, and the two pages from outside docs/."""
    project = [{"Notes": [NOTES, *(f"notes/{path.name}" for path in _notes())]}, {"Changes": "CHANGELOG.md"}]
    config["nav"] = [*config["nav"], {"Project": [*project, {"Contributing": "CONTRIBUTING.md"}]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the pages from outside docs/ beside the others."""
    for name in ADDED:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_as_if_in_docs(text)))
    titles = [(path.name, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")) for path in _notes()]
    listed = "\n".join(f"- [{title}]({name})" for name, title in titles)
    about = "# Notes\n\nDated findings, what did not work included, each with the commands that show it.\n\n"
    files.append(File.generated(config, NOTES, content=f"{about}{listed}\n"))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files of the repository that are no pages become their names."""

    def link(found: re.Match[str]) -> str:
        words, target = found[1], found[2]
        path, _, anchor = target.partition("#")
        if not path or "://" in target or path.startswith("mailto:"):
            return found[0]
        place = normpath(f"{dirname(page.file.src_uri)}/{path}".lstrip("/"))
        if place == "notes":
            place = f"../docs/{NOTES}"
        if not place.startswith("../"):
            return found[0]
        place = place.removeprefix("../").removeprefix("docs/")
        if place == "README.md":
            place = "index.md"
        elif place not in (*ADDED, NOTES):
            return words if place in words else f"{words} (`{place}`)"
        back = relpath(place, dirname(page.file.src_uri) or ".")
        return f"[{words}]({back}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Names that docstrings mark for Sphinx read as code."""
    return re.sub(r":(?:func|class|data|meth|mod):(?=<code>)", "", html)


def _as_if_in_docs(text: str) -> str:
    """Links of a page at the root of the repository, as they read from inside docs/."""

    def link(found: re.Match[str]) -> str:
        words, target = found[1], found[2]
        if "://" in target or target.startswith("#"):
            return found[0]
        return f"[{words}]({target.removeprefix('docs/') if target.startswith('docs/') else '../' + target})"

    return _LINK.sub(link, text)


def _notes() -> list[Path]:
    """Newest first."""
    return sorted((ROOT / "docs" / "notes").glob("*.md"), reverse=True)
