"""Class labels for the episodes of a source: its own, or joined by file path from a CSV."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError, nearest


@dataclass(frozen=True)
class LabelSet:
    """One label per episode, as text, so that two sources agree by name and not by number."""

    name: str
    """What is classified: ``label``, or the CSV's column."""
    values: list[str | None]
    """``[episodes]``; None for an unlabelled one."""


def labels_of_source(labels: NDArray[np.int64] | None, label_names: Sequence[str] | None, *, where: str) -> LabelSet:
    """A source's own labels, by their names where it records names.

    Raises UserError, saying how to give labels, when the source has none.
    """
    if labels is None or not bool((np.asarray(labels) >= 0).any()):
        raise UserError(
            f"{where} has no labels to probe; give --labels FILE.csv --label-column NAME (a CSV with a "
            "`path` column), or ingest from class folders or a `path,label` CSV"
        )
    return LabelSet("label", [_name(int(value), label_names) for value in labels])


def _name(value: int, names: Sequence[str] | None) -> str | None:
    if value < 0:
        return None
    return names[value] if names is not None and value < len(names) else str(value)


def read_label_csv(path: Path, column: str) -> dict[str, str]:
    """Resolved video path -> label text, from a CSV with a header that has ``path`` and ``column``.

    Relative paths are taken from the CSV's folder. Raises UserError for a missing file or column, an empty
    table, and one path with two different labels.
    """
    if not path.is_file():
        raise UserError(f"--labels {path} is not a file; give a CSV with the columns `path` and {column!r}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = list(reader.fieldnames or [])
            for needed in ("path", column):
                if needed not in header:
                    close = nearest(needed, header)
                    hint = f"did you mean {close!r}?" if close else f"it has {', '.join(map(repr, header)) or 'none'}"
                    raise UserError(f"{path} has no column {needed!r}; {hint}")
            found: dict[str, str] = {}
            for number, row in enumerate(reader, start=2):
                video, label = (row["path"] or "").strip(), (row[column] or "").strip()
                if not video or not label:
                    continue
                key = _resolve(video, path.parent)
                if found.setdefault(key, label) != label:
                    raise UserError(
                        f"{path} line {number} gives {video} the {column} {label!r} after {found[key]!r}; "
                        "keep one of the two"
                    )
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a readable UTF-8 CSV ({error}); save it as CSV again") from error
    if not found:
        raise UserError(f"{path} has no row with both `path` and {column!r}; fill them in")
    return found


def labels_from_csv(files: Sequence[str], path: Path, column: str, *, where: str) -> LabelSet:
    """The CSV's labels joined to episodes by source file. UserError when it has no file of the source."""
    table = read_label_csv(path, column)
    values = [table.get(_resolve(file, Path.cwd())) for file in files]
    if all(value is None for value in values):
        raise UserError(
            f"none of the {len(set(files))} videos of {where} is in {path}: the source has {files[0]}, the "
            f"CSV has {next(iter(table))}; write its paths absolute, or relative to the CSV's folder"
        )
    return LabelSet(column, values)


def _resolve(path: str, folder: Path) -> str:
    return os.path.realpath(folder / Path(path).expanduser())


def check_classes(names: Sequence[str], files: Sequence[str], *, where: str, videos: int, per_class: int) -> None:
    """Refuse what a probe could not measure: too few videos, a single class, a class with too few videos.

    names, files: ``[rows]``, labelled rows only.
    """
    distinct = set(zip(names, files, strict=True))
    counts = Counter(name for name, _ in distinct)
    total = len(set(files))
    if total < videos:
        raise UserError(f"{where} has {total} labelled videos and a probe needs at least {videos}; label or add more")
    if len(counts) < 2:
        raise UserError(
            f"every labelled video of {where} has the label {next(iter(counts))!r}; a probe needs two classes"
        )
    rare = [(count, name) for name, count in sorted(counts.items()) if count < per_class]
    if rare:
        count, name = rare[0]
        more = f" (and {len(rare) - 1} more classes)" if len(rare) > 1 else ""
        raise UserError(
            f"the class {name!r} of {where} has {count} video{'s' if count > 1 else ''}{more} and a probe "
            f"needs {per_class} of each; add videos, or leave its label empty"
        )
