"""WebDataset shards: tars in which the members of one name belong together (``a.mp4``, ``a.cls``, ``a.txt``).

Members are read where they lie, and nothing is ever unpacked: a name is only a name.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from marey.core.errors import UserError
from marey.pixels.files import media
from marey.pixels.footage import Span
from marey.pixels.listfile import Entry
from marey.pixels.media import VIDEO_SUFFIXES, Unreadable, regular_size
from marey.pixels.pictures import is_animated_webp
from marey.pixels.sourceformat import Request, SourceFormat

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
LARGEST_NOTE = 1 << 20
"""Bytes of a ``.cls``, ``.txt`` or ``.json`` member."""
LABEL_KEYS, TEXT_KEYS = ("label", "cls"), ("text", "caption")
# As WebDataset has it: the key runs to the first dot of the last part of the name.
_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)", re.DOTALL)


class _Sample:
    """Members of one key."""

    def __init__(self) -> None:
        self.videos: list[tuple[str, Span | None, str | None]] = []  # name, where, fault
        self.notes: dict[str, bytes] = {}
        self.fault: str | None = None


class _Notes(NamedTuple):
    label: str | None
    text: str | None
    extra: dict[str, str]


def _read(request: Request) -> tuple[list[Entry], str]:
    endings: Counter[str] = Counter()
    entries: list[Entry] = []
    for path in request.paths:
        if path.lower().endswith(COMPRESSED):
            raise UserError(
                f"{path} is compressed, so its members cannot be read where they lie; decompress it, and name the .tar"
            )
        entries += _shard(path, endings)
    if not entries:
        seen = ", ".join(f".{ending}" for ending, _ in endings.most_common(5)) or "nothing"
        raise UserError(
            f"{request.source} holds no video (its members end in {seen}); WebDataset shards of videos have members "
            f"that end in {', '.join(VIDEO_SUFFIXES)}"
        )
    entries = _number(entries)
    shards = f"{len(request.paths)} shard{'s' * (len(request.paths) != 1)}"
    labelled, texts = sum(e.label is not None for e in entries), sum("text" in e.extra for e in entries)
    return entries, f"WebDataset, {shards}, {len(entries)} videos, {labelled} with a label, {texts} with a text"


def _shard(path: str, endings: Counter[str]) -> list[Entry]:
    samples: dict[str, _Sample] = {}
    fault = None
    try:
        for member, at in _members(path):
            _sort(path, member, at, samples, endings)
    except Unreadable as error:
        fault = str(error)
    entries = [entry for sample in samples.values() for entry in _entries(path, sample)]
    return entries + ([Entry(path=path, origin=path, fault=fault)] if fault else [])


def _members(path: str) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Members and where their bytes begin. Raises ``Unreadable`` where the tar is damaged, after what came before."""
    size = regular_size(path)
    before, last = -1, ""
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                if member.size < 0 or member.offset <= before:
                    raise Unreadable(f"is damaged at byte {member.offset}; members from there on are lost")
                before, last = member.offset, member.name
                yield member, member.offset_data
                tar.members = []  # type: ignore[attr-defined]  # it would keep every header
            at = tar.offset
    except Unreadable:
        raise
    except tarfile.ReadError as error:
        if before < 0:
            raise Unreadable(f"is no tar archive ({error})") from None
        raise Unreadable(f"was cut short or is damaged ({error}); members after {last} are lost") from None
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror or error}") from None
    # Headers from strangers: tarfile meets them with whatever error its arithmetic runs into.
    except Exception as error:
        raise Unreadable(f"is damaged ({type(error).__name__}: {error}); later members are lost") from None
    if at + tarfile.BLOCKSIZE > size:
        raise Unreadable("was cut short (a tar's end mark is missing), and members may be lost")
    if any(_bytes(path, at, tarfile.BLOCKSIZE)):
        raise Unreadable(f"is damaged at byte {at}; members from there on are lost")


def _sort(path: str, member: tarfile.TarInfo, at: int, samples: dict[str, _Sample], endings: Counter[str]) -> None:
    named = _NAME.fullmatch(member.name)
    if named is None or member.isdir():
        return
    key, ending = named[1], named[2].lower()
    endings[ending] += 1
    is_video = f".{ending}".endswith(VIDEO_SUFFIXES) or (
        f".{ending}".endswith(".webp") and is_animated_webp(_bytes(path, at, 21))
    )
    if not is_video and ending not in ("cls", "txt", "json"):
        return
    sample = samples.setdefault(key, _Sample())
    fault = _fault(member)
    if not is_video:
        if fault or ending in sample.notes or member.size > LARGEST_NOTE:
            why = fault or ("appears twice" if ending in sample.notes else "is larger than a megabyte")
            sample.fault = sample.fault or f"its member {member.name} {why}"
        else:
            sample.notes[ending] = _bytes(path, at, member.size)
        return
    if fault is None and any(name == member.name for name, _, _ in sample.videos):
        fault = "appears twice in its shard, and which of the two is meant is unclear"
    sample.videos.append((member.name, None if fault else Span(path, at, member.size), fault))


def _fault(member: tarfile.TarInfo) -> str | None:
    if member.name.startswith("/") or ".." in member.name.split("/") or "\0" in member.name:
        return "has a name that points outside its shard"
    if member.issparse():
        return "is stored with holes left out; write the shard without --sparse"
    return None if member.isreg() else "is a link or a device, not a regular file"


def _entries(path: str, sample: _Sample) -> Iterator[Entry]:
    notes, fault = _Notes(None, None, {}), sample.fault
    try:
        notes = _notes(sample.notes)
    except ValueError as error:
        fault = fault or f"its member {error}"
    extra = notes.extra | ({"text": notes.text} if notes.text is not None else {})
    seen: set[str] = set()
    for name, span, own in sample.videos:
        place = f"{path}/{name}".replace("\0", "\\0")
        if place in seen:
            place += " (again)"
        seen.add(place)
        why = own or fault
        footage = None if span is None or why else media(place, span)
        yield Entry(path=place, label=notes.label, extra=extra, origin=path, footage=footage, fault=why)


def _notes(members: dict[str, bytes]) -> _Notes:
    """Label, text and further fields. ValueError naming the member that is at fault."""
    fields: dict[str, Any] = {}
    if "json" in members:
        try:
            fields = json.loads(members["json"])
        except (ValueError, RecursionError):
            fields = []  # type: ignore[assignment]
        if not isinstance(fields, dict):
            raise ValueError(".json is not a JSON object")
    words = {}
    for ending in ("cls", "txt"):
        if ending in members:
            try:
                words[ending] = members[ending].decode("utf-8-sig").strip()
            except UnicodeDecodeError:
                raise ValueError(f".{ending} is not UTF-8 text") from None
    label = words.get("cls") or next((_word(fields[key]) for key in LABEL_KEYS if _plain(fields.get(key))), None)
    text = words.get("txt") or next((_word(fields[key]) for key in TEXT_KEYS if isinstance(fields.get(key), str)), None)
    extra = {key: _word(value) for key, value in fields.items() if _plain(value) and key not in LABEL_KEYS + TEXT_KEYS}
    return _Notes(label or None, text or None, extra)


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(entries: list[Entry]) -> list[Entry]:
    """Labels as numbers where all of them are, -1 meaning none."""
    words = [entry.label for entry in entries if isinstance(entry.label, str) and entry.label != "-1"]
    numeric = all(re.fullmatch(r"\+?[0-9]{1,18}", word) for word in words)
    return [
        entry._replace(label=None if entry.label in (None, "-1") else int(entry.label) if numeric else entry.label)
        for entry in entries
    ]


def _bytes(path: str, start: int, length: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return os.pread(file.fileno(), max(0, length), start)
    except (OSError, OverflowError):  # a header that points nowhere
        return b""


FORMAT = SourceFormat(title="WebDataset shards", read=_read, suffixes=(".tar", *COMPRESSED))
