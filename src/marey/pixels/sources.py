"""From what a person names (files, folders, patterns, lists) to video files with labels, in a fixed order."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from marey.core.errors import UserError
from marey.pixels.listfile import LIST_SUFFIXES, Entry, read_list
from marey.pixels.media import VIDEO_SUFFIXES, expanded

LabelsMode = Literal["auto", "folders", "none"]
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "heldout"}


@dataclass(frozen=True)
class VideoFile:
    """A file to read, by absolute path. ``label`` is an index, None where there is none."""

    path: str
    label: int | None = None
    extra: dict[str, str] = field(default_factory=dict)
    """Further columns of the list it came from."""


@dataclass(frozen=True)
class Discovery:
    """Everything found, in order."""

    files: list[VideoFile]
    label_names: list[str] | None
    """Text of each label index; None where labels are plain numbers or absent."""
    readings: list[str]
    """One line per source: how it was understood."""


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which ``clip2`` comes before ``clip10``."""
    parts = re.split(r"(\d+)", text)
    return tuple((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts)


def _path_key(path: str) -> tuple[tuple[tuple[tuple[int, int, str], ...], ...], str]:
    return tuple(natural_key(part) for part in Path(path).parts), path


def discover(sources: Sequence[str], *, labels: LabelsMode = "auto") -> Discovery:
    """Video files of ``sources``, each a file, a folder, a pattern, or a list (``.csv``, ``.txt``, ``.tsv``).

    ``labels="auto"``: a folder whose videos all lie in two or more immediate subfolders, each holding some, is read
    as one class per subfolder (not where the subfolders are named like splits: train, val, test). ``"folders"``
    insists on that reading; ``"none"`` drops all labels. Text labels become indices of the sorted names.
    Raises ``UserError`` for what does not exist, holds no video, or names a file twice.
    """
    entries: list[Entry] = []
    readings: list[str] = []
    for source in sources:
        found, reading = _read_source(source, labels)
        if labels == "none":
            found = [entry._replace(label=None) for entry in found]
        entries += found
        readings.append(f"{source}: {reading}")
    if not entries:
        raise UserError("no source was named; give a folder, a file, a pattern or a list of videos")
    _refuse_twice(entries)
    numbers, names = _number_labels(entries)
    files = [
        VideoFile(path=entry.path, label=number, extra=entry.extra)
        for entry, number in zip(entries, numbers, strict=True)
    ]
    return Discovery(files=files, label_names=names, readings=readings)


def _read_source(source: str, labels: LabelsMode) -> tuple[list[Entry], str]:
    path = expanded(source)
    if path.is_dir():
        return _read_folder(path, labels)
    if path.exists() or path.is_symlink():
        if labels == "folders":
            raise UserError(f"{source} is not a folder, so labels=folders cannot be read from it; use labels=auto")
        if path.suffix.lower() in LIST_SUFFIXES:
            return read_list(path)
        return [Entry(path=_absolute(path), origin=source)], "one video file"
    if glob.has_magic(source):
        return _read_pattern(str(path), labels)
    raise UserError(
        f"{source} does not exist; give a video file, a folder, a pattern in quotes or a list of paths "
        "(to try things out without data, `marey demo` makes its own)"
    )


def _absolute(path: Path | str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 (resolve() would follow links, and so rename what was named)


def _is_video(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(VIDEO_SUFFIXES)


def _walk(folder: Path) -> list[str]:
    """Videos under ``folder``, following links (each folder once), hidden names left out."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for where, folders, names in os.walk(folder, followlinks=True):
        status = os.stat(where)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [_absolute(Path(where) / name) for name in names if _is_video(name)]
    return sorted(found, key=_path_key)


def _read_folder(folder: Path, labels: LabelsMode) -> tuple[list[Entry], str]:
    paths = _walk(folder)
    if not paths:
        raise UserError(
            f"{folder} holds no video (looked in all its subfolders for {', '.join(VIDEO_SUFFIXES)}); "
            "name another folder, or name the files themselves"
        )
    root = _absolute(folder)
    tops = [Path(path).relative_to(root).parts for path in paths]
    loose = sum(len(parts) == 1 for parts in tops)
    classes = sorted({parts[0] for parts in tops if len(parts) > 1}, key=natural_key)
    present = [item.name for item in folder.iterdir() if item.is_dir() and not item.name.startswith(".")]
    if labels == "folders":
        if loose or not classes:
            raise UserError(
                f"{folder} holds {loose} videos outside any subfolder, so subfolders cannot be read as classes; "
                "move them into a class folder or use labels=none"
            )
        by_class = True
    else:
        by_class = labels == "auto" and not loose and len(classes) > 1 and len(classes) == len(present)
    counted = f"{len(paths)} video{'s' * (len(paths) != 1)}"
    if by_class and labels == "auto" and {name.lower() for name in classes} <= _SPLITS:
        return (
            [Entry(path=path, origin=str(folder)) for path in paths],
            f"folder, {counted}, no labels: its subfolders ({', '.join(classes)}) are named like splits",
        )
    if by_class:
        entries = [
            Entry(path=path, label=parts[0], origin=str(folder)) for path, parts in zip(paths, tops, strict=True)
        ]
        return entries, f"class folders, {counted} in {len(classes)} classes (labels=none to ignore them)"
    return [Entry(path=path, origin=str(folder)) for path in paths], f"folder, {counted}, no labels"


def _read_pattern(pattern: str, labels: LabelsMode) -> tuple[list[Entry], str]:
    if labels == "folders":
        raise UserError(f"{pattern} is a pattern, so labels=folders cannot be read from it; name the folder")
    matched = [path for path in glob.glob(pattern, recursive=True) if not Path(path).is_dir()]  # noqa: PTH207
    paths = sorted({_absolute(path) for path in matched if _is_video(Path(path).name)}, key=_path_key)
    if not paths:
        raise UserError(
            f"the pattern {pattern} matches {len(matched)} files, none of them a video "
            f"({', '.join(VIDEO_SUFFIXES)}); ** goes through subfolders"
        )
    return [Entry(path=path, origin=pattern) for path in paths], f"pattern, {len(paths)} videos, no labels"


def _refuse_twice(entries: Iterable[Entry]) -> None:
    first: dict[str, Entry] = {}
    for entry in entries:
        known = first.setdefault(entry.path, entry)
        if known is not entry:
            raise UserError(
                f"{entry.path} is named twice ({known.origin} and {entry.origin}), which would count it double; "
                "name it once"
            )


def _number_labels(entries: Sequence[Entry]) -> tuple[list[int | None], list[str] | None]:
    texts = {entry.label for entry in entries if isinstance(entry.label, str)}
    numbers = {entry.label for entry in entries if isinstance(entry.label, int)}
    if texts and numbers:
        raise UserError(
            f"some labels are text ({min(texts)!r}) and some are numbers ({min(numbers)}); "
            "give all sources the same kind of label, or use labels=none"
        )
    if not texts:
        return [entry.label if isinstance(entry.label, int) else None for entry in entries], None
    names = sorted(texts, key=natural_key)
    index = {name: number for number, name in enumerate(names)}
    return [index[entry.label] if isinstance(entry.label, str) else None for entry in entries], names
