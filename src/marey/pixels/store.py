"""The frame store: a Lance table with one row per frame, read by episode and step.

Public columns come first: ``episode_idx, step_idx, frame, h, w, label``; a table with only those is a store. Ours
follow (``storeformat.FRAME_SCHEMA``), and the table's schema metadata holds one JSON object under ``marey``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from marey.core.errors import UserError, nearest
from marey.pixels.buffers import Buffers
from marey.pixels.episodecolumns import files_of, texts_of
from marey.pixels.episodeindex import EpisodeIndex
from marey.pixels.episodes import FrameRequest, SourceGoneError
from marey.pixels.jpegs import decode_clip, frame_size
from marey.pixels.lancefaults import refusing
from marey.pixels.media import expanded
from marey.pixels.storeformat import (
    BUILD_HINT,
    REQUIRED,
    partial_path,
    read_metadata,
    refuse_no_table,
)

if TYPE_CHECKING:
    import torch


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
        self._buffers = Buffers()

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
        return self.__dict__ | {"_dataset": None, "_pid": None, "_buffers": Buffers()}

    def read(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor]:
        """uint8 ``[T, 3, H, W]`` per request (channels last in memory); one take over the table for all of them.

        Steps may repeat and come in any order. Raises ``UserError`` for a frame that does not decode or is not of
        the size its row says, ``IndexError`` for a step outside the episode.
        """
        import torch  # deferred: counting a store's episodes must not wait for it

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
            memory, _ = self._buffers.take(len(own) * height * width * 3)
            clip = memory.reshape(len(own), height, width, 3)
            fault = decode_clip(encoded, place.tolist(), clip)
            if fault is not None:
                raise self._bad_frame(request, *fault)
            clips.append(torch.from_numpy(clip).permute(0, 3, 1, 2))
        return clips


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
