"""The frame store: a Lance table with one row per frame, read by episode and step.

Public columns come first: ``episode_idx, step_idx, frame, h, w, label``; a table with only those is a store. Ours
follow (``storeformat.FRAME_SCHEMA``), and the table's schema metadata holds one JSON object under ``marey``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from marey.core.errors import UserError, nearest
from marey.pixels.episodecolumns import files_of, texts_of
from marey.pixels.episodes import FrameRequest, SourceGoneError
from marey.pixels.jpegs import decode_frame, frame_size
from marey.pixels.lancefaults import refusing
from marey.pixels.media import expanded
from marey.pixels.storeformat import (
    BUILD_HINT,
    MAX_PIXELS,
    REQUIRED,
    partial_path,
    read_metadata,
    refuse_no_table,
)


class FrameStore:
    """An ``EpisodeSource`` over a Lance table. Make one with ``FrameStore.open``.

    Episodes are numbered 0.. in the order of their ``episode_idx``; a step is the position in an episode's sorted
    ``step_idx``. Attributes beyond the protocol: ``heights`` and ``widths`` ``[episodes]`` int32, ``metadata`` (our
    JSON object, empty for a store made elsewhere), ``label_names`` and ``texts`` (or None).
    """

    def __init__(
        self,
        *,
        path: str,
        name: str,
        version: str,
        table_version: int,
        index: EpisodeIndex,
        files: list[str],
        texts: list[str | None] | None,
        metadata: dict[str, Any],
    ) -> None:
        self.path, self.name, self.version = path, name, version
        self.lengths: NDArray[np.int64] = index.lengths
        self.labels: NDArray[np.int64] | None = index.labels
        self.heights, self.widths = index.heights, index.widths
        self.files, self.texts = files, texts
        self.metadata = metadata
        self.rate: float | None = metadata.get("rate")
        self.label_names: list[str] | None = metadata.get("label_names")
        self._index = index
        self._table_version = table_version
        self._dataset: lance.LanceDataset | None = None
        self._pid: int | None = None

    @classmethod
    def open(cls, path: str | Path, *, name: str | None = None) -> FrameStore:
        """Open a store and read its index (numbers only; no frame is touched).

        Raises ``UserError`` where there is no store, an ingest is unfinished, a column is missing or of the wrong
        type, or an episode's rows are inconsistent (duplicate or missing steps, changing size or label).
        """
        where = expanded(path)
        dataset = _open_table(where)
        with refusing(lambda said: UserError(f"{where} is damaged ({said}); {BUILD_HINT}")):
            _check_columns(where, dataset.schema)
            metadata = read_metadata(dataset.schema, where=where)
            index = EpisodeIndex.read(dataset, where)
            names = metadata.get("label_names")
            if names is not None and index.labels is not None and index.labels.max() >= len(names):
                raise UserError(f"{where} has label {index.labels.max()} and names for {len(names)}; {BUILD_HINT}")
            return cls(
                path=str(where.absolute()),
                name=name or where.name.removesuffix(".lance"),
                version=_identity(dataset),
                table_version=dataset.version,
                index=index,
                files=files_of(dataset, index.first_rows(), index.ids),
                texts=texts_of(dataset, index.first_rows(), metadata),
                metadata=metadata,
            )

    def dataset(self) -> lance.LanceDataset:
        """The table, opened in this process (Lance's threads do not survive a fork)."""
        if self._dataset is None or self._pid != os.getpid():
            with refusing(self._gone):
                dataset = lance.dataset(self.path, version=self._table_version)
                identity = _identity(dataset)
            # A store built anew in the same place may have the same version number, and other episodes.
            if identity != self.version:
                raise self._gone("another store lies there now")
            self._dataset, self._pid = dataset, os.getpid()
        return self._dataset

    def _bad_frame(self, request: FrameRequest, position: int, fault: str) -> UserError:
        return UserError(
            f"{self.path}: the frame at episode {self._index.ids[request.episode]}, step "
            f"{int(request.steps[position])} {fault}; ingest that video again or drop the episode"
        )

    def _unreadable(self, what: str) -> UserError:
        """One page that cannot be read costs its clips; a data file that is not there is the end of the store."""
        assert self._dataset is not None
        for fragment in self._dataset.get_fragments():
            for file in fragment.metadata.files:
                if not (Path(self.path) / "data" / file.path).is_file():
                    return self._gone(f"data/{file.path} is missing")
        return UserError(f"{self.path} cannot be read ({what}); build it again, or restore it from a copy")

    def _gone(self, what: str) -> SourceGoneError:
        return SourceGoneError(
            f"{self.path} changed or went away while it was in use ({what}); put it back as it was, or start again"
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_dataset": None, "_pid": None}

    def read(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor]:
        """uint8 ``[T, 3, H, W]`` per request (channels last in memory); one take over the table for all of them.

        Steps may repeat and come in any order. Raises ``UserError`` for a frame that does not decode or is not of
        the size its row says, ``IndexError`` for a step outside the episode.
        """
        rows = [self._index.rows(request.episode, request.steps) for request in requests]
        if not rows:
            return []
        wanted, places = np.unique(np.concatenate(rows), return_inverse=True)
        with refusing(self._unreadable):
            frames = self.dataset().take(wanted, columns=["frame"]).column("frame")
        encoded = [memoryview(value.as_buffer()).cast("B") if value.is_valid else memoryview(b"") for value in frames]
        clips: list[torch.Tensor] = []
        start = 0
        for request, own in zip(requests, rows, strict=True):
            place = places[start : start + len(own)]
            start += len(own)
            height, width = int(self.heights[request.episode]), int(self.widths[request.episode])
            # Before memory is taken for what the row claims; each frame is compared once more when it is decoded.
            claimed = frame_size(encoded[place[0]]) if len(place) else None
            if claimed is not None and claimed != (height, width):
                raise self._bad_frame(request, 0, f"is {claimed[0]}x{claimed[1]} where its row says {height}x{width}")
            clip = np.empty((len(own), height, width, 3), np.uint8)
            done: dict[int, int] = {}
            for position, slot in enumerate(place.tolist()):
                if slot in done:
                    clip[position] = clip[done[slot]]
                    continue
                done[slot] = position
                fault = decode_frame(encoded[slot], clip[position])
                if fault:
                    raise self._bad_frame(request, position, fault)
            clips.append(torch.from_numpy(clip).permute(0, 3, 1, 2))
        return clips


class EpisodeIndex:
    """Which rows of a table belong to which episode. Arrays ``[episodes]``, in ascending ``episode_idx``."""

    def __init__(
        self,
        *,
        ids: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        order: NDArray[np.int64] | None,
        labels: NDArray[np.int64] | None,
        heights: NDArray[np.int32],
        widths: NDArray[np.int32],
    ) -> None:
        self.ids, self.starts, self.lengths = ids, starts, lengths
        self.order = order  # None: rows already lie in (episode, step) order, as ours do
        self.labels, self.heights, self.widths = labels, heights, widths

    @classmethod
    def read(cls, dataset: lance.LanceDataset, where: Path) -> EpisodeIndex:
        """Read the numeric columns and check them; raises ``UserError``."""
        table = dataset.to_table(columns=["episode_idx", "step_idx", "h", "w", "label"])
        if table.num_rows == 0:
            raise UserError(
                f"{where} holds no frames; build it again with `marey ingest FOLDER {shlex.quote(str(where))}`"
            )
        episode, step, h, w = (_integers(table, name, where) for name in ("episode_idx", "step_idx", "h", "w"))
        label = _integers(table, "label", where, null=-1)
        order: NDArray[np.int64] | None = None
        ahead = np.diff(episode)
        if not ((ahead > 0) | ((ahead == 0) & (np.diff(step) > 0))).all():
            order = np.lexsort((step, episode))
            episode, step, h, w, label = (values[order] for values in (episode, step, h, w, label))
        new = np.flatnonzero(np.diff(episode)) + 1
        starts = np.concatenate([[0], new]).astype(np.int64)
        lengths = np.diff(np.append(starts, len(episode))).astype(np.int64)
        inside = np.ones(len(episode) - 1, bool)
        inside[new - 1] = False
        jumps = np.diff(step)
        _refuse(where, episode, inside & (jumps == 0), step, "appears twice")
        _refuse(where, episode, inside & (jumps != 1), step, "is followed by a gap")
        for values, what in ((h, "changes its height"), (w, "changes its width"), (label, "changes its label")):
            _refuse(where, episode, inside & (np.diff(values) != 0), step, what)
        huge = (h < 1) | (w < 1) | (h * w > MAX_PIXELS)
        _refuse(where, episode, huge, step, "has a size that no video frame has")
        labels = np.where(label[starts] < 0, -1, label[starts])
        return cls(
            ids=episode[starts],
            starts=starts,
            lengths=lengths,
            order=order,
            labels=labels if (labels >= 0).any() else None,
            heights=h[starts].astype(np.int32),
            widths=w[starts].astype(np.int32),
        )

    def first_rows(self) -> NDArray[np.int64]:
        """``[episodes]``: the table row of each one's first frame."""
        return self.starts if self.order is None else self.order[self.starts]

    def rows(self, episode: int, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Table rows of some steps of an episode."""
        steps = np.asarray(steps, np.int64)
        length = int(self.lengths[episode])
        if episode < 0 or (steps < 0).any() or (steps >= length).any():
            raise IndexError(f"steps {steps.tolist()} of episode {episode}, which has {length} frames")
        places: NDArray[np.int64] = self.starts[episode] + steps
        return places if self.order is None else self.order[places]


def _refuse(
    where: Path, episode: NDArray[np.int64], bad: NDArray[np.bool_], step: NDArray[np.int64], what: str
) -> None:
    if bad.any():
        at = int(bad.argmax())
        raise UserError(
            f"{where}: in episode {episode[at]}, step {step[at]} {what}; an episode needs one row for each "
            "consecutive step, all of one size and label"
        )


def _integers(table: pa.Table, name: str, where: Path, null: int | None = None) -> NDArray[np.int64]:
    column = table.column(name)
    if column.null_count and null is None:
        raise UserError(f"{where}: column {name} has {column.null_count} empty values; every frame needs one")
    if pa.types.is_null(column.type):
        return np.full(len(column), null, np.int64)
    if column.null_count:
        column = column.fill_null(null)
    return np.asarray(column.to_numpy(), np.int64)


def _open_table(where: Path) -> lance.LanceDataset:
    if not where.exists():
        if partial_path(where).exists():
            raise UserError(
                f"{where} is not finished: its ingest was stopped (see {partial_path(where)}); run the same "
                "`marey ingest` command again to go on"
            )
        raise UserError(f"{where} does not exist; {BUILD_HINT}")
    if where.name.endswith(".partial"):
        raise UserError(f"{where} is an unfinished ingest; run the same `marey ingest` command again to finish it")
    refuse_no_table(where)
    with refusing(lambda said: UserError(f"{where} cannot be opened as a Lance table ({said}); {BUILD_HINT}")):
        return lance.dataset(str(where))


def _check_columns(where: Path, schema: pa.Schema) -> None:
    for name in REQUIRED:
        if name not in schema.names:
            close = nearest(name, schema.names)
            hint = f" (there is {close})" if close else ""
            raise UserError(
                f"{where} has no column {name}{hint}; a frame store needs {', '.join(REQUIRED)}, one row per frame"
            )
        kind = schema.field(name).type
        if name == "frame":
            good, needs = pa.types.is_binary(kind) or pa.types.is_large_binary(kind), "JPEG or PNG bytes (binary)"
        else:
            good, needs = pa.types.is_integer(kind) or (name == "label" and pa.types.is_null(kind)), "whole numbers"
        if not good:
            raise UserError(f"{where}: column {name} holds {kind}, where a frame store needs {needs}")


def _identity(dataset: lance.LanceDataset) -> str:
    """Names of the data files are random, so two builds differ even where their sizes agree; a copy keeps them."""
    digest = hashlib.sha256(f"{dataset.version}".encode())
    for fragment in dataset.get_fragments():
        digest.update(json.dumps(fragment.metadata.to_json(), sort_keys=True, default=str).encode())
    return f"{dataset.version}-{digest.hexdigest()[:16]}"
