"""What lies below a folder, in one walk, and which class each video is in by its subfolder."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from marey.core.errors import UserError
from marey.pixels.media import VIDEO_SUFFIXES
from marey.pixels.naming import natural_key, path_key
from marey.pixels.pictures import is_animated_webp
from marey.pixels.sourceformat import SourceFormat, formats

SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "heldout"}


@dataclass
class Found:
    """Absolute paths below a folder, sorted."""

    videos: list[str] = field(default_factory=list)
    by_format: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def of(self, form: SourceFormat) -> list[str]:
        """Files of a format, or folders that are one video each."""
        return self.by_format.get(form.title, [])


def absolute(path: Path | str) -> str:
    """Links are kept: following them would rename what was named."""
    return os.path.abspath(path)  # noqa: PTH100


def is_video(path: str) -> bool:
    """By the name; a ``.webp`` by whether it is animated."""
    name = os.path.basename(path).lower()  # noqa: PTH119
    if name.startswith("."):
        return False
    return name.endswith(VIDEO_SUFFIXES) or (name.endswith(".webp") and _animated(path))


def _animated(path: str) -> bool:
    try:
        if not os.path.isfile(path):  # noqa: PTH113
            return False
        with open(path, "rb") as file:  # noqa: PTH123
            return is_animated_webp(file.read(21))
    except OSError:
        return False


def walk(folder: Path) -> Found:
    """Everything under ``folder``, following links (each folder once), hidden names left out."""
    found = Found()
    seen: set[tuple[int, int]] = set()
    for where, folders, names in os.walk(folder, followlinks=True):
        status = os.stat(where)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = absolute(where)
        names = [name for name in names if not name.startswith(".")]
        found.videos += [path for name in names if is_video(path := f"{here.rstrip('/')}/{name}")]
        lowered = [name.lower() for name in names]
        for form in formats():
            if form.suffixes:
                found.by_format[form.title] += [
                    f"{here}/{name}" for name, low in zip(names, lowered, strict=True) if low.endswith(form.suffixes)
                ]
            if form.members and any(low.endswith(form.members) for low in lowered):
                found.by_format[form.title].append(here)
    for paths in (found.videos, *found.by_format.values()):
        paths.sort(key=path_key)
    return found


def class_of_each(
    folder: Path, paths: Sequence[str], counted: str, labels: Literal["auto", "folders", "none"]
) -> tuple[list[str | None], str]:
    """The class folder of each video below ``folder``, or None for all; and one phrase saying how it was read.

    ``counted`` says how many there are. Raises ``UserError`` where ``labels="folders"`` and they are no classes.
    """
    none: list[str | None] = [None] * len(paths)
    tops = [Path(path).relative_to(absolute(folder)).parts for path in paths]
    loose = sum(len(parts) < 2 for parts in tops)
    classes = sorted({parts[0] for parts in tops if len(parts) > 1}, key=natural_key)
    if labels == "folders":
        if loose or not classes:
            raise UserError(
                f"{folder} holds {loose} videos outside any subfolder, so subfolders cannot be read as classes; "
                "move them into a class folder or use labels=none"
            )
    else:
        present = [item.name for item in folder.iterdir() if item.is_dir() and not item.name.startswith(".")]
        if labels == "none" or loose or len(classes) < 2 or len(classes) != len(present):
            return none, f"folder, {counted}, no labels"
        if {name.lower() for name in classes} <= SPLITS:
            return none, f"folder, {counted}, no labels: its subfolders ({', '.join(classes)}) are named like splits"
    phrase = f"class folders, {counted} in {len(classes)} classes (labels=none to ignore them)"
    return [parts[0] for parts in tops], phrase
