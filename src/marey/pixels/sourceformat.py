"""What a source format is, and which there are: every module of ``pixels/formats`` is one, found by being there."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from marey.pixels.listfile import Entry


class Request(NamedTuple):
    """What to read."""

    source: str
    """As it was named; what a refusal says."""
    paths: list[str]
    """Absolute, in order: the files that were named, or the one folder."""
    part: str | None = None
    """What stands behind the colon in ``FOLDER:part``."""


@dataclass(frozen=True)
class SourceFormat:
    """A way in which people keep videos. A module of ``pixels/formats`` has one as ``FORMAT``."""

    title: str
    read: Callable[[Request], tuple[list[Entry], str]]
    """Its videos, and one phrase saying how it was read. Damage to a video is its entry's ``fault``; ``UserError``
    where there is nothing to read, or a choice to make."""
    suffixes: tuple[str, ...] = ()
    """Endings, in lower case, of files that are one; a folder that holds some and no video is read as one too."""
    members: tuple[str, ...] = ()
    """Endings of files whose folder is one video."""
    marks: Callable[[Path], bool] = lambda _: False
    """Whether a folder is one, by what lies in it."""
    part: str | None = None
    """What the word after a colon chooses (a camera, a column); None where nothing can be chosen."""


@functools.cache
def formats() -> tuple[SourceFormat, ...]:
    """All of them."""
    import marey.pixels.formats as folder

    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    return tuple(importlib.import_module(f"{folder.__name__}.{name}").FORMAT for name in names)


def format_of_file(name: str) -> SourceFormat | None:
    """The format of a file that holds videos, by its ending."""
    lowered = name.lower()
    return next((form for form in formats() if form.suffixes and lowered.endswith(form.suffixes)), None)


def format_of_folder(folder: Path) -> SourceFormat | None:
    """The format that a folder is marked as."""
    return next((form for form in formats() if form.marks(folder)), None)
