"""Which rows of a frame store belong to which episode, read without holding a number for every row."""

from __future__ import annotations

import shlex
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.pixels.storeformat import MAX_PIXELS

INDEX_COLUMNS = ("episode_idx", "step_idx", "h", "w", "label")
INDEX_ROWS = 1 << 18
"""Rows whose numbers are held at a time while a store is opened: it may have hundreds of millions."""


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
        heads = _heads(dataset)
        return cls._whole(dataset, where) if heads is None else cls._of_heads(*heads)

    @classmethod
    def _of_heads(cls, heads: NDArray[np.int64], rows: int) -> EpisodeIndex:
        starts, ids, _, heights, widths, labels = heads
        labels = np.where(labels < 0, -1, labels)
        return cls(
            ids=ids,
            starts=starts,
            lengths=np.diff(np.append(starts, rows)),
            order=None,
            labels=labels if (labels >= 0).any() else None,
            heights=heights.astype(np.int32),
            widths=widths.astype(np.int32),
        )

    @classmethod
    def _whole(cls, dataset: lance.LanceDataset, where: Path) -> EpisodeIndex:
        """From all rows at once: they may lie in any order, and the first one that is wrong is named."""
        table = dataset.to_table(columns=list(INDEX_COLUMNS))
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


def _heads(dataset: lance.LanceDataset) -> tuple[NDArray[np.int64], int] | None:
    """int64 ``[6, episodes]`` and the table's rows: of each episode its first row, then that row's index columns.

    None where rows are not in (episode, step) order, or something is wrong with one.
    """
    heads: list[NDArray[np.int64]] = []
    before, rows = np.empty((len(INDEX_COLUMNS), 0), np.int64), 0
    for batch in dataset.to_batches(columns=list(INDEX_COLUMNS), batch_size=INDEX_ROWS):
        columns = [batch.column(name) for name in INDEX_COLUMNS]
        if any(column.null_count for column in columns[:-1]):
            return None
        numbers = np.stack([_numbers(column) for column in columns])
        change = np.diff(np.concatenate([before, numbers], axis=1), axis=1)
        new = change[0] > 0
        goes_on = (change[0] == 0) & (change[1] == 1) & (change[2:] == 0).all(axis=0)
        if not (new | goes_on).all():
            return None
        first = np.flatnonzero(new) + 1 - before.shape[1]
        if rows == 0 and numbers.shape[1]:
            first = np.insert(first, 0, 0)  # the table's first row follows none
        heads.append(np.concatenate([first[None] + rows, numbers[:, first]]))
        rows += numbers.shape[1]
        before = numbers[:, -1:] if numbers.shape[1] else before
    if not rows:
        return None
    found = np.concatenate(heads, axis=1)
    height, width = found[3], found[4]
    if ((height < 1) | (width < 1) | (height * width > MAX_PIXELS)).any():
        return None
    return found, rows


def _numbers(column: pa.Array) -> NDArray[np.int64]:
    if pa.types.is_null(column.type):
        return np.full(len(column), -1, np.int64)
    return np.asarray((column.fill_null(-1) if column.null_count else column).to_numpy(), np.int64)


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
