"""From what a person names (files, folders, patterns, lists, datasets) to videos with labels, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from marey.core.errors import UserError
from marey.pixels.files import footage_of
from marey.pixels.folders import absolute, class_of_each, walk
from marey.pixels.footage import Footage
from marey.pixels.listfile import LIST_SUFFIXES, Entry, read_list
from marey.pixels.media import VIDEO_SUFFIXES, expanded
from marey.pixels.naming import is_there, natural_key, split_part
from marey.pixels.patterns import braced, matches, numbered_names
from marey.pixels.sourceformat import Request, SourceFormat, format_of_file, format_of_folder, formats

LabelsMode = Literal["auto", "folders", "none"]


@dataclass(frozen=True)
class VideoFile:
    """A video to read. ``label`` is an index, None where there is none."""

    path: str
    """Its absolute path; for one within something larger, that path and what it is called there."""
    label: int | None = None
    extra: dict[str, str] = field(default_factory=dict)
    """Further columns of the list or dataset it came from; ``text`` is what it shows, in words."""
    footage: Footage | None = None
    fault: str | None = None
    """Why it cannot be read, where that is known before it is tried."""

    def frames(self) -> Footage:
        """Where its frames are."""
        return self.footage or footage_of(self.path)


@dataclass(frozen=True)
class Discovery:
    """Everything found, in order."""

    files: list[VideoFile]
    label_names: list[str] | None
    """Text of each label index; None where labels are plain numbers or absent."""
    readings: list[str]
    """One line per source: how it was understood."""


def discover(sources: Sequence[str], *, labels: LabelsMode = "auto") -> Discovery:
    """Videos of ``sources``, each a file, a folder, a pattern (``*`` or ``{000..009}``), a list (``.csv``, ``.txt``,
    ``.tsv``), or a dataset in one of ``sourceformat.formats()``, with ``:part`` behind it where a camera or a column
    must be chosen.

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
        VideoFile(path=entry.path, label=number, extra=entry.extra, footage=entry.footage, fault=entry.fault)
        for entry, number in zip(entries, numbers, strict=True)
    ]
    return Discovery(files=files, label_names=names, readings=readings)


def _read_source(source: str, labels: LabelsMode) -> tuple[list[Entry], str]:
    name, part = split_part(source)
    path = expanded(name)
    if not is_there(name):
        return _read_pattern(source, str(path), labels)
    if path.is_dir():
        found = format_of_folder(path)
        if found is not None:
            return _read_format(found, Request(source, [absolute(path)], part), labels)
        return _read_folder(source, path, labels, part)
    found = format_of_file(path.name)
    if found is not None:
        return _read_format(found, Request(source, [absolute(path)], part), labels)
    _no_part(source, part)
    if labels == "folders":
        raise UserError(f"{source} is not a folder, so labels=folders cannot be read from it; use labels=auto")
    if path.suffix.lower() in LIST_SUFFIXES:
        return read_list(path)
    return [Entry(path=absolute(path), origin=source)], "one video file"


def _no_part(source: str, part: str | None) -> None:
    if part is not None:
        raise UserError(
            f"{source} does not exist, and {source.rpartition(':')[0]} is no dataset with cameras or columns to "
            f"choose by :{part}; name what is there"
        )


def _read_format(found: SourceFormat, request: Request, labels: LabelsMode) -> tuple[list[Entry], str]:
    if labels == "folders":
        raise UserError(f"{request.source} is {found.title}, which has no class folders; use labels=auto")
    if request.part is not None and found.part is None:
        _no_part(request.source, request.part)
    dataset = request.source if request.part is None else request.source.rpartition(":")[0]
    return found.read(request._replace(source=dataset))


def _read_folder(source: str, folder: Path, labels: LabelsMode, part: str | None) -> tuple[list[Entry], str]:
    found = walk(folder)
    held = [form for form in formats() if found.of(form)]
    if not found.videos and len(held) > 1:
        raise UserError(f"{folder} holds {' and '.join(form.title for form in held)}; name the ones you mean")
    if not found.videos and not held:
        raise UserError(
            f"{folder} holds no video (looked in all its subfolders for {', '.join(VIDEO_SUFFIXES)}, animated .webp, "
            "images, .tar and .parquet); name another folder, or name the files themselves"
        )
    if not found.videos and not held[0].members:
        return _read_format(held[0], Request(source, found.of(held[0]), part), labels)
    _no_part(source, part)
    if found.videos:
        entries = [Entry(path=path, origin=str(folder)) for path in found.videos]
        counted = f"{len(entries)} video{'s' * (len(entries) != 1)}"
        left = [f"{len(found.of(form))} files of {form.title}" for form in held if form.suffixes]
        beside = f"; left out beside them: {', '.join(left)} (name those to read them)" if left else ""
    else:
        entries, counted = held[0].read(Request(str(folder), found.of(held[0])))
        beside = ""
    classes, phrase = class_of_each(folder, [entry.path for entry in entries], counted, labels)
    entries = [entry._replace(label=label) for entry, label in zip(entries, classes, strict=True)]
    return entries, phrase + beside


def _read_pattern(source: str, pattern: str, labels: LabelsMode) -> tuple[list[Entry], str]:
    named = numbered_names(pattern) if braced(pattern) else matches(pattern)
    if named is None:
        raise UserError(
            f"{source} does not exist; give a video file, a folder, a pattern in quotes or a list of paths "
            "(to try things out without data, `marey demo` makes its own)"
        )
    if labels == "folders":
        raise UserError(f"{source} is a pattern, so labels=folders cannot be read from it; name the folder")
    held = {id(form): form for name in named if (form := format_of_file(name)) is not None}
    if len(held) > 1 or (held and named.videos):
        titles = [form.title for form in held.values()] + ["videos"] * bool(named.videos)
        raise UserError(f"{source} matches {' and '.join(titles)}; give a pattern for each")
    if held:
        (form,) = held.values()
        return form.read(Request(source, list(named)))
    if not named.videos:
        raise UserError(
            f"the pattern {source} matches {len(named)} files, none of them a video "
            f"({', '.join(VIDEO_SUFFIXES)}); ** goes through subfolders, and images are read by their folder"
        )
    return [Entry(path=path, origin=source) for path in named.videos], f"pattern, {len(named.videos)} videos, no labels"


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
