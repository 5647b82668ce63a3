"""Manifests: one clip a row, CSV or Parquet, every row checked when the file is read.

Columns: ``clip_id, path, length_frames`` are required; ``height, width`` (latent rows and columns),
``physical_key`` (the recording a clip was cut from), ``text``, ``start`` (first latent frame to use), ``fps``
(latent frames per second), ``sha256`` and ``augmentation`` are optional. Paths are relative to the manifest's
folder. Every error names file, row (1 is the first after the header) and column.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.core.mixing import text_keys
from marey.latents.columns import (
    check_columns,
    fail,
    rates,
    read_csv,
    read_parquet,
    refuse,
    texts,
    whole_numbers,
)

MANIFESTS = (".csv", ".parquet", ".pq")
"""How a manifest's name ends."""
SUFFIXES = (".pt", ".safetensors", ".npy")
_TEXTS = ("clip_id", "path", "physical_key", "text", "sha256", "augmentation")
_COUNTS = {"length_frames": 2, "height": 1, "width": 1, "start": 0}
SPLIT_SALT = "marey split 1"


def recording_of(file: str) -> str:
    """The ``physical_key`` of what was cut from ``file``: its name and its folder's.

    No more of the path, so that the split stays as it is where a whole collection moves. Two recordings that share
    both names share a side, which divides none of them.
    """
    return "/".join(Path(file).parts[-2:])


class Clip(NamedTuple):
    """One row, as a reader of its tensor needs it; None where the manifest does not say."""

    clip_id: str
    path: str
    length_frames: int
    height: int | None
    width: int | None
    physical_key: str
    text: str | None
    sha256: str | None


@dataclass(frozen=True, eq=False)
class Manifest:
    """The checked rows of one manifest, by column: texts in Arrow, numbers in NumPy, one entry a row."""

    path: Path
    table: pa.Table
    """The text columns that exist, by name; a missing value is null."""
    length_frames: NDArray[np.int64]
    start: NDArray[np.int64]
    height: NDArray[np.int64] | None
    width: NDArray[np.int64] | None
    fps: NDArray[np.float64] | None
    clip_keys: NDArray[np.uint64]
    """A stable hash of each ``clip_id``."""
    ignored_columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.length_frames)

    @property
    def nbytes(self) -> int:
        """Bytes held by all columns."""
        arrays = (self.length_frames, self.start, self.height, self.width, self.fps, self.clip_keys)
        return int(self.table.nbytes) + sum(a.nbytes for a in arrays if a is not None)

    def texts(self, column: str, rows: NDArray[np.int64] | None = None) -> list[str | None]:
        """The values of a text column at ``rows`` (all rows when None); None where absent."""
        if column not in self.table.column_names:
            return [None] * (len(self) if rows is None else len(rows))
        values = self.table.column(column)
        return list((values if rows is None else values.take(pa.array(rows))).to_pylist())

    def missing_texts(self) -> NDArray[np.bool_]:
        """bool ``[rows]``: which clips have no text."""
        if "text" not in self.table.column_names:
            return np.ones(len(self), dtype=np.bool_)
        absent: NDArray[np.bool_] = self.table.column("text").is_null().to_numpy()
        return absent

    def clip(self, row: int) -> Clip:
        """Everything that one row says."""
        text = {name: self.table.column(name)[row].as_py() for name in self.table.column_names}
        return Clip(
            clip_id=text["clip_id"],
            path=str(self.path.parent / text["path"]),
            length_frames=int(self.length_frames[row]),
            height=None if self.height is None else int(self.height[row]),
            width=None if self.width is None else int(self.width[row]),
            physical_key=text.get("physical_key") or text["clip_id"],
            text=text.get("text"),
            sha256=text.get("sha256"),
        )

    def validation_rows(self, fraction: float) -> NDArray[np.bool_]:
        """bool ``[rows]``: which rows are held out; may be none or all (see :func:`hold_out`).

        A row's side follows from its ``physical_key`` (else its ``clip_id``) and a fixed salt alone, so
        adding clips never moves one, and clips of one recording are never on both sides.
        """
        assert 0 < fraction < 1, fraction
        ids = self.table.column("clip_id")
        if "physical_key" in self.table.column_names:
            ids = pc.coalesce(self.table.column("physical_key"), ids)
        keys = text_keys(ids.to_pylist(), salt=SPLIT_SALT)
        held_out: NDArray[np.bool_] = keys < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
        return held_out

    def select(self, keep: NDArray[np.bool_]) -> Manifest:
        """The same manifest with the rows where ``keep`` is true, in order."""

        def cut(values: Any) -> Any:
            return None if values is None else values[keep]

        return Manifest(
            path=self.path,
            table=self.table.filter(pa.array(keep)),
            length_frames=cut(self.length_frames),
            start=cut(self.start),
            height=cut(self.height),
            width=cut(self.width),
            fps=cut(self.fps),
            clip_keys=cut(self.clip_keys),
            ignored_columns=self.ignored_columns,
        )


def read_manifest(path: Path | str, *, check_files: bool = True) -> Manifest:
    """Read and check every row of ``path`` (``.csv``, ``.parquet`` or ``.pq``).

    ``check_files`` lists each folder that the manifest mentions once and refuses a row whose file is not
    there; nothing is opened. Raises UserError naming file, row and column for the first row that is wrong.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file}: no such manifest; give the path of a CSV or Parquet file.")
    raw = read_parquet(file) if file.suffix.lower() in (".parquet", ".pq") else read_csv(file)
    ignored = check_columns(file, raw.column_names)
    if raw.num_rows == 0:
        raise UserError(f"{file}: the manifest has no rows; write one clip per row under the header.")
    counts: dict[str, NDArray[np.int64]] = {}
    for name, least in _COUNTS.items():
        if name in raw.column_names:
            counts[name] = whole_numbers(file, name, raw.column(name), least)
    text = {name: texts(file, name, raw.column(name)) for name in _TEXTS if name in raw.column_names}
    fps = rates(file, raw.column("fps")) if "fps" in raw.column_names else None
    if ("height" in counts) != ("width" in counts):
        there, absent = ("height", "width") if "height" in counts else ("width", "height")
        raise UserError(f"{file}: it has a column {there} but none named {absent}; give both or neither.")
    length = counts["length_frames"]
    start = counts.get("start", np.zeros(len(length), dtype=np.int64))
    refuse(file, "start", start >= length, start, "is not below the clip's length_frames")
    manifest = Manifest(
        path=file,
        table=pa.table(text),
        length_frames=length,
        start=start,
        height=counts.get("height"),
        width=counts.get("width"),
        fps=fps,
        clip_keys=text_keys(text["clip_id"].to_pylist()),
        ignored_columns=ignored,
    )
    _check_unique(manifest)
    _check_paths(manifest, exist=check_files)
    return manifest


def hold_out(manifests: Sequence[Manifest], fraction: float) -> list[NDArray[np.bool_]]:
    """Which rows of each manifest are held out. Raises UserError when either side of them all is empty."""
    sides = [manifest.validation_rows(fraction) for manifest in manifests]
    rows = np.concatenate(sides)
    for side, empty in (("validation", not rows.any()), ("training", bool(rows.all()))):
        if empty:
            raise UserError(
                f"{', '.join(str(manifest.path) for manifest in manifests)}: holding out {fraction:g} of {len(rows)} "
                f"clips by physical_key leaves the {side} side empty; name a validation manifest (data.val) or set "
                "data.val_fraction."
            )
    return sides


def smallest_split(manifests: Sequence[Manifest], fractions: Sequence[float]) -> float | None:
    """The first of ``fractions`` that leaves neither side of all ``manifests`` empty; None where each does."""
    for fraction in fractions:
        rows = np.concatenate([manifest.validation_rows(fraction) for manifest in manifests])
        if rows.any() and not rows.all():
            return fraction
    return None


def _check_unique(manifest: Manifest) -> None:
    """No two rows may be the same clip from the same start."""
    order = np.lexsort((manifest.start, manifest.clip_keys))
    keys, starts = manifest.clip_keys[order], manifest.start[order]
    same = (keys[1:] == keys[:-1]) & (starts[1:] == starts[:-1])
    for i in np.flatnonzero(same):
        first, second = sorted((int(order[i]), int(order[i + 1])))
        clip = manifest.clip(second).clip_id
        if manifest.clip(first).clip_id == clip:
            raise fail(manifest.path, second + 1, "clip_id", f"{clip!r} is also row {first + 1}, with the same start")


def _check_paths(manifest: Manifest, *, exist: bool) -> None:
    paths = manifest.table.column("path").combine_chunks()
    pattern = r"(?i)\.(pt|safetensors|npy)$"
    bad = pc.invert(pc.match_substring_regex(paths, pattern)).to_numpy(zero_copy_only=False)
    refuse(manifest.path, "path", bad, paths, f"does not end in one of {', '.join(SUFFIXES)}")
    if not exist:
        return
    listings: dict[str, frozenset[str]] = {}
    base = str(manifest.path.parent)
    for row, path in enumerate(paths.to_pylist()):
        folder, name = os.path.split(path)
        names = listings.get(folder)
        if names is None:
            names = listings[folder] = _names(os.path.join(base, folder))  # noqa: PTH118
        if name not in names:
            raise fail(manifest.path, row + 1, "path", f"{path!r} does not exist beside the manifest")


def _names(folder: str) -> frozenset[str]:
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries)
    except OSError:
        return frozenset()
