"""A frame store in plain words, from its index columns alone. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from marey.core.commands import override_word
from marey.core.errors import UserError
from marey.evaluation.wording import aligned, count, short, size
from marey.pixels.lancefaults import refusing
from marey.pixels.storeformat import refuse_no_table

METADATA = b"marey"
NEEDED = ("episode_idx", "step_idx", "frame", "h", "w", "label")


def store_lines(path: Path) -> list[str]:
    """What a store holds, how it was made, and what to do with it.

    Raises UserError for an unfinished ingest and for a folder that is no Lance table.
    """
    unfinished = path.with_name(path.name + ".partial")
    if path.name.endswith(".partial") or (not path.exists() and unfinished.exists()):
        raise UserError(f"{path} is an unfinished ingest; run the same `marey ingest` command again to finish it")
    refuse_no_table(path)
    with refusing(lambda said: UserError(f"{path} is damaged ({said}); build it again with `marey ingest`")):
        return _described(path, lance.dataset(str(path)))


def _described(path: Path, table: Any) -> list[str]:
    names = table.schema.names
    missing = [name for name in NEEDED if name not in names]
    if missing:
        return [
            f"{path}: a Lance table of {count(table.count_rows(), 'row')}, and no frame store",
            *aligned([("columns", ", ".join(names)), ("lacks", ", ".join(missing))]),
        ]
    own = _own_metadata(table.schema)
    columns = ["episode_idx", "h", "w", "label"] + (["source"] if "source" in names else [])
    index = table.to_table(columns=columns)
    episodes, lengths = np.unique(index["episode_idx"].to_numpy(), return_counts=True)
    rate = own.get("rate")
    frames = index.num_rows
    hours = f", {_time(frames / rate)} at {short(rate)} frames/s" if rate else ", frames/s not recorded"
    rows = [
        ("episodes", f"{len(episodes):,}, {_span(lengths)} frames each"),
        ("frames", f"{frames:,}{hours}"),
        ("pictures", _pictures(index, own)),
        ("videos", _videos(index, own)),
        ("labels", _labels(index, own.get("label_names"))),
        ("on disk", size(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))),
        ("made by", "`marey ingest`" if own else "another program: only the method's columns are relied on"),
        ("train", _train_command(path)),
    ]
    return [f"{path}: a frame store", *aligned(rows)]


def _train_command(path: Path) -> str:
    try:
        return f"marey train data=custom {override_word('data.train', str(path))}"
    except UserError as error:
        return str(error)


def _own_metadata(schema: pa.Schema) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(METADATA)
    found = json.loads(raw) if raw else {}
    return found if isinstance(found, dict) else {}


def _span(values: Any) -> str:
    low, high = int(values.min(initial=0)) if not len(values) else int(values.min()), int(values.max(initial=0))
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def _pictures(index: pa.Table, own: dict[str, Any]) -> str:
    h, w = index["h"].to_numpy(), index["w"].to_numpy()
    sizes, counts = np.unique(np.stack([h, w]), axis=1, return_counts=True)
    commonest = counts.argmax() if len(counts) else 0
    text = f"{sizes[0][commonest]} x {sizes[1][commonest]}" if len(counts) else "none"
    others = f" and {count(len(counts) - 1, 'other size')}" if len(counts) > 1 else ""
    quality = f", JPEG quality {own['quality']}" if own.get("quality") else ""
    return text + others + quality


def _videos(index: pa.Table, own: dict[str, Any]) -> str:
    if "source" not in index.column_names:
        return "not recorded"
    found = len(index["source"].unique())
    refused = own.get("refused") or 0
    return f"{found:,}" + (f"; {count(refused, 'file')} refused (named in the ingest's report)" if refused else "")


def _labels(index: pa.Table, label_names: list[str] | None) -> str:
    values = index["label"].drop_null().unique().to_pylist()
    values = sorted(value for value in values if value >= 0)
    if not values:
        return "none"
    words = [label_names[v] if label_names and v < len(label_names) else str(v) for v in values[:8]]
    return f"{count(len(values), 'class', 'classes')}: {', '.join(words)}" + (", ..." if values[8:] else "")
