"""What the documentation says, taken apart: code blocks, code spans, links, headings, and the commands among them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown.extensions.toc import slugify  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
"""Pages whose commands must work. Notes are dated: what they typed is what was typed then."""
EVERYTHING = (*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "notes").glob("*.md")))
"""Pages whose links must lead somewhere."""
_FENCE = re.compile(r"^ *```(\w*)\s*\n(.*?)^ *```\s*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n(?!\n)[^`\n]+)?)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_ASSIGNED = re.compile(r"^(\w+)=(.*)$", re.DOTALL)
CONTROL = {"if", "then", "else", "fi", "for", "do", "done"}


@dataclass(frozen=True)
class Block:
    """A fenced block, or one indented by four spaces."""

    page: Path
    line: int
    language: str
    text: str
    before: str
    """The page up to the block."""


@dataclass(frozen=True)
class Words:
    """One command or code span, in words, and where it stands."""

    page: Path
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {shlex.join(self.words)}"


@cache
def text_of(page: Path) -> str:
    """The page, read once."""
    return page.read_text(encoding="utf-8")


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page."""
    text = text_of(page)
    for found in _FENCE.finditer(text):
        yield Block(page, _line(text, found.start()) + 1, found[1], found[2], text[: found.start()])
    for found in re.finditer(r"^\n((?: {4}(?:marey|python) .*\n)+)", _without_blocks(text), re.MULTILINE):
        yield Block(page, _line(text, found.start(1)), "bash", found[1], text[: found.start()])


def _without_blocks(text: str) -> str:
    """The page with blank lines in place of its fenced blocks, so that line numbers stay."""
    return _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)


def is_shell(block: Block) -> bool:
    """A block that a person types: named so, or without a language and beginning with a program of ours."""
    return block.language in ("bash", "sh") or (not block.language and block.text.split()[:1] == ["marey"])


def commands(page: Path) -> Iterator[Words]:
    """The commands of a page's shell blocks: variables filled in, assignments before a command left out."""
    for block in blocks(page):
        if is_shell(block):
            yield from _typed(block)


def _typed(block: Block) -> Iterator[Words]:
    variables: dict[str, str] = {}
    number = block.line
    for line in block.text.replace("\\\n", "\0").split("\n"):
        here, number = number, number + 1 + line.count("\0")
        words = shlex.split(line.replace("\0", " "), comments=True)
        while words and words[0] in CONTROL:
            words = [] if words[0] in ("if", "for") else words[1:]
        while words and (given := _ASSIGNED.match(words[0])):
            if len(words) == 1:
                variables[given[1]] = given[2]
            if given[2].startswith("("):  # an array of words
                yield Words(block.page, here, ("marey", "train", *_array([given[2], *words[1:]])))
                words = []
                break
            words = words[1:]
        filled: list[str] = []
        for word in words:
            name = re.fullmatch(r"\$\{?(\w+)(?:\[@\])?\}?", word)
            if name is None:
                filled.append(word)
            elif not variables.get(name[1], "").startswith("("):
                filled += shlex.split(variables[name[1]])
        if filled:
            yield Words(block.page, here, tuple(filled))


def _array(words: list[str]) -> list[str]:
    return [word for word in " ".join(words).strip("()").split() if word]


def spans(page: Path) -> Iterator[Words]:
    """Code spans outside blocks, in words; those that no shell could read are left out."""
    text = _without_blocks(text_of(page))
    for found in _SPAN.finditer(text):
        try:
            words = shlex.split(found[1].replace("\\|", "|"))
        except ValueError:
            continue
        if words:
            yield Words(page, _line(text, found.start()), tuple(words))


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Line and target of every relative link of a page."""
    text = _without_blocks(text_of(page))
    for found in _LINK.finditer(text):
        if "://" not in found[1] and not found[1].startswith("mailto:"):
            yield _line(text, found.start()), found[1]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The headings of a page as the site names them."""
    headings = re.findall(r"^#+ +(.*?) *$", _without_blocks(text_of(page)), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "") for heading in headings]
    return frozenset(slugify(heading, "-") for heading in plain)
