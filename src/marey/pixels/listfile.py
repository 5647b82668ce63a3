"""Lists of videos: CSV with a header (``path,label``), and lines of ``path label`` read from the right."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from marey.core.errors import UserError

LIST_SUFFIXES = (".csv", ".txt", ".tsv", ".list")


class Entry(NamedTuple):
    """A video as a source names it: absolute path, label as written (text or number), and where that was."""

    path: str
    label: str | int | None = None
    extra: dict[str, str] = {}  # noqa: RUF012 (never changed)
    origin: str = ""


class _Row(NamedTuple):
    line: int
    path: str
    label: str
    extra: dict[str, str]


def read_list(path: Path) -> tuple[list[Entry], str]:
    """Entries of a list, and one phrase saying how it was read.

    With a header naming a ``path`` column it is a CSV (quoted fields, further columns kept as text). Otherwise each
    line is ``path label``, parsed from the right, so that a path may hold spaces. Relative paths are looked up
    beside the list, then in the working directory; one that is nowhere is a ``UserError`` with its line number.
    Labels are numbers if all of them are, else text; an empty one (or -1) means unlabelled.
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
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    header: list[str] | None = None
    line = 1
    try:
        for fields in reader:
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
    for number, raw in enumerate(io.StringIO(text), start=1):
        line = raw.strip()
        if not line:
            continue
        name, _, label = line.rpartition(" ") if " " in line else line.rpartition("\t")
        name = _unquote(name.strip())
        if not name or (_locate(path, name) is None and _locate(path, _unquote(line)) is not None):
            name, label = _unquote(line), ""  # a path alone, spaces and all
        yield _Row(number, name, label, {})


def _unquote(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text


def _locate(listing: Path, name: str) -> str | None:
    if not name:
        return None
    for base in (listing.parent, Path()):
        where = os.path.abspath(base / Path(name).expanduser())  # noqa: PTH100
        if os.path.lexists(where):
            return where
    return None


def _typed(labels: list[str], path: Path, lines: list[int]) -> list[str | int | None]:
    given = [label for label in labels if label]
    if not all(label.lstrip("+-").isdecimal() for label in given):
        return [label or None for label in labels]
    numbers: list[str | int | None] = []
    for label, line in zip(labels, lines, strict=True):
        number = int(label) if label else -1
        if number < -1:
            raise UserError(f"{path}, line {line}: label {number} is negative; use 0, 1, ... or -1 for unlabelled")
        numbers.append(None if number == -1 else number)
    return numbers
