"""Names of sources: the order in which people expect them, and what stands behind a colon. Imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path

NaturalKey = tuple[tuple[int, int, str], ...]


def natural_key(text: str) -> NaturalKey:
    """Sort key in which ``clip2`` comes before ``clip10``."""
    parts = re.split(r"(\d+)", text)
    return tuple((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts)


def path_key(path: str) -> tuple[tuple[NaturalKey, ...], str]:
    """Sort key of a path: natural, folder by folder."""
    return tuple(natural_key(part) for part in Path(path).parts), path


def split_part(source: str) -> tuple[str, str | None]:
    """A source's path and what is chosen of it: ``aloha:top`` is the camera ``top`` of ``aloha``.

    Only where the path before the colon is there and the whole name is not; else the name as it is, and None.
    """
    head, _, part = source.rpartition(":")
    if not head or not part or is_there(source) or not is_there(head):
        return source, None
    return head, part


def is_there(name: str) -> bool:
    """Whether a file, folder or link of this name exists, ``~`` resolved."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # no such user
        path = Path(name)
    try:
        return path.exists() or path.is_symlink()
    except (OSError, ValueError):  # too long, or with a NUL
        return False
