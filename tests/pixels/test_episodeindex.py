"""A store's index read batch by batch is the one read whole, and names the same fault."""

from __future__ import annotations

import tempfile
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.pixels import episodeindex
from marey.pixels.episodeindex import INDEX_COLUMNS, EpisodeIndex

Rows = list[list[int | None]]


@st.composite
def tables(draw: st.DrawFn) -> Rows:
    rows: Rows = []
    for episode in range(draw(st.integers(1, 6))):
        label = draw(st.one_of(st.none(), st.integers(-1, 2)))
        height, first = draw(st.integers(1, 3)), draw(st.integers(0, 2))
        rows += [[2 * episode, first + i, height, height + 1, label] for i in range(draw(st.integers(1, 6)))]
    place, column = draw(st.integers(0, len(rows) - 1)), draw(st.integers(0, 4))
    match draw(st.sampled_from(["as written", "shuffled", "one value changed", "one row twice"])):
        case "shuffled":
            rows = draw(st.permutations(rows))
        case "one value changed":
            rows[place][column] = draw(st.sampled_from([0, 99]))
        case "one row twice":
            rows.insert(draw(st.integers(0, len(rows))), list(rows[place]))
    return rows


def outcome(read: object, *arguments: object) -> dict[str, object] | str:
    try:
        found = read(*arguments)  # type: ignore[operator]
    except UserError as refused:
        return str(refused)
    return {key: None if value is None else (str(value.dtype), value.tolist()) for key, value in vars(found).items()}


@given(rows=tables())
@settings(max_examples=60, deadline=None)
def test_batch_by_batch_it_is_the_index_of_the_whole_table(rows: Rows) -> None:
    columns = {name: pa.array([row[i] for row in rows], pa.int64()) for i, name in enumerate(INDEX_COLUMNS)}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(episodeindex, "INDEX_ROWS", 5)
        path = Path(folder) / "a.lance"
        dataset = lance.write_dataset(pa.table(columns), str(path), max_rows_per_file=9)
        assert outcome(EpisodeIndex.read, dataset, path) == outcome(EpisodeIndex._whole, dataset, path)


def test_rows_in_order_are_never_held_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episode, step = np.repeat(np.arange(40), 25), np.tile(np.arange(25), 40)
    numbers = dict(zip(INDEX_COLUMNS, (episode, step, episode % 3 + 1, episode % 2 + 1, episode % 5), strict=True))
    dataset = lance.write_dataset(pa.table(numbers), str(tmp_path / "a.lance"))
    monkeypatch.setattr(episodeindex, "INDEX_ROWS", 64)
    taken: list[int] = []
    read = episodeindex._numbers

    def counting(column: pa.Array) -> np.ndarray:
        taken.append(len(column))
        return read(column)

    monkeypatch.setattr(episodeindex, "_numbers", counting)
    index = EpisodeIndex.read(dataset, tmp_path)
    assert max(taken) <= 64
    assert sum(taken) == 1000 * len(INDEX_COLUMNS)
    assert index.order is None
    assert index.lengths.tolist() == [25] * 40
    assert index.heights.tolist() == [i % 3 + 1 for i in range(40)]
    assert index.labels is not None
    assert index.labels.tolist() == [i % 5 for i in range(40)]
