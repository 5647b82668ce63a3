"""Hugging Face ``datasets`` on disk: folders of ``save_to_disk`` (Arrow) and Parquet files, with a column of videos."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from marey.core.errors import UserError
from marey.pixels.files import footage_of, media
from marey.pixels.listfile import Entry
from marey.pixels.media import Unreadable
from marey.pixels.sourceformat import Request, SourceFormat
from marey.pixels.videotable import Row, rows_of

STATE, SPLITS = "state.json", "dataset_dict.json"
TEXT_COLUMNS = ("text", "caption")


def _read(request: Request) -> tuple[list[Entry], str]:
    files = [file for path in request.paths for file in _files(Path(path))]
    entries: list[Entry] = []
    columns: list[str] = []
    for file in files:
        try:
            column, rows = rows_of(file, request.source, request.part)
        except Unreadable as error:
            entries.append(Entry(path=file, origin=request.source, fault=str(error)))
            continue
        columns.append(column)
        entries += [_entry(file, number, row, request.source) for number, row in enumerate(rows)]
    if not entries:
        raise UserError(f"{request.source} has no rows; give a dataset that has some")
    labelled, texts = sum(e.label is not None for e in entries), sum(bool(e.extra.get("text")) for e in entries)
    named = "".join(f", column {column}" for column in dict.fromkeys(columns))
    return entries, (
        f"Hugging Face dataset{named}, {len(files)} file{'s' * (len(files) != 1)}, {len(entries)} videos, "
        f"{labelled} with a label, {texts} with a text"
    )


def _files(path: Path) -> list[str]:
    """Data files of a dataset: the file itself, or what a saved folder lists."""
    if not path.is_dir():
        return [str(path)]
    if (path / SPLITS).is_file():
        splits = _json(path / SPLITS).get("splits")
        if not isinstance(splits, list) or not splits:
            raise UserError(f"{path / SPLITS} lists no splits; save the dataset again")
        return [file for split in splits for file in _saved(_beside(path / SPLITS, split))]
    return _saved(path)


def _saved(folder: Path) -> list[str]:
    listed = _json(folder / STATE).get("_data_files")
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{folder / STATE} lists no data files; save the dataset again")
    names = [item.get("filename") if isinstance(item, dict) else None for item in listed]
    return [str(_beside(folder / STATE, name)) for name in names]


def _json(where: Path) -> dict[str, Any]:
    try:
        found = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read ({error}); save the dataset again") from None
    return found if isinstance(found, dict) else {}


def _beside(listing: Path, name: Any) -> Path:
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        raise UserError(f"{listing} names {name!r}, which is nothing beside it; save the dataset again")
    return listing.parent / name


def _entry(file: str, number: int, row: Row, source: str) -> Entry:
    extra = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.others.items()}
    text = next((extra[name] for name in TEXT_COLUMNS if extra.get(name)), None)
    entry = _video(f"{file}#row-{number}", row, Path(file).parent)
    return entry._replace(label=row.label, extra=extra | ({"text": text} if text else {}), origin=source)


def _video(name: str, row: Row, folder: Path) -> Entry:
    if row.blob is not None:
        animated = (row.path or "").lower().endswith(".webp")
        return Entry(path=name, footage=media(f"{name}.webp" if animated else name, row.blob))
    if row.path is None or "\0" in row.path:
        return Entry(path=name, fault="its row holds neither bytes nor a path")
    # As for a list: beside the file that names it, then in the working directory.
    places = [os.path.abspath(base / row.path) for base in (folder, Path())]  # noqa: PTH100
    found = next((place for place in places if os.path.lexists(place)), None)
    if found is None:
        where = "looked beside the dataset and in the working directory"
        return Entry(path=name, fault=f"its row names {row.path}, which does not exist ({where})")
    return Entry(path=found, footage=footage_of(found))


def _marks(folder: Path) -> bool:
    return (folder / SPLITS).is_file() or ((folder / STATE).is_file() and (folder / "dataset_info.json").is_file())


FORMAT = SourceFormat(
    title="a Hugging Face dataset",
    read=_read,
    suffixes=(".parquet", ".arrow"),
    marks=_marks,
    part="column",
)
