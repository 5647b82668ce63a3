"""Chunks of finished files into the table: whole files, in the order of the plan, a few thousand rows at a time."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from marey.core.errors import UserError
from marey.pixels.ingest_worker import CHUNK_FRAMES
from marey.pixels.lancefaults import refusing
from marey.pixels.sources import VideoFile
from marey.pixels.storeformat import FRAME_SCHEMA, METADATA_KEY
from marey.pixels.unfinished import Unfinished

COMMIT_ROWS = 4096
COMMIT_BYTES = 256 * 2**20


class Committer:
    """Appends files in order. A commit is all or nothing, and the table's last row says how far it got.

    So chunks are deleted only after the commit that holds them, and a restart drops those that are already in.
    """

    def __init__(
        self, work: Unfinished, files: Sequence[VideoFile], *, episode_length: int, metadata: dict[str, Any]
    ) -> None:
        self._work, self._files, self._length = work, files, episode_length
        self._schema = FRAME_SCHEMA.with_metadata({METADATA_KEY: json.dumps(metadata)})
        self._tables: list[pa.Table] = []
        self._paths: list[Path] = []
        self._rows = self._bytes = 0
        self._dataset: lance.LanceDataset | None = None
        self._source, self._steps = -1, 0  # what the table holds: everything before, and this many rows of this one
        self.next_source = 0
        self.episodes = 0
        self.frames = 0
        if work.store.exists():
            damaged = f"{work.store} is damaged; delete {work.folder} and run the command again"
            with refusing(lambda said: UserError(f"{damaged} ({said})")):
                self._dataset = lance.dataset(str(work.store))
                rows = self._dataset.count_rows()
                last = self._dataset.take([rows - 1], columns=["source_idx", "source_step"]).to_pylist()[0]
            self._source, self._steps = last["source_idx"], last["source_step"] + 1

    def add(self, outcome: dict[str, Any]) -> None:
        """Append the file ``next_source``, whose outcome is known and whose chunks are complete."""
        source = self.next_source
        self.next_source += 1
        if "refused" in outcome:
            self._work.drop_chunks(source)
            return
        done = outcome["steps"] if source < self._source else self._steps if source == self._source else 0
        for number in range(-(-outcome["steps"] // CHUNK_FRAMES)):
            path = self._work.chunk(source, number)
            if number * CHUNK_FRAMES < done:
                path.unlink(missing_ok=True)
                continue
            self._tables.append(self._rows_of(path, source, outcome))
            self._paths.append(path)
            self._rows += self._tables[-1].num_rows
            self._bytes += self._tables[-1].nbytes
            if self._rows >= COMMIT_ROWS or self._bytes >= COMMIT_BYTES:
                self.flush()
        self.episodes += -(-outcome["steps"] // self._length)
        self.frames += outcome["steps"]

    def _rows_of(self, path: Path, source: int, outcome: dict[str, Any]) -> pa.Table:
        try:
            with pa.memory_map(str(path)) as file:
                chunk = pa.ipc.open_file(file).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(
                f"{path} is damaged or gone ({error}); delete {self._work.folder} and run the command again"
            ) from None
        video, count = self._files[source], chunk.num_rows
        steps = chunk.column("source_step").to_numpy()
        extra = json.dumps(video.extra, ensure_ascii=False) if video.extra else None
        columns = {name: chunk.column(name) for name in chunk.column_names} | {
            "episode_idx": (self.episodes + steps // self._length).astype(np.int32),
            "step_idx": (steps % self._length).astype(np.int32),
            "label": pa.array([video.label] * count, pa.int64()),
            "source": pa.array([video.path] * count, pa.string()),
            "source_idx": np.full(count, source, np.int32),
            "true_rate": pa.array([outcome["true_rate"]] * count, pa.float64()),
            "extra": pa.array([extra] * count, pa.string()),
        }
        return pa.table([columns[name] for name in self._schema.names], schema=self._schema)

    def flush(self) -> None:
        """Commit what is held, then delete its chunks."""
        if not self._tables:
            return
        table = pa.concat_tables(self._tables)
        with _explained(self._work):
            if self._dataset is None:
                self._dataset = lance.write_dataset(table, str(self._work.store), mode="create")
            else:
                self._dataset = lance.write_dataset(table, self._dataset, mode="append")
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._tables, self._paths, self._rows, self._bytes = [], [], 0, 0

    def finish(self, metadata: dict[str, Any]) -> None:
        """Commit the rest, replace the table's metadata, and drop old versions and what a kill left behind."""
        self.flush()
        assert self._dataset is not None
        with _explained(self._work):
            self._dataset.update_schema_metadata({METADATA_KEY: json.dumps(metadata)})
            self._dataset.cleanup_old_versions(older_than=datetime.timedelta(0), delete_unverified=True)


def _explained(work: Unfinished) -> contextlib.AbstractContextManager[None]:
    """Lance's errors in writing as a sentence with a way on."""
    return refusing(
        lambda said: UserError(
            f"cannot write to {work.folder}: {said}; make room, and run the same command again to go on"
        )
    )
