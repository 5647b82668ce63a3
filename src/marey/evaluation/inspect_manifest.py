"""A manifest of stored latents in plain words, from its rows alone. No torch here."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from marey.core.errors import UserError
from marey.evaluation.wording import aligned, count, short
from marey.latents.codec_record import recorded_codec
from marey.latents.columns import REQUIRED
from marey.latents.manifest import Manifest, read_manifest

SPLIT_SHOWN = 0.05
"""The default of data.val_fraction."""


def is_manifest(columns: list[str]) -> bool:
    """Whether a table with these columns is meant as a manifest."""
    return all(name in columns for name in REQUIRED)


def csv_columns(path: Path) -> list[str]:
    """The header of a CSV. UserError for a file that is no text."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [name.strip() for name in next(csv.reader(file), [])]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a readable UTF-8 CSV ({error}); save it as CSV again") from error


def manifest_lines(path: Path) -> list[str]:
    """How many clips, how long, on which canvases, who made them, and what to do with them.

    Every row is checked, and so is that its file exists. Raises UserError as reading the manifest does.
    """
    manifest = read_manifest(path)
    frames = int(manifest.length_frames.sum())
    keys = manifest.texts("physical_key")
    ids = manifest.texts("clip_id")
    recordings = len({key or name for key, name in zip(keys, ids, strict=True)})
    held = int(manifest.validation_rows(SPLIT_SHOWN).sum())
    rows = [
        ("clips", f"{len(manifest):,} of {count(recordings, 'recording')}"),
        ("frames", f"{frames:,} latent frames, {_span(manifest.length_frames)} a clip{_hours(manifest)}"),
        ("canvas", _canvas(manifest)),
        ("texts", _texts(manifest)),
        ("codec", _codec(path)),
        (
            "held out",
            f"{count(held, 'clip')} of a run with data.val_fraction={SPLIT_SHOWN:g}, by a hash of the recording",
        ),
        ("ignored", ", ".join(manifest.ignored_columns)),
        ("train", f"marey train --config-name causal_video data.train={path}"),
    ]
    return [f"{path}: a manifest of stored latents", *aligned(rows)]


def _span(values: Any) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _hours(manifest: Manifest) -> str:
    if manifest.fps is None:
        return ", latent frames/s not recorded"
    seconds = float((manifest.length_frames / manifest.fps).sum())
    time = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
    rates = sorted(set(manifest.fps.tolist()))
    return f", {time} at {short(rates[0])}" + (f" to {short(rates[-1])}" if rates[1:] else "") + " a second"


def _canvas(manifest: Manifest) -> str:
    if manifest.height is None or manifest.width is None:
        return "not recorded; set data.shape_bucketed_batching=false, or add the columns height and width"
    sizes, counts = np.unique(np.stack([manifest.height, manifest.width]), axis=1, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    shown = [f"{sizes[0][i]} x {sizes[1][i]} ({counts[i]:,})" for i in order[:4]]
    return ", ".join(shown) + (f" and {len(counts) - 4} more" if len(counts) > 4 else "")


def _texts(manifest: Manifest) -> str:
    texts = [text for text in manifest.texts("text") if text is not None]
    return f"{count(len(texts), 'clip has one', 'clips have one')}, {len(set(texts)):,} different" if texts else "none"


def _codec(path: Path) -> str:
    recorded = recorded_codec(path.parent)
    if recorded is None:
        return "not recorded"
    name, options = recorded
    return f"{name} {json.dumps(options)}" if options else name
