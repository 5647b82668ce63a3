"""Lists of videos: CSV with a header (``path,label``), and lines of ``path label`` read from the right."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from marey.core.errors import UserError
from marey.pixels.footage import Footage
from marey.pixels.media import expanded

LIST_SUFFIXES = (".csv", ".txt", ".tsv", ".list")
_LARGEST_LABEL = 2**63 - 1


class Entry(NamedTuple):
    """A video as a source names it: absolute path, label as written (text or number), and where that was.

    ``footage`` where it is not simply what stands at the path; ``fault``: why it cannot be read, if that is known.
    """

    path: str
    label: str | int | None = None
    extra: dict[str, str] = {}  # noqa: RUF012 (never changed)
    origin: str = ""
    footage: Footage | None = None
    fault: str | None = None


class _Row(NamedTuple):
    line: int
    path: str
    label: str
    extra: dict[str, str]


def read_list(path: Path) -> tuple[list[Entry], str]:
    """Entries of a list, and one phrase saying how it was read.

    With a header naming a ``path`` column it is a CSV (quoted fields, further columns kept as text). Otherwise each
    line is ``path label``, parsed from the right (the last tab where there is one), so that a path may hold spaces,
    or a path alone. Relative paths are looked up beside the list, then in the working directory. A path that is
    nowhere, and a line that names one file as a whole and another as ``path label``, are each a ``UserError`` with the
    line number. Labels are numbers if all of them are, else text; an empty one (or -1) means unlabelled.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save the list as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    delimiter = _header_delimiter(text)
    if delimiter is not None:
        rows, how = list(_csv_rows(path, text, delimiter)), "CSV with a header"
    else:
        rows, how = list(_space_rows(path, text)), "lines of `path label`"
    if not rows:
        raise UserError(f"{path} lists no videos; write lines of `path label`, or a CSV with the header path,label")
    found = [_locate(path, row.path) for row in rows]
    missing = [row for row, where in zip(rows, found, strict=True) if where is None]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        hint = "" if delimiter or "," not in missing[0].path else "; a comma-separated list needs the header path,label"
        raise UserError(
            f"{path}, line {missing[0].line}: {missing[0].path} does not exist{more}; "
            f"relative paths are looked up beside the list, then in the working directory{hint}"
        )
    labels = _typed([row.label for row in rows], path, [row.line for row in rows])
    entries = [
        Entry(path=where or "", label=label, extra=row.extra, origin=f"{path}, line {row.line}")
        for row, where, label in zip(rows, found, labels, strict=True)
    ]
    labelled = sum(label is not None for label in labels)
    return entries, f"{how}, {len(entries)} videos, {labelled} with a label"


def _header_delimiter(text: str) -> str | None:
    first = next((line for line in io.StringIO(text) if line.strip()), "")
    for delimiter in (",", "\t", ";"):
        names = [name.strip().lower() for name in next(csv.reader([first], delimiter=delimiter))]
        if "path" in names and (len(names) > 1 or first.strip().lower() == "path"):
            return delimiter
    return None


def _csv_rows(path: Path, text: str, delimiter: str) -> Iterator[_Row]:
    lines = list(io.StringIO(text, newline=""))
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    header: list[str] | None = None
    line = 1
    try:
        for fields in reader:
            # Else the rows that an open quote swallows would be lost without a word.
            odd = "".join(lines[line - 1 : reader.line_num]).count('"') % 2
            if odd and (reader.line_num > line or (header is not None and len(fields) != len(header))):
                raise UserError(f'{path}, line {line}: a quote (") is opened and never closed; close or remove it')
            if header is None:
                if any(fields):
                    header = [name.strip() for name in fields]
                    lowered = [name.lower() for name in header]
                    at, label_at = lowered.index("path"), lowered.index("label") if "label" in lowered else None
            elif any(field.strip() for field in fields):
                if len(fields) != len(header):
                    raise UserError(
                        f"{path}, line {line}: {len(fields)} fields where the header has {len(header)}; "
                        'put a path that holds a comma in double quotes ("")'
                    )
                extra = {
                    name: value
                    for index, (name, value) in enumerate(zip(header, fields, strict=True))
                    if index not in (at, label_at)
                }
                yield _Row(line, fields[at], fields[label_at].strip() if label_at is not None else "", extra)
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {line}: not a valid CSV ({error}); check the quotes") from None


def _space_rows(path: Path, text: str) -> Iterator[_Row]:
    first = True
    for number, raw in enumerate(io.StringIO(text), start=1):
        line = raw.strip()
        if not line:
            continue
        if first and line.lower().split() == ["path", "label"] and _file(path, "path") is None:
            first = False
            continue
        first = False
        yield _Row(number, *_path_and_label(path, number, line), {})


def _path_and_label(listing: Path, number: int, line: str) -> tuple[str, str]:
    """The line as a path and a label, or as a path alone, by which of the files there are."""
    whole = _unquote(line)
    readings = []
    for separator in ("\t", " "):
        name, _, label = line.rpartition(separator)
        if name.strip():
            readings.append((_unquote(name.strip()), label.strip()))
    split = next((reading for reading in readings if _file(listing, reading[0]) is not None), None)
    if _file(listing, whole) is not None:
        if split is not None and whole == line:
            raise UserError(
                f"{listing}, line {number}: both {whole!r} and {split[0]!r} are files, so where the path ends is "
                "unclear; put the path in double quotes"
            )
        return whole, ""  # a path alone, spaces and all
    if split is not None:
        return split
    if line[0] in "\"'" and line.count(line[0]) == 1:
        raise UserError(f"{listing}, line {number}: the quote ({line[0]}) is never closed; close or remove it")
    name, label = readings[0] if readings else (whole, "")
    folder = _locate(listing, name)
    if label and folder is not None:
        raise UserError(f"{listing}, line {number}: {whole} does not exist, and {folder} is no file; name a video file")
    return name, label


def _unquote(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text


def _places(listing: Path, name: str) -> list[str]:
    """Where a path of the list may be: beside it, then in the working directory."""
    if not name:
        return []
    return [os.path.abspath(base / expanded(name)) for base in (listing.parent, Path())]  # noqa: PTH100


def _locate(listing: Path, name: str) -> str | None:
    return next((where for where in _places(listing, name) if os.path.lexists(where)), None)


def _file(listing: Path, name: str) -> str | None:
    """As ``_locate``, but no folder. A dangling link counts: reading it says what is wrong with it."""
    return next((w for w in _places(listing, name) if os.path.lexists(w) and not Path(w).is_dir()), None)


def _typed(labels: list[str], path: Path, lines: list[int]) -> list[str | int | None]:
    given = [None if label in ("", "-1") else label for label in labels]
    if not all(re.fullmatch(r"[+-]?\d+", label) for label in given if label is not None):
        return list(given)
    numbers: list[str | int | None] = []
    for label, line in zip(given, lines, strict=True):
        if label is not None:
            if len(label.lstrip("+-0")) > 19 or int(label) > _LARGEST_LABEL:
                raise UserError(f"{path}, line {line}: label {label[:40]} is too large; use 0 to {_LARGEST_LABEL}")
            if int(label) < -1:
                raise UserError(f"{path}, line {line}: label {label} is negative; use 0, 1, ... or -1 for unlabelled")
        numbers.append(None if label is None or int(label) == -1 else int(label))
    return numbers
