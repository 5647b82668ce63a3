"""Patterns in names: ``*`` and ``**`` as shells have them, and ``{000..009}`` and ``{a,b}`` as shards are named."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from marey.core.errors import UserError
from marey.pixels.folders import absolute, is_video
from marey.pixels.naming import path_key

MOST_NAMES = 1_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")


class Matched(list[str]):
    """Absolute paths of files, sorted; each once."""

    @property
    def videos(self) -> list[str]:
        """Those that are videos by name."""
        return [path for path in self if is_video(path)]


def braced(pattern: str) -> bool:
    """Whether it has ``{..}`` or ``{,}`` in it."""
    return any(_choices(found[1]) is not None for found in _BRACES.finditer(pattern))


def numbered_names(pattern: str) -> Matched:
    """The names that braces stand for, which must all be there; with ``*`` in them as well, whatever matches."""
    found: list[str] = []
    for name in _spelled(pattern):
        if glob.has_magic(name):
            found += matches(name) or []
        elif os.path.lexists(name):
            found.append(absolute(name))
        else:
            raise UserError(f"{pattern} stands for {name} too, which does not exist; name those that are there")
    return Matched(dict.fromkeys(found))


def matches(pattern: str) -> Matched | None:
    """What a pattern matches, folders left out; None where it is none."""
    if not glob.has_magic(pattern):
        return None
    files = {absolute(path) for path in glob.glob(pattern, recursive=True) if not Path(path).is_dir()}  # noqa: PTH207
    return Matched(sorted(files, key=path_key))


def _spelled(pattern: str) -> list[str]:
    names = [pattern]
    while True:
        spelled: list[str] = []
        for name in names:
            found = next((f for f in _BRACES.finditer(name) if _choices(f[1]) is not None), None)
            if found is None:
                spelled.append(name)
                continue
            choices = _choices(found[1]) or []
            if len(choices) * len(names) > MOST_NAMES:
                raise UserError(f"{pattern} stands for more than {MOST_NAMES:,} names; name a folder, or use *")
            spelled += [name[: found.start()] + choice + name[found.end() :] for choice in choices]
        if spelled == names:
            return names
        names = spelled


def _choices(inside: str) -> list[str] | None:
    span = _RANGE.fullmatch(inside)
    if span is not None:
        first, last = int(span[1]), int(span[2])
        width = max(len(span[1]), len(span[2])) if "0" in (span[1][0], span[2][0]) else 0
        if last - first >= MOST_NAMES:
            return [""] * (MOST_NAMES + 1)
        return [f"{number:0{width}d}" for number in range(first, last + 1)] if last >= first else None
    return inside.split(",") if "," in inside else None
