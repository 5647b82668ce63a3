"""What a frame store looks like on disk: columns, metadata, names. Free of torch, for those who only write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from marey.core.errors import UserError

METADATA_KEY = "marey"
STORE_FORMAT = 1
MAX_PIXELS = 2**26
"""Of one frame: twice what 8K video has. A row that says more is damaged, and no memory is taken for it."""
REQUIRED = ("episode_idx", "step_idx", "frame", "h", "w", "label")
FRAME_SCHEMA = pa.schema(
    [
        ("episode_idx", pa.int32()),
        ("step_idx", pa.int32()),
        ("frame", pa.binary()),  # JPEG
        ("h", pa.int32()),
        ("w", pa.int32()),
        ("label", pa.int64()),  # null: unlabelled
        ("source", pa.string()),  # absolute path of the video file
        ("source_idx", pa.int32()),  # its position in the ingest's list
        ("source_step", pa.int32()),  # grid step in the file: shown source_step / rate seconds after its start
        ("time_s", pa.float64()),  # the frame's own time stamp in the file
        ("true_rate", pa.float64()),  # the file's average frames per second; null for a single frame
        ("extra", pa.string()),  # JSON object of the list's further columns; null where there are none
    ]
)


def partial_path(store: Path) -> Path:
    """Where an ingest into ``store`` keeps its unfinished work."""
    return store.with_name(store.name + ".partial")


BUILD_HINT = "build one with `marey ingest FOLDER OUT.lance`, or use data=demo to try without data"


def refuse_no_table(where: Path) -> None:
    """UserError for a folder or file that is no Lance table, before Lance says so in its own words."""
    if not (where / "_versions").is_dir():
        raise UserError(f"{where} is not a Lance table (it has no _versions folder); {BUILD_HINT}")


def is_store(path: Path | str) -> bool:
    """Whether a path should be read as a frame store: a ``.lance`` name, or a folder holding a Lance table."""
    path = Path(path)
    return path.name.rstrip("/").endswith(".lance") or (path / "_versions").is_dir()


def read_metadata(schema: pa.Schema, *, where: Path) -> dict[str, Any]:
    """Our JSON object of a table's schema; empty for a table made elsewhere.

    Raises ``UserError`` for a store of a newer format, and where what stands there is not what an ingest writes.
    """
    raw = (schema.metadata or {}).get(METADATA_KEY.encode())
    if not raw:
        return {}
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    good = isinstance(found, dict) and isinstance(found.get("format", STORE_FORMAT), int)
    if good and found.get("format", STORE_FORMAT) > STORE_FORMAT:
        raise UserError(
            f"{where} is a frame store of format {found['format']}, newer than this version of Marey reads "
            f"({STORE_FORMAT}); update Marey"
        )
    if not good or not _rate(found.get("rate")) or not _names(found.get("label_names")):
        raise UserError(f"{where}: its {METADATA_KEY!r} entry is not what `marey ingest` writes; {BUILD_HINT}")
    return dict(found)


def _rate(value: Any) -> bool:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (numeric and 0 < value < float("inf"))


def _names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))
